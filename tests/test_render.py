"""What is rendered, for real FlashInfers and for hand-made ones, judged as code.

Everything emitted is held to what we hold our own code to: formatted, linted, typed, and by rules
of the hot path: one private call, only the state that `run` reads, no bag of arguments, no
assert, no wait for the GPU outside of the places named here.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations
from pathlib import Path

import pytest

from mlagen.codegen.errors import DriftError, SpecError
from mlagen.codegen.flashinfer.api import Place, PlanApi, StateAttribute
from mlagen.codegen.generated import MANIFEST, differing, generate, manifest_of
from mlagen.codegen.patch import prepare, select
from mlagen.codegen.render import Fragment, Rendered, import_lines, render, render_module
from mlagen.codegen.resolve import names_of
from mlagen.codegen.sglang.find import FoundTarget
from mlagen.codegen.spec import Spec, read_spec
from tests.judge.miniature import COPIES, STAGES, STREAM, TORCH_OP
from tests.releases import plan_api, shipped
from tests.specs import device_spec
from tests.splice.shapes import before

RELEASES = ("0.5.3", "0.6.7", "0.6.14", "0.6.17", "0.6.18", "0.7.0", "0.7.1", "0.7.2", "0.7.4")
NINE = (
    "{0}._float_workspace_buffer",
    "{0}._int_workspace_buffer",
    "{1}",
    "request.qo_indptr",
    "request.kv_indptr",
    "request.kv_len",
    "shape.num_heads",
    "shape.head_dim_ckv",
    "causal",
)


@cache
def api_of(version: str) -> PlanApi:
    if version == "0.2.3":
        return STREAM
    return TORCH_OP if version == "0.2.5" else plan_api(version)


EVERY_API = ("0.2.3", "0.2.5", *RELEASES)


# -- specs of other people ----------------------------------------------------------------------


def entry(
    name: str,
    serves: str,
    when: str,
    tokens: str,
    kv_len: str,
    *,
    causal: bool = True,
    refresh: str = "",
    guards: str = "fa-back-end, work-items-fit, tile-divides-heads",
    **more: str,
) -> str:
    """One variant of a variants.yaml."""
    lines = [
        f"  {name}:",
        f"    serves: {serves}",
        f"    when: [{when}]",
        f"    tokens: {tokens}",
        f"    kv_len: {kv_len}",
        f"    causal: {'true' if causal else 'false'}",
        f"    refresh: [{refresh}]",
        f"    guards: [{guards}]",
        *(f"    {key}: {value}" for key, value in more.items()),
    ]
    return "\n".join(lines) + "\n"


def spec_of(*entries: str) -> Spec:
    text = "version: 1\nvariants:\n" + "".join(entries)
    return read_spec(text.encode(), Path("variants.yaml"))


VERIFY = ("target-verify", "replay, eager", "draft_token_num", "seq_lens + draft_token_num")
DRAFT = ("draft-decode", "replay, eager", "1", "seq_lens + draft_step + 1")
SIXTH = entry(
    "verify-sharded",
    *VERIFY[:3],
    "(seq_lens + draft_token_num + dcp_size - 1 - dcp_rank) // dcp_size",
    guards="fa-back-end",
    context_parallel="true",
)
OTHER_SPECS: dict[str, tuple[str, ...]] = {
    "a sixth variant": (SIXTH, entry("verify", *VERIFY)),
    "verify of constant tokens": (entry("verify", *VERIFY[:2], "4", "seq_lens + 4"),),
    "verify of other tokens": (
        entry("verify", *VERIFY[:2], "draft_token_num * 2", "seq_lens + draft_token_num * 2"),
    ),
    "verify at replay alone": (entry("verify", "target-verify", "replay", *VERIFY[2:]),),
    "verify eager alone": (entry("verify", "target-verify", "eager", *VERIFY[2:]),),
    "verify, a variant each": (
        entry("verify", "target-verify", "replay", *VERIFY[2:]),
        entry("verify-eager", "target-verify", "eager", *VERIFY[2:]),
    ),
    "drafts, a variant each": (
        entry("draft", "draft-decode", "replay", *DRAFT[2:], causal=False),
        entry("draft-eager", "draft-decode", "eager", *DRAFT[2:], causal=False),
    ),
    "drafts eager, decode at replay": (
        entry("decode", "decode", "replay", "1", "seq_lens", causal=False),
        entry("draft", "draft-decode", "eager", *DRAFT[2:], causal=False),
    ),
    "drafts of constant length": (entry("draft", *DRAFT[:3], "seq_lens + 1", causal=False),),
    "draft-extend of constant tokens": (
        entry("extend", "draft-extend", "eager", "3", "seq_lens"),
    ),
    "draft-extend behind its prefix": (
        entry("extend", "draft-extend", "eager", "extend_seq_lens", "seq_lens + extend_seq_lens"),
    ),
    "context parallelism without a rank": (
        entry("dcp", "decode", "replay", "1", "seq_lens // dcp_size", causal=False,
              context_parallel="true", guards="fa-back-end"),
    ),
    "a long doc": (entry("verify", *VERIFY, doc="word " * 70),),
    "a function of another name": (entry("verify", *VERIFY, function="plan_the_verification"),),
    "a long name": (entry("v" + "-verify" * 4, *VERIFY),),
}  # fmt: skip
#: Variants that the GPU plans, by what a captured graph is of.
ON_GPU = {
    "decode": entry("decode", "decode", "replay", "1", "seq_lens", causal=False, planner="device"),
    "draft-decode": entry("draft", *DRAFT, causal=False, planner="device"),
    "verify": entry("verify", *VERIFY, planner="device"),
}
for size in (1, 2, 3):
    for served in combinations(ON_GPU, size):
        OTHER_SPECS[f"on the GPU: {' '.join(served)}"] = tuple(ON_GPU[name] for name in served)
OTHER_SPECS["on the GPU: decode; verify on the host"] = (ON_GPU["decode"], entry("v", *VERIFY))
OTHER_SPECS["on the GPU: verify; decode on the host"] = (
    ON_GPU["verify"],
    entry("decode", "decode", "replay", "1", "seq_lens", causal=False),
)
OTHER_SPECS["on the GPU: verify of constant tokens"] = (
    entry("verify", *VERIFY[:2], "4", "seq_lens + 4", planner="device"),
)
OTHER_SPECS["on the GPU: verify, shorter by a constant"] = (
    entry("verify", *VERIFY[:2], "4", "seq_lens - 2", planner="device"),
)
GUARDS = ("uniform-tokens", "owned-input", "tile-divides-heads", "work-items-fit", "fa-back-end")
for size in (0, 1, 2, 4):
    for chosen in list(combinations(GUARDS, size))[:: 1 if size < 2 else 3]:
        OTHER_SPECS[f"guards: {' '.join(chosen) or 'none'}"] = (
            entry("verify", *VERIFY, guards=", ".join(chosen)),
        )
MIRRORS = ("kv_indices", "qo_indptr", "kv_indptr", "kv_len")
for size in (1, 2, 4):
    for chosen in combinations(MIRRORS, size):
        OTHER_SPECS[f"refreshes {' '.join(chosen)}"] = (
            entry("verify", *VERIFY, refresh=", ".join(chosen)),
        )


#: One of each era that the shipped variants are also rendered for as planned on the GPU.
GPU_APIS = ("0.2.3", "0.2.5", "0.5.3", "0.6.17", "0.7.2")
GPU_PREFIX = "planned on the GPU, FlashInfer "


@dataclass(frozen=True)
class Case:
    """One rendering that is judged as code, in a package of its own."""

    package: str
    spec: Spec
    api: PlanApi


def cases() -> dict[str, Case]:
    found = {
        f"FlashInfer {version}": Case(f"r_{version.replace('.', '_')}", shipped(), api_of(version))
        for version in EVERY_API
    }
    found |= {
        f"{GPU_PREFIX}{version}": Case(
            f"d_{version.replace('.', '_')}", device_spec(), api_of(version)
        )
        for version in GPU_APIS
    }
    for number, (name, entries) in enumerate(OTHER_SPECS.items()):
        api = (COPIES, STAGES)[number % 2]
        found[name] = Case(f"s_{number}", spec_of(*entries), api)
    return found


CASES = [
    *(f"FlashInfer {version}" for version in EVERY_API),
    *(f"{GPU_PREFIX}{version}" for version in GPU_APIS),
    *OTHER_SPECS,
]


@pytest.fixture(scope="session")
def packages(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Case]]:
    """The folder with all cases, each a package of plans.py and hooks.py."""
    folder = tmp_path_factory.mktemp("rendered")
    found = cases()
    for case in found.values():
        package = folder / case.package
        package.mkdir()
        (package / "__init__.py").write_bytes(b"")
        for name, data in generate(case.spec, case.api).files.items():
            (package / name).parent.mkdir(exist_ok=True)
            (package / name).write_bytes(data)
    return folder, found


def told(folder: Path, *command: str) -> dict[str, list[str]]:
    """What a tool says, by package."""
    ran = subprocess.run(
        [sys.executable, "-m", *command], cwd=folder, capture_output=True, text=True, check=False
    )
    assert ran.returncode in (0, 1), ran.stdout + ran.stderr
    said: dict[str, list[str]] = {}
    for line in ran.stdout.splitlines():
        match = re.match(r"(?:--- |error: )?(\w+)/((?:tests/)?\w+\.py)(.*)", line)
        if match:
            said.setdefault(match[1], []).append(match[2] + match[3])
    return said


@pytest.fixture(scope="session")
def unformatted(packages: tuple[Path, dict[str, Case]]) -> dict[str, list[str]]:
    command = ("ruff", "format", "--isolated", "--no-cache", "--line-length", "88", "--diff", ".")
    return told(packages[0], *command)


@pytest.fixture(scope="session")
def linted(packages: tuple[Path, dict[str, Case]]) -> dict[str, list[str]]:
    rules = "E4,E7,E9,F,B,I,PLE,UP032,W"
    command = ("ruff", "check", "--isolated", "--no-cache", "--line-length", "88")
    return told(packages[0], *command, "--select", rules, "--output-format", "concise", ".")


@pytest.fixture(scope="session")
def typed(packages: tuple[Path, dict[str, Case]]) -> dict[str, list[str]]:
    """mypy --strict, once for all. FlashInfer is not there: its wrapper is Any. Parts of torch
    have no types of their own."""
    folder, found = packages
    command = ["mypy", "--strict", "--ignore-missing-imports", "--untyped-calls-exclude=torch"]
    command += ["--no-warn-return-any"]  # NumPy: the sum of two arrays of any type
    command += ["--config-file=", "--no-error-summary", "--cache-dir", str(folder / ".mypy_cache")]
    modules = ("plans.py", "hooks.py")  # the GPU tests take what torch and FlashInfer are for Any
    files = [f"{case.package}/{module}" for case in found.values() for module in modules]
    return told(folder, *command, *files)


@pytest.mark.parametrize("name", CASES)
def test_formatted(
    name: str, packages: tuple[Path, dict[str, Case]], unformatted: dict[str, list[str]]
) -> None:
    found = unformatted.get(packages[1][name].package, [])
    if name in OTHER_SPECS:
        # The GPU tests write formulas out, however long these are.
        found = [place for place in found if not place.startswith("tests/")]
    assert found == []


@pytest.mark.parametrize("name", CASES)
def test_linted(
    name: str, packages: tuple[Path, dict[str, Case]], linted: dict[str, list[str]]
) -> None:
    assert linted.get(packages[1][name].package, []) == []


@pytest.mark.parametrize("name", CASES)
def test_typed(
    name: str, packages: tuple[Path, dict[str, Case]], typed: dict[str, list[str]]
) -> None:
    folder, found = packages
    package = found[name].package
    kernels = kernel_lines((folder / package / "plans.py").read_text())
    assert [said for said in typed.get(package, []) if said.split(": ")[0] not in kernels] == []


def kernel_lines(source: str) -> set[str]:
    """Where functions of Triton's language begin: their parameters have types of its own."""
    return {
        f"plans.py:{line}"
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef) and node.decorator_list
        for line in (node.decorator_list[0].lineno, node.lineno)
    }


