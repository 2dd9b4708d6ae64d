"""The hooks that other repositories take from this one, and the page about CI."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from mlagen.codegen import fetch
from mlagen.codegen.plugin import GROUP, REGISTRY_FILE
from mlagen.codegen.spec import shipped_spec
from tests.cli_workspace import FLASHINFER, IN_CHECKOUT, ORIGINAL, patched, run, workspace
from tests.flashinfer import miniatures

ROOT = Path(__file__).resolve().parents[1]
HOOKS: dict[str, dict[str, Any]] = {
    hook["id"]: hook
    for hook in yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text("utf-8"))
}
PAGE = (ROOT / "docs" / "ci.md").read_text("utf-8")
#: The keys of a hook that are used here, of those that pre-commit knows.
KEYS = {"id", "name", "description", "entry", "language", "files", "args", "pass_filenames"}

# --- hooks ------------------------------------------------------------------------------------


def test_the_hooks_are_of_pre_commits_form() -> None:
    assert list(HOOKS) == ["mlagen-check", "mlagen-render-check"]
    for hook in HOOKS.values():
        assert {"id", "name", "entry", "language"} <= set(hook) <= KEYS
        assert hook["language"] == "python"
        # What pre-commit installs brings the command.
        assert shlex.split(hook["entry"])[0] == "mlagen"
        assert re.compile(hook["files"])


@pytest.mark.parametrize(
    ("hook", "takes", "leaves"),
    [
        (
            "mlagen-check",
            [IN_CHECKOUT],
            [f"tests/{IN_CHECKOUT}", f"{IN_CHECKOUT}i", "variants.yaml"],
        ),
        (
            "mlagen-render-check",
            ["variants.yaml", "generated/plans.py", "generated/tests/support.py"],
            ["docs/variants.yaml", "regenerated/x", IN_CHECKOUT],
        ),
    ],
)
def test_the_files_of_a_hook(hook: str, takes: list[str], leaves: list[str]) -> None:
    pattern = re.compile(HOOKS[hook]["files"])
    assert [name for name in takes + leaves if pattern.search(name)] == takes


def as_hook(name: str, *files: str, args: tuple[str, ...] | None = None) -> int:
    """Run a hook as pre-commit does: entry, args, then the files."""
    hook = HOOKS[name]
    command = shlex.split(hook["entry"])[1:]
    command += hook.get("args", []) if args is None else args
    return run(*command, *(files if hook.get("pass_filenames", True) else ())).code


def test_the_check_hook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = workspace(tmp_path, monkeypatch)
    place = here / IN_CHECKOUT
    place.parent.mkdir(parents=True)
    place.write_bytes(patched())
    assert as_hook("mlagen-check", IN_CHECKOUT, args=("--flashinfer", "fi")) == 0
    assert as_hook("mlagen-check", IN_CHECKOUT, args=("--flashinfer", "drifted")) == 4
    place.write_bytes(patched().replace(b"mlagen_request = ", b"mlagen_request  = ", 1))
    assert as_hook("mlagen-check", IN_CHECKOUT, args=("--flashinfer", "fi")) == 5


def test_the_render_hook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = workspace(tmp_path, monkeypatch)
    (here / "variants.yaml").write_bytes(shipped_spec().read_bytes())
    args = ("variants.yaml", "--flashinfer", "fi")
    assert run("render", *args).code == 0
    assert as_hook("mlagen-render-check", args=args) == 0
    (here / "generated/hooks.py").write_bytes(b"")
    assert as_hook("mlagen-render-check", args=args) == 1


# --- the page ---------------------------------------------------------------------------------


def blocks() -> list[tuple[int, str]]:
    """The shell blocks of the page, and what each exits with."""
    found = re.findall(r"<!-- run: (\d) -->\n```sh\n(.*?)```\n", PAGE, re.S)
    assert PAGE.count("```sh\n") == len(found)
    return [(int(code), text) for code, text in found]


LEFT_BEHIND = {"deployed", "plugin", "report.json", "report.schema.json"}


@pytest.mark.releases
def test_the_shell_lines_of_the_page_on_releases(tmp_path: Path) -> None:
    """One block after the other in one folder; a line that fails ends its block."""
    commands = tmp_path / "bin"
    commands.mkdir()
    (commands / "mlagen").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m mlagen "$@"\n')
    (commands / "mlagen").chmod(0o755)
    variables = {
        **os.environ,
        "PATH": f"{commands}{os.pathsep}{os.environ['PATH']}",
        "MLAGEN_CACHE": str(fetch.cache_dir()),
    }
    (tmp_path / "work").mkdir()
    for expected, text in blocks():
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", text],
            cwd=tmp_path / "work",
            env=variables,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == expected, f"{text}\n{done.stdout}\n{done.stderr}"
    assert {path.name for path in (tmp_path / "work").iterdir()} == LEFT_BEHIND


def test_the_shell_lines_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same with miniatures in place of the releases, which takes a tenth of the time."""
    here = workspace(tmp_path, monkeypatch)
    backend = here / "sglang" / IN_CHECKOUT.removeprefix("python/sglang/")
    registry = here / "sglang" / REGISTRY_FILE
    for place, data in ((backend, ORIGINAL), (registry, f"{GROUP}\ndef load_plugins()".encode())):
        place.parent.mkdir(parents=True)
        place.write_bytes(data)
    bumped = {name: text + "# bumped\n" for name, text in FLASHINFER.items()}
    miniatures.write(bumped, here / "bumped")
    before = {path.name for path in here.iterdir()}
    stands_for = {"sglang==0.5.23": "sglang", "0.7.2": "fi", "0.7.4": "bumped"}
    for expected, text in blocks():
        for line in text.splitlines():
            command, _, into = line.partition(" > ")
            name, *words = [stands_for.get(word, word) for word in shlex.split(command)]
            if name == "mlagen":
                done = run(*words)
                assert done.code == expected, f"{line}\n{done.text}\n{done.err}"
                out = done.out
            else:
                assert name == "python3"
                out = subprocess.check_output([sys.executable, *words])
                assert out.startswith(b"0 ['right for FlashInfer")
            if into:
                (here / into).write_bytes(out)
    assert {path.name for path in here.iterdir()} - before == LEFT_BEHIND


def test_the_yaml_of_the_page(tmp_path: Path) -> None:
    workflow, config = (
        yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", PAGE, re.S)
    )
    assert [hook["id"] for hook in config["repos"][0]["hooks"]] == list(HOOKS)
    steps = [step.get("run", "") for step in workflow["jobs"]["check"]["steps"]]
    (step,) = [text for text in steps if "mlagen check" in text]
    (tmp_path / "mlagen").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "mlagen").chmod(0o755)

    def done() -> subprocess.CompletedProcess[str]:
        """The step as GitHub runs it, with a command that tells what it was called with."""
        return subprocess.run(
            ["bash", "-e", "-c", step],
            cwd=tmp_path,
            env={**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"},
            capture_output=True,
            text=True,
            check=False,
        )

    assert (done().returncode, done().stdout) == (2, "")  # no pin: the step fails, it does not pass
    (tmp_path / "requirements.txt").write_text("torch\nflashinfer-python==0.7.2\n")
    called = "check python/sglang --flashinfer flashinfer-python==0.7.2 --format github\n"
    assert (done().returncode, done().stdout) == (0, called)
