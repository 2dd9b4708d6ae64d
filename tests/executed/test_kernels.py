"""The plain formulas store what the release's own kernels store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from . import kernels
from .mini_triton import Language
from .release_code import ReleaseCode
from .stubs import KERNEL_FILES

RELEASES = ("0.4.5", "0.4.10", "0.5.1", "0.5.10", "0.5.13", "0.5.17", "0.5.18", "0.5.23")
CONTEXT = 40
UNTOUCHED = -7


def _own_kernel(release: str, name: str, *helpers: str) -> tuple[Any, tuple[str, ...], Language]:
    """The release's kernel, its parameter names, and the language to launch it with."""
    code = ReleaseCode(release, lambda module, what: None)
    language = Language()
    path = code.first(KERNEL_FILES[name], name)
    known = [helper for helper in helpers if code.has(path, helper)]
    return code.take(path, name, {"tl": language}, *known), code.parameters(path, name), language


def _table(rows: int) -> torch.Tensor:
    return torch.arange(rows * CONTEXT, dtype=torch.int32).view(rows, CONTEXT)


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize(
    "lens", [[1], [5, 0, 17], [40, 39, 1, 12]], ids=["one", "empty-row", "full-row"]
)
def test_kv_indices(release: str, lens: Sequence[int]) -> None:
    name = "create_flashinfer_kv_indices_triton"
    own, parameters, language = _own_kernel(release, name)
    indptr = torch.tensor([0, *torch.tensor(lens).cumsum(0).tolist()], dtype=torch.int32)
    pool = torch.arange(len(lens), 0, -1)
    args = (_table(len(lens) + 1), pool, torch.tensor(lens), indptr, None)

    expected = torch.full((sum(lens) + 3,), UNTOUCHED, dtype=torch.int32)
    language.launch(own, (len(lens),), *args, expected, CONTEXT)
    got = torch.full_like(expected, UNTOUCHED)
    kernels.Kernel(name, parameters, kernels.kv_indices)[(len(lens),)](*args, got, CONTEXT)

    assert got.tolist() == expected.tolist()
    assert got[-3:].tolist() == [UNTOUCHED] * 3


def test_kv_indices_in_pages() -> None:
    name = "create_flashinfer_kv_indices_triton"
    own, parameters, language = _own_kernel("0.5.1", name)
    lens, page = [5, 8, 1], 4
    indptr = torch.tensor([0, 2, 4, 5], dtype=torch.int32)
    args = (_table(4), torch.tensor([1, 2, 3]), torch.tensor(lens), indptr, None)

    expected = torch.full((6,), UNTOUCHED, dtype=torch.int32)
    language.launch(own, (3,), *args, expected, CONTEXT, page)
    got = torch.full_like(expected, UNTOUCHED)
    kernels.Kernel(name, parameters, kernels.kv_indices)[(3,)](*args, got, CONTEXT, page)

    assert got.tolist() == expected.tolist()


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize(
    ("lens", "positions"),
    [([7], [7]), ([10, 20, 3], [10, 20, 3]), ([10, 20, 1, 1], [10, 20, 0, 0])],
    ids=["one", "real", "padded"],
)
def test_draft_kv_indices(release: str, lens: Sequence[int], positions: Sequence[int]) -> None:
    name = "generate_draft_decode_kv_indices"
    own, parameters, language = _own_kernel(release, name, "_load_token_ids")
    bs, steps, width, max_bs = len(lens), 3, 4 * CONTEXT, 6

    def arguments() -> tuple[Any, ...]:
        return (
            torch.arange(bs, 0, -1),
            _table(bs + 1),
            torch.tensor(lens),
            torch.full((steps, width), UNTOUCHED, dtype=torch.int32),
            torch.zeros((steps, max_bs + 1), dtype=torch.int32),
            torch.tensor(positions),
            # 0.4.5 passes the grid as well.
            *((bs, 1) if "num_seqs" in parameters else ()),
            CONTEXT,
            width,
            max_bs + 1,
            4,
            4,
            4,
            *((1,) if "page_size" in parameters else ()),
        )

    expected, got = arguments(), arguments()
    language.launch(own, (steps, bs, 1), *expected)
    log: list[kernels.StoredRow] = []
    kernel = kernels.Kernel(name, parameters, kernels.draft_kv_indices(log))
    kernel[(steps, bs, 1)](*got)

    assert got[3].tolist() == expected[3].tolist()
    assert got[4].tolist() == expected[4].tolist()
    for row in log:
        stored = expected[3][row.step, row.start : row.start + row.length].tolist()
        first = (bs - row.row) * CONTEXT
        assert stored == list(range(first, first + row.length))


@pytest.mark.parametrize(
    ("release", "divide"), [("0.5.17", True), ("0.5.18", True), ("0.5.23", False)]
)
@pytest.mark.parametrize("rank", [0, 1])
def test_shard_for_dcp(release: str, divide: bool, rank: int) -> None:
    name = "update_kv_lens_and_indices"
    own, parameters, language = _own_kernel(release, name)
    lens, size = [5, 8, 1], 2
    local = [n // size + (rank < n % size) for n in lens]

    def arguments() -> dict[str, Any]:
        return {
            "kv_lens": torch.tensor(lens),
            "kv_lens_cumsum": torch.tensor([0, 5, 13, 14]),
            "kv_indices": torch.arange(100, 114),
            "local_kv_lens": torch.tensor(local),
            "local_kv_lens_cumsum": torch.tensor([0, *torch.tensor(local).cumsum(0).tolist()]),
            "local_kv_indices": torch.full((10,), UNTOUCHED),
            "dcp_rank": rank,
            "dcp_world_size": size,
            "BLOCK_SIZE": 16,
        }

    expected, got = arguments(), arguments()
    language.launch(own, (3, 1), **expected)
    kernels.Kernel(name, parameters, kernels.shard_for_dcp(divide=divide))[(3, 1)](**got)

    assert got["local_kv_indices"].tolist() == expected["local_kv_indices"].tolist()


def test_a_store_outside_the_buffer_is_an_error() -> None:
    kernel = kernels.Kernel(
        "create_flashinfer_kv_indices_triton",
        (
            "req_to_token_ptr",
            "req_pool_indices_ptr",
            "page_kernel_lens_ptr",
            "kv_indptr",
            "kv_start_idx",
            "kv_indices_ptr",
            "req_to_token_ptr_stride",
        ),
        kernels.kv_indices,
    )
    short = torch.zeros(3, dtype=torch.int32)
    args = (_table(2), torch.tensor([1]), torch.tensor([4]), torch.tensor([0, 4]), None)
    with pytest.raises(kernels.OutOfBoundsError, match="items 0 to 4 of 3"):
        kernel[(1,)](*args, short, CONTEXT)
    with pytest.raises(kernels.OutOfBoundsError, match="entries 0 to 41 of 40"):
        kernel[(1,)](*args[:2], torch.tensor([41]), *args[3:], torch.zeros(50), CONTEXT)
