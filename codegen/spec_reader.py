"""YAML nodes -> plain values of the variants, with every problem where it stands.

Written by hand over nodes, since only they know line and column. What is read here always
satisfies the models of spec_model.py.
"""

from __future__ import annotations

import builtins
import difflib
import keyword
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from .fork import ANCHORS
from .formula import Formula, FormulaError, parse
from .spec_model import (
    ANCHOR_PATTERN,
    FUNCTION_PATTERN,
    MAX_DOC,
    MAX_FUNCTION,
    MAX_NAME,
    NAME_PATTERN,
    Buffer,
    Entry,
    Guard,
    Planner,
    Serves,
    When,
    default_function,
    fork_place,
)
from .yamlfile import YamlFile, found, is_text, is_value, quoted

#: Upstream's own plan functions: they stay where they are called.
UPSTREAM_FUNCTIONS = frozenset({"fast_mla_decode_plan", "fast_mla_prefill_plan"})


@dataclass(frozen=True)
class Override:
    """One anchor of a fork: its name there, and the node that says so."""

    anchor: str
    name: str
    node: Node


@dataclass
class Document:
    """A variants.yaml as far as it could be read."""

    drafts: list[Draft] = field(default_factory=list)
    overrides: list[Override] = field(default_factory=list)

    def places(self, file: YamlFile) -> dict[str, tuple[int, int]]:
        """Where each variant, each of its keys and each override stands."""
        places = {key: place for draft in self.drafts for key, place in draft.places(file)}
        for override in self.overrides:
            places[fork_place(override.anchor)] = file.place(override.node.start_mark.index)
        return places


def read_document(file: YamlFile, root: Node) -> Document:
    """A document's variants and overrides, in its order; problems go to `file`."""
    document = _Reader(file).document(root)
    _check_functions(file, document.drafts)
    _check_slots(file, document.drafts)
    _check_overrides(file, document)
    return document


@dataclass
class Draft:
    """One variant as far as it could be read: only what was right is in `values`."""

    key: Node
    values: dict[str, Any]
    nodes: dict[str, Node] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return str(self.values["name"])

    def places(self, file: YamlFile) -> Iterable[tuple[str, tuple[int, int]]]:
        yield self.name, file.place(self.key.start_mark.index)
        for key, node in self.nodes.items():
            yield f"{self.name}.{key}", file.place(node.start_mark.index)


