"""The KV pages of requests: which they hold, and which they share with others that began with the same tokens. Host only.

Prefix caching: a page whose tokens are all known is labelled with a digest of them, of all tokens before them and of the adapter's
content. A request that begins with such tokens shares the page instead of computing it. A page counts as computed from the plan of
the step on that computes it: the device runs steps in the order of their plans, and within a step it writes keys and values
before any row reads them.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable

from .block_pool import BlockPool
from .config import CacheConfig
from .request import Request


class KVPages:
    """Pages of all running requests. queries: tokens of requests that began, hits: of those, tokens found in shared pages."""

    def __init__(self, cache: CacheConfig, *, prefix_caching: bool):
        self.cache, self.prefix_caching = cache, prefix_caching
        self.queries = self.hits = 0
        self._pool = BlockPool(cache.num_pages)

    @property
    def num_free(self) -> int:
        return self._pool.num_free

    def stats(self) -> tuple[int, int, int, int]:
        """Free pages, those of them with what a request left in them, queries, hits."""
        return self._pool.num_free, self._pool.num_kept, self.queries, self.hits

    def never_fits(self, num_tokens: int) -> str | None:
        """Why so many tokens are too many for the cache; None: they are not."""
        need, have, size = self.cache.pages_for(num_tokens), self.cache.num_pages - 1, self.cache.page_size
        if need <= have:
            return None
        return f"{num_tokens} tokens need {need} KV pages of {size} tokens, the cache has {have}; raise num_pages"

    def find(self, request: Request) -> list[int]:
        """The pages of the longest beginning of a waiting request's tokens that is there; at least one token is left to compute."""
        # Logprobs of the prompt come from computing all of it.
        if not self.prefix_caching or request.params.prompt_logprobs is not None:
            return []
        pages: list[int] = []
        for label in self._labels(request, len(request.token_ids) - 1):
            page = self._pool.find(label)
            if page is None:
                break
            pages.append(page)
        return pages

    def fits(self, request: Request, found: list[int], spare: int) -> bool:
        """Whether the pages of all its tokens beside those found, and `spare` more, are free."""
        kept = sum(map(self._pool.is_kept, found))
        return self.cache.pages_for(len(request.token_ids)) - len(found) + kept + spare <= self._pool.num_free

    def begin(self, request: Request, found: list[int]) -> None:
        """It holds those pages from now on, and their tokens are computed."""
        for page in found:
            self._pool.share(page)
        request.pages, request.num_computed = list(found), len(found) * self.cache.page_size
        self.queries += len(request.token_ids)
        self.hits += request.num_computed

    def missing(self, request: Request, num_tokens: int) -> int:
        """Pages that it lacks for so many tokens."""
        return self.cache.pages_for(num_tokens) - len(request.pages)

    def extend(self, request: Request, num_tokens: int) -> None:
        """Makes its pages cover so many tokens; that they are free is the caller's to see to."""
        need = self.missing(request, num_tokens)
        if need > 0:
            pages = self._pool.allocate(need)
            assert pages is not None, f"no pages for {num_tokens} tokens, {self._pool.num_free} free"
            request.pages += pages

    def offer(self, request: Request, num_tokens: int) -> None:
        """Lets others share what lies in its pages once the steps planned so far have run: its first num_tokens tokens, as far as
        their values are known."""
        if self.prefix_caching:
            labels = self._labels(request, min(num_tokens, len(request.token_ids)))
            for page, label in zip(request.pages, labels, strict=False):
                self._pool.label(page, label)

    def release(self, request: Request, *, broken: bool) -> None:
        """Takes everything back, which others find until the pages are needed, unless it is broken."""
        if broken:
            self._pool.forget(request.pages)
        else:
            self.offer(request, request.num_computed)
        self._pool.free(request.pages)
        request.pages, request.num_computed = [], 0

    def forget(self) -> None:
        """Nobody is to find what lies in any page now."""
        self._pool.forget()

    def check_integrity(self, running: Iterable[Request]) -> None:
        self._pool.check_integrity(request.pages for request in running)

    def _labels(self, request: Request, num_tokens: int) -> list[bytes]:
        """Digests of the whole pages within its first num_tokens tokens."""
        known, size = request.page_digests, self.cache.page_size
        whole = num_tokens // size
        for i in range(len(known), whole):
            before = known[-1] if known else getattr(request.adapter, "content_hash", "").encode()
            tokens = array("q", request.token_ids[i * size : (i + 1) * size]).tobytes()
            known.append(hashlib.blake2b(before + tokens, digest_size=32).digest())
        return known[:whole]
