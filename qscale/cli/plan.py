"""``qscale plan``: what to choose, train or measure next, from fits and their uncertainty."""

from __future__ import annotations

from cyclopts import App

from qscale.cli.plan_bits import bits
from qscale.cli.plan_mix import mix
from qscale.cli.plan_next import next_
from qscale.cli.plan_pareto import pareto
from qscale.cli.plan_schedule import schedule
from qscale.cli.plan_tokens import tokens

plan = App(
    name="plan",
    help="Plan from fits: bit widths, mixes, sizes, training length, schedules, measurements.",
)
for _command in (bits, mix, tokens, pareto, schedule):
    plan.command(_command)
plan.command(next_, name="next")
