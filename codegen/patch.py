"""The commands' work, printing nothing: what a file would become, and what it is now."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version

from . import provenance
from .errors import DriftError, EditedError, Problem, UsageError, usage
from .flashinfer.api import PlanApi
from .render import Rendered, render
from .report import SiteState, State
from .restore import HINT, lost_insertions, original_of
from .sglang.find import FoundTarget
from .sglang.locate import Target, locate
from .sglang.source import Source
from .spec import Spec
from .splice import edited_regions, force_original, splice


@dataclass(frozen=True)
class Patch:
    """What `patch` makes of one file.

    `original` is the file without mlagen's regions, `patched` with those of now. The file is
    current when `found.data` equals `patched`.
    """

    found: FoundTarget
    original: bytes
    patched: bytes
    target: Target
    rendered: Rendered

    @property
    def changes(self) -> bool:
        """Whether the file would change."""
        return self.found.data != self.patched

    def no_place(self, hint: str = "choose another variant") -> UsageError:
        """The refusal where none of the chosen variants has a place in the file."""
        reasons = "; ".join(f"{name}: {why}" for name, why in self.target.absent.items())
        return usage(
            f"none of the chosen variants has a place in this file ({reasons})",
            path=self.found.label,
            code="no-place",
            hint=hint,
        )


def select(spec: Spec, only: Iterable[str]) -> Spec:
    """The spec with the variants named in `only`, all of them where it is empty."""
    wanted = tuple(only)
    known = [variant.name for variant in spec.variants]
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise usage(
            f"no variant {', '.join(unknown)} in {spec.source.name}; it has {', '.join(known)}",
            path="--only",
            code="unknown-variant",
            hint=_nearest(unknown[0], known),
        )
    if not wanted:
        return spec
    kept = tuple(variant for variant in spec.variants if variant.name in wanted)
    return spec.model_copy(update={"variants": kept})


def _nearest(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {close[0]}?" if close else "choose one of them"


def prepare(found: FoundTarget, spec: Spec, api: PlanApi) -> Patch:
    """Render for `api` and splice into `found`, staged and verified; writes nothing.

    A file that is patched already, by this mlagen or an older one, is taken back first, so
    that the result does not depend on what was there.

    Raises EditedError where someone edited inside a region (with both texts where they can be
    found out) or took one out, DriftError where an edit has no safe place.
    """
    header = header_for(spec, api)
    if edited_regions(found.data, found.label):
        raise EditedError(*_edited_problems(found, spec, api, header))
    original = original_of(found.data, found.label)
    try:
        target, rendered = _rendered_for(Source.parse(original, found.label), spec, api)
        patched = splice(target, rendered, header)
    except DriftError as error:
        # Not the file's own drift, as likely as not: what is looked for went with the region.
        if lost := lost_insertions(found.data, found.label):
            raise EditedError(replace(lost, hint=HINT), *error.problems) from None
        raise
    return Patch(found, original, patched, target, rendered)


def _rendered_for(source: Source, spec: Spec, api: PlanApi) -> tuple[Target, Rendered]:
    """The places in a file, and the functions without what it has no place for: releases that fill
    a verify's indices by a method take no captured buffer, and early ones have no pass that a plan
    could be recorded in."""
    target = locate(source, spec, public_update=api.update is not None)
    return target, render(
        spec,
        api,
        in_place="mlagen_bound_arrays" in target.calls,
        recorded="mlagen_record_plan" in target.calls,
    )


def header_for(spec: Spec, api: PlanApi) -> provenance.Header:
    """The header of a patch: what it was made from. No date and no path."""
    return provenance.Header(
        mlagen=mlagen_version(),
        flashinfer=api.version,
        era=api.era_text,
        source_digest=api.digest,
        spec_digest=spec.digest,
        variants=tuple(variant.name for variant in spec.variants),
    )


def mlagen_version() -> str:
    """The version of the installed distribution."""
    try:
        return version("mlagen")
    except PackageNotFoundError:  # run from a checkout that was never installed
        return "0+unknown"


def site_states(found: FoundTarget, patch: Patch | None, spec: Spec) -> tuple[SiteState, ...]:
    """The state of each edit site in the file as it is, with the variants that it serves.

    Without a `patch` (it could not be made) only what stands in the file is told.
    """
    there = {r.site: r for r in provenance.find_regions(found.data, path=found.label)}
    if patch is None:
        return tuple(
            SiteState(
                "-",
                region.site,
                "stale" if region.intact else "edited",
                "" if region.intact else "someone changed the lines between its marks",
                region.start_line,
            )
            for region in there.values()
        )
    fresh = {r.site: r for r in provenance.find_regions(patch.patched, path=found.label)}
    states: list[SiteState] = []
    for place in patch.target.places:
        if not place.edits or place.site.startswith("unused-import"):
            continue
        sites = [edit.site for edit in place.edits]
        state, reason, line = _state_of(sites, there, fresh, found, patch)
        states.append(SiteState(", ".join(place.variants), place.site, state, reason, line))
    for name, reason in patch.target.absent.items():
        states.append(SiteState(name, "-", "refused", reason))
    if (
        patch.target.features.upstream_verify
        and b"_build_fast_verify_plan_kwargs" in patch.original
    ):
        states.append(
            SiteState(
                "verify",
                "replay of DFLASH",
                "superseded upstream",
                "SGLang plans DFLASH inputs itself; those stay as they are",
            )
        )
    if patch.target.features.dcp is not None:
        kept = [
            variant.name
            for variant in spec.variants
            if "no-context-parallel" in variant.guards and variant.serves != "decode"
        ]
        reason = "SGLang does not shard them: FlashInfer's own plan there"
        if kept:
            states.append(SiteState(", ".join(kept), "under DCP", "refused", reason))
    return tuple(states)


def _state_of(
    sites: list[str],
    there: Mapping[str, provenance.Region],
    fresh: Mapping[str, provenance.Region],
    found: FoundTarget,
    patch: Patch,
) -> tuple[State, str, int]:
    present = [there[site] for site in sites if site in there]
    if not present:
        line = next(
            edit.line for p in patch.target.places for edit in p.edits if edit.site in sites
        )
        return "absent", "", 0 if there else line  # a line of the unpatched file
    line = present[0].start_line
    if any(not region.intact for region in present):
        return "edited", "", line
    same = len(present) == len(sites) and all(
        region.emitted == fresh[region.site].emitted for region in present
    )
    plans = {"plans"} & set(there) & set(fresh)
    functions_same = all(there[site].emitted == fresh[site].emitted for site in plans)
    if not same or not functions_same or not plans:
        return "stale", staleness(found, patch), line
    if any(_replaces_a_plan(region) for region in present):
        return "replaced upstream", "SGLang's own host arrays or plan gave way to ours", line
    return "installed", "", line


def _replaces_a_plan(region: provenance.Region) -> bool:
    return any("fast_plan" in line or "fast_mla" in line for line in region.replaced)


def staleness(found: FoundTarget, patch: Patch) -> str:
    """Why a patched file is not what would be written now, in one sentence."""
    header = provenance.read_header(found.data, path=found.label)
    now = header_for(patch.rendered.spec, patch.rendered.api)
    if header is None:
        return "the file has no header of mlagen"
    differences = [
        f"{name} was {old or 'unknown'}, is {new or 'unknown'}"
        for name, old, new in (
            ("mlagen", header.mlagen, now.mlagen),
            ("FlashInfer", header.flashinfer, now.flashinfer),
            ("FlashInfer's era", header.era, now.era),
        )
        if old != new
    ]
    if header.spec_digest != now.spec_digest:
        differences.append("variants.yaml has changed")
    if header.source_digest != now.source_digest and not differences:
        differences.append("FlashInfer's source has changed under the same version")
    return "; ".join(differences) or "mlagen renders it differently now"


def _edited_problems(
    found: FoundTarget, spec: Spec, api: PlanApi, header: provenance.Header
) -> list[Problem]:
    """One problem a hand-edited region, with what mlagen would write where that is known."""
    expected: dict[str, str] = {}
    original = force_original(found.data, found.label)
    if original is not None:
        try:
            target, rendered = _rendered_for(Source.parse(original, found.label), spec, api)
            patched = splice(target, rendered, header)
            expected = {
                region.site: "".join(line + "\n" for line in region.emitted)
                for region in provenance.find_regions(patched, path=found.label)
            }
        except DriftError:
            pass
    problems = []
    for region in edited_regions(found.data, found.label):
        text = expected.get(region.site)
        problem = provenance.edited_problem(region, text, path=found.label)
        if text is None:  # so there is no diff either
            hint = "take the file from version control or reinstall the package, then patch again"
            problem = replace(problem, hint=hint)
        problems.append(problem)
    return problems
