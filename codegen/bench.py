"""What the benchmark measured: its JSON as frozen data, medians with their spread, and the bars.

The scripts of `templates/bench/` write one file a FlashInfer; several make one table. Contenders
take turns within a round, and what is compared is compared round by round: a machine that is slow
for a while is slow for all of them.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from .errors import usage

#: Contenders by their names in the files, in the order of the tables.
CONTENDERS: Final[Mapping[str, str]] = {
    "stock": "FlashInfer's",
    "host-arrays": "FlashInfer's, host arrays",
    "upstream": "SGLang's",
    "mlagen": "mlagen's",
    "floor": "planner alone",
}
OURS, UPSTREAM, STOCK, FLOOR, LIMIT = "mlagen", "upstream", "stock", "floor", "none"
#: Microseconds that a plan may take above the planner alone, at that batch size.
ALLOWANCE: Final = 40.0
FOCUS: Final = 64
#: What part of the loop without plans ours has to reach.
PART: Final = 0.97
#: What SGLang measured end to end for its own fast plans: steps per second, theirs to stock.
END_TO_END: Final = 1.27
#: Standard deviations: how sure a difference has to be before a bar counts as missed.
_SURE: Final = 3.0

Condition: TypeAlias = Literal["idle", "busy"]
CONDITIONS: Final[tuple[Condition, ...]] = ("idle", "busy")
Verdict: TypeAlias = Literal["met", "within noise", "missed"]
Samples: TypeAlias = Mapping[str, tuple[float, ...]]


class _Data(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)


class Cell(_Data):
    """Plans of one batch size at one mean length (tokens).

    Attributes:
        idle, busy: microseconds on the host by contender, a value a round; in the same round for
            all of them.
        outlasted: by contender, of how many plans the busy GPU was still busy when they returned.
        waits: by contender, waits for the GPU that PyTorch tells of.
    """

    batch: int
    length: int
    idle: Samples
    busy: Samples
    outlasted: Mapping[str, int]
    waits: Mapping[str, int]

    def samples(self, condition: Condition) -> Samples:
        """Microseconds by contender."""
        return self.idle if condition == "idle" else self.busy

    def __str__(self) -> str:
        return f"batch {self.batch}, {thousands(self.length)}"


class Moved(_Data):
    """Bytes that one plan moves. `planner`: to the device, by FlashInfer's planner, from its own
    sizes. `to_gpu`, `to_host`: all that a trace has recorded, None where there was none."""

    batch: int
    length: int
    contender: str
    planner: int
    to_gpu: int | None
    to_host: int | None


class Plans(_Data):
    """What plans cost. `busy_ms`: of the work queued before each busy plan."""

    busy_ms: float
    tokens: int
    heads: int
    cells: tuple[Cell, ...]
    bytes: tuple[Moved, ...] = ()
    left_out: tuple[str, ...] = ()


class Setting(_Data):
    """The loop in one shape.

    Attributes:
        mode: `ahead`, or `fenced`: the host waits for each verify before it plans the next step.
        share: of a step's GPU time, what verify's attention takes; `wanted_share` was asked for.
        gpu_step_ms, attention_ms: GPU time of a step, and of verify's attention in it.
        rates: steps per second by contender, a value a block, in turn.
        wrong: by contender, blocks whose last step gave another output than FlashInfer's plans.
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

    def __str__(self) -> str:
        return f"batch {self.batch}, {thousands(self.length)}, share {self.share:.2f}, {self.mode}"


class Loop(_Data):
    """Steps per second of speculative decoding."""

    layers: int
    host_ms: float
    draft_steps: int
    tokens: int
    settings: tuple[Setting, ...]
    left_out: tuple[str, ...] = ()


class Result(_Data):
    """One file: a run on one machine with one FlashInfer."""

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
    seconds: float = Field(default=0.0)


@dataclass(frozen=True)
class Spread:
    """A median, and between what the middle eight tenths lie."""

    median: float
    low: float
    high: float

    def text(self, digits: int = 0) -> str:
        """Such as `135 (131-150)`."""
        values = (self.median, self.low, self.high)
        middle, low, high = (f"{value:.{digits}f}" for value in values)
        return f"{middle} ({low}-{high})"


@dataclass(frozen=True)
class Bar:
    """What was asked of one FlashInfer's figures, and what came of it: the worst case."""

    asked: str
    flashinfer: str
    verdict: Verdict
    worst: str


# --- reading ----------------------------------------------------------------------------------


