"""`elastix status` beside a run that is going on."""

import json
import threading
from pathlib import Path

import pytest
from typer.testing import CliRunner

import elastix
from elastix.cli import app
from tests import trainables


def waiting(ctx: elastix.Context) -> None:
    """Trains, and stays in the middle of it until somebody has looked."""
    trainables.train(ctx)
    Path(ctx.config["there"]).touch()
    trainables.await_worker(Path(ctx.config["seen"]))


def asked(address: str) -> list[dict]:
    result = CliRunner().invoke(app, ["status", "--address", address, "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.mark.timeout(400)  # four processes have to start
def test_a_live_run_is_listed_and_one_that_has_ended_is_not(cluster, tmp_path):
    there, seen = tmp_path / "there", tmp_path / "seen"
    config = {"samples": 120, "epochs": 2, "batch_size": 30, "there": str(there), "seen": str(seen)}
    trainer = elastix.ElasticTrainer(
        waiting,
        config=config,
        scaling=elastix.ScalingConfig(num_workers=2, cpus_per_worker=0.5),
        run=elastix.RunConfig(name="looked-at", store=str(tmp_path)),
        quiet=True,
    )
    thread = threading.Thread(target=trainer.fit)
    thread.start()
    try:
        trainables.await_worker(there)
        (run,) = [found for found in asked("auto") if found["run"] == "looked-at"]
        text = CliRunner().invoke(app, ["status"]).stdout
    finally:
        seen.touch()
        thread.join()
    assert (run["step"], run["workers"], run["workers_wanted"], run["losses"]) == (8, 2, 2, 0)
    assert run["done"] == 1.0
    assert 0 <= run["metrics"]["accuracy"] <= 1
    assert run["store"] == str(tmp_path)
    (line,) = [line for line in text.splitlines() if line.startswith("looked-at")]
    assert line.split("\t")[2:4] == ["8", "100%"]
    assert not [found for found in asked("auto") if found["run"] == "looked-at"]
