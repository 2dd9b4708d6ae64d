"""The generated GPU tests as texts, and what of decode under context parallelism needs no GPU: the
merge, the shares, and a run of two processes over gloo with a FlashInfer that computes on the CPU.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from mlagen.codegen.prove import suite_of_rendering
from mlagen.codegen.render import Rendered, render, render_module
from mlagen.codegen.render_tests import test_files as files_of
from tests.gpu.faults import DEVICE_FAULTS, FAULTS
from tests.releases import plan_api, shipped
from tests.specs import ON_DEVICE, Changes, spec_of

#: FlashInfers whose generated tests have run on a GPU.
VERSIONS = ("0.5.3", "0.6.17", "0.6.18", "0.7.2", "0.7.4")
ALL = ("decode", "draft-decode", "verify", "draft-extend", "dcp")

#: Runs at the start of a Python whose path it is on: a GPU that is a CPU.
SITE = '''\
"""torch.cuda, as far as the generated tests use it, on the CPU."""
import contextlib
import torch

recording = None

class Graph:
    def __init__(self): self.calls = []
    def replay(self):
        for call in self.calls: call()

@contextlib.contextmanager
def graph(made):
    global recording
    recording = made
    yield
    recording = None

class Event:
    def record(self, *_): pass
    def query(self): return False

cuda = torch.cuda
cuda.recorder = lambda: recording
cuda.CUDAGraph, cuda.graph, cuda.Event = Graph, graph, Event
cuda.is_available = lambda: True
cuda.is_current_stream_capturing = lambda: False
cuda.get_device_capability = lambda: (8, 0)
for name in ("set_device", "synchronize", "_sleep", "set_sync_debug_mode"):
    setattr(cuda, name, lambda *_: None)
'''

#: flashinfer/mla.py: plans and computes in float32, with the state of FlashInfer 0.7.
MLA = """\
import torch
from types import SimpleNamespace

class Backend(SimpleNamespace):
    def make_plan(self, qo_indptr, kv_len):
        self.tokens, self.lens = qo_indptr.diff().tolist(), kv_len.tolist()
        self._int_workspace_buffer.view(torch.int32).fill_(sum(self.lens) % 97)
        return [1, 132, *(i * 65536 for i in range(14))]

class BatchMLAPagedAttentionWrapper:
    def __init__(self, workspace, use_cuda_graph=False, kv_indices=None, backend="", **buffers):
        self._planned_backend = None
        self.kv_indices, self.buffers, self.backend = kv_indices, buffers, backend

    def plan(self, qo_indptr, kv_indptr, kv_indices, kv_len_arr, num_heads, head_dim_ckv,
             head_dim_kpe, page_size, causal, sm_scale, q_data_type, kv_data_type):
        bound = self.kv_indices
        if bound is not None:
            bound[: len(kv_indices)] = kv_indices
        made = Backend(_backend="fa2", _page_size=1, _sm_scale=sm_scale, _causal=causal,
            _kv_indices_buf=kv_indices if bound is None else bound, _qo_indptr_buf=qo_indptr,
            _kv_indptr_buf=kv_indptr, _kv_len_arr_buf=kv_len_arr,
            _int_workspace_buffer=torch.empty(1 << 20, dtype=torch.uint8))
        made._plan_info = made.make_plan(qo_indptr, kv_len_arr)
        self._planned_backend = made

    def run(self, *inputs, **outputs):
        graph = torch.cuda.recorder()
        if graph is not None:
            graph.calls.append(lambda: self.compute(*inputs, **outputs))
        self.compute(*inputs, **outputs)

    def compute(self, q, q_pe, ckv, kpe, out, lse=None, return_lse=False):
        plan = self._planned_backend
        row = start = 0
        for tokens, keys in zip(plan.tokens, plan.lens):
            rows = slice(row, row + tokens)
            pages = plan._kv_indices_buf[start : start + keys].long()
            key, key_pe = ckv[pages, 0].float(), kpe[pages, 0].float()
            scores = (q[rows].float() @ key.T + q_pe[rows].float() @ key_pe.T) * plan._sm_scale
            if plan._causal:
                sees = torch.arange(keys - tokens, keys)[:, None, None]
                scores.masked_fill_(torch.arange(keys) > sees, float("-inf"))
            out[rows] = (torch.softmax(scores, -1) @ key).to(out.dtype) if keys else 0
            if return_lse:
                lse[rows] = torch.logsumexp(scores, -1) / torch.tensor(2.0).log()
            row, start = row + tokens, start + keys
