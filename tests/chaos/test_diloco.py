"""Workers that take inner steps by themselves (DiLoCo): ExchangeConfig(every_steps=...).

Laws: weights equal plain torch on the committed batches, with each worker's own inner optimizer;
every sample exactly once; workers bit-identical after each outer step. Processes are killed.
"""

import json
import os
import random
from pathlib import Path
from signal import SIGKILL, SIGTERM

import pytest
import torch
import torch.nn.functional as F

from elastix.config import CheckpointConfig, ExchangeConfig
from elastix.data.sample_order import indices
from elastix.errors import ConfigError
from elastix.events import Recovered, ReplicasCompared, StateStored
from elastix.script_adapter import LoneScript
from elastix.store import Store
from elastix.testing.chaos import Kill, with_kills
from elastix.testing.local import run_local
from elastix.testing.replay import replay
from tests.crew_runs import adamw, data, parallelize, standing
from tests.crew_runs import build as build_crew
from tests.laws import assert_exactly_once, committed, joins
from tests.trainables import Convnet, await_leavers, mlp, samples, usher_all

EXCHANGE = ExchangeConfig(every_steps=4)
CONFIG = {"samples": 160, "batch_size": 13, "epochs": 3}


class Both(torch.nn.Module):
    """Float64, with a parameter that nobody uses."""

    def __init__(self):
        super().__init__()
        self.body, self.never = mlp(), torch.nn.Linear(3, 3)

    def forward(self, x):
        return self.body(x)


def build(config):
    torch.manual_seed(3)
    if config.get("crew"):
        return build_crew()
    return (Convnet() if config.get("norm") else Both()).double()


def optimizer_of(model, config):
    if config.get("inner") == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.2)
    return adamw(model)


def dataset_of(config):
    return (
        data(config["samples"]) if config.get("crew") else samples(config["samples"], torch.float64)
    )


def train(ctx):
    """Notes the weights after every outer step, which it sees by the number of steps."""
    config = ctx.config
    model = build(config)
    if ctx.mesh is not None:
        parallelize(model, ctx.mesh)
    places = [Kill(**kill) for kill in config.get("at_place", ())]
    for one in places:
        if (ctx.worker, ctx.place) == (one.worker, one.after):  # `after` has the place of the crew
            ctx.on_phase(
                lambda name, detail, one=one: (
                    name == one.phase
                    and ctx.step == one.step
                    and one.detail in (None, detail)
                    and os.kill(os.getpid(), SIGKILL)
                )
            )
    optimizer = optimizer_of(model, config)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.9)
    model, optimizer, scheduler = ctx.prepare(model, optimizer, scheduler)
    loader = ctx.loader(dataset_of(config), batch_size=config["batch_size"])
    log = Path(config["log"]) / f"{ctx.worker}-{ctx.place}.jsonl"

    def note():
        full = [p.to_local() if hasattr(p, "to_local") else p for p in model.parameters()]
        full += list(model.buffers())
        text = [t.detach().flatten().tolist() for t in full]
        with log.open("a") as file:
            file.write(json.dumps([ctx.step, text]) + "\n")

    ctx.on_phase(lambda name, _: name == "boundary" and ctx.step > 0 and ctx.rank >= 0 and note())
    for epoch in loader.epochs(config["epochs"]):
        for x, y in epoch:
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            usher_all(ctx)
            await_leavers(ctx)
        if not config.get("crew"):
            ctx.report(**ctx.evaluate(loss_of, dataset_of(config), batch_size=64))
    torch.save(weights_of(model), Path(config["log"]) / f"final-{ctx.worker}-{ctx.place}.pt")


