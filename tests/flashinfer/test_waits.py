"""Where FlashInfer's own plan waits: each kind of wait alone, ways that are not gone, releases."""

from __future__ import annotations

from functools import cache

import pytest

from mlagen.codegen.flashinfer.waits import StockWaits, find_waits
from tests.flashinfer.miniatures import Files, backend_era, source, wrapper_era
from tests.releases import flashinfer_source

HEAD = """\
import torch
from .helpers import *


class BatchMLAPagedAttentionWrapper:
    def __init__(
        self, float_workspace_buffer, use_cuda_graph=False, qo_indptr=None, kv_indptr=None,
        kv_indices=None, kv_len_arr=None, backend="auto",
    ):
        self.device = float_workspace_buffer.device
        self._use_cuda_graph = use_cuda_graph
        self._kv_indices_buf = kv_indices
        self._kv_len_arr_buf = kv_len_arr
        self.planned = None

    def plan(self, qo_indptr, kv_indptr, kv_indices, kv_len_arr, num_heads, head_dim_ckv,
             head_dim_kpe, page_size, causal, sm_scale, q_data_type=None, kv_data_type=None):
"""
TAIL = """
    def run(self, q):
        return q
"""


def files_of(*lines: str, methods: str = "", helpers: str = "") -> Files:
    """A FlashInfer whose plan is `lines`."""
    body = "".join(f"        {line}\n" for line in lines)
    return {
        "flashinfer/__init__.py": "",
        "flashinfer/mla/__init__.py": "from ._core import BatchMLAPagedAttentionWrapper\n",
        "flashinfer/mla/_core.py": HEAD + body + methods + TAIL,
        "flashinfer/mla/helpers.py": "import torch\n\n" + helpers,
    }


def waits_of(*lines: str, methods: str = "", helpers: str = "") -> StockWaits:
    return find_waits(source(files_of(*lines, methods=methods, helpers=helpers)))


def counts(found: StockWaits) -> tuple[int | None, ...]:
    """Of a graph's plan and an eager one, from device arrays; the same from host arrays."""
    return tuple(
        found.count(mode, arrays) for arrays in ("device", "host") for mode in ("graph", "eager")
    )  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "line",
    [
        "pass",
        "self.page_size = page_size + 1",
        "n = kv_len_arr.numel() + kv_len_arr.shape[0] + len(kv_indices)",
        "lens = kv_len_arr + 1; total = lens.sum(); most = torch.max(lens)",
        "head = kv_indices[:page_size]",
        "chosen = kv_indices[kv_indptr]",  # an index of numbers: the size is known
        "lens = kv_indices.to(self.device)",
        "lens = kv_len_arr.to(torch.int64)",
        "lens = qo_indptr.to('cpu', non_blocking=True)",
        "self._kv_indices_buf2 = torch.empty_like(kv_indices).copy_(kv_indices)",
        "lens = torch.zeros(num_heads, device=self.device)",
        "lens = [1, 2]; n = int(lens[0]) + sum(lens)",
        "lens = torch.arange(4); n = int(lens[-1].item()); m = lens.tolist()",
        "same = kv_len_arr is None or kv_len_arr.dtype != torch.int32",
        "same = kv_len_arr.is_cuda and kv_len_arr.device == self.device",
        "if page_size > 1: raise ValueError(f'{kv_indptr.tolist()}')",
        "if not causal: n = kv_indptr.tolist()",  # decided: plans are causal here
        "if head_dim_ckv == 128: n = kv_indptr.tolist()",
        "kv_indices[0] = 1",
        "kv_indices[kv_len_arr] = 2",
        "times = kv_indices.repeat_interleave(2)",
    ],
)
def test_what_does_not_wait(line: str) -> None:
    found = waits_of(line)
    assert [wait for wait in found.waits if wait.counted] == []
    assert counts(found)[:2] == (0, 0)


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("n = kv_indices.sum().item()", "item"),
        ("n = kv_indices.tolist()", "tolist"),
        ("n = kv_indices.cpu()", "cpu"),
        ("n = kv_indices.to('cpu')", "to-cpu"),
        ("n = kv_indices.to(device='cpu', dtype=torch.int64)", "to-cpu"),
        ("n = kv_indices.to(torch.device('cpu'))", "to-cpu"),
        ("n = kv_indices.to(torch.arange(2))", "to-cpu"),
        ("n = int(kv_indices[0])", "number"),
        ("n = float(kv_indices.max())", "number"),
        ("n = f'{kv_indices}'", "number"),
        ("n = range(kv_indices[0])", "number"),
        ("n = torch.empty(kv_indices[-1])", "number"),
        ("if kv_indices[0] > 1: pass", "bool"),
        ("n = bool(torch.any(kv_indices < 0))", "bool"),
        ("assert (kv_indices >= 0).all()", "bool"),
        ("n = 1 if not kv_indices.any() else 2", "bool"),
        ("n = kv_indices[0] and page_size", "bool"),
        ("n = max(kv_indices)", "bool"),
        ("n = kv_indices[0] in (1, 2)", "bool"),
        ("n = kv_indices[: kv_indices[-1]]", "device-slice"),
        ("n = [1, 2][kv_indices[0]]", "device-slice"),
        ("n = torch.arange(4)[kv_indices]", "device-slice"),
        ("n = kv_indices[kv_indices > 0]", "mask-index"),
        ("kv_indices[kv_indices > 0] = kv_indices", "mask-index"),
        ("n = kv_indices.nonzero()", "data-size"),
        ("n = torch.unique(kv_indices)", "data-size"),
        ("n = torch.where(kv_indices)", "data-size"),
        ("n = torch.repeat_interleave(kv_indices, kv_indices)", "data-size"),
        ("n = torch.equal(kv_indices, kv_indices)", "equal"),
        ("n = torch.allclose(kv_indices, kv_indices)", "equal"),
        ("kv_indices.copy_(torch.arange(4))", "copy"),
        ("kv_indices[:] = torch.arange(4)", "copy"),
        ("torch.arange(4).copy_(kv_indices)", "copy"),
        ("n = torch.arange(4).to(self.device)", "to-device"),
        ("n = torch.arange(4).cuda()", "to-device"),
        ("n = torch.tensor([1, 2], device=self.device)", "to-device"),
        ("torch.cuda.synchronize()", "synchronize"),
        ("self.event.synchronize()", "synchronize"),
    ],
)
def test_each_kind_of_wait(line: str, kind: str) -> None:
    found = waits_of(line)
    (wait,) = (wait for wait in found.waits if wait.counted)
    assert wait.kind == kind
    assert wait.times == 1
    assert (wait.condition, wait.note) == ("", "")
    assert wait.way == ("BatchMLAPagedAttentionWrapper.plan",)
    text = files_of(line)["flashinfer/mla/_core.py"].splitlines()[wait.place.line - 1]
    assert text.strip() == line
    assert counts(found) == (1, 1, 1, 1)  # kv_indices are on the device in all of them


