"""What the workers of a pool are sent, and send back."""

import pickle
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
from ray import cloudpickle

from elastix.errors import ConfigError
from elastix.search.executors.executor import Ended, EndedKind, Work, WorkReport
from elastix.search.executors.pool_worker import GIVEN_BACK, LoneWorker, packed
from elastix.search.model_sources import (
    InheritTerms,
    StoreDirectory,
    StoredModelSource,
    TrialModelSource,
    let_go,
)
from elastix.search.trial import Objectives
from elastix.state import Ref
from elastix.store import Store
from elastix.train.on_ray.given_device import given_device
from elastix.train.record.provenance import installation
from elastix.train.replica.device_failures import is_device_failure

HERE = installation()

SCRIPT = """
import sys
from pathlib import Path
from elastix.search.executors.executor import Work
from elastix.search.executors.pool_worker import packed

class Source:
    def resume(self):
        return "of the script"

class Named:
    def __reduce__(self):
        return (lambda: "has no name", ())

work = Work(number=1, name="a/1", config={"x": 1}, seed=2, model_source=Source())
Path(sys.argv[1]).write_bytes(packed(work))
work = Work(number=1, name="a/1", config={"x": Named()}, seed=2)
Path(sys.argv[2]).write_bytes(packed(work))
"""


ELSEWHERE = """
import sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from ray import cloudpickle
import beside
from elastix.search.executors.executor import Work
from elastix.search.executors.pool_worker import packed

cloudpickle.register_pickle_by_value(beside)
work = Work(number=1, name="a/1", config={"x": 1}, seed=2, model_source=beside.Source())
Path(sys.argv[2]).write_bytes(packed(work))
"""


def test_a_module_that_is_registered_to_travel_by_value_does(tmp_path: Path) -> None:
    """Workers on other nodes do not have it."""
    (tmp_path / "beside.py").write_text("class Source:\n    def resume(self):\n        return 7\n")
    sent = tmp_path / "sent"
    command = [sys.executable, "-c", ELSEWHERE, str(tmp_path), str(sent)]
    subprocess.run(command, check=True, timeout=60)
    assert pickle.loads(sent.read_bytes()).model_source.resume() == 7


def test_work_and_its_end_arrive_as_they_were() -> None:
    source = StoredModelSource(StoreDirectory("runs/store"), Ref("ab" * 32))
    work = Work(number=3, name="c/3", config={"lr": 0.1}, seed=7, model_source=source)
    assert pickle.loads(packed(work)) == work
    error = ConfigError("wrong")
    ended = Ended(number=3, kind=EndedKind.RAISED, results={0: {"score": 1.0}}, error=error)
    back = pickle.loads(packed(ended))
    assert (back.kind, back.results, str(back.error)) == (EndedKind.RAISED, ended.results, "wrong")


def test_a_class_of_the_script_arrives_where_the_script_does_not_run(tmp_path: Path) -> None:
    """By its name alone it would be looked for in the worker's own script."""
    by_value, nameless = tmp_path / "by_value", tmp_path / "nameless"
    command = [sys.executable, "-c", SCRIPT, str(by_value), str(nameless)]
    subprocess.run(command, check=True, timeout=60)
    assert pickle.loads(by_value.read_bytes()).model_source.resume() == "of the script"
    assert pickle.loads(nameless.read_bytes()).config == {"x": "has no name"}


@pytest.mark.parametrize("odd", [KeyboardInterrupt("mine"), SystemExit(3), GeneratorExit()])
def test_whatever_a_train_function_raises_is_the_end_of_its_trial_and_not_of_the_call(
    odd: BaseException,
) -> None:
    """Ray takes an interrupt for a call that was cancelled; nobody has cancelled it."""

    def train(ctx: Any) -> None:
        ctx.report(m=1.0)
        raise odd

    worker = LoneWorker(0, cloudpickle.dumps(train), 1)
    sent = worker.run(packed(Work(number=7, name="a-00007", config={}, seed=2)), 1)
    ended: Ended = pickle.loads(sent)
    assert (ended.number, ended.kind) == (7, EndedKind.RAISED)
    assert type(odd).__name__ in ended.summary
    assert "raise odd" in ended.traceback
    assert ended.results == {0: {"m": 1.0}}


class Wanting(ConfigError):
    """A user's own, made of other things than its text."""

    def __init__(self, name: str, value: float) -> None:
        super().__init__(f"{name} cannot be {value}")


def test_an_error_that_cannot_be_made_again_from_its_text_travels_as_text() -> None:
    def train(ctx: Any) -> None:
        raise Wanting("width", 0)

    worker = LoneWorker(0, cloudpickle.dumps(None), 1)
    worker._unpickled = train
    ended: Ended = pickle.loads(worker.run(packed(Work(number=7, name="a", config={}, seed=2)), 1))
    assert (ended.kind, ended.error) == (EndedKind.RAISED, None)
    assert ended.summary == "Wanting: width cannot be 0"


