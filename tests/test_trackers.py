"""Experiment trackers: what they are told, that errors cost no row, and MLflow's own store."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pandas as pd
import pytest

from qscale import table
from qscale.cli import main
from qscale.errors import QscaleError
from qscale.laws import get
from qscale.trackers import JsonLines, MLflow, Record, of_fit, of_row, open_tracker
from tests.simulations import simulate

if TYPE_CHECKING:
    from pathlib import Path

MISSING = "needs {}. Run: pip install 'qscale[tracking]'"


def arguments(folder: Path, text: Path, out: Path, **changes: str) -> list[str]:
    """Measure two settings of a tiny model, with no feature but the weights'."""
    options = {"features": "weights", "bits": "3,8", "group_size": "row", "max_windows": "8"}
    flags = [
        part
        for name, value in {**options, **changes}.items()
        for part in (f"--{name.replace('_', '-')}", value)
    ]
    return ["measure", str(folder), "--text", str(text), "-o", str(out), *flags]


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def fitted():
    return get("ouyang").fit(simulate(), interval="sandwich", name="rows.csv")


@pytest.fixture
def rows_csv(tmp_path):
    table.write(simulate(), tmp_path / "rows.csv")
    return tmp_path / "rows.csv"


def test_each_row_is_logged_as_it_stands_in_the_table(trained_llama, text_file, tmp_path):
    out, log = tmp_path / "rows.csv", tmp_path / "log.jsonl"
    main(arguments(trained_llama, text_file, out, track=str(log)))
    measured, logged = table.read(out), lines(log)
    assert len(logged) == len(measured) == 2
    for (_, row), record in zip(measured.iterrows(), logged, strict=True):
        known = row.dropna().to_dict()
        assert record["params"].keys().isdisjoint(record["metrics"])
        assert {**record["params"], **record["metrics"]} == known
        results = {"delta_loss", "delta_loss_se", "loss_q", "loss_fp", "kl", "sqnr_db"}
        assert results | {"weight_kurtosis"} <= record["metrics"].keys()
        identity = {"checkpoint", "protocol", "spec", "bits", "group_size", "tokens", "lr"}
        assert identity & known.keys() <= record["params"].keys()


def test_a_row_is_logged_once_though_it_was_measured_before(trained_llama, text_file, tmp_path):
    out, log = tmp_path / "rows.csv", tmp_path / "log.jsonl"
    main(arguments(trained_llama, text_file, out))
    for _ in range(2):  # nothing is measured again, and only the first call adds lines
        main(arguments(trained_llama, text_file, out, track=str(log)))
    assert [record["params"]["spec"] for record in lines(log)] == table.read(out)["spec"].tolist()
    main(arguments(trained_llama, text_file, out, track=str(log), features="hidden"))
    assert len(lines(log)) == 4  # rows with a further feature are other records
    assert "hidden_kept" in lines(log)[-1]["metrics"]


def test_a_tracker_that_fails_costs_no_row(trained_llama, text_file, tmp_path, capsys, monkeypatch):
    out, log = tmp_path / "rows.csv", tmp_path / "log.jsonl"
    real, calls = JsonLines.log, []

    def failing(self: JsonLines, record: Record) -> None:
        calls.append(record.name)
        if len(calls) == 2:
            raise ConnectionError("the server went away\nwith a second line")
        real(self, record)

    monkeypatch.setattr(JsonLines, "log", failing)
    options = {"bits": "3,4,8", "track": str(log)}
    main(arguments(trained_llama, text_file, out, **options))
    written = " ".join(capsys.readouterr().err.split())
    assert len(table.read(out)) == 3
    assert len(lines(log)) == 1
    assert len(calls) == 2  # a dead server is not asked again for each row
    assert written.count("tracking to") == 1
    assert "the server went away. The work goes on" in written
    assert "Run the same command again" in written
    monkeypatch.undo()
    main(arguments(trained_llama, text_file, out, **options))
    assert [r["params"]["bits"] for r in lines(log)] == [3, 4, 8]


def test_a_fit_is_logged_with_its_estimates_and_scores(rows_csv, tmp_path):
    log, saved = tmp_path / "fits.jsonl", tmp_path / "fit.json"
    flags = ["--where", "bits > 2", "-o", str(saved), "--track", str(log)]
    main(["fit", str(rows_csv), "--law", "ouyang", *flags])
    (record,) = lines(log)
    kept = json.loads(saved.read_text())
    assert record["params"]["law"] == "ouyang"
    assert record["params"]["where"] == "bits > 2"
    assert record["params"]["sha256"] == kept["data"]["sha256"]
    for name, numbers in kept["intervals_90"].items():
        for column, value in numbers.items():
            assert record["metrics"][f"{column}/{name}"] == pytest.approx(value, abs=1e-9)
    assert record["metrics"]["objective"] == kept["search"]["objective"]
    assert record["metrics"]["rows"] == kept["data"]["rows"]


