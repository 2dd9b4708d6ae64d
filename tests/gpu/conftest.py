"""What the tests that start a Python on the GPU share."""

from __future__ import annotations

import sys

import pytest

from mlagen.codegen import gpu


@pytest.fixture(scope="session")
def host() -> gpu.GpuHost:
    """This Python, where it has a GPU and FlashInfer; else the test is skipped, with the reason."""
    found = gpu.look(sys.executable)
    if isinstance(found, gpu.NoGpu):
        pytest.skip(found.reason)
    return found
