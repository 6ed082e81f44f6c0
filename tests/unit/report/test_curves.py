"""Curves as text and as SVG: points land where they should, whatever a run reports."""

import math
import xml.etree.ElementTree as ET

import pytest

from trueline.report.curves import HEIGHT, LEFT, MARKED, RIGHT, Point, smooth, svg_curve, terminal_curve, ticks

SVG = "{http://www.w3.org/2000/svg}"


def drawn(picture: str) -> list[list[Point]]:
    """The points of every line."""
    lines = ET.fromstring(picture).iter(f"{SVG}polyline")
    pairs = [[pair.split(",") for pair in (line.get("points") or "").split()] for line in lines]
    return [[(float(x), float(y)) for x, y in line] for line in pairs]


def texts(picture: str) -> list[str]:
    return [element.text or "" for element in ET.fromstring(picture).iter(f"{SVG}text")]


def test_values_become_means_of_the_last_ones() -> None:
    assert smooth([(1, 2.0), (2, 4.0), (3, math.nan), (4, 9.0)], 2) == [(1, 2.0), (2, 3.0), (4, 6.5)]
    assert smooth([], 5) == []


@pytest.mark.parametrize(
    ("low", "high", "marks"),
    [
        (0.0, 1.0, [0, 0.2, 0.4, 0.6, 0.8, 1]),
        (0.3, 0.7, [0.3, 0.4, 0.5, 0.6, 0.7]),
        (0.52, 0.97, [0.5, 0.6, 0.7, 0.8, 0.9, 1]),
        (-3.0, 3.0, [-3, -2, -1, 0, 1, 2, 3]),
        (1e-5, 2e-5, [1e-5, 1.2e-5, 1.4e-5, 1.6e-5, 1.8e-5, 2e-5]),
        (0.0, 4000.0, [0, 1000, 2000, 3000, 4000]),
    ],
)
def test_axes_are_marked_at_round_numbers_around_the_values(low: float, high: float, marks: list[float]) -> None:
    assert ticks(low, high) == pytest.approx(marks)


# In a terminal


def test_a_rising_line_goes_from_the_lower_left_to_the_upper_right() -> None:
    """Sixteen characters by eight are a square of dots."""
    lines = terminal_curve([(80, 0.9), (1, 0.5)], "reward", width=21, height=8).split("\n")
    labels = ["0.9 ┤", *["    │"] * 6, "0.5 ┤"]
    diagonal = [f"{label}{'  ' * (7 - row)}⡠⠊" for row, label in enumerate(labels)]
    assert lines == ["reward", *diagonal, "    └" + "─" * 16, "     1" + "80".rjust(15)]


def test_every_column_of_a_line_has_a_dot() -> None:
    lines = terminal_curve([(0, 0), (1, 1), (2, -1)], "t", width=60, height=6).split("\n")[1:7]
    columns = zip(*(line.ljust(60)[4:] for line in lines), strict=True)
    assert all(any(character > "⠀" for character in column) for column in columns)


@pytest.mark.parametrize("width", [30, 79, 120])
def test_no_line_is_wider_than_it_may_be(width: int) -> None:
    points = [(step, math.sin(step) * 1e5) for step in range(3000)]
    assert max(map(len, terminal_curve(points, "loss", width=width).split("\n"))) == width


def test_a_single_point_and_a_flat_line_are_shown_in_the_middle() -> None:
    single = terminal_curve([(3, 2.0)], "t", width=44, height=3).split("\n")
    assert [line.startswith(label) for line, label in zip(single[1:4], ["2.2 ┤", "    │", "1.8 ┤"], strict=True)]
    assert [len(line.split("│")[-1].strip()) for line in single[1:4]][1] == 1
    flat = terminal_curve([(1, 0.0), (2, 0.0)], "t", width=44, height=3).split("\n")
    assert flat[1] == " 1 ┤" and flat[3] == "-1 ┤" and " " not in flat[2].removeprefix("   │")


def test_what_is_not_finite_is_left_out() -> None:
    whole = [(1, 0.1), (2, 0.3), (4, 0.2)]
    assert terminal_curve([*whole, (3, math.nan), (math.inf, 1.0)], "t") == terminal_curve(whole, "t")
    assert terminal_curve([(1, math.nan)], "reward") == "reward: no points"


# As SVG


def test_points_lie_on_the_axes_scale() -> None:
    (line,) = drawn(svg_curve({"reward": [(80, 1.0), (0, 0.0), (20, 0.25)]}, "t"))
    assert line == [(LEFT, HEIGHT), (LEFT + (RIGHT - LEFT) / 4, HEIGHT * 0.75), (RIGHT, 0)]


def test_title_names_and_marks_are_told() -> None:
    said = texts(svg_curve({"reward": [(1, 0.5), (99, 0.9)], "held out": [(3, 0.52)]}, "GRPO", x_label="epoch"))
    assert said[:3] == ["GRPO", "reward", "held out"] and said[-1] == "epoch"
    assert said[3:-1] == ["0.5", "0.6", "0.7", "0.8", "0.9", "20", "40", "60", "80"]


def test_each_series_has_its_colour_and_few_points_have_dots() -> None:
    many = [(step, step % 7) for step in range(MARKED + 1)]
    root = ET.fromstring(svg_curve({"many": many, "few": many[:-1]}, "t"))
    first, second = [line.get("stroke") for line in root.iter(f"{SVG}polyline")]
    assert first != second
    assert [dot.get("fill") for dot in root.iter(f"{SVG}circle")] == [second] * MARKED


def test_words_cannot_break_the_picture() -> None:
    picture = svg_curve({"<script>&": [(0, 1), (1, 2)]}, "a < b & c", x_label="</svg>")
    said = texts(picture)
    assert said[0] == "a < b & c" and said[1] == "<script>&" and said[-1] == "</svg>"


@pytest.mark.parametrize(
    "series",
    [
        {},
        {"none": []},
        {"nan": [(1.0, math.nan)], "inf": [(math.inf, 0.0)]},
        {"single": [(5.0, 0.3)]},
        {"flat": [(0.0, 1e20), (9.0, 1e20)]},
        {"tiny": [(0.0, -1e-300), (1.0, 1e-300)]},
        {f"series {number}": [(0.0, number), (1.0, 1.0)] for number in range(12)},
    ],
)
def test_whatever_a_run_reports_makes_a_picture(series: dict[str, list[Point]]) -> None:
    picture = svg_curve(series, "t")
    assert len(drawn(picture)) == len(series)
    assert all(LEFT <= x <= RIGHT and 0 <= y <= HEIGHT for line in drawn(picture) for x, y in line)
