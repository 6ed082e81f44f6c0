"""Curves of a run, as text for a terminal and as an SVG file; no library draws them."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import cycle, pairwise
from statistics import fmean
from typing import NamedTuple
from xml.sax.saxutils import escape

Point = tuple[float, float]

BRAILLE = 0x2800
DOTS = ((0x40, 0x04, 0x02, 0x01), (0x80, 0x20, 0x10, 0x08))  # a character's left and right column, bottom up

# Middle tones show on white pages and on dark ones.
INK, COLOURS = "#7d8590", ("#3b82f6", "#e8590c", "#2f9e44", "#a855f7", "#d6336c")
WIDTH, LEFT, RIGHT, HEIGHT = 640, 56, 620, 260  # the picture's width, and the plotted part of it
TITLE, LEGEND, FOOT = 44, 20, 48  # heights around the plot; the legend's is that of each line
MARKED = 20  # a series of at most this many points shows each of them


def smooth(points: Sequence[Point], window: int) -> list[Point]:
    """Each value becomes the mean of the last `window` values up to it."""
    kept = finite_points(points)
    means = [fmean(y for _, y in kept[max(0, end - window) : end]) for end in range(1, len(kept) + 1)]
    return [(x, mean) for (x, _), mean in zip(kept, means, strict=True)]


def finite_points(points: Iterable[Point]) -> list[Point]:
    """What can be drawn, from left to right."""
    return sorted((x, y) for x, y in points if math.isfinite(x) and math.isfinite(y))


def bounds(values: Iterable[float]) -> tuple[float, float]:
    """The lowest and the highest value, or some way around a single one."""
    low, *_, high = sorted([*values] * 2)
    margin = 0.0 if high > low else abs(low) / 10 or 1.0
    return low - margin, high + margin


def terminal_curve(points: Sequence[Point], title: str, width: int = 79, height: int = 12) -> str:
    """One series in braille dots; below the title no line is wider than `width`."""
    if not (kept := finite_points(points)):
        return f"{title}: no points"
    (left, right), (low, high) = (bounds(axis) for axis in zip(*kept, strict=True))
    labels = [f"{high:.3g}", *[""] * (height - 2), f"{low:.3g}"]
    margin = max(map(len, labels))
    columns = width - margin - 2
    across, up = (2 * columns - 1) / (right - left), (4 * height - 1) / (high - low)
    lines = braille([(round((x - left) * across), round((y - low) * up)) for x, y in kept], columns, height)
    rows = [f"{label:>{margin}} {'┤' if label else '│'}{line}" for label, line in zip(labels, lines, strict=True)]
    foot = f"{left:g}{f'{right:g}':>{columns - len(f'{left:g}')}}"
    rows += [f"{'':{margin}} └{'─' * columns}", f"{'':{margin}}  {foot}"]
    return "\n".join([title, *(row.rstrip() for row in rows)])


def braille(dots: list[tuple[int, int]], columns: int, height: int) -> list[str]:
    """Lines of text, the top one first; dots are counted from the lower left."""
    codes, joined = [[0] * columns for _ in range(height)], dots[:1]
    for (x, y), (to_x, to_y) in pairwise(dots):  # with a straight line between two of them
        steps = max(to_x - x, abs(to_y - y), 1)
        joined += [(x + round(n * (to_x - x) / steps), y + round(n * (to_y - y) / steps)) for n in range(1, steps + 1)]
    for x, y in joined:
        codes[height - 1 - y // 4][x // 2] |= DOTS[x % 2][y % 4]
    return ["".join(chr(BRAILLE + code) if code else " " for code in line) for line in codes]


def svg_curve(series: Mapping[str, Sequence[Point]], title: str, x_label: str = "step") -> str:
    """Several named series in one picture, which needs no other file and has no background of its own."""
    kept = {name: finite_points(points) for name, points in series.items()}
    frame = Frame.around([point for points in kept.values() for point in points])
    top = TITLE + LEGEND * len(kept)
    coloured = list(zip(kept, cycle(COLOURS), strict=False))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top + HEIGHT + FOOT}" fill="{INK}" '
        'font-family="sans-serif" font-size="13">',
        f'<text x="{LEFT}" y="26" font-size="16" font-weight="bold">{escape(title)}</text>',
        *(legend(name, colour, TITLE + LEGEND * place) for place, (name, colour) in enumerate(coloured)),
        f'<g transform="translate(0 {top})" fill="none" stroke-width="2">',
        *axes(frame, x_label),
        *(curve(kept[name], colour, frame) for name, colour in coloured),
        "</g>",
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


class Frame(NamedTuple):
    left: float  # the values at the edges of the plot
    right: float
    low: float
    high: float

    @classmethod
    def around(cls, points: list[Point]) -> "Frame":
        """Up and down to the next round number."""
        xs, ys = zip(*points or [(0.0, 0.0)], strict=True)
        rows = ticks(*bounds(ys))
        return cls(*bounds(xs), rows[0], rows[-1])

    def at(self, x: float, y: float) -> Point:
        right, up = (x - self.left) / (self.right - self.left), (y - self.low) / (self.high - self.low)
        return round(LEFT + right * (RIGHT - LEFT), 1), round(HEIGHT - up * HEIGHT, 1)


def ticks(low: float, high: float) -> list[float]:
    """Four to ten round numbers, from the last one below to the first one above."""
    power = 10.0 ** math.floor(math.log10((high - low) / 4))
    step = next(step for step in (5 * power, 2 * power, power) if (high - low) / step >= 4 * (1 - 1e-9))
    return [step * place for place in range(math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9) + 1)]


def axes(frame: Frame, x_label: str) -> Iterator[str]:
    for mark in ticks(frame.low, frame.high):
        _, y = frame.at(frame.left, mark)
        yield f'<path d="M{LEFT} {y}H{RIGHT}" stroke="{INK}" stroke-width="1" stroke-opacity="0.3"/>'
        yield text(LEFT - 8, y + 4, f"{mark:.6g}", "end")
    for mark in ticks(frame.left, frame.right):
        if frame.left <= mark <= frame.right:
            x, _ = frame.at(mark, frame.low)
            yield f'<path d="M{x} {HEIGHT}v5" stroke="{INK}" stroke-width="1"/>'
            yield text(x, HEIGHT + 20, f"{mark:.6g}")
    yield f'<path d="M{LEFT} 0V{HEIGHT}H{RIGHT}" stroke="{INK}" stroke-width="1"/>'
    yield text((LEFT + RIGHT) / 2, HEIGHT + 40, x_label)


def text(x: float, y: float, words: str, anchor: str = "middle") -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{INK}">{escape(words)}</text>'


def legend(name: str, colour: str, y: int) -> str:
    return f'<path d="M{LEFT} {y}h24" stroke="{colour}" stroke-width="3"/>{text(LEFT + 32, y + 4, name, "start")}'


def curve(points: list[Point], colour: str, frame: Frame) -> str:
    """A line, with a dot at each point where they are few."""
    places = [frame.at(x, y) for x, y in points]
    line = " ".join(f"{x},{y}" for x, y in places)
    dots = [f'<circle cx="{x}" cy="{y}" r="4" fill="{colour}"/>' for x, y in places if len(places) <= MARKED]
    return f'<polyline points="{line}" stroke="{colour}" stroke-linejoin="round"/>{"".join(dots)}'
