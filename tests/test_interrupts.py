"""Ctrl-C, once or several times, ends a benchmark with one line and exit code 130, wherever it is just then."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from lora_jax.config import CacheConfig, SchedulerConfig
from lora_jax.request import Request, SamplingParams
from lora_jax.scheduler import Scheduler
from tests.support import fake_openai

ROOT = Path(__file__).resolve().parents[1]
# The script as from a terminal: what a shell starts in its background, these tests perhaps, ignores SIGINT.
START = """
import runpy, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def interrupted(
    command: Sequence[str], ready: Callable[[subprocess.Popen[str]], bool], times: int
) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of a benchmark that gets SIGINT `times` times once ready() is true."""
    process = subprocess.Popen(
        [sys.executable, "-c", START, str(ROOT / "scripts" / "bench.py"), *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = time.monotonic() + 60
        while not ready(process):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        for _ in range(times):
            process.send_signal(signal.SIGINT)
            time.sleep(0.05)
        out, err = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
    return process.returncode, out, err


@pytest.mark.parametrize("times", [1, 2, 4])
def test_serve(times):
    with fake_openai.running(delay=0.2) as fake:
        command = f"serve --base-url {fake.url} --num-prompts 20 --input-len 6 --output-len 20 --num-warmups 1"
        command += " --disable-tqdm --max-concurrency 10"
        code, out, err = interrupted(command.split(), lambda _: len(fake.bodies) > 5, times)
    assert (code, out, err) == (130, "", "interrupted\n")


@pytest.mark.parametrize("times", [1, 3])
def test_rounds_of_a_kernel(times):
    """After the table's heading, which is the last that is shown."""

    def heading(process: subprocess.Popen[str]) -> bool:
        assert process.stdout is not None
        return "Read bandwidth" in process.stdout.readline()

    command = "kernels --only attention/tiny --num-iters 1000000 --device cpu --disable-tqdm"
    code, out, err = interrupted(command.split(), heading, times)
    assert (code, err) == (130, "interrupted\n") and "attention/tiny" not in out


def test_a_request_is_added_as_a_whole_or_not_at_all():
    """Wherever in the scheduler an interrupt comes."""
    code, came = Scheduler.add.__code__, 0
    for line in sorted({line for *_, line in code.co_lines() if line is not None} - {code.co_firstlineno}):
        scheduler = Scheduler(SchedulerConfig(2, 16, 32), CacheConfig(4, 13))
        requests = [Request(name, [3, 4], SamplingParams()) for name in "abc"]
        scheduler.add(requests[0])

        def trace(frame, event, arg, line=line):
            if frame.f_code is code and event == "line" and frame.f_lineno == line:
                sys.settrace(None)
                raise KeyboardInterrupt
            return trace

        sys.settrace(trace)
        try:
            scheduler.add(requests[1])
        except KeyboardInterrupt:
            came += 1
        finally:
            sys.settrace(None)
        scheduler.check_integrity()
        assert (requests[1] in scheduler.unfinished()) == (scheduler.abort("b") is requests[1])
        scheduler.add(requests[2])
        scheduler.check_integrity()
        assert [r.request_id for r in scheduler.unfinished()] == ["a", "c"]
    assert came > 8
