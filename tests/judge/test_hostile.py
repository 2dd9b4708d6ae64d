"""What is no back end, what mlagen wrote, and sources that are odd on purpose."""

from __future__ import annotations

import pytest

from mlagen.codegen.errors import DriftError, EditedError, Problem
from mlagen.codegen.judge import host_syncs, judge
from mlagen.codegen.judge.source import by_line
from mlagen.codegen.provenance import Edit, apply_edits
from tests.judge.miniature import CLEAN, COPIES, STAGES, changed

D2 = "            lens = seq_lens_cpu[:bs].to(torch.int32)\n"
WITH_D2 = changed((" + self.step", ""))


def line_of(source: bytes, text: str) -> int:
    assert source.count(text.encode()) == 1
    return 1 + source[: source.index(text.encode())].count(b"\n")


@pytest.mark.parametrize(
    ("source", "line"),
    [
        (b"class FlashInferMLAAttnBackend:\n    def broken(:\n", 2),
        (b"x = 1\n\x00\n", 0),
        (b"# -*- coding: no-such-codec -*-\n", 0),
        (b"x = '\xff'\n", None),
        (b"x = " + b"(" * 5000 + b")" * 5000, None),
        (b"x = " + b"-" * 200000 + b"1", None),
    ],
    ids=["syntax", "nul", "codec", "not utf-8", "parentheses", "signs"],
)
def test_what_does_not_parse_is_refused_with_its_line(source: bytes, line: int | None) -> None:
    for read in (lambda: judge(source, "a/b.py", None), lambda: host_syncs(source, "a/b.py")):
        with pytest.raises(DriftError) as caught:
            read()
        (problem,) = caught.value.problems
        assert problem.path == "a/b.py"
        assert problem.code == "does-not-parse"
        assert caught.value.exit_code == 4
        if line:
            assert problem.line == line


@pytest.mark.parametrize(
    ("source", "found"),
    [
        (b"", "no class at all"),
        (b"class Other:\n    pass\n", "Other"),
        (b"def f():\n    class FlashInferMLAAttnBackend:\n        pass\n", "no class at all"),
        (b"# class FlashInferMLAAttnBackend\n", "no class at all"),
    ],
)
def test_what_is_not_sglang_s_is_refused(source: bytes, found: str) -> None:
    with pytest.raises(DriftError) as caught:
        judge(source, "f.py", COPIES)
    (problem,) = caught.value.problems
    assert problem.code == "not-sglang"
    assert "class FlashInferMLAAttnBackend" in problem.message
    assert problem.message.endswith(found)


@pytest.mark.parametrize(
    "rewrite",
    [
        lambda data: data.replace(b"\n", b"\r\n"),
        lambda data: b"\xef\xbb\xbf" + data,
        lambda data: data.replace(b"    ", b"\t"),
        lambda data: data.rstrip(b"\n"),
        lambda data: b"# -*- coding: latin-1 -*-\n# \xe9\n" + data,
        lambda data: data.replace(b"import torch\n", b"import torch\n\x0c\n"),
    ],
    ids=["crlf", "bom", "tabs", "no final newline", "latin-1", "form feed"],
)
def test_bytes_of_any_kind(rewrite: object) -> None:
    assert callable(rewrite)
    assert judge(rewrite(CLEAN.encode()), "f.py", COPIES) == ()
    data = rewrite(WITH_D2)
    (problem,) = judge(data, "f.py", COPIES)
    assert problem.line == line_of(data, "lens = seq_lens_cpu[:bs].to(torch.int32)")


def test_a_site_that_mlagen_replaced_is_not_judged() -> None:
    assert [p.code for p in judge(WITH_D2, "f.py", STAGES)] == ["d2-draft-lengths"]
    line = line_of(WITH_D2, D2.strip())
    emitted = (" " * 12 + "lens = seq_lens_cpu[:bs].cpu()",)
    patched = apply_edits(WITH_D2, [Edit("replay-decode", line, 1, " " * 12, emitted)])
    assert D2.strip() in patched.decode()  # kept, behind its bar
    assert judge(patched, "f.py", STAGES) == ()
    (sync,) = host_syncs(patched, "f.py")
    assert sync.note.startswith("written by mlagen")


def test_a_region_elsewhere_hides_nothing() -> None:
    line = line_of(WITH_D2, "    def graph_key")
    patched = apply_edits(WITH_D2, [Edit("draft-step", line, 0, "    ", ("    step = None",))])
    (problem,) = judge(patched, "f.py", STAGES)
    assert problem.code == "d2-draft-lengths"
    assert problem.line == line_of(patched, D2.strip())


