"""Results of the benchmark -> text: the table to paste, docs/benchmarks.md, JSON.

No figure is typed by hand anywhere: what stands in docs/ is made here, from files.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import mode
from typing import Any

from . import bench_attention_report as attention_report
from .bench import (
    CONDITIONS,
    CONTENDERS,
    DEVICE,
    END_TO_END,
    FLOOR,
    FOCUS,
    LIMIT,
    OURS,
    PART,
    STOCK,
    UPSTREAM,
    Cell,
    Condition,
    Moved,
    Plans,
    Result,
    Samples,
    Setting,
    bars,
)
from .bench_attention import NEVER_ABOVE, PLAN_ASKED, Attention
from .bench_attention_report import table
from .bench_stats import Bar, ratios, spread, thousands
from .errors import Problem
from .report import SCHEMA_VERSION, Facts, Printer, Report, render_text

_MARKS = {"met": "met", "within noise": "within noise", "missed": "**missed**"}


@dataclass(frozen=True)
class BenchReport(Report):
    """A report whose answer is figures."""

    results: tuple[Result, ...] = ()

    @classmethod
    def of(
        cls,
        results: tuple[Result, ...],
        gate: bool,
        *,
        facts: Facts = (),
        notes: tuple[str, ...] = (),
    ) -> BenchReport:
        """Exit code 1 where a bar is missed and `gate` asks for that."""
        problems: tuple[Problem, ...] = ()
        if gate:
            problems = tuple(
                Problem(f"FlashInfer {bar.flashinfer}", 0, 0, "bar-missed", _said(bar))
                for result in results
                for bar in bars(result)
                if bar.verdict == "missed"
            )
        code = 1 if problems else 0
        return cls("bench", code, problems=problems, facts=facts, notes=notes, results=results)


def _said(bar: Bar) -> str:
    return f"asked: {bar.asked}; worst case: {bar.worst}"


def show(printer: Printer, report: BenchReport, as_json: bool) -> None:
    """Print: the table is the answer, to be pasted; the rest is progress."""
    if as_json:
        printer.answer(as_json_text(report.results, report.exit_code))
        return
    printer.progress(render_text(report))
    printer.answer(summary(report.results))


# --- the table to paste -----------------------------------------------------------------------


def summary(results: Sequence[Result]) -> str:
    """Markdown: medians at one length, the loop, the bars; ends in a line end."""
    parts = [_measured_on(results), *_plan_summary(results), *_loop_summary(results)]
    parts += _uneven_summary(results)
    measured = [(r.flashinfer, r.backend, r.attention) for r in results if r.attention is not None]
    parts += attention_report.summary(measured)
    return "\n\n".join([*parts, *_bars(results)]) + "\n"


def _measured_on(results: Sequence[Result]) -> str:
    return "\n".join(f"- {_machine(result)}" for result in results)


def _machine(result: Result) -> str:
    cuda = f", CUDA {result.cuda}" if result.cuda else ""
    quick = ", a quick run" if result.quick else ""
    broken = "" if result.complete else ", **broken off**"
    return (
        f"FlashInfer {result.flashinfer} ({result.backend}), {result.gpu}, torch {result.torch}"
        f"{cuda}, mlagen {result.mlagen}, {result.date}{quick}{broken}"
    )


def _plan_summary(results: Sequence[Result]) -> list[str]:
    """Host microseconds of a plan at the middle length, idle and busy."""
    measured = [(result, result.plan) for result in results if result.plan and result.plan.cells]
    if not measured:
        return []
    names = _names(cell for _, plan in measured for cell in plan.cells)
    rows = []
    for result, plan in measured:
        length = middle_length(plan)
        for cell in sorted(plan.cells, key=lambda cell: cell.batch):
            if cell.length != length:
                continue
            times = [_idle_and_busy(cell.samples, name) for name in names]
            rows.append([result.flashinfer, str(cell.batch), *times])
    length = middle_length(measured[0][1])
    head = ["FlashInfer", "batch", *(CONTENDERS[name] for name in names)]
    title = (
        f"Host time of a target-verify plan in µs, GPU idle / busy, {thousands(length)} tokens a "
        "request (medians):"
    )
    return [title, table(head, rows), _ways(measured), *_costs(measured, names)]


def _ways(measured: Iterable[tuple[Result, Plans]]) -> str:
    """How mlagen's plans on the host come by page numbers, by FlashInfer."""
    told = [
        f"{result.flashinfer} "
        + ("as up to SGLang 0.5.21 (in place)" if plan.in_place else "as from 0.5.22 on (a copy)")
        for result, plan in measured
    ]
    return f"mlagen's plans on the host, and their page numbers: {', '.join(told)}."


