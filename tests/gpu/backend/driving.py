"""Drives a back end through its public methods, as the release's runners do.

A `Mode` is one way through the back end (decode graph, verify graph, draft chain, eager passes):
how its batches are made, and what is true of its output. `Graph` and `Eager` take one back end
through one mode: `plan(batch)` is what the runner does before a step, `run(batch)` launches the
step and gives its outputs, one an attention pass.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from . import truth
from .batches import DRAFT_STEPS, PADDED_LEN, VERIFY_TOKENS, Batch, Batches
from .model import MAX_REQUESTS, Model

Query = tuple[torch.Tensor, torch.Tensor]


@dataclass
class Backends:
    """The target's and the draft's back end of one file, the released one or a patched.

    told: whether the host is told the lengths of a graph's replay; else it is told none,
        and in every second replay wrong ones.
    """

    module: ModuleType
    model: Model
    told: bool = True
    target: Any = field(init=False)
    draft: Any = field(init=False)

    def __post_init__(self) -> None:
        runner = self.model.runner
        self.target = self.module.FlashInferMLAAttnBackend(runner)
        self.draft = self.module.FlashInferMLAMultiStepDraftBackend(runner, 1, DRAFT_STEPS)
        for backend in (self.target, self.draft):
            init = backend.init_cuda_graph_state
            if "max_num_tokens" in inspect.signature(init).parameters:
                init(MAX_REQUESTS, MAX_REQUESTS * VERIFY_TOKENS)
            else:
                init(MAX_REQUESTS)

    @property
    def two_methods(self) -> bool:
        """Up to 0.5.12 there is one method for capture and one for replay."""
        return hasattr(self.target, "init_forward_metadata_capture_cuda_graph")

    def steps(self, *, draft: bool) -> list[Any]:
        """The back ends that attend in one pass: one, or one a draft step."""
        return list(self.draft.attn_backends) if draft else [self.target]

    def attend(self, backend: Any, query: Query, batch: Batch) -> torch.Tensor:
        """One attention pass, as a layer of the model calls it."""
        nope, rope = query
        decodes = batch.forward.forward_mode.is_decode()
        forward = backend.forward_decode if decodes else backend.forward_extend
        out: torch.Tensor = forward(
            nope, None, None, self.model.layer, batch.forward, save_kv_cache=False, q_rope=rope
        )
        return out


@dataclass(frozen=True)
class Mode:
    """One way through the back end.

    make(batches, prefix, rows): a batch. added: tokens behind the prefix that each row attends to,
    at the first step; None: as many as it has queries. draft: several steps, each attends to one
    token more.
    """

    name: str
    make: Callable[[Batches, list[int], int], Batch]
    added: int | None
    causal: bool = False
    draft: bool = False
    graph: bool = True

    def expected(self, model: Model, batch: Batch, queries: list[Query]) -> list[torch.Tensor]:
        """The true output of each pass."""
        added: int | list[int] = batch.query_lens if self.added is None else self.added
        return [
            truth.expected(
                model,
                batch,
                query,
                added=added + step if isinstance(added, int) else added,
                causal=self.causal,
            )
            for step, query in enumerate(queries)
        ]


DECODE = Mode("decode graph", lambda b, p, rows: b.decode(p, rows), added=0)
VERIFY = Mode("verify graph", lambda b, p, rows: b.verify(p, rows), VERIFY_TOKENS, causal=True)
DRAFT = Mode("draft chain graph", lambda b, p, rows: b.draft(p, rows), added=1, draft=True)
EAGER_VERIFY = Mode(
    "eager verify", lambda b, p, _: b.eager_verify(p), VERIFY_TOKENS, causal=True, graph=False
)
EAGER_DRAFT = Mode(
    "eager draft chain", lambda b, p, _: b.eager_draft(p), added=1, draft=True, graph=False
)
DRAFT_EXTEND = Mode(
    "eager draft-extend", lambda b, p, _: b.draft_extend(p), None, causal=True, graph=False
)
DRAFT_EXTEND_V1 = Mode(
    "eager draft-extend v1", lambda b, p, _: b.draft_extend_v1(p), None, causal=True, graph=False
)


class Graph:
    """A captured graph of `rows` requests.

    Like a runner it keeps the tensors of its capture as buffers, which each replay is copied into.
    """

    def __init__(self, backends: Backends, batches: Batches, mode: Mode, rows: int) -> None:
        self._backends, self._mode, self._rows = backends, mode, rows
        self._misled = False
        batch = self._capture_batch(batches)
        self._captured = batch.forward
        model = backends.model
        self.queries = [
            model.query(sum(batch.query_lens)) for _ in backends.steps(draft=mode.draft)
        ]
        self._plan_capture(batch)
        self._wrappers = [_wrapper(backend) for backend in backends.steps(draft=mode.draft)]
        self._step(batch)  # warms up, as the runners do
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.outputs = self._step(batch)
        torch.cuda.synchronize()

    @property
    def device_plans(self) -> list[Any]:
        """What plans each pass on the GPU; None for one that is planned on the host."""
        return [wrapper.mlagen_request.device for wrapper in self._wrappers]

    @property
    def index_buffers(self) -> list[Any]:
        """The captured page numbers of each pass, as the wrapper holds them."""
        held = [getattr(wrapper, "_planned_backend", wrapper) for wrapper in self._wrappers]
        return [holder._kv_indices_buf for holder in held]

    def poison(self) -> None:
        """Overwrite what the kernels are told to do, so that no pass lives on an older plan."""
        for device in self.device_plans:
            device.workspace.fill_(-1)

    def plan(self, batch: Batch) -> None:
        """What a runner does before a replay."""
        forward = self._replayed(batch)
        if not self._backends.two_methods:
            self._owner.init_forward_metadata_out_graph(forward)
        elif self._mode.draft:
            self._owner.init_forward_metadata_replay_cuda_graph(forward, self._rows)
        else:
            self._owner.init_forward_metadata_replay_cuda_graph(
                self._rows,
                forward.req_pool_indices,
                forward.seq_lens,
                forward.seq_lens_sum,
                None,
                forward.forward_mode,
                forward.spec_info,
                forward.seq_lens_cpu,
            )

    def run(self, batch: Batch) -> list[torch.Tensor]:
        """Replay into outputs that hold NaN; copies of them."""
        for out in self.outputs:
            out.fill_(float("nan"))
        self.graph.replay()
        return [out.clone() for out in self.outputs]

    def fresh_queries(self, batch: Batch) -> list[Query]:
        """The queries of a replay: the graph's own buffers."""
        return self.queries

    @property
    def _owner(self) -> Any:
        return self._backends.draft if self._mode.draft else self._backends.target

    def _replayed(self, batch: Batch) -> SimpleNamespace:
        """The batch as the back end gets it, once it has been copied into the buffers.

        A runner hands over its buffers, but for a draft chain without padded rows: there
        eagle_draft_cuda_graph_runner.py fills them, and hands over the batch's own tensors.
        """
        given = dict(vars(batch.forward))
        padded = batch.real < self._rows
        for name in ("req_pool_indices", "seq_lens", "positions"):
            buffer = getattr(self._captured, name)
            buffer.copy_(given[name])
            if padded or not self._mode.draft:
                given[name] = buffer
        if not self._backends.told:
            given["seq_lens_cpu"] = given["seq_lens_sum"] = None
            self._misled = not self._misled
            if self._misled:
                given["seq_lens_cpu"] = torch.ones(self._rows, dtype=torch.int64)
                given["seq_lens_sum"] = self._rows
        return SimpleNamespace(**given)

    def _step(self, batch: Batch) -> list[torch.Tensor]:
        """What the graph is captured of."""
        if not self._backends.two_methods:
            self._owner.init_forward_metadata_in_graph(batch.forward)
        return self._attend(batch)

    def _attend(self, batch: Batch) -> list[torch.Tensor]:
        steps = self._backends.steps(draft=self._mode.draft)
        return [
            self._backends.attend(backend, query, batch)
            for backend, query in zip(steps, self.queries, strict=True)
        ]

    def _capture_batch(self, batches: Batches) -> Batch:
        if self._mode.draft:
            return batches.draft([PADDED_LEN] * self._rows, self._rows, capture=True)
        return self._mode.make(batches, [PADDED_LEN] * self._rows, self._rows)

    def _plan_capture(self, batch: Batch) -> None:
        forward = batch.forward
        forward.positions = torch.zeros(
            sum(batch.query_lens), dtype=torch.int64, device=forward.seq_lens.device
        )
        if not self._backends.two_methods:
            self._owner.init_forward_metadata_out_graph(forward, in_capture=True)
        elif self._mode.draft:
            self._owner.init_forward_metadata_capture_cuda_graph(forward)
        else:
            self._owner.init_forward_metadata_capture_cuda_graph(
                self._rows,
                sum(batch.query_lens),
                forward.req_pool_indices,
                forward.seq_lens,
                None,
                forward.forward_mode,
                forward.spec_info,
            )


