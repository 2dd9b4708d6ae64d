"""Reports from the field about signatures: an argument more, one inserted, one that only a fork
has, a FlashInfer that is not the one a file was written for.

docs/field-reports.md says which report each test is of.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from functools import cache

import pytest

from mlagen.codegen.check import check_file
from mlagen.codegen.errors import DriftError
from mlagen.codegen.flashinfer.api import PlanApi
from mlagen.codegen.flashinfer.read import read_plan_api
from mlagen.codegen.patch import prepare
from mlagen.codegen.render import render, render_module
from mlagen.codegen.sglang.find import FoundTarget
from tests.flashinfer.miniatures import (
    NINE,
    STREAM,
    Files,
    backend_era,
    call,
    source,
    wrapper_era,
)
from tests.judge.miniature import COPIES, STAGES
from tests.releases import plan_api, shipped
from tests.splice.shapes import before, line_of

TORCH_OP = "self._cached_module.plan.default"
NEW = "bsz_tensor"

#: FlashInfer's eras, each with a planner of these arguments.
ERAS: dict[str, Callable[..., Files]] = {
    "stream": lambda *nine: wrapper_era(
        "        with self.device as device:\n"
        f"            self._plan_info = {call(*nine, STREAM[-1])}"
    ),
    "torch op": lambda *nine: wrapper_era(
        f"        self._plan_info = {call(*nine, form=TORCH_OP)}"
    ),
    "wrapper": lambda *nine: wrapper_era(f"        self._plan_info = {call(*nine)}"),
    "back end": lambda *nine: backend_era(nine=nine),
}


@pytest.mark.parametrize("era", ERAS)
def test_the_nine_arguments_are_read(era: str) -> None:
    assert len(read_plan_api(source(ERAS[era](*NINE))).call.arguments) == 9 + (era == "stream")


@pytest.mark.parametrize("place", range(10))
@pytest.mark.parametrize("era", ERAS)
def test_one_argument_more_fails_before_anything_is_rendered(era: str, place: int) -> None:
    """Wherever it stands. As a torch op or a compiled function the planner would say `missing value
    for argument '_15'` at the first replay."""
    with pytest.raises(DriftError) as caught:
        read_plan_api(source(ERAS[era](*NINE[:place], NEW, *NINE[place:])))
    assert caught.value.exit_code == 4
    assert f"{NEW} is new (argument {place + 1})" in str(caught.value)


@pytest.mark.parametrize("era", ERAS)
def test_arguments_in_another_order_are_refused(era: str) -> None:
    """Two that have one type are the dangerous ones: nothing but the order tells them apart."""
    for first, second in ((3, 4), (4, 5), (6, 7), (0, 1), (1, 2)):
        nine = list(NINE)
        nine[first], nine[second] = nine[second], nine[first]
        with pytest.raises(DriftError, match=r"in another order|is new"):
            read_plan_api(source(ERAS[era](*nine)))


# -- calls by position --------------------------------------------------------------------------


@cache
def emitted(version: str) -> dict[str, ast.Module]:
    rendered = render(shipped(), plan_api(version))
    return {
        module: ast.parse(render_module(rendered, module, ["x"])) for module in ("plans", "hooks")
    }


@pytest.mark.parametrize("version", ["0.6.17", "0.7.2"])
def test_no_foreign_function_gets_a_fourth_argument_by_position(version: str) -> None:
    """An argument that is inserted in a function of others shifts those behind it. Emitted code
    passes at most three by position, but to the planner, which takes no keywords and whose order is
    read before anything is rendered; and to its own functions, whose names are compared by
    tests/test_render.py."""
    modules = emitted(version)
    own = {node.name for m in modules.values() for node in m.body if hasattr(node, "name")}
    planners = 0
    for module in modules.values():
        for node in ast.walk(module):
            if not isinstance(node, ast.Call) or len(node.args) <= 3:
                continue
            name = ast.unparse(node.func)
            if name.endswith(".plan") and "_cached_module" in name:
                planners += 1
            else:
                assert name in own or name.startswith("partial"), ast.unparse(node)
    assert planners == 1


# -- parameters of others that only one side knows ------------------------------------------------


@pytest.mark.parametrize("shape", ["pair", "upstream-keyword-only"])
def test_a_plan_call_with_a_parameter_of_a_fork_is_refused(shape: str) -> None:
    """Code for a private FlashInfer passes what the released one does not take."""
    data = before(shape)
    end = data.index(b"\n            )", data.index(b"wrapper_paged.plan(")) + 1
    changed = data[:end] + f"                {NEW}=self.{NEW},\n".encode() + data[end:]
    with pytest.raises(DriftError) as caught:
        prepare(FoundTarget(changed, "fork.py", None), shipped(), COPIES)
    (problem,) = caught.value.problems
    assert problem.message == f"plan is called without nothing missing and with {NEW}"
    assert problem.line == line_of(changed, "wrapper_paged.plan(")


def test_emitted_code_makes_no_wrapper() -> None:
    """So that no parameter of its constructor, released or a fork's, can be missing or too much."""
    for module in emitted("0.7.2").values():
        calls = [node for node in ast.walk(module) if isinstance(node, ast.Call)]
        assert "BatchMLAPagedAttentionWrapper" not in {ast.unparse(node.func) for node in calls}


# -- one side is upgraded -----------------------------------------------------------------------


def test_there_and_back_again_is_the_same() -> None:
    """FlashInfer was upgraded, taken back, and upgraded again: what is rendered depends on the one
    at hand alone, and so does what stands in a file that was patched in between."""

    def texts(api: PlanApi) -> list[str]:
        rendered = render(shipped(), api)
        return [render_module(rendered, module, ["x"]) for module in ("plans", "hooks")]

    def patch(data: bytes, api: PlanApi) -> bytes:
        return prepare(FoundTarget(data, "x.py", None), shipped(), api).patched

    assert texts(COPIES) == texts(COPIES) != texts(STAGES)
    first = patch(before("shared-apply"), COPIES)
    second = patch(first, STAGES)
    assert second != first
    assert second == patch(before("shared-apply"), STAGES)
    assert patch(second, COPIES) == first


@pytest.mark.parametrize(
    ("made_for", "installed"), [(COPIES, STAGES), (STAGES, COPIES), (COPIES, COPIES)]
)
def test_a_file_that_was_patched_for_another_flashinfer_is_told(
    made_for: PlanApi, installed: PlanApi
) -> None:
    """FlashInfer was installed without a pin: `mlagen check` says so before a server starts."""
    patched = prepare(
        FoundTarget(before("shared-apply"), "x.py", None), shipped(), made_for
    ).patched
    checked = check_file(FoundTarget(patched, "x.py", None), shipped(), installed)
    told = "\n".join(str(problem) for problem in checked.problems)
    stale = f"FlashInfer was {made_for.version}, is {installed.version}" in told
    assert stale is (made_for is not installed)
    assert checked.exit_code == (1 if stale else 0), told
