"""The edit sites of replays that are planned on the GPU: where they are, what they say, what is
refused.

What `locate` finds, and the file with those edits made, at first without the functions that they
call; at the end the whole patch. Golden lines: splice/<shape>/device.txt, written anew as those of
test_splice.py.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import pytest

from mlagen.codegen import provenance
from mlagen.codegen.flashinfer.api import PlanApi
from mlagen.codegen.patch import prepare, select
from mlagen.codegen.sglang.edits import Edit
from mlagen.codegen.sglang.find import FoundTarget
from mlagen.codegen.sglang.locate import Target, locate
from mlagen.codegen.sglang.source import Source
from mlagen.codegen.spec import Spec
from tests.judge.miniature import COPIES, STAGES
from tests.releases import NEAREST_WHEEL, PINS, plan_api, sglang_file
from tests.splice.shapes import FOLDER, SHAPES, before, fork, line_of, spec
from tests.test_splice import assert_no_new_names

UPDATE = os.environ.get("MLAGEN_UPDATE_SNAPSHOTS") == "1"

#: The miniatures of SGLang 0.5.10, 0.5.17 and 0.5.23.
GOLDEN = ("pair", "shared-apply", "upstream-keyword-only")
#: What is recorded into a graph is known from 0.5.13 on.
IN_GRAPH = ("shared-apply", "upstream", "upstream-keyword-only")
DEFAULT = ("0.4.5", "0.5.1", "0.5.10", "0.5.13", "0.5.17", "0.5.19", "0.5.20", "0.5.23")
POOL = "    max_seq_len=self.req_to_token_pool.req_to_token.shape[1],"
UPDATER = "    max_seq_len=self.indices_updater_decode.req_to_token.shape[1],"
RECORD = "mlagen_record_plan(self.forward_metadata, forward_batch.seq_lens)"
BOUND = "mlagen_request, paged_kernel_lens"
INDICES = "mlagen_request is not None and mlagen_request.bound is not None"
CLASS = "class FlashInferMLAIndicesUpdaterDecode:"
OWN = "    def init_forward_metadata_in_graph(self, batch):\n"
FILL = """\
            self.fill[(bs,)](
                req_pool_indices,
                paged_kernel_lens,
                kv_indptr,
                None,
                kv_indices,
            )
