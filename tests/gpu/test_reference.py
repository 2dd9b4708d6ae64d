"""tests/schedule/reference.py against the planner of the FlashInfer at hand: which cluster does
which piece, and what is merged, as the kernels read it from the int workspace.

Skipped, and said so, where this Python has no GPU or no FlashInfer.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from typing import Any

import pytest

from mlagen.codegen import gpu
from tests.schedule.reference import Merge, Piece, deal, work_of

pytestmark = pytest.mark.gpu

PAGES = 1 << 17
#: Entries of plan_info that tell where an array begins, in the order of reference.Piece and Merge.
ITEMS, MERGES, WORK_INDPTR = (2, 3, 4, 10, 11, 12, 13, 14), (5, 6, 7, 8, 9), 15


def drawn(some: random.Random) -> tuple[list[int], list[int], int, bool]:
    """Query tokens and KV tokens of each request, heads, and whether it is causal."""
    batch = some.choice([1, 2, 7, 16, 40, 64, 130, 200])
    tokens = some.choice([1, 1, 2, 3, 5])
    q_lens = [tokens if some.random() < 0.5 else some.randint(1, 6) for _ in range(batch)]
    most = min(some.choice([4, 300, 3000, 30000]), PAGES // batch)
    kv_lens = [some.choice([1, 63, 64, 65, *[some.randint(1, most)] * 6]) for _ in range(batch)]
    causal = some.random() < 0.5
    if causal:
        kv_lens = [max(pair) for pair in zip(q_lens, kv_lens, strict=True)]
    return q_lens, kv_lens, some.choice([8, 16, 32, 64, 128]), causal


def plan(wrapper: Any, q_lens: list[int], kv_lens: list[int], heads: int, causal: bool) -> Any:
    """Plan as SGLang does before 0.5.18; gives what holds the state of the plan."""
    import torch

    def indptr(lens: list[int]) -> Any:
        ends = list(itertools.accumulate(lens, initial=0))
        return torch.tensor(ends, dtype=torch.int32, device="cuda")

    pages = torch.arange(sum(kv_lens), dtype=torch.int32, device="cuda")
    lens = torch.tensor(kv_lens, dtype=torch.int32, device="cuda")
    types = torch.bfloat16, torch.bfloat16
    wrapper.plan(
        indptr(q_lens), indptr(kv_lens), pages, lens, heads, 512, 64, 1, causal, 0.1, *types
    )
    torch.cuda.synchronize()
    return getattr(wrapper, "_planned_backend", None) or wrapper


def numbers(made: Piece | Merge) -> tuple[int, ...]:
    """A piece or a merge as the kernels read it: by all fields but whose it is."""
    return tuple(
        value for name, value in dataclasses.asdict(made).items() if name not in ("request", "tile")
    )


@pytest.mark.parametrize("backend", ["fa2", "fa3"])
def test_the_reference_plans_as_flashinfer_does(host: gpu.GpuHost, backend: str) -> None:
    import torch
    from flashinfer.mla import BatchMLAPagedAttentionWrapper

    properties = torch.cuda.get_device_properties(0)
    if backend == "fa3" and properties.major != 9:
        pytest.skip(f"FA3 is for compute capability 9, this GPU has {properties.major}")
    workspace = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    wrapper = BatchMLAPagedAttentionWrapper(workspace, backend=backend)
    some = random.Random(0)
    for _ in range(200):
        asked = drawn(some)
        state = plan(wrapper, *asked)
        info = [int(entry) for entry in state._plan_info]
        words = state._int_workspace_buffer.view(torch.int32).cpu()

        def read(entry: int, count: int, info: Any = info, words: Any = words) -> list[int]:
            found: list[int] = words[info[entry] // 4 :][:count].tolist()
            return found

        work = work_of(*asked, properties.multi_processor_count)
        assert info[:2] == [work.blocks, work.clusters], asked
        spans = read(WORK_INDPTR, work.clusters + 1)
        items = list(zip(*(read(entry, spans[-1]) for entry in ITEMS), strict=True))
        dealt = [items[start:end] for start, end in itertools.pairwise(spans)]
        expected = [[numbers(piece) for piece in pieces] for pieces in deal(work, work.pieces)]
        assert dealt == expected, asked
        merges = list(zip(*(read(entry, len(work.merges)) for entry in MERGES), strict=True))
        assert merges == list(map(numbers, work.merges)), asked
