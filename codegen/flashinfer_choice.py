"""Which FlashInfer a command writes for, and why that one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from .errors import EditedError, Problem, UsageError
from .fetch import is_gone
from .flashinfer.find import FlashInferSource, find_flashinfer
from .provenance import read_header
from .restore import original_of
from .sglang.find import FoundTarget

#: What `check` says besides, of a file that it had nothing else to hold against.
NAMED_BY_FILE = "none is installed; the file was patched for it"


def flashinfer_for(
    found: FoundTarget, explicit: str | None, folder: Path
) -> tuple[FlashInferSource, str]:
    """The FlashInfer to write for, and why that one: the one given; for a fetched release the
    one it pins; the one installed beside the file or beside mlagen; the one that the file was
    patched for, which is its own; the one that MANIFEST.json in `folder` names."""
    if explicit is not None:
        return find_flashinfer(explicit), "given"
    if found.pinned_flashinfer is not None:
        return _pinned(found, found.pinned_flashinfer), "pinned by that release"
    near = found.file.resolved if found.file is not None else None
    try:
        return find_flashinfer(None, near=near), "installed"
    except UsageError as error:
        nothing = error.problems[0]
    if named := _named_by_file(found):
        return _named(named, NAMED_BY_FILE), NAMED_BY_FILE
    if named := _named_by_manifest(folder):
        why = "none is installed; generated/MANIFEST.json names it"
        return _named(named, why), why
    raise _unnamed(nothing, f"neither the file, if patched, nor {_manifest(folder)} names one")


def flashinfer_to_render(explicit: str | None, folder: Path) -> FlashInferSource:
    """The FlashInfer to render `folder` for: the one given, else the one installed beside mlagen,
    else the one that the folder's MANIFEST.json names."""
    try:
        return find_flashinfer(explicit)
    except UsageError as error:
        if explicit is not None:
            raise
        nothing = error.problems[0]
    if named := _named_by_manifest(folder):
        return _named(named, "none is installed; MANIFEST.json names it")
    raise _unnamed(nothing, f"{_manifest(folder)} names none")


def _named_by_manifest(folder: Path) -> str | None:
    """The FlashInfer version that MANIFEST.json in `folder` names. Read where nothing else tells
    one: a broken manifest must not stand in the way of its own repair."""
    from . import generated

    if not _manifest(folder).is_file():
        return None
    return generated.manifest_of(folder).flashinfer


def _manifest(folder: Path) -> Path:
    from . import generated

    return folder / generated.MANIFEST


def _unnamed(nothing: Problem, besides: str) -> UsageError:
    return UsageError(replace(nothing, message=f"{nothing.message}; {besides}"))


def _named_by_file(found: FoundTarget) -> str | None:
    """The FlashInfer that the header of a patched file names. One that someone edited names none
    here: it is refused where its text is shown."""
    try:
        header = read_header(found.data, path=found.label)
    except EditedError:
        return None
    return header.flashinfer if header is not None else None


def _named(version: str, why: str) -> FlashInferSource:
    """A FlashInfer that no one asked for by hand. Where it cannot be had, the error says why it
    was looked for."""
    try:
        return find_flashinfer(version)
    except UsageError as error:
        first = error.problems[0]
        hint = "install FlashInfer beside PATH or mlagen, or give --flashinfer"
        raise UsageError(replace(first, message=f"{first.message} ({why})", hint=hint)) from None


def _pinned(found: FoundTarget, version: str) -> FlashInferSource:
    """The FlashInfer that a release pins. Where it cannot be had, a file that would be refused
    anyway is refused for its own reason."""
    try:
        return find_flashinfer(version)
    except UsageError as error:
        from .sglang.locate import refuse_hopeless

        refuse_hopeless(original_of(found.data, found.label), found.label)
        if not is_gone(error):
            raise
        first = error.problems[0]
        hint = "give --flashinfer: a version that has a wheel (0.5.0 on), a folder or a wheel file"
        raise UsageError(replace(first, hint=hint)) from None
