"""Sweeps: expansion, resume after kills and damage, shared folders, engines that agree."""

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest

from qscale import table
from qscale.cli import main
from qscale.cli import sweep as command
from qscale.errors import SweepError
from qscale.sweep import plan as plans
from qscale.sweep import store

SOURCE = Path(__file__).with_name("tasks_of_tests.py")


def write_plan(folder: Path, *, count: int = 4, fixed: str = "", name: str = "plan.toml") -> Path:
    shutil.copy(SOURCE, folder / "tasks.py")
    path = folder / name
    log = f'log = "{folder / "log"}"\n'
    path.write_text(
        f'task = "tasks.py:rows"\n[fixed]\n{log}{fixed}\n[grid]\nx = {list(range(count))}\n'
    )
    return path


def code(*arguments: object) -> int:
    try:
        main(["sweep", *map(str, arguments)])
    except SystemExit as stopped:
        return int(stopped.code or 0)
    return 0


def ran(folder: Path) -> list[str]:
    return sorted((folder / "log").read_text().split())


def collected(plan: Path) -> pd.DataFrame:
    assert code("collect", plan) == 0
    return pd.read_parquet(plan.with_suffix(".sweep") / "rows.parquet")


def start(plan: Path) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "qscale", "sweep", str(plan), "--workers", "2"],
        start_new_session=True,
    )


def test_hash_knows_values_only() -> None:
    one = plans.task_hash("a.py:f", {"x": 1, "y": {"b": 2.0, "a": 1e-3}})
    assert one == plans.task_hash("a.py:f", {"y": {"a": 0.001, "b": 2}, "x": 1.0})
    others = [{"x": 2, "y": 1}, {"x": True, "y": 1}, {"x": "1", "y": 1}, {"x": 1, "y": 1}]
    assert len({plans.task_hash("a.py:f", params) for params in others}) == 4
    assert plans.task_hash("f.py:f", others[0]) != plans.task_hash("g.py:f", others[0])
    assert (
        plans.task_hash("a.py:f", {"x": 1}) == "680aea0a68a547e3"
    )  # of canonical JSON, by sha256sum


def test_arms_and_excludes_expand(tmp_path) -> None:
    path = write_plan(tmp_path)
    path.write_text("""
task = "tasks.py:rows"
[fixed]
a = 1
[grid]
lr = [1e-3, 2e-3]
size = ["s", "l"]
[[exclude]]
size = "l"
lr = [2e-3]
[[arms]]
name = "one"
[[arms]]
name = "two"
[arms.fixed]
a = 2
[arms.grid]
lr = [4e-3]
[[arms]]
name = "three"
[arms.fixed]
a = 1.0
[arms.grid]
lr = [1e-3]
""")
    read = plans.read(path)
    assert [(t.arm, t.params["a"], t.params["lr"], t.params["size"]) for t in read.tasks] == [
        ("one", 1, 1e-3, "s"), ("one", 1, 1e-3, "l"), ("one", 1, 2e-3, "s"),
        ("two", 2, 4e-3, "s"), ("two", 2, 4e-3, "l"),
    ]  # fmt: skip
    assert read.repeated == 2
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    (moved / "p.toml").write_text(path.read_text().replace("tasks.py", "../tasks.py"))
    assert [t.hash for t in plans.read(moved / "p.toml").tasks] == [t.hash for t in read.tasks]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("[grid]", "[gird]", "unknown key 'gird'.*Did you mean 'grid'"),
        ('task = "tasks.py:rows"', "", "task must be"),
        ("tasks.py:rows", "absent.py:rows", "absent.py is no file"),
        ("x = [0, 1, 2, 3]", "x = 3", r"\[grid\] x must be a list"),
        ("x = [0, 1, 2, 3]", "x = [1, 1.0]", r"\[grid\] x has 1.0 twice"),
        ("x = [0, 1, 2, 3]", "x = [nan]", r"\[grid\] x must be text, a finite number"),
        ("x = [0, 1, 2, 3]", "x = [1]\nlog = ['a']", r"log is in \[fixed\] and in \[grid\]"),
        ("[grid]", "[[exclude]]\ny = 1\n[grid]", r"\[\[exclude\]\] 1: no parameter 'y'"),
        ("[grid]", "[[exclude]]\nx = 9\n[grid]", r"\[\[exclude\]\] 1 leaves out nothing"),
        ("[grid]", "[cost]\nseconds = -1\n[grid]", r"\[cost\] seconds must be above 0"),
        ("[grid]", "[grid", "not a TOML file"),
        ('task = "tasks.py:rows"', 'task = "measure"', "measure has no parameter 'log'"),
    ],
)
def test_mistakes_name_file_and_key(tmp_path, capsys, old, new, message) -> None:
    path = write_plan(tmp_path)
    path.write_text(path.read_text().replace(old, new))
    assert code(path, "--dry-run") == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "plan.toml" in error
    assert re.search(message, error), error


