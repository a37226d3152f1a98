"""Products that do more than multiply, against float64: those of a norm whose division is left to them, gate and up, and the
one that adds to the residual stream and begins the next norm. Interpreted Triton kernels and plain-JAX forms."""

from __future__ import annotations

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest
from lora_jax.kernels.arrivals import new_arrivals
from lora_jax.kernels.cases import LINEARS
from lora_jax.kernels.deferred_norm import DeferredNorm
from lora_jax.kernels.residual_matmul import MAX_ROWS, fits_residual, residual_matmul
from lora_jax.kernels.skinny_matmul import skinny_matmul
from lora_jax.kernels.swiglu import swiglu
from lora_jax.kernels.tuning import matmul_tiles, swiglu_tiles

from tests.support import kernel_checks as checks

ROWS = (1, 3, 8, 16, 17, 33, 64)
DTYPES = ("float32", "bfloat16", "float16")
BLOCKS = 3  # of squares: no power of two


def alone(x: np.ndarray, row: int) -> np.ndarray:
    """x [..., R, D] with NaN in the other rows."""
    other = np.full_like(x, np.nan)
    other[..., row, :] = x[..., row, :]
    return other


def norm_alone(x: DeferredNorm, row: int) -> DeferredNorm:
    squares = np.full_like(x.squares, np.nan)
    squares[:, row] = np.asarray(x.squares)[:, row]
    return dataclasses.replace(x, scaled=alone(np.asarray(x.scaled), row), squares=squares)


def same_row(one: np.ndarray, two: np.ndarray, row: int) -> bool:
    """[..., R, D]: that row is equal and a number, every other one of `two` is NaN."""
    others = np.delete(two, row, axis=-2).astype(np.float64)
    return (
        checks.same_bits(one[..., row, :], two[..., row, :])
        and bool(np.isfinite(two[..., row, :].astype(np.float64)).all())
        and bool(np.isnan(others).all())
    )


# ---- a norm whose division is left to the product ----
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("blocks", [1, BLOCKS, 64])
@pytest.mark.parametrize("rows", [1, 5, 33])
def test_a_deferred_norm_is_the_norm(rows, blocks, dtype):
    rng, kind = np.random.default_rng(rows), checks.oracle.numpy_dtype(dtype)
    x = (rng.standard_normal((rows, 320)) * 2.0 ** rng.integers(-4, 4, (rows, 1))).astype(kind)
    scale = rng.uniform(0.5, 1.5, 320).astype(kind)
    exact = x.astype(np.float64)
    squares = rng.dirichlet(np.ones(blocks), rows).T * (exact * exact).sum(1)
    scaled = (exact * scale.astype(np.float64)).astype(kind)
    norm = DeferredNorm(jnp.asarray(scaled), jnp.asarray(squares, jnp.float32), checks.EPS)
    checks.check_normed(norm, exact, scale, dtype)
    for wrong in checks.with_wrong_norm(norm):
        with pytest.raises(AssertionError, match="normed"):
            checks.check_normed(dataclasses.replace(wrong, squares=jnp.asarray(wrong.squares)), exact, scale, dtype)


def test_a_row_of_zeros_has_a_deferred_norm():
    """eps alone keeps it finite."""
    norm = DeferredNorm(jnp.zeros((2, 64)), jnp.zeros((3, 2)), 1e-5)
    assert not norm.normed().any()
    assert not checks.run(skinny_matmul, norm, np.ones((64, 64), np.float32), **checks.how("interpret")).any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", ROWS)
def test_products_of_a_deferred_norm(rows, dtype):
    assert checks.check_matmul(rows, 192, 128, dtype, "interpret", BLOCKS) == 1


