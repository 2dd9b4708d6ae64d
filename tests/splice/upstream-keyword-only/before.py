"""As upstream, and a parameter is called plan; DFLASH inputs have a plan of their own."""

from __future__ import annotations

from functools import partial
from typing import Callable

import torch
from flashinfer.mla import BatchMLAPagedAttentionWrapper
from sglang.runtime import get_parallel
from sglang.srt.layers.dcp import (
    plan_shards,
    update_local_kv_lens_for_dcp,
)


class FlashInferMLAAttnBackend:
    """Plans one model's attention."""

    def __init__(self, runner):
        self.req_to_token_pool = runner.req_to_token_pool
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
                plan=forward_batch.kv_loc_plan,
            )
        elif mode.is_target_verify():
            self.indices_updater_prefill.update(
                forward_batch.rows,
                forward_batch.seq_lens,
                prefix_lens=None,
                prefill_wrapper_paged=self.prefill_wrapper_verify,
                spec_info=forward_batch.spec_info,
                plan=forward_batch.kv_loc_plan,
            )
        else:
            use_ragged = not any(forward_batch.prefixes)

            # Arrays of the host for draft-extend.
            qo_indptr_cpu = kv_indptr_cpu = kv_len_arr_cpu = None
            if not use_ragged and forward_batch.seq_lens_cpu is not None:
                qo_indptr_cpu = self.fast_plan_qo_indptr_cpu
                kv_indptr_cpu = self.fast_plan_kv_indptr_cpu
                kv_len_arr_cpu = self.fast_plan_kv_len_arr_cpu

            self.indices_updater_prefill.update(
                forward_batch.rows,
                forward_batch.seq_lens,
                forward_batch.prefix_lens,
                prefill_wrapper_paged=self.prefill_wrapper_paged,
                use_ragged=use_ragged,
                qo_indptr_cpu=qo_indptr_cpu,
                kv_indptr_cpu=kv_indptr_cpu,
                kv_len_arr_cpu=kv_len_arr_cpu,
                plan=forward_batch.kv_loc_plan,
            )

    def init_forward_metadata_out_graph(self, forward_batch, in_capture=False):
        bs = forward_batch.batch_size
        seq_lens = forward_batch.seq_lens
        forward_mode = forward_batch.forward_mode
        spec_info = forward_batch.spec_info

        if in_capture:
            if forward_mode.is_decode_or_idle():
                decode_wrapper = BatchMLAPagedAttentionWrapper(self, use_cuda_graph=True)
                self.indices_updater_decode.update(
                    forward_batch.rows,
                    seq_lens,
                    decode_wrapper=decode_wrapper,
                    init_metadata_replay=False,
                    spec_info=spec_info,
                    plan=forward_batch.kv_loc_plan,
                )
                self.graphs[bs] = decode_wrapper
                # Behind the first plan, which loads the module.
                decode_wrapper.plan = partial(fast_mla_decode_plan, decode_wrapper)
            elif forward_mode.is_target_verify():
                graph_wrapper = BatchMLAPagedAttentionWrapper(self, use_cuda_graph=True)
                self.graphs[self.key(bs, spec_info)] = graph_wrapper
            else:
                raise ValueError(forward_mode)

            self.plan_graph(
                plan=forward_batch.kv_loc_plan,
                bs=bs,
                rows=forward_batch.rows,
                seq_lens=seq_lens,
                forward_mode=forward_mode,
                spec_info=spec_info,
                seq_lens_cpu=seq_lens.cpu(),
            )
            if forward_mode.is_target_verify() and (
                spec_info is None or spec_info.kind != "dflash"
            ):
                # From now on without a wait.
                graph_wrapper.plan = partial(fast_mla_prefill_plan, graph_wrapper)
        else:
            self.plan_graph(
                plan=forward_batch.kv_loc_plan,
                bs=bs,
                rows=forward_batch.rows,
                seq_lens=seq_lens,
                forward_mode=forward_mode,
                spec_info=spec_info,
                seq_lens_cpu=forward_batch.seq_lens_cpu,
            )

    @staticmethod
    def key(bs, spec_info):
        return bs if spec_info.ragged_verify_layout is None else ("ragged", bs)

    def plan_graph(self, plan, bs, rows, seq_lens, forward_mode, spec_info, seq_lens_cpu):
        """Captures and replays alike."""
        if forward_mode.is_decode_or_idle():
            assert seq_lens_cpu is not None
            kv_len_arr_cpu = seq_lens_cpu[:bs].to(torch.int32)
            update_local_kv_lens_for_dcp(kv_len_arr_cpu)
            self.cuda_graph_kv_indptr_cpu[1 : bs + 1] = torch.cumsum(kv_len_arr_cpu, 0)
            self.fast_decode_kwargs.update({"kv_len_arr_cpu": kv_len_arr_cpu})

            self.indices_updater_decode.update(
                rows[:bs],
                seq_lens[:bs],
                decode_wrapper=self.graphs[bs],
                init_metadata_replay=True,
                spec_info=spec_info,
                plan=plan,
                **self.fast_decode_kwargs,
            )
        elif forward_mode.is_target_verify():
            # Arrays of the host.
            assert spec_info is not None and seq_lens_cpu is not None, (
                "verify needs host lengths"
            )
            ndt = spec_info.draft_token_num
            self.fast_plan_kv_len_arr_cpu[:bs] = ndt + seq_lens_cpu[:bs]
            self.fast_plan_qo_indptr_cpu[: bs + 1] = torch.arange(0, (bs + 1) * ndt, ndt)
            fast_verify_plan_kwargs = self.dflash_arrays(bs, spec_info, seq_lens_cpu)
            use_generic_fast_plan = spec_info.kind != "dflash"
            self.indices_updater_prefill.update(
                rows[:bs],
                seq_lens[:bs],
                prefix_lens=None,
                prefill_wrapper_paged=self.graphs[
                    self.key(bs, spec_info)
                ],
                spec_info=spec_info,
                fast_verify_plan_kwargs=fast_verify_plan_kwargs,
                qo_indptr_cpu=(
                    self.fast_plan_qo_indptr_cpu[: bs + 1]
                    if use_generic_fast_plan
                    else None
                ),
                kv_indptr_cpu=(
                    self.fast_plan_kv_indptr_cpu[: bs + 1]
                    if use_generic_fast_plan
                    else None
                ),
                kv_len_arr_cpu=(
                    self.fast_plan_kv_len_arr_cpu[:bs]
                    if use_generic_fast_plan
                    else None
                ),
                plan=plan,
            )
        else:
            raise ValueError(forward_mode)


