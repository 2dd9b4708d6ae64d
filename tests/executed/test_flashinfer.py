"""The stand-in for FlashInfer takes, refuses and costs what the real one does."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from mlagen.codegen.fetch import WheelTree, fetch

from .device import Gpu
from .flashinfer import FlashInfer, PlannerMisuseError, plan_info

WRAPPER_FILES = (
    "flashinfer/mla/_batch_mla/_wrapper.py",
    "flashinfer/mla/_core.py",
    "flashinfer/mla.py",
)
REAL = ("0.5.0", "0.6.7.post2", "0.6.12", "0.6.17", "0.7.2", "0.7.4")


class World:
    """A stand-in release with one wrapper; `arrays` are those of a batch of decodes."""

    def __init__(self, version: str, *, graph: int | None = None, fa: str = "fa3") -> None:
        self.gpu = Gpu()
        self.fi = FlashInfer(version, self.gpu, backend=fa)
        with self.gpu.running():
            workspace = torch.empty(1024, dtype=torch.uint8, device="cuda")
            buffers: dict[str, Any] = {}
            if graph is not None:
                buffers = {
                    "use_cuda_graph": True,
                    "qo_indptr": self._zeros(graph + 1),
                    "kv_indptr": self._zeros(graph + 1),
                    "kv_indices": self._zeros(256),
                    "kv_len_arr": self._zeros(graph),
                }
            self.wrapper: Any = self.fi.wrapper_class(workspace, **buffers)

    @staticmethod
    def _zeros(n: int) -> torch.Tensor:
        return torch.zeros(n, dtype=torch.int32, device="cuda")

    def arrays(self, lens: list[int], device: str = "cuda") -> tuple[torch.Tensor, ...]:
        """qo_indptr, kv_indptr, kv_indices (always on the device), kv_len."""
        with self.gpu.running(), self.gpu.aside():
            kv = torch.tensor(lens, dtype=torch.int32, device=device)
            indptr = torch.zeros(len(lens) + 1, dtype=torch.int32, device=device)
            indptr[1:] = torch.cumsum(kv, dim=0)
            qo = torch.arange(len(lens) + 1, dtype=torch.int32, device=device)
            indices = torch.arange(sum(lens), dtype=torch.int32, device="cuda")
            return qo, indptr, indices, kv

    def plan(self, lens: list[int], device: str = "cuda", **changed: Any) -> None:
        qo, indptr, indices, kv = self.arrays(lens, device)
        named: dict[str, Any] = {
            "qo_indptr": qo,
            "kv_indptr": indptr,
            "kv_indices": indices,
            "kv_len_arr": kv,
            "num_heads": 16,
            "head_dim_ckv": 512,
            "head_dim_kpe": 64,
            "page_size": 1,
            "causal": False,
            "sm_scale": 0.1,
            "q_data_type": torch.bfloat16,
            "kv_data_type": torch.bfloat16,
        }
        with self.gpu.running():
            self.wrapper.plan(**{**named, **changed})

    def planner_arguments(self, lens: list[int]) -> list[Any]:
        """What a fast plan hands to the planner."""
        qo, indptr, _, kv = self.arrays(lens, "cpu")
        w = self.wrapper
        return [
            w._float_workspace_buffer,
            w._int_workspace_buffer,
            w._pin_memory_int_workspace_buffer,
            qo,
            indptr,
            kv,
            16,
            512,
            False,
        ]

    def private_plan(self, lens: list[int]) -> None:
        """The call that a fast plan makes."""
        arguments = self.planner_arguments(lens)
        with self.gpu.running():
            self.wrapper._cached_module.plan(*arguments)


def _real_methods(version: str) -> dict[str, list[str]]:
    """name -> parameters of the wrapper's methods in the real package (the last definition)."""
    tree = WheelTree(fetch(f"flashinfer-python=={version}"))
    text = next(
        data
        for data in map(tree.read, WRAPPER_FILES)
        if data is not None and (b"class BatchMLAPagedAttentionWrapper" in data)
    )
    found: dict[str, list[str]] = {}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef) and node.name == "BatchMLAPagedAttentionWrapper":
            for method in node.body:
                if isinstance(method, ast.FunctionDef):
                    found[method.name] = [a.arg for a in method.args.args]
    return found


