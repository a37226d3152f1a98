"""`bench overhead`: what LoRA costs, idle and active, measured side by side in one process on one set of base weights.

Three engines take turns: one without LoRA, one with it, and one with it that does not specialize its steps, so that the LoRA
ops stay in every program: what idle LoRA cost before steps were specialized. Every number of a variant stands beside that of
the plain engine in the same round. Several batch sizes are measured one after the other on the same three engines.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from ..cli_args import model_of
from ..config import EngineArgs
from ..errors import ConfigError
from ..request import LoRARequest
from .adapter_kinds import AdapterKind
from .overhead_table import chart, closing, section
from .paired import Spread, order_of_round, paired_ratios
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

__all__ = ["DESCRIPTION", "HELP", "add_arguments", "chart", "run"]

HELP = "what LoRA costs, idle and active, against an engine without it"
DESCRIPTION = (
    "Compare, in one process and on one set of base weights, an engine without LoRA, one with LoRA (idle, with one adapter, with "
    "several), and one whose steps all keep the LoRA ops (--no-specialize-lora), idle. Rounds alternate between them."
)
PREFILLS = 9
ENGINES = ("plain", "specialized", "ops_left_in")
PLAIN, BEFORE, AFTER = "plain", "before", "after"
DEFAULTS = {"gpu": dict(output_len=128, num_rounds=20, num_iters_warmup=3)}
DEFAULTS["cpu"] = dict(output_len=16, num_rounds=5, num_iters_warmup=1)
# what is shown of one batch size outlives whatever ends the next one, in a pipe too
print_now = partial(print, flush=True)


@dataclass(frozen=True)
class Variant:
    """An engine with adapters for its rows; none: base rows. kind: of the adapters."""

    engine: Any
    adapters: tuple[LoRARequest, ...] = ()
    kind: AdapterKind = AdapterKind(())

    def adapter_bytes(self) -> int:
        """Of A and B of all its adapters, as they lie on the device: what a decode step has to read of them."""
        from .traffic import adapter_bytes

        config, item = self.engine.model_config, self.engine.dtype.itemsize
        each = (adapter_bytes(config, item, self.kind.rank(i), self.kind.linears) for i in range(len(self.adapters)))
        return sum(each)


@dataclass(frozen=True)
class Measured:
    """One variant in one round: the batch, and the seconds of the same batch for one token only, prefill alone: the median of
    PREFILLS, as one takes milliseconds and varies by a tenth."""

    batch: Round
    prefill: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this subcommand and those of the engine."""
    group = parser.add_argument_group("overhead")
    add_batch_arguments(group, output_len=None, several=True)
    group.add_argument("--num-rounds", type=positive, help="measured rounds a batch size (default: 20, on a CPU 5)")
    group.add_argument(
        "--num-iters-warmup", type=count, help="rounds before them, for each batch size (default: 3, on a CPU 1)"
    )
    group.add_argument(
        "--num-active-loras",
        type=positive,
        metavar="N",
        help="adapters of the last variant, shared out over the rows; a smaller batch takes one a row (default: 8 or the "
        "largest batch size, what is less)",
    )
    group.add_argument(
        "--more-adapters",
        type=AdapterKind.parse,
        nargs="+",
        default=[],
        metavar="KIND",
        help="further variants with as many adapters of other kinds: ranks, in turn where there are several, and the linears "
        "they are on: 64 or 8,16,64 or 16:q_proj,v_proj; all kinds lie in slots at once, so --max-loras counts them all",
    )
    add_batch_engine_arguments(parser)


def run(options: argparse.Namespace, show: Callable[[str], None] = print_now) -> dict[str, Any]:
    """Runs the benchmark, shows each batch size as soon as it is measured and returns the result. Raises: LoraJaxError."""
    check(options)
    # only now: jax takes seconds to import, and wrong options should not wait for it
    from ..device import set_up_device
    from .adapters import load_random_adapters
    from .report import hardware

    setup = set_up_device(options.device, options.implementation, options.gpu_memory_utilization)
    fill_defaults(options, setup.device.platform)
    args = engine_args(options)
    engines, memory = build_engines(args, setup.device)
    lora = engines["specialized"]
    load = partial(load_random_adapters, lora, options.num_active_loras)
    adapters, more = load(options.lora_rank), {kind: load(kind) for kind in options.more_adapters}
    common = {
        "model": model_of(options),
        **{
            name: getattr(options, name)
            for name in "input_len output_len lora_rank num_rounds num_iters_warmup".split()
        },
        "more_adapters": [asdict(kind) for kind in more],
        "dtype": str(lora.dtype),
        **{
            name: getattr(args["specialized"], name)
            for name in "num_pages max_model_len max_num_seqs max_loras".split()
        },
        "hardware": hardware(setup.device),
    }
    identity = compare_programs(engines["plain"].step_table.report(), lora.step_table.report())
    result = {**common, "batches": [], "identity": identity, "memory": memory}
    for size in options.batch_size:
        result["batches"].append(measure_batch(engines, adapters, one_batch(options, size), more))
        for line in section(common, result["batches"][-1]):
            show(line)
        if keep := getattr(options, "keep", None):  # a run that is cut short keeps what it measured
            keep(result)
    for line in closing(identity, memory):
        show(line)
    return result


