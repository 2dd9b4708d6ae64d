"""`fork: anchors:` in variants.yaml: a fork's own names, and how a wrong one is refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mlagen.codegen.check import check_file
from mlagen.codegen.errors import DriftError, Problem, SpecError
from mlagen.codegen.fork import ANCHORS
from mlagen.codegen.patch import header_for, prepare, select
from mlagen.codegen.provenance import remove_regions
from mlagen.codegen.sglang.find import FoundTarget
from mlagen.codegen.spec import Spec, read_spec, shipped_spec
from tests.executed import expected
from tests.executed.runs import NDT
from tests.judge.miniature import COPIES
from tests.splice.shapes import before
from tests.splice.shapes import fork as miniature
from tests.splice.wiring import wiring

from .made import (
    BACKEND,
    DECODE,
    DRAFTS,
    PREFILL,
    assert_plans_are_right,
    fork,
    patched,
    renamed,
    replaced,
    run,
    still_known_as,
    within,
)

#: A fork that renamed all that mlagen looks for.
OTHER_NAMES = {
    "backend-class": "LatentBackend",
    "decode-updater-class": "LatentDecode",
    "prefill-updater-class": "LatentPrefill",
    "draft-backend-class": "LatentDrafts",
    "decode-plan-function": "plan_decode_on_host",
    "update-method": "refresh",
    "plan-method": "plan_now",
    "draft-loop-method": "each_step",
    "decode-updater": "decode_updates",
    "prefill-updater": "prefill_updates",
    "decode-wrapper": "wrapper_of_decode",
    "verify-wrapper": "wrapper_of_verify",
    "extend-wrapper": "wrapper_of_extend",
    "draft-backends": "steps",
    "decode-metadata": "decode_graphs",
    "verify-metadata": "verify_graphs",
}


def spec_of(anchors: dict[str, str], *changes: tuple[str, str]) -> Spec:
    """The shipped variants for a fork with these names; `changes` are made to the text."""
    text = shipped_spec().read_text()
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    lines = "".join(f"    {anchor}: {name}\n" for anchor, name in anchors.items())
    section = f"fork:\n  anchors:\n{lines}\n" if anchors else ""
    return read_spec(
        text.replace("variants:\n", f"{section}variants:\n", 1).encode(), Path("f.yaml")
    )


def problems(data: bytes, spec: Spec) -> tuple[Problem, ...]:
    with pytest.raises(DriftError) as caught:
        prepare(FoundTarget(data, "fork.py", None), spec, COPIES)
    return caught.value.problems


def test_every_anchor_is_overridden_here() -> None:
    assert set(OTHER_NAMES) == set(ANCHORS)


def test_a_fork_that_renamed_everything() -> None:
    """Executed: the emitted lines have the fork's names, and the plans are right."""
    classes = {BACKEND: "LatentBackend", DRAFTS: "LatentDrafts"}
    words = {a.default: OTHER_NAMES[a.name] for a in ANCHORS.values() if a.default}
    harness = ("decode_wrapper", "prefill_wrapper_verify", "prefill_wrapper_paged", "attn_backends")
    kept = {word: words.pop(word) for word in harness}
    updates = words.pop("update")
    data = fork(
        renamed(**words),
        # `update` is a method of dictionaries too.
        within("LatentDecode", replaced(r"def update\(", f"def {updates}(")),
        within("LatentPrefill", replaced(r"def update\(", f"def {updates}(")),
        replaced(r"(_updates)\.update\(", rf"\1.{updates}(", None),
        renamed(
            prefill_cuda_graph_metadata="verify_graphs", decode_cuda_graph_metadata="decode_graphs"
        ),
        *(replaced(rf"self\.{old}\b", f"self.{new}", None) for old, new in kept.items()),
        still_known_as(**classes),
        # What the harness asks for by SGLang's name.
        lambda source: source + PROPERTIES,
    )
    spec = spec_of(OTHER_NAMES)
    text = patched(data, spec)
    assert remove_regions(text) == data
    assert_plans_are_right(run(text))
    # Without the overrides it is refused, for the first name that is not there.
    assert "looked for class FlashInferMLAAttnBackend" in str(problems(data, spec_of({}))[0])


PROPERTIES = """
LatentBackend.decode_cuda_graph_metadata = property(lambda self: self.decode_graphs)
LatentBackend.decode_wrapper = property(lambda self: self.wrapper_of_decode)
LatentBackend.prefill_wrapper_verify = property(lambda self: self.wrapper_of_verify)
LatentBackend.prefill_wrapper_paged = property(lambda self: self.wrapper_of_extend)
LatentDrafts.attn_backends = property(lambda self: self.steps)
"""


