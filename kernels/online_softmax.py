"""What decode and prefill attention share: how scores are made, and, for the plain-JAX forms, an online softmax over chunks of
pages.

Cost follows the longest live context, not the table's width: the chunk loop has a dynamic trip count. A chunk that is masked
for a row adds exact zeros to it, so a row's bits do not depend on the other rows' lengths.
Sources: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018; Dao et al., FlashAttention, 2022.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from .in_kernel import dot

NEG = -1e30  # finite: exp(NEG - NEG) is 1, not NaN, and is multiplied by an empty sum
Score = Callable[[jax.Array], jax.Array]  # from products of queries and keys to scores


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


def scored(products: jax.Array, scale: float, softcap: float | None) -> jax.Array:
    """Scores from the products of queries and keys, float32: scaled, and with a soft cap pressed into (-softcap, softcap)
    (Gemma Team, "Gemma 2", 2024)."""
    scores = products * scale
    return scores if softcap is None else softcap * jnp.tanh(scores / softcap)


def softmax_step(state, scores: jax.Array, seen: jax.Array, values: jax.Array):
    """Inside kernels, one step for n queries: state (largest score [n], sum [n], weighted values [n, D]), scores float32 [n, T],
    seen broadcastable to them, values [T, D], multiplied on tensor cores unless they are float32."""
    m, n, acc = state
    scores = jnp.where(seen, scores, NEG)
    m_new = jnp.maximum(m, jnp.max(scores, axis=1))
    p = jnp.where(seen, jnp.exp(scores - m_new[:, None]), 0.0)
    fade = jnp.exp(m - m_new)
    weighed = dot(p.astype(values.dtype), values)
    return m_new, n * fade + jnp.sum(p, axis=1), acc * fade[:, None] + weighed


def visible(key_pos: jax.Array, query_pos: jax.Array, window: int | None) -> jax.Array:
    mask = key_pos <= query_pos
    return mask if window is None else mask & (key_pos > query_pos - window)