def check(options: argparse.Namespace) -> None:
    """Fills in the adapters' number and rank. Raises: ConfigError for what would contradict the comparison."""
    if options.enable_lora is False:
        raise ConfigError("--no-enable-lora: overhead measures with and without LoRA; leave it out")
    if options.lora_modules:
        raise ConfigError("--lora-modules: overhead makes its own random adapters; leave it out")
    if not options.specialize_lora:
        raise ConfigError("--no-specialize-lora: overhead measures with and without it; leave it out")
    if options.output_len == 1:
        raise ConfigError("--output-len 1: overhead compares decode steps too; at least 2")
    if options.num_active_loras is None:
        options.num_active_loras = min(8, max(options.batch_size))
    options.lora_rank = options.lora_rank or RANK
    trial = argparse.Namespace(**vars(options))
    # wrong options are refused before jax is imported; the device is not known yet, and a CPU's defaults are the smaller ones
    fill_defaults(trial, "cpu")
    engine_args(trial)


def fill_defaults(options: argparse.Namespace, platform: str) -> None:
    """Sets what was left open to what suits the device: a CPU takes a hundred times longer for a step."""
    for name, value in DEFAULTS["gpu" if platform == "gpu" else "cpu"].items():
        if getattr(options, name) is None:
            setattr(options, name, value)


