"""What the back end's imports give: real behaviour where planning depends on it.

`Stubs.provide(module, name)` answers `from module import name` for sglang, flashinfer and triton.
Names move between modules from release to release and keep their meaning, so they are looked up by
name alone. A name without behaviour here becomes a class that may be annotated with and derived
from, but not called: the harness says so instead of guessing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum, auto
from types import SimpleNamespace
from typing import Any

import torch
from packaging.version import Version

from . import kernels
from .flashinfer import FlashInfer
from .release_code import ReleaseCode
from .spec_inputs import SpecInputs

FORWARD_BATCH = "sglang/srt/model_executor/forward_batch_info.py"
SPEC_UTILS = "sglang/srt/speculative/spec_utils.py"
DCP_LAYOUT = "sglang/srt/layers/dcp/layout.py"
DCP_PLANNER = "sglang/srt/layers/dcp/planner.py"
TRANSLATOR = "sglang/srt/mem_cache/kv_index_translator.py"
# How the code under context parallelism asks for its rank and size, in one release or another.
DCP_STATE = (
    "dcp_enabled",
    "get_attention_dcp_rank",
    "get_attention_dcp_world_size",
    "get_dcp_rank",
    "get_dcp_world_size",
    "get_parallel",
)
# Where each kernel has been, newest first.
KERNEL_FILES = {
    "create_flashinfer_kv_indices_triton": (
        "sglang/kernels/ops/attention/kv_indices.py",
        "sglang/kernels/ops/kvcache/kv_indices.py",
        "sglang/srt/layers/attention/triton_ops/kv_indices.py",
        "sglang/srt/layers/attention/utils.py",
    ),
    "generate_draft_decode_kv_indices": (
        "sglang/kernels/ops/speculative/cache_locs.py",
        "sglang/srt/speculative/triton_ops/cache_locs.py",
        "sglang/srt/speculative/spec_utils.py",
        "sglang/srt/speculative/eagle_utils.py",
    ),
    "update_kv_lens_and_indices": (
        "sglang/kernels/ops/attention/dcp_kernels.py",
        "sglang/srt/layers/dcp/kernels.py",
    ),
}


@dataclass(frozen=True)
class Shape:
    """The model and server that are served.

    max_requests: of the request pool. context_len: of the model. room: tokens by which a row of the
    page table is longer, as under speculation a request may be before it is seen to have ended.
    num_heads: of the model; each rank has num_heads / tp_size. page_size: KV cache pages.
    disable_ragged: --flashinfer-mla-disable-ragged (else an extend without prefix is ragged).
    """

    max_requests: int = 8
    context_len: int = 64
    room: int = 8
    num_heads: int = 16
    tp_size: int = 1
    dcp_size: int = 1
    dcp_rank: int = 0
    page_size: int = 1
    disable_ragged: bool = False

    @property
    def table_width(self) -> int:
        return self.context_len + self.room

    @property
    def local_heads(self) -> int:
        return self.num_heads // self.tp_size


class Unknown:
    """An imported name for which the harness has no behaviour."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(
            f"the harness has no behaviour for {type(self).__name__}; add it to stubs.py"
        )


