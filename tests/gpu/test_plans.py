"""The rendered plans on a GPU, with the FlashInfer that is installed there.

Each test plans a real wrapper through the emitted functions and compares what the attention
kernel then computes, bit for bit, with a fresh plan of FlashInfer's own. Skipped, and said so,
where there is no GPU or no FlashInfer.
"""

from __future__ import annotations

import importlib.util
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)
flashinfer_mla = pytest.importorskip("flashinfer.mla")

pytestmark = pytest.mark.gpu

CKV, KPE, PAGES = 512, 64, 1 << 17
SCALE = 1.0 / (128 + 64) ** 0.5
DTYPE = torch.bfloat16


@pytest.fixture(scope="session")
def emitted(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """The functions rendered for the installed FlashInfer, imported."""
    from mlagen.codegen.flashinfer.find import find_flashinfer
    from mlagen.codegen.flashinfer.read import read_plan_api
    from mlagen.codegen.render import render, render_module
    from mlagen.codegen.spec import load_spec, shipped_spec

    package = Path(flashinfer_mla.__file__).parents[1]
    api = read_plan_api(find_flashinfer(str(package)))
    rendered = render(load_spec(shipped_spec()), api)
    folder = tmp_path_factory.mktemp("rendered") / "mlagen_rendered"
    folder.mkdir()
    (folder / "__init__.py").touch()
    names: dict[str, Any] = {"api": api}
    for module in ("plans", "hooks"):
        (folder / f"{module}.py").write_text(render_module(rendered, module, ["rendered"]))
    sys.path.insert(0, str(folder.parent))
    for module in ("plans", "hooks"):
        names.update(vars(_import(f"mlagen_rendered.{module}", folder / f"{module}.py")))
    return SimpleNamespace(**names)


def _import(name: str, place: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, place)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@dataclass
class Case:
    """Fixed-shape inputs of one attention call. A page is a token."""

    batch: int
    tokens: int
    heads: int
    causal: bool

    def __post_init__(self) -> None:
        rows = self.batch * self.tokens
        self.q = torch.randn(rows, self.heads, CKV, dtype=DTYPE, device="cuda")
        self.q_pe = torch.randn(rows, self.heads, KPE, dtype=DTYPE, device="cuda")
        self.ckv, self.kpe = _cache()
        self.qo_indptr = torch.arange(0, rows + 1, self.tokens, dtype=torch.int32, device="cuda")
        self.indices_buf = torch.zeros(1 << 20, dtype=torch.int32, device="cuda")
        self.wrapper = flashinfer_mla.BatchMLAPagedAttentionWrapper(
            _workspace(),
            use_cuda_graph=True,
            qo_indptr=torch.zeros(self.batch + 1, dtype=torch.int32, device="cuda"),
            kv_indptr=torch.zeros(self.batch + 1, dtype=torch.int32, device="cuda"),
            kv_indices=self.indices_buf,
            kv_len_arr=torch.zeros(self.batch, dtype=torch.int32, device="cuda"),
            backend="auto",
        )

    def device_arrays(self, kv_len: list[int]) -> SimpleNamespace:
        """What SGLang's index kernels leave: shuffled pages of the given lengths."""
        indptr = [0]
        for length in kv_len:
            indptr.append(indptr[-1] + length)
        pages = torch.randperm(PAGES, device="cuda")[: indptr[-1] % PAGES or PAGES]
        indices = pages.repeat(-(-indptr[-1] // pages.numel()))[: indptr[-1]].to(torch.int32)
        return SimpleNamespace(
            qo_indptr=self.qo_indptr,
            kv_indptr=torch.tensor(indptr, dtype=torch.int32, device="cuda"),
            kv_indices=indices,
            kv_len=torch.tensor(kv_len, dtype=torch.int32, device="cuda"),
        )

    def run(self, wrapper: Any, out: Any) -> None:
        wrapper.run(self.q, self.q_pe, self.ckv, self.kpe, out=out)

    def stock(self, wrapper: Any, arrays: SimpleNamespace, qo_indptr: Any = None) -> None:
        wrapper.plan(
            arrays.qo_indptr if qo_indptr is None else qo_indptr,
            arrays.kv_indptr,
            arrays.kv_indices,
            arrays.kv_len,
            self.heads,
            CKV,
            KPE,
            1,
            self.causal,
            SCALE,
            DTYPE,
            DTYPE,
        )

    def expected(self, arrays: SimpleNamespace) -> Any:
        """The output of a fresh wrapper that FlashInfer plans itself."""
        wrapper = flashinfer_mla.BatchMLAPagedAttentionWrapper(_workspace(), backend="auto")
        self.stock(wrapper, arrays)
        out = torch.full_like(self.q, float("nan"))
        self.run(wrapper, out)
        return out

    def shape(self, emitted: SimpleNamespace) -> Any:
        return emitted.MlagenShape(
            num_heads=self.heads,
            head_dim_ckv=CKV,
            head_dim_kpe=KPE,
            page_size=1,
            sm_scale=SCALE,
            q_data_type=DTYPE,
            kv_data_type=DTYPE,
        )


_made: dict[str, Any] = {}


def _cache() -> tuple[Any, Any]:
    if "cache" not in _made:
        _made["cache"] = (
            torch.randn(PAGES, 1, CKV, dtype=DTYPE, device="cuda"),
            torch.randn(PAGES, 1, KPE, dtype=DTYPE, device="cuda"),
        )
    return _made["cache"]


def _workspace() -> Any:
    if "workspace" not in _made:
        _made["workspace"] = torch.empty(128 << 20, dtype=torch.uint8, device="cuda")
    return _made["workspace"]


def _lengths(batch: int, most: int = 4096) -> list[int]:
    """Prefix lengths: one, tile boundaries and their neighbours, long ones."""
    special = [1, 2, 63, 64, 65, 127, 128, 129, 255, 256, 257]
    return [
        random.choice(special) if random.random() < 0.4 else random.randint(1, most)
        for _ in range(batch)
    ]


def _spec_info(tokens: int) -> SimpleNamespace:
    return SimpleNamespace(draft_token_num=tokens)


@dataclass
class Graph:
    """A captured graph with our plan installed, and how to plan a replay of it."""

    case: Case
    emitted: SimpleNamespace
    mode: str
    step: int = 0

    def __post_init__(self) -> None:
        case = self.case
        first = torch.ones(case.batch, dtype=torch.int64, device="cuda")
        arrays = case.device_arrays(self.kv_len([1] * case.batch))
        case.stock(case.wrapper, arrays)
        if self.mode == "verify":
            self.emitted.mlagen_capture_verify(
                case.wrapper, case.batch, first, _spec_info(case.tokens), case.heads, True
            )
        else:
            draft = self.mode == "draft"
            self.emitted.mlagen_capture_decode(
                case.wrapper,
                case.batch,
                first,
                object() if draft else None,
                case.heads,
                True,
                self.step if draft else None,
            )
        self.out = torch.empty_like(case.q)
        case.run(case.wrapper, self.out)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            case.run(case.wrapper, self.out)

    def kv_len(self, prefix: list[int]) -> list[int]:
        added = {"verify": self.case.tokens, "draft": self.step + 1, "decode": 0}[self.mode]
        return [length + added for length in prefix]

    def plan(self, prefix: list[int], arrays: SimpleNamespace, host: Any = ...) -> None:
        """Plan a replay: `host` are the host lengths, int64 as SGLang has them."""
        case = self.case
        lens_cpu = torch.tensor(prefix, dtype=torch.int64) if host is ... else host
        lens = torch.tensor(prefix, dtype=torch.int64, device="cuda") if host is None else None
        if self.mode == "verify":
            request = self.emitted.mlagen_request_verify(
                case.wrapper, case.batch, lens, lens_cpu, _spec_info(case.tokens)
            )
        else:
            # SGLang's index kernel writes the captured buffer in place.
            case.indices_buf[: arrays.kv_indices.numel()].copy_(arrays.kv_indices)
            request = self.emitted.mlagen_request_decode(case.wrapper, case.batch, lens, lens_cpu)
        request.plan(
            request,
            self.emitted.MlagenArrays(
                qo_indptr=arrays.qo_indptr,
                kv_indptr=arrays.kv_indptr,
                kv_indices=arrays.kv_indices,
                kv_len=None,
            ),
            case.shape(self.emitted),
        )

    def fresh(self) -> tuple[list[int], SimpleNamespace]:
        prefix = _lengths(self.case.batch)
        return prefix, self.case.device_arrays(self.kv_len(prefix))


CASES = [
    pytest.param("verify", 8, 3, 16, id="verify-8x3-16heads"),
    pytest.param("verify", 64, 3, 16, id="verify-64x3-16heads"),
    pytest.param("verify", 16, 4, 128, id="verify-16x4-128heads"),
    pytest.param("decode", 64, 1, 16, id="decode-64-16heads"),
    pytest.param("decode", 8, 1, 128, id="decode-8-128heads"),
    pytest.param("draft", 8, 1, 16, id="draft-8-16heads"),
    pytest.param("draft", 64, 1, 128, id="draft-64-128heads"),
]


def _graph(emitted: SimpleNamespace, mode: str, batch: int, tokens: int, heads: int) -> Graph:
    return Graph(Case(batch, tokens, heads, mode == "verify"), emitted, mode, step=2)


@pytest.mark.parametrize(("mode", "batch", "tokens", "heads"), CASES)
def test_replay_equals_a_fresh_stock_plan(
    emitted: SimpleNamespace, mode: str, batch: int, tokens: int, heads: int
) -> None:
    graph = _graph(emitted, mode, batch, tokens, heads)
    for _ in range(50):
        prefix, arrays = graph.fresh()
        graph.out.fill_(float("nan"))
        graph.plan(prefix, arrays)
        graph.graph.replay()
        assert torch.equal(graph.out, graph.case.expected(arrays)), prefix


@pytest.mark.parametrize(("mode", "batch", "tokens", "heads"), CASES)
def test_a_plan_does_not_wait(
    emitted: SimpleNamespace, mode: str, batch: int, tokens: int, heads: int
) -> None:
    graph = _graph(emitted, mode, batch, tokens, heads)
    plans = [graph.fresh() for _ in range(8)]
    graph.plan(*plans[0])
    torch.cuda.synchronize()
    ended = torch.cuda.Event()
    torch.cuda._sleep(100_000_000)  # some 50 ms of work on the GPU
    ended.record()
    torch.cuda.set_sync_debug_mode("error")
    try:
        began = time.perf_counter()
        for prefix, arrays in plans:
            graph.plan(prefix, arrays)
        took = time.perf_counter() - began
        still_busy = not ended.query()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert still_busy, f"8 plans took {took * 1e3:.1f} ms and the GPU's work was over by then"


@pytest.mark.parametrize(("mode", "batch", "tokens", "heads"), CASES)
def test_the_host_may_run_ahead(
    emitted: SimpleNamespace, mode: str, batch: int, tokens: int, heads: int
) -> None:
    graph = _graph(emitted, mode, batch, tokens, heads)
    plans = [graph.fresh() for _ in range(24)]
    expected = [graph.case.expected(arrays) for _, arrays in plans]
    outputs = [torch.empty_like(graph.out) for _ in plans]
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)
    for (prefix, arrays), output in zip(plans, outputs, strict=True):
        graph.plan(prefix, arrays)
        graph.graph.replay()
        output.copy_(graph.out)
    torch.cuda.synchronize()
    wrong = [
        i for i, pair in enumerate(zip(outputs, expected, strict=True)) if not torch.equal(*pair)
    ]
    assert not wrong


def test_the_test_sees_a_reused_pinned_buffer(emitted: SimpleNamespace) -> None:
    """A plan that does not stage is wrong behind a busy GPU, up to FlashInfer 0.6.18."""
    if not emitted.api.planner_copies:
        pytest.skip("this FlashInfer stages by itself")
    graph = _graph(emitted, "verify", 64, 3, 16)
    wrapper = graph.case.wrapper
    plans = [graph.fresh() for _ in range(8)]
    expected = [graph.case.expected(arrays) for _, arrays in plans]
    outputs = [torch.empty_like(graph.out) for _ in plans]
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)
    for (prefix, arrays), output in zip(plans, outputs, strict=True):
        graph.case.indices_buf[: arrays.kv_indices.numel()].copy_(arrays.kv_indices)
        kv_len = torch.tensor(graph.kv_len(prefix), dtype=torch.int32)
        kv_indptr = torch.zeros(kv_len.numel() + 1, dtype=torch.int32)
        torch.cumsum(kv_len, 0, dtype=torch.int32, out=kv_indptr[1:])
        wrapper._cached_module.plan(
            wrapper._float_workspace_buffer,
            wrapper._int_workspace_buffer,
            wrapper._pin_memory_int_workspace_buffer,
            wrapper.mlagen_request.qo_indptr,
            kv_indptr,
            kv_len,
            graph.case.heads,
            CKV,
            True,
        )
        graph.graph.replay()
        output.copy_(graph.out)
    torch.cuda.synchronize()
    assert any(not torch.equal(o, e) for o, e in zip(outputs, expected, strict=True))


@pytest.mark.parametrize("heads", [16, 128])
def test_eager_extends_of_varying_lengths(emitted: SimpleNamespace, heads: int) -> None:
    wrapper = flashinfer_mla.BatchMLAPagedAttentionWrapper(_workspace(), backend="auto")
    pending = []
    for turn in range(12):
        batch = random.choice([1, 3, 8, 40])
        extend = [random.randint(1, 6) for _ in range(batch)]
        prefix = _lengths(batch)
        kv_len = [p + e for p, e in zip(prefix, extend, strict=True)]
        case = Case(sum(extend), 1, heads, True)
        arrays = case.device_arrays(kv_len)
        indptr = [0]
        for tokens in extend:
            indptr.append(indptr[-1] + tokens)
        arrays.qo_indptr = torch.tensor(indptr, dtype=torch.int32, device="cuda")
        expected = case.expected(arrays)
        torch.cuda.synchronize()
        seq_lens = torch.tensor(kv_len, dtype=torch.int64, device="cuda")
        host = torch.tensor(kv_len, dtype=torch.int64)
        if turn:  # the first plan of a wrapper is FlashInfer's own
            torch.cuda._sleep(20_000_000)
            torch.cuda.set_sync_debug_mode("error")
        try:
            request = emitted.mlagen_request_extend(wrapper, seq_lens, host, extend, 1)
            request.plan(
                request,
                emitted.MlagenArrays(
                    qo_indptr=arrays.qo_indptr,
                    kv_indptr=arrays.kv_indptr,
                    kv_indices=arrays.kv_indices,
                    kv_len=None,
                ),
                case.shape(emitted),
            )
        finally:
            torch.cuda.set_sync_debug_mode("default")
        out = torch.full_like(case.q, float("nan"))
        case.run(wrapper, out)
        pending.append((out, expected))
    torch.cuda.synchronize()
    assert all(torch.equal(out, expected) for out, expected in pending)


def test_eager_draft_and_verify(emitted: SimpleNamespace) -> None:
    for mode, tokens, causal in (("draft", 1, False), ("verify", 4, True)):
        wrapper = flashinfer_mla.BatchMLAPagedAttentionWrapper(_workspace(), backend="auto")
        for _ in range(4):
            case = Case(8, tokens, 16, causal)
            prefix = _lengths(8)
            added = tokens if mode == "verify" else 2
            arrays = case.device_arrays([length + added for length in prefix])
            seq_lens = torch.tensor(prefix, dtype=torch.int64, device="cuda")
            host = torch.tensor(prefix, dtype=torch.int64)
            if mode == "verify":
                request = emitted.mlagen_request_verify_eager(
                    wrapper, seq_lens, host, _spec_info(tokens)
                )
            else:
                request = emitted.mlagen_request_draft_eager(wrapper, seq_lens, host, 1)
            request.plan(
                request,
                emitted.MlagenArrays(
                    qo_indptr=arrays.qo_indptr,
                    kv_indptr=arrays.kv_indptr,
                    kv_indices=arrays.kv_indices,
                    kv_len=None,
                ),
                case.shape(emitted),
            )
            out = torch.full_like(case.q, float("nan"))
            case.run(wrapper, out)
            assert torch.equal(out, case.expected(arrays))


def test_absent_host_lengths_are_read_once(emitted: SimpleNamespace) -> None:
    graph = _graph(emitted, "verify", 8, 3, 16)
    prefix, arrays = graph.fresh()
    graph.plan(prefix, arrays, host=None)
    graph.graph.replay()
    assert torch.equal(graph.out, graph.case.expected(arrays))


def test_a_broken_invariant_is_a_named_error(emitted: SimpleNamespace) -> None:
    graph = _graph(emitted, "verify", 8, 3, 16)
    prefix, arrays = graph.fresh()
    with pytest.raises(emitted.MlagenPlanError, match="negative KV length"):
        graph.plan([-9, *prefix[1:]], arrays)
    with pytest.raises(emitted.MlagenPlanError, match="tokens a request"):
        emitted.mlagen_request_verify(
            graph.case.wrapper, 8, None, torch.ones(8, dtype=torch.int64), _spec_info(5)
        )
    with pytest.raises(emitted.MlagenPlanError, match="8 requests"):
        emitted.mlagen_request_verify(
            graph.case.wrapper, 4, None, torch.ones(8, dtype=torch.int64), _spec_info(3)
        )


def test_a_plan_refuses_while_capturing(emitted: SimpleNamespace) -> None:
    graph = _graph(emitted, "decode", 8, 1, 16)
    prefix, arrays = graph.fresh()
    other = torch.cuda.CUDAGraph()
    with torch.cuda.graph(other):
        torch.zeros(1, device="cuda")
        with pytest.raises(emitted.MlagenPlanError, match="inside a CUDA graph capture"):
            graph.plan(prefix, arrays)


def test_heads_that_lose_keys_keep_the_stock_plan(emitted: SimpleNamespace) -> None:
    case = Case(8, 4, 40, True)
    lens = torch.ones(8, dtype=torch.int64, device="cuda")
    arrays = case.device_arrays([5] * 8)
    try:
        case.stock(case.wrapper, arrays)
    except ValueError:
        pytest.skip("this FlashInfer refuses such heads in its own plan")
    emitted.mlagen_capture_verify(case.wrapper, 8, lens, _spec_info(4), 40, True)
    assert getattr(case.wrapper, "mlagen_request", None) is None


def _floor(emitted: SimpleNamespace, graph: Graph) -> Callable[[], None]:
    """The private planner alone, as this release exposes it, with arrays made beforehand."""
    wrapper, request = graph.case.wrapper, graph.case.wrapper.mlagen_request
    holder = wrapper if emitted.api.holder == "wrapper" else wrapper._planned_backend
    nine = (
        holder._float_workspace_buffer,
        holder._int_workspace_buffer,
        holder._pin_memory_int_workspace_buffer,
        request.qo_indptr,
        request.kv_indptr,
        request.kv_len,
        graph.case.heads,
        CKV,
        graph.case.causal,
    )
    return lambda: holder._cached_module.plan(*nine)


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
def test_what_a_plan_costs(
    emitted: SimpleNamespace, busy: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Prints medians, in microseconds on the host, contenders in turn. Behind a busy GPU ours
    must not wait; the stock plan does."""
    graph = _graph(emitted, "verify", 64, 3, 16)
    prefix, arrays = graph.fresh()
    host = torch.tensor(prefix, dtype=torch.int64)
    graph.plan(prefix, arrays, host)
    stock = Case(64, 3, 16, True)
    contenders = {
        "floor": _floor(emitted, graph),
        "ours": lambda: graph.plan(prefix, arrays, host),
        "stock": lambda: stock.stock(stock.wrapper, arrays),
    }
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(60):
        for name, plan in contenders.items():
            torch.cuda.synchronize()
            if busy:
                torch.cuda._sleep(8_000_000)  # some 4 ms
            began = time.perf_counter()
            plan()
            times[name].append(time.perf_counter() - began)
    torch.cuda.synchronize()
    medians = {name: sorted(taken)[len(taken) // 2] * 1e6 for name, taken in times.items()}
    with capsys.disabled():
        print(
            f"\n{'busy' if busy else 'idle'} GPU, 64 requests: "
            + str({name: round(value) for name, value in medians.items()})
        )
    if busy:
        assert medians["ours"] < 0.5 * medians["stock"]
