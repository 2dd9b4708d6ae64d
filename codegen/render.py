"""Spec + PlanApi -> the texts that are committed in `generated/` and spliced by `patch`.

One Jinja environment for everything that is emitted. The plan functions and hooks come as
*fragments*, each one or a few module-level definitions: `generated/` shows all of them, and
a patch takes the ones that its target calls, letter for letter; but for `Rendered.in_place`
and `recorded`, without which a few of them are shorter.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from .errors import DriftError, Problem
from .flashinfer.api import PlanApi
from .fork import RELEASED, Names
from .resolve import by_slot, check, names_of
from .spec import Spec, Variant, device_variants, filled_in_place

#: Modules that emitted code imports names from. The order is the order of the imports.
IMPORTS: Mapping[str, tuple[str, str]] = {
    "logging": ("logging", ""),
    "dataclass": ("dataclasses", "dataclass"),
    "replace": ("dataclasses", "replace"),
    "partial": ("functools", "partial"),
    "TYPE_CHECKING": ("typing", "TYPE_CHECKING"),
    "Any": ("typing", "Any"),
    "Callable": ("typing", "Callable"),
    "NamedTuple": ("typing", "NamedTuple"),
    "Optional": ("typing", "Optional"),
    "np": ("numpy", ""),
    "torch": ("torch", ""),
    "triton": ("triton", ""),
    "tl": ("triton.language", ""),
}
#: Those of them that a module of `generated/` imports in a block of its own, or not at all.
_THIRD_PARTY = ("np", "torch", "triton", "tl")


#: Names of SGLang's file that an emitted function must not hide.
_SGLANG_NAMES = (
    "FlashInferMLAAttnBackend",
    "FlashInferMLAIndicesUpdaterDecode",
    "FlashInferMLAIndicesUpdaterPrefill",
    "FlashInferMLAMultiStepDraftBackend",
    "BatchMLAPagedAttentionWrapper",
    "fast_mla_decode_plan",
    "fast_mla_prefill_plan",
)


@dataclass(frozen=True)
class Fragment:
    """Some module-level definitions. `module` is the file of `generated/` that shows them;
    `text` has no blank lines around it and ends without a newline; `variant` is whose functions
    they are, None for what all share."""

    name: str
    module: str
    text: str
    variant: str | None = None

    @property
    def defines(self) -> tuple[str, ...]:
        """The module-level names that the fragment binds."""
        pattern = r"^(?:def|class) (\w+)|^(\w+)(?:: [^=\n]+)? = "
        return tuple(first or second for first, second in re.findall(pattern, self.text, re.M))

    @property
    def words(self) -> frozenset[str]:
        """Every identifier in the text; a superset of the names that it uses."""
        return identifiers(self.text)


def identifiers(text: str) -> frozenset[str]:
    """Every identifier in Python source, those in comments and strings too."""
    return frozenset(re.findall(r"[A-Za-z_]\w*", text))


@dataclass(frozen=True)
class Rendered:
    """All fragments of one spec and one FlashInfer, in the order in which they are emitted.

    Attributes:
        in_place: with what a file needs in which an index kernel fills a verify's captured buffer.
        recorded: with what one needs in which a graph's pass may record its plan.
    """

    fragments: tuple[Fragment, ...]
    api: PlanApi
    spec: Spec
    in_place: bool = True
    recorded: bool = True

    def needed_by(self, names: Iterable[str]) -> tuple[Fragment, ...]:
        """The fragments that define `names` and, transitively, what those use."""
        by_name = {name: fragment for fragment in self.fragments for name in fragment.defines}
        wanted = {by_name[name].name for name in names if name in by_name}
        grown = True
        while grown:
            grown = False
            for fragment in self.fragments:
                if fragment.name not in wanted:
                    continue
                for word in fragment.words:
                    owner = by_name.get(word)
                    if owner is not None and owner.name not in wanted:
                        wanted.add(owner.name)
                        grown = True
        return tuple(fragment for fragment in self.fragments if fragment.name in wanted)


@dataclass(frozen=True)
class _StateRule:
    """How a plan leaves one attribute that `run` reads. An empty value: the attribute is the
    same for every plan of one MlagenShape, so the first (FlashInfer's own) plan left it."""

    value: str
    eager_only: bool = False
    comment: str = ""


_STATE: Mapping[str, _StateRule] = {
    "_causal": _StateRule("CAUSAL"),
    "_page_size": _StateRule("shape.page_size"),
    "_sm_scale": _StateRule("shape.sm_scale"),
    "_plan_info": _StateRule("plan_info"),
    "_kv_indices_buf": _StateRule("arrays.kv_indices", eager_only=True),
    "_q_data_type": _StateRule(""),
    "_kv_data_type": _StateRule(""),
    "_head_dim_ckv": _StateRule(""),
    "_use_profiler": _StateRule(""),
    "_planned_query_shape": _StateRule(
        "(int(request.qo_indptr[-1]), shape.num_heads)", eager_only=True
    ),
    "_planned_kv_page_range": _StateRule(
        "(0, 0)",
        eager_only=True,
        comment="The range of page numbers is known on the device alone; this one accepts any.",
    ),
}

MIRRORS = (
    ("kv_indices", "_kv_indices_buf", "arrays.kv_indices"),
    ("qo_indptr", "_qo_indptr_buf", "arrays.qo_indptr"),
    ("kv_indptr", "_kv_indptr_buf", "arrays.kv_indptr"),
    ("kv_len", "_kv_len_arr_buf", "arrays.lengths()"),
)


def render(spec: Spec, api: PlanApi, *, in_place: bool = True, recorded: bool = True) -> Rendered:
    """Render every fragment for `spec` on the FlashInfer of `api`; `in_place` and `recorded` as
    `Rendered` has them: some files of SGLang have no use for these.

    Raises DriftError where FlashInfer's `run` reads state that mlagen cannot leave right.
    """
    _check_state(api)
    context = {
        **context_of(api),
        "on_device": bool(device_variants(spec)),
        "in_place": in_place and any(map(filled_in_place, spec.variants)),
        "recorded": recorded,
    }
    context["lengths_kernel"] = recorded and context["in_place"] and _verify_on_device(spec)
    fragments = [
        _fragment("notes", "plans", "plan/notes.py.jinja", context),
        _fragment("types", "plans", "plan/types.py.jinja", context),
    ]
    if api.planner_copies or api.raw_module:
        fragments.append(_fragment("staging", "plans", "plan/staging.py.jinja", context))
    fragments.append(_fragment("planner", "plans", "plan/planner.py.jinja", context))
    if api.update is not None:
        fragments.append(_fragment("update", "plans", "plan/update.py.jinja", context))
    fragments += _each(_fragment("guards", "plans", "plan/guards.py.jinja", context))
    if context["on_device"]:
        fragments += [
            _fragment("device_kernel", "plans", "plan/device_kernel.py.jinja", context),
            _fragment("device", "plans", "plan/device.py.jinja", context),
        ]
    for variant in spec.variants:
        fragments += _plan_fragments(variant, context)
    fragments += _hook_fragments(spec, context)
    fixed = [name for f in fragments if f.variant is None for name in f.defines]
    check(spec, [*fixed, *IMPORTS, *_SGLANG_NAMES])
    return Rendered(tuple(fragments), api, spec, in_place, recorded)


def render_module(rendered: Rendered, module: str, header: Iterable[str]) -> str:
    """One file of `generated/`: the header's comment lines, imports, the module's fragments."""
    fragments = [fragment for fragment in rendered.fragments if fragment.module == module]
    words = frozenset().union(*(fragment.words for fragment in fragments))
    defined = {name for fragment in fragments for name in fragment.defines}
    elsewhere = sorted(
        name
        for fragment in rendered.fragments
        if fragment.module != module
        for name in fragment.defines
        if name in words and name not in defined
    )
    imports = [name for name in IMPORTS if name in words and name not in _THIRD_PARTY]
    annotates = "BatchMLAPagedAttentionWrapper" in words
    template = environment().get_template("module.py.jinja")
    text = template.render(
        header=tuple(header),
        arrays="np" in words,
        triton="triton" in words,
        imports=import_lines(["TYPE_CHECKING", *imports] if annotates else imports),
        elsewhere=elsewhere,
        type_checking=annotates,
        fragments=fragments,
    )
    return text.strip("\n") + "\n"


def module_files(rendered: Rendered, header: Sequence[str]) -> dict[str, bytes]:
    """All functions as `generated/` shows them, by file name."""
    return {
        f"{module}.py": render_module(rendered, module, header).encode()
        for module in ("plans", "hooks")
    }


def import_lines(names: Iterable[str]) -> tuple[str, ...]:
    """Import statements that bind `names`, one a module, in isort's order."""
    wanted = set(names)
    plain = [
        f"import {module}" + ("" if name == module else f" as {name}")
        for name, (module, attribute) in IMPORTS.items()
        if name in wanted and not attribute
    ]
    by_module: dict[str, list[str]] = {}
    for name, (module, attribute) in IMPORTS.items():
        if name in wanted and attribute:
            by_module.setdefault(module, []).append(attribute)
    return tuple(plain) + tuple(
        f"from {module} import {', '.join(attributes)}" for module, attributes in by_module.items()
    )


def render_site(
    template: str, values: Mapping[str, Any], names: Names = RELEASED
) -> tuple[str, ...]:
    """The lines that one edit site inserts, without its indentation.

    `names`: what a fork calls the attributes that the template names; `values` have them already.
    """
    name = f"sites/{template}.py.jinja"
    made = environment().get_template(name)
    if names.overrides:
        loader = environment().loader
        assert loader is not None
        source, _, _ = loader.get_source(environment(), name)
        made = environment().from_string(names.in_text(source))
    return tuple(made.render(values).strip("\n").split("\n"))


@cache
def environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("mlagen"),
        undefined=StrictUndefined,
        trim_blocks=False,
        lstrip_blocks=True,
        keep_trailing_newline=False,
        autoescape=False,
    )
    environment.filters["docstring"] = _docstring
    return environment


