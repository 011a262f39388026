"""Array math with explicit backward: no graph, no global state, any array-API library.

Backward is split into an input gradient and a weight gradient wherever there are weights, since
pipelines run them at different times. Weight gradients take ``out=`` and ``accumulate=``, so they
can be views of a communication bucket.
"""

from mpipar.nn.activation import gelu, silu, slope_backward, swiglu, swiglu_backward
from mpipar.nn.attention import causal_attention, causal_attention_backward
from mpipar.nn.dropout import add_residual, dropout_slope
from mpipar.nn.linear import (
    bias_backward,
    embedding,
    embedding_backward,
    linear,
    linear_backward_input,
    linear_backward_weight,
)
from mpipar.nn.loss import cross_entropy, cross_entropy_backward
from mpipar.nn.norm import (
    layer_norm,
    layer_norm_backward_input,
    norm_backward_weight,
    rms_norm,
    rms_norm_backward_input,
)
from mpipar.nn.optim import adamw_update
from mpipar.nn.rotary import rotary, rotary_backward, rotary_tables

__all__ = [
    "adamw_update",
    "add_residual",
    "bias_backward",
    "causal_attention",
    "causal_attention_backward",
    "cross_entropy",
    "cross_entropy_backward",
    "dropout_slope",
    "embedding",
    "embedding_backward",
    "gelu",
    "layer_norm",
    "layer_norm_backward_input",
    "linear",
    "linear_backward_input",
    "linear_backward_weight",
    "norm_backward_weight",
    "rms_norm",
    "rms_norm_backward_input",
    "rotary",
    "rotary_backward",
    "rotary_tables",
    "silu",
    "slope_backward",
    "swiglu",
    "swiglu_backward",
]