def test_a_pageable_copy_that_does_not_block_is_told_and_not_counted() -> None:
    """torch's sync debug mode does not report it either."""
    found = waits_of("n = torch.arange(4).to(self.device, non_blocking=True)")
    (wait,) = found.waits
    assert (wait.kind, wait.counted) == ("pageable-copy", False)
    assert "pageable" in wait.note
    assert counts(found) == (0, 0, 0, 0)
    assert not waits_of("n = kv_len_arr.to(self.device, non_blocking=True)").waits  # pinned


def test_host_arrays_do_not_wait() -> None:
    found = waits_of("a = qo_indptr.to('cpu')", "b = kv_len_arr.tolist(); c = kv_indices.tolist()")
    assert counts(found) == (3, 3, 1, 1)
    by_line = {(wait.expression, wait.when) for wait in found.waits}
    device = (("graph", "device"), ("eager", "device"))
    assert ("qo_indptr.to('cpu')", device) in by_line


def test_a_branch_for_graphs_is_taken_by_graphs() -> None:
    found = waits_of(
        "if self._use_cuda_graph:",
        "    n = kv_indices.tolist()",
        "elif self._kv_indices_buf is None:",
        "    n = kv_indices.tolist(), kv_indices.cpu()",
    )
    assert counts(found) == (1, 2, 1, 2)


def test_of_two_ways_the_one_that_waits_most_counts() -> None:
    found = waits_of(
        "if sm_scale > self.limit:",
        "    n = kv_indices.tolist()",
        "else:",
        "    n = kv_indices.tolist(), kv_indices.cpu()",
        "n = kv_indices.item()",
    )
    assert counts(found) == (3, 3, 3, 3)
    assert [wait.condition for wait in found.waits] == [
        "sm_scale > self.limit",
        "not (sm_scale > self.limit)",
        "not (sm_scale > self.limit)",
        "",
    ]


def test_what_follows_an_early_return_is_on_the_other_way() -> None:
    found = waits_of(
        "if sm_scale > self.limit:",
        "    return kv_indices.tolist()",
        "n = kv_indices.tolist(), kv_indices.cpu()",
    )
    assert counts(found) == (2, 2, 2, 2)


