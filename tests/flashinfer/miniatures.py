"""FlashInfers of a few lines, one for each era, to be bent by the tests.

Written for these tests: they have what mlagen looks at and nothing else. `wrapper_era` makes those
whose wrapper plans by itself (0.2.1 to 0.6.18), `backend_era` those with a back-end object (0.7).
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mlagen.codegen.flashinfer.eras import PLAN_INFO, SCHEDULER_HEADER
from mlagen.codegen.flashinfer.find import FlashInferSource

NINE = (
    "self._float_workspace_buffer",
    "self._int_workspace_buffer",
    "self._pin_memory_int_workspace_buffer",
    "qo_indptr_host",
    "kv_indptr_host",
    "kv_len_arr_host",
    "num_heads",
    "head_dim_ckv",
    "causal",
)

#: The positional parameters of `plan`, the same in all of them.
PARAMETERS = (
    "qo_indptr",
    "kv_indptr",
    "kv_indices",
    "kv_len_arr",
    "num_heads",
    "head_dim_ckv",
    "head_dim_kpe",
    "page_size",
    "causal",
    "sm_scale",
    "q_data_type",
    "kv_data_type",
    "use_profiler",
)

STREAM = (*NINE, "get_cuda_stream(device)")

Files = dict[str, str]


@dataclass(frozen=True)
class MemoryTree:
    """Files in memory, as a FlashInferSource wants them."""

    files: Mapping[str, bytes]

    def read(self, path: str) -> bytes | None:
        return self.files.get(path)

    def exists(self, path: str) -> bool:
        return path in self.files


def source(files: Mapping[str, str | bytes], version: str | None = "9.9") -> FlashInferSource:
    """A FlashInfer that consists of `files`, which carries the version that no release has."""
    data = {path: f.encode() if isinstance(f, str) else f for path, f in files.items()}
    return FlashInferSource("flashinfer-python 9.9", version, "memory", MemoryTree(data))


def call(*arguments: str, form: str = "self._cached_module.plan") -> str:
    """The private call, with the nine arguments or those given."""
    return f"{form}({', '.join(arguments or NINE)})"


WRAPPER = '''\
import torch
from {jit} import gen_batch_mla_module


class BatchMLAPagedAttentionWrapper:
    def __init__(self, float_workspace_buffer, backend="auto"):
        self._float_workspace_buffer = float_workspace_buffer

    def plan(
        self, qo_indptr, kv_indptr, kv_indices, kv_len_arr, num_heads, head_dim_ckv, head_dim_kpe,
        page_size, causal, sm_scale, q_data_type, kv_data_type, use_profiler=False,
    ):
        """Plan."""
        self._cached_module = gen_batch_mla_module(q_data_type).build_and_load()
        qo_indptr_host = qo_indptr.to("cpu")
        kv_indptr_host = kv_indptr.to("cpu")
        kv_len_arr_host = kv_len_arr.to("cpu")
        if self._use_cuda_graph:
            self._kv_indices_buf[: len(kv_indices)].copy_(kv_indices)
        else:
            self._kv_indices_buf = kv_indices.to(self.device, non_blocking=True)
        self._causal = causal
        self._page_size = page_size
        self._sm_scale = sm_scale
{planning}

    def run(self, q_nope, q_pe, ckv_cache, kpe_cache, out=None):
        self._cached_module.run(
            self._float_workspace_buffer, self._int_workspace_buffer, self._plan_info,
            q_nope, q_pe, ckv_cache, kpe_cache, self._kv_indices_buf, out,
            self._causal, self._page_size, self._sm_scale,
        )
        return out
'''

JIT = """\
def gen_batch_mla_module(dtype):
    return make_spec(dtype)
"""

PLANNING = "        self._plan_info = " + call()

STREAM_PLANNING = f"""\
        with self.device as device:
            self._plan_info = {call(*STREAM)}"""

TORCH_OP_PLANNING = "        self._plan_info = " + call(form="self._cached_module.plan.default")


def wrapper_era(planning: str = PLANNING, path: str = "flashinfer/mla.py") -> Files:
    """A FlashInfer whose wrapper plans by itself. `planning` are lines of its `plan`."""
    dots = "." * (path.count("/") if path.endswith(".py") else 1)
    files = {
        "flashinfer/__init__.py": "from .mla import BatchMLAPagedAttentionWrapper as X\n",
        "flashinfer/jit/__init__.py": JIT,
        path: WRAPPER.format(planning=planning, jit=f"{dots}jit"),
    }
    if path.startswith("flashinfer/mla/"):
        stem = path.removeprefix("flashinfer/mla/").removesuffix(".py").replace("/", ".")
        files["flashinfer/mla/__init__.py"] = f"from .{stem} import *\n"
    return files


BACKEND_WRAPPER = """\
from ._fa import Fa2, Fa3

_BACKEND_TYPES: dict[str, type] = {"fa2": Fa2, "fa3": Fa3}


class BatchMLAPagedAttentionWrapper:
    def plan(self, *, metadata=None, num_heads=None, causal=None, q_data_type=None):
        planned_backend = _BACKEND_TYPES[self._backend].plan_from_wrapper(make(metadata))
        self._planned_backend = planned_backend
        self._q_data_type = q_data_type
        self._plan_info = getattr(planned_backend, "_plan_info", None)

    def run(self, query, kv_cache):
        check(query, self._q_data_type)
        planned_backend = self._planned_backend
        return planned_backend.run_from_wrapper(query=query, kv_cache=kv_cache)
"""

BACKEND = """\
from ...jit import gen_batch_mla_module


