"""The commands with a variants.yaml whose graphs are planned on the GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlagen.codegen.plugin import GROUP, PACKAGE, PATCHED_FILE, REGISTRY_FILE
from mlagen.codegen.sglang.find import BACKEND_FILE
from tests.cli_workspace import FILE, FLASHINFER, Outcome, files_below, run, workspace
from tests.flashinfer import miniatures
from tests.specs import changed, on_device
from tests.splice.shapes import before

FI = ("--flashinfer", "fi", "--spec", "variants.yaml")
ORIGINAL = before("upstream")
RECORDS = b"mlagen_record_plan(self.forward_metadata, forward_batch.seq_lens)"


def spec_text(*names: str) -> str:
    """The shipped file, these variants of it planned on the GPU."""
    return changed(on_device(*names)).decode()


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of small inputs, with a back end whose graphs can plan themselves."""
    folder = workspace(tmp_path, monkeypatch)
    (folder / FILE).write_bytes(ORIGINAL)
    (folder / "variants.yaml").write_text(spec_text("decode", "draft-decode", "verify"))
    return folder


def planners(outcome: Outcome) -> list[str]:
    """The facts `planner` of `inspect --json`."""
    assert outcome.code == 0
    return [fact["value"] for fact in outcome.json["facts"] if fact["name"] == "planner"]


def test_patch_check_and_unpatch(here: Path) -> None:
    assert run("patch", FILE, *FI).code == 0
    patched = (here / FILE).read_bytes()
    assert RECORDS in patched
    assert run("patch", FILE, *FI, "--check").code == 0
    assert run("check", FILE, *FI).code == 0
    assert run("unpatch", FILE).code == 0
    assert (here / FILE).read_bytes() == ORIGINAL


def test_another_planner_makes_a_patched_file_stale(here: Path) -> None:
    assert run("patch", FILE, *FI).code == 0
    (here / "variants.yaml").write_text(spec_text())
    stale = run("check", FILE, *FI)
    assert stale.code == 1
    assert "site-stale" in stale.text + stale.err
    assert run("patch", FILE, *FI).code == 0
    assert b"MlagenDevicePlan" not in (here / FILE).read_bytes()
    assert run("check", FILE, *FI).code == 0


def test_inspect_says_who_plans(here: Path) -> None:
    recorded = "decode, draft-decode, verify: device, recorded in the graph"
    host = "host, before each replay"
    inspect = ("inspect", FILE, *FI, "--json")
    assert planners(run(*inspect)) == [recorded, f"dcp: {host}"]
    assert run("patch", FILE, *FI).code == 0
    assert planners(run(*inspect)) == [recorded, f"dcp: {host}"]
    (here / "variants.yaml").write_text(spec_text("verify"))
    assert planners(run(*inspect)) == [
        f"decode, draft-decode, dcp: {host}",
        "verify: device, recorded in the graph",
    ]
    (here / "variants.yaml").write_text(spec_text())
    assert planners(run(*inspect)) == [f"decode, draft-decode, verify, dcp: {host}"]


def test_inspect_of_a_file_whose_graphs_cannot_plan_themselves(here: Path) -> None:
    (here / FILE).write_bytes(before("pair"))
    (here / "variants.yaml").write_text(spec_text("decode"))
    assert planners(run("inspect", FILE, *FI, "--json")) == [
        "decode: device, launched before each replay: nothing in this file knows "
        "init_forward_metadata_in_graph",
        "draft-decode, verify: host, before each replay",
    ]
    # What the file has no place for is planned by nobody.
    (here / FILE).write_bytes(before("no-verify"))
    (told, *rest) = planners(run("inspect", FILE, *FI, "--json"))
    assert told.startswith("decode: device, launched before each replay")
    assert rest == []


def test_inspect_of_a_file_that_cannot_be_patched_does_not(here: Path) -> None:
    (here / FILE).write_bytes(ORIGINAL.replace(b"self.req_to_token", b"self.table"))
    refused = run("inspect", FILE, *FI, "--json")
    assert "planner" not in {fact["name"] for fact in refused.json["facts"]}
    assert "looked for self.req_to_token_pool" in refused.text


def test_render_and_its_check(here: Path) -> None:
    done = run("render", "variants.yaml", "--flashinfer", "fi", "--out", "rendered")
    assert done.code == 0
    files = files_below(here / "rendered")
    assert b"import triton.language as tl" in files["plans.py"]
    assert b"def mlagen_bound_arrays(" in files["hooks.py"]
    again = run("render", "variants.yaml", "--flashinfer", "fi", "--out", "rendered", "--check")
    assert again.code == 0
    # An eager variant has no graph to plan.
    (here / "variants.yaml").write_text(spec_text("draft-extend"))
    refused = run("render", "variants.yaml", "--flashinfer", "fi", "--out", "rendered")
    assert refused.code == 3
    assert "planner: device plans captured graphs, and this variant has none" in refused.err
    assert files_below(here / "rendered") == files


def test_upgrade_tells_what_another_flashinfer_changes(here: Path) -> None:
    assert run("patch", FILE, *FI).code == 0
    patched = (here / FILE).read_bytes()
    told = run("upgrade", FILE, "--from", "fi", "--flashinfer", "fi7", "--spec", "variants.yaml")
    assert told.code in (0, 1)
    assert "MlagenDevicePlan" in told.text  # its state moves to the back-end object
    assert (here / FILE).read_bytes() == patched


def test_a_plugin_loads_the_file_that_patch_writes(here: Path) -> None:
    """All of it: the class has the method that SGLang calls inside of a capture."""
    registry = f'"""{GROUP}"""\n\ndef load_plugins(): ...\n'.encode()
    for name, data in ((BACKEND_FILE, ORIGINAL), (REGISTRY_FILE, registry)):
        place = here / "env/sglang" / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(data)
    miniatures.write(FLASHINFER, here / "env")
    made = run("plugin", "env", *FI, "--out", "out")
    assert made.code == 0, made.err
    assert run("patch", FILE, *FI).code == 0
    loaded = (here / "out" / PACKAGE / PATCHED_FILE).read_bytes()
    assert loaded == (here / FILE).read_bytes()
    assert RECORDS in loaded
    assert (here / "env/sglang" / BACKEND_FILE).read_bytes() == ORIGINAL
    assert run("plugin", "env", *FI, "--out", "out", "--check").code == 0
