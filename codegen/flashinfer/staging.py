"""Who copies a plan to the device: the C++ planner, or a Python class around its module."""

from __future__ import annotations

import ast

from . import eras
from .api import PrivateCall
from .planner import Planner
from .syntax import Found, Modules


def planner_copies(
    modules: Modules, planner: Planner, call: PrivateCall, missing: list[str]
) -> bool:
    """True where the C++ planner copies, out of the pinned buffer that it is given and that the
    wrapper uses again: up to 0.6.18.post1. False where the function that builds the module wraps
    it in a class that copies from pinned memory of its own: from 0.7.0.

    The builder is followed from the module that makes the call. Where it is not found, the form of
    the call decides, and `missing` gains a sentence. DriftError where the call says that Python
    stages and no class does: such a plan would never reach the device.
    """
    staged = call.method == "plan_with_staged_workspace_bytes"
    makers = (modules.by_path(call.place.path), planner.view.module)
    for module in dict.fromkeys(m.name for m in makers if m is not None):
        found = modules.find(module, eras.MODULE_BUILDER)
        if found is None or not isinstance(found.node, ast.FunctionDef):
            continue
        if _stages(found):
            return False
        if not staged:
            return True
        raise modules.drift(
            "shape-unknown",
            f"plan calls {call.method}, and {eras.MODULE_BUILDER} wraps its module in no class "
            "that copies a plan to the device: who copies cannot be told",
            found.module,
            found.node,
        )
    missing.append(
        f"Looked for {eras.MODULE_BUILDER} to see who copies a plan to the device: not found; "
        f"going by {call.method}, {'Python' if staged else 'the C++ planner'} does."
    )
    return not staged


def _stages(builder: Found) -> bool:
    """Whether the builder names a class of its module that both plans and copies."""
    named = {node.id for node in ast.walk(builder.node) if isinstance(node, ast.Name)}
    for node in builder.module.tree.body:
        if isinstance(node, ast.ClassDef) and node.name in named:
            called = {
                call.func.attr
                for call in ast.walk(node)
                if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)
            }
            if {"plan", "copy_"} <= called:
                return True
    return False
