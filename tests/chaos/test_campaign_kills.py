"""Drivers and workers of campaigns killed with SIGKILL: no final trial lost, none run twice."""

import json
import os
import random
import signal
import subprocess
from pathlib import Path

import pytest

import elastix
from elastix.data.audit import audit
from elastix.events import TrialLost, WorkerLost
from elastix.observe import journal
from elastix.search.executors import store_access
from elastix.search.executors.serial import Local
from elastix.search.trial import TrialState
from elastix.search.trial_database import TrialDatabase
from elastix.testing.chaos import Kill, with_kills
from tests import search_parts
from tests.forked_scripts import Script
from tests.search_parts import SPACE, Drawing

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(1500)


class Hunt:
    """A campaign whose driver is killed at random moments until it is through."""

    def __init__(self, store, trials, kind, address=None, seed=0):
        self.store = store
        self.trials = trials
        self.arguments = [str(store), str(trials), kind, *([address] if address else [])]
        self.random = random.Random(seed)
        self.finals = {}
        self.read = 0
        self.kills = 0

    def run(self, kills):
        """Kill the driver so many times, then let it finish."""
        while self.kills < kills:
            if self.start(lines=self.random.randint(2, 40)):
                break
            self.kills += 1
            self.check()
        assert self.start(lines=None)
        self.check()
        assert len(self.finals) == self.trials
        with TrialDatabase(self.store / "runs" / "hunted", read_only=True) as database:
            lines = database.lines()
        assert [line.trial.number for line in lines] == list(range(self.trials))
        assert all(line.trial.state is TrialState.FINISHED for line in lines)
        assert len({line.trial.suggestion.key for line in lines}) == self.trials
        assert sorted(line.done for line in lines) == list(range(1, self.trials + 1))

    def start(self, lines):
        """Run a driver; kill it a random instant after so many events. True if it ended."""
        words = ["-m", "tests.chaos.campaign_driver", *self.arguments]
        driver = Script(words, ROOT, {**os.environ, "PYTHONPATH": str(ROOT)})
        try:
            for number, _ in enumerate(driver.stdout):
                if number == lines:
                    wait_an_instant(self.random.random() * 0.02)
                    driver.kill()
                    break
            code = driver.wait()
        finally:
            driver.kill()
            errors = driver.stderr.read()
            driver.stdout.close()
            driver.stderr.close()
        assert code in (0, -signal.SIGKILL), errors
        return code == 0

    def check(self):
        """What was final is final as it was, and did not run since."""
        with TrialDatabase(self.store / "runs" / "hunted", read_only=True) as database:
            now = {line.trial.number: line for line in database.lines() if line.done}
        assert self.finals.items() <= now.items(), "a finished trial was lost or changed"
        entries = (self.store / "diary").read_text().splitlines()
        known = {line.trial.suggestion.key for line in self.finals.values()}
        ran = {json.loads(entry)["key"] for entry in entries[self.read :]}
        assert not known & ran, "a finished trial ran again"
        self.finals, self.read = now, len(entries)


class MembersHunt(Hunt):
    """A population's driver, or that of a screened search, or of one with rungs."""

    def run(self, kills):
        while self.kills < kills:
            if self.start(lines=self.random.randint(2, 12)):
                break
            self.kills += 1
            self.check()
        assert self.start(lines=None)
        with TrialDatabase(self.store / "runs" / "hunted", read_only=True) as database:
            states = {line.trial.state for line in database.lines()}
        assert (TrialState.PAUSED in states) is (self.arguments[2] == "rungs")
        assert not states & {TrialState.WAITING, TrialState.RUNNING}
        return self.check()

    def check(self):
        """What is in the book goes on from what was; as many members as ever are there."""
        with TrialDatabase(self.store / "runs" / "hunted", read_only=True) as database:
            now = {line.trial.number: line for line in database.lines()}
        for number, before in self.finals.items():
            after = now[number]
            assert after.trial.suggestion == before.trial.suggestion
            assert after.trial.results[: len(before.trial.results)] == before.trial.results
            assert not before.done or after == before, "a final trial was changed"
        there = [line for line in now.values() if line.trial.state is not TrialState.STOPPED]
        if self.arguments[2] == "population":
            assert len(there) in (0, self.trials), "a member was lost, or is there twice"
        self.finals = now
        return [
            (t.config, t.state, t.results, t.suggestion.parent_number, t.epochs, t.lineage_epochs)
            for t in (line.trial for _, line in sorted(now.items()))
        ]


