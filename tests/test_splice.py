"""locate and splice on miniatures: golden files, forks that go right, forks that are refused.

Golden files: splice/<shape>/after.py. To write them anew, set MLAGEN_UPDATE_SNAPSHOTS=1, and read
the difference.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlagen.codegen.errors import DriftError, EditedError, MlagenError
from mlagen.codegen.flashinfer.api import PlanApi
from mlagen.codegen.patch import prepare, select
from mlagen.codegen.provenance import find_regions, remove_regions
from mlagen.codegen.sglang.find import FoundTarget
from mlagen.codegen.sglang.locate import locate
from mlagen.codegen.sglang.source import Source
from tests.judge.miniature import COPIES, STAGES
from tests.splice.shapes import (
    EXPECTED_SHAPE,
    FOLDER,
    SHAPES,
    after,
    before,
    fork,
    line_of,
    spec,
    spliced,
)
from tests.splice.wiring import wiring

UPDATE = os.environ.get("MLAGEN_UPDATE_SNAPSHOTS") == "1"

#: What a file of the full structure calls: each emitted function once, extends at two sites.
FULL = {
    "mlagen_bound_arrays": 1,
    "mlagen_capture_decode": 1,
    "mlagen_capture_verify": 1,
    "mlagen_request_decode": 1,
    "mlagen_request_draft_eager": 1,
    "mlagen_request_extend": 2,
    "mlagen_request_verify": 1,
    "mlagen_request_verify_eager": 1,
}
#: From 0.5.14 on the draft-extend of the first EAGLE worker is gone.
ONE_EXTEND = {**FULL, "mlagen_request_extend": 1}
#: From 0.5.22 on a method fills verify's indices, and the plan copies them.
COPIED = {name: count for name, count in ONE_EXTEND.items() if name != "mlagen_bound_arrays"}
WIRING = {
    "no-verify": {"mlagen_capture_decode": 1, "mlagen_request_decode": 1},
    "upstream": ONE_EXTEND,
    "upstream-keyword-only": COPIED,
}


# -- golden files ------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
def test_golden(shape: str) -> None:
    patched = spliced(before(shape), f"{shape}.py")
    if UPDATE:
        (FOLDER / shape / "after.py").write_bytes(patched)
    assert patched == after(shape)


@pytest.mark.parametrize("shape", SHAPES)
def test_shape_is_recognised_and_wired(shape: str) -> None:
    target = locate(Source.parse(before(shape), "x.py"), spec())
    assert target.features.shape == EXPECTED_SHAPE[shape]
    assert wiring(after(shape)) == WIRING.get(shape, FULL)


def test_every_shape_has_its_place() -> None:
    assert set(SHAPES) == set(EXPECTED_SHAPE)


@pytest.mark.parametrize("shape", SHAPES)
def test_golden_restores(shape: str) -> None:
    assert remove_regions(after(shape)) == before(shape)


def test_golden_line_ends_are_the_files_own() -> None:
    crlf = after("crlf")
    assert crlf.count(b"\r\n") == crlf.count(b"\n")
    assert b"\r" not in after("pair")


def test_tabs_stay_the_outer_indentation() -> None:
    for region in find_regions(after("tabs")):
        if region.site not in ("header", "plans", "multi-step"):
            assert set(region.indent) == {"\t"}
            assert all(line.startswith(region.indent) for line in region.emitted if line)


def as_it_is(data: bytes) -> bytes:
    return data


def with_bom(data: bytes) -> bytes:
    return b"\xef\xbb\xbf" + data


def with_crlf(data: bytes) -> bytes:
    return data.replace(b"\r\n", b"\n").replace(b"\n", b"\r\n")


def with_mixed_line_ends(data: bytes) -> bytes:
    lines = data.replace(b"\r\n", b"\n").split(b"\n")
    return b"".join(
        line + (b"\r\n" if number % 3 else b"\n") for number, line in enumerate(lines[:-1])
    )


def with_cr(data: bytes) -> bytes:
    return data.replace(b"\r\n", b"\n").replace(b"\n", b"\r")


def without_final_line_end(data: bytes) -> bytes:
    return data.rstrip(b"\r\n")


def with_trailing_blanks(data: bytes) -> bytes:
    return re.sub(rb"([,(:])(\r?\n)", rb"\1 \t\2", data)


def with_form_feeds(data: bytes) -> bytes:
    return re.sub(rb"(?m)^(class|def) ", b"\x0c\\1 ", data)


BYTES = (
    as_it_is,
    with_bom,
    with_crlf,
    with_mixed_line_ends,
    with_cr,
    without_final_line_end,
    with_trailing_blanks,
    with_form_feeds,
)


@pytest.mark.parametrize("change", BYTES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("shape", ["no-verify", "one-line", "tabs", "upstream-keyword-only"])
def test_unpatch_restores_bytes(shape: str, change: Callable[[bytes], bytes]) -> None:
    data = change(before(shape))
    patched = spliced(data)
    assert patched != data
    assert remove_regions(patched) == data
    assert wiring(patched) == WIRING.get(shape, FULL)


def test_a_file_in_another_encoding() -> None:
    data = b"# -*- coding: latin-1 -*-\n" + fork(
        "one-line", ("raise ValueError(forward_mode)", 'raise ValueError("ü", "ÿ")'), times=2
    ).decode().encode("latin-1")
    data = data.replace(b"use_ragged=False, spec_info=None)", b'spec_info="\xfc", **rest)', 1)
    patched = spliced(data)
    assert remove_regions(patched) == data
    assert b'spec_info="\xfc", mlagen_request: Optional["MlagenRequest"] = None, **rest)' in patched


def test_an_edit_that_would_move_the_coding_line_is_refused() -> None:
    data = b"import os\n# coding: utf-8\n" + fork(
        "pair", ("from __future__ import annotations\n", "")
    )
    with pytest.raises(DriftError, match="coding line"):
        spliced(data)


@pytest.mark.parametrize(
    ("shape", "api"),
    [(shape, (COPIES, STAGES)[number % 2]) for number, shape in enumerate(SHAPES)],
    ids=SHAPES,
)
def test_the_whole_patch_of_a_miniature(shape: str, api: PlanApi) -> None:
    """With the real plan functions: every name is defined, a second patch changes nothing."""
    data = before(shape)
    patched = prepare(FoundTarget(data, "fork.py", None), spec(), api).patched
    assert wiring(patched) == WIRING.get(shape, FULL)
    assert not prepare(FoundTarget(patched, "fork.py", None), spec(), api).changes
    assert remove_regions(patched) == data
    assert_no_new_names(patched, data)


def assert_no_new_names(patched: bytes, original: bytes) -> None:
    """Nothing is undefined, unused or bound twice that was not before."""
    found = set(undefined_names(patched))
    assert not found or found <= set(undefined_names(original))


def undefined_names(data: bytes) -> list[str]:
    """Names that ruff says are used and not defined, imported and not used, or bound twice."""
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--no-cache"]
    command += ["--select", "F401,F811,F821,F841", "--output-format", "concise", "-"]
    ran = subprocess.run(command, input=data, capture_output=True, check=False)
    assert ran.returncode in (0, 1), ran.stderr.decode()
    return [
        line.split(": ", 1)[1] for line in ran.stdout.decode().splitlines() if line.startswith("-:")
    ]


@pytest.mark.parametrize("shape", ["pair", "shared-apply", "upstream-keyword-only"])
@pytest.mark.parametrize("name", [variant.name for variant in spec().variants])
def test_one_variant_alone(shape: str, name: str) -> None:
    chosen = select(spec(), [name])
    data = before(shape)
    patched = prepare(FoundTarget(data, "fork.py", None), chosen, COPIES).patched
    assert remove_regions(patched) == data
    assert_no_new_names(patched, data)
    sites = {region.site for region in find_regions(patched)}
    decode = {"replay-decode", "capture-decode", "decode-updater-plan"}
    needs = {
        "decode": decode,
        "draft-decode": decode | {"draft-step", "eager-draft", "multi-step"},
        "verify": {"capture-verify", "replay-verify", "eager-verify", "prefill-updater-plan"},
        "draft-extend": {"eager-extend", "prefill-updater-plan"},
        "dcp": decode if shape != "pair" else set(),
    }[name]
    assert needs <= sites
    foreign = {"verify", "extend"} if needs & decode else {"decode", "draft-step", "multi-step"}
    if name in ("verify", "draft-extend", "decode"):
        assert not [site for site in sites for word in foreign if word in site.split("-")]


# -- forks that go right ------------------------------------------------------------------------


@dataclass(frozen=True)
class Fork:
    """One fork: how it is made, what the patched file calls."""

    make: Callable[[], bytes]
    calls: dict[str, int] = field(default_factory=lambda: FULL)


def renamed(shape: str, **names: str) -> bytes:
    source = before(shape).decode()
    for old, new in names.items():
        source, count = re.subn(rf"\b{old}\b", new, source)
        assert count
    return source.encode()


def moved(first: str, last: str, to: str) -> bytes:
    """The pair with what stands from `first` to `last` in front of `to`."""
    source = before("pair").decode()
    start = source.index(first)
    end = source.index(last) if last else len(source)
    part = source[start:end].rstrip("\n") + "\n\n\n"
    rest = source[:start] + source[end:]
    at = rest.index(to)
    return (rest[:at] + part + rest[at:]).rstrip("\n").encode() + b"\n"


VERIFY_ELIF = "        elif mode.is_target_verify():\n"
REPLAY_ELIF = "        elif forward_mode.is_target_verify():\n            self.indices"
PASSED_ON = """\
            prefill_wrapper_paged,
            rows,
            seq_lens,
            prefix_lens,
            use_ragged,
            spec_info,
        )