def test_a_halt_that_comes_too_late_is_not_for_the_next_run_of_the_trial() -> None:
    def train(ctx: Any) -> None:
        ctx.report(m=1.0)

    worker = LoneWorker(0, cloudpickle.dumps(train), 1)
    work = packed(Work(number=7, name="a", config={}, seed=2))
    kinds = []
    for turn, late in [(1, 1), (2, 1), (3, 4), (4, 4)]:  # the last one is halted while it is queued
        kinds.append(pickle.loads(worker.run(work, turn)).kind)
        worker.halt(late)
    assert kinds == [EndedKind.FINISHED] * 3 + [EndedKind.HALTED]


def test_what_work_has_reported_is_told_once_it_is_over_by_its_end_alone() -> None:
    """The next one in this process may be the same trial, from its beginning."""

    def train(ctx: Any) -> None:
        ctx.report(m=ctx.config["m"])
        if ctx.config["m"] > 1:
            assert worker.reports(0) == (2, [WorkReport(number=8, seq=0, metrics={"m": 2})])

    worker = LoneWorker(0, cloudpickle.dumps(None), 1)
    worker._unpickled = train
    for number, m in ((7, 1), (8, 2)):
        work = Work(number=number, name=f"a-{number}", config={"m": m}, seed=2)
        sent = worker.run(packed(work), number)
        ended: Ended = pickle.loads(sent)
        assert (ended.kind, ended.results) == (EndedKind.FINISHED, {0: {"m": m}}), ended.traceback
        assert worker.reports(0) == (m, [])


def test_a_model_is_stored_with_the_config_that_was_tried_whatever_its_trial_does_to_it(
    tmp_path: Path,
) -> None:
    """Whoever builds the model again, to serve it say, goes by that."""

    def train(ctx: Any) -> None:
        width = ctx.config.pop("width")
        ctx.config["body"][0]["kernel"] = 9
        model = torch.nn.Linear(2, width)
        ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        ctx.report(score=1.0)

    config = {"width": 3, "body": [{"kernel": 5}]}
    terms = InheritTerms(
        store=StoreDirectory(str(tmp_path)),
        campaign="c",
        objectives=Objectives.of("score"),
        mode="lcs",
        provider="parent",
    )
    source = TrialModelSource(terms, 7, config)
    worker = LoneWorker(0, cloudpickle.dumps(None), 1)
    worker._unpickled = train
    work = Work(number=7, name="c-00007", config=config, seed=2, model_source=source)
    ended: Ended = pickle.loads(worker.run(packed(work), 1))
    let_go(terms.store)
    assert ended.ref is not None, ended.traceback
    with Store(tmp_path, read_only=True) as store:
        assert store.manifest(ended.ref).meta["config"] == config
    assert config == {"width": 3, "body": [{"kernel": 5}]}


def test_what_a_thread_reports_that_a_trial_has_left_is_no_part_of_it() -> None:
    """It came with the reports of the next one, and took the place of the trial's own at a rung."""
    over, told = threading.Event(), threading.Event()

    def reports_late(ctx: Any) -> None:
        over.wait(60)
        try:
            ctx.report(m=2.0)
        finally:
            told.set()

    def train(ctx: Any) -> None:
        ctx.report(m=1.0)
        threading.Thread(target=reports_late, args=(ctx,), daemon=True).start()

    worker = LoneWorker(0, cloudpickle.dumps(None), 1)
    worker._unpickled = train
    ended: Ended = pickle.loads(worker.run(packed(Work(number=7, name="a", config={}, seed=2)), 1))
    assert (ended.kind, ended.results) == (EndedKind.FINISHED, {0: {"m": 1.0}})
    over.set()
    assert told.wait(60)
    assert worker.reports(0) == (1, [])


@pytest.fixture
def on_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "n")
    )
    monkeypatch.setattr("elastix.search.executors.pool_worker.import_frozen", lambda name: None)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Ray has given this process the GPU 2; which are made current."""
    current: list[Any] = []
    monkeypatch.setattr(ray, "get_gpu_ids", lambda: [2])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    return current


@pytest.mark.usefixtures("on_a_node")
def test_a_worker_says_at_once_which_code_it_has() -> None:
    """Nothing is asked of it that an older one would not understand."""
    said = pickle.loads(pickle.dumps(LoneWorker(3, b"", torch.get_num_threads()).hello()))
    assert (said.installation, said.failed, said.capacity_bytes > 0) == (HERE, "", True)


@pytest.mark.usefixtures("on_a_node")
@pytest.mark.parametrize("broken", ["", "computing", "choosing it"])
def test_a_worker_says_at_once_that_its_gpu_does_nothing(
    broken: str, gpus: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pool of which every third worker died as it began was given up."""

    def compute(device: torch.device) -> None:
        if broken == "computing":
            raise torch.AcceleratorError(ECC)

    def choose(device: torch.device) -> None:
        gpus.append(device)
        if broken == "choosing it":
            raise torch.AcceleratorError(ECC)

    monkeypatch.setattr(torch.cuda, "set_device", choose)
    monkeypatch.setattr("elastix.search.executors.pool_worker._compute", compute)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 2000))
    said = LoneWorker(3, b"", torch.get_num_threads()).hello()
    assert (said.host, said.node, gpus) == ("n GPU 2", "n", [torch.device("cuda", 0)])
    assert said.failed == (f"AcceleratorError: {ECC.splitlines()[0]}" if broken else "")
    assert said.capacity_bytes == (0 if broken else 950)


