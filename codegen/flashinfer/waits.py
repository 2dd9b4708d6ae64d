"""Where one `plan` of FlashInfer's own waits for the GPU: found by following its source.

The wrapper is made and planned twice, as SGLang does, and the second plan counts. What is followed:
the wrapper's `plan`, the back-end object that it plans with (FA2; what `read` knows is the same for
FA3), the helper functions of other modules, and the Python class that stages a plan. Not followed:
the C++ planner, which gets host arrays and an asynchronous copy in every release.

What measurements count is what torch's sync debug mode reports, see `flow/tensors.py`; so does
this. Ways that end in an exception are left out.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from ..errors import DriftError
from ..flow.follow import Follower
from ..flow.state import Found, TooFar, Walker, count
from ..flow.tensors import KINDS, Kind
from ..flow.values import NONE, ON_DEVICE, ON_HOST, Arguments, Known, Library, Tensor, Value
from . import eras
from .api import Place
from .find import FlashInferSource
from .planner import find_wrapper
from .syntax import ClassView, FunctionNode, Modules

#: Where the arrays of a plan are. SGLang's host arrays leave kv_indices on the device.
Arrays: TypeAlias = Literal["device", "host"]
#: Which plan: again for a captured graph, or for a step without one.
Mode: TypeAlias = Literal["graph", "eager"]

_ARRAYS: tuple[Arrays, ...] = ("device", "host")
_MODES: tuple[Mode, ...] = ("graph", "eager")
_INDPTRS = ("qo_indptr", "kv_indptr", "kv_len_arr")
#: The plan that is followed: one that was measured. Tests of these are decided by them.
_PLAN_CONSTANTS: Mapping[str, object] = {
    "num_heads": 16,
    "head_dim_ckv": 512,
    "head_dim_kpe": 64,
    "page_size": 1,
    "causal": True,
    "sm_scale": 1.0,
}


#: A wrapper made with backend="auto" asks this machine and, on some, the batch which back end to
#: take. Its first plan does, and each eager one; a captured graph keeps what it has.
_POLICY: tuple[Mode, Arrays] = ("eager", "device")
_POLICY_NOTE = "only where the wrapper chooses its back end (backend='auto'), on the GPUs named"


@dataclass(frozen=True)
class PlanWait:
    """One place where a stock plan waits.

    Attributes:
        place: file and line in FlashInfer.
        way: the calls from `plan` to it, outermost first.
        expression: source text of what waits.
        kind: how.
        when: the plans in which it waits, as (mode, where the arrays are).
        condition: what the source does not decide, such as a test of lengths; empty: always.
        times: how often, in one plan: the same calls may lead to it twice.
        counted: whether torch's sync debug mode reports it, and `StockWaits.count` has it.
        note: why it is not counted; empty where it is.
    """

    place: Place
    way: tuple[str, ...]
    expression: str
    kind: Kind
    when: tuple[tuple[Mode, Arrays], ...]
    condition: str = ""
    times: int = 1
    counted: bool = True
    note: str = ""


@dataclass(frozen=True)
class StockWaits:
    """The waits of FlashInfer's own plan.

    `counts`: of one plan, by mode and where the arrays are, on the way that waits most. `unknown`:
    why nothing could be told, empty where it could.
    """

    waits: tuple[PlanWait, ...] = ()
    counts: Mapping[tuple[Mode, Arrays], int] = field(default_factory=dict)
    unknown: str = ""

    def count(self, mode: Mode, arrays: Arrays) -> int | None:
        """The waits of one plan; None where they could not be told."""
        return self.counts.get((mode, arrays))


def find_waits(source: FlashInferSource) -> StockWaits:
    """The waits of `BatchMLAPagedAttentionWrapper.plan`.

    Never fails on a FlashInfer that `read_plan_api` takes: where the code cannot be followed,
    `unknown` says so. Raises DriftError where the wrapper class is not there.
    """
    modules = Modules(source)
    wrapper = find_wrapper(modules)
    runs: dict[tuple[Mode, Arrays], Sequence[Found]] = {}
    try:
        for mode in _MODES:
            for arrays in _ARRAYS:
                runs[mode, arrays] = _plan(modules, wrapper, mode, arrays, eras.FA_BACKENDS[0])
        policy = _plan(modules, wrapper, "eager", "device", "auto")
    except (TooFar, RecursionError) as error:
        return StockWaits(unknown=f"its plan is too long to be followed ({type(error).__name__})")
    except DriftError as error:  # a helper module that does not parse, a class defined twice
        return StockWaits(unknown=error.problems[0].message)
    return StockWaits(
        _merged(runs, policy),
        {key: count([w for w in found if _counted(w)]) for key, found in runs.items()},
    )


def _plan(
    modules: Modules, wrapper: ClassView, mode: Mode, arrays: Arrays, backend: str
) -> Sequence[Found]:
    follower = Follower(modules, _Builder(modules))
    device = _tensor("device")
    graph = mode == "graph"
    buffers = dict.fromkeys((*_INDPTRS, "kv_indices"), device if graph else NONE)
    made = follower.create(
        wrapper,
        Arguments(
            keywords={
                "float_workspace_buffer": device,
                "use_cuda_graph": Known(graph),
                "backend": Known(backend),
                **buffers,
            }
        ),
    )
    given: dict[str, Value] = {name: _tensor(arrays) for name in _INDPTRS}
    given["kv_indices"] = device
    given |= {name: Known(value) for name, value in _PLAN_CONSTANTS.items()}
    given |= dict.fromkeys(("q_data_type", "kv_data_type"), Library("torch.bfloat16"))
    for _ in range(2):
        follower.waits.clear()
        follower.call(made, "plan", Arguments(keywords=given))
    return tuple(follower.waits)


def _tensor(arrays: Arrays) -> Tensor:
    return ON_DEVICE if arrays == "device" else ON_HOST


class _Builder:
    """The planner's module: from 0.7.0 an instance of the Python class that stages plans."""

    def __init__(self, modules: Modules) -> None:
        self._modules = modules
        self._builds: dict[ast.AST, bool] = {}

    def named(self, name: str) -> Value | None:
        return None

    def answer(
        self, follower: Walker, on: Value | None, name: str, given: Arguments, node: ast.Call
    ) -> Value | None:
        if on is not None:
            return None
        found = self._modules.find(follower.module, name)
        if found is None or not isinstance(found.node, FunctionNode):
            return None
        if found.node not in self._builds:
            names = {part.id for part in ast.walk(found.node) if isinstance(part, ast.Name)}
            self._builds[found.node] = eras.MODULE_BUILDER in names
        if not self._builds[found.node]:
            return None
        view = self._proxy(found.module.name)
        return follower.make("module", view) if view is not None else None

    def _proxy(self, module: str) -> ClassView | None:
        builder = self._modules.find(module, eras.MODULE_BUILDER)
        if builder is None:
            return None
        named = {part.id for part in ast.walk(builder.node) if isinstance(part, ast.Name)}
        for name in sorted(named & builder.module.definitions.keys()):
            found = self._modules.find(builder.module.name, name)
            if found is not None and isinstance(found.node, ast.ClassDef):
                view = ClassView(self._modules, found)
                if view.method("plan") is not None:
                    return view
        return None


