"""Writing: all or nothing, never in place, nothing left behind."""

from __future__ import annotations

import errno
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mlagen.codegen import publish as module
from mlagen.codegen.errors import UsageError
from mlagen.codegen.publish import MAX_BYTES, publish, read_target, write_tree


@pytest.fixture(autouse=True)
def lock_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("locks")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(folder))
        yield folder


@pytest.fixture
def target(tmp_path: Path) -> Path:
    path = tmp_path / "site" / "backend.py"
    path.parent.mkdir()
    path.write_bytes(b"old\n")
    path.chmod(0o640)
    return path


def tree(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def refused(call: Callable[[], object], code: str) -> str:
    """The text of the one problem that `call` is refused with."""
    with pytest.raises(UsageError) as caught:
        call()
    assert caught.value.exit_code == 2
    (problem,) = caught.value.problems
    assert problem.code == code
    return str(problem)


# --- reading ----------------------------------------------------------------------------------


def test_a_file_is_read_as_it_is(target: Path) -> None:
    target.write_bytes(b"\xef\xbb\xbfa\r\n\xff")
    found = read_target(target)
    assert (found.data, found.mode) == (b"\xef\xbb\xbfa\r\n\xff", 0o640)
    assert (found.path, found.resolved) == (target, target.resolve())
    assert (found.uid, found.gid) == (target.stat().st_uid, target.stat().st_gid)


def test_a_symbolic_link_is_followed_to_the_file(target: Path, tmp_path: Path) -> None:
    (tmp_path / "one").symlink_to("site")
    (tmp_path / "two").symlink_to(tmp_path / "one" / "backend.py")
    found = read_target(str(tmp_path / "two"))
    assert found.path == tmp_path / "two"
    assert found.resolved == target.resolve()


def _missing(folder: Path) -> Path:
    return folder / "none"


def _below_a_file(folder: Path) -> Path:
    (folder / "file").touch()
    return folder / "file" / "x"


def _dangling(folder: Path) -> Path:
    (folder / "link").symlink_to("gone")
    return folder / "link"


def _circle(folder: Path) -> Path:
    (folder / "link").symlink_to("link")
    return folder / "link"


def _folder(folder: Path) -> Path:
    return folder


def _fifo(folder: Path) -> Path:
    os.mkfifo(folder / "fifo")
    return folder / "fifo"


def _device(folder: Path) -> Path:
    return Path(os.devnull)


def _large(folder: Path) -> Path:
    with open(folder / "large", "wb") as file:
        file.truncate(MAX_BYTES + 1)
    return folder / "large"


@pytest.mark.parametrize(
    ("make", "code", "says"),
    [
        (_missing, "missing", "there is no such file"),
        (_below_a_file, "missing", "there is no such file"),
        (_dangling, "missing", "a symbolic link to gone, where no file is"),
        (_circle, "unreadable", "go in a circle"),
        (_folder, "not-a-file", "not a regular file but a folder"),
        (_fifo, "not-a-file", "not a regular file but a pipe"),
        (_device, "not-a-file", "not a regular file but a device"),
        (_large, "too-large", "larger than 8 MiB"),
    ],
)
def test_what_is_no_readable_file_is_refused(
    tmp_path: Path, make: Callable[[Path], Path], code: str, says: str
) -> None:
    path = make(tmp_path)
    text = refused(lambda: read_target(path), code)
    assert text.startswith(f"{path}: {code}: ")
    assert says in text
    assert "hint: " in text


def test_a_socket_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # a socket's path has to be short
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket")
        assert "a socket" in refused(lambda: read_target("socket"), "not-a-file")


def test_the_largest_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "large"
    with open(path, "wb") as file:
        file.truncate(MAX_BYTES)
    assert len(read_target(path).data) == MAX_BYTES


def test_a_file_that_may_not_be_read_is_refused(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(*_: object) -> int:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(os, "open", denied)
    text = refused(lambda: read_target(target), "unreadable")
    assert "Permission denied" in text
    assert "run as a user who may read it" in text


# --- publishing -------------------------------------------------------------------------------


def test_the_file_is_replaced_and_keeps_its_mode(target: Path) -> None:
    before = target.stat()
    assert publish(read_target(target), b"new\r\n\xff") is True
    assert target.read_bytes() == b"new\r\n\xff"
    after = target.stat()
    assert stat.S_IMODE(after.st_mode) == 0o640
    assert (after.st_uid, after.st_gid) == (before.st_uid, before.st_gid)
    assert os.listdir(target.parent) == ["backend.py"]


def test_hard_links_keep_the_old_content(target: Path, tmp_path: Path) -> None:
    cache = tmp_path / "installer-cache.py"
    os.link(target, cache)
    publish(read_target(target), b"new\n")
    assert cache.read_bytes() == b"old\n"
    assert target.read_bytes() == b"new\n"


def test_a_symbolic_link_stays_one(target: Path, tmp_path: Path) -> None:
    link = tmp_path / "link.py"
    link.symlink_to(target)
    publish(read_target(link), b"new\n")
    assert link.is_symlink()
    assert target.read_bytes() == b"new\n"
    assert sorted(os.listdir(tmp_path)) == ["link.py", "site"]


def test_the_same_content_is_not_written(target: Path) -> None:
    target.chmod(0o440)
    before = target.stat()
    assert publish(read_target(target), b"old\n") is False
    assert target.stat().st_ino == before.st_ino


def test_the_owner_is_kept(target: Path) -> None:
    try:
        os.chown(target, 12345, 23456)
    except PermissionError:
        pytest.skip("only root gives files away, and not in every container")
    target.chmod(0o6755)
    publish(read_target(target), b"new\n")
    after = target.stat()
    assert (after.st_uid, after.st_gid) == (12345, 23456)
    assert stat.S_IMODE(after.st_mode) == 0o6755


def test_an_owner_that_cannot_be_kept_is_no_failure(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(*_: object) -> None:
        raise PermissionError(errno.EPERM, "no")

    read = read_target(target)
    monkeypatch.setattr(os, "fchown", denied)
    monkeypatch.setattr(module, "read_target", lambda path: _as_of_another(read_target(path)))
    monkeypatch.setattr(os, "access", lambda *_: True)
    publish(read, b"new\n")
    assert target.read_bytes() == b"new\n"


def _as_of_another(file: module.TargetFile) -> module.TargetFile:
    return module.TargetFile(
        file.path, file.resolved, file.data, file.mode, file.uid + 1, file.gid + 1
    )


@pytest.mark.parametrize("mode", [0o444, 0o400, 0o555])
def test_a_read_only_file_is_refused_for_root_too(target: Path, mode: int) -> None:
    target.chmod(mode)
    text = refused(lambda: publish(read_target(target), b"new\n"), "read-only")
    assert "the file is read-only" in text
    assert f"hint: chmod u+w {target.resolve()}" in text
    assert tree(target.parent) == {"backend.py": b"old\n"}
    assert stat.S_IMODE(target.stat().st_mode) == mode


def test_a_read_only_folder_is_refused_for_root_too(target: Path) -> None:
    target.parent.chmod(0o555)
    try:
        text = refused(lambda: publish(read_target(target), b"new\n"), "read-only")
    finally:
        target.parent.chmod(0o755)
    assert "this folder is read-only" in text
    assert f"hint: chmod u+wx {target.parent.resolve()}" in text
    assert tree(target.parent) == {"backend.py": b"old\n"}


@pytest.mark.parametrize("denied", ["backend.py", "site"])
def test_what_belongs_to_another_is_refused(
    target: Path, monkeypatch: pytest.MonkeyPatch, denied: str
) -> None:
    monkeypatch.setattr(os, "access", lambda path, _: Path(path).name != denied)
    text = refused(lambda: publish(read_target(target), b"new\n"), "read-only")
    assert "hint: run as the owner of" in text
    assert tree(target.parent) == {"backend.py": b"old\n"}


def _changed(target: Path) -> None:
    target.write_bytes(b"old!")


def _gone(target: Path) -> None:
    target.unlink()


@pytest.mark.parametrize(("change", "code"), [(_changed, "changed-meanwhile"), (_gone, "missing")])
def test_a_file_that_changed_since_is_left_alone(
    target: Path, change: Callable[[Path], None], code: str
) -> None:
    read = read_target(target)
    change(target)
    before = tree(target.parent)
    refused(lambda: publish(read, b"new\n"), code)
    assert tree(target.parent) == before


def test_a_link_that_was_moved_since_is_left_alone(target: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.py"
    other.write_bytes(b"old\n")
    link = tmp_path / "link.py"
    link.symlink_to(target)
    read = read_target(link)
    link.unlink()
    link.symlink_to(other)
    refused(lambda: publish(read, b"new\n"), "changed-meanwhile")
    assert (other.read_bytes(), target.read_bytes()) == (b"old\n", b"old\n")


class _Stop(BaseException):
    """Stands for KeyboardInterrupt."""


@pytest.mark.parametrize("call", ["replace", "fsync", "fchmod"])
@pytest.mark.parametrize(
    "failure",
    [
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
        OSError(errno.EROFS, os.strerror(errno.EROFS)),
        OSError(errno.EIO, os.strerror(errno.EIO)),
        _Stop(),
    ],
    ids=["full", "read-only", "broken", "interrupted"],
)
def test_a_failure_leaves_the_file_and_nothing_else(
    target: Path, monkeypatch: pytest.MonkeyPatch, call: str, failure: BaseException
) -> None:
    read = read_target(target)

    def fail(*_: object) -> None:
        raise failure

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        if isinstance(failure, OSError):
            text = refused(lambda: publish(read, b"new\n"), "not-written")
            assert str(failure.strerror) in text
            assert "hint: " in text
        else:
            with pytest.raises(_Stop):
                publish(read, b"new\n")
    assert tree(target.parent) == {"backend.py": b"old\n"}
    # And the lock is free again.
    assert publish(read, b"new\n") is True


def test_a_folder_that_cannot_be_synced_is_no_failure(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.fsync

    def files_only(handle: int) -> None:
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "no folders")
        real(handle)

    monkeypatch.setattr(os, "fsync", files_only)
    assert publish(read_target(target), b"new\n") is True
    assert target.read_bytes() == b"new\n"


def test_what_reads_back_different_is_told(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.replace

    def and_another_writes(source: Path, place: Path) -> None:
        real(source, place)
        Path(place).write_bytes(b"theirs")

    monkeypatch.setattr(os, "replace", and_another_writes)
    text = refused(lambda: publish(read_target(target), b"new\n"), "read-back")
    assert "4 bytes went out, 6 bytes stand there" in text


_HOLD = """
import sys, time
from pathlib import Path
from mlagen.codegen import publish
with publish._lock(Path(sys.argv[1]).resolve(), shown=Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_two_at_once_wait_for_each_other(
    target: Path, monkeypatch: pytest.MonkeyPatch, lock_folder: Path
) -> None:
    read = read_target(target)
    holder = subprocess.Popen(
        [sys.executable, "-c", _HOLD, str(target)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(lock_folder)},
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        monkeypatch.setattr(module, "LOCK_TIMEOUT", 0.2)
        text = refused(lambda: publish(read, b"new\n"), "locked")
        assert text.startswith(f"{target}: locked: another mlagen")
        assert tree(target.parent) == {"backend.py": b"old\n"}
    finally:
        holder.communicate()
    assert holder.returncode == 0
    assert publish(read, b"new\n") is True


def test_a_lock_folder_of_someone_else_is_not_used(
    target: Path, lock_folder: Path, tmp_path: Path
) -> None:
    (lock_folder / f"mlagen-locks-{os.getuid()}").symlink_to(tmp_path)
    text = refused(lambda: publish(read_target(target), b"new\n"), "no-lock")
    assert "set TMPDIR" in text
    assert tree(target.parent) == {"backend.py": b"old\n"}


# --- a set of files ---------------------------------------------------------------------------

FILES = {"plans.py": b"p", "tests/test_decode.py": b"t", "MANIFEST.json": b"{}"}


def test_a_tree_is_written_where_nothing_was(tmp_path: Path) -> None:
    out = tmp_path / "a" / "generated"
    old = os.umask(0o027)
    try:
        assert write_tree(out, FILES) == tuple(FILES)
    finally:
        os.umask(old)
    assert tree(tmp_path) == {f"a/generated/{name}": data for name, data in FILES.items()}
    assert stat.S_IMODE((out / "plans.py").stat().st_mode) == 0o640


def test_only_what_differs_is_written(tmp_path: Path) -> None:
    write_tree(tmp_path, FILES)
    (tmp_path / "plans.py").chmod(0o600)
    before = (tmp_path / "MANIFEST.json").stat()
    assert write_tree(tmp_path, FILES | {"plans.py": b"q"}) == ("plans.py",)
    assert tree(tmp_path) == FILES | {"plans.py": b"q"}
    assert (tmp_path / "MANIFEST.json").stat().st_ino == before.st_ino
    assert stat.S_IMODE((tmp_path / "plans.py").stat().st_mode) == 0o600
    assert write_tree(tmp_path, FILES | {"plans.py": b"q"}) == ()


def test_files_that_are_no_longer_rendered_go(tmp_path: Path) -> None:
    write_tree(tmp_path, FILES)
    (tmp_path / "mine.txt").write_bytes(b"mine")
    gone = write_tree(tmp_path, {"plans.py": b"p"}, remove=["tests/test_decode.py", "none.py"])
    assert gone == ("tests/test_decode.py",)
    assert tree(tmp_path) == {"plans.py": b"p", "MANIFEST.json": b"{}", "mine.txt": b"mine"}


NEW = {"plans.py": b"P", "new/x.py": b"x", "tests/test_decode.py": b"T", "MANIFEST.json": b"M"}


@pytest.mark.parametrize("nth", [1, 2, 3, 4])
@pytest.mark.parametrize("call", ["replace", "fsync"])
@pytest.mark.parametrize("failure", [OSError(errno.EIO, "broken"), _Stop()], ids=["io", "stop"])
def test_a_tree_is_written_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, nth: int, failure: BaseException
) -> None:
    write_tree(tmp_path, FILES)
    real = getattr(os, call)
    calls = []

    def fail_once(*arguments: object) -> None:
        calls.append(arguments)
        if len(calls) == nth:
            raise failure
        real(*arguments)

    monkeypatch.setattr(os, call, fail_once)
    with pytest.raises((UsageError, _Stop)):
        write_tree(tmp_path, NEW)
    assert tree(tmp_path) == FILES
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("call", ["open", "fsync", "replace", "close"])
@pytest.mark.parametrize("nth", [1, 2, 4])
def test_an_interrupt_waits_until_a_tree_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, nth: int
) -> None:
    """Ctrl-C just behind a step, before anyone can have noted that it was done."""
    write_tree(tmp_path, FILES)
    real = getattr(os, call)
    calls = []

    def then_interrupted(*arguments: object, **named: object) -> object:
        done = real(*arguments, **named)
        calls.append(arguments)
        if len(calls) == nth and list(tmp_path.rglob(".mlagen-*")):
            signal.raise_signal(signal.SIGINT)
            struck.append(call)
        return done

    struck: list[str] = []
    before = signal.getsignal(signal.SIGINT)
    with monkeypatch.context() as patch:
        patch.setattr(os, call, then_interrupted)
        try:
            write_tree(tmp_path, NEW)
        except KeyboardInterrupt:
            assert struck
        else:
            assert not struck
    assert tree(tmp_path) == FILES | NEW
    assert signal.getsignal(signal.SIGINT) is before


def test_an_interrupt_waits_until_a_file_is_published(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = read_target(target)
    real = os.replace

    def then_interrupted(*arguments: str) -> None:
        real(*arguments)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(os, "replace", then_interrupted)
    with pytest.raises(KeyboardInterrupt):
        publish(read, b"new\n")
    assert tree(target.parent) == {"backend.py": b"new\n"}


def test_a_thread_that_is_not_the_main_one_publishes_too(target: Path) -> None:
    """There no handler of signals can be set, and none is needed."""
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(publish, read_target(target), b"new\n").result() is True


def test_a_removal_that_fails_puts_everything_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tree(tmp_path, FILES)
    real = Path.unlink

    def fail(path: Path, missing_ok: bool = False) -> None:
        if path.name == "MANIFEST.json":
            raise PermissionError(errno.EPERM, "no")
        real(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", fail)
    with pytest.raises(UsageError):
        write_tree(tmp_path, {"plans.py": b"P"}, remove=["tests/test_decode.py", "MANIFEST.json"])
    assert tree(tmp_path) == FILES


def test_a_tree_is_not_written_over_what_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "plans.py").mkdir()
    refused(lambda: write_tree(tmp_path, FILES), "not-a-file")
    assert tree(tmp_path) == {}


def test_a_tree_is_not_written_below_a_file(tmp_path: Path) -> None:
    (tmp_path / "out").write_bytes(b"mine")
    text = refused(lambda: write_tree(tmp_path / "out", FILES), "not-written")
    assert "Not a directory" in text
    assert tree(tmp_path) == {"out": b"mine"}


def test_a_read_only_file_of_a_tree_is_refused(tmp_path: Path) -> None:
    write_tree(tmp_path, FILES)
    (tmp_path / "MANIFEST.json").chmod(0o444)
    refused(lambda: write_tree(tmp_path, NEW), "read-only")
    assert tree(tmp_path) == FILES
    assert not (tmp_path / "new").exists()


def test_a_link_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    out = tmp_path / "out"
    out.mkdir()
    (out / "tests").symlink_to(outside)
    text = refused(lambda: write_tree(out, FILES), "outside")
    assert str(outside) in text
    assert tree(tmp_path) == {}


@pytest.mark.parametrize("name", ["../x", "/x", "", "a//b", "a\\b"])
def test_names_that_leave_the_folder_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="not a name"):
        write_tree(tmp_path, {name: b""})
    with pytest.raises(ValueError, match="not a name"):
        write_tree(tmp_path, {}, remove=[name])
    with pytest.raises(ValueError, match="not a name"):
        write_tree(tmp_path, {"a": b""}, remove=["a"])
