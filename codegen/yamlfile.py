"""YAML text -> nodes that know where they stand.

`yaml.compose` gives nodes without building a single Python object, so no tag can run code.
Everything that is wrong becomes a `Problem` with line and column, and nothing else escapes,
whatever the bytes are: sizes, nesting and aliases are bounded.
"""

from __future__ import annotations

import codecs
from dataclasses import dataclass, field
from typing import Any

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from .errors import Problem

MAX_BYTES = 256 * 1024
#: A spec is four levels deep.
MAX_DEPTH = 16
MAX_ALIASES = 100

_BLANK = " \t\r\n"


@dataclass
class YamlFile:
    """One YAML document.

    Attributes:
        path: as it is shown in problems.
        text: decoded, without byte order mark.
        root: the document's node; None where the text cannot be read at all.
        problems: what was found so far, in no order.
    """

    path: str
    text: str = ""
    root: Node | None = None
    problems: list[Problem] = field(default_factory=list)

    def report(self, where: Node | int, code: str, message: str, hint: str = "") -> None:
        """Add a problem at a node's start, or at an index into `text`."""
        index = where if isinstance(where, int) else where.start_mark.index
        line, column = self.place(index)
        self.problems.append(Problem(self.path, line, column, code, message, hint))

    def place(self, index: int) -> tuple[int, int]:
        """Line and column, both from 1, of an index into `text`."""
        before = self.text[:index]
        return before.count("\n") + 1, index - (before.rfind("\n") + 1) + 1

    def index_in(self, node: Node, offset: int) -> int:
        """Index into `text` of character `offset` of a scalar's value.

        Quotes, folding and block headers leave the sequence of non-blank characters as it is,
        so it is counted by those. Where they do not (escapes), it is the scalar's start.
        """
        if not isinstance(node, ScalarNode):
            return int(node.start_mark.index)
        start, end = node.start_mark.index, node.end_mark.index
        if node.style in ("|", ">"):
            start = self.text.find("\n", start, end) + 1 or end
        elif node.style is not None:
            start, end = start + 1, end - 1
        raw = self.text[start:end]
        solid = [index for index, character in enumerate(raw) if character not in _BLANK]
        if [raw[index] for index in solid] != [c for c in node.value if c not in _BLANK]:
            return node.start_mark.index
        count = sum(character not in _BLANK for character in node.value[:offset])
        if count < len(solid):
            return start + solid[count]
        return start + solid[-1] + 1 if solid else node.start_mark.index

    def ordered(self) -> tuple[Problem, ...]:
        """The problems in the order of the file, each once."""
        return tuple(dict.fromkeys(sorted(self.problems, key=lambda p: (p.line, p.column))))


def read(data: bytes, path: str) -> YamlFile:
    """Compose the one document in `data`. Never raises: see `problems`."""
    file = YamlFile(path)
    if len(data) > MAX_BYTES:
        file.report(0, "too-large", f"the file is larger than {MAX_BYTES // 1024} KiB")
        return file
    data = data.removeprefix(codecs.BOM_UTF8)
    try:
        file.text = data.decode()
    except UnicodeDecodeError as error:
        _report_encoding(file, data, error)
        return file
    loader: _Loader | None = None
    try:
        loader = _Loader(file.text)
        file.root = loader.get_single_node()
    except _RefusedError as error:
        file.report(error.index, error.code, error.message)
    except yaml.MarkedYAMLError as error:
        _report_syntax(file, error)
    except yaml.reader.ReaderError as error:
        # For a text, `character` is its code point (the type stubs do not say so).
        shown = f"U+{int(error.character):04X}"
        file.report(error.position, "yaml-syntax", f"{shown} is no character that YAML allows")
    except (ValueError, OverflowError):
        # PyYAML lets these through for \U escapes and %YAML versions that are out of range.
        index = loader.index if loader else 0
        file.report(index, "yaml-syntax", "a number here is out of range")
    if loader is not None:
        _report_tags(file, loader)
    return file