"""
PARAMETERS = """\
        prefill_wrapper_paged,
        use_ragged=False,
        spec_info=None,
    ):
"""


def inside(head: bytes, *behind: bytes) -> bytes:
    """The pair with the paged plan inside of a compound statement, and lines behind it."""

    def wrapped(found: re.Match[bytes]) -> bytes:
        indent = found[1]
        tail = b"".join(b"\n" + indent + line for line in behind)
        return indent + head + b"\n" + indent + b"    " + found[2] + tail

    return re.sub(rb"( +)(wrapper_paged\.plan\([^)]*\))", wrapped, before("pair"))


def parameters(text: str) -> Callable[[], bytes]:
    return lambda: fork("pair", (PARAMETERS, text))


def arguments(text: str) -> Callable[[], bytes]:
    return lambda: fork("pair", (PASSED_ON, text))


RIGHT: dict[str, Fork] = {
    "a positional parameter is inserted in update": Fork(
        parameters("        window,\n" + PARAMETERS)
    ),
    "the capture and replay methods have other names": Fork(
        lambda: renamed("pair", capture_graph="record", replay_graph="again")
    ),
    "the shared method has another name": Fork(lambda: renamed("shared-apply", plan_graph="lay")),
    "the dictionary of wrappers has another name": Fork(
        lambda: fork("pair", ("self.graphs", "self.by_batch.wrappers"), times=7)
    ),
    "another branch among the modes": Fork(
        lambda: fork(
            "pair",
            (
                VERIFY_ELIF,
                "        elif mode.is_mixed():\n"
                "            self.indices_updater_prefill.update(\n"
                "                forward_batch.rows,\n"
                "                prefill_wrapper_paged=self.mixed,\n"
                "            )\n" + VERIFY_ELIF,
            ),
            (
                REPLAY_ELIF,
                "        elif forward_mode.is_mixed():\n            self.mix(bs)\n" + REPLAY_ELIF,
            ),
        )
    ),
    "comments and blank lines between SGLang's own": Fork(
        lambda: fork(
            "pair",
            (
                "            assert seq_lens_cpu is not None\n",
                "            # one\n\n            assert seq_lens_cpu is not None  # two\n\n"
                "            # three\n",
            ),
            ("kv_len_arr_cpu})\n\n", "kv_len_arr_cpu})\n            # four\n"),
        )
    ),
    "a subclass of the back end in the same file": Fork(
        lambda: fork(
            "pair",
            (
                "class FlashInferMLAIndicesUpdaterDecode:",
                "class CutlassBackend(FlashInferMLAAttnBackend):\n"
                "    def init_forward_metadata(self, forward_batch):\n"
                "        self.indices_updater_decode.update(\n"
                "            forward_batch.rows,\n"
                "            decode_wrapper=self.decode_wrapper,\n"
                "            init_metadata_replay=True,\n"
                "        )\n\n\n"
                "class FlashInferMLAIndicesUpdaterDecode:",
            ),
        )
    ),
    "the updaters in front of the back end": Fork(
        lambda: moved(
            "class FlashInferMLAIndicesUpdaterDecode",
            "class FlashInferMLAMultiStepDraftBackend",
            "class FlashInferMLAAttnBackend",
        )
    ),
    "the plan function in front of all": Fork(
        lambda: moved("def fast_mla_decode_plan", "", "class FlashInferMLAAttnBackend")
    ),
    "the updater is called with keywords": Fork(
        arguments(
            "            wrapper_paged=prefill_wrapper_paged,\n            req_pool_indices=rows,\n"
            "            paged_kernel_lens=seq_lens,\n            prefix_lens=prefix_lens,\n"
            "            use_ragged=use_ragged,\n            spec_info=spec_info,\n        )\n"
        )
    ),
    "the closing bracket behind the last argument": Fork(
        arguments(PASSED_ON.replace("spec_info,\n        )", "spec_info)"))
    ),
    "no comma behind the last argument": Fork(
        arguments(PASSED_ON.replace("spec_info,\n", "spec_info  # last\n"))
    ),
    "comments behind the last argument": Fork(
        arguments(PASSED_ON.replace("spec_info,\n", "spec_info,  # last\n            # of all\n"))
    ),
    "the arguments are unpacked": Fork(
        arguments(
            "            prefill_wrapper_paged,\n"
            "            *self.rest(rows, spec_info),\n        )\n"
        )
    ),
    "the closing bracket behind the last parameter": Fork(
        parameters(PARAMETERS.replace("spec_info=None,\n    )", "spec_info=None)"))
    ),
    "no comma behind the last parameter": Fork(
        parameters(PARAMETERS.replace("spec_info=None,", "spec_info=None"))
    ),
    "comments behind the last parameter": Fork(
        parameters(
            PARAMETERS.replace("spec_info=None,", "spec_info=None,  # last\n        # of all")
        )
    ),
    "an annotation over two lines": Fork(
        parameters(
            "        prefill_wrapper_paged, use_ragged: bool = False, spec_info: Union[\n"
            "            A, B] = None\n    ) -> None:\n"
        )
    ),
    "keyword-only parameters behind all others": Fork(
        parameters("        prefill_wrapper_paged,\n        *more,\n        last=None,\n    ):\n")
    ),
    "positional parameters behind all others": Fork(
        parameters(PARAMETERS.replace("    ):", "        *more,\n    ):"))
    ),
    "a plan inside of with": Fork(lambda: inside(b'with traced("plan"):')),
    "a plan inside of try, with a finally": Fork(
        lambda: inside(b"try:", b"finally:", b"    self.n += 1")
    ),
    "a capture inside of with": Fork(
        lambda: re.sub(
            rb"(?s)(            self\.indices_updater_decode\.update\(\n                rows,\n.*?"
            rb"decode_wrapper\.plan = [^\n]*\n)",
            lambda found: (
                b"            with self.pool:\n" + re.sub(rb"(?m)^(?=.)", b"    ", found[1])
            ),
            before("pair"),
            count=1,
        )
    ),
    "an argument of the plan over several lines": Fork(
        lambda: fork(
            "pair",
            (
                "                self.q_indptr,\n",
                "                self.q_indptr[\n                    : len(rows) + 1  # all\n"
                "                ],\n",
            ),
        )
    ),
    "an argument broken inside of its brackets": Fork(
        lambda: fork(
            "pair",
            (
                "                self.q_indptr,\n",
                "                self.q_indptr\n                + self.shift  # moved\n"
                "                - 1,\n",
            ),
        )
    ),
    "the wrapper of a replay over several lines": Fork(
        lambda: fork(
            "pair",
            (
                "decode_wrapper=self.graphs[bs],",
                "decode_wrapper=self.graphs[\n                    bs  # rows\n                ],",
            ),
        )
    ),
    "line continuations": Fork(
        lambda: fork("pair", ("call_fn(i, forward_batch)\n", "call_fn(i, \\\n   forward_batch)\n"))
    ),
    "strings with line ends that Python does not know": Fork(
        lambda: fork(
            "pair",
            ("raise ValueError(forward_mode)", 'raise ValueError("\u2028 \x0b \x1c \x85")'),
            times=2,
        )
    ),
    "a name that mlagen imports is bound in TYPE_CHECKING alone": Fork(
        lambda: fork(
            "pair",
            ("import torch\n", "import torch\n\nif TYPE_CHECKING:\n    from typing import Any\n"),
            ("from typing import Callable\n", "from typing import TYPE_CHECKING, Callable\n"),
        )
    ),
    "partial is imported on a line of its own": Fork(
        lambda: fork(
            "pair",
            ("import partial\n", "import (\n    cache,\n    partial,\n)\n"),
            ('"""Plans one model', '"""Plans (cache) one model'),
        )
    ),
    "partial is the only import of its statement": Fork(
        lambda: fork("pair", ("import partial\n", "import (\n    partial,\n)\n"))
    ),
    "the updaters count heads under another name": Fork(
        lambda: renamed("pair", num_local_heads="heads")
    ),
}


@pytest.mark.parametrize("name", RIGHT)
def test_forks_that_go_right(name: str) -> None:
    data = RIGHT[name].make()
    patched = prepare(FoundTarget(data, "fork.py", None), spec(), COPIES).patched
    assert wiring(patched) == RIGHT[name].calls
    assert remove_regions(patched) == data
    assert_no_new_names(patched, data)


def test_heads_are_read_where_the_plan_call_reads_them() -> None:
    patched = spliced(RIGHT["the updaters count heads under another name"].make())
    assert b"num_heads=self.indices_updater_decode.heads," in patched
    assert b"num_heads=self.indices_updater_prefill.heads," in patched


# -- forks that are refused ---------------------------------------------------------------------


@dataclass(frozen=True)
class Refusal:
    """One fork that must be refused: `problems` are (text at whose line it is told, or "" for no
    line; code; message)."""

    make: Callable[[], bytes]
    problems: tuple[tuple[str, str, str], ...]
    error: type[MlagenError] = DriftError


def changed(shape: str, *replacements: tuple[str, str], times: int = 1) -> Callable[[], bytes]:
    return lambda: fork(shape, *replacements, times=times)


def within(first: str, last: str, **names: str) -> Callable[[], bytes]:
    """The pair with names changed from `first` to `last` only."""

    def make() -> bytes:
        source = before("pair").decode()
        start = source.index(first)
        end = source.index(last, start)
        part = source[start:end]
        for old, new in names.items():
            part = re.sub(rf"\b{old}\b", new, part)
        return (source[:start] + part + source[end:]).encode()

    return make


INSTALL = "            decode_wrapper.plan = partial(fast_mla_decode_plan, decode_wrapper)\n"
DECODE_END = "                self.dtype,\n                self.dtype,\n            )\n\n\nclass"
VERIFY_END = "                self.q_dtype,\n                self.dtype,\n            )\n"
HOST_LENGTHS = "            kv_len_arr_cpu = seq_lens_cpu[:bs]\n"
CALL_FN = "            call_fn(i, forward_batch)\n"
NDT = "            ndt = spec_info.draft_token_num\n"
EXTEND_ARRAYS = "            qo_indptr_cpu = kv_indptr_cpu = kv_len_arr_cpu = None\n"
UPSTREAM_INSTALL = """\
            if forward_mode.is_target_verify():
                # From now on without a wait.
                graph_wrapper.plan = partial(fast_mla_prefill_plan, graph_wrapper)
