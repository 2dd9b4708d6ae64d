"""What the benchmark's part `attention` measured: the schedule that the GPU deals out, held against
FlashInfer's own, and the kernel that deals it out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Final, TypeAlias

from pydantic import AfterValidator, Field

from .bench_stats import (
    Bar,
    Case,
    Data,
    Verdict,
    at_most,
    bar_of,
    grouped,
    interval,
    known,
    ratios,
    spread,
    thousands,
)

#: Of the part's results. Those without one ran 8 of the layers, without the plan, and were scaled:
#: their figures mean something else.
VERSION: Final = 2

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
    """One draw of one shape's lengths, measured.

    Attributes:
        draw: which of those that are drawn alike, from 0.
        same: whether both schedules gave the same bits.
        plan_us: of the planning kernel alone, in a graph of its own.
        stock: microseconds of a forward by FlashInfer's schedule, which is planned beforehand,
            divided by its layers; a value a round.
        mlagen: of one that plans itself, that plan included, divided likewise.
    """

    draw: int
    same: bool
    plan_us: float
    stock: tuple[float, ...]
    mlagen: tuple[float, ...]

    @property
    def shape(self) -> Shape:
        """What its draws have in common."""
        return Shape(
            kind=self.kind,
            heads=self.heads,
            tokens=self.tokens,
            batch=self.batch,
            length=self.length,
            backend=self.backend,
        )

    @property
    def ratios(self) -> list[float]:
        """A forward that plans itself to FlashInfer's, round by round."""
        return ratios(self.mlagen, self.stock)

    @property
    def ratio(self) -> float:
        """The median of them."""
        return spread(self.ratios).median

    def plan_parts(self, layers: int) -> list[float]:
        """What part of a forward of so many layers the plan takes, round by round."""
        return [self.plan_us / (layers * ours) for ours in self.mlagen]

    @property
    def named(self) -> str:
        """What the scripts call it where they leave it out."""
        shape = f"{self.heads} heads, {self.tokens} tokens, batch {self.batch}"
        return f"{self.backend}, {shape}, {self.length}, {self.kind}, draw {self.draw}"

    def __str__(self) -> str:
        return f"{self.shape}, draw {self.draw}"


@dataclass(frozen=True)
class Drawn:
    """The cells of one shape, a draw each; at least one."""

    shape: Shape
    cells: tuple[AttentionCell, ...]

    @property
    def ratio(self) -> float:
        """Of the median ratios, the geometric mean over the draws."""
        return geometric_mean(cell.ratio for cell in self.cells)

    @property
    def least(self) -> float:
        """That mean, were each draw's true median the lowest that its rounds leave room for."""
        return geometric_mean(interval(cell.ratios)[0] for cell in self.cells)


def by_shape(cells: Iterable[AttentionCell]) -> list[Drawn]:
    """In the order in which shapes come first."""
    found = grouped(cells, lambda cell: cell.shape)
    return [Drawn(shape, tuple(drawn)) for shape, drawn in found.items()]


class Kernel(Data):
    """The planning kernel alone, in a graph: microseconds, a value a round."""

    tiles: int
    thorough: bool
    us: tuple[float, ...]

    @property
    def named(self) -> str:
        """What the scripts call it where they leave it out."""
        return f"{self.tiles} tiles, {'thorough' if self.thorough else 'quick'}"


class Schedule(Shape):
    """Who computes what, by cluster, before and after: as read back from the GPU."""

    stock: tuple[Items, ...]
    mlagen: tuple[Items, ...]


class Attention(Data):
    """The part's results. `layers`: how many a forward has; all of them were run."""

    # First, so that of an older file's errors this one is told.
    version: Annotated[int, AfterValidator(known(VERSION)), Field(validate_default=True)] = 1
    layers: int
    cells: tuple[AttentionCell, ...]
    kernel: tuple[Kernel, ...] = ()
    schedule: Schedule | None = None
    left_out: tuple[str, ...] = ()


