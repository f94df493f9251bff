"""What shells have in common: the end of a run in which workers have parted. No processes."""

import threading
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import ANY

import pytest
import torch

from elastix.config import CheckpointConfig, FailureConfig, RestoreConfig
from elastix.events import (
    Events,
    ReplicasDiverged,
    Resumed,
    RunEnded,
    RunStarted,
    SamplesLeftOut,
    StateDropped,
    StateNotStored,
    StateStored,
    StepCommitted,
)
from elastix.state import State
from elastix.store import Store
from elastix.train.checkpoint import coordinator
from elastix.train.checkpoint.assembly import CheckpointId, Delivered, Offer
from elastix.train.control.terms import RunTerms
from elastix.train.record.conductor_shell import Shell
from elastix.train.record.start_or_resume import begin
from elastix.train.replica.link import Settings


class Alone(Shell):
    """A shell without workers."""

    def __init__(self, directory, opening=None):
        terms = RunTerms(
            founders=2, min_workers=1, max_workers=2, failure=FailureConfig(), first_step_s=0.0
        )
        self.events = []
        listeners = Events()
        listeners.subscribe(self.events.append)
        super().__init__(terms, listeners)
        usual = RunStarted(name="r", seed=0, config={}, scaling={}, versions={})
        self.opening = opening or usual
        self._log.open(directory / "journal.jsonl", self.opening, stays=False, patience_s=0.0)
        self._settings = Settings(
            directory=directory,
            run="r",
            seed=0,
            min_workers=1,
            checkpoint=CheckpointConfig(keep_last=None),
            exact=True,
        )
        self._keep_checkpoints(Store(directory / "store"), self._settings)

    def offer(self, step, worker, held="same", members=(0, 1)):
        """A worker of two tells what it holds after a step."""
        self._checkpoints.told(
            worker,
            Offer(
                mark=CheckpointId(step),
                reason="every_steps",
                members=members,
                groups=((("w",), 16),),
                meta={"step": step},
                digests={"model": held},
            ),
        )

    def deliver(self, step, worker):
        """It has written it."""
        with Store(self._settings.directory / "store") as store:
            share = store.put_share(State({"w": torch.arange(4.0) + step}))
        self._checkpoints.told(worker, Delivered(CheckpointId(step), share))

    def nothing(self, *_):
        """What would be done to workers."""

    _tell = _start = _kill = _end = _vacate = _look_for_room = _let_go = nothing


def test_nothing_unsound_is_stored_after_it_was_dropped(tmp_path, monkeypatch):
    """A State is on its way into the store when the run ends as workers have parted."""
    shell = Alone(tmp_path)
    checkpoints, late, begun = shell._checkpoints, threading.Event(), threading.Event()
    thread, put, back = checkpoints._thread, checkpoints.store.put_shares, checkpoints.go_back_to

    def put_late(*args, **options):
        begun.set()
        assert late.wait(20)
        return put(*args, **options)

    def dropped(steps):
        found = back(steps)
        late.set()
        return found

    def join():
        late.set()
        threading.Thread.join(thread)

    monkeypatch.setattr(checkpoints.store, "put_shares", put_late)
    monkeypatch.setattr(checkpoints, "go_back_to", dropped)
    monkeypatch.setattr(thread, "join", join)
    shell._emit(StepCommitted(step=8, generation=1, world_size=2, batches=()))
    shell.offer(8, 0)
    checkpoints.lost(1)  # what it held nobody knows
    shell.deliver(8, 0)
    assert begun.wait(20)
    shell._emit(
        ReplicasDiverged(
            step=9, workers=(0, 2), apart=(2,), parts=("model",), cure="went back", unseen=True
        )
    )
    shell._close()
    assert [event.step for event in shell.events if isinstance(event, StateStored)] == [8]
    with Store(tmp_path / "store", read_only=True) as store:
        assert "r/last" not in store.tags()


