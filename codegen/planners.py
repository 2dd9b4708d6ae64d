"""Who plans the captured graphs of each variant, and what of a graph has another plan it: the part
of `mlagen inspect` that a capture then logs, graph by graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from .sglang.features import IN_GRAPH
from .sglang.locate import Target
from .spec import Spec, Variant

#: Guard of variants.yaml -> what of a graph it keeps on FlashInfer's own plan.
UNGUARDED = {
    "fa-back-end": "a back end other than FA2 and FA3",
    "uniform-tokens": "no one number of query tokens a request",
    "work-items-fit": "more work items than FlashInfer's arrays hold",
    "tile-divides-heads": "heads that do not divide the query tile, where the plan is causal",
    "owned-input": "DFLASH's verify input, a ragged verify layout",
    "no-context-parallel": "decode context parallelism",
}

#: What is compared at the capture of any graph but a draft step's, whose positions are zero there.
FORMULA = "lengths by another formula than in variants.yaml"

#: What the planning kernel does not plan, in the order in which MlagenDevicePlan.refuses (in
#: templates/plan/device.py.jinja) looks for it. A test holds the numbers against that file.
NOT_ON_THE_DEVICE = (
    "Triton before 3.4",
    "clusters of neither one nor two blocks",
    "more than 1024 query tiles",
    "tiles times the longest sequence above int32",
    "pages of several tokens",
)


def planner_facts(spec: Spec, target: Target) -> list[tuple[str, str]]:
    """Rows for a report, of the variants that the file has a place for: who plans, and when; then
    what a capture decides and logs, with its reason."""
    captured = [
        variant
        for variant in spec.variants
        if "replay" in variant.when and variant.name not in target.absent
    ]
    in_graph = target.features.in_graph
    facts = [
        ("planner", f"{names}: {text}")
        for text, names in _grouped(captured, lambda variant: _planner(variant, in_graph))
    ]
    facts += [
        ("FlashInfer plans", f"graphs of {names} with {text}")
        for text, names in _grouped(captured, _unguarded)
    ]
    on_device = ", ".join(variant.name for variant in captured if variant.planner == "device")
    if on_device:
        reasons = "; ".join(NOT_ON_THE_DEVICE)
        facts.append(("the host plans", f"graphs of {on_device} with {reasons}"))
    return facts


def _grouped(
    variants: Iterable[Variant], text_of: Callable[[Variant], str]
) -> list[tuple[str, str]]:
    """Each text with the names of the variants that it is about, in their order."""
    named: dict[str, list[str]] = {}
    for variant in variants:
        named.setdefault(text_of(variant), []).append(variant.name)
    return [(text, ", ".join(names)) for text, names in named.items()]


def _planner(variant: Variant, in_graph: bool) -> str:
    if variant.planner == "host":
        return "host, before each replay"
    if in_graph:
        return "device, recorded in the graph"
    return f"device, launched before each replay: nothing in this file knows {IN_GRAPH}"


def _unguarded(variant: Variant) -> str:
    """What keeps a graph of the variant on FlashInfer's own plan."""
    reasons = [UNGUARDED[guard] for guard in variant.guards]
    if variant.serves != "draft-decode":
        reasons.append(FORMULA)
    return "; ".join(reasons)
