"""The residual add and the RMSNorm after it as one kernel, which also sums the partial sums of the product before it.

Letters: R rows, D features, S partial sums. Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from . import lora_layout as layout
from .tuning import norm_warps


# ---- 1. the public op ------------------------------------------------------------------------------------------------
@functools.partial(jax.jit, static_argnames=("eps", "implementation", "interpret"))
def add_rms_norm(
    x: jax.Array,
    y: jax.Array | None,
    scale: jax.Array,
    *,
    eps: float,
    implementation: str = "triton",
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """(x + y, scale * (x + y) / rms(x + y)), both [R, D] in x's dtype.

    x [R, D]; y [R, D] of x's dtype, float32 partial sums [S, R, D] whose sum is rounded to x's dtype first, or None (0);
    scale [D] of x's dtype. The norm is computed in float32 and rounded to x's dtype before it is scaled, as transformers does.
    A row's bits do not depend on the other rows. Raises: ValueError naming the operand.
    """
    layout.check_implementation("add_rms_norm", implementation)
    if x.ndim != 2 or scale.shape != x.shape[1:] or scale.dtype != x.dtype:
        raise ValueError(
            f"add_rms_norm: needs x [R, D] and scale [D] of one dtype, got {x.dtype} {x.shape} and "
            f"{scale.dtype} {scale.shape}"
        )
    if y is not None and (
        y.ndim not in (2, 3) or y.shape[-2:] != x.shape or y.dtype != (x.dtype if y.ndim == 2 else jnp.float32)
    ):
        raise ValueError(
            f"add_rms_norm: y must be {x.dtype} {x.shape} or float32 partial sums of it, got {y.dtype} {y.shape}"
        )
    if implementation == "xla":
        return _xla(x, y, scale, eps)
    return _triton(x, y, scale, eps=eps, interpret=interpret)


# ---- 2. the kernel ---------------------------------------------------------------------------------------------------
def _kernel(*refs, eps: float, parts: int | None):
    """Program (row). refs: x [R, D], y [S, R, D] or [R, D] or absent, scale [D]; sums [R, D], normed [R, D]."""
    x, scale, (total, normed) = refs[0], refs[-3], refs[-2:]
    row = pl.program_id(0)
    size, dtype = x.shape[1], x.dtype
    d = lax.iota(jnp.int32, 1 << (size - 1).bit_length())
    inside, at = d < size, (jnp.full(d.shape, row), d)
    load = lambda ref, *index: plgpu.load(ref.at[*index], mask=inside, other=0)  # noqa: E731
    v = load(x, *at).astype(jnp.float32)
    if parts is not None:
        y = refs[1]
        if parts:
            added = load(y, jnp.zeros_like(d), *at)
            for s in range(1, parts):
                added += load(y, jnp.full_like(d, s), *at)
            added = added.astype(dtype)
        else:
            added = load(y, *at)
        v = (v + added.astype(jnp.float32)).astype(dtype)
        plgpu.store(total.at[*at], v, mask=inside)
        v = v.astype(jnp.float32)
    inverse = lax.rsqrt(jnp.sum(v * v) / size + eps)
    plgpu.store(normed.at[*at], (v * inverse).astype(dtype) * load(scale, d), mask=inside)


# ---- 3. the call -----------------------------------------------------------------------------------------------------
def _triton(x, y, scale, *, eps: float, interpret: bool) -> tuple[jax.Array, jax.Array]:
    parts = None if y is None else y.shape[0] if y.ndim == 3 else 0
    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    total, normed = pl.pallas_call(
        functools.partial(_kernel, eps=eps, parts=parts),
        out_shape=(out, out),
        grid=(x.shape[0],),
        compiler_params=plgpu.CompilerParams(num_warps=norm_warps(*x.shape), num_stages=1),
        name="add_rms_norm",
        interpret=interpret,
    )(*(v for v in (x, y, scale) if v is not None))
    return x if y is None else total, normed


# ---- 4. the plain-JAX form -------------------------------------------------------------------------------------------
def _xla(x, y, scale, eps: float) -> tuple[jax.Array, jax.Array]:
    if y is not None:
        x = x + (jnp.sum(y, axis=0).astype(x.dtype) if y.ndim == 3 else y)
    return x, rms_norm(x, scale, eps)


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """x [..., D] normed over its last axis, in float32, rounded to x's dtype and scaled by scale [D]."""
    x32 = x.astype(jnp.float32)
    return scale * (x32 * lax.rsqrt(jnp.mean(x32 * x32, -1, keepdims=True) + eps)).astype(x.dtype)
