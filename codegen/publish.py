"""Writing files: atomically, under a lock, never in place; Ctrl-C waits until it is done.

Package installers hard-link site-packages to a cache, so that a write into the file itself would
edit other environments: what is published is a new file that takes the old one's name.
"""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import signal
import stat
import tempfile
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

from filelock import FileLock, Timeout

from .errors import UsageError, unreadable, usage
from .provenance import is_plain_name

#: The largest file that is read as a target, in bytes. SGLang's back-end files have 60 KB.
MAX_BYTES: Final = 8 * 1024 * 1024
#: Seconds to wait for another mlagen that writes the same file.
LOCK_TIMEOUT: Final = 10.0

#: Raises to keep files from being replaced. Takes those that would be -> what stands there.
Guard: TypeAlias = Callable[[Mapping[Path, bytes]], None]


@dataclass(frozen=True)
class TargetFile:
    """A file as it was read.

    Attributes:
        path: as the caller named it; what errors show.
        resolved: the file itself, behind all symbolic links.
        data: its bytes.
        mode: its permission bits (stat.S_IMODE).
        uid, gid: its owner.
    """

    path: Path
    resolved: Path
    data: bytes
    mode: int
    uid: int
    gid: int


def read_target(path: Path | str) -> TargetFile:
    """Read the file that is to be edited.

    Raises:
        UsageError: there is no such file, it is no regular file (a folder, a pipe), it cannot be
            read, or it is larger than `MAX_BYTES`.
    """
    path = Path(path)
    try:
        resolved = Path(os.path.realpath(path, strict=True))
        # Before it is opened: opening a device may do something.
        _require_regular(path, resolved.stat().st_mode)
        # O_NONBLOCK: should a pipe have taken its place, do not wait for a writer.
        handle = os.open(resolved, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(handle, "rb") as file:
            status = os.fstat(handle)
            _require_regular(path, status.st_mode)
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise _read_error(path, error) from None
    if len(data) > MAX_BYTES:
        raise usage(
            f"the file is larger than {MAX_BYTES // 1024 // 1024} MiB",
            path=str(path),
            code="too-large",
            hint="is this the file you meant?",
        )
    return TargetFile(
        path, resolved, data, stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid
    )


def publish(target: TargetFile, data: bytes) -> bool:
    """Replace the file's content by `data`, all at once. Mode is kept, and owner where allowed;
    a symbolic link stays one, other hard links keep the old content.

    Returns:
        False where the file has this content already; then nothing is written.

    Raises:
        UsageError: the file or its folder is read-only, the file changed since it was read,
            another mlagen holds it, or the system refuses. The file is then as it was, except
            for code `read-back`: what was written came back different.
    """
    with _lock(target.resolved, shown=target.path), _undisturbed():
        current = read_target(target.path)
        if current.resolved != target.resolved or current.data != target.data:
            raise usage(
                "the file changed while mlagen was working on it; nothing was written",
                path=str(target.path),
                code="changed-meanwhile",
                hint="run again, when nothing else writes it",
            )
        if data == current.data:
            return False
        _require_writable(current.resolved, current.mode)
        try:
            staged = _stage(current.resolved.parent, data, like=current)
            _replace_all([(staged, current.resolved)])
        except OSError as error:
            raise _write_error(target.path, error) from None
        _read_back(target.path, data)
    return True


def would_replace(folder: Path | str, files: Mapping[str, bytes]) -> dict[Path, bytes]:
    """The files below `folder` that `write_tree` would replace by other bytes -> what stands
    there. UsageError where what stands there is no file, or cannot be read."""
    there = {}
    for name, data in files.items():
        place = Path(folder) / name
        if os.path.lexists(place) and (found := read_target(place).data) != data:
            there[place] = found
    return there


def write_tree(
    folder: Path | str,
    files: Mapping[str, bytes],
    *,
    remove: Collection[str] = (),
    guard: Guard | None = None,
) -> tuple[str, ...]:
    """Write a set of files below `folder`, making it where needed; all of them or none.

    Everything is written beside its place first, then renamed in the order of `files`: let the
    file that vouches for the others (MANIFEST.json) be the last. A rename that fails takes the
    ones before it back.

    Args:
        files: name below the folder (with `/`) -> bytes. Those that are there already with the
            same bytes are left alone.
        remove: names of files to take away; those that are not there are passed over.
        guard: is shown what would be replaced, before anything is written.

    Returns:
        The names that were written or removed.

    Raises:
        UsageError: as `publish`; also for a name that a symbolic link leads out of the folder.
        MlagenError: what `guard` raises.
        ValueError: a name is not a plain relative path, or in `files` and `remove` both.
    """
    folder = Path(folder)
    for name in [*files, *remove]:
        if not is_plain_name(name) or (name in files and name in remove):
            raise ValueError(f"not a name to write below a folder: {name!r}")
    root = Path(os.path.realpath(folder))
    with _lock(root, shown=folder), _undisturbed():
        if guard is not None:
            guard(would_replace(folder, files))
        made: list[Path] = []
        staged: list[tuple[Path | None, Path]] = []
        old: dict[Path, TargetFile] = {}
        changed: dict[str, bytes | None] = {}
        try:
            for name, data in [*files.items(), *((name, None) for name in remove)]:
                place = _inside(root, folder / name)
                if os.path.lexists(place):
                    old[place] = read_target(place)
                    if data == old[place].data:
                        continue
                    _require_writable(place, old[place].mode)
                elif data is None:
                    continue
                changed[name] = data
                if data is None:
                    staged.append((None, place))
                    continue
                _make_folders(place.parent, made)
                staged.append((_stage(place.parent, data, like=old.get(place)), place))
            _replace_all(staged, old)
        except BaseException as error:
            for temporary, _ in staged:
                if temporary is not None:
                    _forget(temporary)
            for directory in reversed(made):
                with suppress(OSError):
                    directory.rmdir()
            if isinstance(error, OSError):
                raise _write_error(folder, error) from None
            raise
        for name, data in changed.items():
            if data is not None:
                _read_back(folder / name, data)
    return tuple(changed)


def _stage(directory: Path, data: bytes, *, like: TargetFile | None) -> Path:
    """Write `data` to a new file in `directory`, down to the disk, with `like`'s mode and owner
    (without one: what the umask says). Leaves nothing behind when it fails."""
    temporary = directory / f".mlagen-{secrets.token_hex(8)}.tmp"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        handle = os.open(temporary, flags, 0o666 if like is None else 0o600)
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            if like is not None:
                status = os.fstat(handle)
                if (status.st_uid, status.st_gid) != (like.uid, like.gid):
                    # Only root may give files away; the content counts more than the owner.
                    with suppress(PermissionError):
                        os.fchown(handle, like.uid, like.gid)
                os.fchmod(handle, like.mode)  # after fchown, which clears bits
            os.fsync(handle)
    except BaseException:
        _forget(temporary)
        raise
    return temporary


def _replace_all(
    staged: Sequence[tuple[Path | None, Path]],
    old: Mapping[Path, TargetFile] | None = None,
) -> None:
    """Rename each staged file to its place, or remove the place where there is no staged file.
    On failure the places dealt with get their content in `old` back, and the staged files go."""
    done: list[Path] = []
    try:
        for temporary, place in staged:
            if temporary is None:
                place.unlink()
            else:
                os.replace(temporary, place)
            done.append(place)
    except BaseException:
        for temporary, _ in staged:
            if temporary is not None:
                _forget(temporary)
        for place in reversed(done):
            before = (old or {}).get(place)
            with suppress(OSError):
                if before is None:
                    place.unlink()
                else:
                    os.replace(_stage(place.parent, before.data, like=before), place)
        raise
    for directory in {place.parent for place in done}:
        _sync_folder(directory)


def _sync_folder(directory: Path) -> None:
    """Make the rename survive a power cut, where the file system can; the content is right
    either way."""
    with suppress(OSError):
        handle = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _forget(temporary: Path) -> None:
    with suppress(OSError):
        temporary.unlink()


def _make_folders(directory: Path, made: list[Path]) -> None:
    """Make `directory` and what is missing above it; adds what it made to `made`."""
    if directory.exists():
        return
    _make_folders(directory.parent, made)
    directory.mkdir()
    made.append(directory)


def _inside(root: Path, place: Path) -> Path:
    resolved = Path(os.path.realpath(place))
    if not resolved.is_relative_to(root):
        raise usage(
            f"a symbolic link leads out of {root}, to {resolved}",
            path=str(place),
            code="outside",
            hint="remove the link, or write to another folder",
        )
    return resolved


def _read_back(path: Path, data: bytes) -> None:
    found = read_target(path).data
    if found != data:
        raise usage(
            f"what was written is not what reads back: {len(data)} bytes went out, "
            f"{len(found)} bytes stand there",
            path=str(path),
            code="read-back",
            hint="does something else write this file, or is the disk failing?",
        )


@contextmanager
def _lock(resolved: Path, *, shown: Path) -> Iterator[None]:
    """Keep other mlagen processes of this user away from `resolved`. The lock file stands in the
    temporary folder, so that nothing is left beside the target; what another user does is caught
    when the bytes are compared again."""
    key = hashlib.sha256(os.fsencode(resolved)).hexdigest()[:32]
    directory = Path(tempfile.gettempdir()) / f"mlagen-locks-{os.getuid()}"
    lock = FileLock(directory / f"{key}.lock", timeout=LOCK_TIMEOUT)
    try:
        directory.mkdir(mode=0o700, exist_ok=True)
        # In a shared folder anyone may have made this name first.
        if directory.is_symlink() or directory.stat().st_uid != os.getuid():
            raise PermissionError(errno.EACCES, "not ours", str(directory))
        lock.acquire()
    except Timeout:
        raise usage(
            f"another mlagen has been writing this for {LOCK_TIMEOUT:.0f} s",
            path=str(shown),
            code="locked",
            hint="run again when it is done",
        ) from None
    except OSError as error:
        raise usage(
            f"no lock file can be made in {directory}: {error.strerror}",
            path=str(shown),
            code="no-lock",
            hint="set TMPDIR to a folder that you can write",
        ) from None
    try:
        yield
    finally:
        lock.release()


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Put Ctrl-C off until the end. Between the making of a file and the note of it, or between
    two renames, it would leave things that nothing takes back."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before is None:
        yield  # only the main thread is interrupted; None: whoever embeds this Python sees to it
        return
    came: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if came:
            signal.raise_signal(signal.SIGINT)


def _require_regular(path: Path, mode: int) -> None:
    if stat.S_ISREG(mode):
        return
    kind = "a folder" if stat.S_ISDIR(mode) else "a pipe" if stat.S_ISFIFO(mode) else "a device"
    if stat.S_ISSOCK(mode):
        kind = "a socket"
    raise usage(
        f"not a regular file but {kind}", path=str(path), code="not-a-file", hint="name a file"
    )


def _require_writable(resolved: Path, mode: int) -> None:
    """Refuse what its owner made read-only. A rename needs no right to the file itself, and root
    needs none at all, so the mode is looked at."""
    directory = resolved.parent
    if not mode & 0o222 or not os.access(resolved, os.W_OK):
        raise _read_only("the file", resolved, "u+w", mine=not mode & 0o222)
    folder_mode = directory.stat().st_mode
    if not folder_mode & 0o222 or not os.access(directory, os.W_OK | os.X_OK):
        raise _read_only("this folder", directory, "u+wx", mine=not folder_mode & 0o222)


def _read_only(what: str, path: Path, bits: str, *, mine: bool) -> UsageError:
    hint = f"chmod {bits} {path}" if mine else f"run as the owner of {path}"
    message = f"{what} is read-only; nothing was written"
    return usage(message, path=str(path), code="read-only", hint=hint)


def _read_error(path: Path, error: OSError) -> UsageError:
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        message = "there is no such file"
        if path.is_symlink():
            message = f"a symbolic link to {os.readlink(path)}, where no file is"
        return usage(message, path=str(path), code="missing", hint="check the path")
    if error.errno == errno.ELOOP:
        message, hint = "its symbolic links go in a circle", "mend the links"
        return usage(message, path=str(path), code="unreadable", hint=hint)
    return unreadable(path, error)


def _write_error(path: Path, error: OSError) -> UsageError:
    hint = "the file is as it was; mend the cause and run again"
    if error.errno == errno.EROFS:
        hint = "the file system is mounted read-only; patch a copy"
    elif error.errno in (errno.ENOSPC, errno.EDQUOT):
        hint = "make room on the disk and run again; the file is as it was"
    message = f"cannot be written: {error.strerror or error}"
    return usage(message, path=str(path), code="not-written", hint=hint)
