"""benchmarks.crews: its arithmetic, and each part that needs no root, once and small."""

import pytest

from benchmarks import crew_parts, crews
from elastix.events import BatchShares, LoaderOpened, StepCommitted, WorkerJoined
from elastix.testing.local import LocalRun
from tests.crew import skip_if_refused


def test_a_ratio_is_that_of_a_round_and_the_noise_is_hsdp_over_itself():
    found = crews.ratios([1.0, 3.0, 2.0], [1.0, 2.0, 2.0], [1.0, 2.0, 1.0])
    assert found["ratio_median"] == 1.0
    assert (found["ratio_min"], found["ratio_max"]) == (1.0, 1.5)
    assert found["hsdp_vs_hsdp_p75"] >= 1.0


def test_the_noise_is_not_folded_to_one_side():
    found = crews.ratios([1.0] * 3, [1.0, 1.0, 2.0], [2.0, 1.0, 1.0])
    assert found["hsdp_vs_hsdp_p75"] == 1.75  # of 0.5, 0.5, 1, 1, 2 and 2


def test_times_of_a_kill_are_counted_from_the_first(tmp_path):
    run = LocalRun(tmp_path)
    run.events += [
        LoaderOpened(loader=0, length=8, batch_size=4, shuffle=False, seed=0),
        StepCommitted(
            step=1,
            generation=1,
            world_size=1,
            batches=(BatchShares(loader=0, epoch=0, shares={0: ((0, 4),)}),),
        ),
        WorkerJoined(
            t=1002.5, worker=3, generation=2, step=1, copy_s=0.1, copy_bytes=1, watched_steps=0
        ),
    ]
    run.freed += [(1, 0, 10.25), (2, 1, 10.5)]
    kills = [[10.2, 1000.2], [10.0, 1000.0]]
    # Both come out of the step before a moment after the kill: they had waited for a core.
    ends = [[9.0, 10.1, 10.3, 11.0], [9.5, 10.1, 10.4]]
    found = crews.account(run, kills, ends, samples=8, step=2)
    assert found["stall_s"] == pytest.approx(0.4)
    assert found["free_s"] == pytest.approx(0.5)
    assert found["rebuilt_s"] == pytest.approx(2.5)
    assert (found["samples_dropped"], found["samples_repeated"]) == (4, 0)


def test_a_run_in_which_not_all_were_killed_is_not_counted(tmp_path):
    with pytest.raises(RuntimeError, match="1 processes were killed, not 2"):
        crews.account(LocalRun(tmp_path), [[10.0, 1000.0]], [[9.0, 10.3]], samples=8, step=1)


def test_a_file_keeps_the_parts_that_are_not_measured_anew(monkeypatch):
    monkeypatch.setattr(crews, "measure_diloco", lambda seeds: {"seeds": seeds})
    known = {"kills": {"repeats": 5}, "diloco": {"seeds": 1}, "gone": 1}
    found = crews.measure(["diloco"], 2, known)
    assert found == {"kills": {"repeats": 5}, "diloco": {"seeds": 2}}


def test_steps_beside_hsdp():
    skip_if_refused()
    found = crews.measure_steps(1, width=32, steps=crews.WARM + 1)
    assert found["ratio_median"] > 0
    assert set(found["memory_mb"]) == {"hsdp", "crews", "one process"}


@pytest.mark.slow
def test_kills():
    found = crews.measure_kills(1, width=32, steps=60)
    assert found["steps_lost"] == found["samples_dropped"] == found["samples_repeated"] == 0
    assert found["free_s"]["counted"] == 1
    assert found["stall_s"]["median"] > 0


@pytest.mark.slow
def test_pipelines_beside_torchs_own():
    found = crew_parts.measure_pipes(1, width=32, steps=crews.WARM + 1)
    assert found["ratio_median"] > 0
    assert found["step_s"].keys() == {"torch", "crews", "torch again"}


@pytest.mark.slow
def test_kills_of_a_stage():
    found = crew_parts.measure_pipe_kills(1, width=32, steps=60)
    assert found["steps_lost"] == found["samples_dropped"] == found["samples_repeated"] == 0
    assert found["free_s"]["counted"] == 1
    assert found["stall_s"]["median"] > 0


@pytest.mark.slow
def test_a_worker_is_there_again_with_a_spare_and_without():
    found = crew_parts.measure_spares(1, width=32)
    assert found["rebuilt_with_s"]["median"] > 0
    assert found["rebuilt_without_s"]["counted"] == 1


@pytest.mark.slow
def test_slices_and_exact_runs_over_whole_batches():
    found = crew_parts.measure_slices(1, width=32, steps=crews.WARM + 1)
    assert found["slices_over_whole"]["ratio_median"] > 0
    assert found["exact_over_slices"]["ratio_median"] > 0


def test_a_library_that_cannot_be_run_says_why(tmp_path):
    """The words of what has ended it, rather than that it is not there."""
    assert "--torchft-python" in crew_parts.measure_torchft(1, "")["not_measured"]
    python = tmp_path / "python"
    for said, expected in (
        ("echo oh no >&2; exit 3", "it ended with 3: oh no"),
        ("""echo '{"error": "no gloo"}'""", "on gloo its HSDP ends with: no gloo"),
    ):
        python.write_text(f"#!/bin/sh\n{said}\n")
        python.chmod(0o755)
        assert expected in crew_parts.measure_torchft(1, str(python))["not_measured"]


def test_accuracy():
    found = crews.measure_diloco(1, epochs=1)
    assert all(0 < value < 1 for values in found["accuracy"].values() for value in values)
