"""What a command found, and the one place that prints it: as text, as JSON, as GitHub's
annotations, as a diff.

stdout is the answer, stderr is progress.
"""

from __future__ import annotations

import base64
import difflib
import errno
import json
import os
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal, TextIO, TypeAlias

from .differences import Difference, rows
from .errors import Problem, UsageError, usage
from .provenance import as_bytes

#: Of the JSON that `render_json` makes; goes up when a key changes its meaning or goes away.
SCHEMA_VERSION: Final = 1
#: Pairs of name and value; a name may come more than once.
Facts: TypeAlias = tuple[tuple[str, str], ...]
#: How a report is shown: see `Printer.report`.
Format: TypeAlias = Literal["text", "json", "github"]
FORMATS: Final[tuple[Format, ...]] = ("text", "json", "github")
#: Columns of a text report. Lines of problems are longer where their text is.
WIDTH: Final = 80

#: What one edit site of the target is: see README.md.
State: TypeAlias = Literal[
    "installed",
    "stale",
    "edited",
    "absent",
    "superseded upstream",
    "replaced upstream",
    "refused",
]


@dataclass(frozen=True)
class SiteState:
    """One edit site for one variant. `line` is where it stands (from 1; 0: nowhere), `reason`
    one sentence or empty."""

    variant: str
    site: str
    state: State
    reason: str = ""
    line: int = 0


#: How one generated test ended; `error`: it could not be made.
Outcome: TypeAlias = Literal["passed", "failed", "error", "skipped"]


@dataclass(frozen=True)
class RanTest:
    """One generated test: its id as pytest takes it below the folder of the functions, why it
    failed or was skipped, and the seconds that it took."""

    id: str
    outcome: Outcome
    message: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class Wait:
    """One place where the host waits for the GPU, of `inspect`.

    `step`: what waits there: `plan` is FlashInfer's own, the others are steps of SGLang's file.
    `when`: of a plan for which plans, of a step on which occasions. `way`: the calls to it,
    outermost first. `kind`: one of `flow.tensors.KINDS`. `times`: how often in one plan or step.
    `condition`: what the source does not decide; empty: always. `counted`: whether PyTorch's sync
    debug mode reports it. `removed_by`: the variant that removes it, empty where it stays; `note`
    is why then.
    """

    file: str
    line: int
    step: str
    when: tuple[str, ...]
    way: tuple[str, ...]
    expression: str
    kind: str
    times: int
    condition: str
    counted: bool
    removed_by: str
    note: str


@dataclass(frozen=True)
class Report:
    """What one run of a command found.

    `facts` are pairs of name and value, a name may come more than once. `diff` is what
    `unified_diff` made, through `as_text`; empty where none was asked for or nothing changes.
    `tests` are the generated tests that ran; of them the text shows what the facts, problems and
    notes say.
    """

    command: str
    exit_code: int
    problems: tuple[Problem, ...] = ()
    sites: tuple[SiteState, ...] = ()
    facts: Facts = ()
    diff: str = ""
    notes: tuple[str, ...] = ()
    tests: tuple[RanTest, ...] = ()
    waits: tuple[Wait, ...] = ()
    differences: tuple[Difference, ...] = ()


def render_text(report: Report, *, diff: bool = True) -> str:
    """The report for people: facts, sites, problems, notes, the diff. Empty parts are left out;
    ends in a line end unless it is empty. Control characters are escaped, but for the diff, which
    is verbatim; it comes last, and `git apply` passes over what stands before it.

    Args:
        diff: False leaves the diff out.
    """
    parts = [
        _facts_table((*report.facts, *rows(report.differences))),
        _sites_table(report.sites),
        [line for problem in report.problems for line in _printable(str(problem)).split("\n")],
        [line for note in report.notes for line in _wrapped(f"note: {note}", "  ")],
    ]
    notes = sum(problem.message.startswith("note: ") for problem in report.problems)
    if len(report.problems) > 1:
        faults = len(report.problems) - notes
        parts[2].append(f"{faults} problems" + (f", {notes} notes" if notes else ""))
    text = "\n\n".join("\n".join(part) for part in parts if part)
    if text:
        text += "\n"
    if diff and report.diff:
        text += ("\n" if text else "") + report.diff
    return text