class _RefusedError(Exception):
    def __init__(self, index: int, code: str, message: str) -> None:
        super().__init__(message)
        self.index, self.code, self.message = index, code, message


class _Loader(yaml.SafeLoader):
    """Counts depth and aliases while it composes, and notes explicit tags."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.depth = 0
        self.aliases = 0
        self.tags: list[tuple[int, str]] = []

    def compose_node(self, parent: Node | None, index: int) -> Node | None:
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        start = event.start_mark.index
        if isinstance(event, yaml.AliasEvent):
            self.aliases += 1
            if self.aliases > MAX_ALIASES:
                raise _RefusedError(start, "yaml-aliases", f"more than {MAX_ALIASES} aliases")
        elif event.tag is not None:
            self.tags.append((start, event.tag))
        self.depth += 1
        if self.depth > MAX_DEPTH:
            message = f"lists and mappings are nested deeper than {MAX_DEPTH}"
            raise _RefusedError(start, "yaml-depth", message)
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


def _report_encoding(file: YamlFile, data: bytes, error: UnicodeDecodeError) -> None:
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        file.report(0, "not-utf8", "the file is UTF-16", "save it as UTF-8")
        return
    # What stands before the first bad byte is good.
    file.text = data[: error.start].decode()
    message = f"byte 0x{data[error.start]:02x} is not UTF-8"
    file.report(len(file.text), "not-utf8", message, "save the file as UTF-8")


def _report_syntax(file: YamlFile, error: yaml.MarkedYAMLError) -> None:
    mark = error.problem_mark or error.context_mark
    index = mark.index if mark else 0
    problem = error.problem or "not YAML"
    if file.text[index : index + 1] == "\t" and "cannot start any token" in problem:
        message, hint = "a tab stands where YAML wants spaces", "indent with spaces"
        file.report(index, "yaml-tab", message, hint)
        return
    if isinstance(error, yaml.composer.ComposerError) and "another document" in problem:
        message, hint = "a second YAML document begins", "keep one document in the file"
        file.report(index, "yaml-documents", message, hint)
        return
    where = ""
    if error.context and error.context_mark:
        line, _ = file.place(error.context_mark.index)
        where = f" ({error.context}, line {line})"
    elif error.context:
        where = f" ({error.context})"
    # Some of PyYAML's texts quote the file: keep what they quote printable and on one line.
    message = "".join(
        c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in problem + where
    )
    file.report(index, "yaml-syntax", message)


def _report_tags(file: YamlFile, loader: _Loader) -> None:
    for index, tag in loader.tags:
        shown = tag.replace("tag:yaml.org,2002:", "!!", 1)
        file.report(index, "yaml-tag", f"the tag {quoted(shown)} is not allowed", "take it away")


# --- words for messages ----------------------------------------------------------------------


def quoted(text: str) -> str:
    """`text` in quotes, shortened, with everything unprintable escaped."""
    shown = repr(text if len(text) <= 60 else text[:57] + "...")
    return shown.encode("utf-8", "backslashreplace").decode("utf-8")


def found(node: Node) -> str:
    """What stands at a node, as YAML 1.1 takes it, for "expected ..., found ..."."""
    if isinstance(node, SequenceNode):
        return "a list"
    if isinstance(node, MappingNode):
        return "a mapping"
    kind = node.tag.rpartition(":")[2]
    if kind == "null":
        return "nothing"
    words = {
        "bool": "the boolean",
        "int": "the number",
        "float": "the number",
        "timestamp": "the date",
        "merge": "the merge key",
        "value": "the default key",
    }
    return f"{words.get(kind, 'the text')} {quoted(node.value)}"


def is_text(node: Node) -> bool:
    """True for a scalar that YAML 1.1 takes as text (yes, on, 12 and ~ are not)."""
    return isinstance(node, ScalarNode) and str(node.tag) == "tag:yaml.org,2002:str"


def is_value(node: Node) -> bool:
    """True for a scalar that is not null (`~`, `null`, or nothing at all)."""
    return isinstance(node, ScalarNode) and str(node.tag) != "tag:yaml.org,2002:null"
