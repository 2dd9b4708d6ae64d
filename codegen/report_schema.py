"""The JSON Schema of what `--json` prints, made from the data classes of `report.py`.

`report.schema.json` beside this module is `schema_text()`; a test holds the one to the other.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, get_type_hints

from pydantic import TypeAdapter

from .report import SCHEMA_VERSION, Report

#: Beside this module, in a checkout and in the wheel alike.
SCHEMA_NAME = "report.schema.json"

_DIALECT = "https://json-schema.org/draft/2020-12/schema"

#: What is said of a key of a report; of those of its parts, below the name of the class.
_SAYS: Mapping[str, str] = {
    "schema_version": "Goes up when a key changes its meaning or goes away; keys may come.",
    "command": "The command that was run, such as check.",
    "exit_code": "What the process exits with.",
    "problems": "What is wrong, in the order of the file; remarks begin with `note: `.",
    "sites": "The edit sites of the file.",
    "facts": "What was taken and found, in reading order; a name may come more than once.",
    "diff": "For `git apply`; empty where none was asked for or nothing changes.",
    "diff_encoding": "base64 where the patched file is not UTF-8.",
    "notes": "What was done, one sentence each.",
    "tests": "The generated GPU tests that ran.",
    "differences": "What an upgrade changes.",
    "Difference.kind": "What it is about, such as check, wait or site.",
    "Difference.subject": "Which one; may be empty.",
    "Difference.old": "How it was; empty where it was not there.",
    "Difference.new": "How it would be; empty where it would not be there.",
    "Difference.place": "Where the new one stands, or the old one; may be empty.",
    "waits": "Where the host waits for the GPU; of `inspect`.",
    "Problem.path": "The file; from the checkout's root where it lies in one.",
    "Problem.line": "From 1; 0: unknown.",
    "Problem.column": "From 1; 0: unknown.",
    "Problem.code": "A stable name in kebab-case.",
    "Problem.message": "What was found.",
    "Problem.hint": "What to do about it; may be empty.",
    "SiteState.variant": "The variants that the site serves, between commas.",
    "SiteState.site": "The site's name.",
    "SiteState.state": "README.md says what each means.",
    "SiteState.reason": "One sentence, or empty.",
    "SiteState.line": "From 1; 0: nowhere.",
    "Wait.file": "Of SGLang or of FlashInfer.",
    "Wait.line": "From 1.",
    "Wait.step": "plan: FlashInfer's own; else a step of SGLang's file.",
    "Wait.when": "Of a plan for which plans, of a step on which occasions.",
    "Wait.way": "The calls to it, outermost first.",
    "Wait.expression": "The source text that waits.",
    "Wait.kind": "How it waits.",
    "Wait.times": "How often in one plan or step.",
    "Wait.condition": "What the source does not decide; empty: always.",
    "Wait.counted": "Whether PyTorch's sync debug mode reports it.",
    "Wait.removed_by": "The variant that removes it; empty where it stays.",
    "Wait.note": "Why it stays.",
    "RanTest.id": "As pytest takes it.",
    "RanTest.outcome": "error: it could not be made.",
    "RanTest.message": "Why it failed or was skipped.",
    "RanTest.seconds": "How long it took.",
}


def report_schema() -> dict[str, Any]:
    """The schema, as data. Keys that it does not name are allowed: a later mlagen may have more."""
    definitions: dict[str, Any] = {}
    kinds = {"Report": _report(definitions), "Bench": _bench(), "Matrix": _matrix()}
    return {
        "$schema": _DIALECT,
        "title": "What mlagen prints with --json",
        "description": "A report; `bench` and `matrix` have reports of their own where they "
        "measured or tried something.",
        "anyOf": [{"$ref": f"#/$defs/{name}"} for name in kinds],
        "$defs": {**kinds, **dict(sorted(definitions.items()))},
    }


def schema_text() -> str:
    """The schema as it is committed: keys in reading order, with a final line end."""
    return json.dumps(report_schema(), indent=2) + "\n"


def _report(definitions: dict[str, Any]) -> dict[str, Any]:
    """What `render_json` makes of a Report, field by field."""
    properties: dict[str, Any] = {"schema_version": {"const": SCHEMA_VERSION}}
    hints = get_type_hints(Report)
    for field in dataclasses.fields(Report):
        if field.name == "facts":
            properties["facts"] = {"type": "array", "items": {"$ref": "#/$defs/Fact"}}
        else:
            properties[field.name] = _schema_of(hints[field.name], definitions)
    definitions["Fact"] = _object({"name": {"type": "string"}, "value": {"type": "string"}})
    properties["diff_encoding"] = {"enum": ["utf-8", "base64"]}
    return _object(_described(properties))


def _schema_of(hint: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    """The schema of one field; that of a data class goes into `definitions`."""
    schema = TypeAdapter(hint).json_schema(ref_template="#/$defs/{model}")
    for name, definition in schema.pop("$defs", {}).items():
        properties = {
            key: {k: v for k, v in value.items() if k not in ("title", "default")}
            for key, value in definition["properties"].items()
        }
        definitions[name] = _object(_described(properties, f"{name}."))
    return {key: value for key, value in schema.items() if key not in ("title", "default")}


def _described(properties: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    return {
        name: {**schema, "description": _SAYS[prefix + name]} if prefix + name in _SAYS else schema
        for name, schema in properties.items()
    }


def _object(properties: Mapping[str, Any]) -> dict[str, Any]:
    """An object that has all of these: no key is left out where it is empty."""
    return {"type": "object", "properties": dict(properties), "required": list(properties)}


def _bench() -> dict[str, Any]:
    """What `bench_report.as_json_text` makes; the figures are those of docs/benchmarks.md."""
    rows = {"type": "array", "items": {"type": "object"}}
    result = _object({"plans": rows, "bytes": rows, "loop": rows, "bars": rows})
    return _object(
        {
            "schema_version": {"const": SCHEMA_VERSION},
            "command": {"const": "bench"},
            "exit_code": {"type": "integer"},
            "results": {"type": "array", "items": result},
        }
    )


def _matrix() -> dict[str, Any]:
    """What `matrix/command.py` makes; a pair is as in docs/compatibility.json."""
    return _object(
        {
            "schema_version": {"const": SCHEMA_VERSION},
            "command": {"const": "matrix"},
            "exit_code": {"type": "integer"},
            "problems": {"type": "array", "items": {"$ref": "#/$defs/Problem"}},
            "facts": {"type": "array", "items": {"$ref": "#/$defs/Fact"}},
            "notes": {"type": "array", "items": {"type": "string"}},
            "pairs": {"type": "array", "items": {"type": "object"}},
        }
    )
