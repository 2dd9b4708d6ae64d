"""Specs to render and patch with: the shipped variants.yaml, and changes of it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

from mlagen.codegen.spec import Spec, read_spec, shipped_spec

#: (old, new) of a text; each old is in the shipped spec.
Changes = Sequence[tuple[str, str]]


def on_device(*names: str) -> Changes:
    """What has these variants planned on the GPU."""
    return tuple((f"\n  {name}:\n", f"\n  {name}:\n    planner: device\n") for name in names)


#: The variants of captured graphs that the GPU can plan, planned by it.
ON_DEVICE: Changes = on_device("decode", "draft-decode", "verify")


def changed(changes: Changes) -> bytes:
    """The text of the shipped spec with changes made."""
    text = shipped_spec().read_text(encoding="utf-8")
    for old, new in changes:
        assert old in text, f"not in the shipped spec: {old!r}"
        text = text.replace(old, new)
    return text.encode()


def spec_of(changes: Changes) -> Spec:
    return read_spec(changed(changes), Path("variants.yaml"))


@cache
def device_spec() -> Spec:
    """The shipped variants, planned on the GPU as far as can be."""
    return spec_of(ON_DEVICE)
