"""As much of Triton's language as the index kernels use, program by program, on CPU tensors.

It exists to run the release's own kernel text in a test. Masked-off lanes are neither loaded nor
stored; a lane that a kernel loads or stores outside its tensor is an error.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Pointer:
    """A pointer into a flat tensor; `offset` is a number or a vector of them."""

    memory: torch.Tensor
    offset: Any = 0

    def __add__(self, other: Any) -> Pointer:
        return Pointer(self.memory, self.offset + other)

    def __bool__(self) -> bool:
        return True


class Language:
    """`triton.language` for one launch after another."""

    int32 = torch.int32
    int64 = torch.int64
    constexpr = object

    def __init__(self) -> None:
        self._program: Sequence[int] = ()
        self._grid: Sequence[int] = ()

    def program_id(self, axis: int) -> torch.Tensor:
        return torch.tensor(self._program[axis])

    def num_programs(self, axis: int) -> int:
        return self._grid[axis]

    def arange(self, start: int, end: int) -> torch.Tensor:
        return torch.arange(start, end)

    def cdiv(self, a: Any, b: Any) -> Any:
        return (a + b - 1) // b

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        return values.sum()

    def minimum(self, a: Any, b: Any) -> Any:
        return torch.minimum(torch.as_tensor(a), torch.as_tensor(b))

    def where(self, condition: torch.Tensor, a: Any, b: Any) -> torch.Tensor:
        return torch.where(condition, torch.as_tensor(a), torch.as_tensor(b))

    def load(self, pointer: Pointer, mask: Any = None, other: int = 0) -> torch.Tensor:
        offsets = torch.as_tensor(pointer.offset)
        if mask is None:
            return pointer.memory[offsets].to(torch.int64)
        lanes = torch.broadcast_to(torch.as_tensor(mask), offsets.shape)
        values = torch.full(offsets.shape, other, dtype=torch.int64)
        values[lanes] = pointer.memory[offsets[lanes]].to(torch.int64)
        return values

    def store(self, pointer: Pointer, values: Any, mask: Any = None) -> None:
        offsets = torch.as_tensor(pointer.offset)
        data = torch.broadcast_to(torch.as_tensor(values), offsets.shape)
        lanes = torch.ones(offsets.shape, dtype=torch.bool) if mask is None else mask
        lanes = torch.broadcast_to(torch.as_tensor(lanes), offsets.shape)
        pointer.memory[offsets[lanes]] = data[lanes].to(pointer.memory.dtype)

    def launch(
        self, kernel: Callable[..., None], grid: Sequence[int], *args: Any, **kwargs: Any
    ) -> None:
        """Run each program of the grid; tensors become pointers to their first item."""
        self._grid = grid
        pointers = [Pointer(a.view(-1)) if isinstance(a, torch.Tensor) else a for a in args]
        named = {
            k: Pointer(v.view(-1)) if isinstance(v, torch.Tensor) else v for k, v in kwargs.items()
        }
        for program in itertools.product(*(range(n) for n in grid)):
            self._program = program
            kernel(*pointers, **named)