def loss_of(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def weights_of(model):
    return {
        name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
        for name, p in model.named_parameters()
    }


def reference(config, events, exchange):
    """Plain torch: inner steps of each worker on its own committed samples, then the outer one."""
    model, dataset = build(config), dataset_of(config)
    parameters = list(model.parameters())
    outer = torch.optim.SGD(
        parameters,
        lr=exchange.outer_lr,
        momentum=exchange.outer_momentum,
        nesterov=exchange.outer_momentum > 0,
    )
    inner: dict[int, torch.optim.Optimizer] = {}
    before = 0  # inner steps of all earlier windows: by them the scheduler goes
    for event in standing(events):
        anchor = [p.detach().clone() for p in parameters]
        moved = [torch.zeros_like(p) for p in parameters]
        total = 0
        for worker in sorted({w for b in event.batches for w in [*b.shares, *b.whole]}):
            with torch.no_grad():
                for p, at in zip(parameters, anchor, strict=True):
                    p.copy_(at)
            if worker not in inner:
                inner[worker] = optimizer_of(model, config)
            optimizer, seen = inner[worker], 0
            for number, batch in enumerate(event.batches):
                of_whole = next(iter(batch.shares.values())) if batch.whole else ()
                spans = of_whole if worker in batch.whole else batch.shares.get(worker, ())
                chosen = torch.from_numpy(indices(spans, 0, config["samples"], True))
                assert len(chosen)
                x, y = (t[chosen] for t in dataset.tensors)
                F.cross_entropy(model(x), y).backward()
                rate = optimizer.defaults["lr"] * 0.9 ** ((before + number) // 5)
                optimizer.param_groups[0]["lr"] = rate
                optimizer.step()
                optimizer.zero_grad()
                seen += len(chosen)
            total += seen
            for gap, p, at in zip(moved, parameters, anchor, strict=True):
                gap += (at - p.detach()) * seen
        with torch.no_grad():
            for p, at, gap in zip(parameters, anchor, moved, strict=True):
                p.copy_(at)
                p.grad = gap / total
        outer.step()
        outer.zero_grad()
        before += len(event.batches)
    return weights_of(model)


def run(tmp_path, kills=(), workers=3, config=None, exchange=EXCHANGE, before=(), **options):
    """Run, and assert the laws; `law=False`: not the weights; `all_lost=False`: not all need be."""
    log, law = tmp_path / "log", options.pop("law", True)
    all_lost = options.pop("all_lost", True)
    log.mkdir(exist_ok=True)
    for path in log.glob("final-*.pt"):
        path.unlink()
    settings = {**CONFIG, **(config or {}), "log": str(log)}
    options.setdefault("directory", tmp_path / "run")
    doomed = with_kills(train, kills) if kills else train
    result = run_local(doomed, workers, config=settings, exchange=exchange, **options)
    assert not all_lost or {kill.worker for kill in kills} <= set(result.lost)
    events = [*before, *result.events]
    assert_exactly_once(events, settings["epochs"])
    finals = [torch.load(path) for path in log.glob("final-*.pt")]
    assert finals
    for full in finals:
        assert all(torch.equal(full[name], finals[0][name]) for name in full)
    agreed = {}
    for path in log.glob("*.jsonl"):
        place = path.stem.split("-")[1]
        for step, text in map(json.loads, path.read_text().splitlines()):
            assert agreed.setdefault((place, step), text) == text, f"{path.stem}, step {step}"
    if law:
        want = reference(settings, events, exchange)
        for name, tensor in want.items():
            apart = float((finals[0][name] - tensor).abs().max() / tensor.abs().max())
            assert apart < 1e-9, (name, apart)
    return result


def test_outer_steps_are_those_of_plain_torch(tmp_path):
    result = run(tmp_path)
    batches = [len(event.batches) for event in committed(result.events)]
    assert batches == [4, 4, 4, 1] * 3  # 13 batches an epoch, which ends with an outer step
    compared = [event for event in result.events if isinstance(event, ReplicasCompared)]
    assert compared
    assert all(event.equal for event in compared)


PLACES = {
    "inner step": Kill(worker=1, phase="batch", step=2, after=2),
    "first inner step": Kill(worker=1, phase="batch", step=0),
    "bucket": Kill(worker=1, phase="bucket", detail=0, step=2),
    "end of the window": Kill(worker=1, phase="filled", step=2),
    "commit round": Kill(worker=1, phase="round", detail=1, step=2),
    "out of the commit round": Kill(worker=1, phase="left", detail=1, step=2),
    "between outer steps": Kill(worker=1, phase="boundary", step=2),
    "evaluation": Kill(worker=1, phase="evaluate"),
    "the first worker": Kill(worker=0, phase="bucket", detail=0, step=2),
}


@pytest.mark.fast(
    "bucket", "end of the window", "commit round", "between outer steps", "the first worker"
)
@pytest.mark.parametrize("place", PLACES)
def test_one_is_killed(tmp_path, place):
    result = run(tmp_path, [PLACES[place]])
    assert any(isinstance(event, Recovered) for event in result.events)


PHASES = ("batch", "bucket", "filled", "round", "left", "boundary", "enter", "meet", "snapshot")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(24))
def test_any_are_killed_anywhere(tmp_path, seed):
    """Some places are never passed: of a recovery, where there is none."""
    chance = random.Random(seed)
    kills = [
        Kill(worker=w, phase=chance.choice(PHASES), step=chance.randrange(8), after=w % 2)
        for w in chance.sample(range(4), chance.randrange(1, 4))
    ]
    exchange = ExchangeConfig(
        every_steps=chance.choice([1, 2, 4, 7, 50]),
        outer_lr=chance.choice([0.7, 1.0]),
        outer_momentum=chance.choice([0.0, 0.9]),
    )
    replace = chance.random() < 0.5
    options = {
        "config": {"inner": "sgd", "epochs": 5},
        "checkpoint": CheckpointConfig(every_steps=chance.choice([1, 3, None])),
        "replace": replace,
        "min_workers": chance.choice([1, 3]) if replace else 1,
        "shared": chance.random() < 0.5,
    }
    run(tmp_path, kills, workers=4, exchange=exchange, all_lost=False, **options)


def test_two_are_killed_in_one_window(tmp_path):
    kills = [PLACES["inner step"], Kill(worker=3, phase="bucket", step=2)]
    run(tmp_path, kills, workers=4)


def test_all_but_one_are_killed_and_it_goes_on_alone(tmp_path):
    kills = [Kill(worker=w, phase="batch", step=1 + w, after=1) for w in (0, 1)]
    result = run(tmp_path, kills)
    assert committed(result.events)[-1].world_size == 1


def test_gradients_of_other_types_and_through_sockets(tmp_path):
    """What travels is rounded, so the reference is not met; workers are equal all the same."""
    exchange = ExchangeConfig(every_steps=3, wire="bfloat16")
    run(tmp_path, [PLACES["bucket"]], exchange=exchange, shared=False, law=False)


def test_one_step_of_plain_averaging_is_the_usual_step(tmp_path):
    """SGD: the mean of what each comes to is where the mean of their gradients leads."""
    config = {"inner": "sgd", "epochs": 1}
    alike = ExchangeConfig(every_steps=1, outer_lr=1.0, outer_momentum=0.0)
    run(tmp_path, config=config, exchange=alike, law=False)
    (tmp_path / "usual").mkdir()
    run(tmp_path / "usual", config=config, exchange=ExchangeConfig(), law=False)
    one, other = (torch.load(p / "log" / "final-0-0.pt") for p in (tmp_path, tmp_path / "usual"))
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, other[name], rtol=1e-9, atol=1e-12)


