"""Which files mlagen wrote: what a command with --out replaces, and what it leaves alone.

A file is mlagen's where it carries the mark: regions in SGLang's file, a line in the head of a
rendered text, the keys of a JSON file, or, where JSON is broken, a marked module beside it.
Anything else is someone's work, and there may be no copy of it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

from .errors import EditedError, Problem, UsageError
from .provenance import edited_problem, find_regions
from .sglang.find import BACKEND_FILE

_BACKEND = Path(BACKEND_FILE).name
_MARK = re.compile(rb"^(?:# )?(?:@generated|Written) by mlagen ", re.MULTILINE)
#: The lines in which the mark is looked for. A merge conflict may stand before it.
_HEAD = 10
#: The keys of MANIFEST.json, and of a plugin's made_for.json.
_RECORDS = ({"format", "flashinfer", "spec", "files"}, {"format", "mlagen", "module", "patched"})


def refuse_foreign(there: Mapping[Path, bytes]) -> None:
    """Refuse to replace what mlagen did not write, or what someone edited since.

    Args:
        there: the files that would be replaced by other bytes -> what stands there.

    Raises UsageError for files that are not mlagen's, EditedError for regions that were edited,
    DriftError where a newer mlagen wrote the regions.
    """
    foreign = [path for path, data in there.items() if not _is_own(path, data)]
    if foreign:
        raise UsageError(*map(_foreign, foreign))
    edited = [
        edited_problem(region, None, path=str(path))
        for path, data in there.items()
        if path.name == _BACKEND
        for region in find_regions(data, path=str(path))
        if not region.intact
    ]
    if edited:
        raise EditedError(*edited)


def _is_own(path: Path, data: bytes) -> bool:
    if path.name == _BACKEND:
        return bool(find_regions(data, path=str(path)))
    if path.suffix == ".json":
        return _is_record(data) or any(map(_is_marked_file, path.parent.glob("*.py")))
    return _is_marked(data)


def _is_marked(data: bytes) -> bool:
    return _MARK.search(b"\n".join(data.splitlines()[:_HEAD])) is not None


def _is_marked_file(path: Path) -> bool:
    return path.is_file() and _is_marked(path.read_bytes())


def _is_record(data: bytes) -> bool:
    try:
        content = json.loads(data)
    except (ValueError, RecursionError):
        return False
    return isinstance(content, dict) and any(keys <= content.keys() for keys in _RECORDS)


def _foreign(path: Path) -> Problem:
    hint = "give --out another folder, or take the file away"
    if path.name == _BACKEND:
        hint += f"; `mlagen patch {path}` changes it in place"
    message = "a file that mlagen did not write stands here; nothing was written"
    return Problem(str(path), 0, 0, "foreign-file", message, hint)
