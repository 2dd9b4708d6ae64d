"""Forks that are refused: each for its own reason, at its line, and nothing else is said.

Miniatures: the shapes of tests/splice, changed in one way. tests/test_splice.py has the forks whose
single lines differ; here are those that are built differently.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from mlagen.codegen.errors import DriftError
from mlagen.codegen.patch import prepare, select
from mlagen.codegen.sglang.find import FoundTarget
from tests.judge.miniature import COPIES
from tests.splice.shapes import before, fork, line_of, spec
from tests.splice.wiring import wiring

BACKEND = "FlashInferMLAAttnBackend"


@dataclass(frozen=True)
class Refusal:
    """A fork, the text at whose line it is refused, and what the one reason begins with."""

    make: Callable[[], bytes]
    at: str
    code: str
    reason: str


def changed(shape: str, *replacements: tuple[str, str]) -> Callable[[], bytes]:
    return lambda: fork(shape, *replacements)


def mixin(owner: str, method: str, others: str = "") -> Callable[[], bytes]:
    """The shared apply with a method moved to a class that `owner` derives from, and more
    classes."""

    def make() -> bytes:
        source = before("shared-apply").decode()
        at = source.index(f"class {owner}")
        start = source.index(f"    def {method}(", at)
        end = source.index("\n\n\n", start) + 1
        rest = source[:start].rstrip() + "\n" + source[end:]
        rest = rest.replace(f"class {owner}:", f"class {owner}(Planning):")
        at = rest.index(f"class {owner}")
        text = f"class Planning:\n{source[start:end]}\n\n{others}"
        return (rest[:at] + text + rest[at:]).encode()

    return make


def with_match() -> bytes:
    """The pair whose replay tells the modes apart by `match`."""
    source = before("pair").decode()
    start = source.index("    def replay_graph")
    end = source.index("class FlashInferMLAIndicesUpdaterDecode")
    body = source[start:end]
    body = body.replace("        if forward_mode.is_decode_or_idle():", "        case Mode.DECODE:")
    body = body.replace(
        "        elif forward_mode.is_target_verify():", "        case Mode.VERIFY:"
    )
    body = body.replace("        elif forward_mode.is_draft_extend():", "        case Mode.EXTEND:")
    body = body.replace("        else:\n", "        case _:\n")
    head, rest = body.split("        case Mode.DECODE:", 1)
    rest = "\n".join(
        f"    {line}" if line else line for line in ("        case Mode.DECODE:" + rest).split("\n")
    ).rstrip()
    return f"{source[:start]}{head}        match forward_mode:\n{rest}\n\n\n{source[end:]}".encode()


DERIVED = f"""\
class Other({BACKEND}):
    def capture_graph(self, bs, rows):
        self.graphs[bs] = None


class FlashInferMLAIndicesUpdaterDecode:"""

NARROW = """\
def counted(method):
    def inner(self, rows, seq_lens, prefix_lens, prefill_wrapper_paged, use_ragged, spec_info):
        return method(self, rows, seq_lens, prefix_lens, prefill_wrapper_paged, use_ragged)

    return inner


