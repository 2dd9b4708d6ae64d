"""A public update of a graph's plan is used where a FlashInfer has one: rendered, spliced, run.

No release has one; the FlashInfers here are miniatures.
"""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from mlagen.codegen import provenance
from mlagen.codegen.errors import DriftError
from mlagen.codegen.flashinfer.read import read_plan_api
from mlagen.codegen.patch import Patch, prepare, site_states
from mlagen.codegen.render import Rendered, render, render_module
from mlagen.codegen.sglang.find import FoundTarget
from tests.flashinfer.miniatures import METADATA, Files, backend_era, source, with_update
from tests.releases import PINS, SGLANG_FILE, sglang_file, shipped
from tests.splice.shapes import before, fork

GRAPHS = "use_cuda_graph=True"
OPTION = b"enable_cuda_graph_plan_update=True"
OTHERS = [v for v in PINS if v not in ("0.4.3.post4", "0.4.4", "0.5.23")]
CSR = "qo_indptr, kv_indptr, kv_indices, kv_len_arr"
HOSTS = ", ".join(f"{name}_host" for name in ("qo_indptr", "kv_indptr", "kv_len_arr"))
FLASHINFERS: dict[str, Files] = {
    "wrapper": with_update(),
    "back-end object": with_update(backend_era()),
    "host arrays beside": with_update(metadata=METADATA.replace(f"{CSR})", f"{CSR}, {HOSTS})", 1)),
}


@cache
def rendered(kind: str) -> Rendered:
    return render(shipped(), read_plan_api(source(FLASHINFERS[kind])))


def patch(data: bytes, kind: str = "wrapper") -> Patch:
    found = FoundTarget(data, SGLANG_FILE, None)
    return prepare(found, shipped(), read_plan_api(source(FLASHINFERS[kind])))


