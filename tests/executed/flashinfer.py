"""FlashInfer's MLA wrapper as the back end sees it, with a planner that only takes notes.

`FlashInfer(version, gpu).wrapper_class` is what `from flashinfer import
BatchMLAPagedAttentionWrapper` gives. The public signatures, the attributes and the order of what
happens in `plan` are the real ones, in the two shapes that they have had:

- up to 0.6.18 all state is on the wrapper, and the planner copies from the wrapper's reused pinned
  buffer to the device, later than the call;
- from 0.7.0 the state is on `wrapper._planned_backend`, which each plan replaces; the module stages
  its copy in fresh pinned memory.

The planner reads its arrays as C++ does: raw int32 words of host memory. What it is given becomes a
`PlanRecord`. Its int workspace holds the record's number, which travels through the pinned buffer
and the queue as the real plan does, so that a `Launch` can say which plan the kernel really used.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from packaging.version import Version

from .device import NUM_SM, DeviceTensor, Gpu

_WORK_ITEMS = 16384  # items that the planner's arrays hold
_INT_WORKSPACE = 8 * 1024 * 1024


class PlannerMisuseError(RuntimeError):
    """The planner was called in a way that on a GPU crashes or corrupts memory."""


@dataclass(frozen=True, eq=False)
class PlanRecord:
    """One call that reached the planner.

    qo_indptr, kv_indptr (batch + 1 each), kv_len (batch): as the planner read them.
    stock: through the wrapper's own `plan`, not called by the back end directly.
    pinned: the buffer that it was told to write to.
    dtypes: of the three arrays as passed; anything but int32 is misread.
    """

    number: int
    wrapper: Any = field(repr=False)
    stock: bool
    qo_indptr: list[int]
    kv_indptr: list[int]
    kv_len: list[int]
    num_heads: int
    head_dim_ckv: int
    causal: bool
    pinned: torch.Tensor = field(repr=False)
    int_workspace: torch.Tensor = field(repr=False)
    plan_info: list[int] = field(repr=False)
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype]

    @property
    def arrays(self) -> tuple[list[int], list[int], list[int]]:
        """(qo_indptr, kv_indptr, kv_len)."""
        return self.qo_indptr, self.kv_indptr, self.kv_len

    @property
    def batch_size(self) -> int:
        return len(self.kv_len)


@dataclass
class Launch:
    """What a kernel launch reads; complete once the device ran it (`gpu.drain()`).

    plan: the plan whose data lies in the int workspace when the kernel runs.
    plan_info, causal, page_size, sm_scale: what the host passes; in a graph, what it passed when it
    was captured.
    tokens: for each row of `plan` the KV indices that the kernel attends to, or None where it would
    read outside the index buffer.
    """

    plan_info: list[int]
    causal: bool
    page_size: int
    sm_scale: float
    indices: torch.Tensor = field(repr=False)
    plan: PlanRecord | None = None
    tokens: list[list[int] | None] = field(default_factory=list)

    @property
    def grid_fits(self) -> bool:
        """Does the grid that is launched match the plan that is read?"""
        assert self.plan is not None
        return self.plan_info[:2] == self.plan.plan_info[:2]


@dataclass(frozen=True)
class CapturedGraph:
    """What a CUDA graph froze when it was captured: pointers and scalars, no contents."""

    wrapper: Any
    int_workspace: torch.Tensor
    kv_indices: torch.Tensor
    plan_info: list[int]
    causal: bool
    page_size: int
    sm_scale: float


class FlashInfer:
    """One FlashInfer release, as far as MLA planning goes.

    version: such as `0.6.17`. backend: what `auto` resolves to, `fa2` or `fa3`.
    """

    def __init__(self, version: str, gpu: Gpu, *, backend: str = "fa3") -> None:
        self.version = version
        self.gpu = gpu
        self.backend = backend
        self.records: list[PlanRecord] = []
        self.wrappers: list[Any] = []
        self._number = itertools.count(1)
        self._planning: Any = None  # the wrapper whose `plan` is running
        release = Version(version)
        self.staged = release >= Version("0.7.0")
        # 0.2.1 to 0.2.3 pass a stream; 0.2.4 to 0.4.0rc3 go through torch's operator library.
        self.takes_stream = release < Version("0.2.4")
        self.torch_operator = Version("0.2.4") <= release < Version("0.4.0rc4")
        self.counts_work = release >= Version("0.7.1")
        self.checks_geometry = release >= Version("0.7.4")
        base = _WrapperWithBackend if self.staged else _WrapperWithState
        self.wrapper_class: type = type("BatchMLAPagedAttentionWrapper", (base,), {"_fi": self})
        self.ragged_class: type = RaggedWrapper
        self.module = _StagingModule(self) if self.staged else _Module(self)

    @contextlib.contextmanager
    def stock_call(self, wrapper: Any) -> Iterator[None]:
        """Plans in this block come from the wrapper's own `plan`."""
        self._planning = wrapper
        try:
            yield
        finally:
            self._planning = None

    # -- planner -----------------------------------------------------------------------------

    def plan(self, *args: Any) -> tuple[list[int], int, PlanRecord]:
        """The C++ planner: (plan_info, bytes of the int workspace that it uses, the record).

        It writes into the pinned buffer and copies nothing.
        """
        expected = 10 if self.takes_stream else 9
        if len(args) != expected:
            raise TypeError(f"plan() takes {expected} arguments, {len(args)} given")
        float_ws, int_ws, pinned, qo, kv, lens, num_heads, head_dim, causal = args[:9]
        for name, tensor in (("float workspace", float_ws), ("int workspace", int_ws)):
            if not isinstance(tensor, DeviceTensor):
                raise PlannerMisuseError(f"the {name} is not in device memory")
        if not self.gpu.is_pinned(pinned):
            raise PlannerMisuseError("the page-locked workspace is not pinned host memory")
        used = _used_bytes()
        for name, tensor in (("pinned", pinned), ("int", int_ws)):
            if tensor.numel() * tensor.element_size() < used:
                raise PlannerMisuseError(
                    f"the planner writes {used} bytes past the {name} workspace"
                )
        if self.backend == "fa2" and any(t.dtype != torch.int32 for t in (qo, kv, lens)):
            # The FA3 planner never checks.
            raise RuntimeError("the FA2 planner takes int32 arrays only")
        batch = lens.numel()
        record = PlanRecord(
            number=next(self._number),
            wrapper=self._owner(int_ws),
            stock=self._planning is not None,
            qo_indptr=_words(qo, batch + 1, "qo_indptr"),
            kv_indptr=_words(kv, batch + 1, "kv_indptr"),
            kv_len=_words(lens, batch, "kv_len"),
            num_heads=int(num_heads),
            head_dim_ckv=int(head_dim),
            causal=bool(causal),
            pinned=pinned,
            int_workspace=int_ws,
            plan_info=plan_info(_words(qo, batch + 1, "qo_indptr"), int(num_heads)),
            dtypes=(qo.dtype, kv.dtype, lens.dtype),
        )
        self.records.append(record)
        with torch._C.DisableTorchFunction():
            _number(pinned)[0] = record.number
        return list(record.plan_info), used, record

    def _owner(self, int_workspace: Any) -> Any:
        """The wrapper that this workspace belongs to; a new back end is not published yet."""
        for wrapper in reversed(self.wrappers):
            for holder in (wrapper, getattr(wrapper, "_planned_backend", None)):
                if getattr(holder, "_int_workspace_buffer", None) is int_workspace:
                    return wrapper
        return self._planning

    # -- kernels -----------------------------------------------------------------------------

    def capture(self, wrapper: Any) -> CapturedGraph:
        """Capture a graph of one `run` of this wrapper."""
        state = self.run_state(wrapper)
        return CapturedGraph(
            wrapper=wrapper,
            int_workspace=state._int_workspace_buffer,
            kv_indices=state._kv_indices_buf,
            plan_info=list(state._plan_info),
            causal=state._causal,
            page_size=state._page_size,
            sm_scale=state._sm_scale,
        )

    def launch(self, graph: CapturedGraph) -> Launch:
        """Replay a graph: queue the kernel, which reads the workspace when it runs."""
        with torch._C.DisableTorchFunction():
            # Device-side writes to the index buffer are in order with this launch already.
            indices = graph.kv_indices.as_subclass(torch.Tensor).clone()
        launch = Launch(graph.plan_info, graph.causal, graph.page_size, graph.sm_scale, indices)

        def kernel() -> None:
            number = int(_number(graph.int_workspace)[0])
            launch.plan = next((r for r in self.records if r.number == number), None)
            if launch.plan is None:
                raise PlannerMisuseError("a kernel runs on an int workspace that holds no plan")
            flat = launch.indices.tolist()
            for start, length in zip(launch.plan.kv_indptr, launch.plan.kv_len, strict=False):
                inside = start >= 0 and start + length <= len(flat)
                launch.tokens.append(flat[start : start + length] if inside else None)

        self.gpu.submit(kernel)
        return launch

    def run(self, wrapper: Any, *, rows: int, heads: int, pool_size: int) -> Launch:
        """What an eager `run` of this wrapper reads.

        rows, heads: of the query. pool_size: entries of the KV cache. 0.7.4 compares them with what
        its plan left.
        """
        if self.checks_geometry:
            state = self.run_state(wrapper)
            if tuple(state._planned_query_shape) != (rows, heads):
                raise ValueError(
                    "q_nope rows and heads must match the planned query shape: "
                    f"{(rows, heads)}, planned {tuple(state._planned_query_shape)}"
                )
            lowest, beyond = state._planned_kv_page_range
            if lowest < 0 or pool_size < beyond:
                raise ValueError("KV cache does not cover the planned CSR page indices.")
        return self.launch(self.capture(wrapper))

    def run_state(self, wrapper: Any) -> Any:
        """The object whose attributes `run` reads."""
        if not self.staged:
            return wrapper
        if wrapper._planned_backend is None:
            raise RuntimeError("BatchMLAPagedAttentionWrapper.run() called before plan().")
        return wrapper._planned_backend


