"""A run that goes on from a stored model: on real Ray."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import elastix
from elastix.events import TensorsInherited
from elastix.search.model_sources import StoreDirectory, StoredModelSource
from elastix.store import signature
from elastix.testing.replay import compare

SAMPLES = 48


def build():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)).double()


def train(ctx):
    model = build()
    ctx.inherit(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = ctx.prepare(model, optimizer)
    x = torch.arange(SAMPLES * 4, dtype=torch.float64).reshape(SAMPLES, 4).sin()
    loader = ctx.loader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8)
    for epoch in loader.epochs(2):
        for inputs, wanted in epoch:
            loss = (model(inputs) - wanted).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def test_its_states_descend_from_the_model_and_the_replay_knows(cluster, tmp_path):
    torch.manual_seed(1)
    ancestor = build()
    with elastix.Store(tmp_path) as store:
        tensors = ancestor.state_dict()
        origin = store.put(elastix.State(tensors), signature=signature(ancestor))
    trainer = elastix.ElasticTrainer(
        train,
        scaling=elastix.ScalingConfig(num_workers=2, cpus_per_worker=0.5),
        run=elastix.RunConfig(name="child", store=str(tmp_path)),
        checkpoint=elastix.CheckpointConfig(every_steps=5, keep_last=3),
        quiet=True,
    )
    result = trainer.descending(StoredModelSource(StoreDirectory(str(tmp_path)), origin)).fit()
    (told,) = [event for event in result.events if isinstance(event, TensorsInherited)]
    assert told.found["ref"] == origin
    assert told.found["share"] == 1.0
    with elastix.Store(tmp_path) as store:
        line = [entry.ref for entry in store.log(result.ref)]
        steps = [entry.meta.get("step") for entry in store.log(result.ref)]
    assert line[-1] == origin
    assert steps == [12, 10, 5, None]
    assert compare(result.directory).relative < 1e-9
