"""What every Executor must do, as tests. Inherit ExecutorContract and say how one is made.

    class TestMine(ExecutorContract):
        def make(self):
            return Mine()

Workers must be able to import the module of these train functions: this one.
"""

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.utils.data import TensorDataset

from elastix.errors import ConfigError, Full
from elastix.search.executors.executor import Ended, Executor, TrainFunction, Work, WorkReport
from elastix.search.model_sources import InheritTerms, TrialModelSource
from elastix.search.trial import Objectives
from elastix.state import Ref
from elastix.store import Store
from elastix.train.replica.context import Context

PATIENCE_S = 240.0


def tells(ctx: Context) -> None:
    """One report."""
    ctx.report(score=ctx.config["x"], seed=torch.initial_seed())


def orders(ctx: Context) -> None:
    """Which samples come in which order, and what the weights begin with."""
    model = torch.nn.Linear(2, 1)
    weights = str(model.weight.tolist())
    model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    order = []
    for epoch in ctx.loader(TensorDataset(torch.arange(16.0).view(8, 2)), batch_size=8).epochs(2):
        for (x,) in epoch:
            order += x[:, 0].tolist()
            optimizer.zero_grad()
            model(x).mean().backward()
            optimizer.step()
    ctx.report(score=1, order=str(order), weights=weights)


def breaks(ctx: Context) -> None:
    """The user's bug, in one trial of two."""
    if ctx.config["x"] % 2:
        raise ZeroDivisionError(f"x was {ctx.config['x']}")
    ctx.report(score=ctx.config["x"])


def fills_up(ctx: Context) -> None:
    """What a full store looks like from a train function."""
    raise Full("no room is left on the disk.")


