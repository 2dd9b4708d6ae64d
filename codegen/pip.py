"""pip, run as a program: the one way by which anything comes from a package registry."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

#: What pip logs of an index page: that it has it, or why not (pip/_internal/index/collector.py).
_ANSWERED = re.compile(r"Fetched page ")
_FAILED = re.compile(r"Could not fetch URL (\S+): (.+?)(?: - skipping)?$", re.MULTILINE)
#: What it writes before it tries again; a later pip may word its log otherwise.
_RETRIED = re.compile(r"Retrying \(.+?\) after connection broken by '(.+)': /", re.MULTILINE)
_CAUSE = re.compile(r"\(Caused by (.+)\)\Z")
_OBJECT = re.compile(r"<[\w.]+ object at 0x[0-9a-f]+>(?:: |, )?")
_CREDENTIALS = re.compile(r"(?<=://)[^/@\s]+@")


@dataclass(frozen=True)
class PipRun:
    """What a run of pip gave.

    Attributes:
        status: its exit status.
        output: what it wrote, to either stream, without the credentials in any URL.
        unreachable: why no index answered; None where one did, or pip asked none. pip itself ends
            with "No matching distribution found" then.
    """

    status: int
    output: str
    unreachable: str | None

    def why(self, nothing: str) -> str:
        """What went wrong, in a few words; `nothing` where pip wrote none."""
        if self.unreachable is not None:
            return f"the index could not be reached: {self.unreachable}"
        lines = [line.strip() for line in self.output.splitlines() if line.strip()]
        lines = [line for line in lines if not line.startswith(("[notice]", "WARNING:"))]
        return lines[-1].removeprefix("ERROR: ") if lines else nothing


def run_pip(*words: str, folder: Path, **environment: str) -> PipRun:
    """Run pip with these words in `folder`. Asks nothing. `environment`: variables beside the
    user's.

    `-m` puts the working folder first on the path of imports: `folder` is never the user's.
    """
    with tempfile.TemporaryDirectory(prefix="mlagen-pip-") as temporary:
        log = Path(temporary, "log.txt")
        done = subprocess.run(
            [sys.executable, "-m", "pip", *words, "--log", str(log)],
            cwd=folder,
            env={**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1", **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
            check=False,
        )
        logged = log.read_text("utf-8", errors="replace") if log.is_file() else ""
    output = _CREDENTIALS.sub("", done.stdout)
    return PipRun(done.returncode, output, why_unreachable(output, logged))


def why_unreachable(output: str, log: str) -> str | None:
    """Why no index answered, by what pip wrote and logged; None where one did, or none was asked.

    An index that answers 404 is there, and has no such project.
    """
    if _ANSWERED.search(log):
        return None
    failed = [
        f"{_host(url)}: {_plain(why)}"
        for url, why in _FAILED.findall(log)
        if not why.startswith("404 ")
    ]
    if not failed and "Could not fetch URL" not in log:
        failed = [_plain(why) for why in _RETRIED.findall(output)]
    return failed[-1] if failed else None


def _host(url: str) -> str:
    """The part of a URL that can be shown: no credentials, and nothing that may be a token."""
    return urlsplit(url).netloc.rpartition("@")[2] or url


def _plain(why: str) -> str:
    """A cause without Python's wrapping, and without a URL's credentials."""
    if cause := _CAUSE.search(why):
        why = cause[1]
    why = re.sub(r" for url: \S+", "", _OBJECT.sub("", why))
    return _CREDENTIALS.sub("", why)
