"""Waits for the GPU as `inspect` tells them: of FlashInfer's own plan and of each step of SGLang's
file, and which of them a variant removes.

Data for the report; what waits is found in `flashinfer/waits.py` and `judge/paths.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from .flashinfer.waits import PlanWait, StockWaits
from .flow.tensors import KINDS
from .judge.paths import PathWait, Step, StepWaits
from .report import Facts, Wait
from .spec import Spec

#: The slot of a variant that plans a step: `serves` in variants.yaml.
_SERVES: Mapping[Step, str] = {
    "decode": "decode",
    "draft-decode": "draft-decode",
    "verify": "target-verify",
    "draft-extend": "draft-extend",
    "draft-extend-v1": "draft-extend",
}
#: Why a line that mlagen wrote may wait, by the function around it.
_OUR_REASONS: Mapping[str, str] = {
    "_mlagen_host_lens": "only where SGLang gives no host lengths",
    "_mlagen_formula_differs": "once a graph, to compare the formula with the device",
    "_mlagen_call_stock": "only where FlashInfer's own plan is kept, or a wrapper plans first",
}
_ALL = "every variant: they call the private planner alone"


def plan_waits(stock: StockWaits) -> tuple[Wait, ...]:
    """The waits of FlashInfer's own plan, for the report."""
    return tuple(
        Wait(
            file=wait.place.path,
            line=wait.place.line,
            step="plan",
            when=tuple(f"{mode}, arrays on the {arrays}" for mode, arrays in wait.when),
            way=wait.way,
            expression=wait.expression,
            kind=wait.kind,
            times=wait.times,
            condition=wait.condition,
            counted=wait.counted,
            removed_by=_ALL,
            note=wait.note,
        )
        for wait in stock.waits
    )


def plan_facts(stock: StockWaits) -> Facts:
    """The same in words: how many, then each group of those that go one way into one file."""
    if stock.unknown:
        return (("waits of its plan", f"not known: {stock.unknown}"),)
    graph, eager = (stock.count(mode, "device") for mode in ("graph", "eager"))
    graph_host, eager_host = (stock.count(mode, "host") for mode in ("graph", "eager"))
    facts = [
        (
            "waits of its plan",
            f"{graph} for a captured graph, {eager} eager; {graph_host} and {eager_host} with "
            "host arrays (kv_indices on the device), as PyTorch's sync debug mode counts; all are "
            "above the private call, so every variant removes them",
        )
    ]
    groups: dict[tuple[str, tuple[str, ...], str], list[PlanWait]] = {}
    for wait in stock.waits:
        way = wait.way[1:2] if wait.note else wait.way[1:3]
        groups.setdefault((wait.place.path, way, wait.note), []).append(wait)
    for (file, way, note), waits in groups.items():
        by = f" by {' > '.join(_short(way))}" if way else ""
        number = sum(w.times for w in waits)
        if note:
            waits = list({wait.place.line: wait for wait in waits}.values())
            tail, number = f"; not counted: {note}", len(waits)
        else:
            tail = _exceptions(waits)
        facts.append(("wait", f"{number} in {file}, {_lines(waits)}{by}{tail}"))
    return tuple(facts)


def _exceptions(waits: Sequence[PlanWait]) -> str:
    """How many of the waits are there with host arrays too, and how many on which condition."""
    host = sum(w.times for w in waits if ("graph", "host") in w.when)
    tail = f"; {host} of them with host arrays too" if host else ""
    for condition in dict.fromkeys(w.condition for w in waits if w.condition):
        number = sum(w.times for w in waits if w.condition == condition)
        tail += f"; {number} of them where {condition}"
    return tail


def step_reports(
    file: str,
    steps: Sequence[StepWaits],
    patched: Sequence[StepWaits] | None,
    spec: Spec,
    absent: Mapping[str, str],
) -> tuple[Wait, ...]:
    """The waits of each step of SGLang's file, with the variant that removes each, or why it stays.

    Args:
        patched: the steps of the file as mlagen patches it; None where it cannot be patched.
        absent: variants that are not used for this file, with the reason.
    """
    after = {(s.step, s.occasion): s for s in patched or ()}
    found: dict[Wait, None] = {}
    for step in steps:
        there = after.get((step.step, step.occasion))
        for wait in step.waits:
            removed, note = _fate(wait, there, spec, absent, patched is None)
            found[
                Wait(
                    file=file,
                    line=wait.line,
                    step=wait.step,
                    when=(wait.occasion,),
                    way=wait.way,
                    expression=wait.expression,
                    kind=wait.kind,
                    times=wait.times,
                    condition=wait.condition,
                    counted=wait.kind != "pageable-copy",
                    removed_by=removed,
                    note=note,
                )
            ] = None
    return tuple(found)


