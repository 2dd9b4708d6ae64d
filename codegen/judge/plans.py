"""The hand-written plans of a file: functions that call FlashInfer's private planner.

SGLang has `fast_mla_decode_plan` in every release and `fast_mla_prefill_plan` from 0.5.18 on;
forks add more, as functions, methods or lambdas. What counts is the call
(`<x>._cached_module.plan(...)`, with `.default`, or through aliases), not the name around it.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass

from .source import Function, Source, dotted, is_true, keyword

_MODULE_ATTRIBUTES = ("_cached_module", "cached_module")
_METHODS = ("plan", "plan_with_staged_workspace_bytes")


@dataclass(frozen=True)
class Install:
    """A place that puts a plan on a wrapper (`wrapper.plan = partial(f, wrapper)`).

    `graph`: whether the wrapper was made with `use_cuda_graph=True`; None where the file
    does not show how it was made.
    """

    node: ast.AST
    graph: bool | None
    ours: bool


@dataclass(frozen=True)
class HandPlan:
    """One call of the private planner and the function around it.

    Attributes:
        name: of the function, `lambda` for a lambda.
        function: the function; None at the top level of the module.
        call: the private call.
        method: `plan`, `plan.default` or `plan_with_staged_workspace_bytes`.
        owner: the chain before `_cached_module`, such as ("self",) or
            ("self", "_planned_backend").
        raw: the call goes to `_module` below FlashInfer's proxy.
        arguments: positional arguments, `*` of a literal expanded; None where a `*` or `**`
            hides them.
        keywords: names of the keyword arguments.
        kept: what the call returns is used.
        installs: where the function is put on a wrapper.
        direct: calls of the function by its name, outside itself.
        direct_eager: one of them plans a wrapper that no graph captures.
    """

    name: str
    function: Function | None
    call: ast.Call
    method: str
    owner: tuple[str, ...]
    raw: bool
    arguments: tuple[ast.expr, ...] | None
    keywords: tuple[str, ...]
    kept: bool
    installs: tuple[Install, ...]
    direct: tuple[ast.Call, ...]
    direct_eager: bool

    @property
    def node(self) -> ast.AST:
        """Where to report: the function, else the call."""
        return self.call if self.function is None else self.function

    @property
    def eager(self) -> bool:
        """Whether it plans a wrapper that no graph captures."""
        return self.direct_eager or any(
            install.graph is False and not install.ours for install in self.installs
        )

    @property
    def installed(self) -> bool:
        """Whether a line that mlagen did not write puts it on a wrapper."""
        return any(not install.ours for install in self.installs)


def find_plans(source: Source) -> tuple[HandPlan, ...]:
    """The hand-written plans that are in use, in the order of the file.

    Left out: what mlagen wrote, and in a file that mlagen patched what no line uses any more.
    """
    installs = _installs(source)
    plans = []
    for call in source.calls:
        found = None if source.ours(call) else _private_call(source, call)
        if found is None:
            continue
        method, chain = found
        function = source.function(call)
        name = "<module>" if function is None else str(getattr(function, "name", "lambda"))
        module_at = next(i for i, part in enumerate(chain) if part in _MODULE_ATTRIBUTES)
        inside = set() if function is None else set(ast.walk(function))
        direct = tuple(
            other
            for other in source.calls
            if isinstance(other.func, ast.Name) and other.func.id == name and other not in inside
        )
        plan = HandPlan(
            name=name,
            function=function,
            call=call,
            method=method,
            owner=tuple(chain[:module_at]),
            raw="_module" in chain[module_at + 1 :],
            arguments=_arguments(source, call, function),
            keywords=tuple(part.arg for part in call.keywords if part.arg),
            kept=not isinstance(next(source.ancestors(call))[0], ast.Expr),
            installs=tuple(
                install
                for target, install in installs
                if target is function or (isinstance(target, str) and target == name)
            ),
            direct=direct,
            direct_eager=any(
                _uses_graph(source, other.args[0]) is False for other in direct if other.args
            ),
        )
        referenced = any(
            other.id == name and isinstance(other.ctx, ast.Load) and other not in inside
            for other in source.names
        )
        at_top = isinstance(function, ast.FunctionDef) and function in source.tree.body
        if not (source.regions and at_top and not referenced):
            plans.append(plan)  # else every site that used it is mlagen's now
    return tuple(plans)


def chain_of(source: Source, node: ast.expr, function: Function | None) -> list[str] | None:
    """The names of an attribute chain, with local aliases and `getattr(x, "name")` followed."""
    parts: list[str] = []
    for _ in range(16):  # more links than any real alias has; ends a circle of aliases
        if isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id == "getattr"
            and len(node.args) >= 2
            and isinstance(node.args[1], ast.Constant)
            and isinstance(node.args[1].value, str)
        ):
            parts.append(node.args[1].value)
            node = node.args[0]
        elif isinstance(node, ast.Subscript):
            node = node.value
        elif isinstance(node, ast.Name):
            defined = source.definitions(node.id, function, node) if function else []
            if len(defined) == 1 and isinstance(
                defined[0].value, (ast.Attribute, ast.Name, ast.Call)
            ):
                value = defined[0].value
                follows = not isinstance(value, ast.Call) or (
                    isinstance(value.func, ast.Name) and value.func.id == "getattr"
                )
                if follows:
                    node = value
                    continue
            parts.append(node.id)
            return parts[::-1]
        else:
            return None
    return None


def _private_call(source: Source, call: ast.Call) -> tuple[str, list[str]] | None:
    """Method and chain up to the module, where `call` is a private planner call."""
    function = source.function(call)
    if isinstance(call.func, ast.Attribute):
        if call.func.attr not in (*_METHODS, "default"):
            return None
    elif not isinstance(call.func, ast.Name):
        return None
    chain = chain_of(source, call.func, function)
    if chain is None:
        return None
    method = chain.pop()
    if method == "default" and chain and chain[-1] == "plan":
        chain.pop()
        method = "plan.default"
    elif method not in _METHODS:
        return None
    return (method, chain) if any(part in _MODULE_ATTRIBUTES for part in chain) else None


def _arguments(
    source: Source, call: ast.Call, function: Function | None
) -> tuple[ast.expr, ...] | None:
    found: list[ast.expr] = []
    for part in call.args:
        if not isinstance(part, ast.Starred):
            found.append(part)
            continue
        value: ast.expr = part.value
        if isinstance(value, ast.Name):
            defined = source.definitions(value.id, function, call)
            value = defined[0].value if len(defined) == 1 else value
        if not isinstance(value, (ast.Tuple, ast.List)):
            return None
        found.extend(value.elts)
    if any(part.arg is None for part in call.keywords):
        return None
    return tuple(found)


def _installs(source: Source) -> list[tuple[str | ast.Lambda, Install]]:
    """What is put on a wrapper as its `plan`: (name of the function or the lambda, place)."""
    found: list[tuple[str | ast.Lambda, Install]] = []
    places: list[tuple[ast.AST, ast.expr, ast.expr]] = [
        (node, target.value, node.value)
        for node in source.assignments
        for target in node.targets
        if isinstance(target, ast.Attribute) and target.attr == "plan"
    ]
    for call in source.calls:
        if isinstance(call.func, ast.Name) and call.func.id == "setattr" and len(call.args) == 3:
            named = call.args[1]
            if isinstance(named, ast.Constant) and named.value == "plan":
                places.append((call, call.args[0], call.args[2]))
    for node, wrapper, value in places:
        target = _installed(value)
        if target is not None:
            graph = _uses_graph(source, wrapper)
            found.append((target, Install(node, graph, source.ours(node))))
    return found


def _installed(value: ast.expr) -> str | ast.Lambda | None:
    """The function in `f`, `lambda ...`, `partial(f, w)`, `MethodType(f, w)`, `f.__get__(w)`."""
    if isinstance(value, ast.Lambda):
        return value
    if isinstance(value, ast.Name):
        return value.id
    if isinstance(value, ast.Call):
        if isinstance(value.func, ast.Attribute) and value.func.attr == "__get__":
            return dotted(value.func.value)
        if value.args:
            return _installed(value.args[0])
    return None


def _uses_graph(source: Source, wrapper: ast.expr) -> bool | None:
    name = dotted(wrapper)
    if name is None:
        return None
    function = source.function(wrapper)
    defined = source.definitions(name, function, wrapper)
    if not defined and "." in name:
        defined = source.class_definitions(name, source.class_of(wrapper))
    made = [
        definition.value
        for definition in defined
        if isinstance(definition.value, ast.Call)
        and (dotted(definition.value.func) or "").endswith("Wrapper")
    ]
    if not made:
        return None
    flags = [keyword(call, "use_cuda_graph") for call in made]
    if all(flag is None for flag in flags):
        return False
    return True if all(is_true(flag) for flag in flags) else None
