"""The stand-in GPU waits, mixes, pins and queues as a real one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from .device import CUDA, DeviceMixError, DeviceTensor, Event, Gpu


@pytest.fixture
def gpu() -> Gpu:
    return Gpu()


def _run(operation: str, device: torch.Tensor, host: torch.Tensor) -> None:
    """One statement over a device tensor `t` and a host tensor `h`."""
    exec(operation, {"torch": torch, "t": device, "h": host})


def test_what_is_made_on_the_device_stays_there(gpu: Gpu) -> None:
    with gpu.running():
        t = torch.zeros(4, dtype=torch.int32, device="cuda")
        with torch.device("cuda"):
            context = torch.ones(2)
        views = [t[1:3], t.view(2, 2), t.clone(), t + 1, torch.cumsum(t, dim=0), t.new_empty(2)]
        views += [t.to(torch.int64), t.to("cuda:0"), torch.empty_like(t), context]
        for view in views:
            assert isinstance(view, DeviceTensor)
            assert view.device == CUDA
            assert view.is_cuda
            assert not view.is_cpu
        t[1:3] = 7
        assert len(t) == 4
    assert t.tolist() == [0, 7, 7, 0]  # outside, a plain tensor
    assert views[0].tolist() == [7, 7]
    assert gpu.take_waits() == ()


@pytest.mark.parametrize(
    ("kind", "operation"),
    [
        ("read", "t[0].item()"),
        ("read", "t.tolist()"),
        ("read", "int(t[0])"),
        ("read", "bool(t[0] > 0)"),
        ("read", "[int(x) for x in t[:1]]"),
        ("read", "h[: t[1]]"),
        ("read", "torch.equal(t, t)"),
        ("read", "t[t > 0]"),
        ("read", "assert t.nonzero().is_cuda"),
        ("read", "torch.empty(t[0], device='cuda')"),
        ("d2h", "t.cpu()"),
        ("d2h", 't.to("cpu")'),
        ("d2h", 't.to(device="cpu", dtype=torch.int64)'),
        ("d2h", "t.to(h)"),
        ("d2h", "h.copy_(t)"),
        ("d2h", "h[0:3] = t"),
        ("h2d", "t.copy_(h)"),
        ("h2d", "t[0:3] = h"),
        ("h2d", 'h.to("cuda")'),
        ("h2d", "h.cuda()"),
        ("h2d", 'torch.tensor([1, 2], device="cuda")'),
        ("sync", "torch.cuda.synchronize()"),
        ("sync", "torch.cuda.current_stream().synchronize()"),
    ],
)
def test_waits(gpu: Gpu, kind: str, operation: str) -> None:
    with gpu.running():
        device, host = torch.ones(3, dtype=torch.int32, device="cuda"), torch.zeros(3).int()
        gpu.take_waits()
        _run(operation, device, host)
        assert [wait.kind for wait in gpu.take_waits()] == [kind]


@pytest.mark.parametrize(
    "operation",
    [
        "torch.cumsum(t, dim=0)",
        "t[1:] - t[:-1]",
        "t[1:3] = t[:2].clone()",
        "t[0] = 5",
        "t.copy_(t.clone())",
        "t.copy_(h, non_blocking=True)",
        'h.to("cuda", non_blocking=True)',
        't.to("cpu", non_blocking=True)',
        "h.tolist()",
        'h.to("cpu")',
        "int(h[0]) + h.sum().item()",
        'torch.arange(0, 4, device="cuda")',
        "t.shape[0] + t.numel() + len(t)",
    ],
)
def test_no_waits(gpu: Gpu, operation: str) -> None:
    with gpu.running():
        device, host = torch.ones(3, dtype=torch.int32, device="cuda"), torch.zeros(3).int()
        gpu.take_waits()
        _run(operation, device, host)
        assert gpu.take_waits() == ()


def test_a_wait_names_the_line_of_the_driven_file(gpu: Gpu) -> None:
    names: dict[str, Any] = {"torch": torch}
    code = "def f(t):\n    u = t + 1\n    return u.cpu()\n"
    exec(compile(code, "driven.py", "exec"), names)
    gpu.driven.add("driven.py")
    with gpu.running():
        names["f"](torch.zeros(2, device="cuda"))
        (wait,) = gpu.take_waits()
    assert (wait.function, wait.line, wait.what) == ("f", 3, "to")


def test_what_is_done_aside_is_no_wait(gpu: Gpu) -> None:
    done: list[int] = []
    with gpu.running(), gpu.hold():
        gpu.submit(lambda: done.append(1))
        with gpu.aside():
            torch.cuda.synchronize()
            assert torch.tensor([1], device="cuda").tolist() == [1]
            assert done == []
        torch.cuda.synchronize()
        assert done == [1]
    assert len(gpu.take_waits()) == 1


@pytest.mark.parametrize(
    "operation",
    [
        "t + h",
        "torch.cat([t, h])",
        "t.add_(h)",
        "torch.cumsum(t, dim=0, out=h)",
    ],
)
def test_host_and_device_do_not_mix(gpu: Gpu, operation: str) -> None:
    with gpu.running():
        device, host = torch.ones(3, device="cuda"), torch.zeros(3)
        with pytest.raises(DeviceMixError, match="same device"):
            _run(operation, device, host)
        assert (device + torch.tensor(1.0)).is_cuda  # a scalar may come along
        assert device[torch.tensor([0, 1])].is_cuda  # and so may an index


def test_pinned_memory_is_known_by_its_storage(gpu: Gpu) -> None:
    with gpu.running():
        pinned = torch.empty(8, dtype=torch.uint8, pin_memory=True, device="cpu")
        assert pinned.is_pinned()
        assert pinned[2:4].is_pinned()
        assert torch.zeros(2).pin_memory().is_pinned()
        assert not torch.empty(8).is_pinned()
        assert not torch.empty(8, device="cuda").is_pinned()
        with pytest.raises(RuntimeError, match="Only dense CPU tensors can be pinned"):
            torch.empty(8, device="cuda", pin_memory=True)


def test_a_held_copy_takes_what_the_pinned_buffer_holds_when_it_runs(gpu: Gpu) -> None:
    with gpu.running():
        pinned = torch.tensor([1, 1]).pin_memory()
        pageable = torch.tensor([1, 1])
        from_pinned = torch.zeros(2, dtype=torch.int64, device="cuda")
        from_pageable = torch.zeros(2, dtype=torch.int64, device="cuda")
        with gpu.hold():
            from_pinned.copy_(pinned, non_blocking=True)
            from_pageable.copy_(pageable, non_blocking=True)
            pinned.fill_(2)
            pageable.fill_(2)
            assert (gpu.submitted, gpu.completed) == (2, 0)
    assert from_pinned.tolist() == [2, 2]
    assert from_pageable.tolist() == [1, 1]


def test_events_are_done_when_the_queue_is(gpu: Gpu) -> None:
    with gpu.running():
        before = torch.cuda.Event()
        assert isinstance(before, Event)
        assert before.query()  # never recorded
        with gpu.hold():
            before.record()
            gpu.submit(lambda: None)
            after = torch.cuda.current_stream().record_event()
            assert before.query()
            assert not after.query()
            gpu.advance()
            assert after.query()
            gpu.submit(lambda: None)
            later = torch.cuda.Event()
            later.record(torch.cuda.current_stream())
            later.synchronize()
            assert later.query()
        gpu.event_says = False
        assert not before.query()
    assert [wait.what for wait in gpu.take_waits()] == ["Event.synchronize"]


def test_torch_is_itself_again_outside(gpu: Gpu) -> None:
    available, event = torch.cuda.is_available(), torch.cuda.Event
    with gpu.running(), gpu.running():
        gpu.capturing = True
        assert torch.cuda.is_available()
        assert torch.cuda.is_current_stream_capturing()
        assert torch.cuda.get_device_properties("cuda").multi_processor_count == 132
    assert torch.cuda.is_available() == available
    assert torch.cuda.Event is event
    assert not torch.zeros(2).is_pinned()
