"""A bit flips in a State that is compared in parts, outside of the part whose turn it is.

Until that is found the worker computes gradients from it, and all take them over. So an exact run
goes back to where all were seen to hold the same, and ends with the bytes of the quiet run.
"""

import math
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import elastix
from elastix.comm.network.catch_up_stream import CatchUpReceiver
from elastix.comm.protocol.calls import OperationKind
from elastix.comm.protocol.catch_up_messages import Watched
from elastix.config import CheckpointConfig, Guard
from elastix.data.audit import audit
from elastix.errors import ReplicasDiffer
from elastix.events import (
    ReplicasDiverged,
    Resumed,
    ResumedFromShadow,
    SamplesLeftOut,
    WorkerLost,
)
from elastix.observe.event_text import line
from elastix.testing.chaos import Flip, Kill, with_kills
from elastix.testing.local import run_local
from elastix.train.replica.sentinel import SMALL
from elastix.train.replica.sliced_step import Slices
from elastix.train.replica.vote import decode
from tests.run_bytes import final, steps_of
from tests.trainables import samples, shadow_hold, subscribers

STEPS = 20
LAST = 4 * 512 * 512 - 1  # byte of the head's weights: there its highest bits are
EARLY = Flip(worker=1, tensor="4.weight", phase="bucket", step=1, byte=LAST)
"""The end of the head's weights is compared in the fifth step for the first time."""
MOMENT = "@optimizer/state/4.weight/exp_avg_sq"
LATE = Flip(worker=1, tensor=MOMENT, phase="bucket", step=9, byte=LAST)
"""What the optimizer has of them comes last in the pass, in the fourteenth step."""
NEVER = Flip(worker=1, tensor="1.bias", phase="bucket", step=9, byte=3)
"""What the pass began with is not compared again before the minute is over."""


