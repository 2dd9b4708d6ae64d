"""What the released files do: the reference that patched files are held against, and the proof that
the harness sees the defects that mlagen is about."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from . import expected
from .harness import Done, Session
from .runs import BATCHES, NDT, OLDER, RELEASES, STEPS, plus
from .stubs import Shape

# Waits of one stock plan whose arrays are on the device, with the FlashInfer that is pinned.
STOCK_WAITS = {"0.5.23": 10}
# Upstream plans verify on the host itself.
HOST_VERIFY = ("0.5.18", "0.5.23")


def _stock_waits(release: str) -> int:
    return STOCK_WAITS.get(release, 3)


@pytest.mark.parametrize("release", [*OLDER, *RELEASES])
def test_decode_is_right_and_does_not_wait(release: str) -> None:
    session = Session(release)
    session.capture_decode(4)
    for lens in BATCHES:
        done = session.replay_decode(lens, bs=4)
        assert done.record.arrays == expected.decode(lens, 4)
        assert not done.record.causal
        assert not done.record.stock
        assert done.launch.plan is done.record
        assert done.launch.tokens == session.tokens(lens, bs=4, pad=1)
        assert done.waits == ()


@pytest.mark.parametrize("release", [*OLDER, *RELEASES])
def test_verify_is_right_and_waits_until_0_5_17(release: str) -> None:
    session = Session(release)
    session.capture_verify(4, NDT)
    for lens in BATCHES:
        done = session.replay_verify(lens, NDT, bs=4)
        assert done.record.arrays == expected.verify(lens, NDT, 4)
        assert done.record.stock == (release not in HOST_VERIFY)
        assert done.launch.plan is done.record
        assert done.launch.grid_fits
        assert done.launch.tokens == session.tokens(plus(lens, NDT), bs=4, pad=1 + NDT)
        assert len(done.waits) == (0 if release in HOST_VERIFY else 3)
        assert {wait.function for wait in done.waits} <= {"call_begin_forward"}
        if release > "0.5.10":
            # Up to there FlashInfer did not read the flag.
            assert done.record.causal


@pytest.mark.parametrize("release", [*OLDER, *RELEASES])
def test_ngram_verify_is_right_where_it_exists(release: str) -> None:
    session = Session(release)
    if not session.stubs.specs.supports("ngram"):
        assert release in OLDER
        return
    session.capture_verify(2, NDT, kind="ngram")
    done = session.replay_verify([9, 8], NDT, kind="ngram")
    assert done.record.arrays == expected.verify([9, 8], NDT)
    # Up to 0.5.13 it sizes its indices by a value from the device.
    reads = [wait for wait in done.waits if wait.kind == "read"]
    assert bool(reads) == (release in ("0.5.10", "0.5.13"))


@pytest.mark.parametrize("release", [*OLDER, *RELEASES])
def test_draft_rows_are_where_a_right_plan_looks(release: str) -> None:
    """The release's own kernel agrees with `expected.draft`; its indptr does for real rows only."""
    session = Session(release)
    session.capture_draft(4, STEPS)
    for lens in ([10, 20], [10, 20, 30, 40], [1, 1, 1]):
        done = session.replay_draft(lens, bs=4)
        for step in range(STEPS - 1):
            _, indptr, kv_len = expected.draft(lens, step, 4)
            rows = [row for row in done.stored if row.step == step]
            assert [row.start for row in rows] == indptr[:-1]
            assert [row.length for row in rows] == kv_len
            real = len(lens)
            assert session.draft_indptr(step, 4)[: real + 1] == indptr[: real + 1]
    assert session.draft_indptr(0, 4) == [0, 2, 4, 6, 7]
    assert expected.draft([1, 1, 1], 0, 4)[1] == [0, 2, 4, 6, 8]


@pytest.mark.parametrize("release", [*OLDER[1:], *RELEASES])
def test_draft_replay_plans_the_lengths_of_a_decode(release: str) -> None:
    """The defect D2: newest tokens are missed, and tokens of the previous request are read."""
    session = Session(release)
    session.capture_draft(4, STEPS)
    lens = [10, 20, 30]
    done = session.replay_draft(lens, bs=4)
    assert len(done.records) == STEPS - 1
    assert done.waits == ()
    for step, (record, launch) in enumerate(zip(done.records, done.launches, strict=True)):
        right = expected.draft(lens, step, 4)
        assert record.arrays == expected.decode(lens, 4)
        assert record.kv_len != right[2]
        assert record.kv_indptr != right[1]
        assert launch.plan is record
        wanted = session.tokens(plus(lens, step + 1), bs=4, pad=step + 2)
        assert all(got != want for got, want in zip(launch.tokens, wanted, strict=True))
        # Request 1's row begins with what request 0 has newest.
        assert launch.tokens[1] is not None
        assert launch.tokens[1][: step + 1] == wanted[0][10:]


