"""benchmarks.gpu: its arithmetic, each part once on the CPU, and a part that fails."""

import io
import json

import pytest
import torch

from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import estimate, overhead, packing, stall


def part(name, folder):
    found = gpu.measured_here(name, "cpu", tiny=True, seconds=0.2, folder=folder)
    assert "failed" not in found, found["failed"]
    return json.loads(json.dumps(found["found"]))


def test_a_ratio_is_that_of_a_round():
    found = overhead.spread([1.0, 3.0, 2.0], [1.0, 2.0, 2.0])
    assert found == {"median": 1.0, "p25": 1.0, "p75": 1.25}


def test_a_stall_counts_without_the_first_round_and_beside_a_step_without_a_checkpoint():
    def round_(held, step):
        return {"held_s": held, "step_s": step, "durable_s": 2.0, "peak": 1e6}

    plain = [round_(0.0, 9.0), round_(0.0, 1.0), round_(0.0, 1.0)]
    found = stall.summed([round_(5.0, 9.0), round_(0.001, 1.5), round_(0.003, 1.1)], plain)
    assert found["held_ms_median"] == pytest.approx(2.0)
    assert found["held_ms_max"] == pytest.approx(3.0)
    assert found["longer_ms_max"] == pytest.approx(500.0)
    assert (found["first_held_ms"], found["gpu_mb_more"], found["rounds"]) == (5000.0, 1.0, 2)


def test_a_gpu_is_known_to_the_estimates_by_the_name_that_it_says():
    assert estimate.device_of("NVIDIA H200") == "h200"
    assert estimate.device_of("NVIDIA H100 80GB HBM3") == "h100"
    assert estimate.device_of("NVIDIA A100-SXM4-80GB") == "a100"
    assert estimate.device_of("another") == "h100"


def test_overhead(tmp_path):
    found = part("overhead", tmp_path)
    assert "alone" not in found
    for model in ("convnet", "transformer"):
        assert found[model]["rounds"] >= 3
        assert found[model]["elastix_over_torch"]["median"] > 0
        assert found[model]["step_s"].keys() == {"torch", "ddp", "elastix", "torch again"}


def test_stall(tmp_path):
    found = part("stall", tmp_path)
    assert found["state_bytes"] == 4_800_000
    assert found["elastix"]["rounds"] == found["dcp_async"]["rounds"] >= 1


def test_read(tmp_path):
    found = part("read", tmp_path)
    kinds = {"store", "store_first", "torch_load_mmap", "safetensors", "ordinary_memory"}
    assert found.keys() == {"bytes", *kinds}
    assert all(found[kind]["gb_per_s"] > 0 for kind in kinds)


@pytest.mark.slow
def test_packing(tmp_path):
    found = part("packing", tmp_path)
    assert found["1"]["gain"] == 1.0
    assert found["2"]["trials"] >= 8


def test_a_trial_that_fails_is_no_measurement(monkeypatch, tmp_path):
    begun = []

    def broken(ctx):
        begun.append(ctx)
        if len(begun) > 1:
            raise ValueError("no such luck")
        ctx.report(loss=1.0)

    monkeypatch.setattr(packing, "trial", broken)

    class Here(packing.Processes):
        """In this process."""

        def submit(self, work):
            self._done = packing.execute(self._train, work, worker="here", tell=lambda _: None)

        def poll(self, timeout_s):
            return [self._done]

    terms = gpu.Terms(torch.device("cpu"), True, 0.1, tmp_path)
    with pytest.raises(RuntimeError, match="no such luck"):
        packing.per_hour(Here(), 1, 3, terms)


def test_estimate(tmp_path):
    found = part("estimate", tmp_path)
    assert found["as"] == "h100"
    assert found["convnet"]["estimated_peak_bytes"] > 0
    assert found["transformer"]["step_ratio"] > 0


class Apart:
    """In no process."""

    def __init__(self, part, device, *, tiny, seconds):
        self.found = {"failed": "Traceback"} if part == "read" else {"found": {"for": seconds}}
        self.ended = False

    def measured(self):
        return self.found

    def end(self):
        self.ended = True


def test_a_part_that_fails_leaves_its_traceback_and_the_others_are_measured(monkeypatch, tmp_path):
    monkeypatch.setattr(gpu, "Apart", Apart)
    out = tmp_path / "gpu.json"
    gpu.measure(["read", "stall"], "cpu", tiny=True, budget_s=100.0, out=out)
    found = json.loads(out.read_text())
    assert found["failed"] == {"read": "Traceback"}
    assert found["stall"]["for"] == pytest.approx(100.0 * (1 - gpu._BESIDE) * gpu.PARTS["stall"])
    assert found["device"]["torch"] == torch.__version__


def test_other_parts_stay_if_they_are_of_the_same_device(monkeypatch, tmp_path):
    monkeypatch.setattr(gpu, "Apart", Apart)
    out = tmp_path / "gpu.json"
    gpu.measure(["read", "stall"], "cpu", tiny=True, budget_s=100.0, out=out)
    found = gpu.measure(["packing"], "cpu", tiny=True, budget_s=100.0, out=out)
    assert found.keys() == {"device", "seconds", "stall", "packing"}
    monkeypatch.setattr(gpu, "about_device", lambda device: {"name": "another"})
    found = gpu.measure(["packing"], "cpu", tiny=True, budget_s=100.0, out=out)
    assert found.keys() == {"device", "seconds", "packing"}


def test_a_process_that_takes_too_long_is_ended_and_said_to_be():
    apart = gpu.Apart("stall", "cpu", tiny=True, seconds=0.1)
    found = apart.measured(longest_s=0.01)
    apart.end()
    assert "was ended" in found["failed"]


def test_nothing_is_measured_if_whoever_has_started_it_is_gone(monkeypatch, tmp_path):
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    out = tmp_path / "out.json"
    given = ["--device", "cpu", "--tiny", "--only", "read", "--out", str(out)]
    monkeypatch.setattr("sys.argv", ["gpu", *given])
    assert gpu.main() == 0
    assert "is gone" in json.loads(out.read_text())["failed"]
    assert list(tmp_path.iterdir()) == [out]


def test_without_a_gpu_it_says_so_and_measures_nothing(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["gpu", "--out", str(tmp_path / "gpu.json")])
    with pytest.raises(SystemExit) as ended:
        gpu.main()
    assert ended.value.code == 2
    assert "no CUDA device" in capsys.readouterr().err
    assert not (tmp_path / "gpu.json").exists()
