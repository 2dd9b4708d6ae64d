"""A back end of the multi-step draft knows which step it is.

Added: a class attribute, None everywhere else. A class attribute and not one set in
`__init__`, since subclasses of the multi-step back end replace `attn_backends` after it.
"""

from __future__ import annotations

import libcst as cst

from ..edits import Edit, before
from ..source import Refused
from . import Context


def edits(context: Context) -> list[Edit]:
    if not context.features.drafts:
        return []
    backend = context.backend
    methods = [s for s in backend.backend_class.body.body if isinstance(s, cst.FunctionDef)]
    if not methods:
        raise Refused(
            "anchor-missing",
            "looked for a method of the back end's class, found none",
            backend.source.first(backend.backend_class),
        )
    first = methods[0].decorators[0] if methods[0].decorators else methods[0]
    lines = (*context.lines("draft_step"), "")
    return [before(backend.source, "draft-step", first, lines)]
