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
from .stubs import Shape

#: The first release that records plans into graphs, and the last.
RELEASES = ("0.5.13", "0.5.17", "0.5.23")
#: What has no place for that.
BEFORE = ("0.4.8", "0.5.10")
BATCH = 4
TABLE_WIDTH = Shape().table_width


@cache
def patched(release: str) -> bytes:
    """The release, all of its graphs planned on the GPU."""
    found = FoundTarget(sglang_file(release), SGLANG_FILE, None)
    return prepare(found, device_spec(), plan_api(NEAREST_WHEEL[release])).patched


def lengths_of(
    seq_lens: Any, added: int, batch: int, most: int, pages: int, error: Any, number: int
) -> list[int]:
    """KV lengths as both kernels find them: none where one is wrong, which the error word tells."""
    found: list[int] = seq_lens.as_subclass(torch.Tensor).tolist()[:batch]
    lens = [length + added for length in found]
    if min(found) < max(0, -added) or max(found) > most or sum(lens) > pages:
        error.as_subclass(torch.Tensor)[0] = number
        return [0] * batch
    return lens


def write(place: Any, values: list[int]) -> None:
    place.as_subclass(torch.Tensor).copy_(torch.tensor(values, dtype=torch.int32))


@dataclass
class LengthsKernel:
    """Stands in for the kernel that writes lengths ahead of an index kernel."""

    session: Session
    launched: int = 0

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        assert grid == (1,)
        return self.launch

    def launch(self, *given: Any) -> None:
        assert not self.session.gpu.capturing
        self.launched += 1
        self.session.gpu.submit(lambda: self.run(*given))

    def run(
        self, seq_lens: Any, added: int, batch: int, most: int, pages: int, kv_indptr: Any,
        kv_len: Any, error: Any, number: int, slots: int,
    ) -> None:  # fmt: skip
        assert slots >= batch
        lens = lengths_of(seq_lens, added, batch, most, pages, error, number)
        write(kv_indptr[1:], list(accumulate(lens)))
        write(kv_len, lens)