def _docstring(text: str) -> str:
    """A variant's `doc` as lines of a function's docstring, wrapped at 88 columns."""
    return textwrap.fill(text.strip(), 88, initial_indent="    ", subsequent_indent="    ")


def context_of(api: PlanApi) -> dict[str, Any]:
    wrapper_holds = api.holder == "wrapper"
    return {
        "api": api,
        "version": api.version or "(version unknown)",
        "holder": "wrapper" if wrapper_holds else "backend",
        "holder_expression": "wrapper" if wrapper_holds else "wrapper._planned_backend",
        "known_state": {**_STATE, **_derived_state(api)},
        "mirrors": MIRRORS,
    }


def _check_state(api: PlanApi) -> None:
    problems = [
        Problem(
            attribute.place.path,
            attribute.place.line,
            0,
            "unknown-state",
            f"plan() sets {attribute.name} = {attribute.value} and run() reads it; expected only "
            + ", ".join(sorted(_STATE)),
            "a plan that leaves it stale computes with the last plan's value: teach "
            "codegen/render.py how to set it, or try --allow-unknown",
        )
        for attribute in api.run_state
        if attribute.name not in _STATE and attribute.emitted is None
    ]
    if problems:
        raise DriftError(*problems)


def _derived_state(api: PlanApi) -> dict[str, _StateRule]:
    """The rules of state that no era has, as --allow-unknown took them from the source."""
    return {
        attribute.name: _StateRule(attribute.emitted)
        for attribute in api.run_state
        if attribute.emitted is not None
    }


