"""--allow-unknown: what can be said about an unknown planner from its source alone.

A value that FlashInfer's own `plan` hands on is taken over only where emitted code has the very
same value at hand: an argument of the plan, a default that nobody overrides, a constant, an
attribute that `plan` does not touch. All else stays refused: a plan that is wrong in silence is
worse than none. What was derived is told, one sentence each, and marks all that is made from it.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field, replace

from ..errors import Problem
from . import eras
from .api import PLANNER_ARGUMENTS
from .syntax import ClassView, MethodOf, Modules, assigned, attribute_of, ordered, text

#: The planning method's parameters that emitted code has at hand, and what they are there.
_PARAMETERS = {
    "num_heads": "shape.num_heads",
    "head_dim_ckv": "shape.head_dim_ckv",
    "head_dim_kpe": "shape.head_dim_kpe",
    "page_size": "shape.page_size",
    "sm_scale": "shape.sm_scale",
    "q_data_type": "shape.q_data_type",
    "kv_data_type": "shape.kv_data_type",
    "causal": "causal",
}
#: Its arrays, of which emitted code has copies on the host.
_HOST_ARRAYS = {
    "qo_indptr": "request.qo_indptr",
    "kv_indptr": "request.kv_indptr",
    "kv_len_arr": "request.kv_len",
}
_WORKSPACES = {
    "_float_workspace_buffer": "HOLDER._float_workspace_buffer",
    "_int_workspace_buffer": "HOLDER._int_workspace_buffer",
    "_pin_memory_int_workspace_buffer": "PINNED",
}
#: What the nine are as emitted, in their order: each has to be there, once.
_NINE = (
    *_WORKSPACES.values(),
    *_HOST_ARRAYS.values(),
    "shape.num_heads",
    "shape.head_dim_ckv",
    "causal",
)
#: Given to `plan` by what mlagen emits (templates/plan/planner.py.jinja): their defaults count for
#: nothing.
_GIVEN = frozenset({*_PARAMETERS, *_HOST_ARRAYS, "kv_indices"})


class UnderivableError(Exception):
    """Why an expression has no counterpart in emitted code. The text goes into a DriftError."""


@dataclass
class Derivation:
    """What was derived so far: sentences for `PlanApi.derived`."""

    sentences: list[str] = field(default_factory=list)

    def note(self, sentence: str) -> None:
        """Keep a sentence, once."""
        if sentence not in self.sentences:
            self.sentences.append(sentence)


@dataclass(frozen=True)
class Scope:
    """Where an expression stands: the planning method, and the class that plans by `entry`.

    `whole`: the object that plans is the wrapper, and lives on; a back-end object is made anew for
    each plan, out of things that emitted code does not see.
    """

    view: ClassView
    entry: str
    method: MethodOf
    whole: bool


def underivable(modules: Modules, problem: Problem, error: UnderivableError) -> Problem:
    """Why --allow-unknown does not help against `problem`."""
    message = f"--allow-unknown cannot derive this: {error}"
    return replace(modules.problem("not-derivable", message, problem.path, problem.line), hint="")


def derived_arguments(arguments: tuple[ast.expr, ...], scope: Scope) -> tuple[str, ...]:
    """What an emitted call passes for the arguments of FlashInfer's own.

    Raises UnderivableError where one has no counterpart, or one of the nine is not there once.
    """
    emitted = tuple(_value(argument, scope) for argument in arguments)
    for name, expected in zip(PLANNER_ARGUMENTS, _NINE, strict=True):
        if emitted.count(expected) != 1:
            raise UnderivableError(
                f"the planner is given {name} {emitted.count(expected)} times, expected once"
            )
    return emitted


def derived_state(name: str, scope: Scope, value: ast.expr) -> str:
    """What a plan sets an attribute to that FlashInfer's plan sets to `value`; empty where the
    first plan leaves it right for all. Raises UnderivableError."""
    emitted = _value(value, scope)
    if _is_literal(emitted):
        return ""
    if emitted == "causal":
        return "CAUSAL"
    if not emitted.startswith("shape."):
        raise UnderivableError(f"self.{name} is {text(value)}, which belongs to one plan")
    return emitted


def plan_info_trouble(modules: Modules) -> str | None:
    """Why what `plan_info` holds cannot be told from FlashInfer's C++, or is not what emitted code
    reads it for; None where it is."""
    data = modules.source.read(eras.SCHEDULER_HEADER)
    if data is None:
        return f"{eras.SCHEDULER_HEADER}, which tells what plan_info holds, is not there"
    found = re.search(
        r"struct\s+MLAPlanInfo\b.*?\bToVector\(\)\s*const\s*\{\s*return\s*\{([^}]*)\}",
        data.decode("utf-8", "replace"),
        re.DOTALL,
    )
    names = tuple(re.findall(r"\w+", found[1])) if found else ()
    if names == eras.PLAN_INFO:
        return None
    new = [name for name in names if name not in eras.PLAN_INFO]
    gone = [name for name in eras.PLAN_INFO if name not in names]
    return (
        f"plan_info holds {len(names)} entries in {eras.SCHEDULER_HEADER}, expected "
        f"{len(eras.PLAN_INFO)} in the order known"
        + (f"; new: {', '.join(new)}" if new else "")
        + (f"; not there: {', '.join(gone)}" if gone and names else "")
    )


def _value(node: ast.expr, scope: Scope, depth: int = 0) -> str:
    """The emitted counterpart of an expression of the planning method."""
    method = scope.method
    if isinstance(node, ast.Constant | ast.UnaryOp) and _is_literal(text(node)):
        return text(node)
    if name := attribute_of(node, frozenset({method.receiver} - {""})):
        return _attribute(name, scope)
    if not isinstance(node, ast.Name):
        raise UnderivableError(f"{text(node)} is worked out by plan")
    name = node.id
    if name in method.parameters:
        return _parameter(name, scope)
    values = assigned(method.node, name)
    if _times_bound(method, name) != 1 or len(values) != 1 or depth > 8:
        raise UnderivableError(f"{name} is not assigned once in {method.node.name}")
    if (array := _host_copy_of(values[0])) is not None and array in method.parameters:
        _never_bound_again(array, method)
        if changed := next((n for n in (name, array) if _is_written_into(method, n)), None):
            raise UnderivableError(f"{method.node.name} writes into {changed}")
        return _HOST_ARRAYS[array]
    return _value(values[0], scope, depth + 1)


def _parameter(name: str, scope: Scope) -> str:
    _never_bound_again(name, scope.method)
    if name in _PARAMETERS:
        return _PARAMETERS[name]
    default = _default(name, scope.method)
    if name in _GIVEN or not scope.whole or scope.method.node.name != "plan" or default is None:
        raise UnderivableError(f"there is nothing to give for the parameter {name}")
    if not _is_literal(text(default)):
        raise UnderivableError(f"the default of {name}, {text(default)}, is no constant")
    return text(default)


def _attribute(name: str, scope: Scope) -> str:
    if name in _WORKSPACES:
        return _WORKSPACES[name]
    if not scope.whole:
        raise UnderivableError(f"self.{name} is of an object that each plan makes anew")
    # What plan mentions elsewhere it may write into, as it does with its buffers.
    if len(_mentions(scope.view, scope.entry, name)) != 1:
        raise UnderivableError(f"plan does more with self.{name} than hand it on")
    if not any(isinstance(node.ctx, ast.Store) for node in _mentions(scope.view, "__init__", name)):
        raise UnderivableError(f"__init__ does not set self.{name}")
    return f"HOLDER.{name}"


def _mentions(view: ClassView, entry: str, name: str) -> list[ast.Attribute]:
    """Each `self.name` on the way through `entry`."""
    return [
        step.node
        for step in view.walk(entry)
        if isinstance(step.node, ast.Attribute) and attribute_of(step.node, step.selves) == name
    ]


def _is_written_into(method: MethodOf, name: str) -> bool:
    """Whether a method writes elements of an array, `x[...] = y`, or calls `x.f_()`."""
    for node in ordered(method.node):
        if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
            changed: ast.expr = node.value
        elif isinstance(node, ast.Attribute) and node.attr.endswith("_"):
            changed = node.value
        else:
            continue
        if isinstance(changed, ast.Name) and changed.id == name:
            return True
    return False


def _host_copy_of(value: ast.expr) -> str | None:
    """X, where the expression is `X.to("cpu")` or `X.cpu()` of one of the plan's arrays."""
    for name in _HOST_ARRAYS:
        if text(value) in (f"{name}.to('cpu')", f"{name}.cpu()"):
            return name
    return None


def _default(name: str, method: MethodOf) -> ast.expr | None:
    arguments = method.node.args
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = dict(
        zip([a.arg for a in positional][::-1], arguments.defaults[::-1], strict=False)
    ) | {a.arg: d for a, d in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if d}
    return defaults.get(name)


def _never_bound_again(name: str, method: MethodOf) -> None:
    if _times_bound(method, name):
        raise UnderivableError(f"{method.node.name} assigns its parameter {name} anew")


def _times_bound(method: MethodOf, name: str) -> int:
    """How often the body of a method binds a name: assignments, loops, `with`, `:=`, `del`."""
    return sum(
        isinstance(node, ast.Name) and node.id == name and not isinstance(node.ctx, ast.Load)
        for node in ordered(method.node)
    )


def _is_literal(source: str) -> bool:
    """Whether this is the source of a number, a string, True, False or None."""
    try:
        value = ast.literal_eval(source)
    except (ValueError, SyntaxError):
        return False
    return value is None or isinstance(value, bool | int | float | str)
