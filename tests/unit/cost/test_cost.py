"""Estimates of cost: against formulas, torch's own counter and the numbers of the ZeRO paper."""

import json
import math

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode, flop_registry
from typer.testing import CliRunner

from benchmarks import steps
from elastix.cli import app
from elastix.cost.devices import DEVICES, Device
from elastix.cost.plan import PFLOP_DAY, plan, zero_bytes
from elastix.cost.trace import Cost, trace
from elastix.errors import ConfigError

DEVICE = Device(
    name="d", flops_per_s={"float32": 1e12}, bytes_per_s=1e11, memory_bytes=16e9
)  # a round one


def cost(**changes):
    values = {
        "parameters": 1,
        "forward_flops": 10**11,
        "step_flops": 3 * 10**11,
        "model_bytes": 0,
        "gradients_bytes": 0,
        "optimizer_bytes": 0,
        "batch_bytes": 0,
        "peak_bytes": 0,
        "operators": {(3 * 10**11, 10): 1},
    }
    return Cost(**{**values, **changes})


def linear(inputs=64, outputs=32):
    return lambda: nn.Linear(inputs, outputs)


def test_the_flops_and_bytes_of_a_linear_layer():
    found = trace(linear(), lambda: (torch.zeros(16, 64),), foreach=False)
    weights = 64 * 32 + 32
    assert found.parameters == weights
    assert found.forward_flops == 2 * 16 * 64 * 32
    assert found.step_flops == 2 * found.forward_flops  # no gradient of the input is wanted
    assert found.model_bytes == found.gradients_bytes == found.buckets_bytes == 4 * weights
    assert found.optimizer_bytes == 2 * 4 * weights + 2 * 4  # two moments, and steps
    assert found.batch_bytes == 4 * 16 * 64


@pytest.mark.parametrize("name", list(steps.MODELS))
def test_flops_are_those_of_torchs_counter_on_real_tensors(name):
    build, inputs = steps.MODELS[name]
    found = trace(build, lambda: (inputs()[:2],))
    model = build()
    with FlopCounterMode(display=False) as counter:
        model(inputs()[:2]).square().mean().backward()
    attention = 6 * 2 * 2 * 2 * 128**2 * 384 if name == "transformer" else 0
    # Two products forward, five backward; before torch 2.15 the counter knew none of it on CPUs.
    unknown = 0 if any("attention_for_cpu" in str(op) for op in flop_registry) else 3.5 * attention
    assert found.step_flops == counter.get_total_flops() + unknown
    assert found.parameters == sum(p.numel() for p in model.parameters())
    assert 2 * found.forward_flops < found.step_flops <= 3 * found.forward_flops + attention / 2


def test_the_peak_holds_what_is_alive_at_once_and_no_more():
    def build():
        pairs = [(nn.Linear(512, 512, bias=False), nn.Tanh()) for _ in range(8)]
        return nn.Sequential(*(layer for pair in pairs for layer in pair))

    few, many = (
        trace(build, lambda rows=rows: (torch.zeros(rows, 512),), optimizer="sgd", foreach=False)
        for rows in (64, 4096)
    )
    kept = 8 * 512 * 4  # bytes a row: tanh keeps its output, which is the next layer's input
    grown = (many.peak_bytes - few.peak_bytes) / (4096 - 64)
    assert kept + 512 * 4 <= grown <= kept + 5 * 512 * 4
    assert few.peak_bytes >= few.model_bytes + 2 * few.gradients_bytes + few.optimizer_bytes


def test_an_optimizer_that_works_on_all_at_once_holds_more():
    def peak(foreach):
        build = lambda: nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)))  # noqa: E731
        return trace(build, lambda: (torch.zeros(2, 256),), foreach=foreach).peak_bytes

    assert peak(True) - peak(False) > 0.5 * 4 * 8 * 256 * 256


def test_autocast_and_dtype_change_bytes_not_flops():
    def found(**options):
        build, _ = steps.MODELS["mlp"]
        return trace(build, lambda: (torch.zeros(32, 1, 32, 32),), **options)

    plain, mixed, half = found(), found(autocast=torch.bfloat16), found(dtype=torch.bfloat16)
    assert plain.step_flops == mixed.step_flops == half.step_flops
    assert mixed.model_bytes == plain.model_bytes == 2 * half.model_bytes
    assert torch.get_default_dtype() == torch.float32


def test_a_model_that_cannot_be_traced_is_the_callers_affair():
    class Looks(nn.Linear):
        def forward(self, x):
            return super().forward(x) if x.sum().item() > 0 else x

    for build, batch, fact in (
        (lambda: Looks(4, 4), (2, 4), "looks at values"),
        (linear(), (2, 63), "does not run on such a batch"),
        (lambda: nn.Flatten(), (2, 4), "no parameter"),
    ):
        with pytest.raises(ConfigError, match=fact):
            trace(build, lambda batch=batch: (torch.zeros(batch),))
    with pytest.raises(ConfigError, match="adamw"):
        trace(linear(), lambda: (torch.zeros(2, 64),), optimizer="lion")


