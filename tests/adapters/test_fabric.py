"""Lightning Fabric's kind of script, with two lines changed, under kills; what is refused."""

import ast
import re
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("lightning_fabric", reason="the extra `fabric` is not installed")

from lightning_fabric import Fabric
from lightning_fabric.accelerators import CUDAAccelerator
from lightning_fabric.plugins.environments import LightningEnvironment, MPIEnvironment
from torch.utils.data import DataLoader

import elastix
from elastix.data.audit import audit
from elastix.data.sample_order import indices
from elastix.errors import ConfigError
from elastix.events import LoaderOpened, Reported
from elastix.script_adapter import LoneLoader
from elastix.testing.local import run_local
from tests.adapters import adapting, fabric_classifier
from tests.adapters.adapting import Changed

LINES = {
    'Fabric(accelerator="cpu", precision="64-true")': (
        'Fabric(strategy=__import__("elastix").fabric.Strategy(ctx), precision="64-true")'
    ),
    'in range(hparams["epochs"])': 'in train_loader.epochs(hparams["epochs"])',
}
SCRIPT = Changed("fabric_classifier.py", LINES)


def net():
    torch.set_default_dtype(torch.float64)
    model = fabric_classifier.Net()
    torch.set_default_dtype(torch.float32)
    return model


def test_a_fabric_script_ends_as_plain_torch_does_whoever_is_killed(tmp_path):
    assert SCRIPT.changed == 2
    file = tmp_path / "model.ckpt"
    result, losses = adapting.run(SCRIPT, tmp_path, adapting.kills(), save=str(file))
    model, expected = adapting.plain(result.events, net, fabric_classifier.data)
    tensors = adapting.stored(result)
    assert adapting.equal(model, {n: tensors[n] for n in model.state_dict()}) <= 1e-5
    adapting.check_losses(losses, expected)
    saved = torch.load(file, weights_only=True)
    assert saved["epoch"] == adapting.EPOCHS - 1
    assert all(torch.equal(saved["model"][n], tensors[n]) for n in model.state_dict())
    assert [path.name for path in tmp_path.iterdir() if "ckpt" in path.name] == ["model.ckpt"]


# ------------------------------------------------------------ what cannot be said is refused


def set_up(ctx, loader=None, *, launch=True):
    fabric = Fabric(strategy=elastix.fabric.Strategy(ctx), precision="64-true")
    if launch:
        fabric.launch()
    torch.manual_seed(1)
    with fabric.init_module():
        model = fabric_classifier.Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = fabric.setup(model, optimizer)
    data = fabric_classifier.data(24, 7)
    loader = fabric.setup_dataloaders(loader(data) if loader else DataLoader(data, 6))
    return fabric, model, optimizer, loader


def in_a_plain_loop(ctx):
    fabric, model, _, loader = set_up(ctx)
    for x, y in loader:
        fabric.backward(F.cross_entropy(model(x), y))


def plain_backward_on_whole_batches(ctx):
    _, model, optimizer, loader = set_up(ctx)
    for x, y in loader:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def another(fabric, **options):
    data = fabric_classifier.data(24, 9)
    return fabric.setup_dataloaders(DataLoader(data, 6, shuffle=True, **options))


def beside_whole_batches(ctx):
    fabric, model, _, loader = set_up(ctx)
    other = another(fabric)
    for _ in loader.epochs(1):
        for (x, y), (more, _) in ((b, a) for a, b in zip(other, loader, strict=True)):
            fabric.backward(F.cross_entropy(model(x), y) + model(more).square().mean())


def with_one_more_batch(ctx):
    fabric, model, _, loader = set_up(ctx)
    other = another(fabric)
    for _ in loader.epochs(1):
        more, _ = next(iter(other))
        for x, y in loader:
            fabric.backward(F.cross_entropy(model(x), y) + model(more).square().mean())


def adding_up_without_telling(ctx):
    fabric, model, optimizer, loader = set_up(ctx)
    for _ in loader.epochs(1):
        for number, (x, y) in enumerate(loader):
            fabric.backward(F.cross_entropy(model(x), y) / 2)
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()


def looking_at_all_of_it_again(ctx):
    fabric, model, optimizer, loader = set_up(ctx)
    for _ in loader.epochs(1):
        for x, y in loader:
            fabric.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            for x, _ in loader:
                model(x)


