"""Curvature of a language model's loss at its weights: traces, products and what they predict.

``guard`` makes a model twice differentiable, ``loss`` is the function that is differentiated,
``head`` and ``products`` are its parts, ``hessian``, ``ggn``, ``along``, ``kronecker`` and
``spectrum`` hold one estimator each, ``estimate`` what traces return, ``budget`` what they take,
and ``parallel`` shares them out.
"""

from qscale.measure.curvature.budget import Cost, cost
from qscale.measure.curvature.estimate import TraceEstimate, quadratic_delta
from qscale.measure.curvature.ggn import ggn_trace
from qscale.measure.curvature.guard import differentiable, double_backward_attention
from qscale.measure.curvature.hessian import hessian_trace, hessian_vector_product
from qscale.measure.curvature.loss import grad_norm

__all__ = [
    "Cost",
    "TraceEstimate",
    "cost",
    "differentiable",
    "double_backward_attention",
    "ggn_trace",
    "grad_norm",
    "hessian_trace",
    "hessian_vector_product",
    "quadratic_delta",
]
