"""The one printer: text at 80 columns, stable JSON, and a diff that git takes."""

from __future__ import annotations

import base64
import io
import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from mlagen.codegen.errors import Problem
from mlagen.codegen.provenance import as_bytes, as_text
from mlagen.codegen.report import (
    Printer,
    RanTest,
    Report,
    SiteState,
    render_json,
    render_text,
    unified_diff,
)

PROBLEM = Problem("srt/backend.py", 7, 3, "anchor-missing", "no call of plan", "look at line 9")
REPORT = Report(
    command="inspect",
    exit_code=4,
    problems=(PROBLEM,),
    sites=(
        SiteState("decode", "graph.replay", "installed", line=412),
        SiteState("draft-decode", "draft.lengths", "replaced upstream", "D2: plans seq_lens", 97),
        SiteState(
            "dcp",
            "verify",
            "refused",
            "the lengths that upstream passes under decode context parallelism are not this rank's",
        ),
    ),
    facts=(
        ("FlashInfer", "0.6.17, era 0.6.8-0.6.18.post1"),
        ("private call", "self._cached_module.plan(nine) in flashinfer/mla/_core.py:812, state on "
         "the wrapper"),
    ),
    notes=("no GPU here: the generated tests did not run",),
    tests=(RanTest("tests/t.py::test_a", "skipped", "no", 0.5),),
)  # fmt: skip

# --- text -------------------------------------------------------------------------------------


def test_the_text_is_compact_and_aligned() -> None:
    assert render_text(REPORT) == (
        "FlashInfer    0.6.17, era 0.6.8-0.6.18.post1\n"
        "private call  self._cached_module.plan(nine) in flashinfer/mla/_core.py:812,\n"
        "              state on the wrapper\n"
        "\n"
        "variant       site           line  state\n"
        "decode        graph.replay    412  installed\n"
        "draft-decode  draft.lengths    97  replaced upstream  D2: plans seq_lens\n"
        "dcp           verify            -  refused\n"
        "    the lengths that upstream passes under decode context parallelism are not\n"
        "    this rank's\n"
        "\n"
        "srt/backend.py:7:3: anchor-missing: no call of plan\n"
        "    hint: look at line 9\n"
        "\n"
        "note: no GPU here: the generated tests did not run\n"
    )


def test_an_empty_report_is_empty_text() -> None:
    assert render_text(Report("check", 0)) == ""


def test_several_problems_are_counted() -> None:
    report = Report("check", 4, problems=(PROBLEM, PROBLEM))
    assert render_text(report).endswith("hint: look at line 9\n2 problems\n")


def test_the_diff_comes_last_and_is_verbatim() -> None:
    report = Report("patch", 1, diff="--- a/\x1b\n", notes=("n",))
    assert render_text(report) == "note: n\n\n--- a/\x1b\n"
    assert render_text(report, diff=False) == "note: n\n"
    assert render_text(Report("patch", 1, diff="-\n")) == "-\n"


_WORD = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
_SENTENCE = st.lists(_WORD, max_size=20).map(" ".join)


@settings(deadline=None)
@given(
    facts=st.lists(st.tuples(_WORD, _SENTENCE), max_size=3),
    sites=st.lists(
        st.builds(
            SiteState,
            st.just("draft-extend"),
            st.just("eager.plan"),
            st.sampled_from(["stale", "superseded upstream"]),
            _SENTENCE,
            st.integers(0, 20_000),
        ),
        max_size=3,
    ),
    notes=st.lists(_SENTENCE, max_size=2),
)
@example(facts=[("\x1f" * 8 + "\n" + "\U00012544" * 5, "")], sites=[], notes=[])
def test_tables_keep_to_80_columns_and_steer_no_terminal(
    facts: list[tuple[str, str]], sites: list[SiteState], notes: list[str]
) -> None:
    text = render_text(Report("x", 0, (), tuple(sites), tuple(facts), "", tuple(notes)))
    for line in text.split("\n"):
        assert line.isprintable()
        # A word is at most 20 characters, each at most 10 when it is escaped, and stays whole.
        assert len(line) <= 80 or max(map(len, line.split())) > 50
    assert sum(line.startswith("draft-extend") for line in text.split("\n")) >= len(sites)


def test_control_characters_of_a_problem_are_escaped() -> None:
    problem = Problem("a\x1b[31m.py", 1, 0, "c", "x\ny\r\x07é")
    text = render_text(Report("check", 4, problems=(problem,)))
    assert text == "a\\x1b[31m.py:1: c: x\ny\\r\\x07é\n"


# --- JSON -------------------------------------------------------------------------------------


