"""`mlagen inspect PATH`: the shape of a file, its sites and their state, its waits."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import DriftError, EditedError, Problem
from .flashinfer.api import PlanApi
from .judge import HostSync, host_syncs
from .patch import Patch, prepare, site_states
from .provenance import read_header
from .report import SiteState
from .sglang.find import FoundTarget
from .spec import Spec


@dataclass(frozen=True)
class Inspected:
    """What `inspect` shows of one file. `problems` are why it cannot be patched, if so."""

    facts: tuple[tuple[str, str], ...]
    sites: tuple[SiteState, ...]
    problems: tuple[Problem, ...]


def inspect_file(found: FoundTarget, spec: Spec, api: PlanApi) -> Inspected:
    """Look at the file of `found`; raises only where it cannot be read as Python at all."""
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
        ]
    for sync in host_syncs(found.data, found.label):
        text = f"line {sync.line}, {sync.where}: {sync.expression}"
        facts.append(("wait", f"{text} ({_when(sync)})"))
    return Inspected(tuple(facts), site_states(found, patch, spec), problems)


def _when(sync: HostSync) -> str:
    """When a wait happens. Those in mlagen's own functions have their reasons."""
    if sync.where.startswith("_mlagen_host_lens"):
        return "only where host lengths are absent"
    if sync.where.startswith(("mlagen_", "_mlagen_")):
        return "at capture, or where FlashInfer's own plan is kept"
    return f"{sync.path}, {sync.note or sync.kind}"
