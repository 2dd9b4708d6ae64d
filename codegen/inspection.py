"""`mlagen inspect PATH`: the shape of a file, who plans its graphs, its sites and their state, its
waits, and what reads lengths on the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from . import waits as told
from .errors import DriftError, EditedError, Problem
from .flashinfer.api import PlanApi
from .flashinfer.waits import StockWaits
from .judge import HostRead, HostSync, host_reads, host_syncs, waits_of_steps
from .patch import Patch, prepare, site_states
from .planners import planner_facts
from .provenance import read_header
from .report import Facts, SiteState, Wait
from .sglang.find import FoundTarget
from .spec import Spec


@dataclass(frozen=True)
class Inspected:
    """What `inspect` shows of one file. `problems` are why it cannot be patched, if so."""

    facts: Facts
    sites: tuple[SiteState, ...]
    problems: tuple[Problem, ...]
    waits: tuple[Wait, ...] = ()


def inspect_file(
    found: FoundTarget, spec: Spec, api: PlanApi, stock: StockWaits | None = None
) -> Inspected:
    """Look at the file of `found`; raises only where it cannot be read as Python at all.

    Args:
        stock: the waits of the plan of that FlashInfer; without, such a plan counts as one.
    """
    facts: list[tuple[str, str]] = []
    problems: tuple[Problem, ...] = ()
    patch: Patch | None = None
    header = read_header(found.data, path=found.label)
    if header is not None:
        made_for = f"mlagen {header.mlagen}, FlashInfer {header.flashinfer or 'unknown'}"
        facts.append(("patched by", made_for))
    try:
        patch = prepare(found, spec, api)
    except (DriftError, EditedError) as error:
        problems = error.problems
    if patch is not None:
        features = patch.target.features
        facts += [
            ("SGLang's shape", features.shape),
            ("context parallelism", "known to the file" if features.dcp else "not in this file"),
            ("page size", features.page_size),
            *planner_facts(spec, patch.target),
        ]
    as_released = spec.names.as_released  # what a fork calls otherwise, by the names looked for
    data = as_released(found.data)
    steps = waits_of_steps(data, found.label, stock)
    after = None
    if patch is not None:
        after = waits_of_steps(as_released(patch.patched), found.label, stock)
    absent = patch.target.absent if patch is not None else {}
    waits = told.step_reports(found.label, steps, after, spec, absent)
    facts += told.step_facts(steps, waits)
    facts += _elsewhere(host_syncs(data, found.label), waits)
    facts += _read_lengths(host_reads(data, found.label))
    return Inspected(tuple(facts), site_states(found, patch, spec), problems, waits)


def _elsewhere(syncs: Sequence[HostSync], waits: Sequence[Wait]) -> list[tuple[str, str]]:
    """The waits that stand in the file, and on the way of no step."""
    lines = {wait.line for wait in waits}
    return [
        ("wait", f"line {sync.line}, {sync.where}: {sync.expression} ({_when(sync)})")
        for sync in syncs
        if sync.line not in lines
    ]


def _read_lengths(reads: Sequence[HostRead]) -> list[tuple[str, str]]:
    """What uses lengths on the host, a method at a time; of mlagen's own lines how many."""
    methods: dict[str, list[str]] = {}
    for read in reads:
        if not read.ours:
            place = f"line {read.line}, {read.expression} ({read.use})"
            methods.setdefault(read.where, []).append(place)
    texts = [f"{where}: {'; '.join(places)}" for where, places in methods.items()]
    ours = sum(read.ours for read in reads)
    if ours:
        texts.append(f"mlagen's own lines: {ours} place{'s' if ours > 1 else ''}, not listed")
    return [("host lengths read", text) for text in texts or ["nowhere in this file"]]


def _when(sync: HostSync) -> str:
    """When a wait happens. Those in mlagen's own functions have their reasons."""
    if sync.where.startswith("_mlagen_host_lens"):
        return "only where host lengths are absent"
    if sync.where.startswith(("mlagen_", "_mlagen_")):
        return "at capture, or where FlashInfer's own plan is kept"
    return f"{sync.path}, {sync.note or sync.kind}"
