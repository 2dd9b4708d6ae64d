"""Dealing pieces to clusters in parallel: a model of what a planner on the GPU can do.

FlashInfer deals in request order, each piece to the least loaded cluster: a long request that comes
late has nothing to be balanced with. Longest first is the classic cure, but a sequential one: each
step needs the load that the last one left. In *rounds* it is not: all clusters whose load is less
than the least load and the longest piece left get one piece each, the least loaded the longest.
Sequential greedy would have come by each of them before it came by any of them twice, but for the
little by which pieces grow shorter within a round.

In *turns* no load is asked for at all: the rounds take every cluster, from the first to the last
and back. Where a piece goes then follows from its rank alone.

Lengths are compared in steps, so that the tiles of one request, which read the same KV and differ
by a token, stay together; pieces that compare equal keep the order of the requests.
"""

from __future__ import annotations

from tests.schedule.reference import ROWS_A_BLOCK, Piece, Work, ceil_div

STEP = 64  # KV tokens: a tile of the kernels


def longest_first(work: Work, *, step: int = STEP) -> list[Piece]:
    """The full pieces of cut tiles, which no piece is longer than; behind them the tiles' last
    pieces, by length in steps of `step`. Equal ones are in FlashInfer's order."""
    tiles = [(piece.request, piece.tile) for piece in work.pieces]
    full = [tile == following for tile, following in zip(tiles, [*tiles[1:], None], strict=True)]
    pieces = list(zip(full, work.pieces, strict=True))
    last = [piece for is_full, piece in pieces if not is_full]
    last.sort(key=lambda piece: -ceil_div(piece.kv_end - piece.kv_start, step))
    return [*(piece for is_full, piece in pieces if is_full), *last]


def deal_in_rounds(work: Work, *, step: int = STEP, fixed: int | None = None) -> list[list[Piece]]:
    """Give out the pieces, longest first, in rounds of at most one a cluster.

    Args:
        fixed: what a piece costs beside its KV, to deal by another cost than FlashInfer's.
    """
    if fixed is None:
        fixed = 2 * ROWS_A_BLOCK * work.blocks
    order = longest_first(work, step=step)
    costs = [fixed + piece.kv_end - piece.kv_start for piece in order]
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
    return dealt


def deal_in_turns(work: Work, step: int = STEP) -> list[list[Piece]]:
    """Give out the pieces, longest first, in rounds of one a cluster, each round in the opposite
    direction of the last: who got the longest of one gets the shortest of the next."""
    dealt: list[list[Piece]] = [[] for _ in range(work.clusters)]
    for rank, piece in enumerate(longest_first(work, step=step)):
        turn, place = divmod(rank, work.clusters)
        dealt[work.clusters - 1 - place if turn % 2 else place].append(piece)
    return dealt


def rounds_of(work: Work) -> int:
    """How many rounds `deal_in_rounds` takes; what its time on a GPU grows with."""
    return max((len(pieces) for pieces in deal_in_rounds(work)), default=0)
