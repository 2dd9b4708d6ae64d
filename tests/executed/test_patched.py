"""Patched files, executed: the arrays are right for every row, nothing waits, nothing races."""

from __future__ import annotations

import pytest

from ..releases import NEAREST_WHEEL, patch_of
from . import expected
from .harness import Done, Session
from .runs import BATCHES, NDT, OLDER, RELEASES, STEPS, plus
from .stubs import Shape

ALL = (*OLDER, *RELEASES)


def session(release: str, flashinfer: str | None = None, **named: object) -> Session:
    version = flashinfer or NEAREST_WHEEL[release]
    return Session(release, patch_of(release, version).patched, flashinfer=version, **named)


@pytest.mark.parametrize("release", ALL)
def test_decode_replay(release: str) -> None:
    s = session(release)
    s.capture_decode(4)
    for lens in BATCHES:
        done = s.replay_decode(lens, bs=4)
        assert done.record.arrays == expected.decode(lens, 4)
        assert done.launch.plan is done.record
        assert done.launch.grid_fits
        assert done.launch.tokens == s.tokens(lens, bs=4, pad=1)
        assert done.waits == ()
        assert not done.record.stock


@pytest.mark.parametrize("kind", ["eagle", "ngram"])
@pytest.mark.parametrize("release", ALL)
def test_verify_replay(release: str, kind: str) -> None:
    s = session(release)
    if not s.stubs.specs.supports(kind):
        pytest.skip(f"{release} has no {kind}")
    s.capture_verify(4, NDT, kind=kind)
    for lens in BATCHES:
        done = s.replay_verify(lens, NDT, bs=4, kind=kind)
        assert done.record.arrays == expected.verify(lens, NDT, 4)
        assert done.launch.plan is done.record
        assert done.launch.grid_fits
        assert done.launch.causal
        assert done.launch.tokens == s.tokens(plus(lens, NDT), bs=4, pad=1 + NDT)
        assert [wait for wait in done.waits if wait.kind != "read"] == []
        assert not done.record.stock


@pytest.mark.parametrize("release", ALL)
def test_draft_replay(release: str) -> None:
    s = session(release)
    s.capture_draft(4, STEPS)
    for lens in BATCHES:
        done = s.replay_draft(lens, bs=4)
        assert len(done.records) == len(done.launches) == STEPS - 1
        for step, (record, launch) in enumerate(zip(done.records, done.launches, strict=True)):
            assert record.arrays == expected.draft(lens, step, 4)
            assert launch.plan is record
            assert launch.tokens == s.tokens(plus(lens, step + 1), bs=4, pad=step + 2)
            # Real rows as the device has them, all rows where the index kernel stored them.
            real = len(lens)
            assert record.kv_indptr[: real + 1] == s.draft_indptr(step, 4)[: real + 1]
            rows = [row for row in done.stored if row.step == step]
            assert [row.start for row in rows] == record.kv_indptr[:-1]
            assert [row.length for row in rows] == record.kv_len
        assert done.waits == ()


@pytest.mark.parametrize("release", ALL)
def test_an_unpadded_draft_batch(release: str) -> None:
    """0.4.5 hands int64 lengths over here."""
    s = session(release)
    s.capture_draft(2, STEPS)
    done = s.replay_draft([10, 20])
    assert [r.arrays for r in done.records] == [
        expected.draft([10, 20], step) for step in range(STEPS - 1)
    ]


def _last(done: Done, count: int = 1) -> list[tuple[list[int], list[int], list[int]]]:
    return [record.arrays for record in done.records[-count:]]


@pytest.mark.parametrize("release", ALL)
def test_eager_plans_wait_once_only(release: str) -> None:
    """The first plan is FlashInfer's own: it loads the module."""
    s = session(release)
    for first, lens in ((True, [10, 20]), (False, [30]), (False, [5, 6, 7]), (False, [8, 9])):
        verify = s.eager_verify(lens, NDT)
        assert _last(verify) == [expected.verify(lens, NDT)]
        assert verify.launch.tokens == s.tokens(plus(lens, NDT))
        draft = s.eager_draft(lens, STEPS)
        assert _last(draft, STEPS - 1) == [expected.draft(lens, i) for i in range(STEPS - 1)]
        for step, launch in enumerate(draft.launches):
            assert launch.tokens == s.tokens(plus(lens, step + 1))
        assert bool(verify.waits) == bool(draft.waits) == first


@pytest.mark.parametrize("mode", ["draft-extend", "draft-extend-v1", "extend"])
@pytest.mark.parametrize("release", ALL)
def test_eager_extend_with_variable_lengths(release: str, mode: str) -> None:
    s = session(release)
    needed = {"draft-extend": "DRAFT_EXTEND_V2", "draft-extend-v1": "DRAFT_EXTEND"}.get(mode)
    if needed and not hasattr(s.modes, needed):
        pytest.skip(f"{release} has no {needed}")
    s.eager_extend([10], [2], mode=mode)
    for lens, extend in (([10, 20, 30], [2, 4, 1]), ([5], [3]), ([9, 8], [4, 4])):
        done = s.eager_extend(lens, extend, mode=mode)
        assert _last(done) == [expected.extend(lens, extend)]
        assert done.launch.tokens == s.tokens(lens)
        assert done.launch.plan is done.records[-1]
        # 0.5.1, and the input of 0.4.5, size the indices by a value from the device.
        assert [wait for wait in done.waits if wait.kind != "read"] == []
        assert done.waits == () or release in OLDER