def test_ways_that_raise_are_left_out() -> None:
    found = waits_of(
        "if self.wrong:",
        "    raise ValueError(f'{kv_indices}')",
        "try:",
        "    n = kv_indices.cpu()",
        "except Exception:",
        "    n = kv_indices.tolist()",
        "    raise",
    )
    assert [(wait.kind, wait.condition) for wait in found.waits] == [("cpu", "")]


def test_what_the_second_plan_finds_is_what_counts() -> None:
    found = waits_of("if self.planned is None:", "    self.planned = kv_indices.tolist()")
    assert found.waits == ()


def test_a_loop_over_a_tuple_is_unrolled_and_another_is_told() -> None:
    known = waits_of(
        "for name, array in (('a', qo_indptr), ('b', kv_indices)):", "    n = array.cpu()"
    )
    assert counts(known) == (2, 2, 1, 1)
    assert sorted(wait.times for wait in known.waits) == [2]
    unknown = waits_of("for i in range(page_size):", "    n = kv_indices.cpu()")
    (wait,) = unknown.waits
    assert wait.condition == "once a round of a loop"
    comprehended = waits_of("n = [array.cpu() for array in (qo_indptr, kv_indptr, kv_indices)]")
    assert counts(comprehended) == (3, 3, 1, 1)


def test_calls_are_followed_into_methods_modules_objects_and_closures() -> None:
    found = waits_of(
        "self.check(lengths=kv_indices)",
        "args = Args(arrays=kv_indices)",
        "args.validate()",
        "load = lambda: kv_indices.cpu()",
        "load()",
        "args.validated()",
        methods="\n    def check(self, *, lengths):\n        return first_of(lengths)\n",
        helpers=(
            "from dataclasses import dataclass\n\n\n"
            "def first_of(lengths):\n    return lengths[0].item()\n\n\n"
            "@dataclass\nclass Args:\n    arrays: object\n    size: int = 1\n"
            "    seen: object = None\n"
            "    def validate(self):\n"
            "        if self.seen is None:\n            self.seen = self.arrays.tolist()\n"
            "        return self.seen\n"
            "    def validated(self):\n        return self.validate()\n"
        ),
    )
    assert [(wait.kind, wait.way[1:]) for wait in found.waits] == [
        ("item", ("BatchMLAPagedAttentionWrapper.check", "first_of")),
        ("tolist", ("Args.validate",)),
        ("cpu", ("<lambda>",)),
    ]
    assert found.waits[0].place.path == "flashinfer/mla/helpers.py"


def test_the_same_helper_twice_is_two_waits() -> None:
    found = waits_of(
        "first_of(qo_indptr); first_of(kv_indptr)",
        helpers="def first_of(lengths):\n    return lengths.cpu()[0].item()\n",
    )
    (wait,) = found.waits
    assert wait.times == 2
    assert counts(found) == (2, 2, 0, 0)


@pytest.mark.parametrize("files", [wrapper_era(), backend_era()], ids=["wrapper", "back end"])
def test_the_miniatures_of_both_eras(files: Files) -> None:
    assert find_waits(source(files)).unknown == ""


@pytest.mark.parametrize(
    "body",
    [
        "        return self.plan(*[qo_indptr] * 4)\n",
        "        " + "(" * 60 + "kv_indices" + ")" * 60 + ".cpu()\n",
        "        del kv_indices\n        match page_size:\n            case 1: pass\n",
        "        global x\n        x = [*kv_indices, *(yield kv_indices)]\n",
        "        a, *b = {**{}, 'k': kv_indices}, {1}, {k: v for k, v in qo_indptr}\n",
        "        with self as (a, b), other() as c:\n            a.b[c:d, ...] += ~kv_indices\n",
    ],
)
def test_odd_code_is_followed_too(body: str) -> None:
    files = files_of()
    files["flashinfer/mla/_core.py"] = HEAD + body + TAIL
    assert isinstance(find_waits(source(files)), StockWaits)


def test_a_helper_that_does_not_parse_makes_it_unknown() -> None:
    files = files_of("broken(kv_indices)")
    files["flashinfer/mla/helpers.py"] = "def broken(:\n"
    found = find_waits(source(files))
    assert "does not parse" in found.unknown
    assert found.waits == ()
    assert found.count("graph", "device") is None


# --- releases ---------------------------------------------------------------------------------

