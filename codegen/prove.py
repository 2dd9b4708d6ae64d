"""The generated tests, run on the functions of one file; and what to say of how it went."""

from __future__ import annotations

import shutil
import tempfile
import textwrap
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from . import gpu, render_tests
from .errors import GeneratedTestsFailed, Problem, usage
from .extract import functions_of
from .patch import Patch, mlagen_version
from .publish import write_tree
from .render import Rendered, module_files
from .report import Facts, Outcome, Printer, RanTest

#: Failed tests that an error shows, and lines of the message of each.
SHOWN_TESTS, SHOWN_LINES = 10, 6
#: Reasons of skipped tests that a report shows.
SHOWN_REASONS = 5


@dataclass(frozen=True)
class Suite:
    """Functions and their tests, as files of a folder that gpu.run_tests takes."""

    files: Mapping[str, bytes]


@dataclass(frozen=True)
class Proof:
    """A run of a suite, where it ran, and the folder that holds what ran; None: gone."""

    run: gpu.TestRun
    host: gpu.GpuHost
    folder: Path | None


@dataclass(frozen=True)
class Remark:
    """What `patch` says of the tests, and those that ran."""

    note: str
    tests: tuple[RanTest, ...] = ()


# --- suites -----------------------------------------------------------------------------------


def suite_of_file(made: Patch, only: Collection[str] = ()) -> Suite:
    """The functions of a patched file and the tests of the variants that it has, or of those in
    `only`.

    Raises UsageError where it has none of these.
    """
    spec, absent = made.rendered.spec, made.target.absent
    served = [variant.name for variant in spec.variants if variant.name not in absent]
    chosen = [name for name in served if not only or name in only]
    if not chosen:
        raise made.no_place()
    functions = functions_of(made.patched, made.found.label)
    return _suite(functions, made.rendered, f"those of {made.found.label}", chosen)


def suite_of_rendering(rendered: Rendered, only: Collection[str] = ()) -> Suite:
    """All functions as `generated/` shows them, and the tests of all variants or of `only`."""
    head = _header(rendered, "as `mlagen render` shows them")
    functions = module_files(rendered, head)
    names = [variant.name for variant in rendered.spec.variants]
    chosen = [name for name in names if not only or name in only]
    return _suite(functions, rendered, "as `mlagen render` shows them", chosen)


def _suite(
    functions: Mapping[str, bytes], rendered: Rendered, source: str, variants: Sequence[str]
) -> Suite:
    tests = render_tests.test_files(rendered, _header(rendered, source), variants)
    files = {"__init__.py": b"", **functions, **tests}
    below = {f"{gpu.PACKAGE}/{name}": data for name, data in files.items()}
    return Suite({gpu.INI: gpu.INI_TEXT.encode(), **below})


def _header(rendered: Rendered, source: str) -> tuple[str, ...]:
    return (
        f"Written by mlagen {mlagen_version()} to test its functions, {source}.",
        rendered.api.source_text,
    )


# --- running ----------------------------------------------------------------------------------


def keep(suite: Suite, folder: Path) -> None:
    """Write a suite where the user wants it.

    Raises UsageError where other things stand there: they would be taken for tests, or lost.
    """
    there = folder / gpu.INI
    ours = there.is_file() and there.read_bytes() == gpu.INI_TEXT.encode()
    if folder.is_dir() and any(folder.iterdir()) and not ours:
        raise usage(
            "the folder is not empty",
            path=str(folder),
            code="not-empty",
            hint="give --keep a new folder, or one that it wrote before",
        )
    old = folder / gpu.PACKAGE / "tests"
    stale = {f"{gpu.PACKAGE}/tests/{path.name}" for path in old.glob("*.py")} - set(suite.files)
    write_tree(folder, suite.files, remove=sorted(stale))


def prove(
    suite: Suite, host: gpu.GpuHost, *, kept: Path | None = None, keyword: str | None = None
) -> Proof:
    """Run a suite, in `kept`, which has it already, or in a temporary folder. That one stays
    where something failed."""
    folder = kept or _temporary(suite)
    say = Printer().progress
    try:
        say(f"running the generated GPU tests on {host}, in {folder}")
        say("FlashInfer may compile its kernels first, which takes minutes")
        run = gpu.run_tests(host, folder, keyword=keyword, on_progress=say)
    except BaseException:
        if kept is None:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    if kept is None and run.ok:
        shutil.rmtree(folder, ignore_errors=True)
        return Proof(run, host, None)
    return Proof(run, host, folder)


def _temporary(suite: Suite) -> Path:
    try:
        folder = Path(tempfile.mkdtemp(prefix="mlagen-test-"))
    except OSError as error:
        raise usage(
            f"no temporary folder can be made for the tests: {error.strerror}",
            path=tempfile.gettempdir(),
            code="not-written",
            hint="set TMPDIR to a folder that you can write",
        ) from None
    write_tree(folder, suite.files)
    return folder


