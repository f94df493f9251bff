"""A shadow has the State when all workers of the group die at once: no step is lost."""

import functools
import math
import os
import random
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

import elastix
from elastix.comm.network import catch_up_stream
from elastix.config import CheckpointConfig
from elastix.events import (
    Event,
    Events,
    GenerationFormed,
    ReplicasDiverged,
    Resumed,
    ResumedFromShadow,
    RunStarted,
    ShadowDiffers,
    StateStored,
    StepCommitted,
    WorkerLeft,
    WorkerLost,
    WorkerStarted,
)
from elastix.testing.chaos import Flip, Kill, with_kills
from elastix.testing.local import run_local
from elastix.testing.replay import compare
from elastix.train.checkpoint.assembly import CheckpointId
from tests import exact_programs, trainables
from tests.chaos.test_exact import check
from tests.laws import assert_exactly_once, committed, joins

EXACT = {"model": "convnet", "jitter": True, "epochs": 3, "equal_shares": True}
"""Of 15 steps."""
PLAIN = {"model": "convnet", "samples": 150, "batch_size": 30, "epochs": 3}
"""Of as many, of a run that need not be exact."""


def resumptions(events: list[Event]) -> list[ResumedFromShadow]:
    return [event for event in events if isinstance(event, ResumedFromShadow)]


def lost(events: list[Event]) -> set[int]:
    return {event.worker for event in events if isinstance(event, WorkerLost)}


def run(tmp_path, train, workers=2, config=None, **options):
    """A run of an exact program that waits at step 3 until its shadow has the State."""
    held = {"shadow": workers, "meeting": str(tmp_path)}
    settings = {"shadows": 1, "replace": True, "exact": True, **options}
    directory = tmp_path / "run"
    return run_local(
        train, workers, config={**EXACT, **held, **(config or {})}, directory=directory, **settings
    )


@pytest.mark.fast("slice", "round", "left", "evaluate")
@pytest.mark.parametrize("phase", ["slice", "bucket", "round", "left", "boundary", "evaluate"])
def test_all_die_in_one_place_and_no_step_is_lost(tmp_path, phase):
    kills = [Kill(worker=worker, phase=phase, step=10) for worker in (0, 1)]
    result = run(tmp_path, with_kills(exact_programs.train, kills))
    (resumed,) = resumptions(result.events)
    assert (resumed.worker, resumed.steps_lost, resumed.equal) == (2, 0, True)
    assert not [event for event in result.events if isinstance(event, Resumed)]
    assert lost(result.events) == {0, 1}
    check(result, "convnet")


def test_all_die_before_the_final_state_is_stored(tmp_path):
    kills = [Kill(worker=worker, phase="snapshot", step=15) for worker in (0, 1)]
    result = run(tmp_path, with_kills(exact_programs.train, kills))
    (resumed,) = resumptions(result.events)
    assert (resumed.step, resumed.steps_lost) == (15, 0)
    check(result, "convnet")


def test_it_goes_on_alone_where_nobody_is_replaced(tmp_path):
    kills = [Kill(worker=worker, phase="slice", step=10) for worker in (0, 1)]
    result = run(tmp_path, with_kills(exact_programs.train, kills), replace=False)
    assert [event.steps_lost for event in resumptions(result.events)] == [0]
    assert committed(result.events)[-1].world_size == 1
    check(result, "convnet")


def test_the_death_of_a_shadow_costs_nobody_anything_and_it_is_replaced(tmp_path):
    kills = [Kill(worker=2, phase="batch", step=5)]
    result = run(tmp_path, with_kills(exact_programs.train, kills))
    assert lost(result.events) == {2}
    assert {step.world_size for step in committed(result.events)} == {2}
    assert not resumptions(result.events)
    check(result, "convnet")


@dataclass(frozen=True)
class Impatient:
    """A train function on workers that drop a shadow soon."""

    train: Callable[[elastix.Context], None]

    def __call__(self, ctx: elastix.Context) -> None:
        catch_up_stream.PATIENCE_S = 0.5
        self.train(ctx)


