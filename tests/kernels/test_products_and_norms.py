"""The skinny product and the norm that adds up its parts, against float64: interpreted Triton kernels and plain-JAX forms."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lora_jax.kernels.add_norm import add_rms_norm
from lora_jax.kernels.cases import LINEARS
from lora_jax.kernels.skinny_matmul import MAX_ROWS, fits, skinny_matmul
from lora_jax.kernels.tuning import matmul_tiles, norm_warps

from tests.support import kernel_checks as checks

ROWS = (1, 3, 8, 16, 17, 33, 64)
SIXTY_FOURS = st.integers(1, 512).map(lambda n: 64 * n)


# ---- the product ----
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rows", ROWS)
def test_products(rows, dtype):
    for inputs, outputs in ((64, 64), (192, 320)):
        assert checks.check_matmul(rows, inputs, outputs, dtype, "interpret") == 1


@pytest.mark.parametrize("form", checks.FORMS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_product_types(dtype, form):
    assert checks.check_matmul(5, 448, 128, dtype, form) == 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rows", [8, 33])
@pytest.mark.parametrize(("inputs", "outputs", "parts"), [(2048, 128, 2), (4096, 192, 4), (2112, 64, 1)])
def test_partial_sums(inputs, outputs, parts, rows, dtype):
    """Parts of K that are no whole number of steps are not made: 2112 is 33 times 64."""
    assert checks.check_matmul(rows, inputs, outputs, dtype, "interpret") == parts
    assert checks.check_matmul(rows, inputs, outputs, dtype, "xla") == 1


@pytest.mark.parametrize("form", checks.FORMS)
@pytest.mark.parametrize("rows", [3, 33])
def test_a_rows_product_does_not_depend_on_the_others(rows, form):
    x, w = checks.matmul_operands(rows, 2048, 128, "bfloat16")
    other = np.full_like(x, np.nan)
    other[1] = x[1]
    one, two = (checks.run(skinny_matmul, v, w, **checks.how(form)) for v in (x, other))
    assert checks.same_bits(one[:, 1], two[:, 1]) and np.isfinite(two[:, 1]).all()
    assert np.isnan(two[:, 0]).all()


def test_fits():
    assert fits(1, 64, 64) and fits(MAX_ROWS, 11008, 4096)
    assert not fits(MAX_ROWS + 1, 64, 64) and not fits(1, 96, 64) and not fits(1, 64, 96)


@given(
    rows=st.integers(1, MAX_ROWS),
    inputs=SIXTY_FOURS,
    outputs=SIXTY_FOURS,
    itemsize=st.sampled_from((2, 4)),
    adapters=st.booleans(),
)
def test_tiles_cover_the_matrix_once(rows, inputs, outputs, itemsize, adapters):
    tiles = matmul_tiles(rows, inputs, outputs, itemsize, adapters)
    assert outputs % tiles.block_n == 0 and inputs % (tiles.parts * tiles.block_k) == 0
    padded = max(16, 1 << (rows - 1).bit_length())
    staged = (padded + tiles.block_n) * tiles.block_k * itemsize * (tiles.num_stages - 1)
    assert staged <= 99 << 10, "more shared memory than the smallest card has"
    assert rows > 16 or tiles.block_n == 64  # what new_arrivals counts


@pytest.mark.parametrize(
    ("rows", "fewest", "most"), [(1, 256, 512), (8, 256, 512), (16, 256, 512), (17, 96, 192), (64, 96, 192)]
)
@pytest.mark.parametrize("name", ["qkv", "o", "down"])
def test_the_models_products_fill_a_card(name, rows, fewest, most):
    """Two programs a multiprocessor of the largest cards (132). With many rows each program reads all of them again: about one
    a multiprocessor is faster."""
    linear = LINEARS[f"llama2-7b.{name}"]
    tiles = matmul_tiles(rows, linear.inputs, sum(linear.slices), 2)
    assert fewest <= sum(linear.slices) // tiles.block_n * tiles.parts <= most


def test_wrong_operands_of_a_product_are_named():
    x, w = jnp.zeros((4, 64)), jnp.zeros((64, 128))

    def refused(message, x, w, **options):
        with pytest.raises(ValueError, match=f"skinny_matmul: {message}"):
            skinny_matmul(x, w, **options)

    refused("implementation must be one of", x, w, implementation="cuda")
    refused("needs x \\[R, K\\] and w \\[K, N\\]", x, w[:32])
    refused("w must have the dtype of x", x, w.astype(jnp.bfloat16))
    refused("at most 64 rows", jnp.zeros((65, 64)), w)
    refused("at most 64 rows, K and N multiples of 64", x, w[:, :100])


# ---- the norm ----
@pytest.mark.parametrize("form", checks.FORMS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("parts", [None, 0, 1, 3], ids=["alone", "added", "one-part", "parts"])
def test_norms(parts, dtype, form):
    for rows, size in ((5, 96), (2, 4096)):
        checks.check_norm(rows, size, dtype, parts, form)


@pytest.mark.parametrize("form", checks.FORMS)
def test_a_rows_norm_does_not_depend_on_the_others(form):
    x, y, scale = checks.norm_operands(4, 96, "bfloat16", 2)
    assert y is not None
    run = lambda x, y: checks.run(add_rms_norm, x, y, scale, eps=1e-5, **checks.how(form))  # noqa: E731
    other_x, other_y = np.full_like(x, np.nan), np.full_like(y, np.nan)
    other_x[2], other_y[:, 2] = x[2], y[:, 2]
    for one, two in zip(run(x, y), run(other_x, other_y), strict=True):
        assert checks.same_bits(one[2], two[2]) and np.isfinite(two[2]).all() and np.isnan(two[1]).all()


@pytest.mark.parametrize("form", checks.FORMS)
def test_a_row_of_zeros_has_a_norm(form):
    """eps alone keeps it finite."""
    x = np.zeros((2, 96), np.float32)
    total, normed = checks.run(add_rms_norm, x, x, x[0] + 1, eps=1e-5, **checks.how(form))
    assert not total.any() and not normed.any()


@given(rows=st.integers(1, 9000), size=st.integers(1, 20000))
def test_warps_of_a_norm(rows, size):
    warps = norm_warps(rows, size)
    assert 1 <= warps <= 32 and warps & (warps - 1) == 0


def test_wrong_operands_of_a_norm_are_named():
    x, scale = jnp.zeros((4, 64)), jnp.zeros((64,))

    def refused(message, x, y, scale, **options):
        with pytest.raises(ValueError, match=f"add_rms_norm: {message}"):
            add_rms_norm(x, y, scale, eps=1e-5, **options)

    refused("implementation must be one of", x, None, scale, implementation="cuda")
    refused("needs x \\[R, D\\] and scale \\[D\\]", x, None, scale[:32])
    refused("needs x .* bfloat16 \\(64,\\)", x, None, scale.astype(jnp.bfloat16))
    refused("y must be float32 \\(4, 64\\)", x, x[:3], scale)
    refused("y must be .* got bfloat16 \\(4, 64\\)", x, x.astype(jnp.bfloat16), scale)
    refused("y must be .* partial sums .* got bfloat16 \\(2, 4, 64\\)", x, jnp.zeros((2, 4, 64), jnp.bfloat16), scale)
    refused("y must be", x, jnp.zeros((1, 2, 4, 64)), scale)
