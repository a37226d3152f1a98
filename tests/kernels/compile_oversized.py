"""Compiles a kernel that needs 128 KB of shared memory for a large and a small card; prints what became of it as JSON."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import lora_jax.kernels  # noqa: F401  (for its filter of the backend's deprecation warning)
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from tests.support.gpu_program import compile_for


def _kernel(x, y, out):
    out[...] = jnp.dot(x[...], y[...], preferred_element_type=jnp.float32)


def main() -> None:
    call = pl.pallas_call(
        _kernel,
        out_shape=jax.ShapeDtypeStruct((128, 128), jnp.float32),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
    )
    found = {}
    for card in ("l4", "h200"):
        try:
            compile_for(
                card,
                jax.jit(call),
                jax.ShapeDtypeStruct((128, 256), jnp.bfloat16),
                jax.ShapeDtypeStruct((256, 128), jnp.bfloat16),
            )
            found[card] = "compiled"
        except Exception as error:
            found[card] = str(error)[:300]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
