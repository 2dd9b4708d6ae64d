"""What mlagen leaves in a file: marked regions, the header in the first, and MANIFEST.json.

Every edit of SGLang's file is a region of whole lines between two comment lines:

    # >>> mlagen <site> <checksum> [no-eol]
    ...emitted lines...
    # --- mlagen replaced 2 lines:
    # |<first replaced line, byte for byte behind the bar>
    # |<second>
    # <<< mlagen <site>

so that `remove_regions` restores the file from the file alone. All text here is bytes decoded
by `as_text`: UTF-8 with `surrogateescape`, which keeps any byte of any encoding, and splits
lines only where Python does: LF, CRLF and a lone CR.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Final

from .errors import DriftError, EditedError, Problem
from .flashinfer.api import UNKNOWN_ERA

#: The version of the marks, the header and the manifest that this mlagen writes and reads.
FORMAT: Final = 1
#: The site of the region that holds the header.
HEADER_SITE: Final = "header"

_BOM = "\ufeff"
_LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+")
_SITE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\Z")
_MARK = re.compile(r"([ \t\f]*)# (>>>|---|<<<) mlagen(?: (.*))?\Z")
_START = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*) ([0-9a-f]{12})( no-eol)?\Z")
_REPLACED = re.compile(r"replaced ([1-9][0-9]{0,6}) lines?:\Z")
_BAR = re.compile(r"[ \t\f]*# \|")
_FORMAT_LINE = re.compile(r"[ \t\f]*# format: ([0-9]{1,9})\Z")
# PEP 263.
_COOKIE = re.compile(r"[ \t\f]*#.*?coding[:=][ \t]*([-\w.]+)")
# Comments and string literals. A triple quote that is never closed runs to the end of the file;
# a single quote that is not closed on its line matches nothing, and the next line is code again.
_COMMENT_OR_STRING = re.compile(
    r"""
      \#[^\r\n]*
    | \"\"\"[^"\\]*(?:(?:\\.|"(?!""))[^"\\]*)*(?:\"\"\"|\Z)
    | '''[^'\\]*(?:(?:\\.|'(?!''))[^'\\]*)*(?:'''|\Z)
    | "(?:\\(?:\r\n|.)|[^"\\\r\n])*"
    | '(?:\\(?:\r\n|.)|[^'\\\r\n])*'
    """,
    re.VERBOSE | re.DOTALL,
)
#: Lines of a text comparison that an error shows before it stops.
_SHOWN_LINES = 60


@dataclass(frozen=True)
class Region:
    """One region as it stands in a file.

    Attributes:
        site: id of the edit site; once a file.
        checksum: the 12 hex digits in the start mark.
        start_line, end_line: of the two marks, from 1.
        emitted: the lines that mlagen wrote, without line ends.
        replaced: the lines of the file that they stand for, with their own line ends; the last
            has none where it ended the file without one. Empty for a plain insertion.
        intact: whether the lines between the marks still have the checksum and the shape that
            `build_region` gave them.
        indent: what stands before the start mark.
        no_eol: the file did not end in a line end before this region came.
    """

    site: str
    checksum: str
    start_line: int
    end_line: int
    emitted: tuple[str, ...]
    replaced: tuple[str, ...]
    intact: bool
    indent: str = ""
    no_eol: bool = False


@dataclass(frozen=True)
class Edit:
    """One edit to make with `apply_edits`: `count` lines from `line` (from 1) on give way to
    `emitted`; with count 0 `emitted` goes before `line`, which may be one past the last."""

    site: str
    line: int
    count: int
    indent: str
    emitted: tuple[str, ...]


@dataclass(frozen=True)
class Header:
    """What the header region says: which mlagen wrote, for which FlashInfer, from which spec.

    `flashinfer` is None where FlashInfer's source does not tell its version. `source_digest` is
    over the FlashInfer files that were read (PlanApi.digest), `spec_digest` over variants.yaml.
    `inserts` and `replaces` are the sites of all regions that were written, in the order of the
    file, without and with lines of the file that they stand for; both are empty in a header from
    before they were listed.
    """

    mlagen: str
    flashinfer: str | None
    era: str
    source_digest: str
    spec_digest: str
    variants: tuple[str, ...]
    inserts: tuple[str, ...] = ()
    replaces: tuple[str, ...] = ()
    format: int = FORMAT

    @property
    def derived(self) -> bool:
        """Whether FlashInfer's era was not known, and --allow-unknown was given."""
        return self.era.startswith(UNKNOWN_ERA)


