"""Verify capture: install our plan behind the real one.

Added behind the statement that plans the new wrapper for the first time (FlashInfer loads
its module there). Replaced from 0.5.18 on: SGLang's own installation.
"""

from __future__ import annotations

import libcst as cst

from ..backend import CallSite, installs_plan
from ..edits import Edit, after, instead
from . import Context


def edits(context: Context) -> list[Edit]:
    backend = context.backend
    statement, wrapper, site = backend.verify_capture
    backend.require_names(site.function, "bs", "seq_lens", "spec_info")
    guarded = not site.only("is_target_verify")
    if guarded:
        backend.require_names(site.function, "forward_mode")
    device = "target-verify" in context.device
    lines = context.lines(
        "capture_verify",
        calls=("mlagen_capture_verify",),
        wrapper=wrapper,
        heads=backend.heads_of("prefill-updater-class", "wrapper_paged"),
        guarded=guarded,
        page_table=backend.page_table() if device else None,
    )
    own = _own_install(site, wrapper)
    known = [own] if own is not None else []
    backend.refuse_other_installs(backend.decode_install[1], *known)
    if own is not None:
        return [instead(backend.source, "capture-verify", own, own, lines)]
    return [after(backend.source, "capture-verify", statement, lines)]


def _own_install(site: CallSite, wrapper: str) -> cst.BaseStatement | None:
    """SGLang's installation directly behind the plan: `if ...:` with nothing else in it, or the
    bare statement."""
    if site.index + 1 >= len(site.block):
        return None
    following = site.block[site.index + 1]
    if installs_plan(following, wrapper):
        return following
    if isinstance(following, cst.If) and following.orelse is None:
        inner = following.body.body
        if len(inner) == 1 and isinstance(inner[0], cst.SimpleStatementLine):
            return following if installs_plan(inner[0], wrapper) else None
    return None
