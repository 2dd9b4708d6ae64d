"""Regions, header and manifest: what goes in comes out, byte for byte."""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import io
import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mlagen.codegen.errors import DriftError, EditedError, MlagenError
from mlagen.codegen.provenance import (
    HEADER_SITE,
    Edit,
    Header,
    apply_edits,
    as_bytes,
    as_text,
    build_region,
    edited_problem,
    find_regions,
    header_lines,
    is_plain_name,
    manifest,
    newline_of,
    read_header,
    read_manifest,
    remove_regions,
    split_lines,
)

HEADER = Header(
    mlagen="0.1.0",
    flashinfer="0.6.17",
    era="0.6.8-0.6.18.post1",
    source_digest="ab" * 32,
    spec_digest="cd" * 32,
    variants=("decode", "draft-decode", "verify", "draft-extend", "dcp"),
    inserts=("header", "plans"),
    replaces=("replay-decode",),
)


def edit(site: str, line: int, count: int, *emitted: str, indent: str = "") -> Edit:
    return Edit(site, line, count, indent, emitted)


def region_text(*emitted: str, site: str = "a") -> str:
    return "".join(build_region(site, "", emitted, [], "\n"))


# --- the form ---------------------------------------------------------------------------------


def test_a_region_reads_as_designed() -> None:
    lines = build_region("graph.replay", "    ", ["    new()"], ["    old()\n", "\told \n"], "\n")
    checksum = hashlib.sha256(
        b"    new()\n    # --- mlagen replaced 2 lines:\n    # |    old()\n    # |\told \n"
    ).hexdigest()[:12]
    assert "".join(lines) == (
        f"    # >>> mlagen graph.replay {checksum}\n"
        "    new()\n"
        "    # --- mlagen replaced 2 lines:\n"
        "    # |    old()\n"
        "    # |\told \n"
        "    # <<< mlagen graph.replay\n"
    )


def test_what_was_built_is_found() -> None:
    emitted = ("# |not a kept line", "", "x = '''", "'''")
    replaced = ("    a = 1 \r\n", "\r\n", "\x0c# |b\r", "# >>> mlagen no 000000000000\n")
    text = "first\n" + "".join(build_region("b-2", "\t", emitted, replaced, "\r\n")) + "last"
    (region,) = find_regions(text)
    assert (region.site, region.indent, region.intact, region.no_eol) == ("b-2", "\t", True, False)
    assert (region.start_line, region.end_line) == (2, 12)
    assert region.emitted == emitted
    assert region.replaced == replaced
    assert remove_regions(as_bytes(text)) == b"first\n" + as_bytes("".join(replaced)) + b"last"


