"""How often each step of a back end waits, on which ways, and which variant ends that."""

from __future__ import annotations

import json
from functools import cache
from typing import Any, TypeAlias

import pytest
from click.testing import CliRunner

from mlagen.cli import cli
from mlagen.codegen.flashinfer.waits import StockWaits, find_waits
from mlagen.codegen.inspection import Inspected, inspect_file
from mlagen.codegen.judge import StepWaits, waits_of_steps
from mlagen.codegen.sglang.find import FoundTarget
from mlagen.codegen.waits import step_facts
from tests.judge.miniature import changed
from tests.releases import (
    NEAREST_WHEEL,
    PINS,
    SGLANG_FILE,
    flashinfer_source,
    patch_of,
    plan_api,
    sglang_file,
    shipped,
)

Counts: TypeAlias = dict[tuple[str, str], int]


@cache
def stock(version: str) -> StockWaits:
    return find_waits(flashinfer_source(version))


def by_step(steps: tuple[StepWaits, ...]) -> dict[tuple[str, str], StepWaits]:
    return {(step.step, step.occasion): step for step in steps}


def counts(source: bytes, flashinfer: str) -> Counts:
    return {
        key: step.count
        for key, step in by_step(waits_of_steps(source, "f.py", stock(flashinfer))).items()
    }


# --- miniatures -------------------------------------------------------------------------------

#: A back end in words of our own: its own plan in a replay, FlashInfer's in the rest.
BACKEND = """\
import torch
from functools import partial
from flashinfer import BatchMLAPagedAttentionWrapper


class FlashInferMLAAttnBackend:
    def __init__(self, runner, skip_prefill=False):
        self.device = runner.device
        self.eager = BatchMLAPagedAttentionWrapper(runner.workspace)
        self.graphs = {}
        self.updater = Updater(self)

    def init_forward_metadata_out_graph(self, forward_batch, in_capture=False):
        mode, seq_lens = forward_batch.forward_mode, forward_batch.seq_lens
        if in_capture:
            wrapper = BatchMLAPagedAttentionWrapper(forward_batch.workspace, use_cuda_graph=True)
            self.updater.update(wrapper, seq_lens, None)
            self.graphs[forward_batch.batch_size] = wrapper
            if mode.is_target_verify():
                wrapper.plan = partial(host_plan, wrapper)
        else:
            wrapper = self.graphs[forward_batch.batch_size]
            self.updater.update(wrapper, seq_lens, forward_batch.seq_lens_cpu)

    def init_forward_metadata(self, forward_batch):
        if forward_batch.forward_mode.is_draft_extend():
            raise ValueError("no such mode")
        here = 0
        self.updater.update(self.eager, forward_batch.seq_lens, None)


class Updater:
    def __init__(self, backend):
        self.indptr = torch.zeros(9, dtype=torch.int32, device=backend.device)

    def update(self, wrapper, seq_lens, host_lens):
        self.indptr[1:] = torch.cumsum(seq_lens, dim=0)
        lens = seq_lens if host_lens is None else host_lens
        wrapper.plan(self.indptr, self.indptr, self.indptr, lens)


def host_plan(wrapper, qo_indptr, kv_indptr, kv_indices, lens):
    wrapper._cached_module.plan(lens)
"""
HERE = "        here = 0\n"


def test_a_replay_meets_what_its_capture_installed() -> None:
    assert counts(BACKEND.encode(), "0.7.2") == {
        ("decode", "capture"): 10,
        ("decode", "replay"): 10,
        ("decode", "eager"): 10,
        ("verify", "capture"): 10,
        ("verify", "replay"): 0,
        ("verify", "eager"): 10,
        ("draft-extend", "eager"): 10,
        ("draft-extend-v1", "capture"): 10,
        ("draft-extend-v1", "replay"): 10,
    }


def test_a_capture_that_may_install_a_plan_leaves_both_open() -> None:
    source = BACKEND.replace(
        "if mode.is_target_verify():", "if mode.is_target_verify() and self.on:"
    )
    step = by_step(waits_of_steps(source.encode(), "f.py", stock("0.7.2")))["verify", "replay"]
    assert (step.least, step.count) == (0, 10)
    assert [wait.condition for wait in step.waits] == ["not (the_capture_installed_a_plan)"]