@pytest.mark.parametrize("release", ALL)
def test_without_host_lengths_one_wait_and_the_same_plan(release: str) -> None:
    s = session(release)
    s.capture_decode(4)
    s.capture_verify(4, NDT)
    s.capture_draft(4, STEPS)
    decode = s.replay_decode([10, 20], bs=4, host_lens=None)
    verify = s.replay_verify([10, 20], NDT, bs=4, host_lens=None)
    draft = s.replay_draft([10, 20], bs=4, host_lens=None)
    assert decode.record.arrays == expected.decode([10, 20], 4)
    assert verify.record.arrays == expected.verify([10, 20], NDT, 4)
    assert _last(draft, STEPS - 1) == [
        expected.draft([10, 20], step, 4) for step in range(STEPS - 1)
    ]
    assert (len(decode.waits), len(verify.waits), len(draft.waits)) == (1, 1, STEPS - 1)


@pytest.mark.parametrize("release", ALL)
def test_the_host_may_run_ahead(release: str) -> None:
    s = session(release)
    s.capture_decode(2)
    s.capture_verify(2, NDT)
    s.capture_draft(2, STEPS)
    s.eager_extend([9, 9], [1, 1], mode="extend")
    with s.gpu.hold():
        ahead = []
        for k in range(8):
            ahead += [
                s.replay_decode([10 + k, 20]),
                s.replay_verify([10 + k, 20], NDT),
                s.replay_draft([10, 20 + k]),
                s.eager_extend([10 + k, 20], [1, 2], mode="extend"),
            ]
    for done in ahead:
        plans = done.records[-len(done.launches) :]
        assert [launch.plan for launch in done.launches] == plans


def test_the_ring_is_what_protects_the_plans() -> None:
    """Events that lie bring the race back: the test above would see it."""
    s = session("0.5.17")
    s.capture_decode(2)
    s.gpu.event_says = True
    with s.gpu.hold():
        ahead = [s.replay_decode([10 + k, 20]) for k in range(20)]
    assert any(done.launch.plan is not done.record for done in ahead)


@pytest.mark.parametrize("release", ["0.5.17", "0.5.18"])
def test_dflash_keeps_flashinfers_plan(release: str) -> None:
    s = session(release)
    s.capture_verify(4, NDT, kind="dflash")
    done = s.replay_verify([10, 20], NDT, bs=4, kind="dflash")
    assert done.record.arrays == expected.verify([10, 20], NDT, 4)
    assert done.record.stock
    s.capture_verify(4, NDT, kind="dflash", graph_tokens=8)
    ragged = s.replay_verify([10, 20], NDT, bs=4, kind="dflash", verify_lens=[3, 2], graph_tokens=8)
    assert ragged.record.arrays == expected.ragged_verify([10, 20, 1, 1], [3, 2, 2, 1])


@pytest.mark.parametrize("release", ["0.5.17", "0.5.18", "0.5.23"])
@pytest.mark.parametrize("rank", [0, 1])
def test_decode_under_context_parallelism(release: str, rank: int) -> None:
    s = session(release, shape=Shape(dcp_size=2, dcp_rank=rank))
    s.capture_decode(4)
    done = s.replay_decode([10, 21, 3], bs=4)
    assert done.record.arrays == expected.decode([10, 21, 3], 4, dcp=(2, rank))
    assert done.launch.tokens == s.tokens([10, 21, 3], bs=4, pad=1)
    assert done.waits == ()


def test_0_5_17_plans_as_upstreams_0_5_18() -> None:
    ours, upstream = session("0.5.17"), Session("0.5.18")
    for s in (ours, upstream):
        s.capture_decode(4)
        s.capture_verify(4, NDT)
    for lens in BATCHES:
        for name, more in (("replay_decode", ()), ("replay_verify", (NDT,))):
            a, b = (getattr(s, name)(lens, *more, bs=4) for s in (ours, upstream))
            assert a.record.arrays == b.record.arrays
            assert a.record.causal == b.record.causal
            assert a.record.num_heads == b.record.num_heads
            assert a.launch.tokens == b.launch.tokens
            assert a.waits == b.waits == ()


@pytest.mark.parametrize("release", ALL)
def test_a_host_plan_inside_a_capture_is_refused(release: str) -> None:
    s = session(release)
    s.capture_decode(2)
    s.capture_verify(2, NDT)
    s.gpu.capturing = True
    for replay in (lambda: s.replay_decode([10, 20]), lambda: s.replay_verify([10, 20], NDT)):
        with pytest.raises(RuntimeError, match="captur"):
            replay()


def test_a_file_for_an_older_flashinfer_plans_as_the_newer_one_does() -> None:
    """Somebody upgraded FlashInfer alone. The plans written for the older one would set state
    that the newer one's `run` does not read: they step back, and the passes are right."""
    patched = patch_of("0.5.18", "0.6.17").patched
    s = Session("0.5.18", patched, flashinfer="0.7.2")
    s.capture_decode(4)
    for lens in BATCHES:
        assert s.replay_decode(lens, bs=4).launch.tokens == s.tokens(lens, bs=4, pad=1)
    s.capture_verify(4, NDT)
    for lens in BATCHES:
        done = s.replay_verify(lens, NDT, bs=4)
        assert done.launch.tokens == s.tokens(plus(lens, NDT), bs=4, pad=1 + NDT)
    for lens in BATCHES:
        done = s.eager_verify(lens, NDT)
        assert done.record.stock
        assert done.launch.tokens == s.tokens(plus(lens, NDT))
        extend = [2] * len(lens)
        done = s.eager_extend(plus(lens, 2), extend)
        assert done.launch.tokens == s.tokens(plus(lens, 2))
