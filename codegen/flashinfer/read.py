"""FlashInfer source -> PlanApi: the private planner call, the state around it, who copies.

Read with `ast`, found by structure and compared with `eras.py`. What differs is refused with exit
code 4: a private call that is no longer known must stop everything before a line is rendered.
"""

from __future__ import annotations

from . import eras
from .api import PLANNER_ARGUMENTS, Place, PlanApi
from .find import FlashInferSource
from .planner import find_planner, find_wrapper, private_call
from .staging import staging
from .state import int32_checked, run_state, state_between
from .syntax import Modules


def read_plan_api(source: FlashInferSource) -> PlanApi:
    """What this FlashInfer expects of whoever plans its MLA attention.

    Raises DriftError where the wrapper class, the private call, or the state that `run` reads is
    not what mlagen knows. The problem says what was expected and what stands there, and where.
    """
    modules = Modules(source)
    missing: list[str] = []
    if source.version is None:
        missing.append("Looked for a version beside the source: it does not say.")
    wrapper = find_wrapper(modules)
    planner = find_planner(modules, wrapper)
    known, call = private_call(modules, planner)
    plan = wrapper.method("plan")
    staged = staging(modules, planner, call, missing)
    return PlanApi(
        version=source.version,
        era=known.era,
        plan_parameters=plan.parameters if plan else (),
        call=call,
        holder=planner.holder,
        run_state=run_state(modules, planner),
        planner_copies=staged.planner_copies,
        raw_module=staged.raw_module,
        int32_checked=int32_checked(modules, planner),
        public_update=eras.PUBLIC_UPDATE if wrapper.method(eras.PUBLIC_UPDATE) else None,
        missing=tuple(missing),
        place=Place(wrapper.module.path, wrapper.node.lineno),
        digest=modules.digest(),
        wrapper_state=(
            state_between(wrapper, "plan", "run") if planner.holder != "wrapper" else ()
        ),
    )


def explain(api: PlanApi) -> tuple[tuple[str, str], ...]:
    """What `mlagen inspect` says about a FlashInfer, as (label, text) pairs in reading order."""
    call = api.call
    names = [*PLANNER_ARGUMENTS, *(["stream"] if call.takes_stream else [])]
    given = ", ".join(
        name if name == text else f"{name}={text}"
        for name, text in zip(names, call.arguments, strict=True)
    )
    result = "plan_info" if call.returns == "plan_info" else "(plan_info, staged bytes)"
    holder = (
        "on the wrapper"
        if api.holder == "wrapper"
        else "on wrapper._planned_backend, which an eager plan replaces"
    )
    copier = (
        "the C++ planner, from the pinned buffer of the wrapper: plans ahead need staging"
        if api.planner_copies
        else "FlashInfer's Python, from pinned memory of its own"
    )
    if api.raw_module:
        copier += f"; plans go below it, to {api.raw_module}.plan, and are staged once"
    facts = [
        ("version", api.version or "unknown"),
        ("era", f"{api.era.name.lower().replace('_', '-')} ({api.era.value})"),
        ("class", f"{eras.WRAPPER_CLASS} at {api.place}"),
        ("private call", f"{call.method}({given}) -> {result} at {call.place}"),
        ("state", holder),
        ("read by run", ", ".join(item.name for item in api.run_state)),
    ]
    if api.wrapper_state:
        names_there = ", ".join(item.name for item in api.wrapper_state)
        facts.append(("read by run of the wrapper", names_there))
    facts += [
        ("copies to the device", copier),
        ("int32 checked by plan", "yes" if api.int32_checked else "no"),
        ("public update", api.public_update or "none"),
    ]
    return (*facts, *(("not found", sentence) for sentence in api.missing))
