"""D2: step i of the draft chain is planned with seq_lens instead of seq_lens + i + 1.

In: 0.4.4 to 0.5.23, with two or more draft steps. The index kernel
(`generate_draft_decode_kv_indices`) lays out request b of step i with seq_len + i + 1 entries,
at an offset of b * (i + 1) more than the prefix sums, and hands that indptr on in
`spec_info.kv_indptr`. Graph replay plans with host arrays made of `seq_lens_cpu` alone;
eager draft steps do not pass `spec_info` to the decode updater at all. So each request misses
its newest tokens and, from the second on, reads entries of its neighbour. Verify still
rejects what is wrong, so the output is right and the acceptance falls with the batch index.
Measured: 62 of 64 rows differ at step 0.

Told by: a multi-step back end that fills `spec_info.kv_indptr`, and decode host lengths to
which nothing is added (replay), or a decode update without `spec_info` (eager).
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ..errors import Problem
from .case import Case
from .source import keyword

CODE = "d2-draft-lengths"
_HINT = "plan step i with seq_lens + i + 1; `mlagen patch` does (variant draft-decode)"


def find(case: Case) -> Iterator[Problem]:
    """Where draft steps are planned as if they were a plain decode."""
    if not _drives_draft_steps(case):
        return
    decode = [lengths for lengths in case.lengths if "decode" in lengths.modes]
    # A fork may make the steps' arrays where it drives the steps.
    if not any(lengths.adds and "verify" not in lengths.modes for lengths in case.lengths):
        for lengths in decode:
            yield case.problem(
                lengths.node,
                CODE,
                "replay of a draft step plans with seq_lens; its kv_indices are laid out for "
                "seq_lens + i + 1 (`spec_info.kv_indptr`), so its newest tokens are left out "
                "and, from the second request on, the window is shifted into the neighbour",
                _HINT,
            )
    for call in case.source.calls:
        if _eager_decode_update(case, call):
            yield case.problem(
                call,
                CODE,
                "an eager draft step is planned as a plain decode: `spec_info`, which holds "
                "the step's own kv_indptr and kv_indices, is not handed on",
                _HINT,
            )


def _drives_draft_steps(case: Case) -> bool:
    source = case.source
    return any(
        node.attr == "kv_indptr"
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Attribute)
        and node.value.attr == "spec_info"
        for node in source.attributes
    ) and any("generate_draft_decode_kv_indices" in node.attr for node in source.attributes)


def _eager_decode_update(case: Case, call: ast.Call) -> bool:
    source = case.source
    if not (isinstance(call.func, ast.Attribute) and call.func.attr == "update"):
        return False
    if not isinstance(call.func.value, ast.Attribute):
        return False
    if call.func.value.attr != "indices_updater_decode" or source.ours(call):
        return False
    function = source.function(call)
    if getattr(function, "name", "") != "init_forward_metadata":
        return False
    if keyword(call, "spec_info") is not None or any(part.arg is None for part in call.keywords):
        return False
    # Where mlagen plans draft steps it writes into this branch or drives the steps itself.
    touched = [*source.arms(call), *_eager_drivers(case)]
    return not any(source.region_within(node) for node in touched)


def _eager_drivers(case: Case) -> Iterator[ast.AST]:
    """Where the multi-step back end calls `init_forward_metadata` of its steps."""
    for call in case.source.calls:
        if isinstance(call.func, ast.Attribute) and call.func.attr == "init_forward_metadata":
            function = case.source.function(call)
            if function is not None:
                yield function
