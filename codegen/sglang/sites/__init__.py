"""One small file an edit site. Each opens with what changes there and why.

A site is a function `edits(context) -> list[Edit]`; `SITES` lists them in the order of the
file, with what they serve: a site is edited if one of the chosen variants needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ...render import render_site
from ...spec import Variant, filled_in_place, planned_on_device
from ..backend import Backend
from ..edits import Edit
from ..features import Features

REQUEST = "mlagen_request"
REQUEST_TYPE = 'Optional["MlagenRequest"]'


@dataclass(frozen=True)
class Context:
    """What a site works from. `device`: the modes whose replays are planned on the GPU; `calls`
    collects the emitted functions that sites name."""

    backend: Backend
    features: Features
    device: frozenset[str] = frozenset()
    calls: set[str] = field(default_factory=set)

    def lines(self, template: str, calls: Iterable[str] = (), **values: Any) -> tuple[str, ...]:
        """Render a site's template; `calls` are the emitted functions that it names."""
        self.calls.update(calls)
        return render_site(template, {"features": self.features, **values}, self.backend.names)


@dataclass(frozen=True)
class Site:
    """An edit site. `serves`: the (mode, when) pairs that need it; `for_update`: only where
    FlashInfer has a public update of a graph's plan; `whose`: of which variants alone."""

    name: str
    serves: frozenset[tuple[str, str]]
    edits: Callable[[Context], list[Edit]]
    for_update: bool = False
    whose: Callable[[Variant], bool] | None = None


DECODE_REPLAY = frozenset({("decode", "replay"), ("draft-decode", "replay")})
DRAFT = frozenset({("draft-decode", "replay"), ("draft-decode", "eager")})
VERIFY_REPLAY = frozenset({("target-verify", "replay")})
VERIFY_EAGER = frozenset({("target-verify", "eager")})
EXTEND = frozenset({("draft-extend", "eager")})


def all_sites() -> Mapping[str, Site]:
    """Every site by name, in the order in which they stand in the file."""
    from . import (
        capture_decode,
        capture_verify,
        decode_updater,
        draft_step,
        draft_sum,
        eager_draft,
        eager_extend,
        eager_verify,
        in_graph,
        multi_step,
        plan_update,
        prefill_updater,
        replay_decode,
        replay_verify,
        verify_indices,
    )

    sites = (
        Site("draft-step", DECODE_REPLAY | DRAFT, draft_step.edits),
        Site("plan-update-decode", DECODE_REPLAY, plan_update.decode_edits, for_update=True),
        Site("capture-decode", DECODE_REPLAY, capture_decode.edits),
        Site("plan-update-verify", VERIFY_REPLAY, plan_update.verify_edits, for_update=True),
        Site("capture-verify", VERIFY_REPLAY, capture_verify.edits),
        Site("in-graph", DECODE_REPLAY | VERIFY_REPLAY, in_graph.edits, whose=planned_on_device),
        Site("eager-draft", frozenset({("draft-decode", "eager")}), eager_draft.edits),
        Site("eager-verify", VERIFY_EAGER, eager_verify.edits),
        Site("eager-extend", EXTEND, eager_extend.edits),
        Site("replay-decode", DECODE_REPLAY, replay_decode.edits),
        Site("replay-verify", VERIFY_REPLAY, replay_verify.edits),
        Site("decode-updater", DECODE_REPLAY | DRAFT, decode_updater.edits),
        Site("prefill-updater", VERIFY_REPLAY | VERIFY_EAGER | EXTEND, prefill_updater.edits),
        Site("verify-indices", VERIFY_REPLAY, verify_indices.edits, whose=filled_in_place),
        Site("draft-sum", DRAFT, draft_sum.edits, whose=planned_on_device),
        Site("multi-step", DECODE_REPLAY | DRAFT, multi_step.edits),
    )
    return {site.name: site for site in sites}
