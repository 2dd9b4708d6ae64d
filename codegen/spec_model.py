"""The format of variants.yaml as pydantic models: its one description.

The JSON Schema is made from them, and the reader takes its choices from their types.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    WithJsonSchema,
    model_validator,
)

from .errors import Problem
from .fork import ANCHORS, Names
from .formula import LENGTHS, MAX_LENGTH, Formula, parse

Serves: TypeAlias = Literal["decode", "draft-decode", "target-verify", "draft-extend"]
When: TypeAlias = Literal["replay", "eager"]
Planner: TypeAlias = Literal["host", "device"]
Buffer: TypeAlias = Literal["kv_indices", "qo_indptr", "kv_indptr", "kv_len"]
Guard: TypeAlias = Literal[
    "uniform-tokens",
    "owned-input",
    "tile-divides-heads",
    "work-items-fit",
    "fa-back-end",
    "no-context-parallel",
]

NAME_PATTERN = r"^[a-z][a-z0-9]*(-[a-z0-9]+)*$"
FUNCTION_PATTERN = r"^[A-Za-z_][A-Za-z0-9_]*$"
ANCHOR_PATTERN = r"^[A-Za-z_][A-Za-z0-9_]*$"
MAX_NAME = 40
MAX_FUNCTION = 80
MAX_DOC = 400


def _to_formula(value: object) -> Formula:
    if isinstance(value, Formula):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str):
        raise ValueError("a formula is text or an integer")
    return parse(value)


_LENGTHS_TEXT = "; ".join(f"{name}: {length.meaning}" for name, length in LENGTHS.items())

FormulaField: TypeAlias = Annotated[
    Formula,
    PlainValidator(_to_formula),
    PlainSerializer(lambda formula: formula.text, return_type=str),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "integer", "minimum": 1},
                {
                    "type": "string",
                    "minLength": 1,
                    "maxLength": MAX_LENGTH,
                    "pattern": r"^[A-Za-z0-9_+*/()\s-]+$",
                },
            ]
        }
    ),
]


def _unique(schema: dict[str, Any]) -> None:
    schema["uniqueItems"] = True


def _closed(schema: dict[str, Any]) -> None:
    # The keys' pattern alone would let through any other key.
    schema["additionalProperties"] = False
    schema.pop("propertyNames", None)


def _without_default(schema: dict[str, Any]) -> None:
    # The default depends on the variant's name; the description says how.
    schema.pop("default", None)


class _Model(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")


class Entry(_Model):
    """What one wrapper variant is: which plans it replaces, and out of which host lengths."""

    serves: Serves = Field(
        description="SGLang's forward mode whose plans this variant makes: decode; draft-decode,"
        " a step of the multi-step draft; target-verify; draft-extend, and with it any eager"
        " extend over pages."
    )
    when: tuple[When, ...] = Field(
        min_length=1,
        json_schema_extra=_unique,
        description="replay: each replay of a captured CUDA graph. eager: where no graph is used."
        " Capture is no choice: the first plan of a replay variant is always made there.",
    )
    planner: Planner = Field(
        default="host",
        description="Who computes the schedule of a captured graph: host, FlashInfer's own"
        " planner, from lengths the host has; device, a kernel on the GPU, from lengths that are"
        " there. device needs replay, kv_len seq_lens plus a number, and no context_parallel;"
        " eager passes and graphs that the kernel cannot plan keep the host's.",
    )
    context_parallel: bool = Field(
        default=False,
        description="true: takes this slot under decode context parallelism, and may name"
        " dcp_size and dcp_rank.",
    )
    tokens: FormulaField = Field(
        description="Query tokens of each request. May name draft_token_num (target-verify) or"
        " extend_seq_lens (draft-extend)."
    )
    kv_len: FormulaField = Field(
        description="KV tokens each request attends to, its own new ones included. Names seq_lens."
        f" A formula is made of + - * // ( ), integers and these lengths. {_LENGTHS_TEXT}."
    )
    causal: bool = Field(description="Whether a query token sees only the KV up to its own place.")
    refresh: tuple[Buffer, ...] = Field(
        json_schema_extra=_unique,
        description="Buffers bound at capture that a replay copies into. kv_indices is the one a"
        " kernel reads; leave it out where the index kernel writes the captured buffer in place."
        " The others are mirrors that no FA2/FA3 kernel reads.",
    )
    guards: tuple[Guard, ...] = Field(
        json_schema_extra=_unique,
        description="What has to hold for the variant's plan to be used; else the stock plan stays"
        " and the reason is logged once. uniform-tokens: one number of query tokens for all"
        " requests. owned-input: not a DFLASH input, no ragged verify layout. tile-divides-heads:"
        " the head count divides the query tile, which a causal plan needs. work-items-fit: the"
        " bound of work items is within FlashInfer's 16384. fa-back-end: the wrapper resolved to"
        " FA2 or FA3. no-context-parallel: decode context parallelism is off.",
    )
    function: str = Field(
        default="",
        pattern=FUNCTION_PATTERN,
        max_length=MAX_FUNCTION,
        json_schema_extra=_without_default,
        description="Name of the emitted plan function. Default: mlagen_plan_ and the variant's"
        " name, with _ for -.",
    )
    doc: str = Field(
        default="",
        max_length=MAX_DOC,
        description="What the emitted function's docstring says first. Without \\ and \".",
    )


class Variant(Entry):
    """An entry with its name; `function` is always set."""

    name: str = Field(pattern=NAME_PATTERN, max_length=MAX_NAME)

    @model_validator(mode="before")
    @classmethod
    def _default_function(cls, values: Any) -> Any:
        if isinstance(values, dict) and "function" not in values and "name" in values:
            return {**values, "function": default_function(str(values["name"]))}
        return values

    def __str__(self) -> str:
        return self.name


AnchorName: TypeAlias = Annotated[
    str, Field(pattern="^(" + "|".join(ANCHORS) + ")$", max_length=MAX_NAME)
]
Identifier: TypeAlias = Annotated[str, Field(pattern=ANCHOR_PATTERN, max_length=MAX_FUNCTION)]


def _each_anchor(schema: dict[str, Any]) -> None:
    # A property an anchor, so that an editor offers them with what they mean.
    (name,) = schema.pop("patternProperties").values()
    _closed(schema)
    schema["minProperties"] = 1
    schema["properties"] = {
        anchor.name: {**name, "description": f"{anchor.kind}, {anchor.told}: {anchor.meaning}."}
        for anchor in ANCHORS.values()
    }


class Fork(_Model):
    """What a fork of SGLang calls by another name. docs/forks.md has an example."""

    anchors: dict[AnchorName, Identifier] = Field(
        json_schema_extra=_each_anchor,
        description="Anchor: its name in the fork's flashinfer_mla_backend.py. Each has to stand"
        " there, and to be needed by a variant of this file.",
    )


VariantName: TypeAlias = Annotated[str, Field(pattern=NAME_PATTERN, max_length=MAX_NAME)]


class SpecFile(_Model):
    """variants.yaml: the plan functions that mlagen writes for FlashInfer's MLA wrapper."""

    version: Literal[1] = Field(description="Version of this format.")
    fork: Fork = Field(
        default_factory=lambda: Fork(anchors={}),
        description="What a fork of SGLang calls by another name. Its formulas are its variants'.",
    )
    variants: dict[VariantName, Entry] = Field(
        min_length=1,
        json_schema_extra=_closed,
        description="Each variant by its name: lower-case words joined by -. No two take the same"
        " slot (serves, when, context_parallel) or the same function name.",
    )


