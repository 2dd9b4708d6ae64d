"""Releases and their pairs -> Facts: of what the cache has worked out or remembered, of the rest
as it is recorded."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from packaging.version import Version

from ..errors import DriftError, UsageError
from ..fetch import WheelTree, is_gone
from ..flashinfer.find import find_flashinfer
from ..flashinfer.read import read_plan_api
from ..patch import mlagen_version
from ..sglang.find import in_wheel
from ..spec import Spec
from .digest import SHORT, code_digest, key, meaning_of
from .facts import Cell, Cells, Facts, FlashInferRelease, Pair, SglangRelease
from .pair import pair_cells, said
from .releases import (
    FLASHINFER,
    SGLANG,
    by_version,
    flashinfer_versions,
    sglang_versions,
)
from .runner import Memory, Task, run
from .store import Held, flashinfer_digest, held, obtain

#: So many SGLang releases, the newest, go with every FlashInfer that has a wheel.
NEWEST = 5
#: At most so many downloads at once.
_FETCHES = 2

#: (SGLang, FlashInfer), versions.
Versions: TypeAlias = tuple[str, str]
Say: TypeAlias = Callable[[str], None]


@dataclass(frozen=True)
class Wish:
    """What to look at. Empty `sglang` and `flashinfer`: all pairs of the matrix. `refresh`: ask
    the registry which releases there are, and fetch what is missing."""

    sglang: tuple[str, ...] = ()
    flashinfer: tuple[str, ...] = ()
    jobs: int = 1
    refresh: bool = False

    @property
    def whole(self) -> bool:
        """Whether all pairs are asked for."""
        return not (self.sglang or self.flashinfer)

    @property
    def anew(self) -> bool:
        """Whether everything is found out anew, whatever is recorded."""
        return self.refresh and self.whole


@dataclass(frozen=True)
class Gathered:
    """Facts, and the pairs that were asked for. `tried`: how many of them the cache had the files
    of; the others stand as they were recorded."""

    facts: Facts
    pairs: tuple[Versions, ...]
    tried: int


@dataclass(frozen=True)
class _FlashInfer:
    """A release and what reading it gave. `api`: PlanApi's digest, empty where it was refused."""

    release: FlashInferRelease
    place: Path
    api: str


def gather(recorded: Facts | None, spec: Spec, wish: Wish, say: Say) -> Gathered:
    """Try every pair that is asked for and whose files are in the cache; take the others from
    `recorded`. With `refresh` all of them are fetched, and nothing comes from there.

    Raises UsageError where pip fails, and whatever a faulty variants.yaml raises.
    """
    memory = Memory()
    nothing = Facts(mlagen="", spec="", variants=(), sglang=(), flashinfer=(), outcomes={})
    known = nothing if wish.anew or recorded is None else recorded
    sglang, places = _sglang(known, wish, say)
    archives = _flashinfer_files(known, sglang, wish, say)
    pairs = _pairs(sglang, _wheels(known, archives), wish)
    needed = None if wish.whole else {f for _, f in pairs}
    read = _read(archives, needed, wish, memory, say)
    flashinfer = _flashinfer(known, archives, read)
    outcomes = dict(known.outcomes)
    outcomes.update(_tried(sglang, places, read, pairs, spec, wish, memory, say))
    facts = Facts(
        mlagen=mlagen_version(),
        spec=meaning_of(spec),
        variants=tuple(variant.name for variant in spec.variants),
        sglang=sglang,
        flashinfer=flashinfer,
        outcomes=outcomes,
    )
    tried = sum(s in places and f in read for s, f in pairs)
    return Gathered(facts, pairs, tried)


# --- releases ---------------------------------------------------------------------------------


