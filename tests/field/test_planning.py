"""Reports from the field that a CPU can retrace: lengths that are stale, geometry that differs,
inputs that lack what one kind of them has, buffers that are shared.

Patched releases, driven on a stand-in GPU. docs/field-reports.md says which report each test is of.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tests.executed import expected
from tests.executed.harness import Session
from tests.executed.runs import NDT, STEPS, plus
from tests.executed.stubs import Shape
from tests.releases import NEAREST_WHEEL, patch_of

#: One of each holder of FlashInfer's state: the wrapper, and the back-end object of 0.7.
RELEASES = ("0.5.17", "0.5.23")


def session(release: str, **named: object) -> Session:
    version = NEAREST_WHEEL[release]
    return Session(release, patch_of(release, version).patched, flashinfer=version, **named)


@pytest.mark.parametrize("release", RELEASES)
def test_absent_lengths_after_present_ones_are_not_the_old_ones(release: str) -> None:
    """A provider that gives lengths in one step and None in the next."""
    s = session(release)
    s.capture_decode(4)
    s.capture_verify(4, NDT)
    s.capture_draft(4, STEPS)
    for lens, host in (([10, 20], True), ([11, 21], False), ([50, 3], False), ([7, 8], True)):
        given = {} if host else {"host_lens": None}
        decode = s.replay_decode(lens, bs=4, **given)
        verify = s.replay_verify(lens, NDT, bs=4, **given)
        draft = s.replay_draft(lens, bs=4, **given)
        assert decode.record.arrays == expected.decode(lens, 4)
        assert verify.record.arrays == expected.verify(lens, NDT, 4)
        assert [r.arrays for r in draft.records] == [
            expected.draft(lens, step, 4) for step in range(STEPS - 1)
        ]
        assert bool(decode.waits) is bool(verify.waits) is not host


@pytest.mark.parametrize("release", RELEASES)
def test_lengths_that_grew_since_the_capture(release: str) -> None:
    """A graph that was captured with short requests and replays long ones, and back."""
    s = session(release)
    s.capture_decode(2)
    s.capture_verify(2, NDT)
    for lens in ([1, 1], [60, 55], [2, 60], [1, 1]):
        for done, more in ((s.replay_decode(lens), 0), (s.replay_verify(lens, NDT), NDT)):
            assert done.launch.plan is done.record
            assert done.launch.tokens == s.tokens(plus(lens, more))
            assert done.launch.grid_fits


@pytest.mark.parametrize("release", RELEASES)
def test_a_plan_of_one_wrapper_leaves_the_others_alone(release: str) -> None:
    """Graphs of several batch sizes and modes: each replays the plan that was made for it, and none
    shares an int workspace or a pinned buffer that a queued copy reads."""
    s = session(release)
    s.capture_decode(2)
    s.capture_decode(4)
    s.capture_verify(2, NDT)
    kept = [s.replay_decode([10, 20]), s.replay_verify([30, 40], NDT)]
    other = s.replay_decode([1, 2, 3, 4])
    with s.running(), s.gpu.aside():
        again = [s.fi.launch(s.graphs[key][0]) for key in (("decode", 2), ("verify", 2, False))]
    assert [launch.plan for launch in again] == [done.record for done in kept]
    workspaces = [done.record.int_workspace.data_ptr() for done in (*kept, other)]
    assert len(set(workspaces)) == 3
    with s.gpu.hold():
        ahead = [s.replay_decode([10 + i, 20]).record for i in range(12)]
    pinned = [record.pinned.data_ptr() for record in ahead]
    assert len(set(pinned)) == len(pinned)


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("ndt", [NDT - 1, NDT + 1])
def test_a_replay_of_another_geometry_is_refused(release: str, ndt: int) -> None:
    """As many graph rows, other tokens a request: the captured grid would read past the plan."""
    s = session(release)
    s.capture_verify(2, NDT)
    with pytest.raises(RuntimeError, match=rf"captured with {NDT} tokens a request.* with {ndt}"):
        s.replay_verify([10, 20], ndt)


@pytest.mark.parametrize("release", RELEASES)
def test_a_ragged_replay_is_planned_by_flashinfer(release: str) -> None:
    """Its graph is found by its tokens; its requests' own lengths are those of the device."""
    s = session(release)
    s.capture_verify(4, NDT)
    s.capture_verify(4, NDT, kind="dflash", graph_tokens=8)
    uniform = s.replay_verify([10, 20], NDT, bs=4)
    assert not uniform.record.stock
    ragged = s.replay_verify([10, 20], NDT, bs=4, kind="dflash", verify_lens=[3, 2], graph_tokens=8)
    assert ragged.record.stock
    assert ragged.record.arrays == expected.ragged_verify([10, 20, 1, 1], [3, 2, 2, 1])


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("without", ["topk", "custom_mask", "retrive_index", "capture_hidden_mode"])
def test_a_verify_input_without_eagles_fields(release: str, without: str) -> None:
    """A chain verify reads tokens a request, and none of the fields that only EAGLE has."""
    s = session(release)
    s.capture_verify(2, NDT)

    class Chain:
        """Forwards to the release's own input, but for the field that it lacks."""

        def __init__(self, inner: object) -> None:
            self._inner = inner

        def __getattr__(self, name: str) -> object:
            if name == without:
                raise AttributeError(name)
            return getattr(self._inner, name)

    wrapper = next(w for w in s.fi.wrappers if hasattr(w, "mlagen_request"))
    with s.running(), s.gpu.aside():
        spec = Chain(s._verify_input("eagle", NDT, 2, None, None))
        lens = torch.tensor([10, 20], dtype=torch.int32)
    with s.running():
        request = s.module.mlagen_request_verify(wrapper, 2, lens, lens, spec)
    assert request.kv_len.tolist() == plus([10, 20], NDT)


