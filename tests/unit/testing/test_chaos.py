"""Kills happen somewhere, or are refused."""

import ast
import re
import signal
from pathlib import Path
from signal import SIGKILL
from types import SimpleNamespace

import pytest
import torch

import elastix
from elastix.errors import ConfigError
from elastix.state import raw_bytes
from elastix.testing import chaos
from elastix.testing.chaos import Flip, Kill, with_kills
from elastix.train.replica.context import Context
from elastix.train.replica.link import PHASES

SOURCES = Path(elastix.__file__).parent


def come_to():
    """What the package calls `phase` with, or a course waits at, or a step of slices is at."""
    for path in SOURCES.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            given = node.args[:1] if name in ("phase", "_phase", "at") else []
            given += [one.value for one in node.keywords if (name, one.arg) == ("Await", "phase")]
            for one in given:
                parts = [one.body, one.orelse] if isinstance(one, ast.IfExp) else [one]
                yield from (part.value for part in parts if isinstance(part, ast.Constant))


def test_the_phases_are_those_that_workers_come_to():
    assert set(PHASES) == set(come_to())
    assert len(set(PHASES)) == len(PHASES)


def test_a_reader_finds_each_of_them():
    assert [name for name in PHASES if name not in Context.on_phase.__doc__] == []


def test_a_kill_at_a_place_that_nobody_comes_to_is_refused():
    with pytest.raises(ConfigError, match=r"no phase 'forward', so nobody .* Nothing was started"):
        Kill(worker=1, phase="forward")
    with pytest.raises(ConfigError, match="There are wait, boundary, batch, "):
        Flip(worker=1, tensor="w", phase="boundry")


def test_the_number_of_a_signal_is_that_signal_and_no_cut():
    assert Kill(worker=1, phase="batch", signal=9).signal is signal.SIGKILL


@pytest.mark.parametrize(
    ("wrong", "fact"),
    [
        ({"worker": "1"}, "worker must be a whole number, not '1'"),
        ({"worker": -1}, "count from 0"),
        ({"after": -1}, "count from 0"),
        ({"step": "20"}, "step must be a whole number or None, not '20'"),
        ({"signal": "SIGKILL"}, "signal must be a signal or a Harm, not 'SIGKILL'"),
        ({"signal": 1000}, "signal must be a signal or a Harm, not 1000"),
        ({"steps": 3}, "no argument 'steps'"),
    ],
)
def test_a_kill_that_could_hit_nobody_is_refused(wrong, fact):
    with pytest.raises(ConfigError, match=re.escape(fact)):
        Kill(**{"worker": 1, "phase": "batch", **wrong})


@pytest.mark.parametrize("wrong", [{"bit": 8}, {"bit": -1}, {"byte": -1}, {"tensor": 3}])
def test_a_flip_of_what_no_tensor_has_is_refused(wrong):
    with pytest.raises(ConfigError, match="Nothing was started"):
        Flip(**{"worker": 1, "tensor": "w", **wrong})


@pytest.mark.parametrize("kills", [Kill(worker=1, phase="batch"), [SIGKILL], "1", None])
def test_what_is_no_list_of_kills_is_refused(kills):
    with pytest.raises(ConfigError, match="kills must be a list of Kill and Flip"):
        with_kills(lambda ctx: None, kills)


def test_what_is_no_train_function_is_refused():
    with pytest.raises(ConfigError, match="Nothing was started"):
        with_kills(torch.nn.Linear(1, 1), [])


@pytest.mark.parametrize(
    ("tensor", "fact"),
    [
        ("wieght", "is none that this worker has. Nothing was flipped. Did you mean 'weight'?"),
        ("@backward/wieght", "is none that this worker has"),
        ("@gradient/weight", "has nothing in it there"),
    ],
)
def test_a_flip_of_a_tensor_that_is_not_there_says_so(tensor, fact):
    model = torch.nn.Linear(2, 2)
    member = SimpleNamespace(
        _tracked=SimpleNamespace(model=model),
        capture=lambda: SimpleNamespace(tensors=model.state_dict()),
    )
    with pytest.raises(ConfigError, match=re.escape(fact)):
        chaos.flip(Flip(worker=0, tensor=tensor), SimpleNamespace(_member=member))


@pytest.mark.parametrize("byte", [0, 13, 5 * 4 * 4 + 13])  # the last is beyond the end
@pytest.mark.parametrize("made", [torch.clone, torch.t, lambda tensor: tensor[:, ::2]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_bit_flips_in_the_tensor_itself_however_it_lies_in_memory(byte, made, dtype):
    tensor = made(torch.ones(5, 4, dtype=dtype))
    before, version = raw_bytes(tensor).clone(), tensor._version
    chaos._turn(tensor, Flip(worker=0, tensor="", byte=byte, bit=3))
    assert (raw_bytes(tensor) ^ before).nonzero().flatten().tolist() == [byte % len(before)]
    assert tensor._version == version
