"""`mlagen check`: is every fast plan in a file right for the FlashInfer at hand?"""

from __future__ import annotations

from dataclasses import dataclass, replace

from .errors import DriftError, Problem
from .flashinfer.api import PlanApi
from .judge import is_note, judge
from .patch import Patch, prepare, site_states, staleness
from .provenance import find_regions
from .report import SiteState
from .sglang.find import FoundTarget
from .spec import Spec

#: Findings that are drift: the private call does not fit this FlashInfer. Exit 4.
_DRIFT_CODES = ("plan-",)


@dataclass(frozen=True)
class Checked:
    """What `check` found. `exit_code`: 0 clean, 1 stale or with a known defect, 4 drift.

    `problems` are in the order of the file, remarks that fail nothing (`note:`) among them.
    """

    exit_code: int
    problems: tuple[Problem, ...]
    sites: tuple[SiteState, ...]


def check_file(found: FoundTarget, spec: Spec, api: PlanApi) -> Checked:
    """Judge the file of `found`, patched or not.

    A patched file must hold what mlagen would render now; hand-written plans, in it or in a
    file that mlagen never touched, must fit the private call and have none of the known
    defects. Whether mlagen could patch a file is not asked here: `inspect` tells.

    Raises EditedError where someone edited inside a region, DriftError where a patched file
    no longer has a place for an edit.
    """
    regions = find_regions(found.data, path=found.label)
    findings = judge(spec.names.as_released(found.data), found.label, api)
    problems = [problem for problem in findings if not is_note(problem)]
    remarks = [problem for problem in findings if is_note(problem)]
    sites: tuple[SiteState, ...] = ()
    if regions:
        patch = prepare(found, spec, api)
        sites = site_states(found, patch, spec)
        problems += stale_problems(found, patch, sites)
    shown = sorted([*problems, *remarks], key=lambda problem: problem.line)
    return Checked(_exit_code(problems), tuple(shown), sites)


def stale_problems(found: FoundTarget, patch: Patch, sites: tuple[SiteState, ...]) -> list[Problem]:
    """What is wrong with a patched file that is not what mlagen would write now."""
    problems: dict[tuple[str, int], Problem] = {}
    for state in sites:
        if state.state in ("stale", "absent"):
            message = f"{state.site} is {state.state}"
            if state.reason:
                message += f": {state.reason}"
            problems.setdefault(
                (state.site, state.line),
                Problem(
                    found.label,
                    state.line,
                    0,
                    f"site-{state.state}",
                    message,
                    "run `mlagen patch` again, and read its --diff",
                ),
            )
    if len({(p.code, p.message.partition(": ")[2]) for p in problems.values()}) == 1:
        first = next(iter(problems.values()))
        return [replace(first, message=_all_of(len(problems), first.message))]
    if patch.changes and not problems:
        problems["", 0] = Problem(
            found.label,
            1,
            0,
            "site-stale",
            f"the file is not what mlagen renders now: {staleness(found, patch)}",
            "run `mlagen patch` again, and read its --diff",
        )
    return list(problems.values())


def _all_of(count: int, message: str) -> str:
    """One message for sites that are all stale, or all absent, for one reason."""
    if count == 1:
        return message
    site, _, rest = message.partition(" is ")
    return f"{count} sites are {rest} ({site} is the first)"


def _exit_code(problems: list[Problem]) -> int:
    if any(problem.code.startswith(_DRIFT_CODES) for problem in problems):
        return DriftError.exit_code
    return 1 if problems else 0