def train(ctx):
    """With `equal_shares` each worker has slices in each step, also one that is slow.

    A bit of the worker `parts_at_the_end` flips after the last step.
    """
    if ctx.config.get("equal_shares"):
        Slices.measured = lambda *_: None
    width = ctx.config.get("width", 512)
    model = torch.nn.Sequential(
        torch.nn.Flatten(),
        torch.nn.Linear(64, width),
        torch.nn.Tanh(),
        torch.nn.Dropout(0.1),
        torch.nn.Linear(width, width),
    )
    held = 3 * sum(parameter.nbytes for parameter in model.parameters())
    assert (held > 10 * SMALL) == (width == 512)
    model, optimizer = ctx.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    for epoch in ctx.loader(samples(96), batch_size=24, slices=8).epochs(STEPS // 4):
        for step in epoch:
            for x, y in step:
                F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            ctx.report(step=ctx.step)
    if ctx.config.get("parts_at_the_end") == ctx.worker:
        model[1].bias.data.view(torch.int32)[0] ^= 1


def reads(ctx):
    """Words, the last of which is in the third batch alone, and in all of its slices."""
    model = torch.nn.Sequential(
        torch.nn.Embedding(512, 512), torch.nn.Flatten(), torch.nn.Linear(512, 10)
    )
    model, optimizer = ctx.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    words = torch.arange(192).view(192, 1) % 96
    words[48:72] = 511
    text = torch.utils.data.TensorDataset(words, torch.arange(192) % 10)
    for epoch in ctx.loader(text, batch_size=24, slices=8, shuffle=False).epochs(2):
        for step in epoch:
            for x, y in step:
                F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()


def run(directory, *faults, function=train, workers=3, every=None, **options):
    options = {"replace": True, "min_workers": workers, "exact": True, **options}
    checkpoint = CheckpointConfig(every_steps=every)
    doomed = with_kills(function, faults)
    return run_local(doomed, workers, directory=directory, checkpoint=checkpoint, **options)


def of(kind, result):
    return [event for event in result.events if isinstance(event, kind)]


@pytest.fixture(scope="module")
def quiet(tmp_path_factory):
    """The digest at the end of the undisturbed run of one process, and its steps' samples."""
    result = run(tmp_path_factory.mktemp("quiet"), workers=1)
    return final(result)[0], steps_of(result.events)


def check(result, quiet):
    assert (final(result)[0], steps_of(result.events)) == quiet
    found = audit(result.events)
    assert found.exact
    assert found.replicas.equal
    assert "may be in it" not in str(found)


@pytest.mark.parametrize(
    ("flip", "every", "found_after", "goes_on_from"),
    [(EARLY, None, 4, 0), (LATE, 8, 13, 8), (NEVER, 8, 16, 8), (NEVER, None, STEPS, 0)],
    ids=["no State stored", "in a step", "in a State to be stored", "in the last State"],
)
def test_what_was_computed_from_it_is_computed_again(
    tmp_path, quiet, flip, every, found_after, goes_on_from
):
    result = run(tmp_path, flip, every=every)
    (found,) = of(ReplicasDiverged, result)
    assert (found.step, found.apart, found.cure, found.unseen) == (
        found_after,
        (1,),
        "went back",
        True,
    )
    assert found.parts == ("optimizer",) if flip is LATE else ("model",)
    (resumed,) = of(Resumed, result)
    assert resumed.step == goes_on_from
    # While States are compared that are to be stored, the run goes on.
    assert resumed.again >= found_after - goes_on_from
    assert f"{resumed.again} steps are computed again" in line(resumed)[0]
    assert not of(WorkerLost, result)
    check(result, quiet)


def test_it_may_show_first_in_a_slice_that_is_computed_twice(tmp_path, quiet):
    result = run(tmp_path, EARLY, recompute_every=1, config={"equal_shares": True})
    (found,) = of(ReplicasDiverged, result)
    assert found.step < 4
    assert (found.apart, found.cure, found.unseen) == ((1,), "went back", True)
    assert "gradients" in found.parts
    check(result, quiet)


def test_what_the_guard_has_left_out_for_it_is_used(tmp_path):
    """The batch is the only one in which the bit tells, and there was nothing wrong with it."""
    flip = Flip(worker=1, tensor="0.weight", phase="bucket", step=0, byte=LAST, bit=6)
    options = {"function": reads, "guard": Guard(warmup=2), "recompute_every": None}
    result = run(tmp_path / "run", flip, **options)
    assert [event.step for event in of(SamplesLeftOut, result)] == [2]
    assert [event.apart for event in of(ReplicasDiverged, result)] == [(1,)]
    assert [event.step for event in of(Resumed, result)] == [0]
    quiet = run(tmp_path / "quiet", workers=1, **options)
    check(result, (final(quiet)[0], steps_of(quiet.events)))


def test_it_may_flip_after_the_last_step_of_which_a_state_is_stored(tmp_path, quiet):
    """All go back to that, and store it once more."""
    result = run(tmp_path, every=STEPS, config={"parts_at_the_end": 1})
    (found,) = of(ReplicasDiverged, result)
    assert (found.step, found.apart, found.unseen) == (STEPS, (1,), True)
    assert [(event.step, event.again) for event in of(Resumed, result)] == [(STEPS, 0)]
    check(result, quiet)


def test_two_bits_in_two_workers(tmp_path, quiet):
    """The second is found when the run has come to its step once more."""
    flips = [EARLY, Flip(worker=4, tensor=MOMENT, phase="bucket", step=9, byte=LAST)]
    result = run(tmp_path, *flips, every=8)
    assert [event.apart for event in of(ReplicasDiverged, result)] == [(1,), (4,)]
    assert [event.step for event in of(Resumed, result)] == [0, 8]
    check(result, quiet)


@pytest.mark.parametrize("phase", ["left", "round"])
def test_the_one_that_parted_may_die_before_it_is_named(tmp_path, quiet, phase):
    """What it had computed is in the State of the others. In the vote itself nobody hears of it."""
    kill = Kill(worker=1, phase=phase, step=4, detail=6 if phase == "round" else 1)
    result = run(tmp_path, EARLY, kill)
    (found,) = of(ReplicasDiverged, result)
    assert (found.step, found.workers, found.apart, found.parts) == (4, (0, 2), (1,), ())
    assert "workers 1 were lost before all told" in line(found)[0]
    assert [event.step for event in of(Resumed, result)] == [0]
    check(result, quiet)


def test_of_two_one_may_die_before_anybody_knows_which_is_right(tmp_path, quiet):
    result = run(tmp_path, EARLY, Kill(worker=0, phase="left", step=4, detail=1), workers=2)
    assert [(event.workers, event.apart) for event in of(ReplicasDiverged, result)] == [
        ((1,), (0,))
    ]
    check(result, quiet)


def test_two_workers_of_which_nobody_can_say_who_is_right_begin_anew(tmp_path):
    """No State is stored. It is found at once, as all of a small State is compared in each step."""
    config = {"width": 16}
    flip = Flip(worker=1, tensor="4.weight", phase="bucket", step=3, byte=3)
    result = run(tmp_path / "run", flip, workers=2, config=config)
    assert [(event.step, event.apart) for event in of(ReplicasDiverged, result)] == [(3, (0, 1))]
    assert [(event.step, event.again) for event in of(Resumed, result)] == [(0, 3)]
    assert final(result)[0] == final(run(tmp_path / "quiet", workers=1, config=config))[0]


@dataclass(frozen=True)
class SaidByNobody:
    """A train function whose workers die as they are to say that they have parted.

    Not before the shadow, which is worker 2, has followed until there.
    """

    train: Callable[[elastix.Context], None]
    folder: Path
    shadows: int = 1

    def __call__(self, ctx: elastix.Context) -> None:
        hold, seen, steps = shadow_hold(ctx), self.folder / "seen", ctx._member._steps
        part = steps._part

        def look(*found, **more):
            while ctx.worker < 2 and not seen.exists():
                time.sleep(0.005)
            if ctx.worker < 2:
                os.kill(os.getpid(), signal.SIGKILL)
            part(*found, **more)
            seen.touch()

        steps._part = look
        ctx.on_phase(lambda phase, _: self._await_all(ctx, hold) if phase == "boundary" else None)
        if ctx.worker == 3:
            CatchUpReceiver._append = _unless_parted(CatchUpReceiver._append)
        self.train(ctx)

    def _await_all(self, ctx: elastix.Context, hold: Callable[[], None]) -> None:
        """Worker 0 goes on when all shadows follow it, and have what they were given."""
        hold()
        while ctx.worker == 0 and ctx.step in (4, 6):
            followers = [s for s in subscribers(ctx._member) if not s.closed]
            if len(followers) == self.shadows and (
                ctx.step == 4 or not any(math.isinf(s.holds) for s in followers)
            ):
                return
            time.sleep(0.005)


def _unless_parted(append):
    """A shadow's donor dies when it has told another shadow that they have parted, and not this."""

    def heard(self, told, size):
        if (
            isinstance(told, Watched)
            and told.kind == OperationKind.STEP
            and not decode(told.result.tolist()).equal
        ):
            self.close()
        else:
            append(self, told, size)

    return heard


def test_a_shadow_does_not_go_on_where_all_have_parted_and_died_before_they_said_so(
    tmp_path, quiet
):
    """What it had taken over from them was computed from what is wrong."""
    config = {"equal_shares": True, "shadow": 2, "meeting": str(tmp_path)}
    doomed, options = SaidByNobody(train, tmp_path), {"shadows": 1, "every": 8}
    result = run(tmp_path / "run", LATE, function=doomed, workers=2, config=config, **options)
    assert not of(ResumedFromShadow, result)
    assert [(event.apart, event.cure) for event in of(ReplicasDiverged, result)] == [
        ((0, 1), "went back")
    ]
    (resumed,) = of(Resumed, result)
    assert resumed.step in (0, 8)
    check(result, quiet)


def test_nor_does_another_shadow_that_has_not_heard_of_it(tmp_path, quiet):
    """What it has taken over was computed from the same, and it does not differ from theirs."""
    config = {"equal_shares": True, "shadow": 2, "meeting": str(tmp_path)}
    doomed, options = SaidByNobody(train, tmp_path, shadows=2), {"shadows": 2, "every": 8}
    result = run(tmp_path / "run", LATE, function=doomed, workers=2, config=config, **options)
    assert not of(ResumedFromShadow, result)
    (resumed,) = of(Resumed, result)
    assert resumed.step in (0, 8)
    check(result, quiet)


def test_who_is_left_alone_may_be_the_one_whose_bit_has_flipped(tmp_path):
    """Though all of a small State is compared in each step."""
    config = {"width": 16}
    flip = Flip(worker=1, tensor="4.weight", phase="bucket", step=3, byte=3)
    kill = Kill(worker=0, phase="left", step=3, detail=1)
    result = run(tmp_path / "run", flip, kill, workers=2, every=2, config=config)
    assert [(event.workers, event.apart) for event in of(ReplicasDiverged, result)] == [
        ((1,), (0,))
    ]
    assert [event.step for event in of(Resumed, result)] == [2]
    assert final(result)[0] == final(run(tmp_path / "quiet", workers=1, config=config))[0]


def test_it_ends_with_an_error_where_nobody_can_be_started(tmp_path):
    with pytest.raises(ReplicasDiffer, match="nobody who could"):
        run(tmp_path, EARLY, replace=False, min_workers=1)


def test_it_ends_with_an_error_if_it_comes_again_each_time(tmp_path):
    """Code that treats workers differently would have it go back for ever."""
    flips = [
        Flip(worker=w, tensor="4.weight", phase="bucket", step=1, byte=LAST) for w in (1, 4, 7)
    ]
    with pytest.raises(ReplicasDiffer, match="again and again"):
        run(tmp_path, *flips)


def test_a_run_that_is_not_exact_goes_on_without_that_worker(tmp_path):
    result = run(tmp_path, EARLY, exact=False)
    assert [(event.cure, event.unseen) for event in of(ReplicasDiverged, result)] == [
        ("evicted", False)
    ]
    assert not of(Resumed, result)
    assert audit(result.events).replicas.equal


def test_who_was_given_a_state_says_nothing_for_its_donor(tmp_path):
    """The bit has flipped before, and is compared in the first step of the newcomer.

    Two would hold it, and the third not: that one is right.
    """
    flip = Flip(worker=0, tensor=MOMENT, phase="bucket", step=9, byte=460_003)
    kill = Kill(worker=2, phase="bucket", step=10)
    result = run(tmp_path, flip, kill, exact=False, every=8)
    (found,) = of(ReplicasDiverged, result)
    assert (found.step, found.workers, found.apart, found.cure) == (
        11,
        (0, 1, 3),
        (0, 1, 3),
        "went back",
    )
    assert [event.step for event in of(Resumed, result)] == [8]
    assert audit(result.events).replicas.equal