@pytest.mark.parametrize(
    "text", ["", "x = 1\n", "import mlagen\n# about mlagen\n", "#>>> mlagen a"]
)
def test_a_file_without_regions_is_left_alone(text: str) -> None:
    assert find_regions(text) == ()
    assert remove_regions(as_bytes(text)) == as_bytes(text)
    assert read_header(text) is None


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("", "", [], [], "\n"), "site id"),
        (("a b", "", [], [], "\n"), "site id"),
        (("a\n", "", [], [], "\n"), "site id"),
        (("a", "x", [], [], "\n"), "indentation"),
        (("a", "", ["x\ny"], [], "\n"), "more than one line"),
        (("a", "", ["x\r"], [], "\n"), "more than one line"),
        (("a", "", ["  # <<< mlagen a"], [], "\n"), "looks like a mark"),
        (("a", "", ["# --- mlagen replaced 1 line:"], [], "\n"), "looks like a mark"),
        (("a", "", [], ["x", "y\n"], "\n"), "line end missing"),
        (("a", "", [], ["x\ny\n"], "\n"), "not one line"),
        (("a", "", [], [""], "\n"), "not one line"),
        (("a", "", ["x"], [], "\r"), "not a line end"),
    ],
)
def test_what_no_region_can_hold_is_refused(
    arguments: tuple[str, str, list[str], list[str], str], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        build_region(*arguments)


def test_a_lone_carriage_return_is_never_the_line_end_of_a_region() -> None:
    # "...\r" before an empty LF line would read as one CRLF.
    assert newline_of("a\rb\rc\r") == "\n"
    assert newline_of("a\r\nb\r\nc\n") == "\r\n"
    assert newline_of("a\r\nb\n") == "\n"
    assert newline_of("") == "\n"


# --- there and back ---------------------------------------------------------------------------

SOURCE = "# top\nimport os\n\nf(\n    1,\n    2,\n)\n\n\ndef g():\n\treturn 'a'  \n"
EDITS = [
    edit(HEADER_SITE, 2, 0, *header_lines(HEADER)),
    edit("imports", 3, 0, "import sys"),
    edit("argument", 5, 1, "    10,", "    11,", indent="    "),
    edit("argument.next", 6, 0, "    12,", indent="    "),
    edit("body", 11, 1, "\treturn 'b'", indent="\t"),
    edit("end", 12, 0, "", "", "def h(): ..."),
]


@pytest.mark.parametrize(
    "original",
    [
        pytest.param(as_bytes(SOURCE), id="lf"),
        pytest.param(as_bytes(SOURCE.replace("\n", "\r\n")), id="crlf"),
        pytest.param(as_bytes(SOURCE.replace("\n", "\r")), id="cr"),
        pytest.param(as_bytes(SOURCE.replace("\n", "\r\n", 4).replace("\n)", "\r)")), id="mixed"),
        pytest.param(b"\xef\xbb\xbf" + as_bytes(SOURCE), id="bom"),
        pytest.param(as_bytes(SOURCE[:-1]), id="no final newline"),
        pytest.param(as_bytes(SOURCE.replace("\n", "\r\n")[:-2]), id="crlf, no final newline"),
        pytest.param(as_bytes(SOURCE.replace("'a'", "'é…\u2028\x85'")), id="utf-8"),
        pytest.param(
            SOURCE.replace("top", "coding: latin-1").replace("'a'", "'é\xa0'").encode("latin-1"),
            id="latin-1",
        ),
        pytest.param(as_bytes(SOURCE.replace("\n\n\n", "\n\x0c\n\t\x0c \n")), id="form feed"),
        pytest.param(as_bytes(SOURCE.replace("# top", "# |# |")), id="bars"),
    ],
)
def test_edits_can_be_taken_out_again(original: bytes) -> None:
    patched = apply_edits(original, EDITS)
    regions = find_regions(patched)
    assert [region.site for region in regions] == [edit.site for edit in EDITS]
    assert [region.emitted for region in regions] == [edit.emitted for edit in EDITS]
    assert all(region.intact for region in regions)
    assert read_header(patched) == HEADER
    assert remove_regions(patched) == original
    tree = ast.parse(patched)
    assert ast.unparse(tree.body[2]) == "f(10, 11, 12, 2)"
    assert ast.unparse(tree.body[4]).startswith("def h")
    assert patched.startswith(b"\xef\xbb\xbf") == original.startswith(b"\xef\xbb\xbf")
    # Added lines have the line end that the file has most of.
    start = next(line for line in split_lines(as_text(patched)) if ">>> mlagen end" in line)
    assert start.endswith("\r\n") == (original.count(b"\r\n") > 5)


_LINE_TEXT = st.text(
    alphabet=st.one_of(
        st.sampled_from([*"#|>-< abx=1\t\f\v\x00\x1c", "é", "\x85", "\u2028", "\ufeff", "\udce9"]),
        st.characters(exclude_characters="\r\n'\"", exclude_categories=["Cs"]),
    ),
    max_size=12,
)
_FILES = st.builds(
    lambda bom, lines, last: bom + b"".join(lines) + last,
    st.sampled_from([b"", b"\xef\xbb\xbf"]),
    st.lists(
        st.builds(
            lambda text, end: as_bytes(text + end),
            _LINE_TEXT,
            st.sampled_from(["\n", "\n", "\r\n", "\r"]),
        ),
        max_size=12,
    ),
    st.one_of(st.just(b""), _LINE_TEXT.map(as_bytes)),
)
_EMITTED = st.lists(_LINE_TEXT, max_size=3).map(tuple)


@settings(deadline=None)
@given(data=st.data(), original=_FILES)
def test_any_edits_of_any_file_can_be_taken_out_again(data: st.DataObject, original: bytes) -> None:
    count = len(split_lines(as_text(original.removeprefix(b"\xef\xbb\xbf"))))
    edits: list[Edit] = []
    line = 1
    while line <= count + 1 and len(edits) < 6:
        line = data.draw(st.integers(line, count + 1))
        taken = data.draw(st.integers(0, min(3, count + 1 - line)))
        indent = data.draw(st.sampled_from(["", "    ", "\t", " \x0c"]))
        edits.append(Edit(f"s{len(edits)}", line, taken, indent, data.draw(_EMITTED)))
        line += taken
        if data.draw(st.booleans()):
            break
    patched = apply_edits(original, edits)
    assert remove_regions(patched) == original
    regions = find_regions(patched)
    assert sorted(region.site for region in regions) == [edit.site for edit in edits]
    by_site = {edit.site: edit for edit in edits}
    assert all(region.emitted == by_site[region.site].emitted for region in regions)
    # Another checkout's line ends are no edit.
    assert all(region.intact for region in find_regions(patched.replace(b"\r\n", b"\n")))


@settings(deadline=None)
@given(st.binary(max_size=200))
@example(b"\r\r\n\n\r")
@example(b"\xff\xfe\xed\xa0\x80\xef\xbb\xbf")
def test_text_keeps_any_byte_and_lines_keep_the_text(data: bytes) -> None:
    text = as_text(data)
    assert as_bytes(text) == data
    # With newline="" the io module splits where Python's tokenizer does, and keeps the line ends.
    assert split_lines(text) == list(io.StringIO(text, newline=""))


def test_text_added_behind_a_region_keeps_its_line_end() -> None:
    patched = apply_edits(b"a\nb", [edit("end", 2, 1, "c")])
    assert remove_regions(patched) == b"a\nb"
    assert remove_regions(patched + b"d\n") == b"a\nb\nd\n"


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_a_region_behind_a_last_line_without_a_line_end(newline: str) -> None:
    original = as_bytes(f"a{newline}b")
    patched = apply_edits(original, [edit("end", 3, 0, "c"), edit("end.next", 3, 0, "d")])
    assert as_bytes(f"b{newline}# >>> mlagen end ") in patched
    assert [region.no_eol for region in find_regions(patched)] == [True, False]
    assert remove_regions(patched) == original


def test_an_editor_may_take_the_line_end_off_the_last_mark() -> None:
    patched = apply_edits(b"a\n", [edit("end", 2, 0, "c")])
    assert remove_regions(patched.rstrip(b"\n")) == b"a\n"


def test_an_empty_file() -> None:
    patched = apply_edits(b"", [edit("one", 1, 0, "x = 1"), edit("two", 1, 0, "y = 2")])
    assert [region.site for region in find_regions(patched)] == ["one", "two"]
    assert remove_regions(patched) == b""


@pytest.mark.parametrize(
    "edits",
    [
        [edit("a", 1, 2), edit("b", 2, 1)],
        [edit("a", 1, 2), edit("b", 2, 0)],
        [edit("a", 0, 0)],
        [edit("a", 3, 1)],
        [edit("a", 4, 0)],
        [edit("a", 2, -1)],
    ],
)
def test_edits_that_cannot_be_made_are_refused(edits: list[Edit]) -> None:
    with pytest.raises(ValueError, match="overlaps another edit or lies outside"):
        apply_edits(b"x\ny\n", edits)


@pytest.mark.parametrize(
    "edit_",
    [
        edit("a", 1, 0, "x"),
        edit("a", 2, 1, "x"),
        edit("a", 1, 1, "# coding: utf-8"),
    ],
)
def test_the_coding_line_stays_in_force(edit_: Edit) -> None:
    with pytest.raises(ValueError, match="coding line"):
        apply_edits(b"#!/bin/python\n# coding: latin-1\nx\n", [edit_])


def test_a_patched_file_is_not_patched_again() -> None:
    patched = apply_edits(b"x\n", [edit("a", 1, 0, "y")])
    with pytest.raises(ValueError, match="has regions already"):
        apply_edits(patched, [edit("b", 1, 0, "y")])


# --- edited by others -------------------------------------------------------------------------

BUILT = apply_edits(b"a\nb\nc\n", [edit("one", 2, 1, "new = 1", "more = 2")])


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"new = 1", b"new = 2"),
        (b"new = 1", b"new = 1 "),
        (b"new = 1\n", b""),
        (b"new = 1\n", b"new = 1\n\n"),
        (b"# |b", b"# |B"),
        (b"# |b\n", b""),
        (b"# |b\n", b"b\n"),
        (b"1 line:", b"2 lines:"),
        (b"1 line:", b"some lines:"),
        (b"# --- mlagen replaced 1 line:\n", b""),
        (b"# |b", b"# |b\n# |b2"),
    ],
)
def test_an_edit_inside_a_region_is_seen(old: bytes, new: bytes) -> None:
    edited = BUILT.replace(old, new)
    assert edited != BUILT
    (region,) = find_regions(edited)
    assert not region.intact
    with pytest.raises(EditedError) as caught:
        remove_regions(edited, path="backend.py")
    assert caught.value.exit_code == 5
    (problem,) = caught.value.problems
    assert (problem.path, problem.line, problem.code) == ("backend.py", 2, "edited-region")


