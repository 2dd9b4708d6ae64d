"""Forks that go right, executed: each is a real release changed in one way, patched, and driven.

What reaches the planner is compared with lengths worked out here; nothing may wait.
"""

from __future__ import annotations

import pytest

from mlagen.codegen.provenance import remove_regions
from tests.executed import expected
from tests.executed.harness import Session
from tests.executed.runs import NDT
from tests.executed.stubs import Shape
from tests.releases import NEAREST_WHEEL, patch_of

from .made import (
    BACKEND,
    DECODE,
    PREFILL,
    RELEASE,
    Change,
    appended,
    assert_plans_are_right,
    fork,
    in_a_mixin,
    one_branch_for_decode_and_verify,
    patched,
    renamed,
    replaced,
    run,
    within,
)

SLICED = f'''
class SlicedBackend({BACKEND}):
    """Hands its base no more than the batch, and the host's lengths as a view."""

    def _apply_cuda_graph_metadata(self, *more, **given):
        bs = given["bs"]
        for name in ("req_pool_indices", "seq_lens", "seq_lens_cpu"):
            given[name] = given[name][:bs]
        super()._apply_cuda_graph_metadata(*more, **given)


{BACKEND} = SlicedBackend
'''

TRACED = """
def traced(method):
    def inner(self, *args, **kwargs):
        return method(self, *args, **kwargs)

    return inner


@dataclass"""

RIGHT: dict[str, tuple[Change, ...]] = {
    "the dictionary of verify wrappers has another name": (
        renamed(prefill_cuda_graph_metadata="my_prefill_graphs"),
    ),
    "update takes a positional parameter more": (
        within(PREFILL, replaced(r"def update\(\n        self,\n", r"\g<0>        group: int,\n")),
        within(DECODE, replaced(r"def update\(\n        self,\n", r"\g<0>        group: int,\n")),
        replaced(r"self\.indices_updater_\w+\.update\(\n", r"\g<0>                0,\n", None),
    ),
    "call_begin_forward takes a positional parameter more": (
        replaced(r"def call_begin_forward\(\n        self,\n", r"\g<0>        group: int,\n", 2),
        replaced(r"self\.call_begin_forward\(\n", r"\g<0>            0,\n", 2),
    ),
    "the shared method takes a positional parameter more": (
        replaced(
            r"def _apply_cuda_graph_metadata\(\n        self,\n", r"\g<0>        tier: int,\n"
        ),
        replaced(r"self\._apply_cuda_graph_metadata\(\n", r"\g<0>                0,\n", 2),
    ),
    "parameters stand behind the last one": (
        replaced(
            r"(def (?:update|call_begin_forward)\((?:[^()]|\[[^]]*\])*?)(        \*\*fast|    \):)",
            r"\1        window: int = -1,\n\2",
            None,
        ),
    ),
    "decode and verify share a branch": (one_branch_for_decode_and_verify,),
    "verify shares its branch with draft-extend": (
        replaced(
            r"        elif forward_mode\.is_target_verify\(\):",
            "        elif forward_mode.is_target_verify() or forward_mode.is_draft_extend():",
            2,
        ),
    ),
    "verify is what is not decode": (
        replaced(
            r"        elif forward_mode\.is_target_verify\(\):\n            self",
            "        elif not forward_mode.is_target_verify():\n"
            "            raise ValueError(forward_mode)\n"
            "        else:\n            self",
        ),
        replaced(r"        else:\n            raise ValueError\(f\"Invalid forward[^\n]*\n", ""),
    ),
    "methods stand in a mixin of the same file": (
        in_a_mixin("_apply_cuda_graph_metadata", "_verify_graph_key", "init_forward_metadata"),
    ),
    "a wrapper is handed over under a local name": (
        within(
            BACKEND,
            replaced(
                r"    def init_forward_metadata\(self, forward_batch[^\n]*\n",
                r"\g<0>        eager = self.decode_wrapper\n",
            ),
        ),
        replaced(
            r"            prefix_lens = forward_batch\.extend_prefix_lens\n",
            r"\g<0>            paged = self.prefill_wrapper_paged\n",
        ),
        replaced(r"decode_wrapper=self\.decode_wrapper,", "decode_wrapper=eager,"),
        replaced(
            r"prefill_wrapper_paged=self\.prefill_wrapper_paged,", "prefill_wrapper_paged=paged,"
        ),
    ),
    "a captured wrapper is looked up first": (
        replaced(
            r"            self\.indices_updater_prefill\.update\(\n"
            r"(?=                req_pool_indices\[:bs\])",
            "            wrapper = self.prefill_cuda_graph_metadata[bs]\n" r"\g<0>",
        ),
        replaced(
            r"prefill_wrapper_paged=self\.prefill_cuda_graph_metadata\[[^,]*?\n\s+\],"
            r"|prefill_wrapper_paged=self\.prefill_cuda_graph_metadata\[[^]]*\],"
            r"|prefill_wrapper_paged=self\.prefill_cuda_graph_metadata\[\n[^\n]*\n\s+\],",
            "prefill_wrapper_paged=wrapper,",
        ),
    ),
    "methods are decorated": (
        lambda source: source.replace("\n@dataclass", TRACED, 1),
        replaced(
            r"    def (update|call_begin_forward|_apply_cuda_graph_metadata"
            r"|init_forward_metadata)\(",
            r"    @traced\n\g<0>",
            None,
        ),
    ),
    "a subclass of the same file slices what it hands on": (appended(SLICED),),
}


