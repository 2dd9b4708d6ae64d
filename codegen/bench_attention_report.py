"""Results of the benchmark's part `attention` -> Markdown: short tables, and every figure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .bench_attention import Attention, AttentionCell, geometric_mean
from .bench_stats import spread, thousands


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; columns of figures to the right would need widths that people's
    renderers differ about, so all are to the left."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def summary(measured: Sequence[tuple[str, str, Attention]]) -> list[str]:
    """Means of what attention takes of FlashInfer's time, and of the planning kernel's.

    Args:
        measured: version, back end, figures.
    """
    rows = []
    for version, backend, found in measured:
        large = [cell for cell in found.cells if cell.large and cell.backend == backend]
        kinds = list(dict.fromkeys(cell.kind for cell in large))
        for heads, tokens in dict.fromkeys((cell.heads, cell.tokens) for cell in large):
            about = [c for c in large if (c.heads, c.tokens) == (heads, tokens)]
            means = [_mean(found, [c for c in about if c.kind == kind]) for kind in kinds]
            rows.append([version, f"{heads} x {tokens}", *means, _mean(found, about)])
    if not rows:
        return []
    title = (
        "Attention of a forward whose graph plans itself, that plan included, to the same by "
        "FlashInfer's schedule planned beforehand; geometric means over batch 64 and more, 4k "
        "tokens and more:"
    )
    kinds = list(dict.fromkeys(c.kind for _, _, found in measured for c in found.cells if c.large))
    parts = [title, table(["FlashInfer", "heads x tokens", *kinds, "all"], rows)]
    return [*parts, *_kernels(measured)]


def _mean(found: Attention, cells: Sequence[AttentionCell]) -> str:
    if not cells:
        return ""
    return f"{geometric_mean(spread(c.ratios(found.layers)).median for c in cells):.3f}"


def _kernels(measured: Sequence[tuple[str, str, Attention]]) -> list[str]:
    tiles = sorted({one.tiles for _, _, found in measured for one in found.kernel})
    rows = []
    for version, _, found in measured:
        for thorough in (False, True):
            times = {
                one.tiles: f"{spread(one.us).median:.1f}"
                for one in found.kernel
                if one.thorough == thorough
            }
            if times:
                care = "thorough" if thorough else "quick"
                rows.append([version, care, *(times.get(count, "") for count in tiles)])
    if not rows:
        return []
    head = ["FlashInfer", "dealing", *(f"{count} tiles" for count in tiles)]
    return [
        "GPU µs of the planning kernel in a graph, by query tiles (medians):",
        table(head, rows),
    ]


def figures(found: Attention) -> list[str]:
    """Every case."""
    rows = [
        [
            f"{cell.heads} x {cell.tokens}",
            str(cell.batch),
            thousands(cell.length),
            cell.kind,
            cell.backend,
            spread(cell.stock).text(1),
            spread(cell.mlagen).text(1),
            f"{cell.plan_us:.1f}",
            spread(cell.ratios(found.layers)).text(3) + ("" if cell.same else " **other bits**"),
        ]
        for cell in found.cells
    ]
    if not rows:
        return []
    head = [
        *("heads x tokens", "batch", "tokens", "lengths", "back end"),
        *("FlashInfer's, µs a layer", "the GPU's, µs a layer", "plan, µs"),
        f"ratio over {found.layers} layers, with the plan",
    ]
    return ["Attention, median (p10-p90):", table(head, rows)]
