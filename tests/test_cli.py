"""The commands, one after the other: what they answer, write, and exit with.

Most run in this process on a back end in miniature; what only a process of its own shows (two
streams, no torch) runs as `python -m mlagen`. Refusals are in test_cli_errors.py, files in odd
shapes in test_cli_files.py.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from mlagen.codegen import provenance
from mlagen.codegen import spec as spec_module
from mlagen.codegen.flashinfer import find
from mlagen.codegen.spec import shipped_spec
from tests.cli_workspace import (
    FILE,
    IN_CHECKOUT,
    IN_PACKAGE,
    ORIGINAL,
    Outcome,
    as_older,
    files_below,
    git,
    patched,
    patched_release,
    region,
    run,
    run_process,
    workspace,
)
from tests.flashinfer import miniatures
from tests.releases import flashinfer_source, sglang_file

FI = ("--flashinfer", "fi")
GENERATED = {
    "plans.py",
    "hooks.py",
    "MANIFEST.json",
    "tests/conftest.py",
    "tests/dcp_rank.py",
    "tests/support.py",
    *(f"tests/test_{name}.py" for name in ("decode", "draft_decode", "verify", "draft_extend")),
    "tests/test_dcp.py",
}
SITES = {
    "draft-step",
    "capture-decode",
    "capture-verify",
    "eager-draft",
    "eager-verify",
    "eager-extend",
    "replay-decode",
    "replay-verify",
    "decode-updater",
    "prefill-updater",
    "multi-step",
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that the commands run in, with the miniatures."""
    return workspace(tmp_path, monkeypatch)


def states(outcome: Outcome) -> dict[str, str]:
    """Site -> state, of a run with --json."""
    return {site["site"]: site["state"] for site in outcome.json["sites"]}


# --- help and schema --------------------------------------------------------------------------


def test_help_tells_the_commands_and_the_exit_codes() -> None:
    outcome = run("--help")

    assert outcome.code == 0
    for command in ("render", "patch", "unpatch", "check", "inspect", "test", "schema"):
        assert re.search(rf"^  {command} +\w", outcome.text, re.MULTILINE), command
    text = " ".join(outcome.text.split())
    for code in range(7):
        assert re.search(rf"[:;] {code} ", text), code


def test_what_click_refuses_exits_with_2() -> None:
    for arguments in (["patch"], ["patch", "x", "--nope"], ["mend"], ["check", "a", "b"]):
        outcome = run(*arguments)

        assert outcome.code == 2
        assert outcome.out == b""
        assert "Error: " in outcome.err


def test_schema_is_the_committed_file() -> None:
    outcome = run("schema")

    assert (outcome.code, outcome.err) == (0, "")
    committed = Path(spec_module.__file__).parent / spec_module.SCHEMA_NAME
    assert outcome.out == committed.read_bytes()


# --- render -------------------------------------------------------------------------------------


@pytest.fixture
def spec(here: Path) -> Path:
    shutil.copy(shipped_spec(), here / "variants.yaml")
    return here / "variants.yaml"


def test_render_writes_beside_the_spec_once(here: Path, spec: Path) -> None:
    before = files_below(here)
    first = run("render", spec, *FI)
    written = files_below(here)
    again = run("render", "variants.yaml", *FI)

    assert (first.code, again.code) == (0, 0)
    assert set(written) - set(before) == {f"generated/{name}" for name in GENERATED}
    assert "wrote plans.py, hooks.py, tests/" in first.text
    assert "nothing to do" in again.text
    assert files_below(here) == written


def test_render_into_another_folder(here: Path, spec: Path) -> None:
    before = files_below(here)
    run("render", "variants.yaml", *FI, "--out", "some/where")
    run("render", "variants.yaml", *FI)
    after = files_below(here)

    assert set(after) - set(before) == {
        f"{folder}/{name}" for folder in ("some/where", "generated") for name in GENERATED
    }
    for name in GENERATED:
        assert after[f"some/where/{name}"] == after[f"generated/{name}"]


def wheel(folder: Path) -> str:
    files = miniatures.wrapper_era(path="flashinfer/mla/_core.py")
    return str(miniatures.write_wheel(files, folder, "0.6.99"))


@pytest.mark.parametrize("kind", ["folder", "wheel", "version", "requirement"])
def test_render_for_each_kind_of_flashinfer(kind: str, here: Path, spec: Path) -> None:
    chosen = {"folder": "fi", "version": "0.6.17", "requirement": "flashinfer-python==0.6.17"}
    outcome = run("render", spec, "--flashinfer", chosen.get(kind) or wheel(here / "wheels"))
    manifest = json.loads((here / "generated" / "MANIFEST.json").read_bytes())

    assert outcome.code == 0
    version = {"folder": None, "wheel": "0.6.99"}.get(kind, "0.6.17")
    assert manifest["flashinfer"]["version"] == version
    required = f"flashinfer-python=={version}" if version else None
    assert manifest["flashinfer"]["requirement"] == required
    assert set(manifest["files"]) == GENERATED - {"MANIFEST.json"}


