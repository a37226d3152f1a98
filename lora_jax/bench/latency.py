"""`bench latency`: how long one batch takes from prompt to last token, and how near that is to memory bandwidth."""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..cli_args import engine_args_from, model_of
from ..config import EngineArgs
from ..errors import ConfigError
from ..request import LoRARequest, SamplingParams, TokensPrompt

PERCENTAGES = (10, 25, 50, 75, 90, 99)


@dataclass(frozen=True)
class Round:
    """Seconds of one batch: until its last token, and until its last row had a first token."""

    latency: float
    ttft: float


def run_batch(
    engine: Any,
    prompts: Sequence[list[int]],
    params: SamplingParams,
    adapters: Sequence[LoRARequest | None],
    clock: Callable[[], float] = time.perf_counter,
) -> Round:
    """Runs the prompts as one batch. adapters: one a prompt, None: base model. Raises what a request failed with."""
    requests = [
        engine.make_request(TokensPrompt(prompt_token_ids=p), params, a) for p, a in zip(prompts, adapters, strict=True)
    ]
    begin = clock()
    for request in requests:
        engine.add_request(request)
    first: dict[str, float] = {}
    while engine.has_unfinished():
        outputs = engine.step()
        now = clock()
        for output in outputs:
            if output.error is not None:
                raise output.error
            if output.token_ids:
                first.setdefault(output.request_id, now)
    end = clock()
    assert len(first) == len(requests), f"{len(requests) - len(first)} requests of the batch gave no token"
    return Round(latency=end - begin, ttft=max(first.values()) - begin)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this subcommand beside those of the engine, named as in `vllm bench latency`."""
    group = parser.add_argument_group("latency")
    group.add_argument("--batch-size", type=_positive, default=8, help="prompts of the batch (default: %(default)s)")
    group.add_argument("--input-len", type=_positive, default=32, help="tokens a prompt (default: %(default)s)")
    group.add_argument("--output-len", type=_positive, default=128, help="tokens to generate (default: %(default)s)")
    group.add_argument("--num-iters-warmup", type=_count, default=10, help="batches before (default: %(default)s)")
    group.add_argument("--num-iters", type=_positive, default=30, help="measured batches (default: %(default)s)")
    group.add_argument(
        "--num-active-loras",
        type=_count,
        default=0,
        metavar="N",
        help="random adapters, shared out over the rows; implies --enable-lora (default: none, all rows are base rows)",
    )
    group.add_argument("--lora-rank", type=_positive, default=16, metavar="R", help="their rank (default: %(default)s)")
    group.add_argument("--json", metavar="PATH", help="also write the closing JSON line to this file")


def run(options: argparse.Namespace, show: Callable[[str], None] = print) -> dict[str, Any]:
    """Runs the benchmark, shows its table and returns its result. Raises: LoraJaxError."""
    args = engine_arguments(options)
    from ..llm import LLM  # only now: jax takes seconds to import, and wrong options should not wait for it

    llm = LLM(**{name: getattr(args, name) for name in EngineArgs.__dataclass_fields__})
    engine: Any = llm.engine
    adapters = load_random_adapters(engine, options.num_active_loras, options.lora_rank)
    rows = [adapters[i % len(adapters)] if adapters else None for i in range(options.batch_size)]
    prompts = np.random.default_rng(args.seed).integers(
        0, engine.model_config.vocab_size, (options.batch_size, options.input_len)
    )
    params = SamplingParams(
        temperature=0, max_tokens=options.output_len, ignore_eos=True, detokenize=engine.tokenizer is not None
    )
    rounds = [
        run_batch(engine, prompts.tolist(), params, rows) for _ in range(options.num_iters_warmup + options.num_iters)
    ][options.num_iters_warmup :]
    result = summarize(rounds, options, engine)
    for line in table(result):
        show(line)
    return result


def engine_arguments(options: argparse.Namespace) -> EngineArgs:
    """The engine's options, with those that follow from the batch where they were not given. Raises: ConfigError."""
    if options.num_active_loras > options.batch_size:
        raise ConfigError(
            f"--num-active-loras {options.num_active_loras} exceeds --batch-size {options.batch_size}: "
            "each active adapter needs a row"
        )
    args = engine_args_from(options)
    changes: dict[str, Any] = {}
    if args.max_model_len is None:
        changes["max_model_len"] = options.input_len + options.output_len
    if args.max_num_seqs is None:
        changes["max_num_seqs"] = options.batch_size
    if options.num_active_loras:
        changes["enable_lora"] = True
        if options.num_active_loras > args.max_loras:
            raise ConfigError(
                f"--num-active-loras {options.num_active_loras} needs --max-loras as large, not {args.max_loras}"
            )
    if args.max_lora_rank == "auto":
        changes["max_lora_rank"] = options.lora_rank
    return dataclasses.replace(args, **changes)


