"""A worker whose GPU fails is lost, and not the run. The error is torch's own, raised by hand."""

from types import SimpleNamespace

import pytest
import torch

from elastix.errors import TrainError
from elastix.events import GenerationFormed, WorkerLost
from elastix.testing.local import run_local
from elastix.testing.replay import compare
from elastix.train.control.messages import OutcomeKind
from elastix.train.replica.device_failures import is_device_failure
from elastix.train.replica.train_function import run_train
from tests import trainables
from tests.chaos.test_kills import CONFIG
from tests.laws import assert_exactly_once, assert_replicas_identical, joins

HINTS = """
CUDA kernel errors might be asynchronously reported at some other API call.
Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.
"""
ECC = f"CUDA error: uncorrectable ECC error encountered{HINTS}"
CAPTURING = "operation not permitted when stream is capturing"
ASSERTED = f"CUDA error: device-side assert triggered{HINTS}"


def train(ctx):
    """Fails at a place of the fourth step, in worker 1 or in all."""

    def look(phase, _detail):
        where, step = ctx.config["where"], ctx.step
        if (phase, step) == (where, 3) and ctx.worker in ctx.config.get("who", [1]):
            raise torch.AcceleratorError(ctx.config["says"])

    ctx.on_phase(look)
    trainables.train(ctx)


def run(tmp_path, where, says=ECC, **options):
    logs = tmp_path / "logs"
    logs.mkdir()
    config = {**CONFIG, "log": str(logs), "where": where, "says": says, **options.pop("config", {})}
    return run_local(train, 3, config=config, directory=tmp_path / "run", **options)


@pytest.mark.parametrize("where", ["batch", "bucket", "round", "left", "boundary"])
def test_the_others_go_on(tmp_path, where):
    result = run(tmp_path, where)
    (lost,) = [event for event in result.events if isinstance(event, WorkerLost)]
    assert (lost.worker, lost.cause) == (1, "its GPU failed")
    assert len([event for event in result.events if isinstance(event, GenerationFormed)]) == 2
    assert_exactly_once(result.events, CONFIG["epochs"])
    assert_replicas_identical(tmp_path / "logs", {1}, result.events)
    assert compare(tmp_path / "run").relative < 1e-9


def test_it_is_replaced(tmp_path):
    config = {"meeting": str(tmp_path), "ushers": {"3": 5}, "epochs": 4}
    result = run(tmp_path, "bucket", config=config, replace=True)
    assert [join.worker for join in joins(result.events)] == [3]
    assert_exactly_once(result.events, 4)


def test_what_the_train_function_itself_has_asserted_ends_the_run(tmp_path):
    """An index out of bounds would be met by each that takes its place."""
    with pytest.raises(TrainError, match="device-side assert"):
        run(tmp_path, "batch", ASSERTED)


def test_if_all_of_them_fail_the_run_ends(tmp_path):
    with pytest.raises(TrainError, match="no worker is left that has the State"):
        run(tmp_path, "batch", config={"who": [0, 1, 2]})


def test_a_process_of_a_worker_is_not_free_for_another_when_its_gpu_has_failed():
    """Even if it has heard by then that its worker is lost, as others have failed with it."""

    def fail():
        raise torch.AcceleratorError(ECC)

    settings = SimpleNamespace(exact=False, alone=False, crew=object())
    member = SimpleNamespace(
        seed=lambda: None,
        settings=settings,
        processes=SimpleNamespace(await_broken=lambda _s: True, parted=None),
        step=3,
        me=1,
    )
    outcome = run_train(train, member, {}, before=fail)
    assert outcome.kind is OutcomeKind.DEVICE_FAILED


def raised_from(error):
    try:
        raise ValueError("wrapped") from error
    except ValueError as outer:
        return outer


def raised_while_handling(error):
    try:
        try:
            raise error
        except RuntimeError:
            raise ValueError("wrapped")  # noqa: B904 - as users do
    except ValueError as outer:
        return outer


def told_apart(error):
    """Handled: what is raised instead says that it has nothing to do with it."""
    outer = raised_while_handling(error)
    outer.__suppress_context__ = True
    return outer


def numbered(number):
    error = torch.AcceleratorError("CUDA error: in words of another version")
    error.error_code = number
    return error


def circle():
    first, second = ValueError("first"), ValueError("second")
    first.__cause__, second.__cause__ = second, first
    return first


@pytest.mark.parametrize(
    ("error", "failed"),
    [
        (torch.AcceleratorError(ECC), True),
        (torch.AcceleratorError(ASSERTED), False),
        (raised_from(torch.AcceleratorError(ECC)), True),
        (raised_while_handling(torch.AcceleratorError(ECC)), True),
        (told_apart(torch.AcceleratorError(ECC)), False),
        (ExceptionGroup("both", [KeyError("x"), torch.AcceleratorError(ECC)]), True),
        (raised_from(ExceptionGroup("one", [torch.AcceleratorError(ECC)])), True),
        (ExceptionGroup("none", [KeyError("x"), torch.AcceleratorError(ASSERTED)]), False),
        (circle(), False),
        (torch.AcceleratorError(f"CUDA error: out of memory{HINTS}"), False),
        (torch.AcceleratorError(f"CUDA error: invalid argument{HINTS}"), False),
        (torch.AcceleratorError(f"CUDA error: {CAPTURING}{HINTS}"), False),
        (numbered(2), False),
        (numbered(710), False),
        (numbered(904), False),
        (numbered(999), True),
        (numbered(214), True),
        (
            RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm`"),
            True,
        ),
        (RuntimeError("CUDA error: CUBLAS_STATUS_INVALID_VALUE when calling `cublasSgemm`"), False),
        (RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_BAD_PARAM"), False),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (KeyError("CUDNN_STATUS_EXECUTION_FAILED"), False),
    ],
)
def test_which_errors_are_the_device_s(error, failed):
    assert is_device_failure(error) == failed
