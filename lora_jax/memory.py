"""The memory plan: what the engine will hold on the device, decided before anything is served. Host only."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import CapacityError

GIB = 2**30


@dataclass(frozen=True)
class Sizes:
    """Bytes of everything but the KV pages, and of one page."""

    weights: int
    lora_slots: int
    sampling_state: int
    programs: int  # temporaries of the largest step
    page: int

    @property
    def fixed(self) -> int:
        return self.weights + self.lora_slots + self.sampling_state + self.programs

    @property
    def by_batch(self) -> int:
        """What grows with the rows and the prompt tokens of a step."""
        return self.sampling_state + self.programs


@dataclass(frozen=True)
class MemoryPlan:
    """The sizes, the limit they were held against, and what follows for the cache."""

    sizes: Sizes
    limit: int
    num_pages: int
    page_size: int
    max_model_len: int

    def items(self) -> dict[str, int]:
        s = self.sizes
        return {
            "weights": s.weights,
            "LoRA slots": s.lora_slots,
            "sampling state": s.sampling_state,
            "programs (temporaries)": s.programs,
            f"KV pages ({self.num_pages} x {self.page_size} tokens)": self.num_pages * s.page,
        }

    def __str__(self) -> str:
        rows = [*self.items().items(), ("total", sum(self.items().values())), ("limit", self.limit)]
        return "\n".join(f"  {name:<34} {size / GIB:9.3f} GiB" for name, size in rows)


def round_pages(pages: int) -> int:
    """Down to four significant bits, so that small differences in free memory do not change the programs' shapes."""
    step = 1 << max(0, pages.bit_length() - 4)
    return pages // step * step


def plan_memory(
    sizes: Sizes,
    *,
    limit: int,
    page_size: int,
    max_num_seqs: int,
    model_positions: int,
    max_model_len: int | None,
    num_pages: int | None,
    kv_limit: int | None = None,
) -> MemoryPlan:
    """Choose what was left open (num_pages, max_model_len None) and check that all of it fits.

    kv_limit: most bytes of KV pages that are taken without being asked for. Raises CapacityError with each item's size.
    """
    pages_for = lambda tokens: -(-tokens // page_size)  # noqa: E731
    wanted_len = max_model_len or model_positions
    most_useful = max_num_seqs * pages_for(wanted_len) + 1
    room = max(0, limit - sizes.fixed) // sizes.page
    if num_pages is None:
        ours = room if kv_limit is None else min(room, kv_limit // sizes.page)
        pages = most_useful if most_useful <= ours else round_pages(ours)
    else:
        pages = num_pages
    length = wanted_len if max_model_len else max(1, min(model_positions, (pages - 1) * page_size))
    plan = MemoryPlan(sizes, limit, pages, page_size, length)
    rows = " a smaller max_num_seqs or max_num_batched_tokens," if 2 * sizes.by_batch > sizes.fixed else ""
    if room < 2:
        limits = "max_loras, max_lora_rank, max_total_lora_rank"
        slots = f" fewer or smaller adapter slots ({limits})," if sizes.lora_slots else ""
        advice = f"this leaves no room for a KV cache:{rows} a smaller model, dtype=bfloat16,{slots} or a device with more memory"
        raise CapacityError(_does_not_fit(plan, advice))
    if pages > room:
        advice = "lower max_model_len or max_num_seqs"
        if num_pages:
            advice = "lower num_pages, max_num_seqs" if rows else "lower num_pages"
        raise CapacityError(_does_not_fit(plan, f"{advice}, max_loras, max_lora_rank or max_num_batched_tokens"))
    if pages < pages_for(length) + 1:
        need = pages_for(length) + 1
        advice = f"one request of max_model_len={length} needs {need} pages; lower max_model_len or raise " + (
            "num_pages" if num_pages else "gpu_memory_utilization"
        )
        others = "max_num_seqs, max_num_batched_tokens, max_loras" if rows else "max_loras"
        raise CapacityError(_does_not_fit(plan, f"{advice}, or lower {others}, max_lora_rank"))
    return plan


def check_programs(plan: MemoryPlan, programs: int) -> MemoryPlan:
    """The plan with the programs' real temporaries. Raises CapacityError when they do not fit after all."""
    s = plan.sizes
    real = MemoryPlan(
        Sizes(s.weights, s.lora_slots, s.sampling_state, programs, s.page),
        plan.limit,
        plan.num_pages,
        plan.page_size,
        plan.max_model_len,
    )
    if sum(real.items().values()) > plan.limit:
        raise CapacityError(_does_not_fit(real, "lower max_num_batched_tokens, num_pages or max_num_seqs"))
    return real


def _does_not_fit(plan: MemoryPlan, advice: str) -> str:
    return f"the memory plan does not fit:\n{plan}\nwhat to change: {advice}"
