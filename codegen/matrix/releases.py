"""Which releases there are: asked of pip, which knows the registry that the user has set."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from packaging.version import InvalidVersion, Version

from ..errors import UsageError, usage
from ..flashinfer.find import DISTRIBUTION
from ..pip import PipRun, run_pip

SGLANG = "sglang"
FLASHINFER = DISTRIBUTION

#: The first SGLang with the file, and the first FlashInfer with an MLA wrapper.
FIRST_SGLANG = "0.4.3.post4"
FIRST_FLASHINFER = "0.2.1"

_LINE = re.compile(r"^Available versions:\s*(.*)$", re.MULTILINE)


def by_version(versions: Iterable[str]) -> tuple[str, ...]:
    """Versions in the order of releases, oldest first, each once."""
    return tuple(sorted(set(versions), key=Version))


def sglang_versions() -> tuple[str, ...]:
    """Every SGLang from the first one with the file on. Raises UsageError where pip fails."""
    return _from(FIRST_SGLANG, available(SGLANG))


def flashinfer_versions() -> tuple[str, ...]:
    """Every FlashInfer with an MLA wrapper, wheel or not. Raises UsageError where pip fails."""
    return _from(FIRST_FLASHINFER, available(FLASHINFER))


def available(name: str) -> tuple[str, ...]:
    """The final releases of a distribution that pip finds for this Python, oldest first.

    Raises UsageError where pip cannot be run or finds none.
    """
    run = run_pip("index", "versions", "--no-input", name, folder=Path(__file__).resolve().parent)
    found = _LINE.search(run.output)
    if run.status != 0 or found is None:
        raise _cannot_list(name, run)
    return by_version(word for word in re.split(r"[,\s]+", found[1]) if _is_final(word))


def _from(first: str, versions: Iterable[str]) -> tuple[str, ...]:
    return tuple(version for version in versions if Version(version) >= Version(first))


def _is_final(word: str) -> bool:
    try:
        return not Version(word).is_prerelease
    except InvalidVersion:
        return False


def _cannot_list(name: str, run: PipRun) -> UsageError:
    return usage(
        f"pip could not list the releases of {name}: {run.why('it wrote nothing')}",
        path=name,
        code="fetch-failed",
        hint="--refresh needs pip and a network; without it the facts at hand are taken",
    )
