"""Sharers of decoded samples, killed or stopped anywhere: nobody hangs, and nothing is wrong."""

import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.utils.data import TensorDataset

import elastix
from elastix.data.cache_eviction import ReaderPosition
from elastix.data.loader import Loader
from elastix.data.sample_order import order
from elastix.data.shared import arena, dataset, folder, locks
from elastix.data.source import Source
from elastix.errors import TrainError
from elastix.events import Reported
from elastix.testing.chaos import Kill, with_kills
from elastix.testing.local import run_local
from tests.pictures import Pictures, check, same
from tests.unit.data.test_loader import Pace

pytestmark = [
    pytest.mark.skipif(not locks.available(), reason="no locks that die with their holder here"),
    pytest.mark.timeout(240),
]
FILES = {module.__file__ for module in (arena, dataset, locks, folder)}


@pytest.fixture
def memory(tmp_path, monkeypatch) -> Path:
    path = tmp_path / "shm"
    path.mkdir()
    monkeypatch.setattr(dataset, "_MEMORY", path)
    return path


def child(act: Callable[[], object]) -> int:
    """A process that does one thing and ends, without the clean-up of this one."""
    process = os.fork()
    if process:
        return process
    try:
        act()
    except BaseException:  # noqa: BLE001 - the border of a process
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def ended(process: int) -> int:
    """How a process ended: its exit code, or minus the signal."""
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def lines_of(act: Callable[[], object], visit: Callable[[tuple[str, int]], None]) -> None:
    """Call `visit` before each line of the shared memory's own code."""

    def trace(frame, event, _):
        if frame.f_code.co_filename not in FILES:
            return None
        if event == "line":
            visit((frame.f_code.co_filename, frame.f_lineno))
        return trace

    sys.settrace(trace)
    try:
        act()
    finally:
        sys.settrace(None)


def places(act: Callable[[], object], folder: Path) -> list[tuple[str, int]]:
    """All lines that a process comes by, found out in one that lives."""
    seen: dict[tuple[str, int], None] = {}
    found = folder / "lines"

    def run():
        lines_of(act, lambda place: seen.setdefault(place))
        found.write_text("\n".join(f"{file} {line}" for file, line in seen))

    assert ended(child(run)) == 0
    pairs = [text.rsplit(" ", 1) for text in found.read_text().splitlines()]
    return [(file, int(line)) for file, line in pairs]


def killed_at(act: Callable[[], object], place: tuple[str, int], with_signal: int) -> int:
    def visit(here):
        if here == place:
            os.kill(os.getpid(), with_signal)

    return child(lambda: lines_of(act, visit))


@pytest.mark.fast("a few-4")
@pytest.mark.parametrize(
    "every", [4, pytest.param(1, marks=[pytest.mark.slow, pytest.mark.timeout(900)])]
)
@pytest.mark.parametrize("room_for", ["all", "a few"])
def test_killed_at_any_line_nobody_else_notices(memory, tmp_path, room_for, every):
    length = 1200 if room_for == "all" else 60  # each death finds samples that nobody has read
    data = Pictures(length, vary=1500, notes=str(tmp_path / "notes"))
    shared = elastix.Shared(data, "16MB" if room_for == "all" else 17_500 + 6 * 3000)
    (tmp_path / "notes").unlink()
    shared.announce(ReaderPosition(0, 0, 0, 9), 0)
    for index in range(10):
        assert same(shared[index], index, data)
    number = 10

    def read():
        shared.announce(ReaderPosition(1, 0, 0, 9), 0)
        for index in range(number, number + 4):
            shared[index % length]

    def somebody_died_before():  # so that putting things right is among the lines
        shared._attached.arena._words[arena._DIRTY] = 1

    somebody_died_before()
    lines = places(read, tmp_path)
    assert {Path(file).name for file, _ in lines} >= {"arena.py", "dataset.py", "locks.py"}
    deaths = 0
    for place in lines[::every]:
        number += 4
        somebody_died_before()
        deaths += ended(killed_at(read, place, signal.SIGKILL)) == -signal.SIGKILL
        began = time.monotonic()
        for index in range(number, number + 4):
            assert same(shared[index % length], index % length, data), place
        assert time.monotonic() - began < 30
        check(shared._attached.arena)
    assert deaths >= 0.7 * len(lines[::every])  # some are for other sizes
    made = (tmp_path / "notes").read_text().split()
    if room_for == "all":
        assert len(made) <= len(set(made)) + deaths
    for index in range(length):
        assert same(shared[index], index, data)
    shared.close()
    assert list(memory.iterdir()) == []


def reader(shared, data, seed, told, epochs=2):
    """Read all, in an order of one's own, and be right."""
    for epoch in range(epochs):
        for offset, index in enumerate(order(seed, epoch, len(data)).tolist()):
            if told:
                shared.announce(ReaderPosition(seed, epoch, offset, epochs), 1)
            if not same(shared[index], index, data):
                raise RuntimeError(f"sample {index} is another")


@pytest.mark.parametrize(("budget", "told"), [("8MB", False), (60_000, True)])
def test_readers_that_are_killed_cost_one_decode_each(memory, tmp_path, budget, told):
    notes = tmp_path / "notes"
    data = Pictures(150, vary=2000, notes=str(notes))
    shared = elastix.Shared(data, budget)
    notes.unlink()
    shared[0]
    readers = [child(lambda seed=seed: reader(shared, data, seed, told)) for seed in range(4)]
    for number, victim in enumerate(readers[:2]):
        while notes.read_text().count("\n") < 20 * (number + 1):
            time.sleep(0.001)
        os.kill(victim, signal.SIGKILL)
    ends = [ended(process) for process in readers]
    assert ends[2:] == [0, 0]
    made = notes.read_text().split()
    if budget == "8MB":
        assert len(made) <= 150 + 2
    check(shared._attached.arena)
    shared.close()
    assert list(memory.iterdir()) == []


