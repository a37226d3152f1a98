"""Small frozen configurations, composed by `EngineArgs`, which is what `LLM(...)` and the command line take. Host only."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

from .errors import ConfigError

Implementation = Literal["auto", "triton", "xla"]

LARGEST_RANK = 256
PLACE_RANK = 16  # of the device stacks, where slots have more


def _buckets(low: int, high: int, factor: int) -> tuple[int, ...]:
    out = []
    while low < high:
        out.append(low)
        low *= factor
    return (*out, high)


@dataclass(frozen=True)
class SchedulerConfig:
    """max_num_seqs: rows of a batch. max_num_batched_tokens: prompt tokens of one prefill step (longer prompts are cut).

    max_model_len: prompt plus output of one request. max_prefill_seqs: requests that one prefill step may hold.
    specialize_lora: whether steps without an active adapter run the plain program. False needs an engine with LoRA.
    token_bucket_growth: of one prefill bucket to the next: a prompt is padded by less than this factor.
    enable_prefix_caching: whether requests that begin with the same tokens, and adapter, share their pages.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    specialize_lora: bool = True
    token_bucket_growth: int = 4
    enable_prefix_caching: bool = True

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be >= 1, got {getattr(self, name)}")

    @property
    def row_buckets(self) -> tuple[int, ...]:
        return _buckets(1, self.max_num_seqs, 2)

    @property
    def token_buckets(self) -> tuple[int, ...]:
        return _buckets(min(32, self.max_num_batched_tokens), self.max_num_batched_tokens, self.token_bucket_growth)

    @property
    def max_prefill_seqs(self) -> int:
        return next(b for b in self.row_buckets if b >= min(64, self.max_num_seqs))


@dataclass(frozen=True)
class CacheConfig:
    """num_pages pages of page_size tokens each. Page 0 is never handed out: padding writes land there."""

    page_size: int
    num_pages: int

    def __post_init__(self) -> None:
        if self.page_size < 1 or self.page_size & (self.page_size - 1):
            raise ConfigError(f"page_size must be a power of two, got {self.page_size}")
        if self.num_pages < 2:
            raise ConfigError(f"num_pages must be >= 2, got {self.num_pages}: page 0 is reserved for padding")

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def most_listed(self, scheduler: SchedulerConfig) -> int:
        """Pages that the rows of one prefill step may hold together: of its tokens, and of several long beginnings that lie in the
        cache already."""
        longest, tokens = self.pages_for(scheduler.max_model_len), self.pages_for(scheduler.max_num_batched_tokens)
        return 4 * longest + tokens + scheduler.max_prefill_seqs


