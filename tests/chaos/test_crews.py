"""Laws of workers that are crews: replay, equal rails, kills by place. Real processes on gloo."""

import contextlib
import functools
import itertools
import json
import os
import signal
import threading
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from elastix.config import CheckpointConfig
from elastix.data.audit import audit
from elastix.data.sample_order import indices
from elastix.errors import ConfigError, ReplicasDiffer, TrainError
from elastix.events import GenerationFormed, StateStored
from elastix.observe import journal
from elastix.store import Store
from elastix.testing.local import run_local
from tests import crew_runs
from tests.crew_runs import (
    ONE_SIDED,
    WITHIN_S,
    Meter,
    adamw,
    build,
    checked,
    data,
    kill,
    parallelize,
    train,
)

pytestmark = pytest.mark.timeout(240)


def test_shards_that_are_uneven_and_a_kill_in_backward(tmp_path):
    """Parts of the samples are uneven too, and some are empty at the epoch's end."""
    kills = [kill(1, 1, "in backward")]
    found = checked(tmp_path, 2, {"shard": 3}, kills, samples=61, batch_size=13, mean=True)
    assert found.outcomes == ["reduced again"]
    assert len(found.run.freed) == 2


def test_tensors_split_and_sharded_agree_with_one_process(tmp_path):
    checked(tmp_path, 2, {"shard": 2, "tensor": 2}, samples=36)


@pytest.mark.slow
@pytest.mark.parametrize("crew", [{"shard": 2}, {"shard": 3}, {"tensor": 2}, {"shard": 1}], ids=str)
@pytest.mark.parametrize("shared", [True, False], ids=["memory", "sockets"])
def test_a_crew_agrees_with_one_process(tmp_path, crew, shared):
    checked(tmp_path, 2, crew, samples=101, batch_size=17, epochs=2, shared=shared, mean=True)


def founder_dies(ctx):
    if (ctx.worker, ctx.place) == (1, 1):
        os.kill(os.getpid(), signal.SIGKILL)
    train(ctx)


@pytest.mark.slow
def test_the_others_found_the_group_without_one_that_loses_a_process_before_it(tmp_path):
    found = checked(tmp_path, 3, {"shard": 2}, function=founder_dies, min_workers=2)
    assert set(found.run.lost) == {1}
    assert {
        len(event.members) for event in found.run.events if isinstance(event, GenerationFormed)
    } == {2}


def accumulates(ctx):
    """Two batches to a step; with sizes that differ each counts by its own mean."""
    model = build()
    parallelize(model, ctx.mesh)
    look = crew_runs.watched(ctx, model.blocks[1].norm)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    model, optimizer = ctx.prepare(model, optimizer)
    for epoch in ctx.loader(data(61), batch_size=13).epochs(2):
        batches = iter(epoch)
        for x, y in batches:
            second = next(batches, None)
            if second is not None:
                with ctx.accumulate():
                    (F.cross_entropy(model(x), y) / 2).backward()
                look("accumulated")
                x, y = second
            (F.cross_entropy(model(x), y) / (1 if second is None else 2)).backward()
            optimizer.step()
            optimizer.zero_grad()
    full = {name: crew_runs.whole(p) for name, p in model.named_parameters()}
    if ctx.place == 0:
        torch.save(full, Path(ctx.config["log"]) / f"final-{ctx.worker}.pt")


def accumulated(events):
    """The same in one process, of what was committed."""
    dataset, model = data(61), build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in crew_runs.standing(events):
        for batch in step.batches:
            spans = [span for share in batch.shares.values() for span in share]
            chosen = torch.from_numpy(indices(spans, 0, 61, True))
            x, y = (t[chosen] for t in dataset.tensors)
            (F.cross_entropy(model(x), y) / len(step.batches)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.named_parameters())


