"""The server that a back end believes to run in: one GPU, no parallelism, default arguments."""

from __future__ import annotations

import contextlib
import importlib
from types import SimpleNamespace
from typing import Any

_entered = contextlib.ExitStack()  # for the whole process

#: What releases up to 0.5.12 are asked for by name, and the others by group.
_ARGUMENTS: dict[str, Any] = {
    "attention_backend": "flashinfer",
    "disable_chunked_prefix_cache": False,
    "disaggregation_mode": "null",
    "flashinfer_mla_disable_ragged": False,
    "page_size": 1,
}


def configure() -> Any:
    """Set what the release's own accessors answer; return the server arguments.

    From 0.5.13 on they are asked through `sglang.srt.runtime_context`, which has a dummy
    configuration for tests. Before, a global holds them, and the groups of processes are objects.
    """
    try:
        context: Any = importlib.import_module("sglang.srt.runtime_context")
    except ModuleNotFoundError:
        return _configure_globals()
    server_args = context.get_context().override_server_args(page_size=1).install()
    sizes = {"attn_tp_size": 1, "attn_cp_size": 1, "attn_dcp_size": 1, "attn_dcp_rank": 0}
    _entered.enter_context(context.get_parallel().override(dcp_enabled=False, **sizes))
    return server_args


def _configure_globals() -> Any:
    server_args = SimpleNamespace(**_ARGUMENTS)
    arguments: Any = importlib.import_module("sglang.srt.server_args")
    arguments.set_global_server_args_for_scheduler(server_args)
    state: Any = importlib.import_module("sglang.srt.distributed.parallel_state")
    state._ATTN_TP = SimpleNamespace(world_size=1, rank_in_group=0)
    return server_args
