"""BlockPool against a set of numbers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_jax.block_pool import BlockPool


def test_hands_out_every_page_but_the_trash_page():
    pool = BlockPool(5)
    assert pool.num_free == 4
    pages = pool.allocate(4)
    assert pages is not None and sorted(pages) == [1, 2, 3, 4]
    assert pool.allocate(1) is None and pool.allocate(0) == []


def test_a_refused_allocation_takes_nothing():
    pool = BlockPool(4)
    assert pool.allocate(4) is None
    assert pool.num_free == 3
    pool.check_integrity([])


@pytest.mark.parametrize("pages", [[2, 2], [3], [0], [9], [-1]])
def test_frees_only_pages_in_use(pages: list[int]):
    pool = BlockPool(4)
    assert pool.allocate(2) == [1, 2]
    with pytest.raises(AssertionError, match=f"page {pages[-1]}"):
        pool.free(pages)


@pytest.mark.parametrize("owned", [[[1]], [[1, 2], [2]], [[1, 2, 3]], [[1, 2], [0]], [[1, 1, 2]], []])
def test_integrity_check_sees_lost_shared_and_foreign_pages(owned: list[list[int]]):
    pool = BlockPool(5)
    assert pool.allocate(2) == [1, 2]
    pool.check_integrity([[1], [2]])
    with pytest.raises(AssertionError):
        pool.check_integrity(owned)


@given(num_pages=st.integers(2, 12), moves=st.lists(st.integers(-3, 5), max_size=60))
def test_any_sequence_matches_a_set(num_pages: int, moves: list[int]):
    """moves: n >= 0 allocates n pages, n < 0 frees the allocation at that index from the end."""
    pool, free, owned = BlockPool(num_pages), set(range(1, num_pages)), []
    for n in moves:
        if n >= 0:
            pages = pool.allocate(n)
            assert (pages is None) == (n > len(free))
            if pages is not None:
                assert len(pages) == len(set(pages)) == n and set(pages) <= free
                free -= set(pages)
                owned.append(pages)
        elif len(owned) >= -n:
            pages = owned.pop(n)
            pool.free(pages)
            free |= set(pages)
        assert pool.num_free == len(free)
        pool.check_integrity(owned)
