"""A batch in slices, alone in a process: the same as plain torch that adds gradients up."""

import contextlib
import itertools
import operator

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from elastix.data.audit import audit
from elastix.errors import ConfigError
from elastix.events import StepCommitted
from elastix.train.replica.solo import run_alone
from tests.unit.train.solo import solo

WIDTH, SAMPLES, BATCH, SLICES = 6, 70, 16, 4  # the last batch has 6 samples, in slices of two


def data():
    generator = torch.Generator().manual_seed(5)
    x = torch.rand(SAMPLES, WIDTH, generator=generator, dtype=torch.float64)
    return TensorDataset(x, (x.sum(1) * 3).long() % 3)


def build(norm=False):
    torch.manual_seed(1)
    layers = [nn.Linear(WIDTH, 8, bias=not norm), *([nn.BatchNorm1d(8)] if norm else []), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(8, 3)).double()


def run(tmp_path, train, **config):
    events = []
    settings = solo(tmp_path)
    config.setdefault("models", [])
    outcome = run_alone(train, config, settings, events.append)
    if outcome.error is not None:
        raise outcome.error
    assert outcome.kind == "finished", outcome.traceback
    return config["models"], events


def prepared(ctx, norm=False, **options):
    model = build(norm)
    ctx.config["models"].append(model)
    model, optimizer = ctx.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.05))
    options = {"batch_size": BATCH, "slices": SLICES, "shuffle": False, **options}
    return model, optimizer, ctx.loader(data(), **options)


def train(ctx):
    model, optimizer, loader = prepared(ctx, ctx.config.get("norm", False))
    for epoch in loader.epochs(2):
        for step in epoch:
            for x, y in step:
                F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()


