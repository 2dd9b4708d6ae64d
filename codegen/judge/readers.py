"""What in a `flashinfer_mla_backend.py` reads lengths on the host: data for `inspect`.

SGLang keeps each batch's lengths on the host for a back end that asks for them
(`needs_cpu_seq_lens`), which costs a wait. Here is what stands in the way of not asking: every
place that uses such a value. To hand it on, to a local or to a function of the file, is no use;
the value is followed there by the name that it gets. What is computed from it is not followed.

Where a value cannot be followed (into a dict, an attribute, out of the file) that is told as a
use, so that nothing is left out.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass

from .bindings import Bindings, parts
from .calls import Calls, defaults, parameters
from .source import Source, dotted

#: Lengths on the host, as attributes of a batch and as parameters.
HOST_LENGTHS = frozenset(
    {
        "seq_lens_cpu",
        "decode_seq_lens_cpu",  # 0.4.4
        "seq_lens_sum",
        "paged_kernel_lens_sum",
        "extend_prefix_lens_cpu",
        "extend_seq_lens_cpu",
    }
)
_ALLOCATORS = frozenset(
    f"{prefix}{name}"
    for prefix in ("", "new_")
    for name in ("empty", "zeros", "ones", "full", "arange")
)
#: (kind of parent, field) -> the use.
_USES: dict[tuple[type[ast.AST], str], str] = {
    (ast.If, "test"): "tested",
    (ast.While, "test"): "tested",
    (ast.IfExp, "test"): "tested",
    (ast.BoolOp, "values"): "tested",
    (ast.comprehension, "ifs"): "tested",
    (ast.Match, "subject"): "tested",
    (ast.Assert, "test"): "tested",
    (ast.For, "iter"): "gone through",
    (ast.AsyncFor, "iter"): "gone through",
    (ast.comprehension, "iter"): "gone through",
    (ast.YieldFrom, "value"): "gone through",
    (ast.Starred, "value"): "gone through",
    (ast.Return, "value"): "returned",
    (ast.Lambda, "body"): "returned",
    (ast.Yield, "value"): "returned",
    (ast.FormattedValue, "value"): "written out",
    (ast.AugAssign, "value"): "computed with",
    (ast.BinOp, "left"): "computed with",
    (ast.BinOp, "right"): "computed with",
    (ast.UnaryOp, "operand"): "computed with",
    (ast.Tuple, "elts"): "put into a tuple",
    (ast.List, "elts"): "put into a list",
    (ast.Set, "elts"): "put into a set",
    (ast.Dict, "values"): "put into a dict",
    (ast.Dict, "keys"): "put into a dict",
    (ast.ListComp, "elt"): "put into a list",
    (ast.SetComp, "elt"): "put into a set",
    (ast.DictComp, "key"): "put into a dict",
    (ast.DictComp, "value"): "put into a dict",
    (ast.GeneratorExp, "elt"): "put into a generator",
    (ast.Raise, "exc"): "raised",
}


@dataclass(frozen=True)
class HostRead:
    """One use of lengths on the host.

    Attributes:
        line: from 1.
        where: `Class.method`.
        expression: source text, of the value with what is computed of it on the spot.
        use: what for, in a few words.
        ours: it stands in a line that mlagen wrote.
    """

    line: int
    where: str
    expression: str
    use: str
    ours: bool


def find_reads(source: Source) -> tuple[HostRead, ...]:
    """All uses, in the order of the file."""
    return _Readers(source).reads()


class _Readers:
    """One file's search: first which parameters hold lengths, then what is done with them."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._bindings = Bindings(source)
        self._calls = Calls(source, self._bindings)
        self._holding: set[ast.AST] = {
            parameter
            for function in source.functions
            for parameter in parameters(function)
            if parameter.arg in HOST_LENGTHS
        }
        given = [
            (value, parameter)
            for function in source.functions
            for parameter, value in defaults(function)
        ]
        for call in source.calls:
            given += self._calls.given(call)
        known = -1
        while known < len(self._holding):  # each round follows the values one call further
            known = len(self._holding)
            self._holding |= {parameter for value, parameter in given if self._holds(value)}

    def reads(self) -> tuple[HostRead, ...]:
        found: dict[HostRead, None] = {}
        for node in (*self._source.attributes, *self._source.names, *self._source.calls):
            if self._is_read(node) and self._holds(node):
                use = self._use(node)
                if use is not None:
                    found[use] = None
        return tuple(sorted(found, key=lambda read: read.line))

    # -- what holds lengths ---------------------------------------------------------------

    def _is_read(self, node: ast.expr) -> bool:
        """Whether the value at `node` is looked at, and not only replaced or deleted."""
        if isinstance(getattr(node, "ctx", None), (ast.Store, ast.Del)):
            parent, field = self._parent(node)
            return isinstance(parent, ast.AugAssign) and field == "target"
        return True

    def _holds(self, node: ast.expr) -> bool:
        """Whether an expression may be lengths on the host, unchanged."""
        pending: list[ast.expr] = [node]
        seen: set[ast.AST] = set()  # a loop hands a name round
        while pending:
            part = pending.pop()
            if part in seen:
                continue
            seen.add(part)
            if isinstance(part, ast.Attribute):
                if part.attr in HOST_LENGTHS:
                    return True
            elif isinstance(part, ast.Call):
                if _is_getattr(part):
                    return True
            elif isinstance(part, ast.Name):
                bindings = self._bindings.seen_by(part)
                if any(bound.node in self._holding for bound in bindings):
                    return True
                pending += [bound.value for bound in bindings if bound.value is not None]
            else:
                pending += _one_of(part)
        return False

    # -- what is done with them -----------------------------------------------------------

    def _parent(self, node: ast.AST) -> tuple[ast.AST, str]:
        return next(self._source.ancestors(node))

    def _use(self, value: ast.expr) -> HostRead | None:
        """The use of `value` where it stands; None where it is handed on."""
        node = self._unchanged(value)
        if self._is_handed_on(node):
            return None
        shown, use = self._told(node)
        return HostRead(
            line=value.lineno,
            where=self._source.where(value),
            expression=ast.unparse(shown),
            use="asserted" if self._is_asserted(node) else use,
            ours=self._source.ours(value),
        )

    def _unchanged(self, node: ast.expr) -> ast.expr:
        """The outermost expression that is `node` unchanged: `a` of `b if c else a`."""
        parent, _ = self._parent(node)
        while isinstance(parent, ast.expr) and node in _passed_through(parent):
            node = parent
            parent, _ = self._parent(node)
        return node

    def _is_handed_on(self, node: ast.expr) -> bool:
        """Whether a value only gets another name: a local's, or a parameter's."""
        parent, field = self._parent(node)
        if isinstance(parent, (ast.Expr, ast.arguments)):
            return True
        if isinstance(parent, ast.AnnAssign):
            return field == "value" and isinstance(parent.target, ast.Name)
        if isinstance(parent, ast.Assign):
            return all(isinstance(target, ast.Name) for target in parent.targets)
        if isinstance(parent, (ast.Tuple, ast.List)):
            around, field = self._parent(parent)
            return isinstance(around, ast.Assign) and _is_unpacked(node, parent, around.targets)
        if isinstance(parent, ast.keyword):
            parent, _ = self._parent(parent)
        return isinstance(parent, ast.Call) and any(
            given is node for given, _ in self._calls.given(parent)
        )

    def _told(self, node: ast.expr) -> tuple[ast.AST, str]:
        """The expression to show, and what it is for."""
        parent, field = self._parent(node)
        if isinstance(parent, ast.AugAssign):
            return parent, "computed with"
        if isinstance(parent, ast.Subscript) and field == "value":
            if not isinstance(parent.ctx, ast.Load):
                return parent, "written into"
            return parent, "sliced" if _slices(parent) else "indexed"
        if isinstance(parent, ast.Attribute):
            around, field = self._parent(parent)
            if isinstance(around, ast.Call) and field == "func":
                return around, f"asked for its {parent.attr}()"
            return parent, f"asked for its {parent.attr}"
        if isinstance(parent, ast.Compare):
            return parent, "tested for None" if _with_none(parent) else "compared"
        if isinstance(parent, ast.UnaryOp) and isinstance(parent.op, ast.Not):
            return parent, "tested"
        if isinstance(parent, (ast.Assign, ast.AnnAssign)):
            targets = parent.targets if isinstance(parent, ast.Assign) else [parent.target]
            return node, f"kept in {', '.join(ast.unparse(target) for target in targets)}"
        if isinstance(parent, ast.Call) and field == "func":
            return parent, "called"
        return self._computed(node) or (node, _USES.get((type(parent), field), "used"))

    def _computed(self, node: ast.expr) -> tuple[ast.AST, str] | None:
        """What a value is for that arithmetic, or a shape, is made of: a slice, a size, an
        argument; None where it is for none of them."""
        top: ast.AST = node
        shown: ast.AST = node
        for parent, field in self._source.ancestors(node):
            if isinstance(parent, ast.Subscript) and field == "slice":
                how = "slices" if _slices(parent) else "indexes"
                return shown, f"{how} {ast.unparse(parent.value)}"
            if isinstance(parent, (ast.Call, ast.keyword)):
                return shown, self._passed(parent, top)
            if isinstance(parent, (ast.BinOp, ast.UnaryOp)):
                shown = parent
            elif not isinstance(parent, (ast.Slice, ast.Tuple, ast.List, ast.Starred)):
                break
            top = parent
        return (shown, "computed with") if shown is not node else None

    def _passed(self, parent: ast.Call | ast.keyword, argument: ast.AST) -> str:
        """What a value is for that is (in) an argument."""
        name = parent.arg if isinstance(parent, ast.keyword) else None
        call = self._parent(parent)[0] if isinstance(parent, ast.keyword) else parent
        if not isinstance(call, ast.Call):
            return "used"  # a keyword of a class
        size = name == "size" or (bool(call.args) and call.args[0] is argument)
        method = call.func.attr if isinstance(call.func, ast.Attribute) else ""
        if size and method in _ALLOCATORS:
            return "sizes an allocation"
        return f"passed to {dotted(call.func) or ast.unparse(call.func)}"

    def _is_asserted(self, node: ast.expr) -> bool:
        for parent, field in self._source.ancestors(node):
            if isinstance(parent, ast.Assert):
                return field == "test"
            if not isinstance(parent, (ast.expr, ast.keyword, ast.comprehension)):
                break
        return False


