"""What is read from FlashInfer's real wheels, release by release."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from mlagen.codegen.flashinfer.api import Era, PlanApi
from mlagen.codegen.flashinfer.read import explain
from tests.flashinfer.miniatures import NINE, PARAMETERS
from tests.releases import NEAREST_WHEEL, PINS, plan_api

WRAPPER = "flashinfer/mla/_core.py"
FA = "flashinfer/mla/_batch_mla/_backends/_fa_common.py"
STAGED = "plan_with_staged_workspace_bytes"

KERNEL = ("_kv_indices_buf", "_causal", "_page_size", "_sm_scale")
DTYPES = ("_q_data_type", "_kv_data_type")
REST = ("_use_profiler", "_plan_info")


@dataclass(frozen=True)
class Facts:
    """What one release is known to be. `place` is the class, `call` the private call."""

    era: Era
    place: str
    call: str
    run_state: tuple[str, ...]
    int32_checked: bool = False


RELEASES = {
    "0.5.3": Facts(
        Era.TVM_FFI, "flashinfer/mla.py:66", "flashinfer/mla.py:292", (*KERNEL, *REST), True
    ),
    "0.6.7": Facts(Era.TVM_FFI, "flashinfer/mla.py:212", "flashinfer/mla.py:428", (*KERNEL, *REST)),
    "0.6.14": Facts(
        Era.MLA_PACKAGE, f"{WRAPPER}:1380", f"{WRAPPER}:1672", (*KERNEL, *DTYPES, *REST)
    ),
    "0.6.17": Facts(
        Era.MLA_PACKAGE, f"{WRAPPER}:1414", f"{WRAPPER}:1706", (*KERNEL, *DTYPES, *REST)
    ),
    "0.6.18": Facts(
        Era.MLA_PACKAGE,
        f"{WRAPPER}:1963",
        f"{WRAPPER}:2254",
        (*KERNEL, "_head_dim_ckv", *DTYPES, *REST),
    ),
    "0.7.0": Facts(
        Era.BACKEND_OBJECT,
        "flashinfer/mla/_batch_mla/_wrapper.py:109",
        f"{FA}:319",
        (*KERNEL, "_head_dim_ckv", *DTYPES, *REST),
        True,
    ),
    "0.7.1": Facts(
        Era.BACKEND_OBJECT,
        "flashinfer/mla/_batch_mla/_wrapper.py:162",
        f"{FA}:609",
        (*KERNEL, "_head_dim_ckv", *DTYPES, *REST),
        True,
    ),
    "0.7.2": Facts(
        Era.BACKEND_OBJECT,
        "flashinfer/mla/_batch_mla/_wrapper.py:162",
        f"{FA}:609",
        (*KERNEL, "_head_dim_ckv", *DTYPES, *REST),
        True,
    ),
    "0.7.4": Facts(
        Era.BACKEND_OBJECT,
        "flashinfer/mla/_batch_mla/_wrapper.py:171",
        f"{FA}:622",
        (
            *KERNEL,
            "_head_dim_ckv",
            *DTYPES,
            *REST,
            "_planned_query_shape",
            "_planned_kv_page_range",
        ),
        True,
    ),
}


@pytest.fixture(params=RELEASES)
def release(request: pytest.FixtureRequest) -> tuple[str, Facts, PlanApi]:
    version = request.param
    return version, RELEASES[version], plan_api(version)


def test_era_and_places(release: tuple[str, Facts, PlanApi]) -> None:
    version, facts, api = release
    assert api.version == version
    assert api.era is facts.era
    assert str(api.place) == facts.place
    assert str(api.call.place) == facts.call
    assert api.missing == ()


def test_private_call(release: tuple[str, Facts, PlanApi]) -> None:
    _, facts, api = release
    later = facts.era is Era.BACKEND_OBJECT
    assert api.call.method == (STAGED if later else "plan")
    assert api.call.arguments == NINE
    assert api.call.returns == ("plan_info_and_bytes" if later else "plan_info")
    assert not api.call.takes_stream


def test_state(release: tuple[str, Facts, PlanApi]) -> None:
    _, facts, api = release
    assert tuple(item.name for item in api.run_state) == facts.run_state
    values = {item.name: item.value for item in api.run_state}
    assert values["_causal"] == "causal"
    assert values["_kv_indices_buf"] == "kv_indices.to(self.device, non_blocking=True)"
    if facts.era is Era.BACKEND_OBJECT:
        assert api.holder == "planned_backend"
        assert {item.name for item in api.wrapper_state} >= {
            "_planned_backend",
            "_input_contract",
            "_planned_query_layout",
            "_planned_kv_cache_layout",
            "_q_data_type",
            "_kv_data_type",
        }
    else:
        assert api.holder == "wrapper"
        assert api.wrapper_state == ()


def test_who_copies_and_who_checks(release: tuple[str, Facts, PlanApi]) -> None:
    _, facts, api = release
    assert api.planner_copies == (facts.era is not Era.BACKEND_OBJECT)
    assert api.raw_module == (None if api.planner_copies else "_module")
    assert api.int32_checked == facts.int32_checked
    assert api.public_update is None


def test_parameters(release: tuple[str, Facts, PlanApi]) -> None:
    _, facts, api = release
    assert api.plan_parameters[:13] == PARAMETERS
    assert ("metadata" in api.plan_parameters[13:]) == (facts.era is Era.BACKEND_OBJECT)


def test_digests_differ() -> None:
    digests = {plan_api(version).digest for version in RELEASES}
    assert len(digests) == len(RELEASES)
    assert all(len(digest) == 64 for digest in digests)


def test_explain_names_what_stands_there() -> None:
    api = plan_api("0.7.4")
    assert explain(api) == (
        ("version", "0.7.4"),
        ("era", "backend-object (0.7.0-0.7.4)"),
        (
            "class",
            "BatchMLAPagedAttentionWrapper at flashinfer/mla/_batch_mla/_wrapper.py:171",
        ),
        (
            "private call",
            f"{STAGED}(float_workspace=self._float_workspace_buffer, "
            "int_workspace=self._int_workspace_buffer, "
            "pinned_int_workspace=self._pin_memory_int_workspace_buffer, "
            "qo_indptr=qo_indptr_host, kv_indptr=kv_indptr_host, kv_len=kv_len_arr_host, "
            f"num_heads, head_dim_ckv, causal) -> (plan_info, staged bytes) at {FA}:622",
        ),
        ("state", "on wrapper._planned_backend, which an eager plan replaces"),
        (
            "read by run",
            "_kv_indices_buf, _causal, _page_size, _sm_scale, _head_dim_ckv, _q_data_type, "
            "_kv_data_type, _use_profiler, _plan_info, _planned_query_shape, "
            "_planned_kv_page_range",
        ),
        (
            "read by run of the wrapper",
            "_backend, _planned_backend, _input_contract, _planned_query_layout, "
            "_planned_kv_cache_layout, _legacy_flat_csr_plan, _q_data_type, _kv_data_type",
        ),
        (
            "copies to the device",
            "FlashInfer's Python, from pinned memory of its own; plans go below it, to "
            "_module.plan, and are staged once",
        ),
        ("int32 checked by plan", "yes"),
        ("public update", "none"),
    )


def test_every_pin_has_a_wheel_to_read() -> None:
    assert NEAREST_WHEEL.keys() == PINS.keys()
    assert NEAREST_WHEEL["0.4.5"] == "0.5.0"
    assert NEAREST_WHEEL["0.5.23"] == PINS["0.5.23"] == "0.7.2"


@pytest.mark.releases
@pytest.mark.parametrize("version", sorted(set(NEAREST_WHEEL.values()) - RELEASES.keys()))
def test_pinned_wheels_are_read(version: str) -> None:
    api = plan_api(version)
    assert api.version == version
    assert api.missing == ()
    assert api.planner_copies
