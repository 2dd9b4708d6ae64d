"""Where generated code meets a GPU: find a Python that has torch, run tests and scripts in it.

The one module that starts such a Python; nothing here imports torch, FlashInfer or pytest. A
machine without a GPU is told by its driver library, before any Python is started.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final
from xml.etree import ElementTree

from .errors import MlagenError, usage
from .flashinfer.api import PlanApi
from .flashinfer.find import find_flashinfer
from .flashinfer.read import read_plan_api
from .report import Outcome, RanTest

#: Seconds that a run of the tests or of a script may take. FlashInfer may compile its kernels in
#: it, minutes each where the cores are few.
TIME_LIMIT: Final = 3600.0
#: Seconds to import torch and FlashInfer, once, from a cold disk.
LOOK_LIMIT: Final = 300.0
#: Seconds for the driver to count its devices.
_DRIVER_LIMIT: Final = 60.0
#: Seconds between two looks at what a process has written.
_POLL: Final = 0.2
#: Seconds for a process to end when it is asked to.
_PATIENCE: Final = 5.0

#: Files of a folder that `run_tests` runs in, beside those that are tested.
PACKAGE: Final = "mlagen_generated"
INI, LOG, RESULTS = "pytest.ini", "log.txt", "results.xml"
#: Makes the folder its own root for pytest, whatever stands around it.
INI_TEXT: Final = f"""\
# Written by mlagen. Run the tests by hand with `python -m pytest` in this folder.
[pytest]
testpaths = {PACKAGE}/tests
pythonpath = . {PACKAGE}/tests
addopts = --import-mode=importlib -p no:cacheprovider
console_output_style = classic
junit_family = xunit1
"""

_COUNT_DEVICES = """\
import ctypes
cuda, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
status = cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count))
print(status, count.value)
"""

#: Writes what it found to the file that is its argument: a library may print when it is imported.
_LOOK = """\
import importlib, json, sys
found = {}
def look():
    for name in ("pytest", "torch", "flashinfer"):
        try:
            module = importlib.import_module(name)
        except BaseException as error:
            found.update(failed=name, error=f"{type(error).__name__}: {error}")
            return
        found[name] = str(getattr(module, "__version__", "(version unknown)"))
        if name == "torch":
            if not module.cuda.is_available():
                found.update(failed="cuda")
                return
            found["gpu"] = module.cuda.get_device_name(0)
        if name == "flashinfer":
            found["package"] = list(module.__path__)[0]
look()
with open(sys.argv[1], "w", encoding="utf-8") as file:
    json.dump(found, file)