class AttentionBackend:
    """The base class: what the back end inherits and planning uses."""

    needs_cpu_seq_lens = True

    def __init__(self) -> None:
        pass

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Nothing, as in the release."""


class Stubs:
    """Answers the imports of one release's back end; `draft_rows` is what the draft kernel logs."""

    def __init__(self, release: str, fi: FlashInfer, shape: Shape) -> None:
        self.shape = shape
        self.draft_rows: list[kernels.StoredRow] = []
        self.environment = {
            "SGLANG_ENABLE_TORCH_COMPILE": False,
            "SGLANG_FLASHINFER_WORKSPACE_SIZE": 1 << 20,
        }
        self._fi = fi
        self._buffers: dict[str, torch.Tensor] = {}
        self._known: dict[str, Any] = {}
        self.code = ReleaseCode(release, self.provide)
        self.parallel = SimpleNamespace(
            attn_tp_size=shape.tp_size,
            attn_tp_rank=0,
            dcp_enabled=shape.dcp_size > 1,
            dcp_size=shape.dcp_size,
            dcp_rank=shape.dcp_rank,
            attn_dcp_size=shape.dcp_size,
            attn_dcp_rank=shape.dcp_rank,
        )
        server_args: dict[str, Any] = {
            "disaggregation_mode": "null",
            "disable_chunked_prefix_cache": False,
            "flashinfer_mla_disable_ragged": shape.disable_ragged,
            "page_size": shape.page_size,
            "enable_dp_attention": False,
            "dp_size": 1,
            "tp_size": shape.tp_size,
            "attention_backend": "flashinfer",
            "prefill_attention_backend": "flashinfer",
            "decode_attention_backend": "flashinfer",
            "speculative_algorithm": "EAGLE",
            "enable_metadata_glue_graph": False,
        }
        self.server_args = SimpleNamespace(
            **server_args, get_attention_backends=lambda: ("flashinfer", "flashinfer")
        )
        self._server_args_dict = server_args
        indices = self._kernel("create_flashinfer_kv_indices_triton", kernels.kv_indices)
        self.kv_indices_kernel = indices
        self.specs = SpecInputs(self.code, {"create_flashinfer_kv_indices_triton": indices})
        self._makers = self._table()

    def provide(self, module: str, name: str) -> Any:
        """What `from module import name` gives; the same object each time."""
        if name not in self._known:
            maker = self._makers.get(name)
            if maker is not None:
                self._known[name] = maker()
            elif name.startswith("is_in_"):
                self._known[name] = lambda: False
            else:
                self._known[name] = type(name, (Unknown,), {"__module__": module})
        return self._known[name]

    # -- the table ---------------------------------------------------------------------------

    def _table(self) -> dict[str, Callable[[], Any]]:
        """name -> a function that makes what it stands for, called once and only when imported."""
        own = self._fi
        arguments, parallel = self.server_args, self.parallel
        table: dict[str, Any] = {
            "AttentionBackend": AttentionBackend,
            "BatchMLAPagedAttentionWrapper": own.wrapper_class,
            "BatchPrefillWithRaggedKVCacheWrapper": own.ragged_class,
            "EagleDraftInput": self.specs.EagleDraftInput,
            "EagleVerifyInput": self.specs.EagleVerifyInput,
            "SpecInput": self.specs.SpecInput,
            "SpecInputType": self.specs.SpecInputType,
            "create_flashinfer_kv_indices_triton": self.kv_indices_kernel,
            "dcp_enabled": lambda: parallel.dcp_enabled,
            "envs": _Environment(self.environment),
            "get_attention_dcp_rank": lambda: parallel.dcp_rank,
            "get_attention_dcp_world_size": lambda: parallel.dcp_size,
            "get_attention_tp_size": lambda: parallel.attn_tp_size,
            "get_buffer": self._get_buffer,
            "get_cuda_graph_max_batch_size": lambda *args: args[-1],
            "get_dcp_rank": lambda: parallel.dcp_rank,
            "get_dcp_world_size": lambda: parallel.dcp_size,
            "get_device": lambda: SimpleNamespace(device="cuda"),
            "get_disagg": lambda: arguments,
            "get_exec": lambda: SimpleNamespace(kernel=arguments, spec=arguments),
            "get_global_server_args": lambda: arguments,
            "get_parallel": lambda: parallel,
            "get_platform": lambda: SimpleNamespace(is_sm100=False, is_sm90=True),
            "get_schedule": lambda: arguments,
            "get_server_args": lambda: arguments,
            "global_config": SimpleNamespace(flashinfer_workspace_size=1 << 20),
            "global_server_args_dict": self._server_args_dict,
            "is_flashinfer_available": lambda: True,
            "is_sm100_supported": lambda *args: False,
            "jit": lambda *given, **options: given[0] if given else lambda function: function,
            "__version__": "3.6.0",
            "next_power_of_2": lambda n: 1 << max(int(n) - 1, 0).bit_length(),
            # The request pool is statically partitioned: nothing to translate.
            "unified_mla_hooks": lambda allocator: SimpleNamespace(translate_kv_loc_dense=None),
        }
        makers: dict[str, Callable[[], Any]] = {name: _constant(v) for name, v in table.items()}
        makers |= {
            "ForwardMode": lambda: self.code.take(
                FORWARD_BATCH, "ForwardMode", {"IntEnum": IntEnum, "auto": auto}
            ),
            "assert_buffer_fits": lambda: self._taken(
                ("sglang/kernels/ops/attention/utils.py", "sglang/srt/layers/attention/utils.py"),
                "assert_buffer_fits",
            ),
            "build_inner_fb_view": lambda: self._taken((FORWARD_BATCH,), "build_inner_fb_view"),
            "draft_kv_indices_buffer_width": lambda: self._taken(
                (SPEC_UTILS,), "draft_kv_indices_buffer_width"
            ),
            "draft_kv_indices_used_len": lambda: self._taken(
                (SPEC_UTILS,), "draft_kv_indices_used_len"
            ),
            "generate_draft_decode_kv_indices": lambda: self._kernel(
                "generate_draft_decode_kv_indices", kernels.draft_kv_indices(self.draft_rows)
            ),
            "plan_dcp_decode_metadata": lambda: self._taken(
                (DCP_PLANNER,),
                "plan_dcp_decode_metadata",
                *DCP_STATE,
                "update_local_kv_lens_for_dcp",
                "update_kv_lens_and_indices",
            ),
            "update_kv_lens_and_indices": lambda: self._kernel(
                "update_kv_lens_and_indices",
                kernels.shard_for_dcp(divide=Version(self.code.version) < Version("0.5.20")),
            ),
            "update_local_kv_lens_for_dcp": lambda: self.code.take(
                DCP_LAYOUT,
                "update_local_kv_lens_for_dcp",
                {"torch": torch, **{name: self.provide("", name) for name in DCP_STATE}},
                "get_dcp_lens",
            ),
        }
        return makers

    def _taken(self, paths: Sequence[str], name: str, *uses: str) -> Any:
        names = {use: self.provide("", use) for use in uses}
        return self.code.take(self.code.first(paths, name), name, {"torch": torch, **names})

    def _kernel(self, name: str, formula: kernels.Formula) -> kernels.Kernel:
        path = self.code.first(KERNEL_FILES[name], name)
        return kernels.Kernel(name, self.code.parameters(path, name), formula)

    def _get_buffer(self, name: str, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        if name not in self._buffers:
            self._buffers[name] = make()
        return self._buffers[name]

    # -- the model runner --------------------------------------------------------------------

    def model_runner(self) -> SimpleNamespace:
        """A model runner as far as the back end looks into it.

        Token p of request r has the id r * table_width + p, so that an id says whose it is.
        """
        shape = self.shape
        # One row more than there are requests: padded rows of a batch use row 0.
        rows = shape.max_requests + 1
        table = torch.arange(rows * shape.table_width, dtype=torch.int32, device="cuda")
        table = table.view(rows, shape.table_width)
        pool = SimpleNamespace(size=shape.max_requests, req_to_token=table)
        config = SimpleNamespace(
            context_len=shape.context_len,
            num_attention_heads=shape.num_heads,
            kv_lora_rank=512,
            qk_nope_head_dim=128,
            qk_rope_head_dim=64,
            v_head_dim=128,
            scaling=0.1,
        )
        return SimpleNamespace(
            model_config=config,
            device="cuda",
            gpu_id=0,
            dtype=torch.bfloat16,
            kv_cache_dtype=torch.bfloat16,
            page_size=shape.page_size,
            req_to_token_pool=pool,
            token_to_kv_pool=SimpleNamespace(),
            token_to_kv_pool_allocator=SimpleNamespace(),
            kv_index_translator=self._translator(table),
            server_args=self.server_args,
            is_draft_worker=False,
            sliding_window_size=None,
        )

    def _translator(self, table: torch.Tensor) -> Any:
        """`KVIndexTranslator` (0.5.19 and later) over a static pool, where reads pass through."""
        if not self.code.has(TRANSLATOR, "KVIndexTranslator"):
            return None
        names = {
            "torch": torch,
            "IdSpaceKind": SimpleNamespace(FULL="full"),
            "KVIndexTable": lambda **fields: SimpleNamespace(**{"v2p": None, **fields}),
            "create_flashinfer_kv_indices_triton": self.kv_indices_kernel,
            "get_parallel": self.provide("", "get_parallel"),
            # Any number of blocks stores the same indices.
            "spec_kv_index_token_blocks": lambda **kwargs: 1,
        }
        base = self.code.take(TRANSLATOR, "KVIndexTranslator", names)

        class Translator(base):  # type: ignore[misc,valid-type]
            is_translating = False
            defer_read_translate = False

            def __init__(self) -> None:  # the release's own asks the pools what they are
                self.req_to_token = table
                self._spaces: dict[str, Any] = {}

        return Translator()


class _Environment:
    """`envs`: each variable has `get()`."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values

    def __getattr__(self, name: str) -> Any:
        values = self._values
        if name.startswith("_") or name not in values:
            raise AttributeError(f"the harness has no value for the variable {name}")
        return SimpleNamespace(get=lambda: values[name])


def _constant(value: Any) -> Callable[[], Any]:
    return lambda: value
