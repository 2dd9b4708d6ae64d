"""Every refusal: its exact text, its exit code, and that nothing was written.

The texts are snapshots: errors_cli/<case>.txt holds the commands of a case, each with its exit
code and what came on stderr. To write them anew, set MLAGEN_UPDATE_SNAPSHOTS=1, and read the
difference.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from mlagen.codegen.spec import shipped_spec
from tests.cli_workspace import FILE, ORIGINAL, files_below, patched, region, run, workspace

SNAPSHOTS = Path(__file__).parent / "errors_cli"

PATCH = f"patch {FILE} --flashinfer fi"
DIFF = f"{PATCH} --diff"
CHECK = f"check {FILE} --flashinfer fi"
INSPECT = f"inspect {FILE} --flashinfer fi"
UNPATCH = f"unpatch {FILE}"

#: A line that is emitted once, in the region draft-step.
STEP = "mlagen_draft_step: Optional[int] = None"


@dataclass(frozen=True)
class Case:
    """Commands that are all refused with `code` once `prepare` has been at the folder."""

    code: int
    prepare: Callable[[Path], None]
    commands: tuple[str, ...]


CASES: dict[str, Case] = {}


def case(code: int, *commands: str) -> Callable[[Callable[[Path], None]], Callable[[Path], None]]:
    """Make the decorated function's preparation a case of that name."""

    def register(prepare: Callable[[Path], None]) -> Callable[[Path], None]:
        assert prepare.__name__ not in CASES
        CASES[prepare.__name__] = Case(code, prepare, commands)
        return prepare

    return register


def put(folder: Path, data: bytes) -> None:
    (folder / FILE).write_bytes(data)


def changed(old: str, new: str, data: bytes = ORIGINAL) -> bytes:
    """`data` with `old`, which stands there once, replaced."""
    assert data.count(old.encode()) == 1, f"{data.count(old.encode())} times: {old}"
    return data.replace(old.encode(), new.encode())


# --- 2: usage ---------------------------------------------------------------------------------


@case(2, "patch nowhere --flashinfer fi", "check nowhere --flashinfer fi", "unpatch nowhere")
def path_missing(folder: Path) -> None:
    pass


@case(2, "patch  --flashinfer fi", "check  --flashinfer fi", "unpatch ")
def path_empty(folder: Path) -> None:
    """`mlagen patch "$UNSET"`: not the file of the folder that one happens to be in."""


@case(2, f"patch {'x' * 300} --flashinfer fi", f"patch {FILE} --flashinfer {'x' * 300}")
def path_too_long(folder: Path) -> None:
    pass


@case(2, "patch empty --flashinfer fi", "inspect empty --flashinfer fi", "unpatch empty")
def folder_without_the_file(folder: Path) -> None:
    (folder / "empty").mkdir()


@case(
    2,
    *("patch other.whl --diff --flashinfer fi", "check broken.whl --flashinfer fi"),
    "inspect folder.whl --flashinfer fi",
)
def wheel_without_the_file(folder: Path) -> None:
    with zipfile.ZipFile(folder / "other.whl", "w") as file:
        file.writestr("other/__init__.py", "")
    (folder / "broken.whl").write_bytes(b"PK")
    (folder / "folder.whl").mkdir()


@case(2, "patch link.py --flashinfer fi")
def link_to_nothing(folder: Path) -> None:
    (folder / "link.py").symlink_to("gone.py")


@case(2, PATCH)
def file_read_only(folder: Path) -> None:
    (folder / FILE).chmod(0o444)


@case(2, UNPATCH)
def file_read_only_unpatch(folder: Path) -> None:
    put(folder, patched())
    (folder / FILE).chmod(0o444)


@case(2, "patch folder --flashinfer fi")
def folder_read_only(folder: Path) -> None:
    (folder / "folder").mkdir()
    shutil.copy(folder / FILE, folder / "folder" / FILE)
    (folder / "folder").chmod(0o555)