def test_killed_sweep_goes_on_where_it_was(tmp_path) -> None:
    plan = write_plan(tmp_path, count=6, fixed="sleep = 0.4")
    parts = plan.with_suffix(".sweep")
    sweep = start(plan)
    deadline = time.monotonic() + 60
    while not store.done(parts) and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(sweep.pid, signal.SIGKILL)
    sweep.wait()
    kept = store.done(parts)
    assert 0 < len(kept) < 6
    assert code("status", plan) == 3
    assert code(plan) == 0
    log = ran(tmp_path)
    assert set(log) == set("012345")
    assert len(log) <= 6 + 2  # the two tasks that were running ran again, no other
    other = tmp_path / "other"
    other.mkdir()
    whole = write_plan(other, count=6, fixed="sleep = 0.4")
    whole.write_text(plan.read_text())
    assert code(whole) == 0
    pd.testing.assert_frame_equal(collected(plan), collected(whole))
    assert list((parts / store.SCRATCH).iterdir()) == []


def test_two_sweeps_share_a_folder(tmp_path) -> None:
    plan = write_plan(tmp_path, count=8, fixed="sleep = 0.2")
    sweeps = [start(plan), start(plan)]
    assert {sweep.wait(timeout=100) for sweep in sweeps} <= {0, 3}
    assert code("status", plan) == 0
    assert ran(tmp_path) == list("01234567")


def test_lost_worker_costs_one_attempt(tmp_path) -> None:
    plan = write_plan(tmp_path, fixed=f'kill_at = 1\nonce = "{tmp_path / "once"}"')
    assert code(plan) == 0
    assert ran(tmp_path) == ["0", "1", "1", "2", "3"]


def test_damaged_part_is_named_and_run_again(tmp_path, capsys) -> None:
    plan = write_plan(tmp_path)
    parts = plan.with_suffix(".sweep")
    assert code(plan) == 0
    before = collected(plan)
    key = plans.read(plan).tasks[2].hash
    path = parts / store.PARTS / key / "rows.parquet"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    capsys.readouterr()
    assert code("status", plan) == 3
    assert str(key) in capsys.readouterr().out.replace("\n", "")
    assert code("collect", plan) == 3
    assert len(pd.read_parquet(parts / "rows.parquet")) == 6
    assert code(plan) == 0
    assert ran(tmp_path) == ["0", "1", "2", "2", "3"]
    pd.testing.assert_frame_equal(collected(plan), before)


def test_full_disk_leaves_no_part(tmp_path, monkeypatch, capsys) -> None:
    plan = write_plan(tmp_path)
    right = store.write_frame

    def full(frame, path):
        if path.name == "matrices.parquet":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return right(frame, path)

    monkeypatch.setattr(store, "write_frame", full)
    assert code(plan, "--index", 0, "--retries", 0) == 1
    out = capsys.readouterr().out
    assert "No space left on device" in out
    parts = plan.with_suffix(".sweep")
    assert list((parts / store.PARTS).iterdir()) == []
    monkeypatch.undo()
    assert code(plan, "--index", 0) == 0
    assert len(store.done(parts)) == 1


def test_failures_retries_and_exit_status(tmp_path, capsys) -> None:
    plan = write_plan(tmp_path, fixed="fail_at = 2")
    assert code("status", plan) == 3
    assert code(plan, "--retries", 2) == 1
    assert ran(tmp_path) == ["0", "1", "2", "2", "2", "3"]
    assert "ValueError: this one fails" in capsys.readouterr().out
    assert code("status", plan) == 1
    (failed,) = (plan.with_suffix(".sweep") / store.FAILED).iterdir()
    attempts = json.loads(failed.read_text())["attempts"]
    assert len(attempts) == 3
    assert "Traceback" in attempts[0]["traceback"]
    assert attempts[0]["params"]["x"] == 2
    assert code(plan, "--index", 3) == 0
    assert code(plan, "--index", 4) == 2


