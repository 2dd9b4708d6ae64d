"""The benchmark's scripts, as rendered for real FlashInfers: as code, and run on a GPU that is not
there, with FlashInfer's stand-in and a kernel that tells which plan and indices it read."""

from __future__ import annotations

import ast
import contextlib
import gc
import importlib
import itertools
import json
import random
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partialmethod
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from mlagen.codegen.bench import VERSION, read_results
from mlagen.codegen.gpu import PACKAGE
from mlagen.codegen.render import render
from mlagen.codegen.render_bench import (
    DEVICE_PACKAGE,
    MODULES,
    SCRIPT,
    bench_files,
    host_in_place,
    on_device,
)
from tests.releases import plan_api, shipped

torch = pytest.importorskip("torch")

VERSIONS = ("0.6.18", "0.7.2", "0.7.4")
BENCH = f"{PACKAGE}/bench/"
FREE = 5 << 27  # bytes of GPU memory: two caches of the larger pools here


@cache
def files(version: str) -> dict[str, bytes]:
    return bench_files(render(shipped(), plan_api(version)))


def write(version: str, folder: Path) -> Path:
    for name, data in files(version).items():
        place = folder / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(data)
    return folder


# -- as code ------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["0.5.3", *VERSIONS])
def test_scripts_are_formatted_and_linted(version: str, tmp_path: Path) -> None:
    folder = write(version, tmp_path) / BENCH
    ruff = [sys.executable, "-m", "ruff"]
    isolated = ["--isolated", "--line-length=88", "--target-version=py310", str(folder)]
    lint = [*ruff, "check", "--select=B,C4,E,F,I,N,PIE,RET,RUF,SIM,UP,W", *isolated]
    for command in ([*ruff, "format", "--check", *isolated], lint):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("version", VERSIONS)
def test_names_of_other_modules_exist(version: str) -> None:
    """What a script takes from its neighbours, from plans.py and from hooks.py."""
    trees = {
        f"device_{Path(name).stem}" if name.startswith(DEVICE_PACKAGE) else Path(name).stem: (
            ast.parse(data)
        )
        for name, data in files(version).items()
    }
    bound = {name: _bound(tree) for name, tree in trees.items()}
    for name in MODULES:
        for node in ast.walk(trees[name]):
            if isinstance(node, ast.ImportFrom) and node.module in trees:
                assert {alias.name for alias in node.names} <= bound[node.module], name
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                owner = node.value.id
                if owner in _MEASURED:
                    assert node.attr in bound[owner], f"{name}: {owner}.{node.attr}"


_MEASURED = (
    *("plans", "hooks", "device_plans", "device_hooks"),
    *("warm", "plan_cost", "spec_loop", "attention"),
)


def _bound(tree: ast.Module) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


def test_the_floor_is_the_planner_as_the_release_exposes_it() -> None:
    for version in VERSIONS:
        text = files(version)[f"{BENCH}contenders.py"].decode()
        assert "wrapper._cached_module.plan(*self._nine[id(inputs)])" in text
        staged = "staging proxy" in text
        assert staged is (version != "0.6.18")


@pytest.mark.parametrize("version", ["0.5.3", *VERSIONS])
def test_both_planners_are_there(version: str) -> None:
    """Decode, draft steps and verify by the GPU in one package, none in the other; and all that
    falls back to the host in both."""
    texts = {name: data.decode() for name, data in files(version).items()}
    assert "triton" not in texts[f"{PACKAGE}/plans.py"]
    assert "_mlagen_plan_kernel" in texts[f"{DEVICE_PACKAGE}/plans.py"]
    hooks = texts[f"{DEVICE_PACKAGE}/hooks.py"]
    assert hooks.count("_mlagen_onto_device(") == 1 + 2  # defined; called for decode and verify
    spec = on_device(shipped())
    planners = {variant.name: variant.planner for variant in spec.variants}
    by_device = {name for name, planner in planners.items() if planner == "device"}
    assert by_device == {"decode", "draft-decode", "verify"}
    for name in ("mlagen_plan_verify", "mlagen_plan_decode"):
        for package in (PACKAGE, DEVICE_PACKAGE):
            assert f"def {name}(" in texts[f"{package}/plans.py"]


@pytest.mark.parametrize("version", VERSIONS)
def test_the_kernel_is_called_with_what_it_takes(version: str) -> None:
    """By position, what `warm` makes up."""
    plans, warm = (
        ast.parse(files(version)[name])
        for name in (f"{DEVICE_PACKAGE}/plans.py", f"{BENCH}warm.py")
    )
    (kernel,) = (
        node
        for node in plans.body
        if isinstance(node, ast.FunctionDef) and node.name == "_mlagen_plan_kernel"
    )
    constants = [arg.arg for arg in kernel.args.args if arg.annotation is not None]
    (launch,) = (
        node
        for node in ast.walk(warm)
        if isinstance(node, ast.Call) and "_mlagen_plan_kernel" in ast.unparse(node.func)
    )
    given = [arg for arg in launch.args if not isinstance(arg, ast.Starred)]
    assert len(given) == len(kernel.args.args) - len(constants)


