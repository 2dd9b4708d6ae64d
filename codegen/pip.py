"""pip, run as a program: the one way by which anything comes from a package registry."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def run_pip(*words: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run pip with these words in `folder`, and give what it wrote, to either output, and its
    status. Asks nothing. `environment`: variables beside the user's.

    `-m` puts the working folder first on the path of imports: `folder` is never the user's.
    """
    return subprocess.run(
        [sys.executable, "-m", "pip", *words],
        cwd=folder,
        env={**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1", **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
        check=False,
    )
