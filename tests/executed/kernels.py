"""Triton launches as plain formulas.

Each formula states what the release's kernel stores, request by request; `test_kernels.py` runs the
kernels' own text and compares. A launch looks as in Triton, `kernel[grid](...)`, and takes its
arguments in the order in which the release's kernel names them.

A store outside a buffer, which on a GPU would land in someone else's memory, is an error here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Formula = Callable[[tuple[int, ...], "inspect.BoundArguments"], None]


class OutOfBoundsError(RuntimeError):
    """A kernel stored outside its buffer, or read outside the request's row."""


@dataclass(frozen=True)
class StoredRow:
    """Where the draft index kernel put the KV indices of request `row` at draft step `step`.

    start, length: in items, within the step's row of the index buffer.
    """

    step: int
    row: int
    start: int
    length: int


class Kernel:
    """A kernel that can be launched: `kernel[grid](*args, **kwargs)`.

    parameters: the names of the release's kernel, in order. Those not given at a launch are absent
    from what the formula sees (Triton's defaults are all "off").
    """

    def __init__(self, name: str, parameters: Sequence[str], formula: Formula) -> None:
        self.name = name
        self._signature = inspect.Signature(
            [
                inspect.Parameter(p, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None)
                for p in parameters
            ]
        )
        self._formula = formula

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, **kwargs: Any) -> None:
            bound = self._signature.bind(*args, **kwargs)
            # No torch stand-ins in here: this is the device's side.
            with torch._C.DisableTorchFunction():
                self._formula(grid, bound)

        return launch


def _put(buffer: torch.Tensor, start: int, values: torch.Tensor, what: str) -> None:
    flat = buffer.view(-1) if buffer.is_contiguous() else buffer
    if start < 0 or start + len(values) > len(flat):
        raise OutOfBoundsError(f"{what}: items {start} to {start + len(values)} of {len(flat)}")
    flat[start : start + len(values)] = values.to(buffer.dtype)


def _row(table: torch.Tensor, stride: int, row: int, start: int, count: int) -> torch.Tensor:
    """`count` entries of a row of the token table, which is `stride` items wide."""
    if start + count > stride:
        raise OutOfBoundsError(f"token table: entries {start} to {start + count} of {stride}")
    begin = row * stride + start
    return table.reshape(-1)[begin : begin + count]


def kv_indices(grid: tuple[int, ...], bound: inspect.BoundArguments) -> None:
    """`create_flashinfer_kv_indices_triton`: row b's tokens, from `kv_indptr[b]` on.

    With PAGE_SIZE > 1 (0.5.0 to 0.5.3) one entry a page: its first token divided by the page size.
    """
    a = bound.arguments
    table, pool, lens = a["req_to_token_ptr"], a["req_pool_indices_ptr"], a["page_kernel_lens_ptr"]
    out, indptr, starts = a["kv_indices_ptr"], a["kv_indptr"], a.get("kv_start_idx")
    stride, page = int(a["req_to_token_ptr_stride"]), int(a.get("PAGE_SIZE") or 1)
    if int(a.get("ENTRY_PAGE_SIZE") or 1) != 1 or a.get("token_mapping") is not None:
        raise NotImplementedError("the harness has no page-granular tables and no token mapping")
    for b in range(grid[0]):
        first = 0 if starts is None else int(starts[b])
        tokens = _row(table, stride, int(pool[b]), first, int(lens[b]))
        _put(out, int(indptr[b]), tokens[::page] // page, "kv_indices")


def draft_kv_indices(log: list[StoredRow]) -> Formula:
    """`generate_draft_decode_kv_indices`, which says in `log` where it stored each row.

    At step i (from 0) request b has its prefix and i + 1 drafted tokens, stored at
    sum(seq_lens[:b]) + b * (i + 1). `kv_indptr` comes from `positions`, not from the lengths: the
    two agree for real rows; for padded rows, whose position is 0, they do not.
    """

    def formula(grid: tuple[int, ...], bound: inspect.BoundArguments) -> None:
        a = bound.arguments
        steps, batch, topk = grid
        if topk != 1:
            raise NotImplementedError("FlashInfer MLA drafts with topk 1 only")
        if a.get("v2p") is not None or a.get("TRANSLATE") or a.get("window_size"):
            raise NotImplementedError("the harness has no translated tables and no draft window")
        table, pool, lens = a["req_to_token"], a["req_pool_indices"], a["paged_kernel_lens"]
        out, indptr, positions = a["kv_indices"], a["kv_indptr"], a["positions"]
        table_stride = int(a["row_stride"] if "row_stride" in a else a["pool_len"])
        out_stride, indptr_stride = int(a["kv_indices_stride"]), int(a["kv_indptr_stride"])
        for step in range(steps):
            grown = step + 1
            before = 0
            for b in range(batch):
                length = int(lens[b])
                start = before + b * grown
                tokens = _row(table, table_stride, int(pool[b]), 0, length + grown)
                row = out.view(-1)[step * out_stride : (step + 1) * out_stride]
                _put(row, start, tokens, f"draft kv_indices, step {step}")
                log.append(StoredRow(step, b, start, length + grown))
                before += length
                # Entry 0 is never stored (it stays 0); program 0 stores the last one.
                entry = b or batch
                value = int(positions[:entry].sum()) + entry * grown
                _put(indptr.view(-1), step * indptr_stride + entry, torch.tensor([value]), "indptr")

    return formula


def shard_for_dcp(*, divide: bool) -> Formula:
    """`update_kv_lens_and_indices`: this rank's tokens, every size-th of the request's.

    divide: their ids are divided by the size (up to 0.5.19; later the translator does that).
    """

    def formula(grid: tuple[int, ...], bound: inspect.BoundArguments) -> None:
        a = bound.arguments
        rank, size = int(a["dcp_rank"]), int(a["dcp_world_size"])
        tokens, first = a["kv_indices"], a["kv_lens_cumsum"]
        out, out_first, lens = a["local_kv_indices"], a["local_kv_lens_cumsum"], a["local_kv_lens"]
        for b in range(grid[0]):
            count = int(lens[b])
            at = int(first[b]) + rank + size * torch.arange(count)
            values = tokens[at] // size if divide else tokens[at]
            _put(out, int(out_first[b]), values, "local_kv_indices")

    return formula