def buffers(folder):
    """The last step's, of batch norm."""
    *_, last = map(json.loads, (folder / "log" / "0-0.jsonl").read_text().splitlines())
    return last[1][8:]


def test_batch_norm_is_averaged_with_the_outer_step(tmp_path):
    run(tmp_path, [PLACES["inner step"]], config={"norm": True, "inner": "sgd"})
    assert any(abs(value) > 0.01 for values in buffers(tmp_path) for value in values)


def usher(tmp_path, newcomer=2):
    return {"meeting": str(tmp_path), "ushers": {str(newcomer): 3}, "inner": "sgd", "epochs": 8}


def test_a_joiner_follows_from_outside_and_has_outer_momentum(tmp_path):
    config = usher(tmp_path)
    result = run(tmp_path, workers=2, config=config, spares=1, max_workers=3)
    (join,) = joins(result.events)
    assert join.watched_steps > 0
    assert committed(result.events)[-1].world_size == 3


def test_a_replacement_comes_in_while_another_is_killed(tmp_path):
    kills = [PLACES["inner step"], Kill(worker=2, phase="enter", detail=3)]
    config = usher(tmp_path, 3)
    result = run(tmp_path, kills, workers=3, config=config, replace=True)
    assert 3 in {join.worker for join in joins(result.events)}


def test_below_the_minimum_a_replacement_is_given_the_state_in_the_group(tmp_path):
    config = {"inner": "sgd"}
    result = run(tmp_path, [PLACES["bucket"]], config=config, replace=True, min_workers=3)
    sizes = [event.world_size for event in committed(result.events)]
    assert sizes[2] == 2
    assert set(sizes[3:]) == {3}


