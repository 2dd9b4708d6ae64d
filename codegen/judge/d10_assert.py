"""D10: an assert on seq_lens_cpu in the serving loop.

In: decode replay from 0.4.4 on, verify replay from 0.5.18 on. A runner may pass no host
lengths (0.5.16 and later hand None on where a back end opted out; subclasses of this one do);
the assert then ends the server, where taking the lengths from the device once, or the stock
plan, would serve on.

Told by: `assert` with `seq_lens_cpu` in its test, in a method that runs at replay.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..errors import Problem
from .case import Case
from .lengths import HOST_LENGTHS
from .source import words

CODE = "d10-assert"


def find(case: Case) -> Iterator[Problem]:
    """Asserts on the host lengths."""
    for node in case.source.asserts:
        if case.source.ours(node) or not words(node.test) & set(HOST_LENGTHS):
            continue
        if "in_capture" in {name for test in case.source.tests(node) for name in words(test)}:
            continue
        yield case.problem(
            node,
            CODE,
            "absent host lengths end the server here",
            "take them from the device once, or plan with the stock plan; `mlagen patch` does",
        )
