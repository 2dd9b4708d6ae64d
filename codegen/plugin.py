"""A patch -> an installable package that makes the same changes when SGLang loads the file.

SGLang calls the entry points of `sglang.srt.plugins` early in each of its processes (0.5.11 and
later; sglang/srt/plugins/__init__.py, `load_plugins`). The package puts a finder in front of the
import system that gives the patched file for the back end's module, once the file that lies there,
and the FlashInfer, are those that it was made for.

A pure stage: the same patch gives the same bytes, without a date or a path.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from .errors import usage
from .fetch import Tree
from .flashinfer.api import PlanApi
from .flashinfer.find import FlashInferSource
from .flashinfer.read import read_plan_api
from .patch import Patch, mlagen_version
from .render import environment
from .sglang.find import BACKEND_FILE, FoundTarget

#: What SGLang looks its plugins up by, and the file that does it, below the package `sglang`.
GROUP: Final = "sglang.srt.plugins"
REGISTRY_FILE: Final = "srt/plugins/__init__.py"
#: The first release with that file.
FIRST_RELEASE: Final = "0.5.11"

DISTRIBUTION: Final = "mlagen-sglang-plugin"
PACKAGE: Final = "mlagen_sglang_plugin"
ENTRY_POINT: Final = "mlagen"
#: The environment variable that switches it off.
VARIABLE: Final = "MLAGEN_SGLANG_PLUGIN"
#: An attribute of the module that was loaded by it: the package's version.
MARK: Final = "__mlagen_plugin__"

MODULE: Final = "sglang." + BACKEND_FILE.removesuffix(".py").replace("/", ".")
#: Below the package, in a folder that is none: nothing imports it as a module of its own.
PATCHED_FILE: Final = f"patched/{Path(BACKEND_FILE).name}"
MADE_FOR_FILE: Final = "made_for.json"
#: Of made_for.json.
FORMAT: Final = 1


@dataclass(frozen=True)
class MadeFor:
    """What a plugin was made for: made_for.json.

    Attributes:
        version: of the package: mlagen's, and 12 digits of what the rest says.
        mlagen: the version that rendered it.
        original: sha256 of SGLang's file, hex.
        patched: sha256 of what is loaded in its place.
        flashinfer: FlashInfer's version, None where its source does not tell.
        era: PlanApi.era_text.
        digest: PlanApi.digest.
        files: FlashInfer's files that were read, by path, with their sha256.
        variants: what the patched file has.
    """

    version: str
    mlagen: str
    original: str
    patched: str
    flashinfer: str | None
    era: str
    digest: str
    files: Mapping[str, str]
    variants: tuple[str, ...]

    def text(self) -> str:
        """As JSON, keys sorted, with a final line end."""
        content = {
            "format": FORMAT,
            "version": self.version,
            "mlagen": self.mlagen,
            "module": MODULE,
            "file": {"sha256": self.original},
            "patched": {"sha256": self.patched},
            "flashinfer": {
                "version": self.flashinfer,
                "era": self.era,
                "digest": self.digest,
                "files": dict(self.files),
            },
            "variants": list(self.variants),
        }
        return json.dumps(content, indent=2, sort_keys=True) + "\n"


class _Recording:
    """A tree that remembers the sha256 of what is read from it."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self.files: dict[str, str] = {}

    def read(self, path: str) -> bytes | None:
        data = self._tree.read(path)
        if data is not None:
            self.files[path] = hashlib.sha256(data).hexdigest()
        return data

    def exists(self, path: str) -> bool:
        return self._tree.exists(path)


def read_with_files(
    source: FlashInferSource, *, allow_unknown: bool = False
) -> tuple[PlanApi, dict[str, str]]:
    """`read_plan_api`, and the sha256 (hex) of each file that it read, by path."""
    tree = _Recording(source.tree)
    api = read_plan_api(replace(source, tree=tree), allow_unknown=allow_unknown)
    return api, dict(sorted(tree.files.items()))


def made_for(patch: Patch, files: Mapping[str, str]) -> MadeFor:
    """What a plugin of this patch will ask for. `files`: as `read_with_files` gives them."""
    api, spec = patch.rendered.api, patch.rendered.spec
    served = [v.name for v in spec.variants if v.name not in patch.target.absent]
    facts = MadeFor(
        version="",
        mlagen=mlagen_version(),
        original=hashlib.sha256(patch.original).hexdigest(),
        patched=hashlib.sha256(patch.patched).hexdigest(),
        flashinfer=api.version,
        era=api.era_text,
        digest=api.digest,
        files=files,
        variants=tuple(served),
    )
    digest = hashlib.sha256(facts.text().encode()).hexdigest()[:12]
    # A local version: pip sees that it is another one. The letter keeps it from being a number.
    joint = "." if "+" in facts.mlagen else "+"
    return replace(facts, version=f"{facts.mlagen}{joint}p{digest}")


def plugin_files(facts: MadeFor, patched: bytes) -> dict[str, bytes]:
    """The package, by name below its folder; made_for.json, which vouches for the rest, is last."""
    scope = {
        "mlagen": facts.mlagen,
        "version": facts.version,
        "distribution": DISTRIBUTION,
        "package": PACKAGE,
        "group": GROUP,
        "entry_point": ENTRY_POINT,
        "variable": VARIABLE,
        "mark": MARK,
        "module": MODULE,
        "file": Path(BACKEND_FILE).name,
        "patched_file": PATCHED_FILE,
        "original": facts.original,
        "patched": facts.patched,
        "flashinfer": facts.flashinfer,
        "era": facts.era,
        "digest": facts.digest,
        "variants": facts.variants,
    }
    return {
        "pyproject.toml": _rendered("pyproject.toml", scope),
        "README.md": _rendered("README.md", scope),
        f"{PACKAGE}/__init__.py": _rendered("__init__.py", scope),
        f"{PACKAGE}/__main__.py": _rendered("__main__.py", scope),
        f"{PACKAGE}/{PATCHED_FILE}": patched,
        f"{PACKAGE}/{MADE_FOR_FILE}": facts.text().encode(),
    }


def _rendered(name: str, scope: Mapping[str, Any]) -> bytes:
    template = environment().get_template(f"plugin/{name}.jinja")
    return (template.render(scope).strip("\n") + "\n").encode()


def require_registry(found: FoundTarget, registry: bytes | None) -> None:
    """Refuse an SGLang that would never call the plugin: it would do nothing, in silence.

    Args:
        registry: the bytes of REGISTRY_FILE beside the file, None where there is none.

    Raises UsageError.
    """
    if registry is not None and GROUP.encode() in registry and b"def load_plugins" in registry:
        return
    what = "is not the registry that mlagen knows" if registry is not None else "is not there"
    raise usage(
        f"this SGLang loads no plugins: looked for load_plugins and {GROUP} in "
        f"sglang/{REGISTRY_FILE}, which {what}",
        path=found.label,
        code="no-plugin-registry",
        hint=f"releases from {FIRST_RELEASE} on have it; give the folder that holds the package "
        "sglang, or splice with `mlagen patch`",
    )
