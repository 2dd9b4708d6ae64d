"""Length formulas: the one place that parses, checks, evaluates and emits them.

A formula is small arithmetic over lengths that the host already knows, such as
`seq_lens + draft_token_num`. The same `Formula` makes the host array, the check and the
documentation of an emitted plan function, so that the three cannot disagree.

    formula = term { ("+" | "-") term }
    term    = atom { ("*" | "//") atom }
    atom    = integer | length | "(" formula ")"

There is no sign, no call, no other operator. Each divisor is shown to be at least 1 when the
formula is parsed, so an evaluation cannot divide by zero.
"""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, TypeAlias

#: Longest formula, in characters, and deepest nesting of parentheses.
MAX_LENGTH = 200
MAX_DEPTH = 16
#: Largest literal: host arrays are int32.
MAX_INTEGER = 2**31 - 1


@dataclass(frozen=True)
class Length:
    """One length that a formula may name.

    A `vector` has one value a request (int32, shape [batch]), a `scalar` is one int for the
    whole batch. `least` is the smallest value it ever takes.
    """

    kind: Literal["vector", "scalar"]
    least: int
    meaning: str


#: What a formula may name. Where each comes from in SGLang is said in `meaning`.
LENGTHS: Mapping[str, Length] = MappingProxyType(
    {
        "seq_lens": Length(
            "vector", 0, "length of each request as the host keeps it (seq_lens_cpu)"
        ),
        "extend_seq_lens": Length(
            "vector", 0, "query tokens of each request in an extend (extend_seq_lens_cpu)"
        ),
        "draft_token_num": Length(
            "scalar", 1, "tokens of each request that target-verify checks (spec_info)"
        ),
        "draft_step": Length("scalar", 0, "which step of the draft chain, from 0"),
        "dcp_size": Length("scalar", 1, "ranks of the decode context-parallel group"),
        "dcp_rank": Length("scalar", 0, "this rank in that group, from 0"),
    }
)

Operator: TypeAlias = Literal["+", "-", "*", "//"]


@dataclass(frozen=True)
class Number:
    """An integer literal, at least 0."""

    value: int


@dataclass(frozen=True)
class Name:
    """A length by its name."""

    name: str


@dataclass(frozen=True)
class Binary:
    """`left op right`."""

    op: Operator
    left: Node
    right: Node


Node: TypeAlias = "Number | Name | Binary"


@dataclass(frozen=True)
class FormulaIssue:
    """One thing that is wrong in a formula. `column` counts characters of the text from 1."""

    column: int
    code: str
    message: str
    hint: str = ""


class FormulaError(ValueError):
    """A text is no formula. Carries every issue that was found, by column."""

    def __init__(self, *issues: FormulaIssue) -> None:
        super().__init__("; ".join(f"column {i.column}: {i.message}" for i in issues))
        self.issues = issues


