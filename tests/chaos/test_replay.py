"""Law 2: a single process, fed the committed batches, ends with the same weights."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import elastix
from elastix.config import CheckpointConfig
from elastix.errors import TrainError
from elastix.events import StepCommitted
from elastix.observe import journal
from elastix.testing.chaos import Kill, with_kills
from elastix.testing.local import run_local
from elastix.testing.replay import compare
from tests.laws import assert_exactly_once, committed
from tests.trainables import make, samples, train

SCHEDULES = {
    "nobody": [],
    "mid-backward": [Kill(worker=1, phase="bucket", detail=0, step=7)],
    "commit round, forward, mid-backward": [
        Kill(worker=0, phase="round", step=5, detail=1),
        Kill(worker=2, phase="batch", step=11),
        Kill(worker=4, phase="bucket", detail=1, step=23),
    ],
    "two at once, then one after the commit": [
        Kill(worker=1, phase="bucket", step=9),
        Kill(worker=3, phase="batch", step=9),
        Kill(worker=0, phase="left", step=21),
    ],
}


@pytest.mark.fast("convnet-mid-backward-3", "tied-commit*-3", "unused-two*-3")
@pytest.mark.parametrize("epochs", [3, pytest.param(6, marks=pytest.mark.slow)])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("model", ["convnet", "tied", "unused"])
def test_replay_in_float64_with_adamw(tmp_path, schedule, model, epochs):
    config = {"model": model, "samples": 250, "batch_size": 30, "epochs": epochs}
    doomed = with_kills(train, SCHEDULES[schedule])
    result = run_local(doomed, 5, config=config, directory=tmp_path)
    assert len(committed(result.events)) >= 8 * epochs
    assert_exactly_once(result.events, epochs)
    difference = compare(tmp_path)
    assert difference.steps == len(committed(result.events))
    assert difference.relative < 1e-9, difference


def test_replay_in_float32_with_sgd(tmp_path):
    config = {"dtype": "float32", "optimizer": "sgd", "samples": 250, "batch_size": 30, "epochs": 6}
    doomed = with_kills(train, SCHEDULES["mid-backward"])
    run_local(doomed, 3, config=config, directory=tmp_path)
    assert compare(tmp_path).relative < 1e-4


def test_replay_with_accumulation_and_a_joiner(tmp_path):
    config = {"accumulate": 2, "samples": 240, "batch_size": 30, "epochs": 4}
    doomed = with_kills(train, [Kill(worker=1, phase="bucket", step=3)])
    run_local(doomed, 3, config=config, directory=tmp_path, replace=True, min_workers=3)
    assert compare(tmp_path).relative < 1e-9


def test_replay_notices_a_batch_that_was_not_used(tmp_path):
    """The control: a journal that claims another share than was trained on."""
    config = {"samples": 120, "batch_size": 30, "epochs": 2}
    run_local(train, 2, config=config, directory=tmp_path)
    path = tmp_path / "journal.jsonl"
    assert any(isinstance(event, StepCommitted) for event in journal.read(path))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    batch = next(line for line in lines if line.get("step") == 3)["batches"][0]
    batch["shares"]["0"], batch["shares"]["1"] = [[0, 15]], [[15, 30]]
    for line in lines:
        del line["crc"]  # of what was written
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert compare(tmp_path).relative > 1e-6


def stops_in_the_middle(ctx: elastix.Context) -> None:
    """A run that goes some steps beyond the State that it stored last, and ends with an error."""
    model, optimizer, dataset = make(ctx.config)
    model, optimizer = ctx.prepare(model, optimizer)
    for epoch in ctx.loader(dataset, 30).epochs(3):
        for x, y in epoch:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            if ctx.step == 8:
                raise ValueError("enough")


def test_a_run_that_went_on_beyond_its_last_state_is_compared_with_what_it_was_then(tmp_path):
    every = CheckpointConfig(every_steps=5, wait=True)
    config = {"model": "mlp", "samples": 240}
    options = {"config": config, "directory": tmp_path, "checkpoint": every}
    with pytest.raises(TrainError, match="enough"):
        run_local(stops_in_the_middle, 2, **options)
    steps = [event.step for event in committed(list(journal.read(tmp_path / "journal.jsonl")))]
    assert max(steps) > 5
    difference = compare(tmp_path)
    assert difference.steps == 5
    assert difference.relative < 1e-9, difference


def train_with_breaks(ctx: elastix.Context) -> None:
    """Leaves the first epoch early, and notes how many batches are left, whenever that may change.

    One file a rank, in the folder that `lengths` names.
    """
    model, optimizer, dataset = make(ctx.config)
    model, optimizer = ctx.prepare(model, optimizer)
    loader = ctx.loader(dataset, 30)
    folder = Path(Path(ctx.config["lengths"]).read_text())
    for epoch in loader.epochs(3):
        for number, (x, y) in enumerate(epoch, 1):
            lengths = [len(epoch)]
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            lengths.append(len(epoch))
            with (folder / str(ctx.rank)).open("a") as file:
                file.write(f"{epoch.number}: {lengths}\n")
            if epoch.number == 0 and number == 5:
                break


def test_an_epoch_that_is_left_early_is_as_long_in_the_replay(tmp_path):
    folders = [tmp_path / "run", tmp_path / "again"]
    config = {"model": "mlp", "samples": 240, "batch_size": 30, "lengths": str(tmp_path / "where")}
    for folder in folders:
        folder.mkdir()
    kills = [Kill(worker=1, phase="bucket", step=4), Kill(worker=2, phase="bucket", step=11)]
    Path(config["lengths"]).write_text(str(folders[0]))
    run_local(with_kills(train_with_breaks, kills), 4, config=config, directory=tmp_path / "it")
    Path(config["lengths"]).write_text(str(folders[1]))
    assert compare(tmp_path / "it").relative < 1e-9
    said, again = ((folder / "0").read_text().splitlines() for folder in folders)
    assert said[4] == "0: [3, 4]"  # three are left, and then what was lost as well
    assert again == said


def noisy(sample, rng):
    x, y = sample
    return x + 0.1 * torch.from_numpy(rng.normal(size=x.shape)), y


def train_on_noise(ctx: elastix.Context) -> None:
    model, optimizer, dataset = make(ctx.config)
    model, optimizer = ctx.prepare(model, optimizer)
    loader = ctx.loader(dataset, 30, augment=noisy, num_workers=ctx.config["num_workers"])
    for epoch in loader.epochs(3):
        for x, y in epoch:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()


def test_replay_of_augmented_samples(tmp_path):
    config = {"model": "mlp", "samples": 130, "num_workers": 1}
    doomed = with_kills(train_on_noise, [Kill(worker=1, phase="bucket", step=4)])
    result = run_local(doomed, 3, config=config, directory=tmp_path)
    assert_exactly_once(result.events, 3)
    assert compare(tmp_path).relative < 1e-9


def scaled_by_the_dataset(ctx):
    """As of a DataLoader; of the loader, or of an epoch that stands for it."""
    dataset = samples(48)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loader = ctx.loader(dataset, batch_size=24, slices=8)
    for epoch in loader.epochs(2):
        for step in epoch:
            for x, y in step:
                scale = len(epoch.dataset) / len(loader.dataset)
                (F.cross_entropy(model(x), y) * scale).backward()
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("exact", [False, True])
def test_replay_of_a_loop_that_looks_at_its_dataset(tmp_path, exact):
    run_local(scaled_by_the_dataset, 2, directory=tmp_path, exact=exact)
    assert compare(tmp_path).relative < 1e-4


def trained_on_what_is_there(ctx):
    """Of as many samples as a file says."""
    amount = int(Path(ctx.config["amount"]).read_text())
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for epoch in ctx.loader(samples(amount), batch_size=24, slices=8).epochs(2):
        for step in epoch:
            for x, y in step:
                F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("exact", [False, True])
def test_replay_on_a_dataset_that_has_grown_is_refused(tmp_path, exact):
    amount = tmp_path / "amount"
    amount.write_text("48")
    config = {"amount": str(amount)}
    run_local(trained_on_what_is_there, 2, config=config, directory=tmp_path / "it", exact=exact)
    assert compare(tmp_path / "it").relative < 1e-4
    amount.write_text("60")
    with pytest.raises(TrainError, match="loader 0 had length=48 in the run, and is made with"):
        compare(tmp_path / "it")
