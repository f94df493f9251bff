"""Ray Train's kind of script, with two lines changed, under kills; what is refused."""

import json
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from ray.train import CheckpointConfig, FailureConfig, LoggingConfig, RunConfig, ScalingConfig
from ray.train.examples.pytorch import torch_linear_example
from torch.utils.data import DataLoader

import elastix
from elastix import ray_train as train
from elastix.errors import ConfigError
from elastix.events import Reported
from elastix.ray_train.reported_checkpoints import ReportedCheckpoints
from elastix.ray_train.torch import TrainLoop
from elastix.testing.local import run_local
from tests.adapters import adapting, ray_train_classifier
from tests.adapters.adapting import Changed

LINES = {
    "from ray import train": "from elastix import ray_train as train",
    'in range(config["epochs"])': 'in train_loader.epochs(config["epochs"])',
}


def as_ray_train(run, settings, ctx):
    kept = ReportedCheckpoints(
        Path(settings["log"]) / "run" / "checkpoints", keep=2, score="test_loss"
    )
    TrainLoop(lambda: run(settings), kept)(ctx)


SCRIPT = Changed("ray_train_classifier.py", LINES, as_ray_train)


def net():
    return ray_train_classifier.Net().double()


def test_a_ray_train_script_ends_as_plain_torch_does_whoever_is_killed(tmp_path):
    assert SCRIPT.changed == 2
    result, losses = adapting.run(SCRIPT, tmp_path, adapting.kills())
    model, expected = adapting.plain(result.events, net, ray_train_classifier.data)
    tensors = adapting.stored(result)
    assert adapting.equal(model, {n: tensors[n] for n in model.state_dict()}) <= 1e-5
    adapting.check_losses(losses, expected)
    kept = ReportedCheckpoints(tmp_path / "logs" / "run" / "checkpoints").all()
    worst = max(range(adapting.EPOCHS), key=lambda epoch: expected[epoch][1])
    assert [told["epoch"] for _, told in kept][-1] == adapting.EPOCHS - 1
    assert worst in [told["epoch"] for _, told in kept]
    saved = torch.load(kept[-1][0] / "model.pt", weights_only=True)
    assert all(torch.equal(saved["model"][n], tensors[n]) for n in model.state_dict())
    assert not list(kept[0][0].parent.glob("*.partial"))


def seeded(run, settings, ctx):
    torch.manual_seed(1)  # the example does not say with which weights it begins
    kept = ReportedCheckpoints(Path(settings["log"]) / "run" / "checkpoints")
    TrainLoop(lambda: run(settings), kept)(ctx)


EXAMPLE = Changed(
    torch_linear_example.__file__,
    {
        "import ray.train as train": "from elastix import ray_train as train",
        "in range(epochs)": "in train_loader.epochs(epochs)",
    },
    seeded,
    "train_func",
)


def test_an_example_of_ray_ends_as_plain_torch_does_whoever_is_killed(tmp_path):
    """The file that Ray is shipped with, as it is installed."""
    assert EXAMPLE.changed == 2
    sizes = {"batch_size": 4, "data_size": 97, "val_size": 40}
    result, _ = adapting.run(EXAMPLE, tmp_path, adapting.kills(), **sizes)
    data = torch_linear_example.LinearDataset(2, 5, size=sizes["data_size"])
    look = torch_linear_example.LinearDataset(2, 5, size=sizes["val_size"])
    torch.manual_seed(1)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    losses = {}
    for epoch, (batch,) in adapting.committed(result.events):
        optimizer.zero_grad()
        F.mse_loss(model(data.x[batch, None]), data.y[batch, None]).backward()
        optimizer.step()
        with torch.no_grad():
            losses[epoch] = float(F.mse_loss(model(look.x[:, None]), look.y[:, None]))
    assert adapting.equal(model, adapting.stored(result)) <= 1e-5
    told = [event.metrics["loss"] for event in result.events if isinstance(event, Reported)]
    assert told == pytest.approx(list(losses.values()), rel=1e-5)
    assert len(told) == adapting.EPOCHS


# ------------------------------------------------------------ what cannot be said is refused


