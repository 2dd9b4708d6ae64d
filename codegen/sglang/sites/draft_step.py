"""A back end of the multi-step draft knows which step it is.

Added: a class attribute, None everywhere else. A class attribute and not one set in
`__init__`, since subclasses of the multi-step back end replace `attn_backends` after it.
"""

from __future__ import annotations

from ..edits import Edit, before
from ..nodes import decorated
from ..source import Refused
from . import Context


def edits(context: Context) -> list[Edit]:
    if not context.features.drafts:
        return []
    backend = context.backend
    method = next(backend.source.methods(backend.backend_class), None)
    if method is None:
        raise Refused(
            "anchor-missing",
            "looked for a method of the back end's class, found none",
            backend.source.first(backend.backend_class),
        )
    lines = (*context.lines("draft_step"), "")
    return [before(backend.source, "draft-step", decorated(method), lines)]
