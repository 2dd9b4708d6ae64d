"""`mlagen upgrade`: what it tells of another FlashInfer or SGLang, and that it writes nothing; that
a file comes back when FlashInfer does; and what an older mlagen left in a file."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from mlagen.codegen import provenance
from mlagen.codegen.patch import prepare
from mlagen.codegen.sglang.find import FoundTarget
from tests.cli_workspace import (
    FILE,
    ORIGINAL,
    Outcome,
    disguised,
    files_below,
    git,
    patched,
    run,
    workspace,
)
from tests.flashinfer import miniatures
from tests.flashinfer.miniatures import NINE, call, with_header, wrapper_era
from tests.releases import SGLANG_FILE, patch_of, plan_api, sglang_file, shipped

FROM = ("--from", "fi")
TO = ("--flashinfer", "fi7")
#: A file as an older mlagen left it, before plans went below FlashInfer's proxy; its plan functions
#: are shortened. The digest is that of the file without the regions.
OLDER = (Path(__file__).parent / "older" / "decode.txt").read_bytes()
OLDER_ORIGINAL = "a28a681e6c85e36806677e325c1017744e64d045b85bf9b9f675eb0342a97e25"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that the commands run in, with the miniatures, the back end patched for fi/."""
    folder = workspace(tmp_path, monkeypatch)
    (folder / FILE).write_bytes(patched())
    return folder


def kinds(outcome: Outcome) -> set[str]:
    return {item["kind"] for item in outcome.json["differences"]}


def about(outcome: Outcome, kind: str) -> list[dict[str, Any]]:
    return [item for item in outcome.json["differences"] if item["kind"] == kind]


def test_another_flashinfer_is_told_and_nothing_written(here: Path) -> None:
    before = files_below(here)
    done = run("upgrade", FILE, *FROM, *TO, "--json")
    assert done.code == 1
    assert files_below(here) == before
    assert {"era", "private call", "state", "copies to the device", "function"} <= kinds(done)
    states = {site["site"]: site["state"] for site in done.json["sites"]}
    assert states["replay-verify"] == "stale"
    functions = {item["subject"] for item in about(done, "function")}
    assert "_mlagen_call_planner" in functions
    assert "MlagenRequest" not in functions


def test_as_text(here: Path) -> None:
    done = run("upgrade", FILE, *FROM, *TO)
    assert done.code == 1
    text = " ".join(done.text.split())
    assert "FlashInfer now flashinfer-python (version unknown) (given) FlashInfer then" in text
    assert "private call method: plan -> plan_with_staged_workspace_bytes (flashinfer/mla/" in text
    assert "note: would change; nothing was written: `mlagen patch` after the upgrade does" in text
    assert "_mlagen_call_planner" in done.text
    assert "stale" in done.text


def test_the_diff_is_that_of_the_patch_to_come(here: Path) -> None:
    done = run("upgrade", FILE, *FROM, *TO, "--diff")
    assert done.code == 1
    git("init", "-q", cwd=here)
    git("apply", "-", cwd=here, stdin=done.out)
    upgraded = (here / FILE).read_bytes()
    (here / FILE).write_bytes(ORIGINAL)
    assert run("patch", FILE, *TO, "--no-test").code == 0
    assert (here / FILE).read_bytes() == upgraded


def test_nothing_would_change(here: Path) -> None:
    done = run("upgrade", FILE, *FROM, "--flashinfer", "fi", "--json")
    assert (done.code, done.json["differences"]) == (0, [])
    assert done.json["notes"] == ["nothing would change"]
    assert not run("upgrade", FILE, *FROM, "--flashinfer", "fi", "--diff").text.startswith("diff")


def test_a_comment_in_flashinfer_is_a_change_of_the_source_alone(here: Path) -> None:
    miniatures.write({**wrapper_era(), "flashinfer/mla.py": COMMENTED}, here / "again")
    done = run("upgrade", FILE, *FROM, "--flashinfer", "again", "--json")
    assert done.code == 1
    assert kinds(done) == {"source"}


