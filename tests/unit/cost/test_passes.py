"""What steps of slices are said to cost, and what exact runs keep beside the buckets."""

import json

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from elastix.cli import app
from elastix.comm.slice_tree import PartialSums
from elastix.cost.passes import exact, several
from elastix.cost.trace import trace

RUNNER = CliRunner()
SLICES = 8


def build():
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8))


def step(rows):
    return trace(build, lambda: (torch.zeros(rows, 64),), foreach=False)


@pytest.mark.parametrize("workers", [1, 2, 3, 5, 8, 11])
def test_the_sums_are_as_many_as_a_worker_has_at_once(workers):
    most = 0
    for worker in range(workers):
        sums = PartialSums(range(SLICES), SLICES, lambda left, right: left + right)
        for number in range(SLICES * worker // workers, SLICES * (worker + 1) // workers):
            sums.insert(number, 1)
            most = max(most, len(sums.sums))
    found, before = exact(step(4), SLICES, workers), step(4)
    assert found.sums == most
    assert found.buckets_bytes == (1 + most) * before.buckets_bytes
    assert found.peak_bytes == before.peak_bytes + most * before.gradients_bytes
    assert found.activations_bytes == before.activations_bytes


def test_slices_compute_what_the_batch_does_and_hold_what_one_does():
    whole, slices = step(400 * SLICES), several(step(400), SLICES)
    assert slices.forward_flops == whole.forward_flops
    assert slices.step_flops == whole.step_flops
    assert slices.peak_bytes == step(400).peak_bytes < whole.peak_bytes


def said(*options):
    given = ["--shape", "64", "--device", "h100", "--json", *options]
    return RUNNER.invoke(app, ["estimate", f"{__name__}:build", *given])


def estimated(*options):
    return json.loads(said(*options).stdout)


def test_the_command_counts_slices_and_their_sums():
    plain, sliced, found = (
        estimated("--batch-size", "65536", "--workers", "2", *options)
        for options in ((), ("--slices", "8"), ("--slices", "8", "--exact"))
    )
    of = "buckets_bytes"
    assert found["cost"][of] == 3 * sliced["cost"][of] == 3 * plain["cost"][of]
    assert found["cost"]["step_flops"] == plain["cost"]["step_flops"]
    held = [one["plan"]["memory_bytes"]["0"] for one in (sliced, found, plain)]
    assert held[1] == held[0] + 2 * plain["cost"][of]
    assert held[0] < held[2]


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (("--exact",), "--exact needs --slices"),
        (("--exact", "--slices", "6", "--batch-size", "60"), "a power of two"),
        (("--slices", "8", "--batch-size", "60"), "Use 56"),
    ],
)
def test_what_a_loader_would_refuse_is_refused(options, wanted):
    result = said(*options)
    assert result.exit_code == 2
    assert wanted in result.output
