"""Where FlashInfer's source is found, and what is said where it is not."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from mlagen.codegen.errors import UsageError
from mlagen.codegen.flashinfer import find
from mlagen.codegen.flashinfer.find import FlashInferSource, find_flashinfer
from mlagen.codegen.flashinfer.read import read_plan_api
from tests.flashinfer.miniatures import Files, wrapper_era, write, write_wheel

#: Imported, it would fail the test: it is only ever read.
POISON = "raise SystemExit('flashinfer was imported')\n"


@pytest.fixture
def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(find, "_installed", lambda: None)


def files() -> Files:
    return {**wrapper_era(path="flashinfer/mla/_core.py"), "flashinfer/poison.py": POISON}


def is_read(source: FlashInferSource) -> bool:
    return read_plan_api(source).place.path == "flashinfer/mla/_core.py"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(files(), tmp_path / "here")
    return tmp_path / "here"


@pytest.mark.parametrize("inside", ["", "flashinfer", "flashinfer/"])
def test_folder(folder: Path, inside: str) -> None:
    source = find_flashinfer(f"{folder}/{inside}")
    assert source.label == "flashinfer-python (version unknown)"
    assert source.version is None
    assert source.place == str(folder / "flashinfer")
    assert source.exists("flashinfer/mla/_core.py")
    assert source.read("flashinfer/nothing.py") is None
    assert source.read("other/mla.py") is None
    assert not source.exists("flashinfer")
    assert is_read(source)


def test_package_folder_by_another_name(folder: Path) -> None:
    (folder / "flashinfer").rename(folder / "fi")
    assert is_read(find_flashinfer(str(folder / "fi")))


@pytest.mark.parametrize(
    ("path", "text", "version"),
    [
        ("version.txt", "0.6.17rc1\n", "0.6.17rc1"),
        ("version.txt", "not a version\n", None),
        ("PKG-INFO", "Metadata-Version: 2.4\nName: flashinfer-python\nVersion: 0.2.5\n", "0.2.5"),
        (
            "flashinfer_python-0.6.18.post1.dist-info/METADATA",
            "Name: f\nVersion: 0.6.18.post1\n",
            "0.6.18.post1",
        ),
        ("flashinfer/_build_meta.py", '"""Meta."""\n__version__ = "0.7.2"\n', "0.7.2"),
        ("flashinfer/_build_meta.py", '__version__ = "0.0.0+unknown"\n', None),
        ("flashinfer/_build_meta.py", "__version__ = compute()\n", None),
        ("flashinfer_python-1.dist-info/METADATA", "\xff\n", None),
    ],
)
def test_version_of_a_folder(folder: Path, path: str, text: str, version: str | None) -> None:
    write({path: text}, folder)
    source = find_flashinfer(str(folder))
    assert source.version == version
    assert source.label == (
        f"flashinfer-python {version}" if version else "flashinfer-python (version unknown)"
    )


def test_version_in_the_package_comes_before_one_beside_it(folder: Path) -> None:
    """A dist-info may be left over from an older installation, the package's own is not."""
    stale = {"flashinfer_python-0.6.14.dist-info/METADATA": "Name: f\nVersion: 0.6.14\n"}
    write({**stale, "flashinfer/_build_meta.py": '__version__ = "0.6.17"\n'}, folder)
    assert find_flashinfer(str(folder)).version == "0.6.17"


def test_wheel(tmp_path: Path) -> None:
    wheel = write_wheel(files(), tmp_path, "0.6.17")
    source = find_flashinfer(str(wheel))
    assert (source.label, source.version) == ("flashinfer-python 0.6.17", "0.6.17")
    assert source.place == str(wheel)
    assert is_read(source)


def test_wheel_by_another_name(tmp_path: Path) -> None:
    wheel = write_wheel(files(), tmp_path, "0.6.17").rename(tmp_path / "mine.whl")
    assert find_flashinfer(str(wheel)).version == "0.6.17"


@pytest.mark.parametrize(
    "asked",
    [
        "0.6.17",
        "flashinfer-python==0.6.17",
        "flashinfer_python[cu12] == 0.6.17",
        'flashinfer-python==0.6.17 ; python_version > "3.8"',
        "flashinfer-python==0.6.17;sys_platform=='linux'",
        f"flashinfer-python==0.6.17 --hash=sha256:{'0' * 64}",
        f"flashinfer-python==0.6.17 \\\n    --hash=sha256:{'0' * 64} \\\n    --hash=sha256:1",
        "flashinfer-python==0.6.17 \\",
        "flashinfer-python==0.6.17  # as SGLang pins it; == in both",
        'flashinfer-python==0.6.17 ; python_version > "3.8" --hash=sha256:0 # both',
        "  flashinfer-python==0.6.17\n",
    ],
)
def test_version_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: str) -> None:
    monkeypatch.setenv("MLAGEN_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    wheel = write_wheel(files(), tmp_path / "wheels" / "flashinfer-python" / "0.6.17", "0.6.17")
    source = find_flashinfer(asked)
    assert (source.version, source.place) == ("0.6.17", str(wheel))
    assert is_read(source)


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ("flashinfer-python==0.6.*", "the requirement has to pin one version with '=='"),
        ("flashinfer-python>=0.6,==0.6.17 # both", "the requirement has to pin one version"),
        ("flashinfer python==0.6.17", "not a requirement"),
    ],
)
def test_a_requirement_that_pins_nothing(asked: str, reason: str) -> None:
    text = refusal(asked)
    assert text.startswith(f"{asked}: bad-requirement: {reason}")
    assert text.endswith(
        "\n    hint: write it as flashinfer-python==VERSION, such as flashinfer-python==0.6.17"
    )