@pytest.mark.parametrize("version", REAL)
def test_signatures_are_the_real_ones(version: str) -> None:
    real = _real_methods(version)
    own = FlashInfer(version, Gpu()).wrapper_class
    for name in ("__init__", "plan"):
        code = getattr(own, name).__code__
        assert list(code.co_varnames[: code.co_argcount]) == real[name]


@pytest.mark.parametrize(
    ("version", "device", "waits"),
    [
        ("0.2.3", "cuda", 3),
        ("0.5.0", "cuda", 3),
        ("0.6.17", "cuda", 3),
        ("0.7.0", "cuda", 6),
        ("0.7.2", "cuda", 10),
        ("0.7.4", "cuda", 13),
        ("0.6.17", "cpu", 0),
        ("0.7.2", "cpu", 0),
        ("0.7.4", "cpu", 2),
    ],
)
def test_waits_of_a_stock_plan(version: str, device: str, waits: int) -> None:
    world = World(version)
    world.plan([3, 5], device)
    assert len(world.gpu.take_waits()) == waits
    (record,) = world.fi.records
    assert record.arrays == ([0, 1, 2], [0, 3, 8], [3, 5])
    assert record.stock
    assert record.wrapper is world.wrapper


@pytest.mark.parametrize("version", ["0.6.17", "0.7.2"])
def test_a_private_plan_does_not_wait(version: str) -> None:
    world = World(version, graph=2)
    world.plan([3, 5])
    graph = world.fi.capture(world.wrapper)
    world.gpu.take_waits()
    world.private_plan([4, 6])
    assert world.gpu.take_waits() == ()
    assert world.fi.records[-1].arrays == ([0, 1, 2], [0, 4, 10], [4, 6])
    assert not world.fi.records[-1].stock
    launch = world.fi.launch(graph)
    assert launch.plan is world.fi.records[-1]
    assert launch.grid_fits


@pytest.mark.parametrize(("version", "races"), [("0.6.18", True), ("0.7.2", False)])
def test_two_plans_ahead_of_a_busy_device(version: str, races: bool) -> None:
    world = World(version, graph=2)
    world.plan([3, 5])
    graph = world.fi.capture(world.wrapper)
    with world.gpu.hold():
        world.private_plan([4, 6])
        first = world.fi.launch(graph)
        world.private_plan([7, 8])
        second = world.fi.launch(graph)
    assert second.plan is world.fi.records[-1]
    assert (first.plan is not world.fi.records[-2]) == races


def test_an_unplanned_workspace_is_no_plan() -> None:
    world = World("0.6.17", graph=2)
    world.plan([3, 5])
    graph = world.fi.capture(world.wrapper)
    graph.int_workspace.zero_()
    with pytest.raises(PlannerMisuseError, match="holds no plan"):
        world.fi.launch(graph)


@pytest.mark.parametrize(
    ("version", "module", "arguments"),
    [("0.2.3", "plan", 10), ("0.2.5", "default", 9), ("0.6.17", "plan", 9), ("0.7.2", "plan", 9)],
)
def test_the_private_call_of_each_era(version: str, module: str, arguments: int) -> None:
    world = World(version)
    world.plan([3])
    plan = world.wrapper._cached_module.plan
    call = getattr(plan, "default", plan)
    assert hasattr(plan, "default") == (module == "default")
    with pytest.raises(TypeError, match=f"takes {arguments} arguments, 2 given"):
        call(1, 2)
    assert hasattr(world.wrapper._cached_module, "plan_with_staged_workspace_bytes") == (
        version == "0.7.2"
    )


def test_the_state_of_0_7_is_on_the_back_end() -> None:
    eager, graph = World("0.7.2"), World("0.7.2", graph=2)
    with pytest.raises(RuntimeError, match="before plan"):
        eager.fi.run(eager.wrapper, rows=2, heads=16, pool_size=256)
    assert not hasattr(eager.wrapper, "_cached_module")
    for world, keeps in ((eager, False), (graph, True)):
        world.plan([3, 5])
        first = world.wrapper._planned_backend
        world.plan([4, 6])
        second = world.wrapper._planned_backend
        assert second is not first
        assert (first._int_workspace_buffer is second._int_workspace_buffer) == keeps
        assert world.wrapper._int_workspace_buffer is second._int_workspace_buffer
        assert world.wrapper._backend == "fa3"


