"""Dealing pieces to clusters in parallel: a model of what a planner on the GPU can do.

FlashInfer deals in request order, each piece to the least loaded cluster: a long request that comes
late has nothing to be balanced with. Longest first is the classic cure, but a sequential one: each
step needs the load that the last one left. In *rounds* it is not: all clusters whose load is less
than the least load and the longest piece left get one piece each, the least loaded the longest.
Sequential greedy would have come by each of them before it came by any of them twice, but for the
little by which pieces grow shorter within a round.

In *turns* no load is asked for at all: the rounds take every cluster, from the first to the last
and back. Where a piece goes then follows from its rank alone.

Either way a cluster begins with its short pieces: a full piece, dealt first, comes last.

Lengths are compared in steps, so that the tiles of one request, which read the same KV and differ
by a token, stay together; pieces that compare equal keep the order of the requests.
"""

from __future__ import annotations

from tests.schedule.reference import Piece, Work, ceil_div, loads

STEP = 64  # KV tokens: a tile of the kernels
#: What a piece costs beside its KV, by blocks a cluster: MlagenDevicePlan.FIXED.
FIXED = {1: 192, 2: 256}
WORTH = 600  # likewise: KV tokens beyond its share that make rounds worth it


def longest_first(work: Work, *, step: int = STEP) -> list[Piece]:
    """The full pieces of cut tiles, which no piece is longer than; behind them the tiles' last
    pieces, by length in steps of `step`. Equal ones are in FlashInfer's order."""
    full = full_pieces(work)
    last = [piece for piece in work.pieces if piece not in full]
    last.sort(key=lambda piece: -ceil_div(piece.kv_end - piece.kv_start, step))
    return [*full, *last]


def full_pieces(work: Work) -> dict[Piece, None]:
    """The pieces of cut tiles that another of the same tile follows."""
    following = [*work.pieces[1:], None]
    return {
        piece: None
        for piece, after in zip(work.pieces, following, strict=True)
        if after is not None and (piece.request, piece.tile) == (after.request, after.tile)
    }


def full_last(work: Work, dealt: list[list[Piece]]) -> list[list[Piece]]:
    """The same dealing, each cluster's full piece behind its others."""
    full = full_pieces(work)
    return [sorted(pieces, key=lambda piece: piece in full) for pieces in dealt]


def deal_in_rounds(work: Work, *, step: int = STEP, fixed: int | None = None) -> list[list[Piece]]:
    """Give out the pieces, longest first, in rounds of at most one a cluster.

    Args:
        fixed: what a piece costs beside its KV, to deal by another cost than FlashInfer's.
    """
    order = longest_first(work, step=step)
    costs = [work.cost(piece, fixed) for piece in order]
    load = [0] * work.clusters
    dealt: list[list[Piece]] = [[] for _ in load]
    given = 0
    while given < len(order):
        # Without a fixed cost a piece may cost nothing; the least loaded take it all the same.
        ahead = min(load) + max(1, costs[given])
        takers = sorted(cluster for cluster in range(work.clusters) if load[cluster] < ahead)
        takers.sort(key=lambda cluster: load[cluster])
        for cluster, piece, cost in zip(takers, order[given:], costs[given:], strict=False):
            dealt[cluster].append(piece)
            load[cluster] += cost
        given += len(takers)
    return full_last(work, dealt)


def deal_in_turns(work: Work, step: int = STEP) -> list[list[Piece]]:
    """Give out the pieces, longest first, in rounds of one a cluster, each round in the opposite
    direction of the last: who got the longest of one gets the shortest of the next."""
    dealt: list[list[Piece]] = [[] for _ in range(work.clusters)]
    for rank, piece in enumerate(longest_first(work, step=step)):
        turn, place = divmod(rank, work.clusters)
        dealt[work.clusters - 1 - place if turn % 2 else place].append(piece)
    return full_last(work, dealt)


def deal_for_one_layer(work: Work) -> list[list[Piece]]:
    """In turns, but in rounds where that leaves one cluster with more than WORTH beyond its share:
    how uneven lengths have to be for rounds to be worth their own time."""
    dealt = deal_in_turns(work)
    fixed = FIXED[work.blocks]
    kv_tokens = sum(work.cost(piece, 0) for piece in work.pieces)
    even = kv_tokens // work.clusters + len(work.pieces) * fixed // work.clusters
    worth_it = max(loads(work, dealt, fixed)) > even + WORTH
    return deal_in_rounds(work, fixed=fixed) if worth_it else dealt


def rounds_of(work: Work) -> int:
    """How many rounds `deal_in_rounds` takes; what its time on a GPU grows with."""
    return max((len(pieces) for pieces in deal_in_rounds(work)), default=0)