"""


@cache
def device_spec(*names: str) -> Spec:
    """The shipped variants, of which `names` (all, where none is given) plan on the GPU."""
    shipped = spec()
    made = {"planner": "device"}
    variants = tuple(
        v.model_copy(update=made) if v.name in names or not names else v for v in shipped.variants
    )
    return shipped.model_copy(update={"variants": variants})


def located(data: bytes, of: Spec | None = None) -> Target:
    return locate(Source.parse(data, "fork.py"), of or device_spec())


def edits_of(target: Target) -> dict[str, Edit]:
    """The edits by name; AssertionError where a site is refused."""
    assert not target.refusals
    return {edit.site: edit for place in target.places for edit in place.edits}


def edited(data: bytes, target: Target) -> str:
    """`data` with the edits of `target` made. It parses, and the edits come out again."""
    regions = [
        provenance.Edit(
            edit.site,
            edit.line,
            edit.replaces,
            edit.indent,
            tuple(edit.indent + line if line else "" for line in edit.lines),
        )
        for edit in edits_of(target).values()
    ]
    patched = provenance.apply_edits(data, regions, path="fork.py")
    ast.parse(patched)
    assert provenance.remove_regions(patched) == data
    return patched.decode().replace("\r\n", "\n")


def sites_of(target: Target) -> dict[str, tuple[str, ...]]:
    """The sites that have an edit, with their variants."""
    return {place.site: place.variants for place in target.places if place.edits}


def method_of(text: str, owner: str, name: str) -> ast.FunctionDef:
    (found,) = (
        method
        for node in ast.parse(text).body
        if isinstance(node, ast.ClassDef) and node.name == owner
        for method in node.body
        if isinstance(method, ast.FunctionDef) and method.name == name
    )
    return found


def check_all_sites(data: bytes, *, in_graph: bool, verify: bool = True) -> None:
    """Every site of a device planner is in a file, and no other."""
    target = located(data)
    edits = edits_of(target)
    text = edited(data, target)
    captures = {"capture-decode"} | ({"capture-verify"} if verify else set())
    for site in captures:
        # The width of SGLang's page table: a sequence may outgrow the model's context.
        table = POOL if b"self.req_to_token_pool = " in data else UPDATER
        assert [line.strip() for line in edits[site].lines].count(table.strip()) == 1
    assert ("in-graph" in edits) == in_graph == ("mlagen_record_plan" in target.calls)
    assert ("verify-indices" in edits) == verify == ("mlagen_bound_arrays" in target.calls)
    if in_graph:
        added = method_of(text, "FlashInferMLAAttnBackend", "init_forward_metadata_in_graph")
        assert [ast.unparse(statement) for statement in added.body] == [
            "super().init_forward_metadata_in_graph(forward_batch)",
            RECORD,
        ]
    if verify:
        check_indices(text)


def check_indices(text: str) -> None:
    """The block stands directly in front of the chain, fills by the file's own call (the one that
    is in the chain's first branch as well), plans, and returns."""
    begin = method_of(text, "FlashInferMLAIndicesUpdaterPrefill", "call_begin_forward")
    (at,) = (
        number
        for number, statement in enumerate(begin.body)
        if isinstance(statement, ast.If) and ast.unparse(statement.test) == INDICES
    )
    block, chain = begin.body[at], begin.body[at + 1]
    assert isinstance(block, ast.If)
    assert isinstance(chain, ast.If)
    assert ast.unparse(chain.test) == "spec_info is None"
    *made, filled, plan, end = block.body
    assert isinstance(end, ast.Return)
    assert isinstance(plan, ast.Expr)
    assert isinstance(plan.value, ast.Call)
    assert ast.unparse(plan.value.func) == "mlagen_request.plan"
    request, arrays, shape = map(ast.unparse, plan.value.args)
    assert (request, arrays) == ("mlagen_request", "mlagen_arrays")
    (other,) = (
        ast.unparse(node.args[2])
        for statement in begin.body[at + 1 :]
        for node in ast.walk(statement)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "mlagen_request.plan"
    )
    assert shape == other
    fill = ast.unparse(filled)
    assert [ast.unparse(statement) for statement in chain.body].count(fill) == 1
    bound, lens, indptr, indices, *between = map(ast.unparse, made)
    assert bound == f"mlagen_arrays = mlagen_bound_arrays({BOUND})"
    assert lens == "paged_kernel_lens = mlagen_arrays.kv_len"
    assert indptr == "kv_indptr = mlagen_arrays.kv_indptr"
    assert indices == "kv_indices = mlagen_arrays.kv_indices"
    summed = ["paged_kernel_lens_sum = kv_indices.numel()"]
    assert between == (summed if "paged_kernel_lens_sum" in fill else [])


# -- where they are ------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
def test_in_miniatures(shape: str) -> None:
    check_all_sites(before(shape), in_graph=shape in IN_GRAPH, verify=shape != "no-verify")


def older_than_in_graph(version: str) -> bool:
    first, second, third = version.split(".")[:3]
    return (int(first), int(second), int(third)) < (0, 5, 13)


@pytest.mark.parametrize(
    "version",
    [
        version if version in DEFAULT else pytest.param(version, marks=pytest.mark.releases)
        for version in PINS
        if version != "0.4.4"  # refused as a whole
    ],
)
def test_in_releases(version: str) -> None:
    data = sglang_file(version)
    drafts = version != "0.4.3.post4"
    check_all_sites(data, in_graph=not older_than_in_graph(version), verify=drafts)
    edits = edits_of(located(data))
    assert ("draft-sum" in edits) == drafts
    # From 0.5.20 on decode compares the sum where page numbers may have to be translated.
    compared = [line for line in edits["replay-decode"].lines if "needs_read_translate" in line]
    assert len(compared) == (b".needs_read_translate" in data)
    for name in ("draft-decode", "decode"):
        alone = edits_of(located(data, device_spec(name)))
        assert ("draft-sum" in alone) == (name == "draft-decode" and drafts)
        asked = any("needs_read_translate" in line for line in alone["replay-decode"].lines)
        assert asked == (name == "decode" and bool(compared))
    host = edits_of(located(data, spec()))
    assert "draft-sum" not in host
    by_method = b"kv_index_translator.pack_read_stream(" in data  # 0.5.22 on
    assert ("verify-indices" in host) == (drafts and not by_method)
    assert not any("seq_lens_sum" in line for line in host["replay-decode"].lines)


