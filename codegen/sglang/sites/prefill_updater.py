"""The prefill updater: a request is planned by its own function.

Added: `mlagen_request` through `update` and `call_begin_forward`; in front of the plan call,
behind the change of indices that context parallelism makes, the plan of a request. Full
lengths match those indices: they are laid out by the full lengths.
"""

from __future__ import annotations

from collections.abc import Sequence

import libcst as cst

from ..edits import Edit, add_arguments, add_parameter, before
from ..nodes import assigned
from ..plan_call import PlanCall, find_plan_call
from ..source import Refused
from . import REQUEST, REQUEST_TYPE, Context


def edits(context: Context) -> list[Edit]:
    backend = context.backend
    source = backend.source
    update, call, begin = backend.updater("prefill-updater-class")
    backend.require_names(begin, "qo_indptr", "kv_indptr", "kv_indices")
    plan = find_plan_call(source, begin, "wrapper_paged")
    if plan.arguments["causal"] != "True":
        raise Refused(
            "anchor-changed",
            f"verify is planned with causal={plan.arguments['causal']}; expected True",
            plan.line,
        )
    unpaged = plan.arguments["page_size"] == "1"
    place = _ahead_of_own_arguments(plan) if unpaged else plan.statement
    lines = context.lines(
        "prefill_updater",
        arguments={
            **plan.arguments,
            "qo_indptr": "qo_indptr",
            "kv_indptr": "kv_indptr",
            "kv_indices": "kv_indices",
        },
        kv_len="None" if unpaged else plan.arguments["kv_len_arr"],
    )
    return [
        add_parameter(source, "prefill-updater-update", update, REQUEST, REQUEST_TYPE),
        add_arguments(source, "prefill-updater-pass", call, **{REQUEST: REQUEST}),
        add_parameter(source, "prefill-updater-begin", begin, REQUEST, REQUEST_TYPE),
        before(source, "prefill-updater-plan", place, lines),
    ]


def _ahead_of_own_arguments(plan: PlanCall) -> cst.BaseStatement:
    """The first of the assignments that only prepare the stock plan's arguments.

    Our plan needs none of them; on the device each is a kernel to launch.
    """
    prepared = frozenset(
        plan.arguments[name] for name in ("qo_indptr", "kv_indptr", "kv_len_arr")
    ) - {"qo_indptr", "kv_indptr"}
    block: Sequence[cst.BaseStatement] = plan.block
    place = block.index(plan.statement)
    while place > 0 and _only_assigns(block[place - 1], prepared):
        place -= 1
    return block[place]


def _only_assigns(statement: cst.BaseStatement, names: frozenset[str]) -> bool:
    made = assigned(statement)
    return made is not None and all(
        isinstance(target, cst.Name) and target.value in names for target in made[0]
    )