def _counted(wait: Found) -> bool:
    return wait.kind != "pageable-copy"


def _merged(
    runs: Mapping[tuple[Mode, Arrays], Sequence[Found]], policy: Sequence[Found]
) -> tuple[PlanWait, ...]:
    """One entry a place and way, with the plans that it waits in. `policy`: a plan of the wrapper
    that chooses its back end itself; what it adds is not counted."""
    found: dict[tuple[object, ...], tuple[Found, list[tuple[Mode, Arrays]]]] = {}
    for key, waits in runs.items():
        for wait in waits:
            found.setdefault(_identity(wait), (wait, []))[1].append(key)
    merged = [
        _plan_wait(wait, when, note="" if _counted(wait) else KINDS[wait.kind])
        for wait, when in found.values()
    ]
    known = {(wait.path, wait.line) for wait, _ in found.values()}
    extra = {_identity(wait): wait for wait in policy if (wait.path, wait.line) not in known}
    return (*merged, *(_plan_wait(wait, [_POLICY], note=_POLICY_NOTE) for wait in extra.values()))


def _identity(wait: Found) -> tuple[object, ...]:
    return (wait.path, wait.line, wait.expression, wait.kind, wait.way)


def _plan_wait(wait: Found, when: Sequence[tuple[Mode, Arrays]], *, note: str) -> PlanWait:
    conditions = [str(condition) for condition in wait.conditions]
    if wait.repeated:
        conditions.append("once a round of a loop")
    plans = tuple(dict.fromkeys(when))
    return PlanWait(
        Place(wait.path, wait.line),
        wait.way,
        wait.expression,
        wait.kind,
        plans,
        " and ".join(dict.fromkeys(conditions)),
        wait.times * max(when.count(plan) for plan in plans),
        not note,
        note,
    )