"""

#: A line of `pytest -v`: a test and how it ended. While it runs, the line has no end yet.
_TEST_LINE = re.compile(
    r"^(?P<id>\S+\.py::.*?) (?P<outcome>PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\b"
)
#: Such a line where the process died; faulthandler writes on in it.
_RUNNING = re.compile(r"^(?P<id>\S+\.py::.*?)(?: Fatal Python error.*)?\s*\Z")
_OUTCOMES: Mapping[str, Outcome] = {
    "PASSED": "passed",
    "XPASS": "passed",
    "FAILED": "failed",
    "ERROR": "error",
    "SKIPPED": "skipped",
    "XFAIL": "skipped",
}
#: What the elements inside a JUnit testcase mean, the gravest last.
_TAGS: Mapping[str, Outcome] = {"skipped": "skipped", "failure": "failed", "error": "error"}
#: What pytest's exit statuses mean, beside 0 (all passed) and 1 (some failed).
_PYTEST_STATUS = {
    2: "pytest was interrupted",
    3: "pytest failed in itself",
    4: "pytest could not be called so",
    5: "no test was collected",
}


@dataclass(frozen=True)
class GpuHost:
    """A Python that can run the tests.

    Attributes:
        python: its executable.
        gpu: the name of CUDA device 0.
        torch, flashinfer: versions, as the modules tell them.
        package: the folder of the FlashInfer that it imports.
    """

    python: str
    gpu: str
    torch: str
    flashinfer: str
    package: Path

    def __str__(self) -> str:
        return f"{self.gpu} (FlashInfer {self.flashinfer}, torch {self.torch})"


@dataclass(frozen=True)
class NoGpu:
    """Why no test can run here, and what would help; both without a full stop."""

    reason: str
    hint: str


@dataclass(frozen=True)
class Ended:
    """How a process ended. `status`: its exit status, negative for a signal, None where it took
    longer than `limit` seconds and was ended. `last` is the last line that it wrote."""

    status: int | None
    limit: float
    last: str = ""

    def __str__(self) -> str:
        if self.status is None:
            return f"took longer than {self.limit:.0f} s and was ended"
        if self.status < 0:
            return f"was killed by {_signal_name(-self.status)}"
        return f"ended with status {self.status}" + (f": {self.last}" if self.last else "")


@dataclass(frozen=True)
class TestRun:
    """What a run of the generated tests gave.

    Attributes:
        tests: those that ran or were skipped, in their order.
        ended: how the process ended.
        trouble: what went wrong beside the tests, as a sentence without its full stop: a crash,
            a time limit, nothing collected. Empty where pytest came to its end.
    """

    __test__ = False  # the name is no invitation to pytest

    tests: tuple[RanTest, ...]
    ended: Ended
    trouble: str = ""

    def count(self, *outcomes: Outcome) -> int:
        """How many tests ended so."""
        return sum(test.outcome in outcomes for test in self.tests)

    @property
    def passed(self) -> int:
        """How many passed."""
        return self.count("passed")

    @property
    def failed(self) -> int:
        """How many failed by what they found."""
        return self.count("failed")

    @property
    def errors(self) -> int:
        """How many could not be made: fixtures, imports."""
        return self.count("error")

    @property
    def skipped(self) -> int:
        """How many were skipped."""
        return self.count("skipped")

    @property
    def ok(self) -> bool:
        """Whether nothing failed. Where all were skipped, nothing was proved either: `passed`."""
        return not (self.failed or self.errors or self.trouble)


# --- looking ----------------------------------------------------------------------------------


def find_python(explicit: str | None, near: Iterable[Path | None] = ()) -> str:
    """The Python to run in: the one given; that of the environment in whose site-packages a path
    of `near` lies; the one that runs mlagen.

    Raises UsageError where `explicit` is no executable.
    """
    if explicit is not None:
        found = shutil.which(os.path.expanduser(explicit)) if explicit else None
        if found is None:
            raise usage(
                "no such interpreter, or not executable",
                path=explicit[:200] or "--python",
                code="no-python",
                hint="give the Python of the environment that SGLang runs in, such as "
                ".venv/bin/python",
            )
        return os.path.abspath(found)
    for place in near:
        found = _python_of(place) if place is not None else None
        if found is not None:
            return found
    return sys.executable


def _python_of(place: Path) -> str | None:
    """The interpreter of the environment that a file lies in: <prefix>/lib/pythonX.Y/site-packages
    or Debian's dist-packages, whose interpreter may stand in /usr."""
    for folder in place.absolute().parents:
        if folder.name not in ("site-packages", "dist-packages") or len(folder.parents) < 3:
            continue
        library, prefix = folder.parent.name, folder.parents[2]
        if folder.parents[1].name not in ("lib", "lib64"):
            continue
        prefixes = [prefix, Path("/usr")] if folder.name == "dist-packages" else [prefix]
        for candidate in prefixes:
            for name in dict.fromkeys((library, "python3", "python")):
                python = candidate / "bin" / name
                if python.is_file() and os.access(python, os.X_OK):
                    return str(python)
    return None


def look(python: str, api: PlanApi | None = None) -> GpuHost | NoGpu:
    """Whether `python` can run generated tests: imports torch, FlashInfer and pytest, sees a GPU,
    and, where `api` is given, imports the FlashInfer that it was read from.

    Starts nothing that imports torch where the driver shows no device.
    """
    trouble = cuda_trouble()
    if trouble:
        return NoGpu(f"no CUDA GPU here ({trouble})", "run `mlagen test PATH` where there is one")
    host = _ask(python)
    if isinstance(host, GpuHost) and api is not None:
        return _other_flashinfer(host, api) or host
    return host