def plain(norm=False, passes=1):
    """Slices one after the other, each from the buffers of the step's beginning."""
    model = build(norm)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for _ in range(2):
        for x, y in DataLoader(data(), batch_size=BATCH):
            before = [b.clone() for b in model.buffers()]
            moved = [torch.zeros_like(b) for b in before]
            size = -(-len(x) // SLICES)
            sizes = [2, 2, 2] if len(x) == 6 else [size] * SLICES
            for u, v in zip(x.split(sizes), y.split(sizes), strict=True):
                for _ in range(passes):
                    (F.cross_entropy(model(u), v) * (len(u) / len(x))).backward()
                for b, was, move in zip(model.buffers(), before, moved, strict=True):
                    floats = b.is_floating_point()
                    move += (b - was) * (len(u) / len(x)) if floats else (b - was) - move
                    b.copy_(was)
            for b, move in zip(model.buffers(), moved, strict=True):
                b += move
            optimizer.step()
            optimizer.zero_grad()
    return model


def close(model, expected):
    for mine, theirs in zip(
        model.state_dict().values(), expected.state_dict().values(), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("norm", [False, True])
def test_it_gives_what_plain_torch_gives(tmp_path, norm):
    (model,), events = run(tmp_path, train, norm=norm)
    close(model, plain(norm))
    steps = [event for event in events if isinstance(event, StepCommitted)]
    assert len(steps) == 10
    assert audit(events).exact


def several_passes(ctx):
    model, optimizer, loader = prepared(ctx)
    for epoch in loader.epochs(2):
        for step in epoch:
            for x, y in step:
                F.cross_entropy(model(x), y).backward()
                F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()


def test_a_slice_may_have_several_passes(tmp_path):
    (model,), _ = run(tmp_path, several_passes)
    close(model, plain(passes=2))


def never_zeroed(ctx):
    """Gradients of all steps add up, as torch lets them."""
    model, optimizer, loader = prepared(ctx, slices=ctx.config["slices"])
    for epoch in loader.epochs(1):
        for step in epoch:
            if ctx.config["slices"] is None:
                x, y = step
                F.cross_entropy(model(x), y).backward()
            else:
                for x, y in step:
                    F.cross_entropy(model(x), y).backward()
            optimizer.step()


@pytest.mark.parametrize("slices", [1, 4, None])
def test_gradients_of_the_step_before_are_refused(tmp_path, slices):
    """A run that goes on from a State of between would not have them."""
    with pytest.raises(ConfigError, match="begins with the gradients of the step before"):
        run(tmp_path, never_zeroed, slices=slices)


def zeroed_in_place(ctx):
    model, optimizer, loader = prepared(ctx)
    for epoch in loader.epochs(2):
        for step in epoch:
            optimizer.zero_grad(set_to_none=False)
            for x, y in step:
                F.cross_entropy(model(x), y).backward()
            optimizer.step()


def test_gradients_may_be_zeroed_in_place(tmp_path):
    (model,), _ = run(tmp_path, zeroed_in_place)
    close(model, plain())


def stops_early(ctx):
    model, optimizer, loader = prepared(ctx)
    for epoch in loader.epochs(2):
        for step in itertools.islice(epoch, 2):
            for x, y in step:
                F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        for _step in epoch:
            break  # drawn, and nothing done with it


def test_a_step_that_nothing_was_done_with_comes_again(tmp_path):
    _, events = run(tmp_path, stops_early)
    found = audit(events)
    assert (found.exact, found.steps) == (True, 4)
    shares = [e.batches[0].shares[0] for e in events if isinstance(e, StepCommitted)]
    assert shares[:3] == [((0, 16),), ((16, 32),), ((32, 48),)]


# ------------------------------------------------------------------ bad use


def body(ctx):
    model, optimizer, loader = prepared(ctx, **ctx.config.get("options", {}))
    for epoch in loader.epochs(1):
        for step in epoch:
            ctx.config["does"](ctx, model, optimizer, step)


def backward(model, x, y):
    F.cross_entropy(model(x), y).backward()


def unpacks(ctx, model, optimizer, step):
    x, y = step
    backward(model, x, y)


def feeds_the_step(ctx, model, optimizer, step):
    model(step)


def indexes(ctx, model, optimizer, step):
    step[0]


def moves(ctx, model, optimizer, step):
    step.to("cpu")


def iterates_twice(ctx, model, optimizer, step):
    for _ in range(2):
        for x, y in step:
            backward(model, x, y)


def breaks(ctx, model, optimizer, step):
    for x, y in step:
        backward(model, x, y)
        break
    optimizer.step()


def breaks_and_goes_on(ctx, model, optimizer, step):
    for x, y in step:
        backward(model, x, y)
        break


def leaves_a_step_out(ctx, model, optimizer, step):
    """As `continue` does, or list(epoch)."""


def steps_within(ctx, model, optimizer, step):
    for x, y in step:
        backward(model, x, y)
        optimizer.step()


def zeroes_within(ctx, model, optimizer, step):
    for x, y in step:
        optimizer.zero_grad()
        backward(model, x, y)


def clips_within(ctx, model, optimizer, step):
    for x, y in step:
        backward(model, x, y)
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


def reports_within(ctx, model, optimizer, step):
    for x, y in step:
        backward(model, x, y)
        ctx.report(loss=1.0)


def averages_within(ctx, model, optimizer, step):
    for x, y in step:
        backward(model, x, y)
        ctx.mean(loss=1.0)


def evaluates_within(ctx, model, optimizer, step):
    for x, y in step:
        backward(model, x, y)
        ctx.evaluate(lambda m, b: 0.0, data(), batch_size=8)


def accumulates(ctx, model, optimizer, step):
    for x, y in step:
        with ctx.accumulate():
            backward(model, x, y)


def leaves_one_out(ctx, model, optimizer, step):
    for number, (x, y) in enumerate(step):
        if number != 1:
            backward(model, x, y)


def one_pass_more(ctx, model, optimizer, step):
    for number, (x, y) in enumerate(step):
        backward(model, x, y)
        if number == 2:
            backward(model, x, y)


def one_pass_less(ctx, model, optimizer, step):
    for number, (x, y) in enumerate(step):
        backward(model, x, y)
        if number != 2:
            backward(model, x, y)


def backward_before(ctx, model, optimizer, step):
    model(torch.zeros(2, WIDTH).double()).sum().backward()


def swallows(ctx, model, optimizer, step):
    """The error of the inner loop is caught, as some loops do with any exception."""
    with contextlib.suppress(ConfigError):
        steps_within(ctx, model, optimizer, step)


KEPT = []


def past(ctx, model, optimizer, step):
    KEPT.append(step)
    for x, y in KEPT[0]:
        backward(model, x, y)
    optimizer.step()
    optimizer.zero_grad()


def breaks_and_leaves_the_epoch(ctx):
    model, _, loader = prepared(ctx)
    for epoch in loader.epochs(2):
        for step in epoch:
            for x, y in step:
                backward(model, x, y)
                break
            break


def test_a_step_that_was_begun_is_not_drawn_again(tmp_path):
    with pytest.raises(ConfigError, match="the next batch was called before"):
        run(tmp_path, breaks_and_leaves_the_epoch)


def breaks_and_returns(ctx):
    model, _, loader = prepared(ctx)
    for epoch in loader.epochs(1):
        for step in epoch:
            for x, y in step:
                backward(model, x, y)
                return


def test_the_train_function_does_not_end_within_a_step(tmp_path):
    with pytest.raises(ConfigError, match="the end of the train function was called before"):
        run(tmp_path, breaks_and_returns)


def two_loaders(ctx):
    model, _, loader = prepared(ctx)
    other = ctx.loader(data(), batch_size=8)
    for epoch, more in zip(loader.epochs(1), other.epochs(1), strict=False):
        for _, step in zip(more, epoch, strict=False):
            for x, y in step:
                backward(model, x, y)


@pytest.mark.parametrize(
    ("does", "says"),
    [
        (unpacks, "one step after the other"),
        (feeds_the_step, "as if it were a batch"),
        (indexes, "as if it were a batch"),
        (moves, "as if it were a batch"),
        (iterates_twice, "second time"),
        (past, "second time"),
        (breaks, "optimizer.step\\(\\) was called before"),
        (breaks_and_goes_on, "not to their end"),
        (leaves_a_step_out, "not iterated over"),
        (steps_within, "optimizer.step\\(\\) was called before"),
        (swallows, "not to their end"),
        (zeroes_within, "changed or dropped"),
        (clips_within, "changed or dropped"),
        (reports_within, "ctx.report was called before"),
        (averages_within, "ctx.mean was called before"),
        (evaluates_within, "ctx.evaluate was called before"),
        (accumulates, "ctx.accumulate was used in a step of slices"),
        (leaves_one_out, "without a backward pass"),
        (one_pass_more, "2 backward passes, and those before it 1"),
        (one_pass_less, "1 backward passes, and those before it 2"),
        (backward_before, "before the loop|between the drawing"),
    ],
)
def test_bad_use_is_refused(tmp_path, does, says):
    KEPT.clear()
    with pytest.raises(ConfigError, match=says):
        run(tmp_path, body, does=does)


@pytest.mark.parametrize(
    "options", [{"slices": 1, "batch_size": 16}, {"slices": 2}], ids=["one slice", "two slices"]
)
def test_unpacking_is_refused_whatever_the_number_of_slices(tmp_path, options):
    with pytest.raises(ConfigError, match="one step after the other"):
        run(tmp_path, body, does=unpacks, options=options)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"slices": 0}, "slices must be >= 1"),
        ({"slices": 2.0}, "whole number"),
        ({"slices": True}, "whole number"),
        ({"slices": 3}, "cannot be cut into 3"),
        ({"slices": 32}, "cannot be cut into 32"),
        ({"slices": 3, "per_worker": True}, "cannot be cut into 3"),
    ],
)
def test_a_loader_of_such_slices_is_refused(tmp_path, options, says):
    with pytest.raises(ConfigError, match=says):
        run(tmp_path, body, does=unpacks, options=options)


def test_another_loader_in_the_same_step_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="same step as another"):
        run(tmp_path, two_loaders)


def test_a_step_says_why_it_has_no_length(tmp_path):
    """And goes as it is where somebody asks in passing, as list() and progress bars do."""

    def asks(ctx):
        model, optimizer, loader = prepared(ctx)
        for epoch in loader.epochs(1):
            for step in epoch:
                with pytest.raises(TypeError, match="For a mean nothing is to be divided"):
                    len(step)
                assert operator.length_hint(step, 7) == 7
                assert step
                for x, y in step:
                    F.cross_entropy(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()

    run(tmp_path, asks)
