"""`mlagen upgrade`: what another FlashInfer, or another SGLang, would change. Writes nothing."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from .differences import Difference
from .errors import DriftError, UsageError, usage
from .fetch import is_version
from .flashinfer.checks import plan_checks
from .flashinfer.compare import compare_apis, compare_checks, compare_waits
from .flashinfer.find import FlashInferSource, find_flashinfer
from .flashinfer.read import derived_facts, read_plan_api
from .flashinfer.waits import find_waits
from .names import bound_by
from .patch import Patch, prepare, select, site_states
from .provenance import Header, as_bytes, as_text, find_regions, read_header
from .report import Facts, Report, SiteState, unified_diff
from .sglang.features import Features
from .sglang.find import FoundTarget, find_target
from .sglang.locate import PLANS_SITE, refuse_hopeless
from .spec import Spec
from .spec_choice import SpecChoice, choose_spec


@dataclass(frozen=True)
class Wish:
    """What is asked for. `start`: the FlashInfer of now, where the file does not name it."""

    path: str
    flashinfer: str | None
    sglang: str | None
    start: str | None = None
    spec_path: Path | None = None
    only: tuple[str, ...] = ()
    diff: bool = False
    allow_unknown: bool = False


@dataclass(frozen=True)
class _Side:
    """The file before the upgrade, or after it, and how it would be patched. `why`: how this
    FlashInfer came to be taken."""

    found: FoundTarget
    source: FlashInferSource
    patch: Patch
    why: str


def upgrade(wish: Wish) -> Report:
    """Tell what would change.

    Exit code 0: nothing would; 1: something would; 4: the new one has drifted, with what is
    different from what is known. Raises UsageError where one of the two is not to be had,
    EditedError where someone edited the file, DriftError where the FlashInfer of now has drifted.
    """
    if wish.flashinfer is None and wish.sglang is None:
        raise usage(
            "upgrade to what?",
            path="mlagen upgrade",
            hint="give --flashinfer, --sglang, or both: a version to fetch, or a place",
        )
    found = find_target(wish.path)
    header = read_header(found.data, path=found.label)
    choice = choose_spec(wish.spec_path, found)
    spec = _spec(choice, wish, header)
    with choice.named():
        old = _now(found, wish, header, spec)
    target = find_target(_requirement(wish.sglang)) if wish.sglang is not None else found
    facts: Facts = (
        ("file", found.label),
        *((("SGLang then", wish.sglang),) if wish.sglang is not None else ()),
        ("FlashInfer now", f"{old.source.label} ({old.why})"),
    )
    try:
        source, why = _then(target, old, wish)
        facts = (*facts, ("FlashInfer then", f"{source.label} ({why})"))
        api = read_plan_api(source, allow_unknown=wish.allow_unknown)
        with choice.named():
            after = prepare(target, spec, api)
    except DriftError as error:
        return Report("upgrade", DriftError.exit_code, problems=error.problems, facts=facts)
    new = _Side(target, source, after, why)
    if target is found:
        return _of_flashinfer(wish, old, new, spec, facts)
    return _of_sglang(wish, old, new, spec, facts)


def _of_flashinfer(wish: Wish, old: _Side, new: _Side, spec: Spec, facts: Facts) -> Report:
    """The same file, another FlashInfer."""
    there, note = _as_it_is(old)
    differences = (
        *_flashinfer_differences(old, new),
        *_functions(there, new.patch.patched, old.found.label),
    )
    # What can be applied: to a file on disk as it stands, not as it would be patched.
    base = old.found.data if old.found.file is not None else there
    return _report(
        facts=(*facts, *derived_facts(new.patch.rendered.api)),
        sites=site_states(replace(new.found, data=there), new.patch, spec),
        differences=differences,
        would=bool(differences) or base != new.patch.patched,
        notes=(note,),
        diff=unified_diff(old.found.label, base, new.patch.patched) if wish.diff else b"",
    )


def _of_sglang(wish: Wish, old: _Side, new: _Side, spec: Spec, facts: Facts) -> Report:
    """Another SGLang, and maybe another FlashInfer: what becomes of the patch."""
    there, note = _as_it_is(old)
    patched = new.patch.patched
    differences = (
        *_flashinfer_differences(old, new),
        *_features(old.patch.target.features, new.patch.target.features),
        *_sites(old.patch, new.patch, spec),
        *_functions(there, patched, old.found.label),
    )
    diff = unified_diff(new.found.label, new.patch.original, patched) if wish.diff else b""
    remark = "--diff is that of `mlagen patch` on the other SGLang" if wish.diff else ""
    return _report(
        facts=(*facts, *derived_facts(new.patch.rendered.api)),
        sites=site_states(replace(new.found, data=patched), new.patch, spec),
        differences=differences,
        would=bool(differences),
        notes=(note, "the sites are those of the other SGLang, patched", remark),
        diff=diff,
    )


def _report(
    *,
    facts: Facts,
    sites: tuple[SiteState, ...],
    differences: tuple[Difference, ...],
    would: bool,
    notes: Iterable[str],
    diff: bytes,
) -> Report:
    if would:
        verdict = "would change; nothing was written: `mlagen patch` after the upgrade does"
    else:
        verdict = "nothing would change"
    return Report(
        "upgrade",
        1 if would else 0,
        sites=sites,
        facts=facts,
        notes=(*filter(None, notes), verdict),
        diff=as_text(diff),
        differences=differences,
    )


def _as_it_is(side: _Side) -> tuple[bytes, str]:
    """The patched file of now, and a remark where it is not the one that is there."""
    if find_regions(side.found.data, path=side.found.label):
        return side.found.data, ""
    if side.found.file is None:
        return (
            side.patch.patched,
            "a release in a wheel counts as patched for the FlashInfer of now",
        )
    remark = "the file is not patched: its sites are shown as patched for the FlashInfer of now"
    return side.patch.patched, remark


# --- the two sides ----------------------------------------------------------------------------


def _spec(choice: SpecChoice, wish: Wish, header: Header | None) -> Spec:
    """The variants to render: those chosen, else those that the file was patched with."""
    spec = choice.load()
    only = wish.only
    if header is not None and not only:
        only = tuple(v.name for v in spec.variants if v.name in header.variants)
    return select(spec, only)


def _now(found: FoundTarget, wish: Wish, header: Header | None, spec: Spec) -> _Side:
    """The file as mlagen patches it for the FlashInfer of now: the one given, else the one that
    the patched file names, else the one that a fetched release pins, else the one installed beside
    the file."""
    near = found.file.resolved if found.file is not None else None
    if wish.start is not None:
        source, why = find_flashinfer(wish.start), "given"
    elif header is not None:
        if header.flashinfer is None:
            raise usage(
                "the file was patched for a FlashInfer that did not tell its version",
                path=found.label,
                code="flashinfer-not-found",
                hint="give the FlashInfer of now with --from: a folder, a wheel file, a version",
            )
        source, why = _from(header.flashinfer), "named by the file"
    elif found.pinned_flashinfer is not None:
        source, why = _from(found.pinned_flashinfer), "pinned by that release"
    else:
        source, why = find_flashinfer(None, near=near), "installed"
    derived = header is not None and header.derived
    api = read_plan_api(source, allow_unknown=derived or wish.allow_unknown)
    if header is not None and wish.start is None and header.source_digest != api.digest:
        why += ", whose source was another when the file was patched"
    return _Side(found, source, prepare(found, spec, api), why)


def _from(version: str) -> FlashInferSource:
    try:
        return find_flashinfer(version)
    except UsageError as error:
        hint = "give the FlashInfer of now with --from: a folder, a wheel file, or a version"
        raise UsageError(*(replace(problem, hint=hint) for problem in error.problems)) from None


def _then(target: FoundTarget, old: _Side, wish: Wish) -> tuple[FlashInferSource, str]:
    """The FlashInfer after the upgrade. An SGLang that is fetched brings the one it pins."""
    if wish.flashinfer is not None:
        return find_flashinfer(wish.flashinfer), "given"
    if target.pinned_flashinfer is None:
        return old.source, "as now"
    try:
        return find_flashinfer(target.pinned_flashinfer), "pinned by that SGLang"
    except UsageError as error:
        refuse_hopeless(target.data, target.label)  # its own reason, where it has one
        hint = "give the FlashInfer then with --flashinfer: a folder, a wheel file, or a version"
        raise UsageError(*(replace(problem, hint=hint) for problem in error.problems)) from None


def _requirement(text: str) -> str:
    return f"sglang=={text}" if is_version(text) else text


# --- what is different ------------------------------------------------------------------------


def _flashinfer_differences(old: _Side, new: _Side) -> Iterable[Difference]:
    before, after = old.patch.rendered.api, new.patch.rendered.api
    if before == after:
        return ()
    return (
        *compare_apis(before, after),
        *compare_checks(plan_checks(old.source), plan_checks(new.source)),
        *compare_waits(find_waits(old.source), find_waits(new.source)),
    )


def _functions(old: bytes, new: bytes, path: str) -> Iterable[Difference]:
    """mlagen's functions that would do something else. Their words alone change with each version
    of FlashInfer, which they name."""
    before, after = _definitions(old, path), _definitions(new, path)
    for name in before | after:
        was, is_now = before.get(name), after.get(name)
        if was is None:
            yield Difference("function", name, "", "is added")
        elif is_now is None:
            yield Difference("function", name, "is left out", "")
        elif was != is_now:
            yield Difference("function", name, "as it is", "does something else")


def _definitions(data: bytes, path: str) -> dict[str, str]:
    """Name -> what it does, without docstrings and comments, of each of mlagen's functions."""
    found: dict[str, str] = {}
    for region in find_regions(data, path=path):
        if region.site != PLANS_SITE:
            continue
        for node in ast.parse(as_bytes("\n".join(region.emitted))).body:
            for part in ast.walk(node):
                if isinstance(part, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(part):
                    part.body = part.body[1:] or [ast.Pass()]
            found |= dict.fromkeys(bound_by(node), ast.dump(node))
    return found


def _features(old: Features, new: Features) -> Iterable[Difference]:
    before, after = asdict(old), asdict(new)
    for name, value in after.items():
        if before[name] != value:
            label = name.replace("_", " ")
            yield Difference("SGLang", label, _told(before[name]), _told(value))


def _told(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    return "none" if value in (None, "") else str(value)


def _sites(old: Patch, new: Patch, spec: Spec) -> Iterable[Difference]:
    """Sites that appear, vanish, change their state or their text between two files, both patched
    as mlagen would now."""
    before, after = _states(old, spec), _states(new, spec)
    texts = _texts(old.patched), _texts(new.patched)
    for name in {**before, **after}:
        was, is_now = before.get(name, ""), after.get(name, "")
        if was != is_now:
            yield Difference("site", name, was, is_now)
        elif texts[0].get(name) != texts[1].get(name):
            yield Difference("site", name, was, f"{is_now}, with other lines")


def _states(patch: Patch, spec: Spec) -> Mapping[str, str]:
    """Site -> state, as `mlagen patch` leaves it."""
    states = site_states(replace(patch.found, data=patch.patched), patch, spec)
    return {
        f"{state.site} ({state.variant})" if state.site == "-" else state.site: state.state
        for state in states
    }


def _texts(patched: bytes) -> dict[str, tuple[str, ...]]:
    """Site -> the lines that mlagen wrote there, without their indentation."""
    return {
        region.site: tuple(line.strip() for line in region.emitted)
        for region in find_regions(patched)
    }
