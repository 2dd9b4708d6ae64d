"""--allow-unknown: what is taken over from a source that no era is like, and what is not; and what
the refusal says about the nearest era."""

from __future__ import annotations

import pytest

from mlagen.codegen.errors import DriftError, Problem
from mlagen.codegen.flashinfer import eras
from mlagen.codegen.flashinfer.api import Era, PlanApi
from mlagen.codegen.flashinfer.derive import plan_info_trouble
from mlagen.codegen.flashinfer.nearest import differences_from, look
from mlagen.codegen.flashinfer.read import derived_facts, explain, read_plan_api
from mlagen.codegen.flashinfer.syntax import Modules
from mlagen.codegen.render import _STATE, render, render_module
from tests.flashinfer.miniatures import (
    NINE,
    PLANNING,
    STAGING_JIT,
    STREAM_PLANNING,
    Files,
    backend_era,
    call,
    source,
    with_header,
    wrapper_era,
)
from tests.releases import flashinfer_source, plan_api, shipped

EMITTED = (
    "HOLDER._float_workspace_buffer",
    "HOLDER._int_workspace_buffer",
    "PINNED",
    "request.qo_indptr",
    "request.kv_indptr",
    "request.kv_len",
    "shape.num_heads",
    "shape.head_dim_ckv",
    "causal",
)


def planning(found: str) -> Files:
    """A FlashInfer whose `plan` makes this planner call; lines before it may stand in front."""
    before, _, planner = found.rpartition("\n")
    lines = [f"        {line}" for line in before.split("\n") if line]
    return with_header(wrapper_era("\n".join([*lines, f"        self._plan_info = {planner}"])))


def allowed(files: Files) -> PlanApi:
    return read_plan_api(source(files), allow_unknown=True)


def refusal(files: Files, *, allow_unknown: bool = False) -> tuple[Problem, ...]:
    with pytest.raises(DriftError) as caught:
        read_plan_api(source(files), allow_unknown=allow_unknown)
    return caught.value.problems


def with_init(files: Files, *lines: str) -> Files:
    """The FlashInfer with more lines at the end of its wrapper's `__init__`."""
    path = "flashinfer/mla.py"
    old = "        self._float_workspace_buffer = float_workspace_buffer\n"
    new = old + "".join(f"        {line}\n" for line in lines)
    assert old in files[path]
    return {**files, path: files[path].replace(old, new)}


TAKEN_OVER: dict[str, tuple[Files, tuple[str, ...]]] = {
    "a parameter that SGLang gives": (
        planning(call(*NINE, "head_dim_kpe")),
        (*EMITTED, "shape.head_dim_kpe"),
    ),
    "in the middle": (
        planning(call(*NINE[:7], "page_size", *NINE[7:])),
        (*EMITTED[:7], "shape.page_size", *EMITTED[7:]),
    ),
    "a parameter with a default": (planning(call(*NINE, "use_profiler")), (*EMITTED, "False")),
    "a number": (planning(call(*NINE, "-1")), (*EMITTED, "-1")),
    "None": (planning(call(*NINE, "None")), (*EMITTED, "None")),
    "a local that is a constant": (
        planning("window = 0\n" + call(*NINE, "window")),
        (*EMITTED, "0"),
    ),
    "a local that is a parameter": (
        planning("heads = num_heads\n" + call(*NINE[:6], "heads", *NINE[7:])),
        EMITTED,
    ),
    "a host array of another name": (
        planning("lens = kv_len_arr.cpu()\n" + call(*NINE[:5], "lens", *NINE[6:])),
        EMITTED,
    ),
    "another order": (
        planning(call(*NINE[:3], NINE[4], NINE[3], *NINE[5:])),
        (*EMITTED[:3], EMITTED[4], EMITTED[3], *EMITTED[5:]),
    ),
    "an attribute that plan lets be": (
        with_init(planning(call(*NINE, "self._num_sm")), "self._num_sm = sm_count()"),
        (*EMITTED, "HOLDER._num_sm"),
    ),
}


@pytest.mark.parametrize("kind", TAKEN_OVER)
def test_arguments_that_are_taken_over(kind: str) -> None:
    files, emitted = TAKEN_OVER[kind]
    first, nearest = refusal(files)
    assert first.code == "private-call-changed"
    assert nearest.hint.startswith("--allow-unknown renders it from this source (")
    api = allowed(files)
    assert api.call.derived == emitted
    assert len(api.derived) == 1
    assert api.derived[0] in first.message
    assert api.era is Era.TVM_FFI
    text = render_module(render(shipped(), api), "plans", ())
    passed = [item.replace("HOLDER", "wrapper").replace("PINNED", "pinned") for item in emitted]
    lines = "".join(f"        {item},\n" for item in passed)
    assert f"    return wrapper._cached_module.plan(\n{lines}    )\n" in text