def _sglang(
    known: Facts, wish: Wish, say: Say
) -> tuple[tuple[SglangRelease, ...], dict[str, Path]]:
    """Every SGLang release, and the places of those whose files are here."""
    recorded = {release.version: release for release in known.sglang}
    asked = set(wish.sglang)
    versions = by_version([*recorded, *asked])
    if wish.anew:
        versions = sglang_versions()
    chosen = by_version(asked) or versions
    found = _files(SGLANG, chosen, chosen if wish.refresh else (), say)
    releases: list[SglangRelease] = []
    places: dict[str, Path] = {}
    for version in versions:
        files = found.get(version)
        if isinstance(files, Held):
            places[version] = files.place
            releases.append(_sglang_release(version, files.place))
        elif version in recorded:
            releases.append(recorded[version])
    return tuple(releases), places


def _sglang_release(version: str, place: Path) -> SglangRelease:
    found = in_wheel(WheelTree(place), f"{SGLANG}=={version}")
    digest = hashlib.sha256(found.data).hexdigest()[:SHORT]
    return SglangRelease(version=version, file=digest, pin=found.pinned_flashinfer or "")


def _flashinfer_files(
    known: Facts, sglang: Sequence[SglangRelease], wish: Wish, say: Say
) -> Mapping[str, Held | UsageError]:
    """Where the files of every FlashInfer release are, of those that are here or were looked for
    in vain."""
    pins = {release.pin for release in sglang if release.pin}
    versions = by_version([*(r.version for r in known.flashinfer), *pins, *wish.flashinfer])
    wanted: Sequence[str] = ()
    if wish.anew:
        wanted = versions = by_version([*flashinfer_versions(), *pins])
    elif wish.refresh:
        wanted = wish.flashinfer or [s.pin for s in sglang if s.pin and s.version in wish.sglang]
    return _files(FLASHINFER, versions, dict.fromkeys(wanted), say)


def _wheels(known: Facts, archives: Mapping[str, Held | UsageError]) -> tuple[str, ...]:
    """The FlashInfer releases that have a wheel, as they lie here, else as they are recorded."""
    recorded = {r.version for r in known.flashinfer if r.kind == "wheel"} - set(archives)
    here = {v for v, found in archives.items() if isinstance(found, Held) and found.kind == "wheel"}
    return by_version(recorded | here)


def _flashinfer(
    known: Facts,
    archives: Mapping[str, Held | UsageError],
    read: Mapping[str, _FlashInfer],
) -> tuple[FlashInferRelease, ...]:
    """Every FlashInfer release: as it was read, else as it is recorded."""
    releases = {release.version: release for release in known.flashinfer}
    for version, found in archives.items():
        if isinstance(found, UsageError):
            releases[version] = _gone(version)
    releases.update({version: here.release for version, here in read.items()})
    return tuple(releases[version] for version in by_version(releases))


def _gone(version: str) -> FlashInferRelease:
    problem = "the registry has neither a wheel nor a source archive of it"
    return FlashInferRelease(version=version, kind="none", digest="", era="", problem=problem)


def _files(
    name: str, versions: Iterable[str], wanted: Iterable[str], say: Say
) -> Mapping[str, Held | UsageError]:
    """Where the files of releases are: fetched where `wanted`; the error where the registry has
    them not. Any other failure is raised."""
    found: dict[str, Held | UsageError] = {}
    for version in versions:
        here = held(name, version)
        if here is not None:
            found[version] = here
    missing = [version for version in wanted if version not in found]

    def get(version: str) -> Held | UsageError:
        try:
            return obtain(name, version, say)
        except UsageError as error:
            if name == FLASHINFER and is_gone(error):
                return error
            raise

    pool = ThreadPoolExecutor(_FETCHES)
    try:
        found.update(zip(missing, pool.map(get, missing), strict=True))
    finally:  # the first failure, or Ctrl-C, is the end: do not fetch all the rest before it
        pool.shutdown(cancel_futures=True)
    return found


# --- reading and trying -----------------------------------------------------------------------


def read_release(place: Path) -> dict[str, str]:
    """What mlagen makes of a FlashInfer: `era` and `api` (PlanApi's digest), or `problem`."""
    try:
        api = read_plan_api(find_flashinfer(str(place)))
    except (DriftError, UsageError) as error:
        return {"era": "", "api": "", "problem": "; ".join(said(p) for p in error.problems)}
    return {"era": api.era.name.lower().replace("_", "-"), "api": api.digest, "problem": ""}