#: Changes that one fork can have at the same time: as much as all of them, in a third of the time.
TOGETHER = (
    (
        "the dictionary of verify wrappers has another name",
        "update takes a positional parameter more",
        "call_begin_forward takes a positional parameter more",
        "the shared method takes a positional parameter more",
        "parameters stand behind the last one",
        "methods are decorated",
        "a subclass of the same file slices what it hands on",
    ),
    ("decode and verify share a branch", "methods stand in a mixin of the same file"),
    (
        "verify shares its branch with draft-extend",
        "a wrapper is handed over under a local name",
        "a captured wrapper is looked up first",
    ),
    ("verify is what is not decode",),
)


def test_every_change_is_made_in_some_fork() -> None:
    assert sorted(name for names in TOGETHER for name in names) == sorted(RIGHT)


@pytest.mark.parametrize("names", TOGETHER, ids=lambda names: " + ".join(names))
def test_a_fork_that_goes_right(names: tuple[str, ...]) -> None:
    data = fork(*(change for name in names for change in RIGHT[name]))
    text = patched(data)
    assert remove_regions(text) == data
    assert_plans_are_right(run(text))


@pytest.mark.releases
@pytest.mark.parametrize("name", RIGHT)
def test_a_fork_with_one_change(name: str) -> None:
    data = fork(*RIGHT[name])
    text = patched(data)
    assert remove_regions(text) == data
    assert_plans_are_right(run(text))


def test_a_subclass_of_another_file_slices_what_it_hands_on() -> None:
    """It is not in the file when that is patched."""
    text = patch_of(RELEASE, NEAREST_WHEEL[RELEASE]).patched
    assert_plans_are_right(run(text + SLICED.encode()))


PAIR = f"""

class SlicedBackend({BACKEND}):
    def init_forward_metadata_capture_cuda_graph(
        self, bs, tokens, rows, seq_lens, encoder_lens, forward_mode, spec_info
    ):
        super().init_forward_metadata_capture_cuda_graph(
            bs, tokens, rows[:bs], seq_lens[:bs], encoder_lens, forward_mode, spec_info
        )

    def init_forward_metadata_replay_cuda_graph(
        self, bs, rows, seq_lens, seq_lens_sum, encoder_lens, forward_mode, spec_info,
        seq_lens_cpu,
    ):
        super().init_forward_metadata_replay_cuda_graph(
            bs, rows[:bs], seq_lens[:bs], seq_lens_sum, encoder_lens, forward_mode,
            spec_info, seq_lens_cpu[: self.host_rows or bs],
        )


{BACKEND} = SlicedBackend
{BACKEND}.host_rows = None
"""


@pytest.mark.parametrize("where", ["same file", "another file"])
def test_capture_and_replay_with_sliced_lengths(where: str) -> None:
    release = "0.5.10"
    if where == "same file":
        text = patched(fork(appended(PAIR), release=release), release=release)
    else:
        text = patch_of(release, NEAREST_WHEEL[release]).patched + PAIR.encode()
    s = run(text, release)
    assert_plans_are_right(s)
    # One that slices more than the batch off is told, not read past its end.
    s.backend.host_rows = 3
    for replay in (s.replay_decode, lambda lens, bs: s.replay_verify(lens, NDT, bs=bs)):
        with pytest.raises(RuntimeError, match="4 host lengths needed, got 3"):
            replay([10, 20, 30, 40], bs=4)


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_offsets_in_pages(page_size: int) -> None:
    """0.5.1 plans pages of more than one token: kv_indptr counts pages, kv_len tokens."""
    release, flashinfer = "0.5.1", NEAREST_WHEEL["0.5.1"]
    text = patch_of(release, flashinfer).patched
    s = Session(release, text, flashinfer=flashinfer, shape=Shape(page_size=page_size))

    def pages(lens: list[int]) -> list[int]:
        return expected.indptr([-(-n // page_size) for n in lens])

    s.capture_decode(4)
    for lens in ([10, 16, 17, 4], [1, 33, 2], [12]):
        rows = expected.padded(lens, 4)
        done = s.replay_decode(lens, bs=4)
        assert done.record.arrays == ([0, 1, 2, 3, 4], pages(rows), rows)
        assert not done.waits
        assert not done.record.stock
        extend = s.eager_extend(lens, [1] * len(lens), mode="extend")
        assert extend.records[-1].arrays == (
            expected.indptr([1] * len(lens)),
            pages(list(lens)),
            list(lens),
        )
