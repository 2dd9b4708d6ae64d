"""What a walk through code holds: the functions it is in, the heap, the waits found so far."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Protocol

from ..flashinfer.syntax import ClassView, MethodOf, Module, Modules, text
from .tensors import Kind
from .values import (
    Arguments,
    Closure,
    Object,
    Unset,
    Value,
    join,
    on_device,
)


@dataclass(frozen=True)
class Condition:
    """A test on the way that the source does not decide. `arm`: the way taken; `id`: which `if`."""

    id: int
    test: str
    arm: bool

    def __str__(self) -> str:
        return self.test if self.arm else f"not ({self.test})"


@dataclass(frozen=True)
class Found:
    """One wait on the way.

    `way`: the calls from the entry to the function around it, outermost first. `conditions`: what
    the source does not decide. `repeated`: in a loop whose rounds are not known. `times`: how often
    it waits there.
    """

    path: str
    line: int
    way: tuple[str, ...]
    expression: str
    kind: Kind
    conditions: tuple[Condition, ...] = ()
    repeated: bool = False
    times: int = 1


class World(Protocol):
    """What stands outside of the code that is followed."""

    def named(self, name: str) -> Value | None:
        """What a parameter, local or attribute of this name is, where nothing else is known."""

    def answer(
        self, follower: Walker, on: Value | None, name: str, given: Arguments, node: ast.Call
    ) -> Value | None:
        """The result of calling `name` on `on` (None: a plain function); None: not known here."""


class Nothing:
    """A world of which nothing is known."""

    def named(self, name: str) -> Value | None:
        return None

    def answer(
        self, follower: Walker, on: Value | None, name: str, given: Arguments, node: ast.Call
    ) -> Value | None:
        return None


class Flow(Enum):
    FALLS = 0  # to the next statement
    LEAVES = 1  # return, break, continue
    FAILS = 2  # raise


Heap = dict[int, dict[str, Value]]


@dataclass
class Frame:
    """A function that is being followed."""

    name: str
    module: Module
    owner: ast.ClassDef | None
    names: dict[str, Value]
    node: ast.AST
    conditions: int
    exits: list[tuple[Value, Heap]] = field(default_factory=list)


class TooFar(Exception):
    """More was to be followed than is sensible."""


#: Statements, expressions and objects to copy after which a walk is given up: a FlashInfer plan
#: takes some 10,000, and 400,000 some seconds.
LONGEST = 400_000


class Walker:
    """One walk. Its heap lives on between entries, so that a second plan finds what the first left.

    Attributes:
        waits: what was found since it was last emptied.
        failed: the last entry always raised.
    """

    def __init__(self, modules: Modules, world: World | None = None) -> None:
        self.modules = modules
        self.world: World = world or Nothing()
        self.waits: list[Found] = []
        self.failed = False
        self.heap: Heap = {}
        self.frames: list[Frame] = []
        self.conditions: list[Condition] = []
        self.loops = 0
        self.steps = 0
        self.next = 0

    @property
    def module(self) -> str:
        """The module of the function that is being followed."""
        return self.frames[-1].module.name

    def make(self, label: str, view: ClassView | None = None, **attributes: Value) -> Object:
        """An object, without running its `__init__`."""
        self.next += 1
        self.heap[self.next] = dict(attributes)
        return Object(self.next, view, label)

    def dict_of(self, items: Mapping[str, Value]) -> Object:
        made = self.make("dict")
        self.heap[made.ref].update({key_of(name): value for name, value in items.items()})
        return made

    def attribute(self, on: Object, name: str) -> Value | None:
        """What an attribute was set to; None where it was not."""
        return self.heap[on.ref].get(name)

    def set(self, on: Object, name: str, value: Value) -> None:
        """Set an attribute."""
        self.heap[on.ref][name] = value

    def wait(
        self, kind: Kind, node: ast.AST, *, maybe: Value | None = None, times: int = 1
    ) -> None:
        """Note a wait at `node`; `maybe` is what may be on the device, where that is not sure."""
        frame = self.frames[-1]
        conditions = tuple(self.conditions)
        expression = shown(node)
        if maybe is not None and on_device(maybe) is None:
            test = "the array is on the device"
            conditions = (*conditions, Condition(id(node), test, True))
        self.waits.append(
            Found(
                frame.module.path,
                getattr(node, "lineno", 0),
                tuple(f.name for f in self.frames),
                expression,
                kind,
                conditions,
                self.loops > 0,
                times,
            )
        )

    def stepped(self, steps: int = 1) -> None:
        """Count what is done. Raises TooFar where it gets too much."""
        self.steps += steps
        if self.steps > LONGEST:
            raise TooFar

    def snapshot(self, heap: Heap | None = None) -> Heap:
        """The heap as it is now, for one of two ways."""
        heap = self.heap if heap is None else heap
        self.stepped(len(heap))
        return {ref: dict(attributes) for ref, attributes in heap.items()}

    def number(self) -> int:
        self.next += 1
        return self.next

    @contextmanager
    def supposing(self, test: ast.expr, arm: bool, number: int) -> Iterator[None]:
        """What is found inside is found only where `test` goes this way."""
        depth = len(self.conditions)
        self.conditions.append(Condition(number, shown(test), arm))
        try:
            yield
        finally:
            del self.conditions[depth:]

    # --- what the parts of a walk need of each other ----------------------------------------

    def value(self, node: ast.expr) -> Value:
        """What an expression gives; notes the waits in it."""
        raise NotImplementedError

    def assign(self, target: ast.expr, value: Value) -> None:
        """Bind a target."""
        raise NotImplementedError

    def enter(self, method: MethodOf, bound: Value | None, given: Arguments) -> Value:
        """Follow a function or method."""
        raise NotImplementedError

    def enter_closure(self, closure: Closure, given: Arguments) -> Value:
        """Follow a lambda or an inner function."""
        raise NotImplementedError

    def create(self, view: ClassView, given: Arguments) -> Object:
        """An instance of a class, through its `__init__` or its fields."""
        raise NotImplementedError


def count(waits: Sequence[Found]) -> int:
    """How often the host waits, on the way through the tests that waits most: of two ways of one
    test only one is gone."""
    return _count([(wait.conditions, wait.times) for wait in waits], max)


def count_least(waits: Sequence[Found]) -> int:
    """The same for the way that waits least."""
    return _count([(wait.conditions, wait.times) for wait in waits], min)


_Rows = Sequence[tuple[tuple[Condition, ...], int]]


def _count(rows: _Rows, choose: Callable[[Sequence[int]], int]) -> int:
    total = sum(times for conditions, times in rows if not conditions)
    ways: dict[int, dict[bool, list[tuple[tuple[Condition, ...], int]]]] = {}
    for conditions, times in rows:
        if conditions:
            first, rest = conditions[0], conditions[1:]
            ways.setdefault(first.id, {}).setdefault(first.arm, []).append((rest, times))
    return total + sum(
        choose([_count(arms.get(arm, []), choose) for arm in (True, False)])
        for arms in ways.values()
    )


def key_of(value: object) -> str:
    return f"'{value}" if isinstance(value, str) else f"#{value!r}"


def joined(heaps: Sequence[Heap]) -> Heap:
    if len(heaps) == 1:
        return heaps[0]
    result: Heap = {}
    for heap in heaps:
        for ref in heap:
            result.setdefault(ref, {})
    for ref, attributes in result.items():
        there = [heap[ref] for heap in heaps if ref in heap]
        for name in dict.fromkeys(name for one in there for name in one):
            found = [one[name] for one in there if name in one]
            if len(found) < len(there) and name.isidentifier():
                found.append(Unset())
            attributes[name] = join(found)
    return result


def kept(names: dict[str, Value], now: dict[str, Value]) -> dict[str, Value]:
    """The same dict with other content: closures hold on to it."""
    names.clear()
    names.update(now)
    return names


def without(wait: Found, number: int) -> Found:
    return replace(wait, conditions=tuple(c for c in wait.conditions if c.id != number))


def shown(node: ast.AST) -> str:
    try:
        found = text(node)
    except RecursionError:
        return "..."
    return found if len(found) <= 90 else found[:87] + "..."
