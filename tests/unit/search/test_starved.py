"""Trials that run out of memory, and those that a gate does not let in. In virtual time; no Ray."""

import copy
import json
import sys
import threading
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from ConfigSpace import ConfigurationSpace, Integer

import elastix
from elastix.config import Budget, ScalingConfig, refuse_memory
from elastix.errors import ConfigError, EveryTrialFailed, SearchError
from elastix.events import TrialEnded, TrialLost, TrialStarved
from elastix.search.executors import in_process, trial_memory
from elastix.search.executors.executor import Ended, EndedKind, Work
from elastix.search.executors.in_process import execute
from elastix.search.executors.packer import Packer
from elastix.search.executors.serial import Local
from elastix.search.gate import Foreseen, Gate
from elastix.search.results import Results
from elastix.search.rungs import Asha
from elastix.search.trial import Suggestion, Trial, TrialState
from elastix.search.trial_database import TrialDatabase
from elastix.train.control.messages import Outcome, OutcomeKind
from tests.search_parts import Drawing, noop
from tests.virtual import Rig, Virtual, climbs, finishes

GIB = 1 << 30
SAYS = "RuntimeError: DefaultCPUAllocator: can't allocate memory"


class Killed(BaseException):
    """Nothing is written any more, as after a SIGKILL."""


def starves(peak, had, *, alone=False):
    return [], {
        "kind": "starved",
        "summary": SAYS,
        "traceback": f"in train\n{SAYS}",
        "peak_bytes": peak,
        "base_bytes": GIB,
        "reserved_bytes": had,
        "alone": alone,
    }


def test_a_starved_trial_is_run_again_with_more_and_no_strike(tmp_path):
    asked = []

    def play(work):
        if work.number != 1:
            return finishes(work)
        asked.append(work.memory_bytes)
        had = work.memory_bytes or 2 * GIB
        return finishes(work) if had >= 15 * GIB else starves(peak=3 * GIB, had=had)

    rig = Rig(tmp_path, play)
    trials = rig.run(Budget(trials=4))
    assert all(trial.state is TrialState.FINISHED for trial in trials)
    assert asked == [0, int(4.5 * GIB), 9 * GIB, 18 * GIB]
    assert trials[1].starved == 3
    assert trials[1].peak_bytes == 3 * GIB
    assert [event.times for event in rig.of(TrialStarved)] == [1, 2, 3]
    assert rig.of(TrialStarved)[0].reserved_bytes == int(4.5 * GIB)
    assert not rig.of(TrialLost)


def test_one_that_had_everything_to_itself_fails_and_says_so(tmp_path):
    def play(work):
        if work.number != 1:
            return finishes(work)
        return starves(peak=8 * GIB, had=16 * GIB, alone=work.memory_bytes > 0)

    rig = Rig(tmp_path, play)
    failed = rig.run(Budget(trials=3))[1]
    assert failed.state is TrialState.FAILED
    assert failed.starved == 1
    assert "all the memory that there is" in failed.traceback
    assert "in train" in failed.traceback
    assert rig.executor.ran.count(1) == 2
    assert failed.peak_bytes == 8 * GIB


def test_retries_are_for_those_that_had_everything_too(tmp_path):
    rig = Rig(tmp_path, lambda work: starves(1, 1, alone=True), retries=2, give_up_after=2)
    with pytest.raises(EveryTrialFailed, match="all the memory that there is"):
        rig.run(Budget(trials=3))
    assert Counter(rig.executor.ran)[0] == 3


def test_what_starved_before_a_kill_goes_on_with_what_it_was_promised(tmp_path):
    rig = Rig(tmp_path)
    waiting = Trial(0, Suggestion({"x": 0.5, "depth": 1}), starved=2, memory_bytes=7 * GIB)
    with TrialDatabase(tmp_path) as database:
        database.commit([rig_row(waiting)])
    trials = rig.run(Budget(trials=2))
    assert rig.works[0][1].memory_bytes == 7 * GIB
    assert trials[0].starved == 2
    assert json.loads(json.dumps(trials[0].to_json()))["memory_bytes"] == 7 * GIB


