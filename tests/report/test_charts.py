"""Charts: where points and ticks lie, what is written on them, and what is refused."""

from __future__ import annotations

import math
import re
from itertools import pairwise
from typing import Any
from xml.etree import ElementTree

import pytest

from dilated_attention_pytorch.report import Series, line_chart
from dilated_attention_pytorch.report.axes import length_axis, linear_axis, log_axis
from dilated_attention_pytorch.report.charts import COLOURS, MARKERS, MOST_MARKERS, WIDTH, plain_number

SVG = "{http://www.w3.org/2000/svg}"


def draw(*series: Series, **options: Any) -> ElementTree.Element:
    labels: dict[str, Any] = {"title": "Time", "x_label": "tokens", "y_label": "ms", "chart_id": "time"}
    return ElementTree.fromstring(line_chart(series, **(labels | options)))


def texts(svg: ElementTree.Element) -> list[str]:
    return [each.text or "" for each in svg.iter(f"{SVG}text")]


def marks(svg: ElementTree.Element) -> list[tuple[str, float, float]]:
    """The tooltip of each marked point, and where it is."""
    found = []
    for path in svg.iter(f"{SVG}path"):
        title = path.find(f"{SVG}title")
        if title is not None:
            place = re.fullmatch(r"translate\((\S+) (\S+)\)", path.attrib["transform"])
            assert place is not None
            found.append((title.text or "", float(place[1]), float(place[2])))
    return found


def test_names_ticks_and_labels_are_written() -> None:
    svg = draw(Series("dense <1>", ((1024, 2.0), (4096, 40.0))), Series("dilated", ((1024, 1.0),)))
    assert svg.attrib["id"] == "time"
    assert svg.attrib["role"] == "img"
    assert svg.attrib["aria-label"] == "Time: ms by tokens"
    written = texts(svg)
    for text in ("Time", "tokens", "ms", "dense <1>", "dilated", "1,024", "2,048", "4,096", "1", "10", "50"):
        assert text in written


def test_equal_ratios_are_equally_far_apart_on_logarithmic_axes() -> None:
    places = marks(draw(Series("a", tuple((2.0**i, 10.0**i) for i in range(4)))))
    assert [text for text, _, _ in places] == ["a: 1, 1", "a: 2, 10", "a: 4, 100", "a: 8, 1,000"]
    for axis, sign in ((1, 1), (2, -1)):
        steps = [sign * (b[axis] - a[axis]) for a, b in pairwise(places)]
        assert min(steps) > 20
        assert max(steps) - min(steps) <= 0.2


def test_linear_axes_may_hold_zero_and_negative_values() -> None:
    places = marks(draw(Series("a", ((0, -1.0), (50, 0.0), (100, 1.0))), log_x=False, log_y=False))
    (_, x0, y0), (_, x1, y1), (_, x2, y2) = places
    assert (x0 + x2) / 2 == pytest.approx(x1, abs=0.1)
    assert (y0 + y2) / 2 == pytest.approx(y1, abs=0.1)
    assert y0 > y2


def test_a_single_point_is_drawn_inside() -> None:
    for options in ({}, {"log_x": False, "log_y": False}):
        ((_, x, y),) = marks(draw(Series("a", ((4096, 3.0),)), **options))
        assert 60 < x < WIDTH
        assert 60 < y < 400


def test_whiskers_are_drawn_and_counted_for_the_axis() -> None:
    svg = draw(Series("a", ((1, 10.0), (2, 20.0)), ((1.0, 30.0), (5.0, 900.0))))
    assert "1,000" in texts(svg)
    assert sum("m-4,0h8" in path.attrib["d"] for path in svg.iter(f"{SVG}path")) == 2


def test_long_series_are_marked_here_and_there() -> None:
    svg = draw(Series("a", tuple((float(i), 1.0) for i in range(1000))), log_x=False, log_y=False)
    assert 10 < len(marks(svg)) <= MOST_MARKERS
    assert max(path.attrib["d"].count("L") for path in svg.iter(f"{SVG}path")) == 999


