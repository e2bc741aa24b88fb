"""Mixed precision: which format a matrix gets, what is stored, and what a file says."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qscale.errors import QscaleError
from qscale.measure.subject import open_subject
from qscale.measure.weights import fake_quantized, ragged, squared_errors
from qscale.quantize.format import Format
from qscale.quantize.mix import Mix, parse_setting
from qscale.quantize.rtn import dequantized, rtn
from qscale.quantize.setting import Setting

INT8, INT3 = Format("int", 8, 128), Format.parse("int3 g32 asym")
MIX = Mix((("*.0.*", INT8), ("*.down.*", None), ("*", INT3)))
SHAPES = {"layers.0.down.weight": (4, 256), "layers.1.down.weight": (2, 64), "b.weight": (8, 64)}


def test_the_first_pattern_that_matches_counts():
    assert [MIX.format_of(name) for name in SHAPES] == [INT8, None, INT3]
    assert Mix(MIX.formats[::-1]).format_of("layers.0.down.weight") == INT3
    assert Mix((("layers.[12].*", INT8),)).format_of("layers.2.x") == INT8
    # Case counts on every system.
    with pytest.raises(QscaleError, match="no pattern matches layers.2.x"):
        Mix((("LAYERS.*", INT8),)).format_of("layers.2.x")


def test_bits_are_means_over_weights():
    columns = MIX.columns(SHAPES)
    assert columns["bits"] == (1024 * 8 + 128 * 16 + 512 * 3) / 1664
    stored = 1024 * 8 + 8 * 16 + 128 * 16 + 512 * 3 + 16 * (16 + 3)  # scales, zero points
    assert MIX.bits_per_weight(SHAPES) == stored / 1664
    assert (columns["fmt"], columns["method"]) == ("mix", "rtn")
    assert {columns[n] for n in ("group_size", "symmetric", "scale_rule", "mantissa_bits")} == {
        None
    }
    same = Mix((("*", INT3),))
    setting = Setting(INT3)
    assert same.bits_per_weight(SHAPES) == setting.bits_per_weight(SHAPES)
    assert same.columns(SHAPES).keys() == setting.columns(SHAPES).keys()
    assert setting.format_of("anything") == INT3


def test_a_spec_tells_mixes_apart():
    others = [
        MIX,
        Mix(MIX.formats[::-1]),
        Mix((*MIX.formats[:2], ("*", INT8))),
        Mix(MIX.formats, "gptq"),
        Mix(MIX.formats, "gptq", act_order=False),
        Mix(MIX.formats, activations=INT8),
        Mix(MIX.formats, library="llmcompressor"),
    ]
    specs = [str(mix) for mix in others]
    assert len(set(specs)) == len(others)
    assert specs[0] == str(Mix(MIX.formats, path="other.toml"))
    assert specs[0] == MIX.columns(SHAPES)["spec"]
    assert specs[4].endswith(" act_order=no")
    assert specs[5].endswith(" acts=int8/g128")
    assert [mix.calibrated for mix in others[2:4]] == [False, True]


formats = st.sampled_from(
    [None, *map(Format.parse, ("int3 row mse", "int4 g128 asym", "mxfp4 even", "nvfp4", "fp8"))]
)


@given(
    rules=st.dictionaries(st.text(st.characters(exclude_categories=["C"])), formats),
    activations=st.none() | st.just(Format.parse("int8 row")),
    method=st.sampled_from(["rtn", "gptq"]),
)
def test_a_file_is_read_as_it_was_written(tmp_path_factory, rules, activations, method):
    mix = Mix(tuple({**rules, '"*.\\w"': INT3}.items()), method, activations, method == "rtn")
    path = tmp_path_factory.getbasetemp() / "mix.toml"
    mix.write(path)
    again = Mix.read(path)
    assert again == mix
    assert list(again.formats) == list(mix.formats)
    assert str(again) == str(mix)
    assert parse_setting(f" {path} ") == mix


def test_a_spec_without_a_file_is_a_setting():
    spec = "gptq int4 g128 asym acts=int8/row"
    assert parse_setting(spec) == Setting.parse(spec)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("method = 'rtn'", r"mix.toml: needs a table \[formats\]"),
        ("formats = 3", r"mix.toml: needs a table \[formats\]"),
        ("[formats]\n", "mix.toml: formats must quantize something"),
        ("[formats]\n'*' = 'none'", "mix.toml: formats must quantize something"),
        ("[formats]\n'*' = 'int9'", r"mix.toml: '\*': bits.*Got 9"),
        ("[formats]\n'*' = 4", r"mix.toml: '\*' must be a format as text. Got 4"),
        ("[formats]\n'*' = 'fp4'", r"mix.toml: pattern '\*': fp4.*library=bitsandbytes"),
        ("[formats\n", "mix.toml: is not TOML"),
        ("activations = 'none'\n[formats]\n'*' = 'int4 row'", "mix.toml: activations: .*'none'"),
        ("activations = 'int8 tensor'\n[formats]\n'*' = 'int4 row'", "token by token"),
        ("method = 'gpqt'\n[formats]\n'*' = 'int4 row'", "method must be one of.*gptq"),
        ("method = 4\n[formats]\n'*' = 'int4 row'", "method must be a text. Got 4"),
        ("library = ['x']\n[formats]\n'*' = 'int4 row'", r"library must be a text. Got \['x'\]"),
        ("act_order = 'no'\n[formats]\n'*' = 'int4 row'", "act_order must be true or false"),
        ("act-order = true\n[formats]\n'*' = 'int4 row'", "Got 'act-order'.*act_order"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path, text, message):
    (tmp_path / "mix.toml").write_text(text)
    with pytest.raises(QscaleError, match=message):
        parse_setting(str(tmp_path / "mix.toml"))


def test_a_pattern_given_twice_is_refused():
    with pytest.raises(QscaleError, match=r"mix: pattern '\*' is given twice"):
        Mix((("*", INT3), ("*", INT8)))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(QscaleError, match="none.toml: cannot be read.*No such file"):
        parse_setting(str(tmp_path / "none.toml"))


def test_patterns_and_matrices_must_meet(tmp_path):
    Mix(MIX.formats[:1]).write(tmp_path / "mix.toml")
    with pytest.raises(QscaleError, match="mix.toml: no pattern matches layers.1.down.weight"):
        Mix.read(tmp_path / "mix.toml").bits_per_weight(SHAPES)
    for idle in ("*.norm", "*.0.down.weight"):  # matches nothing; is never the first to match
        mix = Mix((MIX.formats[0], (idle, INT8), *MIX.formats[1:]))
        with pytest.raises(QscaleError, match="is not the first to match for any matrix"):
            mix.columns(SHAPES)


def test_weights_take_each_their_format(trained, text_file):
    subject = open_subject(trained, text_file, context=32, probe_windows=4)
    names = list(subject.weights)
    mix = Mix(((names[0], None), (names[1], INT3), ("*", Format("int", 4, 8))))
    found = dequantized(subject.weights, mix)
    assert found[names[0]].data_ptr() == subject.weights[names[0]].data_ptr()
    assert torch.equal(found[names[1]], rtn(subject.weights[names[1]], INT3))
    assert torch.equal(found[names[2]], rtn(subject.weights[names[2]], Format("int", 4, 8)))
    errors = squared_errors(subject.weights, mix)
    assert errors[names[0]] == 0 < errors[names[1]]
    assert ragged(subject.weights, mix) == 1  # 16 columns in groups of 32
    before = {name: w.detach().clone() for name, w in subject.weights.items()}
    with fake_quantized(subject.weights, mix):
        assert torch.equal(subject.weights[names[0]], before[names[0]])
        assert torch.equal(subject.weights[names[1]], found[names[1]])
        assert torch.equal(subject.weights[names[2]], found[names[2]])
    assert all(torch.equal(w, before[name]) for name, w in subject.weights.items())
