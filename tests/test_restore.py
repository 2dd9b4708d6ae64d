"""Regions that are lost as a whole: the header's lists tell of them, and of nothing else.

The texts of the refusals are in test_cli_errors.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from mlagen.codegen import provenance
from mlagen.codegen.errors import EditedError
from mlagen.codegen.restore import original_of, unpatched
from tests.cli_workspace import FILE, ORIGINAL, disguised, patched, region, run, workspace

FI = ("--flashinfer", "fi")
REGIONS = provenance.find_regions(patched())
KEEPING = [found.site for found in REGIONS if found.replaced]
INSERTED = [found.site for found in REGIONS if not found.replaced and found.site != "header"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return workspace(tmp_path, monkeypatch)


def without(site: str, data: bytes | None = None) -> bytes:
    """A patched file that lost a region, marks included."""
    data = patched() if data is None else data
    return data.replace(region(site, data), b"")


def without_lists(data: bytes) -> bytes:
    """`data` with a header from before regions were listed."""
    lines = provenance.split_lines(data.decode())
    [header] = [found for found in provenance.find_regions(data) if found.site == "header"]
    emitted = [line for line in header.emitted if not re.match("# (inserts|replaces): ", line)]
    assert len(emitted) < len(header.emitted)
    built = provenance.build_region("header", "", emitted, [], "\n")
    lines[header.start_line - 1 : header.end_line] = built
    return "".join(lines).encode()


def test_the_header_lists_what_was_written() -> None:
    header = provenance.read_header(patched())
    assert header is not None
    assert header.inserts == ("header", *INSERTED)
    assert list(header.replaces) == KEEPING
    assert KEEPING == ["capture-decode", "replay-decode"]


def test_a_whole_file_is_restored() -> None:
    assert original_of(patched(), FILE) == unpatched(patched(), FILE) == ORIGINAL
    assert original_of(ORIGINAL, FILE) == unpatched(ORIGINAL, FILE) == ORIGINAL


@disguised
@pytest.mark.parametrize("site", KEEPING)
def test_each_region_that_kept_lines_is_missed(
    site: str, disguise: Callable[[bytes], bytes]
) -> None:
    data = disguise(patched())
    assert unpatched(data, FILE) == disguise(ORIGINAL)
    for restore in (original_of, unpatched):
        with pytest.raises(EditedError, match=f"'{site}', which the header lists, is not in"):
            restore(disguise(without(site)), FILE)


@pytest.mark.parametrize("site", INSERTED)
def test_one_that_kept_none_is_put_back(site: str, here: Path) -> None:
    """Nothing of SGLang's went with it, and `patch` reads the file that it puts it into."""
    (here / FILE).write_bytes(without(site))
    assert run("unpatch", FILE).code == 5
    assert run("check", FILE, *FI).code == 1
    assert run("patch", FILE, *FI).code == 0
    assert (here / FILE).read_bytes() == patched()
    assert run("unpatch", FILE).code == 0
    assert (here / FILE).read_bytes() == ORIGINAL


def test_what_a_fork_changes_outside_of_the_regions_is_its_own(here: Path) -> None:
    """A rebase moves and changes SGLang's lines around the regions; none of that is an error."""
    lines = patched().replace(b"A back end, in", b"Our back end, in").splitlines(keepends=True)
    (here / FILE).write_bytes(b"".join([*lines, b"\n\n", b"OURS = 1\n"]))
    assert run("check", FILE, *FI).code == 0
    assert run("patch", FILE, *FI, "--check").code == 0
    assert run("unpatch", FILE).code == 0
    expected = ORIGINAL.replace(b"A back end, in", b"Our back end, in") + b"\n\nOURS = 1\n"
    assert (here / FILE).read_bytes() == expected


def test_another_choice_of_variants_starts_from_the_same_original(here: Path) -> None:
    for only in (("--only", "decode"), (), ("--only", "verify")):
        assert run("patch", FILE, *FI, *only).code == 0
        assert unpatched((here / FILE).read_bytes(), FILE) == ORIGINAL
    assert run("unpatch", FILE).code == 0
    assert (here / FILE).read_bytes() == ORIGINAL


def test_a_header_from_before_the_lists_tells_of_nothing(here: Path) -> None:
    (here / FILE).write_bytes(without_lists(patched()))
    assert run("check", FILE, *FI).code == 1
    assert run("unpatch", FILE).code == 0
    assert (here / FILE).read_bytes() == ORIGINAL
    lost = without_lists(without("replay-decode"))
    (here / FILE).write_bytes(lost)
    assert run("unpatch", FILE).code == 0
    assert (here / FILE).read_bytes() == provenance.remove_regions(lost)


def test_lists_of_a_header_that_was_edited_are_not_believed() -> None:
    data = patched().replace(b"# replaces: ", b"# replaces: nothing, ")
    with pytest.raises(EditedError, match="the lines between the marks of 'header'"):
        unpatched(data, FILE)
