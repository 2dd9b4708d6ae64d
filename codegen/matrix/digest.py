"""What an outcome was found with, as digests: a remembered one counts only for the same."""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from ..spec import Spec

#: Digits of a digest where people see it: in docs/compatibility.json.
SHORT = 16

#: The folder of `codegen` and `templates`, in a checkout and in the installed package.
_ROOT = Path(__file__).resolve().parents[2]
_FIRST = "codegen/matrix/pair.py"
#: Templates that go into no patched file.
_NOT_SPLICED = ("tests", "bench")


@cache
def code_digest() -> str:
    """sha256, hex, over the modules that decide an outcome (`pair.py` and what it imports, in
    turn) and the templates that are spliced."""
    total = hashlib.sha256()
    for name in (*sorted(deciding_modules()), *_templates()):
        total.update(name.encode() + b"\0" + hashlib.sha256((_ROOT / name).read_bytes()).digest())
    return total.hexdigest()


def deciding_modules() -> frozenset[str]:
    """`pair.py` and every module of mlagen that it imports, in turn, by path from the root."""
    seen: set[str] = set()
    left = [_FIRST]
    while left:
        name = left.pop()
        if name not in seen:
            seen.add(name)
            left += _imported(name)
    return frozenset(seen)


def _imported(name: str) -> Iterator[str]:
    """The modules that one imports relatively, anywhere in it, and the packages around them."""
    place = Path(name)
    for node in ast.walk(ast.parse((_ROOT / name).read_bytes())):
        if not isinstance(node, ast.ImportFrom) or not node.level:
            continue
        package = place.parents[node.level - 1]
        base = package.joinpath(*(node.module or "").split("."))
        for candidate in (base, *(base / alias.name for alias in node.names)):
            for path in (candidate.with_suffix(".py"), candidate / "__init__.py"):
                if (_ROOT / path).is_file():
                    yield path.as_posix()


def _templates() -> list[str]:
    folder = _ROOT / "templates"
    return sorted(
        path.relative_to(_ROOT).as_posix()
        for path in folder.rglob("*.jinja")
        if path.relative_to(folder).parts[0] not in _NOT_SPLICED
    )


def meaning_of(spec: Spec) -> str:
    """A digest of what a variants.yaml says, 16 hex digits: comments, layout and the variants'
    descriptions leave it as it is, for no outcome hangs on them; a key that a later mlagen adds
    does so while the file does not use it."""
    said = spec.model_dump(
        mode="json",
        exclude={"source": True, "digest": True, "places": True, "variants": {"__all__": {"doc"}}},
        exclude_defaults=True,
    )
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:SHORT]


def key(*parts: str) -> str:
    """One key of what something was found with; parts are kept apart."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()
