"""Batches in slices where workers are crews: a failed step keeps its whole batch, on any mesh.

With exact=True the run that was disturbed ends with the bytes of the quiet run on one worker of the
same mesh. Real processes on gloo.
"""

import functools
import json
import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from elastix.data.audit import audit
from elastix.errors import ConfigError
from elastix.events import Resumed, SlicesHandedOver, StepCommitted
from elastix.state import raw_bytes
from elastix.testing.local import run_local
from elastix.train.replica.sliced_step import Slices
from tests.crew_runs import adamw, build, checked, configure, data, kill, parallelize, train
from tests.exact_programs import Jittered
from tests.run_bytes import final, kept, steps_of

pytestmark = pytest.mark.timeout(240)

SLICES, BATCH = 4, 12


def evenly(ctx):
    """Each has as many slices, else who is slow may have none."""
    Slices.measured = lambda *_: None
    train(ctx)


def in_slices(tmp_path, workers, crew, kills=(), samples=58, **options):
    """Run, and assert the laws of crews; and that each batch was whole, as if nobody was lost."""
    options = {"samples": samples, "batch_size": BATCH, "slices": SLICES, **options}
    found = checked(tmp_path, workers, crew, kills, function=evenly, **options)
    epochs = options.get("epochs", 1)
    sizes = [len(had) for had in steps_of(found.run.events).values()]
    assert (
        sizes == ([BATCH] * (samples // BATCH) + [samples % BATCH] * (samples % BATCH > 0)) * epochs
    )
    return found


# ------------------------------------------------------------------------------------- slices


def test_slices_of_a_lost_crew_are_computed_by_the_others_in_the_same_step(tmp_path):
    """The epoch's last batch has slices of two sizes, which the places share out unevenly."""
    found = in_slices(tmp_path, 3, {"shard": 2}, [kill(1, 1, "computed", step=1)])
    moved = [e for e in found.run.events if isinstance(e, SlicesHandedOver)]
    assert [(event.step, lost) for event in moved for lost, _, _ in event.moved] == [(2, 1)]
    assert found.outcomes == ["reduced again"] * 2


@pytest.mark.slow
def test_tensors_split_and_sharded(tmp_path):
    in_slices(tmp_path, 2, {"shard": 2, "tensor": 2}, [kill(1, 3, "in backward")])


@pytest.mark.slow
@pytest.mark.parametrize("crew", [{"shard": 2}, {"shard": 3}, {"tensor": 2}, {"shard": 1}], ids=str)
@pytest.mark.parametrize("shared", [True, False], ids=["memory", "sockets"])
def test_slices_agree_with_one_process_on_any_mesh(tmp_path, crew, shared):
    in_slices(tmp_path, 2, crew, samples=101, epochs=2, shared=shared, mean=True)


PHASES = {
    "before a slice": ("slice", {}),
    "forward all-gather": ("in forward", {}),
    "backward reduce-scatter": ("in backward", {}),
    "after a slice": ("computed", {}),
    "first bucket": ("bucket", {"detail": 0}),
    "end of backward": ("filled", {}),
    "clipping": ("clip", {}),
    "between steps": ("boundary", {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize(("phase", "fixed"), PHASES.values(), ids=PHASES)
def test_killed_at_any_place(tmp_path, phase, fixed, place):
    in_slices(tmp_path, 3, {"shard": 2}, [kill(1, place, phase, **fixed)], epochs=2)


TWO = {
    "while slices of the first are computed": [
        kill(1, 1, "computed"),
        kill(2, 0, "handed"),
    ],
    "a follower, while slices of the first are computed": [
        kill(1, 0, "computed"),
        kill(2, 1, "handed"),
    ],
    "all but one": [kill(0, 0, "computed"), kill(1, 1, "in forward"), kill(2, 0, "in backward")],
}


@pytest.mark.slow
@pytest.mark.parametrize("kills", TWO.values(), ids=TWO)
def test_several_are_killed_within_one_step(tmp_path, kills):
    in_slices(tmp_path, 4, {"shard": 2}, kills)


# ------------------------------------------------------------------------------------- bit by bit

MESHES = {"shard 2": {"shard": 2}, "shard 3": {"shard": 3}, "both": {"shard": 2, "tensor": 2}}
EPOCHS = 3


def exact(tmp_path, workers, mesh, kills=(), epochs=EPOCHS, function=evenly, within=(), **options):
    """Run; all of `kills` must have come to pass, and those of `within` may."""
    names = ("samples", "batch_size", "slices", "dropout", "step_s")
    given = {"samples": 58, "batch_size": BATCH, "slices": SLICES, "dropout": 0.2}
    given |= {name: options.pop(name) for name in names if name in options}
    config = configure(tmp_path, [*kills, *within], epochs=epochs, **given)
    options = {"directory": tmp_path / "run", "exact": True, **options}
    run = run_local(function, workers, config=config, crew=MESHES[mesh], **options)
    lost = {(worker, place) for worker, place, _ in run.lost_places}
    assert lost >= {(kill.worker, kill.place) for kill in kills}, lost
    return run


@functools.cache
def quiet(mesh, epochs=EPOCHS, function=evenly):
    """What one worker leaves that nothing befalls, and its steps' samples."""
    directory = kept()
    run = exact(directory, 1, mesh, epochs=epochs, function=function)
    return final(run), steps_of(run.events)


def check(run, mesh, epochs=EPOCHS, function=evenly):
    """Bit by bit, and samples one by one."""
    (digest, tensors), steps = quiet(mesh, epochs, function)
    found, ours = final(run)
    assert sorted(ours) == sorted(tensors)
    apart = [name for name in tensors if not torch.equal(ours[name], tensors[name])]
    assert not apart, f"other bytes than in the quiet run: {apart}"
    assert found == digest
    assert found
    assert audit(run.events).exact
    assert steps_of(run.events) == steps


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "workers"),
    [
        ("shard 2", 2),
        ("shard 2", 3),
        ("shard 3", 2),
        ("both", 2),
    ],
)
def test_any_number_of_crews_gives_the_same_bytes(tmp_path, mesh, workers):
    check(exact(tmp_path, workers, mesh), mesh)


EXACT_PHASES = ["in forward", "in backward", "computed", "bucket", "filled", "clip", "boundary"]
QUICK = [("in backward", 1, "shard 2"), ("bucket", 0, "shard 2"), ("in forward", 3, "both")]


@pytest.mark.fast("in backward-1-shard 2")
@pytest.mark.parametrize(("phase", "place", "mesh"), QUICK)
def test_a_process_lost_within_a_step_leaves_the_same_bytes(tmp_path, phase, place, mesh):
    check(exact(tmp_path, 2, mesh, [kill(1, place, phase, step=3)]), mesh)


@pytest.mark.slow
@pytest.mark.parametrize("shared", [True, False], ids=["memory", "sockets"])
@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("phase", EXACT_PHASES)
def test_a_process_lost_anywhere_leaves_the_same_bytes(tmp_path, phase, place, shared):
    kills = [kill(1, place, phase, step=3)]
    check(exact(tmp_path, 3, "shard 2", kills, shared=shared), "shard 2")


@pytest.mark.slow
@pytest.mark.parametrize(
    "one",
    [
        kill(1, 1, "held", detail=1, step=3),
        kill(1, 0, "crew", detail=1, step=3),
        kill(1, 0, "round", detail=1, step=3),
        kill(1, 0, "left", detail=1, step=3),
    ],
    ids=lambda one: one.phase,
)
def test_a_process_lost_at_the_commit_leaves_the_same_bytes(tmp_path, one):
    check(exact(tmp_path, 3, "shard 2", [one]), "shard 2")


@pytest.mark.slow
def test_a_whole_crew_is_lost_and_replaced(tmp_path):
    """Both processes die, in one step; a fresh worker is given the State, and takes slices."""
    kills = [kill(1, 0, "in backward", step=3), kill(1, 1, "in backward", step=3)]
    run = exact(tmp_path, 2, "shard 2", kills, replace=True, epochs=8, step_s=0.1)
    assert set(run.outcomes) == {0, 2}
    computed = {
        w for s in run.events if isinstance(s, StepCommitted) for b in s.batches for w in b.shares
    }
    assert 2 in computed
    check(run, "shard 2", epochs=8)


@pytest.mark.slow
def test_the_halves_of_two_broken_crews_are_a_new_one(tmp_path):
    kills = [kill(1, 1, "bucket", step=3), kill(2, 0, "in forward", step=3)]
    run = exact(tmp_path, 3, "shard 2", kills, replace=True, epochs=8, step_s=0.1)
    assert set(run.outcomes) >= {0, 3}
    check(run, "shard 2", epochs=8)


@pytest.mark.slow
def test_no_crew_is_whole_and_the_run_goes_on_from_its_halves(tmp_path):
    """Of each of two workers another place is lost; the State is that of the last boundary."""
    kills = [kill(0, 1, "in backward", step=3), kill(1, 0, "in backward", step=3)]
    run = exact(tmp_path, 2, "shard 2", kills, replace=True, epochs=5)
    assert [event.step for event in run.events if isinstance(event, Resumed)] == [3]
    check(run, "shard 2", epochs=5)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_random_kills_leave_the_same_bytes(tmp_path, seed):
    chance = random.Random(seed)
    phases = ["slice", *EXACT_PHASES]
    kills = [
        kill(w, chance.randrange(2), chance.choice(phases), step=chance.randrange(1, 8))
        for w in chance.sample(range(1, 4), chance.randrange(1, 3))
    ]
    run = exact(tmp_path, 4, "shard 2", kills, replace=chance.random() < 0.5, epochs=5, step_s=0.05)
    check(run, "shard 2", epochs=5)


def evaluates(ctx):
    """After each epoch; the rate follows what comes of it."""
    Slices.measured = lambda *_: None
    log = Path(ctx.config["log"])

    def evaluate(model, _look):
        means = ctx.evaluate(dropped, data(23), batch_size=5)
        (log / f"evaluated-{ctx.step}-{ctx.worker}-{ctx.place}").write_text(json.dumps(means))
        ctx.report(**means)

    train(ctx, after_epoch=evaluate)


def dropped(model, batch):
    """A metric that draws."""
    x, y = batch
    return F.cross_entropy(model(F.dropout(x, 0.1)), y)


def test_evaluations_are_equal_bit_by_bit_as_well(tmp_path):
    told = []
    for workers in (1, 3):
        where = tmp_path / str(workers)
        exact(where, workers, "shard 2", function=evaluates, epochs=2)
        files = sorted((where / "log").glob("evaluated-*"))
        assert len(files) == 2 * 2 * workers
        told.append({(path.name.split("-")[1], path.read_text()) for path in files})
    assert told[0] == told[1]
    assert len(told[0]) == 2


def loads_ahead(ctx):
    """One process of worker 1, if there is one, ends in step 4."""
    model = build()
    parallelize(model, ctx.mesh)
    model, optimizer = ctx.prepare(model, adamw(model, lr=1e-3))
    loader = ctx.loader(Jittered(data(58)), batch_size=BATCH, slices=SLICES, num_workers=1)
    for epoch in loader.epochs(2):
        for step in epoch:
            for x, y in step:
                F.cross_entropy(model(x), y).backward()
                if ctx.step == 3 and (ctx.worker, ctx.place) == (1, 1):
                    os.kill(os.getpid(), signal.SIGKILL)
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.slow
def test_samples_that_are_read_ahead_by_processes_are_the_same(tmp_path):
    options = {"crew": {"shard": 2}, "exact": True}
    runs = [run_local(loads_ahead, n, directory=tmp_path / str(n), **options) for n in (1, 2)]
    assert set(runs[1].lost) == {1}
    assert final(runs[0])[0] == final(runs[1])[0]


@pytest.mark.slow
def test_without_it_the_order_of_sums_shows_in_the_bytes(tmp_path):
    """Nothing random is in this run but its initial weights."""
    found = [
        final(exact(tmp_path / str(n), n, "shard 2", dropout=0.0, exact=False))[1] for n in (1, 3)
    ]
    assert any(not torch.equal(found[0][name], found[1][name]) for name in found[0])


def collectives(ctx):
    """What FSDP2 and tensor parallel add up by, again and again, with places that come late."""
    model = build()
    parallelize(model, ctx.mesh)
    ctx.prepare(model)
    size, rank = dist.get_world_size(), dist.get_rank()
    generator = torch.Generator().manual_seed(rank)
    chance = random.Random(rank)
    for elements in (size, 35 * size, 5000 * size):
        mine = torch.randn(elements, generator=generator)
        seen = set()
        for _ in range(40):
            time.sleep(chance.random() * 2e-3)  # another place is the last one each time
            whole, part = mine.clone(), torch.empty(elements // size)
            dist.all_reduce(whole)
            dist.reduce_scatter_tensor(part, mine.clone())
            seen.add((raw_bytes(whole).numpy().tobytes(), raw_bytes(part).numpy().tobytes()))
        assert len(seen) == 1, elements


@pytest.mark.parametrize("size", [3, pytest.param(4, marks=pytest.mark.slow)])
def test_sums_within_a_crew_are_the_same_each_time(tmp_path, size):
    """Which exact runs rest on: gloo adds up in an order that goes by places, not by the clock."""
    run_local(collectives, 1, crew={"shard": size}, directory=tmp_path)


# ------------------------------------------------------------------------------------- refused


def sliced(function, ctx):
    model = build()
    parallelize(model, ctx.mesh)
    model, optimizer = ctx.prepare(model, adamw(model, lr=1e-3))
    for epoch in ctx.loader(data(24), batch_size=12, slices=4).epochs(1):
        for step in epoch:
            for x, y in step:
                function(model, x, y)
            optimizer.step()


def keeps_gradients(model, x, y):
    F.cross_entropy(model(x), y).backward()


def reduces_a_part(model, x, y):
    model.blocks[0].set_requires_gradient_sync(False)
    F.cross_entropy(model(x), y).backward()


def clips(model, x, y):
    F.cross_entropy(model(x), y).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.001)


def turns_round(model, x, y):
    """What a place has of a gradient: its sum stays."""
    F.cross_entropy(model(x), y).backward()
    if dist.get_rank() == 1:
        part = model.last.weight.grad.to_local()
        part.copy_(part.flip(0))


def draws_other_samples(differs, ctx):
    model = build()
    parallelize(model, ctx.mesh)
    ctx.prepare(model)
    given = {"samples": 24, "batch_size": 12, "shuffle": True, "slices": 4}
    if ctx.place:
        given |= differs
    ctx.loader(data(given.pop("samples")), **given)
    ctx.mean(reached=1.0)


@pytest.mark.parametrize(
    "differs", [{"samples": 36}, {"batch_size": 24}, {"shuffle": False}, {"slices": 2}], ids=str
)
def test_places_of_a_worker_may_not_draw_from_other_loaders(tmp_path, differs):
    with pytest.raises(ConfigError, match="at one place of a worker than at another"):
        run_local(
            functools.partial(draws_other_samples, differs),
            1,
            crew={"shard": 2},
            directory=tmp_path,
        )


def looks_first(ctx):
    """What the model says of the last slice, before the optimizer steps."""
    model = build()
    if ctx.mesh is not None:
        parallelize(model, ctx.mesh)
    model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for epoch in ctx.loader(data(24), batch_size=12, slices=4).epochs(2):
        for step in epoch:
            for x, y in step:
                F.cross_entropy(model(x), y).backward()
            with torch.no_grad():
                model(x)
            optimizer.step()
            optimizer.zero_grad()
    full = [p.full_tensor() if ctx.mesh is not None else p for p in model.parameters()]
    if ctx.place == 0:
        torch.save([p.detach() for p in full], Path(ctx.config["log"]) / "final.pt")


def test_a_forward_pass_before_the_optimizer_steps(tmp_path):
    finals = []
    for crew in ({}, {"shard": 2}):
        config = configure(tmp_path / str(len(crew)))
        directory = tmp_path / str(len(crew)) / "run"
        run_local(looks_first, 1, crew=crew, config=config, directory=directory)
        finals.append(torch.load(Path(config["log"]) / "final.pt"))
    for alone, sharded in zip(*finals, strict=True):
        torch.testing.assert_close(sharded, alone, rtol=1e-9, atol=1e-12)


def test_a_shard_of_all_may_not_hold_gradients_back_either(tmp_path):
    with pytest.raises(ConfigError, match="not to reduce the gradients of a slice"):
        run_local(
            functools.partial(sliced, reduces_a_part),
            1,
            crew={"shard": 1},
            directory=tmp_path,
        )


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize(
    ("function", "said"),
    [
        (keeps_gradients, "gradients of the step before"),
        (reduces_a_part, "not to reduce the gradients of a slice"),
        (clips, "changed or dropped within the loop"),
        (turns_round, "changed or dropped within the loop"),
    ],
)
def test_what_would_be_silently_wrong_is_refused(tmp_path, function, said, exact):
    with pytest.raises(ConfigError, match=said):
        run_local(
            functools.partial(sliced, function),
            1,
            crew={"shard": 2},
            directory=tmp_path,
            exact=exact,
        )