def test_a_dictionary_chooses_among_several() -> None:
    """Two captured verify wrappers: ambiguous, until the fork says which is planned."""
    second = (
        "                prefill_wrapper_paged=self.graphs[bs],\n",
        "                prefill_wrapper_paged=self.chains[bs],\n            )\n"
        "            self.indices_updater_prefill.update(\n"
        "                rows[:bs],\n                seq_lens[:bs],\n"
        "                prefix_lens=None,\n"
        "                prefill_wrapper_paged=self.trees[bs],\n",
    )
    data = miniature("shared-apply", second)
    told = problems(data, spec_of({}))
    assert any("looked for exactly one call" in problem.message for problem in told)
    text = prepare(
        FoundTarget(data, "fork.py", None), spec_of({"verify-metadata": "trees"}), COPIES
    ).patched
    assert b"mlagen_request_verify(\n                    self.trees[bs]," in text
    wiring(text)


def from_a_dictionary(form: str) -> bytes:
    captured = "prefill_wrapper_paged=self.graphs[bs]"
    return miniature("shared-apply", (captured, f"prefill_wrapper_paged={form}"))


@pytest.mark.parametrize("form", ["self.kept.get(bs)", "self.kept[bs, 1]", "self.kept[bs].wrapper"])
def test_a_dictionary_in_any_form(form: str) -> None:
    """An override finds a wrapper that is got out of its dictionary in another way."""
    data = from_a_dictionary(form)
    text = prepare(
        FoundTarget(data, "fork.py", None), spec_of({"verify-metadata": "kept"}), COPIES
    ).patched
    assert f"mlagen_request_verify(\n                    {form},".encode() in text
    assert remove_regions(text) == data


def test_attributes_that_were_swapped() -> None:
    """Each name in the emitted lines is the fork's, also where it is SGLang's for another."""
    data = before("shared-apply").replace(b"self.prefill_wrapper_verify", b"self.swapped")
    data = data.replace(b"self.prefill_wrapper_paged", b"self.prefill_wrapper_verify")
    data = data.replace(b"self.swapped", b"self.prefill_wrapper_paged")
    data = data.replace(
        b"self.graphs[bs],\n                spec", b"self.decode_wrapper[bs],\n spec"
    )
    data = data.replace(b"wrapper_paged=self.graphs[bs]", b"wrapper_paged=self.decode_wrapper[bs]")
    data = data.replace(b"decode_wrapper=self.decode_wrapper,", b"decode_wrapper=self.eager,")
    anchors = {
        "verify-wrapper": "prefill_wrapper_paged",
        "extend-wrapper": "prefill_wrapper_verify",
        "decode-wrapper": "eager",
    }
    text = prepare(FoundTarget(data, "fork.py", None), spec_of(anchors), COPIES).patched.decode()
    for request, wrapper in (
        ("verify_eager", "prefill_wrapper_paged"),
        ("extend", "prefill_wrapper_verify"),
        ("draft_eager", "eager"),
        ("verify", "decode_wrapper[bs]"),  # an expression of the fork's own stays as it is
    ):
        assert re.search(rf"= mlagen_request_{request}\(\n +self\.{re.escape(wrapper)},", text)


@pytest.mark.parametrize("anchor", ANCHORS)
def test_an_override_that_names_nothing_is_refused_where_it_stands(anchor: str) -> None:
    spec = spec_of({anchor: "nowhere_to_be_found"})
    told = problems(before("shared-apply"), spec)
    line, column = spec.places[f"fork: {anchor}"]
    assert all((p.path, p.line, p.column) == ("f.yaml", line, column) for p in told)
    written = shipped_spec().read_text()[: shipped_spec().read_text().index("variants:\n")]
    assert line == written.count("\n") + 3
    assert {problem.code for problem in told} == {"anchor-not-there"}
    assert all("nowhere_to_be_found" in problem.message for problem in told)
    assert all(f"fork: anchors: {anchor}: looked for " in problem.message for problem in told)


def test_the_nearest_name_is_told() -> None:
    (told,) = problems(before("pair"), spec_of({"backend-class": "FlashInferMLAAttnBackends"}))
    assert (
        str(told)
        .splitlines()[0]
        .endswith(
            "looked for class FlashInferMLAAttnBackends in fork.py, found none; nearest is "
            "FlashInferMLAAttnBackend"
        )
    )


def test_an_override_that_names_two_is_refused() -> None:
    data = before("pair") + b"\n\nclass Twice:\n    pass\n\n\nclass Twice:\n    pass\n"
    (told,) = problems(data, spec_of({"draft-backend-class": "Twice"}))
    assert "looked for exactly one class Twice in fork.py, found 2 (lines " in told.message


