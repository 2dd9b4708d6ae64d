"""Judges the hand-written plans of a `flashinfer_mla_backend.py`.

For `check` and `inspect`, on a file that mlagen never touched as on one that it patched: do
the plans in it fit the FlashInfer at hand, which of the known defects do they have, and where
does the host still wait? One small file a defect; each opens with what is wrong, in which
releases, and what tells it in the source. All is told by structure, nothing by a version.

Lines that mlagen wrote are not judged here (their text is compared with what it would render
now), and defects at sites that they replaced are not raised.
"""

from __future__ import annotations

from ..errors import Problem
from ..flashinfer.api import PlanApi
from ..flashinfer.waits import StockWaits
from . import (
    d1_pinned_race,
    d2_draft_lengths,
    d3_verify_twice,
    d4_reused_buffers,
    d5_frozen_grid,
    d6_int64_lengths,
    d7_unchecked_limits,
    d8_dflash_padding,
    d9_buffer_size,
    d10_assert,
    d11_frozen_plan,
    fit,
    stale_verify_lengths,
)
from .case import NOTE, Case
from .lengths import find_lengths
from .paths import StepWaits, step_waits
from .plans import find_plans
from .readers import HostRead, find_reads
from .source import by_line, read_source
from .syncs import HostSync, find_syncs

__all__ = [
    "HostRead",
    "HostSync",
    "StepWaits",
    "host_reads",
    "host_syncs",
    "is_note",
    "judge",
    "waits_of_steps",
]

_JUDGES = (
    fit,
    d1_pinned_race,
    d2_draft_lengths,
    d3_verify_twice,
    d4_reused_buffers,
    d5_frozen_grid,
    d6_int64_lengths,
    d7_unchecked_limits,
    d8_dflash_padding,
    d9_buffer_size,
    d10_assert,
    d11_frozen_plan,
    stale_verify_lengths,
)


def judge(source: bytes, path_label: str, api: PlanApi | None) -> tuple[Problem, ...]:
    """What is wrong with the plans in `source`, in the order of its lines.

    Args:
        source: the file's bytes.
        path_label: what findings call the file.
        api: the FlashInfer it runs with; None leaves out all that depends on it.

    Returns:
        Findings; those that begin with "note: " (`is_note`) do not make the file wrong.

    Raises:
        DriftError: `source` does not parse, or is not SGLang's back end.
    """
    parsed = read_source(source, path_label)
    plans = find_plans(parsed)
    case = Case(parsed, api, plans, find_lengths(parsed, plans))
    return by_line(problem for judgement in _JUDGES for problem in judgement.find(case))


def is_note(problem: Problem) -> bool:
    """Whether a finding of `judge` only informs: harmless as things stand, or in what no plan
    of this file can mend."""
    return problem.message.startswith(NOTE)


def host_syncs(source: bytes, path_label: str) -> tuple[HostSync, ...]:
    """Where the host waits for the GPU in `source`, in the order of its lines.

    Raises:
        DriftError: as `judge`.
    """
    return find_syncs(read_source(source, path_label))


def host_reads(source: bytes, path_label: str) -> tuple[HostRead, ...]:
    """What in `source` uses lengths on the host, in the order of its lines.

    Raises:
        DriftError: as `judge`.
    """
    return find_reads(read_source(source, path_label))


def waits_of_steps(
    source: bytes, path_label: str, stock: StockWaits | None
) -> tuple[StepWaits, ...]:
    """How often each step of `source` waits, and on which ways.

    Args:
        stock: the waits of FlashInfer's own plan; None counts such a plan as one wait.

    Raises:
        DriftError: as `judge`.
    """
    return step_waits(read_source(source, path_label), stock)
