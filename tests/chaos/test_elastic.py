"""Spares, notices, hangs and partitions on real processes; laws 1 throughout."""

import multiprocessing
import os
import struct
import threading
from multiprocessing.connection import Connection
from pathlib import Path
from signal import SIGKILL, SIGSTOP, SIGTERM

import pytest

from elastix.events import (
    GenerationFormed,
    Recovered,
    StateStored,
    WorkerLeft,
    WorkerLost,
    WorkerSlow,
)
from elastix.observe import journal
from elastix.testing.chaos import CUT, HANG, HOLD_GIL, Kill, with_kills
from elastix.testing.local import run_local
from elastix.train.control import failure_detector, slow_workers
from tests import hanging
from tests.chaos.test_controller import until
from tests.laws import assert_exactly_once, assert_replicas_identical, committed, joins
from tests.trainables import await_worker, others_late, train, until_told_to_store

CONFIG = {"model": "convnet", "samples": 300, "batch_size": 30, "epochs": 2}


def run(tmp_path, train, workers=3, config=None, **options):
    logs = tmp_path / "logs"
    logs.mkdir()
    settings = {**CONFIG, **(config or {}), "log": str(logs)}
    result = run_local(train, workers, config=settings, directory=tmp_path / "run", **options)
    assert_exactly_once(result.events, settings["epochs"])
    left = {event.worker for event in of(WorkerLeft, result)}
    assert_replicas_identical(logs, set(result.lost) | left, result.events)
    return result


def of(kind, result):
    return [event for event in result.events if isinstance(event, kind)]


def owed(result):
    return [
        batch.owed for event in committed(result.events) for batch in event.batches if batch.owed
    ]


def test_a_spare_makes_a_loss_good_at_the_next_boundary(tmp_path):
    meeting = {"meeting": str(tmp_path), "hold_step": 3, "hold_for": 3, "ushers": {"3": 7}}
    doomed = with_kills(train, [Kill(worker=1, phase="bucket", step=6)])
    result = run(tmp_path, doomed, config=meeting, spares=1)
    (join,) = joins(result.events)
    assert join.worker == 3
    sizes = [event.world_size for event in committed(result.events)]
    assert sizes[:6] == [3] * 6  # nobody was in the group that it did not need
    assert sizes[6] == 2
    assert join.step <= 8  # the step in hand, or the one after it
    assert set(sizes[join.step :]) == {3}


def held_until_it_is_known(ctx):
    """After three steps until the journal tells of a loss."""
    told = Path(ctx.config["told"]) / "journal.jsonl"

    def look(phase, _detail):
        if phase == "boundary" and ctx.step == 3:
            until(lambda: any(isinstance(event, WorkerLost) for event in journal.read(told)))

    ctx.on_phase(look)
    train(ctx)


def test_a_spare_that_dies_is_noticed_by_nobody(tmp_path):
    doomed = with_kills(held_until_it_is_known, [Kill(worker=3, phase="wait")])
    result = run(tmp_path, doomed, config={"told": str(tmp_path / "run")}, spares=1)
    assert set(result.lost) == {3}
    assert len(of(GenerationFormed, result)) == 1
    assert not of(Recovered, result)


@pytest.mark.parametrize("worker", [0, 2])
def test_a_worker_with_notice_leaves_at_a_boundary_and_owes_nothing(tmp_path, worker):
    notice = Kill(worker=worker, phase="bucket", step=4, signal=SIGTERM)
    config = {"leavers": {str(worker): 5}}
    result = run(tmp_path, with_kills(train, [notice]), config=config)
    (left,) = of(WorkerLeft, result)
    assert left.worker == worker
    assert left.step >= 5
    assert not result.lost
    assert not owed(result)
    assert not of(Recovered, result)  # nobody was disturbed
    sizes = [event.world_size for event in committed(result.events)]
    assert sizes == [3] * left.step + [2] * (len(sizes) - left.step)


