"""The generated tests on the GPU at hand: what mlagen renders passes them, what is broken does not.

Skipped, and said so, where this Python has no GPU or no FlashInfer.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from mlagen.codegen import gpu
from mlagen.codegen.flashinfer.find import find_flashinfer
from mlagen.codegen.flashinfer.read import read_plan_api
from mlagen.codegen.prove import prove, suite_of_rendering
from mlagen.codegen.render import Rendered, render
from mlagen.codegen.spec import Spec
from tests.gpu.faults import DEVICE_FAULTS, FAULTS
from tests.specs import ON_DEVICE, Changes, spec_of

pytestmark = pytest.mark.gpu

#: Changes of the shipped variants.yaml.
OTHER_SPECS: dict[str, Changes] = {
    "all mirrors refreshed": [
        ("refresh: []", "refresh: [qo_indptr, kv_indptr, kv_len]"),
        ("refresh: [kv_indices]", "refresh: [kv_indices, qo_indptr, kv_indptr, kv_len]"),
    ],
    "formulas of a fork": [
        ("kv_len: seq_lens + draft_step + 1", "kv_len: seq_lens + 2 * draft_step + 3"),
        ("kv_len: seq_lens + draft_token_num", "kv_len: seq_lens + draft_token_num + 1"),
    ],
    "planned on the GPU": ON_DEVICE,
}


def rendered_for(host: gpu.GpuHost, spec: Spec) -> Rendered:
    return render(spec, read_plan_api(find_flashinfer(str(host.package))))


def seen(
    host: gpu.GpuHost, changes: Changes, file: str, right: str, wrong: str, keyword: str
) -> bool:
    """Whether tests that are named fail once a fault is planted. None that is named is not enough:
    a keyword that fits no test would see every fault."""
    suite = suite_of_rendering(rendered_for(host, spec_of(changes)))
    text = suite.files[file].decode()
    assert right in text, "the fault no longer fits what is rendered"
    files = {**suite.files, file: text.replace(right, wrong).encode()}
    return prove(replace(suite, files=files), host, keyword=keyword).run.failed > 0


@pytest.mark.parametrize("changes", [(), *OTHER_SPECS.values()], ids=["shipped", *OTHER_SPECS])
def test_what_is_rendered_passes(host: gpu.GpuHost, changes: Changes) -> None:
    run = prove(suite_of_rendering(rendered_for(host, spec_of(changes))), host).run
    assert run.ok  # the folder of a run that failed is left for a look
    assert run.passed > 0


@pytest.mark.parametrize(("file", "right", "wrong", "keyword"), FAULTS)
def test_what_is_broken_fails(
    host: gpu.GpuHost, file: str, right: str, wrong: str, keyword: str
) -> None:
    assert seen(host, (), file, right, wrong, keyword)


@pytest.mark.parametrize(("file", "right", "wrong", "keyword"), DEVICE_FAULTS)
def test_what_is_broken_on_the_gpu_fails(
    host: gpu.GpuHost, file: str, right: str, wrong: str, keyword: str
) -> None:
    assert seen(host, ON_DEVICE, file, right, wrong, keyword)