def _fragment(
    name: str, module: str, template: str, context: Mapping[str, Any], variant: str | None = None
) -> Fragment:
    text = environment().get_template(template).render(context)
    return Fragment(name, module, text.strip("\n"), variant)


def _each(fragment: Fragment) -> list[Fragment]:
    """A fragment a function, where a file may need some of them; each is named for its own."""
    texts = [text.strip("\n") for text in fragment.text.split("\n\n\n")]
    pieces = [replace(fragment, text=text) for text in texts]
    return [replace(piece, name=piece.defines[0]) for piece in pieces]


def _plan_fragments(variant: Variant, context: Mapping[str, Any]) -> list[Fragment]:
    parameters = [
        "seq_lens: np.ndarray",
        *(f"{name}: np.ndarray" for name in _further_vectors(variant)),
        *(f"{name}: int" for name in variant.kv_len.scalars),
    ]
    scope = {
        **context,
        "variant": variant,
        "names": names_of(variant),
        "refreshes": ", ".join(variant.refresh) if variant.refresh else "no bound buffer",
        "kv_len_parameters": ", ".join(parameters),
        "filled_in_place": context["in_place"] and filled_in_place(variant),
    }
    kinds = ["kv_len"]
    kinds += ["graph"] if "replay" in variant.when else []
    kinds += ["eager"] if "eager" in variant.when else []
    return [
        _fragment(f"{variant.name}:{kind}", "plans", f"plan/{kind}.py.jinja", scope, variant.name)
        for kind in kinds
    ]


