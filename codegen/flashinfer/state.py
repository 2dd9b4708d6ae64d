"""What a plan leaves behind for `run`, and what it checks before."""

from __future__ import annotations

import ast
from dataclasses import replace

from ..errors import DriftError, Problem
from . import eras
from .api import Place, PrivateCall, StateAttribute
from .derive import Derivation, Scope, UnderivableError, derived_state, underivable
from .planner import Planner
from .syntax import (
    ClassView,
    MethodOf,
    Module,
    Modules,
    Step,
    assigned,
    attribute_of,
    named_by,
    text,
)


def state_between(view: ClassView, plan: str, run: str) -> tuple[StateAttribute, ...]:
    """The attributes that `plan` sets and `run` reads, both with the methods of the same object
    that they call, in the order in which plan sets them; `eras.NOT_STATE` left out.

    Where plan sets one twice, the last text counts.
    """
    read = {name for step in view.walk(run) if (name := _reads(step))}
    found: dict[str, StateAttribute] = {}
    for step in view.walk(plan):
        for name, value in _sets(step):
            if name in read and name not in eras.NOT_STATE:
                place = Place(step.method.module.path, getattr(step.node, "lineno", 0))
                found[name] = StateAttribute(name, value, place)
    return tuple(found.values())


def run_state(
    modules: Modules, planner: Planner, call: PrivateCall, derivation: Derivation | None = None
) -> tuple[StateAttribute, ...]:
    """The state that a plan has to leave right on the object that plans.

    With a `derivation`, state that no era has is taken over where it can be. Raises DriftError
    where `run` does not read what carries a plan to the kernels, or reads something that plan works
    out in a way that is not in `eras.COMPUTED_STATE`: a fast plan would leave that stale.
    """
    state = state_between(planner.view, planner.plan, planner.run)
    names = {attribute.name for attribute in state}
    for name in eras.REQUIRED_STATE:
        if name not in names:
            raise modules.drift(
                "state-unknown",
                f"{planner.view.node.name} has no {name} that {planner.plan} sets and "
                f"{planner.run} reads: how a plan reaches the kernels cannot be told",
                planner.view.module,
                planner.view.node,
            )
    setters = {
        name: step.method for step in planner.view.walk(planner.plan) for name, _ in _sets(step)
    }
    problems: list[Problem] = []
    kept: list[StateAttribute] = []
    for attribute in state:
        setter = setters[attribute.name]
        problem = _unknown(modules, attribute, setter)
        if derivation is not None and attribute.name not in eras.KNOWN_STATE:
            scope = Scope(planner.view, planner.plan, setter, planner.holder == "wrapper")
            try:
                attribute = replace(attribute, emitted=_derived(attribute.name, scope, call))
            except UnderivableError as error:
                first = problem or _new_state(modules, attribute)
                problems += [first, underivable(modules, first, error)]
            else:
                derivation.note(
                    f"run reads self.{attribute.name}, which plan sets to {attribute.value}"
                )
        elif problem is not None:
            problems.append(problem)
        kept.append(attribute)
    if problems:
        raise DriftError(*problems)
    return tuple(kept)


def _derived(name: str, scope: Scope, call: PrivateCall) -> str:
    """What a plan sets an attribute to that no era has. Raises UnderivableError unless every plan
    passes by the one assignment: a statement of the method that makes the private call, below no
    `if`."""
    method = scope.method
    first, last = method.node.lineno, method.node.end_lineno or 0
    if method.module.path != call.place.path or not first <= call.place.line <= last:
        raise UnderivableError(f"{method.node.name}, which sets self.{name}, does not plan")
    bound = [step for step in scope.view.walk(scope.entry) if _binds(name, step)]
    receivers = frozenset({method.receiver})
    values = [
        statement.value
        for statement in method.node.body
        if isinstance(statement, ast.Assign)
        and [attribute_of(target, receivers) for target in statement.targets] == [name]
    ]
    if len(values) != 1 or len(bound) != 1:
        raise UnderivableError(f"self.{name} is not set once, in every plan")
    return derived_state(name, scope, values[0])


def _binds(name: str, step: Step) -> bool:
    if isinstance(step.node, ast.Attribute) and not isinstance(step.node.ctx, ast.Load):
        return attribute_of(step.node, step.selves) == name
    return named_by(step.node, step.selves, "setattr", "delattr") == name


def _new_state(modules: Modules, attribute: StateAttribute) -> Problem:
    return modules.problem(
        "state-unknown",
        f"run reads self.{attribute.name}, which plan sets to {attribute.value} and no era has",
        attribute.place.path,
        attribute.place.line,
    )


