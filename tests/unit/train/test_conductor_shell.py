"""What shells have in common: the end of a run in which workers have parted. No processes."""

import threading

import torch

from elastix.config import CheckpointConfig, FailureConfig
from elastix.events import (
    Events,
    ReplicasDiverged,
    RunStarted,
    StateStored,
    StepCommitted,
)
from elastix.state import State
from elastix.store import Store
from elastix.train.checkpoint.assembly import CheckpointId, Delivered, Offer
from elastix.train.control.terms import RunTerms
from elastix.train.record.conductor_shell import Shell
from elastix.train.replica.link import Settings


class Alone(Shell):
    """A shell without workers."""

    def __init__(self, directory):
        terms = RunTerms(
            founders=2, min_workers=1, max_workers=2, failure=FailureConfig(), first_step_s=0.0
        )
        self.events = []
        listeners = Events()
        listeners.subscribe(self.events.append)
        super().__init__(terms, listeners)
        opening = RunStarted(name="r", seed=0, config={}, scaling={}, versions={})
        self._log.open(directory / "journal.jsonl", opening, stays=False, patience_s=0.0)
        self._settings = Settings(
            directory=directory,
            run="r",
            seed=0,
            min_workers=1,
            checkpoint=CheckpointConfig(),
            exact=True,
        )
        self._keep_checkpoints(Store(directory / "store"), self._settings)

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
    mark = CheckpointId(8)
    offer = Offer(
        mark=mark, reason="every_steps", members=(0, 1), groups=((("w",), 16),), meta={"step": 8}
    )
    checkpoints.told(0, offer)
    checkpoints.lost(1)  # what it held nobody knows
    with Store(tmp_path / "store") as store:
        share = store.put_share(State({"w": torch.arange(4.0)}))
    checkpoints.told(0, Delivered(mark, share))
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
