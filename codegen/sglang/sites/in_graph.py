"""A graph that plans itself: the plan is recorded into it, from lengths that are on the GPU.

Added: the back end's `init_forward_metadata_in_graph`, which SGLang's runners call inside of a
capture (0.5.13 on; the base class's does nothing), or a line at the end of a fork's own.
"""

from __future__ import annotations

import libcst as cst

from ..backend import Backend
from ..edits import Edit, after
from ..features import IN_GRAPH
from ..nodes import decorated, walk
from ..source import Refused
from . import Context

_CALLS = ("mlagen_record_plan",)
#: Its sibling outside of the graph: what a back end of this shape always has.
_OUT_GRAPH = "init_forward_metadata_out_graph"


def edits(context: Context) -> list[Edit]:
    if not context.features.in_graph:
        return []
    backend = context.backend
    source = backend.source
    _refuse_replaced(backend)
    methods = {m.name.value: m for m in source.methods(backend.backend_class)}
    own = methods.get(IN_GRAPH)
    if own is not None:
        last = _last_statement(backend, own)
        lines = context.lines("in_graph", _CALLS, own=True, batch=_batch(backend, own))
        return [after(source, "in-graph", last, lines)]
    sibling = methods.get(_OUT_GRAPH) or next(iter(methods.values()), None)
    if sibling is None:
        raise Refused(
            "anchor-missing",
            "looked for a method of the back end's class, found none",
            source.first(backend.backend_class),
        )
    typed = source.imported("ForwardBatch")
    lines = context.lines("in_graph", _CALLS, own=False, batch="forward_batch", typed=typed)
    line = source.first_with_comments(decorated(sibling))
    return [Edit("in-graph", line, source.indent(line), (*lines, ""))]


def _refuse_replaced(backend: Backend) -> None:
    found = backend.replaced_in(IN_GRAPH)
    if found is not None:
        derived, method = found
        raise Refused(
            "anchor-changed",
            f"{derived.name.value} replaces {IN_GRAPH} without calling it: its graphs would be "
            "replayed with the plan of their capture",
            backend.source.first(method),
            f"let it call super().{IN_GRAPH}",
        )


def _last_statement(backend: Backend, own: cst.FunctionDef) -> cst.BaseStatement:
    """What the line goes behind; Refused where the line might not be reached."""
    if not isinstance(own.body, cst.IndentedBlock):
        raise Refused(
            "anchor-changed",
            f"the body of {own.name.value} does not stand on lines of its own",
            backend.source.first(own),
        )
    for node in walk(own.body):
        if isinstance(node, cst.Return):
            raise Refused(
                "anchor-changed",
                f"{own.name.value} returns here; a plan recorded at its end would be skipped",
                backend.source.first(node),
                "let it end without a return, or patch this site by hand",
            )
    last = own.body.body[-1]
    assert isinstance(last, cst.BaseStatement)
    return last


def _batch(backend: Backend, own: cst.FunctionDef) -> str:
    """What the method calls its batch."""
    names = [param.name.value for param in own.params.params]
    if len(names) < 2:
        raise Refused(
            "anchor-changed",
            f"{own.name.value} takes no batch",
            backend.source.first(own),
        )
    return names[1]