def with_a_sampler(ctx):
    sampled = torch.utils.data.WeightedRandomSampler([1.0] * 24, 24)
    *_, loader = set_up(ctx, loader=lambda data: DataLoader(data, 6, sampler=sampled))
    next(loader.epochs(1))


def with_samples_dropped(ctx):
    *_, loader = set_up(ctx, loader=lambda data: DataLoader(data, 7, drop_last=True))
    next(loader.epochs(1))


def with_two_schedulers(ctx):
    _, _, optimizer, loader = set_up(ctx)
    kept = [torch.optim.lr_scheduler.StepLR(optimizer, n) for n in (1, 2)]
    next(loader.epochs(1))
    assert kept


def beside_a_model_of_its_own(ctx):
    fabric, model, _, loader = set_up(ctx)
    other = net()
    own = torch.optim.SGD(other.parameters(), lr=0.1)
    for _ in loader.epochs(1):
        for x, y in loader:
            fabric.backward(F.cross_entropy(model(x) + other(x), y))
            own.step()


def set_up_late(ctx):
    fabric, _, _, loader = set_up(ctx)
    for _ in loader.epochs(1):
        fabric.setup(fabric_classifier.Net())


def gathering_shares(ctx):
    fabric, _, _, loader = set_up(ctx)
    for _ in loader.epochs(1):
        for x, _ in loader:
            fabric.all_gather(x.sum())


def summing_shares(ctx):
    fabric, _, _, loader = set_up(ctx)
    for _ in loader.epochs(1):
        for x, _ in loader:
            fabric.all_reduce(x.sum(), reduce_op="sum")


def loading_late(ctx):
    fabric, _, _, loader = set_up(ctx)
    for _ in loader.epochs(1):
        fabric.load("nowhere")


def waiting_early(ctx):
    fabric, *_ = set_up(ctx)
    fabric.barrier()


def with_no_context(ctx):
    elastix.fabric.Strategy(None)


def test_a_strategy_says_what_it_needs():
    with pytest.raises(ConfigError, match="Strategy needs ctx"):
        elastix.fabric.Strategy()
    with pytest.raises(ConfigError, match="Did you mean 'accelerator'"):
        elastix.fabric.Strategy(None, acclerator=None)


@pytest.mark.parametrize(
    ("train", "workers", "says"),
    [
        (in_a_plain_loop, 1, "for epoch in loader.epochs"),
        (plain_backward_on_whole_batches, 1, "for epoch in loader.epochs"),
        (beside_whole_batches, 1, "zip(loader.epochs(n), other.epochs(n))"),
        (with_one_more_batch, 1, "within torch.no_grad()"),
        (adding_up_without_telling, 1, "fabric.no_backward_sync"),
        (looking_at_all_of_it_again, 1, "a loader of its own"),
        (with_a_sampler, 1, "WeightedRandomSampler"),
        (with_samples_dropped, 1, "leave 3 samples of each epoch out"),
        (with_two_schedulers, 1, "2 schedulers"),
        (beside_a_model_of_its_own, 1, "its parameters are of no model"),
        (set_up_late, 1, "before the first batch"),
        (gathering_shares, 2, "differs between workers"),
        (summing_shares, 2, "differs between workers"),
        (loading_late, 1, "RestoreConfig"),
        (waiting_early, 1, "before a loader was used"),
        (with_no_context, 1, "train(ctx)"),
    ],
)
def test_what_a_group_cannot_do_is_refused(tmp_path, train, workers, says):
    with pytest.raises(ConfigError, match=re.escape(says)):
        run_local(train, workers, directory=tmp_path / "run")


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"devices": 4}, "Fabric was given devices=4"),
        ({"devices": "3"}, "Fabric was given devices=3"),
        ({"num_nodes": 2}, "Fabric was given num_nodes=2"),
        ({"plugins": MPIEnvironment.__new__(MPIEnvironment)}, "plugins=MPIEnvironment()"),
        ({"accelerator": "gpu"}, "computes on cpu"),
    ],
)
def test_what_says_how_many_processes_there_are_is_not_ignored(settings, says, monkeypatch):
    """Fabric's own strategies start them."""
    monkeypatch.setattr(CUDAAccelerator, "is_available", lambda: True)
    monkeypatch.setattr(CUDAAccelerator, "parse_devices", lambda _: [0])
    monkeypatch.setattr(
        CUDAAccelerator, "get_parallel_devices", lambda _: [torch.device("cuda", 0)]
    )
    ctx = object.__new__(elastix.Context)
    monkeypatch.setattr(elastix.Context, "mesh", None)
    monkeypatch.setattr(elastix.Context, "steps_alone", False)
    monkeypatch.setattr(elastix.Context, "worker", 0)
    monkeypatch.setattr(elastix.Context, "device", torch.device("cpu"))
    Fabric(strategy=elastix.fabric.Strategy(ctx), accelerator="cpu", devices=1, num_nodes=1)
    Fabric(strategy=elastix.fabric.Strategy(ctx), accelerator="cpu", plugins=LightningEnvironment())
    settings = {"accelerator": "cpu", **settings}
    with pytest.raises(ConfigError, match=re.escape(says)):
        Fabric(strategy=elastix.fabric.Strategy(ctx), **settings)