def test_the_json_has_stable_keys() -> None:
    text = render_json(REPORT)
    assert text.endswith("}\n")
    assert text.isascii()
    found = json.loads(text)
    assert list(found) == sorted(found)
    assert found == {
        "schema_version": 1,
        "command": "inspect",
        "exit_code": 4,
        "problems": [
            {
                "path": "srt/backend.py",
                "line": 7,
                "column": 3,
                "code": "anchor-missing",
                "message": "no call of plan",
                "hint": "look at line 9",
            }
        ],
        "sites": [
            {
                "variant": site.variant,
                "site": site.site,
                "state": site.state,
                "reason": site.reason,
                "line": site.line,
            }
            for site in REPORT.sites
        ],
        "facts": [{"name": name, "value": value} for name, value in REPORT.facts],
        "notes": ["no GPU here: the generated tests did not run"],
        "tests": [
            {"id": "tests/t.py::test_a", "outcome": "skipped", "message": "no", "seconds": 0.5}
        ],
        "waits": [],
        "differences": [],
        "diff": "",
        "diff_encoding": "utf-8",
    }


@pytest.mark.parametrize(
    ("diff", "encoding"),
    [(b"-\xc3\xa9\r\n", "utf-8"), (b"-\xe9\r\n", "base64"), (b"", "utf-8")],
)
def test_the_json_holds_the_bytes_of_any_diff(diff: bytes, encoding: str) -> None:
    found = json.loads(render_json(Report("patch", 1, diff=as_text(diff))))
    assert found["diff_encoding"] == encoding
    read = base64.b64decode if encoding == "base64" else str.encode
    assert read(found["diff"]) == diff


@settings(deadline=None)
@given(st.text(st.characters(), max_size=20))
def test_the_json_is_readable_by_all_whatever_the_texts_are(text: str) -> None:
    found = json.loads(
        render_json(
            Report(
                "check",
                4,
                problems=(Problem(text, 1, 1, "c", text),),
                facts=((text, text),),
                notes=(text,),
            )
        )
    )
    json.dumps(found, ensure_ascii=False).encode("utf-8")
    if not any(0xD800 <= ord(char) <= 0xDFFF for char in text):
        assert found["problems"][0]["path"] == found["notes"][0] == text


# --- the printer ------------------------------------------------------------------------------


class _Streams:
    def __init__(self, encoding: str = "utf-8") -> None:
        self.out, self.err = io.BytesIO(), io.BytesIO()
        self.stdout = io.TextIOWrapper(self.out, encoding=encoding, newline="\r\n")
        self.stderr = io.TextIOWrapper(self.err, encoding=encoding)

    def printer(self, **options: Any) -> Printer:
        return Printer(self.stdout, self.stderr, **options)


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_the_answer_arrives_as_it_is(encoding: str) -> None:
    streams = _Streams(encoding)
    streams.stdout.write("before ")
    printer = streams.printer()
    printer.answer(as_text(b"\xef\xbb\xbf\xe9\xc3\xa9\r\n\x1b\n"))
    printer.answer("no end")
    printer.answer("")
    assert streams.out.getvalue() == b"before \xef\xbb\xbf\xe9\xc3\xa9\r\n\x1b\nno end\n"
    assert streams.err.getvalue() == b""


def test_progress_goes_to_stderr_unless_quiet() -> None:
    streams = _Streams()
    streams.printer().progress("reading\x1b[2J")
    streams.printer(quiet=True).progress("more")
    assert (streams.out.getvalue(), streams.err.getvalue()) == (b"", b"reading\\x1b[2J\n")


def test_a_stream_of_text_alone_will_do() -> None:
    stream = io.StringIO()
    Printer(stream).answer("a\udce9\ud800")
    assert stream.getvalue().startswith("a")
    assert stream.getvalue().isascii()


def test_the_streams_of_sys_are_looked_up_late(capfdbinary: Any) -> None:
    printer = Printer()
    printer.answer(as_text(b"a\xff"))
    printer.progress("b")
    assert tuple(capfdbinary.readouterr()) == (b"a\xff\n", b"b\n")


def test_a_diff_is_the_whole_answer_and_the_rest_is_progress() -> None:
    streams = _Streams()
    streams.printer().report(Report("patch", 1, diff="-a\n+b\n", notes=("n",)))
    assert (streams.out.getvalue(), streams.err.getvalue()) == (b"-a\n+b\n", b"note: n\n")


def test_a_report_without_a_diff_is_the_answer() -> None:
    streams = _Streams()
    streams.printer().report(REPORT)
    streams.printer().report(REPORT, "json")
    assert streams.out.getvalue().decode() == render_text(REPORT) + render_json(REPORT)
    assert streams.err.getvalue() == b""


# --- the diff ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def git_environment(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """Git as it comes, without the settings of whoever runs this."""
    home = tmp_path_factory.mktemp("home")
    return {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_GLOBAL": os.devnull,
        "LC_ALL": "C",
    }


@pytest.fixture(scope="module")
def repository(
    tmp_path_factory: pytest.TempPathFactory, git_environment: Mapping[str, str]
) -> Path:
    folder = tmp_path_factory.mktemp("repository")
    subprocess.run(["git", "init", "-q"], cwd=folder, env=git_environment, check=True)
    return folder