def at_place(worker, place, phase, **fixed):
    one = {"worker": worker, "phase": phase, "step": 2, "detail": None, "after": place, **fixed}
    return {"worker": worker, "phase": one["phase"], **one}


CREW_PLACES = {
    "a follower in an inner step": at_place(1, 1, "batch"),
    "a speaker in an inner step": at_place(1, 0, "batch"),
    "a follower in a bucket": at_place(1, 1, "bucket"),
    "a speaker in the round": at_place(1, 0, "round", detail=1),
}


@pytest.mark.fast("a follower in a bucket")
@pytest.mark.parametrize("place", CREW_PLACES)
def test_a_process_of_a_crew_is_killed(tmp_path, place):
    slow = place != "a follower in an inner step"
    config = {"crew": True, "samples": 100, "at_place": [CREW_PLACES[place]]}
    result = run(tmp_path, workers=3, config=config, crew={"shard": 2}, min_workers=2)
    assert set(result.lost) == {1}
    assert slow or len(result.freed) == 1


def test_a_run_goes_on_from_an_outer_step(tmp_path):
    """With the outer momentum, and with what one worker's inner optimizer held."""
    often = CheckpointConfig(every_steps=3)
    options = {"checkpoint": often, "config": {"epochs": 2, "inner": "sgd"}}
    first = run(tmp_path, [PLACES["inner step"]], **options)
    more = {"epochs": 4, "inner": "sgd"}
    run(tmp_path, workers=2, config=more, before=first.events, checkpoint=often)


def test_a_state_is_that_of_one_worker(tmp_path):
    often = CheckpointConfig(every_steps=2, keep_last=None)
    result = run(tmp_path, [Kill(worker=0, phase="snapshot", step=4)], checkpoint=often)
    assert [e.step for e in result.events if isinstance(e, StateStored)][:2] == [2, 4]
    with Store(tmp_path / "run" / "store") as store:
        state = store.get("local/final")
        assert not store.verify()
    momenta = [name for name in state.tensors if name.startswith("@outer_optimizer/state/")]
    assert {name.rsplit("/", 1)[1] for name in momenta} == {"momentum_buffer"}
    assert [name for name in state.tensors if name.startswith("@optimizer/state/")]


def test_a_run_that_has_exchanged_gradients_goes_on_with_outer_steps(tmp_path):
    first = run(tmp_path, exchange=ExchangeConfig(), law=False, config={"epochs": 1})
    more = {"before": first.events, "law": False, "config": {"epochs": 2}}
    second = run(tmp_path, **more)
    assert [len(event.batches) for event in committed(second.events)] == [4, 4, 4, 1]


def pairs(ctx):
    """Two loaders of different length for each step, and passes that are added up."""
    config = ctx.config
    model = build(config)
    model, optimizer = ctx.prepare(model, optimizer_of(model, config))
    many = ctx.loader(samples(96, torch.float64), batch_size=12)
    few = ctx.loader(samples(60, torch.float64), batch_size=12, seed=5)
    others = (batch for epoch in few.epochs(100) for batch in epoch)
    losses = []
    for epoch in many.epochs(2):
        for number, (x, y) in enumerate(epoch):
            a, b = next(others)
            if number % 2 == 0:
                with ctx.accumulate():
                    F.cross_entropy(model(x), y).backward()
                continue
            (F.cross_entropy(model(x), y) + F.cross_entropy(model(a), b)).backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(ctx.mean(loss=1.0)["loss"])
    assert losses == [1.0] * 8


def test_several_loaders_and_passes_that_are_added_up(tmp_path):
    """Of 8 batches of the leading loader there are 4 inner steps, and 2 outer ones."""
    every = ExchangeConfig(every_steps=2)
    options = {"config": CONFIG, "exchange": every, "directory": tmp_path}
    result = run_local(pairs, 2, **options)
    drawn = [[b.loader for b in event.batches] for event in committed(result.events)]
    assert [batches.count(0) for batches in drawn] == [4, 4, 4, 4]
    assert [batches.count(1) for batches in drawn] == [4, 4, 4, 4]