class _Reader:
    """Reads nodes into plain values. A method gives None where it reported a problem."""

    def __init__(self, file: YamlFile) -> None:
        self.file = file
        self.fields: dict[str, Callable[[Node, str], Any]] = {
            "serves": lambda node, key: self.choice(node, key, get_args(Serves)),
            "when": lambda node, key: self.choices(node, key, get_args(When), least=1),
            "planner": lambda node, key: self.choice(node, key, get_args(Planner)),
            "context_parallel": self.boolean,
            "tokens": self.formula,
            "kv_len": self.formula,
            "causal": self.boolean,
            "refresh": lambda node, key: self.choices(node, key, get_args(Buffer)),
            "guards": lambda node, key: self.choices(node, key, get_args(Guard)),
            "function": self.function,
            "doc": self.doc,
        }

    def document(self, root: Node) -> Document:
        needed = ("version", "variants")
        entries = self.entries(root, "the file", (*needed, "fork"))
        if entries is None:
            return Document()
        self.require(root, "the file", needed, entries)
        document = Document()
        for key, (_, node) in entries.items():
            if key == "version":
                self.version(node)
            elif key == "variants":
                document.drafts = self.variants(node)
            elif key == "fork":
                document.overrides = self.fork(node)
        return document

    def fork(self, node: Node) -> list[Override]:
        entries = self.entries(node, "fork", ("anchors",))
        if entries is None or "anchors" not in entries:
            if entries is not None:
                self.require(node, "fork", ("anchors",), entries)
            return []
        _, anchors = entries["anchors"]
        named = self.entries(anchors, "fork: anchors", tuple(ANCHORS))
        if named is None:
            return []
        if isinstance(anchors, MappingNode) and not anchors.value:
            self.file.report(anchors, "empty", "fork: anchors: there is none")
        overrides: list[Override] = []
        for anchor, (_, value) in named.items():
            name = self.anchor(value, anchor)
            if name is not None:
                overrides.append(Override(anchor, name, value))
        return overrides

    def anchor(self, node: Node, anchor: str) -> str | None:
        where = f"fork: anchors: {anchor}"
        name = self.text(node, where)
        if name is None:
            return None
        if not re.fullmatch(ANCHOR_PATTERN, name) or len(name) > MAX_FUNCTION:
            reason = f"is no Python identifier (ASCII, at most {MAX_FUNCTION} characters)"
            hint = f"the bare name of {_article(ANCHORS[anchor].kind)}, without `self.`"
        elif keyword.iskeyword(name):
            reason, hint = "is a Python keyword", ""
        elif name == ANCHORS[anchor].default:
            reason, hint = "is the name that mlagen looks for anyway", "leave the override out"
        else:
            return name
        self.file.report(node, "anchor-name", f"{where}: {quoted(name)} {reason}", hint)
        return None

    def version(self, node: Node) -> None:
        if found(node) != "the number '1'":
            hint = "this mlagen reads version 1"
            self.file.report(
                node, "format-version", f"version: expected 1, found {found(node)}", hint
            )

    def variants(self, node: Node) -> list[Draft]:
        entries = self.entries(node, "variants", None)
        if entries is None:
            return []
        if isinstance(node, MappingNode) and not node.value:
            self.file.report(node, "empty", "variants: there is none")
        return [self.variant(name, key, value) for name, (key, value) in entries.items()]

    def variant(self, name: str, key: Node, node: Node) -> Draft:
        named = re.fullmatch(NAME_PATTERN, name) is not None and len(name) <= MAX_NAME
        if not named:
            # From here on as it can be printed: it goes into messages.
            name = quoted(name)
            message = f"{name} is no name for a variant"
            hint = f"lower-case words joined by -, at most {MAX_NAME} characters: draft-decode"
            self.file.report(key, "variant-name", message, hint)
        draft = Draft(key, {"name": name})
        entries = self.entries(node, name, tuple(self.fields))
        if entries is None:
            return draft
        required = tuple(k for k, info in Entry.model_fields.items() if info.is_required())
        self.require(key, name, required, entries)
        for field_name, (_, value_node) in entries.items():
            draft.nodes[field_name] = value_node
            value = self.fields[field_name](value_node, f"{name}: {field_name}")
            if value is not None:
                draft.values[field_name] = value
        if named and "function" not in entries:
            draft.values["function"] = default_function(name)
        _check_meaning(self.file, draft)
        return draft

    def entries(
        self, node: Node, where: str, known: tuple[str, ...] | None
    ) -> dict[str, tuple[Node, Node]] | None:
        """key -> (its node, its value's node); unknown and repeated keys reported and left
        out. `known` None: any key. None where the node is no mapping."""
        if not isinstance(node, MappingNode):
            message = f"{where}: expected a mapping, found {found(node)}"
            self.file.report(node, "wrong-type", message, "write `key: value` lines")
            return None
        entries: dict[str, tuple[Node, Node]] = {}
        for key, value in node.value:
            if not is_text(key):
                message = f"{where}: a key has to be text, found {found(key)}"
                self.file.report(key, "wrong-type", message, _key_hint(key))
            elif key.value in entries:
                first, _ = self.file.place(entries[key.value][0].start_mark.index)
                message = f"{where}: the key {quoted(key.value)} is there already, line {first}"
                self.file.report(key, "duplicate-key", message, "keep one of the two")
            elif known is not None and key.value not in known:
                message = f"{where}: unknown key {quoted(key.value)}{_nearest(key.value, known)}"
                self.file.report(key, "unknown-key", message, f"known keys: {', '.join(known)}")
            else:
                entries[key.value] = (key, value)
        return entries

    def require(
        self, at: Node, where: str, keys: Iterable[str], entries: Mapping[str, object]
    ) -> None:
        missing = [key for key in keys if key not in entries]
        if missing:
            noun = "key" if len(missing) == 1 else "keys"
            self.file.report(at, "missing-key", f"{where}: missing {noun} {', '.join(missing)}")

    def text(self, node: Node, where: str) -> str | None:
        if is_text(node):
            return str(node.value)
        message = f"{where}: expected text, found {found(node)}"
        hint = "put it in quotes" if is_value(node) else ""
        self.file.report(node, "wrong-type", message, hint)
        return None

    def choice(self, node: Node, where: str, options: tuple[str, ...]) -> str | None:
        if not isinstance(node, ScalarNode):
            message = f"{where}: expected one of {', '.join(options)}; found {found(node)}"
            self.file.report(node, "wrong-type", message)
            return None
        if is_text(node) and node.value in options:
            return str(node.value)
        near = _nearest(node.value, options) if is_text(node) else ""
        capture = "the plan at capture comes with replay; write replay"
        message = f"{where}: expected one of {', '.join(options)}; found {found(node)}{near}"
        self.file.report(node, "unknown-value", message, capture if node.value == "capture" else "")
        return None

    def choices(
        self, node: Node, where: str, options: tuple[str, ...], least: int = 0
    ) -> tuple[str, ...] | None:
        if not isinstance(node, SequenceNode):
            example = node.value if is_text(node) and node.value in options else options[0]
            message = f"{where}: expected a list, found {found(node)}"
            hint = f"write it as a list: [{example}]"
            if found(node) == "nothing" and not least:
                hint = "write [] for none"
            self.file.report(node, "wrong-type", message, hint)
            return None
        if len(node.value) < least:
            message = f"{where}: the list is empty"
            self.file.report(node, "empty-list", message, f"choose from {', '.join(options)}")
            return None
        values: list[str] = []
        right = True
        for item in node.value:
            value = self.choice(item, where, options)
            if value is None:
                right = False
            elif value in values:
                message = f"{where}: {value} is in the list twice"
                self.file.report(item, "duplicate-value", message)
                right = False
            else:
                values.append(value)
        return tuple(values) if right else None

    def boolean(self, node: Node, where: str) -> bool | None:
        # YAML 1.2, and with it editors and the schema, take yes and on for text.
        kind = str(node.tag).rpartition(":")[2]
        if isinstance(node, ScalarNode) and kind == "bool":
            if node.value.lower() in ("true", "false"):
                return bool(node.value.lower() == "true")
            value = "true" if node.value.lower() in ("yes", "on") else "false"
            message = f"{where}: expected true or false, found {quoted(node.value)}"
            self.file.report(node, "wrong-type", message, f"write {value}")
            return None
        hint = ""
        if isinstance(node, ScalarNode) and node.value.lower() in ("true", "false"):
            hint = "take the quotes away"
        message = f"{where}: expected true or false, found {found(node)}"
        self.file.report(node, "wrong-type", message, hint)
        return None

    def formula(self, node: Node, where: str) -> Formula | None:
        if not isinstance(node, ScalarNode):
            message = f"{where}: expected a formula, found {found(node)}"
            self.file.report(node, "wrong-type", message)
            return None
        # The text as it stands, not YAML's idea of it: 017 and 1_0 are numbers to YAML 1.1.
        try:
            return parse(node.value if is_value(node) else "")
        except FormulaError as error:
            for issue in error.issues:
                index = self.file.index_in(node, issue.column - 1)
                self.file.report(index, issue.code, f"{where}: {issue.message}", issue.hint)
            return None

    def function(self, node: Node, where: str) -> str | None:
        name = self.text(node, where)
        if name is None:
            return None
        if not re.fullmatch(FUNCTION_PATTERN, name):
            reason = "is no Python identifier (ASCII letters, digits and _)"
        elif len(name) > MAX_FUNCTION:
            reason = f"is longer than {MAX_FUNCTION} characters"
        elif keyword.iskeyword(name):
            reason = "is a Python keyword"
        elif name in UPSTREAM_FUNCTIONS:
            reason = "is SGLang's own function, which stays where it is called"
        elif hasattr(builtins, name) or (name.startswith("__") and name.endswith("__")):
            reason = "is a name that Python itself uses"
        else:
            return name
        self.file.report(node, "function-name", f"{where}: {quoted(name)} {reason}")
        return None

    def doc(self, node: Node, where: str) -> str | None:
        text = self.text(node, where)
        if text is None:
            return None
        text = " ".join(text.split())
        bad = [c for c in text if c in '\\"' or not c.isprintable()]
        if bad:
            message = f"{where}: {quoted(bad[0])} cannot stand in a docstring"
        elif len(text) > MAX_DOC:
            message = f"{where}: {len(text)} characters, at most {MAX_DOC} are taken"
        else:
            return text
        self.file.report(node, "doc-text", message)
        return None