def test_0_4_5_hands_int64_lengths_to_the_planner() -> None:
    """The defect D6, where the draft batch fills its graph: C++ reads every other word as 0."""
    session = Session("0.4.5")
    session.capture_draft(2, STEPS)
    done = session.replay_draft([10, 20])
    assert done.records[0].kv_len == [10, 0]
    session.capture_draft(4, STEPS)
    assert session.replay_draft([10, 20], bs=4).records[0].kv_len == [10, 20, 1, 1]


@pytest.mark.parametrize("release", [*OLDER, *RELEASES])
def test_eager_draft_plans_the_lengths_of_a_decode(release: str) -> None:
    session = Session(release)
    done = session.eager_draft([10, 20], STEPS)
    assert [record.arrays for record in done.records] == [expected.decode([10, 20])] * (STEPS - 1)
    assert len(done.waits) >= (STEPS - 1) * 3
    assert all(launch.tokens == session.tokens([10, 20]) for launch in done.launches)


@pytest.mark.parametrize("release", RELEASES)
def test_eager_verify_and_decode_are_right_and_wait(release: str) -> None:
    session = Session(release)
    for lens in ([10, 20], [30], [5, 6, 7]):
        verify = session.eager_verify(lens, NDT)
        decode = session.eager_decode(lens)
        assert verify.record.arrays == expected.verify(lens, NDT)
        assert verify.launch.tokens == session.tokens(plus(lens, NDT))
        assert decode.record.arrays == expected.decode(lens)
        assert decode.launch.tokens == session.tokens(lens)
        for done in (verify, decode):
            assert done.record.stock
            assert len(done.waits) == _stock_waits(release)


@pytest.mark.parametrize("release", RELEASES)
def test_eager_extend_behind_a_prefix_is_right_and_waits(release: str) -> None:
    session = Session(release)
    done = session.eager_extend([10, 20, 30], [3, 1, 29], mode="extend")
    assert done.record.arrays == expected.extend([10, 20, 30], [3, 1, 29])
    assert done.launch.tokens == session.tokens([10, 20, 30])
    assert len(done.waits) == _stock_waits(release)


@pytest.mark.parametrize("release", RELEASES)
def test_eager_draft_extend(release: str) -> None:
    """Upstream's host arrays (0.5.18 and later) take all requests to extend alike."""
    session = Session(release)
    uniform = session.eager_extend([10, 20], [4, 4])
    assert uniform.record.arrays == expected.extend([10, 20], [4, 4])
    variable = session.eager_extend([10, 20], [2, 4])
    if release in HOST_VERIFY:
        assert uniform.waits == ()
        assert variable.record.qo_indptr == [0, 4, 8]
    else:
        assert len(uniform.waits) == _stock_waits(release)
        assert variable.record.arrays == expected.extend([10, 20], [2, 4])


@pytest.mark.parametrize("release", [*OLDER, "0.5.10", "0.5.13"])
def test_eager_draft_extend_v1_has_variable_lengths(release: str) -> None:
    session = Session(release)
    done = session.eager_extend([10, 20, 30], [1, 3, 2], mode="draft-extend-v1")
    assert done.record.arrays == expected.extend([10, 20, 30], [1, 3, 2])
    assert done.launch.tokens == session.tokens([10, 20, 30])
    copies = [wait for wait in done.waits if wait.kind == "d2h"]
    assert len(copies) == 3


def test_a_padded_extend_batch() -> None:
    """From 0.5.19 padding lengthens all extend fields; before, stock fails on such a batch."""
    padded = Session("0.5.23").eager_extend([10, 20], [4, 4], bs=4)
    assert padded.record.arrays == expected.extend([10, 20, 1, 1], [4, 4, 4, 4])
    with pytest.raises(RuntimeError, match="size of tensor"):
        Session("0.5.17").eager_extend([10, 20], [4, 4], bs=4)


def _dflash(release: str, lens: Sequence[int]) -> tuple[Session, Done]:
    session = Session(release)
    session.capture_verify(4, NDT, kind="dflash")
    return session, session.replay_verify(lens, NDT, bs=4, kind="dflash")


@pytest.mark.parametrize("release", ["0.5.13", "0.5.17"])
def test_dflash_verify_is_right_where_it_plans_from_the_device(release: str) -> None:
    session, done = _dflash(release, [10, 20])
    assert done.record.arrays == expected.verify([10, 20], NDT, 4)
    assert len(done.waits) == 3
    assert done.launch.tokens == session.tokens([13, 23], bs=4, pad=1 + NDT)


def test_dflash_verify_on_0_5_18_counts_the_window_twice() -> None:
    """The defect D3: the worker's host lengths hold the window already."""
    session, done = _dflash("0.5.18", [10, 20])
    assert done.record.kv_len == [10 + 2 * NDT, 20 + 2 * NDT, 1 + NDT, 1 + NDT]
    assert done.record.arrays != expected.verify([10, 20], NDT, 4)
    assert done.launch.tokens != session.tokens([13, 23], bs=4, pad=1 + NDT)


