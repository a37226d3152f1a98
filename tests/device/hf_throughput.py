"""One list of requests for the demo's model and adapters, by transformers + PEFT and by this package, tokens a second of each.

    python tests/device/hf_throughput.py [--num-prompts 32] [--batch-size 8]        # the test environment; a CPU takes minutes

transformers generates adapter by adapter, in batches of requests of one adapter, longest outputs together, until the longest of a
batch is done; what a request did not ask for is not counted. Both in float32, greedy, without end tokens, the work alone timed.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections import defaultdict

import numpy as np
import peft
import torch
import transformers

from lora_jax import LLM, LoRARequest, SamplingParams
from lora_jax.bench.report import hardware
from lora_jax.demo.assets import prepare

Item = tuple[list[int], int, str | None]  # prompt, tokens wanted, adapter


def requests(count: int, names: list[str], low: int, high: int) -> list[Item]:
    """Lengths uniform in [low, high], an adapter for 3 of 4."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(1000, 30000, n).tolist() for n in rng.integers(low, high + 1, count)]
    wanted, who = rng.integers(low, high + 1, count), rng.integers(0, len(names) + 1, count)
    return [(p, int(n), ([None, *names])[k]) for p, n, k in zip(prompts, wanted, who, strict=True)]


def by_transformers(
    path: str, adapters: dict[str, str], items: list[Item], batch_size: int
) -> tuple[float, list[list[int]]]:
    """Seconds, and the tokens of each request."""
    base = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    first, *others = adapters.items()
    model = peft.PeftModel.from_pretrained(base, first[1], adapter_name=first[0]).eval()
    for name, folder in others:
        model.load_adapter(folder, adapter_name=name)
    of: dict[str | None, list[int]] = defaultdict(list)
    for i, (_, _, name) in enumerate(items):
        of[name].append(i)
    out: list[list[int]] = [[] for _ in items]
    begin = time.perf_counter()
    for name, those in of.items():
        those.sort(key=lambda i: -items[i][1])
        for at in range(0, len(those), batch_size):
            _generate(model, name, those[at : at + batch_size], items, out)
    return time.perf_counter() - begin, out


@torch.no_grad()
def _generate(model, name: str | None, chosen: list[int], items: list[Item], out: list[list[int]]) -> None:
    longest = max(len(items[i][0]) for i in chosen)
    ids = torch.tensor([[0] * (longest - len(items[i][0])) + items[i][0] for i in chosen])  # padded on the left
    mask = torch.tensor([[0] * (longest - len(items[i][0])) + [1] * len(items[i][0]) for i in chosen])
    most = max(items[i][1] for i in chosen)
    how = dict(max_new_tokens=most, min_new_tokens=most, do_sample=False, pad_token_id=0)
    if name is None:
        with model.disable_adapter():
            done = model.generate(input_ids=ids, attention_mask=mask, **how)
    else:
        model.set_adapter(name)
        done = model.generate(input_ids=ids, attention_mask=mask, **how)
    for i, row in zip(chosen, done[:, longest:].tolist(), strict=True):
        out[i] = row[: items[i][1]]


def by_this(path: str, adapters: dict[str, str], items: list[Item], rows: int) -> tuple[float, list[list[int]]]:
    longest = max(len(p) + n for p, n, _ in items)
    sizes = dict(max_num_seqs=rows, max_model_len=longest, max_loras=len(adapters), enable_prefix_caching=False)
    llm = LLM(path, enable_lora=True, disable_tqdm=True, **sizes)
    for name, folder in adapters.items():
        llm.load_lora(name, folder)
    params = [SamplingParams(max_tokens=n, temperature=0, ignore_eos=True, detokenize=False) for _, n, _ in items]
    loras = [None if name is None else LoRARequest(name) for _, _, name in items]
    begin = time.perf_counter()
    outputs = llm.generate([{"prompt_token_ids": p} for p, _, _ in items], params, loras, use_tqdm=False)
    return time.perf_counter() - begin, [o.outputs[0].token_ids for o in outputs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-prompts", type=int, default=32)
    parser.add_argument("--shortest", type=int, default=32)
    parser.add_argument("--longest", type=int, default=128)
    parser.add_argument(
        "--batch-size", type=int, nargs="+", default=[1, 8], help="of transformers: the best one counts"
    )
    parser.add_argument("--rows", type=int, default=8, help="max_num_seqs of this package")
    o = parser.parse_args()
    warnings.simplefilter("ignore")
    demo = prepare()
    items = requests(o.num_prompts, list(demo.lora_modules), o.shortest, o.longest)
    tokens = sum(n for _, n, _ in items)
    result: dict = dict(num_prompts=len(items), prompt_tokens=sum(len(p) for p, _, _ in items), output_tokens=tokens)
    seconds, mine = by_this(demo.model_path, demo.lora_modules, items, o.rows)
    result["lora_jax"] = tokens / seconds
    print(f"lora_jax, {o.rows} rows: {tokens / seconds:.1f} tokens/s ({seconds:.1f} s)", flush=True)
    theirs = []
    for size in o.batch_size:
        seconds, theirs = by_transformers(demo.model_path, demo.lora_modules, items, size)
        result[f"transformers_batch_{size}"] = tokens / seconds
        print(f"transformers + PEFT, batches of {size}: {tokens / seconds:.1f} tokens/s ({seconds:.1f} s)", flush=True)
    best = max(result[f"transformers_batch_{size}"] for size in o.batch_size)
    same = sum(a == b for a, b in zip(mine, theirs, strict=True))
    print(
        f"ratio to the best of these: {result['lora_jax'] / best:.2f}; the same tokens: {same} of {len(items)} requests"
    )
    import jax

    print(json.dumps(result | dict(ratio=result["lora_jax"] / best, same=same, hardware=hardware(jax.devices()[0]))))


if __name__ == "__main__":
    main()
