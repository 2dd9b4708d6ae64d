"""FlashInfer's MLA scheduler, plainly: which pieces of work a plan has, and who computes them.

Written to be read and compared with; in no hurry. The C++ planner of 0.5.3 to 0.7.4
(`flashinfer/attention/scheduler.cuh`) makes the same pieces and merges, in these words:

- A *tile* is up to 64 packed rows a block (rows: query tokens x heads) of one request, which one
  cluster of blocks computes; a *piece* is a range of KV tokens of one tile.
- A tile with more KV than `limit` is cut into pieces of `limit` and a rest. Their outputs are
  *partial* and are put together by *merges*, one a block, each over some rows of the tile.
- Pieces are dealt to clusters in the order in which they are made, each to the least loaded one.

Which cluster computes a piece, and when, changes no bit of the result; where tiles are cut does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ROWS_A_BLOCK = 64


@dataclass(frozen=True)
class Piece:
    """One work item. `request` and `tile` say whose it is; the rest is what the kernels read:

    q_indptr, kv_indptr: where the request's queries and pages begin. partial: row of the partial
    outputs where its own begin, -1: it writes the final output. q_len, kv_len: of the request.
    q_start: packed row of the request at which the tile begins. kv_start, kv_end: its KV tokens.
    """

    request: int
    tile: int
    q_indptr: int
    kv_indptr: int
    partial: int
    q_len: int
    kv_len: int
    q_start: int
    kv_start: int
    kv_end: int


@dataclass(frozen=True)
class Merge:
    """One block's share of putting a tile together: packed rows [start, end) of the output, from
    partial rows [partial_start, partial_end), `stride` rows from one piece to the next."""

    start: int
    end: int
    partial_start: int
    partial_end: int
    stride: int


@dataclass(frozen=True)
class Work:
    """All that a plan has to get done. `blocks` a cluster and `clusters` are the grid; `limit` is
    the KV tokens of a full piece; `partial_rows` are what the float workspace has to hold."""

    blocks: int
    clusters: int
    limit: int
    pieces: tuple[Piece, ...]
    merges: tuple[Merge, ...]
    partial_rows: int

    def cost(self, piece: Piece, fixed: int | None = None) -> int:
        """FlashInfer's cost of a piece, in KV tokens: reading queries counts twice. `fixed`: what
        it costs beside its KV by another measure."""
        if fixed is None:
            fixed = 2 * ROWS_A_BLOCK * self.blocks
        return fixed + piece.kv_end - piece.kv_start


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def work_of(
    q_lens: Sequence[int], kv_lens: Sequence[int], heads: int, causal: bool, sms: int
) -> Work:
    """The pieces and merges of one plan, in FlashInfer's order.

    Args:
        q_lens, kv_lens: tokens of each request. The index arrays are taken to be packed and pages
            to be tokens, as in SGLang.
        sms: streaming multiprocessors of the device.
    """
    blocks = 2 if sum(q_lens) * heads // len(q_lens) > ROWS_A_BLOCK else 1
    clusters = sms // blocks
    ends = [
        [tile_end(q, kv, tile, heads, blocks, causal) for tile in range(tiles_of(q, heads, blocks))]
        for q, kv in zip(q_lens, kv_lens, strict=True)
    ]
    limit = limit_of(sum(map(sum, ends)), clusters)
    pieces: list[Piece] = []
    merges: list[Merge] = []
    partial_rows = 0
    q_indptr = kv_indptr = 0
    for request, (q_len, kv_len) in enumerate(zip(q_lens, kv_lens, strict=True)):
        for tile in reversed(range(len(ends[request]))):
            end = ends[request][tile]
            q_start = tile * blocks * ROWS_A_BLOCK
            rows = min(blocks * ROWS_A_BLOCK, q_len * heads - q_start)
            count = max(1, ceil_div(end, limit))
            if count > 1:
                merges += merges_of(
                    q_indptr * heads + q_start,
                    rows,
                    max(1, end * blocks // limit),
                    partial_rows,
                    partial_rows + count * rows,
                )
            for number in range(count):
                pieces.append(
                    Piece(
                        request,
                        tile,
                        q_indptr,
                        kv_indptr,
                        partial_rows if count > 1 else -1,
                        q_len,
                        kv_len,
                        q_start,
                        number * limit,
                        min(end, (number + 1) * limit),
                    )
                )
                partial_rows += rows if count > 1 else 0
        q_indptr += q_len
        kv_indptr += kv_len
    return Work(blocks, clusters, limit, tuple(pieces), tuple(merges), partial_rows)


def tiles_of(q_len: int, heads: int, blocks: int) -> int:
    """Tiles of a request; none without queries."""
    return ceil_div(q_len * heads, blocks * ROWS_A_BLOCK)


def tile_end(q_len: int, kv_len: int, tile: int, heads: int, blocks: int, causal: bool) -> int:
    """KV tokens that the last row of a tile sees; all of them without a mask, and in the last
    tile."""
    if not causal or tile == tiles_of(q_len, heads, blocks) - 1:
        return kv_len
    tokens = ceil_div((tile + 1) * blocks * ROWS_A_BLOCK, heads)
    return min(max(kv_len - q_len + tokens, 0), kv_len)


def limit_of(tokens: int, clusters: int) -> int:
    """KV tokens of a full piece: a cluster's share of all, rounded up in steps."""
    share = max(1, ceil_div(tokens, clusters))
    for most, limit in ((8, 32), (16, 64), (32, 128), (64, 192)):
        if share <= most:
            return limit
    return ceil_div(share, 256) * 256