def set_up(loader=None):
    torch.manual_seed(1)
    model = train.torch.prepare_model(ray_train_classifier.Net().double())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = ray_train_classifier.data(24, 7)
    loader = train.torch.prepare_data_loader(loader(data) if loader else DataLoader(data, 6))
    return model, optimizer, loader


def step(model, optimizer, x, y):
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()


def in_a_plain_loop():
    model, optimizer, loader = set_up()
    for x, y in loader:
        step(model, optimizer, x, y)


def with_a_plain_loader():
    model, optimizer, loader = set_up()
    for x, y in DataLoader(loader.dataset, 6):
        step(model, optimizer, x, y)


def with_another_loader():
    model, optimizer, loader = set_up()
    for _ in loader.epochs(1):
        for x, y in DataLoader(loader.dataset, 6):
            step(model, optimizer, x, y)


def with_a_model_of_its_own():
    _, _, loader = set_up()
    model = ray_train_classifier.Net().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in loader.epochs(1):
        for x, y in loader:
            step(model, optimizer, x, y)


def with_two_optimizers_of_one_model():
    model, optimizer, loader = set_up()
    other = torch.optim.Adam(model.parameters())
    next(loader.epochs(1))
    del other, optimizer


def reporting_early():
    set_up()
    train.report({"loss": 1.0})


def with_fsdp():
    train.torch.prepare_model(torch.nn.Linear(1, 1), parallel_strategy="fsdp")


def without_moving():
    train.torch.prepare_data_loader(DataLoader([1, 2]), add_dist_sampler=False)


def reporting_to_tune():
    *_, loader = set_up()
    next(loader.epochs(1))
    train.report({"loss": 1.0}, validation=True)


def with_a_shard():
    train.get_dataset_shard("train")


def with_storage():
    train.get_context().get_storage()


@pytest.mark.parametrize(
    ("loop", "says"),
    [
        (in_a_plain_loop, "for epoch in loader.epochs"),
        (with_a_plain_loader, "Give the DataLoader to train.torch.prepare_data_loader"),
        (with_another_loader, "for epoch in loader.epochs"),
        (with_a_model_of_its_own, "not given to train.torch.prepare_model"),
        (with_two_optimizers_of_one_model, "train.track(first=..., second=...)"),
        (reporting_early, "before a loader was used"),
        (with_fsdp, "docs/large-models.md"),
        (without_moving, "Leave both out"),
        (reporting_to_tune, "train.report got validation"),
        (with_a_shard, "train.get_dataset_shard is not there"),
        (with_storage, "no get_storage"),
    ],
)
def test_what_a_group_cannot_do_is_refused(tmp_path, loop, says):
    with pytest.raises(ConfigError, match=re.escape(says)):
        run_local(
            TrainLoop(loop, ReportedCheckpoints(tmp_path)),
            1,
            directory=tmp_path / "run",
        )


def test_outside_of_a_train_loop_nothing_is_known():
    with pytest.raises(ConfigError, match="outside of a train loop"):
        train.get_context()


# ------------------------------------------------------------ further words of Ray Train


def accumulating(config):
    """One step for each pair of batches; what the first worker alone reports is kept."""
    context = train.get_context()
    model, optimizer, loader = set_up()
    for epoch in loader.epochs(2):
        for number, (x, y) in enumerate(loader):
            last = number % 2 == 1
            loss = F.cross_entropy(model(x), y) / 2
            if not last:
                with context.ctx.accumulate():
                    loss.backward()
            else:
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        checkpoint = None
        if context.get_world_rank() == 0:
            folder = Path(config["folder"])
            (folder / "epoch").write_text(str(epoch))
            checkpoint = train.Checkpoint.from_directory(str(folder))
        train.report({"epoch": epoch}, checkpoint=checkpoint, checkpoint_dir_name=f"e{epoch}")
    for _ in range(2):
        train.report({"epoch": epoch}, checkpoint=checkpoint)


