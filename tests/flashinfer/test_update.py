"""The public update of a captured graph's plan: its form is read, and another one is refused."""

from __future__ import annotations

import pytest

from mlagen.codegen.errors import DriftError
from mlagen.codegen.flashinfer.api import PlanApi
from mlagen.codegen.flashinfer.read import explain, read_plan_api
from tests.flashinfer.miniatures import (
    METADATA,
    UPDATE,
    Files,
    backend_era,
    source,
    with_header,
    with_update,
    wrapper_era,
)

CSR = "qo_indptr, kv_indptr, kv_indices, kv_len_arr"


def read(files: Files) -> PlanApi:
    return read_plan_api(source(files))


@pytest.mark.parametrize("files", [None, backend_era()], ids=["wrapper", "back-end object"])
def test_host_arrays_are_given_as_the_arrays(files: Files | None) -> None:
    api = read(with_update(files))
    assert api.update is not None
    assert api.update.arrays == (
        ("qo_indptr", "request.qo_indptr"),
        ("kv_indptr", "request.kv_indptr"),
        ("kv_indices", "arrays.kv_indices"),
        ("kv_len_arr", "request.kv_len"),
    )
    assert (api.public_update, api.update.enabled) == ("update_cuda_graph_plan", "_can_update")
    assert dict(explain(api))["public update"] == (
        f"update_cuda_graph_plan(metadata=MLAPlanMetadata.csr({CSR}))"
    )


@pytest.mark.parametrize("ending", ["_host", "_cpu"])
@pytest.mark.parametrize("needed", ["{0}", "{0}=None", "*, {0}=None"])
def test_host_arrays_beside_those_of_the_device(ending: str, needed: str) -> None:
    names = [f"{name}{ending}" for name in ("qo_indptr", "kv_indptr", "kv_len_arr")]
    more = ", ".join(needed.replace("*, ", "").format(name) for name in names)
    more = f"*, {more}" if needed.startswith("*") else more
    api = read(with_update(metadata=METADATA.replace(f"{CSR})", f"{CSR}, {more})", 1)))
    assert api.update is not None
    given = dict(api.update.arrays)
    assert given["qo_indptr"] == "arrays.qo_indptr"
    assert given["kv_len_arr"] == "arrays.lengths()"
    assert [given[name] for name in names] == [
        "request.qo_indptr",
        "request.kv_indptr",
        "request.kv_len",
    ]


def test_none_in_other_flashinfers() -> None:
    for files in (wrapper_era(), backend_era()):
        api = read(files)
        assert api.update is api.public_update is None
        assert dict(explain(api))["public update"] == "none"


TAKES = "update_cuda_graph_plan takes (metadata"
REFUSED: dict[str, tuple[Files, str]] = {
    "another argument": (
        with_update(update=UPDATE.replace("metadata):", "metadata, stream):")),
        f"{TAKES}, stream): nothing is known to give for stream",
    ),
    "flat arrays": (
        with_update(update=UPDATE.replace("*, metadata)", "qo_indptr, kv_indptr)")),
        "update_cuda_graph_plan takes (qo_indptr, kv_indptr): metadata is not there",
    ),
    "positions alone": (
        with_update(update=UPDATE.replace("*, metadata)", "metadata, /)")),
        f"{TAKES}): not by keyword",
    ),
    "no option": (
        with_update({**wrapper_era(path="flashinfer/mla/_core.py")}),
        "__init__ keeps no enable_cuda_graph_plan_update in an attribute",
    ),
    "no metadata": (with_update(metadata=""), "MLAPlanMetadata.csr is not there"),
    "metadata of another form": (
        with_update(metadata=METADATA.replace("kv_len_arr)", "seq_lens)")),
        "MLAPlanMetadata.csr takes (qo_indptr, kv_indptr, kv_indices, seq_lens): kv_len_arr is not "
        "there",
    ),
    "metadata of more": (
        with_update(metadata=METADATA.replace(f"{CSR})", f"{CSR}, block_tables)", 1)),
        "nothing is known to give for block_tables",
    ),
    "a host copy of one": (
        with_update(metadata=METADATA.replace(f"{CSR})", f"{CSR}, qo_indptr_host=None)", 1)),
        "MLAPlanMetadata.csr takes host copies of some of its arrays only",
    ),
}
REFUSED["no option"][0]["flashinfer/mla/_core.py"] = REFUSED["no option"][0][
    "flashinfer/mla/_core.py"
].replace("self._can_update = bool(", "check(")


@pytest.mark.parametrize("kind", REFUSED)
def test_another_form_is_refused(kind: str) -> None:
    files, reason = REFUSED[kind]
    with pytest.raises(DriftError) as caught:
        read(files)
    first, *others = caught.value.problems
    assert first.code == "update-unknown"
    assert first.line > 0
    assert reason in first.message
    assert f"expected update_cuda_graph_plan(metadata=...) with MLAPlanMetadata.csr({CSR})" in (
        first.message
    )
    assert [problem.code for problem in others] == ["nearest-era"]
    assert "the private call is used" in others[0].hint


@pytest.mark.parametrize("kind", REFUSED)
def test_another_form_is_passed_over_where_that_is_allowed(kind: str) -> None:
    files, _ = REFUSED[kind]
    api = read_plan_api(source(files), allow_unknown=True)
    assert api.update is None
    [sentence] = api.derived
    assert sentence.startswith("the public update of a captured graph is not the one that mlagen")
    assert sentence.endswith("; the private call is used")
    assert dict(explain(api))["public update"] == "update_cuda_graph_plan, not used"
    assert api.call.derived == ()


def test_it_is_part_of_the_digest() -> None:
    files = with_update(with_header(backend_era()))
    changed = {**files}
    changed["flashinfer/mla/_batch/_wrapper.py"] += "# one more line\n"
    assert read(files).digest != read(changed).digest