def held_until_told_to_store(ctx):
    """In the very step in which they have notice."""
    wait = until_told_to_store(ctx, range(2))
    ctx.on_phase(lambda phase, _: phase == "bucket" and ctx.step == 4 and wait())
    train(ctx)


def test_workers_that_are_all_to_go_store_their_state_and_train_on(tmp_path):
    """One may be let go, as the first notice is heeded before the other is heard of."""
    notices = [Kill(worker=n, phase="bucket", step=4, signal=SIGTERM) for n in range(2)]
    result = run(tmp_path, with_kills(held_until_told_to_store, notices), workers=2)
    assert len(of(WorkerLeft, result)) < 2
    (stored,) = [event for event in of(StateStored, result) if event.reason == "notice"]
    assert stored.step == 5
    assert committed(result.events)[-1].step == 20


def with_others_late(ctx):
    others_late(ctx)
    train(ctx)


def test_who_waits_for_others_and_is_to_go_as_well_stores_the_state(tmp_path):
    """Nobody takes a step before others come, and they may come too late."""
    notices = [
        Kill(worker=0, phase="bucket", step=4, signal=SIGTERM),
        Kill(worker=1, phase="pause", signal=SIGTERM),
    ]
    late = with_kills(with_others_late, notices)
    result = run(tmp_path, late, workers=2, min_workers=2, replace=True)
    first = of(WorkerLeft, result)[0]
    (stored,) = [event for event in of(StateStored, result) if event.reason == "notice"]
    assert (first.worker, stored.step) == (0, first.step)
    assert committed(result.events)[-1].step == 20


def test_a_notice_is_made_good_by_a_spare(tmp_path):
    meeting = {"meeting": str(tmp_path), "hold_step": 3, "hold_for": 3}
    meeting |= {"leavers": {"0": 7}, "ushers": {"3": 7}}
    notice = Kill(worker=0, phase="bucket", step=6, signal=SIGTERM)
    result = run(tmp_path, with_kills(train, [notice]), config=meeting, spares=1)
    assert [event.worker for event in of(WorkerLeft, result)] == [0]
    assert [event.worker for event in joins(result.events)] == [3]
    assert not owed(result)


def test_two_notices_and_a_kill_in_one_step(tmp_path):
    kills = [
        Kill(worker=0, phase="batch", step=4, signal=SIGTERM),
        Kill(worker=3, phase="bucket", step=4, signal=SIGTERM),
        Kill(worker=1, phase="round", step=4),
    ]
    config = {"leavers": {"0": 5, "3": 5}}
    result = run(tmp_path, with_kills(train, kills), workers=5, config=config)
    assert set(result.lost) == {1}
    assert {event.worker for event in of(WorkerLeft, result)} == {0, 3}
    assert committed(result.events)[-1].world_size == 2


def with_a_helper(ctx):
    """A process of the train function's own is ended as `with multiprocessing.Pool()` ends its."""
    helper = multiprocessing.get_context("fork").Process(target=threading.Event().wait, daemon=True)

    def end(phase, _detail):
        if phase == "bucket" and ctx.step == 4 and helper.pid is None:
            helper.start()
            helper.terminate()
            helper.join(10)
            assert helper.exitcode == -SIGTERM

    ctx.on_phase(end)
    train(ctx)


def test_a_process_that_a_worker_forks_is_ended_and_no_notice_is_taken_of_it(tmp_path):
    result = run(tmp_path, with_a_helper)
    assert not of(WorkerLeft, result)
    assert {event.world_size for event in committed(result.events)} == {3}


def with_one_that_stays(ctx):
    """A process of the train function's own outlives a worker that is killed."""
    target, over = await_worker, Path(ctx.config["over"])
    multiprocessing.get_context("fork").Process(target=target, args=[over]).start()
    train(ctx)


def test_a_death_is_noticed_though_a_process_that_the_worker_has_forked_lives_on(tmp_path):
    over = tmp_path / "over"
    doomed = with_kills(with_one_that_stays, [Kill(worker=1, phase="bucket", step=4)])
    try:
        result = run(tmp_path, doomed, config={"over": str(over)})
    finally:
        over.touch()
    assert set(result.lost) == {1}
    assert committed(result.events)[-1].world_size == 2


