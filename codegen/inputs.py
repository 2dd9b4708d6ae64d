"""What a command on a file works with: the spec, the FlashInfer, and why that one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from .errors import UsageError
from .flashinfer.api import PlanApi
from .flashinfer.find import FlashInferSource, find_flashinfer
from .flashinfer.read import derived_facts, read_plan_api
from .provenance import read_header
from .report import Facts
from .restore import original_of, refuse_lost_lines
from .sglang.find import FoundTarget
from .spec import Spec
from .spec_choice import SpecChoice, choose_spec


@dataclass(frozen=True)
class Inputs:
    """The spec with the chosen variants, FlashInfer's PlanApi and source, and what was taken, to
    tell.
    `choice`: where the spec is from.
    `places`: what lies in the environment that the file runs in, if any of it does."""

    spec: Spec
    choice: SpecChoice
    api: PlanApi
    facts: Facts
    places: tuple[Path | None, ...]
    source: FlashInferSource


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
    facts: Facts = (
        ("file", found.label),
        ("variants.yaml", choice.told),
        ("FlashInfer", f"{source.label} ({given if flashinfer is not None else why})"),
    )
    file = found.file
    places = (file.path, file.resolved) if file is not None else ()
    api = read_plan_api(source, allow_unknown=allow_unknown)
    facts = (*facts, *derived_facts(api))
    return Inputs(spec, choice, api, facts, (*places, package_of(source)), source)


def package_of(source: FlashInferSource | None) -> Path | None:
    """The folder that a FlashInfer was read from, None for a wheel."""
    return Path(source.place) if source is not None and Path(source.place).is_dir() else None


def flashinfer_for(
    found: FoundTarget, explicit: str | None, folder: Path
) -> tuple[FlashInferSource, str]:
    """The FlashInfer to write for, and why that one: the one given; for a fetched release the
    one it pins; the one installed beside the file or beside mlagen; the one that MANIFEST.json
    in `folder` names."""
    if explicit is not None:
        return find_flashinfer(explicit), "given"
    if found.pinned_flashinfer is not None:
        return _pinned(found, found.pinned_flashinfer), "pinned by that release"
    near = found.file.resolved if found.file is not None else None
    try:
        return find_flashinfer(None, near=near), "installed"
    except UsageError:
        named = named_by_manifest(folder, None)
        if named is None:
            raise
    return find_flashinfer(named), "none is installed; generated/MANIFEST.json names it"


def _pinned(found: FoundTarget, version: str) -> FlashInferSource:
    """The FlashInfer that a release pins. Where it cannot be had, a file that would be refused
    anyway is refused for its own reason."""
    try:
        return find_flashinfer(version)
    except UsageError as error:
        from .sglang.locate import refuse_hopeless

        refuse_hopeless(original_of(found.data, found.label), found.label)
        first = error.problems[0]
        hint = "give --flashinfer: a version that has a wheel (0.5.0 on), a folder or a wheel file"
        raise UsageError(replace(first, hint=hint)) from None


def named_by_manifest(folder: Path, explicit: str | None) -> str | None:
    """The FlashInfer version that MANIFEST.json in `folder` names. Not read where one is given:
    a broken manifest must not stand in the way of its own repair."""
    from . import generated

    if explicit is not None or not (folder / generated.MANIFEST).is_file():
        return None
    return generated.manifest_of(folder).flashinfer
