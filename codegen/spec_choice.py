"""Which variants.yaml a command works with, and what to say of it where no one gave it."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from .errors import DriftError, Problem, SpecError, unreadable, usage
from .fetch import is_there
from .sglang.find import FoundTarget
from .spec import FILE_NAME, Spec, load_spec, shipped_spec, spec_above

#: Refusals that another variants.yaml could make go away: of places, of a fork's own names.
_DEPENDS = ("anchor-", "not-sglang", "name-taken")


@dataclass(frozen=True)
class SpecChoice:
    """A variants.yaml. `how` it was found, in a few words; empty where it was given."""

    path: Path
    how: str = ""

    @property
    def told(self) -> str:
        """For the facts of a report, which has no need of where one was looked for in vain."""
        how = self.how.partition(", as none")[0]
        return f"{self.path} ({how})" if how else str(self.path)

    def load(self) -> Spec:
        """Read it. Raises SpecError with all that is wrong, UsageError where none can be read."""
        if not (is_there(self.path) and self.path.exists()):
            raise usage(
                "no such file",
                path=str(self.path),
                code="missing",
                hint="give a variants.yaml; commands with --spec take mlagen's own without it",
            )
        if self.path.is_dir():
            raise usage(
                "a folder, not a variants.yaml",
                path=str(self.path),
                code="not-a-file",
                hint=f"give the file, such as {self.path / FILE_NAME}",
            )
        if not os.access(self.path, os.R_OK):
            raise unreadable(self.path, PermissionError(errno.EACCES, os.strerror(errno.EACCES)))
        try:
            return load_spec(self.path)
        except SpecError as error:
            raise SpecError(*error.problems, *self._remark()) from None

    @contextmanager
    def named(self) -> Iterator[None]:
        """Refusals that come of what the spec says also say which one was used, and why that."""
        try:
            yield
        except DriftError as error:
            if not any(problem.code.startswith(_DEPENDS) for problem in error.problems):
                raise
            raise DriftError(*error.problems, *self._remark()) from None

    def _remark(self) -> tuple[Problem, ...]:
        """Of one that no one gave: whoever meant another has to see which it was."""
        if not self.how:
            return ()
        own = self.path == shipped_spec()
        return (
            Problem(
                FILE_NAME if own else str(self.path),
                0,
                0,
                "spec-used",
                f"note: the one that was used: {self.how}",
                "for a fork put a copy of it beside the fork, or give --spec" if own else "",
            ),
        )


def choose_spec(given: Path | None, found: FoundTarget | None = None) -> SpecChoice:
    """The variants.yaml given; else the nearest above the file that PATH means, where a fork has
    its own; else the nearest above the working directory; else the one that mlagen ships."""
    if given is not None:
        return SpecChoice(given)
    looked = []
    if found is not None and found.file is not None:
        looked.append(found.label)
        for place in (found.file.path, found.file.resolved):
            if near := spec_above(place):
                return SpecChoice(near, f"the nearest above {found.label}")
    looked.append("the working directory")
    if near := spec_above(Path.cwd()):
        return SpecChoice(near, "the nearest above the working directory")
    return SpecChoice(shipped_spec(), f"mlagen's own, as none is above {' or '.join(looked)}")
