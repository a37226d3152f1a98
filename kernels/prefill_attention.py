"""Prefill attention over a paged KV cache: flat tokens of several sequences, each against its own sequence's pages.

The new tokens' keys and values lie in the cache already, earlier chunks and shared prefixes too. Letters: T flat tokens, N pages
of a flat list, B blocks of queries, H query heads, K key/value heads, G = H // K, D head size.
Source of the method: Dao et al., "FlashAttention", 2022.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from . import lora_layout as layout
from .in_kernel import dot
from .online_softmax import NEG, Score, chunk_pages, online_softmax, scored, softmax_step, visible

BLOCK_TOKENS = 64  # queries of one block, all of one sequence
STAGED_BYTES = 64 << 10  # keys and values in shared memory; the smallest cards have 99 KB


# ---- 1. the public op ------------------------------------------------------------------------------------------------
@functools.partial(jax.jit, static_argnames=("scale", "window", "softcap", "implementation", "interpret"))
def prefill_attention(
    q: jax.Array,
    kv: jax.Array,
    positions: jax.Array,
    sequences: jax.Array,
    page_list: jax.Array,
    blocks: jax.Array,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    implementation: str = "triton",
    interpret: bool = False,
) -> jax.Array:
    """Softmax attention, causal within each sequence. Returns [T, H, D] in q's dtype; padding tokens get zeros or garbage.

    q [T, H, D]; kv [pages, page_size, 2, K, D] of q's dtype; positions, sequences int32 [T] (sequence -1: padding);
    page_list int32 [3, N]: page id, sequence (-1: unused; used entries come first, those of a sequence side by side in order),
    position of the page's first token; blocks int32 [4, B]: first token, tokens (at most BLOCK_TOKENS, 0: unused), position of
    the first token, index of its sequence's first entry in the page list; together they hold every token once.
    window: how many tokens back a query sees, itself included. softcap: see `scored`. Raises: ValueError naming the operand.
    """
    layout.check_implementation("prefill_attention", implementation)
    if q.ndim != 3 or kv.ndim != 5 or kv.shape[2] != 2 or q.shape[2] != kv.shape[4] or q.shape[1] % kv.shape[3]:
        raise ValueError(
            f"prefill_attention: needs q [T, H, D] and kv [pages, page_size, 2, K, D], got {q.shape} and {kv.shape}"
        )
    if q.dtype != kv.dtype:
        raise ValueError(f"prefill_attention: kv must have the dtype of q ({q.dtype}), got {kv.dtype}")
    for name, x in (("positions", positions), ("sequences", sequences)):
        if x.dtype != jnp.int32 or x.shape != q.shape[:1]:
            raise ValueError(f"prefill_attention: {name} must be int32 [{q.shape[0]}], got {x.dtype} {x.shape}")
    for name, x, lead in (("page_list", page_list, 3), ("blocks", blocks, 4)):
        if x.dtype != jnp.int32 or x.ndim != 2 or x.shape[0] != lead:
            raise ValueError(f"prefill_attention: {name} must be int32 with {lead} rows, got {x.dtype} {x.shape}")
    score = functools.partial(scored, scale=scale, softcap=softcap)
    if implementation == "xla":
        return _xla(q, kv, positions, sequences, page_list, score, window)
    return _triton(q, kv, page_list[0], blocks, score=score, window=window, interpret=interpret)


# ---- 2. the kernel ---------------------------------------------------------------------------------------------------
def _kernel(
    q,  # [T, H, D]
    kv,  # [pages, page_size, 2, K, D]
    pages,  # [N] int32
    blocks,  # [4, B] int32
    out,  # [T, H, D]
    *,
    score: Score,
    window: int | None,
    block_q: int,
    block_t: int,
):
    """Program (part of a block, query head): block_q queries over all keys that they see, block_t at a time."""
    program, head = pl.program_id(0), pl.program_id(1)
    parts = BLOCK_TOKENS // block_q
    block, part = lax.div(program, parts), lax.rem(program, parts)
    start, tokens, position, entry = (blocks[i, block] for i in range(4))
    start, position = start + part * block_q, position + part * block_q
    tokens = jnp.clip(tokens - part * block_q, 0, block_q)
    page_size, size, group = kv.shape[1], kv.shape[4], q.shape[1] // kv.shape[3]
    padded = max(16, 1 << (size - 1).bit_length())

    @pl.when(tokens > 0)
    def _():
        shape = (block_q, padded)
        own = lax.iota(jnp.int32, block_q)
        d = lax.broadcasted_iota(jnp.int32, shape, 1)
        mask_qd = (lax.broadcasted_iota(jnp.int32, shape, 0) < tokens) & (d < size)
        at = (jnp.broadcast_to((start + own)[:, None], shape), jnp.full(shape, head), d)
        q_qd = plgpu.load(q.at[*at], mask=mask_qd, other=0)
        end = position + tokens
        first = 0 if window is None else lax.div(jnp.maximum(position - window + 1, 0), block_t)
        query = (position + own)[:, None]

        def body(i, carry):
            t = i * block_t + lax.iota(jnp.int32, block_t)
            written = t < end  # what is not written yet is not read: a page may hold another sequence's NaN
            page = plgpu.load(pages.at[entry + lax.div(t, page_size)], mask=written, other=0)
            shape = (block_t, padded)
            d = lax.broadcasted_iota(jnp.int32, shape, 1)
            mask_td = written[:, None] & (d < size)
            where = [jnp.broadcast_to(x[:, None], shape) for x in (page, lax.rem(t, page_size))]
            of = lambda half: (*where, jnp.full(shape, half), jnp.full(shape, lax.div(head, group)), d)  # noqa: E731
            k_td = plgpu.load(kv.at[*of(0)], mask=mask_td, other=0)
            v_td = plgpu.load(kv.at[*of(1)], mask=mask_td, other=0)
            s_qt = score(dot(q_qd, k_td.T))
            seen = visible(t[None], query, window) & (own < tokens)[:, None]
            return softmax_step(carry, s_qt, seen, v_td)

        begin = (
            jnp.full((block_q,), NEG, jnp.float32),
            jnp.zeros((block_q,), jnp.float32),
            jnp.zeros(shape, jnp.float32),
        )
        _, n, acc = lax.fori_loop(first, pl.cdiv(end, block_t), body, begin)
        plgpu.store(out.at[*at], (acc / jnp.maximum(n, 1e-30)[:, None]).astype(out.dtype), mask=mask_qd)


# ---- 3. the call -----------------------------------------------------------------------------------------------------
def _triton(q, kv, pages, blocks, *, score: Score, window: int | None, interpret: bool) -> jax.Array:
    (_, heads, size), item = q.shape, q.dtype.itemsize
    # float32 products run without tensor cores, where a large tile takes minutes to compile
    block_q = BLOCK_TOKENS if item < 4 else 16
    block_t = 64
    while block_t > 16 and 4 * block_t * max(16, 1 << (size - 1).bit_length()) * item > STAGED_BYTES:
        block_t //= 2
    return pl.pallas_call(
        functools.partial(_kernel, score=score, window=window, block_q=block_q, block_t=block_t),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        grid=(blocks.shape[1] * (BLOCK_TOKENS // block_q), heads),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=2),
        name="prefill_attention",
        interpret=interpret,
    )(q, kv, pages, blocks)


# ---- 4. the plain-JAX form -------------------------------------------------------------------------------------------
def _xla(q, kv, positions, sequences, page_list, score: Score, window: int | None) -> jax.Array:
    t, h, d = q.shape
    _, page_size, _, k_heads, _ = kv.shape
    c = chunk_pages(page_list.shape[1], page_size, 256)
    short = -page_list.shape[1] % c
    pages, owners, starts = (
        jnp.pad(row, (0, short), constant_values=v) for row, v in zip(page_list, (0, -1, 0), strict=True)
    )
    s = c * page_size
    q_kgtd = q.reshape(t, k_heads, h // k_heads, d).transpose(1, 2, 0, 3)

    def chunk(i):
        part = lambda x: lax.dynamic_slice(x, (i * c,), (c,))  # noqa: E731
        kv_s2kd = kv[part(pages)].reshape(s, 2, k_heads, d)
        key_pos = (part(starts)[:, None] + jnp.arange(page_size)[None]).reshape(s)
        owner = jnp.repeat(part(owners), page_size)
        mine = (owner[None] == sequences[:, None]) & (owner[None] >= 0)
        mask_ts = mine & visible(key_pos[None], positions[:, None], window)
        scores = score(jnp.einsum("kgtd,skd->kgts", q_kgtd, kv_s2kd[:, 0], preferred_element_type=jnp.float32))
        # One product serves all sequences, and 0 * NaN would be NaN: a value that is not finite counts as 0 there, and
        # makes the score of its own sequence NaN instead.
        finite = jnp.isfinite(kv_s2kd[:, 1])
        scores = jnp.where(finite.all((1, 2))[None, None, None], scores, jnp.nan)
        return scores, mask_ts[None, None], jnp.where(finite, kv_s2kd[:, 1], 0)

    def weigh(p, values):
        return jnp.einsum("kgts,skd->kgtd", p.astype(values.dtype), values, preferred_element_type=jnp.float32)

    used = (page_list[1] >= 0).sum()
    out = online_softmax((used + c - 1) // c, (k_heads, h // k_heads, t), d, chunk, weigh)
    return out.transpose(2, 0, 1, 3).reshape(t, h, d).astype(q.dtype)