def render_json(report: Report) -> str:
    """The report for machines: one JSON object, keys sorted, ASCII, with a final line end.

    `diff_encoding` says how to read `diff`: `utf-8`, or `base64` where the patched file is not
    UTF-8 (JSON has no bytes). A `line` or `column` of 0 is unknown.
    """
    try:
        diff, encoding = as_bytes(report.diff).decode("utf-8"), "utf-8"
    except UnicodeDecodeError:
        diff, encoding = base64.b64encode(as_bytes(report.diff)).decode("ascii"), "base64"
    content = {
        "schema_version": SCHEMA_VERSION,
        "command": report.command,
        "exit_code": report.exit_code,
        "problems": [asdict(problem) for problem in report.problems],
        "sites": [asdict(site) for site in report.sites],
        "facts": [{"name": name, "value": value} for name, value in report.facts],
        "notes": list(report.notes),
        "tests": [asdict(test) for test in report.tests],
        "waits": [asdict(wait) for wait in report.waits],
        "differences": [asdict(item) for item in report.differences],
    }
    content = _valid_unicode(content) | {"diff": diff, "diff_encoding": encoding}
    return json.dumps(content, indent=2, sort_keys=True) + "\n"


def render_github(report: Report) -> str:
    """The report as workflow commands, which GitHub shows beside the lines they name.

    One line a problem: an error, or a warning where it fails nothing (a `note:`, or any problem of
    a command that exits 0). A failure without such a problem is one error with what the notes say.
    All notes follow as plain text, the diff is left out: nothing but these commands may begin a
    line as a command does, whatever a file at hand contains.

    GitHub takes a path from the root of the checkout, and shows ten annotations of a kind a step.
    """
    fails = bool(report.exit_code)
    lines = []
    failed = False
    for problem in report.problems:
        is_error = fails and not problem.message.startswith("note: ")
        failed |= is_error
        lines.append(_annotation("error" if is_error else "warning", problem))
    if fails and not failed:
        what = "\n".join(report.notes) or f"exit code {report.exit_code}"
        about = {"title": f"mlagen {report.command}"}
        if "file" in dict(report.facts):
            about = {"file": dict(report.facts)["file"], **about}
        lines.append(_workflow_command("error", about, what))
    lines += [_no_command(f"note: {_in_one_line(note)}") for note in report.notes]
    return "".join(line + "\n" for line in lines)


def _annotation(level: str, problem: Problem) -> str:
    place = {"file": problem.path}
    if problem.line:
        place["line"] = str(problem.line)
        if problem.column:
            place["col"] = str(problem.column)
    message = problem.message.removeprefix("note: ")
    text = f"{message}\nhint: {problem.hint}" if problem.hint else message
    return _workflow_command(level, {**place, "title": f"mlagen: {problem.code}"}, text)


def _workflow_command(name: str, properties: Mapping[str, str], message: str) -> str:
    """`::name key=value,...::message`, escaped as the runner takes it back
    (actions/toolkit, packages/core/src/command.ts)."""
    given = ",".join(
        f"{key}={_escaped(value).replace(':', '%3A').replace(',', '%2C')}"
        for key, value in properties.items()
    )
    return f"::{name} {given}::{_escaped(message)}"


def _escaped(text: str) -> str:
    # The runner undoes these; other control characters are spelled, as in a text report.
    text = text.replace("%", "%25").replace("\r", "%0D")
    return _printable(text).replace("\n", "%0A")


def _no_command(line: str) -> str:
    """A line of plain text. The runner takes the older `##[command]` anywhere in it."""
    return line.replace("##[", "## [")


