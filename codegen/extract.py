"""A patched file -> its functions alone, as modules that the generated tests import.

What is tested is the text that stands in the file, not another rendering of it.
"""

from __future__ import annotations

import ast

from .errors import EditedError, usage
from .names import bound_by
from .provenance import Region, as_bytes, edited_problem, find_regions
from .render import IMPORTS, identifiers, import_lines
from .sglang.locate import PLANS_SITE


def functions_of(patched: bytes, path: str) -> dict[str, bytes]:
    """`plans.py` with all the functions of a patched file, and `hooks.py` that gives out the same
    names, those with underscores too: in the file they stand together.

    Raises:
        UsageError: the file has no functions of mlagen.
        EditedError: someone edited them; or the file's marks are broken.
    """
    region = _functions_region(patched, path)
    if not region.intact:
        raise EditedError(edited_problem(region, None, path=path))
    body = "\n".join(region.emitted).strip("\n") + "\n"
    head = [
        f"# The functions of mlagen in {path}, as they stand there.",
        "from __future__ import annotations",
        "",
        *import_lines(name for name in IMPORTS if name in identifiers(body)),
    ]
    names = [name for node in ast.parse(as_bytes(body)).body for name in bound_by(node)]
    exports = ["from .plans import (", *(f"    {name}," for name in names), ")"]
    return {
        "plans.py": as_bytes("\n".join(head) + "\n\n\n" + body),
        "hooks.py": ("\n".join(exports) + "\n").encode(),
    }


def _functions_region(patched: bytes, path: str) -> Region:
    for region in find_regions(patched, path=path):
        if region.site == PLANS_SITE:
            return region
    raise usage(
        "the file holds no functions of mlagen", path=path, code="not-patched", hint="patch it"
    )
