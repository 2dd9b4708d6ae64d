"""Which object plans, and the private call it makes: found by structure, held against eras.py."""

from __future__ import annotations

import ast
import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ..errors import DriftError, Problem
from . import eras
from .api import Place, PrivateCall
from .derive import (
    Derivation,
    Scope,
    UnderivableError,
    derived_arguments,
    plan_info_trouble,
    underivable,
)
from .syntax import (
    ClassView,
    Found,
    MethodOf,
    Modules,
    Step,
    assigned,
    attribute_of,
    named_by,
    ordered,
    text,
)

#: The nine, as FlashInfer writes them.
EXPECTED_ARGUMENTS = tuple(eras.ARGUMENT_TEXTS.values())


@dataclass(frozen=True)
class Planner:
    """The object that makes the private call, and its two methods: the wrapper with `plan` and
    `run`, or 0.7's back end with what the wrapper's `plan` and `run` call on it."""

    holder: eras.Holder
    view: ClassView
    plan: str
    run: str


@dataclass(frozen=True)
class PlannerCall:
    """A call in `plan` that is, or once was, the private one. Arguments as source text."""

    method_of: MethodOf
    node: ast.Call
    form: str
    arguments: tuple[str, ...]
    nodes: tuple[ast.expr, ...]

    def __str__(self) -> str:
        return f"{self.form}({', '.join(self.arguments)})"


def find_wrapper(modules: Modules) -> ClassView:
    """The class that SGLang imports, wherever the package defines it.

    Raises DriftError where it is not exported, or has no `plan` or no `run`.
    """
    view = ClassView(modules, _wrapper_class(modules), "plan", "run")
    for name in ("plan", "run"):
        if view.method(name) is None:
            raise modules.drift(
                "method-missing",
                f"{eras.WRAPPER_CLASS} has no method {name}",
                view.module,
                view.node,
            )
    return view


def _wrapper_class(modules: Modules) -> Found:
    for module in eras.EXPORTING_MODULES:
        found = modules.find(module, eras.WRAPPER_CLASS)
        if found is not None and isinstance(found.node, ast.ClassDef):
            return found
    message = f"class {eras.WRAPPER_CLASS} is not exported by " + " or ".join(
        eras.EXPORTING_MODULES
    )
    if modules.paths:
        message += f"; looked in {', '.join(modules.paths)}"
    if near := difflib.get_close_matches(eras.WRAPPER_CLASS, modules.classes(), 1):
        message += f"; the nearest class there is {near[0]}"
    path = next(iter(modules.paths), "flashinfer")
    raise DriftError(modules.problem("class-missing", message, path, 0))


def find_planner(modules: Modules, wrapper: ClassView) -> Planner:
    """The wrapper itself, unless its `plan` keeps what a back end's planning method returned.

    Then the back end's class, looked up in the table that the wrapper chooses from. DriftError
    where there is such an object and no way to its class, or FA2 and FA3 plan differently.
    """
    plan = _planned_by(modules, wrapper)
    if plan is None:
        return Planner("wrapper", wrapper, "plan", "run")
    run = _run_by(modules, wrapper)
    views = [_backend(modules, wrapper, name, plan, run) for name in eras.FA_BACKENDS]
    # What is emitted serves both, so both have to plan through one call.
    first, second = (tuple(text(call.node) for call in calls_of(view, plan)) for view in views)
    if first != second:
        raise modules.drift(
            "back-ends-differ",
            f"the back ends {' and '.join(eras.FA_BACKENDS)} plan through different calls: "
            f"{'; '.join(first) or 'none'} against {'; '.join(second) or 'none'}",
            views[1].module,
            views[1].node,
        )
    return Planner("planned_backend", views[0], plan, run)


def _planned_by(modules: Modules, wrapper: ClassView) -> str | None:
    """The method whose result `plan` keeps in `_planned_backend`; None where it keeps nothing."""
    for step in wrapper.walk("plan"):
        node = step.node
        if isinstance(node, ast.Assign) and any(
            attribute_of(target, step.selves) == eras.PLANNED_BACKEND for target in node.targets
        ):
            values: Sequence[ast.expr] = [node.value]
            if isinstance(node.value, ast.Name):
                values = assigned(step.method.node, node.value.id)
            for value in values:
                if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
                    return value.func.attr
            raise modules.drift(
                "shape-unknown",
                f"plan sets self.{eras.PLANNED_BACKEND} to {text(node.value)}, expected what a "
                "back end's planning method returns",
                step.method.module,
                node,
            )
    return None


