"""What every judgement is given, and how it says what it found."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass

from ..errors import Problem
from ..flashinfer.api import PlanApi
from .lengths import HostLengths
from .plans import HandPlan
from .source import Source, words

#: How a finding begins that does not make a file wrong: harmless here, or in what no plan of
#: this file can mend.
NOTE = "note: "


@dataclass(frozen=True)
class Case:
    """One file and the FlashInfer it is held against (None: unknown)."""

    source: Source
    api: PlanApi | None
    plans: tuple[HandPlan, ...]
    lengths: tuple[HostLengths, ...]

    def problem(self, node: ast.AST, code: str, message: str, hint: str = "") -> Problem:
        """A finding at `node`."""
        return Problem(self.source.path, self.source.line(node), 0, code, message, hint)

    def note(self, node: ast.AST, code: str, message: str, hint: str = "") -> Problem:
        """A finding at `node` that does not make the file wrong."""
        return self.problem(node, code, NOTE + message, hint)

    def mentions(self, *names: str) -> bool:
        """Whether a line that mlagen did not write uses one of `names` as an attribute."""
        return any(
            node.attr in names and not self.source.ours(node) for node in self.source.attributes
        )


def tells_dflash_apart(tests: Iterable[ast.expr]) -> bool:
    """Whether one of `tests` looks at the kind of the speculative input, or at its layout."""
    return any(
        name == "spec_input_type" or "dflash" in name.lower() or "ragged_verify" in name
        for test in tests
        for name in words(test)
    )


def flashinfer_name(api: PlanApi) -> str:
    """`FlashInfer 0.6.17`, or the releases of its shape where the source does not say."""
    return f"FlashInfer {api.version or 'of ' + api.era.value}"
