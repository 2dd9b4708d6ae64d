"""codegen/yamlfile.py: places in the text, whatever the style and the bytes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from yaml.nodes import MappingNode, ScalarNode

from mlagen.codegen.yamlfile import MAX_BYTES, YamlFile, found, quoted, read


def scalar(text: str) -> tuple[YamlFile, ScalarNode]:
    """The value of the only key in `text`."""
    file = read(text.encode(), "a.yaml")
    assert not file.problems
    assert isinstance(file.root, MappingNode)
    node = file.root.value[0][1]
    assert isinstance(node, ScalarNode)
    return file, node


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("k: ab + X", (1, 9)),
        ("k:    ab +   X   # X", (1, 14)),
        ("k: 'ab + X'", (1, 10)),
        ('k: "ab + X"', (1, 10)),
        ("k: ab\n  + X", (2, 5)),
        ("k: 'ab\n\n  + X'", (3, 5)),
        ("k: >-\n  ab\n  + X\n", (3, 5)),
        ("k: |\n  ab\n\n    + X\n", (4, 7)),
        ("k: |2-  # X\n  ab\n  + X", (3, 5)),
        ("k: ab\r\n  + X\r\n", (2, 5)),
        ("# é\nk: ab + X", (2, 9)),
        ("\ufeffk: ab + X", (1, 9)),
        # Escapes move characters: the scalar's start is all that is known.
        ('k: "ab \\x2b X"', (1, 4)),
        ("k: 'a''b X'", (1, 4)),
    ],
)
def test_place_of_a_character_in_a_scalar(text: str, place: tuple[int, int]) -> None:
    file, node = scalar(text)
    assert file.place(file.index_in(node, node.value.index("X"))) == place


@pytest.mark.parametrize(
    ("text", "place"),
    [("k: ab + ", (1, 8)), ("k: 'ab +  '", (1, 9)), ("k: ''", (1, 4)), ("k:", (1, 3))],
)
def test_place_behind_the_last_character(text: str, place: tuple[int, int]) -> None:
    file, node = scalar(text)
    assert file.place(file.index_in(node, len(node.value))) == place


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("k: yes", "the boolean 'yes'"),
        ("k: 0o17", "the text '0o17'"),
        ("k: 017", "the number '017'"),
        ("k: 1e3", "the text '1e3'"),
        ("k: 1.5", "the number '1.5'"),
        ("k: ~", "nothing"),
        ("k:", "nothing"),
        ("k: ''", "the text ''"),
        ("k: 2026-01-01", "the date '2026-01-01'"),
        ("k: '12'", "the text '12'"),
    ],
)
def test_found_says_what_yaml_took_it_for(text: str, expected: str) -> None:
    _, node = scalar(text)
    assert found(node) == expected


def test_problems_come_in_file_order_and_once() -> None:
    file = YamlFile("a.yaml", text="one\ntwo\n")
    file.report(5, "b", "second")
    file.report(0, "a", "first")
    file.report(5, "b", "second")
    assert [str(problem) for problem in file.ordered()] == [
        "a.yaml:1:1: a: first",
        "a.yaml:2:2: b: second",
    ]


@pytest.mark.parametrize(
    "data",
    [
        b"a" * (MAX_BYTES + 1),
        b"[" * 100_000,
        b"{a: " * 10_000,
        b"- " * 10_000 + b"a",
        b"? " * 10_000,
        b"%YAML " + b"9" * 5000 + b".1\n--- a",
        b'"\\UFFFFFFFF"',
        b"\xef\xbb\xbf\xff",
        b"\xff\xfe",
        b"\x00",
        b"a: \xed\xa0\x80",
        b"&a [*a, *a",
        b"!<tag:%ff> a",
    ],
    ids=lambda data: repr(data[:20]),
)
def test_hostile_bytes_are_problems(data: bytes) -> None:
    file = read(data, "a.yaml")
    assert file.problems
    assert all(problem.line >= 1 and problem.column >= 1 for problem in file.problems)


def test_a_byte_order_mark_is_no_column() -> None:
    assert read(b"\xef\xbb\xbf\xff", "a.yaml").problems[0].column == 1
    assert read(b"\xef\xbb\xbfa: 1", "a.yaml").problems == []


def test_quoted_is_one_printable_line() -> None:
    assert quoted("a\nb") == "'a\\nb'"
    assert quoted("\ud800") == "'\\ud800'"
    assert len(quoted("x" * 1000)) < 70


@settings(deadline=None)
@given(st.one_of(st.binary(max_size=200), st.text(max_size=200).map(str.encode)))
def test_any_bytes_are_read_or_told(data: bytes) -> None:
    file = read(data, "a.yaml")
    for problem in file.problems:
        assert problem.line >= 1
        assert problem.column >= 1
        assert str(problem).isprintable() or problem.hint
