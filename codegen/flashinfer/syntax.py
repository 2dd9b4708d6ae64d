"""Modules and classes of a package, parsed but never imported: names, bases, method calls."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from ..errors import DriftError, Problem
from .find import FlashInferSource

HINT = (
    "mlagen knows FlashInfer 0.2.1 to 0.7.4: give one of these with --flashinfer, "
    "or add the new form to codegen/flashinfer/eras.py"
)

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
Definition = ast.ClassDef | FunctionNode


def text(node: ast.AST) -> str:
    """The source text of an expression, normalised (one line, no comments)."""
    return ast.unparse(node)


def ordered(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes below `node`, itself first, in the order of the source."""
    pending = [node]
    while pending:
        node = pending.pop()
        yield node
        pending += reversed(list(ast.iter_child_nodes(node)))


def _statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """All statements in the order of the source, those inside classes and functions too.
    Expressions, most of a file, are not looked at."""
    for node in body:
        yield node
        for field in ("body", "orelse", "handlers", "finalbody", "cases"):
            for item in getattr(node, field, ()):
                yield from _statements([item] if isinstance(item, ast.stmt) else item.body)


@dataclass(frozen=True)
class Module:
    """One parsed file. `path` is below the package's parent: `flashinfer/mla/_core.py`."""

    name: str
    path: str
    tree: ast.Module

    @property
    def package(self) -> str:
        """What relative imports in this module are relative to."""
        is_package = self.path.endswith("/__init__.py")
        return self.name if is_package else self.name.rpartition(".")[0]

    @cached_property
    def imports(self) -> tuple[ast.ImportFrom, ...]:
        """All `from ... import`, wherever they stand: some exports are lazy."""
        return tuple(n for n in _statements(self.tree.body) if isinstance(n, ast.ImportFrom))

    @cached_property
    def definitions(self) -> dict[str, list[Definition]]:
        """The classes and functions at module level, also below `if` and `try`, by name.
        `@overload` only declares."""
        found: dict[str, list[Definition]] = {}
        for node in _module_level(self.tree):
            if not _is_stub(node):
                found.setdefault(node.name, []).append(node)
        return found

    @cached_property
    def bound(self) -> dict[str, list[tuple[ast.ImportFrom, str]]]:
        """Name -> the imports that bind it, each with the name it has there. `*` binds none."""
        found: dict[str, list[tuple[ast.ImportFrom, str]]] = {}
        for node in self.imports:
            for alias in node.names:
                found.setdefault(alias.asname or alias.name, []).append((node, alias.name))
        found.pop("*", None)
        return found

    def absolute(self, node: ast.ImportFrom) -> str:
        """The module that `from ... import` names here."""
        if not node.level:
            return node.module or ""
        parts = self.package.split(".")
        parts = parts[: len(parts) - node.level + 1]
        return ".".join(parts + ([node.module] if node.module else []))


@dataclass(frozen=True)
class Found:
    """A class or function, and the module it stands in."""

    module: Module
    node: Definition


