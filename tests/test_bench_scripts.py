"""The benchmark's scripts, as rendered for real FlashInfers: as code, and run on a GPU that is not
there, with FlashInfer's stand-in and a kernel that tells which plan and indices it read."""

from __future__ import annotations

import ast
import contextlib
import gc
import importlib
import json
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

from mlagen.codegen.gpu import PACKAGE
from mlagen.codegen.render import render
from mlagen.codegen.render_bench import MODULES, SCRIPT, bench_files
from tests.releases import plan_api, shipped

torch = pytest.importorskip("torch")

VERSIONS = ("0.6.18", "0.7.2", "0.7.4")
BENCH = f"{PACKAGE}/bench/"


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
        Path(name).stem: ast.parse(data)
        for name, data in files(version).items()
        if name.endswith(".py")
    }
    bound = {name: _bound(tree) for name, tree in trees.items()}
    for name in MODULES:
        for node in ast.walk(trees[name]):
            if isinstance(node, ast.ImportFrom) and node.module in trees:
                assert {alias.name for alias in node.names} <= bound[node.module], name
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                owner = node.value.id
                if owner in ("plans", "hooks", "plan_cost", "spec_loop"):
                    assert node.attr in bound[owner], f"{name}: {owner}.{node.attr}"


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
    write(version, folder)
    here = folder / BENCH
    patch.syspath_prepend(str(here))
    for name in ("_sleep", "empty_cache", "set_sync_debug_mode"):
        patch.setattr(torch.cuda, name, lambda *args: None)
    # Long ones, with all that the other tests have left.
    for name in ("collect", "freeze"):
        patch.setattr(gc, name, lambda: None)
    known = {*MODULES, PACKAGE, f"{PACKAGE}.plans", f"{PACKAGE}.hooks"}
    for name in known:
        patch.delitem(sys.modules, name, raising=False)
    try:
        with gpu.running():
            modules = {name: importlib.import_module(name) for name in MODULES}
            _make_small(modules, patch)
            yield SimpleNamespace(gpu=gpu, fi=fi, **modules)
    finally:
        for name in known:
            sys.modules.pop(name, None)


def _make_small(modules: dict[str, ModuleType], patch: pytest.MonkeyPatch) -> None:
    cost, loop, support = modules["plan_cost"], modules["spec_loop"], modules["bench_support"]
    patch.setattr(cost, "PAGES", 97)
    for name, value in (("LAYERS", 3), ("POOLS", 2), ("HIDDEN", 8), ("WIDTH", 128)):
        patch.setattr(loop, name, value)
    for name, value in (("MOST_STEPS", 12), ("HOST_NANOSECONDS", 1000), ("BLOCK_SECONDS", 0.0)):
        patch.setattr(loop, name, value)
    patch.setattr(loop, "captured", lambda work: (work(), Graph(work))[1])
    patch.setattr(loop, "gpu_milliseconds", lambda work, repeats: (work(), 1.0)[1])
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
        monkeypatch.setattr(host.plan_cost, "_traced", lambda work: work())
        setting = host.spec_loop.Setting
        settings = [setting(2, 8, 0.6, "ahead"), setting(2, 8, 0.6, "fenced")]
        monkeypatch.setattr(host.spec_loop, "settings_of", lambda quick: settings)
        monkeypatch.setattr(
            sys, "argv", ["run.py", "--out", str(out), "--batches=1,3", "--lengths=8", "--quick"]
        )
        assert host.run.main() == 0
    result = json.loads(out.read_text())
    assert result["complete"]
    assert result["flashinfer"] == version
    names = {"stock", "host-arrays", "upstream", "mlagen", "floor"}
    assert [cell["batch"] for cell in result["plan"]["cells"]] == [1, 3]
    for cell in result["plan"]["cells"]:
        assert set(cell["idle"]) == set(cell["busy"]) == names
        assert all(len(values) == 3 for values in cell["busy"].values())
    assert {row["contender"] for row in result["plan"]["bytes"]} == names
    assert [found["mode"] for found in result["loop"]["settings"]] == ["ahead", "fenced"]
    for found in result["loop"]["settings"]:
        assert set(found["rates"]) == {"stock", "upstream", "mlagen", "none"}
        assert found["wrong"] == dict.fromkeys(found["rates"], 0)
    assert SCRIPT.endswith("run.py")


@pytest.mark.slow
@pytest.mark.parametrize("broken", ["plan_verify", "plan_draft", "plan_extend"])
def test_a_wrong_plan_is_not_published(
    broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "result.json"
    with machine("0.7.2", tmp_path, monkeypatch) as host:
        setting = host.spec_loop.Setting(2, 8, 0.6, "ahead")
        monkeypatch.setattr(host.spec_loop, "settings_of", lambda quick: [setting])
        plan = getattr(host.contenders.Ours, broken)

        def longer(self: Any, wrapper: Any, *given: Any) -> None:
            """One token more than there are, in what the host plans."""
            *rest, inputs = given
            if broken == "plan_extend":
                rest = [rest[0] + 1]
            else:
                inputs = replace(inputs, seq_lens=inputs.seq_lens + 1)
            plan(self, wrapper, *rest, inputs)

        monkeypatch.setattr(host.contenders.Ours, broken, longer)
        monkeypatch.setattr(sys, "argv", ["run.py", "--out", str(out), "--parts=loop"])
        assert host.run.main() == 3
    assert "wrong output, nothing is written: mlagen" in capsys.readouterr().err
    assert not out.exists()
