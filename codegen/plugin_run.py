"""`mlagen plugin`: write the package, or tell whether it is current; and find it installed."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

from .errors import usage
from .fetch import WheelTree, fetch
from .flashinfer.api import PlanApi
from .inputs import inputs_of
from .patch import prepare, site_states
from .plugin import (
    DISTRIBUTION,
    MADE_FOR_FILE,
    PACKAGE,
    REGISTRY_FILE,
    made_for,
    plugin_files,
    read_with_files,
    require_registry,
)
from .prove import before_publishing
from .publish import write_tree
from .report import Facts, RanTest, Report
from .sglang.find import BACKEND_FILE, FoundTarget, find_target


def plugin(
    path: str,
    out: Path,
    check: bool,
    spec_path: Path | None,
    flashinfer: str | None,
    only: tuple[str, ...],
    test: bool | None = None,
    python: str | None = None,
    allow_unknown: bool = False,
) -> Report:
    """Write a package that makes the changes of `patch` when SGLang loads the file.

    PATH is only read. Where a GPU is, the patched file passes the generated tests first, as for
    `patch`; `check` only tells whether `out` is current.
    """
    if not str(out).strip():
        raise usage("an empty folder name", path="--out")
    if check and test:
        raise usage("--check writes nothing, --test is for what is written", path="--test")
    found = find_target(path)
    require_registry(found, _registry(path, found))
    inputs = inputs_of(found, spec_path, flashinfer, only, allow_unknown=allow_unknown)
    with inputs.choice.named():
        made = prepare(found, inputs.spec, inputs.api)
    if made.patched == made.original:
        raise made.no_place()
    _require_own(out)
    read = read_with_files(inputs.source, allow_unknown=allow_unknown)
    facts = made_for(made, read[1])
    files = plugin_files(facts, made.patched)
    shown: Facts = (*inputs.facts, ("package", f"{DISTRIBUTION} {facts.version}"))
    notes: tuple[str, ...] = ()
    tests: tuple[RanTest, ...] = ()
    exit_code = 0
    if check:
        stale = [name for name, data in files.items() if not _has(out / name, data)]
        exit_code = 1 if stale else 0
        notes = tuple(f"{out / name} is not current: run `mlagen plugin`" for name in stale)
        notes = notes or ("all files are current",)
    else:
        remark = before_publishing(made, test, python, inputs.places)
        notes, tests = (remark.note, *_written(out, write_tree(out, files))), remark.tests
    if found.data != made.original:
        notes = (
            *notes,
            f"{found.label} is patched: the plugin is for the file without that, and refuses this "
            "one; run `mlagen unpatch` before you install it",
        )
    return Report(
        "plugin",
        exit_code,
        sites=site_states(replace(found, data=made.patched), made, inputs.spec),
        facts=shown,
        notes=notes,
        tests=tests,
    )


def _written(out: Path, changed: tuple[str, ...]) -> tuple[str, ...]:
    """What was done, and what to do with it."""
    if not changed:
        return (f"nothing to do: {out} is current",)
    return (
        f"wrote {', '.join(str(out / name) for name in changed)}",
        f"install it where SGLang runs: pip install {out}; then `python -m {PACKAGE}` there says "
        "whether it fits",
    )


def installed_plugin(found: FoundTarget, api: PlanApi) -> Facts:
    """What `inspect` says of a plugin that is installed beside the file; empty where none is.

    One that is installed elsewhere on the path of an editable SGLang is not seen.
    """
    package = _package_folder(found)
    place = package.parent / PACKAGE / MADE_FOR_FILE if package is not None else None
    if place is None or not place.is_file():
        return ()
    try:
        content = json.loads(place.read_text("utf-8"))
        version, original = content["version"], content["file"]["sha256"]
        flashinfer = content["flashinfer"]
        known = (flashinfer["version"], flashinfer["digest"])
    except (OSError, ValueError, KeyError, TypeError):
        return (("plugin", f"{place} cannot be read: install {DISTRIBUTION} again"),)
    faults = []
    if hashlib.sha256(found.data).hexdigest() != original:
        faults.append("made for another file than this one")
    if known != (api.version, api.digest):
        faults.append(f"made for another FlashInfer ({known[0] or known[1][:12]})")
    state = "it refuses: " + "; ".join(faults) if faults else "its plans take this file's place"
    return (("plugin", f"{DISTRIBUTION} {version}: {state}"),)


def _registry(path: str, found: FoundTarget) -> bytes | None:
    """The file of that SGLang which loads plugins, None where there is none."""
    if found.file is None:
        return WheelTree(fetch(path)).read(f"sglang/{REGISTRY_FILE}")
    package = _package_folder(found)
    place = package / REGISTRY_FILE if package is not None else None
    return place.read_bytes() if place is not None and place.is_file() else None


def _package_folder(found: FoundTarget) -> Path | None:
    """The folder `sglang` that the file lies in, None for a file that lies elsewhere."""
    if found.file is None:
        return None
    for file in (found.file.path, found.file.resolved):
        if file.as_posix().endswith(f"/{BACKEND_FILE}"):
            return file.parents[len(Path(BACKEND_FILE).parts) - 1]
    return None


def _require_own(out: Path) -> None:
    """Refuse a folder whose pyproject.toml is another project's."""
    place = out / "pyproject.toml"
    if place.is_file() and f'name = "{DISTRIBUTION}"'.encode() not in place.read_bytes():
        raise usage(
            "another project stands here",
            path=str(place),
            code="not-empty",
            hint="give --out a folder of its own",
        )


def _has(place: Path, data: bytes) -> bool:
    return place.is_file() and place.read_bytes() == data
