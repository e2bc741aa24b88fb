"""Numbers as text, and frames as HTML and Markdown."""

import math

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qscale.report.tables import count, escape_markdown, number, to_html, to_markdown


@given(st.floats(allow_nan=False, allow_infinity=False, min_value=-1e300, max_value=1e300))
def test_a_number_is_written_to_four_digits(value: float) -> None:
    read = float(number(value).replace(",", ""))
    assert math.isclose(read, value, rel_tol=5.1e-4, abs_tol=1e-310)


@given(st.floats(min_value=1, max_value=9e14))
def test_a_count_is_written_to_three_digits(value: float) -> None:
    text = count(value)
    sizes = {"k": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
    read = float(text[:-1]) * sizes[text[-1]] if text[-1] in sizes else float(text)
    assert math.isclose(read, value, rel_tol=5.1e-3)
    assert "e" not in text


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "–"), (pd.NA, "–"), (3, "3"), (1234567, "1,234,567"), (True, "True"), (0.0, "0")],
)
def test_other_cells(value: object, text: str) -> None:
    assert number(value) == text


def test_tables_keep_whole_numbers_whole_and_escape_text() -> None:
    frame = pd.DataFrame({"rows": [5, 12345], "<b>": ["a|b", "<i>"], "x": [0.5, float("nan")]})
    frame.index = pd.Index(["p", "q&r"], name="name")
    html = str(to_html(frame))
    assert "<td>&lt;i&gt;</td>" in html
    assert '<th scope="col">&lt;b&gt;</th>' in html
    assert '<td class="n">12,345</td>' in html
    assert '<th scope="row">q&amp;r</th>' in html
    lines = to_markdown(frame).splitlines()
    assert lines[0] == "| name | rows | &lt;b> | x |"
    assert lines[1] == "| :--- | ---: | :--- | ---: |"
    assert lines[2] == "| p | 5 | a\\|b | 0.5 |"
    assert lines[3] == "| q&amp;r | 12,345 | &lt;i> | – |"


def test_markdown_text_stays_on_its_line() -> None:
    assert escape_markdown("a\n# b") == "a # b"
