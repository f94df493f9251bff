"""Loggers: the feed that hands them events, and each library's real files."""

import json
import logging
import struct
import threading

import pytest

from elastix.errors import ConfigError
from elastix.events import (
    BatchShares,
    CampaignEnded,
    CampaignStarted,
    GenerationFormed,
    Recovered,
    Reported,
    Resumed,
    RunEnded,
    RunStarted,
    StepCommitted,
    StoreMeasured,
    TrialEnded,
    TrialLost,
    TrialReported,
    TrialStarted,
    WorkerLost,
)
from elastix.observe.loggers import LoggerThread, Scalars
from elastix.observe.mlflow import MLflow
from elastix.observe.tensorboard import TensorBoard
from elastix.observe.wandb import WandB
from tests.notes import Notes

START = RunStarted(
    t=0.0,
    name="digits",
    seed=7,
    config={"lr": 1e-3, "net": {"depth": 3}},
    scaling={"num_workers": 2},
    versions={"torch": "2"},
)


def committed(step, t):
    batch = BatchShares(loader=0, epoch=0, shares={0: ((step * 10, step * 10 + 10),)})
    return StepCommitted(t=t, step=step, generation=1, world_size=2, batches=(batch,))


def reported(step, loss, **more):
    return Reported(t=float(step), seq=step, step=step, metrics={"loss": loss, **more})


RUN = [
    START,
    GenerationFormed(t=0.5, generation=1, members=(0, 1), cause="start"),
    committed(1, 1.0),
    reported(1, 0.5, phase="warm"),
    committed(2, 3.0),
    WorkerLost(t=3.5, worker=1, rank=1, generation=1, cause="died"),
    Recovered(
        t=4.0, worker=0, generation=2, step=3, outcome="accepted", rebuild_s=0.1, stall_s=0.2
    ),
    reported(3, 0.25),
    RunEnded(t=5.0, outcome="finished", step=3),
]
AGAIN = [
    START,
    Resumed(t=6.0, step=2, ref="r"),
    reported(3, 0.2),
    reported(4, 0.1),
    RunEnded(t=7.0, outcome="interrupted", step=4, message="Ctrl-C"),
]


def trial_started(trial, attempt=1):
    config = {"lr": trial / 10, "net": {"depth": 3}}
    return TrialStarted(
        trial=trial, config=config, parent=None, attempt=attempt, rung=None, name=f"nas-{trial}"
    )


def trial_ended(trial, loss, *, best, state="finished"):
    return TrialEnded(
        trial=trial,
        state=state,
        values={} if state == "failed" else {"loss": loss},
        metrics={},
        ref="",
        epochs=2.0,
        lineage_epochs=4.0,
        inherited=0.5,
        seconds=1.0,
        best=best,
        message="no numbers" if state == "failed" else "",
    )


SEARCH = [
    CampaignStarted(
        name="nas",
        objectives={"loss": "min"},
        budget={"trials": 3},
        searcher="Evolution",
        inherit="lcs (parent)",
        known=0,
        versions={"torch": "2"},
    ),
    trial_started(0),
    trial_started(1),  # beside the first
    TrialReported(trial=1, seq=0, metrics={"loss": 0.9}),
    TrialReported(trial=0, seq=0, metrics={"loss": 0.5, "phase": "warm"}),
    TrialLost(trial=1, attempt=1, cause="died"),
    trial_started(1, attempt=2),
    TrialReported(trial=1, seq=1, metrics={"loss": 0.4}),
    trial_ended(0, 0.5, best=True),
    trial_ended(1, 0.4, best=True),
    trial_started(2),
    StoreMeasured(logical_bytes=9, unique_bytes=5, physical_bytes=6),
    trial_ended(2, 0.0, best=False, state="failed"),
    CampaignEnded(outcome="finished", trials=3, best=1),
]


def feed(logger, events):
    for event in events:
        logger.log(event)
    logger.close()


def test_the_feed_hands_on_everything_in_order_in_a_thread_of_its_own():
    notes = Notes()
    feed = LoggerThread([notes])
    for event in RUN:
        feed.show(event)
    feed.close()
    assert notes.seen == RUN
    assert notes.closed == 1
    assert notes.thread is not threading.current_thread()


def test_a_slow_logger_holds_up_nobody():
    gate = threading.Event()
    notes = Notes(gate)
    feed = LoggerThread([notes])
    for event in RUN:
        feed.show(event)  # would wait for ever if it waited
    assert not notes.seen
    gate.set()
    feed.close()
    assert notes.seen == RUN


