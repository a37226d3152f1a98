"""Decode attention against float64: the Triton kernel interpreted, and the plain-JAX form."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from lora_jax.kernels import decode_attention as module
from lora_jax.kernels.arrivals import new_arrivals
from lora_jax.kernels.cases import ATTENTION_CASES, AttentionCase
from lora_jax.kernels.tuning import AttentionTiles, attention_tiles

from tests.support import attention_oracle as oracle
from tests.support import kernel_checks as checks

CASES = [checks.smaller(case) for case in ATTENTION_CASES]
ONE_HEAD = AttentionCase("one-head", 3, 2, 2, 24, 4, 37, dtype="float32")  # G = 1, an odd head size and table
GROUPED = AttentionCase("grouped", 3, 6, 2, 16, 4, 37, dtype="float32")
VECTOR_TILES = (
    (16, False, 1),
    (32, False, 2),
    (32, True, 4),
)  # tokens a step, lanes and warps, of many to few programs


@pytest.mark.parametrize("form", checks.FORMS)
@pytest.mark.parametrize("kind", [dict(), dict(parts=3), dict(parts=2, norms=True)], ids=["plain", "parts", "norms"])
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_equals_float64(case, kind, form):
    checks.check_decode(case, form, **kind)


def test_the_rule_gives_the_tiles_tested_here():
    shapes = [(rows, kv, tokens) for rows in (1, 8, 64, 256) for kv in (1, 8, 32) for tokens in (64, 512, 513, 4096)]
    found = [attention_tiles(rows, kv, 1, tokens, 128, 2) for rows, kv, tokens in shapes]
    assert {(t.step_tokens, t.lanes, t.num_warps) for t in found if t.vector} == set(VECTOR_TILES)
    assert {(t.step_tokens, t.lanes) for t in found if not t.vector} == {(64, False)}
    assert not any(attention_tiles(rows, kv, 4, tokens, 128, 2).vector for rows, kv, tokens in shapes)
    assert min(t.parts for t in found) == 1 and max(t.parts for t in found) == 16


def test_keys_and_values_of_a_step_fit_the_smallest_card():
    for size in (64, 80, 128, 256, 512):
        for itemsize in (2, 4):
            tiles = attention_tiles(8, 8, 4, 4096, size, itemsize)
            assert 16 <= tiles.step_tokens <= 64
            assert 2 * tiles.step_tokens * size * itemsize <= 64 << 10


@pytest.mark.parametrize("window", [None, 9, 70])
@pytest.mark.parametrize("parts", [1, 16])
@pytest.mark.parametrize("step", [*VECTOR_TILES, (64, False, 0)], ids=str)
def test_every_tile_equals_float64(step, parts, window, monkeypatch):
    vector = step in VECTOR_TILES
    tiles = AttentionTiles(step[0], parts, vector, step[1], num_warps=4, num_stages=1)
    monkeypatch.setattr(module, "attention_tiles", lambda *shape: tiles)
    case = dataclasses.replace(ONE_HEAD if vector else GROUPED, window=window)
    checks.check_decode(case, "interpret", parts=2)


def test_the_grouped_path_serves_one_head_a_group(monkeypatch):
    monkeypatch.setattr(module, "attention_tiles", lambda *shape: AttentionTiles(64, 2, False, False, 4, 2))
    checks.check_decode(ONE_HEAD, "interpret", norms=True)


@pytest.mark.parametrize("form", checks.FORMS)
@pytest.mark.parametrize("case", [ONE_HEAD, GROUPED], ids=lambda c: c.name)
def test_a_row_does_not_depend_on_its_neighbours(case, form):
    checks.check_neighbours(case, form)


@pytest.mark.parametrize("form", checks.FORMS)
def test_padding_writes_to_the_trash_page_alone(form):
    """As the engine pads: position 0 and a table of trash pages, several rows alike."""
    case = dataclasses.replace(GROUPED, rows=5)
    given = oracle.decode_inputs(case)
    given.tables[2:], given.positions[2:] = 0, 0
    got, kv = checks.decode(given, case, form)
    want, want_kv = oracle.decode(dataclasses.replace(given), scale=case.head_dim**-0.5, window=None)
    checks.check_rows(got[:2], want[:2], case.dtype)
    checks.check_cache(kv, want_kv, given)
    assert checks.same_bits(kv[0, 1:], given.kv[0, 1:]) and np.isfinite(kv[0, 0]).all()


@pytest.mark.parametrize("form", checks.FORMS)
def test_a_first_token_attends_to_itself_alone(form):
    case = dataclasses.replace(GROUPED, rows=1)
    given = oracle.decode_inputs(case)
    given.positions[:], given.kv[:] = 0, np.nan
    got, _ = checks.decode(given, case, form)
    value = given.qkv.reshape(8 + 2, 16)[8:].repeat(3, 0)
    assert checks.same_bits(got[0], value)


def test_wrong_operands_are_named():
    qkv, kv = jnp.zeros((2, 8 * 16)), jnp.zeros((3, 4, 2, 2, 16))
    rope, tables, positions = (jnp.zeros((2, 8)),) * 2, jnp.zeros((2, 2), jnp.int32), jnp.zeros((2,), jnp.int32)

    def refused(message, *args, heads=4, arrivals=None, **options):
        with pytest.raises(ValueError, match=f"decode_attention: {message}"):
            module.decode_attention(*args, arrivals=arrivals, heads=heads, scale=1.0, **options)

    refused("implementation must be one of", qkv, rope, kv, tables, positions, implementation="cuda")
    refused("needs kv", qkv, rope, kv[:, :, :1], tables, positions)
    refused("needs kv .* divisor of 3", qkv, rope, kv, tables, positions, heads=3)
    refused("needs kv .* D even", qkv, rope, kv[..., :15], tables, positions)
    refused("qkv must have 128 columns", qkv[:, :-1], rope, kv, tables, positions)
    refused("qkv must have the dtype of kv", qkv, rope, kv.astype(jnp.bfloat16), tables, positions)
    refused("qkv .* float32 partial sums, got bfloat16", qkv[None].astype(jnp.bfloat16), rope, kv, tables, positions)
    refused("cos must be float32", qkv, (rope[0].astype(jnp.float16), rope[1]), kv, tables, positions)
    refused("sin must be float32 \\[2, 8\\]", qkv, (rope[0], rope[1][:, 1:]), kv, tables, positions)
    refused("positions must be int32 with 2 rows", qkv, rope, kv, tables, positions[:1])
    refused("block_tables must be int32", qkv, rope, kv, tables.astype(jnp.float32), positions)
    refused("block_tables .* got int32 \\(2,\\)", qkv, rope, kv, tables[0], positions)
    split = qkv, rope, kv, jnp.zeros((2, 200), jnp.int32), positions  # contexts of up to 800 tokens in several programs
    refused("arrivals must be int32 zeros of at least 4 pieces, got None", *split)
    refused("arrivals must be .* got int32 \\(3,\\)", *split, arrivals=new_arrivals(3))
    refused("arrivals must be .* got float32", *split, arrivals=jnp.zeros(4))
