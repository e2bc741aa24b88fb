"""Formats: the words that name them, what they store, and what is refused."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qscale.columns import COLUMNS
from qscale.errors import QscaleError
from qscale.quantize import format as formats
from qscale.quantize.format import FORMATS, RULE_WORDS, Format
from qscale.quantize.setting import LIBRARIES, Setting


def possible(*arguments) -> Format | None:
    try:
        return Format(*arguments)
    except QscaleError:
        return None


EVERY = [
    fmt
    for fmt in itertools.starmap(
        possible,
        itertools.product(
            FORMATS,
            range(10),
            (None, 1, 3, 16, 32, 64, 128),
            ("", *RULE_WORDS.values(), formats.ABSMAX_TOP, formats.ABSMAX_E4M3),
            (False, True),
            (False, True),
        ),
    )
    if fmt is not None
]
OPTIONS = {  # number of formats: bits x rules (one of them named or not) x groups x clipped
    "int": 7 * 5 * 8 * 2,  # six sizes, row and tensor
    "mxint": 7 * 2 * 6 * 2,
    "mxfp4": 3 * 6 * 2,
    "mxfp8": 3 * 6 * 2,
    "nvfp4": 2 * 1 * 2,
    "fp8_e4m3": 2 * 8 * 2,
    "nf4": 2 * 6 * 2,
    "fp4": 2 * 6 * 2,
}


def test_every_possible_format_is_read_back_from_its_words():
    assert {name: sum(f.fmt == name for f in EVERY) for name in FORMATS} == OPTIONS
    words = {}
    for fmt in EVERY:
        assert Format.parse(str(fmt)) == fmt
        assert hash(Format.parse(str(fmt))) == hash(fmt)
        words.setdefault(str(fmt), fmt)
        assert words[str(fmt)] == fmt  # no two formats share their words
    assert len(words) == len(set(EVERY))


@given(fmt=st.sampled_from(EVERY), data=st.data())
def test_words_may_come_in_any_order_and_defaults_be_said(fmt, data):
    head, *rest = str(fmt).split()
    full = {
        "tensor" if fmt.per_tensor else f"g{fmt.group_size}" if fmt.group_size else "row",
        *(word for word, rule in RULE_WORDS.items() if rule == fmt.scale_rule),
        *(["mse"] if fmt.clipped else []),
    }
    assert set(rest) <= full
    assert Format.parse(" ".join([head, *data.draw(st.permutations(sorted(full)))])) == fmt


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("int4", ("int", 4, None, formats.ABSMAX_RESTRICTED)),
        ("int8 tensor full", ("int", 8, None, formats.ABSMAX_FULL, True)),
        ("int3 g128 asym mse", ("int", 3, 128, formats.MINMAX, False, True)),
        ("int2 g7 signed", ("int", 2, 7, formats.ABSMAX_SIGNED)),
        ("mxint5", ("mxint", 5, 32, formats.POWER_FLOOR)),
        ("mxfp4 even", ("mxfp4", 4, 32, formats.POWER_EVEN)),
        ("mxfp8 g16", ("mxfp8", 8, 16, formats.POWER_FLOOR)),
        ("nvfp4", ("nvfp4", 4, 16, formats.ABSMAX_E4M3)),
        ("fp8 row", ("fp8_e4m3", 8, None, formats.ABSMAX_TOP)),
        ("fp8_e4m3 tensor", ("fp8_e4m3", 8, None, formats.ABSMAX_TOP, True)),
        ("nf4", ("nf4", 4, 64, formats.ABSMAX_TOP)),
    ],
)
def test_words_by_hand(text, fields):
    assert Format.parse(text) == Format(*fields)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "A format must be int or mxint with 2 to 8 bits, or one of mxfp4, .* Got '' instead"),
        ("int", "A format must be .* Got 'int' instead. Did you mean 'int4'"),
        ("mxfp6", "A format must be .* Got 'mxfp6' instead. Did you mean 'mxfp8'"),
        ("int9", "bits must be an integer from 2 to 8. Got 9 instead"),
        ("int0", "bits must be an integer from 2 to 8. Got 0 instead"),
        ("mxint1", "bits must be an integer from 2 to 8. Got 1 instead"),
        ("int4 g0", "group_size of int must be at least 1, or row or tensor. Got 0 instead"),
        ("mxfp4 row", "group_size of mxfp4 must be at least 1. Got row instead"),
        ("nf4 tensor", "group_size of nf4 must be at least 1. Got tensor instead"),
        ("nvfp4 g32", "group_size of nvfp4 must be 16. Got 32 instead"),
        ("nvfp4 row", "group_size of nvfp4 must be 16. Got row instead"),
        ("int4 asmy", "After a format may come g and a group size, row, .*'asmy'.*mean 'asym'"),
        ("int4 128", "After a format may come g and a group size.* Got '128' instead"),
        ("int4 even", r"scale_rule of int must be .*\(restricted\) or .* Got 'even' instead"),
        ("mxint4 asym", r"scale_rule of mxint must be 2\^floor.* Got 'asym' instead"),
        ("nvfp4 full", "scale_rule of nvfp4 must be absmax/largest in e4m3. Got 'full' instead"),
        ("int4 row g4", "'int4 row g4': g4 repeats or contradicts a word before it"),
        ("int4 tensor row", "row repeats or contradicts"),
        ("int4 full full", "full repeats or contradicts"),
        ("int4 mse asym mse", "mse repeats or contradicts"),
    ],
)
def test_words_that_are_refused(text, message):
    with pytest.raises(QscaleError, match=message):
        Format.parse(text)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nf5", 4), "fmt must be one of int, mxint.* Got 'nf5' instead"),
        (("int", 3.5), r"bits must be an integer from 2 to 8. Got 3\.5 instead"),
        (("int", 4.0), r"bits must be an integer from 2 to 8. Got 4\.0 instead"),
        (("mxfp4", 8, 32), "bits must be 4. Got 8 instead"),
        (("int", 4, 2.5), r"group_size of int must be at least 1.* Got 2\.5 instead"),
        (("int", 4, -1), "group_size of int must be at least 1.* Got -1 instead"),
        (("int", 4, None, "best"), "scale_rule of int must be .* Got 'best' instead"),
        (("int", 4, 8, "", True), "group_size must be left out where one scale serves the matrix"),
    ],
)
def test_impossible_formats(arguments, message):
    with pytest.raises(QscaleError, match=message):
        Format(*arguments)


@pytest.mark.parametrize(
    ("text", "bits"),
    [  # of a matrix of 5 x 100: 500 elements
        ("int4", 500 * 4 + 5 * 16),
        ("int4 tensor", 500 * 4 + 16),
        ("int4 tensor asym", 500 * 4 + 16 + 4),
        ("int3 g64", 500 * 3 + 5 * 2 * 16),  # 100 = 64 + 36
        ("int3 g64 full", 500 * 3 + 5 * 2 * 16),
        ("int3 g64 signed mse", 500 * 3 + 5 * 2 * 16),
        ("int3 g64 asym", 500 * 3 + 5 * 2 * (16 + 3)),
        ("int8 g640", 500 * 8 + 5 * 16),
        ("mxint2", 500 * 2 + 5 * 4 * 8),  # 100 = 3 * 32 + 4
        ("mxint7 g128", 500 * 7 + 5 * 8),
        ("mxfp4", 500 * 4 + 5 * 4 * 8),
        ("mxfp4 even g16", 500 * 4 + 5 * 7 * 8),
        ("mxfp8", 500 * 8 + 5 * 4 * 8),
        ("nvfp4", 500 * 4 + 5 * 7 * 8 + 32),  # 100 = 6 * 16 + 4
        ("fp8", 500 * 8 + 5 * 16),
        ("fp8 tensor", 500 * 8 + 16),
        ("nf4", 500 * 4 + 5 * 2 * 32),
        ("fp4 g100", 500 * 4 + 5 * 32),
    ],
)
def test_stored_bits_by_hand(text, bits):
    fmt = Format.parse(text)
    assert fmt.stored_bits(5, 100) == bits
    assert fmt.bits_per_weight([(5, 100)]) == bits / 500


def test_bits_per_weight_of_several_matrices_weighs_them_by_size():
    assert Format("int", 4, 128).bits_per_weight([(7, 256)]) == 4 + 16 / 128
    mixed = Format("int", 8, 10).bits_per_weight([(1, 10), (3, 30)])
    assert mixed == pytest.approx((10 * 8 + 16 + 90 * 8 + 9 * 16) / 100)
    # One float32 for each matrix
    assert Format("nvfp4", 4, 16).bits_per_weight([(2, 16), (1, 32)]) == (64 * 4 + 4 * 8 + 64) / 64


def test_columns_are_those_of_the_table_and_tell_formats_apart():
    seen = {}
    for fmt in EVERY:
        columns = fmt.columns()
        for name, value in columns.items():
            column = COLUMNS[name]
            if value is None:
                continue
            assert isinstance(value, {"number": float, "text": str, "flag": bool}[column.kind])
            assert not column.allowed or value in column.allowed, (name, value)
            if column.kind == "number":
                assert (column.low or -math.inf) <= value <= (column.high or math.inf)
        assert seen.setdefault(tuple(columns.values()), fmt) == fmt
    assert Format.parse("mxfp8").columns() == {
        "fmt": "mxfp8",
        "bits": 8.0,
        "exponent_bits": 4.0,
        "mantissa_bits": 3.0,
        "group_size": 32.0,
        "symmetric": True,
        "scale_rule": "2^floor(log2 absmax)",
    }
    assert Format.parse("int3 tensor asym mse").columns() == {
        "fmt": "int",
        "bits": 3.0,
        "exponent_bits": None,
        "mantissa_bits": None,
        "group_size": None,
        "symmetric": False,
        "scale_rule": "(max-min)/(2^b-1), per tensor, mse",
    }


def test_rows_of_some_formats_do_not_depend_on_the_other_rows():
    assert {text: Format.parse(text).rowwise for text in ("int4", "int4 tensor", "nvfp4")} == {
        "int4": True,
        "int4 tensor": False,
        "nvfp4": False,
    }


@given(
    weights=st.sampled_from(EVERY),
    acts=st.none() | st.sampled_from(EVERY),
    act_order=st.booleans(),
    whose=st.sampled_from([(name, m) for name, methods in LIBRARIES.items() for m in methods]),
)
def test_every_possible_setting_is_read_back_from_its_spec(weights, acts, act_order, whose):
    library, method = whose
    try:
        setting = Setting(weights, method, acts, act_order, library)
    except QscaleError:
        return
    assert Setting.parse(str(setting)) == setting


def test_a_real_zero_point_takes_sixteen_bits():
    shapes = {"a": (2, 64), "b": (3, 32)}
    hqq = Setting.parse("hqq int4 g32 asym library=hqq")
    assert hqq.bits_per_weight(shapes) == 4 + (16 + 16) / 32
    own = Setting.parse("rtn int4 g32 asym")
    assert own.bits_per_weight(shapes) == 4 + (16 + 4) / 32
