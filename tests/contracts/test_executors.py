"""The contract of an Executor: in this process, and on workers of a real Ray."""

import os
import signal
import time
from pathlib import Path

import pytest
import torch

import elastix
from elastix.config import FailureConfig, ScalingConfig
from elastix.errors import SearchError, StoreError
from elastix.search.executors.executor import Ended
from elastix.search.executors.serial import Local
from elastix.search.model_sources import opened
from elastix.state import State
from elastix.store import Store
from elastix.testing.executor_contract import ExecutorContract, endless, tells
from tests.chaos.test_shared_kills import a_folder, numbers


def dies(ctx):
    os.kill(os.getpid(), signal.SIGKILL)


def stops(ctx):
    """Once; the next one goes through."""
    told = Path(ctx.config["folder"], "pid")
    if not told.exists():
        told.write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
    ctx.report(score=1.0)


def waits(ctx):
    """The first that is not short ends when all that were given out with it have."""
    folder, number = Path(ctx.config["folder"]), ctx.config["number"]
    while number == LONG and len(list(folder.iterdir())) < LONG + 3:
        time.sleep(0.01)
    (folder / f"{number}").touch()
    ctx.report(score=0.0)


LONG = 40


def endless_or_tells(ctx):
    """The first has to be halted."""
    if ctx.config["x"] == 0:
        endless(ctx)
    tells(ctx)


def spoils(ctx):
    """The first leaves its process a GPU that does nothing any more, as torch would say it."""

    def fails():
        raise torch.AcceleratorError("CUDA error: device-side assert triggered")

    ctx.report(score=ctx.config["x"], pid=os.getpid())
    if ctx.config["x"] == 0:
        torch.cuda.is_initialized, torch.cuda.synchronize = lambda: True, fails
        fails()


def spoil(executor, collect, work):
    """Work that does it, and then other; where it ran, and where they did."""
    ends, _ = collect(executor, [work(0)])
    assert (ends[0].kind, ends[0].spent) == ("raised", True)
    later, _ = collect(executor, [work(number) for number in range(1, 6)])
    assert {ended.kind for ended in later.values()} == {"finished"}
    return ends[0].results[0]["pid"], {ended.results[0]["pid"] for ended in later.values()}


KEPT = []  # as long as the process lives


def shares(ctx):
    """What it reads is in shared memory after it has returned."""
    KEPT.append(elastix.Shared(numbers(ctx.config["seed"])))
    ctx.report(score=float(KEPT[-1][0][0].sum()))


pytestmark = pytest.mark.timeout(600)


class TestLocal(ExecutorContract):
    can_halt = False

    def make(self):
        return Local()

    def test_a_function_that_cannot_be_sent_is_refused(self):
        """Nothing is sent anywhere."""

    def test_a_process_whose_gpu_does_nothing_any_more_runs_no_other_trial(self, monkeypatch):
        """There is no other process. A campaign of a hundred trials had failed within a second."""
        monkeypatch.setattr(torch.cuda, "is_initialized", torch.cuda.is_initialized)
        monkeypatch.setattr(torch.cuda, "synchronize", torch.cuda.synchronize)
        with self.opened(spoils) as executor:
            ends, _ = self.collect(executor, [self.work(0)])
            assert (ends[0].kind, ends[0].spent) == ("raised", True)
            executor.submit(self.work(1))
            with pytest.raises(SearchError, match="Trial 1 was not run, and nothing is lost"):
                executor.poll(1.0)

    def test_halting_what_has_ended_halts_nothing(self):
        """A report comes with the end of its work, so whoever halts because of it is late."""
        with self.opened(tells) as executor:
            for _ in range(2):
                ends, _ = self.collect(executor, [self.work(5)])
                assert ends[5].kind == "finished"
                executor.halt(5)


@pytest.mark.usefixtures("cluster")
class TestTune(ExecutorContract):
    @pytest.fixture(autouse=True)
    def folder(self, tmp_path):
        self.storage = str(tmp_path / "tune")

    def make(self):
        from elastix.search.executors.tune_trials import Tune

        scaling = ScalingConfig(cpus_per_worker=0.5)
        return Tune(parallel=2, scaling=scaling, storage_path=self.storage)

    def test_what_runs_after_one_that_was_halted_is_not_lost(self):
        """Tune gives it the same process."""
        with self.opened(endless_or_tells) as executor:
            executor.submit(self.work(0))
            while not executor.poll(1.0):
                pass
            executor.halt(0)
            heard = []
            while not heard or not isinstance(heard[-1], Ended):
                heard += executor.poll(1.0)
            assert heard[-1].kind == "halted"
            ends, _ = self.collect(executor, [self.work(number) for number in range(1, 6)])
        assert {number: ended.kind for number, ended in ends.items()} == dict.fromkeys(
            range(1, 6), "finished"
        )

    def test_a_process_whose_gpu_does_nothing_any_more_runs_no_other_trial(self):
        with self.opened(spoils) as executor:
            first, later = spoil(executor, self.collect, self.work)
        assert first not in later


