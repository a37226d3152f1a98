"""`bench kernels`: LoRA shrink and expand, and decode attention, one at a time: Pallas-Triton beside plain JAX.

Decode attention is the engine's op: it also rotates q and k and writes the new token into the cache.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import re
import statistics
from collections.abc import Callable
from typing import Any

from tqdm import tqdm

from ..cli_args import add_engine_arguments
from ..errors import ConfigError, LoraJaxError
from . import report
from .paired import alternate
from .plot import Panel
from .rounds import positive

HELP = "single kernels: time, bytes, bandwidth"
DESCRIPTION = (
    "Time LoRA shrink, LoRA expand and decode attention alone, without the host's work, as Pallas-Triton kernels and as "
    "plain JAX, and compare with the bytes that each has to read. On a CPU only the plain-JAX form runs, in float32 where a "
    "GPU takes bfloat16, and without the cases that are large for one. With a MODEL: the products and the attention of its decode "
    "steps instead, with tiles from shapes alone beside measured ones; --autotune measures and stores them."
)
IMPLEMENTATIONS = ("triton", "xla")
CALLS = {("gpu", "triton"): 64, ("gpu", "xla"): 16, ("cpu", "xla"): 4}  # in one program; loops of XLA compile slowly
CPU_LARGEST = 64 << 20  # bytes a call that a CPU is given unless the case is named in full
LARGE = f"cases read more than {CPU_LARGEST / 1e6:.0f} MB a call and are left out on a CPU"
SIZE = re.compile(r"[bct]\d+")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options."""
    group = parser.add_argument_group("kernels")
    group.add_argument(
        "--only",
        action="append",
        metavar="NAME",
        help="only what has NAME in its name, also of the cases that tests alone use; may be given again "
        "(default: the shapes of Llama-2-7B and some attention; a NAME that fits nothing lists all). On a CPU a large case "
        "runs only where NAME is its full name",
    )
    group.add_argument(
        "--num-iters", type=positive, metavar="N", help="rounds; medians are reported (default: 20, with MODEL 9)"
    )
    group.add_argument(
        "--autotune",
        action="store_true",
        help="try other tiles for MODEL's decode steps, as an engine with the same options runs them, and store what is more than "
        "2 %% faster in the compile cache's folder, where engines find it",
    )
    group.add_argument(
        "--batch-size",
        type=positive,
        nargs="+",
        metavar="N",
        help="with MODEL: rows of the decode steps; not last before MODEL (default: all buckets of --max-num-seqs)",
    )
    group.add_argument(
        "--max-seconds",
        type=positive,
        default=600,
        metavar="S",
        help="with MODEL: begin no other op after so many seconds",
    )
    add_engine_arguments(parser)
    parser.set_defaults(enable_lora=None)  # with MODEL: both, unless it is --no-enable-lora


def catalogue() -> tuple[dict[str, tuple[str, Any]], list[str]]:
    """Name -> (op, case) of all that can be timed, and the names of those timed unasked."""
    from lora_jax.kernels import cases

    found: dict[str, tuple[str, Any]] = {}
    for case in (*cases.TIMED_CASES, *cases.CASES):
        found |= {f"{op}/{case.id}": (op, case) for op in ("shrink", "expand")}
    unasked = list(found)[: 2 * len(cases.TIMED_CASES)]
    unasked += [f"attention/{case.name}" for case in cases.TIMED_ATTENTION]
    found |= {
        f"attention/{case.name}": ("attention", case) for case in (*cases.TIMED_ATTENTION, *cases.ATTENTION_CASES)
    }
    return found, unasked


def chosen(only: list[str] | None, *, cpu: bool = False) -> dict[str, tuple[str, Any]]:
    """Name -> (op, case) of what `only` asks for, on a CPU by its own names or by a GPU's.

    Raises: ConfigError for a name that fits nothing.
    """
    found, unasked = catalogue()
    if only is not None:
        known = {name: (name, cpu_name(name)) if cpu else (name,) for name in found}
        for part in only:
            if not any(part in name for names in known.values() for name in names):
                there = in_float32(found) if cpu else found
                raise ConfigError(f"--only {part}: no case has that in its name; there are\n  " + "\n  ".join(there))
        unasked = [n for n, names in known.items() if any(part in name for part in only for name in names)]
    picked = {name: found[name] for name in unasked}
    return in_float32(picked) if cpu else picked


def cpu_name(name: str) -> str:
    """What a case is called on a CPU."""
    return name.replace("bfloat16", "float32")


def in_float32(wanted: dict[str, tuple[str, Any]]) -> dict[str, tuple[str, Any]]:
    """Cases in bfloat16 in the dtype that an engine on a CPU uses: XLA has no bfloat16 products there and converts whole
    stacks. Other cases as they are."""
    return {
        cpu_name(name): (op, dataclasses.replace(case, dtype=cpu_name(case.dtype)))
        for name, (op, case) in wanted.items()
    }


