"""Two processes that share the microbatches find what one finds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from qscale.measure.curvature import ggn_trace, grad_norm, hessian_trace, hessian_vector_product
from qscale.measure.curvature.parallel import processes, share
from tests.checkpoints import build_model

ROOT = Path(__file__).parents[3]


def estimates() -> dict[str, np.ndarray]:
    """Every quantity that is shared, over three microbatches of which the last is short."""
    model = build_model("llama")
    windows = torch.randint(256, (5, 16), generator=torch.Generator().manual_seed(0))
    names = [name for name, _ in model.named_parameters()]
    ones = {name: torch.ones_like(p) for name, p in model.named_parameters()}
    product = hessian_vector_product(model, windows, ones, batch_windows=2)
    options = {"batch_windows": 2, "seed": 1}
    return {
        "ggn": ggn_trace(model, windows, names, **options).values,
        "hessian": hessian_trace(model, windows, names, rtol=0.2, **options).values,
        "forward": hessian_trace(model, windows, names, method="forward", **options).values,
        "product": torch.cat([part.flatten() for part in product.values()]).numpy(),
        "norm": np.array(grad_norm(model, windows, names, batch_windows=2)),
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
                np.testing.assert_allclose(found[name], expected, rtol=2e-4, atol=1e-6)


def test_without_a_process_group_nothing_is_shared() -> None:
    assert processes() == 1
    assert list(share(range(5))) == [0, 1, 2, 3, 4]


if __name__ == "__main__":
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    assert list(share(range(5))) == list(range(rank, 5, 2))
    np.savez(Path(sys.argv[1]) / f"{rank}.npz", **estimates())
    torch.distributed.destroy_process_group()