def merges_of(
    first_row: int, rows: int, blocks: int, partial_start: int, partial_end: int
) -> list[Merge]:
    """Deal the rows of a tile that was cut to `blocks` blocks at most."""
    share = ceil_div(rows, blocks)
    return [
        Merge(
            first_row + start,
            first_row + min(start + share, rows),
            partial_start + start,
            partial_end,
            rows,
        )
        for start in range(0, rows, share)
    ]


def deal(work: Work, order: Sequence[Piece]) -> list[list[Piece]]:
    """Give each piece of `order` to the least loaded cluster: in the pieces' own order FlashInfer's
    plan to the byte. Of clusters with the same load it takes the one that is on top of its heap."""
    heap = [(0, cluster) for cluster in range(work.clusters)]
    dealt: list[list[Piece]] = [[] for _ in heap]
    for piece in order:
        load, cluster = _take(heap)
        _put(heap, (load + work.cost(piece), cluster))
        dealt[cluster].append(piece)
    return dealt


def _put(heap: list[tuple[int, int]], entry: tuple[int, int]) -> None:
    """Add an entry at the heap's end; it rises past those of higher load, not of the same."""
    heap.append(entry)
    _rise(heap, len(heap) - 1, entry)


def _rise(heap: list[tuple[int, int]], place: int, entry: tuple[int, int]) -> None:
    while place > 0 and heap[(place - 1) // 2][0] > entry[0]:
        heap[place] = heap[(place - 1) // 2]
        place = (place - 1) // 2
    heap[place] = entry


def _take(heap: list[tuple[int, int]]) -> tuple[int, int]:
    """The entry on top. As in libstdc++ the gap is sunk to the bottom first, to the right where
    both sides have the same load, and the last entry rises from there."""
    top, last = heap[0], heap.pop()
    if not heap:
        return top
    place = 0
    while 2 * place + 1 < len(heap):
        child = 2 * place + 2
        if child == len(heap) or heap[child][0] > heap[child - 1][0]:
            child -= 1
        heap[place] = heap[child]
        place = child
    _rise(heap, place, last)
    return top


def loads(work: Work, dealt: Sequence[Sequence[Piece]], fixed: int | None = None) -> list[int]:
    """What each cluster has to do, in KV tokens; `fixed` as for Work.cost."""
    return [sum(work.cost(piece, fixed) for piece in pieces) for pieces in dealt]
