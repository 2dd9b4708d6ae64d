"""The eras of FlashInfer's MLA planner, as data. `read.py` compares what it finds with this.

A new era is a new row here, and code in `read.py` only where its state lives in a new place.
Everything was read from the releases named; the version numbers are for people, never for
decisions: forks and post-releases carry the same number and other code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from .api import PLANNER_ARGUMENTS, Era

Method = Literal["plan", "plan.default", "plan_with_staged_workspace_bytes"]
Holder = Literal["wrapper", "planned_backend"]

#: The method of 0.7's staging proxy that plans, and tells how many bytes it staged.
STAGED: Final = "plan_with_staged_workspace_bytes"

#: The class that SGLang holds, and the modules that export it (SGLang imports from the second).
WRAPPER_CLASS = "BatchMLAPagedAttentionWrapper"
EXPORTING_MODULES = ("flashinfer.mla", "flashinfer")

#: A public way to give a captured graph a new plan: flashinfer pull 5041, in no release yet.
PUBLIC_UPDATE = "update_cuda_graph_plan"
#: The argument of the wrapper's constructor that makes the update possible.
UPDATE_OPTION = "enable_cuda_graph_plan_update"
#: The class of its `metadata`, which the first of EXPORTING_MODULES exports (from 0.7.0 on).
METADATA_CLASS = "MLAPlanMetadata"

#: What FlashInfer writes for each of the nine arguments, the same from 0.2.1 to 0.7.4.
ARGUMENT_TEXTS = dict(
    zip(
        PLANNER_ARGUMENTS,
        (
            "self._float_workspace_buffer",
            "self._int_workspace_buffer",
            "self._pin_memory_int_workspace_buffer",
            "qo_indptr_host",
            "kv_indptr_host",
            "kv_len_arr_host",
            "num_heads",
            "head_dim_ckv",
            "causal",
        ),
        strict=True,
    )
)

#: The tenth argument of 0.2.1-0.2.3.
STREAM_TEXT = "get_cuda_stream(device)"

#: The arrays of the plan that the planner reads as int32 without asking.
INT32_ARRAYS = frozenset({"qo_indptr", "kv_indptr", "kv_len_arr"})


@dataclass(frozen=True)
class KnownCall:
    """One form of the private call. `path`: where the wrapper class stands, None: anywhere."""

    era: Era
    receiver: str
    method: Method
    holder: Holder
    takes_stream: bool = False
    path: str | None = None


#: Looked up in this order. 0.7's back end has both of its calls and takes the first.
KNOWN_CALLS = (
    KnownCall(Era.STREAM, "self._cached_module", "plan", "wrapper", takes_stream=True),
    KnownCall(Era.TORCH_OP, "self._cached_module", "plan.default", "wrapper"),
    KnownCall(Era.TVM_FFI, "self._cached_module", "plan", "wrapper", path="flashinfer/mla.py"),
    KnownCall(Era.MLA_PACKAGE, "self._cached_module", "plan", "wrapper"),
    KnownCall(
        Era.BACKEND_OBJECT, "cached_module", "plan_with_staged_workspace_bytes", "planned_backend"
    ),
    KnownCall(Era.BACKEND_OBJECT, "cached_module", "plan", "planned_backend"),
)

#: 0.7: the attribute of the wrapper that holds the planned back-end object, the table of the
#: back ends in the wrapper's module, and those of them that plan through the private call.
PLANNED_BACKEND = "_planned_backend"
BACKEND_TABLE = "_BACKEND_TYPES"
FA_BACKENDS = ("fa2", "fa3")

#: Set by `plan` and read by `run`, but not part of a plan: workspaces and the module are what a
#: plan is made with.
NOT_STATE = frozenset(
    {
        "_cached_module",
        "_float_workspace_buffer",
        "_int_workspace_buffer",
        "_pin_memory_int_workspace_buffer",
    }
)

#: `run` hands these two to the kernels in every release.
REQUIRED_STATE = ("_kv_indices_buf", "_plan_info")

#: State that `plan` works out. mlagen knows how to make these, as they are made in the texts named
#: (of the value, or of what its local name is assigned). All other state is a parameter of `plan`.
COMPUTED_STATE = {
    # 0.2.1-0.7.4
    "_kv_indices_buf": frozenset({"kv_indices.to(self.device, non_blocking=True)"}),
    # Whatever the private call gives; the call itself is checked apart.
    "_plan_info": None,
    # 0.7.4: (query rows, heads), and (lowest, highest + 1) page of kv_indices in use.
    "_planned_query_shape": frozenset({"(int(qo_indptr_host[batch_size].item()), num_heads)"}),
    "_planned_kv_page_range": frozenset(
        {"(int(page_min.item()), int(page_max.item()) + 1)", "(0, 0)"}
    ),
}


@dataclass(frozen=True)
class EraShape:
    """What one era looks like beside its call, to say how far another is from it.

    path: where the wrapper class stands. state: what `run` reads of a plan, in all its releases;
    more_state: in some.
    """

    era: Era
    path: str
    state: frozenset[str]
    more_state: frozenset[str] = frozenset()


_STATE = frozenset({"_kv_indices_buf", "_causal", "_page_size", "_sm_scale", "_plan_info"})
_TYPES = frozenset({"_q_data_type", "_kv_data_type"})
_PROFILER = frozenset({"_use_profiler"})

#: The oldest first.
ERA_SHAPES = (
    EraShape(Era.STREAM, "flashinfer/mla.py", _STATE, _PROFILER),
    EraShape(Era.TORCH_OP, "flashinfer/mla.py", _STATE, _PROFILER),
    EraShape(Era.TVM_FFI, "flashinfer/mla.py", _STATE, _PROFILER),
    EraShape(
        Era.MLA_PACKAGE,
        "flashinfer/mla/_core.py",
        _STATE,
        _PROFILER | _TYPES | {"_head_dim_ckv"},
    ),
    EraShape(
        Era.BACKEND_OBJECT,
        "flashinfer/mla/_batch_mla/_wrapper.py",
        _STATE | _TYPES | _PROFILER | {"_head_dim_ckv"},
        frozenset({"_planned_query_shape", "_planned_kv_page_range"}),
    ),
)

#: All state that some era has.
KNOWN_STATE = frozenset().union(*(shape.state | shape.more_state for shape in ERA_SHAPES))

#: The planner's C++ side, as packages carry it, and what `plan_info` holds, in order, the same
#: in 0.5.0, 0.6.17, 0.7.0 and 0.7.4: emitted code reads the grid and the offsets of the arrays.
SCHEDULER_HEADER = "flashinfer/data/include/flashinfer/attention/scheduler.cuh"
PLAN_INFO = (
    "num_blks_x",
    "num_blks_y",
    "q_indptr_offset",
    "kv_indptr_offset",
    "partial_indptr_offset",
    "merge_packed_offset_start_offset",
    "merge_packed_offset_end_offset",
    "merge_partial_packed_offset_start_offset",
    "merge_partial_packed_offset_end_offset",
    "merge_partial_stride_offset",
    "q_len_offset",
    "kv_len_offset",
    "q_start_offset",
    "kv_start_offset",
    "kv_end_offset",
    "work_indptr_offset",
    "partial_o_offset",
    "partial_lse_offset",
)

#: The function that builds the planner's module; from 0.7.0 it wraps it in a Python class that
#: stages the plan.
MODULE_BUILDER = "gen_batch_mla_module"
