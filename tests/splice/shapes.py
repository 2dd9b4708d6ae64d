"""The miniatures: back ends of a few hundred lines, one a shape, and forks made of them.

Written for these tests; they have the structure that mlagen looks for and nothing else. Each
folder holds `before.py` and, made by `patch`, `after.py`. So that the golden files show the edit
sites and not the plan functions, which tests/test_render.py reads, those are stubs there.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from mlagen.codegen.flashinfer.api import PlanApi
from mlagen.codegen.provenance import Header
from mlagen.codegen.render import Fragment, Rendered
from mlagen.codegen.sglang.locate import locate
from mlagen.codegen.sglang.source import Source
from mlagen.codegen.spec import Spec, load_spec, shipped_spec
from mlagen.codegen.splice import splice
from tests.judge.miniature import COPIES

FOLDER = Path(__file__).parent
SHAPES = tuple(sorted(path.parent.name for path in FOLDER.glob("*/before.py")))

#: What each shape is taken for.
EXPECTED_SHAPE = {
    "crlf": "capture/replay pair",
    "decorators": "capture/replay pair",
    "keyword-plans": "capture/replay pair",
    "no-verify": "no verify",
    "old-pair": "capture/replay pair",
    "one-line": "capture/replay pair",
    "pair": "capture/replay pair",
    "shared-apply": "shared apply",
    "tabs": "capture/replay pair",
    "upstream": "upstream plans",
    "upstream-keyword-only": "upstream plans",
}

HEADER = Header(
    mlagen="0.0",
    flashinfer="0.0",
    era="of these tests",
    source_digest="0" * 64,
    spec_digest="1" * 64,
    variants=("all",),
)

_FUNCTIONS = (
    "mlagen_bound_arrays",
    "mlagen_capture_decode",
    "mlagen_capture_verify",
    "mlagen_request_decode",
    "mlagen_request_draft_eager",
    "mlagen_request_extend",
    "mlagen_request_verify",
    "mlagen_request_verify_eager",
)

_TYPES = """\
@dataclass(frozen=True)
class MlagenArrays:
    kv_len: Optional[torch.Tensor]


@dataclass(frozen=True)
class MlagenShape:
    num_heads: int


@dataclass(frozen=True)
class MlagenRequest:
    plan: Callable[[Any], None]
    bound: Optional[MlagenArrays]"""


def before(shape: str) -> bytes:
    """The miniature of `shape`."""
    return (FOLDER / shape / "before.py").read_bytes()


def after(shape: str) -> bytes:
    """What `patch` made of it, with stubs for the plan functions."""
    return (FOLDER / shape / "after.py").read_bytes()


@cache
def spec() -> Spec:
    """The variants that mlagen ships."""
    return load_spec(shipped_spec())


def stubs(of: Spec, api: PlanApi = COPIES) -> Rendered:
    """The fragments that the edit sites call, as stubs."""
    functions = (Fragment(name, "hooks", f"def {name}(*given): ...") for name in _FUNCTIONS)
    return Rendered((Fragment("types", "plans", _TYPES), *functions), api, of)


def spliced(data: bytes, path: str = "fork.py", of: Spec | None = None) -> bytes:
    """`data` patched with the stubs. Raises DriftError as `patch` does."""
    chosen = of if of is not None else spec()
    return splice(locate(Source.parse(data, path), chosen), stubs(chosen), HEADER)


def fork(shape: str, *replacements: tuple[str, str], times: int = 1) -> bytes:
    """The miniature with each first text, which stands there `times` times, replaced by the
    second."""
    source = before(shape).decode()
    for old, new in replacements:
        assert source.count(old) == times, f"{source.count(old)} times in {shape}: {old}"
        source = source.replace(old, new)
    return source.encode()


def line_of(data: bytes, text: str, nth: int = 1) -> int:
    """The line, from 1, of the nth occurrence of `text`."""
    position = -1
    for _ in range(nth):
        position = data.index(text.encode(), position + 1)
    return data[:position].count(b"\n") + 1