def _names(cells: Iterable[Cell]) -> list[str]:
    """The contenders that were measured; older results have fewer."""
    found = {name for cell in cells for name in cell.idle}
    return [name for name in CONTENDERS if name in found]


def _idle_and_busy(samples: Callable[[Condition], Samples], name: str) -> str:
    """Medians of one contender; nothing where it was not measured."""
    found = [samples(condition) for condition in CONDITIONS]
    return " / ".join(f"{spread(one[name]).median:.0f}" for one in found if name in one)


def _costs(measured: Iterable[tuple[Result, Plans]], names: Sequence[str]) -> list[str]:
    """The time with what the index kernel is given, waits and bytes moved, of a plan at one batch
    size."""
    rows = []
    for result, plan in measured:
        cell = _focus(plan)
        moved = {row.contender: row for row in plan.bytes if row.batch == cell.batch}
        whole = ["" if name == FLOOR else _idle_and_busy(cell.whole, name) for name in names]
        rows.append([result.flashinfer, "µs with the index kernel's arrays", *whole])
        waits = [_waits(plan, cell.batch, name) for name in names]
        rows.append([result.flashinfer, "waits for the GPU", *waits])
        if moved:
            sent = [_bytes(moved.get(name)) for name in names]
            rows.append([result.flashinfer, "KiB to the GPU / back", *sent])
    title = f"Of one plan at batch {FOCUS}:"
    head = ["FlashInfer", "", *(CONTENDERS[name] for name in names)]
    return [title, table(head, rows)]


def _waits(plan: Plans, batch: int, name: str) -> str:
    """How often a plan waits at that batch size: the number that most lengths agree on, as a
    process may count one too many in its first cell, where PyTorch tells that its count is new."""
    counts = [cell.waits[name] for cell in plan.cells if cell.batch == batch and name in cell.waits]
    return str(mode(counts)) if counts else ""


def _focus(plan: Plans) -> Cell:
    """The cell at the middle length whose batch size is nearest to the one that has a bar."""
    length = middle_length(plan)
    cells = [cell for cell in plan.cells if cell.length == length]
    return min(cells, key=lambda cell: abs(cell.batch - FOCUS))


