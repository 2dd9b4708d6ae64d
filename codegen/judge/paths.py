"""Where each step of a `flashinfer_mla_backend.py` waits for the GPU, by the calls that lead there.

The back end is made, a graph is captured, and the graph is replayed, as SGLang does, all of it by
following the source (`flow/`): so a plan that the capture put on a wrapper is the one that the
replay meets, and arrays are on the device or the host as the lines before leave them. What comes
from outside the file (a forward batch, the inputs of speculation) is known by its names alone.
Context parallelism is off, verify inputs are EAGLE's, an extend has a prefix.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from ..flashinfer.syntax import ClassView, Module, Modules
from ..flashinfer.syntax import Found as Defined
from ..flashinfer.waits import Arrays, StockWaits
from ..flashinfer.waits import Mode as PlanMode
from ..flow.follow import Follower
from ..flow.state import Found, TooFar, Walker, count, count_least
from ..flow.tensors import Kind
from ..flow.values import (
    ANYTHING,
    NONE,
    ON_DEVICE,
    ON_HOST,
    Arguments,
    Device,
    Known,
    Library,
    Object,
    Unset,
    Value,
    on_device,
    options,
)
from .roles import is_host
from .source import BACKEND_CLASS, Source

#: What a step is for. `draft-extend-v1`: as the first speculative worker did it (to 0.5.13).
Step: TypeAlias = Literal[
    "start-up", "decode", "draft-decode", "verify", "draft-extend", "draft-extend-v1"
]
#: When it runs.
Occasion: TypeAlias = Literal["start-up", "capture", "replay", "eager"]

_CHAIN_CLASS = "FlashInferMLAMultiStepDraftBackend"
_WRAPPER = "BatchMLAPagedAttentionWrapper"
_CAPTURE, _REPLAY = (
    "init_forward_metadata_capture_cuda_graph",
    "init_forward_metadata_replay_cuda_graph",
)
_OUT_GRAPH, _EAGER = "init_forward_metadata_out_graph", "init_forward_metadata"

#: The tests of ForwardMode that a step answers with yes.
_YES: dict[Step, frozenset[str]] = {
    "start-up": frozenset(),
    "decode": frozenset({"is_decode", "is_decode_or_idle"}),
    "draft-decode": frozenset({"is_decode", "is_decode_or_idle"}),
    "verify": frozenset({"is_target_verify", "is_extend"}),
    "draft-extend": frozenset({"is_draft_extend_v2", "is_extend"}),
    "draft-extend-v1": frozenset({"is_draft_extend", "is_extend"}),
}
#: The same for a mode that the file names itself.
_MEMBERS: dict[str, Step] = {
    "DECODE": "decode",
    "TARGET_VERIFY": "verify",
    "DRAFT_EXTEND": "draft-extend-v1",
    "DRAFT_EXTEND_V2": "draft-extend",
}
_STEPS: tuple[Step, ...] = ("decode", "draft-decode", "verify", "draft-extend", "draft-extend-v1")
_ON_DEVICE = re.compile(
    r"(indptr|indices|seq_lens|kv_lens|prefix_lens|kernel_lens|len_arr|req_to_token|positions"
    r"|out_cache_loc|_buf|q_indptr_decode|accept_length|extend_lens)$"
)
#: Off, or absent, in the steps that are followed.
_ABSENT = ("attn_dcp_metadata", "ragged_verify_layout", "encoder_lens", "kv_indices_buf")


#: What the source leaves open where a capture puts a plan on its wrapper on one way only.
_INSTALLED = ast.parse("the_capture_installed_a_plan", mode="eval").body


@dataclass(frozen=True)
class PathWait:
    """One wait on the way of one step.

    `way`: the calls to it, outermost first. `times`: how often in one step (of a draft chain: in
    one of its steps). `condition`: what the source does not decide; empty: always. `ours`: mlagen
    wrote the line.
    """

    step: Step
    occasion: Occasion
    line: int
    where: str
    way: tuple[str, ...]
    expression: str
    kind: Kind
    times: int = 1
    condition: str = ""
    ours: bool = False


@dataclass(frozen=True)
class StepWaits:
    """One step of the file with its waits. `count` and `least`: of one step, on the way that waits
    most, and on the one that waits least, of those that the source leaves open. `followed`: whether
    it could be followed to its end; where not, nothing is known of its waits."""

    step: Step
    occasion: Occasion
    waits: tuple[PathWait, ...]
    count: int
    least: int
    followed: bool = True


def step_waits(source: Source, stock: StockWaits | None) -> tuple[StepWaits, ...]:
    """Each step that the file has, in reading order.

    Args:
        stock: the waits of FlashInfer's own plan; None counts such a plan as one wait.
    """
    modules = _OneFile(source)
    found: list[StepWaits] = []
    for step in _STEPS:
        found += _Walk(source, modules, stock, step).steps()
    starts = _Walk(source, modules, stock, "start-up").start_up()
    return (*starts, *found)


class _OneFile(Modules):
    """The file as a package of one module."""

    def __init__(self, source: Source) -> None:
        self.module = Module("backend", source.path, source.tree)

    def get(self, name: str) -> Module | None:
        return self.module if name == self.module.name else None

    def find(self, module: str, name: str) -> Defined | None:
        nodes = self.module.definitions.get(name, [])
        return Defined(self.module, nodes[-1]) if nodes else None


class _Walk:
    """Follows one step; also what is known around the file while it does."""

    def __init__(
        self, source: Source, modules: _OneFile, stock: StockWaits | None, step: Step
    ) -> None:
        self._source = source
        self._modules = modules
        self._stock = stock
        self._step = step
        self._follower = Follower(modules, self)
        self._mode = self._follower.make("forward mode")
        self._spec = self._follower.make(
            "spec info",
            spec_input_type=Library("?.SpecInputType.EAGLE_VERIFY"),
            draft_token_num=Known(4),
            num_tokens_per_req=Known(4),
        )

    # --- the order of things ------------------------------------------------------------------

    def start_up(self) -> list[StepWaits]:
        made = self._noted("start-up", self._backend)
        return [made] if made is not None and (made.waits or not made.followed) else []

    def steps(self) -> list[StepWaits]:
        backend: Object | None = None

        def make() -> None:
            nonlocal backend
            backend = self._backend()

        made = self._noted("start-up", make)
        if made is None or not made.followed or backend is None:
            return []  # start_up() tells
        view = backend.view
        assert view is not None
        entries: list[tuple[Occasion, str, Arguments]] = []
        if view.method(_OUT_GRAPH) is not None:
            for occasion, value in (("capture", True), ("replay", False)):
                given = Arguments(keywords={"in_capture": Known(value)})
                entries.append((occasion, _OUT_GRAPH, given))  # type: ignore[arg-type]
        else:
            entries.append(("capture", _CAPTURE, Arguments()))
            entries.append(("replay", _REPLAY, Arguments()))
        entries.append(("eager", _EAGER, Arguments()))
        found = []
        for occasion, name, given in entries:
            if view.method(name) is None or not self._has(occasion):
                continue
            on = backend
            result = self._noted(occasion, lambda on=on, n=name, g=given: self._call(on, n, g))  # type: ignore[misc]
            if result is not None:
                found.append(result)
        return found

    def _has(self, occasion: Occasion) -> bool:
        """Draft-extend of the first worker exists where the file tests for it; the second's has
        no graph here."""
        tests = {node.attr for node in self._source.attributes}
        if self._step not in ("decode", "draft-decode") and "is_target_verify" not in tests:
            return False  # no speculation
        if self._step == "draft-extend-v1":
            return "is_draft_extend" in tests
        if self._step == "draft-extend":
            return occasion == "eager"
        return True

    def _call(self, on: Object, name: str, given: Arguments) -> None:
        self._follower.call(on, name, given)

    def _backend(self) -> Object | None:
        name = _CHAIN_CLASS if self._step == "draft-decode" else BACKEND_CLASS
        defined = self._modules.find("backend", name)
        if defined is None or not isinstance(defined.node, ast.ClassDef):
            return None
        view = ClassView(self._modules, defined)
        made = self._follower.create(view, Arguments())
        if view.method("init_cuda_graph_state") is not None:
            self._follower.call(made, "init_cuda_graph_state", Arguments())
        return made

    def _noted(self, occasion: Occasion, work: Callable[[], object]) -> StepWaits | None:
        """What `work` waits for; None where all its ways end in an error: there is no such step."""
        self._follower.waits.clear()
        try:
            work()
        except (TooFar, RecursionError):
            return StepWaits(self._step, occasion, (), 0, 0, followed=False)
        if self._follower.failed:
            return None
        found = tuple(wait for wait in self._follower.waits if wait.kind != "pageable-copy")
        waits = tuple(self._wait(occasion, wait) for wait in self._follower.waits)
        return StepWaits(self._step, occasion, _merged(waits), count(found), count_least(found))

    def _wait(self, occasion: Occasion, wait: Found) -> PathWait:
        regions = self._source.regions
        conditions = [str(condition) for condition in wait.conditions]
        if wait.repeated and self._step != "draft-decode":
            conditions.append("once a round of a loop")
        return PathWait(
            self._step,
            occasion,
            wait.line,
            wait.way[-1] if wait.way else "",
            wait.way,
            wait.expression,
            wait.kind,
            wait.times,
            " and ".join(dict.fromkeys(conditions)),
            any(first < wait.line < last for first, last in regions),
        )

    # --- what is around the file --------------------------------------------------------------

    def named(self, name: str) -> Value | None:
        """What is known by its name."""
        if name == "forward_mode":
            return self._mode
        if name == "spec_info":
            return NONE if self._step == "decode" else self._spec
        if name in _ABSENT:
            return NONE
        if name in ("dcp_enabled", "skip_prefill"):
            return Known(False)
        if name == "device":
            return Device("device")
        if name == "needs_cpu_seq_lens":
            return Known(True)
        if is_host(name):
            return ON_HOST
        return ON_DEVICE if _ON_DEVICE.search(name) else None

    def answer(
        self, follower: Walker, on: Value | None, name: str, given: Arguments, node: ast.Call
    ) -> Value | None:
        """Wrappers and their plans, the tests of a forward mode, whether there is a prefix."""
        if on is None:
            if name == _WRAPPER:
                return follower.make(
                    "wrapper", graph=given.get(1, "use_cuda_graph") or Known(False)
                )
            if name == "any" and node.args and "prefix_lens" in ast.unparse(node.args[0]):
                return Known(True)
            return None
        if on == self._mode:
            return Known(name in _YES[self._step]) if name.startswith("is_") else ANYTHING
        if isinstance(on, Library) and ".ForwardMode." in on.name and name.startswith("is_"):
            member = _MEMBERS.get(on.name.rpartition(".")[2])
            return Known(name in _YES[member]) if member is not None else None
        if not isinstance(on, Object) or on.label != "wrapper":
            return None
        if name not in ("plan", "begin_forward"):
            return None
        installed = follower.attribute(on, "plan")
        if installed is None:
            self._stock_plan(follower, on, given, node)
            return NONE
        if Unset() in options(installed):
            with follower.supposing(_INSTALLED, False, follower.number()):
                self._stock_plan(follower, on, given, node)
        return None

    def _stock_plan(
        self, follower: Walker, wrapper: Object, given: Arguments, node: ast.Call
    ) -> None:
        names = ("qo_indptr", "kv_indptr", "kv_len_arr")
        values = [
            value
            for position, name in zip((0, 1, 3), names, strict=True)
            if (value := given.get(position, name, f"{name}_cpu")) is not None
        ]
        unsure = next((value for value in values if on_device(value) is None), None)
        sure = any(on_device(value) for value in values)
        arrays: Arrays = "device" if sure or unsure is not None else "host"
        graph = follower.attribute(wrapper, "graph")
        mode: PlanMode = "graph" if graph == Known(True) else "eager"
        times = None if self._stock is None else self._stock.count(mode, arrays)
        if times is None:
            times = 1 if arrays == "device" else 0
        if times:
            maybe = None if sure else unsure
            follower.wait("stock-plan", node.func, maybe=maybe, times=times)


def _merged(waits: Sequence[PathWait]) -> tuple[PathWait, ...]:
    """Each wait once, in the order of the way."""
    return tuple(dict.fromkeys(waits))