def test_dflash_verify_on_0_5_23_is_right_for_real_rows() -> None:
    """The defect D8: padded rows have no window on the host."""
    session, done = _dflash("0.5.23", [10, 20])
    assert done.record.kv_len == [13, 23, 1, 1]
    assert done.launch.tokens[:2] == session.tokens([13, 23])
    assert done.waits == ()


@pytest.mark.parametrize(("release", "waits"), [("0.5.17", 3), ("0.5.23", 10)])
def test_ragged_verify_is_right_where_it_plans_from_the_device(release: str, waits: int) -> None:
    session = Session(release)
    session.capture_verify(4, NDT, kind="dflash", graph_tokens=8)
    done = session.replay_verify(
        [10, 20], NDT, bs=4, kind="dflash", verify_lens=[3, 2], graph_tokens=8
    )
    # The three tokens that are left over go to the padded rows.
    assert done.record.arrays == expected.ragged_verify([10, 20, 1, 1], [3, 2, 2, 1])
    assert len(done.waits) == waits


def test_ragged_verify_on_0_5_18_is_planned_as_a_uniform_one() -> None:
    session = Session("0.5.18")
    session.capture_verify(4, NDT, kind="dflash", graph_tokens=8)
    done = session.replay_verify(
        [10, 20], NDT, bs=4, kind="dflash", verify_lens=[3, 2], graph_tokens=8
    )
    assert done.record.qo_indptr == [0, 3, 6, 9, 12]


@pytest.mark.parametrize("release", RELEASES)
def test_decode_needs_host_lengths(release: str) -> None:
    session = Session(release)
    session.capture_decode(2)
    with pytest.raises(AssertionError):
        session.replay_decode([10, 20], host_lens=None)


@pytest.mark.parametrize("release", RELEASES)
def test_only_upstreams_host_plans_need_host_lengths_for_verify(release: str) -> None:
    session = Session(release)
    session.capture_verify(2, NDT)
    if release in HOST_VERIFY:
        with pytest.raises(AssertionError, match="host-resident seq_lens_cpu"):
            session.replay_verify([10, 20], NDT, host_lens=None)
    else:
        done = session.replay_verify([10, 20], NDT, host_lens=None)
        assert done.record.arrays == expected.verify([10, 20], NDT)


@pytest.mark.parametrize("release", ["0.5.17", "0.5.18", "0.5.23"])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_decode_under_context_parallelism(release: str, rank: int) -> None:
    session = Session(release, shape=Shape(dcp_size=3, dcp_rank=rank))
    session.capture_decode(4)
    for lens in ([10, 20, 31], [9, 1, 2, 3]):
        done = session.replay_decode(lens, bs=4)
        assert done.record.arrays == expected.decode(lens, 4, dcp=(3, rank))
        assert done.record.num_heads == 48
        assert done.launch.tokens == session.tokens(lens, bs=4, pad=1)
        assert done.waits == ()


@pytest.mark.parametrize(
    ("release", "races"), [("0.5.10", True), ("0.5.18", True), ("0.5.23", False)]
)
def test_the_pinned_buffer_races_where_the_planner_copies_from_it(
    release: str, races: bool
) -> None:
    """The defect D1, with the host two decodes ahead of the device."""
    session = Session(release)
    session.capture_decode(2)
    with session.gpu.hold():
        first = session.replay_decode([10, 20])
        second = session.replay_decode([40, 50])
    assert second.launch.plan is second.record
    assert (first.launch.plan is not first.record) == races


def test_a_stock_verify_is_fenced_by_its_own_waits() -> None:
    session = Session("0.5.17")
    session.capture_verify(2, NDT)
    with session.gpu.hold():
        first = session.replay_verify([10, 20], NDT)
        second = session.replay_verify([40, 50], NDT)
    assert first.launch.plan is first.record
    assert second.launch.plan is second.record


def test_the_eager_draft_extend_of_0_5_18_races_too() -> None:
    session = Session("0.5.18")
    with session.gpu.hold():
        first = session.eager_extend([10, 20], [4, 4])
        session.eager_extend([30, 40], [4, 4])
    assert first.launch.plan is not first.record


@pytest.mark.parametrize("release", ["0.5.10", "0.5.17"])
def test_a_release_runs_on_a_flashinfer_that_it_does_not_pin(release: str) -> None:
    session = Session(release, flashinfer="0.7.2")
    session.capture_verify(2, NDT)
    done = session.replay_verify([10, 20], NDT)
    assert done.record.arrays == expected.verify([10, 20], NDT)
    assert len(done.waits) == 10


def test_the_given_bytes_are_what_runs() -> None:
    source = Session("0.5.17").module
    assert not hasattr(source, "MARK")
    from ..releases import sglang_file

    session = Session("0.5.17", sglang_file("0.5.17") + b"\nMARK = 1\n")
    assert session.module.MARK == 1
