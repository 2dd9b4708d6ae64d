"""The file to patch in every shape that a disk holds: line ends, encodings, links, modes, races.

`patch` gives a file that Python reads and `check` finds clean, a second `patch` nothing, and
`unpatch` the bytes that were there: on the miniature in every shape, on a release in some.
"""

from __future__ import annotations

import ast
import os
import re
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mlagen.codegen import provenance
from tests.cli_workspace import FILE, ORIGINAL, files_below, git, patched, run, workspace
from tests.releases import flashinfer_source, sglang_file

FI = ("--flashinfer", "fi")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that the commands run in, with the miniatures."""
    return workspace(tmp_path, monkeypatch)


def crlf(data: bytes) -> bytes:
    return data.replace(b"\n", b"\r\n")


def bom(data: bytes) -> bytes:
    return b"\xef\xbb\xbf" + data


def tabs(data: bytes) -> bytes:
    return re.sub(rb"(?m)^(?: {4})+", lambda found: b"\t" * (len(found[0]) // 4), data)


def two_blanks(data: bytes) -> bytes:
    return re.sub(rb"(?m)^(?: {4})+", lambda found: b"  " * (len(found[0]) // 4), data)


def unended(data: bytes) -> bytes:
    return data.rstrip(b"\n")


def latin_1(data: bytes) -> bytes:
    """Bytes that are no UTF-8, in a docstring, in a kept comment and in a replaced line."""
    data = data.replace(b'"""', b'"""Caf\xe9. ', 1)
    data = data.replace(b"\n        if ", b"\n        # \xe4\xf6\xfc\xff\n        if ", 1)
    data = re.sub(rb"(\.plan = partial\(.*\))\n", b"\\1  # \xa7 \xe9\n", data, count=1)
    return b"# -*- coding: latin-1 -*-\n" + data


def utf_8(data: bytes) -> bytes:
    """Characters of two to four bytes, and separators that only str.splitlines takes for ends."""
    comment = "  # é 漢 \U0001f600 \u2028 \u0085 \x0b \x1c".encode()
    return re.sub(rb"(?m)^( +)(decode_wrapper=self\.\w+,)$", rb"\1\2" + comment, data)


def mixed(data: bytes) -> bytes:
    """The first lines end in CRLF."""
    return data.replace(b"\n", b"\r\n", 60)


def form_feeds(data: bytes) -> bytes:
    return data.replace(b"\nclass ", b"\n\x0c\nclass ")


def trailing_blanks(data: bytes) -> bytes:
    return re.sub(rb"(?m)([,:])$", rb"\1 \t", data)


def comment_at_the_end(data: bytes) -> bytes:
    return data + b"\n\n    \n# the end"


def script(data: bytes) -> bytes:
    return b"#!/usr/bin/env python3\n# vim: set fileencoding=utf-8 :\n" + data


SHAPES: tuple[tuple[Callable[[bytes], bytes], ...], ...] = (
    (),
    (crlf,),
    (bom,),
    (bom, crlf),
    (tabs,),
    (two_blanks,),
    (unended,),
    (unended, crlf),
    (unended, bom),
    (latin_1,),
    (latin_1, crlf, unended),
    (utf_8,),
    (utf_8, tabs),
    (mixed,),
    (form_feeds,),
    (trailing_blanks,),
    (comment_at_the_end,),
    (script,),
)


def shape_name(shape: tuple[Callable[[bytes], bytes], ...]) -> str:
    return "-".join(change.__name__ for change in shape) or "plain"


def there_and_back(here: Path, data: bytes, *flashinfer: str) -> bytes:
    """Patch, check, patch again, take out; gives the patched bytes."""
    place = here / FILE
    place.write_bytes(data)
    before = files_below(here)
    outcome = run("patch", FILE, *flashinfer)
    assert (outcome.code, outcome.err) == (0, "")
    made = place.read_bytes()
    assert made != data
    ast.parse(made)
    assert run("check", FILE, *flashinfer).code == 0
    assert "nothing to do" in run("patch", FILE, *flashinfer).text
    assert place.read_bytes() == made
    assert run("unpatch", FILE).code == 0
    assert files_below(here) == before
    return made


@pytest.mark.parametrize("shape", SHAPES, ids=shape_name)
def test_every_shape_there_and_back(
    shape: tuple[Callable[[bytes], bytes], ...], here: Path
) -> None:
    data = ORIGINAL
    for change in shape:
        data = change(data)
        assert change is unended or data != ORIGINAL
    made = there_and_back(here, data, *FI)

    assert made.startswith(b"\xef\xbb\xbf") == (bom in shape)
    if crlf in shape:
        assert made.count(b"\n") == made.count(b"\r\n")
    elif mixed not in shape:
        assert b"\r" not in made
    if tabs in shape:
        # A region stands where its place stands; what it holds may step in by four blanks.
        assert b"\n\t\t# >>> mlagen " in made
        assert not re.search(rb"(?m)^ +(# >>> |# \||# <<< )", made)
    if latin_1 in shape or script in shape:
        assert b"coding" in b"".join(made.splitlines()[:2])


@pytest.mark.parametrize("shape", [(), (crlf, unended), (bom, tabs), (latin_1,)], ids=shape_name)
def test_a_release_there_and_back(shape: tuple[Callable[[bytes], bytes], ...], here: Path) -> None:
    data = sglang_file("0.5.17")
    flashinfer_source("0.6.17")  # a fetch is told, and nothing else is to be
    for change in shape:
        data = change(data)
    made = there_and_back(here, data, "--flashinfer", "0.6.17")

    assert len(provenance.find_regions(made)) > 12


@pytest.mark.parametrize(
    "shape",
    [(crlf,), (bom, unended), (latin_1, crlf), (utf_8, tabs), (mixed,), (form_feeds, unended)],
    ids=shape_name,
)
def test_git_applies_the_diff_of_every_shape(
    shape: tuple[Callable[[bytes], bytes], ...], here: Path
) -> None:
    data = ORIGINAL
    for change in shape:
        data = change(data)
    (here / "repo").mkdir()
    git("init", "--quiet", cwd=here / "repo")
    place = here / "repo" / FILE
    place.write_bytes(data)
    diff = run("patch", place, *FI, "--diff").out
    git("apply", "-", cwd=place.parent, stdin=diff)
    made = place.read_bytes()
    git("apply", "-R", "-", cwd=place.parent, stdin=diff)
    back = place.read_bytes()
    run("patch", place, *FI)

    assert back == data
    assert place.read_bytes() == made != data
    git("apply", "-", cwd=place.parent, stdin=run("unpatch", place, "--diff").out)
    assert place.read_bytes() == data


def one_line(data: bytes, opening: bytes) -> bytes:
    """Every `opening` ... `)` that stands over several lines, on one."""
    pattern = rb"(" + opening + rb")\n((?: .*,\n)+) *(\)[:,]?)"
    return re.sub(
        pattern,
        lambda m: m[1] + b" ".join(m[2].split())[:-1] + m[3],
        data,
    )


@pytest.mark.parametrize(
    "opening", [rb"\.update\(", rb"def \w+\(", rb"\.call_begin_forward\(", rb"\.plan\("]
)
def test_calls_and_parameters_on_one_line(opening: bytes, here: Path) -> None:
    data = one_line(ORIGINAL, opening)
    assert data != ORIGINAL
    ast.parse(data)
    made = there_and_back(here, data, *FI)

    assert tree(made) == tree(patched())


def tree(source: bytes) -> str:
    """What `source` says, whatever its line breaks and the order of keyword arguments."""
    parsed = ast.parse(source)
    for node in ast.walk(parsed):
        if isinstance(node, ast.Call):
            node.keywords.sort(key=lambda keyword: keyword.arg or "")
    return ast.unparse(parsed)


def test_a_line_continued_by_a_backslash(here: Path) -> None:
    data = ORIGINAL.replace(b"seq_lens = forward", b"seq_lens = \\\n            forward", 1)
    assert data != ORIGINAL

    assert there_and_back(here, data, *FI).count(b"\\\n") == 1


def test_code_around_the_regions_may_change(here: Path) -> None:
    """A rebase moves SGLang's lines: the regions stay whole, and go."""
    new = b"LIMIT = 8\n\n\nclass FlashInferMLAMultiStepDraftBackend:"
    change = (b"class FlashInferMLAMultiStepDraftBackend:", new)
    (here / FILE).write_bytes(patched().replace(*change))

    assert run("check", FILE, *FI).code == 0
    assert "nothing to do" in run("patch", FILE, *FI).text
    assert run("unpatch", FILE).code == 0
    assert (here / FILE).read_bytes() == ORIGINAL.replace(*change)


