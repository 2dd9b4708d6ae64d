"""The host lengths of a verify are those of an earlier step (0.4.4).

In: 0.4.4. The batch fills `decode_seq_lens` for decode and idle only; at verify the runner
hands on its own buffer, last filled by something else, and not None. Stock 0.4.4 plans verify
from the device and is right; a verify plan from host lengths would be wrong in silence, so
mlagen refuses verify there.

Told by: the multi-step back end reads `decode_seq_lens_cpu`, the attribute that only this
release has. A note, unless the file makes verify arrays from host lengths.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..errors import Problem
from .case import Case

CODE = "stale-verify-lengths"


def find(case: Case) -> Iterator[Problem]:
    """One finding where host lengths are kept for decode only."""
    source = case.source
    reads = [node for node in source.attributes if node.attr == "decode_seq_lens_cpu"]
    reads = sorted((node for node in reads if not source.ours(node)), key=source.line)
    if not reads:
        return
    for lengths in case.lengths:
        if "verify" in lengths.modes:
            yield case.problem(
                lengths.node,
                CODE,
                "verify is planned from host lengths that this SGLang fills for decode only "
                f"(`decode_seq_lens_cpu`, line {source.line(reads[0])}): they are stale",
                "plan verify from the device here",
            )
            return
    yield case.note(
        reads[0],
        CODE,
        "this SGLang keeps host lengths for decode only; at verify they are stale, so verify "
        "must stay on the stock plan, as it is here",
        "use a release from 0.4.5 on for a host-planned verify",
    )
