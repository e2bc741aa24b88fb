"""The measurement table: reading, checking, renaming and atomic writing."""

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pandas as pd
import pandera.errors
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qscale import table
from qscale.columns import COLUMNS
from qscale.errors import TableError
from qscale.laws import LAWS


@pytest.mark.parametrize("suffix", [".csv", ".csv.gz", ".csv.xz", ".parquet"])
def test_a_written_table_reads_back_exactly(tmp_path, suffix) -> None:
    frame = pd.DataFrame(
        {
            "n_params": [1e9, np.pi * 1e9],
            "method": ["rtn", None],
            "symmetric": pd.array([True, None], dtype="boolean"),
            "delta_loss": [0.1 + 0.2, -1e-17],
            "mine": [1, 2],
        }
    )
    path = tmp_path / f"t{suffix}"
    table.write(frame, path)
    back = table.read(path)
    pd.testing.assert_frame_equal(back, table.check(frame))
    assert list(tmp_path.iterdir()) == [path]


@given(st.lists(st.floats(1e-8, 1e4), min_size=1, max_size=20))
@settings(max_examples=30, deadline=None)
def test_csv_keeps_every_bit_of_a_number(tmp_path_factory, values) -> None:
    path = tmp_path_factory.mktemp("csv") / "t.csv"
    table.write(pd.DataFrame({"run": "a", "delta_loss": values}), path)
    assert table.read(path)["delta_loss"].tolist() == values


def test_a_mapped_column_takes_its_new_name(tmp_path) -> None:
    path = tmp_path / "t.csv"
    pd.DataFrame({"D": [1e12], "P": [4]}).to_csv(path, index=False)
    assert table.read(path, {"tokens": "D", "bits": "P"})["tokens"].tolist() == [1e12]


def test_text_that_could_be_a_number_stays_text(tmp_path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(" checkpoint,R,tokens\n0050950e7685,007,1e9\n123456789012,,2e9\n")
    back = table.read(path, {"run": "R"})
    assert back["checkpoint"].tolist() == ["0050950e7685", "123456789012"]
    assert back["run"].tolist() == ["007", None]
    assert back["tokens"].tolist() == [1e9, 2e9]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"n_params": [1e9, 125.0]}, r"row 2, column 'n_params'.*write 125e6 for 125 million"),
        ({"bits": [4, "four"]}, r"row 2, column 'bits' must be a number \(bits\). Got 'four'"),
        ({"symmetric": [True, "maybe"]}, r"column 'symmetric' must be true or false. Got 'maybe'"),
        ({"status": ["ok", "fine"]}, r"row 2, column 'status' must be one of ok, nonfinite"),
        ({"loss_fp": [2.0, np.inf]}, r"row 2, column 'loss_fp' is infinite"),
        ({"loss_fp": [2.0, 5e3]}, r"between 0 and 50 nats/token. Got 5000.0.*logarithm"),
        ({"decay_fraction": [0.5, 1.5]}, r"between 0 and 1. Got 1.5"),
        ({"decay_share": [1.5]}, r"between 0 and 1. Got 1.5"),
        ({"quantized_share": [50]}, r"between 0 and 1. Got 50"),
        ({"mantissa_bits": [-1]}, r"between 0 and 52 bits. Got -1"),
        ({"bits_activation": [0]}, r"between 0.5 and 32 bits. Got 0"),
        ({"neg_log_accuracy": [-0.1]}, r"at least 0. Got -0.1.*below chance"),
        ({"delta_loss_se": [0.1, -0.1]}, r"at least 0 nats/token. Got -0.1"),
    ],
)
def test_an_implausible_value_is_named_with_its_row(columns, message) -> None:
    with pytest.raises(TableError, match=f"mine.csv: .*{message}"):
        table.check(pd.DataFrame(columns), "mine.csv")


EDGES = [None, -1e-12, 0.0, 0.5, 1.0, 1 + 1e-12, 32.0, 32.5, 50.0, 1e3, 1e14, 1e17, -60.0]


