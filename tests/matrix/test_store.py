"""Fetching, with the real pip and a folder of archives in place of a registry: no network, and
nothing that is in an archive is run."""

from __future__ import annotations

import io
import os
import tarfile
import zipfile
from pathlib import Path

import pytest

from mlagen.codegen import fetch
from mlagen.codegen import pip as running
from mlagen.codegen.errors import UsageError
from mlagen.codegen.fetch import WheelTree, is_gone
from mlagen.codegen.matrix import archive, gather, releases, store
from mlagen.codegen.matrix.releases import FLASHINFER, SGLANG
from tests.flashinfer import miniatures
from tests.matrix.miniature import (
    OBJECT,
    WRAPPER,
    flashinfer_files,
    in_cache,
    metadata,
    sglang_files,
)

TORCH_OP = miniatures.wrapper_era(
    "        self._plan_info = " + miniatures.call(form="self._cached_module.plan.default")
)
#: A build that tells when it is run, as FlashInfer's own, which lies in its archive.
BUILD = """\
from pathlib import Path
Path({marker!r}).write_text("ran")
raise RuntimeError("no build here")
"""
PYPROJECT = """\
[build-system]
requires = ["setuptools>=1"]
build-backend = "custom_build"
backend-path = ["."]
"""


def pack(place: Path, files: dict[str, bytes], folder: str) -> None:
    with tarfile.open(place, "w:gz") as opened:
        for path, data in files.items():
            member = tarfile.TarInfo(f"{folder}/{path}")
            member.size = len(data)
            opened.addfile(member, io.BytesIO(data))


