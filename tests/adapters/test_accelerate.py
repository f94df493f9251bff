"""Accelerate's kind of script, with two lines changed, under kills; what is refused."""

import ast
import inspect
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("accelerate", reason="the extra `accelerate` is not installed")

from accelerate.utils import (
    DataLoaderConfiguration,
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    load_checkpoint_in_model,
)
from torch.utils.data import DataLoader

import elastix
from elastix.errors import ConfigError
from elastix.events import Reported
from elastix.testing.local import run_local
from tests.adapters import accelerate_classifier, adapting
from tests.adapters.adapting import Changed

LINES = {
    "accelerator = Accelerator(cpu=True)": (
        'accelerator = __import__("elastix").accelerate.Accelerator(ctx)'
    ),
    'in range(config["epochs"])': 'in train_loader.epochs(config["epochs"])',
}
SCRIPT = Changed("accelerate_classifier.py", LINES)


def net():
    return accelerate_classifier.Net().double()


def test_an_accelerate_script_ends_as_plain_torch_does_whoever_is_killed(tmp_path):
    assert SCRIPT.changed == 2
    file = tmp_path / "model.pt"
    result, losses = adapting.run(SCRIPT, tmp_path, adapting.kills(), save=str(file))
    model, expected = adapting.plain(result.events, net, accelerate_classifier.data)
    tensors = adapting.stored(result)
    assert adapting.equal(model, {n: tensors[n] for n in model.state_dict()}) <= 1e-5
    adapting.check_losses(losses, expected)
    saved = torch.load(file, weights_only=True)
    assert all(torch.equal(saved[n], tensors[n]) for n in model.state_dict())


# ------------------------------------------------------------ what cannot be said is refused


def set_up(ctx, batch=6, **settings):
    accelerator = elastix.accelerate.Accelerator(ctx, **settings)
    torch.manual_seed(1)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(accelerate_classifier.data(24, 7), batch)
    return accelerator, *accelerator.prepare(model, optimizer, loader)


def in_a_plain_loop(ctx):
    accelerator, model, _, loader = set_up(ctx)
    for x, y in loader:
        accelerator.backward(F.cross_entropy(model(x), y))


def with_a_backward_of_its_own(ctx):
    _, model, optimizer, loader = set_up(ctx)
    for x, y in loader:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def adding_up_without_telling(ctx):
    accelerator, model, optimizer, loader = set_up(ctx)
    for _ in loader.epochs(1):
        for number, (x, y) in enumerate(loader):
            accelerator.backward(F.cross_entropy(model(x), y) / 2)
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()


def clipping_each_batch(ctx):
    accelerator, model, optimizer, loader = set_up(ctx, gradient_accumulation_steps=2)
    for _ in loader.epochs(1):
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(F.cross_entropy(model(x), y))
                accelerator.clip_grad_norm_(model.parameters(), 0.01)
                optimizer.step()
                optimizer.zero_grad()


def beside_whole_batches(ctx):
    accelerator, model, _, loader = set_up(ctx)
    other = accelerator.prepare(DataLoader(accelerate_classifier.data(24, 9), 6, shuffle=True))
    for _ in loader.epochs(1):
        for (more, _), (x, y) in zip(other, loader, strict=True):
            accelerator.backward(F.cross_entropy(model(x), y) + model(more).square().mean())


def beside_a_model_of_its_own(ctx):
    accelerator, model, _, loader = set_up(ctx)
    other = net()
    own = torch.optim.SGD(other.parameters(), lr=0.1)
    for _ in loader.epochs(1):
        for x, y in loader:
            accelerator.backward(F.cross_entropy(model(x) + other(x), y))
            own.step()


def prepared_late(ctx):
    accelerator, *_, loader = set_up(ctx)
    for _ in loader.epochs(1):
        accelerator.prepare(net())


def gathering_shares(ctx):
    accelerator, *_, loader = set_up(ctx)
    for _ in loader.epochs(1):
        for x, _ in loader:
            accelerator.gather_for_metrics(x.sum())


def waiting_early(ctx):
    accelerator, *_ = set_up(ctx)
    accelerator.wait_for_everyone()


