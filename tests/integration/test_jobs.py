"""jobs/search.py and jobs/train.py through `ray job submit` on a local cluster of its own."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

import elastix
from elastix.data.audit import audit
from elastix.events import (
    Resumed,
    RunEnded,
    StateStored,
    StepCommitted,
    WorkerLost,
    WorkerStarted,
)
from elastix.observe import journal
from tests.integration import nodes

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]
PATIENCE_S = 600.0


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


class Head:
    """A head node with its dashboard, in a temporary folder, with token authentication."""

    _not_ready = "No available agent"

    def __init__(self, folder):
        (folder / "home").mkdir()
        self.env = {
            **os.environ,
            "HOME": str(folder / "home"),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": "a" * 64,
            "OMP_NUM_THREADS": "1",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_worker_niceness": "0",  # Ray's 15 makes workers wait for whatever else runs here
        }
        self.process = subprocess.Popen(
            [
                *(BIN / "ray", "start", "--head", "--block", "--num-cpus=4", "--port=0"),
                *("--dashboard-port=0", "--include-dashboard=true", "--disable-usage-stats"),
                f"--temp-dir={folder / 'ray'}",
                *("--dashboard-agent-listen-port=0", f"--ray-client-server-port={free_port()}"),
            ],
            env=self.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        said = []
        for line in self.process.stdout:
            said.append(line)
            found = re.search(r"--address='?http://([\d.]+:\d+)|http://([\d.]+:\d+)", line)
            if found:
                self.address = f"http://{found[1] or found[2]}"
                self.cluster = re.search(r"--address='([\d.]+:\d+)'", "".join(said))[1]
                return
        raise RuntimeError("".join(said))

    def node(self, cpus):
        """A further node, on this host; its process and that of its daemon."""
        command = [
            BIN / "ray",
            "start",
            f"--address={self.cluster}",
            f"--num-cpus={cpus}",
            "--block",
        ]
        node = subprocess.Popen(
            command, env=self.env, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT
        )
        while True:
            assert node.poll() is None
            for child in psutil.Process(node.pid).children():
                with contextlib.suppress(psutil.Error):
                    if child.name() == "raylet":
                        return node, child
            time.sleep(0.1)

    def cli(self, *arguments, check=True):
        verb, *rest = arguments
        command = [BIN / "ray", "job", verb, "--address", self.address, *rest]
        done = subprocess.run(command, env=self.env, capture_output=True, text=True, check=False)
        assert not check or done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    def submit(self, name, *arguments, working_dir=True, **variables):
        env = json.dumps({"env_vars": {"OMP_NUM_THREADS": "1", **variables}})
        files = ("--working-dir", str(ROOT)) if working_dir else ()
        deadline = time.monotonic() + PATIENCE_S
        said = self._not_ready
        while self._not_ready in said:  # the head has an address before it takes jobs
            assert time.monotonic() < deadline, said
            said = self.cli(
                *("submit", "--no-wait", f"--submission-id={name}", f"--runtime-env-json={env}"),
                *(*files, "--", sys.executable, *arguments),
                check=False,
            )
        assert "submitted successfully" in said, said

    def wait(self, name, *states):
        """Until the job is in one of these states, as `ray job status` words it."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            said = self.cli("status", name).lower()
            if any(state in said for state in states):
                return
            assert f"'{name}' failed" not in said, self.cli("logs", name)
        raise AssertionError(f"{name} was not {states}: {self.cli('logs', name)}")

    def close(self):
        os.killpg(self.process.pid, signal.SIGTERM)
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self.process.stdout.close()


@pytest.fixture
def head():
    """Short paths: a socket's may have 107 characters, and pytest's own are longer with xdist."""
    with tempfile.TemporaryDirectory(prefix="h", ignore_cleanup_errors=True) as folder:
        started = Head(Path(folder))
        yield started
        started.close()


def test_a_search_is_submitted_stopped_and_resumed(head, tmp_path):
    store = str(tmp_path / "store")
    arguments = ("jobs/search.py", "--recipe", "digits", "--store", store)
    head.submit("first", *arguments, ELASTIX_TRIALS="400")
    deadline = time.monotonic() + PATIENCE_S
    done = []
    while len(done) < 3:
        assert time.monotonic() < deadline, head.cli("logs", "first")
        try:
            done = [t for t in elastix.Results.open(store, "digits-search") if t.state.is_final]
        except (elastix.NotFound, elastix.StoreError):
            head.wait("first", "pending", "running")
    head.cli("stop", "first")
    head.wait("first", "stopped")
    done = [t for t in elastix.Results.open(store, "digits-search") if t.state.is_final]
    head.submit("second", *arguments, ELASTIX_TRIALS=str(len(done) + 3))
    head.wait("second", "succeeded")
    results = elastix.Results.open(store, "digits-search")
    assert [results[trial.number] for trial in done] == done
    assert all(trial.state == "finished" for trial in results)
    assert "goes on after" in head.cli("logs", "second")
    assert results.best.load().model