def too_large(wanted: dict[str, tuple[str, Any]], only: list[str] | None) -> list[str]:
    """Names of what a CPU would take minutes for and `only` does not name in full.

    Raises: ConfigError when nothing else is left.
    """
    from .kernel_timing import must_read

    named = {cpu_name(part) for part in only or ()}
    large = [name for name, (op, case) in wanted.items() if must_read(op, case) > CPU_LARGEST and name not in named]
    if len(large) == len(wanted):
        raise ConfigError(
            f"{LARGE}: to run one all the same, give its full name, as --only {' or --only '.join(large)}"
        )
    return large


def run(options: argparse.Namespace, show: Callable[[str], None] = print) -> dict[str, Any]:
    """Times every chosen case, or the ops of a model, shows a table and returns it. Raises: LoraJaxError, ConfigError."""
    if options.model_tag is not None or options.model is not None:
        from . import autotune

        return autotune.run(options, show)
    for name in ("autotune", "batch_size"):
        if getattr(options, name):
            raise ConfigError(f"--{name.replace('_', '-')} is for the decode steps of a model: name one")
    rounds = options.num_iters or 20
    chosen(options.only, cpu=True)  # a wrong name does not wait for jax
    from ..device import set_up_device
    from . import machine

    setup = set_up_device(options.device, "auto", options.gpu_memory_utilization)
    tiles = _stored(options, setup)
    wanted = chosen(options.only, cpu=not setup.is_gpu)
    left_out = [] if setup.is_gpu else too_large(wanted, options.only)
    bandwidth = machine.read_bandwidth(setup.device)
    reasons = {} if setup.implementation == "triton" else {"triton": _why_not(setup)}
    width = max(map(len, wanted)) + 2
    for line in heading(bandwidth.bytes_per_second, width):
        show(line)
    cases: dict[str, Any] = {}
    with tqdm(total=len(wanted), desc="kernels", unit="case", disable=options.disable_tqdm) as bar:
        for name, (op, case) in wanted.items():
            if name in left_out:
                cases[name] = not_measured(op, case, reasons)
            else:
                cases[name] = measure(op, case, setup, rounds, reasons, tiles)
            with bar.external_write_mode():
                show(row(name, cases[name], bandwidth, width))
            bar.update()
    if left_out:
        show(f"{len(left_out)} of {len(wanted)} {LARGE}. To run one, give its full name: --only {left_out[0]}")
    return {
        "num_iters": rounds,
        "read_bandwidth": bandwidth.as_dict(),
        "cases": {name: with_shares(found, bandwidth) for name, found in cases.items()},
        "hardware": report.hardware(setup.device),
    }


def _stored(options: argparse.Namespace, setup: Any) -> Any:
    """The table of measured tiles that an engine would use."""
    from ..compile_cache import cache_folder
    from ..tiles import stored_tiles

    return stored_tiles(cache_folder(options.compilation_cache_dir), setup)


def _why_not(setup: Any) -> str:
    return "needs a newer GPU" if setup.is_gpu else "needs a GPU"


def not_measured(op: str, case: Any, reasons: dict[str, str]) -> dict[str, Any]:
    """What `measure` returns, of a case that is left out on a CPU."""
    from .kernel_timing import must_read

    why = reasons | {"xla": "left out: large"}
    return {"bytes": must_read(op, case), "dtype": case.dtype} | {name: {"not_run": why[name]} for name in why}


def measure(op: str, case: Any, setup: Any, rounds: int, reasons: dict[str, str], tiles: Any = None) -> dict[str, Any]:
    """{"bytes": ..., "dtype": ..., "triton": {...}, "xla": {...}}: microseconds (median, and of every round) and GB/s, or why
    there are none.

    reasons: implementation -> why it cannot run here. tiles: a table of measured ones; "tuned" is the kernel with those, where it
    has some for this case. Raises: LoraJaxError when a result is not finite.
    """
    import jax

    from . import kernel_timing as timing

    platform = "gpu" if setup.is_gpu else "cpu"
    rotation = timing.GPU_ROTATION if setup.is_gpu else timing.CPU_ROTATION
    size = timing.must_read(op, case)
    found: dict[str, Any] = {"bytes": size, "dtype": case.dtype}
    found |= {name: {"not_run": why} for name, why in reasons.items()}
    forms = {name: (name, None) for name in IMPLEMENTATIONS if name not in reasons}
    if "triton" in forms and timing.asks_for(op, case, tiles):
        forms["tuned"] = ("triton", tiles)
    calls = {name: calls_of(op, platform, form) for name, (form, _) in forms.items()}
    with jax.default_device(setup.device):
        given = timing.operands(op, case, list(IMPLEMENTATIONS), rotation, max(calls.values()))
        ready = {
            name: timing.Timed(op, case, form, given[form], setup, calls[name], table)
            for name, (form, table) in forms.items()
        }
        times = alternate({name: timed.round for name, timed in ready.items()}, ready, rounds)
        for name, timed in ready.items():
            if not timed.finite():
                raise LoraJaxError(f"{op} of {case}: the {name} form gave values that are not finite")
    for name, taken in times.items():
        seconds = statistics.median(t.seconds for t in taken)
        found[name] = {
            "us": seconds * 1e6,
            "rounds_us": [t.seconds * 1e6 for t in taken],
            "gb_per_second": size / seconds / 1e9 if size else None,
            "host_bound": any(t.host_bound for t in taken),
        }
    return found