def test_a_folder_comes_before_a_version(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    folder.rename(folder.parent / "0.6.17")
    assert find_flashinfer("0.6.17").place == "0.6.17/flashinfer"


def install(folder: Path, version: str = "0.6.17") -> None:
    package = {**files(), "flashinfer/__init__.py": POISON}
    metadata = f"Metadata-Version: 2.1\nName: flashinfer-python\nVersion: {version}\n"
    write({**package, f"flashinfer_python-{version}.dist-info/METADATA": metadata}, folder)


def test_installed_is_found_and_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "flashinfer", raising=False)
    source = find_flashinfer()
    assert (source.label, source.version) == ("flashinfer-python 0.6.17", "0.6.17")
    assert source.place == str(tmp_path / "flashinfer")
    assert is_read(source)
    assert "flashinfer" not in sys.modules


def test_namespace_folder_is_not_an_installation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "flashinfer" / "mla").mkdir(parents=True)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "flashinfer", raising=False)
    with pytest.raises(UsageError, match="no FlashInfer found"):
        find_flashinfer()


@pytest.mark.usefixtures("nothing_installed")
def test_near_the_target(tmp_path: Path) -> None:
    install(tmp_path)
    target = tmp_path / "sglang" / "srt" / "layers" / "attention" / "flashinfer_mla_backend.py"
    assert find_flashinfer(near=target).version == "0.6.17"
    assert find_flashinfer(near=tmp_path).version == "0.6.17"


def test_near_comes_before_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path / "theirs", "0.6.18")
    install(tmp_path / "ours", "0.7.2")
    monkeypatch.syspath_prepend(tmp_path / "ours")
    assert find_flashinfer(near=tmp_path / "theirs" / "sglang").version == "0.6.18"
    assert find_flashinfer(near=tmp_path / "elsewhere" / "sglang").version == "0.7.2"


def refusal(explicit: str | None, near: Path | None = None) -> str:
    with pytest.raises(UsageError) as caught:
        find_flashinfer(explicit, near=near)
    assert caught.value.exit_code == 2
    return str(caught.value)


@pytest.mark.usefixtures("nothing_installed")
def test_nothing_found() -> None:
    assert refusal(None) == (
        "flashinfer: flashinfer-not-found: no FlashInfer found: --flashinfer was not given, and "
        "none is installed beside mlagen\n"
        "    hint: give --flashinfer a folder, a wheel file, or a version to fetch, such as 0.6.17"
    )
    near = Path("a", "sglang", "file.py")
    assert f"none is installed above {near} or beside mlagen\n" in refusal(None, near)


@pytest.mark.parametrize("text", ["no/such/place", "~nobody/flashinfer", "main", "", "9.9.0/"])
def test_no_such_place(text: str) -> None:
    assert refusal(text) == (
        f"{text or '--flashinfer'}: flashinfer-not-found: "
        "no such folder or file, and not a version, nor a requirement that pins one with '=='\n"
        "    hint: give --flashinfer a folder, a wheel file, or a version to fetch, such as 0.6.17"
    )


def test_folder_of_something_else(tmp_path: Path) -> None:
    (tmp_path / "flashinfer").mkdir()
    assert refusal(str(tmp_path)) == (
        f"{tmp_path}: flashinfer-not-found: no FlashInfer here: looked for "
        "flashinfer/mla/__init__.py and flashinfer/mla.py\n"
        "    hint: give the folder flashinfer/, a folder that has it, or a flashinfer-python wheel"
    )


def test_wheel_of_something_else(tmp_path: Path) -> None:
    wheel = write_wheel({"other/__init__.py": ""}, tmp_path)
    assert refusal(str(wheel)).startswith(
        f"{wheel}: flashinfer-not-found: no FlashInfer here: looked for "
    )


def test_file_of_another_kind(tmp_path: Path) -> None:
    (tmp_path / "mla.py").write_text("")
    assert refusal(f"{tmp_path}/mla.py") == (
        f"{tmp_path}/mla.py: flashinfer-not-found: a file, but no wheel\n"
        "    hint: give the folder flashinfer/, a folder that has it, or a .whl file"
    )


def test_broken_wheel(tmp_path: Path) -> None:
    (tmp_path / "a.whl").write_bytes(b"PK\x03\x04 half of it")
    assert refusal(f"{tmp_path}/a.whl") == (
        f"{tmp_path}/a.whl: bad-wheel: not a readable wheel: File is not a zip file\n"
        f"    hint: delete {tmp_path}/a.whl, and download it again"
    )
