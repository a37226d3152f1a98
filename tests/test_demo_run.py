"""The demo's run against a stand-in server: what it prints, how it ends, and that no process is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lora_jax.demo import run, server_process
from lora_jax.demo.assets import DemoAssets

# Counts hits as the engine does: one step with or without LoRA for each request, by its model's name, and slot writes.
FAKE = """
import json, os, signal, sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
mode, pid_file = sys.argv[1:3]
port = int(sys.argv[sys.argv.index("--port") + 1])
open(pid_file, "w").write(str(os.getpid()))
print("loading the model", flush=True)
if mode == "dies":
    sys.exit("no such model")
if mode == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if mode == "slow":
    time.sleep(60)
hits = {"decode[1]": 5, "decode[1]+lora": 7, "write_slot[1]+lora": 3}

class Handler(BaseHTTPRequestHandler):
    def reply(self, content, status=200):
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        models = ["base-model", "json", "pirate"]
        self.reply({"/health": {}, "/v1/models": {"data": [{"id": m} for m in models]},
                    "/stats": {"step_table": [{"key": k, "hits": n} for k, n in hits.items()]}}[self.path])

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if mode == "fails":
            return self.reply({"error": {"message": "out of pages"}}, 500)
        if mode == "exits":
            print("engine died", flush=True)
            self.connection.shutdown(2)  # as if the process took its time
            time.sleep(0.3)
            os._exit(3)
        lora = body["model"] != "base-model" or mode == "always-lora"
        hits["decode[1]+lora" if lora else "decode[1]"] += 1
        hits["write_slot[1]+lora"] += lora
        assert body["temperature"] == 0
        text = body["model"] + " says: " + body["messages"][0]["content"]
        self.reply({"choices": [{"message": {"content": text}, "finish_reason": "length"}]})

    def log_message(self, *args):
        pass

ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """fake(mode): makes the demo start the stand-in; returns the file with the server's process id."""
    script, pid_file = tmp_path / "fake.py", tmp_path / "pid"
    script.write_text(FAKE)
    monkeypatch.setattr(run, "prepare", lambda: DemoAssets("somewhere", {"json": "a", "pirate": "b"}))
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # must not be used for the loopback server

    def choose(mode: str) -> Path:
        monkeypatch.setattr(run, "serve_command", lambda: [sys.executable, str(script), mode, str(pid_file)])
        return pid_file

    return choose


def gone(pid_file: Path) -> bool:
    try:
        os.kill(int(pid_file.read_text()), 0)
    except ProcessLookupError:
        return True
    return False


def test_a_good_run_prints_answers_and_executables(fake, capsys):
    pid_file = fake("good")
    assert run.main([]) == 0
    out, err = capsys.readouterr()
    for prompt in run.PROMPTS:
        for model in ("base-model", "json", "pirate"):
            assert f"| {model:<10} | {model} says: {prompt} ..." in out
    n = len(run.PROMPTS)
    assert [line.split() for line in out.splitlines() if line.startswith(("decode", "write"))] == [
        ["decode[1]", str(n), str(n)],
        ["decode[1]+lora", ".", str(2 * n)],
        ["write_slot[1]+lora", ".", str(2 * n)],
    ]
    assert f"all {n} steps ran the executables without LoRA" in " ".join(out.split())
    assert "loading the model" in err and gone(pid_file)


@pytest.mark.parametrize(
    ("mode", "said"),
    [
        ("dies", "no such model"),
        ("fails", "out of pages"),
        ("exits", "the server ended with status 3; its last output:\n  | loading the model\n  | engine died"),
        ("slow", "not ready after 1 s"),
        ("always-lora", "none with was due"),
    ],
)
def test_a_failure_says_why_and_leaves_no_server(fake, capsys, mode, said):
    pid_file = fake(mode)
    assert run.main(["--timeout", "1" if mode == "slow" else "60"]) == 1
    assert said in capsys.readouterr().err and gone(pid_file)


def test_a_server_that_ignores_sigterm_is_killed(fake, monkeypatch):
    monkeypatch.setattr(server_process, "STOP_SECONDS", 0.3)
    pid_file = fake("stubborn")
    assert run.main([]) == 0
    assert gone(pid_file)


STOPPED = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell takes from what it starts in the background
from lora_jax.demo import run
from lora_jax.demo.assets import DemoAssets
run.prepare = lambda: DemoAssets("somewhere", {"json": "a"})
run.serve_command = lambda: [sys.executable, *sys.argv[1:]]
sys.exit(run.main([]))
"""


@pytest.mark.parametrize(("stop", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_stopping_the_demo_stops_its_server(fake, tmp_path, stop, status):
    pid_file = fake("slow")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    command = [sys.executable, "-c", STOPPED, str(tmp_path / "fake.py"), "slow", str(pid_file)]
    with subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as demo:
        assert demo.stderr is not None
        while b"loading the model" not in demo.stderr.readline():
            assert demo.poll() is None
        time.sleep(0.1)
        demo.send_signal(stop)
        assert demo.wait(30) == status
    assert gone(pid_file)


def test_tables_wrap_and_sort():
    answers = {("base", "Why?"): "word " * 30, ("x", "Why?"): ""}
    table = run.answer_table(answers, ["Why?"], ["base", "x"], 60).splitlines()
    assert {len(line) for line in table} == {60} and "(empty)" in table[-2]
    ran = {"sample[1]/full": 1, "prefill[32]+lora": 1, "decode[8]": 1, "decode[2]": 1, "decode[4]": 0}
    rows = [line.split()[0] for line in run.hits_table({"a": ran}).splitlines()[2:]]
    assert rows == ["decode[2]", "decode[8]", "prefill[32]+lora", "sample[1]/full"]
