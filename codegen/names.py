"""Which names a module's functions use without binding them. Python's `ast`, for its speed."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator

_BUILTINS = frozenset(dir(builtins)) | {"__class__", "__file__", "__name__"}


def unbound_names(tree: ast.Module) -> dict[tuple[str, str], int]:
    """(function, name) -> the first line that uses the name, for each name that is bound
    neither in the function nor at the top of the module nor by Python.

    `function` is a module-level function or a method with its class; functions inside one
    count as part of it. Annotations that `from __future__ import annotations` leaves
    unevaluated are not looked at.
    """
    module = _BUILTINS | {name for node in tree.body for name in bound_by(node)}
    found: dict[tuple[str, str], int] = {}
    for owner, function in _functions(tree):
        bound = module | _bound_in(function)
        for node in _evaluated(function):
            if not isinstance(node, ast.Name) or not isinstance(node.ctx, ast.Load):
                continue
            if node.id not in bound:
                found.setdefault((owner, node.id), node.lineno)
    return found


def bound_by(node: ast.stmt) -> Iterator[str]:
    """The names that a module-level statement binds, also inside `if`, `try` and `with`."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        yield node.name
        return
    for inner in ast.walk(node):
        if isinstance(inner, (ast.Import, ast.ImportFrom)):
            for alias in inner.names:
                yield (alias.asname or alias.name).partition(".")[0]
        elif isinstance(inner, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield inner.name
        elif isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
            yield inner.id


def _functions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node.name, node
        elif isinstance(node, ast.ClassDef):
            for inner in node.body:
                if isinstance(inner, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    yield f"{node.name}.{inner.name}", inner


def _bound_in(function: ast.AST) -> set[str]:
    bound: set[str] = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            bound.add(node.id)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            bound.update((alias.asname or alias.name).partition(".")[0] for alias in node.names)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            bound.add(node.name)
        elif isinstance(node, ast.ExceptHandler):
            bound.add(node.name or "")
        elif isinstance(node, (ast.Global, ast.Nonlocal)):
            bound.update(node.names)
    return bound


def _evaluated(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[ast.AST]:
    """The nodes of a function's body, annotations left out."""
    pending: list[ast.AST] = list(function.body)
    while pending:
        node = pending.pop()
        yield node
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns"):
                continue
            if isinstance(value, ast.AST):
                pending.append(value)
            elif isinstance(value, list):
                pending += [item for item in value if isinstance(item, ast.AST)]
