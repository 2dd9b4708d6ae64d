"""docs/compatibility.json: what is written is what is read, and a broken one says so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mlagen.codegen.errors import UsageError
from mlagen.codegen.matrix.facts import Facts, read_facts, to_json
from tests.matrix.miniature import BAD, FACTS, GOOD, PARTLY


def test_there_and_back(tmp_path: Path) -> None:
    place = tmp_path / "facts.json"
    place.write_text(to_json(FACTS))
    assert read_facts(place) == FACTS
    assert to_json(read_facts(place)) == to_json(FACTS)


def test_the_order_of_findings_does_not_matter() -> None:
    backwards = dict(reversed(list(FACTS.outcomes.items())))
    assert to_json(FACTS.model_copy(update={"outcomes": backwards})) == to_json(FACTS)


def test_a_line_an_item_and_each_result_once() -> None:
    text = to_json(FACTS)
    lines = text.splitlines()
    assert sum('"version"' in line for line in lines) == len(FACTS.sglang) + len(FACTS.flashinfer)
    assert sum(line.strip().startswith('[{"variant"') for line in lines) == len({GOOD, PARTLY, BAD})
    assert text.isascii()
    assert text.endswith("}\n")


def test_nothing_at_all(tmp_path: Path) -> None:
    none = Facts(mlagen="", spec="", variants=(), sglang=(), flashinfer=(), outcomes={})
    place = tmp_path / "facts.json"
    place.write_text(to_json(none))
    assert read_facts(place) == none


def broken(**change: object) -> str:
    return json.dumps({**json.loads(to_json(FACTS)), **change})


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        "\x00\xff",
        to_json(FACTS)[:-20],
        broken(schema_version=2),
        broken(outcomes=[["f1", "d1", 99]]),
        broken(outcomes=[["f1", "d1", -4]]),
        broken(sglang=[{"version": "main", "file": "f", "pin": ""}]),
        broken(results=[[{"variant": "decode", "states": ["fine"], "notes": []}]]),
        broken(surprise=1),
    ],
)
def test_a_broken_file(tmp_path: Path, text: str) -> None:
    place = tmp_path / "facts.json"
    place.write_text(text)
    with pytest.raises(UsageError) as caught:
        read_facts(place)
    (problem,) = caught.value.problems
    assert (problem.path, problem.code) == (str(place), "bad-facts")
    assert "--refresh --markdown" in problem.hint


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no-facts: no facts to read: No such file"):
        read_facts(tmp_path / "facts.json")
