"""One parsed Python file: libcst tree, line positions, the bytes of each line."""

from __future__ import annotations

import ast
import difflib
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import libcst as cst
from libcst.metadata import CodeRange, MetadataWrapper, PositionProvider

from ..errors import DriftError, Problem
from ..provenance import as_text

_Node = TypeVar("_Node", bound=cst.CSTNode)


class Refused(Exception):
    """An edit has no safe place. `line` is the nearest thing that was found (0: none), `sought` the
    name that is not in the file, where a fork could have another for it ("": none)."""

    def __init__(
        self, code: str, message: str, line: int = 0, hint: str = "", sought: str = ""
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.line = line
        self.hint = hint
        self.sought = sought

    def problem(self, path: str) -> Problem:
        """The refusal as a problem of the file at `path`."""
        return Problem(path, self.line, 0, self.code, self.message, self.hint)


@dataclass(frozen=True)
class Source:
    """A file as bytes and as a tree. Lines count from 1."""

    data: bytes
    path: str
    module: cst.Module

    @classmethod
    def parse(cls, data: bytes, path: str) -> Source:
        """Parse `data`; `path` names it in messages. Raises DriftError where it is no Python."""
        try:
            return cls(data, path, cst.parse_module(data))
        except (cst.ParserSyntaxError, UnicodeDecodeError, LookupError, SyntaxError) as error:
            raise DriftError(_why_not_python(data, path, error)) from None

    @cached_property
    def lines(self) -> tuple[bytes, ...]:
        """The file's lines, each with its own line end."""
        return tuple(self.data.splitlines(keepends=True))

    @cached_property
    def _positions(self) -> dict[cst.CSTNode, CodeRange]:
        # The tree is never changed, so the copy that MetadataWrapper makes by default is waste.
        wrapper = MetadataWrapper(self.module, unsafe_skip_copy=True)
        return dict(wrapper.resolve(PositionProvider))

    def range(self, node: cst.CSTNode) -> CodeRange:
        """Where `node` stands, without the comments above it."""
        return self._positions[node]

    def first(self, node: cst.CSTNode) -> int:
        """The first line of `node`."""
        return self.range(node).start.line

    def last(self, node: cst.CSTNode) -> int:
        """The last line of `node`."""
        return self.range(node).end.line

    def first_with_comments(self, node: cst.CSTNode) -> int:
        """The first line of `node`, or of the comment lines directly above it."""
        line = self.first(node)
        while line > 1 and self.text(line - 1).lstrip().startswith("#"):
            line -= 1
        return line

    def text(self, line: int) -> str:
        """Line `line` without its end; any byte of any encoding survives in it."""
        return as_text(self.lines[line - 1].rstrip(b"\r\n"))

    def indent(self, line: int) -> str:
        """The white space that line `line` starts with."""
        text = self.text(line)
        return text[: len(text) - len(text.lstrip())]

    def code(self, node: cst.CSTNode) -> str:
        """The source of an expression, on one line."""
        text = self.module.code_for_node(node).strip()
        return text if "\n" not in text and "\r" not in text else _on_one_line(text)

    # -- definitions ---------------------------------------------------------------------

    def classes(self) -> Iterator[cst.ClassDef]:
        """Module-level classes."""
        return (node for node in self.module.body if isinstance(node, cst.ClassDef))

    def functions(self) -> Iterator[cst.FunctionDef]:
        """Module-level functions."""
        return (node for node in self.module.body if isinstance(node, cst.FunctionDef))

    def methods(self, owner: cst.ClassDef) -> Iterator[cst.FunctionDef]:
        """The methods of a class."""
        return (node for node in owner.body.body if isinstance(node, cst.FunctionDef))

    def with_bases(self, owner: cst.ClassDef) -> tuple[cst.ClassDef, ...]:
        """`owner` and the classes of this file that it derives from, nearest first."""
        by_name = {node.name.value: node for node in self.classes()}
        found = [owner]
        for node in found:  # grows as it is walked
            for base in node.bases:
                name = base.value
                above = by_name.get(name.value) if isinstance(name, cst.Name) else None
                if above is not None and above not in found:
                    found.append(above)
        return tuple(found)

    def inherited(self, owner: cst.ClassDef) -> Iterator[cst.FunctionDef]:
        """The methods of a class, those of its bases in this file among them."""
        seen: set[str] = set()
        for node in self.with_bases(owner):
            methods = list(self.methods(node))
            yield from (method for method in methods if method.name.value not in seen)
            seen |= {method.name.value for method in methods}

    def one_class(self, name: str) -> cst.ClassDef:
        """The class `name`; Refused unless there is exactly one."""
        found = [node for node in self.classes() if node.name.value == name]
        return self.exactly_one(found, f"class {name}", self.classes(), name)

    def one_function(self, name: str) -> cst.FunctionDef:
        """The module-level function `name`; Refused unless there is exactly one."""
        found = [node for node in self.functions() if node.name.value == name]
        return self.exactly_one(found, f"def {name}", self.functions(), name)

    def one_method(self, owner: cst.ClassDef, name: str) -> cst.FunctionDef:
        """The method `name` of `owner`, its own or of a base in this file; Refused unless
        there is exactly one."""
        methods = list(self.inherited(owner))
        found = [node for node in methods if node.name.value == name]
        what = f"method {owner.name.value}.{name}"
        return self.exactly_one(found, what, methods, name, self.first(owner))

    def exactly_one(
        self,
        found: Sequence[_Node],
        what: str,
        near: Iterable[cst.ClassDef | cst.FunctionDef] = (),
        name: str = "",
        line: int = 0,
    ) -> _Node:
        """The one node of `found`, or Refused saying what was looked for and what there is.

        Args:
            near: among which the nearest to `name` is told, with its line.
            line: to look at where there is none near.
        """
        if len(found) == 1:
            return found[0]
        if found:
            places = ", ".join(str(self.first(node)) for node in found)
            raise Refused(
                "anchor-ambiguous",
                f"looked for exactly one {what}, found {len(found)} (lines {places})",
                self.first(found[0]),
            )
        by_name = {node.name.value: node for node in near}
        nearest = ""
        for close in difflib.get_close_matches(name, by_name, n=1) if name else []:
            nearest, line = f"; nearest is {close}", self.first(by_name[close])
        message = f"looked for {what}, found none{nearest}"
        raise Refused("anchor-missing", message, line, sought=name)

    @cached_property
    def module_names(self) -> frozenset[str]:
        """Names that are bound at the top of the module by an unconditional statement."""
        names: set[str] = set()
        for statement in self.module.body:
            if isinstance(statement, (cst.ClassDef, cst.FunctionDef)):
                names.add(statement.name.value)
            elif isinstance(statement, cst.SimpleStatementLine):
                for small in statement.body:
                    names.update(_bound_by(small))
        return frozenset(names)

    def imported(self, name: str) -> bool:
        """Whether a statement at the top, or in a top-level `if` or `try`, imports `name`."""
        return name in self._imported_names

    @cached_property
    def _imported_names(self) -> frozenset[str]:
        names: set[str] = set()
        pending: list[cst.CSTNode] = list(self.module.body)
        while pending:
            node = pending.pop()
            if isinstance(node, cst.SimpleStatementLine):
                for small in node.body:
                    if isinstance(small, (cst.Import, cst.ImportFrom)):
                        names.update(_bound_by(small))
            elif isinstance(node, (cst.If, cst.Else, cst.Try)):
                pending += node.body.body
                if isinstance(node, cst.If) and node.orelse is not None:
                    pending.append(node.orelse)
        return frozenset(names)


def _why_not_python(data: bytes, path: str, error: Exception) -> Problem:
    """The problem of a file that libcst cannot parse. Python's own parser names the place
    better, where it refuses the file too."""
    line, column, message = 0, 0, str(error).splitlines()[0]
    if isinstance(error, cst.ParserSyntaxError):
        line, column = error.raw_line, error.raw_column
        message = error.message.splitlines()[0][:200]
    try:
        ast.parse(data)
    except SyntaxError as better:
        line, column = better.lineno or 0, better.offset or 0
        message = better.msg
    except ValueError as better:
        line, column, message = 0, 0, str(better)
    return Problem(
        path,
        line,
        column,
        "does-not-parse",
        f"not valid Python: {message}",
        "save the file as UTF-8, or add a coding line"
        if isinstance(error, UnicodeDecodeError)
        else "nothing was changed; mend the file first",
    )


def _on_one_line(text: str) -> str:
    """An expression or a statement that is broken over lines, joined without its comments."""
    text = textwrap.dedent(text.replace("\r\n", "\n"))
    try:
        return ast.unparse(ast.parse(f"({text}\n)", mode="eval"))
    except SyntaxError:  # a statement
        return "; ".join(ast.unparse(ast.parse(text)).split("\n"))


def _bound_by(statement: cst.BaseSmallStatement) -> Iterator[str]:
    if isinstance(statement, (cst.Import, cst.ImportFrom)):
        if isinstance(statement.names, cst.ImportStar):
            return
        for alias in statement.names:
            bound: cst.BaseExpression = alias.asname.name if alias.asname else alias.name
            while isinstance(bound, cst.Attribute):
                bound = bound.value
            if isinstance(bound, cst.Name):
                yield bound.value
    elif isinstance(statement, cst.Assign):
        for target in statement.targets:
            if isinstance(target.target, cst.Name):
                yield target.target.value