def _run_by(modules: Modules, wrapper: ClassView) -> str:
    """The method of the planned back end that `run` calls."""
    names: set[str] = set()
    for step in wrapper.walk("run"):
        node = step.node
        if isinstance(node, ast.Assign) and _is_planned_backend(node.value, step):
            names.update(target.id for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            on = node.func.value
            if _is_planned_backend(on, step) or (isinstance(on, ast.Name) and on.id in names):
                return node.func.attr
    method = wrapper.method("run")
    raise modules.drift(
        "shape-unknown",
        f"run calls no method of self.{eras.PLANNED_BACKEND}, which plan sets",
        method.module if method else wrapper.module,
        method.node if method else wrapper.node,
    )


def _is_planned_backend(node: ast.AST, step: Step) -> bool:
    name = named_by(node, step.selves, "getattr") or attribute_of(node, step.selves)
    return name == eras.PLANNED_BACKEND


def _backend(modules: Modules, wrapper: ClassView, name: str, *wanted: str) -> ClassView:
    for table in _tables(wrapper):
        for key, value in zip(table.keys, table.values, strict=True):
            if isinstance(key, ast.Constant) and key.value == name and isinstance(value, ast.Name):
                found = modules.find(wrapper.module.name, value.id)
                if found is not None and isinstance(found.node, ast.ClassDef):
                    return ClassView(modules, found, *wanted)
    raise modules.drift(
        "shape-unknown",
        f"no class for the back end {name!r} in {eras.BACKEND_TABLE}, which "
        f"{eras.WRAPPER_CLASS} is expected to choose from",
        wrapper.module,
        wrapper.node,
    )


def _tables(wrapper: ClassView) -> list[ast.Dict]:
    tables = []
    for node in wrapper.module.tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Dict):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(t, ast.Name) and t.id == eras.BACKEND_TABLE for t in targets):
                tables.append(node.value)
    return tables


def private_call(
    modules: Modules, planner: Planner, derivation: Derivation | None = None
) -> tuple[eras.KnownCall, PrivateCall]:
    """The row of `eras.KNOWN_CALLS` that the source has, and the call as it stands there.

    With a `derivation`, arguments that are not the nine in their order are taken over as far as
    emitted code has their values at hand. Raises DriftError where there is no planner call, one
    of another form, or one whose arguments are not known.
    """
    calls = calls_of(planner.view, planner.plan)
    rows = [row for row in eras.KNOWN_CALLS if row.holder == planner.holder]
    forms = " or ".join(dict.fromkeys(form_of(row) for row in rows))
    if not calls:
        method = planner.view.method(planner.plan)
        raise modules.drift(
            "private-call-missing",
            f"{planner.view.node.name}.{planner.plan} makes no planner call: expected "
            f"{forms}({', '.join(EXPECTED_ARGUMENTS)})",
            method.module if method else planner.view.module,
            method.node if method else planner.view.node,
        )
    derived: dict[PlannerCall, tuple[str, ...]] = {}
    for call in calls:
        difference = _difference(call, rows, forms)
        if difference:
            problem = modules.problem(
                "private-call-changed",
                f"{difference}; expected {forms}({', '.join(EXPECTED_ARGUMENTS)}); found {call}",
                call.method_of.module.path,
                call.node,
            )
            if derivation is None:
                raise DriftError(problem)
            derived[call] = _derived(modules, planner, call, rows, problem)
            derivation.note(difference)
    streams = calls[0].arguments == (*EXPECTED_ARGUMENTS, eras.STREAM_TEXT)
    row = next(
        row
        for row in rows
        if row.takes_stream == streams
        and row.path in (None, planner.view.module.path)
        and any(call.form == form_of(row) for call in calls)
    )
    call, *others = [call for call in calls if call.form == form_of(row)]
    if others:
        raise modules.drift(
            "private-call-changed",
            f"{call.form} is called {len(others) + 1} times, expected once",
            others[0].method_of.module,
            others[0].node,
        )
    return row, PrivateCall(
        method=row.method,
        arguments=call.arguments,
        returns=_returns(modules, call, row),
        takes_stream=row.takes_stream,
        place=Place(call.method_of.module.path, call.node.lineno),
        derived=derived.get(call, ()),
    )


def _derived(
    modules: Modules,
    planner: Planner,
    call: PlannerCall,
    rows: Sequence[eras.KnownCall],
    problem: Problem,
) -> tuple[str, ...]:
    """What an emitted call passes for arguments that are not known. Raises DriftError with
    `problem`, and why nothing can be derived."""
    try:
        if call.node.keywords:
            raise UnderivableError("an argument is given by keyword")
        if not any(form_of(row) == call.form for row in rows):
            raise UnderivableError(f"what {call.form} does cannot be told")
        scope = Scope(planner.view, planner.plan, call.method_of, planner.holder == "wrapper")
        emitted = derived_arguments(call.nodes, scope)
        if trouble := plan_info_trouble(modules):
            raise UnderivableError(trouble)
        return emitted
    except UnderivableError as error:
        raise DriftError(problem, underivable(modules, problem, error)) from None


