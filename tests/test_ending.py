"""How a run ends that was not to end so: Ctrl-C, whenever it comes.

Where it matters what Python and libcst make of the signal, mlagen runs in a process of its own.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from mlagen.codegen import commands
from mlagen.codegen.ending import INTERRUPTED, was_interrupted
from mlagen.codegen.errors import usage
from tests.cli_workspace import FILE, ORIGINAL, Outcome, files_below, patched, run, workspace

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
