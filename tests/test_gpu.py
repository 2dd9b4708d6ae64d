"""Looking for a Python that has a GPU, and running tests in one: without a GPU, on a host in
miniature."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mlagen.codegen import gpu
from mlagen.codegen.errors import UsageError
from mlagen.codegen.flashinfer.find import find_flashinfer
from mlagen.codegen.flashinfer.read import read_plan_api
from tests.fake_gpu import FAILS, HOST, PASSES, SKIPS, install
from tests.flashinfer import miniatures


def script(place: Path, *lines: str) -> Path:
    """An executable that a shell runs."""
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text("\n".join(["#!/bin/sh", *lines, ""]))
    place.chmod(0o755)
    return place


# --- which Python -----------------------------------------------------------------------------


def test_the_python_given() -> None:
    assert gpu.find_python(sys.executable, [Path("/nowhere")]) == sys.executable
    for wrong in ("", "/no/such/python", __file__):
        with pytest.raises(UsageError) as caught:
            gpu.find_python(wrong)
        assert caught.value.problems[0].code == "no-python"


@pytest.mark.parametrize("kind", ["site-packages", "dist-packages"])
@pytest.mark.parametrize("name", ["python3.11", "python3", "python"])
def test_the_python_of_the_environment_that_a_file_lies_in(
    tmp_path: Path, kind: str, name: str
) -> None:
    python = script(tmp_path / "env" / "bin" / name, "exit 0")
    file = tmp_path / "env" / "lib" / "python3.11" / kind / "sglang" / "file.py"

    assert gpu.find_python(None, [None, Path("/repo/file.py"), file]) == str(python)


def test_without_an_environment_it_is_mlagens_own(tmp_path: Path) -> None:
    file = tmp_path / "lib" / "python3.11" / "site-packages" / "file.py"

    assert gpu.find_python(None, [file, Path("site-packages/x"), None]) == sys.executable


# --- looking ----------------------------------------------------------------------------------


def test_no_python_is_started_where_there_is_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "cuda_trouble", lambda: "no driver")
    found = gpu.look("/no/such/python")

    assert isinstance(found, gpu.NoGpu)
    assert found.reason == "no CUDA GPU here (no driver)"


def test_the_driver_is_asked_for_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hidden devices are none, with a driver or without."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

    assert gpu.cuda_trouble() != ""


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("0 1", ""),
        ("0 0", "the driver shows none"),
        ("100 0", "the driver shows none: status 100"),
        ("", "the driver could not be asked"),
    ],
)
def test_what_the_driver_says(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, answer: str, expected: str
) -> None:
    monkeypatch.setattr("ctypes.CDLL", lambda name: None)
    monkeypatch.setattr(sys, "executable", str(script(tmp_path / "python", f"echo {answer}")))

    assert gpu.cuda_trouble() == expected


def test_a_host_that_can_run_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch)
    api = read_plan_api(find_flashinfer(str(tmp_path / "fi")))
    found = gpu.look(sys.executable, api)

    assert isinstance(found, gpu.GpuHost)
    assert str(found) == "NVIDIA Fake (FlashInfer 0.6.99, torch 9.8.7)"
    assert found.package == tmp_path / "fakes" / "flashinfer"


def test_a_flashinfer_that_is_not_the_one_rendered_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch)
    api = read_plan_api(miniatures.source(miniatures.backend_era(), "0.7.99"))
    found = gpu.look(sys.executable, api)

    assert isinstance(found, gpu.NoGpu)
    assert "imports FlashInfer 0.6.99 from" in found.reason
    assert found.reason.endswith("the functions are for 0.7.99")
    assert found.hint.startswith(f"give --flashinfer {tmp_path}/fakes/flashinfer")


def test_torch_that_sees_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, available=False)
    found = gpu.look(sys.executable)

    assert isinstance(found, gpu.NoGpu)
    assert found.reason == f"torch 9.8.7 of {sys.executable} sees no CUDA GPU"


@pytest.mark.parametrize("missing", ["pytest", "torch", "flashinfer"])
def test_a_module_that_cannot_be_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    install(tmp_path, monkeypatch)
    (tmp_path / "fakes" / missing).mkdir(exist_ok=True)
    (tmp_path / "fakes" / missing / "__init__.py").write_text("raise ImportError('no\\nlibrary')")
    found = gpu.look(sys.executable)

    assert isinstance(found, gpu.NoGpu)
    assert found.reason == f"{sys.executable} cannot import {missing} (ImportError: no)"
    assert ("-m pip install pytest" in found.hint) == (missing == "pytest")


def test_a_python_that_dies_of_the_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "cuda_trouble", lambda: "")
    python = script(tmp_path / "python", "echo noise", "kill -SEGV $$")
    found = gpu.look(str(python))

    assert isinstance(found, gpu.NoGpu)
    assert f"{python} was killed by SIGSEGV while it imported" in found.reason


def test_a_python_that_cannot_be_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "cuda_trouble", lambda: "")
    found = gpu.look(str(tmp_path / "gone"))

    assert isinstance(found, gpu.NoGpu)
    assert "cannot be started: No such file" in found.reason


# --- running the tests ------------------------------------------------------------------------


def run(
    folder: Path,
    *,
    keyword: str | None = None,
    limit: float | None = None,
    said: list[str] | None = None,
    **files: str,
) -> gpu.TestRun:
    """Run test_<name>.py files by a host that has pytest and no GPU."""
    place = folder / gpu.PACKAGE / "tests"
    place.mkdir(parents=True)
    (folder / gpu.INI).write_text(gpu.INI_TEXT)
    for name, text in files.items():
        (place / f"test_{name}.py").write_text(text)
    lines: list[str] = [] if said is None else said
    return gpu.run_tests(HOST, folder, keyword=keyword, on_progress=lines.append, limit=limit)


def outcomes(tests: gpu.TestRun) -> dict[str, str]:
    return {test.id: test.outcome for test in tests.tests}


def test_passes_failures_and_skips(tmp_path: Path) -> None:
    broken = (
        "import pytest\n\n\n@pytest.fixture\ndef wrapper():\n    raise OSError('no memory')\n\n"
    )
    broken += "\nclass TestDcp:\n    def test_shard(self, wrapper):\n        pass\n"
    many = "import pytest\n\n\n@pytest.mark.parametrize('n', ['a b', 'x::y'])\ndef test_n(n):\n"
    said: list[str] = []
    found = run(
        tmp_path, said=said, a=PASSES + FAILS, b=SKIPS, c=broken, d=many + "    assert n == 'a b'\n"
    )

    assert outcomes(found) == {
        "tests/test_a.py::test_fine": "passed",
        "tests/test_a.py::test_wrong": "failed",
        "tests/test_b.py::test_later": "skipped",
        "tests/test_c.py::TestDcp::test_shard": "error",
        "tests/test_d.py::test_n[a b]": "passed",
        "tests/test_d.py::test_n[x::y]": "failed",
    }
    assert (found.passed, found.failed, found.errors, found.skipped) == (2, 2, 1, 1)
    assert not found.ok
    assert found.trouble == ""
    messages = {test.id.partition("::")[0]: test.message for test in found.tests if test.message}
    assert "not the plan of FlashInfer" in messages["tests/test_a.py"]
    assert messages["tests/test_b.py"] == "needs a Hopper"
    assert "no memory" in messages["tests/test_c.py"]
    assert said == [
        "tests/test_a.py: 1 passed, 1 failed",
        "tests/test_b.py: 1 skipped",
        "tests/test_c.py: 1 in error",
        "tests/test_d.py: 1 passed, 1 failed",
    ]
    assert "not the plan of FlashInfer" in (tmp_path / gpu.LOG).read_text()


def test_all_passed(tmp_path: Path) -> None:
    found = run(tmp_path, a=PASSES)

    assert found.ok
    assert found.passed == 1
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == sorted(
        [gpu.INI, gpu.LOG, gpu.RESULTS, "test_a.py"]
    )


def test_nothing_collected_is_trouble(tmp_path: Path) -> None:
    found = run(tmp_path / "all", a="x = 1\n")

    assert (found.ok, found.trouble) == (False, "no test was collected")
    found = run(tmp_path / "one", a=PASSES, b="x = 1\n")
    assert (found.ok, found.trouble) == (False, "no test was collected from tests/test_b.py")


def test_a_keyword(tmp_path: Path) -> None:
    found = run(tmp_path / "some", keyword="fine", a=PASSES + FAILS, b=FAILS)

    assert found.ok
    assert outcomes(found) == {"tests/test_a.py::test_fine": "passed"}
    found = run(tmp_path / "none", keyword="nothing", a=PASSES)
    assert (found.tests, found.ended.status, found.ok) == ((), 5, False)
    found = run(tmp_path / "wrong", keyword="((", a=PASSES)
    assert (found.tests, found.ended.status, found.ok) == ((), 4, False)


def test_a_module_that_skips_itself(tmp_path: Path) -> None:
    found = run(tmp_path, a="import pytest\npytest.skip('needs a GPU', allow_module_level=True)\n")

    assert found.ok
    assert found.passed == 0
    assert [(test.id, test.message) for test in found.tests] == [("tests/test_a.py", "needs a GPU")]


def test_a_module_that_cannot_be_imported_is_a_failure(tmp_path: Path) -> None:
    found = run(tmp_path, a=PASSES, b="from nowhere import plans\n")

    assert not found.ok
    assert outcomes(found)["tests/test_b.py"] == "error"
    (error,) = (test for test in found.tests if test.outcome == "error")
    assert error.message == "ModuleNotFoundError: No module named 'nowhere'"


def test_a_crash_names_the_test_that_ran(tmp_path: Path) -> None:
    dies = "import os\n\n\ndef test_dies():\n    os.kill(os.getpid(), 11)\n"
    found = run(tmp_path, a=PASSES, b=PASSES + dies + FAILS)

    assert not found.ok
    assert found.ended.status == -signal.SIGSEGV
    assert found.trouble == ("the test process was killed by SIGSEGV in tests/test_b.py::test_dies")
    assert outcomes(found) == {
        "tests/test_a.py::test_fine": "passed",
        "tests/test_b.py::test_fine": "passed",
        "tests/test_b.py::test_dies": "error",
    }


def test_an_exit_in_a_test_is_no_pass(tmp_path: Path) -> None:
    found = run(tmp_path, a="import os\n\n\ndef test_exit():\n    os._exit(0)\n")

    assert not found.ok
    assert "tests/test_a.py::test_exit" in found.trouble


def test_a_run_that_takes_too_long_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    hangs = f"""\
import subprocess, time
def test_hangs():
    child = subprocess.Popen(["sleep", "60"])
    open({str(tmp_path / "pid")!r}, "w").write(str(child.pid))
    time.sleep(60)