def test_the_tools_see_what_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / "x.py").write_text("import os\ndef f(a): return a+undefined\n")
    assert told(tmp_path, "ruff", "format", "--isolated", "--diff", ".")["p"] == ["x.py"]
    checked = told(tmp_path, "ruff", "check", "--isolated", "--output-format", "concise", ".")
    assert any("F821" in line for line in checked["p"])


# -- rules of the emitted code, read from its syntax tree ---------------------------------------


@cache
def modules_of(version: str) -> dict[str, ast.Module]:
    rendered = render(shipped(), api_of(version))
    return {
        name: ast.parse(render_module(rendered, name, ("header",))) for name in ("plans", "hooks")
    }


@pytest.fixture(params=EVERY_API)
def release(request: pytest.FixtureRequest) -> tuple[PlanApi, dict[str, ast.Module]]:
    return api_of(request.param), modules_of(request.param)


def functions(module: ast.AST) -> dict[str, ast.FunctionDef]:
    """Every function and method, by name."""
    return {node.name: node for node in ast.walk(module) if isinstance(node, ast.FunctionDef)}


def owned(module: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Each node of each function, with the function's name."""
    for name, function in functions(module).items():
        for node in ast.walk(function):
            yield name, node


def names(module: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(module) if isinstance(node, ast.Name)}


def called(node: ast.AST) -> str:
    """`x.y` of a call `x.y(...)`, else nothing."""
    return ast.unparse(node.func) if isinstance(node, ast.Call) else ""


def test_the_private_call(release: tuple[PlanApi, dict[str, ast.Module]]) -> None:
    api, modules = release
    calls = [
        (name, node)
        for module in modules.values()
        for name, node in owned(module)
        if "_cached_module." in called(node)
    ]
    ((owner, call),) = calls
    assert owner == "_mlagen_call_planner"
    assert isinstance(call, ast.Call)
    holder = "wrapper" if api.holder == "wrapper" else "backend"
    method = f"{api.raw_module}.plan" if api.raw_module else api.call.method
    assert called(call) == f"{holder}._cached_module.{method}"
    expected = [text.format(holder, "pinned") for text in NINE]
    if api.call.takes_stream:
        expected.append("torch.cuda.current_stream(device).cuda_stream")
    assert [ast.unparse(argument) for argument in call.args] == expected
    assert not call.keywords


def test_the_private_call_is_in_the_device_where_it_takes_a_stream() -> None:
    planner = ast.unparse(functions(modules_of("0.2.3")["plans"])["_mlagen_call_planner"])
    assert "with wrapper.device as device:" in planner
    assert "with wrapper.device" not in ast.unparse(modules_of("0.2.5")["plans"])


def test_below_the_proxy_the_plan_is_copied_as_far_as_the_planner_wrote(
    release: tuple[PlanApi, dict[str, ast.Module]],
) -> None:
    api, modules = release
    planner = ast.unparse(functions(modules["plans"])["_mlagen_call_planner"])
    lines = [line.strip() for line in planner.splitlines()]
    call = "plan_info, used_bytes = backend._cached_module._module.plan("
    copy = "workspace[:pinned.numel()].copy_(pinned, non_blocking=True)"
    assert (copy in lines) == (api.raw_module is not None) == (api.holder == "planned_backend")
    if api.raw_module:
        (made,) = [number for number, line in enumerate(lines) if line.startswith(call)]
        assert lines[made + 1] == "if used_bytes > pinned.numel():"
        assert made < lines.index(copy)


def test_a_proxy_of_another_form_is_called_itself() -> None:
    rendered = render(shipped(), replace(STAGES, raw_module=None))
    text = render_module(rendered, "plans", ("header",))
    assert "plan_info, _ = backend._cached_module.plan_with_staged_workspace_bytes(" in text
    assert "backend._pin_memory_int_workspace_buffer," in text
    assert 'hasattr(backend._cached_module, "plan_with_staged_workspace_bytes")' in text
    assert "_MlagenStaging" not in text


def test_a_plan_inside_a_capture_is_refused_first(
    release: tuple[PlanApi, dict[str, ast.Module]],
) -> None:
    planner = functions(release[1]["plans"])["_mlagen_call_planner"]
    first = planner.body[1]  # behind the docstring
    assert isinstance(first, ast.If)
    assert ast.unparse(first.test) == "torch.cuda.is_current_stream_capturing()"
    assert isinstance(first.body[-1], ast.Raise)


def test_each_plan_takes_a_slot_of_the_stream_that_its_copy_is_queued_on(
    release: tuple[PlanApi, dict[str, ast.Module]],
) -> None:
    api, modules = release
    planner = ast.unparse(functions(modules["plans"])["_mlagen_call_planner"])
    device = "wrapper.device" if api.holder == "wrapper" else "workspace.device"
    holder = "wrapper" if api.holder == "wrapper" else "backend"
    assert f"pinned = _mlagen_staging({device}, {holder}._plan_info).take()" in planner
    staging = functions(modules["plans"])["_mlagen_staging"]
    assert "torch._C._cuda_getCurrentRawStream(device.index)" in ast.unparse(staging)
    take = functions(modules["plans"])["take"]
    assert "copied.record(torch.cuda.current_stream(self.device))" in ast.unparse(take)


def test_nothing_of_the_other_holder(release: tuple[PlanApi, dict[str, ast.Module]]) -> None:
    api, modules = release
    text = "".join(ast.unparse(module) for module in modules.values())
    if api.holder == "wrapper":
        # Only asked for, to step back where it is there: see test_patched.
        assert text.count("_planned_backend") == 1
        assert "hasattr(wrapper, '_planned_backend')" in text
    else:
        # An eager plan replaces the object, so nobody keeps it: looked up in each function.
        for module in modules.values():
            for name, function in functions(module).items():
                body = ast.unparse(function)
                if re.search(r"\bbackend\._", body):
                    assert "backend = wrapper._planned_backend" in body, name
        assert "self._planned_backend" not in text


#: What a plan leaves: attribute -> value. Eager plans leave also what a graph has frozen.
GRAPH_STATE = {
    "_causal": "{causal}",
    "_page_size": "shape.page_size",
    "_sm_scale": "shape.sm_scale",
    "_plan_info": "plan_info",
}
EAGER_STATE = {
    **GRAPH_STATE,
    "_kv_indices_buf": "arrays.kv_indices",
    "_planned_query_shape": "(int(request.qo_indptr[-1]), shape.num_heads)",
    "_planned_kv_page_range": "(0, 0)",
}
#: The same for every plan of one shape: the first plan, FlashInfer's own, left it.
BY_SHAPE = {"_q_data_type", "_kv_data_type", "_head_dim_ckv", "_use_profiler"}


def assigned(function: ast.FunctionDef, holder: str) -> list[tuple[str, str]]:
    """(attribute, value) of each assignment to an attribute of `holder`, in order."""
    return [
        (target.attr, ast.unparse(node.value))
        for node in ast.walk(function)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Attribute) and ast.unparse(target.value) == holder
    ]


