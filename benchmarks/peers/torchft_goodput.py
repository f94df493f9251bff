"""torchft under repeated kills: each replica that ends is started again, until `over` is there.

What is torchft's own and what is not stands in torchft_group. The kills come from outside.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.peers.torchft_group import lighthouse
from benchmarks.peers.workload import WORLD_SIZE

_REPOSITORY = Path(__file__).resolve().parents[2]
_STEPS = 3000
"""In each replica's part of the data: more than the time allows."""
_HEARTBEAT_S = 5.0
_OPERATION_TIMEOUT_S = 5.0


def start(replica: int, address: str, folder: Path) -> subprocess.Popen[bytes]:
    """A replica that begins at once, and goes on where one in its place has stopped."""
    options = {
        "--replica": replica,
        "--lighthouse": address,
        "--op-timeout": _OPERATION_TIMEOUT_S,
        "--steps": _STEPS,
        "--log": folder / f"steps-{replica}.jsonl",
        "--stamp": folder / "kill.json",
    }
    command = [sys.executable, "-m", "benchmarks.peers.torchft_worker"]
    with (folder / f"errors-{replica}.txt").open("ab") as sink:
        process = subprocess.Popen(
            command + [f"{name}={value}" for name, value in options.items()],
            cwd=_REPOSITORY,
            env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=sink,
        )
    if process.stdin is not None:
        process.stdin.write(b"go\n")
        process.stdin.flush()
    return process


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    folder = parser.parse_args().folder
    with lighthouse(_HEARTBEAT_S) as address:
        replicas = {rank: start(rank, address, folder) for rank in range(WORLD_SIZE)}
        try:
            while not (folder / "over").exists():
                for rank, process in replicas.items():
                    if process.poll() is not None:
                        replicas[rank] = start(rank, address, folder)
                time.sleep(0.05)
        finally:
            for process in replicas.values():
                process.kill()
            for process in replicas.values():
                process.wait()


if __name__ == "__main__":
    main()
