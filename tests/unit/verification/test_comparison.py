from __future__ import annotations

import base64
import io
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, PngImagePlugin

from kernel_mcp.verification.clock import Run
from kernel_mcp.verification.comparison import Difference, first_difference, values_differ

WAS = Run(1_767_261_600.0, 1_767_261_601.5, pid=4123)
"""2026-01-01 10:00:00 UTC."""
NOW = Run(1_767_352_530.0, 1_767_352_531.5, pid=388)
"""2026-01-02 11:15:30 UTC."""


def stream(text: str, name: str = "stdout") -> dict[str, Any]:
    return {"output_type": "stream", "name": name, "text": text}


def result(**data: Any) -> dict[str, Any]:
    named = {name.replace("__", "/"): value for name, value in data.items()}
    return {"output_type": "execute_result", "data": named, "metadata": {}, "execution_count": 1}


def of_type(mime: str, value: Any) -> dict[str, Any]:
    return {"output_type": "display_data", "data": {mime: value}, "metadata": {}}


def compared(before: str, after: str) -> Difference | None:
    return first_difference([stream(before)], [stream(after)], WAS, NOW)


BAR = "\N{FULL BLOCK}" * 10
EQUAL = [
    ("<function f at 0x7f2b6c1d3a60>", "<function f at 0x7fe2aa0018b0>"),
    ("[<Line2D at 0x7f2b6c1d3a60>]", "[<Line2D at 0x55d2aa0018b0>]"),
    ("<bound A.f of <A at 0x7f2b6c1d3a60>>", "<bound A.f of <A at 0x7f2b6c1d0a00>>"),
    ("<generator object g at 0x1f3a60>", "<generator object g at 0x7fe2aa0018b0>"),
    ("140213454874368", "139637976727552"),
    ("<Thread(t, started 140213454874368)>", "<Thread(t, started 139637976727552)>"),
    ("<Thread(Thread-5 (f), initial)>", "<Thread(Thread-12 (f), initial)>"),
    ("ThreadPoolExecutor-0_0", "ThreadPoolExecutor-3_1"),
    ("ForkPoolWorker-1 done", "ForkPoolWorker-17 done"),
    (
        "CPU times: user 2.1 ms, sys: 0 ns, total: 2.1 ms",
        "CPU times: user 1 s, sys: 3 us, total: 1 s",
    ),
    ("Wall time: 2.13 ms", "Wall time: 1min 2s"),
    ("Wall time: 5.2 \xb5s", "Wall time: 980 ns"),
    (
        "12.3 ns \xb1 0.5 ns per loop (mean \xb1 std. dev. of 7 runs, 10,000,000 loops each)",
        "9.25 \xb5s \xb1 1 ns per loop (mean \xb1 std. dev. of 7 runs, 100,000 loops each)",
    ),
    ("1000 loops, best of 5: 212 usec per loop", "1000 loops, best of 5: 97 usec per loop"),
    (
        "The slowest run took 4.50 times longer than the fastest.",
        "The slowest run took 14.1 times longer than the fastest.",
    ),
    (f"100%|{BAR}| 10/10 [00:00<00:00, 123.4it/s]", f"100%|{BAR}| 10/10 [00:02<00:00,  4.40it/s]"),
    (
        f"fit: 100%|{BAR}| 10/10 [00:00<00:00, 9.4s/it, loss=0.31]",
        f"fit: 100%|{BAR}{BAR}| 10/10 [01:00<00:00, 12it/s, loss=0.31]",
    ),
    ("10it [00:00, 9383.2it/s]", "10it [00:01, 11.2it/s]"),
    (
        "  0%|          | 0/10 [00:00<?, ?it/s]\r 50%|#####     | 5/10 [00:01<00:01, 2it/s]",
        "  0%|          | 0/10 [00:00<?, ?it/s]\r 50%|#####     | 5/10 [00:02<00:02, 3it/s]",
    ),
    ("/tmp/tmpk2j_9x0a/a.csv", "/tmp/tmpzz81lq3m/a.csv"),
    ("/tmp/tmpabcdefgh", "/tmp/tmpqrstuvwx"),
    ("made '/tmp/run_k2j_9x0a.csv'", "made '/tmp/run_zz81lq3m.csv'"),
    ("/tmp/ipykernel_4123/88.py:1: Warning", "/tmp/ipykernel_388/88.py:1: Warning"),
    ("I am 4123", "I am 388"),
    ("pid=4123, ppid=1", "pid=388, ppid=1"),
    ("2026-01-01 10:00:00.123456", "2026-01-02 11:15:31.000001"),
    ("2026-01-01T10:00:01+00:00", "2026-01-02T11:15:30+00:00"),
    ("2026-01-01 10:00:00,123 INFO ready", "2026-01-02 11:15:31,997 INFO ready"),
    ("2026-01-01", "2026-01-02"),
    ("2026-01-01 12:00", "2026-01-02 13:15"),
    ("20260101_100000", "20260102_111530"),
    ("20260101", "20260102"),
    ("Thu Jan  1 10:00:00 2026", "Fri Jan  2 11:15:30 2026"),
    ("Thu, 01 Jan 2026 10:00:00 GMT", "Fri, 02 Jan 2026 11:15:30 GMT"),
    ("-rw-r--r-- 1 root 5 Jan  1 10:00 a.csv", "-rw-r--r-- 1 root 5 Jan  2 11:15 a.csv"),
    ("January 1, 2026", "January 2, 2026"),
    ("01/02/2026", "01/02/2026"),
    ("1/1/2026", "1/2/2026"),
    ("31/12/2025", "1/1/2026"),
    (
        "datetime.datetime(2026, 1, 1, 10, 0, 0, 12)",
        "datetime.datetime(2026, 1, 2, 11, 15, 31, 99)",
    ),
    ("datetime.date(2026, 1, 1)", "datetime.date(2026, 1, 2)"),
    ("Timestamp('2026-01-01 10:00:01.5')", "Timestamp('2026-01-02 11:15:31.2')"),
    ("1767261600.25", "1767352531.0"),
    ("1767261600", "1767352530"),
    ("1767261600250", "1767352531000"),
    ("10:00:01", "11:15:31"),
    ("12:00:01.5 start", "13:15:31.5 start"),
    ("Date:   Thu, 01 Jan 2026   R: 0.5", "Date:   Fri, 02 Jan 2026   R: 0.5"),
    ("Thu Jan  1 10:00:00 UTC 2026", "Fri Jan  2 11:15:30 UTC 2026"),
    ("model_20260101_100001.pkl", "model_20260102_111531.pkl"),
    ("/a/run-2026-01-01_10-00-00", "/a/run-2026-01-02_11-15-30"),
    ("at 10:00", "at 11:15"),
    ("2025-12-31", "2026-01-01"),
    ("0.30000000000000004", "0.3"),
    ("1234.5678901234567", "1234.5678901234569"),
    ("-1.0000000001e-12", "-1.0000000002e-12"),
    ("a  0.1\nb  0.5", "a  0.09999999999999999\nb                  0.5"),
    ("Cell In[7], line 2", "Cell In[3], line 2"),
    ("10/10 [====] - 1s 12ms/step - loss: 0.5", "10/10 [====] - 3s 40ms/step - loss: 0.5"),
    ("Ran 3 tests in 0.003s", "Ran 3 tests in 1.270s"),
    ("==== 5 passed in 0.12s ====", "===== 5 passed in 1.9s ====="),
    ("same", "same"),
    ("", ""),
    ("a\r\nb", "a\r\nb"),
]


