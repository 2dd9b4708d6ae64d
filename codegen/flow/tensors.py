"""Which operations of torch wait for the GPU, and where their results are.

A wait here is what torch's sync debug mode reports (`torch.cuda.set_sync_debug_mode`), which is
what measurements count: `item` and all that is made of it (`int(x)`, `if x`, an index, a bound of a
slice, `torch.equal`), a size that only the device knows (`nonzero`, a mask as an index), and each
copy between host and device that is not `non_blocking`, in both directions and from pinned memory
too. It does not report `non_blocking` copies out of pageable memory, which the driver may stage and
then waits for: `unreported`. A copy within the device, or within the host, never waits. Read in
torch 2.11: `ATen/native/cuda/Copy.cu`, `c10/cuda/CUDAFunctions.h` (memcpy_and_sync).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from .values import (
    ANYTHING,
    DATA,
    Arguments,
    Device,
    Known,
    Library,
    Place,
    Tensor,
    Value,
    first_tensor,
    on_device,
    options,
)

Kind: TypeAlias = Literal[
    "item",
    "tolist",
    "cpu",
    "to-cpu",
    "to-device",
    "copy",
    "pageable-copy",
    "bool",
    "number",
    "device-slice",
    "mask-index",
    "data-size",
    "equal",
    "synchronize",
    "stock-plan",
]

#: What each kind is, in words.
KINDS: dict[Kind, str] = {
    "item": "one element is read",
    "tolist": "all elements are read",
    "cpu": "a copy to the host",
    "to-cpu": "a copy to the host",
    "to-device": "a copy to the device that is not non_blocking",
    "copy": "a copy between host and device that is not non_blocking",
    "pageable-copy": "a non_blocking copy from pageable memory: the driver may wait",
    "bool": "a device tensor is tested",
    "number": "a device tensor becomes a number",
    "device-slice": "a bound or an index is on the device",
    "mask-index": "a mask on the device selects",
    "data-size": "the size of the result is on the device",
    "equal": "values on the device are compared as a whole",
    "synchronize": "it asks for it",
    "stock-plan": "FlashInfer's own plan",
}


@dataclass(frozen=True)
class Effect:
    """The result of an operation, and how it waits, if it does."""

    result: Value
    kind: Kind | None = None


_MAKES = {"empty", "zeros", "ones", "full", "arange", "linspace", "eye", "rand", "randn", "randint"}
_LIKE = {"empty_like", "zeros_like", "ones_like", "full_like", "rand_like"}
_NEW = {"new_empty", "new_zeros", "new_ones", "new_full"}
#: Methods whose result is no tensor and which only look at what the host holds.
_LOOKS = {
    "numel", "dim", "size", "stride", "element_size", "data_ptr", "storage_offset", "is_contiguous",
    "untyped_storage", "is_pinned", "get_device", "nelement", "ndimension",
}  # fmt: skip
_REDUCES = {"sum", "max", "min", "amax", "amin", "mean", "prod", "any", "all", "argmax", "argmin"}
_TESTS = {"any", "all", "isin", "isnan", "isfinite", "eq", "ne", "lt", "le", "gt", "ge"}
_SIZED_BY_DATA = {"nonzero", "unique", "unique_consecutive", "masked_select", "bincount"}


def method(name: str, on: Tensor, given: Arguments) -> Effect:
    """`on.name(...)`."""
    device = on.place == "device"
    if name == "item":
        return Effect(DATA, "item" if device else None)
    if name == "tolist":
        return Effect(DATA, "tolist" if device else None)
    if name == "cpu":
        return Effect(Tensor("host", on.mask, on.scalar), "cpu" if device else None)
    if name == "numpy":
        return Effect(Tensor("host", on.mask, on.scalar), "cpu" if device else None)
    if name == "cuda":
        return _moved(on, "device", given)
    if name == "pin_memory":
        return Effect(Tensor("host", on.mask, on.scalar, pinned=True))
    if name in ("to", "type_as"):
        return _moved(on, _target(on, given), given)
    if name == "copy_":
        return _copied(on, given)
    if name in ("equal", "is_nonzero"):
        return Effect(ANYTHING, "equal" if device else None)
    if name in _SIZED_BY_DATA or (name == "where" and not given.all):
        return Effect(Tensor(on.place), "data-size" if device else None)
    if name == "repeat_interleave":
        return _repeated(on, given, 0)
    if name in _LOOKS:
        return Effect(ANYTHING)
    if name in ("new_tensor",):
        return Effect(Tensor(on.place), "to-device" if device else None)
    if name in _NEW:
        return _made(given, on.place, _sizes(name, given))
    scalar = name in _REDUCES and given.get(0, "dim", "axis") is None
    return Effect(Tensor(on.place, mask=name in _TESTS, scalar=scalar))


def function(name: str, given: Arguments) -> Effect:
    """`torch.name(...)`; the name without `torch.`."""
    if name in ("cuda.synchronize", "synchronize"):
        return Effect(ANYTHING, "synchronize")
    if name == "device":
        return Effect(_device(given.get(0, "type", "device")) or ANYTHING)
    tensors = [value for value in given.all if first_tensor([value], lambda _: True)]
    device = any(on_device(value) is not False for value in tensors)
    if name in _MAKES:
        return _made(given, "host", _sizes(name, given))
    if name in ("tensor", "as_tensor", "asarray"):
        return _from_data(name, given)
    if name in ("from_numpy", "frombuffer"):
        return Effect(Tensor("host"))
    if not tensors:
        return Effect(ANYTHING)
    place: Place = "device" if device else "host"
    if name in _LIKE:
        return _made(given, place, ())
    if name in ("equal", "allclose", "is_nonzero"):
        return Effect(ANYTHING, "equal" if device else None)
    if name in _SIZED_BY_DATA or (name == "where" and len(given.all) == 1):
        return Effect(Tensor(place), "data-size" if device else None)
    if name == "repeat_interleave":
        return _repeated(Tensor(place), given, 1)
    if name in ("is_tensor", "numel"):
        return Effect(ANYTHING)
    scalar = name in _REDUCES and given.get(1, "dim") is None
    return Effect(Tensor(place, mask=name in _TESTS, scalar=scalar))


def place_of(value: Value | None) -> Place | None:
    """The place that a `device=` argument names; None where it names none."""
    found = _device(value)
    return found.place if found else None


def _device(value: Value | None) -> Device | None:
    for option in options(value) if value is not None else ():
        if isinstance(option, Device):
            return option
        if isinstance(option, Known) and isinstance(option.value, str):
            return Device("host" if option.value.startswith("cpu") else "device")
        if isinstance(option, Tensor):
            return Device(option.place)
        if isinstance(option, Known) and type(option.value) is int:  # `.to(0)`: the first GPU
            return Device("device")
    return None


def _target(on: Tensor, given: Arguments) -> Place:
    """Where `.to(...)` goes; a dtype, or what is unknown, leaves it where it is."""
    for value in (given.get(0, "device"), given.get(1, "device")):
        if isinstance(value, Known) and isinstance(value.value, bool):
            continue
        if (found := place_of(value)) is not None:
            return found
    return on.place


def _blocking(given: Arguments, position: int) -> bool:
    value = given.get(position, "non_blocking")
    return not (isinstance(value, Known) and value.value is True)


def _moved(on: Tensor, target: Place, given: Arguments) -> Effect:
    blocking = _blocking(given, -1) and not any(
        isinstance(value, Known) and value.value is True for value in given.positional[1:3]
    )
    if target == on.place:
        return Effect(Tensor(target, on.mask, on.scalar, on.pinned))
    if target == "host":
        # torch pins what a non_blocking copy goes to.
        result = Tensor("host", on.mask, on.scalar, pinned=not blocking)
        return Effect(result, "to-cpu" if blocking else None)
    result = Tensor("device", on.mask, on.scalar)
    if blocking:
        return Effect(result, "to-device")
    return Effect(result, None if on.pinned else "pageable-copy")


def _copied(on: Tensor, given: Arguments) -> Effect:
    source = given.get(0, "src", "other")
    other = first_tensor([source] if source is not None else [], lambda t: t.place != on.place)
    if other is None:
        return Effect(on)
    if _blocking(given, 1):
        return Effect(on, "copy")
    pageable = not (other.pinned or on.pinned)
    return Effect(on, "pageable-copy" if pageable else None)


def _made(given: Arguments, otherwise: Place, sizes: tuple[Value, ...]) -> Effect:
    value = given.get(-1, "device")
    place = place_of(value) or ("device" if isinstance(value, Library) else otherwise)
    pinned = given.get(-1, "pin_memory")
    result = Tensor(place, pinned=isinstance(pinned, Known) and pinned.value is True)
    by_device = first_tensor(sizes, lambda t: t.place == "device")
    return Effect(result, "number" if by_device else None)


def _sizes(name: str, given: Arguments) -> tuple[Value, ...]:
    """The arguments that have to be numbers of the host."""
    return given.positional[:1] if name in ("full", "new_full") else given.positional


def _from_data(name: str, given: Arguments) -> Effect:
    data = given.get(0, "data")
    tensor = first_tensor([data] if data is not None else [], lambda _: True)
    here: Place = tensor.place if tensor else "host"
    place = place_of(given.get(-1, "device")) or here
    if place == here:
        return Effect(Tensor(place))
    return Effect(Tensor(place), "to-device" if place == "device" else "to-cpu")


def _repeated(on: Tensor, given: Arguments, position: int) -> Effect:
    times = given.get(position, "repeats")
    by_device = times is not None and first_tensor([times], lambda t: t.place == "device")
    known = given.get(-1, "output_size")
    return Effect(Tensor(on.place), "data-size" if by_device and known is None else None)
