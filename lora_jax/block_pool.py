"""Pages of the KV cache, handed out and taken back by number. Host only: never imports jax."""

from __future__ import annotations

from collections.abc import Iterable


class BlockPool:
    """Pages 1 .. num_pages-1. Page 0 is the trash page, where padding writes land: it is never handed out.

    Every operation costs O(1) a page. A page that is freed twice, or was never handed out, is a broken invariant.
    """

    def __init__(self, num_pages: int):
        assert num_pages >= 2, f"a pool needs the trash page and at least one more, got num_pages={num_pages}"
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, 0, -1))  # a stack: low and recently used pages go out first
        self._in_use = bytearray(num_pages)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, n: int) -> list[int] | None:
        """n pages, or None (and nothing changes) when fewer are free."""
        assert n >= 0, f"cannot allocate {n} pages"
        if n > len(self._free):
            return None
        pages = [self._free.pop() for _ in range(n)]
        for page in pages:
            self._in_use[page] = 1
        return pages

    def free(self, pages: Iterable[int]) -> None:
        """Takes pages back."""
        for page in pages:
            assert 0 < page < self.num_pages, f"page {page} is not one of 1..{self.num_pages - 1}"
            assert self._in_use[page], f"page {page} is freed but not in use"
            self._in_use[page] = 0
            self._free.append(page)

    def check_integrity(self, owned: Iterable[list[int]]) -> None:
        """Asserts that each page is in exactly one place: free, or in one of the `owned` lists."""
        free = set(self._free)
        assert len(free) == len(self._free), f"free pages listed twice: {sorted(self._free)}"
        owners: dict[int, int] = {}
        for owner, pages in enumerate(owned):
            for page in pages:
                assert page not in owners, f"page {page} belongs to owners {owners[page]} and {owner}"
                assert page not in free, f"page {page} of owner {owner} is free as well"
                assert 0 < page < self.num_pages, f"owner {owner} holds page {page}, not of 1..{self.num_pages - 1}"
                owners[page] = owner
        assert 0 not in free, "the trash page 0 is free for use"
        lost = set(range(1, self.num_pages)) - free - owners.keys()
        assert not lost, f"pages {sorted(lost)} are neither free nor owned"
        marked = {page for page in range(self.num_pages) if self._in_use[page]}
        assert marked == owners.keys(), f"marked in use {sorted(marked)}, owned {sorted(owners)}"