def step_facts(steps: Sequence[StepWaits], waits: Sequence[Wait]) -> Facts:
    """The same in words: how often each step waits, then each place with the steps it serves."""
    totals: dict[str, list[str]] = {}
    for step in steps:
        if step.occasion in ("replay", "eager") or not step.followed:
            name = f"{step.step}, a step of the chain" if step.step == "draft-decode" else step.step
            number = str(step.least) if step.followed else "could not be followed"
            if step.count > step.least:
                number += f" (at most {step.count})"
            totals.setdefault(name, []).append(f"{step.occasion} {number}")
    facts = []
    if totals:
        text = "; ".join(f"{name}: {', '.join(parts)}" for name, parts in totals.items())
        facts.append(("waits of a step", text))
    places: dict[tuple[int, str, str], list[Wait]] = {}
    for wait in waits:
        places.setdefault((wait.line, wait.expression, wait.way[-1]), []).append(wait)
    for (line, expression, where), group in sorted(places.items(), key=lambda item: item[0][0]):
        facts.append(("wait", f"line {line}, {where}: {expression} ({_place(group)})"))
    return tuple(facts)


def _place(group: Sequence[Wait]) -> str:
    """Of waits at one place: how, in which steps and on which way, and what removes them."""
    first = group[0]
    times = sorted({wait.times for wait in group})
    how = next(words for kind, words in KINDS.items() if kind == first.kind)
    if times != [1]:
        how += f": {' or '.join(str(n) for n in times)} waits"
    fates: dict[str, list[str]] = {}
    for wait in group:
        fate = f"removed by {wait.removed_by}" if wait.removed_by else f"stays: {wait.note}"
        step = wait.step if wait.when == (wait.step,) else f"{wait.step} {wait.when[0]}"
        fates.setdefault(fate, []).append(step)
    told = [f"{', '.join(dict.fromkeys(steps))}: {fate}" for fate, steps in fates.items()]
    shortest = min((wait.way for wait in group), key=len)
    way = f"by {' > '.join(_short(shortest))}" if len(shortest) > 1 else ""
    more = len({wait.way for wait in group}) - 1
    if way and more:
        way += f" and {more} other way{'s' if more > 1 else ''}"
    return "; ".join(part for part in (how, way, *told) if part)


def _fate(
    wait: PathWait,
    after: StepWaits | None,
    spec: Spec,
    absent: Mapping[str, str],
    refused: bool,
) -> tuple[str, str]:
    """(the variant that removes a wait, why it stays): one of them is empty."""
    if wait.ours:
        return "", _OUR_REASONS.get(_short(wait.way[-1:])[0], "mlagen's own")
    if wait.occasion == "start-up":
        return "", "once, at start-up"
    variant = next(
        (
            v.name
            for v in spec.variants
            if v.serves == _SERVES[wait.step] and wait.occasion in v.when and not v.context_parallel
        ),
        None,
    )
    if variant is not None and "mlagen_request" in wait.condition:
        return variant, ""  # of a patched file: the way around the plan that is in it
    if wait.occasion == "capture":
        return "", "once a graph; a capture is planned by FlashInfer"
    if variant is None:
        return "", f"no variant serves {wait.step} {wait.occasion}"
    if refused or variant in absent:
        return "", absent.get(variant, "mlagen cannot patch this file")
    if after is not None and not after.followed:
        return "", "the patched step could not be followed"
    if after is not None and any(_same(wait, other) for other in after.waits):
        return "", "not in a plan" if wait.kind != "stock-plan" else f"{variant} does not reach it"
    return variant, ""


def _same(wait: PathWait, other: PathWait) -> bool:
    """Whether a wait of the file is still there, on no further condition, when it is patched."""
    ignored = {"line": 0, "ours": False}
    return replace(wait, **ignored) == replace(other, **ignored)  # type: ignore[arg-type]


def _lines(waits: Iterable[PlanWait]) -> str:
    times: dict[int, int] = {}
    for wait in waits:
        times[wait.place.line] = times.get(wait.place.line, 0) + wait.times
    shown = [f"{line}" + (f" ({n} times)" if n > 1 else "") for line, n in sorted(times.items())]
    return f"line{'s' if len(shown) > 1 else ''} {', '.join(shown)}"


def _short(way: Sequence[str]) -> list[str]:
    """The functions of a way, without their classes."""
    return [name.rpartition(".")[2] for name in way]
