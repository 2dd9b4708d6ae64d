"""The benchmark, run in the Python of a GPU host."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from . import gpu
from .bench import Result, read_results
from .errors import GeneratedTestsFailed, Problem, usage
from .publish import write_tree
from .render_bench import SCRIPT
from .report import Printer

LOG, ANSWER = "log.txt", "result.json"
#: Exit statuses of the script, beside 0: it cannot measure; what it measured is wrong.
_CANNOT, _WRONG = 2, 3
#: Seconds. The kernels may be compiled first; the benchmark itself takes a few minutes.
_LIMIT: Final = 3600.0


def keep(files: Mapping[str, bytes], folder: Path) -> None:
    """Write the scripts where the user wants them.

    Raises UsageError where other things stand there.
    """
    known = {Path(name).parts[0] for name in files} | {LOG, ANSWER}
    if folder.is_dir() and any(entry.name not in known for entry in folder.iterdir()):
        raise usage(
            "the folder is not empty",
            path=str(folder),
            code="not-empty",
            hint="give --keep a new folder, or one that it wrote before",
        )
    write_tree(folder, files)


def measure(
    files: Mapping[str, bytes],
    host: gpu.GpuHost,
    *,
    kept: Path | None,
    quick: bool,
    parts: Sequence[str] = (),
    seconds: int | None = None,
) -> tuple[Result, bytes]:
    """Run the benchmark in `kept`, which has the files already, or in a temporary folder; gives
    its result, and the file's bytes. `parts`: none for what the script measures by itself;
    `seconds`: about how long it may take.

    Raises:
        GeneratedTestsFailed: a plan that was to be measured gives a wrong output.
        UsageError: it could not be run to its end.
    """
    folder = kept or Path(tempfile.mkdtemp(prefix="mlagen-bench-"))
    say = Printer().progress
    try:
        if kept is None:
            write_tree(folder, files)
        say(f"measuring on {host}, in {folder}")
        options = ["--quick"] if quick else []
        if parts:
            options += ["--parts", ",".join(parts)]
        if seconds is not None:
            options += ["--seconds", str(seconds)]
        return _run(folder.absolute(), host, options)
    finally:
        if kept is None:
            shutil.rmtree(folder, ignore_errors=True)


def _run(folder: Path, host: gpu.GpuHost, options: Sequence[str]) -> tuple[Result, bytes]:
    answer = folder / ANSWER
    answer.unlink(missing_ok=True)
    ended = gpu.run_script(
        host,
        folder / SCRIPT,
        ["--out", str(answer), *options],
        log=folder / LOG,
        on_progress=Printer().progress,
        limit=_LIMIT,
    )
    if ended.status == _WRONG:
        raise GeneratedTestsFailed(Problem("mlagen bench", 0, 0, "wrong-output", ended.last))
    if ended.status != 0 or not answer.is_file():
        raise usage(
            f"the benchmark {ended}",
            path="mlagen bench",
            code="cannot-measure",
            hint="with --keep DIR its scripts and its log stay, to be run by hand",
        )
    return read_results([answer])[0], answer.read_bytes()
