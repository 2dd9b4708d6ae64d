"""`python -m mlagen` is `mlagen`."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from types import FrameType

#: codegen/ending.py's; that may not be imported yet.
INTERRUPTED = 130

_came: list[int] = []


def main() -> None:
    """Entry point of both. Imports take most of a short command: Ctrl-C may come in them too, and
    what they are in the midst of may make another error of it."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _note)
    try:
        from mlagen.cli import main as run

        run()
    except BaseException as error:
        if not _came and not isinstance(error, KeyboardInterrupt):
            # All is done and told. Python's own end would die of a Ctrl-C.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            raise
        if not isinstance(error, SystemExit) or error.code != INTERRUPTED:
            sys.stderr.write("mlagen: interrupted\n")
        _exit_interrupted()


def _note(number: int, frame: FrameType | None) -> None:
    _came.append(number)
    raise KeyboardInterrupt


def _exit_interrupted() -> None:
    """At once: where Ctrl-C has struck inside `exec`, of which every dataclass is made, Python
    remembers that, and ends by the signal whatever exit code it is told."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    main()