"""
COUNT = "self.stats.count(bs)"
NOT_SGLANGS = f"a statement in front of the decode replay is not one of SGLang's own: {COUNT}"
FOLLOWS = (
    "statements follow {0}.plan(...) in call_begin_forward; a plan that returns in front of it "
    "would skip them"
)
OTHER_INSTALL = (
    "a wrapper's plan is replaced here as well: {0}_wrapper.plan = partial(fast_mla_prefill_plan, "
    "{0}_wrapper); expected only SGLang's own installations"
)
ELSEWHERE = (
    "indices_updater_decode.update is called in lines {line+18}, {line+54}, {line+93}, of which "
    "{line+18}, {line+54}, {line+93} are no plain statements of FlashInferMLAAttnBackend"
)
NO_LOCAL = "{0} no longer has a local or parameter {1}"
PLAN_PARAMETERS = (
    "qo_indptr, kv_indptr, kv_indices, kv_len_arr, num_heads, head_dim_ckv, head_dim_kpe, "
    "page_size, causal, sm_scale, q_data_type, kv_data_type"
)

REFUSED: dict[str, Refusal] = {
    "capture installs no plan": Refusal(
        changed("pair", (INSTALL, "")),
        (
            (
                "            )\n            self.graphs[bs] = decode_wrapper",
                "anchor-missing",
                "looked for `decode_wrapper.plan = partial(...)` behind the capture of decode, "
                "found none",
            ),
        ),
    ),
    "capture installs two plans": Refusal(
        changed("pair", (INSTALL, INSTALL + INSTALL)),
        (
            (
                "decode_wrapper.plan = partial(",
                "anchor-ambiguous",
                "looked for exactly one `decode_wrapper.plan = partial(...)` behind the capture "
                "of decode, found 2 (lines {line}, {line+1})",
            ),
        ),
    ),
    "two decode replays": Refusal(
        changed(
            "pair",
            (
                REPLAY_ELIF,
                "        elif forward_mode.is_idle():\n"
                "            self.indices_updater_decode.update(\n"
                "                decode_wrapper=self.graphs[bs],\n"
                "                init_metadata_replay=True,\n"
                "            )\n" + REPLAY_ELIF,
            ),
        ),
        (
            (
                "self.indices_updater_decode.update(\n                rows[:bs]",
                "anchor-ambiguous",
                "looked for exactly one call of indices_updater_decode.update with "
                "init_metadata_replay=True, found 2 (lines {line}, {line+9})",
            ),
        ),
    ),
    "bs has another name in the replay": Refusal(
        within("    def replay_graph", "class FlashInferMLAIndicesUpdaterDecode", bs="rows_no"),
        (("def replay_graph", "anchor-changed", NO_LOCAL.format("replay_graph", "bs")),),
    ),
    "bs has another name in the capture": Refusal(
        within("    def capture_graph", "    def replay_graph", bs="rows_no"),
        (("def capture_graph", "anchor-changed", NO_LOCAL.format("capture_graph", "bs")),),
    ),
    "forward_batch has another name": Refusal(
        within("    def init_forward_metadata", "    def capture_graph", forward_batch="batch"),
        (
            (
                "def init_forward_metadata",
                "anchor-changed",
                NO_LOCAL.format("init_forward_metadata", "forward_batch"),
            ),
        ),
    ),
    "kv_lens has another name in the updater": Refusal(
        within(
            "class FlashInferMLAIndicesUpdaterDecode",
            "class FlashInferMLAIndicesUpdaterPrefill",
            kv_lens="lengths",
        ),
        (
            (
                "def call_begin_forward",
                "anchor-changed",
                NO_LOCAL.format("call_begin_forward", "kv_lens"),
            ),
        ),
    ),
    "a statement behind decode's plan": Refusal(
        changed("pair", (DECODE_END, DECODE_END.replace("\n\n\n", "\n        self.n += 1\n\n\n"))),
        (("self.n += 1", "anchor-changed", FOLLOWS.format("wrapper")),),
    ),
    "a statement behind the paged plan": Refusal(
        changed("pair", (VERIFY_END, VERIFY_END + "            self.n += 1\n")),
        (("self.n += 1", "anchor-changed", FOLLOWS.format("wrapper_paged")),),
    ),
    "a statement behind all plans": Refusal(
        changed("pair", (VERIFY_END, VERIFY_END + "        self.n += 1\n")),
        (("self.n += 1", "anchor-changed", FOLLOWS.format("wrapper_paged")),),
    ),
    "a plan inside of try, with an else": Refusal(
        lambda: inside(b"try:", b"except ValueError:", b"    pass", b"else:", b"    self.n += 1"),
        (
            (
                "try:",
                "anchor-changed",
                "wrapper_paged.plan(...) stands inside a compound statement that does more than "
                "choose",
            ),
        ),
    ),
    "a plan inside of with, and a statement behind it": Refusal(
        lambda: inside(b'with traced("plan"):', b"    self.n += 1"),
        (("self.n += 1", "anchor-changed", FOLLOWS.format("wrapper_paged")),),
    ),
    "a strange statement in front of decode's arrays": Refusal(
        changed("pair", (HOST_LENGTHS, f"            {COUNT}\n" + HOST_LENGTHS)),
        ((COUNT, "anchor-changed", NOT_SGLANGS),),
    ),
    "a strange statement behind decode's arrays": Refusal(
        changed("pair", ("kv_len_arr_cpu})\n\n", f"kv_len_arr_cpu}})\n            {COUNT}\n\n")),
        ((COUNT, "anchor-changed", NOT_SGLANGS),),
    ),
    "a statement that reads decode's arrays": Refusal(
        changed(
            "pair", (HOST_LENGTHS, HOST_LENGTHS + "            self.stats.add(kv_len_arr_cpu)\n")
        ),
        (
            (
                "self.stats.add(",
                "anchor-changed",
                NOT_SGLANGS.replace(COUNT, "self.stats.add(kv_len_arr_cpu)"),
            ),
        ),
    ),
    "a second statement on the line of the assert": Refusal(
        changed("pair", ("is not None\n", f"is not None; {COUNT}\n")),
        (
            (
                "assert seq_lens_cpu",
                "anchor-changed",
                NOT_SGLANGS.replace(COUNT, f"assert seq_lens_cpu is not None; {COUNT}"),
            ),
        ),
    ),
    "a fork's own change of decode's lengths": Refusal(
        changed(
            "pair",
            (
                HOST_LENGTHS,
                HOST_LENGTHS + "            kv_len_arr_cpu = self.window(kv_len_arr_cpu)\n",
            ),
        ),
        (
            (
                "self.window(",
                "anchor-changed",
                NOT_SGLANGS.replace(COUNT, "kv_len_arr_cpu = self.window(kv_len_arr_cpu)"),
            ),
        ),
    ),
    "a strange statement among verify's arrays": Refusal(
        changed("upstream", (NDT, f"{NDT}            {COUNT}\n")),
        (
            (
                COUNT,
                "anchor-changed",
                f"a statement among the host arrays of the verify replay is not one of SGLang's "
                f"own: {COUNT}",
            ),
        ),
    ),
    "a strange statement among draft-extend's arrays": Refusal(
        changed("upstream", (EXTEND_ARRAYS, f"{EXTEND_ARRAYS}            {COUNT}\n")),
        (
            (
                COUNT,
                "anchor-changed",
                f"a statement among the host arrays of an eager extend is not one of SGLang's own: "
                f"{COUNT}",
            ),
        ),
    ),
    "a strange statement behind draft-extend's arrays": Refusal(
        changed(
            "upstream",
            (
                "kv_len_arr_cpu = self.fast_plan_kv_len_arr_cpu\n",
                f"kv_len_arr_cpu = self.fast_plan_kv_len_arr_cpu\n            {COUNT}\n",
            ),
        ),
        (
            (
                COUNT,
                "anchor-changed",
                f"a statement among the host arrays of an eager extend is not one of SGLang's own: "
                f"{COUNT}",
            ),
        ),
    ),
    "plan is called with an argument more": Refusal(
        changed(
            "pair",
            (
                VERIFY_END,
                VERIFY_END.replace("            )", "                True,\n            )"),
            ),
        ),
        (
            (
                "wrapper_paged.plan(",
                "anchor-changed",
                f"plan is called with True,; expected {PLAN_PARAMETERS}",
            ),
        ),
    ),
    "plan is called with a keyword more": Refusal(
        changed(
            "pair",
            (
                VERIFY_END,
                VERIFY_END.replace(
                    "            )", "                use_profiler=True,\n            )"
                ),
            ),
        ),
        (
            (
                "wrapper_paged.plan(",
                "anchor-changed",
                "plan is called without nothing missing and with use_profiler",
            ),
        ),
    ),
    "plan is called with an argument less": Refusal(
        changed("pair", (VERIFY_END, VERIFY_END.replace("                self.dtype,\n", ""))),
        (
            (
                "wrapper_paged.plan(",
                "anchor-changed",
                "plan is called without kv_data_type and with nothing more",
            ),
        ),
    ),
    "plan is called with arguments unpacked": Refusal(
        changed("pair", (VERIFY_END, "                *self.dtypes,\n            )\n")),
        (
            (
                "wrapper_paged.plan(",
                "anchor-changed",
                f"plan is called with *self.dtypes,; expected {PLAN_PARAMETERS}",
            ),
        ),
    ),
    "decode is planned causal": Refusal(
        lambda: re.sub(
            rb"(kv_lens,(?:\s+self\.\w+,){3}\s+1,\s+)False,", rb"\1True,", before("pair")
        ),
        (
            (
                "wrapper.plan(",
                "anchor-changed",
                "decode is planned with causal=True; expected False",
            ),
        ),
    ),
    "verify is not planned causal": Refusal(
        changed("pair", ("                True,\n", "                False,\n")),
        (
            (
                "wrapper_paged.plan(",
                "anchor-changed",
                "verify is planned with causal=False; expected True",
            ),
        ),
    ),
    "the prefill updater has another name": Refusal(
        changed(
            "pair",
            (
                "class FlashInferMLAIndicesUpdaterPrefill:",
                "class FlashInferMLAIndicesUpdaterPrefillV2:",
            ),
        ),
        (
            (
                "class FlashInferMLAIndicesUpdaterPrefillV2",
                "anchor-missing",
                "looked for class FlashInferMLAIndicesUpdaterPrefill, found none; nearest is "
                "FlashInferMLAIndicesUpdaterPrefillV2",
            ),
        ),
    ),
    "the plan function has another name": Refusal(
        changed("pair", ("def fast_mla_decode_plan(", "def fast_mla_decode_plans(")),
        (
            (
                "def fast_mla_decode_plans",
                "anchor-missing",
                "looked for def fast_mla_decode_plan, found none; nearest is fast_mla_decode_plans",
            ),
        ),
    ),
    "the back end's class is there twice": Refusal(
        changed(
            "pair",
            (
                "class FlashInferMLAMulti",
                "class FlashInferMLAAttnBackend:\n    pass\n\n\nclass FlashInferMLAMulti",
            ),
        ),
        (
            (
                "class FlashInferMLAAttnBackend",
                "anchor-ambiguous",
                "looked for exactly one class FlashInferMLAAttnBackend, found 2 (lines {line}, "
                "{line+255})",
            ),
        ),
    ),
    "the back end's class has no method": Refusal(
        changed(
            "pair",
            (
                "class FlashInferMLAAttnBackend:",
                "class FlashInferMLAAttnBackend:\n    pass\n\n\nclass Other:",
            ),
        ),
        (
            (
                "class FlashInferMLAAttnBackend",
                "anchor-missing",
                "looked for a method of the back end's class, found none",
            ),
            (
                "class FlashInferMLAAttnBackend",
                "anchor-missing",
                "looked for call of indices_updater_decode.update for a wrapper being captured, "
                f"found none; {ELSEWHERE}",
            ),
            (
                "class FlashInferMLAAttnBackend",
                "anchor-missing",
                "looked for call of indices_updater_decode.update with init_metadata_replay=True, "
                f"found none; {ELSEWHERE}",
            ),
        ),
    ),
    "call_begin_forward on one line": Refusal(
        lambda: re.sub(
            rb"(?s)    def call_begin_forward\(\n        self,\n        wrapper_paged,.*?\n\n\n",
            b"    def call_begin_forward(self, wrapper_paged): wrapper_paged.plan(*self.all)\n\n\n",
            before("pair"),
            count=1,
        ),
        (
            (
                "wrapper_paged.plan(*",
                "anchor-changed",
                "the plan call does not stand on a line of its own",
            ),
            (
                "wrapper_paged.plan(*",
                "anchor-changed",
                NO_LOCAL.format("call_begin_forward", "qo_indptr"),
            ),
        ),
    ),
    "a plan on the line of its else": Refusal(
        lambda: re.sub(
            rb"(?s)( +)else:\n +# Over pages\.\n +lens_of_pages = [^\n]*\n +",
            rb"\1else: ",
            before("one-line"),
            count=1,
        ),
        (
            (
                "else: wrapper_paged.plan(",
                "anchor-changed",
                "the plan call does not stand on a line of its own",
            ),
        ),
    ),
    "eager decode passes spec_info already": Refusal(
        changed(
            "pair",
            (
                "                decode_wrapper=self.decode_wrapper,\n",
                "                decode_wrapper=self.decode_wrapper,\n"
                "                spec_info=forward_batch.spec_info,\n",
            ),
        ),
        (
            (
                "self.indices_updater_decode.update(",
                "anchor-changed",
                "eager decode already passes spec_info; expected none",
            ),
        ),
    ),
    "SGLang's arrays for verify are gone": Refusal(
        lambda: re.sub(
            rb"(?s) +# Arrays of the host\.\n.*?(?= +self\.indices_updater_prefill)",
            b"",
            before("upstream"),
            count=1,
        ),
        (
            (
                "self.indices_updater_prefill.update(\n                rows[:bs]",
                "anchor-missing",
                "looked for SGLang's host arrays in front of the verify replay, found none",
            ),
        ),
    ),
    "SGLang's array arguments stand apart": Refusal(
        lambda: re.sub(
            rb"( +spec_info=spec_info,\n)( +qo_indptr_cpu=self[^\n]*\n)",
            rb"\2\1",
            before("upstream"),
        ),
        (
            (
                "qo_indptr_cpu=self.fast_plan_qo_indptr_cpu[: bs + 1]",
                "anchor-changed",
                "the arguments of SGLang's own host arrays do not stand on lines side by side",
            ),
        ),
    ),
    "one of SGLang's array arguments is gone": Refusal(
        changed(
            "upstream",
            ("                kv_indptr_cpu=self.fast_plan_kv_indptr_cpu[: bs + 1],\n", ""),
        ),
        (
            (
                "self.indices_updater_prefill.update(\n                rows[:bs]",
                "anchor-changed",
                "expected the arguments kv_indptr_cpu, kv_len_arr_cpu, qo_indptr_cpu, found "
                "qo_indptr_cpu, kv_len_arr_cpu",
            ),
        ),
    ),
    "install apart from the shared call": Refusal(
        changed(
            "upstream", (UPSTREAM_INSTALL, "            self.captured = True\n" + UPSTREAM_INSTALL)
        ),
        (("graph_wrapper.plan = partial(", "anchor-changed", OTHER_INSTALL.format("graph")),),
    ),
    "install with another statement": Refusal(
        changed("upstream", (UPSTREAM_INSTALL, UPSTREAM_INSTALL + "                self.n += 1\n")),
        (("graph_wrapper.plan = partial(", "anchor-changed", OTHER_INSTALL.format("graph")),),
    ),
    "install with an else": Refusal(
        changed(
            "upstream",
            (
                UPSTREAM_INSTALL,
                UPSTREAM_INSTALL + "            else:\n                self.n += 1\n",
            ),
        ),
        (("graph_wrapper.plan = partial(", "anchor-changed", OTHER_INSTALL.format("graph")),),
    ),
    "install in the verify branch of a pair": Refusal(
        changed(
            "pair",
            (
                "            self.graphs[bs] = verify_wrapper\n",
                "            self.graphs[bs] = verify_wrapper\n            "
                "verify_wrapper.plan = partial(fast_mla_prefill_plan, verify_wrapper)\n",
            ),
        ),
        (("verify_wrapper.plan = partial(", "anchor-changed", OTHER_INSTALL.format("verify")),),
    ),
    "no loop over draft steps": Refusal(
        changed(
            "pair",
            (
                "        for i in range(self.steps - 1):\n",
                "        for i, _ in enumerate(self.attn_backends):\n",
            ),
        ),
        (
            (
                "def common_template",
                "anchor-missing",
                "looked for loop over draft steps in "
                "FlashInferMLAMultiStepDraftBackend.common_template, found none",
            ),
        ),
    ),
    "a draft step is driven twice": Refusal(
        changed("pair", (CALL_FN, CALL_FN + CALL_FN)),
        (
            (
                "call_fn(i, forward_batch)",
                "anchor-ambiguous",
                "looked for exactly one call of call_fn in that loop, found 2 (lines {line}, "
                "{line+1})",
            ),
        ),
    ),
    "update begins twice": Refusal(
        changed(
            "pair",
            (
                "        self.call_begin_forward(\n            prefill_wrapper_paged,",
                "        self.call_begin_forward(rows)\n"
                "        self.call_begin_forward(\n            prefill_wrapper_paged,",
            ),
        ),
        (
            (
                "self.call_begin_forward(rows)",
                "anchor-ambiguous",
                "looked for exactly one call of call_begin_forward in "
                "FlashInferMLAIndicesUpdaterPrefill.update, found 2 (lines {line}, {line+1})",
            ),
        ),
    ),
    "a parameter that only takes positions": Refusal(
        parameters(PARAMETERS.replace("    ):", "        /,\n    ):")),
        (
            (
                "def update(\n        self,\n        rows,\n        seq_lens,\n        prefix_lens",
                "anchor-changed",
                "update has no parameter to add mlagen_request behind",
            ),
        ),
    ),
    "host lengths of decode alone (0.4.4)": Refusal(
        changed(
            "pair", (HOST_LENGTHS, "            kv_len_arr_cpu = self.batch.decode_seq_lens_cpu\n")
        ),
        (
            (
                "decode_seq_lens_cpu",
                "stale-host-lengths",
                "this SGLang fills host lengths (decode_seq_lens_cpu) in decode alone: a verify "
                "plan made from them would use a buffer that nobody refreshes",
            ),
        ),
    ),
    "a file that does not parse": Refusal(
        changed(
            "pair",
            (
                "class FlashInferMLAMultiStepDraftBackend:",
                "class FlashInferMLAMultiStepDraftBackend",
            ),
        ),
        (
            (
                "class FlashInferMLAMultiStepDraftBackend",
                "does-not-parse",
                "not valid Python: expected ':'",
            ),
        ),
    ),
    "Python 2": Refusal(
        lambda: before("pair") + b'print "x"\n',
        (("print", "does-not-parse", "*"),),
    ),
    "null bytes": Refusal(lambda: before("pair") + b"\0\n", (("", "does-not-parse", "*"),)),
    "not UTF-8": Refusal(lambda: before("pair") + b"# \xff\n", (("", "does-not-parse", "*"),)),
    "an unknown encoding": Refusal(
        lambda: b"# coding: klingon\n" + before("pair"), (("", "does-not-parse", "*"),)
    ),
    "nested too deep": Refusal(
        lambda: before("pair") + b"x = a" + b".b" * 1500 + b"\n", (("", "does-not-parse", "*"),)
    ),
    "another back end of SGLang's": Refusal(
        lambda: b"import torch\n\n\nclass FlashInferAttnBackend:\n    pass\n",
        (
            (
                "class FlashInferAttnBackend",
                "not-sglang",
                "looked for class FlashInferMLAAttnBackend, found none; nearest is "
                "FlashInferAttnBackend",
            ),
        ),
    ),
    "an empty file": Refusal(
        lambda: b"",
        (("", "not-sglang", "looked for class FlashInferMLAAttnBackend, found none"),),
    ),
    "a mark of mlagen in a string": Refusal(
        changed(
            "pair",
            (
                '"""Plans one model\'s attention."""',
                '"""\n    # >>> mlagen plans 000000000000\n    """',
            ),
        ),
        (
            (
                "# >>> mlagen plans",
                "mark-in-string",
                "a line that looks like a mark of mlagen inside the string literal that starts in "
                "line {line-1}",
            ),
        ),
    ),
    "a mark of mlagen in a comment": Refusal(
        changed("pair", ("            # Over pages.\n", "            # >>> mlagen x\n")),
        (("# >>> mlagen x", "unknown-mark", "not a start mark that mlagen writes: 'x'"),),
        EditedError,
    ),
    "three things at once": Refusal(
        changed(
            "pair",
            (INSTALL, ""),
            ("                True,\n", "                False,\n"),
            (CALL_FN, CALL_FN * 2),
        ),
        (
            ("            )\n            self.graphs[bs] = decode_wrapper", "anchor-missing", "*"),
            (
                "wrapper_paged.plan(",
                "anchor-changed",
                "verify is planned with causal=False; expected True",
            ),
            ("call_fn(i, forward_batch)", "anchor-ambiguous", "*"),
        ),
    ),
}