"""

#: The end of plans.py: the planner of that FlashInfer.
PLANNER = """

def _mlagen_lacks_planner(wrapper):
    return None

def _mlagen_call_planner(wrapper, request, shape, causal):
    return wrapper._planned_backend.make_plan(request.qo_indptr, request.kv_len)
"""

#: What makes the rendered files small and quick on a CPU; each stands in one of them at least.
SMALLER = {
    '"cuda"': '"cpu"',
    '"nccl"': '"gloo"',
    "PAGES = 1 << 17": "PAGES = 1 << 12",
    "MOST_INDICES = 1 << 20": "MOST_INDICES = 1 << 16",
    "CKV, KPE = 512, 64": "CKV, KPE = 32, 16",
    "LONG = 4096": "LONG = 200",
    "16_384": "700",
    "128 << 20": "128",
    "(8, 128)": "(8, 4)",
    "(64, 16)": "(16, 2)",
}


@pytest.fixture(scope="module")
def rendered() -> Rendered:
    return render(shipped(), plan_api("0.7.2"))


def texts_of(rendered: Rendered, *variants: str) -> dict[str, str]:
    files = files_of(rendered, ["rendered for a test"], variants)
    return {name.removeprefix("tests/"): text.decode() for name, text in files.items()}


def on_cpu(
    folder: Path,
    rendered: Rendered,
    changes: Mapping[str, str],
    variants: tuple[str, ...] = ("dcp", "draft-extend"),
) -> Path:
    """Write what the tests of `variants` need, for a CPU. `changes`: texts of dcp_rank.py to
    replace. Gives the folder of the tests."""
    tests = folder / "generated" / "tests"
    (folder / "flashinfer").mkdir(parents=True)
    tests.mkdir(parents=True)
    (folder / "sitecustomize.py").write_text(SITE)
    (folder / "flashinfer" / "__init__.py").touch()
    (folder / "flashinfer" / "mla.py").write_text(MLA)
    (tests.parent / "__init__.py").touch()
    for module in ("plans", "hooks"):
        text = render_module(rendered, module, ["rendered"])
        (tests.parent / f"{module}.py").write_text(text + (PLANNER if module == "plans" else ""))
    unused = set(SMALLER)
    for name, text in texts_of(rendered, *variants).items():
        for old, new in {**SMALLER, **(changes if name == "dcp_rank.py" else {})}.items():
            unused -= {old} if old in text else set()
            text = text.replace(old, new)
        (tests / name).write_text(text)
    assert not unused
    return tests


def python(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    """Run Python where `folder`'s stand-ins are found."""
    env = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, *args]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory, rendered: Rendered) -> ModuleType:
    """dcp_rank.py, imported beside a support module that has names alone."""
    place = tmp_path_factory.mktemp("ranks") / "dcp_rank.py"
    place.write_text(texts_of(rendered, "dcp", "draft-extend")["dcp_rank.py"])
    support = ModuleType("support")
    for name in re.findall(r"^    (\w+),$", place.read_text().partition("from support")[2], re.M):
        setattr(support, name, object)
    vars(support).update(BACKENDS=(), torch=torch)
    spec = importlib.util.spec_from_file_location("dcp_rank", place)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "support", support)
        spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def support(rendered: Rendered) -> SimpleNamespace:
    """What support.py compares outputs by; all else of it needs a GPU."""
    tree = ast.parse(texts_of(rendered, "dcp")["support.py"])
    wanted = {"LIMIT, ROW_LIMIT", "worst_row", "close_to"}
    body = [
        node
        for node in tree.body
        if getattr(node, "name", None) in wanted
        or (isinstance(node, ast.Assign) and ast.unparse(node.targets[0]).strip("()") in wanted)
    ]
    assert len(body) == len(wanted)
    names = {"torch": torch, "Any": Any}
    exec(compile(ast.Module(body, []), "support.py", "exec"), names)
    return SimpleNamespace(**names)


# --- which files ------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["0.5.3", "0.6.18", "0.7.2"])
@pytest.mark.parametrize("variants", [ALL, *((name,) for name in ALL)], ids="-".join)
def test_the_files_are_python(version: str, variants: tuple[str, ...]) -> None:
    files = texts_of(render(shipped(), plan_api(version)), *variants)
    names = {f"test_{name.replace('-', '_')}.py" for name in variants}
    program = {"dcp_rank.py"} if "dcp" in variants else set()
    assert set(files) == names | program | {"conftest.py", "support.py"}
    for name, text in files.items():
        compile(text, name, "exec")


