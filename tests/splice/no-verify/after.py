"""No speculative decoding: decode alone has graphs."""

from __future__ import annotations

# >>> mlagen header c935ff9f1ccd
# Written by mlagen; `mlagen unpatch` takes all of it out, byte for byte.
# format: 1
# mlagen: 0.0
# flashinfer: 0.0
# flashinfer-era: of these tests
# flashinfer-source: 0000000000000000000000000000000000000000000000000000000000000000
# spec: 1111111111111111111111111111111111111111111111111111111111111111
# variants: all
# inserts: header, replay-decode-call, decode-updater-update, decode-updater-pass
# inserts: decode-updater-begin, decode-updater-plan, plans
# replaces: capture-decode, replay-decode
from dataclasses import dataclass
from typing import Any, Callable, Optional

# isort: split
# <<< mlagen header
from functools import partial

import torch
from flashinfer.mla import BatchMLAPagedAttentionWrapper


class FlashInferMLAAttnBackend:
    """Plans one model's attention."""

    def __init__(self, runner):
        self.decode_wrapper = BatchMLAPagedAttentionWrapper(runner.workspace)
        self.prefill_wrapper_paged = BatchMLAPagedAttentionWrapper(runner.workspace)
        self.prefill_wrapper_verify = BatchMLAPagedAttentionWrapper(runner.workspace)
        self.indices_updater_decode = FlashInferMLAIndicesUpdaterDecode(runner)
        self.indices_updater_prefill = FlashInferMLAIndicesUpdaterPrefill(runner)
        self.graphs = {}

    def init_forward_metadata(self, forward_batch):
        mode = forward_batch.forward_mode
        if mode.is_decode_or_idle():
            self.indices_updater_decode.update(
                forward_batch.rows,
                forward_batch.seq_lens,
                decode_wrapper=self.decode_wrapper,
                init_metadata_replay=False,
            )
        else:
            use_ragged = not any(forward_batch.prefixes)

            self.indices_updater_prefill.update(
                forward_batch.rows,
                forward_batch.seq_lens,
                forward_batch.prefix_lens,
                prefill_wrapper_paged=self.prefill_wrapper_paged,
                use_ragged=use_ragged,
            )

    def capture_graph(self, bs, rows, seq_lens, forward_mode, spec_info):
        if forward_mode.is_decode_or_idle():
            decode_wrapper = BatchMLAPagedAttentionWrapper(self, use_cuda_graph=True)
            self.indices_updater_decode.update(
                rows,
                seq_lens,
                decode_wrapper=decode_wrapper,
                init_metadata_replay=False,
            )
            self.graphs[bs] = decode_wrapper
            # >>> mlagen capture-decode a682dc071e38
            mlagen_capture_decode(
                decode_wrapper,
                bs,
                seq_lens,
                spec_info,
                num_heads=self.indices_updater_decode.num_local_heads,
                host_lens=getattr(self, "needs_cpu_seq_lens", True),
                draft_step=None,
            )
            # --- mlagen replaced 1 line:
            # |            decode_wrapper.plan = partial(fast_mla_decode_plan, decode_wrapper)
            # <<< mlagen capture-decode
        else:
            raise ValueError(forward_mode)

    def replay_graph(self, bs, rows, seq_lens, forward_mode, spec_info, seq_lens_cpu):
        if forward_mode.is_decode_or_idle():
            # >>> mlagen replay-decode 8755bd54e58d
            mlagen_request = mlagen_request_decode(
                self.graphs[bs], bs, seq_lens, seq_lens_cpu
            )
            # --- mlagen replaced 3 lines:
            # |            # The host's lengths.
            # |            kv_len_arr_cpu = seq_lens_cpu[:bs]
            # |            self.fast_decode_kwargs.update({"kv_len_arr_cpu": kv_len_arr_cpu})
            # <<< mlagen replay-decode

            self.indices_updater_decode.update(
                rows[:bs],
                seq_lens[:bs],
                decode_wrapper=self.graphs[bs],
                init_metadata_replay=True,
                # >>> mlagen replay-decode-call 5bd3bf196338
                mlagen_request=mlagen_request,
                # <<< mlagen replay-decode-call
                **self.fast_decode_kwargs,
            )
        else:
            raise ValueError(forward_mode)