LATER = "lens = kv_len_arr.to('cpu')\n"
REFUSED: dict[str, tuple[Files, str]] = {
    "nothing that is known": (
        planning(call(*NINE, "split_kv")),
        "split_kv is not assigned once in plan",
    ),
    "worked out": (
        planning(call(*NINE, "int(kv_len_arr_host.max())")),
        "int(kv_len_arr_host.max()) is worked out by plan",
    ),
    "a local that is worked out": (
        planning("most = kv_len_arr_host.max()\n" + call(*NINE, "most")),
        "kv_len_arr_host.max() is worked out by plan",
    ),
    "a local of two values": (
        planning("window = 0\nif causal: window = 1\n" + call(*NINE, "window")),
        "window is not assigned once in plan",
    ),
    "a parameter that is assigned anew": (
        planning("page_size = page_size * 2\n" + call(*NINE, "page_size")),
        "plan assigns its parameter page_size anew",
    ),
    "host lengths that are changed": (
        planning(
            "lens = kv_len_arr.to('cpu')\nlens.add_(1)\n" + call(*NINE[:5], "lens", *NINE[6:])
        ),
        "plan writes into lens",
    ),
    "host lengths that are written": (
        planning("lens = kv_len_arr.to('cpu')\nlens[0] = 1\n" + call(*NINE[:5], "lens", *NINE[6:])),
        "plan writes into lens",
    ),
    "an array on the device": (
        planning(call(*NINE, "kv_indices")),
        "there is nothing to give for the parameter kv_indices",
    ),
    "one of the nine is missing": (
        planning(call(*NINE[:2], *NINE[3:])),
        "the planner is given pinned_int_workspace 0 times, expected once",
    ),
    "one of the nine twice": (
        planning(call(*NINE, "causal")),
        "the planner is given causal 2 times, expected once",
    ),
    "by keyword": (
        planning(call(*NINE, "window=0")),
        "an argument is given by keyword",
    ),
    "arguments that cannot be seen": (
        planning(call("*self._arguments()")),
        "*self._arguments() is worked out by plan",
    ),
    "another method": (
        planning(call(form="self._cached_module.plan_v2")),
        "what self._cached_module.plan_v2 does cannot be told",
    ),
    "an attribute that plan sets": (
        planning("self._most = 5\n" + call(*NINE, "self._most")),
        "plan does more with self._most than hand it on",
    ),
    "a buffer that plan fills": (
        with_init(
            planning("self._lens.copy_(kv_len_arr)\n" + call(*NINE, "self._lens")),
            "self._lens = empty()",
        ),
        "plan does more with self._lens than hand it on",
    ),
    "an attribute of unknown origin": (
        planning(call(*NINE, "self._num_sm")),
        "__init__ does not set self._num_sm",
    ),
    "a call into the plan's own stream": (
        with_header(wrapper_era(STREAM_PLANNING.replace("get_cuda_stream(device)", "stream(0)"))),
        "stream(0) is worked out by plan",
    ),
    "plan_info of more entries": (
        with_header(
            planning(call(*NINE, "0")), (*eras.PLAN_INFO[:2], "extra", *eras.PLAN_INFO[2:])
        ),
        "plan_info holds 19 entries in flashinfer/data/include/flashinfer/attention/scheduler.cuh, "
        "expected 18 in the order known; new: extra",
    ),
    "plan_info of an unknown form": (
        {**planning(call(*NINE, "0")), eras.SCHEDULER_HEADER: "struct Other {};\n"},
        "plan_info holds 0 entries",
    ),
    "plan_info that cannot be seen": (
        wrapper_era("        self._plan_info = " + call(*NINE, "0")),
        "scheduler.cuh, which tells what plan_info holds, is not there",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_arguments_that_are_not(kind: str) -> None:
    files, reason = REFUSED[kind]
    first, nearest = refusal(files)
    assert nearest.hint.startswith("--allow-unknown cannot derive this: ")
    assert reason in nearest.hint
    again = refusal(files, allow_unknown=True)
    assert again[0] == first
    assert [problem.code for problem in again] == [first.code, "not-derivable", "nearest-era"]
    assert reason in again[1].message


def in_backend(*more: str, parameters: str = "") -> Files:
    files = with_header(backend_era(nine=(*NINE, *more)))
    path = "flashinfer/mla/_batch/_fa.py"
    old = "head_dim_ckv, causal\n    ):"
    assert old in files[path]
    return {**files, path: files[path].replace(old, f"head_dim_ckv, causal{parameters}\n    ):")}


def test_a_back_end_object_is_read_likewise() -> None:
    api = allowed(in_backend("page_size", parameters=", page_size"))
    assert api.call.derived == (*EMITTED, "shape.page_size")
    text = render_module(render(shipped(), api), "plans", ())
    # Below the proxy, which hands all of its arguments on.
    assert "backend._cached_module._module.plan(\n        backend._float_workspace_buffer," in text
    assert "        causal,\n        shape.page_size,\n    )\n" in text


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        (
            in_backend("window", parameters=", window=0"),
            "there is nothing to give for the parameter window",
        ),
        (in_backend("self._width"), "self._width is of an object that each plan makes anew"),
    ],
)
def test_what_a_back_end_is_made_with_is_not_seen(files: Files, reason: str) -> None:
    problems = refusal(files, allow_unknown=True)
    assert reason in problems[1].message