def _one_of(node: ast.expr) -> tuple[ast.expr, ...]:
    """The expressions one of which is what `node` evaluates to."""
    if isinstance(node, ast.IfExp):
        return (node.body, node.orelse)
    if isinstance(node, ast.BoolOp):
        return tuple(node.values)
    return (node.value,) if isinstance(node, ast.NamedExpr) else ()


def _passed_through(node: ast.expr) -> tuple[ast.expr, ...]:
    """Those of `_one_of` whose value is not looked at: `a or b` tests `a`."""
    return _one_of(node)[-1:] if isinstance(node, ast.BoolOp) else _one_of(node)


def _is_getattr(node: ast.Call) -> bool:
    """`getattr(x, "seq_lens_cpu", ...)`."""
    if not isinstance(node.func, ast.Name) or node.func.id != "getattr" or len(node.args) < 2:
        return False
    name = node.args[1]
    return isinstance(name, ast.Constant) and name.value in HOST_LENGTHS


def _is_unpacked(node: ast.expr, among: ast.Tuple | ast.List, targets: list[ast.expr]) -> bool:
    """Whether an element of what is unpacked goes to a local, in each target."""
    place = among.elts.index(node)
    return all(
        isinstance(target, (ast.Tuple, ast.List))
        and parts(among, target)[place : place + 1] == [node]
        and isinstance(target.elts[place], ast.Name)
        for target in targets
    )


def _slices(node: ast.Subscript) -> bool:
    of = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    return any(isinstance(part, ast.Slice) for part in of)


def _with_none(node: ast.Compare) -> bool:
    return any(
        isinstance(part, ast.Constant) and part.value is None
        for part in (node.left, *node.comparators)
    )
