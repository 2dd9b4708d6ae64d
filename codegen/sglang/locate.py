"""Source + Spec -> Target: every edit that the chosen variants need, or why one has no place."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import libcst as cst

from ..errors import DriftError, Problem
from ..fork import RELEASED, Names
from ..render import IMPORTS
from ..resolve import SERVED, slots_of
from ..spec import Spec, Variant, planned_on_device
from .backend import Backend
from .edits import Edit
from .features import Features, probe, refuse_stale_host_lengths
from .nodes import decorated, is_name
from .overrides import refuse_idle_overrides
from .sites import Context, all_sites
from .source import Refused, Source

#: Sites that come with every patch: the header with its imports, and the plan functions.
HEADER_SITE = "header"
PLANS_SITE = "plans"


@dataclass(frozen=True)
class SitePlace:
    """One edit site: the edits it consists of, or the refusal."""

    site: str
    variants: tuple[str, ...]
    edits: tuple[Edit, ...] = ()
    refused: Refused | None = None


@dataclass(frozen=True)
class Target:
    """Where everything goes in one file.

    Attributes:
        places: the sites that the spec's variants need, in the order of the file.
        calls: emitted functions and types that the edits name.
        absent: variants that the file has no mode for, with the reason (0.4.3.post4 has no
            target-verify).
        header_line, plans_line: lines before which the header and the functions go.
    """

    source: Source
    features: Features
    places: tuple[SitePlace, ...]
    calls: frozenset[str]
    absent: Mapping[str, str]
    header_line: int
    plans_line: int

    @property
    def refusals(self) -> tuple[SitePlace, ...]:
        """The sites without a safe place."""
        return tuple(place for place in self.places if place.refused is not None)

    def missing_imports(self, words: frozenset[str]) -> tuple[str, ...]:
        """The names of IMPORTS in `words` that the file does not bind at its top."""
        bound = self.source.module_names
        return tuple(name for name in IMPORTS if name in words and name not in bound)


def locate(source: Source, spec: Spec, *, public_update: bool = False) -> Target:
    """Find the place of every edit; `public_update`: those for FlashInfer's public update as well.

    A site that has none is in `Target.refusals`. Raises DriftError where the file is no
    FlashInfer-MLA back end at all, or one whose host lengths cannot be trusted; where an override
    of the spec names what the file has not, with its place in variants.yaml.
    """
    try:
        return _locate(source, spec, public_update)
    except RecursionError:
        message = "an expression is nested too deeply to be read"
        raise DriftError(Problem(source.path, 0, 0, "does-not-parse", message)) from None


def _locate(source: Source, spec: Spec, public_update: bool) -> Target:
    refuse_idle_overrides(source, spec)
    backend, features, header_line, plans_line = _frame(source, spec.names)
    present, absent = _present_variants(spec, backend)
    served = {v.name: {slot[:2] for slot in slots_of(v) if slot in SERVED} for v in present}
    context = Context(
        backend, features, frozenset(v.serves for v in present if planned_on_device(v))
    )
    places: list[SitePlace] = []
    for site in all_sites().values():
        asked = [v for v in present if site.whose is None or site.whose(v)]
        variants = tuple(v.name for v in asked if served[v.name] & site.serves)
        if not variants or (site.for_update and not public_update):
            continue
        try:
            places.append(SitePlace(site.name, variants, tuple(site.edits(context))))
        except Refused as refused:
            refused.hint = refused.hint or spec.names.hint_for(refused.sought)
            places.append(SitePlace(site.name, variants, refused=refused))
    places += _unused_imports(source, places)
    return Target(
        source=source,
        features=features,
        places=tuple(places),
        calls=frozenset(context.calls | {"MlagenRequest", "MlagenArrays", "MlagenShape"}),
        absent=absent,
        header_line=header_line,
        plans_line=plans_line,
    )


def refuse_hopeless(data: bytes, path: str) -> None:
    """Raise DriftError for a file that is refused whatever FlashInfer there is."""
    _frame(Source.parse(data, path), RELEASED)


def _frame(source: Source, names: Names) -> tuple[Backend, Features, int, int]:
    """What every patch of a file needs: the back end, its features, the lines for the header
    and for the functions. Raises DriftError where one is not to be had."""
    backend = Backend(source, names)
    try:
        backend.backend_class  # noqa: B018 -- finds it or refuses
        plans_line = source.first_with_comments(_plans_anchor(source, names))
        header_line = source.first(_header_anchor(source))
        refuse_stale_host_lengths(backend)
        return backend, probe(backend), header_line, plans_line
    except Refused as refused:
        refused.hint = refused.hint or names.hint_for(refused.sought)
        if refused.sought == names["backend-class"]:
            refused.code = "not-sglang"
            refused.hint = (
                "give SGLang's flashinfer_mla_backend.py, or a folder that has it; a fork's own "
                "name goes into `fork: anchors: backend-class` of variants.yaml (docs/forks.md)"
            )
        raise DriftError(refused.problem(source.path)) from None


def _present_variants(spec: Spec, backend: Backend) -> tuple[list[Variant], dict[str, str]]:
    absent: dict[str, str] = {}
    if not backend.has_verify:
        reason = "this SGLang has no speculative decoding in this file: only decode is planned"
        for variant in spec.variants:
            if variant.serves != "decode":
                absent[variant.name] = reason
    for variant in spec.variants:
        if variant.context_parallel and b"dcp" not in backend.source.data:
            absent[variant.name] = "this SGLang has no decode context parallelism in this file"
        elif not any(slot in SERVED for slot in slots_of(variant)):
            absent[variant.name] = "no edit site serves it: rendered in generated/ only"
    return [v for v in spec.variants if v.name not in absent], absent


def _unused_imports(source: Source, places: list[SitePlace]) -> list[SitePlace]:
    """Take out an import that only replaced lines used, where it has a line of its own.

    SGLang's pre-commit refuses unused imports.
    """
    gone = {
        line
        for place in places
        for edit in place.edits
        for line in range(edit.line, edit.line + edit.replaces)
    }
    if not gone:
        return []
    words_of = [re.findall(rb"\w+", line) for line in source.lines]
    uses: dict[bytes, list[int]] = {}
    for number, words in enumerate(words_of, 1):
        for word in words:
            uses.setdefault(word, []).append(number)
    found: list[SitePlace] = []
    for line in range(1, source.first(next(iter(source.classes())))):
        words = words_of[line - 1]
        if len(words) != 1 or source.text(line).strip() != words[0].decode("latin-1") + ",":
            continue
        others = [number for number in uses[words[0]] if number != line]
        name = words[0].decode("latin-1")
        if name not in IMPORTS and others and all(number in gone for number in others):
            site = f"unused-import-{name.replace('_', '-')}"
            edit = Edit(site, line, source.indent(line), (), 1)
            found.append(SitePlace(site, places[0].variants, (edit,)))
    return found


def _plans_anchor(source: Source, names: Names) -> cst.CSTNode:
    """The functions go in front of SGLang's own plan function, their nearest kin."""
    return decorated(source.one_function(names["decode-plan-function"]))


def _header_anchor(source: Source) -> cst.CSTNode:
    """The first import that is not from __future__."""
    for statement in source.module.body:
        if not isinstance(statement, cst.SimpleStatementLine):
            continue
        small = statement.body[0]
        future = isinstance(small, cst.ImportFrom) and (
            small.module is not None and is_name(small.module, "__future__")
        )
        if isinstance(small, (cst.Import, cst.ImportFrom)) and not future:
            return statement
    raise Refused("anchor-missing", "looked for a first import, found none")