def wheel(folder: Path, name: str, version: str, files: dict[str, bytes]) -> None:
    store.write_archive(folder / f"{name}-{version}-py3-none-any.whl", files)


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """SGLang 0.4.3, 0.5.0, 0.5.1 and a candidate; FlashInfer 0.5.0 as a wheel, 0.4.0 as a source
    archive; a setuptools, so that nothing but mlagen keeps a build from beginning."""
    folder = tmp_path / "registry"
    folder.mkdir()
    for version, pin in (("0.4.3", "0.4.0"), ("0.5.0", "0.4.0"), ("0.5.1", "0.5.0")):
        wheel(folder, "sglang", version, sglang_files(version, pin))
    wheel(folder, "sglang", "0.6.0rc1", sglang_files("0.6.0rc1", "0.5.0"))
    wheel(folder, "flashinfer_python", "0.5.0", flashinfer_files("0.5.0", WRAPPER))
    source = {path: text.encode() for path, text in TORCH_OP.items()} | {
        "PKG-INFO": metadata(FLASHINFER, "0.4.0"),
        "pyproject.toml": PYPROJECT.encode(),
        "custom_build.py": BUILD.format(marker=str(tmp_path / "ran")).encode(),
        "setup.py": BUILD.format(marker=str(tmp_path / "ran")).encode(),
        "include/flashinfer/attention/scheduler.cuh": b"// the planner\n",
        "include/flashinfer/other.cuh": b"// not read\n",
    }
    pack(folder / "flashinfer_python-0.4.0.tar.gz", source, "flashinfer_python-0.4.0")
    wheel(
        folder,
        "setuptools",
        "99.0",
        {
            "setuptools/__init__.py": b"",
            "setuptools-99.0.dist-info/METADATA": metadata("setuptools", "99.0"),
            "setuptools-99.0.dist-info/WHEEL": b"Wheel-Version: 1.0\nTag: py3-none-any\n",
            "setuptools-99.0.dist-info/RECORD": b"",
        },
    )
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("MLAGEN_CACHE", str(tmp_path / "cache"))
    return folder


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MLAGEN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_all_that_a_refresh_fetches(
    registry: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert releases.sglang_versions() == ("0.5.0", "0.5.1")
    # No release has a wheel for another Python here: ask once.
    monkeypatch.setattr(fetch, "_tag_choices", lambda: [[]])
    said: list[str] = []

    sglang = store.obtain(SGLANG, "0.5.1", said.append)
    assert said == ["fetching sglang==0.5.1 with pip"]
    names = WheelTree(sglang.place).names()
    assert len(names) == 2
    assert "sglang/large.py" not in names

    source = store.obtain(FLASHINFER, "0.4.0", said.append)
    assert (source.kind, said[-1]) == (
        "source",
        "fetching the source archive of flashinfer-python==0.4.0 with pip",
    )
    assert not (tmp_path / "ran").exists(), "code of the archive was run"
    kept = WheelTree(source.place)
    assert kept.distribution() == (FLASHINFER, "0.4.0")
    assert [name for name in kept.names() if name.endswith(".cuh")] == [
        "flashinfer/data/include/flashinfer/attention/scheduler.cuh"
    ]
    assert gather.read_release(source.place)["era"] == "torch-op"

    # From now on without pip, and nothing but the thinned files lies in the cache.
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    assert store.obtain(FLASHINFER, "0.4.0", said.append) == source
    assert store.held(SGLANG, "0.5.1") == sglang
    files = [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert sorted(files) == sorted([sglang.place, source.place])


def test_neither_wheel_nor_archive(
    registry: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "fetch", fetch_finds_nothing)
    with pytest.raises(UsageError) as caught:
        store.obtain(FLASHINFER, "0.3.9", lambda line: None)
    assert is_gone(caught.value)
    (problem,) = caught.value.problems
    assert problem.message.startswith(
        "pip could not download the source archive of flashinfer-python==0.3.9: No matching"
    )
    assert store.held(FLASHINFER, "0.3.9") is None
    assert not list(cache.rglob(".partial-*"))


def fetch_finds_nothing(requirement: str, **kwargs: object) -> Path:
    raise archive._no_archive(requirement, "ERROR: No matching distribution found")


def test_a_network_that_is_down_is_not_a_release_that_is_gone(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def down(requirement: str, **kwargs: object) -> Path:
        raise archive._no_archive(requirement, "ERROR: Could not reach it")

    monkeypatch.setattr(store, "fetch", down)
    for name in (SGLANG, FLASHINFER):
        with pytest.raises(UsageError, match="Could not reach it") as caught:
            store.obtain(name, "0.5.1", lambda line: None)
        assert not is_gone(caught.value)


def test_the_first_failure_is_the_last_fetch(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def down(name: str, version: str, say: object) -> store.Held:
        asked.append(version)
        raise archive._no_archive(version, "ERROR: Could not reach it")

    monkeypatch.setattr(gather, "obtain", down)
    with pytest.raises(UsageError, match="Could not reach it"):
        gather._files(SGLANG, [], [f"0.5.{n}" for n in range(50)], lambda line: None)
    assert len(asked) < 10


def test_a_whole_wheel_in_the_cache_is_taken(cache: Path) -> None:
    place = in_cache(cache, FLASHINFER, "0.7.0", flashinfer_files("0.7.0", OBJECT))
    assert store.held(FLASHINFER, "0.7.0") == store.Held(place, "wheel")
    assert store.held(FLASHINFER, "0.7.1") is None


def test_half_a_zip_in_the_cache_is_not_taken(cache: Path) -> None:
    place = store._folder(SGLANG, "0.5.1", None) / "wheel.whl"
    place.parent.mkdir(parents=True)
    place.write_bytes(b"PK\x03\x04 half")
    assert store.held(SGLANG, "0.5.1") is None


def test_the_same_files_give_the_same_bytes(tmp_path: Path) -> None:
    files = flashinfer_files("0.5.0", WRAPPER)
    store.write_archive(tmp_path / "a", files)
    store.write_archive(tmp_path / "b", dict(reversed(list(files.items()))))
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert zipfile.ZipFile(tmp_path / "a").testzip() is None


def test_an_archive_that_reaches_out_of_its_folder(tmp_path: Path) -> None:
    into = tmp_path / "into"
    with tarfile.open(tmp_path / "evil.tar.gz", "w:gz") as opened:
        for name in ("../outside.py", "/tmp/mlagen-outside.py", "ok/flashinfer/__init__.py"):
            member = tarfile.TarInfo(name)
            member.size = 1
            opened.addfile(member, io.BytesIO(b"\n"))
        link = tarfile.TarInfo("ok/flashinfer/link.py")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        opened.addfile(link)
    archive._unpack(tmp_path / "evil.tar.gz", into)
    assert [p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*.py")] == [
        "into/ok/flashinfer/__init__.py"
    ]
    assert not Path("/tmp/mlagen-outside.py").exists()


def test_no_pip_to_ask(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(
        '#!/bin/sh\necho "WARNING: old" >&2\necho "$0: No module named pip" >&2\nexit 1\n'
    )
    python.chmod(0o755)
    monkeypatch.setattr(running.sys, "executable", str(python))
    with pytest.raises(UsageError) as caught:
        releases.available(SGLANG)
    (problem,) = caught.value.problems
    assert problem.message == (
        f"pip could not list the releases of sglang: {python}: No module named pip"
    )