@pytest.mark.parametrize(("told_not_to_hide", "index"), [("", 0), ("0", 0), ("1", 2)])
def test_a_process_computes_on_the_gpu_that_ray_gave_it(
    told_not_to_hide: str, index: int, gpus: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES", told_not_to_hide)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert given_device() == torch.device("cuda", index)
    assert gpus == [torch.device("cuda", index)]


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize(
    ("seen", "given", "index"),
    [("1,3", "3", 1), ("GPU-aa, GPU-bb", " GPU-bb", 1), ("2", "2", 0), ("", 2, 2)],
)
def test_a_gpu_is_counted_among_those_that_ray_was_started_with(
    seen: str, given: str | int, index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch sees no others. A pool took all of them for broken, and an id was no number."""
    monkeypatch.setenv("RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", seen)
    monkeypatch.setattr(ray, "get_gpu_ids", lambda: [given])
    assert given_device() == torch.device("cuda", index)


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize("lacks", ["a GPU of Ray's", "CUDA"])
def test_a_process_without_one_computes_on_the_cpu(
    lacks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if lacks == "CUDA":
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    else:
        monkeypatch.setattr(ray, "get_gpu_ids", list)
    assert given_device() == torch.device("cpu")


@pytest.mark.usefixtures("gpus")
def test_a_gpu_that_torch_cannot_use_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker computed on the CPU without a word. A GPU that is broken may look like that."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr("elastix.train.on_ray.given_device._DRIVER", tmp_path / "version")
    assert given_device() == torch.device("cpu")
    (tmp_path / "version").touch()
    with pytest.raises(torch.AcceleratorError, match="Ray has given this process GPU 2") as raised:
        given_device()
    assert is_device_failure(raised.value)
    monkeypatch.setattr(ray, "get_gpu_ids", list)
    assert given_device() == torch.device("cpu")


ECC = "CUDA error: uncorrectable ECC error encountered\nCUDA kernel errors might be asynchronous."
ASSERTED = "CUDA error: device-side assert triggered\nCompile with `TORCH_USE_CUDA_DSA`."


@pytest.mark.parametrize(("says", "kind"), [(ECC, EndedKind.LOST), (ASSERTED, EndedKind.RAISED)])
def test_where_a_gpu_does_nothing_any_more_no_further_trial_fails_of_that(
    says: str, kind: EndedKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After such an error all that the process asks of CUDA raises it again."""

    def raises() -> None:
        raise torch.AcceleratorError(says)

    def train(ctx: Any) -> None:
        ctx.report(m=1.0)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "synchronize", raises)
        raises()

    worker = LoneWorker(0, cloudpickle.dumps(None), 1)
    worker._unpickled = train
    work = packed(Work(number=7, name="a", config={}, seed=2))
    ended: Ended = pickle.loads(worker.run(work, 1))
    assert (ended.kind, ended.spent) == (kind, True)
    if kind is EndedKind.RAISED:
        assert ended.results == {0: {"m": 1.0}}
    else:
        assert (ended.worker, ended.summary.partition(": ")[0]) == ("", "its GPU failed")
        assert "\n" not in ended.summary
        assert "AcceleratorError" in ended.traceback
    assert worker.run(work, 2) == GIVEN_BACK


def test_a_worker_of_whose_end_nobody_can_hear_gives_nothing_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The pool takes it for good, and would give it all that it gives back, without end."""

    def refuse(ended: Ended) -> bytes:
        raise MemoryError

    worker = LoneWorker(0, cloudpickle.dumps(None), 1)
    over = Ended(number=7, kind=EndedKind.LOST, spent=True)
    monkeypatch.setattr(worker, "_carry_out", lambda *_: over)
    work = packed(Work(number=7, name="a", config={}, seed=2))
    with monkeypatch.context() as patch:
        patch.setattr("elastix.search.executors.pool_worker.packed", refuse)
        with pytest.raises(MemoryError):
            worker.run(work, 1)
    assert pickle.loads(worker.run(work, 2)) == over
    assert worker.run(work, 3) == GIVEN_BACK


def test_a_gpu_that_has_broken_between_two_trials_ends_the_worker_and_not_the_trial(monkeypatch):
    def broken(device):
        raise RuntimeError("CUDA error: unspecified launch failure\nCompile with")

    monkeypatch.setattr(torch.cuda, "set_device", broken)
    worker = LoneWorker(0, cloudpickle.dumps(None), 1)
    worker._device = torch.device("cuda", 0)
    sent = packed(Work(number=7, name="a-00007", config={}, seed=2))
    ended = pickle.loads(worker.run(sent, 1))
    assert (ended.number, ended.kind, ended.spent) == (7, EndedKind.LOST, True)
    assert ended.summary == "its GPU failed: CUDA error: unspecified launch failure"
    assert not ended.worker  # or the campaign would say that this one died
    assert worker.run(sent, 2) == GIVEN_BACK
