"""Decode attention over a paged KV cache: one new token a row against that row's pages.

Letters: R rows, P pages of a block table, H query heads, K key/value heads, G = H // K, D head size, C parts of a row's
context, S tokens a step. Both forms read only the pages in use; cost follows the real lengths.
Source of the method: Dao et al., "Flash-Decoding for long-context inference", 2023.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from . import lora_layout as layout
from .paged_prefill import NEG, chunk_pages, online_softmax, visible

PROGRAMS = 256  # wanted in a grid: enough for every multiprocessor of the largest cards
STEP_TOKENS = 64
MAX_PARTS = 16


# ---- 1. the public op ------------------------------------------------------------------------------------------------
def paged_decode_attention(
    q: jax.Array,
    kv: jax.Array,
    block_tables: jax.Array,
    positions: jax.Array,
    *,
    scale: float,
    window: int | None = None,
    implementation: str = "triton",
    interpret: bool = False,
) -> jax.Array:
    """Softmax attention of one query a row over the row's own tokens.

    q [R, H, D]; kv [pages, page_size, 2, K, D] of the same dtype; block_tables int32 [R, P]; positions int32 [R]: position of
    the new token, whose own key and value are in the cache already. window: how many tokens back a query sees, itself
    included. Returns [R, H, D] in q's dtype. A row's bits do not depend on the other rows.

    Raises: ValueError naming the operand.
    """
    layout.check_implementation("paged_decode_attention", implementation)
    if q.ndim != 3 or kv.ndim != 5 or kv.shape[2] != 2 or q.shape[2] != kv.shape[4] or q.shape[1] % kv.shape[3]:
        raise ValueError(
            f"paged_decode_attention: needs q [R, H, D] and kv [pages, page_size, 2, K, D], got {q.shape} and {kv.shape}"
        )
    if q.dtype != kv.dtype:
        raise ValueError(f"paged_decode_attention: kv must have the dtype of q ({q.dtype}), got {kv.dtype}")
    for name, x, shape in (("block_tables", block_tables, (q.shape[0], None)), ("positions", positions, (q.shape[0],))):
        if x.dtype != jnp.int32 or x.ndim != len(shape) or x.shape[0] != shape[0]:
            raise ValueError(
                f"paged_decode_attention: {name} must be int32 with {q.shape[0]} rows, got {x.dtype} {x.shape}"
            )
    if implementation == "xla":
        return _xla(q, kv, block_tables, positions, scale, window)
    return _triton(q, kv, block_tables, positions, scale=scale, window=window, interpret=interpret)


# ---- 2. the kernel ---------------------------------------------------------------------------------------------------
def _kernel(
    q,  # [R, H, D]
    kv,  # [pages, page_size, 2, K, D]
    tables,  # [R, P] int32
    positions,  # [R] int32
    out,  # [C, R, H, D] float32, or of q's dtype where C is 1
    top,  # [C, R, H] float32: the largest score
    norm,  # [C, R, H] float32: sum of exp(score - top)
    *,
    scale: float,
    window: int | None,
    parts: int,
):
    """Program (row, KV head, part): the head's G queries over one part of the row's tokens."""
    row, head, part = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    group, dim, page_size = q.shape[1] // kv.shape[3], q.shape[2], kv.shape[1]
    g_pad, d_pad = max(16, 1 << (group - 1).bit_length()), max(16, 1 << (dim - 1).bit_length())
    in_g, in_d = lax.iota(jnp.int32, g_pad) < group, lax.iota(jnp.int32, d_pad) < dim
    heads, dims = pl.ds(head * group, g_pad), pl.ds(0, d_pad)
    precision = lax.Precision.HIGHEST if q.dtype == jnp.float32 else lax.Precision.DEFAULT
    q_gd = plgpu.load(q.at[row, heads, dims], mask=in_g[:, None] & in_d[None, :], other=0)
    position = positions[row]
    first = 0 if window is None else jnp.maximum(position - window + 1, 0)
    step0, steps = first // STEP_TOKENS, position // STEP_TOKENS + 1
    share = (steps - step0 + parts - 1) // parts
    begin = step0 + part * share

    def body(step, carry):
        m, n, acc = carry
        t = step * STEP_TOKENS + lax.iota(jnp.int32, STEP_TOKENS)
        seen = (t <= position) & (t >= first)
        page = plgpu.load(tables.at[row, t // page_size], mask=seen, other=0)
        mask_sd = seen[:, None] & in_d[None, :]  # what is not seen is not read: a page may hold another row's NaN
        # index arrays throughout: interpret mode knows no mixture of arrays and slices
        at = [jnp.broadcast_to(x, mask_sd.shape) for x in (page[:, None], (t % page_size)[:, None])]
        d = jnp.broadcast_to(lax.iota(jnp.int32, d_pad)[None, :], mask_sd.shape)
        k_sd = plgpu.load(kv.at[*at, 0, head, d], mask=mask_sd, other=0)
        v_sd = plgpu.load(kv.at[*at, 1, head, d], mask=mask_sd, other=0)
        s_gs = jnp.dot(q_gd, k_sd.T, precision=precision, preferred_element_type=jnp.float32) * scale
        s_gs = jnp.where(seen[None, :], s_gs, NEG)
        m_new = jnp.maximum(m, jnp.max(s_gs, axis=1))
        p_gs = jnp.where(seen[None, :], jnp.exp(s_gs - m_new[:, None]), 0.0)
        fade = jnp.exp(m - m_new)
        pv_gd = jnp.dot(p_gs.astype(v_sd.dtype), v_sd, precision=precision, preferred_element_type=jnp.float32)
        return m_new, n * fade + jnp.sum(p_gs, axis=1), acc * fade[:, None] + pv_gd

    start = (
        jnp.full((g_pad,), NEG, jnp.float32),
        jnp.zeros((g_pad,), jnp.float32),
        jnp.zeros((g_pad, d_pad), jnp.float32),
    )
    m, n, acc = lax.fori_loop(begin, jnp.minimum(begin + share, steps), body, start)
    if parts == 1:
        acc = acc / n[:, None]
    plgpu.store(out.at[part, row, heads, dims], acc.astype(out.dtype), mask=in_g[:, None] & in_d[None, :])
    plgpu.store(top.at[part, row, heads], m, mask=in_g)
    plgpu.store(norm.at[part, row, heads], n, mask=in_g)


# ---- 3. the call -----------------------------------------------------------------------------------------------------
def _parts(rows: int, kv_heads: int, tokens: int) -> int:
    """Parts of a row's context: more where there are few rows and heads, never more than there are steps."""
    parts = 1
    while parts < MAX_PARTS and rows * kv_heads * parts < PROGRAMS and parts * STEP_TOKENS < tokens:
        parts *= 2
    return parts


