"""Find the file to patch: a path in any of its shapes, a wheel, or a release to fetch."""

from __future__ import annotations

import importlib.util
import os
import re
from dataclasses import dataclass
from pathlib import Path

from packaging.utils import canonicalize_name

from ..errors import usage
from ..fetch import WheelTree, fetch, is_there, parse_requirement, require_searchable
from ..publish import TargetFile, read_target

#: The file's place below the folder of the package `sglang`.
BACKEND_FILE = "srt/layers/attention/flashinfer_mla_backend.py"
_BELOW = (
    BACKEND_FILE,
    f"sglang/{BACKEND_FILE}",
    f"python/sglang/{BACKEND_FILE}",
    BACKEND_FILE.removeprefix("srt/"),
    "flashinfer_mla_backend.py",
)
_REQUIREMENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\s*(\[[^\]]*\])?\s*[<>=~!]=?")
_PIN = re.compile(r"^flashinfer[-_]python(?:\[[^\]]*\])?\s*==\s*([0-9][^;\s,]*)", re.I | re.M)


@dataclass(frozen=True)
class FoundTarget:
    """The file to patch.

    Attributes:
        data: its bytes.
        label: what messages and diffs call it, with `/`; for a file of a checkout its path
            from the checkout's root, which is where `git apply` runs.
        file: the file on disk; None for a release in a wheel, which nothing writes to.
        pinned_flashinfer: the FlashInfer that such a release requires, where it says so.
        wheel: the wheel that it was read from, given or fetched; None for a file on disk.
    """

    data: bytes
    label: str
    file: TargetFile | None
    pinned_flashinfer: str | None = None
    wheel: WheelTree | None = None


def find_target(text: str) -> FoundTarget:
    """The file that PATH means: the file itself, a checkout, an installed `sglang` (its folder,
    the site-packages around it, or just the word `sglang`), a wheel, or a requirement such as
    `sglang==0.5.17`.

    Raises UsageError where it means none of these, or cannot be read.
    """
    path = Path(os.path.expanduser(text))
    if text and is_there(path):
        if path.suffix == ".whl" and not path.is_dir():
            return in_wheel(WheelTree(path), text)
        return _on_disk(path)
    if _REQUIREMENT.match(text):
        return _fetched(text)
    if text == "sglang":
        spec = importlib.util.find_spec("sglang")
        places = list(spec.submodule_search_locations or ()) if spec is not None else []
        for place in places:
            if (Path(place) / BACKEND_FILE).is_file():
                return _on_disk(Path(place))
        raise usage(
            "no sglang is installed beside mlagen",
            path=text,
            code="sglang-not-found",
            hint="give the folder of the environment's sglang, or a release such as sglang==0.5.17",
        )
    raise usage(
        "no such file or folder, and not a requirement" if text else "an empty PATH",
        path=text[:200] or "PATH",
        code="sglang-not-found",
        hint="give flashinfer_mla_backend.py, a checkout, an installed sglang, a wheel of it, or a "
        "release such as sglang==0.5.17",
    )


def _on_disk(path: Path) -> FoundTarget:
    if path.is_dir():
        require_searchable(path)
        in_environment = sorted(path.glob(f"lib/python3*/site-packages/sglang/{BACKEND_FILE}"))
        for place in (*(path / below for below in _BELOW), *in_environment):
            if place.is_file():
                path = place
                break
        else:
            raise usage(
                f"no flashinfer_mla_backend.py here: looked for {', '.join(_BELOW)}",
                path=str(path),
                code="sglang-not-found",
                hint="give a checkout of SGLang, its environment or site-packages, or the file",
            )
    file = read_target(path)
    return FoundTarget(file.data, _label(file.resolved), file)


def _label(path: Path) -> str:
    """The path from the checkout's root, else from `sglang/` on, else the file's name."""
    whole = Path(os.path.abspath(path))
    for folder in whole.parents:
        if (folder / ".git").exists():
            return whole.relative_to(folder).as_posix()
    parts = whole.parts
    if "sglang" in parts:
        last = len(parts) - 1 - parts[::-1].index("sglang")
        return "/".join(parts[last:])
    return whole.name


def _fetched(requirement: str) -> FoundTarget:
    name = parse_requirement(requirement).name
    if canonicalize_name(name) != "sglang":
        raise usage(
            f"only releases of sglang are fetched to be patched, not {name}",
            path=requirement,
            code="bad-requirement",
            hint="a FlashInfer goes behind --flashinfer",
        )
    return in_wheel(WheelTree(fetch(requirement)), requirement)


def in_wheel(wheel: WheelTree, name: str) -> FoundTarget:
    """The file in a wheel of sglang. UsageError about `name`, what was asked for, where it is not
    there."""
    data = wheel.read(f"sglang/{BACKEND_FILE}")
    if data is None:
        raise usage(
            f"the wheel has no sglang/{BACKEND_FILE}",
            path=name,
            code="sglang-not-found",
            hint="give a wheel of sglang: releases from 0.4.3.post4 on have it",
        )
    return FoundTarget(data, f"sglang/{BACKEND_FILE}", None, _pin(wheel), wheel)


def _pin(wheel: WheelTree) -> str | None:
    """The FlashInfer that the release's metadata pins, None where it pins none."""
    for name in wheel.names():
        if name.endswith(".dist-info/METADATA"):
            text = (wheel.read(name) or b"").decode("utf-8", "replace")
            found = _PIN.search(re.sub(r"^Requires-Dist:\s*", "", text, flags=re.M))
            return found[1] if found else None
    return None
