"""`bench throughput`: many requests of unequal lengths, handed over at once, until the last token."""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tqdm import tqdm

from ..cli_args import add_engine_arguments, engine_args_from, model_of
from ..config import EngineArgs
from ..errors import ConfigError, LoraJaxError
from ..request import LoRARequest, SamplingParams, TokensPrompt
from . import report, workload
from .plot import Panel
from .rounds import count, positive
from .workload import Item

HELP = "many requests at once, of mixed lengths and adapters"
DESCRIPTION = (
    "Hand a list of requests to one engine at once and time it until the last token. The list is random, always the same "
    "for the same options and seed, or comes from a file."
)
DEFAULT_PROMPTS, DEFAULT_LEN = 128, 128
OF_RANDOM_LISTS: dict[str, Any] = {  # options that mean nothing to a list from a file, and their defaults
    "input_len": DEFAULT_LEN,
    "output_len": DEFAULT_LEN,
    "random_range_ratio": workload.RANGE_RATIO,
    "lora_assignment": None,
    "lora_share": None,
}
COUNTED = ("steps", "preemptions", "slot_writes", "failed_steps", "prefix_cache_hits")  # of the engine's counters


@dataclass
class Measured:
    """Seconds since the requests were handed over. first: of each request's first token. done: of each step that gave tokens,
    with the output tokens given so far. counters: of the engine, what this run added."""

    wall: float
    first: list[float]
    prompt_tokens: int
    output_tokens: int
    done: list[tuple[float, int]] = field(default_factory=list)
    counters: dict[str, int] = field(default_factory=dict)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options, named as in `vllm bench throughput` where it has them."""
    group = parser.add_argument_group("throughput")
    shown = f"{DEFAULT_PROMPTS}, or all of a workload"
    workload.add_length_arguments(group, None, DEFAULT_LEN, DEFAULT_LEN, shown)
    group.add_argument(
        "--workload",
        "--dataset-path",
        dest="workload",
        metavar="FILE",
        help="take the requests from a file of one JSON object a line: prompt_token_ids (or prompt_len), output_len, adapter "
        "(a number, or null); --num-prompts takes the first ones",
    )
    group.add_argument("--save-workload", metavar="FILE", help="also write the list of requests to such a file")
    group.add_argument(
        "--num-loras",
        type=count,
        metavar="N",
        help="random adapters, beside those of --lora-modules; implies --enable-lora (default: as many as a workload names)",
    )
    group.add_argument("--lora-rank", type=positive, default=16, metavar="R", help="of the random adapters")
    workload.add_assignment_arguments(group)
    group.add_argument("--num-warmups", type=count, default=8, metavar="N", help="requests run before, not timed")
    group.add_argument("--disable-detokenize", action="store_true", help="make token ids only, no text")
    add_engine_arguments(parser)
    parser.set_defaults(enable_prefix_caching=False)  # a first run on a list would make the second one faster


def run(options: argparse.Namespace, show: Callable[[str], None] = print) -> dict[str, Any]:
    """Runs the benchmark, shows its table and returns its result. Raises: LoraJaxError."""
    args = engine_args_from(options)
    items = requests(options, args)
    args = engine_arguments(args, options, items)
    if options.save_workload:
        workload.write(items, options.save_workload)
    from ..engine import Engine  # only now: jax takes seconds to import, and wrong options should not wait for it
    from .adapters import load_random_adapters

    engine = Engine(args)
    named = [LoRARequest(module.partition("=")[0]) for module in args.lora_modules]
    adapters = named + load_random_adapters(engine, num_adapters(args, options, items) - len(named), options.lora_rank)
    params = SamplingParams(
        temperature=0, ignore_eos=True, detokenize=engine.tokenizer is not None and not options.disable_detokenize
    )
    if options.num_warmups:
        measure(engine, items[: options.num_warmups], params, adapters)
    with tqdm(total=len(items), desc="throughput", unit="prompt", disable=args.disable_tqdm) as bar:
        measured = measure(engine, items, params, adapters, bar.update)
    result = summarize(measured, items, options, engine)
    result["hardware"] = report.hardware(engine.device)
    for line in table(result):
        show(line)
    return result


def requests(options: argparse.Namespace, args: EngineArgs) -> list[Item]:
    """The list to run. Raises: ConfigError."""
    vocab = _vocab(args)
    named = len(args.lora_modules)
    if options.workload is None:
        number = options.num_prompts or DEFAULT_PROMPTS
        return workload.random_items(options, number, named + (options.num_loras or 0), vocab, args.seed)
    for name, default in OF_RANDOM_LISTS.items():
        if getattr(options, name) != default:
            flag = name.replace("_", "-")
            raise ConfigError(f"--{flag} and --workload exclude each other: the file says what is asked, and of whom")
    return workload.read(options.workload, vocab, args.seed, options.num_prompts)


def _vocab(args: EngineArgs) -> int:
    from ..builder import find_model

    return find_model(args).config.vocab_size


def num_adapters(args: EngineArgs, options: argparse.Namespace, items: Sequence[Item]) -> int:
    """Adapters to have, the named ones included. Raises: ConfigError when the workload names more."""
    needed = 1 + max((item.adapter for item in items if item.adapter is not None), default=-1)
    named = len(args.lora_modules)
    if options.num_loras is None:
        return max(named, needed)
    if named + options.num_loras < needed:
        raise ConfigError(
            f"the workload names adapter {needed - 1}, so {needed} are needed: "
            f"--num-loras {options.num_loras} and {named} of --lora-modules are too few"
        )
    return named + options.num_loras


def engine_arguments(args: EngineArgs, options: argparse.Namespace, items: Sequence[Item]) -> EngineArgs:
    """The engine's options, with those that follow from the list where they were not given. Raises: ConfigError."""
    longest, adapters = workload.longest(items), num_adapters(args, options, items)
    changes: dict[str, Any] = {}
    if args.max_model_len is None:
        changes["max_model_len"] = longest
    elif args.max_model_len < longest:
        raise ConfigError(
            f"the longest request has {longest} tokens: --max-model-len {args.max_model_len} is too small"
        )
    if adapters:
        changes["enable_lora"] = True
        room = args.max_cpu_loras or max(4 * args.max_loras, adapters)
        if room < adapters:
            raise ConfigError(f"{adapters} adapters do not fit in --max-cpu-loras {room}")
        changes["max_cpu_loras"] = room
        if adapters > len(args.lora_modules) and args.max_lora_rank == "auto" and not args.lora_modules:
            changes["max_lora_rank"] = options.lora_rank
    return dataclasses.replace(args, **changes)


