"""Real releases for the tests: SGLang's file and FlashInfer's source, out of fetched wheels.

A wheel that is in the cache (mlagen.codegen.fetch.cache_dir) needs no network; the others are
fetched with pip, once.
"""

from __future__ import annotations

from functools import cache

from mlagen.codegen.fetch import WheelTree, fetch
from mlagen.codegen.flashinfer.api import PlanApi
from mlagen.codegen.flashinfer.find import FlashInferSource, find_flashinfer
from mlagen.codegen.flashinfer.read import read_plan_api
from mlagen.codegen.patch import Patch, prepare
from mlagen.codegen.sglang.find import FoundTarget
from mlagen.codegen.spec import Spec, load_spec, shipped_spec

SGLANG_FILE = "sglang/srt/layers/attention/flashinfer_mla_backend.py"

#: The flashinfer-python that each SGLang release pins in its METADATA.
PINS = {
    "0.4.3.post4": "0.2.2.post1",
    "0.4.4": "0.2.3",
    "0.4.5": "0.2.3",
    "0.4.6": "0.2.3",
    "0.4.6.post5": "0.2.5",
    "0.4.7": "0.2.6.post1",
    "0.4.8": "0.2.6.post1",
    "0.4.9": "0.2.7.post1",
    "0.4.10": "0.2.9rc2",
    "0.5.1": "0.2.11.post3",
    "0.5.2": "0.3.1",
    "0.5.3": "0.4.0rc3",
    "0.5.4": "0.4.1",
    "0.5.5": "0.5.0",
    "0.5.6": "0.5.3",
    "0.5.7": "0.5.3",
    "0.5.8": "0.6.1",
    "0.5.9": "0.6.3",
    "0.5.10": "0.6.7.post2",
    "0.5.11": "0.6.8.post1",
    "0.5.12": "0.6.11.post1",
    "0.5.13": "0.6.12",
    "0.5.14": "0.6.12",
    "0.5.15": "0.6.12",
    "0.5.16": "0.6.14",
    "0.5.17": "0.6.15.post1",
    "0.5.18": "0.6.17",
    "0.5.19": "0.6.18",
    "0.5.20": "0.6.18",
    "0.5.21": "0.6.18",
    "0.5.22": "0.7.1",
    "0.5.23": "0.7.2",
}

#: FlashInfer has wheels from 0.5.0 on; older releases are source archives. 0.5.0 to 0.6.7 plan
#: MLA in the same way, so the first stands in for the pins that have no wheel.
OLDEST_WHEEL = "0.5.0"

#: SGLang release -> the nearest FlashInfer that has a wheel: its pin from 0.5.5 on.
NEAREST_WHEEL = {
    sglang: OLDEST_WHEEL if pin.startswith(("0.2.", "0.3.", "0.4.")) else pin
    for sglang, pin in PINS.items()
}


@cache
def sglang_tree(version: str) -> WheelTree:
    """The files of an SGLang release, such as `sglang/srt/speculative/spec_info.py`."""
    return WheelTree(fetch(f"sglang=={version}"))


@cache
def sglang_file(version: str) -> bytes:
    """`flashinfer_mla_backend.py` of an SGLang release, byte for byte."""
    data = sglang_tree(version).read(SGLANG_FILE)
    assert data is not None, f"sglang {version} has no {SGLANG_FILE}"
    return data


@cache
def flashinfer_source(version: str) -> FlashInferSource:
    """A FlashInfer release that has a wheel (0.5.0 and later)."""
    return find_flashinfer(version)


@cache
def plan_api(version: str) -> PlanApi:
    """What is read from that FlashInfer release."""
    return read_plan_api(flashinfer_source(version))


@cache
def shipped() -> Spec:
    """The variants that mlagen ships."""
    return load_spec(shipped_spec())


@cache
def patch_of(sglang: str, flashinfer: str) -> Patch:
    """A release of SGLang, patched for one of FlashInfer: once for all tests of a run."""
    found = FoundTarget(sglang_file(sglang), SGLANG_FILE, None)
    return prepare(found, shipped(), plan_api(flashinfer))
