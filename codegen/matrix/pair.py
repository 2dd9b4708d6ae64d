"""One SGLang and one FlashInfer -> what becomes of each variant. Fetches nothing, prints nothing.

What this module imports, in turn, is all that decides an outcome: `digest.py` relies on that.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path

from ..errors import DriftError, Problem
from ..fetch import WheelTree
from ..flashinfer.api import PlanApi
from ..flashinfer.find import find_flashinfer
from ..flashinfer.read import read_plan_api
from ..patch import Patch, prepare, select, site_states
from ..report import SiteState
from ..sglang.find import FoundTarget, in_wheel
from ..spec import Spec, load_spec
from .facts import Cell, Cells, State

#: Sites that are no place of their own but a part of what others do at run time.
_REMARKS = ("under DCP", "replay of DFLASH")


def pair_cells(sglang: Path, flashinfer: Path, spec: Path) -> Cells:
    """`cells_of` two releases by their (thinned) wheels."""
    found = in_wheel(WheelTree(sglang), sglang.as_posix())
    return cells_of(found, _spec(spec), _api(flashinfer))


@cache
def _spec(place: Path) -> Spec:
    return load_spec(place)


@cache
def _api(place: Path) -> PlanApi:
    return read_plan_api(find_flashinfer(str(place)))


def cells_of(found: FoundTarget, spec: Spec, api: PlanApi) -> Cells:
    """What becomes of each variant when the file of `found` is patched for `api`, in the order of
    the spec.

    Where the whole is refused, each variant is tried by itself: it is refused either way, but
    the note says that `--only` would do.
    """
    try:
        made = prepare(found, spec, api)
    except DriftError as error:
        return tuple(_by_itself(found, spec, api, v.name, error) for v in spec.variants)
    states = site_states(replace(found, data=made.patched), made, spec)
    return tuple(cell_of(variant.name, states) for variant in spec.variants)


def _by_itself(
    found: FoundTarget, spec: Spec, api: PlanApi, variant: str, whole: DriftError
) -> Cell:
    try:
        made: Patch | None = prepare(found, select(spec, [variant]), api)
    except DriftError as error:
        return Cell(variant=variant, states=("refused",), notes=_unique(map(said, error.problems)))
    notes = [f"{said(problem)}" for problem in whole.problems]
    if made is not None and made.patched != made.original:
        notes.append(f"by itself it has a place: `--only {variant}`")
    return Cell(variant=variant, states=("refused",), notes=_unique(notes))


def said(problem: Problem) -> str:
    """A problem without its path, which is the same for all: `line 12: code: message`."""
    line = f"line {problem.line}: " if problem.line else ""
    return f"{line}{problem.code}: {problem.message}"


def cell_of(variant: str, states: Iterable[SiteState]) -> Cell:
    """The states of a variant's sites, in short: the best of its places, then the remarks."""
    mine = [state for state in states if variant in state.variant.split(", ")]
    places = [state for state in mine if state.site not in _REMARKS]
    remarks = [state for state in mine if state.site in _REMARKS]
    found: list[State] = []
    notes: list[str] = []
    if not places:
        found.append("refused")
        notes.append("nothing in this file serves it")
    for state in places:
        if state.state == "refused":
            found.append("refused")
            notes.append(state.reason)
        elif state.state not in ("installed", "replaced upstream"):
            found.append("refused")
            notes.append(f"{state.site} comes out {state.state}: a fault of mlagen; {state.reason}")
    if not found:
        replaced = any(state.state == "replaced upstream" for state in places)
        found.append("replaced" if replaced else "installed")
    for state in remarks:
        if state.state == "superseded upstream":
            found.append("superseded")
            notes.append(f"{state.site}: superseded upstream: {state.reason}")
        else:
            notes.append(f"{state.site}: {state.state}: {state.reason}")
    return Cell(variant=variant, states=tuple(dict.fromkeys(found)), notes=_unique(notes))


def _unique(notes: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(notes))