def measure(
    engine: Any,
    items: Sequence[Item],
    params: SamplingParams,
    adapters: Sequence[LoRARequest],
    progress: Callable[[], Any] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
) -> Measured:
    """Runs all items to their last token. Raises what a request failed with, and LoraJaxError when one got too few tokens.

    The time includes checking and handing over the requests, as it does for a caller of `LLM.generate`.
    """
    before = engine.stats()
    begin = clock()
    wanted: dict[str, int] = {}
    for item in items:
        request = engine.make_request(
            TokensPrompt(prompt_token_ids=list(item.prompt_token_ids)),
            dataclasses.replace(params, max_tokens=item.output_len),
            None if item.adapter is None else adapters[item.adapter],
        )
        engine.add_request(request)
        wanted[request.request_id] = item.output_len
    first: dict[str, float] = {}
    given: Counter[str] = Counter()
    done: list[tuple[float, int]] = []
    unfinished, now = set(wanted), 0.0
    while unfinished and engine.has_unfinished():
        outputs = engine.step()
        now = clock() - begin
        for output in outputs:
            if output.error is not None:
                raise output.error
            if output.token_ids:
                first.setdefault(output.request_id, now)
                given[output.request_id] += len(output.token_ids)
            if output.finished:
                unfinished.discard(output.request_id)
                progress()
        if any(output.token_ids for output in outputs):
            done.append((now, given.total()))
    while engine.has_unfinished():  # what was begun ahead for requests that had ended, if anything
        engine.step()
    for name, tokens in wanted.items():
        if given[name] != tokens:
            raise LoraJaxError(f"{name} got {given[name]} tokens of {tokens}")
    after = engine.stats()
    return Measured(
        now,
        [first[name] for name in wanted],
        sum(len(item.prompt_token_ids) for item in items),
        given.total(),
        done,
        {name: after[name] - before[name] for name in COUNTED},
    )


