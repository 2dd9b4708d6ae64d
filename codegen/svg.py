"""The few SVG elements that the plots are made of, as text.

Written by hand, without a plotting library: a few kinds of panels are not worth a dependency.
"""

from __future__ import annotations

from collections.abc import Iterable
from xml.sax.saxutils import escape


def document(width: float, height: float, parts: Iterable[str]) -> str:
    """The file: `parts` on a white ground; ends in a line end."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" '
        'font-family="sans-serif" font-size="12" fill="#222222">'
    )
    ground = f'<rect width="{width:.0f}" height="{height:.0f}" fill="#ffffff"/>'
    return "\n".join([head, ground, *parts, "</svg>"]) + "\n"


def text_at(
    x: float, y: float, text: str, *, anchor: str = "start", size: int = 12, weight: str = "normal"
) -> str:
    """Text whose base line is at y."""
    style = f'text-anchor="{anchor}" font-size="{size}" font-weight="{weight}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(text)}</text>'


def line_at(
    x1: float, y1: float, x2: float, y2: float, colour: str, width: float, dash: str | None = None
) -> str:
    """A line between two points."""
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    ends = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line {ends} stroke="{colour}" stroke-width="{width:.0f}"{dashes}/>'


def box_at(x: float, y: float, width: float, height: float, colour: str) -> str:
    """A filled rectangle by its upper left corner."""
    place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
    return f'<rect {place} fill="{colour}"/>'