def _number(workspace: torch.Tensor) -> torch.Tensor:
    """The part of a workspace that holds a record's number."""
    return workspace.view(torch.uint8)[:8].view(torch.int64)


def _new_int_workspace(device: torch.device) -> torch.Tensor:
    """A workspace that holds no plan. Only its first bytes are ever touched."""
    workspace = torch.empty((_INT_WORKSPACE,), dtype=torch.uint8, device=device)
    _number(workspace).zero_()
    return workspace


def _words(tensor: torch.Tensor, count: int, name: str) -> list[int]:
    """`count` int32 words from where the tensor begins, whatever its dtype and strides are."""
    if isinstance(tensor, DeviceTensor):
        raise PlannerMisuseError(f"{name} is in device memory; the planner reads it on the host")
    with torch._C.DisableTorchFunction():
        begin = tensor.storage_offset() * tensor.element_size() // 4
        whole = torch.empty(0, dtype=torch.int32).set_(tensor.untyped_storage())
        if begin + count > whole.numel():
            raise PlannerMisuseError(f"{name} holds fewer than {count} items")
        return whole[begin : begin + count].tolist()


def _used_bytes() -> int:
    """Nine arrays of work items and five of clusters, all int32: what each plan moves."""
    return 9 * _WORK_ITEMS * 4 + 5 * NUM_SM * 4


