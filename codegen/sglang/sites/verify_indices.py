"""The KV indices of a captured verify graph: filled in place, not made anew and copied.

Added in front of the chain that makes them, and with the plan, so that the chain is left out:
SGLang's `generate_attn_arg_prefill` allocates by a host sum of lengths, and the plan would have to
copy. The statement that fills them is the file's own, of the branch without speculation. Verify's
input runs the same, on more lengths. In 0.5.20 and 0.5.21 it launches the kernel, and the statement
is a translator's method that launches it on the same table, or translates page numbers: with memory
that needs this, those releases refuse to speculate on FlashInfer.

A graph that the GPU plans has to have it. Where the host plans, a file that has no place for it
keeps its own way, and the plan copies. So does one whose verify input fills by a method that it is
given (0.5.22 on), and not by a launch of the kernel: in 0.5.23 it has that method use more blocks a
request than the branch without speculation does, and long contexts would be filled more slowly than
they are. What the method knows stands in another file.
"""

from __future__ import annotations

import libcst as cst

from ..edits import Edit, before
from ..nodes import alone, bound_by, branches, contains, walk, words
from ..plan_call import PlanCall, find_plan_call
from ..source import Refused, Source
from . import Context

#: The parameter of the plan method that holds the wrapper, and what the request gives anew.
_WRAPPER = "wrapper_paged"
_LENGTHS = "paged_kernel_lens"
_SUM = "paged_kernel_lens_sum"
#: Makes the indices of a pass with speculation; from 0.5.22 on out of what a translator knows.
_MAKES_INDICES = "spec_info.generate_attn_arg_prefill"
_TABLE = "req_to_token"
#: In a word of that call: it says how to fill, and the kernel alone is not all there is to know.
_OTHER_WAYS = ("translator", "block")
_GIVEN = frozenset({_LENGTHS, "kv_indptr", "kv_indices"})
#: The plan's arguments beside its arrays.
_SHAPE = (
    "num_heads",
    "head_dim_ckv",
    "head_dim_kpe",
    "page_size",
    "sm_scale",
    "q_data_type",
    "kv_data_type",
)


def edits(context: Context) -> list[Edit]:
    if "target-verify" in context.device:
        return [_edit(context)]
    try:
        return [_edit(context, alike=True)]
    except Refused:
        return []


def _edit(context: Context, *, alike: bool = False) -> Edit:
    """`alike`: only where verify's input is known to fill as the statement does, by one block of
    the kernel a request."""
    backend = context.backend
    source = backend.source
    _, _, begin = backend.updater("prefill-updater-class")
    backend.require_names(begin, _WRAPPER, _LENGTHS, "spec_info")
    plan = find_plan_call(source, begin, _WRAPPER)
    chain = _chain(source, begin, plan)
    fill = _fill(source, chain)
    if alike and not (_launches(fill) or _given_the_table(source, chain)):
        what = "verify's input fills kv_indices by a method that stands in another file"
        raise Refused("anchor-changed", what, source.first(fill))
    _refuse_unbound(source, begin, chain, fill, plan)
    lines = context.lines(
        "verify_indices",
        calls=("mlagen_bound_arrays",),
        lengths=_LENGTHS,
        sum=_SUM if _SUM in words(fill) else None,
        statement=_text(source, fill),
        arguments=plan.arguments,
    )
    return before(source, "verify-indices", chain, lines)


def _chain(source: Source, begin: cst.FunctionDef, plan: PlanCall) -> cst.If:
    """The `if spec_info is None:` of the plan method, with the plan directly behind it.

    Refused where something stands between them: a return in front of the chain would skip it.
    """
    found = [
        statement
        for statement in begin.body.body
        if isinstance(statement, cst.If) and source.code(statement.test) == "spec_info is None"
    ]
    what = f"`if spec_info is None:` in {begin.name.value}"
    chain = source.exactly_one(found, what, line=source.first(begin))
    block = list(begin.body.body)
    for statement in block[block.index(chain) + 1 :]:
        if contains(statement, plan.statement):
            return chain
        raise Refused(
            "anchor-changed",
            f"a statement stands between {what} and the plan: "
            f"{source.text(source.first(statement)).strip()}",
            source.first(statement),
            "a captured graph would skip it; move it, or patch this site by hand",
        )
    raise Refused("anchor-changed", f"{what} holds the plan", source.first(chain))


