"""What a command on a file works with: the spec, the FlashInfer, and why that one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from .flashinfer.api import PlanApi
from .flashinfer.find import FlashInferSource
from .flashinfer.read import derived_facts, read_plan_api
from .flashinfer_choice import flashinfer_for
from .provenance import read_header
from .report import Facts
from .restore import refuse_lost_lines
from .sglang.find import FoundTarget
from .spec import Spec
from .spec_choice import SpecChoice, choose_spec


@dataclass(frozen=True)
class Inputs:
    """The spec with the chosen variants, FlashInfer's PlanApi and source, and what was taken, to
    tell.
    `choice`: where the spec is from; `why`: how that FlashInfer came to be taken.
    `places`: what lies in the environment that the file runs in, if any of it does."""

    spec: Spec
    choice: SpecChoice
    api: PlanApi
    facts: Facts
    places: tuple[Path | None, ...]
    source: FlashInferSource
    why: str


def inputs_of(
    found: FoundTarget,
    spec_path: Path | None,
    flashinfer: str | None,
    only: tuple[str, ...],
    *,
    as_patched: bool = False,
    given: str = "given",
    allow_unknown: bool = False,
) -> Inputs:
    """What a command on a file works with.

    `as_patched`: where none is chosen, a file that was patched with --only is looked at for
    just those variants, and where it was patched with --allow-unknown, FlashInfer is read so again.
    `given`: how to tell that FlashInfer was.
    """
    from .patch import select

    # First: whatever else is wrong with such a file may come of that.
    refuse_lost_lines(found.data, found.label)
    choice = choose_spec(spec_path, found)
    spec = choice.load()
    header = read_header(found.data, path=found.label) if as_patched else None
    allow_unknown = allow_unknown or (header is not None and header.derived)
    if header is not None and not only:
        only = tuple(v.name for v in spec.variants if v.name in header.variants)
    spec = select(spec, only)
    source, why = flashinfer_for(found, flashinfer, choice.path.parent / "generated")
    why = given if flashinfer is not None else why
    facts: Facts = (
        ("file", found.label),
        ("variants.yaml", choice.told),
        ("FlashInfer", f"{source.label} ({why})"),
    )
    file = found.file
    places = (file.path, file.resolved) if file is not None else ()
    api = read_plan_api(source, allow_unknown=allow_unknown)
    facts = (*facts, *derived_facts(api))
    return Inputs(spec, choice, api, facts, (*places, package_of(source)), source, why)


def package_of(source: FlashInferSource | None) -> Path | None:
    """The folder that a FlashInfer was read from, None for a wheel."""
    return Path(source.place) if source is not None and Path(source.place).is_dir() else None
