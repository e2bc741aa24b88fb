"""What a rotation of the LM head's input does to tokens' angles, scores, ranks and probabilities.

Chen et al. (arXiv:2609.11716) explain why a large error of the last hidden state costs little
loss: in a wide space it is nearly orthogonal to almost every token's row of the LM head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import torch
from scipy.special import betainc

from qscale.errors import CheckpointError, QscaleError
from qscale.measure.curvature.head import chunks, head_logits
from qscale.measure.loss import add_by_window, mean_and_se, scored_positions

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray
    from transformers import PreTrainedModel

    from qscale.measure.loss import Reference

RETAINED = (5, 10, 20)
"""Sizes K of the sets of most likely tokens whose overlap is measured."""


@dataclass(frozen=True, slots=True, eq=False)
class HeadGeometry:
    """How far a quantized model's LM-head input moved, and what became of the tokens.

    Parameters
    ----------
    means
        By measure, ``value`` and standard error over windows, ``se``; over scored tokens:

        - ``rotation``: angle between both models' LM-head inputs, degrees;
        - ``norm_change``: ``|rho - 1|``, with ``rho`` the ratio of their norms;
        - ``relative_error_sq``: squared norm of their difference, relative to the model's own, and
          ``angular_share``, the part of it that the rotation makes up (Proposition 2);
        - ``angle_change``: change of the angle to a row of the LM head, averaged over the
          vocabulary, degrees;
        - ``attenuation``: mean rotation over mean angle change; null without a rotation;
        - ``flip_1``: share of positions whose most likely token changes;
        - ``retained_5``, ...: share of the model's 5, ... most likely tokens that are still so;
        - ``kl``: KL(p_fp || p_q), nats per token;
        - ``delta_loss``: nats per token, with its paired error.
    ranks
        One row for each of the model's most likely tokens: ``rank`` from 1, and with standard
        errors over windows, of the token's logit ``z``:

        - ``score_change``: mean of ``|dz / z|``, as in the paper. Where logits of a rank come close
          to zero, a few of them carry it and its error cannot be trusted; null if one is zero;
        - ``score_shift``: mean of ``|dz|`` over mean of ``|z|``, which has no such trouble;
        - ``score_change_predicted``, ``score_shift_predicted``: the same with the expectation of
          ``|dz / z|`` by Theorem 2;
        - ``log_p_change``: mean of ``|d log p|``, nats.
    width
        Width of the LM head's input.
    """

    means: pd.DataFrame
    ranks: pd.DataFrame
    width: int

    @property
    def attenuation_predicted(self) -> float:
        """Attenuation of a rotation in a random direction, to first order in its angle."""
        return 1 / mean_projection(self.width)

    def columns(self) -> dict[str, float | None]:
        """Return the values of the whole model under the measurement table's column names."""
        found = {"head_attenuation_predicted": self.attenuation_predicted}
        ours = self.means.drop(index=["kl", "delta_loss"])  # the table has these already
        for name, (value, se) in zip(ours.index, ours.to_numpy(), strict=True):
            found |= {f"head_{name}": float(value), f"head_{name}_se": float(se)}
        return {name: None if np.isnan(value) else value for name, value in found.items()}