def _unknown(modules: Modules, attribute: StateAttribute, setter: MethodOf) -> Problem | None:
    name, value = attribute.name, attribute.value
    if name in eras.COMPUTED_STATE:
        known = eras.COMPUTED_STATE[name]
        found = {value}
        if value.isidentifier() and value not in setter.parameters:
            found = {text(item) for item in assigned(setter.node, value)}
        if known is None or (found and found <= known):
            return None
        expected = " or ".join(sorted(known))
        value = " or ".join(sorted(found)) or value
    elif value in setter.parameters:
        return None
    else:
        expected = f"a parameter of {setter.node.name}"
    return modules.problem(
        "state-unknown",
        f"run reads self.{name}, and mlagen cannot make it as plan does: "
        f"expected {expected}, found {value}",
        attribute.place.path,
        attribute.place.line,
    )


def _reads(step: Step) -> str | None:
    node = step.node
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
        return attribute_of(node, step.selves)
    return named_by(node, step.selves, "getattr", "hasattr")


def _sets(step: Step) -> list[tuple[str, str]]:
    """(name, source text of the value) of what a statement assigns to the object."""
    node = step.node
    if isinstance(node, ast.Assign):
        return [pair for target in node.targets for pair in _pairs(target, node.value, step)]
    if isinstance(node, ast.AnnAssign | ast.AugAssign) and node.value is not None:
        return _pairs(node.target, node.value, step)
    if (
        isinstance(node, ast.Call)
        and len(node.args) == 3
        and (name := named_by(node, step.selves, "setattr"))
    ):
        return [(name, text(node.args[2]))]
    return []


def _pairs(target: ast.expr, value: ast.expr, step: Step) -> list[tuple[str, str]]:
    if isinstance(target, ast.Tuple | ast.List):
        values = [value] * len(target.elts)
        if isinstance(value, ast.Tuple | ast.List) and len(value.elts) == len(target.elts):
            values = value.elts
        return [p for t, v in zip(target.elts, values, strict=True) for p in _pairs(t, v, step)]
    name = attribute_of(target, step.selves)
    return [(name, text(value))] if name else []


def int32_checked(modules: Modules, planner: Planner) -> bool:
    """Whether planning compares the dtype of its three arrays with torch.int32, in a method or in
    a function beside it that a method calls."""
    functions: dict[ast.AST, MethodOf] = {}
    for step in planner.view.walk(planner.plan):
        functions.setdefault(step.method.node, step.method)
        if isinstance(step.node, ast.Call) and isinstance(step.node.func, ast.Name):
            found = function_called(modules, step.method.module, step.node.func.id)
            if found is not None:
                functions.setdefault(found.node, found)
    checked = {name for function in functions.values() for name in _int32_checks(function)}
    return checked >= eras.INT32_ARRAYS


def function_called(modules: Modules, module: Module, name: str) -> MethodOf | None:
    """A function of this module, or one it imports from a module that was read for its class: the
    back ends share one such module, and no other need be read for this."""
    for node in module.tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return MethodOf(module, None, node)
        if isinstance(node, ast.ImportFrom) and any(alias.name == name for alias in node.names):
            other = modules.loaded(module.absolute(node))
            if other is not None and other is not module:
                return function_called(modules, other, name)
    return None


def _int32_checks(function: MethodOf) -> set[str]:
    """The parameters whose dtype is compared with torch.int32, one by one or in a loop over a
    tuple of them."""
    loops: dict[str, set[str]] = {}
    for node in ast.walk(function.node):
        if isinstance(node, ast.For) and isinstance(node.iter, ast.Tuple | ast.List):
            targets = node.target.elts if isinstance(node.target, ast.Tuple) else [node.target]
            for position, target in enumerate(targets):
                if isinstance(target, ast.Name):
                    items = (_at(item, position, len(targets)) for item in node.iter.elts)
                    loops[target.id] = {item.id for item in items if isinstance(item, ast.Name)}
    checked: set[str] = set()
    for node in ast.walk(function.node):
        if isinstance(node, ast.Compare) and len(node.comparators) == 1:
            left = node.left
            if (
                isinstance(left, ast.Attribute)
                and left.attr == "dtype"
                and isinstance(left.value, ast.Name)
                and text(node.comparators[0]) == "torch.int32"
            ):
                checked |= loops.get(left.value.id, {left.value.id})
    return checked & set(function.parameters)


def _at(item: ast.expr, position: int, count: int) -> ast.expr | None:
    if count == 1:
        return item
    if isinstance(item, ast.Tuple | ast.List) and len(item.elts) == count:
        return item.elts[position]
    return None
