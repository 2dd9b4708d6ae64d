"""Spec -> slots: which variant serves what, and what cannot be rendered.

A slot is (serves, when, context_parallel). SGLang has a place for some of them; a variant in
another slot is rendered into generated/ and goes into no file.
"""

from __future__ import annotations

import builtins
import keyword
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from .errors import Problem, SpecError
from .spec import Spec, Variant

Slot = tuple[str, str, bool]

#: The slots that edit sites serve.
SERVED: frozenset[Slot] = frozenset(
    {
        ("decode", "replay", False),
        ("decode", "replay", True),
        ("draft-decode", "replay", False),
        ("draft-decode", "eager", False),
        ("target-verify", "replay", False),
        ("target-verify", "eager", False),
        ("draft-extend", "eager", False),
    }
)

_MARK = re.compile(r"#\s*(>>>|---|<<<) mlagen")


@dataclass(frozen=True)
class Names:
    """The functions emitted for one variant."""

    plan: str
    plan_eager: str
    kv_len: str


def names_of(variant: Variant) -> Names:
    """The names of the functions emitted for `variant`."""
    suffix = variant.name.replace("-", "_")
    return Names(variant.function, f"{variant.function}_eager", f"mlagen_kv_len_{suffix}")


def slots_of(variant: Variant) -> tuple[Slot, ...]:
    """The slots that a variant takes, in the order of its `when`."""
    return tuple((variant.serves, when, variant.context_parallel) for when in variant.when)


def by_slot(spec: Spec) -> Mapping[Slot, Variant]:
    """The variant in each slot; the spec has at most one a slot."""
    return {slot: variant for variant in spec.variants for slot in slots_of(variant)}


def check(spec: Spec, reserved: Iterable[str]) -> None:
    """Raise SpecError for what the format allows and no text can be made of.

    `reserved` are the names that emitted code defines or imports beside the variants' own.
    """
    problems: list[Problem] = []
    taken: dict[str, str] = dict.fromkeys(reserved, "emitted code of mlagen")
    for variant in spec.variants:
        problems += _tokens(spec, variant)
        if _MARK.search(variant.doc):
            problems.append(
                spec.problem(
                    variant.name,
                    "doc",
                    "mark-in-doc",
                    f"{variant.name}: doc has a line that looks like a mark of mlagen",
                )
            )
        names = names_of(variant)
        emitted = [names.kv_len]
        emitted += [names.plan] if "replay" in variant.when else []
        emitted += [names.plan_eager] if "eager" in variant.when else []
        for name in emitted:
            if name in taken or hasattr(builtins, name) or keyword.iskeyword(name):
                owner = taken.get(name, "Python")
                problems.append(
                    spec.problem(
                        variant.name,
                        "function",
                        "name-taken",
                        f"{variant.name}: the emitted function {name} would hide that of {owner}",
                        "give the variant another `function`",
                    )
                )
            taken.setdefault(name, f"variant {variant.name}")
    if problems:
        raise SpecError(*problems)


def _tokens(spec: Spec, variant: Variant) -> list[Problem]:
    if variant.serves not in ("decode", "draft-decode") or variant.tokens.text == "1":
        return []
    return [
        spec.problem(
            variant.name,
            "tokens",
            "tokens-not-one",
            f"{variant.name}: {variant.serves} has one query token a request, not "
            f"{variant.tokens.text}",
            "write `tokens: 1`",
        )
    ]
