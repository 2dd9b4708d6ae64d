"""Eager extends, draft-extend among them: a plan of its own from host lengths.

`extend_seq_lens_cpu` is set for every extend in every release, so lengths that differ
between requests are right. Added: the request and its way to the updater, also at the
draft-extend of the first EAGLE worker. Replaced from 0.5.18 on: SGLang's own arrays, which
assume that all requests have num_tokens_per_req tokens.
"""

from __future__ import annotations

import libcst as cst

from ..backend import CallSite
from ..edits import Edit, add_arguments, before, instead
from ..nodes import assigned, is_name, mentions, self_attribute, words
from ..source import Source
from . import REQUEST, Context
from .upstream import ARRAY_NAMES, names_window, refuse_statement, replace_arguments


def edits(context: Context) -> list[Edit]:
    backend = context.backend
    site = backend.extend_eager
    backend.require_names(site.function, "forward_batch")
    value = site.argument("use_ragged")
    ragged = None if value is None else backend.source.code(value)
    lines = context.lines(
        "eager_extend",
        calls=("mlagen_request_extend",),
        ragged=None if ragged == "False" else ragged,
    )
    upstream = _upstream_statements(backend.source, site)
    if upstream:
        first = instead(backend.source, "eager-extend", upstream[0], upstream[-1], lines)
        found = [first, replace_arguments(backend.source, "eager-extend-call", site)]
    else:
        found = [
            before(backend.source, "eager-extend", site.statement, lines),
            add_arguments(backend.source, "eager-extend-call", site.call, **{REQUEST: REQUEST}),
        ]
    old = backend.draft_extend_eager
    if old is not None:
        lines = context.lines("eager_extend", ragged=None)
        found += [
            before(backend.source, "eager-draft-extend", old.statement, lines),
            add_arguments(
                backend.source, "eager-draft-extend-call", old.call, **{REQUEST: REQUEST}
            ),
        ]
    return found


def _upstream_statements(source: Source, site: CallSite) -> list[cst.BaseStatement]:
    """SGLang's own statements that build host arrays, one run in front of the update; Refused
    if others are mixed in or work on the same arrays."""
    block = list(site.block[: site.index])
    first = next((i for i, statement in enumerate(block) if _clears(statement)), None)
    for index, statement in enumerate(block):
        own = first is not None and index >= first and _is_own(statement)
        behind = first is not None and index >= first
        if not own and (behind or mentions(statement, ARRAY_NAMES)):
            raise refuse_statement(source, statement, "among the host arrays of an eager extend")
    return block[first:] if first is not None else []


def _clears(statement: cst.BaseStatement) -> bool:
    """`qo_indptr_cpu = kv_indptr_cpu = kv_len_arr_cpu = None`."""
    made = assigned(statement)
    return (
        made is not None
        and is_name(made[1], "None")
        and {t.value for t in made[0] if isinstance(t, cst.Name)} == ARRAY_NAMES
    )


def _is_own(statement: cst.BaseStatement) -> bool:
    made = assigned(statement)
    if _clears(statement):
        return True
    if made is not None and len(made[0]) == 1 and is_name(made[0][0], "spec_info"):
        return words(made[1]) == {"forward_batch", "spec_info"}
    if isinstance(statement, cst.If) and statement.orelse is None:
        return all(_fills(inner) for inner in statement.body.body)
    return False


def _fills(statement: cst.BaseStatement | cst.BaseSmallStatement) -> bool:
    """A statement below the `if`: the window, the batch, a buffer, or one of the three names."""
    if not isinstance(statement, cst.BaseStatement):
        return False
    made = assigned(statement)
    if made is None or len(made[0]) != 1:
        return False
    target, value = made[0][0], made[1]
    if isinstance(target, cst.Name):
        own = {"forward_batch", "batch_size", "self", "bs"}
        named = target.value in ARRAY_NAMES | {"bs"}
        buffers = {name for name in words(value) if name.startswith("fast_plan_")}
        return names_window(statement) or (named and words(value) - buffers <= own)
    buffer = self_attribute(target.value) if isinstance(target, cst.Subscript) else None
    used = {name for name in words(value) if not name.startswith("fast_plan_")}
    return (
        buffer is not None
        and buffer.startswith("fast_plan_")
        and used
        <= {"torch", "arange", "cumsum", "int32", "dtype", "dim", "self", "bs", "ndt"}
        | {"forward_batch", "seq_lens_cpu"}
    )
