"""The few files of a release that the matrix reads, in a cache of their own.

A wheel of SGLang is some 5 to 40 MB, of which one file and the metadata matter here: what is
fetched is thinned to a zip of those few files and thrown away. Such a zip opens like the wheel.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from packaging.utils import canonicalize_name

from ..errors import UsageError, usage
from ..fetch import WheelTree, cache_dir, cached, fetch, is_gone
from ..flashinfer.find import PACKAGE
from ..sglang.find import BACKEND_FILE
from .archive import source_files
from .releases import FLASHINFER, SGLANG

Kind: TypeAlias = Literal["wheel", "source"]
_KINDS: tuple[Kind, ...] = ("wheel", "source")
#: A zip has no earlier date; the same files give the same bytes.
_NO_DATE = (1980, 1, 1, 0, 0, 0)
#: Goes up when `wanted` takes more: what was thinned before lacks it.
_FOLDER = "thinned-1"
#: FlashInfer's C++ that mlagen may read: the planner's header is here.
_HEADERS = f"{PACKAGE}/data/include/{PACKAGE}/attention/"


@dataclass(frozen=True)
class Held:
    """A release whose files are here: `place` opens as a wheel; `kind` is what it was made of."""

    place: Path
    kind: Kind


def held(name: str, version: str, *, cache: Path | None = None) -> Held | None:
    """The files of a release if the cache has them, thinned or as a whole wheel."""
    folder = _folder(name, version, cache)
    for kind in _KINDS:
        place = folder / f"{kind}.whl"  # `find_flashinfer` takes a file for a wheel by its name
        if zipfile.is_zipfile(place):
            return Held(place, kind)
    whole = cached(f"{name}=={version}", cache=cache)
    return Held(whole, "wheel") if whole is not None else None


def obtain(
    name: str, version: str, say: Callable[[str], None], *, cache: Path | None = None
) -> Held:
    """The files of a release, fetched where the cache has them not: its wheel, else, for
    FlashInfer, its source archive.

    Raises UsageError where neither is to be had, or the cache cannot be written.
    """
    if found := held(name, version, cache=cache):
        return found
    folder = _folder(name, version, cache)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=".partial-", dir=folder))
    except OSError as error:
        raise _not_writable(folder, error) from error
    try:
        kind, files = _fetched(name, version, work, say)
        place = folder / f"{kind}.whl"
        write_archive(work / place.name, files)
        (work / place.name).replace(place)
    except OSError as error:
        raise _not_writable(folder, error) from error
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return Held(place, kind)


def _fetched(
    name: str, version: str, work: Path, say: Callable[[str], None]
) -> tuple[Kind, Mapping[str, bytes]]:
    requirement = f"{name}=={version}"
    try:
        tree = WheelTree(fetch(requirement, cache=work, say=say))
    except UsageError as error:
        if name != FLASHINFER or not is_gone(error):
            raise
        files = source_files(name, version, work, say)
        return "source", {path: data for path, data in files.items() if wanted(name, path)}
    return "wheel", {path: tree.read(path) or b"" for path in tree.names() if wanted(name, path)}


def wanted(name: str, path: str) -> bool:
    """Whether mlagen reads, or may read, a file of a release: its metadata, SGLang's back end, the
    Python and the planner's headers of FlashInfer (not what it brings along in `data/`)."""
    if path.count("/") == 1 and path.endswith(".dist-info/METADATA"):
        return True
    if name == SGLANG:
        return path == f"sglang/{BACKEND_FILE}"
    if path.startswith(_HEADERS):
        return path.count("/") == _HEADERS.count("/") and path.endswith(".cuh")
    return (
        path.startswith(f"{PACKAGE}/")
        and path.endswith(".py")
        and not path.startswith(f"{PACKAGE}/data/")
    )


def flashinfer_digest(wheel: WheelTree) -> str:
    """sha256, hex, over the files of FlashInfer that matter here: the same for a whole wheel and
    for one that was thinned. The metadata is not among them: it has the version."""
    total = hashlib.sha256()
    for path in sorted(wheel.names()):
        if wanted(FLASHINFER, path) and path.startswith(f"{PACKAGE}/"):
            total.update(path.encode() + b"\0")
            total.update(hashlib.sha256(wheel.read(path) or b"").digest())
    return total.hexdigest()


def _folder(name: str, version: str, cache: Path | None) -> Path:
    return (cache or cache_dir()) / _FOLDER / canonicalize_name(name) / version


def write_archive(place: Path, files: Mapping[str, bytes]) -> None:
    """Write a zip of `files`; the same files give the same bytes."""
    with zipfile.ZipFile(place, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(files):
            info = zipfile.ZipInfo(path, _NO_DATE)
            info.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(info, files[path])
    with open(place, "rb") as file:  # renamed in place only when it is on the disk
        os.fsync(file.fileno())


def _not_writable(folder: Path, error: OSError) -> UsageError:
    return usage(
        f"cannot write the cache of fetched files: {error.strerror or error}",
        path=str(folder),
        code="cache-not-writable",
        hint="set MLAGEN_CACHE to a folder that can be written",
    )
