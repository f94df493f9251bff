"""A run that is looked at from outside: a script with a Ray of its own, its dashboard on.

`python -m tests.observed STORE` prints one JSON object: what the metrics endpoint, the dashboard
and the Grafana directory showed while the run went on.
"""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ray

import elastix
from elastix.observe.grafana import provisioned_directory, write_dashboard
from elastix.testing.chaos import Kill, with_kills
from tests import forked_workers, trainables

SAMPLES = 3 * 240


def train(ctx: elastix.Context) -> None:
    trainables.train(ctx)
    hold = Path(ctx.config["hold"])
    while hold.exists():  # an event between processes
        time.sleep(0.05)


def get(url, token):
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return answer.read().decode()


def watch(address, hold, seen):
    """Look at everything, then let the run end, whatever was seen."""
    try:
        look(address, seen)
    finally:
        hold.unlink()


def look(address, seen):
    """Poll until the endpoint shows the last sample; then the rest."""
    token = (Path.home() / ".ray" / "auth_token").read_text().strip()
    node = ray.nodes()[0]
    endpoint = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        try:
            text = get(endpoint, token)
        except OSError:
            text = ""  # the agent is starting
        lines = [line for line in text.splitlines() if "elastix_" in line]
        values = {line.split("{")[0]: float(line.split()[-1]) for line in lines if line[0] != "#"}
        done = values.get("ray_elastix_samples_committed_total", 0) >= SAMPLES
        # Ray exports a counter and each gauge by itself: one answer may have some of them alone.
        if done and {"ray_elastix_goodput_ratio", "ray_elastix_reported"} <= values.keys():
            break
        time.sleep(0.2)
    seen["metrics"] = lines
    actors = json.loads(get(f"http://{address}/api/v0/actors?detail=1", token))
    seen["actors"] = actors["data"]["result"]["result"]
    directory = provisioned_directory()
    seen["ray_dashboards"] = sorted(path.name for path in directory.iterdir())
    seen["dashboard"] = str(write_dashboard(directory))
    if not seen["agent port taken"]:
        for mode in ("token", ""):
            code, said = submit(f"http://{address}", mode)
            seen[f"submitted {mode}".strip()] = code, said


def answers(port):
    """Whether another Ray's agent listens there: all take this port, and jobs need the agent."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def submit(address, mode):
    """`ray job submit` as a user types it; its exit code and what it said."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    if mode:
        environment["RAY_AUTH_MODE"] = mode
    command = [Path(sys.executable).parent / "ray", "job", "submit", "--address", address]
    done = subprocess.run(
        [*command, "--", "echo", "hello from the job"],
        env={**environment, "HOME": str(Path.home())},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def main() -> None:
    store = Path(sys.argv[1])
    hold = store / "hold"
    hold.touch()
    seen = {"agent port taken": answers(52365)}
    context = ray.init(
        address="local",
        num_cpus=8,
        include_dashboard=True,
        dashboard_port=0,
        log_to_driver=False,
        logging_level="ERROR",
        # Twice as long as our gauges are silent at most: one that Ray forgot is there again.
        _system_config={"metrics_report_interval_ms": 1000, **forked_workers.SETTINGS},
    )
    address = context.address_info["webui_url"]
    watcher = ThreadPoolExecutor(1)
    watched = watcher.submit(watch, address, hold, seen)
    elastix.ElasticTrainer(
        with_kills(train, [Kill(worker=1, phase="bucket", step=5)]),
        config={"samples": 240, "batch_size": 30, "epochs": 3, "hold": str(hold)},
        scaling=elastix.ScalingConfig(num_workers=(2, 3), cpus_per_worker=0.5),
        run=elastix.RunConfig(name="seen", store=str(store)),
        checkpoint=elastix.CheckpointConfig(every_steps=8),
        failure=elastix.FailureConfig(replace=False),
        quiet=True,
    ).fit()
    watched.result()
    ray.shutdown()
    print(json.dumps(seen))


if __name__ == "__main__":
    with forked_workers.serve():
        main()