def rig_row(trial):
    from elastix.search.trial_database import TrialRow

    return TrialRow(trial.but(state=TrialState.WAITING))


def test_a_starved_trial_goes_on_from_its_rung(tmp_path):
    play_on, starved = climbs(), []

    def play(work):
        if work.until_reports != 1 and not starved:
            starved.append(work.number)
            return starves(peak=GIB, had=GIB)
        return play_on(work)

    rig = Rig(tmp_path, play, rungs=lambda: Asha(first=1, eta=2, last=9))
    trial = rig.run(Budget(trials=4))[starved[0]]
    assert trial.starved == 1
    assert trial.state in (TrialState.PAUSED, TrialState.FINISHED)
    assert len(trial.results) > 1, "past the rung at which it was"
    assert rig.executor.ran.count(trial.number) >= 3, "to the rung, in vain, and on from there"


@pytest.mark.parametrize("kill_at", [3, 9, 17])
def test_a_driver_killed_between_starving_and_starting_again(tmp_path, kill_at):
    """Nothing that was final runs again, and what was promised to starved trials stays."""
    ends = Counter()

    def play(work):
        ends["all"] += 1
        if ends["all"] == kill_at:
            raise Killed
        if work.number % 2 and not work.memory_bytes:
            return starves(peak=GIB, had=GIB)
        return finishes(work)

    rig = Rig(tmp_path, play)
    with pytest.raises(Killed):
        rig.run(Budget(trials=12))
    before = {line.trial.number: line.trial for line in rig.lines}
    trials = rig.run(Budget(trials=12))
    assert len(trials) == 12
    assert all(trial.state is TrialState.FINISHED for trial in trials)
    assert all(trial.starved == trial.number % 2 for trial in trials)
    for number, trial in before.items():
        if trial.state.is_final:
            assert trials[number] == trial
            assert number not in rig.executor.ran
        if trial.memory_bytes:
            assert trials[number].memory_bytes == trial.memory_bytes


class Packed(Virtual):
    """An executor in virtual time that places by memory; what a trial takes is in its config."""

    def __init__(self, clock, hosts):
        super().__init__(clock, finishes, slots=0)
        self.packer = Packer()
        self.given = {}
        self.works = {}
        self.most = 0
        for seat, (host, capacity) in enumerate(hosts):
            self.packer.enter(seat, host, idle=1, capacity=capacity, expected=2)

    @property
    def room(self):
        return self.packer.room()

    def submit(self, work):
        self.works[work.number] = work
        self.packer.wait(work.number, work.memory_bytes)

    def poll(self, timeout_s):
        self.clock.now += timeout_s
        for placed in self.packer.place():
            self.given[placed.trial] = placed
        self.most = max(self.most, len(self.given))
        news = []
        for number, placed in list(self.given.items())[:1]:
            del self.given[number]
            self.packer.end(number)
            self.ran.append(number)
            work = self.works.pop(number)
            needs = round(100 * work.config["x"])
            fits = needs <= placed.reserved
            told = {
                "number": number,
                "kind": EndedKind.FINISHED if fits else EndedKind.STARVED,
                "results": {0: {"score": work.config["x"]}} if fits else {},
                "summary": "" if fits else SAYS,
                "peak_bytes": min(needs, placed.reserved),
                "reserved_bytes": placed.reserved,
                "alone": placed.alone,
            }
            news.append(Ended(**told))
        return news


@pytest.mark.parametrize("seed", range(20))
def test_no_trial_is_lost_to_memory_unless_alone_on_the_largest_host(tmp_path, seed, monkeypatch):
    largest = 40 + 3 * seed
    hosts = [("a", largest), ("a", largest), ("b", 30), ("b", 30), ("b", 30)]
    monkeypatch.setattr(
        "tests.virtual.Virtual", lambda clock, play, slots: Packed(clock, hosts), raising=True
    )
    rig = Rig(tmp_path, give_up_after=99)
    trials = rig.run(Budget(trials=30))
    most = largest - 1  # the other seat holds one byte idle
    for trial in trials:
        fits = round(100 * trial.config["x"]) <= most
        assert trial.state is (TrialState.FINISHED if fits else TrialState.FAILED)
    assert rig.executor.most > 1, "they ran side by side"