def same_as_undisturbed(tmp_path, trials, kind, kills, seed):
    """Kill the driver so often; compare all trials with those of a driver that nobody kills."""
    quiet = MembersHunt(tmp_path / "quiet", trials, kind)
    hunted = MembersHunt(tmp_path / "hunted", trials, kind, seed=seed)
    for hunt in (quiet, hunted):
        hunt.store.mkdir()
    whole, found = quiet.run(kills=0), hunted.run(kills)
    assert found == whole
    assert hunted.kills >= kills // 2  # the last may come after the driver's end
    lines = [len((hunt.store / "diary").read_text().splitlines()) for hunt in (quiet, hunted)]
    assert lines[0] == sum(len(results) for _, _, results, *_ in whole)
    # Of a trial that is cut short, what came after its last State is done again.
    most = 1 if kind == "population" else 5
    assert lines[0] <= lines[1] <= lines[0] + most * hunted.kills


def test_members_of_a_population_whose_driver_is_killed(tmp_path):
    same_as_undisturbed(tmp_path, 4, "population", kills=3, seed=6)


def test_drivers_of_a_campaign_with_rungs_killed(tmp_path):
    same_as_undisturbed(tmp_path, 16, "rungs", kills=3, seed=8)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "trials"), [("population", 30), ("screened", 60), ("rungs", 80)])
def test_twenty_drivers_of_populations_and_screened_searches_killed(tmp_path, kind, trials):
    same_as_undisturbed(tmp_path, trials, kind, kills=20, seed=7)


ANOTHER = """
import os, signal
import elastix
from elastix.search.executors.serial import Local
from elastix.search.trial_database import TrialDatabase
from tests.search_parts import SPACE, noop

commits = 0
commit = TrialDatabase.commit

def counted(self, *given, **more):
    global commits
    commit(self, *given, **more)
    commits += 1
    if commits == {after}:
        os.kill(os.getpid(), signal.SIGKILL)

TrialDatabase.commit = counted
if {after} == 0:  # at its first word, before it has written any
    TrialDatabase.commit = lambda *given, **more: os.kill(os.getpid(), signal.SIGKILL)
elastix.Campaign(
    noop, space=SPACE, searcher=elastix.Random(), metric="score", executor=Local(), quiet=True,
    budget=elastix.Budget(trials=12), run=elastix.RunConfig(name="hunted", store={store!r}),
).run()
"""


@pytest.mark.parametrize("after", [0, 1, 2, 3])
def test_a_new_searcher_that_is_killed_leaves_the_old_one_its_own_state(tmp_path, after):
    """The driver is killed by SIGKILL right after a commit of its own, or before its first."""

    def go(trials):
        return campaign(search_parts.noop, tmp_path, trials, executor=Local()).run()

    assert len(go(8)) == 8  # Evolution
    words = ["-c", ANOTHER.format(after=after, store=str(tmp_path))]
    driver = Script(words, ROOT, {**os.environ, "PYTHONPATH": str(ROOT)})
    try:
        assert driver.wait() == -signal.SIGKILL
    finally:
        driver.kill()
        driver.stdout.close()
        driver.stderr.close()
    assert len(go(16)) == 16


ORPHAN = """
import os, signal
import elastix
from elastix.search.executors.serial import Local
from tests.search_parts import SPACE

def train(ctx):
    there, told = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(told, b"!")  # it has come through everything that a fork does
        while True:
            signal.pause()
    os.read(there, 1)
    print(pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

elastix.Campaign(
    train, space=SPACE, searcher=elastix.Random(), metric="score", executor=Local(), quiet=True,
    budget=elastix.Budget(trials=2), run=elastix.RunConfig(name="hunted", store={store!r}),
).run()
"""


def test_what_a_killed_driver_has_forked_does_not_keep_its_campaign(tmp_path):
    words = ["-c", ORPHAN.format(store=str(tmp_path))]
    driver = Script(words, ROOT, {**os.environ, "PYTHONPATH": str(ROOT)})
    orphan = 0
    try:
        orphan = int(driver.stdout.readline())
        assert driver.wait() == -signal.SIGKILL
        os.kill(orphan, 0)  # it is there
        assert len(campaign(search_parts.noop, tmp_path, 2, executor=Local()).run()) == 2
        os.kill(orphan, 0)
    finally:
        if orphan:
            os.kill(orphan, signal.SIGKILL)
        driver.kill()
        driver.stdout.close()
        driver.stderr.close()


def wait_an_instant(seconds):
    """So that the victim is not always at the same place; nothing depends on it."""
    subprocess.run(["sleep", f"{seconds:.4f}"], check=True)


def test_drivers_killed_at_random_moments(tmp_path):
    hunt = Hunt(tmp_path, 60, "local", seed=1)
    hunt.run(kills=4)
    assert hunt.kills >= 3