def head_geometry(
    model: PreTrainedModel,
    full: Reference,
    *,
    ranks: int = 30,
    batch_windows: int = 8,
    on_windows: Callable[[int], None] | None = None,
) -> HeadGeometry:
    r"""Compare a quantized model with the full-precision one at the LM head.

    With :math:`h, \hat h` the inputs of the LM head, :math:`w_k` its rows, :math:`\theta_k` the
    angle between :math:`h` and :math:`w_k`, :math:`\alpha` that between the two inputs and
    :math:`\rho` the ratio of their norms, Chen et al. (arXiv:2609.11716, Theorem 2) find for a
    rotation in a uniformly random direction

    .. math:: E|\hat\theta_k - \theta_k| = \alpha \mu_d + O(\alpha^2) , \qquad
              \delta z_k / z_k = (\rho \cos\alpha - 1) + \rho \tan\theta_k \sin\alpha \, q_k

    with :math:`\mu_d` of :func:`mean_projection` and :math:`q_k` a coordinate of a random unit
    vector; and, for any change of the logits (Theorem 3),
    :math:`\delta \log p_k = \delta z_k - E_p \delta z - \mathrm{KL}(p \Vert \hat p)`.

    Parameters
    ----------
    model
        The model with quantized block matrices; its LM head is that of the reference.
    full
        Outputs of the full-precision model.
    ranks
        Number of most likely tokens to follow one by one.
    batch_windows
        Windows in one forward pass; it does not change the result beyond rounding.
    on_windows
        Called after each batch with the number of its windows.

    Raises
    ------
    CheckpointError
        If an input of the LM head is not finite.
    QscaleError
        If the vocabulary has fewer tokens than are followed.

    Notes
    -----
    Logits exist for a chunk of positions at a time, over the whole vocabulary: at most half of
    `qscale.measure.curvature.head.CHUNK_LOGITS` elements, and about ten tensors of that size at
    once, 80 MiB in float32; the C library may keep as much again of freed memory.
    Angles and changes of logits are formed from the rotated part of the input, not as
    differences of two large numbers, so that small ones keep their digits.
    """
    head = model.get_output_embeddings()
    vocabulary, width = head.weight.shape
    if ranks < 1:
        raise QscaleError(f"ranks must be at least 1. Got {ranks} instead.")
    if vocabulary < max(ranks, *RETAINED):
        raise QscaleError(
            f"The vocabulary must hold at least {max(ranks, *RETAINED)} tokens to rank. "
            f"Got {vocabulary} instead."
        )
    sums: dict[str, torch.Tensor] = {}
    done = 0
    with torch.inference_mode():
        norms = torch.linalg.vector_norm(head.weight, dim=1, dtype=torch.float64)
        for owner, hidden, targets in scored_positions(
            model, full.windows, batch_windows, on_windows
        ):
            kept = full.hidden[done : done + len(targets)].to(hidden.device)
            done += len(targets)
            bad = owner[(~torch.isfinite(hidden)).any(1).cpu()]
            if len(bad):
                raise CheckpointError(
                    f"The quantized model's LM-head input is not finite in window {int(bad[0])}: "
                    "its geometry cannot be measured."
                )
            for part in chunks(len(targets), 2 * vocabulary):
                found = _chunk(kept[part], hidden[part], targets[part], head, norms, ranks)
                for name, values in found.items():
                    if name not in sums:
                        shape = (len(full.windows), *values.shape[1:])
                        sums[name] = torch.zeros(shape, dtype=torch.float64)
                    add_by_window(sums[name], owner[part], values)
    return _summary({name: value.numpy() for name, value in sums.items()}, full.counts, width)


def mean_projection(width: int) -> float:
    r"""Mean size of one coordinate of a random unit vector orthogonal to a given one.

    .. math:: \mu_d = \frac{\Gamma((d-1)/2)}{\sqrt\pi \, \Gamma(d/2)}
              \approx \sqrt{\frac{2}{\pi (d-1)}}

    Parameters
    ----------
    width
        Dimension :math:`d` of the space, at least 2.

    Examples
    --------
    >>> round(1 / mean_projection(5120), 1)  # attenuation of a random rotation in Qwen3-32B
    89.7
    """
    return math.exp(math.lgamma((width - 1) / 2) - math.lgamma(width / 2)) / math.sqrt(math.pi)


