"""The emitted kernel plans what FlashInfer plans, dealt as the models deal: run for real, on the
CPU, under Triton's interpreter.

The interpreter shows what is computed and where it is written; not that Triton compiles it, nor
what it costs. For that there is tests/gpu.
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
from mlagen.codegen.spec import Spec
from tests.judge.miniature import COPIES, STAGES
from tests.releases import shipped
from tests.schedule.dealing import deal_in_rounds, deal_in_turns
from tests.schedule.reference import Merge, Piece, Work, tiles_of, work_of
from tests.schedule.test_reference import fields

pytestmark = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("torch", "triton"))),
    reason="needs torch and triton: the kernel runs under Triton's interpreter",
)

PROGRAM = Path(__file__).with_name("kernel_program.py")
#: What a piece costs beside its KV, by blocks a cluster: MlagenDevicePlan.FIXED.
FIXED = {1: 192, 2: 256}
MOST_TILES = 1024
ITEMS = ("q_indptr", "kv_indptr", "partial", "q_len", "kv_len", "q_start", "kv_start", "kv_end")
MERGES = ("start", "end", "partial_start", "partial_end", "stride")
SMS = (7, 13, 78, 108, 132)
HEADS = (8, 16, 32, 64, 128)


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
    max_context: int = 1 << 17
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
        draw(st.sampled_from(HEADS)),
        causal,
        tokens if causal else draw(st.integers(0, 3)),
        draw(st.sampled_from(SMS)),
        draw(st.booleans()),
        draw(st.sampled_from(["int32", "int64"])),
    )


def device_spec() -> Spec:
    """The shipped variants, those of them planned on the GPU that can be."""
    variants = tuple(
        variant.model_copy(update={"planner": "device"})
        if "replay" in variant.when and not variant.context_parallel
        else variant
        for variant in shipped().variants
    )
    return shipped().model_copy(update={"variants": variants})


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
    dealt = deal_in_turns(work)
    if case.thorough:
        dealt = deal_in_rounds(work, fixed=FIXED[work.blocks])
    spans = itertools.pairwise(wrote["begins"])
    assert [pieces[begin:end] for begin, end in spans] == [list(map(numbers, p)) for p in dealt]
    batch = len(case.seq_lens)
    kv_lens = [0 if void else length + case.added for length in case.seq_lens]
    assert wrote["qo_indptr_buf"] == list(range(0, (batch + 1) * case.tokens, case.tokens))
    assert wrote["kv_indptr_buf"] == [0, *itertools.accumulate(kv_lens)]
    assert wrote["kv_len_buf"] == kv_lens


# One process answers all examples, and keeps nothing of them.
once = settings(deadline=None, suppress_health_check=list(HealthCheck))


@settings(once, max_examples=60)
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
    "1024 tiles of two blocks": drawn(DECODE, 1024),
    "1020 tiles, five a request": drawn(VERIFY, 204),
    "1020 tiles in turns": drawn(replace(VERIFY, thorough=False), 204),
    "1024 tiles without KV": replace(DECODE, seq_lens=(0,) * 1024),
    "1024 equal tiles, few clusters": replace(DECODE, seq_lens=(777,) * 1024, sms=13),
    "one long among 1024": replace(DECODE, seq_lens=(1,) * 1023 + (100_000,)),
    "one request of the longest context": replace(VERIFY, seq_lens=(1 << 17,)),
}


@pytest.mark.parametrize("name", LARGE)
def test_plans_of_large_graphs(kernel: Kernel, name: str) -> None:
    check(kernel, LARGE[name])


@pytest.mark.parametrize("sms", SMS)
@pytest.mark.parametrize("thorough", [False, True], ids=["in turns", "in rounds"])
def test_each_cluster_has_a_full_piece_or_more(kernel: Kernel, sms: int, thorough: bool) -> None:
    """Nothing is left for the rounds to begin with where all of the KV is in full pieces."""
    for lengths in ((256 * sms,), (256 * sms, 0), (256 * sms, 1, 1), (512,) * sms):
        check(kernel, replace(DECODE, seq_lens=lengths, heads=64, sms=sms, thorough=thorough))


# -- lengths that cannot be planned --------------------------------------------------------------

SOME = replace(VERIFY, seq_lens=(100, 7, 0, 3000, 64), tokens=3, added=3, max_context=3000)
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


@settings(once, max_examples=10)
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
