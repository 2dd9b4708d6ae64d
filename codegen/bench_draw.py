"""One schedule before and after, drawn: what FlashInfer dealt to each cluster, and what the GPU's
planner did.

Both were read back from the workspace on the GPU; the same pieces are in both, at other places.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from .bench import Result
from .bench_attention import Items, Schedule
from .bench_stats import thousands
from .errors import usage
from .svg import box_at, document, line_at, text_at

_WIDTH, _MARGIN = 960.0, 24.0
_LANE, _TITLE, _AXIS = 2.6, 40.0, 34.0
#: A request's pieces have one colour; neighbours have different ones (Okabe and Ito's).
_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#999999")


def shown(results: Iterable[Result], path: str) -> tuple[str, Schedule]:
    """The first result that holds a schedule: FlashInfer's version, and the schedule.

    Raises UsageError, about `path`, where none does.
    """
    for result in results:
        if result.attention is not None and result.attention.schedule is not None:
            return result.flashinfer, result.attention.schedule
    raise usage(
        "no schedule in these results",
        path=path,
        code="no-schedule",
        hint="give results of the part `attention`: mlagen bench --part attention --out FILE",
    )


def draw(version: str, schedule: Schedule) -> str:
    """The SVG: a panel a schedule; clusters are lanes, pieces are boxes as long as their KV."""
    panels = (
        (f"FlashInfer {version}: in the order of the requests", schedule.stock),
        ("Dealt by length, on the GPU", schedule.mlagen),
    )
    longest = max(load for _, clusters in panels for load in loads(clusters))
    parts = [
        text_at(_MARGIN, _MARGIN + 6, f"Who computes what: {schedule}", size=14, weight="bold")
    ]
    y = _MARGIN + 20
    for title, clusters in panels:
        parts += _panel(title, clusters, y, longest)
        y += _TITLE + _LANE * len(clusters) + _AXIS
    return document(_WIDTH, y + _MARGIN, parts)


def loads(clusters: Sequence[Items]) -> list[int]:
    """KV tokens of each cluster."""
    return [sum(end - start for _, start, end in items) for items in clusters]


def balance(clusters: Sequence[Items]) -> float:
    """What the most loaded cluster has to do, to the mean."""
    found = loads(clusters)
    return max(found) / statistics.mean(found)


def _panel(title: str, clusters: Sequence[Items], y: float, longest: int) -> list[str]:
    scale = (_WIDTH - 2 * _MARGIN) / longest
    found = loads(clusters)
    mean = statistics.mean(found)
    said = (
        f"the most loaded of {len(clusters)} clusters has {max(found)} KV tokens, "
        f"{balance(clusters):.2f} times the mean"
    )
    parts = [text_at(_MARGIN, y + 14, title, weight="bold"), text_at(_MARGIN, y + 30, said)]
    top = y + _TITLE
    for lane, items in enumerate(clusters):
        x = _MARGIN
        for request, start, end in items:
            width = (end - start) * scale
            colour = _COLOURS[request % len(_COLOURS)]
            # A gap, so that pieces of one request can be told apart.
            parts.append(box_at(x, top + lane * _LANE, max(width - 0.8, 0.2), _LANE - 0.5, colour))
            x += width
    bottom = top + _LANE * len(clusters)
    for value, dash in ((mean, "4 3"), (max(found), None)):
        x = _MARGIN + value * scale
        parts.append(line_at(x, top - 4, x, bottom + 4, "#222222", 1, dash))
    step = _step(longest)
    for tokens in range(0, longest + 1, step):
        label = thousands(tokens) if tokens else "0"
        parts.append(
            text_at(_MARGIN + tokens * scale, bottom + 16, label, anchor="middle", size=10)
        )
    middle = text_at(
        _WIDTH / 2, bottom + 29, "KV tokens; dashed: the mean", anchor="middle", size=10
    )
    return [*parts, middle]


def _step(longest: int) -> int:
    """Tokens between two marks of the axis: a power of two, some eight of them."""
    step = 1024
    while longest / step > 10:
        step *= 2
    return step
