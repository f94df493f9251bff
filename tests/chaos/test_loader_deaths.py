"""Workers with DataLoader processes: either may be killed, and every sample is used once."""

import multiprocessing
import os
import signal
import subprocess
import sys
from collections import Counter
from multiprocessing.connection import wait
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

from elastix.data.loader import Loader
from elastix.data.loader_processes import ProcessReader, end_all
from elastix.data.source import Source
from elastix.errors import TrainError
from elastix.testing.chaos import Kill, with_kills
from elastix.testing.local import run_local
from tests import trainables
from tests.laws import assert_exactly_once, assert_replicas_identical

CONFIG = {"model": "mlp", "samples": 150, "batch_size": 30, "epochs": 2}


def reading_ahead(ctx):
    """Train with two DataLoader processes, which are killed before the steps that `dies` names."""
    model, optimizer, dataset = trainables.make(ctx.config)
    model, optimizer = ctx.prepare(model, optimizer)
    loader = ctx.loader(dataset, batch_size=30, num_workers=2)
    log = Path(ctx.config["log"]) / f"{ctx.worker}.jsonl"
    children = Path(ctx.config["log"]) / f"{ctx.worker}.children"
    dies = dict(ctx.config["dies"])
    for epoch in loader.epochs(ctx.config["epochs"]):
        for x, y in epoch:
            if ctx.worker == 0:
                victims = multiprocessing.active_children()[: dies.pop(str(ctx.step), 0)]
                for victim in victims:
                    victim.kill()
                assert not victims or wait([victim.sentinel for victim in victims], 20)
            children.write_text(" ".join(str(c.pid) for c in multiprocessing.active_children()))
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            others = {"optimizer": optimizer}
            digest = trainables.digest(trainables.capture({"": model}, others))
            trainables.note(log, ctx.step, digest)
    assert not dies or ctx.worker


