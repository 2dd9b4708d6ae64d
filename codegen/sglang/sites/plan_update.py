"""Graph wrappers: made so that FlashInfer's public update works, where a FlashInfer has one.

Added to the constructor's call in a capture: `enable_cuda_graph_plan_update=True`
(flashinfer pull 5041, in no release yet; left out for every FlashInfer without it).
"""

from __future__ import annotations

import libcst as cst

from ...flashinfer.eras import UPDATE_OPTION
from ..edits import Edit, add_arguments
from ..nodes import is_name, walk
from ..source import Refused
from . import Context


def decode_edits(context: Context) -> list[Edit]:
    site = context.backend.decode_capture
    wrapper = site.argument("decode_wrapper")
    assert isinstance(wrapper, cst.Name)
    return _edits(context, "plan-update-decode", site.function, wrapper.value)


def verify_edits(context: Context) -> list[Edit]:
    _, wrapper, site = context.backend.verify_capture
    return _edits(context, "plan-update-verify", site.function, wrapper)


def _edits(context: Context, name: str, function: cst.FunctionDef, wrapper: str) -> list[Edit]:
    source = context.backend.source
    made = [
        node.value
        for node in walk(function)
        if isinstance(node, cst.Assign)
        and is_name(node.targets[0].target, wrapper)
        and isinstance(node.value, cst.Call)
        and _keyword(node.value, "use_cuda_graph") is not None
    ]
    if len(made) != 1:
        raise Refused(
            "anchor-missing" if not made else "anchor-ambiguous",
            f"looked for `{wrapper} = ...(..., use_cuda_graph=True)` in {function.name.value}, "
            f"found {len(made)}",
            source.first(function),
        )
    given = _keyword(made[0], UPDATE_OPTION)
    if given is not None and not is_name(given, "True"):
        raise Refused(
            "anchor-changed", f"{UPDATE_OPTION} is {source.code(given)}", source.first(made[0])
        )
    if given is not None:
        return []
    return [add_arguments(source, name, made[0], **{UPDATE_OPTION: "True"})]


def _keyword(call: cst.Call, name: str) -> cst.BaseExpression | None:
    for argument in call.args:
        if argument.keyword is not None and argument.keyword.value == name:
            return argument.value
    return None
