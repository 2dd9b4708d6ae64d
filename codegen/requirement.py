"""A requirement as it stands in a lock file or a requirements.txt, without what goes with it there.

That is, by pip's format of such files: a comment behind white space, hashes and other options, a
line continued by a backslash, and an environment marker. The marker is not judged: whoever hands
the line over means that release.
"""

from __future__ import annotations

import re

#: From here on: a comment, a continuation, an option such as --hash=sha256:..., a marker.
_REST = re.compile(r"\s#|\s*\\\s|\s*\\\Z|\s--|\s-[a-z]\b|\s*;")


def bare_requirement(line: str) -> str:
    """`NAME==0.6.17` of `NAME==0.6.17 ; python_version > "3.8" --hash=...  # comment`; a text that
    is no such line as it is, but for white space around it."""
    text = line.strip()
    rest = _REST.search(text)
    return text[: rest.start()].rstrip() if rest and "==" in text[: rest.start()] else text
