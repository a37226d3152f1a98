"""Adapters on modules that are not ours: attach changes what they compute and nothing else about them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

from lora_jax.errors import ConfigError
from lora_jax.lora.apply import LoRAEmbed, LoRALinear, LoRAStack, SlotIds, lora_linear
from lora_jax.lora.sites import LoRASite, group_shapes
from lora_jax.models.layers import LoRATiedHead, TiedHead
from lora_jax.step import ModelDef
from tests.support.attached import attach_slots

V, D, F, RANK, SLOTS = 13, 12, 20, 4, 3
TOLERANCE = 2e-6  # of float32 sums of a few dozen terms near 1


@pytest.fixture(autouse=True)
def exact_products():
    with jax.default_matmul_precision("highest"):
        yield


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, **options: Any):
        self.up = nnx.Linear(D, F, rngs=rngs, bias_init=nnx.initializers.normal(1.0), **options)
        self.down = nnx.Linear(F, D, use_bias=False, rngs=rngs, **options)
        self.norm = nnx.LayerNorm(D, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(nnx.relu(self.up(self.norm(x))))


class Model(nnx.Module):
    """As a user may write one: a dict and a list of blocks, nothing of this package but the tied head."""

    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(V, D, rngs=rngs)
        self.blocks = nnx.List([Block(rngs), Block(rngs)])
        self.extra = nnx.Dict(side=nnx.Linear(D, D, rngs=rngs))
        self.head = TiedHead(self.embed)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x + self.extra["side"](x))


SITES = [
    LoRASite(("embed",), "embed", 0, V, (D,), ("embed",), kind="embedding"),
    LoRASite(("head",), "head", 0, D, (V,), ("head",), head=True),
    LoRASite(("extra", "side"), "side", 0, D, (D,), ("side",)),
    *(LoRASite(("blocks", i, "up"), "up", i, D, (F - 5, 5), (f"up{i}a", f"up{i}b")) for i in range(2)),
    *(LoRASite(("blocks", i, "down"), "down", i, F, (D,), (f"down{i}",)) for i in range(2)),
]


def attached(model: Any, sites: list[LoRASite] = SITES, **options: Any) -> Any:
    attach_slots(model, sites, SLOTS, RANK, **options)
    return model


def random_stacks(sites: list[LoRASite] = SITES, seed: int = 0) -> dict:
    rng = np.random.default_rng(seed)
    draw = lambda shape: rng.normal(size=shape).astype(np.float32) / 4  # noqa: E731
    return {name: tuple(map(draw, shape.shapes(SLOTS, RANK))) for name, shape in group_shapes(sites).items()}


def with_adapters(model: Any, stacks: dict, slots: Any) -> Any:
    """An attached model with arrays in its stacks and slot ids."""
    definition = ModelDef.of(model)
    params = jax.tree.leaves(nnx.state(model, nnx.Param))
    ids = jnp.asarray(slots, jnp.int32)
    return definition.with_adapters(params, jax.tree.map(jnp.asarray, stacks), ids, ids, ids)


def single(module: nnx.Module, sites: list[LoRASite], stacks: dict, slots: Any) -> Any:
    """A module alone, as `m` of a model."""

    class Holder(nnx.Module):
        def __init__(self):
            self.m = module

    return with_adapters(attached(Holder(), sites), stacks, slots).m


def paths(model: Any) -> dict[tuple, tuple]:
    return {path: (v.shape, v.dtype) for path, v in nnx.to_flat_state(nnx.state(model, nnx.Param))}


def delta(site: LoRASite, stacks: dict, slots: Any, x: np.ndarray) -> np.ndarray:
    """scale * B A x of each row in float64, x [rows, in] (token ids for an embedding)."""
    a, b = (np.asarray(s[site.layer], np.float64) for s in stacks[site.group])
    out = np.zeros((len(x), b.shape[-1]))
    for row, slot in enumerate(slots):
        if slot < 0:
            continue
        start = 0
        for i, width in enumerate(site.slices):
            part = slice(start, start + width)
            if site.kind == "embedding":
                h = a[slot, x[row]]
            else:
                h = a[slot, i * RANK : (i + 1) * RANK] @ x[row].astype(np.float64)
            out[row, part] = h @ b[slot, :, part]
            start += width
    return out


# -- what stays as it was --


def test_attach_keeps_paths_classes_and_checkpoints():
    plain, model = Model(nnx.Rngs(0)), Model(nnx.Rngs(0))
    before, parameters = paths(model), dict(nnx.to_flat_state(nnx.state(model, nnx.Param)))
    assert attached(model) is model
    assert paths(model) == before == paths(plain)
    for path, value in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        assert value[...] is parameters[path][...], f"{path} was copied"
    kinds = {"embed": (LoRAEmbed, nnx.Embed), "head": (LoRATiedHead, TiedHead)}
    for name, (kind, old) in kinds.items():
        assert type(getattr(model, name)) is kind and isinstance(getattr(model, name), old)
    for block in model.blocks:
        assert type(block.up) is type(block.down) is LoRALinear and isinstance(block.up, nnx.Linear)
        assert type(block.norm) is nnx.LayerNorm and type(block) is Block
    assert type(nnx.Linear(2, 2, rngs=nnx.Rngs(0))) is nnx.Linear, "the class itself was changed"


def test_a_checkpoint_of_the_plain_model_loads_into_the_attached_one():
    plain, model = Model(nnx.Rngs(1)), attached(Model(nnx.Rngs(2)))
    saved = nnx.to_pure_dict(nnx.state(plain, nnx.Param))
    state = nnx.state(model, nnx.Param)
    nnx.replace_by_pure_dict(state, saved)
    nnx.update(model, state)
    tokens = jnp.arange(6)
    got = with_adapters(model, random_stacks(), [-1] * 6)(tokens)
    assert np.array_equal(got, plain(tokens))


def test_few_leaves_whatever_the_number_of_modules():
    model = attached(Model(nnx.Rngs(0)))
    stacks = nnx.to_flat_state(nnx.state(model, LoRAStack))
    assert len(stacks) == 2 * len(group_shapes(SITES)) and len(nnx.to_flat_state(nnx.state(model, SlotIds))) == 3
    assert model.blocks[0].up.lora_a is model.blocks[1].up.lora_a
    assert model.blocks[0].up.lora_slots is model.extra["side"].lora_slots is not model.head.lora_slots


# -- what is computed --


@pytest.mark.parametrize("slots", [[0, 2, -1, 1, 0], [-1] * 5, [1] * 5, [2, -1, -1, -1, 0]])
@pytest.mark.parametrize("rank3", [False, True], ids=["x[T,D]", "x[T,n,D]"])
@pytest.mark.parametrize("bias", [False, True])
def test_linear(slots, rank3, bias):
    site = LoRASite(("m",), "m", 2, D, (F - 5, 5), ("a", "b"))
    linear = nnx.Linear(D, F, use_bias=bias, rngs=nnx.Rngs(0), bias_init=nnx.initializers.normal(1.0))
    w = np.asarray(linear.kernel[...], np.float64)
    b = np.asarray(linear.bias[...], np.float64) if bias else 0.0
    x = np.random.default_rng(1).normal(size=(5, 3, D) if rank3 else (5, D)).astype(np.float32)
    plain = np.asarray(linear(x))
    stacks = random_stacks([site])
    got = np.asarray(single(linear, [site], stacks, slots)(x))
    rows, row_slots = x.reshape(-1, D), np.repeat(slots, 3 if rank3 else 1)  # the leading axis carries the slot
    want = rows.astype(np.float64) @ w + b + delta(site, stacks, row_slots, rows)
    assert got.shape == plain.shape and got.dtype == np.float32
    np.testing.assert_allclose(got.reshape(-1, F), want, rtol=TOLERANCE, atol=TOLERANCE)
    base = np.asarray(slots) == -1
    assert np.array_equal(got[base], plain[base])
    assert all(np.abs(got[i] - plain[i]).max() > 0.1 for i in np.flatnonzero(~base))


def test_rows_without_adapter_are_bit_equal_whatever_the_slots_hold():
    """Even infinities and NaN in the stacks, and in the compiled program."""
    site = LoRASite(("m",), "m", 0, D, (F,), ("a",))
    x = np.random.default_rng(2).normal(size=(7, D)).astype(np.float32)
    linear = nnx.Linear(D, F, rngs=nnx.Rngs(0), bias_init=nnx.initializers.normal(1.0))
    want = np.asarray(jax.jit(linear.__call__)(x))
    stacks = random_stacks([site])
    for bad in stacks["m"]:
        bad[:, 0] = np.nan
        bad[:, 1] = np.inf
    module = single(linear, [site], stacks, [-1, 0, 1, -1, 2, -1, -1])
    for call in (module, jax.jit(module.__call__)):
        got = np.asarray(call(x))
        assert np.array_equal(got[[0, 3, 5, 6]], want[[0, 3, 5, 6]])
        assert np.isfinite(got[4]).all() and not np.isfinite(got[[1, 2]]).any()


def test_half_precision_modules_promote_as_before():
    """param_dtype float32, computed in bfloat16: base rows keep their bits and their dtype."""
    linear = nnx.Linear(D, F, dtype=jnp.bfloat16, param_dtype=jnp.float32, rngs=nnx.Rngs(0))
    x = np.random.default_rng(2).normal(size=(4, D)).astype(np.float32)
    want = np.asarray(linear(x))
    site = LoRASite(("m",), "m", 0, D, (F,), ("a",))
    stacks = jax.tree.map(lambda v: v.astype(jnp.bfloat16), random_stacks([site]))
    got = np.asarray(single(linear, [site], stacks, [-1, 0, -1, 2])(x))
    assert got.dtype == want.dtype == jnp.bfloat16
    assert np.array_equal(got[[0, 2]], want[[0, 2]]) and not np.array_equal(got[[1, 3]], want[[1, 3]])


@pytest.mark.parametrize("shape", [(5,), (5, 3)])
def test_embedding(shape):
    site = LoRASite(("m",), "m", 1, V, (D,), ("a",), kind="embedding")
    embed, slots = nnx.Embed(V, D, rngs=nnx.Rngs(0)), [1, -1, 0, 0, 2]
    table = np.asarray(embed.embedding[...], np.float64)
    tokens = np.random.default_rng(3).integers(0, V, shape)
    plain, stacks = np.asarray(embed(tokens)), random_stacks([site])
    got = np.asarray(single(embed, [site], stacks, slots)(tokens))
    rows, row_slots = tokens.reshape(-1), np.repeat(slots, tokens.size // 5)
    want = table[rows] + delta(site, stacks, row_slots, rows)
    np.testing.assert_allclose(got.reshape(-1, D), want, rtol=TOLERANCE, atol=TOLERANCE)
    assert np.array_equal(got[1], plain[1])


def test_the_whole_model_equals_dense_weights():
    """Each row with W + scale * B A in place of W, in float64; the embedding's and the tied head's adapters are their own."""
    model, stacks = Model(nnx.Rngs(0)), random_stacks()
    slots, tokens = [2, -1, 0, 1, 0, -1, 2], np.array([3, 1, 12, 0, 5, 12, 12])
    f64 = lambda v: np.asarray(v[...], np.float64)  # noqa: E731
    table, side = f64(model.embed.embedding), model.extra["side"]
    weights = [(f64(b.up.kernel), f64(b.up.bias), f64(b.down.kernel)) for b in model.blocks]
    norms = [(f64(b.norm.scale), f64(b.norm.bias), b.norm.epsilon) for b in model.blocks]
    side_w, side_b = f64(side.kernel), f64(side.bias)
    plain = np.asarray(model(tokens))
    got = np.asarray(with_adapters(attached(model), stacks, slots)(tokens))
    by_path = {site.path: site for site in SITES}
    add = lambda path, rows: delta(by_path[path], stacks, slots, rows)  # noqa: E731

    x = table[tokens] + add(("embed",), tokens)
    for i, ((up, up_b, down), (scale, shift, eps)) in enumerate(zip(weights, norms, strict=True)):
        n = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + eps) * scale + shift
        h = np.maximum(n @ up + up_b + add(("blocks", i, "up"), n), 0)
        x = x + h @ down + add(("blocks", i, "down"), h)
    x = x + x @ side_w + side_b + add(("extra", "side"), x)
    want = x @ table.T + add(("head",), x)
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)
    base = np.asarray(slots) == -1
    assert np.array_equal(got[base], plain[base])
    assert (np.abs(got[~base] - plain[~base]).max(-1) > 0.1).all()


def test_the_op_alone_equals_the_module():
    site = LoRASite(("m",), "m", 0, D, (F - 5, 5), ("a", "b"))
    linear, stacks = nnx.Linear(D, F, rngs=nnx.Rngs(0)), random_stacks([site])
    x, slots = jnp.ones((3, D)), jnp.array([0, -1, 2])
    kernel, bias = linear.kernel[...], linear.bias[...]
    got = lora_linear(x, kernel, bias, *map(jnp.asarray, stacks["m"]), slots, 0, slices=(F - 5, 5))
    assert np.array_equal(got, single(linear, [site], stacks, slots)(x))


# -- what is refused --


class Scaled(nnx.Linear):
    """A user's own linear: its __call__ would be lost."""

    def __call__(self, inputs, out_sharding=None):
        return 2 * super().__call__(inputs)


