"""Training metadata: what each source says, which one counts, and that conflicts are told."""

from __future__ import annotations

import json

import pytest

from qscale.checkpoint import describe
from qscale.errors import CheckpointError
from qscale.provenance import Statement, combine, from_name, statements
from tests.checkpoints import build_model, save


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("step143000", {"step": 143e3}),
        ("stage1-step140000-tokens294B", {"step": 140e3, "tokens": 294e9}),
        ("step1000-tokens4B", {"step": 1e3, "tokens": 4e9}),
        ("checkpoint-500", {"step": 500}),
        ("run3_step-20_tokens-1.5M", {"step": 20, "tokens": 1.5e6}),
        ("STEP0", {"step": 0}),
        ("main", {}),
        ("footstep12", {}),
        ("step12b", {}),
        ("mytokens4B", {}),
        ("tokens4", {}),
        ("tokens0B", {}),
    ],
)
def test_names(name, values):
    assert from_name(name, "folder name").values == values


def test_a_later_stage_counts_from_its_own_start_and_is_not_used():
    found = from_name("stage2-ingredient1-step11931-tokens50B", "revision")
    assert found.values == {}
    assert combine([found]).remarks == (
        (
            "Step and tokens in 'stage2-ingredient1-step11931-tokens50B' count stage 2 alone and are "
            "not used; give those of the whole training."
        ),
    )


def trainer_state(folder, **changes):
    log = [{"step": s, "learning_rate": lr} for s, lr in ((1, 1e-4), (2, 3e-4), (3, 2e-4), (4, 9))]
    state = {
        "global_step": 3,
        "max_steps": 10,
        "num_input_tokens_seen": 123456,
        "log_history": [*log, {"step": 3, "eval_loss": 2.0}],
    }
    (folder / "trainer_state.json").write_text(json.dumps({**state, **changes}))


def test_a_trainer_state_gives_step_tokens_and_learning_rates_up_to_its_step(tmp_path):
    trainer_state(tmp_path)
    (found,) = statements(tmp_path, Statement("folder name", {}))
    assert found.origin == "trainer_state.json"
    assert found.values == {"step": 3, "tokens": 123456, "lr": 2e-4, "lr_peak": 3e-4}


def test_a_trainer_that_did_not_count_tokens_or_is_still_warming_up_does_not_say(tmp_path):
    trainer_state(tmp_path, global_step=2, num_input_tokens_seen=0)
    (found,) = statements(tmp_path, Statement("folder name", {}))
    assert found.values == {"step": 2, "lr": 3e-4}
    trainer_state(tmp_path, log_history=[{"step": s, "learning_rate": 1e-3} for s in (1, 2)])
    (found,) = statements(tmp_path, Statement("folder name", {}))
    assert found.values["lr_peak"] == 1e-3  # constant


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "trainer_state.json: not the state of a transformers Trainer"),
        ("[1]", "trainer_state.json: not the state of a transformers Trainer"),
        ('{"global_step": "many"}', "trainer_state.json: 'step' must be a number. Got 'many'"),
        ('{"log_history": [{"learning_rate": "x"}]}', "not the state of a transformers Trainer"),
        ('{"log_history": [{"learning_rate": 99}]}', "'lr' must be between 0 and 10. Got 99"),
    ],
)
def test_a_damaged_trainer_state(tmp_path, content, message):
    (tmp_path / "trainer_state.json").write_text(content)
    with pytest.raises(CheckpointError, match=message):
        statements(tmp_path, Statement("folder name", {}))


def test_flags_come_before_sidecar_before_trainer_state_before_name(tmp_path):
    folder = save(build_model("llama"), tmp_path / "step2000-tokens8B")
    (folder / "qscale.toml").write_text("[training]\nlr = 1e-3\ntokens = 8400000000.0\nstep = 3\n")
    trainer_state(folder, num_input_tokens_seen=0)
    found = combine([Statement("flags", {"lr": 5e-4}), *describe(folder).statements])
    assert found.values == {"lr": 5e-4, "tokens": 8.4e9, "step": 3, "lr_peak": 3e-4}
    assert found.origins == {
        "lr": "flags",
        "tokens": "qscale.toml",
        "step": "qscale.toml",
        "lr_peak": "trainer_state.json",
    }
    # 8B is 8.4e9 rounded; the trainer's step agrees with the sidecar's.
    assert found.remarks == (
        "lr is 0.0005 by flags, 0.001 by qscale.toml; the first is used.",
        "lr is 0.0005 by flags, 0.0002 by trainer_state.json; the first is used.",
        "step is 3 by qscale.toml, 2000 by folder name; the first is used.",
    )


def test_a_name_that_is_more_than_rounded_is_a_conflict():
    named = from_name("tokens8B", "revision")
    assert not combine([Statement("flags", {"tokens": 8.9e9}), named]).remarks
    assert combine([Statement("flags", {"tokens": 10e9}), named]).remarks == (
        "tokens is 1e+10 by flags, 8e+09 by revision; the first is used.",
    )
    assert combine([Statement("a", {"run": "x"}), Statement("b", {"run": "y"})]).remarks == (
        "run is x by a, y by b; the first is used.",
    )


def test_tokens_follow_from_steps_and_batch_where_nobody_states_them():
    named, sidecar = from_name("step143000", "revision"), {"batch_tokens": 2097152.0}
    found = combine([Statement("qscale.toml", sidecar), named])
    assert found.values["tokens"] == 143000 * 2097152
    assert found.origins["tokens"] == "step (revision) times batch_tokens (qscale.toml)"
    stated = combine([Statement("flags", {"tokens": 3e11}), Statement("q", sidecar), named])
    assert stated.values["tokens"] == 3e11
    start = combine([Statement("q", sidecar), from_name("step0", "revision")])
    assert "tokens" not in start.values
