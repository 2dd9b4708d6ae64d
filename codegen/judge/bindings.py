"""Which assignments a use of a name can see: Python's scopes, and the order of statements.

Not a whole data flow: where it is not sure that an assignment is behind a use, or overwritten
before it, it gives that assignment too.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

from .source import Function, Source

Comprehension: TypeAlias = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
Scope: TypeAlias = Function | Comprehension | ast.Module | ast.ClassDef

_LOOPS = (ast.For, ast.AsyncFor, ast.While)
#: Fields of a function that are evaluated where it is defined, not inside.
_OUTSIDE = ("decorator_list", "returns", "bases", "keywords", "type_params")


@dataclass(frozen=True)
class Bound:
    """One binding of a name.

    Attributes:
        node: the statement, parameter or expression that binds it.
        value: what it is bound to; None where that is not one expression of the file (a
            parameter, an import, a loop's variable, a part of something unpacked).
    """

    node: ast.AST
    value: ast.expr | None = None


class Bindings:
    """The scopes of one file. `ast` has no symbol table that knows its nodes."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._bound: dict[tuple[Scope, str], list[Bound]] = {}
        self._elsewhere: dict[tuple[Scope, str], bool] = {}
        nodes = list(ast.walk(source.tree))
        for node in nodes:  # before the rest: they say where an assignment goes
            if isinstance(node, (ast.Global, ast.Nonlocal)):
                for name in node.names:
                    scope = self._scope_of(node)
                    self._elsewhere[scope, name] = isinstance(node, ast.Global)
        for node in nodes:
            for name, bound in _bindings(node):
                self._bound.setdefault((self._home(node, name), name), []).append(bound)

    def seen_by(self, use: ast.Name) -> list[Bound]:
        """The bindings that `use` may read; none where the name is bound nowhere in the file."""
        inner = True
        for scope in self._scopes_around(use):
            if (scope, use.id) in self._elsewhere:
                inner = False
                continue
            if isinstance(scope, ast.ClassDef) and not inner:
                continue  # a class's names are not seen by its methods
            found = self._bound.get((scope, use.id))
            if found:
                # A closure runs at any time after it was made, so all it may see counts.
                return self._reaching(found, use, scope) if inner else found
            inner = inner and isinstance(scope, Comprehension)  # which run on the spot
        return []

    # -- scopes ---------------------------------------------------------------------------

    def _scopes_around(self, node: ast.AST) -> Iterator[Scope]:
        """The scopes in which `node` is evaluated, innermost first."""
        inside = node
        previous = ""
        for parent, field in self._source.ancestors(node):
            if isinstance(parent, Scope) and not self._evaluated_before(
                parent, inside, field, previous
            ):
                yield parent
            inside, previous = parent, field

    @staticmethod
    def _evaluated_before(scope: ast.AST, inside: ast.AST, field: str, below: str) -> bool:
        """Whether a part of a scope's node belongs to the scope around it."""
        if isinstance(scope, Comprehension):
            return inside is scope.generators[0] and below == "iter"
        if field == "args":
            return below in ("defaults", "kw_defaults")
        return field in _OUTSIDE

    def _scope_of(self, node: ast.AST) -> Scope:
        return next(self._scopes_around(node))

    def _home(self, node: ast.AST, name: str) -> Scope:
        """The scope that a binding of `name` at `node` goes to."""
        scopes = list(self._scopes_around(node))
        while isinstance(node, ast.NamedExpr) and isinstance(scopes[0], Comprehension):
            scopes.pop(0)  # := binds around all comprehensions
        is_global = self._elsewhere.get((scopes[0], name))
        if is_global is None:
            return scopes[0]
        if is_global:
            return self._source.tree
        for scope in scopes[1:]:
            if isinstance(scope, Function) and (scope, name) not in self._elsewhere:
                return scope
        return scopes[0]

    # -- order ----------------------------------------------------------------------------

    def _reaching(self, found: list[Bound], use: ast.AST, scope: Scope) -> list[Bound]:
        """Those of one scope's bindings that `use`, in that scope, may read."""
        around = self._chain(use, scope)
        sure = [bound for bound in found if self._surely_before(bound.node, around, scope)]
        last = max(sure, key=lambda bound: _position(bound.node), default=None)
        arms = self._source.arms(use)
        reaching = [last] if last is not None else []
        for bound in found:
            if bound is last or (last is not None and _is_before(bound.node, last.node)):
                continue
            chain = self._chain(bound.node, scope)
            loops = {node for node in chain if isinstance(node, _LOOPS)} & set(around)
            if last is not None:
                loops -= set(self._chain(last.node, scope))
            if loops:
                reaching.append(bound)
            elif _is_before(bound.node, use) and bound.node not in around:
                other = self._source.arms(bound.node).items()
                if all(arms.get(test, arm) == arm for test, arm in other):
                    reaching.append(bound)
        return reaching

    def _chain(self, node: ast.AST, scope: Scope) -> dict[ast.AST, tuple[ast.AST, str]]:
        """`node` and what is around it up to `scope`, each with its parent and field."""
        chain: dict[ast.AST, tuple[ast.AST, str]] = {}
        for parent, field in self._source.ancestors(node):
            chain[node] = (parent, field)
            node = parent
            if node is scope:
                break
        return chain

    def _surely_before(
        self, node: ast.AST, around: dict[ast.AST, tuple[ast.AST, str]], scope: Scope
    ) -> bool:
        """Whether `node` always binds before the use that `around` is the chain of."""
        if isinstance(node, ast.arg):
            return True
        if isinstance(node, (ast.For, ast.AsyncFor, ast.With, ast.AsyncWith, ast.ExceptHandler)):
            if node in around:
                return any(place == (node, "body") for place in around.values())
            if not isinstance(node, (ast.With, ast.AsyncWith)):
                return False
        if not isinstance(node, ast.stmt) or isinstance(node, ast.Match):
            return isinstance(node, ast.comprehension) and isinstance(scope, Comprehension)
        parent, field = next(self._source.ancestors(node))
        block = getattr(parent, field)
        return node not in around and any(
            place == (parent, field) and _is_before(node, later) and later in block
            for later, place in around.items()
        )


def _bindings(node: ast.AST) -> Iterator[tuple[str, Bound]]:
    """What a node binds itself. `x += y` binds nothing new: what was in `x` is in it still."""
    if isinstance(node, ast.Assign):
        for target in node.targets:
            yield from _unpacked(target, node.value, node)
    elif isinstance(node, (ast.AnnAssign, ast.NamedExpr)):
        if node.value is not None:
            yield from _unpacked(node.target, node.value, node)
    elif isinstance(node, (ast.For, ast.AsyncFor, ast.comprehension)):
        yield from _unpacked(node.target, None, node)
    elif isinstance(node, (ast.With, ast.AsyncWith)):
        for item in node.items:
            if item.optional_vars is not None:
                yield from _unpacked(item.optional_vars, None, node)
    elif isinstance(node, ast.arg):
        yield node.arg, Bound(node)
    elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        yield node.name, Bound(node)
    elif isinstance(node, (ast.Import, ast.ImportFrom)):
        for alias in node.names:
            yield (alias.asname or alias.name).partition(".")[0], Bound(node)
    elif isinstance(node, (ast.ExceptHandler, ast.MatchAs, ast.MatchStar)) and node.name:
        yield node.name, Bound(node)
    elif isinstance(node, ast.MatchMapping) and node.rest:
        yield node.rest, Bound(node)


def _unpacked(
    target: ast.expr, value: ast.expr | None, node: ast.AST
) -> Iterator[tuple[str, Bound]]:
    if isinstance(target, ast.Name):
        yield target.id, Bound(node, value)
    elif isinstance(target, ast.Starred):
        yield from _unpacked(target.value, None, node)
    elif isinstance(target, (ast.Tuple, ast.List)):
        for part, part_value in zip(target.elts, parts(value, target), strict=True):
            yield from _unpacked(part, part_value, node)


def parts(value: ast.expr | None, target: ast.Tuple | ast.List) -> list[ast.expr | None]:
    """What each element of an unpacking target gets; None where that is no one expression."""
    if isinstance(value, (ast.Tuple, ast.List)) and len(value.elts) == len(target.elts):
        starred = (*value.elts, *target.elts)
        if not any(isinstance(part, ast.Starred) for part in starred):
            return list(value.elts)
    return [None] * len(target.elts)


def _position(node: ast.AST) -> tuple[int, int]:
    if isinstance(node, ast.arg):
        return (0, 0)  # before all that the function does
    if isinstance(node, ast.comprehension):
        node = node.target
    return (int(getattr(node, "lineno", 0)), int(getattr(node, "col_offset", 0)))


def _is_before(node: ast.AST, other: ast.AST) -> bool:
    return _position(node) < _position(other)
