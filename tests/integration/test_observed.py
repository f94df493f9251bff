"""A run seen from outside: Ray's metrics endpoint, its dashboard's API, Grafana's directory."""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from elastix.observe.grafana import FILE, dashboard
from elastix.observe.metric_series import SERIES

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def seen():
    folder = Path(tempfile.mkdtemp(prefix="ex-"))  # short, for Ray's sockets
    done = subprocess.run(
        [sys.executable, "-m", "tests.observed", str(folder)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "RAY_TMPDIR": str(folder)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=590,
        check=False,
    )
    shutil.rmtree(folder, ignore_errors=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def values(seen):
    """Series and labels of elastix to value, as the endpoint had them."""
    found = {}
    for line in seen["metrics"]:
        if line.startswith("#"):
            continue
        name, labels, value = re.fullmatch(r"(\w+)\{(.*)\} (\S+)", line).groups()
        labels = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        own = tuple(labels[key] for key in ("run", "cause", "metric", "le") if key in labels)
        found[name, own] = float(value)
    return found


def test_the_metrics_endpoint_tells_the_run(seen):
    found = values(seen)
    run = ("seen",)
    assert found["ray_elastix_steps_total", run] in (24, 25)
    assert found["ray_elastix_samples_committed_total", run] == 3 * 240
    assert 0 < found["ray_elastix_goodput_ratio", run] <= 1
    assert found["ray_elastix_samples_owed", run] == 0
    assert found["ray_elastix_samples_repeated", run] == 0
    assert found["ray_elastix_world_size", run] == 2
    assert found["ray_elastix_generation", run] == 2
    assert found["ray_elastix_workers_lost_total", ("seen", "died")] == 1
    assert found["ray_elastix_recovery_seconds_count", run] == 2  # each survivor's
    assert found["ray_elastix_checkpoint_write_seconds_count", run] >= 2
    assert found["ray_elastix_checkpoint_stall_seconds_count", run] >= 2
    logical, physical = (
        found[f"ray_elastix_store_{kind}_bytes_total", run] for kind in ("logical", "physical")
    )
    assert 0 < physical <= logical
    assert 0 <= found["ray_elastix_reported", ("seen", "accuracy")] <= 1


def test_every_query_of_the_dashboard_is_for_a_series_that_is_exported(seen):
    exported = {name for name, _ in values(seen)}
    # Nobody joined or left this run, all began, every State could be stored, no shadow, no slices.
    absent = {"workers_joined", "join_seconds", "workers_left", "workers_not_started"}
    absent |= {"checkpoints_failed"}
    absent |= {"shadow_resumptions", "shadows_differed", "slices_handed_over"}
    absent |= {"workers_diverged", "steps_voided", "samples_left_out"}
    absent |= {"processor_kinds", "replicas_levelled"}  # all have the same processors
    absent |= {"worker_gpu", "worker_slowness"}  # there is no GPU, and who is slow is chance
    absent |= {"worker_cpu", "worker_memory", "worker_time"}  # it may be over in five seconds
    absent |= {"trials", "trial_peak_bytes", "best_objective", "inherited_ratio"}  # no campaign
    wanted = [t["expr"] for panel in dashboard()["panels"] for t in panel["targets"]]
    asked = {name for expr in wanted for name in re.findall(r"ray_elastix_\w+", expr)}
    missing = {name for name in asked - exported if not any(a in name for a in absent)}
    assert not missing
    assert len(asked) == len(SERIES)


def test_actors_have_names_that_read_well(seen):
    actors = {actor["repr_name"]: actor for actor in seen["actors"]}
    assert set(actors) == {"controller seen", *(f"worker {n} of seen" for n in range(3))}
    assert re.fullmatch(r"seen@\w{16}/worker-1", actors["worker 1 of seen"]["name"])
    assert actors["worker 1 of seen"]["state"] == "DEAD"
    assert actors["worker 2 of seen"]["state"] == "ALIVE"


def test_the_dashboard_stands_beside_rays_own(seen):
    assert "default_grafana_dashboard.json" in seen["ray_dashboards"]
    assert Path(seen["dashboard"]).name == FILE


def test_jobs_are_taken_with_a_token_and_not_without(seen):
    """What `elastix doctor` and docs/jobs.md say of RAY_AUTH_MODE."""
    if seen["agent port taken"]:
        pytest.skip("another Ray on this machine has port 52365, where agents take jobs")
    code, said = seen["submitted token"]
    assert code == 0, said
    assert "hello from the job" in said
    code, said = seen["submitted"]
    assert code != 0
    assert "authentication is enabled" in said
    assert "hello from the job" not in said