@pytest.mark.slow
@pytest.mark.parametrize("crew", [{"shard": 2}, {"shard": 3}, {"tensor": 2}], ids=str)
@pytest.mark.parametrize(("place", "phase"), [(1, "bucket"), (1, "in forward")])
def test_accumulated_gradients_agree_with_one_process(tmp_path, crew, place, phase):
    config = crew_runs.configure(tmp_path, [kill(1, place, phase)])
    run = run_local(accumulates, 3, config=config, crew=crew, directory=tmp_path / "run")
    assert {(worker, at) for worker, at, _ in run.lost_places} >= {(1, place)}
    assert audit(run.events).exact
    want = accumulated(run.events)
    finals = [torch.load(path) for path in (tmp_path / "log").glob("final-*.pt")]
    assert len(finals) == 2
    for full in finals:
        for name, tensor in want.items():
            torch.testing.assert_close(full[name], tensor.detach(), rtol=1e-9, atol=1e-12)


MESHES = {
    "one process": {},
    "shard 2": {"shard": 2},
    "shard 3": {"shard": 3},
    "shard 1": {"shard": 1},
}
TENSOR, BOTH = {"tensor": 2}, {"shard": 2, "tensor": 2}
PAIRS = [
    *itertools.product(MESHES.values(), MESHES.values()),
    *((TENSOR, other) for other in ({}, {"shard": 3}, TENSOR, BOTH)),
    *((BOTH, other) for other in ({}, {"shard": 3}, TENSOR, BOTH)),
    *((other, TENSOR) for other in ({}, {"shard": 3})),
    *((other, BOTH) for other in ({}, {"shard": 3})),
]


@pytest.mark.slow
@pytest.mark.parametrize(("first", "second"), PAIRS, ids=str)
def test_a_run_goes_on_with_another_mesh(tmp_path, first, second):
    """From the State that the run has stored: whole, whatever mesh it was trained on."""
    run = checked(tmp_path / "first", 2, first, samples=37).run
    more = {"epochs": 2, "before": run.events, "directory": run.directory}
    checked(tmp_path / "second", 2, second, samples=37, **more)


def stored_of(found):
    return [event for event in found.run.events if isinstance(event, StateStored)]


@pytest.mark.parametrize("place", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_each_place_stores_its_parts_and_one_is_killed_at_that(tmp_path, place):
    """The other worker's process at that place stores them; what a run leaves is whole."""
    often = CheckpointConfig(every_steps=2, keep_last=None)
    one = kill(1, place, "snapshot", step=2)
    found = checked(tmp_path, 2, {"shard": 2}, [one], samples=48, checkpoint=often)
    steps = [event.step for event in stored_of(found)]
    assert steps[:2] == [2, 4]
    assert steps[-1] == found.steps
    with Store(found.run.directory / "store") as store:
        parts = store.manifest("local/step-0000000002").tensors
        final = store.get("local/final")
        assert store.manifest("local/final").ref == stored_of(found)[-1].ref
        assert not store.verify()
    names = [name for name in parts if name.startswith("blocks.0.up.weight")]
    assert sorted(names) == ["blocks.0.up.weight[0:18,0:18]", "blocks.0.up.weight[18:36,0:18]"]
    full = torch.load(tmp_path / "log" / "final-0.pt")
    assert all(torch.equal(final.tensors[name], full[name]) for name in full)
    assert not final.parts


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"shard": 3}, {"shard": 2}),
        (BOTH, {"shard": 3}),
        (BOTH, TENSOR),
        (BOTH, {}),
        (TENSOR, BOTH),
    ],
    ids=str,
)
def test_a_run_goes_on_from_the_parts_of_another_mesh(tmp_path, first, second):
    """It ended in the middle, so what it goes on from is in parts."""
    often = CheckpointConfig(every_steps=2)
    options = {"samples": 37, "checkpoint": often, "directory": tmp_path / "run"}
    with pytest.raises(TrainError, match="a bug in the middle"):
        checked(tmp_path / "first", 2, first, function=ends_after_step_3, **options)
    events = list(journal.read(tmp_path / "run" / "journal.jsonl"))
    assert [e.step for e in events if isinstance(e, StateStored)] == [2]
    more = {"epochs": 2, "before": events, "directory": tmp_path / "run"}
    checked(tmp_path / "second", 2, second, samples=37, **more)


def ends_after_step_3(ctx):
    def look(phase, detail):
        if phase == "boundary" and ctx.step == 3:
            raise RuntimeError("a bug in the middle")

    ctx.on_phase(look)
    train(ctx)


