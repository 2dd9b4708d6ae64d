"""D9: host buffers sized by the request pool, where a padded batch may be larger.

In: 0.5.18 and 0.5.19 (from 0.5.20 on `get_cuda_graph_max_batch_size`). With data-parallel
attention the batch is padded to a multiple that can exceed `req_to_token_pool.size`; writing
`buffer[:bs]` then raises in the serving loop (reported as "expanded size (14) must match
existing size (16)").

Told by: a host buffer that steps write into, with a size that comes straight from
`req_to_token_pool.size`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ..errors import Problem
from .case import Case
from .hostbuffers import host_buffers

CODE = "d9-buffer-size"


def find(case: Case) -> Iterator[Problem]:
    """One finding, at the first buffer that is too small."""
    small = [
        buffer
        for buffer in host_buffers(case.source)
        if buffer.writes and any(_is_pool_size(case, name, buffer.node) for name in buffer.size)
    ]
    if small:
        yield case.problem(
            small[0].node,
            CODE,
            f"{', '.join(buffer.name for buffer in small)} have room for req_to_token_pool.size "
            "requests; a batch padded for data-parallel attention can be larger, and filling "
            "them then raises while serving",
            "size them by the largest padded batch",
        )


def _is_pool_size(case: Case, name: str, use: ast.AST) -> bool:
    defined = case.source.definitions(name, case.source.function(use))
    return bool(defined) and all(
        isinstance(definition.value, ast.Attribute)
        and definition.value.attr == "size"
        and isinstance(definition.value.value, ast.Attribute)
        and definition.value.value.attr == "req_to_token_pool"
        for definition in defined
    )