class Modules:
    """The modules of one FlashInfer, each read and parsed at most once."""

    def __init__(self, source: FlashInferSource) -> None:
        self.source = source
        self._modules: dict[str, Module | None] = {}
        self._hashes: dict[str, bytes] = {}

    def get(self, name: str) -> Module | None:
        """The module, None where there is none. DriftError where it does not parse.

        A package comes before a module of the same name, as for `import`.
        """
        if name not in self._modules:
            self._modules[name] = self._load(name)
        return self._modules[name]

    def _load(self, name: str) -> Module | None:
        stem = name.replace(".", "/")
        for path in (f"{stem}/__init__.py", f"{stem}.py"):
            data = self.source.read(path)
            if data is not None:
                self._hashes[path] = hashlib.sha256(data).digest()
                return Module(name, path, self._parse(path, data))
        return None

    def _parse(self, path: str, data: bytes) -> ast.Module:
        try:
            return ast.parse(data)
        except SyntaxError as error:
            line, column, reason = error.lineno or 0, error.offset or 0, error.msg
        except (ValueError, RecursionError) as error:  # null bytes; nested beyond the parser
            line, column, reason = 0, 0, str(error)
        raise DriftError(
            Problem(
                path,
                line,
                column,
                "does-not-parse",
                f"{self.source.label}: does not parse: {reason}",
                "reinstall FlashInfer, or give another with --flashinfer",
            )
        )

    def loaded(self, name: str) -> Module | None:
        """The module, if it has been read before."""
        return self._modules.get(name)

    def by_path(self, path: str) -> Module | None:
        """The module of a file that has been read."""
        loaded = (module for module in self._modules.values() if module is not None)
        return next((module for module in loaded if module.path == path), None)

    def drift(self, code: str, message: str, module: Module, node: ast.AST) -> DriftError:
        """An error about what stands at `node`."""
        return DriftError(self.problem(code, message, module.path, node))

    def problem(self, code: str, message: str, path: str, node: ast.AST | int) -> Problem:
        """A problem of this FlashInfer at a node, or a line, of one of its files."""
        line = node if isinstance(node, int) else getattr(node, "lineno", 0)
        return Problem(path, line, 0, code, f"{self.source.label}: {message}", HINT)

    @property
    def paths(self) -> tuple[str, ...]:
        """The files read so far, in order."""
        return tuple(self._hashes)

    def digest(self) -> str:
        """sha256 over the files read so far, by path, hex."""
        total = hashlib.sha256()
        for path in sorted(self._hashes):
            total.update(path.encode() + b"\0" + self._hashes[path])
        return total.hexdigest()

    def classes(self) -> tuple[str, ...]:
        """The names of the classes in the files read so far."""
        loaded = [module for module in self._modules.values() if module is not None]
        return tuple(
            name
            for module in loaded
            for name, nodes in module.definitions.items()
            if isinstance(nodes[0], ast.ClassDef)
        )

    def find(self, module: str, name: str) -> Found | None:
        """The class or function that `name` stands for in `module`, through re-exports: `from x
        import name as y`, `from x import *`, `y = name`, and imports inside a lazy `__getattr__`.

        DriftError where a module on the way defines it twice.
        """
        return self._find(module, name, set())

    def _find(self, module_name: str, name: str, seen: set[tuple[str, str]]) -> Found | None:
        if (module_name, name) in seen or not module_name.startswith("flashinfer"):
            return None
        seen.add((module_name, name))
        module = self.get(module_name)
        if module is None:
            return None
        if own := self._own(module, name):
            return own
        for node, original in module.bound.get(name, ()):
            if found := self._find(module.absolute(node), original, seen):
                return found
        for statement in module.tree.body:
            if (
                isinstance(statement, ast.Assign)
                and isinstance(statement.value, ast.Name)
                and any(isinstance(t, ast.Name) and t.id == name for t in statement.targets)
                and (found := self._find(module_name, statement.value.id, seen))
            ):
                return found
        for node in module.imports:
            if node.names[0].name == "*" and (
                found := self._find(module.absolute(node), name, seen)
            ):
                return found
        return None

    def _own(self, module: Module, name: str) -> Found | None:
        definitions = module.definitions.get(name, [])
        if len(definitions) > 1:
            lines = ", ".join(str(node.lineno) for node in definitions)
            raise self.drift(
                "defined-twice",
                f"{name} is defined {len(definitions)} times (lines {lines}), expected once",
                module,
                definitions[1],
            )
        return Found(module, definitions[0]) if definitions else None


def _module_level(node: ast.AST) -> Iterator[Definition]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Definition):
            yield child
        elif isinstance(child, ast.stmt | ast.ExceptHandler):
            yield from _module_level(child)


def _is_stub(node: Definition) -> bool:
    """`@overload` declares, it does not define."""
    return any(text(item).rpartition(".")[2] == "overload" for item in node.decorator_list)


@dataclass(frozen=True)
class MethodOf:
    """A method or function, and the module and class it stands in."""

    module: Module
    owner: ast.ClassDef | None
    node: FunctionNode

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names in order, keyword-only ones after; without self or cls."""
        arguments = self.node.args
        names = [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
        return tuple(names[1:] if self.receiver else names)

    @property
    def receiver(self) -> str:
        """`self` or `cls`, as it is called here; empty for a function or a static method."""
        arguments = [*self.node.args.posonlyargs, *self.node.args.args]
        if self.owner is None or not arguments or self.is_decorated("staticmethod"):
            return ""
        return arguments[0].arg

    def is_decorated(self, name: str) -> bool:
        """Whether a decorator is this plain name."""
        return any(isinstance(d, ast.Name) and d.id == name for d in self.node.decorator_list)


@dataclass(frozen=True)
class Step:
    """A node met on the way through a method and what it calls. `selves` are the names that stand
    for the object there."""

    method: MethodOf
    node: ast.AST
    selves: frozenset[str]


def attribute_of(node: ast.AST, selves: frozenset[str]) -> str | None:
    """X, where `node` is `self.X`."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return node.attr if node.value.id in selves else None
    return None


