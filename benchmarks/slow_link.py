"""Two workers of a run, each in a network namespace of its own, and a link of chosen speed.

A Linux machine and root are needed: `ip netns` makes the namespaces, `tc tbf` slows the link down.
The run is elastix's local one. Its controller and worker 0 are in the first namespace, worker 1
moves to the second before it opens a socket; pipes to the controller pass between them. Bytes are
those that the link has carried, both ways, headers included.
"""

import argparse
import ctypes
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from elastix import Context, ExchangeConfig
from elastix.testing import local, local_worker

WARM = 3
_HOSTS = ("10.99.0.1", "10.99.0.2")
_NEW_NETWORK = 0x40000000  # CLONE_NEWNET
_WIDTH, _LAYERS, _BATCH = 1024, 4, 8


def possible() -> bool:
    """Whether this process may make namespaces."""
    return os.geteuid() == 0 and shutil.which("ip") is not None and shutil.which("tc") is not None


@contextmanager
def link(rate: str) -> Iterator[tuple[str, str]]:
    """Two namespaces and a link of that rate, as tc writes it; their names."""
    names = f"elx{os.getpid()}a", f"elx{os.getpid()}b"
    try:
        for name in names:
            _sh("ip", "netns", "add", name)
        _sh("ip", "link", "add", names[0], "type", "veth", "peer", "name", names[1])
        for name, host in zip(names, _HOSTS, strict=True):
            _sh("ip", "link", "set", name, "netns", name)
            _sh("ip", "-n", name, "addr", "add", f"{host}/24", "dev", name)
            _sh("ip", "-n", name, "link", "set", "lo", "up")
            _sh("ip", "-n", name, "link", "set", name, "up")
            limit = ("rate", rate, "burst", "256kb", "latency", "50ms")
            _sh("tc", "-n", name, "qdisc", "add", "dev", name, "root", "tbf", *limit)
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def _sh(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


class TwoHosts(local.LocalController):
    """A local run whose workers are in namespaces, told by `config["namespaces"]`."""

    def _start(self, worker: int) -> None:
        self._room.free -= 1
        here, there = self._spawner.Pipe()
        namespace, host = self._config["namespaces"][worker], _HOSTS[worker]
        run = (self._train, self._config, self._settings, self._store)
        args = (namespace, host, worker, there, self._rendezvous.address, *run)
        self._processes[worker] = self._spawn(_work_there, args)
        there.close()
        self._lines[worker] = here


def _work_there(namespace: str, host: str, *args: Any) -> None:  # noqa: ANN401 - as `work` has
    with Path("/run/netns", namespace).open() as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _NEW_NETWORK):
            raise OSError(ctypes.get_errno(), f"the namespace {namespace} cannot be entered")
    local_worker.HOST = host
    local_worker.work(*args)


def train(ctx: Context) -> None:
    """Steps of a model of 16 MiB; the first worker notes when each began, and the link's bytes."""
    config = ctx.config
    torch.manual_seed(0)
    layers = [nn.Linear(_WIDTH, _WIDTH) for _ in range(_LAYERS)]
    model = nn.Sequential(*layers, nn.Linear(_WIDTH, 10))
    model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3))
    amount = _BATCH * config["steps"]
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(amount, _WIDTH, generator=generator)
    data = TensorDataset(x, torch.randint(10, (amount,), generator=generator))
    notes = []
    for epoch in ctx.loader(data, batch_size=_BATCH).epochs(1):
        for inputs, targets in epoch:
            notes.append((ctx.step, time.perf_counter(), _carried(config["namespaces"][0])))
            F.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
    if ctx.rank == 0:
        Path(config["result"]).write_text(json.dumps(notes), encoding="utf-8")


def _carried(device: str) -> int:
    """Bytes of the link, both ways. Of the first worker's namespace; 0 in the other's."""
    folder = Path("/sys/class/net", device, "statistics")
    return sum(
        int((folder / f"{way}_bytes").read_text()) for way in ("tx", "rx") if folder.exists()
    )


def measure(names: tuple[str, str], steps: int, exchange: Mapping[str, Any]) -> dict[str, float]:
    """One run over a link that is there.

    Args:
        names: of its namespaces.
        steps: inner ones, with outer steps.
        exchange: fields of ExchangeConfig.

    Returns:
        step_s: the median; with outer steps the mean from one to the next, over whole windows.
        bytes: of the link for each (inner) step.
    """
    with tempfile.TemporaryDirectory(prefix="elastix-bench-") as folder:
        result = Path(folder, "notes.json")
        config = {"namespaces": names, "steps": steps, "result": str(result)}
        told = {"config": config, "exchange": dict(exchange), "folder": folder}
        command = [sys.executable, "-m", "benchmarks.slow_link", json.dumps(told)]
        subprocess.run(["ip", "netns", "exec", names[0], *command], check=True, timeout=300)
        notes = json.loads(result.read_text(encoding="utf-8"))
    every = exchange.get("every_steps")
    if every is None:
        window = notes[WARM:]
        times = [after[1] - before[1] for before, after in pairwise(window)]
        step_s = statistics.median(times)
    else:
        window = notes[every : (len(notes) - 1) // every * every + 1]  # after the first outer step
        step_s = (window[-1][1] - window[0][1]) / (len(window) - 1)
    return {"step_s": step_s, "bytes": (window[-1][2] - window[0][2]) / (len(window) - 1)}


def _inside() -> None:
    parser = argparse.ArgumentParser(description="One run, within the first namespace.")
    parser.add_argument("told")
    told = json.loads(parser.parse_args().told)
    local.HOST = _HOSTS[0]  # type: ignore[attr-defined]  # where the controller listens
    local.LocalController = TwoHosts  # type: ignore[misc]
    local.run_local(
        train,
        2,
        config=told["config"],
        directory=Path(told["folder"], "run"),
        exchange=ExchangeConfig(**told["exchange"]),
        shared=False,
        timeout_s=280.0,
    )


if __name__ == "__main__":
    from benchmarks.slow_link import _inside as inside  # workers import it by this name

    inside()
