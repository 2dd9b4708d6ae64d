"""`mlagen plugin`: the package that makes the changes at load time, and when it refuses.

The loader is tested in processes of its own, with the loader of plugins of a real SGLang, on files
of a few lines. tests/test_plugin_executed.py runs a real back end that it loaded.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from mlagen.codegen import plugin
from mlagen.codegen.plugin import (
    DISTRIBUTION,
    ENTRY_POINT,
    GROUP,
    MADE_FOR_FILE,
    MARK,
    MODULE,
    PACKAGE,
    PATCHED_FILE,
    REGISTRY_FILE,
    VARIABLE,
    MadeFor,
    plugin_files,
    read_with_files,
)
from mlagen.codegen.sglang.find import BACKEND_FILE
from mlagen.codegen.spec import shipped_spec
from tests.cli_workspace import FILE, ORIGINAL, Outcome, files_below, patched, run, workspace
from tests.flashinfer import miniatures
from tests.releases import PINS, flashinfer_source, plan_api, sglang_tree

SGLANG = "0.5.23"
AS_RELEASED = b"WHO = 'as released'\n"
PATCHED = b"WHO = 'patched'\n\n\ndef fail():\n    raise ValueError('here')  # this line\n"
CORE = b"class Wrapper: ...\n"
#: What SGLang's loader asks of its environ.py, which takes long to compile.
ENVIRON = b"""
import os

class Text:
    def __set_name__(self, owner, name):
        self.name = name

    def get(self):
        return os.environ.get(self.name)

class Envs:
    SGLANG_PLUGINS = Text()
    SGLANG_PLATFORM = Text()

envs = Envs()
"""


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def made_for(**changes: object) -> MadeFor:
    """Of the small files above."""
    facts = {
        "version": "0.1.0+p0",
        "mlagen": "0.1.0",
        "original": sha256(AS_RELEASED),
        "patched": sha256(PATCHED),
        "flashinfer": "0.7.2",
        "era": "0.7.0-0.7.4",
        "digest": "d" * 64,
        "files": {"flashinfer/mla/_core.py": sha256(CORE)},
        "variants": ("decode",),
    }
    return MadeFor(**(facts | changes))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Ran:
    code: int
    out: str
    err: str


@dataclass(frozen=True)
class Site:
    """A site-packages with an SGLang, a FlashInfer and the plugin; nothing else is on the path."""

    folder: Path

    @property
    def backend(self) -> Path:
        return self.folder / "sglang" / BACKEND_FILE

    @property
    def core(self) -> Path:
        return self.folder / "flashinfer/mla/_core.py"

    @property
    def meta(self) -> Path:
        return self.folder / "flashinfer/_build_meta.py"

    @property
    def copy(self) -> Path:
        return self.folder / PACKAGE / PATCHED_FILE

    def python(self, *arguments: str, **variables: str) -> Ran:
        done = subprocess.run(
            [sys.executable, "-S", "-B", *arguments],
            cwd=self.folder.parent,
            env={"PATH": os.environ["PATH"], "PYTHONPATH": str(self.folder), **variables},
            capture_output=True,
            text=True,
            check=False,
        )
        return Ran(done.returncode, done.stdout, done.stderr)

    def serve(self, before: str = "", after: str = "", **variables: str) -> Ran:
        """What a server does: load the plugins, then import the back end and use it."""
        code = f"""