@pytest.mark.parametrize(
    "body",
    [
        "# --- mlagen replaced 2 lines:\n# |b\n",
        "# --- mlagen replaced 1 line:\nb\n# |b\n",
        "# --- mlagen replaced 1 line:\n# |b\nb\n",
        "# --- mlagen replaced 0 lines:\n",
        "# --- mlagen\n",
    ],
)
def test_a_right_checksum_over_a_wrong_form_is_not_intact(body: str) -> None:
    checksum = hashlib.sha256(body.encode()).hexdigest()[:12]
    text = f"# >>> mlagen a {checksum}\n{body}# <<< mlagen a\n"
    assert [region.intact for region in find_regions(text)] == [False]
    with pytest.raises(EditedError):
        remove_regions(as_bytes(text))


def test_every_edited_region_is_told() -> None:
    patched = apply_edits(b"a\nb\n", [edit("one", 1, 1, "x"), edit("two", 2, 1, "x")])
    with pytest.raises(EditedError) as caught:
        remove_regions(patched.replace(b"\nx\n", b"\ny\n"))
    assert [problem.line for problem in caught.value.problems] == [1, 6]


def test_the_problem_shows_both_texts() -> None:
    (region,) = find_regions(BUILT.replace(b"new = 1", b"new = 9"))
    problem = edited_problem(region, "new = 1\nmore = 2\n", path="backend.py")
    assert str(problem) == (
        "backend.py:2: edited-region: the lines between the marks of 'one' are not as mlagen left "
        "them\n"
        "    - what mlagen writes, + what stands there:\n"
        "      @@ -1,2 +1,2 @@\n"
        "      -new = 1\n"
        "      +new = 9\n"
        "       more = 2\n"
        "    hint: move the change outside the marks and put these lines back (or take the file "
        "from version control), then run again"
    )
    assert "new = 9\n      more = 2\n      # |b" in edited_problem(region, None).message


