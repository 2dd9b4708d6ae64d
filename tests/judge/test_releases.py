"""What is found in real releases, each with the FlashInfer it pins or the nearest wheel."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace

import pytest

from mlagen.codegen.flashinfer.api import PlanApi
from mlagen.codegen.judge import host_syncs, is_note, judge
from tests.judge.miniature import COPIES, STAGES
from tests.releases import NEAREST_WHEEL, PINS, patch_of, plan_api, sglang_file

#: What every hand-written plan so far drops or skips.
_EACH = {"d5-frozen-grid?": 1, "d7-unchecked-limits?": 1}
_BOTH = {"d5-frozen-grid?": 2, "d7-unchecked-limits?": 2}
#: 0.4.4 on: the draft steps, replayed and eager, and the assert of decode.
_SINCE_DRAFT = {"d2-draft-lengths": 2, "d10-assert": 1}

FINDINGS: dict[str, dict[str, int]] = {
    # Pins 0.2.2.post1 to 0.2.11.post3, which have no wheel: FlashInfer 0.5.0 stands in, and
    # takes neither a stream nor `.default`.
    "0.4.3.post4": {**_EACH, "d1-pinned-race": 1, "d6-int64-lengths": 1, "plan-stream": 1},
    "0.4.4": {
        **_EACH,
        **_SINCE_DRAFT,
        "d1-pinned-race": 1,
        "d6-int64-lengths": 1,
        "plan-stream": 1,
        "stale-verify-lengths?": 1,
    },
    "0.4.5": {
        **_EACH,
        **_SINCE_DRAFT,
        "d1-pinned-race": 1,
        "d6-int64-lengths": 1,
        "plan-stream": 1,
    },
    "0.5.1": {
        **_SINCE_DRAFT,
        "d1-pinned-race": 1,
        "d5-frozen-grid?": 2,
        "d6-int64-lengths": 1,
        "d7-unchecked-limits?": 1,
        "plan-default": 1,
    },
    "0.5.10": {
        **_SINCE_DRAFT,
        "d1-pinned-race": 1,
        "d5-frozen-grid?": 2,
        "d6-int64-lengths": 1,
        "d7-unchecked-limits?": 1,
    },
    "0.5.13": {
        **_SINCE_DRAFT,
        "d1-pinned-race": 1,
        "d5-frozen-grid?": 2,
        "d6-int64-lengths": 1,
        "d7-unchecked-limits?": 1,
    },
    "0.5.17": {**_EACH, **_SINCE_DRAFT, "d1-pinned-race": 1, "plan-state?": 1},
    "0.5.18": {
        **_BOTH,
        "d1-pinned-race": 3,
        "d2-draft-lengths": 2,
        "d3-verify-twice": 2,
        "d4-reused-buffers?": 1,
        "d9-buffer-size": 1,
        "d10-assert": 2,
        "plan-state?": 2,
    },
    "0.5.19": {
        **_BOTH,
        "d1-pinned-race": 3,
        "d2-draft-lengths": 2,
        "d4-reused-buffers?": 1,
        "d8-dflash-padding?": 1,
        "d9-buffer-size": 1,
        "d10-assert": 2,
        "d11-frozen-plan": 2,
        "plan-state?": 2,
    },
    "0.5.23": {
        **_BOTH,
        "d2-draft-lengths": 2,
        "d4-reused-buffers?": 1,
        "d8-dflash-padding?": 1,
        "d10-assert": 2,
        "d11-frozen-plan": 2,
        "plan-state?": 2,
    },
}


@pytest.mark.parametrize("version", FINDINGS)
def test_findings(version: str) -> None:
    problems = judge(sglang_file(version), "f.py", plan_api(NEAREST_WHEEL[version]))
    found = Counter(f"{p.code}?" if is_note(p) else p.code for p in problems)
    assert dict(found) == FINDINGS[version]
    assert list(problems) == sorted(problems, key=lambda p: p.line)


def test_the_lines_of_0_5_18() -> None:
    source = sglang_file("0.5.18")
    lines = source.decode().splitlines()
    shown = {
        (p.code, lines[p.line - 1].strip())
        for p in judge(source, "f.py", plan_api("0.6.17"))
        if not is_note(p)
    }
    assert ("d2-draft-lengths", "kv_len_arr_cpu = seq_lens_cpu[:bs].to(torch.int32)") in shown
    assert (
        "d3-verify-twice",
        "self.fast_plan_kv_len_arr_cpu[:bs] = seq_lens_cpu[:bs] + ndt",
    ) in shown
    assert (
        "d3-verify-twice",
        "prefill_wrapper.plan = partial(fast_mla_prefill_plan, prefill_wrapper)",
    ) in shown
    assert ("d1-pinned-race", "def fast_mla_prefill_plan(") in shown
    assert (
        "d1-pinned-race",
        "self.fast_plan_kv_len_arr_cpu[:bs] = forward_batch.seq_lens_cpu[:bs]",
    ) in shown


@pytest.mark.parametrize(
    ("sglang", "flashinfer", "code"),
    [
        ("0.5.10", "0.7.2", "plan-state"),
        ("0.5.1", "0.7.2", "plan-default"),
        ("0.4.5", "0.7.2", "plan-stream"),
        ("0.5.23", "0.7.4", "plan-state"),
    ],
)
def test_an_upgrade_of_flashinfer_alone(sglang: str, flashinfer: str, code: str) -> None:
    problems = judge(sglang_file(sglang), "f.py", plan_api(flashinfer))
    assert code in {p.code for p in problems}
    assert "d1-pinned-race" not in {p.code for p in problems}


def test_an_argument_more_in_flashinfer_is_told() -> None:
    known = plan_api("0.7.2")
    grown = replace(known.call, arguments=(*known.call.arguments, "num_colocated_ctas"))
    problems = judge(sglang_file("0.5.23"), "f.py", replace(known, call=grown))
    told = [p for p in problems if p.code == "plan-arguments"]
    assert [p.line for p in told] == [1386, 1433]
    assert all("num_colocated_ctas" in p.message and not is_note(p) for p in told)


def test_without_flashinfer_what_needs_none_is_still_found() -> None:
    found = {p.code for p in judge(sglang_file("0.5.18"), "f.py", None)}
    assert {"d2-draft-lengths", "d3-verify-twice", "d9-buffer-size", "d10-assert"} <= found
    assert not {code for code in found if code.startswith(("plan-", "d1-"))}


@pytest.mark.parametrize(("written", "version"), [(COPIES, "0.6.17"), (STAGES, "0.7.2")])
def test_the_miniature_s_flashinfer_is_the_real_one(written: PlanApi, version: str) -> None:
    real = plan_api(version)
    for name in ("version", "era", "holder", "planner_copies", "int32_checked"):
        assert getattr(written, name) == getattr(real, name), name
    assert written.call.method == real.call.method
    assert written.call.arguments == real.call.arguments
    assert {part.name for part in written.run_state} <= {part.name for part in real.run_state}
    assert set(written.plan_parameters) <= set(real.plan_parameters)


SYNCS: dict[str, list[tuple[int, str, str]]] = {
    # Lines of facts that were read by hand; the two `.to("cpu")` at start-up come first.
    "0.4.5": [
        (211, "to-cpu", "init"),
        (212, "to-cpu", "init"),
        (240, "item", "capture"),
        (262, "item", "capture"),
        (482, "stock-plan", "eager"),
        (546, "item", "eager"),
        (631, "stock-plan", "eager"),
    ],
    "0.5.1": [
        (344, "to-cpu", "init"),
        (345, "to-cpu", "init"),
        (373, "item", "capture"),
        (395, "item", "capture"),
        (417, "item", "capture"),
        (702, "device-slice", "eager"),
        (721, "stock-plan", "eager"),
        (787, "item", "eager"),
        (829, "device-slice", "eager"),
        (877, "stock-plan", "eager"),
    ],
    "0.5.23": [
        (351, "item", "capture"),
        (352, "cpu", "capture"),
        (522, "to-cpu", "init"),
        (523, "to-cpu", "init"),
        (959, "stock-plan", "eager"),
        (1029, "item", "eager"),
        (1168, "stock-plan", "eager"),
    ],
}


@pytest.mark.parametrize("version", SYNCS)
def test_host_syncs(version: str) -> None:
    found = host_syncs(sglang_file(version), "f.py")
    assert [(sync.line, sync.kind, sync.path) for sync in found] == SYNCS[version]


def test_a_stock_verify_replay_says_that_it_waits() -> None:
    before, after = (
        host_syncs(sglang_file(version), "f.py")[-1] for version in ("0.5.17", "0.5.18")
    )
    assert "replay of verify too" in before.note
    assert "replay of verify too" not in after.note
    assert "2 in 0.7.4" in after.note


#: DFLASH inputs keep SGLang's own plan from 0.5.19 on; up to 0.5.13 draft-extend is captured.
LEFT_AS_IT_IS = {
    "0.4.5": set(),
    "0.5.1": {"d5-frozen-grid"},
    "0.5.13": {"d5-frozen-grid"},
    "0.5.17": set(),
    "0.5.18": set(),
    "0.5.19": {"d1-pinned-race", "d7-unchecked-limits", "d8-dflash-padding", "plan-state"},
    "0.5.23": {"d7-unchecked-limits", "d8-dflash-padding", "plan-state"},
}


@pytest.mark.parametrize("version", LEFT_AS_IT_IS)
def test_a_patched_release_has_notes_at_most(version: str) -> None:
    flashinfer = plan_api(NEAREST_WHEEL[version])
    patched = patch_of(version, NEAREST_WHEEL[version]).patched
    problems = judge(patched, "f.py", flashinfer)
    assert [str(problem) for problem in problems if not is_note(problem)] == []
    assert {problem.code for problem in problems} == LEFT_AS_IT_IS[version]
    stock = [s for s in host_syncs(patched, "f.py") if s.kind == "stock-plan"]
    assert stock
    assert all("mlagen" in sync.note for sync in stock)


@pytest.mark.releases
@pytest.mark.parametrize("version", PINS)
def test_all_releases_are_judged(version: str) -> None:
    found = {p.code for p in judge(sglang_file(version), "f.py", plan_api(NEAREST_WHEEL[version]))}
    number = tuple(int(part) for part in version.split(".post")[0].split("."))
    assert ("d2-draft-lengths" in found) == (number >= (0, 4, 4))
    assert ("d3-verify-twice" in found) == (number == (0, 5, 18))
    assert ("d6-int64-lengths" in found) == (number < (0, 5, 14))
    assert ("d8-dflash-padding" in found) == (number >= (0, 5, 19))
    assert ("d9-buffer-size" in found) == (number in {(0, 5, 18), (0, 5, 19)})
    assert ("d11-frozen-plan" in found) == (number >= (0, 5, 19))
    assert ("d1-pinned-race" in found) == (number < (0, 5, 22))
    assert "plan-arguments" not in found
    assert host_syncs(sglang_file(version), "f.py")


def test_the_largest_file_is_judged_fast() -> None:
    source, flashinfer = sglang_file("0.5.23"), plan_api("0.7.2")
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        judge(source, "f.py", flashinfer)
        best = min(best, time.perf_counter() - start)
    assert best < 0.15
