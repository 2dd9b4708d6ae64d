"""What one FlashInfer's own plan checks before it plans: its `raise` and `assert`, by function.

Followed are the methods of the wrapper and of the object that plans, and the functions beside them
that they call. What an array's holder checks when it is asked (0.7's metadata) is not, nor is an
`assert ... is not None`, which is for type checkers. An emitted plan makes none of these checks:
mlagen has its own, so that what is new here is to be read.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from .api import Place
from .find import FlashInferSource
from .planner import find_planner, find_wrapper
from .state import function_called
from .syntax import MethodOf, Modules, text

#: Longer conditions are cut: the place tells the rest.
_WIDTH = 120


@dataclass(frozen=True)
class Check:
    """One thing that a plan refuses.

    Attributes:
        function: the method or function that checks.
        condition: what is refused, source text; empty where it is no simple `if`.
        error: the class that is raised.
        place: where.
    """

    function: str
    condition: str
    error: str
    place: Place

    def __str__(self) -> str:
        return f"{self.function}: {self.error} if {self.condition or '...'}"


def plan_checks(source: FlashInferSource) -> tuple[Check, ...]:
    """The checks on the way of a plan through FA2, in the order in which they are met.

    Raises DriftError where there is no such way.
    """
    modules = Modules(source)
    wrapper = find_wrapper(modules)
    planner = find_planner(modules, wrapper)
    views = {id(wrapper): (wrapper, "plan"), id(planner.view): (planner.view, planner.plan)}
    found: dict[Check, None] = {}
    seen: set[ast.AST] = set()
    for view, entry in views.values():
        for step in view.walk(entry):
            for function in _with_called(modules, step.method, step.node, seen):
                found |= dict.fromkeys(_checks_of(function))
    return tuple(found)


def _with_called(
    modules: Modules, method: MethodOf, node: ast.AST, seen: set[ast.AST]
) -> Iterator[MethodOf]:
    """The method itself, when it is first met, and the function that a call in it calls."""
    if method.node not in seen:
        seen.add(method.node)
        yield method
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        called = function_called(modules, method.module, node.func.id)
        if called is not None and called.node not in seen:
            for inner in ast.walk(called.node):
                yield from _with_called(modules, called, inner, seen)


def _checks_of(function: MethodOf) -> Iterator[Check]:
    yield from _checks_in(function, function.node.body, "")


def _checks_in(function: MethodOf, body: list[ast.stmt], condition: str) -> Iterator[Check]:
    for node in body:
        if isinstance(node, ast.Raise):
            error = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
            if error is not None:
                yield _check(function, node, condition, text(error))
        elif isinstance(node, ast.Assert) and not text(node.test).endswith("is not None"):
            yield _check(function, node, f"not ({text(node.test)})", "AssertionError")
        elif isinstance(node, ast.If):
            test = text(node.test)
            if isinstance(node.test, ast.BoolOp) and isinstance(node.test.op, ast.Or) and condition:
                test = f"({test})"
            within = f"{condition} and {test}" if condition else test
            yield from _checks_in(function, node.body, within)
            yield from _checks_in(function, node.orelse, condition)
        elif isinstance(node, ast.For | ast.While | ast.With | ast.Try):
            yield from _checks_in(function, node.body, condition)


def _check(function: MethodOf, node: ast.stmt, condition: str, error: str) -> Check:
    if len(condition) > _WIDTH:
        condition = condition[: _WIDTH - 3].rstrip() + "..."
    place = Place(function.module.path, node.lineno)
    return Check(function.node.name, condition, error, place)
