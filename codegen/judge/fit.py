"""Does each hand-written plan fit the FlashInfer at hand?

A hand-written copy of a private call breaks when FlashInfer changes it: with an exception on
the first replay (one argument more, `.default` gone), or worse, in silence (the state moved to
another object, the raw module no longer copies). Told by comparing the call and the
assignments around it with what FlashInfer's own `plan` does (`PlanApi`), never by version.

Codes: `plan-arguments`, `plan-default`, `plan-stream`, `plan-proxy`, `plan-state`
(the private call does not fit), `swallowed-exception` (a plan that fails in silence).
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from ..errors import Problem
from ..flashinfer.api import Era, PlanApi
from .case import Case, flashinfer_name
from .plans import HandPlan, chain_of
from .roles import is_host, role_of, role_of_name, role_of_text
from .source import Source, dotted

_REPLAN = "`mlagen patch` writes the call that this FlashInfer has"
#: State that belongs to the captured graph and its bound buffers, not to a replayed plan.
_GRAPH_OWNED = frozenset({"_plan_info", "_kv_indices_buf"})


def find(case: Case) -> Iterator[Problem]:
    """Every way in which a hand-written plan does not fit."""
    for plan in case.plans:
        yield from _exceptions(case, plan)
        if case.api is None:
            continue
        yield from _form(case, plan, case.api)
        yield from _arguments(case, plan, case.api)
        yield from _parameters(case, plan, case.api)
        yield from _state(case, plan, case.api)
    if case.api is not None:
        yield from _stock_calls(case, case.api)


def _exceptions(case: Case, plan: HandPlan) -> Iterator[Problem]:
    for parent, field in case.source.ancestors(plan.call):
        if parent is plan.function:
            return
        if not isinstance(parent, ast.Try) or field != "body":
            continue
        for handler in parent.handlers:
            if not any(isinstance(part, ast.Raise) for part in ast.walk(handler)):
                yield case.problem(
                    handler,
                    "swallowed-exception",
                    f"`{plan.name}` swallows what the planner raises: the graph then replays "
                    "the last plan that worked, with stale lengths",
                    "let the exception pass, or raise from it",
                )


def _form(case: Case, plan: HandPlan, api: PlanApi) -> Iterator[Problem]:
    """`.default`, the proxy, the object that holds the module."""
    name = flashinfer_name(api)
    if plan.method == "plan.default" and api.call.method != "plan.default":
        yield case.problem(
            plan.call,
            "plan-default",
            f"`{plan.name}` calls `.plan.default(...)`, the form of a torch operator; {name} "
            f"calls `.{api.call.method}(...)` ({api.call.place}), and its `plan` has no "
            "`default`",
            _REPLAN,
        )
    elif api.call.method == "plan.default" and plan.method != "plan.default":
        yield case.problem(
            plan.call,
            "plan-default",
            f"`{plan.name}` calls `.{plan.method}(...)`; in {name} the planner is a torch "
            f"operator, called as `.plan.default(...)` ({api.call.place})",
            _REPLAN,
        )
    staged = "plan_with_staged_workspace_bytes"
    if plan.method == staged and api.call.method != staged:
        yield case.problem(
            plan.call,
            "plan-proxy",
            f"`{plan.name}` calls `{staged}`, which {name} does not have; its own plan calls "
            f"`.{api.call.method}(...)` ({api.call.place})",
            _REPLAN,
        )
    elif plan.method == staged and _taken_whole(case.source, plan):
        yield case.problem(
            plan.call,
            "plan-state",
            f"`{plan.name}` takes what `{staged}` returns for the plan_info; in {name} that is "
            f"(plan_info, staged bytes) ({api.call.place})",
            _REPLAN,
        )
    if plan.raw and not api.planner_copies:
        yield case.problem(
            plan.call,
            "plan-proxy",
            f"`{plan.name}` calls the raw module below FlashInfer's proxy: in {name} only the "
            "proxy copies the plan to the device, so the graph replays a stale plan in silence",
            "call the module that the wrapper holds, `_cached_module`, not its `_module`",
        )
    elif plan.raw:
        yield case.problem(
            plan.call,
            "plan-proxy",
            f"`{plan.name}` reaches for `_module` below `_cached_module`; {name} has no proxy "
            "there",
            _REPLAN,
        )
    if api.holder == "wrapper" and "_planned_backend" in plan.owner:
        yield case.problem(
            plan.call,
            "plan-state",
            f"`{plan.name}` looks up `_planned_backend`; {name} keeps a plan on the wrapper "
            f"itself ({api.place})",
            _REPLAN,
        )


def _taken_whole(source: Source, plan: HandPlan) -> bool:
    """Whether the result of the call is used without being taken apart."""
    parent, _ = next(source.ancestors(plan.call))
    if not isinstance(parent, ast.Assign):
        return not isinstance(parent, (ast.Expr, ast.Subscript))
    names = {target.id for target in parent.targets if isinstance(target, ast.Name)}
    if any(isinstance(target, ast.Attribute) for target in parent.targets):
        return True
    for use in source.names:
        if use.id in names and isinstance(use.ctx, ast.Load):
            user, field = next(source.ancestors(use))
            unpacks = isinstance(user, ast.Assign) and isinstance(user.targets[0], ast.Tuple)
            taken_apart = unpacks or (isinstance(user, ast.Subscript) and field == "value")
            if source.function(use) is plan.function and not taken_apart:
                return True
    return False


def _arguments(case: Case, plan: HandPlan, api: PlanApi) -> Iterator[Problem]:
    name = flashinfer_name(api)
    if plan.arguments is None:
        yield case.note(
            plan.call,
            "plan-arguments",
            f"`{plan.name}` hands its arguments on through `*` or `**`: whether they fit "
            f"the {len(api.call.arguments)} of {name} cannot be read here",
            "write them out",
        )
        return
    if plan.keywords and api.era is not Era.TORCH_OP:
        yield case.problem(
            plan.call,
            "plan-arguments",
            f"`{plan.name}` passes {_listed(plan.keywords)} by keyword; the planner of {name} "
            "takes positions only",
            _REPLAN,
        )
        return
    given = [role_of(argument) for argument in plan.arguments]
    given += [role_of_name(word) for word in plan.keywords]
    wanted = [role_of_text(text) for text in api.call.arguments]
    takes_stream = api.call.takes_stream
    if "stream" in given and not takes_stream:
        yield case.problem(
            plan.call,
            "plan-stream",
            f"`{plan.name}` passes a CUDA stream; {name} takes none ({api.call.place}): its "
            f"planner has {len(wanted)} arguments, the call {len(given)}",
            _REPLAN,
        )
        given.remove("stream")
    elif takes_stream and "stream" not in given and len(given) < len(wanted):
        yield case.problem(
            plan.call,
            "plan-stream",
            f"`{plan.name}` passes no CUDA stream; {name} wants one as its last argument "
            f"({api.call.place})",
            _REPLAN,
        )
        wanted = [role for role in wanted if role != "stream"][: len(wanted) - 1]
    if len(given) != len(wanted):
        yield case.problem(
            plan.call,
            "plan-arguments",
            f"`{plan.name}` passes {len(given)} arguments, {name} passes {len(wanted)} "
            f"({api.call.place}): {_listed(api.call.arguments)}",
            _REPLAN,
        )
        return
    for position, (mine, theirs) in enumerate(zip(given, wanted, strict=True)):
        if mine and theirs and mine != theirs:
            yield case.problem(
                plan.call,
                "plan-arguments",
                f"argument {position + 1} of the planner is {theirs} in {name} "
                f"({api.call.place}); `{plan.name}` passes {mine} there",
                _REPLAN,
            )
            return


def _parameters(case: Case, plan: HandPlan, api: PlanApi) -> Iterator[Problem]:
    """What takes the place of `wrapper.plan` is called with its arguments, in its order."""
    if not plan.installed or not isinstance(plan.function, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return
    arguments = plan.function.args
    names = [part.arg for part in (*arguments.posonlyargs, *arguments.args)][1:]
    pairs = zip(names, api.plan_parameters, strict=False)
    for position, (mine, theirs) in enumerate(pairs):
        if (
            role_of_name(mine)
            and role_of_name(theirs)
            and role_of_name(mine) != role_of_name(theirs)
        ):
            yield case.problem(
                plan.node,
                "plan-arguments",
                f"`{plan.name}` stands in for `plan`, whose parameter {position + 1} is "
                f"`{theirs}` in {flashinfer_name(api)} ({api.place}); its own is `{mine}`",
                "keep FlashInfer's order, or pass by keyword",
            )
            return


def _state(case: Case, plan: HandPlan, api: PlanApi) -> Iterator[Problem]:
    """What `run` reads and this plan leaves as the plan before it set it."""
    if plan.function is None:
        return
    own = {part.arg for part in ast.walk(plan.function.args) if isinstance(part, ast.arg)}
    # What FlashInfer sets from an argument that this plan does not take cannot change here.
    constant = set(api.plan_parameters) - own
    state = [part.name for part in api.run_state if part.value not in constant]
    if not state:
        return
    name = flashinfer_name(api)
    on = _assigned(case.source, plan)
    held = [part for part in state if part in on[api.holder]]
    if plan.eager:
        missing = [part for part in state if part not in held]
        if not missing:
            return
        reason = ", so `run` uses the plan before"
        if api.holder == "planned_backend":
            reason = " on `wrapper._planned_backend`, where `run` looks" + reason
        dropped = " It drops the plan_info that the planner returns." if not plan.kept else ""
        yield case.problem(
            plan.node,
            "plan-state",
            f"`{plan.name}` plans for eager use and does not set {_listed(missing)}{reason} "
            f"({name}, {api.call.place}).{dropped}",
            _REPLAN,
        )
        return
    astray = [part for part in state if part in on["wrapper"] and part not in _GRAPH_OWNED]
    if api.holder == "planned_backend" and astray:
        yield case.note(
            plan.node,
            "plan-state",
            f"`{plan.name}` sets {_listed(astray)} on the wrapper; `run` of {name} reads them "
            "from `wrapper._planned_backend`. A captured graph has read them already; used "
            "eagerly, the plan would be stale",
            _REPLAN,
        )
        return
    missing = [
        part.name
        for part in api.run_state
        if part.name not in held and part.name not in _GRAPH_OWNED and part.value in own
    ]
    if missing:
        yield case.note(
            plan.node,
            "plan-state",
            f"`{plan.name}` does not set {_listed(missing)}, which `run` of {name} reads: right "
            "only as long as each plan of a wrapper passes what its first one passed",
            _REPLAN,
        )


def _assigned(source: Source, plan: HandPlan) -> dict[str, set[str]]:
    """Attributes that the function sets, or copies into, by what holds them."""
    found: dict[str, set[str]] = {"wrapper": set(), "planned_backend": set()}
    wrapper = [part for part in plan.owner if part != "_planned_backend"]
    if plan.function is None:
        return found
    for node in ast.walk(plan.function):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            for target in node.targets:
                targets.extend(target.elts if isinstance(target, ast.Tuple) else (target,))
        elif isinstance(node, (ast.AnnAssign, ast.AugAssign)):
            targets = [node.target]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            targets = [node.func.value] if node.func.attr == "copy_" else []
        elif isinstance(node, ast.Call) and dotted(node.func) == "setattr" and len(node.args) == 3:
            value = node.args[1]
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                targets = [ast.Attribute(value=node.args[0], attr=value.value, ctx=ast.Store())]
        for target in targets:
            chain = chain_of(source, target, plan.function)
            if not chain or len(chain) < 2:
                continue
            if chain[-2] == "_planned_backend":
                found["planned_backend"].add(chain[-1])
            elif chain[:-1] == wrapper:
                found["wrapper"].add(chain[-1])
    return found


def _stock_calls(case: Case, api: PlanApi) -> Iterator[Problem]:
    """Calls of `wrapper.plan(...)` that stock FlashInfer serves: do they fit its signature?"""
    for call in case.source.calls:
        if not is_stock_plan(call) or case.source.ours(call):
            continue
        words = [part.arg for part in call.keywords if part.arg]
        if any(isinstance(part, ast.Starred) for part in call.args) or any(map(is_host, words)):
            continue  # `qo_indptr_cpu=` is the keyword of a hand-written plan
        name = flashinfer_name(api)
        unknown = [word for word in words if word not in api.plan_parameters]
        if unknown or len(call.args) > len(api.plan_parameters):
            what = f"passes {_listed(unknown)}" if unknown else f"passes {len(call.args)} arguments"
            yield case.problem(
                call,
                "plan-arguments",
                f"`{ast.unparse(call.func)}` {what}; `plan` of {name} has "
                f"{_listed(api.plan_parameters)} ({api.place})",
                "this SGLang and this FlashInfer do not belong together",
            )
            continue
        for position, (argument, parameter) in enumerate(
            zip(call.args, api.plan_parameters, strict=False)
        ):
            mine, theirs = role_of(argument), role_of_name(parameter)
            if mine and theirs and mine != theirs:
                yield case.problem(
                    call,
                    "plan-arguments",
                    f"argument {position + 1} of `plan` is `{parameter}` in {name} "
                    f"({api.place}); `{ast.unparse(call.func)}` is given "
                    f"`{ast.unparse(argument)}`",
                    "this SGLang and this FlashInfer do not belong together",
                )
                break


def is_stock_plan(call: ast.Call) -> bool:
    """Whether `call` is `<wrapper>.plan(...)`: not the private planner, not a name `plan`."""
    return (
        isinstance(call.func, ast.Attribute)
        and call.func.attr == "plan"
        and "wrapper" in (dotted(call.func.value) or "").lower()
        and "_module" not in (dotted(call.func.value) or "")
    )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
