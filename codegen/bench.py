"""What the benchmark measured: its JSON as frozen data, and the bars.

The scripts of `templates/bench/` write one file a FlashInfer; several make one table. Contenders
take turns within a round, and what is compared is compared round by round: a machine that is slow
for a while is slow for all of them.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeAlias, TypeVar

from pydantic import AfterValidator, Field, ValidationError, model_validator

from .bench_attention import Attention, Kernel, attention_bars
from .bench_stats import (
    Bar,
    Case,
    Data,
    at_most,
    bar_of,
    differences,
    grouped,
    known,
    mean_at_least,
    ratios,
    thousands,
)
from .errors import usage

#: Of what the figures of plans mean; the script's is the same.
VERSION: Final = 3
#: Contenders by their names in the files, in the order of the tables.
CONTENDERS: Final[Mapping[str, str]] = {
    "stock": "FlashInfer's",
    "host-arrays": "FlashInfer's, host arrays",
    "upstream": "SGLang's",
    "mlagen": "mlagen's",
    "device": "device, launched",
    "device-graph": "device, in the graph",
    "floor": "planner alone",
}
#: Plans that the GPU makes. In the loop, where all of them are in the graph, the first is the name.
DEVICE, DEVICE_GRAPH = "device", "device-graph"
OURS, UPSTREAM, STOCK, FLOOR, LIMIT = "mlagen", "upstream", "stock", "floor", "none"
#: Microseconds that a plan may take above the planner alone, at that batch size.
ALLOWANCE: Final = 40.0
FOCUS: Final = 64
#: What part of the loop without plans ours has to reach.
PART: Final = 0.97
#: What SGLang measured end to end for its own fast plans: steps per second, theirs to stock.
END_TO_END: Final = 1.27
Condition: TypeAlias = Literal["idle", "busy"]
CONDITIONS: Final[tuple[Condition, ...]] = ("idle", "busy")
Samples: TypeAlias = Mapping[str, tuple[float, ...]]
_T = TypeVar("_T")


class Cell(Data):
    """Plans of one batch size at one mean length (tokens).

    Attributes:
        idle, busy: microseconds on the host by contender, a value a round; in the same round for
            all of them. Of the plan: page numbers are there.
        arrays_idle, arrays_busy: likewise, of the arrays that the index kernel is given, which
            makes the page numbers.
        outlasted: by contender, of how many plans the busy GPU was still busy when they returned.
        waits: by contender, waits for the GPU that PyTorch tells of.
        set_aside: rounds that are not among these, idle or busy, as the host was slow at their end.
    """

    batch: int
    length: int
    idle: Samples
    busy: Samples
    arrays_idle: Samples
    arrays_busy: Samples
    outlasted: Mapping[str, int]
    waits: Mapping[str, int]
    set_aside: int = 0

    def samples(self, condition: Condition) -> Samples:
        """Microseconds by contender."""
        return self.idle if condition == "idle" else self.busy

    def arrays(self, condition: Condition) -> Samples:
        """Microseconds of the index kernel's arrays by contender."""
        return self.arrays_idle if condition == "idle" else self.arrays_busy

    def whole(self, condition: Condition) -> Samples:
        """Microseconds of plans and of those arrays by contender, round by round."""
        return {
            name: tuple(map(sum, zip(plans, self.arrays(condition)[name], strict=True)))
            for name, plans in self.samples(condition).items()
        }

    @property
    def named(self) -> str:
        """What the scripts call it where they leave it out."""
        return f"batch {self.batch}, {self.length} tokens"

    @model_validator(mode="after")
    def _a_value_a_round(self) -> Cell:
        for condition in CONDITIONS:
            plans, arrays = self.samples(condition), self.arrays(condition)
            if {name: len(values) for name, values in plans.items()} != {
                name: len(values) for name, values in arrays.items()
            }:
                raise ValueError(f"{condition} and arrays_{condition} differ in their rounds")
        return self

    def __str__(self) -> str:
        return f"batch {self.batch}, {thousands(self.length)}"


class Moved(Data):
    """Bytes that one plan moves. `planner`: to the device, by FlashInfer's planner, from its own
    sizes. `to_gpu`, `to_host`: all that a trace has recorded, None where there was none."""

    batch: int
    length: int
    contender: str
    planner: int
    to_gpu: int | None
    to_host: int | None


