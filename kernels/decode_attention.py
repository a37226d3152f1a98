"""Decode attention over a paged KV cache, from the fused q, k, v projection to the heads' outputs in one kernel.

Norms q and k where the model does, rotates them, writes the new key and value into the cache, and attends: one new token a row
against that row's pages. Letters: R rows, P pages of a block table, H query heads, K key/value heads, G = H // K, D head size,
S partial sums of the projection, C parts of a row's context, T tokens a step. Only pages in use are read; cost follows the real
lengths. Sources: Su et al., "RoFormer", 2021; Dao et al., "Flash-Decoding for long-context inference", 2023.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from . import lora_layout as layout
from .arrivals import check_arrivals, when_last
from .in_kernel import dot, full
from .online_softmax import NEG, Score, scored, softmax_step
from .plain_attention import plain_decode_attention
from .rope_cache import HeadNorms, check_heads, rotate
from .tuning import attention_tiles


# ---- 1. the public op ------------------------------------------------------------------------------------------------
@functools.partial(jax.jit, static_argnames=("heads", "scale", "window", "softcap", "implementation", "interpret"))
def decode_attention(
    qkv: jax.Array,
    rope: tuple[jax.Array, jax.Array],
    kv: jax.Array,
    block_tables: jax.Array,
    positions: jax.Array,
    arrivals: jax.Array | None,
    *,
    heads: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    norms: HeadNorms | None = None,
    implementation: str = "triton",
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """(heads' outputs [R, H * D], kv with the new keys and values, arrivals for the next call).

    qkv [R, (H + 2K) * D] of kv's dtype (q heads, then k, then v), or float32 partial sums [S, R, (H + 2K) * D] of it;
    rope: cos and sin, float32 [R, D / 2]; kv [pages, page_size, 2, K, D], donated by the caller or copied;
    block_tables int32 [R, P]; positions int32 [R] of the new tokens; arrivals: of `new_arrivals`, R * K at least, donated by
    the caller or copied, or None where no context is split (`attention_tiles`). window: how many tokens back a query sees,
    itself included. softcap: see `scored`.
    A row's bits do not depend on the other rows. Raises: ValueError naming the operand.
    """
    layout.check_implementation("decode_attention", implementation)
    check_heads("decode_attention", qkv, rope, kv, heads, norms)
    rows = qkv.shape[-2]
    for name, x, shape in (("block_tables", block_tables, (rows, None)), ("positions", positions, (rows,))):
        if x.dtype != jnp.int32 or x.ndim != len(shape) or x.shape[0] != rows:
            raise ValueError(f"decode_attention: {name} must be int32 with {rows} rows, got {x.dtype} {x.shape}")
    score = functools.partial(scored, scale=scale, softcap=softcap)
    if implementation == "xla":
        out, kv = plain_decode_attention(qkv, rope, kv, block_tables, positions, heads, score, window, norms)
        return out, kv, arrivals
    return _triton(qkv, rope, kv, block_tables, positions, arrivals, heads, score, window, norms, interpret)


# ---- 2. the kernel ---------------------------------------------------------------------------------------------------
class _Head(NamedTuple):
    """A row, and the dimensions of a head: size D; dim and partner (the other half's) int32 [D padded]."""

    row: jax.Array
    size: int
    dim: jax.Array
    partner: jax.Array


def _projected(qkv, at_row, column, mask) -> jax.Array:
    """qkv[row, column], partial sums added up (float32)."""
    if len(qkv.shape) == 2:
        return plgpu.load(qkv.at[full(at_row, column.shape), column], mask=mask, other=0)
    parts = [
        plgpu.load(qkv.at[full(s, column.shape), full(at_row, column.shape), column], mask=mask, other=0)
        for s in range(qkv.shape[0])
    ]
    return functools.reduce(jnp.add, parts)


def _rotated(qkv, cos, sin, norm, eps, base, p: _Head, dtype) -> jax.Array:
    """Heads that begin at columns `base` [n, 1], normed and rotated: [n, D padded] of dtype."""
    shape = (base.shape[0], p.dim.shape[0])
    dim, partner = jnp.broadcast_to(p.dim[None], shape), jnp.broadcast_to(p.partner[None], shape)
    inside, at_row = dim < p.size, full(p.row, shape)
    x, other = (_projected(qkv, p.row, base + at, inside).astype(dtype) for at in (dim, partner))
    of = lambda ref, *at: plgpu.load(ref.at[at], mask=inside, other=0)  # noqa: E731
    scale = None if norm is None else lambda dims: of(norm, dims)
    return rotate(
        x, other, dim, partner, p.size, lambda a: of(cos, at_row, a), lambda a: of(sin, at_row, a), scale, eps or 0.0
    )


def _kernel(
    *refs,
    heads: int,
    score: Score,
    window: int | None,
    eps: float | None,
    tiles,
    interpret: bool,
):
    """Program (row, KV head, part): the head's G queries over one part of the row's tokens; part 0 also the new token. The last
    part of a head to finish joins them.

    refs: qkv, cos, sin, kv [pages, page_size, 2, K, D], tables [R, P], positions [R], with eps also the scales of q's and k's
    norm [D], with several parts arrivals; then out [R, H, D], kv again, the same memory, with
    several parts those: values [C, R, H, D], top and total [C, R, H] float32 (the largest score, the sum of exp(score - top)),
    and arrivals again.
    """
    qkv, cos, sin, kv, tables, positions = refs[:6]
    q_norm, k_norm = refs[6:8] if eps is not None else (None, None)
    out, kv_out, *joined = refs[-2:] if tiles.parts == 1 else refs[-6:]
    row, head, part = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    page_size, kv_heads, size = kv.shape[1], kv.shape[3], kv.shape[4]
    group, dtype = heads // kv_heads, kv.dtype
    padded = 1 << (size - 1).bit_length()
    g_pad = 1 if tiles.vector else max(16, 1 << (group - 1).bit_length())
    dim = lax.iota(jnp.int32, padded)
    p = _Head(row, size, dim, jnp.where(dim < size // 2, dim + size // 2, dim - size // 2))
    position = positions[row]
    first = 0 if window is None else jnp.maximum(position - window + 1, 0)
    step0, steps = lax.div(first, tiles.step_tokens) if window is not None else 0, pl.cdiv(position, tiles.step_tokens)
    begin, end = step0, steps
    if tiles.parts > 1:
        share = pl.cdiv(jnp.maximum(steps - step0, 0), tiles.parts)
        begin = step0 + part * share
        end = jnp.minimum(begin + share, steps)

    def pages(step):
        """Page of each token of a step, int32 [T]. Needs no position, so that its latency is not added to that of others;
        a step past the row's tokens gives pages that nobody reads."""
        t = step * tiles.step_tokens + lax.iota(jnp.int32, tiles.step_tokens)
        return tables[full(row, t.shape), jnp.minimum(lax.div(t, page_size), tables.shape[1] - 1)]

    def keys_and_values(step, page):
        """Tokens of one step on their pages: which are seen [T], keys and values [T, D padded]."""
        t = step * tiles.step_tokens + lax.iota(jnp.int32, tiles.step_tokens)
        seen = (t < position) & (t >= first)
        shape = (tiles.step_tokens, padded)
        mask = seen[:, None] & (dim < size)[None]  # what is not seen is not read: a page may hold another row's NaN
        at = [jnp.broadcast_to(i, shape) for i in (page[:, None], lax.rem(t, page_size)[:, None])]
        d = jnp.broadcast_to(dim[None], shape)
        k = plgpu.load(kv.at[*at, full(0, shape), full(head, shape), d], mask=mask, other=0)
        return seen, k, plgpu.load(kv.at[*at, full(1, shape), full(head, shape), d], mask=mask, other=0)

    # With lanes, keys and values come a step ahead, too: the first before the projection is read.
    ahead = 1 if tiles.lanes else 0
    ready = keys_and_values(begin, pages(begin)) if ahead else ()
    page = pages(begin + ahead)

    # The new token: written by part 0, and attended to from registers.
    g = lax.iota(jnp.int32, g_pad)
    q_gd = _rotated(qkv, cos, sin, q_norm, eps, (head * group + jnp.minimum(g, group - 1))[:, None] * size, p, dtype)
    k_1d = _rotated(qkv, cos, sin, k_norm, eps, full((heads + head) * size, (1, 1)), p, dtype)
    v_1d = _projected(qkv, row, (heads + kv_heads + head) * size + dim[None], (dim < size)[None]).astype(dtype)
    own = part == 0

    @pl.when(own)
    def _():
        page = tables[row, lax.div(position, page_size)]
        at = [full(i, (1, padded)) for i in (page, lax.rem(position, page_size))]
        inside = (dim < size)[None]
        for i, value in enumerate((k_1d, v_1d)):
            index = (*at, full(i, (1, padded)), full(head, (1, padded)), dim[None])
            plgpu.store(kv_out.at[*index], value, mask=inside)

    m = score(jnp.sum(q_gd.astype(jnp.float32) * k_1d.astype(jnp.float32), axis=1))
    state = (
        jnp.where(own, m, NEG),
        jnp.where(own, jnp.ones((g_pad,), jnp.float32), 0.0),
        jnp.where(own, jnp.broadcast_to(v_1d.astype(jnp.float32), (g_pad, padded)), 0.0),
    )
    attend = _attend_lanes if tiles.lanes else _attend_one if tiles.vector else _attend_group

    def body(step, carry):
        state, page, ready = carry
        following = pages(step + ahead + 1)
        loaded = keys_and_values(step + ahead, page)
        return attend(q_gd, score, state, *(ready if ahead else loaded)), following, loaded if ahead else ()

    begun = _no_lanes(tiles.step_tokens, padded) if tiles.lanes else state
    found = lax.fori_loop(begin, end, body, (begun, page, ready))[0]
    m, n, acc = _join_lanes(state, found) if tiles.lanes else found
    shape = (g_pad, padded)
    in_g, at_head = g < group, head * group + g
    inside = in_g[:, None] & (dim < size)[None]
    at = (full(row, shape), full(at_head[:, None], shape), full(dim[None], shape))

    def store(total, values) -> None:
        plgpu.store(out.at[*at], (values / total[:, None]).astype(out.dtype), mask=inside)

    if tiles.parts == 1:
        store(n, acc)
        return
    values, top, total, arrivals = joined
    in_row = (full(row, g.shape), at_head)
    plgpu.store(values.at[full(part, shape), *at], acc, mask=inside)
    plgpu.store(top.at[full(part, g.shape), *in_row], m, mask=in_g)
    plgpu.store(total.at[full(part, g.shape), *in_row], n, mask=in_g)

    def join() -> None:
        parts = range(tiles.parts)
        of = lambda ref, i: plgpu.load(ref.at[full(i, g.shape), *in_row], mask=in_g, other=0)  # noqa: E731
        tops = [of(top, i) for i in parts]
        best = functools.reduce(jnp.maximum, tops)
        weights = [jnp.exp(t - best) for t in tops]
        sums = (plgpu.load(values.at[full(i, shape), *at], mask=inside, other=0) * weights[i][:, None] for i in parts)
        store(functools.reduce(jnp.add, [of(total, i) * weights[i] for i in parts]), functools.reduce(jnp.add, sums))

    when_last(arrivals, row * kv_heads + head, tiles.parts, join, interpret=interpret)


def _attend_group(q_gd, score: Score, state, seen, k_td, v_td):
    """One step of the online softmax for G queries, on tensor cores."""
    return softmax_step(state, score(dot(q_gd, k_td.T)), seen[None, :], v_td)


def _attend_one(q_1d, score: Score, state, seen, k_td, v_td):
    """The same for one query, without them: less latency."""
    m, n, acc = state
    s_t = score(jnp.sum(k_td.astype(jnp.float32) * q_1d.astype(jnp.float32), axis=1))
    s_t = jnp.where(seen, s_t, NEG)
    m_new = jnp.maximum(m, jnp.max(s_t))
    p_t = jnp.where(seen, jnp.exp(s_t - m_new), 0.0)
    fade = jnp.exp(m - m_new)
    pv_d = jnp.sum(p_t[:, None] * v_td.astype(jnp.float32), axis=0)
    return m_new, n * fade + jnp.sum(p_t), acc * fade[:, None] + pv_d[None]


def _attend_lanes(q_1d, score: Score, state, seen, k_td, v_td):
    """The same with a softmax of its own for each place in a step, so that no thread waits for another before the end: state
    (largest score [T], sum [T], weighted values [T, D])."""
    m_t, n_t, acc_td = state
    s_t = score(jnp.sum(k_td.astype(jnp.float32) * q_1d.astype(jnp.float32), axis=1))
    s_t = jnp.where(seen, s_t, NEG)
    m_new = jnp.maximum(m_t, s_t)
    p_t = jnp.where(seen, jnp.exp(s_t - m_new), 0.0)
    fade = jnp.exp(m_t - m_new)
    return m_new, n_t * fade + p_t, acc_td * fade[:, None] + p_t[:, None] * v_td.astype(jnp.float32)


def _no_lanes(tokens: int, size: int):
    """The state of `_attend_lanes` before any token."""
    zeros = jnp.zeros((tokens,), jnp.float32)
    return jnp.full((tokens,), NEG), zeros, jnp.zeros((tokens, size), jnp.float32)


def _join_lanes(state, lanes):
    """`lanes` added to a state of one query."""
    (m, n, acc), (m_t, n_t, acc_td) = state, lanes
    top = jnp.maximum(m, jnp.max(m_t))
    w, w_t = jnp.exp(m - top), jnp.exp(m_t - top)
    return top, n * w + jnp.sum(n_t * w_t), acc * w[:, None] + jnp.sum(acc_td * w_t[:, None], axis=0)[None]


# ---- 3. the call -----------------------------------------------------------------------------------------------------
def _triton(qkv, rope, kv, tables, positions, arrivals, heads, score: Score, window, norms, interpret):
    rows, (kv_heads, size) = qkv.shape[-2], kv.shape[3:]
    context = tables.shape[1] * kv.shape[1]
    tiles = attention_tiles(rows, kv_heads, heads // kv_heads, context, size, kv.dtype.itemsize)
    given = [qkv, *rope, kv, tables, positions, *(() if norms is None else (norms.q, norms.k))]
    like = jax.ShapeDtypeStruct
    results, aliases = [like((rows, heads, size), kv.dtype), like(kv.shape, kv.dtype)], {3: 1}
    if tiles.parts > 1:
        check_arrivals("decode_attention", arrivals, rows * kv_heads)
        given.append(arrivals)
        results.append(like((tiles.parts, rows, heads, size), jnp.float32))
        results += [like((tiles.parts, rows, heads), jnp.float32)] * 2 + [like(arrivals.shape, arrivals.dtype)]
        aliases[len(given) - 1] = len(results) - 1
    out, kv, *rest = pl.pallas_call(
        functools.partial(
            _kernel,
            heads=heads,
            score=score,
            window=window,
            eps=None if norms is None else norms.eps,
            tiles=tiles,
            interpret=interpret,
        ),
        out_shape=results,
        grid=(rows, kv_heads, tiles.parts),
        input_output_aliases=aliases,
        compiler_params=plgpu.CompilerParams(num_warps=tiles.num_warps, num_stages=tiles.num_stages),
        name="decode_attention",
        interpret=interpret,
    )(*given)
    return out.reshape(rows, -1), kv, rest[-1] if rest else arrivals