def test_training_is_submitted(head, tmp_path):
    store = str(tmp_path / "store")
    head.submit(
        *("train", "jobs/train.py", "--recipe", "digits", "--store", store), ELASTIX_EPOCHS="2"
    )
    head.wait("train", "succeeded")
    logs = head.cli("logs", "train")
    assert "samples exact" in logs
    assert "accuracy" in logs


def test_a_job_that_is_stopped_stores_its_state_and_goes_on_from_there(head, tmp_path):
    """In the time that Ray gives it."""
    arguments = ("jobs/train.py", "--recipe", "digits", "--store", str(tmp_path))
    variables = {"ELASTIX_EPOCHS": "100000", "RAY_JOB_STOP_WAIT_TIME_S": "100"}
    head.submit("first", *arguments, **variables)
    path = tmp_path / "runs" / "digits-train" / "journal.jsonl"
    nodes.await_event(path, lambda event: isinstance(event, StepCommitted))
    head.cli("stop", "first")
    head.wait("first", "stopped")
    events = list(journal.read(path))
    ended = [event for event in events if isinstance(event, RunEnded)]
    assert [(event.outcome, event.message) for event in ended] == [("interrupted", "SIGTERM")]
    stored = [event for event in events if isinstance(event, StateStored)][-1]
    assert "interrupted after step" in head.cli("logs", "first")
    head.submit("second", *arguments, **variables)
    resumed = nodes.await_event(path, lambda event: isinstance(event, Resumed))
    assert (resumed.step, resumed.ref) == (stored.step, stored.ref)
    nodes.await_event(path, lambda e: isinstance(e, StepCommitted) and e.t > resumed.t)
    head.cli("stop", "second")
    head.wait("second", "stopped")


def test_a_node_dies_under_a_job(head, tmp_path):
    """Its workers are lost, nobody else is, and the group is at full strength again.

    Ray's nodes on one machine share the folder of a job's files, and each writes them anew when it
    first needs them, under the hands of the other's processes: so they are read from here.
    """
    node, daemon = head.node(cpus=4)
    try:
        command = ("-m", "tests.integration.nodes", "submitted", str(tmp_path))
        head.submit("nodes", *command, working_dir=False, PYTHONPATH=str(ROOT))
        path = tmp_path / "runs" / "nodes" / "journal.jsonl"
        nodes.await_event(path, lambda e: isinstance(e, StepCommitted) and e.world_size == 4)
        before = [event for event in journal.read(path) if isinstance(event, WorkerStarted)]
        here = (tmp_path / "here").read_text()
        there = {event.worker for event in before if event.node != here}
        daemon.kill()
        lost = nodes.await_event(path, lambda event: isinstance(event, WorkerLost))
        nodes.await_event(
            path, lambda e: isinstance(e, StepCommitted) and e.t > lost.t and e.world_size == 4
        )
        while not (tmp_path / "metrics").exists():
            assert "fail" not in head.cli("status", "nodes").lower(), head.cli("logs", "nodes")
        (tmp_path / "over").touch()
        head.wait("nodes", "succeeded")
    finally:
        node.terminate()
        node.wait()
    events = list(journal.read(path))
    assert there
    assert sorted(e.worker for e in events if isinstance(e, WorkerLost)) == sorted(there)
    assert audit(events).exact
    assert nodes.losses((tmp_path / "metrics").read_text()) == len(there)
    assert f"workers lost {len(there)}" in head.cli("logs", "nodes")


@pytest.mark.slow
def test_the_demo_is_submitted(head, tmp_path):
    head.submit("demo", "jobs/demo.py", str(tmp_path / "store"))
    head.wait("demo", "succeeded")
    logs = head.cli("logs", "demo")
    assert "samples    exact" in logs
    assert (tmp_path / "store" / "runs" / "digits" / "report.html").is_file()


def test_a_recipe_that_is_not_there_is_named(tmp_path):
    command = [sys.executable, "jobs/train.py", "--recipe", "nope", "--store", str(tmp_path)]
    env = {**os.environ, "RAY_ADDRESS": ""}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "digits" in done.stderr
    assert "Ray instance" not in done.stderr  # nothing was started, as the error says


@pytest.mark.parametrize("program", ["train", "search"])
def test_a_recipe_whose_name_is_no_runs_name_is_told_in_a_line(program, tmp_path):
    recipe = tmp_path / "my recipe.py"
    recipe.write_text("")
    command = [sys.executable, f"jobs/{program}.py", "--recipe", recipe, "--store", tmp_path]
    env = {**os.environ, "RAY_ADDRESS": ""}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "--name" in done.stderr
    assert "Traceback" not in done.stderr