# -- run ----------------------------------------------------------------------------------------


def _run(wrapper: Any, fi: Any, query: Any, query_pe: Any, ckv: Any, kpe: Any, *, out: Any) -> None:
    """`run` of the stand-in: an output that is a function of the plan and the indices that the
    kernel reads when it comes to it."""
    launch = fi.run(wrapper, rows=query.shape[0], heads=query.shape[1], pool_size=ckv.shape[0])
    with torch._C.DisableTorchFunction():
        assert launch.plan is not None
        text = str((launch.plan.arrays, launch.tokens, launch.causal, launch.sm_scale))
        out.fill_(zlib.crc32(text.encode()) % 251)


class Graph:
    """A captured graph that runs its work again when it is replayed."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.replay = work


def _triton() -> tuple[ModuleType, ModuleType]:
    """As much of Triton as a module needs that defines kernels and launches none."""
    triton, language = ModuleType("triton"), ModuleType("triton.language")

    def jit(function: Any = None, **_: Any) -> Any:
        return function if function is not None else jit

    def next_power_of_2(number: int) -> int:
        return 1 << (number - 1).bit_length()

    language.constexpr = int  # type: ignore[attr-defined]
    vars(triton).update(
        jit=jit, __version__="3.6.0", next_power_of_2=next_power_of_2, language=language
    )
    return triton, language


def _kernel(gpu: Any, fi: Any) -> Callable[..., None]:
    """A launch of the planning kernel: what FlashInfer's planner would be given."""
    from tests.executed.flashinfer import PlanRecord, _number, plan_info

    def launch(plan: Any, seq_lens: Any) -> None:
        with torch._C.DisableTorchFunction():
            tokens, heads, causal = plan._constants[:3]
            _lengths(plan, seq_lens)
            kv_len, ends = plan.kv_len.tolist(), plan.kv_indptr.tolist()
            queries = [tokens * number for number in range(plan.batch_size + 1)]
            number = next(fi._number)
            fi.records.append(
                PlanRecord(
                    number,
                    None,
                    False,
                    *(queries, ends, kv_len, heads, 512, causal),
                    pinned=plan.error,
                    int_workspace=plan.workspace,
                    plan_info=plan_info(queries, heads),
                    dtypes=(torch.int32,) * 3,
                )
            )
            _number(plan.workspace)[0] = number

    return launch


def _lengths(plan: Any, seq_lens: Any) -> None:
    """A launch of the kernel for lengths alone."""
    with torch._C.DisableTorchFunction():
        assert seq_lens.numel() >= plan.batch_size
        kv_len = [length + plan.added for length in seq_lens[: plan.batch_size].tolist()]
        ends = [0, *itertools.accumulate(kv_len)]
        assert max(kv_len) <= plan.max_seq_len + plan.added
        assert ends[-1] <= plan.pages
        plan.kv_len.copy_(torch.tensor(kv_len))
        plan.kv_indptr.copy_(torch.tensor(ends))