COMMENTED = wrapper_era()["flashinfer/mla.py"] + "# One more line.\n"


def test_a_file_that_is_not_patched(here: Path) -> None:
    (here / FILE).write_bytes(ORIGINAL)
    done = run("upgrade", FILE, *FROM, *TO, "--json")
    assert done.code == 1
    assert done.json["notes"][0].startswith("the file is not patched: ")
    assert {"stale"} <= {site["state"] for site in done.json["sites"]}
    git("init", "-q", cwd=here)
    git("apply", "-", cwd=here, stdin=run("upgrade", FILE, *FROM, *TO, "--diff").out)
    assert run("upgrade", FILE, "--from", "fi7", *TO).code == 0


def test_drift_of_the_new_one_is_explained(here: Path) -> None:
    done = run("upgrade", FILE, *FROM, "--flashinfer", "drifted", "--json")
    assert done.code == 4
    codes = [problem["code"] for problem in done.json["problems"]]
    assert codes == ["private-call-changed", "nearest-era"]
    assert "split_kv is new (argument 10)" in done.json["problems"][1]["message"]
    assert ("FlashInfer then", "flashinfer-python (version unknown) (given)") in [
        (fact["name"], fact["value"]) for fact in done.json["facts"]
    ]


def test_drift_of_the_one_of_now_is_an_error(here: Path) -> None:
    done = run("upgrade", FILE, "--from", "drifted", *TO)
    assert done.code == 4
    assert "private-call-changed" in done.err


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        ([FILE], 2, "upgrade to what?"),
        ([FILE, *TO], 2, "give the FlashInfer of now with --from"),
        ([FILE, *FROM, "--flashinfer", "nowhere"], 2, "no such folder or file"),
        (["nowhere.py", *FROM, *TO], 2, "no such file or folder"),
        ([FILE, *FROM, *TO, "--only", "nothing"], 2, "no variant nothing"),
    ],
)
def test_wrong_calls(here: Path, arguments: list[str], code: int, text: str) -> None:
    done = run("upgrade", *arguments)
    assert (done.code, done.text) == (code, "")
    assert text in done.err


def test_an_edited_file_is_refused(here: Path) -> None:
    data = patched().replace(b"mlagen_request_verify(\n", b"mlagen_request_verify(  # mine\n", 1)
    assert data != patched()
    (here / FILE).write_bytes(data)
    done = run("upgrade", FILE, *FROM, *TO)
    assert done.code == 5
    assert "edited-region" in done.err


def test_another_sglang(here: Path) -> None:
    (here / "then").mkdir()
    other = ORIGINAL.replace(
        b'"""A back end, in miniature."""', b'"""A back end, a little later."""'
    )
    (here / "then" / FILE).write_bytes(other)
    done = run("upgrade", FILE, *FROM, "--sglang", "then", "--json")
    assert (done.code, done.json["differences"]) == (0, [])
    (here / "then" / FILE).write_bytes(other.replace(b"def is_", b"def was_"))
    facts = {fact["name"]: fact["value"] for fact in done.json["facts"]}
    assert facts["SGLang then"] == "then"
    assert facts["FlashInfer then"].endswith("(as now)")


def test_another_sglang_that_has_no_place(here: Path) -> None:
    (here / "then").mkdir()
    (here / "then" / FILE).write_bytes(ORIGINAL.replace(b"fast_mla_decode_plan", b"fast_plan"))
    done = run("upgrade", FILE, *FROM, "--sglang", "then", "--json")
    assert done.code == 4
    assert {"anchor-missing"} <= {problem["code"] for problem in done.json["problems"]}


# -- releases -------------------------------------------------------------------------------------


