"""Prefill attention over a paged KV cache, and the online softmax over chunks of pages that the plain-JAX forms share.

Dimension letters: R rows, T flat tokens, N pages of a flat list, H query heads, K key/value heads,
G = H // K, D head size, C pages a chunk, S = C * page_size tokens a chunk.

Cost follows the longest live context, not the table's width: the chunk loop has a dynamic trip count. A chunk that is masked
for a row adds exact zeros to it, so a row's bits do not depend on the other rows' lengths.
Source of the method: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018; Dao et al., FlashAttention, 2022.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

NEG = -1e30  # finite: exp(NEG - NEG) is 1, not NaN, and is multiplied by an empty sum


def chunk_pages(num_pages: int, page_size: int, tokens: int) -> int:
    return max(1, min(num_pages, tokens // page_size))


def online_softmax(
    steps: jax.Array,
    rows: tuple[int, ...],
    head_dim: int,
    chunk: Callable[[jax.Array], tuple[jax.Array, jax.Array, jax.Array]],
    weigh: Callable[[jax.Array, jax.Array], jax.Array],
) -> jax.Array:
    """chunk(i) -> (scores [*rows, S] float32, mask broadcastable to scores, values); weigh(p, values) -> [*rows, D] float32."""

    def body(i, carry):
        m, norm, acc = carry
        scores, mask, values = chunk(i)
        scores = jnp.where(mask, scores, NEG)
        m_new = jnp.maximum(m, scores.max(-1))
        p = jnp.where(mask, jnp.exp(scores - m_new[..., None]), 0.0)
        fade = jnp.exp(m - m_new)
        return m_new, norm * fade + p.sum(-1), acc * fade[..., None] + weigh(p, values)

    start = (
        jnp.full(rows, NEG, jnp.float32),
        jnp.zeros(rows, jnp.float32),
        jnp.zeros((*rows, head_dim), jnp.float32),
    )
    _, norm, acc = lax.fori_loop(0, steps, body, start)
    return acc / jnp.maximum(norm, 1e-30)[..., None]


def visible(key_pos: jax.Array, query_pos: jax.Array, window: int | None) -> jax.Array:
    mask = key_pos <= query_pos
    return mask if window is None else mask & (key_pos > query_pos - window)


def paged_prefill_attention(
    q: jax.Array,
    kv: jax.Array,
    positions: jax.Array,
    sequences: jax.Array,
    page_list: jax.Array,
    *,
    scale: float,
    window: int | None = None,
) -> jax.Array:
    """Flat tokens of several sequences, each against its own sequence's pages (earlier chunks included).

    q [T, H, D]; kv [pages, page_size, 2, K, D]; positions, sequences int32 [T] (sequence -1: padding);
    page_list int32 [3, N]: page id, sequence (-1: unused; used entries come first), position of the page's first token.
    Returns [T, H, D] in q's dtype; padding rows are zero.
    """
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
        scores = jnp.einsum("kgtd,skd->kgts", q_kgtd, kv_s2kd[:, 0], preferred_element_type=jnp.float32) * scale
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