@pytest.mark.parametrize(
    ("over", "expected"),
    [
        ("F", "True 1 [20]"),
        ("TF", "True 2 [20, 40]"),
        ("TTF", "True 3 [20, 40, 80]"),
        ("TTT", "False 3 [20, 40, 80]"),
    ],
)
def test_a_late_host_is_asked_again(
    tmp_path: Path, rendered: Rendered, over: str, expected: str
) -> None:
    """Whether the work queued before was over, run for run; what waits is late in all of them,
    however much work that is."""
    program = f"""
import sys
sys.path.insert(0, {str(on_cpu(tmp_path, rendered, {}))!r})
import support
over, ran, slept = iter({over!r}), [], []
support.torch.cuda.Event.query = lambda _: next(over) == "T"
support.torch.cuda._sleep = lambda cycles: slept.append(cycles // 2_000_000)
print(support.outlasts(20, lambda: ran.append(1)), len(ran), slept)
"""
    ran = python(tmp_path, "-c", program)
    assert ran.stdout.split("\n")[0] == expected, ran.stderr


#: What asks for waits, captures, the private planner or a back end of its own.
ON_A_GPU_ALONE = (
    "pinned_memory",
    "absent_host_lengths",
    "without_host_lengths",
    "inside_a_capture",
    "without_a_planner",
    "lengths_alone_are_wrong",
)
MODULES = [f"test_{name.replace('-', '_')}.py" for name in ALL if name != "dcp"]


def run_on_cpu(tests: Path, module: str) -> subprocess.CompletedProcess[str]:
    """All of a module that needs no GPU, with a FlashInfer that computes on the CPU."""
    asked = f"not ({' or '.join(ON_A_GPU_ALONE)})"
    options = ["-q", "-p", "no:cacheprovider", "--import-mode=importlib", "--tb=short"]
    return python(tests.parents[1], "-m", "pytest", *options, "-k", asked, str(tests / module))


@pytest.mark.parametrize("module", MODULES)
def test_most_of_them_run_without_a_gpu(module: str, tmp_path: Path, rendered: Rendered) -> None:
    ran = run_on_cpu(on_cpu(tmp_path, rendered, {}, ALL), module)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    passed = re.search(r"^(\d+) passed", ran.stdout.splitlines()[-1])
    assert passed is not None, ran.stdout
    assert int(passed[1]) > (5 if "extend" in module else 15)


@pytest.mark.parametrize("module", MODULES)
def test_they_fail_where_a_plan_is_that_of_other_lengths(
    module: str, tmp_path: Path, rendered: Rendered
) -> None:
    """The schedule, an output, and those of passes that were planned ahead."""
    tests = on_cpu(tmp_path, rendered, {}, ALL)
    plans = tests.parent / "plans.py"
    right = "make_plan(request.qo_indptr, request.kv_len)"
    text = plans.read_text()
    assert text.count(right) == 1
    plans.write_text(text.replace(right, right.replace("kv_len)", "kv_len.clamp(max=100))")))
    ran = run_on_cpu(tests, module)
    assert ran.returncode == 1, ran.stdout + ran.stderr
    failed = set(re.findall(r"^FAILED \S+::test_(\w+)", ran.stdout, re.M))
    told = {"the_plan_is_the_one_that_flashinfer_makes"}
    if "extend" in module:
        told |= {"extends_are_right_and_do_not_wait"}
    else:
        told |= {"replays_are_right", "the_host_may_run_ahead"}
    if module in ("test_draft_decode.py", "test_verify.py"):
        told |= {
            "an_eager_plan_is_the_one_that_flashinfer_makes",
            "eager_passes_are_right_and_do_not_wait",
        }
    if module == "test_draft_decode.py":
        told |= {"the_chain"}
    assert told <= failed, ran.stdout


def _texts_of(node: ast.expr, filling: str) -> str:
    """A message as it reads with each placeholder filled in."""
    if isinstance(node, ast.JoinedStr):
        return "".join(_texts_of(value, filling) for value in node.values)
    return str(node.value) if isinstance(node, ast.Constant) else filling