def test_only_state_that_run_reads_is_written(
    release: tuple[PlanApi, dict[str, ast.Module]],
) -> None:
    api, modules = release
    holder = "wrapper" if api.holder == "wrapper" else "backend"
    read = {attribute.name for attribute in api.run_state}
    assert read <= EAGER_STATE.keys() | BY_SHAPE
    emitted = functions(modules["plans"])
    for variant in shipped().variants:
        of = names_of(variant)
        for name, state in ((of.plan, GRAPH_STATE), (of.plan_eager, EAGER_STATE)):
            if name not in emitted:
                continue
            expected = {
                attribute: value.format(causal=variant.causal)
                for attribute, value in state.items()
                if attribute in read
            }
            found = assigned(emitted[name], holder)
            assert dict(found) == {
                **expected,
                **(
                    {"mlagen_shape": "shape"} if (holder, state) == ("wrapper", EAGER_STATE) else {}
                ),
            }
            assert len(found) == len(dict(found)), f"{name} assigns one twice"
            written = {attribute for attribute, _ in found} - {"mlagen_shape"}
            assert written <= read


def test_no_other_function_writes_state(release: tuple[PlanApi, dict[str, ast.Module]]) -> None:
    _, modules = release
    planners = {
        name for v in shipped().variants for name in (names_of(v).plan, names_of(v).plan_eager)
    }
    for module in modules.values():
        for name, function in functions(module).items():
            if name in planners:
                continue
            for holder in ("wrapper", "backend"):
                written = {attribute for attribute, _ in assigned(function, holder)}
                assert written <= {"mlagen_request"}, name


