"""How a run ends that was not to end so: one line, and an exit code that means nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from .report import Printer

#: As shells count: 128 and the signal's number. click's own is 1, which here means "would change".
INTERRUPTED: Final = 130


@contextmanager
def told() -> Iterator[None]:
    """End what runs inside with `INTERRUPTED` where Ctrl-C broke it off."""
    try:
        yield
    except BaseException as error:
        if was_interrupted(error):
            Printer().progress("mlagen: interrupted")
            raise SystemExit(INTERRUPTED) from None
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