class Plans(Data):
    """What plans cost.

    Attributes:
        busy_ms: of the work queued before each busy plan.
        in_place: whether mlagen's plan on the host is that of a file whose index kernel fills the
            captured buffer (SGLang up to 0.5.21), or copies the page numbers there.
    """

    # First, so that of an older file's errors this one is told.
    version: Annotated[int, AfterValidator(known(VERSION)), Field(validate_default=True)] = 1
    busy_ms: float
    tokens: int
    heads: int
    in_place: bool = True
    cells: tuple[Cell, ...]
    bytes: tuple[Moved, ...] = ()
    left_out: tuple[str, ...] = ()


class Setting(Data):
    """The loop in one shape, one run of it.

    Attributes:
        mode: `ahead`, or `fenced`: the host waits for each verify before it plans the next step.
        share: of a step's GPU time, what verify's attention takes; `wanted_share` was asked for.
        gpu_step_ms, attention_ms: GPU time of a step, and of verify's attention in it.
        rates: steps per second by contender, a value a block, in turn.
        wrong: by contender, blocks whose last step gave another output than FlashInfer's plans.
        uneven: lengths from half the mean to three halves; else within a quarter of it.
        device_attention_ms: of the same attention in a graph that plans itself, that included; None
            where an older mlagen did not measure it.
        clocks: of the SMs in MHz as blocks ended, by contender; none where it could not be read.
    """

    batch: int
    length: int
    mode: Literal["ahead", "fenced"]
    wanted_share: float
    share: float
    steps: int
    gpu_step_ms: float
    attention_ms: float
    rates: Samples
    wrong: Mapping[str, int]
    uneven: bool = False
    device_attention_ms: float | None = None
    clocks: Samples = Field(default_factory=dict)

    @property
    def best_host(self) -> str:
        """The contender that plans on the host and has the highest rate."""
        names = [name for name in self.rates if name not in (DEVICE, LIMIT)]
        return max(names, key=lambda name: statistics.median(self.rates[name]))

    @property
    def asked_of_device(self) -> float | None:
        """What part of the best host plan's rate the device's has to reach, of uneven lengths:
        attention that takes r of its time makes a step, of which it is the share s,
        1 / (1 - s (1 - r)) as fast."""
        if not self.uneven or self.device_attention_ms is None or DEVICE not in self.rates:
            return None
        ratio = self.device_attention_ms / self.attention_ms
        return PART / (1 - self.share * (1 - ratio))

    @property
    def named(self) -> str:
        """What the scripts call it where they leave it out."""
        shape = f"batch {self.batch}, {self.length} tokens"
        even = "uneven lengths" if self.uneven else "even lengths"
        return f"{shape}, {even}, share {self.wanted_share}, {self.mode}"

    def __str__(self) -> str:
        mode = "uneven" if self.uneven else self.mode
        return f"batch {self.batch}, {thousands(self.length)}, share {self.share:.2f}, {mode}"


class Loop(Data):
    """Steps per second of speculative decoding."""

    layers: int
    host_ms: float
    draft_steps: int
    tokens: int
    settings: tuple[Setting, ...]
    left_out: tuple[str, ...] = ()


class Result(Data):
    """One file: a run on one machine with one FlashInfer; or several, put together."""

    kind: Literal["mlagen-bench"]
    schema_version: Literal[1]
    mlagen: str
    flashinfer: str
    backend: str
    gpu: str
    torch: str
    cuda: str | None
    python: str
    date: str
    quick: bool
    complete: bool
    plan: Plans | None = None
    loop: Loop | None = None
    attention: Attention | None = None
    seconds: float = Field(default=0.0)


# --- reading ----------------------------------------------------------------------------------


def read_results(paths: Iterable[Path]) -> tuple[Result, ...]:
    """The results in these files, by FlashInfer's version; parts that were measured in runs of
    their own are put together.

    Raises UsageError for a file that cannot be read, is none of the benchmark's, or tells nothing
    about a FlashInfer that those before do not.
    """
    found: dict[str, Result] = {}
    for path in paths:
        result = _read(path)
        other = found.get(result.flashinfer)
        found[result.flashinfer] = result if other is None else _together(other, result, path)
    return tuple(found[version] for version in sorted(found, key=_version_key))


_PARTS = ("plan", "loop", "attention")


