"""What the edit sites share: the calls through which every plan of the back end goes.

The anchors are structural. Each call of an indices updater tells by its own arguments what
it serves: `init_metadata_replay=True` is a decode replay in every release, whatever the
method around it is called; the wrapper that is handed over tells the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import libcst as cst

from ..fork import RELEASED, Names
from .nodes import (
    alone,
    asserted,
    assigned,
    assigned_name,
    bound_by,
    branches,
    calls_of,
    chooses,
    contains,
    denied,
    is_call,
    is_name,
    mentions,
    self_attribute,
    walk,
)
from .plan_call import find_plan_call
from .source import Refused, Source

#: The argument by which the prefill updater is handed a wrapper.
_PAGED = "prefill_wrapper_paged"


@dataclass(frozen=True)
class CallSite:
    """A call that is a statement, and where it stands.

    `tests` are the conditions that hold there, outermost first; `block` are the statements
    around it and `index` is its place among them.
    """

    call: cst.Call
    statement: cst.SimpleStatementLine
    function: cst.FunctionDef
    tests: tuple[cst.BaseExpression, ...]
    block: Sequence[cst.BaseStatement]
    index: int

    def argument(self, keyword: str) -> cst.BaseExpression | None:
        """The value of a keyword argument."""
        for arg in self.call.args:
            if arg.keyword is not None and arg.keyword.value == keyword:
                return arg.value
        return None

    def resolved(self, keyword: str) -> cst.BaseExpression | None:
        """The value of a keyword argument; behind a local that only stands for
        `self.<attribute>` or an entry of it, what the local stands for."""
        value = self.argument(keyword)
        if not isinstance(value, cst.Name) or value.value in _parameters(self.function):
            return value
        made = [node for node in walk(self.function.body) if value.value in bound_by(node)]
        if len(made) == 1 and isinstance(made[0], cst.Assign) and assigned_name(made[0]):
            stands_for = made[0].value
            entry = stands_for.value if isinstance(stands_for, cst.Subscript) else stands_for
            if self_attribute(entry) is not None:
                return stands_for
        return value

    def is_local(self, keyword: str) -> bool:
        """Whether an argument is a local, and not just another name for an attribute."""
        named = isinstance(self.argument(keyword), cst.Name)
        return named and not isinstance(self.resolved(keyword), cst.Attribute)

    def under(self, predicate: str) -> bool:
        """Whether a condition that holds here calls `predicate`."""
        return any(predicate in asserted(test) for test in self.tests)

    def only(self, predicate: str) -> bool:
        """Whether a condition that holds here calls `predicate`, and no other case shares it."""
        return any(predicate in asserted(test) and not chooses(test) for test in self.tests)


@dataclass(frozen=True)
class Backend:
    """The back end's file with its plan sites found. Each property finds or refuses.

    `names` are what the file calls its anchors: SGLang's names, or those of a fork.
    """

    source: Source
    names: Names = RELEASED

    @cached_property
    def _bound(self) -> dict[cst.FunctionDef, set[str]]:
        """Names bound in a function, looked up once a function."""
        return {}

    @cached_property
    def backend_class(self) -> cst.ClassDef:
        return self.source.one_class(self.names["backend-class"])

    @cached_property
    def has_drafts(self) -> bool:
        """Whether the file has a multi-step draft back end."""
        name = self.names["draft-backend-class"]
        return any(node.name.value == name for node in self.source.classes())

    @cached_property
    def calls(self) -> tuple[CallSite, ...]:
        """Every call statement in the methods of the back end's class, of those that it inherits
        from a class of the file too."""
        self._refuse_shared_bases(self.backend_class)
        collected: list[CallSite] = []
        for method in self.source.inherited(self.backend_class):
            _collect(method, method.body, (), collected)
        return tuple(collected)

    # -- decode ----------------------------------------------------------------------------

    @cached_property
    def decode_replay(self) -> CallSite:
        """`self.indices_updater_decode.update(..., init_metadata_replay=True, ...)`."""
        return self._one(
            [
                site
                for site in self._updates("decode-updater")
                if self._replays(site)
                and self._is_chosen(site, "decode_wrapper", "decode-metadata")
            ],
            "decode-updater",
            f"with init_metadata_replay=True{self._of_what('decode-metadata')}",
        )

    @cached_property
    def decode_eager(self) -> CallSite:
        """The decode update that plans the back end's own eager wrapper."""
        return self._one(
            [
                site
                for site in self._updates("decode-updater")
                if not self._replays(site)
                and self._is(site, "decode_wrapper", f"self.{self.names['decode-wrapper']}")
            ],
            "decode-updater",
            f"with decode_wrapper=self.{self.names['decode-wrapper']}",
        )

    @cached_property
    def decode_capture(self) -> CallSite:
        """The decode update that makes the first plan of a graph's wrapper."""
        return self._one(
            [
                site
                for site in self._updates("decode-updater")
                if not self._replays(site) and site.is_local("decode_wrapper")
            ],
            "decode-updater",
            "for a wrapper being captured",
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
            for owner in self.source.with_bases(self.backend_class)
            for node in walk(owner)
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
        return b".is_target_verify" in self.source.data and any(
            mentions(owner, frozenset({"is_target_verify"}))
            for owner in self.source.with_bases(self.backend_class)
        )

    @cached_property
    def verify_replay(self) -> CallSite:
        """The prefill update that plans a captured verify wrapper at replay.

        A capture may look its wrapper up as well, under a local name: the call that takes it out
        of the dictionary itself comes first.
        """
        verify = [s for s in self._updates("prefill-updater") if s.under("is_target_verify")]
        entries = [s for s in verify if self._is_captured("verify-metadata", s.argument(_PAGED))]
        if not entries:
            entries = [
                s for s in verify if self._is_captured("verify-metadata", s.resolved(_PAGED))
            ]
        return self._one(
            entries,
            "prefill-updater",
            f"for a captured target-verify wrapper{self._of_what('verify-metadata')}",
        )

    @cached_property
    def verify_eager(self) -> CallSite:
        """The prefill update of an eager target-verify."""
        return self._one(
            [
                site
                for site in self._updates("prefill-updater")
                if site.under("is_target_verify")
                and self._is(site, "prefill_wrapper_paged", f"self.{self.names['verify-wrapper']}")
            ],
            "prefill-updater",
            f"with prefill_wrapper_paged=self.{self.names['verify-wrapper']}",
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
            for site in self._updates("prefill-updater")
            if site.under("is_target_verify")
            and site.is_local("prefill_wrapper_paged")
            and site is not self.verify_replay
        ]
        if own:
            site = self._exactly(own, "capture of target-verify")
            wrapper = site.argument("prefill_wrapper_paged")
            assert isinstance(wrapper, cst.Name)
            return site.statement, wrapper.value, site
        shared = self.verify_replay.function.name.value
        site = self._exactly(
            [
                call
                for call in self.calls
                if self.source.code(call.call.func) == f"self.{shared}"
                and any(is_name(test, "in_capture") for test in call.tests)
            ],
            f"call of self.{shared} under `if in_capture:`",
        )
        return site.statement, self._verify_wrapper_name(site), site

    def _verify_wrapper_name(self, site: CallSite) -> str:
        """The local that the verify branch of a capture assigns a new wrapper to."""
        found: list[cst.Assign] = []
        for statement in site.block[: site.index]:
            if isinstance(statement, cst.If):
                found += _wrapper_assignments(statement)
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
                for site in self._updates("prefill-updater")
                if self._is(site, "prefill_wrapper_paged", f"self.{self.names['extend-wrapper']}")
                and not self._is(site, "prefix_lens", "None")
            ],
            "prefill-updater",
            f"with prefix lengths and prefill_wrapper_paged=self.{self.names['extend-wrapper']}",
        )

    @cached_property
    def draft_extend_eager(self) -> CallSite | None:
        """The eager draft-extend of the first EAGLE worker (0.4.4 to 0.5.13), if there."""
        found = [
            site
            for site in self._updates("prefill-updater")
            if self._is(site, "prefill_wrapper_paged", f"self.{self.names['extend-wrapper']}")
            and self._is(site, "prefix_lens", "None")
        ]
        return self._exactly(found, "eager draft-extend") if found else None

    # -- the updaters ----------------------------------------------------------------------

    def updater(self, anchor: str) -> tuple[cst.FunctionDef, cst.Call, cst.FunctionDef]:
        """The `update` of an updater's class, its one call of `call_begin_forward`, and that
        method. `anchor`: decode-updater-class or prefill-updater-class."""
        name = self.names[anchor]
        planning = self.names["plan-method"]
        owner = self.source.one_class(name)
        self._refuse_shared_bases(owner)
        self._refuse_overrides(name)
        update = self.source.one_method(owner, self.names["update-method"])
        begin = self.source.one_method(owner, planning)
        calls = calls_of(update, planning)
        call = self.source.exactly_one(
            calls,
            f"call of {planning} in {name}.{update.name.value}",
            line=self.source.first(update),
        )
        for method in (update, begin):
            self._refuse_narrow_decorators(method)
        return update, call, begin

    def _refuse_overrides(self, name: str) -> None:
        """Refuse if a class of the file derives from an updater and replaces its methods: they
        would be handed a request that they do not take."""
        replaced = (self.names["update-method"], self.names["plan-method"])
        for derived in self.source.classes():
            if not any(is_name(base.value, name) for base in derived.bases):
                continue
            for method in self.source.methods(derived):
                if method.name.value in replaced:
                    raise Refused(
                        "anchor-changed",
                        f"{derived.name.value} derives from {name} and replaces "
                        f"{method.name.value}; it would be handed a request that it does not take",
                        self.source.first(method),
                    )

    def _refuse_shared_bases(self, owner: cst.ClassDef) -> None:
        """Refuse if a base of `owner` in this file is another class's too: its methods are
        edited for `owner` alone."""
        family = self.source.with_bases(owner)
        for other in self.source.classes():
            above = self.source.with_bases(other)
            if other in family or owner in above:
                continue
            shared = next((base for base in family[1:] if base in above), None)
            if shared is not None:
                raise Refused(
                    "anchor-changed",
                    f"{other.name.value} and {owner.name.value} both derive from "
                    f"{shared.name.value}, whose methods plan; they can be edited for one alone",
                    self.source.first(other),
                    f"give {owner.name.value} methods of its own, or patch this site by hand",
                )

    def _refuse_narrow_decorators(self, method: cst.FunctionDef) -> None:
        """Refuse if a decorator made in this file calls `method` with fixed parameters: the
        request would not come through."""
        for decorator in method.decorators:
            used = decorator.decorator
            name = used.func if isinstance(used, cst.Call) else used
            made = [f for f in self.source.functions() if is_name(name, f.name.value)]
            for inner in (node for f in made for node in walk(f.body)):
                if isinstance(inner, cst.FunctionDef) and self._is_narrow(inner):
                    raise Refused(
                        "anchor-changed",
                        f"{method.name.value} is decorated by {self.source.code(name)}, whose "
                        f"{inner.name.value} passes no other keyword on",
                        self.source.first(decorator),
                        "let it take and pass on **kwargs",
                    )

    def _is_narrow(self, inner: cst.FunctionDef) -> bool:
        """Whether a function inside a decorator takes a call's arguments but no other keyword.
        One that takes a function is the decorator itself."""
        params = (*inner.params.params, *inner.params.kwonly_params)
        takes_self = bool(params) and is_name(params[0].name, "self")
        spread = isinstance(inner.params.star_arg, cst.Param)
        return inner.params.star_kwarg is None and (takes_self or spread)

    def refuse_half_replaced(self) -> None:
        """Refuse if a class of the file derives from the back end and replaces its capture, but
        not the replay: that would find graphs that mlagen has not captured."""
        replay = self.decode_replay.function.name.value
        capture = self.decode_capture.function
        name = capture.name.value
        shared = bool(calls_of(capture, replay, "self"))
        for derived in self.source.classes():
            if self.backend_class not in self.source.with_bases(derived)[1:]:
                continue
            methods = {method.name.value: method for method in self.source.methods(derived)}
            own = methods.get(name)
            if own is None or replay in methods or _calls_super(own, name):
                continue
            if not shared or calls_of(own, replay, "self"):
                raise Refused(
                    "anchor-changed",
                    f"{derived.name.value} replaces {name} without calling it and keeps {replay}, "
                    "which would find graphs that mlagen has not captured",
                    self.source.first(own),
                    f"let it call super().{name}, or replace {replay} as well",
                )

    def heads_of(self, anchor: str, receiver: str) -> str:
        """The attribute of an updater that it plans with as num_heads, such as
        `num_local_heads`; Refused where the plan call passes something else."""
        name = self.names[anchor]
        _, _, begin = self.updater(anchor)
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
                    f"assign {name} ahead of this site, or patch it by hand",
                )

    def page_table(self) -> Literal["pool", "updater"]:
        """Who holds SGLang's page table, `req_to_token`, within reach of a capture: the back end's
        `req_to_token_pool`, or its decode updater. A graph that plans itself is laid out for the
        lengths that a row has room for. The model's context is shorter: under speculation a request
        may run past it before the host sees that it has ended, and the rows allow for that.
        """
        if self._init_sets(self.backend_class, "req_to_token_pool"):
            return "pool"
        updater = self.source.one_class(self.names["decode-updater-class"])
        if self._init_sets(updater, "req_to_token"):
            return "updater"
        raise Refused(
            "anchor-missing",
            f"looked for self.req_to_token_pool in {self.backend_class.name.value}.__init__ and "
            f"for self.req_to_token in {updater.name.value}.__init__, found neither",
            self.source.first(self.backend_class),
            "set one there, or let the variant be planned by the host (planner: host)",
        )

    def _init_sets(self, owner: cst.ClassDef, attribute: str) -> bool:
        return any(
            method.name.value == "__init__" and _sets(method, attribute)
            for base in self.source.with_bases(owner)
            for method in self.source.methods(base)
        )

    def replaced_in(self, name: str) -> tuple[cst.ClassDef, cst.FunctionDef] | None:
        """A class of the file that derives from the back end and has a method `name` that does
        not call the back end's."""
        for derived in self.source.classes():
            if self.backend_class not in self.source.with_bases(derived)[1:]:
                continue
            for method in self.source.methods(derived):
                if method.name.value == name and not _calls_super(method, name):
                    return derived, method
        return None

    def _updates(self, anchor: str) -> list[CallSite]:
        wanted = self._update_of(anchor)
        return [site for site in self.calls if self.source.code(site.call.func) == f"self.{wanted}"]

    def _update_of(self, anchor: str) -> str:
        """`indices_updater_decode.update`, as the file calls it."""
        return f"{self.names[anchor]}.{self.names['update-method']}"

    def _replays(self, site: CallSite) -> bool:
        return self._is(site, "init_metadata_replay", "True")

    def _is(self, site: CallSite, keyword: str, code: str) -> bool:
        value = site.resolved(keyword)
        return value is not None and self.source.code(value) == code

    def _is_chosen(self, site: CallSite, keyword: str, anchor: str) -> bool:
        """Whether a fork's override of `anchor`, if it has one, means this call."""
        chosen = anchor in self.names.overrides
        return not chosen or self._is_captured(anchor, site.resolved(keyword))

    def _is_captured(self, anchor: str, value: cst.BaseExpression | None) -> bool:
        """Whether a wrapper is an entry of a dictionary: of any, or of the one that a fork's
        override of `anchor` names."""
        if anchor not in self.names.overrides:
            return isinstance(value, cst.Subscript)
        entry = False  # of the dictionary, and not the dictionary
        while isinstance(value, (cst.Subscript, cst.Call, cst.Attribute)):
            if self_attribute(value) == self.names[anchor]:
                return entry
            entry = entry or not isinstance(value, cst.Attribute)
            value = value.func if isinstance(value, cst.Call) else value.value
        return False

    def _of_what(self, anchor: str) -> str:
        named = anchor in self.names.overrides
        return f" from self.{self.names[anchor]}" if named else ""

    def _one(self, found: list[CallSite], anchor: str, which: str) -> CallSite:
        """The one call of an updater's `update`, or Refused with the other calls of it."""
        called = self._update_of(anchor)
        near = "" if found else f"; {self._elsewhere(called)}"  # looked for in the whole file
        return self._exactly(found, f"call of {called} {which}", near)

    def _exactly(self, found: list[CallSite], what: str, near: str = "") -> CallSite:
        if not found:
            raise Refused(
                "anchor-missing",
                f"looked for {what}, found none{near}",
                self.source.first(self.backend_class),
                "a fork? `fork: anchors:` in variants.yaml can name what it renamed "
                "(docs/forks.md); the other variants can go in with --only",
            )
        statement = self.source.exactly_one(
            [site.statement for site in found], what, line=self.source.first(self.backend_class)
        )
        return next(site for site in found if site.statement is statement)

    def _elsewhere(self, called: str) -> str:
        """Where `called` is called in the file, to look at: where it could be edited, and where
        it could not, since it is no statement of a method of the back end."""
        attribute, method = called.split(".")
        all_calls = [
            self.source.first(call)
            for call in calls_of(self.source.module, method)
            if isinstance(call.func, cst.Attribute)
            and isinstance(call.func.value, cst.Attribute)
            and call.func.value.attr.value == attribute
        ]
        if not all_calls:
            return f"{called} is not called at all"
        reached = {self.source.first(site.call) for site in self.calls}
        others = [str(line) for line in all_calls if line not in reached]
        text = f"{called} is called in lines {', '.join(map(str, all_calls))}"
        if others:
            owner = self.backend_class.name.value
            text += f", of which {', '.join(others)} are no plain statements of {owner}"
        return text


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
    names = _parameters(function)
    for node in walk(function.body):
        if isinstance(node, cst.AssignTarget) and isinstance(node.target, cst.Name):
            names.add(node.target.value)
    return names