def read_results(paths: Iterable[Path]) -> tuple[Result, ...]:
    """The results in these files, by FlashInfer's version.

    Raises UsageError for a file that cannot be read, is none of the benchmark's, or tells of the
    same FlashInfer as another.
    """
    found: dict[str, Result] = {}
    for path in paths:
        result = _read(path)
        if result.flashinfer in found:
            raise usage(
                f"a second result for FlashInfer {result.flashinfer}",
                path=str(path),
                code="two-results",
                hint="give one file for each version",
            )
        found[result.flashinfer] = result
    return tuple(found[version] for version in sorted(found, key=_version_key))


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
            hint="give a file that `mlagen bench --out` wrote",
        ) from None


def _version_key(version: str) -> tuple[tuple[int, str], ...]:
    parts = version.replace("+", ".").split(".")
    return tuple((int(part), "") if part.isdigit() else (-1, part) for part in parts)


# --- statistics -------------------------------------------------------------------------------


def spread(values: Sequence[float]) -> Spread:
    """Median and the tenth and ninetieth percentile of at least one value."""
    ordered = sorted(values)
    return Spread(statistics.median(ordered), _rank(ordered, 0.1), _rank(ordered, 0.9))


def differences(first: Sequence[float], second: Sequence[float]) -> list[float]:
    """first - second, round by round."""
    return [a - b for a, b in zip(first, second, strict=True)]


def ratios(first: Sequence[float], second: Sequence[float]) -> list[float]:
    """first / second, round by round."""
    return [a / b for a, b in zip(first, second, strict=True)]


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Between what the true median lies, as sure as `_SURE` says: order statistics, which assume
    no distribution. All of the range where the values are few."""
    ordered = sorted(values)
    half = _SURE * math.sqrt(len(ordered)) / 2
    middle = (len(ordered) - 1) / 2
    low = max(0, math.floor(middle - half))
    high = min(len(ordered) - 1, math.ceil(middle + half))
    return ordered[low], ordered[high]


def _rank(ordered: Sequence[float], part: float) -> float:
    """A percentile, between neighbours in proportion."""
    place = part * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


# --- bars -------------------------------------------------------------------------------------


def bars(result: Result) -> tuple[Bar, ...]:
    """What was asked for, held against a result. Without the figures for it there is no bar."""
    found: list[Bar] = []
    if result.plan is not None:
        focus = [cell for cell in result.plan.cells if cell.batch == FOCUS]
        asked = f"a plan at batch {FOCUS} costs at most {ALLOWANCE:.0f} µs above the planner alone"
        found += _plan_bar(result, asked, focus, FLOOR, ALLOWANCE)
        asked = "no plan is slower than SGLang's"
        found += _plan_bar(result, asked, result.plan.cells, UPSTREAM, 0.0)
    if result.loop is not None:
        every = result.loop.settings
        ahead = [setting for setting in every if setting.mode == "ahead"]
        asked = f"the loop reaches {PART:.2f} of what it does without plans"
        found += _loop_bar(result, asked, ahead, LIMIT, PART)
        asked = "the loop is no slower than with SGLang's"
        found += _loop_bar(result, asked, every, UPSTREAM, 1.0)
    return tuple(found)


def _plan_bar(
    result: Result, asked: str, cells: Iterable[Cell], other: str, most: float
) -> list[Bar]:
    """Ours less another's time, in each cell, idle and busy: at most `most` microseconds."""
    cases = []
    for cell in cells:
        for condition in CONDITIONS:
            samples = cell.samples(condition)
            found = differences(samples[OURS], samples[other])
            low, _ = interval(found)
            middle = statistics.median(found)
            sure = _verdict(middle <= most, low > most)
            cases.append((sure, middle, f"{middle:+.0f} µs ({cell}, {condition})"))
    if not cases:
        return []
    verdict, _, worst = max(cases, key=lambda case: (_GRAVITY[case[0]], case[1]))
    return [Bar(asked, result.flashinfer, verdict, worst)]


def _loop_bar(
    result: Result, asked: str, settings: Iterable[Setting], other: str, least: float
) -> list[Bar]:
    """Ours to another's rate, in each setting: at least `least`."""
    cases = []
    for setting in settings:
        found = ratios(setting.rates[OURS], setting.rates[other])
        _, high = interval(found)
        middle = statistics.median(found)
        sure = _verdict(middle >= least, high < least)
        cases.append((sure, -middle, f"{middle:.3f} ({setting})"))
    if not cases:
        return []
    verdict, _, worst = max(cases, key=lambda case: (_GRAVITY[case[0]], case[1]))
    return [Bar(asked, result.flashinfer, verdict, worst)]


_GRAVITY: Final[Mapping[Verdict, int]] = {"met": 0, "within noise": 1, "missed": 2}


def _verdict(met: bool, surely_missed: bool) -> Verdict:
    if met:
        return "met"
    return "missed" if surely_missed else "within noise"


def thousands(tokens: int) -> str:
    """A length as the tables name it, such as `4k`."""
    return f"{tokens // 1024}k" if tokens % 1024 == 0 else str(tokens)