@dataclass(frozen=True)
class LoRAConfig:
    """max_loras: device slots. max_lora_rank: largest rank, padded to a power of two on the device.

    max_cpu_loras: adapters kept in host memory. target_modules: names of linears that get slots (None: all). max_total_lora_rank:
    of all adapters in slots together, each counted up to a multiple of place_rank (None: max_loras times the padded rank).
    """

    max_loras: int
    max_lora_rank: int
    max_cpu_loras: int
    target_modules: tuple[str, ...] | None = None
    max_total_lora_rank: int | None = None

    def __post_init__(self) -> None:
        if self.max_loras < 1:
            raise ConfigError(f"max_loras must be >= 1, got {self.max_loras}")
        if not 1 <= self.max_lora_rank <= LARGEST_RANK:
            raise ConfigError(f"max_lora_rank must be in [1, {LARGEST_RANK}], got {self.max_lora_rank}")
        if self.max_cpu_loras < self.max_loras:
            raise ConfigError(f"max_cpu_loras={self.max_cpu_loras} must be >= max_loras={self.max_loras}")
        total = self.max_total_lora_rank
        if total is not None and self.places_of_slot == 1:
            raise ConfigError(
                f"max_total_lora_rank={total} needs a max_lora_rank above {PLACE_RANK}, not {self.max_lora_rank}: each slot takes "
                f"{self.padded_rank} ranks"
            )
        if total is not None and total < self.padded_rank:
            raise ConfigError(
                f"max_total_lora_rank={total} has no room for one adapter of max_lora_rank={self.max_lora_rank}: at least "
                f"{self.padded_rank}"
            )

    @property
    def padded_rank(self) -> int:
        return max(8, 1 << (self.max_lora_rank - 1).bit_length())

    @property
    def place_rank(self) -> int:
        """Ranks that a place of the device stacks has."""
        return min(PLACE_RANK, self.padded_rank)

    @property
    def places_of_slot(self) -> int:
        """At most."""
        return self.padded_rank // self.place_rank

    def places_for(self, rank: int) -> int:
        """That an adapter takes."""
        return -(-rank // self.place_rank)

    @property
    def num_places(self) -> int:
        """Of the device stacks. Where a slot never needs more than one, each has its own."""
        most = self.max_loras * self.padded_rank
        total = most if self.max_total_lora_rank is None else min(most, self.max_total_lora_rank)
        return total // self.place_rank


def _opt(default: Any, help: str, **meta: Any) -> Any:
    return field(default=default, metadata={"help": help, **meta})


@dataclass(frozen=True)
class EngineArgs:
    """Every option of an engine, named as in vLLM. Field metadata feeds the command line.

    Raises: ConfigError naming the option.
    """

    model: str = _opt("", "Hugging Face directory, hub id, or a known shape with load_format=dummy", positional=True)
    tokenizer: str | None = _opt(None, "directory or hub id of the tokenizer (default: the model's)")
    revision: str | None = _opt(None, "hub revision")
    enable_lora: bool = _opt(False, "serve LoRA adapters")
    max_loras: int = _opt(8, "device slots: distinct adapters in one batch")
    max_lora_rank: int | Literal["auto"] = _opt(
        "auto", "largest adapter rank (auto: of the adapters named at start, else 16)"
    )
    max_total_lora_rank: int | None = _opt(
        None,
        "ranks of all adapters in slots together: less device memory where few are large (default: max_loras x max_lora_rank)",
    )
    max_cpu_loras: int | None = _opt(None, "adapters kept in host memory (default: 4 x max_loras)")
    lora_target_modules: tuple[str, ...] | None = _opt(None, "linears that get adapter slots (default: all)")
    lora_modules: tuple[str, ...] = _opt((), "adapters to load at start, name=path", metavar="NAME=PATH")
    specialize_lora: bool = _opt(
        True,
        "run the program without LoRA where no adapter is active (vLLM: cudagraph_specialize_lora); off: every step is the "
        "LoRA program, half as many programs",
    )
    max_model_len: int | None = _opt(None, "prompt plus output tokens (default: the largest that fits)")
    max_num_seqs: int | None = _opt(None, "rows of a batch (default: 64 on a GPU, 8 on CPU)")
    max_num_batched_tokens: int | None = _opt(None, "prompt tokens of one step (default: 2048 on a GPU, 512 on CPU)")
    num_pages: int | None = _opt(None, "KV pages (default: what memory allows and max_num_seqs can use)")
    page_size: int = _opt(16, "tokens a KV page")
    enable_prefix_caching: bool = _opt(
        True, "requests that begin with the same tokens, and adapter, share what was computed of them"
    )
    gpu_memory_utilization: float = _opt(0.9, "share of the device memory the engine may use")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = _opt(
        "auto", "weights and activations (auto: on a GPU the checkpoint's, bfloat16 for float32 ones; on CPU float32)"
    )
    load_format: Literal["auto", "dummy"] = _opt("auto", "dummy: random weights from the configuration alone")
    device: Literal["auto", "cpu", "gpu"] = _opt("auto", "where to run")
    tensor_parallel_size: int = _opt(1, "GPUs to split the model over (only 1 so far)")
    seed: int = _opt(0, "seed of dummy weights and of requests without one")
    max_logprobs: int = _opt(20, "largest logprobs / prompt_logprobs a request may ask for")
    implementation: Implementation = _opt("auto", "LoRA kernels: triton (GPU) or xla")
    enable_command_buffers: bool = _opt(True, "let XLA turn each step into one CUDA graph")
    compilation_cache_dir: str | None = _opt(
        None, "folder of compiled programs (default: the user's cache; empty string: none)"
    )
    disable_tqdm: bool = _opt(False, "no progress bars at start")

    def __post_init__(self) -> None:
        if not self.model:
            raise ConfigError("model is empty: give a Hugging Face directory or a hub id")
        for f in dataclasses.fields(self):
            options = _choices(f.type)
            value = getattr(self, f.name)
            if options and value not in options and not (f.name == "max_lora_rank" and isinstance(value, int)):
                raise ConfigError(f"{f.name} must be one of {', '.join(options)}, got {value!r}")
        sizes = "max_loras max_num_seqs max_num_batched_tokens max_model_len num_pages page_size max_cpu_loras max_lora_rank"
        sizes += " max_total_lora_rank"
        for name in sizes.split():
            value = getattr(self, name)
            if isinstance(value, bool) or (isinstance(value, int) and value < 1):
                raise ConfigError(f"{name} must be >= 1, got {value!r}")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(f"gpu_memory_utilization must be in (0, 1], got {self.gpu_memory_utilization!r}")
        if self.tensor_parallel_size != 1:
            raise ConfigError(f"tensor_parallel_size={self.tensor_parallel_size} is not supported yet: use 1")
        if isinstance(self.seed, int) and self.seed < 0:
            raise ConfigError(f"seed must be >= 0, got {self.seed}")
        if not 0 <= self.max_logprobs <= 1000:
            raise ConfigError(f"max_logprobs must be in [0, 1000], got {self.max_logprobs}")
        if self.lora_modules and not self.enable_lora:
            object.__setattr__(self, "enable_lora", True)
        if not self.specialize_lora and not self.enable_lora:
            raise ConfigError(
                "specialize_lora=False needs enable_lora: without adapters there is only the plain program"
            )


def _choices(annotation: Any) -> tuple[str, ...]:
    """The strings of a Literal annotation (annotations are strings here)."""
    text = str(annotation)
    if text == "Implementation":
        return ("auto", "triton", "xla")
    if "Literal[" not in text or "|" in text:
        return ()
    return tuple(s.strip().strip("\"'") for s in text[text.index("[") + 1 : text.rindex("]")].split(","))
