"""A release of SGLang as a package that can be imported here, with its back end and ours.

`load("0.5.17", folder)` unpacks the release, puts mlagen's patches of `flashinfer_mla_backend.py`
(by the shipped spec, and with graphs that the GPU plans) beside the file as released, and imports
all of them from the real `sglang` package: the back end, the index kernels, `ForwardMode` and the
speculative inputs are the release's own. What has no part in planning and needs packages that are
not there, or weighs a lot, is a stand-in; both lists below say why. One release a process: they
share the name `sglang`.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from mlagen.codegen.fetch import fetch
from mlagen.codegen.flashinfer.find import find_flashinfer
from mlagen.codegen.flashinfer.read import read_plan_api
from mlagen.codegen.patch import prepare
from mlagen.codegen.sglang.find import FoundTarget

from ...specs import ON_DEVICE, Changes, spec_of
from .stand_ins import StandInFinder, absent, install, make

#: Names the folder that `tests/gpu/carry.py` fills; without it wheels are fetched.
FOLDER = "MLAGEN_GPU_SGLANG"

FILE = "sglang/srt/layers/attention/flashinfer_mla_backend.py"
MODULE = "sglang.srt.layers.attention.flashinfer_mla_backend"
#: Patched modules beside the original -> how their specs differ from the shipped one.
PATCHED = "flashinfer_mla_backend_mlagen"
PATCHED_ON_DEVICE = "flashinfer_mla_backend_mlagen_device"
PATCHES: dict[str, Changes] = {PATCHED: (), PATCHED_ON_DEVICE: ON_DEVICE}

#: Parts of SGLang that are imported on the way and take no part in attention planning.
REPLACED = (
    "sglang.lang",  # the front-end language
    "sglang.srt.configs",  # one module a model, each registered with transformers
    "sglang.srt.constrained",  # grammars of constrained decoding
    "sglang.srt.disaggregation",  # moving KV between prefill and decode servers
    "sglang.srt.entrypoints",  # HTTP servers
    "sglang.srt.function_call",  # parsing of tool calls
    "sglang.srt.layers.attention.nsa",  # another back end (sparse attention)
    "sglang.srt.layers.moe",  # experts
    "sglang.srt.layers.quantization",  # weights and KV in 8 or 4 bits
    "sglang.srt.managers.io_struct",  # messages between processes
    "sglang.srt.model_loader",  # reading weights
    "sglang.srt.models",  # models
    "sglang.srt.multimodal",  # images and sound
    "sglang.srt.utils.hf_transformers",  # reading of model configurations
    "sglang.srt.utils.hf_transformers_utils",  # the same, before 0.5.17
)

#: Below them, real.
KEPT = (
    "sglang.srt.configs.shared_experts",  # called for the default configuration (0.5.23)
    "sglang.srt.layers.moe.utils",  # asked how far batches are padded (0.5.20)
    "sglang.srt.layers.quantization.fp8_kernel",  # called when KV pools are imported (0.5.10)
)

#: Look for their C++ sources when imported, and compile them when called: none is.
JIT_PACKAGES = ("sglang/kernels/jit", "sglang/jit_kernel")

#: Other packages, where they are not installed.
IF_ABSENT = (
    "IPython",  # shows things in notebooks
    "dill",  # sends user code to the server
    "sgl_kernel",  # SGLang's compiled kernels: none is called in planning or by FlashInfer's MLA
    "starlette",  # HTTP
)


@dataclass(frozen=True)
class Loaded:
    """The modules of a release: `stock` as released, the others patched by mlagen for this
    FlashInfer, `device` so that the GPU plans what graphs of decode, drafts and verify need."""

    version: str
    stock: ModuleType
    patched: ModuleType
    device: ModuleType
    replaced: frozenset[str]


def flashinfer_folder() -> Path:
    """The folder of the installed `flashinfer` package, found without importing it."""
    spec = importlib.util.find_spec("flashinfer")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def archive(version: str) -> Path:
    """The carried archive of a release, or its wheel.

    Raises FileNotFoundError where a folder is named that has not got it.
    """
    folder = os.environ.get(FOLDER)
    if folder is None:
        return fetch(f"sglang=={version}")
    found = Path(folder) / f"sglang-{version}.zip"
    if not found.is_file():
        raise FileNotFoundError(f"{found} is missing; tests/gpu/carry.py makes it")
    return found


def unpack(version: str, folder: Path) -> None:
    """Write the release's Python files to `folder`, with patched files beside the original."""
    with zipfile.ZipFile(archive(version)) as files:
        names = [n for n in files.namelist() if n.startswith("sglang/") and n.endswith(".py")]
        files.extractall(folder, names)
    for package in JIT_PACKAGES:
        if (folder / package).is_dir():
            for part in ("include", "csrc"):
                (folder / package / part).mkdir(exist_ok=True)
    original = folder / FILE
    api = read_plan_api(find_flashinfer(str(flashinfer_folder())))
    target = FoundTarget(original.read_bytes(), FILE, None)
    for name, changes in PATCHES.items():
        patch = prepare(target, spec_of(changes), api)
        original.with_name(f"{name}.py").write_bytes(patch.patched)


def load(version: str, folder: Path) -> Loaded:
    """Unpack the release and import its back end, as released and patched."""
    unpack(version, folder)
    sys.path.insert(0, str(folder))
    replaced = StandInFinder(REPLACED, but=KEPT, root=folder)
    install(replaced, replacing=True)
    install(StandInFinder(absent(IF_ABSENT)), replacing=False)
    _complete_flashinfer()
    stock = importlib.import_module(MODULE)
    package = MODULE.rpartition(".")[0]
    patched, device = (importlib.import_module(f"{package}.{name}") for name in PATCHES)
    return Loaded(version, stock, patched, device, frozenset(replaced.served))


def _complete_flashinfer() -> None:
    """Stand in for what a FlashInfer cut down to MLA lacks: SGLang imports its other wrappers.

    A full FlashInfer is left as it is: the finder comes last, and so does the hook.
    """
    flashinfer: Any = importlib.import_module("flashinfer")
    for used in ("flashinfer.mla", "flashinfer.prefill"):  # these as they are
        importlib.import_module(used)
    install(StandInFinder(("flashinfer",)), replacing=False)
    own = getattr(flashinfer, "__getattr__", None)

    def lookup(name: str) -> Any:
        if own is not None:
            try:
                return own(name)
            except AttributeError:
                pass
        if name.startswith("__"):
            raise AttributeError(name)
        return make("flashinfer", name)

    flashinfer.__getattr__ = lookup
