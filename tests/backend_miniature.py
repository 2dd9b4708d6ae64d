"""A back end of SGLang's shape in a hundred lines of our own: every edit site has its place in it.

It stands for the shape of 0.5.13 to 0.5.17 where a test is about files, not about SGLang. It is
never run; nothing in it is SGLang's text.
"""

from __future__ import annotations

MINIATURE = '''\
"""A back end, in miniature."""

from __future__ import annotations

from functools import partial
from typing import Optional

import torch
from flashinfer import BatchMLAPagedAttentionWrapper


class FlashInferMLAAttnBackend:
    def __init__(self):
        self.host_arrays = {}

    def init_forward_metadata_out_graph(self, forward_batch, in_capture=False):
        forward_mode = forward_batch.forward_mode
        seq_lens = forward_batch.seq_lens
        spec_info = forward_batch.spec_info
        bs = forward_batch.batch_size
        if in_capture:
            if forward_mode.is_decode_or_idle():
                graph_wrapper = BatchMLAPagedAttentionWrapper(self.workspace, use_cuda_graph=True)
                self.indices_updater_decode.update(
                    forward_batch.req_pool_indices,
                    seq_lens,
                    decode_wrapper=graph_wrapper,
                    init_metadata_replay=False,
                    spec_info=spec_info,
                )
                self.decode_graphs[bs] = graph_wrapper
                graph_wrapper.plan = partial(fast_mla_decode_plan, graph_wrapper)
            elif forward_mode.is_target_verify():
                verify_wrapper = BatchMLAPagedAttentionWrapper(self.workspace, use_cuda_graph=True)
                self.verify_graphs[bs] = verify_wrapper
            self.apply(bs, seq_lens, seq_lens.cpu(), forward_mode, spec_info)
        else:
            self.apply(bs, seq_lens, forward_batch.seq_lens_cpu, forward_mode, spec_info)

    def init_forward_metadata(self, forward_batch):
        if forward_batch.forward_mode.is_decode_or_idle():
            self.indices_updater_decode.update(
                forward_batch.req_pool_indices,
                forward_batch.seq_lens,
                decode_wrapper=self.decode_wrapper,
                init_metadata_replay=False,
            )
        elif forward_batch.forward_mode.is_target_verify():
            self.indices_updater_prefill.update(
                forward_batch.req_pool_indices,
                forward_batch.seq_lens,
                prefix_lens=None,
                prefill_wrapper_paged=self.prefill_wrapper_verify,
                use_ragged=False,
                spec_info=forward_batch.spec_info,
            )
        else:
            use_ragged = not any(forward_batch.extend_prefix_lens_cpu)
            self.indices_updater_prefill.update(
                forward_batch.req_pool_indices,
                forward_batch.seq_lens,
                prefix_lens=forward_batch.extend_prefix_lens,
                prefill_wrapper_paged=self.prefill_wrapper_paged,
                use_ragged=use_ragged,
            )

    def apply(self, bs, seq_lens, seq_lens_cpu: Optional[torch.Tensor], forward_mode, spec_info):
        if forward_mode.is_decode_or_idle():
            assert seq_lens_cpu is not None
            kv_len_arr_cpu = seq_lens_cpu[:bs].to(torch.int32)
            self.host_arrays.update({"kv_len_arr_cpu": kv_len_arr_cpu})
            self.indices_updater_decode.update(
                self.pool[:bs],
                seq_lens[:bs],
                decode_wrapper=self.decode_graphs[bs],
                init_metadata_replay=True,
                spec_info=spec_info,
                **self.host_arrays,
            )
        elif forward_mode.is_target_verify():
            self.indices_updater_prefill.update(
                self.pool[:bs],
                seq_lens[:bs],
                prefix_lens=None,
                prefill_wrapper_paged=self.verify_graphs[bs],
                use_ragged=False,
                spec_info=spec_info,
            )


class FlashInferMLAIndicesUpdaterDecode:
    def update(
        self,
        pool,
        seq_lens,
        decode_wrapper,
        init_metadata_replay=False,
        spec_info=None,
        **more,
    ):
        self.call_begin_forward(
            decode_wrapper,
            pool,
            seq_lens,
            self.q_indptr,
            self.kv_indptr,
            spec_info,
            **more,
        )

    def call_begin_forward(
        self,
        wrapper,
        pool,
        seq_lens,
        q_indptr,
        kv_indptr,
        spec_info=None,
        **more,
    ):
        kv_lens = seq_lens.to(torch.int32)
        kv_indices = self.indices_of(pool, seq_lens, kv_indptr)
        wrapper.plan(
            q_indptr,
            kv_indptr,
            kv_indices,
            kv_lens,
            self.num_local_heads,
            512,
            64,
            1,
            False,
            self.scale,
            self.data_type,
            self.data_type,
        )


class FlashInferMLAIndicesUpdaterPrefill:
    def update(
        self,
        pool,
        seq_lens,
        prefix_lens,
        prefill_wrapper_paged,
        use_ragged,
        spec_info=None,
    ):
        self.call_begin_forward(
            prefill_wrapper_paged,
            pool,
            seq_lens,
            prefix_lens,
            self.kv_indptr,
            self.qo_indptr,
            spec_info,
        )

    def call_begin_forward(
        self,
        wrapper_paged,
        pool,
        seq_lens,
        prefix_lens,
        kv_indptr,
        qo_indptr,
        spec_info=None,
    ):
        kv_indices = self.indices_of(pool, seq_lens, kv_indptr)
        kv_len_arr = kv_indptr[1:] - kv_indptr[:-1]
        wrapper_paged.plan(
            qo_indptr,
            kv_indptr,
            kv_indices,
            kv_len_arr,
            self.num_local_heads,
            512,
            64,
            1,
            True,
            self.scale,
            self.data_type,
            self.data_type,
        )


class FlashInferMLAMultiStepDraftBackend:
    def common_template(self, forward_batch, call_fn):
        for i in range(len(self.attn_backends)):
            forward_batch.spec_info.kv_indptr = self.kv_indptr[i]
            call_fn(i, forward_batch)

    def init_forward_metadata(self, forward_batch):
        def call_fn(i, forward_batch):
            self.attn_backends[i].init_forward_metadata(forward_batch)

        self.common_template(forward_batch, call_fn)


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
'''
