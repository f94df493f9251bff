"""A train function for crews with an axis `pipe`, which runs in one process as well."""

import copy
import functools
import json
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from elastix.comm.gradients import buckets
from tests.crew_runs import (
    CLIPPED,
    Block,
    adamw,
    build,
    data,
    held,
    pace,
    parts,
    until_over,
    watched,
)

MICRO = 3

SCHEDULES = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zero bubble": ScheduleInterleavedZeroBubble,
}
SEVERAL = ("interleaved", "zero bubble")
"""They have two stages at each place."""


def only(model, layers):
    """The model with some of its layers, sharing them; the others let through what they get."""
    part = copy.copy(model)
    part._modules = dict(model._modules)
    part.first, *blocks, part.last = (
        layer if number in layers else nn.Identity()
        for number, layer in enumerate([model.first, *model.blocks, model.last])
    )
    part.blocks = nn.ModuleList(blocks)
    return part


class Pipeline:
    """Schedules over the stages of one place, by the number of samples that they are given."""

    def __init__(self, mesh, kind, device):
        self.kind, self.mesh, self.device = kind, mesh["pipe"], device
        self.places, place = self.mesh.size(), self.mesh.get_local_rank()
        self.number = self.places * (2 if kind in SEVERAL else 1)
        self.mine = list(range(place, self.number, self.places))
        self.made = {}

    def layers(self, stage):
        """Numbers of the four layers of a Net that are of a stage."""
        return [layer for layer in range(4) if layer * self.number // 4 == stage]

    def keep(self, model):
        """The layers of this place."""
        return only(model, [layer for stage in self.mine for layer in self.layers(stage)])

    def split(self, model, mesh):
        """Into the stages of this place, sharded over the other axes of the mesh."""
        if "tensor" in mesh.mesh_dim_names:
            for block in model.blocks:
                if isinstance(block, Block):
                    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
                    parallelize_module(block, mesh["tensor"], plan)
        self.parts = [only(model, self.layers(stage)) for stage in self.mine]
        for part in self.parts if "shard" in mesh.mesh_dim_names else ():
            fully_shard(part, mesh=mesh["shard"])

    def schedule(self, samples):
        if samples not in self.made:
            number = max(1, samples // MICRO)
            group = self.mesh.get_group()
            stages = [
                PipelineStage(part, stage, self.number, self.device, group=group)
                for stage, part in zip(self.mine, self.parts, strict=True)
            ]
            kind = self.kind
            if kind not in SEVERAL and number < self.number:
                kind = "gpipe"
            given = stages if kind in SEVERAL else stages[0]
            self.made[samples] = SCHEDULES[kind](given, number, loss_fn=F.cross_entropy)
        return self.made[samples]

    def step(self, x, y):
        """The mean loss, where it is known."""
        losses = []
        self.schedule(len(x)).step(*self.given(x), target=y, losses=losses)
        return torch.stack(losses).mean() if losses else torch.zeros(())

    def outputs(self, x, y):
        """What the model makes of them, where it is known; without gradients."""
        with torch.no_grad():
            return self.schedule(len(x)).eval(*self.given(x), target=y)

    def given(self, x):
        """What a schedule is to be given here: before torch 2.13 at the first stage alone."""
        return [x] if 0 in self.mine else []


def adds_up(config, number, epoch):
    """Whether the step goes on with a further batch; there may be no other in the epoch."""
    batches = config.get("batches", 1)
    return (number + 1) % batches > 0 and len(epoch) > 0


def train(ctx, kind="1f1b", after_epoch=lambda pipeline, model, look: None):
    """`after_epoch` is called in the middle of a run; the pipeline is None in one process."""
    config = ctx.config
    buckets.FIRST_BUCKET_BYTES = buckets.BUCKET_BYTES = 4 << 10
    model, mesh = build(), ctx.mesh
    slices, dropout = config.get("slices"), config.get("dropout", 0.0)
    for block in model.blocks if dropout else ():  # in one stage and in the other
        block.register_forward_hook(lambda own, _, y: F.dropout(y, dropout, own.training))
    pipeline = None
    if mesh is not None:
        pipeline = Pipeline(mesh, kind, ctx.device)
        model = pipeline.keep(model)
        pipeline.split(model, mesh)
        if kind not in SEVERAL:
            (model,) = pipeline.parts
    log = Path(config["log"])
    look = watched(ctx, next(m for m in model.modules() if isinstance(m, nn.Linear)))
    optimizer = adamw(model)
    model, optimizer = ctx.prepare(model, optimizer)
    cut = {"batch_size": config["batch_size"], "microbatch": MICRO, "slices": slices}
    loader = ctx.loader(data(config["samples"]), **cut)
    with (log / f"{ctx.worker}-{ctx.place}.jsonl").open("a") as file:
        for epoch in until_over(ctx, loader.epochs(config["epochs"])):
            for number, batch in enumerate(epoch):
                more = adds_up(config, number, epoch)
                for x, y in parts(batch, slices):
                    with ctx.accumulate() if more else nullcontext(), ctx.backward():
                        inputs = F.dropout(x, dropout)
                        if pipeline is not None:
                            loss = pipeline.step(inputs, y)
                        else:
                            loss = F.cross_entropy(model(inputs), y)
                            loss.backward()
                        look("scheduled")
                if more:
                    continue
                look("clip")
                assert ctx.clip_grad_norm_(model.parameters(), CLIPPED) > CLIPPED
                optimizer.step()
                optimizer.zero_grad()
                file.write(json.dumps([ctx.step, held(model, optimizer)]) + "\n")
                file.flush()
                pace(config)
            after_epoch(pipeline, model, look)
        if config["mean"]:
            x, y = (tensor.to(ctx.device) for tensor in data(6).tensors)
            outputs = pipeline.outputs(x, y) if pipeline is not None else model(x).detach()
            valid = 0.0 if outputs is None else F.cross_entropy(outputs, y)
            ctx.report(**ctx.mean(loss=loss, valid=valid))
    full = {
        name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().to("cpu", copy=True)
        for name, p in model.named_parameters()
    }
    torch.save(full, log / f"final-{ctx.worker}-{ctx.place}.pt")


def train_with(kind):
    return functools.partial(train, kind=kind)