@dataclass(frozen=True)
class Formula:
    """A parsed formula. Two formulas are equal if their canonical texts are.

    Attributes:
        text: canonical: single spaces, no parenthesis that can be left out. Parsing it gives
            the same formula.
        tree: the operations.
        uses: (name, column) of each length in the text that was parsed, in its order, columns
            from 1.
    """

    text: str
    tree: Node = field(repr=False, compare=False)
    uses: tuple[tuple[str, int], ...] = field(repr=False, compare=False)

    @property
    def names(self) -> tuple[str, ...]:
        """The lengths used, each once, in order of appearance."""
        return tuple(dict.fromkeys(name for name, _ in self.uses))

    @property
    def vectors(self) -> tuple[str, ...]:
        """Those of `names` that have a value for each request."""
        return tuple(name for name in self.names if LENGTHS[name].kind == "vector")

    @property
    def scalars(self) -> tuple[str, ...]:
        """Those of `names` that are one int for the batch."""
        return tuple(name for name in self.names if LENGTHS[name].kind == "scalar")

    @property
    def is_constant(self) -> bool:
        """True where no length is named."""
        return not self.uses

    def shifts(self, name: str) -> bool:
        """Whether the value is that of `name` and a number that is the same for all requests."""
        return self.vectors == (name,) and _shifts(self.tree, name)

    def evaluate(self, env: Mapping[str, int]) -> int:
        """The value for one request.

        `env` gives an int for each of `names`; KeyError where it does not. `//` floors.
        ZeroDivisionError only if `env` breaks a length's `least`.
        """
        return _evaluate(self.tree, env)

    def emit_scalar(self, names: Mapping[str, str] | None = None) -> str:
        """Python source of the value for one request, as an int.

        `names` maps lengths to the Python expressions that stand for them; what it leaves out
        keeps its name. Anything but a name, attribute, subscript, call or literal is put in
        parentheses. SyntaxError where an expression is none.
        """
        return _text(_substituted(self.tree, names or {}))

    def emit_array(self, names: Mapping[str, str]) -> str:
        """One Python expression for the values of all requests.

        `names` as in `emit_scalar`. Each vector has to stand for a NumPy array, int32 or int64,
        shape [batch], each scalar for an int. The result is a new array of that shape and
        dtype; an int where `vectors` is empty; and where the formula is one bare vector, that
        array itself, not a copy.

        Plain operators are enough: NumPy keeps the dtype when the other side is an int, and its
        `//` floors as Python's does. What is added to a vector is added up first, so that
        `seq_lens + dcp_size - 1` costs one array operation:
        `seq_lens + (dcp_size - 1)`.
        """
        return _text(_substituted(_grouped(self.tree), names))

    def describe(self) -> str:
        """Short text for a docstring: the canonical formula."""
        return self.text


def parse(text: str, *, allowed: Mapping[str, Length] = LENGTHS) -> Formula:
    """Parse `text`. `allowed` is the part of LENGTHS that it may name.

    Raises FormulaError with every issue found: all bad characters, numbers and names; of the
    grammar, the first error.
    """
    if len(text) > MAX_LENGTH:
        raise _too_long(MAX_LENGTH + 1, len(text))
    tokens, issues = _tokens(text)
    if not tokens and not issues:
        issue = FormulaIssue(1, "formula-empty", "the formula is empty", _known(allowed))
        raise FormulaError(issue)
    issues += _unknown(tokens, allowed)
    tree: Node | None = None
    if not any(issue.code != "unknown-length" for issue in issues):
        try:
            tree = _Parser(tokens, len(text.rstrip(_BLANK)) + 1).whole()
        except FormulaError as error:
            issues += error.issues
    if tree is None or issues:
        raise FormulaError(*sorted(issues, key=lambda issue: issue.column))
    canonical = _text(tree)
    if len(canonical) > MAX_LENGTH:
        raise _too_long(1, len(canonical))
    uses = tuple((token.text, token.column) for token in tokens if token.kind == "name")
    return Formula(canonical, tree, uses)


def _too_long(column: int, length: int) -> FormulaError:
    message = f"the formula has {length} characters, at most {MAX_LENGTH} are read"
    return FormulaError(FormulaIssue(column, "formula-too-long", message, "spaces count"))


# --- reading ---------------------------------------------------------------------------------

_BLANK = " \t\r\n"
# ASCII only, spelled out: \d and \w take other alphabets' digits and letters.
_TOKEN = re.compile(
    r"(?P<blank>[ \t\r\n]+)"
    r"|(?P<name>[A-Za-z_][A-Za-z0-9_]*)"
    r"|(?P<number>[0-9][0-9A-Za-z_.]*)"
    r"|(?P<op>\*\*|//|<<|>>|[+\-*()])"
    r"|(?P<other>.)",
    re.DOTALL,
)
_REFUSED_OPERATORS = {"/", "%", "&", "|", "^", "~", "<", ">", "=", "!", "@", "**", "<<", ">>"}
_OPERATORS_HINT = "a formula is made of + - * // ( ), integers and lengths"


