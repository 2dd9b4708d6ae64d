"""Stand-ins for packages that SGLang imports on the way to its back end and planning never calls.

A stand-in module gives a class for every name that it is asked for. Such a class can be imported,
annotated with, derived from and tested against, but not called: that raises `StandInCalled` with
its full name, so that nothing which matters can run on one unnoticed.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any


class StandInCalled(RuntimeError):
    """Something took part after all that was thought to have no part in planning."""


class _Meta(type):
    """Makes the class of a stand-in answer for names, unions and subscripts, not for calls."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return make(f"{cls.__module__}.{cls.__qualname__}", name)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        raise StandInCalled(f"{cls.__module__}.{cls.__qualname__} was called; it is a stand-in")

    def __getitem__(cls, item: Any) -> Any:
        return cls

    def __or__(cls, other: Any) -> Any:
        return cls

    __ror__ = __or__

    def __iter__(cls) -> Iterator[Any]:
        return iter(())


def make(module: str, name: str) -> type:
    """A class that stands for `module.name`."""
    return _Meta(name, (), {"__module__": module})


class _Module(types.ModuleType):
    __path__: list[str]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        value = make(self.__name__, name)
        setattr(self, name, value)
        return value


class StandInFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Serves the named packages and what lies below them, not what lies below a real module.

    In front of `sys.meta_path` it replaces packages, at the end it stands for absent ones. but:
    modules of theirs that stay real, looked for under `root`. served: what was asked for.
    """

    def __init__(
        self, names: Sequence[str], *, but: Sequence[str] = (), root: Path | None = None
    ) -> None:
        self.names = tuple(names)
        self.served: set[str] = set()
        self._but = frozenset(but)
        self._root = root

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        parent = fullname.rpartition(".")[0]
        named = fullname in self.names or parent in self.names or parent in self.served
        if fullname in self._but or not named:
            return None
        self.served.add(fullname)
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = _Module(spec.name)
        module.__version__ = "0"
        if self._root is not None:
            module.__path__ = [str(self._root.joinpath(*spec.name.split(".")))]
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing to run."""


def absent(names: Sequence[str]) -> list[str]:
    """Those of the top-level packages that cannot be imported here."""
    return [name for name in names if importlib.util.find_spec(name) is None]


def install(finder: StandInFinder, *, replacing: bool) -> None:
    """Put the finder in front of the others, or behind them."""
    if replacing:
        sys.meta_path.insert(0, finder)
    else:
        sys.meta_path.append(finder)