def plan_info(qo_indptr: list[int], num_heads: int) -> list[int]:
    """The 18 numbers that describe a plan: grid, 14 offsets of int arrays, 2 of float arrays.

    The grid is (cluster size, clusters): 2 blocks a cluster where a request has more than 64 packed
    query rows on average.
    """
    batch = len(qo_indptr) - 1
    cluster = 2 if batch and qo_indptr[-1] * num_heads // batch > 64 else 1
    items, clusters = _WORK_ITEMS * 4, NUM_SM * 4
    # In order: q_indptr, kv_indptr, partial_indptr, five merge arrays, q_len, kv_len, q_start,
    # kv_start, kv_end, work_indptr.
    sizes = [items] * 3 + [clusters] * 5 + [items] * 6
    offsets = [0, *itertools.accumulate(sizes)][: len(sizes)]
    return [cluster, NUM_SM // cluster, *offsets, 0, 2 * NUM_SM * 64 * 512 * 4]


class _Call:
    """A planner entry point; as an operator of torch's library it also has `.default`."""

    def __init__(self, call: Any, *, torch_operator: bool) -> None:
        self._call = call
        if torch_operator:
            self.default = call

    def __call__(self, *args: Any) -> Any:
        return self._call(*args)


class _Module:
    """Up to 0.6.18: the planner itself queues the copy from the pinned buffer."""

    def __init__(self, fi: FlashInfer) -> None:
        self._fi = fi
        self.plan = _Call(self._plan, torch_operator=fi.torch_operator)

    def _plan(self, *args: Any) -> list[int]:
        info, _, record = self._fi.plan(*args)
        pinned, workspace = record.pinned, record.int_workspace
        self._fi.gpu.submit(lambda: _copy_number(workspace, pinned))
        return info


class _RawModule:
    """From 0.7.0: the planner fills its pinned workspace, and copies nothing."""

    def __init__(self, fi: FlashInfer) -> None:
        self._fi = fi

    def plan(self, *args: Any) -> tuple[list[int], int]:
        info, used, _ = self._fi.plan(*args)
        return info, used


class _StagingModule:
    """From 0.7.0: a proxy copies from the scratch to fresh pinned memory, and from there."""

    def __init__(self, fi: FlashInfer) -> None:
        self._fi = fi
        self._module = _RawModule(fi)

    def plan_with_staged_workspace_bytes(self, *args: Any) -> tuple[list[int], int]:
        info, used, record = self._fi.plan(*args)
        with torch._C.DisableTorchFunction():
            staging = _number(record.pinned).clone()
        workspace = record.int_workspace
        self._fi.gpu.submit(lambda: _copy_number(workspace, staging))
        return info, used

    def plan(self, *args: Any) -> list[int]:
        return self.plan_with_staged_workspace_bytes(*args)[0]


def _copy_number(workspace: torch.Tensor, source: torch.Tensor) -> None:
    with torch._C.DisableTorchFunction():
        _number(workspace).copy_(_number(source))


class _WrapperWithState:
    """`BatchMLAPagedAttentionWrapper` up to 0.6.18."""

    _fi: FlashInfer

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        use_cuda_graph: bool = False,
        qo_indptr: torch.Tensor | None = None,
        kv_indptr: torch.Tensor | None = None,
        kv_indices: torch.Tensor | None = None,
        kv_len_arr: torch.Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        self._float_workspace_buffer = float_workspace_buffer
        self.device = float_workspace_buffer.device
        self._int_workspace_buffer = _new_int_workspace(self.device)
        self._pin_memory_int_workspace_buffer = torch.empty(
            (_INT_WORKSPACE,), dtype=torch.uint8, pin_memory=True, device="cpu"
        )
        self._use_cuda_graph = use_cuda_graph
        self._qo_indptr_buf: Any = qo_indptr
        self._kv_indptr_buf: Any = kv_indptr
        self._kv_indices_buf: Any = kv_indices
        self._kv_len_arr_buf: Any = kv_len_arr
        self._backend = self._fi.backend if backend == "auto" else backend
        self._fi.wrappers.append(self)

    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        kv_len_arr: torch.Tensor,
        num_heads: int,
        head_dim_ckv: int,
        head_dim_kpe: int,
        page_size: int,
        causal: bool,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
        use_profiler: bool = False,
    ) -> None:
        self._cached_module = self._fi.module
        host = [t.to("cpu") for t in (qo_indptr, kv_indptr, kv_len_arr)]
        if self._use_cuda_graph:
            self._qo_indptr_buf.copy_(qo_indptr, non_blocking=True)
            self._kv_indptr_buf.copy_(kv_indptr, non_blocking=True)
            self._kv_indices_buf[: len(kv_indices)].copy_(kv_indices, non_blocking=True)
            self._kv_len_arr_buf.copy_(kv_len_arr, non_blocking=True)
        else:
            self._qo_indptr_buf = qo_indptr.to(self.device, non_blocking=True)
            self._kv_indptr_buf = kv_indptr.to(self.device, non_blocking=True)
            self._kv_indices_buf = kv_indices.to(self.device, non_blocking=True)
            self._kv_len_arr_buf = kv_len_arr.to(self.device, non_blocking=True)
        self._causal = causal
        self._page_size = page_size
        self._sm_scale = sm_scale
        self._q_data_type = q_data_type
        self._kv_data_type = kv_data_type
        self._head_dim_ckv = head_dim_ckv
        self._use_profiler = use_profiler
        args: tuple[Any, ...] = (
            self._float_workspace_buffer,
            self._int_workspace_buffer,
            self._pin_memory_int_workspace_buffer,
            *host,
            num_heads,
            head_dim_ckv,
            causal,
        )
        if self._fi.takes_stream:
            args = (*args, 0)
        with self._fi.stock_call(self):
            self._plan_info = self._cached_module.plan(*args)