def _nearest(value: str, options: Iterable[str]) -> str:
    # A bounded slice: difflib is quadratic and the value is the file's.
    near = difflib.get_close_matches(value[:60], list(options), n=1)
    return f"; did you mean {near[0]}?" if near else ""


def _key_hint(key: Node) -> str:
    kind = str(key.tag).rpartition(":")[2]
    if kind == "merge":
        return "keys are not merged in; write them out"
    if kind == "bool":
        return "YAML takes a bare yes, no, on or off for a boolean; put the key in quotes"
    return "put the key in quotes" if is_value(key) else ""


def _article(noun: str) -> str:
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


# --- what the keys mean together -------------------------------------------------------------

#: Lengths that exist in one mode only.
_ONLY_IN: Mapping[str, str] = {
    "draft_step": "draft-decode",
    "draft_token_num": "target-verify",
    "extend_seq_lens": "draft-extend",
}


def _check_meaning(file: YamlFile, draft: Draft) -> None:
    """The rules within one variant, as far as its values are right."""
    values, nodes = draft.values, draft.nodes
    for key in ("tokens", "kv_len"):
        if key in values:
            _check_lengths(file, draft, key)
    if "tokens" in values:
        tokens: Formula = values["tokens"]
        if tokens.is_constant and tokens.evaluate({}) < 1:
            message = f"{draft.name}: tokens: a request has at least 1 query token"
            file.report(nodes["tokens"], "tokens-least", message)
    if "kv_len" in values and "seq_lens" not in values["kv_len"].names:
        message = f"{draft.name}: kv_len: does not use seq_lens"
        hint = "the length of a request's KV depends on the request"
        file.report(nodes["kv_len"], "kv-len-constant", message, hint)
    if values.get("context_parallel") and "no-context-parallel" in values.get("guards", ()):
        guards = nodes["guards"]
        at = guards.value[values["guards"].index("no-context-parallel")]
        message = (
            f"{draft.name}: guards: no-context-parallel shuts out what context_parallel is for"
        )
        file.report(at, "guard-contradiction", message, "take one of the two away")


