"""What was read ahead is used, whoever comes, goes or dies, and not read again."""

import gc
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import Counter
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, default_collate, get_worker_info

from elastix.data import unused_samples
from elastix.data.loader import Loader
from elastix.data.read_ahead import ReadsAhead
from elastix.data.rehearsal import Rehearsal
from elastix.data.source import Source
from elastix.data.unused_samples import Lines
from tests.unit.data.test_loader import Pace

LENGTH, BATCH = 96, 12
EXACT_CHANGES = {1: (0, 1, 2), 3: (0, 2), 4: (0,), 5: (0, 2)}
CHANGES = {3: (0, 1, 2), 6: (0, 2), 7: (0, 2, 3), 10: (0,), 12: (0, 1)}


class Told(Dataset):
    """Each sample that is read is noted in a file."""

    def __init__(self, log: Path) -> None:
        self.log = log

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Any:
        with self.log.open("a") as log:
            log.write(f"{index}\n")
        return {"x": torch.full((3,), float(index)), "name": f"sample {index}", "index": index}

    def read(self) -> Counter[int]:
        return Counter(map(int, self.log.read_text().split())) if self.log.exists() else Counter()


class Several(Told):
    """One that gives several at once."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


class Reuses(Told):
    """One whose samples stand in the same memory each time."""

    def __init__(self, log: Path) -> None:
        super().__init__(log)
        self.memory = torch.zeros(BATCH, 3)

    def __getitems__(self, indices: list[int]) -> list[Any]:
        samples = [self[index] for index in indices]
        for sample, row in zip(samples, self.memory, strict=False):
            sample["x"] = row.copy_(sample["x"])
        return samples


class Refuses:
    """A sample that nothing can pickle, and that does not say so as pickle does."""

    def __init__(self, index: int) -> None:
        self.index = index

    def __call__(self) -> int:
        return self.index

    def __reduce__(self) -> Any:
        raise ValueError("not this one")


class Unruly(Told):
    def __getitem__(self, index: int) -> Any:
        super().__getitem__(index)
        return Refuses(index)


class Local(Told):
    """Its samples cannot be pickled."""

    def __getitem__(self, index: int) -> Any:
        super().__getitem__(index)
        return lambda: index


def padded(samples: list[Any]) -> list[Any]:
    """As some functions do: it changes the samples that it is given."""
    for sample in samples:
        sample["pad"] = sample.get("pad", 0) + len(samples)
    return [(sample["index"], sample["pad"]) for sample in samples]


def loader_of(dataset: Dataset[Any], **more: Any) -> tuple[Loader, Pace]:
    pace = Pace(0, (0, 1))
    source = Source(dataset=dataset, batch_size=BATCH, device=torch.device("cpu"), **more)
    return Loader(0, source, pace), pace


def await_reading(loader: Loader, told: Told) -> None:
    """Until all that was guessed is read, or a process that reads has died.

    There is no event between processes but the file. A death is noticed when a batch is asked of
    the processes, so one that was read before does not notice it.
    """
    ahead = loader._reader
    while isinstance(ahead, ReadsAhead) and not ahead._reader._dead(0.0):
        keys = [key for guess in ahead._guesses for key in guess.keys]
        indices = {key if isinstance(key, int) else key[0] for key in keys}
        if {index for index in indices if index < LENGTH} <= told.read().keys():
            return
        time.sleep(0.002)


def batches(loader: Loader, pace: Pace, before: Any = lambda number: None) -> list[Any]:
    """Those of an epoch in which members come and go; who goes owes its share."""
    seen: list[Any] = []
    for epoch in loader.epochs(1):
        for batch in epoch:
            seen.append(batch)
            if len(seen) in CHANGES:
                await_reading(loader, loader.source.dataset)
            here = CHANGES.get(len(seen), pace.group)
            loader.commit([member for member in pace.group if member in here])
            pace.group = here
            before(len(seen))
    return seen


@pytest.mark.parametrize("kind", [Told, Several, Reuses])
@pytest.mark.parametrize("augment", [None, lambda sample, rng: {**sample, "r": rng.random()}])
@pytest.mark.parametrize("collate", [default_collate, padded])
def test_no_change_of_members_has_a_sample_read_again(tmp_path, kind, augment, collate):
    ahead = kind(tmp_path / "ahead")
    more = {"collate": collate, "augment": augment}
    seen = batches(*loader_of(ahead, num_workers=2, **more))
    assert str(seen) == str(batches(*loader_of(kind(tmp_path / "now"), **more)))
    assert set(ahead.read().values()) == {1}


class Holds(Told):
    """One of its processes has the lock of the event by which torch asks them to end."""

    def __getitem__(self, index: int) -> Any:
        frame: Any = sys._getframe()
        while "done_event" not in frame.f_locals:
            frame = frame.f_back
        if get_worker_info().id == 0:  # whose batch comes first
            frame.f_locals["done_event"]._cond.acquire(block=False)
        return super().__getitem__(index)


@pytest.mark.parametrize("kind", [Told, Holds])
def test_the_processes_of_a_loader_that_is_dropped_are_not_waited_for(tmp_path, kind):
    """Torch asks them to end and gives them five seconds each, and may have no way to ask."""
    others = set(multiprocessing.active_children())
    loader, _ = loader_of(kind(tmp_path / "log"), num_workers=2)
    batch = next(iter(next(loader.epochs(1))))
    processes = set(multiprocessing.active_children()) - others
    assert len(processes) == 2
    del loader, batch
    gc.collect()
    for process in processes:
        process.join()
    assert {process.exitcode for process in processes} == {-signal.SIGKILL}


class Collects(Told):
    """Its processes look once for what nobody has any more."""

    collected = False

    def __getitem__(self, index: int) -> Any:
        if not self.collected:
            gc.collect()
            self.collected = True
        return super().__getitem__(index)


def test_processes_say_nothing_of_a_loader_that_was_dropped_before_they_began(
    tmp_path, monkeypatch, capfd
):
    """They are copies of a process that had not collected it yet."""
    monkeypatch.setattr(sys, "unraisablehook", sys.__unraisablehook__)  # not pytest's
    others = set(multiprocessing.active_children())
    gc.disable()
    try:
        for _ in range(2):
            loader, _ = loader_of(Collects(tmp_path / "log"), num_workers=1)
            batch = next(iter(next(loader.epochs(1))))
            processes = set(multiprocessing.active_children()) - others
            del loader, batch
    finally:
        gc.enable()
        gc.collect()
    for process in processes:
        process.join()
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("augment", [None, lambda sample, rng: {**sample, "r": rng.random()}])
def test_what_is_rehearsed_beside_them_goes_with_them(tmp_path, augment):
    def seen(folder: Path, **more: Any) -> tuple[list[Any], Told]:
        folder.mkdir()
        new = Told(folder / "new")
        rehearsal = Rehearsal(7, ratio=0.5, past=[Told(folder / "old")])
        memory = rehearsal.admit(new)
        rehearsal.open(memory.number)
        return batches(*loader_of(new, memory=memory, augment=augment, **more)), new

    ahead, new = seen(tmp_path / "ahead", num_workers=2)
    now, _ = seen(tmp_path / "now")
    assert str(ahead) == str(now)
    assert sum(len(batch["x"]) for batch in now) > sum(new.read().values())
    assert set(new.read().values()) == {1}


@pytest.mark.parametrize("num_workers", [1, 3])
def test_in_exact_runs_slices_come_as_they_were_read(tmp_path, num_workers):
    """Their random numbers are those of the place, whoever collates them."""

    def drawing(samples: list[Any]) -> list[Any]:
        return [(sample["index"], np.random.random()) for sample in samples]

    def read(**more: Any) -> list[Any]:
        told = Told(tmp_path / f"log {len(more)}")
        loader, pace = loader_of(told, collate=drawing, exact=True, **more)
        pace.begin_step = lambda loader, draw, at: (draw, at)
        seen = []
        for epoch in loader.epochs(1):
            for draw, at in epoch:
                mine = draw.of(0, draw.members)
                seen += [loader.read_slice(draw, number, at) for number in mine]
                await_reading(loader, told)
                here = EXACT_CHANGES.get(draw.spans[0][0] // BATCH, pace.group)
                loader.commit(here)
                pace.group = here
        return seen

    assert read(slices=4, num_workers=num_workers) == read(slices=4)


@pytest.mark.parametrize("kind", [Local, Unruly])
def test_samples_that_no_process_can_hand_over_are_read_again(tmp_path, kind):
    def called(samples: list[Any]) -> list[int]:
        return [sample() for sample in samples]

    seen = batches(*loader_of(kind(tmp_path / "a"), num_workers=2, collate=called))
    assert seen == batches(*loader_of(kind(tmp_path / "b"), collate=called))


def test_the_death_of_a_process_costs_what_it_had_read_and_no_more(tmp_path):
    ahead, prefetch = Told(tmp_path / "ahead"), 2

    def kill(number: int) -> None:
        if number in (2, 5, 11):
            victim = next(iter(loader._reader._reader._processes))
            os.kill(victim.pid, signal.SIGKILL)
            assert wait([victim.sentinel], 20)

    loader, pace = loader_of(ahead, num_workers=2, prefetch=prefetch)
    seen = batches(loader, pace, kill)
    now = Told(tmp_path / "now")
    assert str(seen) == str(batches(*loader_of(now)))
    again = sum(times - 1 for times in ahead.read().values())
    largest = max(len(batch["x"]) for batch in seen)
    assert again <= 3 * prefetch * largest


class Waits(Told):
    """Its processes wait at a sample until they are let go on."""

    def __init__(self, log: Path, at: int, go: Any) -> None:
        super().__init__(log)
        self.at, self.go = at, go

    def __getitem__(self, index: int) -> Any:
        if index == self.at:
            self.go.acquire()
            self.go.release()
        return super().__getitem__(index)


def test_what_nobody_wants_any_more_is_not_read(tmp_path, monkeypatch):
    """A process is at the second of four batches when the group changes."""
    go = multiprocessing.get_context("fork").Semaphore(0)
    next_turn = Lines.next_turn
    monkeypatch.setattr(Lines, "next_turn", lambda lines: (next_turn(lines), go.release()))
    ahead = Waits(tmp_path / "ahead", BATCH, go)
    loader, pace = loader_of(ahead, num_workers=1, prefetch=4, shuffle=False)
    used: list[int] = []
    for batch in next(iter(loader.epochs(1))):
        used += batch["index"].tolist()
        loader.commit(pace.group)
        pace.group = (0, 1, 2)
    assert ahead.read() == dict.fromkeys(used, 1)


def test_random_numbers_of_the_training_thread_are_not_touched(tmp_path):
    def noisy(samples: list[Any]) -> Any:
        return [sample["index"] for sample in samples], np.random.random(), torch.rand(1)

    np.random.seed(1)
    loader, pace = loader_of(Told(tmp_path / "log"), num_workers=1, collate=noisy)
    batches(loader, pace)
    drawn = np.random.random()
    np.random.seed(1)
    assert drawn == np.random.random()


@pytest.mark.timeout(60)
def test_processes_that_are_stopped_are_waited_for_together(monkeypatch):
    """The others have been asked, and have answered, before anybody is given up."""
    monkeypatch.setattr(unused_samples, "_PATIENCE_S", 30)
    lines = Lines(4)
    answers = [lines._theirs[number] for number in (1, 3)]
    found: list[Any] = []
    asking = threading.Thread(target=lambda: found.extend(lines.hand_over({"a", "b"})), daemon=True)
    asking.start()
    for line in answers:
        assert line.poll(20)
    for line, key in zip(answers, "ab", strict=True):
        assert line.recv() == {"a", "b"}
        line.send(1)
        line.send(key)
        line.send_bytes(b"packed " + key.encode())
    for stopped in (0, 2):  # they are ended
        lines._theirs[stopped].close()
    asking.join(20)
    assert sorted(found) == [("a", b"packed a"), ("b", b"packed b")]
    assert len(lines._ours) == 2


@pytest.mark.timeout(60)
def test_one_that_stays_stopped_has_none(monkeypatch):
    monkeypatch.setattr(unused_samples, "_PATIENCE_S", 1)
    lines = Lines(2)
    assert lines.hand_over({"a"}) == []
    assert lines.hand_over({"a"}) == []  # nobody is left to be asked