def calls_of(op: str, platform: str, implementation: str) -> int:
    """Calls in one program. With two or more of attention, XLA on a CPU copies the pages between them."""
    return 1 if (op, platform) == ("attention", "cpu") else CALLS[platform, implementation]


def with_shares(found: dict[str, Any], bandwidth: Any) -> dict[str, Any]:
    """The same with each rate's share of the machine's read bandwidth."""
    out = dict(found)
    for name in IMPLEMENTATIONS:
        if "us" in found[name]:
            rate = found[name]["gb_per_second"]
            out[name] = found[name] | {"share": bandwidth.share(None if rate is None else rate * 1e9)}
    return out


def heading(bytes_per_second: float | None, width: int) -> list[str]:
    """The lines above the table."""
    speed = "not measured" if bytes_per_second is None else f"{bytes_per_second / 1e9:,.0f} GB/s"
    columns = "".join(f"{name + ' us':>14}{'GB/s':>8}{'share':>7}" for name in IMPLEMENTATIONS)
    return [f"Read bandwidth of this machine: {speed}", f"{'one call':<{width}}{'dtype':<8}{'MB to read':>11}{columns}"]


def row(name: str, found: dict[str, Any], bandwidth: Any, width: int) -> str:
    """One line of the table; "*" marks times that the host's work is part of."""
    text = f"{name:<{width}}{found['dtype']:<8}{found['bytes'] / 1e6:>11.2f}"
    for one in (with_shares(found, bandwidth)[i] for i in IMPLEMENTATIONS):
        if "us" not in one:
            text += f"  {one['not_run']:>27}"
            continue
        rate = "-" if one["gb_per_second"] is None else f"{one['gb_per_second']:,.0f}"
        part = "-" if one["share"] is None else f"{one['share']:.0%}"
        text += f"{one['us']:>13.2f}{'*' if one['host_bound'] else ' '}{rate:>8}{part:>7}"
    if "tuned" in found:
        text += f"  heuristic; tuned {found['tuned']['us']:.2f} us"
    return text


def chart(result: dict[str, Any]) -> list[Panel]:
    """Rates of what was timed and reads anything, one panel an op; times where nothing does. Of a model: all of its ops."""
    if "ops" in result:
        ops = result["ops"]
        series = {
            "heuristic": [one["heuristic_gb_per_second"] for one in ops.values()],
            "tuned": [one["tuned_gb_per_second"] or one["heuristic_gb_per_second"] for one in ops.values()],
        }
        return [Panel("Decode ops: bytes that must be read / time", "rate", "GB/s", series, list(ops))]
    speed = result["read_bandwidth"]["bytes_per_second"]
    reference = None if speed is None else ("read bandwidth", speed / 1e9)
    timed = {name: found for name, found in result["cases"].items() if any("us" in found[i] for i in IMPLEMENTATIONS)}
    panels = []
    for op in ("shrink", "expand", "attention"):
        cases = {
            name.partition("/")[2]: found for name, found in timed.items() if name.startswith(op) and found["bytes"]
        }
        if cases:
            title, labels = f"{op}: bytes that must be read / time", short(list(cases))
            panels.append(Panel(title, "rate", "GB/s", _series(cases, "gb_per_second"), labels, reference=reference))
    return panels or [Panel("Time of one call", "time", "us", _series(timed, "us"), short(list(timed)))]


def _series(cases: dict[str, Any], key: str) -> dict[str, list[float]]:
    ran = [i for i in IMPLEMENTATIONS if any("us" in found[i] for found in cases.values())]
    return {i: [found[i].get(key, 0.0) for found in cases.values()] for i in ran}


def short(names: list[str]) -> list[str]:
    """Names without the parts, between hyphens, that all of them share and that are no batch, context or rows (b8, c256, t8)."""
    parts = [name.split("-") for name in names]
    if len(names) < 2 or len({len(p) for p in parts}) > 1:
        return names
    differ = [len(set(c)) > 1 or SIZE.fullmatch(c[0]) is not None for c in zip(*parts, strict=True)]
    return ["-".join(itertools.compress(p, differ)) for p in parts]
