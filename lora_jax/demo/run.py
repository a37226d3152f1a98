"""`make demo`: one model answers the same prompts as itself and as three adapters, in one batch, through the server.

Prints what each answered, and which executables of the dispatch table ran how often.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import sys
import textwrap
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from ..errors import LoraJaxError
from .assets import prepare
from .server_process import DemoError, Server, free_port, running, serve_command

PROMPTS = [
    "What is the capital of France?",
    "Why is the sky blue?",
    "How do I make a good cup of tea?",
    "Tell me about the moon.",
]
MAX_TOKENS = 48
START_SECONDS = 600.0

Job = tuple[str, str]  # model name, prompt
Hits = dict[str, int]  # executable -> how often it ran


def ask(server: Server, job: Job) -> str:
    """The greedy answer of one model to one prompt."""
    model, prompt = job
    body = {"model": model, "messages": [{"role": "user", "content": prompt}], "max_tokens": MAX_TOKENS}
    choice = server.call("/v1/chat/completions", {**body, "temperature": 0})["choices"][0]
    return choice["message"]["content"] + (" ..." if choice["finish_reason"] == "length" else "")


def ask_all(server: Server, jobs: list[Job]) -> dict[Job, str]:
    """All at once; the server batches them as they come."""
    with ThreadPoolExecutor(len(jobs)) as pool:
        return dict(zip(jobs, pool.map(lambda job: ask(server, job), jobs), strict=True))


def hits(server: Server) -> Hits:
    """How often each executable of the dispatch table has run so far."""
    return {str(row["key"]): int(row["hits"]) for row in server.call("/stats")["step_table"]}


def since(before: Hits, after: Hits) -> Hits:
    """What ran in between."""
    return {key: after[key] - before.get(key, 0) for key in after}


# --------------------------------------------------------------------------------------------------------- printing
def answer_table(answers: dict[Job, str], prompts: Iterable[str], models: list[str], width: int) -> str:
    """Prompt x model, one block a prompt, wrapped to `width` columns."""
    name_width = max(map(len, models))
    body_width = max(20, width - name_width - 7)
    rule = f"+-{'-' * name_width}-+-{'-' * body_width}-+"
    lines = [rule]
    for prompt in prompts:
        title = textwrap.wrap(prompt, name_width + body_width + 3)
        lines += [f"| {part:<{name_width + body_width + 3}} |" for part in title] + [rule]
        for model in models:
            parts = textwrap.wrap(" ".join(answers[model, prompt].split()), body_width) or ["(empty)"]
            names = [model] + [""] * (len(parts) - 1)
            lines += [f"| {n:<{name_width}} | {p:<{body_width}} |" for n, p in zip(names, parts, strict=True)]
        lines.append(rule)
    return "\n".join(lines)


def is_step(key: str) -> bool:
    """Whether the executable is a model step, of which a variant with LoRA exists."""
    return key.startswith(("prefill[", "decode["))


def is_lora(key: str) -> bool:
    """Whether the executable is a variant with LoRA."""
    return "+lora" in key


def hits_table(phases: dict[str, Hits]) -> str:
    """Executables that ran in any phase x runs in each phase; model steps first, without LoRA before with."""
    keys = {key for ran in phases.values() for key, n in ran.items() if n}
    order = sorted(keys, key=lambda k: (not is_step(k), is_lora(k), k.partition("[")[0], len(k), k))
    width = max(map(len, [*order, "executable"]))
    lines = [f"{'executable':<{width}}  " + "  ".join(phases), "-" * (width + 2 + len("  ".join(phases)))]
    for key in order:
        cells = (f"{ran.get(key, 0) or '.':>{len(name)}}" for name, ran in phases.items())
        lines.append(f"{key:<{width}}  " + "  ".join(cells))
    return "\n".join(lines)


def verdict(base_only: Hits, mixed: Hits) -> str:
    """One sentence on what ran. Raises DemoError when it isn't what the dispatch table promises."""

    def count(ran: Hits, lora: bool) -> int:
        return sum(n for key, n in ran.items() if is_step(key) and is_lora(key) == lora)

    wrong, plain, with_lora = count(base_only, True), count(base_only, False), count(mixed, True)
    if wrong or not plain:
        raise DemoError(f"with base requests alone {plain} steps ran without LoRA and {wrong} with: none with was due")
    if not with_lora:
        raise DemoError("no step with LoRA ran although adapters were asked")
    return (
        f"While only the base model was asked, all {plain} steps ran the executables without LoRA, the programs of an "
        f"engine that has no adapters; of the mixed batch's {count(mixed, False) + with_lora} steps {with_lora} had an "
        "adapter among their rows and ran the ones with LoRA."
    )


