"""The paged key/value cache on the device: one array a layer, [num_pages, page_size, 2, kv_heads, head_dim].

Page 0 belongs to no request: padding rows write there. Keys and values of a token lie side by side, so that one scatter
writes both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from lora_jax.kernels.paged_attention import paged_decode_attention
from lora_jax.kernels.paged_prefill import paged_prefill_attention

from .config import CacheConfig

TRASH_PAGE = 0


def kv_shape(cache: CacheConfig, kv_heads: int, head_dim: int) -> tuple[int, ...]:
    return (cache.num_pages, cache.page_size, 2, kv_heads, head_dim)


def write_kv(kv: jax.Array, k: jax.Array, v: jax.Array, index: jax.Array) -> jax.Array:
    """kv with tokens' k, v [T, K, D] stored at index int32 [T] = page * page_size + offset."""
    pair = jnp.stack([k, v], 1)
    if index.shape[0] == 1:  # XLA rewrites a scatter of one row into a form that copies the whole cache: write it twice
        index, pair = jnp.repeat(index, 2), jnp.repeat(pair, 2, 0)
    return kv.at[index // kv.shape[1], index % kv.shape[1]].set(pair, mode="promise_in_bounds")


@dataclass(frozen=True)
class DecodeInputs:
    """positions int32 [R] of the new tokens; block_tables int32 [R, P]."""

    positions: jax.Array
    block_tables: jax.Array

    def attend(self, implementation: str) -> Callable:
        def attend(q, k, v, kv, window):
            page_size = kv.shape[1]
            pages = jnp.take_along_axis(self.block_tables, self.positions[:, None] // page_size, 1)[:, 0]
            kv = write_kv(kv, k, v, pages * page_size + self.positions % page_size)
            scale = q.shape[-1] ** -0.5
            out = paged_decode_attention(
                q,
                kv,
                self.block_tables,
                self.positions,
                scale=scale,
                window=window,
                implementation=implementation,
            )
            return out, kv

        return attend


@dataclass(frozen=True)
class PrefillInputs:
    """positions, sequences, index int32 [T] (sequence -1 and index in the trash page: padding); page_list int32 [3, N]
    as `paged_prefill_attention` takes it."""

    positions: jax.Array
    sequences: jax.Array
    index: jax.Array
    page_list: jax.Array

    def attend(self) -> Callable:
        def attend(q, k, v, kv, window):
            kv = write_kv(kv, k, v, self.index)
            out = paged_prefill_attention(
                q, kv, self.positions, self.sequences, self.page_list, scale=q.shape[-1] ** -0.5, window=window
            )
            return out, kv

        return attend
