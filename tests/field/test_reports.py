"""Every report has a test of its kind, or a reason; docs/field-reports.md says which.

To write the page anew, set MLAGEN_UPDATE_SNAPSHOTS=1, and read the difference.
"""

from __future__ import annotations

import ast
import os
from functools import cache
from pathlib import Path

import pytest

from .reports import REPORTS, Report

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "field-reports.md"
HEAD = """\
# Reports from the field

What people reported in public threads of SGLang, FlashInfer and others who plan attention on the
host, and the tests of each kind of fault. Tests in `generated/tests/` and `tests/gpu/` need a GPU.
Made from `tests/field/reports.py`, which is the place to add one.
"""


@cache
def functions(path: str) -> dict[str, frozenset[str]]:
    """The test functions of a file, each with the strings in its file, among which its cases'
    names are."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    strings = frozenset(
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
    return {node.name: strings for node in tree.body if isinstance(node, ast.FunctionDef)}


def page() -> str:
    parts = [HEAD]
    area = ""
    for report in REPORTS:
        if report.area != area:
            area = report.area
            parts.append(f"## {area}\n")
        parts.append(_told(report))
    return "\n".join(parts)


def _told(report: Report) -> str:
    links = []
    for thread in report.threads:
        repository, number = thread.split("#")
        name = f"{repository.partition('/')[2]}#{number}"
        links.append(f"[{name}](https://github.com/{repository}/issues/{number})")
    lines = [f"**{report.what[0].upper()}{report.what[1:]}.** {', '.join(links)}"]
    if report.reason:
        lines += ["", report.reason]
    if report.tests:
        lines += ["", *(f"- `{test}`" for test in report.tests)]
    return "\n".join(lines) + "\n"


def test_the_page_is_current() -> None:
    if os.environ.get("MLAGEN_UPDATE_SNAPSHOTS") == "1":
        PAGE.write_text(page(), encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == page()


@pytest.mark.parametrize("report", REPORTS, ids=lambda report: report.what[:60])
def test_a_report_has_its_tests(report: Report) -> None:
    assert report.tests or report.reason
    for test in report.tests:
        path, _, name = test.partition("::")
        name, _, case = name.partition("[")
        assert name in functions(path), test
        assert not case or case.removesuffix("]") in functions(path)[name], test
    for thread in report.threads:
        owner, number = thread.split("#")
        assert owner.count("/") == 1
        assert number.isdecimal()


def test_no_report_is_told_twice() -> None:
    told = [(report.area, thread) for report in REPORTS for thread in report.threads]
    assert len(set(told)) == len(told)
