"""Patched files whose graphs are planned on the GPU, executed: what is launched, what is recorded
into the graph, and that a replay needs no lengths on the host.

The kernel is a stand-in that plans as the kernel says it does; what it really writes is tested in
tests/schedule/test_device_kernel.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mlagen.codegen.patch import prepare
from mlagen.codegen.sglang.find import FoundTarget

from ..releases import NEAREST_WHEEL, SGLANG_FILE, plan_api, sglang_file
from ..specs import device_spec
from . import expected
from .device import Wait
from .flashinfer import CapturedGraph, Launch, PlanRecord, plan_info
from .harness import Session
from .runs import BATCHES, NDT, STEPS, plus

#: The first release that records plans into graphs, and the last.
RELEASES = ("0.5.13", "0.5.17", "0.5.23")
#: What has no place for that.
BEFORE = ("0.4.8", "0.5.10")
BATCH = 4


@cache
def patched(release: str) -> bytes:
    """The release, all of its graphs planned on the GPU."""
    found = FoundTarget(sglang_file(release), SGLANG_FILE, None)
    return prepare(found, device_spec(), plan_api(NEAREST_WHEEL[release])).patched


@dataclass
class PlanKernel:
    """Stands in for the kernel: plans when the GPU comes to it, from the lengths it finds then.
    What is launched inside of a capture runs at each replay."""

    session: Session
    recorded: list[Callable[[], None]] = field(default_factory=list)
    launched: int = 0

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        assert grid == (1,)
        return self.launch

    def launch(self, *given: Any, num_warps: int) -> None:
        if self.session.gpu.capturing:
            self.recorded.append(lambda: self.run(*given))
            return
        self.launched += 1
        self.session.gpu.submit(lambda: self.run(*given))

    def run(
        self, seq_lens: Any, added: int, batch: int, most: int, pages: int, workspace: Any,
        qo_indptr: Any, kv_indptr: Any, kv_len: Any, error: Any, turns: Any, tokens: int,
        heads: int, causal: bool, *constants: Any,
    ) -> None:  # fmt: skip
        lens = [length + added for length in seq_lens.tolist()[:batch]]
        assert max(lens) - added <= most
        assert sum(lens) <= pages
        qo = list(range(0, (batch + 1) * tokens, tokens))
        ends = [0, *accumulate(lens)]
        for place, values in ((qo_indptr, qo), (kv_indptr, ends), (kv_len, lens)):
            plain = place.as_subclass(torch.Tensor)
            plain.copy_(torch.tensor(values, dtype=torch.int32))
        fi = self.session.fi
        number = next(fi._number)
        record = PlanRecord(
            number=number,
            wrapper=None,
            stock=False,
            qo_indptr=qo,
            kv_indptr=ends,
            kv_len=lens,
            num_heads=heads,
            head_dim_ckv=0,
            causal=causal,
            pinned=torch.empty(0),
            int_workspace=workspace,
            plan_info=plan_info(qo, heads),
            dtypes=(torch.int32,) * 3,
        )
        fi.records.append(record)
        workspace.as_subclass(torch.Tensor).view(torch.uint8)[:8].view(torch.int64)[0] = number


@dataclass
class Graph:
    """One captured graph with its static batch. `recorded`: what of the kernel is in it."""

    session: Session
    batch: SimpleNamespace
    kernels: list[CapturedGraph]
    recorded: list[Callable[[], None]]
    backend: Any
    seq_lens_sum: int | None = None

    def replay(self, seq_lens: Sequence[int]) -> tuple[list[Launch], tuple[Wait, ...]]:
        """A replay as the runner makes it: the static buffers filled, no lengths on the host."""
        s, batch = self.session, self.batch
        pad = batch.batch_size - len(seq_lens)
        with s.running():
            with s.gpu.aside(), torch._C.DisableTorchFunction():
                for name, values in (
                    ("seq_lens", [*seq_lens, *[1] * pad]),
                    ("req_pool_indices", [*range(1, len(seq_lens) + 1), *[0] * pad]),
                    ("positions", [*seq_lens, *[0] * pad]),
                ):
                    plain = getattr(batch, name).as_subclass(torch.Tensor)
                    plain[: len(values)] = torch.tensor(values, dtype=plain.dtype)
            batch.seq_lens_cpu, batch.seq_lens_sum = None, self.seq_lens_sum
            s.gpu.take_waits()
            self.backend.init_forward_metadata_out_graph(batch)
            waits = s.gpu.take_waits()
            with s.gpu.aside():
                for plan in self.recorded:
                    s.gpu.submit(plan)
                return [s.fi.launch(kernel) for kernel in self.kernels], waits


def session_of(release: str) -> tuple[Session, PlanKernel]:
    s = Session(release, patched(release), flashinfer=NEAREST_WHEEL[release])
    kernel = PlanKernel(s)
    s.module._mlagen_plan_kernel = kernel
    return s, kernel


def captured(
    s: Session, kernel: PlanKernel, backend: Any, batch: SimpleNamespace,
    wrappers: Callable[[], list[Any]],
) -> Graph:  # fmt: skip
    """Capture as the runners do: a pass or more to warm up, and the one that is recorded."""
    with s.running():
        backend.init_forward_metadata_out_graph(batch, in_capture=True)
        before = kernel.launched
        backend.init_forward_metadata_in_graph(batch)
        assert kernel.launched == before + len(wrappers())
        s.gpu.capturing = True
        backend.init_forward_metadata_in_graph(batch)
        s.gpu.capturing = False
        with s.gpu.aside():
            kernels = [s.fi.capture(wrapper) for wrapper in wrappers()]
    recorded, kernel.recorded = kernel.recorded, []
    assert len(recorded) == len(kernels)
    return Graph(s, batch, kernels, recorded, backend)


def target_graph(s: Session, kernel: PlanKernel, mode: Any, tokens: int, spec: Any) -> Graph:
    with s.running(), s.gpu.aside():
        batch = s._batches.graph(mode, [], BATCH, spec=spec, num_tokens=BATCH * tokens)

    def wrappers() -> list[Any]:
        metadata = s.backend.forward_metadata
        return [getattr(metadata, "decode_wrapper", None) or metadata.prefill_wrapper]

    return captured(s, kernel, s.backend, batch, wrappers)


@pytest.mark.parametrize("release", RELEASES)
def test_decode(release: str) -> None:
    s, kernel = session_of(release)
    graph = target_graph(s, kernel, s.modes.DECODE, 1, None)
    launched = kernel.launched
    for lens in BATCHES:
        (launch,), waits = graph.replay(lens)
        assert launch.plan is s.fi.records[-1]
        assert launch.plan.arrays == expected.decode(lens, BATCH)
        assert launch.grid_fits
        assert launch.tokens == s.tokens(lens, bs=BATCH, pad=1)
        assert waits == ()
    assert kernel.launched == launched  # the graph alone


@pytest.mark.parametrize("release", RELEASES)
def test_verify(release: str) -> None:
    s, kernel = session_of(release)
    spec = s._verify_input("eagle", NDT, BATCH, None, None)
    graph = target_graph(s, kernel, s.modes.TARGET_VERIFY, NDT, spec)
    for lens in BATCHES:
        (launch,), waits = graph.replay(lens)
        assert launch.plan is s.fi.records[-1]
        assert launch.plan.arrays == expected.verify(lens, NDT, BATCH)
        assert launch.causal
        assert launch.grid_fits
        assert launch.tokens == s.tokens(plus(lens, NDT), bs=BATCH, pad=1 + NDT)
        assert waits == ()


@pytest.mark.parametrize("release", RELEASES)
def test_lengths_at_another_place_reach_the_graph(release: str) -> None:
    """As the draft's runner hands them over where nothing is padded."""
    s, kernel = session_of(release)
    graph = target_graph(s, kernel, s.modes.DECODE, 1, None)
    for lens in BATCHES:
        graph.batch.seq_lens = graph.batch.seq_lens.clone()
        (launch,), waits = graph.replay(lens)
        assert launch.plan.arrays == expected.decode(lens, BATCH)
        assert waits == ()


