"""Where the host waits for the GPU in a `flashinfer_mla_backend.py`: data for `inspect`.

Told line by line, from each call alone, whether a step leads there or not; `paths.py` follows the
steps, and knows what is on the device.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import Literal

from .fit import is_stock_plan
from .plans import HandPlan, find_plans
from .roles import is_host
from .source import Source, dotted, is_true, keyword, words

Kind = Literal["item", "cpu", "tolist", "to-cpu", "device-slice", "stock-plan"]
Path = Literal["init", "capture", "replay", "eager", "unknown"]

_PLAN_WAITS = "3 waits up to FlashInfer 0.6.18, about 10 from 0.7.1 on"
#: How the method that holds a wait is reached, by a fragment of its name.
_PATHS: tuple[tuple[str, Path], ...] = (
    ("__init__", "init"),
    ("init_cuda_graph_state", "init"),
    ("capture_cuda_graph", "capture"),
    ("replay_cuda_graph", "replay"),
    ("_apply_cuda_graph_metadata", "replay"),
    ("init_forward_metadata_out_graph", "replay"),
    ("init_forward_metadata", "eager"),
)


@dataclass(frozen=True)
class HostSync:
    """One place where the host waits for the device.

    Attributes:
        line: from 1.
        where: `Class.method`.
        expression: source text of the waiting call or slice.
        kind: what waits.
        path: when it runs: at start-up, at graph capture, at graph replay, in an eager step.
        note: what else is known, such as how often a stock plan waits.
    """

    line: int
    where: str
    expression: str
    kind: Kind
    path: Path
    note: str


def find_syncs(source: Source) -> tuple[HostSync, ...]:
    """All waits, in the order of the file. Those in what mlagen wrote are listed too, and say
    so (at capture, and where host lengths are absent); its `.tolist()` are of host arrays."""
    plans = find_plans(source)
    inside_plans = {id(node) for plan in plans for node in ast.walk(plan.node)}
    found: list[HostSync] = []
    for call in source.calls:
        if id(call) in inside_plans:
            continue
        if is_stock_plan(call):
            found.extend(_stock_plan(source, call, plans))
        else:
            kind = _kind(call)
            if kind is not None and not (kind == "tolist" and source.ours(call)):
                path, note = _path(source, call)
                found.append(_sync(source, call, kind, path, note))
    for node in source.subscripts:
        if _sliced_by_device(node):
            path, note = _path(source, node)
            found.append(_sync(source, node, "device-slice", path, note))
    return tuple(sorted(found, key=lambda sync: (sync.line, sync.expression)))


def _sync(source: Source, node: ast.expr, kind: Kind, path: Path, note: str) -> HostSync:
    shown = node.func if isinstance(node, ast.Call) and kind == "stock-plan" else node
    try:
        text = ast.unparse(shown)
    except RecursionError:  # an expression as deep as the parser just takes
        text = "..."
    text += "" if shown is node else "(...)"
    if source.ours(node):
        note = "; ".join(part for part in ("written by mlagen", note) if part)
    return HostSync(source.line(node), source.where(node), text, kind, path, note)


def _kind(call: ast.Call) -> Kind | None:
    if not isinstance(call.func, ast.Attribute):
        return None
    name = call.func.attr
    if name == "item" and not call.args:
        return "item"
    if name == "tolist" and not _on_host(call.func.value):
        return "tolist"
    if name == "cpu" and not call.args and not _on_host(call.func.value):
        return "cpu"
    if name == "to" and not is_true(keyword(call, "non_blocking")):
        targets = [*call.args[:1], keyword(call, "device")]
        if any(isinstance(target, ast.Constant) and target.value == "cpu" for target in targets):
            return "to-cpu"
    return None


def _on_host(node: ast.expr) -> bool:
    return is_host((dotted(node) or "").rsplit(".", 1)[-1])


def _sliced_by_device(node: ast.Subscript) -> bool:
    """`x[: indptr[-1]]`: the bound is an element of a device array, read to slice by it."""
    bounds: list[ast.expr] = []
    selected = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    for index in selected:
        if isinstance(index, ast.Slice):
            bounds.extend(bound for bound in (index.lower, index.upper, index.step) if bound)
    for bound in bounds:
        for part in ast.walk(bound):
            if isinstance(part, ast.Subscript) and not isinstance(part.slice, ast.Slice):
                name = (dotted(part.value) or "").rsplit(".", 1)[-1]
                if ("indptr" in name or "lens" in name) and not is_host(name):
                    return True
    return False


def _path(source: Source, node: ast.AST) -> tuple[Path, str]:
    name = source.where(node)
    tested = [words(test) for test in source.tests(node)]
    if any("in_capture" in test for test in tested):
        return "capture", ""
    modes = ", ".join(sorted(source.modes(node)))
    for fragment, path in _PATHS:
        if fragment in name:
            return path, modes
    if any("use_ragged" in test for test in tested):
        return "eager", "prefill without a prefix"
    replay = [
        arm for test, arm in source.arms(node).items() if "init_metadata_replay" in words(test.test)
    ]
    if replay:
        return "eager", "decode; capture too"
    if "IndicesUpdater" in name or "ChunkKVRunner" in name:
        return "eager", modes
    return "unknown", modes


def _stock_plan(source: Source, call: ast.Call, plans: tuple[HandPlan, ...]) -> list[HostSync]:
    """The waits of one `wrapper.plan(...)`; none where a plan from host arrays answers it."""
    if any(is_host(part.arg or "") for part in call.keywords):
        return []
    given = set().union(*(words(argument) for argument in call.args[:4]), set())
    constants = {
        part.value
        for argument in call.args[:4]
        for part in ast.walk(argument)
        if isinstance(part, ast.Constant)
    }
    if any(is_host(str(key)) for key in constants):
        return []  # replay: answered by the fast plan that was put on the wrapper
    path, note = _path(source, call)
    notes = [note, _PLAN_WAITS]
    function = source.function(call)
    if function is not None and source.region_within(function):
        notes.append("only what mlagen's plans do not serve")
    if "Prefill" in source.where(call):
        notes[0] = "verify, draft-extend, prefill with a prefix"
        verify = any(
            "verify" in source.modes(install.node) for plan in plans for install in plan.installs
        )
        if not verify:
            notes[0] += "; replay of verify too"
        from_host = any(
            is_host(name)
            for word in given
            for definition in source.definitions(word, function, call)
            for name in words(definition.value)
        )
        if from_host:
            notes.append("where host arrays are handed on: none up to 0.7.2, 2 in 0.7.4")
    return [_sync(source, call, "stock-plan", path, "; ".join(part for part in notes if part))]