@pytest.mark.parametrize("version", ["0.6.18", "0.7.2"])
@pytest.mark.parametrize("changes", [(), ON_DEVICE], ids=["host", "device"])
def test_errors_that_are_expected_are_those_that_are_raised(version: str, changes: Changes) -> None:
    """Word for word: on a GPU alone would it be seen that a message has changed."""
    suite = suite_of_rendering(render(spec_of(changes), plan_api(version)))
    files = {Path(name): data for name, data in suite.files.items()}
    trees = {path.name: ast.parse(data) for path, data in files.items() if path.suffix == ".py"}
    said = "\n".join(
        _texts_of(node, filling)
        for name in ("plans.py", "hooks.py")
        for node in ast.walk(trees[name])
        if isinstance(node, (ast.JoinedStr, ast.Constant))
        for filling in ("8", *(variant.name for variant in spec_of(changes).variants))
    )
    expected = {
        keyword.value.value
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) == "pytest.raises"
        and ast.unparse(node.args[0]) == "plans.MlagenPlanError"
        for keyword in node.keywords
        if keyword.arg == "match" and isinstance(keyword.value, ast.Constant)
    }
    assert len(expected) > 5
    assert [match for match in expected if not re.search(match, said)] == []


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    ("changes", "faults"), [((), FAULTS), (ON_DEVICE, DEVICE_FAULTS)], ids=["host", "device"]
)
def test_faults_fit_what_is_rendered(version: str, changes: Changes, faults: list[Any]) -> None:
    """Planted on a GPU; that each is still a fault of the text, and Python, shows here."""
    suite = suite_of_rendering(render(spec_of(changes), plan_api(version)))
    for fault in faults:
        file, right, wrong, _ = fault.values
        text = suite.files[file].decode()
        assert right in text, fault.id
        compile(text.replace(right, wrong), file, "exec")


