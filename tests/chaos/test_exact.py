"""exact=True: whatever befalls a run, its State has the bytes of the quiet run of one process."""

import functools
import random
from dataclasses import dataclass
from signal import SIGKILL, SIGTERM

import pytest
import torch

from elastix.config import CheckpointConfig, Guard
from elastix.data.cursor import count
from elastix.errors import ConfigError, TrainError
from elastix.events import (
    Resumed,
    SlicesHandedOver,
    StepVoided,
    WorkerLost,
)
from elastix.testing import exact_replay
from elastix.testing.chaos import Flip, Kill, with_kills
from elastix.testing.local import run_local
from elastix.testing.replay import compare, main
from elastix.train.replica import member
from tests.exact_programs import train
from tests.laws import assert_exactly_once, committed
from tests.laws import joins as entries
from tests.run_bytes import final, kept, steps_of

EPOCHS = 3
PROGRAMS = {
    "mlp": {"model": "mlp", "epochs": EPOCHS},
    "convnet": {"model": "convnet", "jitter": True, "epochs": EPOCHS},
    "transformer": {"model": "tied", "epochs": EPOCHS},
    "processes": {"model": "convnet", "jitter": True, "num_workers": 2, "epochs": EPOCHS},
}


@functools.cache
def quiet(program):
    """What the undisturbed run of one process leaves, and its steps' samples."""
    directory = kept()
    result = run_local(train, 1, config=PROGRAMS[program], directory=directory, exact=True)
    return final(result), steps_of(result.events)


def check(result, program):
    (digest, tensors), steps = quiet(program)
    found, ours = final(result)
    assert sorted(ours) == sorted(tensors)
    apart = [name for name in tensors if not torch.equal(ours[name], tensors[name])]
    assert not apart, f"other bytes than in the quiet run: {apart}"
    assert found == digest
    assert_exactly_once(result.events, EPOCHS)
    assert steps_of(result.events) == steps


@pytest.mark.fast("1-mlp", "2-transformer", "2-processes", "3-mlp", "3-convnet", "3-transformer")
@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_any_number_of_workers_gives_the_same_bytes(tmp_path, program, workers):
    check(
        run_local(train, workers, config=PROGRAMS[program], directory=tmp_path, exact=True), program
    )


@pytest.mark.fast(
    "slice-memory",
    "slice-sockets",
    "bucket-sockets",
    "round-memory",
    "left-sockets",
    "boundary-memory",
)
@pytest.mark.parametrize("shared", [True, False], ids=["memory", "sockets"])
@pytest.mark.parametrize("phase", ["slice", "bucket", "round", "left", "boundary"])
def test_a_loss_anywhere_in_a_step_leaves_the_same_bytes(tmp_path, phase, shared):
    # Whoever is slow on a busy machine may have no slice later on.
    step = 0 if phase == "slice" else 3
    doomed = with_kills(train, [Kill(worker=1, phase=phase, step=step)])
    options = {"config": PROGRAMS["mlp"], "directory": tmp_path, "shared": shared}
    result = run_local(doomed, 3, exact=True, **options)
    assert set(result.lost) == {1}
    check(result, "mlp")


def test_all_are_lost_and_the_run_goes_on_from_what_was_stored(tmp_path):
    kills = [Kill(worker=worker, phase="bucket", step=7) for worker in (0, 1)]
    result = run_local(
        with_kills(train, kills),
        2,
        config=PROGRAMS["convnet"],
        directory=tmp_path,
        replace=True,
        checkpoint=CheckpointConfig(every_steps=3),
        exact=True,
    )
    assert [event.step for event in result.events if isinstance(event, Resumed)] == [6]
    check(result, "convnet")


def test_without_it_the_order_of_sums_shows_in_the_bytes(tmp_path):
    """Nothing random is in this program but its initial weights."""
    config = {"model": "tied", "noise": False}
    found = {}
    for exact in (False, True):
        for workers in (1, 3):
            where = tmp_path / f"{exact}-{workers}"
            result = run_local(train, workers, config=config, directory=where, exact=exact)
            found[exact, workers] = final(result)[1]["embed.weight"]
    assert not torch.equal(found[False, 1], found[False, 3])
    assert torch.equal(found[True, 1], found[True, 3])


