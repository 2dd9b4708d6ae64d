"""How a run ends that was not to end so: in a few words, with an exit code of its own."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from .errors import MlagenError, refused_by_system
from .report import Printer, flush_or_drop, unanswered

#: As shells count: 128 and the signal's number. click's own is 1, which here means "would change".
INTERRUPTED: Final = 130


@contextmanager
def told() -> Iterator[None]:
    """End what runs inside with `INTERRUPTED` where Ctrl-C broke it off, and as a usage error where
    the system refused something that nobody nearer to it caught. A reader that went away (EPIPE)
    is click's."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, SystemExit) and error.code == INTERRUPTED:
            raise  # told, further in
        if was_interrupted(error):
            Printer().progress("mlagen: interrupted")
            raise SystemExit(INTERRUPTED) from None
        if isinstance(error, OSError) and error.errno != errno.EPIPE:
            # A stream has no name here, and is there: click could not write, as for --help.
            stream = error.filename is None and error.errno != errno.ENOENT
            error = unanswered(error) if stream else refused_by_system(error)
        if isinstance(error, MlagenError):
            flush_or_drop()
            Printer().progress("\n".join(str(problem) for problem in error.problems))
            raise SystemExit(error.exit_code) from None
        raise


def was_interrupted(error: BaseException) -> bool:
    """Whether Ctrl-C is what an error comes from.

    A `finally` that an interrupt runs through may fail in its turn: libcst's, which note where a
    node ends, raise KeyError then.
    """
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        current = pending.pop()
        if current is None or id(current) in seen:
            continue
        if isinstance(current, KeyboardInterrupt):
            return True
        seen.add(id(current))
        pending += [current.__cause__, current.__context__]
    return False
