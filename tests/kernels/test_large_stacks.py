"""Stacks of adapters with more than 2^31 numbers."""

from __future__ import annotations

import functools

import jax
from lora_jax.kernels.adapters import Adapters, adapter_counters
from lora_jax.kernels.lora_items import FIELDS, most_items
from lora_jax.kernels.skinny_matmul import skinny_lora_matmul
from lora_jax.kernels.swiglu import lora_swiglu


def test_large_stacks_are_addressed_with_64_bits(monkeypatch, capfd):
    """The Triton code of adapters beyond 2^31 numbers counts in 64 bits, that of few in 32."""
    from jax.experimental import pallas as pl

    monkeypatch.setattr(pl, "pallas_call", functools.partial(pl.pallas_call, debug=True))
    device = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")
    mesh = jax.sharding.AbstractMesh((1,), ("x",), abstract_device=device)
    like = lambda shape, dtype="bfloat16": jax.ShapeDtypeStruct(shape, dtype)  # noqa: E731

    def triton_code(op, layers: int) -> str:
        slots, rank, size = 64, 256, 4096
        stack = like((layers, slots, rank * (2 if op is lora_swiglu else 1), size))
        outputs = size * (2 if op is lora_swiglu else 1)
        items = like((1, most_items(slots, rank) * FIELDS), "int32")
        b, ids, layer = like((layers, slots, rank, outputs)), like((8,), "int32"), like((), "int32")
        adapters = Adapters(stack, b, ids, items, layer, (size,) * (outputs // size), 0)
        arrivals = like((adapter_counters(items, layers),), "int32")
        with jax.sharding.use_abstract_mesh(mesh):
            traced = op.trace(like((8, size)), like((size, outputs)), adapters, arrivals)
            traced.lower(lowering_platforms=("cuda",))
        return capfd.readouterr().out

    for op in (skinny_lora_matmul, lora_swiglu):
        few, many = triton_code(op, 1), triton_code(op, 33)
        assert few.count("tt.func") == many.count("tt.func") == 1
        assert "i64" not in few and "i64" in many