def run(directory, kills, program="mlp", workers=3, **options):
    doomed = with_kills(train, kills)
    config = {**PROGRAMS[program], **options.pop("config", {})}
    return run_local(doomed, workers, config=config, directory=directory, exact=True, **options)


def test_a_second_worker_dies_while_it_computes_what_the_first_has_left(tmp_path):
    kills = [  # in the first step, before anybody is known to be slow: its heirs are 3 and 4
        Kill(worker=1, phase="slice", after=1),
        *(Kill(worker=w, phase="handed") for w in (2, 3)),
    ]
    result = run(tmp_path, kills, workers=5)
    assert 1 in result.lost
    assert len(result.lost) > 1
    check(result, "mlp")


def test_a_worker_leaves_and_another_follows_from_outside(tmp_path):
    ushered = {"meeting": str(tmp_path), "ushers": {"3": 5}, "leaver": 0}
    kills = [Kill(worker=0, phase="round", step=2, signal=SIGTERM)]
    result = run(tmp_path / "run", kills, config=ushered, spares=1, max_workers=4)
    assert [join.worker for join in entries(result.events)] == [3]
    check(result, "mlp")


def test_slow_workers_are_given_less_and_nothing_changes(tmp_path):
    result = run(tmp_path, [], config={"slow": 1}, workers=3)
    batches = [batch for step in committed(result.events) for batch in step.batches]
    had = [count(batch.shares.get(1, ())) for batch in batches if batch.samples == 24]
    assert min(had) < had[0] == 9
    check(result, "mlp")


def test_a_step_that_is_done_again_has_the_same_bytes(tmp_path):
    kills = [Kill(worker=1, phase="bucket", step=3)]
    check(run(tmp_path, kills, "convnet", recovery="rollback"), "convnet")


def test_a_bit_that_flips_is_found_and_the_bytes_are_those_of_the_quiet_run(tmp_path):
    flip = Flip(worker=1, tensor="embed.weight", phase="slice", step=3, byte=2, bit=5)
    equal = {"equal_shares": True}
    result = run(tmp_path, [flip], "transformer", config=equal, replace=True)
    assert [(e.worker, e.cause) for e in result.events if isinstance(e, WorkerLost)] == [
        (1, "diverged")
    ]
    check(result, "transformer")


def test_a_batch_that_the_guard_leaves_out_is_left_out_by_any_number_of_workers(tmp_path):
    found = []
    for workers, kills in ((1, []), (3, [Kill(worker=1, phase="slice", step=2)])):
        where = tmp_path / str(workers)
        config = {"jitter": False, "spoiled": 17}
        result = run(where, kills, "convnet", workers, config=config, guard=Guard())
        assert len([e for e in result.events if isinstance(e, StepVoided)]) == EPOCHS
        assert compare(where).apart == ()
        found.append(final(result)[0])
    assert found[0] == found[1]


def test_all_are_lost_after_a_batch_that_the_guard_has_left_out(tmp_path):
    """Who goes back to before it does not try it again: nothing else is different."""
    config = {"jitter": False, "spoiled": 17}
    alone = run(tmp_path / "quiet", [], "convnet", 1, config=config, guard=Guard())
    _, void, _ = (event.step for event in alone.events if isinstance(event, StepVoided))
    result = run(
        tmp_path / "lost",
        [Kill(worker=worker, phase="bucket", step=void) for worker in (0, 1)],
        "convnet",
        2,
        config=config,
        guard=Guard(),
        replace=True,
        checkpoint=CheckpointConfig(every_steps=void - 1),
    )
    assert [event.step for event in result.events if isinstance(event, Resumed)] == [void - 1]
    assert len([e for e in result.events if isinstance(e, StepVoided)]) == EPOCHS
    assert final(result)[0] == final(alone)[0]


def of_another_kind(ctx):
    """The third worker computes with something else than the two that began."""
    if ctx.worker == 2:
        member.computes_with = lambda _device: "an abacus"
    train(ctx)


@pytest.mark.parametrize("later", ["spares", "shadows"])
def test_who_computes_with_something_else_is_refused_by_name_even_as_a_shadow(tmp_path, later):
    config = {**PROGRAMS["mlp"], "meeting": str(tmp_path), "holds": {"2": [2]}}
    options = {"max_workers": 3, "replace": True, "exact": True, later: 1}
    with pytest.raises(ConfigError, match="worker 2: an abacus"):
        run_local(of_another_kind, 2, config=config, directory=tmp_path / "run", **options)