def there_and_back(sglang: str, first: str, second: str) -> None:
    """A -> B -> A gives A's bytes, whatever is in between."""
    at_first = patch_of(sglang, first).patched
    now = at_first
    for version in (second, first):
        now = prepare(FoundTarget(now, SGLANG_FILE, None), shipped(), plan_api(version)).patched
        if version == second:
            assert now == patch_of(sglang, second).patched != at_first
    assert now == at_first
    assert provenance.remove_regions(now) == sglang_file(sglang)


def test_there_and_back() -> None:
    there_and_back("0.5.17", "0.6.17", "0.7.4")


@pytest.mark.releases
@pytest.mark.parametrize("sglang", ["0.4.5", "0.5.12", "0.5.18", "0.5.23"])
@pytest.mark.parametrize("pair", [("0.6.17", "0.7.4"), ("0.5.0", "0.7.2"), ("0.7.2", "0.6.18")])
def test_there_and_back_elsewhere(sglang: str, pair: tuple[str, str]) -> None:
    there_and_back(sglang, *pair)


@pytest.mark.releases
def test_a_release_patched_for_what_its_header_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace(tmp_path, monkeypatch)
    (tmp_path / FILE).write_bytes(patch_of("0.5.17", "0.6.17").patched)
    done = run("upgrade", FILE, "--flashinfer", "0.7.4", "--json")
    assert done.code == 1
    facts = {fact["name"]: fact["value"] for fact in done.json["facts"]}
    assert facts["FlashInfer now"] == "flashinfer-python 0.6.17 (named by the file)"
    waits = {item["subject"]: (item["old"], item["new"]) for item in about(done, "waits")}
    assert ("3", "13") in waits.values()
    assert len([item for item in about(done, "check") if not item["old"]]) > 10
    states = [site["state"] for site in done.json["sites"]]
    assert states.count("stale") > 8


