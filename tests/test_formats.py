"""The report for machines: GitHub's annotations, and the JSON Schema of `--json`."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator, ValidationError

from mlagen.codegen import report_schema
from mlagen.codegen.errors import Problem
from mlagen.codegen.report import FORMATS, RanTest, Report, SiteState, render_github, render_json
from mlagen.codegen.spec import shipped_spec
from tests.cli_workspace import FILE, ORIGINAL, Outcome, patched, report_validator, run, workspace

FI = ("--flashinfer", "fi")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that the commands run in, with the miniatures."""
    return workspace(tmp_path, monkeypatch)


# --- annotations ------------------------------------------------------------------------------


def parsed(line: str) -> tuple[str, dict[str, str], str]:
    """A workflow command as the runner reads it: name, properties, message."""
    name, properties, message = re.fullmatch(r"::(\w+) (.*?)::(.*)", line).groups()  # type: ignore[union-attr]
    pairs = dict(part.split("=", 1) for part in properties.split(","))
    for code, char in (("%3A", ":"), ("%2C", ","), ("%0D", "\r"), ("%0A", "\n"), ("%25", "%")):
        pairs = {key: value.replace(code, char) for key, value in pairs.items()}
        if code not in ("%3A", "%2C"):
            message = message.replace(code, char)
    return name, pairs, message


def test_a_problem_is_an_error_at_its_line() -> None:
    report = Report(
        "check",
        4,
        problems=(
            Problem("srt/backend.py", 7, 3, "plan-arguments", "nine, not ten", "patch again"),
            Problem("srt/backend.py", 9, 0, "d10-assert", "note: 50% of it, or so"),
            Problem("a,b:c.py", 0, 5, "x", "one\ntwo\r"),
        ),
        notes=("done",),
    )
    assert render_github(report) == (
        "::error file=srt/backend.py,line=7,col=3,title=mlagen%3A plan-arguments"
        "::nine, not ten%0Ahint: patch again\n"
        "::warning file=srt/backend.py,line=9,title=mlagen%3A d10-assert::50%25 of it, or so\n"
        "::error file=a%2Cb%3Ac.py,title=mlagen%3A x::one%0Atwo%0D\n"
        "note: done\n"
    )


def test_what_fails_nothing_is_a_warning() -> None:
    problem = Problem("f.py", 1, 0, "drift", "gone")
    assert render_github(Report("inspect", 0, problems=(problem,))).startswith("::warning ")


def test_a_failure_without_a_problem_is_one_error() -> None:
    report = Report("patch", 1, facts=(("file", "a/b.py"),), notes=("would change", "so"))
    assert render_github(report) == (
        "::error file=a/b.py,title=mlagen patch::would change%0Aso\nnote: would change\nnote: so\n"
    )
    assert render_github(Report("x", 3)) == "::error title=mlagen x::exit code 3\n"
    only = Problem("f.py", 1, 0, "c", "note: fine")
    assert [line[:8] for line in render_github(Report("x", 1, (only,))).splitlines()] == [
        "::warnin",
        "::error ",
    ]


def test_nothing_wrong_has_no_annotation() -> None:
    assert render_github(Report("check", 0)) == ""
    assert render_github(Report("check", 0, notes=("right",), diff="::x\n")) == "note: right\n"


_TEXT = st.text(
    st.one_of(st.sampled_from(":,%\r\n =#[]0AD3C2"), st.characters(exclude_categories=["Cs"])),
    max_size=25,
)


