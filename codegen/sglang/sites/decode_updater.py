"""The decode updater: a request is planned by its own function.

Added: `mlagen_request` through `update` and `call_begin_forward`; in front of the plan calls,
the plan of a request. Up to 0.5.21 also the KV lengths of a draft step's first plan, which
FlashInfer 0.7 compares with kv_indptr.
"""

from __future__ import annotations

from ..edits import Edit, add_arguments, add_parameter, before
from ..plan_call import find_plan_call
from ..source import Refused
from . import REQUEST, REQUEST_TYPE, Context


def edits(context: Context) -> list[Edit]:
    backend = context.backend
    source = backend.source
    update, call, begin = backend.updater("decode-updater-class")
    backend.require_names(begin, "kv_indptr", "kv_indices")
    if context.features.drafts:
        backend.require_names(begin, "kv_lens", "spec_info")
    plan = find_plan_call(source, begin, "wrapper")
    if plan.arguments["causal"] != "False":
        raise Refused(
            "anchor-changed",
            f"decode is planned with causal={plan.arguments['causal']}; expected False",
            plan.line,
        )
    lines = context.lines(
        "decode_updater",
        arguments=plan.arguments,
        kv_len=(
            f"{plan.arguments['kv_len_arr']} if spec_info is None else None"
            if context.features.drafts
            else plan.arguments["kv_len_arr"]
        ),
        corrects_capture=(
            context.features.drafts
            and b"kv_lens = (kv_indptr[1:] - kv_indptr[:-1])" not in source.data
        ),
    )
    return [
        add_parameter(source, "decode-updater-update", update, REQUEST, REQUEST_TYPE),
        add_arguments(source, "decode-updater-pass", call, **{REQUEST: REQUEST}),
        add_parameter(source, "decode-updater-begin", begin, REQUEST, REQUEST_TYPE),
        before(source, "decode-updater-plan", plan.statement, lines),
    ]
