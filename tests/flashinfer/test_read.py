"""Eras without wheels, and FlashInfers that have drifted: miniatures, with the exact texts."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from mlagen.codegen.errors import DriftError
from mlagen.codegen.flashinfer.api import Era, PlanApi
from mlagen.codegen.flashinfer.read import explain, read_plan_api
from mlagen.codegen.flashinfer.syntax import HINT
from tests.flashinfer.miniatures import (
    BACKEND_PLANNING,
    JIT,
    NINE,
    PLANNING,
    STAGING_JIT,
    STREAM,
    STREAM_PLANNING,
    TORCH_OP_PLANNING,
    Files,
    backend_era,
    call,
    source,
    wrapper_era,
)

STAGED = "plan_with_staged_workspace_bytes"
EXPECTED = (
    f"expected self._cached_module.plan or self._cached_module.plan.default({', '.join(NINE)})"
)


def read(files: Files) -> PlanApi:
    return read_plan_api(source(files))


def refusal(files: Files) -> str:
    """What the refusal says first, without the hint that all share; test_nearest.py has the
    comparison with the nearest era."""
    with pytest.raises(DriftError) as caught:
        read(files)
    assert caught.value.exit_code == 4
    message, hint = str(caught.value.problems[0]).rsplit("\n    hint: ", 1)
    assert hint == HINT
    return message


def test_stream_era() -> None:
    api = read(wrapper_era(STREAM_PLANNING))
    assert api.era is Era.STREAM
    assert api.call.takes_stream
    assert api.call.arguments == STREAM
    assert api.call.method == "plan"
    assert api.planner_copies
    assert dict(explain(api))["private call"].endswith(
        "causal, stream=get_cuda_stream(device)) -> plan_info at flashinfer/mla.py:26"
    )


def test_torch_op_era() -> None:
    api = read(wrapper_era(TORCH_OP_PLANNING))
    assert api.era is Era.TORCH_OP
    assert api.call.method == "plan.default"
    assert api.call.returns == "plan_info"
    assert not api.call.takes_stream


@pytest.mark.parametrize(
    ("path", "era"),
    [
        ("flashinfer/mla.py", Era.TVM_FFI),
        ("flashinfer/mla/_core.py", Era.MLA_PACKAGE),
        ("flashinfer/mla/_new/_place.py", Era.MLA_PACKAGE),
    ],
)
def test_the_class_is_followed_to_where_it_moved(path: str, era: Era) -> None:
    api = read(wrapper_era(path=path))
    assert api.era is era
    assert api.place.path == path
    assert api.planner_copies
    assert [item.name for item in api.run_state] == [
        "_kv_indices_buf",
        "_causal",
        "_page_size",
        "_sm_scale",
        "_plan_info",
    ]


def test_backend_era() -> None:
    api = read(backend_era())
    assert api.era is Era.BACKEND_OBJECT
    assert api.holder == "planned_backend"
    assert api.call.method == STAGED
    assert api.call.returns == "plan_info_and_bytes"
    assert api.call.place.path == "flashinfer/mla/_batch/_fa.py"
    assert [item.name for item in api.run_state] == ["_kv_indices_buf", "_causal", "_plan_info"]
    assert [item.name for item in api.wrapper_state] == ["_planned_backend", "_q_data_type"]
    assert not api.planner_copies
    assert api.plan_parameters == ("metadata", "num_heads", "causal", "q_data_type")


def elsewhere(**init: str) -> Files:
    """A FlashInfer whose class has left `flashinfer.mla`, with the given lines in the modules that
    export it."""
    files = wrapper_era(path="flashinfer/attention/mla_wrapper.py")
    files["flashinfer/__init__.py"] = init.get("top", "")
    files["flashinfer/mla/__init__.py"] = init.get("mla", "")
    return files


NAME = "BatchMLAPagedAttentionWrapper"


@pytest.mark.parametrize(
    "init",
    [
        {"mla": f"from flashinfer.attention.mla_wrapper import {NAME}\n"},
        {"mla": "from ..attention.mla_wrapper import *\n"},
        {"top": f"from .attention.mla_wrapper import {NAME} as {NAME}\n"},
        {"mla": f"try:\n    from ..attention.mla_wrapper import {NAME}\nexcept ImportError: ...\n"},
        {"mla": f"def __getattr__(n):\n    from ..attention.mla_wrapper import {NAME}\n"},
        {"mla": f"from ..attention.mla_wrapper import {NAME} as Base\n{NAME} = Base\n"},
        {"mla": f"from .gone import {NAME}\nfrom ..attention.mla_wrapper import {NAME}\n"},
        {
            "mla": f"from ..attention.mla_wrapper import {NAME} as Base\n"
            f"class {NAME}(Base):\n    pass\n"
        },
        {
            "mla": f"from ..attention.mla_wrapper import {NAME} as Base\n"
            f"class {NAME}(Base):\n    def plan(self, *a, **k):\n        super().plan(*a, **k)\n"
        },
        {
            "mla": f"from ..attention.mla_wrapper import {NAME} as Base\n"
            f"class {NAME}(Base):\n"
            "    def plan(self, *a, **k):\n        super().plan(*a, **k)\n"
            "    def run(self, *a, **k):\n        return super().run(*a, **k)\n"
        },
    ],
)
def test_re_exports_are_followed(init: dict[str, str]) -> None:
    api = read(elsewhere(**init))
    assert api.call.arguments == NINE
    assert api.call.place.path == "flashinfer/attention/mla_wrapper.py"
    assert api.era is Era.MLA_PACKAGE


def test_exports_that_go_in_a_circle_end() -> None:
    files = elsewhere(mla="from .a import *\n")
    files["flashinfer/mla/a.py"] = "from . import *\nfrom .a import *\n"
    assert "class-missing" in refusal(files)


def test_vanished_class() -> None:
    files = wrapper_era()
    files["flashinfer/mla.py"] = files["flashinfer/mla.py"].replace(NAME, "BatchMLAPagedWrapper")
    assert refusal(files) == (
        "flashinfer/mla.py: class-missing: flashinfer-python 9.9: class "
        "BatchMLAPagedAttentionWrapper is not exported by flashinfer.mla or flashinfer; looked in "
        "flashinfer/mla.py, flashinfer/__init__.py; the nearest class there is "
        "BatchMLAPagedWrapper"
    )


def test_nothing_at_all() -> None:
    assert refusal({}) == (
        "flashinfer: class-missing: flashinfer-python 9.9: class BatchMLAPagedAttentionWrapper is "
        "not exported by flashinfer.mla or flashinfer"
    )


def test_class_defined_twice() -> None:
    files = wrapper_era()
    files["flashinfer/mla.py"] += f"\n\nif True:\n    class {NAME}:\n        pass\n"
    assert refusal(files) == (
        "flashinfer/mla.py:37: defined-twice: flashinfer-python 9.9: "
        "BatchMLAPagedAttentionWrapper is defined 2 times (lines 5, 37), expected once"
    )


@pytest.mark.parametrize("name", ["plan", "run"])
def test_method_gone(name: str) -> None:
    files = wrapper_era()
    files["flashinfer/mla.py"] = files["flashinfer/mla.py"].replace(f"def {name}(", "def other(")
    assert refusal(files) == (
        f"flashinfer/mla.py:5: method-missing: flashinfer-python 9.9: {NAME} has no method {name}"
    )


DRIFTED = {
    "one more": (
        call(*NINE[:7], "head_dim_kpe", *NINE[7:]),
        "the planner is called with 10 arguments, expected 9: head_dim_kpe is new (argument 8)",
    ),
    "one more, last": (
        call(*NINE, "page_size"),
        "the planner is called with 10 arguments, expected 9: page_size is new (argument 10)",
    ),
    "one more, by keyword": (
        call(*NINE, "window=0"),
        "the planner is called with 10 arguments, expected 9: window=0 is new (argument 10)",
    ),
    "one twice": (
        call(*NINE, "causal"),
        "the planner is called with 10 arguments, expected 9: one is given twice",
    ),
    "one fewer": (
        call(*NINE[:2], *NINE[3:]),
        "the planner is called with 8 arguments, expected 9: "
        "self._pin_memory_int_workspace_buffer is not there (argument 3)",
    ),
    "renamed": (
        call(*NINE[:5], "kv_lens_host", *NINE[6:]),
        "argument 6 of the planner is kv_lens_host, expected kv_len_arr_host",
    ),
    "by keyword": (
        call(*NINE[:8], "causal=causal"),
        "argument 9 of the planner is causal=causal, expected causal",
    ),
    "reordered": (
        call(*NINE[:3], NINE[4], NINE[3], *NINE[5:]),
        "the planner's arguments are in another order",
    ),
    "other receiver": (
        call(form="self._planner.plan"),
        "the planner is called as self._planner.plan, expected self._cached_module.plan or "
        "self._cached_module.plan.default",
    ),
    "other method": (
        call(form="self._cached_module.plan_v2"),
        "the planner is called as self._cached_module.plan_v2, expected self._cached_module.plan "
        "or self._cached_module.plan.default",
    ),
    "plain function": (
        call(form="plan_mla"),
        "the planner is called as plan_mla, expected self._cached_module.plan or "
        "self._cached_module.plan.default",
    ),
    "another stream": (
        call(*NINE, "torch.cuda.current_stream()"),
        "the planner is called with 10 arguments, expected 9: torch.cuda.current_stream() is new "
        "(argument 10)",
    ),
    "arguments that cannot be seen": (
        call("*self._arguments()"),
        "the planner is called with 1 arguments, expected 9: *self._arguments() is new "
        "(argument 1), "
        + ", ".join(f"{a} is not there (argument {n})" for n, a in enumerate(NINE, 1)),
    ),
}


@pytest.mark.parametrize("kind", DRIFTED)
def test_changed_call(kind: str) -> None:
    found, difference = DRIFTED[kind]
    assert refusal(wrapper_era(f"        self._plan_info = {found}")) == (
        f"flashinfer/mla.py:25: private-call-changed: flashinfer-python 9.9: {difference}; "
        f"{EXPECTED}; found {found}"
    )


def test_stream_is_no_argument_of_the_torch_op() -> None:
    form = "self._cached_module.plan.default"
    message = refusal(wrapper_era(f"        self._plan_info = {call(*STREAM, form=form)}"))
    assert "10 arguments, expected 9: get_cuda_stream(device) is new (argument 10)" in message


def test_call_gone() -> None:
    assert refusal(wrapper_era("        self._plan_info = None")) == (
        f"flashinfer/mla.py:9: private-call-missing: flashinfer-python 9.9: {NAME}.plan makes no "
        f"planner call: {EXPECTED}"
    )


def test_called_twice() -> None:
    assert refusal(wrapper_era(f"{PLANNING}\n{PLANNING}")) == (
        "flashinfer/mla.py:26: private-call-changed: flashinfer-python 9.9: "
        "self._cached_module.plan is called 2 times, expected once"
    )


def test_one_of_two_calls_changed() -> None:
    other = call(*NINE, "window")
    planning = f"        if window:\n            self._plan_info = {other}\n{PLANNING}"
    assert "window is new (argument 10)" in refusal(wrapper_era(planning))


@pytest.mark.parametrize(
    ("planning", "target"),
    [
        (f"        self._plan_info, count = {call()}", "(self._plan_info, count)"),
        (f"        self._plan_info = first = {call()}", None),
        (f"        {call()}", None),
    ],
)
def test_result_taken_otherwise(planning: str, target: str | None) -> None:
    message = refusal(wrapper_era(planning))
    if target:
        assert message == (
            "flashinfer/mla.py:25: private-call-changed: flashinfer-python 9.9: the result of "
            f"self._cached_module.plan goes to {target}, expected one plan_info"
        )
    assert "private-call-changed" in message


def test_backend_with_one_argument_more() -> None:
    forms = f"cached_module.{STAGED} or cached_module.plan"
    found = ", ".join((*NINE, "page_size"))
    assert refusal(backend_era(nine=(*NINE, "page_size"))) == (
        "flashinfer/mla/_batch/_fa.py:17: private-call-changed: flashinfer-python 9.9: the planner "
        "is called with 10 arguments, expected 9: page_size is new (argument 10); expected "
        f"{forms}({', '.join(NINE)}); found cached_module.{STAGED}({found})"
    )


def test_backend_that_only_plans_plainly() -> None:
    api = read(backend_era("        plan_info = cached_module.plan(*plan_args)", jit=JIT))
    assert api.call.method == "plan"
    assert api.call.returns == "plan_info"
    assert api.planner_copies


def test_staged_call_without_a_stager() -> None:
    assert refusal(backend_era(jit=JIT)) == (
        "flashinfer/jit/__init__.py:1: shape-unknown: flashinfer-python 9.9: plan calls "
        f"{STAGED}, and gen_batch_mla_module wraps its module in no class that copies a plan to "
        "the device: who copies cannot be told"
    )


@pytest.mark.parametrize(
    ("old", "new", "held_in"),
    [
        ("", "", "_module"),
        ("self._module.plan", "self.inner.plan", "inner"),
        ("self._module.plan(*args)", "module.plan(*args)", None),
        ("self._module.plan(*args)", "self._module.plan(*args, True)", None),
        ("self._module.plan(*args)", "self._module.plan(*args[1:])", None),
        ("plan_info, count = self", "plan_info, count, more = self", None),
        ("plan_with_staged_workspace_bytes", "plan_with_bytes", None),
    ],
)
def test_where_the_stager_holds_the_planner(old: str, new: str, held_in: str | None) -> None:
    """Plans go below it only where it calls the planner with just what it is given."""
    api = read(backend_era(jit=STAGING_JIT.replace(old, new) if old else STAGING_JIT))
    assert not api.planner_copies
    assert api.raw_module == held_in


def test_stager_in_an_older_era_counts() -> None:
    files = wrapper_era()
    files["flashinfer/jit/__init__.py"] = backend_era()["flashinfer/jit/__init__.py"]
    assert not read(files).planner_copies


def test_stager_not_named_by_the_builder_does_not_count() -> None:
    files = wrapper_era()
    stager = backend_era()["flashinfer/jit/__init__.py"].replace("adapter=Proxy", "")
    files["flashinfer/jit/__init__.py"] = stager
    assert read(files).planner_copies


@pytest.mark.parametrize(
    ("files", "copies", "who"),
    [(wrapper_era(), True, "plan, the C++ planner"), (backend_era(), False, f"{STAGED}, Python")],
)
def test_builder_gone_is_said(files: Files, copies: bool, who: str) -> None:
    files = {**files, "flashinfer/jit/__init__.py": ""}
    api = read(files)
    assert api.planner_copies == copies
    assert api.missing == (
        "Looked for gen_batch_mla_module to see who copies a plan to the device: not found; "
        f"going by {who} does.",
    )
    assert ("not found", api.missing[0]) in explain(api)


def test_version_not_told_is_said() -> None:
    api = read_plan_api(source(wrapper_era(), version=None))
    assert api.version is None
    assert api.missing == ("Looked for a version beside the source: it does not say.",)
    assert dict(explain(api))["version"] == "unknown"


def test_back_ends_that_plan_differently() -> None:
    files = backend_era()
    files["flashinfer/mla/_batch/_fa.py"] += (
        "\n    def _plan_generated(self, **a):\n        self._cached_module.plan(a)\n"
    )
    message = refusal(files)
    assert message.startswith(
        "flashinfer/mla/_batch/_fa.py:46: back-ends-differ: flashinfer-python 9.9: the back ends "
        f"fa2 and fa3 plan through different calls: cached_module.{STAGED}(*plan_args); "
        "cached_module.plan(*plan_args) against self._cached_module.plan(a)"
    )


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            '"fa3": Fa3',
            '"fa4": Fa3',
            "flashinfer/mla/_batch/_wrapper.py:6: shape-unknown: flashinfer-python 9.9: no class "
            f"for the back end 'fa3' in _BACKEND_TYPES, which {NAME} is expected to choose from",
        ),
        (
            "planned_backend = self._planned_backend",
            "planned_backend = self._other",
            "flashinfer/mla/_batch/_wrapper.py:13: shape-unknown: flashinfer-python 9.9: run calls "
            "no method of self._planned_backend, which plan sets",
        ),
        (
            "self._planned_backend = planned_backend",
            "self._planned_backend = metadata",
            "flashinfer/mla/_batch/_wrapper.py:9: shape-unknown: flashinfer-python 9.9: plan sets "
            "self._planned_backend to metadata, expected what a back end's planning method returns",
        ),
    ],
)
def test_unknown_shape_of_the_wrapper(old: str, new: str, message: str) -> None:
    files = backend_era()
    path = "flashinfer/mla/_batch/_wrapper.py"
    assert old in files[path]
    files[path] = files[path].replace(old, new)
    assert refusal(files) == message


def with_state(assignment: str, read_as: str = "self._new") -> Files:
    files = wrapper_era(f"        self._new = {assignment}\n{PLANNING}")
    path = "flashinfer/mla.py"
    files[path] = files[path].replace("        return out\n", f"        return out, {read_as}\n")
    return files


def test_new_state_that_is_a_parameter_is_taken_along() -> None:
    api = read(with_state("head_dim_kpe"))
    assert ("_new", "head_dim_kpe") in [(item.name, item.value) for item in api.run_state]


@pytest.mark.parametrize("read_as", ["self._new", 'getattr(self, "_new", None)'])
def test_new_state_that_plan_works_out_is_drift(read_as: str) -> None:
    assert refusal(with_state("int(kv_indptr_host[-1])", read_as)) == (
        "flashinfer/mla.py:25: state-unknown: flashinfer-python 9.9: run reads self._new, and "
        "mlagen cannot make it as plan does: expected a parameter of plan, found "
        "int(kv_indptr_host[-1])"
    )


def test_new_state_that_run_does_not_read_is_nothing() -> None:
    files = wrapper_era(f"        self._new = int(kv_indptr_host[-1])\n{PLANNING}")
    assert "_new" not in [item.name for item in read(files).run_state]


def test_known_state_worked_out_otherwise_is_drift() -> None:
    files = wrapper_era()
    path = "flashinfer/mla.py"
    files[path] = files[path].replace(
        "kv_indices.to(self.device, non_blocking=True)", "pages(kv_indices)"
    )
    assert refusal(files) == (
        "flashinfer/mla.py:21: state-unknown: flashinfer-python 9.9: run reads "
        "self._kv_indices_buf, and mlagen cannot make it as plan does: expected "
        "kv_indices.to(self.device, non_blocking=True), found pages(kv_indices)"
    )


@pytest.mark.parametrize("name", ["_plan_info", "_kv_indices_buf"])
def test_plan_that_reaches_the_kernels_otherwise_is_drift(name: str) -> None:
    files = wrapper_era()
    path = "flashinfer/mla.py"
    before, run = files[path].split("    def run", 1)
    files[path] = before + "    def run" + run.replace(f"self.{name}", "other")
    assert refusal(files) == (
        f"flashinfer/mla.py:5: state-unknown: flashinfer-python 9.9: {NAME} has no {name} that "
        "plan sets and run reads: how a plan reaches the kernels cannot be told"
    )


@pytest.mark.parametrize(
    ("check", "expected"),
    [
        (
            "        for t, n in [(kv_len_arr, 1), (kv_indptr, 2), (qo_indptr, 3)]:\n"
            "            if t.dtype != torch.int32:\n                raise ValueError(n)\n",
            True,
        ),
        (
            "        for t in (kv_len_arr, kv_indptr, qo_indptr):\n"
            "            assert t.dtype == torch.int32\n",
            True,
        ),
        ("        assert kv_len_arr.dtype == torch.int32\n", False),
        (
            "        for t in (kv_len_arr, kv_indptr, qo_indptr):\n"
            "            assert t.dtype == torch.int64\n",
            False,
        ),
        (
            "        for name, t in ((kv_len_arr, a), (kv_indptr, b), (qo_indptr, c)):\n"
            "            assert t.dtype == torch.int32\n",
            False,
        ),
        ("", False),
    ],
)
def test_int32_check(check: str, expected: bool) -> None:
    assert read(wrapper_era(check + PLANNING)).int32_checked == expected


def test_int32_check_in_a_function_beside() -> None:
    files = backend_era()
    path = "flashinfer/mla/_batch/_fa.py"
    files[path] = files[path].replace(
        "        cached_module = gen", "        check(kv_len_arr)\n        cached_module = gen"
    )
    assert not read(files).int32_checked
    files[path] += (
        "\n\ndef check(qo_indptr, kv_indptr, kv_len_arr):\n"
        "    for t in (kv_len_arr, kv_indptr, qo_indptr):\n"
        "        assert t.dtype == torch.int32\n"
    )
    assert read(files).int32_checked


def test_overloads_do_not_count() -> None:
    files = wrapper_era()
    path = "flashinfer/mla.py"
    stub = "    @overload\n    def plan(self, metadata): ...\n\n    @typing.overload\n"
    files[path] = files[path].replace(
        "    def plan(", f"{stub}    def plan(self): ...\n\n    def plan("
    )
    files[path] += "\n    @overload\n    def run(self): ...\n"
    api = read(files)
    assert api.plan_parameters[0] == "qo_indptr"
    assert len(api.run_state) == 5


def test_mutual_calls_end() -> None:
    files = wrapper_era(f"        self._again()\n{PLANNING}")
    files["flashinfer/mla.py"] += "\n    def _again(self):\n        self.plan()\n"
    assert read(files).call.arguments == NINE


@pytest.mark.parametrize(
    ("disguise", "lines"),
    [
        (lambda data: data.replace(b"\n", b"\r\n"), 0),
        (lambda data: b"\xef\xbb\xbf" + data, 0),
        (lambda data: b"\xef\xbb\xbf" + data.replace(b"\n", b"\r\n"), 0),
        (lambda data: b"# coding: latin-1 \xe9\n" + data, 1),
        (lambda data: data.removesuffix(b"\n"), 0),
        (lambda data: data.replace(b"    ", b"\t"), 0),
    ],
    ids=["CRLF", "BOM", "BOM and CRLF", "latin-1", "no final newline", "tabs"],
)
def test_bytes_in_disguise(disguise: Callable[[bytes], bytes], lines: int) -> None:
    plain = read(wrapper_era())
    files = {path: disguise(text.encode()) for path, text in wrapper_era().items()}
    api = read_plan_api(source(files))
    assert (api.call.arguments, api.era) == (plain.call.arguments, plain.era)
    assert [item.name for item in api.run_state] == [item.name for item in plain.run_state]
    assert api.call.place.line == plain.call.place.line + lines
    assert api.digest != plain.digest


@pytest.mark.parametrize(
    ("data", "place"),
    [
        (b"def f(:\n    pass\n", "flashinfer/mla.py:1:7: does-not-parse"),
        (b"x = 1\nclass A(:\n", "flashinfer/mla.py:2:9: does-not-parse"),
        (b"x = '\x00'\n", "does-not-parse"),
        (b"\xff\xfe\x00", "does-not-parse"),
        (b"x = " + b"(" * 5000, "does-not-parse"),
        (b"<<<<<<< HEAD\n", "flashinfer/mla.py:1:1: does-not-parse"),
    ],
)
def test_file_that_does_not_parse(data: bytes, place: str) -> None:
    with pytest.raises(DriftError) as caught:
        read_plan_api(source({"flashinfer/mla.py": data}))
    assert place in str(caught.value)
    assert "flashinfer-python 9.9: does not parse: " in str(caught.value)
    assert "hint: reinstall FlashInfer, or give another with --flashinfer" in str(caught.value)


def test_only_what_is_needed_is_read() -> None:
    files = backend_era()
    files["flashinfer/mla/_batch/_fa.py"] = (
        "from ...tuner import Tunable\n" + files["flashinfer/mla/_batch/_fa.py"]
    ).replace("class Base(Mechanics)", "class Base(Mechanics, Tunable)")
    files["flashinfer/tuner.py"] = "this is no Python\n"
    files["flashinfer/mla/_other.py"] = "nor is this\n"
    assert read(files).call.arguments == NINE


def test_digest_is_of_the_files_that_matter() -> None:
    first = read(wrapper_era())
    assert first.digest == read({**wrapper_era(), "flashinfer/other.py": "x = 1\n"}).digest
    changed = wrapper_era()
    changed["flashinfer/mla.py"] += "# one more line\n"
    assert first.digest != read(changed).digest


def test_planning_text_of_the_backend_is_as_released() -> None:
    """The miniature keeps both calls, as 0.7 does: the staged one has to be the one taken."""
    assert BACKEND_PLANNING.count("cached_module.plan") == 2
    assert read(backend_era()).call.place.line == 17