def test_a_logger_that_raises_is_dropped_and_the_others_go_on(caplog):
    bad, good = Notes(fails_at=lambda event: event is RUN[2]), Notes()
    feed = LoggerThread([bad, good])
    with caplog.at_level(logging.WARNING):
        for event in RUN:
            feed.show(event)
        feed.close()
    assert good.seen == RUN
    assert bad.seen == RUN[:2]
    assert bad.closed == 0
    assert caplog.text.count("logger=Notes raised OSError('no more room')") == 1


def test_a_logger_that_never_ends_is_left_behind(caplog):
    gate = threading.Event()
    feed = LoggerThread([Notes(gate)])
    feed.show(START)
    with caplog.at_level(logging.WARNING):
        feed.close(timeout_s=0.05)
    assert "loggers=Notes did not end" in caplog.text
    gate.set()


def test_without_loggers_there_is_no_thread():
    before = set(threading.enumerate())  # others may end meanwhile
    feed = LoggerThread([])
    feed.show(START)
    assert set(threading.enumerate()) <= before
    feed.close()


def test_scalars():
    scalars = Scalars(every_s=1.5)
    found = [(scalars.read(event), scalars.step) for event in RUN]
    assert found[1][0] == {"elastix/world_size": 2.0, "elastix/generation": 1.0}
    assert found[3] == ({"loss": 0.5}, 1)
    assert found[4] == ({"elastix/samples_per_second": 5.0}, 2)
    assert found[5][0] == {"elastix/workers_lost": 1.0}
    assert found[6][0] == {"elastix/recovery_s": 0.2}


def test_a_rate_is_logged_soon_after_the_clock_was_set_back():
    scalars = Scalars(every_s=1.5)
    found = [scalars.read(committed(step, t)) for step, t in enumerate((10_000.0, 1.0, 3.0))]
    assert found == [{}, {}, {"elastix/samples_per_second": 5.0}]


