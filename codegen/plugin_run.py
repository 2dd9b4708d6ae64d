"""`mlagen plugin`: write the package, or tell whether it is current."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from .errors import usage
from .inputs import inputs_of
from .ownership import refuse_foreign
from .patch import prepare, site_states
from .plugin import (
    DISTRIBUTION,
    PACKAGE,
    REGISTRY_FILE,
    made_for,
    plugin_files,
    read_with_files,
    require_registry,
)
from .plugin_installed import package_folder
from .prove import before_publishing
from .publish import would_replace, write_tree
from .report import Facts, RanTest, Report
from .sglang.find import FoundTarget, find_target


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
    _refuse_site_packages(out)
    found = find_target(path)
    require_registry(found, _registry(found))
    inputs = inputs_of(found, spec_path, flashinfer, only, allow_unknown=allow_unknown)
    with inputs.choice.named():
        made = prepare(found, inputs.spec, inputs.api)
    if made.patched == made.original:
        raise made.no_place()
    read = read_with_files(inputs.source, allow_unknown=allow_unknown)
    facts = made_for(made, read[1])
    files = plugin_files(facts, made.patched)
    refuse_foreign(would_replace(out, files))
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
        changed = write_tree(out, files, guard=refuse_foreign)
        notes, tests = (remark.note, *_written(out, changed)), remark.tests
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


def _registry(found: FoundTarget) -> bytes | None:
    """The file of that SGLang which loads plugins, None where there is none."""
    if found.wheel is not None:
        return found.wheel.read(f"sglang/{REGISTRY_FILE}")
    package = package_folder(found)
    place = package / REGISTRY_FILE if package is not None else None
    return place.read_bytes() if place is not None and place.is_file() else None


def _refuse_site_packages(out: Path) -> None:
    """Refuse a folder that packages are installed in: pip would neither know of the files nor
    find the entry point, and those of an installed plugin are pip's to replace."""
    place = out.resolve()
    if place.name in ("site-packages", "dist-packages") or any(place.glob("*.dist-info")):
        raise usage(
            "packages are installed in this folder",
            path=str(out),
            code="site-packages",
            hint=f"give --out a folder of its own, then `pip install` that: it puts {PACKAGE} here",
        )


def _has(place: Path, data: bytes) -> bool:
    return place.is_file() and place.read_bytes() == data