class Mechanics:
    def _stage(self, kv_indices):
        self._kv_indices_buf = kv_indices.to(self.device, non_blocking=True)

    def _plan_generated(
        self, qo_indptr, kv_indptr, kv_indices, kv_len_arr, num_heads, head_dim_ckv, causal
    ):
        cached_module = gen_batch_mla_module().build_and_load()
        qo_indptr_host = qo_indptr.to("cpu")
        kv_indptr_host = kv_indptr.to("cpu")
        kv_len_arr_host = kv_len_arr.to("cpu")
        plan_args = ({nine})
{planning}
        self._stage(kv_indices)
        self._cached_module = cached_module
        self._causal = causal
        self._plan_info = plan_info


class Base(Mechanics):
    @classmethod
    def plan_from_wrapper(cls, args):
        backend = cls(args)
        backend.plan(**args)
        return backend

    def run_from_wrapper(self, *, query, kv_cache):
        return self._run_generated(query, kv_cache)

    def _run_generated(self, query, kv_cache):
        self._cached_module.run(self._plan_info, query, kv_cache, self._kv_indices_buf)
        return mask(self._causal)


class Fa2(Base):
    def plan(self, **args):
        self._plan_generated(**args)


class Fa3(Base):
    def plan(self, **args):
        self._plan_generated(**args)
"""

BACKEND_PLANNING = """\
        if hasattr(cached_module, "plan_with_staged_workspace_bytes"):
            plan_info, staged = cached_module.plan_with_staged_workspace_bytes(*plan_args)
        else:
            plan_info = cached_module.plan(*plan_args)"""

STAGING_JIT = """\
class Proxy:
    def plan_with_staged_workspace_bytes(self, *args):
        plan_info, count = self._module.plan(*args)
        args[1][:count].copy_(pinned(args[2][:count]), non_blocking=True)
        return plan_info, count


def gen_batch_mla_module():
    return make_spec(adapter=Proxy)
"""


def backend_era(
    planning: str = BACKEND_PLANNING, nine: tuple[str, ...] = NINE, jit: str = STAGING_JIT
) -> Files:
    """A FlashInfer with a back-end object that plans. `planning` are lines of its planner."""
    return {
        "flashinfer/__init__.py": "",
        "flashinfer/jit/__init__.py": jit,
        "flashinfer/mla/__init__.py": "from ._batch import BatchMLAPagedAttentionWrapper\n",
        "flashinfer/mla/_batch/__init__.py": (
            "from ._wrapper import BatchMLAPagedAttentionWrapper\n"
        ),
        "flashinfer/mla/_batch/_wrapper.py": BACKEND_WRAPPER,
        "flashinfer/mla/_batch/_fa.py": BACKEND.format(planning=planning, nine=", ".join(nine)),
    }


def with_header(files: Files, entries: tuple[str, ...] = PLAN_INFO) -> Files:
    """The FlashInfer with the header of its planner, which says what plan_info holds."""
    body = ",\n            ".join(entries)
    text = f"""\
struct MLAPlanInfo {{
  std::vector<int64_t> ToVector() const {{
    return {{{body}}};
  }}
}};
"""
    return {**files, SCHEDULER_HEADER: text}


UPDATE = """
    def update_cuda_graph_plan(self, *, metadata):
        if not self._can_update:
            raise RuntimeError("made without enable_cuda_graph_plan_update=True")
        self._replan(metadata)
"""

METADATA = """

class MLAPlanMetadata:
    @classmethod
    def csr(cls, qo_indptr, kv_indptr, kv_indices, kv_len_arr):
        return cls(qo_indptr, kv_indptr, kv_indices, kv_len_arr)
"""


def with_update(
    files: Files | None = None, *, update: str = UPDATE, metadata: str = METADATA
) -> Files:
    """A FlashInfer that has a public update as well: the method goes into the wrapper's class, the
    class of its metadata beside it. flashinfer pull 5041, as far as it tells."""
    files = dict(files or wrapper_era(path="flashinfer/mla/_core.py"))
    [path] = [path for path, text in files.items() if "class BatchMLAPagedAttentionWrapper" in text]
    made = """\
class BatchMLAPagedAttentionWrapper:
    def __init__(
        self, float_workspace_buffer, backend="auto", *, enable_cuda_graph_plan_update=False
    ):
        self._float_workspace_buffer = float_workspace_buffer
        self._can_update = bool(enable_cuda_graph_plan_update)
"""
    head, _, body = files[path].partition("class BatchMLAPagedAttentionWrapper:\n")
    if "def __init__" in body:
        body = body[body.index("    def plan(") :]
    files[path] = f"{head}{made}\n{body}{update}{metadata}"
    if "_batch" in path:
        files["flashinfer/mla/__init__.py"] += "from ._batch._wrapper import MLAPlanMetadata\n"
    return files


def write(files: Mapping[str, str], folder: Path) -> None:
    """Lay the files out below `folder`, as a checkout or a site-packages has them."""
    for path, text in files.items():
        place = folder / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(text.encode())


def write_wheel(files: Mapping[str, str], folder: Path, version: str = "9.9") -> Path:
    """A wheel of the files, named and described as FlashInfer's are."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"flashinfer_python-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for name, text in files.items():
            wheel.writestr(name, text)
        info = f"flashinfer_python-{version}.dist-info"
        metadata = f"Metadata-Version: 2.1\nName: flashinfer-python\nVersion: {version}\n\nText.\n"
        wheel.writestr(f"{info}/METADATA", metadata)
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return path
