"""Faults to plant into what is rendered: each with the file, the text that is right, what becomes
of it, and the generated tests that are to see it (pytest's -k).
"""

from __future__ import annotations

import pytest

from mlagen.codegen import gpu

PLANS = f"{gpu.PACKAGE}/plans.py"
HOOKS = f"{gpu.PACKAGE}/hooks.py"

#: Faults that hand-written plans have had, each with tests that see it (pytest's -k).
FAULTS = [
    pytest.param(
        PLANS,
        "return seq_lens + draft_token_num",
        "return seq_lens",
        "verify and replays_are_right",
        id="lengths without the window",
    ),
    pytest.param(
        PLANS,
        "return seq_lens + (draft_step + 1)",
        "return seq_lens",
        "draft and the_chain",
        id="draft steps planned by the prefix",
    ),
    pytest.param(
        PLANS,
        "        causal,\n",
        "        not causal,\n",
        "verify and the_plan_is_the_one",
        id="the other mask",
    ),
    pytest.param(
        PLANS,
        "self._tray.slots[self._next - 1]",
        "self._tray.slots[0]",
        "verify and run_ahead",
        id="one pinned buffer for all plans",
    ),
    pytest.param(
        PLANS,
        "    pages = int(request.kv_ends[-1])\n",
        "    torch.cuda.synchronize()\n    pages = int(request.kv_ends[-1])\n",
        "verify and does_not_wait",
        id="a wait",
    ),
    pytest.param(
        PLANS,
        "arrays.kv_indices, non_blocking=True",
        "arrays.kv_indices * 0, non_blocking=True",
        "verify and bound_buffers",
        id="stale pages",
    ),
    pytest.param(
        PLANS,
        "if arrays.kv_indices is ",
        "if arrays.kv_indices is not ",
        "verify and bound_buffers",
        id="pages taken for filled in place",
    ),
    pytest.param(
        HOOKS,
        "request.added, out=bound.kv_len",
        "0, out=bound.kv_len",
        "verify and arrays_for_the_index_kernel",
        id="the index kernel's lengths without the window",
    ),
    pytest.param(
        HOOKS,
        "    _mlagen_check_pages(request, bound.kv_indices)\n",
        "",
        "verify and arrays_for_the_index_kernel",
        id="the index kernel writes too far",
    ),
    pytest.param(
        HOOKS,
        "    request.kv_len.copy_(lens)\n",
        "    request.kv_len.clone().copy_(lens)\n",
        "decode and replays_are_right",
        id="stale lengths",
    ),
    pytest.param(
        HOOKS,
        "    if batch_size != request.batch_size:",
        "    if False:",
        "decode and invariant",
        id="a batch of another size",
    ),
]


#: Faults of graphs that the GPU plans. What decides about a piece or a merge is looked for in the
#: plan itself: not all of it shows in outputs, and some lets kernels read far out of bounds.
DEVICE_FAULTS = [
    pytest.param(
        PLANS,
        "    tl.store(workspace + MERGE_STRIDE + m, tl.where(used, rows, 0), mask=each)",
        "    tl.store(workspace + MERGE_STRIDE + m, tl.where(used, rows, 0), mask=each & used)",
        "verify and pieces",
        id="merges of the last plan stay",
    ),
    pytest.param(
        PLANS,
        "    longest = (share + 255) // 256 * 256",
        "    longest = (share + 127) // 128 * 128",
        "verify and pieces",
        id="cut elsewhere",
    ),
    pytest.param(
        PLANS,
        "tl.maximum(kv_len - TOKENS + tokens, 0)",
        "tl.maximum(kv_len - TOKENS + tokens - 1, 0)",
        "verify and pieces",
        id="a tile loses its last key",
    ),
    pytest.param(
        PLANS,
        "most_len).to(tl.int32) + added",
        "most_len).to(tl.int32)",
        "verify and pieces",
        id="lengths without the window, on the GPU",
    ),
    pytest.param(
        PLANS,
        "item = tl.gather(begin, cluster, 0) + place",
        "item = tl.gather(begin, cluster, 0)",
        "verify and pieces",
        id="dealt in rounds, onto each other",
    ),
    pytest.param(
        PLANS,
        "item = tl.gather(begin, cluster, 0) + place",
        "item = tl.gather(begin, cluster, 0)",
        "draft and pieces",
        id="one layer, dealt in rounds, onto each other",
    ),
    pytest.param(
        PLANS,
        "if busiest > even + WORTH:",
        "if busiest < 0:",
        "draft and pieces",
        id="one layer, never dealt in rounds",
    ),
    pytest.param(
        PLANS,
        "item = cluster * turns + more + turn",
        "item = cluster * turns + more",
        "draft and pieces",
        id="dealt in turns, onto each other",
    ),
    pytest.param(
        PLANS,
        "last = begin + items - 1",
        "last = begin + items",
        "verify and pieces",
        id="a full piece behind its cluster's last place",
    ),
    pytest.param(
        PLANS,
        "single = tl.cumsum(used, axis=0) - used",
        "single = tl.cumsum(used, axis=0)",
        "verify and pieces",
        id="where each piece has a cluster, one place too far",
    ),
    pytest.param(
        PLANS,
        "        tl.store(error, graph)",
        "        tl.store(error, 0)",
        "verify and wrong_length",
        id="a wrong length is not told",
    ),
    pytest.param(
        PLANS,
        "        number = int(self._error[0])",
        "        torch.cuda.synchronize()\n        number = int(self._error[0])",
        "verify and does_not_wait",
        id="a look at the error waits",
    ),
    pytest.param(
        PLANS,
        "        self.launch(seq_lens)\n        if torch.cuda.is_current",
        "        if torch.cuda.is_current",
        "verify and replays_are_right",
        id="not in the graph",
    ),
]