def test_accumulation_is_that_of_one_process_and_the_first_worker_may_report_alone(tmp_path):
    (tmp_path / "made").mkdir()
    kept = ReportedCheckpoints(tmp_path / "kept")
    result = run_local(
        TrainLoop(accumulating, kept),
        3,
        config={"folder": str(tmp_path / "made")},
        directory=tmp_path / "run",
    )
    torch.manual_seed(1)
    model = ray_train_classifier.Net().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = ray_train_classifier.data(24, 7).tensors
    for _, batches in adapting.committed(result.events):
        assert len(batches) == 2
        for batch in batches:
            (F.cross_entropy(model(x[batch]), y[batch]) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    tensors = adapting.stored(result)
    assert adapting.equal(model, {n: tensors[n] for n in model.state_dict()}) <= 1e-6
    assert [(path.name, (path / "epoch").read_text()) for path, _ in kept.all()] == [
        ("e0", "0"),
        ("e1", "1"),
        ("checkpoint_00000004", "1"),
        ("checkpoint_00000004_2", "1"),
    ]


def loop():
    pass


def made(tmp_path, **settings):
    return train.torch.TorchTrainer(
        loop,
        scaling_config=ScalingConfig(num_workers=4, resources_per_worker={"CPU": 0.5}),
        run_config=RunConfig(
            name="mine",
            storage_path=str(tmp_path),
            failure_config=FailureConfig(max_failures=3),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
        ),
        **settings,
    )


def test_the_settings_mean_what_they_mean_in_ray_train(tmp_path):
    trainer = made(tmp_path, train_loop_config={"lr": 0.1}).trainer
    ours = trainer._asked
    assert ours.config == {"lr": 0.1}
    assert ours.scaling == elastix.ScalingConfig(
        num_workers=(1, 4), cpus_per_worker=0.5, placement="PACK"
    )
    assert ours.run == elastix.RunConfig(name="mine", store=str(tmp_path))
    assert ours.failure.max_worker_losses == 3
    assert ours.checkpoint.every_s == 60
    assert trainer._train.checkpoints.keep == 2
    first, second = (train.torch.TorchTrainer(loop).trainer, made(tmp_path).trainer)
    assert first._asked.run.name != second._asked.run.name


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"datasets": {"train": 1}}, "Make a DataLoader"),
        ({"resume_from_checkpoint": 1}, "goes on by itself"),
        ({"train_loop_config": {"model": torch.nn.Linear(1, 1)}}, "which the run's journal"),
        ({"run": elastix.RunConfig()}, "both run_config and run"),
        ({"train_loop_confg": {}}, "Did you mean 'train_loop_config'?"),
        ({"faliure": None}, "Did you mean 'failure'?"),
        ({"backend_config": 1}, "makes the connections itself"),
    ],
)
def test_settings_of_ray_train_alone_are_refused(tmp_path, settings, says):
    with pytest.raises(ConfigError, match=re.escape(says)):
        made(tmp_path, **settings)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"scaling_config": elastix.ScalingConfig()}, "scaling=elastix.ScalingConfig"),
        ({"scaling_config": 2}, "Give train.ScalingConfig"),
        ({"run_config": "digits"}, "run=elastix.RunConfig"),
        ({"scaling_config": ScalingConfig(resources_per_worker={"CPU": "x"})}, "cpus_per_worker"),
    ],
)
def test_a_setting_of_the_wrong_class_is_refused(settings, says):
    with pytest.raises(ConfigError, match=re.escape(says)):
        train.torch.TorchTrainer(loop, **settings)


def test_a_trainer_without_a_loop_says_what_it_needs():
    with pytest.raises(ConfigError, match="TorchTrainer needs train_loop_per_worker"):
        train.torch.TorchTrainer(train_loop_config={})
    with pytest.raises(ConfigError, match="takes only train_loop_per_worker without a name"):
        train.torch.TorchTrainer(loop, {"lr": 1})


