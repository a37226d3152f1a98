"""`bench latency`: how long one batch takes from prompt to last token, and how near that is to memory bandwidth."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from ..cli_args import model_of
from ..config import EngineArgs
from ..errors import ConfigError
from .plot import Panel
from .rounds import (
    RANK,
    Round,
    add_batch_arguments,
    add_batch_engine_arguments,
    batch_engine_args,
    count,
    greedy,
    positive,
    random_prompts,
    run_batch,
    shared_out,
)

HELP = "one batch from prompt to last token"
DESCRIPTION = (
    "Time one batch of equal prompts from start to last token, many times over, and compare with the bytes that each decode "
    "step has to read."
)
PERCENTAGES = (10, 25, 50, 75, 90, 99)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this subcommand, named as in `vllm bench latency`, and those of the engine."""
    group = parser.add_argument_group("latency")
    add_batch_arguments(group)
    group.add_argument("--num-iters-warmup", type=count, default=10, help="batches before (default: %(default)s)")
    group.add_argument("--num-iters", type=positive, default=30, help="measured batches (default: %(default)s)")
    group.add_argument(
        "--num-active-loras",
        type=count,
        default=0,
        metavar="N",
        help="random adapters, shared out over the rows; implies --enable-lora (default: none, all rows are base rows)",
    )
    add_batch_engine_arguments(parser)


def run(options: argparse.Namespace, show: Callable[[str], None] = print) -> dict[str, Any]:
    """Runs the benchmark, shows its table and returns its result. Raises: LoraJaxError."""
    check(options)
    args = batch_engine_args(options, options.num_active_loras)
    from ..engine import Engine  # only now: jax takes seconds to import, and wrong options should not wait for it
    from .adapters import load_random_adapters
    from .machine import read_bandwidth

    engine = Engine(args)
    rows = shared_out(load_random_adapters(engine, options.num_active_loras, options.lora_rank), options.batch_size)
    prompts = random_prompts(options, engine.model_config.vocab_size, args.seed)
    params = greedy(options.output_len, detokenize=engine.tokenizer is not None)
    rounds = [run_batch(engine, prompts, params, rows) for _ in range(options.num_iters_warmup + options.num_iters)]
    result = summarize(rounds[options.num_iters_warmup :], options, args, engine)
    bandwidth = read_bandwidth(engine.device)
    result["read_bandwidth"] = bandwidth.as_dict(result["achieved_bytes_per_second"])
    for line in table(result):
        show(line)
    return result


def check(options: argparse.Namespace) -> None:
    """Fills in the rank of the active adapters; without any there is none. Raises: ConfigError for a rank that nothing has."""
    if options.num_active_loras:
        options.lora_rank = options.lora_rank or RANK
    elif options.lora_rank is not None:
        raise ConfigError(
            f"--lora-rank {options.lora_rank} is of active adapters, and there are none: give --num-active-loras too (the "
            "slots of an engine whose adapters are idle are sized by --max-lora-rank)"
        )


def summarize(rounds: Sequence[Round], options: argparse.Namespace, args: EngineArgs, engine: Any) -> dict[str, Any]:
    """What was measured, as plain data. Times in seconds unless the name says milliseconds; lora_rank: None without active
    adapters."""
    from .report import hardware
    from .traffic import decode_step_bytes

    latencies = np.array([r.latency for r in rounds])
    decode = [seconds for r in rounds if (seconds := r.per_token(options.output_len)) is not None]
    step = float(np.mean(decode)) if decode else None
    moved = decode_step_bytes(
        engine.model_config,
        np.dtype(engine.dtype).itemsize,
        options.batch_size,
        range(options.input_len + 1, options.input_len + options.output_len),
        options.num_active_loras,
        options.lora_rank or 0,
    )
    return {
        "model": model_of(options),
        **{k: getattr(options, k) for k in ("batch_size", "input_len", "output_len", "num_active_loras", "lora_rank")},
        "enable_lora": args.enable_lora,
        "specialize_lora": args.specialize_lora,
        "dtype": np.dtype(engine.dtype).name,
        "num_pages": engine.memory_plan.num_pages,
        "avg_latency": float(latencies.mean()),
        "percentiles": {str(p): float(np.percentile(latencies, p)) for p in PERCENTAGES},
        "latencies": latencies.tolist(),
        "ttfts": [r.ttft for r in rounds],
        "ttft": float(np.mean([r.ttft for r in rounds])),
        "ms_per_output_token": None if step is None else step * 1e3,
        "output_tokens_per_second": options.batch_size * options.output_len / float(latencies.mean()),
        "bytes_per_step": asdict(moved) | {"total": moved.total},
        "achieved_bytes_per_second": None if step is None else moved.total / step,
        "compilations_after_warmup": engine.stats()["compilations_after_warmup"],
        "hardware": hardware(engine.device),
    }


def table(result: dict[str, Any]) -> list[str]:
    """The lines for people; the first ones are those of `vllm bench latency`."""
    lines = [f"Avg latency: {result['avg_latency']} seconds"]
    lines += [f"{p}% percentile latency: {seconds} seconds" for p, seconds in result["percentiles"].items()]
    if result["ms_per_output_token"] is not None:
        lines.append(f"Decode: {result['ms_per_output_token']:.3f} ms per output token")
    lines.append(f"Time to first token: {result['ttft'] * 1e3:.2f} ms (all {result['batch_size']} rows)")
    lines.append(f"Output: {result['output_tokens_per_second']:,.1f} tokens/s")
    if result["achieved_bytes_per_second"] is None:
        return [*lines, "No decode step was measured: --output-len is 1"]
    parts = {name: size / 1e9 for name, size in result["bytes_per_step"].items()}
    lines.append(
        "Must move per decode step: {total:.4g} GB (weights {weights:.4g}, live KV {kv:.4g}, "
        "adapters {adapters:.4g})".format(**parts)
    )
    achieved, measured = result["achieved_bytes_per_second"], result["read_bandwidth"]
    lines.append(f"Achieved: {achieved / 1e9:,.1f} GB/s")
    if measured["bytes_per_second"] is None:
        return [*lines, f"This machine's read bandwidth was not measured: {measured['reason']}"]
    lines.append(
        f"That is {measured['share']:.1%} of this machine's read bandwidth, {measured['bytes_per_second'] / 1e9:,.1f} GB/s "
        f"(best passes over {measured['buffer_bytes'] / 2**20:,.0f} MiB)"
    )
    return lines


def chart(result: dict[str, Any]) -> list[Panel]:
    """Every batch, and the mean."""
    series = {
        "until the last token": [1e3 * s for s in result["latencies"]],
        "until all rows had a first token": [1e3 * s for s in result["ttfts"]],
    }
    title = f"{result['num_active_loras']} active adapters, {result['dtype']}"
    if result["ms_per_output_token"] is not None:
        title += f": {result['ms_per_output_token']:.3f} ms per output token"
    mean = ("mean", 1e3 * result["avg_latency"])
    return [Panel(title, "time of a batch", "ms", series, label_name="batch", kind="lines", reference=mean)]
