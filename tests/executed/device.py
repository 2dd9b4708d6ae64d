"""A GPU that is not there: device tensors, pinned memory, streams, events and waits, on the CPU.

Inside `Gpu.running()` torch behaves as on a machine with one CUDA device, as far as planning goes:

- whatever is created on `device="cuda"` is a `DeviceTensor`, and so is all that is computed from
  one; its bytes lie in CPU memory, but it says `is_cuda`, and code that mixes it with a host tensor
  fails as on a GPU;
- `pin_memory=True` gives ordinary memory that `is_pinned()` knows;
- every place where the host has to wait for the device is logged as a `Wait`, with the line of the
  driven file that waited;
- what a stream does later than the host asked (copies from pinned memory, kernels that read the
  planner's workspace) goes through one queue. It runs at once, unless a test says `gpu.hold()`:
  then the host runs ahead, as it does in serving, and a pinned buffer that is written again before
  its copy ran is copied with the wrong contents.

Outside `running()` a `DeviceTensor` is a plain CPU tensor, so tests may look at anything freely.

One simplification: kernels that only touch device memory run when they are launched. With a held
queue they are therefore ordered before copies that were queued earlier; nothing that the back end's
planning does depends on that order.
"""

from __future__ import annotations

import contextlib
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import FrameType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

CUDA = torch.device("cuda", 0)
HOST = torch.device("cpu")
NUM_SM = 132  # an H200
RAW_STREAM = "_cuda_getCurrentRawStream"


class DeviceTensor(torch.Tensor):
    """Stands for a tensor in device memory. See the module's text."""


@dataclass(frozen=True)
class Wait:
    """One place where the host waited for the device.

    `kind` is `read` (a value reached Python), `d2h` (a copy to host memory), `h2d` (a blocking copy
    to the device: torch synchronises the stream for it) or `sync` (said so: an event, a stream or
    the device). `line` and `function` are where in the driven file, if it was there.
    """

    kind: str
    what: str
    function: str | None
    line: int | None


class DeviceMixError(RuntimeError):
    """Host and device tensors met in one operation that takes only one kind."""


