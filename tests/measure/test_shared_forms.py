"""Two processes that share the windows find the same curvature along errors as one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from qscale.measure.curvature.along import second_order_along
from qscale.measure.curvature.kronecker import kronecker_factors
from qscale.measure.curvature.spectrum import top_eigenvalues
from qscale.measure.forms import quadratic_forms
from qscale.model import quantizable
from tests.checkpoints import build_model

ROOT = Path(__file__).parents[2]


def estimates() -> dict[str, np.ndarray]:
    model = build_model("llama").eval()
    windows = torch.randint(256, (5, 16), generator=torch.Generator().manual_seed(0))
    errors = {name: 0.01 * torch.ones_like(w) for name, w in quantizable(model).items()}
    names = list(errors)
    along = second_order_along(model, windows, errors)
    assert along.hessian is not None
    forms = quadratic_forms(model, windows, names, {"ones": errors.__getitem__}, batch_windows=2)
    factors = kronecker_factors(model, windows, names, batch_windows=2)
    return {
        "gauss_newton": along.gauss_newton.values,
        "hessian": along.hessian.values,
        "products": forms.products,
        "squares": forms.squared_errors,
        "kronecker": np.array(list(factors.quadratic(errors).values())),
        "top": top_eigenvalues(model, windows, names, 1).values,
    }


@pytest.mark.slow
def test_two_processes_give_the_numbers_of_one(tmp_path: Path) -> None:
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        str(Path(__file__)), str(tmp_path),
    ]  # fmt: skip
    done = subprocess.run(  # noqa: PLW1510 - the assertion shows stderr
        command, cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    alone = estimates()
    for rank in range(2):
        with np.load(tmp_path / f"{rank}.npz") as found:
            for name, expected in alone.items():
                np.testing.assert_allclose(found[name], expected, rtol=2e-4, atol=1e-7)


if __name__ == "__main__":
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    np.savez(Path(sys.argv[1]) / f"{rank}.npz", **estimates())
    torch.distributed.destroy_process_group()