@pytest.mark.parametrize(("before", "after"), EQUAL)
def test_what_differs_between_any_two_runs_is_equal(before: str, after: str) -> None:
    assert compared(before, after) is None


DIFFERENT = [
    ("212", "97", "212", "97"),
    ("rows: 212\n", "rows: 97\n", "212", "97"),
    ("-1", "-2", "-1", "-2"),
    ("0x1f3a60", "0x1f3a70", "0x1f3a60", "0x1f3a70"),
    ("loaded at 0x401000", "loaded at 0x402000", "0x401000", "0x402000"),
    ("<mask at 0x7f2b6c1d3a61>", "<mask at 0x7f2b6c1d3a62>", None, None),
    ("<A at 0x7f2b6c1d3a60>", "<B at 0x7f2b6c1d3a60>", "A", "B"),
    ("140213454874367", "139637976727551", None, None),
    ("Wall time: unknown", "Wall time: 3 ms", None, None),
    ("CPU times: 5", "CPU times: 6", "5", "6"),
    ("time 2.13 ms", "time 2.14 ms", "2.13", "2.14"),
    (
        f"100%|{BAR}| 10/10 [00:00<00:00, 12it/s]",
        f"100%|{BAR}| 11/11 [00:00<00:00, 12it/s]",
        "10/10",
        "11/11",
    ),
    (
        f"100%|{BAR}| 10/10 [00:00<00:00, 9it/s, loss=0.31]",
        f"100%|{BAR}| 10/10 [00:00<00:00, 9it/s, loss=0.32]",
        None,
        None,
    ),
    ("scores [00:10, 12]", "scores [00:11, 12]", None, None),
    ("/tmp/out_model_v1.csv", "/tmp/out_model_v2.csv", None, None),
    ("/tmp/run_baseline", "/tmp/run_improved", None, None),
    ("/data/tmpk2j_9x0a", "/data/tmpzz81lq3m", None, None),
    ("tmpk2j_9x0a", "tmpzz81lq3m", None, None),
    ("I am 4123", "I am 389", "4123", "389"),
    ("rows 388", "rows 4123", "388", "4123"),
    ("2024-03-01", "2024-03-02", "2024-03-01", "2024-03-02"),
    ("2025-11-01 10:00:00", "2025-11-02 11:15:30", None, None),
    ("2026-01-01 10:00:00", "2026-01-02 17:42:00", None, None),
    ("2026-01-01 00:00:00", "2026-01-01 18:00:00", None, None),
    ("Mon Jan  5 10:00:00 2015", "Tue Jan  6 10:00:00 2015", None, None),
    ("05/06/2019", "06/06/2019", None, None),
    ("datetime.date(2020, 2, 1)", "datetime.date(2020, 2, 2)", None, None),
    ("model_20240101_100001.pkl", "model_20240102_111531.pkl", None, None),
    ("at 08:10", "at 09:25", None, None),
    ("2026-01-01", "2026-01-04", None, None),
    ("2026-01-01", "2026-01-01 0", None, None),
    ("1577872800", "1577872801", None, None),
    ("1767200000", "1767352530", None, None),
    ("03:00:01", "04:00:02", None, None),
    ("8:15:00", "9:45:10", None, None),
    ("0.300000001", "0.3", None, None),
    ("0.31", "0.32", "0.31", "0.32"),
    ("1.0", "1", None, None),
    ("pandas 1.10", "pandas 1.1", None, None),
    ("1e-17", "-2e-17", None, None),
    ("nan", "0.0", None, None),
    ("1000000007", "1000000009", None, None),
    ("{'a', 'b'}", "{'b', 'a'}", "a", "b"),
    ("a  b", "a b", None, None),
    ("a\nb", "a\nb\nc", "", "c"),
    ("a\nb", "a", "b", ""),
    ("", "x", "", "x"),
    ("x y z", "x", "y z", ""),
    ("In 3 of 4", "In 2 of 4", "3", "2"),
    ("Ran 3 tests in 0.003s", "Ran 4 tests in 0.003s", "3", "4"),
    ("==== 5 passed in 0.1s ====", "==== 4 passed in 0.1s ====", "5", "4"),
    ("12ms per request", "13ms per request", "12ms", "13ms"),
    ("loss: 0.5 12ms/step", "loss: 0.6 12ms/step", "0.5", "0.6"),
    ("6f1c2d3e-0000-4000-8000-000000000001", "6f1c2d3e-0000-4000-8000-000000000002", None, None),
    ("caf\xe9", "cafe", "caf\xe9", "cafe"),
]


