"""The reference scheduler: the pieces that FlashInfer's own planner makes, and what holds of any.

`recorded.json` holds plans that the C++ planner of FlashInfer 0.7.2 made; 0.5.3, 0.6.18 and 0.7.4
make the same ones. More are compared where a GPU is, by tests/gpu/test_reference.py.
"""

from __future__ import annotations

import json
import random
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.schedule.reference import (
    ROWS_A_BLOCK,
    Piece,
    Work,
    ceil_div,
    deal,
    limit_of,
    loads,
    tile_end,
    tiles_of,
    work_of,
)

RECORDED = json.loads(Path(__file__).with_name("recorded.json").read_bytes())


def fields(piece: Piece) -> list[int]:
    """A piece as the planner writes it."""
    return [
        piece.q_indptr,
        piece.kv_indptr,
        piece.partial,
        piece.q_len,
        piece.kv_len,
        piece.q_start,
        piece.kv_start,
        piece.kv_end,
    ]


@pytest.mark.parametrize("plan", RECORDED, ids=[plan["name"] for plan in RECORDED])
def test_the_planner_makes_the_same_plan(plan: dict[str, Any]) -> None:
    work = work_of(plan["q_lens"], plan["kv_lens"], plan["heads"], plan["causal"], plan["sms"])
    assert [work.blocks, work.clusters] == plan["grid"]
    spans = zip(plan["work_indptr"], plan["work_indptr"][1:], strict=False)
    dealt = [plan["items"][start:end] for start, end in spans]
    assert [list(map(fields, pieces)) for pieces in deal(work, work.pieces)] == dealt
    merges = [[m.start, m.end, m.partial_start, m.partial_end, m.stride] for m in work.merges]
    assert merges == plan["merges"]


@pytest.mark.parametrize("clusters", [1, 2, 7, 66, 78, 132])
def test_where_each_piece_has_a_cluster_costs_do_not_matter(clusters: int) -> None:
    """Which one follows from how many there were before it."""
    orders = set()
    for seed in range(20):
        costs = random.Random(seed).choices([128, 129, 1000, 5000], k=clusters)
        pieces = tuple(Piece(n, 0, n, 0, -1, 1, cost, 0, 0, cost) for n, cost in enumerate(costs))
        work = Work(1, clusters, 5000, pieces, (), 0)
        orders.add(tuple(piece.request for (piece,) in deal(work, pieces)))
    assert len(orders) == 1


@st.composite
def works(draw: st.DrawFn) -> tuple[Work, list[int], list[int], int, bool]:
    batch = draw(st.integers(1, 12))
    lengths = st.one_of(st.integers(0, 3), st.integers(60, 70), st.integers(0, 9000))
    q_lens = draw(st.lists(st.integers(1, 6), min_size=batch, max_size=batch))
    kv_lens = draw(st.lists(lengths, min_size=batch, max_size=batch))
    heads = draw(st.sampled_from([8, 16, 32, 40, 48, 64, 96, 128]))
    causal = draw(st.booleans())
    sms = draw(st.sampled_from([2, 7, 13, 78, 108, 132]))
    return work_of(q_lens, kv_lens, heads, causal, sms), q_lens, kv_lens, heads, causal


def by_tile(work: Work) -> dict[tuple[int, int], list[Piece]]:
    found: dict[tuple[int, int], list[Piece]] = defaultdict(list)
    for piece in work.pieces:
        found[piece.request, piece.tile].append(piece)
    return found


@settings(deadline=None)
@given(works())
def test_each_tile_is_covered_once(
    made: tuple[Work, list[int], list[int], int, bool],
) -> None:
    work, q_lens, kv_lens, heads, causal = made
    tiles = by_tile(work)
    expected = {
        (request, tile)
        for request, q_len in enumerate(q_lens)
        for tile in range(tiles_of(q_len, heads, work.blocks))
    }
    assert tiles.keys() == expected  # also those that see no KV: they write zeros
    for (request, tile), pieces in tiles.items():
        end = tile_end(q_lens[request], kv_lens[request], tile, heads, work.blocks, causal)
        bounds = [0, *(piece.kv_end for piece in pieces)]
        assert [piece.kv_start for piece in pieces] == bounds[:-1]
        assert bounds[-1] == end
        assert all(piece.kv_end - piece.kv_start == work.limit for piece in pieces[:-1])


@settings(deadline=None)
@given(works())
def test_partial_rows_and_their_merges(
    made: tuple[Work, list[int], list[int], int, bool],
) -> None:
    work, q_lens, _, heads, _ = made
    begins = 0
    merged = iter(work.merges)
    for (request, _), pieces in by_tile(work).items():
        if len(pieces) == 1:
            assert pieces[0].partial == -1
            continue
        rows = min(work.blocks * ROWS_A_BLOCK, q_lens[request] * heads - pieces[0].q_start)
        assert [piece.partial for piece in pieces] == [
            begins + rows * number for number in range(len(pieces))
        ]
        covered = 0
        while covered < rows:
            merge = next(merged)
            first = pieces[0].q_indptr * heads + pieces[0].q_start
            assert (merge.start - first, merge.partial_start - begins) == (covered, covered)
            assert merge.partial_end == begins + rows * len(pieces)
            assert merge.stride == rows
            covered = merge.end - first
        assert covered == rows
        begins += rows * len(pieces)
    assert next(merged, None) is None
    assert begins == work.partial_rows


@settings(deadline=None)
@given(works())
def test_what_the_workspaces_have_room_for(
    made: tuple[Work, list[int], list[int], int, bool],
) -> None:
    work, *_ = made
    assert len(work.pieces) <= len(by_tile(work)) + work.clusters
    assert len(work.merges) <= work.blocks * work.clusters
    assert work.partial_rows <= 2 * work.clusters * ROWS_A_BLOCK * work.blocks


@settings(deadline=None)
@given(works())
def test_every_piece_is_dealt_once(made: tuple[Work, list[int], list[int], int, bool]) -> None:
    work, *_ = made
    dealt = deal(work, work.pieces)
    assert len(dealt) == work.clusters
    flat = [piece for pieces in dealt for piece in pieces]
    assert sorted(map(fields, flat)) == sorted(map(fields, work.pieces))
    costs = [work.cost(piece) for piece in work.pieces]
    assert max(loads(work, dealt)) <= ceil_div(sum(costs), work.clusters) + max(costs)


@pytest.mark.parametrize(
    ("tokens", "clusters", "limit"),
    [(0, 132, 32), (8 * 132, 132, 32), (9 * 132, 132, 64), (33 * 66, 66, 192), (65, 1, 256),
     (256, 1, 256), (257, 1, 512)],
)  # fmt: skip
def test_the_length_of_a_full_piece(tokens: int, clusters: int, limit: int) -> None:
    assert limit_of(tokens, clusters) == limit