class FlashInferMLAIndicesUpdaterPrefill:
    @counted
    def update(
"""

REFUSED: dict[str, Refusal] = {
    "the modes are told apart by match": Refusal(
        with_match,
        f"class {BACKEND}",
        "anchor-missing",
        "looked for call of indices_updater_decode.update with init_metadata_replay=True, found "
        "none; indices_updater_decode.update is called in lines",
    ),
    "the update's result is used": Refusal(
        lambda: before("shared-apply").replace(
            b"            self.indices_updater_prefill.update(\n                rows[:bs]",
            b"            return self.indices_updater_prefill.update(\n                rows[:bs]",
        ),
        f"class {BACKEND}",
        "anchor-missing",
        "looked for call of indices_updater_prefill.update for a captured target-verify wrapper, "
        "found none; indices_updater_prefill.update is called in lines",
    ),
    "verify stands behind a not": Refusal(
        lambda: before("shared-apply").replace(
            b"elif forward_mode.is_draft_extend() or forward_mode.is_target_verify():\n"
            b"            self",
            b"elif not forward_mode.is_target_verify():\n            self",
        ),
        f"class {BACKEND}",
        "anchor-missing",
        "looked for call of indices_updater_prefill.update for a captured target-verify wrapper",
    ),
    "a captured wrapper comes out of a method": Refusal(
        lambda: before("shared-apply").replace(
            b"prefill_wrapper_paged=self.graphs[bs]", b"prefill_wrapper_paged=self.graph_of(bs)"
        ),
        f"class {BACKEND}",
        "anchor-missing",
        "looked for call of indices_updater_prefill.update for a captured target-verify wrapper",
    ),
    "another class has the mixin too": Refusal(
        mixin(BACKEND, "plan_graph", "class Elsewhere(Planning):\n    pass\n\n\n"),
        "class Elsewhere",
        "anchor-changed",
        f"Elsewhere and {BACKEND} both derive from Planning, whose methods plan",
    ),
    "the updaters share a base that plans": Refusal(
        lambda: mixin("FlashInferMLAIndicesUpdaterPrefill", "call_begin_forward")().replace(
            b"class FlashInferMLAIndicesUpdaterDecode:",
            b"class FlashInferMLAIndicesUpdaterDecode(Planning):",
        ),
        "*",
        "anchor-changed",
        "FlashInferMLAIndicesUpdater",
    ),
    "a decorator that passes no keyword on": Refusal(
        changed(
            "shared-apply",
            ("class FlashInferMLAIndicesUpdaterPrefill:\n    def update(\n", NARROW),
        ),
        "    @counted",
        "anchor-changed",
        "update is decorated by counted, whose inner passes no other keyword on",
    ),
    "a subclass replaces the capture alone": Refusal(
        changed("pair", ("class FlashInferMLAIndicesUpdaterDecode:", DERIVED)),
        "    def capture_graph(self, bs, rows)",
        "anchor-changed",
        "Other replaces capture_graph without calling it and keeps replay_graph, which would find "
        "graphs that mlagen has not captured",
    ),
    "verify over pages of many tokens": Refusal(
        lambda: before("pair").replace(
            b"                1,\n                True,",
            b"                self.page_size,\n                True,",
        ),
        "*",
        "page-size",
        "eager ",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_fork_that_is_refused(name: str) -> None:
    refusal = REFUSED[name]
    data = refusal.make()
    compile(data, "fork.py", "exec")
    with pytest.raises(DriftError) as caught:
        prepare(FoundTarget(data, "fork.py", None), spec(), COPIES)
    assert caught.value.exit_code == 4
    told = [p for p in caught.value.problems if p.message.startswith(refusal.reason)]
    assert told, [str(p) for p in caught.value.problems]
    assert {problem.code for problem in told} == {refusal.code}
    if refusal.at != "*":
        assert {problem.line for problem in told} == {line_of(data, refusal.at)}
    assert all(problem.line for problem in told)


ARGUMENTS = """\
            self.indices_updater_prefill.update(
                rows,
                seq_lens,
                prefix_lens=None,
                prefill_wrapper_paged={},
"""
LOOKED_UP = (
    ARGUMENTS.format("verify_wrapper"),
    "            self.graphs[bs] = verify_wrapper\n            kept = self.graphs[bs]\n"
    + ARGUMENTS.format("kept"),
)


def test_a_capture_that_looks_its_wrapper_up_is_no_replay() -> None:
    """Two calls have a wrapper out of the dictionary: the replay is the one that takes it there."""
    data = fork("pair", LOOKED_UP)
    patched = prepare(FoundTarget(data, "fork.py", None), spec(), COPIES).patched
    capture = patched.index(b"            mlagen_capture_verify(\n                kept,\n")
    replay = patched.index(b"mlagen_request_verify(\n                self.graphs[bs],\n")
    assert line_of(patched, "def replay_graph") in range(
        patched[:capture].count(b"\n"), patched[:replay].count(b"\n")
    )
    wiring(patched)


def test_a_call_that_cannot_be_edited_is_named() -> None:
    """Where nothing is found, the reader is told which calls there are, and why not those."""
    data = REFUSED["the update's result is used"].make()
    with pytest.raises(DriftError) as caught:
        prepare(FoundTarget(data, "fork.py", None), select(spec(), ["verify"]), COPIES)
    line = line_of(data, "return self.indices_updater_prefill.update(")
    (problem,) = caught.value.problems
    assert problem.message.endswith(f", of which {line} are no plain statements of {BACKEND}")


def test_what_is_in_the_way_of_one_variant_leaves_the_others() -> None:
    data = REFUSED["verify over pages of many tokens"].make()
    patched = prepare(
        FoundTarget(data, "fork.py", None), select(spec(), ["decode", "draft-extend"]), COPIES
    )
    assert patched.changes
