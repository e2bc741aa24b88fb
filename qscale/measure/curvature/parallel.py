"""Share microbatches over the processes of ``torch.distributed``, where it is initialised."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
from torch import distributed

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    Item = TypeVar("Item")


def processes() -> int:
    """Return the number of processes that share the work: 1 without a process group."""
    return distributed.get_world_size() if _started() else 1


def share(items: Iterable[Item]) -> Iterator[Item]:
    """Pick this process's items: one in as many as there are processes."""
    rank = distributed.get_rank() if _started() else 0
    return islice(items, rank, None, processes())


def add_up(sums: Sequence[torch.Tensor]) -> None:
    """Replace each tensor by its sum over the processes."""
    if _started():
        for tensor in sums:
            distributed.all_reduce(tensor)


def add_up_array(values: np.ndarray, device: torch.device) -> np.ndarray:
    """Return the sum of an array over the processes, which talk to each other on ``device``."""
    total = torch.from_numpy(np.ascontiguousarray(values)).to(device)
    add_up([total])
    return total.cpu().numpy()


def _started() -> bool:
    return distributed.is_available() and distributed.is_initialized()