def unified_diff(label: str, old: bytes, new: bytes) -> bytes:
    """A diff that `git apply` takes, with three lines of context; empty where nothing changed.

    Lines are what git takes for lines: they end in LF, any other byte is theirs, a CR too.

    Args:
        label: the file's path from where `git apply` runs, with `/`.
    """
    if old == new:
        return b""
    before, after = _lf_lines(old), _lf_lines(new)
    first, second = _quoted(b"a/" + as_bytes(label)), _quoted(b"b/" + as_bytes(label))
    # git ends a name with a blank in it by a tab here.
    tab = b"\t" if " " in label else b""
    out = [
        b"diff --git " + first + b" " + second + b"\n",
        b"--- " + first + tab + b"\n",
        b"+++ " + second + tab + b"\n",
    ]
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    for group in matcher.get_grouped_opcodes(3):
        old_range = _range(group[0][1], group[-1][2])
        new_range = _range(group[0][3], group[-1][4])
        out.append(f"@@ -{old_range} +{new_range} @@\n".encode("ascii"))
        for tag, old_start, old_end, new_start, new_end in group:
            if tag == "equal":
                out += _marked(b" ", before[old_start:old_end])
            else:
                out += _marked(b"-", before[old_start:old_end])
                out += _marked(b"+", after[new_start:new_end])
    return b"".join(out)


class Printer:
    """Writes to the two streams. Text made of other than UTF-8 bytes (`as_text`) comes out as
    these bytes, and no line end is translated: a diff has to arrive as it is.

    Args:
        stdout, stderr: None takes the ones of `sys` at each call.
        quiet: leave progress out.
    """

    def __init__(
        self, stdout: TextIO | None = None, stderr: TextIO | None = None, *, quiet: bool = False
    ) -> None:
        self._stdout = stdout
        self._stderr = stderr
        self._quiet = quiet

    def answer(self, text: str) -> None:
        """To stdout, with a line end where `text` has none at its end; nothing for empty text.

        Raises UsageError where it cannot be written, OSError where its reader went away.
        """
        try:
            _write(self._stdout or sys.stdout, text)
        except OSError as error:
            if error.errno == errno.EPIPE:
                raise
            raise unanswered(error) from None

    def progress(self, text: str) -> None:
        """To stderr, likewise, with control characters escaped; nothing when quiet. Where stderr
        cannot be written, nobody is to be told; the work, and its exit code, are as they are."""
        if not self._quiet:
            try:
                _write(self._stderr or sys.stderr, _printable(text))
            except OSError as error:
                if error.errno == errno.EPIPE:
                    raise
                flush_or_drop()

    def report(self, report: Report, form: Format = "text") -> None:
        """Print a report. As text with a diff, the diff alone is the answer, to be piped on, and
        the rest is progress."""
        if form == "json":
            self.answer(render_json(report))
        elif form == "github":
            self.answer(render_github(report))
        elif report.diff:
            self.progress(render_text(report, diff=False))
            self.answer(report.diff)
        else:
            self.answer(render_text(report))


def unanswered(error: OSError) -> UsageError:
    """What is told where stdout cannot be written."""
    message = f"the answer cannot be written: {error.strerror or error}"
    hint = "make room where stdout goes, and run again"
    return usage(message, path="stdout", code="not-written", hint=hint)


