"""The generated tests on the GPU at hand: what mlagen renders passes them, what is broken does not.

Skipped, and said so, where this Python has no GPU or no FlashInfer.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mlagen.codegen import gpu
from mlagen.codegen.flashinfer.find import find_flashinfer
from mlagen.codegen.flashinfer.read import read_plan_api
from mlagen.codegen.prove import Suite, prove, suite_of_rendering
from mlagen.codegen.render import Rendered, render
from mlagen.codegen.spec import Spec, read_spec, shipped_spec

pytestmark = pytest.mark.gpu

PLANS = f"{gpu.PACKAGE}/plans.py"
HOOKS = f"{gpu.PACKAGE}/hooks.py"

#: Changes of the shipped variants.yaml.
OTHER_SPECS = {
    "all mirrors refreshed": [
        ("refresh: []", "refresh: [qo_indptr, kv_indptr, kv_len]"),
        ("refresh: [kv_indices]", "refresh: [kv_indices, qo_indptr, kv_indptr, kv_len]"),
    ],
    "formulas of a fork": [
        ("kv_len: seq_lens + draft_step + 1", "kv_len: seq_lens + 2 * draft_step + 3"),
        ("kv_len: seq_lens + draft_token_num", "kv_len: seq_lens + draft_token_num + 1"),
    ],
}

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
        HOOKS,
        "    pages = request.kv_lens\n",
        "    pages = request.kv_lens.copy()\n",
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


def rendered_for(host: gpu.GpuHost, spec: Spec) -> Rendered:
    return render(spec, read_plan_api(find_flashinfer(str(host.package))))


def shipped(changes: list[tuple[str, str]]) -> Spec:
    text = shipped_spec().read_text(encoding="utf-8")
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    return read_spec(text.encode(), Path("variants.yaml"))


def passed(suite: Suite, host: gpu.GpuHost, keyword: str | None = None) -> bool:
    """Whether tests ran and all passed. The folder of a run that failed is left for a look."""
    run = prove(suite, host, keyword=keyword).run
    return run.ok and run.passed > 0


@pytest.mark.parametrize("changes", [[], *OTHER_SPECS.values()], ids=["shipped", *OTHER_SPECS])
def test_what_is_rendered_passes(host: gpu.GpuHost, changes: list[tuple[str, str]]) -> None:
    assert passed(suite_of_rendering(rendered_for(host, shipped(changes))), host)


@pytest.mark.parametrize(("file", "right", "wrong", "keyword"), FAULTS)
def test_what_is_broken_fails(
    host: gpu.GpuHost, file: str, right: str, wrong: str, keyword: str
) -> None:
    suite = suite_of_rendering(rendered_for(host, shipped([])))
    text = suite.files[file].decode()
    assert right in text, "the fault no longer fits what is rendered"
    files = {**suite.files, file: text.replace(right, wrong).encode()}
    assert not passed(replace(suite, files=files), host, keyword)
