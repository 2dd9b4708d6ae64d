"""The cases of one release, which MLAGEN_GPU_RELEASE names; `test_backend.py` runs them.

Not collected by itself: releases share the package name `sglang`, so each needs a process of its
own. By hand:

    MLAGEN_GPU_RELEASE=0.5.17 python -m pytest tests/gpu/backend/cases.py
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version

from . import driving
from .batches import LONGEST, Batch, Batches, lengths
from .driving import Backends, Eager, Graph, Mode
from .model import MAX_REQUESTS, Model
from .release import Loaded, load
from .server import configure
from .waits import counted, stays_busy

RELEASE = os.environ.get("MLAGEN_GPU_RELEASE", "")
REPLAYS = 6
#: Rows of a graph, and requests that fill them.
SIZES = ((1, 1), (8, 8), (8, 5), (64, 64), (64, 49))


@dataclass(frozen=True)
class World:
    """A loaded release: the back ends of the file as released and of the patched ones.

    patched: by the shipped spec. device: its graphs are planned on the GPU.
    """

    loaded: Loaded
    model: Model
    batches: Batches
    stock: Backends
    patched: Backends
    device: Backends


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    folder: Path = tmp_path_factory.mktemp("sglang")
    random.seed(0)
    torch.manual_seed(0)
    loaded = load(RELEASE, folder)
    model = Model(configure())
    batches = Batches(RELEASE, model)
    stock, patched = Backends(loaded.stock, model), Backends(loaded.patched, model)
    device = Backends(loaded.device, model, told=False)
    return World(loaded, model, batches, stock, patched, device)


def _same(outputs: list[torch.Tensor], expected: list[torch.Tensor], batch: Batch) -> bool:
    """Whether all steps agree, bit for bit, in the rows of real requests."""
    tokens = batch.real_tokens
    return all(
        torch.equal(out[:tokens], true[:tokens])
        for out, true in zip(outputs, expected, strict=True)
    )


def _prefixes(real: int, turn: int) -> list[int]:
    """Random lengths; each of the special ones comes first once."""
    prefix = lengths(real)
    prefix[0] = (1, 63, 64, 65, LONGEST, 200)[turn % 6]
    return prefix


def _replays(
    world: World, mode: Mode, driver: Graph | Eager, rows: int, real: int, *, poisoned: bool = False
) -> list[bool]:
    """Whether each of the replays, with the GPU idle before it, computed the truth.

    poisoned: with the plan of the replay before overwritten.
    """
    right = []
    for turn in range(REPLAYS):
        batch = mode.make(world.batches, _prefixes(real, turn), rows if mode.graph else real)
        queries = driver.fresh_queries(batch)
        expected = mode.expected(world.model, batch, queries)
        if poisoned:
            assert isinstance(driver, Graph)
            driver.poison()  # a plan is made behind this, by `plan` or by the graph
        torch.cuda.synchronize()
        driver.plan(batch)
        outputs = driver.run(batch)
        torch.cuda.synchronize()
        right.append(_same(outputs, expected, batch))
    return right


def _compare(world: World, mode: Mode, *, stock_is_right: bool) -> None:
    for rows, real in SIZES:
        if rows != real and not mode.graph:
            continue
        patched = driving.driver(world.patched, world.batches, mode, rows)
        assert all(_replays(world, mode, patched, rows, real)), f"patched, {real} of {rows} rows"
        stock = driving.driver(world.stock, world.batches, mode, rows)
        right = _replays(world, mode, stock, rows, real)
        if stock_is_right:
            assert all(right), f"as released, {real} of {rows} rows"
        else:
            assert not any(right), f"as released, {real} of {rows} rows: no defect seen: {right}"


def test_decode_graph(world: World) -> None:
    _compare(world, driving.DECODE, stock_is_right=True)


def test_verify_graph(world: World) -> None:
    _compare(world, driving.VERIFY, stock_is_right=True)


def test_draft_chain_graph(world: World) -> None:
    """As released, steps are planned for the prefix alone, which loses their newest tokens."""
    _compare(world, driving.DRAFT, stock_is_right=False)


def test_eager_draft_chain(world: World) -> None:
    _compare(world, driving.EAGER_DRAFT, stock_is_right=False)


def test_eager_verify(world: World) -> None:
    _compare(world, driving.EAGER_VERIFY, stock_is_right=True)


def test_eager_draft_extend(world: World) -> None:
    _compare(world, driving.DRAFT_EXTEND, stock_is_right=True)


def test_eager_draft_extend_v1(world: World) -> None:
    if not _has_v1():
        pytest.skip("this release has no DRAFT_EXTEND any more")
    _compare(world, driving.DRAFT_EXTEND_V1, stock_is_right=True)


def _has_v1() -> bool:
    return Version(RELEASE) < Version("0.5.13")


def _modes() -> list[Mode]:
    modes = [
        driving.DECODE,
        driving.VERIFY,
        driving.DRAFT,
        driving.DRAFT_EXTEND,
        driving.EAGER_VERIFY,
        driving.EAGER_DRAFT,
    ]
    return [*modes, driving.DRAFT_EXTEND_V1] if _has_v1() else modes


def _waits(world: World, backends: Backends, mode: Mode) -> tuple[int, list[str], bool]:
    """Waits of one step's planning, where they are, and whether it waited for a busy GPU."""
    rows = 8
    driver = driving.driver(backends, world.batches, mode, rows)
    made = [mode.make(world.batches, _prefixes(rows, turn), rows) for turn in range(3)]
    for batch in made:
        driver.fresh_queries(batch)
    driver.plan(made[0])
    driver.run(made[0])
    torch.cuda.synchronize()
    with counted() as waits:
        driver.plan(made[1])
    busy = stays_busy(lambda: driver.plan(made[2]))
    return waits.count, waits.places, not busy


