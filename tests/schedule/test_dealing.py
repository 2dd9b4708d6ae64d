"""Dealing in rounds and in turns: nothing is lost, and no cluster has much more to do than greedy
would give it."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.schedule.dealing import (
    FIXED,
    STEP,
    WORTH,
    deal_for_one_layer,
    deal_in_rounds,
    deal_in_turns,
    full_pieces,
    longest_first,
)
from tests.schedule.reference import ROWS_A_BLOCK, Piece, Work, ceil_div, deal, loads, work_of
from tests.schedule.test_reference import fields, works

SMS = 132
STEPS = st.sampled_from([1, 16, STEP, 1000, 10**9])
FIXED_COSTS = st.none() | st.integers(0, 2000)


def uniform(length: int) -> int:
    return random.randint(length // 2, length * 3 // 2)


def geometric(length: int) -> int:
    return 1 + int(-length * math.log(1 - random.random()))


def log_normal(length: int) -> int:
    return 1 + int(random.lognormvariate(math.log(length) - 0.5, 1.0))


def equal(length: int) -> int:
    return length


def longest(work: Work, dealt: list[list]) -> int:
    return max(loads(work, dealt))


def tokens_of(piece: Piece) -> int:
    return piece.kv_end - piece.kv_start


def assert_all_dealt(work: Work, dealt: list[list[Piece]]) -> None:
    assert len(dealt) == work.clusters
    flat = [piece for pieces in dealt for piece in pieces]
    assert sorted(map(fields, flat)) == sorted(map(fields, work.pieces))


@settings(deadline=None)
@given(works(), STEPS, FIXED_COSTS)
def test_every_piece_is_dealt_once(
    made: tuple[Work, list[int], list[int], int, bool], step: int, fixed: int | None
) -> None:
    work, *_ = made
    assert_all_dealt(work, deal_in_rounds(work))
    assert_all_dealt(work, deal_in_rounds(work, step=step, fixed=fixed))
    assert_all_dealt(work, deal_in_turns(work, step))


@settings(deadline=None)
@given(works())
def test_unless_given_the_fixed_cost_is_flashinfers(
    made: tuple[Work, list[int], list[int], int, bool],
) -> None:
    work, *_ = made
    own = 2 * ROWS_A_BLOCK * work.blocks
    assert deal_in_rounds(work, step=STEP, fixed=own) == deal_in_rounds(work)
    assert {work.cost(piece) - tokens_of(piece) for piece in work.pieces} <= {own}


@settings(deadline=None)
@given(works(), st.integers(0, 2000))
def test_balanced_by_the_cost_that_it_is_dealt_by(
    made: tuple[Work, list[int], list[int], int, bool], fixed: int
) -> None:
    work, *_ = made
    costs = [fixed + tokens_of(piece) for piece in work.pieces]
    dealt = deal_in_rounds(work, fixed=fixed)
    most = max(sum(fixed + tokens_of(piece) for piece in pieces) for pieces in dealt)
    assert most <= sum(costs) / work.clusters + 2 * max(costs)


def test_a_higher_fixed_cost_evens_out_how_many_pieces_a_cluster_gets() -> None:
    random.seed(1)
    lens = [log_normal(4096) for _ in range(256)]
    work = work_of([1] * 256, lens, 16, False, SMS)

    def most(fixed: int) -> int:
        return max(map(len, deal_in_rounds(work, fixed=fixed)))

    assert most(10**6) == ceil_div(len(work.pieces), work.clusters) < most(0)


@settings(deadline=None)
@given(works(), STEPS)
def test_in_turns_rank_alone_says_where(
    made: tuple[Work, list[int], list[int], int, bool], step: int
) -> None:
    work, *_ = made
    full = full_pieces(work)
    as_dealt = [
        sorted(pieces, key=lambda piece: piece not in full) for pieces in deal_in_turns(work, step)
    ]
    order = longest_first(work, step=step)
    for start in range(0, len(order), work.clusters):
        turn = start // work.clusters
        got = [pieces[turn] for pieces in as_dealt if turn < len(pieces)]
        assert (got if turn % 2 == 0 else got[::-1]) == order[start : start + work.clusters]
    most = ceil_div(len(work.pieces), work.clusters)
    assert all(most - 1 <= len(pieces) <= most for pieces in as_dealt)


@settings(deadline=None)
@given(works(), STEPS)
def test_a_full_piece_is_the_last_of_its_cluster(
    made: tuple[Work, list[int], list[int], int, bool], step: int
) -> None:
    """And the others keep the order in which they were dealt: the longest first."""
    work, *_ = made
    full = full_pieces(work)
    assert len(full) == len(work.pieces) - len({(p.request, p.tile) for p in work.pieces})
    place = {piece: number for number, piece in enumerate(longest_first(work, step=step))}
    for dealt in (deal_in_rounds(work, step=step), deal_in_turns(work, step)):
        for pieces in dealt:
            assert not any(piece in full for piece in pieces[:-1])
            others = [place[piece] for piece in pieces if piece not in full]
            assert others == sorted(others)


@settings(deadline=None)
@given(works())
def test_in_turns_no_cluster_is_a_piece_ahead(
    made: tuple[Work, list[int], list[int], int, bool],
) -> None:
    """Where lengths are compared to the token. A turn undoes what the last one favoured, and what
    all turns can favour adds up to the longest piece."""
    work, *_ = made
    all_loads = loads(work, deal_in_turns(work, 1))
    assert max(all_loads) - min(all_loads) <= max(map(work.cost, work.pieces))


@settings(deadline=None)
@given(works())
def test_no_cluster_is_a_piece_behind(made: tuple[Work, list[int], list[int], int, bool]) -> None:
    work, *_ = made
    costs = [work.cost(piece) for piece in work.pieces]
    assert longest(work, deal_in_rounds(work)) <= sum(costs) / work.clusters + 2 * max(costs)


@settings(deadline=None)
@given(works(), STEPS)
def test_equal_pieces_keep_the_order_of_requests(
    made: tuple[Work, list[int], list[int], int, bool], step: int
) -> None:
    work, *_ = made
    place = {piece: number for number, piece in enumerate(work.pieces)}
    tiles = len({(piece.request, piece.tile) for piece in work.pieces})
    order = longest_first(work, step=step)
    full, last = order[:-tiles], order[-tiles:]
    assert len(full) <= work.clusters  # so that the first round gives them all out
    assert {tokens_of(piece) for piece in full} <= {work.limit}
    assert [place[piece] for piece in full] == sorted(place[piece] for piece in full)
    for earlier, later in itertools.pairwise(last):
        steps = [ceil_div(tokens_of(piece), step) for piece in (earlier, later)]
        assert steps[0] > steps[1] or (steps[0] == steps[1] and place[earlier] < place[later])


@pytest.mark.parametrize("drawn", [uniform, geometric, log_normal])
@pytest.mark.parametrize(("heads", "tokens"), [(16, 1), (16, 3), (128, 3)])
@pytest.mark.parametrize("batch", [64, 128, 256])
def test_as_short_as_greedy_where_lengths_differ(
    drawn: Callable[[int], int], heads: int, tokens: int, batch: int
) -> None:
    """And shorter than FlashInfer's own. The load is FlashInfer's: queries twice, and KV."""
    random.seed(batch * heads + tokens)
    for _ in range(3):
        lens = [drawn(4096) for _ in range(batch)]
        work = work_of([tokens] * batch, lens, heads, tokens > 1, SMS)
        ours = longest(work, deal_in_rounds(work))
        greedy = longest(work, deal(work, longest_first(work)))
        assert ours <= 1.06 * greedy
        assert ours <= 0.99 * longest(work, deal(work, work.pieces))


@pytest.mark.parametrize(("heads", "tokens"), [(16, 1), (16, 3), (128, 3)])
@pytest.mark.parametrize("batch", [1, 16, 64, 128, 256])
def test_no_worse_where_they_do_not(heads: int, tokens: int, batch: int) -> None:
    work = work_of([tokens] * batch, [equal(4096)] * batch, heads, tokens > 1, SMS)
    assert longest(work, deal_in_rounds(work)) <= longest(work, deal(work, work.pieces))


@pytest.mark.parametrize(("drawn", "behind"), [(uniform, 1.1), (geometric, 1.7), (log_normal, 1.7)])
@pytest.mark.parametrize(("heads", "tokens"), [(16, 1), (16, 3), (128, 3)])
@pytest.mark.parametrize("batch", [64, 128, 256])
def test_turns_are_behind_rounds_where_some_are_much_longer(
    drawn: Callable[[int], int], behind: float, heads: int, tokens: int, batch: int
) -> None:
    """Rounds leave out a cluster that has a long piece; turns give it as many as the others."""
    random.seed(batch)
    lens = [drawn(4096) for _ in range(batch)]
    work = work_of([tokens] * batch, lens, heads, tokens > 1, SMS)
    rounds, turns = longest(work, deal_in_rounds(work)), longest(work, deal_in_turns(work))
    assert turns <= behind * rounds


@pytest.mark.parametrize("sms", [78, 84, 108, 114, 128, SMS, 144, 148, 160])
@pytest.mark.parametrize("in_rounds", [False, True])
@pytest.mark.parametrize("added", [0, 1, 3, 7])
def test_one_layer_as_the_generated_tests_have_it(sms: int, in_rounds: bool, added: int) -> None:
    """Of templates/tests/device_graph.jinja: lengths that are dealt each way, whatever the GPU;
    and in rounds the busiest cluster is as near to its share as turns would have to be."""
    batch = 8 * sms // 11
    work = work_of([1] * batch, [(4096 if in_rounds else 1000) + added] * batch, 16, False, sms)
    turns, rounds = deal_in_turns(work), deal_in_rounds(work, fixed=FIXED[1])
    assert turns != rounds
    dealt = deal_for_one_layer(work)
    assert dealt == (rounds if in_rounds else turns)
    assert len(work.pieces) == 2 * batch > work.clusters

    def beyond(dealt: list[list[Piece]]) -> float:
        found = loads(work, dealt, FIXED[1])
        return max(found) - sum(found) / work.clusters

    assert beyond(dealt) <= WORTH
    assert (beyond(turns) > WORTH) == in_rounds
    assert (beyond(deal(work, work.pieces)) > WORTH) == in_rounds