"""
    begin = time.monotonic()
    found = run(tmp_path / "tests", limit=2.0, a=hangs)

    assert time.monotonic() - begin < 20
    assert found.trouble == (
        "the test process took longer than 2 s and was ended in tests/test_a.py::test_hangs"
    )
    assert _ends(int((tmp_path / "pid").read_text()))


def _ends(process: int) -> bool:
    """Whether it is gone; one that was killed may need a moment where the machine is busy."""
    for _ in range(50):
        try:
            if "Z" in _state(process):
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.1)
    return False


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_ctrl_c_ends_the_tests(tmp_path: Path) -> None:
    """The tests are in a process group of their own, which no terminal signals."""
    code = f"""\
import sys
from pathlib import Path
from mlagen.codegen import gpu
host = gpu.GpuHost(sys.executable, "", "", "", Path())
gpu.run_script(host, Path({str(tmp_path / "script.py")!r}), [], log=Path({str(tmp_path / "log")!r}),
               on_progress=lambda line: print(line, flush=True))
"""
    (tmp_path / "script.py").write_text(
        "import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(60)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=30)

    assert "KeyboardInterrupt" in error
    assert not Path(f"/proc/{child}").exists()


def test_nothing_of_the_users_own_pytest_takes_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither settings and conftest.py around the folder, nor variables, nor `python -O`."""
    (tmp_path / "conftest.py").write_text("raise SystemExit('the conftest.py of someone')\n")
    (tmp_path / "pyproject.toml").write_text("[tool.pytest.ini_options]\naddopts = '--nope'\n")
    monkeypatch.setenv("PYTEST_ADDOPTS", "--no-such-option")
    monkeypatch.setenv("PYTEST_PLUGINS", "no_such_plugin")
    monkeypatch.setenv("PYTHONOPTIMIZE", "1")
    monkeypatch.setenv("KEPT", "yes")
    monkeypatch.chdir(tmp_path)
    test = "import os\n\n\ndef test_it():\n    assert os.environ['KEPT'] == 'yes' and __debug__\n"

    assert run(tmp_path / "below", a=test).ok