def test_a_plan_that_no_site_uses_any_more_is_not_judged() -> None:
    source = changed(
        ("        slot.buffer,\n", "        self._pin_memory_int_workspace_buffer,\n"),
        ("    slot = self.ring.slot()\n", ""),
        ("    slot.event.record()\n", ""),
        ("partial(host_verify_plan, verify_wrapper)", "None"),
        ("    host_decode_plan(\n        self,", "    other(\n        self,"),
    )
    install = "                decode_wrapper.plan = partial(host_decode_plan, decode_wrapper)"
    assert {p.code for p in judge(source, "f.py", COPIES)} == {"d1-pinned-race"}
    edit = Edit(
        "capture-decode",
        line_of(source, install),
        1,
        " " * 16,
        (" " * 16 + "ours(decode_wrapper)",),
    )
    assert judge(apply_edits(source, [edit]), "f.py", COPIES) == ()


def test_what_mlagen_emits_is_not_taken_for_a_hand_written_plan() -> None:
    emitted = (
        "def mlagen_plan(wrapper):",
        "    wrapper._cached_module.plan(wrapper._pin_memory_int_workspace_buffer)",
    )
    data = CLEAN.encode()
    end = len(CLEAN.splitlines()) + 1
    patched = apply_edits(data, [Edit("plans", end, 0, "", emitted)])
    assert judge(patched, "f.py", COPIES) == ()


def test_marks_that_do_not_match_stop_the_judgement() -> None:
    open_mark = "    # >>> mlagen replay-decode 0123456789ab\n"
    with pytest.raises(EditedError):
        judge(
            CLEAN.replace("    def graph_key", open_mark + "    def graph_key").encode(),
            "f.py",
            None,
        )


def test_marks_in_a_string_do_not_hide_a_defect() -> None:
    text = (
        '    """\n    # >>> mlagen a 0123456789ab\n    # <<< mlagen a\n    """\n\n    def graph_key'
    )
    with pytest.raises(DriftError):
        judge(WITH_D2.decode().replace("    def graph_key", text).encode(), "f.py", STAGES)


@pytest.mark.parametrize("deep", [50, 900, 5000])
def test_an_expression_as_deep_as_the_parser_takes(deep: int) -> None:
    chain = "x = y" + ".a" * deep + ".item()\n"
    total = "z = " + " + ".join("1" * deep) + "\n"
    source = f"{CLEAN}{chain}{total}".encode()
    try:
        found = [problem.code for problem in judge(source, "f.py", COPIES)]
        found += [sync.kind for sync in host_syncs(source, "f.py")]
    except DriftError as refused:  # how deep that is, each release of Python has its own view
        found = [problem.code for problem in refused.problems]
    assert found in (["item"], ["does-not-parse"])


@pytest.mark.filterwarnings("error")
def test_a_doubtful_escape_in_the_file_is_no_concern_of_ours() -> None:
    assert judge(CLEAN.encode() + rb"x = '\d' if 1 is 1 else 0" + b"\n", "f.py", COPIES) == ()


@pytest.mark.parametrize(
    "body",
    [
        "        a = b\n        b = a\n        a.plan(1)\n",
        "        a = a._cached_module\n        a.plan(1, 2)\n",
        "        lens = lens + lens\n        self.update(kv_len_arr_cpu=lens)\n",
        "".join(f"        x{i + 1} = x{i} + 1\n" for i in range(2000))
        + "        self.update(kv_len_arr_cpu=x2000)\n",
        "        (lambda: self._cached_module.plan)()()\n",
        "        self._cached_module.plan(**kw)\n",
        "        [w.plan for w in ws][0] = partial()\n",
        "        x.plan = partial\n        x.plan = y = z\n",
        "        (a := self._cached_module).plan(*a, *b)\n",
        "        for self.plan in ():\n            assert (seq_lens_cpu := 1)\n",
    ],
)
def test_odd_code_is_judged_without_an_exception(body: str) -> None:
    source = changed(
        ("    def graph_key", f"    def odd(self, *b, **kw):\n{body}\n    def graph_key")
    )
    for api in (COPIES, STAGES, None):
        assert isinstance(judge(source, "f.py", api), tuple)
    assert isinstance(host_syncs(source, "f.py"), tuple)


def test_findings_of_one_line_keep_the_order_in_which_they_were_made() -> None:
    # Not that of their hashes, which differ from run to run.
    made = [Problem("f.py", 7, 0, "plan-proxy", f"finding {number}") for number in range(20)]
    first = Problem("f.py", 3, 0, "plan-stream", "the line above")
    assert by_line([*made, first, *made]) == (first, *made)