def test_0_7_4_runs_only_what_was_planned() -> None:
    world = World("0.7.4")
    world.plan([3, 5])
    world.fi.run(world.wrapper, rows=2, heads=16, pool_size=256)
    with pytest.raises(ValueError, match="must match the planned query shape"):
        world.fi.run(world.wrapper, rows=3, heads=16, pool_size=256)
    with pytest.raises(ValueError, match="does not cover"):
        world.fi.run(world.wrapper, rows=2, heads=16, pool_size=7)


def test_0_7_refuses_lengths_that_the_offsets_deny() -> None:
    wrong = torch.tensor([3, 4], dtype=torch.int32)
    World("0.6.17").plan([3, 5], "cpu", kv_len_arr=wrong)
    with pytest.raises(ValueError, match="must equal ceil"):
        World("0.7.2").plan([3, 5], "cpu", kv_len_arr=wrong)
    with pytest.raises(ValueError, match=r"has 8 entries but kv_indptr\[-1\] is 9"):
        World("0.7.2").plan([3, 6], "cpu", kv_indices=torch.zeros(8, dtype=torch.int32))


def test_unknown_arguments_are_refused() -> None:
    with pytest.raises(TypeError, match="qo_indptr_cpu"):
        World("0.6.17").plan([3], qo_indptr_cpu=None)
    World("0.6.17").plan([3], use_profiler=False)


def _misuses() -> Iterator[tuple[str, int, Any]]:
    yield "not pinned", 2, torch.empty(8 << 20, dtype=torch.uint8)
    yield "not in device memory", 1, torch.empty(8 << 20, dtype=torch.uint8)
    yield "fewer than 3 items", 4, torch.tensor([0, 3], dtype=torch.int32)


@pytest.mark.parametrize(("message", "position", "value"), list(_misuses()))
def test_misuse(message: str, position: int, value: Any) -> None:
    world = World("0.6.17")
    world.plan([3, 5])
    arguments = world.planner_arguments([3, 5])
    arguments[position] = value
    with world.gpu.running(), pytest.raises(PlannerMisuseError, match=message):
        world.wrapper._cached_module.plan(*arguments)


def test_misuse_with_what_lies_on_the_device_or_is_too_small() -> None:
    world = World("0.6.17")
    world.plan([3, 5])
    w = world.wrapper
    spaces = (w._float_workspace_buffer, w._int_workspace_buffer)
    qo, indptr, _, kv = world.arrays([3, 5], "cpu")
    with world.gpu.running():
        small = torch.empty(592_463, dtype=torch.uint8, pin_memory=True)
        with pytest.raises(PlannerMisuseError, match="writes 592464 bytes past the pinned"):
            w._cached_module.plan(*spaces, small, qo, indptr, kv, 16, 512, False)
        pinned = w._pin_memory_int_workspace_buffer
        with pytest.raises(PlannerMisuseError, match="kv_len is in device memory"):
            w._cached_module.plan(*spaces, pinned, qo, indptr, w._kv_len_arr_buf, 16, 512, False)


def test_int64_is_misread_on_fa3_and_refused_on_fa2() -> None:
    qo = torch.tensor([0, 1, 2])
    fa3 = World("0.6.17")
    fa3.plan([3, 5], "cpu", qo_indptr=qo)
    assert fa3.fi.records[-1].qo_indptr == [0, 0, 1]
    assert fa3.fi.records[-1].dtypes[0] == torch.int64
    with pytest.raises(RuntimeError, match="int32"):
        World("0.6.17", fa="fa2").plan([3, 5], "cpu", qo_indptr=qo)


@pytest.mark.parametrize(
    ("tokens", "heads", "cluster"), [(1, 16, 1), (4, 16, 1), (5, 16, 2), (1, 128, 2), (1, 64, 1)]
)
def test_plan_info(tokens: int, heads: int, cluster: int) -> None:
    info = plan_info([0, tokens, 2 * tokens], heads)
    assert len(info) == 18
    assert info[:2] == [cluster, 132 // cluster]
    # Three arrays of work items, five of clusters, six of work items again.
    assert info[2:5] == [0, 65536, 131072]
    assert info[5:7] == [196608, 197136]
    assert info[15] + 65536 == 9 * 65536 + 5 * 528