def test_a_shadow_that_is_stopped_does_not_keep_the_run_from_its_end(tmp_path):
    """The journal waits for it, and so does the final State, until it is dropped."""
    kills = [Kill(worker=2, phase="batch", step=5, signal=signal.SIGSTOP)]
    result = run(tmp_path, Impatient(with_kills(exact_programs.train, kills)))
    assert not lost(result.events)
    check(result, "convnet")


@dataclass(frozen=True)
class Followed:
    """A train function whose worker 1 waits, after worker 0, until the shadow has its State."""

    train: Callable[[elastix.Context], None]

    def __call__(self, ctx: elastix.Context) -> None:
        def look(phase: str, number: int) -> None:
            while phase == "boundary" and ctx.worker == 1 and number in (8, 10):
                followers = trainables.subscribers(ctx._member)
                held = not any(math.isinf(s.holds) for s in followers)
                if followers and (number == 8 or held):  # at a boundary it is given the State
                    break
                time.sleep(0.005)

        ctx.on_phase(look)
        self.train(ctx)


def test_a_shadow_follows_another_when_its_donor_dies(tmp_path):
    """All die later: by then it has the State of the one that was left."""
    kills = [Kill(worker=0, phase="slice", step=4), Kill(worker=1, phase="round", step=11)]
    doomed = with_kills(Followed(exact_programs.train), kills)
    result = run(tmp_path, doomed, replace=False)
    (resumed,) = resumptions(result.events)
    assert (resumed.worker, resumed.steps_lost) == (2, 0)
    check(result, "convnet")


@dataclass(frozen=True)
class Mended:
    """A train function whose shadow differs, and that waits until it has the State anew.

    At a boundary a donor gives what its followers have asked for by then.

    Attributes:
        folder: where workers leave signs for each other.
    """

    train: Callable[[elastix.Context], None]
    folder: Path

    def __call__(self, ctx: elastix.Context) -> None:
        def told(_equal: bool) -> None:
            if self._seen("differs"):
                (self.folder / "again").touch()

        def see(phase: str, number: int) -> None:
            if phase == "unequal":
                (self.folder / "differs").touch()
            if phase == "boundary" and ctx.worker < 2:
                self.wait(ctx._member, number)

        trainables.tell_level(ctx, told)
        ctx.on_phase(see)
        self.train(ctx)

    def wait(self, member, number: int) -> None:
        """It asks for a digest, comes anew, has the State, and the donor knows that."""
        while True:
            followers = trainables.subscribers(member)
            if any(s.wants_digest for s in followers):
                (self.folder / "asks").touch()
            if self._seen("differs") and any(not s.fed for s in followers):
                (self.folder / "comes").touch()
            held = not any(math.isinf(s.holds) for s in followers)
            if {
                10: self._seen("asks") or self._seen("differs"),
                11: self._seen("comes") or self._seen("again"),
                13: self._seen("again") and held,
            }.get(number, True):
                return
            time.sleep(0.005)

    def _seen(self, sign: str) -> bool:
        return (self.folder / sign).exists()


def test_one_that_differs_says_so_once_and_is_given_the_state_anew(tmp_path):
    """A bit of its memory has flipped; all die after that, and nothing of it is left."""
    harm = [Flip(worker=2, tensor="conv1.weight", phase="batch", step=4)]
    harm += [Kill(worker=worker, phase="slice", step=13) for worker in (0, 1)]
    doomed = with_kills(Mended(exact_programs.train, tmp_path), harm)
    result = run(tmp_path, doomed, checkpoint=CheckpointConfig(every_steps=2))
    assert [e.worker for e in result.events if isinstance(e, ShadowDiffers)] == [2]
    (resumed,) = resumptions(result.events)
    # One that is given the State of another epoch than its loop is in is replaced in an exact run.
    left = {event.worker for event in result.events if isinstance(event, WorkerLeft)}
    shadow = 3 if 2 in left else 2
    assert (resumed.worker, resumed.steps_lost, resumed.equal) == (shadow, 0, True)
    check(result, "convnet")


