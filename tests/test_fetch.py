"""Fetching, with the real pip and a folder of wheels in place of an index: no network."""

from __future__ import annotations

import errno
import multiprocessing
import os
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from mlagen.codegen import fetch as fetching
from mlagen.codegen import pip as running
from mlagen.codegen.errors import UsageError
from mlagen.codegen.fetch import (
    FolderTree,
    Pinned,
    WheelTree,
    cache_dir,
    fetch,
    is_version,
    parse_requirement,
    read_metadata,
)

FILE = "sglang/srt/layers/attention/flashinfer_mla_backend.py"


def make_wheel(folder: Path, name: str = "sglang", version: str = "0.5.17", tag: str = "") -> Path:
    tag = tag or "py3-none-any"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{version}-{tag}.whl"
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(FILE, "x = 1\r\n")
        wheel.writestr(
            f"{info}/METADATA",
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nRequires-Dist: torch\n",
        )
        wheel.writestr(f"{info}/WHEEL", f"Wheel-Version: 1.0\nTag: {tag}\n")
        wheel.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only place where pip finds wheels."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MLAGEN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def no_pip(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Called, it makes every later use of pip fail the test."""

    def run(*args: object, **kwargs: object) -> object:
        raise AssertionError("pip was called")

    return lambda: monkeypatch.setattr(running.subprocess, "run", run)


def refusal(requirement: str) -> str:
    with pytest.raises(UsageError) as caught:
        fetch(requirement)
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_fetched_once_then_cached(
    index: Path,
    cache: Path,
    no_pip: Callable[[], None],
    capfd: pytest.CaptureFixture[str],
) -> None:
    make_wheel(index)
    path = fetch("sglang==0.5.17")
    assert path == cache / "wheels" / "sglang" / "0.5.17" / "sglang-0.5.17-py3-none-any.whl"
    assert WheelTree(path).read(FILE) == b"x = 1\r\n"
    out, err = capfd.readouterr()
    assert (out, err) == ("", "mlagen: fetching sglang==0.5.17 with pip\n")
    no_pip()
    assert fetch("sglang==0.5.17") == path
    assert capfd.readouterr() == ("", "")
    left = {entry.name for entry in path.parent.iterdir()} - {".lock"}
    assert left == {path.name}


@pytest.mark.parametrize("spelling", ["SGLang==0.5.17", "sglang == 0.5.17", "sglang[all]==0.5.17"])
def test_one_release_under_several_spellings(
    cache: Path, no_pip: Callable[[], None], spelling: str
) -> None:
    wheel = make_wheel(cache / "wheels" / "sglang" / "0.5.17")
    no_pip()
    assert fetch(spelling) == wheel


@pytest.mark.parametrize("python", ["cp310", "cp312"])
def test_wheel_for_another_python(
    index: Path, cache: Path, capfd: pytest.CaptureFixture[str], python: str
) -> None:
    if python == f"cp{sys.version_info[0]}{sys.version_info[1]}":
        pytest.skip("this is the running Python")
    make_wheel(index, tag=f"{python}-{python}-manylinux_2_34_x86_64")
    path = fetch("sglang==0.5.17")
    assert path.name == f"sglang-0.5.17-{python}-{python}-manylinux_2_34_x86_64.whl"
    err = capfd.readouterr().err.splitlines()
    assert err[0] == "mlagen: fetching sglang==0.5.17 with pip"
    assert err[-1] == f"mlagen: fetching sglang==0.5.17 with pip (for Python 3.{python[3:]})"


def test_no_such_release(index: Path, cache: Path) -> None:
    make_wheel(index, version="0.5.18")
    assert refusal("sglang==0.5.17") == (
        "sglang==0.5.17: fetch-failed: pip could not download sglang==0.5.17: "
        "No matching distribution found for sglang==0.5.17\n"
        "    hint: the index that pip uses has no wheel of that version; "
        "give another version, or a folder or a wheel file"
    )
    assert not list(cache.rglob("*.whl"))
    assert not list(cache.rglob(".partial"))


