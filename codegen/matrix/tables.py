"""Facts -> text: the tables for a terminal, docs/compatibility.md, JSON. Prints nothing."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from .facts import Cell, Cells, Facts
from .gather import NEWEST, Versions, newest_pairs, pinned_pairs
from .releases import by_version

_WIDTH = 100
NOT_TRIED = "not tried"

#: One row: releases that are alike, the FlashInfers that they are alike for, what became of them.
Row = tuple[tuple[str, ...], tuple[str, ...], Cells | None]


def rows_of(facts: Facts, pairs: Iterable[Versions]) -> tuple[Row, ...]:
    """Pairs as rows, the newest first. FlashInfers that follow one another with the same outcome
    share a row, and so do SGLangs that follow one another and are alike for all of them."""
    releases = {release.version: release for release in facts.sglang}
    chosen: dict[str, list[str]] = {}
    for s, f in pairs:
        chosen.setdefault(s, []).append(f)
    runs: list[tuple[str, tuple[tuple[tuple[str, ...], Cells | None], ...]]] = []
    for s in reversed(by_version(chosen)):
        outcome = [
            (f, facts.cells(releases[s], f) if s in releases else None)
            for f in reversed(by_version(chosen[s]))
        ]
        same = groupby(outcome, key=lambda item: item[1])
        runs.append((s, tuple((tuple(f for f, _ in group), cells) for cells, group in same)))
    rows: list[Row] = []
    for alike, group in groupby(runs, key=lambda item: item[1]):
        versions = tuple(s for s, _ in group)
        rows += [(versions, flashinfers, cells) for flashinfers, cells in alike]
    return tuple(rows)


def span(versions: Sequence[str], order: Sequence[str]) -> str:
    """Versions in a few words: `A to B` where they are all of `order` from A to B, else each."""
    listed = by_version(versions)
    whole = [version for version in order if version in set(listed)]
    if len(listed) > 2 and tuple(whole) == listed:
        first = order.index(listed[0])
        if tuple(order[first : first + len(listed)]) == listed:
            return f"{listed[0]} to {listed[-1]}"
    return ", ".join(listed)


@dataclass
class _Notes:
    """Reasons, numbered as they come up."""

    numbers: dict[str, int] = field(default_factory=dict)

    def marks(self, cell: Cell) -> str:
        found = sorted(self.numbers.setdefault(n, len(self.numbers) + 1) for n in cell.notes)
        return f" [{', '.join(map(str, found))}]" if found else ""

    def lines(self) -> list[str]:
        out: list[str] = []
        for note, number in self.numbers.items():
            mark = f"{number}. "
            out += textwrap.wrap(
                note,
                _WIDTH,
                initial_indent=mark,
                subsequent_indent=" " * len(mark),
                break_long_words=False,
                break_on_hyphens=False,
            )
        return out


def _table(facts: Facts, rows: Iterable[Row], notes: _Notes, second: str) -> list[list[str]]:
    """Head and rows, each a list of texts."""
    sglang = [release.version for release in facts.sglang]
    flashinfer = [release.version for release in facts.flashinfer]
    out = [["SGLang", second, *facts.variants]]
    for versions, flashinfers, cells in rows:
        texts = (
            [NOT_TRIED] * len(facts.variants)
            if cells is None
            else [" + ".join(cell.states) + notes.marks(cell) for cell in cells]
        )
        out.append([span(versions, sglang), span(flashinfers, flashinfer), *texts])
    return out


# --- for a terminal ---------------------------------------------------------------------------


def text(facts: Facts, pairs: Sequence[Versions]) -> str:
    """One table of `pairs` and the reasons; ends in a line end."""
    notes = _Notes()
    table = _table(facts, rows_of(facts, pairs), notes, "FlashInfer")
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in table
    ]
    reasons = notes.lines()
    return "\n".join([*lines, *(["", *reasons] if reasons else [])]) + "\n"


# --- docs/compatibility.md --------------------------------------------------------------------

_INTRODUCTION = """\
# Which SGLang fits which FlashInfer