def summarize(measured: Measured, items: Sequence[Item], options: argparse.Namespace, engine: Any) -> dict[str, Any]:
    """Everything that is printed, as plain data. Times in seconds; rates a second."""
    wall, tokens = measured.wall, measured.prompt_tokens + measured.output_tokens
    active = [item.adapter for item in items if item.adapter is not None]
    args = engine.args
    return {
        "model": model_of(options),
        "num_prompts": len(items),
        "workload": options.workload,
        **(
            {}
            if options.workload
            else {k: getattr(options, k) for k in ("input_len", "output_len", "random_range_ratio")}
        ),
        "seed": args.seed,
        "dtype": np.dtype(engine.dtype).name,
        "enable_lora": args.enable_lora,
        "lora_assignment": None if options.workload else workload.assignment_of(options, len(engine.list_loras())),
        "num_loras": len(engine.list_loras()),
        "requests_with_adapter": len(active),
        "distinct_adapters": len(set(active)),
        "wall_seconds": wall,
        "prompt_tokens": measured.prompt_tokens,
        "output_tokens": measured.output_tokens,
        "requests_per_second": len(items) / wall,
        "total_tokens_per_second": tokens / wall,
        "output_tokens_per_second": measured.output_tokens / wall,
        "ttft_median": statistics.median(measured.first),
        "ttft_p99": float(np.percentile(measured.first, 99)),
        **measured.counters,
        "engine": dataclasses.asdict(engine.scheduler_config) | {"max_loras": args.max_loras},
        "num_pages": engine.stats()["num_pages"],
        "compilations_after_warmup": engine.stats()["compilations_after_warmup"],
        "ttft": measured.first,
        "output_tokens_over_time": thinned(measured.done),
    }


def thinned(points: Sequence[tuple[float, int]], most: int = 200) -> list[list[float]]:
    """At most `most` of the points, evenly chosen, first and last among them."""
    chosen = np.unique(np.linspace(0, len(points) - 1, min(most, len(points))).astype(int))
    return [list(points[i]) for i in chosen]


def table(result: dict[str, Any]) -> list[str]:
    """The lines for people; the first three are those of `vllm bench throughput`."""
    r = result
    time = f"Time: {r['wall_seconds']:.3f} s for {r['num_prompts']} requests"
    if r["requests_with_adapter"]:
        time += f", {r['requests_with_adapter']} of them with an adapter: {r['distinct_adapters']} of {r['num_loras']} drawn"
    return [
        f"Throughput: {r['requests_per_second']:.2f} requests/s, {r['total_tokens_per_second']:.2f} total tokens/s, "
        f"{r['output_tokens_per_second']:.2f} output tokens/s",
        f"Total num prompt tokens:  {r['prompt_tokens']}",
        f"Total num output tokens:  {r['output_tokens']}",
        time,
        f"Time to first token: median {r['ttft_median'] * 1e3:.2f} ms, P99 {r['ttft_p99'] * 1e3:.2f} ms, queueing included",
        f"Steps: {r['steps']}, preemptions: {r['preemptions']}, adapter slot writes: {r['slot_writes']}, "
        f"prompt tokens found in the prefix cache: {r['prefix_cache_hits']}",
    ]


def chart(result: dict[str, Any]) -> list[Panel]:
    """Output tokens over time, and when requests got their first token."""
    times, tokens = zip(*result["output_tokens_over_time"], strict=True)
    arrived = thinned([(t, i) for i, t in enumerate(sorted(result["ttft"]), 1)])
    return [
        Panel("Output tokens given", "output", "tokens", {"given": tokens}, times, "seconds", "lines"),
        Panel(
            "Requests with a first token",
            "requests",
            "count",
            {"started": [n for _, n in arrived]},
            [t for t, _ in arrived],
            "seconds",
            "lines",
        ),
    ]
