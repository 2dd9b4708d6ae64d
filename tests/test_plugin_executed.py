"""A real back end, loaded by the plugin: its plans are those of the spliced file.

The same drivers and stand-ins as for the splice (tests/executed/), but the module comes out of the
import system, through the finder that the plugin puts in front of it.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from mlagen.codegen.fetch import WheelTree, fetch
from mlagen.codegen.plugin import (
    MARK,
    MODULE,
    PACKAGE,
    PATCHED_FILE,
    made_for,
    plugin_files,
    read_with_files,
)
from mlagen.codegen.sglang.find import BACKEND_FILE
from tests.executed import expected
from tests.executed.harness import Done, Session
from tests.executed.release_code import builtins_with
from tests.executed.runs import BATCHES, NDT, STEPS
from tests.releases import PINS, flashinfer_source, patch_of, sglang_file

SGLANG = "0.5.23"
FLASHINFER = PINS[SGLANG]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A site-packages with that release's file, its FlashInfer and the plugin, on the path."""
    folder = tmp_path_factory.mktemp("site")
    made = patch_of(SGLANG, FLASHINFER)
    files = read_with_files(flashinfer_source(FLASHINFER))[1]
    wheel = WheelTree(fetch(f"flashinfer-python=={FLASHINFER}"))
    package = plugin_files(made_for(made, files), made.patched)
    written = {
        "sglang/__init__.py": b"",
        f"sglang/{BACKEND_FILE}": sglang_file(SGLANG),
        "flashinfer/__init__.py": b"",
        **{name: wheel.read(name) for name in (*files, "flashinfer/_build_meta.py")},
        **{name: data for name, data in package.items() if name.startswith(PACKAGE)},
    }
    for name, data in written.items():
        assert data is not None, name
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    modules, finders = set(sys.modules), list(sys.meta_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield folder
    sys.meta_path[:] = finders
    for name in set(sys.modules) - modules:
        if name.split(".")[0] in (PACKAGE, "sglang"):
            del sys.modules[name]


class LoadedByPlugin(Session):
    """A session whose module was found and loaded through the plugin's finder."""

    def __init__(self, site: Path) -> None:
        self.site = site
        super().__init__(SGLANG, flashinfer=FLASHINFER)

    def _load(self, source: bytes) -> ModuleType:
        importlib.import_module(PACKAGE).register()
        place = [str((self.site / "sglang" / BACKEND_FILE).parent)]
        (finder,) = [f for f in sys.meta_path if type(f).__module__ == PACKAGE]
        spec = finder.find_spec(MODULE, place)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        module.__dict__["__builtins__"] = builtins_with(self.stubs.provide)
        sys.modules[MODULE] = module
        weakref.finalize(self, sys.modules.pop, MODULE, None)
        assert spec.origin is not None
        self.gpu.driven.add(spec.origin)
        spec.loader.exec_module(module)
        return module


def _recorded(done: Done) -> tuple[object, ...]:
    """All that a run led to, less the objects of its own session."""
    plans = [(r.arrays, r.dtypes, r.num_heads, r.causal, r.stock) for r in done.records]
    launches = [(one.tokens, one.causal, one.grid_fits) for one in done.launches]
    return plans, launches, done.waits, done.stored


def test_the_plugin_gives_the_patched_module(site: Path) -> None:
    session = LoadedByPlugin(site)
    module = session.module
    assert module.__file__ == str(site / PACKAGE / PATCHED_FILE)
    assert (module.__name__, module.__package__) == (MODULE, MODULE.rpartition(".")[0])
    assert str(getattr(module, MARK)).startswith("0.1.0+p")
    assert hasattr(module, "MlagenPlanError")
    assert (site / "sglang" / BACKEND_FILE).read_bytes() == sglang_file(SGLANG)


def test_its_plans_are_those_of_the_splice(site: Path) -> None:
    plugin = LoadedByPlugin(site)
    splice = Session(SGLANG, patch_of(SGLANG, FLASHINFER).patched, flashinfer=FLASHINFER)
    released = Session(SGLANG, flashinfer=FLASHINFER)
    sessions = (plugin, splice, released)
    for s in sessions:
        s.capture_decode(4)
        s.capture_verify(4, NDT)
        s.capture_draft(4, STEPS)
    for lens in BATCHES:
        decode = [s.replay_decode(lens, bs=4) for s in sessions]
        verify = [s.replay_verify(lens, NDT, bs=4) for s in sessions]
        draft = [s.replay_draft(lens, bs=4) for s in sessions]
        eager = [s.eager_verify(lens, NDT) for s in sessions]
        steps = [s.eager_draft(lens, STEPS) for s in sessions]
        extend = [s.eager_extend(lens, [1] * len(lens)) for s in sessions]
        for by_plugin, by_splice, _ in (decode, verify, draft, eager, steps, extend):
            assert _recorded(by_plugin) == _recorded(by_splice)
        assert decode[0].record.arrays == expected.decode(lens, 4)
        assert verify[0].record.arrays == expected.verify(lens, NDT, 4)
        assert not verify[0].record.stock
        assert decode[0].waits == draft[0].waits == ()
        # What it is about: the released file plans the draft steps with too few tokens.
        assert draft[0].records[0].arrays != draft[2].records[0].arrays
