"""What the GPU tests of the back end tell a wait by, with stand-ins for the GPU."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from tests.gpu.backend.waits import stays_busy


@pytest.mark.parametrize(
    ("over", "busy", "runs"),
    [("F", True, 1), ("TF", True, 2), ("TTF", True, 3), ("TTTF", False, 3)],
)
def test_a_late_host_is_asked_again(over: str, busy: bool, runs: int) -> None:
    """Whether the work queued before was over, run for run; what waits is late in all of them."""
    event, block = mock.Mock(), mock.Mock()
    event.return_value.query.side_effect = [letter == "T" for letter in over]
    with (
        mock.patch.object(torch.cuda, "Event", event),
        mock.patch.object(torch.cuda, "_sleep"),
        mock.patch.object(torch.cuda, "synchronize"),
    ):
        assert stays_busy(block) is busy
    assert block.call_count == runs