@given(
    st.dictionaries(
        st.sampled_from([c.name for c in COLUMNS.values() if c.kind == "number"]),
        st.tuples(st.sampled_from(EDGES), st.sampled_from(EDGES)),
        min_size=1,
        max_size=8,
    ),
    st.lists(st.sampled_from([None, "ok", "failed", "fine"]), min_size=2, max_size=2),
)
@settings(max_examples=40, deadline=None)
def test_check_refuses_what_the_schema_refuses(columns, statuses) -> None:
    frame = pd.DataFrame(columns, dtype="float64").assign(status=statuses)
    try:
        table.schema().validate(frame)
    except pandera.errors.SchemaError:
        with pytest.raises(TableError, match=r"row [12], column"):
            table.check(frame)
    else:
        assert len(table.check(frame)) == 2


def test_nulls_and_unknown_columns_pass() -> None:
    frame = table.check(pd.DataFrame({"bits": [4, None], "note": ["a", "b"]}))
    assert frame["bits"].isna().tolist() == [False, True]
    assert frame["note"].tolist() == ["a", "b"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("t.txt", b"a,b\n1,2\n", "must end in one of"),
        ("t.csv", b"", "cannot be read as a table"),
        ("t.csv", b"Call me Ishmael. Some years ago\nnever mind how long\n", "only one column"),
        ("t.csv", b"bits,run\n", "the table has no rows"),
        ("t.csv", b"\xff\xfe\x00binary", "cannot be read as a table"),
        ("t.parquet", b"bits,run\n4,a\n", "cannot be read as a table"),
        ("t.csv.gz", b"bits,run\n4,a\n", "cannot be read as a table"),
    ],
)
def test_a_file_that_is_no_table_is_named(tmp_path, name, content, message) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(TableError, match=message) as caught:
        table.read(path)
    assert str(path) in str(caught.value)


def test_a_missing_file_is_named(tmp_path) -> None:
    with pytest.raises(TableError, match="no such file"):
        table.read(tmp_path / "absent.csv")


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({"tokens": "X"}, "no column 'X' to read 'tokens' from"),
        ({"bits": "D"}, "a column 'bits' too"),
    ],
)
def test_a_mapping_that_cannot_be_done_is_named(mapping, message) -> None:
    with pytest.raises(TableError, match=message):
        table.rename(pd.DataFrame({"D": [1.0], "bits": [4]}), mapping, "t")


def test_a_duplicated_column_is_an_error() -> None:
    frame = pd.DataFrame([[1, 2]], columns=["bits", "bits"])
    with pytest.raises(TableError, match="column 'bits' appears twice"):
        table.check(frame)


def test_required_columns_must_exist_and_hold_something() -> None:
    frame = pd.DataFrame({"bits": [np.nan]})
    with pytest.raises(TableError, match="no column 'tokens'.*--map tokens=THEIR_NAME"):
        table.require(frame, ["tokens"], "t")
    with pytest.raises(TableError, match="'bits'.*is empty in every row"):
        table.require(frame, ["bits"], "t")


@pytest.mark.slow
def test_a_writer_killed_at_any_moment_leaves_a_whole_table(tmp_path) -> None:
    path = tmp_path / "t.csv"
    code = (
        "import pandas as pd; from qscale import table\n"
        "for i in range(10**6):\n"
        f"    table.write(pd.DataFrame({{'run': 'r', 'step': range(i % 7 * 300 + 1)}}), {str(path)!r})"
    )
    for attempt in range(5):
        process = subprocess.Popen([sys.executable, "-c", code])
        while not path.exists():
            time.sleep(0.05)
        time.sleep(0.1 + 0.137 * attempt)
        process.send_signal(signal.SIGKILL)
        process.wait()
        rows = len(table.read(path))
        assert (rows - 1) % 300 == 0
    assert os.access(path, os.R_OK)


def test_every_column_states_a_meaning_and_a_sane_range() -> None:
    for name, column in COLUMNS.items():
        assert column.name == name
        assert column.meaning
        if column.low is not None and column.high is not None:
            assert column.low < column.high


def test_every_column_of_a_named_law_is_in_the_table() -> None:
    for law in LAWS.values():
        assert {*law.columns, law.target} <= set(COLUMNS), law.name
