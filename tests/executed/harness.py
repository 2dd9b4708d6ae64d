"""Runs a release's `flashinfer_mla_backend.py`, patched or not, and tells what reached the planner.

    session = Session("0.5.18")                     # the file as released
    session = Session("0.5.18", patched_bytes)      # the same file after `mlagen patch`
    session.capture_verify(bs=4, ndt=3)
    done = session.replay_verify([10, 20, 30], ndt=3, bs=4)
    assert done.record.arrays == expected.verify([10, 20, 30], 3, bs=4)
    assert done.launch.tokens == session.tokens([13, 23, 33], bs=4, pad=4)
    assert not done.waits

The drivers do what the release's runners do: static buffers with padded rows, host lengths in the
release's dtype, the release's calls in the release's order. A driver returns `Done`: the plans that
were made, what each kernel launch then read, and where the host waited.

The host runs ahead of the device inside `with session.gpu.hold():`. Launches made there are
complete only after the block.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import linecache
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

from packaging.version import Version

from ..releases import PINS, sglang_file
from .batches import SAME, Batches, HostLens, Same
from .device import Gpu, Wait
from .flashinfer import CapturedGraph, FlashInfer, Launch, PlanRecord
from .kernels import StoredRow
from .release_code import builtins_with
from .stubs import Shape, Stubs

_serial = itertools.count()


@dataclass(frozen=True)
class Done:
    """What one driver call led to.

    records: plans, in order. launches: what the kernels of that forward pass read, one a draft step
    (none at capture). waits: where the host waited for the device. stored: the rows that the draft
    index kernel wrote.
    """

    records: list[PlanRecord]
    launches: list[Launch]
    waits: tuple[Wait, ...]
    stored: list[StoredRow] = field(default_factory=list)

    @property
    def record(self) -> PlanRecord:
        """The only plan."""
        assert len(self.records) == 1, f"{len(self.records)} plans, one expected"
        return self.records[0]

    @property
    def launch(self) -> Launch:
        """The only launch."""
        assert len(self.launches) == 1, f"{len(self.launches)} launches, one expected"
        return self.launches[0]


class Session:
    """One back end of one release on a stand-in GPU.

    release: the SGLang version, which says how the file is driven and where the formulas around it
    come from. source: the file's bytes (None: as released). flashinfer: its version (None: what the
    release pins). fa: the back end that FlashInfer resolves `auto` to. shape: model and server.

    `backend` is the target model's back end, `draft` the multi-step one once a draft driver ran,
    `module` the executed file; `gpu`, `fi` and `stubs` are the stand-ins. Call anything of the back
    end's yourself under `with session.running():`.
    """

    def __init__(
        self,
        release: str,
        source: bytes | None = None,
        *,
        flashinfer: str | None = None,
        fa: str = "fa3",
        shape: Shape | None = None,
    ) -> None:
        self.release = release
        self.shape = shape or Shape()
        self.gpu = Gpu()
        self.fi = FlashInfer(flashinfer or PINS[release], self.gpu, backend=fa)
        self.graphs: dict[tuple[Any, ...], list[CapturedGraph]] = {}
        self.draft: Any = None
        self._draft_steps = 0
        self._version = Version(release)
        with self.running():
            self.stubs = Stubs(release, self.fi, self.shape)
            self.modes: Any = self.stubs.provide("", "ForwardMode")
            self.module = self._load(sglang_file(release) if source is None else source)
            self.runner = self.stubs.model_runner()
            self.backend: Any = self.module.FlashInferMLAAttnBackend(self.runner)
            self._init_graph_state(self.backend)
            fill = int(self.backend.get_cuda_graph_seq_len_fill_value())
            self._batches = Batches(release, fill, self.runner)
        self.gpu.take_waits()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """torch sees the stand-in GPU."""
        with self.gpu.running():
            yield

    def tokens(
        self, lens: Sequence[int], *, bs: int | None = None, pad: int = 0
    ) -> list[list[int]]:
        """The KV indices of the first `lens[i]` tokens of each request, for `Launch.tokens`.

        Row i is request i + 1; the `bs - len(lens)` padded rows are the first `pad` tokens of
        request 0. Under context parallelism, this rank's share.
        """
        size, rank, width = self.shape.dcp_size, self.shape.dcp_rank, self.shape.table_width
        rows = [(i + 1, n) for i, n in enumerate(lens)]
        rows += [(0, pad)] * ((bs or len(lens)) - len(lens))
        return [[t // size for t in range(r * width, r * width + n)][rank::size] for r, n in rows]

    # -- the target model: graphs ------------------------------------------------------------

    def capture_decode(self, bs: int) -> Done:
        """Capture the decode graph of this batch size."""
        return self._capture(("decode", bs), self.modes.DECODE, bs, bs, None)

    def replay_decode(
        self, seq_lens: Sequence[int], *, bs: int | None = None, host_lens: HostLens = SAME
    ) -> Done:
        """Replay it. bs: the captured batch size, if the batch is padded to it."""
        bs = bs or len(seq_lens)
        return self._replay(("decode", bs), self.modes.DECODE, seq_lens, bs, host_lens, None)

    def capture_verify(
        self, bs: int, ndt: int, *, kind: str = "eagle", graph_tokens: int | None = None
    ) -> Done:
        """Capture a target-verify graph: `ndt` tokens a request.

        kind: eagle, ngram or dflash. graph_tokens: a ragged graph (DFLASH) of that many tokens, for
        `bs` requests.
        """
        lens = None
        if graph_tokens is not None:
            share, rest = divmod(graph_tokens, bs)
            lens = [share + (i < rest) for i in range(bs)]
        spec = self._verify_input(kind, ndt, bs, lens, graph_tokens)
        key = ("verify", graph_tokens or bs, graph_tokens is not None)
        return self._capture(key, self.modes.TARGET_VERIFY, bs, graph_tokens or bs * ndt, spec)

    def replay_verify(
        self,
        seq_lens: Sequence[int],
        ndt: int,
        *,
        bs: int | None = None,
        kind: str = "eagle",
        host_lens: HostLens = SAME,
        verify_lens: Sequence[int] | None = None,
        graph_tokens: int | None = None,
    ) -> Done:
        """Replay it with prefixes `seq_lens`.

        verify_lens, graph_tokens: the tokens of each request and the graph's, for a ragged one.
        DFLASH's worker hands over host lengths that hold the window already (0.5.14 and later).
        """
        bs = bs or len(seq_lens)
        spec = self._verify_input(kind, ndt, bs, verify_lens, graph_tokens)
        host_lens = self._verify_host_lens(kind, seq_lens, ndt, verify_lens, host_lens)
        key = ("verify", graph_tokens or bs, graph_tokens is not None)
        return self._replay(key, self.modes.TARGET_VERIFY, seq_lens, bs, host_lens, spec)

    # -- the target model: eager -------------------------------------------------------------

    def eager_decode(self, seq_lens: Sequence[int], *, host_lens: HostLens = SAME) -> Done:
        """Plan a decode without a graph."""
        with self.running(), self.gpu.aside():
            batch = self._batches.eager(self.modes.DECODE, seq_lens, host_lens=host_lens)
        return self._eager(batch, "decode_wrapper", len(seq_lens), self._decode_heads)

    def eager_verify(
        self,
        seq_lens: Sequence[int],
        ndt: int,
        *,
        kind: str = "eagle",
        host_lens: HostLens = SAME,
        verify_lens: Sequence[int] | None = None,
    ) -> Done:
        """Plan a target-verify without a graph; `verify_lens` makes it ragged (DFLASH)."""
        rows = ndt * len(seq_lens) if verify_lens is None else sum(verify_lens)
        spec = self._verify_input(kind, ndt, len(seq_lens), verify_lens, rows)
        host_lens = self._verify_host_lens(kind, seq_lens, ndt, verify_lens, host_lens)
        with self.running(), self.gpu.aside():
            batch = self._batches.eager(
                self.modes.TARGET_VERIFY, seq_lens, host_lens=host_lens, spec=spec
            )
        return self._eager(batch, "prefill_wrapper_verify", rows, self.shape.local_heads)

    def eager_extend(
        self,
        seq_lens: Sequence[int],
        extend_lens: Sequence[int],
        *,
        mode: str = "draft-extend",
        host_lens: HostLens = SAME,
        host_extend_lens: HostLens = SAME,
        bs: int | None = None,
    ) -> Done:
        """Plan an extend of `extend_lens` tokens, which `seq_lens` count already.

        mode: `draft-extend` (DRAFT_EXTEND_V2, 0.5.4 and later), `draft-extend-v1` (DRAFT_EXTEND,
        up to 0.5.13) or `extend` (the rest of a prompt behind a cached prefix).
        host_extend_lens: `forward_batch.extend_seq_lens_cpu`, if it is not `extend_lens`.
        bs: pad the batch to so many rows; see `Batches.extend`.
        """
        name = {"draft-extend": "DRAFT_EXTEND_V2", "draft-extend-v1": "DRAFT_EXTEND"}.get(mode)
        forward_mode = getattr(self.modes, name or "EXTEND")
        with self.running(), self.gpu.aside():
            batch = self._batches.extend(
                forward_mode,
                seq_lens,
                extend_lens,
                host_lens=host_lens,
                host_extend_lens=host_extend_lens,
                spec=self.stubs.specs.draft_extend(extend_lens) if name else None,
                bs=bs,
            )
        rows = batch.extend_num_tokens
        return self._eager(batch, "prefill_wrapper_paged", rows, self.shape.local_heads)

    # -- the draft model ---------------------------------------------------------------------

    def capture_draft(self, bs: int, steps: int) -> Done:
        """Capture the draft graph: `steps` drafted tokens, the last of which needs no attention.

        `steps` is --speculative-num-steps: attention is planned for the first steps - 1.
        """
        draft = self._draft_backend(steps)
        with self.running(), self.gpu.aside():
            batch = self._batches.draft(
                self.modes.DECODE, [], bs, spec=self.stubs.specs.draft(), capture=True
            )

        def plan() -> None:
            if self._two_methods:
                draft.init_forward_metadata_capture_cuda_graph(batch)
            else:
                draft.init_forward_metadata_out_graph(batch, in_capture=True)

        done = self._drive(plan)
        with self.running(), self.gpu.aside():
            self.graphs["draft", bs] = [
                self.fi.capture(inner.decode_cuda_graph_metadata[bs]) for inner in self.draft_chain
            ]
        return done

    def replay_draft(
        self, seq_lens: Sequence[int], *, bs: int | None = None, host_lens: HostLens = SAME
    ) -> Done:
        """Replay it with prefixes `seq_lens`; one plan and one launch a step."""
        bs = bs or len(seq_lens)
        with self.running(), self.gpu.aside():
            spec = self.stubs.specs.draft()
            batch = self._batches.draft(
                self.modes.DECODE, seq_lens, bs, host_lens=host_lens, spec=spec
            )

        def plan() -> None:
            if self._two_methods:
                self.draft.init_forward_metadata_replay_cuda_graph(batch, bs)
            else:
                self.draft.init_forward_metadata_out_graph(batch)

        return self._drive(plan, self.graphs["draft", bs])

    def eager_draft(
        self, seq_lens: Sequence[int], steps: int, *, host_lens: HostLens = SAME
    ) -> Done:
        """Plan the draft steps without a graph."""
        draft = self._draft_backend(steps)
        with self.running(), self.gpu.aside():
            spec = self.stubs.specs.draft()
            batch = self._batches.eager(self.modes.DECODE, seq_lens, host_lens=host_lens, spec=spec)
        done = self._drive(lambda: draft.init_forward_metadata(batch))
        for inner in self.draft_chain:
            self._run(done, inner.decode_wrapper, len(seq_lens), self._decode_heads)
        return done

    @property
    def draft_chain(self) -> list[Any]:
        """The back ends of the draft steps that need attention (to 0.5.3 there is one more)."""
        chain: list[Any] = self.draft.attn_backends[: self._draft_steps - 1]
        return chain

    def draft_indptr(self, step: int, rows: int) -> list[int]:
        """The device's kv_indptr of a draft step, as the release's index kernel left it."""
        return [int(n) for n in self.draft.kv_indptr[step, : rows + 1].tolist()]

    # -- how it is done ----------------------------------------------------------------------

    @property
    def _two_methods(self) -> bool:
        """Up to 0.5.12 there is one method for capture and one for replay."""
        return hasattr(self.backend, "init_forward_metadata_capture_cuda_graph")

    @property
    def _decode_heads(self) -> int:
        return self.shape.local_heads * self.shape.dcp_size

    def _load(self, source: bytes) -> ModuleType:
        """Execute the file in a module of its own."""
        name = f"mlagen_executed_{next(_serial)}"
        filename = f"<{name}, sglang {self.release}>"
        text = source.decode("utf-8-sig")
        linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
        module = ModuleType(name)
        module.__dict__["__builtins__"] = builtins_with(self.stubs.provide)
        # `dataclasses` looks the module of a class up here.
        sys.modules[name] = module
        weakref.finalize(self, sys.modules.pop, name, None)
        weakref.finalize(self, linecache.cache.pop, filename, None)
        self.gpu.driven.add(filename)
        # The server sets it before the file is imported (up to 0.5.1).
        with mock.patch.dict("os.environ", {"SGLANG_ENABLE_TORCH_COMPILE": "0"}):
            exec(compile(text, filename, "exec", dont_inherit=True), module.__dict__)
        return module

    def _init_graph_state(self, backend: Any) -> None:
        init, size = backend.init_cuda_graph_state, self.shape.max_requests
        if "max_num_tokens" in inspect.signature(init).parameters:
            init(size, size * 8)
        else:
            init(size)

    def _draft_backend(self, steps: int) -> Any:
        if self.draft is None or self._draft_steps != steps:
            with self.running(), self.gpu.aside():
                self.draft = self.module.FlashInferMLAMultiStepDraftBackend(self.runner, 1, steps)
                self._draft_steps = steps
                self._init_graph_state(self.draft)
        return self.draft

    def _verify_input(
        self,
        kind: str,
        ndt: int,
        bs: int,
        verify_lens: Sequence[int] | None,
        graph_tokens: int | None,
    ) -> Any:
        specs = self.stubs.specs
        with self.running(), self.gpu.aside():
            layout = None
            if verify_lens is not None:
                assert graph_tokens is not None, "a ragged verify needs graph_tokens"
                layout = specs.ragged_layout(verify_lens, graph_tokens)
            mask = bs * ndt * (self.shape.context_len + ndt)
            return specs.verify(kind, ndt, mask_size=mask, layout=layout)

    def _verify_host_lens(
        self,
        kind: str,
        seq_lens: Sequence[int],
        ndt: int,
        verify_lens: Sequence[int] | None,
        host_lens: HostLens,
    ) -> HostLens:
        holds_window = kind == "dflash" and self._version >= Version("0.5.14")
        if not isinstance(host_lens, Same) or not holds_window:
            return host_lens
        windows = verify_lens if verify_lens is not None else [ndt] * len(seq_lens)
        return [n + w for n, w in zip(seq_lens, windows, strict=True)]

    def _capture(
        self, key: tuple[Any, ...], mode: Any, bs: int, num_tokens: int, spec: Any
    ) -> Done:
        with self.running(), self.gpu.aside():
            batch = self._batches.graph(mode, [], bs, spec=spec, num_tokens=num_tokens)

        def plan() -> None:
            if self._two_methods:
                self.backend.init_forward_metadata_capture_cuda_graph(
                    bs, num_tokens, batch.req_pool_indices, batch.seq_lens, None, mode, spec
                )
            else:
                self.backend.init_forward_metadata_out_graph(batch, in_capture=True)

        done = self._drive(plan)
        metadata = self.backend.forward_metadata
        wrapper = getattr(metadata, "decode_wrapper", None) or metadata.prefill_wrapper
        with self.running(), self.gpu.aside():
            self.graphs[key] = [self.fi.capture(wrapper)]
        return done

    def _replay(
        self,
        key: tuple[Any, ...],
        mode: Any,
        seq_lens: Sequence[int],
        bs: int,
        host_lens: HostLens,
        spec: Any,
    ) -> Done:
        with self.running(), self.gpu.aside():
            batch = self._batches.graph(mode, seq_lens, bs, host_lens=host_lens, spec=spec)

        def plan() -> None:
            if self._two_methods:
                self.backend.init_forward_metadata_replay_cuda_graph(
                    bs,
                    batch.req_pool_indices,
                    batch.seq_lens,
                    batch.seq_lens_sum,
                    None,
                    mode,
                    spec,
                    batch.seq_lens_cpu,
                )
            else:
                self.backend.init_forward_metadata_out_graph(batch)

        return self._drive(plan, self.graphs[key])

    def _eager(self, batch: SimpleNamespace, wrapper: str, rows: int, heads: int) -> Done:
        done = self._drive(lambda: self.backend.init_forward_metadata(batch))
        self._run(done, getattr(self.backend, wrapper), rows, heads)
        return done

    def _run(self, done: Done, wrapper: Any, rows: int, heads: int) -> None:
        pool_size = (self.shape.max_requests + 1) * self.shape.table_width
        with self.running(), self.gpu.aside():
            launch = self.fi.run(wrapper, rows=rows, heads=heads, pool_size=pool_size)
        done.launches.append(launch)

    def _drive(self, plan: Callable[[], None], graphs: Sequence[CapturedGraph] = ()) -> Done:
        before, stored = len(self.fi.records), len(self.stubs.draft_rows)
        with self.running():
            self.gpu.take_waits()
            plan()
            waits = self.gpu.take_waits()
            with self.gpu.aside():
                launches = [self.fi.launch(graph) for graph in graphs]
        return Done(self.fi.records[before:], launches, waits, self.stubs.draft_rows[stored:])
