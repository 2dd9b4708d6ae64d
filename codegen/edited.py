"""An edited region beside what mlagen left there, for `unpatch`, which is given neither a spec nor
a FlashInfer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from .errors import EditedError, MlagenError
from .fetch import cached
from .flashinfer.api import PlanApi
from .flashinfer.find import DISTRIBUTION, find_flashinfer
from .flashinfer.read import read_plan_api
from .patch import mlagen_version, prepare, select
from .provenance import Header, read_header
from .sglang.find import FoundTarget
from .spec_choice import choose_spec


def both_texts(found: FoundTarget) -> EditedError | None:
    """The refusal of a file with edited regions that shows both texts; None where what mlagen left
    there cannot be found out.

    It can where this is the mlagen that wrote it, and the variants.yaml and a FlashInfer that are
    at hand are those that its header has the digests of. Nothing is fetched for it.
    """
    try:
        header = read_header(found.data, path=found.label)
        if header is None or header.mlagen != mlagen_version():
            return None
        spec = choose_spec(None, found).load()
        api = _same_flashinfer(found, header)
        if api is None or spec.digest != header.spec_digest:
            return None
        spec = select(spec, header.variants)
    except MlagenError:
        return None
    try:
        prepare(found, spec, api)
    except EditedError as error:
        return error
    except MlagenError:
        pass
    return None


def _same_flashinfer(found: FoundTarget, header: Header) -> PlanApi | None:
    for place, near in _at_hand(found, header):
        try:
            source = find_flashinfer(place, near=near)
            api = read_plan_api(source, allow_unknown=header.derived)
        except MlagenError:
            continue
        if api.digest == header.source_digest:
            return api
    return None


def _at_hand(found: FoundTarget, header: Header) -> Iterator[tuple[str | None, Path | None]]:
    """What `find_flashinfer` can be asked for without a network."""
    if header.flashinfer is not None:
        wheel = cached(f"{DISTRIBUTION}=={header.flashinfer}")
        if wheel is not None:
            yield str(wheel), None
    yield None, found.file.resolved if found.file is not None else None