def _together(first: Result, second: Result, path: Path) -> Result:
    """One result of two runs: the parts of either, and of a part of both what the first has; the
    second fills in what that had no time for, and stands beside it in the loop. `path` is the
    second's."""
    machines = [(one.gpu, one.torch, one.backend) for one in (first, second)]
    if machines[0] != machines[1]:
        raise usage(
            f"a second result for FlashInfer {second.flashinfer}: on another machine",
            path=str(path),
            code="two-results",
            hint="give one file for each version, or files of one machine",
        )
    added: dict[str, Any] = {}
    for name in _PARTS:
        ours, theirs = getattr(first, name), getattr(second, name)
        if isinstance(ours, Plans) and theirs is not None and ours.in_place != theirs.in_place:
            raise usage(
                f"a second result for FlashInfer {second.flashinfer}: its plans of mlagen's "
                f"{'copy page numbers' if ours.in_place else 'find page numbers in place'}, those "
                "of the first do not",
                path=str(path),
                code="two-results",
                hint="measure the part `plan` in one run, or in runs of one version of mlagen",
            )
        if theirs is not None:
            added[name] = theirs if ours is None else _filled(ours, theirs)
    again = [name for name, part in added.items() if _adds_nothing(getattr(first, name), part)]
    if again:
        raise usage(
            f"a second result for FlashInfer {second.flashinfer}: the part {again[0]} again",
            path=str(path),
            code="two-results",
            hint="give one file for each version, files of different parts, or one that has what "
            "another left out",
        )
    facts = {
        "date": ", ".join(sorted({*first.date.split(", "), *second.date.split(", ")})),
        "complete": first.complete and second.complete,
        "quick": first.quick or second.quick,
        "seconds": first.seconds + second.seconds,
    }
    return first.model_copy(update={**added, **facts})


def _adds_nothing(first: Any, filled: Any) -> bool:
    """Whether a part has the same figures as before, whatever it says of those that it has not."""
    if first is None:
        return False
    return bool(first == filled.model_copy(update={"left_out": first.left_out}))


def _filled(first: Any, second: Any) -> Any:
    """A part with the cells that only the second has, and of the loop with its runs."""
    if isinstance(first, Plans):

        def place(cell: Cell | Moved) -> tuple[int, int]:
            return cell.batch, cell.length

        found: dict[str, Any] = {
            "cells": (*first.cells, *_others(first.cells, second.cells, place)),
            "bytes": (*first.bytes, *_others(first.bytes, second.bytes, place)),
        }
    elif isinstance(first, Loop):
        found = {"settings": tuple(_runs(first.settings, second.settings))}
    else:
        found = {
            "cells": (*first.cells, *_others(first.cells, second.cells, str)),
            "kernel": (*first.kernel, *_others(first.kernel, second.kernel, _care)),
            "schedule": first.schedule or second.schedule,
        }
    measured = [one for name in ("settings", "cells", "kernel") for one in found.get(name, ())]
    names = {one.named for one in measured}
    asked = dict.fromkeys((*first.left_out, *second.left_out))
    found["left_out"] = tuple(name for name in asked if name not in names)
    return first.model_copy(update=found)


def _runs(first: Iterable[Setting], second: Iterable[Setting]) -> list[Setting]:
    """The settings of both, those of the same shape side by side: each is a run by itself, as what
    decides most about a rate is the run. A run that the first has already is not counted again."""
    known = list(first)
    both = [*known, *(one for one in second if one not in known)]
    return [one for runs in grouped(both, _shape).values() for one in runs]


def _shape(one: Setting) -> tuple[int, int, str, float, bool]:
    return one.batch, one.length, one.mode, one.wanted_share, one.uneven


def _care(kernel: Kernel) -> tuple[int, bool]:
    return kernel.tiles, kernel.thorough


def _others(first: Iterable[_T], second: Iterable[_T], key: Callable[[_T], Hashable]) -> list[_T]:
    """What only the second has."""
    there = {key(one) for one in first}
    return [one for one in second if key(one) not in there]


