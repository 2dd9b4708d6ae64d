"""Parts of a release's own source, run by themselves.

The back end's planning depends on a dozen small functions and classes of other files: forward
modes, the speculative inputs' length formulas, the sharding of lengths under context parallelism.
They are pure, so the release's own text runs here, taken out of its file with `ast`, instead of a
copy of what it says. The files themselves are never imported: their imports need a GPU's worth of
packages.
"""

from __future__ import annotations
import __future__

import ast
import builtins
import functools
import linecache
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

from ..releases import sglang_tree

# `import a.b` from these roots never reaches the interpreter's own import.
STUBBED = ("sglang", "flashinfer", "triton")

Provide = Callable[[str, str], Any]
"""(module, name) -> what `from module import name` gives."""


def builtins_with(provide: Provide) -> dict[str, Any]:
    """The builtins for code whose imports of `STUBBED` packages are answered by `provide`.

    So no module of that name is ever put where other tests would find it.
    """
    real_import = builtins.__import__

    def stub_import(
        name: str,
        globals_: Mapping[str, object] | None = None,
        locals_: Mapping[str, object] | None = None,
        fromlist: Sequence[str] = (),
        level: int = 0,
    ) -> Any:
        root = name.split(".")[0]
        if level or root not in STUBBED:
            return real_import(name, globals_, locals_, fromlist, level)
        if not fromlist and name not in (root, "triton.language"):
            raise ImportError(f"the harness has no `import {name}`, only `from {name} import ...`")
        return _StubModule(name if fromlist else root, provide)

    return {**vars(builtins), "__import__": stub_import}


class _StubModule(ModuleType):
    def __init__(self, name: str, provide: Provide) -> None:
        super().__init__(name)
        self.__dict__["_provide"] = provide

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and (self.__name__, name) != ("triton", "__version__"):
            raise AttributeError(name)
        return self._provide(self.__name__, name)


class ReleaseCode:
    """What can be taken out of one release; `provide` answers imports inside what is taken."""

    def __init__(self, version: str, provide: Provide) -> None:
        self.version = version
        self._builtins = builtins_with(provide)

    def has(self, path: str, name: str) -> bool:
        """Is there a definition `name` (dotted for a method) in file `path` of the release?"""
        tree = _tree(self.version, path)
        return tree is not None and _find(tree, name) is not None

    def first(self, paths: Sequence[str], name: str) -> str:
        """The first of `paths` that defines `name`."""
        for path in paths:
            if self.has(path, name):
                return path
        raise LookupError(f"sglang {self.version}: no {name} in any of {', '.join(paths)}")

    def take(self, path: str, name: str, names: Mapping[str, Any], *helpers: str) -> Any:
        """The function, class or method `name` of `path`, its globals being `names`.

        Decorators are dropped (`triton.jit`, `dataclass`, `torch.compile`); `helpers` are further
        top-level functions of that file that it calls.
        """
        namespace: dict[str, Any] = {"__builtins__": self._builtins, "__name__": path, **names}
        for part in (*helpers, name):
            node = self._node(path, part)
            module = ast.Module(body=[node], type_ignores=[])
            code = compile(
                ast.fix_missing_locations(module),
                _filename(self.version, path),
                "exec",
                flags=__future__.annotations.compiler_flag,
                dont_inherit=True,
            )
            exec(code, namespace)
        return namespace[name.rsplit(".", 1)[-1]]

    def parameters(self, path: str, name: str) -> tuple[str, ...]:
        """The parameter names of a function, in order."""
        node = self._node(path, name)
        assert isinstance(node, ast.FunctionDef), name
        return tuple(
            a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
        )

    def _node(self, path: str, name: str) -> ast.stmt:
        tree = _tree(self.version, path)
        node = None if tree is None else _find(tree, name)
        if node is None:
            raise LookupError(f"sglang {self.version}: no {name} in {path}")
        node.decorator_list = []
        return node


@functools.cache
def _tree(version: str, path: str) -> ast.Module | None:
    data = sglang_tree(version).read(path)
    if data is None:
        return None
    text = data.decode()
    # So that a traceback shows the release's lines.
    name = _filename(version, path)
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    return ast.parse(text)


def _filename(version: str, path: str) -> str:
    return f"<sglang {version}>/{path}"


def _find(tree: ast.Module, name: str) -> ast.FunctionDef | ast.ClassDef | None:
    body: Sequence[ast.stmt] = tree.body
    found: ast.FunctionDef | ast.ClassDef | None = None
    for part in name.split("."):
        found = None
        for node in body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == part:
                found = node
        if found is None:
            return None
        body = found.body
    return found