@dataclass(frozen=True)
class Manifest:
    """MANIFEST.json: the FlashInfer that generated/ was rendered for, and what was rendered.

    `requirement` is what a later run can fetch the same FlashInfer by, such as
    `flashinfer-python==0.6.17`; None where it came from a folder. `files` maps the name below
    generated/ (with `/`) to the sha256 of its bytes.
    """

    flashinfer: str | None
    era: str
    source_digest: str
    requirement: str | None
    spec_digest: str
    files: Mapping[str, str]


# --- text -------------------------------------------------------------------------------------


def as_text(data: bytes) -> str:
    """Bytes as the text that this module works on. `as_bytes` gives the same bytes back, also
    where they are not UTF-8."""
    return data.decode("utf-8", "surrogateescape")


def as_bytes(text: str) -> bytes:
    """The inverse of `as_text`."""
    return text.encode("utf-8", "surrogateescape")


def split_lines(text: str) -> list[str]:
    """The lines of `text`, each with its line end: LF, CRLF or CR, nothing else (str.splitlines
    would also split at form feeds and U+2028, which Python does not)."""
    return _LINE.findall(text)


def newline_of(text: str) -> str:
    """The line end for lines that are added to `text`: the more frequent of LF and CRLF. Never a
    lone CR: before an empty LF line it would make one CRLF of two line ends."""
    crlf = text.count("\r\n")
    return "\r\n" if crlf > text.count("\n") - crlf else "\n"


def _bare(line: str) -> str:
    """`line` without its line end."""
    return line.rstrip("\r\n")


# --- regions ----------------------------------------------------------------------------------


def build_region(
    site: str,
    indent: str,
    emitted: Sequence[str],
    replaced: Sequence[str],
    newline: str,
    *,
    no_eol: bool = False,
) -> list[str]:
    """The lines of a region, each with its line end.

    Args:
        site: id of the edit site, letters, digits and `._-`.
        indent: white space that goes before the marks and bars.
        emitted: lines without line ends, taken as they are: already indented.
        replaced: lines of the file with their line ends; the last may have none.
        newline: LF or CRLF, the end of every line that is not the file's own (`newline_of`).
        no_eol: for an insertion after a last line that has no line end, to which the caller
            adds `newline`; where the last replaced line has none, this is found out here.

    Raises:
        ValueError: for arguments of which no region can be made.
    """
    if not _SITE.match(site):
        raise ValueError(f"not a site id: {site!r}")
    if indent.strip(" \t\f"):
        raise ValueError(f"{site}: not an indentation: {indent!r}")
    if newline not in ("\n", "\r\n"):
        raise ValueError(f"{site}: not a line end for emitted lines: {newline!r}")
    body = []
    for line in emitted:
        if "\n" in line or "\r" in line:
            raise ValueError(f"{site}: more than one line in {line!r}")
        if _MARK.match(line):
            raise ValueError(f"{site}: emitted line looks like a mark of mlagen: {line!r}")
        body.append(line + newline)
    if replaced:
        plural = "" if len(replaced) == 1 else "s"
        body.append(f"{indent}# --- mlagen replaced {len(replaced)} line{plural}:{newline}")
        for number, line in enumerate(replaced, 1):
            if split_lines(line) != [line]:
                raise ValueError(f"{site}: not one line: {line!r}")
            if _bare(line) == line:
                if number < len(replaced):
                    raise ValueError(f"{site}: line end missing: {line!r}")
                no_eol = True
                line += newline
            body.append(f"{indent}# |{line}")
    flag = " no-eol" if no_eol else ""
    return [
        f"{indent}# >>> mlagen {site} {_checksum(body)}{flag}{newline}",
        *body,
        f"{indent}# <<< mlagen {site}{newline}",
    ]


