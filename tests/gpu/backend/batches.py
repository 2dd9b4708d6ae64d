"""Batches as the release's runners and scheduler hand them over, and what is true of them.

A `Batch` has what the back end gets in `forward`, and for the test's own account which request each
row is and the length of its prefix: `truth.py` plans from these alone.
"""

from __future__ import annotations

import dataclasses
import importlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from packaging.version import Version

from .model import CONTEXT, MAX_REQUESTS, Model

VERIFY_TOKENS = 3
#: Attention is needed for all but the last step.
DRAFT_STEPS = 5
PADDED_LEN = 1  # what the back end answers to get_cuda_graph_seq_len_fill_value
LONGEST = CONTEXT - 16


@dataclass
class Batch:
    """One batch, real rows first.

    forward: the ForwardBatch, as far as the back end looks into it. requests: each row's line of
    the table. prefix: lengths without what the mode adds. real: rows that a request fills.
    query_lens: tokens a row.
    """

    forward: SimpleNamespace
    requests: list[int]
    prefix: list[int]
    real: int
    query_lens: list[int]

    @property
    def real_tokens(self) -> int:
        return sum(self.query_lens[: self.real])


def lengths(count: int) -> list[int]:
    """Prefix lengths: one, the tile boundary and its neighbours, some 4000, any other."""
    special = [1, 2, 63, 64, 65, 127, 128, 129, LONGEST]
    return [
        random.choice(special) if random.random() < 0.5 else random.randint(1, LONGEST)
        for _ in range(count)
    ]


