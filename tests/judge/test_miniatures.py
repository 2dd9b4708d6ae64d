"""Each defect alone, in a miniature that has no other, and each repair of it."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeAlias

import pytest

from mlagen.codegen.flashinfer.api import PlanApi
from mlagen.codegen.judge import host_syncs, is_note, judge
from tests.judge.miniature import CLEAN, COPIES, STAGES, STREAM, TORCH_OP, changed

Change: TypeAlias = tuple[str, str]

# -- single changes of the miniature: the text that stands there, and what takes its place -----


def instead_of(old: str) -> Change:
    """Leaves `old` out."""
    return (old, "")


def before(anchor: str, *lines: str) -> Change:
    """`lines` before the line that `anchor` begins, at its indentation."""
    indent = anchor[: len(anchor) - len(anchor.lstrip())]
    return (anchor, "".join(f"{indent}{line}\n" for line in lines) + anchor)


NO_STEP = instead_of(" + self.step")
NO_CAST = instead_of(".to(torch.int32)")
HANDED_ON = "            self.indices_updater_decode.update(bs, kv_len_arr_cpu=lens)\n"


def handed_on(line: str) -> Change:
    """The decode lengths reach the planner in another way."""
    return (HANDED_ON, f"            {line}\n")


REPLAY = "        if mode.is_decode_or_idle():\n            lens"
APPLY = "        self.apply_metadata("
GRAPH_KEY = "    def graph_key"
EXCLUDES_DFLASH = ("if spec_info.spec_input_type != Kind.DFLASH_VERIFY:", "if bs:")
ALL_LENGTHS = ("self.verify_lens[:bs] if generic else None", "self.verify_lens[:bs]")
NO_VERIFY = ("self.verify_lens[:bs] if generic else None", "None")
POOL_SIZE = (
    "largest_padded_batch(runner.req_to_token_pool.size)",
    "runner.req_to_token_pool.size",
)
IN_VERIFY = "mode.is_target_verify():\n                verify_w"
CAPTURING = instead_of(
    '    if torch.cuda.is_current_stream_capturing():\n        raise RuntimeError("capture")\n'
)
STEP_CALL = "            call_fn(i, forward_batch)"
STALE = (STEP_CALL, "            call_fn(i, forward_batch.decode_seq_lens_cpu)")

PINNED = "self._pin_memory_int_workspace_buffer"
REUSES_BUFFER = ("        slot.buffer,\n", f"        {PINNED},\n")
NO_EVENT = (
    REUSES_BUFFER,
    instead_of("    slot = self.ring.slot()\n"),
    instead_of("    slot.event.record()\n"),
)
COMPARE = "    compare_grid(plan_info)\n"
EAGER_DECODE = "                spec_info=forward_batch.spec_info,\n"

#: name -> (changes, FlashInfer, what is found; `?` marks a note)
DEFECTS: dict[str, tuple[tuple[Change, ...], PlanApi | None, list[str]]] = {
    "d1": (NO_EVENT, COPIES, ["d1-pinned-race"]),
    "d1 where FlashInfer stages": (NO_EVENT, STAGES, []),
    "d1 with no FlashInfer known": (NO_EVENT, None, []),
    "d1 guarded by an event": ((REUSES_BUFFER,), COPIES, []),
    "d1 with the wrapper's buffer replaced": (
        (*NO_EVENT, before("    compare_grid(", f"{PINNED} = fresh()")),
        COPIES,
        [],
    ),
    "d1 reached by direct calls only": (
        (
            *NO_EVENT,
            (
                "decode_wrapper.plan = partial(host_decode_plan, decode_wrapper)",
                "keep(decode_wrapper)",
            ),
        ),
        COPIES,
        ["d1-pinned-race?"],
    ),
    "d1 through the stock plan": (
        (
            (
                EAGER_DECODE + "            )\n",
                EAGER_DECODE + "            )\n"
                "        else:\n"
                "            lens = forward_batch.seq_lens_cpu.int()\n"
                "            self.indices_updater_prefill.update(kv_len_arr_cpu=lens)\n",
            ),
        ),
        COPIES,
        ["d1-pinned-race"],
    ),
    "d2 replay": ((NO_STEP,), STAGES, ["d2-draft-lengths"]),
    "d2 added in place": (
        (NO_STEP, before(HANDED_ON, "lens += self.step")),
        STAGES,
        [],
    ),
    "d2 added by a method": (
        ((".to(torch.int32) + self.step", ".to(torch.int32).add(self.step)"),),
        STAGES,
        [],
    ),
    "d2 added to a slice is not added to the length": (
        (("seq_lens_cpu[:bs].to(torch.int32) + self.step", "seq_lens_cpu[: bs + 1].int()"),),
        STAGES,
        ["d2-draft-lengths"],
    ),
    "d2 added where the steps are driven": (
        (
            NO_STEP,
            before(STEP_CALL, "self.plan_step(kv_len_arr_cpu=forward_batch.seq_lens_cpu + i + 1)"),
            handed_on("self.indices_updater_decode.update(bs, kv_len_arr_cpu=lens.int())"),
            NO_CAST,
        ),
        STAGES,
        ["d6-int64-lengths"],
    ),
    "d2 eager": ((instead_of(EAGER_DECODE),), STAGES, ["d2-draft-lengths"]),
    "d2 in a file without draft steps": (
        (NO_STEP, ("            forward_batch.spec_info.kv_indptr = ", "            indptr = ")),
        STAGES,
        [],
    ),
    "d3 install": (
        (EXCLUDES_DFLASH, ("partial(host_verify_plan, ", "partial(host_decode_plan, ")),
        STAGES,
        ["d3-verify-twice"],
    ),
    "d3 lengths": ((ALL_LENGTHS,), STAGES, ["d3-verify-twice"]),
    "d3 in a file that knows no DFLASH": (
        (
            ALL_LENGTHS,
            EXCLUDES_DFLASH,
            ("!= Kind.DFLASH_VERIFY\n            window", "!= Kind.OTHER\n            window"),
            ("spec_info.ragged_verify_layout is None", "True"),
        ),
        STAGES,
        [],
    ),
    "d4": (
        (('device="cpu")', 'device="cpu", pin_memory=True)'),),
        STAGES,
        ["d4-reused-buffers?"],
    ),
    "d5 dropped": (
        (("    plan_info = self._cached", "    self._cached"), instead_of(COMPARE)),
        STAGES,
        ["d5-frozen-grid?"],
    ),
    "d5 captured draft-extend": (
        ((IN_VERIFY, IN_VERIFY.replace("():", "() or mode.is_draft_extend():")),),
        STAGES,
        ["d5-frozen-grid?"],
    ),
    "d5 draft-extend ruled out": (
        ((IN_VERIFY, IN_VERIFY.replace("():", "() and not mode.is_draft_extend():")),),
        STAGES,
        [],
    ),
    "d6": ((NO_CAST,), COPIES, ["d6-int64-lengths"]),
    "d6 where stock plan checks": ((NO_CAST,), STAGES, ["d6-int64-lengths"]),
    "d6 cast by keyword": (((".to(torch.int32)", ".to(dtype=torch.int32)"),), COPIES, []),
    "d6 cast to int64": (
        ((".to(torch.int32)", ".to(torch.int64)"),),
        COPIES,
        ["d6-int64-lengths"],
    ),
    "d6 cast before": (
        (NO_CAST, before(REPLAY, "seq_lens_cpu = seq_lens_cpu.int()")),
        COPIES,
        [],
    ),
    "d6 no array handed on": (
        (NO_CAST, handed_on("self.indices_updater_decode.update(bs, **self.kwargs)")),
        COPIES,
        [],
    ),
    "d6 under a key": (
        (NO_CAST, handed_on('self.kwargs["kv_len_arr_cpu"] = lens')),
        COPIES,
        ["d6-int64-lengths"],
    ),
    "d6 in a dict": (
        (NO_CAST, handed_on('self.kwargs.update({"kv_len_arr_cpu": lens})')),
        COPIES,
        ["d6-int64-lengths"],
    ),
    "d6 by position": (
        (NO_CAST, handed_on("self.wrapper.plan(qo_cpu, kv_indptr_cpu, kv_indices, lens)")),
        COPIES,
        ["d6-int64-lengths"],
    ),
    "d6 in a direct call": (
        (NO_CAST, handed_on("host_decode_plan(self.wrapper, qo_cpu, indptr_cpu, pages, lens)")),
        COPIES,
        ["d6-int64-lengths"],
    ),
    "d7 heads": ((instead_of("64 % num_heads or "),), STAGES, ["d7-unchecked-limits?"]),
    "d7 items": (
        (instead_of(" or kv_len_arr_cpu.numel() > 16384"),),
        STAGES,
        ["d7-unchecked-limits?"],
    ),
    "d7 a named bound": ((("> 16384", "> MAX_WORK_ITEMS"),), STAGES, []),
    "d8": (
        (
            before(
                GRAPH_KEY,
                "def dflash_arrays(self, bs, seq_lens_cpu, spec_info):",
                "    if spec_info.spec_input_type != Kind.DFLASH_VERIFY:",
                "        return None",
                "    lens = seq_lens_cpu[:bs].to(torch.int32)",
                '    return {"kv_len_arr_cpu": lens}',
            ),
        ),
        STAGES,
        ["d8-dflash-padding?"],
    ),
    "d9": ((POOL_SIZE,), STAGES, ["d9-buffer-size"]),
    "d9 never filled": (
        (
            POOL_SIZE,
            instead_of("            self.verify_lens[:bs] = seq_lens_cpu[:bs] + window\n"),
            NO_VERIFY,
        ),
        STAGES,
        [],
    ),
    "d10": ((before(REPLAY, "assert seq_lens_cpu is not None"),), STAGES, ["d10-assert"]),
    "d10 at capture": (
        (
            before(
                "            if mode.is_decode_or_idle():\n                decode_w",
                "assert forward_batch.seq_lens_cpu is None",
            ),
        ),
        STAGES,
        [],
    ),
    "d11": ((CAPTURING,), STAGES, ["d11-frozen-plan"]),
    "d11 in a release that does not capture the step": (
        (CAPTURING, instead_of("        self.attn_backend_list = self.attn_backends\n")),
        STAGES,
        [],
    ),
    "stale, with verify arrays": ((STALE,), STAGES, ["stale-verify-lengths"]),
    "stale, verify planned from the device": (
        (STALE, NO_VERIFY),
        STAGES,
        ["stale-verify-lengths?"],
    ),
}


def codes(source: bytes, api: PlanApi | None) -> list[str]:
    return [
        f"{problem.code}?" if is_note(problem) else problem.code
        for problem in judge(source, "back/end.py", api)
    ]


@pytest.mark.parametrize("api", [COPIES, STAGES, None], ids=["copies", "stages", "unknown"])
def test_nothing_is_found_where_nothing_is_wrong(api: PlanApi | None) -> None:
    assert codes(CLEAN.encode(), api) == []


@pytest.mark.parametrize("name", DEFECTS)
def test_defects(name: str) -> None:
    changes, api, expected = DEFECTS[name]
    assert codes(changed(*changes), api) == expected


# -- does a plan fit the FlashInfer at hand ----------------------------------------------------

CALL = "    plan_info = self._cached_module.plan(\n"
LAST = "        CAUSAL,\n    )\n    slot"
TAKES = "kv_len_arr_cpu, num_heads, head_dim_ckv\n):\n    backend"


def called(old: str, new: str) -> Change:
    """The private call in another form."""
    return (CALL, CALL.replace(old, new))


def ends(*lines: str) -> Change:
    """Other last arguments of the private call."""
    return (LAST, "".join(f"        {line},\n" for line in lines) + "    )\n    slot")


def takes(*names: str) -> Change:
    """More parameters of the plan."""
    return (TAKES, TAKES.replace("ckv\n", f"ckv, {', '.join(names)}\n"))


def wants(*arguments: str, **changes: object) -> PlanApi:
    """COPIES with other arguments in its private call."""
    call = replace(COPIES.call, arguments=arguments)
    return replace(COPIES, call=call, **changes)  # type: ignore[arg-type]


STAGED = ".plan_with_staged_workspace_bytes("
WANTED = COPIES.call.arguments
EAGER = (
    "decode_wrapper = BatchMLAPagedAttentionWrapper(self.workspace, use_cuda_graph=True)",
    "decode_wrapper = BatchMLAPagedAttentionWrapper(self.workspace)",
)
SETS_ALL = (
    COMPARE,
    COMPARE + "    backend._causal, backend._page_size = causal, page_size\n"
    "    setattr(backend, '_sm_scale', sm_scale)\n"
    "    backend._kv_indices_buf = kv_indices\n"
    "    backend._plan_info = plan_info\n",
)
TAKES_STATE = takes("head_dim_kpe", "page_size", "causal", "sm_scale")
ON_WRAPPER = ('backend = getattr(self, "_planned_backend", self)\n', "backend = self\n")
IN_TRY = (CALL, "    try:\n     plan_info = self._cached_module.plan(\n")


def after_try(*lines: str) -> Change:
    return (
        LAST,
        "        CAUSAL,\n     )\n    except Exception as error:\n"
        + "".join(f"        {line}\n" for line in lines)
        + "    slot",
    )


FIT: dict[str, tuple[tuple[Change, ...], PlanApi, list[str]]] = {
    "one argument too few": ((ends(),), COPIES, ["plan-arguments"]),
    "FlashInfer wants one more": ((), wants(*WANTED, "num_ctas"), ["plan-arguments"]),
    "swapped in the file": (
        (
            (
                "        num_heads,\n        head_dim_ckv,\n        C",
                "        head_dim_ckv,\n        num_heads,\n        C",
            ),
        ),
        COPIES,
        ["plan-arguments"],
    ),
    "swapped in FlashInfer": (
        (),
        wants(*WANTED[:3], WANTED[4], WANTED[3], *WANTED[5:]),
        ["plan-arguments"],
    ),
    "by keyword": ((ends("causal=CAUSAL"),), COPIES, ["plan-arguments"]),
    "by keyword of a torch operator": (
        (called(".plan(", ".plan.default("), ends("causal=CAUSAL")),
        TORCH_OP,
        [],
    ),
    "hidden behind a star": (
        ((CALL, "    plan_info = self._cached_module.plan(*packed)\n    other(\n"),),
        COPIES,
        ["plan-arguments?"],
    ),
    "a star of what stands above": (
        (
            (CALL, "    packed = (\n"),
            (LAST, LAST.replace("slot", "plan_info = self._cached_module.plan(*packed)\n    slot")),
        ),
        COPIES,
        [],
    ),
    "parameters in another order than plan's": (
        (
            (
                f"self, qo_indptr_cpu, kv_indptr_cpu, kv_indices, {TAKES}",
                f"self, kv_indptr_cpu, qo_indptr_cpu, kv_indices, {TAKES}",
            ),
        ),
        COPIES,
        ["plan-arguments"],
    ),
    "a stock call in another order": (
        (before(APPLY, "self.eager_wrapper.plan(kv_indptr, qo_indptr)"),),
        COPIES,
        ["plan-arguments"],
    ),
    "a stock call with an unknown keyword": (
        (before(APPLY, "self.eager_wrapper.plan(qo_indptr=a, split=1)"),),
        COPIES,
        ["plan-arguments"],
    ),
    "a stock call with too much": (
        (before(APPLY, f"self.eager_wrapper.plan({', '.join('abcdefghijklmno')})"),),
        COPIES,
        ["plan-arguments"],
    ),
    "a stock call as it should be": (
        (before(APPLY, "self.eager_wrapper.plan(qo_indptr, kv_indptr, kv_indices, lens, 16)"),),
        COPIES,
        [],
    ),
    "default": ((called(".plan(", ".plan.default("),), COPIES, ["plan-default"]),
    "default missing": ((), TORCH_OP, ["plan-default"]),
    "default wanted and there": ((called(".plan(", ".plan.default("),), TORCH_OP, []),
    "stream": ((ends("CAUSAL", "stream"),), COPIES, ["plan-stream"]),
    "stream missing": ((), STREAM, ["plan-stream"]),
    "stream wanted and there": ((ends("CAUSAL", "stream"),), STREAM, []),
    "stream and an argument too few": (
        (ends("stream"),),
        COPIES,
        ["plan-arguments", "plan-stream"],
    ),
    "below the proxy": ((called("module.plan", "module._module.plan"),), STAGES, ["plan-proxy"]),
    "a proxy that is not there": (
        (called("module.plan", "module._module.plan"),),
        COPIES,
        ["plan-proxy"],
    ),
    "staged call that is not there": ((called(".plan(", STAGED),), COPIES, ["plan-proxy"]),
    "staged call": (
        ((CALL, CALL.replace(".plan(", STAGED).replace("info", "info, staged")),),
        STAGES,
        [],
    ),
    "staged call, both results taken for one": (
        (called(".plan(", STAGED),),
        STAGES,
        ["plan-state"],
    ),
    "through aliases": (
        (
            (CALL, "    module = self._cached_module\n    call = module.plan\n    info = call(\n"),
            ends(),
        ),
        COPIES,
        ["plan-arguments"],
    ),
    "eager, all set": ((EAGER, TAKES_STATE, SETS_ALL), STAGES, []),
    "eager, nothing set": ((EAGER,), STAGES, ["plan-state"]),
    "eager, set on the wrapper": (
        (EAGER, TAKES_STATE, SETS_ALL, ON_WRAPPER),
        STAGES,
        ["plan-state"],
    ),
    "eager, set on the wrapper, where it belongs": (
        (EAGER, TAKES_STATE, SETS_ALL, ON_WRAPPER),
        COPIES,
        [],
    ),
    "eager by a direct call": (
        (before(APPLY, "host_decode_plan(self.eager_wrapper, a, b, c, d, 16, 512)"),),
        COPIES,
        ["plan-state"],
    ),
    "replay, set on the wrapper": (
        (TAKES_STATE, SETS_ALL, ON_WRAPPER),
        STAGES,
        ["plan-state?"],
    ),
    "replay, an argument not kept": (
        (TAKES_STATE,),
        COPIES,
        ["plan-state?"],
    ),
    "no planned back end here": (
        (called("self._cached", "self._planned_backend._cached"),),
        COPIES,
        ["plan-state"],
    ),
    "planned back end": ((called("self._cached", "self._planned_backend._cached"),), STAGES, []),
    "exceptions swallowed": (
        (IN_TRY, after_try("plan_info = None")),
        COPIES,
        ["swallowed-exception"],
    ),
    "exceptions raised again": (
        (IN_TRY, after_try('raise RuntimeError(f"{error}")')),
        COPIES,
        [],
    ),
}


@pytest.mark.parametrize("name", FIT)
def test_fit(name: str) -> None:
    changes, api, expected = FIT[name]
    found = codes(changed(*changes), api)
    assert sorted(code for code in found if code.startswith(("plan-", "swallowed"))) == expected


@pytest.mark.parametrize(
    "plan",
    [
        "wrapper.plan = lambda *a: wrapper._cached_module.plan(a[0])",
        "self.wrapper._cached_module.plan(a)",
        "setattr(wrapper, 'plan', lambda a: getattr(wrapper, '_cached_module').plan(a))",
    ],
    ids=["lambda", "inline", "setattr and getattr"],
)
def test_a_plan_needs_no_name(plan: str) -> None:
    source = changed(before(APPLY, plan))
    (problem,) = [p for p in judge(source, "f.py", COPIES) if p.code == "plan-arguments"]
    assert "passes 1 arguments, FlashInfer 0.6.17 passes 9" in problem.message


def test_a_finding_names_place_and_remedy() -> None:
    source = changed(NO_STEP)
    (problem,) = judge(source, "back/end.py", STAGES)
    line = 1 + source[: source.index(b"lens = seq_lens_cpu[:bs].to")].count(b"\n")
    assert str(problem).startswith(f"back/end.py:{line}: d2-draft-lengths: replay of a draft step")
    assert problem.hint
    assert not is_note(problem)


@pytest.mark.parametrize(
    ("statement", "kind"),
    [
        ("n = forward_batch.seq_lens.sum().item()", "item"),
        ("n = forward_batch.seq_lens.cpu()", "cpu"),
        ("n = forward_batch.seq_lens.tolist()", "tolist"),
        ("n = forward_batch.seq_lens.to('cpu')", "to-cpu"),
        ("n = forward_batch.seq_lens.to(device='cpu')", "to-cpu"),
        ("n = kv_indices[:kv_indptr[-1]]", "device-slice"),
        ("self.eager_wrapper.plan(qo, kv, indices, lens)", "stock-plan"),
        ("n = forward_batch.seq_lens_cpu.tolist()", None),
        ("n = kv_indices[:kv_indptr_cpu[-1]]", None),
        ("n = kv_indices[:buffer.shape[1]]", None),
        ("n = forward_batch.seq_lens.to('cpu', non_blocking=True)", None),
        ("n = forward_batch.seq_lens.to('cuda')", None),
        ("self.eager_wrapper.plan(qo_indptr_cpu=qo)", None),
        ("self.eager_wrapper.plan(kw['qo_indptr_cpu'], a, b, c)", None),
    ],
)
def test_host_syncs(statement: str, kind: str | None) -> None:
    source = changed(
        before("        if forward_batch.forward_mode.is_decode_or_idle():\n", statement)
    )
    found = host_syncs(source, "f.py")
    if kind is None:
        assert found == ()
        return
    (sync,) = found
    assert (sync.kind, sync.path) == (kind, "eager")
    assert sync.where == "FlashInferMLAAttnBackend.init_forward_metadata"
    assert source.splitlines()[sync.line - 1].decode().strip() == statement
    assert sync.expression.removesuffix("(...)") in statement


@pytest.mark.parametrize(
    ("anchor", "path"),
    [
        ("        rows = largest", "init"),
        ("            if mode.is_decode_or_idle():\n                decode_w", "capture"),
        ("        self.apply_metadata(bs", "replay"),
    ],
)
def test_host_syncs_tell_when_they_run(anchor: str, path: str) -> None:
    (sync,) = host_syncs(changed(before(anchor, "n = lens.item()")), "f.py")
    assert sync.path == path