SUM = b"""\
class FlashInferMLAMultiStepDraftBackend:
    def common_template(self, forward_batch, kv_indices_buffer, call_fn: Callable):
        bs = self.topk * forward_batch.batch_size
        seq_lens_sum = forward_batch.seq_lens_sum
        for i in range(self.speculative_num_steps - 1):
            forward_batch.spec_info.kv_indices = kv_indices_buffer[i][: seq_lens_sum + bs * (i + 1)]
            call_fn(i, forward_batch)
"""


def draft_class(*replacement: bytes) -> bytes:
    """A miniature whose draft back end takes the sum, with a text of it replaced."""
    data = before("pair")
    start = data.index(b"class FlashInferMLAMultiStepDraftBackend:")
    end = data.index(b"    def init_forward_metadata(self, forward_batch):", start)
    draft = SUM.replace(*replacement) if replacement else SUM
    assert not replacement or draft != SUM
    head = b"    def __init__(self, runner, steps):\n        self.attn_backends = []\n\n"
    draft = draft.replace(b"Backend:\n", b"Backend:\n" + head)
    return data[:start] + draft + b"\n" + data[end:]


def test_a_draft_chain_does_without_the_sum() -> None:
    data = draft_class()
    text = edited(data, located(data))
    method = method_of(text, "FlashInferMLAMultiStepDraftBackend", "common_template")
    _, taken, absent, *_ = map(ast.unparse, method.body)
    assert taken == "seq_lens_sum = forward_batch.seq_lens_sum"
    assert absent.splitlines() == [
        "if seq_lens_sum is None:",
        "    mlagen_room = kv_indices_buffer.shape[1] - bs * self.speculative_num_steps",
        "    seq_lens_sum = mlagen_room // self.topk",
    ]


@pytest.mark.parametrize(
    "replacement",
    [
        (b"kv_indices_buffer", b"buffer"),
        (b"self.topk", b"self.width"),
        (b"self.speculative_num_steps", b"self.steps"),
        (b"        bs = self.topk", b"        rows = self.topk"),
        (b"seq_lens_sum = forward_batch.seq_lens_sum", b"seq_lens_sum = sum(forward_batch.lens)"),
    ],
)
def test_a_sum_that_is_taken_in_another_way_is_left_alone(
    replacement: tuple[bytes, bytes],
) -> None:
    """None is an error there, and SGLang's own."""
    target = located(draft_class(*replacement))
    assert not target.refusals
    assert "draft-sum" not in edits_of(target)


@pytest.mark.parametrize("shape", GOLDEN)
def test_the_lines(shape: str) -> None:
    edits = edits_of(located(before(shape)))
    sites = ("capture-decode", "capture-verify", "in-graph", "verify-indices")
    text = "\n".join(
        f"# {site}, line {edits[site].line}\n"
        + "".join(f"{edits[site].indent + line}".rstrip() + "\n" for line in edits[site].lines)
        for site in sites
        if site in edits
    )
    golden = FOLDER / shape / "device.txt"
    if UPDATE:
        golden.write_text(text)
    assert text == golden.read_text()