def test_scaling_of_ray_train_alone_is_refused():
    for settings in ({"accelerator_type": "A100"}, {"resources_per_worker": {"disk": 1}}):
        with pytest.raises(ConfigError, match=re.escape(next(iter(settings)))):
            train.torch.TorchTrainer(loop, scaling_config=ScalingConfig(**settings))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (
            {"scaling_config": ScalingConfig(elastic_resize_monitor_interval_s=5.0)},
            "ScalingConfig has elastic_resize_monitor_interval_s=5.0",
        ),
        (
            {"run_config": RunConfig(logging_config=LoggingConfig(log_level="DEBUG"))},
            "logging_config",
        ),
        (
            {"run_config": RunConfig(failure_config=FailureConfig(controller_failure_limit=3))},
            "FailureConfig has controller_failure_limit=3",
        ),
    ],
)
def test_no_setting_of_ray_train_is_ignored_in_silence(settings, says):
    with pytest.raises(ConfigError, match=re.escape(says)):
        train.torch.TorchTrainer(loop, **settings)


def test_the_best_checkpoints_are_kept_and_the_latest(tmp_path):
    kept = ReportedCheckpoints(tmp_path / "kept", keep=1, score="loss", lowest=True)
    made = train.Checkpoint.from_directory(str(tmp_path / "made"))
    (tmp_path / "made").mkdir()
    for number, loss in enumerate((3.0, 1.0, 2.0)):
        path = kept.path(f"e{number}")
        kept.writer(made, {"loss": torch.tensor(loss)})(path)
        kept.retire(path)
    assert [(path.name, told) for path, told in kept.all()] == [
        ("e1", {"loss": 1.0}),
        ("e2", {"loss": 2.0}),
    ]
    assert json.loads((kept.path("e2") / ".elastix.json").read_text())["number"] == 3
    with pytest.raises(ConfigError, match="are those of 'loss'"):
        kept.writer(made, {"accuracy": 1.0})
    with pytest.raises(ConfigError, match="no name of a directory"):
        kept.path("../e1")


@pytest.mark.parametrize("lowest", [True, False])
def test_a_score_that_is_no_number_is_never_the_best(tmp_path, lowest):
    kept = ReportedCheckpoints(tmp_path / "kept", keep=1, score="loss", lowest=lowest)
    made = train.Checkpoint.from_directory(str(tmp_path / "made"))
    (tmp_path / "made").mkdir()
    for number, loss in enumerate((float("nan"), 1.0, float("nan"), float("nan"))):
        path = kept.path(f"e{number}")
        kept.writer(made, {"loss": loss})(path)
        kept.retire(path)
    assert [path.name for path, _ in kept.all()] == ["e1", "e3"]


def test_who_is_lost_while_it_removes_a_checkpoint_leaves_no_part_of_it(tmp_path, monkeypatch):
    kept = ReportedCheckpoints(tmp_path / "kept", keep=1)
    made = train.Checkpoint.from_directory(str(tmp_path / "made"))
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "model.pt").write_text("weights")
    monkeypatch.setattr(
        "shutil.rmtree", lambda path, **_: (path / "model.pt").unlink(missing_ok=True)
    )
    for name in ("e0", "e1"):
        path = kept.path(name)
        path.mkdir(parents=True)
        (path / "model.pt").touch()  # which the writer removes at first
        kept.writer(made, {})(path)
        kept.retire(path)
    assert [path.name for path, _ in kept.all()] == ["e1"]


def test_what_a_killed_worker_had_begun_to_remove_is_removed_by_the_next(tmp_path):
    kept = ReportedCheckpoints(tmp_path / "kept", keep=1)
    made = train.Checkpoint.from_directory(str(tmp_path / "made"))
    (tmp_path / "made").mkdir()
    for name in (".e0.gone", ".e7.gone"):
        (tmp_path / "kept" / name / "part").mkdir(parents=True)
    for name in ("e0", "e1"):
        path = kept.path(name)
        kept.writer(made, {})(path)
        kept.retire(path)
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["e1"]


def test_a_home_directory_is_meant_by_its_sign(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    made = train.torch.TorchTrainer(loop, run_config=RunConfig(name="r", storage_path="~/here"))
    assert made._checkpoints.directory == tmp_path / "here" / "runs" / "r" / "checkpoints"
    assert elastix.RunConfig(name="r", store="~/here").store == str(tmp_path / "here")
