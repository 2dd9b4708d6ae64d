"""What the edit sites share: the calls through which every plan of the back end goes.

The anchors are structural. Each call of an indices updater tells by its own arguments what
it serves: `init_metadata_replay=True` is a decode replay in every release, whatever the
method around it is called; the wrapper that is handed over tells the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import libcst as cst

from .nodes import (
    alone,
    assigned,
    assigned_name,
    branches,
    calls_of,
    contains,
    is_call,
    is_name,
    mentions,
    walk,
)
from .plan_call import find_plan_call
from .source import Refused, Source

BACKEND_CLASS = "FlashInferMLAAttnBackend"
DECODE_UPDATER_CLASS = "FlashInferMLAIndicesUpdaterDecode"
PREFILL_UPDATER_CLASS = "FlashInferMLAIndicesUpdaterPrefill"
MULTI_STEP_CLASS = "FlashInferMLAMultiStepDraftBackend"
DECODE_PLAN_FUNCTION = "fast_mla_decode_plan"


@dataclass(frozen=True)
class CallSite:
    """A call that is a statement, and where it stands.

    `tests` are the source texts of the conditions that hold there, outermost first;
    `block` are the statements around it and `index` is its place among them.
    """

    call: cst.Call
    statement: cst.SimpleStatementLine
    function: cst.FunctionDef
    tests: tuple[str, ...]
    block: Sequence[cst.BaseStatement]
    index: int

    def argument(self, keyword: str) -> cst.BaseExpression | None:
        """The value of a keyword argument."""
        for arg in self.call.args:
            if arg.keyword is not None and arg.keyword.value == keyword:
                return arg.value
        return None

    def under(self, predicate: str) -> bool:
        """Whether a condition that holds here calls `predicate`."""
        return any(f".{predicate}()" in test for test in self.tests)


@dataclass(frozen=True)
class Backend:
    """The back end's file with its plan sites found. Each property finds or refuses."""

    source: Source

    @cached_property
    def _bound(self) -> dict[cst.FunctionDef, set[str]]:
        """Names bound in a function, looked up once a function."""
        return {}

    @cached_property
    def backend_class(self) -> cst.ClassDef:
        return self.source.one_class(BACKEND_CLASS)

    @cached_property
    def calls(self) -> tuple[CallSite, ...]:
        """Every call statement in the methods of the back end's class."""
        collected: list[CallSite] = []
        for method in self.source.methods(self.backend_class):
            _collect(self.source, method, method.body, (), collected)
        return tuple(collected)

    # -- decode ----------------------------------------------------------------------------

    @cached_property
    def decode_replay(self) -> CallSite:
        """`self.indices_updater_decode.update(..., init_metadata_replay=True, ...)`."""
        return self._one(
            [site for site in self._updates("indices_updater_decode") if self._replays(site)],
            "call of indices_updater_decode.update with init_metadata_replay=True",
        )

    @cached_property
    def decode_eager(self) -> CallSite:
        """The decode update that plans the back end's own eager wrapper."""
        return self._one(
            [
                site
                for site in self._updates("indices_updater_decode")
                if not self._replays(site)
                and self._is(site, "decode_wrapper", "self.decode_wrapper")
            ],
            "call of indices_updater_decode.update with decode_wrapper=self.decode_wrapper",
        )

    @cached_property
    def decode_capture(self) -> CallSite:
        """The decode update that makes the first plan of a graph's wrapper."""
        return self._one(
            [
                site
                for site in self._updates("indices_updater_decode")
                if not self._replays(site) and isinstance(site.argument("decode_wrapper"), cst.Name)
            ],
            "call of indices_updater_decode.update for a wrapper being captured",
        )

    @cached_property
    def decode_install(self) -> tuple[CallSite, cst.SimpleStatementLine]:
        """The capture, and `<wrapper>.plan = partial(...)` behind it in the same block."""
        site = self.decode_capture
        wrapper = site.argument("decode_wrapper")
        assert isinstance(wrapper, cst.Name)
        found = [
            statement
            for statement in site.block[site.index + 1 :]
            if isinstance(statement, cst.SimpleStatementLine)
            and installs_plan(statement, wrapper.value)
        ]
        what = f"`{wrapper.value}.plan = partial(...)` behind the capture of decode"
        return site, self.source.exactly_one(found, what, line=self.source.last(site.statement))

    @cached_property
    def plan_installs(self) -> tuple[cst.Assign, ...]:
        """Every `<anything>.plan = ...` of the class: a wrapper whose own plan is replaced."""
        return tuple(
            node
            for node in walk(self.backend_class)
            if isinstance(node, cst.Assign)
            and any(
                isinstance(target.target, cst.Attribute) and target.target.attr.value == "plan"
                for target in node.targets
            )
        )

    def refuse_other_installs(self, *known: cst.CSTNode) -> None:
        """Refuse if a wrapper's plan is replaced anywhere but in the `known` statements.

        A wrapper that keeps FlashInfer's plan, for inputs that are not ours, must have it: a
        fast plan under that name would read the device's arrays on the host.
        """
        for install in self.plan_installs:
            if not any(contains(statement, install) for statement in known):
                raise Refused(
                    "anchor-changed",
                    "a wrapper's plan is replaced here as well: "
                    f"{self.source.code(install)}; expected only SGLang's own installations",
                    self.source.first(install),
                )

    # -- target-verify ---------------------------------------------------------------------

    @cached_property
    def has_verify(self) -> bool:
        """0.4.3.post4 has no target-verify at all."""
        return b".is_target_verify" in self.source.data and mentions(
            self.backend_class, frozenset({"is_target_verify"})
        )

    @cached_property
    def verify_replay(self) -> CallSite:
        """The prefill update that plans a captured verify wrapper at replay."""
        return self._one(
            [
                site
                for site in self._updates("indices_updater_prefill")
                if site.under("is_target_verify")
                and isinstance(site.argument("prefill_wrapper_paged"), cst.Subscript)
            ],
            "call of indices_updater_prefill.update for a captured target-verify wrapper",
        )

    @cached_property
    def verify_eager(self) -> CallSite:
        """The prefill update of an eager target-verify."""
        return self._one(
            [
                site
                for site in self._updates("indices_updater_prefill")
                if site.under("is_target_verify")
                and self._is(site, "prefill_wrapper_paged", "self.prefill_wrapper_verify")
            ],
            "call of indices_updater_prefill.update with "
            "prefill_wrapper_paged=self.prefill_wrapper_verify",
        )

    @cached_property
    def verify_capture(self) -> tuple[cst.BaseStatement, str, CallSite]:
        """The statement behind which a verify wrapper has had its real plan; the wrapper's
        name; the call that made the plan.

        Up to 0.5.12 that is the capture branch's own update, later the shared method that
        plans both captures and replays.
        """
        own = [
            site
            for site in self._updates("indices_updater_prefill")
            if site.under("is_target_verify")
            and isinstance(site.argument("prefill_wrapper_paged"), cst.Name)
        ]
        if own:
            site = self._one(own, "capture of target-verify")
            wrapper = site.argument("prefill_wrapper_paged")
            assert isinstance(wrapper, cst.Name)
            return site.statement, wrapper.value, site
        shared = self.verify_replay.function.name.value
        site = self._one(
            [
                call
                for call in self.calls
                if self.source.code(call.call.func) == f"self.{shared}"
                and "in_capture" in call.tests
            ],
            f"call of self.{shared} under `if in_capture:`",
        )
        return site.statement, self._verify_wrapper_name(site), site

    def _verify_wrapper_name(self, site: CallSite) -> str:
        """The local that the verify branch of a capture assigns a new wrapper to."""
        found: list[cst.Assign] = []
        for statement in site.block[: site.index]:
            if isinstance(statement, cst.If):
                found += _wrapper_assignments(self.source, statement)
        one = self.source.exactly_one(
            found,
            "wrapper made in the is_target_verify() branch of a capture",
            line=self.source.first(site.statement),
        )
        target = one.targets[0].target
        assert isinstance(target, cst.Name)
        return target.value

    # -- eager extends ---------------------------------------------------------------------

    @cached_property
    def extend_eager(self) -> CallSite:
        """The prefill update of a paged extend: the one that is given prefix lengths."""
        return self._one(
            [
                site
                for site in self._updates("indices_updater_prefill")
                if self._is(site, "prefill_wrapper_paged", "self.prefill_wrapper_paged")
                and not self._is(site, "prefix_lens", "None")
            ],
            "call of indices_updater_prefill.update with prefix lengths and "
            "prefill_wrapper_paged=self.prefill_wrapper_paged",
        )

    @cached_property
    def draft_extend_eager(self) -> CallSite | None:
        """The eager draft-extend of the first EAGLE worker (0.4.4 to 0.5.13), if there."""
        found = [
            site
            for site in self._updates("indices_updater_prefill")
            if self._is(site, "prefill_wrapper_paged", "self.prefill_wrapper_paged")
            and self._is(site, "prefix_lens", "None")
        ]
        return self._one(found, "eager draft-extend") if found else None

    # -- the updaters ----------------------------------------------------------------------

    def updater(self, name: str) -> tuple[cst.FunctionDef, cst.Call, cst.FunctionDef]:
        """An updater's `update`, its one call of `call_begin_forward`, and that method."""
        owner = self.source.one_class(name)
        self._refuse_overrides(name)
        update = self.source.one_method(owner, "update")
        begin = self.source.one_method(owner, "call_begin_forward")
        calls = calls_of(update, "call_begin_forward")
        call = self.source.exactly_one(
            calls,
            f"call of call_begin_forward in {name}.update",
            line=self.source.first(update),
        )
        return update, call, begin

    def _refuse_overrides(self, name: str) -> None:
        """Refuse if a class of the file derives from an updater and replaces its methods: they
        would be handed a request that they do not take."""
        for derived in self.source.classes():
            if not any(is_name(base.value, name) for base in derived.bases):
                continue
            for method in self.source.methods(derived):
                if method.name.value in ("update", "call_begin_forward"):
                    raise Refused(
                        "anchor-changed",
                        f"{derived.name.value} derives from {name} and replaces "
                        f"{method.name.value}; it would be handed a request that it does not take",
                        self.source.first(method),
                    )

    def heads_of(self, name: str, receiver: str) -> str:
        """The attribute of an updater that it plans with as num_heads, such as
        `num_local_heads`; Refused where the plan call passes something else."""
        _, _, begin = self.updater(name)
        call = find_plan_call(self.source, begin, receiver)
        text = call.arguments["num_heads"]
        attribute = text.removeprefix("self.")
        if not text.startswith("self.") or not attribute.isidentifier():
            raise Refused(
                "anchor-changed",
                f"{name} plans with num_heads={text}; expected an attribute of its own",
                call.line,
            )
        return attribute

    # -- helpers ---------------------------------------------------------------------------

    def require_names(self, function: cst.FunctionDef, *names: str) -> None:
        """Refuse unless each of `names` is a parameter or local of `function`."""
        bound = self._bound.get(function)
        if bound is None:
            bound = self._bound[function] = bound_names(function)
        for name in names:
            if name not in bound:
                raise Refused(
                    "anchor-changed",
                    f"{function.name.value} no longer has a local or parameter {name}",
                    self.source.first(function),
                    "describe the fork's name to mlagen, or patch this site by hand",
                )

    def _updates(self, updater: str) -> list[CallSite]:
        return [
            site
            for site in self.calls
            if self.source.code(site.call.func) == f"self.{updater}.update"
        ]

    def _replays(self, site: CallSite) -> bool:
        return self._is(site, "init_metadata_replay", "True")

    def _is(self, site: CallSite, keyword: str, code: str) -> bool:
        value = site.argument(keyword)
        return value is not None and self.source.code(value) == code

    def _one(self, found: list[CallSite], what: str) -> CallSite:
        if not found:
            raise Refused(
                "anchor-missing",
                f"looked for {what}, found none{self._nearest(what)}",
                self.source.first(self.backend_class),
                "a fork? the other variants can go in with --only; docs/architecture.md says "
                "where a new shape goes",
            )
        statement = self.source.exactly_one(
            [site.statement for site in found], what, line=self.source.first(self.backend_class)
        )
        return next(site for site in found if site.statement is statement)

    def _nearest(self, what: str) -> str:
        """The calls of the updater that `what` names, to look at."""
        for updater in ("indices_updater_decode", "indices_updater_prefill"):
            if updater in what:
                lines = [str(self.source.first(site.statement)) for site in self._updates(updater)]
                if lines:
                    return f"; {updater}.update is called in lines {', '.join(lines)}"
                return f"; {updater}.update is not called at all"
        return ""


