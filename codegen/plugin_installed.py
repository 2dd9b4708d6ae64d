"""A plugin that is installed beside SGLang's file: what it was made for, and what that means for
`inspect`, `check` and `patch`.

One that is installed elsewhere on the path of an editable SGLang is not seen.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path

from .check import Checked
from .errors import Problem, UsageError, usage
from .flashinfer.api import PlanApi
from .plugin import DISTRIBUTION, MADE_FOR_FILE, PACKAGE, PATCHED_FILE
from .report import Facts
from .sglang.find import BACKEND_FILE, FoundTarget


@dataclass(frozen=True)
class InstalledPlugin:
    """A plugin, as its made_for.json tells.

    Attributes:
        version: of the package.
        original: sha256 of the SGLang file that it was made for, hex.
        flashinfer: that FlashInfer's version and PlanApi.digest.
        patched: the text that it loads in its place; None where that was edited.
    """

    version: str
    original: str
    flashinfer: tuple[str | None, str]
    patched: bytes | None

    def takes(self, found: FoundTarget) -> bool:
        """Whether it was made for this very file, and loads its own text in its place."""
        made_for_it = hashlib.sha256(found.data).hexdigest() == self.original
        return made_for_it and self.patched is not None

    def text_for(self, found: FoundTarget) -> FoundTarget:
        """The file as SGLang gets it, named as what messages then speak of."""
        assert self.patched is not None
        return replace(found, data=self.patched, label=f"{PACKAGE}/{PATCHED_FILE}")

    def faults(self, found: FoundTarget, api: PlanApi) -> list[str]:
        """Why it refuses this file with this FlashInfer, and ends the server at its start."""
        faults = []
        if hashlib.sha256(found.data).hexdigest() != self.original:
            faults.append("made for another file than this one")
        if self.flashinfer != (api.version, api.digest):
            version, digest = self.flashinfer
            faults.append(f"made for another FlashInfer ({version or digest[:12]})")
        if self.patched is None:
            faults.append("the copy in it was edited")
        return faults

    def facts(self, found: FoundTarget, api: PlanApi) -> Facts:
        """What a report says of it."""
        faults = self.faults(found, api)
        state = "it refuses: " + "; ".join(faults) if faults else "its plans take this file's place"
        return (("plugin", f"{DISTRIBUTION} {self.version}: {state}"),)

    def refusal(self, found: FoundTarget, api: PlanApi) -> Problem | None:
        """The problem to report where it refuses."""
        faults = self.faults(found, api)
        if not faults:
            return None
        message = f"{DISTRIBUTION} {self.version} is installed, and refuses: {'; '.join(faults)}"
        hint = f"render it again with `mlagen plugin` and install that, or uninstall {DISTRIBUTION}"
        if b"# >>> mlagen" in found.data:
            hint = f"run `mlagen unpatch`, or uninstall {DISTRIBUTION}: one of the two is enough"
        return Problem(found.label, 1, 0, "plugin-refuses", message, hint)

    def checked(self, checked: Checked, found: FoundTarget, api: PlanApi) -> Checked:
        """What `check` found in the text that SGLang gets, where the plugin has its say too."""
        problems = checked.problems
        if self.takes(found):  # so the plugin's text was checked, which `patch` does not mend
            again = "render the plugin again with `mlagen plugin`, and install that"
            problems = tuple(
                replace(problem, hint=again) if problem.code.startswith("site-") else problem
                for problem in problems
            )
        refusal = self.refusal(found, api)
        if refusal is None:
            return replace(checked, problems=problems)
        return replace(checked, exit_code=checked.exit_code or 1, problems=(refusal, *problems))


def find_plugin(found: FoundTarget) -> InstalledPlugin | None:
    """The plugin that is installed beside a file, None where there is none.

    Raises UsageError where it cannot be read.
    """
    package = package_folder(found)
    place = package.parent / PACKAGE if package is not None else None
    if place is None or not (place / MADE_FOR_FILE).is_file():
        return None
    try:
        content = json.loads((place / MADE_FOR_FILE).read_text("utf-8"))
        version, original = content["version"], content["file"]["sha256"]
        flashinfer = content["flashinfer"]
        known = (flashinfer["version"], flashinfer["digest"])
        vouched = content["patched"]["sha256"]
        patched = (place / PATCHED_FILE).read_bytes()
    except (OSError, ValueError, KeyError, TypeError):
        raise usage(
            f"the plugin that is installed here cannot be read: {MADE_FOR_FILE}, {PATCHED_FILE}",
            path=str(place),
            code="plugin-broken",
            hint=f"install {DISTRIBUTION} again, or uninstall it",
        ) from None
    whole = hashlib.sha256(patched).hexdigest() == vouched
    return InstalledPlugin(version, original, known, patched if whole else None)


def plugin_facts(found: FoundTarget, api: PlanApi) -> Facts:
    """What `inspect` says of a plugin that is installed beside the file; empty where none is."""
    try:
        plugin = find_plugin(found)
    except UsageError as error:
        problem = error.problems[0]
        return (("plugin", f"{problem.path} cannot be read: install {DISTRIBUTION} again"),)
    return plugin.facts(found, api) if plugin is not None else ()


def refuse_to_patch_beside(found: FoundTarget) -> None:
    """Raise UsageError where a plugin is installed: it refuses a file that is patched, so that no
    server would start."""
    plugin = find_plugin(found)
    if plugin is None:
        return
    raise usage(
        f"{DISTRIBUTION} {plugin.version} is installed, which makes these changes when SGLang "
        "loads the file, and ends every server whose file is patched as well",
        path=found.label,
        code="plugin-installed",
        hint=f"keep it, and render it again with `mlagen plugin`, or uninstall {DISTRIBUTION} and "
        "patch then; --diff, --check and --out work beside it",
    )


def package_folder(found: FoundTarget) -> Path | None:
    """The folder `sglang` that the file lies in, None for a file that lies elsewhere."""
    if found.file is None:
        return None
    for file in (found.file.path, found.file.resolved):
        if file.as_posix().endswith(f"/{BACKEND_FILE}"):
            return file.parents[len(Path(BACKEND_FILE).parts) - 1]
    return None
