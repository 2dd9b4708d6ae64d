"""Two FlashInfers against each other: miniatures bent one way each, and releases."""

from __future__ import annotations

import pytest

from mlagen.codegen.differences import Difference, rows
from mlagen.codegen.flashinfer.checks import plan_checks
from mlagen.codegen.flashinfer.compare import compare_apis, compare_checks, compare_waits
from mlagen.codegen.flashinfer.read import read_plan_api
from mlagen.codegen.flashinfer.waits import StockWaits, find_waits
from tests.flashinfer.miniatures import (
    NINE,
    PLANNING,
    Files,
    backend_era,
    call,
    source,
    with_header,
    with_update,
    wrapper_era,
)
from tests.releases import flashinfer_source, plan_api

PATH = "flashinfer/mla.py"
CAUSAL = "        self._causal = causal\n"


def bent(*replacements: tuple[str, str]) -> Files:
    files = wrapper_era()
    for old, new in replacements:
        assert old in files[PATH]
        files[PATH] = files[PATH].replace(old, new)
    return files


def differences(old: Files, new: Files) -> list[tuple[str, str, str, str]]:
    apis = [read_plan_api(source(files), allow_unknown=True) for files in (old, new)]
    found = compare_apis(*apis)
    return [(item.kind, item.subject, item.old, item.new) for item in found]


PLAIN = wrapper_era()
BENT: dict[str, tuple[Files, list[tuple[str, str, str, str]]]] = {
    "nothing": (wrapper_era(), []),
    "a parameter": (
        bent(("use_profiler=False,", "use_profiler=False, window=0,")),
        [("parameter of plan", "", "", "window")],
    ),
    "state": (
        bent(
            (CAUSAL, f"{CAUSAL}        self._kpe = head_dim_kpe\n"),
            ("self._causal, ", "self._causal, self._kpe, "),
        ),
        [
            ("era", "", "0.4.0rc4-0.6.7", "unknown, derived from source; --allow-unknown "
             "(nearest: 0.4.0rc4-0.6.7)"),
            ("read by run", "_kpe", "", "head_dim_kpe"),
        ],
    ),
    "state that run does not read any more": (
        bent(("self._sm_scale,\n        )", "1.0,\n        )")),
        [("read by run", "_sm_scale", "sm_scale", "")],
    ),
    "int32": (
        wrapper_era(
            "        for t in (kv_len_arr, kv_indptr, qo_indptr):\n"
            "            assert t.dtype == torch.int32\n" + PLANNING
        ),
        [("int32 checked by plan", "", "no", "yes")],
    ),
    "a comment": (
        bent((CAUSAL, f"        # Why.\n{CAUSAL}")),
        [("source", "", "*", "*")],
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", BENT)
def test_what_is_told(kind: str) -> None:
    files, expected = BENT[kind]
    found = [
        (kind, subject, "*", "*") if kind == "source" else (kind, subject, old, new)
        for kind, subject, old, new in differences(PLAIN, files)
    ]
    assert found == expected


def test_the_other_way_round_new_is_gone() -> None:
    files, _ = BENT["state that run does not read any more"]
    assert differences(files, PLAIN) == [("read by run", "_sm_scale", "", "sm_scale")]


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ((*NINE, "head_dim_kpe"), [("argument", "", "", "head_dim_kpe")]),
        (
            (*NINE[:3], NINE[4], NINE[3], *NINE[5:]),
            [("argument", "order", "*", "*")],
        ),
    ],
)
def test_arguments(more: tuple[str, ...], expected: list[tuple[str, str, str, str]]) -> None:
    files = with_header(wrapper_era("        self._plan_info = " + call(*more)))
    found = [item for item in differences(PLAIN, files) if item[0] == "argument"]
    assert [
        (kind, subject, "*", "*") if subject == "order" else (kind, subject, old, new)
        for kind, subject, old, new in found
    ] == expected


def test_a_public_update_is_told() -> None:
    files = wrapper_era(path="flashinfer/mla/_core.py")
    found = differences(files, with_update(files))
    assert found == [
        (
            "public update",
            "",
            "none",
            "update_cuda_graph_plan(metadata=MLAPlanMetadata.csr(qo_indptr, kv_indptr, "
            "kv_indices, kv_len_arr))",
        )
    ]