PLACES = {
    "forward all-gather": ("in forward", {}),
    "backward reduce-scatter": ("in backward", {}),
    "first bucket": ("bucket", {"detail": 0}),
    "later bucket": ("bucket", {"detail": 2}),
    "end of backward": ("filled", {}),
    "clipping": ("clip", {}),
    "between steps": ("boundary", {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize(("phase", "fixed"), PLACES.values(), ids=PLACES)
def test_killed_at_any_place(tmp_path, phase, fixed, place):
    found = checked(tmp_path, 3, {"shard": 2}, [kill(1, place, phase, **fixed)], epochs=2)
    assert len(found.run.freed) == 1
    assert found.freed_s < WITHIN_S


@pytest.mark.slow
@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("phase", ["in backward", "bucket", "filled", "clip"])
def test_killed_where_gradients_go_through_sockets(tmp_path, phase, place):
    found = checked(tmp_path, 3, {"shard": 2}, [kill(1, place, phase)], epochs=2, shared=False)
    assert found.freed_s < WITHIN_S


@pytest.mark.slow
@pytest.mark.parametrize("one", ONE_SIDED.values(), ids=ONE_SIDED)
def test_killed_in_the_protocol(tmp_path, one):
    found = checked(tmp_path, 3, {"shard": 2}, [one], epochs=2)
    assert found.freed_s < WITHIN_S


@pytest.mark.slow
@pytest.mark.parametrize(
    "kills",
    [
        pytest.param([kill(1, 0, "bucket"), kill(2, 1, "in backward")], id="at different places"),
        pytest.param(
            [kill(1, 1, "bucket", detail=1), kill(2, 0, "meet", detail=2)], id="in the recovery"
        ),
        pytest.param(
            [kill(1, 1, "bucket", detail=1), kill(2, 1, "enter", detail=2)],
            id="a follower in the recovery",
        ),
        pytest.param(
            [kill(0, 0, "bucket"), kill(1, 1, "in forward", step=3), kill(2, 0, "clip", step=4)],
            id="all but one",
        ),
    ],
)
def test_several_are_killed(tmp_path, kills):
    checked(tmp_path, 4, {"shard": 2}, kills, epochs=2)


@pytest.mark.slow
def test_an_indirect_mate_is_freed_too(tmp_path):
    found = checked(tmp_path, 2, {"shard": 4}, [kill(1, 2, "in forward")], epochs=3)
    assert len(found.run.freed) == 3
    assert found.freed_s < WITHIN_S


@pytest.mark.slow
def test_a_stopped_process_is_ended_and_its_mates_are_freed(tmp_path):
    stopped = kill(1, 1, "in forward", signal=signal.SIGSTOP)
    found = checked(tmp_path, 3, {"shard": 2}, [stopped], epochs=2, hang_timeout_s=4.0)
    assert [(worker, place) for worker, place, _ in found.run.freed] == [(1, 0)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "phase"),
    [*itertools.product([0, 1], ["in forward", "bucket", "clip"]), (0, "round")],
)
def test_a_process_whose_connections_are_cut_is_lost_with_its_worker(tmp_path, phase, place):
    """As if its host was: those to its mates, those of its rail, and the lines of its crew."""
    severed = kill(1, place, phase, severed=True)
    found = checked(tmp_path, 3, {"shard": 2}, [severed], epochs=2, hang_timeout_s=4.0)
    assert set(found.run.lost) == {1}


# ---------------------------------------------------------------------------- lives


@pytest.mark.slow
def test_a_mate_and_a_fresh_process_are_a_new_worker(tmp_path):
    options = {"replace": True, "epochs": 6, "step_s": 0.1}
    found = checked(tmp_path, 3, {"shard": 2}, [kill(1, 1, "bucket", detail=0)], **options)
    assert set(found.run.outcomes) >= {0, 2, 3}
    assert [(worker, place) for worker, place, _ in found.run.freed] == [(1, 0)]


@pytest.mark.slow
def test_the_halves_of_two_broken_workers_are_a_new_one(tmp_path):
    kills = [kill(1, 1, "bucket", detail=0), kill(2, 0, "in forward")]
    options = {"replace": True, "epochs": 6, "step_s": 0.1}
    found = checked(tmp_path, 3, {"shard": 2}, kills, **options)
    assert {(worker, place) for worker, place, _ in found.run.freed} == {(1, 0), (2, 1)}
    assert set(found.run.outcomes) >= {0, 3}


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["meet", "enter"])
def test_a_joiner_left_out_as_another_dies_comes_in_with_the_next_generation(tmp_path, phase):
    """It is a newcomer of generation 3, of which generation 4 keeps those who have the State."""
    kills = [kill(1, 1, "bucket", detail=0), kill(2, 0, phase, detail=3)]
    found = checked(tmp_path, 3, {"shard": 2}, kills, replace=True, epochs=6, step_s=0.1)
    assert 3 in found.run.outcomes
    assert {worker for worker, _, _ in found.run.freed} == {1, 2}


LIVES = 40
SETTLED = 10
"""Lives after which nothing more is imported or cached."""
RESIDENT_MB = 20.0
"""More than that is no noise of the allocator."""


def lives(ctx):
    """Place 1 of each worker but the first ends after its second step, until there were enough."""
    threads = len(list(Path("/proc/self/task").iterdir()))
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    log = Path(ctx.config["log"]) / f"{ctx.worker}-{ctx.place}"
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    log.write_text(json.dumps([os.getpid(), threads, descriptors, resident / 1e6]))
    model = build()
    parallelize(model, ctx.mesh)
    model, optimizer = ctx.prepare(model, adamw(model, lr=1e-3))
    ends = 0 < ctx.worker < LIVES and ctx.place == 1
    steps = 0
    for epoch in ctx.loader(data(24), batch_size=12).epochs(3 * LIVES):
        for x, y in epoch:
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
            if ends and steps == 2:
                os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.timeout(590)
def test_a_process_has_no_more_threads_descriptors_and_memory_after_many_lives(tmp_path):
    """What it was of a worker before is gone, and all that was connected then."""
    options = {"crew": {"shard": 2}, "replace": True, "min_workers": 2, "timeout_s": 560.0}
    run = run_local(lives, 2, config={"log": str(tmp_path)}, directory=tmp_path / "run", **options)
    found = [json.loads((tmp_path / f"{w}-0").read_text()) for w in range(1, LIVES + 1)]
    assert len(run.freed) == LIVES - 1
    assert len({pid for pid, *_ in found}) == 1
    _, threads, descriptors, resident = zip(*found, strict=True)
    for what, most in ((threads, 3), (descriptors, 5), (resident, RESIDENT_MB)):
        assert max(what[SETTLED:]) <= max(what[:SETTLED]) + most, what


def without_a_loader(ctx):
    """Each place has every other sample of one batch, and all of them count alike."""
    model = build()
    parts = 1
    if ctx.mesh is not None:
        parallelize(model, ctx.mesh)
        parts = ctx.mesh.size()
    model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    x, y = data(12)[ctx.place :: parts]
    for _ in range(3):
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        ctx.boundary()


def test_steps_without_a_loader_agree_with_one_process(tmp_path):
    found = []
    for crew in ({}, {"shard": 2}):
        directory = tmp_path / str(len(crew))
        run_local(without_a_loader, 1, crew=crew, directory=directory)
        with Store(directory / "store", read_only=True) as store:
            found.append(store.get("local/final").model)
    for name, tensor in found[0].items():
        assert torch.allclose(tensor, found[1][name], rtol=1e-9, atol=1e-12), name


# ---------------------------------------------------------------------------- random numbers


def draws(ctx):
    model = build()
    parallelize(model, ctx.mesh)
    ctx.prepare(model)
    drawn = torch.rand(4).tolist()
    Path(ctx.config["log"], f"{ctx.worker}-{ctx.place}").write_text(json.dumps(drawn))


def test_places_that_split_samples_draw_other_random_numbers_and_along_tensor_the_same(tmp_path):
    """Of the worker that the others are given the State by, too."""
    crew = {"shard": 2, "tensor": 2}
    run_local(draws, 2, crew=crew, config={"log": str(tmp_path)}, directory=tmp_path / "run")
    drawn = [
        [(tmp_path / f"{worker}-{place}").read_text() for place in range(4)] for worker in (0, 1)
    ]
    for places in drawn:
        assert places[0] == places[1] != places[2] == places[3]
    assert len({one for places in drawn for one in places}) == 4


# ---------------------------------------------------------------------------- refused


def metered(ctx):
    model = build()
    parallelize(model, ctx.mesh)
    model = ctx.prepare(model)
    meter = Meter()
    ctx.track(meter=meter)
    for epoch in ctx.loader(data(24), batch_size=12).epochs(1):
        for x, y in epoch:
            meter.sum += (ctx.place + 1) * ctx.step
            F.cross_entropy(model(x), y).backward()


def test_places_that_differ_in_what_each_has_whole_end_the_run(tmp_path):
    """Of which the store would have kept one, and resumed all places with it."""
    with pytest.raises(ReplicasDiffer, match=r"different values of what each .* @meter/sum"):
        run_local(metered, 1, crew={"shard": 2}, directory=tmp_path)


def of_two_loaders(ctx):
    """5 samples of one worker are 3 and 2 of its places, and 6 are 3 and 3."""
    model = build()
    parallelize(model, ctx.mesh)
    model = ctx.prepare(model)
    one, other = ctx.loader(data(60), batch_size=12), ctx.loader(data(50), batch_size=10)
    for first, second in zip(one.epochs(1), other.epochs(1), strict=True):
        for (x, y), (u, v) in zip(first, second, strict=True):
            (F.cross_entropy(model(x), y) + F.cross_entropy(model(u), v)).backward()


def without_reducing(ctx):
    """The first batch has 12 samples, and the second 10."""
    model = build()
    parallelize(model, ctx.mesh)
    model = ctx.prepare(model)
    for epoch in ctx.loader(data(22), batch_size=12).epochs(1):
        batches = iter(epoch)
        x, y = next(batches)
        model.set_requires_gradient_sync(False)
        with ctx.accumulate():
            F.cross_entropy(model(x), y).backward()
        model.set_requires_gradient_sync(True)
        for x, y in batches:
            F.cross_entropy(model(x), y).backward()


@pytest.mark.parametrize("function", [of_two_loaders, without_reducing])
def test_gradients_that_are_weighed_together_and_shared_otherwise_are_refused(tmp_path, function):
    with pytest.raises(ConfigError, match="split in different ratios"):
        run_local(function, 2, crew={"shard": 2}, directory=tmp_path)


def clips(model):
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


def doubles_a_part(model):
    if torch.distributed.get_rank() == 1:
        model.last.weight.grad.to_local().mul_(2)


def turns_a_part_round(model):
    """Its sum stays."""
    if torch.distributed.get_rank() == 1:
        part = model.last.weight.grad.to_local()
        part.copy_(part.flip(0))


def changes_what_is_added_up(change, ctx):
    model = build()
    parallelize(model, ctx.mesh)
    model = ctx.prepare(model)
    for epoch in ctx.loader(data(48), batch_size=12).epochs(1):
        batches = iter(epoch)
        for x, y in batches:
            with ctx.accumulate():
                F.cross_entropy(model(x), y).backward()
            change(model)
            x, y = next(batches)
            F.cross_entropy(model(x), y).backward()
            model.zero_grad()


@pytest.mark.parametrize(
    ("change", "crew"),
    [
        (turns_a_part_round, {"shard": 2}),
        pytest.param(clips, {"shard": 2}, marks=pytest.mark.slow),
        pytest.param(doubles_a_part, {"shard": 2}, marks=pytest.mark.slow),
    ],
)
def test_gradients_that_are_changed_while_they_are_added_up_are_refused(tmp_path, change, crew):
    """As with one process: each worker would have changed those of its own samples."""
    with pytest.raises(ConfigError, match="were changed within a step that is added up"):
        run_local(
            functools.partial(changes_what_is_added_up, change), 2, crew=crew, directory=tmp_path
        )


def drops_what_is_added_up(model):
    model.zero_grad()


@pytest.mark.slow
@pytest.mark.parametrize("crew", [{"shard": 2}, {"tensor": 2}], ids=str)
def test_gradients_may_be_dropped_while_they_are_added_up(tmp_path, crew):
    function = functools.partial(changes_what_is_added_up, drops_what_is_added_up)
    run = run_local(function, 2, crew=crew, directory=tmp_path)
    assert audit(run.events).exact


def in_sequence(model, mesh):
    """Layer norms see a part of the positions each; here samples stand for positions."""
    for block in model.blocks:
        given = PrepareModuleInput(
            input_layouts=Replicate(), desired_input_layouts=Shard(0), use_local_output=False
        )
        parallelize_module(block, mesh["tensor"], {"norm": given})
        plan = {
            "norm": SequenceParallel(sequence_dim=0),
            "up": ColwiseParallel(input_layouts=Shard(0)),
            "down": RowwiseParallel(),
        }
        parallelize_module(block, mesh["tensor"], plan)


def train_in_sequence(ctx):
    crew_runs.parallelize = in_sequence
    train(ctx)


def test_sequence_parallel_without_shards_agrees_with_one_process(tmp_path):
    """Nobody but elastix adds up the gradients of its layer norms."""
    kills = [kill(1, 1, "bucket")]
    checked(tmp_path, 2, {"tensor": 2}, kills, samples=36, function=train_in_sequence)


def with_optimizer(name, ctx):
    model = build()
    parallelize(model, ctx.mesh)
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match="Nothing was prepared"):
        ctx.prepare(model, optimizer)
    raise ConfigError("it was refused")