def calling(name, *args, **settings):
    def call(ctx):
        getattr(set_up(ctx, **settings)[0], name)(*args)

    return call


@pytest.mark.parametrize(
    ("train", "workers", "says"),
    [
        (in_a_plain_loop, 1, "for epoch in loader.epochs"),
        (with_a_backward_of_its_own, 1, "for epoch in loader.epochs"),
        (adding_up_without_telling, 1, "accelerator.accumulate"),
        (clipping_each_batch, 1, "if accelerator.sync_gradients:"),
        (beside_whole_batches, 1, "zip(loader.epochs(n), other.epochs(n))"),
        (beside_a_model_of_its_own, 1, "its parameters are of no model"),
        (prepared_late, 1, "before the first batch"),
        (gathering_shares, 2, "differs between workers"),
        (waiting_early, 1, "before a loader was used"),
    ],
)
def test_what_a_group_cannot_do_is_refused(tmp_path, train, workers, says):
    with pytest.raises(ConfigError, match=re.escape(says)):
        run_local(train, workers, directory=tmp_path / "run")


REFUSED = [
    (calling("save_state", "here"), "CheckpointConfig"),
    (calling("load_state", "here"), "by itself"),
    (calling("skip_first_batches", None, 2), "first batch that was not used"),
    (calling("on_process", print, 1), "on_main_process"),
    (calling("trigger_sync_in_backward", None), "out of no_sync"),
    (calling("save", {}, None), "Give a path"),
    (
        calling("print", dataloader_config=DataLoaderConfiguration(dispatch_batches=True)),
        "dispatch_batches=True",
    ),
    (calling("print", mixed_precision="fp8"), "fp8"),
    (calling("print", dataloader_config=DataLoaderConfiguration(data_seed=0)), "data_seed=0"),
    (
        calling(
            "print",
            kwargs_handlers=[
                DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.FP16)
            ],
        ),
        "with a comm_hook",
    ),
    (
        calling("print", gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=0)),
        "must be a whole number >= 1, not 0",
    ),
    (calling("print", gradient_acumulation_steps=2), "Did you mean 'gradient_accumulation_steps'?"),
    (calling("print", gradient_accumulation_steps=0), "must be a whole number >= 1, not 0"),
    (calling("print", gradient_accumulation_steps="2"), "must be a whole number >= 1, not '2'"),
    (calling("print", fsdp_plugin=FullyShardedDataParallelPlugin), "docs/large-models.md"),
]


def all_refused(ctx):
    """One after the other in one worker; none of them needs a group."""
    for call, says in REFUSED:
        with pytest.raises(ConfigError, match=re.escape(says)):
            call(ctx)
    raise ConfigError("all were refused")


def test_a_worker_with_a_gpu_does_not_compute_on_the_cpu_in_silence(monkeypatch):
    monkeypatch.setattr(elastix.Context, "mesh", None)
    monkeypatch.setattr(elastix.Context, "steps_alone", False)
    monkeypatch.setattr(elastix.Context, "device", torch.device("cuda", 0))
    with pytest.raises(ConfigError, match="cpu=True, while this worker computes on cuda:0"):
        elastix.accelerate.Accelerator(object.__new__(elastix.Context), cpu=True)


def test_what_accelerate_alone_can_do_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="all were refused"):
        run_local(all_refused, 1, directory=tmp_path / "run")
    with pytest.raises(ConfigError, match=re.escape("train(ctx)")):
        elastix.accelerate.Accelerator(None)
    with pytest.raises(ConfigError, match="Accelerator needs ctx"):
        elastix.accelerate.Accelerator(mixed_precision="no")
    shown = inspect.signature(elastix.accelerate.Accelerator).parameters
    assert list(shown)[:2] == ["ctx", "device_placement"]


# ------------------------------------------------------------ further words of Accelerate