@case(2, f"{PATCH} --only verfy", f"{DIFF} --only verify --only nope --only none")
def variant_unknown(folder: Path) -> None:
    pass


@case(
    2,
    *(f"{PATCH} --spec none.yaml", "render none.yaml --flashinfer fi"),
    f"upgrade {FILE} --flashinfer fi --spec none.yaml",
    "matrix --sglang 1 --flashinfer 1 --spec none.yaml",
)
def spec_missing(folder: Path) -> None:
    pass


@case(2, "render specs --flashinfer fi", "render specs --check", f"{PATCH} --spec specs")
def spec_is_a_folder(folder: Path) -> None:
    (folder / "specs").mkdir()
    shutil.copy(shipped_spec(), folder / "specs" / "variants.yaml")


@case(2, f"patch {FILE} --spec variants.yaml", f"check {FILE}", "inspect", "render variants.yaml")
def flashinfer_not_found(folder: Path) -> None:
    shutil.copy(shipped_spec(), folder / "variants.yaml")


@case(
    2,
    f"patch {FILE} --flashinfer nowhere",
    f"patch {FILE} --flashinfer empty",
    f"patch {FILE} --flashinfer {FILE}",
    f"patch {FILE} --flashinfer broken.whl",
    "inspect --flashinfer flashinfer-python>=0.6",
)
def flashinfer_is_none(folder: Path) -> None:
    (folder / "empty").mkdir()
    (folder / "broken.whl").write_bytes(b"PK")


@case(2, "patch sglang== --flashinfer fi", "patch sglang>=0.5 --flashinfer fi")
def requirement_without_a_version(folder: Path) -> None:
    pass


@case(2, f"{PATCH} --out {FILE}", f"render variants.yaml --flashinfer fi --out {FILE}")
def out_is_a_file(folder: Path) -> None:
    shutil.copy(shipped_spec(), folder / "variants.yaml")


RENDER_OUT = "render variants.yaml --flashinfer fi --out made"


@case(2, f"{PATCH} --out made", f"patch made/{FILE} --flashinfer fi --out made")
def out_holds_another_file(folder: Path) -> None:
    """SGLang's own, which is changed in place or not at all."""
    (folder / "made").mkdir()
    (folder / "made" / FILE).write_bytes(ORIGINAL)


@case(2, RENDER_OUT)
def out_holds_files_of_those_names(folder: Path) -> None:
    shutil.copy(shipped_spec(), folder / "variants.yaml")
    (folder / "made").mkdir()
    for name in ("plans.py", "hooks.py", "MANIFEST.json"):
        (folder / "made" / name).write_text('{"plans": "of mine"}\n')


@case(2, RENDER_OUT)
def out_holds_another_manifest(folder: Path) -> None:
    shutil.copy(shipped_spec(), folder / "variants.yaml")
    (folder / "made").mkdir()
    (folder / "made" / "MANIFEST.json").write_text("of a browser's extension\n")


@case(2, "render variants.yaml --check", "render variants.yaml --check --out elsewhere")
def not_rendered(folder: Path) -> None:
    shutil.copy(shipped_spec(), folder / "variants.yaml")


# --- 3: variants.yaml ---------------------------------------------------------------------------

BAD_SPEC = """\
version: 1
variants:
  decode:
    serves: decod
    when: [replay]
    tokens: 1
    kv_len: seq_len + 1
    causal: no_idea
    refresh: []
    guards: [fa-back-end, tile-divide-heads]
  decode: {}
"""


@case(
    3,
    f"{PATCH} --spec bad.yaml",
    f"{CHECK} --spec bad.yaml",
    f"{INSPECT} --spec bad.yaml",
    "render bad.yaml --flashinfer fi",
    "render bad.yaml --flashinfer fi --check",
)
def spec_invalid(folder: Path) -> None:
    (folder / "bad.yaml").write_text(BAD_SPEC)