class _FaBackend:
    """`wrapper._planned_backend` from 0.7.0: made anew by each plan."""

    def __init__(self, fi: FlashInfer, wrapper: _WrapperWithBackend) -> None:
        self._fi = fi
        self._backend = fi.backend
        self._float_workspace_buffer = wrapper._float_workspace_buffer
        self.device = self._float_workspace_buffer.device
        self._use_cuda_graph = wrapper._use_cuda_graph
        before = wrapper._planned_backend
        # A graph's workspace is in its captured launches: it stays.
        self._int_workspace_buffer = (
            before._int_workspace_buffer
            if self._use_cuda_graph and before is not None
            else _new_int_workspace(self.device)
        )
        self._pin_memory_int_workspace_buffer = torch.empty(
            (_INT_WORKSPACE,), dtype=torch.uint8, pin_memory=True, device="cpu"
        )
        self._qo_indptr_buf: Any = wrapper._qo_indptr_buf
        self._kv_indptr_buf: Any = wrapper._kv_indptr_buf
        self._kv_indices_buf: Any = wrapper._kv_indices_buf
        self._kv_len_arr_buf: Any = wrapper._kv_len_arr_buf

    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        kv_len_arr: torch.Tensor,
        num_heads: int,
        head_dim_ckv: int,
        causal: bool,
    ) -> None:
        if self._fi.counts_work:
            _check_workload(qo_indptr, kv_len_arr)
        module = self._fi.module
        host = [t.to("cpu") for t in (qo_indptr, kv_indptr, kv_len_arr)]
        info, used = module.plan_with_staged_workspace_bytes(
            self._float_workspace_buffer,
            self._int_workspace_buffer,
            self._pin_memory_int_workspace_buffer,
            *host,
            num_heads,
            head_dim_ckv,
            causal,
        )
        if self._fi.checks_geometry:
            self._planned_query_shape = (int(host[0][-1].item()), num_heads)
            lowest, highest = torch.aminmax(kv_indices[int(host[1][0]) : int(host[1][-1])])
            self._planned_kv_page_range = (int(lowest.item()), int(highest.item()) + 1)
        if self._use_cuda_graph:
            for reserved, source in (
                (self._qo_indptr_buf, qo_indptr),
                (self._kv_indptr_buf, kv_indptr),
                (self._kv_indices_buf[: len(kv_indices)], kv_indices),
                (self._kv_len_arr_buf, kv_len_arr),
            ):
                if reserved.shape != source.shape:
                    raise ValueError("CUDA graph reserved buffer has incompatible capacity.")
                reserved.copy_(source, non_blocking=True)
        else:
            self._qo_indptr_buf = qo_indptr.to(self.device, non_blocking=True)
            self._kv_indptr_buf = kv_indptr.to(self.device, non_blocking=True)
            self._kv_indices_buf = kv_indices.to(self.device, non_blocking=True)
            self._kv_len_arr_buf = kv_len_arr.to(self.device, non_blocking=True)
        self._cached_module = module
        self._plan_info = info
        self._staged_int_workspace_bytes = used