def filled(message: str, line: int) -> str:
    """`message` with {line} and {line+n} written out."""
    return re.sub(r"\{line([+-]\d+)?\}", lambda found: str(line + int(found[1] or 0)), message)


@pytest.mark.parametrize("name", REFUSED)
def test_forks_that_are_refused(name: str) -> None:
    refusal = REFUSED[name]
    data = refusal.make()
    with pytest.raises(refusal.error) as caught:
        prepare(FoundTarget(data, "fork.py", None), spec(), COPIES)
    expected = []
    for text, code, message in refusal.problems:
        line = line_of(data, text) if text else 0
        expected.append((line, code, filled(message, line)))
    # Two sites may miss the same anchor.
    found = list(dict.fromkeys((p.line, p.code, p.message) for p in caught.value.problems))
    for (line, code, message), problem in zip(expected, found, strict=True):
        assert problem[:2] == (line, code)
        assert message in ("*", problem[2])
    assert all(problem.path == "fork.py" for problem in caught.value.problems)


def test_a_refusal_is_told_once() -> None:
    with pytest.raises(DriftError) as caught:
        spliced(REFUSED["bs has another name in the replay"].make())
    assert len(set(caught.value.problems)) == len(caught.value.problems)


@pytest.mark.parametrize("method", ["update", "call_begin_forward"])
@pytest.mark.parametrize("kind", ["Decode", "Prefill"])
def test_an_updater_that_is_derived_from_is_refused(kind: str, method: str) -> None:
    """Its method would be handed a request that it does not take."""
    name = f"FlashInferMLAIndicesUpdater{kind}"
    lines = (
        f"class Fork{kind}({name}):",
        f"    def {method}(self, *args):",
        "        pass",
        "",
        "",
    )
    data = before("pair") + "\n".join(("", "", *lines)).encode()
    target = locate(Source.parse(data, "fork.py"), spec())
    reasons = [place.refused for place in target.refusals if place.refused is not None]
    assert reasons
    for reason in reasons:
        assert (
            reason.line
            == data[: data.index(f"    def {method}(self, *args)".encode())].count(b"\n") + 1
        )
        assert f"Fork{kind} derives from {name} and replaces {method}" in reason.message


