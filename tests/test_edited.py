"""`unpatch` of a hand-edited file: both texts, where what mlagen left there can be found out.

What it says where it cannot is in test_cli_errors.py (`edited_region`).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from mlagen.codegen.spec import shipped_spec
from tests.cli_workspace import FILE, ORIGINAL, as_older, run, workspace
from tests.flashinfer import miniatures

STEP = "mlagen_draft_step: Optional[int] = "
BOTH = f"      -    {STEP}None\n      +    {STEP}0\n"
ELSEWHERE = (
    "put back what mlagen left there (`mlagen patch --diff`, with the FlashInfer and the spec"
)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file patched for FlashInfer 8.8, which is in the cache, and then edited."""
    folder = workspace(tmp_path, monkeypatch)
    monkeypatch.setenv("MLAGEN_CACHE", str(folder / "cache"))
    wheels = folder / "cache" / "wheels" / "flashinfer-python" / "8.8"
    miniatures.write_wheel(miniatures.wrapper_era(path="flashinfer/mla/_core.py"), wheels, "8.8")
    assert run("patch", FILE, "--flashinfer", "8.8").code == 0
    edit(folder)
    return folder


def edit(folder: Path) -> None:
    data = (folder / FILE).read_bytes()
    assert data.count(f"{STEP}None".encode()) == 1
    (folder / FILE).write_bytes(data.replace(f"{STEP}None".encode(), f"{STEP}0".encode()))


def refused(folder: Path) -> str:
    before = (folder / FILE).read_bytes()
    done = run("unpatch", FILE)
    assert done.code == 5
    assert (folder / FILE).read_bytes() == before
    return done.err


def test_both_texts_are_shown(here: Path) -> None:
    text = refused(here)
    assert BOTH in text
    assert "put these lines back" in text
    assert ELSEWHERE not in text


def test_those_of_the_variants_that_were_chosen(here: Path) -> None:
    (here / FILE).write_bytes(ORIGINAL)
    assert run("patch", FILE, "--flashinfer", "8.8", "--only", "draft-decode").code == 0
    edit(here)
    assert BOTH in refused(here)


def test_the_one_installed_serves_if_it_is_the_same(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLAGEN_CACHE", str(here / "empty"))
    files = miniatures.wrapper_era(path="flashinfer/mla/_core.py")
    miniatures.write({**files, "flashinfer/__init__.py": ""}, here)
    assert BOTH in refused(here)
    place = here / "flashinfer" / "mla" / "_core.py"
    place.write_text(place.read_text() + "# Another.\n")
    assert ELSEWHERE in refused(here)


@pytest.mark.parametrize("other", ["spec", "flashinfer", "mlagen"])
def test_where_something_is_another_it_is_not_guessed(
    other: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if other == "spec":
        (here / "variants.yaml").write_text(shipped_spec().read_text() + "# Another.\n")
    elif other == "flashinfer":
        monkeypatch.setenv("MLAGEN_CACHE", str(here / "empty"))
    else:
        data = (here / FILE).read_bytes()
        (here / FILE).write_bytes(as_older(data, "# mlagen: ", "# mlagen: 0.0.", "header"))
    text = refused(here)
    assert f"{STEP}0" in text
    assert f"{STEP}None" not in text
    assert ELSEWHERE in text