class FlashInferMLAIndicesUpdaterDecode:
    def __init__(self, runner):
        self.req_to_token = runner.req_to_token_pool.req_to_token

    def update(
        self,
        rows,
        seq_lens,
        decode_wrapper,
        init_metadata_replay=False,
        spec_info=None,
        # >>> mlagen decode-updater-update a7b4d75d969b
        mlagen_request: Optional["MlagenRequest"] = None,
        # <<< mlagen decode-updater-update
        **fast_decode_kwargs,
    ):
        self.call_begin_forward(
            decode_wrapper,
            rows,
            seq_lens,
            self.kv_indptr,
            init_metadata_replay,
            spec_info,
            # >>> mlagen decode-updater-pass 9e46ed87a1be
            mlagen_request=mlagen_request,
            # <<< mlagen decode-updater-pass
            **fast_decode_kwargs,
        )

    def call_begin_forward(
        self,
        wrapper,
        rows,
        lens,
        kv_indptr,
        init_metadata_replay=False,
        spec_info=None,
        # >>> mlagen decode-updater-begin a7b4d75d969b
        mlagen_request: Optional["MlagenRequest"] = None,
        # <<< mlagen decode-updater-begin
        **fast_decode_kwargs,
    ):
        kv_lens = lens.to(torch.int32)
        if spec_info is None:
            kv_indptr[1:] = torch.cumsum(lens, dim=0)
            kv_indices = self.gather(rows, kv_indptr)
        else:
            kv_indptr = spec_info.kv_indptr
            kv_indices = spec_info.kv_indices

        # >>> mlagen decode-updater-plan 52fcebb032f6
        if mlagen_request is not None:
            mlagen_request.plan(
                mlagen_request,
                MlagenArrays(
                    qo_indptr=self.q_indptr,
                    kv_indptr=kv_indptr,
                    kv_indices=kv_indices,
                    kv_len=kv_lens,
                ),
                MlagenShape(
                    num_heads=self.num_local_heads,
                    head_dim_ckv=self.rank,
                    head_dim_kpe=self.rope,
                    page_size=1,
                    sm_scale=self.scale,
                    q_data_type=self.dtype,
                    kv_data_type=self.dtype,
                ),
            )
            return
        # <<< mlagen decode-updater-plan
        if not init_metadata_replay:
            wrapper.plan(
                self.q_indptr,
                kv_indptr,
                kv_indices,
                kv_lens,
                self.num_local_heads,
                self.rank,
                self.rope,
                1,
                False,
                self.scale,
                self.dtype,
                self.dtype,
            )
        else:
            wrapper.plan(
                fast_decode_kwargs["qo_indptr_cpu"],
                fast_decode_kwargs["kv_indptr_cpu"],
                kv_indices,
                fast_decode_kwargs["kv_len_arr_cpu"],
                self.num_local_heads,
                self.rank,
                self.rope,
                1,
                False,
                self.scale,
                self.dtype,
                self.dtype,
            )


class FlashInferMLAIndicesUpdaterPrefill:
    def update(
        self,
        rows,
        seq_lens,
        prefix_lens,
        prefill_wrapper_paged,
        use_ragged=False,
        spec_info=None,
    ):
        self.call_begin_forward(
            prefill_wrapper_paged,
            rows,
            seq_lens,
            prefix_lens,
            use_ragged,
            spec_info,
        )

    def call_begin_forward(
        self,
        wrapper_paged,
        req_pool_indices,
        paged_kernel_lens,
        prefix_lens,
        use_ragged,
        spec_info=None,
    ):
        bs = len(paged_kernel_lens)

        if spec_info is None:
            kv_indptr = self.indptr_of(paged_kernel_lens)
            kv_indices = self.room(kv_indptr)
            self.fill[(bs,)](
                req_pool_indices,
                paged_kernel_lens,
                kv_indptr,
                None,
                kv_indices,
            )
            qo_indptr = self.indptr_of(paged_kernel_lens - prefix_lens)
        else:
            kv_indices, kv_indptr, qo_indptr, _ = spec_info.generate_attn_arg_prefill()

        if use_ragged:
            self.ragged.begin_forward(qo_indptr, kv_indptr)
        else:
            # Over pages.
            lens_of_pages = kv_indptr[1:] - kv_indptr[:-1]
            wrapper_paged.plan(
                qo_indptr,
                kv_indptr,
                kv_indices,
                lens_of_pages,
                self.num_local_heads,
                self.rank,
                self.rope,
                1,
                True,
                self.scale,
                self.q_dtype,
                self.dtype,
            )


# >>> mlagen plans 51cc80632de8
@dataclass(frozen=True)
class MlagenArrays:
    kv_len: Optional[torch.Tensor]


@dataclass(frozen=True)
class MlagenShape:
    num_heads: int


@dataclass(frozen=True)
class MlagenRequest:
    plan: Callable[[Any], None]
    bound: Optional[MlagenArrays]


def mlagen_capture_decode(*given): ...


def mlagen_request_decode(*given): ...


# <<< mlagen plans
def fast_mla_decode_plan(
    self,
    qo_indptr_cpu,
    kv_indptr_cpu,
    kv_indices,
    kv_len_arr_cpu,
    num_heads,
    head_dim_ckv,
    head_dim_kpe,
    page_size,
    causal,
    sm_scale,
    q_data_type,
    kv_data_type,
):
    self._cached_module.plan(
        self._float_workspace_buffer,
        self._int_workspace_buffer,
        self._pin_memory_int_workspace_buffer,
        qo_indptr_cpu,
        kv_indptr_cpu,
        kv_len_arr_cpu,
        num_heads,
        head_dim_ckv,
        causal,
    )