# ------------------------------------------------------------ further words of Fabric


def evaluating_in_all_ways(ctx):
    """None of these batches is trained on."""
    fabric, model, optimizer, loader = set_up(ctx)
    other = another(fabric)
    next(iter(other))  # to see its shape
    for _ in loader.epochs(1):
        for x, y in loader:
            optimizer.zero_grad()
            fabric.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            with torch.no_grad():
                model(next(iter(other))[0])
            for more, _ in other:  # gradients are not turned off
                model(more)


def test_evaluating_between_steps_is_no_training(tmp_path):
    result = run_local(evaluating_in_all_ways, 2, directory=tmp_path / "run")
    assert len(adapting.steps(result.events)) == 4


def not_launched(ctx):
    """As in scripts for `fabric run`, and for one process."""
    fabric, model, optimizer, loader = set_up(ctx, launch=False)
    for _ in loader.epochs(1):
        for number, (x, y) in enumerate(loader):
            with fabric.no_backward_sync(model, enabled=number % 2 == 0):
                fabric.backward(F.cross_entropy(model(x), y) / 2)
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
        fabric.barrier()
        fabric.save(ctx.config["file"], {"model": model})


def test_a_script_need_not_launch(tmp_path):
    file = tmp_path / "model.ckpt"
    result = run_local(not_launched, 2, config={"file": str(file)}, directory=tmp_path / "run")
    assert audit(result.events).exact
    assert len(adapting.steps(result.events)) == 2  # not four: the passes in between are deferred
    assert file.exists()


def with_a_penalty(ctx):
    """Of the critic's gradient with respect to what it is shown, as in WGAN-GP."""
    fabric, model, optimizer, loader = set_up(ctx)
    for _ in loader.epochs(1):
        for x, y in loader:
            optimizer.zero_grad()
            shown = x.requires_grad_()
            loss = F.cross_entropy(model(shown), y, reduction="sum")
            (slope,) = torch.autograd.grad(loss, shown, create_graph=True)  # of each sample
            total = (loss + slope.square().sum()) / len(x)
            if ctx.config["fabric"]:
                fabric.backward(total)
            else:
                total.backward()
            optimizer.step()


@pytest.mark.parametrize("fabric", [True, False], ids=["fabric.backward", "loss.backward"])
def test_gradients_of_gradients_are_those_of_one_process(tmp_path, fabric):
    ends = []
    for workers in (1, 2):
        options = {"config": {"fabric": fabric}, "directory": tmp_path / str(workers)}
        result = run_local(with_a_penalty, workers, **options)
        assert len(adapting.steps(result.events)) == 4
        ends.append(adapting.stored(result))
    names = [name for name in ends[0] if not name.startswith("@")]
    assert all(torch.allclose(ends[0][name], ends[1][name], atol=1e-10) for name in names)


def on_two_loaders(ctx, loader=None, **options):
    """What the message of whole batches says to write."""
    fabric, model, optimizer, loader = set_up(ctx, loader)
    other = another(fabric, **options)
    for _ in zip(loader.epochs(2), other.epochs(2), strict=True):
        for (x, y), (more, _) in zip(loader, other, strict=True):
            optimizer.zero_grad()
            fabric.backward(F.cross_entropy(model(x), y) + model(more).square().mean())
            optimizer.step()


