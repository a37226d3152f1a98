"""The kernels compiled for real cards on a machine without one: shared memory, one kernel an op, nothing copied."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from lora_jax.kernels.cases import CASES

from tests.support.gpu_program import CARDS, run_compiler

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="JAX's CUDA plugin exists for Linux alone")

# H100 and RTX 4090 differ from H200 and L4 in counts and clocks, which no kernel looks at: a quarter of the cases will do.
EVERY = {"h200": 1, "a100": 2, "l4": 1, "h100": 4, "rtx4090": 4}
# Shared memory that a block may have. With the products of Hopper's tensor cores Triton holds one step more.
SHARED_BYTES = {"h200": 227 << 10, "h100": 227 << 10, "a100": 163 << 10, "l4": 99 << 10, "rtx4090": 99 << 10}
SMALLEST_CARD_BYTES = min(SHARED_BYTES.values())


# Of the other kernels of a step: L4 has the least shared memory.
EVERY_OF_A_STEP = {"h200": 8, "a100": 8, "l4": 2, "h100": 8, "rtx4090": 8}
KINDS_OF_A_STEP = {"decode", "prefill", "rope", "product", "deferred", "residual", "swiglu", "norm"}

# Products with adapters inside: no two of every 5 are of one kind and model.
EVERY_WITH_ADAPTERS = {"h200": 1, "a100": 5, "l4": 3, "h100": 5, "rtx4090": 5}
EVERY_CANDIDATE = {"l4": 2, "h200": 5}
EVERY_OF_TILES = {"h200": 1, "a100": 5, "l4": 1, "h100": 5, "rtx4090": 5}
# Shared memory of an H200's program with Llama-2-7B's sizes, rank 16: as many programs as this lets a multiprocessor hold.
ROOM_WITH_ADAPTERS = {
    "product-llama2-7b.qkv-8": 45_000,  # five
    "residual-llama2-7b.o-8": 45_000,
    "residual-llama2-7b.down-8": 45_000,
    "swiglu-llama2-7b.gate_up-8": 57_000,  # four
    "product-llama2-7b.qkv-64": 220_000,  # one
    "product-llama2-7b.o-64": 113_000,  # two
    "product-llama2-7b.down-64": 113_000,
    "swiglu-llama2-7b.gate_up-64": 113_000,
}


def compile_all(module: str, cards: dict[str, int]) -> Iterator[dict[str, Future[dict[str, Any]]]]:
    with ThreadPoolExecutor(2) as pool:
        yield {card: pool.submit(run_compiler, module, card, str(every)) for card, every in cards.items()}


@pytest.fixture(scope="module")
def results():
    yield from compile_all("tests.kernels.compile_cases", EVERY)


@pytest.fixture(scope="module")
def step_results():
    yield from compile_all("tests.kernels.compile_step_kernels", EVERY_OF_A_STEP)


@pytest.fixture(scope="module")
def adapter_results():
    yield from compile_all("tests.kernels.compile_fused_lora", EVERY_WITH_ADAPTERS)


@pytest.fixture(scope="module")
def tile_results():
    yield from compile_all("tests.kernels.compile_tiled_lora", EVERY_OF_TILES)


def test_every_target_is_compiled_for() -> None:
    assert (
        set(EVERY)
        == set(EVERY_OF_A_STEP)
        == set(EVERY_WITH_ADAPTERS)
        == set(EVERY_OF_TILES)
        == set(SHARED_BYTES)
        == set(CARDS)
    )


@pytest.mark.timeout(900)
@pytest.mark.parametrize("card", EVERY)
def test_cases_compile(card: str, results: dict[str, Future[dict[str, Any]]]) -> None:
    summaries = results[card].result()
    assert list(summaries) == [case.id for case in CASES[:: EVERY[card]]]
    assert {name: error for name, error in summaries.items() if isinstance(error, str)} == {}
    for name, summary in summaries.items():
        assert summary["kernels"] == 2, f"{name}: not one kernel for shrink and one for expand"
        assert summary["shared_bytes"] <= SMALLEST_CARD_BYTES, name


@pytest.mark.timeout(900)
def test_temporaries_are_the_partial_sums_alone(results: dict[str, Future[dict[str, Any]]]) -> None:
    """A copy of a layer's weights, or of y, would show here."""
    summaries = results["h200"].result()
    for case in CASES:
        partial_sums = 32 * case.rows * len(case.linear.slices) * case.rank * 4
        assert summaries[case.id]["temp_bytes"] <= partial_sums + 1024, case.id


