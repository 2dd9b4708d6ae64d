"""The calls of a walk: what is called, and what it does to tensors."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from dataclasses import replace

from . import tensors
from .expressions import Expressions, truth
from .state import Condition, Heap, joined, key_of
from .values import (
    ANYTHING,
    DATA,
    NONE,
    Arguments,
    Class,
    Closure,
    Either,
    Function,
    Group,
    Known,
    Library,
    Object,
    Partial,
    Tensor,
    Unset,
    Value,
    first_tensor,
    join,
    on_device,
    options,
    where_set,
)


class Calls(Expressions):
    # --- calls --------------------------------------------------------------------------------

    def _arguments(self, node: ast.Call) -> Arguments:
        positional: list[Value] = []
        keywords: dict[str, Value] = {}
        is_open = False
        for argument in node.args:
            value = self.value(argument)
            if not isinstance(argument, ast.Starred):
                positional.append(value)
            elif isinstance(value, Group):
                positional += value.items
            else:
                is_open = True
        for part in node.keywords:
            value = self.value(part.value)
            if part.arg is not None:
                keywords[part.arg] = value
            elif isinstance(value, Object):
                items = self.heap[value.ref].items()
                keywords.update({k[1:]: v for k, v in items if k.startswith("'")})
                is_open = is_open or "*" in self.heap[value.ref]
            else:
                is_open = True
        return Arguments(tuple(positional), keywords, is_open)

    def _call(self, node: ast.Call) -> Value:
        if isinstance(node.func, ast.Attribute):
            if _is_super(node.func.value):
                return self._super(node.func.attr, self._arguments(node))
            on = self.value(node.func.value)
            given = self._arguments(node)
            name = node.func.attr
            return self._each(on, lambda option: self._method(option, name, given, node, on))
        function = self.value(node.func)
        if isinstance(node.func, ast.Name):
            plain = isinstance(function, Library) and function.name == f"?.{node.func.id}"
            given = self._arguments(node)
            answer = self.world.answer(self, None, node.func.id, given, node)
            if answer is not None:
                return answer
            if plain:
                return self._builtin(node.func.id, given, node)
        else:
            given = self._arguments(node)
        return self.invoke(function, given, node)

    def _each(self, value: Value, work: Callable[[Value], Value]) -> Value:
        """Do `work` with each option of a value; of what is no tensor only one is gone."""
        choices = options(value)
        followed = [o for o in choices if isinstance(o, Object | Function | Closure | Partial)]
        if len(choices) == 1 or not followed:
            return join(work(option) for option in choices)
        results: list[Value] = []
        heaps: list[Heap] = []
        before, depth = self.heap, len(self.conditions)
        for option in choices:
            self.heap = self.snapshot(before)
            last = option is choices[-1]
            number, told = self.number(), f"it is {_called(option)}"
            if not last:
                self.conditions.append(Condition(number, told, True))
            results.append(work(option))
            if not last:
                self.conditions[-1] = Condition(number, told, False)
            heaps.append(self.heap)
        del self.conditions[depth:]
        self.heap = joined(heaps)
        return join(results)

    def _super(self, name: str, given: Arguments) -> Value:
        frame = self.frames[-1]
        first = next(iter(frame.names.values()), ANYTHING)
        view = first.view if isinstance(first, Object | Class) else None
        method = view.method(name, above=frame.owner) if view and frame.owner else None
        return self.enter(method, first, given) if method is not None else ANYTHING

    def _method(
        self, on: Value, name: str, given: Arguments, node: ast.Call, whole: Value
    ) -> Value:
        answer = self.world.answer(self, on, name, given, node)
        if answer is not None:
            return answer
        if isinstance(on, Tensor):
            return self._effect(tensors.method(name, on, given), node, (whole, *given.all))
        if isinstance(on, Object) and on.view is None and on.label in ("dict", "list"):
            return self._container(on, name, given)
        if isinstance(on, Library) and on.name == "object" and name == "__setattr__":
            return self._builtin("setattr", given, node)
        if isinstance(on, Library) and on.name == "?.object":
            return self._builtin(name.strip("_").replace("getattribute", "getattr"), given, node)
        if name == "synchronize":
            self.wait("synchronize", node)
            return ANYTHING
        return self.invoke(self.part(on, name), given, node)

    def _container(self, on: Object, name: str, given: Arguments) -> Value:
        items = self.heap[on.ref]
        first = given.get(0)
        if name == "append" and first is not None:
            items["*"] = join([items["*"], first]) if "*" in items else first
        elif name == "update":
            for value in options(first) if first is not None else ():
                if isinstance(value, Object):
                    items.update(self.heap[value.ref])
            items.update({key_of(k): v for k, v in given.keywords.items()})
        elif name in ("get", "pop", "setdefault") and first is not None:
            key = key_of(first.value) if isinstance(first, Known) else "*"
            return items.get(key) or (
                given.get(1) or NONE if name != "get" or not items else ANYTHING
            )
        elif name == "values":
            return join(items.values()) if items else ANYTHING
        return ANYTHING

    def _effect(self, effect: tensors.Effect, node: ast.Call, among: Sequence[Value]) -> Value:
        if effect.kind is not None:
            unsure = [v for v in among if on_device(v) is None]
            sure = [v for v in among if on_device(v)]
            self.wait(effect.kind, node, maybe=unsure[0] if unsure and not sure else None)
        return effect.result

    def invoke(self, function: Value, given: Arguments, node: ast.Call) -> Value:
        """Call a value."""
        if isinstance(function, Either):
            return self._each(function, lambda option: self.invoke(option, given, node))
        if isinstance(function, Library):
            root, _, name = function.name.partition(".")
            if root == "torch":
                return self._effect(tensors.function(name, given), node, given.all)
            if name == "partial" and given.positional:
                rest = replace(given, positional=given.positional[1:])
                return Partial(given.positional[0], rest)
            return ANYTHING
        if isinstance(function, Partial):
            mine = function.arguments
            return self.invoke(
                function.function,
                Arguments(
                    (*mine.positional, *given.positional),
                    {**mine.keywords, **given.keywords},
                    mine.open or given.open,
                ),
                node,
            )
        if isinstance(function, Class):
            return self.create(function.view, given)
        if isinstance(function, Closure):
            return self.enter_closure(function, given)
        if isinstance(function, Function):
            if function.bound is None and not any(self._carries(v) for v in given.all):
                return ANYTHING
            return self.enter(function.method, function.bound, given)
        return ANYTHING

    def _carries(self, value: Value) -> bool:
        """Whether a value is or holds something to wait for."""
        if isinstance(value, Either | Group):
            parts = value.options if isinstance(value, Either) else value.items
            return any(self._carries(part) for part in parts)
        return isinstance(value, Tensor | Object | Closure | Partial)

    def _builtin(self, name: str, given: Arguments, node: ast.Call) -> Value:
        first, second = given.get(0), given.get(1)
        if name in ("int", "float", "bool", "complex", "str", "repr", "format", "range", "round"):
            for value in given.positional:
                if first_tensor([value], lambda t: t.place == "device"):
                    self.wait("bool" if name == "bool" else "number", node, maybe=value)
            if name == "bool" and first is not None and (held := truth(first)) is not None:
                return Known(held)
            return DATA
        if name in ("any", "all", "min", "max", "sorted", "set", "print"):
            return self._aggregate(name, given, node)
        if name == "isinstance" and first is not None and second is not None:
            return self._is_instance(first, second)
        if name == "len" and isinstance(first, Group):
            return Known(len(first.items))
        if name in ("tuple", "list", "reversed", "iter"):
            if isinstance(first, Group):
                return Group(first.items[::-1]) if name == "reversed" else first
            return first if isinstance(first, Tensor) else ANYTHING
        if name == "zip" and all(isinstance(v, Group) for v in given.positional):
            groups = [v.items for v in given.positional if isinstance(v, Group)]
            if len({len(group) for group in groups}) == 1:
                return Group(tuple(Group(row) for row in zip(*groups, strict=True)))
            return ANYTHING
        if name == "enumerate" and isinstance(first, Group):
            return Group(tuple(Group((Known(n), v)) for n, v in enumerate(first.items)))
        if name in ("getattr", "hasattr", "setattr"):
            return self._by_name(name, given)
        if name == "cast" and second is not None:
            return second
        if name == "dict" and not given.positional:
            return self.dict_of(given.keywords)
        if name == "type" and isinstance(first, Object) and first.view is not None:
            return Class(first.view, first.view.node.name)
        if name in ("replace", "copy", "deepcopy") and isinstance(first, Object):
            made = self.make(first.label, first.view, **self.heap[first.ref])
            self.heap[made.ref].update(given.keywords)
            return made
        return ANYTHING

    def _aggregate(self, name: str, given: Arguments, node: ast.Call) -> Value:
        first = given.get(0)
        members = first.items if isinstance(first, Group) else given.positional
        for value in members:
            if first_tensor([value], lambda t: t.place == "device"):
                self.wait("number" if name == "print" else "bool", node, maybe=value)
        if name in ("any", "all") and isinstance(first, Group):
            truths = [truth(item) for item in first.items]
            if (name == "any") in truths:
                return Known(name == "any")
            if None not in truths:
                return Known(name == "all")
        return ANYTHING

    def _is_instance(self, value: Value, of: Value) -> Value:
        names = [
            part.name.rpartition(".")[2] if isinstance(part, Library | Class) else "?"
            for part in (of.items if isinstance(of, Group) else (of,))
        ]
        if isinstance(value, Tensor):
            return Known("Tensor" in names) if "?" not in names else ANYTHING
        if isinstance(value, Known):
            if "Tensor" in names:
                return Known(False)
            known = {"int": int, "bool": bool, "str": str, "float": float, "tuple": tuple}
            types = tuple(known[name] for name in names if name in known)
            return Known(isinstance(value.value, types)) if len(types) == len(names) else ANYTHING
        if isinstance(value, Object) and value.view is not None:
            if value.view.node.name in names:
                return Known(True)
            return Known(False) if names == ["Tensor"] else ANYTHING
        return ANYTHING

    def _by_name(self, name: str, given: Arguments) -> Value:
        on, attribute = given.get(0), given.get(1)
        if not isinstance(attribute, Known) or not isinstance(attribute.value, str) or on is None:
            return ANYTHING
        if name == "setattr":
            for option in options(on):
                if isinstance(option, Object):
                    self.set(option, attribute.value, given.get(2) or ANYTHING)
            return NONE
        found: list[Value] = []
        for option in options(on):
            if isinstance(option, Object):
                value: Value | None = self.heap[option.ref].get(attribute.value)
                if value is None and option.view is not None:
                    value = self.of_class(option.view, attribute.value, option)
                unset = value is not None and Unset() in options(value)
                if name == "hasattr":
                    found.append(Known(True) if value is not None and not unset else ANYTHING)
                    continue
                otherwise = self.world.named(attribute.value) or given.get(2) or ANYTHING
                found.append(otherwise if value is None else where_set(value))
                if unset:
                    found.append(given.get(2) or ANYTHING)
            elif isinstance(option, Known) and name == "getattr":
                found.append(given.get(2) or ANYTHING)
            else:
                found.append(ANYTHING if name == "hasattr" else self.part(option, attribute.value))
        return join(found)


def _called(value: Value) -> str:
    """What a value is, in a word."""
    if isinstance(value, Partial):
        return _called(value.function)
    if isinstance(value, Function):
        return value.method.node.name
    if isinstance(value, Closure):
        return getattr(value.node, "name", "a lambda")
    if isinstance(value, Object):
        return f"a {value.label}"
    return "None" if value == NONE else "another"


def _is_super(node: ast.expr) -> bool:
    return (
        isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super"
    )