def _check_workload(qo_indptr: torch.Tensor, kv_len_arr: torch.Tensor) -> None:
    """0.7.1 and later count the work items on the host: two reads."""
    qo_indptr.to(device="cpu", dtype=torch.int64).tolist()
    kv_len_arr.to(device="cpu", dtype=torch.int64).tolist()


def _check_csr(
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_len_arr: torch.Tensor,
    page_size: int,
) -> None:
    """What 0.7 demands of its metadata: three reads."""
    for name, tensor in (
        ("qo_indptr", qo_indptr),
        ("kv_indptr", kv_indptr),
        ("kv_indices", kv_indices),
        ("kv_len_arr", kv_len_arr),
    ):
        if tensor.dtype != torch.int32:
            raise ValueError(f"{name} metadata must have dtype torch.int32, got {tensor.dtype}.")
        if not tensor.is_contiguous():
            raise ValueError(f"{name} metadata must be contiguous.")
    qo, kv, lens = (
        t.to(device="cpu", dtype=torch.int64) for t in (qo_indptr, kv_indptr, kv_len_arr)
    )
    if lens.numel() + 1 != qo.numel() or kv.numel() != qo.numel():
        raise ValueError("CSR metadata batch dimensions must agree.")
    if int(kv[-1]) > kv_indices.numel():
        raise ValueError(
            f"kv_indices metadata has {kv_indices.numel()} entries but kv_indptr[-1] is "
            f"{int(kv[-1])}."
        )
    if not torch.equal((lens + page_size - 1) // page_size, kv[1:] - kv[:-1]):
        raise ValueError(
            "CSR metadata page counts in kv_indptr must equal ceil(kv_len_arr / page_size)."
        )


class _WrapperWithBackend:
    """`BatchMLAPagedAttentionWrapper` from 0.7.0."""

    _fi: FlashInfer
    _MIRRORED = ("_cached_module", "_int_workspace_buffer", "_pin_memory_int_workspace_buffer")

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        use_cuda_graph: bool = False,
        qo_indptr: torch.Tensor | None = None,
        kv_indptr: torch.Tensor | None = None,
        kv_indices: torch.Tensor | None = None,
        kv_len_arr: torch.Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        self._float_workspace_buffer = float_workspace_buffer
        self.device = float_workspace_buffer.device
        self._use_cuda_graph = use_cuda_graph
        self._qo_indptr_buf = qo_indptr
        self._kv_indptr_buf = kv_indptr
        self._kv_indices_buf = kv_indices
        self._kv_len_arr_buf = kv_len_arr
        self._backend = backend
        self._planned_backend: _FaBackend | None = None
        self._planned_backend_name: str | None = None
        self._input_contract: object = None
        self._planned_query_layout: str | None = None
        self._planned_kv_cache_layout: str | None = None
        self._fi.wrappers.append(self)

    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        kv_len_arr: torch.Tensor,
        num_heads: int,
        head_dim_ckv: int,
        head_dim_kpe: int,
        page_size: int,
        causal: bool,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
        use_profiler: bool = False,
    ) -> None:
        _check_csr(qo_indptr, kv_indptr, kv_indices, kv_len_arr, page_size)
        if self._fi.counts_work:
            _check_workload(qo_indptr, kv_len_arr)
        if self._fi.checks_geometry:
            # The size of the float workspace is judged from the query offsets.
            qo_indptr.to(device="cpu", dtype=torch.int64)
        planned = _FaBackend(self._fi, self)
        with self._fi.stock_call(self):
            planned.plan(
                qo_indptr, kv_indptr, kv_indices, kv_len_arr, num_heads, head_dim_ckv, causal
            )
        state = {
            "_causal": causal,
            "_page_size": page_size,
            "_sm_scale": sm_scale,
            "_head_dim_ckv": head_dim_ckv,
            "_q_data_type": q_data_type,
            "_kv_data_type": kv_data_type,
            "_use_profiler": use_profiler,
        }
        for name, value in state.items():
            setattr(planned, name, value)
            setattr(self, name, value)
        self._backend = planned._backend
        self._planned_backend = planned
        self._planned_backend_name = planned._backend
        self._input_contract = object()
        self._planned_query_layout = self._planned_kv_cache_layout = "split"
        for name in (
            *self._MIRRORED,
            "_plan_info",
            "_qo_indptr_buf",
            "_kv_indptr_buf",
            "_kv_indices_buf",
            "_kv_len_arr_buf",
        ):
            setattr(self, name, getattr(planned, name))


class RaggedWrapper:
    """`BatchPrefillWithRaggedKVCacheWrapper`: planned by the back end, never looked at here."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.begun: list[dict[str, Any]] = []

    def begin_forward(self, **kwargs: Any) -> None:
        self.begun.append(kwargs)

    plan = begin_forward
