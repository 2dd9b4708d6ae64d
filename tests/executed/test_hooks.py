"""The emitted hooks, imported on their own: what they take, refuse and compute."""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mlagen.codegen.flashinfer.find import find_flashinfer
from mlagen.codegen.flashinfer.read import read_plan_api
from mlagen.codegen.render import render, render_module
from mlagen.codegen.spec import load_spec, shipped_spec


@pytest.fixture(scope="module", params=["0.6.17", "0.7.2"])
def emitted(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> SimpleNamespace:
    """All names of plans.py and hooks.py as rendered for one FlashInfer."""
    name = f"rendered_{request.param.replace('.', '_')}"
    folder = tmp_path_factory.mktemp("hooks") / name
    folder.mkdir()
    (folder / "__init__.py").touch()
    rendered = render(load_spec(shipped_spec()), read_plan_api(find_flashinfer(request.param)))
    for module in ("plans", "hooks"):
        (folder / f"{module}.py").write_text(render_module(rendered, module, ["rendered"]))
    sys.path.insert(0, str(folder.parent))
    try:
        modules = [importlib.import_module(f"{name}.{module}") for module in ("plans", "hooks")]
    finally:
        sys.path.remove(str(folder.parent))
    return SimpleNamespace(**{k: v for module in modules for k, v in vars(module).items()})


def _input(kind: str | None = None, **more: object) -> SimpleNamespace:
    named = {} if kind is None else {"spec_input_type": SimpleNamespace(name=kind)}
    return SimpleNamespace(draft_token_num=3, **named, **more)


@pytest.mark.parametrize(
    "spec_info",
    [
        _input(),  # before SGLang 0.5.3 inputs had no type
        _input("EAGLE_VERIFY"),
        _input("NGRAM_VERIFY"),
        _input("FROZEN_KV_MTP_VERIFY"),
        _input("EAGLE_VERIFY", ragged_verify_layout=None, custom_mask=torch.ones(1)),
    ],
)
def test_verify_inputs_that_are_planned(emitted: SimpleNamespace, spec_info: object) -> None:
    assert emitted._mlagen_foreign_input(spec_info) is None


@pytest.mark.parametrize(
    ("spec_info", "reason"),
    [
        (None, "NoneType has no draft_token_num"),
        (SimpleNamespace(), "SimpleNamespace has no draft_token_num"),
        (_input("DFLASH_VERIFY"), "DFLASH_VERIFY inputs are not known"),
        (_input("UNO_VERIFY"), "UNO_VERIFY inputs are not known"),
        (_input("A_KIND_TO_COME"), "A_KIND_TO_COME inputs are not known"),
        (_input("EAGLE_VERIFY", ragged_verify_layout=object()), "the verify layout is ragged"),
    ],
)
def test_verify_inputs_that_are_not(
    emitted: SimpleNamespace, spec_info: object, reason: str
) -> None:
    assert emitted._mlagen_foreign_input(spec_info).startswith(reason)


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_host_lengths_of_any_integer_type_become_int32(
    emitted: SimpleNamespace, dtype: str
) -> None:
    lens = np.array([5, 1, 9], dtype=dtype)
    request = emitted._mlagen_eager_request(
        "verify", print, np.arange(0, 12, 3, dtype=np.int32), lens
    )
    assert request.kv_len.tolist() == [5, 1, 9]
    assert request.kv_indptr.tolist() == [0, 5, 6, 15]
    assert {request.kv_len.dtype, request.kv_indptr.dtype} == {torch.int32}
    # Written through NumPy, read by the planner as tensors: the same memory.
    assert np.shares_memory(request.kv_lens, request.kv_len.numpy())
    assert np.shares_memory(request.kv_ends, request.kv_indptr.numpy())
    emitted._mlagen_check_arrays(request)
    assert emitted._mlagen_check_lengths(request) == 15


def test_pages_of_more_than_one_token(emitted: SimpleNamespace) -> None:
    request = emitted._mlagen_eager_request(
        "draft-extend", print, np.arange(4, dtype=np.int32), np.array([64, 65, 1]), 64
    )
    assert request.kv_len.tolist() == [64, 65, 1]
    assert request.kv_indptr.tolist() == [0, 1, 3, 4]


@pytest.mark.parametrize("bad", [-1, -(2**31)])
def test_a_negative_length_is_named(emitted: SimpleNamespace, bad: int) -> None:
    request = emitted._mlagen_eager_request(
        "verify", print, np.arange(3, dtype=np.int32), np.array([4, bad])
    )
    with pytest.raises(emitted.MlagenPlanError, match="verify: negative KV length"):
        emitted._mlagen_check_lengths(request)


def test_a_sum_that_overflows_is_named(emitted: SimpleNamespace) -> None:
    request = emitted._mlagen_eager_request(
        "decode", print, np.arange(3, dtype=np.int32), np.array([2**31 - 1, 5])
    )
    with pytest.raises(emitted.MlagenPlanError, match="overflowing kv_indptr"):
        emitted._mlagen_check_lengths(request)


@pytest.mark.parametrize(
    "wrong",
    [
        torch.arange(4, dtype=torch.int64),
        torch.arange(3, dtype=torch.int32),
        torch.arange(8, dtype=torch.int32)[::2],
        torch.arange(4, dtype=torch.int32, device="meta"),
    ],
)
def test_arrays_of_another_form_are_named(emitted: SimpleNamespace, wrong: torch.Tensor) -> None:
    request = emitted._mlagen_eager_request(
        "verify", print, np.arange(4, dtype=np.int32), np.array([1, 2, 3])
    )
    request = replace(request, qo_indptr=wrong)
    with pytest.raises(emitted.MlagenPlanError, match="qo_indptr must be 4 contiguous int32"):
        emitted._mlagen_check_arrays(request)


def test_fewer_host_lengths_than_requests_are_named(emitted: SimpleNamespace) -> None:
    with pytest.raises(emitted.MlagenPlanError, match="4 host lengths needed, got 3"):
        emitted._mlagen_host_lens("decode", 4, torch.ones(4), torch.ones(3))


def test_absent_host_lengths_are_counted_and_told_once(
    emitted: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    before = emitted._mlagen_waits.get("told-once", 0)
    for _ in range(3):
        lens = emitted._mlagen_host_lens("told-once", 2, torch.tensor([3, 4, 5]), None)
        assert lens.tolist() == [3, 4]
    assert emitted._mlagen_waits["told-once"] - before == 3
    assert len([r for r in caplog.records if "told-once" in r.getMessage()]) == 1


@pytest.mark.parametrize(
    ("tile", "tokens", "heads", "loses"),
    [
        (64, 1, 16, False),
        (128, 4, 40, True),
        (128, 3, 40, False),  # 120 rows: one tile, nothing is cut
        (128, 3, 48, True),
        (128, 2, 96, True),
        (128, 8, 128, False),
    ],
)
def test_heads_that_lose_keys(
    emitted: SimpleNamespace, tile: int, tokens: int, heads: int, loses: bool
) -> None:
    assert (emitted._mlagen_loses_keys(tile, tokens, heads) is not None) is loses


@pytest.mark.parametrize(("tiles", "fits"), [(1, True), (16252, True), (16253, False)])
def test_the_bound_of_work_items(emitted: SimpleNamespace, tiles: int, fits: bool) -> None:
    plan_info = [1, 132, 0, 16384 * 4, *[0] * 14]
    assert (emitted._mlagen_too_many_items(tiles, plan_info) is None) is fits


def test_the_share_of_each_rank(emitted: SimpleNamespace) -> None:
    lens = np.arange(0, 40)
    shares = [emitted.mlagen_kv_len_dcp(lens, dcp_size=3, dcp_rank=r) for r in range(3)]
    assert np.array_equal(sum(shares), lens)
    for rank, share in enumerate(shares):
        assert share.tolist() == [n // 3 + (rank < n % 3) for n in range(40)]


def test_the_lengths_of_each_variant(emitted: SimpleNamespace) -> None:
    lens = np.array([10, 20])
    assert emitted.mlagen_kv_len_decode(lens).tolist() == [10, 20]
    assert emitted.mlagen_kv_len_verify(lens, draft_token_num=4).tolist() == [14, 24]
    assert emitted.mlagen_kv_len_draft_decode(lens, draft_step=0).tolist() == [11, 21]
    assert emitted.mlagen_kv_len_draft_extend(lens).tolist() == [10, 20]


def captured(emitted: SimpleNamespace, *, shifts: bool, page_size: int = 1) -> SimpleNamespace:
    """A verify request of 3 tokens a request, as at capture, and the wrapper's buffers."""
    state = SimpleNamespace(
        _plan_info=[1, 132],
        _page_size=page_size,
        _qo_indptr_buf=torch.arange(0, 12, 3, dtype=torch.int32),
        _kv_indptr_buf=torch.zeros(4, dtype=torch.int32),
        _kv_len_arr_buf=torch.zeros(3, dtype=torch.int32),
        _kv_indices_buf=torch.zeros(100, dtype=torch.int32),
    )
    state._planned_backend = state
    formula = partial(emitted.mlagen_kv_len_verify, draft_token_num=3)
    request = emitted._mlagen_captured(
        state, "verify", emitted.mlagen_plan_verify, 3, 3, 16, True, formula, shifts
    )
    return SimpleNamespace(state=state, request=request)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("shifts", [True, False], ids=["a number more", "a formula"])
def test_host_lengths_of_any_integer_type(
    emitted: SimpleNamespace, shifts: bool, dtype: torch.dtype
) -> None:
    request = captured(emitted, shifts=shifts).request
    assert (request.kv_len_of is None) == shifts
    for lens in ([5, 1, 20], [0, 7, 9]):
        given = torch.tensor(lens, dtype=dtype)
        emitted._mlagen_fill(request, given)
        assert request.kv_len.tolist() == [n + 3 for n in lens]
        assert request.kv_indptr.tolist() == [0, *np.cumsum([n + 3 for n in lens])]
        assert given.tolist() == lens  # SGLang's own


def test_pages_of_several_tokens_are_counted(emitted: SimpleNamespace) -> None:
    request = captured(emitted, shifts=True, page_size=4).request
    emitted._mlagen_fill(request, torch.tensor([5, 1, 20]))
    assert request.kv_len.tolist() == [8, 4, 23]
    assert request.kv_indptr.tolist() == [0, 2, 3, 9]


@pytest.mark.parametrize("at_capture", [True, False])
@pytest.mark.parametrize("at_replay", [True, False])
def test_inference_mode_at_capture_or_at_replay_alone(
    emitted: SimpleNamespace, at_capture: bool, at_replay: bool
) -> None:
    """SGLang may be told to run its scheduler in it."""
    with torch.inference_mode(at_capture):
        request = captured(emitted, shifts=True).request
    with torch.inference_mode(at_replay):
        emitted._mlagen_fill(request, torch.tensor([5, 1, 20]))
    assert request.kv_len.tolist() == [8, 4, 23]


def test_arrays_for_the_index_kernel_are_the_captured_ones(emitted: SimpleNamespace) -> None:
    made = captured(emitted, shifts=True)
    assert made.request.bound is None
    request = emitted._mlagen_with_bound(made.state, made.request)
    for lens in ([5, 1, 20], [0, 7, 9]):
        seq_lens = torch.tensor([*lens, 1000])  # more than the batch
        emitted._mlagen_fill(request, seq_lens[:3])
        arrays = emitted.mlagen_bound_arrays(request, seq_lens)
        assert arrays.kv_indices is made.state._kv_indices_buf
        assert made.state._kv_len_arr_buf.tolist() == [n + 3 for n in lens]
        assert made.state._kv_indptr_buf.tolist() == request.kv_indptr.tolist()
        assert arrays.qo_indptr.tolist() == [0, 3, 6, 9]


def test_an_index_kernel_that_would_write_too_far_is_not_launched(
    emitted: SimpleNamespace,
) -> None:
    made = captured(emitted, shifts=True)
    request = emitted._mlagen_with_bound(made.state, made.request)
    for lens, said in (([50, 40, 2], "101 pages do not fit"), ([-9, 4, 4], "negative KV length")):
        emitted._mlagen_fill(request, torch.tensor(lens))
        with pytest.raises(emitted.MlagenPlanError, match=said):
            emitted.mlagen_bound_arrays(request, torch.tensor(lens))
    assert not made.state._kv_len_arr_buf.any()


def test_pages_of_several_tokens_are_not_filled_in_place(emitted: SimpleNamespace) -> None:
    made = captured(emitted, shifts=True, page_size=4)
    assert emitted._mlagen_with_bound(made.state, made.request).bound is None
