"""Eager draft steps: plan the lengths of the step, on the indices of the step.

SGLang hands no spec_info to the decode updater here, in any release: a step then attends to
the committed tokens alone. Added: the step's request, its spec_info.
"""

from __future__ import annotations

from ..edits import Edit, add_arguments, before
from ..features import refuse_pages
from ..source import Refused
from . import REQUEST, Context


def edits(context: Context) -> list[Edit]:
    backend = context.backend
    source = backend.source
    site = backend.decode_eager
    backend.require_names(site.function, "forward_batch")
    refuse_pages(context.features, "draft decode", source.first(site.statement))
    if site.argument("spec_info") is not None:
        raise Refused(
            "anchor-changed",
            "eager decode already passes spec_info; expected none",
            source.first(site.statement),
        )
    lines = context.lines("eager_draft", calls=("mlagen_request_draft_eager",))
    call = add_arguments(
        source, "eager-draft-call", site.call, spec_info="mlagen_input", **{REQUEST: REQUEST}
    )
    return [before(source, "eager-draft", site.statement, lines), call]