def find_regions(source: str | bytes, *, path: str = "<source>") -> tuple[Region, ...]:
    """The regions of a file, in its order; bytes, or text made by `as_text`.

    A mark counts only where the line, its indentation taken off, starts with it. `path` is what
    errors call the file.

    Raises:
        EditedError: a mark is not closed, not opened, nested, used twice or not readable; all of
            them in one error.
        DriftError: a mark stands inside a string literal, or a newer mlagen made the regions.
    """
    text = as_text(source) if isinstance(source, bytes) else source
    if " mlagen" not in text:
        return ()
    bom = _BOM if text.startswith(_BOM) else ""
    return _find(split_lines(text[len(bom) :]), path)


def remove_regions(data: bytes, *, path: str = "<source>") -> bytes:
    """`data` as it was before the first region came: the exact bytes.

    Where code was added behind a region at the end of a file that had no final line end, that
    line end stays.

    Raises:
        EditedError: a region is not intact (a problem for each), or as `find_regions`.
        DriftError: as `find_regions`.
    """
    text = as_text(data)
    regions = find_regions(text, path=path)
    if not regions:
        return data
    edited = [region for region in regions if not region.intact]
    if edited:
        raise EditedError(*(edited_problem(region, None, path=path) for region in edited))
    bom = _BOM if text.startswith(_BOM) else ""
    lines = split_lines(text[len(bom) :])
    kept: list[str] = []
    last_without_end = 0
    position = 0
    for region in regions:
        kept += lines[position : region.start_line - 1]
        inner = lines[region.start_line : region.end_line - 1]
        kept += [_behind_bar(line) for line in inner[len(inner) - len(region.replaced) :]]
        position = region.end_line
        if region.no_eol:
            last_without_end = len(kept)
    kept += lines[position:]
    if kept and last_without_end == len(kept):
        kept[-1] = _bare(kept[-1])
    return as_bytes(bom + "".join(kept))


def apply_edits(data: bytes, edits: Iterable[Edit], *, path: str = "<source>") -> bytes:
    """`data` with each edit made as a region; several insertions at one line keep their order.

    The inverse of `remove_regions`, which is run on the result before it is given out.

    Raises:
        ValueError: edits overlap, lie outside the file, or would move its coding line.
        EditedError, DriftError: as `find_regions`; also for an edit inside a string literal.
    """
    if find_regions(data, path=path):
        raise ValueError(f"{path}: has regions already; take them out first")
    text = as_text(data)
    bom = _BOM if text.startswith(_BOM) else ""
    lines = split_lines(text[len(bom) :])
    newline = newline_of(text)
    unended = bool(lines) and _bare(lines[-1]) == lines[-1]
    out: list[str] = []
    position = 0
    for edit in sorted(edits, key=lambda edit: (edit.line, edit.count > 0)):
        start = edit.line - 1
        if start < position or edit.count < 0 or start + edit.count > len(lines):
            raise ValueError(f"{edit.site}: overlaps another edit or lies outside {path}")
        out += lines[position:start]
        at_unended_end = unended and position < len(lines) == start
        if at_unended_end:
            out[-1] += newline
        replaced = lines[start : start + edit.count]
        out += build_region(
            edit.site, edit.indent, edit.emitted, replaced, newline, no_eol=at_unended_end
        )
        position = start + edit.count
    out += lines[position:]
    if _coding_lines(lines) != _coding_lines(out):
        raise ValueError(f"{path}: an edit would change which coding line counts")
    patched = as_bytes(bom + "".join(out))
    if remove_regions(patched, path=path) != data:
        raise ValueError(f"{path}: these edits could not be taken out again")
    return patched


def edited_problem(region: Region, expected_text: str | None, *, path: str = "<source>") -> Problem:
    """The problem to report for a region that is not intact.

    Args:
        expected_text: the emitted lines as mlagen would write them now, or None where that is
            not known; then only what stands there is shown, and where the rest is to be had.
    """
    found = [_shown(line) for line in region.emitted]
    kept = [f"# |{_shown(_bare(line))}" for line in region.replaced]
    head = f"the lines between the marks of {region.site!r} are not as mlagen left them"
    if expected_text is None:
        body = ["what stands there:", *(f"  {line}" for line in found + kept)]
    else:
        expected = [_shown(_bare(line)) for line in split_lines(expected_text)]
        difference = list(difflib.unified_diff(expected, found, n=3, lineterm=""))[2:]
        if difference:
            body = ["- what mlagen writes, + what stands there:"]
            body += [f"  {line}" for line in difference]
        else:
            body = ["the emitted lines are as expected: the mark or a kept line was changed"]
            body += [f"  {line}" for line in kept]
    if len(body) > _SHOWN_LINES:
        body[_SHOWN_LINES:] = [f"  ... {len(body) - _SHOWN_LINES} more lines"]
    return Problem(
        path,
        region.start_line,
        0,
        "edited-region",
        "\n".join([head, *(f"    {line}".rstrip() for line in body)]),
        "move the change outside the marks and put these lines back (or take the file from "
        "version control), then run again"
        if expected_text is not None
        else "move the change outside the marks and put back what mlagen left there (`mlagen patch "
        "--diff`, with the FlashInfer and the spec of then, shows it), or take the file from "
        "version control; then run again",
    )