#: Where a method that waits for the GPU, or reads it, may be called, and why.
MAY_WAIT = {
    ("_mlagen_host_lens", "to"),  # class 1: no host lengths were given; counted and logged
    ("_mlagen_formula_differs", "to"),  # at capture
    ("_mlagen_formula_differs", "tolist"),
    ("_free_tray", "synchronize"),  # the ring is at its cap; counted and logged
}
#: `numpy` is none: of a tensor on the device it raises.
WAITS = {"item", "cpu", "tolist", "synchronize", "to", "wait", "nonzero"}


def test_nothing_waits_but_where_it_is_meant_to(
    release: tuple[PlanApi, dict[str, ast.Module]],
) -> None:
    seen = set()
    for module in release[1].values():
        raised = {
            inner
            for node in ast.walk(module)
            if isinstance(node, ast.Raise)
            for inner in ast.walk(node)
        }
        for name, node in owned(module):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            method = node.func.attr
            if method not in WAITS or node in raised:
                continue  # an error text may read what it likes: host arrays
            assert (name, method) in MAY_WAIT, f"line {node.lineno}: {ast.unparse(node)}"
            seen.add((name, method))
    assert seen >= {("_mlagen_host_lens", "to"), ("_mlagen_formula_differs", "to")}


def test_int_is_taken_of_host_values_alone(
    release: tuple[PlanApi, dict[str, ast.Module]],
) -> None:
    """int(tensor) waits too: its argument is an array of the request or another of NumPy's, or
    plan_info."""
    host = re.compile(
        r"(request\.\w+|plan_info|qo_indptr\[-1\]|.*query_lens\b.*|kv_len_of\(np\.zeros\()"
    )
    for module in release[1].values():
        for name, node in owned(module):
            if called(node) == "int" and isinstance(node, ast.Call):
                text = ast.unparse(node.args[0])
                assert host.match(text), f"{name}: int({text})"


