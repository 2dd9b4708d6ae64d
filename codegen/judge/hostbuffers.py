"""Host buffers that the back end allocates once and fills at each step."""

from __future__ import annotations

import ast
from dataclasses import dataclass

from .source import BACKEND_CLASS, Source, is_true, keyword

_ALLOCATES = {"zeros", "empty", "ones", "full"}


@dataclass(frozen=True)
class HostBuffer:
    """An attribute of the back end on the CPU.

    `size` are the names in its shape, `writes` the statements outside `__init__` that fill
    it and that mlagen did not write.
    """

    name: str
    node: ast.Call
    size: frozenset[str]
    pinned: bool
    writes: tuple[ast.AST, ...]


def host_buffers(source: Source) -> tuple[HostBuffer, ...]:
    """The host buffers of the back end class, in the order of the file."""
    found = []
    for node in source.assignments:
        owner, function = source.class_of(node), source.function(node)
        if owner is None or owner.name != BACKEND_CLASS or source.ours(node):
            continue
        if getattr(function, "name", "") != "__init__" or not isinstance(node.value, ast.Call):
            continue
        call = node.value
        if not isinstance(call.func, ast.Attribute) or call.func.attr not in _ALLOCATES:
            continue
        device = keyword(call, "device")
        pinned = is_true(keyword(call, "pin_memory"))
        on_host = isinstance(device, ast.Constant) and device.value == "cpu"
        if not (pinned or on_host):
            continue
        shape = call.args[0] if call.args else None
        names = {part.id for part in ast.walk(shape) if isinstance(part, ast.Name)} if shape else ()
        for target in node.targets:
            if isinstance(target, ast.Attribute):
                name = f"self.{target.attr}"
                writes = tuple(
                    definition.node
                    for definition in source.class_definitions(name, owner)
                    if definition.store
                    and not source.ours(definition.node)
                    and getattr(source.function(definition.node), "name", "") != "__init__"
                )
                found.append(HostBuffer(target.attr, call, frozenset(names), pinned, writes))
    return tuple(found)
