"""Who copies a plan to the device: the C++ planner, or a Python class around its module; and
where that class holds the module."""

from __future__ import annotations

import ast
from dataclasses import dataclass

from . import eras
from .api import PrivateCall
from .planner import Planner
from .syntax import Found, Modules, ordered, text


@dataclass(frozen=True)
class Staging:
    """`planner_copies` and `raw_module` of PlanApi."""

    planner_copies: bool
    raw_module: str | None = None


def staging(modules: Modules, planner: Planner, call: PrivateCall, missing: list[str]) -> Staging:
    """The C++ planner copies, out of the pinned buffer that it is given and that the wrapper uses
    again: up to 0.6.18.post1. From 0.7.0 the function that builds the module wraps it in a class
    that copies from pinned memory of its own.

    The builder is followed from the module that makes the call. Where it is not found, the form of
    the call decides, and `missing` gains a sentence. DriftError where the call says that Python
    stages and no class does: such a plan would never reach the device.
    """
    staged = call.method == eras.STAGED
    makers = (modules.by_path(call.place.path), planner.view.module)
    for module in dict.fromkeys(m.name for m in makers if m is not None):
        found = modules.find(module, eras.MODULE_BUILDER)
        if found is None or not isinstance(found.node, ast.FunctionDef):
            continue
        proxy = _proxy(found)
        if proxy is not None:
            return Staging(False, _raw_module(proxy) if staged else None)
        if not staged:
            return Staging(True)
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
    return Staging(not staged)


def _proxy(builder: Found) -> ast.ClassDef | None:
    """The class of the builder's module that it names, and that both plans and copies."""
    named = {node.id for node in ast.walk(builder.node) if isinstance(node, ast.Name)}
    for node in builder.module.tree.body:
        if isinstance(node, ast.ClassDef) and node.name in named:
            called = {
                call.func.attr
                for call in ast.walk(node)
                if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)
            }
            if {"plan", "copy_"} <= called:
                return node
    return None


def _raw_module(proxy: ast.ClassDef) -> str | None:
    """The attribute `x` of the one `plan_info, bytes = self.x.plan(*args)` by which the proxy
    plans before it copies; None where its method has another form."""
    found: list[str] = []
    for method in proxy.body:
        if not isinstance(method, ast.FunctionDef) or method.name != eras.STAGED:
            continue
        rest = method.args.vararg
        for node in ordered(method):
            if (
                rest is not None
                and isinstance(node, ast.Assign)
                and isinstance(node.targets[0], ast.Tuple)
                and len(node.targets[0].elts) == 2
                and isinstance(node.value, ast.Call)
                and isinstance(node.value.func, ast.Attribute)
                and isinstance(node.value.func.value, ast.Attribute)
                and text(node.value) == f"self.{node.value.func.value.attr}.plan(*{rest.arg})"
            ):
                found.append(node.value.func.value.attr)
    return found[0] if len(found) == 1 else None
