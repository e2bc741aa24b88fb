"""A quantizer given as a function of a user's file: the numbers of the built-in one, and mistakes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from qscale import table
from qscale.errors import QscaleError
from qscale.measure.run import measure
from qscale.quantize.apply import apply
from qscale.quantize.mix import Mix, parse_setting
from qscale.quantize.rtn import rtn
from qscale.quantize.setting import Setting

CODE = '''"""Round as qscale does, through a file of one's own, and wrongly."""

import torch

from qscale.quantize.rtn import rtn


def own(weight, fmt):
    return rtn(weight, fmt)


def transposed(weight, fmt):
    return weight.T


def raises(weight, fmt):
    raise ValueError("not a quantizer")
'''


@pytest.fixture
def file(tmp_path, monkeypatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(CODE)
    return "mine.py"


def matrices():
    generator = torch.Generator().manual_seed(0)
    return {f"m.{i}.weight": torch.randn(6, 32, generator=generator) for i in range(2)}


def applied(spec: str):
    return apply(torch.nn.Linear(2, 2).eval(), matrices(), parse_setting(spec))


def test_its_matrices_are_those_of_the_function_and_rows_name_the_file(file) -> None:
    found = applied(f"rounding int3 g8 asym library={file}:own")
    built_in = Setting.parse("rtn int3 g8 asym").weights
    for name, weight in matrices().items():
        assert torch.equal(found.weights[name], rtn(weight, built_in))
    implementation = found.columns["implementation"]
    assert implementation.startswith("mine.py:own ")
    Path(file).write_text(CODE + "# another version\n")
    assert (
        applied(f"rounding int3 g8 library={file}:own").columns["implementation"] != implementation
    )


def test_its_spec_is_read_back_and_describes_the_format(file) -> None:
    spec = f"ternary int2 row library={file}:own"
    setting = Setting.parse(spec)
    assert str(setting) == spec
    columns = setting.columns({})
    assert (columns["method"], columns["bits"]) == ("ternary", 2.0)
    assert not setting.calibrated
    Path("mix.toml").write_text(
        f'method = "ternary"\nlibrary = "{file}:own"\n[formats]\n"*" = "int2 row"\n'
    )
    assert Mix.read("mix.toml").format_of("m.0.weight") == setting.weights


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("own int3 row library=mine.py", "or FILE.py:FUNCTION. Got 'mine.py'"),
        ("own int3 row library=absent.py:own", "absent.py: cannot be read"),
        ("gptq int3 row library=mine.py:own", "other than autoround, awq, gptq, which calibrate"),
        ("Own int3 row library=mine.py:own", "a word in small letters"),
        ("own int3 row library=mine.py:two", "no function 'two'. Functions are: own, transposed"),
        ("own int3 row library=mine.py:transposed", "wrong shape"),
        ("own int3 row library=mine.py:raises", r"\(ValueError: not a quantizer\)"),
    ],
)
def test_a_mistake_is_a_clear_error(file, spec, message) -> None:
    with pytest.raises(QscaleError, match=message):
        applied(spec)


def test_rows_of_a_checkpoint_are_those_of_the_built_in_quantizer(file) -> None:
    root = Path(__file__).parents[2] / "examples"
    specs = [f"rounding int3 g32 library={file}:own", "rtn int3 g32"]
    rows = measure(
        root / "checkpoints" / "tiny-wsd-decayed",
        root / "texts" / "austen-wilde-darwin.txt",
        "rows.csv",
        settings=[parse_setting(spec) for spec in specs],
        max_windows=4,
        features=(),
    )
    own, built_in = (rows[rows["spec"] == spec].iloc[0] for spec in specs)
    for column in ("delta_loss", "delta_loss_se", "kl", "bits_per_weight", "sqnr_db"):
        assert own[column] == pytest.approx(built_in[column], rel=1e-6)
    assert table.read("rows.csv")["method"].tolist() == ["rounding", "rtn"]