@pytest.mark.parametrize(("before", "after", "one", "two"), DIFFERENT)
def test_a_difference_of_data_is_found(
    before: str, after: str, one: str | None, two: str | None
) -> None:
    found = compared(before, after)
    assert found is not None
    assert found.kind == "stdout"
    assert found.before != found.after
    if one is not None:
        assert (found.before, found.after) == (one, two)
    assert max(len(found.before), len(found.after)) <= 60


def test_the_place_of_the_first_difference_and_the_number_of_others() -> None:
    found = compared("a\nn = 212 rows\nc\nd", "a\nn = 97 rows\nx\nd\ne")
    assert found == Difference("stdout", 2, 5, "212", "97", 2)


def test_without_its_pid_a_run_masks_none() -> None:
    was, now = Run(WAS.began, WAS.ended), Run(NOW.began, NOW.ended)
    assert first_difference([stream("4123")], [stream("388")], was, now) is not None


def test_streams_are_compared_for_themselves() -> None:
    before = [stream("a\n"), stream("x\n", "stderr"), stream("b\n")]
    after = [stream(["a\n", "b\n"]), stream("x\n", "stderr")]  # type: ignore[arg-type]
    assert first_difference(before, after, WAS, NOW) is None
    found = first_difference(before, [stream("a\nb\n"), stream("y\n", "stderr")], WAS, NOW)
    assert found == Difference("stderr", 1, 1, "x", "y", 0)


