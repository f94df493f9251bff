"""What a mesh does to memory and arithmetic, and what it does not allow: on one process."""

import json

import pytest
import torch
from torch import distributed, nn
from typer.testing import CliRunner

from elastix.cli import app
from elastix.cost.trace import trace
from elastix.errors import ConfigError
from elastix.mesh_check import check, parsed, pretended
from tests.crew import Net, sharded, skip_if_refused

RUNNER = CliRunner()


@pytest.fixture(autouse=True)
def no_world_stays():
    skip_if_refused()
    yield
    assert not distributed.is_initialized()


def cost(mesh, build=lambda: Net(512), parallelize=sharded, rows=48, width=8):
    share = rows // mesh.get("shard", 1)
    return trace(
        build,
        lambda: (torch.zeros(share, width),),
        foreach=False,
        mesh=mesh,
        parallelize=parallelize,
    )


@pytest.mark.parametrize("mesh", [{"shard": 4}, {"tensor": 2}, {"shard": 2, "tensor": 2}], ids=str)
def test_a_place_has_its_part_of_the_memory_and_of_the_arithmetic(mesh):
    alone, place = cost({}), cost(mesh)
    places = torch.Size(mesh.values()).numel()
    assert place.parameters == alone.parameters
    for whole, part in (
        (alone.model_bytes, place.model_bytes),
        (alone.gradients_bytes, place.gradients_bytes),
        (alone.optimizer_bytes, place.optimizer_bytes),
        (alone.step_flops, place.step_flops),
    ):
        # What is not split: layers outside of the tensor plan, the last rows of uneven parts.
        assert whole / places <= part < 1.2 * whole / places
    assert place.peak_bytes < alone.peak_bytes


def test_what_is_held_is_what_the_parts_are():
    def build():
        return nn.Sequential(nn.Linear(8, 10, bias=False), nn.Linear(10, 3, bias=False))

    def split(model, mesh):
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=mesh["shard"])

    place = cost({"shard": 4}, build, split)
    assert place.model_bytes == 4 * (3 * 8 + 1 * 10)  # the first place has the larger parts
    assert place.gradients_bytes == place.buckets_bytes == place.model_bytes
    assert place.optimizer_bytes == 2 * place.model_bytes + 2 * 4


def test_what_places_send_is_what_a_ring_sends():
    """FSDP2 gathers parameters twice, the outermost layer's once, and scatters gradients once."""

    def build():
        return nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(3)))

    def split(model, mesh):
        from torch.distributed.fsdp import fully_shard

        for layer in model[:2]:
            fully_shard(layer, mesh=mesh["shard"])
        fully_shard(model, mesh=mesh["shard"])

    layer = 4 * 64 * 64
    assert cost({"shard": 4}, build, split, width=64).sent_bytes == (3 + 3 + 2) * layer * 3 / 4
    assert cost({}, build, split, width=64).sent_bytes == 0


def test_what_places_of_split_layers_send_grows_with_the_batch():
    """Activations of 10 numbers are added up after each of two blocks, there and back."""
    for rows in (48, 96):
        place = cost({"tensor": 4}, rows=rows)
        assert place.sent_bytes == 4 * (rows * 10 * 4) * 2 * 3 / 4


def test_layers_that_are_gathered_one_by_one_take_less_than_all_at_once():
    """FSDP2 empties what it has gathered; whoever counted that as held would see no difference."""

    def build():
        return nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(12)))

    def all_at_once(model, mesh):
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=mesh["shard"])

    def one_by_one(model, mesh):
        from torch.distributed.fsdp import fully_shard

        for layer in model:
            fully_shard(layer, mesh=mesh["shard"])
        fully_shard(model, mesh=mesh["shard"])

    layer = 4 * 256 * 256
    whole = cost({"shard": 4}, build, all_at_once, rows=16, width=256).peak_bytes
    steps = cost({"shard": 4}, build, one_by_one, rows=16, width=256).peak_bytes
    assert whole - steps > 6 * layer
    assert steps < (12 * (1 + 1 + 1 + 2) / 4 + 7) * layer  # parts, and a few layers under way


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 12)
        self.norm = nn.BatchNorm1d(12)

    def forward(self, x):
        return self.norm(self.first(x))


def over_shard(model, mesh):
    from torch.distributed.fsdp import fully_shard

    fully_shard(model, mesh=mesh["shard"])


def by_columns(model, mesh):
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    parallelize_module(model, mesh["tensor"], {"first": ColwiseParallel()})


def without_the_root(model, mesh):
    from torch.distributed.fsdp import fully_shard

    fully_shard(model.first, mesh=mesh["shard"])


def over_the_whole_mesh(model, mesh):
    from torch.distributed.fsdp import fully_shard

    fully_shard(model, mesh=mesh)


def layers_over_shard(model, mesh):
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    plan = {"first": ColwiseParallel(), "last": RowwiseParallel()}
    parallelize_module(model, mesh["shard"], plan)


