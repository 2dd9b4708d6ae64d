"""Adds the package's own files to a wheel (hatchling build hook, pyproject.toml names it)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PACKAGE = Path("codegen", "_package", "mlagen")
FILES = ("__init__.py", "__main__.py", "py.typed")


class PackageFiles(BuildHookInterface[Any]):
    """Puts codegen/_package/mlagen/* at the root of the package, for a wheel only.

    An editable install has that folder on the path and needs nothing added.
    """

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version != "standard":
            return
        for name in FILES:
            # `sources` in pyproject.toml moves the target under mlagen/.
            build_data["force_include"][str(Path(self.root, PACKAGE, name))] = name
