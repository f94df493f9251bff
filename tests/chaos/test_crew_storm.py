"""Spares of crews under random schedules: processes are killed from within and from outside.

From within where a schedule says, from outside at any time, whatever the process is about: while
its worker assembles, waits, is given the State, or trains. Laws: the bytes and the samples of the
quiet run, whatever happened; nobody who is to go on is lost. Real processes on gloo.
"""

import contextlib
import os
import random
import signal
import threading
from pathlib import Path

import pytest

from elastix.events import StepCommitted, WorkerLost
from tests.chaos.test_crew_slices import check, evenly, exact
from tests.crew_runs import kill, told_pids

pytestmark = pytest.mark.timeout(400)

EPOCHS, FOUNDERS, PLACES = 6, 2, 2
WITHIN = [
    *("in forward", "in backward", "bucket", "filled", "held", "crew", "round", "left", "clip"),
    *("boundary", "wait", "take", "give", "enter", "meet"),
]
LONGEST_S = 0.9
"""Between two kills from outside."""


def told(ctx):
    """Each process says first of all which one it is; it may be killed as soon as it does."""
    log = Path(ctx.config["log"])
    written = log / f".pid-{ctx.worker}-{ctx.place}"
    written.write_text(str(os.getpid()))
    written.rename(log / f"pid-{ctx.worker}-{ctx.place}")
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


def under_fire(tmp_path, seed):
    chance = random.Random(seed)
    witness = chance.randrange(FOUNDERS)
    others = [worker for worker in range(5) if worker != witness]
    kills = [
        kill(w, chance.randrange(PLACES), chance.choice(WITHIN), step=chance.randrange(10))
        for w in chance.sample(others, chance.randrange(3))
    ]
    options = {"spares": chance.choice([1, 2]), "replace": chance.random() < 0.8}
    over, log = threading.Event(), tmp_path / "log"
    times = chance.randrange(1, 5)
    killer = threading.Thread(target=strike, args=(log, witness, chance, times, over))
    killer.start()
    try:
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
    finally:
        over.set()
        killer.join()
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
