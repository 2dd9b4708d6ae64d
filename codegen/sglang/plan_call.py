"""The `wrapper.plan(...)` call at the end of an updater, read as the arguments it passes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import libcst as cst

from .nodes import branches, calls_of, contains
from .source import Refused, Source

#: Positions of `BatchMLAPagedAttentionWrapper.plan`'s parameters, the same since 0.2.1.
PARAMETERS = (
    "qo_indptr",
    "kv_indptr",
    "kv_indices",
    "kv_len_arr",
    "num_heads",
    "head_dim_ckv",
    "head_dim_kpe",
    "page_size",
    "causal",
    "sm_scale",
    "q_data_type",
    "kv_data_type",
)


@dataclass(frozen=True)
class PlanCall:
    """One call. `statement` is the outermost statement of the function that holds only it
    (the `if` that chooses between two plans, or the call itself); `arguments` are source
    texts by parameter."""

    statement: cst.BaseStatement
    arguments: Mapping[str, str]
    block: Sequence[cst.BaseStatement]
    line: int


def find_plan_call(source: Source, function: cst.FunctionDef, receiver: str) -> PlanCall:
    """The stock `<receiver>.plan(...)` that ends `function`.

    Refused where there is none, where the arguments are not FlashInfer's, or where
    something follows it: an early return in front of it would skip that.
    """
    calls = calls_of(function.body, "plan", receiver)
    if not calls:
        raise Refused(
            "anchor-missing",
            f"looked for {receiver}.plan(...) in {function.name.value}, found none",
            source.first(function),
        )
    block, statement = _last_block(source, function.body, calls)
    if statement is not block[-1]:
        raise Refused(
            "anchor-changed",
            f"statements follow {receiver}.plan(...) in {function.name.value}; a plan that "
            "returns in front of it would skip them",
            source.first(block[-1]),
        )
    if not isinstance(statement, (cst.If, cst.SimpleStatementLine)):
        raise Refused(
            "anchor-changed",
            f"{receiver}.plan(...) stands inside a compound statement that does more than choose",
            source.first(statement),
        )
    stock = min(calls, key=source.first)
    return PlanCall(statement, _arguments(source, stock), block, source.first(stock))


def _last_block(
    source: Source, body: cst.BaseSuite, calls: Sequence[cst.Call]
) -> tuple[Sequence[cst.BaseStatement], cst.BaseStatement]:
    """Descend to the block that holds all of `calls` and return it with their statement.

    An `if` whose branches all end in one of the calls counts as that statement. The bodies of
    `with` and `try` are entered: a return inside them leaves them as it should.
    """
    block = _lines_of(source, body)
    while True:
        statement = [s for s in block if any(contains(s, call) for call in calls)][-1]
        inner = _only_body_with(statement, calls)
        if inner is None or block[-1] is not statement:
            return block, statement
        block = _lines_of(source, inner)


def _only_body_with(
    statement: cst.BaseStatement, calls: Sequence[cst.Call]
) -> cst.BaseSuite | None:
    """The one body of a compound statement that holds all of `calls`; None where there is
    no such body, or leaving it early would skip more than what follows the calls."""
    if isinstance(statement, cst.With):
        return statement.body
    if isinstance(statement, cst.Try):
        inside = all(contains(statement.body, call) for call in calls)
        return statement.body if inside and statement.orelse is None else None
    if not isinstance(statement, cst.If):
        return None
    with_calls = [
        body for _, body in branches(statement) if any(contains(body, call) for call in calls)
    ]
    return with_calls[0] if len(with_calls) == 1 else None


def _lines_of(source: Source, body: cst.BaseSuite) -> Sequence[cst.BaseStatement]:
    if not isinstance(body, cst.IndentedBlock):
        raise Refused(
            "anchor-changed",
            "the plan call does not stand on a line of its own",
            source.first(body),
        )
    return body.body


def _arguments(source: Source, call: cst.Call) -> dict[str, str]:
    arguments: dict[str, str] = {}
    for index, arg in enumerate(call.args):
        if arg.star or (arg.keyword is None and index >= len(PARAMETERS)):
            raise Refused(
                "anchor-changed",
                f"plan is called with {source.code(arg)}; expected " + ", ".join(PARAMETERS),
                source.first(call),
            )
        name = arg.keyword.value if arg.keyword is not None else PARAMETERS[index]
        arguments[name.removesuffix("_cpu")] = source.code(arg.value)
    missing = [name for name in PARAMETERS if name not in arguments]
    extra = [name for name in arguments if name not in PARAMETERS]
    if missing or extra:
        raise Refused(
            "anchor-changed",
            f"plan is called without {', '.join(missing) or 'nothing missing'} and with "
            f"{', '.join(extra) or 'nothing more'}",
            source.first(call),
        )
    return arguments
