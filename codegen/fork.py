"""What a fork may call by another name: the anchors of an edit, as data.

`fork: anchors:` in variants.yaml overrides them. A dictionary has no name that is looked for:
the edit is found by its structure, and an override says which of several it is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Kind = Literal["class", "function", "method", "attribute", "dictionary"]
Moment = tuple[str, str]

_REPLAY = frozenset({("decode", "replay"), ("draft-decode", "replay")})
_DECODES = _REPLAY | {("draft-decode", "eager")}
_VERIFIES = frozenset({("target-verify", "replay"), ("target-verify", "eager")})
_EXTENDS = frozenset({("draft-extend", "eager")})


@dataclass(frozen=True)
class Anchor:
    """One anchor.

    Attributes:
        name: its key in variants.yaml.
        kind: what it names in the back end's file.
        default: what SGLang's releases call it; "" for a dictionary.
        needed_by: the (mode, when) pairs whose edits look for it; empty: every patch does.
        meaning: what it is, in a few words.
    """

    name: str
    kind: Kind
    default: str
    needed_by: frozenset[Moment]
    meaning: str

    @property
    def told(self) -> str:
        """How messages and the schema say what is looked for without an override."""
        return f"{self.default} in SGLang" if self.default else "found by structure"


ANCHORS: Mapping[str, Anchor] = {
    anchor.name: anchor
    for anchor in (
        Anchor(
            "backend-class",
            "class",
            "FlashInferMLAAttnBackend",
            frozenset(),
            "the back end",
        ),
        Anchor(
            "decode-updater-class",
            "class",
            "FlashInferMLAIndicesUpdaterDecode",
            _DECODES,
            "it plans decode",
        ),
        Anchor(
            "prefill-updater-class",
            "class",
            "FlashInferMLAIndicesUpdaterPrefill",
            frozenset(),
            "it plans extends and target-verify",
        ),
        Anchor(
            "draft-backend-class",
            "class",
            "FlashInferMLAMultiStepDraftBackend",
            _DECODES,
            "it drives the steps of a draft chain",
        ),
        Anchor(
            "decode-plan-function",
            "function",
            "fast_mla_decode_plan",
            frozenset(),
            "SGLang's own plan function; mlagen's stand in front of it",
        ),
        Anchor(
            "update-method",
            "method",
            "update",
            frozenset(),
            "of both updaters: the back end calls it",
        ),
        Anchor(
            "plan-method",
            "method",
            "call_begin_forward",
            frozenset(),
            "of both updaters: it calls the wrapper's plan",
        ),
        Anchor(
            "draft-loop-method",
            "method",
            "common_template",
            _DECODES,
            "of the draft back end: the loop over its steps",
        ),
        Anchor(
            "decode-updater",
            "attribute",
            "indices_updater_decode",
            _DECODES,
            "of the back end: its decode updater",
        ),
        Anchor(
            "prefill-updater",
            "attribute",
            "indices_updater_prefill",
            _VERIFIES | _EXTENDS,
            "of the back end: its prefill updater",
        ),
        Anchor(
            "decode-wrapper",
            "attribute",
            "decode_wrapper",
            frozenset({("draft-decode", "eager")}),
            "of the back end: the wrapper of eager decode",
        ),
        Anchor(
            "verify-wrapper",
            "attribute",
            "prefill_wrapper_verify",
            frozenset({("target-verify", "eager")}),
            "of the back end: the wrapper of eager target-verify",
        ),
        Anchor(
            "extend-wrapper",
            "attribute",
            "prefill_wrapper_paged",
            _EXTENDS,
            "of the back end: the wrapper of eager extends over pages",
        ),
        Anchor(
            "draft-backends",
            "attribute",
            "attn_backends",
            _DECODES,
            "of the draft back end: one back end a step",
        ),
        Anchor(
            "decode-metadata",
            "dictionary",
            "",
            _REPLAY,
            "of the back end: the wrappers of captured decode graphs",
        ),
        Anchor(
            "verify-metadata",
            "dictionary",
            "",
            frozenset({("target-verify", "replay")}),
            "of the back end: the wrappers of captured verify graphs",
        ),
    )
}


@dataclass(frozen=True)
class Names:
    """What each anchor is called in the file at hand: SGLang's names, but for the overrides."""

    overrides: Mapping[str, str]

    def __getitem__(self, anchor: str) -> str:
        return self.overrides.get(anchor, ANCHORS[anchor].default)

    def hint_for(self, sought: str) -> str:
        """What to do about a name that is looked for and not in the file; "" for one that no
        override can change."""
        for anchor in ANCHORS.values():
            if sought and self[anchor.name] == sought:
                others = "; the other variants can go in with --only" if anchor.needed_by else ""
                return (
                    f"a fork? `fork: anchors: {anchor.name}` in variants.yaml says what it calls "
                    f"the {anchor.kind} (docs/forks.md){others}"
                )
        return ""

    def in_text(self, template: str) -> str:
        """A call site's template, which has SGLang's attributes, with the file's own."""
        new = {
            ANCHORS[name].default: value
            for name, value in self.overrides.items()
            if ANCHORS[name].kind == "attribute"
        }
        if not new:
            return template
        # All at once: a fork may have swapped two of them.
        pattern = rf"\bself\.({'|'.join(new)})\b"
        return re.sub(pattern, lambda found: f"self.{new[found[1]]}", template)

    def as_released(self, data: bytes) -> bytes:
        """A file with its own names given back SGLang's, line by line the same: for those who
        read it and know SGLang's alone."""
        old = {
            self.overrides[name].encode(): ANCHORS[name].default.encode()
            for name in self.overrides
            if ANCHORS[name].default
        }
        if not old:
            return data
        pattern = rb"\b(" + b"|".join(old) + rb")\b"
        return re.sub(pattern, lambda found: old[found[1]], data)


#: What SGLang's releases call them.
RELEASED = Names({})
