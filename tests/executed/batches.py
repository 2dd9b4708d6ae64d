"""The batches that the release's runners and scheduler hand to the back end.

What differs between releases and matters to planning is stated here, one place each: dtypes of the
length buffers, what padded rows hold, which fields a padded batch forgets.

Requests are numbered from 1 in the order of the batch; padded rows use request 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from packaging.version import Version

from .device import CUDA

# Length of a row that no request fills. The runners of 0.4.5 to 0.4.7 pad with 1 although the back
# end says 0, the later ones ask it and are told 1.
PADDED_LEN = 1


class Same:
    """The host knows the lengths that the device has: the usual case."""


SAME = Same()
HostLens = Sequence[int] | torch.Tensor | Same | None
"""Host lengths: `SAME`, None (the runner has none), or other values, those of the real rows; a
tensor is passed on as it is."""


def on_device(values: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A device tensor of these values."""
    return torch.tensor(list(values), dtype=dtype, device=CUDA)


class Batches:
    """Makes batches as the release does.

    release: its version. capture_fill: the length of all rows at capture, which the back end says.
    runner: the model runner stand-in.
    """

    def __init__(self, release: str, capture_fill: int, runner: Any) -> None:
        self._version = Version(release)
        self._capture_fill = capture_fill
        self._runner = runner
        # Length buffers of the graph runners, on the device and on the host alike.
        self._lens_dtype = torch.int64 if self._version >= Version("0.5.14") else torch.int32
        self._pool_dtype = torch.int64 if self._version >= Version("0.5.4") else torch.int32

    def graph(
        self,
        mode: Any,
        seq_lens: Sequence[int],
        bs: int,
        *,
        host_lens: HostLens = SAME,
        spec: Any = None,
        num_tokens: int | None = None,
    ) -> SimpleNamespace:
        """The target's graph runner: a view of its static buffers, padded to `bs` rows.

        num_tokens: at capture, where there are no real rows.
        """
        batch = self._batch(
            mode,
            seq_lens,
            bs,
            PADDED_LEN if num_tokens is None else self._capture_fill,
            host_lens,
            spec,
            lens_dtype=self._lens_dtype,
            host_dtype=self._lens_dtype,
            positions=[0] * (bs if num_tokens is None else num_tokens),
        )
        if self._version < Version("0.4.8") and num_tokens is None:
            self._unslice(batch)
        return batch

    def _unslice(self, batch: SimpleNamespace) -> None:
        """Up to 0.4.7 a replay gets the whole buffers, whatever the batch size is."""
        rest = self._runner.req_to_token_pool.size - batch.batch_size
        for name, value in (("req_pool_indices", 0), ("seq_lens", PADDED_LEN)):
            tail = torch.full((rest,), value, dtype=torch.int32, device=CUDA)
            setattr(batch, name, torch.cat([getattr(batch, name), tail]))
        if batch.seq_lens_cpu is not None:
            tail = torch.full((rest,), PADDED_LEN, dtype=batch.seq_lens_cpu.dtype)
            batch.seq_lens_cpu = torch.cat([batch.seq_lens_cpu, tail])

    def draft(
        self,
        mode: Any,
        seq_lens: Sequence[int],
        bs: int,
        *,
        host_lens: HostLens = SAME,
        spec: Any,
        capture: bool = False,
    ) -> SimpleNamespace:
        """The draft's graph runner. Real rows are at position `seq_lens`, padded ones at 0."""
        raw = len(seq_lens)
        # Up to 0.4.7 an unpadded batch keeps the scheduler's own lengths, which are int64.
        unbuffered = self._version < Version("0.4.8") and bs == raw
        batch = self._batch(
            mode,
            seq_lens,
            bs,
            self._capture_fill if capture else PADDED_LEN,
            host_lens,
            spec,
            lens_dtype=self._lens_dtype,
            host_dtype=torch.int64 if unbuffered else self._lens_dtype,
            positions=[*seq_lens, *[0] * (bs - raw)],
        )
        if self._version < Version("0.5.14") and not capture:
            batch.seq_lens_sum = sum(seq_lens)  # these runners leave the padded rows out
        return batch

    def eager(
        self,
        mode: Any,
        seq_lens: Sequence[int],
        *,
        host_lens: HostLens = SAME,
        spec: Any = None,
        bs: int | None = None,
    ) -> SimpleNamespace:
        """A `ForwardBatch` of the scheduler's, padded to `bs` rows as MLP synchronisation does."""
        bs = bs or len(seq_lens)
        return self._batch(
            mode,
            seq_lens,
            bs,
            PADDED_LEN,
            host_lens,
            spec,
            lens_dtype=torch.int64,
            host_dtype=torch.int64,
            positions=[*seq_lens, *[0] * (bs - len(seq_lens))],
        )

    def extend(
        self,
        mode: Any,
        seq_lens: Sequence[int],
        extend_lens: Sequence[int],
        *,
        host_lens: HostLens = SAME,
        host_extend_lens: HostLens = SAME,
        spec: Any = None,
        bs: int | None = None,
    ) -> SimpleNamespace:
        """An eager batch that adds `extend_lens` tokens, counted in `seq_lens` already.

        Padding lengthens all extend fields from 0.5.19 on; before, only the device's
        `extend_seq_lens`, and with it stock cannot plan the batch.
        """
        batch = self.eager(mode, seq_lens, host_lens=host_lens, spec=spec, bs=bs)
        pad = batch.num_padding
        prefix = [n - e for n, e in zip(seq_lens, extend_lens, strict=True)]
        host_lens_list = list(extend_lens)
        width = 0
        if self._version >= Version("0.5.19"):
            width = spec.num_tokens_per_req if spec is not None else 0
            prefix = prefix + [0] * pad
            host_lens_list += [width] * pad
        batch.extend_prefix_lens = on_device(prefix, torch.int32)
        batch.extend_prefix_lens_cpu = prefix
        batch.extend_seq_lens = on_device([*extend_lens, *[width] * pad], torch.int32)
        batch.extend_seq_lens_cpu = (
            host_lens_list if isinstance(host_extend_lens, Same) else host_extend_lens
        )
        batch.extend_num_tokens = sum(extend_lens) + width * pad
        return batch

    def _batch(
        self,
        mode: Any,
        seq_lens: Sequence[int],
        bs: int,
        fill: int,
        host_lens: HostLens,
        spec: Any,
        *,
        lens_dtype: torch.dtype,
        host_dtype: torch.dtype,
        positions: Sequence[int],
    ) -> SimpleNamespace:
        raw = len(seq_lens)
        pad = bs - raw
        if pad < 0:
            raise ValueError(f"{raw} requests do not fit into a batch of {bs}")
        lens = [*seq_lens, *[fill] * pad]
        if isinstance(host_lens, Same):
            host_lens = seq_lens
        if host_lens is not None and not isinstance(host_lens, torch.Tensor):
            host_lens = torch.tensor([*host_lens, *[fill] * pad], dtype=host_dtype)
        return SimpleNamespace(
            batch_size=bs,
            forward_mode=mode,
            req_pool_indices=on_device([*range(1, raw + 1), *[0] * pad], self._pool_dtype),
            seq_lens=on_device(lens, lens_dtype),
            seq_lens_cpu=host_lens,
            seq_lens_sum=sum(lens),
            positions=on_device(positions, torch.int64),
            encoder_lens=None,
            spec_info=spec,
            attn_dcp_metadata=None,
            req_to_token_pool=self._runner.req_to_token_pool,
            kv_loc_plan=SimpleNamespace(),
            num_padding=pad,
            extend_prefix_lens=None,
            extend_prefix_lens_cpu=None,
            extend_seq_lens=None,
            extend_seq_lens_cpu=None,
        )
