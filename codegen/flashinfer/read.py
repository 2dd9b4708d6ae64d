"""FlashInfer source -> PlanApi: the private planner call, the state around it, who copies.

Read with `ast`, found by structure and compared with `eras.py`. What differs is refused with exit
code 4: a private call that is no longer known must stop everything before a line is rendered.
"""

from __future__ import annotations

from dataclasses import replace

from ..errors import DriftError, Problem
from . import eras
from .api import PLANNER_ARGUMENTS, Place, PlanApi, PublicUpdate
from .derive import Derivation
from .find import FlashInferSource
from .nearest import name_of, nearest_problem
from .planner import find_planner, find_wrapper, private_call
from .staging import staging
from .state import int32_checked, run_state, state_between
from .syntax import ClassView, Modules
from .update import public_update


def read_plan_api(source: FlashInferSource, *, allow_unknown: bool = False) -> PlanApi:
    """What this FlashInfer expects of whoever plans its MLA attention.

    With `allow_unknown`, what no era has is taken over as far as the source tells how; `derived`
    of the result then says what. Raises DriftError where the wrapper class, the private call, or
    the state that `run` reads is not what mlagen knows. The problems say what was expected and what
    stands there, and where, what is different from the nearest era, and whether `allow_unknown`
    helps.
    """
    try:
        return _read(Modules(source), Derivation() if allow_unknown else None)
    except DriftError as error:
        raise DriftError(*error.problems, *_explained(source, error, allow_unknown)) from None


def _explained(source: FlashInferSource, error: DriftError, tried: bool) -> list[Problem]:
    nearest = nearest_problem(Modules(source), error)
    if nearest is None:
        return []
    if tried:
        return [replace(nearest, hint="")]
    try:
        derived = _read(Modules(source), Derivation()).derived
    except DriftError as refused:
        reasons = [p.message for p in refused.problems if p.code == "not-derivable"]
        hint = reasons[0].partition(": ")[2] if reasons else "--allow-unknown refuses it as well"
        return [replace(nearest, hint=hint)]
    hint = (
        f"--allow-unknown renders it from this source ({'; '.join(derived)}), marked as such: "
        "then run `mlagen test`"
    )
    return [replace(nearest, hint=hint)]


def _read(modules: Modules, derivation: Derivation | None) -> PlanApi:
    missing: list[str] = []
    if modules.source.version is None:
        missing.append("Looked for a version beside the source: it does not say.")
    wrapper = find_wrapper(modules)
    planner = find_planner(modules, wrapper)
    known, call = private_call(modules, planner, derivation)
    plan = wrapper.method("plan")
    staged = staging(modules, planner, call, missing)
    state = run_state(modules, planner, call, derivation)
    checked = int32_checked(modules, planner)
    # Of what is read up to here: the digest of a FlashInfer without an update stays what it was.
    digest = modules.digest()
    update = _public_update(modules, wrapper, derivation)
    return PlanApi(
        version=modules.source.version,
        era=known.era,
        plan_parameters=plan.parameters if plan else (),
        call=call,
        holder=planner.holder,
        run_state=state,
        planner_copies=staged.planner_copies,
        raw_module=staged.raw_module,
        int32_checked=checked,
        public_update=eras.PUBLIC_UPDATE if wrapper.method(eras.PUBLIC_UPDATE) else None,
        missing=tuple(missing),
        place=Place(wrapper.module.path, wrapper.node.lineno),
        digest=modules.digest() if update is not None else digest,
        wrapper_state=(
            state_between(wrapper, "plan", "run") if planner.holder != "wrapper" else ()
        ),
        update=update,
        derived=tuple(derivation.sentences) if derivation is not None else (),
    )


def _public_update(
    modules: Modules, wrapper: ClassView, derivation: Derivation | None
) -> PublicUpdate | None:
    """With a `derivation`, an update that is not understood is passed over: the private call does
    the same."""
    try:
        return public_update(modules, wrapper)
    except DriftError as error:
        if derivation is None:
            raise
        message = error.problems[0].message.removeprefix(f"{modules.source.label}: ")
        derivation.note(f"{message.partition(';')[0]}; the private call is used")
        return None


def explain(api: PlanApi) -> tuple[tuple[str, str], ...]:
    """What `mlagen inspect` says about a FlashInfer, as (label, text) pairs in reading order."""
    known = (("era", f"{name_of(api.era)} ({api.era.value})"),)
    facts = [
        ("version", api.version or "unknown"),
        *(derived_facts(api) or known),
        ("class", f"{eras.WRAPPER_CLASS} at {api.place}"),
        ("private call", f"{call_text(api)} at {api.call.place}"),
        ("state", holder_text(api)),
        ("read by run", ", ".join(item.name for item in api.run_state)),
    ]
    if api.wrapper_state:
        names_there = ", ".join(item.name for item in api.wrapper_state)
        facts.append(("read by run of the wrapper", names_there))
    facts += [
        ("copies to the device", copier_text(api)),
        ("int32 checked by plan", "yes" if api.int32_checked else "no"),
        ("public update", update_text(api)),
    ]
    return (*facts, *(("not found", sentence) for sentence in api.missing))


def derived_facts(api: PlanApi) -> tuple[tuple[str, str], ...]:
    """That an era is not known, and what was derived instead, as (label, text) pairs; empty where
    it is known."""
    if not api.derived:
        return ()
    return (("era", api.era_text), *(("derived", sentence) for sentence in api.derived))


def call_text(api: PlanApi) -> str:
    """The private call in one line, each argument with what FlashInfer passes for it."""
    call = api.call
    result = "plan_info" if call.returns == "plan_info" else "(plan_info, staged bytes)"
    return f"{call.method}({', '.join(argument_texts(api))}) -> {result}"


def argument_texts(api: PlanApi) -> tuple[str, ...]:
    """The arguments of the private call: mlagen's name for one, and FlashInfer's text."""
    call = api.call
    if call.derived:
        return call.arguments
    names = [*PLANNER_ARGUMENTS, *(["stream"] if call.takes_stream else [])]
    return tuple(
        name if name == text else f"{name}={text}"
        for name, text in zip(names, call.arguments, strict=True)
    )


def holder_text(api: PlanApi) -> str:
    """Where the state of a plan lives."""
    if api.holder == "wrapper":
        return "on the wrapper"
    return "on wrapper._planned_backend, which an eager plan replaces"


def copier_text(api: PlanApi) -> str:
    """Who copies a plan to the device."""
    copier = (
        "the C++ planner, from the pinned buffer of the wrapper: plans ahead need staging"
        if api.planner_copies
        else "FlashInfer's Python, from pinned memory of its own"
    )
    if api.raw_module:
        copier += f"; plans go below it, to {api.raw_module}.plan, and are staged once"
    return copier


def update_text(api: PlanApi) -> str:
    """The public update of a captured graph's plan, and what it is given."""
    if api.update is None:
        return f"{api.public_update}, not used" if api.public_update else "none"
    arrays = ", ".join(name for name, _ in api.update.arrays)
    return f"{api.update.method}(metadata={api.update.metadata}.csr({arrays}))"
