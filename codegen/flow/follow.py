"""Follows a call through methods, objects and helper modules, with what is a device tensor.

A light interpreter over `ast`: it runs nothing, knows constants, which tensors are on the device,
and what objects hold; of an `if` whose test it cannot decide it takes both ways, and joins what
they leave. Ways that end in `raise`, and `except` blocks, are left out: a plan that fails may wait.
Functions that are given no tensor, and no object, are not followed: they have nothing to wait for.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from ..flashinfer.syntax import ClassView, FunctionNode, MethodOf, Module
from .calls import Calls
from .expressions import fields_of
from .state import (
    Condition,
    Flow,
    Frame,
    joined,
    kept,
    key_of,
    shown,
    without,
)
from .values import (
    ANYTHING,
    NONE,
    Anything,
    Arguments,
    Class,
    Closure,
    Group,
    Known,
    Object,
    Tensor,
    Unset,
    Value,
    join,
    options,
)

_DEEPEST = 40


class Follower(Calls):
    """One walk, from an entry to its end."""

    def create(self, view: ClassView, given: Arguments) -> Object:
        """An instance of a class, through its `__init__` or its fields."""
        made = self.make(view.node.name, view)
        init = view.method("__init__")
        if init is not None:
            self.enter(init, made, given)
            return made
        fields = list(fields_of(self.modules, view))
        for position, (name, default, module) in enumerate(fields):
            value = given.get(position, name)
            if value is None and default is not None:
                value = self.in_module(module, default)
            self.set(made, name, ANYTHING if value is None else value)
        after = view.method("__post_init__")
        if after is not None:
            self.enter(after, made, Arguments())
        return made

    def call(self, on: Object, name: str, given: Arguments) -> Value:
        """Call a method of an object. Raises KeyError where its class has none of that name."""
        method = on.view.method(name) if on.view is not None else None
        if method is None:
            raise KeyError(name)
        if not self.frames:  # an entry; the one before may have been given up
            self.failed, self.steps, self.loops = False, 0, 0
            self.conditions.clear()
        return self.enter(method, on, given)

    # --- functions ----------------------------------------------------------------------------

    def enter(self, method: MethodOf, bound: Value | None, given: Arguments) -> Value:
        positional = given.positional
        if method.owner is not None and not method.is_decorated("staticmethod"):
            if method.is_decorated("classmethod") and isinstance(bound, Object) and bound.view:
                bound = Class(bound.view, bound.view.node.name)
            if bound is not None:
                positional = (bound, *positional)
        name = method.node.name
        if method.owner is not None:
            name = f"{method.owner.name}.{name}"
        names = self._bound(
            method.node, replace(given, positional=positional), method.module, method.owner
        )
        return self._run(name, method.module, method.owner, method.node, names)

    def enter_closure(self, closure: Closure, given: Arguments) -> Value:
        """Follow a lambda or an inner function."""
        names = self._bound(closure.node, given, closure.module, closure.owner)
        name = getattr(closure.node, "name", "<lambda>")
        outer = {**closure.names, **names}
        return self._run(name, closure.module, closure.owner, closure.node, outer)

    def _run(
        self,
        name: str,
        module: Module,
        owner: ast.ClassDef | None,
        node: ast.Lambda | FunctionNode,
        names: dict[str, Value],
    ) -> Value:
        if len(self.frames) >= _DEEPEST or sum(f.node is node for f in self.frames) > 2:
            return ANYTHING
        frame = Frame(name, module, owner, names, node, len(self.conditions))
        self.frames.append(frame)
        try:
            if isinstance(node, ast.Lambda):
                return self.value(node.body)
            flow = self._block(node.body)
            if flow is Flow.FALLS:
                frame.exits.append((NONE, self.heap))
            if not frame.exits:
                self.failed = self.failed or len(self.frames) == 1
                return ANYTHING
            self.heap = joined([heap for _, heap in frame.exits])
            return join(value for value, _ in frame.exits)
        finally:
            del self.conditions[frame.conditions :]
            self.frames.pop()

    def _bound(
        self,
        node: ast.Lambda | FunctionNode,
        given: Arguments,
        module: Module,
        owner: ast.ClassDef | None,
    ) -> dict[str, Value]:
        """The parameters of a function with what a call gives them, or their defaults."""
        spec = node.args
        names: dict[str, Value] = {}
        places = [*spec.posonlyargs, *spec.args]
        defaults: list[ast.expr | None] = [None] * (len(places) - len(spec.defaults))
        defaults += spec.defaults
        rest = dict(given.keywords)
        for position, (argument, default) in enumerate(zip(places, defaults, strict=True)):
            if position < len(given.positional):
                names[argument.arg] = given.positional[position]
            else:
                names[argument.arg] = self._given(argument, default, rest, given, module)
        for argument, default in zip(spec.kwonlyargs, spec.kw_defaults, strict=True):
            names[argument.arg] = self._given(argument, default, rest, given, module)
        if spec.vararg is not None:
            names[spec.vararg.arg] = Group(given.positional[len(places) :])
        if spec.kwarg is not None:
            names[spec.kwarg.arg] = self.dict_of(rest)
        return names

    def _given(
        self,
        argument: ast.arg,
        default: ast.expr | None,
        rest: dict[str, Value],
        given: Arguments,
        module: Module,
    ) -> Value:
        if argument.arg in rest:
            return rest.pop(argument.arg)
        if default is not None and not given.open:
            return self.in_module(module, default)
        return self.world.named(argument.arg) or ANYTHING

    # --- statements ---------------------------------------------------------------------------

    def _block(self, body: Sequence[ast.stmt]) -> Flow:
        for statement in body:
            flow = self._statement(statement)
            if flow is not Flow.FALLS:
                return flow
        return Flow.FALLS

    def _statement(self, node: ast.stmt) -> Flow:
        self.stepped()
        if isinstance(node, ast.Return):
            value = self.value(node.value) if node.value is not None else NONE
            self.frames[-1].exits.append((value, self.snapshot()))
            return Flow.LEAVES
        if isinstance(node, ast.Raise):
            return Flow.FAILS
        if isinstance(node, ast.Break | ast.Continue):
            return Flow.LEAVES
        if isinstance(node, ast.If):
            return self._if(node)
        if isinstance(node, ast.For | ast.AsyncFor):
            return self._for(node)
        if isinstance(node, ast.While):
            self.test(node.test)
            with self._looping():
                return self._maybe(node.body)
        if isinstance(node, ast.With | ast.AsyncWith):
            for item in node.items:
                value = self.value(item.context_expr)
                if item.optional_vars is not None:
                    self.assign(item.optional_vars, value)
            return self._block(node.body)
        if isinstance(node, ast.Try):
            return self._try(node)
        if isinstance(node, ast.Assert):
            self.test(node.test)
        elif isinstance(node, ast.Expr):
            self.value(node.value)
        elif isinstance(node, ast.Assign):
            value = self.value(node.value)
            for target in node.targets:
                self.assign(target, value)
        elif isinstance(node, ast.AnnAssign):
            if node.value is not None:
                self.assign(node.target, self.value(node.value))
        elif isinstance(node, ast.AugAssign):
            value = self.operated([self.value(node.target), self.value(node.value)])
            self.assign(node.target, value)
        elif isinstance(node, ast.FunctionDef):
            frame = self.frames[-1]
            frame.names[node.name] = Closure(node, frame.module, frame.names, frame.owner)
        elif isinstance(node, ast.Delete):
            pass
        return Flow.FALLS

    def _try(self, node: ast.Try) -> Flow:
        flow = self._block(node.body)
        if flow is Flow.FALLS:
            flow = self._block(node.orelse)
        last = self._block(node.finalbody)
        return last if last is not Flow.FALLS else flow

    def _if(self, node: ast.If) -> Flow:
        decided = self.test(node.test)
        if decided is not None:
            return self._block(node.body if decided else node.orelse)
        return self._both(
            node.test, lambda: self._block(node.body), lambda: self._block(node.orelse)
        )

    def _both(self, test: ast.expr, first: Callable[[], Flow], second: Callable[[], Flow]) -> Flow:
        """Both ways of a test; joined where both go on."""
        frame = self.frames[-1]
        number, told = self.number(), shown(test)
        heap, names = self.snapshot(), dict(frame.names)
        start = len(self.waits)
        exits = len(frame.exits)
        self.conditions.append(Condition(number, told, True))
        depth = len(self.conditions)
        one = first()
        del self.conditions[depth - 1 :]
        if one is Flow.FAILS:
            del self.waits[start:], frame.exits[exits:]
            self.heap, frame.names = heap, kept(frame.names, names)
            return second()
        heap_one, names_one = self.heap, dict(frame.names)
        self.heap, frame.names = heap, kept(frame.names, names)
        middle, exits = len(self.waits), len(frame.exits)
        self.conditions.append(Condition(number, told, False))
        two = second()
        if two is Flow.FAILS:
            del self.conditions[depth - 1 :], self.waits[middle:], frame.exits[exits:]
            self.waits[start:] = [without(wait, number) for wait in self.waits[start:]]
            self.heap, frame.names = heap_one, kept(frame.names, names_one)
            return one
        if one is Flow.LEAVES and two is Flow.FALLS:
            return Flow.FALLS  # what follows is under the second way: its condition stays
        del self.conditions[depth - 1 :]
        if two is Flow.LEAVES and one is Flow.FALLS:
            self.heap, frame.names = heap_one, kept(frame.names, names_one)
            self.conditions.append(Condition(number, told, True))
            return one
        self.heap = joined([heap_one, self.heap])
        merged = {  # a name that one way leaves unbound would raise there
            name: join(one[name] for one in (names_one, frame.names) if name in one)
            for name in {**names_one, **frame.names}
        }
        frame.names = kept(frame.names, merged)
        return one

    def _maybe(self, body: Sequence[ast.stmt]) -> Flow:
        """A body that may run once, or often, or not at all."""
        flow = self._block(body)
        return Flow.FALLS if flow is not Flow.FAILS else flow

    @contextmanager
    def _looping(self) -> Iterator[None]:
        self.loops += 1
        depth = len(self.conditions)
        try:
            yield
        finally:
            self.loops -= 1
            del self.conditions[depth:]

    def _for(self, node: ast.For | ast.AsyncFor) -> Flow:
        over = self.value(node.iter)
        rounds = self.items(over)
        depth = len(self.conditions)
        if rounds is not None:
            for item in rounds:
                self.assign(node.target, item)
                flow = self._block(node.body)
                del self.conditions[depth:]
                if flow is Flow.FAILS:
                    return flow
                if flow is Flow.LEAVES and self._returned(node):
                    return flow
            return self._block(node.orelse)
        with self._looping():
            self.assign(node.target, self.element(over))
            self._maybe(node.body)
        return self._block(node.orelse)

    @staticmethod
    def _returned(node: ast.For | ast.AsyncFor) -> bool:
        """Whether a body that left did so by `return` alone."""
        parts = [part for statement in node.body for part in ast.walk(statement)]
        return not any(isinstance(part, ast.Break | ast.Continue) for part in parts)

    def assign(self, target: ast.expr, value: Value) -> None:
        if isinstance(target, ast.Name):
            if isinstance(value, Anything):
                value = self.world.named(target.id) or value
            self.frames[-1].names[target.id] = value
        elif isinstance(target, ast.Starred):
            self.assign(target.value, ANYTHING)
        elif isinstance(target, ast.Tuple | ast.List):
            parts: Sequence[Value] = [self.element(value)] * len(target.elts)
            if isinstance(value, Group) and len(value.items) == len(target.elts):
                parts = value.items
            elif isinstance(value, Tensor):
                parts = [value] * len(target.elts)
            for part, item in zip(target.elts, parts, strict=True):
                self.assign(part, item)
        elif isinstance(target, ast.Attribute):
            on = self.value(target.value)
            if isinstance(value, Anything):
                value = self.world.named(target.attr) or value
            objects = [o for o in options(on) if isinstance(o, Object)]
            for item in objects:
                old = self.heap[item.ref].get(target.attr)
                new = value if len(objects) == 1 else join([old or Unset(), value])
                self.set(item, target.attr, new)
        elif isinstance(target, ast.Subscript):
            self._store(target, value)

    def _store(self, target: ast.Subscript, value: Value) -> None:
        on, index = self.value(target.value), self.index(target.slice)
        for item in options(on):
            if isinstance(item, Object):
                key = key_of(index.value) if isinstance(index, Known) else "*"
                old = self.heap[item.ref].get(key)
                self.set(item, key, value if old is None or key != "*" else join([old, value]))
            elif isinstance(item, Tensor):
                for given in options(value):
                    if isinstance(given, Tensor) and given.place != item.place:
                        if not (given.place == "host" and given.scalar):
                            self.wait("copy", target, maybe=value)
                        break
                self.selected(item, index, target)