def test_no_loop_over_the_batch(release: tuple[PlanApi, dict[str, ast.Module]]) -> None:
    for module in release[1].values():
        for name, node in owned(module):
            if isinstance(node, ast.For):
                assert isinstance(node.iter, ast.Tuple), name
            elif isinstance(node, ast.comprehension):
                over = ast.unparse(node.iter)
                assert re.match(r"range\((\d+, \d+|self\.SLOTS|\d+|len\(offsets\) - 1)\)$", over), (
                    over
                )
            else:
                assert not isinstance(node, ast.While), name


def test_no_bag_of_arguments_and_no_assert(
    release: tuple[PlanApi, dict[str, ast.Module]],
) -> None:
    for module in release[1].values():
        for node in ast.walk(module):
            assert not isinstance(node, (ast.Assert, ast.Global, ast.Nonlocal, ast.Lambda))
            if isinstance(node, ast.FunctionDef):
                assert node.args.kwarg is None
                assert node.args.vararg is None
            if isinstance(node, ast.Call):
                assert all(keyword.arg is not None for keyword in node.keywords)
                assert not any(isinstance(argument, ast.Starred) for argument in node.args)
            if isinstance(node, ast.ExceptHandler):
                raise AssertionError("emitted code catches nothing")


def signatures(modules: dict[str, ast.Module]) -> dict[str, list[str]]:
    """The parameters of each emitted function; for an emitted dataclass None of them."""
    found: dict[str, list[str]] = {}
    for module in modules.values():
        for node in module.body:
            if isinstance(node, ast.FunctionDef):
                found[node.name] = [arg.arg for arg in node.args.args]
            elif isinstance(node, ast.ClassDef):
                found[node.name] = []
    return found


def swapped(tree: ast.AST, emitted: dict[str, list[str]]) -> list[str]:
    """Calls of emitted functions by position in which an argument has the name of another
    parameter, or which could take one for the other: a dataclass is always made by keyword."""
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
            continue
        parameters = emitted.get(node.func.id)
        if parameters is None:
            continue
        if node.func.id in ("MlagenArrays", "MlagenShape", "MlagenRequest") and node.args:
            found.append(ast.unparse(node))
        for argument, parameter in zip(node.args, parameters, strict=False):
            name = ast.unparse(argument).rpartition(".")[2]
            if name != parameter and name in parameters:
                found.append(f"{name} for {parameter}: {ast.unparse(node)}")
    return found


def test_no_argument_stands_in_for_another(
    release: tuple[PlanApi, dict[str, ast.Module]],
) -> None:
    emitted = signatures(release[1])
    for module in release[1].values():
        assert swapped(module, emitted) == []


@pytest.mark.parametrize("shape", ["pair", "shared-apply", "upstream-keyword-only", "old-pair"])
def test_no_argument_stands_in_for_another_at_the_edit_sites(shape: str) -> None:
    emitted = signatures(modules_of("0.6.17"))
    patched = prepare(FoundTarget(before(shape), "x.py", None), shipped(), api_of("0.6.17"))
    tree = ast.parse(patched.patched)
    assert swapped(tree, emitted) == []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            parameters = emitted.get(node.func.id, [])
            given = [keyword.arg for keyword in node.keywords]
            if parameters and node.func.id.startswith("mlagen_"):
                assert len(node.args) + len(given) <= len(parameters)
                assert set(given) <= set(parameters[len(node.args) :])


def test_a_swapped_argument_is_seen() -> None:
    emitted = {"f": ["wrapper", "seq_lens", "seq_lens_cpu"]}
    assert swapped(ast.parse("f(w, batch.seq_lens, batch.seq_lens_cpu)"), emitted) == []
    assert len(swapped(ast.parse("f(w, batch.seq_lens_cpu, batch.seq_lens)"), emitted)) == 2


def test_docstrings(release: tuple[PlanApi, dict[str, ast.Module]]) -> None:
    for module in release[1].values():
        assert ast.get_docstring(module)
        for node in module.body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name != "_MlagenTray":
                doc = ast.get_docstring(node)
                assert doc, node.name
                assert doc.split("\n")[0].endswith("."), f"{node.name}: {doc}"


def test_docstrings_say_the_lengths(release: tuple[PlanApi, dict[str, ast.Module]]) -> None:
    emitted = functions(release[1]["plans"])
    for variant in shipped().variants:
        of = names_of(variant)
        for name in (of.plan, of.plan_eager):
            if name in emitted:
                doc = " ".join((ast.get_docstring(emitted[name]) or "").split())
                assert f"Query tokens a request: {variant.tokens.describe()}." in doc
                assert f"KV lengths: {variant.kv_len.describe()}." in doc
                assert variant.doc in doc


@pytest.mark.parametrize("version", EVERY_API)
def test_lines_are_as_wide_as_sglangs(version: str) -> None:
    rendered = render(shipped(), api_of(version))
    for fragment in rendered.fragments:
        for line in fragment.text.split("\n"):
            assert len(line) <= 88, line


@pytest.mark.parametrize("name", [name for name in CASES if name not in OTHER_SPECS])
def test_lines_of_files_are_too(name: str, packages: tuple[Path, dict[str, Case]]) -> None:
    """Comments and docstrings, which no formatter breaks; not what is said of the sources above
    all. Other specs have formulas that are as long as they are."""
    folder = packages[0] / packages[1][name].package
    for path in folder.rglob("*.py"):
        for line in path.read_text("utf-8").split("\n"):
            assert len(line) <= 88 or line.startswith("# "), f"{path.name}: {line}"