def test_a_draft_back_end_under_another_name_is_refused() -> None:
    """A file with verify whose multi-step back end is not there: its draft chains would keep
    the wrong lengths, so the patch says so instead of leaving them out."""
    data = fork("pair", ("class FlashInferMLAMultiStepDraftBackend:", "class DraftChain:"))
    target = locate(Source.parse(data, "fork.py"), spec())
    refused = {place.site: place.refused for place in target.refusals}
    assert list(refused) == ["multi-step"]
    reason = refused["multi-step"]
    assert reason is not None
    assert reason.code == "anchor-missing"
    assert "class FlashInferMLAMultiStepDraftBackend" in reason.message


# -- properties ---------------------------------------------------------------------------------

_FILLERS = (b"", b"# note", b"    # note", b"\t", b"  ", b"# |not a bar", b"# mlagen", b"#")


@settings(max_examples=15, deadline=None)
@given(
    shape=st.sampled_from(["pair", "upstream-keyword-only", "no-verify"]),
    fillers=st.lists(st.tuples(st.integers(0, 10_000), st.sampled_from(_FILLERS)), max_size=12),
    line_ends=st.lists(st.sampled_from([b"\n", b"\r\n"]), min_size=1, max_size=7),
    bom=st.booleans(),
    final=st.booleans(),
)
def test_comments_blank_lines_and_line_ends_do_no_harm(
    shape: str,
    fillers: list[tuple[int, bytes]],
    line_ends: list[bytes],
    bom: bool,
    final: bool,
) -> None:
    lines = before(shape).split(b"\n")[:-1]
    for place, filler in fillers:
        lines.insert(place % (len(lines) + 1), filler)
    data = b"".join(line + line_ends[number % len(line_ends)] for number, line in enumerate(lines))
    if not final:
        data = data.rstrip(b"\r\n")
    if bom:
        data = b"\xef\xbb\xbf" + data
    patched = spliced(data)
    assert wiring(patched) == WIRING.get(shape, FULL)
    assert remove_regions(patched) == data


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_a_line_that_is_gone_is_refused_or_harmless(data: st.DataObject) -> None:
    """Whatever line a fork lost: a refusal, or a patch that is wired up and comes out again."""
    lines = before("upstream").splitlines(keepends=True)
    gone = data.draw(st.integers(0, len(lines) - 1))
    count = data.draw(st.integers(1, 3))
    damaged = b"".join(lines[:gone] + lines[gone + count :])
    try:
        patched = spliced(damaged)
    except DriftError:
        return
    assert remove_regions(patched) == damaged
    # Without the place for the indices the plan copies them.
    assert set(COPIED) <= set(wiring(patched)) <= set(ONE_EXTEND)
