"""How long `patch --diff` and `check` take next to parsing the file alone, and their memory.

    python tests/benchmark_speed.py [--gate] [--runs 5]

The file is SGLang 0.5.23's, the FlashInfer 0.7.2, both fetched before the clock starts. Every
time is that of a whole process, start of Python and imports included; the three commands take
turns, so that a slow moment of the machine hits all of them. Exit code 0, with --gate 1 where a
bar is not met.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from mlagen.codegen.fetch import WheelTree, fetch

SGLANG, FLASHINFER = "0.5.23", "0.7.2"
MEMBER = "sglang/srt/layers/attention/flashinfer_mla_backend.py"
BASELINE = "import sys, libcst; libcst.parse_module(open(sys.argv[1], 'rb').read())"
MEMORY_BAR = 300.0


@dataclass
class Command:
    """One command with its measurements. `bar` is how many times the baseline it may take;
    `exit_codes` are those of a run that did its work."""

    name: str
    line: list[str]
    exit_codes: tuple[int, ...]
    bar: float | None = None
    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    megabytes: list[float] = field(default_factory=list)

    def run(self) -> None:
        """Run once and note wall seconds, CPU seconds and peak resident megabytes."""
        with tempfile.TemporaryFile() as errors:
            start = time.perf_counter()
            process = subprocess.Popen(self.line, stdout=subprocess.DEVNULL, stderr=errors)
            _, status, usage = os.wait4(process.pid, 0)
            wall = time.perf_counter() - start
            process.returncode = os.waitstatus_to_exitcode(status)
            if process.returncode not in self.exit_codes:
                errors.seek(0)
                text = errors.read().decode(errors="replace")
                sys.exit(f"{self.name}: exit code {process.returncode}\n{text}")
        self.wall.append(wall)
        self.cpu.append(usage.ru_utime + usage.ru_stime)
        # Kilobytes on Linux, bytes on macOS.
        self.megabytes.append(usage.ru_maxrss / (1024**2 if sys.platform == "darwin" else 1024))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--gate", action="store_true", help="exit 1 where a bar is not met")
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()

    data = WheelTree(fetch(f"sglang=={SGLANG}")).read(MEMBER)
    assert data is not None
    fetch(f"flashinfer-python=={FLASHINFER}")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "flashinfer_mla_backend.py"
        file.write_bytes(data)
        mlagen = [sys.executable, "-m", "mlagen"]
        target = [str(file), "--flashinfer", FLASHINFER]
        commands = [
            Command("import libcst and parse", [sys.executable, "-c", BASELINE, str(file)], (0,)),
            Command("mlagen patch --diff", [*mlagen, "patch", *target, "--diff"], (1,), 5.0),
            Command("mlagen check", [*mlagen, "check", *target], (0, 1), 4.0),
        ]
        for command in commands:  # byte code and file cache
            command.run()
            command.wall.clear(), command.cpu.clear(), command.megabytes.clear()
        for _ in range(options.runs):
            for command in commands:
                command.run()

    print(
        f"SGLang {SGLANG} ({len(data.splitlines())} lines), FlashInfer {FLASHINFER}, "
        f"Python {sys.version.split()[0]}, median of {options.runs}"
    )
    print(f"{'':<24}{'wall':>8}{'ratio':>7}{'bar':>6}{'':>10}{'CPU':>8}{'ratio':>7}{'peak':>9}")
    base = commands[0]
    met = True
    for command in commands:
        wall, cpu = statistics.median(command.wall), statistics.median(command.cpu)
        ratio = wall / statistics.median(base.wall)
        verdict = ""
        if command.bar is not None:
            fast = ratio <= command.bar
            met = met and fast
            verdict = "met" if fast else "NOT met"
        print(
            f"{command.name:<24}{wall:>7.2f}s{ratio:>6.1f}x"
            f"{f'{command.bar:g}x' if command.bar else '':>6}{verdict:>10}"
            f"{cpu:>7.2f}s{cpu / statistics.median(base.cpu):>6.1f}x"
            f"{max(command.megabytes):>6.0f} MB"
        )
    peak = max(max(command.megabytes) for command in commands[1:])
    small = peak < MEMORY_BAR
    met = met and small
    print(f"peak memory {peak:.0f} MB, bar {MEMORY_BAR:.0f} MB: {'met' if small else 'NOT met'}")
    return 1 if options.gate and not met else 0


if __name__ == "__main__":
    sys.exit(main())
