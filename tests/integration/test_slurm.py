"""The SLURM scripts: linted, and run against stand-ins for srun, scontrol and nvidia-smi."""

import os
import signal
import stat
import subprocess
import sys
import textwrap
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.chaos.test_controller import until

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "jobs" / "slurm"
STUBS = ROOT / "tests" / "slurm"
BIN = Path(sys.executable).parent


def test_the_scripts_are_linted():
    files = [*SCRIPTS.iterdir(), *STUBS.iterdir()]
    done = subprocess.run(
        [BIN / "shellcheck", *files], capture_output=True, text=True, timeout=60, check=False
    )
    assert not done.stdout


class Job:
    """A SLURM job as its batch script sees it."""

    def __init__(self, folder, real_ray=False):
        self.log = folder / "calls.log"
        self.log.touch()
        self.folder = folder
        (folder / "jobs").symlink_to(ROOT / "jobs")
        stubs = folder / "stubs"
        stubs.mkdir()
        for stub in STUBS.iterdir():
            if stub.name != "ray" or not real_ray:
                (stubs / stub.name).symlink_to(stub)
        self.environment = {
            **{
                k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "SLURM_", "CUDA_"))
            },
            "PATH": f"{stubs}:{BIN}:{os.environ['PATH']}",
            "STUB_LOG": str(self.log),
            "PYTHONPATH": str(ROOT),
            "SLURM_JOB_ID": "4711",
            "SLURM_JOB_NODELIST": "node[1-2]",
            "SLURM_NNODES": "2",
            "SLURM_NTASKS_PER_NODE": "2",
            "SLURM_CPUS_PER_TASK": "1",
            "SLURM_SUBMIT_DIR": str(folder),
            "RAY_TMPDIR": str(folder),
        }

    def start(self, code, script="multi_node.sbatch", **environment):
        """Run Python code on the cluster of the job."""
        return subprocess.Popen(
            ["bash", SCRIPTS / script, sys.executable, "-u", "-c", textwrap.dedent(code)],
            env={**self.environment, **environment},
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    @property
    def calls(self):
        return self.log.read_text().splitlines()

    def processes(self):
        """What of the job is still there."""
        mine = f"STUB_LOG={self.log}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    if mine in (entry / "environ").read_bytes().split(b"\0"):
                        found.append((entry / "cmdline").read_text())
                except OSError:
                    continue  # it ended, or is somebody else's
        return found


@pytest.fixture
def job(tmp_path):
    return Job(tmp_path)


@pytest.mark.parametrize(("script", "nodes"), [("single_node.sbatch", 1), ("multi_node.sbatch", 2)])
def test_ray_is_started_over_the_allocation_and_stopped(job, script, nodes):
    code = """
        import os, pathlib, stat
        token = pathlib.Path(os.environ["RAY_AUTH_TOKEN_PATH"])
        print("mode", os.environ["RAY_AUTH_MODE"], oct(stat.S_IMODE(token.stat().st_mode)))
        print("token", len(token.read_text()), "address", os.environ["RAY_ADDRESS"])
        raise SystemExit(3)
    """
    process = job.start(code, script, SLURM_NNODES=str(nodes))
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 3, output  # the command's own
    assert "mode token 0o600" in output
    assert "token 64 address " in output
    assert f":{20000 + 3 * 4711}" in output
    starts = [call for call in job.calls if call.startswith("ray start")]
    heads = [call for call in starts if "--head" in call]
    assert len(heads) == 1
    assert "--num-cpus=0 --num-gpus=0" in heads[0]
    assert len(starts) == 1 + 2 * nodes  # a Ray node for each task
    assert all("--address=" in call for call in starts if call not in heads)
    assert job.calls.index(heads[0]) < job.calls.index(starts[-1])
    assert not [call for call in job.calls if "requeue" in call]
    assert not list(job.folder.glob(".ray-*"))  # the token went with the job
    assert not job.processes()


def test_a_job_whose_time_is_over_interrupts_the_command_and_goes_back_to_the_queue(job):
    code = """
        import signal
        try:
            print("at work", flush=True)
            while True:
                signal.pause()
        except KeyboardInterrupt:
            print("interrupted in order", flush=True)
            raise
    """
    process = job.start(code)
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line == "at work\n":
            process.send_signal(signal.SIGUSR1)
    assert process.wait(timeout=60) == 0, lines
    assert "interrupted in order\n" in lines
    assert [call for call in job.calls if call.startswith("scontrol requeue")] == [
        "scontrol requeue 4711"
    ]
    assert not job.processes()


def test_a_command_that_is_through_all_the_same_is_not_queued_again(job):
    code = """
        import signal, threading
        heard = threading.Event()
        signal.signal(signal.SIGINT, lambda *_: heard.set())
        print("at work", flush=True)
        while not heard.wait(0.1):
            pass
    """
    process = job.start(code)
    for line in process.stdout:
        if line == "at work\n":
            process.send_signal(signal.SIGUSR1)
    assert process.wait(timeout=60) == 0
    assert not [call for call in job.calls if "requeue" in call]


def test_a_cancelled_job_leaves_nothing_behind(job):
    process = job.start("import time; print('at work', flush=True); time.sleep(1000)")
    for line in process.stdout:
        if line == "at work\n":
            process.send_signal(signal.SIGTERM)
            break
    process.stdout.close()
    assert process.wait(timeout=60) != 0
    assert not list(job.folder.glob(".ray-*"))
    assert not job.processes()


def test_a_head_that_does_not_come_up_ends_the_job(job):
    process = job.start("print('never')", STUB_DEAF="yes", ELASTIX_START_TIMEOUT_S="1")
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "never" not in output
    assert "did not come up at" in output
    assert not job.processes()


@pytest.mark.parametrize(("missing", "status"), [("1", 0), ("4", 1)])
def test_a_node_that_does_not_come_is_done_without_if_there_are_others(job, missing, status):
    process = job.start("print('at work')", STUB_MISSING=missing, ELASTIX_START_TIMEOUT_S="2")
    output, _ = process.communicate(timeout=60)
    assert process.returncode == status, output
    assert f"only {4 - int(missing)} of 4 tasks have joined Ray" in output
    assert ("at work" in output) == (status == 0)
    assert not job.processes()


def test_each_ray_node_has_a_directory_of_its_own(job):
    """Nodes of one host that share one take each other's socket names."""
    process = job.start("print()")
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    folders = [
        word for call in job.calls for word in call.split() if word.startswith("--temp-dir=")
    ]
    assert len(set(folders)) == 5  # the head's, and one a task
    assert all(word.startswith(f"--temp-dir={job.folder}/ray-4711.") for word in folders)


def test_outside_of_a_job_the_script_says_so(job):
    del job.environment["SLURM_JOB_ID"]
    output, _ = job.start("print()").communicate(timeout=60)
    assert "sbatch jobs/slurm/single_node.sbatch" in output


def bound(job, folder, cpus, **environment):
    """CPUs on which bind.sh runs a command, and what it said."""
    device = folder / "bus" / "pci" / "devices" / "0000:3b:01.0"
    device.mkdir(parents=True)
    (device / "local_cpulist").write_text(cpus + "\n")
    done = subprocess.run(
        [
            SCRIPTS / "bind.sh",
            sys.executable,
            "-c",
            "import os; print(sorted(os.sched_getaffinity(0)))",
        ],
        env={**job.environment, "SYSFS": str(folder), **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout.strip(), done.stderr


def test_a_task_runs_on_the_cpus_next_to_its_gpu(job, tmp_path):
    last = max(os.sched_getaffinity(0))
    cpus, said = bound(job, tmp_path / "sys", str(last), CUDA_VISIBLE_DEVICES="1")
    assert cpus == f"[{last}]"
    assert f"GPU 1: on CPUs {last}" in said


@pytest.mark.parametrize(
    ("cpus", "environment"),
    [
        ("4000-4007", {"CUDA_VISIBLE_DEVICES": "1"}),  # not this job's
        ("0", {"CUDA_VISIBLE_DEVICES": "2"}),  # the kernel does not know it
        ("0", {}),  # no GPU
    ],
)
def test_a_task_that_cannot_be_bound_runs_all_the_same(job, tmp_path, cpus, environment):
    found, said = bound(job, tmp_path / "sys", cpus, **environment)
    assert found == str(sorted(os.sched_getaffinity(0)))
    assert "not bound" in said


def test_the_scripts_can_be_run():
    for path in (*SCRIPTS.glob("*.sh"), *STUBS.iterdir()):
        assert path.stat().st_mode & stat.S_IXUSR, path


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_on_a_real_ray_under_the_script(tmp_path_factory):
    """Real raylets, real authentication, real workers; srun alone is not real."""
    folder = tmp_path_factory.mktemp("job")
    job = Job(folder, real_ray=True)
    code = f"""
        import ray, elastix
        from tests import trainables
        result = elastix.ElasticTrainer(
            trainables.train,
            config={{"samples": 240, "batch_size": 30, "epochs": 2}},
            scaling=elastix.ScalingConfig(num_workers=2),
            run=elastix.RunConfig(name="slurm", store={str(folder / "store")!r}),
        ).fit()
        print("exact", result.audit.exact, "steps", result.audit.steps)
    """
    port = str(30000 + os.getpid() % 20000)
    with TemporaryDirectory(prefix="ray-", dir="/tmp") as short:  # names of sockets have a limit
        options = {"RAY_TMPDIR": short, "ELASTIX_RAY_PORT": port, "SLURM_NTASKS_PER_NODE": "1"}
        output, _ = (process := job.start(code, **options)).communicate(timeout=580)
    assert process.returncode == 0, output
    assert "exact True steps 16" in output
    assert "only" not in output  # all nodes were there, and said goodbye to the head
    assert "Failed to mark the local node as draining" not in output
    until(lambda: not job.processes())  # helpers of workers end when they see that these are gone