# ---------------------------------------------------------------------------------- the gate


class Strict:
    """Refuses what is deep, and keeps what it is taught."""

    def __init__(self, most=2):
        self.most = most
        self.learned = []

    def begin(self, idle):
        pass

    def foresee(self, config):
        why = "too deep" if config["depth"] > self.most else ""
        return Foreseen(config["depth"] * GIB, why)

    def learn(self, trial):
        self.learned.append(trial.number)


def test_what_the_gate_refuses_never_runs_and_the_searcher_hears_of_it(tmp_path):
    rig, gate = Rig(tmp_path, slots=2), Strict(most=1)
    trials = rig.run(Budget(trials=8), gate=gate)
    refused = [trial for trial in trials if trial.config["depth"] > 1]
    assert refused
    assert all((t.state is TrialState.REFUSED) == (t in refused) for t in trials)
    assert len(trials) == 8 + len(refused), "they do not count for the budget"
    assert not {trial.number for trial in refused} & set(rig.executor.ran)
    assert sorted(rig.searcher.told) == [trial.number for trial in trials]
    assert all(t.traceback == "too deep" and not t.scored and t.state.is_final for t in refused)
    assert [e.trial for e in rig.of(TrialEnded) if e.state == "refused"] == [
        trial.number for trial in refused
    ]
    works = {work.number: work.predicted_bytes for _, work in rig.works}
    assert works == {t.number: t.config["depth"] * GIB for t in trials if t not in refused}


def test_a_campaign_goes_on_after_refusals_and_counts_as_before(tmp_path):
    rig = Rig(tmp_path)
    first = rig.run(Budget(trials=4), gate=Strict(most=1))
    trials = rig.run(Budget(trials=7), gate=Strict(most=1))
    assert len(first) > 4
    assert rig.known == 4, "and so does who shows how much of the budget is spent"
    assert trials[: len(first)] == first
    assert sum(trial.state is TrialState.FINISHED for trial in trials) == 7


def test_what_is_enqueued_is_looked_at_too(tmp_path):
    deep = {"x": 0.5, "depth": 3}
    trials = Rig(tmp_path).run(Budget(trials=2), enqueued=[deep], gate=Strict())
    assert trials[0].config == deep
    assert trials[0].state is TrialState.REFUSED


def test_a_gate_that_refuses_everything_ends_the_campaign(tmp_path):
    rig = Rig(tmp_path)
    with pytest.raises(SearchError, match=r"refused 200 configurations in a row.*too deep"):
        rig.run(Budget(trials=2), gate=Strict(most=0))
    assert len(rig.lines) == 200
    assert rig.executor.ran == []


def test_a_gate_that_refuses_a_whole_small_space_is_said(tmp_path):
    """The campaign ended as if all had gone well, with nothing tried."""
    rig = Rig(tmp_path, searcher=lambda: Drawing(limit=5))
    with pytest.raises(SearchError, match=r"refused all 5 configurations .* since too deep"):
        rig.run(Budget(trials=9), gate=Strict(most=0))
    assert [line.trial.state for line in rig.lines] == [TrialState.REFUSED] * 5


def test_the_gate_learns_from_what_ran_and_again_after_a_kill(tmp_path):
    def play(work):
        kind = {"kind": "finished", "ref": None, "peak_bytes": 5, "base_bytes": 1}
        return [{"score": work.config["x"]}], kind

    rig, gate = Rig(tmp_path, play), Strict()
    trials = rig.run(Budget(trials=4), gate=gate)
    ran = [trial.number for trial in trials if trial.state is TrialState.FINISHED]
    assert sorted(gate.learned) == ran
    again = Strict()
    rig.run(Budget(trials=4), gate=again)
    assert again.learned == ran


