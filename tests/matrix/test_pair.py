"""One pair: what becomes of each variant, and why. Miniatures for both sides, an era each."""

from __future__ import annotations

import re

import pytest

from mlagen.codegen.flashinfer.api import PlanApi
from mlagen.codegen.flashinfer.read import read_plan_api
from mlagen.codegen.matrix.facts import Cells
from mlagen.codegen.matrix.pair import cell_of, cells_of
from mlagen.codegen.report import SiteState
from mlagen.codegen.sglang.find import FoundTarget
from mlagen.codegen.spec import load_spec, shipped_spec
from tests.flashinfer import miniatures
from tests.matrix.miniature import BACKEND, FOREIGN, OBJECT, WRAPPER

VARIANTS = ("decode", "draft-decode", "verify", "draft-extend", "dcp")
#: The form of the private call in each era; the first two never had wheels.
ERAS = {
    "stream": miniatures.wrapper_era(miniatures.STREAM_PLANNING),
    "torch-op": miniatures.wrapper_era(
        "        self._plan_info = " + miniatures.call(form="self._cached_module.plan.default")
    ),
    "tvm-ffi": WRAPPER,
    "mla-package": miniatures.wrapper_era(path="flashinfer/mla/_core.py"),
    "backend-object": OBJECT,
}


def api(files: miniatures.Files) -> PlanApi:
    return read_plan_api(miniatures.source(files))


def tried(data: bytes, files: miniatures.Files = WRAPPER) -> Cells:
    found = FoundTarget(data, "flashinfer_mla_backend.py", None)
    return cells_of(found, load_spec(shipped_spec()), api(files))


def states(cells: Cells) -> dict[str, tuple[str, ...]]:
    return {cell.variant: cell.states for cell in cells}


@pytest.mark.parametrize("era", ERAS)
def test_every_era(era: str) -> None:
    assert api(ERAS[era]).era.name.lower().replace("_", "-") == era
    cells = tried(BACKEND, ERAS[era])
    assert states(cells) == {
        "decode": ("replaced",),
        "draft-decode": ("replaced",),
        "verify": ("installed",),
        "draft-extend": ("installed",),
        "dcp": ("refused",),
    }
    assert cells[4].notes == ("this SGLang has no decode context parallelism in this file",)
    assert not any(cell.notes for cell in cells[:4])


def test_a_file_that_is_refused_whatever_is_asked() -> None:
    cells = tried(FOREIGN)
    assert [cell.variant for cell in cells] == list(VARIANTS)
    assert {cell.states for cell in cells} == {("refused",)}
    for cell in cells:
        (note,) = cell.notes
        assert re.match(r"line \d+: not-sglang: looked for class FlashInferMLAAttnBackend", note)


def test_one_site_without_a_place_refuses_all_and_the_note_says_what_would_go() -> None:
    branch = b"elif forward_batch.forward_mode.is_target_verify():"
    assert BACKEND.count(branch) == 1
    bent = BACKEND.replace(branch, b"elif forward_batch.verifies():")
    cells = {cell.variant: cell for cell in tried(bent)}
    assert {cell.states for cell in cells.values()} == {("refused",)}
    assert cells["decode"].notes[-1] == "by itself it has a place: `--only decode`"
    assert not any("--only" in note for note in cells["verify"].notes)
    assert any("eager-verify" in note or "verify" in note for note in cells["verify"].notes)


def state(variant: str, site: str, told: str, reason: str = "") -> SiteState:
    return SiteState(variant, site, told, reason)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("sites", "expected", "notes"),
    [
        ([("a", "installed")], ("installed",), 0),
        ([("a", "installed"), ("b", "replaced upstream")], ("replaced",), 0),
        ([("-", "refused")], ("refused",), 1),
        ([("a", "installed"), ("under DCP", "refused")], ("installed",), 1),
        (
            [("a", "replaced upstream"), ("replay of DFLASH", "superseded upstream")],
            ("replaced", "superseded"),
            1,
        ),
        # A variant that no site serves is not taken for installed.
        ([], ("refused",), 1),
        # A site that comes out otherwise than written is a fault, never a success.
        *(
            [
                ([("a", "installed"), ("b", s)], ("refused",), 1)
                for s in ("absent", "stale", "edited")
            ]
        ),
    ],
)
def test_many_sites_in_one_cell(
    sites: list[tuple[str, str]], expected: tuple[str, ...], notes: int
) -> None:
    others = [state("verify-2, draft", "x", "refused", "not asked for")]
    told = [state("draft, verify", *site, "why") for site in sites]
    cell = cell_of("verify", [*others, *told])
    assert (cell.states, len(cell.notes)) == (expected, notes)
    assert "not asked for" not in " ".join(cell.notes)