def accumulating(ctx):
    """Two models, two batches a step, a scheduler that is stepped with each, evaluation amid it."""
    accelerator, first, optimizer, loader = set_up(ctx, batch=5, gradient_accumulation_steps=2)
    torch.manual_seed(2)
    second = net()
    other = torch.optim.SGD(second.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 1, 0.9)
    second, other, scheduler = accelerator.prepare(second, other, scheduler)
    means = []
    for epoch in loader.epochs(2):
        for x, y in loader:
            with accelerator.accumulate(*([first, second] if epoch else [])):
                loss = F.cross_entropy(first(x) + second(x), y)
                accelerator.backward(loss)
                for one in (optimizer, other, scheduler):
                    one.step()
                for one in (optimizer, other):
                    one.zero_grad()
            means.append(float(accelerator.reduce(loss.detach(), reduction="mean")))
            with torch.no_grad():  # in the middle of training
                for x, _ in DataLoader(loader.dataset, 12):
                    accelerator.gather_for_metrics(torch.ones(len(x)))
    if ctx.rank == 1:
        accelerator.set_trigger()
    ctx.report(means=repr(means), rate=scheduler.get_last_lr()[0])
    assert accelerator.check_trigger()
    assert not accelerator.check_trigger()


def test_two_models_accumulation_and_a_scheduler_are_those_of_one_process(tmp_path):
    result = run_local(accumulating, 3, directory=tmp_path / "run")
    torch.manual_seed(1)
    first = net()
    torch.manual_seed(2)
    second = net()
    rates = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (first, second)]
    x, y = accelerate_classifier.data(24, 7).tensors
    means, steps = [], 0
    for _, batches in adapting.committed(result.events):
        assert len(batches) == (1 if steps % 3 == 2 else 2)  # five batches: the last is alone
        for batch in batches:
            loss = F.cross_entropy(first(x[batch]) + second(x[batch]), y[batch])
            (loss / 2).backward()
            means.append(loss.item())
        for optimizer in rates:
            optimizer.step()
            optimizer.zero_grad()
        steps += 1
        rates[0].param_groups[0]["lr"] *= 0.9
    tensors = adapting.stored(result)
    assert adapting.equal(first, {n: tensors[n] for n in first.state_dict()}) <= 1e-6
    theirs = {n: tensors[f"@module1/{n}"] for n in second.state_dict()}
    assert adapting.equal(second, theirs) <= 1e-6
    told = next(e for e in result.events if isinstance(e, Reported)).metrics
    assert ast.literal_eval(told["means"]) == pytest.approx(means, rel=1e-6)
    assert told["rate"] == pytest.approx(0.1 * 0.9**steps)


def saving(ctx):
    accelerator, model, optimizer, loader = set_up(ctx)
    for _ in loader.epochs(1):
        for x, y in loader:
            accelerator.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
    out = Path(ctx.config["out"])
    for number in range(3):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(number)
        accelerator.save_model(model, out, max_shard_size=200)
        (out / "mine.txt").write_text("mine")
        read = net()
        load_checkpoint_in_model(read, out)
        assert all((parameter == number).all() for parameter in read.parameters())
    with pytest.raises(ConfigError, match="which is a file"):
        accelerator.save_model(model, out / "mine.txt")


def test_a_model_in_shards_is_the_one_that_was_saved_last(tmp_path):
    config = {"out": str(tmp_path / "out")}
    run_local(saving, 1, config=config, directory=tmp_path / "run")
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    shards = [name for name in names if name.startswith("model-0")]
    assert len(shards) > 1
    assert names == ["mine.txt", *shards, "model.safetensors.index.json"]


def with_nothing_left_for_two(ctx):
    """The last batch has three samples, all of them the first worker's."""
    accelerator, model, optimizer, loader = set_up(ctx, batch=7)
    for _ in loader.epochs(2):
        for x, y in loader:
            accelerator.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
        if ctx.rank == 2:
            accelerator.set_trigger()
        assert accelerator.check_trigger()
        assert not accelerator.check_trigger()


def test_a_trigger_is_seen_though_who_sets_it_had_nothing_of_the_last_batch(tmp_path):
    result = run_local(with_nothing_left_for_two, 3, directory=tmp_path / "run")
    last = adapting.steps(result.events)[-1].batches[0]
    assert list(last.shares) == [0]
