"""The arrays that a right plan hands to the planner, from the lengths alone.

Written down here independently of SGLang: nothing below runs its code. Arrays are lists of ints in
the planner's order, (qo_indptr, kv_indptr, kv_len), one row a request, padded rows last.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

Arrays = tuple[list[int], list[int], list[int]]


def indptr(lens: Sequence[int]) -> list[int]:
    """Offsets of consecutive pieces of these lengths."""
    return [0, *accumulate(lens)]


def padded(seq_lens: Sequence[int], bs: int | None) -> list[int]:
    """The lengths of a graph's batch: rows that no request fills have length 1."""
    return [*seq_lens, *[1] * ((bs or len(seq_lens)) - len(seq_lens))]


def of_lengths(q_lens: Sequence[int], kv_lens: Sequence[int]) -> Arrays:
    return indptr(q_lens), indptr(kv_lens), list(kv_lens)


def decode(
    seq_lens: Sequence[int], bs: int | None = None, *, dcp: tuple[int, int] = (1, 0)
) -> Arrays:
    """One query a request over its whole prefix, or over this rank's share: dcp is (size, rank)."""
    size, rank = dcp
    lens = [n // size + (rank < n % size) for n in padded(seq_lens, bs)]
    return of_lengths([1] * len(lens), lens)


def verify(seq_lens: Sequence[int], ndt: int, bs: int | None = None) -> Arrays:
    """`ndt` queries a request over its prefix and the drafted tokens."""
    lens = [n + ndt for n in padded(seq_lens, bs)]
    return of_lengths([ndt] * len(lens), lens)


def ragged_verify(seq_lens: Sequence[int], verify_lens: Sequence[int]) -> Arrays:
    """Each request verifies its own number of tokens (both padded already)."""
    return of_lengths(verify_lens, [n + v for n, v in zip(seq_lens, verify_lens, strict=True)])


def draft(seq_lens: Sequence[int], step: int, bs: int | None = None) -> Arrays:
    """Draft step `step` (from 0): the prefix and the tokens drafted so far, this one included.

    Padded rows stand where the index kernel stores them, after all rows before them.
    """
    lens = [n + step + 1 for n in padded(seq_lens, bs)]
    return of_lengths([1] * len(lens), lens)


def extend(seq_lens: Sequence[int], extend_lens: Sequence[int]) -> Arrays:
    """`extend_lens` new queries over `seq_lens`, which count them already."""
    return of_lengths(extend_lens, seq_lens)