def before_publishing(
    made: Patch, wanted: bool | None, python: str | None, near: Iterable[Path | None]
) -> Remark:
    """Test a staged file, where a GPU is.

    Args:
        wanted: True insists, False declines, None: where it can be done.
        python, near: as gpu.find_python takes them.

    Raises:
        GeneratedTestsFailed: a test failed; the problems tell which.
        UsageError: no test can run, and `wanted` insists.
    """
    chosen = gpu.find_python(python, near)
    if wanted is False:
        return Remark("generated GPU tests not run: --no-test was given")
    host = gpu.look(chosen, made.rendered.api)
    if isinstance(host, gpu.NoGpu):
        return _not_run(host.reason, host.hint, insisted=wanted is True)
    proof = prove(suite_of_file(made), host)
    if not proof.run.ok:
        raise GeneratedTestsFailed(*problems_of(proof, made.found.label, "; nothing was written"))
    if not proof.run.passed:
        reasons = "; ".join(_reasons(proof.run))
        remark = _not_run(f"all were skipped ({reasons})", "", insisted=wanted is True)
        return Remark(remark.note, proof.run.tests)
    skipped = f", {proof.run.skipped} skipped" if proof.run.skipped else ""
    note = f"{_count(proof.run.passed)} passed on {host}{skipped}"
    return Remark(note, proof.run.tests)


def _not_run(reason: str, hint: str, *, insisted: bool) -> Remark:
    if insisted:
        raise usage(
            f"the generated GPU tests cannot run: {reason}; nothing was written",
            path="--test",
            code="cannot-test",
            hint=f"{hint}; without --test the file is patched untested".removeprefix("; "),
        )
    return Remark(f"generated GPU tests not run: {reason}" + (f"; {hint}" if hint else ""))


# --- telling ----------------------------------------------------------------------------------


def facts_of(proof: Proof) -> Facts:
    """Where the tests ran, and how those of each file went."""
    host = proof.host
    counts: dict[str, Counter[Outcome]] = {}
    seconds: dict[str, float] = {}
    for test in proof.run.tests:
        file = test.id.partition("::")[0]
        counts.setdefault(file, Counter())[test.outcome] += 1
        seconds[file] = seconds.get(file, 0.0) + test.seconds
    kept = (("kept in", str(proof.folder)),) if proof.folder is not None else ()
    return (
        ("python", host.python),
        ("GPU", host.gpu),
        ("imported there", f"FlashInfer {host.flashinfer}, torch {host.torch}"),
        *((file, f"{gpu.counts_text(c)} in {seconds[file]:.1f} s") for file, c in counts.items()),
        *kept,
    )


def notes_of(run: gpu.TestRun) -> tuple[str, ...]:
    """How many tests passed, and why others were skipped: a note a reason."""
    passed = [f"{_count(run.passed)} passed"] if run.passed else []
    return (*passed, *(f"skipped: {reason}" for reason in _reasons(run)))


def _count(number: int) -> str:
    return f"{number} generated GPU test{'' if number == 1 else 's'}"


def _reasons(run: gpu.TestRun) -> list[str]:
    found: dict[str, list[str]] = {}
    for test in run.tests:
        if test.outcome == "skipped":
            found.setdefault(test.message.strip() or "no reason given", []).append(test.id)
    told = [
        f"{reason} ({ids[0]}{f' and {len(ids) - 1} more' if len(ids) > 1 else ''})"
        for reason, ids in found.items()
    ]
    more = len(told) - SHOWN_REASONS
    return [*told[:SHOWN_REASONS], *([f"{more} reasons more"] if more > 0 else [])]


def problems_of(proof: Proof, label: str, consequence: str = "") -> tuple[Problem, ...]:
    """What a run that failed is told as: the run first, then a problem a failed test."""
    run = proof.run
    failed = [test for test in run.tests if test.outcome in ("failed", "error")]
    what = f"{len(failed)} of {len(run.tests)} generated GPU tests failed on {proof.host}"
    if run.trouble:
        what = f"{run.trouble}; {what}" if failed else f"{run.trouble}, on {proof.host}"
    where = f"the functions, the tests and {gpu.LOG} are kept in {proof.folder}"
    first = Problem(label, 0, 0, "gpu-tests-failed", what + consequence, where)
    problems = [_problem(test) for test in failed[:SHOWN_TESTS]]
    if len(failed) > SHOWN_TESTS:
        more = f"{len(failed) - SHOWN_TESTS} tests more failed; {gpu.LOG} has them"
        problems.append(Problem(label, 0, 0, "gpu-tests-failed", more))
    return (first, *problems)


def _problem(test: RanTest) -> Problem:
    lines = test.message.strip().splitlines() or ["no message"]
    if len(lines) > SHOWN_LINES:
        lines[SHOWN_LINES:] = [f"... {len(lines) - SHOWN_LINES} more lines"]
    text = textwrap.indent("\n".join(lines), "    ").strip()
    code = "gpu-test-failed" if test.outcome == "failed" else "gpu-test-error"
    return Problem(test.id, 0, 0, code, text)