@pytest.mark.parametrize("version", ["0.5.3", "0.7.2"])
@pytest.mark.parametrize("variants", [ALL, ("dcp",)], ids="-".join)
def test_the_ranks_are_formatted_and_linted(
    tmp_path: Path, version: str, variants: tuple[str, ...]
) -> None:
    files = texts_of(render(shipped(), plan_api(version)), *variants)
    places = [tmp_path / name for name in ("dcp_rank.py", "test_dcp.py")]
    for place in places:
        place.write_text(files[place.name])
    ruff = [sys.executable, "-m", "ruff"]
    for args in (
        ["check", "--isolated", "--select", "E4,E7,E9,F,I", "--line-length", "88"],
        ["format", "--isolated", "--check", "--diff", "--line-length", "88"],
    ):
        done = subprocess.run([*ruff, *args, *places], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def test_extends_are_proved_with_the_ranks_where_they_are_asked_for(rendered: Rendered) -> None:
    alone, both = texts_of(rendered, "dcp"), texts_of(rendered, "dcp", "draft-extend")
    for name in ("dcp_rank.py", "test_dcp.py"):
        assert "extends" not in alone[name]
        assert "extends" in both[name]
    assert "mlagen_request_extend" not in alone["dcp_rank.py"]


# --- the merge --------------------------------------------------------------------------------


def partial_of(scores: Any, values: Any, empty: float = -math.inf) -> tuple[Any, Any]:
    """Attention of scores [rows, heads, keys] over values [keys, width], and its LSE to base 2.
    Without keys: 0, and `empty`."""
    if not scores.shape[-1]:
        return scores.new_zeros(*scores.shape[:2], values.shape[-1]), scores.new_full(
            scores.shape[:2], empty
        )
    return torch.softmax(scores, -1) @ values, torch.logsumexp(scores, -1) / math.log(2)


@pytest.mark.parametrize("empty", [-math.inf, -49998.0])
@pytest.mark.parametrize("count", [1, 2, 3, 5, 1000])
@pytest.mark.parametrize("size", [2, 4])
def test_merged_shares_are_the_whole(
    ranks: ModuleType, size: int, count: int, empty: float
) -> None:
    torch.manual_seed(count)
    scores, values = 3 * torch.randn(4, 8, count), torch.randn(count, 16)
    whole, _ = partial_of(scores, values)
    parts = [partial_of(scores[..., r::size], values[r::size], empty) for r in range(size)]
    outs, lses = (torch.stack(kind) for kind in zip(*parts, strict=True))
    torch.testing.assert_close(ranks.merged_by_lse(outs, lses), whole)


def test_rows_without_any_kv_are_0(ranks: ModuleType) -> None:
    outs = torch.full((2, 3, 4, 8), math.nan)  # nothing is read of what has no weight
    lses = torch.full((2, 3, 4), -math.inf)
    assert torch.equal(ranks.merged_by_lse(outs, lses), torch.zeros(3, 4, 8))


def test_an_lse_to_base_e_would_be_seen(ranks: ModuleType, support: SimpleNamespace) -> None:
    torch.manual_seed(0)
    scores, values = 3 * torch.randn(4, 8, 2), torch.randn(2, 16)
    whole, _ = partial_of(scores, values)
    parts = [partial_of(scores[..., r::2], values[r::2]) for r in range(2)]
    outs, lses = (torch.stack(kind) for kind in zip(*parts, strict=True))
    merged = ranks.merged_by_lse(outs, lses * math.log(2))
    assert not support.close_to(merged, whole)


def test_the_worst_row(support: SimpleNamespace) -> None:
    expected = torch.ones(2, 3, 4)
    assert support.worst_row(expected.clone(), expected) == 0
    assert support.worst_row(torch.zeros(1, 1, 4), torch.zeros(1, 1, 4)) == 0
    out = expected.clone()
    out[1, 2] = 1.5
    assert support.worst_row(out, expected) == pytest.approx(0.5)
    out[0, 0, 0] = math.nan
    assert not support.worst_row(out, expected) <= 0.02


def test_what_is_close_is_close_in_each_row(support: SimpleNamespace) -> None:
    """Requests of few tokens have large outputs, and outweigh one of many that lost some."""
    torch.manual_seed(0)
    expected = torch.randn(64, 2, 512)
    expected[7] /= 100
    assert support.close_to(expected.bfloat16(), expected)
    for off in (1.05, math.nan, 0.0):
        out = expected.clone()
        out[7, 1] *= off
        assert not support.close_to(out, expected), off
    out = expected * 1.015  # no row by 0.02, but all of them
    assert support.worst_row(out, expected) < 0.02
    assert not support.close_to(out, expected)


def test_rows_that_see_no_kv_are_not_compared(support: SimpleNamespace) -> None:
    expected = torch.randn(4, 2, 8)
    expected[2] = math.nan
    out = expected.nan_to_num(5.0).bfloat16()
    assert support.close_to(out, expected)
    assert support.close_to(out, torch.full_like(expected, math.nan))


# --- two processes ----------------------------------------------------------------------------

RUN = "import sys, pathlib, dcp_rank; print(dcp_rank.run_ranks(2, pathlib.Path(sys.argv[1])))"


def run_ranks(tests: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    code = f"import sys; sys.path.insert(0, {str(tests)!r}); {RUN}"
    return python(tests.parents[1], "-c", code, str(folder))


@pytest.mark.slow
def test_two_ranks(tmp_path: Path, rendered: Rendered) -> None:
    """Each plans by the rendered functions; what they gather is merged and compared."""
    tests = on_cpu(tmp_path / "here", rendered, {})
    done = run_ranks(tests, tmp_path)
    assert done.returncode == 0, done.stderr
    first, second = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1))
    assert [(proved["replays"], proved["empty_passes"]) for proved in first["decode"]] == [
        (24, 0),
        (24, 0),
    ]
    assert all(proved["empty_passes"] >= 1 for proved in second["decode"])
    assert all(0 < proved["worst_row"] < 0.02 for proved in first["decode"])
    assert first["extends"] == second["extends"] == [12]


@pytest.mark.slow
def test_the_ranks_on_one_gpu(tmp_path: Path, rendered: Rendered) -> None:
    tests = on_cpu(tmp_path / "here", rendered, {})
    wanted = "all_ranks_on_one_gpu or left_out"
    done = python(
        tests.parents[1], "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull,
        "--rootdir", str(tests), "-k", wanted, str(tests / "test_dcp.py"),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        pytest.param(
            "dcp_rank=self.rank,",
            "dcp_rank=0,",
            "rank 1 ended with status 1: AssertionError: FlashInfer's plan was kept",
            id="another-rank's-lengths",
        ),
        pytest.param(
            "weights * outs.float()",
            "outs.float()",
            "rank 0 ended with status 1: AssertionError: a row is off by",
            id="a-wrong-merge",
        ),
    ],
)
def test_ranks_that_fail_are_shown(
    tmp_path: Path, rendered: Rendered, old: str, new: str, told: str
) -> None:
    tests = on_cpu(tmp_path / "here", rendered, {old: new})
    done = run_ranks(tests, tmp_path)
    assert done.returncode != 0
    assert told in done.stderr
    assert "Traceback" in done.stderr.partition("--- rank")[2]