@pytest.mark.parametrize("release", RELEASES)
def test_an_index_buffer_of_rank_two_is_found_when_a_graph_is_captured(release: str) -> None:
    """A subclass that keeps one row of blocks a request in the buffer that its base binds: nothing
    is planned by the host for it, and no replay finds a graph."""
    s = session(release)
    with s.running():
        s.backend.cuda_graph_kv_indices = s.backend.cuda_graph_kv_indices.view(8, -1)
    with pytest.raises((RuntimeError, ValueError)):  # FlashInfer's own plan, which comes first
        s.capture_verify(2, NDT)
    assert not [w for w in s.fi.wrappers if hasattr(w, "mlagen_request")]


@pytest.mark.parametrize("release", RELEASES)
def test_fewer_lengths_than_rows_are_no_shorter_batch(release: str) -> None:
    """A slice of a short array is silently short; a padded batch has more rows than requests."""
    s = session(release)
    s.capture_decode(4)
    s.capture_verify(4, NDT)
    short = torch.tensor([10, 20], dtype=torch.int64)
    for replay in (
        lambda: s.replay_decode([10, 20], bs=4, host_lens=short),
        lambda: s.replay_verify([10, 20], NDT, bs=4, host_lens=short),
    ):
        with pytest.raises(RuntimeError, match="4 host lengths needed, got 2"):
            replay()


@pytest.mark.parametrize("release", RELEASES)
def test_rows_that_are_padded_with_zero(release: str) -> None:
    """Back ends differ in the length of a padded row. Whatever it is, real rows come first."""
    s = session(release)
    s.capture_decode(4)
    s.capture_verify(4, NDT)
    lens = torch.tensor([10, 20, 0, 0], dtype=torch.int64)
    decode = s.replay_decode([10, 20], bs=4, host_lens=lens)
    verify = s.replay_verify([10, 20], NDT, bs=4, host_lens=lens)
    assert decode.record.arrays == expected.decode([10, 20, 0, 0], 4)
    assert verify.record.arrays == expected.verify([10, 20, 0, 0], NDT, 4)
    for done, more in ((decode, 0), (verify, NDT)):
        assert done.launch.tokens[:2] == s.tokens(plus([10, 20], more))


@pytest.mark.parametrize("release", RELEASES)
def test_lengths_that_fall_never_reach_the_planner(release: str) -> None:
    """A negative length is an indptr that falls: named before the planner is called."""
    s = session(release)
    s.capture_decode(2)
    s.capture_verify(2, NDT)
    s.eager_verify([10, 20], NDT)
    bad = torch.tensor([10, -NDT - 1], dtype=torch.int64)
    before = len(s.fi.records)
    for plan in (
        lambda: s.replay_decode([10, 20], host_lens=bad),
        lambda: s.replay_verify([10, 20], NDT, host_lens=bad),
        lambda: s.eager_verify([10, 20], NDT, host_lens=bad),
    ):
        with pytest.raises(RuntimeError, match="negative KV length"):
            plan()
    assert len(s.fi.records) == before


@pytest.mark.parametrize("release", RELEASES)
def test_an_extend_whose_queries_fall_is_named(release: str) -> None:
    s = session(release)
    s.eager_extend([9, 9], [1, 1], mode="extend")
    with pytest.raises(RuntimeError, match="qo_indptr falls"):
        s.eager_extend([10, 20], [2, 2], mode="extend", host_extend_lens=[2, -1])


@pytest.mark.parametrize("release", RELEASES)
def test_heads_are_those_of_the_group_that_plans(release: str) -> None:
    """Layers of another head count have updaters of their own: a graph is planned with its own
    number, and with no other."""
    s = session(release)
    s.capture_decode(2)
    s.capture_verify(2, NDT)
    s.backend.indices_updater_decode.num_local_heads = 24
    with pytest.raises(RuntimeError, match=f"captured with {s.shape.local_heads} heads.* with 24"):
        s.replay_decode([10, 20])
    assert s.replay_verify([10, 20], NDT).record.num_heads == s.shape.local_heads
    other = session(release, shape=Shape(num_heads=32))
    other.capture_decode(2)
    assert other.replay_decode([10, 20]).record.num_heads == 32


