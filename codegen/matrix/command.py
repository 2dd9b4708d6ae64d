"""The work of `mlagen matrix`, up to its report. Prints nothing but progress."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

from ..errors import Problem, usage
from ..fetch import is_version
from ..publish import write_tree
from ..report import SCHEMA_VERSION, Printer, Report, render_text
from ..spec import Spec
from ..spec_choice import choose_spec
from .digest import meaning_of
from .facts import Cells, Facts, FlashInferRelease, SglangRelease, read_facts, to_json
from .gather import Gathered, Versions, Wish, gather
from .releases import by_version
from .tables import NOT_TRIED, page, pairs_json, text

#: The page of this repository and the facts beside it, looked for upwards from here.
PAGE = "docs/compatibility.md"

_Release = TypeVar("_Release", SglangRelease, FlashInferRelease)


@dataclass(frozen=True)
class MatrixReport(Report):
    """A report whose answer is a table."""

    gathered: Gathered | None = None


def matrix(
    wish: Wish, spec_path: Path | None, markdown: str | None, check: str | None
) -> MatrixReport:
    """Try the pairs that are asked for; write the page, or tell whether it is current.

    Without `wish.refresh` nothing is fetched: pairs whose files are not in the cache stand as
    they are recorded beside the page.

    Raises UsageError where options do not go together, there are no facts, a version that is
    chosen is in no pair, or pip fails.
    """
    _refuse_nonsense(wish, markdown, check)
    place = _facts_place(markdown, check)
    recorded = read_facts(place) if place is not None and _needed(place, wish, check) else None
    if recorded is None and not wish.refresh and wish.whole:
        raise usage(
            f"no facts: {Path(PAGE).with_suffix('.json')} is not here or above",
            path="mlagen matrix",
            code="no-facts",
            hint="--refresh finds them out; or choose a pair with --sglang and --flashinfer",
        )
    spec = choose_spec(spec_path).load()
    gathered = gather(recorded, spec, wish, _say)
    facts = (("facts", str(place) if recorded is not None else "none recorded"), *_counts(gathered))
    if check is not None and recorded is not None:
        problems = tuple(_differences(Path(check), recorded, gathered, spec))
        current = () if problems else (f"{check} is current",)
        code = 1 if problems else 0
        return MatrixReport("matrix", code, problems=problems, facts=facts, notes=current)
    _refuse_unpaired(wish, gathered)
    _refuse_mixture(recorded, gathered, spec)
    notes = list(_hints(gathered))
    if markdown is not None:
        notes += _write(Path(markdown), gathered.facts)
    return MatrixReport("matrix", 0, facts=facts, notes=tuple(notes), gathered=gathered)


def show(printer: Printer, report: MatrixReport, as_json: bool) -> None:
    """Print: the table is the answer, the rest is progress; of a check, the report."""
    gathered = report.gathered
    if as_json:
        printer.answer(_json(report))
    elif gathered is None:
        printer.report(report)
    else:
        printer.progress(render_text(report))
        printer.answer(text(gathered.facts, gathered.pairs))


def _json(report: MatrixReport) -> str:
    gathered = report.gathered
    content = {
        "schema_version": SCHEMA_VERSION,
        "command": "matrix",
        "exit_code": report.exit_code,
        "problems": [asdict(problem) for problem in report.problems],
        "facts": [{"name": name, "value": value} for name, value in report.facts],
        "notes": list(report.notes),
        "pairs": pairs_json(gathered.facts, gathered.pairs) if gathered is not None else [],
    }
    return json.dumps(content, indent=2, sort_keys=True) + "\n"


def _say(line: str) -> None:
    Printer().progress(f"mlagen: {line}")


# --- options ----------------------------------------------------------------------------------


def _refuse_nonsense(wish: Wish, markdown: str | None, check: str | None) -> None:
    for option, value in (("--markdown", markdown), ("--check", check)):
        if value is None:
            continue
        if not value.strip():
            raise usage("an empty file name", path=option)
        if not wish.whole:
            message = "the page has all pairs: not with --sglang or --flashinfer"
            raise usage(message, path=option, hint="leave one of them out")
        if Path(value).suffix == ".json":
            message = "the facts lie beside the page, under its name with .json"
            raise usage(message, path=option, hint="give the page, such as " + PAGE)
    if markdown is not None and check is not None:
        message = "--check writes nothing, --markdown writes"
        raise usage(message, path="--check", hint="give one of them")
    for option, versions in (("--sglang", wish.sglang), ("--flashinfer", wish.flashinfer)):
        for version in versions:
            if not is_version(version):
                raise usage(f"not a version: {version!r}", path=option, hint="such as 0.5.17")


def _facts_place(markdown: str | None, check: str | None) -> Path | None:
    """Where the facts are recorded, if they are."""
    named = check if check is not None else markdown
    if named is not None:
        return Path(named).with_suffix(".json")
    here = Path.cwd()
    for folder in (here, *here.parents):
        place = (folder / PAGE).with_suffix(".json")
        if place.is_file():
            return place
    return None


def _needed(place: Path, wish: Wish, check: str | None) -> bool:
    """Whether the recorded facts are read: a broken file must not stand in the way of its own
    repair, and one that is yet to be made need not be there."""
    return check is not None or (not wish.anew and place.is_file())


def _refuse_unpaired(wish: Wish, gathered: Gathered) -> None:
    """A version that is in no pair is likely a slip; a table without it would not tell."""
    for option, name, chosen, side in (
        ("--sglang", "SGLang", wish.sglang, 0),
        ("--flashinfer", "FlashInfer", wish.flashinfer, 1),
    ):
        there = {pair[side] for pair in gathered.pairs}
        unpaired = [version for version in chosen if version not in there]
        if not unpaired:
            continue
        other = "--flashinfer" if side == 0 else "--sglang"
        raise usage(
            f"no pair has {name} {', '.join(unpaired)}",
            path=option,
            code="no-pair",
            hint=f"choose another version, give {other} as well, or ask the registry: --refresh",
        )


def _refuse_mixture(recorded: Facts | None, gathered: Gathered, spec: Spec) -> None:
    """Outcomes of two kinds of variants.yaml do not make one table."""
    rest = len(gathered.pairs) - gathered.tried
    if recorded is None or not rest or recorded.spec == meaning_of(spec):
        return
    raise usage(
        f"{rest} of {len(gathered.pairs)} pairs are recorded for another variants.yaml, and their "
        "files are not in the cache",
        path="mlagen matrix",
        code="matrix-stale",
        hint="--refresh fetches them and tries them anew",
    )


# --- results ----------------------------------------------------------------------------------


def _counts(gathered: Gathered) -> tuple[tuple[str, str], ...]:
    rest = len(gathered.pairs) - gathered.tried
    told = f"{gathered.tried} tried" + (f", {rest} as they are recorded" if rest else "")
    return (("pairs", f"{len(gathered.pairs)}: {told}"),)


def _hints(gathered: Gathered) -> tuple[str, ...]:
    facts = gathered.facts
    releases = {release.version: release for release in facts.sglang}
    missing = [
        f"{s} with {f}"
        for s, f in gathered.pairs
        if s not in releases or facts.cells(releases[s], f) is None
    ]
    if not missing:
        return ()
    shown = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
    return (f"{NOT_TRIED}: {shown}; --refresh fetches what is missing",)


def _write(place: Path, facts: Facts) -> tuple[str, ...]:
    """Write the page and the facts beside it, the page last: it stands for both."""
    files = {
        place.with_suffix(".json").name: to_json(facts).encode(),
        place.name: page(facts).encode(),
    }
    changed = write_tree(place.parent, files)
    if not changed:
        return (f"nothing to do: {place} is current",)
    return (f"wrote {', '.join(str(place.parent / name) for name in changed)}",)


def _differences(place: Path, recorded: Facts, gathered: Gathered, spec: Spec) -> Iterator[Problem]:
    """What of the page and the facts beside it is not so: the page as text, then releases, then
    pairs."""
    facts = place.with_suffix(".json")
    if recorded.spec != meaning_of(spec):
        message = "the facts are of another variants.yaml"
        yield _stale(facts, message)
    try:
        there = place.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        yield _stale(place, f"cannot be read: {error}")
    else:
        if there != page(recorded):
            yield _stale(place, f"is not what {facts.name} makes of it", "mlagen matrix")
    now = gathered.facts
    for message in _of_releases(recorded.sglang, now.sglang):
        yield _stale(facts, f"SGLang {message}")
    for message in _of_releases(recorded.flashinfer, now.flashinfer):
        yield _stale(facts, f"FlashInfer {message}")
    for pair in gathered.pairs:
        message = _of_pair(pair, _cells(recorded, pair), _cells(gathered.facts, pair))
        if message:
            yield _stale(facts, message)


def _stale(place: Path, message: str, command: str = "mlagen matrix --refresh") -> Problem:
    page_name = place.with_suffix(".md").as_posix()
    hint = f"run `{command} --markdown {page_name}`"
    return Problem(place.as_posix(), 0, 0, "matrix-stale", message, hint)


def _of_releases(recorded: Sequence[_Release], now: Sequence[_Release]) -> Iterator[str]:
    """What differs between two lists of releases, a message for each release."""
    old: dict[str, _Release] = {release.version: release for release in recorded}
    new: dict[str, _Release] = {release.version: release for release in now}
    for version in by_version([*old, *new]):
        if version not in old:
            yield f"{version} is not recorded"
        elif version not in new:
            yield f"{version} is recorded and no longer there"
        elif old[version] != new[version]:
            before, after = old[version].model_dump(), new[version].model_dump()
            told = [
                f"{name} is {after[name]!r}, recorded {before[name]!r}"
                for name in after
                if before[name] != after[name]
            ]
            yield f"{version}: {'; '.join(told)}"


def _cells(facts: Facts, pair: Versions) -> Cells | None:
    release = next((r for r in facts.sglang if r.version == pair[0]), None)
    return facts.cells(release, pair[1]) if release is not None else None


def _of_pair(pair: Versions, old: Cells | None, new: Cells | None) -> str:
    """What differs between two outcomes of a pair; empty where nothing does."""
    name = f"SGLang {pair[0]} with FlashInfer {pair[1]}"
    if old is None:
        return f"{name}: no outcome is recorded"
    if new is None:
        return ""
    before = {cell.variant: cell for cell in old}
    told = []
    for cell in new:
        was = before.get(cell.variant)
        if was is None:
            told.append(f"{cell.variant} is not recorded")
        elif was.states != cell.states:
            now, then = " + ".join(cell.states), " + ".join(was.states)
            told.append(f"{cell.variant} is {now}, recorded {then}")
        elif was.notes != cell.notes:
            told.append(f"{cell.variant}: the reasons are others than recorded")
    return f"{name}: {'; '.join(told)}" if told else ""
