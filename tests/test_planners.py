"""What `inspect` tells of graphs that are left to another plan: all of it, and as it is emitted."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest

from mlagen.codegen.patch import prepare
from mlagen.codegen.planners import NOT_ON_THE_DEVICE, UNGUARDED, planner_facts
from mlagen.codegen.sglang.find import FoundTarget
from mlagen.codegen.spec import Spec
from mlagen.codegen.spec_model import Guard
from tests.releases import SGLANG_FILE, plan_api, sglang_file, shipped
from tests.specs import on_device, spec_of

DEVICE = Path(__file__).parents[1] / "templates" / "plan" / "device.py.jinja"


def facts_of(spec: Spec, release: str = "0.5.17") -> list[tuple[str, str]]:
    found = FoundTarget(sglang_file(release), SGLANG_FILE, None)
    return planner_facts(spec, prepare(found, spec, plan_api("0.6.17")).target)


def test_every_guard_has_its_words() -> None:
    assert set(UNGUARDED) == set(get_args(Guard))


def test_every_refusal_of_the_kernel_is_told() -> None:
    """A reason for each `return` of MlagenDevicePlan.refuses, in its order, with its numbers."""
    text = DEVICE.read_text("utf-8")
    refuses = text[text.index("def refuses(") : text.index("def plan(")]
    reasons = re.findall(r'return f"(.*?)"', refuses)
    assert len(reasons) == len(NOT_ON_THE_DEVICE)
    shared = ("Triton", "clusters of", "query tiles", "int32", "pages of")
    for words, reason, told in zip(shared, reasons, NOT_ON_THE_DEVICE, strict=True):
        assert words in reason
        assert words in told
    (most,) = re.findall(r"MOST_TILES = (\d+)", text)
    assert f"more than {most} query tiles" in NOT_ON_THE_DEVICE
    (least,) = re.findall(r"LEAST_TRITON = \((\d+, \d+)\)", text)
    assert f"Triton before {least.replace(', ', '.')}" in NOT_ON_THE_DEVICE
    (fixed,) = re.findall(r"FIXED = \{(.*?)\}", text)
    assert re.findall(r"(\d+):", fixed) == ["1", "2"]  # neither one nor two


def test_each_variant_is_told_its_own_guards() -> None:
    rows = [text for name, text in facts_of(shipped()) if name == "FlashInfer plans"]
    named = {
        name: text.split(" with ", 1)[1]
        for text in rows
        for name in text.removeprefix("graphs of ").split(" with ")[0].split(", ")
    }
    captured = [variant for variant in shipped().variants if "replay" in variant.when]
    assert set(named) == {variant.name for variant in captured}
    for variant in captured:
        for guard, words in UNGUARDED.items():
            assert (words in named[variant.name]) == (guard in variant.guards), (variant, guard)
        compared = "another formula" in named[variant.name]
        assert compared == (variant.serves != "draft-decode")


@pytest.mark.parametrize("names", [(), ("verify",), ("decode", "verify")])
def test_the_kernels_refusals_are_those_of_graphs_on_the_device(names: tuple[str, ...]) -> None:
    rows = [text for name, text in facts_of(spec_of(on_device(*names))) if name == "the host plans"]
    assert len(rows) == bool(names)
    assert all(row.startswith(f"graphs of {', '.join(names)} with Triton") for row in rows)


def test_a_variant_without_a_place_is_not_told_of() -> None:
    text = " ".join(text for _, text in facts_of(shipped(), "0.5.3"))
    assert "dcp" not in text
    assert "decode" in text
