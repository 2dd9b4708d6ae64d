"""Small questions to a libcst tree.

libcst's own matchers cost as much to import as libcst itself and rebuild the tree that they
search; these walk the fields of its dataclasses and ask `isinstance`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from functools import cache

import libcst as cst


@cache
def _field_names(kind: type[cst.CSTNode]) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind))


def walk(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """`node` and every node below it, in the order of the source."""
    stack: list[cst.CSTNode] = [node]
    while stack:
        current = stack.pop()
        yield current
        below: list[cst.CSTNode] = []
        for name in _field_names(type(current)):
            value = getattr(current, name)
            if isinstance(value, cst.CSTNode):
                below.append(value)
            elif isinstance(value, (tuple, list)):
                below += [item for item in value if isinstance(item, cst.CSTNode)]
        stack += reversed(below)


def contains(node: cst.CSTNode, wanted: cst.CSTNode) -> bool:
    """Whether `wanted` is `node` or stands below it."""
    return any(found is wanted for found in walk(node))


def calls_of(node: cst.CSTNode, name: str, receiver: str | None = None) -> list[cst.Call]:
    """The calls below `node` of `<anything>.name(...)`, or of `receiver.name(...)`."""
    return [
        found
        for found in walk(node)
        if isinstance(found, cst.Call)
        and isinstance(found.func, cst.Attribute)
        and found.func.attr.value == name
        and (receiver is None or is_name(found.func.value, receiver))
    ]


def is_name(node: cst.CSTNode, name: str) -> bool:
    """Whether `node` is just the name `name`."""
    return isinstance(node, cst.Name) and node.value == name


def is_call(node: cst.CSTNode, function: str) -> bool:
    """Whether `node` is a call `function(...)`."""
    return isinstance(node, cst.Call) and is_name(node.func, function)


def mentions(node: cst.CSTNode, names: frozenset[str]) -> bool:
    """Whether `node` uses one of `names`, as a name or as an attribute."""
    return any(isinstance(found, cst.Name) and found.value in names for found in walk(node))


def assigned_name(node: cst.CSTNode) -> str | None:
    """The name that `name = ...` assigns to; None for anything else."""
    if isinstance(node, cst.Assign) and len(node.targets) == 1:
        target = node.targets[0].target
        if isinstance(target, cst.Name):
            return target.value
    return None


def words(node: cst.CSTNode) -> frozenset[str]:
    """Every name in `node`: variables, attributes, keywords."""
    return frozenset(found.value for found in walk(node) if isinstance(found, cst.Name))


def alone(statement: cst.BaseStatement) -> cst.BaseSmallStatement | None:
    """The small statement that is all of a line; None for anything else."""
    if isinstance(statement, cst.SimpleStatementLine) and len(statement.body) == 1:
        return statement.body[0]
    return None


def assigned(
    statement: cst.BaseStatement,
) -> tuple[list[cst.BaseExpression], cst.BaseExpression] | None:
    """The targets and the value of a statement that is one assignment."""
    small = alone(statement)
    if isinstance(small, cst.Assign):
        return [target.target for target in small.targets], small.value
    return None


def bound_by(node: cst.CSTNode) -> set[str]:
    """The bare names that an assignment, a loop or a `with` binds."""
    targets: list[cst.BaseExpression] = []
    if isinstance(node, cst.Assign):
        targets = [target.target for target in node.targets]
    elif isinstance(node, (cst.AnnAssign, cst.AugAssign, cst.NamedExpr, cst.For)):
        targets = [node.target]
    elif isinstance(node, cst.AsName):
        targets = [node.name]
    names: set[str] = set()
    while targets:
        target = targets.pop()
        if isinstance(target, cst.Name):
            names.add(target.value)
        elif isinstance(target, (cst.Tuple, cst.List)):
            targets += [element.value for element in target.elements]
    return names


def branches(statement: cst.If) -> Iterator[tuple[cst.BaseExpression | None, cst.BaseSuite]]:
    """The test and the body of each branch of an `if`; the test of its `else` is None."""
    node: cst.If | cst.Else | None = statement
    while isinstance(node, cst.If):
        yield node.test, node.body
        node = node.orelse
    if node is not None:
        yield None, node.body


def decorated(node: cst.FunctionDef) -> cst.CSTNode:
    """Where a function begins: at its first decorator, if it has one."""
    return node.decorators[0] if node.decorators else node


def self_attribute(node: cst.CSTNode) -> str | None:
    """X of `self.X`."""
    if isinstance(node, cst.Attribute) and is_name(node.value, "self"):
        return node.attr.value
    return None


def asserted(test: cst.BaseExpression) -> frozenset[str]:
    """The methods that a test calls and does not negate: {"is_a"} of `x.is_a() and not x.is_b()`.

    What stands behind a `not` says nothing about what holds there.
    """
    if isinstance(test, cst.UnaryOperation) and isinstance(test.operator, cst.Not):
        return frozenset()
    if isinstance(test, cst.BooleanOperation):
        return asserted(test.left) | asserted(test.right)
    return frozenset(
        node.func.attr.value
        for node in walk(test)
        if isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute)
    )


def denied(test: cst.BaseExpression) -> cst.BaseExpression | None:
    """E of the test `not E`: what holds where the test does not."""
    if isinstance(test, cst.UnaryOperation) and isinstance(test.operator, cst.Not):
        return test.expression
    return None


def chooses(test: cst.BaseExpression) -> bool:
    """Whether a test has an `or`: more than one case takes its branch."""
    return any(
        isinstance(node, cst.BooleanOperation) and isinstance(node.operator, cst.Or)
        for node in walk(test)
    )