def test_nothing_unsound_is_left_where_it_was_found_too_late_to_go_back(tmp_path, monkeypatch):
    """Two States were stored without a worker that was late, and holds something else."""
    shell = Alone(tmp_path)
    checkpoints = shell._checkpoints
    shell._emit(StepCommitted(step=12, generation=1, world_size=2, batches=()))
    shell.offer(4, 1)
    for step in (4, 8, 12):
        shell.offer(step, 0)
        shell.deliver(step, 0)
        assert checkpoints.settle(20)
        monkeypatch.setattr(coordinator, "PATIENCE_S", 0.0)
    stored = [event for event in shell.events if isinstance(event, StateStored)]
    assert [(event.step, event.compared) for event in stored] == [
        (4, True),
        (8, False),
        (12, False),
    ]
    shell.offer(12, 1, held="another")
    assert checkpoints.settle(20)
    shell._close()
    assert [event.outcome for event in shell.events if isinstance(event, RunEnded)] == ["failed"]
    with Store(tmp_path / "store", read_only=True) as store:
        assert store.tags()["r/last"] == stored[0].ref


def test_who_was_started_before_a_batch_was_left_out_is_of_no_use_after_going_back(
    tmp_path, monkeypatch
):
    """It would draw that batch, and the others would not."""
    shell, told = Alone(tmp_path), []
    monkeypatch.setattr(shell._conductor, "went_back", lambda *_, anew: told.append(anew) or [])
    shell._go_back()
    shell._emit(SamplesLeftOut(loader=0, spans=((0, 4),), step=3))
    shell._go_back()
    shell._go_back()
    assert told == [False, True, False]
    shell._close()


def test_what_a_run_did_not_live_to_drop_the_next_one_does_not_go_on_from(tmp_path):
    """It was killed when it had said that all go back, and nothing more."""
    shell = Alone(tmp_path)
    checkpoints = shell._checkpoints
    shell._emit(StepCommitted(step=8, generation=1, world_size=2, batches=()))
    shell.offer(4, 1)
    shell.offer(4, 0)
    shell.deliver(4, 0)
    assert checkpoints.settle(20)
    shell.offer(8, 0)
    checkpoints.lost(1)
    shell.deliver(8, 0)
    assert checkpoints.settle(20)
    first, second = (event for event in shell.events if isinstance(event, StateStored))
    shell._emit(
        ReplicasDiverged(
            step=8, workers=(0, 2), apart=(2,), parts=("model",), cure="went back", unseen=True
        )
    )
    shell._log.close()
    checkpoints.close()
    kept = coordinator.Checkpoints(Store(tmp_path / "store"), "r", checkpoints._config)
    assert kept.last().step == 8
    told, _ = begin(kept, shell._settings, RestoreConfig())
    assert told == [
        StateDropped(ref=second.ref, step=8, t=ANY),
        Resumed(step=4, ref=first.ref, t=ANY),
    ]
    kept.close()


def test_a_trial_that_has_stored_nothing_since_its_pause_goes_back_to_that(tmp_path):
    """Its workers begin from there. The journal told of the beginning, and of lost steps."""
    shell = Alone(tmp_path)
    paused = SimpleNamespace(parents=(), paused_step=lambda: 6)
    shell._settings = replace(shell._settings, model_source=paused)
    assert shell._stored() == Resumed(step=6, ref="", t=ANY)
    shell._emit(StepCommitted(step=8, generation=1, world_size=2, batches=()))
    shell.offer(8, 0)
    shell.offer(8, 1)
    shell.deliver(8, 0)
    assert shell._checkpoints.settle(20)
    (stored,) = (event for event in shell.events if isinstance(event, StateStored))
    assert shell._stored() == Resumed(step=8, ref=stored.ref, t=ANY)
    shell._close()


