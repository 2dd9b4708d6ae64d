"""Verify replay: the request and its way to the updater.

Replaced from 0.5.18 on: SGLang's own arrays and its assertion on seq_lens_cpu. In 0.5.18
those add the draft window twice for DFLASH; such inputs now get FlashInfer's own plan, from
0.5.19 on they keep what SGLang has for them.
"""

from __future__ import annotations

import libcst as cst

from ..backend import CallSite
from ..edits import Edit, add_arguments, before, instead
from ..nodes import assigned, is_name, mentions
from ..source import Refused, Source
from . import REQUEST, Context
from .upstream import (
    is_array_work,
    is_assertion,
    names_window,
    refuse_statement,
    replace_arguments,
)

#: What SGLang's own statements there work on. One that mentions them and is none of them is
#: refused, not kept: it would read arrays that are no longer made.
_OWN = frozenset(
    {
        "fast_plan_qo_indptr_cpu",
        "fast_plan_kv_indptr_cpu",
        "fast_plan_kv_len_arr_cpu",
        "ndt",
    }
)
_CHOICE = "use_generic_fast_plan"


def edits(context: Context) -> list[Edit]:
    backend = context.backend
    source = backend.source
    site = backend.verify_replay
    backend.require_names(site.function, "bs", "seq_lens", "seq_lens_cpu", "spec_info")
    guarded = not site.only("is_target_verify")
    if guarded:
        backend.require_names(site.function, "forward_mode")
    wrapper = site.argument("prefill_wrapper_paged")
    assert wrapper is not None
    lines = context.lines(
        "replay_verify",
        calls=("mlagen_request_verify",),
        wrapper=source.code(wrapper),
        guarded=guarded,
    )
    own = _own_statements(source, site)
    if not own:
        if context.features.upstream_verify:
            raise Refused(
                "anchor-missing",
                "looked for SGLang's host arrays in front of the verify replay, found none",
                source.first(site.statement),
            )
        return [
            before(source, "replay-verify", site.statement, lines),
            add_arguments(source, "replay-verify-call", site.call, **{REQUEST: REQUEST}),
        ]
    found = [instead(source, "replay-verify", own[0], own[-1], lines)]
    choice = [s for s in site.block[: site.index] if _is_choice(s)]
    if choice:
        found.append(instead(source, "replay-verify-choice", choice[0], choice[-1], ()))
    found.append(replace_arguments(source, "replay-verify-call", site))
    return found


def _own_statements(source: Source, site: CallSite) -> list[cst.BaseStatement]:
    """SGLang's own statements in front of the update, one run; Refused if others are mixed in
    or work on the same arrays."""
    statements = list(site.block[: site.index])
    own = [index for index, statement in enumerate(statements) if _is_own(statement)]
    for index, statement in enumerate(statements):
        mixed = own and own[0] < index < own[-1] and index not in own
        if mixed or (index not in own and mentions(statement, _OWN)):
            raise refuse_statement(source, statement, "among the host arrays of the verify replay")
    return [statements[index] for index in own]


def _is_own(statement: cst.BaseStatement) -> bool:
    return is_assertion(statement) or is_array_work(statement) or names_window(statement)


def _is_choice(statement: cst.BaseStatement) -> bool:
    """`use_generic_fast_plan = spec_info.spec_input_type != ...`, alone on its line."""
    made = assigned(statement)
    return made is not None and len(made[0]) == 1 and is_name(made[0][0], _CHOICE)
