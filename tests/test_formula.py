"""codegen/formula.py: what is read, what is refused and where, and what is emitted."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import FrozenInstanceError
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlagen.codegen.formula import (
    LENGTHS,
    MAX_DEPTH,
    MAX_INTEGER,
    MAX_LENGTH,
    Formula,
    FormulaError,
    Name,
    parse,
)

relaxed = settings(deadline=None)

DCP = "(seq_lens + dcp_size - 1 - dcp_rank) // dcp_size"


class Vector:
    """The few array operations that formulas use, element by element; counts them."""

    operations = 0

    def __init__(self, values: list[int]) -> None:
        self.values = values

    def _each(self, other: Any, operation: Callable[[int, int], int]) -> Vector:
        Vector.operations += 1
        others = other.values if isinstance(other, Vector) else [other] * len(self.values)
        return Vector([operation(a, b) for a, b in zip(self.values, others, strict=True)])

    def __add__(self, other: Any) -> Vector:
        return self._each(other, lambda a, b: a + b)

    def __sub__(self, other: Any) -> Vector:
        return self._each(other, lambda a, b: a - b)

    def __rsub__(self, other: Any) -> Vector:
        return self._each(other, lambda a, b: b - a)

    def __mul__(self, other: Any) -> Vector:
        return self._each(other, lambda a, b: a * b)

    def __floordiv__(self, other: Any) -> Vector:
        return self._each(other, lambda a, b: a // b)

    def __rfloordiv__(self, other: Any) -> Vector:
        return self._each(other, lambda a, b: b // a)

    __radd__ = __add__
    __rmul__ = __mul__


# --- generated formulas ----------------------------------------------------------------------

atoms = st.one_of(
    st.integers(0, 40).map(str), st.sampled_from(sorted(LENGTHS)), st.just("seq_lens")
)
divisors = st.sampled_from(["1", "3", "dcp_size", "draft_token_num", "(dcp_size + draft_step)"])
blanks = st.sampled_from(["", " ", "  "])


def _grow(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    plain = st.tuples(inner, blanks, st.sampled_from("+-*"), blanks, inner).map("".join)
    division = st.tuples(inner.map("({})".format), blanks, st.just("//"), blanks, divisors)
    return st.one_of(plain, division.map("".join), inner.map("({})".format))


def _short_enough(text: str) -> bool:
    # The canonical text may have more blanks.
    return len(text) <= MAX_LENGTH * 3 // 5 and text.count("(") <= MAX_DEPTH


texts = st.recursive(atoms, _grow, max_leaves=10).filter(_short_enough)
# Few enough factors for int64.
small_texts = st.recursive(atoms, _grow, max_leaves=4).filter(_short_enough)
environments = st.fixed_dictionaries(
    {
        name: (
            st.lists(st.integers(length.least, 5000), min_size=3, max_size=3)
            if length.kind == "vector"
            else st.integers(length.least, 64)
        )
        for name, length in LENGTHS.items()
    }
)


def _row(env: dict[str, Any], row: int) -> dict[str, int]:
    return {name: value[row] if isinstance(value, list) else value for name, value in env.items()}


@relaxed
@given(texts)
def test_canonical_text_is_a_fixpoint(text: str) -> None:
    formula = parse(text)
    again = parse(formula.text)
    assert again.text == formula.text
    assert again == formula
    assert again.tree == formula.tree
    assert again.names == formula.names


@relaxed
@given(texts, environments)
def test_text_evaluation_and_emitted_source_agree(text: str, env: dict[str, Any]) -> None:
    formula = parse(text)
    for row in range(3):
        values = _row(env, row)
        expected = eval(text.strip(), {}, dict(values))
        assert formula.evaluate(values) == expected
        assert eval(formula.text, {}, dict(values)) == expected
        assert eval(formula.emit_scalar(), {}, dict(values)) == expected


@relaxed
@given(texts, environments)
def test_emitted_array_source_gives_each_request_its_value(text: str, env: dict[str, Any]) -> None:
    formula = parse(text)
    expected = [formula.evaluate(_row(env, row)) for row in range(3)]
    scope = {
        f"host_{name}": Vector(value) if isinstance(value, list) else value
        for name, value in env.items()
    }
    source = formula.emit_array({name: f"host_{name}" for name in LENGTHS})
    result = eval(source, {}, scope)
    if formula.vectors:
        assert result.values == expected
    else:
        assert [result] * 3 == expected


@relaxed
@given(small_texts, environments)
def test_emitted_array_source_on_numpy(text: str, env: dict[str, Any]) -> None:
    formula = parse(text)
    rows = [_row(env, row) for row in range(3)]
    scope: dict[str, Any] = {
        name: np.array(value, dtype=np.int64) if isinstance(value, list) else value
        for name, value in env.items()
    }
    expected = [formula.evaluate(row) for row in rows]
    result = eval(formula.emit_array({}), {}, scope)
    if formula.vectors:
        assert result.dtype == np.int64
        assert result.tolist() == expected
    else:
        assert [result] * 3 == expected


def parsed(text: str) -> Formula | FormulaError:
    try:
        return parse(text)
    except FormulaError as error:
        return error


# The second alphabet is that of formulas: it reaches the grammar more often than any text does.
@relaxed
@given(st.one_of(st.text(max_size=60), st.text(alphabet="() +-*/019_dcp_size", max_size=40)))
def test_any_text_is_a_formula_or_a_formula_error(text: str) -> None:
    outcome = parsed(text)
    if isinstance(outcome, Formula):
        assert parse(outcome.text) == outcome
        env = dict.fromkeys(outcome.names, 7)
        assert outcome.evaluate(env) == eval(outcome.text, {}, dict(env))
        return
    columns = [issue.column for issue in outcome.issues]
    assert columns
    assert columns == sorted(columns)
    assert all(1 <= column <= len(text) + 1 for column in columns)


# --- what is read ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("1", "1"),
        ("  seq_lens ", "seq_lens"),
        ("seq_lens+draft_token_num", "seq_lens + draft_token_num"),
        ("((seq_lens))+(1)", "seq_lens + 1"),
        ("seq_lens + (draft_step + 1)", "seq_lens + draft_step + 1"),
        ("seq_lens + (draft_step - 1)", "seq_lens + draft_step - 1"),
        ("seq_lens - (draft_step - 1)", "seq_lens - (draft_step - 1)"),
        ("(seq_lens - draft_step) - 1", "seq_lens - draft_step - 1"),
        ("2 * (seq_lens * 3)", "2 * seq_lens * 3"),
        ("2 * (seq_lens // 3)", "2 * (seq_lens // 3)"),
        ("(2 * seq_lens) // 3", "2 * seq_lens // 3"),
        ("seq_lens // (2 * 3)", "seq_lens // (2 * 3)"),
        ("(seq_lens + 1) * 2", "(seq_lens + 1) * 2"),
        ("1 + 2 * 3", "1 + 2 * 3"),
        ("seq_lens\n + 1", "seq_lens + 1"),
        (f"({DCP})", DCP),
    ],
)
def test_canonical_text(text: str, canonical: str) -> None:
    assert parse(text).text == canonical
    assert str(parse(text).describe()) == canonical


def test_names_by_kind_in_order() -> None:
    formula = parse("draft_step + seq_lens * draft_step + dcp_size")
    assert formula.names == ("draft_step", "seq_lens", "dcp_size")
    assert formula.vectors == ("seq_lens",)
    assert formula.scalars == ("draft_step", "dcp_size")
    assert formula.uses[2] == ("draft_step", 25)
    assert not formula.is_constant
    assert parse("2 * 3").is_constant


def test_formulas_are_values() -> None:
    formula = parse("seq_lens+1")
    assert formula == parse("(seq_lens + 1)")
    assert hash(formula) == hash(parse("seq_lens + 1"))
    assert formula != parse("seq_lens + 2")
    with pytest.raises(FrozenInstanceError):
        formula.text = "seq_lens"  # type: ignore[misc]


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 4096])
def test_the_shipped_share_formula_deals_out_every_token(size: int, length: int) -> None:
    # SGLang's rule: len // N + (rank < len % N)
    shares = [
        parse(DCP).evaluate({"seq_lens": length, "dcp_size": size, "dcp_rank": rank})
        for rank in range(size)
    ]
    assert shares == [length // size + (rank < length % size) for rank in range(size)]
    assert sum(shares) == length


def test_evaluate_needs_every_length() -> None:
    with pytest.raises(KeyError, match="draft_step"):
        parse("seq_lens + draft_step").evaluate({"seq_lens": 1})


def test_deepest_and_longest_are_read() -> None:
    assert parse("(" * MAX_DEPTH + "1" + ")" * MAX_DEPTH) == parse("1")
    # Depth counts what is open, not how many there are.
    assert parse("(1) + " * 30 + "(1)").evaluate({}) == 31
    assert parse("1" + " " * (MAX_LENGTH - 1)) == parse("1")
    assert len(parse("10 + " * 39 + "10001").text) == MAX_LENGTH
    assert parse(str(MAX_INTEGER)).evaluate({}) == MAX_INTEGER


# --- what is emitted -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "emitted", "operations"),
    [
        ("1", "1", 0),
        ("draft_token_num", "draft_token_num", 0),
        ("seq_lens", "seq_lens", 0),
        ("seq_lens + draft_token_num", "seq_lens + draft_token_num", 1),
        ("seq_lens + draft_step + 1", "seq_lens + (draft_step + 1)", 1),
        (DCP, "(seq_lens + (dcp_size - 1 - dcp_rank)) // dcp_size", 2),
        ("1 + seq_lens", "seq_lens + 1", 1),
        ("seq_lens - draft_step - 1", "seq_lens - (draft_step + 1)", 1),
        ("seq_lens - 1 + draft_step", "seq_lens + (draft_step - 1)", 1),
        ("seq_lens - (draft_step - 1)", "seq_lens + (1 - draft_step)", 1),
        ("draft_step + 1 - seq_lens", "draft_step + 1 - seq_lens", 1),
        ("1 - (seq_lens + 2)", "1 - 2 - seq_lens", 1),
        ("1 - seq_lens + extend_seq_lens", "extend_seq_lens - seq_lens + 1", 2),
        ("seq_lens - extend_seq_lens", "seq_lens - extend_seq_lens", 1),
        ("2 * (seq_lens + 1 + draft_step)", "2 * (seq_lens + (1 + draft_step))", 2),
    ],
)
def test_emitted_tensor_source(text: str, emitted: str, operations: int) -> None:
    formula = parse(text)
    assert formula.emit_array({}) == emitted
    env: dict[str, Any] = {
        "seq_lens": Vector([9, 4]),
        "extend_seq_lens": Vector([3, 1]),
        "draft_token_num": 4,
        "draft_step": 2,
        "dcp_size": 4,
        "dcp_rank": 1,
    }
    Vector.operations = 0
    eval(emitted, {}, env)
    assert Vector.operations == operations


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_numpy_keeps_the_dtype(dtype: str) -> None:
    lens = np.array([0, 1, 9, 4096], dtype=dtype)
    scope = {"lens": lens, "size": 4, "rank": 3}
    names = {"seq_lens": "lens", "dcp_size": "size", "dcp_rank": "rank"}
    result = eval(parse(DCP).emit_array(names), {}, scope)
    assert result.dtype == lens.dtype
    assert result.tolist() == [0, 0, 2, 1024]


@pytest.mark.parametrize(
    ("expression", "emitted"),
    [
        ("n", "2 * n"),
        ("spec_info.draft_token_num", "2 * spec_info.draft_token_num"),
        ("lens[0]", "2 * lens[0]"),
        ("int(n)", "2 * int(n)"),
        ("8", "2 * 8"),
        ("n + 1", "2 * (n + 1)"),
        ("-1", "2 * (-1)"),
        ("a if b else c", "2 * (a if b else c)"),
    ],
)
def test_names_are_replaced_by_expressions(expression: str, emitted: str) -> None:
    formula = parse("2 * draft_token_num")
    assert formula.emit_scalar({"draft_token_num": expression}) == emitted
    assert formula.emit_array({"draft_token_num": expression}) == emitted


def test_replacing_keeps_meaning_of_minus() -> None:
    assert parse("seq_lens - 1").emit_scalar({"seq_lens": "a - b"}) == "(a - b) - 1"
    assert parse("seq_lens").emit_scalar({"draft_step": "unused"}) == "seq_lens"


def test_replacing_by_no_expression_is_refused() -> None:
    with pytest.raises(SyntaxError):
        parse("seq_lens").emit_scalar({"seq_lens": "import os"})


# --- what is refused -------------------------------------------------------------------------


def issues(text: str) -> list[tuple[int, str]]:
    with pytest.raises(FormulaError) as caught:
        parse(text)
    return [(issue.column, issue.code) for issue in caught.value.issues]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", [(1, "formula-empty")]),
        (" \n\t", [(1, "formula-empty")]),
        ("()", [(2, "formula-syntax")]),
        ("seq_lens +", [(11, "formula-syntax")]),
        ("seq_lens +   ", [(11, "formula-syntax")]),
        ("* 2", [(1, "formula-syntax")]),
        ("-1", [(1, "formula-syntax")]),
        ("seq_lens + -1", [(12, "formula-syntax")]),
        ("+seq_lens", [(1, "formula-syntax")]),
        ("seq_lens + + 1", [(12, "formula-syntax")]),
        ("(seq_lens + 1", [(1, "formula-syntax")]),
        ("(seq_lens 1)", [(11, "formula-syntax")]),
        ("seq_lens)", [(9, "formula-syntax")]),
        ("seq_lens 1", [(10, "formula-syntax")]),
        ("seq_lens(1)", [(1, "formula-syntax")]),
        ("max(seq_lens, 1)", [(1, "formula-syntax"), (13, "formula-character")]),
        ("1 + len(bs)", [(5, "formula-syntax"), (9, "unknown-length")]),
        ("2(1)", [(2, "formula-syntax")]),
        ("seq_lens / 2", [(10, "formula-operator")]),
        ("seq_lens % 2", [(10, "formula-operator")]),
        ("seq_lens ** 2", [(10, "formula-operator")]),
        ("seq_lens << 2", [(10, "formula-operator")]),
        ("seq_lens & ~1", [(10, "formula-operator"), (12, "formula-operator")]),
        ("a := 1", [(1, "unknown-length"), (3, "formula-character"), (4, "formula-operator")]),
        ("seq_lens, 1", [(9, "formula-character")]),
        ("seq_lens.sum", [(9, "formula-character"), (10, "unknown-length")]),
        ("seq_lens[0]", [(9, "formula-character"), (11, "formula-character")]),
        ("'1'", [(1, "formula-character"), (3, "formula-character")]),
        ("seq_lens + 1 # one", [(14, "formula-character"), (16, "unknown-length")]),
        ("seq_lens + \x00", [(12, "formula-character")]),
        ("seq_lens\u00a0+ 1", [(9, "formula-character")]),
        ("seq_lens + １", [(12, "formula-character")]),
        ("seq_lens + ٣", [(12, "formula-character")]),
        ("ѕeq_lens", [(1, "formula-character"), (2, "unknown-length")]),
        ("seq_lens − 1", [(10, "formula-character")]),
        ("017", [(1, "formula-number")]),
        ("0o17", [(1, "formula-number")]),
        ("0x1F", [(1, "formula-number")]),
        ("1e3", [(1, "formula-number")]),
        ("1_000", [(1, "formula-number")]),
        ("1.5", [(1, "formula-number")]),
        ("2j", [(1, "formula-number")]),
        (str(MAX_INTEGER + 1), [(1, "formula-number")]),
        ("9" * MAX_LENGTH, [(1, "formula-number")]),
        ("seq_len", [(1, "unknown-length")]),
        ("seq_len + seq_len", [(1, "unknown-length")]),
        ("bs + x", [(1, "unknown-length"), (6, "unknown-length")]),
        ("bs +", [(1, "unknown-length"), (5, "formula-syntax")]),
        ("lambda", [(1, "unknown-length")]),
        ("seq_lens // 0", [(13, "formula-division")]),
        ("seq_lens // (1 - 1)", [(13, "formula-division")]),
        ("seq_lens // draft_step", [(13, "formula-division")]),
        ("seq_lens // seq_lens", [(13, "formula-division")]),
        ("seq_lens // (dcp_size - dcp_rank)", [(13, "formula-division")]),
        ("seq_lens // (dcp_size - 1)", [(13, "formula-division")]),
        ("1 // (1 // 2)", [(6, "formula-division")]),
        ("1+" * 60 + "1", [(1, "formula-too-long")]),
        ("1" + " " * MAX_LENGTH, [(MAX_LENGTH + 1, "formula-too-long")]),
        ("(" * (MAX_DEPTH + 1) + "1", [(MAX_DEPTH + 1, "formula-too-deep")]),
    ],
)
def test_refused(text: str, expected: list[tuple[int, str]]) -> None:
    assert issues(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "seq_lens // 2",
        "seq_lens // dcp_size",
        "seq_lens // (draft_step + 1)",
        "seq_lens // (dcp_size * draft_token_num)",
        "seq_lens // (draft_step + 3 - 2)",
        "seq_lens // (4 // 2)",
    ],
)
def test_divisors_known_to_be_positive(text: str) -> None:
    assert parse(text).text == text


def test_messages_say_what_is_known() -> None:
    with pytest.raises(FormulaError) as caught:
        parse("seq_len + draft_token")
    first, second = caught.value.issues
    assert first.message == "unknown length seq_len; did you mean seq_lens?"
    assert second.message == "unknown length draft_token; did you mean draft_token_num?"
    assert first.hint == "known lengths: " + ", ".join(LENGTHS)
    assert str(caught.value).startswith("column 1: unknown length seq_len;")


def test_long_names_are_shortened_in_messages() -> None:
    with pytest.raises(FormulaError) as caught:
        parse("x" * 150)
    assert len(caught.value.issues[0].message) < 80


def test_only_the_allowed_lengths_are_read() -> None:
    allowed = {"seq_lens": LENGTHS["seq_lens"]}
    assert isinstance(parse("seq_lens", allowed=allowed), Formula)
    with pytest.raises(FormulaError) as caught:
        parse("seq_lens + draft_step", allowed=allowed)
    assert caught.value.issues[0].hint == "known lengths: seq_lens"


def test_every_length_is_described() -> None:
    for name, length in LENGTHS.items():
        assert parse(name).tree == Name(name)
        assert length.meaning
        assert length.least in (0, 1)


@pytest.mark.parametrize(
    ("text", "least", "most"),
    [
        ("seq_lens", 0, 0),
        ("(seq_lens)", 0, 0),
        ("seq_lens + 1", 1, 1),
        ("3 + seq_lens", 3, 3),
        ("seq_lens - 2", -2, -2),
        ("seq_lens + draft_token_num - 1", 0, 4),
        ("seq_lens - 1 + (draft_step + 1)", 0, 5),
        ("draft_token_num * (2 + 1) + seq_lens - 1 // 2", 3, 15),
        ("1 - draft_step + (draft_token_num + (seq_lens - 3))", -6, 3),
    ],
)
def test_a_length_and_a_number(text: str, least: int, most: int) -> None:
    """The same number for all requests: what the value is at none of them is added to any."""
    formula = parse(text)
    assert formula.shifts("seq_lens")
    assert not formula.shifts("extend_seq_lens")
    added = set()
    for tokens, step in itertools.product(range(1, 6), range(6)):
        scalars = {"draft_token_num": tokens, "draft_step": step}
        values = {n: formula.evaluate({"seq_lens": n, **scalars}) - n for n in (0, 1, 7, 1000)}
        assert len(set(values.values())) == 1
        added |= set(values.values())
    assert (min(added), max(added)) == (least, most)


@pytest.mark.parametrize(
    "text",
    [
        "2 * seq_lens",
        "seq_lens * 1",
        "seq_lens // 2",
        "seq_lens // 1 + 3",
        "seq_lens + seq_lens",
        "seq_lens - seq_lens",
        "seq_lens - seq_lens + seq_lens",
        "5 - seq_lens",
        "5 - (seq_lens + 1)",
        "(seq_lens + 1) // 1 * 1",
        "seq_lens + draft_step * seq_lens",
        "seq_lens + extend_seq_lens",
        "extend_seq_lens",
        "draft_token_num",
        "5",
    ],
)
def test_more_than_a_length_and_a_number(text: str) -> None:
    assert not parse(text).shifts("seq_lens")


@relaxed
@given(small_texts, environments)
def test_what_shifts_is_the_length_and_what_it_is_at_0(text: str, env: dict[str, Any]) -> None:
    formula = parse(text)
    values = _row(env, 0)
    if formula.shifts("seq_lens"):
        at_0 = formula.evaluate({**values, "seq_lens": 0})
        assert formula.evaluate(values) == at_0 + values["seq_lens"]
