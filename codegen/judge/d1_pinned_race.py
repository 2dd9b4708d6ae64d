"""D1: FlashInfer's pinned workspace is written again while its copy is still queued.

In: every release of SGLang that plans on the host (0.4.3.post4 on), with a FlashInfer up to
0.6.18. Its C++ planner fills the wrapper's one pinned buffer and queues an asynchronous copy
of it to the device. Stock `plan` waits for the GPU before (it copies its inputs from there),
which drained that copy by accident; a plan from host arrays does not wait, so the second plan
ahead of a busy GPU overwrites the first. Measured with 0.6.18, FA2 and FA3: wrong output 10
times of 10. From FlashInfer 0.7.0 on a proxy copies from a fresh pinned tensor each time.

Told by: the planner copies (`PlanApi.planner_copies`), and
- a hand-written plan passes `_pin_memory_int_workspace_buffer` as it is, with no event or
  wait in it; or
- host arrays reach the stock plan of an eager wrapper (from 0.5.18 on: draft-extend).
A file that puts another buffer in the wrapper's place (`x._pin_memory_int_workspace_buffer =`)
stages, and is left alone.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ..errors import Problem
from .case import Case, flashinfer_name
from .plans import HandPlan
from .roles import role_of
from .source import words

CODE = "d1-pinned-race"
_BUFFER = "_pin_memory_int_workspace_buffer"
_WAITS = {"synchronize", "record", "query", "wait", "wait_event", "record_event"}
_HINT = "plan into a ring of pinned buffers, as `mlagen patch` does, or use FlashInfer 0.7 or later"


def find(case: Case) -> Iterator[Problem]:
    """The plans that reuse the pinned buffer unprotected."""
    if case.api is None or not case.api.planner_copies or _stages(case):
        return
    name = flashinfer_name(case.api)
    for plan in case.plans:
        if not _protected(plan):
            message = (
                f"`{plan.name}` has {name} fill the wrapper's one pinned workspace without "
                "waiting for the copy that the plan before it queued: two plans ahead of a busy "
                "GPU, the first replay computes with the second plan"
            )
            if plan.installed or not plan.direct:
                yield case.problem(plan.node, CODE, message, _HINT)
            else:
                yield case.note(
                    plan.node, CODE, message + " (reached only by a direct call here)", _HINT
                )
    for lengths in case.lengths:
        if getattr(lengths.function, "name", "") == "init_forward_metadata":
            yield case.problem(
                lengths.node,
                CODE,
                f"these host arrays reach the stock plan of an eager wrapper: {name} then no "
                "longer waits, and fills the wrapper's one pinned workspace while the copy of "
                "the plan before may be queued",
                _HINT,
            )


def _stages(case: Case) -> bool:
    return any(
        node.attr == _BUFFER and isinstance(node.ctx, ast.Store) and not case.source.ours(node)
        for node in case.source.attributes
    )


def _protected(plan: HandPlan) -> bool:
    pinned = [
        argument
        for argument in plan.arguments or ()
        if role_of(argument) == "pinned_int_workspace" or _BUFFER in words(argument)
    ]
    if plan.arguments is not None and not any(_BUFFER in words(part) for part in pinned):
        return True  # something else stands in its place
    if plan.function is None:
        return False
    return any(
        isinstance(part, ast.Call)
        and isinstance(part.func, ast.Attribute)
        and part.func.attr in _WAITS
        for part in ast.walk(plan.function)
    )
