"""A draft chain whose sum of lengths the host is not told, where the GPU plans its graphs.

Added behind the statement that takes the sum: without one, as much as a row of the index buffer
holds. SGLang sizes views of the rows by it, which a graph that plans itself does not look at, and
passes that plan on the host may be longer than what they need.

A file that takes the sum in another way keeps that: there None is SGLang's own error.
"""

from __future__ import annotations

import libcst as cst

from ..edits import Edit, after
from ..nodes import alone, bound_by, words
from . import Context

#: What the lines name: a parameter of the method, and what it uses itself.
_BUFFER, _ROWS = "kv_indices_buffer", "bs"
_USED = frozenset({"topk", "speculative_num_steps"})


def edits(context: Context) -> list[Edit]:
    source = context.backend.source
    names = context.backend.names
    if not context.features.drafts or "draft-decode" not in context.device:
        return []
    owner = source.one_class(names["draft-backend-class"])
    method = source.one_method(owner, names["draft-loop-method"])
    parameters = {param.name.value for param in method.params.params}
    if _BUFFER not in parameters or not words(method.body) >= _USED:
        return []
    bound: set[str] = set()
    for statement in method.body.body:
        taken = _sum_taken(statement)
        if taken is not None and _ROWS in bound:
            lines = context.lines("draft_sum", sum=taken)
            return [after(source, "draft-sum", statement, lines)]
        if isinstance(statement, cst.SimpleStatementLine):
            for small in statement.body:
                bound |= bound_by(small)
    return []


def _sum_taken(statement: cst.CSTNode) -> str | None:
    """The name that a statement gives the batch's sum of lengths, if that is all it does."""
    small = alone(statement) if isinstance(statement, cst.BaseStatement) else None
    if not isinstance(small, cst.Assign) or len(small.targets) != 1:
        return None
    target, value = small.targets[0].target, small.value
    if not isinstance(target, cst.Name) or not isinstance(value, cst.Attribute):
        return None
    return target.value if value.attr.value == "seq_lens_sum" else None