@pytest.mark.parametrize("shape", SHAPES)
def test_a_planner_on_the_host_has_the_indices_alone(shape: str) -> None:
    target = located(before(shape), spec())
    places = {place.site for place in target.places}
    assert "in-graph" not in places
    assert "mlagen_record_plan" not in target.calls
    verify = shape != "no-verify"
    assert ("verify-indices" in places) == verify
    # A method that fills may use fewer blocks here than for verify: the plan copies.
    in_place = verify and shape != "upstream-keyword-only"
    assert ("verify-indices" in sites_of(target)) == in_place
    assert ("mlagen_bound_arrays" in target.calls) == in_place
    if in_place:
        check_indices(edited(before(shape), target))
    lines = [line for edit in edits_of(target).values() for line in edit.lines]
    assert not [line for line in lines if "max_seq_len" in line]


@pytest.mark.parametrize(
    ("name", "decode", "verify"),
    [
        ("decode", True, False),
        ("draft-decode", True, False),
        ("verify", False, True),
        ("draft-extend", False, False),
        ("dcp", False, False),
    ],
)
def test_one_variant_on_the_gpu(name: str, decode: bool, verify: bool) -> None:
    """Each site serves its own variants; extends are never captured, and under context
    parallelism the host plans."""
    data = before("upstream-keyword-only")
    target = located(data, device_spec(name))
    edits = edits_of(target)
    assert any("max_seq_len" in line for line in edits["capture-decode"].lines) == decode
    assert any("max_seq_len" in line for line in edits["capture-verify"].lines) == verify
    sites = sites_of(target)
    assert sites.get("in-graph") == ((name,) if decode or verify else None)
    assert sites.get("verify-indices") == (("verify",) if verify else None)
    assert len(sites["capture-decode"]) > 1  # with the host's own
    edited(data, target)


def test_what_is_given_stands_behind_the_host_lengths_and_the_step() -> None:
    for site in ("capture-decode", "capture-verify"):
        lines = edits_of(located(before("shared-apply")))[site].lines
        at = next(n for n, line in enumerate(lines) if "max_seq_len" in line)
        step = site == "capture-decode"
        assert ("draft_step=" if step else "host_lens=") in lines[at - 1]
        assert "dcp_size=" in lines[at + 1]


def test_the_batch_is_typed_where_its_class_is_known() -> None:
    known = "from functools import partial\n"
    import_line = "from sglang.srt.batches import ForwardBatch\n"
    data = fork("shared-apply", (known, known + import_line))
    (signature, *_) = edits_of(located(data))["in-graph"].lines
    assert signature.endswith("(self, forward_batch: ForwardBatch) -> None:")
    (signature, *_) = edits_of(located(before("shared-apply")))["in-graph"].lines
    assert signature.endswith("(self, forward_batch) -> None:")


# -- forks ---------------------------------------------------------------------------------------


def with_method(*lines: str) -> bytes:
    """The shared apply with a method of its own that is recorded into graphs."""
    text = OWN + "".join(f"        {line}\n" for line in lines) + "\n\n"
    return fork("shared-apply", (CLASS, f"{text.rstrip()}\n\n\n{CLASS}"))


@pytest.mark.parametrize(
    "lines",
    [
        ("self.count += 1",),
        ("super().init_forward_metadata_in_graph(batch)", "for x in self.more:", "    x(batch)"),
        ("if self.more:", "    self.more(batch)", "else:", "    self.count += 1", "# the end"),
    ],
    ids=["a statement", "a loop", "an if and a comment"],
)
def test_a_method_of_the_forks_own_gets_the_line_at_its_end(lines: tuple[str, ...]) -> None:
    data = with_method(*lines)
    text = edited(data, located(data))
    own = method_of(text, "FlashInferMLAAttnBackend", "init_forward_metadata_in_graph")
    kept = [ast.unparse(s) for s in ast.parse("\n".join(lines)).body]
    record = RECORD.replace("forward_batch", "batch")
    assert [ast.unparse(statement) for statement in own.body] == [*kept, record]


def test_a_class_that_inherits_the_method_gets_its_own() -> None:
    """The base's is called by it."""
    source = before("shared-apply").decode()
    base = f"class Recording:\n{OWN}        self.count += 1\n\n\n"
    source = source.replace(
        "class FlashInferMLAAttnBackend:", f"{base}class FlashInferMLAAttnBackend(Recording):"
    )
    check_all_sites(source.encode(), in_graph=True)


