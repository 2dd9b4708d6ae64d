"""What two releases have differently: data, and the one rendering of it as rows of a report."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

#: Of differences of one kind about one subject, more than so many are told as a number and the
#: first; `--json` has each.
_TOLD = 3


@dataclass(frozen=True)
class Difference:
    """One thing that is not the same.

    Attributes:
        kind: what it is about, such as `private call`, `check`, `wait`, `site`.
        subject: which one, such as the name of a function or a site; may be empty.
        old, new: how it was and how it would be; empty where it is not there at all.
        place: where the new one stands (the old one, where there is no new one); may be empty.
    """

    kind: str
    subject: str
    old: str
    new: str
    place: str = ""

    @property
    def what(self) -> str:
        """`new`, `gone` or `changes`."""
        return "changes" if self.old and self.new else "new" if self.new else "gone"


def rows(differences: Iterable[Difference]) -> tuple[tuple[str, str], ...]:
    """(label, text) rows for a report, in the order given."""
    out: list[tuple[str, str]] = []
    differences = _joined(differences)
    for (kind, what, subject), group in groupby(
        differences, key=lambda item: (item.kind, item.what, item.subject)
    ):
        found = list(group)
        label = kind if what == "changes" else f"{what} {kind}"
        if len(found) > _TOLD:
            out.append((label, _many(subject, found)))
        else:
            out += [(label, _one(item)) for item in found]
    return tuple(out)


def _joined(differences: Iterable[Difference]) -> list[Difference]:
    """Neighbours of one kind that change in the same way and have no place of their own, as one."""
    out: list[Difference] = []
    for change, group in groupby(differences, key=_change):
        found = list(group)
        if change[-1] or not found[0].subject:
            out += found
        else:
            out.append(replace(found[0], subject=", ".join(item.subject for item in found)))
    return out


def _change(item: Difference) -> tuple[str, str, str, str]:
    return item.kind, item.old, item.new, item.place


def _one(item: Difference) -> str:
    value = f"{item.old} -> {item.new}" if item.what == "changes" else item.new or item.old
    text = ": ".join(part for part in (item.subject, value) if part)
    return f"{text} ({item.place})" if item.place else text


def _many(subject: str, found: Sequence[Difference]) -> str:
    first = found[0]
    text = f"{subject}: " if subject else ""
    text += f"{len(found)}, the first: {first.new or first.old}"
    return f"{text} ({first.place})" if first.place else text