def test_nothing_is_learned_from_one_that_raised(tmp_path):
    """It ended before it had all that it needs; one that starved says what it asked for."""

    def play(work):
        end = {"ref": None, "peak_bytes": 5, "base_bytes": 1}
        kind = ["finished", "raised", "starved"][work.number % 3]
        return [{"score": work.config["x"]}], {**end, "kind": kind, "alone": True}

    rig, gate = Rig(tmp_path, play), Strict(most=3)
    trials = rig.run(Budget(trials=6), gate=gate)
    assert [trial.state is TrialState.FINISHED for trial in trials] == [True, False, False] * 2
    assert sorted(gate.learned) == [0, 2, 3, 5]
    again = Strict(most=3)
    rig.run(Budget(trials=6), gate=again)
    assert again.learned == [0, 3]


def build(config):
    return torch.nn.Linear(config["width"], config["width"], bias=False)


def batch(config):
    return (torch.zeros(4, config["width"]),)


def test_limits_of_a_real_gate():
    gate = Gate(build, batch, parameters=1000)
    assert gate.foresee({"width": 30}).refusal == ""
    assert "1,024 parameters, the gate allows 1,000" in gate.foresee({"width": 32}).refusal
    small = Gate(build, batch, memory=50_000)
    assert small.foresee({"width": 30}).refusal == ""
    seen = small.foresee({"width": 100})
    assert "the gate allows 50.0 kB" in seen.refusal
    assert seen.predicted_bytes > 5 * 100 * 100 * 4
    slow = Gate(build, batch, seconds=1e-15, device="a100")
    assert "a step takes" in slow.foresee({"width": 30}).refusal


def test_a_gate_learns_what_estimates_mean():
    gate = Gate(build, batch, memory=100 << 20)
    taken = Trial(0, Suggestion({"width": 4}), predicted_bytes=16 << 20, base_bytes=60 << 20)
    assert gate.expected_bytes(16 << 20) == 16 << 20
    for _ in range(5):
        gate.learn(taken.but(peak_bytes=124 << 20))  # twice 16 MiB and the constant
    assert gate.expected_bytes(16 << 20) == 124 << 20
    assert gate.expected_bytes(32 << 20) == (60 + 96) << 20


@pytest.mark.parametrize("usual", [0, 12])
def test_what_trials_have_left_in_a_worker_refuses_no_others(usual):
    """The next trial uses it again; who counts it as held refuses all, and learns nothing more."""
    gate = Gate(build, batch, memory=100 << 20)
    gate.begin(40 << 20)
    first = Trial(0, Suggestion({"width": 4}), predicted_bytes=16 << 20, base_bytes=40 << 20)
    small = first.but(predicted_bytes=1 << 20, base_bytes=88 << 20)
    for _ in range(usual):
        gate.learn(first.but(peak_bytes=72 << 20))
    for _ in range(6):
        gate.learn(small.but(peak_bytes=90 << 20))
    expected = (72 if usual else 56) << 20  # where nothing was learned it is the estimate
    assert gate.expected_bytes(16 << 20) == pytest.approx(expected, rel=0.01)


def test_a_gate_counts_from_the_least_that_a_worker_holds():
    """A campaign that goes on elsewhere has other workers than its first trials had."""
    gate = Gate(build, batch, memory=100 << 20)
    gate.learn(
        Trial(0, Suggestion({}), predicted_bytes=1, base_bytes=99 << 20, peak_bytes=99 << 20)
    )
    gate.begin(40 << 20)
    assert gate.expected_bytes(16 << 20) == 56 << 20
    gate.begin(101 << 20)  # what trials have left there since
    assert gate.expected_bytes(16 << 20) == 56 << 20


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"memory": 0},
        {"memory": True},
        {"parameters": "1e6"},
        {"memory": 1e9, "device": "abacus"},
        {"memory": 1e9, "optimizer": "lbfgs"},
    ],
)
def test_a_gate_that_makes_no_sense_is_refused(given):
    with pytest.raises(ConfigError, match="Nothing was started"):
        Gate(build, batch, **given)


