"""D6: host lengths reach the C++ planner without being made int32.

In: 0.4.3.post4 to 0.5.13 (wrong values: 0.4.4 always, 0.4.5 to 0.4.7 when the batch needs no
padding; later runners hold int32). `seq_lens_cpu` is int64 where it comes from `.cpu()` of the
batch. FlashInfer's FA2 planner checks from 0.6.0 on; its FA3 planner, in every release read
(to 0.7.2), casts the pointer unchecked and reads each length as two.

Told by: host lengths that no `.to(torch.int32)`, and no write into a buffer, casts on the way
to a hand-written plan.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..errors import Problem
from .case import Case

CODE = "d6-int64-lengths"


def find(case: Case) -> Iterator[Problem]:
    """Lengths that keep the dtype of whoever made seq_lens_cpu."""
    if not case.plans:
        return
    checked = case.api is not None and case.api.int32_checked
    for lengths in case.lengths:
        if lengths.cast:
            continue
        skipped = (
            "stock `plan` checks the dtype, a hand-written one goes past that check"
            if checked
            else "FlashInfer's FA3 planner does not look at the dtype"
        )
        yield case.problem(
            lengths.node,
            CODE,
            f"nothing makes seq_lens_cpu int32 on its way to the planner; {skipped} and reads "
            "each int64 length as two",
            "`.to(torch.int32)`; the plans of `mlagen patch` check and cast",
        )