def test_line_ends_changed_by_a_checkout(here: Path) -> None:
    """git with core.autocrlf writes CRLF: no edit, and out it goes."""
    (here / FILE).write_bytes(crlf(patched()))

    assert run("check", FILE, *FI).code == 0
    assert run("unpatch", FILE).code == 0
    assert (here / FILE).read_bytes() == crlf(ORIGINAL)


# --- links, modes, folders ----------------------------------------------------------------------


def test_a_symbolic_link_stays_one(here: Path) -> None:
    real = here / "elsewhere" / "real.py"
    real.parent.mkdir()
    (here / FILE).rename(real)
    (here / FILE).symlink_to("elsewhere/real.py")
    (here / "second.py").symlink_to(FILE)
    run("patch", "second.py", *FI)

    assert os.readlink(here / FILE) == "elsewhere/real.py"
    assert os.readlink(here / "second.py") == FILE
    assert not real.is_symlink()
    assert real.read_bytes() == patched()
    run("unpatch", FILE)
    assert (here / FILE).is_symlink()
    assert real.read_bytes() == ORIGINAL
    assert sorted(os.listdir(real.parent)) == ["real.py"]


def test_another_hard_link_keeps_the_old_bytes(here: Path) -> None:
    """Package installers link site-packages to their cache."""
    os.link(here / FILE, here / "cache.py")
    run("patch", FILE, *FI)

    assert (here / "cache.py").read_bytes() == ORIGINAL
    assert (here / FILE).read_bytes() == patched()
    assert (here / FILE).stat().st_nlink == (here / "cache.py").stat().st_nlink == 1


