"""What is known of the pairs: data between the stages, and docs/compatibility.json.

The file holds no date and no path, so that the same findings give the same bytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, TypeAlias

from packaging.version import InvalidVersion, Version
from pydantic import BaseModel, ConfigDict, ValidationError

from ..errors import usage

#: Of docs/compatibility.json; goes up when a key changes its meaning or goes away.
SCHEMA_VERSION = 1

#: What became of one variant in one pair. `replaced`: SGLang's own plan gave way; `superseded`:
#: SGLang's own is as good and stays; `refused`: FlashInfer plans it itself.
State: TypeAlias = Literal["installed", "replaced", "superseded", "refused"]
#: How a FlashInfer release was to be had; `none`: it was not.
Kind: TypeAlias = Literal["wheel", "source", "none"]


class _Data(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Cell(_Data):
    """One variant in one pair. `states`: what became of its main places first; `notes` say why,
    each one sentence that begins with what it is about."""

    variant: str
    states: tuple[State, ...]
    notes: tuple[str, ...] = ()


class SglangRelease(_Data):
    """`file`: sha256 of its back-end file, the first 16 digits; `pin`: the FlashInfer that its
    metadata requires, empty where it pins none."""

    version: str
    file: str
    pin: str


class FlashInferRelease(_Data):
    """`digest`: sha256 of its Python, the first 16 digits, empty where it was not to be had.
    `era`: as what it was read, empty where it could not be; then `problem` says why."""

    version: str
    kind: Kind
    digest: str
    era: str
    problem: str


Cells: TypeAlias = tuple[Cell, ...]
#: (SglangRelease.file, FlashInferRelease.digest): releases with the same files are one.
Pair: TypeAlias = tuple[str, str]


class Facts(_Data):
    """All findings. `sglang` and `flashinfer` are in the order of releases; `spec` is
    `meaning_of` the variants.yaml that the pairs were patched with."""

    mlagen: str
    spec: str
    variants: tuple[str, ...]
    sglang: tuple[SglangRelease, ...]
    flashinfer: tuple[FlashInferRelease, ...]
    outcomes: Mapping[Pair, Cells]

    def flashinfer_of(self, version: str) -> FlashInferRelease | None:
        """A FlashInfer release by its version."""
        return next((r for r in self.flashinfer if r.version == version), None)

    def cells(self, sglang: SglangRelease, flashinfer: str) -> Cells | None:
        """What became of a pair; None where nobody has tried it."""
        release = self.flashinfer_of(flashinfer)
        if release is None:
            return None
        if release.problem:
            notes = (f"FlashInfer {flashinfer}: {release.problem}",)
            return tuple(
                Cell(variant=name, states=("refused",), notes=notes) for name in self.variants
            )
        return self.outcomes.get((sglang.file, release.digest))


class _OnDisk(_Data):
    """docs/compatibility.json. `outcomes`: (file, digest, index into `results`)."""

    schema_version: Literal[1]
    mlagen: str
    spec: str
    variants: tuple[str, ...]
    sglang: tuple[SglangRelease, ...]
    flashinfer: tuple[FlashInferRelease, ...]
    results: tuple[Cells, ...]
    outcomes: tuple[tuple[str, str, int], ...]


def to_json(facts: Facts) -> str:
    """The text of docs/compatibility.json; ends in a line end."""
    results = list(dict.fromkeys(facts.outcomes[pair] for pair in sorted(facts.outcomes)))
    index = {cells: number for number, cells in enumerate(results)}
    lines = ["{", f'  "schema_version": {SCHEMA_VERSION},']
    lines += [f'  "{name}": {_inline(getattr(facts, name))},' for name in ("mlagen", "spec")]
    lines.append(f'  "variants": {_inline(list(facts.variants))},')
    lines += _list("sglang", [release.model_dump() for release in facts.sglang])
    lines += _list("flashinfer", [release.model_dump() for release in facts.flashinfer])
    lines += _list("results", [[cell.model_dump(mode="json") for cell in r] for r in results])
    lines += _list(
        "outcomes", [[*pair, index[facts.outcomes[pair]]] for pair in sorted(facts.outcomes)]
    )
    return "\n".join([*lines[:-1], "  ]", "}"]) + "\n"


def _list(name: str, items: list[object]) -> list[str]:
    """One line an item: a diff of two runs shows what has changed and nothing else."""
    return [
        f'  "{name}": [',
        *(f"    {_inline(item)}{',' if n < len(items) else ''}" for n, item in enumerate(items, 1)),
        "  ],",
    ]


def _inline(value: object) -> str:
    return json.dumps(value, ensure_ascii=True)


def read_facts(place: Path) -> Facts:
    """Read docs/compatibility.json. UsageError where it is not there or is not one."""
    try:
        disk = _OnDisk.model_validate_json(place.read_bytes())
        outcomes = {(file, digest): disk.results[index] for file, digest, index in disk.outcomes}
        for version in [r.version for r in disk.sglang] + [r.version for r in disk.flashinfer]:
            Version(version)
    except OSError as error:
        raise usage(
            f"no facts to read: {error.strerror or error}",
            path=str(place),
            code="no-facts",
            hint="run `mlagen matrix --refresh --markdown FILE`, which finds them out",
        ) from error
    except (ValidationError, IndexError, InvalidVersion) as error:
        first = (
            error.errors()[0]["msg"]
            if isinstance(error, ValidationError)
            else f"{type(error).__name__}: {error}"
        )
        raise usage(
            f"not the facts of `mlagen matrix`: {first}",
            path=str(place),
            code="bad-facts",
            hint="take it from version control, or make it anew with --refresh --markdown FILE",
        ) from error
    return Facts(
        mlagen=disk.mlagen,
        spec=disk.spec,
        variants=disk.variants,
        sglang=disk.sglang,
        flashinfer=disk.flashinfer,
        outcomes=outcomes,
    )
