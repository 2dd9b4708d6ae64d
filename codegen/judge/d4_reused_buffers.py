"""D4: pinned host arrays are overwritten each step while an asynchronous copy may read them.

In: 0.5.18 to 0.5.23 (`fast_plan_*_cpu`). They are handed to `copy_(..., non_blocking=True)`
in `fast_mla_prefill_plan` and, for eager draft-extend, to the stock plan, and filled again on
the next step. Harmless for MLA: what they are copied to (`_qo_indptr_buf`, `_kv_indptr_buf`,
`_kv_len_arr_buf`) is read by no FA2 or FA3 kernel. A note, for whoever adds a reader.

Told by: an attribute allocated with `pin_memory=True` that a method other than `__init__`
writes into.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..errors import Problem
from .case import Case
from .hostbuffers import host_buffers

CODE = "d4-reused-buffers"


def find(case: Case) -> Iterator[Problem]:
    """One note, at the first line that refills a pinned buffer."""
    writes = [
        (buffer.name, write)
        for buffer in host_buffers(case.source)
        if buffer.pinned
        for write in buffer.writes
    ]
    if not writes:
        return
    names = sorted({name for name, _ in writes})
    first = min((write for _, write in writes), key=case.source.line)
    yield case.note(
        first,
        CODE,
        f"{', '.join(names)} are refilled each step while a non_blocking copy of them may be "
        "pending; harmless, no FA2 or FA3 kernel reads the copies",
        "use plain CPU tensors and drop the copies, or a fresh tensor each step",
    )
