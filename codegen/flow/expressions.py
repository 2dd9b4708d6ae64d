"""The expressions of a walk: what each gives, and the waits in it."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

from ..flashinfer.syntax import ClassView, MethodOf, Module, Modules, text
from .state import Frame, Walker, kept, key_of
from .values import (
    ANYTHING,
    NONE,
    Anything,
    Arguments,
    Class,
    Closure,
    Device,
    Function,
    Group,
    Known,
    Library,
    Object,
    Partial,
    Tensor,
    Value,
    first_tensor,
    join,
    on_device,
    options,
    where_set,
)

#: Packages whose names are kept as they are; all other imports are of no matter.
_LIBRARIES = ("torch", "math", "functools", "numpy")


class Expressions(Walker):
    # --- expressions --------------------------------------------------------------------------

    def test(self, node: ast.expr) -> bool | None:
        """Whether a test holds; None where the source does not say. A device tensor waits."""
        if isinstance(node, ast.BoolOp):
            stop = isinstance(node.op, ast.Or)
            decided: bool | None = not stop
            with ExitStack() as supposed:
                for part in node.values:
                    result = self.test(part)
                    if result is stop:
                        return stop
                    if result is None:
                        decided = None
                        supposed.enter_context(self.supposing(part, not stop, self.number()))
                        supposed.enter_context(self._there(part, not stop))
            return decided
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            result = self.test(node.operand)
            return None if result is None else not result
        value = self.value(node)
        if first_tensor([value], lambda t: t.place == "device"):
            self.wait("bool", node, maybe=value)
        return truth(value)

    @contextmanager
    def _there(self, test: ast.expr, arm: bool) -> Iterator[None]:
        """Where `test` goes this way and says that a name is not None, the name's value without
        None: what else it may be decides about the rest of the condition."""
        names = self.frames[-1].names
        name = _not_none(test, arm)
        if name is None or name not in names:
            yield
            return
        before = names[name]
        names[name] = join(option for option in options(before) if option != NONE)
        try:
            yield
        finally:
            names[name] = before

    def value(self, node: ast.expr) -> Value:
        """What an expression gives; notes the waits in it."""
        self.stepped()
        handler = getattr(self, f"_{type(node).__name__.lower()}", None)
        if handler is not None:
            result: Value = handler(node)
            return result
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self.value(child)
        return ANYTHING

    def _constant(self, node: ast.Constant) -> Value:
        return Known(node.value)

    def _name(self, node: ast.Name) -> Value:
        frame = self.frames[-1]
        if node.id in frame.names:
            return frame.names[node.id]
        return self._global(frame.module, node.id)

    def _global(self, module: Module, name: str) -> Value:
        found = self.modules.find(module.name, name)
        if found is not None:
            if isinstance(found.node, ast.ClassDef):
                return Class(ClassView(self.modules, found), found.node.name)
            return Function(MethodOf(found.module, None, found.node))
        for statement in module.tree.body:
            if isinstance(statement, ast.Import):
                for alias in statement.names:
                    if (alias.asname or alias.name.split(".")[0]) == name:
                        return Library(alias.name if alias.asname else name)
            elif isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value is not None:
                targets = (
                    statement.targets if isinstance(statement, ast.Assign) else [statement.target]
                )
                if any(isinstance(t, ast.Name) and t.id == name for t in targets):
                    if sum(f.node is statement.value for f in self.frames):
                        return ANYTHING
                    return self.in_module(module, statement.value)
        for node, original in module.bound.get(name, ()):
            origin = module.absolute(node)
            if origin.split(".")[0] in _LIBRARIES:
                return Library(f"{origin}.{original}")
            other = self.modules.get(origin) if origin.startswith("flashinfer") else None
            if other is not None and other is not module:
                return self._global(other, original)
        return self.world.named(name) or Library(f"?.{name}")

    def _attribute(self, node: ast.Attribute) -> Value:
        on = self.value(node.value)
        return join(self.part(option, node.attr) for option in options(on))

    def part(self, on: Value, name: str) -> Value:
        if isinstance(on, Tensor):
            if name == "device":
                return Device(on.place)
            if name in ("is_cuda", "is_cpu"):
                return Known((on.place == "device") == (name == "is_cuda"))
            return on if name in ("T", "mT", "data") else Library(f"tensor.{name}")
        if isinstance(on, Device):
            return (
                Known({"device": "cuda", "host": "cpu"}[on.place]) if name == "type" else ANYTHING
            )
        if isinstance(on, Library):
            member = on.name.rpartition(".")[2]
            if name == "name" and member.isupper():  # of an enum
                return Known(member)
            return Library(f"{on.name}.{name}")
        if isinstance(on, Object):
            return self._attribute_of(on, name)
        if isinstance(on, Class):
            return self.of_class(on.view, name, on) or ANYTHING
        if isinstance(on, Known):
            return ANYTHING
        return self.world.named(name) or ANYTHING

    def _attribute_of(self, on: Object, name: str) -> Value:
        value = self.heap[on.ref].get(name)
        if value is not None:
            return where_set(value)
        if on.view is not None and (found := self.of_class(on.view, name, on)) is not None:
            return found
        return self.world.named(name) or ANYTHING

    def of_class(self, view: ClassView, name: str, bound: Value) -> Value | None:
        method = view.method(name)
        if method is not None:
            if any(word in text(d) for d in method.node.decorator_list for word in ("property",)):
                return self.enter(method, bound, Arguments()) if isinstance(bound, Object) else None
            is_class = isinstance(bound, Class) and not method.is_decorated("classmethod")
            return Function(method, None if is_class else bound)
        for attribute, default, module in class_level(self.modules, view):
            if attribute == name and default is not None:
                return self.in_module(module, default)
        return None

    def _subscript(self, node: ast.Subscript) -> Value:
        on, index = self.value(node.value), self.index(node.slice)
        found: list[Value] = []
        for option in options(on):
            if isinstance(option, Tensor):
                found.append(self.selected(option, index, node))
            elif isinstance(option, Group) and isinstance(node.slice, ast.Slice):
                found.append(_sliced(option, node.slice))
            elif isinstance(option, Group | Object):
                if first_tensor([index], lambda t: t.place == "device"):
                    self.wait("device-slice", node, maybe=index)
                found.append(self._item(option, index))
            elif isinstance(option, Library):
                found.append(option)
            else:
                found.append(ANYTHING)
        return join(found)

    def _item(self, on: Group | Object, index: Value) -> Value:
        if isinstance(on, Group):
            place = index.value if isinstance(index, Known) else None
            if isinstance(place, int) and -len(on.items) <= place < len(on.items):
                return on.items[place]
            return join(on.items) if on.items else ANYTHING
        items = self.heap[on.ref]
        if isinstance(index, Known):
            key = key_of(index.value)
            if key in items:
                return items[key]
            name = index.value if isinstance(index.value, str) else ""
            return items.get("*") or self.world.named(name) or ANYTHING
        if not isinstance(index, Anything) or on.label in ("dict", "list"):
            return join(items.values()) if items else ANYTHING
        return ANYTHING

    def index(self, node: ast.expr) -> Value:
        """An index; its slices wait where a bound is on the device."""
        if isinstance(node, ast.Slice):
            for bound in (node.lower, node.upper, node.step):
                if bound is not None:
                    value = self.value(bound)
                    if first_tensor([value], lambda t: t.place == "device"):
                        self.wait("device-slice", bound, maybe=value)
            return Group(())
        if isinstance(node, ast.Tuple):
            return Group(tuple(self.index(item) for item in node.elts))
        return self.value(node)

    def selected(self, on: Tensor, index: Value, node: ast.AST) -> Tensor:
        """A part of a tensor: a mask on the device waits for how much it selects, on the host an
        index on the device is read."""
        parts = index.items if isinstance(index, Group) else (index,)
        for part in parts:
            chosen = first_tensor([part], lambda t: t.place == "device")
            if chosen is not None and on.place == "host":
                self.wait("device-slice", node, maybe=part)
            elif chosen is not None and chosen.mask:
                self.wait("mask-index", node, maybe=part)
        scalar = not isinstance(index, Group) and not first_tensor(parts, lambda _: True)
        return replace(on, scalar=scalar)

    def _tuple(self, node: ast.Tuple | ast.List) -> Value:
        items: list[Value] = []
        for item in node.elts:
            if isinstance(item, ast.Starred):
                inner = self.value(item.value)
                if not isinstance(inner, Group):
                    return ANYTHING
                items += inner.items
            else:
                items.append(self.value(item))
        return Group(tuple(items))

    def _list(self, node: ast.List) -> Value:
        return self._tuple(node) if node.elts else self.make("list")

    def _dict(self, node: ast.Dict) -> Value:
        made = self.make("dict")
        for key, item in zip(node.keys, node.values, strict=True):
            value = self.value(item)
            if key is None:
                if isinstance(value, Object):
                    self.heap[made.ref].update(self.heap[value.ref])
                continue
            name = self.value(key)
            self.set(made, key_of(name.value) if isinstance(name, Known) else "*", value)
        return made

    def _lambda(self, node: ast.Lambda) -> Value:
        frame = self.frames[-1]
        return Closure(node, frame.module, frame.names, frame.owner)

    def _ifexp(self, node: ast.IfExp) -> Value:
        decided = self.test(node.test)
        if decided is not None:
            return self.value(node.body if decided else node.orelse)
        number = self.number()
        results: list[Value] = []
        for part, arm in ((node.body, True), (node.orelse, False)):
            with self.supposing(node.test, arm, number):
                results.append(self.value(part))
        return join(results)

    def _boolop(self, node: ast.BoolOp) -> Value:
        stop = isinstance(node.op, ast.Or)
        results: list[Value] = []
        with ExitStack() as supposed:
            for part in node.values:
                value = self.value(part)
                decided = truth(value)
                if part is node.values[-1]:
                    break
                if first_tensor([value], lambda t: t.place == "device"):
                    self.wait("bool", part, maybe=value)
                if decided is (not stop):
                    continue
                if decided is stop:
                    break
                results.append(value)
                supposed.enter_context(self.supposing(part, not stop, self.number()))
        if decided is False and not stop:
            return Known(False)
        return join([*results, value])

    def _unaryop(self, node: ast.UnaryOp) -> Value:
        if isinstance(node.op, ast.Not):
            decided = self.test(node)
            return ANYTHING if decided is None else Known(decided)
        value = self.value(node.operand)
        if isinstance(node.op, ast.USub) and isinstance(value, Known):
            return Known(-value.value) if isinstance(value.value, int | float) else ANYTHING
        return self.operated([value])

    def _binop(self, node: ast.BinOp) -> Value:
        return self.operated([self.value(node.left), self.value(node.right)])

    def _compare(self, node: ast.Compare) -> Value:
        left = self.value(node.left)
        result: Value = ANYTHING
        for operator, comparator in zip(node.ops, node.comparators, strict=True):
            right = self.value(comparator)
            result = self._compared(operator, left, right, node)
            left = right
        return result if len(node.ops) == 1 else ANYTHING

    def _compared(self, operator: ast.cmpop, left: Value, right: Value, node: ast.AST) -> Value:
        if isinstance(operator, ast.Is | ast.IsNot):
            same = _identical(left, right)
            return ANYTHING if same is None else Known(same == isinstance(operator, ast.Is))
        if isinstance(operator, ast.In | ast.NotIn):
            if first_tensor([left, right], lambda t: t.place == "device"):
                self.wait("bool", node, maybe=left if isinstance(right, Group) else right)
            if isinstance(left, Known) and isinstance(right, Group):
                found = [equal(left, item) for item in right.items]
                if True in found:
                    return Known(isinstance(operator, ast.In))
                if None not in found:
                    return Known(isinstance(operator, ast.NotIn))
            return ANYTHING
        if first_tensor([left, right], lambda _: True):
            result = self.operated([left, right])
            return replace(result, mask=True) if isinstance(result, Tensor) else result
        if isinstance(operator, ast.Eq | ast.NotEq):
            same = equal(left, right)
            if same is not None:
                return Known(same == isinstance(operator, ast.Eq))
        return ANYTHING

    def operated(self, values: Sequence[Value]) -> Value:
        """The result of an operator: a tensor where a tensor takes part."""
        if not first_tensor(values, lambda _: True):
            return ANYTHING
        results: list[Value] = []
        for value in values:
            for option in options(value):
                if isinstance(option, Tensor):
                    scalar = all(
                        not isinstance(o, Tensor) or o.scalar for v in values for o in options(v)
                    )
                    results.append(Tensor(option.place, scalar=scalar))
        sure = [value for value in values if on_device(value)]
        if sure:
            return next(r for r in results if isinstance(r, Tensor) and r.place == "device")
        return join(results)

    def _namedexpr(self, node: ast.NamedExpr) -> Value:
        value = self.value(node.value)
        self.assign(node.target, value)
        return self.value(node.target)

    def _starred(self, node: ast.Starred) -> Value:
        return self.value(node.value)

    def _joinedstr(self, node: ast.JoinedStr) -> Value:
        for part in node.values:
            if isinstance(part, ast.FormattedValue):
                value = self.value(part.value)
                if first_tensor([value], lambda t: t.place == "device"):
                    self.wait("number", part.value, maybe=value)
        return ANYTHING

    def _comprehended(self, node: ast.ListComp | ast.GeneratorExp | ast.SetComp) -> Value:
        frame = self.frames[-1]
        outer = dict(frame.names)
        try:
            rounds = self._rounds(node.elt, node.generators, 0)
        finally:
            frame.names = kept(frame.names, outer)
        return ANYTHING if rounds is None else Group(tuple(rounds))

    _listcomp = _comprehended
    _generatorexp = _comprehended
    _setcomp = _comprehended

    def _rounds(
        self, result: ast.expr, generators: Sequence[ast.comprehension], position: int
    ) -> list[Value] | None:
        """The results of a comprehension, in order; None where they cannot be counted."""
        if position == len(generators):
            return [self.value(result)]
        part = generators[position]
        over = self.value(part.iter)
        items = self.items(over)
        known = items is not None
        results: list[Value] = []
        for item in items if items is not None else (self.element(over),):
            if not known:
                self.loops += 1
            self.assign(part.target, item)
            chosen = [self.test(condition) for condition in part.ifs]
            inner = None
            if False not in chosen:
                inner = self._rounds(result, generators, position + 1)
                known = known and inner is not None and None not in chosen
            if items is None:
                self.loops -= 1
            results += inner or []
        return results if known else None

    def _dictcomp(self, node: ast.DictComp) -> Value:
        made = self.make("dict")
        frame = self.frames[-1]
        outer = dict(frame.names)
        values = self._rounds(node.value, node.generators, 0)
        frame.names = kept(frame.names, outer)
        self.set(made, "*", join(values) if values else ANYTHING)
        return made

    def in_module(self, module: Module, node: ast.expr) -> Value:
        """The value of an expression at module level: a default, a constant."""
        if isinstance(node, ast.Constant):
            return Known(node.value)
        self.frames.append(Frame("<module>", module, None, {}, node, len(self.conditions)))
        try:
            return self.value(node)
        finally:
            self.frames.pop()

    def items(self, over: Value) -> tuple[Value, ...] | None:
        """The rounds of a loop, where they are known."""
        return over.items if isinstance(over, Group) and len(over.items) <= 64 else None

    def element(self, over: Value) -> Value:
        if isinstance(over, Tensor):
            return Tensor(over.place, over.mask, scalar=True)
        if isinstance(over, Object) and over.label in ("list", "dict"):
            return join(self.heap[over.ref].values())
        if isinstance(over, Group):
            return join(over.items)
        return ANYTHING


def truth(value: Value) -> bool | None:
    truths = set()
    for option in options(value):
        if isinstance(option, Known):
            truths.add(bool(option.value))
        elif isinstance(option, Group):
            truths.add(bool(option.items))
        elif isinstance(option, Class | Function | Closure | Partial) or (
            isinstance(option, Object) and option.label not in ("dict", "list")
        ):
            truths.add(True)
        else:
            return None
    return truths.pop() if len(truths) == 1 else None


def _identical(left: Value, right: Value) -> bool | None:
    answers = set()
    for one in options(left):
        for other in options(right):
            if isinstance(one, Anything) or isinstance(other, Anything):
                return None
            if isinstance(one, Known) and isinstance(other, Known):
                answers.add(type(one.value) is type(other.value) and one.value == other.value)
            elif isinstance(one, Library) and isinstance(other, Library):
                return None
            elif type(one) is not type(other):
                if NONE in (one, other) and isinstance(one, Library) | isinstance(other, Library):
                    return None
                answers.add(False)
            elif isinstance(one, Object | Class | Function):
                answers.add(one == other)
            else:
                return None
    return answers.pop() if len(answers) == 1 else None


def equal(left: Value, right: Value) -> bool | None:
    if isinstance(left, Known) and isinstance(right, Known):
        return left.value == right.value
    if isinstance(left, Library) and isinstance(right, Library):
        one, other = left.name.rpartition("."), right.name.rpartition(".")
        if left == right or (one[0] == other[0] and one[2].isupper() and other[2].isupper()):
            return left == right  # members of one enum
    return None


def _sliced(group: Group, part: ast.Slice) -> Value:
    """A slice of a tuple, where its bounds stand in the source."""
    bounds: list[Any] = []
    for bound in (part.lower, part.upper, part.step):
        if bound is not None and not isinstance(bound, ast.Constant):
            return ANYTHING
        bounds.append(bound.value if isinstance(bound, ast.Constant) else None)
    return Group(group.items[slice(*bounds)])


def lineage_of(modules: Modules, view: ClassView) -> Iterator[tuple[Module, ast.ClassDef]]:
    pending, seen = [(view.module, view.node)], set()
    while pending:
        module, node = pending.pop(0)
        if node in seen:
            continue
        seen.add(node)
        yield module, node
        for base in node.bases:
            if isinstance(base, ast.Name):
                found = modules.find(module.name, base.id)
                if found is not None and isinstance(found.node, ast.ClassDef):
                    pending.append((found.module, found.node))


def class_level(modules: Modules, view: ClassView) -> Iterator[tuple[str, ast.expr | None, Module]]:
    """What the bodies of a class and its bases assign: (name, value, module)."""
    for module, node in lineage_of(modules, view):
        for statement in node.body:
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                yield statement.target.id, statement.value, module
            elif isinstance(statement, ast.Assign):
                for target in statement.targets:
                    if isinstance(target, ast.Name):
                        yield target.id, statement.value, module


def _not_none(test: ast.expr, arm: bool) -> str | None:
    """The name that is not None where `test`, a comparison with None, comes out as `arm`."""
    if not isinstance(test, ast.Compare) or len(test.ops) != 1:
        return None
    (operator,), (other,) = test.ops, test.comparators
    wanted = ast.IsNot if arm else ast.Is
    if not isinstance(operator, wanted) or not isinstance(test.left, ast.Name):
        return None
    is_none = isinstance(other, ast.Constant) and other.value is None
    return test.left.id if is_none else None


def fields_of(modules: Modules, view: ClassView) -> Iterator[tuple[str, ast.expr | None, Module]]:
    """The fields of a dataclass or named tuple, with their defaults."""
    for name, default, module in class_level(modules, view):
        if isinstance(default, ast.Call) and text(default.func).endswith("field"):
            given = {part.arg: part.value for part in default.keywords}
            default = given.get("default") or given.get("default_factory")
        yield name, default, module