@dataclass(frozen=True)
class ComparedAgain:
    """A train function without the sentinel whose shadow differs when a State is stored at step 6.

    The group waits, boundary by boundary, until the shadow has been given the State anew, and has
    had that compared.
    """

    train: Callable[[elastix.Context], None]
    folder: Path

    def __call__(self, ctx: elastix.Context) -> None:
        def told(equal: bool) -> None:
            if self._seen("differs"):
                (self.folder / ("equal" if equal else "again")).touch()

        def see(phase: str, number: int) -> None:
            if phase == "unequal":
                (self.folder / "differs").touch()
            while phase == "boundary" and ctx.worker < 2 and not self._so_far(ctx, number):
                time.sleep(0.005)

        trainables.tell_level(ctx, told)
        ctx.on_phase(see)
        self.train(ctx)

    def _so_far(self, ctx: elastix.Context, number: int) -> bool:
        followers = trainables.subscribers(ctx._member)
        if number >= 6 and any(s.wants_digest for s in followers):  # before, it was not flipped
            (self.folder / ("asks again" if self._seen("again") else "asks")).touch()
        if self._seen("differs") and any(not s.fed for s in followers):
            (self.folder / "comes").touch()
        return {
            7: self._seen("asks"),
            8: self._seen("comes"),
            9: self._seen("again"),
            10: self._seen("asks again"),
            12: self._seen("equal"),
        }.get(number, True)

    def _seen(self, sign: str) -> bool:
        return (self.folder / sign).exists()


def test_without_the_sentinel_one_that_has_differed_is_compared_when_it_has_the_state_anew(
    tmp_path,
):
    """No further State is due. It was refused for good."""
    harm = [Flip(worker=2, tensor="conv1.weight", phase="batch", step=4)]
    harm += [Kill(worker=worker, phase="slice", step=12) for worker in (0, 1)]
    doomed = with_kills(ComparedAgain(exact_programs.train, tmp_path), harm)
    result = run(tmp_path, doomed, sentinel=False, checkpoint=CheckpointConfig(every_steps=6))
    assert [e.worker for e in result.events if isinstance(e, ShadowDiffers)] == [2]
    (resumed,) = resumptions(result.events)
    assert (resumed.worker, resumed.steps_lost, resumed.equal) == (2, 0, True)
    check(result, "convnet")


@pytest.mark.parametrize(
    ("tensor", "phase", "parts"),
    [("conv1.weight", "boundary", ("model",)), ("@backward/conv1.weight", "again", ("gradients",))],
)
def test_it_follows_while_the_group_finds_out_who_has_parted(tmp_path, tensor, phase, parts):
    """What they tell each other comes to it as they have told it."""
    flip = Flip(worker=1, tensor=tensor, phase=phase, step=6, bit=3, lasting=True)
    train, recomputed = with_kills(exact_programs.train, [flip]), {"recompute_every": 1}
    result = run(tmp_path, train, workers=3, replace=False, **recomputed)
    (found,) = [event for event in result.events if isinstance(event, ReplicasDiverged)]
    assert (found.apart, found.parts) == ((1,), parts)
    assert lost(result.events) == {1}
    check(result, "convnet")


STORED = CheckpointConfig(every_steps=2, keep_last=None)


@dataclass(frozen=True)
class LateToDie:
    """A train function whose shadow sees in the vote on step 9 that it differs.

    Then all others die, before they have told it what they hold as a whole.
    """

    train: Callable[[elastix.Context], None]
    folder: Path
    workers: int

    def __call__(self, ctx: elastix.Context) -> None:
        seen, checks = self.folder / "seen", ctx._member._steps.checks
        matches = checks.matches

        def look(held):
            same = matches(held)
            if same is False and ctx.step == 8:
                seen.touch()
            return same

        def die(phase: str, number: int) -> None:
            if phase == "boundary" and number == 9 and ctx.worker < self.workers:
                while not seen.exists():
                    time.sleep(0.005)
                os.kill(os.getpid(), signal.SIGKILL)

        checks.matches = look
        ctx.on_phase(die)
        self.train(ctx)


