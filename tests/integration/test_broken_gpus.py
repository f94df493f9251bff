"""Campaigns and runs go around a GPU that is broken, which Ray does not know. No GPU is needed."""

import subprocess
import sys
from pathlib import Path

import pytest

import elastix
from elastix.events import StepCommitted, TrialLost, WorkerLost
from elastix.observe import journal
from elastix.search.trial import TrialState

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("how", ["says", "dies"])
def test_a_campaign_goes_on_without_a_gpu_that_is_broken_for_good(how, tmp_path):
    command = [sys.executable, "-m", "tests.integration.broken_gpu", how, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    trials = elastix.Results.open(tmp_path, "broken")
    assert [trial.state for trial in trials] == [TrialState.FINISHED] * 12
    assert {trial.metrics["gpu"] for trial in trials} == {1}
    events = journal.read(tmp_path / "runs" / "broken" / "journal.jsonl")
    assert not [event for event in events if isinstance(event, TrialLost)]
    met = len(list(tmp_path.glob("broken-*")))
    assert met == 1 or (how == "dies" and met >= 3)


@pytest.mark.timeout(300)
def test_a_run_goes_on_with_another_gpu_in_place_of_one_that_is_broken_for_good(tmp_path):
    """Of three GPUs its two workers have the first and the second; the first is broken."""
    command = [sys.executable, "-m", "tests.integration.broken_gpu", "trains", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    events = list(journal.read(tmp_path / "runs" / "broken" / "journal.jsonl"))
    steps = [event.world_size for event in events if isinstance(event, StepCommitted)]
    assert steps == [2] * 8
    causes = [event.cause for event in events if isinstance(event, WorkerLost)]
    assert causes == ["its GPU failed"] * 5
    assert len(list(tmp_path.glob("broken-*"))) == 5
