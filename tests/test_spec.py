"""codegen/spec.py: the shipped file, the schema, and every error where it stands.

Error texts are snapshots: errors/<case>.yaml gives errors/<case>.txt. To write them anew, set
MLAGEN_UPDATE_SNAPSHOTS=1, and read the difference.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from mlagen.codegen import spec as spec_module
from mlagen.codegen.errors import SpecError
from mlagen.codegen.fork import ANCHORS
from mlagen.codegen.formula import LENGTHS, Formula, parse
from mlagen.codegen.spec import (
    FILE_NAME,
    SCHEMA_NAME,
    Spec,
    Variant,
    device_variants,
    json_schema,
    load_spec,
    read_spec,
    schema_text,
    shipped_spec,
    spec_above,
    unsupported,
)
from mlagen.codegen.spec_model import (
    Buffer,
    Entry,
    Guard,
    Planner,
    Serves,
    SpecFile,
    When,
    default_function,
)

ERRORS = Path(__file__).parent / "errors"
CASES = sorted(path.stem for path in ERRORS.glob("*.yaml"))

DECODE = """\
version: 1
variants:
  decode:
    serves: decode
    when: [replay]
    tokens: 1
    kv_len: seq_lens
    causal: false
    refresh: []
    guards: []
"""


def load(text: str) -> Spec:
    return read_spec(text.encode(), Path("a.yaml"))


def problems(text: str) -> list[tuple[int, int, str]]:
    with pytest.raises(SpecError) as caught:
        load(text)
    return [(p.line, p.column, p.code) for p in caught.value.problems]


# --- the shipped file ------------------------------------------------------------------------


def test_shipped_variants() -> None:
    spec = load_spec(shipped_spec())
    rows = {
        variant.name: (
            variant.serves,
            variant.when,
            variant.tokens.text,
            variant.kv_len.text,
            variant.causal,
            variant.refresh,
            variant.context_parallel,
        )
        for variant in spec.variants
    }
    share = "(seq_lens + dcp_size - 1 - dcp_rank) // dcp_size"
    assert rows == {
        "decode": ("decode", ("replay",), "1", "seq_lens", False, (), False),
        "draft-decode": (
            "draft-decode",
            ("replay", "eager"),
            "1",
            "seq_lens + draft_step + 1",
            False,
            (),
            False,
        ),
        "verify": (
            "target-verify",
            ("replay", "eager"),
            "draft_token_num",
            "seq_lens + draft_token_num",
            True,
            ("kv_indices",),
            False,
        ),
        "draft-extend": (
            "draft-extend",
            ("eager",),
            "extend_seq_lens",
            "seq_lens",
            True,
            (),
            False,
        ),
        "dcp": ("decode", ("replay",), "1", share, False, (), True),
    }
    assert all(variant.planner == "host" for variant in spec.variants)
    assert [variant.function for variant in spec.variants] == [
        "mlagen_plan_decode",
        "mlagen_plan_draft_decode",
        "mlagen_plan_verify",
        "mlagen_plan_draft_extend",
        "mlagen_plan_dcp",
    ]
    assert unsupported(spec) == ()


def test_shipped_guards() -> None:
    guards = {v.name: set(v.guards) for v in load_spec(shipped_spec()).variants}
    # The bound of items and the back end concern every host plan.
    assert all(kept >= {"fa-back-end", "work-items-fit"} for kept in guards.values())
    assert {"owned-input", "uniform-tokens", "tile-divides-heads"} <= guards["verify"]
    # What a variant gets wrong under context parallelism it leaves to the stock plan.
    outside = {name for name, kept in guards.items() if "no-context-parallel" in kept}
    assert outside == {"decode", "draft-decode", "verify"}


def test_source_digest_and_places() -> None:
    path = shipped_spec()
    spec = load_spec(path)
    data = path.read_bytes()
    assert spec.source == path
    assert spec.digest == hashlib.sha256(data).hexdigest()
    lines = data.decode().splitlines()
    for key, (line, column) in spec.places.items():
        rest = lines[line - 1][column - 1 :]
        variant, _, field = key.partition(".")
        assert rest.startswith(f"{variant}:") or (field and rest), key
    line, column = spec.places["verify.kv_len"]
    assert lines[line - 1][column - 1 :] == "seq_lens + draft_token_num"


def test_shipped_comments_name_everything_a_sixth_variant_may_use() -> None:
    comments = shipped_spec().read_text()
    for field in Entry.model_fields:
        assert re.search(rf"^#   {field} ", comments, re.MULTILINE), field
    for name in get_args(Serves):
        assert name in comments
    for name in LENGTHS:
        assert re.search(rf"^#   {name} ", comments, re.MULTILINE), name


def test_a_sixth_variant() -> None:
    text = shipped_spec().read_text() + (
        "\n  decode-eager:\n    serves: decode\n    when: [eager]\n    tokens: 1\n"
        "    kv_len: seq_lens\n    causal: false\n    refresh: [kv_len, kv_indices]\n"
        "    guards: []\n    function: plan_decode_eager\n    doc: >\n      Two\n      lines.\n"
    )
    sixth = load(text).variants[-1]
    assert str(sixth) == "decode-eager"
    assert sixth.function == "plan_decode_eager"
    assert sixth.refresh == ("kv_len", "kv_indices")
    assert sixth.doc == "Two lines."


# --- the schema ------------------------------------------------------------------------------


def test_committed_schema_is_current() -> None:
    committed = Path(spec_module.__file__).with_name(SCHEMA_NAME)
    assert committed.read_text(encoding="utf-8") == schema_text(), (
        "run: mlagen schema > codegen/variants.schema.json"
    )


def test_shipped_file_points_at_the_schema() -> None:
    path = shipped_spec()
    first = path.read_text().splitlines()[0]
    assert first == "# yaml-language-server: $schema=./codegen/variants.schema.json"
    target = path.parent / first.partition("$schema=")[2]
    assert json.loads(target.read_text(encoding="utf-8")) == json_schema()


def fits(value: Any, schema: dict[str, Any], root: dict[str, Any]) -> bool:
    """The few JSON Schema keywords that the schema uses."""
    if "$ref" in schema:
        name = schema["$ref"].removeprefix("#/$defs/")
        return fits(value, root["$defs"][name], root)
    if "anyOf" in schema:
        return any(fits(value, option, root) for option in schema["anyOf"])
    kinds = {"object": dict, "array": list, "string": str, "boolean": bool, "integer": int}
    if not isinstance(value, kinds[schema["type"]]):
        return False
    if isinstance(value, bool) and schema["type"] == "integer":
        return False
    if "const" in schema and value != schema["const"]:
        return False
    if "enum" in schema and value not in schema["enum"]:
        return False
    if isinstance(value, int) and not isinstance(value, bool):
        return value >= schema.get("minimum", value)
    if isinstance(value, str):
        inside = schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", len(value))
        return inside and re.search(schema.get("pattern", ""), value) is not None
    if isinstance(value, list):
        unique = len({str(item) for item in value}) == len(value)
        return (
            len(value) >= schema.get("minItems", 0)
            and (unique or not schema.get("uniqueItems"))
            and all(fits(item, schema["items"], root) for item in value)
        )
    if isinstance(value, dict):
        if not set(schema.get("required", ())) <= set(value):
            return False
        if len(value) < schema.get("minProperties", 0):
            return False
        for key, item in value.items():
            found = [s for p, s in schema.get("patternProperties", {}).items() if re.search(p, key)]
            found += [schema["properties"][key]] if key in schema.get("properties", {}) else []
            if not found or not all(fits(item, s, root) for s in found):
                return False
    return True


def test_shipped_file_fits_the_schema() -> None:
    schema = json_schema()
    data = yaml.safe_load(shipped_spec().read_text())
    assert fits(data, schema, schema)
    data["variants"]["verify"]["serves"] = "verify"
    assert not fits(data, schema, schema)


@pytest.mark.parametrize(
    "case",
    [
        "duplicate_keys",  # the last one wins in safe_load, and is no full variant
        "fork",
        "fork_empty",
        "fork_no_mapping",
        "fork_without_anchors",
        "list",
        "missing_keys",
        "no_variants",
        "unknown_keys",
        "values",
        "wrong_types",
    ],
)
def test_the_schema_refuses_what_an_editor_can_see(case: str) -> None:
    text = (ERRORS / f"{case}.yaml").read_text()
    if case == "unknown_keys":
        text = text.replace("    ? [a, b]\n    : 1\n", "").replace("    <<: {}\n", "")
    schema = json_schema()
    assert not fits(yaml.safe_load(text), schema, schema)


def test_the_schema_describes_every_key() -> None:
    schema = json_schema()
    entry = schema["$defs"]["Entry"]
    assert set(entry["properties"]) == set(Entry.model_fields)
    for properties in (schema["properties"], entry["properties"]):
        assert all(len(field["description"]) > 15 for field in properties.values())
    assert schema["additionalProperties"] is False
    assert entry["additionalProperties"] is False
    assert schema["properties"]["variants"]["additionalProperties"] is False


def test_a_fork_fits_the_schema() -> None:
    text = DECODE + "fork:\n  anchors:\n    backend-class: Mine\n    decode-metadata: graphs\n"
    schema = json_schema()
    assert fits(yaml.safe_load(text), schema, schema)
    assert load(text).anchors == {"backend-class": "Mine", "decode-metadata": "graphs"}
    anchors = schema["$defs"]["Fork"]["properties"]["anchors"]
    assert set(anchors["properties"]) == set(ANCHORS)
    assert anchors["additionalProperties"] is False
    for name, anchor in anchors["properties"].items():
        assert ANCHORS[name].meaning in anchor["description"]


@pytest.mark.parametrize("name", ["class", "a.b", "1st", "", "FlashInferMLAAttnBackend", "x" * 81])
def test_a_name_that_is_none(name: str) -> None:
    text = f"{DECODE}fork:\n  anchors:\n    backend-class: {name!r}\n"
    assert problems(text) == [(13, 20, "anchor-name")]


# --- the models ------------------------------------------------------------------------------

ENTRY: dict[str, Any] = {
    "serves": "decode",
    "when": ("replay",),
    "tokens": 1,
    "kv_len": "seq_lens",
    "causal": False,
    "refresh": (),
    "guards": (),
}


def test_a_variant_from_values() -> None:
    variant = Variant(name="a-b", **ENTRY)
    assert variant.function == "mlagen_plan_a_b" == default_function("a-b")
    assert variant.tokens == parse("1")
    assert isinstance(variant.kv_len, Formula)
    assert variant.model_dump(mode="json")["kv_len"] == "seq_lens"
    with pytest.raises(ValidationError, match="frozen"):
        variant.causal = True  # type: ignore[misc]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("serves", "verify"),
        ("when", ()),
        ("when", ["replay"]),
        ("causal", "false"),
        ("causal", 0),
        ("tokens", True),
        ("tokens", 1.0),
        ("kv_len", "seq_len"),
        ("function", "a-b"),
        ("name", "A"),
        ("extra", 1),
    ],
)
def test_the_models_are_strict(key: str, value: object) -> None:
    with pytest.raises(ValidationError):
        Variant(**{"name": "a", **ENTRY, key: value})


def test_a_file_from_values() -> None:
    file = SpecFile.model_validate({"version": 1, "variants": {"a-b": ENTRY}})
    assert file.variants["a-b"].kv_len.text == "seq_lens"
    with pytest.raises(ValidationError):
        SpecFile.model_validate({"version": 1, "variants": {}})


# --- errors ----------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_error_text(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ERRORS)
    with pytest.raises(SpecError) as caught:
        load_spec(Path(f"{case}.yaml"))
    error = caught.value
    assert error.exit_code == 3
    places = [(problem.line, problem.column) for problem in error.problems]
    assert places == sorted(places)
    assert all(line >= 1 and column >= 1 for line, column in places)
    text = f"{error}\n"
    snapshot = ERRORS / f"{case}.txt"
    if os.environ.get("MLAGEN_UPDATE_SNAPSHOTS"):
        snapshot.write_text(text, encoding="utf-8")
    assert text == snapshot.read_text(encoding="utf-8")


def test_every_snapshot_has_its_case() -> None:
    assert CASES
    assert sorted(path.stem for path in ERRORS.glob("*.txt")) == CASES


def test_a_missing_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SpecError) as caught:
        load_spec(Path("none.yaml"))
    assert str(caught.value) == "none.yaml: unreadable: cannot be read: No such file or directory"


def test_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SpecError) as caught:
        load_spec(Path("folder"))
    assert str(caught.value) == "folder: unreadable: cannot be read: Is a directory"


def test_an_unreadable_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(DECODE)

    def refuse(*_: object, **__: object) -> object:
        raise PermissionError(13, "Permission denied")

    # Not by its mode: root reads everything.
    monkeypatch.setattr("builtins.open", refuse)
    with pytest.raises(SpecError, match="Permission denied"):
        load_spec(path)


def test_a_path_that_is_none() -> None:
    with pytest.raises(SpecError, match="embedded null byte"):
        load_spec(Path("a\0b"))


def test_a_file_too_large(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_bytes(b"#" * (300 * 1024))
    with pytest.raises(SpecError, match="larger than 256 KiB"):
        load_spec(path)


@pytest.mark.parametrize(
    "change",
    [
        lambda text: "\ufeff" + text,
        lambda text: text.replace("\n", "\r\n"),
        lambda text: text.rstrip("\n"),
        lambda text: "%YAML 1.2\n---\n" + text + "...\n",
        lambda text: text.replace("false", "False"),
        lambda text: text.replace("tokens: 1", "tokens: '1'"),
        lambda text: text.replace("kv_len: seq_lens", "kv_len: >-\n      seq_lens"),
        lambda text: text.replace("refresh: []", "refresh: &none []").replace(
            "guards: []", "guards: *none"
        ),
        lambda text: json.dumps(yaml.safe_load(text)),
    ],
    ids=["bom", "crlf", "no-newline", "yaml-1.2", "False", "quoted", "folded", "alias", "json"],
)
def test_other_ways_to_write_the_same(change: Any) -> None:
    assert load(change(DECODE)).variants == load(DECODE).variants


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        # Rules of one mode, at the length's own column.
        ("kv_len: seq_lens", "kv_len: seq_lens+draft_step", [(7, 22, "length-not-here")]),
        ("kv_len: seq_lens", "kv_len: seq_lens - dcp_rank", [(7, 24, "length-not-here")]),
        ("kv_len: seq_lens", "kv_len: 'seq_lens + dcp_size'", [(7, 25, "length-not-here")]),
        ("kv_len: seq_lens", "kv_len: 4096", [(7, 13, "kv-len-constant")]),
        ("tokens: 1", "tokens: 2 - 2", [(6, 13, "tokens-least")]),
        ("tokens: 1", "tokens: 1 + seq_lens", [(6, 17, "length-not-here")]),
        ("causal: false", "causal: 0", [(8, 13, "wrong-type")]),
        ("when: [replay]", "when: [capture]", [(5, 12, "unknown-value")]),
        ("when: [replay]", "when: replay", [(5, 11, "wrong-type")]),
        ("guards: []", "guards: []\n    function: def", [(11, 15, "function-name")]),
        ("guards: []", "guards: []\n    function: __init__", [(11, 15, "function-name")]),
        ("guards: []", f"guards: []\n    function: {'f' * 81}", [(11, 15, "function-name")]),
        ("guards: []", f"guards: []\n    doc: {'d' * 401}", [(11, 10, "doc-text")]),
        ("guards: []", "guards: []\n    doc: 'a \\ b'", [(11, 10, "doc-text")]),
        ("when: [replay]", "when: [eager]\n    planner: device", [(6, 14, "planner-device")]),
        # A mistake elsewhere hides no rule, and what depends on the mistake is not judged.
        (
            "serves: decode\n    when: [replay]",
            "serves: decoding\n    when: [eager]\n    planner: device",
            [(4, 13, "unknown-value"), (6, 14, "planner-device")],
        ),
        # Whether a formula that is wrong could be planned there is not asked.
        (
            "kv_len: seq_lens",
            "planner: device\n    kv_len: 2 * seq_len",
            [(8, 17, "unknown-length")],
        ),
        (
            "kv_len: seq_lens",
            "context_parallel: 1\n    kv_len: seq_lens // dcp_size",
            [(7, 23, "wrong-type")],
        ),
        (
            "serves: decode",
            "serves: verify\n    doc: a\n    doc: b",
            [(4, 13, "unknown-value"), (6, 5, "duplicate-key")],
        ),
    ],
)
def test_mistakes(old: str, new: str, expected: list[tuple[int, int, str]]) -> None:
    assert old in DECODE
    assert problems(DECODE.replace(old, new, 1)) == expected


def on_device(serves: str, kv_len: str, *more: str) -> str:
    """A file of one variant that asks to be planned on the GPU."""
    text = DECODE.replace("serves: decode", "\n    ".join((f"serves: {serves}", *more)))
    return text.replace("kv_len: seq_lens", f"planner: device\n    kv_len: {kv_len}")


@pytest.mark.parametrize(
    ("serves", "kv_len"),
    [
        ("decode", "seq_lens"),
        ("decode", "seq_lens - 1"),
        ("draft-decode", "seq_lens - 1 + (draft_step + 1)"),
        ("target-verify", "draft_token_num * 2 + seq_lens"),
    ],
)
def test_what_the_gpu_can_plan(serves: str, kv_len: str) -> None:
    text = on_device(serves, kv_len)
    for when in ("[replay]", "[replay, eager]", "[eager, replay]"):
        asked = text.replace("when: [replay]", f"when: {when}")
        spec = load(asked)
        assert device_variants(spec) == spec.variants
        assert unsupported(spec) == ()
        (on_host,) = load(asked.replace("device", "host")).variants
        assert on_host == spec.variants[0].model_copy(update={"planner": "host"})


def test_nothing_is_planned_there_unasked() -> None:
    assert device_variants(load(DECODE)) == ()
    assert device_variants(load_spec(shipped_spec())) == ()


SHARE = "(seq_lens + dcp_size - 1 - dcp_rank) // dcp_size"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            on_device("decode", "seq_lens").replace("[replay]", "[eager]"),
            "plans captured graphs, and this variant has none",
        ),
        (
            on_device("decode", SHARE, "context_parallel: true"),
            "does not know which share of the KV is this rank's",
        ),
        (
            on_device("decode", "seq_lens + dcp_rank", "context_parallel: true"),
            "does not know which share of the KV is this rank's",
        ),
        (
            on_device("decode", "2 * seq_lens"),
            "takes seq_lens plus a number, not 2 * seq_lens",
        ),
        (
            on_device("draft-extend", "seq_lens + extend_seq_lens"),
            "takes seq_lens plus a number, not seq_lens + extend_seq_lens",
        ),
        # One reason is enough: the first of them.
        (
            on_device("decode", "2 * seq_lens").replace("[replay]", "[eager]"),
            "plans captured graphs, and this variant has none",
        ),
    ],
    ids=["eager", "a share", "under context parallelism", "twice", "an extend", "two reasons"],
)
def test_what_stays_on_the_host(text: str, reason: str) -> None:
    with pytest.raises(SpecError) as caught:
        load(text)
    (problem,) = caught.value.problems
    assert problem.code == "planner-device"
    assert problem.message == f"decode: planner: device {reason}"
    assert problem.hint == "use `planner: host`, or leave the key out"
    assert text.splitlines()[problem.line - 1][problem.column - 1 :] == "device"


@pytest.mark.parametrize(
    ("serves", "name"),
    [
        ("draft-decode", "draft_step"),
        ("target-verify", "draft_token_num"),
        ("draft-extend", "extend_seq_lens"),
    ],
)
def test_a_length_of_one_mode(serves: str, name: str) -> None:
    text = DECODE.replace("kv_len: seq_lens", f"kv_len: seq_lens + {name}")
    assert load(text.replace("serves: decode", f"serves: {serves}")).variants[0].serves == serves
    others = {"decode", "draft-decode", "target-verify", "draft-extend"} - {serves}
    for other in sorted(others):
        told = problems(text.replace("serves: decode", f"serves: {other}"))
        assert told == [(7, 24, "length-not-here")]


def test_slots_differ_by_parallelism_and_moment() -> None:
    body = DECODE.partition("  decode:\n")[2]
    other = body.replace("[replay]", "[eager]")
    parallel = body + "    context_parallel: true\n"
    spec = load(f"{DECODE}  other:\n{other}  parallel:\n{parallel}")
    assert [variant.name for variant in spec.variants] == ["decode", "other", "parallel"]


def test_a_problem_found_later_has_its_place() -> None:
    spec = load(DECODE)
    assert str(spec.problem("decode", "guards", "x", "y")) == "a.yaml:10:13: x: y"
    assert str(spec.problem("decode", "planner", "x", "y")) == "a.yaml:3:3: x: y"
    assert str(spec.problem("none", "planner", "x", "y")) == "a.yaml: x: y"


def test_a_name_that_cannot_be_printed() -> None:
    text = DECODE.replace("  decode:", '  "a\\ud800\\nb":').replace("tokens: 1", "tokens: x")
    with pytest.raises(SpecError) as caught:
        load(text.replace("when: [replay]", "when: [eager]\n    planner: device"))
    told = [problem.message for problem in caught.value.problems]
    assert told == [
        r"'a\ud800\nb' is no name for a variant",
        r"'a\ud800\nb': planner: device plans captured graphs, and this variant has none",
        r"'a\ud800\nb': tokens: unknown length x",
    ]


def test_aliases_do_not_multiply_problems() -> None:
    bad = ", ".join(["nothing"] * 50)
    lines = [f"  a{i}: *all" for i in range(100)]
    text = f"version: 1\nvariants:\n  all: &all {{when: [{bad}]}}\n" + "\n".join(lines)
    with pytest.raises(SpecError) as caught:
        load(text)
    assert len(caught.value.problems) < 10_000


# --- any file --------------------------------------------------------------------------------

words = st.one_of(
    st.sampled_from([*Entry.model_fields, "version", "variants"]),
    st.sampled_from(["decode", "replay", "eager", "host", "device", "kv_indices", "fa-back-end"]),
    st.sampled_from(["seq_lens", "seq_lens + 1", "true", "yes", "1", "0x1", "~", ""]),
)
values = st.recursive(
    st.one_of(words, st.booleans(), st.integers(-1, 3), st.none(), st.text(max_size=8)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(words, inner, max_size=4)),
    max_leaves=12,
)
right: dict[str, st.SearchStrategy[Any]] = {
    "serves": st.sampled_from(["decode", "draft-decode", "target-verify", "draft-extend"]),
    "when": st.lists(st.sampled_from(["replay", "eager"]), min_size=1, unique=True),
    "tokens": st.sampled_from([1, "2", "draft_token_num", "extend_seq_lens"]),
    "kv_len": st.sampled_from(["seq_lens", "seq_lens + draft_step", "seq_lens // dcp_size"]),
    "causal": st.booleans(),
    "refresh": st.lists(st.sampled_from(["kv_indices", "kv_len"]), unique=True),
    "guards": st.lists(st.sampled_from(["fa-back-end", "uniform-tokens"]), unique=True),
}
optional: dict[str, st.SearchStrategy[Any]] = {
    "planner": st.sampled_from(["host", "device"]),
    "context_parallel": st.booleans(),
    "function": st.sampled_from(["f", "g", "mlagen_plan_a", "print", "1"]),
    "doc": st.text(max_size=10),
}
entries = st.one_of(
    st.fixed_dictionaries(right, optional=optional),
    st.fixed_dictionaries(dict.fromkeys(right, values)),
)
files = st.fixed_dictionaries(
    {
        "version": st.one_of(st.just(1), values),
        "variants": st.one_of(st.dictionaries(st.sampled_from("abc"), entries), values),
    }
)


def outcome(data: bytes) -> Spec | SpecError:
    try:
        return read_spec(data, Path("a.yaml"))
    except SpecError as error:
        return error


def judge(result: Spec | SpecError) -> None:
    if isinstance(result, SpecError):
        assert result.problems
        places = [(problem.line, problem.column) for problem in result.problems]
        assert places == sorted(places)
        assert min(places) >= (1, 1)
        str(result).encode()
        return
    # What the reader lets through, the models and the schema's models take as well.
    for variant in result.variants:
        assert Variant(**{name: getattr(variant, name) for name in type(variant).model_fields})
    assert len({variant.function for variant in result.variants}) == len(result.variants)


@settings(deadline=None)
@given(st.one_of(st.text(), st.text(alphabet="version:1ants{}[]&*!%-?|>'\"# \n\t,a")))
def test_any_text_is_a_spec_or_a_spec_error(text: str) -> None:
    judge(outcome(text.encode("utf-8", "surrogatepass")))


@settings(deadline=None)
@given(st.binary(max_size=100))
def test_any_bytes_are_a_spec_or_a_spec_error(data: bytes) -> None:
    judge(outcome(data))


@settings(deadline=None)
@given(files, st.booleans())
def test_any_structure_is_a_spec_or_a_spec_error(data: Any, flow: bool) -> None:
    text = yaml.safe_dump(data, default_flow_style=flow, allow_unicode=True, sort_keys=False)
    result = outcome(text.encode("utf-8", "surrogatepass"))
    judge(result)
    if isinstance(result, Spec):
        schema = json_schema()
        assert fits(yaml.safe_load(text), schema, schema)


@settings(deadline=None)
@given(st.data())
def test_a_damaged_shipped_file_is_a_spec_or_a_spec_error(data: st.DataObject) -> None:
    text = shipped_spec().read_text().partition("version: 1")[2]
    start = data.draw(st.integers(0, len(text)))
    length = data.draw(st.integers(0, 30))
    extra = data.draw(st.text(alphabet="\t\n :-[]{}#'\"*&!|>%@`,?a1", max_size=6))
    damaged = "version: 1" + text[:start] + extra + text[start + length :]
    judge(outcome(damaged.encode()))


# --- finding ---------------------------------------------------------------------------------


def test_the_nearest_spec_above(tmp_path: Path) -> None:
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    near = tmp_path / "a" / FILE_NAME
    near.write_text(DECODE)
    (tmp_path / FILE_NAME).write_text(DECODE)
    assert spec_above(inner) == near
    assert spec_above(near) == near
    assert spec_above(tmp_path) == tmp_path / FILE_NAME


def test_a_spec_above_a_relative_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / FILE_NAME).write_text(DECODE)
    (tmp_path / "a").mkdir()
    monkeypatch.chdir(tmp_path / "a")
    found = spec_above(Path())
    assert found is not None
    assert found.samefile(tmp_path / FILE_NAME)


def test_no_spec_above(tmp_path: Path) -> None:
    # A folder of that name is no spec.
    (tmp_path / FILE_NAME).mkdir()
    assert spec_above(tmp_path) is None
    assert shipped_spec().name == FILE_NAME
    assert shipped_spec().is_file()


def test_choices_of_the_schema_are_those_of_the_reader() -> None:
    properties = json_schema()["$defs"]["Entry"]["properties"]
    assert properties["serves"]["enum"] == list(get_args(Serves))
    assert properties["planner"]["enum"] == list(get_args(Planner))
    for key, choices in (("when", When), ("refresh", Buffer), ("guards", Guard)):
        assert properties[key]["items"]["enum"] == list(get_args(choices))