def test_a_proxy_that_plans_otherwise_is_called_itself() -> None:
    files = with_header(
        backend_era(nine=(*NINE, "num_heads * 2"), jit=STAGING_JIT.replace("(*args)", "(args)"))
    )
    assert "num_heads * 2 is worked out" in refusal(files, allow_unknown=True)[1].message


def with_state(*lines: str, reads: str = "self._new") -> Files:
    files = with_header(wrapper_era("\n".join([f"        {line}" for line in lines] + [PLANNING])))
    path = "flashinfer/mla.py"
    files[path] = files[path].replace("        return out\n", f"        return out, {reads}\n")
    return files


@pytest.mark.parametrize(
    ("line", "emitted", "in_plan"),
    [
        ("self._new = head_dim_kpe", "shape.head_dim_kpe", "wrapper._new = shape.head_dim_kpe"),
        ("self._new = causal", "CAUSAL", "wrapper._new = True"),
        ("self._new = 3", "", None),
        ("self._new = use_profiler", "", None),
    ],
)
def test_state_that_is_taken_over(line: str, emitted: str, in_plan: str | None) -> None:
    files = with_state(line)
    api = allowed(files)
    [new] = [item for item in api.run_state if item.name == "_new"]
    assert new.emitted == emitted
    value = line.partition(" = ")[2]
    assert api.derived == (f"run reads self._new, which plan sets to {value}",)
    text = render_module(render(shipped(), api), "plans", ())
    assert text.count("_new = ") == (0 if in_plan is None else text.count("._causal = "))
    assert in_plan is None or in_plan in text


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        (["self._new = int(kv_indptr_host[-1])"], "int(kv_indptr_host[-1]) is worked out by plan"),
        (["self._new = kv_len_arr"], "there is nothing to give for the parameter kv_len_arr"),
        (["self._new = kv_len_arr_host"], "self._new is kv_len_arr_host, which belongs to one"),
        (["if causal: self._new = 3"], "self._new is not set once, in every plan"),
        (["self._new = 3", "self._new = 4"], "self._new is not set once, in every plan"),
        (["self._new = 3", "setattr(self, '_new', 4)"], "self._new is not set once"),
        (["self._new, other = 3, 4"], "self._new is not set once, in every plan"),
        (["self._new = 3", "self._new += 1"], "self._new is not set once, in every plan"),
    ],
)
def test_state_that_is_not(lines: list[str], reason: str) -> None:
    problems = refusal(with_state(*lines), allow_unknown=True)
    assert [p.code for p in problems] == ["state-unknown", "not-derivable", "nearest-era"]
    assert reason in problems[1].message


def test_state_set_by_a_method_that_may_not_be_called() -> None:
    files = with_state("if causal: self._set()")
    files["flashinfer/mla.py"] += "\n    def _set(self):\n        self._new = 3\n"
    assert "_set, which sets self._new, does not plan" in (
        refusal(files, allow_unknown=True)[1].message
    )


