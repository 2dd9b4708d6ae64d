"""Plans on the CPU with the emitted kernel: a program of its own, for test_device_kernel.py.

Triton's interpreter is chosen by TRITON_INTERPRET=1 in the environment, as triton is imported, for
good: a process of other tests must not have it, so this is started, not imported. Reads a case a
line, as JSON, and answers each with a line. All arrays of a case lie in one, canaries around each.

    python kernel_program.py FOLDER-WITH-PLANS.PY
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime.interpreter import ReduceOps

CANARY = -77
GUARD = 32

#: FlashInfer's arrays, in the order in which plan_info has their offsets.
ITEMS = ("q_indptr", "kv_indptr", "partial", "q_len", "kv_len", "q_start", "kv_start", "kv_end")
MERGES = ("start", "end", "partial_start", "partial_end", "stride")
ORDER = (*ITEMS[:3], *(f"merge_{name}" for name in MERGES), *ITEMS[3:], "begins")


class OnGpu(torch.Tensor):
    """Lengths that say of themselves that they are on the GPU."""

    is_cuda = True


def sizes_of(case: dict[str, Any]) -> dict[str, int]:
    """As long as the plan is, not as FlashInfer makes them: a step too far is seen."""
    items = dict.fromkeys(ITEMS, case["items"])
    merges = dict.fromkeys((f"merge_{name}" for name in MERGES), case["blocks"] * case["clusters"])
    return {**items, **merges, "begins": case["clusters"] + 1}


def laid_out(sizes: dict[str, int], begin: int) -> tuple[dict[str, int], int]:
    """Where each array begins, and where the last one's canaries end; on 16 bytes, as they are."""
    places = {}
    for name, size in sizes.items():
        places[name] = begin
        begin += -(-(size + GUARD) // 4) * 4
    return places, begin


def ran(plans: Any, case: dict[str, Any]) -> dict[str, Any]:
    """One plan, made by a MlagenDevicePlan as a replay makes it."""
    batch = len(case["seq_lens"])
    sizes = sizes_of(case)
    bound = {"qo_indptr_buf": batch + 1, "kv_indptr_buf": batch + 1, "kv_len_buf": batch}
    places, end = laid_out(sizes, GUARD)
    bound_places, total = laid_out(bound, end)
    arena = torch.full((total,), CANARY, dtype=torch.int32)
    wrapper = SimpleNamespace(
        _plan_info=[case["blocks"], case["clusters"], *(4 * places[name] for name in ORDER), 0, 0],
        _int_workspace_buffer=arena[:end].view(torch.uint8),
        _kv_indices_buf=torch.empty(case["pages"], dtype=torch.int32, device="meta"),
        _qo_indptr_buf=arena[bound_places["qo_indptr_buf"] :],
        _kv_indptr_buf=arena[bound_places["kv_indptr_buf"] :],
        _kv_len_arr_buf=arena[bound_places["kv_len_buf"] :],
    )
    wrapper._planned_backend = wrapper
    device = plans.MlagenDevicePlan(
        wrapper, request_of(plans, case), case["causal"], case["max_seq_len"], 61
    )
    # Which dealing suits which graph is another test's: each is asked for here.
    device._constants = (*device._constants[:9], case["thorough"], *device._constants[10:])
    lengths = torch.tensor(case["seq_lens"], dtype=getattr(torch, case["dtype"])).as_subclass(OnGpu)
    all_sizes, all_places = {**sizes, **bound}, {**places, **bound_places}
    device.error.zero_()  # it is all graphs'
    device.fill_lengths(lengths)
    filled = written(arena, all_sizes, {"kv_indptr_buf", "kv_len_buf"}, all_places, device)
    arena.fill_(CANARY)
    device.error.zero_()
    device.launch(lengths)
    return {**written(arena, all_sizes, set(all_sizes), all_places, device), "filled": filled}


def written(
    arena: torch.Tensor, sizes: dict[str, int], names: set[str], places: dict[str, int], device: Any
) -> dict[str, Any]:
    """What lies in the arrays of these names, what was written elsewhere, and the error word."""
    spans = {name: slice(places[name], places[name] + sizes[name]) for name in names}
    elsewhere = torch.ones(arena.numel(), dtype=torch.bool)
    for span in spans.values():
        elsewhere[span] = False
    strayed = torch.nonzero(elsewhere & (arena != CANARY)).flatten()
    arrays = {name: arena[span].tolist() for name, span in spans.items()}
    error = {0: False, device.number: True}[int(device.error[0])]
    return {**arrays, "strayed": strayed.tolist(), "error": error}


def request_of(plans: Any, case: dict[str, Any]) -> Any:
    """A captured request; the host's arrays are none of the kernel's business."""
    return plans.MlagenRequest(
        variant="verify",
        plan=None,
        batch_size=len(case["seq_lens"]),
        qo_indptr=None,
        kv_indptr=None,
        kv_len=None,
        kv_ends=None,
        kv_lens=None,
        tokens_per_req=case["tokens"],
        num_heads=case["heads"],
        grid=(case["blocks"], case["clusters"]),
        added=case["added"],
    )


def sort_quickly() -> None:
    """Sorting reduces by exclusive or, which the interpreter does a number at a time; sums and
    maxima it leaves to NumPy, and so can this be."""
    combine = tl.standard._xor_combine
    generic = ReduceOps.generic_reduce

    def reduced(self: ReduceOps, input: Any) -> Any:
        if self.combine_fn is not combine or self.axis is None:
            return generic(self, input)
        (given,) = input
        data = given.handle.data
        data = np.bitwise_xor.reduce(data, axis=self.axis, keepdims=self.keep_dims)
        return [self.to_tensor(data, given.dtype)]

    ReduceOps.generic_reduce = reduced  # type: ignore[method-assign]


def main() -> None:
    sort_quickly()
    sys.path.insert(0, sys.argv[1])
    import plans  # what the test rendered

    zeros = torch.zeros
    # There is no pinned memory without CUDA.
    torch.zeros = lambda *size, pin_memory=False, **options: zeros(*size, **options)  # type: ignore[assignment]
    for line in sys.stdin:
        print(json.dumps(ran(plans, json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