def test_the_planner_says_where_it_was_read() -> None:
    api = api_of("0.6.17")
    doc = ast.get_docstring(functions(modules_of("0.6.17")["plans"])["_mlagen_call_planner"])
    assert doc is not None
    assert str(api.call.place) in doc
    assert "0.6.17" in doc


def test_an_unknown_version_is_said() -> None:
    rendered = render(shipped(), replace(COPIES, version=None))
    text = render_module(rendered, "plans", ())
    assert "None" not in text.split("def _mlagen_call_planner")[1].split('"""')[1]


# -- drift --------------------------------------------------------------------------------------


def test_state_that_mlagen_does_not_know_is_drift() -> None:
    place = Place("flashinfer/mla/_core.py", 77)
    more = (
        StateAttribute("_mask_mode", "mask_mode", place),
        StateAttribute("_split", "self._split_of(kv_len)", place),
    )
    with pytest.raises(DriftError) as caught:
        render(shipped(), replace(COPIES, run_state=(*COPIES.run_state, *more)))
    known = (
        "_causal, _head_dim_ckv, _kv_data_type, _kv_indices_buf, _page_size, _plan_info, "
        "_planned_kv_page_range, _planned_query_shape, _q_data_type, _sm_scale, _use_profiler"
    )
    hint = (
        "a plan that leaves it stale computes with the last plan's value: teach codegen/render.py "
        "how to set it, or try --allow-unknown"
    )
    assert str(caught.value) == (
        f"flashinfer/mla/_core.py:77: unknown-state: plan() sets _mask_mode = mask_mode and run() "
        f"reads it; expected only {known}\n    hint: {hint}\n"
        f"flashinfer/mla/_core.py:77: unknown-state: plan() sets _split = self._split_of(kv_len) "
        f"and run() reads it; expected only {known}\n    hint: {hint}"
    )
    assert caught.value.exit_code == 4


# -- variants -----------------------------------------------------------------------------------


def defined(rendered: Rendered) -> set[str]:
    return {name for fragment in rendered.fragments for name in fragment.defines}


def test_a_sixth_variant() -> None:
    spec = spec_of(SIXTH, entry("verify", *VERIFY))
    rendered = render(spec, COPIES)
    assert {
        "mlagen_plan_verify_sharded",
        "mlagen_plan_verify_sharded_eager",
        "mlagen_kv_len_verify_sharded",
    } <= defined(rendered)
    text = render_module(rendered, "plans", ())
    assert (
        "def mlagen_kv_len_verify_sharded(\n"
        "    seq_lens: np.ndarray, draft_token_num: int, dcp_size: int, dcp_rank: int\n"
        ") -> np.ndarray:\n" in text
    )
    patch = prepare(FoundTarget(before("upstream"), "x.py", None), spec, COPIES)
    assert patch.target.absent == {
        "verify-sharded": "no edit site serves it: rendered in generated/ only"
    }
    assert b"verify_sharded(" not in patch.patched


def copies(function: ast.FunctionDef) -> set[str]:
    """The attributes that `function` copies into."""
    found = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and called(node).endswith(".copy_"):
            match = re.match(r"(?:wrapper|backend)\.(\w+)", called(node))
            assert match
            assert [keyword.arg for keyword in node.keywords] == ["non_blocking"]
            found.add(match[1])
    return found


BUFFERS = {
    "kv_indices": "_kv_indices_buf",
    "qo_indptr": "_qo_indptr_buf",
    "kv_indptr": "_kv_indptr_buf",
    "kv_len": "_kv_len_arr_buf",
}


@pytest.mark.parametrize("api", [COPIES, STAGES], ids=["0.6.17", "0.7.2"])
@pytest.mark.parametrize("size", range(5))
def test_a_replay_copies_what_the_variant_refreshes(api: PlanApi, size: int) -> None:
    for chosen in combinations(MIRRORS, size):
        rendered = render(spec_of(entry("verify", *VERIFY, refresh=", ".join(chosen))), api)
        emitted = functions(ast.parse(render_module(rendered, "plans", ())))
        asked = {BUFFERS[name] for name in chosen}
        assert copies(emitted["mlagen_plan_verify"]) == asked
        eager = emitted["mlagen_plan_verify_eager"]
        assert copies(eager) == set()
        holder = "wrapper" if api is COPIES else "backend"
        bound = [name for name, _ in assigned(eager, holder) if name in BUFFERS.values()]
        assert sorted(bound) == sorted(asked | {"_kv_indices_buf"})
        doc = ast.get_docstring(emitted["mlagen_plan_verify"]) or ""
        assert f"Refreshes {', '.join(chosen) or 'no bound buffer'}." in doc


@pytest.mark.parametrize("gone", [variant.name for variant in shipped().variants])
def test_a_variant_that_is_gone_takes_its_functions_along(gone: str) -> None:
    (variant,) = [v for v in shipped().variants if v.name == gone]
    rest = select(shipped(), [v.name for v in shipped().variants if v.name != gone])
    names_gone = set(vars(names_of(variant)).values())
    names_gone.add({"verify": "mlagen_capture_verify", "draft-extend": "mlagen_request_extend",
                    "draft-decode": "mlagen_request_draft_eager"}.get(gone, ""))  # fmt: skip
    full = render(shipped(), COPIES)
    rendered = render(rest, COPIES)
    assert names_gone & defined(full)
    assert not names_gone & defined(rendered)
    for fragment in rendered.fragments:
        assert not names_gone - {""} & fragment.words, fragment.name
    # What is left is as it was, but for the fragments that name variants.
    texts = {fragment.text for fragment in full.fragments}
    changed = {f.name for f in rendered.fragments if f.text not in texts}
    assert changed <= {"decode", "foreign_input", *({"types"} if gone == "verify" else ())}


