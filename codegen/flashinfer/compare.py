"""Two FlashInfers against each other: what an upgrade changes for whoever plans."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from ..differences import Difference
from .api import PlanApi, StateAttribute
from .checks import Check
from .read import copier_text, holder_text, update_text
from .waits import PlanWait, StockWaits


def compare_apis(old: PlanApi, new: PlanApi) -> tuple[Difference, ...]:
    """The era, the private call and its arguments, the state, who copies, the public methods.

    Where all these are the same and the source is not, that is told instead. Versions are not
    compared, nor line numbers.
    """
    call = str(new.call.place)
    pairs = [
        ("era", "", old.era_text, new.era_text, str(new.place)),
        ("location", "wrapper class", old.place.path, new.place.path, ""),
        ("location", "private call", old.call.place.path, new.call.place.path, ""),
        ("private call", "method", old.call.method, new.call.method, call),
        ("private call", "result", old.call.returns, new.call.returns, call),
        ("state", "", holder_text(old), holder_text(new), ""),
        ("copies to the device", "", copier_text(old), copier_text(new), ""),
        ("public update", "", update_text(old), update_text(new), ""),
        ("int32 checked by plan", "", _yes(old.int32_checked), _yes(new.int32_checked), ""),
    ]
    found = [
        *(Difference(*pair) for pair in pairs if pair[2] != pair[3]),
        *_arguments(old, new),
        *_state("read by run", old.run_state, new.run_state),
        *_state("read by run of the wrapper", old.wrapper_state, new.wrapper_state),
        *_parameters(old, new),
    ]
    if not found and old.digest != new.digest:
        found = [Difference("source", "", old.digest[:12], new.digest[:12], str(new.place))]
    return tuple(found)


def compare_checks(old: Iterable[Check], new: Iterable[Check]) -> tuple[Difference, ...]:
    """Checks that plan makes in one alone. In another function, a check counts as another."""
    before = {_check_key(check): check for check in old}
    after = {_check_key(check): check for check in new}
    return (
        *(_check(check, True) for key, check in after.items() if key not in before),
        *(_check(check, False) for key, check in before.items() if key not in after),
    )


def compare_waits(old: StockWaits, new: StockWaits) -> tuple[Difference, ...]:
    """How often FlashInfer's own plan waits, where it is not as often, and where it does in one
    alone."""
    if unknown := old.unknown or new.unknown:
        return (Difference("waits", "FlashInfer's own plan", "", f"not compared: {unknown}"),)
    found = []
    for mode, arrays in {**old.counts, **new.counts}:
        counts = old.count(mode, arrays), new.count(mode, arrays)
        if counts[0] != counts[1]:
            subject = f"FlashInfer's own plan, {mode}, lengths on the {arrays}"
            found.append(Difference("waits", subject, str(counts[0]), str(counts[1])))
    return (*found, *_places_of(new, old, True), *_places_of(old, new, False))


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _arguments(old: PlanApi, new: PlanApi) -> Iterable[Difference]:
    before, after = old.call.arguments, new.call.arguments
    if before == after:
        return
    place = str(new.call.place)
    yield from _new_and_gone("argument", before, after, place)
    if Counter(before) == Counter(after):
        yield Difference("argument", "order", ", ".join(before), ", ".join(after), place)


def _parameters(old: PlanApi, new: PlanApi) -> Iterable[Difference]:
    place = str(new.place)
    return _new_and_gone("parameter of plan", old.plan_parameters, new.plan_parameters, place)


def _new_and_gone(
    kind: str, before: Sequence[str], after: Sequence[str], place: str
) -> Iterable[Difference]:
    for name in after:
        if name not in before:
            yield Difference(kind, "", "", name, place)
    for name in before:
        if name not in after:
            yield Difference(kind, "", name, "")


def _state(
    kind: str, old: Sequence[StateAttribute], new: Sequence[StateAttribute]
) -> Iterable[Difference]:
    before = {item.name: item for item in old}
    after = {item.name: item for item in new}
    for name, item in after.items():
        if name not in before:
            yield Difference(kind, name, "", item.value, str(item.place))
        elif before[name].value != item.value and name != "_plan_info":  # the call, told apart
            yield Difference(kind, name, before[name].value, item.value, str(item.place))
    for name, item in before.items():
        if name not in after:
            yield Difference(kind, name, item.value, "", str(item.place))


def _check_key(check: Check) -> tuple[str, str, str]:
    return check.function, check.condition, check.error


def _check(check: Check, is_new: bool) -> Difference:
    text = f"{check.error} if {check.condition or '...'}"
    old, new = ("", text) if is_new else (text, "")
    return Difference("check", check.function, old, new, str(check.place))


def _places_of(waits: StockWaits, others: StockWaits, is_new: bool) -> Iterable[Difference]:
    known = Counter(_wait_key(wait) for wait in others.waits)
    for wait in waits.waits:
        key = _wait_key(wait)
        if known[key]:
            known[key] -= 1
            continue
        text = wait.expression
        if not wait.counted:
            text += f", {wait.note}"
        elif wait.condition:
            text += f", if {wait.condition}"
        old, new = ("", text) if is_new else (text, "")
        yield Difference("wait", key[0], old, new, str(wait.place))


def _wait_key(wait: PlanWait) -> tuple[str, str]:
    """The function that waits, without its class, and how."""
    return wait.way[-1].rpartition(".")[2] if wait.way else "plan", wait.expression