def test_a_fit_is_printed_and_kept_though_its_tracker_fails(
    rows_csv, tmp_path, capsys, monkeypatch
):
    def full(*_: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(JsonLines, "log", full)
    track = ["--track", str(tmp_path / "log.jsonl")]
    main(["fit", str(rows_csv), "--law", "ouyang", "-o", str(tmp_path / "fit.json"), *track])
    captured = capsys.readouterr()
    assert "disk full" in captured.err
    assert "beta" in captured.out
    assert (tmp_path / "fit.json").exists()


def test_nulls_and_what_is_not_finite_are_left_out(fitted):
    record = of_row({"spec": "rtn int4", "bits": 4, "kl": float("nan"), "loss_q": None, "lr": 0})
    assert record.params == {"spec": "rtn int4", "bits": 4.0, "lr": 0.0}
    assert record.metrics == {}
    held = get("ouyang").fit(simulate(), fixed={"beta": 0.3}, interval="sandwich")
    metrics = of_fit(held).metrics
    assert metrics["estimate/beta"] == pytest.approx(0.3)
    assert "low/beta" not in metrics
    assert "low/beta" in of_fit(fitted).metrics


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("wandb", "--track must be mlflow, mlflow:URI"),
        ("rows.csv", "Got 'rows.csv' instead"),
        ("other.jsonl", "line 2 is not a record of qscale"),
    ],
)
def test_a_wrong_place_is_refused_before_any_work(
    trained_llama, text_file, tmp_path, capsys, monkeypatch, where, message
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other.jsonl").write_text('{"name": "a", "params": {}, "metrics": {}}\n[1]\n')
    with pytest.raises(SystemExit) as stopped:
        main(arguments(trained_llama, text_file, tmp_path / "rows.csv", track=where))
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "rows.csv").exists()


def test_without_the_library_nothing_is_measured(
    trained_llama, text_file, tmp_path, capsys, monkeypatch
):
    monkeypatch.setitem(sys.modules, "mlflow", None)
    out = tmp_path / "rows.csv"
    with pytest.raises(SystemExit):
        main(arguments(trained_llama, text_file, out, track="mlflow"))
    assert MISSING.format("mlflow") in capsys.readouterr().err
    assert not out.exists()


def test_nothing_loads_a_tracker_unasked():
    code = (
        "import sys, qscale.cli.measure, qscale.cli.fit, qscale.measure.run, qscale.trackers\n"
        "assert 'mlflow' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# -------------------------------------------------------------------------------------- MLflow
@pytest.fixture
def mlflow(tmp_path, monkeypatch):
    """MLflow's client, and the URI of a store of its own."""
    found = pytest.importorskip("mlflow", reason=MISSING.format("MLflow"))
    pytest.importorskip("sqlalchemy", reason=MISSING.format("MLflow"))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME", raising=False)
    monkeypatch.chdir(tmp_path)
    return found, f"sqlite:///{tmp_path}/mlflow.db"


def runs(mlflow: Any, uri: str, experiment: str = "qscale") -> list[Any]:
    """Runs of an experiment, the oldest first."""
    client = mlflow.MlflowClient(tracking_uri=uri)
    found = client.get_experiment_by_name(experiment).experiment_id
    return client.search_runs([found], order_by=["attributes.start_time ASC"])


@pytest.mark.filterwarnings("default")  # MLflow's own
def test_mlflow_holds_one_run_a_row(trained_llama, text_file, tmp_path, mlflow):
    library, uri = mlflow
    out = tmp_path / "rows.csv"
    for _ in range(2):
        main(arguments(trained_llama, text_file, out, track=f"mlflow:{uri}"))
    measured = table.read(out)
    found = {run.data.params["spec"]: run for run in runs(library, uri)}
    assert len(runs(library, uri)) == len(measured)
    for _, row in measured.iterrows():
        run, record = found[row["spec"]], of_row(row.to_dict())
        assert run.info.status == "FINISHED"
        assert run.data.metrics == record.metrics
        assert run.data.metrics["delta_loss"] == row["delta_loss"]
        assert run.data.params == {name: str(value) for name, value in record.params.items()}


@pytest.mark.filterwarnings("default")
def test_mlflow_takes_its_store_and_experiment_from_the_environment(rows_csv, mlflow, monkeypatch):
    library, uri = mlflow
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "laws")
    for law in ("ouyang", "kumar"):
        main(["fit", str(rows_csv), "--law", law, "--track", "mlflow"])
    assert {run.data.params["law"] for run in runs(library, uri, "laws")} == {"ouyang", "kumar"}


@pytest.mark.filterwarnings("default")
def test_mlflow_takes_any_name_and_many_of_them(mlflow):
    library, uri = mlflow
    frame = simulate(runs=24)
    run = pd.factorize(frame["run"])[0]
    frame["source"] = [f"paper: {i % 3} [a], table {i % 3}" for i in run]
    record = of_fit(get("ouyang").fit(frame, offset=["source"], interval="sandwich"))
    many = {f"m{i}": float(i) for i in range(250)}
    tracker = MLflow(uri)
    tracker.log(Record("many", record.params, {**record.metrics, **many}))
    (run,) = runs(library, uri)
    assert len(run.data.metrics) == len(record.metrics) + 250
    assert run.data.metrics["m249"] == 249.0


@pytest.mark.filterwarnings("default")
def test_an_mlflow_store_that_breaks_costs_nothing(tmp_path, mlflow):
    _, uri = mlflow
    said: list[str] = []
    tracker = open_tracker(f"mlflow:{uri}", said.append)
    (tmp_path / "mlflow.db").write_bytes(b"not a database any more " * 500)
    for bits in (3, 4):
        tracker.log(of_row({"checkpoint": "c", "spec": f"rtn int{bits}", "delta_loss": 0.1}))
    assert len(said) == 1
    assert "rtn int3" in said[0]
    with pytest.raises(QscaleError, match="cannot be opened as an MLflow store"):
        MLflow(uri)


@pytest.mark.filterwarnings("default")
def test_a_server_that_is_down_is_given_up_and_no_setting_stays(mlflow):
    with pytest.raises(QscaleError, match="127.0.0.1:9 cannot be opened as an MLflow store"):
        MLflow("http://127.0.0.1:9")
    assert "MLFLOW_HTTP_REQUEST_MAX_RETRIES" not in os.environ
