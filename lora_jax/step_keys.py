"""The one list of keys of the dispatch table: warm-up, lookup, logs, memory report and tests all use it. Host only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from .config import SchedulerConfig

Phase = Literal["prefill", "decode", "prompt_logprobs", "sample", "sampling_state", "init", "init_slots", "write_slot"]
SampleMode = Literal["full", "logprobs"]
SAMPLE_MODES: tuple[SampleMode, ...] = ("full", "logprobs")


@dataclass(frozen=True, order=True)
class StepKey:
    """Names one executable.

    phase: what it does ("init*": makes the state that later steps pass on). bucket: rows (decode, sample) or tokens
    (prefill, prompt_logprobs) it is padded to.
    lora: whether any adapter is active in the batch. items: of a decode step with adapters, how many items of them it has room
    for (lora.active.ItemBuckets), 0: for all that can be. mode: how a sample entry chooses tokens, "" elsewhere.
    """

    phase: Phase
    bucket: int
    lora: bool = False
    mode: str = ""
    items: int = 0

    def __str__(self) -> str:
        tail = f"/{self.mode}" if self.mode else ""
        lora = f"+lora[{self.items}]" if self.items else "+lora" if self.lora else ""
        return f"{self.phase}[{self.bucket}]{lora}{tail}"


def step_keys(
    scheduler: SchedulerConfig, enable_lora: bool, smaller: Callable[[int], tuple[int, ...]] = lambda rows: ()
) -> list[StepKey]:
    """Every key that can occur. smaller: items of the decode steps of so many rows that hold fewer than all. Order: the plain
    steps first, so that they compile first. Without specialize_lora there are no plain model steps."""
    assert enable_lora or scheduler.specialize_lora, "an engine without LoRA has the plain steps alone"
    keys: list[StepKey] = []
    variants = (True,) if not scheduler.specialize_lora else (False, True) if enable_lora else (False,)
    for lora in variants:
        keys += [StepKey("decode", b, lora) for b in scheduler.row_buckets]
        keys += [StepKey("decode", b, lora, items=n) for b in scheduler.row_buckets if lora for n in smaller(b)]
        keys += [StepKey("prefill", b, lora) for b in scheduler.token_buckets]
        keys += [StepKey("prompt_logprobs", b, lora) for b in scheduler.token_buckets]
    keys += [StepKey("sample", b, mode=m) for b in scheduler.row_buckets for m in SAMPLE_MODES]
    keys += [StepKey("sampling_state", 1), StepKey("init", 1)]
    if enable_lora:
        keys += [StepKey("init_slots", 1, lora=True), StepKey("write_slot", 1, lora=True)]
    return keys


def bucket_for(n: int, buckets: tuple[int, ...]) -> int:
    """The smallest bucket that holds n."""
    for b in buckets:
        if n <= b:
            return b
    raise AssertionError(f"{n} exceeds the largest bucket {buckets[-1]}")