def attention_bars(found: Attention, flashinfer: str, backend: str) -> tuple[Bar, ...]:
    """What was asked for. `backend`: whose cells the mean is about."""
    cells, shapes = found.cells, by_shape(found.cells)
    bars = _bits(cells, flashinfer)
    asked = f"attention with the GPU's plan takes at most {NEVER_ABOVE:.2f} of FlashInfer's"
    bars += bar_of(asked, flashinfer, [_case_of_draw(cell) for cell in cells])
    large = [one for one in shapes if one.shape.large]
    for most, heads, kinds in ASKED:
        names = f"{', '.join(kinds[:-1])} and {kinds[-1]}"
        asked = f"at most {most:.2f} for {names} lengths, {heads} heads, {_LARGE}"
        about = [one for one in large if one.shape.heads == heads and one.shape.kind in kinds]
        bars += bar_of(asked, flashinfer, [_case_of_shape(one, most) for one in about])
    bars += _mean_bar(flashinfer, [one for one in large if one.shape.backend == backend])
    bars += _kernel_bar(flashinfer, found.kernel)
    asked = f"a thorough plan takes at most {PLAN_ASKED:.0%} of the attention it serves"
    cases = []
    for cell in cells:
        parts = cell.plan_parts(found.layers)
        middle = spread(parts).median
        text = f"{middle:.2%}, {cell.plan_us:.1f} µs ({cell})"
        cases.append(Case(at_most(parts, PLAN_ASKED), middle, text))
    return (*bars, *bar_of(asked, flashinfer, cases))


_LARGE = f"batch {LARGE} and more, {thousands(LONG)} and more"


def _bits(cells: Sequence[AttentionCell], flashinfer: str) -> list[Bar]:
    wrong = [str(cell) for cell in cells if not cell.same]
    if not cells:
        return []
    text = f"{len(cells)} of {len(cells)} draws"
    if wrong:
        text = f"{len(cells) - len(wrong)} of {len(cells)} draws; not {wrong[0]}"
    asked = "the GPU's plan gives the bits of FlashInfer's"
    return [Bar(asked, flashinfer, "missed" if wrong else "met", text)]


def _case_of_draw(cell: AttentionCell) -> Case:
    """For what is asked of every draw by itself."""
    return Case(at_most(cell.ratios, NEVER_ABOVE), cell.ratio, f"{cell.ratio:.3f} ({cell})")


def _case_of_shape(drawn: Drawn, most: float) -> Case:
    """For what is asked of a shape, whatever is drawn."""
    ratio = drawn.ratio
    highest = max(cell.ratio for cell in drawn.cells)
    text = f"{ratio:.3f}, highest draw {highest:.3f} ({drawn.shape})"
    return Case(_mean_at_most(ratio, drawn.least, most), ratio, text)


def _mean_at_most(mean: float, least: float, most: float) -> Verdict:
    """Of a mean of medians: surely missed where even the least that it may be is too much."""
    return at_most([least, mean, mean], most)


def geometric_mean(values: Iterable[float]) -> float:
    """Of at least one positive number."""
    logarithms = [math.log(value) for value in values]
    return math.exp(sum(logarithms) / len(logarithms))


def _mean_bar(flashinfer: str, shapes: Sequence[Drawn]) -> list[Bar]:
    """Over shapes, however often each was drawn."""
    if not shapes:
        return []
    mean = geometric_mean(one.ratio for one in shapes)
    least = geometric_mean(one.least for one in shapes)
    asked = f"at most {MEAN_ASKED:.2f} in the geometric mean, {_LARGE}"
    verdict = _mean_at_most(mean, least, MEAN_ASKED)
    return bar_of(asked, flashinfer, [Case(verdict, mean, f"{mean:.3f} ({len(shapes)} shapes)")])


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
    return bar_of(f"a quick plan, in turns, takes at most {limits}", flashinfer, cases)