@pytest.mark.parametrize("mode", [0o640, 0o600, 0o755, 0o664])
def test_the_mode_is_kept(mode: int, here: Path) -> None:
    (here / FILE).chmod(mode)
    run("patch", FILE, *FI)
    patched_mode = stat.S_IMODE((here / FILE).stat().st_mode)
    run("unpatch", FILE)

    assert patched_mode == mode
    assert stat.S_IMODE((here / FILE).stat().st_mode) == mode


def test_a_folder_that_cannot_be_written(here: Path) -> None:
    folder = here / "folder"
    folder.mkdir()
    (folder / FILE).write_bytes(ORIGINAL)
    folder.chmod(0o555)
    try:
        outcome = run("patch", "folder", *FI)
        diff = run("patch", "folder", *FI, "--diff")
        elsewhere = run("patch", "folder", *FI, "--out", "made")
    finally:
        folder.chmod(0o755)

    assert (outcome.code, diff.code, elsewhere.code) == (2, 1, 0)
    assert ": read-only: " in outcome.err
    assert files_below(folder) == {FILE: ORIGINAL}
    assert (here / "made" / FILE).read_bytes() == patched()


def test_names_that_a_shell_would_mind(here: Path) -> None:
    place = here / "a b" / "näme 'x'.py"
    place.parent.mkdir()
    place.write_bytes(ORIGINAL)
    git("init", "--quiet", cwd=here / "a b")
    diff = run("patch", "a b/näme 'x'.py", *FI, "--diff").out
    git("apply", "-", cwd=here / "a b", stdin=diff)

    assert place.read_bytes() == patched()
    assert run("unpatch", place).code == 0
    assert place.read_bytes() == ORIGINAL


# --- two at once --------------------------------------------------------------------------------


def test_two_at_once(here: Path) -> None:
    """Each either patches, finds it done, or says that another was there; never a broken file."""
    before = files_below(here)
    command = [sys.executable, "-m", "mlagen", "patch", FILE, *FI]
    started = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=here)
        for _ in range(2)
    ]
    done = [(process, *process.communicate(timeout=60)) for process in started]

    codes = [process.returncode for process, _, _ in done]
    assert 0 in codes
    for process, _, errors in done:
        if process.returncode != 0:
            assert process.returncode == 2, errors
            assert b": changed-meanwhile: " in errors
    assert files_below(here) == before | {FILE: patched()}


def test_a_file_that_changes_meanwhile(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between reading and writing someone saves the file: their bytes stay."""
    from mlagen.codegen import publish

    theirs = ORIGINAL + b"# saved\n"
    stage = publish._lock

    def save_first(*arguments: object, **named: object) -> object:
        (here / FILE).write_bytes(theirs)
        return stage(*arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(publish, "_lock", save_first)
    outcome = run("patch", FILE, *FI)

    assert outcome.code == 2
    assert ": changed-meanwhile: " in outcome.err
    assert (here / FILE).read_bytes() == theirs
    assert [name for name in os.listdir(here) if name.startswith(".mlagen")] == []


# --- what a fork's pre-commit does ----------------------------------------------------------------


TOOLS = {
    "imports": ("check", "--select", "I,F401,F821", "--fix"),
    "format": ("format", "--line-length", "88"),
}


@pytest.mark.parametrize("tool", TOOLS)
def test_a_forks_pre_commit_leaves_the_regions_alone(tool: str, here: Path) -> None:
    """SGLang's has an import sorter and a formatter: a region that they change counts as edited."""
    run("patch", FILE, *FI)
    before = provenance.find_regions((here / FILE).read_bytes())
    ruff = [sys.executable, "-m", "ruff", *TOOLS[tool], "--isolated", FILE]
    subprocess.run(ruff, cwd=here, capture_output=True, check=False)
    after = provenance.find_regions((here / FILE).read_bytes())

    assert [region.emitted for region in after] == [region.emitted for region in before]
    assert run("check", FILE, *FI).code == 0
    assert run("unpatch", FILE).code == 0