@pytest.mark.timeout(900)
@pytest.mark.parametrize("card", EVERY_OF_A_STEP)
def test_kernels_of_a_step_compile(card: str, step_results: dict[str, Future[dict[str, Any]]]) -> None:
    found = step_results[card].result()
    assert len(found) >= 200 // EVERY_OF_A_STEP[card]
    assert {name.split("-")[0] for name in found} == KINDS_OF_A_STEP
    assert {name: error for name, (_, error) in found.items() if isinstance(error, str)} == {}
    for name, (kernels, summary) in found.items():
        assert summary["shared_bytes"] <= SHARED_BYTES[card], (name, summary)
        assert summary["kernels"] == kernels or 1 < summary["kernels"] <= kernels, (name, summary)
        assert summary["temp_bytes"] <= 4 << 20, f"{name}: pages are copied"


@pytest.mark.timeout(900)
@pytest.mark.parametrize("card", EVERY_WITH_ADAPTERS)
def test_products_with_adapters_compile(card: str, adapter_results: dict[str, Future[dict[str, Any]]]) -> None:
    """Each is one kernel, and what it has of its own are the parts of h and of the product: no adapter is copied."""
    found = adapter_results[card].result()
    assert len(found) == -(-24 // EVERY_WITH_ADAPTERS[card])
    assert {name.split("-")[0] for name in found} == {"product", "residual", "swiglu"}
    assert {name: error for name, (_, error) in found.items() if isinstance(error, str)} == {}
    for name, (scratch, summary) in found.items():
        assert summary["shared_bytes"] <= SHARED_BYTES[card], (name, summary)
        assert summary["kernels"] == 1 and summary["temp_bytes"] <= scratch + 1024, (name, scratch, summary)


@pytest.mark.timeout(900)
def test_adapters_leave_room_for_other_programs(adapter_results: dict[str, Future[dict[str, Any]]]) -> None:
    found = {
        name.removesuffix("-r16-bfloat16"): summary for name, (_, summary) in adapter_results["h200"].result().items()
    }
    needed = {name: found[name]["shared_bytes"] for name in ROOM_WITH_ADAPTERS}
    assert {name: size for name, size in needed.items() if size > ROOM_WITH_ADAPTERS[name]} == {}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("card", EVERY_CANDIDATE)
def test_candidates_compile(card: str) -> None:
    """Other tiles than the rules' own, in as much shared memory as the card has: estimated beforehand, so none is tried in vain."""
    every = EVERY_CANDIDATE[card]
    found = run_compiler("tests.kernels.compile_candidates", card, str(SHARED_BYTES[card]), str(every))
    assert len(found) >= 30 // every
    assert {name.split("-")[0] for name in found} == {"product", "swiglu", "residual", "attention"}
    assert {name: error for name, error in found.items() if isinstance(error, str)} == {}
    for name, summary in found.items():
        assert summary["kernels"] == 1 and summary["shared_bytes"] <= SHARED_BYTES[card], (name, summary)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("card", EVERY_OF_TILES)
def test_kernels_of_adapters_in_tiles_compile(card: str, tile_results: dict[str, Future[dict[str, Any]]]) -> None:
    """Each is one kernel that copies nothing: not the product it adds to, no pages, no adapter; a shrink has the parts of h."""
    found = tile_results[card].result()
    assert len(found) == -(-32 // EVERY_OF_TILES[card])
    assert {name.split("-")[0] for name in found} == {"shrink", "rope", "silu", "add"}
    assert {name: error for name, (_, error) in found.items() if isinstance(error, str)} == {}
    for name, (scratch, summary) in found.items():
        assert summary["shared_bytes"] <= SHARED_BYTES[card], (name, summary)
        assert summary["kernels"] == 1 and summary["temp_bytes"] <= scratch + 1024, (name, scratch, summary)


@pytest.mark.timeout(300)
def test_a_tile_too_large_for_a_small_card_is_noticed() -> None:
    found = run_compiler("tests.kernels.compile_oversized")
    assert "hared memory" in found["l4"] and "exceed" in found["l4"]
    assert found["h200"] == "compiled"
