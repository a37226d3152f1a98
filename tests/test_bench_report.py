"""What stands beside every result of a benchmark: machine, versions, command, date; and the figure."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import types
from pathlib import Path
from types import SimpleNamespace

import jax
import matplotlib
import pytest
from matplotlib.figure import Figure

from lora_jax.bench import cli, driver, machine, overhead_table, plot, report
from lora_jax.cli import main
from lora_jax.cli_args import model_of
from lora_jax.errors import ConfigError

RESULTS = Path(__file__).resolve().parents[1] / "docs" / "results"
RESULT = {
    "benchmark": "latency",
    "model": "some/where/llama",
    "batch_size": 8,
    "hardware": {"device": "NVIDIA H200", "platform": "gpu", "driver": "580.1", "cuda": "12.9"},
    "versions": {"lora-jax": "0.1.0", "python": "3.11", "jax": "0.10.2"},
    "command": "lora-jax bench latency llama",
    "date": "2026-11-30T12:00:00+00:00",
}


def test_description():
    found = report.describe(argparse.Namespace(argv=("bench", "latency", "a b")))
    assert found["command"] == "lora-jax bench latency 'a b'"
    assert found["versions"]["jax"] == jax.__version__ and {"lora-jax", "python", "flax"} <= set(found["versions"])
    assert datetime.datetime.fromisoformat(found["date"]).utcoffset() == datetime.timedelta(0)
    assert report.describe(argparse.Namespace())["command"] is None


def test_hardware_of_a_cpu():
    found = report.hardware(jax.devices("cpu")[0])
    assert found["platform"] == "cpu" and found["driver"] is None and found["cuda"] is None
    assert found["memory_bytes"] == found["host"]["memory_bytes"] > 1 << 28 and found["host"]["cores"] >= 1


def test_hardware_of_a_card(monkeypatch):
    card = SimpleNamespace(platform="gpu", device_kind="NVIDIA H200", local_hardware_id=3)
    asked = []
    monkeypatch.setattr(driver, "read_driver", lambda n: asked.append(n) or driver.DriverState(5, 150 << 30, "580.65"))
    found = report.hardware(card)
    assert (found["device"], found["driver"], found["memory_bytes"], asked) == ("NVIDIA H200", "580.65", 150 << 30, [3])

    def fail(n):
        raise driver.DriverError("no NVML here")

    monkeypatch.setattr(driver, "read_driver", fail)
    assert report.hardware(card)["driver_error"] == "no NVML here" and report.hardware(card)["memory_bytes"] is None


@pytest.mark.parametrize(
    "text, version", [("PJRT C API\ncuda 12090", "12.9"), ("cuda 13000", "13.0"), ("PJRT C API\nTFRT TPU", None)]
)
def test_version_of_cuda(text, version):
    assert report._cuda(SimpleNamespace(platform_version=text)) == version


def test_the_command_line_and_the_description_need_no_jax():
    code = "import argparse, sys; from lora_jax.bench import cli, report; report.describe(argparse.Namespace())\n"
    code += "cli.add_subcommands(argparse.ArgumentParser()); report.host()\n"
    code += "print([m for m in ('jax', 'matplotlib', 'transformers') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert out.returncode == 0 and out.stdout.strip() == "[]", out.stderr


def test_the_demo_model_and_the_command_reach_a_benchmark(monkeypatch, capsys):
    assets = types.ModuleType("lora_jax.demo.assets")
    monkeypatch.setattr(assets, "prepare", lambda: SimpleNamespace(model_path="cache/demo"), raising=False)
    monkeypatch.setitem(sys.modules, "lora_jax.demo.assets", assets)
    monkeypatch.setattr(cli.latency, "run", lambda options: {"model": model_of(options)})
    for argv, model in ((["demo"], "cache/demo"), (["--model", "demo"], "cache/demo"), (["other"], "other")):
        assert main(["bench", "latency", *argv]) == 0
        result = json.loads(capsys.readouterr().out)
        assert result["model"] == model and result["command"] == " ".join(["lora-jax bench latency", *argv])


class FakeCuda:
    """Two cards, the second of which this process sees as its first."""

    def cuInit(self, flags):
        return 0

    def cuDeviceGet(self, number, ordinal):
        number._obj.value = ordinal.value + 1
        return 0

    def cuDeviceGetPCIBusId(self, address, size, number):
        address.value = f"0000:0{number.value}:00.0".encode()
        return 0


class FakeNvml:
    def __init__(self, failing: str = ""):
        self.failing, self.running = failing, 0

    def nvmlInit_v2(self):
        self.running += 1
        return 9 if self.failing == "nvmlInit_v2" else 0

    def nvmlShutdown(self):
        self.running -= 1

    def nvmlDeviceGetHandleByPciBusId_v2(self, address, handle):
        handle._obj.value = {b"0000:00:00.0": 100, b"0000:01:00.0": 101}[address.value]
        return 0

    def nvmlDeviceGetMemoryInfo(self, handle, memory):
        memory._obj.used, memory._obj.total = handle.value, 1000
        return 6 if self.failing == "nvmlDeviceGetMemoryInfo" else 0

    def nvmlSystemGetDriverVersion(self, version, size):
        version.value = b"580.65.06"
        return 0


def test_the_driver_is_asked_for_the_card_that_jax_uses(monkeypatch):
    nvml = FakeNvml()
    monkeypatch.setattr(driver, "_library", {"libcuda.so.1": FakeCuda(), "libnvidia-ml.so.1": nvml}.__getitem__)
    assert driver.read_driver(0) == driver.DriverState(used=101, total=1000, version="580.65.06")
    assert nvml.running == 0
    nvml.failing = "nvmlDeviceGetMemoryInfo"
    with pytest.raises(driver.DriverError, match="nvmlDeviceGetMemoryInfo failed with code 6"):
        driver.read_driver(0)
    assert nvml.running == 0, "shut down after a failure too"
    monkeypatch.undo()
    with pytest.raises(driver.DriverError, match="libnowhere.so.7 cannot be loaded"):
        driver._library("libnowhere.so.7")


def test_read_bandwidth(monkeypatch):
    device = jax.devices("cpu")[0]
    found = machine.read_bandwidth(device, 1 << 22)
    assert found.buffer_bytes == 1 << 22 and found.reason is None
    assert 1e7 < (found.bytes_per_second or 0) < 1e14
    monkeypatch.setattr(machine, "_free", lambda device: 1 << 22)
    found = machine.read_bandwidth(device, 1 << 22)
    assert found.bytes_per_second is None and "4,194,304 are there" in (found.reason or "")
    assert found.share(5.0) is None and found.as_dict(5.0)["share"] is None


def test_bandwidth_counts_every_byte_once_a_call(monkeypatch):
    clock = iter(float(t) for t in range(1000))
    monkeypatch.setattr(machine.time, "perf_counter", lambda: next(clock))  # each trial takes one second
    found = machine.read_bandwidth(jax.devices("cpu")[0], 1 << 20)
    assert found.bytes_per_second == machine.CALLS * (1 << 20)
    assert found.share(found.bytes_per_second / 2) == 0.5 and found.share(None) is None


BARS = plot.Panel(
    "Decode", "time per token", "ms", {"a": [1.0, 2.0], "b": [3.0, 4.0]}, ["x", "y"], errors={"a": ([0, 1], [1, 1])}
)
LINES = plot.Panel(
    "Batches", "latency", "ms", {"a": [1.0, 2.0]}, label_name="batch", kind="lines", reference=("mean", 1)
)


@pytest.mark.parametrize("suffix, start", [(".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF")])
def test_a_plot_is_written(tmp_path, suffix, start):
    path = tmp_path / f"figure{suffix}"
    plot.check(str(path))
    plot.save(str(path), [BARS, LINES], RESULT)
    assert path.read_bytes().startswith(start) and path.stat().st_size > 2000


def test_a_plot_says_what_it_shows_and_where_it_was_measured(tmp_path):
    path = tmp_path / "figure.svg"
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        plot.save(str(path), [BARS, LINES], RESULT)
    text = path.read_text()
    words = [
        "lora-jax bench latency: llama, batch 8",
        "Decode",
        "time per token [ms]",
        "latency [ms]",
        "mean",
        "NVIDIA H200",
    ]
    words += ["driver 580.1", "CUDA 12.9", "jax 0.10.2", "2026-11-30T12:00:00", "lora-jax bench latency llama"]
    assert not [word for word in words if word not in text]


@pytest.fixture
def drawn(tmp_path, monkeypatch):
    """Saves panels; returns the figure that was drawn."""
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **kw: figures.append(figure))

    def save(panels, result=RESULT):
        plot.save(str(tmp_path / "f.png"), panels, result)
        figures[-1].draw_without_rendering()
        return figures[-1]

    return save


def test_percentages_are_rounded_and_scaled_as_asked(drawn):
    values = {"a": [0.000468, -0.000468, 0.0468, 21.94]}
    share = plot.Panel("a", "over plain", "%", values, list("abcd"), scale=(-3.0, 40.0))
    times = plot.Panel("b", "time", "ms", values, list("abcd"), row=1)
    first, second = drawn([share, times]).axes
    assert [text.get_text() for text in first.texts] == ["0.00 %", "0.00 %", "0.05 %", "21.94 %"]
    assert [text.get_text() for text in second.texts] == ["0.000468", "-0.000468", "0.0468", "21.9"]
    assert first.get_ylim() == (-3.0, 40.0) and second.get_ylim()[0] < 0


@pytest.mark.parametrize(
    "name", ["llama", "Meta-Llama-3.1-8B-Instruct-with-" + "a-very-long-tail-" * 5 + "end", "x" * 200]
)
def test_titles_lie_inside_the_figure(name, drawn):
    long = {**RESULT, "model": f"some/where/{name}", "input_len": 1024, "output_len": 1024, "num_active_loras": 8}
    long |= {"latencies": [1.0], "ttfts": [0.1], "avg_latency": 1.0, "ms_per_output_token": 3.7, "dtype": "bfloat16"}
    figure = drawn(cli.latency.chart(long), long)
    for text in (figure._suptitle, figure.axes[0].title):
        box = text.get_window_extent()
        assert figure.bbox.x0 <= box.x0 < box.x1 <= figure.bbox.x1
    assert name[:15] in figure._suptitle.get_text() and name[-4:] in figure._suptitle.get_text()


def test_overheads_of_all_batch_sizes_have_one_scale():
    result = json.loads(next(RESULTS.glob("*overhead*.json")).read_text())
    result["batches"] = result["batches"][:2]
    for batch, ratios in zip(result["batches"], ((1.5, 1.2, 2.0), (1.0, 0.9, 1.1)), strict=True):
        for variant in batch["variants"].values():
            variant["latency_ms"]["ratio_to_plain"] = dict(zip(("median", "q25", "q75"), ratios, strict=True))
    panels = overhead_table.chart(result)
    # from 10 % below to 100 % above, and a twentieth of that range beyond both
    assert [panel.scale for panel in panels] == [None, pytest.approx((-15.5, 105.5))] * 2
    for batch in result["batches"]:
        for variant in batch["variants"].values():
            variant["latency_ms"]["ratio_to_plain"] = dict.fromkeys(("median", "q25", "q75"), 1.0)
    assert overhead_table.chart(result)[1].scale == (0.0, 1.0), "an axis, although nothing differs"


def test_no_matplotlib_is_one_clear_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"figures need the package matplotlib.*'\.\[bench\]'"):
        plot.check("figure.png")


def test_the_foot_of_a_figure_for_a_cpu():
    hardware = report.hardware(jax.devices("cpu")[0])
    line = report.one_line({**RESULT, "hardware": hardware})
    assert f"{hardware['host']['cores']} cores" in line and "driver" not in line and "CUDA" not in line


def test_a_kept_result_can_be_drawn(tmp_path, capsys):
    kept = next(path for path in RESULTS.glob("*.json") if "overhead" in path.name)
    assert main(["bench", "plot", str(kept), str(tmp_path / "figure.png")]) == 0
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
    for text in ("no json", "[]", "{}", '{"benchmark": "another"}'):
        (tmp_path / "broken.json").write_text(text)
        assert main(["bench", "plot", str(tmp_path / "broken.json"), str(tmp_path / "f.png")]) != 0
        assert "broken.json is no result of" in capsys.readouterr().err
    assert main(["bench", "plot", str(tmp_path / "missing.json"), str(tmp_path / "f.png")]) != 0
    assert "missing.json cannot be read" in capsys.readouterr().err
    for name, words in (("f.txt", "f.txt is no name of a figure"), ("none/f.png", "f.png cannot be written")):
        assert main(["bench", "plot", str(kept), str(tmp_path / name)]) == 2
        error = capsys.readouterr().err
        assert words in error and "--plot" not in error


@pytest.mark.parametrize("lacking", ["ttfts", "command"])
def test_a_result_of_an_older_version_is_refused(lacking, tmp_path, capsys):
    result = {
        **RESULT,
        "num_active_loras": 0,
        "dtype": "float32",
        "latencies": [1.0],
        "ttfts": [0.1],
        "avg_latency": 1.0,
    }
    result["ms_per_output_token"] = None
    kept, figure = tmp_path / "kept.json", tmp_path / "f.svg"
    kept.write_text(json.dumps(result))
    assert main(["bench", "plot", str(kept), str(figure)]) == 0 and figure.exists()
    figure.unlink()
    del result[lacking]
    kept.write_text(json.dumps(result))
    assert main(["bench", "plot", str(kept), str(figure)]) == 2 and not figure.exists()
    assert (
        f"kept.json was written by an older version of lora-jax bench latency: it has no '{lacking}'"
        in capsys.readouterr().err
    )


def run_latency(monkeypatch, result: dict, path: Path) -> int:
    monkeypatch.setattr(cli.latency, "run", lambda options: result)
    return cli.run(argparse.Namespace(benchmark="latency", json=str(path), plot=None, argv=("bench", "latency")))


def test_a_kept_result_replaces_a_file_whole(monkeypatch, tmp_path):
    file, link = tmp_path / "kept.json", tmp_path / "link.json"
    file.write_text("before")
    link.symlink_to(file)

    def interrupted(path, target):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "replace", interrupted)
        run_latency(monkeypatch, {"n": 1}, link)
    assert file.read_text() == "before"
    assert run_latency(monkeypatch, {"n": 2}, link) == 0
    assert link.is_symlink() and json.loads(file.read_text())["n"] == 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["kept.json", "link.json"]


def test_a_result_goes_to_what_is_no_file(monkeypatch, tmp_path):
    """A device is written to, and neither replaced nor given a neighbour."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = subprocess.Popen([sys.executable, "-c", f"print(open({str(pipe)!r}).read())"], stdout=subprocess.PIPE)
    assert run_latency(monkeypatch, {"n": 3}, pipe) == 0
    assert json.loads(reader.communicate(timeout=60)[0])["n"] == 3
    assert [p.name for p in tmp_path.iterdir()] == ["pipe"] and pipe.is_fifo()
