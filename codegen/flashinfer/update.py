"""The public way to give a captured graph its next plan, where a FlashInfer has one.

flashinfer pull 5041 proposes `update_cuda_graph_plan(metadata=MLAPlanMetadata.csr(...))` for a
wrapper that was made with `enable_cuda_graph_plan_update=True`. No release has it, so its form is
read, not assumed: whatever is not understood is refused, as a graph whose plan is not refreshed is
wrong in silence.
"""

from __future__ import annotations

import ast

from ..errors import DriftError
from . import eras
from .api import Place, PublicUpdate
from .syntax import ClassView, MethodOf, Modules, attribute_of

#: The arrays of `csr`, what emitted code has of them on the device, and on the host.
_ARRAYS = {
    "qo_indptr": ("arrays.qo_indptr", "request.qo_indptr"),
    "kv_indptr": ("arrays.kv_indptr", "request.kv_indptr"),
    "kv_indices": ("arrays.kv_indices", None),
    "kv_len_arr": ("arrays.lengths()", "request.kv_len"),
}
#: How a parameter for an array's copy on the host may be called.
_ON_HOST = ("_host", "_cpu")


def public_update(modules: Modules, wrapper: ClassView) -> PublicUpdate | None:
    """How the wrapper's public update is called; None where it has none.

    `csr` takes the four arrays: then the host's copies of the lengths are given, which `plan` takes
    as well. Or it takes host copies beside the device's arrays, by names such as `qo_indptr_host`:
    then both are given. Raises DriftError for anything else.
    """
    method = wrapper.method(eras.PUBLIC_UPDATE)
    if method is None:
        return None
    if (trouble := _unlike(method, ("metadata",))) is not None:
        raise _refusal(modules, method, f"{eras.PUBLIC_UPDATE} {trouble}")
    enabled = _enabled_by(wrapper)
    if enabled is None:
        raise _refusal(
            modules,
            method,
            f"__init__ keeps no {eras.UPDATE_OPTION} in an attribute: whether a wrapper can be "
            "updated cannot be told",
        )
    return PublicUpdate(
        method=eras.PUBLIC_UPDATE,
        metadata=eras.METADATA_CLASS,
        arrays=_csr_arrays(modules, method),
        enabled=enabled,
        place=Place(method.module.path, method.node.lineno),
    )


def _csr_arrays(modules: Modules, update: MethodOf) -> tuple[tuple[str, str], ...]:
    found = modules.find(eras.EXPORTING_MODULES[0], eras.METADATA_CLASS)
    csr = None
    if found is not None and isinstance(found.node, ast.ClassDef):
        csr = ClassView(modules, found).method("csr")
    name = f"{eras.METADATA_CLASS}.csr"
    if csr is None:
        raise _refusal(modules, update, f"{name} is not there, below {eras.EXPORTING_MODULES[0]}")
    given: dict[str, str] = {}
    for array, (on_device, on_host) in _ARRAYS.items():
        beside = [array + end for end in _ON_HOST if array + end in csr.parameters]
        if on_host is None:
            given[array] = on_device
        elif beside:
            given |= {array: on_device, beside[0]: on_host}
        else:
            given[array] = on_host
    hosts = sum(value.startswith("request.") for value in given.values())
    if len(given) not in (len(_ARRAYS), len(_ARRAYS) + hosts):
        raise _refusal(modules, csr, f"{name} takes host copies of some of its arrays only")
    if (trouble := _unlike(csr, tuple(given))) is not None:
        raise _refusal(modules, csr, f"{name} {trouble}")
    return tuple(given.items())


def _unlike(method: MethodOf, wanted: tuple[str, ...]) -> str | None:
    """How a method differs from one that can be called with just `wanted`, by keyword."""
    arguments = method.node.args
    positional = [*arguments.posonlyargs, *arguments.args][1:]
    required = [a.arg for a in positional[: max(0, len(positional) - len(arguments.defaults))]]
    required += [
        a.arg
        for a, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        if default is None
    ]
    takes = f"takes ({', '.join(method.parameters)})"
    if missing := [name for name in wanted if name not in method.parameters]:
        return f"{takes}: {', '.join(missing)} is not there"
    if more := [name for name in required if name not in wanted]:
        return f"{takes}: nothing is known to give for {', '.join(more)}"
    if {a.arg for a in arguments.posonlyargs} & {*wanted}:
        return f"{takes}: not by keyword"
    return None


def _enabled_by(wrapper: ClassView) -> str | None:
    """X of `self.X = enable_cuda_graph_plan_update` in the constructor, also in `bool(...)`."""
    option = eras.UPDATE_OPTION
    method = wrapper.method("__init__")
    if method is None or option not in method.parameters:
        return None
    for node in method.node.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            name = attribute_of(target, frozenset({method.receiver}))
            if name and ast.unparse(node.value) in (option, f"bool({option})"):
                return name
    return None


def _refusal(modules: Modules, method: MethodOf, message: str) -> DriftError:
    return modules.drift(
        "update-unknown",
        f"the public update of a captured graph is not the one that mlagen knows: {message}; "
        f"expected {eras.PUBLIC_UPDATE}(metadata=...) with {eras.METADATA_CLASS}.csr"
        f"({', '.join(_ARRAYS)}), with or without their copies on the host, as name_host or "
        "name_cpu",
        method.module,
        method.node,
    )