def flush_or_drop() -> None:
    """Leave nothing unwritten in stdout and stderr: Python would try again at its end, and exit
    with 120 where that fails too. What they cannot take is dropped."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            with suppress(OSError, ValueError):  # a stream that is no file has no number
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, stream.fileno())
                os.close(nowhere)
                stream.flush()


# --- text -------------------------------------------------------------------------------------


def _facts_table(facts: Sequence[tuple[str, str]]) -> list[str]:
    rows = [(_in_one_line(name), _in_one_line(value)) for name, value in facts]
    # One long name does not push all values to the right.
    width = min(max((len(name) for name, _ in rows), default=0), WIDTH // 3)
    out = []
    for name, value in rows:
        if len(name) > width:
            out += _wrapped(name, "")
            out += _wrapped(" " * (width + 2) + value, " " * (width + 2))
        else:
            out += _wrapped(f"{name:<{width}}  {value}", " " * (width + 2))
    return out


def _sites_table(sites: Sequence[SiteState]) -> list[str]:
    if not sites:
        return []
    rows = [("variant", "site", "line", "state", "")]
    for site in sites:
        line = str(site.line) if site.line else "-"
        rows.append((site.variant, site.site, line, site.state, site.reason))
    cells = [tuple(_in_one_line(cell) for cell in row) for row in rows]
    widths = [max(len(row[column]) for row in cells) for column in range(4)]
    out = []
    for variant, site_id, line, state, reason in cells:
        start = (
            f"{variant:<{widths[0]}}  {site_id:<{widths[1]}}  "
            f"{line:>{widths[2]}}  {state:<{widths[3]}}"
        )
        if reason and len(start) + 2 + len(reason) <= WIDTH:
            out.append(f"{start}  {reason}")
        else:
            out.append(start.rstrip())
            out += _wrapped(f"    {reason}", "    ") if reason else []
    return out


def _wrapped(text: str, indent: str) -> list[str]:
    """`text` in lines of at most `WIDTH` columns, from the second on behind `indent`. Words
    longer than that (paths, digests) stay whole."""
    return textwrap.wrap(
        _printable(text),
        WIDTH,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
        drop_whitespace=True,
        replace_whitespace=False,
    ) or [text]


def _in_one_line(text: str) -> str:
    return _printable(" ".join(text.split("\n")))


def _printable(text: str) -> str:
    """`text` with control characters escaped, so that no file content steers a terminal."""
    if text.isprintable():
        return text
    return "".join(
        char
        if char == "\n" or char.isprintable() or 0xDC80 <= ord(char) <= 0xDCFF
        else char.encode("unicode_escape").decode("ascii")
        for char in text
    )


def _write(stream: TextIO, text: str) -> None:
    if not text:
        return
    if not text.endswith("\n"):
        text += "\n"
    binary = getattr(stream, "buffer", None)
    if binary is None:
        stream.write(_encoded(text).decode("utf-8", "backslashreplace"))
        stream.flush()
        return
    stream.flush()
    binary.write(_encoded(text))
    binary.flush()


def _encoded(text: str) -> bytes:
    """`as_bytes`, but for surrogates that stand for no byte, which are escaped."""
    try:
        return as_bytes(text)
    except UnicodeEncodeError:
        return text.encode("utf-8", "backslashreplace")


def _valid_unicode(value: Any) -> Any:
    """`value` with undecodable bytes in its strings (of odd paths) spelled `\\xNN`: many JSON
    readers refuse lone surrogates."""
    if isinstance(value, str):
        return _encoded(value).decode("utf-8", "backslashreplace")
    if isinstance(value, list | tuple):
        return [_valid_unicode(item) for item in value]
    if isinstance(value, dict):
        return {key: _valid_unicode(item) for key, item in value.items()}
    return value


# --- diff -------------------------------------------------------------------------------------


def _lf_lines(data: bytes) -> list[bytes]:
    lines = data.split(b"\n")
    last = lines.pop()
    return [line + b"\n" for line in lines] + ([last] if last else [])


def _marked(mark: bytes, lines: Iterable[bytes]) -> list[bytes]:
    return [
        mark + (line if line.endswith(b"\n") else line + b"\n\\ No newline at end of file\n")
        for line in lines
    ]


def _range(start: int, end: int) -> str:
    """`start`, `end` from 0 as a hunk header says it: an empty range names the line before."""
    count = end - start
    if count == 1:
        return str(start + 1)
    return f"{start + 1 if count else start},{count}"


def _quoted(name: bytes) -> bytes:
    """A file name as git writes it: in C's quotes where it has control characters or quotes."""
    if not any(byte < 0x20 or byte in b'"\\\x7f' for byte in name):
        return name
    return b'"%s"' % b"".join(
        b"\\%03o" % byte
        if byte < 0x20 or byte == 0x7F
        else b"\\" + bytes([byte])
        if byte in b'"\\'
        else bytes([byte])
        for byte in name
    )
