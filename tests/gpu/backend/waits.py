"""Counts where the host waits for the GPU.

PyTorch warns of each operation of its own that synchronises (copies to the host, `item`, pageable
copies to the device). It does not see events, streams and devices that are waited for by name, so
these are counted beside; what C++ code of others waits for is seen by neither. For that there is
`stays_busy`: work that lies before the block must not be over behind it.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch

_BY_NAME = (
    (torch.cuda.Event, "synchronize"),
    (torch.cuda.Stream, "synchronize"),
    (torch.cuda, "synchronize"),
)


@dataclass
class Waits:
    """What a `counted` block waited for; `len(waits.places)` is the count."""

    places: list[str] = field(default_factory=list)

    @property
    def count(self) -> int:
        return len(self.places)


@contextlib.contextmanager
def counted() -> Iterator[Waits]:
    """Counts the waits of the block."""
    waits = Waits()
    with contextlib.ExitStack() as stack:
        caught = stack.enter_context(warnings.catch_warnings(record=True))
        warnings.simplefilter("always")
        for owner, name in _BY_NAME:
            stack.enter_context(mock.patch.object(owner, name, _logging(owner, name, waits)))
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield waits
        finally:
            torch.cuda.set_sync_debug_mode("default")
        waits.places += [
            f"{warning.filename}:{warning.lineno}"
            for warning in caught
            if "synchronizing CUDA operation" in str(warning.message)
        ]


def _logging(owner: Any, name: str, waits: Waits) -> Callable[..., Any]:
    original = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        waits.places.append(f"{owner.__name__}.{name}")
        return original(*args, **kwargs)

    return call


def stays_busy(block: Callable[[], None]) -> bool:
    """Whether work queued before the block (some 100 ms) was still running behind it.

    Asked up to three times: a host that is busy itself may be late once, and what waits for the
    GPU is late each time. So the block may run again, and must start afresh.
    """
    return any(_outlasted(block) for _ in range(3))


def _outlasted(block: Callable[[], None]) -> bool:
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)
    ended = torch.cuda.Event()
    ended.record()
    block()
    busy = not ended.query()
    torch.cuda.synchronize()
    return busy