def _parameters(function: cst.FunctionDef) -> set[str]:
    params = function.params
    return {p.name.value for p in (*params.params, *params.kwonly_params, *params.posonly_params)}


def _calls_super(method: cst.FunctionDef, name: str) -> bool:
    """Whether `method` calls `super().<name>(...)`, or `<Class>.<name>(self, ...)`."""
    return any(
        isinstance(call.func, cst.Attribute) and not is_name(call.func.value, "self")
        for call in calls_of(method, name)
    )


def _sets(method: cst.FunctionDef, attribute: str) -> bool:
    """Whether `method` assigns `self.<attribute>`."""
    return any(
        isinstance(node, (cst.AssignTarget, cst.AnnAssign))
        and self_attribute(node.target) == attribute
        for node in walk(method.body)
    )


def _wrapper_assignments(branch: cst.If) -> list[cst.Assign]:
    return [
        inner
        for test, body in branches(branch)
        if test is not None and "is_target_verify" in asserted(test)
        for inner in walk(body)
        if isinstance(inner, cst.Assign)
        and assigned_name(inner) is not None
        and is_call(inner.value, "BatchMLAPagedAttentionWrapper")
    ]


def _collect(
    function: cst.FunctionDef,
    body: cst.BaseSuite,
    tests: tuple[cst.BaseExpression, ...],
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
            held = tests  # and what a `not` of the tests before it leaves
            for test, branch in branches(statement):
                _collect(function, branch, held if test is None else (*held, test), collected)
                otherwise = None if test is None else denied(test)
                held = held if otherwise is None else (*held, otherwise)
        elif isinstance(statement, (cst.With, cst.For, cst.While, cst.FunctionDef, cst.Try)):
            _collect(function, statement.body, tests, collected)
