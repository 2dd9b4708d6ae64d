"""mlagen: sync-free FlashInfer MLA plans for SGLang, generated from what is installed."""

from __future__ import annotations

from pathlib import Path

__all__ = ["ROOT", "__version__"]

_here = Path(__file__).resolve().parent

#: The folder that holds codegen/, templates/ and variants.yaml: this package as installed, the
#: repository in a checkout. (`importlib.resources` knows the first folder of a package only.)
ROOT = _here

if _here.parts[-3:] == ("codegen", "_package", "mlagen"):
    ROOT = _here.parents[2]
    # In place: jinja2 reads the same list from __spec__.
    __path__.append(str(ROOT))


def __getattr__(name: str) -> str:
    """`__version__`, from the metadata. Reading it costs more than all else that starts mlagen."""
    if name == "__version__":
        from importlib.metadata import version

        return version("mlagen")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
