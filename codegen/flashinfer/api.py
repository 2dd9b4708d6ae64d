"""PlanApi: what one FlashInfer expects of whoever plans its MLA attention.

Frozen data, made by `read.py` from the source of `BatchMLAPagedAttentionWrapper` and of
the objects it delegates to, and handed on to `render.py`. Nothing here reads a file.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Literal

#: The nine arguments of the private planner, in its order, under the names used in emitted
#: code. The same nine in every release from 0.2.4 on (0.2.1-0.2.3 add a CUDA stream).
PLANNER_ARGUMENTS = (
    "float_workspace",
    "int_workspace",
    "pinned_int_workspace",
    "qo_indptr",
    "kv_indptr",
    "kv_len",
    "num_heads",
    "head_dim_ckv",
    "causal",
)


#: How headers and reports call an era that is not known and was read with --allow-unknown.
UNKNOWN_ERA = "unknown, derived from source; --allow-unknown"


class Era(Enum):
    """The shapes of FlashInfer's MLA planner. The value is the releases that have it."""

    STREAM = "0.2.1-0.2.3"  # .plan(nine, stream) inside `with self.device as device:`
    TORCH_OP = "0.2.4-0.4.0rc3"  # .plan.default(nine)
    TVM_FFI = "0.4.0rc4-0.6.7"  # .plan(nine), flashinfer/mla.py
    MLA_PACKAGE = "0.6.8-0.6.18.post1"  # the same, flashinfer/mla/_core.py
    BACKEND_OBJECT = "0.7.0-0.7.4"  # state on wrapper._planned_backend; Python stages


@dataclass(frozen=True)
class Place:
    """Where something stands in FlashInfer's source: path below the package root's parent
    (such as `flashinfer/mla/_core.py`), line from 1."""

    path: str
    line: int

    def __str__(self) -> str:
        return f"{self.path}:{self.line}"


@dataclass(frozen=True)
class PrivateCall:
    """The call that makes a plan out of host arrays.

    `method` is what is looked up on the loaded module: `plan`, `plan.default` or
    `plan_with_staged_workspace_bytes`. `arguments` are the source texts of what the release
    itself passes, in order. `returns` says whether the result is the plan_info alone or
    (plan_info, staged bytes). `derived` is empty for a call that mlagen knows; with
    --allow-unknown it is what an emitted call passes, in order, with HOLDER for the object that
    holds the workspaces and PINNED for the staging slot.
    """

    method: Literal["plan", "plan.default", "plan_with_staged_workspace_bytes"]
    arguments: tuple[str, ...]
    returns: Literal["plan_info", "plan_info_and_bytes"]
    takes_stream: bool
    place: Place
    derived: tuple[str, ...] = ()


@dataclass(frozen=True)
class StateAttribute:
    """One attribute that `plan` assigns and `run` reads. `value` is the source text that
    plan assigns (such as `causal`). `emitted` is None for an attribute that mlagen knows by its
    name; with --allow-unknown it is what a plan sets another to, empty where the first plan left
    it right for all."""

    name: str
    value: str
    place: Place
    emitted: str | None = None


@dataclass(frozen=True)
class PublicUpdate:
    """A public method that gives a captured graph its next plan: flashinfer pull 5041, in no
    release yet.

    Attributes:
        method: its name; it takes `metadata` and nothing else that has no default.
        metadata: the class that makes the metadata, with its class method `csr`; `flashinfer.mla`
            exports it.
        arrays: what `csr` is given, as (parameter, emitted expression), host arrays where the
            host's are taken.
        enabled: the attribute of the wrapper that says whether it was made with
            `eras.UPDATE_OPTION`.
        place: where the method stands.
    """

    method: str
    metadata: str
    arrays: tuple[tuple[str, str], ...]
    enabled: str
    place: Place


@dataclass(frozen=True)
class PlanApi:
    """What was read from one FlashInfer.

    Attributes:
        version: from the distribution's metadata or `_build_meta.py`/`version.txt`; None
            where the source does not say. Never used to decide anything.
        era: decided by structure.
        plan_parameters: names of `BatchMLAPagedAttentionWrapper.plan`'s parameters, self
            left out, in order, keyword-only ones after.
        call: the private planner call.
        holder: where the state of a plan lives: on the wrapper itself, or on the object in
            `wrapper._planned_backend` (looked up at each call, an eager plan replaces it).
        run_state: attributes that `plan` sets and `run` reads, in plan's order, without the
            workspaces and the module; these a plan has to leave right.
        planner_copies: True where the C++ planner copies from a reused pinned buffer
            (then a staging ring is needed), False where a Python proxy stages.
        raw_module: the attribute of that proxy that holds the C++ module, whose `plan` takes
            the same arguments, fills the pinned workspace, copies nothing and returns (plan_info,
            bytes to copy). None where there is no proxy, or none of this form.
        int32_checked: True where `plan` checks in Python that its arrays are int32.
        public_update: name of a public graph-plan update method, where there is one.
        missing: what was looked for and not found, one sentence each; empty when complete.
        place: where the wrapper class stands.
        digest: sha256 over the files read, hex.
        wrapper_state: where `holder` is `planned_backend`, what `plan` of the wrapper sets and
            its `run` reads before it hands over. One stock plan sets it, and it stays right as
            long as dtypes and layouts do; empty where the wrapper holds all state.
        update: how to call `public_update`; None where there is none.
        derived: what is not as in any era that mlagen knows and was derived from the source
            (--allow-unknown), one sentence each. Empty for a known era; else `era` is the nearest.
    """

    version: str | None
    era: Era
    plan_parameters: tuple[str, ...]
    call: PrivateCall
    holder: Literal["wrapper", "planned_backend"]
    run_state: tuple[StateAttribute, ...]
    planner_copies: bool
    raw_module: str | None
    int32_checked: bool
    public_update: str | None
    missing: tuple[str, ...]
    place: Place
    digest: str
    wrapper_state: tuple[StateAttribute, ...] = ()
    update: PublicUpdate | None = None
    derived: tuple[str, ...] = ()

    @property
    def source_text(self) -> str:
        """Which FlashInfer a rendered file is for, in the words of its header."""
        version = self.version or "(version unknown)"
        return f"FlashInfer {version}, era {self.era_text}, source {self.digest[:12]}"

    @property
    def era_text(self) -> str:
        """The era for headers and reports; says so where it is not one that mlagen knows."""
        return f"{UNKNOWN_ERA} (nearest: {self.era.value})" if self.derived else self.era.value