def test_an_attribute_of_one_way_may_be_its_default() -> None:
    lines = (
        "        if self.flag:\n            self.kept = 1\n"
        "        if getattr(self, 'kept', None) is None:\n"
        "            n = forward_batch.seq_lens.tolist()\n"
    )
    source = BACKEND.replace(HERE, lines)
    step = by_step(waits_of_steps(source.encode(), "f.py", stock("0.7.2")))["verify", "eager"]
    assert (step.least, step.count) == (10, 11)
    always = source.replace("        if self.flag:\n            self.kept", "        self.kept")
    step = by_step(waits_of_steps(always.encode(), "f.py", stock("0.7.2")))["verify", "eager"]
    assert (step.least, step.count) == (10, 10)


def test_the_way_of_a_plan_is_told() -> None:
    step = by_step(waits_of_steps(BACKEND.encode(), "f.py", stock("0.7.2")))["verify", "eager"]
    (wait,) = step.waits
    assert wait.way == ("FlashInferMLAAttnBackend.init_forward_metadata", "Updater.update")
    assert (wait.expression, wait.kind, wait.times) == ("wrapper.plan", "stock-plan", 10)
    line = BACKEND[: BACKEND.index("wrapper.plan(self")].count("\n") + 1
    assert (wait.line, wait.condition, wait.ours) == (line, "", False)


def test_host_arrays_cost_what_flashinfer_asks_for_them() -> None:
    source = BACKEND.replace("plan(self.indptr, self.indptr", "plan(self.qo_cpu, self.kv_cpu")
    source = source.replace("self.eager, forward_batch.seq_lens", "self.eager, self.seq_lens_cpu")
    for flashinfer, waits in (("0.7.2", []), ("0.7.4", [2])):
        steps = by_step(waits_of_steps(source.encode(), "f.py", stock(flashinfer)))
        plans = [w.times for w in steps["decode", "eager"].waits if w.kind == "stock-plan"]
        assert plans == waits


def test_without_a_flashinfer_a_plan_is_one_wait() -> None:
    step = by_step(waits_of_steps(BACKEND.encode(), "f.py", None))["verify", "eager"]
    assert step.count == 1


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("n = forward_batch.seq_lens_cpu.sum().item()", None),
        ("n = forward_batch.seq_lens_cpu.tolist()", None),
        ("n = forward_batch.kv_indices[: forward_batch.kv_indptr_cpu[-1]]", None),
        ("n = forward_batch.seq_lens_cpu.to(self.device, non_blocking=True)", None),
        ("n = forward_batch.seq_lens.sum().item()", "item"),
        ("n = forward_batch.seq_lens.cpu()", "cpu"),
        ("n = forward_batch.seq_lens.tolist()", "tolist"),
        ("n = forward_batch.seq_lens.to('cpu')", "to-cpu"),
        ("n = forward_batch.kv_indices[: forward_batch.kv_indptr[-1]]", "device-slice"),
        ("n = torch.arange(4).to(self.device)", "to-device"),
        ("forward_batch.seq_lens[:] = forward_batch.seq_lens_cpu", "copy"),
        ("n = torch.arange(4).to(self.device, non_blocking=True)", "pageable-copy"),
        ("n = max(forward_batch.seq_lens)", "bool"),
    ],
)
def test_each_kind_of_wait_in_a_step(line: str, kind: str | None) -> None:
    source = BACKEND.replace(HERE, f"        {line}\n")
    step = by_step(waits_of_steps(source.encode(), "f.py", stock("0.7.2")))["verify", "eager"]
    found = [wait for wait in step.waits if wait.kind != "stock-plan"]
    assert [wait.kind for wait in found] == ([] if kind is None else [kind])
    assert step.count == 10 + (kind not in (None, "pageable-copy"))  # that one is not reported
    for wait in found:
        assert source.splitlines()[wait.line - 1].strip() == line


@pytest.mark.parametrize(
    ("test", "steps"),
    [
        ("mode.is_decode_or_idle()", {"decode"}),
        ("mode.is_target_verify()", {"verify"}),
        ("mode.is_draft_extend_v2()", {"draft-extend"}),
        ("not mode.is_decode()", {"verify", "draft-extend"}),
    ],
)
def test_a_wait_below_a_mode_is_of_that_step(test: str, steps: set[str]) -> None:
    lines = "        mode = forward_batch.forward_mode\n        if {}:\n            n = {}\n"
    source = BACKEND.replace(HERE, lines.format(test, "forward_batch.seq_lens.tolist()"))
    found = by_step(waits_of_steps(source.encode(), "f.py", stock("0.7.2")))
    assert {
        step.step for step in found.values() if any(wait.kind == "tolist" for wait in step.waits)
    } == steps