PHASES = ("slice", "slice", "bucket", "filled", "round", "left", "boundary", "evaluate", "handed")


@dataclass(frozen=True)
class Schedule:
    """A program, a world, who is killed where, and for which newcomers is waited when."""

    program: str
    workers: int
    kills: tuple[Kill, ...]
    joins: int
    options: dict

    @classmethod
    def drawn(cls, seed):
        draws = random.Random(seed)
        workers, joins = draws.randint(1, 5), draws.randint(0, 2)
        lost = draws.randint(min(1, workers - 1), workers - 1)
        kills = [cls._kill(draws, worker) for worker in draws.sample(range(workers), lost)]
        if joins and draws.random() < 0.4:  # the first to join does not live long either
            kills.append(Kill(worker=workers, phase=draws.choice(("take", "slice", "enter"))))
        recovery = "rollback" if draws.random() < 0.15 else "forward"
        options = {"shared": draws.random() < 0.7, "recovery": recovery}
        options["recompute_every"] = draws.choice((1, 2, 200))
        return cls(draws.choice(sorted(PROGRAMS)), workers, tuple(kills), joins, options)

    @staticmethod
    def _kill(draws, worker):
        return Kill(
            worker=worker,
            phase=draws.choice(PHASES),
            step=draws.randrange(12),
            after=draws.randrange(2),
            signal=SIGTERM if draws.random() < 0.15 else SIGKILL,
        )

    @property
    def holds(self):
        """By step, the newcomers to wait for."""
        return {str(3 * (n + 1)): [self.workers + n] for n in range(self.joins)}


@pytest.mark.parametrize(
    "seed",
    # In 17 a joiner loses its donor, and begins anew in an epoch that its loop is not in.
    [0, 17, *(pytest.param(s, marks=pytest.mark.slow) for s in range(56) if s not in (0, 17))],
)
def test_law_1_any_schedule_of_losses_and_joins_leaves_the_bytes_of_the_quiet_run(tmp_path, seed):
    what = Schedule.drawn(seed)
    result = run(
        tmp_path / "run",
        what.kills,
        what.program,
        what.workers,
        config={"holds": what.holds, "meeting": str(tmp_path)},
        spares=what.joins,
        max_workers=what.workers + what.joins,
        replace=True,
        **what.options,
    )
    print(
        f"{what.program}, {what.workers} workers, lost {sorted(result.lost)}, "
        f"joined {len(entries(result.events))}, handed over {handed_over(result.events)} slices"
    )
    check(result, what.program)
    assert compare(tmp_path / "run").apart == ()


def handed_over(events):
    return sum(n for e in events if isinstance(e, SlicesHandedOver) for *_, n in e.moved)


# ------------------------------------------------------------------------------------- replay


def test_a_replay_of_an_exact_run_has_the_same_bytes_dropout_and_augmentation_included(tmp_path):
    result = run(tmp_path, [Kill(worker=1, phase="bucket", step=3)], "processes")
    assert set(result.lost) == {1}
    found = compare(tmp_path)
    assert (found.apart, found.relative, str(found)) == ((), 0.0, "to the last bit")
    assert main([str(tmp_path)]) == 0


def test_a_replay_finds_a_single_bit_that_nobody_else_could(tmp_path, capsys):
    flip = Flip(worker=0, tensor="embed.weight", phase="slice", step=3)
    run(tmp_path, [flip], "transformer", workers=1)
    assert "embed.weight" in compare(tmp_path).apart
    assert main([str(tmp_path)]) == 1
    assert "DIFFERENT after 15 steps: other bytes in " in capsys.readouterr().out


def test_a_replay_goes_as_far_as_the_state_that_was_stored_last(tmp_path):
    """The run ended with an error in its tenth step; what it stored last is of the ninth."""
    with pytest.raises(TrainError, match="enough"):
        run(tmp_path, [], config={"fails_at": 9}, checkpoint=CheckpointConfig(every_steps=3))
    found = compare(tmp_path)
    assert (found.steps, found.apart) == (9, ())


def test_a_replay_on_another_machine_says_so(tmp_path, monkeypatch):
    run(tmp_path, [], workers=1)
    monkeypatch.setattr(exact_replay, "computes_with", lambda _device: "an abacus")
    with pytest.raises(TrainError, match="here is an abacus"):
        compare(tmp_path)