@dataclass(frozen=True)
class _Token:
    kind: str
    text: str
    column: int


def _tokens(text: str) -> tuple[list[_Token], list[FormulaIssue]]:
    tokens: list[_Token] = []
    issues: list[FormulaIssue] = []
    for match in _TOKEN.finditer(text):
        kind, part, column = str(match.lastgroup), match.group(), match.start() + 1
        if kind == "blank":
            continue
        if part in _REFUSED_OPERATORS:
            hint = "use // , which rounds down" if part == "/" else _OPERATORS_HINT
            message = f"the operator {part} is not allowed"
            issues.append(FormulaIssue(column, "formula-operator", message, hint))
        elif kind == "other":
            issues.append(_bad_character(part, column))
        elif kind == "number" and not re.fullmatch("0|[1-9][0-9]*", part):
            message = f"{_short(part)} is not a decimal integer"
            hint = "write it with the digits 0-9 only, without a leading 0"
            issues.append(FormulaIssue(column, "formula-number", message, hint))
        elif kind == "number" and int(part) > MAX_INTEGER:
            message = f"{_short(part)} does not fit int32, which host lengths are kept in"
            issues.append(FormulaIssue(column, "formula-number", message))
        else:
            tokens.append(_Token(kind, part, column))
    return tokens, issues


def _bad_character(character: str, column: int) -> FormulaIssue:
    shown = repr(character) if character.isprintable() else f"U+{ord(character):04X}"
    hint = _OPERATORS_HINT
    if not character.isascii():
        hint = "only ASCII digits, letters and operators are read"
    return FormulaIssue(column, "formula-character", f"unexpected character {shown}", hint)


def _unknown(tokens: list[_Token], allowed: Mapping[str, Length]) -> list[FormulaIssue]:
    issues = []
    seen: set[str] = set()
    for position, token in enumerate(tokens):
        if token.kind != "name" or token.text in allowed or token.text in seen:
            continue
        seen.add(token.text)
        if [after.text for after in tokens[position + 1 : position + 2]] == ["("]:
            issues.append(_call(token))
            continue
        nearest = difflib.get_close_matches(token.text, list(allowed), n=1)
        message = f"unknown length {_short(token.text)}"
        if nearest:
            message += f"; did you mean {nearest[0]}?"
        issues.append(FormulaIssue(token.column, "unknown-length", message, _known(allowed)))
    return issues


def _call(token: _Token) -> FormulaIssue:
    message = f"{_short(token.text)}(...) is a call; there are none in a formula"
    return FormulaIssue(token.column, "formula-syntax", message, _OPERATORS_HINT)


def _known(allowed: Mapping[str, Length]) -> str:
    return "known lengths: " + ", ".join(allowed)


def _short(part: str) -> str:
    return part if len(part) <= 40 else part[:37] + "..."