def middle_length(plan: Plans) -> int:
    """The length that the short tables and the plot are about."""
    lengths = sorted({cell.length for cell in plan.cells})
    return lengths[len(lengths) // 2]


def _bytes(moved: Moved | None) -> str:
    """Recorded ones; else what the planner alone sends, said to be so."""
    if moved is None:
        return ""
    if moved.to_gpu is None or moved.to_host is None:
        return f"≥ {moved.planner / 1024:.1f} / ?"
    return f"{moved.to_gpu / 1024:.1f} / {moved.to_host / 1024:.1f}"


#: Ratios of the loop's rates, by what they are called.
_COMPARED = {
    "SGLang's / stock": (UPSTREAM, STOCK),
    "mlagen's / stock": (OURS, STOCK),
    "mlagen's / SGLang's": (OURS, UPSTREAM),
    "mlagen's / no plans": (OURS, LIMIT),
    "in the graph / mlagen's": (DEVICE, OURS),
}


def _loop_summary(results: Sequence[Result]) -> list[str]:
    even = [
        (result.flashinfer, setting)
        for result in results
        if result.loop is not None
        for setting in result.loop.settings
        if not setting.uneven
    ]
    if not even:
        return []
    measured = _measured(setting for _, setting in even)
    compared = {name: pair for name, pair in _COMPARED.items() if measured.issuperset(pair)}
    rows = [[version, *_loop_row(setting, compared.values())] for version, setting in even]
    head = [
        "FlashInfer",
        "batch",
        "tokens",
        "host",
        "attention's share",
        "stock, steps/s",
        *compared,
    ]
    title = "The speculative-decoding loop, ratios of steps per second, median (p10-p90):"
    return [title, table(head, rows)]


def _uneven_summary(results: Sequence[Result]) -> list[str]:
    """The loop with uneven lengths: graphs that plan themselves, held against the host's plans."""
    rows, clocks = [], []
    for result in results:
        for setting in result.loop.settings if result.loop is not None else ():
            least = setting.asked_of_device
            if least is None or setting.device_attention_ms is None:
                continue
            rates = setting.rates
            best = setting.best_host
            rows.append(
                [
                    result.flashinfer,
                    str(setting.batch),
                    thousands(setting.length),
                    f"{setting.share:.2f}",
                    f"{setting.device_attention_ms / setting.attention_ms:.3f}",
                    *(f"{spread(rates[n]).median:.1f}" for n in (UPSTREAM, OURS, DEVICE)),
                    spread(ratios(rates[DEVICE], rates[best])).text(3),
                    f"{least:.3f}",
                ]
            )
            clocks.append(_clocks(setting, (best, DEVICE)))
    if not rows:
        return []
    head = [
        *("FlashInfer", "batch", "tokens", "attention's share s"),
        "attention by the GPU's plan, of FlashInfer's: r",
        *("SGLang's, steps/s", "mlagen's, steps/s", "in the graph, steps/s"),
        *("in the graph / best host plan", "asked"),
    ]
    if any(clocks):
        head.append("SM clock in MHz, best host plan / in the graph")
        rows = [[*row, clock] for row, clock in zip(rows, clocks, strict=True)]
    title = "The loop with uneven lengths, where graphs plan themselves, *ahead*:"
    return [title, table(head, rows)]


def _clocks(setting: Setting, names: Sequence[str]) -> str:
    """Medians over the blocks, one a contender; empty where one of them was not read."""
    read = [setting.clocks.get(name, ()) for name in names]
    return " / ".join(f"{spread(values).median:.0f}" for values in read) if all(read) else ""


def _measured(settings: Iterable[Setting]) -> set[str]:
    """The contenders of the loop; older results have fewer."""
    return {name for setting in settings for name in setting.rates}


def _loop_row(setting: Setting, pairs: Iterable[tuple[str, str]]) -> list[str]:
    rates = setting.rates
    wrong = sum(setting.wrong.values())
    compared = [spread(ratios(rates[a], rates[b])).text(3) if a in rates else "" for a, b in pairs]
    if wrong:
        names = ", ".join(name for name, count in setting.wrong.items() if count)
        compared[0] += f" (wrong output: {names})"
    return [
        str(setting.batch),
        thousands(setting.length),
        setting.mode,
        f"{setting.share:.2f}",
        f"{spread(rates[STOCK]).median:.1f}",
        *compared,
    ]


def _bars(results: Sequence[Result]) -> list[str]:
    found = [bar for result in results for bar in bars(result)]
    if not found:
        return []
    rows = [[bar.flashinfer, bar.asked, _MARKS[bar.verdict], bar.worst] for bar in found]
    return ["Bars:", table(["FlashInfer", "asked", "", "worst case"], rows)]


# --- docs/benchmarks.md -----------------------------------------------------------------------


def page(results: Sequence[Result], plot: str) -> str:
    """docs/benchmarks.md. `plot`: the SVG's path from there."""
    parts = [_INTRODUCTION]
    if not results:
        return "\n\n".join([*parts, _NOTHING, _METHOD]) + "\n"
    parts += ["## In short", summary(results).rstrip("\n")]
    parts.append(f"![Host time of a plan, and the loop]({plot})")
    parts += [_end_to_end(results), _METHOD, "## Every figure"]
    for result in results:
        parts += _all_figures(result)
    return "\n\n".join(part for part in parts if part) + "\n"


def _end_to_end(results: Sequence[Result]) -> str:
    """The loop beside what SGLang measured of its own plans in a whole server."""
    lines = []
    for result in results:
        for setting in result.loop.settings if result.loop is not None else ():
            rates = setting.rates
            if STOCK not in rates:
                continue
            ours = spread(ratios(rates[OURS], rates[STOCK])).median
            theirs = spread(ratios(rates[UPSTREAM], rates[STOCK])).median
            lines.append(
                f"- FlashInfer {result.flashinfer}, {setting}: {ours:.2f} with mlagen's plans, "
                f"{theirs:.2f} with SGLang's"
            )
    if not lines:
        return ""
    text = (
        f"SGLang measured {END_TO_END} end to end with its plans (DeepSeek-R1, H200). The loop "
        "here, to stock:"
    )
    return text + "\n\n" + "\n".join(lines)


def _all_figures(result: Result) -> list[str]:
    parts = [f"### FlashInfer {result.flashinfer}", _machine(result) + "."]
    if result.plan is not None:
        names = _names(result.plan.cells)
        for condition in CONDITIONS:
            rows = [
                [
                    str(cell.batch),
                    thousands(cell.length),
                    *(spread(cell.samples(condition)[name]).text() for name in names),
                ]
                for cell in sorted(result.plan.cells, key=lambda c: (c.length, c.batch))
            ]
            parts.append(f"Host µs of a plan, GPU {condition}, median (p10-p90):")
            titles = [CONTENDERS[name] for name in names]
            parts.append(table(["batch", "tokens", *titles], rows))
        parts += _set_aside(result.plan)
        parts += _index_arrays(result.plan)
        parts += _waits_and_bytes(result.plan)
    if result.loop is not None:
        parts += _rates([setting for setting in result.loop.settings if not setting.uneven])
        parts += _rates([setting for setting in result.loop.settings if setting.uneven])
    if result.attention is not None:
        parts += attention_report.figures(result.attention)
    left_out = [
        *(result.plan.left_out if result.plan else ()),
        *(result.loop.left_out if result.loop else ()),
        *(result.attention.left_out if result.attention else ()),
    ]
    if left_out:
        parts.append("Left out for want of time: " + "; ".join(left_out) + ".")
    return parts


def _set_aside(plan: Plans) -> list[str]:
    """How many rounds are not in the figures; nothing where none was left out."""
    aside = sum(cell.set_aside for cell in plan.cells)
    rounds = sum(
        max(map(len, cell.samples(condition).values()))
        for cell in plan.cells
        for condition in CONDITIONS
    )
    if not aside:
        return []
    return [f"Rounds set aside, as the host was slow: {aside} of {aside + rounds}."]


def _index_arrays(plan: Plans) -> list[str]:
    """What comes on top of plans for the index kernel."""
    names = [name for name in _names(plan.cells) if name != FLOOR]
    rows = []
    for cell in sorted(plan.cells, key=lambda c: (c.length, c.batch)):
        times = [_idle_and_busy(cell.arrays, name) for name in names]
        rows.append([str(cell.batch), thousands(cell.length), *times])
    title = "Host µs of the arrays that the index kernel is given, GPU idle / busy (medians):"
    return [title, table(["batch", "tokens", *(CONTENDERS[name] for name in names)], rows)]


def _waits_and_bytes(plan: Plans) -> list[str]:
    cells = {cell.batch: cell for cell in plan.cells if cell.length == middle_length(plan)}
    names = _names(cells.values())
    rows = []
    for batch in sorted(cells):
        moved = {row.contender: row for row in plan.bytes if row.batch == batch}
        row = [f"{_waits(plan, batch, name)}; {_bytes(moved.get(name))}" for name in names]
        rows.append([str(batch), *(text.removesuffix("; ") for text in row)])
    if not rows:
        return []
    title = "Waits for the GPU; KiB to the GPU / back:"
    return [title, table(["batch", *(CONTENDERS[name] for name in names)], rows)]


def _rates(settings: Sequence[Setting]) -> list[str]:
    if not settings:
        return []
    measured = _measured(settings)
    names = [name for name in (*CONTENDERS, LIMIT) if name in measured]
    rows = [
        [
            str(setting.batch),
            thousands(setting.length),
            setting.mode,
            f"{setting.share:.2f}",
            f"{setting.gpu_step_ms:.2f}",
            *(
                spread(setting.rates[name]).text(1) if name in setting.rates else ""
                for name in names
            ),
        ]
        for setting in settings
    ]
    called = {**CONTENDERS, LIMIT: "no plans", DEVICE: "in the graph"}
    titles = [called[name] for name in names]
    head = ["batch", "tokens", "host", "attention's share", "GPU ms a step", *titles]
    uneven = ", uneven lengths" if settings[0].uneven else ""
    return [f"Steps per second{uneven}, median (p10-p90):", table(head, rows)]


_INTRODUCTION = """\
# Benchmarks

What plans cost, measured by `mlagen bench`. This page is made from its results; no figure in it is
typed by hand.

```sh
mlagen bench --flashinfer 0.7.2 --python PY --out 0.7.2.json    # one for each version
mlagen bench --flashinfer 0.7.2 --python PY --part attention --out 0.7.2-attention.json
mlagen bench --from 0.6.18.json --from 0.7.2.json --from 0.7.2-attention.json \\
    --docs docs/benchmarks.md --draw docs/schedule.svg
```"""

_NOTHING = "No results yet."

_METHOD = f"""\
## What is measured

**A plan**: that of target-verify, 3 tokens a request, 16 heads (DeepSeek-R1 under TP 8), bf16,
lengths drawn within a quarter of the mean. The time is the host's, from host lengths in hand to the
return of the plan, with the arrays that it needs built. Between the two SGLang launches its index
kernel, which makes the page numbers; the arrays on the GPU that it is given are counted apart, as
they are no part of the plan. *Idle*: the GPU has nothing to do. *Busy*: some 4 ms of work are
queued before. Hosts are shared, and go at two speeds: a round in which a plan that is always the
same took more than 1.35 of its quickest is set aside and made again, for 25 s of a run at most;
how many were is told below the figures. *Waits* are those that PyTorch's sync debug mode tells of.
*Bytes* are those of copies between host and GPU in a trace of PyTorch's profiler; `≥` marks sizes
that the planner itself tells, where no trace was to be had. Copies within the GPU or the host are
not counted.

- **FlashInfer's**: `plan()` with arrays on the device, called as SGLang does before 0.5.18. The
  index kernel's arrays are made anew for each pass, by five launches, and its page numbers are
  copied into the captured buffer by the plan; so with the next two.
- **FlashInfer's, host arrays**: the same with pinned host arrays.
- **SGLang's**: what SGLang does from 0.5.18 on, written anew after its behaviour: pinned arrays
  filled by slices, four copies to the bound buffers, the private planner.
- **mlagen's**: the rendered functions, called as a patched SGLang calls them. Up to 0.5.21 the
  index kernel fills the captured buffer in place, by two small kernels' lengths; nothing is copied.
  From 0.5.22 on, which goes with FlashInfer 0.7, SGLang's own way is kept, with a copy as above.
  Which of the two was measured is told below the first table.
- **device, launched**: a captured graph is planned by a kernel on the GPU (`planner: device`),
  which is launched before the replay. Counted is the host's time for the request and that launch.
  The lengths are in the graph's own buffer beforehand, where SGLang puts them whoever plans. Page
  numbers are filled in place.
- **device, in the graph**: the kernel is recorded in the graph, and the request is all that is
  left. The index kernel's lengths are made by a small kernel of mlagen's.
- **planner alone**: `wrapper._cached_module.plan(*nine)` as the release exposes it, its nine made
  beforehand. As all others it is called behind the index kernel's arrays, which leave it caches as
  cold as they find. Up to 0.6.18 it queues the copy to the device itself; from 0.7.0 it is the
  method of FlashInfer's staging proxy, with its copy through fresh pinned memory.

**The loop**: a step is two draft steps in one graph; target-verify in one graph, 61 attention
layers over 4 KV pools in turn with matrix products between them; the accepted tokens' copy to the
host; an eager draft-extend; 1 ms of the host's own work. The products are sized until verify's
attention has the share of a step's GPU time that is asked for, 0.6 or 0.3; the share measured is
told. Draft steps of *stock* are planned by SGLang's decode plan, as SGLang has always done. Index
kernels are graphs that all contenders share here, and every plan of verify copies the page numbers.

- *ahead*: the host plans step k+1 when it has the result of step k-1. It takes what step k accepts
  as known, so that plans are right; SGLang cannot yet. SGLang's plans share one pinned buffer with
  copies that are still queued up to FlashInfer 0.6.18, so there they wait for step k.
- *fenced*: all wait for step k before they plan step k+1, as SGLang does.
- *no plans*: the same loop with the plans taken out. Its results are wrong; no plan on the host can
  be faster. *In the graph*: draft steps and verify plan themselves; draft-extend is planned on the
  host by all.

Settings with *uneven lengths* (16k, uniform from half the mean to three halves of it, where all
others are within a quarter) compare SGLang's and mlagen's plans on the host with graphs that plan
themselves. A plan dealt by length makes the attention itself faster: r is verify's attention over
61 layers in a graph that plans itself, to the same attention by FlashInfer's schedule, at the same
lengths in the same run. With s the share of attention in a step, 1 / (1 - s (1 - r)) is what that
is worth, and {PART:.2f} of it is asked for, above the faster of the host's plans. The SMs' clock is
NVML's as a block ends, over its last sample period: a GPU that is held at its power limit is
clocked lower where its SMs idle less, and that slows the matrix products as well.

A setting that was measured in several runs has a row for each. Rounds of one run hang together, and
runs differ by more than they do; so a bar is about the mean of the runs' medians, and *missed*
where each run missed it.

**Attention**, by its own part of the run: one forward's attention, 61 layers, with the kernel that
plans it in the graph, to the same by FlashInfer's schedule, planned before anything is timed. All
61 layers are run by either; the ratio is the time of the one to that of the other, with nothing
subtracted or scaled. Microseconds a layer are a 61st of a forward, the GPU's with its plan. The
plan's own time, for the bar about it, is that of a graph of 20 of them. Queries, lengths and pages
are the same, the two take turns in 5 rounds (15 for equal lengths, which are not drawn again), and
the bits of their outputs are compared in each draw. FlashInfer plans anew in each round, and both
are timed behind that plan: from one plan of the host to the next, short forwards of either schedule
take up to 5% more or less, both by as much. Every token has a page of its own (5 Mi pages), and
layers read up to 16 caches in turn: what is shared would be read from the L2 cache.

Lengths: *uniform* from half the mean to three halves, *geometric* and *log-normal* (sigma 1) up to
8 times the mean, *one long* (4 times the mean among requests of an eighth of it), *equal*. All but
the equal ones are drawn three times, as one draw of 64 requests is one of many; geometric and
log-normal ones with 128 heads, where draws differ most, twelve times. A row is the
geometric mean over the draws of their medians over the rounds; the bracket is the lowest and the
highest draw's median, not the spread of the rounds. Each draw by itself is held to the same bits,
to {NEVER_ABOVE:.2f} and to the plan's {PLAN_ASKED:.0%}; what is asked of large batches, and in the
mean, is about shapes by those means. A mean is *missed* only where even the mean of the least that
the medians may be is too high.

The planning kernel alone is that of decode, 16 heads, 2k tokens in the mean, where a request is a
tile. *Quick* is a plan for one layer and uniform lengths, which are dealt in turns, *thorough* one
for many layers and geometric ones, which are dealt in rounds.

Contenders take turns in an order that is drawn anew for each round, with Python's garbage collector
off, after a warm-up. Before plans are timed, and in the loop after each block, outputs must equal
those of FlashInfer's own plan bit for bit, or nothing is published.

A bar is *missed* where the median of the differences (ratios), round by round, is on the wrong side
and three standard deviations of that median do not reach back; *within noise* where they do. Of up
to 14 rounds, as the loop and long forwards have, all have to be on the wrong side. The worst case
at batch {FOCUS}, or of all cells, is shown."""


# --- JSON -------------------------------------------------------------------------------------


def as_json_text(results: Sequence[Result], exit_code: int) -> str:
    """Medians, spreads and bars for machines: one JSON object, keys sorted."""
    content = {
        "schema_version": SCHEMA_VERSION,
        "command": "bench",
        "exit_code": exit_code,
        "results": [_result_json(result) for result in results],
    }
    return json.dumps(content, indent=2, sort_keys=True) + "\n"


def _result_json(result: Result) -> dict[str, Any]:
    facts = result.model_dump(exclude={"plan", "loop", "attention"})
    plans = [
        {
            "batch": cell.batch,
            "length": cell.length,
            "gpu": condition,
            "contender": name,
            "microseconds": _spread_json(values),
            "microseconds_of_index_arrays": _spread_json(cell.arrays(condition)[name]),
            "waits": cell.waits.get(name),
        }
        for cell in (result.plan.cells if result.plan is not None else ())
        for condition in CONDITIONS
        for name, values in cell.samples(condition).items()
    ]
    moved = [row.model_dump() for row in (result.plan.bytes if result.plan is not None else ())]
    loop = [
        {
            **setting.model_dump(exclude={"rates", "clocks"}),
            "steps_per_second": {name: _spread_json(v) for name, v in setting.rates.items()},
            "clock_in_mhz": {name: _spread_json(v) for name, v in setting.clocks.items() if v},
        }
        for setting in (result.loop.settings if result.loop is not None else ())
    ]
    found = [_bar_json(bar) for bar in bars(result)]
    attention = result.attention
    layers = [] if attention is None else _attention_json(attention)
    kernel = [
        {**one.model_dump(exclude={"us"}), "microseconds": _spread_json(one.us)}
        for one in (attention.kernel if attention is not None else ())
    ]
    figures = {"plans": plans, "bytes": moved, "loop": loop, "attention": layers}
    return {**facts, **figures, "kernel": kernel, "bars": found}


def _attention_json(found: Attention) -> list[dict[str, Any]]:
    return [
        {
            **cell.model_dump(exclude={"stock", "mlagen"}),
            "microseconds": {
                "stock": _spread_json(cell.stock),
                "mlagen": _spread_json(cell.mlagen),
            },
            "ratio": _spread_json(cell.ratios),
        }
        for cell in found.cells
    ]


def _spread_json(values: Sequence[float]) -> dict[str, float]:
    found = spread(values)
    return {"median": found.median, "p10": found.low, "p90": found.high, "count": len(values)}


def _bar_json(bar: Bar) -> dict[str, str]:
    return {"asked": bar.asked, "verdict": bar.verdict, "worst": bar.worst}
