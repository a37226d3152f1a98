"""The layers' fused form, which GPUs run: wired as the plain one. Each kernel has its own tests; here its plain-JAX form takes its
place, so that the order of norms, residuals and weights is compared on a CPU."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from lora_jax.kernels.decode_attention import decode_attention
from lora_jax.kernels.lora_items import most_items, work_items
from lora_jax.kernels.tile_items import most_tile_items, tile_items
from lora_jax.kernels.tiled_expand import LoRASum, lora_add
from lora_jax.kernels.tuning import MAX_ROWS, tile_rows

from lora_jax.kv_cache import DecodeInputs
from lora_jax.models import layers
from lora_jax.models.config import ModelConfig
from lora_jax.models.llama import LlamaForCausalLM, lora_sites
from lora_jax.models.shapes import known_shape
from lora_jax.step import ModelDef
from tests.support.attached import attach_slots

CONFIG = dataclasses.replace(known_shape("tiny"), num_layers=3, layer_windows=(None,) * 3)
OPS = ("add_rms_norm", "skinny_matmul", "skinny_lora_matmul", "swiglu", "lora_swiglu", "residual_matmul")
TILED_OPS = ("lora_shrink_tiles", "lora_add", "lora_silu_mul")
SLOTS, RANK = 3, 8


@dataclasses.dataclass(frozen=True)
class Fused(DecodeInputs):
    """As on a GPU, but for what computes."""

    def attend(self, qkv, rope, kv, *, arrivals, **how):
        assert arrivals is not None and arrivals.shape[0] >= self.positions.shape[0] * kv.shape[3]
        qkv = lora_add(*qkv, implementation="xla") if isinstance(qkv, LoRASum) else qkv
        given = qkv, rope, kv, self.block_tables, self.positions, arrivals
        how |= dict(scale=kv.shape[-1] ** -0.5, implementation="xla")
        return decode_attention(*given, **how)


@pytest.fixture(params=[dict(implementation="xla")], ids=["plain-jax"])
def called(request, monkeypatch):
    """Names of the ops that the layers call, in order; each computes in plain JAX, or as the parameter says."""
    names: list[str] = []

    def plain(name):
        op = getattr(layers, name)

        @functools.wraps(op)
        def call(*args, **options):
            names.append(name)
            return op(*args, **{**options, **request.param})

        return call

    for name in OPS + TILED_OPS:
        monkeypatch.setattr(layers, name, plain(name))
    return names


def with_adapters(model: Any, config: ModelConfig, slots: np.ndarray) -> Any:
    """The model with random adapters of rank RANK in all slots, one a row; slot 1 has none for the down projection."""
    sites = [site for site in lora_sites(config) if site.kind == "linear" and not site.head]
    groups, rng = attach_slots(model, sites, SLOTS, RANK), np.random.default_rng(2)
    draw = lambda shape: rng.normal(size=shape).astype(np.float32) / 6  # noqa: E731
    stacks = {name: tuple(map(draw, shape.shapes(SLOTS, RANK))) for name, shape in groups.items()}
    stacks["down"][1][:, 1] = 0
    params = jax.tree.leaves(nnx.state(model, nnx.Param))
    ids = jnp.asarray(slots)
    return ModelDef.of(model).with_adapters(params, jax.tree.map(jnp.asarray, stacks), ids, ids, ids)


def listed(slots: np.ndarray) -> np.ndarray:
    """The items of a step, with few rows and with many."""
    ranks, rows = np.full((4, SLOTS), RANK), len(slots)
    ranks[3, 1] = 0
    if rows <= MAX_ROWS:
        return work_items(sorted({int(s) for s in slots} - {-1}), ranks, RANK, most_items(SLOTS, RANK))
    block_t = tile_rows(rows, 4)
    return tile_items(slots, ranks, RANK, block_t, most_tile_items(rows, block_t, rows, SLOTS, RANK))


def hidden(
    rows: int, kind: type[DecodeInputs], implementation: str, adapters: bool = False, **changes
) -> tuple[np.ndarray, np.ndarray]:
    """(hidden rows, the last layer's pages) of one decode step; every norm has a scale of its own."""
    config = dataclasses.replace(CONFIG, **changes)
    model = LlamaForCausalLM(config, jnp.float32, nnx.Rngs(0))
    rng = np.random.default_rng(1)
    for _, norm in nnx.iter_graph(model):
        if isinstance(norm, layers.RMSNorm):
            norm.scale[...] = jnp.asarray(rng.uniform(0.5, 1.5, norm.scale.shape), jnp.float32)
    kv = jnp.asarray(rng.standard_normal((rows + 1, 16, 2, config.num_kv_heads, config.head_dim)), jnp.float32)
    items = None
    if adapters:
        slots = (np.arange(rows) % (SLOTS + 1) - 1).astype(np.int32)
        model = with_adapters(model, config, slots)
        items = jnp.asarray(listed(slots))
    given = jnp.asarray(np.arange(rows) % 9), 1 + jnp.arange(rows, dtype=jnp.int32)[:, None], implementation
    inputs = kind(*given, items if implementation == "triton" else None)
    tokens = jnp.arange(rows) * 7 % config.vocab_size
    out, pages = model.model(tokens, inputs.positions.astype(jnp.int32), (kv,) * config.num_layers, inputs)
    return np.asarray(out), np.asarray(pages[-1])


@pytest.mark.parametrize(
    ("rows", "changes", "a_layer"),
    [
        (1, {}, ["skinny_matmul", "residual_matmul", "swiglu", "residual_matmul"]),
        (16, {}, ["skinny_matmul", "residual_matmul", "swiglu", "residual_matmul"]),
        (17, {}, ["skinny_matmul", "skinny_matmul", "add_rms_norm", "swiglu", "skinny_matmul", "add_rms_norm"]),
        (65, {}, ["add_rms_norm", "add_rms_norm"]),
        (8, dict(qkv_bias=True, o_bias=True), ["add_rms_norm", "swiglu", "residual_matmul"]),
        (8, dict(mlp_bias=True), ["skinny_matmul", "residual_matmul", "add_rms_norm"]),
        (8, dict(intermediate_size=100), ["skinny_matmul", "residual_matmul", "add_rms_norm"]),
    ],
    ids=str,
)
def test_fused_layers_equal_plain_ones(rows, changes, a_layer, called):
    want, want_pages = hidden(rows, DecodeInputs, "xla", **changes)
    called.clear()
    got, pages = hidden(rows, Fused, "triton", **changes)
    assert called == ["add_rms_norm", *a_layer * 3]
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(pages, want_pages, rtol=2e-5, atol=2e-5)
    assert np.abs(want).max() > 0.1


TILED = [
    "lora_shrink_tiles",
    "lora_shrink_tiles",
    "lora_add",
    "add_rms_norm",
]  # qkv's is added by attention, or in `Fused`
TILED += ["lora_shrink_tiles", "lora_silu_mul", "lora_shrink_tiles", "lora_add", "add_rms_norm"]
WIDE = dict(num_kv_heads=CONFIG.num_heads)  # a tile of columns lies in one of q, k and v


@pytest.mark.parametrize(
    ("rows", "changes", "a_layer"),
    [
        (2, WIDE, ["skinny_lora_matmul", "residual_matmul", "lora_swiglu", "residual_matmul"]),
        (16, WIDE, ["skinny_lora_matmul", "residual_matmul", "lora_swiglu", "residual_matmul"]),
        (33, WIDE, [*["skinny_lora_matmul"] * 2, "add_rms_norm", "lora_swiglu", "skinny_lora_matmul", "add_rms_norm"]),
        (65, WIDE, TILED),
        (65, dict(qkv_bias=True, o_bias=True, mlp_bias=True), TILED),
        (65, dict(intermediate_size=100), [*TILED[:4], "add_rms_norm"]),
        (8, {}, ["residual_matmul", "lora_swiglu", "residual_matmul"]),
        (8, dict(qkv_bias=True, o_bias=True), ["add_rms_norm", "lora_swiglu", "residual_matmul"]),
        (8, {**WIDE, "mlp_bias": True}, ["skinny_lora_matmul", "residual_matmul", "add_rms_norm"]),
    ],
    ids=str,
)
def test_fused_layers_with_adapters_equal_plain_ones(rows, changes, a_layer, called):
    base, _ = hidden(rows, DecodeInputs, "xla", **changes)
    want, want_pages = hidden(rows, DecodeInputs, "xla", adapters=True, **changes)
    called.clear()
    got, pages = hidden(rows, Fused, "triton", adapters=True, **changes)
    assert called == ["add_rms_norm", *a_layer * 3]
    np.testing.assert_allclose(got, want, rtol=5e-5, atol=5e-5)
    np.testing.assert_allclose(pages, want_pages, rtol=5e-5, atol=5e-5)
    changed = np.abs(want - base).max(1) > 0.05
    assert changed.tolist() == [i % (SLOTS + 1) > 0 for i in range(rows)]


@pytest.mark.parametrize("called", [dict(implementation="triton", interpret=True)], ids=["interpreted"], indirect=True)
@pytest.mark.parametrize("rows", [5, 33, 65])
def test_the_kernels_themselves_in_three_layers(rows, called):
    want, want_pages = hidden(rows, DecodeInputs, "xla", adapters=True, **WIDE)
    got, pages = hidden(rows, Fused, "triton", adapters=True, **WIDE)
    assert called.count("lora_swiglu" if rows <= MAX_ROWS else "lora_silu_mul") == CONFIG.num_layers
    np.testing.assert_allclose(got, want, rtol=5e-5, atol=5e-5)
    np.testing.assert_allclose(pages, want_pages, rtol=5e-5, atol=5e-5)
