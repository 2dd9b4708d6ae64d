"""Decode replay, of the target and of each draft step: ours make the host arrays.

Replaced: the assertion on seq_lens_cpu and SGLang's own arrays, which lack the draft step's
new tokens. Kept for context parallelism: the sharded lengths that size its index buffer.
"""

from __future__ import annotations

import libcst as cst

from ..backend import CallSite
from ..edits import Edit, add_arguments, instead
from ..nodes import self_attribute, words
from ..source import Refused, Source
from . import REQUEST, Context
from .upstream import is_array_work, is_assertion, refuse_statement


def edits(context: Context) -> list[Edit]:
    backend = context.backend
    source = backend.source
    site = backend.decode_replay
    backend.require_names(site.function, "bs", "seq_lens", "seq_lens_cpu")
    wrapper = site.argument("decode_wrapper")
    if wrapper is None:
        raise Refused(
            "anchor-changed",
            "the decode replay passes no decode_wrapper",
            source.first(site.statement),
        )
    keywords = _keywords(source, site)
    statements = _own_statements(source, site, keywords)
    lines = context.lines(
        "replay_decode",
        calls=("mlagen_request_decode",),
        wrapper=source.code(wrapper),
        keywords=keywords,
        compares_sum=_compares_sum(context, site),
    )
    return [
        instead(source, "replay-decode", statements[0], statements[-1], lines),
        add_arguments(source, "replay-decode-call", site.call, **{REQUEST: REQUEST}),
    ]


def _own_statements(source: Source, site: CallSite, keywords: str) -> list[cst.BaseStatement]:
    """The statements in front of the update; Refused if one is not SGLang's own array work."""
    statements = list(site.block[: site.index])
    if not statements:
        raise Refused(
            "anchor-missing",
            "looked for SGLang's host arrays in front of the decode replay, found none",
            source.first(site.statement),
        )
    for statement in statements:
        if not is_assertion(statement) and not is_array_work(statement, keywords):
            raise refuse_statement(source, statement, "in front of the decode replay")
    return statements


def _compares_sum(context: Context, site: CallSite) -> bool:
    """Whether a decode that the GPU plans may be without a sum of lengths, but for a comparison in
    SGLang's own lines: 0.5.20 on, where page numbers may have to be translated."""
    parameters = {param.name.value for param in site.function.params.params}
    return (
        "decode" in context.device
        and "seq_lens_sum" in parameters
        and words(context.backend.source.module) >= {"needs_read_translate", "kv_index_translator"}
    )


def _keywords(source: Source, site: CallSite) -> str:
    """X of the `**self.X` by which SGLang passes its arrays on."""
    spread = [self_attribute(arg.value) for arg in site.call.args if arg.star == "**"]
    if len(spread) != 1 or spread[0] is None:
        raise Refused(
            "anchor-changed",
            "the decode replay no longer passes its arrays on as `**self.<dictionary>`",
            source.first(site.statement),
        )
    return spread[0]
