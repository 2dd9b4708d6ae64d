"""D11: a host plan in a step that can be captured into a graph itself.

In: 0.5.19 to 0.5.23, with `SGLANG_ENABLE_METADATA_GLUE_GRAPH` (off by default). The runner
then captures `init_forward_metadata_out_graph`, the metadata step of replay: device work is
replayed, a plan made on the host is not, so every later step computes with the lengths of
the capture. Nothing fails; acceptance collapses. The runner excludes DFLASH only.

Told by: a plan installed on a wrapper without `is_current_stream_capturing` anywhere, in a
file with `init_forward_metadata_out_graph` and `attn_backend_list`, the attribute through which
that capture finds the back ends.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ..errors import Problem
from .case import Case

CODE = "d11-frozen-plan"


def find(case: Case) -> Iterator[Problem]:
    """Installed plans that a capture of the metadata step would freeze."""
    methods = {getattr(function, "name", "") for function in case.source.functions}
    listed = any(
        node.attr == "attn_backend_list" and isinstance(node.ctx, ast.Store)
        for node in case.source.attributes
    )
    if "init_forward_metadata_out_graph" not in methods or not listed:
        return
    if case.mentions("is_current_stream_capturing"):
        return
    for plan in case.plans:
        if plan.installed:
            yield case.problem(
                plan.node,
                CODE,
                f"`{plan.name}` plans on the host in a step that "
                "SGLANG_ENABLE_METADATA_GLUE_GRAPH captures: the plan is frozen in silence",
                "leave that switch off, or refuse while "
                "`torch.cuda.is_current_stream_capturing()`; `mlagen patch` does",
            )