def _find(lines: list[str], path: str) -> tuple[Region, ...]:
    marks = [
        (number, match)
        for number, line in enumerate(lines, 1)
        if " mlagen" in line and (match := _MARK.match(_bare(line)))
    ]
    if not marks:
        return ()
    _refuse_marks_in_strings(lines, [number for number, _ in marks], path)
    _refuse_newer(lines, *marks[0], path)

    problems: list[Problem] = []

    def complain(line: int, code: str, message: str) -> None:
        hint = "take the file from version control or reinstall the package, then patch again"
        problems.append(Problem(path, line, 0, code, message, hint))

    regions: list[Region] = []
    seen: dict[str, int] = {}
    opened: tuple[int, re.Match[str], re.Match[str]] | None = None
    for number, mark in marks:
        kind, rest = mark[2], mark[3] or ""
        if kind == ">>>":
            if opened is not None:
                complain(
                    opened[0],
                    "unclosed-region",
                    f"region {opened[2][1]!r} is not closed before the next starts, "
                    f"in line {number}",
                )
                opened = None
            start = _START.match(rest)
            if start is None:
                complain(number, "unknown-mark", f"not a start mark that mlagen writes: {rest!r}")
                continue
            if start[1] in seen:
                complain(
                    number,
                    "duplicate-region",
                    f"region {start[1]!r} stands in line {seen[start[1]]} already",
                )
            seen.setdefault(start[1], number)
            opened = (number, mark, start)
        elif kind == "<<<":
            if opened is None or opened[2][1] != rest:
                expected = "none is open" if opened is None else f"{opened[2][1]!r} is open"
                complain(
                    number, "unopened-region", f"end mark of region {rest!r}, where {expected}"
                )
            else:
                first, start_mark, start = opened
                regions.append(_region(lines, first, number, start_mark[1], start))
            opened = None
        elif opened is None:
            complain(number, "unknown-mark", f"a mark of mlagen outside its regions: {rest!r}")
    if opened is not None:
        complain(
            opened[0], "unclosed-region", f"the end mark of region {opened[2][1]!r} is missing"
        )
    if problems:
        raise EditedError(*problems)
    return tuple(regions)


def _region(lines: list[str], first: int, last: int, indent: str, start: re.Match[str]) -> Region:
    """The region whose marks are lines `first` and `last`."""
    body = lines[first : last - 1]
    no_eol = start[3] is not None
    emitted, replaced = body, []
    well_formed = True
    for position, line in enumerate(body):
        mark = _MARK.match(_bare(line))
        if mark is None:
            continue
        emitted = body[:position]
        replaced = [_behind_bar(bar) for bar in body[position + 1 :] if _BAR.match(bar)]
        count = _REPLACED.match(mark[3] or "")
        well_formed = (
            count is not None and int(count[1]) == len(replaced) == len(body) - position - 1
        )
        break
    if replaced and no_eol:
        replaced[-1] = _bare(replaced[-1])
    return Region(
        site=start[1],
        checksum=start[2],
        start_line=first,
        end_line=last,
        emitted=tuple(_bare(line) for line in emitted),
        replaced=tuple(replaced),
        intact=well_formed and _checksum(body) == start[2],
        indent=indent,
        no_eol=no_eol,
    )


def _behind_bar(line: str) -> str:
    return line.partition("# |")[2]


def _checksum(body: Sequence[str]) -> str:
    """Line ends do not count: a checkout with other line ends is not an edit."""
    text = "".join(_bare(line) + "\n" for line in body)
    return hashlib.sha256(as_bytes(text)).hexdigest()[:12]


