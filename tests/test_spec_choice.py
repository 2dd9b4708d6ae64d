"""Which variants.yaml is taken: above PATH, above the working directory, or mlagen's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlagen.codegen.sglang.find import FoundTarget, find_target
from mlagen.codegen.spec import FILE_NAME, shipped_spec
from mlagen.codegen.spec_choice import choose_spec
from tests.cli_workspace import FILE, ORIGINAL, run, workspace

FETCHED = FoundTarget(ORIGINAL, f"sglang/{FILE}", None)


@pytest.fixture
def fork(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fork beside the folder that one works in."""
    (tmp_path / "here").mkdir()
    workspace(tmp_path / "here", monkeypatch)
    folder = tmp_path / "fork" / "sglang" / "srt" / "layers" / "attention"
    folder.mkdir(parents=True)
    (folder / FILE).write_bytes(ORIGINAL)
    return tmp_path / "fork"


def test_the_one_given_is_taken(fork: Path) -> None:
    (fork / FILE_NAME).touch()
    given = choose_spec(Path("mine.yaml"), find_target(str(fork)))
    assert (given.path, given.how, given.told) == (Path("mine.yaml"), "", "mine.yaml")


def test_that_beside_the_fork_comes_before_that_of_the_working_directory(fork: Path) -> None:
    Path(FILE_NAME).touch()
    (fork / FILE_NAME).touch()
    chosen = choose_spec(None, find_target(str(fork)))
    assert chosen.path == fork / FILE_NAME
    assert chosen.how == f"the nearest above sglang/srt/layers/attention/{FILE}"


def test_a_link_is_looked_at_where_it_stands_and_where_it_leads(fork: Path) -> None:
    Path("link.py").symlink_to(fork / "sglang" / "srt" / "layers" / "attention" / FILE)
    (fork / FILE_NAME).touch()
    assert choose_spec(None, find_target("link.py")).path == fork / FILE_NAME
    Path(FILE_NAME).touch()
    assert choose_spec(None, find_target("link.py")).path.samefile(FILE_NAME)


@pytest.mark.parametrize("fetched", [True, False])
def test_that_of_the_working_directory_serves_what_has_none(fetched: bool, fork: Path) -> None:
    Path(FILE_NAME).touch()
    chosen = choose_spec(None, FETCHED if fetched else find_target(str(fork)))
    assert chosen.path.samefile(FILE_NAME)
    assert chosen.how == "the nearest above the working directory"


def test_mlagens_own_is_the_last(fork: Path) -> None:
    chosen = choose_spec(None, find_target(str(fork)))
    assert chosen.path == shipped_spec()
    places = f"sglang/srt/layers/attention/{FILE} or the working directory"
    assert chosen.how == f"mlagen's own, as none is above {places}"
    assert chosen.told == f"{shipped_spec()} (mlagen's own)"
    assert choose_spec(None).how == "mlagen's own, as none is above the working directory"
    assert choose_spec(None, FETCHED).how == choose_spec(None).how


def test_a_fork_is_patched_by_the_spec_beside_it(fork: Path) -> None:
    """As docs/forks.md says, from any working directory; the report says which one it was."""
    file = fork / "sglang" / "srt" / "layers" / "attention" / FILE
    file.write_bytes(ORIGINAL.replace(b"FlashInferMLAAttnBackend", b"MyBackend"))
    refused = run("patch", fork, "--flashinfer", "fi", "--json")
    assert refused.code == 4
    assert refused.json["problems"][-1]["code"] == "spec-used"
    section = "fork:\n  anchors:\n    backend-class: MyBackend\n\n"
    text = shipped_spec().read_text().replace("variants:\n", f"{section}variants:\n", 1)
    (fork / FILE_NAME).write_text(text)
    for command in ("patch", "check", "inspect"):
        done = run(command, fork, "--flashinfer", "fi", "--json")
        assert done.code == 0, done
        told = {fact["name"]: fact["value"] for fact in done.json["facts"]}
        assert told[FILE_NAME].startswith(f"{fork / FILE_NAME} (the nearest above ")
    (fork / FILE_NAME).write_text(text.replace("MyBackend", "MyBackEnd"))
    for command in (("patch",), ("upgrade", "--from", "fi")):
        refused = run(*command, fork, "--flashinfer", "fi", "--json")
        assert refused.code == 4
        assert [p["path"] for p in refused.json["problems"]] == 2 * [str(fork / FILE_NAME)]
