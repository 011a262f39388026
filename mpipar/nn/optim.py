"""AdamW (Loshchilov and Hutter 2019): Adam with decoupled weight decay, in place, in chunks."""

from __future__ import annotations

import math

from mpipar.errors import CountOutOfRange, OutOfRange, UnsupportedArray
from mpipar.nn.array import Array, empty_like, namespace, row_chunks
from mpipar.nn.checks import check_shape


def adamw_update(
    parameter: Array,
    gradient: Array,
    m: Array,
    v: Array,
    step: int,
    lr: float,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    gradient_scale: float = 1.0,
) -> None:
    """Take one AdamW step: `parameter`, `m` and `v` change in place.

    With ``g = gradient_scale * gradient``: ``m = beta1 m + (1 - beta1) g``,
    ``v = beta2 v + (1 - beta2) g**2``,
    ``parameter -= lr (weight_decay parameter + m_hat / (sqrt(v_hat) + eps))``.

    Parameters
    ----------
    parameter, gradient : Array
        Arrays of one shape, C-contiguous.
    m, v : Array
        Moments of that shape, float32 at least and no narrower than the parameter.
    step : int
        Number of this step, from 1.
    lr : float
        Learning rate.
    beta1, beta2 : float
        Decay of the moments, in [0, 1).
    eps : float
        Added to the root of the second moment.
    weight_decay : float
        Decoupled decay.
    gradient_scale : float
        Factor on the gradient, such as a clipping factor.

    Raises
    ------
    CountOutOfRange
        If `step` is below 1.
    OutOfRange
        If a decay rate lies outside [0, 1).
    UnsupportedArray
        If shapes differ or the state is too narrow.
    """
    arrays = {"parameter": parameter, "gradient": gradient, "m": m, "v": v}
    _check(arrays, step, {"beta1": beta1, "beta2": beta2})
    xp = namespace(*arrays.values())
    columns = [_column(role, array) for role, array in arrays.items()]
    # A NumPy float64 scalar would widen every product to float64.
    lr, gradient_scale = float(lr), float(gradient_scale)
    # lr m_hat / (sqrt(v_hat) + eps) = rate m / (sqrt(v) + floor)
    root = math.sqrt(1.0 - beta2**step)
    rate, floor = lr * root / (1.0 - beta1**step), eps * root
    gain1, gain2 = (1.0 - beta1) * gradient_scale, (1.0 - beta2) * gradient_scale**2
    keep = 1.0 - lr * weight_decay
    for c in row_chunks(columns[2]):
        p, g, first, second = (a[c, :] for a in columns)
        g = xp.astype(g, first.dtype, copy=False)
        t = empty_like(first)
        xp.multiply(first, beta1, out=first)
        xp.multiply(g, gain1, out=t)
        xp.add(first, t, out=first)
        xp.multiply(second, beta2, out=second)
        xp.multiply(g, gain2, out=t)
        xp.multiply(t, g, out=t)
        xp.add(second, t, out=second)
        xp.sqrt(second, out=t)
        xp.add(t, floor, out=t)
        xp.divide(first, t, out=t)
        xp.multiply(t, rate, out=t)
        if keep != 1.0:
            xp.multiply(p, keep, out=p)
        xp.subtract(p, xp.astype(t, p.dtype, copy=False), out=p)


def _check(arrays: dict[str, Array], step: int, betas: dict[str, float]) -> None:
    if step < 1:
        raise CountOutOfRange("adamw step", "1 or more", step)
    for role, beta in betas.items():
        if not 0.0 <= beta < 1.0:
            raise OutOfRange(role, "[0, 1)", beta)
    parameter, m, v = arrays["parameter"], arrays["m"], arrays["v"]
    for role, array in arrays.items():
        check_shape("adamw_update", role, array, tuple(parameter.shape))
    xp = namespace(*arrays.values())
    wide = xp.result_type(parameter.dtype, xp.float32)
    if not m.dtype == v.dtype == xp.result_type(m.dtype, wide):
        raise UnsupportedArray(
            f"adamw state for a {parameter.dtype} parameter must be {wide} or wider, "
            f"got m {m.dtype} and v {v.dtype}"
        )


def _column(role: str, array: Array) -> Array:
    try:
        return namespace(array).reshape(array, (-1, 1), copy=False)
    except (ValueError, AttributeError) as error:
        raise UnsupportedArray(
            f"adamw_update changes {role} in place, but shape {tuple(array.shape)} is not "
            "contiguous; pass a C-contiguous array"
        ) from error
