"""Plain DDP processes on this machine: started, timed from outside, and ended."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from elastix.bench.ddp_rank import DIGESTS_AT, Files
from elastix.bench.measures import Commit, Rate, Timing, measure_rate
from elastix.errors import ConfigError, TrainError

_LOOK_S = 0.1
_PATIENCE_S = 300.0
_PATIENCE_STEPS = 10.0
_WORDS = 2000  # bytes of what a process has printed
_WORDS_S = 1.0


def measure_ddp(
    train: bytes,
    config: Mapping[str, Any],
    size: int,
    timing: Timing,
    folder: Path,
    *,
    cpus: float,
    seed: int,
    step_s: float = 0.0,
) -> Rate:
    """The rate of a train function under DDP. Blocks; no process is left.

    Args:
        train: pickled.
        config: for ctx.config.
        size: number of processes.
        timing: of the window; kills have no part in it.
        folder: an empty one.
        cpus: threads of each process, rounded down, and at least one.
        seed: of weights and of the order of samples.
        step_s: about how long one may take, where that is known. Ten of them are waited for, and
            no less than five minutes.

    Raises:
        ConfigError: it does what has no counterpart in DDP.
        TrainError: it raised, ended too early, trains around DDP, or does not go on.
    """
    folder.mkdir(parents=True)
    (folder / "train.pkl").write_bytes(train)
    threads = max(1, int(cpus))
    plan = {"size": size, "config": dict(config), "seed": seed, "threads": threads}
    (folder / "plan.json").write_text(json.dumps(plan))
    files = [Files(folder, rank) for rank in range(size)]
    processes: list[subprocess.Popen[bytes]] = []
    words: list[_LastWords] = []
    try:
        for one in files:  # one after the other: those that were started are ended
            process = _start(folder, one.rank, threads)
            processes.append(process)
            if process.stdout is not None:
                words.append(_LastWords(process.stdout))
        patience_s = max(_PATIENCE_S, _PATIENCE_STEPS * step_s)
        return _watch(processes, words, files, timing, patience_s)
    finally:
        for process in processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with those that read samples for it
            process.wait()
            if process.stdin is not None:
                process.stdin.close()
        for said in words:
            said.close()


def _start(folder: Path, rank: int, threads: int) -> subprocess.Popen[bytes]:
    """As Ray starts a worker that has no GPU: so many threads, and no device to be seen."""
    path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
    environment = {
        "OMP_NUM_THREADS": str(threads),  # torch's are as many, whatever the environment says
        **os.environ,
        "PYTHONPATH": path,
        "CUDA_VISIBLE_DEVICES": "",
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
    }
    return subprocess.Popen(
        [sys.executable, "-m", "elastix.bench.ddp_rank", str(folder), str(rank)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment,
        start_new_session=True,
    )


class _LastWords:
    """What a process has printed last: a function may print without end, and a disk has one."""

    def __init__(self, pipe: IO[bytes]) -> None:
        self._pipe = pipe
        self._kept = b""
        self._reader = threading.Thread(target=self._read, name="last words", daemon=True)
        self._reader.start()

    def text(self) -> str:
        """Of a process that has ended; who left it may hold the pipe yet."""
        self._reader.join(_WORDS_S)
        return self._kept.decode(errors="replace")

    def close(self) -> None:
        """Its processes were ended."""
        self._reader.join(_WORDS_S)
        if not self._reader.is_alive():
            self._pipe.close()

    def _read(self) -> None:
        while said := os.read(self._pipe.fileno(), 1 << 16):
            self._kept = (self._kept + said)[-_WORDS:]


def _watch(
    processes: list[subprocess.Popen[bytes]],
    words: list[_LastWords],
    files: list[Files],
    timing: Timing,
    patience_s: float,
) -> Rate:
    size = len(processes)
    heard, steps = time.monotonic(), 0
    while True:
        _check_failures(files, size)
        commits = _commits(files[0].steps, size)
        rate = measure_rate(commits, size, timing)
        if len(commits) > steps and rate is None:
            heard, steps = time.monotonic(), len(commits)
        if rate is not None and check_levels([_digests(one.digests) for one in files], size):
            return rate
        if any(one.ended.exists() for one in files):
            raise TrainError(ended_early("DDP", size, steps))
        for process, one in zip(processes, files, strict=True):
            if process.poll() is not None and not (one.failure.exists() or one.ended.exists()):
                raise TrainError(
                    f"rank {one.rank} of {size} under DDP ended with code {process.returncode}. "
                    f"The benchmark was stopped. It printed:\n{words[one.rank].text()}"
                )
        if time.monotonic() - heard > patience_s:
            raise TrainError(
                f"under DDP with {size} ranks no step came in {patience_s:.0f} s. The benchmark "
                "was stopped. --no-ddp measures elastix alone."
            )
        time.sleep(_LOOK_S)


def ended_early(system: str, size: int, steps: int) -> str:
    """What to say of a function that has returned."""
    return (
        f"the train function was through after {steps} counted steps under {system} with {size} "
        "workers, before enough was measured. The benchmark was stopped. Epochs of ctx.loader "
        "never end here, so it has ended by itself: let it go on, by --set if its config says how "
        "long, or measure less with --seconds and --warmup."
    )


def _check_failures(files: list[Files], size: int) -> None:
    for one in files:
        if one.failure.exists():
            found = json.loads(one.failure.read_text())
            if found["config"]:
                raise ConfigError(found["text"])
            raise TrainError(
                f"the train function raised under DDP with {size} ranks, in rank {one.rank}. The "
                f"benchmark was stopped. --no-ddp measures elastix alone.\n{found['text']}"
            )


def _commits(path: Path, size: int) -> list[Commit]:
    """Whole lines of "TIME SAMPLES", samples from the beginning on."""
    if not path.exists():
        return []
    commits: list[Commit] = []
    before = 0
    for line in path.read_text().split("\n")[:-1]:
        t, total = line.split()
        commits.append(Commit(float(t), int(total) - before, len(commits) + 1, size))
        before = int(total)
    return commits


def _digests(path: Path) -> dict[str, str]:
    if not path.exists():
        return {}
    return dict(line.split() for line in path.read_text().split("\n")[:-1])


def check_levels(digests: list[dict[str, str]], size: int) -> bool:
    """See that all ranks had the same parameters whenever they said what they had.

    Returns:
        Whether all have said so once: one that trains by itself may be slower than the others.

    Raises:
        TrainError: they had not.
    """
    for drawn in digests[0]:
        if len({one[drawn] for one in digests if drawn in one}) > 1:
            raise TrainError(
                f"under DDP with {size} ranks the models differ after {drawn} batches: the train "
                "function computes its loss by something else than a call of the prepared module, "
                "as model(x), or steps before the gradients are averaged. DDP would train another "
                "model there, so it is not compared. --no-ddp measures elastix alone."
            )
    return all(str(DIGESTS_AT[0]) in one for one in digests)
