"""Decode capture: SGLang's own plan function gives way to ours.

Replaced: `decode_wrapper.plan = partial(fast_mla_decode_plan, decode_wrapper)`. The wrapper
keeps FlashInfer's plan; ours is called by the updater with what the capture froze.
"""

from __future__ import annotations

from ..edits import Edit, instead
from . import Context


def edits(context: Context) -> list[Edit]:
    backend = context.backend
    site, install = backend.decode_install
    backend.require_names(site.function, "bs", "seq_lens", "spec_info")
    backend.refuse_half_replaced()
    wrapper = site.argument("decode_wrapper")
    assert wrapper is not None
    name = backend.source.code(wrapper)
    mine = [i for i in backend.plan_installs if backend.source.code(i).startswith(f"{name}.plan")]
    device = bool(context.device & {"decode", "draft-decode"})
    backend.source.exactly_one(mine, f"replacement of {name}.plan")
    lines = context.lines(
        "capture_decode",
        calls=("mlagen_capture_decode",),
        wrapper=name,
        heads=backend.heads_of("decode-updater-class", "wrapper"),
        page_table=backend.page_table() if device else None,
    )
    return [instead(backend.source, "capture-decode", install, install, lines)]