@pytest.mark.parametrize("form", checks.FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("blocks", [1, 2, 7])
def test_blocks_of_squares(blocks, dtype, form):
    checks.check_matmul(5, 448, 64, dtype, form, blocks)


@pytest.mark.parametrize("rows", [8, 33])
@pytest.mark.parametrize(("inputs", "parts"), [(2048, 2), (4096, 4)])
def test_partial_sums_of_a_deferred_norm(inputs, parts, rows):
    """Each part is divided by the root mean square of the whole row."""
    assert checks.check_matmul(rows, inputs, 64, "bfloat16", "interpret", inputs // 64) == parts
    assert checks.check_matmul(rows, inputs, 64, "bfloat16", "xla", inputs // 64) == 1


@pytest.mark.parametrize("form", checks.FORMS)
@pytest.mark.parametrize("rows", [3, 33])
def test_a_rows_product_of_a_deferred_norm_does_not_depend_on_the_others(rows, form):
    x, w = checks.matmul_operands(rows, 2048, 64, "bfloat16")
    norm = checks.deferred(x, BLOCKS)
    one, two = (checks.run(skinny_matmul, v, w, **checks.how(form)) for v in (norm, norm_alone(norm, 1)))
    assert same_row(one, two, 1)


# ---- gate and up ----
@pytest.mark.parametrize("blocks", [None, BLOCKS], ids=["array", "norm"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", ROWS)
def test_gate_and_up(rows, dtype, blocks):
    """Three tiles of columns a half: the second half begins at no power of two."""
    checks.check_swiglu(rows, 192, 192, dtype, "interpret", blocks)


@pytest.mark.parametrize("form", checks.FORMS)
@pytest.mark.parametrize("blocks", [None, 2], ids=["array", "norm"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 64), (576, 320), (2048, 64)])
def test_widths_of_gate_and_up(inputs, outputs, dtype, blocks, form):
    checks.check_swiglu(5, inputs, outputs, dtype, form, blocks)


@pytest.mark.parametrize("form", checks.FORMS)
@pytest.mark.parametrize("rows", [3, 33])
def test_a_rows_gate_and_up_do_not_depend_on_the_others(rows, form):
    x, w = checks.matmul_operands(rows, 192, 384, "bfloat16")
    norm = checks.deferred(x, BLOCKS, 0.1)
    for given, other in ((x, alone(x, 1)), (norm, norm_alone(norm, 1))):
        one, two = (checks.run(swiglu, v, w, **checks.how(form)) for v in (given, other))
        assert same_row(one, two, 1)


@pytest.mark.parametrize("form", checks.FORMS)
def test_gates_far_from_zero(form):
    """exp must not overflow: silu(-1000) is 0 and silu(1000) is 1000."""
    x = np.eye(2, 64, dtype=np.float32)
    w = np.zeros((64, 128), np.float32)
    w[:2, :64], w[:2, 64:] = [[-1000.0], [1000.0]], 1
    got = checks.run(swiglu, x, w, **checks.how(form))
    assert not got[0].any() and (got[1] == 1000).all()


@pytest.mark.parametrize("itemsize", [2, 4])
def test_tiles_of_gate_and_up_fit_a_card(itemsize):
    tiles = swiglu_tiles(64, 4096, 11008, itemsize)
    assert 64 % tiles.block_n == 0 and 64 % tiles.block_k == 0 and tiles.parts == 1
    staged = (64 + 2 * tiles.block_n) * tiles.block_k * itemsize * (tiles.num_stages - 1)
    assert staged <= 99 << 10, "more shared memory than the smallest card has"
    assert 128 <= LINEARS["llama2-7b.gate_up"].slices[0] // tiles.block_n <= 512, "too few or too many programs"


# ---- the residual stream ----
@pytest.mark.parametrize("form", checks.FORMS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rows", [1, 3, 8, 16])
def test_residual(rows, dtype, form):
    """One part, several tiles of columns."""
    assert matmul_tiles(rows, 192, 320, 2).parts == 1
    checks.check_residual(rows, 192, 320, dtype, form)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rows", [1, 3, 8, 16])
@pytest.mark.parametrize(("inputs", "parts"), [(2048, 2), (4096, 4)])
def test_residual_in_parts(inputs, parts, rows, dtype):
    assert matmul_tiles(rows, inputs, 192, 2).parts == parts
    checks.check_residual(rows, inputs, 192, dtype, "interpret")


@pytest.mark.parametrize("sizes", [(4096,) * 3, (2048, 4096, 192, 2048, 4096), (4096, 2048, 4096)], ids=str)
def test_a_chain_of_residual_products(sizes):
    """Each call takes the arrivals that the one before leaves, whatever the numbers of parts of both."""
    arrivals = None
    for inputs in sizes:
        arrivals = checks.check_residual(3, inputs, 64, "bfloat16", "interpret", arrivals)


def test_repeated_calls_have_the_same_bits():
    checks.check_repeated(3, (2048, 4096), 64, "float32", "interpret", calls=2)


@pytest.mark.parametrize("form", checks.FORMS)
@pytest.mark.parametrize("inputs", [192, 4096])
def test_a_rows_residual_does_not_depend_on_the_others(inputs, form):
    y, w, x, scale = checks.residual_operands(4, inputs, 128, "bfloat16")
    op = functools.partial(checks.run, residual_matmul, eps=1e-5, **checks.how(form))
    one, two = (op(v, w, r, scale, new_arrivals(2)) for v, r in ((y, x), (alone(y, 2), alone(x, 2))))
    assert same_row(one[0], two[0], 2) and same_row(one[1].scaled, two[1].scaled, 2)
    assert same_row(one[1].squares[..., None], two[1].squares[..., None], 2)


def test_fits_residual():
    fits = lambda *sizes, dtype=jnp.bfloat16: fits_residual(*sizes, jnp.dtype(dtype))  # noqa: E731
    assert fits(1, 64, 64) and fits(MAX_ROWS, 11008, 4096, dtype=jnp.float32)
    assert not fits(MAX_ROWS + 1, 64, 64) and not fits(1, 96, 64) and not fits(1, 64, 96)
    assert not fits(1, 64, 64, dtype=jnp.float16), "values that the norm has not divided yet could overflow"


# ---- wrong operands ----
NORM = DeferredNorm(jnp.zeros((4, 64)), jnp.zeros((2, 4)), 1e-5)


@pytest.mark.parametrize("op", [skinny_matmul, swiglu], ids=lambda op: op.__name__)
def test_wrong_operands_of_products_are_named(op):
    x, w = jnp.zeros((4, 64)), jnp.zeros((64, 128))

    def refused(message, x, w, **options):
        with pytest.raises(ValueError, match=f"{op.__name__}: {message}"):
            op(x, w, **options)

    for given in (x, NORM):
        refused("implementation must be one of", given, w, implementation="cuda")
        refused("needs x \\[R, K\\] and w \\[K, N\\]", given, w[:32])
        refused("w must have the dtype of x", given, w.astype(jnp.bfloat16))
        refused("at most 64 rows, K and N multiples of 64", given, w[:, :100])
    refused("at most 64 rows", jnp.zeros((65, 64)), w)
    refused("at most 64 rows", dataclasses.replace(NORM, scaled=jnp.zeros((65, 64)), squares=jnp.zeros((2, 65))), w)
    for squares in (jnp.zeros((2, 3)), jnp.zeros((2, 4), jnp.bfloat16), jnp.zeros((4,))):
        refused("x.squares must be float32 \\[B, 4\\]", dataclasses.replace(NORM, squares=squares), w)


def test_gate_and_up_lie_side_by_side():
    with pytest.raises(ValueError, match="swiglu: w must hold gate and up side by side"):
        swiglu(jnp.zeros((4, 64)), jnp.zeros((64, 129)))
    with pytest.raises(ValueError, match="swiglu: at most 64 rows, K and N multiples of 64"):
        swiglu(jnp.zeros((4, 64)), jnp.zeros((64, 192)))  # 96 columns each


def test_wrong_operands_of_the_residual_product_are_named():
    given = dict(
        y=jnp.zeros((4, 64)),
        w=jnp.zeros((64, 128)),
        x=jnp.zeros((4, 128)),
        scale=jnp.zeros(128),
        arrivals=new_arrivals(2),
    )

    def refused(message, implementation="triton", **other):
        with pytest.raises(ValueError, match=f"residual_matmul: {message}"):
            residual_matmul(**{**given, **other}, eps=1e-5, implementation=implementation)

    refused("implementation must be one of", implementation="cuda")
    refused("needs . \\[R, K\\] and w \\[K, N\\]", w=jnp.zeros((32, 128)))
    refused("w must have the dtype of .", w=jnp.zeros((64, 128), jnp.bfloat16))
    refused("at most 64 rows, K and N multiples of 64", w=jnp.zeros((64, 100)))
    refused("at most 16 rows", y=jnp.zeros((17, 64)))
    refused("x must be float32 \\(4, 128\\), got float32 \\(3, 128\\)", x=jnp.zeros((3, 128)))
    refused("x must be float32 .* got bfloat16", x=jnp.zeros((4, 128), jnp.bfloat16))
    refused("scale must be float32 \\(128,\\), got float32 \\(64,\\)", scale=jnp.zeros(64))
    refused("scale must be .* got bfloat16", scale=jnp.zeros(128, jnp.bfloat16))
    refused("arrivals must be int32 zeros of at least 2 pieces, got int32 \\(1,\\)", arrivals=new_arrivals(1))
    refused("arrivals must be .*, got float32", arrivals=jnp.zeros(2))
    refused("arrivals must be .*, got None", arrivals=None)
