"""Pictures of results as SVG text: points or lines on logarithmic axes, each with a title that shows on hover."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10

_COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b", "#17becf", "#7f7f7f")
_LEFT, _TOP, _SIZE = 70, 30, 420


@dataclass(frozen=True, slots=True)
class Point:
    """A figure that was found, and what it is of."""

    series: str
    x: float
    y: float
    title: str = ""


@dataclass(frozen=True, slots=True)
class _Axes:
    x_low: float
    x_high: float
    y_low: float
    y_high: float

    def x(self, value: float) -> float:
        return _LEFT + _SIZE * (log10(value) - self.x_low) / (self.x_high - self.x_low)

    def y(self, value: float) -> float:
        return _TOP + _SIZE * (1 - (log10(value) - self.y_low) / (self.y_high - self.y_low))


def draw(
    points: Sequence[Point], x_label: str, y_label: str, *, joined: bool = False, diagonals: Sequence[float] = ()
) -> str:
    """A picture of points; `joined` draws lines through each series, `diagonals` lines where y is a multiple of x."""
    axes = _axes(points, bool(diagonals))
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LEFT + _SIZE + 40}" height="{_TOP + _SIZE + 60}" '
        f'font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="white"/>',
        *_grid(axes),
        *(_diagonal(axes, factor) for factor in diagonals),
    ]
    for i, name in enumerate(dict.fromkeys(point.series for point in points)):
        colour = _COLOURS[i % len(_COLOURS)]
        some = [point for point in points if point.series == name]
        if joined:
            path = " ".join(f"{axes.x(p.x):.1f},{axes.y(p.y):.1f}" for p in some)
            lines.append(f'<polyline points="{path}" fill="none" stroke="{colour}"/>')
        lines += [_dot(axes, point, colour) for point in some]
        lines.append(f'<text x="{_LEFT + 8}" y="{_TOP + 16 + 16 * i}" fill="{colour}">{escape(name)}</text>')
    lines.append(f'<text x="{_LEFT + _SIZE / 3:.0f}" y="{_TOP + _SIZE + 44}">{escape(x_label)}</text>')
    middle = _TOP + 2 * _SIZE / 3
    where = f"rotate(-90 16 {middle:.0f})"
    lines.append(f'<text x="16" y="{middle:.0f}" transform="{where}">{escape(y_label)}</text></svg>')
    return "\n".join(lines) + "\n"


def _axes(points: Sequence[Point], square: bool) -> _Axes:
    xs, ys = [log10(point.x) for point in points], [log10(point.y) for point in points]
    if square:
        xs = ys = xs + ys
    return _Axes(min(xs) - 0.1, max(xs) + 0.1, min(ys) - 0.1, max(ys) + 0.1)


def _grid(axes: _Axes) -> list[str]:
    """A line and a number at every power of ten, and a frame."""
    lines = [f'<rect x="{_LEFT}" y="{_TOP}" width="{_SIZE}" height="{_SIZE}" fill="none" stroke="black"/>']
    for power in range(ceil(axes.x_low), floor(axes.x_high) + 1):
        at = axes.x(10.0**power)
        lines.append(f'<line x1="{at:.1f}" y1="{_TOP}" x2="{at:.1f}" y2="{_TOP + _SIZE}" stroke="#ddd"/>')
        lines.append(f'<text x="{at:.1f}" y="{_TOP + _SIZE + 18}" text-anchor="middle">{10.0**power:g}</text>')
    for power in range(ceil(axes.y_low), floor(axes.y_high) + 1):
        at = axes.y(10.0**power)
        lines.append(f'<line x1="{_LEFT}" y1="{at:.1f}" x2="{_LEFT + _SIZE}" y2="{at:.1f}" stroke="#ddd"/>')
        lines.append(f'<text x="{_LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{10.0**power:g}</text>')
    return lines


def _diagonal(axes: _Axes, factor: float) -> str:
    low = max(10**axes.x_low, 10**axes.y_low / factor)
    high = min(10**axes.x_high, 10**axes.y_high / factor)
    dash = "" if factor == 1 else ' stroke-dasharray="4"'
    ends = (axes.x(low), axes.y(low * factor), axes.x(high), axes.y(high * factor))
    return '<line x1="{:.1f}" y1="{:.1f}" x2="{:.1f}" y2="{:.1f}" stroke="grey"{}/>'.format(*ends, dash)


def _dot(axes: _Axes, point: Point, colour: str) -> str:
    return (
        f'<circle cx="{axes.x(point.x):.1f}" cy="{axes.y(point.y):.1f}" r="3" fill="{colour}" fill-opacity="0.6">'
        f"<title>{escape(point.title or point.series)}</title></circle>"
    )
