"""What holds for all tests, in each process that runs some."""

from __future__ import annotations

import signal


def pytest_configure() -> None:
    """A shell without job control starts what it puts into the background deaf to Ctrl-C, and so
    are all that this starts: tests that send it would wait in vain."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