class Batches:
    """Makes batches as this release does: the dtypes of its buffers, its inputs of speculation."""

    def __init__(self, version: str, model: Model) -> None:
        self._model = model
        self._version = Version(version)
        # Length buffers of the graph runners, on the device and on the host alike.
        self._lens_dtype = torch.int64 if self._version >= Version("0.5.14") else torch.int32
        info: Any = importlib.import_module("sglang.srt.model_executor.forward_batch_info")
        self.modes = info.ForwardMode
        self._eagle: Any = importlib.import_module("sglang.srt.speculative.eagle_info")

    # -- graphs ------------------------------------------------------------------------------

    def decode(self, prefix: Sequence[int], rows: int) -> Batch:
        """A decode replay; `prefix` counts the new token already. Padded to `rows`."""
        return self._graph(self.modes.DECODE, prefix, rows, 1, None)

    def verify(self, prefix: Sequence[int], rows: int) -> Batch:
        """A target-verify replay: VERIFY_TOKENS behind each prefix."""
        spec = self._verify_input(rows)
        return self._graph(self.modes.TARGET_VERIFY, prefix, rows, VERIFY_TOKENS, spec)

    def draft(self, prefix: Sequence[int], rows: int, *, capture: bool = False) -> Batch:
        """A replay of the draft chain. Real rows are at position `prefix`, padded ones at 0."""
        spec = self._eagle.EagleDraftInput()
        batch = self._graph(self.modes.DECODE, prefix, rows, 1, spec)
        real = [] if capture else prefix
        batch.forward.positions = _device([*real, *[0] * (rows - len(real))], torch.int64)
        if self._version < Version("0.5.14") and not capture:
            batch.forward.seq_lens_sum = sum(prefix)  # that runner leaves padded rows out
        return batch

    # -- eager -------------------------------------------------------------------------------

    def eager_verify(self, prefix: Sequence[int]) -> Batch:
        spec = self._verify_input(len(prefix))
        return self._eager(self.modes.TARGET_VERIFY, prefix, [VERIFY_TOKENS] * len(prefix), spec)

    def eager_draft(self, prefix: Sequence[int]) -> Batch:
        spec = self._eagle.EagleDraftInput()
        return self._eager(self.modes.DECODE, prefix, [1] * len(prefix), spec)

    def draft_extend(self, prefix: Sequence[int]) -> Batch:
        """DRAFT_EXTEND_V2: as many tokens a request as were verified; seq_lens count them."""
        extend = [VERIFY_TOKENS] * len(prefix)
        kind = getattr(self._eagle, "EagleDraftExtendInput", self._eagle.EagleDraftInput)
        spec = kind()
        spec.num_tokens_per_req = VERIFY_TOKENS
        return self._extend(self.modes.DRAFT_EXTEND_V2, prefix, extend, spec)

    def draft_extend_v1(self, prefix: Sequence[int]) -> Batch:
        """DRAFT_EXTEND, the default up to 0.5.10: the tokens that each request accepted."""
        extend = [random.randint(1, VERIFY_TOKENS + 1) for _ in prefix]
        spec = self._eagle.EagleDraftInput()
        spec.accept_length = _device(extend, torch.int32)
        spec.accept_length_cpu = [n - 1 for n in extend]
        return self._extend(self.modes.DRAFT_EXTEND, prefix, extend, spec)

    # -- how ---------------------------------------------------------------------------------

    def _verify_input(self, rows: int) -> Any:
        """The release's own class, its required fields None where attention does not look."""
        cls = self._eagle.EagleVerifyInput
        required = {
            field.name: None
            for field in dataclasses.fields(cls)
            if field.init
            and field.default is dataclasses.MISSING
            and field.default_factory is dataclasses.MISSING
        }
        mask = rows * VERIFY_TOKENS * (CONTEXT + VERIFY_TOKENS)
        given = {
            "custom_mask": torch.ones(mask, dtype=torch.bool, device="cuda"),
            "draft_token_num": VERIFY_TOKENS,
            "spec_steps": VERIFY_TOKENS - 1,
            "topk": 1,
        }
        return cls(**{**required, **given})

    def _graph(self, mode: Any, prefix: Sequence[int], rows: int, tokens: int, spec: Any) -> Batch:
        return self._batch(mode, prefix, rows, [tokens] * rows, spec, self._lens_dtype)

    def _eager(self, mode: Any, prefix: Sequence[int], query_lens: list[int], spec: Any) -> Batch:
        return self._batch(mode, prefix, len(prefix), query_lens, spec, torch.int64)

    def _extend(self, mode: Any, prefix: Sequence[int], extend: list[int], spec: Any) -> Batch:
        total = [p + n for p, n in zip(prefix, extend, strict=True)]
        batch = self._batch(mode, total, len(total), extend, spec, torch.int64)
        batch.prefix = list(prefix)
        forward = batch.forward
        forward.extend_prefix_lens = _device(prefix, torch.int32)
        forward.extend_prefix_lens_cpu = list(prefix)
        forward.extend_seq_lens = _device(extend, torch.int32)
        forward.extend_seq_lens_cpu = list(extend)
        forward.extend_num_tokens = sum(extend)
        return batch

    def _batch(
        self,
        mode: Any,
        lens: Sequence[int],
        rows: int,
        query_lens: list[int],
        spec: Any,
        dtype: torch.dtype,
    ) -> Batch:
        real = len(lens)
        padded = [*lens, *[PADDED_LEN] * (rows - real)]
        requests = [*random.sample(range(1, MAX_REQUESTS + 1), real), *[0] * (rows - real)]
        forward = SimpleNamespace(
            batch_size=rows,
            forward_mode=mode,
            req_pool_indices=_device(requests, torch.int64),
            seq_lens=_device(padded, dtype),
            seq_lens_cpu=torch.tensor(padded, dtype=dtype),
            seq_lens_sum=sum(padded),
            positions=_device([0] * sum(query_lens), torch.int64),
            input_ids=None,
            out_cache_loc=None,
            encoder_lens=None,
            spec_info=spec,
            attn_attend_prefix_cache=None,
            attn_dcp_metadata=None,
            mha_return_lse=None,
            req_to_token_pool=self._model.requests,
            token_to_kv_pool=self._model.kv,
            kv_loc_plan=None,
            num_padding=rows - real,
            extend_prefix_lens=None,
            extend_prefix_lens_cpu=None,
            extend_seq_lens=None,
            extend_seq_lens_cpu=None,
        )
        translator = self._model.runner.kv_index_translator
        if hasattr(translator, "own_plan"):  # 0.5.22 and later
            translator.own_plan(forward).bind(forward, translator)
        return Batch(forward, requests, padded, real, query_lens)


def _device(values: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor(list(values), dtype=dtype, device="cuda")
