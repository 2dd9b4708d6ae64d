"""Dealing in rounds: nothing is lost, and no cluster has more to do than greedy would give it."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings

from tests.schedule.dealing import STEP, deal_in_rounds, longest_first
from tests.schedule.reference import Work, ceil_div, deal, loads, work_of
from tests.schedule.test_reference import fields, works

SMS = 132


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


@settings(deadline=None)
@given(works())
def test_every_piece_is_dealt_once(made: tuple[Work, list[int], list[int], int, bool]) -> None:
    work, *_ = made
    dealt = deal_in_rounds(work)
    assert len(dealt) == work.clusters
    flat = [piece for pieces in dealt for piece in pieces]
    assert sorted(map(fields, flat)) == sorted(map(fields, work.pieces))


@settings(deadline=None)
@given(works())
def test_no_cluster_is_a_piece_behind(made: tuple[Work, list[int], list[int], int, bool]) -> None:
    work, *_ = made
    costs = [work.cost(piece) for piece in work.pieces]
    assert longest(work, deal_in_rounds(work)) <= sum(costs) / work.clusters + 2 * max(costs)


@settings(deadline=None)
@given(works())
def test_equal_pieces_keep_the_order_of_requests(
    made: tuple[Work, list[int], list[int], int, bool],
) -> None:
    work, *_ = made
    place = {piece: number for number, piece in enumerate(work.pieces)}
    tiles = len({(piece.request, piece.tile) for piece in work.pieces})
    order = longest_first(work)
    full, last = order[:-tiles], order[-tiles:]
    assert len(full) <= work.clusters  # so that the first round gives them all out
    assert {piece.kv_end - piece.kv_start for piece in full} <= {work.limit}
    assert [place[piece] for piece in full] == sorted(place[piece] for piece in full)
    for earlier, later in itertools.pairwise(last):
        steps = [ceil_div(piece.kv_end - piece.kv_start, STEP) for piece in (earlier, later)]
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