def test_the_problem_says_where_only_a_kept_line_differs() -> None:
    (region,) = find_regions(BUILT.replace(b"# |b", b"# |B"))
    message = edited_problem(region, "new = 1\nmore = 2").message
    assert "the mark or a kept line was changed" in message


def test_a_long_comparison_is_cut_and_odd_bytes_are_escaped() -> None:
    text = region_text(*(f"line {i} \udce9" for i in range(200))).replace("line 0", "line x")
    (region,) = find_regions(text)
    message = edited_problem(region, None).message
    assert message.count("\n") < 70
    assert "more lines" in message
    assert "line x \\xe9" in message


A = "# >>> mlagen a 000000000000\n"
A_END = "# <<< mlagen a\n"
B = "# >>> mlagen b 000000000000\n"
B_END = "# <<< mlagen b\n"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (A, [(1, "unclosed-region")]),
        (A + "x\n" + B + B_END, [(1, "unclosed-region")]),
        (A + B + A_END + B_END, [(1, "unclosed-region"), (3, "unopened-region"),
                                 (4, "unopened-region")]),
        (A + A_END + "x\n" + A + A_END, [(4, "duplicate-region")]),
        (A_END, [(1, "unopened-region")]),
        (A + B_END, [(1 + 1, "unopened-region")]),
        ("# >>> mlagen\n", [(1, "unknown-mark")]),
        ("x\n  # >>> mlagen a\n", [(2, "unknown-mark")]),
        ("# >>> mlagen a 000000000000 no-end\n", [(1, "unknown-mark")]),
        ("# >>> mlagen a 00000000000G\n", [(1, "unknown-mark")]),
        ("# --- mlagen replaced 1 line:\n", [(1, "unknown-mark")]),
        (A + B + "\n" + A_END + "# --- mlagen x\n" + A, [
            (1, "unclosed-region"), (4, "unopened-region"), (5, "unknown-mark"),
            (6, "duplicate-region"), (6, "unclosed-region")]),
    ],
)  # fmt: skip
def test_damaged_marks_are_all_told(text: str, told: list[tuple[int, str]]) -> None:
    with pytest.raises(EditedError) as caught:
        find_regions(text, path="f.py")
    assert [(problem.line, problem.code) for problem in caught.value.problems] == told
    assert all(problem.path == "f.py" and problem.hint for problem in caught.value.problems)
    with pytest.raises(EditedError):
        remove_regions(as_bytes(text))


