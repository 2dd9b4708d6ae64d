"""What can go wrong, as types. Each carries the exit code that the command line gives."""

from __future__ import annotations

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