def test_tests_import_what_stands_beside_and_above_them(tmp_path: Path) -> None:
    place = tmp_path / gpu.PACKAGE
    (place / "tests").mkdir(parents=True)
    (tmp_path / gpu.INI).write_text(gpu.INI_TEXT)
    (place / "__init__.py").touch()
    (place / "plans.py").write_text("answer = 42\n")
    (place / "hooks.py").write_text("from .plans import (\n    answer,\n)\n")
    (place / "tests" / "support.py").write_text("shared = 1\n")
    (place / "tests" / "test_a.py").write_text(
        "import importlib\nfrom pathlib import Path\n\nfrom support import shared\n\n"
        "above = Path(__file__).resolve().parents[1].name\n"
        "hooks = importlib.import_module(f'{above}.hooks')\n\n\n"
        "def test_it():\n    assert (hooks.answer, shared) == (42, 1)\n"
    )

    assert gpu.run_tests(HOST, tmp_path, on_progress=print).ok
    by_hand = subprocess.run(
        [sys.executable, "-m", "pytest", "-q"], cwd=tmp_path, capture_output=True, check=False
    )
    assert by_hand.returncode == 0, by_hand.stdout


# --- running a script -------------------------------------------------------------------------


def test_a_script(tmp_path: Path) -> None:
    (tmp_path / "bench.py").write_text(
        "import json, os, sys\n"
        "print('warming up', file=sys.stderr)\n"
        "first = os.environ['PATH'].split(os.pathsep)[0]\n"
        "json.dump([os.environ['MORE'], os.getcwd(), first], open(sys.argv[1], 'w'))\n"
        "print('done')\nsys.exit(3)\n"
    )
    said: list[str] = []
    ended = gpu.run_script(
        HOST,
        tmp_path / "bench.py",
        [str(tmp_path / "answer.json")],
        log=tmp_path / "log.txt",
        env={"MORE": "x"},
        on_progress=said.append,
    )

    assert said == ["warming up", "done"]
    assert (ended.status, str(ended)) == (3, "ended with status 3: done")
    beside = str(Path(sys.executable).parent)
    answer = json.loads((tmp_path / "answer.json").read_text())
    assert answer == ["x", os.path.realpath(tmp_path), beside]
    assert (tmp_path / "log.txt").read_text() == "warming up\ndone\n"
