"""Tasks that are remembered: nothing done twice, nothing lost to a kill."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mlagen.codegen.errors import UsageError
from mlagen.codegen.matrix.runner import Memory, Task, run

#: A program of its own: each task notes its process, then takes a while.
SCRIPT = """\
import os, sys, time
from pathlib import Path
from mlagen.codegen.matrix.runner import Memory, Task, run

def slow(folder, number):
    with open(folder / f"ran-{number}", "a") as file:
        file.write(f"{os.getpid()}\\n")
    time.sleep(0.05)
    return number * number

if __name__ == "__main__":
    folder, jobs = Path(sys.argv[1]), int(sys.argv[2])
    tasks = [Task(f"key {n}", f"task {n}", slow, (folder, n)) for n in range(30)]
    run(tasks, Memory(folder / "memory"), jobs, print)
"""
ALL = 30
#: A line of progress for each task.
TELL_ALL = "import mlagen.codegen.matrix.runner as r; r._EVERY = 0.0"


def counting(calls: list[int]) -> Callable[[int], int]:
    def work(number: int) -> int:
        calls.append(number)
        return number + 1

    return work


def tasks_of(work: Callable[[int], int], *numbers: int) -> list[Task]:
    return [Task(f"key {n}", f"task {n}", work, (n,)) for n in numbers]


def test_remembered_in_a_run_and_between_runs(tmp_path: Path) -> None:
    calls: list[int] = []
    said: list[str] = []
    place = tmp_path / "deep" / "memory"
    tasks = tasks_of(counting(calls), 1, 2, 2)
    assert run(tasks, Memory(place), 1, said.append) == {"key 1": 2, "key 2": 3}
    assert calls == [1, 2]
    assert said == ["2 of 2: task 2"]
    assert run(tasks_of(counting(calls), 2, 3), Memory(place), 1, said.append)["key 3"] == 4
    assert calls == [1, 2, 3]
    assert place.read_text().count("\n") == 3


def test_nothing_to_do_says_nothing(tmp_path: Path) -> None:
    said: list[str] = []
    assert run([], Memory(tmp_path / "memory"), 4, said.append) == {}
    assert said == []
    assert not (tmp_path / "memory").exists()


def test_a_failure_ends_the_run_and_what_was_done_stays(tmp_path: Path) -> None:
    def work(number: int) -> int:
        if number == 2:
            raise ZeroDivisionError
        return number

    said: list[str] = []
    place = tmp_path / "memory"
    with pytest.raises(ZeroDivisionError):
        run(tasks_of(work, 1, 2, 3), Memory(place), 1, said.append)
    assert said == ["task 2: failed"]
    assert "key 1" in Memory(place)
    assert "key 3" not in Memory(place)


@pytest.mark.parametrize(
    "rest", ['{"key": "key 2", "resu', "\x00", "[1]\n", '{"result": 1}\n', "null\n", '{"key": 1}\n']
)
def test_what_is_no_line_of_ours_is_passed_over(tmp_path: Path, rest: str) -> None:
    place = tmp_path / "memory"
    Memory(place).add("key 1", [1, "a"])
    with open(place, "a") as file:
        file.write(rest)
    memory = Memory(place)
    assert memory["key 1"] == [1, "a"]
    assert "key 2" not in memory
    memory.add("key 2", None)  # not on the end of half a line
    assert "key 2" in Memory(place)
    assert Memory(place)["key 1"] == [1, "a"]


def test_a_cache_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cache-not-writable"):
        Memory(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cache-not-writable"):
        Memory(tmp_path / "file" / "memory").add("key", 1)


def ran(folder: Path) -> dict[str, list[int]]:
    """The processes that each task was begun in."""
    return {p.name: [int(n) for n in p.read_text().split()] for p in folder.glob("ran-*")}


def script(folder: Path, jobs: int) -> subprocess.Popen[str]:
    program = folder / "program.py"
    program.write_text(SCRIPT)
    command = [sys.executable, program, folder, str(jobs)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_killed_run_resumes(tmp_path: Path, jobs: int) -> None:
    with script(tmp_path, jobs) as killed:
        while len(ran(tmp_path)) < 6:
            assert killed.poll() is None
            time.sleep(0.02)
        killed.send_signal(signal.SIGKILL)
    place = tmp_path / "memory"
    done = sum(f"key {n}" in Memory(place) for n in range(ALL))
    assert 0 < done < ALL
    workers = {number for numbers in ran(tmp_path).values() for number in numbers}
    with script(tmp_path, jobs) as resumed:
        out, _ = resumed.communicate()
    assert resumed.returncode == 0
    memory = Memory(place)
    assert [memory[f"key {n}"] for n in range(ALL)] == [n * n for n in range(ALL)]
    twice = [name for name, numbers in ran(tmp_path).items() if len(numbers) > 1]
    assert len(twice) <= 2 * jobs, "more was done again than was under way"
    assert out.splitlines()[-1].startswith(f"{ALL - done} of {ALL - done}: ")
    assert not any(alive(number) for number in workers), "processes of the killed run are left"


def alive(number: int) -> bool:
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{number}/stat")  # a zombie waits for its parent, and does nothing
    return not (stat.is_file() and stat.read_text().rpartition(")")[2].split()[0] == "Z")


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_run_whose_reader_has_gone_ends(tmp_path: Path, jobs: int) -> None:
    """As behind `| head`: no process may wait for ever, what was done stays."""
    program = tmp_path / "program.py"
    program.write_text(SCRIPT.replace("jobs, print)", "jobs, lambda line: 1 / 0)"))
    text = program.read_text().replace("import os, sys, time", "import os, sys, time\n" + TELL_ALL)
    program.write_text(text)
    command = [sys.executable, program, tmp_path, str(jobs)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert "ZeroDivisionError" in done.stderr
    memory = Memory(tmp_path / "memory")
    # The first line breaks it off. In processes any of those under way may be done first.
    begun = 1 if jobs == 1 else 2 * jobs
    assert [n for n in range(ALL) if f"key {n}" in memory] in [[n] for n in range(begun)]