def expected_score_change(
    rho: NDArray[np.float64],
    alpha: NDArray[np.float64],
    theta: NDArray[np.float64],
    width: int,
) -> NDArray[np.float64]:
    r"""Expect the size of a score's relative change under a rotation in a random direction.

    The mean of :math:`|a + b q|` with :math:`a = \rho \cos\alpha - 1`,
    :math:`b = \rho \, |\tan\theta| \sin\alpha` and
    :math:`q^2 \sim \mathrm{Beta}(1/2, (d-2)/2)` (Chen et al., arXiv:2609.11716, Theorem 2). Where
    :math:`|q|` is below :math:`t = \min(|a|/b, 1)`, both signs of :math:`q` average to
    :math:`|a|`, elsewhere to :math:`b|q|`; so it is, in closed form,

    .. math:: |a| \, I_{t^2}(1/2, (d-2)/2) + b \, \mu_d \, (1 - t^2)^{(d-2)/2} .

    At :math:`\rho = 1` and small angles that is :math:`\alpha \, |\tan\theta| \, \mu_d`.

    Parameters
    ----------
    rho, alpha
        Ratio of the norms and angle of the rotation, radians.
    theta
        Angle between the token's row and the input before the rotation, radians.
    width
        Dimension :math:`d`, at least 3.
    """
    a = np.abs(rho * np.cos(alpha) - 1)
    b = rho * np.abs(np.tan(theta)) * np.sin(alpha)
    ones = np.ones(np.broadcast(a, b).shape)
    t_sq = np.divide(np.minimum(a, b), b, out=ones, where=b > 0) ** 2
    shape = (width - 2) / 2
    return a * betainc(0.5, shape, t_sq) + b * mean_projection(width) * (1 - t_sq) ** shape