# --- marks in string literals -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('x = """\n' + A + '"""\n', 2),
        ("x = 1  # '''\ny = rb'''\n\\'''\n    " + A + "'''\n", 4),
        ('x = f"""{1}""" """\n' + A_END + '"""\n', 2),
        ('x = "a\\\n' + A[:-1] + '\\\n"\n', 2),
        ('x = "a\\\r\n' + A[:-1] + '\\\r\n"\r\n', 2),
        ('def f():\n    """never closed\n' + A + A_END, 3),
        ('x = """\n# --- mlagen replaced 1 line:\n""', 2),
    ],
)
def test_a_mark_in_a_string_is_refused_with_its_line(text: str, line: int) -> None:
    for source in (text, as_bytes(text)):
        with pytest.raises(DriftError, match="string literal") as caught:
            find_regions(source)
        assert caught.value.exit_code == 4
        assert caught.value.problems[0].line == line
    with pytest.raises(DriftError):
        remove_regions(as_bytes(text))
    with pytest.raises(DriftError):
        apply_edits(as_bytes(text), [edit("a", 1, 0, "x")])


@pytest.mark.parametrize(
    "text",
    [
        'x = "# >>> mlagen a 000000000000"\n',
        "s = '''\n x # >>> mlagen a 000000000000\n# | mlagen\n'''\n",
        "# don't mlagen\n" + region_text('it\'s = 1  # """'),
        "x = 'broken mlagen\n" + region_text("y"),
        "x = '\\'' '''a''' \"\"\"'''\"\"\"\n" + region_text("y"),
        'x = """a\\""" mlagen"""\n' + region_text("y") + "'''\n'''",
    ],
)
def test_strings_that_only_speak_of_marks_are_no_matter(text: str) -> None:
    assert all(region.intact for region in find_regions(text))
    assert len(find_regions(text)) == text.count("\n# >>> mlagen ")


def test_an_edit_inside_a_string_is_refused() -> None:
    with pytest.raises(DriftError, match="starts in line 1"):
        apply_edits(b'x = """\ny\n"""\n', [edit("a", 2, 1, "z")])


# --- header and format ------------------------------------------------------------------------


def test_the_header_reads_as_designed() -> None:
    assert header_lines(HEADER) == [
        "# Written by mlagen; `mlagen unpatch` takes all of it out, byte for byte.",
        "# format: 1",
        "# mlagen: 0.1.0",
        "# flashinfer: 0.6.17",
        "# flashinfer-era: 0.6.8-0.6.18.post1",
        "# flashinfer-source: " + "ab" * 32,
        "# spec: " + "cd" * 32,
        "# variants: decode, draft-decode, verify, draft-extend, dcp",
        "# inserts: header, plans",
        "# replaces: replay-decode",
    ]


@pytest.mark.parametrize(
    "header",
    [
        HEADER,
        dataclasses.replace(HEADER, flashinfer=None),
        dataclasses.replace(HEADER, variants=()),
        dataclasses.replace(HEADER, variants=tuple(f"variant-{i:03}" for i in range(40))),
        dataclasses.replace(HEADER, variants=("v" * 100, "ü")),
        dataclasses.replace(HEADER, inserts=(), replaces=()),
        dataclasses.replace(HEADER, replaces=tuple(f"site-{i:03}" for i in range(40))),
    ],
)
def test_a_header_comes_back(header: Header) -> None:
    lines = header_lines(header)
    assert all(len(line) <= 88 or "v" * 88 in line for line in lines)
    for newline in ("\n", "\r\n"):
        text = "\ufeff" + "".join(build_region(HEADER_SITE, "", lines, [], newline)) + "x = 1\n"
        assert read_header(text) == header
        assert read_header(as_bytes(text)) == header


@pytest.mark.parametrize(
    "change",
    [
        {"mlagen": ""},
        {"era": " x"},
        {"flashinfer": "1\n# spec: 0"},
        {"variants": ("a, b",)},
        {"variants": ("",)},
        {"inserts": ("a, b",)},
        {"replaces": ("a\n# spec: 0",)},
    ],
)
def test_values_that_a_header_cannot_hold_are_refused(change: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="header: not"):
        header_lines(dataclasses.replace(HEADER, **change))  # type: ignore[arg-type]


