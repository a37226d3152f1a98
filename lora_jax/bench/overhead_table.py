"""How `bench overhead` shows its result: lines for people, and a chart. Plain Python."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from .plot import Panel

QUANTITIES = {
    "latency_ms": "latency of the batch, ms",
    "ms_per_output_token": "decode, ms per output token",
    "ttft_ms": "time to first token, ms",
    "prefill_ms": "prefill alone, ms",
}
TITLES = {"plain": "plain", "before": "before: ops left in, idle", "after": "after: specialized, idle"}


def section(common: dict[str, Any], batch: dict[str, Any]) -> list[str]:
    """One batch size, and an empty line: medians of all rounds; percentages are medians of the ratios to plain of the same
    round. common: the result's keys that all sizes share."""
    variants: dict[str, Any] = batch["variants"]
    active = [name for name in variants if name not in TITLES]
    lines = [
        f"LoRA overhead: {common['num_rounds']} rounds, batch {batch['batch_size']}, prompt {common['input_len']}, output "
        f"{common['output_len']}, rank {common['lora_rank']}, {common['dtype']}, on {common['hardware']['device']}",
        "",
        *_columns(variants, list(TITLES)),
        "",
        *_columns(variants, ["plain", *active]),
        "",
        "latency over plain of the same round: median (quartiles; extremes)",
    ]
    width = max(26, *map(len, active))
    for name in [*TITLES, *active][1:]:
        lines.append(f"  {TITLES.get(name, name):<{width}} {_spread(variants[name]['latency_ms']['ratio_to_plain'])}")
    lines += ["", "added to a decode step, and what it has to read of the adapters"]
    step = {name: v["ms_per_output_token"]["median"] for name, v in variants.items()}
    for name, size in batch["adapter_bytes"].items():
        lines.append(f"  {name:<{width}} {step[name] - step['plain']:+.3f} ms, {size / 1e6:,.1f} MB")
    lines.append("")
    lines += [f"{TITLES.get(name, name):<{width + 2}} ran {', '.join(variants[name]['programs'])}" for name in variants]
    if batch["compilations_while_measuring"]:
        lines.append(f"DISTURBED: {batch['compilations_while_measuring']} compilations while measuring")
    if batch["slot_writes_while_measuring"]:
        lines.append(f"DISTURBED: {batch['slot_writes_while_measuring']} adapters written to slots while measuring")
    return [*lines, ""]


def closing(identity: dict[str, Any], memory: dict[str, Any]) -> list[str]:
    """What holds for the engines, whatever the batch."""
    lines = [f"plain programs that the engine with LoRA has too, by hash: {identity['equal']}/{identity['of']}"]
    if identity["different"]:
        lines.append(f"  DIFFERENT: {', '.join(identity['different'])}")
    return [*lines, "", *_memory(memory)]


def _columns(variants: dict[str, Any], names: Sequence[str]) -> list[str]:
    head = ["median; % over plain of the same round, median"] + [TITLES.get(name, name) for name in names]
    rows = [head]
    for quantity, title in QUANTITIES.items():
        row = [title]
        for name in names:
            cell = f"{variants[name][quantity]['median']:.3f}"
            if name != "plain":
                cell += f"  {_percent(variants[name][quantity]['ratio_to_plain']['median'])}"
            row.append(cell)
        rows.append(row)
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    line = lambda row: " | ".join(  # noqa: E731
        cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
    )
    return [line(head), "-|-".join("-" * w for w in widths), *map(line, rows[1:])]


def _percent(ratio: float) -> str:
    return f"{100 * (ratio - 1):+.1f} %"


def _spread(s: dict[str, float]) -> str:
    numbers = {name: _percent(value) for name, value in s.items()}
    return "{median} ({q25} to {q75}; {min} to {max})".format(**numbers)


def _memory(memory: dict[str, Any]) -> list[str]:
    mib = lambda size: "unknown" if size is None else f"{size / 2**20:,.1f} MiB"  # noqa: E731
    lines = ["executables on the device"]
    for name, sizes in memory["engines"].items():
        lines.append(
            f"  {name.replace('_', ' '):<12} {sizes['executables']} executables, code {mib(sizes['code_bytes'])}, largest "
            f"temporaries {mib(sizes['largest_temp_bytes'])}, by the driver {mib(sizes['driver_bytes'])}"
        )
    if memory["reason"] is not None:
        return [*lines, f"  the driver's count is unknown: {memory['reason']}"]
    return [
        *lines,
        f"  the second set of executables (specialized less ops left in): {mib(memory['second_set_bytes'])} by the driver "
        f"({memory['source']})",
    ]


def chart(result: dict[str, Any]) -> list[Panel]:
    """A row for each batch size: decode time of each variant, and the overhead of the whole batch with quartiles as whiskers,
    which all rows show on one scale."""
    batches = [_panels(batch, result["num_rounds"], row) for row, batch in enumerate(result["batches"])]
    ends = [0.0]
    for _, over in batches:
        for value, below, above in zip(over.series["latency"], *over.errors["latency"], strict=True):
            ends += [value - below, value + above]
    margin = 0.05 * (max(ends) - min(ends)) or 1.0
    scale = (min(ends) - margin if min(ends) < 0 else 0.0, max(ends) + margin)
    return [panel for decode, over in batches for panel in (decode, replace(over, scale=scale))]


def _panels(batch: dict[str, Any], num_rounds: int, row: int) -> tuple[Panel, Panel]:
    """(decode, overhead)"""
    variants: dict[str, Any] = batch["variants"]
    labels = {"plain": "plain", "before": "idle,\nops left in", "after": "idle,\nspecialized"}
    names = [labels.get(name, name) for name in variants]
    ratios = [v["latency_ms"]["ratio_to_plain"] for v in variants.values()][1:]
    over = [100 * (r["median"] - 1) for r in ratios]
    whiskers = ([100 * (r["median"] - r["q25"]) for r in ratios], [100 * (r["q75"] - r["median"]) for r in ratios])
    decode = {"decode": [v["ms_per_output_token"]["median"] for v in variants.values()]}
    size, rounds = f"Batch {batch['batch_size']}", f"median of {num_rounds} rounds"
    return (
        Panel(f"{size}: decode, {rounds}", "time per output token", "ms", decode, names, row=row),
        Panel(
            f"{size}: over plain of the same round, {rounds}, quartiles",
            "latency of the batch over plain",
            "%",
            {"latency": over},
            names[1:],
            errors={"latency": whiskers},
            row=row,
        ),
    )
