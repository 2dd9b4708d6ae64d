"""A fork's overrides, each looked up in the file: one that names nothing there is refused.

Whether it is the right one shows at the edit sites, which look for exactly one match with it as
they do without.
"""

from __future__ import annotations

import difflib

import libcst as cst

from ..errors import DriftError, Problem
from ..fork import ANCHORS, Anchor
from ..spec import Spec
from .nodes import self_attribute, walk
from .source import Source

_CLASS_OF = {
    "update-method": ("decode-updater-class", "prefill-updater-class"),
    "plan-method": ("decode-updater-class", "prefill-updater-class"),
    "draft-loop-method": ("draft-backend-class",),
    "draft-backends": ("draft-backend-class",),
}
_HINT = "take the override away if the fork no longer needs it, or write what the file has"


def refuse_idle_overrides(source: Source, spec: Spec) -> None:
    """Raise DriftError, with each place in variants.yaml, for overrides that name nothing in the
    file or more than one class, function or method."""
    problems: list[Problem] = []
    for name, value in spec.anchors.items():
        anchor = ANCHORS[name]
        for owner in _owners(source, spec, anchor):
            message = _complaint(source, anchor, value, owner)
            if message:
                problems.append(spec.anchor_problem(name, "anchor-not-there", message, _HINT))
    if problems:
        raise DriftError(*problems)


def _owners(source: Source, spec: Spec, anchor: Anchor) -> list[cst.ClassDef | None]:
    """The classes in which an anchor is looked for; [None] for the top of the file. A class that
    is not there is not this override's fault."""
    if anchor.kind in ("class", "function"):
        return [None]
    wanted = [spec.names[name] for name in _CLASS_OF.get(anchor.name, ("backend-class",))]
    return [node for node in source.classes() if node.name.value in wanted]


def _complaint(source: Source, anchor: Anchor, value: str, owner: cst.ClassDef | None) -> str:
    """What is wrong with one override in one class, or at the top of the file."""
    place = source.path if owner is None else f"{owner.name.value} of {source.path}"
    if anchor.kind in ("attribute", "dictionary"):
        assert owner is not None
        known = [
            attribute
            for node in source.with_bases(owner)
            for found in walk(node)
            if (attribute := self_attribute(found)) is not None
        ]
        what, count, lines = f"self.{value}", 1 if value in known else 0, ""
    else:
        nodes = _definitions(source, anchor, owner)
        found_nodes = [node for node in nodes if node.name.value == value]
        known = [node.name.value for node in nodes]
        what, count = f"{anchor.kind} {value}", len(found_nodes)
        lines = ", ".join(str(source.first(node)) for node in found_nodes)
    if count == 1:
        return ""
    told = f"fork: anchors: {anchor.name}"
    if count:
        return f"{told}: looked for exactly one {what} in {place}, found {count} (lines {lines})"
    close = difflib.get_close_matches(value, sorted(set(known)), n=1)
    nearest = f"; nearest is {close[0]}" if close else ""
    return f"{told}: looked for {what} in {place}, found none{nearest}"


def _definitions(
    source: Source, anchor: Anchor, owner: cst.ClassDef | None
) -> list[cst.ClassDef | cst.FunctionDef]:
    if owner is not None:
        return list(source.inherited(owner))
    return list(source.classes() if anchor.kind == "class" else source.functions())
