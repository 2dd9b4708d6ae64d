"""Rendered -> the GPU tests in `generated/tests/`: one file a variant, and what they share; for
decode under context parallelism the program of one rank as well.

The tests stand beside the functions they test and know both sides: what the spec says, worked
out one request at a time, and what FlashInfer makes of it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from functools import cache
from typing import Any

from .render import MIRRORS, Rendered, context_of, environment, identifiers
from .resolve import SERVED, by_slot, names_of, slots_of
from .spec import Variant, device_variants, filled_in_place

FOLDER = "tests"
#: What a replay's bound buffers must hold after it: buffer by name, and the field of the tests'
#: `Batch` that has the truth.
_TRUTH = {
    "kv_indices": "kv_indices",
    "qo_indptr": "qo_indptr",
    "kv_indptr": "kv_indptr",
    "kv_len": "kv_len_arr",
}
#: Names that a test file takes from the standard library, in isort's order.
_IMPORTS = {
    "random": "import random",
    "Callable": "from collections.abc import Callable",
    "replace": "from dataclasses import replace",
    "Path": "from pathlib import Path",
    "SimpleNamespace": "from types import SimpleNamespace",
    "Any": "from typing import Any",
}


def test_files(
    rendered: Rendered, header: Iterable[str], variants: Collection[str]
) -> dict[str, bytes]:
    """The test files of `variants` (names) and what they need, by name below the folder that
    holds plans.py and hooks.py. A variant in a slot that SGLang has no place for has no hooks to
    be called by, and no tests."""
    lines = tuple(header)
    decoding = ("decode", "draft-decode")
    on_device = device_variants(rendered.spec)
    context = {
        **context_of(rendered.api),
        "header": lines,
        "any_device": bool(on_device),
        "in_place": rendered.in_place,
        "recorded": rendered.recorded,
        # Decode and a draft step are captured by one function.
        "decode_device": any(variant.serves in decoding for variant in on_device),
    }
    support = _render("tests/support.py.jinja", context)
    files = {
        f"{FOLDER}/conftest.py": _render("tests/conftest.py.jinja", context),
        f"{FOLDER}/support.py": support,
    }
    asked = [v for v in rendered.spec.variants if v.name in variants and _served(v)]
    # Extends are planned from full lengths under context parallelism: proved with the ranks.
    extend = by_slot(rendered.spec).get(("draft-extend", "eager", False))
    context["extend"] = extend if extend in asked else None
    for variant in asked:
        modules = {"support": support}
        if _has_ranks(variant):
            scope = {**context, "variant": variant, "names": names_of(variant)}
            modules["dcp_rank"] = _render("tests/ranks.py.jinja", scope)
            files[f"{FOLDER}/dcp_rank.py"] = modules["dcp_rank"]
        name = f"{FOLDER}/test_{variant.name.replace('-', '_')}.py"
        files[name] = _test_file(variant, context, modules)
    return {name: text.encode() for name, text in files.items()}


def _test_file(variant: Variant, context: Mapping[str, Any], modules: Mapping[str, str]) -> str:
    """The tests of a variant. `modules`: texts that they import from, by name."""
    scope = {
        **context,
        "variant": variant,
        "names": names_of(variant),
        "when": _served(variant),
        "on_device": variant.planner == "device",
        "in_place": context["in_place"] and filled_in_place(variant),
        "buffers": [(name, buffer, _TRUTH[name]) for name, buffer, _ in MIRRORS],
    }
    body = _render(f"tests/{_template_of(variant)}.jinja", scope)
    if body.startswith("def "):
        body = "\n" + body
    words = identifiers(body)
    shared = {
        module: sorted(_defined(modules[module]) & words, key=_isort_key)
        for module in sorted(modules)
    }
    imports = [line for name, line in _IMPORTS.items() if name in words]
    return _render(
        "tests/variant.py.jinja", {**scope, "imports": imports, "shared": shared, "body": body}
    )


def _served(variant: Variant) -> tuple[str, ...]:
    """When the variant's plans are made, as far as SGLang has a place for them."""
    return tuple(slot[1] for slot in slots_of(variant) if slot in SERVED)


def _has_ranks(variant: Variant) -> bool:
    """Whether a variant is a rank's share of a decode, to be proved with the other ranks'."""
    return ("decode", "replay", True) in slots_of(variant)


def _template_of(variant: Variant) -> str:
    """The template of a variant's tests, by how SGLang plans what it serves."""
    return {"target-verify": "verify", "draft-extend": "extend"}.get(variant.serves, "decode")


@cache
def _defined(module: str) -> frozenset[str]:
    """The public module-level names that a module defines; the first of a tuple's."""
    names = re.findall(r"^(?:def|class) ([A-Za-z]\w*)|^([A-Za-z]\w*)(?:, \w+)* = ", module, re.M)
    return frozenset(first or second for first, second in names)


def _isort_key(name: str) -> tuple[int, str]:
    """Constants, classes, functions, each in order, as ruff sorts the names of one import."""
    kind = 0 if name.isupper() else 1 if name[0].isupper() else 2
    return kind, name


def _render(template: str, scope: Mapping[str, Any]) -> str:
    text = environment().get_template(template).render(scope).strip("\n") + "\n"
    return re.sub(r"\n{4,}", "\n\n\n", text)  # where an include begins with blank lines
