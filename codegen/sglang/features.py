"""What a file has beside its anchors, each found by structure. Never the version number:
forks and post-releases carry the same number and other code."""

from __future__ import annotations

import re
from dataclasses import dataclass

import libcst as cst

from .backend import Backend
from .nodes import calls_of, mentions, walk
from .source import Refused

#: The method that SGLang's runners call inside of a capture.
IN_GRAPH = "init_forward_metadata_in_graph"


@dataclass(frozen=True)
class Features:
    """
    Attributes:
        shape: "capture/replay pair" (to 0.5.12), "shared apply" (0.5.13 to 0.5.17),
            "upstream plans" (0.5.18 on), "no verify" (0.4.3.post4).
        dcp: expressions for the size and rank of decode context parallelism, or None where
            the file does not know it (before 0.5.15).
        dcp_import: a name that the file has to import for them.
        stale_verify_lens: up to 0.4.10 replays get the runner's static buffer of host
            lengths; 0.4.10 fills it for verify only where the prefill back end is flashinfer.
        page_size: what the prefill updater passes to plan: "1" or "self.page_size" (0.5.1).
        pages_in_speculation: pages of more than one token reach speculative decoding: its
            releases pass 1, or assert it (0.5.1).
        upstream_verify: the file has SGLang's own verify plan (0.5.18 on).
        drafts: the file has a multi-step draft back end (all but 0.4.3.post4).
        in_graph: a part of the planning is recorded into a graph, by a method of that name
            (0.5.13 on).
    """

    shape: str
    dcp: tuple[str, str] | None
    dcp_import: str
    stale_verify_lens: bool
    page_size: str
    pages_in_speculation: bool
    upstream_verify: bool
    drafts: bool
    in_graph: bool


def probe(backend: Backend) -> Features:
    """Look for each feature in the file of `backend`."""
    source = backend.source
    text = source.data.decode("latin-1")
    upstream = any(f.name.value == "fast_mla_prefill_plan" for f in source.functions())
    shared = any(
        method.name.value == "init_forward_metadata_out_graph"
        for method in source.inherited(backend.backend_class)
    )
    dcp: tuple[str, str] | None = None
    dcp_import = ""
    if "update_local_kv_lens_for_dcp" in text:
        if source.imported("get_attention_dcp_world_size"):
            dcp = ("get_attention_dcp_world_size()", "get_attention_dcp_rank()")
            if not source.imported("get_attention_dcp_rank"):
                dcp_import = "from sglang.srt.layers.dcp import get_attention_dcp_rank"
        else:
            dcp = ("get_parallel().attn_dcp_size", "get_parallel().attn_dcp_rank")
    page_size, asserted = _page_size(backend)
    return Features(
        shape=(
            "no verify"
            if not backend.has_verify
            else "upstream plans"
            if upstream
            else "shared apply"
            if shared
            else "capture/replay pair"
        ),
        dcp=dcp,
        dcp_import=dcp_import,
        stale_verify_lens=(
            not shared
            and source.imported("global_server_args_dict")
            and not any(c.name.value == "FlashInferMhaChunkKVRunner" for c in source.classes())
        ),
        page_size=page_size,
        pages_in_speculation=page_size != "1" and not asserted,
        upstream_verify=upstream,
        drafts=backend.has_drafts,
        in_graph=_knows_in_graph(backend),
    )


def refuse_stale_host_lengths(backend: Backend) -> None:
    """Refuse 0.4.4: its batches carry host lengths in decode alone, and the runner hands its
    static buffer on in verify, filled once and never refreshed: stale without being None."""
    found = re.search(rb"^.*\bdecode_seq_lens_cpu\b.*$", backend.source.data, re.M)
    if found:
        line = backend.source.data[: found.start()].count(b"\n") + 1
        raise Refused(
            "stale-host-lengths",
            "this SGLang fills host lengths (decode_seq_lens_cpu) in decode alone: a verify plan "
            "made from them would use a buffer that nobody refreshes",
            line,
            "SGLang 0.4.5 and later carry seq_lens_cpu in every mode",
        )


def refuse_pages(features: Features, mode: str, line: int) -> None:
    """Refuse an eager speculative pass whose pages hold more than one token: its request counts
    kv_indptr in tokens."""
    if features.pages_in_speculation:
        raise Refused(
            "page-size",
            f"eager {mode} may be planned with page_size={features.page_size}: its kv_indptr would "
            "be in pages, mlagen's is in tokens there; expected 1, or an assertion that it is",
            line,
            "assert page_size == 1 where spec_info is given, or leave the variant out with --only",
        )


def _knows_in_graph(backend: Backend) -> bool:
    """Whether the multi-step draft back end hands the call on to its steps: the one class of
    the file that has to have the method in every SGLang that calls it."""
    name = backend.names["draft-backend-class"]
    return any(
        method.name.value == IN_GRAPH
        for owner in backend.source.classes()
        if owner.name.value == name
        for method in backend.source.inherited(owner)
    )


def _page_size(backend: Backend) -> tuple[str, bool]:
    """What the prefill updater passes as page_size, and whether it asserts what that is."""
    owner = backend.source.one_class(backend.names["prefill-updater-class"])
    begin = backend.source.one_method(owner, backend.names["plan-method"])
    asserted = any(
        isinstance(node, cst.Assert) and mentions(node.test, frozenset({"page_size"}))
        for node in walk(begin.body)
    )
    for call in calls_of(begin, "plan"):
        for index, arg in enumerate(call.args):
            named = arg.keyword is not None and arg.keyword.value == "page_size"
            if named or (arg.keyword is None and index == 7):
                return backend.source.code(arg.value), asserted
    return "1", asserted