@dataclass
class PlanKernel:
    """Stands in for the kernel: plans when the GPU comes to it, from the lengths it finds then.
    What is launched inside of a capture runs at each replay."""

    session: Session
    lengths: LengthsKernel
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
        qo_indptr: Any, kv_indptr: Any, kv_len: Any, error: Any, number: int, turns: Any,
        tokens: int, heads: int, causal: bool, *constants: Any,
    ) -> None:  # fmt: skip
        lens = lengths_of(seq_lens, added, batch, most, pages, error, number)
        qo = list(range(0, (batch + 1) * tokens, tokens))
        ends = [0, *accumulate(lens)]
        for place, values in ((qo_indptr, qo), (kv_indptr, ends), (kv_len, lens)):
            write(place, values)
        fi = self.session.fi
        plan = next(fi._number)
        record = PlanRecord(
            number=plan,
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
        workspace.as_subclass(torch.Tensor).view(torch.uint8)[:8].view(torch.int64)[0] = plan


@dataclass
class Graph:
    """One captured graph with its static batch. `recorded`: what of the kernel is in it."""

    session: Session
    batch: SimpleNamespace
    kernels: list[CapturedGraph]
    recorded: list[Callable[[], None]]
    backend: Any
    seq_lens_sum: int | None = None
    seq_lens_cpu: torch.Tensor | None = None

    def replay(self, seq_lens: Sequence[int]) -> tuple[list[Launch], tuple[Wait, ...]]:
        """A replay as the runner makes it: the static buffers filled, no lengths on the host, or
        those that were told."""
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
            batch.seq_lens_cpu, batch.seq_lens_sum = self.seq_lens_cpu, self.seq_lens_sum
            s.gpu.take_waits()
            self.backend.init_forward_metadata_out_graph(batch)
            waits = s.gpu.take_waits()
            with s.gpu.aside():
                for plan in self.recorded:
                    s.gpu.submit(plan)
                return [s.fi.launch(kernel) for kernel in self.kernels], waits


def session_of(release: str) -> tuple[Session, PlanKernel]:
    s = Session(release, patched(release), flashinfer=NEAREST_WHEEL[release])
    kernel = PlanKernel(s, LengthsKernel(s))
    s.module._mlagen_plan_kernel = kernel
    # Only where a verify's plan is recorded does its index kernel come ahead of it.
    assert hasattr(s.module, "_mlagen_lengths_kernel") == (release in RELEASES)
    s.module._mlagen_lengths_kernel = kernel.lengths
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


def told_lengths(believed: int | None) -> tuple[torch.Tensor | None, int | None]:
    """Lengths and their sum for a host that believes all requests to be so long; None: that does
    not know."""
    if believed is None:
        return None, None
    return torch.full((BATCH,), believed, dtype=torch.int64), BATCH * believed


#: What the host is told of lengths: nothing, too little, too much.
BELIEVED = pytest.mark.parametrize("believed", [None, 1, 90])


@BELIEVED
@pytest.mark.parametrize("release", RELEASES)
def test_decode(release: str, believed: int | None) -> None:
    s, kernel = session_of(release)
    graph = target_graph(s, kernel, s.modes.DECODE, 1, None)
    graph.seq_lens_cpu, graph.seq_lens_sum = told_lengths(believed)
    launched = kernel.launched
    for lens in BATCHES:
        (launch,), waits = graph.replay(lens)
        assert launch.plan is s.fi.records[-1]
        assert launch.plan.arrays == expected.decode(lens, BATCH)
        assert launch.grid_fits
        assert launch.tokens == s.tokens(lens, bs=BATCH, pad=1)
        assert waits == ()
    assert kernel.launched == launched  # the graph alone


@BELIEVED
@pytest.mark.parametrize("release", RELEASES)
def test_verify(release: str, believed: int | None) -> None:
    s, kernel = session_of(release)
    spec = s._verify_input("eagle", NDT, BATCH, None, None)
    graph = target_graph(s, kernel, s.modes.TARGET_VERIFY, NDT, spec)
    graph.seq_lens_cpu, graph.seq_lens_sum = told_lengths(believed)
    for lens in BATCHES:
        (launch,), waits = graph.replay(lens)
        assert launch.plan is s.fi.records[-1]
        assert launch.plan.arrays == expected.verify(lens, NDT, BATCH)
        assert launch.causal
        assert launch.grid_fits
        assert launch.tokens == s.tokens(plus(lens, NDT), bs=BATCH, pad=1 + NDT)
        assert waits == ()


@pytest.mark.parametrize("wrong", [-1, TABLE_WIDTH + 1, 2**31 - 1])
@pytest.mark.parametrize("row", [0, BATCH - 1])
@pytest.mark.parametrize("release", RELEASES)
def test_an_index_kernel_gets_no_wrong_length(release: str, row: int, wrong: int) -> None:
    """SGLang's writes as many page numbers as it is told, and comes before the graph, whose plan
    would know. What the graph attends to is void, and told behind it."""
    s, kernel = session_of(release)
    spec = s._verify_input("eagle", NDT, BATCH, None, None)
    graph = target_graph(s, kernel, s.modes.TARGET_VERIFY, NDT, spec)
    bound = s.backend.forward_metadata.prefill_wrapper.mlagen_request.bound
    graph.replay(BATCHES[0])
    before = bound.kv_indices.as_subclass(torch.Tensor).clone()
    lens = [1] * BATCH
    lens[row] = wrong
    (launch,), waits = graph.replay(lens)
    assert torch.equal(bound.kv_indices.as_subclass(torch.Tensor), before)
    assert launch.plan.kv_len == [0] * BATCH
    assert waits == ()
    with pytest.raises(s.module.MlagenPlanError, match=f"graph of {BATCH} requests"):
        graph.replay(BATCHES[1])
    (launch,), _ = graph.replay(BATCHES[1])
    assert launch.tokens == s.tokens(plus(BATCHES[1], NDT), bs=BATCH, pad=1 + NDT)


@pytest.mark.parametrize("release", RELEASES)
def test_a_sequence_may_outgrow_the_models_context(release: str) -> None:
    """Under speculation, before the host sees that it has ended: SGLang's page table has room."""
    s, kernel = session_of(release)
    spec = s._verify_input("eagle", NDT, BATCH, None, None)
    graph = target_graph(s, kernel, s.modes.TARGET_VERIFY, NDT, spec)
    device = s.backend.forward_metadata.prefill_wrapper.mlagen_request.device
    assert device.max_seq_len == TABLE_WIDTH > s.backend.max_context_len
    longest = s.backend.max_context_len + 1
    (launch,), _ = graph.replay([longest, 3])
    assert launch.plan.arrays == expected.verify([longest, 3], NDT, BATCH)


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


def tell_no_lengths(
    s: Session, monkeypatch: pytest.MonkeyPatch, believed: int | None = None
) -> None:
    """From here on the host is told neither lengths nor their sum, or that all are so long."""
    for name in ("graph", "draft", "eager"):
        make = getattr(s._batches, name)

        def untold(*given: Any, make: Any = make, **named: Any) -> Any:
            batch = make(*given, **named)
            batch.seq_lens_cpu, batch.seq_lens_sum = told_lengths(believed)
            return batch

        monkeypatch.setattr(s._batches, name, untold)


@BELIEVED
@pytest.mark.parametrize("release", BEFORE)
def test_where_nothing_can_be_recorded_each_replay_launches(
    release: str, believed: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    s, kernel = session_of(release)
    s.capture_decode(BATCH)
    s.capture_verify(BATCH, NDT)
    tell_no_lengths(s, monkeypatch, believed)
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


@BELIEVED
@pytest.mark.parametrize("release", BEFORE)
def test_a_draft_chain(release: str, believed: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    s, kernel = session_of(release)
    s.capture_draft(BATCH, STEPS)
    tell_no_lengths(s, monkeypatch, believed)
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


@pytest.mark.parametrize("told", [None, 0, 400, "the sum"])
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