@case(3, f"patch fork/{FILE} --flashinfer fi", f"patch {FILE} --flashinfer fi")
def spec_invalid_that_was_found(folder: Path) -> None:
    """Whoever gave none has to be told whose it is: beside PATH, or above the working directory."""
    (folder / "fork").mkdir()
    put(folder / "fork", ORIGINAL)
    for place in (folder, folder / "fork"):
        (place / "variants.yaml").write_text("version: 1\n")


# --- 4: drift -----------------------------------------------------------------------------------


@case(4, f"{PATCH} --spec fork.yaml", f"{DIFF} --spec fork.yaml")
def fork_names_what_is_not_there(folder: Path) -> None:
    text = shipped_spec().read_text(encoding="utf-8")
    section = "fork:\n  anchors:\n    backend-class: MyMLABackend\n    verify-metadata: my_graphs\n"
    spec = text.replace("variants:\n", f"{section}\nvariants:\n", 1)
    (folder / "fork.yaml").write_text(spec, encoding="utf-8")


@case(4, f"patch fork/{FILE} --flashinfer fi", f"check fork/{FILE} --flashinfer fi")
def fork_beside_its_spec(folder: Path) -> None:
    """Found from PATH; in it, one name that the fork has no more."""
    (folder / "fork").mkdir()
    put(folder / "fork", patched().replace(b"FlashInferMLAAttnBackend", b"MyMLABackend"))
    text = shipped_spec().read_text(encoding="utf-8")
    section = "fork:\n  anchors:\n    backend-class: MyMLABackEnd\n"
    spec = text.replace("variants:\n", f"{section}\nvariants:\n", 1)
    (folder / "fork" / "variants.yaml").write_text(spec, encoding="utf-8")


@case(4, PATCH, DIFF)
def anchor_ambiguous(folder: Path) -> None:
    second = """\
    def warm_up(self, seq_lens):
        self.indices_updater_decode.update(seq_lens, init_metadata_replay=True)

    def apply("""
    put(folder, changed("    def apply(", second))


@case(4, PATCH, DIFF)
def anchor_missing(folder: Path) -> None:
    put(folder, changed("init_metadata_replay=True", "replay=True"))


@case(4, PATCH)
def anchors_missing(folder: Path) -> None:
    data = changed("init_metadata_replay=True", "replay=True")
    data = changed("=self.prefill_wrapper_verify", "=self.verify_wrapper", data)
    data = data.replace(b"common_template(", b"common_pattern(")
    put(folder, data)


def forked(old: str, new: str) -> Callable[[Path], None]:
    return lambda folder: put(folder, ORIGINAL.replace(old.encode(), new.encode()))


# One of a kind that `fork: anchors:` can name: a method, a function, a class; and one near nothing.
for _name, _old, _new in (
    ("fork_plan_method", "call_begin_forward", "begin_forward"),
    ("fork_plan_function", "fast_mla_decode_plan", "fast_latent_decode_plan"),
    ("fork_draft_loop", "common_template", "run_all"),
    ("fork_updater_class", "FlashInferMLAIndicesUpdaterDecode", "FlashInferMLAUpdaterDecode"),
):
    CASES[_name] = Case(4, forked(_old, _new), (PATCH,))


@case(4, PATCH, DIFF, CHECK, INSPECT)
def does_not_parse(folder: Path) -> None:
    put(folder, changed("def apply(self, bs,", "def apply(self bs,"))


@case(4, PATCH)
def does_not_parse_at_its_end(folder: Path) -> None:
    put(folder, ORIGINAL + b"print 1\n")


@case(4, PATCH, CHECK)
def does_not_decode(folder: Path) -> None:
    put(folder, changed("in miniature", "en miniature").replace(b"A back", b"Caf\xe9"))


@case(4, PATCH, CHECK)
def not_sglangs_file(folder: Path) -> None:
    put(folder, b"import os\n\nprint(os.name)\n")


@case(4, PATCH)
def name_of_a_class_changed(folder: Path) -> None:
    put(folder, ORIGINAL.replace(b"FlashInferMLAAttnBackend", b"FlashInferMLABackend"))