@pytest.mark.parametrize("release", RELEASES)
def test_another_kv_type_is_planned_by_flashinfer_first(release: str) -> None:
    """fp8 caches are not refused or allowed here: FlashInfer's own plan says whether it has a
    kernel for the type, and only what it planned is planned again."""
    s = session(release)
    s.eager_verify([10, 20], NDT)
    assert not s.eager_verify([10, 20], NDT).records[-1].stock
    s.backend.indices_updater_prefill.data_type = torch.float8_e4m3fn
    changed = s.eager_verify([10, 20], NDT)
    assert changed.records[-1].stock
    assert not s.eager_verify([10, 20], NDT).records[-1].stock


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("resolved", ["cutlass", "trtllm-gen", "xqa"])
def test_the_resolved_back_end_is_asked(
    release: str, resolved: str, caplog: pytest.LogCaptureFixture
) -> None:
    """`auto` is what SGLang asks for everywhere; what the wrapper made of it decides."""
    s = session(release)
    hooks = s.module
    wrapper = SimpleNamespace(_backend=resolved, _plan_info=None)
    if s.fi.staged:  # the wrapper keeps its plan on an object of that back end
        wrapper._planned_backend = SimpleNamespace(_backend=resolved, _plan_info=None)
    assert hooks._mlagen_lacks_planner(wrapper) == (f"the back end is {resolved}, not FA2 or FA3")
    with s.running(), s.gpu.aside():
        spec = s._verify_input("eagle", NDT, 2, None, None)
    hooks.mlagen_capture_verify(
        wrapper, 2, torch.tensor([1, 1]), spec, num_heads=16, host_lens=True
    )
    assert not hasattr(wrapper, "mlagen_request")
    assert f"FlashInfer's own plan, as the back end is {resolved}" in caplog.text


@pytest.mark.parametrize("fa", ["fa2", "fa3"])
@pytest.mark.parametrize("release", RELEASES)
def test_both_of_flashinfers_own_are_planned(release: str, fa: str) -> None:
    s = session(release, fa=fa)
    s.capture_decode(2)
    assert not s.replay_decode([10, 20]).record.stock


def test_host_arrays_are_as_long_as_the_padded_batch() -> None:
    """A pool of 14 requests, a batch that was padded to 16: arrays are the graph's, not the
    pool's."""
    s = session("0.5.17", shape=Shape(max_requests=14))
    with s.running():
        wrapper = SimpleNamespace(_plan_info=[1, 132], _page_size=1)
        request = s.module._mlagen_captured(
            wrapper, "decode", print, 16, 1, 16, True, s.module.mlagen_kv_len_decode, True
        )
    s.module._mlagen_check_arrays(request)
    assert request.kv_len.shape == (16,)
    assert request.kv_indptr.shape == request.qo_indptr.shape == (17,)


@pytest.mark.parametrize("release", RELEASES)
def test_a_defaulted_parameter_more_changes_no_argument(release: str) -> None:
    """Parameters that a later FlashInfer inserts in its public plan: ours come by name."""
    got: dict[str, object] = {}

    def plan(
        qo_indptr, num_colocated_ctas=0, kv_indptr=None, kv_indices=None, kv_len_arr=None,
        num_heads=0, o_data_type=None, head_dim_ckv=0, head_dim_kpe=0, page_size=0, causal=None,
        window=-1, sm_scale=0.0, q_data_type=None, kv_data_type=None,
    ):  # fmt: skip
        got.update(locals())

    module = session(release).module
    arrays = module.MlagenArrays("q", "kv", "indices", "lens")
    shape = module.MlagenShape(16, 512, 64, 1, 0.5, torch.float16, torch.bfloat16)
    module._mlagen_call_stock(SimpleNamespace(plan=plan), arrays, shape, causal=True)
    assert {name: got[name] for name in arrays._fields if name != "kv_len"} == {
        name: getattr(arrays, name) for name in arrays._fields if name != "kv_len"
    }
    assert got["kv_len_arr"] == "lens"
    assert {name: got[name] for name in shape._fields} == shape._asdict()
    assert (got["causal"], got["num_colocated_ctas"], got["o_data_type"], got["window"]) == (
        True, 0, None, -1,
    )  # fmt: skip


@pytest.mark.parametrize("release", RELEASES)
def test_how_far_the_host_may_run_ahead_is_said_and_kept(
    release: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Emitted code says how many plans may be ahead of the GPU. One more waits, and is logged."""
    s = session(release)
    s.capture_decode(2)
    staging = s.module._MlagenStaging
    ahead = staging.SLOTS * staging.MOST
    assert ahead == 64
    with s.gpu.hold():
        for i in range(ahead - 1):  # the capture has made one of them
            assert not s.replay_decode([10 + i % 30, 20]).waits
        assert "waiting for the GPU" not in caplog.text
        for _ in range(2 * staging.SLOTS):
            s.replay_decode([10, 20])
    assert f"{ahead} plans ahead: waiting for the GPU" in caplog.text
    assert sum(ring.waits for ring in s.module._mlagen_staging_of.values()) > 0