def cuda_trouble() -> str:
    """Why CUDA has no device here; empty where it has one. Takes well under a millisecond where
    there is no driver, else what the driver needs to start in a process of its own."""
    import ctypes

    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "libcuda.so.1 cannot be loaded"
    command = [sys.executable, "-I", "-S", "-c", _COUNT_DEVICES]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_DRIVER_LIMIT, check=False
        )
        status, count = (int(word) for word in done.stdout.split())
    except subprocess.TimeoutExpired:
        return f"the driver did not answer in {_DRIVER_LIMIT:.0f} s"
    except ValueError:
        return "the driver could not be asked"
    if status or not count:
        return f"the driver shows none: status {status}" if status else "the driver shows none"
    return ""


def _ask(python: str) -> GpuHost | NoGpu:
    """Import in `python` what the tests import."""
    with tempfile.TemporaryDirectory(prefix="mlagen-look-") as folder:
        answer = Path(folder, "answer.json")
        # From an empty folder: `python -c` imports from where it runs.
        command = [python, "-c", _LOOK, str(answer)]
        try:
            ended = _run(command, Path(folder), {}, Path(folder, LOG), _ignore, LOOK_LIMIT)
        except MlagenError as error:
            return NoGpu(error.problems[0].message, "give --python the one that SGLang runs in")
        try:
            found = json.loads(answer.read_bytes())
        except (OSError, ValueError):
            return NoGpu(
                f"{python} {ended} while it imported pytest, torch and flashinfer",
                "try these imports there by hand",
            )
    return _host(python, found)


def _host(python: str, found: Mapping[str, str]) -> GpuHost | NoGpu:
    failed = found.get("failed")
    hint = "run `mlagen test PATH --python PY`, PY being the one that SGLang runs in"
    if failed == "cuda":
        return NoGpu(f"torch {found['torch']} of {python} sees no CUDA GPU", hint)
    if failed is not None:
        if failed == "pytest":
            hint = f"install it: {python} -m pip install pytest"
        return NoGpu(f"{python} cannot import {failed} ({_first_line(found['error'])})", hint)
    return GpuHost(
        python, found["gpu"], found["torch"], found["flashinfer"], Path(found["package"])
    )


def _other_flashinfer(host: GpuHost, api: PlanApi) -> NoGpu | None:
    """Functions of one FlashInfer prove nothing on another. Told by the source that was read,
    which is what they are rendered from, not by the version."""
    try:
        there = read_plan_api(find_flashinfer(str(host.package))).digest
    except MlagenError as error:
        there = None
        detail = f": {error.problems[0].message}"
    else:
        detail = ""
    if there == api.digest:
        return None
    return NoGpu(
        f"{host.python} imports FlashInfer {host.flashinfer} from {host.package}, and the "
        f"functions are for {api.version or 'another one'}{detail}",
        f"give --flashinfer {host.package}, or --python of an environment that has the other",
    )


# --- running ----------------------------------------------------------------------------------


def run_tests(
    host: GpuHost,
    folder: Path,
    *,
    keyword: str | None = None,
    on_progress: Callable[[str], None],
    limit: float | None = None,
) -> TestRun:
    """Run the tests of `folder`, which holds `INI` and below `PACKAGE` the functions and tests/.

    Leaves `LOG` and `RESULTS` in the folder.

    Args:
        keyword: for pytest's -k.
        on_progress: called with a line a test file that is through.
        limit: seconds; None: TIME_LIMIT.
    """
    folder = folder.absolute()
    files = sorted(path.name for path in (folder / PACKAGE / "tests").glob("test_*.py"))
    results = folder / RESULTS
    results.unlink(missing_ok=True)
    command = [host.python, "-m", "pytest", "-c", str(folder / INI), "--rootdir", str(folder)]
    command += ["--confcutdir", str(folder), "-v", "--color=no", "--tb=short"]
    command += [f"--junit-xml={results}", *(["-k", keyword] if keyword is not None else [])]
    command += [f"{PACKAGE}/tests/{name}" for name in files]
    progress = _FileByFile(on_progress)
    limit = TIME_LIMIT if limit is None else limit
    # Plugins of that environment are no part of the tests, and some change how they run.
    env = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    ended = _run(command, folder, env, folder / LOG, progress.line, limit)
    progress.through()
    tests = _read_results(results)
    if tests is None:
        return _broken_off(ended, (folder / LOG).read_text("utf-8", errors="replace"))
    return TestRun(tests, ended, _trouble(ended, tests, () if keyword is not None else files))