@case(4, PATCH)
def local_renamed(folder: Path) -> None:
    """What is emitted behind the capture asks `forward_mode`."""
    old = b"""\
        forward_mode = forward_batch.forward_mode
        seq_lens"""
    assert ORIGINAL.count(old) == 1
    start, end = ORIGINAL.index(old), ORIGINAL.index(b"    def init_forward_metadata(")
    inside = ORIGINAL[start:end].replace(b"forward_mode", b"mode")
    inside = inside.replace(b"forward_batch.mode", b"forward_batch.forward_mode")
    put(folder, ORIGINAL[:start] + inside + ORIGINAL[end:])


@case(4, PATCH)
def replaced_name_still_read(folder: Path) -> None:
    """SGLang's arrays give way to ours, but this fork's call passes them by name."""
    put(folder, changed("**self.host_arrays", "kv_len_arr_cpu=kv_len_arr_cpu"))


@case(4, PATCH)
def coding_line_would_move(folder: Path) -> None:
    imports = b"import os\n# coding: latin-1\n"
    put(folder, imports + ORIGINAL[ORIGINAL.index(b"from functools") :])


@case(
    4,
    f"patch {FILE} --flashinfer drifted",
    f"check {FILE} --flashinfer drifted",
    f"inspect {FILE} --flashinfer drifted",
    "inspect --flashinfer drifted",
    "render variants.yaml --flashinfer drifted",
)
def flashinfer_drifted(folder: Path) -> None:
    shutil.copy(shipped_spec(), folder / "variants.yaml")


@case(4, PATCH, UNPATCH, CHECK, INSPECT)
def newer_format(folder: Path) -> None:
    put(folder, changed("# format: 1", "# format: 2", patched()))


@case(4, PATCH, UNPATCH)
def mark_in_a_string(folder: Path) -> None:
    put(folder, changed('"""A back end', '"""\n# <<< mlagen header\nA back end'))


# --- 5: edited ----------------------------------------------------------------------------------


@case(5, PATCH, DIFF, UNPATCH, CHECK)
def edited_region(folder: Path) -> None:
    put(folder, changed(STEP, f"{STEP[:-4]}0", patched()))


@case(5, f"{PATCH} --out made", f"{DIFF} --out made")
def out_holds_an_edited_region(folder: Path) -> None:
    (folder / "made").mkdir()
    (folder / "made" / FILE).write_bytes(changed(STEP, f"{STEP[:-4]}0", patched()))


@case(5, PATCH)
def edited_regions(folder: Path) -> None:
    data = changed(STEP, f"{STEP[:-4]}0", patched())
    put(folder, changed("= mlagen_request_verify_eager(", "= my_request(", data))


@case(5, PATCH, UNPATCH)
def edited_kept_line(folder: Path) -> None:
    """A line that SGLang had there, behind the bar: it could not be put back."""
    kept = "# |            assert seq_lens_cpu is not None"
    put(folder, changed(kept, kept.replace(" not", ""), patched()))


@case(5, PATCH)
def edited_checksum(folder: Path) -> None:
    data = re.sub(rb"(# >>> mlagen draft-step )\w{12}", rb"\g<1>000000000000", patched())
    assert data != patched()
    put(folder, data)


@case(5, PATCH, UNPATCH, CHECK, INSPECT)
def cut_inside_a_region(folder: Path) -> None:
    data = patched()
    put(folder, data[: data.index(b"# <<< mlagen plans") - 2000])


@case(5, PATCH, UNPATCH)
def end_mark_missing(folder: Path) -> None:
    put(folder, changed("    # <<< mlagen draft-step\n", "", patched()))


@case(5, PATCH, UNPATCH)
def start_mark_missing(folder: Path) -> None:
    put(folder, re.sub(rb" *# >>> mlagen draft-step .*\n", b"", patched()))


@case(5, PATCH, UNPATCH, CHECK)
def region_twice(folder: Path) -> None:
    text = region("draft-step", patched())
    put(folder, patched().replace(text, 2 * text))


