"""What can go wrong, as types. Each carries the exit code that the command line gives."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong, and where.

    `path:line:column` is where it stands (line and column from 1; 0: unknown), `code` a
    stable kebab-case name, `message` what was found, `hint` what to do about it.
    """

    path: str
    line: int
    column: int
    code: str
    message: str
    hint: str = ""

    def __str__(self) -> str:
        place = self.path
        if self.line:
            place += f":{self.line}"
            if self.column:
                place += f":{self.column}"
        text = f"{place}: {self.code}: {self.message}"
        return f"{text}\n    hint: {self.hint}" if self.hint else text


class MlagenError(Exception):
    """The root of all errors that are told to the user without a traceback."""

    exit_code = 2

    def __init__(self, *problems: Problem) -> None:
        super().__init__("\n".join(str(problem) for problem in problems))
        self.problems = problems


class UsageError(MlagenError):
    """The call cannot be served: a path that is not there, a file that cannot be written."""

    exit_code = 2


class SpecError(MlagenError):
    """variants.yaml is invalid. Carries every error of the run, in the order of the file."""

    exit_code = 3


class DriftError(MlagenError):
    """The source read is not what mlagen knows: unknown shape, anchor missing or ambiguous,
    private call changed. Says what was expected and what stands there."""

    exit_code = 4


class EditedError(MlagenError):
    """Someone edited inside a region that mlagen manages. Shows both texts."""

    exit_code = 5


class GeneratedTestsFailed(MlagenError):
    """A generated GPU test failed, or their process did; nothing was published."""

    exit_code = 6


def usage(message: str, *, path: str = "mlagen", code: str = "usage", hint: str = "") -> UsageError:
    """A usage error about `path`."""
    return UsageError(Problem(path, 0, 0, code, message, hint))


def unreadable(path: os.PathLike[str] | str, error: OSError) -> UsageError:
    """A usage error about what the system does not let us read."""
    message = f"cannot be read: {error.strerror or error}"
    return usage(message, path=os.fspath(path), code="unreadable", hint=_who_may("read", error))


def refused_by_system(error: OSError) -> UsageError:
    """A usage error about what the system refused, where nobody nearer to it said so."""
    why = error.strerror or str(error)
    if error.filename is None and not _has_working_folder():
        return usage(
            f"the folder that mlagen runs in is gone, or may not be looked at: {why}",
            path=os.environ.get("PWD") or ".",
            code="no-folder",
            hint="run it in a folder that is there",
        )
    place = "mlagen" if error.filename is None else os.fsdecode(error.filename)
    message = f"cannot be read or written: {why}"
    return usage(message, path=place, code="system", hint=_who_may("use", error))


def _who_may(verb: str, error: OSError) -> str:
    refused = error.errno in (errno.EACCES, errno.EPERM)
    return f"run as a user who may {verb} it" if refused else ""


def _has_working_folder() -> bool:
    try:
        os.getcwd()
    except OSError:
        return False
    return True
