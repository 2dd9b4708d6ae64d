"""How a run ends that was not to end so: Ctrl-C, whenever it comes, and what the system refuses.

Where it matters what Python and libcst make of the signal, mlagen runs in a process of its own.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mlagen.codegen import commands
from mlagen.codegen.ending import INTERRUPTED, was_interrupted
from mlagen.codegen.errors import usage
from mlagen.codegen.plugin import GROUP, REGISTRY_FILE
from mlagen.codegen.spec import shipped_spec
from tests.cli_workspace import (
    FILE,
    IN_PACKAGE,
    ORIGINAL,
    Outcome,
    files_below,
    patched,
    run,
    workspace,
)

TOLD = "mlagen: interrupted\n"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return workspace(tmp_path, monkeypatch)


def interrupt() -> None:
    raise KeyboardInterrupt


def in_a_finally() -> None:
    """As libcst's position provider."""
    try:
        interrupt()
    finally:
        {}["a node whose end was never noted"]


def as_a_refusal() -> None:
    """What takes any trouble of a library for a fault of the file."""
    try:
        in_a_finally()
    except KeyError:
        raise usage("not a file that can be read") from None


@pytest.mark.parametrize("how", [interrupt, in_a_finally, as_a_refusal])
def test_whatever_becomes_of_it(here: Path, monkeypatch: pytest.MonkeyPatch, how: object) -> None:
    monkeypatch.setattr(commands, "check", lambda *_: how())  # type: ignore[operator]
    outcome = run("check", FILE)

    assert (outcome.code, outcome.out) == (INTERRUPTED, b"")
    assert outcome.err.endswith(TOLD)
    assert outcome.err.count("\n") == (1 if how is not as_a_refusal else 2)


def test_an_error_that_comes_from_no_interrupt() -> None:
    first, second = ValueError(), KeyError()
    first.__context__, second.__cause__ = second, first  # a circle, as __context__ may be
    assert not was_interrupted(first)
    first.__cause__ = KeyboardInterrupt()
    assert was_interrupted(second)


CHILD = """
import signal, sys

def strike():
    # Inside exec, as where a dataclass is made: Python remembers such an interrupt.
    exec("signal.raise_signal(signal.SIGINT)", {"signal": signal})

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == WHERE:
            strike()

def in_libcst(name):
    import libcst
    method = getattr(libcst, name)._codegen_impl
    def codegen(self, *given, **named):
        strike()
        return method(self, *given, **named)
    getattr(libcst, name)._codegen_impl = codegen

def in_another_error():
    import click
    class Group(click.Group):
        def main(self, *given, **named):
            try:
                strike()
            except KeyboardInterrupt:
                pass
            raise SyntaxError("of a module that could not import unicodedata")
    click.Group = Group

WHERE = sys.argv.pop(1)
if WHERE == "another error":
    in_another_error()
elif WHERE.startswith("libcst."):
    in_libcst(WHERE.partition(".")[2])
else:
    sys.meta_path.insert(0, Finder())
from mlagen.__main__ import main
main()
"""


def struck(where: str, *arguments: str, cwd: Path) -> Outcome:
    """Run mlagen in a process that sends itself SIGINT: as a module is imported, as libcst writes
    a node of a kind, or where another error is made of it."""
    done = subprocess.run(
        [sys.executable, "-c", CHILD, where, *arguments], cwd=cwd, capture_output=True, check=False
    )
    return Outcome(done.returncode, done.stdout, done.stderr.decode())


PATCH = ("patch", FILE, "--flashinfer", "fi", "--no-test")


@pytest.mark.parametrize(
    "where",
    [
        *("mlagen.cli", "click", "mlagen.codegen.commands", "mlagen.codegen.patch", "libcst"),
        *("libcst.If", "libcst.IndentedBlock", "libcst.Comparison", "another error"),
    ],
)
def test_one_line_and_nothing_written(here: Path, where: str) -> None:
    before = files_below(here)
    assert struck(where, *PATCH, cwd=here) == Outcome(INTERRUPTED, b"", TOLD)
    assert files_below(here) == before


def test_without_it_the_same_process_patches(here: Path) -> None:
    assert (struck("nothing", *PATCH, cwd=here)).code == 0
    assert (here / FILE).read_bytes() == patched() != ORIGINAL


# --- what the system refuses ------------------------------------------------------------------

NO_RIGHT = (errno.EACCES, os.strerror(errno.EACCES))
FULL = Path("/dev/full")


