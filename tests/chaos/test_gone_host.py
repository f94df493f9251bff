"""A host that is gone without a word: no packet comes from it, not even a last one."""

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from elastix.events import WorkerLost
from elastix.testing.chaos import Kill, with_kills
from elastix.testing.local import run_local
from tests.laws import assert_exactly_once
from tests.trainables import train

CONFIG = {"model": "convnet", "samples": 120, "batch_size": 12, "epochs": 4, "step_s": 0.03}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        os.geteuid() != 0 or not all(map(shutil.which, ("iptables", "ss"))),
        reason="dropping packets needs root, iptables and ss",
    ),
]


def rules(*arguments: str) -> None:
    subprocess.run(["iptables", "-w", *arguments], check=True)


@pytest.fixture
def chain() -> Iterator[str]:
    """Of rules for packets on their way in; gone after the test."""
    name = f"gone-{os.getpid()}"
    rules("-N", name)
    rules("-I", "INPUT", "-i", "lo", "-j", name)
    yield name
    rules("-D", "INPUT", "-i", "lo", "-j", name)
    rules("-F", name)
    rules("-X", name)


@dataclass(frozen=True)
class Gone:
    """`train`; of `worker` nothing is heard any more once it is at `phase` of `step`."""

    chain: str
    worker: int
    phase: str
    step: int

    def __call__(self, ctx):
        def vanish(name, _detail):
            if name != self.phase or ctx.step < self.step:
                return
            said = subprocess.run(["ss", "-tnap"], check=True, capture_output=True, text=True)
            mine = [line for line in said.stdout.splitlines() if f"pid={os.getpid()}," in line]
            for port in {line.split()[3].rsplit(":", 1)[1] for line in mine}:
                for way in ("--sport", "--dport"):
                    rules("-A", self.chain, "-p", "tcp", way, port, "-j", "DROP")
            os.kill(os.getpid(), signal.SIGSTOP)  # and what the kernel says of its end is dropped

        if ctx.worker == self.worker:
            ctx.on_phase(vanish)
        train(ctx)


def survived(tmp_path, doomed):
    """A run of three workers on sockets, each lost one replaced, which used each sample once."""
    result = run_local(
        doomed,
        3,
        config={**CONFIG, "log": str(tmp_path)},
        directory=tmp_path / "run",
        hang_timeout_s=2.0,
        shared=False,
        replace=True,
    )
    assert_exactly_once(result.events, CONFIG["epochs"])
    return result


@pytest.mark.parametrize(
    ("worker", "phase"),
    [(0, "bucket"), (1, "bucket"), (0, "round"), (1, "batch"), (2, "boundary"), (1, "meet")],
)
def test_the_others_go_on_after_the_time_limit(tmp_path, chain, worker, phase):
    """Of a founder, in the step; in a meeting for a group that is to be without another one."""
    doomed = Gone(chain, worker, phase, step=5 if phase != "meet" else 0)
    if phase == "meet":
        doomed = with_kills(doomed, [Kill(worker=0, phase="batch", step=4)])
    result = survived(tmp_path, doomed)
    lost = {e.worker: e.cause for e in result.events if isinstance(e, WorkerLost)}
    assert lost[worker] in {"silent", "stuck"}  # or what it said last was that it computes


@pytest.mark.parametrize("phase", ["give", "take"])
def test_a_donor_or_a_joiner(tmp_path, chain, phase):
    """A joiner comes for the worker that is killed first, and one of the two is gone."""
    worker = {"give": 1, "take": 3}[phase]
    doomed = with_kills(Gone(chain, worker, phase, step=0), [Kill(worker=0, phase="batch", step=4)])
    survived(tmp_path, doomed)