WIDTHS = ConfigurationSpace(space=[Integer("width", (1, 64), default=8)])


def campaign(tmp_path, gate, train=noop, trials=3):
    return elastix.Campaign(
        train,
        space=WIDTHS,
        metric="score",
        budget=Budget(trials=trials),
        run=elastix.RunConfig(name="gated", store=str(tmp_path)),
        executor=Local(),
        gate=gate,
        quiet=True,
    )


def test_a_gate_that_cannot_estimate_is_said_before_anything_is_started(tmp_path):
    def broken(config):
        raise KeyError("depth")

    with pytest.raises(ConfigError, match=r"width.*KeyError.*depth"):
        campaign(tmp_path, Gate(broken, batch, memory=1e9)).run()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ConfigError, match="gate"):
        campaign(tmp_path, gate=1e9)


def test_a_gate_that_no_worker_fits_through_says_so_before_the_first_trial(tmp_path):
    with pytest.raises(ConfigError, match=r"holds .* with its libraries: no configuration fits"):
        campaign(tmp_path, Gate(build, batch, memory=1e6), scores).run()
    assert not list(Results.open(tmp_path, "gated"))


def test_what_a_worker_holds_counts_before_the_first_trial_ended():
    gate = Gate(build, batch, memory=1e9)
    gate.begin(0)  # unknown
    assert not gate.foresee({"width": 8}).refusal
    gate.begin(999_999_000)
    assert "would hold about" in gate.foresee({"width": 64}).refusal


def scores(ctx):
    ctx.report(score=ctx.config["width"])


def test_a_whole_campaign_with_a_gate(tmp_path):
    results = campaign(tmp_path, Gate(build, batch, parameters=1024), scores, trials=6).run()
    ran = [trial for trial in results if trial.state is TrialState.FINISHED]
    assert len(ran) == 6
    assert max(trial.config["width"] for trial in ran) <= 32
    refused = [trial for trial in results if trial.state is TrialState.REFUSED]
    assert all(trial.config["width"] > 32 for trial in refused)
    assert results.best.config["width"] <= 32
    assert all(trial.peak_bytes >= trial.base_bytes > 0 for trial in ran)
    again = Results.open(tmp_path, "gated")
    assert [row["m:peak_bytes"] for row in again.rows()] == [t.peak_bytes for t in results]


def test_what_builds_a_model_for_the_gate_takes_nothing_from_its_trial(tmp_path):
    """Each trial had lost what it was to be tried with, and counted for it all the same."""

    def takes_apart(config):
        width = config.pop("width")
        return torch.nn.Linear(width, width, **config)

    def scores_what_is_there(ctx):
        ctx.report(score=ctx.config.get("width", 0))

    gate = Gate(takes_apart, lambda config: batch({"width": config.pop("width")}), parameters=1e6)
    results = campaign(tmp_path, gate, scores_what_is_there).run()
    widths = [trial.config["width"] for trial in Results.open(tmp_path, "gated")]
    assert [trial.metrics["score"] for trial in results] == widths


def test_a_gate_may_be_made_of_methods_of_what_has_no_copy(tmp_path):
    """A lock, or a data set of gigabytes."""

    class Experiment:
        def __init__(self):
            self.lock = threading.Lock()

        def build(self, config):
            return build(config)

    gate = Gate(Experiment().build, batch, parameters=1024)
    results = campaign(tmp_path, gate, scores, trials=6).run()
    assert max(trial.config["width"] for trial in results if trial.scored) <= 32
    assert copy.deepcopy(gate)._experience is not gate._experience


# ---------------------------------------------------------------------------------- measuring