class _Parser:
    """Recursive descent, one token ahead. `end` is the column behind the last token."""

    def __init__(self, tokens: list[_Token], end: int) -> None:
        self.tokens = tokens
        self.end = _Token("end", "", end)
        self.position = 0
        self.depth = 0

    @property
    def next(self) -> _Token:
        if self.position < len(self.tokens):
            return self.tokens[self.position]
        return self.end

    def take(self) -> _Token:
        token = self.next
        self.position += 1
        return token

    def whole(self) -> Node:
        tree = self.formula()
        rest = self.next
        if rest.kind == "end":
            return tree
        if rest.text == ")":
            raise _syntax(rest, "this ) closes nothing")
        before = self.tokens[self.position - 1]
        if rest.text == "(" and before.kind == "name":
            raise FormulaError(_call(before))
        raise _syntax(rest, f"an operator is missing before {_short(rest.text)}")

    def formula(self) -> Node:
        tree = self.term()
        while self.next.text in ("+", "-"):
            op: Operator = "+" if self.take().text == "+" else "-"
            tree = _binary(op, tree, self.term())
        return tree

    def term(self) -> Node:
        tree = self.atom()
        while self.next.text in ("*", "//"):
            op: Operator = "*" if self.take().text == "*" else "//"
            start = self.next
            right = self.atom()
            if op == "//":
                _check_divisor(right, start.column)
            tree = _binary(op, tree, right)
        return tree

    def atom(self) -> Node:
        token = self.take()
        if token.kind == "number":
            return Number(int(token.text))
        if token.kind == "name":
            return Name(token.text)
        if token.text == "(":
            return self.parenthesis(token)
        if token.kind == "end":
            raise _syntax(token, "the formula ends where a length or an integer has to follow")
        operand = self.next.kind in ("name", "number") or self.next.text == "("
        if token.text in ("+", "-") and operand:
            hint = "there are no signs: write a - b, or 0 - a"
            raise _syntax(token, f"the sign {token.text} has nothing on its left", hint)
        raise _syntax(token, f"{token.text} stands where a length or an integer has to")

    def parenthesis(self, opening: _Token) -> Node:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            message = f"parentheses are nested deeper than {MAX_DEPTH}"
            raise FormulaError(FormulaIssue(opening.column, "formula-too-deep", message))
        tree = self.formula()
        if self.next.kind == "end":
            raise _syntax(opening, "this ( is not closed")
        if self.next.text != ")":
            raise _syntax(self.next, f"an operator is missing before {_short(self.next.text)}")
        self.take()
        self.depth -= 1
        return tree


def _syntax(token: _Token, message: str, hint: str = "") -> FormulaError:
    return FormulaError(FormulaIssue(token.column, "formula-syntax", message, hint))


def _binary(op: Operator, left: Node, right: Node) -> Node:
    """`left op right`, turned so that no parenthesis on the right is needed where integers
    allow it: a + (b - c) is a + b - c, a * (b * c) is a * b * c."""
    if isinstance(right, Binary):
        if op == "+" and right.op in ("+", "-"):
            return _binary(right.op, _binary("+", left, right.left), right.right)
        if op == "*" and right.op == "*":
            return _binary("*", _binary("*", left, right.left), right.right)
    return Binary(op, left, right)


def _check_divisor(node: Node, column: int) -> None:
    least = _least(node)
    if least is not None and least >= 1:
        return
    shown = _text(node)
    message = f"the divisor {shown} is not known to be at least 1"
    if isinstance(node, Number):
        message = "division by 0"
    always = ", ".join(name for name, length in LENGTHS.items() if length.least >= 1)
    hint = f"divide by a positive integer or by lengths that are never 0: {always}"
    raise FormulaError(FormulaIssue(column, "formula-division", message, hint))


def _least(node: Node) -> int | None:
    """A lower bound of the node, None where none is known (after most subtractions)."""
    if isinstance(node, Number):
        return node.value
    if isinstance(node, Name):
        # An unknown name is an error already told; do not tell of its division as well.
        return LENGTHS[node.name].least if node.name in LENGTHS else 1
    left, right = _least(node.left), _least(node.right)
    if left is None:
        return None
    if node.op == "-":
        return left - node.right.value if isinstance(node.right, Number) else None
    if right is None or (node.op != "+" and (left < 0 or right < 0)):
        return None
    if node.op == "//":
        return left // node.right.value if isinstance(node.right, Number) else 0
    return left + right if node.op == "+" else left * right


# --- evaluating and emitting -----------------------------------------------------------------


def _shifts(node: Node, name: str) -> bool:
    """Whether `name` is one term of a sum, once, and not one that is taken away."""
    if isinstance(node, Binary) and node.op in ("+", "-"):
        in_left, in_right = _mentions(node.left, name), _mentions(node.right, name)
        if in_left and not in_right:
            return _shifts(node.left, name)
        return in_right and not in_left and node.op == "+" and _shifts(node.right, name)
    return isinstance(node, Name) and node.name == name