def test_an_override_is_told_for_each_class_that_lacks_it() -> None:
    head = "self.req_to_token = runner.req_to_token_pool.req_to_token\n\n    def "
    data = miniature("pair", (f"{head}update(", f"{head}refresh("))
    (told,) = problems(data, spec_of({"update-method": "refresh"}))
    assert f"looked for method refresh in {PREFILL} of fork.py" in told.message
    assert DECODE not in told.message


def test_overrides_that_name_the_wrong_thing_are_refused_by_the_site() -> None:
    """What is there and not what mlagen edits: the edit finds no match, and says so."""
    told = problems(before("shared-apply"), spec_of({"verify-metadata": "prefill_wrapper_verify"}))
    assert told[0].message.startswith(
        "looked for call of indices_updater_prefill.update for a captured target-verify wrapper "
        "from self.prefill_wrapper_verify, found none"
    )


@pytest.mark.parametrize("gone", ["target-verify", "draft-decode"])
def test_an_override_that_no_variant_needs_is_refused(gone: str) -> None:
    anchor = {"target-verify": "verify-metadata", "draft-decode": "decode-wrapper"}[gone]
    name = {"target-verify": "verify", "draft-decode": "draft-decode"}[gone]
    text = shipped_spec().read_text()
    text = re.sub(rf"(?ms)^  {name}:\n.*?(?=^  \S)", "", text)
    text = text.replace("variants:\n", f"fork:\n  anchors:\n    {anchor}: mine\n\nvariants:\n", 1)
    with pytest.raises(SpecError) as caught:
        read_spec(text.encode(), Path("f.yaml"))
    (told,) = caught.value.problems
    assert told.code == "anchor-unused"
    assert text.splitlines()[told.line - 1][told.column - 1 :] == "mine"


def test_only_some_variants_of_a_fork() -> None:
    """--only leaves an override without its variant: that is no mistake of the file."""
    data = from_a_dictionary("self.kept.get(bs)")
    spec = select(spec_of({"verify-metadata": "kept"}), ["decode"])
    assert prepare(FoundTarget(data, "fork.py", None), spec, COPIES).changes


def test_overrides_are_part_of_the_digest() -> None:
    plain, other = spec_of({}), spec_of({"verify-metadata": "kept"})
    assert header_for(plain, COPIES).spec_digest != header_for(other, COPIES).spec_digest
    assert other.anchors == {"verify-metadata": "kept"}


def test_a_patched_fork_is_checked() -> None:
    """The judges know SGLang's names; what they find stands in the fork's own lines."""
    anchors = {"backend-class": "LatentBackend", "decode-updater": "latent_decode"}
    source = before("shared-apply").decode()
    for name, value in anchors.items():
        source = source.replace(ANCHORS[name].default, value)
    spec = spec_of(anchors)
    found = FoundTarget(source.encode(), "fork.py", None)
    unpatched = check_file(found, spec, COPIES)
    released = check_file(FoundTarget(before("shared-apply"), "fork.py", None), spec_of({}), COPIES)
    assert [(p.line, p.code) for p in unpatched.problems] == [
        (p.line, p.code) for p in released.problems
    ]
    text = prepare(found, spec, COPIES).patched
    assert check_file(FoundTarget(text, "fork.py", None), spec, COPIES).exit_code == 0
    # Without the overrides nothing is taken for right.
    with pytest.raises(DriftError, match="looked for `class FlashInferMLAAttnBackend`"):
        check_file(FoundTarget(text, "fork.py", None), spec_of({}), COPIES)


# -- formulas -----------------------------------------------------------------------------------

#: A fork whose verify attends to two tokens more than SGLang's, behind each prefix.
SINKS = replaced(
    r"( {16})seq_lens\[:bs\],\n {16}seq_lens_sum,\n(?= {16}prefix)",
    r"\1seq_lens[:bs] + 2,\n\1seq_lens_sum + 2 * bs,\n",
)
FORMULA = ("kv_len: seq_lens + draft_token_num\n", "kv_len: seq_lens + 2 + draft_token_num\n")


def test_a_formula_of_a_fork(caplog: pytest.LogCaptureFixture) -> None:
    """Checked at capture against what the device was planned with: a wrong one keeps FlashInfer's
    plan, with its waits; the fork's own is planned without."""
    data = fork(SINKS)
    lens = [10, 20, 30]
    right = expected.verify([n + 2 for n in (*lens, 1)], NDT)
    for spec, planned in ((spec_of({}), False), (spec_of({}, FORMULA), True)):
        caplog.clear()
        s = run(patched(data, spec))
        s.capture_verify(4, NDT)
        done = s.replay_verify(lens, NDT, bs=4)
        assert done.record.arrays == right
        assert done.record.stock is not planned
        assert bool(done.waits) is not planned
        assert ("by the formula of variants.yaml" in caplog.text) is not planned