@pytest.mark.parametrize(
    "function",
    ["MlagenRequest", "_mlagen_note", "mlagen_request_decode", "torch", "partial", "logging",
     "mlagen_kv_len_verify", "FlashInferMLAAttnBackend", "fast_mla_prefill_plan"],
)  # fmt: skip
def test_a_function_name_that_is_taken_is_refused(function: str) -> None:
    with pytest.raises(SpecError) as caught:
        render(
            spec_of(
                entry("verify", *VERIFY, function=function),
                entry("decode", "decode", "replay", "1", "seq_lens", causal=False),
            ),
            COPIES,
        )
    assert caught.value.exit_code == 3
    assert function in str(caught.value)


def test_two_variants_whose_functions_meet_are_refused() -> None:
    entries = (
        entry("verify", *VERIFY, function="plan_it"),
        entry(
            "decode", "decode", "replay", "1", "seq_lens", causal=False, function="plan_it_eager"
        ),
    )
    with pytest.raises(SpecError, match="plan_it_eager"):
        render(spec_of(*entries), COPIES)


# -- planned on the GPU -------------------------------------------------------------------------

#: What is there for variants that the GPU plans alone, and what is written otherwise for them.
DEVICE_FRAGMENTS = {"device_kernel", "device", "onto_device", "record"}
OTHERWISE = {"bound", "types", "decode", "verify"}


def fragments_of(rendered: Rendered) -> dict[str, str]:
    return {fragment.name: fragment.text for fragment in rendered.fragments}


@pytest.mark.parametrize("version", GPU_APIS)
def test_the_gpu_adds_its_own_functions_and_changes_few(version: str) -> None:
    host = fragments_of(render(shipped(), api_of(version)))
    device = fragments_of(render(device_spec(), api_of(version)))
    assert device.keys() - host.keys() == DEVICE_FRAGMENTS
    assert host.keys() <= device.keys()
    assert {name for name in host if host[name] != device[name]} == OTHERWISE
    # Lines are added; what the host does is as it was.
    for name in OTHERWISE - {"bound", "verify"}:
        rest = iter(device[name].splitlines())
        assert all(line in rest for line in host[name].splitlines()), name


@pytest.mark.parametrize("version", EVERY_API)
def test_nothing_of_it_where_the_host_plans(version: str) -> None:
    rendered = render(shipped(), api_of(version))
    assert not DEVICE_FRAGMENTS & fragments_of(rendered).keys()
    for module in ("plans", "hooks"):
        text = render_module(rendered, module, ())
        assert "triton" not in text
        assert not re.search(r"request\.device\b|MlagenDevice|max_seq_len", text)
    # A choice that no captured graph comes of is none.
    only = select(device_spec(), ["draft-extend", "dcp"])
    assert not DEVICE_FRAGMENTS & fragments_of(render(only, api_of(version))).keys()


@pytest.mark.parametrize("version", GPU_APIS)
def test_triton_is_imported_where_the_kernel_is(version: str) -> None:
    for spec in (shipped(), device_spec()):
        rendered = render(spec, api_of(version))
        for module in ("plans", "hooks"):
            imported = {
                alias.name
                for node in ast.parse(render_module(rendered, module, ())).body
                if isinstance(node, ast.Import)
                for alias in node.names
            }
            kernel = spec is device_spec() and module == "plans"
            assert {"triton", "triton.language"} & imported == (
                {"triton", "triton.language"} if kernel else set()
            )


@pytest.mark.parametrize("api", [COPIES, STAGES], ids=["0.6.17", "0.7.2"])
@pytest.mark.parametrize("served", ON_GPU)
def test_hooks_ask_for_what_the_gpu_needs(api: PlanApi, served: str) -> None:
    """The longest context, and lengths on the device; the plan of one kind brings no other's."""
    hooks = functions(ast.parse(render_module(render(spec_of(ON_GPU[served]), api), "hooks", ())))
    verify = served == "verify"
    capture = hooks["mlagen_capture_verify" if verify else "mlagen_capture_decode"]
    assert "max_seq_len" in [argument.arg for argument in capture.args.args]
    assert ("mlagen_bound_arrays" in hooks) == verify
    request = hooks["mlagen_request_verify" if verify else "mlagen_request_decode"]
    text = ast.unparse(request)
    # Asked ahead of the host lengths, which may be absent then.
    assert text.index("request.device.plan(seq_lens)") < text.index("_mlagen_host_lens(")


@pytest.mark.parametrize("version", ["0.6.17", "0.7.2"])
def test_what_a_file_has_no_use_for_is_left_out(version: str) -> None:
    """Whole functions, and what of others is about them alone."""
    api = api_of(version)
    host, device = (
        render(shipped(), api, in_place=False),
        render(device_spec(), api, recorded=False),
    )
    assert fragments_of(render(shipped(), api)).keys() - fragments_of(host).keys() == {"bound"}
    assert fragments_of(render(device_spec(), api)).keys() - fragments_of(device).keys() == {
        "record"
    }
    for rendered, gone in (
        (host, ("illed in place", "bound:", "with_bound")),
        (device, ("record_plan",)),
    ):
        for name, text in fragments_of(rendered).items():
            assert not any(word in text for word in gone), name


def test_one_kernel_for_all_eras() -> None:
    """It writes what the kernels of FlashInfer read, which have been the same."""
    kernels = {fragments_of(render(device_spec(), api_of(v)))["device_kernel"] for v in GPU_APIS}
    assert len(kernels) == 1