def test_tensorboard_writes_what_tensorboard_reads(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    feed(TensorBoard(tmp_path), RUN)
    feed(TensorBoard(tmp_path), AGAIN)
    read = EventAccumulator(str(tmp_path / "digits"))
    read.Reload()
    curve = [(event.step, pytest.approx(event.value)) for event in read.Scalars("loss")]
    assert curve == [(1, 0.5), (3, 0.2), (4, 0.1)]  # the first step 3 is void
    assert [event.value for event in read.Scalars("elastix/workers_lost")] == [1.0]
    texts = read.Tags()["tensors"]
    assert {"config/text_summary", "phase/text_summary"} <= set(texts)
    config = read.Tensors("config/text_summary")[0].tensor_proto.string_val[0].decode()
    assert json.loads(config.strip("`\n")) == START.config


def test_tensorboard_has_a_folder_for_each_trial_and_a_row_of_hparams(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams import plugin_data_pb2

    feed(TensorBoard(tmp_path), SEARCH)

    def folder(*parts):
        read = EventAccumulator(str(tmp_path.joinpath(*parts)))
        read.Reload()
        return read

    curve = [(e.step, pytest.approx(e.value)) for e in folder("nas", "nas-1").Scalars("loss")]
    assert curve == [(1, 0.9), (2, 0.4)]
    best = [(e.step, pytest.approx(e.value)) for e in folder("nas").Scalars("best/loss")]
    assert best == [(1, 0.5), (2, 0.4)]
    content = folder("nas", "nas-1").summary_metadata["_hparams_/session_start_info"]
    row = plugin_data_pb2.HParamsPluginData.FromString(content.plugin_data.content)
    values = {k: v.number_value for k, v in row.session_start_info.hparams.items()}
    assert values == {"lr": 0.1, "net.depth": 3.0}
    assert "elastix/message/text_summary" in folder("nas", "nas-2").Tags()["tensors"]


def test_mlflow_has_a_run_for_each_trial_below_the_campaign(tmp_path, monkeypatch):
    import mlflow

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = (tmp_path / "mlruns").as_uri()
    feed(MLflow(uri), SEARCH)
    client = mlflow.MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("elastix").experiment_id
    runs = {run.info.run_name: run for run in client.search_runs([experiment])}
    assert sorted(runs) == ["nas", "nas-0", "nas-1", "nas-2"]
    assert runs["nas"].data.params["searcher"] == "Evolution"
    assert runs["nas"].data.metrics == {"best/loss": 0.4, "elastix/store_bytes": 6.0}
    trial = runs["nas-1"]
    assert trial.data.tags["mlflow.parentRunId"] == runs["nas"].info.run_id
    assert trial.data.params == {"lr": "0.1", "net.depth": "3"}
    history = client.get_metric_history(trial.info.run_id, "loss")
    assert [(m.step, m.value) for m in history] == [(1, 0.9), (2, 0.4)]
    assert trial.data.metrics["elastix/inherited"] == 0.5
    assert {name: run.info.status for name, run in runs.items()} == {
        "nas": "FINISHED",
        "nas-0": "FINISHED",
        "nas-1": "FINISHED",
        "nas-2": "FAILED",
    }
    assert runs["nas-2"].data.tags["elastix.message"] == "no numbers"


def test_what_is_left_open_is_closed_as_interrupted(tmp_path, monkeypatch):
    import mlflow

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = (tmp_path / "mlruns").as_uri()
    feed(MLflow(uri), SEARCH[:5])  # then the campaign ends without a word
    client = mlflow.MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("elastix").experiment_id
    assert {run.info.status for run in client.search_runs([experiment])} == {"KILLED"}
    feed(MLflow(uri), [SEARCH[0], trial_started(1), trial_ended(1, 0.4, best=True)])  # run() again
    runs = {run.info.run_name: run for run in client.search_runs([experiment])}
    assert len(runs) == 3
    assert runs["nas-1"].info.status == "FINISHED"


def test_mlflow_continues_the_run_of_that_name(tmp_path, monkeypatch):
    import mlflow

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = (tmp_path / "mlruns").as_uri()
    feed(MLflow(uri, "digits and more"), RUN)
    feed(MLflow(uri, "digits and more"), AGAIN)
    client = mlflow.MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("digits and more")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.run_name == "digits"
    assert run.info.status == "KILLED"
    assert run.data.params["net.depth"] == "3"
    assert run.data.params["scaling.num_workers"] == "2"
    history = client.get_metric_history(run.info.run_id, "loss")
    assert [(m.step, m.value) for m in history] == [(1, 0.5), (3, 0.25), (3, 0.2), (4, 0.1)]
    assert run.data.metrics["elastix/recovery_s"] == 0.2


def test_mlflow_says_at_once_what_it_does_not_take(tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE", raising=False)
    for uri in (tmp_path.as_uri(), "gopher://nowhere"):
        with pytest.raises(ConfigError, match="MLflow refuses"):
            MLflow(uri)


def offline_records(directory, name):
    """What W&B wrote for a later `wandb sync`: a LevelDB log of protobuf records."""
    from wandb.proto.wandb_internal_pb2 import Record

    (path,) = directory.glob(f"wandb/offline-run-*/run-{name}.wandb")
    data, place, whole = path.read_bytes(), 7, b""
    assert data.startswith(b":W&B")
    while place + 7 <= len(data):
        if 32768 - place % 32768 < 7:  # no header begins in the last bytes of a block
            place += 32768 - place % 32768
            continue
        _, length, kind = struct.unpack("<IHB", data[place : place + 7])
        whole += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # a whole one, or the last part of one
            record = Record()
            record.ParseFromString(whole)
            yield record
            whole = b""


def history(records):
    rows = []
    for record in records:
        if record.HasField("history"):
            items = record.history.item
            rows.append({i.key or ".".join(i.nested_key): json.loads(i.value_json) for i in items})
    return rows


@pytest.mark.timeout(240)
def test_wandb_offline(tmp_path):
    import wandb

    feed(WandB("project", directory=tmp_path, mode="offline"), RUN)
    wandb.teardown()  # its service writes the last records when it ends
    records = list(offline_records(tmp_path, "digits"))
    (run,) = [r.run for r in records if r.HasField("run")]
    assert (run.project, run.run_id, run.display_name) == ("project", "digits", "digits")
    rows = history(records)
    losses = [(row["elastix/step"], row["loss"]) for row in rows if "loss" in row]
    assert losses == [(1, 0.5), (3, 0.25)]
    assert any(row.get("phase") == "warm" for row in rows)
    assert [r.exit.exit_code for r in records if r.HasField("exit")] == [0]


@pytest.mark.timeout(240)
def test_wandb_has_a_run_for_each_trial_in_the_campaigns_group(tmp_path):
    import wandb

    feed(WandB("project", directory=tmp_path, mode="offline"), SEARCH)
    wandb.teardown()
    trials = {n: list(offline_records(tmp_path, f"nas-{n}")) for n in range(3)}
    for records in trials.values():
        (run,) = [r.run for r in records if r.HasField("run")]
        assert run.run_group == "nas"
    losses = [row["loss"] for row in history(trials[1]) if "loss" in row]
    assert losses == [0.9, 0.4]
    exits = {n: [r.exit.exit_code for r in rs if r.HasField("exit")] for n, rs in trials.items()}
    assert exits == {0: [0], 1: [0], 2: [1]}
    best = [r["best/loss"] for r in history(offline_records(tmp_path, "nas")) if "best/loss" in r]
    assert best == [0.5, 0.4]
