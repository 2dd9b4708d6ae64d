"""The emitted kernel plans what FlashInfer plans, dealt as the models deal: run for real, on the
CPU, under Triton's interpreter.

The interpreter shows what is computed and where it is written; not that Triton compiles it, which
needs no GPU either, nor what it costs, for which there is tests/gpu.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlagen.codegen.render import render, render_module
from tests.judge.miniature import COPIES, STAGES
from tests.schedule.dealing import (
    FIXED,
    WORTH,
    deal_for_one_layer,
    deal_in_rounds,
    deal_in_turns,
)
from tests.schedule.reference import Merge, Piece, Work, deal, tiles_of, work_of
from tests.specs import device_spec

pytestmark = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("torch", "triton"))),
    reason="needs torch and triton: the kernel runs under Triton's interpreter",
)

PROGRAM = Path(__file__).with_name("kernel_program.py")
MOST_TILES = 1024
ITEMS = ("q_indptr", "kv_indptr", "partial", "q_len", "kv_len", "q_start", "kv_start", "kv_end")
MERGES = ("start", "end", "partial_start", "partial_end", "stride")
SMS = (7, 13, 78, 108, 132)
HEADS = (8, 16, 32, 64, 128)
ODD_HEADS = (1, 5, 12, 20, 48, 96)  # where tiles are of no mask


@dataclass(frozen=True)
class Case:
    """One graph's replay. `added`: KV tokens of a request beyond its sequence length; `pages`: of
    the index buffer."""

    seq_lens: tuple[int, ...]
    tokens: int
    heads: int
    causal: bool
    added: int
    sms: int
    thorough: bool
    dtype: str = "int64"
    max_seq_len: int = 1 << 17
    pages: int = 1 << 28

    def work(self, *, void: bool = False) -> Work:
        """What is to be planned. `void`: no request has any KV."""
        kv_lens = [0 if void else length + self.added for length in self.seq_lens]
        tokens = [self.tokens] * len(self.seq_lens)
        return work_of(tokens, kv_lens, self.heads, self.causal, self.sms)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Graphs of up to 1000 tiles. Lengths come from a seed: so many single draws are slow."""
    tokens = draw(st.integers(1, 5))
    causal = tokens > 1 and draw(st.booleans())
    batch = draw(st.integers(1, 12) | st.integers(1, 200))
    most = draw(st.sampled_from([0, 1, 100, 1000, 8000, 30000]))
    few = random.Random(draw(st.integers(0, 2**32)))
    lengths = [few.choice([0, 1, 63, 64, 65, *[few.randint(0, most)] * 5]) for _ in range(batch)]
    return Case(
        tuple(lengths),
        tokens,
        draw(st.sampled_from(HEADS if causal else (*HEADS, *ODD_HEADS))),
        causal,
        tokens if causal else draw(st.integers(0, 3)),
        draw(st.sampled_from(SMS) | st.integers(2, 160)),
        draw(st.booleans()),
        draw(st.sampled_from(["int32", "int64"])),
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where plans.py lies, as it is emitted."""
    made = tmp_path_factory.mktemp("emitted")
    text = render_module(render(device_spec(), COPIES), "plans", ("header",))
    (made / "plans.py").write_text(text)
    return made


class Kernel:
    """The program that runs the kernel: one process for many cases."""

    def __init__(self, folder: Path, errors: Path) -> None:
        self.errors = errors
        with errors.open("wb") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, str(PROGRAM), str(folder)],
                env={**os.environ, "TRITON_INTERPRET": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            )

    def __call__(self, case: Case, work: Work) -> dict[str, Any]:
        """What the kernel wrote. `work`: the grid, and how many pieces there is room for."""
        grid = {"blocks": work.blocks, "clusters": work.clusters, "items": len(work.pieces)}
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps({**asdict(case), **grid}) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # the line that does not come says it
        line = self.process.stdout.readline()
        assert line, self.errors.read_text()
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        self.process.communicate(timeout=60)


@pytest.fixture(scope="module")
def kernel(folder: Path) -> Iterator[Kernel]:
    running = Kernel(folder, folder / "errors.txt")
    yield running
    running.close()


def numbers(made: Piece | Merge) -> tuple[int, ...]:
    """A piece or a merge as the kernels read it."""
    names = ITEMS if isinstance(made, Piece) else MERGES
    return tuple(getattr(made, name) for name in names)


def check(kernel: Kernel, case: Case, *, void: bool = False) -> None:
    """What the kernel writes is the reference's plan, dealt as the model deals it, and nothing
    else. `void`: the lengths are wrong, and it is the plan without KV."""
    work = case.work(void=void)
    wrote = kernel(case, work)
    assert wrote["error"] == void
    assert wrote["strayed"] == []
    pieces = list(zip(*(wrote[name] for name in ITEMS), strict=True))
    assert sorted(pieces) == sorted(map(numbers, work.pieces))
    merges = list(zip(*(wrote[f"merge_{name}"] for name in MERGES), strict=True))
    unused = work.blocks * work.clusters - len(work.merges)
    assert merges == [*map(numbers, work.merges), *[(0,) * 5] * unused]
    if len(work.pieces) <= work.clusters:
        dealt = deal(work, work.pieces)  # FlashInfer's own, to the byte
    elif case.thorough:
        dealt = deal_in_rounds(work, fixed=FIXED[work.blocks])
    else:
        dealt = deal_for_one_layer(work)
    spans = itertools.pairwise(wrote["begins"])
    assert [pieces[begin:end] for begin, end in spans] == [list(map(numbers, p)) for p in dealt]
    batch = len(case.seq_lens)
    kv_lens = [0 if void else length + case.added for length in case.seq_lens]
    assert wrote["qo_indptr_buf"] == list(range(0, (batch + 1) * case.tokens, case.tokens))
    assert wrote["kv_indptr_buf"] == [0, *itertools.accumulate(kv_lens)]
    assert wrote["kv_len_buf"] == kv_lens
    check_lengths(wrote["filled"], kv_lens, void=void)


def check_lengths(filled: dict[str, Any], kv_lens: list[int], *, void: bool) -> None:
    """The kernel for lengths alone writes the same, and neither a plan nor where kv_indptr
    begins."""
    assert filled["error"] == void
    assert filled["strayed"] == []
    assert filled["kv_indptr_buf"][1:] == list(itertools.accumulate(kv_lens))
    assert filled["kv_len_buf"] == kv_lens


# One process answers all examples, and keeps nothing of them.
once = settings(deadline=None, suppress_health_check=list(HealthCheck))


@settings(once, max_examples=40)
@given(case=cases())
def test_plans(kernel: Kernel, case: Case) -> None:
    check(kernel, case)


@pytest.mark.releases
@pytest.mark.slow
@settings(once, max_examples=2000)
@given(case=cases())
def test_plans_at_length(kernel: Kernel, case: Case) -> None:
    check(kernel, case)


def drawn(case: Case, batch: int, most: int = 30000) -> Case:
    """The case with that many lengths, always the same."""
    some = random.Random(batch)
    return replace(case, seq_lens=tuple(some.randint(0, most) for _ in range(batch)))


DECODE = Case((), 1, 128, causal=False, added=0, sms=132, thorough=True)
VERIFY = Case((), 5, 128, causal=True, added=5, sms=132, thorough=True)
LARGE = {
    "1024 tiles of one block": drawn(replace(DECODE, heads=64), 1024),
    "1020 tiles, five a request": drawn(VERIFY, 204),
    "1020 tiles of one layer": drawn(replace(VERIFY, thorough=False), 204),
    "1020 tiles of one layer, much alike": drawn(replace(VERIFY, thorough=False), 204, 300),
    "1024 tiles of one layer, few clusters": drawn(
        replace(DECODE, heads=64, thorough=False, sms=5), 1024
    ),
    "513 tiles without KV": replace(DECODE, seq_lens=(0,) * 513),
    "300 equal tiles, few clusters": replace(DECODE, seq_lens=(777,) * 300, sms=13),
    "one long among 1024": replace(DECODE, seq_lens=(1,) * 1023 + (100_000,)),
    "one request of the longest context": replace(VERIFY, seq_lens=(1 << 17,)),
}


@pytest.mark.parametrize("name", LARGE)
def test_plans_of_large_graphs(kernel: Kernel, name: str) -> None:
    check(kernel, LARGE[name])


@pytest.mark.parametrize("uneven", [False, True])
def test_one_layer_is_dealt_in_rounds_where_that_is_worth_it(kernel: Kernel, uneven: bool) -> None:
    """In turns one of four clusters gets 1400 tokens, or 1401, and 600 of the seven others, of
    1400 in the mean: as much beyond its share as does not pay, and one more."""
    case = replace(DECODE, seq_lens=(1400 + uneven, *[600] * 7), heads=64, sms=4, thorough=False)
    work = case.work()
    dealt = deal_for_one_layer(work)
    in_turns, in_rounds = deal_in_turns(work), deal_in_rounds(work, fixed=FIXED[1])
    assert in_turns != in_rounds
    assert dealt == (in_rounds if uneven else in_turns)
    check(kernel, case)


@pytest.mark.parametrize("sms", SMS)
@pytest.mark.parametrize("thorough", [False, True], ids=["one layer", "many layers"])
def test_each_cluster_has_a_full_piece_or_more(kernel: Kernel, sms: int, thorough: bool) -> None:
    """Nothing is left for the rounds to begin with where all of the KV is in full pieces."""
    for lengths in ((256 * sms,), (256 * sms, 1, 0)):
        check(kernel, replace(DECODE, seq_lens=lengths, heads=64, sms=sms, thorough=thorough))


@pytest.mark.parametrize("share", [1, 8, 9, 16, 17, 32, 33, 64, 65, 256, 257])
def test_where_the_length_of_a_full_piece_steps(kernel: Kernel, share: int) -> None:
    """A cluster's share of all KV, as FlashInfer rounds it."""
    for length in (7 * share, 7 * share + 1):
        check(kernel, replace(DECODE, seq_lens=(length,), heads=64, sms=7))


def test_a_cluster_with_just_too_much_to_do_takes_no_part_in_a_round(kernel: Kernel) -> None:
    """Its load is the least one and the next piece, to the token."""
    lengths = (486 + 300 + FIXED[1], *[486] * 6, 300, *[200] * 6)
    case = replace(DECODE, seq_lens=lengths, heads=64, sms=7)
    assert case.work().limit >= lengths[0]  # nothing is cut
    check(kernel, case)


# -- lengths that cannot be planned --------------------------------------------------------------

SOME = replace(VERIFY, seq_lens=(100, 7, 0, 3000, 64), tokens=3, added=3, max_seq_len=3000)
WRONG = {
    "negative": (-1,),
    "far below": (-(2**31),),
    "above the longest context": (3001,),
    "far above": (2**31 - 1,),
    "one in int64 that is small in int32": (2**32 + 5,),
    "one in int64 that is small and negative": (-(2**40) + 5,),
    "several": (-1, 2**31 - 1, -(2**31), 2**31 - 1),
}


def wide(lengths: tuple[int, ...]) -> str:
    """The type that they need."""
    return "int32" if all(-(2**31) <= length < 2**31 for length in lengths) else "int64"


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("place", [0, 2, 4])
def test_a_wrong_length_makes_a_plan_without_kv(kernel: Kernel, name: str, place: int) -> None:
    lengths = list(SOME.seq_lens)
    lengths[place : place + 1] = WRONG[name]
    case = replace(SOME, seq_lens=tuple(lengths))
    check(kernel, replace(case, dtype=wide(case.seq_lens), thorough=place > 0), void=True)


@pytest.mark.parametrize("over", [-1, 0, 1])
def test_lengths_that_do_not_fit_the_index_buffer_do_too(kernel: Kernel, over: int) -> None:
    pages = sum(length + SOME.added for length in SOME.seq_lens) - over
    check(kernel, replace(SOME, pages=pages), void=over > 0)


def test_a_length_that_comes_out_negative_does_too(kernel: Kernel) -> None:
    """kv_len: seq_lens - 2, and a request of one token."""
    shorter = replace(DECODE, added=-2, sms=13)
    check(kernel, replace(shorter, seq_lens=(2, 500, 3)))
    check(kernel, replace(shorter, seq_lens=(2, 500, 1)), void=True)
    check(kernel, replace(shorter, seq_lens=(0,)), void=True)


@settings(once, max_examples=6)
@given(case=cases(), wrong=st.sampled_from([-1, -(2**31), (1 << 17) + 1, 2**31 - 1]),
       place=st.integers(0))  # fmt: skip
def test_any_plan_with_a_wrong_length(kernel: Kernel, case: Case, wrong: int, place: int) -> None:
    lengths = list(case.seq_lens)
    lengths[place % len(lengths)] = wrong
    check(kernel, replace(case, seq_lens=tuple(lengths)), void=True)


def test_a_step_too_far_is_seen(kernel: Kernel) -> None:
    """Of arrays that are shorter than a plan the canaries behind them tell."""
    work = SOME.work()
    wrote = kernel(SOME, replace(work, pieces=work.pieces[:-1]))
    assert len(wrote["strayed"]) == len(ITEMS)


# -- the class around the kernel, without the kernel ---------------------------------------------


@dataclass
class Launches:
    """Stands in for the kernel: keeps what it is launched with."""

    made: list[tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        assert grid == (1,)
        return lambda *given, **options: self.made.append((given, options))


@dataclass(frozen=True)
class Emitted:
    """The emitted module, with pinned memory that is none and a kernel that is not launched."""

    plans: ModuleType
    torch: ModuleType
    kernels: tuple[Any, Any]  # that plans, and that fills in lengths: not launched either
    launches: Launches
    fills: Launches

    def request(self, batch: int, tokens: int, heads: int, **more: Any) -> Any:
        blocks = 2 if tokens * heads > 64 else 1
        given = {"grid": (blocks, 132 // blocks), "variant": "verify", "plan": None, **more}
        nothing = dict.fromkeys(("qo_indptr", "kv_indptr", "kv_len", "kv_ends", "kv_lens"))
        sizes = {"batch_size": batch, "tokens_per_req": tokens, "num_heads": heads}
        return self.plans.MlagenRequest(**nothing, **sizes, **given)

    def wrapper(self, blocks: int, batch: int) -> Any:
        torch = self.torch
        bound = SimpleNamespace(
            _plan_info=[blocks, 132 // blocks, *range(64, 64 * 15, 64), 0, 0],
            _int_workspace_buffer=torch.zeros(4096, dtype=torch.uint8),
            _kv_indices_buf=torch.zeros(1000, dtype=torch.int32),
            _qo_indptr_buf=torch.zeros(batch + 8, dtype=torch.int32),
            _kv_indptr_buf=torch.zeros(batch + 8, dtype=torch.int32),
            _kv_len_arr_buf=torch.zeros(batch + 8, dtype=torch.int32),
        )
        bound._planned_backend = bound
        return bound

    def device(self, batch: int, tokens: int, heads: int, layers: int = 61, added: int = 0) -> Any:
        request = self.request(batch, tokens, heads, added=added)
        wrapper = self.wrapper(request.grid[0], batch)
        return self.plans.MlagenDevicePlan(wrapper, request, tokens > 1, 4000, layers)

    def lengths(self, count: int, *, on_gpu: bool = True) -> Any:
        class Lengths(self.torch.Tensor):  # type: ignore[misc,name-defined]
            is_cuda = on_gpu
            # What is made of it is a plain tensor: two of these are of two classes.
            __torch_function__ = self.torch._C._disabled_torch_function_impl

        return self.torch.zeros(count, dtype=self.torch.int64).as_subclass(Lengths)


@pytest.fixture(params=[COPIES, STAGES], ids=["0.6.17", "0.7.2"])
def emitted(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Emitted:
    torch = pytest.importorskip("torch")
    path = tmp_path / "emitted_plans.py"
    path.write_text(render_module(render(device_spec(), request.param), "plans", ("header",)))
    spec = importlib.util.spec_from_file_location("emitted_plans", path)
    assert spec is not None
    assert spec.loader is not None
    plans = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "emitted_plans", plans)  # where a dataclass looks itself up
    spec.loader.exec_module(plans)
    kernels = plans._mlagen_plan_kernel, plans._mlagen_lengths_kernel
    launches, fills = Launches(), Launches()
    monkeypatch.setattr(plans, "_mlagen_plan_kernel", launches)
    monkeypatch.setattr(plans, "_mlagen_lengths_kernel", fills)
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *a, pin_memory=False, **k: zeros(*a, **k))
    return Emitted(plans, torch, kernels, launches, fills)


@pytest.mark.parametrize(
    ("batch", "tokens", "heads", "bits", "warps"),
    [(1, 1, 16, 6, 4), (64, 1, 128, 6, 4), (65, 1, 128, 8, 8), (256, 1, 64, 8, 8),
     (257, 1, 64, 10, 8), (204, 5, 128, 10, 8)],
)  # fmt: skip
def test_what_is_compiled_for_a_graph(
    emitted: Emitted, batch: int, tokens: int, heads: int, bits: int, warps: int
) -> None:
    device = emitted.device(batch, tokens, heads, added=tokens)
    device.launch(emitted.lengths(batch))
    ((given, options),) = emitted.launches.made
    assert options == {"num_warps": warps}
    blocks = 2 if tokens * heads > 64 else 1
    clusters = 132 // blocks
    assert given[1:5] == (tokens, batch, 4000, 1000)
    assert given[9:11] == (device.error, device.number)
    assert given[12:24] == (
        tokens,
        heads,
        tokens > 1,
        blocks,
        clusters,
        bits,
        256 if clusters == 132 else 128,
        256,
        FIXED[blocks],
        True,
        WORTH,
        batch * -(-tokens * heads // (64 * blocks)) <= clusters,
    )
    assert given[24:] == tuple(range(16, 16 * 15, 16))  # offsets in int32
    turns, of_each = given[11].tolist()
    assert [turns[place] for place in of_each] == list(range(clusters))
    assert given[11].dtype == emitted.torch.int32
    assert [array.numel() for array in given[6:9]] == [batch + 1, batch + 1, batch]
    assert given[5].dtype == emitted.torch.int32


def test_the_kernel_takes_what_it_is_given(emitted: Emitted) -> None:
    """As many arguments as it has parameters, in its order; the reference's constants."""
    source = Path(emitted.plans.__file__ or "").read_text()
    head = source.partition("def _mlagen_plan_kernel(")[2].partition("):\n")[0]
    parameters = [line.split("#")[0].strip(" ,") for line in head.splitlines()]
    parameters = [parameter.removesuffix(": tl.constexpr") for parameter in parameters if parameter]
    emitted.device(3, 1, 128).launch(emitted.lengths(3))
    ((given, _),) = emitted.launches.made
    assert len(given) == len(parameters)
    assert parameters[24:27] == ["Q_INDPTR", "KV_INDPTR", "PARTIAL_INDPTR"]
    assert parameters[20:24] == ["FIXED", "THOROUGH", "WORTH", "FEW"]
    assert emitted.plans.MlagenDevicePlan.FIXED == FIXED
    assert emitted.plans.MlagenDevicePlan.WORTH == WORTH
    assert emitted.plans.MlagenDevicePlan.MOST_TILES == MOST_TILES


@pytest.mark.parametrize(("batch", "slots"), [(1, 1), (64, 64), (65, 128), (204, 256)])
def test_the_kernel_for_lengths_alone(emitted: Emitted, batch: int, slots: int) -> None:
    device = emitted.device(batch, 5, 128, added=5)
    lengths = emitted.lengths(batch)
    device.fill_lengths(lengths)
    ((given, options),) = emitted.fills.made
    assert (given[0], options) == (lengths, {})
    assert given[1:5] == (5, batch, 4000, 1000)
    assert [array.numel() for array in given[5:7]] == [batch + 1, batch]
    assert given[7:] == (device.error, device.number, slots)
    assert emitted.launches.made == []
    with pytest.raises(emitted.plans.MlagenPlanError, match=f"{batch} sequence lengths needed"):
        device.fill_lengths(emitted.lengths(batch - 1))


def compiled(kernel: Any, given: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """What Triton makes of a launch, for an H200."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    signature, constants = {}, {}
    for place, (parameter, argument) in enumerate(zip(kernel.params, given, strict=True)):
        if parameter.is_constexpr:
            signature[parameter.name] = "constexpr"
            constants[(place,)] = argument
        elif isinstance(argument, int):
            signature[parameter.name] = "i32"
        else:
            signature[parameter.name] = f"*i{8 * argument.element_size()}"
    source = ASTSource(kernel, signature, constants)
    return compile(source, target=GPUTarget("cuda", 90, 32), options=options)


@pytest.mark.slow
@pytest.mark.parametrize("emitted", [COPIES], indirect=True, ids=["0.6.17"])
@pytest.mark.parametrize(
    ("batch", "heads", "layers"),
    [
        (64, 16, 1),
        pytest.param(64, 16, 61, marks=pytest.mark.releases),
        pytest.param(512, 128, 1, marks=pytest.mark.releases),
        pytest.param(1024, 16, 1, marks=pytest.mark.releases),
        pytest.param(1024, 16, 61, marks=pytest.mark.releases),
    ],
)
def test_triton_compiles_what_is_launched(
    emitted: Emitted,
    batch: int,
    heads: int,
    layers: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All that a launch compiles; the plan for one layer has both dealings in it."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    device = emitted.device(batch, 1, heads, layers=layers)
    device.launch(emitted.lengths(batch))
    device.fill_lengths(emitted.lengths(batch))
    for kernel, launches in zip(emitted.kernels, (emitted.launches, emitted.fills), strict=True):
        ((given, options),) = launches.made
        made = compiled(kernel, given, options)
        assert ".target sm_90" in made.asm["ptx"]
        assert made.asm["cubin"]


@pytest.mark.parametrize("layers", [1, 61])
@pytest.mark.parametrize(("batch", "many"), [(66, False), (67, True)])
def test_many_layers_are_worth_all_care(
    emitted: Emitted, layers: int, batch: int, many: bool
) -> None:
    emitted.device(batch, 1, 128, layers=layers).launch(emitted.lengths(batch))
    assert emitted.launches.made[0][0][21:24] == (layers > 1, WORTH, not many)


@pytest.mark.parametrize("clusters", [1, 2, 3, 7, 13, 66, 78, 132])
def test_whose_turn_it_is_is_flashinfers(emitted: Emitted, clusters: int) -> None:
    """Where no cluster gets a second piece."""
    sizes = range(100, 100 + clusters)
    pieces = tuple(Piece(n, 0, n, 0, -1, 1, size, 0, 0, size) for n, size in enumerate(sizes))
    dealt = deal(Work(1, clusters, 1 << 20, pieces, (), 0), pieces)
    turns = emitted.plans._mlagen_turns(clusters)
    assert [dealt[cluster][0].request for cluster in turns] == list(range(clusters))


def test_what_the_kernel_cannot_plan(emitted: Emitted) -> None:
    refuses = emitted.plans.MlagenDevicePlan.refuses
    tiles_here = emitted.plans.MlagenDevicePlan.tiles_of
    for batch, tokens, heads in ((1024, 1, 128), (204, 5, 128), (1, 1, 8), (3, 5, 16)):
        request = emitted.request(batch, tokens, heads)
        assert tiles_here(request, request.grid[0]) == batch * tiles_of(
            tokens, heads, request.grid[0]
        )
        assert refuses(request, 1000) is None
    assert "1025 query tiles" in refuses(emitted.request(1025, 1, 128), 1000)
    assert "1025 query tiles" in refuses(emitted.request(205, 5, 128), 1000)
    assert refuses(emitted.request(1024, 1, 128), (2**31 - 1) // 1024) is None
    assert "overflow int32" in refuses(emitted.request(1024, 1, 128), 2**31 // 1024)
    assert "clusters of 4 blocks" in refuses(emitted.request(1, 1, 128, grid=(4, 33)), 1000)
    assert "pages of 64 tokens" in refuses(emitted.request(1, 1, 128, page_size=64), 1000)


@pytest.mark.parametrize(
    ("version", "compiles"), [("3.2.0", False), ("3.3.1", False), ("3.4.0", True), ("4.0", True)]
)
def test_a_triton_that_does_not_compile_the_kernel(
    emitted: Emitted, monkeypatch: pytest.MonkeyPatch, version: str, compiles: bool
) -> None:
    monkeypatch.setattr(emitted.plans.triton, "__version__", version)
    reason = emitted.plans.MlagenDevicePlan.refuses(emitted.request(1, 1, 128), 1000)
    assert reason == (None if compiles else f"Triton {version} does not compile the kernel")


def test_a_replay_launches_unless_the_graph_plans_itself(emitted: Emitted) -> None:
    device = emitted.device(4, 1, 128)
    lengths = emitted.lengths(8)
    device.plan(lengths)
    assert len(emitted.launches.made) == 1
    device.recorded = lengths[:4]
    device.plan(lengths)
    others = emitted.lengths(8)
    others[:] = emitted.torch.arange(8)
    device.plan(others)
    assert len(emitted.launches.made) == 1
    assert lengths[:4].tolist() == [0, 1, 2, 3]


def test_an_error_of_the_gpu_is_told_once(emitted: Emitted) -> None:
    for added, least in ((0, 0), (5, 0), (-2, 2)):
        device = emitted.device(4, 1, 128, added=added)
        device.error[0] = device.number
        said = f"verify: .* of 4 requests .* below {least} or above 4000, or all .* of 1000 pages"
        with pytest.raises(emitted.plans.MlagenPlanError, match=said):
            device.plan(emitted.lengths(4))
        device.plan(emitted.lengths(4))
    assert len(emitted.launches.made) == 3


def test_an_error_is_told_by_whichever_graph_is_planned_next(emitted: Emitted) -> None:
    """The one that it is of may not be replayed for long."""
    small, large = emitted.device(4, 1, 128), emitted.device(9, 1, 128)
    assert small.number != large.number
    small.error[0] = small.number
    with pytest.raises(emitted.plans.MlagenPlanError, match="graph of 4 requests"):
        large.plan(emitted.lengths(9))
    for device, batch in ((large, 9), (small, 4)):
        device.plan(emitted.lengths(batch))
    assert len(emitted.launches.made) == 2


def test_lengths_that_a_launch_cannot_read(emitted: Emitted) -> None:
    device = emitted.device(4, 1, 128)
    for lengths, said in (
        (emitted.lengths(4, on_gpu=False), "on the GPU"),
        (emitted.lengths(8)[::2], "contiguous"),
        (emitted.lengths(3), "4 sequence lengths needed, got 3"),
    ):
        with pytest.raises(emitted.plans.MlagenPlanError, match=said):
            device.launch(lengths)
    assert emitted.launches.made == []
