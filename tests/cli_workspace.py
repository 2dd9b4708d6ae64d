"""What the tests of the command line share: a folder of small inputs, ways to run mlagen in it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from jsonschema import Draft202012Validator

from mlagen.cli import cli
from mlagen.codegen import gpu, provenance
from mlagen.codegen.flashinfer import find
from mlagen.codegen.flashinfer.find import find_flashinfer
from mlagen.codegen.flashinfer.read import read_plan_api
from mlagen.codegen.patch import prepare
from mlagen.codegen.report_schema import report_schema
from mlagen.codegen.sglang.find import FoundTarget
from mlagen.codegen.spec import load_spec, shipped_spec
from tests.backend_miniature import MINIATURE
from tests.flashinfer import miniatures

FILE = "flashinfer_mla_backend.py"
IN_CHECKOUT = f"python/sglang/srt/layers/attention/{FILE}"
IN_PACKAGE = f"sglang/srt/layers/attention/{FILE}"
ORIGINAL = MINIATURE.encode()
#: The planner of fi/, and one that takes an argument more.
FLASHINFER = miniatures.wrapper_era()
DRIFTED = miniatures.wrapper_era(
    f"        self._plan_info = {miniatures.call(*miniatures.NINE, 'split_kv')}"
)
#: A test of a file, in the forms in which it may come.
disguised = pytest.mark.parametrize(
    "disguise",
    [
        lambda data: data,
        lambda data: data.replace(b"\n", b"\r\n"),
        lambda data: b"\xef\xbb\xbf" + data,
    ],
    ids=["as it was", "CRLF", "BOM"],
)


@dataclass(frozen=True)
class Outcome:
    """What a run of mlagen gave."""

    code: int
    out: bytes
    err: str

    @property
    def text(self) -> str:
        """stdout."""
        return self.out.decode()

    @property
    def json(self) -> dict[str, Any]:
        """stdout of a run with --json. It is what `mlagen schema --report` says, and no more."""
        content = json.loads(self.out)
        assert isinstance(content, dict)
        report_validator().validate(content)
        return content


@cache
def report_validator() -> Draft202012Validator:
    """For what --json prints, without the keys that a later mlagen may have."""
    schema = report_schema()
    for name, definition in schema["$defs"].items():
        assert definition["type"] == "object", name
        definition["additionalProperties"] = False
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema)


def run(*arguments: str | Path) -> Outcome:
    """Run mlagen in this process. An exception that it would show as a traceback is raised."""
    result = CliRunner().invoke(cli, [str(a) for a in arguments], prog_name="mlagen")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Outcome(result.exit_code, result.stdout_bytes, result.stderr)


def run_process(
    *arguments: str | Path, cwd: Path, variables: Mapping[str, str] | None = None
) -> Outcome:
    """Run `python -m mlagen` in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "mlagen", *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, **(variables or {})},
        capture_output=True,
        check=False,
    )
    return Outcome(done.returncode, done.stdout, done.stderr.decode())


def git(*arguments: str, cwd: Path, stdin: bytes = b"") -> str:
    """Run git, which must succeed, away from the user's settings; gives stdout."""
    settings = ["-c", "core.autocrlf=false", "-c", "safe.directory=*"]
    done = subprocess.run(
        ["git", *settings, *arguments],
        cwd=cwd,
        env={**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"},
        input=stdin,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode()


def workspace(folder: Path, patch: pytest.MonkeyPatch) -> Path:
    """Go to `folder` and lay out the miniature back end, a FlashInfer that fits (fi/), one that
    plans in a back-end object (fi7/), and one whose private call has changed (drifted/). None is
    installed, whatever this interpreter has, and there is no GPU."""
    patch.chdir(folder)
    patch.setattr(find, "_installed", lambda: None)
    patch.setattr(gpu, "cuda_trouble", lambda: "none in these tests")
    (folder / FILE).write_bytes(ORIGINAL)
    miniatures.write(FLASHINFER, folder / "fi")
    miniatures.write(miniatures.backend_era(), folder / "fi7")
    miniatures.write(DRIFTED, folder / "drifted")
    return folder


@cache
def patched(data: bytes = ORIGINAL) -> bytes:
    """`data` as `mlagen patch --flashinfer fi` leaves it."""
    api = read_plan_api(miniatures.source(FLASHINFER, version=None))
    return prepare(FoundTarget(data, FILE, None), load_spec(shipped_spec()), api).patched


def patched_release(data: bytes, flashinfer: str) -> bytes:
    """`data`, a release's file, patched for a FlashInfer release."""
    api = read_plan_api(find_flashinfer(flashinfer))
    return prepare(FoundTarget(data, FILE, None), load_spec(shipped_spec()), api).patched


def region(site: str, data: bytes) -> bytes:
    """The lines of one region, marks included."""
    (found,) = [r for r in provenance.find_regions(data) if r.site == site]
    return b"".join(data.splitlines(keepends=True)[found.start_line - 1 : found.end_line])


def as_older(data: bytes, old: str, new: str, site: str) -> bytes:
    """`data` as another version would have left it: `old` is `new` in one region, whose checksum
    is right."""
    text = region(site, data).decode()
    assert text.count(old) == 1
    (was,) = provenance.find_regions(text.replace(old, new))
    lines = provenance.build_region(was.site, was.indent, was.emitted, was.replaced, "\n")
    return data.replace(text.encode(), "".join(lines).encode())


def files_below(folder: Path) -> dict[str, bytes]:
    """Every file in a tree with its bytes: to see that nothing was written or left behind."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and ".git/" not in path.as_posix()
    }