def trains(ctx: Context) -> None:
    """Three epochs over 8 samples in batches of 4, a report after each."""
    model = torch.nn.Linear(2, 1)
    ctx.inherit(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = ctx.prepare(model, optimizer)
    loader = ctx.loader(TensorDataset(torch.arange(16.0).view(8, 2)), batch_size=4)
    for epoch in loader.epochs(3):
        for (x,) in epoch:
            optimizer.zero_grad()
            model(x).mean().backward()
            optimizer.step()
        ctx.report(score=epoch.number, steps=ctx.step)


def endless(ctx: Context) -> None:
    """Reports until it is halted."""
    count = 0
    while True:
        ctx.report(score=count)
        count += 1
        time.sleep(0.01)


class ExecutorContract:
    """One executor a test; `make` may be slow."""

    can_halt = True

    def make(self) -> Executor:
        raise NotImplementedError

    @contextlib.contextmanager
    def opened(self, train: TrainFunction) -> Iterator[Executor]:
        executor = self.make()
        try:
            executor.open(train)
            yield executor
        finally:
            executor.close()

    @staticmethod
    def collect(executor: Executor, works: list[Work]) -> tuple[dict[int, Ended], list[WorkReport]]:
        """Run these to their ends, as many at a time as there is room for."""
        waiting = list(works)
        ends: dict[int, Ended] = {}
        progress: list[WorkReport] = []
        deadline = time.monotonic() + PATIENCE_S
        while len(ends) < len(works):
            assert time.monotonic() < deadline, f"{len(ends)} of {len(works)} ended"
            for _ in range(min(executor.room, len(waiting))):
                executor.submit(waiting.pop(0))
            for news in executor.poll(1.0):
                if isinstance(news, Ended):
                    assert news.number not in ends, "it ended twice"
                    ends[news.number] = news
                else:
                    progress.append(news)
        assert not executor.poll(0.0)
        return ends, progress

    @staticmethod
    def work(number: int, **fields: object) -> Work:
        config = {"x": number}
        values = {"config": config, "seed": 40 + number, "name": f"contract-{number}", **fields}
        return Work(number=number, **values)  # type: ignore[arg-type]

    def test_all_work_ends_once_with_what_it_reported(self) -> None:
        with self.opened(tells) as executor:
            ends, _ = self.collect(executor, [self.work(n) for n in range(7)])
            assert executor.room >= 1
        for number, ended in ends.items():
            assert ended.kind == "finished"
            assert ended.results == {0: {"score": number, "seed": 40 + number}}
            assert ended.finished_s >= ended.started_s
            assert ended.ref is None
            assert ended.worker

    def test_what_raises_does_not_disturb_the_others(self) -> None:
        with self.opened(breaks) as executor:
            ends, _ = self.collect(executor, [self.work(n) for n in range(6)])
        assert [ends[n].kind for n in range(6)] == ["finished", "raised"] * 3
        assert "ZeroDivisionError: x was 3" in ends[3].summary
        assert "in breaks" in ends[3].traceback
        assert ends[3].results == {}

    def test_errors_of_elastix_keep_their_class(self) -> None:
        with self.opened(fills_up) as executor:
            ends, _ = self.collect(executor, [self.work(0)])
        assert ends[0].kind == "raised"
        assert isinstance(ends[0].error, Full)

    def test_a_model_is_stored_with_its_lineage(self, tmp_path: Path) -> None:
        with self.opened(trains) as executor:
            terms = self.terms(executor, tmp_path)
            first = TrialModelSource(terms, 0, {"x": 0})
            ends, _ = self.collect(executor, [self.work(0, model_source=first)])
            parent = ends[0].ref
            assert parent is not None
            second = TrialModelSource(terms, 1, {"x": 1}, parent=Ref(parent))
            more, _ = self.collect(executor, [self.work(1, model_source=second)])
        ended = more[1]
        assert ended.ref is not None
        assert ended.ref != parent
        assert ended.inherited is not None
        assert ended.inherited["ref"] == parent
        assert ended.inherited["lineage_epochs"] == 3
        with Store(tmp_path, read_only=True) as store:
            assert store.ancestors(ended.ref) == [parent]
            meta = store.manifest(ended.ref).meta
            assert (meta["trial"], meta["epochs"], meta["lineage_epochs"]) == (1, 3, 6)
            torch.nn.Linear(2, 1).load_state_dict(store.get(ended.ref).model)

    def test_a_pause_and_what_comes_after_it(self, tmp_path: Path) -> None:
        """In two parts it reports what it does in one, and ends with the same weights."""
        with self.opened(trains) as executor:
            terms = self.terms(executor, tmp_path)
            whole = self.work(0, model_source=TrialModelSource(terms, 0, {"x": 0}), seed=1)
            part = self.work(
                1, model_source=TrialModelSource(terms, 1, {"x": 0}), seed=1, until_reports=2
            )
            ends, _ = self.collect(executor, [whole, part])
            assert ends[1].kind == "paused"
            assert sorted(ends[1].results) == [0, 1]
            assert ends[1].epochs == 2
            assert ends[1].ref is not None
            rest = TrialModelSource(terms, 1, {"x": 0}, paused=ends[1].ref)
            more, _ = self.collect(executor, [self.work(1, model_source=rest, seed=1)])
        assert more[1].kind == "finished"
        assert more[1].results == {2: ends[0].results[2]}
        assert more[1].results[2] == {"score": 2, "steps": 6}
        assert more[1].epochs == 3
        with Store(tmp_path, read_only=True) as store:
            once, twice = (store.get(e.ref or "").model for e in (ends[0], more[1]))
        assert all(torch.equal(once[name], twice[name]) for name in once)

    def test_the_order_of_samples_has_a_seed_of_its_own(self) -> None:
        """So all trials of a campaign have one order, and weights of their own."""
        with self.opened(orders) as executor:
            pieces = [
                self.work(number, seed=seed, order_seed=order_seed)
                for number, (seed, order_seed) in enumerate([(1, 5), (2, 5), (1, None)])
            ]
            ends, _ = self.collect(executor, pieces)
        one, other, own = (ends[number].results[0] for number in range(3))
        assert one["order"] == other["order"] != own["order"]
        assert one["weights"] == own["weights"] != other["weights"]

    def test_halting(self) -> None:
        if not self.can_halt:
            pytest.skip("work runs inside of poll")
        with self.opened(endless) as executor:
            deadline = time.monotonic() + PATIENCE_S
            while not executor.room:
                assert time.monotonic() < deadline
                executor.poll(1.0)
            executor.submit(self.work(5))
            heard: list[WorkReport | Ended] = []
            while not heard:  # it is under way, and its reports come while it is
                assert time.monotonic() < deadline
                heard += executor.poll(1.0)
            assert all(isinstance(news, WorkReport) and news.number == 5 for news in heard)
            executor.halt(5)
            while not isinstance(heard[-1], Ended):
                assert time.monotonic() < deadline
                heard += executor.poll(1.0)
            assert heard[-1].kind == "halted"
            seqs = [news.seq for news in heard if isinstance(news, WorkReport)]
            assert seqs == list(range(len(seqs)))
            assert set(heard[-1].results) >= set(seqs)

    def test_a_function_that_cannot_be_sent_is_refused(self) -> None:
        lock = threading.Lock()

        def holds(ctx: Context) -> None:
            ctx.report(score=float(lock.locked()))

        executor = self.make()
        try:
            with pytest.raises(ConfigError, match="lock"):
                executor.open(holds)
        finally:
            executor.close()

    @staticmethod
    def terms(executor: Executor, folder: Path) -> InheritTerms:
        Store(folder).close()
        objectives = Objectives.of("score")
        return InheritTerms(
            store=executor.reach(str(folder)),
            campaign="contract",
            objectives=objectives,
            mode="lcs",
            provider="parent",
        )