@pytest.fixture
def shut(here: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is not for whoever runs the tests, root too: nothing in it can be looked at."""
    for name in (IN_PACKAGE, "flashinfer/mla/__init__.py", "variants.yaml"):
        place = here / "shut" / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(ORIGINAL)
    (here / "env" / "sglang" / REGISTRY_FILE).parent.mkdir(parents=True)
    (here / "env" / "sglang" / REGISTRY_FILE).write_text(f"{GROUP}\ndef load_plugins(): ...\n")
    (here / "env" / IN_PACKAGE).parent.mkdir(parents=True)
    shutil.copy(here / FILE, here / "env" / IN_PACKAGE)

    def keep_out(name: str) -> None:
        real = getattr(os, name)

        def call(path: object, *given: object, **named: object) -> object:
            if isinstance(path, str | os.PathLike) and "shut/" in os.fspath(path):
                raise PermissionError(*NO_RIGHT, os.fspath(path))
            return real(path, *given, **named)

        monkeypatch.setattr(os, name, call)

    for name in ("stat", "lstat", "open", "mkdir"):
        keep_out(name)
    return here / "shut"


@pytest.mark.parametrize(
    ("command", "named"),
    [
        ("check shut --flashinfer fi", "shut"),
        ("unpatch shut", "shut"),
        ("inspect shut --flashinfer fi", "shut"),
        ("patch shut --flashinfer fi --diff", "shut"),
        (f"check shut/{IN_PACKAGE} --flashinfer fi", f"shut/{IN_PACKAGE}"),
        (f"check {FILE} --flashinfer shut", "shut"),
        (f"check {FILE} --flashinfer shut/a.whl", "shut/a.whl"),
        ("inspect --flashinfer shut", "shut"),
        (f"check {FILE} --flashinfer fi --spec shut/variants.yaml", "shut/variants.yaml"),
        (f"upgrade {FILE} --flashinfer fi --spec shut/variants.yaml", "shut/variants.yaml"),
        ("render shut/variants.yaml --flashinfer fi", "shut/variants.yaml"),
        ("plugin env --flashinfer fi --out shut/x", "shut/x"),
        (f"patch {FILE} --flashinfer fi --out shut/x", "shut/x"),
    ],
)
def test_a_folder_that_may_not_be_looked_into(shut: Path, command: str, named: str) -> None:
    outcome = run(*command.split())

    assert (outcome.code, outcome.out) == (2, b"")
    told = outcome.err.replace(f"{shut.parent}/", "")
    assert told.startswith(f"{named}: "), outcome.err
    assert "Permission denied" in told.splitlines()[0]


def test_what_nobody_thought_of_names_path_and_reason(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(*NO_RIGHT, b"some/where")

    monkeypatch.setattr(commands, "check", refuse)
    text, as_json = run("check", FILE), run("check", FILE, "--json")

    said = "some/where: system: cannot be read or written: Permission denied"
    assert (text.code, text.out) == (2, b"")
    assert text.err == f"{said}\n    hint: run as a user who may use it\n"
    assert (as_json.code, as_json.json["problems"][0]["path"]) == (2, "some/where")


def test_a_reader_that_went_away_is_no_refusal(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))

    monkeypatch.setattr(commands, "check", refuse)
    assert (run("check", FILE).code, run("check", FILE).err) == (1, "")


def onto_a_full_disk(
    *arguments: str, cwd: Path, stream: str = "stdout", unbuffered: str = ""
) -> Outcome:
    """Run mlagen with a stream that takes nothing."""
    if not FULL.exists():
        pytest.skip("there is no /dev/full here")
    with FULL.open("wb") as full:
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | {stream: full}
        done = subprocess.run(
            [sys.executable, "-m", "mlagen", *arguments],
            cwd=cwd,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
            check=False,
            **streams,
        )
    return Outcome(done.returncode, done.stdout or b"", (done.stderr or b"").decode())


@pytest.mark.parametrize(
    "command",
    [
        *(f"check {FILE} --flashinfer fi --json", f"patch {FILE} --flashinfer fi --diff"),
        *("unpatch nowhere --json", "schema", "--help", "check --help", "--version"),
    ],
)
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_an_answer_that_cannot_be_written(here: Path, command: str, unbuffered: str) -> None:
    outcome = onto_a_full_disk(*command.split(), cwd=here, unbuffered=unbuffered)

    assert outcome.code == 2
    said = f"stdout: not-written: the answer cannot be written: {os.strerror(errno.ENOSPC)}"
    assert said in outcome.err
    assert "Traceback" not in outcome.err
    assert "Exception ignored" not in outcome.err


@pytest.mark.parametrize(
    ("command", "code"),
    [
        *((f"patch {FILE} --flashinfer fi --diff", 1), (f"check {FILE} --flashinfer fi", 1)),
        *(("unpatch nowhere", 2), ("patch", 2), (f"unpatch {FILE}", 0)),
    ],
)
def test_progress_that_cannot_be_written_changes_nothing(
    here: Path, command: str, code: int
) -> None:
    outcome = onto_a_full_disk(*command.split(), cwd=here, stream="stderr")

    assert outcome.code == code
    assert outcome.out == run(*command.split()).out


@pytest.mark.parametrize(
    "command",
    [
        "patch {0}/kept.py --flashinfer {0}/fi --out x",
        "plugin {0}/env --flashinfer {0}/fi --out x",
        "render {0}/variants.yaml --flashinfer {0}/fi --out x",
        "matrix",
        "inspect",
        "unpatch .",
    ],
)
def test_a_working_folder_that_is_gone(
    shut: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    here = shut.parent
    shutil.copy(shipped_spec(), here / "variants.yaml")
    (here / FILE).rename(here / "kept.py")
    gone = here / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    monkeypatch.setenv("PWD", str(gone))
    gone.rmdir()
    outcome = run(*command.format(here).split(), "--json")

    assert outcome.code == 2
    (problem,) = json.loads(outcome.out)["problems"]
    if command != "inspect" and not command.startswith(("render", "unpatch")):
        assert problem["path"] == str(gone)
        assert problem["code"] == "no-folder"
