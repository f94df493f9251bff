"""torchft through the kill: five replica groups of one rank each, gloo on the loopback device.

What is torchft's own: lighthouse, ``Manager`` with its defaults (asynchronous quorum, HTTP
transfer of the weights), ``ProcessGroupGloo``, ``OptimizerWrapper`` and ``DistributedSampler``.
What is not: the DDP wrapper. In torchft 0.2.0 its communication hook asserts on gloo when an
allreduce fails, and the survivor dies; here hooks fill flat buckets and hand each full one to
``Manager.allreduce`` while backward goes on (``torchft_worker.BucketedAllreduce``), which is
what the wrapper would do at best.

One replica kills itself in the middle of backward, the parent starts a replacement as soon as
it sees that, and the survivors go on until their parts of the data are used up.

* ``--heartbeat``: the lighthouse's heartbeat timeout, 5 s by default as in torchft.
* ``--op-timeout``: the timeout of a gloo operation, 5 s as in torchft's example for gloo. Those
  survivors wait for it who do not exchange data with the victim directly.

Samples: every replica group has its own part of the data and its own loader position, which is
kept after every step, so that the replacement goes on where the victim was. The batch of a
step that is not committed is not drawn again, and the pass is over when the survivors have
used up their parts; both are torchft's documented way.
"""

import argparse
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from benchmarks.peers.summary import (
    Repeat,
    StepRecord,
    account,
    common_arguments,
    read_kill,
    read_logs,
    write_result,
)
from benchmarks.peers.workload import GLOBAL_BATCH, KILL_STEP, STEPS, VICTIM, WORLD_SIZE

_REPOSITORY = Path(__file__).resolve().parents[2]
_JOIN_TIMEOUT_S = 60.0
"""How long a quorum waits for a replica that is alive but has not asked for it (the default)."""
_GRACE_S = 3.0
"""How long the replacement is given to log the survivors' last step, if it is part of it."""


@dataclass
class _Replica:
    process: subprocess.Popen[bytes]
    output: IO[bytes]
    errors: Path
    heard: bytes = b""
    ended: bool = False

    def said(self, word: str) -> bool:
        return f"{word}\n".encode() in self.heard

    def go(self) -> None:
        if self.process.stdin is not None:
            self.process.stdin.write(b"go\n")
            self.process.stdin.flush()

    def hear(self) -> None:
        more = os.read(self.output.fileno(), 4096)
        self.heard += more
        self.ended = not more


class _Group:
    """The replicas' processes.

    Args:
        folder: Where they keep their logs.
        lighthouse: Address of the lighthouse.
        settings: The parsed arguments of this module.
        deadline: When, on the monotonic clock, all waiting is over.
    """

    def __init__(
        self, folder: Path, lighthouse: str, settings: argparse.Namespace, deadline: float
    ) -> None:
        self.stamp = folder / "kill.json"
        self._folder = folder
        self._lighthouse = lighthouse
        self._settings = settings
        self._deadline = deadline
        self._selector = selectors.DefaultSelector()
        self._all: list[_Replica] = []

    def start(self, replica: int, kill_step: int = -1) -> _Replica:
        """Starts a replica, which is to die in the given step if that is not negative."""
        errors = self._folder / f"errors-{len(self._all)}.txt"
        options = {
            "--replica": replica,
            "--lighthouse": self._lighthouse,
            "--op-timeout": self._settings.op_timeout,
            "--steps": self._settings.steps,
            "--log": self._folder / f"steps-{replica}.jsonl",
            "--stamp": self.stamp,
            "--kill-step": kill_step,
        }
        command = [sys.executable, "-m", "benchmarks.peers.torchft_worker"]
        with errors.open("wb") as sink:
            process = subprocess.Popen(
                command + [f"{name}={value}" for name, value in options.items()],
                cwd=_REPOSITORY,
                env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=sink,
            )
        if process.stdout is None:
            raise RuntimeError("the replica has no standard output")
        started = _Replica(process, process.stdout, errors)
        self._all.append(started)
        self._selector.register(process.stdout, selectors.EVENT_READ, started)
        return started

    def wait_until_said(self, replicas: Iterable[_Replica], word: str) -> None:
        """Waits until each of the replicas has said the word; none of them may end before."""
        waiting = [replica for replica in replicas if not replica.said(word)]
        while waiting:
            self._listen()
            waiting = [replica for replica in waiting if not replica.said(word)]
            for replica in waiting:
                if replica.ended:
                    raise RuntimeError(f"a replica ended early:\n{_tail(replica.errors)}")

    def wait_until_ended(self, replica: _Replica) -> None:
        """Waits until the replica's process has ended."""
        while not replica.ended:
            self._listen()

    def wait_a_little(self, replica: _Replica, word: str) -> None:
        """Waits until the replica has said the word, but gives up after a few seconds."""
        deadline = min(time.monotonic() + _GRACE_S, self._deadline)
        with suppress(TimeoutError):
            while not replica.said(word) and not replica.ended:
                self._listen(deadline)

    def read_logs(self) -> list[StepRecord]:
        """Reads the step logs of all replicas."""
        return read_logs(self._folder.glob("steps-*.jsonl"))

    def close(self) -> None:
        """Ends every process that was started."""
        self._selector.close()
        for replica in self._all:
            replica.process.kill()
        for replica in self._all:
            replica.process.communicate()

    def _listen(self, deadline: float | None = None) -> None:
        left = (deadline or self._deadline) - time.monotonic()
        ready = self._selector.select(timeout=left) if left > 0 else []
        if not ready:
            tails = "\n".join(_tail(replica.errors) for replica in self._all)
            raise TimeoutError(f"the replicas took too long:\n{tails}")
        for key, _ in ready:
            replica: _Replica = key.data
            replica.hear()
            if replica.ended:
                self._selector.unregister(key.fileobj)