class Stream:
    """A CUDA stream: see `Gpu` for the queue, which all streams share."""

    def __init__(self, gpu: Gpu, cuda_stream: int = 0) -> None:
        self._gpu = gpu
        self.cuda_stream = cuda_stream
        self.device = CUDA
        self.device_index = CUDA.index
        self.stream_id = cuda_stream

    def synchronize(self) -> None:
        self._gpu.wait("sync", "Stream.synchronize")

    def query(self) -> bool:
        return self._gpu.idle

    def record_event(self, event: Event | None = None) -> Event:
        event = event if event is not None else Event(self._gpu)
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        """Streams share one queue: the order is there already."""

    def wait_stream(self, stream: Stream) -> None:
        """As `wait_event`."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.cuda_stream == self.cuda_stream

    def __hash__(self) -> int:
        return hash(self.cuda_stream)


class Event:
    """A CUDA event: done when the queue has run what was in it at `record`.

    A test may force what `query` says with `gpu.event_says = True | False` (None: the truth).
    """

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._position: int | None = None

    def record(self, stream: Stream | None = None) -> None:
        self._position = self._gpu.submitted

    def query(self) -> bool:
        if self._gpu.event_says is not None:
            return self._gpu.event_says
        return self._position is None or self._position <= self._gpu.completed

    def synchronize(self) -> None:
        if self._position is not None:
            self._gpu.wait("sync", "Event.synchronize")

    def wait(self, stream: Stream | None = None) -> None:
        """As `Stream.wait_event`."""

    def elapsed_time(self, other: Event) -> float:
        return 0.0


class Gpu:
    """The device, its queue and its log of waits.

    waits: every `Wait` since the last `take_waits()`.
    capturing: what `torch.cuda.is_current_stream_capturing()` says.
    event_says: what events answer instead of the truth, if not None.
    submitted, completed: operations queued and run so far.
    driven: file names (as compiled) whose lines are named in a `Wait`.
    """

    def __init__(self) -> None:
        self.waits: list[Wait] = []
        self.capturing = False
        self.event_says: bool | None = None
        self.submitted = 0
        self.completed = 0
        self.driven: set[str] = set()
        self.current_stream = Stream(self)
        self._queue: deque[Callable[[], None]] = deque()
        self._held = False
        self._aside = False
        # By address of the storage. The tensor is kept, so that no address is used twice.
        self._pinned: dict[int, torch.Tensor] = {}
        self._depth = 0

    # -- the queue ---------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        return not self._queue

    def submit(self, operation: Callable[[], None]) -> None:
        """Queue `operation`: it runs now, or when the held queue is drained."""
        self.submitted += 1
        self._queue.append(operation)
        if not self._held:
            self.drain()

    def advance(self, count: int = 1) -> None:
        """Let the device run `count` queued operations (fewer if there are fewer)."""
        while count and self._queue:
            operation = self._queue.popleft()
            with torch._C.DisableTorchFunction():
                operation()
            self.completed += 1
            count -= 1

    def drain(self) -> None:
        """Let the device run all that is queued."""
        self.advance(len(self._queue))

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """The device does nothing until it is waited for, advanced, or the block ends."""
        self._held = True
        try:
            yield
        finally:
            self._held = False
            self.drain()

    # -- waits -------------------------------------------------------------------------------

    def wait(self, kind: str, what: str) -> None:
        """The host waits: all that is queued runs, and the wait is logged."""
        if self._aside:
            return
        self.drain()
        function, line = self._where()
        self.waits.append(Wait(kind, what, function, line))

    def take_waits(self) -> tuple[Wait, ...]:
        """The waits logged so far; the log is empty afterwards."""
        taken = tuple(self.waits)
        self.waits.clear()
        return taken

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """What the harness does for itself: no wait is logged, and a held queue stays held."""
        before, self._aside = self._aside, True
        try:
            yield
        finally:
            self._aside = before

    def _where(self) -> tuple[str | None, int | None]:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if frame.f_code.co_filename in self.driven:
                return frame.f_code.co_name, frame.f_lineno
            frame = frame.f_back
        return None, None

    # -- memory ------------------------------------------------------------------------------

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        with torch._C.DisableTorchFunction():
            address = tensor.untyped_storage().data_ptr()
        if address:
            self._pinned[address] = tensor
        return tensor

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        if isinstance(tensor, DeviceTensor):
            return False
        with torch._C.DisableTorchFunction():
            return tensor.untyped_storage().data_ptr() in self._pinned

    def upload(self, dst: torch.Tensor, src: torch.Tensor, *, non_blocking: bool) -> None:
        """Copy host memory to device memory as `Tensor.copy_` does on CUDA."""
        with torch._C.DisableTorchFunction():
            if not non_blocking:
                self.wait("h2d", "copy_")
                dst.copy_(src)
            elif self.is_pinned(src):
                # The copy engine reads the pinned memory when it gets there, not now.
                self.submit(lambda: _copy(dst, src))
            else:
                # Pageable memory goes through a staging buffer of the driver's: it is read now.
                staged = src.clone()
                self.submit(lambda: _copy(dst, staged))

    # -- torch, as it would be ---------------------------------------------------------------

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """torch sees the device inside this block. Reentrant."""
        if self._depth:
            yield
            return
        self._depth += 1
        try:
            with contextlib.ExitStack() as stack:
                for name, value in self._torch_cuda().items():
                    stack.enter_context(mock.patch.object(torch.cuda, name, value))
                # Not there where PyTorch is built for the CPU.
                stack.enter_context(
                    mock.patch.object(torch._C, RAW_STREAM, create=True, return_value=0)
                )
                stack.enter_context(_FakeCuda(self))
                yield
        finally:
            self._depth -= 1

    def _torch_cuda(self) -> Mapping[str, Any]:
        properties = SimpleNamespace(
            name="stand-in", major=9, minor=0, multi_processor_count=NUM_SM
        )

        gpu = self

        class BoundEvent(Event):
            """`torch.cuda.Event` of this device; a class, since code may test for it."""

            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(gpu)

        @contextlib.contextmanager
        def entered(*args: Any, **kwargs: Any) -> Iterator[None]:
            yield

        return {
            "Event": BoundEvent,
            "current_device": lambda: 0,
            "current_stream": lambda device=None: self.current_stream,
            "default_stream": lambda device=None: self.current_stream,
            "device": entered,
            "device_count": lambda: 1,
            "get_device_capability": lambda device=None: (9, 0),
            "get_device_properties": lambda device=None: properties,
            "is_available": lambda: True,
            "is_current_stream_capturing": lambda: self.capturing,
            "stream": entered,
            "synchronize": lambda device=None: self.wait("sync", "torch.cuda.synchronize"),
        }


def _copy(dst: torch.Tensor, src: torch.Tensor) -> None:
    with torch._C.DisableTorchFunction():
        dst.copy_(src)


def _is_cuda(device: object) -> bool:
    if isinstance(device, str):
        return device.split(":")[0] == "cuda"
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, int) and not isinstance(device, bool)


def _tensors(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)


def _on_device(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value if isinstance(value, DeviceTensor) else value.as_subclass(DeviceTensor)
    if isinstance(value, (list, tuple)) and any(isinstance(v, torch.Tensor) for v in value):
        items = [_on_device(v) for v in value]
        return items if isinstance(value, list) else tuple(items)
    return value


# Getters of properties that a device tensor answers differently.
_PROPERTIES: dict[object, object] = {
    torch.Tensor.device.__get__: CUDA,
    torch.Tensor.is_cuda.__get__: True,
    torch.Tensor.is_cpu.__get__: False,
}
# A value that Python or the host's shapes depend on: the host waits.
_READS = frozenset(
    {
        "__bool__", "__complex__", "__contains__", "__float__", "__index__", "__int__",
        "allclose", "argwhere", "equal", "is_nonzero", "item", "masked_select", "nonzero",
        "numpy", "tolist", "unique", "unique_consecutive",
    }
)  # fmt: skip
# Made from numbers: a device scalar among them is read first.
_FACTORIES = frozenset({"arange", "empty", "full", "linspace", "ones", "zeros"})
# These take host and device tensors together.
_MIXERS = frozenset({"__getitem__", "__setitem__", "copy_", "index_put_", "to", "type_as"})


class _FakeCuda(TorchFunctionMode):
    """Sends every torch call of the block through `_call`."""

    def __init__(self, gpu: Gpu) -> None:
        super().__init__()
        self._gpu = gpu

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _call(self._gpu, func, args, dict(kwargs or {}))


def _call(gpu: Gpu, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = [*_tensors(args), *_tensors(kwargs)]
    device = any(isinstance(t, DeviceTensor) for t in given)
    if device and func in _PROPERTIES:
        return _PROPERTIES[func]
    name = getattr(func, "__name__", "")
    special = _SPECIAL.get(name)
    if special is not None and isinstance(args[0] if args else None, torch.Tensor):
        return special(gpu, *args, **kwargs)
    if device and (name in _READS or name in _FACTORIES):
        gpu.wait("read", name)
    elif device and name not in _MIXERS:
        stray = [t for t in given if not isinstance(t, DeviceTensor) and t.ndim]
        if stray:
            raise DeviceMixError(
                f"{name}: expected all tensors to be on the same device, but found cuda:0 and cpu"
            )

    if "device" in kwargs and kwargs["device"] is not None:
        device = _is_cuda(kwargs["device"])
        if device:
            kwargs["device"] = HOST
            if name in ("tensor", "as_tensor", "asarray"):
                # Made on the host and copied, as torch does.
                gpu.wait("h2d", name)
    pinned = bool(kwargs.pop("pin_memory", False))
    if pinned and device:
        raise RuntimeError("Only dense CPU tensors can be pinned")
    with torch._C.DisableTorchFunctionSubclass():
        result = func(*args, **kwargs)
    if pinned:
        return gpu.pin(result)
    return _on_device(result) if device else result


def _to(gpu: Gpu, self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """`Tensor.to` in its three forms."""
    device, dtype = kwargs.get("device"), kwargs.get("dtype")
    flags = []
    for arg in args:
        if isinstance(arg, torch.dtype):
            dtype = arg
        elif isinstance(arg, torch.Tensor):
            device, dtype = (CUDA if isinstance(arg, DeviceTensor) else HOST), arg.dtype
        elif isinstance(arg, bool):
            flags.append(arg)
        elif arg is not None:
            device = arg
    non_blocking = bool(kwargs.get("non_blocking", flags[0] if flags else False))
    copy = bool(kwargs.get("copy", flags[1] if len(flags) > 1 else False))
    source_on_device = isinstance(self, DeviceTensor)
    target_on_device = source_on_device if device is None else _is_cuda(device)
    with torch._C.DisableTorchFunction():
        same_type = dtype is None or dtype == self.dtype
        if source_on_device == target_on_device:
            result = self.to(self.dtype if dtype is None else dtype, copy=copy)
            return _on_device(result) if target_on_device else result
        if source_on_device:
            if not non_blocking:
                gpu.wait("d2h", "to")
            plain = self.as_subclass(torch.Tensor)
            return plain.clone() if same_type else plain.to(dtype)
        result = torch.empty_like(self, dtype=dtype).as_subclass(DeviceTensor)
        gpu.upload(result, self, non_blocking=non_blocking)
        return result


def _cpu(gpu: Gpu, self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    return _to(gpu, self, HOST) if isinstance(self, DeviceTensor) else self


def _cuda(gpu: Gpu, self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    return _to(gpu, self, CUDA, non_blocking=bool(kwargs.get("non_blocking", False)))


def _copy_method(
    gpu: Gpu, self: torch.Tensor, src: torch.Tensor, non_blocking: bool = False
) -> torch.Tensor:
    if isinstance(self, DeviceTensor) and not isinstance(src, DeviceTensor):
        gpu.upload(self, src, non_blocking=non_blocking)
        return self
    if isinstance(src, DeviceTensor) and not isinstance(self, DeviceTensor) and not non_blocking:
        gpu.wait("d2h", "copy_")
    with torch._C.DisableTorchFunction():
        self.copy_(src)
    return self


def _setitem(gpu: Gpu, self: torch.Tensor, index: Any, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        to_device, from_device = isinstance(self, DeviceTensor), isinstance(value, DeviceTensor)
        if to_device and not from_device and value.ndim:
            gpu.wait("h2d", "__setitem__")
        elif from_device and not to_device:
            gpu.wait("d2h", "__setitem__")
    # A device scalar inside a slice is read with __index__ while the slice is parsed.
    for bound in _slice_bounds(index):
        if isinstance(bound, DeviceTensor):
            gpu.wait("read", "__index__")
    with torch._C.DisableTorchFunction():
        self[index] = value


def _getitem(gpu: Gpu, self: torch.Tensor, index: Any) -> Any:
    for bound in _slice_bounds(index):
        if isinstance(bound, DeviceTensor):
            gpu.wait("read", "__index__")
    if any(isinstance(t, DeviceTensor) and t.dtype == torch.bool for t in _tensors(index)):
        gpu.wait("read", "__getitem__")
    with torch._C.DisableTorchFunction():
        result = self[index]
    return _on_device(result) if isinstance(self, DeviceTensor) else result


def _slice_bounds(index: Any) -> Iterator[object]:
    for part in index if isinstance(index, tuple) else (index,):
        if isinstance(part, slice):
            yield from (part.start, part.stop, part.step)


def _iter(gpu: Gpu, self: torch.Tensor) -> Iterator[torch.Tensor]:
    with torch._C.DisableTorchFunction():
        items = self.unbind(0)
    return iter(_on_device(items) if isinstance(self, DeviceTensor) else items)


def _is_pinned(gpu: Gpu, self: torch.Tensor, *args: Any, **kwargs: Any) -> bool:
    return gpu.is_pinned(self)


def _pin_memory(gpu: Gpu, self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    with torch._C.DisableTorchFunction():
        return gpu.pin(self.clone())


_SPECIAL: dict[str, Callable[..., Any]] = {
    "__getitem__": _getitem,
    "__iter__": _iter,
    "__setitem__": _setitem,
    "copy_": _copy_method,
    "cpu": _cpu,
    "cuda": _cuda,
    "is_pinned": _is_pinned,
    "pin_memory": _pin_memory,
    "to": _to,
}
