"""The real back end of SGLang, patched and as released, on a GPU.

`backend/cases.py` has the cases: decode and verify graphs, the draft chain, eager draft-extend,
verify and draft steps, through the public methods of the release's own classes, with its own index
kernels. Outputs are compared bit for bit with a fresh plan of FlashInfer's own on the true lengths,
and waits are counted. Graphs that the GPU plans are replayed without telling the host a length.
Each release runs in a process of its own; what it reports is shown here test by test.

Releases come from the folder that MLAGEN_GPU_SGLANG names (`carry.py` fills it), else from mlagen's
cache or the package index. Skipped, and said so, where there is no GPU, no FlashInfer, or one that
does not go with the release.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)
pytest.importorskip("flashinfer")
if importlib.util.find_spec("triton") is None:
    pytest.skip("needs Triton, for SGLang's index kernels", allow_module_level=True)

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).resolve().parents[2]
CASES = Path(__file__).resolve().parent / "backend" / "cases.py"
TIMEOUT = 540  # seconds a release

#: SGLang release -> the FlashInfer that its back end can run with: 0.7 moved the planner's state.
FITS = {
    "0.5.10": SpecifierSet(">=0.5,<0.7", prereleases=True),
    "0.5.17": SpecifierSet(">=0.5,<0.7", prereleases=True),
    "0.5.21": SpecifierSet(">=0.6.18,<0.7", prereleases=True),
    "0.5.23": SpecifierSet(">=0.7", prereleases=True),
}


@dataclass(frozen=True)
class Outcome:
    """How one case ended: `passed`, `skipped` or `failed`, and the text that says why."""

    kind: str
    text: str


@dataclass(frozen=True)
class Run:
    """What one release's process reported. cases: name -> outcomes, one a parameter."""

    cases: dict[str, list[tuple[str, Outcome]]]
    waits: str
    output: str


def case_names() -> list[str]:
    """The test functions of cases.py, which is not imported here."""
    tree = ast.parse(CASES.read_text(encoding="utf-8"))
    return [
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]


def flashinfer_version() -> Version:
    import flashinfer

    return Version(flashinfer.__version__)


@cache
def run(release: str, folder: Path) -> Run:
    """Run all cases of a release in a process of its own, once."""
    report = folder / f"{release}.xml"
    options = [f"--rootdir={ROOT}", f"--junit-xml={report}", "-p", "no:cacheprovider", "-q"]
    try:
        output = subprocess.run(
            [sys.executable, "-m", "pytest", str(CASES), *options],
            cwd=ROOT,
            env={**os.environ, "MLAGEN_GPU_RELEASE": release, "PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIMEOUT,
            check=False,
        ).stdout
    except subprocess.TimeoutExpired as expired:
        written = expired.stdout or b""
        text = written if isinstance(written, str) else written.decode(errors="replace")
        output = f"{text}\nstopped after {TIMEOUT} seconds"
    cases: dict[str, list[tuple[str, Outcome]]] = {}
    waits = ""
    if report.is_file():
        for case in ElementTree.parse(report).iter("testcase"):
            name, _, parameter = case.get("name", "").partition("[")
            cases.setdefault(name, []).append((parameter.rstrip("]"), _outcome(case)))
            for found in case.iter("property"):
                if found.get("name") == "waits":
                    waits = found.get("value", "")
    return Run(cases, waits, output)


def _outcome(case: ElementTree.Element) -> Outcome:
    for tag, kind in (("failure", "failed"), ("error", "failed"), ("skipped", "skipped")):
        found = case.find(tag)
        if found is not None:
            return Outcome(kind, f"{found.get('message', '')}\n{found.text or ''}")
    return Outcome("passed", "")


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("reports")


@pytest.mark.parametrize("name", case_names())
@pytest.mark.parametrize("release", FITS)
def test_release(
    release: str, name: str, reports: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    installed = flashinfer_version()
    if installed not in FITS[release]:
        pytest.skip(f"SGLang {release} goes with FlashInfer {FITS[release]}, not {installed}")
    carried = os.environ.get("MLAGEN_GPU_SGLANG")
    if carried is not None and not Path(carried, f"sglang-{release}.zip").is_file():
        pytest.skip(f"{carried} has no SGLang {release}; tests/gpu/carry.py packs it")
    ran = run(release, reports)
    outcomes = ran.cases.get(name)
    if not outcomes:
        pytest.fail(f"{name} did not run; the process wrote:\n{ran.output}", pytrace=False)
    if name == "test_waits" and ran.waits:
        with capsys.disabled():
            print(
                f"\nFlashInfer {installed}: waits of a step as released, and patched\n{ran.waits}"
            )
    failed = [f"[{case}] {o.text}" for case, o in outcomes if o.kind == "failed"]
    if failed:
        pytest.fail("\n\n".join(failed), pytrace=False)
    if all(outcome.kind == "skipped" for _, outcome in outcomes):
        pytest.skip(outcomes[0][1].text.strip())