def _read(path: Path) -> Result:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise usage(f"cannot be read: {error.strerror}", path=str(path), code="missing") from None
    try:
        return Result.model_validate_json(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise usage(
            f"no result of `mlagen bench`: {where + ': ' if where else ''}{first['msg']}",
            path=str(path),
            code="not-a-result",
            hint="give a file that this version's `mlagen bench --out` wrote",
        ) from None


def _version_key(version: str) -> tuple[tuple[int, str], ...]:
    parts = version.replace("+", ".").split(".")
    return tuple((int(part), "") if part.isdigit() else (-1, part) for part in parts)


# --- bars -------------------------------------------------------------------------------------


def bars(result: Result) -> tuple[Bar, ...]:
    """What was asked for, held against a result. Without the figures for it there is no bar."""
    found: list[Bar] = []
    if result.plan is not None:
        focus = [cell for cell in result.plan.cells if cell.batch == FOCUS]
        costs = f"at batch {FOCUS} costs at most {ALLOWANCE:.0f} µs above the planner alone"
        for name, what in _PLANS.items():
            found += _plan_bar(result, f"{what} {costs}", focus, name, FLOOR, ALLOWANCE)
        asked = "no plan is slower than SGLang's"
        found += _plan_bar(result, asked, result.plan.cells, OURS, UPSTREAM, 0.0)
        asked = "no plan and index arrays are slower than SGLang's"
        found += _plan_bar(result, asked, result.plan.cells, OURS, UPSTREAM, 0.0, whole=True)
    if result.loop is not None:
        every = result.loop.settings
        ahead = [setting for setting in every if setting.mode == "ahead"]
        asked = f"the loop, the host ahead, reaches {PART:.2f} of what it does without plans"
        found += _loop_bar(result, asked, ahead, LIMIT, PART)
        asked = "the loop is no slower than with SGLang's"
        found += _loop_bar(result, asked, every, UPSTREAM, 1.0)
        found += _device_loop_bar(result, every)
    if result.attention is not None:
        found += attention_bars(result.attention, result.flashinfer, result.backend)
    return tuple(found)


_PLANS: Final[Mapping[str, str]] = {
    OURS: "a plan",
    DEVICE: "a plan launched on the GPU",
    DEVICE_GRAPH: "a plan in the graph",
}


def _plan_bar(
    result: Result,
    asked: str,
    cells: Iterable[Cell],
    name: str,
    other: str,
    most: float,
    *,
    whole: bool = False,
) -> list[Bar]:
    """One contender's time less another's, in each cell, idle and busy: at most `most`
    microseconds. `whole`: with the index kernel's arrays. Results of older scripts have not all
    contenders."""
    cases = []
    for cell in cells:
        for condition in CONDITIONS:
            samples = cell.whole(condition) if whole else cell.samples(condition)
            if name not in samples:
                continue
            found = differences(samples[name], samples[other])
            middle = statistics.median(found)
            beside = ""
            # Hosts differ more than contenders do: what SGLang's comes to says on what host.
            if (name, other) == (OURS, FLOOR) and UPSTREAM in samples:
                theirs = statistics.median(differences(samples[UPSTREAM], samples[other]))
                beside = f"; SGLang's {theirs:+.0f} µs"
            text = f"{middle:+.0f} µs ({cell}, {condition}{beside})"
            cases.append(Case(at_most(found, most), middle, text))
    return bar_of(asked, result.flashinfer, cases)


def _loop_bar(
    result: Result, asked: str, settings: Iterable[Setting], other: str, least: float
) -> list[Bar]:
    """Ours to another's rate, in each setting that has both: at least `least`."""
    cases = []
    both = [one for one in settings if other in one.rates]
    for runs in grouped(both, _shape).values():
        found = [ratios(one.rates[OURS], one.rates[other]) for one in runs]
        cases.append(_loop_case(runs, found, [least] * len(runs), told=False))
    return bar_of(asked, result.flashinfer, cases)


def _device_loop_bar(result: Result, settings: Iterable[Setting]) -> list[Bar]:
    """The rate of graphs that plan themselves to the best host plan's, where measured."""
    cases = []
    for runs in grouped(settings, _shape).values():
        about = [(one, least) for one in runs if (least := one.asked_of_device) is not None]
        if about:
            of = [one for one, _ in about]
            found = [ratios(one.rates[DEVICE], one.rates[one.best_host]) for one in of]
            cases.append(_loop_case(of, found, [least for _, least in about], told=True))
    asked = (
        f"with graphs that plan themselves the loop reaches {PART:.2f} / (1 - s (1 - r)) of the "
        "best host plan's rate"
    )
    return bar_of(asked, result.flashinfer, cases)


def _loop_case(
    runs: Sequence[Setting],
    found: Sequence[Sequence[float]],
    least: Sequence[float],
    *,
    told: bool,
) -> Case:
    """What ratios came to, a sequence of rounds a run, and what was asked of each run. `told`: say
    that too."""
    middles = [statistics.median(rounds) for rounds in found]
    middle, asked = statistics.fmean(middles), statistics.fmean(least)
    text = f"{middle:.3f}"
    if len(runs) > 1:
        text += f", the mean of {' and '.join(f'{one:.3f}' for one in middles)}"
    text += f", asked {asked:.3f}" if told else ""
    return Case(mean_at_least(found, least), asked - middle, f"{text} ({runs[0]})")
