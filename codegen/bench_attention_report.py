"""Results of the benchmark's part `attention` -> Markdown: short tables, and every figure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .bench_attention import Attention, Drawn, by_shape, geometric_mean
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
        every = [one for one in by_shape(found.cells) if one.shape.backend == backend]
        large = [one for one in every if one.shape.large]
        kinds = list(dict.fromkeys(one.shape.kind for one in large))
        for heads, tokens in dict.fromkeys((d.shape.heads, d.shape.tokens) for d in large):
            about = [d for d in large if (d.shape.heads, d.shape.tokens) == (heads, tokens)]
            means = [_mean([d for d in about if d.shape.kind == kind]) for kind in kinds]
            rows.append([version, f"{heads} x {tokens}", *means, _mean(about)])
    if not rows:
        return []
    title = (
        "Attention of a forward whose graph plans itself, that plan included, to the same by "
        "FlashInfer's schedule planned beforehand; geometric means over the draws of each shape, "
        "then over batch 64 and more, 4k tokens and more:"
    )
    kinds = list(dict.fromkeys(c.kind for _, _, found in measured for c in found.cells if c.large))
    parts = [title, table(["FlashInfer", "heads x tokens", *kinds, "all"], rows)]
    return [*parts, *_kernels(measured)]


def _mean(shapes: Sequence[Drawn]) -> str:
    return f"{geometric_mean(one.ratio for one in shapes):.3f}" if shapes else ""


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
    """Every shape."""
    rows = [_row(drawn) for drawn in by_shape(found.cells)]
    if not rows:
        return []
    head = [
        *("heads x tokens", "batch", "tokens", "lengths", "back end"),
        *("FlashInfer's, µs a layer", "the GPU's with the plan, µs a layer", "plan, µs", "ratio"),
    ]
    title = (
        f"Attention of {found.layers} layers, medians: geometric mean over the draws of the "
        "lengths (lowest and highest draw):"
    )
    return [title, table(head, rows)]


def _row(drawn: Drawn) -> list[str]:
    shape, cells = drawn.shape, drawn.cells
    bits = "" if all(cell.same for cell in cells) else " **other bits**"
    return [
        f"{shape.heads} x {shape.tokens}",
        str(shape.batch),
        thousands(shape.length),
        shape.kind,
        shape.backend,
        _over_draws([spread(cell.stock).median for cell in cells], 1),
        _over_draws([spread(cell.mlagen).median for cell in cells], 1),
        _over_draws([cell.plan_us for cell in cells], 1),
        _over_draws([cell.ratio for cell in cells], 3) + bits,
    ]


def _over_draws(values: Sequence[float], digits: int) -> str:
    """Such as `0.812 (0.790-0.840)`; of one draw its value alone."""
    mean = f"{geometric_mean(values):.{digits}f}"
    if len(values) == 1:
        return mean
    return f"{mean} ({min(values):.{digits}f}-{max(values):.{digits}f})"
