"""What is known of a value while code is followed: enough to tell a device tensor from the rest."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from ..flashinfer.syntax import ClassView, MethodOf, Module

Place: TypeAlias = Literal["device", "host"]


@dataclass(frozen=True)
class Anything:
    """Nothing is known, or it does not matter: sizes, dtypes, handles."""


@dataclass(frozen=True)
class Data:
    """Numbers on the host, one or many: unknown, but not None."""


@dataclass(frozen=True)
class Unset:
    """An attribute that was set on another way only: an option, never alone."""


@dataclass(frozen=True)
class Known:
    """A constant: None, a bool, a number, a string."""

    value: object


@dataclass(frozen=True)
class Tensor:
    """A tensor. `mask`: of bools. `scalar`: of one element. `pinned`: on the host, in memory that
    the GPU copies from by itself."""

    place: Place
    mask: bool = False
    scalar: bool = False
    pinned: bool = False


@dataclass(frozen=True)
class Device:
    """A torch.device, or its name."""

    place: Place


@dataclass(frozen=True)
class Group:
    """A tuple, or a list that is not appended to."""

    items: tuple[Value, ...]


@dataclass(frozen=True)
class Object:
    """An instance, a dict or a list: `ref` finds its attributes or items on the heap. `view` is its
    class where that is known; `label` names the others."""

    ref: int
    view: ClassView | None = field(default=None, compare=False)
    label: str = ""


@dataclass(frozen=True)
class Class:
    """A class of the code that is followed."""

    view: ClassView = field(compare=False)
    name: str


@dataclass(frozen=True)
class Function:
    """A function or method. `bound` is what it was taken from."""

    method: MethodOf
    bound: Value | None = None


@dataclass(frozen=True)
class Closure:
    """A lambda or inner function, with the names around it."""

    node: ast.Lambda | ast.FunctionDef
    module: Module
    names: Mapping[str, Value] = field(compare=False)
    owner: ast.ClassDef | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Partial:
    """`functools.partial(function, ...)`."""

    function: Value
    arguments: Arguments


@dataclass(frozen=True)
class Library:
    """A name of torch or of another package: `torch.int32`, `torch.cumsum`, `math.ceil`."""

    name: str


@dataclass(frozen=True)
class Either:
    """One of these; the source does not say which."""

    options: tuple[Value, ...]


Value: TypeAlias = (
    Anything
    | Data
    | Unset
    | Known
    | Tensor
    | Device
    | Group
    | Object
    | Class
    | Function
    | Closure
    | Partial
    | Library
    | Either
)

ANYTHING = Anything()
DATA = Data()
NONE = Known(None)
ON_DEVICE = Tensor("device")
#: Pinned, as SGLang and mlagen give host arrays to a plan.
ON_HOST = Tensor("host", pinned=True)

_MOST = 6


@dataclass(frozen=True)
class Arguments:
    """What a call is given. `open`: `*` or `**` of something unknown is among them."""

    positional: tuple[Value, ...] = ()
    keywords: Mapping[str, Value] = field(default_factory=dict, hash=False)
    open: bool = False

    def get(self, position: int, *names: str) -> Value | None:
        """The argument at a position, or of one of these names."""
        for name in names:
            if name in self.keywords:
                return self.keywords[name]
        return self.positional[position] if 0 <= position < len(self.positional) else None

    @property
    def all(self) -> tuple[Value, ...]:
        return (*self.positional, *self.keywords.values())


def options(value: Value) -> tuple[Value, ...]:
    """What a value may be."""
    return value.options if isinstance(value, Either) else (value,)


def join(values: Iterable[Value]) -> Value:
    """One value for what may be any of `values`; Anything where that is too much to keep."""
    found: list[Value] = []
    for value in values:
        for option in options(value):
            if option not in found:
                found.append(option)
    if not found:
        return ANYTHING
    if len(found) == 1:
        return found[0]
    if len(found) > _MOST:
        tensors = [option for option in found if isinstance(option, Tensor)]
        return join([*tensors, ANYTHING]) if 0 < len(tensors) < _MOST else ANYTHING
    return Either(tuple(found))


def where_set(value: Value) -> Value:
    """A value without the ways on which it is unset."""
    return join(option for option in options(value) if not isinstance(option, Unset))


def on_device(value: Value) -> bool | None:
    """Whether a value is a tensor on the device; None where only some of its options are."""
    places = {isinstance(o, Tensor) and o.place == "device" for o in options(value)}
    return places.pop() if len(places) == 1 else None


def first_tensor(values: Iterable[Value], test: Callable[[Tensor], bool]) -> Tensor | None:
    """The first tensor among the options of `values` that passes."""
    for value in values:
        for option in options(value):
            if isinstance(option, Tensor) and test(option):
                return option
    return None