def run(tmp_path, kills=(), dies=None):
    logs = tmp_path / "logs"
    logs.mkdir()
    result = run_local(
        with_kills(reading_ahead, kills),
        3,
        config={**CONFIG, "log": str(logs), "dies": dies or {}},
        directory=tmp_path / "run",
    )
    assert set(result.lost) == {kill.worker for kill in kills}
    assert_exactly_once(result.events, CONFIG["epochs"])
    assert_replicas_identical(logs, set(result.lost), result.events)
    return result


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1][0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_fork_that_leaves_ends_no_process_that_reads_for_its_parent():
    samples = TensorDataset(torch.arange(4.0))
    reader = ProcessReader(lambda: DataLoader(samples, num_workers=1, persistent_workers=True))
    reader.begin()
    child = multiprocessing.get_context("fork").Process(target=end_all)
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert [float(reader.next()[0]) for _ in range(4)] == [0.0, 1.0, 2.0, 3.0]
    reader.close()


COLLECTS = """
import gc, os
gc.disable()
os.register_at_fork(after_in_child=gc.collect)  # before anybody else's, as it may come to be
import torch
from torch.utils.data import DataLoader, TensorDataset
from elastix.data.loader_processes import ProcessReader

def dropped():
    samples = TensorDataset(torch.arange(4.0))
    reader = ProcessReader(lambda: DataLoader(samples, num_workers=1, persistent_workers=True))
    reader.begin()
    reader.next()
    reader.itself = reader

for _ in range(3):
    dropped()
"""


def test_a_fork_that_collects_at_once_says_nothing_of_a_loader_that_went_before():
    found = subprocess.run([sys.executable, "-c", COLLECTS], capture_output=True, timeout=250)
    assert (found.returncode, found.stderr.decode()) == (0, "")


class Meanwhile(DataLoader):
    """While its processes are started, another thread starts one of its own."""

    def __iter__(self):
        self.end, theirs = multiprocessing.Pipe()
        self.other = multiprocessing.get_context("fork").Process(target=theirs.recv, daemon=True)
        self.other.start()
        return super().__iter__()


def test_a_process_that_is_started_elsewhere_meanwhile_is_none_of_the_loaders():
    loader = Meanwhile(TensorDataset(torch.arange(4.0)), num_workers=1, persistent_workers=True)
    reader = ProcessReader(lambda: loader)
    reader.begin()
    first = loader.other
    reader.begin()
    loader.end.send("over")
    loader.other.join(60)
    assert [float(reader.next()[0]) for _ in range(4)] == [0.0, 1.0, 2.0, 3.0]
    reader.close()
    assert first.is_alive()
    first.kill()
    first.join(60)


def test_loader_processes_that_die_cost_neither_the_run_nor_a_sample(tmp_path):
    """One of two, then both, in the middle of the epochs."""
    run(tmp_path, dies={"2": 1, "6": 2})


@pytest.mark.fast("bucket")
@pytest.mark.parametrize("phase", ["batch", "bucket", "round"])
def test_a_worker_is_killed_while_others_read_for_it(tmp_path, phase):
    """It is heard of while its processes have no time to notice: torch's look every 5 s."""
    run(tmp_path, [Kill(worker=1, phase=phase, step=3)], dies={"3": 1})
    pids = (tmp_path / "logs" / "1.children").read_text().split()
    assert len(pids) == 2
    assert not any(alive(int(pid)) for pid in pids)


class Ends(Dataset):
    """Whoever reads sample 7 in a process of its own ends there, once all before it was used."""

    def __init__(self, reader: int, used: Path) -> None:
        self.reader, self.used = reader, used

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> int:
        if index == 7 and os.getpid() != self.reader:
            trainables.await_worker(self.used)
            os.kill(os.getpid(), signal.SIGKILL)
        return index


class Alone:
    """A group of one."""

    me = 0

    def boundary(self, loader):
        pass

    def members(self):
        return (0,)

    def binding(self, loader):
        return None

    def drawn(self, loader, samples, ratio):
        pass

    def left(self):
        pass

    def exhausted(self, loader):
        pass

    def planned(self, loader, epochs):
        pass


def test_processes_that_die_of_a_sample_each_time_end_the_run_and_it_is_said_why(tmp_path):
    used = tmp_path / "used"
    source = Source(
        dataset=Ends(os.getpid(), used),
        batch_size=3,
        shuffle=False,
        num_workers=2,
        device=torch.device("cpu"),
    )
    loader = Loader(0, source, Alone())
    seen = []

    def read():
        for epoch in loader.epochs(1):
            for batch in epoch:
                seen.extend(batch.tolist())
                loader.commit((0,))
                if len(seen) == 6:
                    used.touch()

    with pytest.raises(TrainError, match=r"died 3 times in a row.*memory"):
        read()
    assert seen == [0, 1, 2, 3, 4, 5]


class Noted(Dataset):
    """A dataset that notes who reads what: the id of the worker it reads for, and the index."""

    def __init__(self, dataset: Dataset, log: Path) -> None:
        self.dataset, self.log = dataset, log

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int):
        with self.log.open("a") as log:
            log.write(f"{index}\n")
        return self.dataset[index]


def noting(ctx):
    """Train with two DataLoader processes; what is read stands in a file for each worker."""
    model, optimizer, dataset = trainables.make(ctx.config)
    model, optimizer = ctx.prepare(model, optimizer)
    noted = Noted(dataset, Path(ctx.config["log"]) / f"{ctx.worker}.read")
    loader = ctx.loader(noted, batch_size=30, num_workers=2)
    for epoch in loader.epochs(1):
        for x, y in epoch:
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.fast("batch")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("phase", ["batch", "bucket"])
def test_no_worker_reads_a_sample_twice_when_another_is_lost(tmp_path, phase):
    """One change: after a second one a sample may come back to who had read it for the first."""
    kills = [Kill(worker=1, phase=phase, step=10)]
    config = {**CONFIG, "samples": 1200, "log": str(tmp_path)}
    result = run_local(with_kills(noting, kills), 4, config=config, directory=tmp_path / "run")
    assert set(result.lost) == {1}
    assert_exactly_once(result.events, 1)
    read = {log.stem: Counter(log.read_text().split()) for log in tmp_path.glob("*.read")}
    assert read.keys() == {"0", "1", "2", "3"}
    again = {worker: {i for i in once if once[i] > 1} for worker, once in read.items()}
    assert not any(again.values()), again
