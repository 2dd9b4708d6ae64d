"""`python -m mlagen` is `mlagen`."""

from __future__ import annotations

from mlagen.cli import main

if __name__ == "__main__":
    main()
