"""What of a traceback is shown: the user's frames; all of them where elastix is at fault."""

import json

import torch

import elastix
from elastix.arguments import of_kind
from elastix.errors import ConfigError
from elastix.observe import event_text
from elastix.train.replica.tracebacks import told


def raised_by(call) -> str:
    try:
        call()
    except Exception as error:  # noqa: BLE001 - whatever it is
        return told(error)
    raise AssertionError("nothing was raised")


def mine():
    torch.nn.Linear(2, 2)(torch.ones(1, 3))


def test_the_users_frames_and_those_of_libraries_stay():
    text = raised_by(mine)
    assert "in mine" in text
    assert "torch/nn/modules/linear.py" in text
    assert "mat1 and mat2" in text.splitlines()[-1]


def test_a_refusal_ends_where_the_user_called():
    def wrong():
        of_kind("guard", 3, int if False else str)

    text = raised_by(wrong)
    assert "in wrong" in text
    assert "arguments.py" not in text
    assert text.rstrip().endswith("Nothing was started.")


def test_a_refusal_that_a_library_comes_to_ends_where_the_user_called():
    def wrong():
        optimizer = torch.optim.SGD([torch.ones(2, requires_grad=True)], lr=0.1)
        optimizer.register_step_pre_hook(elastix.RunConfig)
        optimizer.step()

    text = raised_by(wrong)
    assert "optimizer.step()" in text
    assert "torch/optim" not in text
    assert "RunConfig takes no argument without a name" in text


def test_a_refusal_of_a_configuration_ends_where_it_was_made():
    text = raised_by(lambda: elastix.RunConfig(name="a/b"))
    assert 'RunConfig(name="a/b")' in text
    assert "<string>" not in text


def test_causes_of_a_refusal_are_in_its_message():
    def chained():
        try:
            json.loads("{")
        except ValueError as error:
            raise ConfigError("no JSON. Nothing was started.") from error

    assert "JSONDecodeError" not in raised_by(chained)


def test_an_error_that_elastix_did_not_foresee_keeps_its_frames():
    text = raised_by(lambda: event_text.plain(None))
    assert "observe/event_text.py" in text
