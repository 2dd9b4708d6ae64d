"""Eager target-verify: a plan of its own from host lengths.

Added: the request and its way to the updater.
"""

from __future__ import annotations

from ..edits import Edit, add_arguments, before
from ..features import refuse_pages
from . import REQUEST, Context


def edits(context: Context) -> list[Edit]:
    backend = context.backend
    site = backend.verify_eager
    backend.require_names(site.function, "forward_batch")
    line = backend.source.first(site.statement)
    refuse_pages(context.features, "target-verify", line)
    lines = context.lines("eager_verify", calls=("mlagen_request_verify_eager",))
    return [
        before(backend.source, "eager-verify", site.statement, lines),
        add_arguments(backend.source, "eager-verify-call", site.call, **{REQUEST: REQUEST}),
    ]
