"""Which functions of a file a call runs, and which parameter each of its arguments is given to."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from .bindings import Bindings
from .source import Function, Source, dotted

_LITERALS = (ast.Dict, ast.List, ast.Set, ast.Tuple, ast.Constant)


class Calls:
    """The calls of one file that stay in it.

    A method is looked for in the class that its object is made of where the file tells that;
    else it is every method of that name that can take the call.
    """

    def __init__(self, source: Source, bindings: Bindings) -> None:
        self._source = source
        self._bindings = bindings
        self._classes = {
            node.name: node for node in source.tree.body if isinstance(node, ast.ClassDef)
        }

    def given(self, call: ast.Call) -> list[tuple[ast.expr, ast.arg]]:
        """(argument, the parameter that gets it) of a call, for each function that it may run.
        What goes into `*args` or `**kwargs`, of either, is left out."""
        if dotted(call.func) in ("partial", "functools.partial") and call.args:
            of_function = self._functions(call.args[0])
            rest = call.args[1:]
            return [
                pair
                for function, first in of_function
                for pair in _pairs(function, rest, call.keywords, first)
            ]
        return [
            pair
            for function, first in self._functions(call.func)
            if _takes(function, call, first)
            for pair in _pairs(function, call.args, call.keywords, first)
        ]

    def _functions(self, node: ast.expr) -> list[tuple[Function, int]]:
        """The functions of this file that an expression may be, each with how many of its
        parameters are given already (self)."""
        if isinstance(node, ast.Lambda):
            return [(node, 0)]
        if isinstance(node, ast.Attribute):
            return self._attribute(node)
        if not isinstance(node, ast.Name):
            return []
        found: list[tuple[Function, int]] = []
        for bound in self._bindings.seen_by(node):
            if isinstance(bound.node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                found.append((bound.node, 0))
            elif isinstance(bound.node, ast.ClassDef):
                found += self._method(bound.node, "__init__")
            elif isinstance(bound.value, ast.Lambda):
                found.append((bound.value, 0))
            elif isinstance(bound.value, ast.Attribute):
                found += self._attribute(bound.value)
        return found

    def _attribute(self, node: ast.Attribute) -> list[tuple[Function, int]]:
        owner = node.value
        if isinstance(owner, ast.Name) and owner.id in ("self", "cls"):
            around = self._source.class_of(node)
            return self._method(around, node.attr) if around is not None else []
        if isinstance(owner, ast.Name) and owner.id in self._classes:
            found = self._method(self._classes[owner.id], node.attr)
            return [(f, int(_is_decorated(f, "classmethod"))) for f, _ in found]
        classes = self._made_of(owner)
        if classes is None:
            classes = list(self._classes.values())
        return [method for around in classes for method in self._method(around, node.attr)]

    def _made_of(self, node: ast.expr) -> list[ast.ClassDef] | None:
        """The classes of this file that an object may be of, by what it is assigned from in its
        class or function; None where that is not told."""
        name = dotted(node)
        if name is None:
            return None
        made = self._source.class_definitions(name, self._source.class_of(node))
        made = made or self._source.definitions(name, self._source.function(node), node)
        values = [definition.value for definition in made if not definition.store]
        if not values or not all(isinstance(value, (ast.Call, *_LITERALS)) for value in values):
            return None
        names = [dotted(value.func) for value in values if isinstance(value, ast.Call)]
        return [self._classes[name] for name in names if name in self._classes]

    def _method(self, owner: ast.ClassDef, name: str) -> list[tuple[Function, int]]:
        """The method of a class, or of the nearest of its bases in this file."""
        seen = [owner]
        for node in seen:  # grows as it is walked
            for part in node.body:
                if isinstance(part, (ast.FunctionDef, ast.AsyncFunctionDef)) and part.name == name:
                    return [(part, 0 if _is_decorated(part, "staticmethod") else 1)]
            bases = [self._classes.get(dotted(base) or "") for base in node.bases]
            seen += [base for base in bases if base is not None and base not in seen]
        return []


def parameters(function: Function) -> list[ast.arg]:
    """The parameters that have a name of their own."""
    args = function.args
    return [*args.posonlyargs, *args.args, *args.kwonlyargs]


def defaults(function: Function) -> Iterator[tuple[ast.arg, ast.expr]]:
    """(parameter, its default)."""
    args = function.args
    named = [*args.posonlyargs, *args.args]
    # Not strict: the first ones have none.
    yield from zip(reversed(named), reversed(args.defaults), strict=False)
    for parameter, default in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        if default is not None:
            yield parameter, default


def _pairs(
    function: Function, positional: list[ast.expr], keywords: list[ast.keyword], first: int
) -> Iterator[tuple[ast.expr, ast.arg]]:
    args = function.args
    for argument, parameter in zip(
        positional, [*args.posonlyargs, *args.args][first:], strict=False
    ):
        if isinstance(argument, ast.Starred):
            break  # what comes behind it may be anywhere
        yield argument, parameter
    by_name = {parameter.arg: parameter for parameter in [*args.args, *args.kwonlyargs]}
    for keyword in keywords:
        if keyword.arg in by_name:
            yield keyword.value, by_name[keyword.arg]


def _takes(function: Function, call: ast.Call, first: int) -> bool:
    """Whether a function can be called so."""
    args = function.args
    unknown = any(isinstance(argument, ast.Starred) for argument in call.args) or any(
        keyword.arg is None for keyword in call.keywords
    )
    names = {parameter.arg for parameter in [*args.args, *args.kwonlyargs]}
    if args.kwarg is None and any(k.arg and k.arg not in names for k in call.keywords):
        return False
    room = len([*args.posonlyargs, *args.args][first:])
    if args.vararg is None and len(call.args) > room and not unknown:
        return False
    got = {parameter for _, parameter in _pairs(function, call.args, call.keywords, first)}
    got |= {parameter for parameter, _ in defaults(function)}
    got |= set(parameters(function)[:first])
    return unknown or got >= set(parameters(function))


def _is_decorated(function: Function, name: str) -> bool:
    return not isinstance(function, ast.Lambda) and any(
        dotted(decorator) == name for decorator in function.decorator_list
    )