def _mentions(node: Node, name: str) -> bool:
    if isinstance(node, Binary):
        return _mentions(node.left, name) or _mentions(node.right, name)
    return isinstance(node, Name) and node.name == name


def _evaluate(node: Node, env: Mapping[str, int]) -> int:
    if isinstance(node, Number):
        return node.value
    if isinstance(node, Name):
        return env[node.name]
    left, right = _evaluate(node.left, env), _evaluate(node.right, env)
    if node.op == "+":
        return left + right
    if node.op == "-":
        return left - right
    return left * right if node.op == "*" else left // right


def _text(node: Node) -> str:
    if isinstance(node, Number):
        return str(node.value)
    if isinstance(node, Name):
        return node.name
    left, right = _text(node.left), _text(node.right)
    if node.op in ("*", "//"):
        if _is_sum(node.left):
            left = f"({left})"
        if isinstance(node.right, Binary):
            right = f"({right})"
    elif _is_sum(node.right):
        right = f"({right})"
    return f"{left} {node.op} {right}"


def _is_sum(node: Node) -> bool:
    return isinstance(node, Binary) and node.op in ("+", "-")


def _substituted(node: Node, names: Mapping[str, str]) -> Node:
    """The tree with each name replaced by the source that stands for it."""
    if isinstance(node, Name):
        return Name(_primary(names[node.name])) if node.name in names else node
    if isinstance(node, Binary):
        left, right = _substituted(node.left, names), _substituted(node.right, names)
        return Binary(node.op, left, right)
    return node


def _primary(source: str) -> str:
    body = ast.parse(source, mode="eval").body
    tight = (ast.Name, ast.Attribute, ast.Subscript, ast.Call, ast.Constant)
    return source if isinstance(body, tight) else f"({source})"


def _grouped(node: Node) -> Node:
    """The tree with the scalar terms of each sum put together, away from its vectors."""
    if not isinstance(node, Binary):
        return node
    if node.op in ("*", "//"):
        return Binary(node.op, _grouped(node.left), _grouped(node.right))
    terms = _terms(node)
    vectors = [term for term in terms if _has_vector(term[1])]
    scalars = [term for term in terms if not _has_vector(term[1])]
    if not vectors or not scalars:
        return _chain(terms)
    if not any(positive for positive, _ in vectors):
        # No sign to begin with: the scalars come first, and hold the positive term.
        return _chain([(True, _chain(scalars)), *vectors])
    if any(positive for positive, _ in scalars):
        return _chain([*vectors, (True, _chain(scalars))])
    negated = [(True, term) for _, term in scalars]
    return _chain([*vectors, (False, _chain(negated))])


def _terms(node: Node, positive: bool = True) -> list[tuple[bool, Node]]:
    """The terms of a sum as (is added, term); none of them is a sum itself."""
    if isinstance(node, Binary) and node.op in ("+", "-"):
        right = positive if node.op == "+" else not positive
        return [*_terms(node.left, positive), *_terms(node.right, right)]
    return [(positive, _grouped(node))]


def _chain(terms: list[tuple[bool, Node]]) -> Node:
    """The sum of `terms`, one of which is added. It leads, the others keep their order."""
    first = next(index for index, (positive, _) in enumerate(terms) if positive)
    tree = terms[first][1]
    for positive, term in [*terms[:first], *terms[first + 1 :]]:
        tree = Binary("+" if positive else "-", tree, term)
    return tree


def _has_vector(node: Node) -> bool:
    if isinstance(node, Binary):
        return _has_vector(node.left) or _has_vector(node.right)
    return isinstance(node, Name) and node.name in LENGTHS and LENGTHS[node.name].kind == "vector"