@pytest.mark.parametrize("retries", ["0", "1"])
def test_an_index_that_cannot_be_reached(
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    retries: str,
) -> None:
    """pip says "No matching distribution found" then too. One round, and no credentials."""
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", "http://me:secret@127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", retries)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_NO_INDEX"):
        monkeypatch.delenv(name, raising=False)
    message = refusal("sglang==0.5.17")
    assert message.startswith(
        "sglang==0.5.17: fetch-failed: pip could not download sglang==0.5.17: "
        "the index could not be reached: 127.0.0.1:9: "
    )
    assert "Connection refused" in message
    assert "hint: mend the network, or what pip is set to (PIP_INDEX_URL, a proxy)" in message
    assert "secret" not in message
    assert " object at 0x" not in message
    assert capfd.readouterr().err.count("fetching") == 1
    assert not list(cache.rglob(".partial"))


LOGGED = "2026-01-01T10:00:00,000 "
PAGE = "Could not fetch URL https://u:****@host.example/simple/sglang/: "
OBJECT = "<pip._vendor.urllib3.connection.HTTPSConnection object at 0x7f45a6407f50>"
POOL = "HTTPSConnectionPool(host='host.example', port=443): Max retries exceeded with url: /x/ "


@pytest.mark.parametrize(
    ("output", "log", "why"),
    [
        ("", "", None),
        ("", f"{LOGGED}{PAGE}404 Client Error: Not Found for url: https://u:p@h/ - skipping", None),
        ("", f"{LOGGED}{PAGE}timed out - skipping\n{LOGGED}Fetched page https://b/ as html", None),
        ("", f"{LOGGED}{PAGE}timed out - skipping\n", "host.example: timed out"),
        (
            "",
            f"{LOGGED}{PAGE}401 Client Error: Unauthorized for url: https://u:p@h/x/ - skipping",
            "host.example: 401 Client Error: Unauthorized",
        ),
        (
            "",
            f"{LOGGED}{PAGE}connection error: {POOL}(Caused by NewConnectionError('{OBJECT}: "
            "[Errno -2] Name or service not known')) - skipping",
            "host.example: NewConnectionError('[Errno -2] Name or service not known')",
        ),
        (
            "WARNING: Retrying (Retry(total=0, connect=None)) after connection broken by "
            f"'ConnectTimeoutError({OBJECT}, 'Connection to h timed out.')': /simple/sglang/\n",
            "",
            "ConnectTimeoutError('Connection to h timed out.')",
        ),
        (
            "WARNING: Retrying (Retry(total=4)) after connection broken by 'X()': /simple/\n",
            f"{LOGGED}WARNING: Retrying\n{LOGGED}Fetched page https://host.example/ as html",
            None,
        ),
    ],
)
def test_why_no_index_answered(output: str, log: str, why: str | None) -> None:
    assert running.why_unreachable(output, log) == why


