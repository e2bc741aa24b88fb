"""The columns of the measurement table, with their units, meanings and plausible ranges."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["number", "text", "flag"]


@dataclass(frozen=True, slots=True)
class Column:
    """One column of the measurement table.

    Parameters
    ----------
    name
        Name of the column, the same in files, arguments, flags and plot labels.
    kind
        ``number``, ``text`` or ``flag`` (true/false). Every column may hold nulls.
    unit
        Unit of a number; empty for text.
    meaning
        One sentence.
    low, high
        Inclusive range outside which a value is taken for a mistake.
    allowed
        The values a text column may hold, if they are a closed list.
    hint
        What most often causes a value out of range.
    """

    name: str
    kind: Kind
    unit: str
    meaning: str
    low: float | None = None
    high: float | None = None
    allowed: tuple[str, ...] = ()
    hint: str = ""


STATUSES = ("ok", "nonfinite", "collapsed", "degraded", "failed")
_COUNT = "Counts are in units: write 125e6 for 125 million."
_ACCURACY = "An accuracy at or below chance has no value here: leave it empty."
_LOSS = "Losses are in nats per token; take the logarithm of a perplexity."

# fmt: off
COLUMNS: dict[str, Column] = {
    column.name: column
    for column in (
        # who was measured
        Column("family", "text", "", "Model family"),
        Column("run", "text", "", "One training run; rows of one run share its noise"),
        Column("checkpoint", "text", "", "One set of weights: content hash, or model name if unknown"),
        Column("source", "text", "", "Where the row came from"),
        Column("protocol", "text", "", "Evaluation protocol; losses compare only within one"),
        Column("status", "text", "", "Whether the row is usable", allowed=STATUSES),
        Column("status_reason", "text", "", "Why the status is not ok"),
        # size and training
        Column("n_params", "number", "parameters", "Non-embedding parameters", 1e3, 1e14, hint=_COUNT),
        Column("n_params_total", "number", "parameters", "All parameters", 1e3, 1e14, hint=_COUNT),
        Column("tokens", "number", "tokens", "Training tokens seen at this checkpoint", 1e4, 1e16, hint=_COUNT),
        Column("step", "number", "steps", "Optimizer steps at this checkpoint", 0),
        Column("lr_peak", "number", "", "Peak learning rate", 1e-8, 10),
        Column("lr", "number", "", "Learning rate at this checkpoint", 0, 10),
        Column("lr_schedule", "text", "", "Schedule: constant, cosine, wsd, linear"),
        Column("decay_fraction", "number", "", "Share of the learning-rate decay already done", 0, 1),
        Column("decay_share", "number", "", "Share of tokens seen while the learning rate decayed", 0, 1),
        Column("lr_sum", "number", "", "Sum of the learning rate over steps", 0),
        Column("weight_decay", "number", "", "Decoupled weight decay", 0, 10),
        Column("batch_tokens", "number", "tokens", "Tokens per optimizer step", 1),
        Column("optimizer", "text", "", "Optimizer"),
        Column("averaging", "text", "", "Weight averaging: none, ema, lawa, soup"),
        # quantizer setting
        Column("spec", "text", "", "Quantizer setting in short: gptq int4 g128 asym"),
        Column("implementation", "text", "", "Library that quantized, and its version"),
        Column("method", "text", "", "Quantization method: rtn, gptq, awq, ..."),
        Column("method_kind", "text", "", "Training used by the method", allowed=("ptq", "ptq+ft", "qat")),
        Column("fmt", "text", "", "Number format: int, mxint, nvfp4, nf4, vector, gguf, ..."),
        Column("bits", "number", "bits", "Nominal bits per weight element", 0.5, 32),
        Column("bits_activation", "number", "bits", "Nominal bits per activation element", 0.5, 32),
        Column("exponent_bits", "number", "bits", "Exponent bits of a floating-point format: 2 in E2M1", 0, 11),
        Column("mantissa_bits", "number", "bits", "Mantissa bits of a floating-point format: 1 in E2M1", 0, 52),
        Column("group_size", "number", "elements", "Elements sharing a scale; null means one per row", 1),
        Column("symmetric", "flag", "", "Whether zero is the middle of the grid"),
        Column("scale_rule", "text", "", "How the scale follows from the group's values"),
        Column("bits_per_weight", "number", "bits", "What is stored, scales and zeros included", 0.1, 40),
        Column("n_quantized", "number", "matrices", "Number of quantized matrices", 0),
        Column("quantized_share", "number", "", "Share of the parameters in low precision", 0, 1),
        Column("calibration", "text", "", "Text a method was calibrated on; null for none"),
        Column("damping", "number", "", "Share of the mean diagonal added to GPTQ's Gram matrices, the largest used", 0),
        Column("calibration_samples", "number", "sequences", "Sequences the method was calibrated on", 0),
        # outcome
        Column("loss_fp", "number", "nats/token", "Loss before quantization", 0, 50, hint=_LOSS),
        Column("loss_fp_se", "number", "nats/token", "Standard error of loss_fp", 0),
        Column("bits_per_byte", "number", "bits/byte", "loss_fp per UTF-8 byte of text", 0, 64),
        Column("loss_q", "number", "nats/token", "Loss after quantization", 0, 1e4, hint=_LOSS),
        Column("delta_loss", "number", "nats/token", "loss_q - loss_fp on the same tokens", -50, 1e4),
        Column("delta_loss_se", "number", "nats/token", "Paired standard error of delta_loss", 0),
        Column("relative_delta", "number", "", "delta_loss / loss_fp", -1, 1e4),
        Column("kl", "number", "nats/token", "Mean KL(p_fp || p_q)", -1e-3),
        Column("kl_se", "number", "nats/token", "Standard error of kl", 0),
        Column("top1_agreement", "number", "", "Share of positions with the same top token", 0, 1),
        Column("neg_log_accuracy", "number", "", "-ln((accuracy - chance) / (1 - chance))", 0, hint=_ACCURACY),
        Column("scored_tokens", "number", "tokens", "Tokens the losses are means over", 1),
        # features of the checkpoint and of the quantization error
        Column("grad_norm", "number", "", "Norm of the mean loss's gradient", 0),
        Column("hessian_trace", "number", "", "Trace of the mean loss's Hessian over block matrices"),
        Column("hessian_trace_se", "number", "", "Standard error of hessian_trace over probes", 0),
        Column("ggn_trace", "number", "", "Trace of the Gauss-Newton matrix over block matrices", 0),
        Column("ggn_trace_se", "number", "", "Standard error of ggn_trace over probes", 0),
        Column("curvature_tokens", "number", "tokens", "Tokens the curvature was estimated on", 1),
        Column("backward_passes", "number", "passes", "Backward passes spent on ggn_trace", 0),
        Column("features", "text", "", "Features that the row holds, separated by commas"),
        Column("quadratic_delta", "number", "nats/token", "Zero-fit prediction of delta_loss", 0),
        Column("quadratic_delta_se", "number", "nats/token", "Standard error of quadratic_delta over probes", 0),
        Column("first_order_delta", "number", "nats/token", "Gradient times the quantization error"),
        Column("first_order_delta_se", "number", "nats/token", "Standard error of first_order_delta over windows", 0),
        Column("gauss_newton_delta", "number", "nats/token", "Half the Gauss-Newton form of the quantization error", 0),
        Column("gauss_newton_delta_se", "number", "nats/token", "Standard error of gauss_newton_delta over windows", 0),
        Column("hessian_delta", "number", "nats/token", "Half the Hessian form of the quantization error"),
        Column("hessian_delta_se", "number", "nats/token", "Standard error of hessian_delta over windows", 0),
        Column("kronecker_delta", "number", "nats/token", "Half the sum of tr(E A E^T B) over matrices", 0),
        Column("hessian_top", "number", "", "Largest eigenvalue of the Hessian over block matrices"),
        Column("hessian_top_residual", "number", "", "Norm of its eigenvector's residual", 0),
        Column("hessian_bottom", "number", "", "Smallest eigenvalue of the Hessian over block matrices"),
        Column("sharpness_sam", "number", "nats/token", "Largest rise of the loss found within a distance of 0.05", 0),
        Column("sharpness_sam_se", "number", "nats/token", "Standard error of sharpness_sam over windows", 0),
        Column("sharpness_adaptive", "number", "nats/token", "Largest rise found within 0.5 in units of |w| + 0.01", 0),
        Column("sharpness_adaptive_se", "number", "nats/token", "Standard error of sharpness_adaptive over windows", 0),
        Column("sharpness_keskar", "number", "nats/token", "Largest rise found where no weight moves by over 0.001 (|w| + 1)", 0),
        Column("sharpness_keskar_se", "number", "nats/token", "Standard error of sharpness_keskar over windows", 0),
        Column("fisher_rao_norm", "number", "", "Root of the weights' Fisher form", 0),
        Column("fisher_rao_norm_se", "number", "", "Standard error of fisher_rao_norm over windows", 0),
        Column("relative_flatness", "number", "nats/token", "Hessian trace weighted by rows, over block matrices"),
        Column("relative_flatness_se", "number", "nats/token", "Standard error of relative_flatness over probes", 0),
        Column("radial_slope", "number", "", "Local exponent of the loss rise along the quantization error"),
        Column("radial_slope_se", "number", "", "Standard error of radial_slope over windows", 0),
        Column("radial_step", "number", "", "Multiple of the error at which half the way to a uniform guess is lost", 0),
        Column("radial_step_se", "number", "", "Standard error of radial_step over windows", 0),
        Column("hidden_relative_error", "number", "", "Error of the last hidden state over its norm", 0),
        Column("hidden_relative_error_se", "number", "", "Standard error of hidden_relative_error over windows", 0),
        Column("hidden_cancelled_inter", "number", "", "Share of added hidden error that interaction takes back"),
        Column("hidden_cancelled_inter_se", "number", "", "Standard error of hidden_cancelled_inter over windows", 0),
        Column("hidden_cancelled", "number", "", "The same with the growth of the stream itself"),
        Column("hidden_cancelled_se", "number", "", "Standard error of hidden_cancelled over windows", 0),
        Column("hidden_cancelled_abs", "number", "", "Share of added hidden error taken back, absolute norms"),
        Column("hidden_cancelled_abs_se", "number", "", "Standard error of hidden_cancelled_abs over windows", 0),
        Column("hidden_error_cosine", "number", "", "Cosine of incoming and new hidden error, mean over blocks", -1, 1),
        Column("hidden_error_cosine_se", "number", "", "Standard error of hidden_error_cosine over windows", 0),
        Column("hidden_kept", "number", "", "Share of positions in the hidden-state statistics", 0, 1),
        Column("head_rotation", "number", "degrees", "Angle by which the LM head's input turned", 0, 180),
        Column("head_norm_change", "number", "", "Relative change of the norm of the LM head's input", 0),
        Column("head_relative_error_sq", "number", "", "Squared relative error of the LM head's input", 0),
        Column("head_angular_share", "number", "", "Share of it that the rotation makes up"),
        Column("head_angle_change", "number", "degrees", "Change of the angle to a token's row, mean over the vocabulary", 0, 180),
        Column("head_attenuation", "number", "", "head_rotation over head_angle_change", 0),
        Column("head_attenuation_predicted", "number", "", "Attenuation of a rotation in a random direction", 0),
        Column("head_flip_1", "number", "", "Share of positions whose most likely token changes", 0, 1),
        Column("head_retained_5", "number", "", "Share of the 5 most likely tokens that still are", 0, 1),
        Column("head_retained_10", "number", "", "Share of the 10 most likely tokens that still are", 0, 1),
        Column("head_retained_20", "number", "", "Share of the 20 most likely tokens that still are", 0, 1),
        Column("n_ragged", "number", "matrices", "Matrices whose rows the group size does not divide", 0),
        Column("weight_norm", "number", "", "Frobenius norm of the quantized matrices together", 0),
        Column("weight_rms", "number", "", "Root mean square of the quantized weights", 0),
        Column("quantization_noise", "number", "", "Sum of ||W - Q(W)||^2 over quantized matrices", 0),
        Column("weight_spectral_max", "number", "", "Largest spectral norm of a block matrix", 0),
        Column("weight_stable_rank", "number", "", "Median of ||W||_F^2 / ||W||_2^2 over block matrices", 0),
        Column("weight_kurtosis", "number", "", "Mean kurtosis of block matrices, 3 for a Gaussian", 0),
        Column("weight_outliers_6", "number", "", "Share of weights beyond six standard deviations of their matrix", 0, 1),
        Column("weight_absmax", "number", "", "Largest weight of the block matrices", 0),
        Column("weight_grid_bits", "number", "bits", "Bits of the quantization grid that the weights sit on already", 1, 16),
        Column("sqnr_db", "number", "dB", "Signal-to-quantization-noise ratio of the weights"),
    )
}
# fmt: on
