"""What a file has beside its anchors, each found by structure. Never the version number:
forks and post-releases carry the same number and other code."""

from __future__ import annotations

import re
from dataclasses import dataclass

from .backend import MULTI_STEP_CLASS, PREFILL_UPDATER_CLASS, Backend
from .nodes import calls_of
from .source import Refused


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
        upstream_verify: the file has SGLang's own verify plan (0.5.18 on).
        drafts: the file has a multi-step draft back end (all but 0.4.3.post4).
    """

    shape: str
    dcp: tuple[str, str] | None
    dcp_import: str
    stale_verify_lens: bool
    page_size: str
    upstream_verify: bool
    drafts: bool


def probe(backend: Backend) -> Features:
    """Look for each feature in the file of `backend`."""
    source = backend.source
    text = source.data.decode("latin-1")
    upstream = any(f.name.value == "fast_mla_prefill_plan" for f in source.functions())
    shared = any(
        method.name.value == "init_forward_metadata_out_graph"
        for method in source.methods(backend.backend_class)
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
        page_size=_page_size(backend),
        upstream_verify=upstream,
        drafts=any(c.name.value == MULTI_STEP_CLASS for c in source.classes()),
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


def _page_size(backend: Backend) -> str:
    owner = backend.source.one_class(PREFILL_UPDATER_CLASS)
    begin = backend.source.one_method(owner, "call_begin_forward")
    for call in calls_of(begin, "plan"):
        for index, arg in enumerate(call.args):
            named = arg.keyword is not None and arg.keyword.value == "page_size"
            if named or (arg.keyword is None and index == 7):
                return backend.source.code(arg.value)
    return "1"
