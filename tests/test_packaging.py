"""What an install gives, and what it must not: from a wheel and in an editable install alike.

No network: the environments are empty venvs that see this interpreter's packages through a folder
of links (all but mlagen itself), and the build back end is taken from there.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("hatchling", reason="the build back end; the extra `test` brings it")
pytest.importorskip("pip")

ROOT = Path(__file__).resolve().parents[1]
SHIPPED = ("codegen", "templates", "cli.py", "variants.yaml")
METADATA = ("pyproject.toml", "README.md", "LICENSE", ".gitignore")
OWN_FILES = {"__init__.py", "__main__.py", "py.typed"}
CACHES = shutil.ignore_patterns("__pycache__", ".*_cache")


@dataclass(frozen=True)
class Env:
    """A venv that holds mlagen and nothing else, and the tree it was installed from."""

    kind: str
    home: Path
    site: Path
    source: Path
    variables: dict[str, str]

    @property
    def python(self) -> Path:
        return self.home / "bin" / "python"

    def run(self, *command: str | Path) -> str:
        """Run from a folder that is on nobody's path, and give stdout."""
        return run(command, cwd=self.home, env=self.variables)

    def evaluate(self, code: str) -> Any:
        """Run `code`, which prints JSON last, and give what it printed."""
        return json.loads(self.run(self.python, "-c", code))