def test_the_numbers_of_the_zero_paper():
    """Table 1 of the paper: 7.5 B parameters, mixed precision Adam, 64 devices."""
    million = 10**6
    billions = cost(
        model_bytes=2 * 7500 * million,
        gradients_bytes=2 * 7500 * million,
        optimizer_bytes=12 * 7500 * million,
    )
    held = [zero_bytes(billions, stage, 64) / 1e9 for stage in (1, 2, 3)]
    assert held == pytest.approx([31.4, 16.6, 1.88], abs=0.05)
    assert zero_bytes(billions, 0, 64) / 1e9 == pytest.approx(120 + 15)  # and elastix's buckets


def test_time_by_utilization_and_by_roofline():
    by_share = plan(cost(), DEVICE, steps=100, utilization=0.5)
    assert by_share.step_s == pytest.approx(0.6)
    assert by_share.total_s == pytest.approx(60)
    assert by_share.total_flops == pytest.approx(3e13)
    assert by_share.pflop_days == pytest.approx(3e13 / PFLOP_DAY)
    slow = cost(operators={(10**11, 10): 2, (10**11, 10**11): 1})  # the third waits for memory
    by_roofline = plan(slow, DEVICE, steps=1)
    assert by_roofline.step_s == pytest.approx(0.1 + 0.1 + 1.0)
    assert by_roofline.utilization == pytest.approx(0.25)


def test_workers_are_added_until_it_is_through_in_time():
    alone = plan(cost(), DEVICE, steps=1000, utilization=0.3)
    assert alone.total_s == pytest.approx(1000)
    many = plan(cost(), DEVICE, steps=1000, utilization=0.3, within_s=130)
    assert many.devices == 8
    assert many.total_s <= 130
    assert many.total_flops == alone.total_flops
    assert many.steps == math.ceil(1000 / 8)


def test_what_fits():
    found = plan(
        cost(model_bytes=10**9, gradients_bytes=10**9, optimizer_bytes=12 * 10**9),
        DEVICE,
        steps=1,
        workers=4,
    )
    assert found.memory_bytes[0] == 15e9
    assert found.fits == {0: False, 1: True, 2: True, 3: True}  # a tenth is kept free


@pytest.mark.parametrize(
    "options",
    [{"steps": 0}, {"workers": 0}, {"utilization": 1.2}, {"utilization": 0}, {"dtype": "int8"}],
)
def test_impossible_plans(options):
    with pytest.raises(ConfigError):
        plan(cost(), DEVICE, **{"steps": 1, **options})


@pytest.mark.parametrize("device", DEVICES.values(), ids=lambda device: device.name)
def test_the_table_of_devices_is_of_plausible_size(device):
    assert 8e12 <= device.peak("float32") < device.peak("float16") < 1e16
    assert 1e10 < device.memory_bytes < 1e12 < 4 * device.bytes_per_s < 1e14


def run(*arguments):
    return CliRunner().invoke(app, ["estimate", *arguments])


def test_the_command():
    common = ("search_spaces.convnet", "--shape", "1,8,8", "--device", "h100", "--json")
    result = run(*common, "--samples", "1500", "--epochs", "2", "--batch-size", "100")
    assert result.exit_code == 0, result.output
    value = json.loads(result.stdout)
    assert value["plan"]["steps"] == 30
    assert value["plan"]["total_flops"] == 30 * value["cost"]["step_flops"]
    parts = ("model", "gradients", "buckets", "optimizer", "batch", "activations")
    assert value["cost"]["peak_bytes"] == sum(value["cost"][f"{part}_bytes"] for part in parts)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("nowhere", "--shape", "1"), "cannot be imported"),
        (("search_spaces.convnet:nothing", "--shape", "1"), "no function 'nothing'"),
        (("search_spaces.convnet", "--shape", "a"), "--shape is numbers"),
        (("search_spaces.convnet", "--shape", "1,8,8", "--device", "abacus"), "'abacus'"),
        (("search_spaces.convnet", "--shape", "1,8,8", "--config", "{"), "--config is no JSON"),
        (("search_spaces.convnet", "--shape", "7", "--device", "t4"), "does not run on such"),
        (("search_spaces.convnet", "--shape", "1", "--device", "t4", "--dtype", "x"), "--dtype"),
        (("search_spaces.convnet", "--shape", "1,8,8", "--dtype", "int64"), "--dtype is one of"),
        (("search_spaces.convnet", "--shape", "1", "--autocast", "float64"), "--autocast is one"),
        (("nowhere", "--shape", "1", "--batch-size", "4", "--workers", "8"), "less than a sample"),
    ],
)
def test_calls_that_are_wrong(arguments, says):
    result = run(*arguments)
    assert result.exit_code == 2
    assert says in result.stderr
    assert "Nothing was" in result.stderr