def test_known_state_that_is_worked_out_otherwise_is_never_taken_over() -> None:
    files = with_header(wrapper_era())
    path = "flashinfer/mla.py"
    files[path] = files[path].replace("self._causal = causal", "self._causal = 3")
    [first, nearest] = refusal(files, allow_unknown=True)
    assert (first.code, nearest.code) == ("state-unknown", "nearest-era")


@pytest.mark.parametrize("version", ["0.5.0", "0.6.17", "0.7.4"])
def test_a_known_flashinfer_is_read_as_without(version: str) -> None:
    api = read_plan_api(flashinfer_source(version), allow_unknown=True)
    assert api == plan_api(version)
    assert derived_facts(api) == ()
    assert api.era_text == api.era.value


def test_real_headers_hold_the_plan_info_that_is_known() -> None:
    """Of wheels; the header is what --allow-unknown goes by."""
    for version in ("0.5.0", "0.6.17", "0.7.0", "0.7.4"):
        assert plan_info_trouble(Modules(flashinfer_source(version))) is None


def test_known_state_is_what_plans_can_leave_right() -> None:
    assert set(_STATE) == eras.KNOWN_STATE


def test_it_is_marked() -> None:
    api = allowed(planning(call(*NINE, "head_dim_kpe")))
    assert api.era_text == (
        "unknown, derived from source; --allow-unknown (nearest: 0.4.0rc4-0.6.7)"
    )
    facts = explain(api)
    assert ("era", api.era_text) in facts
    assert ("derived", api.derived[0]) in facts
    assert "head_dim_kpe) -> plan_info" in dict(facts)["private call"]


# -- the nearest era ------------------------------------------------------------------------------


def nearest(files: Files) -> list[str]:
    [problem] = [p for p in refusal(files) if p.code == "nearest-era"]
    return problem.message.removeprefix("flashinfer-python 9.9: ").split("\n")


def test_nearest_by_call_and_arguments() -> None:
    assert nearest(planning(call(*NINE, "split_kv"))) == [
        "nearest is tvm-ffi (0.4.0rc4-0.6.7); what is different from it:",
        "    arguments: the planner is called with 10 arguments, expected 9: split_kv is new "
        "(argument 10)",
    ]
    assert nearest(planning(call(form="self._cached_module.plan_v2"))) == [
        "nearest is tvm-ffi (0.4.0rc4-0.6.7); what is different from it:",
        "    call: self._cached_module.plan_v2, was self._cached_module.plan",
    ]


def test_nearest_by_location_and_attributes() -> None:
    files = wrapper_era("        self._plan_info = plan_mla()", path="flashinfer/mla/_new.py")
    path = "flashinfer/mla/_new.py"
    causal = "        self._causal = causal\n"
    files[path] = files[path].replace(causal, f"{causal}        self._new = f()\n")
    files[path] = files[path].replace(", self._sm_scale,", ", self.other(self._new),")
    assert nearest(files) == [
        "nearest is mla-package (0.6.8-0.6.18.post1); what is different from it:",
        "    location: BatchMLAPagedAttentionWrapper is in flashinfer/mla/_new.py, was in "
        "flashinfer/mla/_core.py",
        f"    call: none was found, was self._cached_module.plan({', '.join(NINE)})",
        "    attributes: run reads _new as well",
        "    attributes: run does not read _sm_scale",
    ]


def test_nearest_of_a_back_end_object() -> None:
    first, *differences = nearest(in_backend("split_kv"))
    assert first.startswith("nearest is backend-object (0.7.0-0.7.4)")
    assert any("split_kv is new (argument 10)" in line for line in differences)


def test_a_class_that_is_not_there_is_like_none() -> None:
    files = wrapper_era()
    files["flashinfer/mla.py"] = files["flashinfer/mla.py"].replace(
        "class BatchMLAPagedAttentionWrapper", "class Other"
    )
    assert [problem.code for problem in refusal(files)] == ["class-missing"]


def test_a_file_that_does_not_parse_is_not_compared() -> None:
    assert [p.code for p in refusal({"flashinfer/mla.py": "def f(:\n"})] == ["does-not-parse"]


@pytest.mark.parametrize("version", ["0.5.0", "0.6.7", "0.6.17", "0.6.18", "0.7.0", "0.7.4"])
def test_each_release_is_nearest_to_its_own_era(version: str) -> None:
    seen = look(Modules(flashinfer_source(version)))
    found = {shape.era: differences_from(seen, shape) for shape in eras.ERA_SHAPES}
    assert found.pop(plan_api(version).era) == []
    assert all(found.values())
