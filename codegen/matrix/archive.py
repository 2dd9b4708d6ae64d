"""The files of a source archive, through pip, without running anything that is in it.

FlashInfer 0.2.1 to 0.4.1 have no wheels, and pip asks a source archive's build for its metadata,
which wants torch and runs code of the archive. So pip is told to build apart from this environment,
with build requirements that cannot be met: it downloads, unpacks, and gives up before the build
begins. `--no-clean` leaves what it unpacked.
"""

from __future__ import annotations

import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path

from ..errors import UsageError, usage
from ..flashinfer.find import PACKAGE
from ..pip import run_pip

#: No release of setuptools is this one, and every build of FlashInfer's requires setuptools.
_CANNOT_BE_MET = "setuptools==0.0.0.dev0\n"
_TEXTS = (".py", ".cuh")
_INFORMATION = "PKG-INFO"


def source_files(
    name: str, version: str, work: Path, say: Callable[[str], None]
) -> Mapping[str, bytes]:
    """The text files of FlashInfer in the source archive of a release, by the path that they have
    when it is installed (`include/` goes to `flashinfer/data/include/`), and its metadata as a
    wheel has it.

    Args:
        work: an empty folder to work in; the caller removes it.

    Raises UsageError where pip cannot fetch the archive or it has no such package.
    """
    say(f"fetching the source archive of {name}=={version} with pip")
    output = _run_pip(f"{name}=={version}", work)
    root = _unpacked(work)
    if root is None:
        raise _no_archive(f"{name}=={version}", output)
    files = {
        prefix + path.relative_to(root).as_posix(): path.read_bytes()
        for folder, prefix in ((PACKAGE, ""), ("include", f"{PACKAGE}/data/"))
        for path in sorted((root / folder).rglob("*"))
        if path.suffix in _TEXTS and path.is_file() and not path.is_symlink()
    }
    metadata = f"{name.replace('-', '_')}-{version}.dist-info/METADATA"
    files[metadata] = (root / _INFORMATION).read_bytes()
    return files


def _run_pip(requirement: str, work: Path) -> str:
    constraint, temporary = work / "constraint.txt", work / "pip"
    constraint.write_text(_CANNOT_BE_MET, encoding="utf-8")
    temporary.mkdir()
    options = ["--no-deps", "--no-binary=:all:", "--use-pep517", "--no-clean", "--no-input"]
    run = run_pip(
        *("download", *options, "--dest", "dest", requirement),
        folder=work,
        TMPDIR=str(temporary),
        TEMP=str(temporary),
        # pip from 25.3 on takes the second for builds, those before the first for all.
        PIP_CONSTRAINT=str(constraint),
        PIP_BUILD_CONSTRAINT=str(constraint),
    )
    return run.output


def _unpacked(work: Path) -> Path | None:
    """The folder of the archive that has the package: as pip left it, or, where pip was content
    with the archive's own metadata, unpacked here."""
    for archive in sorted((work / "dest").glob("*.tar.gz")):
        _unpack(archive, work / "unpacked")
    for place in sorted(work.glob(f"**/{PACKAGE}/__init__.py")):
        root = place.parent.parent
        if (root / _INFORMATION).is_file():
            return root
    return None


def _unpack(archive: Path, into: Path) -> None:
    """The regular files of an archive, by names that stay below `into`."""
    with tarfile.open(archive) as opened:
        for member in opened:
            place = (into / member.name).resolve()
            if not member.isfile() or into.resolve() not in place.parents:
                continue
            if place.suffix not in _TEXTS and place.name != _INFORMATION:
                continue
            data = opened.extractfile(member)
            if data is not None:
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_bytes(data.read())


def _no_archive(requirement: str, output: str) -> UsageError:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR: ")]
    last = (errors or lines or ["it wrote nothing"])[-1].removeprefix("ERROR: ")
    return usage(
        f"pip could not download the source archive of {requirement}: {last}",
        path=requirement,
        code="fetch-failed",
        hint="the index that pip uses has neither a wheel nor a source archive of that version",
    )
