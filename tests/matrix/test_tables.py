"""Facts of no release as tables: what shares a row, how it is called, where the reasons stand."""

from __future__ import annotations

import pytest

from mlagen.codegen.matrix import tables
from mlagen.codegen.matrix.gather import newest_pairs, pinned_pairs
from tests.matrix.miniature import BAD, FACTS, GOOD, PARTLY, flashinfer

WHEELS = ("0.5", "0.6", "0.7")
ORDER = ("1.0", "1.0.post1", "1.0.post2", "1.1", "1.2")


@pytest.mark.parametrize(
    ("versions", "expected"),
    [
        ((), ""),
        (("1.1",), "1.1"),
        (("1.1", "1.0.post2"), "1.0.post2, 1.1"),
        (("1.0", "1.0.post1", "1.0.post2"), "1.0 to 1.0.post2"),
        (ORDER, "1.0 to 1.2"),
        # One that is left out in between must not be claimed.
        (("1.0", "1.0.post1", "1.1"), "1.0, 1.0.post1, 1.1"),
        # One that is nowhere recorded, either.
        (("1.0", "1.0.post1", "1.0.post2", "9.9"), "1.0, 1.0.post1, 1.0.post2, 9.9"),
    ],
)
def test_span(versions: tuple[str, ...], expected: str) -> None:
    assert tables.span(versions, ORDER) == expected


def test_releases_that_are_alike_share_a_row() -> None:
    rows = tables.rows_of(FACTS, pinned_pairs(FACTS.sglang))
    assert [(s, f) for s, f, _ in rows] == [
        (("1.2",), ("0.6",)),
        (("1.1",), ("0.6",)),  # as 1.0.post2, but for another FlashInfer
        (("1.0.post2", "1.0.post1", "1.0"), ("0.5",)),  # two files, one outcome
        (("0.9",), ("0.4",)),
    ]
    assert [cells for *_, cells in rows[:3]] == [BAD, GOOD, GOOD]
    gone = rows[3][2]
    assert gone is not None
    assert {(c.states, c.notes) for c in gone} == {
        (("refused",), ("FlashInfer 0.4: not to be had",))
    }


def test_flashinfers_share_a_row_only_where_they_follow_one_another() -> None:
    rows = tables.rows_of(FACTS, newest_pairs(FACTS.sglang, WHEELS))
    assert rows == (
        (("1.3",), ("0.7",), None),
        (("1.3",), ("0.6", "0.5"), PARTLY),
        (("1.2",), ("0.7",), PARTLY),
        (("1.2",), ("0.6", "0.5"), BAD),
        (("1.1", "1.0.post2", "1.0.post1"), ("0.7", "0.6", "0.5"), GOOD),
    )


def test_only_the_newest_go_with_every_flashinfer() -> None:
    pairs = newest_pairs(FACTS.sglang, WHEELS)
    assert {s for s, _ in pairs} == {"1.0.post1", "1.0.post2", "1.1", "1.2", "1.3"}
    assert len(pairs) == 15


def test_versions_are_ordered_as_releases_not_as_words() -> None:
    facts = FACTS.model_copy(
        update={"flashinfer": tuple(flashinfer(f"0.{n}", f"d{n}") for n in (9, 10, 11))}
    )
    rows = tables.rows_of(facts, [("1.2", "0.9"), ("1.2", "0.11"), ("1.2", "0.10")])
    assert rows[0][1] == ("0.11", "0.10", "0.9")
    assert "0.9 to 0.11" in tables.text(facts, [("1.2", f"0.{n}") for n in (9, 10, 11)])


TEXT = """\
SGLang  FlashInfer  decode       verify
1.3     0.7         not tried    not tried
1.2     0.6         refused [1]  refused [1, 2]
1.1     0.6         replaced     installed
0.9     0.4         refused [3]  refused [3]

1. line 3: anchor-missing: no call
2. DFLASH: SGLang's own
3. FlashInfer 0.4: not to be had
"""


def test_text() -> None:
    pairs = [("0.9", "0.4"), ("1.1", "0.6"), ("1.2", "0.6"), ("1.3", "0.7")]
    assert tables.text(FACTS, pairs) == TEXT


def test_text_without_reasons() -> None:
    assert tables.text(FACTS, [("1.1", "0.6")]) == (
        "SGLang  FlashInfer  decode    verify\n1.1     0.6         replaced  installed\n"
    )


PAGE = """
Found with mlagen 0.0: 7 releases of SGLang, 5 of FlashInfer, 17 pairs.

## Every SGLang with the FlashInfer that it pins

| SGLang | FlashInfer that it pins | decode | verify |
| --- | --- | --- | --- |
| 1.2 | 0.6 | refused [1] | refused [1, 2] |
| 1.1 | 0.6 | replaced | installed |
| 1.0 to 1.0.post2 | 0.5 | replaced | installed |
| 0.9 | 0.4 | refused [3] | refused [3] |

Pin none: 1.3.

## The newest 5 SGLang with every FlashInfer that has a wheel

3 releases of FlashInfer have one.

| SGLang | FlashInfer | decode | verify |
| --- | --- | --- | --- |
| 1.3 | 0.7 | not tried | not tried |
| 1.3 | 0.5, 0.6 | replaced | replaced + superseded [2] |
| 1.2 | 0.7 | replaced | replaced + superseded [2] |
| 1.2 | 0.5, 0.6 | refused [1] | refused [1, 2] |
| 1.0.post1 to 1.1 | 0.5 to 0.7 | replaced | installed |

## Reasons

1. line 3: anchor-missing: no call
2. DFLASH: SGLang's own
3. FlashInfer 0.4: not to be had

## FlashInfer, as it is read

The era is told by the structure of the source, whatever the version says. Releases without
a wheel were read from their source archives; nothing in them was built or run.

| FlashInfer | read from | era |
| --- | --- | --- |
| 0.5 to 0.7 | its wheel | new |
| 0.4.1 | its source archive | old |
| 0.4 | - | refused: not to be had |
"""


def test_page() -> None:
    page = tables.page(FACTS)
    assert page.endswith(PAGE)
    assert page.startswith("# Which SGLang fits which FlashInfer\n\n")
    assert all(len(line) <= 100 for line in page.splitlines())


def test_long_reasons_are_wrapped_and_pipes_escaped() -> None:
    long = FACTS.flashinfer[0].model_copy(update={"problem": "a | b " * 30})
    facts = FACTS.model_copy(update={"flashinfer": (long, *FACTS.flashinfer[1:])})
    page = tables.page(facts)
    reasons = page.partition("## Reasons\n\n")[2].partition("\n\n")[0].splitlines()
    assert all(len(line) <= 100 for line in reasons)
    assert sum(line.startswith("3. ") for line in reasons) == 1
    assert all(line[0].isdigit() or line.startswith("   ") for line in reasons)
    assert "refused: a \\| b" in page


def test_json() -> None:
    untried, tried = tables.pairs_json(FACTS, [("1.3", "0.7"), ("1.2", "0.6")])
    assert untried == {"sglang": "1.3", "flashinfer": "0.7", "pinned": False, "variants": None}
    assert tried["pinned"] is True
    assert tried["variants"]["verify"] == {
        "states": ("refused",),
        "notes": ("line 3: anchor-missing: no call", "DFLASH: SGLang's own"),
    }