def length_and_angle(
    hidden: torch.Tensor, other: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ratio of norms ``|other| / |hidden|`` and angle in radians, exact for small angles too.

    Parameters
    ----------
    hidden, other
        Vectors, shape (..., width).

    Returns
    -------
    rho, alpha : torch.Tensor
        Shape (...), float64.
    """
    hidden, other = hidden.double(), other.double()
    norm, changed = hidden.norm(dim=-1), other.norm(dim=-1)
    apart = other / changed[..., None] - hidden / norm[..., None]
    return changed / norm, 2 * torch.asin((apart.norm(dim=-1) / 2).clamp(max=1))


def _chunk(
    hidden: torch.Tensor,
    other: torch.Tensor,
    targets: torch.Tensor,
    head: torch.nn.Linear,
    norms: torch.Tensor,
    ranks: int,
) -> dict[str, torch.Tensor]:
    """Measure some positions, shape (positions,) or (positions, ranks) each; angles in radians."""
    rho, alpha = length_and_angle(hidden, other)
    angular = 2 * rho * (1 - torch.cos(alpha))
    found = {
        "rotation": alpha,
        "norm_change": (rho - 1).abs(),
        "relative_error_sq": (rho - 1) ** 2 + angular,
        "angular": angular,
    }
    rotated = (other.double() - rho[:, None] * hidden.double()).to(hidden.dtype)
    score, turned = (head_logits(x, head.weight, None) for x in (hidden, rotated))
    lengths = hidden.double().norm(dim=-1)
    found["angle_change"] = _angle_change(score, turned, norms, lengths, rho)
    change = turned.add_(score * (rho - 1).to(score.dtype)[:, None])
    logits = score if head.bias is None else score + head.bias
    top = logits.topk(max(ranks, *RETAINED), dim=-1)
    found |= _retained(top.indices, logits + change)
    chosen = top.indices[:, :ranks]
    of_chosen = change.gather(-1, chosen).double()
    own = score.gather(-1, chosen).double()  # a bias of the head neither turns nor grows
    expected = expected_score_change(
        rho.cpu().numpy()[:, None],
        alpha.cpu().numpy()[:, None],
        (own / (lengths[:, None] * norms[chosen])).clamp(-1, 1).acos().cpu().numpy(),
        hidden.shape[-1],
    )
    found["score"] = top.values[:, :ranks].double().abs()
    found["shift"] = of_chosen.abs()
    found["shift_predicted"] = torch.from_numpy(expected).to(own.device) * own.abs()
    for name in ("shift", "shift_predicted"):
        found[name.replace("shift", "score_change")] = found[name] / found["score"]
    mean, kl = _divergence(logits, change)
    found["kl"] = kl
    found["log_p_change"] = (of_chosen - (mean + kl)[:, None]).abs()
    found["delta_loss"] = mean + kl - change.gather(-1, targets[:, None])[:, 0].double()
    return found


def _angle_change(
    score: torch.Tensor,
    turned: torch.Tensor,
    norms: torch.Tensor,
    lengths: torch.Tensor,
    rho: torch.Tensor,
) -> torch.Tensor:
    """Average over the vocabulary how far angles to its rows change; rows of zeros have none."""
    inverse = torch.where(norms > 0, 1 / norms, 0.0)
    per_row = inverse.to(score.dtype)
    cosine = score * per_row / lengths.to(score.dtype)[:, None]
    moved = (turned * per_row).div_((lengths * rho).to(score.dtype)[:, None]).add_(cosine)
    change = moved.clamp_(-1, 1).acos_().sub_(cosine.clamp_(-1, 1).acos_()).abs_()
    return change.sum(-1, dtype=torch.float64) / (inverse > 0).sum()


def _retained(top: torch.Tensor, logits: torch.Tensor) -> dict[str, torch.Tensor]:
    """Compare the most likely tokens, best first, with those of other logits."""
    other = logits.topk(top.shape[1], dim=-1).indices  # as many, so that ties break alike
    found = {"flip_1": (top[:, 0] != other[:, 0]).double()}
    for k in RETAINED:
        both = (top[:, :k, None] == other[:, None, :k]).any(-1)
        found[f"retained_{k}"] = both.sum(-1).double() / k
    return found


def _divergence(logits: torch.Tensor, change: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean of a change of logits under their probabilities, and the KL divergence it makes."""
    change = change.double()
    logp = logits.double().log_softmax(-1)
    mean = logp.exp().mul_(change).sum(-1)
    return mean, logp.add_(change).logsumexp(-1) - mean


def _summary(
    sums: dict[str, NDArray[np.float64]], counts: NDArray[np.int64], width: int
) -> HeadGeometry:
    """Turn sums over each window's positions into means and standard errors."""
    means = {
        "rotation": _ratio(np.degrees(sums["rotation"]), counts),
        "norm_change": _ratio(sums["norm_change"], counts),
        "relative_error_sq": _ratio(sums["relative_error_sq"], counts),
        "angular_share": _ratio(sums["angular"], sums["relative_error_sq"]),
        "angle_change": _ratio(np.degrees(sums["angle_change"]), counts),
        "attenuation": _ratio(sums["rotation"], sums["angle_change"]),
    }
    plain = ("flip_1", *(f"retained_{k}" for k in RETAINED), "kl", "delta_loss")
    means |= {name: _ratio(sums[name], counts) for name in plain}
    ranked = {
        "score_change": (sums["score_change"].T, counts),
        "score_change_predicted": (sums["score_change_predicted"].T, counts),
        "score_shift": (sums["shift"].T, sums["score"].T),
        "score_shift_predicted": (sums["shift_predicted"].T, sums["score"].T),
        "log_p_change": (sums["log_p_change"].T, counts),
    }
    columns: dict[str, object] = {"rank": np.arange(1, sums["score"].shape[1] + 1)}
    for name, (top, by) in ranked.items():
        rows = np.broadcast_to(by, top.shape)
        pairs = [_ratio(*pair) for pair in zip(top, rows, strict=True)]
        columns[name], columns[f"{name}_se"] = np.transpose(pairs)
    table = pd.DataFrame.from_dict(means, orient="index", columns=["value", "se"])
    return HeadGeometry(table, pd.DataFrame(columns), width)


def _ratio(
    sums: NDArray[np.float64], by: NDArray[np.int64] | NDArray[np.float64]
) -> tuple[float, float]:
    """Divide sums over windows, with a standard error; NaN where undefined."""
    if not np.isfinite(sums).all() or not by.sum() > 0:
        return np.nan, np.nan
    return mean_and_se(sums, by)