def test_render_without_flashinfer_takes_what_the_manifest_names(here: Path, spec: Path) -> None:
    run("render", spec, "--flashinfer", "0.6.17")
    written = files_below(here)
    outcome = run("render", spec)

    assert outcome.code == 0
    assert "flashinfer-python 0.6.17" in outcome.text
    assert files_below(here) == written


def test_render_check_of_what_is_current(here: Path, spec: Path) -> None:
    run("render", spec, "--flashinfer", "0.6.17")
    outcome = run("render", spec, "--check")

    assert (outcome.code, outcome.err) == (0, "")
    assert "not current" not in outcome.text


@pytest.mark.parametrize("change", ["edited", "gone", "spec"])
def test_render_check_of_what_is_stale(change: str, here: Path, spec: Path) -> None:
    run("render", spec, *FI)
    plans = here / "generated" / "plans.py"
    if change == "edited":
        plans.write_text(plans.read_text() + "x = 1\n")
    elif change == "gone":
        plans.unlink()
    else:
        spec.write_text(spec.read_text().replace("One new token a request.", "One token more."))
    before = files_below(here)
    outcome = run("render", "variants.yaml", "--check", *FI)

    assert outcome.code == 1
    told = outcome.text + outcome.err
    what = "missing" if change == "gone" else "not current"
    assert f"note: plans.py is {what}: run `mlagen render`" in told
    assert ("hooks.py is not current" in told) == (change == "spec")
    assert files_below(here) == before
    if change == "gone":
        run("render", spec, *FI)
    else:
        assert outcome.out.startswith(b"diff --git a/generated/plans.py b/generated/plans.py\n")
        git("apply", "-", cwd=here, stdin=outcome.out)
    assert run("render", spec, "--check", *FI).code == 0


def test_render_check_for_another_flashinfer(here: Path, spec: Path) -> None:
    run("render", spec, *FI)
    before = files_below(here)

    assert run("render", spec, "--check", "--flashinfer", "fi7").code == 1
    assert files_below(here) == before


@pytest.mark.parametrize("broken", ["{", '{"format": 99}'])
def test_render_writes_a_broken_manifest_anew(broken: str, here: Path, spec: Path) -> None:
    run("render", spec, *FI)
    (here / "generated" / "MANIFEST.json").write_text(broken)
    outcome = run("render", spec, *FI)

    assert outcome.code == 0
    assert run("render", spec, "--check", *FI).code == 0


