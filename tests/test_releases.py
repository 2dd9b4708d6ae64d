"""Patches of real SGLang releases, each with the FlashInfer it pins or the nearest that has a
wheel; the test's name says which. In the wide suite all releases that have wheels.
"""

from __future__ import annotations

import ast
import difflib
import json
import re
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from functools import cache

import pytest

from mlagen.codegen.check import check_file
from mlagen.codegen.errors import DriftError
from mlagen.codegen.flashinfer.api import PlanApi
from mlagen.codegen.names import bound_by
from mlagen.codegen.patch import Patch, header_for, prepare, select
from mlagen.codegen.prove import suite_of_file
from mlagen.codegen.provenance import Region, find_regions, read_header, remove_regions
from mlagen.codegen.render import render, render_module
from mlagen.codegen.sglang.find import FoundTarget
from mlagen.codegen.sglang.locate import PLANS_SITE, locate
from mlagen.codegen.spec import Spec
from mlagen.codegen.splice import splice
from tests.releases import (
    NEAREST_WHEEL,
    PINS,
    SGLANG_FILE,
    patch_of,
    plan_api,
    sglang_file,
    shipped,
)
from tests.specs import device_spec
from tests.splice.wiring import wiring

DEFAULT = ("0.4.5", "0.5.1", "0.5.10", "0.5.13", "0.5.17", "0.5.18", "0.5.23")
REFUSED = ("0.4.4",)
#: No speculative decoding in the file: decode alone is planned.
DECODE_ONLY = ("0.4.3.post4",)
VARIANTS = ("decode", "draft-decode", "verify", "draft-extend", "dcp")


def found(data: bytes) -> FoundTarget:
    return FoundTarget(data, SGLANG_FILE, None)


@dataclass(frozen=True)
class Release:
    """One SGLang with its FlashInfer, patched."""

    version: str
    api: PlanApi
    original: bytes
    patch: Patch

    @property
    def patched(self) -> bytes:
        return self.patch.patched

    @property
    def regions(self) -> tuple[Region, ...]:
        return find_regions(self.patched)


@cache
def release_of(version: str) -> Release:
    flashinfer = NEAREST_WHEEL[version]
    patch = patch_of(version, flashinfer)
    return Release(version, plan_api(flashinfer), sglang_file(version), patch)


def name_of(version: str) -> str:
    pin, nearest = PINS[version], NEAREST_WHEEL[version]
    return f"{version}+{nearest}" + ("" if pin == nearest else f"-for-{pin}")


PARAMETERS = [
    pytest.param(
        version, id=name_of(version), marks=() if version in DEFAULT else pytest.mark.releases
    )
    for version in PINS
    if version not in REFUSED
]


@pytest.fixture(params=PARAMETERS)
def release(request: pytest.FixtureRequest) -> Release:
    return release_of(request.param)


def ruff(data: bytes, *arguments: str) -> bytes:
    ran = subprocess.run(
        [sys.executable, "-m", "ruff", *arguments, "--isolated", "--no-cache", "-"],
        input=data,
        capture_output=True,
        check=False,
    )
    assert ran.returncode in (0, 1), ran.stderr.decode()
    return ran.stdout


@cache
def findings(data: bytes, rules: str) -> Counter[str]:
    """ruff's findings, without their lines."""
    said = ruff(data, "check", "--select", rules, "--output-format", "json")
    return Counter(f"{found['code']} {found['message']}" for found in json.loads(said))


def emitted_lines(regions: tuple[Region, ...]) -> set[int]:
    """The lines, from 1, of all regions with their marks, without the kept lines."""
    return {
        line
        for region in regions
        for line in range(region.start_line, region.end_line + 1)
        if line <= region.start_line + len(region.emitted) or line == region.end_line
    }


# -- the patched file ---------------------------------------------------------------------------


def test_parses_and_is_wired(release: Release) -> None:
    ast.parse(release.patched)
    if release.version in DECODE_ONLY:
        expected = {"mlagen_capture_decode": 1, "mlagen_request_decode": 1}
    else:
        first_eagle_worker = (
            b"prefix_lens=None,\n                prefill_wrapper_paged=self.prefill_wrapper_paged"
        )
        # From 0.5.22 on verify's input is given a translator, which decides how it is filled.
        translated = b"translator=self.attn_backend.kv_index_translator," in release.original
        expected = {
            **({} if translated else {"mlagen_bound_arrays": 1}),
            "mlagen_capture_decode": 1,
            "mlagen_capture_verify": 1,
            "mlagen_request_decode": 1,
            "mlagen_request_draft_eager": 1,
            "mlagen_request_extend": 2 if first_eagle_worker in release.original else 1,
            "mlagen_request_verify": 1,
            "mlagen_request_verify_eager": 1,
        }
    assert wiring(release.patched) == expected


@pytest.mark.parametrize("spec", [shipped(), device_spec()], ids=["host", "device"])
def test_nothing_that_is_emitted_is_unused(release: Release, spec: Spec) -> None:
    """No function, class or constant; and no test asks for what the file has not."""
    made = prepare(found(release.original), spec, release.api)
    (plans,) = [region for region in find_regions(made.patched) if region.site == PLANS_SITE]
    body = ast.parse("\n".join(plans.emitted)).body
    defined = {name for node in body for name in bound_by(node)}
    names = [node for node in ast.walk(ast.parse(made.patched)) if isinstance(node, ast.Name)]
    used = {node.id for node in names if isinstance(node.ctx, ast.Load)}
    assert defined - used - {"MlagenDevicePlan"} == set()  # in quotes, ahead of its definition
    tests = [text for name, text in suite_of_file(made).files.items() if "/tests/" in name]
    asked = {
        name
        for text in tests
        for name in re.findall(r"\b(?:hooks|plans)\.(_?[Mm]lagen\w+)", text.decode())
    }
    assert asked <= defined


