"""The paged key/value cache on the device: one array a layer, [num_pages, page_size, 2, kv_heads, head_dim].

Page 0 belongs to no request: padding rows write there. Keys and values of a token lie side by side, so that one scatter
writes both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax

from lora_jax.kernels.decode_attention import decode_attention
from lora_jax.kernels.prefill_attention import prefill_attention
from lora_jax.kernels.rope_cache import HeadNorms, lora_rope_to_cache, rope_to_cache
from lora_jax.kernels.tiled_expand import LoRASum, lora_add

from .config import CacheConfig

TRASH_PAGE = 0


def kv_shape(cache: CacheConfig, kv_heads: int, head_dim: int) -> tuple[int, ...]:
    return (cache.num_pages, cache.page_size, 2, kv_heads, head_dim)


@dataclass(frozen=True)
class DecodeInputs:
    """positions int32 [R] of the new tokens; block_tables int32 [R, P]. implementation: of all kernels of the step. items: of
    `SlotRanks`, None without adapters."""

    positions: jax.Array
    block_tables: jax.Array
    implementation: str
    items: jax.Array | None = None

    def attend(
        self,
        qkv: jax.Array | LoRASum,
        rope: tuple[jax.Array, jax.Array],
        kv: jax.Array,
        *,
        arrivals: jax.Array | None,
        heads: int,
        window: int | None,
        norms: HeadNorms | None,
    ) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        """qkv [R, C] or partial sums [S, R, C] -> (heads' outputs [R, H * D], kv with the new tokens, arrivals):
        `decode_attention`."""
        if isinstance(qkv, LoRASum):
            qkv = lora_add(*qkv, implementation=self.implementation)
        given = (qkv, rope, kv, self.block_tables, self.positions, arrivals)
        how: dict[str, Any] = dict(heads=heads, scale=kv.shape[-1] ** -0.5, window=window, norms=norms)
        how["implementation"] = self.implementation
        return decode_attention(*given, **how)


@dataclass(frozen=True)
class PrefillInputs:
    """positions, sequences, index int32 [T] (sequence -1 and index in the trash page: padding); page_list int32 [3, N] and
    blocks int32 [4, B] as `prefill_attention` takes them. implementation: of all kernels of the step. items: of `SlotRanks`, None
    without adapters."""

    positions: jax.Array
    sequences: jax.Array
    index: jax.Array
    page_list: jax.Array
    blocks: jax.Array
    implementation: str
    items: jax.Array | None = None

    def attend(
        self,
        qkv: jax.Array | LoRASum,
        rope: tuple[jax.Array, jax.Array],
        kv: jax.Array,
        *,
        arrivals: jax.Array | None,
        heads: int,
        window: int | None,
        norms: HeadNorms | None,
    ) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        """qkv [T, C] or partial sums [S, T, C] -> (heads' outputs [T, H * D], kv with the new tokens, arrivals as they were)."""
        how: dict[str, Any] = dict(heads=heads, norms=norms, implementation=self.implementation)
        if isinstance(qkv, LoRASum):
            q, kv = lora_rope_to_cache(*qkv, rope, kv, self.index, **how)
        else:
            q, kv = rope_to_cache(qkv, rope, kv, self.index, **how)
        out = prefill_attention(
            q,
            kv,
            self.positions,
            self.sequences,
            self.page_list,
            self.blocks,
            scale=q.shape[-1] ** -0.5,
            window=window,
            implementation=self.implementation,
        )
        return out.reshape(out.shape[0], -1), kv, arrivals
