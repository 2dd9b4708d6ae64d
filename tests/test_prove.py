"""Generated tests before a patch is written, and `mlagen test`: on a GPU host in miniature, with
miniature tests, so that neither needs a GPU."""

from __future__ import annotations

import os
import re
import signal
import sys
import tempfile
from pathlib import Path

import pytest

from mlagen.codegen import gpu
from tests.cli_workspace import (
    FILE,
    ORIGINAL,
    Outcome,
    files_below,
    patched,
    run,
    workspace,
)
from tests.fake_gpu import FAILS, PASSES, SKIPS, generated_are, install

FI = ("--flashinfer", "fi")
HOST = "NVIDIA Fake (FlashInfer 0.6.99, torch 9.8.7)"
SERVED = ["decode", "draft-decode", "verify", "draft-extend"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A workspace without a GPU; temporary folders of mlagen are below tmp/."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    return workspace(tmp_path, monkeypatch)


@pytest.fixture
def host(here: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same, where a GPU is."""
    install(here, monkeypatch)
    return here


def words(text: str) -> str:
    return " ".join(text.split())


def kept(folder: Path) -> list[Path]:
    """The temporary folders that are left, but for that of the locks."""
    return sorted((folder / "tmp").glob("mlagen-[!l]*"))


def notes(outcome: Outcome) -> list[str]:
    return list(outcome.json["notes"])


# --- patch, without a GPU ---------------------------------------------------------------------


def test_without_a_gpu_it_is_said_that_nothing_ran(here: Path) -> None:
    outcome = run("patch", FILE, *FI, "--json")

    assert outcome.code == 0
    assert outcome.json["tests"] == []
    assert notes(outcome) == [
        "generated GPU tests not run: no CUDA GPU here (none in these tests); run `mlagen test "
        "PATH` where there is one",
        f"patched {FILE}; `mlagen unpatch` takes it out again",
        "checked by reading it back",
    ]


@pytest.mark.parametrize("out", [(), ("--out", "made")])
def test_insisting_without_a_gpu_writes_nothing(here: Path, out: tuple[str, ...]) -> None:
    before = files_below(here)
    outcome = run("patch", FILE, *FI, "--test", *out)

    assert (outcome.code, outcome.out) == (2, b"")
    assert outcome.err.startswith(
        "--test: cannot-test: the generated GPU tests cannot run: no CUDA"
    )
    assert "nothing was written" in outcome.err
    assert files_below(here) == before


@pytest.mark.parametrize("option", ["--diff", "--check"])
def test_insisting_where_nothing_is_written_is_refused(here: Path, option: str) -> None:
    outcome = run("patch", FILE, *FI, "--test", option)

    assert outcome.code == 2
    assert "--diff and --check write nothing" in outcome.err


# --- patch, with one --------------------------------------------------------------------------


@pytest.mark.parametrize("out", [(), ("--out", "made")])
def test_what_passes_is_written(
    host: Path, monkeypatch: pytest.MonkeyPatch, out: tuple[str, ...]
) -> None:
    asked = generated_are(monkeypatch, decode=PASSES, verify=PASSES + SKIPS)
    outcome = run("patch", FILE, *FI, *out, "--json")

    assert outcome.code == 0
    assert asked == [SERVED]  # the miniature has no context parallelism
    assert notes(outcome)[0] == f"2 generated GPU tests passed on {HOST}, 1 skipped"
    assert [test["outcome"] for test in outcome.json["tests"]] == ["passed", "passed", "skipped"]
    assert f"running the generated GPU tests on {HOST}" in outcome.err
    assert "tests/test_verify.py: 1 passed, 1 skipped" in outcome.err
    assert (host / "/".join([*out[1:], FILE])).read_bytes() == patched()
    assert kept(host) == []


@pytest.mark.parametrize("out", [(), ("--out", "made")])
def test_what_fails_is_not_written(
    host: Path, monkeypatch: pytest.MonkeyPatch, out: tuple[str, ...]
) -> None:
    generated_are(monkeypatch, decode=PASSES + FAILS, verify=PASSES)
    outcome = run("patch", FILE, *FI, *out)
    (folder,) = kept(host)

    assert (outcome.code, outcome.out) == (6, b"")
    assert (host / FILE).read_bytes() == ORIGINAL
    assert not (host / "made").exists()
    assert (
        f"{FILE}: gpu-tests-failed: 1 of 3 generated GPU tests failed on {HOST}; nothing was "
        f"written\n    hint: the functions, the tests and log.txt are kept in {folder}\n"
        "tests/test_decode.py::test_wrong: gpu-test-failed: AssertionError: not the plan of "
        "FlashInfer\n"
    ) in outcome.err
    for name in (gpu.LOG, gpu.RESULTS, f"{gpu.PACKAGE}/plans.py", f"{gpu.PACKAGE}/hooks.py"):
        assert (folder / name).is_file(), name


def test_a_failure_as_json(host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    generated_are(monkeypatch, decode=FAILS)
    outcome = run("patch", FILE, *FI, "--json")

    assert outcome.code == outcome.json["exit_code"] == 6
    assert [(p["path"], p["code"]) for p in outcome.json["problems"]] == [
        (FILE, "gpu-tests-failed"),
        ("tests/test_decode.py::test_wrong", "gpu-test-failed"),
    ]


def test_many_failures_are_counted_not_shown(host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    many = "import pytest\n\n\n@pytest.mark.parametrize('n', range(14))\ndef test_n(n):\n"
    generated_are(monkeypatch, decode=many + "    raise ValueError('\\n'.join('abcdefghi'))\n")
    outcome = run("patch", FILE, *FI)

    assert outcome.err.count("gpu-test-failed: ValueError: a\n    b\n") == 10
    assert "14 of 14 generated GPU tests failed" in outcome.err
    assert "4 tests more failed; log.txt has them" in outcome.err
    assert "... 3 more lines" in outcome.err


def test_a_crash_is_a_failure(host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dies = "import os\n\n\ndef test_dies():\n    os.kill(os.getpid(), 9)\n"
    generated_are(monkeypatch, decode=PASSES + dies)
    outcome = run("patch", FILE, *FI)

    assert outcome.code == 6
    assert (
        "the test process was killed by SIGKILL in tests/test_decode.py::test_dies" in outcome.err
    )
    assert (host / FILE).read_bytes() == ORIGINAL


def test_no_test_is_a_failure(host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for files in ({"decode": "x = 1\n"}, {"decode": PASSES, "verify": ""}):
        generated_are(monkeypatch, **files)
        outcome = run("patch", FILE, *FI)

        assert outcome.code == 6
        assert "gpu-tests-failed: no test was collected" in outcome.err
        assert (host / FILE).read_bytes() == ORIGINAL


def test_too_long_is_a_failure(host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "TIME_LIMIT", 1.0)
    generated_are(monkeypatch, decode="import time\n\n\ndef test_it():\n    time.sleep(60)\n")
    outcome = run("patch", FILE, *FI)

    assert outcome.code == 6
    assert "gpu-tests-failed: the test process took longer than 1 s" in outcome.err
    assert (host / FILE).read_bytes() == ORIGINAL


def test_all_skipped_is_not_passed(host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    generated_are(monkeypatch, decode=SKIPS, verify=SKIPS)
    insisting = run("patch", FILE, *FI, "--test")
    assert insisting.code == 2
    assert (host / FILE).read_bytes() == ORIGINAL
    outcome = run("patch", FILE, *FI, "--json")

    assert outcome.code == 0
    assert notes(outcome)[0] == (
        "generated GPU tests not run: all were skipped (needs a Hopper "
        "(tests/test_decode.py::test_later and 1 more))"
    )
    assert (host / FILE).read_bytes() == patched()


def test_declining(host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = generated_are(monkeypatch, decode=FAILS)
    outcome = run("patch", FILE, *FI, "--no-test", "--json")

    assert (outcome.code, outcome.err, asked) == (0, "", [])
    assert notes(outcome)[0] == "generated GPU tests not run: --no-test was given"


def test_diff_check_and_nothing_to_do_run_nothing(
    host: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = generated_are(monkeypatch, decode=PASSES)
    assert run("patch", FILE, *FI, "--diff").code == 1
    assert run("patch", FILE, *FI, "--check").code == 1
    assert asked == []
    assert run("patch", FILE, *FI).code == 0
    assert len(asked) == 1
    assert run("patch", FILE, *FI).code == 0
    assert len(asked) == 1
    assert run("patch", FILE, *FI, "--test").code == 0
    assert len(asked) == 2


def test_the_staged_functions_are_the_ones_tested(
    host: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = """\
import importlib
from pathlib import Path

above = Path(__file__).resolve().parents[1].name

def test_it():
    text = Path(__file__).parents[1].joinpath("plans.py").read_text()
    assert "def mlagen_plan_decode" in text and "def mlagen_plan_verify" not in text
    hooks = Path(__file__).parents[1].joinpath("hooks.py").read_text()
    assert "    _mlagen_call_planner," in hooks
"""
    asked = generated_are(monkeypatch, decode=reads)

    assert run("patch", FILE, *FI, "--only", "decode").code == 0
    assert asked == [["decode"]]


def test_another_flashinfer_there(host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = generated_are(monkeypatch, decode=PASSES)
    outcome = run("patch", FILE, "--flashinfer", "fi7", "--json")

    assert (outcome.code, asked) == (0, [])
    assert "imports FlashInfer 0.6.99 from" in notes(outcome)[0]
    assert run("patch", FILE, "--flashinfer", "fi7", "--test").code == 2


def test_a_python_without_pytest(host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (host / "fakes" / "pytest.py").write_text("raise ImportError('none')\n")
    outcome = run("patch", FILE, *FI, "--json")

    assert outcome.code == 0
    assert notes(outcome)[0] == (
        f"generated GPU tests not run: {sys.executable} cannot import pytest (ImportError: none); "
        f"install it: {sys.executable} -m pip install pytest"
    )


def test_the_python_that_is_given(host: Path) -> None:
    wrapper = host / "my-python"
    wrapper.write_text(f'#!/bin/sh\necho "$@" >> {host}/called\nexec {sys.executable} "$@"\n')
    wrapper.chmod(0o755)
    # The real tests: they skip themselves where torch is a fake.
    run("patch", FILE, *FI, "--python", wrapper)

    assert "-m pytest" in (host / "called").read_text()
    outcome = run("patch", FILE, *FI, "--python", "no-such-python")
    assert outcome.code == 2
    assert outcome.err.startswith("no-such-python: no-python: ")


def test_ctrl_c_writes_nothing_and_keeps_nothing(
    host: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupts = (
        f"import os, time\n\n\ndef test_it():\n    os.kill({os.getpid()}, {int(signal.SIGINT)})"
    )
    generated_are(monkeypatch, decode=interrupts + "\n    time.sleep(60)\n")
    outcome = run("patch", FILE, *FI)

    assert outcome.code == 130
    assert (host / FILE).read_bytes() == ORIGINAL
    assert kept(host) == []


# --- test -------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [(), (FILE,), (FILE, "--keep", "kept")])
def test_a_test_that_cannot_run_is_no_success(here: Path, path: tuple[str, ...]) -> None:
    outcome = run("test", *path, *FI)

    assert (outcome.code, outcome.out) == (2, b"")
    assert ": cannot-test: the generated GPU tests cannot run: no CUDA GPU here" in outcome.err
    assert (here / "kept" / gpu.PACKAGE / "tests" / "test_decode.py").exists() == ("--keep" in path)
    assert ("the tests were written to kept" in outcome.err) == ("--keep" in path)


@pytest.mark.parametrize("data", [ORIGINAL, patched()], ids=["unpatched", "patched"])
def test_a_file(host: Path, monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    (host / FILE).write_bytes(data)
    before = files_below(host)
    asked = generated_are(monkeypatch, decode=PASSES, verify=PASSES + SKIPS)
    outcome = run("test", FILE, *FI, "--json")
    facts = {fact["name"]: fact["value"] for fact in outcome.json["facts"]}

    assert (outcome.code, asked) == (0, [SERVED])
    assert notes(outcome) == [
        "2 generated GPU tests passed",
        "skipped: needs a Hopper (tests/test_verify.py::test_later)",
    ]
    assert facts["GPU"] == "NVIDIA Fake"
    assert facts["python"] == sys.executable
    assert facts["imported there"] == "FlashInfer 0.6.99, torch 9.8.7"
    state = (
        "as they stand in the file" if data != ORIGINAL else "as `mlagen patch` would write them"
    )
    assert facts["functions"] == state
    assert re.fullmatch(r"1 passed, 1 skipped in \d+\.\d s", facts["tests/test_verify.py"])
    assert [test["id"] for test in outcome.json["tests"]] == [
        "tests/test_decode.py::test_fine",
        "tests/test_verify.py::test_fine",
        "tests/test_verify.py::test_later",
    ]
    after = files_below(host)
    assert {name: after[name] for name in before} == before
    assert kept(host) == []


def test_failures_of_a_file(host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    generated_are(monkeypatch, decode=FAILS)
    outcome = run("test", FILE, *FI)
    (folder,) = kept(host)

    assert (outcome.code, (host / FILE).read_bytes()) == (6, ORIGINAL)
    assert "1 of 1 generated GPU tests failed on" in outcome.text
    assert "test_wrong: gpu-test-failed: AssertionError: not the plan" in outcome.text
    assert f"kept in {folder}" in words(outcome.text)


def test_all_skipped_is_no_success(host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    generated_are(monkeypatch, decode=SKIPS)
    outcome = run("test", FILE, *FI)

    assert outcome.code == 2
    assert "no-test-ran: all 1 generated GPU tests were skipped" in outcome.text
    assert "note: skipped: needs a Hopper" in outcome.text


def test_an_edited_file(host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = generated_are(monkeypatch, decode=PASSES)
    edited = patched().replace(b"MlagenPlanError(RuntimeError)", b"MlagenPlanError(ValueError)")
    (host / FILE).write_bytes(edited)
    outcome = run("test", FILE, *FI)

    assert (outcome.code, asked) == (5, [])
    assert ": edited-region: " in outcome.err


def test_a_stale_file(host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = generated_are(monkeypatch, decode=PASSES)
    (host / FILE).write_bytes(patched())
    outcome = run("test", FILE, "--flashinfer", "fi7")

    assert (outcome.code, asked) == (1, [])
    assert ": site-stale: " in outcome.text
    assert "note: no test was run" in outcome.text


def test_a_flashinfer_that_drifted(host: Path) -> None:
    (host / FILE).write_bytes(patched())

    assert run("test", FILE, "--flashinfer", "drifted").code == 4


def test_what_is_rendered_for_the_flashinfer_of_a_python(
    host: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = generated_are(monkeypatch, decode=PASSES)
    outcome = run("test", "--json")

    assert (outcome.code, asked) == (0, [[*SERVED, "dcp"]])
    facts = {fact["name"]: fact["value"] for fact in outcome.json["facts"]}
    assert facts["FlashInfer"].endswith(f"(that of {sys.executable})")
    assert run("test", *FI).code == 0
    assert run("test", "--flashinfer", "fi7").code == 2
    assert run("test", FILE, "--python", sys.executable).code == 0


def test_only_some(host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = generated_are(monkeypatch, decode=PASSES + FAILS)
    for path in ((), (FILE,)):
        assert run("test", *path, *FI, "--only", "verify", "-k", "fine").code == 0
    assert asked == [["verify"], ["verify"]]
    (host / FILE).write_bytes(patched())
    assert run("test", FILE, *FI, "--only", "verify", "-k", "fine").code == 0
    assert run("test", FILE, *FI, "--only", "nope").code == 2
    absent = run("test", FILE, *FI, "--only", "dcp")
    assert absent.code == 2
    assert ": no-place: " in absent.err


@pytest.mark.parametrize("keyword", ["nothing", "(("])
def test_a_keyword_that_names_no_test(
    host: Path, monkeypatch: pytest.MonkeyPatch, keyword: str
) -> None:
    generated_are(monkeypatch, decode=PASSES)
    outcome = run("test", FILE, *FI, "-k", keyword)

    assert outcome.code == 2
    assert outcome.err.splitlines()[-2].startswith("-k: no-test-ran: ")


def test_a_folder_to_keep(host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    generated_are(monkeypatch, decode=PASSES, verify=PASSES)
    first = run("test", FILE, *FI, "--keep", "kept")
    generated_are(monkeypatch, decode=PASSES)
    again = run("test", FILE, *FI, "--keep", "kept")

    assert (first.code, again.code) == (0, 0)
    assert set(files_below(host / "kept")) == {
        gpu.INI,
        gpu.LOG,
        gpu.RESULTS,
        f"{gpu.PACKAGE}/__init__.py",
        f"{gpu.PACKAGE}/plans.py",
        f"{gpu.PACKAGE}/hooks.py",
        f"{gpu.PACKAGE}/tests/test_decode.py",
    }
    assert "kept in " in again.text
    for taken in (".", ""):
        before = files_below(host)
        assert run("test", FILE, *FI, "--keep", taken).code == 2
        assert files_below(host) == before


def test_the_real_tests_skip_themselves_where_torch_sees_no_gpu(here: Path) -> None:
    """They come whole to pytest: rendered, written, collected."""
    run("test", FILE, *FI, "--keep", "kept")
    found = gpu.run_tests(
        gpu.GpuHost(sys.executable, "", "", "", here), here / "kept", on_progress=print
    )

    assert found.ok
    assert {test.id for test in found.tests} == {
        f"tests/test_{name.replace('-', '_')}.py" for name in SERVED
    }
    assert {test.outcome for test in found.tests} == {"skipped"}
