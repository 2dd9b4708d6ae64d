"""Target + Rendered -> the patched bytes, read back and verified."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from . import provenance
from .errors import DriftError, EditedError, Problem
from .names import bound_by, unbound_names
from .render import Fragment, Rendered, identifiers, import_lines
from .sglang.edits import Edit
from .sglang.locate import HEADER_SITE, PLANS_SITE, Target


def splice(target: Target, rendered: Rendered, header: provenance.Header) -> bytes:
    """Make every edit of `target`, with the fragments that they call.

    Raises DriftError with every refusal where a site has no place; nothing is half-edited.
    """
    path = target.source.path
    if target.refusals:
        problems = [place.refused.problem(path) for place in target.refusals if place.refused]
        raise DriftError(*dict.fromkeys(problems))
    edits = [edit for place in target.places for edit in place.edits]
    if not edits:  # the file has none of the chosen variants' modes
        return target.source.data
    fragments = rendered.needed_by(target.calls)
    edits.append(_plans_edit(target, fragments))
    edits.append(_header_edit(target, fragments, header, edits))
    try:
        patched = provenance.apply_edits(
            target.source.data, [_indented(edit) for edit in edits], path=path
        )
    except ValueError as error:
        message = str(error).removeprefix(f"{path}: ")
        raise DriftError(Problem(path, 0, 0, "cannot-splice", message)) from None
    verify(target.source.data, patched, [edit.site for edit in edits], path)
    return patched


def verify(original: bytes, patched: bytes, sites: Sequence[str], path: str) -> None:
    """Read a patched file back: it parses, every region is there and whole, and every name that
    is used in it is bound, but for those that already were not. A failure is a fault of mlagen
    or of a shape that it does not know; it is told before anything is written."""
    problems: list[Problem] = []
    try:
        tree = ast.parse(patched)
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", 0) or 0
        raise DriftError(
            Problem(path, line, 0, "patched-does-not-parse", f"after the edits: {error}")
        ) from None
    regions = {region.site: region for region in provenance.find_regions(patched, path=path)}
    for site in sites:
        if site not in regions or not regions[site].intact:
            problems.append(Problem(path, 0, 0, "region-missing", f"region {site} is not there"))
    before = unbound_names(ast.parse(original))
    kept = _lines_kept(regions.values())
    for (function, name), line in unbound_names(tree).items():
        if (function, name) not in before:
            replaced = next((site for site, names in kept.items() if name in names), None)
            why = f"; region {replaced} replaced the lines that bound it" if replaced else ""
            problems.append(
                Problem(
                    path,
                    _original_line(line, regions.values()),
                    0,
                    "name-unbound",
                    f"{name} would be used in {function} without being bound{why}",
                    "this file differs from the releases that mlagen knows; nothing was written",
                )
            )
    problems += _bound_twice(tree, regions.get(PLANS_SITE), path)
    if problems:
        raise DriftError(*problems)


def _lines_kept(regions: Iterable[provenance.Region]) -> dict[str, frozenset[str]]:
    """The words of the lines that each region replaced."""
    return {
        region.site: frozenset(re.findall(r"\w+", "".join(region.replaced)))
        for region in regions
        if region.replaced
    }


def _original_line(line: int, regions: Iterable[provenance.Region]) -> int:
    """The line of the unpatched file that a line of the patched one was."""
    added = 0
    for region in regions:
        if region.end_line < line:
            added += region.end_line - region.start_line + 1 - len(region.replaced)
        elif region.start_line < line:
            return region.start_line - added  # of our own lines: where the region went
    return line - added


def _bound_twice(tree: ast.Module, plans: provenance.Region | None, path: str) -> list[Problem]:
    """Module-level names that the functions of mlagen bind and the file binds as well."""
    if plans is None:
        return []
    inside: dict[str, int] = {}
    outside: dict[str, int] = {}
    for node in tree.body:
        ours = plans.start_line < node.lineno < plans.end_line
        for name in bound_by(node):
            (inside if ours else outside).setdefault(name, node.lineno)
    return [
        Problem(
            path,
            outside[name],
            0,
            "name-taken",
            f"{name} is bound here and by mlagen's functions in line {line}",
            "give the variant another `function` in variants.yaml",
        )
        for name, line in inside.items()
        if name in outside
    ]


def edited_regions(data: bytes, path: str) -> tuple[provenance.Region, ...]:
    """The regions that are not as mlagen left them."""
    return tuple(r for r in provenance.find_regions(data, path=path) if not r.intact)


def force_original(data: bytes, path: str) -> bytes | None:
    """The file without its regions although some were edited, None where that is not clear.

    Only to find out what mlagen would write, so that an error can show both texts.
    """
    text = provenance.as_text(data)
    lines = provenance.split_lines(text)
    newline = provenance.newline_of(text)
    for region in reversed(edited_regions(data, path)):
        rebuilt = provenance.build_region(
            region.site,
            region.indent,
            region.emitted,
            region.replaced,
            newline,
            no_eol=region.no_eol,
        )
        lines[region.start_line - 1 : region.end_line] = rebuilt
    try:
        return provenance.remove_regions(provenance.as_bytes("".join(lines)), path=path)
    except (EditedError, DriftError, ValueError):
        return None


def _indented(edit: Edit) -> provenance.Edit:
    lines = tuple(edit.indent + line if line else "" for line in edit.lines)
    return provenance.Edit(edit.site, edit.line, edit.replaces, edit.indent, lines)


def _header_edit(
    target: Target,
    fragments: Sequence[Fragment],
    header: provenance.Header,
    others: Sequence[Edit],
) -> Edit:
    """The header with the imports that the file lacks. It lists itself and the `others`, so that
    one that is lost later can be told."""
    sites = sorted(others, key=lambda edit: edit.line)
    listed = replace(
        header,
        inserts=(HEADER_SITE, *(edit.site for edit in sites if not edit.replaces)),
        replaces=tuple(edit.site for edit in sites if edit.replaces),
    )
    words = frozenset().union(*(fragment.words for fragment in fragments))
    words |= identifiers(
        "\n".join(line for p in target.places for e in p.edits for line in e.lines)
    )
    imports = import_lines(target.missing_imports(words))
    extra = target.features.dcp_import
    extra_lines = [extra] if extra and extra.split()[-1] in words else []
    return Edit(
        HEADER_SITE,
        target.header_line,
        "",
        (*provenance.header_lines(listed), *_imports([*imports, *extra_lines])),
    )


def _imports(lines: Sequence[str]) -> list[str]:
    """Import lines for the header region, kept there: SGLang's own import sorter would move
    them out of it, and the region would count as edited."""
    standard = [line for line in lines if not re.search(r"\b(numpy|sglang|torch|triton)\b", line)]
    others = [line for line in lines if line not in standard]
    blank = [""] if standard and others else []
    return [*standard, *blank, *others, "", "# isort: split"] if lines else []


def _plans_edit(target: Target, fragments: Sequence[Fragment]) -> Edit:
    lines: list[str] = []
    for fragment in fragments:
        lines += [*fragment.text.split("\n"), "", ""]
    return Edit(PLANS_SITE, target.plans_line, "", tuple(lines))
