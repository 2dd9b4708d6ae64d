"""The plans are called with keywords, over pages of more than one token."""

from __future__ import annotations

from functools import partial
from typing import Callable

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
        elif mode.is_draft_extend():
            self.indices_updater_prefill.update(
                forward_batch.rows,
                forward_batch.seq_lens,
                prefix_lens=None,
                prefill_wrapper_paged=self.prefill_wrapper_paged,
                spec_info=forward_batch.spec_info,
            )
        elif mode.is_target_verify():
            self.indices_updater_prefill.update(
                forward_batch.rows,
                forward_batch.seq_lens,
                prefix_lens=None,
                prefill_wrapper_paged=self.prefill_wrapper_verify,
                spec_info=forward_batch.spec_info,
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
                spec_info=spec_info,
            )
            self.graphs[bs] = decode_wrapper
            decode_wrapper.plan = partial(fast_mla_decode_plan, decode_wrapper)
        elif forward_mode.is_target_verify():
            verify_wrapper = BatchMLAPagedAttentionWrapper(self, use_cuda_graph=True)
            self.indices_updater_prefill.update(
                rows,
                seq_lens,
                prefix_lens=None,
                prefill_wrapper_paged=verify_wrapper,
                spec_info=spec_info,
            )
            self.graphs[bs] = verify_wrapper
        elif forward_mode.is_draft_extend():
            extend_wrapper = BatchMLAPagedAttentionWrapper(self, use_cuda_graph=True)
            self.indices_updater_prefill.update(
                rows,
                seq_lens,
                prefix_lens=None,
                prefill_wrapper_paged=extend_wrapper,
                spec_info=spec_info,
            )
            self.graphs[bs] = extend_wrapper
        else:
            raise ValueError(forward_mode)

    def replay_graph(self, bs, rows, seq_lens, forward_mode, spec_info, seq_lens_cpu):
        if forward_mode.is_decode_or_idle():
            # The host's lengths.
            assert seq_lens_cpu is not None
            kv_len_arr_cpu = seq_lens_cpu[:bs]
            num_pages_per_req = (kv_len_arr_cpu + (self.page_size - 1)) // self.page_size
            self.cuda_graph_kv_indptr_cpu[1 : bs + 1] = torch.cumsum(num_pages_per_req, 0)
            self.fast_decode_kwargs.update({"kv_len_arr_cpu": kv_len_arr_cpu})

            self.indices_updater_decode.update(
                rows[:bs],
                seq_lens[:bs],
                decode_wrapper=self.graphs[bs],
                init_metadata_replay=True,
                spec_info=spec_info,
                **self.fast_decode_kwargs,
            )
        elif forward_mode.is_target_verify():
            self.indices_updater_prefill.update(
                rows[:bs],
                seq_lens[:bs],
                prefix_lens=None,
                prefill_wrapper_paged=self.graphs[bs],
                spec_info=spec_info,
            )
        elif forward_mode.is_draft_extend():
            self.indices_updater_prefill.update(
                rows[:bs],
                seq_lens[:bs],
                prefix_lens=None,
                prefill_wrapper_paged=self.graphs[bs],
                spec_info=spec_info,
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
        **fast_decode_kwargs,
    ):
        self.call_begin_forward(
            decode_wrapper,
            rows,
            seq_lens,
            self.kv_indptr,
            init_metadata_replay,
            spec_info,
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
        **fast_decode_kwargs,
    ):
        kv_lens = lens.to(torch.int32)
        if spec_info is None:
            kv_indptr[1:] = torch.cumsum(lens, dim=0)
            kv_indices = self.gather(rows, kv_indptr)
        else:
            kv_indptr = spec_info.kv_indptr
            kv_indices = spec_info.kv_indices

        if not init_metadata_replay:
            wrapper.plan(
                qo_indptr=self.q_indptr,
                kv_indptr=kv_indptr,
                kv_indices=kv_indices,
                kv_len_arr=kv_lens,
                num_heads=self.num_local_heads,
                head_dim_ckv=self.rank,
                head_dim_kpe=self.rope,
                page_size=self.page_size,
                causal=False,
                sm_scale=self.scale,
                q_data_type=self.dtype,
                kv_data_type=self.dtype,
            )
        else:
            wrapper.plan(
                qo_indptr_cpu=fast_decode_kwargs["qo_indptr_cpu"],
                kv_indptr_cpu=fast_decode_kwargs["kv_indptr_cpu"],
                kv_indices=kv_indices,
                kv_len_arr_cpu=fast_decode_kwargs["kv_len_arr_cpu"],
                num_heads=self.num_local_heads,
                head_dim_ckv=self.rank,
                head_dim_kpe=self.rope,
                page_size=self.page_size,
                causal=False,
                sm_scale=self.scale,
                q_data_type=self.dtype,
                kv_data_type=self.dtype,
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
            if spec_info is not None:
                assert self.page_size == 1
                tokens = kv_indptr[1:] - kv_indptr[:-1]
            else:
                tokens = lens.to(torch.int32)
            wrapper_paged.plan(
                qo_indptr=qo_indptr,
                kv_indptr=kv_indptr,
                kv_indices=kv_indices,
                kv_len_arr=tokens,
                num_heads=self.num_local_heads,
                head_dim_ckv=self.rank,
                head_dim_kpe=self.rope,
                page_size=self.page_size,
                causal=True,
                sm_scale=self.scale,
                q_data_type=self.q_dtype,
                kv_data_type=self.dtype,
            )


class FlashInferMLAMultiStepDraftBackend:
    def __init__(self, runner, steps):
        self.steps = steps
        self.attn_backends = []
        for _ in range(steps - 1):
            self.attn_backends.append(FlashInferMLAAttnBackend(runner))

    def common_template(self, forward_batch, buffer, call_fn: Callable):
        self.fill(buffer, forward_batch)
        for i in range(self.steps - 1):
            forward_batch.spec_info.kv_indptr = self.kv_indptr[i]
            forward_batch.spec_info.kv_indices = buffer[i]
            call_fn(i, forward_batch)

    def init_forward_metadata(self, forward_batch):
        def one_step(i, forward_batch):
            self.attn_backends[i].plan_eagerly(forward_batch)

        self.common_template(forward_batch, self.eager_buffer(), one_step)


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