class TwoLayers(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 12, bias=False)
        self.last = nn.Linear(12, 4, bias=False)

    def forward(self, x):
        return self.last(self.first(x))


@pytest.mark.parametrize(
    ("axes", "parallelize"),
    [
        ({"shard": 2, "tensor": 2}, over_the_whole_mesh),  # replicated over the first: HSDP
        ({"tensor": 2, "shard": 2}, over_the_whole_mesh),
        ({"shard": 2}, layers_over_shard),
    ],
)
def test_a_model_sharded_otherwise_than_over_shard_alone_is_refused(axes, parallelize):
    """Every parameter has a placement on `shard`, and every gradient would be wrong."""
    with pytest.raises(ConfigError, match=r"'first.weight' is not sharded by fully_shard over"):
        cost(axes, TwoLayers, parallelize)


class RunningInstances(Normed):
    def __init__(self):
        super().__init__()
        self.norm = nn.InstanceNorm1d(12, affine=True, track_running_stats=True)


def test_running_statistics_of_instances_are_refused_like_those_of_batches():
    with pytest.raises(ConfigError, match="'norm' is a InstanceNorm1d"):
        cost({"shard": 2}, RunningInstances, over_shard)


def raises(model, mesh):
    del model
    mesh["context"]


@pytest.mark.parametrize(
    ("mesh", "parallelize", "says"),
    [
        ({"shard": 2}, over_shard, "'norm' is a BatchNorm1d"),
        ({"shard": 2}, without_the_root, "'norm.weight' is not sharded by fully_shard over"),
        ({"tensor": 5}, by_columns, r"'first.weight' is \(12, 8\), and 5 places"),
        ({"tensor": 2}, raises, "cannot be sharded on this mesh: KeyError"),
    ],
)
def test_what_a_mesh_does_not_allow_is_said_before_anything_starts(mesh, parallelize, says):
    with pytest.raises(ConfigError, match=says):
        cost(mesh, Normed, parallelize)


def test_a_buffer_that_is_in_parts_is_refused():
    from torch.distributed.tensor import distribute_module

    with pretended({"tensor": 2}) as mesh:
        model = distribute_module(nn.Sequential(nn.BatchNorm1d(4)), mesh)
        with pytest.raises(ConfigError, match=r"buffer '0.running_mean' is a DTensor"):
            check({"": model}, mesh)


def test_what_is_right_is_let_through():
    with pretended({"shard": 2, "tensor": 2}) as mesh:
        check({"": sharded(Net(), mesh)}, mesh)
        synced = nn.SyncBatchNorm(4)
        over_shard(synced, mesh)
        check({"": synced}, mesh)
        instances = nn.InstanceNorm1d(12, affine=True)
        over_shard(instances, mesh)
        check({"": instances}, mesh)
        with pytest.raises(ConfigError, match=r"is part of a .* world already"):
            cost({"shard": 2})
    with pretended({"shard": 1}) as mesh:
        check({"": Normed()}, mesh)  # nothing is split: nothing is refused


@pytest.mark.parametrize(
    "text",
    ["", "shard", "shard=0", "shard=-1", "shard=2,shard=2", "context=2", "shard=x", "shard=2,"],
)
def test_what_is_no_mesh_is_refused(text):
    with pytest.raises(ConfigError, match="a mesh is axes with their sizes"):
        parsed(text)


def test_the_command_line_estimates_a_place_of_a_mesh(tmp_path):
    script = tmp_path / "model.py"
    script.write_text(
        "from tests.crew import Net, sharded as parallelize\ndef build():\n    return Net(512)\n"
    )

    def said(*words):
        words = ("estimate", str(script), "--shape", "8", "--device", "h100", *words)
        return RUNNER.invoke(app, words)

    found = json.loads(said("--mesh", "shard=4,tensor=2", "--workers", "2", "--json").stdout)
    assert (found["plan"]["workers"], found["plan"]["devices"]) == (2, 16)
    assert list(found["plan"]["memory_bytes"]) == ["0"]
    alone = json.loads(said("--workers", "2", "--json").stdout)
    assert found["one_process"] == alone  # what the mesh is compared with
    assert found["cost"]["peak_bytes"] < alone["cost"]["peak_bytes"]
    rows = [line.split("\t") for line in said("--mesh", "tensor=2").stdout.splitlines()]
    assert rows[0] == ["what", "a process, tensor=2", "workers of one process"]
    table = {what: (place, worker) for what, place, worker in rows[1:]}
    place, worker = table["a place of a worker's mesh"]
    assert place.endswith("fits (h100)")
    assert worker.endswith("fits (h100)")
    assert place != worker
    assert table["sent to others of the worker, per step"][1] == ""
    for words, says in (
        (("--mesh", "shards=2"), "a mesh is axes"),
        (("--mesh", "shard=2", "--parallelize", "split"), "has no function 'split'"),
    ):
        result = said(*words)
        assert result.exit_code == 2
        assert says in result.stderr