@pytest.mark.usefixtures("cluster")
class TestPool(ExecutorContract):
    def make(self):
        from elastix.search.executors.pool import Pool

        return Pool(parallel=2, scaling=ScalingConfig(cpus_per_worker=0.5))

    def test_a_process_whose_gpu_does_nothing_any_more_runs_no_other_trial(self):
        with self.opened(spoils) as executor:
            first, later = spoil(executor, self.collect, self.work)
        assert first not in later

    def test_what_wants_a_host_to_itself_gets_it(self):
        """Beside nothing else, and the others go on after it."""
        everything = 1 << 50
        with self.opened(tells) as executor:
            works = [self.work(n, memory_bytes=everything if n == 2 else 0) for n in range(6)]
            ends, _ = self.collect(executor, works)
        assert all(ended.kind == "finished" for ended in ends.values())
        assert [ends[n].alone for n in range(6)] == [n == 2 for n in range(6)]
        assert ends[2].reserved_bytes > ends[0].reserved_bytes > 0
        assert all(ended.peak_bytes >= ended.base_bytes > 0 for ended in ends.values())

    def test_nothing_waits_behind_a_long_run_while_a_worker_is_idle(self, tmp_path):
        def work(number):
            return self.work(number, config={"number": number, "folder": str(tmp_path)})

        with self.opened(waits) as executor:
            self.collect(executor, [work(n) for n in range(LONG)])
            assert executor.room >= 4  # what is so short is queued
            for number in range(LONG, LONG + 4):
                executor.submit(work(number))
            ended = []
            while len(ended) < 4:
                for news in executor.poll(1.0):
                    if isinstance(news, Ended) and news.kind == "returned":
                        executor.submit(work(news.number))
                    elif isinstance(news, Ended):
                        ended.append(news.number)
        assert sorted(ended) == [*range(LONG, LONG + 4)]

    def test_nothing_is_left_of_what_a_stopped_worker_shared(self):
        seed, folder = a_folder()
        with self.opened(shares) as executor:
            self.collect(executor, [self.work(0, config={"seed": seed})])
            assert folder.exists()
            up = [handle.hello for handle in executor._handles.values() if handle.hello]
            assert up
            for hello in up:  # another may still be on its way
                os.kill(hello.pid, signal.SIGSTOP)
        assert not folder.exists()

    def test_a_worker_that_is_stopped_in_a_trial_is_replaced(self, tmp_path):
        work, told = self.work(0, config={"folder": str(tmp_path)}), tmp_path / "pid"
        with self.opened(stops) as executor:
            while not executor.room:
                executor.poll(0.1)
            executor.submit(work)
            while not told.exists():
                assert executor.poll(0.1) == []
            executor._failure = FailureConfig(hang_timeout_s=2.0, start_timeout_s=2.0)
            while not (ends := executor.poll(0.1)):
                pass
            assert [ended.kind for ended in ends] == ["lost"]
            assert ends[0].summary.endswith(" answered nothing for 2 s")
            executor._failure = FailureConfig()
            pid = int(told.read_text())
            while Path(f"/proc/{pid}").exists():
                executor.poll(0.1)
            while not executor.room:  # another one comes up in its place
                executor.poll(0.1)
            ends, _ = self.collect(executor, [work])
            assert ends[0].kind == "finished"

    def test_a_worker_that_is_stopped_while_idle_is_replaced(self, tmp_path):
        with self.opened(tells) as executor:
            self.collect(executor, [self.work(0)])
            executor._failure = FailureConfig(hang_timeout_s=2.0, start_timeout_s=2.0)
            (idle, *_) = [handle.hello.pid for handle in executor._handles.values() if handle.hello]
            os.kill(idle, signal.SIGSTOP)
            while Path(f"/proc/{idle}").exists():
                assert executor.poll(0.1) == []
            executor._failure = FailureConfig()
            while not executor.room:
                executor.poll(0.1)
            ends, _ = self.collect(executor, [self.work(1)])
            assert ends[1].kind == "finished"

    def test_a_worker_that_is_stopped_as_it_starts_is_replaced(self, tmp_path, monkeypatch):
        from elastix.search.executors import pool

        told = tmp_path / "pid"

        class Stops(pool.LoneWorker):
            def hello(self):
                if self._number == 1:
                    told.write_text(str(os.getpid()))
                    os.kill(os.getpid(), signal.SIGSTOP)
                return super().hello()

        monkeypatch.setattr(pool, "LoneWorker", Stops)
        with self.opened(tells) as executor:
            while not (executor.room and told.exists()):
                executor.poll(0.1)
            executor._failure = FailureConfig(start_timeout_s=1.0)
            while 1 in executor._handles:
                executor.poll(0.1)
            executor._failure = FailureConfig()
            while executor.room < 2 or Path(f"/proc/{told.read_text()}").exists():
                executor.poll(0.1)

    def test_a_worker_that_the_system_ends_for_want_of_memory(self, monkeypatch):
        """As far as the count of such ends says so; that count is pretended here."""
        from elastix.search.executors import pool

        monkeypatch.setattr(pool.Pool, "_kills_near", lambda self, said: 1 + said.kills)
        with self.opened(dies) as executor:
            ends, _ = self.collect(executor, [self.work(0)])
        assert ends[0].kind == "starved"
        assert ends[0].reserved_bytes > 0


def test_who_is_through_with_a_store_does_not_close_it_for_others_of_this_process(tmp_path):
    """A campaign of another thread failed if it stored a model just then."""
    first, second = Local(), Local()
    opener = first.reach(str(tmp_path))
    assert second.reach(str(tmp_path)) == opener
    store = opened(opener)
    first.close()
    first.close()
    ref = store.put(State({"w": torch.ones(1)}))
    assert opened(opener) is store
    second.close()
    with Store(tmp_path, read_only=True) as again:
        assert again.get(ref).tensors["w"] == 1
    with pytest.raises(StoreError):
        store.put(State({"w": torch.zeros(1)}))