def _wrapper(backend: Any) -> Any:
    """FlashInfer's wrapper of the pass that the back end is set to."""
    metadata = backend.forward_metadata
    decodes = hasattr(metadata, "decode_wrapper")
    return metadata.decode_wrapper if decodes else metadata.prefill_wrapper


class Eager:
    """Passes without a graph. FlashInfer plans the first of a wrapper, which loads its kernels."""

    def __init__(self, backends: Backends, batches: Batches, mode: Mode, rows: int) -> None:
        self._backends, self._mode = backends, mode
        self._queries: list[Query] = []
        batch = mode.make(batches, [PADDED_LEN + 1] * rows, rows)
        self.fresh_queries(batch)
        self.plan(batch)
        self.run(batch)

    def plan(self, batch: Batch) -> None:
        """What the model runner does before the pass."""
        owner = self._backends.draft if self._mode.draft else self._backends.target
        owner.init_forward_metadata(batch.forward)

    def run(self, batch: Batch) -> list[torch.Tensor]:
        """The pass: one output a step."""
        steps = self._backends.steps(draft=self._mode.draft)
        tokens = sum(batch.query_lens)
        return [
            self._backends.attend(backend, (nope[:tokens], rope[:tokens]), batch)
            for backend, (nope, rope) in zip(steps, self._queries, strict=True)
        ]

    def fresh_queries(self, batch: Batch) -> list[Query]:
        """The queries of the next passes: as many as this batch has tokens."""
        tokens = sum(batch.query_lens)
        steps = self._backends.steps(draft=self._mode.draft)
        if not self._queries or self._queries[0][0].shape[0] < tokens:
            self._queries = [self._backends.model.query(tokens) for _ in steps]
        return [(nope[:tokens], rope[:tokens]) for nope, rope in self._queries]


def driver(backends: Backends, batches: Batches, mode: Mode, rows: int) -> Graph | Eager:
    """What drives this mode."""
    return (Graph if mode.graph else Eager)(backends, batches, mode, rows)