def _refuse_marks_in_strings(lines: list[str], marked: Sequence[int], path: str) -> None:
    text = "".join(lines)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    problems = []
    waiting = list(marked)
    for match in _COMMENT_OR_STRING.finditer(text):
        while waiting and starts[waiting[0] - 1] <= match.start():
            waiting.pop(0)
        if not waiting:
            break
        while waiting and starts[waiting[0] - 1] < match.end():
            number = waiting.pop(0)
            opening = len(split_lines(text[: match.start() + 1]))
            problems.append(
                Problem(
                    path,
                    number,
                    0,
                    "mark-in-string",
                    "a line that looks like a mark of mlagen inside the string literal that "
                    f"starts in line {opening}",
                    "such a file cannot be patched and restored safely; reword that line",
                )
            )
    if problems:
        raise DriftError(*problems)


def _refuse_newer(lines: list[str], number: int, first: re.Match[str], path: str) -> None:
    """Look for the header's format line, before anything else of a region is relied upon."""
    if first[2] != ">>>" or not (first[3] or "").startswith(f"{HEADER_SITE} "):
        return
    for offset, line in enumerate(lines[number : number + 20], 1):
        if _MARK.match(_bare(line)):
            return
        found = _FORMAT_LINE.match(_bare(line))
        if found and int(found[1]) > FORMAT:
            raise DriftError(_newer(path, number + offset, int(found[1])))


def _newer(path: str, line: int, found: int) -> Problem:
    return Problem(
        path,
        line,
        0,
        "newer-format",
        f"made by a newer mlagen: format {found}, this one knows up to {FORMAT}",
        "use that mlagen, or upgrade this one",
    )


def _coding_lines(lines: Sequence[str]) -> list[str]:
    """The encoding that the first two lines name, as Python looks for it."""
    return [match[1] for line in lines[:2] if (match := _COOKIE.match(line))]


def _shown(line: str) -> str:
    """`line` for an error text: what cannot be printed is escaped."""
    return line.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


# --- header -----------------------------------------------------------------------------------


def header_lines(fields: Header) -> list[str]:
    """The comment lines of the header region, without line ends or indentation, at most 88
    columns wide unless one value is longer. No date and no path: a re-render is the same.

    Raises:
        ValueError: a value is empty, has a line end or white space around it.
    """
    values = {
        "mlagen": fields.mlagen,
        "flashinfer": "unknown" if fields.flashinfer is None else fields.flashinfer,
        "flashinfer-era": fields.era,
        "flashinfer-source": fields.source_digest,
        "spec": fields.spec_digest,
    }
    for name, value in [*values.items(), *(("variant", name) for name in fields.variants)]:
        if not value or value != value.strip() or not value.isprintable():
            raise ValueError(f"header: not a value for {name}: {value!r}")
    if any("," in name or " " in name for name in fields.variants):
        raise ValueError(f"header: not variant names: {fields.variants!r}")
    sites = (*fields.inserts, *fields.replaces)
    if not all(_SITE.match(site) for site in sites):
        raise ValueError(f"header: not site ids: {sites!r}")
    return [
        "# Written by mlagen; `mlagen unpatch` takes all of it out, byte for byte.",
        f"# format: {fields.format}",
        *(f"# {name}: {value}" for name, value in values.items()),
        *_listed("variants", fields.variants),
        *_listed("inserts", fields.inserts),
        *_listed("replaces", fields.replaces),
    ]


def _listed(key: str, names: Sequence[str]) -> list[str]:
    """The header lines of a list: as many as its names need, none without names."""
    parts = textwrap.wrap(", ".join(names), 75, break_long_words=False, break_on_hyphens=False)
    return [f"# {key}: {part.rstrip(',')}" for part in parts]


def read_header(source: str | bytes, *, path: str = "<source>") -> Header | None:
    """The header of a patched file, None where it has no header region.

    Raises:
        EditedError: the header cannot be read, or as `find_regions`.
        DriftError: as `find_regions`.
    """
    for region in find_regions(source, path=path):
        if region.site != HEADER_SITE:
            continue
        values = _header_values(region)
        try:
            version = values["flashinfer"][0]
            return Header(
                mlagen=values["mlagen"][0],
                flashinfer=None if version == "unknown" else version,
                era=values["flashinfer-era"][0],
                source_digest=values["flashinfer-source"][0],
                spec_digest=values["spec"][0],
                variants=_names(values, "variants"),
                inserts=_names(values, "inserts"),
                replaces=_names(values, "replaces"),
                format=int(values["format"][0]),
            )
        except (KeyError, ValueError):
            raise EditedError(edited_problem(region, None, path=path)) from None
    return None