def named_by(node: ast.AST, selves: frozenset[str], *functions: str) -> str | None:
    """X, where `node` is `getattr(self, "X", ...)`, or calls another of `functions` so."""
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in functions
        and len(node.args) >= 2
    ):
        on, name = node.args[:2]
        if isinstance(on, ast.Name) and on.id in selves and isinstance(name, ast.Constant):
            return str(name.value)
    return None


class ClassView:
    """A class with what it inherits.

    Bases from another part of the package (a tuner's) have no part in planning, and their files
    are long: they are read only where a method we came for is not found without.
    """

    def __init__(self, modules: Modules, found: Found, *wanted: str) -> None:
        if not isinstance(found.node, ast.ClassDef):
            raise TypeError("a ClassView needs a class")
        self.modules = modules
        self.module = found.module
        self.node = found.node
        self._home = ".".join(found.module.name.split(".")[:2])
        self._walks: dict[str, tuple[Step, ...]] = {}
        self._methods: dict[tuple[str, ast.ClassDef | None], MethodOf | None] = {}
        if any(self.method(name) is None for name in wanted):
            self._widen()

    def _widen(self) -> None:
        self._home = "flashinfer"
        self._methods.clear()

    def _lineage(self) -> Iterator[tuple[Module, ast.ClassDef]]:
        """The class, then its bases, depth first."""
        pending, seen = [(self.module, self.node)], set()
        while pending:
            module, node = pending.pop(0)
            if (module.name, node.name) in seen:
                continue
            seen.add((module.name, node.name))
            yield module, node
            bases = []
            for base in node.bases:
                if isinstance(base, ast.Name) and _is_from(module, base.id, self._home):
                    found = self.modules.find(module.name, base.id)
                    if found is not None and isinstance(found.node, ast.ClassDef):
                        bases.append((found.module, found.node))
            pending[:0] = bases

    def method(self, name: str, *, above: ast.ClassDef | None = None) -> MethodOf | None:
        """The method that a call would take; with `above`, the one that `super()` in there would
        take. Of several definitions in one class the last counts, overloads do not."""
        if (name, above) not in self._methods:
            found = self._look_up(name, above)
            if found is None and above is not None and self._home != "flashinfer":
                self._widen()
                found = self._look_up(name, above)
            self._methods[name, above] = found
        return self._methods[name, above]

    def _look_up(self, name: str, above: ast.ClassDef | None) -> MethodOf | None:
        passed = above is None
        for module, node in self._lineage():
            if passed:
                for statement in reversed(node.body):
                    if (
                        isinstance(statement, FunctionNode)
                        and statement.name == name
                        and not _is_stub(statement)
                    ):
                        return MethodOf(module, node, statement)
            passed = passed or node is above
        return None

    def walk(self, name: str) -> tuple[Step, ...]:
        """Every node of a method and of the methods of the same object that it names, in the order
        in which they would run. Empty where there is no such method."""
        if name not in self._walks:
            method = self.method(name)
            self._walks[name] = tuple(self._walk(method, set())) if method else ()
        return self._walks[name]

    def _walk(self, method: MethodOf, seen: set[ast.AST]) -> Iterator[Step]:
        seen.add(method.node)
        selves = _selves(method)
        for node in ordered(method.node):
            yield Step(method, node, selves)
            called = None
            if name := attribute_of(node, selves):
                called = self.method(name)
            elif isinstance(node, ast.Attribute) and _is_super(node.value):
                called = self.method(node.attr, above=method.owner)
            if called is not None and called.node not in seen:
                yield from self._walk(called, seen)


def _is_from(module: Module, name: str, home: str) -> bool:
    """Whether `name` is defined in this module, or imported from below `home`."""
    origins = [module.absolute(node) + "." for node, _ in module.bound.get(name, ())]
    return not origins or any(origin.startswith(home + ".") for origin in origins)


def _is_super(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super"
    )


def _selves(method: MethodOf) -> frozenset[str]:
    """`self`, and in a class method what it makes with `cls(...)`."""
    names = {method.receiver} - {""}
    if not method.is_decorated("classmethod"):
        return frozenset(names)
    for node in ast.walk(method.node):
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Call)
            and isinstance(node.value.func, ast.Name)
            and node.value.func.id in names
        ):
            names.update(target.id for target in node.targets if isinstance(target, ast.Name))
    return frozenset(names)


def assigned(function: FunctionNode, name: str) -> tuple[ast.expr, ...]:
    """The values that a local name is assigned in a function, in order."""
    return tuple(
        node.value
        for node in ordered(function)
        if isinstance(node, ast.Assign)
        and any(isinstance(target, ast.Name) and target.id == name for target in node.targets)
    )