@contextlib.contextmanager
def machine(version: str, folder: Path, patch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """The rendered scripts, imported as on a machine with that FlashInfer and a GPU; shapes are
    small ones."""
    from tests.executed.device import Gpu
    from tests.executed.flashinfer import FlashInfer

    gpu = Gpu()
    fi = FlashInfer(version, gpu)
    patch.setattr(fi.wrapper_class, "run", partialmethod(_run, fi), raising=False)
    package, mla = ModuleType("flashinfer"), ModuleType("flashinfer.mla")
    package.__version__ = version  # type: ignore[attr-defined]
    mla.BatchMLAPagedAttentionWrapper = fi.wrapper_class  # type: ignore[attr-defined]
    for name, module in (("flashinfer", package), ("flashinfer.mla", mla)):
        patch.setitem(sys.modules, name, module)
    triton, language = _triton()
    patch.setitem(sys.modules, "triton", triton)
    patch.setitem(sys.modules, "triton.language", language)
    write(version, folder)
    here = folder / BENCH
    patch.syspath_prepend(str(here))
    for name in ("_sleep", "empty_cache", "set_sync_debug_mode"):
        patch.setattr(torch.cuda, name, lambda *args: None)
    patch.setattr(torch.cuda, "mem_get_info", lambda: (FREE, 2 * FREE))
    # Long ones, with all that the other tests have left.
    for name in ("collect", "freeze"):
        patch.setattr(gc, name, lambda: None)
    packages = (PACKAGE, DEVICE_PACKAGE)
    known = {*MODULES, *packages, *(f"{p}.{m}" for p in packages for m in ("plans", "hooks"))}
    for name in known:
        patch.delitem(sys.modules, name, raising=False)
    try:
        with gpu.running():
            modules = {name: importlib.import_module(name) for name in MODULES}
            _make_small(modules, gpu, patch)
            device = modules["bench_support"].device_plans.MlagenDevicePlan
            patch.setattr(device, "launch", _kernel(gpu, fi))
            patch.setattr(device, "fill_lengths", _lengths)
            yield SimpleNamespace(gpu=gpu, fi=fi, **modules)
    finally:
        for name in known:
            sys.modules.pop(name, None)


def _make_small(modules: dict[str, ModuleType], gpu: Any, patch: pytest.MonkeyPatch) -> None:
    cost, loop, support = modules["plan_cost"], modules["spec_loop"], modules["bench_support"]
    attention = modules["attention"]
    patch.setattr(cost, "PAGES", 97)
    patch.setattr(cost.Host, "PATIENCE", 0.0)  # how quick this machine is matters to no test
    patch.setattr(cost.Host, "LOOKS", 1)
    patch.setattr(attention, "PAGES", 4096)
    patch.setattr(attention, "LAYERS", 2)
    for name, value in (("LAYERS", 3), ("POOLS", 2), ("HIDDEN", 8), ("WIDTH", 128)):
        patch.setattr(loop, name, value)
    for name, value in (("MOST_STEPS", 12), ("HOST_NANOSECONDS", 1000), ("BLOCK_SECONDS", 0.0)):
        patch.setattr(loop, name, value)

    def captured(work: Callable[[], None]) -> Graph:
        work()
        gpu.capturing = True
        work()
        gpu.capturing = False
        return Graph(work)

    for module in (cost, loop, attention):
        patch.setattr(module, "captured", captured)
    patch.setattr(modules["warm"], "compile_all", list)
    patch.setattr(loop, "gpu_milliseconds", lambda work, repeats: (work(), 1.0)[1])
    patch.setattr(attention, "microseconds", lambda graph, replays: (graph.replay(), 100.0)[1])
    with torch._C.DisableTorchFunction():
        workspace = torch.empty(64, dtype=torch.uint8)
    patch.setitem(support._made, "workspace", workspace.as_subclass(_device_tensor()))


def _device_tensor() -> Any:
    from tests.executed.device import DeviceTensor

    return DeviceTensor


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
def test_a_run_measures_all_contenders(
    version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "result.json"
    with machine(version, tmp_path, monkeypatch) as host:
        monkeypatch.setattr(host.plan_cost, "_rounds", lambda batch, quick: 3)
        monkeypatch.setattr(host.plan_cost, "_traced", lambda work: (work(), None)[1])
        setting = host.spec_loop.Setting
        settings = [setting(3, 8, 0.6, mode) for mode in ("ahead", "fenced")]
        settings.insert(0, setting(3, 8, 0.6, "ahead", uneven=True))
        others = setting(2, 8, 0.6, "ahead"), setting(3, 16, 0.6, "ahead")  # not asked for
        monkeypatch.setattr(host.spec_loop, "settings_of", lambda quick: [*settings, *others])
        clocks = itertools.count(1500)
        monkeypatch.setattr(torch.cuda, "clock_rate", lambda: next(clocks))
        monkeypatch.setattr(
            sys, "argv", ["run.py", "--out", str(out), "--batches=1,3", "--lengths=8", "--quick"]
        )
        assert host.run.main() == 0
    result = json.loads(out.read_text())
    assert result["complete"]
    assert result["flashinfer"] == version
    names = {"stock", "host-arrays", "upstream", "mlagen", "device", "device-graph", "floor"}
    assert [cell["batch"] for cell in result["plan"]["cells"]] == [1, 3]
    for cell in result["plan"]["cells"]:
        for condition in ("idle", "busy"):
            for taken in (cell[condition], cell[f"arrays_{condition}"]):
                assert set(taken) == names
                assert all(len(values) == 3 for values in taken.values())
    assert {row["contender"] for row in result["plan"]["bytes"]} == names
    uneven, *even = result["loop"]["settings"]
    assert [found["mode"] for found in even] == ["ahead", "fenced"]
    assert set(uneven["rates"]) == {"upstream", "mlagen", "device"}
    assert uneven["device_attention_ms"] == uneven["attention_ms"] == 1.0
    for found in even:
        assert set(found["rates"]) == {"stock", "upstream", "mlagen", "device", "none"}
    for found in (uneven, *even):
        assert found["wrong"] == dict.fromkeys(found["rates"], 0)
        assert found["clocks"].keys() == found["rates"].keys()
        for name, values in found["clocks"].items():
            assert len(set(values)) == len(found["rates"][name]) == 3
    (read,) = read_results([out])
    assert read.plan is not None
    assert read.plan.version == VERSION
    assert len(read.plan.cells) == 2
    assert SCRIPT.endswith("run.py")


@pytest.mark.slow
@pytest.mark.parametrize(("how", "rounds"), [((), 2), (("--quick",), 1)])
def test_all_settings_have_as_many_rounds(
    how: tuple[str, ...], rounds: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "result.json"
    with machine("0.7.2", tmp_path, monkeypatch) as host:
        setting = host.spec_loop.Setting
        settings = [setting(3, 8, 0.6, "ahead", uneven=uneven) for uneven in (True, False)]
        monkeypatch.setattr(host.spec_loop, "settings_of", lambda quick: settings)
        monkeypatch.setattr(host.spec_loop, "ROUNDS", 2)
        monkeypatch.setattr(host.spec_loop, "QUICK_ROUNDS", 1)
        asked = ["--parts=loop", "--batches=3", "--lengths=8", *how]
        monkeypatch.setattr(sys, "argv", ["run.py", "--out", str(out), *asked])
        assert host.run.main() == 0
    found = json.loads(out.read_text())["loop"]["settings"]
    assert [one["uneven"] for one in found] == [True, False]
    assert {len(some) for one in found for some in one["rates"].values()} == {rounds}


def test_a_run_of_nothing_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The loop has settings of its own: other batch sizes and lengths leave none of them."""
    out = tmp_path / "result.json"
    with machine("0.7.2", tmp_path, monkeypatch) as host:
        asked = ["--parts=loop", "--batches=1"]
        monkeypatch.setattr(sys, "argv", ["run.py", "--out", str(out), *asked])
        assert host.run.main() == 2
    assert "cannot measure: no loop of such batches and lengths" in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize("version", ["0.5.3", *VERSIONS])
def test_plans_in_place_leave_nothing_to_copy(
    version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who is said to fill the captured buffer in place leaves it as it is; all others' plans bring
    the page numbers there. Twice, as a plan may leave another state behind for the next."""
    with machine(version, tmp_path, monkeypatch) as host:
        cell = host.plan_cost.Cell(3, 8)
        cell.check()
        not_in_place = {one.name for one in cell.contenders if not one.in_place}
        # In SGLang up to 0.5.21 it may; 0.5.22 is the first to copy, and pins FlashInfer 0.7.1.
        ours = {"mlagen"} if version >= "0.7" else set()
        assert not_in_place == {"stock", "host-arrays", "upstream"} | ours
        for _ in range(2):
            for inputs in cell.draws:
                cell.load(inputs)
                for contender in cell.contenders:
                    cell.kv_indices_buf.fill_(-1)
                    host.plan_cost._plan(contender, cell.wrapper_of(contender), inputs)
                    pages = inputs.kv_indices.tolist()
                    found = cell.kv_indices_buf.tolist()
                    expected = [] if contender.in_place else pages
                    expected = expected + [-1] * (len(found) - len(expected))
                    assert found == expected, contender.name


@pytest.mark.parametrize(
    ("version", "in_place"),
    [
        ("0.5.3", True),
        ("0.6.17", True),
        ("0.6.17.post4", True),
        ("0.6.18", True),
        ("0.6.18.post1+cu130", True),
        ("0.7.1", False),
        ("0.7.2", False),
        (None, False),
        ("our fork", False),
    ],
)
def test_plans_are_measured_as_in_the_files_that_go_with_them(
    version: str | None, in_place: bool
) -> None:
    assert host_in_place(replace(plan_api("0.5.3"), version=version)) == in_place


def test_a_plan_in_place_needs_the_index_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nothing fills the captured buffer, outputs tell."""
    with machine("0.5.3", tmp_path, monkeypatch) as host:
        cell = host.plan_cost.Cell(3, 8)
        monkeypatch.setattr(cell, "fill", lambda inputs: None)
        with pytest.raises(
            host.bench_support.BenchmarkError, match=r"^mlagen, batch 3, 8 tokens: "
        ):
            cell.check()


@pytest.mark.parametrize("version", ["0.5.3", *VERSIONS])
def test_the_index_kernel_is_given_the_lengths_of_the_pass(
    version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the GPU, by all contenders, whoever planned before; in the captured buffers where it fills
    in place. The planner alone knows of no page numbers: its arrays are SGLang's."""
    with machine(version, tmp_path, monkeypatch) as host:
        cell = host.plan_cost.Cell(3, 8)
        cell.check()
        for inputs in cell.draws:
            cell.load(inputs)
            for contender in cell.contenders:
                wrapper = cell.wrapper_of(contender)
                in_place = contender.in_place and contender is not cell.floor
                request = contender.request_verify(wrapper, inputs)
                arrays = contender.arrays_verify(wrapper, inputs, request)
                qo_indptr, kv_indptr, kv_indices = (
                    (arrays.qo_indptr, arrays.kv_indptr, arrays.kv_indices) if in_place else arrays
                )
                assert all(array.is_cuda for array in (qo_indptr, kv_indptr, kv_indices))
                assert qo_indptr.tolist() == inputs.qo_indptr.tolist(), contender.name
                assert kv_indptr.tolist() == inputs.kv_indptr.tolist(), contender.name
                assert (kv_indices is cell.kv_indices_buf) is in_place
                if in_place:
                    assert arrays.kv_len.tolist() == inputs.kv_len.tolist()
                else:
                    assert kv_indices.numel() == inputs.kv_indices.numel()


class Unhurried:
    """A host that is slow at the end of these rounds, counted from those that count."""

    def __init__(self, slow: list[int], patience: int = 9) -> None:
        self.slow, self.patience, self.rounds = slow, patience, 0
        self.awaited = 0

    def await_quick(self) -> None:
        self.awaited += 1

    def quick(self) -> bool:
        self.rounds += 1
        return self.rounds - 1 not in self.slow

    def lose(self, seconds: float) -> None:
        assert seconds >= 0
        self.patience -= 1

    @property
    def patient(self) -> bool:
        return self.patience > 0


@pytest.mark.parametrize("busy", [False, True])
@pytest.mark.parametrize(
    ("slow", "patience", "aside", "kept"),
    [
        ([], 9, 0, [0, 1, 2]),
        ([0], 9, 1, [1, 2, 3]),
        ([1, 2, 4], 9, 3, [0, 3, 5]),
        ([0, 1, 2], 2, 2, [2, 3, 4]),  # then what there is has to do
        ([0, 1, 2], 0, 0, [0, 1, 2]),
    ],
)
def test_rounds_of_a_slow_host_are_set_aside(
    busy: bool,
    slow: list[int],
    patience: int,
    aside: int,
    kept: list[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And made again, for all contenders at once."""
    with machine("0.7.2", tmp_path, monkeypatch) as host:
        cell = host.plan_cost.Cell(3, 8)
        made = iter(range(-host.plan_cost.WARM_UP, 100))

        def numbered(cell: Any, inputs: Any, busy: bool) -> Any:
            number = next(made)
            return {c.name: (float(number), number + 0.5, busy) for c in cell.contenders}

        monkeypatch.setattr(host.plan_cost, "_round", numbered)
        other = Unhurried(slow, patience)
        found, count = host.plan_cost.time_plans(cell, 3, busy, other)
    assert count == aside
    assert other.awaited == host.plan_cost.WARM_UP + aside + 3
    for times in found.values():
        assert times["us"] == kept
        assert times["arrays"] == [number + 0.5 for number in kept]
        assert times["outlasted"] == (3 if busy else None)


def test_how_quick_the_host_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the quickest so far, also where that came late; with patience for so long."""
    with machine("0.7.2", tmp_path, monkeypatch) as machine_:
        cost = machine_.plan_cost
        monkeypatch.setattr(cost.Host, "PATIENCE", 0.2)
        monkeypatch.setattr(cost.Host, "LOOKS", 3)
        now, slept = [0.0], []
        taken = iter([9.0, 2.0, 9.0, 1.5, 9.0, 1.4])  # at first: into the caches, then timed

        def sleep(seconds: float) -> None:
            slept.append(seconds)

        clock = SimpleNamespace(perf_counter=lambda: now[0], perf_counter_ns=lambda: 0, sleep=sleep)
        monkeypatch.setattr(cost, "time", clock)

        def plan(self: Any, wrapper: Any, inputs: Any) -> None:
            now[0] += next(taken)

        monkeypatch.setattr(cost.Floor, "plan_verify", plan)
        host = cost.Host(3, 8)
        assert slept == [0.01] * 3
        taken = iter([9.0, 1.4 * 1.3])
        assert host.quick()
        taken = iter([1.0, 1.4 * 1.4])
        assert not host.quick()
        taken = iter([9.0, 1.0, 9.0, 1.34, 9.0, 1.36])
        assert [host.quick() for _ in range(3)] == [True, True, False]
        taken = iter([9.0, 3.0, 9.0, 3.0, 9.0, 1.2])
        host.await_quick()
        assert slept[3:] == [0.05] * 2
        taken = iter([9.0, 3.0] * 99)
        host.await_quick()
        assert slept[3:] == [0.05] * 4
        assert not host.patient


@pytest.mark.parametrize("busy", [False, True])
def test_arrays_are_timed_apart(
    busy: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that only the steps of a plan move on: 1 us the request, 20 the arrays and 300 the
    rest, in that order; each step is given what those before it made."""
    steps = {"request_verify": 1000, "arrays_verify": 20_000, "finish_verify": 300_000}
    with machine("0.7.2", tmp_path, monkeypatch) as host:
        cell = host.plan_cost.Cell(3, 8)
        cell.check()
        asked: list[str] = []
        made: list[Any] = []

        def slow(contender: Any, step: str) -> None:
            call = getattr(contender, step)

            def taking(wrapper: Any, inputs: Any, *given: Any) -> Any:
                if step == "request_verify":
                    made.clear()
                assert len(given) == len(made)
                assert all(one is other for one, other in zip(given, made, strict=True))
                asked.append(step)
                made.append(call(wrapper, inputs, *given))
                return made[-1]

            monkeypatch.setattr(contender, step, taking)

        for contender in cell.contenders:
            for step in steps:
                slow(contender, step)
        clock = SimpleNamespace(
            perf_counter_ns=lambda: sum(steps[step] for step in asked), perf_counter=lambda: 0.0
        )
        monkeypatch.setattr(host.plan_cost, "time", clock)
        found, aside = host.plan_cost.time_plans(cell, 3, busy, Unhurried([]))
        rounds = host.plan_cost.WARM_UP + 3
    assert aside == 0
    assert asked == list(steps) * len(cell.contenders) * 2 * rounds
    assert set(found) == {contender.name for contender in cell.contenders}
    for taken in found.values():
        assert (taken["us"], taken["arrays"]) == ([301.0] * 3, [20.0] * 3)


@pytest.mark.slow
@pytest.mark.parametrize("broken", ["plan_verify", "plan_draft", "plan_extend"])
def test_a_wrong_plan_is_not_published(
    broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "result.json"
    with machine("0.7.2", tmp_path, monkeypatch) as host:
        setting = host.spec_loop.Setting(3, 8, 0.6, "ahead")
        monkeypatch.setattr(host.spec_loop, "settings_of", lambda quick: [setting])
        plan = getattr(host.contenders.Ours, broken)

        def another(self: Any, wrapper: Any, *given: Any) -> None:
            """One token more than there are, in what the host plans; one less where the plan
            would not take more than it has page numbers of."""
            *rest, inputs = given
            if broken == "plan_extend":
                rest = [rest[0] - 1]
            else:
                inputs = replace(inputs, seq_lens=inputs.seq_lens + 1)
            plan(self, wrapper, *rest, inputs)

        monkeypatch.setattr(host.contenders.Ours, broken, another)
        asked = ["--parts=loop", "--batches=3", "--lengths=8"]
        monkeypatch.setattr(sys, "argv", ["run.py", "--out", str(out), *asked])
        assert host.run.main() == 3
    assert "wrong output, nothing is written: mlagen" in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize("broken", ["Ours", "Device", "Floor"])
def test_a_wrong_plan_in_steps_is_not_published(
    broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As plans are timed by themselves, of those that are in place: they copy nothing that could
    tell, but the lengths are wrong by one."""
    out = tmp_path / "result.json"
    with machine("0.7.2", tmp_path, monkeypatch) as host:
        contender = getattr(host.contenders, broken)
        if broken == "Floor":
            prepare = contender.prepare

            def longer(self: Any, wrapper: Any, inputs: Any, arrays: Any) -> None:
                *others, kv_len = arrays
                prepare(self, wrapper, inputs, (*others, kv_len + 1))

            monkeypatch.setattr(contender, "prepare", longer)
        else:
            request = contender.request_verify

            def request_wrong(self: Any, wrapper: Any, inputs: Any) -> Any:
                off = -1 if broken == "Device" else 1  # the GPU's knows the longest context
                lens = {"seq_lens": inputs.seq_lens + off, "lens": inputs.lens + off}
                return request(self, wrapper, replace(inputs, **lens))

            monkeypatch.setattr(contender, "request_verify", request_wrong)
        asked = ["--parts=plan", "--batches=3", "--lengths=8"]
        monkeypatch.setattr(sys, "argv", ["run.py", "--out", str(out), *asked])
        assert host.run.main() == 3
        name = contender.name
    assert f"wrong output, nothing is written: {name}, batch 3" in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.slow
def test_a_wrong_plan_of_the_gpu_is_not_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "result.json"
    with machine("0.7.2", tmp_path, monkeypatch) as host:
        setting = host.spec_loop.Setting(3, 8, 0.6, "ahead", uneven=True)
        monkeypatch.setattr(host.spec_loop, "settings_of", lambda quick: [setting])
        device = host.bench_support.device_plans.MlagenDevicePlan
        launch = device.launch

        def longer(plan: Any, seq_lens: Any) -> None:
            """As if a token more were attended to; the last page is read twice."""
            plan.added += 1
            plan.pages += plan.batch_size
            launch(plan, seq_lens)
            plan.added -= 1
            plan.pages -= plan.batch_size

        monkeypatch.setattr(device, "launch", longer)
        asked = ["--parts=loop", "--batches=3", "--lengths=8"]
        monkeypatch.setattr(sys, "argv", ["run.py", "--out", str(out), *asked])
        assert host.run.main() == 3
    assert "wrong output, nothing is written: device" in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("right", [True, False])
def test_attention_is_measured_by_both_schedules(
    version: str, right: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "result.json"
    with machine(version, tmp_path, monkeypatch) as host:
        part = host.attention
        cases = [
            *(part.Case(kind, 16, tokens, 3, 16) for kind in part.KINDS for tokens in (1, 3)),
            part.Case("equal", 128, 3, 3, 16),
            *(part.Case("geometric", 16, 1, 3, 16, draw=number) for number in (1, 2)),
            *(part.KernelCase(16, thorough) for thorough in (False, True)),
        ]
        monkeypatch.setattr(part, "cases_of", lambda quick: cases)
        monkeypatch.setattr(part, "PAGES", 1 << 17)
        monkeypatch.setattr(part, "SHOWN", ("geometric", 16, 1, 3, 16))
        # The stand-in's workspaces hold a number, and behind it what was there before.
        monkeypatch.setattr(part, "_schedule", lambda wrapper, tokens: [[[0, 0, tokens]]])
        if not right:
            device = host.bench_support.device_plans.MlagenDevicePlan
            launch = device.launch

            def shorter(plan: Any, seq_lens: Any) -> None:
                plan.added -= 1
                launch(plan, seq_lens)
                plan.added += 1

            monkeypatch.setattr(device, "launch", shorter)
        monkeypatch.setattr(sys, "argv", ["run.py", "--out", str(out), "--part", "attention"])
        assert host.run.main() == 0
    found = json.loads(out.read_text())
    assert found["complete"]
    assert "plan" not in found
    cells = found["attention"]["cells"]
    assert len(cells) == 13
    assert [cell["draw"] for cell in cells] == [0] * 11 + [1, 2]
    assert {cell["same"] for cell in cells} == {right}
    # A forward of 100 microseconds, however many a round, and the plan is in it.
    for cell in cells:
        rounds = 15 if cell["kind"] == "equal" else 5
        assert cell["stock"] == cell["mlagen"] == [50.0] * rounds
    assert [(one["tiles"], one["thorough"]) for one in found["attention"]["kernel"]] == [
        (16, False),
        (16, True),
    ]
    schedule = found["attention"]["schedule"]
    assert schedule["stock"] == schedule["mlagen"] == [[[0, 0, 1]]]
    assert (schedule["kind"], schedule["draw"]) == ("geometric", 0)
    (read,) = read_results([out])
    assert read.attention is not None
    assert len(read.attention.cells) == 13


@pytest.mark.parametrize(("tokens", "heads"), [(1, 16), (3, 128)])
def test_a_graph_holds_the_whole_forward(
    tokens: int, heads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All layers, by either schedule; ours plans once."""
    with machine("0.7.2", tmp_path, monkeypatch) as host:
        part = host.attention
        monkeypatch.setattr(part, "PAGES", 1 << 17)
        setup = part.Setup(part.Pool(), part.Case("equal", heads, tokens, 3, 16))
        counted = {"run": 0, "launch": 0}

        def counting(owner: Any, name: str) -> None:
            call = getattr(owner, name)

            def count(*given: Any, **named: Any) -> Any:
                counted[name] += 1
                return call(*given, **named)

            monkeypatch.setattr(owner, name, count)

        counting(host.fi.wrapper_class, "run")
        counting(host.bench_support.device_plans.MlagenDevicePlan, "launch")
        monkeypatch.setattr(part, "LAYERS", 61)
        setup.graph.replay()
        assert counted == {"run": 61, "launch": 0}
        setup.our_graph.replay()
        assert counted == {"run": 122, "launch": 1}


@pytest.mark.parametrize("tokens", [1, 3])
def test_layers_take_the_caches_in_turn(
    tokens: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each forward from the first on, by either schedule, and both halves of a cache."""
    with machine("0.7.2", tmp_path, monkeypatch) as host:
        part = host.attention
        free = 3 * 2 * part.PAGES * (512 + 64) * 2
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, 2 * free))
        pool = part.Pool()
        assert len(pool.caches) == 3
        setup = part.Setup(pool, part.Case("equal", 16, tokens, 3, 16))
        places = {(id(ckv), id(kpe)): place for place, (ckv, kpe) in enumerate(pool.caches)}
        read: list[int] = []
        call = host.fi.wrapper_class.run

        def run(wrapper: Any, query: Any, query_pe: Any, ckv: Any, kpe: Any, *, out: Any) -> None:
            read.append(places[id(ckv), id(kpe)])
            call(wrapper, query, query_pe, ckv, kpe, out=out)

        monkeypatch.setattr(host.fi.wrapper_class, "run", run)
        monkeypatch.setattr(part, "LAYERS", 7)
        for graph in (setup.graph, setup.our_graph):
            read.clear()
            graph.replay()
            assert read == [0, 1, 2, 0, 1, 2, 0]


@pytest.mark.parametrize(
    ("free", "count"),
    [(0.0, 1), (1.0, 1), (3.9, 1), (4.0, 2), (9.9, 4), (31.9, 15), (32.0, 16), (1000.0, 16)],
)
def test_caches_take_half_of_the_free_memory(
    free: float, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most; one there has to be, and more than 16 are not asked for. `free`: of a cache's
    size."""
    with machine("0.7.2", tmp_path, monkeypatch) as host:
        size = host.attention.PAGES * (512 + 64) * 2  # bf16
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (int(free * size), 1 << 50))
        caches = host.attention.Pool().caches
        assert len(caches) == count
        parts = [part for cache in caches for part in cache]
        assert sum(part.numel() * part.element_size() for part in parts) == count * size
        assert len({part.data_ptr() for part in parts}) == 2 * count


@pytest.mark.parametrize(("kind", "rounds"), [("geometric", 5), ("equal", 15)])
def test_replays_fill_a_round(
    kind: str, rounds: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Short forwards many times, long ones once; equal lengths in the rounds of all draws; and no
    forward but those, and the two that are compared. Who is first in a round alternates."""
    with machine("0.7.2", tmp_path, monkeypatch) as host:
        part = host.attention
        monkeypatch.setattr(part, "PAGES", 1 << 17)
        monkeypatch.setattr(part, "_schedule", lambda wrapper, tokens: [])
        case = part.Case(kind, 16, 1, 3, 16)
        setup = part.Setup(part.Pool(), case)
        names = {id(setup.graph): "stock", id(setup.our_graph): "ours"}
        for taken, replays in ((50.0, 30), (400.0, 25), (6000.0, 2), (50_000.0, 1)):
            asked: list[tuple[str, int]] = []

            def told(graph: Any, count: int, asked: Any = asked, taken: float = taken) -> float:
                if id(graph) in names:
                    asked.append((names[id(graph)], count))
                graph.replay()
                return taken

            monkeypatch.setattr(part, "microseconds", told)
            found, _ = part.measured(setup, case)
            turns = ["ours", "stock", "stock", "ours"] * rounds
            assert asked == [("ours", 1), *((name, replays) for name in turns[: 2 * rounds])]
            assert found["mlagen"] == [taken / 2] * rounds


def test_each_is_timed_by_its_own_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though FlashInfer's is made once a round, and the GPU's over it."""
    with machine("0.7.2", tmp_path, monkeypatch) as host:
        part = host.attention
        monkeypatch.setattr(part, "PAGES", 1 << 17)
        monkeypatch.setattr(part, "_schedule", lambda wrapper, tokens: [])
        case = part.Case("geometric", 16, 1, 3, 16)
        setup = part.Setup(part.Pool(), case)
        plan_stock = setup.plan_stock
        planned: list[torch.Tensor] = []  # by FlashInfer; the stand-in numbers its plans

        def plan() -> None:
            plan_stock()
            planned.append(setup._words.clone())

        monkeypatch.setattr(setup, "plan_stock", plan)
        found: list[bool] = []

        def told(graph: Any, count: int) -> float:
            graph.replay()
            stock = any(torch.equal(setup._words, words) for words in planned)
            found.append(stock is (graph is setup.graph))
            return 400.0

        monkeypatch.setattr(part, "microseconds", told)
        part.measured(setup, case)
        assert found == [True] * (1 + 1 + 2 * 5)  # the bits compared, the plan alone, the rounds
        assert len(planned) == 1 + 1 + 5


def test_first_draws_are_those_of_older_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with machine("0.7.2", tmp_path, monkeypatch) as host:
        part = host.attention
        monkeypatch.setattr(part, "PAGES", 1 << 22)
        case = part.Case("geometric", 16, 3, 64, 4096)
        drawn = [part.lengths_of(replace(case, draw=number)) for number in range(3)]
        random.seed("geometric 64 4096 16 3")
        assert drawn[0] == part.draw("geometric", 64, 4096)
        random.seed("geometric 64 4096 16 3 2")
        assert drawn[2] == part.draw("geometric", 64, 4096)
        assert len({tuple(lengths) for lengths in drawn}) == 3


def test_a_schedule_is_read_from_the_workspace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two clusters: two pieces of the first request, and one of the second."""
    info = [1, 2, *(64 * entry for entry in range(14)), 0, 0]
    words = torch.zeros(1024, dtype=torch.int32)
    arrays = {2: [0, 0, 3], 13: [0, 256, 0], 14: [256, 300, 77], 15: [0, 2, 3]}
    for entry, values in arrays.items():
        words[info[entry] // 4 :][: len(values)] = torch.tensor(values, dtype=torch.int32)
    state = SimpleNamespace(_plan_info=info, _int_workspace_buffer=words.view(torch.uint8))
    with machine("0.7.2", tmp_path, monkeypatch) as host:
        wrapper = SimpleNamespace(_planned_backend=state)
        found = host.attention._schedule(wrapper, 3)
    assert found == [[[0, 0, 256], [0, 256, 300]], [[1, 0, 77]]]


def test_cases_of_attention(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that was asked for, in few enough tokens, those with bars first."""
    with machine("0.7.2", tmp_path, monkeypatch) as host:
        monkeypatch.setattr(host.attention, "PAGES", 5 << 20)
        cases = host.attention.cases_of(False)
        kinds = [case for case in cases if isinstance(case, host.attention.Case)]
        asked = {(case.batch, case.length) for case in kinds}
        assert asked == set(itertools.product((1, 16, 64, 128, 256), (1024, 4096, 16384)))
        assert all(case.batch * case.length * 1.2 < host.attention.PAGES for case in kinds)
        uneven = 225 * 4 // 5
        few = 45 + 3 * uneven + 8
        assert len({str(case) for case in cases}) == len(cases) == few + 10 * 9 + 3 * 2
        assert all(case.draw == 0 for case in kinds if case.kind == "equal")
        # Bars, the kernel, the rest; then the other draws; more of where they differ most.
        order = [
            (case.draw > 0, 0 if case.batch >= 64 and case.length >= 4096 else 2)
            if isinstance(case, host.attention.Case)
            else (False, 1)
            for case in cases[:few]
        ]
        assert order == sorted(order)
        assert order.count((True, 0)) * 5 == order.count((False, 0)) * 8
        more = cases[few:-6]
        assert {(case.heads, case.batch >= 64, case.length >= 4096) for case in more} == {
            (128, True, True)
        }
        assert {case.kind for case in more} == {"geometric", "log-normal"}
        assert [case.draw for case in more] == sorted(list(range(3, 12)) * 10)
        assert {case.backend for case in kinds[-6:]} == {"fa2"}
        assert not any(case.draw for case in host.attention.cases_of(True))
        for kind in host.attention.KINDS:
            lengths = host.attention.draw(kind, 64, 1024)
            assert len(lengths) == 64
            assert all(1 <= length <= 8 * 1024 for length in lengths)
