r"""Plan from fits: bit widths, mixes, sizes, training length, schedules, measurements.

Each answer carries the uncertainty of the fits it comes from, your own or shipped ones.

```sh
# The fewest bits that raise the perplexity by at most 10 %
qscale plan bits published_gptq_kumar --n-params 13e9 --tokens 2e12 \
    --method gptq --ppl-ratio 1.1
# What twice the tokens, or a higher peak rate, do to the loss increase
qscale plan schedule learning_rate_gptq_lr_anneal --n-params 7e9 \
    --tokens 2e12 --lr-peak 3e-4 --lr 0 --method gptq \
    --try tokens=4e12 --try lr_peak=9e-4
```

Next: qscale measure says whether the plan holds.
"""

from __future__ import annotations

from cyclopts import App

from qscale.cli.plan_bits import bits
from qscale.cli.plan_mix import mix
from qscale.cli.plan_next import next_
from qscale.cli.plan_pareto import pareto
from qscale.cli.plan_schedule import schedule
from qscale.cli.plan_tokens import tokens

plan = App(name="plan", help=__doc__)
for _command in (bits, mix, tokens, pareto, schedule):
    plan.command(_command)
plan.command(next_, name="next")