class Stops(Pictures):
    """Its sample 5 stops the process that makes it, once."""

    def __getitem__(self, index):
        flag = Path(self.notes + ".stop")
        if index == 5 and flag.exists():
            flag.unlink()
            os.kill(os.getpid(), signal.SIGSTOP)
        return super().__getitem__(index)


def test_a_stopped_holder_of_a_claim_is_waited_for_a_little_while_only(memory, tmp_path):
    data = Stops(notes=str(tmp_path / "notes"))
    shared = elastix.Shared(data)
    shared[0]
    Path(data.notes + ".stop").touch()
    holder = child(lambda: shared[5])
    _, status = os.waitpid(holder, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    began = time.monotonic()
    assert same(shared[5], 5, data)
    assert 0.5 < time.monotonic() - began < 30  # it did wait, and not for ever
    assert same(shared[5], 5, data)
    assert shared.counts.hits == 1  # what was decoded meanwhile is there for all
    os.kill(holder, signal.SIGCONT)
    assert ended(holder) == 0
    check(shared._attached.arena)


def test_one_stopped_while_it_changes_the_memory_costs_others_their_sharing_only(memory, tmp_path):
    data = Pictures(notes=str(tmp_path / "notes"))
    shared = elastix.Shared(data)
    shared[0]
    inside = [p for p in places(lambda: shared[1], tmp_path) if p[0] == arena.__file__]
    place = inside[len(inside) // 2]
    holder = killed_at(lambda: shared[2], place, signal.SIGSTOP)
    assert os.WIFSTOPPED(os.waitpid(holder, os.WUNTRACED)[1])
    for index in (3, 2, 0, 1):
        assert same(shared[index], index, data)
    os.kill(holder, signal.SIGKILL)
    ended(holder)
    for index in range(40):
        assert same(shared[index], index, data)
    check(shared._attached.arena)


def load_and_end(data):
    """Ends as a script does that cleans nothing up, with processes that load for it."""
    shared = elastix.Shared(data)
    source = Source(
        dataset=shared,
        batch_size=8,
        shuffle=False,
        num_workers=1,
        collate=list,
        device=torch.device("cpu"),
    )
    loader = Loader(0, source, Pace())
    if not same(loader.next_batch()[3], 3, data):
        raise RuntimeError("another sample")
    globals()["kept"] = shared, loader


def test_nothing_is_left_when_a_process_with_loaders_of_its_own_ends(memory):
    process = multiprocessing.get_context("fork").Process(target=load_and_end, args=(Pictures(),))
    process.start()
    process.join(60)
    assert process.exitcode == 0
    assert list(memory.iterdir()) == []


def test_what_was_left_by_those_who_were_all_killed_goes_when_the_next_one_comes(memory, tmp_path):
    def read_and_die():
        several = [elastix.Shared(Pictures(size=size)) for size in (900, 901)]
        for shared in several:
            shared[3]
        os.kill(os.getpid(), signal.SIGKILL)

    assert ended(child(read_and_die)) == -signal.SIGKILL
    assert len(list(memory.iterdir())) == 2
    shared = elastix.Shared(Pictures(size=900))
    assert same(shared[3], 3, Pictures())
    assert shared.counts.decodes == 1  # nothing of theirs is believed
    assert list(memory.iterdir()) == [shared.folder]
    shared.close()
    assert list(memory.iterdir()) == []


def numbers(seed: int) -> TensorDataset:
    return TensorDataset(torch.rand(24, 3, generator=torch.Generator().manual_seed(seed)))


def train_on_shared(ctx, at_the_end=lambda: None):
    model = torch.nn.Linear(3, 1)
    model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    data = elastix.Shared(numbers(ctx.config["seed"]))
    for epoch in ctx.loader(data, 4, num_workers=1).epochs(1):
        for (x,) in epoch:
            optimizer.zero_grad()
            model(x).mean().backward()
            optimizer.step()
    ctx.report(shared=float(data.folder.exists()))
    at_the_end()


def a_folder() -> tuple[int, Path]:
    """Of a dataset that nobody else has: what it is made of, and where it is shared."""
    seed = int.from_bytes(os.urandom(4))
    key = elastix.Shared(numbers(seed))._key
    return seed, Path("/dev/shm", f"elastix-{os.geteuid()}-{key}")


def test_a_run_leaves_nothing_though_its_processes_are_ended_from_outside():
    seed, folder = a_folder()
    run = run_local(train_on_shared, 2, config={"seed": seed})
    assert [e.metrics["shared"] for e in run.events if isinstance(e, Reported)] == [1.0]
    assert not folder.exists()


def stop_at_the_end(ctx):
    """Nobody is left who could clear up for this one."""
    train_on_shared(ctx, partial(os.kill, os.getpid(), signal.SIGSTOP))


def test_a_run_leaves_nothing_though_its_workers_were_stopped_and_killed():
    seed, folder = a_folder()
    with pytest.raises(TrainError, match="lost"):
        run_local(stop_at_the_end, 2, config={"seed": seed}, hang_timeout_s=5.0)
    assert not folder.exists()


def all_die(ctx):
    """Each is killed in the middle, and so is whoever comes after it."""
    with_kills(train_on_shared, [Kill(worker=ctx.worker, phase="bucket", after=2)])(ctx)


def test_a_run_leaves_nothing_though_all_of_it_was_killed():
    seed, folder = a_folder()
    with pytest.raises(TrainError):
        run_local(all_die, 2, config={"seed": seed})
    assert not folder.exists()
