"""What the benchmark's part `attention` measured: the schedule that the GPU deals out, held against
FlashInfer's own, and the kernel that deals it out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Final, TypeAlias

from .bench_stats import Bar, Case, Data, at_most, bar_of, interval, spread, thousands

#: What attention with its plan may take of FlashInfer's: anywhere; and in batches of at least
#: `LARGE` requests of at least `LONG` tokens, by heads and by how lengths are distributed.
NEVER_ABOVE: Final = 1.02
LARGE, LONG = 64, 4096
ASKED: Final = (
    (0.84, 16, ("uniform", "geometric", "log-normal")),
    (0.90, 128, ("geometric", "log-normal")),
)
MEAN_ASKED: Final = 0.85
#: Microseconds that a quick plan may take, by the most query tiles that may have.
QUICK_ASKED: Final = ((64, 5.0), (256, 7.0), (1024, 12.0))
#: What part of the attention that it serves a thorough plan may take.
PLAN_ASKED: Final = 0.01

#: [request, first KV token, end] of each piece of work of a cluster.
Items: TypeAlias = tuple[tuple[int, int, int], ...]


class Shape(Data):
    """Lengths of one distribution, about `length` tokens in the mean, in one shape."""

    kind: str
    heads: int
    tokens: int
    batch: int
    length: int
    backend: str

    @property
    def large(self) -> bool:
        """Whether the bars for large batches of long requests are about it."""
        return self.batch >= LARGE and self.length >= LONG

    def __str__(self) -> str:
        shape = f"batch {self.batch}, {thousands(self.length)}"
        return f"{self.kind}, {self.heads} heads x {self.tokens}, {shape}, {self.backend}"


class AttentionCell(Shape):
    """One shape, measured.

    Attributes:
        same: whether both schedules gave the same bits.
        plan_us: of the planning kernel, in a graph.
        stock, mlagen: microseconds of one layer, a value a round, by either schedule.
    """

    same: bool
    plan_us: float
    stock: tuple[float, ...]
    mlagen: tuple[float, ...]

    def ratios(self, layers: int) -> list[float]:
        """The time of so many layers with the plan that they share, to FlashInfer's, which is
        planned beforehand; round by round."""
        return [
            (self.plan_us + layers * ours) / (layers * stock)
            for ours, stock in zip(self.mlagen, self.stock, strict=True)
        ]

    def plan_parts(self, layers: int) -> list[float]:
        """What part of the attention that it serves the plan takes, likewise."""
        return [self.plan_us / (layers * ours) for ours in self.mlagen]


class Kernel(Data):
    """The planning kernel alone, in a graph: microseconds, a value a round."""

    tiles: int
    thorough: bool
    us: tuple[float, ...]


class Schedule(Shape):
    """Who computes what, by cluster, before and after: as read back from the GPU."""

    stock: tuple[Items, ...]
    mlagen: tuple[Items, ...]


class Attention(Data):
    """The part's results. `layers`: of the forward that ratios are about."""

    layers: int
    cells: tuple[AttentionCell, ...]
    kernel: tuple[Kernel, ...] = ()
    schedule: Schedule | None = None
    left_out: tuple[str, ...] = ()


def attention_bars(found: Attention, flashinfer: str, backend: str) -> tuple[Bar, ...]:
    """What was asked for. `backend`: whose cells the mean is about."""
    cells, layers = found.cells, found.layers
    bars = _bits(cells, flashinfer)
    asked = f"attention with the GPU's plan takes at most {NEVER_ABOVE:.2f} of FlashInfer's"
    bars += _ratio_bar(asked, flashinfer, cells, layers, NEVER_ABOVE)
    for most, heads, kinds in ASKED:
        names = f"{', '.join(kinds[:-1])} and {kinds[-1]}"
        asked = f"at most {most:.2f} for {names} lengths, {heads} heads, {_LARGE}"
        about = [c for c in cells if c.large and c.heads == heads and c.kind in kinds]
        bars += _ratio_bar(asked, flashinfer, about, layers, most)
    about = [cell for cell in cells if cell.large and cell.backend == backend]
    bars += _mean_bar(flashinfer, about, layers)
    bars += _kernel_bar(flashinfer, found.kernel)
    asked = f"a thorough plan takes at most {PLAN_ASKED:.0%} of the attention it serves"
    cases = []
    for cell in cells:
        parts = cell.plan_parts(layers)
        middle = spread(parts).median
        text = f"{middle:.2%}, {cell.plan_us:.1f} µs ({cell})"
        cases.append(Case(at_most(parts, PLAN_ASKED), middle, text))
    return (*bars, *bar_of(asked, flashinfer, cases))


_LARGE = f"batch {LARGE} and more, {thousands(LONG)} and more"


def _bits(cells: Sequence[AttentionCell], flashinfer: str) -> list[Bar]:
    wrong = [str(cell) for cell in cells if not cell.same]
    if not cells:
        return []
    text = f"{len(cells)} of {len(cells)} cases"
    if wrong:
        text = f"{len(cells) - len(wrong)} of {len(cells)} cases; not {wrong[0]}"
    asked = "the GPU's plan gives the bits of FlashInfer's"
    return [Bar(asked, flashinfer, "missed" if wrong else "met", text)]


def _ratio_bar(
    asked: str, flashinfer: str, cells: Iterable[AttentionCell], layers: int, most: float
) -> list[Bar]:
    cases = []
    for cell in cells:
        found = cell.ratios(layers)
        middle = spread(found).median
        cases.append(Case(at_most(found, most), middle, f"{middle:.3f} ({cell})"))
    return bar_of(asked, flashinfer, cases)


def geometric_mean(values: Iterable[float]) -> float:
    """Of at least one positive number."""
    logarithms = [math.log(value) for value in values]
    return math.exp(sum(logarithms) / len(logarithms))


def _mean_bar(flashinfer: str, cells: Sequence[AttentionCell], layers: int) -> list[Bar]:
    """The mean of the medians; surely missed where the mean of what they may be is."""
    if not cells:
        return []
    found = [cell.ratios(layers) for cell in cells]
    mean = geometric_mean(spread(one).median for one in found)
    low = geometric_mean(interval(one)[0] for one in found)
    verdict = at_most([low, mean, mean], MEAN_ASKED)
    asked = f"at most {MEAN_ASKED:.2f} in the geometric mean, {_LARGE}"
    return bar_of(asked, flashinfer, [Case(verdict, mean, f"{mean:.3f} ({len(cells)} cases)")])


def _kernel_bar(flashinfer: str, kernel: Iterable[Kernel]) -> list[Bar]:
    limits = ", ".join(f"{most:.0f} µs up to {tiles} tiles" for tiles, most in QUICK_ASKED)
    cases = []
    for one in kernel:
        most = next((most for tiles, most in QUICK_ASKED if one.tiles <= tiles), None)
        if one.thorough or most is None:
            continue
        middle = spread(one.us).median
        text = f"{middle:.1f} µs ({one.tiles} tiles)"
        cases.append(Case(at_most(one.us, most), middle - most, text))
    return bar_of(f"a quick plan takes at most {limits}", flashinfer, cases)
