"""Forks of a real release, made by changing it: names, parameters, branches, where methods stand.

Only names and lines of our own stand here; the release's text comes out of the cache.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from mlagen.codegen.errors import DriftError
from mlagen.codegen.patch import prepare
from mlagen.codegen.sglang.find import FoundTarget
from mlagen.codegen.spec import Spec
from tests.executed import expected
from tests.executed.harness import Session
from tests.executed.runs import NDT, STEPS, plus
from tests.releases import NEAREST_WHEEL, plan_api, sglang_file, shipped

RELEASE = "0.5.17"
BACKEND = "FlashInferMLAAttnBackend"
DECODE = "FlashInferMLAIndicesUpdaterDecode"
PREFILL = "FlashInferMLAIndicesUpdaterPrefill"
DRAFTS = "FlashInferMLAMultiStepDraftBackend"

Change = Callable[[str], str]


def fork(*changes: Change, release: str = RELEASE) -> bytes:
    """The release's file with each change made."""
    source = sglang_file(release).decode()
    for change in changes:
        changed = change(source)
        assert changed != source
        source = changed
    return source.encode()


def renamed(**names: str) -> Change:
    """Words under other names, everywhere."""
    pattern = re.compile(rf"\b({'|'.join(names)})\b")
    return lambda source: pattern.sub(lambda found: names[found[1]], source)


def still_known_as(**names: str) -> Change:
    """Aliases at the end of the file, by which the harness finds renamed classes."""
    lines = "".join(f"\n\n{old} = {new}" for old, new in names.items())
    return lambda source: source + lines + "\n"


def appended(text: str) -> Change:
    return lambda source: source + "\n\n" + text


def replaced(pattern: str, text: str, count: int | None = 1) -> Change:
    """A regular expression replaced; `count` is how often it has to match, None for any."""

    def change(source: str) -> str:
        result, times = re.subn(pattern, text, source)
        assert times == count or (count is None and times), f"{times} times: {pattern}"
        return result

    return change


def within(owner: str, change: Change) -> Change:
    """A change in one class of the file."""

    def changed(source: str) -> str:
        start = source.index(f"class {owner}")
        end = source.find("\nclass ", start + 1)
        end = len(source) if end < 0 else end
        return source[:start] + change(source[start:end]) + source[end:]

    return changed


def method_of(source: str, name: str) -> tuple[int, int]:
    """Where a method of one class stands, with its decorators."""
    found = re.search(rf"(?m)^(    @\w+\n)?    def {name}\(", source)
    assert found, name
    start = found.start()
    after = re.search(r"(?m)^(    @|    def |class |def )", source[source.index("(", start) :])
    assert after
    return start, source.index("(", start) + after.start()


def in_a_mixin(*names: str, mixin: str = "GraphMixin") -> Change:
    """Methods of the back end moved to a class that it derives from."""

    def change(source: str) -> str:
        moved = ""
        for name in names:
            start, end = method_of(source, name)
            moved += source[start:end]
            source = source[:start] + source[end:]
        at = source.index(f"class {BACKEND}(")
        source = source[:at] + f"class {mixin}:\n{moved.rstrip()}\n\n\n" + source[at:]
        return source.replace(f"class {BACKEND}(", f"class {BACKEND}({mixin}, ")

    return change


def one_branch_for_decode_and_verify(source: str) -> str:
    """The shared method with `if decode or verify:` around `if decode: ... else: ...`."""
    start, end = method_of(source, "_apply_cuda_graph_metadata")
    method = source[start:end]
    decode = "        if forward_mode.is_decode_or_idle():\n"
    verify = "        elif forward_mode.is_target_verify():\n"
    head, rest = method.split(decode)
    first, rest = rest.split(verify)
    second, tail = rest.split("        else:\n")
    inner = decode + first + "        else:\n" + second
    both = "forward_mode.is_decode_or_idle() or forward_mode.is_target_verify()"
    inner = re.sub(r"(?m)^(?=.)", "    ", inner)
    method = f"{head}        if {both}:\n{inner}        else:\n{tail}"
    return source[:start] + method + source[end:]


def patched(data: bytes, spec: Spec | None = None, release: str = RELEASE) -> bytes:
    """The fork, patched as `mlagen patch` does for the FlashInfer of its release."""
    api = plan_api(NEAREST_WHEEL[release])
    return prepare(FoundTarget(data, "fork.py", None), spec or shipped(), api).patched


def refusal(data: bytes, spec: Spec | None = None) -> list[tuple[int, str, str]]:
    """(line, code, message) of each reason for which the fork is not patched."""
    try:
        patched(data, spec)
    except DriftError as error:
        return [(p.line, p.code, p.message) for p in error.problems]
    raise AssertionError("it was patched")


def run(data: bytes, release: str = RELEASE) -> Session:
    """A session of a patched fork."""
    return Session(release, data, flashinfer=NEAREST_WHEEL[release])


def assert_plans_are_right(
    s: Session, batches: Sequence[Sequence[int]] = ([10, 20, 30], [7, 3])
) -> None:
    """Every mode plans what it should, without a wait and without FlashInfer's own plan."""
    s.capture_decode(4)
    s.capture_verify(4, NDT)
    s.capture_draft(4, STEPS)
    first = True
    for lens in batches:
        decode = s.replay_decode(lens, bs=4)
        assert decode.record.arrays == expected.decode(lens, 4)
        assert decode.launch.tokens == s.tokens(lens, bs=4, pad=1)
        verify = s.replay_verify(lens, NDT, bs=4)
        assert verify.record.arrays == expected.verify(lens, NDT, 4)
        assert verify.launch.tokens == s.tokens(plus(lens, NDT), bs=4, pad=1 + NDT)
        draft = s.replay_draft(lens, bs=4)
        steps = [expected.draft(lens, step, 4) for step in range(STEPS - 1)]
        assert [record.arrays for record in draft.records] == steps
        eager_verify = s.eager_verify(lens, NDT)
        assert eager_verify.records[-1].arrays == expected.verify(lens, NDT)
        eager_draft = s.eager_draft(lens, STEPS)
        assert [r.arrays for r in eager_draft.records[1 - STEPS :]] == [
            expected.draft(lens, step) for step in range(STEPS - 1)
        ]
        extend = s.eager_extend(lens, [2] * len(lens), mode="extend")
        assert extend.records[-1].arrays == expected.extend(lens, [2] * len(lens))
        replays = (decode, verify, draft)
        assert not [done for done in replays if done.waits or any(r.stock for r in done.records)]
        # The first eager plan of a wrapper is FlashInfer's own: it loads the module.
        assert all(bool(done.waits) == first for done in (eager_verify, eager_draft, extend))
        first = False
