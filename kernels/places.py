"""Where the rank rows of an adapter lie: in places of Q rank rows, as many as its rank needs.

The stacks hold P places, a [L, P, n*Q, K] and b [L, P, Q, N]; a slot, which is what a row of a step names, owns up to C of them:
places int32 [S, C], -1: none, for adapters of up to R = C * Q ranks. Without such a table places are slots and Q is R. An item of
rank rows (`lora_items`) lies in one place: where C is more than 1, Q is a multiple of its rows. So device
memory follows the ranks that are loaded, not slots times the largest rank.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np


def own_places(slots: int) -> np.ndarray:
    """The table that says that places are slots."""
    return np.arange(slots, dtype=np.int32)[:, None]


def b_rows(places: np.ndarray, slot: np.ndarray, rank: np.ndarray, padded_rank: int) -> np.ndarray:
    """Rows of B [P * Q] of rank rows of slots; where a slot has no such place any that there is."""
    q = padded_rank // places.shape[1]
    return np.maximum(places[slot, rank // q], 0) * q + rank % q


def pieces(slot_ids: jax.Array, places: jax.Array | None) -> list[jax.Array]:
    """For each piece of Q ranks the place in which each row's adapter has it, -1: none [T]."""
    if places is None:
        return [slot_ids]
    own = places.at[slot_ids].get(mode="clip")
    return [jnp.where(slot_ids >= 0, own[:, i], -1) for i in range(places.shape[1])]


def check_places(op: str, places: jax.Array | None, ranks: int, item: int) -> None:
    """ranks: Q. item: rank rows of an item. Raises: ValueError naming them."""
    if places is None:
        return
    if places.dtype != jnp.int32 or places.ndim != 2 or 0 in places.shape:
        raise ValueError(f"{op}: places must be int32 [S, C], got {places.dtype} {places.shape}")
    if places.shape[1] > 1 and ranks % item:
        raise ValueError(f"{op}: places of {ranks} ranks, of which a slot has several, must be multiples of {item}")