def test_waits(world: World, record_property: Callable[[str, object], None]) -> None:
    """No mode waits once patched; up to 0.5.17 verify and draft-extend did."""
    lines, failures = [], []
    for mode in _modes():
        before, _, before_waited = _waits(world, world.stock, mode)
        after, places, after_waited = _waits(world, world.patched, mode)
        lines.append(
            f"{RELEASE:8} {mode.name:24} {before:6} {_yes(before_waited):>8} "
            f"{after:6} {_yes(after_waited):>8}"
        )
        if after or after_waited:
            failures.append(f"{mode.name}: {after} waits at {places}, waited: {after_waited}")
        if mode in _waiting_as_released() and not (before and before_waited):
            failures.append(f"{mode.name}: as released it does not wait, so the test sees nothing")
    record_property("waits", "\n".join(lines))
    assert not failures, "\n".join(failures)


def _yes(value: bool) -> str:
    return "waits" if value else "-"


def _waiting_as_released() -> list[Mode]:
    """From 0.5.18 on SGLang plans verify graphs and draft-extend from host arrays itself."""
    if Version(RELEASE) >= Version("0.5.18"):
        return [driving.EAGER_VERIFY]
    return [driving.VERIFY, driving.EAGER_VERIFY, driving.DRAFT_EXTEND]


def _runs_ahead(world: World, backends: Backends, mode: Mode) -> None:
    """Six steps planned and launched behind a busy GPU: every output is its own."""
    rows = MAX_REQUESTS
    driver = driving.driver(backends, world.batches, mode, rows)
    made = [mode.make(world.batches, _prefixes(rows, turn), rows) for turn in range(REPLAYS)]
    for batch in made:
        driver.fresh_queries(batch)
    expected = [mode.expected(world.model, batch, driver.fresh_queries(batch)) for batch in made]
    outputs: list[list[torch.Tensor]] = []

    def step_all() -> None:
        outputs.clear()
        for batch in made:
            driver.plan(batch)
            outputs.append(driver.run(batch))

    def right() -> list[bool]:
        return [_same(*each) for each in zip(outputs, expected, made, strict=True)]

    step_all()  # memory that is allocated while the GPU is busy may be waited for
    assert all(right()), f"where memory grows: {right()}"
    assert stays_busy(step_all), "the host waited for the GPU"
    assert all(right()), right()


@pytest.mark.parametrize("mode", _modes() if RELEASE else [], ids=lambda mode: mode.name)
def test_the_host_may_run_ahead(world: World, mode: Mode) -> None:
    _runs_ahead(world, world.patched, mode)


