"""Published figures are those of the results in docs/results: the page to the letter, and what
README tells of it."""

from __future__ import annotations

import re
import statistics
from pathlib import Path

import pytest

from mlagen.codegen.bench import Result, Setting, read_results
from mlagen.codegen.bench_attention import by_shape
from mlagen.codegen.bench_plot import plot
from mlagen.codegen.bench_report import page

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
#: README's columns, as results name them.
COLUMNS = ("stock", "upstream", "mlagen", "floor", "device-graph")


@pytest.fixture(scope="module")
def results() -> tuple[Result, ...]:
    """In the order of their names: of plans and attention that several have, the first's."""
    return read_results(sorted((DOCS / "results").iterdir()))


@pytest.fixture(scope="module")
def readme() -> str:
    return (ROOT / "README.md").read_text("utf-8")


def test_the_page_and_its_plot_are_made_from_them(results: tuple[Result, ...]) -> None:
    """After a change to either: `mlagen bench --from FILE ... --docs docs/benchmarks.md`."""
    assert (DOCS / "benchmarks.md").read_text("utf-8") == page(results, "benchmarks.svg")
    assert (DOCS / "benchmarks.svg").read_text("utf-8") == plot(results)


def test_readme_has_the_plans_of_all(results: tuple[Result, ...], readme: str) -> None:
    rows = []
    for result in results:
        assert result.plan is not None
        (cell,) = (c for c in result.plan.cells if (c.batch, c.length) == (64, 4096))
        times = [
            " / ".join(f"{statistics.median(one[name]):.0f}" for one in (cell.idle, cell.busy))
            for name in COLUMNS
        ]
        rows.append(f"| {' | '.join([result.flashinfer, *times])} |")
    assert "\n".join(rows) in readme
    assert len(rows) == 3


def medians(settings: list[Setting], name: str, other: str) -> list[float]:
    """One contender's rate to another's, in each setting."""
    return [
        statistics.median(a / b for a, b in zip(one.rates[name], one.rates[other], strict=True))
        for one in settings
    ]


def settings_of(results: tuple[Result, ...], *, uneven: bool, share: float) -> list[Setting]:
    return [
        setting
        for result in results
        if result.loop is not None
        for setting in result.loop.settings
        if setting.uneven == uneven and setting.wanted_share == share and setting.mode == "ahead"
    ]


def test_readme_has_the_loops_of_all(results: tuple[Result, ...], readme: str) -> None:
    text = " ".join(readme.split())
    even = [
        one
        for one in settings_of(results, uneven=False, share=0.6)
        if (one.batch, one.length) == (64, 4096)
    ]
    first, second, third = (f"{ratio:.2f}" for ratio in medians(even, "mlagen", "stock"))
    assert f"does {first}, {second} and {third} times the steps" in text
    least = re.search(r"while the host is ahead ([\d.]+) or more of what the loop does", text)
    assert least is not None
    every = [one for s in (0.3, 0.6) for one in settings_of(results, uneven=False, share=s)]
    assert f"{min(medians(every, 'mlagen', 'none')):.3f}" == least[1]
    assert len(every) == 18  # 16k in two runs
    gains = medians(even, "device", "mlagen")
    assert f"{min(gains):.2f} to {max(gains):.2f} times as many where graphs plan" in text
    for share, words in ((0.6, "{} to {} times the steps of the best host"), (0.3, "({} to {} wh")):
        uneven = settings_of(results, uneven=True, share=share)
        gains = [medians([one], "device", one.best_host)[0] for one in uneven]
        assert words.format(f"{min(gains):.2f}", f"{max(gains):.2f}") in text
        assert len(uneven) == 12  # in two runs each


def test_the_device_planners_page_has_its_attention(results: tuple[Result, ...]) -> None:
    text = " ".join((DOCS / "device-plan.md").read_text("utf-8").split())
    (found,) = (result.attention for result in results if result.attention is not None)
    kinds = ("uniform", "geometric", "log-normal")
    large = [one for one in by_shape(found.cells) if one.shape.large and one.shape.kind in kinds]
    for heads, words in ((16, "takes {} to {} of its time"), (128, "with 128 heads {} to {}.")):
        ratios = [one.ratio for one in large if one.shape.heads == heads]
        assert words.format(f"{min(ratios):.2f}", f"{max(ratios):.2f}") in text
    fa3 = [cell for cell in found.cells if cell.backend == "fa3"]
    worst = max(fa3, key=lambda cell: cell.ratio)
    assert f"The highest median of {len(found.cells)} draws of lengths is {worst.ratio:.3f}" in text
    gains = [
        medians([one], "device", one.best_host)[0]
        for share in (0.3, 0.6)
        for one in settings_of(results, uneven=True, share=share)
    ]
    assert f"makes {min(gains):.2f} to {max(gains):.2f} times the steps" in text
