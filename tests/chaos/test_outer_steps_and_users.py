"""What train functions do beside inner steps, under ExchangeConfig(every_steps=...).

Law: two workers of equal batches, each with its own samples, equal plain torch to 1e-9.
"""

import functools
import gc
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from elastix.config import CheckpointConfig, ExchangeConfig
from elastix.data.audit import audit
from elastix.data.sample_order import indices
from elastix.errors import ConfigError
from elastix.testing.chaos import Kill, with_kills
from elastix.testing.local import run_local
from tests.laws import committed
from tests.trainables import mlp, samples

SAMPLES = 96
EXCHANGE = ExchangeConfig(every_steps=3)


def build():
    torch.manual_seed(3)
    return mlp().double()


def inner_of(model):
    return torch.optim.Adam(model.parameters(), lr=1e-2, foreach=False)


def loss_of(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def learn(model, optimizer, x, y):
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()


def keep(ctx, model):
    full = {name: p.detach().clone() for name, p in model.named_parameters()}
    torch.save(full, Path(ctx.config["log"]) / f"{ctx.worker}.pt")


def reference(events, *, change=lambda model, step: None, inner=learn):
    """Plain torch on the committed samples.

    Args:
        events: of the run.
        change: what the train function does to all models before each window, by its number.
        inner: one inner step, or a part of one.
    """
    outer_model = build()
    outer = torch.optim.SGD(outer_model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    workers = {}
    x, y = samples(SAMPLES, torch.float64).tensors
    for step, event in enumerate(committed(events)):
        change(outer_model, step)
        anchor = [p.detach().clone() for p in outer_model.parameters()]
        means = [torch.zeros_like(p) for p in anchor]
        for worker in event.batches[0].shares:
            if worker not in workers:
                model = build()
                workers[worker] = model, inner_of(model)
            model, optimizer = workers[worker]
            with torch.no_grad():
                torch._foreach_copy_(list(model.parameters()), anchor)
            for batch in event.batches:
                chosen = torch.from_numpy(indices(batch.shares[worker], 0, SAMPLES, True))
                inner(model, optimizer, x[chosen], y[chosen])
            for mean, at, p in zip(means, anchor, model.parameters(), strict=True):
                mean += (at - p.detach()) / len(event.batches[0].shares)
        for p, mean in zip(outer_model.parameters(), means, strict=True):
            p.grad = mean if p.requires_grad or bool(mean.any()) else None
        outer.step()
    return {name: p.detach() for name, p in outer_model.named_parameters()}


def run(tmp_path, train, workers=2, config=None, exchange=EXCHANGE, **options):
    """The events, and the weights in which all workers end."""
    (tmp_path / "log").mkdir()
    config = {**(config or {}), "log": str(tmp_path / "log")}
    directory = tmp_path / "run"
    run = run_local(
        train, workers, config=config, exchange=exchange, directory=directory, **options
    )
    first, *others = [torch.load(path) for path in (tmp_path / "log").glob("*.pt")]
    for other in others:
        assert all(torch.equal(first[name], other[name]) for name in first)
    return run.events, first


def assert_close(got, want):
    for name, tensor in want.items():
        torch.testing.assert_close(got[name], tensor, rtol=1e-9, atol=1e-12)


# ------------------------------------------------- parameters change between two outer steps


def shrink(model, step=0):
    del step
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.9)


def shrinks(ctx):
    """After prepare, and after each epoch, all workers alike."""
    model = build()
    model, optimizer = ctx.prepare(model, inner_of(model))
    loader = ctx.loader(samples(SAMPLES, torch.float64), batch_size=12)
    shrink(model)
    for epoch in loader.epochs(2):
        for x, y in epoch:
            learn(model, optimizer, x, y)
        ctx.evaluate(loss_of, samples(SAMPLES, torch.float64), batch_size=64)
        shrink(model)
    keep(ctx, model)


def test_parameters_that_all_change_alike_between_outer_steps_stay_changed(tmp_path):
    events, got = run(tmp_path, shrinks)
    assert [len(event.batches) for event in committed(events)] == [3, 3, 2] * 2
    want = build()
    want.load_state_dict(reference(events, change=lambda m, step: step % 3 == 0 and shrink(m)))
    shrink(want)
    assert_close(got, dict(want.named_parameters()))


# ------------------------------------------------- frozen in the middle of a window


def freezes(ctx):
    model = build()
    model, optimizer = ctx.prepare(model, inner_of(model))
    loader = ctx.loader(samples(SAMPLES, torch.float64), batch_size=12)
    for epoch in loader.epochs(2):
        for number, (x, y) in enumerate(epoch):
            learn(model, optimizer, x, y)
            if epoch.number == 0 and number == 4:
                model[1].weight.requires_grad_(False)
    keep(ctx, model)


def test_what_is_frozen_within_a_window_keeps_what_it_has_learnt_in_it(tmp_path):
    events, got = run(tmp_path, freezes)
    taken = {}

    def inner(model, optimizer, x, y):
        learn(model, optimizer, x, y)
        taken[id(model)] = taken.get(id(model), 0) + 1
        if taken[id(model)] == 5:
            model[1].weight.requires_grad_(False)

    def change(model, step):
        model[1].weight.requires_grad_(step < 2)

    assert_close(got, reference(events, inner=inner, change=change))


# ------------------------------------------------- gradients that outlive an outer step


def adds_up(ctx):
    """Gradients of two batches make a step, and three batches an outer step."""
    model = build()
    model, optimizer = ctx.prepare(model, inner_of(model))
    loader = ctx.loader(samples(SAMPLES, torch.float64), batch_size=12)
    number = 0
    for epoch in loader.epochs(3):
        for x, y in epoch:
            F.cross_entropy(model(x), y).backward()
            number += 1
            if number % 2 == 0:
                optimizer.step()
                optimizer.zero_grad()
    keep(ctx, model)


def every_second_pass():
    """An inner step of `reference` in which the gradients of two batches make a step."""
    passes = {}

    def inner(model, optimizer, x, y):
        F.cross_entropy(model(x), y).backward()
        passes[id(model)] = passes.get(id(model), 0) + 1
        if passes[id(model)] % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()

    return inner


def test_gradients_that_are_not_used_yet_outlive_an_outer_step(tmp_path):
    events, got = run(tmp_path, adds_up)
    assert_close(got, reference(events, inner=every_second_pass()))


def evaluates_within(ctx):
    model = build()
    model, optimizer = ctx.prepare(model, inner_of(model))
    loader = ctx.loader(samples(SAMPLES, torch.float64), batch_size=12)
    for epoch in loader.epochs(2):
        for number, (x, y) in enumerate(epoch):
            if number % 2 == 0:
                with ctx.accumulate():
                    F.cross_entropy(model(x), y).backward()
                ctx.evaluate(loss_of, samples(SAMPLES, torch.float64), batch_size=64)
                continue
            learn(model, optimizer, x, y)
    keep(ctx, model)


def test_an_evaluation_within_a_step_that_is_added_up_leaves_its_gradients(tmp_path):
    events, got = run(tmp_path, evaluates_within)
    assert_close(got, reference(events, inner=every_second_pass()))


# ------------------------------------------------- steps between two windows


def evaluates_too_early(ctx):
    model = build()
    model, optimizer = ctx.prepare(model, inner_of(model))
    loader = ctx.loader(samples(SAMPLES, torch.float64), batch_size=12)
    for epoch in loader.epochs(1):
        for x, y in epoch:
            ctx.evaluate(loss_of, samples(SAMPLES, torch.float64), batch_size=64)
            learn(model, optimizer, x, y)
    keep(ctx, model)


def draws_from_no_loader(ctx):
    model = build()
    model, optimizer = ctx.prepare(model, inner_of(model))
    x, y = samples(24, torch.float64).tensors
    for part in range(4):
        mine = slice(6 * part + 3 * ctx.rank, 6 * part + 3 * ctx.rank + 3)
        learn(model, optimizer, x[mine], y[mine])
    keep(ctx, model)


@pytest.mark.parametrize("train", [evaluates_too_early, draws_from_no_loader])
def test_a_step_between_an_outer_step_and_the_next_batch_is_refused(tmp_path, train):
    with pytest.raises(ConfigError, match="every_steps"):
        run(tmp_path, train)


def all_within(ctx, model, x, y):
    with ctx.accumulate():
        F.cross_entropy(model(x), y).backward()


def chunks_of_a_batch(ctx, model, x, y):
    with ctx.accumulate():
        F.cross_entropy(model(x[:3]), y[:3]).backward()
    F.cross_entropy(model(x[3:]), y[3:]).backward()


def in_passes(passes, ctx):
    model = build()
    model, optimizer = ctx.prepare(model, inner_of(model))
    for epoch in ctx.loader(samples(SAMPLES, torch.float64), batch_size=12).epochs(2):
        for x, y in epoch:
            passes(ctx, model, x, y)
            optimizer.step()
            optimizer.zero_grad()
    keep(ctx, model)


@pytest.mark.parametrize("passes", [all_within, chunks_of_a_batch])
def test_a_run_of_which_no_batch_makes_an_inner_step_is_refused(tmp_path, passes):
    """It took one outer step, at its end, over everything."""
    with pytest.raises(ConfigError, match="no batch made an inner step"):
        run(tmp_path, functools.partial(in_passes, passes))


# ------------------------------------------------- two loaders


def two_loaders(ctx):
    """Draws from one loader before it loops over the other."""
    model = build()
    model, optimizer = ctx.prepare(model, inner_of(model))
    looped = ctx.loader(samples(SAMPLES, torch.float64), batch_size=12)
    beside = ctx.loader(samples(4 * SAMPLES, torch.float64), batch_size=12)
    others = (batch for epoch in beside.epochs(1) for batch in epoch)
    other = next(others)
    for epoch in looped.epochs(2):
        for x, y in epoch:
            (loss_of(model, (x, y)) + loss_of(model, other)).backward()
            optimizer.step()
            optimizer.zero_grad()
            other = next(others)
    keep(ctx, model)


@pytest.mark.parametrize("step", range(6))
def test_whichever_loader_is_drawn_from_first_no_sample_is_lost(tmp_path, step):
    """Worker 1 is killed in one of the windows, of which there are six."""
    doomed = with_kills(two_loaders, [Kill(worker=1, phase="batch", step=step)])
    events, _ = run(tmp_path, doomed, workers=3)
    looped = audit(events).loaders[0]
    assert (looped.samples, looped.missing, looped.repeated) == (2 * SAMPLES, (), ())


def shorter_beside(ctx):
    """The second loader's epochs are over before those of the first: what is in hand is left."""
    model = build()
    model, optimizer = ctx.prepare(model, inner_of(model))
    long = ctx.loader(samples(SAMPLES, torch.float64), batch_size=12)
    short = ctx.loader(samples(SAMPLES // 2, torch.float64), batch_size=12)
    for one, other in zip(long.epochs(2), short.epochs(2), strict=True):
        for mine, beside in zip(one, other, strict=False):
            (loss_of(model, mine) + loss_of(model, beside)).backward()
            optimizer.step()
            optimizer.zero_grad()
    keep(ctx, model)


def test_a_second_loader_may_be_shorter(tmp_path):
    run(tmp_path, shorter_beside)


# ------------------------------------------------- averages of weights beside the model


def swapped(ctx):
    """Evaluates an average within an epoch; `first`: the model as it is before."""
    model = build()
    average = torch.optim.swa_utils.AveragedModel(model)
    model, optimizer, average = ctx.prepare(model, inner_of(model), average)
    loader = ctx.loader(samples(SAMPLES, torch.float64), batch_size=12)
    for epoch in loader.epochs(2):
        for number, (x, y) in enumerate(epoch):
            learn(model, optimizer, x, y)
            average.update_parameters(model)
            if number == 4:
                evaluate_average(ctx, model, average)
        evaluate_average(ctx, model, average)
    keep(ctx, model)


def evaluate_average(ctx, model, average):
    data = samples(SAMPLES, torch.float64)
    if ctx.config["first"]:
        ctx.evaluate(loss_of, data, batch_size=64)
    own = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(average.module.state_dict())
    ctx.evaluate(loss_of, data, batch_size=64)
    model.load_state_dict(own)


def test_weights_of_before_an_outer_step_are_not_put_back(tmp_path):
    with pytest.raises(ConfigError, match=r"call ctx\.evaluate on the model as it is first"):
        run(tmp_path, swapped, config={"first": False})


def test_other_weights_are_tried_after_the_outer_step(tmp_path):
    events, _ = run(tmp_path, swapped, config={"first": True})
    assert [len(event.batches) for event in committed(events)] == [3, 2, 3] * 2


def frozen_average(ctx):
    model = build()
    average = build()
    if ctx.config["frozen"]:
        average.requires_grad_(False)
    model, optimizer, average = ctx.prepare(model, inner_of(model), average)
    loader = ctx.loader(samples(SAMPLES, torch.float64), batch_size=12)
    for epoch in loader.epochs(2):
        for x, y in epoch:
            learn(model, optimizer, x, y)
            if ctx.config["within"]:
                follow(average, model)
        follow(average, model)
    keep(ctx, average)


def follow(average, model):
    with torch.no_grad():
        for mine, theirs in zip(average.parameters(), model.parameters(), strict=True):
            mine.lerp_(theirs, 0.1)


def test_a_frozen_average_is_not_updated_in_inner_steps(tmp_path):
    with pytest.raises(ConfigError, match=r"leave out requires_grad_\(False\)"):
        run(tmp_path, frozen_average, config={"frozen": True, "within": True})


@pytest.mark.parametrize("frozen", [True, False])
def test_an_average_is_updated_after_epochs_or_not_frozen(tmp_path, frozen):
    run(tmp_path, frozen_average, config={"frozen": frozen, "within": not frozen})


# ------------------------------------------------- memory

WIDTH, LAYERS = 512, 4


def heavy(ctx):
    """Notes how many bytes of tensors there are after a step, gradients too; each storage once."""
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, foreach=False)
    model, optimizer = ctx.prepare(model, optimizer)
    loader = ctx.loader(torch.utils.data.TensorDataset(torch.ones(12, WIDTH)), batch_size=2)
    for epoch in loader.epochs(1):
        for (x,) in epoch:
            model(x).square().mean().backward()
            optimizer.step()
            held = tensor_bytes()
            optimizer.zero_grad()
    (Path(ctx.config["log"]) / f"{ctx.worker}.txt").write_text(str(held))


def tensor_bytes():
    gc.collect()
    storages = {
        storage.data_ptr(): storage.nbytes()
        for found in gc.get_objects()
        if issubclass(type(found), torch.Tensor)
        for storage in [found.untyped_storage()]
    }
    return sum(storages.values())


def test_it_takes_two_copies_of_the_parameters_more(tmp_path):
    """Of one worker, beyond what it takes to exchange gradients: counted in tensors.

    The most memory that a process had at any time says little: what is under way in an exchange
    when another part begins depends on the time that each takes.
    """
    held = []
    for every in (None, 2):
        log = tmp_path / str(every)
        log.mkdir()
        run_local(
            heavy,
            2,
            config={"log": str(log)},
            exchange=ExchangeConfig(every_steps=every),
            directory=log / "run",
            shared=False,
        )
        held.append(max(int(path.read_text()) for path in log.glob("*.txt")))
    parameters = WIDTH * WIDTH * LAYERS * 4
    assert (held[1] - held[0]) / parameters == pytest.approx(2, abs=1e-3)


# ------------------------------------------------- an optimizer that is made late


def tracks_late(ctx):
    model = build()
    model = ctx.prepare(model)
    optimizer = inner_of(model)
    ctx.track(late=optimizer)
    for epoch in ctx.loader(samples(SAMPLES, torch.float64), batch_size=12).epochs(2):
        for x, y in epoch:
            learn(model, optimizer, x, y)
    keep(ctx, model)


def test_an_optimizer_that_is_tracked_later_is_each_workers_own(tmp_path):
    events, got = run(tmp_path, tracks_late, checkpoint=CheckpointConfig(every_steps=1))
    assert_close(got, reference(events))


# ------------------------------------------------- parameters that no optimizer holds


def averages_weights(ctx):
    model = build()
    average = torch.optim.swa_utils.AveragedModel(model)
    model, optimizer, average = ctx.prepare(model, inner_of(model), average)
    for epoch in ctx.loader(samples(SAMPLES, torch.float64), batch_size=12).epochs(2):
        for x, y in epoch:
            learn(model, optimizer, x, y)
            average.update_parameters(model)
    keep(ctx, average.module)


def test_what_no_optimizer_holds_is_averaged(tmp_path):
    """An average of weights stays one: no outer momentum carries it on."""
    events, got = run(tmp_path, averages_weights)
    means, taken, seen = {}, {}, []

    def inner(model, optimizer, x, y):
        learn(model, optimizer, x, y)
        mine = list(model.parameters())
        count = taken[id(model)] = taken.get(id(model), 0) + 1
        before = means.get(id(model), [torch.zeros_like(p) for p in mine])
        means[id(model)] = [m + (p.detach() - m) / count for m, p in zip(before, mine, strict=True)]

    def together(model, step):
        """All go on from the mean of theirs."""
        del model
        if step:
            of_all = [torch.stack(of_one).mean(0) for of_one in zip(*means.values(), strict=True)]
            means.update(dict.fromkeys(means, of_all))
            seen[:] = of_all

    reference(events, inner=inner, change=together)
    together(None, len(committed(events)))
    assert_close(got, dict(zip(got, seen, strict=True)))
