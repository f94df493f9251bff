"""Spares of crews under random schedules: processes are killed from within and from outside.

From within where a schedule says, from outside at any time, whatever the process is about: while
its worker assembles, waits, is given the State, or trains. Laws: the bytes and the samples of the
quiet run, whatever happened; nobody who is to go on is lost. Where nobody is to, the run may
have to go on from what is left of the State. Real processes on gloo.
"""

import contextlib
import os
import random
import signal
import threading
from pathlib import Path

import pytest

from elastix.config import CheckpointConfig
from elastix.events import StepCommitted, WorkerLost
from tests.chaos.test_crew_slices import check, evaluates, evenly, exact
from tests.crew_runs import kill, told_pids

pytestmark = pytest.mark.timeout(400)

EPOCHS, FOUNDERS, PLACES = 6, 2, 2
WITHIN = [
    *("in forward", "in backward", "bucket", "filled", "held", "crew", "round", "left", "clip"),
    *("boundary", "wait", "take", "give", "enter", "meet"),
]
LONGEST_S = 0.9
"""Between two kills from outside."""


def say(ctx):
    """Each process says first of all which one it is; it may be killed as soon as it does."""
    log = Path(ctx.config["log"])
    written = log / f".pid-{ctx.worker}-{ctx.place}"
    written.write_text(str(os.getpid()))
    written.rename(log / f"pid-{ctx.worker}-{ctx.place}")


def told(ctx):
    say(ctx)
    evenly(ctx)


def strike(log, witness, chance, times, over):
    """Kill processes of workers but of the witness, one or both of one; or give them notice."""
    while times and not over.wait(chance.uniform(0.05, LONGEST_S)):
        pids = {at: pid for at, pid in told_pids(log).items() if at[0] != witness}
        if not pids:
            continue
        last = max(worker for worker, _ in pids)
        worker = last if chance.random() < 0.6 else chance.choice(sorted(pids))[0]
        places = chance.choice([[0], [1], [0, 1]])
        how = signal.SIGTERM if chance.random() < 0.15 else signal.SIGKILL
        newest = {pid: max(w for (w, _), p in pids.items() if p == pid) for pid in pids.values()}
        for place in places:
            pid = pids.get((worker, place))
            if pid is not None and newest[pid] == worker:  # it is not of another worker by now
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, how)
        times -= 1


@contextlib.contextmanager
def meanwhile(harms, *arguments):
    """Within: processes are harmed from outside."""
    over = threading.Event()
    killer = threading.Thread(target=harms, args=(*arguments, over))
    killer.start()
    try:
        yield
    finally:
        over.set()
        killer.join()


def under_fire(tmp_path, seed):
    chance = random.Random(seed)
    witness = chance.randrange(FOUNDERS)
    others = [worker for worker in range(5) if worker != witness]
    kills = [
        kill(w, chance.randrange(PLACES), chance.choice(WITHIN), step=chance.randrange(10))
        for w in chance.sample(others, chance.randrange(3))
    ]
    options = {"spares": chance.choice([1, 2]), "replace": chance.random() < 0.8}
    times = chance.randrange(1, 5)
    with meanwhile(strike, tmp_path / "log", witness, chance, times):
        run = exact(
            tmp_path,
            FOUNDERS,
            "shard 2",
            epochs=EPOCHS,
            step_s=0.05,
            function=told,
            hang_timeout_s=20.0,
            timeout_s=200.0,
            within=kills,
            **options,
        )
    return run, witness


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_any_schedule_leaves_the_bytes_of_the_quiet_run(tmp_path, seed):
    run, witness = under_fire(tmp_path, seed)
    check(run, "shard 2", epochs=EPOCHS)
    lost = [event.worker for event in run.events if isinstance(event, WorkerLost)]
    assert witness not in lost
    assert len(lost) == len(set(lost))
    assert {event.cause for event in run.events if isinstance(event, WorkerLost)} <= {"died"}
    assert witness in [e for e in run.events if isinstance(e, StepCommitted)][-1].batches[0].shares


MESHES = ["shard 2", "shard 2", "shard 3", "both"]


def evaluated(ctx):
    """Each epoch ends with an evaluation that draws, and is reported."""
    say(ctx)
    evaluates(ctx)


def harm(log, chance, times, over):
    """Processes of any workers are killed, stopped, or given notice, whenever it may be."""
    while times and not over.wait(chance.uniform(0.05, 2 * LONGEST_S)):
        pids = sorted(set(told_pids(log).values()))
        if not pids:
            continue
        pid, draw = chance.choice(pids), chance.random()
        how = signal.SIGTERM if draw < 0.1 else signal.SIGSTOP if draw < 0.25 else signal.SIGKILL
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, how)
        times -= 1


def without_mercy(tmp_path, seed):
    chance = random.Random(seed)
    mesh, workers = chance.choice(MESHES), chance.randint(1, 3)
    places = {"shard 2": 2, "shard 3": 3, "both": 4}[mesh]
    kills = [
        kill(
            w,
            chance.randrange(places),
            chance.choice([*WITHIN, "slice", "computed", "handed", "evaluate", "snapshot"]),
            step=chance.randrange(12),
            after=chance.randrange(2),
            severed=chance.random() < 0.3,
            signal=signal.SIGSTOP if chance.random() < 0.15 else signal.SIGKILL,
        )
        for w in chance.sample(range(5), chance.randrange(4))
    ]
    times = chance.randrange(4)
    options = {
        "replace": True,
        "spares": chance.choice([0, 0, 1]),
        "shared": chance.random() < 0.7,
        "checkpoint": CheckpointConfig(every_steps=chance.choice([2, 3, 1000])),
    }
    with meanwhile(harm, tmp_path / "log", chance, times):
        run = exact(
            tmp_path,
            workers,
            mesh,
            epochs=EPOCHS,
            step_s=0.03,
            function=evaluated,
            hang_timeout_s=4.0,
            timeout_s=240.0,
            within=kills,
            **options,
        )
    return run, mesh


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_whoever_is_lost_the_run_ends_with_the_bytes_of_the_quiet_one(tmp_path, seed):
    """Nobody is spared: the run may have to go on from parts that are left, or what was stored."""
    run, mesh = without_mercy(tmp_path, seed)
    check(run, mesh, epochs=EPOCHS, function=evaluated)