def engine_args(options: argparse.Namespace) -> dict[str, EngineArgs]:
    """The three engines' options, sized for the largest batch: equal but for LoRA, and all with the same num_pages, which is
    part of every program's shape. Raises: ConfigError."""
    active, largest = options.num_active_loras, one_batch(options, max(options.batch_size))
    largest.lora_rank = max(options.lora_rank, *(max(kind.ranks) for kind in options.more_adapters), 0)
    lora = batch_engine_args(largest, active)
    kinds = [AdapterKind((options.lora_rank,)), *options.more_adapters]
    if len(set(kinds)) < len(kinds):
        raise ConfigError(f"--more-adapters: {max(kinds, key=kinds.count).of(active)} are measured once already")
    if active * len(kinds) > lora.max_loras:
        raise ConfigError(
            f"--more-adapters: {active * len(kinds)} adapters in all need --max-loras as large, not {lora.max_loras}, or they "
            "would be written to slots while others are measured"
        )
    if lora.num_pages is None:
        # all rows at once, and a page to spare for each: three engines of one device cannot each take all that is free
        pages = -(-(options.input_len + options.output_len) // lora.page_size)
        lora = batch_engine_args(largest, active, num_pages=largest.batch_size * (pages + 1) + 1)
    more: dict[str, Any] = {"num_pages": lora.num_pages}
    return {
        "plain": batch_engine_args(largest, 0, enable_lora=False, **more),
        "specialized": lora,
        "ops_left_in": batch_engine_args(largest, active, specialize_lora=False, **more),
    }


def one_batch(options: argparse.Namespace, size: int) -> argparse.Namespace:
    """The options of one of the batch sizes: `batch_size` a number, and no more active adapters than it has rows."""
    active = min(options.num_active_loras, size)
    return argparse.Namespace(**{**vars(options), "batch_size": size, "num_active_loras": active})


def build_engines(args: Mapping[str, EngineArgs], device: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """(the engines by name, the first one's weights used by all; what each one's executables take on the device).

    "second_set_bytes" is what the specialized engine takes beyond the one with LoRA steps alone. Each of these two is built
    when the process has all that it makes only once, which the first engine's growth includes.
    """
    import jax

    from ..engine import Engine
    from .footprint import grown, read_footprint, table_sizes

    jax.block_until_ready(jax.device_put(0.0, device))  # the client has made its pool by now
    engines: dict[str, Any] = {}
    sizes: dict[str, Any] = {}
    reading = read_footprint(device)
    for name in ENGINES:
        before = reading
        engines[name] = Engine(args[name], weights=engines.get("plain"))
        reading = read_footprint(device)
        sizes[name] = {"driver_bytes": grown(before, reading), **table_sizes(engines[name].step_table)}
    both, one = sizes["specialized"]["driver_bytes"], sizes["ops_left_in"]["driver_bytes"]
    second = None if both is None or one is None else both - one
    return engines, {"engines": sizes, "second_set_bytes": second, "source": "NVML", "reason": reading.reason}


def adapter_variant(n: int) -> str:
    return f"{n} adapter" + ("s" if n > 1 else "")


def measure_batch(
    engines: Mapping[str, Any],
    adapters: Sequence[LoRARequest],
    options: argparse.Namespace,
    more: Mapping[AdapterKind, Sequence[LoRARequest]] | None = None,
) -> dict[str, Any]:
    """One batch size (see `one_batch`): every variant twice to see its programs, the warm-up rounds, the measured rounds. more:
    adapters of other kinds."""
    from ..dispatch import compilations

    lora = engines["specialized"]
    variants = {PLAIN: Variant(engines["plain"]), BEFORE: Variant(engines["ops_left_in"]), AFTER: Variant(lora)}
    for n in sorted({1, options.num_active_loras}):
        variants[adapter_variant(n)] = Variant(lora, tuple(adapters[:n]), AdapterKind((options.lora_rank,)))
    for kind, others in (more or {}).items():
        variants[kind.of(options.num_active_loras)] = Variant(lora, tuple(others[: options.num_active_loras]), kind)
    programs = {name: programs_of(variant, options) for name, variant in variants.items()}
    for i in range(options.num_iters_warmup):
        measure_round(variants, options, i)
    compiled, writes = compilations(), lora.stats()["slot_writes"]
    rounds = [measure_round(variants, options, i) for i in range(options.num_rounds)]
    return {
        "batch_size": options.batch_size,
        "num_active_loras": options.num_active_loras,
        "variants": summarize(rounds, options.output_len, programs),
        "adapter_bytes": {name: variant.adapter_bytes() for name, variant in variants.items() if variant.adapters},
        "compilations_while_measuring": compilations() - compiled,
        "slot_writes_while_measuring": lora.stats()["slot_writes"] - writes,
    }


def run_variant(variant: Variant, options: argparse.Namespace) -> Measured:
    """One batch, then the same prompts for one token only."""
    engine, rows = variant.engine, shared_out(variant.adapters, options.batch_size)
    prompts = random_prompts(options, engine.model_config.vocab_size, options.seed)
    text = engine.tokenizer is not None
    run = lambda length: run_batch(engine, prompts, greedy(length, detokenize=text), rows)  # noqa: E731
    batch = run(options.output_len)
    return Measured(batch, statistics.median(run(1).latency for _ in range(PREFILLS)))


def programs_of(variant: Variant, options: argparse.Namespace) -> list[str]:
    """Runs the variant twice and tells which steps of the model it ran the second time, the most frequent first: at first requests
    may begin one after the other, as their adapters get to their slots."""
    run_variant(variant, options)
    hits = lambda: {row["key"]: row["hits"] for row in variant.engine.step_table.report()}  # noqa: E731
    before = hits()
    run_variant(variant, options)
    ran = {key: n - before[key] for key, n in hits().items() if n > before[key]}
    return [key for key in sorted(ran, key=lambda k: -ran[k]) if key.startswith(("decode", "prefill"))]


def measure_round(variants: Mapping[str, Variant], options: argparse.Namespace, index: int) -> dict[str, Measured]:
    """Every variant once, in this round's order."""
    return {name: run_variant(variants[name], options) for name in order_of_round(list(variants), index)}


def summarize(
    rounds: Sequence[Mapping[str, Measured]], output_len: int, programs: Mapping[str, list[str]]
) -> dict[str, Any]:
    """By variant: the programs it ran, and by quantity (milliseconds) the values of all rounds, their median, and the spread of
    their ratios to plain of the same round."""
    milliseconds: dict[str, Callable[[Measured], float]] = {
        "latency_ms": lambda m: 1e3 * m.batch.latency,
        "ms_per_output_token": lambda m: 1e3 * (m.batch.per_token(output_len) or 0.0),
        "ttft_ms": lambda m: 1e3 * m.batch.ttft,
        "prefill_ms": lambda m: 1e3 * m.prefill,
    }
    out: dict[str, Any] = {}
    for name, ran in programs.items():
        out[name] = {"programs": ran}
        for quantity, of in milliseconds.items():
            values, base = [of(r[name]) for r in rounds], [of(r[PLAIN]) for r in rounds]
            ratios = Spread.of(paired_ratios(values, base))
            out[name][quantity] = {
                "median": Spread.of(values).median,
                "ratio_to_plain": ratios.as_dict(),
                "rounds": values,
            }
    return out


def compare_programs(plain: Sequence[Mapping[str, Any]], lora: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Both are `StepTable.report()`: how many of the plain engine's programs the other one has too, by their hashes."""
    theirs = {row["key"]: row["program_hash"] for row in lora}
    different = [row["key"] for row in plain if theirs.get(row["key"]) != row["program_hash"]]
    return {"equal": len(plain) - len(different), "of": len(plain), "different": different}