def run(command: Sequence[str | Path], *, cwd: Path, env: dict[str, str]) -> str:
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{command}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def files_below(folder: Path) -> set[str]:
    """The files in a tree, relative to it, without byte code."""
    return {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def package_files(source: Path) -> set[str]:
    """What the package mlagen must consist of: all that is shipped, and its own files."""
    shipped = {name for name in SHIPPED if (source / name).is_file()}
    for name in SHIPPED:
        shipped |= {f"{name}/{file}" for file in files_below(source / name)}
    return {file for file in shipped if not file.startswith("codegen/_package/")} | OWN_FILES


@pytest.fixture(scope="module")
def variables(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which this interpreter's packages, but not mlagen, can be imported."""
    links = tmp_path_factory.mktemp("links")
    for folder in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        for entry in Path(folder).iterdir():
            if "mlagen" not in entry.name and entry.suffix != ".pth":
                (links / entry.name).symlink_to(entry)
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PIP_", "PYTHON", "VIRTUAL_ENV"))
    }
    return kept | {
        "PYTHONPATH": str(links),
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_NO_INDEX": "1",
    }


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout, so that no build writes into it or is fooled by what lies there."""
    copy = tmp_path_factory.mktemp("checkout")
    for name in (*SHIPPED, *METADATA):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, ignore=CACHES)
        else:
            shutil.copy(ROOT / name, copy / name)
    return copy


@pytest.fixture(scope="module", params=["wheel", "editable"])
def env(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    source: Path,
    variables: dict[str, str],
) -> Env:
    home = tmp_path_factory.mktemp(request.param)
    venv.create(home, with_pip=False, symlinks=True)
    base = {"base": str(home), "platbase": str(home)}
    site = Path(sysconfig.get_path("purelib", "posix_prefix", vars=base))
    assert list(site.iterdir()) == []

    made = Env(request.param, home, site, source, variables)
    install = [made.python, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation"]
    made.run(*install, *(["-e"] if request.param == "editable" else []), source)
    return made


def test_site_packages_gains_nothing_but_mlagen(env: Env) -> None:
    version = env.evaluate("import json, mlagen; print(json.dumps(mlagen.__version__))")
    package = {"wheel": "mlagen", "editable": "_mlagen.pth"}[env.kind]

    assert {entry.name for entry in env.site.iterdir()} == {package, f"mlagen-{version}.dist-info"}


def test_what_is_installed_is_what_is_shipped(env: Env) -> None:
    code = """
import json, pathlib, mlagen
print(json.dumps([str(pathlib.Path(folder)) for folder in mlagen.__path__]))
"""
    path = [Path(folder) for folder in env.evaluate(code)]

    if env.kind == "wheel":
        assert path == [env.site / "mlagen"]
        assert files_below(path[0]) == package_files(env.source)
    else:
        assert path == [env.source / "codegen" / "_package" / "mlagen", env.source]
        assert files_below(path[0]) == OWN_FILES


def test_installing_leaves_nothing_in_the_checkout(env: Env) -> None:
    assert {entry.name for entry in env.source.iterdir()} == {*SHIPPED, *METADATA}


def test_no_top_level_module_but_mlagen(env: Env) -> None:
    code = """
import importlib.util, json
names = ["mlagen", "codegen", "cli", "templates", "generated", "variants"]
print(json.dumps([name for name in names if importlib.util.find_spec(name)]))
"""
    assert env.evaluate(code) == ["mlagen"]


def test_both_commands_run_and_agree(env: Env) -> None:
    version = env.evaluate("import json, mlagen; print(json.dumps(mlagen.__version__))")

    script = env.run(env.home / "bin" / "mlagen", "--version")
    module = env.run(env.python, "-m", "mlagen", "--version")

    assert version in script
    assert script == module


def test_every_module_imports_without_torch_and_flashinfer(env: Env) -> None:
    """`render`, `patch` and `check` run where neither is installed: no module may need them."""
    code = """
import importlib, json, pkgutil, sys
for name in ("torch", "flashinfer", "sglang", "pytest"):
    sys.modules[name] = None  # an import of it fails
import mlagen.cli, mlagen.codegen
found = [m.name for m in pkgutil.walk_packages(mlagen.codegen.__path__, "mlagen.codegen.")]
found = [name for name in found if "._package" not in name]
for name in found:
    importlib.import_module(name)
print(json.dumps(found))
"""
    found = env.evaluate(code)

    assert "mlagen.codegen.errors" in found
    modules = {
        file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for file in package_files(env.source)
        if file.startswith("codegen/") and file.endswith(".py")
    }
    assert {f"mlagen.{name}" for name in modules} == {"mlagen.codegen", *found}


def test_templates_and_data_are_found(env: Env) -> None:
    code = """
import json, jinja2, mlagen
print(json.dumps({
    "templates": jinja2.PackageLoader("mlagen").list_templates(),
    "root": str(mlagen.ROOT),
}))
"""
    found = env.evaluate(code)
    root = env.site / "mlagen" if env.kind == "wheel" else env.source

    assert set(found["templates"]) == files_below(env.source / "templates")
    assert Path(found["root"]) == root
    assert (root / "variants.yaml").is_file()


def test_the_data_files_are_shipped(source: Path) -> None:
    expected = {"py.typed", "variants.yaml", "codegen/variants.schema.json"}

    assert expected <= package_files(source)


def test_a_wheel_built_from_the_sdist_is_the_same(
    source: Path, variables: dict[str, str], tmp_path: Path
) -> None:
    build = "import sys, hatchling.build as b; print(getattr(b, sys.argv[1])(sys.argv[2]))"
    unpacked = tmp_path / "unpacked"

    def make(what: str, tree: Path) -> Path:
        name = run(
            [sys.executable, "-c", build, what, tmp_path / tree.name], cwd=tree, env=variables
        )
        return tmp_path / tree.name / name.split()[-1]

    shutil.unpack_archive(make("build_sdist", source), unpacked, filter="data")
    (tree,) = unpacked.iterdir()
    names = [
        sorted(zipfile.ZipFile(make("build_wheel", place)).namelist()) for place in (source, tree)
    ]

    assert names[0] == names[1]


@pytest.mark.parametrize("marker", ["main-command", "test-command"])
def test_readme_commands_stand_once_and_on_one_line(marker: str) -> None:
    """.ci/run takes the second from there; a newcomer copies either."""
    text = (ROOT / "README.md").read_text("utf-8")
    blocks = re.findall(rf"<!-- {marker} -->\n```sh\n(.*?)\n```\n<!-- /{marker} -->", text, re.S)

    assert len(blocks) == 1
    assert "\n" not in blocks[0]
    assert blocks[0].startswith("python3 -m venv ")
