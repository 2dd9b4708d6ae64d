"""The multi-step draft back end tells each back end its step.

Added in the loop that drives the steps, which capture, replay and eager passes share.
"""

from __future__ import annotations

import libcst as cst

from ..edits import Edit, before
from ..nodes import is_call, walk
from ..source import Refused
from . import Context


def edits(context: Context) -> list[Edit]:
    source = context.backend.source
    names = context.backend.names
    if not context.features.drafts and not context.backend.has_verify:
        return []
    owner = source.one_class(names["draft-backend-class"])
    method = source.one_method(owner, names["draft-loop-method"])
    loops = [
        node
        for node in walk(method)
        if isinstance(node, cst.For)
        and isinstance(node.target, cst.Name)
        and any(is_call(inner, "call_fn") for inner in walk(node))
    ]
    loop = source.exactly_one(
        loops,
        f"loop over draft steps in {owner.name.value}.{method.name.value}",
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
    backends = names["draft-backends"]
    if f"self.{backends}[".encode() not in source.data:
        raise Refused(
            "anchor-missing", f"looked for self.{backends}, found none", source.first(owner)
        )
    assert isinstance(loop.target, cst.Name)
    lines = context.lines("multi_step", step=loop.target.value)
    return [before(source, "multi-step", call, lines)]
