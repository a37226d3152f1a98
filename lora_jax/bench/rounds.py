"""One batch of equal prompts, timed: what `latency` repeats and `overhead` compares."""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..cli_args import add_engine_arguments, engine_args_from
from ..config import LARGEST_RANK, EngineArgs
from ..errors import ConfigError
from ..request import LoRARequest, SamplingParams, TokensPrompt

RANK = 16  # of the adapters, where --lora-rank is left out

MOST = 100_000_000  # of anything that is counted


@dataclass(frozen=True)
class Round:
    """Seconds of one batch: until its last token, and until its last row had a first token."""

    latency: float
    ttft: float

    def per_token(self, output_len: int) -> float | None:
        """Seconds for each token after the first; None where there is none."""
        return (self.latency - self.ttft) / (output_len - 1) if output_len > 1 else None


def run_batch(
    engine: Any,
    prompts: Sequence[list[int]],
    params: SamplingParams,
    adapters: Sequence[LoRARequest | None],
    clock: Callable[[], float] = time.perf_counter,
) -> Round:
    """Runs the prompts as one batch. adapters: one a prompt, None: base model. Raises what a request failed with.

    Nothing is assumed of which call of `step` returns which tokens, but that they come once they are known.
    """
    requests = [
        engine.make_request(TokensPrompt(prompt_token_ids=p), params, a) for p, a in zip(prompts, adapters, strict=True)
    ]
    unfinished = {request.request_id for request in requests}
    first: dict[str, float] = {}
    begin = now = clock()
    for request in requests:
        engine.add_request(request)
    while unfinished:
        assert engine.has_unfinished(), f"{len(unfinished)} requests of the batch never finished"
        outputs = engine.step()
        now = clock()
        for output in outputs:
            if output.error is not None:
                raise output.error
            if output.token_ids:
                first.setdefault(output.request_id, now)
            if output.finish_reason is not None:
                unfinished.discard(output.request_id)
    while engine.has_unfinished():  # what was begun ahead for rows that had ended, if anything
        engine.step()
    assert len(first) == len(requests), f"{len(requests) - len(first)} requests of the batch gave no token"
    return Round(latency=now - begin, ttft=max(first.values()) - begin)


def add_batch_arguments(group: argparse._ArgumentGroup, *, output_len: int | None = 128, several: bool = False) -> None:
    """The batch's sizes, named as in `vllm bench latency`. output_len None: the benchmark chooses by device. several:
    batch_size is a list, of one or more."""
    if several:
        text = "prompts of a batch; several numbers: one batch size after the other; not last before MODEL (default: 8)"
        group.add_argument("--batch-size", type=positive, nargs="+", default=[8], metavar="N", help=text)
    else:
        group.add_argument("--batch-size", type=positive, default=8, help="prompts of the batch (default: %(default)s)")
    group.add_argument("--input-len", type=positive, default=32, help="tokens a prompt (default: %(default)s)")
    default = "128, on a CPU 16" if output_len is None else "%(default)s"
    group.add_argument(
        "--output-len", type=positive, default=output_len, help=f"tokens to generate (default: {default})"
    )
    group.add_argument("--lora-rank", type=positive, metavar="R", help=f"rank of the active adapters (default: {RANK})")


def add_batch_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """The engine's options, as `batch_engine_args` reads them."""
    add_engine_arguments(parser)
    # False is --no-enable-lora, which contradicts active adapters. The same prompts come again in every round.
    parser.set_defaults(enable_lora=None, enable_prefix_caching=False)


def batch_engine_args(options: argparse.Namespace, active: int, **more: Any) -> EngineArgs:
    """The engine's options for a batch with up to `active` adapters, those that follow from the batch filled in where they
    were not given; `more` wins. Raises: ConfigError."""
    if active > options.batch_size:
        raise ConfigError(
            f"--num-active-loras {active} exceeds --batch-size {options.batch_size}: each active adapter needs a row"
        )
    if active and options.enable_lora is False:
        raise ConfigError(f"--num-active-loras {active} contradicts --no-enable-lora: leave one of them out")
    args = engine_args_from(options, **{"enable_lora": bool(options.enable_lora or active), **more})
    if args.enable_lora and active > args.max_loras:
        raise ConfigError(f"--num-active-loras {active} needs --max-loras as large, not {args.max_loras}")
    changes: dict[str, Any] = {}
    length = options.input_len + options.output_len
    if args.max_model_len is None:
        changes["max_model_len"] = length
    elif length > args.max_model_len:
        # the engine would end each row early, and the tokens that were never made would be counted
        raise ConfigError(
            f"--input-len {options.input_len} and --output-len {options.output_len} are {length} tokens a row, more than "
            f"--max-model-len {args.max_model_len}"
        )
    if args.max_num_seqs is None:
        changes["max_num_seqs"] = options.batch_size
    elif options.batch_size > args.max_num_seqs:
        raise ConfigError(
            f"--batch-size: a batch of {options.batch_size} rows does not run at once with --max-num-seqs {args.max_num_seqs}"
        )
    if active or options.lora_rank is not None:
        rank = options.lora_rank or RANK
        if rank > LARGEST_RANK:
            raise ConfigError(f"--lora-rank {rank}: adapters of rank {LARGEST_RANK} are the largest")
        if args.max_lora_rank == "auto":
            changes["max_lora_rank"] = rank
        elif rank > args.max_lora_rank:
            raise ConfigError(f"adapters of --lora-rank {rank} do not fit --max-lora-rank {args.max_lora_rank}")
    return dataclasses.replace(args, **changes)


def random_prompts(options: argparse.Namespace, vocab_size: int, seed: int) -> list[list[int]]:
    """[batch_size][input_len] token ids, the same for the same seed."""
    import numpy as np  # not at the top: wrong options should not wait for it

    return np.random.default_rng(seed).integers(0, vocab_size, (options.batch_size, options.input_len)).tolist()


def greedy(max_tokens: int, *, detokenize: bool) -> SamplingParams:
    """Exactly max_tokens tokens, whatever they are."""
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=detokenize)


def shared_out(adapters: Sequence[LoRARequest], rows: int) -> list[LoRARequest | None]:
    """An adapter for each row, in turn; no adapters: base rows."""
    return [adapters[i % len(adapters)] if adapters else None for i in range(rows)]


def positive(text: str) -> int:
    """argparse's type= of a number >= 1."""
    return _at_least(1, text)


def count(text: str) -> int:
    """argparse's type= of a number >= 0."""
    return _at_least(0, text)


def _at_least(low: int, text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a whole number, got {text!r}") from None
    if value < low:
        raise argparse.ArgumentTypeError(f"must be >= {low}, got {value}")
    if value > MOST:
        raise argparse.ArgumentTypeError(f"must be <= {MOST}, got {text[:40]}")
    return value
