"""Rotation into the cache and prefill attention against float64: the Triton kernels interpreted, and the plain-JAX forms."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from lora_jax.kernels.cases import ATTENTION_CASES, AttentionCase
from lora_jax.kernels.prefill_attention import BLOCK_TOKENS, prefill_attention
from lora_jax.kernels.rope_cache import TILE_TOKENS, HeadNorms, rope_to_cache

from tests.support import attention_oracle as oracle
from tests.support import kernel_checks as checks

CASES = [checks.smaller(case) for case in ATTENTION_CASES]
# One token, a continued chunk, exactly one block, and more than two blocks of which the last is short.
SPANS = ((0, 1), (10, 9), (3, BLOCK_TOKENS), (37, 2 * BLOCK_TOKENS + 22))
SMALL = AttentionCase("small", 1, 4, 2, 16, 4, 1, dtype="float32")
SMALL_SPANS = ((10, 9), (0, 1), (0, 14))


def small(**kind) -> oracle.Prefill:
    return oracle.prefill_inputs(SMALL, SMALL_SPANS, 32, BLOCK_TOKENS, **kind)


@pytest.mark.parametrize("form", checks.FORMS)
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_equals_float64(case, form):
    bucket = sum(n for _, n in SPANS) + 11
    assert bucket % TILE_TOKENS, "the last tile must not be full"
    given = oracle.prefill_inputs(case, SPANS, bucket, BLOCK_TOKENS)
    checks.check_prefill(given, form, window=case.window, softcap=case.softcap)


@pytest.mark.parametrize("form", checks.FORMS)
@pytest.mark.parametrize("window", [1, 6, 70])
def test_windows(window, form):
    given = oracle.prefill_inputs(SMALL, SPANS, 240, BLOCK_TOKENS)
    checks.check_prefill(given, form, window=window)


@pytest.mark.parametrize("block", [1, 5, 16, 40])
def test_shorter_blocks_are_as_good(block):
    """Whoever makes the blocks may cut them anywhere."""
    checks.check_prefill(oracle.prefill_inputs(SMALL, SMALL_SPANS, 32, block), "interpret", window=None)


@pytest.mark.parametrize("form", checks.FORMS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    ("size", "kind"), [(16, dict(parts=3)), (24, dict(norms=True)), (80, dict(parts=2, norms=True))], ids=str
)
def test_rotated_into_the_cache(size, kind, dtype, form):
    case = dataclasses.replace(SMALL, head_dim=size, dtype=dtype)
    checks.check_rope(oracle.prefill_inputs(case, SMALL_SPANS, 29, BLOCK_TOKENS, **kind), form)


@pytest.mark.parametrize("form", checks.FORMS)
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_nan_stays_in_its_sequence(victim, form):
    """The other sequences' bits do not change, and the NaN does not turn into a number."""
    given = small()
    q, kv = checks.check_rope(given, "xla")
    clean = checks.prefill(q, kv, given, form, window=None)
    page = given.page_list[0, given.page_list[1] == victim][0]
    kv = kv.copy()
    kv[page, 0, 1, 0, 3] = np.nan  # one feature of the sequence's first value, which all its queries see
    got = checks.prefill(q, kv, given, form, window=None)
    own = given.sequences == victim
    others = (given.sequences >= 0) & ~own
    assert checks.same_bits(got[others], clean[others]) and np.isfinite(got[others]).all()
    assert np.isnan(got[own, :2, 3]).all()


def test_a_sequences_bits_do_not_depend_on_the_others():
    given = small()
    q, kv = checks.check_rope(given, "xla")
    clean = checks.prefill(q, kv, given, "interpret", window=None)
    mine = given.sequences == 2
    other = kv + np.where(np.isin(np.arange(len(kv)), given.page_list[0, given.page_list[1] == 2]), 0, 1).reshape(
        -1, *[1] * 4
    ).astype(kv.dtype)
    changed = checks.prefill(np.where(mine[:, None, None], q, q + 1), other, given, "interpret", window=None)
    assert checks.same_bits(changed[mine], clean[mine])
    assert not np.array_equal(changed[given.sequences == 0], clean[given.sequences == 0])


def test_wrong_operands_of_attention_are_named():
    q, kv, ids = jnp.zeros((8, 4, 16)), jnp.zeros((3, 4, 2, 2, 16)), jnp.zeros((8,), jnp.int32)
    pages, blocks = jnp.zeros((3, 5), jnp.int32), jnp.zeros((4, 2), jnp.int32)

    def refused(message, q=q, kv=kv, positions=ids, sequences=ids, pages=pages, blocks=blocks, **options):
        with pytest.raises(ValueError, match=f"prefill_attention: {message}"):
            prefill_attention(q, kv, positions, sequences, pages, blocks, scale=1.0, **options)

    refused("implementation must be one of", implementation="cuda")
    refused("needs q \\[T, H, D\\]", q=q[:, :3])
    refused("needs q \\[T, H, D\\] and kv", kv=kv[..., :8])
    refused("kv must have the dtype of q", kv=kv.astype(jnp.bfloat16))
    refused("positions must be int32 \\[8\\]", positions=ids[:7])
    refused("sequences must be int32 \\[8\\], got float32", sequences=ids.astype(jnp.float32))
    refused("page_list must be int32 with 3 rows", pages=pages[:2])
    refused("blocks must be int32 with 4 rows", blocks=blocks.astype(jnp.float32))


def test_wrong_operands_of_rotation_are_named():
    qkv, kv, index = jnp.zeros((8, 8 * 16)), jnp.zeros((3, 4, 2, 2, 16)), jnp.zeros((8,), jnp.int32)
    rope = (jnp.zeros((8, 8)),) * 2

    def refused(message, qkv=qkv, rope=rope, kv=kv, index=index, **options):
        with pytest.raises(ValueError, match=f"rope_to_cache: {message}"):
            rope_to_cache(qkv, rope, kv, index, heads=4, **options)

    refused("implementation must be one of", implementation="cuda")
    refused("index must be int32 \\[8\\]", index=index[:7])
    refused("index must be int32", index=index.astype(jnp.float32))
    refused("qkv must have 128 columns", qkv=qkv[:, 1:])
    refused("cos must be float32 \\[8, 8\\]", rope=(rope[0][:7], rope[1]))
    refused("needs kv", kv=kv[0])
    refused("norms.q must be float32 \\[16\\]", norms=HeadNorms(jnp.ones(8), jnp.ones(16), 1e-5))
    refused("norms.k must be .* got bfloat16", norms=HeadNorms(jnp.ones(16), jnp.ones(16, jnp.bfloat16), 1e-5))
