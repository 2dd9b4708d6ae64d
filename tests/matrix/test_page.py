"""docs/compatibility.md is what its facts say, and the facts are what the releases give."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlagen.codegen.fetch import WheelTree
from mlagen.codegen.matrix import gather, store
from mlagen.codegen.matrix.facts import read_facts
from mlagen.codegen.matrix.releases import FLASHINFER, SGLANG
from tests.cli_workspace import run
from tests.releases import NEAREST_WHEEL, PINS
from tests.test_releases import DECODE_ONLY, REFUSED

PAGE = Path(__file__).resolve().parents[2] / "docs" / "compatibility.md"
FACTS = read_facts(PAGE.with_suffix(".json"))


def test_the_page_is_current(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the committed facts alone: the cache is empty, nothing is fetched."""
    monkeypatch.setenv("MLAGEN_CACHE", str(tmp_path))
    monkeypatch.chdir(PAGE.parents[1])
    done = run("matrix", "--check", PAGE)
    assert (done.code, done.err) == (0, ""), done.text
    assert "0 tried" in done.text


def test_the_pins_are_those_that_the_other_tests_take() -> None:
    pins = {release.version: release.pin for release in FACTS.sglang}
    assert PINS.items() <= pins.items()
    assert pins.keys() >= NEAREST_WHEEL.keys()


def test_every_release_with_its_pin_has_an_outcome() -> None:
    releases = {release.version: release for release in FACTS.sglang}
    for version, pin in gather.pinned_pairs(FACTS.sglang):
        cells = FACTS.cells(releases[version], pin)
        assert cells is not None, version
        refused = {cell.variant for cell in cells if cell.states == ("refused",)}
        if version in REFUSED:
            assert refused == set(FACTS.variants)
        elif version in PINS and version not in DECODE_ONLY:
            assert refused <= {"dcp"}
    assert all(release.problem == "" for release in FACTS.flashinfer if release.kind == "wheel")


@pytest.mark.releases
def test_the_facts_are_what_the_releases_give() -> None:
    """Every release that the page names, fetched, every pair tried."""
    for release in FACTS.sglang:
        store.obtain(SGLANG, release.version, lambda line: None)
    for other in FACTS.flashinfer:
        if other.kind != "none":
            store.obtain(FLASHINFER, other.version, lambda line: None)
    done = run("matrix", "--check", PAGE)
    assert done.code == 0, done.text
    assert "tried, " not in done.text


@pytest.mark.releases
def test_a_thinned_release_is_read_as_the_whole_one() -> None:
    from mlagen.codegen.fetch import cached

    compared = 0
    for release in FACTS.flashinfer:
        whole = cached(f"{FLASHINFER}=={release.version}")
        if whole is None:
            continue
        compared += 1
        assert store.flashinfer_digest(WheelTree(whole))[: len(release.digest)] == release.digest
        assert gather.read_release(whole)["problem"] == release.problem
    assert compared
