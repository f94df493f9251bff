"""exact=True on a GPU: the bytes of the quiet run of one process, whatever befalls it."""

import functools
import subprocess
import sys

import pytest
import torch

from elastix.testing.chaos import Kill, with_kills
from elastix.testing.local import run_local
from elastix.testing.local_worker import Gpus
from tests.chaos.test_exact import EPOCHS, PROGRAMS
from tests.exact_programs import train
from tests.laws import assert_exactly_once
from tests.run_bytes import final, kept, steps_of

BACKENDS = ["gloo", "nccl"]


def run(train, workers, program, directory, backend="gloo"):
    options = {"config": PROGRAMS[program], "directory": directory, "gpus": Gpus(backend)}
    return run_local(train, workers, exact=True, timeout_s=90.0, **options)


@functools.cache
def quiet(program):
    result = run(train, 1, program, kept())
    return final(result), steps_of(result.events)


def check(result, program):
    (digest, tensors), steps = quiet(program)
    found, ours = final(result)
    apart = [name for name in tensors if not torch.equal(ours[name], tensors[name])]
    assert not apart, f"other bytes than in the quiet run: {apart}"
    assert found == digest
    assert_exactly_once(result.events, EPOCHS)
    assert steps_of(result.events) == steps


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("program", ["mlp", "convnet", "transformer"])
def test_three_workers_give_the_bytes_of_one(tmp_path, program, backend):
    check(run(train, 3, program, tmp_path, backend), program)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("phase", ["slice", "bucket", "round", "boundary"])
def test_a_loss_anywhere_in_a_step_leaves_the_same_bytes(tmp_path, phase, backend):
    kill = Kill(worker=1, phase=phase, step=0 if phase == "slice" else 3)
    result = run(with_kills(train, [kill]), 3, "convnet", tmp_path, backend)
    assert set(result.lost) == {1}
    check(result, "convnet")


@pytest.mark.parametrize("program", ["mlp", "convnet", "transformer"])
def test_a_replay_gives_the_same_bytes(tmp_path, program):
    result = run(train, 2, program, tmp_path)
    command = [sys.executable, "-m", "elastix.testing.replay", str(result.directory)]
    replayed = subprocess.run([*command, "--device", "cuda"], capture_output=True, text=True)
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    assert "to the last bit" in replayed.stdout