def test_outputs_that_are_missing_or_of_another_type() -> None:
    one = result(text__plain="5")
    assert first_difference([one], [], WAS, NOW) == Difference("outputs", 0, 0, "5", "", 0)
    found = first_difference([one], [result(text__plain="5", text__html="<b>5</b>")], WAS, NOW)
    assert found is not None
    assert found.kind == "outputs"
    found = first_difference([one, one, one], [result(text__plain="6")], WAS, NOW)
    assert found == Difference("text/plain", 1, 1, "5", "6", 2)


def test_errors_by_name_and_value() -> None:
    error = {"output_type": "error", "ename": "KeyError", "evalue": "'a'", "traceback": ["one"]}
    assert first_difference([error], [{**error, "traceback": ["other"]}], WAS, NOW) is None
    found = first_difference([error], [{**error, "evalue": "'b'"}], WAS, NOW)
    assert found == Difference("error", 1, 12, "a", "b", 0)
    assert first_difference([error], [], WAS, NOW) is not None


def styled(mark: str, value: str) -> str:
    return (
        f'<style type="text/css">#T_{mark}_row0_col0 {{color: red;}}</style>'
        f'<table id="T_{mark}"><td id="T_{mark}_row0_col0" class="data">{value}</td></table>'
    )


UUIDS = ("6f1c2d3e-aaaa-4000-8000-000000000001", "0b1c2d3e-bbbb-4000-9000-00000000ffff")
SAME_MARKUP = [
    (styled("1a2b3", "5"), styled("fffff", "5")),
    (
        f'<div id="{UUIDS[0]}"></div><script>plot("{UUIDS[0]}", [1, 2])</script>',
        f'<div id="{UUIDS[1]}"></div><script>plot("{UUIDS[1]}", [1, 2])</script>',
    ),
    (
        f"<input id='section-{UUIDS[0]}'><label for='section-{UUIDS[0]}'>x</label>",
        f"<input id='section-{UUIDS[1]}'><label for='section-{UUIDS[1]}'>x</label>",
    ),
    (f'<div id="altair-viz-{7:032x}"></div>', f'<div id="altair-viz-{8:032x}"></div>'),
    ('<div id="sk-container-id-1">a</div>', '<div id="sk-container-id-4">a</div>'),
    (
        '<clipPath id="p0123456789"/><g clip-path="url(#p0123456789)"/>',
        '<clipPath id="pabcdef0123"/><g clip-path="url(#pabcdef0123)"/>',
    ),
    ("<dc:date>2026-01-01T10:00:00.12</dc:date>", "<dc:date>2026-01-02T11:15:30.99</dc:date>"),
]


@pytest.mark.parametrize("mime", ["text/html", "image/svg+xml"])
@pytest.mark.parametrize(("before", "after"), SAME_MARKUP)
def test_identifiers_of_elements_do_not_count(before: str, after: str, mime: str) -> None:
    assert first_difference([of_type(mime, before)], [of_type(mime, after)], WAS, NOW) is None


