"""Fetch one release as a wheel, once, into a cache outside every repository; read files in it.

Nothing is installed and nothing is unpacked: a wheel is a zip, and mlagen reads a few files of it.
"""

from __future__ import annotations

import os
import shutil
import sys
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from email.parser import HeaderParser
from pathlib import Path
from typing import Protocol

from filelock import FileLock, Timeout
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from .errors import UsageError, unreadable, usage
from .pip import PipRun, run_pip
from .report import Printer

#: Interpreters and platforms to ask pip for when it has no wheel for the running one. SGLang's
#: wheels hold a compiled part from 0.5.11 on (cp3x, manylinux_2_34_x86_64); we only read text.
_OTHER_PYTHONS = ("3.11", "3.12", "3.10")
_OTHER_PLATFORMS = ("manylinux_2_34_x86_64", "manylinux2014_x86_64", "any")


class Tree(Protocol):
    """Files by their path from the import root, such as `flashinfer/mla/__init__.py`."""

    def read(self, path: str) -> bytes | None:
        """The bytes of one file, None where there is none."""

    def exists(self, path: str) -> bool:
        """Whether the file is there."""


@dataclass(frozen=True)
class Pinned:
    """A requirement that names exactly one release."""

    name: str
    version: str

    def __str__(self) -> str:
        return f"{self.name}=={self.version}"


def parse_requirement(text: str) -> Pinned:
    """Read `sglang==0.5.17`. Extras are dropped: no dependency is ever fetched.

    Raises UsageError where the text is no requirement, or does not pin one version with `==`.
    """
    try:
        requirement = Requirement(text)
    except InvalidRequirement as error:
        # packaging adds lines that point into the text; the first says what is wrong.
        reason = str(error).splitlines()[0].strip()
        raise usage(
            f"not a requirement: {reason}",
            path=text,
            code="bad-requirement",
            hint="write it as NAME==VERSION, such as sglang==0.5.17",
        ) from error
    specifiers = list(requirement.specifier)
    if requirement.url is None and requirement.marker is None and len(specifiers) == 1:
        [specifier] = specifiers
        if specifier.operator == "==" and not specifier.version.endswith(".*"):
            return Pinned(requirement.name, str(Version(specifier.version)))
    raise usage(
        f"the requirement has to pin one version with '==', found {text!r}",
        path=text,
        code="bad-requirement",
        hint=f"write {requirement.name}==VERSION, such as {requirement.name}==0.5.17",
    )


def is_version(text: str) -> bool:
    """Whether `text` reads as a release's version, such as `0.6.18.post1`."""
    try:
        Version(text)
    except InvalidVersion:
        return False
    return True


def cache_dir() -> Path:
    """Where fetched wheels lie: $MLAGEN_CACHE, else `mlagen` in the user's cache folder."""
    if chosen := os.environ.get("MLAGEN_CACHE"):
        return Path(os.path.expanduser(chosen)).absolute()
    try:
        home = Path.home()
    except RuntimeError as error:
        raise usage(
            "no home folder to keep fetched wheels in", hint="set MLAGEN_CACHE to a folder"
        ) from error
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", home / "AppData" / "Local")) / "mlagen" / "cache"
    if sys.platform == "darwin":
        return home / "Library" / "Caches" / "mlagen"
    # The XDG specification tells us to ignore a relative path.
    xdg = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (xdg if xdg.is_absolute() else home / ".cache") / "mlagen"


def _say(line: str) -> None:
    Printer().progress(f"mlagen: {line}")


def fetch(
    requirement: str, *, cache: Path | None = None, say: Callable[[str], None] = _say
) -> Path:
    """The wheel of the release that `requirement` pins; from the cache, else through pip.

    A cached release needs no network, no pip and no lock. A download goes to a folder of its own
    and is moved in place when it is whole, so that a killed one is never taken for a wheel.

    Raises UsageError where the requirement does not pin a version, the cache cannot be written,
    or pip fails; the message carries the last line that pip wrote.
    """
    pinned = parse_requirement(requirement)
    folder = (cache or cache_dir()) / "wheels" / canonicalize_name(pinned.name) / pinned.version
    if found := _cached(folder):
        return found
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / ".lock")
        try:
            lock.acquire(timeout=0.1)
        except Timeout:
            say(f"waiting for another mlagen that fetches {pinned}")
            lock.acquire()
        try:
            return _cached(folder) or _download(pinned, folder, say)
        finally:
            lock.release()
    except OSError as error:
        raise usage(
            f"cannot write the cache of fetched wheels: {error.strerror or error}",
            path=str(folder),
            code="cache-not-writable",
            hint="set MLAGEN_CACHE to a folder that can be written",
        ) from error


def cached(requirement: str, *, cache: Path | None = None) -> Path | None:
    """The wheel of a release if it is in the cache; nothing is fetched."""
    pinned = parse_requirement(requirement)
    return _cached(
        (cache or cache_dir()) / "wheels" / canonicalize_name(pinned.name) / pinned.version
    )


def is_gone(error: UsageError) -> bool:
    """Whether the registry answered, and has no such archive (a network that is down may have
    it)."""
    return any("No matching distribution found" in problem.message for problem in error.problems)


def _cached(folder: Path) -> Path | None:
    """A whole wheel in `folder`. `is_zipfile` looks for the directory at the end of the file."""
    return next((path for path in sorted(folder.glob("*.whl")) if zipfile.is_zipfile(path)), None)


