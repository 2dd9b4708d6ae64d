"""The original of a patched file: what `unpatch` writes and `patch` starts from.

A region keeps the lines of SGLang that it stands for. Where one is lost as a whole, marks included
(a merge that was resolved so, a file that was cut off), no mark tells of it, and the rest would
restore to a file that lacks those lines. So the header lists all regions, and which of them keep
lines. It is a list, no digest of the file: what a fork changes outside of the regions, in a rebase
for one, stays the fork's own business.
"""

from __future__ import annotations

from .errors import EditedError, Problem
from .provenance import HEADER_SITE, Region, find_regions, listed_regions, remove_regions

#: What to do about a lost region that cannot be put back.
HINT = (
    "take the file from version control or reinstall the package, then patch again; if these lines "
    "were meant to go: `mlagen unpatch` the file as it was, take them out of that, then patch it"
)


def original_of(data: bytes, path: str) -> bytes:
    """`data` as it was before it was patched, to patch it again; the same bytes where it was not.

    Raises EditedError as `refuse_lost_lines` and `provenance.remove_regions` do.
    """
    refuse_lost_lines(data, path)
    return remove_regions(data, path=path)


def unpatched(data: bytes, path: str) -> bytes:
    """`data` as it was before it was patched, to be left so.

    Stricter than `original_of`: nothing looks at this text again, and what else went with a region
    that is lost, in a file that was cut off for one, no one can tell.

    Raises EditedError for any region that is lost, or as `provenance.remove_regions` does.
    """
    refuse_lost_lines(data, path)
    if problem := lost_insertions(data, path):
        raise EditedError(problem)
    return remove_regions(data, path=path)


def refuse_lost_lines(data: bytes, path: str) -> None:
    """Raise EditedError for a patched file that lacks a region with lines of SGLang's own, or its
    header, without which that cannot be told."""
    regions = find_regions(data, path=path)
    header = _header(regions)
    if header is None:
        if regions:
            raise EditedError(_without_header(regions[0], path))
        return
    lost = _lost(regions, listed_regions(header)[1])
    if lost:
        what = "; SGLang's own lines that were kept there are gone with "
        what += "it" if len(lost) == 1 else "them"
        raise EditedError(_lost_regions(header, lost, path, what, HINT))


def lost_insertions(data: bytes, path: str) -> Problem | None:
    """The problem to report for regions that are lost and kept nothing: `patch` puts them back."""
    regions = find_regions(data, path=path)
    header = _header(regions)
    lost = _lost(regions, listed_regions(header)[0]) if header is not None else []
    if header is None or not lost:
        return None
    what = "; what else is gone with " + ("it" if len(lost) == 1 else "them") + " cannot be told"
    hint = "run `mlagen patch`, which puts back what is lost or says why it cannot, then this again"
    return _lost_regions(header, lost, path, what, hint)


def _header(regions: tuple[Region, ...]) -> Region | None:
    return next((region for region in regions if region.site == HEADER_SITE), None)


def _lost(regions: tuple[Region, ...], listed: tuple[str, ...]) -> list[str]:
    there = {region.site for region in regions}
    return [site for site in listed if site not in there]


def _without_header(first: Region, path: str) -> Problem:
    message = (
        f"region {HEADER_SITE!r} is not in the file, although others of mlagen are: whether more "
        "of them are lost cannot be told without it"
    )
    return Problem(path, first.start_line, 0, "lost-region", message, HINT)


def _lost_regions(header: Region, lost: list[str], path: str, what: str, hint: str) -> Problem:
    names = ", ".join(map(repr, lost))
    if len(lost) == 1:
        message = f"region {names}, which the header lists, is not in the file{what}"
    else:
        message = f"regions {names}, which the header lists, are not in the file{what}"
    return Problem(path, header.start_line, 0, "lost-region", message, hint)