OTHER_MARKUP = [
    (styled("1a2b3", "5"), styled("fffff", "6")),
    (styled("1a2b3", "T_1a2b3"), styled("fffff", "T_fffff")),
    (f"<td>{UUIDS[0]}</td>", f"<td>{UUIDS[1]}</td>"),
    (f'<td id="a">{UUIDS[0]}</td>', f'<td id="a">{UUIDS[1]}</td>'),
    (f'<a href="/c/{UUIDS[0]}" id="a">c</a>', f'<a href="/c/{UUIDS[1]}" id="a">c</a>'),
    (f'<td data-id="{UUIDS[0]}">c</td>', f'<td data-id="{UUIDS[1]}">c</td>'),
    (
        f'<div id="{UUIDS[0]}"></div><script>plot("{UUIDS[0]}", [1, 2])</script>',
        f'<div id="{UUIDS[1]}"></div><script>plot("{UUIDS[1]}", [1, 3])</script>',
    ),
    ("<td>1</td>", "<td>2</td>"),
    ("<td id='a", "<td id='b"),
]


@pytest.mark.parametrize("mime", ["text/html", "image/svg+xml"])
@pytest.mark.parametrize(("before", "after"), OTHER_MARKUP)
def test_a_difference_in_markup_is_found(before: str, after: str, mime: str) -> None:
    found = first_difference([of_type(mime, before)], [of_type(mime, after)], WAS, NOW)
    assert found is not None
    assert found.kind == mime


SAME_JSON = [
    ({"a": [1, 2.0, None]}, {"a": [1, 2.0, None]}),
    ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
    ([0.1 + 0.2], [0.3]),
    ([float("nan")], [float("nan")]),
]
OTHER_JSON = [
    ({"a": 1}, {"a": 2}),
    ({"a": 1}, {"b": 1}),
    ([1, 2], [2, 1]),
    ([1], [1, 1]),
    ([1], [1.0]),
    ([True], [1]),
    ([0.3], [0.300001]),
    ("0x7f2b6c1d3a60", "0x7fe2aa0018b0"),
    ([float("inf")], [1e308]),
]


@pytest.mark.parametrize(("before", "after"), SAME_JSON)
def test_json_counts_by_its_value(before: object, after: object) -> None:
    for mime in ("application/json", "application/vnd.vegalite.v5+json"):
        outputs = [of_type(mime, before)], [of_type(mime, after)]
        assert first_difference(*outputs, WAS, NOW) is None
    assert not values_differ(before, after)


@pytest.mark.parametrize(("before", "after"), OTHER_JSON)
def test_other_json_is_found(before: object, after: object) -> None:
    outputs = [of_type("application/json", before)], [of_type("application/json", after)]
    assert first_difference(*outputs, WAS, NOW) is not None
    assert values_differ(before, after)


def test_deep_json_is_compared() -> None:
    one: Any = 1
    other: Any = 2
    for _ in range(100_000):
        one, other = [one], [other]
    found = first_difference(
        [of_type("application/json", one)], [of_type("application/json", other)], WAS, NOW
    )
    assert found == Difference("application/json", 0, 0, "1", "2", 0)
    while isinstance(one, list):  # else its release would recurse
        one, other = one[0], other[0]


def test_numbers_of_widgets_do_not_count() -> None:
    mime = "application/vnd.jupyter.widget-view+json"
    pair = [of_type(mime, {"model_id": "a" * 32})], [of_type(mime, {"model_id": "b" * 32})]
    assert first_difference(*pair, WAS, NOW) is None


def png(colour: int, level: int = 6, **texts: str) -> dict[str, Any]:
    image = Image.new("RGB", (40, 30), (200, colour, 10))
    info = PngImagePlugin.PngInfo()
    for name, text in texts.items():
        info.add_text(name, text)
    buffer = io.BytesIO()
    image.save(buffer, "PNG", pnginfo=info, compress_level=level)
    return of_type("image/png", base64.b64encode(buffer.getvalue()).decode())


def test_pictures_count_by_what_they_show() -> None:
    assert png(5) != png(5, date="today")
    assert first_difference([png(5)], [png(5, level=1, date="today")], WAS, NOW) is None
    found = first_difference([png(5)], [png(6)], WAS, NOW)
    assert found is not None
    assert (found.kind, found.row) == ("image/png", 0)