Every pair below was patched by mlagen: the back-end file of a release of SGLang, for the source of
a release of FlashInfer. The patched file was read back and verified; nothing was run (`mlagen test`
proves a pair on a GPU), and whether the rest of that SGLang runs with that FlashInfer was not
asked.

- **installed**: mlagen's plan stands where SGLang planned with FlashInfer's own.
- **replaced**: the same, and a plan that SGLang had of its own gave way to it.
- **superseded**: SGLang's own plan is as good and stays; the reasons say what it is for.
- **refused**: left as FlashInfer plans it: right, with its waits.

A number leads to the reason; behind another state it tells of a part that is left to SGLang or to
FlashInfer. `A to B` are all releases from A to B, patch releases included.

This page is made from [compatibility.json](compatibility.json), which is what a run of `mlagen
matrix` found; no line of it is typed by hand.

```sh
mlagen matrix --refresh --markdown docs/compatibility.md    # fetches what is missing, tries all
mlagen matrix --check docs/compatibility.md                 # for CI: fetches nothing
mlagen matrix --refresh --check docs/compatibility.md       # on a schedule: is all of it still so?
```"""


def page(facts: Facts) -> str:
    """docs/compatibility.md; ends in a line end."""
    notes = _Notes()
    wheels = [release.version for release in facts.flashinfer if release.kind == "wheel"]
    pinned, newest = pinned_pairs(facts.sglang), newest_pairs(facts.sglang, wheels)
    pinned_table = _table(facts, rows_of(facts, pinned), notes, "FlashInfer that it pins")
    newest_table = _table(facts, rows_of(facts, newest), notes, "FlashInfer")
    reasons = notes.lines()
    parts = [
        _INTRODUCTION,
        f"Found with mlagen {facts.mlagen}: {len(facts.sglang)} releases of SGLang, "
        f"{len(facts.flashinfer)} of FlashInfer, {len({*pinned, *newest})} pairs.",
        "## Every SGLang with the FlashInfer that it pins",
        _markdown(pinned_table),
        *_without_pin(facts),
        f"## The newest {NEWEST} SGLang with every FlashInfer that has a wheel",
        f"{len(wheels)} releases of FlashInfer have one.",
        _markdown(newest_table),
        *(["## Reasons", "\n".join(reasons)] if reasons else []),
        "## FlashInfer, as it is read",
        "The era is told by the structure of the source, whatever the version says. Releases "
        "without\na wheel were read from their source archives; nothing in them was built or run.",
        _markdown(_eras(facts)),
    ]
    return "\n\n".join(parts) + "\n"


def _without_pin(facts: Facts) -> list[str]:
    versions = [release.version for release in facts.sglang if not release.pin]
    listed = span(versions, [release.version for release in facts.sglang])
    return [f"Pin none: {listed}."] if versions else []


def _eras(facts: Facts) -> list[list[str]]:
    out = [["FlashInfer", "read from", "era"]]
    order = [release.version for release in facts.flashinfer]
    kinds = {"wheel": "its wheel", "source": "its source archive", "none": "-"}
    alike = groupby(reversed(facts.flashinfer), key=lambda r: (r.kind, r.era, r.problem))
    for (kind, era, problem), group in alike:
        versions = [release.version for release in group]
        out.append([span(versions, order), kinds[kind], f"refused: {problem}" if problem else era])
    return out


def _markdown(table: Sequence[Sequence[str]]) -> str:
    head, *rows = table
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(c.replace('|', chr(92) + '|') for c in r)} |" for r in lines)


# --- JSON -------------------------------------------------------------------------------------


def pairs_json(facts: Facts, pairs: Iterable[Versions]) -> list[dict[str, Any]]:
    """The pairs for machines, none grouped. `variants` is null where a pair was not tried."""
    releases = {release.version: release for release in facts.sglang}
    out: list[dict[str, Any]] = []
    for s, f in pairs:
        cells = facts.cells(releases[s], f) if s in releases else None
        out.append(
            {
                "sglang": s,
                "flashinfer": f,
                "pinned": s in releases and releases[s].pin == f,
                "variants": None
                if cells is None
                else {c.variant: {"states": c.states, "notes": c.notes} for c in cells},
            }
        )
    return out
