"""An unknown planner against the nearest era that is known: call, arguments, attributes, location.

For the error that refuses it. What is looked at is what can be seen at all: a planner that is
refused lacks some of it.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import DriftError, Problem
from . import eras
from .api import Era, Place
from .planner import (
    EXPECTED_ARGUMENTS,
    calls_of,
    difference_of,
    find_planner,
    find_wrapper,
    form_of,
)
from .state import state_between
from .syntax import Modules

#: What is worth a comparison; a file that does not parse, or a class that is there twice, is not.
_OF_SHAPE = frozenset(
    {
        "class-missing",
        "method-missing",
        "private-call-missing",
        "private-call-changed",
        "back-ends-differ",
        "shape-unknown",
        "state-unknown",
        "update-unknown",
    }
)


@dataclass(frozen=True)
class Seen:
    """What is there of a planner. None: not found.

    forms: what the planner is called as, each with what is different in its arguments from all
    that is known (empty: nothing).
    """

    place: Place | None
    holder: eras.Holder | None
    forms: tuple[tuple[str, tuple[str, ...], str], ...]
    state: frozenset[str] | None


def nearest_problem(modules: Modules, error: DriftError) -> Problem | None:
    """How the planner differs from that of the nearest era; None where `error` is of another kind.

    `modules` is read anew: it may load more files than were read before.
    """
    first = error.problems[0]
    if first.code not in _OF_SHAPE:
        return None
    seen = look(modules)
    if seen.place is None:
        return None
    found = [(differences_from(seen, shape), shape.era) for shape in reversed(eras.ERA_SHAPES)]
    differences, era = min(found, key=lambda pair: len(pair[0]))
    lines = [f"nearest is {name_of(era)} ({era.value}); what is different from it:"]
    lines += [f"    {line}" for line in differences] or ["    only what is told above"]
    return modules.problem("nearest-era", "\n".join(lines), first.path, first.line)


def name_of(era: Era) -> str:
    """An era's name for people."""
    return era.name.lower().replace("_", "-")


def look(modules: Modules) -> Seen:
    """What is there; never raises DriftError."""
    try:
        wrapper = find_wrapper(modules)
    except DriftError:
        return Seen(None, None, (), None)
    place = Place(wrapper.module.path, wrapper.node.lineno)
    try:
        planner = find_planner(modules, wrapper)
    except DriftError:
        return Seen(place, None, (), None)
    forms = tuple(
        (call.form, call.arguments, difference_of(call, planner))
        for call in calls_of(planner.view, planner.plan)
    )
    state = state_between(planner.view, planner.plan, planner.run)
    return Seen(place, planner.holder, forms, frozenset(item.name for item in state))


def differences_from(seen: Seen, shape: eras.EraShape) -> list[str]:
    """One line each, in the order of the reading: location, call, arguments, attributes."""
    rows = [row for row in eras.KNOWN_CALLS if row.era is shape.era]
    out: list[str] = []
    if seen.place is not None and seen.place.path != shape.path:
        out.append(f"location: {eras.WRAPPER_CLASS} is in {seen.place.path}, was in {shape.path}")
    if seen.holder != rows[0].holder:
        out.append(f"state: {_HOLDERS[seen.holder]}, was {_HOLDERS[rows[0].holder]}")
    known = [form_of(row) for row in rows]
    if not seen.forms:
        out.append(f"call: none was found, was {known[0]}({', '.join(EXPECTED_ARGUMENTS)})")
    for form, arguments, difference in seen.forms:
        if form not in known:
            out.append(f"call: {form}, was {known[0]}")
        takes_stream = arguments == (*EXPECTED_ARGUMENTS, eras.STREAM_TEXT)
        if difference and "arguments: " + difference not in out:
            out.append(f"arguments: {difference}")
        elif not difference and takes_stream != rows[0].takes_stream:
            out.append(f"arguments: {'with' if takes_stream else 'without'} the stream")
    if seen.state is not None:
        new = sorted(seen.state - shape.state - shape.more_state)
        gone = sorted(shape.state - seen.state)
        if new:
            out.append(f"attributes: run reads {', '.join(new)} as well")
        if gone:
            out.append(f"attributes: run does not read {', '.join(gone)}")
    return out


_HOLDERS: dict[eras.Holder | None, str] = {
    "wrapper": "on the wrapper",
    "planned_backend": f"on wrapper.{eras.PLANNED_BACKEND}",
    None: "in a place that is not known",
}
