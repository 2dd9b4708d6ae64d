"""A model as small as attention needs it: one MLA layer, a pool of random KV, a table of requests.

The shapes are DeepSeek's on one of eight GPUs. A page is a token, and no two requests share one;
the table's order is random, so that a wrong index reads another request's KV.
"""

from __future__ import annotations

import importlib
import importlib.util
from types import SimpleNamespace
from typing import Any

import torch

CKV, KPE, HEADS = 512, 64, 16
SCALE = 1.0 / (128 + 64) ** 0.5
DTYPE = torch.bfloat16
MAX_REQUESTS = 64
CONTEXT = 4352  # tokens a request


class KVPool:
    """The KV of one layer, [slots, 1, CKV + KPE]."""

    def __init__(self, slots: int) -> None:
        self.buffer = torch.randn(slots, 1, CKV + KPE, dtype=DTYPE, device="cuda")

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        return self.buffer


class Model:
    """What all back ends of a test run share.

    runner: a model runner as far as a back end looks into it. layer: a RadixAttention likewise.
    table: where each request's tokens lie, [MAX_REQUESTS + 1, CONTEXT], on the CPU. Row 0 is for
    padded rows.
    """

    def __init__(self, server_args: Any) -> None:
        rows = MAX_REQUESTS + 1
        slots = rows * CONTEXT
        self.table = torch.randperm(slots, dtype=torch.int64).to(torch.int32).view(rows, CONTEXT)
        self.kv = KVPool(slots)
        self.layer = SimpleNamespace(
            layer_id=0,
            scaling=SCALE,
            logit_cap=0.0,
            tp_q_head_num=HEADS,
            tp_k_head_num=1,
            tp_v_head_num=1,
            head_dim=CKV + KPE,
            v_head_dim=CKV,
        )
        table = self.table.to("cuda")
        self.requests = SimpleNamespace(size=MAX_REQUESTS, req_to_token=table)
        allocator = SimpleNamespace()
        self.runner = SimpleNamespace(
            model_config=SimpleNamespace(
                context_len=CONTEXT,
                num_attention_heads=HEADS,
                kv_lora_rank=CKV,
                qk_nope_head_dim=128,
                qk_rope_head_dim=KPE,
                v_head_dim=128,
                scaling=SCALE,
            ),
            device="cuda",
            gpu_id=0,
            dtype=DTYPE,
            kv_cache_dtype=DTYPE,
            page_size=1,
            req_to_token_pool=self.requests,
            token_to_kv_pool=self.kv,
            token_to_kv_pool_allocator=allocator,
            kv_index_translator=_translator(table, allocator, self.kv),
            server_args=server_args,
            is_draft_worker=False,
            sliding_window_size=None,
        )

    def query(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Random queries: [tokens, HEADS, CKV] and [tokens, HEADS, KPE]."""
        nope = torch.randn(tokens, HEADS, CKV, dtype=DTYPE, device="cuda")
        return nope, torch.randn(tokens, HEADS, KPE, dtype=DTYPE, device="cuda")


def _translator(table: torch.Tensor, allocator: Any, pool: Any) -> Any:
    """The release's `KVIndexTranslator` (0.5.19 and later) over this table."""
    name = "sglang.srt.mem_cache.kv_index_translator"
    if importlib.util.find_spec(name) is None:
        return None
    module: Any = importlib.import_module(name)
    return module.KVIndexTranslator(
        req_to_token=table,
        token_to_kv_pool_allocator=allocator,
        token_to_kv_pool=pool,
        page_size=1,
        device="cuda",
    )
