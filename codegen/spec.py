"""variants.yaml -> Spec, with every error of the file at once, each with line and column.

spec_model.py says what the format is, spec_reader.py reads it off YAML nodes.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

from . import yamlfile
from .errors import Problem, SpecError
from .spec_model import Spec, Variant, json_schema, schema_text
from .spec_reader import Document, read_document
from .yamlfile import found, quoted

__all__ = [
    "FILE_NAME",
    "SCHEMA_NAME",
    "Spec",
    "Variant",
    "device_variants",
    "filled_in_place",
    "json_schema",
    "kept_on_host",
    "load_spec",
    "planned_on_device",
    "read_spec",
    "schema_text",
    "shipped_spec",
    "spec_above",
    "unsupported",
]

FILE_NAME = "variants.yaml"
#: Beside this module, in a checkout and in the wheel alike.
SCHEMA_NAME = "variants.schema.json"


def spec_above(start: Path) -> Path | None:
    """The variants.yaml in `start` (a folder, or a file's folder) or the nearest folder above
    it, None where there is none."""
    start = Path(os.path.abspath(start))
    for folder in (start, *start.parents):
        # isfile is False where a folder cannot be read; Path.is_file would raise.
        if os.path.isfile(folder / FILE_NAME):
            return folder / FILE_NAME
    return None


def shipped_spec() -> Path:
    """The variants.yaml that comes with mlagen: beside `codegen`, in a checkout and in an
    installed package. (Not importlib.resources: in an editable install that looks beside
    mlagen/__init__.py only.)"""
    return Path(__file__).resolve().parent.parent / FILE_NAME


def load_spec(path: Path) -> Spec:
    """Read and check a variants.yaml.

    Raises SpecError, and nothing else, with all that is wrong in the order of the file; a file
    that is not there or cannot be read is such an error as well.
    """
    try:
        with open(path, "rb") as file:
            data = file.read(yamlfile.MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        problem = Problem(quoted(str(path))[1:-1], 0, 0, "unreadable", f"cannot be read: {reason}")
        raise SpecError(problem) from None
    return read_spec(data, path)


def read_spec(data: bytes, source: Path) -> Spec:
    """`load_spec` of bytes already read; `source` is what errors call them."""
    file = yamlfile.read(data, str(source))
    document = Document()
    if not file.problems and (file.root is None or found(file.root) == "nothing"):
        hint = "begin with `version: 1` and `variants:`"
        file.report(0, "empty", "the file holds no variants", hint)
    elif file.root is not None:
        document = read_document(file, file.root)
    told: dict[str, Any] = {
        "version": 1,
        "source": source,
        "digest": hashlib.sha256(data).hexdigest(),
        "anchors": {override.anchor: override.name for override in document.overrides},
        "places": document.places(file),
    }
    values = [draft.values for draft in document.drafts]
    if file.problems:
        # Without validation: `unsupported` has to be told of variants that are wrong elsewhere.
        spec = Spec.model_construct(
            variants=tuple(Variant.model_construct(**value) for value in values), **told
        )
    else:
        spec = Spec(variants=tuple(Variant(**value) for value in values), **told)
    file.problems.extend(unsupported(spec))
    if file.problems:
        raise SpecError(*file.ordered())
    return spec


def unsupported(spec: Spec) -> tuple[Problem, ...]:
    """What the format allows and this version does not build."""
    problems = []
    for variant in spec.variants:
        reason = kept_on_host(variant)
        if reason is not None and getattr(variant, "planner", "host") == "device":
            message = f"{variant.name}: {reason}"
            hint = "use `planner: host`, or leave the key out"
            problems.append(spec.problem(variant.name, "planner", "planner-device", message, hint))
    return tuple(problems)


def kept_on_host(variant: Variant) -> str | None:
    """Why the GPU cannot plan a variant, or None. Of one that is wrong elsewhere keys may be
    missing, and nothing is said about them."""
    kv_len = getattr(variant, "kv_len", None)
    if "replay" not in getattr(variant, "when", ("replay",)):
        return "planner: device plans captured graphs, and this variant has none"
    if getattr(variant, "context_parallel", False):
        return "planner: device does not know which share of the KV is this rank's"
    if kv_len is not None and not kv_len.shifts("seq_lens"):
        return f"planner: device takes seq_lens plus a number, not {kv_len.text}"
    return None


def planned_on_device(variant: Variant) -> bool:
    """Whether the GPU plans the variant's captured graphs."""
    return variant.planner == "device" and kept_on_host(variant) is None


def filled_in_place(variant: Variant) -> bool:
    """Whether SGLang's index kernel can fill the captured buffer of the variant's graphs itself,
    and nothing is to be copied there: verify's, whose KV lengths the GPU gets by an addition."""
    return (
        variant.serves == "target-verify"
        and "replay" in variant.when
        and not variant.context_parallel
        and variant.kv_len.shifts("seq_lens")
        and (variant.planner == "device" or "kv_indices" in variant.refresh)
    )


def device_variants(spec: Spec) -> tuple[Variant, ...]:
    """The variants whose captured graphs are planned on the GPU."""
    return tuple(variant for variant in spec.variants if variant.planner == "device")