def test_a_driver_on_ray_killed_at_random_moments(cluster, tmp_path):
    hunt = Hunt(tmp_path, 40, "pool", cluster.get_runtime_context().gcs_address, seed=2)
    hunt.run(kills=1)
    assert hunt.kills == 1


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_twenty_drivers_on_ray_killed_at_random_moments(cluster, tmp_path):
    hunt = Hunt(tmp_path, 600, "pool", cluster.get_runtime_context().gcs_address, seed=3)
    hunt.run(kills=20)
    assert hunt.kills == 20


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_twenty_drivers_killed_while_trials_starve(cluster, tmp_path):
    """Each trial runs out of memory once, and is promised more: that is kept, and nothing twice."""
    hunt = Hunt(tmp_path, 300, "hungry", cluster.get_runtime_context().gcs_address, seed=5)
    hunt.run(kills=20)
    assert hunt.kills == 20
    with TrialDatabase(tmp_path / "runs" / "hunted", read_only=True) as database:
        trials = [line.trial for line in database.lines()]
    starved = [trial for trial in trials if trial.starved]
    assert starved, "a driver that heard of it wrote it down"
    assert all(trial.starved == 1 and trial.memory_bytes > 0 for trial in starved)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_twenty_drivers_killed_at_random_moments(tmp_path):
    hunt = Hunt(tmp_path, 600, "local", seed=4)
    hunt.run(kills=20)
    assert hunt.kills == 20


def campaign(train, tmp_path, trials, **options):
    if "executor" not in options:
        options.setdefault("scaling", elastix.ScalingConfig(cpus_per_worker=0.5))
    return elastix.Campaign(
        train,
        space=SPACE,
        metric=options.pop("metric", "score"),
        budget=elastix.Budget(trials=trials, parallel=2),
        run=elastix.RunConfig(name="hunted", store=str(tmp_path)),
        quiet=True,
        **options,
    )


def test_trials_whose_workers_are_killed_run_again(cluster, tmp_path):
    marks = tmp_path / "marks"
    marks.mkdir()
    searcher = Drawing(marks=str(marks))
    results = campaign(search_parts.dies_once, tmp_path, 6, searcher=searcher).run()
    assert [trial.state for trial in results] == [TrialState.FINISHED] * 6
    died = [trial.number for trial in results if trial.config["depth"] == 2]
    assert died
    events = journal.read(tmp_path / "runs" / "hunted" / "journal.jsonl")
    assert sorted(e.trial for e in events if isinstance(e, TrialLost)) == died


def test_a_trial_that_always_kills_its_worker_is_given_up(cluster, tmp_path):
    failure = elastix.FailureConfig(max_worker_losses=1)
    results = campaign(
        search_parts.dies_always, tmp_path, 3, searcher=Drawing(), failure=failure
    ).run()
    for trial in results:
        bad = trial.config["depth"] == 2
        assert trial.state is (TrialState.FAILED if bad else TrialState.FINISHED)
        assert not bad or "lost 2 times" in trial.traceback


@pytest.mark.parametrize(
    "served",
    [pytest.param(False, marks=pytest.mark.slow), True],
    ids=["shared directory", "store server"],
)
def test_a_trial_of_several_workers_survives_the_loss_of_one(
    cluster, tmp_path, monkeypatch, served
):
    if served:
        monkeypatch.setattr(store_access, "several_hosts", lambda: True)
    train = with_kills(search_parts.learns, [Kill(worker=1, phase="bucket", step=3)])
    results = campaign(
        train,
        tmp_path,
        2,
        searcher=Drawing(),
        metric="accuracy",
        scaling=elastix.ScalingConfig(num_workers=2, cpus_per_worker=0.5),
    ).run()
    assert [trial.state for trial in results] == [TrialState.FINISHED] * 2
    assert all(trial.epochs == 2 and trial.ref for trial in results)
    runs = [tmp_path / "runs" / f"hunted-{n:05d}" / "journal.jsonl" for n in range(2)]
    lost = [e for run in runs for e in journal.read(run) if isinstance(e, WorkerLost)]
    assert {(event.worker, event.cause) for event in lost} == {(1, "died")}
    events = journal.read(tmp_path / "runs" / "hunted" / "journal.jsonl")
    assert not [e for e in events if isinstance(e, TrialLost)], "forward recovery, no restart"


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_trials_of_two_to_four_workers_under_fire(cluster, tmp_path):
    """Two trials at once, each loses one worker in backward and one between steps."""
    kills = [Kill(worker=1, phase="bucket", step=3), Kill(worker=2, phase="batch", step=6)]
    results = campaign(
        with_kills(search_parts.learns, kills),
        tmp_path,
        4,
        searcher=Drawing(epochs=6),
        metric="accuracy",
        scaling=elastix.ScalingConfig(num_workers=(2, 4), cpus_per_worker=0.5),
    ).run()
    assert [trial.state for trial in results] == [TrialState.FINISHED] * 4
    for trial in results:
        path = tmp_path / "runs" / f"hunted-{trial.number:05d}" / "journal.jsonl"
        events = list(journal.read(path))
        lost = [event.worker for event in events if isinstance(event, WorkerLost)]
        assert sorted(lost) == [1, 2]
        assert audit(events).exact
    events = journal.read(tmp_path / "runs" / "hunted" / "journal.jsonl")
    assert not [e for e in events if isinstance(e, TrialLost)]
