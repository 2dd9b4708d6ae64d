"""Pack what `test_backend.py` imports of SGLang releases, for a GPU machine without a network.

    python tests/gpu/carry.py 0.5.10 0.5.17 0.5.23 --out .gpu/sglang

writes `sglang-VERSION.zip`, some megabytes each, to the folder: the Python files of the release, as
released, less what stand-ins replace (`backend/release.py` lists it) and parts of which a back end
imports nothing. On the GPU machine MLAGEN_GPU_SGLANG names that folder. mlagen must be importable;
wheels come from its cache, or from the package index, once.
"""

from __future__ import annotations

import argparse
import ast
import zipfile
from pathlib import Path

from mlagen.codegen.fetch import fetch

HERE = Path(__file__).resolve().parent

#: Parts of the release of which nothing is imported.
NEVER = (
    "sglang.benchmark",
    "sglang.cli",
    "sglang.eval",
    "sglang.jit_kernel.benchmark",
    "sglang.jit_kernel.tests",
    "sglang.kernels.kda_kernels",
    "sglang.kernels.ops.attention.flash_attn",
    "sglang.kernels.ops.attention.linear",
    "sglang.multimodal_gen",
    "sglang.srt.speculative.dspark_components",
    "sglang.test",
)


def listed(name: str) -> tuple[str, ...]:
    """A tuple of names out of `backend/release.py`, which cannot be imported by path alone."""
    tree = ast.parse((HERE / "backend" / "release.py").read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return tuple(ast.literal_eval(node.value))
    raise LookupError(name)


def wanted(name: str, dropped: tuple[str, ...], kept: tuple[str, ...]) -> bool:
    """Whether a file of the wheel is carried."""
    if not (name.startswith("sglang/") and name.endswith(".py")):
        return False
    module = name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    return module in kept or not any(
        module == part or module.startswith(f"{part}.") for part in dropped
    )


def pack(version: str, folder: Path) -> Path:
    """Write one release's archive; return its path. The same wheel gives the same bytes."""
    dropped, kept = (*listed("REPLACED"), *NEVER), listed("KEPT")
    target = folder / f"sglang-{version}.zip"
    with (
        zipfile.ZipFile(fetch(f"sglang=={version}")) as wheel,
        zipfile.ZipFile(target, "w", zipfile.ZIP_LZMA) as archive,
    ):
        for name in sorted(wheel.namelist()):
            if wanted(name, dropped, kept):
                archive.writestr(zipfile.ZipInfo(name), wheel.read(name), zipfile.ZIP_LZMA)
    return target


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("versions", nargs="+", metavar="VERSION")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    for version in arguments.versions:
        archive = pack(version, arguments.out)
        print(f"{archive}  {archive.stat().st_size >> 10} KiB")


if __name__ == "__main__":
    main()
