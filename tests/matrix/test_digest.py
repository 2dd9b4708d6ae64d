"""What a remembered outcome hangs on: a change of it counts, a change of other things does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlagen.codegen.fetch import WheelTree
from mlagen.codegen.matrix import digest, gather
from mlagen.codegen.matrix.store import flashinfer_digest, wanted, write_archive
from mlagen.codegen.spec import load_spec, read_spec, shipped_spec
from tests.matrix.miniature import OBJECT, WRAPPER, flashinfer_files

TEXT = shipped_spec().read_bytes()


def meaning(text: bytes) -> str:
    return digest.meaning_of(read_spec(text, Path("variants.yaml")))


def test_the_modules_that_decide() -> None:
    modules = digest.deciding_modules()
    sites = {
        f"codegen/sglang/sites/{p.name}"
        for p in (digest._ROOT / "codegen/sglang/sites").glob("*.py")
    }
    assert sites <= modules
    for name in ("patch.py", "render.py", "splice.py", "flashinfer/eras.py", "fetch.py", "spec.py"):
        assert f"codegen/{name}" in modules
    for name in ("cli.py", "codegen/gpu.py", "codegen/bench.py", "codegen/matrix/tables.py"):
        assert name not in modules
    assert digest._templates()
    assert all(not name.startswith("templates/tests/") for name in digest._templates())


def test_a_change_of_code_or_template_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (*digest.deciding_modules(), *digest._templates(), "codegen/bench.py"):
        place = tmp_path / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes((digest._ROOT / name).read_bytes())
    monkeypatch.setattr(digest, "_ROOT", tmp_path)

    def now() -> str:
        digest.code_digest.cache_clear()
        return digest.code_digest()

    seen = [now()]
    changed = ("codegen/bench.py", "codegen/sglang/sites/replay_verify.py", digest._templates()[0])
    for name in changed:
        with open(tmp_path / name, "a") as file:
            file.write("\n")
        seen.append(now())
    assert seen[0] == seen[1]
    assert len(set(seen)) == 3
    monkeypatch.undo()
    digest.code_digest.cache_clear()


def test_what_a_spec_means() -> None:
    assert meaning(TEXT) == digest.meaning_of(load_spec(shipped_spec()))
    assert meaning(TEXT + b"\n# a comment\n") == meaning(TEXT)
    assert b"doc: " in TEXT
    assert meaning(TEXT.replace(b"doc: ", b"doc: Now ", 1)) == meaning(TEXT)
    changed = TEXT.replace(b"seq_lens + draft_token_num", b"seq_lens + draft_token_num + 1", 1)
    assert changed != TEXT
    assert meaning(changed) != meaning(TEXT)


def test_keys_keep_their_parts_apart() -> None:
    assert digest.key("a", "bc") != digest.key("ab", "c")


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("flashinfer/mla/_core.py", True),
        ("flashinfer/data/include/flashinfer/attention/scheduler.cuh", True),
        ("flashinfer/data/include/flashinfer/attention/hopper/x.cuh", False),
        ("flashinfer/data/cutlass/python/x.py", False),
        ("flashinfer/data/csrc/x.cu", False),
        ("flashinfer_python-1.0.dist-info/METADATA", True),
        ("flashinfer_python-1.0.dist-info/RECORD", False),
        ("tests/test_mla.py", False),
    ],
)
def test_what_is_kept_of_flashinfer(path: str, expected: bool) -> None:
    assert wanted("flashinfer-python", path) is expected


def test_a_thinned_wheel_is_the_same_flashinfer(tmp_path: Path) -> None:
    whole = flashinfer_files("1.0", OBJECT)
    digests = []
    for name, files in (
        ("whole", whole),
        ("thinned", {p: d for p, d in whole.items() if wanted("flashinfer-python", p)}),
        ("renumbered", flashinfer_files("2.0", OBJECT)),
        ("other", flashinfer_files("1.0", WRAPPER)),
    ):
        place = tmp_path / f"{name}.whl"
        write_archive(place, files)
        digests.append((flashinfer_digest(WheelTree(place)), gather.read_release(place)))
    assert digests[0] == digests[1] == digests[2]
    assert digests[3][0] != digests[0][0]
    assert digests[3][1] != digests[0][1]
