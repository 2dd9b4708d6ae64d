"""A miniature of SGLang's back end, in words of our own, in which no judge finds anything.

Tests take it and put one fault into it. The two PlanApi are what the reader gives for
FlashInfer 0.6.17 and 0.7.2 (compared in test_releases.py), written out so that one field can
be changed at a time.
"""

from __future__ import annotations

from dataclasses import replace

from mlagen.codegen.flashinfer.api import Era, Place, PlanApi, PrivateCall, StateAttribute
from tests.flashinfer.miniatures import NINE, PARAMETERS

CLEAN = """\
import torch
from functools import partial
from flashinfer import BatchMLAPagedAttentionWrapper


class FlashInferMLAAttnBackend:
    def __init__(self, runner):
        rows = largest_padded_batch(runner.req_to_token_pool.size)
        self.verify_lens = torch.zeros((rows,), dtype=torch.int32, device="cpu")
        self.eager_wrapper = BatchMLAPagedAttentionWrapper(self.workspace, backend="auto")

    def init_forward_metadata_out_graph(self, forward_batch, in_capture=False):
        mode, bs = forward_batch.forward_mode, forward_batch.batch_size
        spec_info = forward_batch.spec_info
        if in_capture:
            if mode.is_decode_or_idle():
                decode_wrapper = BatchMLAPagedAttentionWrapper(self.workspace, use_cuda_graph=True)
                decode_wrapper.plan = partial(host_decode_plan, decode_wrapper)
            elif mode.is_target_verify():
                verify_wrapper = BatchMLAPagedAttentionWrapper(self.workspace, use_cuda_graph=True)
                if spec_info.spec_input_type != Kind.DFLASH_VERIFY:
                    verify_wrapper.plan = partial(host_verify_plan, verify_wrapper)
        self.apply_metadata(bs, mode, forward_batch.seq_lens_cpu, spec_info)

    def init_forward_metadata(self, forward_batch):
        if forward_batch.forward_mode.is_decode_or_idle():
            self.indices_updater_decode.update(
                forward_batch.seq_lens,
                decode_wrapper=self.eager_wrapper,
                spec_info=forward_batch.spec_info,
            )

    def apply_metadata(self, bs, mode, seq_lens_cpu, spec_info):
        if mode.is_decode_or_idle():
            lens = seq_lens_cpu[:bs].to(torch.int32) + self.step
            self.indices_updater_decode.update(bs, kv_len_arr_cpu=lens)
        elif mode.is_target_verify():
            generic = spec_info.spec_input_type != Kind.DFLASH_VERIFY
            window = spec_info.draft_token_num
            self.verify_lens[:bs] = seq_lens_cpu[:bs] + window
            self.indices_updater_prefill.update(
                bs,
                kv_len_arr_cpu=self.verify_lens[:bs] if generic else None,
            )

    def graph_key(self, bs, spec_info):
        return bs if spec_info.ragged_verify_layout is None else ("ragged", bs)


class FlashInferMLAMultiStepDraftBackend:
    def __init__(self, runner):
        self.generate_draft_decode_kv_indices = generate_draft_decode_kv_indices
        self.attn_backend_list = self.attn_backends

    def each_step(self, forward_batch, call_fn):
        for i in range(self.speculative_num_steps - 1):
            forward_batch.spec_info.kv_indptr = self.kv_indptr[i]
            call_fn(i, forward_batch)


def host_decode_plan(
    self, qo_indptr_cpu, kv_indptr_cpu, kv_indices, kv_len_arr_cpu, num_heads, head_dim_ckv
):
    backend = getattr(self, "_planned_backend", self)
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError("capture")
    if 64 % num_heads or kv_len_arr_cpu.numel() > 16384:
        raise ValueError("limits")
    slot = self.ring.slot()
    plan_info = self._cached_module.plan(
        self._float_workspace_buffer,
        self._int_workspace_buffer,
        slot.buffer,
        qo_indptr_cpu,
        kv_indptr_cpu,
        kv_len_arr_cpu,
        num_heads,
        head_dim_ckv,
        CAUSAL,
    )
    slot.event.record()
    compare_grid(plan_info)


def host_verify_plan(
    self, qo_indptr_cpu, kv_indptr_cpu, kv_indices, kv_len_arr_cpu, num_heads, head_dim_ckv
):
    host_decode_plan(
        self, qo_indptr_cpu, kv_indptr_cpu, kv_indices, kv_len_arr_cpu, num_heads, head_dim_ckv
    )
"""

_PLACE = Place("flashinfer/mla/_core.py", 1706)
_STATE = (
    ("_kv_indices_buf", "kv_indices.to(self.device, non_blocking=True)"),
    ("_causal", "causal"),
    ("_page_size", "page_size"),
    ("_sm_scale", "sm_scale"),
    ("_q_data_type", "q_data_type"),
    ("_kv_data_type", "kv_data_type"),
    ("_use_profiler", "use_profiler"),
    ("_plan_info", "self._cached_module.plan(...)"),
)

COPIES = PlanApi(
    version="0.6.17",
    era=Era.MLA_PACKAGE,
    plan_parameters=PARAMETERS,
    call=PrivateCall("plan", NINE, "plan_info", False, _PLACE),
    holder="wrapper",
    run_state=tuple(StateAttribute(name, value, _PLACE) for name, value in _STATE),
    planner_copies=True,
    raw_module=None,
    int32_checked=False,
    public_update=None,
    missing=(),
    place=_PLACE,
    digest="0" * 64,
)

STAGES = PlanApi(
    version="0.7.2",
    era=Era.BACKEND_OBJECT,
    plan_parameters=(*PARAMETERS, "metadata", "lse_mode"),
    call=PrivateCall(
        "plan_with_staged_workspace_bytes", NINE, "plan_info_and_bytes", False, _PLACE
    ),
    holder="planned_backend",
    run_state=tuple(StateAttribute(name, value, _PLACE) for name, value in _STATE),
    planner_copies=False,
    raw_module="_module",
    int32_checked=True,
    public_update=None,
    missing=(),
    place=_PLACE,
    digest="1" * 64,
)


def changed(*replacements: tuple[str, str], source: str = CLEAN) -> bytes:
    """The miniature with each first text replaced, once, by the second."""
    for old, new in replacements:
        assert source.count(old) == 1, f"{source.count(old)} times: {old}"
        source = source.replace(old, new)
    return source.encode()


#: The two oldest forms of the private call have no wheel: as COPIES, but for the call.
TORCH_OP = replace(
    COPIES, era=Era.TORCH_OP, version="0.2.5", call=replace(COPIES.call, method="plan.default")
)
STREAM = replace(
    COPIES,
    era=Era.STREAM,
    version="0.2.3",
    call=replace(
        COPIES.call,
        takes_stream=True,
        arguments=(*COPIES.call.arguments, "get_cuda_stream(device)"),
    ),
)
