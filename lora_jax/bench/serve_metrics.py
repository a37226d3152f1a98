"""From the moments at which tokens came to the figures of `vllm bench serve`. Plain arithmetic."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from .serve_client import Reply

# short name -> (what the lines call it, their heading)
METRICS = {
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
}
SHOWN_ERRORS = 5


def seconds(replies: Sequence[Reply]) -> dict[str, list[float]]:
    """METRICS' names -> values of the successful requests.

    ttft: until the first chunk with a token. tpot: from there to the end, a token; of answers of two tokens and more. itl:
    between one chunk with a token and the next. e2el: until the answer's last chunk.
    """
    out: dict[str, list[float]] = {name: [] for name in METRICS}
    for r in replies:
        if r.error is not None:
            continue
        out["ttft"].append(r.tokens[0] - r.begin)
        out["e2el"].append(r.end - r.begin)
        out["itl"] += [b - a for a, b in zip(r.tokens, r.tokens[1:], strict=False)]
        if output_tokens(r) > 1:
            out["tpot"].append((r.end - r.tokens[0]) / (output_tokens(r) - 1))
    return out


def output_tokens(reply: Reply) -> int:
    """The server's count, or the chunks where it gives none."""
    return len(reply.tokens) if reply.output_tokens is None else reply.output_tokens


def summarize(
    replies: Sequence[Reply], prompt_lens: Sequence[int], duration: float, percentiles: Sequence[float]
) -> dict[str, Any]:
    """Plain data with vLLM's names. prompt_lens: tokens sent, used where the server does not count. duration: seconds."""
    good = [r for r in replies if r.error is None]
    inputs = sum(
        n if r.prompt_tokens is None else r.prompt_tokens
        for r, n in zip(replies, prompt_lens, strict=True)
        if r.error is None
    )
    outputs = sum(map(output_tokens, good))
    errors = Counter(r.error for r in replies if r.error is not None)
    result: dict[str, Any] = {
        "completed": len(good),
        "failed": len(replies) - len(good),
        "errors": [{"error": error, "requests": n} for error, n in errors.most_common(SHOWN_ERRORS)],
        "duration": duration,
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "tokens_counted_by": "server" if all(r.output_tokens is not None for r in good) else "chunks",
        "request_throughput": len(good) / duration,
        "output_throughput": outputs / duration,
        "total_token_throughput": (inputs + outputs) / duration,
        "requests_of_model": dict(Counter(r.model for r in replies)),
    }
    for name, values in seconds(replies).items():
        if values:
            ms = np.array(values) * 1e3
            result |= {f"{kind}_{name}_ms": float(getattr(np, kind)(ms)) for kind in ("mean", "median", "std")}
            result |= {f"p{_short(p)}_{name}_ms": float(np.percentile(ms, p)) for p in percentiles}
    return result


def _short(percentile: float) -> str:
    return f"{percentile:g}"


def table(result: dict[str, Any], shown: Sequence[str], percentiles: Sequence[float]) -> list[str]:
    """The block of lines that `vllm bench serve` prints; failures and what they were come first."""

    def line(name: str, value: float) -> str:
        return f"{name:<40} {value:<10}" if isinstance(value, int) else f"{name:<40} {value:<10.2f}"

    lines = [f"{' Serving Benchmark Result ':=^50}", line("Successful requests:", result["completed"])]
    lines.append(line("Failed requests:", result["failed"]))
    lines += [f"  {e['requests']} x {e['error']}" for e in result["errors"]]
    if result.get("max_concurrency"):
        lines.append(line("Maximum request concurrency:", result["max_concurrency"]))
    if result.get("request_rate"):
        lines.append(line("Request rate configured (RPS):", float(result["request_rate"])))
    lines += [
        line("Benchmark duration (s):", result["duration"]),
        line("Total input tokens:", result["total_input_tokens"]),
        line("Total generated tokens:", result["total_output_tokens"]),
        line("Request throughput (req/s):", result["request_throughput"]),
        line("Output token throughput (tok/s):", result["output_throughput"]),
        line("Total token throughput (tok/s):", result["total_token_throughput"]),
    ]
    if result["tokens_counted_by"] == "chunks":
        lines.append("  the server reports no usage: each chunk of an answer counts as one token")
    for name in shown:
        short, heading = METRICS[name]
        lines.append(f"{heading:-^50}")
        if f"mean_{name}_ms" not in result:
            lines.append("  no answer has as many tokens as it takes")
            continue
        kinds = [("Mean", "mean"), ("Median", "median"), *((f"P{_short(p)}", f"p{_short(p)}") for p in percentiles)]
        lines += [line(f"{title} {short} (ms):", result[f"{key}_{name}_ms"]) for title, key in kinds]
    return [*lines, "=" * 50]
