"""A few releases of each side, in miniature, and the facts that they would give.

Nothing in them is SGLang's or FlashInfer's text.
"""

from __future__ import annotations

from pathlib import Path

from mlagen.codegen.matrix.facts import (
    Cell,
    Cells,
    Facts,
    FlashInferRelease,
    Kind,
    SglangRelease,
    State,
)
from mlagen.codegen.matrix.releases import FLASHINFER, SGLANG
from mlagen.codegen.matrix.store import write_archive
from mlagen.codegen.sglang.find import BACKEND_FILE
from tests.backend_miniature import MINIATURE
from tests.flashinfer import miniatures

BACKEND = MINIATURE.encode()
#: No back end: refused whatever FlashInfer there is.
FOREIGN = BACKEND.replace(b"class FlashInferMLAAttnBackend", b"class OtherBackend")
WRAPPER = miniatures.wrapper_era()
OBJECT = miniatures.backend_era()
DRIFTED = miniatures.wrapper_era(
    f"        self._plan_info = {miniatures.call(*miniatures.NINE, 'split_kv')}"
)


def metadata(name: str, version: str, *requires: str) -> bytes:
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    return "\n".join([*lines, *(f"Requires-Dist: {r}" for r in requires), ""]).encode()


def sglang_files(version: str, pin: str, data: bytes = BACKEND) -> dict[str, bytes]:
    """What a wheel of SGLang has, with a file that the matrix does not read."""
    info = f"{SGLANG}-{version}.dist-info"
    return {
        f"sglang/{BACKEND_FILE}": data,
        "sglang/large.py": b"# ten megabytes\n",
        f"{info}/METADATA": metadata(SGLANG, version, f"flashinfer_python=={pin}"),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nTag: py3-none-any\n",
        f"{info}/RECORD": b"",
    }


def flashinfer_files(version: str, files: miniatures.Files) -> dict[str, bytes]:
    """What a wheel of FlashInfer has, with a file that is no Python."""
    info = f"flashinfer_python-{version}.dist-info"
    return {
        **{path: text.encode() for path, text in files.items()},
        "flashinfer/data/kernel.cuh": b"// not Python\n",
        f"{info}/METADATA": metadata(FLASHINFER, version),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nTag: py3-none-any\n",
        f"{info}/RECORD": b"",
    }


def in_cache(cache: Path, name: str, version: str, files: dict[str, bytes]) -> Path:
    """Put a release into a cache, as a whole wheel."""
    place = cache / "wheels" / name / version / f"{name.replace('-', '_')}-{version}-any.whl"
    place.parent.mkdir(parents=True, exist_ok=True)
    write_archive(place, files)
    return place


def fill(cache: Path) -> None:
    """SGLang 1.0 and 1.1 (the same file), 1.2 (refused); FlashInfer 1.0, 1.1, 1.2 (drifted)."""
    for version, data, pin in (
        ("1.0", BACKEND, "1.0"),
        ("1.1", BACKEND, "1.0"),
        ("1.2", FOREIGN, "1.1"),
    ):
        in_cache(cache, SGLANG, version, sglang_files(version, pin, data))
    for version, files in (("1.0", WRAPPER), ("1.1", OBJECT), ("1.2", DRIFTED)):
        in_cache(cache, FLASHINFER, version, flashinfer_files(version, files))


# --- facts of no release ----------------------------------------------------------------------


def cell(variant: str, *states: State, notes: tuple[str, ...] = ()) -> Cell:
    return Cell(variant=variant, states=states, notes=notes)


def sglang(version: str, file: str, pin: str) -> SglangRelease:
    return SglangRelease(version=version, file=file, pin=pin)


def flashinfer(
    version: str, digest: str, kind: Kind = "wheel", era: str = "new"
) -> FlashInferRelease:
    return FlashInferRelease(version=version, kind=kind, digest=digest, era=era, problem="")


GOOD: Cells = (cell("decode", "replaced"), cell("verify", "installed"))
PARTLY: Cells = (
    cell("decode", "replaced"),
    cell("verify", "replaced", "superseded", notes=("DFLASH: SGLang's own",)),
)
BAD: Cells = (
    cell("decode", "refused", notes=("line 3: anchor-missing: no call",)),
    cell("verify", "refused", notes=("line 3: anchor-missing: no call", "DFLASH: SGLang's own")),
)

FACTS = Facts(
    mlagen="0.0",
    spec="spec",
    variants=("decode", "verify"),
    sglang=(
        sglang("0.9", "f0", "0.4"),
        sglang("1.0", "f1", "0.5"),
        sglang("1.0.post1", "f1", "0.5"),
        sglang("1.0.post2", "f2", "0.5"),
        sglang("1.1", "f2", "0.6"),
        sglang("1.2", "f3", "0.6"),
        sglang("1.3", "f4", ""),
    ),
    flashinfer=(
        FlashInferRelease(version="0.4", kind="none", digest="", era="", problem="not to be had"),
        flashinfer("0.4.1", "d0", "source", "old"),
        flashinfer("0.5", "d1"),
        flashinfer("0.6", "d2"),
        flashinfer("0.7", "d3"),
    ),
    outcomes={
        ("f1", "d1"): GOOD,
        ("f2", "d1"): GOOD,
        **{(f, d): GOOD for f in ("f1", "f2") for d in ("d2", "d3")},
        **{("f3", d): BAD for d in ("d1", "d2")},
        ("f3", "d3"): PARTLY,
        **{("f4", d): PARTLY for d in ("d1", "d2")},
    },
)