def test_a_header_region_may_hold_code_too() -> None:
    lines = ["from a import b", "spec: int = 1", "mlagen: str", *header_lines(HEADER), "era: int"]
    assert read_header("".join(build_region(HEADER_SITE, "", lines, [], "\n"))) == HEADER


def test_a_header_that_lacks_a_key_is_an_edit() -> None:
    lines = [line for line in header_lines(HEADER) if not line.startswith("# spec")]
    with pytest.raises(EditedError):
        read_header("".join(build_region(HEADER_SITE, "", lines, [], "\n")))


def test_a_newer_format_is_refused_before_anything_else() -> None:
    lines = header_lines(dataclasses.replace(HEADER, format=2))
    text = "x = 1\n" + "".join(build_region(HEADER_SITE, "", lines, [], "\n")) + "# <<< mlagen ?\n"
    for call in (find_regions, read_header):
        with pytest.raises(DriftError, match="made by a newer mlagen") as caught:
            call(text)
        assert caught.value.problems[0].line == 4
    with pytest.raises(DriftError, match="made by a newer mlagen"):
        remove_regions(as_bytes(text.replace(" 0", " \t0").replace("header ", "header signed-")))


def test_a_format_line_elsewhere_means_nothing() -> None:
    text = region_text("# format: 9") + region_text(*header_lines(HEADER), site=HEADER_SITE)
    assert read_header(text) == HEADER


# --- manifest ---------------------------------------------------------------------------------

FIELDS: dict[str, Any] = {
    "flashinfer": "0.6.17",
    "era": "0.6.8-0.6.18.post1",
    "source_digest": "ab" * 32,
    "requirement": "flashinfer-python==0.6.17",
    "spec_digest": "cd" * 32,
}


def test_a_manifest_comes_back_and_says_nothing_of_its_day_or_place() -> None:
    text = manifest(**FIELDS, files={"plans.py": b"x", "tests/test_decode.py": b""})
    assert text.endswith("}\n")
    assert list(json.loads(text)) == ["files", "flashinfer", "format", "spec"]
    found = read_manifest(text)
    assert found == read_manifest(text.encode())
    assert {key: getattr(found, key) for key in FIELDS} == FIELDS
    assert found.files == {
        "plans.py": hashlib.sha256(b"x").hexdigest(),
        "tests/test_decode.py": hashlib.sha256(b"").hexdigest(),
    }
    reordered = manifest(**FIELDS, files={"tests/test_decode.py": b"", "plans.py": b"x"})
    assert reordered == text


def test_a_manifest_without_version_and_requirement() -> None:
    text = manifest(**(FIELDS | {"flashinfer": None, "requirement": None}), files={})
    found = read_manifest(text)
    assert (found.flashinfer, found.requirement, found.files) == (None, None, {})


@pytest.mark.parametrize(
    "name", ["", ".", "/a", "../a", "a/../b", "a//b", "./a", "a/", "a\\b", "\0"]
)
def test_names_that_leave_the_folder_are_refused(name: str) -> None:
    assert not is_plain_name(name)
    with pytest.raises(ValueError, match="not a name"):
        manifest(**FIELDS, files={name: b""})
    good = json.loads(manifest(**FIELDS, files={}))
    with pytest.raises(EditedError, match="not a name"):
        read_manifest(json.dumps(good | {"files": {name: "0"}}))


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("", EditedError),
        ("[]", EditedError),
        ("{}", EditedError),
        ("{\n<<<<<<< HEAD", EditedError),
        (b"\xff\xfe\xff", EditedError),
        ("[" * 100_000, EditedError),
        ('{"format": true}', EditedError),
        ('{"format": 1, "flashinfer": []}', EditedError),
        ('{"format": 1, "flashinfer": {}, "files": {"a": 1}}', EditedError),
        ('{"format": 1, "flashinfer": {"version": 6}, "files": {}}', EditedError),
        ('{"format": 2}', DriftError),
    ],
)
def test_a_broken_manifest_is_refused(text: str | bytes, kind: type[MlagenError]) -> None:
    with pytest.raises(kind) as caught:
        read_manifest(text, path="generated/MANIFEST.json")
    assert caught.value.problems[0].path == "generated/MANIFEST.json"
    assert caught.value.problems[0].hint
