"""Charts as text, in the bundles that a kernel sends."""

from __future__ import annotations

import base64
import struct

from kernel_specs.restricted.display.bundles import plotly_figure_in, plotly_text, vega_text


def test_a_plotly_figure_tells_its_traces_axes_ranges_and_first_points() -> None:
    packed = base64.b64encode(struct.pack("<7d", *range(7))).decode()
    text = plotly_text(
        {
            "data": [
                {"type": "bar", "name": "north", "x": ["a", "b"], "y": [3, 1]},
                {"mode": "lines", "x": {"bdata": packed, "dtype": "f8"}, "y": [0.5] * 7},
            ],
            "layout": {
                "title": {"text": "Rents"},
                "xaxis": {"title": {"text": "city"}},
                "yaxis": {"title": "euro", "range": [0, 5], "type": "log"},
            },
        }
    )
    assert text.splitlines() == [
        "plotly figure 'Rents', 2 traces",
        "1. bar 'north': 2 points",
        "   x: a, b",
        "   y: 1 to 3; 3, 1",
        "2. scatter (lines): 7 points",
        "   x: 0 to 6; 0, 1, 2, 3, 4, …",
        "   y: 0.5 to 0.5; 0.5, 0.5, 0.5, 0.5, 0.5, …",
        "xaxis: title 'city'",
        "yaxis: title 'euro', type log, range [0, 5]",
    ]


def test_a_figure_of_any_shape_is_told_and_stays_short() -> None:
    assert plotly_text({}) == "plotly figure, 0 traces"
    crowd = plotly_text({"data": [{"x": ["w" * 1000] * 1000}] * 1000, "layout": 3})
    assert len(crowd) < 10_000
    assert crowd.endswith("… 988 more traces")


def test_a_chart_tells_its_marks_encodings_and_first_rows() -> None:
    text = vega_text(
        {
            "title": {"text": "Rents"},
            "layer": [
                {"mark": {"type": "bar"}, "encoding": {"x": {"field": "a", "type": "ordinal"}}},
                {"mark": "rule", "encoding": {"y": {"aggregate": "mean", "field": "b"}}},
            ],
            "datasets": {"one": [{"a": n, "b": 2} for n in range(9)]},
        }
    )
    assert text.splitlines()[:6] == [
        "chart (Vega-Lite)",
        "title: Rents",
        "  bar: x: a (ordinal)",
        "  rule: y: mean of b (value)",
        "9 rows, the first:",
        '{"a": 0, "b": 2}',
    ]
    assert vega_text({"marks": []}) == "chart (Vega)"


def test_the_figure_of_a_page_is_found() -> None:
    page = (
        "<script>function draw() { Plotly.newPlot(a, b) }</script><div id='x'></div><script>"
        'Plotly.newPlot(   "x",   [{"y": [1, 2]}],   {"title": "T"},  {"responsive": true} )'
    )
    assert plotly_figure_in(page) == {"data": [{"y": [1, 2]}], "layout": {"title": "T"}}
    assert plotly_figure_in("<p>Plotly.newPlot</p>") == {}