def test_a_class_with_bases_has_the_page_table() -> None:
    line = "        self.req_to_token_pool = runner.req_to_token_pool\n"
    source = before("shared-apply").decode().replace(line, "")
    base = f"class Base:\n    def __init__(self, runner):\n{line}\n\n"
    source = source.replace(
        "class FlashInferMLAAttnBackend:", f"{base}class FlashInferMLAAttnBackend(Base):"
    )
    check_all_sites(source.encode(), in_graph=True)


@dataclass(frozen=True)
class Refusal:
    """A fork, the sites that are refused, the text at whose line, and the reason."""

    make: Callable[[], bytes]
    sites: tuple[str, ...]
    at: str
    code: str
    reason: str


def pair(*replacements: tuple[str, str]) -> Callable[[], bytes]:
    return lambda: fork("pair", *replacements)


REFUSED: dict[str, Refusal] = {
    "no statement fills the indices": Refusal(
        pair((FILL, "")),
        ("verify-indices",),
        "        if spec_info is None:\n            kv_indptr = self.indptr_of(paged",
        "anchor-missing",
        "looked for call that fills kv_indices by kv_indptr and paged_kernel_lens where spec_info "
        "is None, found none",
    ),
    "two statements fill them": Refusal(
        pair((FILL, FILL + FILL)),
        ("verify-indices",),
        "            self.fill[(bs,)](",
        "anchor-ambiguous",
        "looked for exactly one call that fills kv_indices",
    ),
    "the statement is no call of its own": Refusal(
        pair((FILL, FILL.replace("self.fill", "done = self.fill"))),
        ("verify-indices",),
        "        if spec_info is None:\n            kv_indptr = self.indptr_of(paged",
        "anchor-missing",
        "looked for call that fills kv_indices",
    ),
    "no chain": Refusal(
        pair(
            (
                "        if spec_info is None:\n            kv_indptr = self.indptr_of(paged",
                "        if not spec_info:\n            kv_indptr = self.indptr_of(paged",
            )
        ),
        ("verify-indices",),
        "    def call_begin_forward(\n        self,\n        wrapper_paged,",
        "anchor-missing",
        "looked for `if spec_info is None:` in call_begin_forward, found none",
    ),
    "what the statement needs is bound in its branch": Refusal(
        pair((FILL, "            grid = (bs,)\n" + FILL.replace("(bs,)", "grid"))),
        ("verify-indices",),
        "            self.fill[grid](",
        "anchor-changed",
        "the call that fills kv_indices needs grid, bound in a branch alone",
    ),
    "what the plan needs is bound in a branch": Refusal(
        pair(
            (FILL, FILL + "            softmax = self.scale\n"),
            (
                "                self.scale,\n                self.q_dtype,",
                "                softmax,\n                self.q_dtype,",
            ),
        ),
        ("verify-indices",),
        "            wrapper_paged.plan(",
        "anchor-changed",
        "the plan needs softmax, bound in a branch alone",
    ),
    "indices are translated behind the chain": Refusal(
        pair(
            (
                "        if use_ragged:\n            self.ragged",
                "        kv_indices = self.translate(kv_indices)\n"
                "        if use_ragged:\n            self.ragged",
            )
        ),
        ("verify-indices",),
        "        kv_indices = self.translate(",
        "anchor-changed",
        "a statement stands between `if spec_info is None:` in call_begin_forward and the plan: "
        "kv_indices = self.translate(kv_indices)",
    ),
    "lengths have another name": Refusal(
        lambda: before("pair").replace(b"paged_kernel_lens", b"lens_here"),
        ("verify-indices",),
        "    def call_begin_forward(\n        self,\n        wrapper_paged,",
        "anchor-changed",
        "call_begin_forward no longer has a local or parameter paged_kernel_lens",
    ),
    "no page table": Refusal(
        pair(("        self.req_to_token = runner", "        self.table = runner")),
        ("capture-decode", "capture-verify"),
        "class FlashInferMLAAttnBackend",
        "anchor-missing",
        "looked for self.req_to_token_pool in FlashInferMLAAttnBackend.__init__ and for "
        "self.req_to_token in FlashInferMLAIndicesUpdaterDecode.__init__, found neither",
    ),
    "the method of the fork's own ends in a return": Refusal(
        lambda: with_method("self.count += 1", "return self.count"),
        ("in-graph",),
        "        return self.count",
        "anchor-changed",
        "init_forward_metadata_in_graph returns here; a plan recorded at its end would be skipped",
    ),
    "the method of the fork's own returns early": Refusal(
        lambda: with_method("if self.idle:", "    return", "self.count += 1"),
        ("in-graph",),
        "            return\n        self.count",
        "anchor-changed",
        "init_forward_metadata_in_graph returns here",
    ),
    "the method of the fork's own takes no batch": Refusal(
        lambda: with_method("self.count += 1").replace(b"(self, batch)", b"(self, *given)"),
        ("in-graph",),
        "    def init_forward_metadata_in_graph(self, *given)",
        "anchor-changed",
        "init_forward_metadata_in_graph takes no batch",
    ),
    "the method of the fork's own stands on one line": Refusal(
        lambda: with_method("pass").replace(b"(self, batch):\n        pass", b"(self, batch): ..."),
        ("in-graph",),
        "    def init_forward_metadata_in_graph(self, batch)",
        "anchor-changed",
        "the body of init_forward_metadata_in_graph does not stand on lines of its own",
    ),
    "a class of the file replaces the method": Refusal(
        lambda: fork(
            "shared-apply",
            (
                CLASS,
                f"class Other(FlashInferMLAAttnBackend):\n{OWN}        self.n += 1\n\n\n{CLASS}",
            ),
        ),
        ("in-graph",),
        "    def init_forward_metadata_in_graph(self, batch)",
        "anchor-changed",
        "Other replaces init_forward_metadata_in_graph without calling it: its graphs would be "
        "replayed with the plan of their capture",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    refusal = REFUSED[name]
    data = refusal.make()
    ast.parse(data)
    told = {place.site: place.refused for place in located(data).refusals}
    assert tuple(told) == refusal.sites
    for reason in told.values():
        assert reason is not None
        assert (reason.code, reason.line) == (refusal.code, line_of(data, refusal.at))
        assert reason.message.startswith(refusal.reason)
    # A host that plans does without the place of the indices: the plan copies them.
    target = located(data, spec())
    assert not target.refusals
    assert ("verify-indices" in sites_of(target)) == ("verify-indices" not in refusal.sites)


#: The call of verify's input in the shape "upstream", whose method fills by the table it is given.
INPUT = """spec_info.generate_attn_arg_prefill(
                req_pool_indices, self.req_to_token
            )"""


@pytest.mark.parametrize(
    ("call", "alike"),
    [
        (INPUT, True),
        (INPUT.replace("self.req_to_token", "table=runner.req_to_token"), True),
        (INPUT.replace("self.req_to_token", "translator=self.translator"), False),
        (INPUT.replace("self.req_to_token", "self.translator.req_to_token"), False),
        (INPUT.replace("self.req_to_token", "req_to_token=None"), False),
        (INPUT.replace("_token", "_token, self.translator"), False),
        (INPUT.replace("_token", "_token, num_token_blocks=None"), False),
        (INPUT.replace(", self.req_to_token", ""), False),
        (f"{INPUT} if bs else {INPUT.replace('self.req_to_token', 'self.translator')}", False),
        ("self.arrays(spec_info, self.req_to_token)", False),
    ],
    ids=[
        *("table", "by name", "translator", "the translator's table", "no table"),
        *("translator beside", "blocks beside", "nothing", "either", "another call"),
    ],
)
def test_a_host_plan_fills_by_a_method_where_verify_has_one_block_too(
    call: str, alike: bool
) -> None:
    data = fork("upstream", (INPUT, call))
    ast.parse(data)
    assert ("verify-indices" in sites_of(located(data, spec()))) == alike
    assert "verify-indices" in sites_of(located(data))  # where the GPU plans, in any case


def test_a_host_plan_copies_where_another_branch_fills_in_another_way() -> None:
    """Where one of them is verify's: which, the file does not tell."""
    arrays = "kv_indices, kv_indptr, qo_indptr, _ = "
    branch = f"        else:\n            {arrays}{INPUT}"
    ragged = f"        elif ragged:\n            {arrays}self.ragged_arrays(spec_info)\n"
    data = fork("upstream", (branch, ragged + branch))
    ast.parse(data)
    assert "verify-indices" not in sites_of(located(data, spec()))
    assert "verify-indices" in sites_of(located(data))


# -- the whole patch -----------------------------------------------------------------------------

#: The variants that the GPU can plan.
ON_GPU = ("decode", "draft-decode", "verify")
RECORDS = b"mlagen_record_plan(self.forward_metadata, "


def whole(data: bytes, of: Spec, api: PlanApi) -> bytes:
    """The patched file, with the functions it calls; whole, repeatable, and out again."""
    patched = prepare(FoundTarget(data, "fork.py", None), of, api).patched
    assert provenance.remove_regions(patched) == data
    assert not prepare(FoundTarget(patched, "fork.py", None), of, api).changes
    assert_no_new_names(patched, data)
    return patched


def bound_once(patched: bytes) -> dict[str, int]:
    """How often each name of the module that begins with mlagen's letters is bound."""
    tree = ast.parse(patched)
    kinds = (ast.FunctionDef, ast.ClassDef)
    names = [node.name for node in tree.body if isinstance(node, kinds)]
    return {name: names.count(name) for name in names if "mlagen" in name.lower()}


def check_whole(data: bytes, api: PlanApi, *, in_graph: bool, verify: bool = True) -> None:
    patched = whole(data, device_spec(*ON_GPU), api)
    names = bound_once(patched)
    assert set(names.values()) == {1}
    expected = {"MlagenDevicePlan", "_mlagen_plan_kernel", "_mlagen_onto_device"}
    assert expected <= names.keys()
    # Both are emitted with the hooks; the file calls them where it has a place for it.
    assert (RECORDS in patched) == in_graph
    assert (b"= mlagen_bound_arrays(" in patched) == verify
    assert (
        not {"_mlagen_plan_kernel", "MlagenDevicePlan"}
        & bound_once(whole(data, spec(), api)).keys()
    )


@pytest.mark.parametrize("api", [COPIES, STAGES], ids=["0.6.17", "0.7.2"])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_whole_patch_of_a_miniature(shape: str, api: PlanApi) -> None:
    check_whole(before(shape), api, in_graph=shape in IN_GRAPH, verify=shape != "no-verify")


@pytest.mark.parametrize(
    "version",
    [
        version
        if version in ("0.4.5", "0.5.10", "0.5.17", "0.5.23")
        else pytest.param(version, marks=pytest.mark.releases)
        for version in PINS
        if version != "0.4.4"
    ],
)
def test_the_whole_patch_of_a_release(version: str) -> None:
    check_whole(
        sglang_file(version),
        plan_api(NEAREST_WHEEL[version]),
        in_graph=not older_than_in_graph(version),
        verify=version != "0.4.3.post4",
    )


@pytest.mark.parametrize("name", ON_GPU)
@pytest.mark.parametrize("shape", GOLDEN)
def test_the_whole_patch_of_one_variant(shape: str, name: str) -> None:
    alone = select(device_spec(name), [name])
    patched = whole(before(shape), alone, COPIES)
    assert "MlagenDevicePlan" in bound_once(patched)
    # The others are there, planned by the host.
    among = whole(before(shape), device_spec(name), COPIES)
    assert "MlagenDevicePlan" in bound_once(among)


@pytest.mark.parametrize("name", ["draft-extend", "dcp"])
def test_a_patch_of_variants_on_the_host_takes_nothing_along(name: str) -> None:
    patched = whole(before("upstream"), select(device_spec(*ON_GPU), [name]), COPIES)
    assert patched.count(b"triton") == before("upstream").count(b"triton")
    assert "MlagenDevicePlan" not in bound_once(patched)