@pytest.mark.parametrize("mime", ["image/png", "image/jpeg"])
def test_pictures_that_are_none_count_by_their_bytes(mime: str) -> None:
    one, other = of_type(mime, "AAAA"), of_type(mime, "AAAB")
    assert first_difference([one], [one], WAS, NOW) is None
    assert first_difference([one], [other], WAS, NOW) is not None
    assert first_difference([one], [of_type(mime, "no base64 \xe9")], WAS, NOW) is not None


_JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=8,
)
_OUTPUT = st.dictionaries(
    st.sampled_from(["output_type", "name", "text", "data", "ename", "evalue"]),
    st.sampled_from(["stream", "error", "display_data", "stdout", "12:00:99", "0x1f00"]) | _JSON,
)


@given(st.lists(_OUTPUT, max_size=3), st.lists(_OUTPUT, max_size=3))
def test_no_value_of_a_kernel_raises(one: list[Any], other: list[Any]) -> None:
    first_difference(one, other, WAS, NOW)
    assert first_difference(one, one, WAS, NOW) is None


_ROWS = st.text(alphabet="0123456789.:-/eE_ []<>|xajJanT\n\r\t%(),'\u0660\u00b2", max_size=60)


@given(_ROWS, _ROWS)
def test_no_text_raises_and_each_equals_itself(one: str, other: str) -> None:
    compared(one, other)
    assert compared(one, one) is None


def test_another_date_of_the_same_day_is_found() -> None:
    later = Run(WAS.began + 120, WAS.began + 121)
    for one, other in (("2025-12-31", "2026-01-01"), ("2026-01-02", "2026-01-01")):
        assert first_difference([stream(one)], [stream(other)], WAS, later) is not None
    midnight = Run(WAS.began + 50_395, WAS.began + 50_396)
    after = Run(WAS.began + 50_405, WAS.began + 50_406)
    days = [stream("2026-01-01")], [stream("2026-01-02")]
    assert first_difference(*days, midnight, after) is None


def test_a_picture_of_a_drawing_counts_by_the_drawing() -> None:
    drawing = {"image/svg+xml": "<svg/>", "text/plain": "<Figure>"}
    drawn = {**drawing, "image/png": png(5)["data"]["image/png"]}
    one, other = ({"output_type": "display_data", "data": each} for each in (drawing, drawn))
    assert first_difference([one], [other], WAS, NOW) is None
    changed = {**drawn, "image/svg+xml": "<svg><g/></svg>"}
    found = first_difference([one], [{**other, "data": changed}], WAS, NOW)
    assert found is not None
    assert found.kind == "image/svg+xml"


def test_outputs_of_other_types_are_named_by_them() -> None:
    one, other = result(text__plain="5"), result(text__plain="5", text__html="<b>5</b>")
    found = first_difference([one], [other], WAS, NOW)
    assert found == Difference("outputs", 0, 0, "text/plain", "text/html, text/plain", 0)


@pytest.mark.parametrize("began", [float("nan"), float("inf"), -1e300, 0.0, 1e300, 2.5e11])
def test_a_run_of_no_time_has_no_clock(began: float) -> None:
    for was, now in ((Run(began, began), NOW), (WAS, Run(began, began))):
        for one, other in (("2026-01-01", "2026-01-02"), ("10:00:01", "11:15:31"), ("5", "6")):
            assert first_difference([stream(one)], [stream(other)], was, now) is not None


def test_texts_that_are_none_are_compared_by_value() -> None:
    deep: Any = 1
    for _ in range(50_000):
        deep = [deep]
    for kind in ("text/html", "text/plain", "image/png", "x"):
        outputs = [of_type(kind, {"a": 1})], [of_type(kind, {"a": 2})]
        assert first_difference(*outputs, WAS, NOW) == Difference(kind, 0, 0, "1", "2", 0)
        first_difference([of_type(kind, deep)], [of_type(kind, "text")], WAS, NOW)
    error = {"output_type": "error", "ename": deep, "evalue": deep}
    assert first_difference([error], [error], WAS, NOW) is None
    while isinstance(deep, list):
        deep = deep[0]