def _hook_fragments(spec: Spec, context: Mapping[str, Any]) -> list[Fragment]:
    slots = by_slot(spec)
    fragments = [
        _fragment("host_lens", "hooks", "hooks/host_lens.py.jinja", context),
        _fragment("eager", "hooks", "hooks/eager.py.jinja", context),
        _fragment("capture", "hooks", "hooks/capture.py.jinja", context),
    ]
    decoding = {
        "decode": _entry(slots.get(("decode", "replay", False))),
        "draft": _entry(slots.get(("draft-decode", "replay", False))),
        "dcp": _entry(slots.get(("decode", "replay", True))),
    }
    replay = slots.get(("target-verify", "replay", False))
    if context["on_device"]:
        fragments.append(_fragment("onto_device", "hooks", "hooks/device.py.jinja", context))
        if context["recorded"]:
            fragments.append(_fragment("record", "hooks", "hooks/record.py.jinja", context))
    if context["in_place"]:
        assert replay is not None
        scope = {**context, "verify_device": replay.planner == "device"}
        fragments.append(_fragment("bound", "hooks", "hooks/bound.py.jinja", scope))
    if any(decoding.values()):
        entries = [decoding[name] for name in ("decode", "draft")]
        on_device = any(entry["on_device"] for entry in entries if entry is not None)
        scope = {**context, **decoding, "decode_device": on_device}
        fragments.append(_fragment("decode", "hooks", "hooks/decode.py.jinja", scope))
    draft_eager = _entry(slots.get(("draft-decode", "eager", False)))
    if draft_eager is not None:
        scope = {**context, "draft_eager": draft_eager}
        fragments.append(_fragment("draft_eager", "hooks", "hooks/draft_eager.py.jinja", scope))
    eager = slots.get(("target-verify", "eager", False))
    verify = [variant for variant in (replay, eager) if variant is not None]
    if verify:
        owned = any("owned-input" in variant.guards for variant in verify)
        scope = {**context, "owned": owned}
        template = "hooks/foreign_input.py.jinja"
        fragments.append(_fragment("foreign_input", "hooks", template, scope))
    if replay is not None:
        scope = _verify_scope(replay, context)
        fragments.append(_fragment("verify", "hooks", "hooks/verify.py.jinja", scope))
    if eager is not None:
        scope = _verify_scope(eager, context)
        fragments.append(_fragment("verify_eager", "hooks", "hooks/verify_eager.py.jinja", scope))
    extend = slots.get(("draft-extend", "eager", False))
    if extend is not None:
        scope = _extend_scope(extend, context)
        fragments.append(_fragment("extend", "hooks", "hooks/extend.py.jinja", scope))
    return fragments


def _verify_on_device(spec: Spec) -> bool:
    replay = by_slot(spec).get(("target-verify", "replay", False))
    return replay is not None and replay.planner == "device"


def _entry(variant: Variant | None) -> dict[str, Any] | None:
    """A variant with the names of its functions and of what its KV lengths are made of, beside
    the sequence lengths: per-request vectors and scalars."""
    if variant is None:
        return None
    return {
        "variant": variant,
        "names": names_of(variant),
        "vectors": _further_vectors(variant),
        "scalars": variant.kv_len.scalars,
        "on_device": variant.planner == "device",
        "shifts": variant.kv_len.shifts("seq_lens"),
    }


def _further_vectors(variant: Variant) -> list[str]:
    """The per-request lengths that KV lengths are made of, beside the sequence lengths."""
    return [name for name in variant.kv_len.vectors if name != "seq_lens"]


def _verify_scope(variant: Variant, context: Mapping[str, Any]) -> dict[str, Any]:
    operands = _guard_operands(variant, context)
    return {
        **context,
        "entry": _entry(variant),
        "tokens_scalar": variant.tokens.emit_scalar(),
        "uses_draft_token_num": "draft_token_num" in (*variant.tokens.names, *variant.kv_len.names),
        "uses_tile": any(re.search(r"\btile\b", operand) for operand in operands),
        "guard_operands": operands,
    }


def _extend_scope(variant: Variant, context: Mapping[str, Any]) -> dict[str, Any]:
    tokens = variant.tokens.emit_array({})
    if not variant.tokens.vectors:
        tokens = f"np.full(batch_size, {tokens}, dtype=np.int32)"
    used = {*variant.tokens.vectors, *variant.kv_len.vectors}
    return {
        **context,
        "entry": _entry(variant),
        "tokens_vector": tokens,
        "uses_extend_seq_lens": "extend_seq_lens" in used,
    }


def _guard_operands(variant: Variant, context: Mapping[str, Any]) -> list[str]:
    """What gives a reason to refuse a captured graph, or None, in the order of the asking."""
    operands = []
    if "tile-divides-heads" in variant.guards and variant.causal:
        operands.append("_mlagen_loses_keys(tile, request.tokens_per_req, num_heads)")
    if "work-items-fit" in variant.guards:
        operands.append(
            "_mlagen_too_many_items(\n"
            "            batch_size * -(-request.tokens_per_req * num_heads // tile),\n"
            f"            {context['holder_expression']}._plan_info,\n"
            "        )"
        )
    operands.append("_mlagen_formula_differs(wrapper, request, seq_lens)")
    return operands
