"""Results of the benchmark -> one SVG: what a plan costs a host whose GPU is busy, and the loop."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .bench import (
    CONTENDERS,
    LIMIT,
    OURS,
    STOCK,
    UPSTREAM,
    Result,
    Setting,
)
from .bench_report import middle_length
from .bench_stats import ratios, spread, thousands
from .svg import box_at, document, line_at, text_at

#: Told apart also by those who do not see all colours (Okabe and Ito's), and by their dashes.
_COLOURS = {
    "stock": "#d55e00",
    "host-arrays": "#cc79a7",
    "upstream": "#e69f00",
    "mlagen": "#0072b2",
    "device": "#009e73",
    "device-graph": "#56b4e9",
    "floor": "#555555",
}
_DASHES = {"host-arrays": "6 3", "device-graph": "8 2 2 2", "floor": "2 3"}
_WIDTH, _MARGIN = 960.0, 24.0
_PANEL_HEIGHT, _LEGEND_HEIGHT = 260.0, 54.0
_BAR, _GAP = 11.0, 12.0


@dataclass(frozen=True)
class _Box:
    """A rectangle on the page, in SVG's units: x and y of its upper left corner."""

    x: float
    y: float
    width: float
    height: float


def plot(results: Sequence[Result]) -> str:
    """The SVG: a panel a FlashInfer, below them the loop's rates to those without plans."""
    parts: list[str] = []
    y = _MARGIN
    planned = [result for result in results if result.plan is not None and result.plan.cells]
    if planned:
        shown = {n for result in planned if result.plan for c in result.plan.cells for n in c.busy}
        names = [name for name in CONTENDERS if name in shown]
        parts += _legend(y, "Host time of a plan, GPU busy (µs)", names)
        y += _LEGEND_HEIGHT
        width = (_WIDTH - 2 * _MARGIN) / len(planned)
        top = _ceiling(planned)
        for number, result in enumerate(planned):
            box = _Box(_MARGIN + number * width + 40, y + 18, width - 56, _PANEL_HEIGHT - 60)
            parts += _panel(result, box, top)
        y += _PANEL_HEIGHT
    rows = [(result, one) for result in results for one in _settings(result) if not one.uneven]
    if rows:
        parts += _legend(y, "Steps per second, of those without plans", (STOCK, UPSTREAM, OURS))
        y += _LEGEND_HEIGHT
        for result, setting in rows:
            parts += _ratio_rows(result, setting, y)
            y += 3 * _BAR + _GAP
    height = y + _MARGIN
    return document(_WIDTH, height, parts)


def _settings(result: Result) -> Iterable[Setting]:
    return result.loop.settings if result.loop is not None else ()


def _legend(y: float, title: str, names: Iterable[str]) -> list[str]:
    parts = [text_at(_MARGIN, y + 12, title, weight="bold")]
    x = _MARGIN
    for name in names:
        parts.append(line_at(x, y + 28, x + 20, y + 28, _COLOURS[name], 3, _DASHES.get(name)))
        label = CONTENDERS[name]
        parts.append(text_at(x + 25, y + 32, label, size=11))
        x += 36 + 6.1 * len(label)
    return parts


# --- plans ------------------------------------------------------------------------------------


def _ceiling(results: Iterable[Result]) -> float:
    """The power of ten above all medians."""
    most = max(
        spread(values).median
        for result in results
        if result.plan is not None
        for cell in result.plan.cells
        for values in cell.busy.values()
    )
    return float(10 ** math.ceil(math.log10(max(most, 10.0))))


def _panel(result: Result, box: _Box, top: float) -> list[str]:
    """Medians by batch size on a logarithmic scale, with p10 to p90 behind them."""
    assert result.plan is not None
    length = middle_length(result.plan)
    cells = sorted(
        (cell for cell in result.plan.cells if cell.length == length), key=lambda c: c.batch
    )
    floor = 10.0

    def y_of(value: float) -> float:
        part = math.log(max(value, floor) / floor) / math.log(top / floor)
        return box.y + box.height * (1 - part)

    def x_of(number: int) -> float:
        return box.x + box.width * (number + 0.5) / len(cells)

    title = f"FlashInfer {result.flashinfer}, {thousands(length)} tokens"
    parts = [text_at(box.x, box.y - 6, title)]
    for power in range(1, round(math.log10(top)) + 1):
        y = y_of(10.0**power)
        parts.append(line_at(box.x, y, box.x + box.width, y, "#dddddd", 1))
        parts.append(text_at(box.x - 6, y + 4, f"{10**power}", anchor="end", size=10))
    for number, cell in enumerate(cells):
        at = box.y + box.height + 15
        parts.append(text_at(x_of(number), at, str(cell.batch), anchor="middle", size=10))
    middle = box.x + box.width / 2
    parts.append(text_at(middle, box.y + box.height + 30, "batch", anchor="middle", size=10))
    for name in CONTENDERS:
        found = [spread(cell.busy[name]) for cell in cells if name in cell.busy]
        if not found:
            continue
        points = [(x_of(number), y_of(one.median)) for number, one in enumerate(found)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        dash = f' stroke-dasharray="{_DASHES[name]}"' if name in _DASHES else ""
        colour = _COLOURS[name]
        for (x, _), one in zip(points, found, strict=True):
            parts.append(line_at(x, y_of(one.low), x, y_of(one.high), colour, 1))
        parts.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>'
        )
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{colour}"/>' for x, y in points]
    return parts


# --- loop -------------------------------------------------------------------------------------


def _ratio_rows(result: Result, setting: Setting, y: float) -> list[str]:
    """Three bars: stock, SGLang's and ours, to the loop without plans, which is the full width."""
    label = f"{result.flashinfer}, {setting}"
    left, right = 330.0, _WIDTH - _MARGIN - 90
    parts = [text_at(left - 8, y + 1.5 * _BAR + 4, label, anchor="end", size=11)]
    for number, name in enumerate((STOCK, UPSTREAM, OURS)):
        found = spread(ratios(setting.rates[name], setting.rates[LIMIT]))
        at = y + number * _BAR
        width = (right - left) * min(found.median, 1.1)
        parts.append(box_at(left, at, width, _BAR - 2, _COLOURS[name]))
        parts.append(text_at(left + width + 4, at + _BAR - 2, f"{found.median:.3f}", size=10))
    parts.append(line_at(right, y - 2, right, y + 3 * _BAR, "#222222", 1))
    return parts
