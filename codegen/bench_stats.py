"""What the benchmark's figures share: medians with their spread, and how a bar is judged."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict
from pydantic_core import PydanticCustomError

#: Standard deviations: how sure a difference has to be before a bar counts as missed.
_SURE: Final = 3.0

Verdict: TypeAlias = Literal["met", "within noise", "missed"]
_T = TypeVar("_T")
_K = TypeVar("_K", bound=Hashable)
_GRAVITY: Final[Mapping[Verdict, int]] = {"met": 0, "within noise": 1, "missed": 2}


class Data(BaseModel):
    """Part of a results file. What it does not know it leaves alone: newer scripts may add."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)


def known(version: int) -> Callable[[int], int]:
    """A validator of what a part's figures mean: ValidationError for another version of it."""

    def check(found: int) -> int:
        if found != version:
            raise PydanticCustomError(
                "version",
                "figures of version {found}, which mean something else than those of {known}; "
                "measure the part again",
                {"found": found, "known": version},
            )
        return found

    return check


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


@dataclass(frozen=True)
class Case:
    """One figure that a bar is about. `badness` orders cases of one verdict."""

    verdict: Verdict
    badness: float
    text: str


def at_most(values: Sequence[float], most: float) -> Verdict:
    """Whether the median is no larger; missed only where that is sure."""
    low, _ = interval(values)
    return _verdict(statistics.median(values) <= most, low > most)


def at_least(values: Sequence[float], least: float) -> Verdict:
    """Whether the median is no smaller, likewise."""
    _, high = interval(values)
    return _verdict(statistics.median(values) >= least, high < least)


def mean_at_least(runs: Sequence[Sequence[float]], least: Sequence[float]) -> Verdict:
    """Whether the mean of the runs' medians is no smaller than what was asked of them in the mean,
    as the rounds of one run hang together; missed only where each run by itself surely is."""
    mean = statistics.fmean(map(statistics.median, runs))
    each = [at_least(rounds, asked) for rounds, asked in zip(runs, least, strict=True)]
    return _verdict(mean >= statistics.fmean(least), all(one == "missed" for one in each))


def bar_of(asked: str, flashinfer: str, cases: Sequence[Case]) -> list[Bar]:
    """The bar by its worst case; none where there is no case."""
    if not cases:
        return []
    worst = max(cases, key=lambda case: (_GRAVITY[case.verdict], case.badness))
    return [Bar(asked, flashinfer, worst.verdict, worst.text)]


def grouped(values: Iterable[_T], key: Callable[[_T], _K]) -> dict[_K, list[_T]]:
    """Values by their key, keys in the order in which they come first."""
    found: dict[_K, list[_T]] = {}
    for value in values:
        found.setdefault(key(value), []).append(value)
    return found


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


def thousands(tokens: int) -> str:
    """A length as the tables name it, such as `4k`."""
    return f"{tokens // 1024}k" if tokens % 1024 == 0 else str(tokens)


def _rank(ordered: Sequence[float], part: float) -> float:
    """A percentile, between neighbours in proportion."""
    place = part * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def _verdict(met: bool, surely_missed: bool) -> Verdict:
    if met:
        return "met"
    return "missed" if surely_missed else "within noise"