def test_memory_that_is_kept_bit_by_bit_is_given_back_too(monkeypatch):
    """Each trial may leave less than is worth the time."""
    held, given_back = [100 << 20], []

    def trim(_pad):
        given_back.append(held[0])
        held[0] = 101 << 20

    monkeypatch.setattr(trial_memory, "resident", lambda: held[0])
    monkeypatch.setattr(trial_memory._Kept, "least", 0)
    monkeypatch.setattr(trial_memory.ctypes, "CDLL", lambda _: SimpleNamespace(malloc_trim=trim))
    for _ in range(9):
        trial_memory._give_back()
        held[0] += 30 << 20
    assert given_back == [100 << 20, 191 << 20, 191 << 20]


@pytest.mark.parametrize(
    "said",
    [
        "RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to",
        "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has",
        "MemoryError: Unable to allocate 7 GiB",
        "MemoryError",
        "RuntimeError: std::bad_alloc",
        "Task was killed due to the node running low on memory.",
    ],
)
def test_errors_for_want_of_memory(said):
    assert trial_memory.out_of_memory(said)


@pytest.mark.parametrize("said", ["", "ValueError: two", "KeyError: 'memory'", "RuntimeError: nan"])
def test_other_errors(said):
    assert not trial_memory.out_of_memory(said)


def test_how_much_was_asked_for():
    assert trial_memory.refused_bytes("you tried to allocate 400 bytes. Error") == 400
    assert trial_memory.refused_bytes("Tried to allocate 2.50 GiB. GPU 0") == int(2.5 * GIB)
    assert trial_memory.refused_bytes("MemoryError") == 0


def takes(ctx):
    held = torch.ones(int(ctx.config["mib"]) << 18)  # 4 bytes each
    ctx.report(score=float(held[0]))


def ran(train, mib):
    work = Work(number=0, name="one", config={"mib": mib}, seed=0)
    return execute(train, work, worker="here", tell=lambda report: None)


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_the_peak_of_each_trial_is_its_own():
    large, small = ran(takes, 200), ran(takes, 1)
    assert large.peak_bytes - large.base_bytes >= 180 << 20  # /proc is some MiB late
    assert small.peak_bytes < large.peak_bytes - (150 << 20)
    assert large.kind == small.kind == "finished"


@pytest.mark.parametrize(("device", "given"), [("cpu", []), ("cuda", ["back"])])
def test_a_gpu_is_left_to_the_others_that_share_it(monkeypatch, device, given):
    """What torch keeps of it nobody else can use, and whoever is idle counts as holding nothing."""
    back = []
    memory = SimpleNamespace(base=0, read=lambda: 7)
    over = Outcome(kind=OutcomeKind.FINISHED)
    monkeypatch.setattr(in_process, "PeakMemory", lambda device: memory)
    monkeypatch.setattr(in_process, "run_alone", lambda *given, **more: over)
    monkeypatch.setattr(in_process, "let_go_of_memory", lambda: back.append("back"))
    work = Work(number=0, name="one", config={}, seed=0)
    ended = execute(noop, work, worker="here", tell=back.append, device=torch.device(device))
    assert (ended.peak_bytes, back) == (7, given)


def test_a_trial_that_cannot_have_what_it_wants_has_starved():
    ended = ran(takes, 1 << 30)  # 2**50 bytes: no address space has that
    assert ended.kind is EndedKind.STARVED
    assert "DefaultCPUAllocator" in ended.summary
    assert "in takes" in ended.traceback
    assert ended.peak_bytes > 1 << 50
    assert ran(takes, 1).kind is EndedKind.FINISHED


def test_there_is_memory_and_kills_are_counted():
    assert trial_memory.free() > 0
    assert trial_memory.kills() >= 0
    assert trial_memory.resident() > 10 << 20


def test_what_is_kept_free_for_a_trial_is_a_number_of_bytes():
    for wrong in (0, -1, "all", True, 1.5):
        with pytest.raises(ConfigError, match="memory_per_worker"):
            ScalingConfig(memory_per_worker=wrong)
    assert ScalingConfig.from_dict(ScalingConfig(memory_per_worker="auto").to_dict())
    with pytest.raises(ConfigError, match=r"memory_per_worker=5: a run would not go by it"):
        refuse_memory(ScalingConfig(memory_per_worker=5), "a run")