def test_two_loaders_within_their_epochs_are_counted(tmp_path):
    result = run_local(on_two_loaders, 3, directory=tmp_path / "run")
    assert audit(result.events).exact
    assert [len(event.batches) for event in adapting.steps(result.events)] == [2] * 8


def on_two_that_shuffle(ctx):
    on_two_loaders(ctx, lambda data: DataLoader(data, 6, shuffle=True))


def on_two_that_share_a_generator(ctx):
    options = {"generator": torch.Generator().manual_seed(3)}
    on_two_loaders(ctx, lambda data: DataLoader(data, 6, shuffle=True, **options), **options)


@pytest.mark.parametrize("train", [on_two_that_shuffle, on_two_that_share_a_generator])
def test_two_loaders_that_shuffle_have_orders_of_their_own_as_alone(tmp_path, train):
    """With one seed the k-th samples of two datasets would meet each other in each epoch."""
    result = run_local(train, 2, directory=tmp_path / "run", seed=3)
    opened = [event for event in result.events if isinstance(event, LoaderOpened)]
    assert (opened[0].seed, len(opened)) == (3, 2)
    first, second = (
        indices([(0, one.length)], one.seed, one.length, one.shuffle).tolist() for one in opened
    )
    assert first != second
    assert audit(result.events).exact


def on_one_in_order(ctx):
    given = torch.Generator().manual_seed(7)
    on_two_loaders(ctx, lambda data: DataLoader(data, 6, generator=given))


def test_a_loader_that_does_not_shuffle_has_the_seed_of_its_generator(tmp_path):
    """What samples draw depends on it, and a run goes on with that seed alone."""
    result = run_local(on_one_in_order, 2, directory=tmp_path / "run", seed=3)
    opened = [event for event in result.events if isinstance(event, LoaderOpened)]
    assert [(one.shuffle, one.seed) for one in opened] == [(False, 7), (True, 3)]


def accumulating(ctx):
    """Two models and optimizers, one step for each pair of batches."""
    fabric, first, optimizer, loader = set_up(ctx)
    with fabric.init_module():
        torch.manual_seed(2)
        second = fabric_classifier.Net()
    other = torch.optim.SGD(second.parameters(), lr=0.1)
    second, other = fabric.setup(second, other)
    means = []
    for _ in loader.epochs(2):
        for number, (x, y) in enumerate(loader):
            last = number % 2 == 1
            with fabric.no_backward_sync(first, enabled=not last):
                loss = F.cross_entropy(first(x) + second(x), y) / 2
                fabric.backward(loss)
            means.append(float(fabric.all_reduce(loss.detach())))
            if last:
                for one in (optimizer, other):
                    one.step()
                    one.zero_grad()
    ctx.report(means=repr(means))


def test_two_models_and_accumulation_are_those_of_one_process(tmp_path):
    result = run_local(accumulating, 3, directory=tmp_path / "run")
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(1)
    first = fabric_classifier.Net()
    torch.manual_seed(2)
    second = fabric_classifier.Net()
    torch.set_default_dtype(torch.float32)
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
    x, y = fabric_classifier.data(24, 7).tensors
    means = []
    for _, batches in adapting.committed(result.events):
        assert len(batches) == 2
        for batch in batches:
            loss = F.cross_entropy(first(x[batch]) + second(x[batch]), y[batch]) / 2
            loss.backward()
            means.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    tensors = adapting.stored(result)
    assert adapting.equal(first, {n: tensors[n] for n in first.state_dict()}) <= 1e-6
    theirs = {n: tensors[f"@module1/{n}"] for n in second.state_dict()}
    assert adapting.equal(second, theirs) <= 1e-6
    reported = next(e for e in result.events if isinstance(e, Reported)).metrics["means"]
    assert ast.literal_eval(reported) == pytest.approx(means, rel=1e-6)


def opens_files(number):
    """What a DataLoader calls in each of its processes."""
    del number


def test_a_function_that_prepares_processes_is_not_left_out_in_silence():
    data = torch.utils.data.TensorDataset(torch.zeros(8, 1))
    script = SimpleNamespace(peer="elastix.fabric")
    prepared = DataLoader(data, 2, num_workers=1, worker_init_fn=opens_files)
    with pytest.raises(ConfigError, match=r"worker_init_fn would not be called.*Nothing was read"):
        next(LoneLoader(prepared, script).epochs(1))
