"""`mlagen patch` and `mlagen test` on the GPU at hand: what is published was proved.

The file is a release's own, as tests/gpu/backend has it. Skipped, and said so, where this Python
has no GPU, no FlashInfer, or none that goes with a release that is here.
"""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from mlagen.cli import cli
from mlagen.codegen import extract, gpu, prove
from tests.gpu.backend import release
from tests.specs import ON_DEVICE, Changes, changed

pytestmark = pytest.mark.gpu

#: The oldest FlashInfer first: a release that goes with the one installed is looked for.
RELEASES = ("0.5.17", "0.5.23", "0.5.10")


@pytest.fixture
def file(tmp_path: Path, host: gpu.GpuHost) -> Path:
    """A back-end file as released, for itself."""
    for version in RELEASES:
        try:
            with zipfile.ZipFile(release.archive(version)) as files:
                data = files.read(release.FILE)
        except FileNotFoundError:
            continue  # not among those that were carried here
        place = tmp_path / "flashinfer_mla_backend.py"
        place.write_bytes(data)
        return place
    pytest.skip("no release of SGLang is at hand")


def mlagen(command: str, file: Path, host: gpu.GpuHost, *more: str) -> Result:
    arguments = [command, str(file), "--flashinfer", str(host.package), "--python", sys.executable]
    return CliRunner().invoke(cli, [*arguments, *more])


@pytest.mark.parametrize("changes", [(), ON_DEVICE], ids=["shipped", "planned on the GPU"])
def test_patch_proves_what_it_writes(
    file: Path, host: gpu.GpuHost, tmp_path: Path, changes: Changes
) -> None:
    spec = tmp_path / "variants.yaml"
    spec.write_bytes(changed(changes))
    by = ("--spec", str(spec))
    done = mlagen("patch", file, host, "--test", *by)
    assert done.exit_code == 0, done.output
    assert "generated GPU tests passed on" in " ".join(done.output.split())
    assert b"def mlagen_request_verify(" in file.read_bytes()
    assert (b"class MlagenDevicePlan:" in file.read_bytes()) == bool(changes)
    again = mlagen("test", file, host, "-k", "verify and (does_not_wait or replays)", *by)
    assert again.exit_code == 0, again.output


def test_patch_writes_nothing_that_fails(
    file: Path, host: gpu.GpuHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    def functions_of(patched: bytes, path: str) -> dict[str, bytes]:
        right = extract.functions_of(patched, path)
        old = b"return seq_lens + draft_token_num"
        assert old in right["plans.py"]
        return {**right, "plans.py": right["plans.py"].replace(old, b"return seq_lens")}

    monkeypatch.setattr(prove, "functions_of", functions_of)
    before = file.read_bytes()
    done = mlagen("patch", file, host, "--only", "verify")
    assert done.exit_code == 6, done.output
    assert file.read_bytes() == before
