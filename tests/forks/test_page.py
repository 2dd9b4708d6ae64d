"""docs/forks.md: its example is a fork's variants.yaml that works, its table has every anchor.

To write the table anew, set MLAGEN_UPDATE_SNAPSHOTS=1.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from mlagen.codegen.fork import ANCHORS
from mlagen.codegen.patch import prepare
from mlagen.codegen.provenance import remove_regions
from mlagen.codegen.sglang.find import FoundTarget
from mlagen.codegen.spec import read_spec, shipped_spec
from tests.judge.miniature import COPIES
from tests.splice.shapes import before

PAGE = Path(__file__).parents[2] / "docs" / "forks.md"


def part(name: str) -> str:
    """What stands between the marks of `name`, without a fence."""
    text = PAGE.read_text(encoding="utf-8")
    found = re.search(rf"<!-- {name} -->\n(.*?)<!-- /{name} -->", text, re.DOTALL)
    assert found is not None
    return re.sub(r"(?m)^```.*\n", "", found[1])


def test_the_table_has_every_anchor() -> None:
    rows = "".join(
        f"| `{anchor.name}` | {anchor.kind}: {anchor.meaning} | {anchor.told} |\n"
        for anchor in ANCHORS.values()
    )
    table = f"| anchor | what it names | without an override |\n| --- | --- | --- |\n{rows}"
    if os.environ.get("MLAGEN_UPDATE_SNAPSHOTS") == "1":
        text = PAGE.read_text(encoding="utf-8").replace(part("table"), table)
        PAGE.write_text(text, encoding="utf-8")
    assert part("table") == table


def test_the_example_patches_such_a_fork() -> None:
    text = shipped_spec().read_text()
    formula = "    kv_len: seq_lens + draft_token_num\n"
    assert text.count(formula) == 1
    text = text.replace(formula, part("formula"))
    text = text.replace("variants:\n", f"{part('anchors')}\nvariants:\n", 1)
    spec = read_spec(text.encode(), Path("variants.yaml"))
    assert spec.anchors["backend-class"] == "LatentAttnBackend"

    data = before("shared-apply").decode()
    data = data.replace("FlashInferMLAAttnBackend", "LatentAttnBackend")
    data = data.replace("indices_updater_decode", "decode_indices")
    data = data.replace(
        "prefill_wrapper_paged=self.graphs[bs]", "prefill_wrapper_paged=self.tree_graphs.get(bs)"
    )
    patched = prepare(FoundTarget(data.encode(), "fork.py", None), spec, COPIES).patched
    assert b"return seq_lens + (2 + draft_token_num)" in patched
    assert b"self.decode_indices.num_local_heads" in patched
    assert b"indices_updater_decode" not in patched
    assert remove_regions(patched) == data.encode()