def differs_and_is_killed(directory):
    """A shell is killed when the journal has it that States after step 12 differ, and no more.

    That of step 8 was stored when one of two workers was lost, and nobody knows what it held.
    """
    shell = Alone(directory)
    shell._do(shell._conductor.begin([shell.opening]))
    checkpoints = shell._checkpoints
    shell._emit(StepCommitted(step=12, generation=1, world_size=2, batches=()))
    shell.offer(4, 1)
    shell.offer(4, 0)
    shell.deliver(4, 0)
    assert checkpoints.settle(20)
    checkpoints.lost(1)
    shell.offer(8, 0)
    shell.deliver(8, 0)
    assert checkpoints.settle(20)
    shell.offer(12, 2, held="another", members=(0, 2))
    shell.offer(12, 0, members=(0, 2))
    assert checkpoints.settle(20)
    shell._log.close()
    checkpoints.stop()
    checkpoints.store.close()
    return shell, *(event for event in shell.events if isinstance(event, StateStored))


def test_states_that_differ_are_gone_back_for_by_another_shell_if_the_one_before_was_killed(
    tmp_path,
):
    """Who held another one may be dead as well."""
    before, first, second = differs_and_is_killed(tmp_path)
    shell = Alone(tmp_path, before.opening)
    stored = shell._take_up()
    assert (stored.step, stored.ref, stored.again) == (4, first.ref, 8)
    said, dropped = shell.events
    assert isinstance(said, ReplicasDiverged)
    assert (said.step, said.apart, said.cure, said.unseen) == (12, (0, 2), "went back", True)
    assert dropped.ref == second.ref
    assert shell._log.state.parted is said
    shell._close()


@pytest.mark.parametrize("crew", [{}, {"shard": 2}], ids=["no sentinel", "crews"])
def test_a_run_that_does_not_go_back_for_them_is_ended_by_another_shell(tmp_path, crew):
    """As it would have been by the one before. It went on, with whoever was left."""
    before, *_ = differs_and_is_killed(tmp_path)
    shell = Alone(tmp_path, before.opening)
    shell._settings = replace(shell._settings, sentinel=False, crew=crew)
    shell._take_up()
    shell._close()
    (ended,) = (event for event in shell.events if isinstance(event, RunEnded))
    assert ended.outcome == "failed"
    assert "workers 0 and 2 hold different States" in ended.message
    assert "another controller" in ended.message


def test_nor_does_another_shell_store_what_one_of_them_holds_before_it_ends_the_run(tmp_path):
    """Who held something else may be dead, and the next run would go on from it."""
    before, *_ = differs_and_is_killed(tmp_path)
    shell = Alone(tmp_path, before.opening)
    shell._settings = replace(shell._settings, sentinel=False)
    shell._take_up()
    shell.offer(12, 0, members=(0, 2))
    shell._checkpoints.lost(2)
    assert shell._checkpoints.settle(20)
    assert [e.step for e in shell.events if isinstance(e, StateNotStored)] == [12]
    shell._close()


@pytest.mark.parametrize("sentinel", [True, False])
def test_states_that_differ_are_gone_back_for_by_the_next_run_if_this_one_was_killed(
    tmp_path, sentinel
):
    """Whether that compares them in each step, or not. It went on from the last one."""
    shell, first, second = differs_and_is_killed(tmp_path)
    shell._settings = replace(shell._settings, sentinel=sentinel)
    kept = coordinator.Checkpoints(Store(tmp_path / "store"), "r", CheckpointConfig())
    may_differ = replace(shell._settings, exact=False)
    assert begin(kept, may_differ, RestoreConfig())[0] == [Resumed(step=8, ref=second.ref, t=ANY)]
    told, _ = begin(kept, shell._settings, RestoreConfig())
    assert isinstance(told[0], ReplicasDiverged)
    assert told[1:] == [
        StateDropped(ref=second.ref, step=8, t=ANY),
        Resumed(step=4, ref=first.ref, t=ANY),
    ]
    kept.close()


def test_a_shell_that_takes_a_run_over_tells_workers_what_is_left_out_by_then(tmp_path):
    before = Alone(tmp_path)
    before._do(before._conductor.begin([before.opening]))
    before._emit(SamplesLeftOut(loader=0, spans=((0, 4),), step=3))
    before._log.close()
    before._checkpoints.close()
    shell = Alone(tmp_path, before.opening)
    shell._take_up()
    assert shell._settings.left_out == {0: ((0, 4),)}
    shell._close()