def test_every_region_is_intact(release: Release) -> None:
    assert all(region.intact for region in release.regions)
    sites = [region.site for region in release.regions]
    assert sites[0] == "header"
    assert "plans" in sites
    assert len(sites) == len(set(sites))
    header = read_header(release.patched)
    assert header is not None
    assert header.flashinfer == NEAREST_WHEEL[release.version]
    assert header.source_digest == release.api.digest
    assert header.spec_digest == shipped().digest


def test_ruff_finds_nothing_new(release: Release) -> None:
    rules = "F,E7,E9,B,UP032,I"
    assert findings(release.patched, rules) - findings(release.original, rules) == Counter()


def test_ruff_formats_no_emitted_line(release: Release) -> None:
    emitted = emitted_lines(release.regions)
    now = release.patched.decode().splitlines()
    formatted = ruff(release.patched, "format", "--line-length", "88").decode().splitlines()
    matcher = difflib.SequenceMatcher(None, now, formatted, autojunk=False)
    for tag, start, end, other_start, other_end in matcher.get_opcodes():
        if tag != "equal":
            touched = emitted & set(range(start + 1, max(end, start + 1) + 1))
            assert not touched, (now[start:end], formatted[other_start:other_end])


def test_emitted_lines_are_no_wider_than_sglangs(release: Release) -> None:
    for region in release.regions:
        for line in region.emitted:
            assert len(line) <= 88, line


def test_check_is_clean(release: Release) -> None:
    checked = check_file(found(release.patched), shipped(), release.api)
    wrong = [p for p in checked.problems if not p.message.startswith("note: ")]
    assert (checked.exit_code, wrong) == (0, [])
    assert {site.state for site in checked.sites} <= {
        "installed",
        "replaced upstream",
        "superseded upstream",
        "refused",
    }
    refused = {site.variant for site in checked.sites if site.state == "refused"}
    assert refused.isdisjoint(VARIANTS) or release.version in DECODE_ONLY or refused == {"dcp"}


def test_patch_twice_changes_nothing(release: Release) -> None:
    again = prepare(found(release.patched), shipped(), release.api)
    assert not again.changes
    assert again.patched == release.patched
    assert again.original == release.original


def test_unpatch_restores_the_bytes(release: Release) -> None:
    assert release.patched != release.original
    assert remove_regions(release.patched) == release.original
    assert remove_regions(release.original) == release.original


def test_there_and_back_to_another_flashinfer(release: Release) -> None:
    """0.6.17 plans on the wrapper, 0.7.4 on a back-end object."""
    other = plan_api("0.6.17" if release.api.holder == "planned_backend" else "0.7.4")
    there = prepare(found(release.patched), shipped(), other)
    assert there.changes
    assert remove_regions(there.patched) == release.original
    back = prepare(found(there.patched), shipped(), release.api)
    assert back.patched == release.patched


def test_plans_are_those_of_generated(release: Release) -> None:
    in_place = b"def mlagen_bound_arrays(" in release.patched
    rendered = render(shipped(), release.api, in_place=in_place, recorded=False)
    assert release.patch.rendered == rendered
    modules = {name: render_module(rendered, name, ()) for name in ("plans", "hooks")}
    (plans,) = [region for region in release.regions if region.site == "plans"]
    text = "\n".join(plans.emitted) + "\n"
    position = 0
    for fragment in rendered.fragments:
        if f"{fragment.text}\n" in text:
            position = text.index(f"{fragment.text}\n", position) + len(fragment.text)
            assert f"\n\n\n{fragment.text}\n" in modules[fragment.module]
    known = [name for fragment in rendered.fragments for name in fragment.defines]
    tree = ast.parse(text)
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            assert node.name in known
    left = text
    for fragment in rendered.fragments:
        left = left.replace(f"{fragment.text}\n", "")
    assert left.strip() == "", "something in the region is in no fragment"


@pytest.mark.parametrize("variant", VARIANTS)
def test_one_variant_alone(release: Release, variant: str) -> None:
    chosen = select(shipped(), [variant])
    target = locate(release.patch.target.source, chosen)
    patched = splice(target, render(chosen, release.api), header_for(chosen, release.api))
    if variant in target.absent:
        assert patched == release.original
        return
    ast.parse(patched)
    assert remove_regions(patched) == release.original
    rules = "F401,F811,F821,F841"
    assert findings(patched, rules) - findings(release.original, rules) == Counter()
    assert len(patched) < len(release.patched)
    assert wiring(patched)


# -- releases that are refused ------------------------------------------------------------------


def test_pins_are_all_covered() -> None:
    covered = {parameter.values[0] for parameter in PARAMETERS}
    assert covered | set(REFUSED) == set(PINS)
    assert set(DEFAULT) <= covered


@pytest.mark.releases
def test_0_4_4_is_refused() -> None:
    data = sglang_file("0.4.4")
    with pytest.raises(DriftError) as caught:
        prepare(found(data), shipped(), plan_api(NEAREST_WHEEL["0.4.4"]))
    (problem,) = caught.value.problems
    assert caught.value.exit_code == 4
    assert problem.code == "stale-host-lengths"
    assert b"decode_seq_lens_cpu" in data.splitlines()[problem.line - 1]


@pytest.mark.releases
def test_0_4_3_post4_has_decode_alone() -> None:
    absent = release_of("0.4.3.post4").patch.target.absent
    assert set(absent) == set(VARIANTS) - {"decode"}
    reason = "this SGLang has no speculative decoding in this file: only decode is planned"
    assert absent["verify"] == absent["draft-decode"] == absent["draft-extend"] == reason
