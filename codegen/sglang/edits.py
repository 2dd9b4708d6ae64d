"""Edits as data: which lines of the file give way to which emitted lines."""

from __future__ import annotations

from dataclasses import dataclass

import libcst as cst

from ..provenance import as_text
from .source import Refused, Source


@dataclass(frozen=True)
class Edit:
    """One region to be. `line` is where it goes (before that line, from 1), `replaces` how
    many lines from there on it replaces, `lines` the emitted lines with the indentation that
    is theirs below `indent`."""

    site: str
    line: int
    indent: str
    lines: tuple[str, ...]
    replaces: int = 0


def before(source: Source, site: str, node: cst.CSTNode, lines: tuple[str, ...]) -> Edit:
    """Lines before a statement, below the comments that belong to it."""
    line = source.first(node)
    return Edit(site, line, source.indent(line), lines)


def after(source: Source, site: str, node: cst.CSTNode, lines: tuple[str, ...]) -> Edit:
    """Lines behind a statement, at its indentation."""
    return Edit(site, source.last(node) + 1, source.indent(source.first(node)), lines)


def instead(
    source: Source, site: str, first: cst.CSTNode, last: cst.CSTNode, lines: tuple[str, ...]
) -> Edit:
    """Lines instead of the statements from `first` to `last`, and of the comments above."""
    start = source.first_with_comments(first)
    indent = source.indent(source.first(first))
    return Edit(site, start, indent, lines, source.last(last) - start + 1)


def add_arguments(source: Source, site: str, call: cst.Call, **values: str) -> Edit:
    """Add `keyword=value` arguments to a call, in the order given: each on a line of its own
    where the call has one an argument."""
    arguments = [f"{keyword}={value}" for keyword, value in values.items()]
    own_lines = tuple(f"{argument}," for argument in arguments)
    spread = [arg for arg in call.args if arg.star == "**"]
    end = source.range(call).end
    if spread:
        line = source.first(spread[0])
        if source.text(line).strip().startswith("**"):
            return Edit(site, line, source.indent(line), own_lines)
    elif call.args and isinstance(call.args[-1].comma, cst.Comma):
        last = source.last(call.args[-1])
        if source.text(end.line).lstrip().startswith(")") and end.line > last:
            first = source.first(call.args[-1])
            return Edit(site, end.line, source.indent(first), own_lines)
    separator = "" if not call.args or isinstance(call.args[-1].comma, cst.Comma) else ", "
    text = separator + ", ".join(arguments)
    return _within_line(source, site, call, end.line, end.column - 1, text)


def add_parameter(
    source: Source, site: str, function: cst.FunctionDef, name: str, annotation: str
) -> Edit:
    """Add `name: annotation = None` as the last parameter that can be given by keyword."""
    text = f"{name}: {annotation} = None"
    spread = function.params.star_kwarg
    if spread is not None:
        start = source.range(spread).start
        if source.text(start.line).strip().startswith("**"):
            return Edit(site, start.line, source.indent(start.line), (f"{text},",))
        return _within_line(source, site, function, start.line, start.column, f"{text}, ")
    params = function.params
    named = list(params.params)  # what takes positions alone takes no keyword behind it
    named += [params.star_arg] if isinstance(params.star_arg, cst.Param) else []
    named += params.kwonly_params
    if not named:
        raise Refused(
            "anchor-changed",
            f"{function.name.value} has no parameter to add {name} behind",
            source.first(function),
        )
    last = named[-1]
    end = source.range(last.default or last.annotation or last).end
    following = source.text(end.line + 1).lstrip() if end.line < len(source.lines) else ""
    if following.startswith(")") and isinstance(last.comma, cst.Comma):
        indent = source.indent(source.first(last))
        return Edit(site, end.line + 1, indent, (f"{text},",))
    return _within_line(source, site, function, end.line, end.column, f", {text}")


def _within_line(
    source: Source, site: str, node: cst.CSTNode, line: int, column: int, text: str
) -> Edit:
    """Insert `text` inside a line; the whole line gives way to the longer one.

    Columns of libcst count characters; a byte-order mark is not one of them.
    """
    encoding = source.module.encoding.removesuffix("-sig")
    old = source.lines[line - 1].rstrip(b"\r\n").decode(encoding)
    new = old[:column] + text + old[column:]
    indent = source.indent(line)
    if source.first(node) < line or not indent.strip():
        return Edit(site, line, indent, (as_text(new[len(indent) :].encode(encoding)),), 1)
    raise Refused("anchor-changed", f"cannot add {text!r} to this line", line)