def test_another_era() -> None:
    kinds = [item[:2] for item in differences(PLAIN, backend_era())]
    assert kinds[:7] == [
        ("era", ""),
        ("location", "wrapper class"),
        ("location", "private call"),
        ("private call", "method"),
        ("private call", "result"),
        ("state", ""),
        ("copies to the device", ""),
    ]


def checks(text: str, *functions: str) -> list[str]:
    files = wrapper_era(text + PLANNING)
    files[PATH] += "".join(f"\n\n{function}" for function in functions)
    return [str(check) for check in plan_checks(source(files))]


@pytest.mark.parametrize(
    ("text", "functions", "expected"),
    [
        ("", (), []),
        (
            "        if page_size < 1:\n            raise ValueError(page_size)\n",
            (),
            ["plan: ValueError if page_size < 1"],
        ),
        (
            "        if causal:\n            if a or b:\n                raise Error\n",
            (),
            ["plan: Error if causal and (a or b)"],
        ),
        (
            "        for x in (1,):\n            with x:\n                assert x > 0, x\n",
            (),
            ["plan: AssertionError if not (x > 0)"],
        ),
        ("        assert num_heads is not None\n", (), []),
        ("        try:\n            pass\n        except E:\n            raise\n", (), []),
        (
            "        _one(num_heads)\n",
            (
                "def _one(heads):\n    _two(heads)\n",
                "def _two(heads):\n    if heads:\n        raise E()\n    _one(heads)\n",
                "def _three(heads):\n    raise E()\n",
            ),
            ["_two: E if heads"],
        ),
    ],
)
def test_checks(text: str, functions: tuple[str, ...], expected: list[str]) -> None:
    assert checks(text, *functions) == expected


def test_releases_checks_and_waits() -> None:
    """What the upgrade that people fear brings: 13 waits for 3, and the checks of 0.7."""
    old, new = flashinfer_source("0.6.17"), flashinfer_source("0.7.4")
    waits = compare_waits(find_waits(old), find_waits(new))
    told = {item.subject: (item.old, item.new) for item in waits if item.kind == "waits"}
    assert told["FlashInfer's own plan, graph, lengths on the device"] == ("3", "13")
    assert told["FlashInfer's own plan, graph, lengths on the host"] == ("0", "2")
    checks = compare_checks(plan_checks(old), plan_checks(new))
    assert "_validate_fa_plan_workload" in {item.subject for item in checks if item.new}
    assert {item.subject for item in checks if item.old} == {"plan"}
    apis = compare_apis(plan_api("0.6.17"), plan_api("0.7.4"))
    assert {"era", "private call", "state", "copies to the device"} <= {i.kind for i in apis}
    assert "_planned_kv_page_range" in {i.subject for i in apis if i.kind == "read by run"}
    assert compare_apis(plan_api("0.7.4"), plan_api("0.7.4")) == ()
    assert compare_checks(plan_checks(new), plan_checks(new)) == ()
    assert compare_waits(find_waits(new), find_waits(new)) == ()


def test_waits_that_cannot_be_told_are_said() -> None:
    [found] = compare_waits(StockWaits(unknown="too long"), StockWaits())
    assert found == Difference("waits", "FlashInfer's own plan", "", "not compared: too long")


def test_rows() -> None:
    found = [
        Difference("era", "", "a", "b", "x.py:3"),
        *(Difference("check", "f", "", f"E if {n}", f"x.py:{n}") for n in range(4)),
        Difference("check", "g", "E if x", ""),
        *(Difference("site", name, "installed", "refused") for name in ("one", "two")),
        Difference("site", "three", "installed", ""),
    ]
    assert rows(found) == (
        ("era", "a -> b (x.py:3)"),
        ("new check", "f: 4, the first: E if 0 (x.py:0)"),
        ("gone check", "g: E if x"),
        ("site", "one, two: installed -> refused"),
        ("gone site", "three: installed"),
    )
    assert rows(()) == ()