def overflows(ctx):
    """A GradScaler, and a worker whose loss is not finite: it alone leaves out a step."""
    model = build({})
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    model, optimizer, scaler = ctx.prepare(model, optimizer_of(model, {}), scaler)
    for epoch in ctx.loader(samples(96, torch.float64), batch_size=12).epochs(2):
        for x, y in epoch:
            loss = F.cross_entropy(model(x), y)
            if ctx.worker == 1 and ctx.step == 1:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert all(bool(p.isfinite().all()) for p in model.parameters())


def test_a_scaler_leaves_out_a_step_of_one_worker(tmp_path):
    result = run_local(overflows, 2, exchange=EXCHANGE, directory=tmp_path)
    assert_exactly_once(result.events, 2)


def breaks_off(ctx):
    """Ends in the middle of a window, evaluates in one, and reads ahead in processes."""
    model = build({})
    model, optimizer = ctx.prepare(model, optimizer_of(model, {}))
    loader = ctx.loader(samples(96, torch.float64), batch_size=12, num_workers=1)
    for epoch in loader.epochs(3):
        for number, (x, y) in enumerate(epoch):
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            if epoch.number == 0 and number == 1:
                ctx.evaluate(loss_of, samples(96, torch.float64), batch_size=64)
            if epoch.number == 2 and number == 5:
                break
    (Path(ctx.config["log"]) / str(ctx.worker)).write_text(str(ctx.step))


def test_windows_that_end_early(tmp_path):
    """An evaluation and the end of the train function end a window, as an epoch's end does."""
    doomed = with_kills(breaks_off, [Kill(worker=1, phase="batch", step=3, after=1)])
    options = {"config": {"log": str(tmp_path)}, "directory": tmp_path / "run"}
    result = run_local(doomed, 3, exchange=EXCHANGE, **options)
    assert set(result.lost) == {1}
    batches = [len(event.batches) for event in committed(result.events)]
    assert batches[:3] == [2, 4, 2]
    assert sum(batches[-2:]) == 6
    held = [event for event in result.events if isinstance(event, ReplicasCompared)]
    assert held
    assert held[-1].equal


def test_who_is_to_leave_does_so_at_an_outer_step(tmp_path):
    doomed = with_kills(train, [Kill(worker=1, phase="batch", step=2, after=1, signal=SIGTERM)])
    (tmp_path / "log").mkdir()
    config = {**CONFIG, "log": str(tmp_path / "log"), "inner": "sgd", "leavers": {"1": 3}}
    options = {"config": config, "directory": tmp_path / "run"}
    result = run_local(doomed, 3, exchange=EXCHANGE, **options)
    assert_exactly_once(result.events, CONFIG["epochs"])
    assert not result.lost
    assert committed(result.events)[-1].world_size == 2
    want = reference(config, result.events, EXCHANGE)
    full = torch.load(tmp_path / "log" / "final-0-0.pt")
    for name, tensor in want.items():
        torch.testing.assert_close(full[name], tensor, rtol=1e-9, atol=1e-12)


@pytest.mark.slow
def test_a_mate_and_a_fresh_process_go_on_with_the_outer_momentum(tmp_path):
    one = at_place(1, 1, "batch")
    config = {"crew": True, "samples": 100, "at_place": [one], "inner": "sgd", "epochs": 4}
    crew = {"crew": {"shard": 2}, "min_workers": 3, "replace": True}
    result = run(tmp_path, workers=3, config=config, **crew)
    assert 3 in result.outcomes


# ---------------------------------------------------------------------------- refused


def sliced(ctx):
    ctx.prepare(build({}))
    ctx.loader(samples(24, torch.float64), batch_size=12, slices=4)


def unlooped(ctx):
    ctx.prepare(build({}))
    ctx.boundary()


def adapts(ctx):
    LoneScript(ctx, "a script")


def takes_the_name(ctx):
    model = build({})
    ctx.track(outer_optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    ctx.prepare(model)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (sliced, r"slices=\.\.\."),
        (unlooped, "ctx.boundary"),
        (adapts, "a script"),
        (takes_the_name, "is that of the optimizer"),
    ],
)
def test_what_has_no_meaning_is_refused(tmp_path, function, words):
    with pytest.raises(ConfigError, match=words):
        run_local(function, 2, exchange=EXCHANGE, directory=tmp_path)


def test_it_is_not_replayed(tmp_path):
    run(tmp_path, config={"epochs": 1})
    with pytest.raises(ConfigError, match="every_steps"):
        replay(tmp_path / "run")