def test_what_the_source_leaves_open_has_two_counts() -> None:
    source = BACKEND.replace(
        HERE, "        if self.flag:\n            forward_batch.seq_lens.cpu()\n"
    )
    step = by_step(waits_of_steps(source.encode(), "f.py", stock("0.7.2")))["verify", "eager"]
    assert (step.least, step.count) == (10, 11)
    assert [wait.condition for wait in step.waits] == ["self.flag", ""]


def test_a_file_that_cannot_be_followed_has_no_steps() -> None:
    """The class is there, and has none of the methods."""
    assert waits_of_steps(b"class FlashInferMLAAttnBackend:\n    pass\n", "f.py", None) == ()
    assert waits_of_steps(changed(), "f.py", stock("0.7.2")) is not None


# --- releases ---------------------------------------------------------------------------------

#: Waits of a whole step of the real back end, as released, counted by torch's sync debug mode on an
#: H200. A draft chain of four steps: 12, 40 and 52.
MEASURED: dict[tuple[str, str], Counts] = {
    ("0.5.10", "0.6.17"): {
        ("verify", "replay"): 3,
        ("draft-extend", "eager"): 3,
        ("verify", "eager"): 3,
        ("draft-decode", "eager"): 3,
        ("decode", "replay"): 0,
        ("draft-decode", "replay"): 0,
    },
    ("0.5.23", "0.7.2"): {
        ("verify", "replay"): 0,
        ("draft-extend", "eager"): 0,
        ("verify", "eager"): 10,
        ("draft-decode", "eager"): 10,
        ("decode", "replay"): 0,
        ("draft-decode", "replay"): 0,
    },
}
MEASURED["0.5.17", "0.6.17"] = MEASURED["0.5.10", "0.6.17"]
MEASURED["0.5.23", "0.7.4"] = {
    **MEASURED["0.5.23", "0.7.2"],
    ("draft-extend", "eager"): 2,
    ("verify", "eager"): 13,
    ("draft-decode", "eager"): 13,
}


@pytest.mark.parametrize(("sglang", "flashinfer"), MEASURED)
def test_the_counts_are_those_measured(sglang: str, flashinfer: str) -> None:
    found = counts(sglang_file(sglang), flashinfer)
    assert {key: found[key] for key in MEASURED[sglang, flashinfer]} == MEASURED[sglang, flashinfer]


PATCHED = [("0.5.17", "0.6.17"), ("0.5.23", "0.7.2")]


@pytest.mark.parametrize(("sglang", "flashinfer"), PATCHED)
def test_patched_no_step_has_to_wait(sglang: str, flashinfer: str) -> None:
    patched = patch_of(sglang, flashinfer).patched
    steps = by_step(waits_of_steps(patched, "f.py", stock(flashinfer)))
    for key in MEASURED[sglang, flashinfer]:
        step = steps[key]
        assert step.least == 0, key
        assert all(wait.condition for wait in step.waits), key


@cache
def inspected(sglang: str, flashinfer: str, *, patched: bool = False) -> Inspected:
    data = patch_of(sglang, flashinfer).patched if patched else sglang_file(sglang)
    found = FoundTarget(data, SGLANG_FILE, None)
    return inspect_file(found, shipped(), plan_api(flashinfer), stock(flashinfer))


@pytest.mark.parametrize(("sglang", "flashinfer"), PATCHED)
def test_each_wait_has_its_variant_or_the_reason_why_it_stays(sglang: str, flashinfer: str) -> None:
    waits = inspected(sglang, flashinfer).waits
    assert all(bool(wait.removed_by) != bool(wait.note) for wait in waits)
    removed = {(wait.step, *wait.when, wait.removed_by) for wait in waits if wait.removed_by}
    expected = {
        ("verify", "eager", "verify"),
        ("draft-decode", "eager", "draft-decode"),
        ("verify", "replay", "verify"),
        ("draft-extend", "eager", "draft-extend"),
    }
    released = MEASURED[sglang, flashinfer]
    assert removed == {entry for entry in expected if released[entry[0], entry[1]]}
    kept = {(wait.step, *wait.when): wait.note for wait in waits if wait.note}
    assert kept["start-up", "start-up"] == "once, at start-up"
    assert kept["verify", "capture"].startswith("once a graph")
    assert kept["decode", "eager"] == "no variant serves decode eager"