def _triton(q, kv, block_tables, positions, *, scale: float, window: int | None, interpret: bool) -> jax.Array:
    (r, h, d), k_heads = q.shape, kv.shape[3]
    parts = _parts(r, k_heads, block_tables.shape[1] * kv.shape[1])
    out_dtype = q.dtype if parts == 1 else jnp.float32
    out, top, norm = pl.pallas_call(
        functools.partial(_kernel, scale=scale, window=window, parts=parts),
        out_shape=(
            jax.ShapeDtypeStruct((parts, r, h, d), out_dtype),
            jax.ShapeDtypeStruct((parts, r, h), jnp.float32),
            jax.ShapeDtypeStruct((parts, r, h), jnp.float32),
        ),
        grid=(r, k_heads, parts),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=2),
        name="paged_decode_attention",
        interpret=interpret,
    )(q, kv, block_tables, positions)
    if parts == 1:
        return out[0]
    weight = jnp.exp(top - jnp.max(top, axis=0))
    total = jnp.sum(norm * weight, axis=0)
    return (jnp.sum(out * weight[..., None], axis=0) / total[..., None]).astype(q.dtype)


# ---- 4. the plain-JAX form -------------------------------------------------------------------------------------------
def _xla(q, kv, block_tables, positions, scale: float, window: int | None) -> jax.Array:
    r, h, d = q.shape
    _, page_size, _, k_heads, _ = kv.shape
    c = chunk_pages(block_tables.shape[1], page_size, 256)
    tables = jnp.pad(block_tables, ((0, 0), (0, -block_tables.shape[1] % c)))  # a clamped slice would shift positions
    s = c * page_size
    q_rkgd = q.reshape(r, k_heads, h // k_heads, d)

    def chunk(i):
        pages = lax.dynamic_slice(tables, (0, i * c), (r, c))
        kv_rs2kd = kv[pages].reshape(r, s, 2, k_heads, d)
        mask_rs = visible(i * s + jnp.arange(s)[None], positions[:, None], window)
        scores = jnp.einsum("rkgd,rskd->rkgs", q_rkgd, kv_rs2kd[:, :, 0], preferred_element_type=jnp.float32) * scale
        # a page may hold another request's leftovers: 0 * NaN would still be NaN
        values = jnp.where(mask_rs[:, :, None, None], kv_rs2kd[:, :, 1], 0)
        return scores, mask_rs[:, None, None, :], values

    def weigh(p, values):
        return jnp.einsum("rkgs,rskd->rkgd", p.astype(values.dtype), values, preferred_element_type=jnp.float32)

    out = online_softmax(positions.max() // s + 1, (r, k_heads, h // k_heads), d, chunk, weigh)
    return out.reshape(r, h, d).astype(q.dtype)
