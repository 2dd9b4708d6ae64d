"""D3: the verify window is added twice for DFLASH, and ragged layouts get uniform arrays.

In: 0.5.18 (fixed in 0.5.19). A DFLASH or DSPARK verify already carries
`seq_lens_cpu = prefix + block`; the host arrays add `draft_token_num` again, so kv_len and
kv_indptr no longer match the packed kv_indices. A ragged verify layout has its own number of
tokens a request, and gets the uniform `arange` all the same.

Told by: verify host lengths with something added, and a fast plan put on verify wrappers, that
no test on the kind of input (`spec_input_type`, a ragged layout) keeps from DFLASH inputs, in
a file that knows ragged layouts or DFLASH at all.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..errors import Problem
from .case import Case, tells_dflash_apart

CODE = "d3-verify-twice"
_HINT = "leave DFLASH and ragged layouts on the stock plan; `mlagen patch` does"


def find(case: Case) -> Iterator[Problem]:
    """Verify arrays and installations that also reach DFLASH inputs."""
    if not _knows_dflash(case):
        return
    for lengths in case.lengths:
        if "verify" in lengths.modes and lengths.adds and not tells_dflash_apart(lengths.guards):
            yield case.problem(
                lengths.node,
                CODE,
                f"the verify lengths add {', '.join(sorted(lengths.adds))} for every input; "
                "DFLASH inputs carry it in seq_lens_cpu already, and a ragged layout has "
                "lengths of its own",
                _HINT,
            )
    for plan in case.plans:
        for install in plan.installs:
            if install.ours or "verify" not in case.source.modes(install.node):
                continue
            if not tells_dflash_apart(case.source.tests(install.node)):
                yield case.problem(
                    install.node,
                    CODE,
                    f"`{plan.name}` is put on the verify wrapper of every input, DFLASH and "
                    "ragged layouts too",
                    _HINT,
                )


def _knows_dflash(case: Case) -> bool:
    return case.mentions("ragged_verify_layout", "DFLASH_VERIFY")
