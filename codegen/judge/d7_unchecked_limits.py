"""D7: a hand-written plan skips the limits that FlashInfer's own plan checks.

In: every hand-written plan so far (0.4.3.post4 to 0.5.23).
- Heads that do not divide the tile of 64 (128 with clusters of 2): the planner rounds the
  causal end of a tile up, the kernel down, and a visible key is lost where it starts a KV
  tile. Stock `plan` of FlashInfer 0.7 refuses. 8, 16, 32, 64 and 128 heads are safe.
- More than 16384 work items (16385 requests): up to 0.6.18 written past the arrays.

Told by: no `% heads` and no bound in the function. A note: with the usual heads and batches
it cannot happen.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ..errors import Problem
from .case import Case
from .plans import HandPlan
from .source import words

CODE = "d7-unchecked-limits"
_MAX_WORK_ITEMS = 16384


def find(case: Case) -> Iterator[Problem]:
    """One note for each plan that lacks a check."""
    for plan in case.plans:
        lacking = []
        if not _checks_heads(plan):
            lacking.append("that the heads divide the tile (64, or 128 with clusters of 2)")
        if not _checks_items(plan):
            lacking.append(f"that at most {_MAX_WORK_ITEMS} work items are planned")
        if lacking:
            yield case.note(
                plan.node,
                CODE,
                f"`{plan.name}` does not check {' nor '.join(lacking)}; stock `plan` of "
                "FlashInfer 0.7 does",
                "safe with 8, 16, 32, 64 or 128 heads a rank; `mlagen patch` checks at capture",
            )


def _checks_heads(plan: HandPlan) -> bool:
    return any(
        isinstance(part, ast.BinOp)
        and isinstance(part.op, ast.Mod)
        and any("head" in name for name in words(part))
        for part in ast.walk(plan.node)
    )


def _checks_items(plan: HandPlan) -> bool:
    return any(
        isinstance(part, ast.Compare)
        and (
            any(
                isinstance(leaf, ast.Constant) and leaf.value == _MAX_WORK_ITEMS
                for leaf in ast.walk(part)
            )
            or any("WORK" in name.upper() for name in words(part))
        )
        for part in ast.walk(plan.node)
    )