class Spec(_Model):
    """A variants.yaml that holds.

    Attributes:
        version: of the format.
        variants: in the order of the file.
        source: the file, as it was given.
        digest: sha256 of its bytes, hex.
        places: (line, column), from 1, of each `variant` and `variant.key` written in it, and
            of each override as `fork: anchor`.
        anchors: a fork's names by anchor; empty for SGLang's releases.
    """

    version: Literal[1]
    variants: tuple[Variant, ...]
    source: Path
    digest: str
    anchors: dict[str, str] = Field(default_factory=dict)
    places: dict[str, tuple[int, int]] = Field(default_factory=dict, repr=False)

    def problem(self, variant: str, key: str, code: str, message: str, hint: str = "") -> Problem:
        """A problem at `key` of `variant`, or at the variant where the key is not written."""
        line, column = self.places.get(f"{variant}.{key}") or self.places.get(variant, (0, 0))
        return Problem(str(self.source), line, column, code, message, hint)

    @property
    def names(self) -> Names:
        """What the anchors are called in the file that is patched."""
        return Names(self.anchors)

    def anchor_problem(self, anchor: str, code: str, message: str, hint: str = "") -> Problem:
        """A problem at the override of `anchor`."""
        line, column = self.places.get(fork_place(anchor), (0, 0))
        return Problem(str(self.source), line, column, code, message, hint)


def fork_place(anchor: str) -> str:
    """The key in `Spec.places` of an override; no variant's name has a colon."""
    return f"fork: {anchor}"


def default_function(variant: str) -> str:
    """The plan function's name for a variant that gives none."""
    return "mlagen_plan_" + variant.replace("-", "_")


def json_schema() -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of variants.yaml, made from the models."""
    schema: dict[str, Any] = _tidied(SpecFile.model_json_schema())
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "mlagen variants",
        **schema,
    }


def _tidied(schema: Any) -> Any:
    """Without titles, which repeat the key, and alike for the pydantic releases that write
    `enum` beside `const`."""
    if isinstance(schema, list):
        return [_tidied(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: _tidied(value)
        for key, value in schema.items()
        if not (key == "title" and isinstance(value, str))
        and not (key == "enum" and "const" in schema)
    }


def schema_text() -> str:
    """`json_schema()` as it is committed: two spaces, a newline at the end."""
    return json.dumps(json_schema(), indent=2, ensure_ascii=False) + "\n"