def listed_regions(header: Region) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The sites that a header region lists, as `Header.inserts` and `Header.replaces`; none where
    it is not intact. Asks nothing else of it: another mlagen may have written it."""
    values = _header_values(header) if header.intact else {}
    return _names(values, "inserts"), _names(values, "replaces")


def _header_values(header: Region) -> dict[str, list[str]]:
    values: dict[str, list[str]] = {}
    for line in header.emitted:
        key, colon, value = line.strip().removeprefix("# ").partition(": ")
        # The region may hold imports below the header lines.
        if colon and line.lstrip().startswith("# "):
            values.setdefault(key, []).append(value.strip())
    return values


def _names(values: Mapping[str, list[str]], key: str) -> tuple[str, ...]:
    """A list of the header, which may take several lines (`_listed`)."""
    return tuple(name for part in values.get(key, []) for name in part.split(", "))


# --- manifest ---------------------------------------------------------------------------------


def manifest(
    *,
    flashinfer: str | None,
    era: str,
    source_digest: str,
    requirement: str | None,
    spec_digest: str,
    files: Mapping[str, bytes],
) -> str:
    """MANIFEST.json for rendered `files` (name below generated/ -> bytes): sorted keys, no date
    and no path. The other fields are those of `Manifest`.

    Raises:
        ValueError: a file name is absolute, has a backslash or leads out of the folder.
    """
    for name in files:
        if not is_plain_name(name):
            raise ValueError(f"manifest: not a name below the folder: {name!r}")
    content = {
        "format": FORMAT,
        "flashinfer": {
            "version": flashinfer,
            "era": era,
            "digest": source_digest,
            "requirement": requirement,
        },
        "spec": spec_digest,
        "files": {name: hashlib.sha256(data).hexdigest() for name, data in files.items()},
    }
    return json.dumps(content, indent=2, sort_keys=True, ensure_ascii=True) + "\n"


def read_manifest(source: str | bytes, *, path: str = "MANIFEST.json") -> Manifest:
    """What `manifest` wrote.

    Raises:
        EditedError: it is not what mlagen writes: broken JSON, a key missing, a wrong type.
        DriftError: a newer mlagen wrote it.
    """

    def refuse(line: int, column: int, message: str) -> EditedError:
        hint = "give --flashinfer, for which `mlagen render` writes it anew, or delete this file"
        return EditedError(Problem(path, line, column, "manifest", message, hint))

    def get(table: Any, key: str, *kinds: type) -> Any:
        if not isinstance(table, dict) or key not in table:
            raise refuse(0, 0, f"key {key!r} is missing")
        if type(table[key]) not in kinds:
            raise refuse(0, 0, f"{key!r} has an unexpected type: {table[key]!r}")
        return table[key]

    try:
        content = json.loads(source)
    except json.JSONDecodeError as error:
        raise refuse(error.lineno, error.colno, f"not JSON: {error.msg}") from None
    except (UnicodeDecodeError, RecursionError) as error:
        raise refuse(0, 0, f"not JSON: {error}") from None
    if get(content, "format", int) > FORMAT:
        raise DriftError(_newer(path, 0, content["format"]))
    origin = get(content, "flashinfer", dict)
    files = get(content, "files", dict)
    for name in files:
        get(files, name, str)
        if not is_plain_name(name):
            raise refuse(0, 0, f"not a name below the folder: {name!r}")
    return Manifest(
        flashinfer=get(origin, "version", str, type(None)),
        era=get(origin, "era", str),
        source_digest=get(origin, "digest", str),
        requirement=get(origin, "requirement", str, type(None)),
        spec_digest=get(content, "spec", str),
        files=dict(files),
    )


def is_plain_name(name: str) -> bool:
    """Whether `name` is a relative `/` path in its shortest form that stays in its folder."""
    return (
        name not in ("", ".")
        and "\\" not in name
        and "\0" not in name
        and not name.startswith("/")
        and ".." not in name.split("/")
        and str(PurePosixPath(name)) == name
    )