def test_changed_plan_keeps_but_does_not_collect(tmp_path, capsys) -> None:
    plan = write_plan(tmp_path)
    assert code(plan) == 0
    plan.write_text(plan.read_text().replace("[0, 1, 2, 3]", "[2, 3, 4]"))
    capsys.readouterr()
    assert code("status", plan) == 3
    assert "2 finished tasks" in capsys.readouterr().out
    assert code(plan) == 0
    assert ran(tmp_path) == list("01234")
    assert list(collected(plan)["run"]) == ["2", "2", "3", "3", "4", "4"]
    assert code("collect", plan, "--others") == 0
    assert len(pd.read_parquet(plan.with_suffix(".sweep") / "rows.parquet")) == 10


@pytest.mark.parametrize(
    ("module", "options"),
    [
        ("submitit", ("--engine", "submitit", "--setting", "cluster=local")),
        ("distributed", ("--engine", "dask")),
    ],
)
@pytest.mark.filterwarnings("default")  # what these libraries warn of is not ours
def test_engines_agree(tmp_path, module, options) -> None:
    pytest.importorskip(module)
    plan = write_plan(tmp_path)
    assert code(plan, "--workers", 2) == 0
    local = collected(plan)
    shutil.rmtree(plan.with_suffix(".sweep"))
    assert code(plan, "--workers", 2, *options) == 0
    pd.testing.assert_frame_equal(collected(plan), local)


def test_function_that_is_not_there_is_one_line(tmp_path, capsys) -> None:
    plan = write_plan(tmp_path)
    plan.write_text(plan.read_text().replace("tasks.py:rows", "tasks.py:rowz"))
    assert code(plan) == 2
    assert "no function 'rowz'. Functions are: rows." in capsys.readouterr().err
    with pytest.raises(SweepError, match="cannot be read"):
        plans.read(tmp_path / "absent.toml")


@pytest.mark.slow
def test_measure_gives_the_rows_of_qscale_measure(tmp_path) -> None:
    checkpoint = Path(__file__).parents[2] / "examples" / "checkpoints" / "tiny-wsd-decayed"
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 40)
    options = {"context": 64, "probe_windows": 2, "num_probes": 4}
    options |= {"features": "curvature", "max_hessian_probes": 8}
    plan = tmp_path / "plan.toml"
    plan.write_text(
        f'task = "measure"\n[fixed]\ncheckpoint = "{checkpoint}"\ntext = "text.txt"\nseed = 0\n'
        + "".join(f"{name} = {value!r}\n" for name, value in options.items())
        + '[grid]\nspecs = ["rtn int3 g64", "rtn int4 row"]\n'
    )
    assert code(plan, "--threads", 1) == 0
    swept = collected(plan)
    out = tmp_path / "plain.parquet"
    specs = [word for spec in ("rtn int3 g64", "rtn int4 row") for word in ("--spec", spec)]
    options["probes"] = options.pop("num_probes")
    given = [w for k, v in options.items() for w in (f"--{k.replace('_', '-')}", str(v))]
    arguments = ["measure", str(checkpoint), "--text", str(text), "--output", str(out)]
    main([*arguments, *specs, *given, "--seed", "0"])
    plain = pd.read_parquet(out)
    assert swept["spec"].tolist() == plain["spec"].tolist()
    assert swept["delta_loss"].nunique() == 2
    found, expected = table.check(swept.drop(columns="task")), table.check(plain)
    pd.testing.assert_frame_equal(found, expected, rtol=1e-6)


def test_the_example_of_the_help_is_a_plan(tmp_path, capsys) -> None:
    path = tmp_path / "example.toml"
    path.write_text(re.search("```toml\n(.*?)```", command.__doc__, re.DOTALL)[1])
    assert code(path, "--dry-run") == 0
    assert "11 tasks of measure in 2 arms" in capsys.readouterr().out