def test_many_names_take_rows_and_differ_in_looks() -> None:
    names = [f"a rather long name, number {i}" for i in range(12)]
    svg = draw(*(Series(name, ((1, 1.0), (2, 2.0))) for name in names))
    places = {each.text: (float(each.attrib["x"]), each.attrib["y"]) for each in svg.iter(f"{SVG}text")}
    rows: dict[str, list[float]] = {}
    for name in names:
        x, y = places[name]
        rows.setdefault(y, []).append(x)
    assert len(rows) > 3
    for row in rows.values():
        assert all(b - a > 200 for a, b in pairwise(row))
    looks = {(path.attrib["d"], path.attrib["fill"]) for path in svg.iter(f"{SVG}path") if len(path)}
    assert len(looks) == 12
    assert math.gcd(len(COLOURS), len(MARKERS)) == 1


def test_labels_of_the_x_axis_do_not_touch() -> None:
    svg = draw(Series("a", ((1024, 1.0), (2**24, 2.0))))
    ticks = [each for each in svg.iter(f"{SVG}text") if each.attrib.get("text-anchor") == "middle"][:-1]
    spans = [(float(t.attrib["x"]), 8.2 * len(t.text or "") / 2) for t in ticks]
    assert len(spans) >= 4
    assert all(a + wide < b - next_wide for (a, wide), (b, next_wide) in pairwise(spans))


@pytest.mark.parametrize(
    ("series", "options", "message"),
    [
        ([], {}, "a chart must have at least one series, got none"),
        ([Series("a", ())], {}, "a series must have at least one point, got none in 'a'"),
        ([Series("a", ((1, 0.0),))], {}, "y must be positive on a logarithmic axis, got 0.0 in 'a'"),
        ([Series("a", ((0, 1.0),))], {}, "x must be positive on a logarithmic axis, got 0 in 'a'"),
        ([Series("a", ((1, math.nan),))], {"log_y": False}, "y must be finite, got nan in 'a'"),
        ([Series("a", ((1, 1.0),), ())], {}, "low_high must have a pair for each point, got 0 for 1 points"),
        (
            [Series("a", ((1, 1.0),), ((2.0, 3.0),))],
            {},
            "must lie within its low_high, got 1.0 and (2.0, 3.0)",
        ),
        ([Series("a", ((1, 1.0),))], {"chart_id": "1 x"}, "chart_id must be a letter"),
    ],
)
def test_what_cannot_be_drawn_is_refused(series: list[Series], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        draw(*series, **options)


@pytest.mark.parametrize(
    "values", [(0.003, 0.9), (5.0,), (1.0, 2.0), (1e-9, 1e9), (97.0, 103.0), (1e5, 3.3e5)]
)
def test_ticks_are_few_and_span_the_values(values: tuple[float, ...]) -> None:
    for make in (linear_axis, log_axis, length_axis):
        axis = make(values)
        assert 2 <= len(axis.ticks) <= 9
        assert axis.low <= min(values) <= max(values) <= axis.high
        assert all(0 <= axis.share(tick) <= 1 for tick in axis.ticks)
        assert list(axis.ticks) == sorted(set(axis.ticks))


def test_ticks_are_round_numbers() -> None:
    assert linear_axis((0.0, 0.7)).ticks == (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7)
    assert linear_axis((1.3, 5.2)).ticks == (1.0, 2.0, 3.0, 4.0, 5.0, 6.0)
    assert log_axis((0.3, 12.0)).ticks == (0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0)
    assert log_axis((0.002, 900.0)).ticks == (0.01, 0.1, 1.0, 10.0, 100.0, 1000.0)
    assert length_axis((1000, 5000)).ticks == (512.0, 1024.0, 2048.0, 4096.0, 8192.0)


def test_plain_numbers() -> None:
    assert [plain_number(x) for x in (0, 1048576, 0.25, 1234.567)] == ["0", "1,048,576", "0.25", "1,235"]