def installs_plan(statement: cst.BaseStatement, wrapper: str) -> bool:
    """Whether a statement is `<wrapper>.plan = partial(...)`."""
    made = assigned(statement)
    if made is None or len(made[0]) != 1:
        return False
    target = made[0][0]
    return (
        isinstance(target, cst.Attribute)
        and is_name(target.value, wrapper)
        and target.attr.value == "plan"
        and is_call(made[1], "partial")
    )


def bound_names(function: cst.FunctionDef) -> set[str]:
    """Parameters of `function` and names that it assigns."""
    params = function.params
    names = {p.name.value for p in (*params.params, *params.kwonly_params, *params.posonly_params)}
    for node in walk(function.body):
        if isinstance(node, cst.AssignTarget) and isinstance(node.target, cst.Name):
            names.add(node.target.value)
    return names


def _wrapper_assignments(source: Source, branch: cst.If) -> list[cst.Assign]:
    return [
        inner
        for test, body in branches(branch)
        if test is not None and ".is_target_verify()" in source.code(test)
        for inner in walk(body)
        if isinstance(inner, cst.Assign)
        and assigned_name(inner) is not None
        and is_call(inner.value, "BatchMLAPagedAttentionWrapper")
    ]


def _collect(
    source: Source,
    function: cst.FunctionDef,
    body: cst.BaseSuite,
    tests: tuple[str, ...],
    collected: list[CallSite],
) -> None:
    if not isinstance(body, cst.IndentedBlock):
        return
    for index, statement in enumerate(body.body):
        if isinstance(statement, cst.SimpleStatementLine):
            small = alone(statement)
            if isinstance(small, cst.Expr) and isinstance(small.value, cst.Call):
                collected.append(
                    CallSite(small.value, statement, function, tests, body.body, index)
                )
        elif isinstance(statement, cst.If):
            for test, branch in branches(statement):
                holds = tests if test is None else (*tests, source.code(test))
                _collect(source, function, branch, holds, collected)
        elif isinstance(statement, (cst.With, cst.For, cst.While, cst.FunctionDef, cst.Try)):
            _collect(source, function, statement.body, tests, collected)
