"""What train functions do on GPUs ends as plain torch does, or is refused."""

import pytest

from elastix.data.audit import audit
from elastix.errors import ConfigError
from elastix.testing.chaos import Kill, with_kills
from elastix.testing.local import run_local
from elastix.testing.local_worker import Gpus
from elastix.testing.replay import compare
from tests.gpu.programs import train
from tests.trainables import notes

TOLERANCE = {  # relative, to the largest weight; replayed on the same GPU with the same shares
    "two_streams": 1e-9,
    "compiled": 1e-4,
    "autocast_channels_last": 0.02,
    "all_in_bfloat16": 0.05,
    "grad_scaler": 0.02,
    "graphed_model": 1e-9,
    "out_of_memory_caught": 1e-9,
}
KILLED = ["two_streams", "compiled", "autocast_channels_last", "grad_scaler"]


def run(tmp_path, program, workers, backend, kills=(), **config):
    logs = tmp_path / "logs"
    logs.mkdir()
    config = {"program": program, "log": str(logs), **config}
    doomed = with_kills(train, kills) if kills else train
    options = {"config": config, "directory": tmp_path / "run", "gpus": Gpus(backend)}
    result = run_local(doomed, workers, timeout_s=100.0, **options)
    assert audit(result.events).exact
    ends = notes(logs)
    assert set(ends) >= set(range(workers)) - set(result.lost)
    assert len({str(end) for end in ends.values()}) == 1, ends
    return result


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
@pytest.mark.parametrize("program", TOLERANCE)
def test_two_workers(tmp_path, program, backend):
    run(tmp_path, program, 2, backend)
    if program != "graphed_model":  # a graph is of one process
        found = compare(tmp_path / "run", device="cuda")
        assert found.relative <= TOLERANCE[program], found


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
@pytest.mark.parametrize("program", KILLED)
def test_three_workers_of_which_one_is_killed(tmp_path, program, backend):
    result = run(tmp_path, program, 3, backend, [Kill(worker=1, phase="bucket", step=3)])
    assert set(result.lost) == {1}
    found = compare(tmp_path / "run", device="cuda")
    assert found.relative <= TOLERANCE[program], found


def test_a_graph_of_a_whole_step_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="make_graphed_callables"):
        run(tmp_path, "captured_step", 2, "gloo")