def _read(
    archives: Mapping[str, Held | UsageError],
    needed: Container[str] | None,
    wish: Wish,
    memory: Memory,
    say: Say,
) -> dict[str, _FlashInfer]:
    """What reading gave of the releases that are here and `needed`; None: all."""
    files = {
        version: found
        for version, found in archives.items()
        if isinstance(found, Held) and (needed is None or version in needed)
    }
    digests = {v: flashinfer_digest(WheelTree(here.place)) for v, here in files.items()}
    tasks = {
        v: Task(
            key("read", code_digest(), digests[v]),
            f"reading FlashInfer {v}",
            read_release,
            (here.place,),
        )
        for v, here in files.items()
    }
    results = run(list(tasks.values()), memory, wish.jobs, say)
    out: dict[str, _FlashInfer] = {}
    for version, here in files.items():
        result = results[tasks[version].key]
        release = FlashInferRelease(
            version=version,
            kind=here.kind,
            digest=digests[version][:SHORT],
            era=result["era"],
            problem=result["problem"],
        )
        out[version] = _FlashInfer(release, here.place, result["api"])
    return out


def try_pair(sglang: Path, flashinfer: Path, spec: Path) -> list[str]:
    """`pair_cells`, each as JSON."""
    return [cell.model_dump_json() for cell in pair_cells(sglang, flashinfer, spec)]


def _tried(
    sglang: Sequence[SglangRelease],
    places: Mapping[str, Path],
    read: Mapping[str, _FlashInfer],
    pairs: Iterable[Versions],
    spec: Spec,
    wish: Wish,
    memory: Memory,
    say: Say,
) -> dict[Pair, Cells]:
    """The outcome of every pair whose files are here. Releases that are alike in all that decides
    are tried once."""
    files = {release.version: release.file for release in sglang}
    tasks: dict[Pair, Task] = {}
    for s, f in pairs:
        if s not in places or f not in read or not read[f].api:
            continue
        tasks[files[s], read[f].release.digest] = Task(
            key("pair", code_digest(), spec.digest, files[s], read[f].api),
            f"SGLang {s} with FlashInfer {f}",
            try_pair,
            (places[s], read[f].place, spec.source),
        )
    results = run(list(tasks.values()), memory, wish.jobs, say)
    return {
        pair: tuple(Cell.model_validate_json(cell) for cell in results[task.key])
        for pair, task in tasks.items()
    }


# --- pairs ------------------------------------------------------------------------------------


def pinned_pairs(sglang: Iterable[SglangRelease]) -> tuple[Versions, ...]:
    """Every SGLang with the FlashInfer that it pins."""
    return tuple((release.version, release.pin) for release in sglang if release.pin)


def newest_pairs(sglang: Iterable[SglangRelease], wheels: Iterable[str]) -> tuple[Versions, ...]:
    """The newest SGLang releases with every FlashInfer that has a wheel."""
    newest = by_version(release.version for release in sglang)[-NEWEST:]
    return tuple((s, f) for f in wheels for s in newest)


def _pairs(
    sglang: Sequence[SglangRelease], wheels: Iterable[str], wish: Wish
) -> tuple[Versions, ...]:
    """The pairs that are asked for: those of the matrix, fewer by what is chosen; both chosen,
    each with each."""
    if wish.sglang and wish.flashinfer:
        return tuple((s, f) for s in by_version(wish.sglang) for f in by_version(wish.flashinfer))
    whole = dict.fromkeys([*pinned_pairs(sglang), *newest_pairs(sglang, wheels)])
    return tuple(
        sorted(
            (
                (s, f)
                for s, f in whole
                if (not wish.sglang or s in wish.sglang)
                and (not wish.flashinfer or f in wish.flashinfer)
            ),
            key=lambda pair: (Version(pair[0]), Version(pair[1])),
        )
    )
