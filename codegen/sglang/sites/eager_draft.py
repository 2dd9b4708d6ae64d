"""Eager draft steps: plan the lengths of the step, on the indices of the step.

SGLang hands no spec_info to the decode updater here, in any release: a step then attends to
the committed tokens alone. Added: the step's request, its spec_info.
"""

from __future__ import annotations

from ..edits import Edit, add_argument, before
from ..source import Refused
from . import REQUEST, Context


def edits(context: Context) -> list[Edit]:
    backend = context.backend
    source = backend.source
    site = backend.decode_eager
    backend.require_names(site.function, "forward_batch")
    if site.argument("spec_info") is not None:
        raise Refused(
            "anchor-changed",
            "eager decode already passes spec_info; expected none",
            source.first(site.statement),
        )
    lines = context.lines("eager_draft", calls=("mlagen_request_draft_eager",))
    value = "mlagen_input"
    argument = add_argument(source, "eager-draft-call", site.call, REQUEST, REQUEST)
    with_input = (f"spec_info={value},", *argument.lines)
    if argument.replaces:  # a call on one line: both arguments go in behind each other
        (line,) = argument.lines
        with_input = (
            line.replace(f"{REQUEST}={REQUEST}", f"spec_info={value}, {REQUEST}={REQUEST}"),
        )
    call = Edit("eager-draft-call", argument.line, argument.indent, with_input, argument.replaces)
    return [before(source, "eager-draft", site.statement, lines), call]
