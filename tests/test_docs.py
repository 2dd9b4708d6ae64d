"""Pages that show what mlagen writes are what it writes."""

from __future__ import annotations

import os
from pathlib import Path

from mlagen.codegen.flashinfer.find import find_flashinfer
from mlagen.codegen.flashinfer.read import read_plan_api
from mlagen.codegen.patch import prepare
from mlagen.codegen.provenance import as_text, find_regions
from mlagen.codegen.sglang.find import find_target
from mlagen.codegen.spec import load_spec, shipped_spec

PAGE = Path(__file__).resolve().parents[1] / "docs" / "patch-0.5.17.md"
HEAD = """\
# What a patch adds: SGLang 0.5.17, FlashInfer 0.6.17

All lines that `mlagen patch sglang==0.5.17 --flashinfer 0.6.17` adds, in the order of the file.
Lines of SGLang's own that a region replaced stay in it as comments; they are left out here, and so
are the marks. The number is the line of the patched file.

This page is made by `MLAGEN_UPDATE_SNAPSHOTS=1 pytest tests/test_docs.py`, and a test holds it to
what mlagen writes.
"""


def _page() -> str:
    spec = load_spec(shipped_spec())
    api = read_plan_api(find_flashinfer("0.6.17"))
    patch = prepare(find_target("sglang==0.5.17"), spec, api)
    parts = [HEAD]
    for region in find_regions(as_text(patch.patched)):
        if not region.emitted:
            continue
        strip = len(region.indent)
        lines = [line[strip:] for line in region.emitted]
        while lines and not lines[-1]:
            lines.pop()
        replaced = f", instead of {len(region.replaced)} lines" if region.replaced else ""
        title = f"## {region.site} (line {region.start_line}{replaced})"
        parts.append("\n".join([title, "", "```python", *lines, "```", ""]))
    return "\n".join(parts)


def test_the_page_of_one_whole_patch_is_current() -> None:
    page = _page()
    if os.environ.get("MLAGEN_UPDATE_SNAPSHOTS"):
        PAGE.write_text(page, encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == page