def run_script(
    host: GpuHost,
    script: Path,
    args: Sequence[str],
    *,
    log: Path,
    env: Mapping[str, str] | None = None,
    on_progress: Callable[[str], None],
    limit: float | None = None,
) -> Ended:
    """Run a script in the host's Python, in the script's folder. What it prints, on either
    stream, is progress: its answer goes to a file that `args` name.

    Args:
        log: a file that gets all that it prints.
        env: variables to add to this process's.
        on_progress: called with each line that it prints, as it comes.
        limit: seconds; None: TIME_LIMIT.
    """
    script = script.absolute()
    command = [host.python, str(script), *args]
    limit = TIME_LIMIT if limit is None else limit
    return _run(command, script.parent, env or {}, log, on_progress, limit)


def _run(
    command: Sequence[str],
    cwd: Path,
    env: Mapping[str, str],
    log: Path,
    on_line: Callable[[str], None],
    limit: float,
) -> Ended:
    """Run in a process group of its own, which is gone when this returns or raises. What it writes
    goes to a file, not a pipe: a compiler that outlives its parent would hold a pipe open.

    Raises UsageError where the command cannot be started.
    """
    last = ""
    with open(log, "wb") as sink, open(log, "rb") as shown:
        try:
            process = subprocess.Popen(
                command,
                cwd=cwd,
                env=_environment(command[0], env),
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise usage(
                f"{command[0]} cannot be started: {error.strerror}",
                path=command[0],
                code="no-python",
            ) from None
        lines = _Lines(shown)
        try:
            end = time.monotonic() + limit
            status: int | None = None
            while status is None and time.monotonic() < end:
                with suppress(subprocess.TimeoutExpired):
                    status = process.wait(_POLL)
                for line in lines.new():
                    last = line.strip() or last
                    on_line(line)
        finally:
            _end(process)
    return Ended(status, limit, last)


class _Lines:
    """The whole lines of a file that grows."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._rest = b""

    def new(self) -> Iterator[str]:
        """Those that came since the last call, without line ends."""
        *whole, self._rest = (self._rest + self._file.read()).split(b"\n")
        for line in whole:
            yield line.decode("utf-8", "replace").rstrip("\r")


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and all that it started, also what outlives it."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_PATIENCE)


def _environment(python: str, more: Mapping[str, str]) -> dict[str, str]:
    """The user's variables, but for those that would change what the tests are: pytest's own, and
    the one that drops assertions. Programs beside `python` are found: FlashInfer compiles with the
    ninja of its environment."""
    foreign = ("PYTEST_ADDOPTS", "PYTEST_PLUGINS", "PYTHONOPTIMIZE")
    kept = {name: value for name, value in os.environ.items() if name not in foreign}
    kept["PATH"] = os.pathsep.join([os.path.dirname(python), kept.get("PATH", os.defpath)])
    return {**kept, "PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": "1", **more}


class _FileByFile:
    """Tells each test file that is through, from the lines of `pytest -v`."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._file = ""
        self._counts: Counter[Outcome] = Counter()

    def line(self, text: str) -> None:
        match = _TEST_LINE.match(text)
        if match is None:
            return
        file = _short(match["id"]).partition("::")[0]
        if file != self._file:
            self.through()
            self._file = file
        self._counts[_OUTCOMES[match["outcome"]]] += 1

    def through(self) -> None:
        if self._counts:
            self._say(f"{self._file}: {counts_text(self._counts)}")
        self._counts.clear()


def counts_text(counts: Mapping[Outcome, int]) -> str:
    """Such as `12 passed, 1 failed, 2 skipped`."""
    words: Sequence[tuple[Outcome, str]] = (
        ("passed", "passed"),
        ("failed", "failed"),
        ("error", "in error"),
        ("skipped", "skipped"),
    )
    return ", ".join(f"{counts[key]} {word}" for key, word in words if counts.get(key))


# --- results ----------------------------------------------------------------------------------


def _read_results(path: Path) -> tuple[RanTest, ...] | None:
    """The tests of pytest's JUnit XML; None where it was not written to its end."""
    try:
        root = ElementTree.parse(path).getroot()
    except (OSError, ElementTree.ParseError):
        return None
    return tuple(_test(case) for case in root.iter("testcase"))


def _test(case: ElementTree.Element) -> RanTest:
    outcome: Outcome = "passed"
    message = ""
    for tag, meant in _TAGS.items():
        child = case.find(tag)
        if child is not None:
            outcome, message = meant, _message(child)
    return RanTest(_id(case), outcome, message, float(case.get("time") or 0))


def _id(case: ElementTree.Element) -> str:
    """As pytest would be given it, from the folder of the functions on. What could not be
    collected has no file, and its name is that of the module."""
    file, name = case.get("file"), case.get("name") or ""
    if file is None:
        return _short(name.replace(".", "/") + ".py" if "/" not in name else name)
    module = file.removesuffix(".py").replace("/", ".")
    classes = (case.get("classname") or "").removeprefix(module).strip(".")
    where = _short(file)
    if not name or name in (file, module):
        return where
    return "::".join([where, *([classes.replace(".", "::")] if classes else []), name])


def _message(child: ElementTree.Element) -> str:
    """What pytest says of a test, or of a module that it could not collect or that skipped itself:
    of these the sentence stands in the text only."""
    message, text = child.get("message") or "", child.text or ""
    if message.startswith("collection "):
        skipped = re.search(r"Skipped: (.*?)['\"]\)\s*\Z", text, re.DOTALL)
        if skipped:
            return skipped[1]
        raised = [line[1:].strip() for line in text.splitlines() if line.startswith("E ")]
        return "\n".join(raised) or text.strip() or message
    return message or text.strip()


def _trouble(ended: Ended, tests: Sequence[RanTest], files: Sequence[str]) -> str:
    """What is wrong with a run that left results, beside its tests. `files` are those of which
    each must have a test."""
    if ended.status is None or ended.status < 0:
        return f"the test process {ended}"
    if not tests:
        return _PYTEST_STATUS[5]
    found = {Path(test.id.partition("::")[0]).name for test in tests}
    without = [f"tests/{name}" for name in files if name not in found]
    if without:
        return f"no test was collected from {', '.join(without)}"
    failures = sum(test.outcome in ("failed", "error") for test in tests)
    all_skipped = all(test.outcome == "skipped" for test in tests)
    # 5: a module that skips itself has no tests to collect.
    fits = (ended.status == 0) if not failures else ended.status in (1, 2)
    if fits or (ended.status == 5 and all_skipped):
        return ""
    return f"{_PYTEST_STATUS.get(ended.status, 'pytest')} (it {ended})"


def _broken_off(ended: Ended, log: str) -> TestRun:
    """A run that left no results: what its log tells, and where it stopped."""
    tests: list[RanTest] = []
    for line in log.splitlines():
        match = _TEST_LINE.match(line)
        if match:
            tests.append(RanTest(_short(match["id"]), _OUTCOMES[match["outcome"]]))
    running = _running(log, {test.id for test in tests})
    where = f" in {running}" if running else ""
    if running:
        tests.append(RanTest(running, "error", f"the test process {ended}"))
    known = _PYTEST_STATUS.get(ended.status) if ended.status is not None else None
    trouble = f"the test process {ended}{where}"
    return TestRun(tuple(tests), ended, f"{known}: {trouble}" if known else trouble)


def _running(log: str, done: set[str]) -> str:
    """The test that had started last and did not end; empty where none had."""
    for line in reversed(log.splitlines()):
        match = _RUNNING.match(line)
        if match and not _TEST_LINE.match(line):
            found = _short(match["id"])
            return "" if found in done else found
    return ""


def _short(test_id: str) -> str:
    return test_id.removeprefix(f"{PACKAGE}/")


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _ignore(line: Any) -> None:
    """For output that nobody waits for."""
