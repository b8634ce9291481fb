"""Boxes, arrows and words as SVG text: what the pictures of the documents are drawn with.

Owns the look. Colours follow the reader's system, light or dark; a background of its own keeps a picture readable on
any page. Needs nothing but the standard library, and gives the same text on every machine.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

__all__ = ["Picture"]

_STYLE = """
text { font-family: system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; font-size: 14px; }
text { fill: #1c2430; }
text.small { font-size: 12px; } text.large { font-size: 17px; font-weight: 600; }
text.faint { fill: #5d6878; } text.bold { font-weight: 600; }
text.mono { font-family: ui-monospace, "SF Mono", Consolas, "DejaVu Sans Mono", monospace; font-size: 12px; }
.page { fill: #ffffff; stroke: #d9dee6; }
.plain { fill: #f2f4f8; stroke: #b7c0cd; } .blue { fill: #dbe8ff; stroke: #3b6fd4; }
.green { fill: #d9f2e1; stroke: #2a8a52; } .orange { fill: #ffe9d1; stroke: #c56a10; }
.line { stroke: #5d6878; fill: none; } .tip { fill: #5d6878; }
.solid-blue { fill: #3b6fd4; } .solid-grey { fill: #9aa5b4; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6eaf2; } text.faint { fill: #a3aec0; }
  .page { fill: #1b2029; stroke: #39424f; }
  .plain { fill: #2a313d; stroke: #566274; } .blue { fill: #1e3560; stroke: #6f9cf0; }
  .green { fill: #173c28; stroke: #55bd83; } .orange { fill: #4a2f12; stroke: #e39a4c; }
  .line { stroke: #a3aec0; } .tip { fill: #a3aec0; } .solid-blue { fill: #6f9cf0; } .solid-grey { fill: #6b7688; }
}
"""


class Picture:
    """One picture, drawn piece by piece.

    Args:
        title: what it shows, for who cannot see it.
        width, height: in pixels.
    """

    def __init__(self, title: str, width: int, height: int) -> None:
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
            f' role="img" aria-label="{escape(title)}">',
            f"<title>{escape(title)}</title>",
            f"<style>{_STYLE}</style>",
            f'<rect class="page" x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="10"/>',
        ]

    def text(self, x: float, y: float, words: str, style: str = "", anchor: str = "start") -> None:
        """One line of words whose baseline is at ``y``; ``style``: small, large, bold, faint, mono."""
        self._parts.append(f'<text x="{x:g}" y="{y:g}" class="{style}" text-anchor="{anchor}">{escape(words)}</text>')

    def box(
        self, x: float, y: float, width: float, height: float, *lines: str, colour: str = "plain", style: str = ""
    ) -> None:
        """A box with lines of words in its middle."""
        self._parts.append(f'<rect class="{colour}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6"/>')
        first = y + height / 2 + 5 - 9 * (len(lines) - 1)
        for number, line in enumerate(lines):
            self.text(x + width / 2, first + 18 * number, line, style, "middle")

    def bar(self, x: float, y: float, width: float, height: float, colour: str) -> None:
        """A bar of a chart; never so short that it cannot be seen."""
        self._parts.append(
            f'<rect class="{colour}" x="{x:g}" y="{y:g}" width="{max(width, 2):.1f}" height="{height:g}" rx="2"/>'
        )

    def line(self, x: float, y: float, to_x: float, to_y: float, *, dashed: bool = False) -> None:
        """A line."""
        dash = ' stroke-dasharray="4 4"' if dashed else ""
        self._parts.append(
            f'<line class="line" x1="{x:g}" y1="{y:g}" x2="{to_x:g}" y2="{to_y:g}" stroke-width="1.4"{dash}/>'
        )

    def arrow(self, x: float, y: float, to_x: float, to_y: float, *, dashed: bool = False) -> None:
        """An arrow."""
        length = ((to_x - x) ** 2 + (to_y - y) ** 2) ** 0.5
        along_x, along_y = (to_x - x) / length, (to_y - y) / length
        end_x, end_y = to_x - 8 * along_x, to_y - 8 * along_y
        self.line(x, y, end_x, end_y, dashed=dashed)
        corners = [
            (to_x, to_y),
            (end_x - 4 * along_y, end_y + 4 * along_x),
            (end_x + 4 * along_y, end_y - 4 * along_x),
        ]
        points = " ".join(f"{each_x:.1f},{each_y:.1f}" for each_x, each_y in corners)
        self._parts.append(f'<polygon class="tip" points="{points}"/>')

    def save(self, path: Path) -> None:
        """Write the picture."""
        path.write_text("\n".join([*self._parts, "</svg>", ""]), encoding="utf-8")
