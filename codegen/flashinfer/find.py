"""Find FlashInfer's source: a folder, a wheel, a release to fetch, or the installed package.

Never imports it: FlashInfer needs torch and a GPU's libraries, reading its source needs neither.
"""

from __future__ import annotations

import importlib.util
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path

from ..errors import UsageError, usage
from ..fetch import (
    FolderTree,
    Tree,
    WheelTree,
    fetch,
    is_there,
    is_version,
    parse_requirement,
    read_metadata,
    require_searchable,
)
from ..requirement import bare_requirement

DISTRIBUTION = "flashinfer-python"
PACKAGE = "flashinfer"

#: A package folder is FlashInfer's when it has its MLA module, in one of its two shapes.
_MLA = ("mla/__init__.py", "mla.py")

_HINT = "give --flashinfer a folder, a wheel file, or a version to fetch, such as 0.6.17"


@dataclass(frozen=True)
class FlashInferSource:
    """One FlashInfer, ready to be read.

    Attributes:
        label: for headers and messages, such as `flashinfer-python 0.6.17`; holds no path.
        version: from the metadata that lies with the source; None where there is none.
        place: the folder or file it is read from, for messages to the user only.
        tree: its files, by paths such as `flashinfer/mla/_core.py`.
    """

    label: str
    version: str | None
    place: str
    tree: Tree

    def read(self, path: str) -> bytes | None:
        """The bytes of a file below the package's parent, None where there is none."""
        return self.tree.read(path)

    def exists(self, path: str) -> bool:
        """Whether the file is there."""
        return self.tree.exists(path)


def find_flashinfer(explicit: str | None = None, *, near: Path | None = None) -> FlashInferSource:
    """The FlashInfer to write for.

    Args:
        explicit: what `--flashinfer` was given: the folder `flashinfer/`, a folder that has it (a
            checkout, a site-packages), a .whl file, a version to fetch (`0.6.17`) or the
            requirement (`flashinfer-python==0.6.17`), also as it stands in a lock file. Nothing
            else is looked at then.
        near: SGLang's place. A FlashInfer in this folder or one above it is what that SGLang runs
            with, also where mlagen itself is installed elsewhere.

    Raises UsageError where nothing is found, or `explicit` is none of these.
    """
    if explicit is not None:
        return _explicit(explicit)
    for source in (_near(near) if near is not None else None, _installed()):
        if source is not None:
            return source
    places = f"above {near} or beside mlagen" if near is not None else "beside mlagen"
    raise usage(
        f"no FlashInfer found: --flashinfer was not given, and none is installed {places}",
        path="flashinfer",
        code="flashinfer-not-found",
        hint=_HINT,
    )


def _explicit(text: str) -> FlashInferSource:
    path = Path(os.path.expanduser(text))
    there = bool(text) and is_there(path)
    if there and path.is_dir():
        return _in_folder(path)
    if there and path.is_file():
        if path.suffix != ".whl":
            raise usage(
                "a file, but no wheel",
                path=text,
                code="flashinfer-not-found",
                hint="give the folder flashinfer/, a folder that has it, or a .whl file",
            )
        return _from_wheel(path)
    if is_version(text):
        return _fetched(text)
    if "==" in text:
        return _required(text)
    raise usage(
        "no such folder or file, and not a version, nor a requirement that pins one with '=='",
        path=text[:200] or "--flashinfer",
        code="flashinfer-not-found",
        hint=_HINT,
    )


def _required(text: str) -> FlashInferSource:
    """The release that a line of a lock file names."""
    try:
        pinned = parse_requirement(bare_requirement(text))
    except UsageError as error:
        first = error.problems[0]
        hint = f"write it as {DISTRIBUTION}==VERSION, such as {DISTRIBUTION}==0.6.17"
        raise UsageError(replace(first, path=text[:200], hint=hint)) from None
    return _from_wheel(fetch(str(pinned)))


def _fetched(version: str) -> FlashInferSource:
    return _from_wheel(fetch(f"{DISTRIBUTION}=={version}"))


def _from_wheel(path: Path) -> FlashInferSource:
    tree = WheelTree(path)
    if not any(tree.exists(f"{PACKAGE}/{name}") for name in _MLA):
        raise _no_mla(str(path))
    found = tree.distribution()
    version = found[1] if found else _version_in(tree)
    return FlashInferSource(_label(version), version, str(path), tree)


def _in_folder(path: Path) -> FlashInferSource:
    require_searchable(path)
    for package in (path, path / PACKAGE):
        if _has_mla(package):
            return _from_package(package)
    raise _no_mla(str(path))


def _near(path: Path) -> FlashInferSource | None:
    place = path.absolute()
    for folder in (place, *place.parents):
        if _is_package(folder / PACKAGE):
            return _from_package(folder / PACKAGE)
    return None


def _installed() -> FlashInferSource | None:
    """The package that `import flashinfer` would take. A top-level name is found without running
    any of the package's code."""
    try:
        spec = importlib.util.find_spec(PACKAGE)
    except (ImportError, ValueError):
        return None
    # A namespace package has no origin: a folder that happens to be called flashinfer.
    if spec is None or spec.origin is None or not spec.submodule_search_locations:
        return None
    package = Path(next(iter(spec.submodule_search_locations)))
    return _from_package(package) if _is_package(package) else None


def _has_mla(package: Path) -> bool:
    return any((package / name).is_file() for name in _MLA)


def _is_package(package: Path) -> bool:
    return (package / "__init__.py").is_file() and _has_mla(package)


def _from_package(package: Path) -> FlashInferSource:
    tree = FolderTree(package, PACKAGE)
    version = _version_in(tree) or _version_beside(package)
    return FlashInferSource(_label(version), version, str(package), tree)


def _label(version: str | None) -> str:
    return f"{DISTRIBUTION} {version}" if version else f"{DISTRIBUTION} (version unknown)"


def _version_beside(package: Path) -> str | None:
    """From the dist-info of the site-packages, or the PKG-INFO or version.txt of the checkout, that
    `package` stands in."""
    folder = package.parent
    for name in (DISTRIBUTION, DISTRIBUTION.replace("-", "_")):
        for metadata in sorted(folder.glob(f"{name}-*.dist-info/METADATA")):
            if found := read_metadata(metadata.read_bytes()):
                return found[1]
    # An editable install: its dist-info lies in site-packages, the package does not.
    text = folder / "version.txt"
    if text.is_file():
        return _plain_version(text.read_text("utf-8", errors="replace"))
    information = folder / "PKG-INFO"
    if information.is_file() and (found := read_metadata(information.read_bytes())):
        return found[1]
    return None


def _version_in(tree: Tree) -> str | None:
    """From `_build_meta.py`, which FlashInfer's build writes from 0.2.3 on."""
    data = tree.read(f"{PACKAGE}/_build_meta.py")
    match = re.search(rb"""^__version__\s*=\s*["']([^"']+)["']""", data or b"", re.MULTILINE)
    return _plain_version(match[1].decode("utf-8", errors="replace")) if match else None


def _plain_version(text: str) -> str | None:
    """What a build could not tell, it writes as 0.0.0+unknown."""
    text = text.strip()
    return text if is_version(text) and not text.startswith("0.0.0") else None


def _no_mla(place: str) -> UsageError:
    return usage(
        "no FlashInfer here: looked for flashinfer/mla/__init__.py and flashinfer/mla.py",
        path=place,
        code="flashinfer-not-found",
        hint="give the folder flashinfer/, a folder that has it, or a flashinfer-python wheel",
    )