def _download(pinned: Pinned, folder: Path, say: Callable[[str], None]) -> Path:
    """Run pip until one set of tags has a wheel, and move that wheel into `folder`."""
    partial = folder / ".partial"
    for tags in _tag_choices():
        # What a killed run left here is worth nothing.
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        asked_for = f" (for Python {tags[1]})" if tags else ""
        say(f"fetching {pinned} with pip{asked_for}")
        options = ["--no-deps", "--only-binary=:all:", "--no-input", "--dest", ".", *tags]
        run = run_pip("download", *options, str(pinned), folder=partial)
        wheel = _cached(partial)
        if run.status == 0 and wheel is not None:
            target = folder / wheel.name
            wheel.replace(target)
            shutil.rmtree(partial, ignore_errors=True)
            return target
        if run.unreachable is not None or "No matching distribution found" not in run.output:
            break  # another interpreter's tags do not mend a network that is down
    shutil.rmtree(partial, ignore_errors=True)
    raise _pip_failed(pinned, run)


def _tag_choices() -> list[list[str]]:
    platforms = [word for tag in _OTHER_PLATFORMS for word in ("--platform", tag)]
    return [
        [],
        *(["--python-version", v, "--implementation", "cp", *platforms] for v in _OTHER_PYTHONS),
    ]


def _pip_failed(pinned: Pinned, run: PipRun) -> UsageError:
    if run.unreachable is not None:
        hint = (
            "mend the network, or what pip is set to (PIP_INDEX_URL, a proxy); "
            "a folder or a wheel file needs neither"
        )
    elif "No module named pip" in run.output:
        hint = "install pip beside mlagen (python -m ensurepip), or give a folder or a wheel file"
    elif "No matching distribution found" in run.output:
        hint = (
            "the index that pip uses has no wheel of that version; "
            "give another version, or a folder or a wheel file"
        )
    else:
        hint = "fetching needs pip and a network; a folder or a wheel file needs neither"
    return usage(
        f"pip could not download {pinned}: {run.why('pip wrote nothing')}",
        path=str(pinned),
        code="fetch-failed",
        hint=hint,
    )


class WheelTree:
    """The files of a wheel, read one at a time."""

    def __init__(self, path: Path) -> None:
        """Open `path`. Raises UsageError where it cannot be read or is no zip."""
        self.path = path
        try:
            self._zip = zipfile.ZipFile(path)
        except OSError as error:
            raise unreadable(path, error) from error
        except zipfile.BadZipFile as error:
            raise usage(
                f"not a readable wheel: {error}",
                path=str(path),
                code="bad-wheel",
                hint=_have_it_anew(path),
            ) from error

    def read(self, path: str) -> bytes | None:
        """The bytes of one file, None where there is none. UsageError where it is damaged."""
        try:
            return self._zip.read(path)
        except KeyError:
            return None
        # RuntimeError: encrypted, or packed in a way that this Python cannot unpack.
        except (OSError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
            raise usage(
                f"the wheel is damaged: {error}",
                path=f"{self.path}:{path}",
                code="bad-wheel",
                hint=_have_it_anew(self.path),
            ) from error

    def exists(self, path: str) -> bool:
        """Whether the file is there."""
        return path in self._zip.NameToInfo

    def names(self) -> tuple[str, ...]:
        """The paths of all files, in the order of the archive."""
        return tuple(self._zip.namelist())

    def distribution(self) -> tuple[str, str] | None:
        """Name and version from the wheel's METADATA; None where it has none."""
        for name in self._zip.namelist():
            if name.endswith(".dist-info/METADATA") and name.count("/") == 1:
                return read_metadata(self.read(name) or b"")
        return None


def _have_it_anew(wheel: Path) -> str:
    """What to do about a wheel that cannot be read. mlagen fetches what its cache lacks, and no
    more: a damaged one would be found there for ever."""
    try:
        in_cache = cache_dir() in wheel.absolute().parents
    except UsageError:  # no home folder
        in_cache = False
    then = "run again: mlagen fetches it anew" if in_cache else "download it again"
    return f"delete {wheel}, and {then}"


class FolderTree:
    """The files of a folder. `package` is where the files of `name/` lie: an import package may
    have been given by its own folder, whatever that folder is called."""

    def __init__(self, package: Path, name: str) -> None:
        self.package = package
        self.name = name

    def _place(self, path: str) -> Path | None:
        first, _, rest = path.partition("/")
        return self.package / rest if first == self.name and rest else None

    def read(self, path: str) -> bytes | None:
        """The bytes of one file, None where there is none. UsageError where it is unreadable."""
        place = self._place(path)
        try:
            return place.read_bytes() if place is not None and place.is_file() else None
        except OSError as error:
            raise unreadable(place or path, error) from error

    def exists(self, path: str) -> bool:
        """Whether the file is there. UsageError where that cannot be seen."""
        place = self._place(path)
        try:
            return place is not None and place.is_file()
        except OSError as error:
            raise unreadable(place or path, error) from error


def is_there(path: Path) -> bool:
    """Whether a file, a folder or a link of that name is there; what is no name is not. UsageError
    where that cannot be seen: it would seem not to be there."""
    try:
        os.lstat(path)
    except PermissionError as error:
        raise unreadable(path, error) from None
    except (OSError, ValueError):
        return False
    return True


def require_searchable(folder: Path) -> None:
    """Raise UsageError for a folder whose files cannot be looked at."""
    try:
        os.stat(os.path.join(folder, os.curdir))
    except OSError as error:
        raise unreadable(folder, error) from None


def read_metadata(data: bytes) -> tuple[str, str] | None:
    """Name and version from the bytes of a METADATA or PKG-INFO file."""
    headers = HeaderParser().parsestr(data.decode("utf-8", errors="replace"), headersonly=True)
    name, version = headers.get("Name"), headers.get("Version")
    return (name.strip(), version.strip()) if name and version else None