def form_of(row: eras.KnownCall) -> str:
    """What the planner is called as."""
    return f"{row.receiver}.{row.method}"


def difference_of(call: PlannerCall, planner: Planner) -> str:
    """What is different in a call's arguments from all that is known, empty where nothing is."""
    found = [row for row in eras.KNOWN_CALLS if row.holder == planner.holder]
    rows = [row for row in found if form_of(row) == call.form] or found
    return _argument_difference(call, rows)


def calls_of(view: ClassView, entry: str) -> list[PlannerCall]:
    """The calls that plan: of something named so, on a cached module or given the workspace."""
    calls = []
    for step in view.walk(entry):
        node = step.node
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute | ast.Name):
            continue
        form = text(node.func)
        if "plan" in form.removesuffix(".default").rpartition(".")[2]:
            nodes = _argument_nodes(step.method, node)
            call = PlannerCall(step.method, node, form, _arguments(nodes, node), nodes)
            if EXPECTED_ARGUMENTS[0] in call.arguments or "cached_module." in form:
                calls.append(call)
    return calls


def _argument_nodes(method: MethodOf, call: ast.Call) -> tuple[ast.expr, ...]:
    """The positional arguments in order; `*args` of a tuple that is built before stands for its
    items."""
    nodes: list[ast.expr] = []
    for argument in call.args:
        if isinstance(argument, ast.Starred) and isinstance(argument.value, ast.Name):
            values = assigned(method.node, argument.value.id)
            if len(values) == 1 and isinstance(values[0], ast.Tuple):
                nodes += values[0].elts
                continue
        nodes.append(argument)
    return tuple(nodes)


def _arguments(nodes: Sequence[ast.expr], call: ast.Call) -> tuple[str, ...]:
    """Source texts in order, those given by keyword last."""
    texts = [text(node) for node in nodes]
    texts += [f"{k.arg}={text(k.value)}" if k.arg else f"**{text(k.value)}" for k in call.keywords]
    return tuple(texts)


def _difference(call: PlannerCall, rows: Sequence[eras.KnownCall], forms: str) -> str:
    """What is different from all that is known, empty where nothing is."""
    known = [row for row in rows if form_of(row) == call.form]
    if not known:
        return f"the planner is called as {call.form}, expected {forms}"
    return _argument_difference(call, known)


def _argument_difference(call: PlannerCall, known: Sequence[eras.KnownCall]) -> str:
    found = call.arguments
    if found == EXPECTED_ARGUMENTS:
        return ""
    if any(row.takes_stream for row in known) and found == (*EXPECTED_ARGUMENTS, eras.STREAM_TEXT):
        return ""
    more = [item for item in found if item not in EXPECTED_ARGUMENTS]
    fewer = [item for item in EXPECTED_ARGUMENTS if item not in found]
    count = f"the planner is called with {len(found)} arguments, expected {len(EXPECTED_ARGUMENTS)}"
    if len(found) != len(EXPECTED_ARGUMENTS):
        parts = [f"{item} is new (argument {found.index(item) + 1})" for item in more]
        parts += [
            f"{item} is not there (argument {EXPECTED_ARGUMENTS.index(item) + 1})" for item in fewer
        ]
        return f"{count}: {', '.join(parts) or 'one is given twice'}"
    if not more:
        return "the planner's arguments are in another order"
    places = [
        f"argument {n} of the planner is {item}, expected {expected}"
        for n, (item, expected) in enumerate(zip(found, EXPECTED_ARGUMENTS, strict=True), 1)
        if item != expected
    ]
    return ", ".join(places)


def _returns(
    modules: Modules, call: PlannerCall, row: eras.KnownCall
) -> Literal["plan_info", "plan_info_and_bytes"]:
    """How the result is taken: whole, or apart into (plan_info, staged bytes)."""
    expected = 2 if row.method == eras.STAGED else 1
    target = "nothing"
    for node in ordered(call.method_of.node):
        if isinstance(node, ast.Assign) and node.value is call.node:
            target = " = ".join(text(item) for item in node.targets)
            [first, *_] = node.targets
            parts = len(first.elts) if isinstance(first, ast.Tuple) else 1
            if len(node.targets) == 1 and parts == expected:
                return "plan_info_and_bytes" if expected == 2 else "plan_info"
    raise modules.drift(
        "private-call-changed",
        f"the result of {call.form} goes to {target}, expected "
        + ("two names, plan_info and the staged bytes" if expected == 2 else "one plan_info"),
        call.method_of.module,
        call.node,
    )