def test_credentials_are_not_shown(
    cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'ERROR: no https://me:secret@host.example/x.whl'\nexit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr(fetching.sys, "executable", str(python))
    assert ": no https://host.example/x.whl\n" in refusal("sglang==0.5.17")


def test_source_archives_are_not_built(index: Path, cache: Path) -> None:
    (index / "sglang-0.5.17.tar.gz").write_bytes(b"")
    assert "No matching distribution found" in refusal("sglang==0.5.17")


def test_pip_that_fails_otherwise_is_asked_once(
    cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    python = tmp_path / "python"
    python.write_text(
        "#!/bin/sh\necho 'ERROR: the network is down'\necho '[notice] a new pip'\nexit 1\n"
    )
    python.chmod(0o755)
    monkeypatch.setattr(fetching.sys, "executable", str(python))
    assert refusal("sglang==0.5.17") == (
        "sglang==0.5.17: fetch-failed: pip could not download sglang==0.5.17: "
        "the network is down\n"
        "    hint: fetching needs pip and a network; a folder or a wheel file needs neither"
    )
    assert capfd.readouterr().err.count("fetching") == 1


def test_no_pip_at_all(cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$0: No module named pip"\nexit 1\n')
    python.chmod(0o755)
    monkeypatch.setattr(fetching.sys, "executable", str(python))
    assert refusal("sglang==0.5.17") == (
        "sglang==0.5.17: fetch-failed: pip could not download sglang==0.5.17: "
        f"{python}: No module named pip\n"
        "    hint: install pip beside mlagen (python -m ensurepip), "
        "or give a folder or a wheel file"
    )


def test_killed_download_is_not_taken_for_a_wheel(index: Path, cache: Path) -> None:
    whole = make_wheel(index).read_bytes()
    folder = cache / "wheels" / "sglang" / "0.5.17"
    partial = folder / ".partial"
    partial.mkdir(parents=True)
    (partial / "sglang-0.5.17-py3-none-any.whl").write_bytes(whole[: len(whole) // 2])
    (partial / "other.whl").write_bytes(whole)
    path = fetch("sglang==0.5.17")
    assert path.read_bytes() == whole
    assert not partial.exists()


def test_half_a_wheel_in_the_cache_is_fetched_again(index: Path, cache: Path) -> None:
    whole = make_wheel(index).read_bytes()
    folder = cache / "wheels" / "sglang" / "0.5.17"
    folder.mkdir(parents=True)
    half = folder / "sglang-0.5.17-py3-none-any.whl"
    half.write_bytes(whole[: len(whole) // 2])
    assert fetch("sglang==0.5.17") == half
    assert half.read_bytes() == whole


def _fetch_in_a_process(cache: str) -> tuple[str, int]:
    said: list[str] = []
    path = fetch("sglang==0.5.17", cache=Path(cache), say=said.append)
    return str(path), sum(line.startswith("fetching") for line in said)


def test_two_at_once_download_once(index: Path, cache: Path) -> None:
    make_wheel(index)
    with multiprocessing.get_context("fork").Pool(2) as pool:
        results = pool.map(_fetch_in_a_process, [str(cache)] * 2, chunksize=1)
    assert len({path for path, _ in results}) == 1
    assert sum(downloads for _, downloads in results) == 1


def test_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MLAGEN_CACHE", str(tmp_path / "file"))
    assert refusal("sglang==0.5.17") == (
        f"{tmp_path}/file/wheels/sglang/0.5.17: cache-not-writable: cannot write the cache of "
        "fetched wheels: Not a directory\n"
        "    hint: set MLAGEN_CACHE to a folder that can be written"
    )


@pytest.mark.parametrize(
    ("text", "pinned"),
    [
        ("sglang==0.5.17", Pinned("sglang", "0.5.17")),
        (" sglang[all] == 0.4.6.POST5 ", Pinned("sglang", "0.4.6.post5")),
        ("flashinfer-python==0.2.9rc2", Pinned("flashinfer-python", "0.2.9rc2")),
        ("flashinfer-python==0.6.17+cu130", Pinned("flashinfer-python", "0.6.17+cu130")),
    ],
)
def test_requirement(text: str, pinned: Pinned) -> None:
    assert parse_requirement(text) == pinned
    assert str(pinned) == f"{pinned.name}=={pinned.version}"


@pytest.mark.parametrize(
    "text",
    [
        "sglang",
        "sglang>=0.5.17",
        "sglang==0.5.*",
        "sglang===0.5.17",
        "sglang==0.5.17,>0.5",
        "sglang==0.5.17; python_version > '3.9'",
        "sglang @ https://example.org/sglang-0.5.17-py3-none-any.whl",
    ],
)
def test_requirement_that_pins_nothing(text: str) -> None:
    assert refusal(text) == (
        f"{text}: bad-requirement: the requirement has to pin one version with '==', "
        f"found {text!r}\n"
        "    hint: write sglang==VERSION, such as sglang==0.5.17"
    )


@pytest.mark.parametrize("text", ["", "==0.5.17", "--index-url=x", "../sglang==1", "a b==1"])
def test_no_requirement(text: str) -> None:
    message = refusal(text)
    assert message.startswith(f"{text}: bad-requirement: not a requirement: ")
    assert message.endswith("hint: write it as NAME==VERSION, such as sglang==0.5.17")


@pytest.mark.parametrize(
    ("text", "expected"),
    [("0.6.17", True), ("0.6.18.post1", True), ("0.7.0rc3", True), ("main", False), ("", False)],
)
def test_is_version(text: str, expected: bool) -> None:
    assert is_version(text) == expected


def test_cache_dir(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(fetching.sys, "platform", "linux")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("MLAGEN_CACHE", "~/mine")
    assert cache_dir() == tmp_path / "mine"
    monkeypatch.setenv("MLAGEN_CACHE", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir() == tmp_path / "xdg" / "mlagen"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_dir() == tmp_path / ".cache" / "mlagen"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_dir() == tmp_path / ".cache" / "mlagen"
    monkeypatch.setattr(fetching.sys, "platform", "darwin")
    assert cache_dir() == tmp_path / "Library" / "Caches" / "mlagen"
    monkeypatch.setattr(fetching.sys, "platform", "win32")
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "local"))
    assert cache_dir() == tmp_path / "local" / "mlagen" / "cache"


def test_no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError

    monkeypatch.delenv("MLAGEN_CACHE", raising=False)
    monkeypatch.setattr(fetching.Path, "home", no_home)
    with pytest.raises(UsageError, match="no home folder to keep fetched wheels in"):
        cache_dir()


def test_wheel_tree(tmp_path: Path) -> None:
    tree = WheelTree(make_wheel(tmp_path))
    assert tree.exists(FILE)
    assert not tree.exists("sglang")
    assert tree.read("sglang/nothing.py") is None
    assert tree.names()[0] == FILE
    assert tree.distribution() == ("sglang", "0.5.17")


def test_damaged_wheel(tmp_path: Path) -> None:
    path = make_wheel(tmp_path)
    path.write_bytes(path.read_bytes().replace(b"x = 1\r\n", b"y = 1\r\n"))
    with pytest.raises(UsageError) as caught:
        WheelTree(path).read(FILE)
    assert str(caught.value) == (
        f"{path}:{FILE}: bad-wheel: the wheel is damaged: Bad CRC-32 for file '{FILE}'\n"
        f"    hint: delete {path}, and download it again"
    )


@pytest.mark.parametrize("folder", ["wheels/sglang/0.5.17", "thinned-1/sglang/0.5.17"])
def test_damaged_wheel_in_the_cache(cache: Path, no_pip: Callable[[], None], folder: str) -> None:
    """It is a zip, so that it is taken; only who deletes it gets another."""
    path = make_wheel(cache / folder)
    path.write_bytes(path.read_bytes().replace(b"x = 1\r\n", b"y = 1\r\n"))
    no_pip()
    if folder.startswith("wheels"):
        assert fetch("sglang==0.5.17") == path
    with pytest.raises(UsageError) as caught:
        WheelTree(path).read(FILE)
    assert str(caught.value).endswith(
        f"\n    hint: delete {path}, and run again: mlagen fetches it anew"
    )


def test_wheel_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is wrong with it: no word of deleting it."""

    def refuse(*_: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(fetching.zipfile, "ZipFile", refuse)
    with pytest.raises(UsageError) as caught:
        WheelTree(tmp_path / "a.whl")
    assert str(caught.value) == (
        f"{tmp_path}/a.whl: unreadable: cannot be read: Permission denied\n"
        "    hint: run as a user who may read it"
    )


def test_wheel_with_a_broken_stream(tmp_path: Path) -> None:
    path = tmp_path / "a.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr("a.py", "x = 1\n" * 1000)
    data = bytearray(path.read_bytes())
    data[34:44] = b"\xff" * 10  # the first bytes of the packed file
    path.write_bytes(data)
    with pytest.raises(UsageError, match=r"a\.py: bad-wheel: the wheel is damaged: "):
        WheelTree(path).read("a.py")


def test_wheel_without_metadata(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.whl", "w") as wheel:
        wheel.writestr("a/b.dist-info/METADATA", "Name: a\nVersion: 1\n")
    assert WheelTree(tmp_path / "a.whl").distribution() is None


def test_folder_tree(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_bytes(b"x\r\n")
    tree = FolderTree(tmp_path, "sglang")
    assert tree.read("sglang/a.py") == b"x\r\n"
    assert tree.exists("sglang/a.py")
    assert tree.read("other/a.py") is None
    assert tree.read("sglang") is None
    assert not tree.exists("sglang/b.py")


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"Name: a\nVersion: 1.0 \n\nName: b\n", ("a", "1.0")),
        (b"Name: a\n", None),
        (b"", None),
        (b"\xff\xfe", None),
    ],
)
def test_metadata(data: bytes, expected: tuple[str, str] | None) -> None:
    assert read_metadata(data) == expected
