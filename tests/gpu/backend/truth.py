"""What a pass must compute: FlashInfer's own plan, made afresh from the true lengths and pages.

Nothing of the back end takes part: the pages come from the request table on the CPU. Padded rows
are planned too, as the batch has them, since how FlashInfer splits the work depends on all rows;
only real rows are compared.
"""

from __future__ import annotations

from typing import Any

import torch

from .batches import Batch
from .model import CKV, DTYPE, HEADS, KPE, SCALE, Model

_workspace: dict[str, torch.Tensor] = {}


def expected(
    model: Model,
    batch: Batch,
    query: tuple[torch.Tensor, torch.Tensor],
    *,
    added: int | list[int],
    causal: bool,
) -> torch.Tensor:
    """The output for `query` when row r attends to its prefix and `added` tokens more."""
    from flashinfer import BatchMLAPagedAttentionWrapper

    more = [added] * len(batch.prefix) if isinstance(added, int) else added
    kv_lens = [n + m for n, m in zip(batch.prefix, more, strict=True)]
    pages = [
        model.table[request, :length]
        for request, length in zip(batch.requests, kv_lens, strict=True)
    ]
    if not _workspace:
        _workspace["float"] = torch.empty(128 << 20, dtype=torch.uint8, device="cuda")
    wrapper: Any = BatchMLAPagedAttentionWrapper(_workspace["float"], backend="auto")
    wrapper.plan(
        _indptr(batch.query_lens),
        _indptr(kv_lens),
        torch.cat(pages).to("cuda"),
        torch.tensor(kv_lens, dtype=torch.int32, device="cuda"),
        HEADS,
        CKV,
        KPE,
        1,
        causal,
        SCALE,
        DTYPE,
        DTYPE,
    )
    nope, rope = query
    out = torch.full_like(nope, float("nan"))
    buffer = model.kv.buffer
    wrapper.run(nope, rope, buffer[:, :, :CKV], buffer[:, :, CKV:], out=out)
    return out.view(nope.shape[0], HEADS * CKV)


def _indptr(lens: list[int]) -> torch.Tensor:
    ends = torch.tensor([0, *lens], dtype=torch.int64).cumsum(0)
    return ends.to(torch.int32).to("cuda")