def apply(
    repository: Path, environment: Mapping[str, str], name: str, old: bytes, new: bytes
) -> None:
    """Apply the diff between `old` and `new` with git and take it back."""
    path = repository / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(old)
    diff = unified_diff(name, old, new)

    def git(*arguments: str) -> None:
        done = subprocess.run(
            ["git", "apply", *arguments, "-"],
            cwd=repository,
            env=environment,
            input=diff,
            capture_output=True,
            check=False,
        )
        assert done.returncode == 0, (done.stderr, diff)

    git("--check", "--whitespace=nowarn")
    git("--whitespace=nowarn")
    assert path.read_bytes() == new
    git("--reverse", "--whitespace=nowarn")
    assert path.read_bytes() == old


TEXT = b"one\ntwo\nthree\nfour\nfive\nsix\nseven\neight\nnine\nten\n"
CHANGED = TEXT.replace(b"two", b"2\n2.5").replace(b"nine\n", b"")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        pytest.param(TEXT, CHANGED, id="lf"),
        pytest.param(TEXT.replace(b"\n", b"\r\n"), CHANGED.replace(b"\n", b"\r\n"), id="crlf"),
        pytest.param(TEXT, CHANGED.replace(b"\n", b"\r\n"), id="lf to crlf"),
        pytest.param(TEXT.replace(b"\n", b"\r"), CHANGED.replace(b"\n", b"\r"), id="cr"),
        pytest.param(TEXT[:-1], CHANGED[:-1], id="no end"),
        pytest.param(TEXT, TEXT[:-1], id="end taken off"),
        pytest.param(TEXT[:-1], TEXT, id="end added"),
        pytest.param(TEXT[:-1], TEXT + b"more", id="appended to no end"),
        pytest.param(b"\xef\xbb\xbf" + TEXT, b"\xef\xbb\xbfzero\n" + TEXT, id="bom"),
        pytest.param(TEXT.replace(b"o", b"\xf6"), CHANGED.replace(b"e", b"\xe9"), id="latin-1"),
        pytest.param(b"", b"a\n", id="from empty"),
        pytest.param(b"a", b"", id="to empty"),
        pytest.param(TEXT, b"zero\n" + TEXT, id="first line"),
        pytest.param(b"--- a\n+++ b\n@@ -1 +1 @@\n", b"-- a\n++ b\n\\ No\n", id="like a diff"),
        pytest.param(b"a\x0cb\xe2\x80\xa8c\x85\n", b"a\x0cb\xe2\x80\xa8d\x85\n", id="no line ends"),
    ],
)
def test_git_takes_the_diff(
    repository: Path, git_environment: Mapping[str, str], old: bytes, new: bytes
) -> None:
    apply(repository, git_environment, "srt/backend.py", old, new)


@pytest.mark.parametrize(
    "name", ["a b.py", "tab\there.py", 'quo"te\\.py', "é.py", "b/ b/x b.py", "x\x7f\n.py"]
)
def test_git_takes_the_diff_of_an_odd_name(
    repository: Path, git_environment: Mapping[str, str], name: str
) -> None:
    apply(repository, git_environment, name, TEXT, CHANGED)


_LINES = st.lists(
    st.builds(
        lambda text, end: text + end,
        st.sampled_from(
            [b"", b"a", b"b ", b"\t", b"\xe9", b"\xc3\xa9", b"-", b"+", b"\\ x", b"@@"]
        ),
        st.sampled_from([b"\n", b"\n", b"\r\n", b"\r"]),
    ),
    max_size=12,
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data(), lines=_LINES, bom=st.booleans(), ends=st.tuples(*[st.booleans()] * 2))
def test_git_takes_the_diff_of_any_edit(
    repository: Path,
    git_environment: Mapping[str, str],
    data: st.DataObject,
    lines: list[bytes],
    bom: bool,
    ends: tuple[bool, bool],
) -> None:
    edited = list(lines)
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, len(edited)))
        stop = data.draw(st.integers(start, min(len(edited), start + 3)))
        edited[start:stop] = data.draw(_LINES)[:4]
    old, new = (
        (b"\xef\xbb\xbf" if bom else b"") + b"".join(part) + (b"" if end else b"last")
        for part, end in zip((lines, edited), ends, strict=True)
    )
    if old == new:
        assert unified_diff("x.py", old, new) == b""
    else:
        apply(repository, git_environment, "x.py", old, new)


def test_the_diff_reads_as_git_writes_it() -> None:
    assert unified_diff("srt/a.py", b"1\n2\n3\n4\n5\n6", b"1\n2\n3\n4\nfive\n6") == (
        b"diff --git a/srt/a.py b/srt/a.py\n"
        b"--- a/srt/a.py\n"
        b"+++ b/srt/a.py\n"
        b"@@ -2,5 +2,5 @@\n"
        b" 2\n"
        b" 3\n"
        b" 4\n"
        b"-5\n"
        b"+five\n"
        b" 6\n"
        b"\\ No newline at end of file\n"
    )


def test_a_report_carries_the_diff_to_stdout_byte_for_byte() -> None:
    diff = unified_diff("a.py", b"\xe9\r\n", b"\xe8\r\n")
    streams = _Streams("ascii")
    streams.printer().report(Report("patch", 1, diff=as_text(diff)))
    assert streams.out.getvalue() == diff
    assert as_bytes(as_text(diff)) == diff