def _tail(path: Path, lines: int = 20) -> str:
    content = path.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join([f"{path.name}:", *content[-lines:]])


@contextmanager
def lighthouse(heartbeat_s: float, min_replicas: int = WORLD_SIZE - 1) -> Iterator[str]:
    # The library reads this when it is imported; else it prints some lines for every step.
    os.environ.setdefault("RUST_LOG", "error")
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(
        bind="[::]:0",
        min_replicas=min_replicas,
        join_timeout_ms=round(_JOIN_TIMEOUT_S * 1000),
        heartbeat_timeout_ms=round(heartbeat_s * 1000),
    )
    try:
        yield server.address()
    finally:
        server.shutdown()


def run_once(settings: argparse.Namespace) -> Repeat:
    """Runs one pass with one kill.

    Args:
        settings: The parsed arguments of this module.
    """
    deadline = time.monotonic() + settings.timeout
    with (
        tempfile.TemporaryDirectory(prefix="peers-") as folder,
        lighthouse(settings.heartbeat) as address,
    ):
        group = _Group(Path(folder), address, settings, deadline)
        try:
            replicas = [
                group.start(rank, settings.kill_step if rank == VICTIM else -1)
                for rank in range(WORLD_SIZE)
            ]
            group.wait_until_said(replicas, "ready")
            for replica in replicas:
                replica.go()
            group.wait_until_ended(replicas[VICTIM])
            kill = read_kill(group.stamp, settings.kill_step)
            replacement = group.start(VICTIM)
            replacement.go()
            group.wait_until_said([r for r in replicas if r is not replicas[VICTIM]], "done")
            last_step = max(r["step"] for r in group.read_logs() if r["committed"])
            group.wait_a_little(replacement, f"step{last_step}")
            records = group.read_logs()
        finally:
            group.close()
    return account(records, kill, settings.steps * GLOBAL_BATCH)


def main() -> None:
    """Runs the repeats and writes the result file."""
    parser = common_arguments(__doc__, STEPS, KILL_STEP)
    parser.add_argument("--heartbeat", type=float, default=5.0, help="heartbeat timeout (s)")
    parser.add_argument("--op-timeout", type=float, default=5.0, help="gloo timeout (s)")
    settings = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    repeats = []
    for number in range(settings.repeats):
        repeats.append(run_once(settings))
        print(f"repeat {number + 1}: {repeats[-1]}", flush=True)
    described = {
        "workers": WORLD_SIZE,
        "min_replicas": WORLD_SIZE - 1,
        "heartbeat_timeout_s": settings.heartbeat,
        "operation_timeout_s": settings.op_timeout,
        "steps": settings.steps,
        "kill_step": settings.kill_step,
    }
    write_result(settings.out, "torchft", ["torch", "torchft"], described, repeats)


if __name__ == "__main__":
    main()
