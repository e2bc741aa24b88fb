"""Splits hold out what they say, and back-tests never train on what comes later."""

import numpy as np
import pandas as pd
import pytest

from qscale.errors import FitError
from qscale.validate import expanding, largest, leave_one_out, lowest, parse


@pytest.fixture
def table():
    tokens = [1.0, 2.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, np.nan]
    return pd.DataFrame(
        {
            "tokens": tokens,
            "bits": [2.0, 3.0, 4.0, 5.0, 2.0, 3.0, 4.0, 5.0, 2.0, 8.0],
            "family": ["A", "A", "B", "B", "B", "C", "C", "C", None, "C"],
        }
    )


def test_expanding_windows_train_on_all_before_and_nothing_after(table) -> None:
    splits = expanding(table, "tokens", windows=3)
    assert [s.name for s in splits] == ["tokens 3 to 4", "tokens 5 to 6", "tokens 7 to 8"]
    tokens = table["tokens"]
    for split in splits:
        assert tokens[split.training].max() < tokens[split.test].min()
        held_or_earlier = tokens <= tokens[split.test].max()
        assert ((split.training | split.test) == held_or_earlier).all()
    tested = np.sum([s.test for s in splits], axis=0)
    assert tested.tolist() == (tokens >= 3).astype(int).tolist()


def test_few_values_give_as_many_windows_as_they_allow() -> None:
    splits = expanding(pd.DataFrame({"tokens": [1, 2, 3, 3]}), "tokens", windows=10)
    assert [(s.training.sum(), s.test.sum()) for s in splits] == [(1, 1), (2, 2)]


def test_unknown_nullable_numbers_take_no_part() -> None:
    frame = pd.DataFrame({"tokens": pd.array([1, 2, None, 3], dtype="Int64")})
    splits = expanding(frame, "tokens", windows=2)
    assert not any((s.test | s.training)[2] for s in splits)


def test_lowest_and_largest_are_mirror_images(table) -> None:
    low, high = lowest(table, "bits", share=0.4), largest(table, "bits", share=0.4)
    assert sorted(set(table["bits"][low.test])) == [2.0, 3.0]
    assert sorted(set(table["bits"][high.test])) == [5.0, 8.0]


def test_words_ask_for_the_splits_they_name(table) -> None:
    def names(text: str) -> list[str]:
        return [split.name for split in parse(text, table)]

    assert names("family") == [s.name for s in leave_one_out(table, "family")]
    assert names("largest:tokens") == names("latest:tokens") == [largest(table, "tokens").name]
    assert names("lowest: bits") == [lowest(table, "bits").name]
    assert names("expanding:tokens") == [s.name for s in expanding(table, "tokens")]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("famly", "no column 'famly'.*Columns are: tokens, bits, family"),
        ("biggest:tokens", "unknown kind 'biggest'"),
        ("largest:family", "holds text"),
    ],
)
def test_a_word_that_cannot_be_split_says_why(table, text, message) -> None:
    with pytest.raises(FitError, match=message):
        parse(text, table)
