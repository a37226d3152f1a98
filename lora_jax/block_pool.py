"""Pages of the KV cache, handed out, shared and taken back by number. Host only: never imports jax.

A page may be labelled with what lies in it. Then it can be found and shared, and when nobody holds it any more it is kept for
whoever comes with the same content, until another page is needed and it is the least recently used.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterable


class BlockPool:
    """Pages 1 .. num_pages-1. Page 0 is the trash page, where padding writes land: it is never handed out.

    Every operation costs O(1) a page. A page that is freed more often than it was handed out is a broken invariant.
    """

    def __init__(self, num_pages: int):
        assert num_pages >= 2, f"a pool needs the trash page and at least one more, got num_pages={num_pages}"
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, 0, -1))  # a stack: low and recently used pages go out first
        self._kept: OrderedDict[int, None] = OrderedDict()  # labelled, held by nobody, least recently used first
        self._holders = [0] * num_pages
        self._label: list[Hashable | None] = [None] * num_pages
        self._page: dict[Hashable, int] = {}  # of each label

    @property
    def num_free(self) -> int:
        """Pages that `allocate` can hand out, those that are kept included."""
        return len(self._free) + len(self._kept)

    @property
    def num_kept(self) -> int:
        return len(self._kept)

    def allocate(self, n: int) -> list[int] | None:
        """n pages of one holder each, or None (and nothing changes) when fewer are free."""
        assert n >= 0, f"cannot allocate {n} pages"
        if n > self.num_free:
            return None
        pages = [self._free.pop() if self._free else self._evict() for _ in range(n)]
        for page in pages:
            self._holders[page] = 1
        return pages

    def _evict(self) -> int:
        page, _ = self._kept.popitem(last=False)
        self._unlabel(page)
        return page

    def free(self, pages: Iterable[int]) -> None:
        """Takes pages back from one holder. Those named first are the last to be used for something else."""
        for page in reversed(list(pages)):
            assert 0 < page < self.num_pages, f"page {page} is not one of 1..{self.num_pages - 1}"
            assert self._holders[page], f"page {page} is freed but not in use"
            self._holders[page] -= 1
            if self._holders[page]:
                continue
            if self._label[page] is None:
                self._free.append(page)
            else:
                self._kept[page] = None

    # -- pages that are found by what lies in them --

    def label(self, page: int, label: Hashable) -> None:
        """Says what lies in a page that is held. Where another page has the label, that one keeps it."""
        assert self._holders[page], f"page {page} is labelled but not in use"
        if self._label[page] is None and label not in self._page:
            self._label[page], self._page[label] = label, page

    def find(self, label: Hashable) -> int | None:
        return self._page.get(label)

    def is_kept(self, page: int) -> bool:
        """Whether it counts as free."""
        return page in self._kept

    def share(self, page: int) -> None:
        """One holder more of a page that `find` gave."""
        assert self._label[page] is not None, f"page {page} is shared without a label"
        self._kept.pop(page, None)
        self._holders[page] += 1

    def forget(self, pages: Iterable[int] | None = None) -> None:
        """Takes labels off: what lies in these pages is not to be shared. None: in all."""
        for page in list(self._page.values()) if pages is None else pages:
            self._unlabel(page)
            if page in self._kept:
                del self._kept[page]
                self._free.append(page)

    def _unlabel(self, page: int) -> None:
        label, self._label[page] = self._label[page], None
        if label is not None:
            del self._page[label]

    def check_integrity(self, owned: Iterable[list[int]]) -> None:
        """Asserts that each page is free, kept, or in as many of the `owned` lists as it has holders."""
        free, kept = set(self._free), set(self._kept)
        assert len(free) == len(self._free), f"free pages listed twice: {sorted(self._free)}"
        assert not free & kept, f"pages {sorted(free & kept)} are free and kept"
        owners: Counter[int] = Counter()
        for owner, pages in enumerate(owned):
            assert len(set(pages)) == len(pages), f"owner {owner} holds a page twice: {pages}"
            for page in pages:
                assert page not in free | kept, f"page {page} of owner {owner} is free as well"
                assert 0 < page < self.num_pages, f"owner {owner} holds page {page}, not of 1..{self.num_pages - 1}"
            owners.update(pages)
        assert 0 not in free | kept, "the trash page 0 is free for use"
        lost = set(range(1, self.num_pages)) - free - kept - owners.keys()
        assert not lost, f"pages {sorted(lost)} are neither free nor owned"
        held = {page: n for page, n in enumerate(self._holders) if n}
        assert held == dict(owners), f"holders {held}, owned {dict(owners)}"
        labels = {label: page for page, label in enumerate(self._label) if label is not None}
        assert labels == self._page, "labels and pages disagree"
        assert kept <= set(self._page.values()), f"kept without a label: {sorted(kept - set(self._page.values()))}"
