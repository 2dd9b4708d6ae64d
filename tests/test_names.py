"""Names that a patched file would use without binding them."""

from __future__ import annotations

import ast

import pytest

from mlagen.codegen.names import bound_by, unbound_names


def _unbound(source: str) -> set[tuple[str, str]]:
    return set(unbound_names(ast.parse(source)))


@pytest.mark.parametrize(
    "source",
    [
        "import os\ndef f(a, *b, c=1, **d):\n    return os, a, b, c, d, len(b)\n",
        "def f():\n    x = [i for i in range(3)]\n    return x\n",
        "def f():\n    with open('x') as y:\n        return y\n",
        "def f():\n    try:\n        pass\n    except OSError as error:\n        return error\n",
        "def f():\n    def g():\n        return h\n    h = 1\n    return g\n",
        "def f():\n    import a.b as c, d.e\n    return c, d\n",
        "def f(x: Missing) -> Absent:\n    y: Nowhere = x\n    return y\n",
        "if True:\n    from a import b\nelse:\n    b = None\ndef f():\n    return b\n",
        "class C:\n    def m(self):\n        return __class__, self\n",
        "def f():\n    return (y := 1), y\n",
        "def f(v):\n    for a, (b, *c) in v:\n        del a\n    return b, c\n",
        "def f():\n    return lambda q: q\n",
    ],
)
def test_all_of_these_are_bound(source: str) -> None:
    assert _unbound(source) == set()


def test_a_name_that_only_other_functions_bind() -> None:
    source = """
def f():
    kv_len = 1
    return kv_len

class C:
    kept = 1

    def m(self):
        return kv_len + kept
"""
    found = unbound_names(ast.parse(source))
    assert found == {("C.m", "kv_len"): 10, ("C.m", "kept"): 10}


@pytest.mark.parametrize(
    ("statement", "names"),
    [
        ("import a.b", {"a"}),
        ("import a.b as c", {"c"}),
        ("from a import b, c as d", {"b", "d"}),
        ("x = y = 1", {"x", "y"}),
        ("x: int = 1", {"x"}),
        ("def f():\n    y = 1", {"f"}),
        ("class C:\n    y = 1", {"C"}),
        ("try:\n    import a\nexcept ImportError:\n    a = None", {"a"}),
        ("if 1:\n    def g():\n        pass", {"g"}),
    ],
)
def test_what_a_statement_at_the_top_binds(statement: str, names: set[str]) -> None:
    assert set(bound_by(ast.parse(statement).body[0])) == names