def dying_within_a_message(ctx):
    """Worker 1 is killed when it has sent the length of a message, and nothing of it."""

    def send_bytes(line, _buffer):
        os.write(line.fileno(), struct.pack("!i", 1 << 20))
        os.kill(os.getpid(), SIGKILL)

    def end(phase, _detail):
        if phase == "bucket" and ctx.step == 4 and ctx.worker == 1:
            Connection._send_bytes = send_bytes

    ctx.on_phase(end)
    with_one_that_stays(ctx)


def test_a_death_within_a_message_is_noticed_though_a_process_of_the_worker_lives_on(tmp_path):
    over = tmp_path / "over"
    try:
        result = run(tmp_path, dying_within_a_message, config={"over": str(over)})
    finally:
        over.touch()
    assert set(result.lost) == {1}
    assert committed(result.events)[-1].world_size == 2


@pytest.mark.parametrize(
    ("signal", "cause"), [(SIGSTOP, "silent"), (HOLD_GIL, "silent"), (HANG, "stuck")]
)
def test_a_hang_is_evicted(tmp_path, monkeypatch, signal, cause):
    hanging.only(monkeypatch, 1)
    kill = Kill(worker=1, phase="batch", step=4, signal=signal)
    result = run(tmp_path, with_kills(train, [kill]), hang_timeout_s=3.0)
    assert [(e.worker, e.cause) for e in of(WorkerLost, result)] == [(1, cause)]
    assert committed(result.events)[-1].world_size == 2


def test_two_hang_at_once(tmp_path, monkeypatch):
    hanging.only(monkeypatch, 0, 3)
    kills = [
        Kill(worker=0, phase="batch", step=4, signal=HANG),
        Kill(worker=3, phase="bucket", step=4, signal=SIGSTOP),
    ]
    result = run(tmp_path, with_kills(train, kills), workers=4, hang_timeout_s=3.0)
    assert set(result.lost) == {0, 3}


def test_cut_sockets_that_can_be_opened_again_cost_nobody(tmp_path):
    kill = Kill(worker=1, phase="bucket", step=4, signal=CUT)
    result = run(tmp_path, with_kills(train, [kill]))
    assert not result.lost
    assert not owed(result)
    causes = [event.cause for event in of(GenerationFormed, result)]
    assert causes == ["start", "doubt"]


def test_a_worker_that_stays_cut_off_is_taken_out(tmp_path, monkeypatch):
    hanging.only(monkeypatch)
    kill = Kill(worker=1, phase="bucket", step=4, signal=CUT, lasting=True)
    result = run(tmp_path, with_kills(train, [kill]), hang_timeout_s=4.0)
    assert [(e.worker, e.cause) for e in of(WorkerLost, result)] == [(1, "unreachable")]
    assert committed(result.events)[-1].world_size == 2


def test_a_straggler_is_reported_and_goes_only_if_asked(tmp_path, monkeypatch):
    """Its steps are few and long: what else the machine does is little beside them."""
    monkeypatch.setattr(failure_detector, "_SLOW_STEPS", 5)
    monkeypatch.setattr(slow_workers, "_AGAIN_STEPS", 5)
    config = {"samples": 210, "slow_worker": 1, "slow_s": 0.8, "step_s": 0.1}
    result = run(tmp_path, train, config=config)
    (slow,) = [event for event in of(WorkerSlow, result) if event.worker == 1]
    assert slow.factor > 2
    assert not of(WorkerLeft, result)


def test_a_straggler_is_let_go_on_request(tmp_path, monkeypatch):
    monkeypatch.setattr(failure_detector, "_SLOW_STEPS", 10)
    config = {"slow_worker": 1, "slow_s": 1.2, "step_s": 0.1}
    result = run(tmp_path, train, config=config, evict_slower_than=3.0)
    assert [event.worker for event in of(WorkerLeft, result)] == [1]
    assert not owed(result)