@pytest.fixture(params=FLASHINFERS)
def emitted(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[SimpleNamespace]:
    """The names of plans.py and hooks.py for one of the FlashInfers, imported."""
    name = f"updating_{list(FLASHINFERS).index(request.param)}"
    folder = tmp_path / name
    folder.mkdir()
    (folder / "__init__.py").touch()
    for module in ("plans", "hooks"):
        (folder / f"{module}.py").write_text(render_module(rendered(request.param), module, ()))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    flashinfer = ModuleType("flashinfer.mla")
    flashinfer.MLAPlanMetadata = SimpleNamespace(csr=lambda **given: given)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer.mla", flashinfer)
    modules = [importlib.import_module(f"{name}.{module}") for module in ("plans", "hooks")]
    yield SimpleNamespace(
        kind=request.param, **{k: v for module in modules for k, v in vars(module).items()}
    )
    for module in [key for key in sys.modules if key.startswith(name)]:
        del sys.modules[module]


@pytest.mark.parametrize("kind", FLASHINFERS)
@pytest.mark.parametrize("module", ["plans", "hooks"])
def test_what_is_rendered_is_formatted(kind: str, module: str) -> None:
    text = render_module(rendered(kind), module, ())
    options = ["--line-length", "88", "--isolated", "--stdin-filename", "plans.py", "-"]
    ruff = [sys.executable, "-m", "ruff"]
    done = subprocess.run(
        [*ruff, "format", *options], input=text, capture_output=True, text=True, check=True
    )
    assert done.stdout == text
    rules = ["--select", "F"]
    subprocess.run([*ruff, "check", *rules, *options], input=text, text=True, check=True)


class Wrapper:
    """A planned graph wrapper, updatable or not, that takes notes."""

    def __init__(self, *, can_update: bool) -> None:
        self._can_update = can_update
        self._kv_indices_buf = torch.zeros(64, dtype=torch.int32)
        self._planned_backend = SimpleNamespace(_kv_indices_buf=self._kv_indices_buf)
        self.updates: list[dict[str, Any]] = []

    def update_cuda_graph_plan(self, *, metadata: dict[str, Any]) -> None:
        self.updates.append(metadata)


def plan(emitted: SimpleNamespace, wrapper: Wrapper, lens: list[int]) -> SimpleNamespace:
    """Plan a verify replay of 3 tokens a request; gives the request and the device's arrays."""
    rows = len(lens)
    request = emitted._mlagen_captured(
        wrapper, "verify", emitted.mlagen_plan_verify, rows, 3, 16, True,
        lambda lens: lens + 3, True,
    )  # fmt: skip
    emitted._mlagen_fill(request, torch.tensor(lens))
    arrays = emitted.MlagenArrays(
        torch.arange(0, 3 * rows + 1, 3, dtype=torch.int32),
        torch.zeros(rows + 1, dtype=torch.int32),
        torch.arange(5, dtype=torch.int32),
        None,
    )
    shape = emitted.MlagenShape(16, 512, 64, 1, 0.1, torch.bfloat16, torch.bfloat16)
    request.plan(request, arrays, shape)
    return SimpleNamespace(request=request, arrays=arrays)


def test_a_replay_goes_through_the_public_method(emitted: SimpleNamespace) -> None:
    wrapper = Wrapper(can_update=True)
    done = plan(emitted, wrapper, [10, 7])
    [given] = wrapper.updates
    hosts = {key: given.pop(key) for key in list(given) if key.endswith("_host")}
    if emitted.kind != "host arrays beside":
        hosts = {f"{key}_host": value for key, value in given.items() if key != "kv_indices"}
    assert list(given) == ["qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr"]
    assert given["kv_indices"] is done.arrays.kv_indices
    assert {key: value.tolist() for key, value in hosts.items()} == {
        "qo_indptr_host": [0, 3, 6],
        "kv_indptr_host": [0, 13, 23],
        "kv_len_arr_host": [13, 10],
    }
    assert all(value.dtype == torch.int32 for value in hosts.values())
    # What is bound at capture is filled as without the method, which may or may not do it.
    assert wrapper._kv_indices_buf[:5].tolist() == [0, 1, 2, 3, 4]


def test_each_replay_is_given_its_own_lengths(emitted: SimpleNamespace) -> None:
    wrapper = Wrapper(can_update=True)
    done = plan(emitted, wrapper, [10, 7])
    emitted._mlagen_fill(done.request, torch.tensor([1, 2]))
    shape = emitted.MlagenShape(16, 512, 64, 1, 0.1, torch.bfloat16, torch.bfloat16)
    done.request.plan(done.request, done.arrays, shape)
    assert len(wrapper.updates) == 2
    name = "kv_len_arr_host" if emitted.kind == "host arrays beside" else "kv_len_arr"
    assert wrapper.updates[1][name].tolist() == [4, 5]


def test_what_does_not_fit_the_graph_does_not_get_there(emitted: SimpleNamespace) -> None:
    wrapper = Wrapper(can_update=True)
    with pytest.raises(emitted.MlagenPlanError, match="do not fit the index buffer"):
        plan(emitted, wrapper, [60, 60])
    assert not wrapper.updates


def test_never_inside_a_capture(emitted: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    wrapper = Wrapper(can_update=True)
    with pytest.raises(emitted.MlagenPlanError, match="frozen into the graph"):
        plan(emitted, wrapper, [10])
    assert not wrapper.updates


def test_a_wrapper_made_without_it_is_planned_as_ever(
    emitted: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    called = emitted.mlagen_plan_verify.__globals__
    monkeypatch.setitem(called, "_mlagen_call_planner", lambda *given, **more: calls.append(given))
    wrapper = Wrapper(can_update=False)
    plan(emitted, wrapper, [10])
    assert len(calls) == 1
    assert not wrapper.updates


@pytest.mark.parametrize("shape", ["one-line", "shared-apply", "crlf"])
def test_wrappers_are_made_updatable(shape: str) -> None:
    data = before(shape)
    made = patch(data)
    sites = {region.site for region in provenance.find_regions(made.patched)}
    assert {"plan-update-decode", "plan-update-verify"} <= sites
    assert made.patched.count(OPTION) == 2
    ast.parse(made.patched)
    assert provenance.remove_regions(made.patched) == data
    states = site_states(FoundTarget(made.patched, SGLANG_FILE, None), made, shipped())
    assert "installed" in {s.state for s in states if s.site == "plan-update-verify"}


@pytest.mark.parametrize(
    "version", ["0.5.23", *(pytest.param(v, marks=pytest.mark.releases) for v in OTHERS)]
)
def test_in_releases(version: str) -> None:
    data = sglang_file(version)
    made = patch(data, "back-end object")
    sites = {region.site for region in provenance.find_regions(made.patched)}
    assert {"plan-update-decode", "plan-update-verify"} <= sites
    assert made.patched.count(OPTION) == 2
    assert b"def _mlagen_update_graph(" in made.patched
    assert provenance.remove_regions(made.patched) == data


def made_with(option: str) -> bytes:
    return fork("pair", (GRAPHS, f"{GRAPHS}, enable_cuda_graph_plan_update={option}"), times=3)


def test_an_sglang_that_asks_for_it_itself_is_left_alone() -> None:
    data = made_with("True")
    sites = {region.site for region in provenance.find_regions(patch(data).patched)}
    assert not {"plan-update-decode", "plan-update-verify"} & sites
    assert "capture-verify" in sites


def test_an_sglang_that_asks_for_something_else_is_refused() -> None:
    with pytest.raises(DriftError, match=r"enable_cuda_graph_plan_update is self\.can_update"):
        patch(made_with("self.can_update"))


def test_a_wrapper_made_elsewhere_is_refused() -> None:
    with pytest.raises(DriftError, match=r"looked for `\w+ = .*use_cuda_graph=True.*found 0"):
        patch(fork("pair", (GRAPHS, "**self.graph_arguments"), times=3))
