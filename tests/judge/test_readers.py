"""What reads lengths on the host: each form of use, what hides one, and the real releases."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import pytest
from click.testing import CliRunner

from mlagen.cli import cli
from mlagen.codegen.judge import HostRead, host_reads
from tests.releases import NEAREST_WHEEL, PINS, SGLANG_FILE, patch_of, sglang_file

# --- miniatures -------------------------------------------------------------------------------

#: A back end in words of our own. Of what it does with lengths it only hands them on.
FILE = """\
from functools import partial

import torch


class FlashInferMLAAttnBackend(Base):
    def __init__(self, runner):
        self.decode = Decode(runner)
        self.options = {{}}
        self.given = runner.given

    def step(self, forward_batch, flag, other):
        bs = forward_batch.batch_size
{step}

    def own(self, bs, lens, *, total=None):
{own}


class Decode:
    def update(self, lens, count, wrapper=None):
{decode}


class Prefill:
    def update(self, wrapper, lens, count):
{prefill}


def outside(count, *rest, **more):
{outside}
"""


def source(step: str = "pass", **bodies: str) -> bytes:
    places = {"own": "pass", "decode": "pass", "prefill": "pass", "outside": "pass"} | bodies
    levels = {"outside": 1}
    texts = {
        name: textwrap.indent(textwrap.dedent(body).strip("\n"), "    " * levels.get(name, 2))
        for name, body in {"step": step, **places}.items()
    }
    return FILE.format(**texts).encode()


def uses(step: str = "pass", **bodies: str) -> list[tuple[str, str]]:
    """(expression, use) of each read."""
    return [(read.expression, read.use) for read in host_reads(source(step, **bodies), "f.py")]


@pytest.mark.parametrize(
    ("line", "expression", "use"),
    [
        ("x = torch.empty(LEN, dtype=d)", "LEN", "sizes an allocation"),
        ("x = torch.zeros(size=(bs, LEN + 1))", "LEN + 1", "sizes an allocation"),
        ("x = other.new_empty([LEN, 2])", "LEN", "sizes an allocation"),
        ("x = torch.full((bs,), LEN)", "LEN", "passed to torch.full"),
        ("x = torch.tensor(LEN)", "LEN", "passed to torch.tensor"),
        ("assert LEN is not None", "LEN is not None", "asserted"),
        ("assert flag and LEN > bs, 'text'", "LEN > bs", "asserted"),
        ("assert flag, f'{LEN}'", "LEN", "written out"),
        ("x = other[0][: LEN * 2 + bs]", "LEN * 2 + bs", "slices other[0]"),
        ("x = other[bs, :LEN]", "LEN", "slices other"),
        ("x = other[LEN - 1]", "LEN - 1", "indexes other"),
        ("x = LEN[:bs].to(torch.int32)", "LEN[:bs]", "sliced"),
        ("x = LEN[0]", "LEN[0]", "indexed"),
        ("LEN[:bs] = 0", "LEN[:bs]", "written into"),
        ("LEN[:bs] += 1", "LEN[:bs]", "written into"),
        ("LEN += 1", "LEN += 1", "computed with"),
        ("bs += LEN", "bs += LEN", "computed with"),
        ("x = LEN * 2 + bs", "LEN * 2 + bs", "computed with"),
        ("x = -LEN", "-LEN", "computed with"),
        ("x = not LEN", "not LEN", "tested"),
        ("x = LEN.sum()", "LEN.sum()", "asked for its sum()"),
        ("x = LEN.shape[0]", "LEN.shape", "asked for its shape"),
        ("x = flag and LEN is None", "LEN is None", "tested for None"),
        ("x = LEN >= bs", "LEN >= bs", "compared"),
        ("x = 1 if LEN else 2", "LEN", "tested"),
        ("x = LEN or other", "LEN", "tested"),
        ("if LEN:\n    pass", "LEN", "tested"),
        ("while LEN:\n    break", "LEN", "tested"),
        ("for x in LEN:\n    pass", "LEN", "gone through"),
        ("x = [n for n in LEN]", "LEN", "gone through"),
        ("x = [*LEN]", "LEN", "gone through"),
        ("return LEN", "LEN", "returned"),
        ("x = lambda: LEN", "LEN", "returned"),
        ("self.kept = LEN", "LEN", "kept in self.kept"),
        ("other['n'] = x = LEN", "LEN", "kept in other['n'], x"),
        ("self.a, x = LEN, 1", "LEN", "put into a tuple"),
        ("x, *y = LEN, 1", "LEN", "put into a tuple"),
        ("x = {'seq_lens': LEN}", "LEN", "put into a dict"),
        ("x = [LEN for i in other]", "LEN", "put into a list"),
        ("x = sum(LEN for i in other)", "LEN", "put into a generator"),
        ("x = not any(LEN)", "LEN", "passed to any"),
        ("x = used_len(LEN, bs)", "LEN", "passed to used_len"),
        ("x = other.arguments(bs, total=LEN)", "LEN", "passed to other.arguments"),
        ("x = other.calls[bs](LEN + 1)", "LEN + 1", "passed to other.calls[bs]"),
        ("self.inherited(LEN)", "LEN", "passed to self.inherited"),
        ("self.options.update(LEN)", "LEN", "passed to self.options.update"),
        ("outside(1, 2, LEN)", "LEN", "passed to outside"),  # into *rest
        ("outside(1, n=LEN)", "LEN", "passed to outside"),  # into **more
        ("outside(*other, LEN)", "LEN", "passed to outside"),
        ("outside(*LEN)", "LEN", "passed to outside"),
        ("x = outside(LEN + 1)", "LEN + 1", "passed to outside"),
        ("match LEN:\n    case 1:\n        pass", "LEN", "tested"),
    ],
)
@pytest.mark.parametrize("name", ["seq_lens_sum", "seq_lens_cpu", "extend_prefix_lens_cpu"])
def test_what_a_use_is_for(line: str, expression: str, use: str, name: str) -> None:
    value = f"forward_batch.{name}"
    assert uses(line.replace("LEN", value)) == [(expression.replace("LEN", value), use)]


@pytest.mark.parametrize(
    "line",
    [
        "x = forward_batch.seq_lens_sum",
        "x: int = forward_batch.seq_lens_sum",
        "x, y = forward_batch.seq_lens_sum, forward_batch.seq_lens_cpu",
        "x = y = forward_batch.seq_lens_sum if flag else None",
        "forward_batch.seq_lens_sum",
        "outside(forward_batch.seq_lens_sum)",
        "outside(count=forward_batch.seq_lens_sum if flag else 0)",
        "self.own(bs, forward_batch.seq_lens_cpu, total=forward_batch.seq_lens_sum)",
        "self.decode.update(bs, count=forward_batch.seq_lens_sum)",
        "x = partial(self.own, bs, total=forward_batch.seq_lens_sum)",
        "forward_batch.seq_lens_sum = bs",
        "forward_batch.seq_lens_sum, x = bs, bs",
        "del forward_batch.seq_lens_sum",
        "x = other.seq_lens_sum_of_it + forward_batch.seq_lens",
        "def seq_lens_sum():\n    pass\nseq_lens_sum()",
        "x = 'forward_batch.seq_lens_sum'  # seq_lens_cpu",
    ],
)
def test_what_is_no_use(line: str) -> None:
    assert uses(line) == []


def test_a_value_is_followed_through_the_file() -> None:
    """By position and by keyword, into the class that the object is made of, and no other."""
    found = host_reads(
        source(
            "self.own(bs, total=forward_batch.seq_lens_sum, lens=None)",
            own="again = total\nself.decode.update(lens, again if lens else 0)",
            decode="outside(count)",
            prefill="return torch.empty(count), lens[:2]",
            outside="return torch.empty(count)",
        ),
        "f.py",
    )
    assert [(read.where, read.expression, read.use) for read in found] == [
        ("outside", "count", "sizes an allocation")
    ]


def test_an_object_of_an_unknown_class_is_any_that_can_take_the_call() -> None:
    body = {"decode": "return count[:1]", "prefill": "return count[:2]"}
    both = "self.given.update(bs, bs, forward_batch.seq_lens_cpu)"
    assert uses(both, **body) == [("count[:2]", "sliced")]  # the third of Prefill's
    both = "self.given.update(lens=bs, count=forward_batch.seq_lens_cpu, wrapper=bs)"
    assert uses(both, **body) == [("count[:1]", "sliced"), ("count[:2]", "sliced")]
    one = "self.given.update(lens=bs, count=forward_batch.seq_lens_cpu)"
    assert uses(one, **body) == [("count[:1]", "sliced")]  # Prefill's wants a wrapper
    none = "self.given.update(unheard_of=forward_batch.seq_lens_cpu)"
    assert uses(none, **body) == [
        ("forward_batch.seq_lens_cpu", "passed to self.given.update"),
    ]


def test_parameters_of_these_names_hold_lengths_whoever_calls() -> None:
    step = """
    def inner(seq_lens_cpu, n=forward_batch.seq_lens_sum, *, m=forward_batch.seq_lens_sum):
        return [seq_lens_cpu[:bs], n + 1, m + 2]
    again = lambda paged_kernel_lens_sum: torch.empty(paged_kernel_lens_sum)
    """
    assert uses(step) == [
        ("seq_lens_cpu[:bs]", "sliced"),
        ("n + 1", "computed with"),
        ("m + 2", "computed with"),
        ("paged_kernel_lens_sum", "sizes an allocation"),
    ]


def test_functions_in_functions_see_the_names_around_them() -> None:
    step = """
    lens = forward_batch.seq_lens_cpu
    def inner(i):
        return lens[:i]
    def shadowing(lens):
        return lens[:bs]
    def rebinding():
        nonlocal lens
        lens = other
    x = [lens for lens in other if lens > 1]
    y = [n + 1 for n in range(bs) if lens > 2]
    z = lambda: lens[3:]
    """
    assert uses(step) == [
        ("lens[:i]", "sliced"),
        ("lens > 2", "compared"),
        ("lens[3:]", "sliced"),
    ]


def test_a_function_that_gets_them_from_a_closure() -> None:
    step = """
    n = forward_batch.seq_lens_sum
    def inner(m):
        return m + 1
    call = inner
    inner(n)
    (lambda k: k + 2)(n)
    sized = lambda k: k + 3
    sized(n)
    method = self.own
    method(bs, n)
    """
    assert uses(step, own="return lens + 4") == [
        ("m + 1", "computed with"),
        ("k + 2", "computed with"),
        ("k + 3", "computed with"),
        ("lens + 4", "computed with"),
    ]


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        # What the device was asked for is not what SGLang keeps.
        ("seq_lens_sum = other.sum().item()\ntorch.empty(seq_lens_sum)", False),
        ("n = forward_batch.seq_lens_sum\nn = bs\ntorch.empty(n)", False),
        ("n = bs\nn = forward_batch.seq_lens_sum\ntorch.empty(n)", True),
        ("torch.empty(n)\nn = forward_batch.seq_lens_sum", False),
        ("n = forward_batch.seq_lens_sum\nif flag:\n    n = bs\ntorch.empty(n)", True),
        (
            "if flag:\n    n = forward_batch.seq_lens_sum\nelse:\n    n = bs\n    torch.empty(n)",
            False,
        ),
        ("n = forward_batch.seq_lens_sum\nif flag:\n    n = bs\n    torch.empty(n)", False),
        (
            "n = bs\nfor i in other:\n    torch.empty(n)\n    n = forward_batch.seq_lens_sum",
            True,
        ),
        (
            "for i in other:\n    n = bs\n    torch.empty(n)\n    n = forward_batch.seq_lens_sum",
            False,
        ),
        ("n = forward_batch.seq_lens_sum\nfor n in other:\n    torch.empty(n)", False),
        ("n = forward_batch.seq_lens_sum\nfor n in other:\n    pass\ntorch.empty(n)", True),
        ("n = forward_batch.seq_lens_sum\nwith other as n:\n    torch.empty(n)", False),
        ("n = forward_batch.seq_lens_sum\ndel n\nn = bs\ntorch.empty(n)", False),
        ("n = forward_batch.seq_lens_sum\nn, m = other\ntorch.empty(n)", False),
        ("if (n := forward_batch.seq_lens_sum) is None:\n    pass\ntorch.empty(n)", True),
        ("try:\n    n = forward_batch.seq_lens_sum\nexcept E:\n    n = bs\ntorch.empty(n)", True),
        ("n = bs\nn = n if flag else forward_batch.seq_lens_sum\ntorch.empty(n)", True),
        ("n = getattr(forward_batch, 'seq_lens_sum', None)\ntorch.empty(n)", True),
        ("n = flag or forward_batch.seq_lens_sum\ntorch.empty(n)", True),
        ("a = b\nb = a\ntorch.empty(b)", False),
        ("while flag:\n    a = b\n    b = a\n    torch.empty(b)", False),
    ],
)
def test_what_a_name_holds_where_it_is_used(step: str, expected: bool) -> None:
    assert ("sizes an allocation" in {use for _, use in uses(step)}) == expected


def test_a_long_way_is_followed_too() -> None:
    """And one that parts and meets again at each step of it."""
    names = "".join(
        f"if flag:\n    n{i + 1} = n{i}\nelse:\n    n{i + 1} = n{i} or n{i}\n" for i in range(300)
    )
    found = uses(f"n0 = forward_batch.seq_lens_sum\n{names}torch.empty(n300)")
    assert found[-1] == ("n300", "sizes an allocation")
    assert {use for _, use in found[:-1]} == {"tested"}


def test_a_class_in_between_hides_nothing() -> None:
    step = """
    n = forward_batch.seq_lens_sum
    class Inner:
        n = bs
        def method(self):
            return n + 1
        m = n + 2
    """
    assert uses(step) == [("n + 1", "computed with")]


def test_where_it_stands_is_told_with_the_functions_around() -> None:
    (read,) = host_reads(source("def inner():\n    return forward_batch.seq_lens_cpu[0]"), "f.py")
    assert read == HostRead(
        line=15,
        where="FlashInferMLAAttnBackend.step.inner",
        expression="forward_batch.seq_lens_cpu[0]",
        use="indexed",
        ours=False,
    )


# --- inspect ----------------------------------------------------------------------------------


def told(path: Path) -> list[str]:
    command = ["inspect", str(path), "--flashinfer", "0.7.2", "--json"]
    result = CliRunner().invoke(cli, command)
    facts = json.loads(result.stdout)["facts"]
    return [fact["value"] for fact in facts if fact["name"] == "host lengths read"]


def test_inspect_has_a_line_a_method(tmp_path: Path) -> None:
    file = tmp_path / "flashinfer_mla_backend.py"
    file.write_bytes(source("x = forward_batch.seq_lens_cpu\nx + 1, x[:bs]", own="lens = 0"))
    assert told(file) == [
        "FlashInferMLAAttnBackend.step: line 15, x + 1 (computed with); line 15, x[:bs] (sliced)"
    ]
    file.write_bytes(source())
    assert told(file) == ["nowhere in this file"]


def test_inspect_counts_mlagens_own(tmp_path: Path) -> None:
    file = tmp_path / "flashinfer_mla_backend.py"
    file.write_bytes(patch_of("0.5.23", "0.7.2").patched)
    *others, last = told(file)
    assert last == "mlagen's own lines: 9 places, not listed"
    assert not any("mlagen" in text for text in others)


# --- releases ---------------------------------------------------------------------------------

_PREFILL = "forward_batch.extend_prefix_lens_cpu: passed to any"
_SIZE = "paged_kernel_lens_sum: sizes an allocation"
_ARGUMENTS = "paged_kernel_lens_sum: passed to spec_info.generate_attn_arg_prefill"
_USED = "seq_lens_sum: passed to draft_kv_indices_used_len"
_FITS = "seq_lens_sum: passed to assert_buffer_fits"
_THERE = "seq_lens_cpu is not None: asserted"
_ABSENT = "seq_lens_cpu is None: tested for None"
_SLICED = "seq_lens_cpu[:bs]: sliced"

READS: dict[str, dict[str, dict[int, str]]] = {
    "0.5.10": {
        "FlashInferMLAAttnBackend.init_forward_metadata": {322: _PREFILL},
        "FlashInferMLAAttnBackend.init_forward_metadata_replay_cuda_graph": {
            465: _THERE,
            466: _SLICED,
        },
        "FlashInferMLAAttnBackend.forward_extend": {531: _PREFILL},
        "FlashInferMLAIndicesUpdaterDecode.call_begin_forward": {717: _SIZE},
        "FlashInferMLAIndicesUpdaterPrefill.call_begin_forward": {839: _SIZE, 862: _ARGUMENTS},
        "FlashInferMLAMultiStepDraftBackend.common_template": {
            984: "seq_lens_sum * self.topk + bs * (i + 1): slices kv_indices_buffer[i]"
        },
    },
    "0.5.17": {
        "FlashInferMLAAttnBackend.init_forward_metadata": {412: _PREFILL},
        "FlashInferMLAAttnBackend._apply_cuda_graph_metadata": {491: _THERE, 492: _SLICED},
        "FlashInferMLAAttnBackend.forward_extend": {550: _PREFILL},
        "FlashInferMLAIndicesUpdaterDecode.call_begin_forward": {
            750: _SIZE,
            776: "paged_kernel_lens_sum: slices kv_indices",
        },
        "FlashInferMLAIndicesUpdaterPrefill.call_begin_forward": {906: _SIZE, 935: _ARGUMENTS},
        "FlashInferMLAMultiStepDraftBackend.common_template": {
            1038: _USED,
            1045: _FITS,
            1072: _USED,
        },
    },
    "0.5.23": {
        "FlashInferMLAAttnBackend.init_forward_metadata": {
            449: _PREFILL,
            466: "forward_batch.seq_lens_cpu is not None: tested for None",
            474: "forward_batch.seq_lens_cpu[:bs]: sliced",
        },
        "FlashInferMLAAttnBackend._apply_cuda_graph_metadata": {
            556: _THERE,
            557: _SLICED,
            582: _THERE,
            589: _SLICED,
        },
        "FlashInferMLAAttnBackend._build_fast_verify_plan_kwargs": {665: _ABSENT, 677: _SLICED},
        "FlashInferMLAAttnBackend.forward_extend": {711: _PREFILL},
        "FlashInferMLAIndicesUpdaterDecode.call_begin_forward": {
            915: _SIZE,
            945: "n_kernel_ids > 0: compared",
            948: "n_kernel_ids: slices kv_indices",
        },
        "FlashInferMLAIndicesUpdaterPrefill.call_begin_forward": {
            1083: _SIZE,
            1102: _ARGUMENTS,
            1115: _ARGUMENTS,
        },
        "FlashInferMLAMultiStepDraftBackend.common_template": {
            1252: _USED,
            1259: _FITS,
            1294: _USED,
        },
    },
}


@pytest.mark.parametrize("version", READS)
def test_all_that_a_release_reads(version: str) -> None:
    found: dict[str, dict[int, str]] = {}
    for read in host_reads(sglang_file(version), SGLANG_FILE):
        assert not read.ours
        assert read.line not in found.setdefault(read.where, {})
        found[read.where][read.line] = f"{read.expression}: {read.use}"
    assert found == READS[version]


@pytest.mark.parametrize(("version", "gone"), [("0.5.10", 2), ("0.5.17", 2), ("0.5.23", 6)])
def test_a_patch_takes_the_host_arrays_of_replays_out(version: str, gone: int) -> None:
    """And of eager draft-extend, where SGLang has its own; DFLASH's stay."""
    patched = host_reads(patch_of(version, NEAREST_WHEEL[version]).patched, SGLANG_FILE)
    left = [(read.where, f"{read.expression}: {read.use}") for read in patched if not read.ours]
    before = [(where, use) for where, uses in READS[version].items() for use in uses.values()]
    assert len(before) - len(left) == gone
    assert set(left) < set(before)
    dflash = "FlashInferMLAAttnBackend._build_fast_verify_plan_kwargs"
    assert {where for where, use in left if "seq_lens_cpu" in use} <= {dflash}


@pytest.mark.releases
@pytest.mark.parametrize("version", PINS)
def test_all_releases_size_by_lengths_and_ask_for_prefixes(version: str) -> None:
    reads = host_reads(sglang_file(version), SGLANG_FILE)
    uses = [read.use for read in reads]
    # 0.5.1 allocates by what is on the device.
    assert uses.count("sizes an allocation") == (0 if version == "0.5.1" else 2)
    assert uses.count("passed to any") in (1, 2)
    assert "used" not in uses
    assert all(read.line and not read.ours and "." in read.where for read in reads)