def tell_no_lengths(s: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on the host is told neither lengths nor their sum."""
    for name in ("graph", "draft", "eager"):
        make = getattr(s._batches, name)

        def untold(*given: Any, make: Any = make, **named: Any) -> Any:
            batch = make(*given, **named)
            batch.seq_lens_cpu = batch.seq_lens_sum = None
            return batch

        monkeypatch.setattr(s._batches, name, untold)


@pytest.mark.parametrize("release", BEFORE)
def test_where_nothing_can_be_recorded_each_replay_launches(
    release: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    s, kernel = session_of(release)
    s.capture_decode(BATCH)
    s.capture_verify(BATCH, NDT)
    tell_no_lengths(s, monkeypatch)
    for lens in BATCHES:
        launched = kernel.launched
        done = s.replay_decode(lens, bs=BATCH)
        assert kernel.launched == launched + 1
        assert done.record.arrays == expected.decode(lens, BATCH)
        assert done.launch.tokens == s.tokens(lens, bs=BATCH, pad=1)
        assert done.waits == ()
        done = s.replay_verify(lens, NDT, bs=BATCH)
        assert kernel.launched == launched + 2
        assert done.record.arrays == expected.verify(lens, NDT, BATCH)
        assert done.launch.plan is done.record
        assert done.launch.tokens == s.tokens(plus(lens, NDT), bs=BATCH, pad=1 + NDT)
        assert done.waits == ()


@pytest.mark.parametrize("release", BEFORE)
def test_a_draft_chain(release: str, monkeypatch: pytest.MonkeyPatch) -> None:
    s, kernel = session_of(release)
    s.capture_draft(BATCH, STEPS)
    tell_no_lengths(s, monkeypatch)
    for lens in BATCHES:
        launched = kernel.launched
        done = s.replay_draft(lens, bs=BATCH)
        assert kernel.launched == launched + STEPS - 1
        for step, (record, launch) in enumerate(zip(done.records, done.launches, strict=True)):
            assert record.arrays == expected.draft(lens, step, BATCH)
            assert launch.plan is record
            assert launch.tokens == s.tokens(plus(lens, step + 1), bs=BATCH, pad=step + 2)
        assert done.waits == ()


@pytest.mark.parametrize("release", [*BEFORE, *RELEASES])
def test_an_eager_draft_chain_without_a_sum(release: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is planned on the host, from lengths that are read back: one wait a step. The indices that
    it is given are longer than they need be, and never too short."""
    s, _ = session_of(release)
    s.eager_draft([10, 20], STEPS)  # the first plan of a wrapper is FlashInfer's own
    tell_no_lengths(s, monkeypatch)
    for lens in ([30], [5, 6, 7], [8, 9]):
        done = s.eager_draft(lens, STEPS)
        records = done.records[-(STEPS - 1) :]
        assert [r.arrays for r in records] == [expected.draft(lens, i) for i in range(STEPS - 1)]
        for step, launch in enumerate(done.launches):
            assert launch.tokens == s.tokens(plus(lens, step + 1))
        assert len(done.waits) == STEPS - 1


@pytest.mark.parametrize("told", [None, 0, "the sum"])
@pytest.mark.parametrize("release", RELEASES)
def test_a_draft_chain_that_is_recorded(release: str, told: int | str | None) -> None:
    """SGLang sizes views of the draft's indices by the sum, which nothing looks at here."""
    s, kernel = session_of(release)
    draft = s._draft_backend(STEPS)
    with s.running(), s.gpu.aside():
        batch = s._batches.draft(
            s.modes.DECODE, [], BATCH, spec=s.stubs.specs.draft(), capture=True
        )

    def wrappers() -> list[Any]:
        return [inner.decode_cuda_graph_metadata[BATCH] for inner in s.draft_chain]

    graph = captured(s, kernel, draft, batch, wrappers)
    for lens in BATCHES:
        real = sum(lens) + BATCH - len(lens)
        graph.seq_lens_sum = real if isinstance(told, str) else told
        before = len(s.fi.records)
        launches, waits = graph.replay(lens)
        assert len(launches) == len(s.fi.records) - before == STEPS - 1
        for step, launch in enumerate(launches):
            assert launch.plan is s.fi.records[before + step]
            assert launch.plan.arrays == expected.draft(lens, step, BATCH)
            assert launch.tokens == s.tokens(plus(lens, step + 1), bs=BATCH, pad=step + 2)
        assert waits == ()