def test_verify_indices_are_filled_in_place(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """By SGLang's own index kernel; the plan finds nothing to copy."""
    module = world.patched.module
    if not hasattr(module, "mlagen_bound_arrays"):
        pytest.skip(
            "this release fills by a method, maybe by several blocks a request: the plan copies"
        )
    right: Callable[..., Any] = module.mlagen_bound_arrays
    given: list[Any] = []

    def noted(*args: Any) -> Any:
        given.append(right(*args))
        return given[-1]

    monkeypatch.setattr(module, "mlagen_bound_arrays", noted)
    mode, rows = driving.VERIFY, 8
    graph = Graph(world.patched, world.batches, mode, rows)
    batch = mode.make(world.batches, _prefixes(rows, 1), rows)
    expected = mode.expected(world.model, batch, graph.fresh_queries(batch))
    graph.plan(batch)
    outputs = graph.run(batch)
    torch.cuda.synchronize()
    assert _same(outputs, expected, batch)
    (arrays,) = given
    (buffer,) = graph.index_buffers
    assert arrays.kv_indices is buffer


# -- graphs that the GPU plans, of which the host is told no lengths, or wrong ones ---------------

#: Mode -> its variant.
GRAPHS = {driving.DECODE: "decode", driving.VERIFY: "verify", driving.DRAFT: "draft-decode"}
GRAPH_MODES = pytest.mark.parametrize("mode", GRAPHS, ids=lambda mode: mode.name)


def _device_graph(world: World, mode: Mode, rows: int) -> Graph:
    graph = Graph(world.device, world.batches, mode, rows)
    assert all(graph.device_plans), f"{mode.name}, {rows} rows: planned on the host"
    return graph


@GRAPH_MODES
def test_device_graph(world: World, mode: Mode) -> None:
    for rows, real in SIZES:
        graph = _device_graph(world, mode, rows)
        right = _replays(world, mode, graph, rows, real, poisoned=True)
        assert all(right), f"{real} of {rows} rows: {right}"


@GRAPH_MODES
def test_device_graph_holds_its_plan(world: World, mode: Mode) -> None:
    """From 0.5.13 on SGLang lets a back end record into the graph."""
    recorded = [plan.recorded is not None for plan in _device_graph(world, mode, 8).device_plans]
    assert recorded == [Version(RELEASE) >= Version("0.5.13")] * len(recorded)


@GRAPH_MODES
def test_device_graph_waits(world: World, mode: Mode) -> None:
    waits, places, waited = _waits(world, world.device, mode)
    assert not waits, places
    assert not waited


@GRAPH_MODES
def test_device_graph_lets_the_host_run_ahead(world: World, mode: Mode) -> None:
    _runs_ahead(world, world.device, mode)


@GRAPH_MODES
def test_device_graph_tells_of_a_wrong_length(world: World, mode: Mode) -> None:
    """The GPU cannot raise: the replay ends, and the plan behind it does. Last in this file, as a
    CUDA error would be the end of all cases."""
    rows = 8
    graph = _device_graph(world, mode, rows)
    wrong, batch = (mode.make(world.batches, _prefixes(rows, turn), rows) for turn in (0, 5))
    expected = mode.expected(world.model, batch, graph.fresh_queries(batch))
    # Of the last row: SGLang's index kernels begin the next row's indices where this one's end.
    # Verify's goes by lengths that mlagen has looked at: one that it may be told is no matter.
    row, length = (0, 1 << 30) if mode is driving.VERIFY else (-1, -1)
    wrong.forward.seq_lens[row] = length
    told: list[str] = []
    # Each step of a draft chain has a plan of its own, and tells for itself; a launched one may
    # be told of by the plan of the next step.
    try:
        graph.plan(wrong)
        graph.run(wrong)
    except world.device.module.MlagenPlanError as error:
        told.append(str(error))
    torch.cuda.synchronize()
    while len(told) <= len(graph.device_plans):
        try:
            graph.plan(batch)
            break
        except world.device.module.MlagenPlanError as error:
            told.append(str(error))
    assert 1 <= len(told) <= len(graph.device_plans), told
    assert all(
        text.startswith(f"{GRAPHS[mode]}: in an earlier plan of the graph of ") for text in told
    ), told
    outputs = graph.run(batch)
    torch.cuda.synchronize()
    assert _same(outputs, expected, batch)