@pytest.mark.parametrize("workers", [1, 2])
def test_an_exact_run_does_not_go_on_from_a_shadow_that_differs(tmp_path, workers):
    """A bit of its memory has flipped, and nobody else is left who has the State."""
    flip = Flip(worker=workers, tensor="conv1.weight", phase="batch", step=8)
    doomed = with_kills(LateToDie(exact_programs.train, tmp_path, workers), [flip])
    result = run(tmp_path, doomed, workers, checkpoint=STORED)
    assert not resumptions(result.events)
    assert len([event for event in result.events if isinstance(event, Resumed)]) == 1
    causes = {e.worker: e.cause for e in result.events if isinstance(e, WorkerLost)}
    assert causes == {**dict.fromkeys(range(workers), "died"), workers: "diverged"}
    check(result, "convnet")


@functools.cache
def quiet_digests() -> dict[int, str]:
    """By step, of the States of the undisturbed run of one process."""
    with tempfile.TemporaryDirectory() as directory:
        every = CheckpointConfig(every_steps=1, keep_last=None)
        options = {"config": EXACT, "directory": Path(directory), "checkpoint": every}
        result = run_local(exact_programs.train, 1, exact=True, **options)
    return {e.step: e.digest for e in result.events if isinstance(e, StateStored)}


def stored(result) -> dict[int, StateStored]:
    """By step; all of an exact run have the bytes of the quiet one."""
    found = {event.step: event for event in result.events if isinstance(event, StateStored)}
    digests = {step: event.digest for step, event in found.items()}
    exact = any(isinstance(event, RunStarted) and event.exact for event in result.events)
    assert digests.items() <= quiet_digests().items() if exact else not any(digests.values())
    return found


@dataclass(frozen=True)
class UntilStored:
    """A train function at whose end the group waits until the State of a step is stored.

    Else it may still be on its way when the final one is stored, and is given up then.
    """

    train: Callable[[elastix.Context], None]
    step: int
    passed: int

    def __call__(self, ctx: elastix.Context) -> None:
        self.train(ctx)
        if ctx.rank >= 0:
            ctx._member._state.await_stored(CheckpointId(self.step, self.passed))


@dataclass(frozen=True)
class Witness:
    """A train function whose workers say at which steps they copy the State."""

    train: Callable[[elastix.Context], None]
    folder: Path

    def __call__(self, ctx: elastix.Context) -> None:
        def see(phase: str, number: int) -> None:
            if phase == "snapshot":
                (self.folder / f"{ctx.worker}-{number}").touch()

        ctx.on_phase(see)
        self.train(ctx)

    def copied(self, worker: int) -> set[int]:
        return {int(path.name.split("-")[1]) for path in self.folder.glob(f"{worker}-*")}


@pytest.mark.parametrize("workers", [1, 2])
def test_a_shadow_stores_what_is_due_and_the_group_copies_nothing(tmp_path, workers):
    witness = Witness(UntilStored(trainables.train, 14, 2), tmp_path)
    result = run(tmp_path, witness, workers, config=PLAIN, checkpoint=STORED, exact=False)
    by_shadow = witness.copied(workers)
    assert {8, 10, 12, 14} <= by_shadow
    for worker in range(workers):
        assert not witness.copied(worker) & by_shadow
    assert set(stored(result)) == {2, 4, 6, 8, 10, 12, 14, 15}
    assert_exactly_once(result.events, 3)


def test_what_a_shadow_does_not_live_to_store_the_group_stores(tmp_path):
    """It dies with the State in its hands; two workers are there, and go on."""
    kills = [Kill(worker=2, phase="snapshot", step=8)]
    doomed = with_kills(UntilStored(trainables.train, 14, 2), kills)
    options = {"config": {**PLAIN, "step_s": 0.3}, "checkpoint": STORED, "exact": False}
    result = run(tmp_path, doomed, replace=False, **options)
    assert lost(result.events) == {2}
    steps = stored(result).keys()
    assert steps & {8, 9, 10, 11}  # in time, or as soon as they hear of it
    assert {12, 14, 15} <= steps
    assert_exactly_once(result.events, 3)


