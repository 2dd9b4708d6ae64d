"""Which FlashInfer is taken where none is given."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from mlagen.codegen.errors import usage
from mlagen.codegen.flashinfer import find
from mlagen.codegen.spec import shipped_spec
from tests.cli_workspace import FILE, Outcome, run, workspace
from tests.flashinfer import miniatures

BY_FILE = "(none is installed; the file was patched for it)"
BY_MANIFEST = "(none is installed; generated/MANIFEST.json names it)"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout whose generated/ is for FlashInfer 7.7, and a cache that has 7.7 and 8.8."""
    folder = workspace(tmp_path, monkeypatch)
    monkeypatch.setenv("MLAGEN_CACHE", str(folder / "cache"))
    wheels = folder / "cache" / "wheels" / "flashinfer-python"
    files = miniatures.wrapper_era(path="flashinfer/mla/_core.py")
    for version, text in (("7.7", "# 7.7\n"), ("8.8", "# 8.8\n")):
        changed = {**files, "flashinfer/mla/_core.py": files["flashinfer/mla/_core.py"] + text}
        miniatures.write_wheel(changed, wheels / version, version)
    shutil.copy(shipped_spec(), "variants.yaml")
    assert run("render", "variants.yaml", "--flashinfer", "7.7").code == 0
    return folder


def taken(outcome: Outcome) -> str:
    facts = {fact["name"]: fact["value"] for fact in outcome.json["facts"]}
    return str(facts["FlashInfer"])


def test_a_file_that_is_not_patched_is_for_that_of_generated(here: Path) -> None:
    done = run("patch", FILE, "--check", "--json")
    assert (done.code, taken(done)) == (1, f"flashinfer-python 7.7 {BY_MANIFEST}")


def test_a_patched_file_is_for_its_own(here: Path) -> None:
    """It used to be called stale, and to be rewritten for the FlashInfer of generated/."""
    assert run("patch", FILE, "--flashinfer", "8.8").code == 0
    before = (here / FILE).read_bytes()
    for command in (("check",), ("patch", "--check"), ("patch",), ("inspect",)):
        done = run(*command, FILE, "--json")
        assert (done.code, taken(done)) == (0, f"flashinfer-python 8.8 {BY_FILE}")
    assert (here / FILE).read_bytes() == before


def test_it_needs_no_generated(here: Path) -> None:
    assert run("patch", FILE, "--flashinfer", "8.8").code == 0
    shutil.rmtree("generated")
    assert run("patch", FILE, "--check").code == 0


def test_check_says_that_it_has_nothing_else_to_hold_against(here: Path) -> None:
    """A gate that was not told the new FlashInfer passes every bump."""
    assert run("patch", FILE, "--flashinfer", "8.8").code == 0
    [note] = run("check", FILE, "--json").json["notes"]
    assert note.startswith("right for FlashInfer 8.8: none is installed; ")
    assert note.endswith("so that a bump is not seen")
    assert run("check", FILE, "--flashinfer", "8.8", "--json").json["notes"] == [
        "right for FlashInfer 8.8"
    ]
    assert run("check", FILE, "--flashinfer", "7.7").code == 1


def test_one_that_is_installed_comes_first(here: Path) -> None:
    assert run("patch", FILE, "--flashinfer", "8.8").code == 0
    files = miniatures.wrapper_era(path="flashinfer/mla/_core.py")
    miniatures.write({**files, "flashinfer/__init__.py": ""}, here)
    done = run("check", FILE, "--json")
    assert (done.code, taken(done)) == (1, "flashinfer-python (version unknown) (installed)")


def test_a_header_that_names_none(here: Path) -> None:
    """Patched for a folder that did not tell its version."""
    assert run("patch", FILE, "--flashinfer", "fi").code == 0
    assert taken(run("check", FILE, "--json")) == f"flashinfer-python 7.7 {BY_MANIFEST}"


def test_an_edited_header_names_none(here: Path) -> None:
    assert run("patch", FILE, "--flashinfer", "8.8").code == 0
    data = (here / FILE).read_bytes()
    (here / FILE).write_bytes(data.replace(b"# flashinfer: 8.8\n", b""))
    assert run("patch", FILE).code == 5


def test_one_that_cannot_be_had_is_refused_with_why_it_was_looked_for(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run("patch", FILE, "--flashinfer", "8.8").code == 0

    def fail(version: str) -> None:
        raise usage("pip says no", path=f"flashinfer-python=={version}", code="fetch-failed")

    monkeypatch.setattr(find, "_fetched", fail)
    done = run("check", FILE)
    assert done.code == 2
    assert done.err == (
        f"flashinfer-python==8.8: fetch-failed: pip says no {BY_FILE}\n"
        "    hint: install FlashInfer beside PATH or mlagen, or give --flashinfer\n"
    )
