"""D8: padded rows of the DFLASH fast path have other lengths on the host than on the device.

In: 0.5.19 to 0.5.23. The helper that makes the host arrays for DFLASH verify takes
`seq_lens_cpu` as it is: right for real rows, whose value holds the verify window already. A
padded row holds 1 on the host and 1 + draft_token_num on the device, so its kv_len is below
its qo_len. Real rows stand before the padded ones and are not touched: a note.

Told by: a function that is left early for every input but DFLASH's and makes a dict of host
lengths to which nothing is added.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ..errors import Problem
from .case import Case, tells_dflash_apart

CODE = "d8-dflash-padding"


def find(case: Case) -> Iterator[Problem]:
    """DFLASH host lengths that pass padding on."""
    for lengths in case.lengths:
        if lengths.adds or not isinstance(lengths.function, ast.FunctionDef):
            continue
        if not isinstance(lengths.binding, ast.Dict) or not _for_dflash_only(lengths.function):
            continue
        yield case.note(
            lengths.node,
            CODE,
            "a padded row keeps its fill value here, while the device adds draft_token_num to "
            "it: its kv_len is then below its qo_len. Real rows are right",
            "add draft_token_num to rows beyond the real batch",
        )


def _for_dflash_only(function: ast.FunctionDef) -> bool:
    return any(
        isinstance(part, ast.If)
        and tells_dflash_apart([part.test])
        and any(isinstance(step, ast.Return) for step in part.body)
        for part in function.body
    )