@pytest.mark.releases
def test_sglang_0_5_17_to_0_5_23(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workspace(tmp_path, monkeypatch)
    (tmp_path / FILE).write_bytes(patch_of("0.5.17", "0.6.17").patched)
    done = run("upgrade", FILE, "--sglang", "0.5.23", "--json")
    assert done.code == 1
    facts = {fact["name"]: fact["value"] for fact in done.json["facts"]}
    assert facts["FlashInfer then"] == "flashinfer-python 0.7.2 (pinned by that SGLang)"
    features = {item["subject"]: item["new"] for item in about(done, "SGLang")}
    assert features == {"shape": "upstream plans", "upstream verify": "yes"}
    sites = {item["subject"]: (item["old"], item["new"]) for item in about(done, "site")}
    assert sites["replay-verify"] == ("installed", "replaced upstream")
    assert run("upgrade", FILE, "--sglang", "0.4.4").code == 4


# -- --allow-unknown ------------------------------------------------------------------------------

UNKNOWN = with_header(wrapper_era("        self._plan_info = " + call(*NINE, "head_dim_kpe")))
ALLOWED = ("--flashinfer", "unknown", "--allow-unknown")
MARK = "unknown, derived from source; --allow-unknown"


def test_unknown_is_never_silent(here: Path) -> None:
    miniatures.write(UNKNOWN, here / "unknown")
    (here / FILE).write_bytes(ORIGINAL)
    refused = run("patch", FILE, "--flashinfer", "unknown", "--no-test")
    assert refused.code == 4
    assert "nearest-era" in refused.err
    assert "--allow-unknown renders it from this source" in refused.err
    assert (here / FILE).read_bytes() == ORIGINAL
    done = run("patch", FILE, *ALLOWED, "--no-test")
    assert done.code == 0
    assert MARK in " ".join(done.text.split())
    data = (here / FILE).read_bytes()
    assert f"# flashinfer-era: {MARK} (nearest: 0.4.0rc4-0.6.7)\n".encode() in data
    assert b"        causal,\n        shape.head_dim_kpe,\n    )\n" in data
    # The file says what it was made with: no other command has to be told.
    for command, code in (("check", 0), ("inspect", 0)):
        told = run(command, FILE, "--flashinfer", "unknown")
        assert told.code == code
        assert MARK in " ".join(told.text.split())
        assert "head_dim_kpe is new (argument 10)" in " ".join(told.text.split())
    assert "as derived from its source" in run("check", FILE, "--flashinfer", "unknown").text
    assert run("check", FILE, "--flashinfer", "fi").code != 0
    assert run("unpatch", FILE).code == 0
    assert (here / FILE).read_bytes() == ORIGINAL


def test_unknown_is_marked_in_generated_files(here: Path) -> None:
    miniatures.write(UNKNOWN, here / "unknown")
    spec = shipped().source
    assert run("render", spec, "--out", "made", "--flashinfer", "unknown").code == 4
    assert run("render", spec, "--out", "made", *ALLOWED).code == 0
    made = files_below(here / "made")
    marked = [name for name, data in made.items() if f"era {MARK}".encode() in data]
    assert {"plans.py", "hooks.py", "tests/test_verify.py"} <= set(marked)
    assert json.loads(made["MANIFEST.json"])["flashinfer"]["era"].startswith(MARK)
    assert run("render", spec, "--out", "made", *ALLOWED, "--check").code == 0


def test_upgrade_to_an_unknown_one(here: Path) -> None:
    miniatures.write(UNKNOWN, here / "unknown")
    assert run("upgrade", FILE, *FROM, "--flashinfer", "unknown").code == 4
    done = run("upgrade", FILE, *FROM, *ALLOWED, "--json")
    assert done.code == 1
    assert about(done, "argument")[0]["new"] == "head_dim_kpe"
    assert about(done, "era")[0]["new"].startswith(MARK)
    assert MARK in str(done.json["facts"])


def test_what_cannot_be_derived_stays_refused(here: Path) -> None:
    done = run("patch", FILE, "--flashinfer", "drifted", "--allow-unknown", "--no-test")
    assert done.code == 4
    assert "not-derivable" in done.err
    assert (here / FILE).read_bytes() == patched()


# -- files that an older mlagen patched -----------------------------------------------------------


@disguised
def test_unpatch_of_an_older_file(here: Path, disguise: Any) -> None:
    (here / FILE).write_bytes(disguise(OLDER))
    assert run("unpatch", FILE).code == 0
    found = (here / FILE).read_bytes()
    plain = found.removeprefix(b"\xef\xbb\xbf").replace(b"\r\n", b"\n")
    assert hashlib.sha256(plain).hexdigest() == OLDER_ORIGINAL
    assert found == disguise(plain)


def test_an_older_file_is_stale_and_is_patched_anew(here: Path) -> None:
    (here / FILE).write_bytes(OLDER)
    assert run("check", FILE, "--flashinfer", "fi").code == 1
    assert run("upgrade", FILE, *FROM, "--flashinfer", "fi").code == 1
    assert run("patch", FILE, "--only", "decode", "--flashinfer", "fi", "--no-test").code == 0
    assert run("check", FILE, "--flashinfer", "fi").code == 0
    assert run("unpatch", FILE).code == 0
    assert hashlib.sha256((here / FILE).read_bytes()).hexdigest() == OLDER_ORIGINAL


def test_unpatch_asks_nothing_of_the_header(here: Path) -> None:
    """A header of another mlagen, with other lines, stands in no one's way."""
    lines = provenance.split_lines(OLDER.decode())
    [header] = [r for r in provenance.find_regions(OLDER) if r.site == "header"]
    emitted = [line for line in header.emitted if "flashinfer" not in line and "spec" not in line]
    lines[header.start_line - 1 : header.end_line] = provenance.build_region(
        "header", "", [*emitted, "# something-new: 1"], [], "\n"
    )
    (here / FILE).write_text("".join(lines))
    assert run("unpatch", FILE).code == 0
    assert hashlib.sha256((here / FILE).read_bytes()).hexdigest() == OLDER_ORIGINAL
