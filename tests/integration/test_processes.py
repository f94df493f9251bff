"""fit() as a script: with and without a Ray cluster, Ctrl-C, and what is left afterwards."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import pytest

from elastix.events import RunEnded, StateStored, WorkerStarted
from elastix.observe import journal
from tests.chaos.test_controller import until

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
    import sys, ray, elastix
    from tests import trainables
    {before}
    elastix.ElasticTrainer(
        trainables.train,
        config={{"samples": 240, "batch_size": 30, "epochs": {epochs}}},
        scaling=elastix.ScalingConfig(num_workers=2, cpus_per_worker=0.5),
        run=elastix.RunConfig(name="script", store={store!r}),
    ).fit()
    {after}
"""


@pytest.fixture
def folder():
    """For Ray's sockets and the store: their paths must be short."""
    path = Path(tempfile.mkdtemp(prefix="ex-"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


def start(folder, epochs=1, before="", after="", path=str(ROOT)):
    code = textwrap.dedent(SCRIPT).format(
        epochs=epochs, before=before, after=after, store=str(folder)
    )
    environment = {**os.environ, "PYTHONPATH": path, "RAY_TMPDIR": str(folder)}
    return subprocess.Popen(
        [sys.executable, "-u", "-c", code],
        env=environment,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def left_over(folder):
    """Processes of the Ray that lived in `folder`."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes()
                environment = (entry / "environ").read_bytes()
            except OSError:
                continue
            if str(folder).encode() in command + environment and command:
                found.append(command.replace(b"\0", b" ").decode()[:120])
    return found


def wait_until_gone(folder):
    """Ray's own processes end by themselves a moment after the driver; wait on their pids."""
    deadline = time.monotonic() + 30
    while (found := left_over(folder)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return found


@pytest.mark.slow
def test_a_script_starts_a_local_ray_and_leaves_nothing_behind(folder):
    process = start(folder, after="assert not ray.is_initialized(); print('through')")
    output, _ = process.communicate(timeout=250)
    assert process.returncode == 0, output
    assert "through" in output
    assert "exact" in output
    assert wait_until_gone(folder) == []


def test_a_script_uses_the_cluster_it_is_connected_to_and_leaves_it_running(cluster, folder):
    address = cluster.get_runtime_context().gcs_address
    free = cluster.available_resources()["CPU"]  # a killed driver's test may have lost Ray some
    process = start(
        folder,
        before=f"ray.init(address={address!r}, log_to_driver=False)",
        after="assert ray.is_initialized(); print('through')",
    )
    output, _ = process.communicate(timeout=250)
    assert process.returncode == 0, output
    assert "through" in output
    until(lambda: cluster.available_resources()["CPU"] >= free)


def test_a_driver_whose_elastix_is_not_that_of_the_workers_begins_nothing(cluster, folder):
    """Of the same version, as published."""
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "elastix", folder / "other" / "elastix", ignore=ignored)
    with (folder / "other" / "elastix" / "events.py").open("a") as module:
        module.write("# changed\n")
    address = cluster.get_runtime_context().gcs_address
    process = start(
        folder,
        before=f"ray.init(address={address!r}, log_to_driver=False)",
        path=f"{folder / 'other'}:{ROOT}",
    )
    output, _ = process.communicate(timeout=250)
    assert process.returncode == 1, output
    assert "OtherCode: the driver has elastix" in output
    assert str(folder / "other" / "elastix") in output
    assert not (folder / "runs" / "script" / "journal.jsonl").exists()


@pytest.mark.parametrize(
    ("own", "sent"),
    [
        (False, signal.SIGINT),
        pytest.param(False, signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param(True, signal.SIGINT, marks=pytest.mark.slow),
        pytest.param(True, signal.SIGTERM, marks=pytest.mark.slow),
    ],
)
def test_ctrl_c_ends_the_run_once_its_state_is_stored(cluster, folder, own, sent):
    """Whether the script has started a Ray of its own, or uses one that is there.

    What a scheduler sends does the same to a Ray of its own.
    """
    address = cluster.get_runtime_context().gcs_address
    before = "" if own else f"ray.init(address={address!r}, log_to_driver=False)"
    process = start(folder, epochs=100_000, before=before)
    assert process.stdout is not None
    lines = []
    for line in process.stdout:  # the first report: training is going on
        lines.append(line)
        if "accuracy" in line:
            break
    os.killpg(process.pid, sent)  # as a terminal does, and `timeout`
    output, _ = process.communicate(timeout=250)
    # Where Ray is up still, its own hook for exceptions makes it 1, and its handler of SIGTERM 15.
    codes = {signal.SIGINT: (1, -sent), signal.SIGTERM: (sent, 128 + sent)}
    code = codes[sent][own]
    assert process.returncode == code, output
    assert "Traceback" not in output
    told = [line for line in output.splitlines() if "interrupted after step" in line]
    assert len(told) == 1
    assert "fit() again" in told[0]
    events = list(journal.read(folder / "runs" / "script" / "journal.jsonl"))
    ended = [event for event in events if isinstance(event, RunEnded)]
    reason = "SIGTERM" if sent == signal.SIGTERM else "Ctrl-C"
    assert [(event.outcome, event.message) for event in ended] == [("interrupted", reason)]
    stored = [event for event in events if isinstance(event, StateStored)]
    assert stored[-1].reason == "notice"
    assert f"goes on from the State after step {stored[-1].step}" in told[0]
    assert wait_until_gone(folder) == []


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_worker_of_another_elastix_that_comes_later_is_told_of(folder):
    """As after an upgrade while the run goes on."""
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "elastix", folder / "other" / "elastix", ignore=ignored)
    process = start(folder, epochs=100_000, path=f"{folder / 'other'}:{ROOT}")
    assert process.stdout is not None
    heard: list[str] = []

    def comes(words):
        for line in process.stdout:
            heard.append(line)
            if words in line:
                return line
        raise AssertionError("".join(heard))

    try:
        comes("accuracy")
        with (folder / "other" / "elastix" / "events.py").open("a") as module:
            module.write("# changed\n")
        events = journal.read(folder / "runs" / "script" / "journal.jsonl")
        first = next(event for event in events if isinstance(event, WorkerStarted))
        os.kill(first.pid, signal.SIGKILL)
        said = comes("this worker has elastix")
        assert said.count(str(folder / "other" / "elastix")) == 2, said
        os.kill(process.pid, signal.SIGINT)
        output, _ = process.communicate(timeout=100)
        assert "interrupted after step" in output
    finally:
        process.kill()
    assert wait_until_gone(folder) == []


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_wheel_holds_both_packages(tmp_path):
    command = [sys.executable, "-m", "build", "--wheel", "--outdir", str(tmp_path), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True, timeout=280)
    (wheel,) = tmp_path.glob("*.whl")
    environment = {**os.environ, "PYTHONPATH": str(wheel), "PYTHONSAFEPATH": "1"}
    code = "import search_spaces.convnet, elastix, sys; sys.exit('.whl' not in elastix.__file__)"
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, cwd=tmp_path)
