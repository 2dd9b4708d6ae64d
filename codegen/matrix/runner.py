"""Many small tasks at once, each remembered: an interrupted run resumes, a repeated one is free."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from itertools import islice
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from ..errors import usage
from ..fetch import cache_dir

#: Fewer tasks than this are done here: starting a process takes longer.
_NOT_WORTH_IT = 3
#: Seconds between two lines of progress.
_EVERY = 2.0


@dataclass(frozen=True)
class Task:
    """One call that gives the same result for the same `key`.

    `work` is a module's function; arguments and result go to another process and back, and the
    result into JSON. `label` is what progress calls the task.
    """

    key: str
    label: str
    work: Callable[..., Any]
    arguments: tuple[Any, ...]


class Memory:
    """Results by key, one line of JSON each, in a file that only grows.

    A line is written when its task is done, so that nothing of a killed run is lost but what was
    under way. A line that is cut off, or is none of ours, is passed over.
    """

    def __init__(self, place: Path | None = None) -> None:
        """Read `place`; without one `matrix.jsonl` in the cache."""
        self.place = place or cache_dir() / "matrix.jsonl"
        self._known = dict(self._lines())

    def _lines(self) -> Iterator[tuple[str, Any]]:
        try:
            text = self.place.read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return
        except OSError as error:
            raise _unusable(self.place, error) from error
        for line in text.splitlines():
            try:
                content = json.loads(line)
            except ValueError:
                continue
            if isinstance(content, dict) and isinstance(content.get("key"), str):
                yield content["key"], content.get("result")

    def __contains__(self, key: str) -> bool:
        return key in self._known

    def __getitem__(self, key: str) -> Any:
        return self._known[key]

    def add(self, key: str, result: Any) -> None:
        """Remember a result. One write a line: two runs at once do not mix theirs."""
        line = json.dumps({"key": key, "result": result}, sort_keys=True)
        self._known[key] = json.loads(line)["result"]  # as a later run reads it
        try:
            self.place.parent.mkdir(parents=True, exist_ok=True)
            with open(self.place, "ab") as file:
                # A killed run may have left half a line: begin on a new one.
                file.write(f"{self._line_break()}{line}\n".encode())
        except OSError as error:
            raise _unusable(self.place, error) from error

    def _line_break(self) -> str:
        with open(self.place, "rb") as file:
            if file.seek(0, os.SEEK_END) == 0:
                return ""
            file.seek(-1, os.SEEK_END)
            return "" if file.read(1) == b"\n" else "\n"


def run(
    tasks: Sequence[Task], memory: Memory, jobs: int, say: Callable[[str], None]
) -> dict[str, Any]:
    """The result of every task, by key: remembered, else worked out, at most `jobs` at once.

    An error of a task ends the run, with its label said; what was done by then is remembered.
    """
    waiting = {task.key: task for task in tasks if task.key not in memory}
    progress = _Progress(len(waiting), say)
    if jobs == 1 or len(waiting) < _NOT_WORTH_IT:
        for task in waiting.values():
            memory.add(task.key, _result(task, partial(task.work, *task.arguments), say))
            progress.done(task.label)
    else:
        _in_processes(list(waiting.values()), memory, jobs, progress, say)
    return {task.key: memory[task.key] for task in tasks}


def _in_processes(
    tasks: Sequence[Task],
    memory: Memory,
    jobs: int,
    progress: _Progress,
    say: Callable[[str], None],
) -> None:
    # Not fork: fetching has threads, and a fork of a threaded process may hang.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(min(jobs, len(tasks)), mp_context=context, initializer=_begin)
    left = iter(tasks)
    running: dict[Future[Any], Task] = {}
    # No more at once than the processes can begin: where the run breaks off, there is nothing to
    # cancel (a pool that is told to cancel may hang), and what is under way ends in a moment.
    with pool:
        while True:
            for task in islice(left, 2 * jobs - len(running)):
                running[pool.submit(task.work, *task.arguments)] = task
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                task = running.pop(future)
                memory.add(task.key, _result(task, future.result, say))
                progress.done(task.label)


def _begin() -> None:
    """In each process, first: leave Ctrl-C to the one that began it, and do not outlive that."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: BaseProcess) -> None:
    parent.join()
    os._exit(1)


def _result(task: Task, call: Callable[[], Any], say: Callable[[str], None]) -> Any:
    try:
        return call()
    except Exception:
        say(f"{task.label}: failed")
        raise


class _Progress:
    """A line every few seconds, and one for the last task."""

    def __init__(self, total: int, say: Callable[[str], None]) -> None:
        self._total, self._say = total, say
        self._done = 0
        self._told = time.monotonic()

    def done(self, label: str) -> None:
        self._done += 1
        now = time.monotonic()
        if now - self._told >= _EVERY or self._done == self._total:
            self._told = now
            self._say(f"{self._done} of {self._total}: {label}")


def _unusable(place: Path, error: OSError) -> Exception:
    return usage(
        f"cannot use the results of earlier runs: {error.strerror or error}",
        path=str(place),
        code="cache-not-writable",
        hint="set MLAGEN_CACHE to a folder that can be written",
    )