def test_a_shadow_that_differs_stores_nothing(tmp_path):
    harm = [Flip(worker=2, tensor="conv1.weight", phase="batch", step=7)]
    witness = Witness(UntilStored(trainables.train, 14, 2), tmp_path)
    slow = {**PLAIN, "step_s": 0.3}  # so that the group has heard of it by step 10
    options = {"config": slow, "checkpoint": STORED, "exact": False}
    result = run(tmp_path, with_kills(witness, harm), **options)
    assert [e.worker for e in result.events if isinstance(e, ShadowDiffers)] == [2]
    assert {10, 12, 14, 15} <= set(stored(result))
    assert 8 not in witness.copied(2)


def test_of_an_exact_run_nothing_is_stored_that_nobody_has_compared(tmp_path):
    """A bit flips in the shadow at the very boundary at which a State is due."""
    harm = [Flip(worker=2, tensor="conv1.weight", phase="boundary", step=8)]
    doomed = with_kills(UntilStored(exact_programs.train, 14, 2), harm)
    result = run(tmp_path, doomed, config={"slow": 1}, checkpoint=STORED)
    assert [e.worker for e in result.events if isinstance(e, ShadowDiffers)] == [2]
    assert set(stored(result)) == {2, 4, 6, 8, 10, 12, 14, 15}
    check(result, "convnet")


def test_a_group_without_slices_goes_on_too(tmp_path):
    """A replay of all that was committed agrees with what came out."""
    config = {"model": "convnet", "samples": 300, "batch_size": 30, "epochs": 4}
    meeting = {"meeting": str(tmp_path), "shadow": 2}
    kills = [Kill(worker=worker, phase="bucket", step=20) for worker in (0, 1)]
    result = run_local(
        with_kills(trainables.train, kills),
        2,
        config={**config, **meeting, "log": str(tmp_path)},
        directory=tmp_path / "run",
        shadows=1,
        replace=True,
    )
    assert [(event.step, event.steps_lost) for event in resumptions(result.events)] == [(20, 0)]
    assert_exactly_once(result.events, 4)
    assert compare(tmp_path / "run").relative < 1e-9


@dataclass
class Assassin:
    """Kills all members of the group, so long after a step was journaled; nobody is told.

    It reads the events where the journal is written, so that it knows what was told by then.
    """

    step: int
    after_s: float

    def __post_init__(self) -> None:
        self.pids: dict[int, int] = {}
        self.told = 0
        self.struck_at = -1
        self._timer: threading.Timer | None = None

    def see(self, event: Event) -> None:
        if isinstance(event, WorkerStarted):
            self.pids[event.worker] = event.pid
        elif isinstance(event, StepCommitted):
            self.told = event.step
            if event.step == self.step:
                self._timer = threading.Timer(self.after_s, self.strike)
                self._timer.start()

    def strike(self) -> None:
        self.struck_at = self.told
        for worker in (0, 1, 2):
            os.kill(self.pids[worker], signal.SIGKILL)

    def wait(self) -> None:
        if self._timer is not None:
            self._timer.join()


def overhear(monkeypatch: pytest.MonkeyPatch, see: Callable[[Event], None]) -> None:
    emit = Events.emit

    def emit_and_tell(self: Events, event: Event) -> None:
        emit(self, event)
        see(event)

    monkeypatch.setattr(Events, "emit", emit_and_tell)


def strike_at_random(tmp_path, monkeypatch, seed):
    rng = random.Random(seed)
    assassin = Assassin(rng.randint(4, 11), rng.uniform(0.0, 0.06))
    with monkeypatch.context() as patch:  # not the quiet run that it is compared with
        overhear(patch, assassin.see)
        stores = {"checkpoint": STORED} if seed % 2 else {}  # which it is in the middle of, maybe
        result = run(tmp_path, exact_programs.train, 3, **stores)
        assassin.wait()
    assert assassin.struck_at >= assassin.step
    (resumed,) = resumptions(result.events)
    assert resumed.steps_lost == 0
    assert resumed.step >= assassin.struck_at
    assert not [event for event in result.events if isinstance(event, Resumed)]
    assert stored(result)
    check(result, "convnet")


@pytest.mark.fast("0")
@pytest.mark.parametrize("seed", range(3))
def test_all_are_killed_at_a_random_moment(tmp_path, monkeypatch, seed):
    """What the journal was told is in the State that the run goes on from (law 5 of the design)."""
    strike_at_random(tmp_path, monkeypatch, seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3, 23))
