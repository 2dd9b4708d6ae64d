"""Rendered -> the benchmark: scripts for a Python that has torch and FlashInfer, not mlagen.

They stand in `bench/` beside the `plans.py` and `hooks.py` that they measure; a second package has
the same functions with captured graphs planned on the GPU. Rendered when they are run, not
committed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from packaging.version import InvalidVersion, Version

from .flashinfer.api import PlanApi
from .gpu import PACKAGE
from .patch import mlagen_version
from .render import Rendered, context_of, environment, module_files, render
from .spec import Spec, kept_on_host

FOLDER = "bench"
#: The script to run, below the folder that `bench_files` fills.
SCRIPT = f"{PACKAGE}/{FOLDER}/run.py"
MODULES = (
    "bench_support",
    "contenders",
    "warm",
    "plan_cost",
    "spec_loop",
    "attention",
    "run",
)
#: The functions whose captured graphs the GPU plans. A package of its own: what it installs on a
#: wrapper is the other planner's, under the same names.
DEVICE_PACKAGE = "mlagen_device"
#: From here on what SGLang pins goes with plans that copy page numbers (0.5.22 pins 0.7.1).
FIRST_COPIED = Version("0.7")


def bench_files(rendered: Rendered) -> dict[str, bytes]:
    """All that a GPU machine needs, by name below a folder of its own: the functions as
    `mlagen render` shows them, and the scripts."""
    header = _header(rendered)
    functions = render(rendered.spec, rendered.api, in_place=host_in_place(rendered.api))
    host = {**module_files(functions, header), **scripts(rendered, header)}
    device = module_files(render(on_device(rendered.spec), rendered.api), header)
    return {
        f"{package}/{name}": data
        for package, files in ((PACKAGE, host), (DEVICE_PACKAGE, device))
        for name, data in {"__init__.py": b"", **files}.items()
    }


def host_in_place(api: PlanApi) -> bool:
    """Whether plans on the host are measured as in a file whose index kernel fills the captured
    buffer of a verify, as up to SGLang 0.5.21; later ones leave a copy to the plan. That, as it
    costs more, is also measured with sources that do not tell their version."""
    try:
        return Version(api.version or "") < FIRST_COPIED
    except InvalidVersion:
        return False


def on_device(spec: Spec) -> Spec:
    """The same variants, with the GPU as the planner of every graph that it can plan."""
    variants = tuple(
        variant.model_copy(update={"planner": "device"})
        if kept_on_host(variant) is None
        else variant
        for variant in spec.variants
    )
    return spec.model_copy(update={"variants": variants})


def scripts(rendered: Rendered, header: Iterable[str]) -> dict[str, bytes]:
    """The benchmark's own files, by name below the folder that holds plans.py."""
    scope = {**_scope(rendered), "header": tuple(header)}
    return {
        f"{FOLDER}/{module}.py": _render(f"bench/{module}.py.jinja", scope).encode()
        for module in MODULES
    }


def _header(rendered: Rendered) -> tuple[str, ...]:
    return (
        f"Written by mlagen {mlagen_version()} to measure its functions.",
        rendered.api.source_text,
    )


def _scope(rendered: Rendered) -> dict[str, Any]:
    """What the templates know beside the tests' own: how the planner is called bare.

    From 0.7.0 `wrapper._cached_module` is the proxy of flashinfer/jit/attention/modules.py, whose
    `plan` is `plan_with_staged_workspace_bytes` less the bytes: it fills the scratch memory, copies
    it to fresh pinned memory and queues the copy from there.
    """
    api = rendered.api
    if api.planner_copies:
        method = api.call.method
        floor = (
            "The call fills the wrapper's one pinned buffer and queues the copy from it; "
            "plans that are queued behind each other would overwrite one another."
        )
        sizes = (
            "Worked out of plan_info: entries 2 to 15 are the byte offsets of its arrays; the last "
            "one is as long as the longest."
        )
    else:
        method = "plan"
        floor = (
            "`wrapper._cached_module` is FlashInfer's staging proxy: the call fills the scratch "
            "memory, copies it to fresh pinned memory, and queues the copy from there."
        )
        sizes = "As its staging proxy tells. It copies as much once more on the host."
    return {
        **context_of(api),
        "mlagen": mlagen_version(),
        "device_package": DEVICE_PACKAGE,
        "bare_method": method,
        "host_in_place": host_in_place(api),
        "floor_note": _docstring(floor),
        "bytes_note": _docstring(sizes),
    }


def _docstring(text: str) -> str:
    """Lines of a docstring whose first one is indented already."""
    filled: str = environment().filters["docstring"](text)
    return filled.strip()


def _render(template: str, scope: Mapping[str, Any]) -> str:
    return environment().get_template(template).render(scope).strip("\n") + "\n"