@settings(deadline=None, max_examples=150)
@given(path=_TEXT, code=_TEXT, message=_TEXT, hint=_TEXT, notes=st.lists(_TEXT, max_size=2))
def test_no_text_makes_a_command_of_its_own(
    path: str, code: str, message: str, hint: str, notes: list[str]
) -> None:
    """The message of an edited region shows what the file holds, which may be anything."""
    report = Report("c", 1, (Problem(path, 3, 4, code, message, hint),), notes=tuple(notes))
    first, *rest = render_github(report).split("\n")
    if message.startswith("note: "):
        rest.pop(0)
    assert rest == [*rest[:-1], ""]
    for line in rest:
        assert not line.strip().startswith("::")
        assert "##[" not in line
    name, properties, text = parsed(first)
    assert name in ("error", "warning")
    assert list(properties) == ["file", "line", "col", "title"]
    plain = all(char.isprintable() or char in "\r\n" for char in path + code + message + hint)
    if plain:
        assert properties["file"] == path
        assert properties["title"] == f"mlagen: {code}"
        shown = message.removeprefix("note: ")
        assert text == (f"{shown}\nhint: {hint}" if hint else shown)


# --- the option -------------------------------------------------------------------------------


def annotations(done: Outcome) -> list[tuple[str, dict[str, str], str]]:
    assert done.err == ""
    return [parsed(line) for line in done.text.splitlines() if line.startswith("::")]


def test_check_in_githubs_form(here: Path) -> None:
    (here / FILE).write_bytes(patched())
    clean = run("check", FILE, *FI, "--format", "github")
    assert (clean.code, clean.text) == (0, "note: right for FlashInfer (version unknown)\n")
    stale = run("check", FILE, "--flashinfer", "fi7", "--format", "github")
    assert stale.code == 4
    name, properties, text = annotations(stale)[0]
    assert (name, properties["file"]) == ("error", FILE)
    assert properties["title"] == "mlagen: site-stale"
    assert int(properties["line"]) > 1
    assert "run `mlagen patch` again" in text


def test_other_commands_in_githubs_form(here: Path) -> None:
    would = run("patch", FILE, *FI, "--check", "--format", "github")
    ((name, properties, text),) = annotations(would)
    assert (would.code, name, properties) == (1, "error", {"file": FILE, "title": "mlagen patch"})
    assert text.startswith("would change")
    shown = run("inspect", FILE, "--flashinfer", "drifted", "--format", "github")
    assert (shown.code, annotations(shown)[0][0]) == (4, "error")
    render = ("render", shipped_spec(), *FI, "--out", "made")
    run(*render)
    (here / "made/plans.py").write_bytes(b"")
    stale = run(*render, "--check", "--format", "github")
    ((name, properties, text),) = annotations(stale)
    assert (stale.code, name, properties) == (1, "error", {"title": "mlagen render"})
    assert text == "plans.py is not current: run `mlagen render`"
    assert b"@@" not in stale.out


def test_errors_are_annotations_too(here: Path) -> None:
    (here / "bad.yaml").write_text("version: 1\nvariants: {}\nmore: 1\nmost: 2\n")
    done = run("check", FILE, *FI, "--spec", "bad.yaml", "--format", "github")
    assert done.code == 3
    found = [(name, p["file"], p["line"]) for name, p, _ in annotations(done)]
    assert found[-2:] == [("error", "bad.yaml", "3"), ("error", "bad.yaml", "4")]


def test_an_edited_region_that_holds_commands(here: Path) -> None:
    mark = next(line for line in patched().splitlines(keepends=True) if b">>> mlagen plans" in line)
    held = b'"""\n::add-mask::e\n  ::stop-commands::x\n##[add-path]x\n"""\n'
    (here / FILE).write_bytes(patched().replace(mark, mark + held))
    done = run("check", FILE, *FI, "--format", "github")
    assert done.code == 5
    assert "%0A" in done.text
    assert "::add-mask::e" in done.text
    assert [line for line in done.text.splitlines() if not line.startswith("::error file=")] == []


def test_json_is_short_for_its_format(here: Path) -> None:
    for command in (("check", FILE, *FI), ("inspect",), ("patch", FILE, *FI, "--diff")):
        short, long = run(*command, "--json"), run(*command, "--format", "json")
        assert short == long
        assert long.json["command"] == command[0]
        assert run(*command, "--json", "--format", "json") == long
    text = run("check", FILE, *FI)
    assert run("check", FILE, *FI, "--format", "text") == text