def _fill(source: Source, chain: cst.If) -> cst.BaseStatement:
    """The call that fills the indices on the device, alone on its lines."""
    found = [statement for statement in chain.body.body if _fills(statement)]
    what = f"call that fills kv_indices by kv_indptr and {_LENGTHS} where spec_info is None"
    fill = source.exactly_one(found, what, line=source.first(chain))
    assert isinstance(fill, cst.BaseStatement)
    return fill


def _fills(statement: cst.BaseStatement | cst.BaseSmallStatement) -> bool:
    small = alone(statement) if isinstance(statement, cst.BaseStatement) else None
    if not isinstance(small, cst.Expr) or not isinstance(small.value, cst.Call):
        return False
    given = {arg.value.value for arg in small.value.args if isinstance(arg.value, cst.Name)}
    return given >= _GIVEN


def _launches(fill: cst.BaseStatement) -> bool:
    """Whether it is `kernel[grid](...)`."""
    small = alone(fill)
    return (
        isinstance(small, cst.Expr)
        and isinstance(small.value, cst.Call)
        and isinstance(small.value.func, cst.Subscript)
    )


def _given_the_table(source: Source, chain: cst.If) -> bool:
    """Whether verify's input is given the table of pages and no translator (0.5.21 and before), by
    each branch that it may be in: what fills from it is the kernel, one block a request."""
    _, *others = [body for _, body in branches(chain)]  # the first is without speculation
    calls = [_index_calls(source, body) for body in others]
    return bool(calls) and all(found and all(map(_by_table, found)) for found in calls)


def _index_calls(source: Source, body: cst.BaseSuite) -> list[cst.Call]:
    """Where verify's input makes the indices, below a branch."""
    return [
        node
        for node in walk(body)
        if isinstance(node, cst.Call) and source.code(node.func) == _MAKES_INDICES
    ]


def _by_table(call: cst.Call) -> bool:
    return any(_last_name(arg.value) == _TABLE for arg in call.args) and not any(
        other in word for word in words(call) for other in _OTHER_WAYS
    )


def _last_name(value: cst.BaseExpression) -> str | None:
    """`req_to_token` of `self.req_to_token`, and of the name by itself."""
    if isinstance(value, cst.Attribute):
        return value.attr.value
    return value.value if isinstance(value, cst.Name) else None


def _refuse_unbound(
    source: Source,
    begin: cst.FunctionDef,
    chain: cst.If,
    fill: cst.BaseStatement,
    plan: PlanCall,
) -> None:
    """Refuse where the statement, or the plan's shape, needs what is bound further down."""
    inside = _bound(begin.body)
    outside = frozenset(p.name.value for p in walk(begin.params) if isinstance(p, cst.Param))
    for statement in begin.body.body:
        if statement is chain:
            break
        outside |= _bound(statement)
    shape = frozenset().union(
        *(words(cst.parse_expression(plan.arguments[name])) for name in _SHAPE)
    )
    for what, needed, node in (
        ("the call that fills kv_indices", words(fill) - _GIVEN, fill),
        ("the plan", shape, plan.statement),
    ):
        lost = sorted((needed & inside) - outside)
        if lost:
            raise Refused(
                "anchor-changed",
                f"{what} needs {', '.join(lost)}, bound in a branch alone",
                source.first(node),
                f"bind it ahead of `if {source.code(chain.test)}:`, or patch this site by hand",
            )


def _bound(statement: cst.CSTNode) -> frozenset[str]:
    """All names that it binds, and what stands below it."""
    return frozenset().union(*(bound_by(node) for node in walk(statement)))


def _text(source: Source, statement: cst.BaseStatement) -> list[str]:
    """The lines of a statement without its indentation."""
    first = source.first(statement)
    indent = source.indent(first)
    lines = [source.text(line) for line in range(first, source.last(statement) + 1)]
    return [line.removeprefix(indent) for line in lines]
