"""``qscale plan``: what to choose, train or measure next, from fits and their uncertainty."""

from __future__ import annotations

from cyclopts import App

plan = App(
    name="plan",
    help="Plan from fits: bit widths, mixes, sizes, training length, schedules, measurements.",
)
for _name in ("bits", "mix", "tokens", "pareto", "schedule"):
    plan.command(f"qscale.cli.plan_{_name}:{_name}", name=_name)
plan.command("qscale.cli.plan_next:next_", name="next")