def load_random_adapters(engine: Any, count: int, rank: int) -> list[LoRARequest]:
    """Makes and loads `count` adapters; their files are gone afterwards."""
    from .adapters import write_random_adapter

    names = [f"random-{i}" for i in range(count)]
    with tempfile.TemporaryDirectory(prefix="lora-jax-bench-") as folder:
        for seed, name in enumerate(names):
            engine.load_lora(name, str(write_random_adapter(Path(folder, name), engine.model_config, rank, seed)))
    return [LoRARequest(name) for name in names]


def summarize(rounds: Sequence[Round], options: argparse.Namespace, engine: Any) -> dict[str, Any]:
    """Everything that is printed, as plain data. Times in seconds unless the name says milliseconds."""
    from .machine import describe
    from .traffic import decode_step_bytes

    latencies = np.array([r.latency for r in rounds])
    ttft = float(np.mean([r.ttft for r in rounds]))
    steps = options.output_len - 1
    decode = float(np.mean([r.latency - r.ttft for r in rounds])) / steps if steps else None
    moved = decode_step_bytes(
        engine.model_config,
        np.dtype(engine.dtype).itemsize,
        options.batch_size,
        range(options.input_len + 1, options.input_len + options.output_len),
        options.num_active_loras,
        options.lora_rank,
    )
    return {
        "benchmark": "latency",
        "model": model_of(options),
        **{k: getattr(options, k) for k in ("batch_size", "input_len", "output_len", "num_active_loras", "lora_rank")},
        "enable_lora": bool(options.enable_lora or options.num_active_loras),
        "dtype": np.dtype(engine.dtype).name,
        "avg_latency": float(latencies.mean()),
        "percentiles": {str(p): float(np.percentile(latencies, p)) for p in PERCENTAGES},
        "latencies": latencies.tolist(),
        "ttft": ttft,
        "ms_per_output_token": None if decode is None else decode * 1e3,
        "output_tokens_per_second": options.batch_size * options.output_len / float(latencies.mean()),
        "bytes_per_step": asdict(moved) | {"total": moved.total},
        "achieved_gb_per_second": None if decode is None else moved.total / decode / 1e9,
        "compilations_after_warmup": engine.stats()["compilations_after_warmup"],
        **describe(),
    }


def table(result: dict[str, Any]) -> list[str]:
    """The lines for people."""
    lines = [f"Avg latency: {result['avg_latency']:.6f} seconds"]
    lines += [f"{p}% percentile latency: {seconds:.6f} seconds" for p, seconds in result["percentiles"].items()]
    lines.append(f"Time to first token: {result['ttft'] * 1e3:.2f} ms (all {result['batch_size']} rows)")
    if result["ms_per_output_token"] is not None:
        lines.append(f"Decode: {result['ms_per_output_token']:.3f} ms per output token")
    lines.append(f"Output: {result['output_tokens_per_second']:,.1f} tokens/s")
    parts = {name: size / 1e9 for name, size in result["bytes_per_step"].items()}
    lines.append(
        "Must move per decode step: {total:.4g} GB (weights {weights:.4g}, live KV {kv:.4g}, "
        "adapters {adapters:.4g})".format(**parts)
    )
    if result["achieved_gb_per_second"] is not None:
        lines.append(f"Achieved: {result['achieved_gb_per_second']:,.1f} GB/s")
    return lines


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be >= 1, got {value}")
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"must be >= 0, got {value}")
    return value