def _check_lengths(file: YamlFile, draft: Draft, key: str) -> None:
    formula: Formula = draft.values[key]
    node = draft.nodes[key]
    serves = draft.values.get("serves")
    # Where the key is written and wrong, nothing is known about it.
    parallel = draft.values.get("context_parallel", "context_parallel" in draft.nodes)
    told: set[str] = set()
    for name, column in formula.uses:
        if name in told:
            continue
        told.add(name)
        reason = ""
        hint = ""
        if serves is not None and _ONLY_IN.get(name, serves) != serves:
            reason = f"{name} exists only where serves is {_ONLY_IN[name]}, here it is {serves}"
        elif name.startswith("dcp_") and not parallel:
            reason = f"{name} exists only under context parallelism"
            hint = "add `context_parallel: true`"
        elif key == "tokens" and name == "seq_lens":
            reason = "query tokens cannot depend on seq_lens"
            hint = "use an integer, draft_token_num or extend_seq_lens"
        if reason:
            index = file.index_in(node, column - 1)
            file.report(index, "length-not-here", f"{draft.name}: {key}: {reason}", hint)


def _check_functions(file: YamlFile, drafts: Iterable[Draft]) -> None:
    owners: dict[str, str] = {}
    for draft in drafts:
        name = draft.values.get("function")
        if name is None:
            continue
        owner = owners.setdefault(name, draft.name)
        if owner != draft.name:
            message = f"{draft.name}: function: {name} is the function of {owner} already"
            at = draft.nodes.get("function", draft.key)
            file.report(at, "same-function", message, "give one of the two another `function:`")


def _check_slots(file: YamlFile, drafts: Iterable[Draft]) -> None:
    """Which plan a variant replaces has to be decided by mode, moment and parallelism alone."""
    owners: dict[tuple[str, str, bool], str] = {}
    for draft in drafts:
        values = draft.values
        known = "serves" in values and "when" in values
        if not known or ("context_parallel" in draft.nodes and "context_parallel" not in values):
            continue
        parallel = bool(values.get("context_parallel", False))
        for position, when in enumerate(values["when"]):
            owner = owners.setdefault((values["serves"], when, parallel), draft.name)
            if owner != draft.name:
                slot = f"{values['serves']}, {when}" + (", context parallel" if parallel else "")
                message = f"{draft.name}: ({slot}) is taken by {owner} already"
                at = draft.nodes["when"].value[position]
                file.report(at, "same-slot", message, "change serves, when or context_parallel")


def _check_overrides(file: YamlFile, document: Document) -> None:
    """An override that no edit looks for would be a mistake that nobody sees."""
    drafts = document.drafts
    if any("serves" not in draft.values or "when" not in draft.values for draft in drafts):
        return
    taken = {(draft.values["serves"], when) for draft in drafts for when in draft.values["when"]}
    for override in document.overrides:
        needed = ANCHORS[override.anchor].needed_by
        if needed and not needed & taken:
            modes = " or ".join(f"({serves}, {when})" for serves, when in sorted(needed))
            message = f"no variant serves {modes}, none looks for it"
            where = f"fork: anchors: {override.anchor}"
            file.report(
                override.node, "anchor-unused", f"{where}: {message}", "take the override away"
            )