@case(5, PATCH, DIFF, UNPATCH, CHECK, INSPECT)
def region_lost(folder: Path) -> None:
    """All of it, marks included: a merge that was resolved so."""
    put(folder, patched().replace(region("replay-decode", patched()), b""))


@case(5, UNPATCH)
def region_lost_that_kept_nothing(folder: Path) -> None:
    """`patch` puts it back: test_cli.py."""
    put(folder, patched().replace(region("multi-step", patched()), b""))


@case(5, UNPATCH, PATCH, CHECK)
def header_lost(folder: Path) -> None:
    put(folder, patched().replace(region("header", patched()), b""))


@case(5, UNPATCH, PATCH, CHECK)
def cut_between_regions(folder: Path) -> None:
    data = patched()
    put(folder, data[: data.index(b"    def apply(")])


@case(5, UNPATCH, PATCH)
def cut_behind_all_lines_that_were_kept(folder: Path) -> None:
    data = patched()
    put(folder, data[: data.index(b"class FlashInferMLAMultiStepDraftBackend")])


@case(5, PATCH)
def marks_broken_in_three_places(folder: Path) -> None:
    data = changed("    # <<< mlagen draft-step\n", "", patched())
    first = data.index(b"\n") + 1
    put(folder, data[:first] + b"# <<< mlagen verify\n# >>> mlagen\n" + data[first:])


@case(
    5, "render variants.yaml --check", "render variants.yaml", f"patch {FILE} --spec variants.yaml"
)
def manifest_broken(folder: Path) -> None:
    shutil.copy(shipped_spec(), folder / "variants.yaml")
    (folder / "generated").mkdir()
    (folder / "generated" / "MANIFEST.json").write_text('{"format": 1, "flashinfer": 7}\n')


# --- the tests ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_refusal(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = workspace(tmp_path, monkeypatch)
    chosen = CASES[name]
    chosen.prepare(folder)
    before = files_below(folder)
    blocks = []
    for command in chosen.commands:
        words = command.split(" ")
        outcome = run(*words)
        assert outcome.code == chosen.code, f"{command}: {outcome}"
        assert outcome.out == b"", command
        assert files_below(folder) == before, command
        blocks.append(
            f"$ mlagen {shlex.join(words)}\nexit {outcome.code}\n{neutral(outcome.err, folder)}"
        )
    text = "\n".join(blocks)
    snapshot = SNAPSHOTS / f"{name}.txt"
    if os.environ.get("MLAGEN_UPDATE_SNAPSHOTS"):
        snapshot.write_text(text, encoding="utf-8")
    assert text == snapshot.read_text(encoding="utf-8")


def neutral(text: str, folder: Path) -> str:
    """`text` without what differs between machines, Pythons and versions of packaging."""
    for place in {str(folder), os.path.realpath(folder)}:
        text = text.replace(f"{place}/", "").replace(place, "<here>")
    text = re.sub(r"(?<=:1:)\d+(?=: does-not-parse: .*\(unicode error\))", "<column>", text)
    return re.sub(r"(?<=: not a requirement: ).*", "<reason>", text)


def test_every_snapshot_has_its_case() -> None:
    assert sorted(path.stem for path in SNAPSHOTS.glob("*.txt")) == sorted(CASES)


def test_every_row_of_the_table_has_a_case() -> None:
    """0 and 1 are no refusals; 6 needs a GPU."""
    assert {case.code for case in CASES.values()} == {2, 3, 4, 5}


@pytest.mark.parametrize("name", sorted(CASES))
def test_texts_are_fit_to_print(name: str) -> None:
    """No line ends in blanks, no path of one machine, nothing of Python's insides."""
    text = (SNAPSHOTS / f"{name}.txt").read_text(encoding="utf-8")

    assert [line for line in text.split("\n") if line != line.rstrip()] == []
    assert not re.search(r"Traceback|<mlagen|object at 0x|/tmp/|/root/|/home/", text)
    for line in text.split("\n"):
        assert not line.startswith((" ", "$")) or line.startswith(("    ", "$ mlagen ")), line
