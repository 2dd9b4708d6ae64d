"""What each command does, up to its report. Prints nothing.

Modules that need libcst are imported by the commands that need them.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from .errors import UsageError, usage
from .flashinfer.api import PlanApi
from .flashinfer.find import FlashInferSource, find_flashinfer
from .flashinfer.read import explain, read_plan_api
from .provenance import as_text, read_header, remove_regions
from .publish import publish, write_tree
from .report import Report, unified_diff
from .sglang.find import BACKEND_FILE, FoundTarget, find_target
from .spec import Spec, find_spec, load_spec

Facts = tuple[tuple[str, str], ...]


def render(spec_file: Path, out: Path | None, check: bool, flashinfer: str | None) -> Report:
    """Write generated/, or tell whether it is current."""
    from . import generated

    spec = _load_spec(spec_file)
    folder = out or spec_file.parent / "generated"
    if check:
        source = find_flashinfer(flashinfer or generated.requirement_of(folder))
    else:
        source = find_flashinfer(flashinfer, otherwise=_named_by_manifest(folder, flashinfer))
    made = generated.generate(spec, read_plan_api(source))
    facts = (("variants.yaml", str(spec_file)), ("FlashInfer", source.label), ("into", str(folder)))
    if not check:
        changed = write_tree(folder, made.files)
        note = f"wrote {', '.join(changed)}" if changed else "nothing to do: all files are current"
        return Report("render", 0, facts=facts, notes=(note,))
    differing = generated.differing(made, folder)
    if not differing:
        return Report("render", 0, facts=facts, notes=("all files are current",))
    diff = b"".join(
        unified_diff((folder / name).as_posix().lstrip("/"), old, new)
        for name, old, new in differing
        if old is not None
    )
    notes = tuple(
        f"{name} is {'missing' if old is None else 'not current'}: run `mlagen render`"
        for name, old, _ in differing
    )
    return Report("render", 1, facts=facts, notes=notes, diff=as_text(diff))


def patch(
    path: str,
    diff: bool,
    check: bool,
    out: str | None,
    spec_path: Path | None,
    flashinfer: str | None,
    only: tuple[str, ...],
) -> Report:
    """Splice the plans into a file; or show, or tell, or write elsewhere."""
    from .patch import prepare, site_states

    if out is not None and not out.strip():
        raise usage("an empty folder name", path="--out")
    if check and out is not None:
        raise usage("--check writes nothing, --out writes", path="--out", hint="give one of them")
    found = find_target(path)
    if found.file is None and not (diff or check or out):
        raise _not_written_to(
            path, "add --diff to see the change, or --out DIR to have the patched file"
        )
    spec, api, facts = _inputs(found, spec_path, flashinfer, only)
    made = prepare(found, spec, api)
    if made.patched == made.original:
        reasons = "; ".join(f"{name}: {why}" for name, why in made.target.absent.items())
        raise usage(
            f"none of the chosen variants has a place in this file ({reasons})",
            path=found.label,
            code="no-place",
            hint="choose another variant; `mlagen unpatch` takes out what is there",
        )
    notes: list[str] = []
    written = False
    if out is not None:
        name = Path(BACKEND_FILE).name
        write_tree(Path(out), {name: made.patched})
        notes.append(f"wrote {Path(out) / name}")
        written = True
    elif not made.changes:
        notes.append("nothing to do: the file is patched and current")
    elif diff or check:
        notes.append("would change; nothing was written. The sites are those of the file as it is")
    elif found.file is not None:
        publish(found.file, made.patched)
        notes.append(f"patched {found.file.path}; `mlagen unpatch` takes it out again")
        written = True
    if made.changes:
        notes.append("checked by reading it back; nothing was executed")
    text = as_text(unified_diff(found.label, found.data, made.patched)) if diff else ""
    shown = replace(found, data=made.patched) if written else found
    would = made.changes and not written
    return Report(
        "patch",
        1 if would else 0,
        sites=site_states(shown, made, spec),
        facts=facts,
        diff=text,
        notes=tuple(notes),
    )


def unpatch(path: str, diff: bool) -> Report:
    """Take mlagen's regions out of a file, byte for byte."""
    found = find_target(path)
    original = remove_regions(found.data, path=found.label)
    if original == found.data:
        return Report("unpatch", 0, notes=("nothing to do: the file has no regions of mlagen",))
    if diff:
        text = as_text(unified_diff(found.label, found.data, original))
        return Report("unpatch", 1, diff=text, notes=("would change; nothing was written",))
    if found.file is None:
        raise _not_written_to(path, "add --diff, or give the file")
    publish(found.file, original)
    return Report("unpatch", 0, notes=(f"took mlagen's regions out of {found.file.path}",))


