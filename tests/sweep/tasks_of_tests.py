"""Functions that the plans of tests name."""

import os
import time

import pandas as pd


def rows(params, scratch):
    """Return rows that follow from parameters and seed alone; log that the task ran."""
    if "log" in params:
        with open(params["log"], "a") as file:  # noqa: PTH123 - one write, atomic at this size
            file.write(f"{params['x']}\n")
    if params.get("fail_at") == params["x"]:
        raise ValueError("this one fails")
    if params.get("kill_at") == params["x"] and not os.path.exists(params["once"]):  # noqa: PTH110
        open(params["once"], "w").close()  # noqa: PTH123
        os.kill(os.getpid(), 9)
    (scratch / "checkpoint.bin").write_bytes(b"0" * 1000)
    time.sleep(params.get("sleep", 0))
    frame = pd.DataFrame({"run": [str(params["x"])] * 2, "bits": [3.0, 4.0]})
    frame["delta_loss"] = [params["seed"] / 2**31, 0.1]
    return {"rows": frame, "matrices": pd.DataFrame({"matrix": ["a"], "value": [params["x"]]})}
