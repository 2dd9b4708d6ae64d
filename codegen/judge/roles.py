"""What an argument of a planner is, told from how it is named.

FlashInfer and those who copy its call name the same things differently (`kv_len_arr_host`,
`kv_len_arr_cpu`, `spec.kv_len`); order can only be compared by what each one is.
"""

from __future__ import annotations

import ast

from .source import dotted

#: Role by the fragments of a name, first match wins. The workspaces come before the lengths:
#: `_pin_memory_int_workspace_buffer` is neither `int_workspace` nor a page.
_ROLES: tuple[tuple[tuple[str, ...], str], ...] = (
    (("pin", "work"), "pinned_int_workspace"),
    (("page_locked",), "pinned_int_workspace"),
    (("float", "work"), "float_workspace"),
    (("int", "work"), "int_workspace"),
    (("qo_indptr",), "qo_indptr"),
    (("q_indptr",), "qo_indptr"),
    (("kv_indptr",), "kv_indptr"),
    (("kv_indices",), "kv_indices"),
    (("kv_len",), "kv_len"),
    (("heads",), "num_heads"),
    (("kpe",), "head_dim_kpe"),
    (("rope_head_dim",), "head_dim_kpe"),
    (("head_dim",), "head_dim_ckv"),
    (("lora_rank",), "head_dim_ckv"),
    (("page_size",), "page_size"),
    (("causal",), "causal"),
    (("sm_scale",), "sm_scale"),
    (("scaling",), "sm_scale"),
    (("stream",), "stream"),
)


def role_of_name(name: str) -> str | None:
    """The role of an argument called `name` (dotted or not); None where it does not tell."""
    last = name.rsplit(".", 1)[-1].lower()
    for fragments, role in _ROLES:
        if all(fragment in last for fragment in fragments):
            return role
    return None


def role_of(node: ast.expr) -> str | None:
    """The role of an argument by its expression: of a name, of what is sliced, or of what a
    method without a meaning of its own (`.contiguous()`, `.to(...)`) is called on."""
    while True:
        if isinstance(node, ast.Subscript):
            node = node.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if role_of_name(node.func.attr):
                return role_of_name(node.func.attr)
            node = node.func.value
        else:
            break
    name = dotted(node)
    return None if name is None else role_of_name(name)


def role_of_text(text: str) -> str | None:
    """As `role_of`, from source text."""
    try:
        return role_of(ast.parse(text.strip(), mode="eval").body)
    except SyntaxError:
        return role_of_name(text)


def is_host(name: str) -> bool:
    """Whether `name` says that the array is on the host."""
    return name.endswith(("_cpu", "_host"))