def test_what_does_not_go_together_is_refused(here: Path) -> None:
    both = run("check", FILE, *FI, "--json", "--format", "github")
    assert (both.code, both.out) == (2, b"")
    for command in ("patch", "unpatch"):
        diff = run(command, FILE, "--diff", "--format", "github")
        assert (diff.code, "leave --diff out" in diff.err) == (2, True)
    assert run("check", FILE, "--format", "xml").code == 2
    assert (here / FILE).read_bytes() == ORIGINAL


@pytest.mark.parametrize(
    "command", ["render", "patch", "plugin", "unpatch", "check", "inspect", "test"]
)
def test_every_command_with_a_report_has_the_option(command: str) -> None:
    words = " ".join(run(command, "--help").text.split())
    assert f"--format [{'|'.join(FORMATS)}]" in words
    assert "--json" in words


# --- the schema -------------------------------------------------------------------------------


def test_the_schema_is_the_committed_file() -> None:
    committed = Path(report_schema.__file__).parent / report_schema.SCHEMA_NAME
    done = run("schema", "--report")
    assert (done.code, done.err) == (0, "")
    assert done.out == committed.read_bytes(), "mlagen schema --report > codegen/report.schema.json"
    Draft202012Validator.check_schema(json.loads(done.out))


def test_the_schema_takes_all_that_a_report_holds() -> None:
    full = Report(
        "test",
        6,
        problems=(Problem("a", 1, 2, "c", "m", "h"),),
        sites=(SiteState("decode", "s", "installed", "r", 3),),
        facts=(("n", "v"),),
        diff="d",
        notes=("n",),
        tests=(RanTest("t", "passed", "m", 0.5),),
    )
    for report in (full, Report("x", 0), Report("x", 1, diff="\udcff")):
        report_validator().validate(json.loads(render_json(report)))


def _changed(name: str, value: object) -> dict[str, object]:
    content: dict[str, object] = json.loads(render_json(Report("x", 0)))
    return {**content, name: value}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("schema_version", 2),
        ("exit_code", "0"),
        ("facts", [["a", "b"]]),
        ("sites", [{"site": "x"}]),
        ("sites", [{"variant": "", "site": "", "state": "odd", "reason": "", "line": 0}]),
        ("diff_encoding", "hex"),
        ("notes", [1]),
    ],
)
def test_the_schema_refuses_what_no_report_is(name: str, value: object) -> None:
    schema = Draft202012Validator(report_schema.report_schema())
    with pytest.raises(ValidationError):
        schema.validate(_changed(name, value))


def test_the_schema_lets_later_keys_pass() -> None:
    Draft202012Validator(report_schema.report_schema()).validate(_changed("later", 1))
    with pytest.raises(ValidationError):
        report_validator().validate(_changed("later", 1))


@pytest.mark.parametrize(
    "arguments",
    [
        ("check", FILE, *FI),
        ("check", "nowhere"),
        ("inspect", "--flashinfer", "fi"),
        ("inspect", FILE, *FI),
        ("patch", FILE, *FI, "--check"),
        ("patch", FILE, *FI, "--diff"),
        ("patch", FILE, *FI, "--out", "out"),
        ("patch", FILE, *FI),
        ("unpatch", FILE, "--diff"),
        ("unpatch", FILE),
        ("render", "nowhere.yaml"),
        ("plugin", FILE, *FI, "--out", "out"),
        ("test", FILE, *FI),
        ("bench", *FI),
    ],
)
def test_what_every_command_prints_is_of_the_schema(here: Path, arguments: tuple[str, ...]) -> None:
    if arguments[0] == "unpatch":
        (here / FILE).write_bytes(patched())
    done = run(*arguments, "--json")
    assert done.json["exit_code"] == done.code
    assert done.json["command"] == arguments[0]
