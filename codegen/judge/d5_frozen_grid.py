"""D5: the grid that the planner chose may differ from the one that the graph captured.

The planner takes clusters of 2 when tokens times heads of a request exceed 64 on average,
else of 1, and the captured graph keeps the grid of its first plan. A replay that crosses that
line runs half of the work list only.

In: 0.4.7 to 0.5.13, draft-extend graphs of the first EAGLE worker: captured with steps + 1
tokens a request, replayed with the accepted ones (16 heads: from 4 steps on). And in
every hand-written plan: it drops the plan_info (`plan_info[0:2]` is the grid), so nobody would
notice; harmless as long as the tokens a request do not change.

Told by: a wrapper with `use_cuda_graph=True` made in a draft-extend branch; a private call
whose result is not used. Both are notes: the first is stock code that no plan in this file can
mend, the second is wrong only together with such a change.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..errors import Problem
from .case import Case
from .source import dotted, is_true, keyword

CODE = "d5-frozen-grid"


def find(case: Case) -> Iterator[Problem]:
    """Captured draft-extend wrappers, and plans that drop the plan_info."""
    for call in case.source.calls:
        made = (dotted(call.func) or "").endswith("BatchMLAPagedAttentionWrapper") and is_true(
            keyword(call, "use_cuda_graph")
        )
        if made and "draft-extend" in case.source.modes(call):
            yield case.note(
                call,
                CODE,
                "draft-extend is captured with a fixed number of tokens a request and replayed "
                "with the accepted ones: where tokens times heads cross 64 the grid changes "
                "and half of the work is left out",
                "do not capture draft-extend with this back end; mlagen leaves it as it is",
            )
    for plan in case.plans:
        if not plan.kept and plan.installed and not plan.eager:
            yield case.note(
                plan.call,
                CODE,
                f"`{plan.name}` drops the plan_info: a plan for another grid than the captured "
                "one (`plan_info[0:2]`) would go unnoticed",
                "compare it with the captured one and raise; `mlagen patch` does",
            )