def test_a_slice_by_the_device_stays_where_no_plan_makes_it() -> None:
    waits = [wait for wait in inspected("0.5.1", "0.5.0").waits if wait.kind == "device-slice"]
    assert {(wait.step, wait.note) for wait in waits if wait.when == ("eager",)} >= {
        ("draft-extend", "not in a plan")
    }


def test_in_a_patched_file_the_lines_of_mlagen_have_their_reasons() -> None:
    waits = inspected("0.5.17", "0.6.17", patched=True).waits
    ours = {wait.way[-1]: wait.note for wait in waits if wait.way[-1].startswith("_mlagen")}
    assert set(ours) == {"_mlagen_call_stock", "_mlagen_formula_differs", "_mlagen_host_lens"}
    assert ours["_mlagen_host_lens"] == "only where SGLang gives no host lengths"
    assert "FlashInfer's own plan" in ours["_mlagen_call_stock"]
    around = [wait for wait in waits if wait.step == "verify" and wait.kind == "stock-plan"]
    assert {wait.removed_by for wait in around if wait.when != ("capture",)} == {"verify", ""}


def test_the_words_of_inspect() -> None:
    facts = inspected("0.5.17", "0.6.17").facts
    (steps,) = (value for name, value in facts if name == "waits of a step")
    assert steps == (
        "decode: replay 0, eager 3; draft-decode, a step of the chain: replay 0, eager 3; "
        "verify: replay 3, eager 3; draft-extend: eager 3"
    )
    (plan,) = (value for name, value in facts if "line 960" in value)
    assert "FlashInfer's own plan: 3 waits" in plan
    assert "verify replay, verify eager: removed by verify" in plan
    assert "by init_forward_metadata > update > call_begin_forward" in plan
    assert any("line 863" in value and "without a prefix" in value for _, value in facts)


def _json(*arguments: str) -> Any:
    result = CliRunner().invoke(cli, ["inspect", *arguments, "--json"], prog_name="mlagen")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_inspect_of_a_flashinfer_alone_lists_the_waits() -> None:
    content = _json("--flashinfer", "0.6.18")
    assert [(wait["step"], wait["kind"], wait["line"]) for wait in content["waits"]] == [
        ("plan", "to-cpu", 2229),
        ("plan", "to-cpu", 2230),
        ("plan", "to-cpu", 2231),
    ]
    assert content["waits"][0]["when"] == [
        "graph, arrays on the device",
        "eager, arrays on the device",
    ]
    facts = {fact["name"]: fact["value"] for fact in content["facts"]}
    assert facts["waits of its plan"].startswith("3 for a captured graph, 3 eager; 0 and 0 with")


def test_inspect_of_a_file_lists_those_of_both() -> None:
    content = _json("sglang==0.5.17", "--flashinfer", "0.6.17")
    assert {wait["step"] for wait in content["waits"]} == {
        "plan",
        "start-up",
        "decode",
        "draft-decode",
        "verify",
        "draft-extend",
    }


@pytest.mark.releases
@pytest.mark.parametrize("version", PINS)
def test_all_releases_are_followed(version: str) -> None:
    flashinfer = NEAREST_WHEEL[version]
    steps = by_step(waits_of_steps(sglang_file(version), "f.py", stock(flashinfer)))
    assert steps["decode", "replay"].count == 0
    assert steps["decode", "eager"].count >= 3
    number = tuple(int(part) for part in version.split(".post")[0].split("."))
    assert (("verify", "replay") in steps) == (number >= (0, 4, 4))
    if number >= (0, 4, 4):
        assert steps["verify", "replay"].count == (3 if number < (0, 5, 18) else 0)
    if number >= (0, 4, 5):
        patched = patch_of(version, flashinfer).patched
        for key, step in by_step(waits_of_steps(patched, "f.py", stock(flashinfer))).items():
            if key[0] in ("verify", "draft-decode") and key[1] in ("replay", "eager"):
                assert step.least == 0, key


def test_a_step_that_cannot_be_followed_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not left out, and not taken for one that does not wait."""
    monkeypatch.setattr("mlagen.codegen.flow.state.LONGEST", 10)
    steps = waits_of_steps(BACKEND.encode(), "f.py", stock("0.7.2"))
    assert steps
    assert {(step.followed, step.waits) for step in steps} == {(False, ())}
    ((_, text),) = [fact for fact in step_facts(steps, ()) if fact[0] == "waits of a step"]
    assert "start-up could not be followed" in text