@pytest.mark.parametrize("version", ["0.6.17", "0.7.2"])
def test_a_patch_takes_the_kernel_where_a_hook_needs_it(version: str) -> None:
    rendered = render(device_spec(), api_of(version))
    for name, needed in (
        ("mlagen_capture_decode", DEVICE_FRAGMENTS - {"record"}),
        ("mlagen_capture_verify", DEVICE_FRAGMENTS - {"record"}),
        ("mlagen_record_plan", {"record"}),
        # Its type names the class, and the class the kernel.
        ("MlagenRequest", {"device", "device_kernel"}),
        ("MlagenPlanError", set()),
        ("_mlagen_plan_kernel", {"device_kernel"}),
    ):
        taken = {fragment.name for fragment in rendered.needed_by([name])}
        assert taken & DEVICE_FRAGMENTS == needed, name
    host = render(shipped(), api_of(version))
    assert not DEVICE_FRAGMENTS & {f.name for f in host.needed_by(defined(host))}


def test_nothing_waits_for_a_plan_on_the_gpu() -> None:
    """What is launched or recorded at a replay, and what may raise there."""
    for version in GPU_APIS:
        rendered = render(device_spec(), api_of(version))
        texts = fragments_of(rendered)
        for name in ("device", "onto_device", "record"):
            for node in ast.walk(ast.parse(texts[name])):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                    assert node.func.attr not in WAITS, ast.unparse(node)
                assert not isinstance(node, (ast.Lambda, ast.ExceptHandler, ast.Global))


@pytest.mark.parametrize("shape", ["pair", "shared-apply", "upstream-keyword-only", "old-pair"])
@pytest.mark.parametrize("version", ["0.6.17", "0.7.2"])
def test_no_argument_stands_in_for_another_on_the_gpu(shape: str, version: str) -> None:
    rendered = render(device_spec(), api_of(version))
    modules = {n: ast.parse(render_module(rendered, n, ())) for n in ("plans", "hooks")}
    emitted = signatures(modules)
    patched = prepare(FoundTarget(before(shape), "x.py", None), device_spec(), api_of(version))
    for tree in (*modules.values(), ast.parse(patched.patched)):
        assert swapped(tree, emitted) == []
    for node in ast.walk(ast.parse(patched.patched)):
        if not isinstance(node, ast.Call):
            continue
        parameters = emitted.get(called(node), [])
        if parameters and called(node).startswith("mlagen_"):
            given = [keyword.arg for keyword in node.keywords]
            assert len(node.args) + len(given) <= len(parameters)
            assert set(given) <= set(parameters[len(node.args) :])


# -- modules and fragments ----------------------------------------------------------------------


@pytest.mark.parametrize("version", RELEASES)
def test_modules_hold_the_fragments_verbatim(version: str) -> None:
    rendered = render(shipped(), api_of(version))
    for module in ("plans", "hooks"):
        text = render_module(rendered, module, ("one", "two"))
        assert text.startswith("# one\n# two\n")
        assert text.endswith("\n")
        assert not text.endswith("\n\n")
        position = 0
        for fragment in rendered.fragments:
            if fragment.module == module:
                position = text.index(f"\n\n\n{fragment.text}\n", position)
    assert {fragment.module for fragment in rendered.fragments} == {"plans", "hooks"}


def test_every_name_is_defined_once() -> None:
    for version in EVERY_API:
        rendered = render(shipped(), api_of(version))
        bound = [name for fragment in rendered.fragments for name in fragment.defines]
        assert len(bound) == len(set(bound))
        tree = ast.parse("\n\n\n".join(fragment.text for fragment in rendered.fragments))
        defs = {n.name for n in tree.body if isinstance(n, (ast.FunctionDef, ast.ClassDef))}
        assert defs <= set(bound)


def test_needed_by_follows_names() -> None:
    fragments = (
        Fragment("a", "plans", "def a():\n    return b()"),
        Fragment("b", "plans", "def b():\n    return c_of[0]"),
        Fragment("c", "plans", "c_of: dict[int, int] = {}"),
        Fragment("d", "plans", "def d():\n    return a()"),
    )
    rendered = Rendered(fragments, COPIES, shipped())
    assert [f.name for f in rendered.needed_by(["a"])] == ["a", "b", "c"]
    assert [f.name for f in rendered.needed_by(["c_of", "unknown"])] == ["c"]
    assert rendered.needed_by([]) == ()


def test_import_lines_are_sorted() -> None:
    names_of_all = ["torch", "Optional", "partial", "Any", "logging", "dataclass"]
    assert import_lines(names_of_all) == (
        "import logging",
        "import torch",
        "from dataclasses import dataclass",
        "from functools import partial",
        "from typing import Any, Optional",
    )
    assert import_lines([]) == ()


def test_a_render_is_the_same_twice() -> None:
    for api in (COPIES, STAGES):
        assert generate(shipped(), api).files == generate(shipped(), api).files


@pytest.mark.parametrize(("one", "other"), [("0.7.1", "0.7.2"), ("0.6.14", "0.6.17")])
def test_releases_of_one_api_differ_in_where_it_was_read(one: str, other: str) -> None:
    texts = [render(shipped(), api_of(version)).fragments for version in (one, other)]
    changed = {a.name for a, b in zip(*texts, strict=True) if a.text != b.text}
    assert changed <= {"planner"}


def test_generated_is_current() -> None:
    folder = Path(__file__).resolve().parents[1] / "generated"
    manifest = manifest_of(folder)
    assert manifest.flashinfer is not None
    generated = generate(shipped(), api_of(manifest.flashinfer))
    assert differing(generated, folder) == ()
    there = [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    assert {path.relative_to(folder).as_posix() for path in there} == set(generated.files)
    assert json.loads(generated.files[MANIFEST])["spec"] == shipped().digest
    for name, data in generated.files.items():
        if name.endswith(".py"):
            assert data.startswith(b"# @generated by mlagen")
