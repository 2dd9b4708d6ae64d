"""SGLang's own host arrays (0.5.18 on), recognised so that they can give way to ours."""

from __future__ import annotations

import libcst as cst

from ..backend import CallSite
from ..edits import Edit
from ..nodes import alone, assigned, is_name, self_attribute, walk, words
from ..source import Refused, Source
from . import REQUEST

ARRAY_NAMES = frozenset({"qo_indptr_cpu", "kv_indptr_cpu", "kv_len_arr_cpu"})

#: Names that SGLang's own array work is made of. A statement with any other name in it does
#: something else as well, and must not be lost.
_CALCULATION = frozenset(
    {"torch", "arange", "cumsum", "to", "int32", "dtype", "dim", "self", "bs", "None"}
)
_LENGTHS = frozenset({"seq_lens_cpu", "kv_len_arr_cpu", "num_pages_per_req", "page_size", "ndt"})
_CHECKED = frozenset({"seq_lens_cpu", "spec_info", "None"})


def is_assertion(statement: cst.BaseStatement) -> bool:
    """`assert seq_lens_cpu is not None [and spec_info is not None]`, alone on its line."""
    small = alone(statement)
    return (
        isinstance(small, cst.Assert)
        and "seq_lens_cpu" in words(small.test)
        and words(small.test) <= _CHECKED
    )


def is_array_work(statement: cst.BaseStatement, keywords: str | None = None) -> bool:
    """One of the statements by which SGLang makes host arrays, in one release or another.

    `kv_len_arr_cpu = seq_lens_cpu[...]`, the same with pages; `self.<buffer>[...] = ...` of such
    values; sharding under context parallelism; the update of the dictionary `keywords` that
    is passed on. Only reading, slicing, adding and summing: nothing that has another effect.
    """
    made = assigned(statement)
    if made is not None:
        targets, value = made
        if len(targets) != 1:
            return False
        target = targets[0]
        if isinstance(target, cst.Name):
            named = target.value in ("kv_len_arr_cpu", "num_pages_per_req")
            return named and words(value) <= _CALCULATION | _LENGTHS
        buffer = self_attribute(target.value) if isinstance(target, cst.Subscript) else None
        if buffer is None or not buffer.endswith("_cpu"):
            return False
        buffers = {name for name in words(value) if name.endswith("_cpu")}
        return words(value) - buffers <= _CALCULATION | _LENGTHS
    small = alone(statement)
    if not isinstance(small, cst.Expr) or not isinstance(small.value, cst.Call):
        return False
    call = small.value
    if is_name(call.func, "update_local_kv_lens_for_dcp"):
        return words(call) == {"update_local_kv_lens_for_dcp", "kv_len_arr_cpu"}
    return (
        keywords is not None
        and isinstance(call.func, cst.Attribute)
        and call.func.attr.value == "update"
        and self_attribute(call.func.value) == keywords
        and len(call.args) == 1
        and isinstance(call.args[0].value, cst.Dict)
        and not any(isinstance(node, cst.Call) for node in walk(call.args[0].value))
    )


def names_window(statement: cst.BaseStatement) -> bool:
    """`ndt = spec_info.<tokens a request>`, alone on its line."""
    made = assigned(statement)
    if made is None or len(made[0]) != 1 or not is_name(made[0][0], "ndt"):
        return False
    return isinstance(made[1], cst.Attribute) and is_name(made[1].value, "spec_info")


def refuse_statement(source: Source, statement: cst.BaseStatement, where: str) -> Refused:
    """The refusal for a statement that would be lost with SGLang's own."""
    return Refused(
        "anchor-changed",
        f"a statement {where} is not one of SGLang's own: "
        f"{source.text(source.first(statement)).strip()}",
        source.first(statement),
        "it would be lost; move it, or patch this site by hand",
    )


def replace_arguments(source: Source, site_name: str, site: CallSite) -> Edit:
    """Replace the three `*_cpu=` arguments of a call, whole lines side by side, by the request."""
    args = [a for a in site.call.args if a.keyword is not None and a.keyword.value in ARRAY_NAMES]
    if len(args) != len(ARRAY_NAMES):
        raise Refused(
            "anchor-changed",
            f"expected the arguments {', '.join(sorted(ARRAY_NAMES))}, found "
            f"{', '.join(a.keyword.value for a in args if a.keyword) or 'none of them'}",
            source.first(site.statement),
        )
    start, end = source.first(args[0]), source.last(args[-1])
    keywords = [a.keyword.value for a in site.call.args if a.keyword is not None]
    places = [keywords.index(a.keyword.value) for a in args if a.keyword is not None]
    alone = all(
        source.text(source.first(a)).strip().startswith(f"{a.keyword.value}=")
        for a in args
        if a.keyword is not None
    )
    if places != list(range(places[0], places[0] + len(places))) or not alone:
        raise Refused(
            "anchor-changed",
            "the arguments of SGLang's own host arrays do not stand on lines side by side",
            start,
        )
    return Edit(site_name, start, source.indent(start), (f"{REQUEST}={REQUEST},",), end - start + 1)
