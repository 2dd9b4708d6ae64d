"""`mlagen matrix` on a cache of miniatures: nothing is fetched, whatever is there is tried."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mlagen.codegen import pip as running
from mlagen.codegen.matrix import gather
from mlagen.codegen.matrix.facts import read_facts, to_json
from mlagen.codegen.matrix.tables import page
from mlagen.codegen.spec import shipped_spec
from tests.cli_workspace import Outcome, run
from tests.matrix import miniature

PAGE = Path("docs/compatibility.md")
FACTS = PAGE.with_suffix(".json")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in, a cache with releases, no pip."""

    def pip(*args: object, **kwargs: object) -> object:
        raise AssertionError("pip was called")

    monkeypatch.setattr(running.subprocess, "run", pip)
    monkeypatch.setenv("MLAGEN_CACHE", str(tmp_path / "cache"))
    miniature.fill(tmp_path / "cache")
    (tmp_path / "work" / "docs").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path


@pytest.fixture(scope="module")
def first_run(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What a run leaves, made from the cache as if the registry had just that."""
    folder = tmp_path_factory.mktemp("first")
    miniature.fill(folder / "cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gather, "sglang_versions", lambda: ("1.0", "1.1", "1.2"))
        patch.setattr(gather, "flashinfer_versions", lambda: ("1.0", "1.1", "1.2"))
        patch.setenv("MLAGEN_CACHE", str(folder / "cache"))
        patch.chdir(folder)
        done = matrix("--refresh", "--markdown", PAGE)
    assert done.code == 0, done.err
    names = (PAGE.as_posix(), FACTS.as_posix(), "cache/matrix.jsonl")
    return {name: (folder / name).read_bytes() for name in names}


@pytest.fixture
def made(here: Path, first_run: dict[str, bytes]) -> Path:
    """The page of the first run, its facts, and what it remembered."""
    for name, data in first_run.items():
        (here / name if name.startswith("cache") else Path(name)).write_bytes(data)
    return PAGE


def matrix(*arguments: str | Path) -> Outcome:
    return run("matrix", "--jobs", "1", *arguments)


def empty(here: Path) -> None:
    """Take everything out of the cache, what is remembered too."""
    for place in sorted((here / "cache").rglob("*"), reverse=True):
        place.unlink() if place.is_file() else place.rmdir()


PINNED = """\
| SGLang | FlashInfer that it pins | decode | draft-decode | verify | draft-extend | dcp |
| --- | --- | --- | --- | --- | --- | --- |
| 1.2 | 1.1 | refused [1] | refused [1] | refused [1] | refused [1] | refused [1] |
| 1.0, 1.1 | 1.0 | replaced | replaced | installed | installed | refused [2] |
"""


def test_the_page(made: Path) -> None:
    text = made.read_text()
    assert PINNED in text
    # A FlashInfer that is refused is so for every SGLang, with its own reason.
    assert "| 1.0, 1.1 | 1.2 | refused [3] |" in text
    assert "3. FlashInfer 1.2: plan-call-drift" in text or "3. FlashInfer 1.2: line " in text
    facts = read_facts(FACTS)
    assert page(facts) == text
    assert facts.sglang[0].file == facts.sglang[1].file
    # Releases that are alike are tried once: 2 files, 2 FlashInfers that can be read.
    assert len(facts.outcomes) == 4


def test_nothing_is_done_twice(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gather, "try_pair", None)
    monkeypatch.setattr(gather, "read_release", None)
    done = matrix()
    assert done.code == 0
    assert "pairs  9: 9 tried" in done.err
    assert "SGLang    FlashInfer  decode" in done.text


def test_a_spec_that_changes_is_tried_anew(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("variants.yaml").write_bytes(shipped_spec().read_bytes() + b"\n# another\n")
    calls: list[Path] = []
    whole = gather.try_pair

    def counted(sglang: Path, flashinfer: Path, spec: Path) -> list[str]:
        calls.append(spec)
        return whole(sglang, flashinfer, spec)

    monkeypatch.setattr(gather, "try_pair", counted)
    assert matrix().code == 0
    assert len(calls) == 4
    assert {spec.name for spec in calls} == {"variants.yaml"}
    assert matrix("--check", PAGE).code == 0, "a comment is no other variants.yaml"


def test_check_is_content(made: Path, here: Path) -> None:
    done = matrix("--check", made)
    assert (done.code, done.err) == (0, "")
    assert "docs/compatibility.md is current" in done.text
    empty(here)
    done = matrix("--check", made)
    assert done.code == 0
    assert "9: 0 tried, 9 as they are recorded" in done.text
    assert not list((here / "cache").rglob("*")), "a check that tries nothing writes nothing"


def problems(made: Path) -> list[str]:
    done = matrix("--check", made, "--json")
    assert done.code == 1
    assert all(p["code"] == "matrix-stale" for p in done.json["problems"])
    assert all("--markdown docs/compatibility.md" in p["hint"] for p in done.json["problems"])
    return [problem["message"] for problem in done.json["problems"]]


def test_check_sees_a_page_that_was_typed_into(made: Path, here: Path) -> None:
    empty(here)
    made.write_text(made.read_text().replace("replaced", "perfect", 1))
    assert problems(made) == ["is not what compatibility.json makes of it"]
    made.unlink()
    (message,) = problems(made)
    assert message.startswith("cannot be read: ")


@pytest.mark.parametrize("cached", [True, False])
def test_check_sees_a_fact_that_was_changed(made: Path, here: Path, cached: bool) -> None:
    """In the page at once; where the page was made of it, by trying the pair."""
    facts = FACTS.read_text()
    assert facts.count('"states": ["installed"]') == 2
    FACTS.write_text(facts.replace('"states": ["installed"]', '"states": ["superseded"]', 1))
    if not cached:
        empty(here)
    told = problems(made)
    assert told[0] == "is not what compatibility.json makes of it"
    made.write_text(page(read_facts(FACTS)))
    if cached:
        assert "SGLang 1.0 with FlashInfer 1.0: verify is installed, recorded superseded" in told
        assert problems(made) == told[1:]
    else:
        assert len(told) == 1
        assert matrix("--check", made).code == 0, "nothing here knows better"


def test_check_sees_other_files_under_the_same_version(made: Path, here: Path) -> None:
    other = miniature.BACKEND + b"# changed\n"
    files = miniature.sglang_files("1.0", "1.1", other)
    miniature.in_cache(here / "cache", "sglang", "1.0", files)
    told = problems(made)
    assert told[0].startswith("SGLang 1.0: file is ")
    assert told[0].endswith("; pin is '1.1', recorded '1.0'")
    miniature.in_cache(
        here / "cache",
        "flashinfer-python",
        "1.1",
        miniature.flashinfer_files("1.1", miniature.DRIFTED),
    )
    told = problems(made)
    assert any(line.startswith("FlashInfer 1.1: digest is ") for line in told)
    assert any("decode is refused, recorded replaced" in line for line in told)


def test_check_with_a_refresh_sees_new_releases(
    made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gather, "sglang_versions", lambda: ("1.1", "1.2", "1.3"))
    monkeypatch.setattr(gather, "flashinfer_versions", lambda: ("1.0", "1.1", "1.2"))
    miniature.in_cache(Path("../cache"), "sglang", "1.3", miniature.sglang_files("1.3", "1.0"))
    done = matrix("--check", made, "--refresh", "--json")
    assert done.code == 1
    told = [problem["message"] for problem in done.json["problems"]]
    assert told[:2] == [
        "SGLang 1.0 is recorded and no longer there",
        "SGLang 1.3 is not recorded",
    ]
    assert "SGLang 1.3 with FlashInfer 1.0: no outcome is recorded" in told


def test_another_meaning_of_the_spec(made: Path, here: Path) -> None:
    text = shipped_spec().read_bytes()
    other = text.replace(b"seq_lens + draft_token_num", b"seq_lens + draft_token_num + 1", 1)
    Path("variants.yaml").write_bytes(other)
    assert problems(made) == ["the facts are of another variants.yaml"]
    assert matrix().code == 0, "all pairs are in the cache, all are tried"
    empty(here)
    assert problems(made) == ["the facts are of another variants.yaml"]
    done = matrix("--markdown", made)
    assert done.code == 2
    assert "9 of 9 pairs are recorded for another variants.yaml" in done.err


def test_what_is_recorded_stands_for_what_is_not_here(made: Path, here: Path) -> None:
    text = made.read_text()
    before = matrix("--json").json["pairs"]
    empty(here)
    assert matrix("--json").json["pairs"] == before
    assert "nothing to do" in matrix("--markdown", made).err
    assert made.read_text() == text


def test_chosen_pairs(made: Path) -> None:
    done = matrix("--sglang", "1.2", "--json")
    assert [(p["sglang"], p["flashinfer"]) for p in done.json["pairs"]] == [
        ("1.2", "1.0"),
        ("1.2", "1.1"),
        ("1.2", "1.2"),
    ]
    done = matrix("--flashinfer", "1.1", "--json")
    assert [p["sglang"] for p in done.json["pairs"]] == ["1.0", "1.1", "1.2"]
    done = matrix("--sglang", "1.1", "--flashinfer", "1.1")
    assert done.text.splitlines()[1].split()[:3] == ["1.1", "1.1", "replaced"]


def test_a_pair_without_any_facts() -> None:
    done = matrix("--sglang", "1.1", "--flashinfer", "1.0")
    assert done.code == 0
    assert "facts  none recorded" in done.err
    assert done.text.splitlines()[1].split() == [
        *("1.1", "1.0", "replaced", "replaced", "installed", "installed", "refused", "[1]")
    ]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--sglang", "9.9"), "--sglang: no-pair: no pair has SGLang 9.9\n"),
        (("--sglang", "1.2", "--sglang", "9.9"), "--sglang: no-pair: no pair has SGLang 9.9\n"),
        (("--flashinfer", "9.8"), "--flashinfer: no-pair: no pair has FlashInfer 9.8\n"),
    ],
)
@pytest.mark.parametrize("form", [(), ("--json",)])
def test_a_version_in_no_pair(
    made: Path, arguments: tuple[str, ...], said: str, form: tuple[str, ...]
) -> None:
    done = matrix(*arguments, *form)
    assert done.code == 2
    if form:
        assert json.loads(done.text)["problems"][0]["code"] == "no-pair"
    else:
        assert done.text == ""
        assert said in done.err
        assert "hint: choose another version, give --" in done.err


def test_a_version_in_no_pair_without_any_facts() -> None:
    assert matrix("--sglang", "9.9").code == 2


def test_a_pair_that_nobody_has(made: Path) -> None:
    done = matrix("--sglang", "9.9", "--flashinfer", "1.0")
    assert done.code == 0
    assert "not tried: 9.9 with 1.0; --refresh fetches" in " ".join(done.err.split())
    assert done.text.count("not tried") == 5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "no-facts: no facts"),
        (("--check", "docs/compatibility.md"), "no-facts: no facts to read"),
        (("--check", ""), "an empty file name"),
        (("--check", "docs/compatibility.json"), "the facts lie beside the page"),
        (("--check", "a.md", "--markdown", "a.md"), "--check writes nothing"),
        (("--check", "a.md", "--sglang", "1.0"), "the page has all pairs"),
        (("--markdown", "a.md", "--flashinfer", "1.0"), "the page has all pairs"),
        (("--sglang", "main"), "not a version: 'main'"),
        (("--jobs", "0"), "0 is not in the range"),
    ],
)
def test_usage(arguments: tuple[str, ...], message: str) -> None:
    done = matrix(*arguments)
    assert done.code == 2
    assert message in done.err


def test_facts_of_nobody_know(made: Path, here: Path) -> None:
    """An outcome that is missing is told, not passed over."""
    facts = read_facts(FACTS)
    pair = next(iter(facts.outcomes))
    rest = {p: cells for p, cells in facts.outcomes.items() if p != pair}
    less = facts.model_copy(update={"outcomes": rest})
    FACTS.write_text(to_json(less))
    made.write_text(page(less))
    empty(here)
    assert all(line.endswith("no outcome is recorded") for line in problems(made))


def test_json_of_an_error() -> None:
    done = matrix("--json")
    assert json.loads(done.text)["problems"][0]["code"] == "no-facts"
