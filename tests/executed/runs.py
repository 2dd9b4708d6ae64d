"""What patched files and the releases' own are both run through."""

from __future__ import annotations

from collections.abc import Sequence

# One of each structure: capture and replay methods; one method for both; verify keyed by a layout;
# host-planned verify upstream; FlashInfer 0.7.
RELEASES = ("0.5.10", "0.5.13", "0.5.17", "0.5.18", "0.5.23")
OLDER = ("0.4.5", "0.4.10", "0.5.1")
STEPS = 4  # three draft steps need attention
NDT = 3

# Batches that are replayed one after the other in one graph of 4 rows.
BATCHES: Sequence[Sequence[int]] = ([10, 20, 30, 40], [11, 21, 31], [1], [33, 2, 7, 50], [12, 22])


def plus(lens: Sequence[int], more: int) -> list[int]:
    """Lengths with `more` tokens each."""
    return [n + more for n in lens]
