"""Is a patched file wired up? Read from its syntax tree alone, without mlagen's own eyes.

What must hold wherever the edits went: a request is made in front of the update that it is
handed to, passes through both methods of the updater by keyword, and is planned, with a return,
in front of the stock plan in the same block.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator, Sequence

BACKEND = "FlashInferMLAAttnBackend"
DECODE = "FlashInferMLAIndicesUpdaterDecode"
PREFILL = "FlashInferMLAIndicesUpdaterPrefill"
REQUEST = "mlagen_request"


def wiring(data: bytes) -> dict[str, int]:
    """How often each emitted function is called from SGLang's classes, after the checks of this
    module's docstring. AssertionError where one fails."""
    tree = ast.parse(data)
    compile(data, "patched.py", "exec")  # also finds an argument that is given twice
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    for name in (DECODE, PREFILL):
        if any(_takes_request(method) for method in _methods(classes[name])):
            _check_updater(classes[name])
    counts: Counter[str] = Counter()
    for name, owner in classes.items():
        if name.startswith("Mlagen"):
            continue
        counts.update(_check_updates(owner))
    return dict(sorted(counts.items()))


def _methods(owner: ast.ClassDef) -> list[ast.FunctionDef]:
    return [node for node in owner.body if isinstance(node, ast.FunctionDef)]


def _takes_request(function: ast.FunctionDef) -> bool:
    arguments = function.args
    return any(arg.arg == REQUEST for arg in (*arguments.args, *arguments.kwonlyargs))


def _check_updater(owner: ast.ClassDef) -> None:
    methods = {method.name: method for method in _methods(owner)}
    update, begin = methods["update"], methods["call_begin_forward"]
    for method in (update, begin):
        _check_parameter(method)
    (call,) = [node for node in ast.walk(update) if _calls(node, "call_begin_forward")]
    assert _keywords(call).get(REQUEST) == REQUEST, f"{owner.name}.update does not hand it on"
    wrapper = "wrapper" if owner.name == DECODE else "wrapper_paged"
    planned = 0
    for block in _blocks(begin):
        for index, statement in enumerate(block):
            if not _plans_request(statement):
                continue
            planned += 1
            stock = [
                later
                for later in block[index + 1 :]
                if any(_is_plan(node, wrapper) for node in ast.walk(later))
            ]
            assert stock, f"{owner.name}: no {wrapper}.plan behind the request's"
            assert stock[-1] is block[-1], f"{owner.name}: something follows the plan"
    assert planned == 1, f"{owner.name}: {planned} places plan a request"


def _check_parameter(method: ast.FunctionDef) -> None:
    """An optional parameter that no positional argument of an existing call can reach."""
    arguments = method.args
    if REQUEST in [arg.arg for arg in arguments.kwonlyargs]:
        at = [arg.arg for arg in arguments.kwonlyargs].index(REQUEST)
        default = arguments.kw_defaults[at]
    else:
        last = arguments.args[-1].arg if arguments.args else "none"
        assert last == REQUEST, f"{method.name}: the last parameter by keyword is {last}"
        assert arguments.vararg is None, f"{method.name}: positions go on behind it"
        default = arguments.defaults[-1]
    assert isinstance(default, ast.Constant)
    assert default.value is None


def _check_updates(owner: ast.ClassDef) -> Iterator[str]:
    for block in _blocks(owner):
        known = False
        for statement in block:
            yield from _emitted_calls(statement)
            if isinstance(statement, ast.Assign) and any(
                isinstance(target, ast.Name) and target.id == REQUEST
                for target in statement.targets
            ):
                known = True
            call = statement.value if isinstance(statement, ast.Expr) else None
            if call is not None and _calls(call, "update") and REQUEST in _keywords(call):
                line = statement.lineno
                assert known, f"line {line}: a request is handed on that nobody made"
                assert _keywords(call)[REQUEST] == REQUEST
                known = False


def _emitted_calls(statement: ast.stmt) -> Iterator[str]:
    """Emitted functions that a simple statement, or an `if` around one, calls."""
    if isinstance(statement, (ast.Expr, ast.Assign)):
        for node in ast.walk(statement):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                name = node.func.id
                if name.startswith("mlagen_"):
                    yield name


def _plans_request(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.If)
        and ast.unparse(statement.test) == f"{REQUEST} is not None"
        and isinstance(statement.body[-1], ast.Return)
        and any(
            isinstance(node, ast.Call) and ast.unparse(node.func) == f"{REQUEST}.plan"
            for node in ast.walk(statement)
        )
    )


def _blocks(node: ast.AST) -> Iterator[Sequence[ast.stmt]]:
    for child in ast.walk(node):
        for name in ("body", "orelse", "finalbody"):
            block = getattr(child, name, None)
            if isinstance(block, list) and block and isinstance(block[0], ast.stmt):
                yield block


def _calls(node: ast.AST, method: str) -> bool:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == method
    )


def _is_plan(node: ast.AST, receiver: str) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) == f"{receiver}.plan"


def _keywords(node: ast.AST) -> dict[str, str]:
    assert isinstance(node, ast.Call)
    return {k.arg: ast.unparse(k.value) for k in node.keywords if k.arg is not None}
