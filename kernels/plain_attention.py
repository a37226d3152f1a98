"""Decode attention over a paged KV cache in plain JAX; letters as in `decode_attention`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from .online_softmax import Score, chunk_pages, online_softmax, visible
from .rope_cache import rotate_heads, split_heads, write_tokens


def plain_decode_attention(qkv, rope, kv, tables, positions, heads, score: Score, window, norms):
    if qkv.ndim == 3:
        qkv = jnp.sum(qkv, axis=0).astype(kv.dtype)
    q, k, v = rotate_heads(*split_heads(qkv, kv, heads), rope, norms)
    page_size = kv.shape[1]
    pages = jnp.take_along_axis(tables, positions[:, None] // page_size, 1)[:, 0]
    kv = write_tokens(kv, k, v, pages * page_size + positions % page_size)
    return _attend_pages(q, kv, tables, positions, score, window).reshape(q.shape[0], -1), kv


def _attend_pages(q, kv, tables, positions, score: Score, window: int | None) -> jax.Array:
    """q [R, H, D] over all tokens up to each row's position: [R, H, D]."""
    r, h, d = q.shape
    _, page_size, _, k_heads, _ = kv.shape
    c = chunk_pages(tables.shape[1], page_size, 256)
    tables = jnp.pad(tables, ((0, 0), (0, -tables.shape[1] % c)))  # a clamped slice would shift positions
    s = c * page_size
    q_rkgd = q.reshape(r, k_heads, h // k_heads, d)

    def chunk(i):
        pages = lax.dynamic_slice(tables, (0, i * c), (r, c))
        kv_rs2kd = kv[pages].reshape(r, s, 2, k_heads, d)
        mask_rs = visible(i * s + jnp.arange(s)[None], positions[:, None], window)
        scores = score(jnp.einsum("rkgd,rskd->rkgs", q_rkgd, kv_rs2kd[:, :, 0], preferred_element_type=jnp.float32))
        # a page may hold another request's leftovers: 0 * NaN would still be NaN
        values = jnp.where(mask_rs[:, :, None, None], kv_rs2kd[:, :, 1], 0)
        return scores, mask_rs[:, None, None, :], values

    def weigh(p, values):
        return jnp.einsum("rkgs,rskd->rkgd", p.astype(values.dtype), values, preferred_element_type=jnp.float32)

    out = online_softmax(positions.max() // s + 1, (r, k_heads, h // k_heads), d, chunk, weigh)
    return out.reshape(r, h, d).astype(q.dtype)