def check(
    path: str, spec_path: Path | None, flashinfer: str | None, only: tuple[str, ...]
) -> Report:
    """Judge every fast plan in a file against the FlashInfer at hand."""
    from .check import check_file

    found = find_target(path)
    spec, api, facts = _inputs(found, spec_path, flashinfer, only, as_patched=True)
    result = check_file(found, spec, api)
    verdict = (f"right for FlashInfer {api.version or '(version unknown)'}",)
    return Report(
        "check",
        result.exit_code,
        problems=result.problems,
        sites=result.sites,
        facts=facts,
        notes=verdict if result.exit_code == 0 else (),
    )


def inspect(path: str | None, spec_path: Path | None, flashinfer: str | None) -> Report:
    """Show what is found: of FlashInfer alone, or of a file as well."""
    if path is None:
        api = read_plan_api(find_flashinfer(flashinfer))
        return Report("inspect", 0, facts=explain(api))
    from .inspection import inspect_file

    found = find_target(path)
    spec, api, facts = _inputs(found, spec_path, flashinfer, (), as_patched=True)
    result = inspect_file(found, spec, api)
    return Report(
        "inspect",
        0,
        problems=result.problems,
        sites=result.sites,
        facts=(*facts, *explain(api), *result.facts),
    )


# --- inputs -----------------------------------------------------------------------------------


def _inputs(
    found: FoundTarget,
    spec_path: Path | None,
    flashinfer: str | None,
    only: tuple[str, ...],
    *,
    as_patched: bool = False,
) -> tuple[Spec, PlanApi, Facts]:
    """The spec with the chosen variants, FlashInfer's PlanApi, and what was taken, to tell.

    `as_patched`: where none is chosen, a file that was patched with --only is looked at for
    just those variants.
    """
    from .patch import select

    place = spec_path or find_spec(Path.cwd())
    spec = _load_spec(place)
    header = read_header(found.data, path=found.label) if as_patched and not only else None
    if header is not None:
        only = tuple(v.name for v in spec.variants if v.name in header.variants)
    spec = select(spec, only)
    source, why = _flashinfer_for(found, flashinfer, place.parent / "generated")
    facts = (
        ("file", found.label),
        ("variants.yaml", str(place)),
        ("FlashInfer", f"{source.label} ({why})"),
    )
    return spec, read_plan_api(source), facts


def _flashinfer_for(
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
        named = _named_by_manifest(folder, None)
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

        refuse_hopeless(remove_regions(found.data, path=found.label), found.label)
        first = error.problems[0]
        hint = "give --flashinfer: a version that has a wheel (0.5.0 on), a folder or a wheel file"
        raise UsageError(replace(first, hint=hint)) from None


def _named_by_manifest(folder: Path, explicit: str | None) -> str | None:
    """The FlashInfer version that MANIFEST.json in `folder` names. Not read where one is given:
    a broken manifest must not stand in the way of its own repair."""
    from . import generated

    if explicit is not None or not (folder / generated.MANIFEST).is_file():
        return None
    return generated.manifest_of(folder).flashinfer


def _not_written_to(path: str, hint: str) -> UsageError:
    return usage(
        "a fetched release is not written to", path=path, code="nothing-to-write", hint=hint
    )


def _load_spec(path: Path) -> Spec:
    if not path.exists():
        raise usage(
            "no such file",
            path=str(path),
            code="missing",
            hint="give a variants.yaml; commands with --spec take mlagen's own without it",
        )
    return load_spec(path)
