"""The multi-step draft back end tells each back end its step.

Added in the loop that drives the steps, which capture, replay and eager passes share.
"""

from __future__ import annotations

import libcst as cst

from ..backend import MULTI_STEP_CLASS
from ..edits import Edit, before
from ..nodes import is_call, walk
from ..source import Refused
from . import Context


def edits(context: Context) -> list[Edit]:
    source = context.backend.source
    if not context.features.drafts and not context.backend.has_verify:
        return []
    owner = source.one_class(MULTI_STEP_CLASS)
    method = source.one_method(owner, "common_template")
    loops = [
        node
        for node in walk(method)
        if isinstance(node, cst.For)
        and isinstance(node.target, cst.Name)
        and any(is_call(inner, "call_fn") for inner in walk(node))
    ]
    loop = source.exactly_one(
        loops,
        f"loop over draft steps in {MULTI_STEP_CLASS}.common_template",
        line=source.first(method),
    )
    calls = [
        statement
        for statement in loop.body.body
        if isinstance(statement, cst.SimpleStatementLine)
        and isinstance(statement.body[0], cst.Expr)
        and is_call(statement.body[0].value, "call_fn")
    ]
    call = source.exactly_one(calls, "call of call_fn in that loop", line=source.first(loop))
    if b"self.attn_backends[" not in source.data:
        raise Refused(
            "anchor-missing", "looked for self.attn_backends, found none", source.first(owner)
        )
    assert isinstance(loop.target, cst.Name)
    lines = context.lines("multi_step", step=loop.target.value)
    return [before(source, "multi-step", call, lines)]
