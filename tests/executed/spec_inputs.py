"""Speculative inputs: the release's own length formulas on stand-ins for its classes.

Only `generate_attn_arg_prefill` and the phase tests of `SpecInput` matter to planning; both are the
release's own text. Everything else on those classes (sampling, trees, scheduling) is left out.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from enum import IntEnum, auto
from types import SimpleNamespace
from typing import Any

import torch

from .device import CUDA
from .release_code import ReleaseCode

SPEC_INFO = "sglang/srt/speculative/spec_info.py"
RAGGED_KERNELS = "sglang/kernels/ops/speculative/ragged_verify_kernels.py"
_EAGLE = ("sglang/srt/speculative/eagle_info.py", "sglang/srt/speculative/eagle_utils.py")

# kind -> class, files, type
_VERIFY = {
    "eagle": ("EagleVerifyInput", _EAGLE, "EAGLE_VERIFY"),
    "ngram": ("NgramVerifyInput", ("sglang/srt/speculative/ngram_info.py",), "NGRAM_VERIFY"),
    "dflash": ("DFlashVerifyInput", ("sglang/srt/speculative/dflash_info.py",), "DFLASH_VERIFY"),
}


class RaggedLayout:
    """`RaggedVerifyLayout` (0.5.16 and later): each request verifies its own number of tokens."""

    def __init__(self, verify_lens: torch.Tensor, graph_num_tokens: int, pad: Any) -> None:
        self._pad = pad
        self.verify_lens = verify_lens.to(torch.int32)
        self.graph_num_tokens = graph_num_tokens
        self.qo_indptr_device = torch.zeros(len(verify_lens) + 1, dtype=torch.int32, device=CUDA)
        self.qo_indptr_device[1:] = torch.cumsum(self.verify_lens, dim=0)
        self.verify_lens_cpu: list[int] | None = None
        self.total_verify_tokens = graph_num_tokens

    @property
    def bs(self) -> int:
        return int(self.verify_lens.shape[0])

    def padded_to_bucket(self, *, padded_bs: int, cap: int | None = None) -> RaggedLayout:
        padded = self._pad(
            verify_lens=self.verify_lens,
            graph_num_tokens=self.graph_num_tokens,
            bs=self.bs,
            padded_bs=padded_bs,
        )
        return RaggedLayout(padded, self.graph_num_tokens, self._pad)


class SpecInputs:
    """Makes the release's speculative inputs.

    code: the release. names: globals of its formulas, above all the index kernel.
    Attributes `SpecInput`, `SpecInputType`, `EagleDraftInput` and `EagleVerifyInput` are what the
    back end's own imports get.
    """

    def __init__(self, code: ReleaseCode, names: dict[str, Any]) -> None:
        self._code = code
        self._names = {"torch": torch, "IdSpaceKind": SimpleNamespace(FULL="full"), **names}
        self.SpecInput: type = object
        self.SpecInputType: Any = None
        if code.has(SPEC_INFO, "SpecInput"):
            enums = {"IntEnum": IntEnum, "auto": auto}
            self.SpecInputType = code.take(SPEC_INFO, "SpecInputType", enums)
            self.SpecInput = code.take(
                SPEC_INFO,
                "SpecInput",
                {"ABC": ABC, "abstractmethod": abstractmethod, "SpecInputType": self.SpecInputType},
            )
        self._classes: dict[str, type] = {}
        self.EagleVerifyInput = self._verify_class("eagle")
        self.EagleDraftInput = self._draft_class()

    def supports(self, kind: str) -> bool:
        """Does the release have this kind of verify input?"""
        name, paths, _ = _VERIFY[kind]
        return any(self._code.has(path, name) for path in paths)

    def verify(
        self, kind: str, draft_token_num: int, *, mask_size: int, layout: RaggedLayout | None = None
    ) -> Any:
        """A verify input of `kind` (eagle, ngram, dflash).

        mask_size: entries of EAGLE's custom mask, which is always a tensor there; DFLASH has none.
        """
        spec = self._verify_class(kind)()
        spec.draft_token_num = draft_token_num
        spec.num_tokens_per_req = draft_token_num
        spec.topk = 1
        spec.device = CUDA
        spec.custom_mask = (
            None if kind == "dflash" else torch.ones(mask_size, dtype=torch.bool, device=CUDA)
        )
        if layout is not None:
            spec.ragged_verify_layout = layout
        return spec

    def draft(self) -> Any:
        """A draft input, whose `kv_indptr` and `kv_indices` the back end fills in."""
        spec = self.EagleDraftInput()
        spec.kv_indptr = spec.kv_indices = None
        return spec

    def draft_extend(self, extend_lens: Sequence[int]) -> Any:
        """The input of a draft-extend; v1's lengths under each name that releases gave them."""
        spec = self._extend_class()()
        lens = torch.tensor(extend_lens, dtype=torch.int32, device=CUDA)
        # "accept length" counts the bonus token by the time that attention is planned.
        for name in ("accept_length", "num_accepted_tokens", "num_accept_tokens"):
            setattr(spec, name, lens)
            setattr(spec, f"{name}_cpu", [n - 1 for n in extend_lens])
        spec.num_correct_drafts = lens - 1
        width = max(extend_lens)
        for name in ("num_tokens_per_req", "num_tokens_per_batch"):
            setattr(spec, name, width)
        spec.kv_indptr = spec.kv_indices = None
        return spec

    def ragged_layout(self, verify_lens: Sequence[int], graph_num_tokens: int) -> RaggedLayout:
        lens = torch.tensor(verify_lens, dtype=torch.int32, device=CUDA)
        pad = self._code.take(RAGGED_KERNELS, "pad_verify_lens_to_bucket", {"torch": torch})
        layout = RaggedLayout(lens, graph_num_tokens, pad)
        layout.verify_lens_cpu = list(verify_lens)
        layout.total_verify_tokens = sum(verify_lens)
        return layout

    # -- classes -----------------------------------------------------------------------------

    def _class(self, name: str, type_name: str, methods: dict[str, Any]) -> type:
        if name not in self._classes:
            base: Any = self.SpecInput
            types = self.SpecInputType

            def init(spec: Any) -> None:
                if types is not None:
                    base.__init__(spec, getattr(types, type_name))

            body = {
                "__init__": init,
                # Abstract up to 0.5.13; of no concern here.
                "get_spec_adjust_token_coefficient": lambda spec: (1, 1),
                **methods,
            }
            self._classes[name] = type(name, (base,), body)
        return self._classes[name]

    def _verify_class(self, kind: str) -> type:
        name, paths, type_name = _VERIFY[kind]
        method = f"{name}.generate_attn_arg_prefill"
        formula = self._code.take(self._code.first(paths, method), method, self._names)
        return self._class(name, type_name, {"generate_attn_arg_prefill": formula})

    def _draft_class(self) -> type:
        methods: dict[str, Any] = {}
        method = "EagleDraftInput.generate_attn_arg_prefill"
        if any(self._code.has(path, method) for path in _EAGLE):
            formula = self._code.take(self._code.first(_EAGLE, method), method, self._names)
            methods["generate_attn_arg_prefill"] = formula
        return self._class("EagleDraftInput", "EAGLE_DRAFT", methods)

    def _extend_class(self) -> type:
        """0.5.12 gave draft-extend an input of its own."""
        name = "EagleDraftExtendInput"
        method = f"{name}.generate_attn_arg_prefill"
        if not any(self._code.has(path, method) for path in _EAGLE):
            return self.EagleDraftInput
        formula = self._code.take(self._code.first(_EAGLE, method), method, self._names)
        type_name = "EAGLE_DRAFT_EXTEND"
        if not hasattr(self.SpecInputType, type_name):
            type_name = "EAGLE_DRAFT"
        return self._class(name, type_name, {"generate_attn_arg_prefill": formula})
