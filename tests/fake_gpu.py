"""A GPU host in miniature: the tests' own interpreter, with a torch and a FlashInfer of a few lines
in front of what is installed, and pytest as it is. Its driver shows a device."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from mlagen.codegen import gpu, render_tests
from tests.flashinfer import miniatures

HOST = gpu.GpuHost(sys.executable, "NVIDIA Fake", "9.8.7", "0.6.99", Path("fi/flashinfer"))
TORCH = """\
__version__ = "9.8.7"


class cuda:
    is_available = staticmethod(lambda: {available})
    get_device_name = staticmethod(lambda device: "NVIDIA Fake")
"""
PASSES = "def test_fine():\n    pass\n"
FAILS = "def test_wrong():\n    assert 'ours' == 'theirs', 'not the plan of FlashInfer'\n"
SKIPS = "import pytest\n\n\ndef test_later():\n    pytest.skip('needs a Hopper')\n"


def install(folder: Path, patch: pytest.MonkeyPatch, *, available: bool = True) -> None:
    """Put torch and the FlashInfer of fi/, which fits `--flashinfer fi`, where every interpreter
    that is started finds them."""
    patch.setattr(gpu, "cuda_trouble", lambda: "")
    (folder / "fakes" / "torch").mkdir(parents=True)
    (folder / "fakes" / "torch" / "__init__.py").write_text(TORCH.format(available=available))
    for place in ("fakes", "fi"):
        flashinfer = miniatures.wrapper_era()
        flashinfer["flashinfer/__init__.py"] = '__version__ = "0.6.99"\n'
        miniatures.write(flashinfer, folder / place)
    patch.setenv("PYTHONPATH", str(folder / "fakes"))


def generated_are(patch: pytest.MonkeyPatch, **files: str) -> list[list[str]]:
    """Let these be the generated tests, test_<name>.py each; gives what variants were asked for,
    a list a call."""
    asked: list[list[str]] = []

    def test_files(rendered: object, header: object, variants: list[str]) -> Mapping[str, bytes]:
        asked.append(list(variants))
        return {f"tests/test_{name}.py": text.encode() for name, text in files.items()}

    patch.setattr(render_tests, "test_files", test_files)
    return asked