def test_render_needs_no_manifest_where_flashinfer_is_installed(
    here: Path, spec: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("render", spec, *FI)
    monkeypatch.setattr(find, "_installed", lambda: find.find_flashinfer("fi"))
    (here / "generated" / "MANIFEST.json").write_text("{")

    assert run("render", spec).code == 0
    assert run("render", spec, "--check", *FI).code == 0


def test_what_the_hint_of_a_broken_manifest_says_works(here: Path, spec: Path) -> None:
    run("render", spec, *FI)
    (here / "generated" / "MANIFEST.json").write_text("{")
    refused = run("render", spec)
    assert refused.code == 5
    assert "give --flashinfer, for which `mlagen render` writes it anew, or delete" in refused.err
    (here / "generated" / "MANIFEST.json").unlink()
    assert run("render", spec, *FI).code == 0


def test_a_broken_manifest_is_nothing_to_a_patch_that_was_given_flashinfer(
    here: Path, spec: Path
) -> None:
    (here / "generated").mkdir()
    (here / "generated" / "MANIFEST.json").write_text("{")

    assert run("patch", FILE, *FI).code == 0


# --- patch and unpatch ------------------------------------------------------------------------


def test_patch_and_back(here: Path) -> None:
    before = files_below(here)
    outcome = run("patch", FILE, *FI)

    assert (outcome.code, outcome.err) == (0, "")
    assert files_below(here) == before | {FILE: patched()}
    assert f"note: patched {FILE}; `mlagen unpatch` takes it out again" in outcome.text
    for site in SITES:
        assert re.search(rf"^.* {site} +\d+  (installed|replaced upstream)", outcome.text, re.M)
    back = run("unpatch", FILE)
    assert (back.code, back.err) == (0, "")
    assert files_below(here) == before


def test_patch_twice_and_unpatch_twice(here: Path) -> None:
    run("patch", FILE, *FI)
    status = (here / FILE).stat()
    again = run("patch", FILE, *FI)

    assert again.code == 0
    assert "note: nothing to do: the file is patched and current" in again.text
    assert (here / FILE).stat() == status
    assert run("patch", FILE, *FI, "--check").code == 0
    same = run("patch", FILE, *FI, "--diff")
    assert same.code == 0
    assert b"diff --git" not in same.out
    run("unpatch", FILE)
    status = (here / FILE).stat()
    nothing = run("unpatch", FILE)
    assert nothing.code == 0
    assert "note: nothing to do: the file has no regions of mlagen" in nothing.text
    assert run("unpatch", FILE, "--diff").code == 0
    assert (here / FILE).stat() == status


def test_diff_and_check_write_nothing(here: Path) -> None:
    before = files_below(here)
    diff, again = run("patch", FILE, *FI, "--diff"), run("patch", FILE, *FI, "--diff")
    check, both = run("patch", FILE, *FI, "--check"), run("patch", FILE, *FI, "--check", "--diff")

    assert {run.code for run in (diff, again, check, both)} == {1}
    assert diff == again == both
    assert diff.out.startswith(f"diff --git a/{FILE} b/{FILE}\n".encode())
    assert "note: would change; nothing was written" in diff.err
    assert b"diff --git" not in check.out
    assert check.err == ""
    # The sites are told as they are, not as they would be.
    assert {state for site, state in states(run("patch", FILE, *FI, "--diff", "--json")).items()
            if site in SITES} == {"absent"}  # fmt: skip
    assert files_below(here) == before


def test_the_json_report_says_what_the_text_says(here: Path) -> None:
    as_text = run("patch", FILE, *FI, "--diff")
    as_json = run("patch", FILE, *FI, "--diff", "--json")

    assert as_json.code == as_text.code == as_json.json["exit_code"] == 1
    assert as_json.err == ""
    assert (as_json.json["command"], as_json.json["diff_encoding"]) == ("patch", "utf-8")
    assert as_json.json["diff"].encode() == as_text.out
    words = " ".join(as_text.err.split())
    for fact in as_json.json["facts"]:
        assert f"{fact['name']} {fact['value']}" in words
    assert {site["site"] for site in as_json.json["sites"]} > SITES
    for site in as_json.json["sites"]:
        line = site["line"] or "-"
        cells = (site["variant"], site["site"], line, site["state"], site["reason"])
        assert " ".join(str(cell) for cell in cells).strip() in words
    for note in as_json.json["notes"]:
        assert f"note: {note}" in words


def test_a_refusal_as_json(here: Path) -> None:
    (here / FILE).write_bytes(ORIGINAL.replace(b"init_metadata_replay=True", b"replay=True"))
    outcome = run("patch", FILE, *FI, "--json")

    assert outcome.code == outcome.json["exit_code"] == 4
    assert outcome.err == ""
    assert [problem["code"] for problem in outcome.json["problems"]] == [
        "anchor-missing",
        "spec-used",
    ]


@pytest.mark.parametrize(
    ("only", "expected"),
    [
        ("verify", {"capture-verify", "eager-verify", "replay-verify", "prefill-updater"}),
        ("draft-extend", {"eager-extend", "prefill-updater"}),
        (
            "decode",
            {"draft-step", "capture-decode", "replay-decode", "decode-updater", "multi-step"},
        ),
    ],
)
def test_only_one_variant(only: str, expected: set[str], here: Path) -> None:
    outcome = run("patch", FILE, *FI, "--only", only, "--json")
    data = (here / FILE).read_bytes()

    assert outcome.code == 0
    assert {site for site, state in states(outcome).items() if site in SITES} == expected
    header = provenance.read_header(data)
    assert header is not None
    assert header.variants == (only,)
    for name in ("decode", "verify", "draft_extend"):
        planned = f"def mlagen_plan_{name}".encode() in data
        assert planned == (name == only.replace("-", "_")), name
    # check and inspect look for what the file was patched with.
    checked = run("check", FILE, *FI, "--json")
    assert not [p for p in checked.json["problems"] if p["code"].startswith("site-")]
    inspected = states(run("inspect", FILE, *FI, "--json"))
    assert {site for site in inspected if site in SITES} == expected
    run("patch", FILE, *FI)
    assert (here / FILE).read_bytes() == patched()
    run("patch", FILE, *FI, "--only", only)
    assert (here / FILE).read_bytes() == data
    run("unpatch", FILE)
    assert (here / FILE).read_bytes() == ORIGINAL


def test_variants_without_a_place_are_refused_not_skipped(here: Path) -> None:
    """A patch that would do nothing says so with an exit code, also on a patched file."""
    spec = shipped_spec().read_text().split("  dcp:")[0]
    spec += """  lonely:
    serves: target-verify
    when: [replay]
    context_parallel: true
    tokens: draft_token_num
    kv_len: seq_lens + draft_token_num + dcp_size - dcp_size
    causal: true
    refresh: []
    guards: [fa-back-end]
"""
    (here / "lonely.yaml").write_text(spec)
    for before in (ORIGINAL, patched()):
        (here / FILE).write_bytes(before)
        outcome = run("patch", FILE, *FI, "--spec", "lonely.yaml", "--only", "lonely")
        assert outcome.code == 2
        assert "no-place: none of the chosen variants has a place in this file" in outcome.err
        assert (here / FILE).read_bytes() == before
        outcome = run(
            "patch", FILE, *FI, "--spec", "lonely.yaml", "--only", "lonely", "--out", "there"
        )
        assert outcome.code == 2
        assert not (here / "there").exists()


def test_sites_that_are_stale_for_one_reason_are_one_problem(here: Path) -> None:
    run("patch", FILE, *FI)
    outcome = run("check", FILE, "--flashinfer", "fi7", "--json")
    assert outcome.code  # SGLang's own plan function no longer fits either: 4
    stale = [p for p in outcome.json["problems"] if p["code"] == "site-stale"]
    assert len(stale) == 1
    assert "sites are stale" in stale[0]["message"]


def test_the_nearest_spec_is_taken(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = shipped_spec().read_text()
    (here / "variants.yaml").write_text(text.replace("One new token a request.", "Found upwards."))
    (here / "other.yaml").write_text(text.replace("One new token a request.", "Given."))
    (here / "below").mkdir()
    monkeypatch.chdir(here / "below")
    run("patch", f"../{FILE}", "--flashinfer", "../fi")
    found = (here / FILE).read_text()
    run("patch", f"../{FILE}", "--flashinfer", "../fi", "--spec", "../other.yaml")
    given = (here / FILE).read_text()

    assert ("Found upwards." in found, "Given." in found) == (True, False)
    assert ("Found upwards." in given, "Given." in given) == (False, True)


def test_a_renamed_attribute_is_followed_or_refused(here: Path) -> None:
    """The plan calls of the updaters tell where the number of heads is."""
    (here / FILE).write_bytes(ORIGINAL.replace(b"num_local_heads", b"heads"))
    outcome = run("patch", FILE, *FI)

    assert outcome.code in (0, 4)
    assert b"num_local_heads" not in (here / FILE).read_bytes()


def test_out_leaves_the_file_alone(here: Path) -> None:
    before = files_below(here)
    outcome = run("patch", FILE, *FI, "--out", "made/here")

    assert outcome.code == 0
    assert f"note: wrote made/here/{FILE}" in outcome.text
    assert files_below(here) == before | {f"made/here/{FILE}": patched()}


def test_out_replaces_what_mlagen_wrote(here: Path) -> None:
    """For another FlashInfer, over another SGLang, and what is the same already."""
    older = ORIGINAL.replace(b"A back end", b"An older back end")
    (here / "made").mkdir()
    for data in (patched(), patched(older)):
        (here / "made" / FILE).write_bytes(data)
        assert run("patch", FILE, *FI, "--out", "made").code == 0
        assert (here / "made" / FILE).read_bytes() == patched()
    assert run("patch", FILE, "--flashinfer", "fi7", "--out", "made").code == 0
    assert (here / "made" / FILE).read_bytes() != patched()


def test_out_is_looked_at_before_tests_run(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU they take minutes."""

    def prove(*arguments: object) -> None:
        raise AssertionError("tests were run")

    monkeypatch.setattr("mlagen.codegen.prove.before_publishing", prove)
    (here / "made").mkdir()
    (here / "made" / FILE).write_bytes(ORIGINAL)

    assert run("patch", FILE, *FI, "--out", "made").code == 2


def test_render_replaces_what_it_wrote(here: Path, spec: Path) -> None:
    """Of another FlashInfer, edited, or with a merge conflict before the mark."""
    run("render", spec, *FI)
    current = files_below(here)
    run("render", spec, "--flashinfer", "fi7")
    plans, manifest = here / "generated" / "plans.py", here / "generated" / "MANIFEST.json"
    plans.write_bytes(b"<<<<<<< ours\n" + plans.read_bytes() + b"x = 1\n")
    manifest.write_bytes(b"<<<<<<< ours\n" + manifest.read_bytes())

    assert run("render", spec, *FI).code == 0
    assert files_below(here) == current


def test_out_must_name_a_folder(here: Path) -> None:
    """`--out "$UNSET"` would write over the file that one happens to stand beside."""
    before = files_below(here)
    outcome = run("patch", FILE, *FI, "--out", "")

    assert files_below(here) == before
    assert outcome.code == 2


def test_check_does_not_write_with_out_either(here: Path) -> None:
    before = files_below(here)
    outcome = run("patch", FILE, *FI, "--check", "--out", "made")

    assert outcome.code in (1, 2)
    assert files_below(here) == before


# --- PATH in each of its shapes -----------------------------------------------------------------


def checkout(folder: Path, data: bytes = ORIGINAL) -> Path:
    """A git repository with SGLang's layout; gives the file's place."""
    place = folder / IN_CHECKOUT
    place.parent.mkdir(parents=True)
    place.write_bytes(data)
    git("init", "--quiet", cwd=folder)
    git("add", "--all", cwd=folder)
    return place


@pytest.mark.parametrize("below", ["", "python", "python/sglang", str(Path(IN_CHECKOUT).parent)])
def test_a_checkout(below: str, here: Path) -> None:
    place = checkout(here / "repo")
    diff = run("patch", here / "repo" / below, *FI, "--diff")

    assert diff.code == 1
    assert diff.out.startswith(f"diff --git a/{IN_CHECKOUT} b/{IN_CHECKOUT}\n".encode())
    assert run("patch", here / "repo" / below, *FI).code == 0
    assert place.read_bytes() == patched()


def test_git_applies_the_diff_and_takes_it_back(here: Path) -> None:
    repo = here / "repo"
    place = checkout(repo)
    diff = run("patch", "repo", *FI, "--diff").out
    # From a folder below as well: names count from the root.
    git("apply", "--check", "-", cwd=repo / "python", stdin=diff)
    git("apply", "-", cwd=repo, stdin=diff)

    assert place.read_bytes() == patched()
    assert run("patch", "repo", *FI, "--check").code == 0
    back = run("unpatch", "repo", "--diff")
    assert back.code == 1
    assert place.read_bytes() == patched()
    git("apply", "-", cwd=repo, stdin=back.out)
    assert place.read_bytes() == ORIGINAL
    git("apply", "-", cwd=repo, stdin=diff)
    git("apply", "-R", "-", cwd=repo, stdin=diff)
    assert place.read_bytes() == ORIGINAL
    assert git("status", "--porcelain", cwd=repo).split() == ["A", IN_CHECKOUT]


def test_git_applies_the_diff_of_a_release(here: Path) -> None:
    place = checkout(here / "repo", sglang_file("0.5.17"))
    diff = run("patch", "repo", "--flashinfer", "0.6.17", "--diff").out
    git("apply", "-", cwd=here / "repo", stdin=diff)

    assert place.read_bytes() == patched_release(sglang_file("0.5.17"), "0.6.17")
    run("unpatch", "repo")
    assert place.read_bytes() == sglang_file("0.5.17")


def test_diff_of_a_link(here: Path) -> None:
    """git does not follow links: the diff has to name the file that `patch` writes."""
    place = checkout(here / "repo")
    (here / "repo" / "link.py").symlink_to(IN_CHECKOUT)
    diff = run("patch", "repo/link.py", *FI, "--diff").out
    git("apply", "-", cwd=here / "repo", stdin=diff)

    assert place.read_bytes() == patched()
    assert (here / "repo" / "link.py").is_symlink()


def installed(folder: Path) -> Path:
    """A site-packages with sglang, which cannot be imported, and a FlashInfer beside it."""
    site = folder / "env/lib/python3/site-packages"
    (site / IN_PACKAGE).parent.mkdir(parents=True)
    (site / IN_PACKAGE).write_bytes(ORIGINAL)
    for name in ("sglang", "flashinfer"):
        (site / name).mkdir(exist_ok=True)
    miniatures.write(miniatures.wrapper_era(path="flashinfer/mla/_core.py"), site)
    for name in ("sglang", "flashinfer"):
        (site / name / "__init__.py").write_text(f"raise SystemExit('{name} was imported')\n")
    info = site / "flashinfer_python-0.6.99.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: flashinfer-python\nVersion: 0.6.99\n\n"
    )
    return site


@pytest.mark.parametrize("below", ["", "sglang", IN_PACKAGE])
def test_an_installed_sglang_with_the_flashinfer_beside_it(below: str, here: Path) -> None:
    site = installed(here)
    before = files_below(site)
    diff = run("patch", site / below, "--diff")

    assert diff.code == 1
    assert "flashinfer-python 0.6.99" in diff.err
    assert diff.out.startswith(f"diff --git a/{IN_PACKAGE} b/{IN_PACKAGE}\n".encode())
    assert run("patch", site / below).code == 0
    after = files_below(site)
    assert {name for name in after if after[name] != before.get(name)} == {IN_PACKAGE}
    header = provenance.read_header(after[IN_PACKAGE])
    assert header is not None
    assert header.flashinfer == "0.6.99"
    assert run("check", site / below).code == 0
    assert run("unpatch", site / below).code == 0
    assert files_below(site) == before


def test_the_word_sglang(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = installed(here)
    monkeypatch.syspath_prepend(str(site))

    assert run("patch", "sglang").code == 0
    assert b"# >>> mlagen header" in (site / IN_PACKAGE).read_bytes()
    assert run("check", "sglang").code == 0
    assert "flashinfer-python 0.6.99" in run("inspect").text + run("inspect", "sglang").text
    assert run("unpatch", "sglang").code == 0
    assert (site / IN_PACKAGE).read_bytes() == ORIGINAL


@pytest.fixture
def releases(here: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache that holds sglang 9.9, which pins FlashInfer 8.8, and that FlashInfer."""
    cache = here / "cache"
    place = cache / "wheels" / "sglang" / "9.9"
    place.mkdir(parents=True)
    with zipfile.ZipFile(place / "sglang-9.9-py3-none-any.whl", "w") as file:
        file.writestr(IN_PACKAGE, ORIGINAL)
        lines = ["Metadata-Version: 2.1", "Name: sglang", "Version: 9.9"]
        lines += ["Requires-Dist: torch==2.9", "Requires-Dist: flashinfer_python[cu13]==8.8", ""]
        file.writestr("sglang-9.9.dist-info/METADATA", "\n".join(lines))
    files = miniatures.wrapper_era(path="flashinfer/mla/_core.py")
    miniatures.write_wheel(files, cache / "wheels" / "flashinfer-python" / "8.8", "8.8")
    monkeypatch.setenv("MLAGEN_CACHE", str(cache))
    return cache


def test_a_requirement_needs_to_be_told_where_to(releases: Path, here: Path) -> None:
    before = files_below(here)
    outcome = run("patch", "sglang==9.9")

    assert (outcome.code, outcome.out) == (2, b"")
    assert outcome.err.startswith("sglang==9.9: nothing-to-write: ")
    assert "--diff" in outcome.err
    assert "--out" in outcome.err
    assert files_below(here) == before


def test_a_requirement(releases: Path, here: Path) -> None:
    before = files_below(here)
    diff = run("patch", "sglang==9.9", "--diff")
    assert files_below(here) == before
    out = run("patch", "sglang==9.9", "--out", "made")
    made = (here / "made" / FILE).read_bytes()

    assert (diff.code, out.code) == (1, 0)
    assert "flashinfer-python 8.8" in diff.err
    assert diff.out.startswith(f"diff --git a/{IN_PACKAGE} b/{IN_PACKAGE}\n".encode())
    header = provenance.read_header(made)
    assert header is not None
    assert header.flashinfer == "8.8"
    assert set(files_below(here)) == {*before, f"made/{FILE}"}
    (here / "sglang/srt/layers/attention").mkdir(parents=True)
    (here / IN_PACKAGE).write_bytes(ORIGINAL)
    git("apply", "-", cwd=here, stdin=diff.out)
    assert (here / IN_PACKAGE).read_bytes() == made


def test_a_requirement_with_the_flashinfer_given(releases: Path, here: Path) -> None:
    outcome = run("patch", "sglang==9.9", *FI, "--out", "made", "--diff")

    assert outcome.code == 0
    assert outcome.out.startswith(b"diff --git ")
    assert (here / "made" / FILE).read_bytes() == patched()


@pytest.mark.parametrize("down", [True, False])
def test_a_pinned_flashinfer_that_cannot_be_had(
    releases: Path, here: Path, monkeypatch: pytest.MonkeyPatch, down: bool
) -> None:
    """Where no index answers, another version would not help."""
    shutil.rmtree(releases / "wheels" / "flashinfer-python")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("PIP_RETRIES", "0")
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_NO_INDEX"):
        monkeypatch.delenv(name, raising=False)
    if not down:
        monkeypatch.setenv("PIP_NO_INDEX", "1")
    outcome = run("patch", "sglang==9.9", "--diff")

    assert outcome.code == 2
    assert ("the index could not be reached: 127.0.0.1:9: " in outcome.err) == down
    assert ("hint: mend the network" in outcome.err) == down
    assert ("hint: give --flashinfer: a version that has a wheel" in outcome.err) != down


def test_a_requirement_can_be_checked_and_inspected(releases: Path) -> None:
    assert run("patch", "sglang==9.9", "--check").code == 1
    assert run("check", "sglang==9.9").code == 1
    assert run("inspect", "sglang==9.9").code == 0
    assert run("unpatch", "sglang==9.9").code == 0


def test_a_wheel_is_as_good_as_a_requirement(releases: Path, here: Path) -> None:
    """All that reads a release takes its wheel, and names the same FlashInfer."""
    (wheel,) = (releases / "wheels" / "sglang" / "9.9").glob("*.whl")
    shutil.copy(wheel, here)
    before = files_below(here)
    commands = [
        ("patch", "--check"),
        ("patch", "--diff"),
        ("check",),
        ("inspect",),
        ("unpatch",),
        ("upgrade", "--flashinfer", "fi7"),
    ]
    for command, *more in commands:
        by_wheel, by_name = run(command, wheel.name, *more), run(command, "sglang==9.9", *more)
        assert by_wheel == by_name, command
        assert by_wheel.code in (0, 1), command
    assert files_below(here) == before
    assert run("patch", wheel.name, "--out", "made").code == 0
    assert run("patch", "sglang==9.9", "--out", "again").code == 0
    made = (here / "made" / FILE).read_bytes()
    assert made == (here / "again" / FILE).read_bytes()
    assert run("upgrade", f"made/{FILE}", "--sglang", wheel.name).code == 0


@pytest.mark.parametrize("command", ["patch", "unpatch"])
def test_a_wheel_is_not_written_to(releases: Path, here: Path, command: str) -> None:
    (wheel,) = (releases / "wheels" / "sglang" / "9.9").glob("*.whl")
    with zipfile.ZipFile(here / wheel.name, "w") as file:
        file.writestr(IN_PACKAGE, patched() if command == "unpatch" else ORIGINAL)
    before = files_below(here)
    outcome = run(command, wheel.name, *(FI if command == "patch" else ()))

    assert (outcome.code, outcome.out) == (2, b"")
    assert outcome.err.startswith(f"{wheel.name}: nothing-to-write: ")
    assert files_below(here) == before


# --- check --------------------------------------------------------------------------------------


def test_check_of_a_patched_file(here: Path) -> None:
    run("patch", FILE, *FI)
    outcome = run("check", FILE, *FI, "--json")

    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.json["problems"] == []
    assert {state for site, state in states(outcome).items() if site in SITES} == {
        "installed",
        "replaced upstream",
    }


def test_check_after_flashinfer_was_changed(here: Path) -> None:
    """The same release, another planner: found by its text, not by its version."""
    (here / FILE).write_bytes(sglang_file("0.5.17"))
    run("patch", FILE, "--flashinfer", "0.6.17")
    before = files_below(here)
    current = run("check", FILE, "--flashinfer", "0.6.17")
    stale = run("check", FILE, "--flashinfer", "0.7.2")

    assert (current.code, stale.code) == (0, 1)
    assert ": site-stale: " in stale.text
    assert "FlashInfer was 0.6.17, is 0.7.2" in stale.text
    assert files_below(here) == before
    assert run("patch", FILE, "--flashinfer", "0.7.2").code == 0
    assert run("check", FILE, "--flashinfer", "0.7.2").code == 0
    run("unpatch", FILE)
    assert (here / FILE).read_bytes() == sglang_file("0.5.17")


def test_check_of_a_site_that_was_lost(here: Path) -> None:
    (here / FILE).write_bytes(patched().replace(region("multi-step", patched()), b""))
    outcome = run("check", FILE, *FI, "--json")

    assert outcome.code == 1
    assert states(outcome)["multi-step"] == "absent"
    assert [problem["code"] for problem in outcome.json["problems"]] == ["site-absent"]
    assert run("patch", FILE, *FI).code == 0
    assert (here / FILE).read_bytes() == patched()


@pytest.mark.parametrize("changed", ["header", "function", "site"])
def test_a_file_of_an_older_mlagen(changed: str, here: Path) -> None:
    """Its checksums are right: no one edited it, and it is brought up to date or taken out."""
    header = provenance.read_header(patched())
    assert header is not None
    old = as_older(patched(), f"# mlagen: {header.mlagen}", "# mlagen: 0.0.1", "header")
    if changed == "function":
        old = as_older(old, "class MlagenShape", "class  MlagenShape", "plans")
    elif changed == "site":
        old = as_older(old, "Optional[int] = None", "Optional[int] = -1", "draft-step")
    (here / FILE).write_bytes(old)
    check = run("check", FILE, *FI)

    assert check.code == 1
    assert ": site-stale: " in check.text
    assert f"mlagen was 0.0.1, is {header.mlagen}" in " ".join(check.text.split())
    inspect = run("inspect", FILE, *FI)
    assert inspect.code == 0
    assert "mlagen 0.0.1" in inspect.text
    assert run("patch", FILE, *FI, "--check").code == 1
    assert (here / FILE).read_bytes() == old
    assert run("patch", FILE, *FI).code == 0
    assert (here / FILE).read_bytes() == patched()
    (here / FILE).write_bytes(old)
    assert run("unpatch", FILE).code == 0
    assert (here / FILE).read_bytes() == ORIGINAL


def test_check_of_a_hand_edited_file(here: Path) -> None:
    (here / FILE).write_bytes(patched().replace(b"Optional[int] = None", b"Optional[int] = 1"))

    assert run("check", FILE, *FI).code == 5


def test_inspect_of_a_hand_edited_file_shows_where(here: Path) -> None:
    (here / FILE).write_bytes(patched().replace(b"Optional[int] = None", b"Optional[int] = 1"))
    outcome = run("inspect", FILE, *FI, "--json")

    assert states(outcome)["draft-step"] == "edited"
    assert [problem["code"] for problem in outcome.json["problems"]] == ["edited-region"]


@pytest.mark.parametrize(
    ("sglang", "flashinfer", "expected"),
    [
        ("0.5.17", "0.6.17", {"d1-pinned-race", "d2-draft-lengths", "d10-assert"}),
        ("0.5.18", "0.7.2", {"d2-draft-lengths", "d3-verify-twice", "d10-assert"}),
    ],
)
def test_check_of_upstreams_own_plans(
    sglang: str, flashinfer: str, expected: set[str], here: Path
) -> None:
    (here / FILE).write_bytes(sglang_file(sglang))
    outcome = run("check", FILE, "--flashinfer", flashinfer)

    assert outcome.code == 1
    found = re.findall(rf"^{FILE}:\d+: ([\w-]+): (?!note: )", outcome.text, re.MULTILINE)
    assert expected <= set(found)
    assert not any(code.startswith("plan-") for code in found)
    assert re.search(r"^    hint: .*`mlagen patch`", outcome.text, re.MULTILINE)
    assert (here / FILE).read_bytes() == sglang_file(sglang)


def test_check_of_a_plan_that_does_not_fit(here: Path) -> None:
    """The miniature passes nine arguments; this FlashInfer wants a stream behind them."""
    miniatures.write(miniatures.wrapper_era(miniatures.STREAM_PLANNING), here / "stream")
    outcome = run("check", FILE, "--flashinfer", "stream")

    assert outcome.code == 4
    assert re.search(rf"^{FILE}:\d+: plan-[a-z]+: ", outcome.text, re.MULTILINE)


def test_check_never_writes(here: Path) -> None:
    for data in (ORIGINAL, patched()):
        (here / FILE).write_bytes(data)
        before = files_below(here)
        for flashinfer in ("fi", "fi7"):
            run("check", FILE, "--flashinfer", flashinfer)
            run("inspect", FILE, "--flashinfer", flashinfer)
        assert files_below(here) == before


# --- inspect ------------------------------------------------------------------------------------


def test_inspect_of_flashinfer_alone() -> None:
    flashinfer_source("0.6.17")  # a fetch is told, and nothing else is to be
    outcome = run("inspect", "--flashinfer", "0.6.17")

    assert (outcome.code, outcome.err) == (0, "")
    assert "0.6.17" in outcome.text
    words = " ".join(outcome.text.split())
    assert re.search(r"private call +plan\(.*qo_indptr=.*\) -> plan_info", words)


def test_inspect_of_a_file(here: Path) -> None:
    before = run("inspect", FILE, *FI, "--json")
    run("patch", FILE, *FI)
    after = run("inspect", FILE, *FI, "--json")

    assert (before.code, after.code) == (0, 0)
    assert {state for site, state in states(before).items() if site in SITES} == {"absent"}
    assert {state for site, state in states(after).items() if site in SITES} == {
        "installed",
        "replaced upstream",
    }
    names = {fact["name"] for fact in before.json["facts"]}
    assert {"file", "FlashInfer", "private call", "SGLang's shape", "wait"} <= names
    assert "patched by" not in names
    assert "patched by" in {fact["name"] for fact in after.json["facts"]}
    waits = [fact["value"] for fact in before.json["facts"] if fact["name"] == "wait"]
    assert any("seq_lens.cpu()" in wait for wait in waits)


def test_inspect_tells_why_a_file_cannot_be_patched(here: Path) -> None:
    (here / FILE).write_bytes(ORIGINAL.replace(b"init_metadata_replay=True", b"replay=True"))
    outcome = run("inspect", FILE, *FI)

    assert outcome.code == 0
    assert ": anchor-missing: looked for call of indices_updater_decode.update" in outcome.text


@pytest.mark.parametrize("command", ["inspect", "check", "patch"])
def test_a_file_that_does_not_parse_is_named_as_it_was_given(here: Path, command: str) -> None:
    (here / "fork.py").write_bytes(b"class FlashInferMLAAttnBackend:\n    def broken(:\n")
    outcome = run(command, "fork.py", *FI)

    assert outcome.code == 4
    assert outcome.err.startswith("fork.py:2:")


# --- a process of its own -------------------------------------------------------------------------


@pytest.fixture
def without_torch(here: Path) -> dict[str, str]:
    """Variables under which importing torch, flashinfer, sglang or triton ends the process."""
    for name in ("torch", "flashinfer", "sglang", "triton"):
        place = here / "blocked" / name / "__init__.py"
        place.parent.mkdir(parents=True)
        place.write_text(f"import os\nos.write(2, b'{name} was imported')\nos._exit(99)\n")
    return {"PYTHONPATH": str(here / "blocked"), "CUDA_VISIBLE_DEVICES": ""}


def test_no_command_imports_torch(here: Path, spec: Path, without_torch: dict[str, str]) -> None:
    # The hook does what it says.
    blocked = run_process("--version", cwd=here, variables=without_torch)
    assert blocked.code == 0
    for arguments, code in (
        (["schema"], 0),
        (["render", "variants.yaml", *FI], 0),
        (["inspect", FILE, *FI], 0),
        (["patch", FILE, *FI], 0),
        (["check", FILE, *FI], 0),
    ):
        outcome = run_process(*arguments, cwd=here, variables=without_torch)
        assert (outcome.code, outcome.err) == (code, ""), arguments
        assert outcome.out != b""
    assert (here / FILE).read_bytes() == patched()


def test_the_import_hook_works(here: Path, without_torch: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import torch"],
        env={**os.environ, **without_torch},
        capture_output=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (99, b"torch was imported")


def test_the_diff_alone_is_on_stdout(here: Path) -> None:
    outcome = run_process("patch", FILE, *FI, "--diff", cwd=here)

    assert outcome.code == 1
    assert outcome.out.startswith(b"diff --git ")
    assert outcome.out == run("patch", FILE, *FI, "--diff").out
    assert "draft-step" in outcome.err
    assert "diff --git" not in outcome.err
    repo = here / "repo"
    repo.mkdir()
    shutil.copy(here / FILE, repo)
    git("apply", "-", cwd=repo, stdin=outcome.out)
    assert (repo / FILE).read_bytes() == patched()


def test_a_refusal_is_on_stderr(here: Path) -> None:
    outcome = run_process("unpatch", "nowhere", cwd=here)

    assert (outcome.code, outcome.out) == (2, b"")
    assert outcome.err.startswith("nowhere: sglang-not-found: ")


def test_a_reader_that_goes_away_is_no_traceback(here: Path) -> None:
    """`mlagen patch ... --diff | head -1`."""
    command = f"{sys.executable} -m mlagen patch {FILE} --flashinfer fi --diff | head -c 1"
    done = subprocess.run(
        ["bash", "-c", command], cwd=here, capture_output=True, check=False, text=True
    )
    assert done.stdout == "d"
    assert "Traceback" not in done.stderr
