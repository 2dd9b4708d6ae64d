"""The host arrays of a file: from what are the KV lengths made that reach a planner?

SGLang hands them on by name (`kv_len_arr_cpu=...`, or under that key of a dict). Each such
binding is followed back, through local names and through what was written into a buffer, to
the expressions that read `seq_lens_cpu`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field

from .plans import HandPlan
from .roles import is_host, role_of_name
from .source import Function, Source, dotted, words

HOST_LENGTHS = ("seq_lens_cpu", "decode_seq_lens_cpu")
_ADDS = ("add", "add_")
#: More expressions than any real array is made of; keeps a hostile file from going on.
_LIMIT = 200


@dataclass
class _Trail:
    """What is met on the way back from a binding."""

    reads: list[ast.expr] = field(default_factory=list)
    adds: set[str] = field(default_factory=set)
    guards: list[ast.expr] = field(default_factory=list)
    cast: bool = False
    seen: set[ast.AST] = field(default_factory=set)


@dataclass(frozen=True)
class HostLengths:
    """Host KV lengths handed on at one place.

    Attributes:
        node: the expression that reads `seq_lens_cpu`, where to report.
        binding: the place that hands the array on.
        function: around the binding.
        modes: what the branch serves (`decode`, `verify`, `draft-extend`).
        adds: names added to the lengths, such as `draft_token_num`; `+` for a bare number.
        cast: the lengths are made int32 on the way.
        guards: tests that decide whether the array is handed on.
    """

    node: ast.AST
    binding: ast.AST
    function: Function
    modes: frozenset[str]
    adds: frozenset[str]
    cast: bool
    guards: tuple[ast.expr, ...]


def find_lengths(source: Source, plans: tuple[HandPlan, ...]) -> tuple[HostLengths, ...]:
    """All bindings of host KV lengths that come from `seq_lens_cpu`, in the order of the
    file, without those of which mlagen wrote any line."""
    found = []
    for value, binding in _bindings(source, plans):
        function = source.function(binding)
        if function is None or source.ours(binding):
            continue
        trail = _Trail()
        _follow(source, value, function, value, trail)
        if not trail.reads or any(source.ours(node) for node in trail.seen):
            continue
        modes = source.modes(binding) | source.modes(trail.reads[0])
        guards = [*trail.guards, *source.tests(binding), *source.tests(trail.reads[0])]
        found.append(
            HostLengths(
                node=trail.reads[0],
                binding=binding,
                function=function,
                modes=modes,
                adds=frozenset(trail.adds),
                cast=trail.cast,
                guards=tuple(guards),
            )
        )
    return tuple(sorted(found, key=lambda lengths: source.line(lengths.node)))


def _is_key(name: str | None) -> bool:
    return name is not None and is_host(name) and role_of_name(name) == "kv_len"


def _bindings(source: Source, plans: tuple[HandPlan, ...]) -> list[tuple[ast.expr, ast.AST]]:
    found: list[tuple[ast.expr, ast.AST]] = []
    for call in source.calls:
        found.extend((part.value, call) for part in call.keywords if _is_key(part.arg))
        for argument in call.args:
            found.extend(_of_dict(argument))
        # `plan` takes qo_indptr, kv_indptr, kv_indices, kv_len_arr in every release.
        if isinstance(call.func, ast.Attribute) and call.func.attr == "plan":
            found.extend((argument, call) for argument in call.args[3:4])
    for plan in plans:
        if isinstance(plan.function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            names = [part.arg for part in plan.function.args.args]
            for call in plan.direct:
                for name, argument in zip(names, call.args, strict=False):
                    if role_of_name(name) == "kv_len":
                        found.append((argument, call))
    for node in source.assignments:
        found.extend(_of_dict(node.value))
        for target in node.targets:
            if (
                isinstance(target, ast.Subscript)
                and isinstance(target.slice, ast.Constant)
                and isinstance(target.slice.value, str)
                and _is_key(target.slice.value)
            ):
                found.append((node.value, node))
    for function in source.functions:
        if not isinstance(function, ast.Lambda):
            for part in function.body:
                if isinstance(part, ast.Return) and part.value is not None:
                    found.extend(_of_dict(part.value))
    return found


def _of_dict(node: ast.expr) -> list[tuple[ast.expr, ast.AST]]:
    if not isinstance(node, ast.Dict):
        return []
    return [
        (value, node)
        for key, value in zip(node.keys, node.values, strict=True)
        if isinstance(key, ast.Constant) and isinstance(key.value, str) and _is_key(key.value)
    ]


def _follow(
    source: Source, node: ast.expr, function: Function, use: ast.AST, trail: _Trail
) -> None:
    """Goes back from `node`; `use` is where its value is needed."""
    if node in trail.seen or len(trail.seen) > _LIMIT:
        return
    trail.seen.add(node)
    if isinstance(node, ast.IfExp):
        trail.guards.extend([node.test, *_defined_tests(source, node.test, function)])
        _follow(source, node.body, function, use, trail)
        _follow(source, node.orelse, function, use, trail)
        return
    for part in _values(node):
        if isinstance(part, ast.BinOp) and isinstance(part.op, ast.Add):
            trail.adds |= _summands(part)
        elif isinstance(part, ast.Call):
            trail.cast |= _casts(part)
            method = part.func.attr if isinstance(part.func, ast.Attribute) else ""
            if method in _ADDS:
                trail.adds |= set().union(*(words(argument) for argument in part.args), {"+"})
    for part in _values(node):
        if not isinstance(part, (ast.Name, ast.Attribute)):
            continue
        last = part.id if isinstance(part, ast.Name) else part.attr
        if last in HOST_LENGTHS:
            trail.reads.append(node)
        name = dotted(part)
        if name is None:
            continue
        for definition in source.definitions(name, function, use):
            if isinstance(definition.value, ast.Constant):
                continue  # the `= None` before the branch that fills it
            trail.cast |= definition.store
            if isinstance(definition.node, ast.AugAssign):
                if isinstance(definition.node.op, ast.Add):
                    trail.adds |= words(definition.value) or {"+"}
                continue
            _follow(source, definition.value, function, definition.node, trail)


def _values(node: ast.AST) -> Iterator[ast.AST]:
    """`node` and what its value is made of: what a subscript selects by is left out, since
    the sum in `x[: bs + 1]` adds nothing to a length."""
    stack = [node]
    while stack:
        part = stack.pop()
        yield part
        if isinstance(part, ast.Subscript):
            stack.append(part.value)
        else:
            stack.extend(ast.iter_child_nodes(part))


def _summands(node: ast.BinOp) -> set[str]:
    """The names of a sum; a mere number adds `+`."""
    found: set[str] = set()
    for side in (node.left, node.right):
        if isinstance(side, ast.Constant):
            found.add("+")
        found |= {
            part.id if isinstance(part, ast.Name) else part.attr
            for part in _values(side)
            if isinstance(part, (ast.Name, ast.Attribute))
        }
    return found - set(HOST_LENGTHS) - {"self", "forward_batch"}


def _casts(call: ast.Call) -> bool:
    if not isinstance(call.func, ast.Attribute):
        return False
    if call.func.attr == "int":
        return True
    named = [*call.args, *(part.value for part in call.keywords if part.arg == "dtype")]
    return call.func.attr in ("to", "type", "cumsum", "empty", "zeros", "tensor", "as_tensor") and (
        any(words(argument) & {"int32"} for argument in named)
    )


def _defined_tests(source: Source, test: ast.expr, function: Function) -> list[ast.expr]:
    """What the names of a test were assigned from."""
    return [
        definition.value
        for part in ast.walk(test)
        if isinstance(part, ast.Name)
        for definition in source.definitions(part.id, function, test)
    ]