@pytest.mark.parametrize(
    ("name", "crew"),
    [
        ("LBFGS", {"shard": 3}),
        ("LBFGS", {"tensor": 2}),
        ("Adafactor", {"shard": 2}),
        ("Rprop", {"shard": 2}),
    ],
)
def test_optimizers_that_torch_cannot_run_on_parts_are_refused(tmp_path, name, crew):
    with pytest.raises(ConfigError, match="it was refused"):
        run_local(functools.partial(with_optimizer, name), 1, crew=crew, directory=tmp_path)


def scaled(ctx):
    model = build()
    parallelize(model, ctx.mesh)  # layers that are not split stay whole
    ctx.prepare(model, adamw(model), torch.amp.GradScaler("cpu"))


def test_a_scaler_that_torch_cannot_run_on_parts_and_whole_tensors_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="of these parameters some are whole"):
        run_local(scaled, 1, crew={"tensor": 2}, directory=tmp_path)


def divided(when, ctx):
    model = build()
    parallelize(model, ctx.mesh)
    if when == "before":
        model.blocks[0].set_gradient_divide_factor(2.0)
    model, optimizer = ctx.prepare(model, adamw(model))
    if when == "after":
        model.blocks[0].set_gradient_divide_factor(2.0)
    for epoch in ctx.loader(data(12), batch_size=12).epochs(1):
        for x, y in epoch:
            F.cross_entropy(model(x), y).backward()
            optimizer.step()


@pytest.mark.parametrize("when", ["before", "after"])
def test_gradients_that_fsdp_was_told_to_divide_are_refused(tmp_path, when):
    """They would be halved: what FSDP2 adds up are means already."""
    with pytest.raises(ConfigError, match=r"divide gradients by 2\.0"):
        run_local(functools.partial(divided, when), 1, crew={"shard": 2}, directory=tmp_path)


def stubborn(ctx):
    """Keeps on in user code when its worker is broken: it swallows whatever is raised there."""
    if (ctx.worker, ctx.place) == (1, 0):
        with contextlib.suppress(RuntimeError):
            train(ctx)
        threading.Event().wait()
    train(ctx)


@pytest.mark.slow
def test_user_code_that_swallows_the_error_is_ended_and_nobody_waits(tmp_path):
    one = kill(1, 1, "in forward")
    found = checked(tmp_path, 2, {"shard": 2}, [one], function=stubborn, epochs=4, step_s=0.2)
    assert found.run.freed == []
    assert found.run.outcomes.keys() == {0}