def test_all_are_killed_at_twenty_random_moments(tmp_path, monkeypatch, seed):
    strike_at_random(tmp_path, monkeypatch, seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(30))
def test_whatever_is_stored_by_whom_has_the_bytes_of_the_quiet_run(tmp_path, seed):
    """Workers, shadows and those that come in their place are killed anywhere."""
    draws = random.Random(seed)
    workers, shadows = draws.randint(1, 3), draws.randint(1, 2)
    phases = ("slice", "bucket", "round", "left", "boundary", "snapshot", "batch")
    doomed = draws.sample(range(workers + shadows + 2), draws.randint(0, workers + shadows))
    kills = [Kill(worker=w, phase=draws.choice(phases), step=draws.randint(4, 14)) for w in doomed]
    result = run(
        tmp_path,
        with_kills(exact_programs.train, kills),
        workers,
        config={"slow": 1},
        shadows=shadows,
        recovery=draws.choice(("forward", "forward", "rollback")),
        checkpoint=CheckpointConfig(every_steps=draws.choice((1, 2, 3, 5)), keep_last=None),
    )
    assert stored(result)
    check(result, "convnet")


@dataclass(frozen=True)
class Seated:
    """A train function in which a member dies, a shadow takes its seat, and then all others die.

    Each waits for what it needs: a shadow that was found equal, a seat that is agreed on.

    Attributes:
        folder: where workers leave signs for each other.
    """

    train: Callable[[elastix.Context], None]
    folder: Path

    def __call__(self, ctx: elastix.Context) -> None:
        member = ctx._member
        member, doomed = ctx._member, set()

        def told(equal: bool) -> None:
            if equal:
                (self.folder / f"level-{ctx.worker}").touch()

        def agreed() -> bool:
            """The shadow is in, or is going to be at the next boundary."""
            proposed = member._inbox.proposed
            there = 1 not in member._driver.present and member.world_size == 2
            return there or (proposed.size == 2 and member._driver._connected(proposed))

        def see(phase: str, number: int) -> None:
            if member.watching:
                return
            if phase == "boundary" and number in (3, 4, 5, 11, 12, 13):
                self.usher(member, number % 8 - 3, 1 if number < 8 else 2)
                doomed.update({7} if number == 5 else {13} if number == 11 else ())
            if phase == "boundary" and number == 9:
                member._inbox.wait(agreed)
            if phase == "slice" and ctx.step in doomed and (ctx.step == 13 or ctx.worker == 1):
                os.kill(os.getpid(), signal.SIGKILL)

        trainables.tell_level(ctx, told)
        ctx.on_phase(see)
        self.train(ctx)

    def usher(self, member, since: int, shadows: int) -> None:
        """In three steps: until a shadow follows, asks whether it is equal, and knows."""
        followers = lambda: trainables.subscribers(member)  # noqa: E731
        level = lambda: len(list(self.folder.glob("level-*"))) >= shadows  # noqa: E731
        while not level():
            if since < 2 and (member.rank or (followers() and not since)):
                return
            if since == 1 and followers() and all(s.wants_digest for s in followers()):
                return
            time.sleep(0.005)


def test_a_shadow_takes_a_seat_with_what_it_has_and_the_spare_is_the_shadow_then(tmp_path):
    """Nothing is copied when it comes in; and when all die after that, no step is lost."""
    seated = Seated(exact_programs.train, tmp_path)
    result = run(tmp_path, seated, config={"holds": {"2": [2, 3]}, "shadow": None}, spares=1)
    (join,) = [join for join in joins(result.events) if join.step < 13]
    assert join.worker in (2, 3)
    assert join.copy_bytes == 0
    assert join.watched_steps > 0
    given = [e for e in result.events if isinstance(e, GenerationFormed) and e.cause == "join"]
    assert set(given[0].members) == {0, join.worker}
    (resumed,) = resumptions(result.events)
    assert {resumed.worker, join.worker} == {2, 3}
    assert (resumed.steps_lost, resumed.equal) == (0, True)
    check(result, "convnet")