import logging
logging.basicConfig(level="INFO", format="%(name)s: %(message)s")
{before}
from sglang.srt.plugins import load_plugins
load_plugins()
{after}
from sglang.srt.layers.attention import flashinfer_mla_backend as backend
print(backend.WHO, getattr(backend, "{MARK}", None), backend.__file__)
"""
        return self.python("-c", code, **variables)


def write(folder: Path, files: Mapping[str, bytes]) -> None:
    for name, data in files.items():
        place = folder / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(data)


def fill(
    folder: Path, facts: MadeFor | None = None, *, release: str = SGLANG, whole: bool = False
) -> Site:
    """The release's own loader of plugins; `whole`: with its own environ.py."""
    names = ["plugins/__init__.py", "plugins/hook_registry.py"]
    names += ["environ.py", "debug_utils/cuda_coredump.py"] if whole else []
    own = {f"sglang/srt/{name}": sglang_tree(release).read(f"sglang/srt/{name}") for name in names}
    entry = f"[{GROUP}]\n{ENTRY_POINT} = {PACKAGE}:register\n"
    package = plugin_files(facts or made_for(), PATCHED)
    write(
        folder,
        {
            "sglang/__init__.py": b"",
            "sglang/srt/environ.py": ENVIRON,
            **{name: data for name, data in own.items() if data is not None},
            f"sglang/{BACKEND_FILE}": AS_RELEASED,
            "flashinfer/__init__.py": b"raise AssertionError('FlashInfer is not imported')\n",
            "flashinfer/_build_meta.py": b'__version__ = "0.7.2"\n',
            "flashinfer/mla/_core.py": CORE,
            **{name: data for name, data in package.items() if name.startswith(PACKAGE)},
            f"{PACKAGE}-1.dist-info/METADATA": f"Name: {DISTRIBUTION}\nVersion: 1\n".encode(),
            f"{PACKAGE}-1.dist-info/entry_points.txt": entry.encode(),
        },
    )
    return Site(folder)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return fill(tmp_path / "site")


# --- the loader -------------------------------------------------------------------------------


def _releases() -> list[Any]:
    """Those with a registry: the first and the last by default, the others in the wide suite."""
    versions = [v for v in PINS if Version(v) >= Version(plugin.FIRST_RELEASE)]
    wide = [pytest.param(v, marks=pytest.mark.releases) for v in versions[1:-1]]
    return [versions[0], *wide, versions[-1]]


@pytest.mark.parametrize("release", _releases())
def test_sglangs_loader_of_plugins_puts_the_plans_in(tmp_path: Path, release: str) -> None:
    site = fill(tmp_path / "site", release=release, whole=True)
    done = site.serve()
    assert (done.code, done.out) == (0, f"patched 0.1.0+p0 {site.copy}\n"), done.err
    assert f"{PACKAGE}: mlagen's plans will be loaded in place of {site.backend}" in done.err
    assert f"{PACKAGE}: mlagen's plans for FlashInfer 0.7.2 are active: {MODULE} comes" in done.err
    assert site.backend.read_bytes() == AS_RELEASED


def test_the_release_before_has_no_registry() -> None:
    assert sglang_tree("0.5.10").read(f"sglang/{REGISTRY_FILE}") is None


def _remove(place: Path) -> None:
    place.unlink()