#: What torch's sync debug mode counts on an H200 (docs/benchmarks.md): a replan of a graph from
#: arrays on the device, and from host arrays.
MEASURED = {"0.5.3": (3, 0), "0.6.17": (3, 0), "0.6.18": (3, 0), "0.7.2": (10, 0), "0.7.4": (13, 2)}
BY_DEFAULT = ("0.6.18", "0.7.2", "0.7.4")


@cache
def released(version: str) -> StockWaits:
    return find_waits(flashinfer_source(version))


@pytest.mark.parametrize(
    "version",
    [
        version if version in BY_DEFAULT else pytest.param(version, marks=pytest.mark.releases)
        for version in MEASURED
    ],
)
def test_the_counts_are_those_measured(version: str) -> None:
    found = released(version)
    device, host = MEASURED[version]
    assert counts(found) == (device, device, host, host)
    assert all(wait.kind in ("to-cpu", "item") for wait in found.waits if wait.counted)
    read = flashinfer_source(version).tree.read
    for wait in found.waits:
        line = (read(wait.place.path) or b"").decode().splitlines()[wait.place.line - 1]
        assert wait.expression.partition("(")[0].rpartition(".")[2] in line


@pytest.mark.releases
@pytest.mark.parametrize(
    ("version", "count"),
    [
        ("0.5.0", 3),
        ("0.6.1", 3),
        ("0.6.3", 3),
        ("0.6.7.post2", 3),
        ("0.6.8.post1", 3),
        ("0.6.11.post1", 3),
        ("0.6.12", 3),
        ("0.6.14", 3),
        ("0.6.15.post1", 3),
        ("0.7.0", 6),
        ("0.7.1", 10),
    ],
)
def test_other_releases_are_followed(version: str, count: int) -> None:
    assert counts(released(version)) == (count, count, 0, 0)


def test_the_waits_of_0_7_4_by_their_ways() -> None:
    found = released("0.7.4")
    ways = [(wait.times, wait.way[-1], wait.kind) for wait in found.waits if wait.counted]
    assert ways == [
        (2, "_indptr_values", "to-cpu"),
        (1, "_validate_csr_metadata", "to-cpu"),
        (1, "_validate_fa_plan_workload", "to-cpu"),
        (1, "_validate_fa_plan_workload", "to-cpu"),
        (1, "_BatchMLAPagedAttentionFaBackendBase.preflight_plan_from_wrapper", "to-cpu"),
        (1, "_validate_fa_plan_workload", "to-cpu"),
        (1, "_validate_fa_plan_workload", "to-cpu"),
        (1, "_BatchMLAGeneratedFaMechanics._plan_generated_fa", "to-cpu"),
        (1, "_BatchMLAGeneratedFaMechanics._plan_generated_fa", "to-cpu"),
        (1, "_BatchMLAGeneratedFaMechanics._plan_generated_fa", "to-cpu"),
        (1, "_BatchMLAGeneratedFaMechanics._plan_generated_fa", "item"),
        (1, "_BatchMLAGeneratedFaMechanics._plan_generated_fa", "item"),
    ]
    conditions = {wait.condition for wait in found.waits if wait.kind == "item"}
    assert conditions == {"page_start < page_end"}  # a batch that holds any KV


def test_a_choice_of_the_back_end_is_told_and_not_counted() -> None:
    found = released("0.7.2")
    extra = [wait for wait in found.waits if not wait.counted]
    assert {wait.place.path.rpartition("/")[2] for wait in extra} == {"_auto_policy.py"}
    assert all("chooses its back end" in wait.note and wait.condition for wait in extra)


MADE = "class Made:\n    part = None\n    other = 1\n"


@pytest.mark.parametrize(
    ("lines", "condition"),
    [
        (("if made is not None and made.part is not None: return", "kv_indices.tolist()"), ""),
        (("if made is None or made.part is None: kv_indices.tolist()",), ""),
        (("if made is None or made.other is None: return", "kv_indices.tolist()"), "not ("),
        (("if made is not None and made.other is not None: kv_indices.tolist()",), "made"),
        (("n = made is not None and made.part is not None", "kv_indices.tolist()"), ""),
    ],
)
def test_a_condition_knows_what_its_first_part_says(lines: tuple[str, ...], condition: str) -> None:
    """What is made on one way only, and has no part on any: its part is not asked for in vain."""
    found = waits_of("made = Made() if num_heads > 3 else None", *lines, helpers=MADE)
    (wait,) = {wait for wait in found.waits if wait.counted}
    assert wait.condition.startswith(condition)
    assert (wait.condition == "") == (condition == "")
