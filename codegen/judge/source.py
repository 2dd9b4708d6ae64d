"""A parsed `flashinfer_mla_backend.py`, indexed once for all that judge it.

Reading is by `ast`: nothing is edited here, and one pass over the tree of the largest
release (1445 lines) costs about 20 ms. What the index answers: where a node stands (class,
function, branch), what a name was assigned from, and whether mlagen wrote it.
"""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from ..errors import DriftError, Problem
from ..provenance import find_regions

#: The class that makes a file SGLang's FlashInfer MLA back end, in every release.
BACKEND_CLASS = "FlashInferMLAAttnBackend"

Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda

#: What a branch serves, by the method of ForwardMode that its test calls.
_MODES = {
    "is_decode": "decode",
    "is_decode_or_idle": "decode",
    "is_target_verify": "verify",
    "is_draft_extend": "draft-extend",
    "is_draft_extend_v2": "draft-extend",
}


@dataclass(frozen=True)
class Definition:
    """One assignment. `store` tells that it writes into a slice or an element of the target
    (so the target's dtype stays)."""

    value: ast.expr
    node: ast.AST
    store: bool = False


class Source:
    """The tree of one file with its index. Made by `read_source`; read only."""

    def __init__(self, tree: ast.Module, regions: tuple[tuple[int, int], ...], path: str) -> None:
        self.tree = tree
        self.regions = regions
        self.path = path
        self.calls: list[ast.Call] = []
        self.names: list[ast.Name] = []
        self.attributes: list[ast.Attribute] = []
        self.asserts: list[ast.Assert] = []
        self.subscripts: list[ast.Subscript] = []
        self.assignments: list[ast.Assign] = []
        self.functions: list[Function] = []
        self._parent: dict[ast.AST, tuple[ast.AST, str]] = {}
        self._local: dict[tuple[Function | None, str], list[Definition]] = {}
        self._of_class: dict[tuple[ast.ClassDef | None, str], list[Definition]] = {}
        definitions: list[ast.AST] = []
        stack: list[ast.AST] = [tree]
        while stack:
            node = stack.pop()
            if isinstance(node, ast.Call):
                self.calls.append(node)
            elif isinstance(node, ast.Name):
                self.names.append(node)
            elif isinstance(node, ast.Attribute):
                self.attributes.append(node)
            elif isinstance(node, ast.Assert):
                self.asserts.append(node)
            elif isinstance(node, ast.Subscript):
                self.subscripts.append(node)
            elif isinstance(node, Function):
                self.functions.append(node)
            elif isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.NamedExpr)):
                definitions.append(node)
                if isinstance(node, ast.Assign):
                    self.assignments.append(node)
            children: list[ast.AST] = []
            for field, value in ast.iter_fields(node):
                for child in value if isinstance(value, list) else (value,):
                    # Contexts (Load, Store) are shared objects without a place.
                    if isinstance(child, ast.AST) and not isinstance(child, ast.expr_context):
                        self._parent[child] = (node, field)
                        children.append(child)
            stack.extend(reversed(children))  # so that all lists are in the file's order
        for node in definitions:
            self._define(node)

    # -- places ---------------------------------------------------------------------------

    def line(self, node: ast.AST) -> int:
        """Line of `node` from 1; 0 where it has none."""
        return int(getattr(node, "lineno", 0))

    def ours(self, node: ast.AST) -> bool:
        """Whether mlagen wrote the line on which `node` starts."""
        line = self.line(node)
        return any(first < line < last for first, last in self.regions)

    def region_within(self, node: ast.AST) -> bool:
        """Whether mlagen wrote any line of `node`."""
        first, last = self.line(node), int(getattr(node, "end_lineno", 0) or 0)
        return any(first <= start and end <= last for start, end in self.regions)

    def ancestors(self, node: ast.AST) -> Iterator[tuple[ast.AST, str]]:
        """The nodes around `node`, innermost first, each with the field on the way down."""
        while node in self._parent:
            node, field = self._parent[node]
            yield node, field

    def function(self, node: ast.AST) -> Function | None:
        """The innermost function or lambda around `node`."""
        for parent, _ in self.ancestors(node):
            if isinstance(parent, Function):
                return parent
        return None

    def class_of(self, node: ast.AST) -> ast.ClassDef | None:
        """The innermost class around `node`."""
        for parent, _ in self.ancestors(node):
            if isinstance(parent, ast.ClassDef):
                return parent
        return None

    def where(self, node: ast.AST) -> str:
        """`Class.method` around `node`, `<module>` at the top level."""
        names = [
            parent.name
            for parent, _ in self.ancestors(node)
            if isinstance(parent, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        ]
        return ".".join(reversed(names)) or "<module>"

    def arms(self, node: ast.AST) -> dict[ast.If, str]:
        """The `if` statements around `node` within its function: which arm it stands in
        (`body` or `orelse`)."""
        found: dict[ast.If, str] = {}
        for parent, field in self.ancestors(node):
            if isinstance(parent, Function):
                break
            if isinstance(parent, ast.If) and field != "test":
                found[parent] = field
        return found

    def tests(self, node: ast.AST) -> list[ast.expr]:
        """What must hold for `node` to run, as far as `if ...:` bodies around it say."""
        return [test.test for test, arm in self.arms(node).items() if arm == "body"]

    def modes(self, node: ast.AST) -> frozenset[str]:
        """The modes served where `node` stands: of `decode`, `verify`, `draft-extend`; empty
        where no test around it names one."""
        found: set[str] = set()
        for test in self.tests(node):
            for part in ast.walk(test):
                if isinstance(part, ast.Call) and isinstance(part.func, ast.Attribute):
                    mode = _MODES.get(part.func.attr)
                    negated = any(
                        isinstance(parent, ast.UnaryOp) and isinstance(parent.op, ast.Not)
                        for parent, _ in self.ancestors(part)
                        if isinstance(parent, ast.expr)
                    )
                    if mode and not negated:
                        found.add(mode)
        return frozenset(found)

    # -- definitions ----------------------------------------------------------------------

    def definitions(
        self, name: str, function: Function | None, use: ast.AST | None = None
    ) -> list[Definition]:
        """What dotted `name` is assigned from in `function`; with `use`, without the
        assignments in another arm of an `if` that `use` stands in."""
        found = self._local.get((function, name), [])
        if use is None or not found:
            return found
        arms = self.arms(use)
        return [
            definition
            for definition in found
            if all(arms.get(test, arm) == arm for test, arm in self.arms(definition.node).items())
        ]

    def class_definitions(self, name: str, owner: ast.ClassDef | None) -> list[Definition]:
        """What dotted `name` (such as `self.decode_wrapper`) is assigned from in a class."""
        return self._of_class.get((owner, name), [])

    def _define(self, node: ast.AST) -> None:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                self._bind(target, node.value, node)
        elif isinstance(node, (ast.AugAssign, ast.AnnAssign, ast.NamedExpr)) and node.value:
            self._bind(node.target, node.value, node)

    def _bind(self, target: ast.expr, value: ast.expr, node: ast.AST) -> None:
        if isinstance(target, (ast.Tuple, ast.List)):
            values: list[ast.expr] = [value] * len(target.elts)
            if isinstance(value, (ast.Tuple, ast.List)) and len(value.elts) == len(target.elts):
                values = value.elts
            for part, part_value in zip(target.elts, values, strict=True):
                self._bind(part, part_value, node)
            return
        store = isinstance(target, ast.Subscript)
        name = dotted(target.value if isinstance(target, ast.Subscript) else target)
        if name is None:
            return
        definition = Definition(value, node, store)
        self._local.setdefault((self.function(node), name), []).append(definition)
        if "." in name:
            self._of_class.setdefault((self.class_of(node), name), []).append(definition)


def read_source(data: bytes, path: str) -> Source:
    """Parses and indexes `data`.

    Raises:
        DriftError: it does not parse (with the line), or has no back end class.
        EditedError: what mlagen wrote cannot be told from the rest: a region's marks do not
            match (`provenance.find_regions`).
    """
    try:
        with warnings.catch_warnings():
            # An invalid escape in a string of the file is not ours to report.
            warnings.simplefilter("ignore")
            tree = ast.parse(data)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = int(getattr(error, "lineno", 0) or 0)
        said = getattr(error, "msg", None) or str(error) or type(error).__name__
        raise DriftError(
            Problem(
                path,
                line,
                0,
                "does-not-parse",
                f"the file is not Python that this interpreter reads: {said}",
                "mend the file, or run mlagen with the Python version that SGLang runs with",
            )
        ) from None
    classes = [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
    if BACKEND_CLASS not in classes:
        found = ", ".join(classes[:5]) or "no class at all"
        raise DriftError(
            Problem(
                path,
                0,
                0,
                "not-sglang",
                f"looked for `class {BACKEND_CLASS}` at the top level, found {found}",
                "give sglang/srt/layers/attention/flashinfer_mla_backend.py, or a folder that "
                "holds it",
            )
        )
    regions = find_regions(data, path=path)
    return Source(tree, tuple((part.start_line, part.end_line) for part in regions), path)


def dotted(node: ast.AST) -> str | None:
    """`a.b.c` for a chain of names; None for anything else."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return None
    parts.append(node.id)
    return ".".join(reversed(parts))


def words(node: ast.AST) -> set[str]:
    """All names, attributes and keywords within `node`."""
    found: set[str] = set()
    for part in ast.walk(node):
        if isinstance(part, ast.Name):
            found.add(part.id)
        elif isinstance(part, ast.Attribute):
            found.add(part.attr)
        elif isinstance(part, ast.keyword) and part.arg:
            found.add(part.arg)
    return found


def keyword(call: ast.Call, *names: str) -> ast.expr | None:
    """The value of the first keyword of `call` that is in `names`."""
    for part in call.keywords:
        if part.arg in names:
            return part.value
    return None


def is_true(node: ast.AST | None) -> bool:
    """Whether `node` is the literal True."""
    return isinstance(node, ast.Constant) and node.value is True


def by_line(problems: Iterable[Problem]) -> tuple[Problem, ...]:
    """`problems` in the order of the file, each once."""
    return tuple(sorted(dict.fromkeys(problems), key=lambda problem: (problem.line, problem.code)))