#: What is done to the site, and what the refusal says.
REFUSALS: Mapping[str, tuple[Callable[[Site], object], str]] = {
    "another file": (
        lambda s: s.backend.write_bytes(AS_RELEASED + b"# a fork\n"),
        "flashinfer_mla_backend.py is not the file that this plugin was made for",
    ),
    "other line ends": (
        lambda s: s.backend.write_bytes(AS_RELEASED.replace(b"\n", b"\r\n")),
        "is not the file that this plugin was made for",
    ),
    "patched already": (lambda s: s.backend.write_bytes(PATCHED), "is patched already"),
    "no such file": (lambda s: _remove(s.backend), "no srt/layers/attention/flashinfer_mla"),
    "another FlashInfer": (
        lambda s: s.meta.write_bytes(b'__version__ = "0.7.4"\n'),
        "FlashInfer 0.7.4 is installed",
    ),
    "another under the same version": (
        lambda s: s.core.write_bytes(CORE + b"#\n"),
        "_core.py is not what the plans are written for",
    ),
    "FlashInfer has moved": (lambda s: _remove(s.core), "FlashInfer has no"),
    "no FlashInfer": (
        lambda s: (s.folder / "flashinfer").rename(s.folder / "gone"),
        "no FlashInfer is installed",
    ),
    "an unreadable file": (
        lambda s: (_remove(s.core), s.core.mkdir()),
        "FlashInfer has no",
    ),
    "its own facts gone": (
        lambda s: _remove(s.folder / PACKAGE / MADE_FOR_FILE),
        "made_for.json cannot be read",
    ),
    "its own facts broken": (
        lambda s: (s.folder / PACKAGE / MADE_FOR_FILE).write_bytes(b"{"),
        "made_for.json cannot be read",
    ),
    "edited copy": (lambda s: s.copy.write_bytes(PATCHED + b"#\n"), "was edited"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_it_was_not_made_for_ends_the_process(site: Site, case: str) -> None:
    """SGLang catches what a plugin raises, and logs it: this must not be caught."""
    change, reason = REFUSALS[case]
    change(site)
    done = site.serve()
    assert done.code == 1
    assert done.out == ""
    assert f"{DISTRIBUTION} refuses: " in done.err
    assert reason in done.err
    assert "Traceback" not in done.err
    assert f"{VARIABLE}=off" in done.err
    told = site.python("-m", PACKAGE)
    assert told.code == 1
    assert reason in told.out


def test_what_it_was_not_made_for_is_served_without_it(site: Site) -> None:
    site.backend.write_bytes(AS_RELEASED + b"# a fork\n")
    (site.folder / "flashinfer").rename(site.folder / "gone")
    done = site.serve(**{VARIABLE: "off"})
    assert (done.code, done.out) == (0, f"as released None {site.backend}\n")
    assert "mlagen's plans are switched off by" in done.err


def test_a_file_that_was_imported_early_is_refused(site: Site) -> None:
    done = site.serve(before=f"import {MODULE}")
    assert (done.code, done.out) == (1, "")
    assert f"{MODULE} was imported before SGLang loaded its plugins" in done.err


@pytest.mark.parametrize("value", ["off", "0", "No", " false "])
def test_it_can_be_switched_off(site: Site, value: str) -> None:
    done = site.serve(**{VARIABLE: value})
    assert (done.code, done.out) == (0, f"as released None {site.backend}\n")
    assert "switched off by" in done.err
    told = site.python("-m", PACKAGE, **{VARIABLE: value})
    assert (told.code, told.out) == (1, f"switched off: {VARIABLE}={value}\n")


@pytest.mark.parametrize("value", ["", "on", "1"])
def test_other_values_leave_it_on(site: Site, value: str) -> None:
    assert site.serve(**{VARIABLE: value}).out.startswith("patched ")


def test_sglangs_list_of_plugins_may_leave_it_out(site: Site) -> None:
    done = site.serve(SGLANG_PLUGINS="another")
    assert done.out.startswith("as released ")
    told = site.python("-m", PACKAGE, SGLANG_PLUGINS="another")
    assert (told.code, told.out) == (1, "left out: SGLANG_PLUGINS=another does not name mlagen\n")
    assert site.python("-m", PACKAGE, SGLANG_PLUGINS="another, mlagen").code == 0


def test_it_says_that_it_fits(site: Site) -> None:
    told = site.python("-m", PACKAGE)
    assert (told.code, told.out) == (0, f"fits: {site.backend}\n")


def test_a_file_that_changes_after_the_start_is_not_replaced(site: Site) -> None:
    done = site.serve(after=f"open({str(site.backend)!r}, 'a').write('#')")
    assert (done.code, done.out) == (1, "")
    assert "MlagenPluginError: " in done.err
    assert "is not the file that this plugin was made for" in done.err


def test_byte_code_beside_the_copy_is_not_taken(site: Site) -> None:
    """The text that was compared is what runs."""
    code = f"import py_compile; py_compile.compile({str(site.copy)!r}, invalidation_mode=" + (
        "py_compile.PycInvalidationMode.UNCHECKED_HASH)"
    )
    site.copy.write_bytes(b"WHO = 'byte code'\n")
    assert site.python("-c", code).code == 0
    site.copy.write_bytes(PATCHED)
    assert site.serve().out.startswith("patched ")


def test_what_no_one_thought_of_ends_the_process_too(site: Site) -> None:
    (site.folder / PACKAGE / MADE_FOR_FILE).write_bytes(b"{}")
    done = site.serve()
    assert (done.code, done.out) == (1, "")
    assert "KeyError" in done.err


def test_whoever_catches_the_exit_does_not_get_the_file(site: Site) -> None:
    """A notebook does; SGLang believes from then on that plugins are loaded."""
    site.core.write_bytes(CORE + b"#\n")
    caught = """
from sglang.srt.plugins import load_plugins
try:
    load_plugins()
except SystemExit as refused:
    print("caught", refused.code.split(":")[0])
"""
    done = site.serve(before=caught)
    assert (done.code, done.out) == (1, f"caught {DISTRIBUTION} refuses\n")
    assert "MlagenPluginError" in done.err
    assert "_core.py is not what the plans are written for" in done.err


RAY = "srt/ray/scheduler_actor.py"


@pytest.mark.parametrize("early", [True, False])
def test_under_ray_no_plugins_are_loaded(site: Site, early: bool) -> None:
    """The server would run without the plans: its actors never look for plugins."""
    released = sglang_tree(SGLANG).read(f"sglang/{RAY}")
    assert released is not None
    assert b"load_plugins" not in released
    write(site.folder, {f"sglang/{RAY}": b"class SchedulerActor: ...\n"})
    use = "from sglang.srt.ray.scheduler_actor import SchedulerActor"
    done = site.serve(before=use) if early else site.serve(after=use)
    assert (done.code, done.out) == (1, "")
    assert "under Ray no plugins are loaded where the model runs" in done.err
    assert "`mlagen patch`" in done.err
    write(site.folder, {f"sglang/{RAY}": b"def load_plugins(): ...\nload_plugins()\n"})
    use = "import sglang.srt.ray.scheduler_actor"
    done = site.serve(before=use) if early else site.serve(after=use)
    assert done.out.startswith("patched ")


def test_a_module_of_another_hook_is_refused(site: Site) -> None:
    hook = f"""
import importlib.machinery, sys
class Hook:
    def find_spec(self, name, path=None, target=None):
        if name == "{MODULE}":
            return importlib.machinery.ModuleSpec(name, self, origin="<made up>")
"""
    done = site.serve(before=hook + "sys.meta_path.insert(0, Hook())")
    assert (done.code, done.out) == (1, "")
    assert "would be loaded from <made up>, which is no file" in done.err


def test_plugins_may_be_loaded_twice(site: Site) -> None:
    again = f"""
import sys, {PACKAGE}
{PACKAGE}.register()
print(sum(type(finder).__module__ == "{PACKAGE}" for finder in sys.meta_path))
"""
    done = site.serve(after=again)
    assert done.out == f"1\npatched 0.1.0+p0 {site.copy}\n"
    late = site.serve(after=f"import {MODULE}" + again)
    assert late.out == done.out


def test_only_the_one_module_is_touched(site: Site) -> None:
    write(site.folder, {"sglang/srt/layers/attention/other.py": b"WHO = 'other'\n"})
    done = site.serve(after="from sglang.srt.layers.attention import other; print(other.WHO)")
    assert done.out.startswith("other\npatched ")


def test_tracebacks_and_inspect_show_the_patched_source(site: Site) -> None:
    code = f"""
from sglang.srt.plugins import load_plugins
load_plugins()
import inspect
from {MODULE} import fail
print(inspect.getsource(fail), inspect.getsourcefile(fail))
fail()
"""
    done = site.python("-c", code)
    assert "# this line" in done.out
    assert done.out.endswith(f"{site.copy}\n")
    assert f'File "{site.copy}", line 5, in fail' in done.err
    assert "# this line" in done.err


def test_a_version_that_no_one_tells_is_compared_by_its_files(tmp_path: Path) -> None:
    site = fill(tmp_path / "site")
    site.meta.write_bytes(b'__version__ = "0.0.0+unknown"\n')
    assert site.serve().out.startswith("patched ")
    write(site.folder, {"flashinfer_python-0.7.4.dist-info/METADATA": b"Version: 0.7.4\n"})
    assert "FlashInfer 0.7.4 is installed" in site.serve().err
    unknown = fill(tmp_path / "unknown", made_for(flashinfer=None))
    assert unknown.serve().out.startswith("patched ")


def test_pip_installs_it(tmp_path: Path) -> None:
    """Also from a folder of a repository that ignores everything. No network."""
    pytest.importorskip("hatchling", reason="the build back end; the extra `test` brings it")
    out, installed = tmp_path / "repository/out", tmp_path / "installed"
    write(out, plugin_files(made_for(), PATCHED))
    write(out.parent, {".gitignore": b"*\n", ".git/HEAD": b"ref: refs/heads/main\n"})
    options = ["--no-index", "--no-deps", "--no-build-isolation", "--no-compile", "-q"]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "install", *options, "--target", installed, out],
        env={**os.environ, "PIP_CONFIG_FILE": os.devnull, "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rendered = {name for name in plugin_files(made_for(), PATCHED) if name.startswith(PACKAGE)}
    files = set(files_below(installed))
    assert {name for name in files if ".dist-info/" not in name} == rendered
    site = fill(tmp_path / "site")
    for name in (PACKAGE, f"{PACKAGE}-1.dist-info"):
        shutil.rmtree(site.folder / name)
    both = os.pathsep.join([str(site.folder), str(installed)])
    served = site.serve(PYTHONPATH=both)
    assert served.out == f"patched 0.1.0+p0 {installed / PACKAGE / PATCHED_FILE}\n", served.err
    version = f"import importlib.metadata as m; print(m.version('{DISTRIBUTION}'))"
    assert site.python("-c", version, PYTHONPATH=both).out == "0.1.0+p0\n"


# --- the package ------------------------------------------------------------------------------


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The miniatures, and an environment with the back end and a registry of plugins."""
    folder = workspace(tmp_path, monkeypatch)
    registry = f'"""{GROUP}"""\n\ndef load_plugins(): ...\n'.encode()
    write(
        folder / "env",
        {f"sglang/{BACKEND_FILE}": ORIGINAL, f"sglang/{REGISTRY_FILE}": registry},
    )
    return folder


MAKE = ("plugin", "env", "--flashinfer", "fi", "--out", "out")
MODULES = ("__init__.py", "__main__.py", PATCHED_FILE, MADE_FOR_FILE)
PACKAGE_FILES = ("pyproject.toml", "README.md", *(f"{PACKAGE}/{name}" for name in MODULES))


def test_the_package_is_written_and_says_what_it_is_for(here: Path) -> None:
    before = files_below(here)
    done = run(*MAKE)

    assert done.code == 0
    assert f"package        {DISTRIBUTION} 0.1.0+p" in done.text
    assert "pip install out" in " ".join(done.text.split())
    files = files_below(here / "out")
    assert {name: data for name, data in files_below(here).items() if name[:4] != "out/"} == before
    assert files[f"{PACKAGE}/{PATCHED_FILE}"] == patched()
    content = json.loads(files[f"{PACKAGE}/{MADE_FOR_FILE}"])
    assert content["file"]["sha256"] == sha256(ORIGINAL)
    assert content["patched"]["sha256"] == sha256(patched())
    assert content["flashinfer"]["files"] == {
        f"flashinfer/{name}": sha256(data)
        for name, data in files_below(here / "fi" / "flashinfer").items()
        if f"flashinfer/{name}" in content["flashinfer"]["files"]
    }
    assert content["flashinfer"]["files"]
    assert run(*MAKE).text.endswith("nothing to do: out is current\n")
    assert files_below(here / "out") == files


def test_the_package_depends_on_nothing_but_its_inputs(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(*MAKE)
    first = files_below(here / "out")
    (here / "elsewhere").mkdir()
    (here / "env").rename(here / "elsewhere/env")
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1")
    run("plugin", "elsewhere/env/sglang", "--flashinfer", "fi", "--out", "b/c")
    assert files_below(here / "b/c") == first
    for name, data in first.items():
        assert str(here).encode() not in data, name
        if not name.endswith(FILE):
            assert not re.search(rb"\b20\d\d-\d\d", data), name


def test_the_wheel_of_an_sglang_gives_the_same_package(here: Path) -> None:
    run(*MAKE)
    with zipfile.ZipFile(here / "sglang-9.9.whl", "w") as file:
        for name, data in files_below(here / "env").items():
            file.writestr(name, data)
    assert run("plugin", "sglang-9.9.whl", "--flashinfer", "fi", "--out", "by").code == 0
    assert files_below(here / "by") == files_below(here / "out")


def test_what_differs_has_another_version(here: Path) -> None:
    def version(*more: str) -> str:
        run(*MAKE, *more)
        text = (here / "out" / PACKAGE / MADE_FOR_FILE).read_text()
        return str(json.loads(text)["version"])

    versions = [version(), version("--only", "verify"), version("--flashinfer", "fi7")]
    assert len(set(versions)) == 3
    assert version() == versions[0]


def test_the_rendered_modules_are_formatted(here: Path) -> None:
    run(*MAKE)
    names = [str(here / "out" / PACKAGE / name) for name in ("__init__.py", "__main__.py")]
    for command in (["format", "--check", "--diff"], ["check", "--select", "E,F,I,UP,B,RET"]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *command, "--isolated", "--line-length=100", *names],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout


def test_check_tells_and_writes_nothing(here: Path) -> None:
    missing = run(*MAKE, "--check")
    assert missing.code == 1
    assert "is not current: run `mlagen plugin`" in " ".join(missing.text.split())
    assert not (here / "out").exists()
    run(*MAKE)
    assert (run(*MAKE, "--check").code, run(*MAKE, "--check", "--format", "github").out) == (
        0,
        b"note: all files are current\n",
    )
    (here / "env/sglang" / BACKEND_FILE).write_bytes(ORIGINAL + b"# a fork\n")
    before = files_below(here)
    assert run(*MAKE, "--check").code == 1
    assert files_below(here) == before


def test_a_file_that_is_patched_gives_the_same_package_and_a_word(here: Path) -> None:
    run(*MAKE)
    first = files_below(here / "out")
    (here / "env/sglang" / BACKEND_FILE).write_bytes(patched())
    done = run(*MAKE)
    assert done.code == 0
    assert "run `mlagen unpatch` before you install it" in " ".join(done.text.split())
    assert files_below(here / "out") == first


@pytest.mark.parametrize(
    ("registry", "said"),
    [(None, "which is not there"), (b"def load(): ...\n", "is not the registry that mlagen knows")],
)
def test_an_sglang_that_loads_no_plugins_is_refused(
    here: Path, registry: bytes | None, said: str
) -> None:
    """There the package would do nothing, in silence."""
    place = here / "env/sglang" / REGISTRY_FILE
    place.unlink()
    if registry is not None:
        place.write_bytes(registry)
    for path in ("env", FILE):
        done = run("plugin", path, "--flashinfer", "fi", "--out", "out")
        assert done.code == 2
        assert "no-plugin-registry" in done.err
        assert (said if path == "env" else "which is not there") in done.err
        assert "`mlagen patch`" in done.err
        assert not (here / "out").exists()


def test_drift_and_misuse_write_nothing(here: Path) -> None:
    assert run("plugin", "env", "--flashinfer", "drifted", "--out", "out").code == 4
    assert run(*MAKE, "--check", "--test").code == 2
    assert run(*MAKE, "--test").code == 2  # there is no GPU
    assert run("plugin", "env", "--flashinfer", "fi").code == 2
    assert run("plugin", "env", "--flashinfer", "fi", "--out", " ").code == 2
    assert not (here / "out").exists()
    write(here, {"pyproject.toml": b'[project]\nname = "mine"\n'})
    done = run("plugin", "env", "--flashinfer", "fi", "--out", ".")
    assert (done.code, "pyproject.toml: foreign-file" in done.err) == (2, True)


@pytest.mark.parametrize("more", [(), ("--check",)])
@pytest.mark.parametrize("name", PACKAGE_FILES)
def test_only_what_mlagen_wrote_is_replaced(here: Path, name: str, more: tuple[str, ...]) -> None:
    write(here / "out", {name: ORIGINAL})
    before = files_below(here)
    done = run(*MAKE, *more)

    assert (done.code, done.out) == (2, b"")
    assert done.err.startswith(f"out/{name}: foreign-file: ")
    assert "give --out another folder" in done.err
    assert files_below(here) == before


def test_every_file_of_another_version_is_replaced(here: Path) -> None:
    """All of them carry the mark, or stand beside one that does."""
    run(*MAKE)
    current = files_below(here / "out")
    assert current.keys() == set(PACKAGE_FILES)
    write(here / "out", {name: data + b"\n# x = 1\n" for name, data in current.items()})
    assert run(*MAKE).code == 0
    assert files_below(here / "out") == current


def test_an_edited_region_in_the_copy_is_told(here: Path) -> None:
    run(*MAKE)
    place = here / "out" / PACKAGE / PATCHED_FILE
    place.write_bytes(place.read_bytes().replace(b": Optional[int] = None", b": int = 0", 1))
    before = files_below(here)
    done = run(*MAKE)

    assert done.code == 5
    assert f"out/{PACKAGE}/{PATCHED_FILE}:" in done.err
    assert files_below(here) == before


@pytest.mark.parametrize("name", ["site-packages", "dist-packages", "target"])
def test_a_folder_that_packages_are_installed_in_is_refused(here: Path, name: str) -> None:
    (here / name / "click-9.9.dist-info").mkdir(parents=True)
    before = files_below(here)
    done = run("plugin", "env", "--flashinfer", "fi", "--out", name)

    assert (done.code, done.out) == (2, b"")
    assert done.err.startswith(f"{name}: site-packages: packages are installed in this folder")
    assert "`pip install`" in done.err
    assert files_below(here) == before


def test_a_flashinfer_of_no_era_is_never_silent(here: Path) -> None:
    planning = "        self._plan_info = " + miniatures.call(*miniatures.NINE, "head_dim_kpe")
    unknown = miniatures.with_header(miniatures.wrapper_era(planning))
    miniatures.write(unknown, here / "unknown")
    arguments = ("plugin", "env", "--flashinfer", "unknown", "--out", "out")
    assert run(*arguments).code == 4
    assert not (here / "out").exists()
    assert run(*arguments, "--allow-unknown").code == 0
    for name in ("README.md", f"{PACKAGE}/{MADE_FOR_FILE}", f"{PACKAGE}/{PATCHED_FILE}"):
        assert "derived from source; --allow-unknown" in (here / "out" / name).read_text(), name


def test_inspect_tells_of_one_that_is_installed(here: Path) -> None:
    def told(flashinfer: str = "fi") -> list[str]:
        facts = run("inspect", "env", "--flashinfer", flashinfer, "--json").json["facts"]
        return [fact["value"] for fact in facts if fact["name"] == "plugin"]

    assert told() == []
    run(*MAKE)
    (here / "out" / PACKAGE).rename(here / "env" / PACKAGE)
    (fits,) = told()
    assert fits.endswith(": its plans take this file's place")
    (here / "env/sglang" / BACKEND_FILE).write_bytes(ORIGINAL + b"#\n")
    (both,) = told("fi7")
    assert "made for another file than this one; made for another FlashInfer" in both
    (here / "env" / PACKAGE / MADE_FOR_FILE).write_bytes(b"{}")
    (broken,) = told()
    assert "cannot be read" in broken


@pytest.fixture
def beside(here: Path) -> Path:
    """Installed beside the file that it was made for."""
    assert run(*MAKE).code == 0
    (here / "out" / PACKAGE).rename(here / "env" / PACKAGE)
    return here


CHECK = ("check", "env", "--flashinfer")


def codes(done: Outcome) -> list[str]:
    return [problem["code"] for problem in done.json["problems"]]


def test_check_judges_what_the_plugin_makes_of_the_file(beside: Path) -> None:
    """Not SGLang's own plans, which no one runs: those sent people to `mlagen patch`."""
    done = run(*CHECK, "fi", "--json")
    assert (done.code, codes(done)) == (0, [])
    assert {site["state"] for site in done.json["sites"]} <= {
        "installed",
        "replaced upstream",
        "refused",
    }
    facts = {fact["name"]: fact["value"] for fact in done.json["facts"]}
    assert facts["file"] == f"{PACKAGE}/{PATCHED_FILE}"
    assert facts["plugin"].endswith(": its plans take this file's place")
    (beside / "env" / PACKAGE / MADE_FOR_FILE).unlink()
    assert run(*CHECK, "fi").code == 1


def test_check_sends_one_whose_text_is_stale_to_the_plugin(beside: Path) -> None:
    text = shipped_spec().read_text()
    (beside / "variants.yaml").write_text(text.replace("One new token a request.", "Changed."))
    done = run(*CHECK, "fi", "--json")
    assert done.code == 1
    assert {problem["code"] for problem in done.json["problems"]} == {"site-stale"}
    assert all("`mlagen plugin`" in problem["hint"] for problem in done.json["problems"])


def test_check_for_another_flashinfer_says_that_the_plugin_refuses(beside: Path) -> None:
    done = run(*CHECK, "fi7", "--json")
    assert done.code in (1, 4)
    first = done.json["problems"][0]
    assert first["code"] == "plugin-refuses"
    assert "made for another FlashInfer" in first["message"]
    assert all("`mlagen patch`" not in problem["hint"] for problem in done.json["problems"])


@pytest.mark.parametrize("change", ["patched", "another", "edited"])
def test_check_of_a_file_that_the_plugin_refuses(change: str, beside: Path) -> None:
    if change == "edited":
        place = beside / "env" / PACKAGE / PATCHED_FILE
        place.write_bytes(place.read_bytes() + b"#\n")
    else:
        data = patched() if change == "patched" else ORIGINAL + b"#\n"
        (beside / "env/sglang" / BACKEND_FILE).write_bytes(data)
    done = run(*CHECK, "fi", "--json")
    assert done.code == 1
    first = done.json["problems"][0]
    assert first["code"] == "plugin-refuses"
    assert ("mlagen unpatch" in first["hint"]) == (change == "patched")


def test_patch_refuses_to_write_beside_a_plugin(beside: Path) -> None:
    """Patched as well, no server would start."""
    before = files_below(beside)
    done = run("patch", "env", "--flashinfer", "fi")
    assert done.code == 2
    assert "plugin-installed" in done.err
    assert files_below(beside) == before
    assert run("patch", "env", "--flashinfer", "fi", "--diff").code == 1
    assert run("patch", "env", "--flashinfer", "fi", "--check").code == 1
    assert run("patch", "env", "--flashinfer", "fi", "--out", "made").code == 0
    (beside / "env" / PACKAGE / MADE_FOR_FILE).write_bytes(b"{}")
    for command in ("patch", "check"):
        done = run(command, "env", "--flashinfer", "fi")
        assert (done.code, "plugin-broken" in done.err) == (2, True)


def test_unpatch_is_not_kept_from_its_work_by_a_plugin(beside: Path) -> None:
    (beside / "env/sglang" / BACKEND_FILE).write_bytes(patched())
    assert run("unpatch", "env").code == 0
    assert run(*CHECK, "fi").code == 0


@pytest.mark.parametrize("version", ["0.6.17", "0.7.2"])
def test_the_files_that_are_compared_are_those_of_the_digest(version: str) -> None:
    api, files = read_with_files(flashinfer_source(version))
    total = hashlib.sha256()
    for name, digest in sorted(files.items()):
        total.update(name.encode() + b"\0" + bytes.fromhex(digest))
    assert total.hexdigest() == api.digest == plan_api(version).digest
