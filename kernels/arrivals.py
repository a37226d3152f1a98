"""Who is the last of several programs to finish a piece of work, so that it can put the parts together without anybody waiting.

One counter a piece, zeros before and after every kernel: kernels that share the counters may split their work differently.
Adapters have counters of their own behind those (`fused_lora.adapter_counters`).
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu


def new_arrivals(pieces: int) -> jax.Array:
    """Counters for kernels of up to so many pieces each: int32 zeros, passed on from kernel to kernel."""
    return jnp.zeros((pieces,), jnp.int32)


def check_arrivals(op: str, arrivals: jax.Array | None, pieces: int) -> None:
    """Raises: ValueError unless there are counters for so many pieces."""
    if arrivals is None or arrivals.dtype != jnp.int32 or arrivals.ndim != 1 or arrivals.shape[0] < pieces:
        got = "None" if arrivals is None else f"{arrivals.dtype} {arrivals.shape}"
        raise ValueError(f"{op}: arrivals must be int32 zeros of at least {pieces} pieces, got {got}")


def when_last(arrivals, piece, programs: int, do: Callable[[], None], *, interpret: bool) -> None:
    """In a kernel: `do` in the last of `programs` that come here for this piece. It sees what the others stored before."""
    if not interpret:  # an interpreted program has one thread, and no barrier
        plgpu.debug_barrier()  # what all threads of this program stored lies before its arrival
    arrived = plgpu.atomic_add(arrivals, (piece,), jnp.int32(1))

    @pl.when(arrived == programs - 1)
    def _():
        arrivals[piece] = jnp.int32(0)
        do()
