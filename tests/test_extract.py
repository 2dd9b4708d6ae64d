"""The functions of a patched file, alone: the text that stands there, in modules that import."""

from __future__ import annotations

import ast
import re

import pytest

from mlagen.codegen.errors import EditedError, UsageError
from mlagen.codegen.extract import functions_of
from mlagen.codegen.flashinfer.find import find_flashinfer
from mlagen.codegen.flashinfer.read import read_plan_api
from mlagen.codegen.names import bound_by, unbound_names
from mlagen.codegen.patch import Patch, prepare
from mlagen.codegen.sglang.find import FoundTarget
from mlagen.codegen.spec import load_spec, shipped_spec
from tests.cli_workspace import FILE, FLASHINFER, ORIGINAL, patched
from tests.flashinfer import miniatures
from tests.releases import sglang_file


def made_of(data: bytes, flashinfer: str | None) -> Patch:
    source = (
        find_flashinfer(flashinfer) if flashinfer else miniatures.source(FLASHINFER, version=None)
    )
    return prepare(FoundTarget(data, FILE, None), load_spec(shipped_spec()), read_plan_api(source))


@pytest.mark.parametrize(
    ("sglang", "flashinfer"), [(None, None), ("0.5.17", "0.6.17"), ("0.5.18", "0.7.2")]
)
def test_they_are_the_rendered_fragments_and_nothing_is_missing(
    sglang: str | None, flashinfer: str | None
) -> None:
    made = made_of(sglang_file(sglang) if sglang else ORIGINAL, flashinfer)
    files = functions_of(made.patched, FILE)
    plans, hooks = files["plans.py"].decode(), files["hooks.py"].decode()
    fragments = made.rendered.needed_by(made.target.calls)
    tree = ast.parse(plans)

    assert set(files) == {"plans.py", "hooks.py"}
    assert plans.endswith("\n\n\n" + "\n\n\n".join(f.text for f in fragments) + "\n")
    defined = [name for fragment in fragments for name in fragment.defines]
    bound = [name for node in tree.body for name in bound_by(node)]
    assert bound[-len(defined) :] == defined
    assert unbound_names(tree) == {}
    (exports,) = ast.parse(hooks).body
    assert isinstance(exports, ast.ImportFrom)
    assert [alias.name for alias in exports.names] == defined


def test_the_text_is_that_of_the_file() -> None:
    """Not rendered again: other line ends and an older mlagen's words stay."""
    data = patched().replace(b"\n", b"\r\n")

    assert functions_of(data, FILE) == functions_of(patched(), FILE)


def test_a_file_without_functions() -> None:
    with pytest.raises(UsageError, match="not-patched"):
        functions_of(ORIGINAL, FILE)


def test_functions_that_someone_edited() -> None:
    data = re.sub(rb"(class MlagenPlanError\()RuntimeError", rb"\1ValueError", patched())

    with pytest.raises(EditedError, match="edited-region"):
        functions_of(data, FILE)