class FlashInferMLAIndicesUpdaterDecode:
    def update(
        self,
        rows,
        seq_lens,
        decode_wrapper,
        init_metadata_replay=False,
        spec_info=None,
        *,
        plan,
        **fast_decode_kwargs,
    ):
        self.call_begin_forward(
            decode_wrapper,
            rows,
            seq_lens,
            self.kv_indptr,
            init_metadata_replay,
            spec_info,
            plan=plan,
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
        *,
        plan,
        **fast_decode_kwargs,
    ):
        kv_lens = lens.to(torch.int32)
        if spec_info is None:
            kv_indptr[1:] = torch.cumsum(lens, dim=0)
            kv_indices = self.gather(rows, kv_indptr)
            if get_parallel().dcp_enabled:
                plan_shards(kv_lens, kv_indptr, kv_indices, fast_decode_kwargs)
        else:
            kv_indptr = spec_info.kv_indptr
            kv_indices = spec_info.kv_indices
            if not init_metadata_replay:
                kv_lens = (kv_indptr[1:] - kv_indptr[:-1]).to(torch.int32)

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
        fast_verify_plan_kwargs=None,
        *,
        plan,
        qo_indptr_cpu=None,
        kv_indptr_cpu=None,
        kv_len_arr_cpu=None,
    ):
        self.call_begin_forward(
            prefill_wrapper_paged,
            rows,
            seq_lens,
            prefix_lens,
            use_ragged,
            spec_info,
            fast_verify_plan_kwargs=fast_verify_plan_kwargs,
            plan=plan,
            qo_indptr_cpu=qo_indptr_cpu,
            kv_indptr_cpu=kv_indptr_cpu,
            kv_len_arr_cpu=kv_len_arr_cpu,
        )

    def call_begin_forward(
        self,
        wrapper_paged,
        req_pool_indices,
        paged_kernel_lens,
        prefix_lens,
        use_ragged,
        spec_info=None,
        fast_verify_plan_kwargs=None,
        *,
        plan,
        qo_indptr_cpu=None,
        kv_indptr_cpu=None,
        kv_len_arr_cpu=None,
    ):
        bs = len(paged_kernel_lens)

        if spec_info is None:
            kv_indptr = self.indptr_of(paged_kernel_lens)
            kv_indices = self.room(kv_indptr)
            self.translator.pack(
                plan,
                req_pool_indices=req_pool_indices,
                seq_lens=paged_kernel_lens,
                indptr=kv_indptr,
                out=kv_indices,
            )
            qo_indptr = self.indptr_of(paged_kernel_lens - prefix_lens)
        else:
            kv_indices, kv_indptr, qo_indptr, _ = spec_info.generate_attn_arg_prefill(
                req_pool_indices=req_pool_indices, translator=self.translator
            )

        if use_ragged:
            self.ragged.begin_forward(qo_indptr, kv_indptr)
        elif fast_verify_plan_kwargs is not None:
            fast_mla_decode_plan(wrapper_paged, **fast_verify_plan_kwargs)
        else:
            # Over pages.
            if plan.shards is not None:
                kv_indptr, kv_indices = plan.shards
                qo_indptr_cpu = kv_indptr_cpu = kv_len_arr_cpu = None

            plan_qo_indptr = self.given(qo_indptr_cpu, qo_indptr)
            plan_kv_indptr = self.given(kv_indptr_cpu, kv_indptr)
            plan_kv_len_arr = (
                kv_len_arr_cpu
                if kv_len_arr_cpu is not None
                else kv_indptr[1:] - kv_indptr[:-1]
            )

            wrapper_paged.plan(
                plan_qo_indptr,
                plan_kv_indptr,
                kv_indices,
                plan_kv_len_arr,
                self.num_local_heads,
                self.rank,
                self.rope,
                1,
                True,
                self.scale,
                self.q_dtype,
                self.dtype,
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

    def init_forward_metadata_in_graph(self, forward_batch):
        for backend in self.attn_backends:
            backend.init_forward_metadata_in_graph(forward_batch)

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


def fast_mla_prefill_plan(wrapper, qo_indptr_cpu, kv_indptr_cpu, *rest):
    fast_mla_decode_plan(wrapper, qo_indptr_cpu, kv_indptr_cpu, *rest)