# -------------------------------------------------------------------------------------------------------------- main
def show(server: Server, adapters: list[str]) -> None:
    """The two phases against a server that is ready, and what is printed of them."""
    names = [m["id"] for m in server.call("/v1/models")["data"]]
    base = next((n for n in names if n not in adapters), None)
    if base is None or not set(adapters) <= set(names):
        raise DemoError(f"the server offers {names}; expected a base model and {adapters}")
    models = [base, *adapters]
    print(f"asking {base} alone, then {', '.join(models)} at once, {len(PROMPTS)} questions each", flush=True)
    at_start, clock = hits(server), time.monotonic()
    alone = ask_all(server, [(base, p) for p in PROMPTS])
    after_base, base_seconds = hits(server), time.monotonic() - clock
    answers = ask_all(server, [(m, p) for p in PROMPTS for m in models])
    after_mixed, seconds = hits(server), time.monotonic() - clock - base_seconds

    width = min(max(shutil.get_terminal_size((110, 24)).columns, 60), 120)
    print(f"\n{len(answers)} requests in one mixed batch, {seconds:.1f} s; {base} is the base model by itself:\n")
    print(answer_table(answers, PROMPTS, models, width))
    same = sum(answers[job] == text for job, text in alone.items())
    print(
        f"\n{same} of {len(alone)} base answers are word for word those of the base-only batch ({base_seconds:.1f} s)."
    )
    phases = {"base only": since(at_start, after_base), "mixed batch": since(after_base, after_mixed)}
    print("\nHow often each executable of the dispatch table ran:\n")
    print(hits_table(phases))
    print("\n" + textwrap.fill(verdict(*phases.values()), width))


def default_device() -> str:
    """The CPU where JAX's CUDA plugin is not installed, also beside a card: `make demo` installs none."""
    plugins = ("jax_cuda12_plugin", "jax_cuda13_plugin")
    return "auto" if any(importlib.util.find_spec(name) for name in plugins) else "cpu"


def main(argv: list[str] | None = None) -> int:
    """Command line. Returns the exit status: 0, or 1 with the reason on stderr."""
    ap = argparse.ArgumentParser(prog="python -m lora_jax.demo", description=(__doc__ or "").splitlines()[0])
    ap.add_argument(
        "--device",
        choices=("auto", "cpu", "gpu"),
        default=default_device(),
        help="where the server runs (default here: %(default)s; a GPU needs an extra, cuda12 or cuda13)",
    )
    ap.add_argument("--timeout", type=float, default=START_SECONDS, help="seconds the server may take to start")
    args = ap.parse_args(argv)
    started = time.monotonic()
    try:
        adapters = list(prepare().lora_modules)
        port = free_port()
        options = {"--host": "127.0.0.1", "--port": port, "--device": args.device}
        command = serve_command() + [str(x) for pair in options.items() for x in pair]
        print(f"starting {' '.join(command[1:])}", flush=True)
        with running(command, port) as server:
            server.wait_until_ready(args.timeout)
            print(f"ready after {time.monotonic() - started:.0f} s", flush=True)
            show(server, adapters)
    except (DemoError, LoraJaxError) as e:
        print(f"demo failed: {e}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("demo stopped", file=sys.stderr)
        return 130
    print(f"\nServer stopped; {time.monotonic() - started:.0f} s in all. To keep one running:")
    python = os.path.relpath(sys.executable)
    print(f"  {sys.executable if python.startswith('..') else python} scripts/serve.py --model demo")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