def own_dot(*args, **options):
    return lax.dot_general(*args, **options)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda rngs: nnx.Conv(D, F, 3, rngs=rngs), "Conv"),
        (lambda rngs: nnx.LayerNorm(D, rngs=rngs), "LayerNorm"),
        (lambda rngs: nnx.LinearGeneral(D, F, rngs=rngs), "LinearGeneral"),
        (lambda rngs: Scaled(D, F, rngs=rngs), "Scaled"),
        (lambda rngs: nnx.Linear(D, F, dot_general=own_dot, rngs=rngs), "dot_general"),
        (lambda rngs: nnx.Linear(D, F, preferred_element_type=jnp.float32, rngs=rngs), "preferred_element_type"),
    ],
)
def test_a_module_that_cannot_carry_an_adapter_is_named(make, message):
    class Holder(nnx.Module):
        def __init__(self):
            self.blocks = nnx.List([nnx.Dict(proj=make(nnx.Rngs(0)))])

    model, site = Holder(), LoRASite(("blocks", 0, "proj"), "g", 0, D, (F,), ("a",))
    kind = type(model.blocks[0]["proj"])
    with pytest.raises(ConfigError, match=f"blocks/0/proj: .*{message}"):
        attached(model, [site])
    assert type(model.blocks[0]["proj"]) is kind


def test_a_module_is_attached_once():
    model = attached(Model(nnx.Rngs(0)))
    with pytest.raises(ConfigError, match="embed: no adapter can attach to a LoRAEmbed"):
        attached(model)
