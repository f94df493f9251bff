"""Events as metrics, and the dashboard that shows them."""

import json
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastix.errors import ConfigError
from elastix.events import (
    BatchShares,
    CampaignStarted,
    GenerationFormed,
    Recovered,
    ReplicasDiverged,
    Reported,
    Resumed,
    RunEnded,
    SamplesLeftOut,
    SlicesHandedOver,
    StateNotStored,
    StateStored,
    StepCommitted,
    StepVoided,
    TrialEnded,
    TrialLost,
    TrialStarted,
    TrialStarved,
    WorkerJoined,
    WorkerLeft,
    WorkerLost,
    WorkerSlow,
    WorkersMeasured,
    WorkerStarted,
)
from elastix.observe.grafana import (
    FILE,
    alerts,
    dashboard,
    provisioned_directory,
    write_alerts,
    write_dashboard,
)
from elastix.observe.metric_series import SERIES, Account, Readings

KIND = {series.name: series.kind for series in SERIES}
TAGS = {series.name: len(series.tags) for series in SERIES}


class Sink:
    """Keeps what it is given, as an endpoint would."""

    def __init__(self):
        self.values = {}

    def put(self, name, value, *labels):
        assert len(labels) == TAGS[name]
        key = (name, *labels) if labels else name
        if KIND[name] == "histogram":
            self.values.setdefault(key, []).append(value)
        elif KIND[name] == "counter":
            assert value >= 0
            self.values[key] = self.values.get(key, 0) + value
        else:
            self.values[key] = value

    def forget(self, name, *labels):
        for key in [k for k in self.values if k[: 1 + len(labels)] == (name, *labels)]:
            del self.values[key]


def shares(*spans, owed=(), loader=0):
    used = {number: (span,) for number, span in enumerate(spans)}
    return BatchShares(loader=loader, epoch=0, shares=used, owed=tuple(owed))


def committed(step, *batches, t=0.0):
    return StepCommitted(t=t, step=step, generation=1, world_size=2, batches=batches)


def read(*events):
    sink = Sink()
    readings = Readings(sink)
    for event in events:
        readings.read(event)
    return sink.values


def test_a_run_with_a_loss_and_a_joiner():
    values = read(
        GenerationFormed(generation=1, members=(0, 1, 2), cause="start"),
        committed(1, shares((0, 10), (10, 20)), t=1.0),
        WorkerLost(worker=1, rank=1, generation=1, cause="died"),
        GenerationFormed(generation=2, members=(0, 2), cause="loss"),
        Recovered(worker=0, generation=2, step=2, outcome="accepted", rebuild_s=0.1, stall_s=0.2),
        committed(2, shares((20, 30), owed=[(30, 40)]), t=3.0),
        SlicesHandedOver(step=2, moved=((1, 0, 2), (1, 2, 1))),
        WorkerJoined(worker=3, generation=3, step=2, copy_s=0.5, copy_bytes=10),
        StateStored(
            ref="r",
            step=2,
            reason="final",
            stored_bytes=100,
            store_s=0.25,
            stall_s=0.01,
            state_bytes=300,
        ),
        WorkerLeft(worker=0, generation=3, step=2, cause="notice"),
        StateNotStored(step=2, reason="every_steps", why="full"),
        Reported(seq=0, step=2, metrics={"loss": 0.5, "note": "text", "epoch": 3}),
    )
    assert values == {
        "generation": 2,
        "world_size": 2,
        "steps": 2,
        "step_seconds": [2.0],
        "samples_committed": 30,
        "samples_owed": 10,
        "samples_repeated": 0,
        ("workers_lost", "died", "1", ""): 1,
        "recovery_seconds": [0.2],
        "slices_handed_over": 3,
        "workers_joined": 1,
        "join_seconds": [0.5],
        "checkpoint_write_seconds": [0.25],
        "checkpoint_stall_seconds": [0.01],
        "checkpoints_failed": 1,
        "store_logical_bytes": 300,
        "store_physical_bytes": 100,
        ("workers_left", "notice", "0", ""): 1,
        ("reported", "loss"): 0.5,
        ("reported", "epoch"): 3.0,
    }


def test_goodput_is_what_is_left_of_the_undisturbed_rate():
    steps = [committed(n, shares((10 * n, 10 * n + 10)), t=float(n)) for n in (1, 2, 3)]
    assert read(*steps)["goodput_ratio"] == 1.0
    formed = GenerationFormed(t=3.5, generation=2, members=(0,), cause="loss")
    late = committed(4, shares((40, 50)), t=6.0)
    # 30 samples in the 5 s after the first commit, where 10 a second were made undisturbed.
    assert read(*steps, formed, late)["goodput_ratio"] == pytest.approx(0.6)


def test_owed_samples_are_owed_until_somebody_has_them():
    before = [committed(1, shares((0, 10), owed=[(10, 20)]))]
    assert read(*before)["samples_owed"] == 10
    assert read(*before, committed(2, shares((10, 15), (20, 25))))["samples_owed"] == 5
    values = read(*before, committed(2, shares((10, 20), (20, 25))))
    assert values["samples_owed"] == values["samples_repeated"] == 0


def test_a_repeated_sample_is_seen():
    values = read(committed(1, shares((0, 10))), committed(2, shares((8, 12))))
    assert values["samples_repeated"] == 2


def test_loaders_have_streams_of_their_own():
    batches = (shares((0, 10)), shares((0, 10), loader=1))
    assert read(committed(1, *batches))["samples_repeated"] == 0


def test_a_run_that_goes_on_from_a_state_makes_steps_again():
    begun = (committed(1, shares((0, 10))), committed(2, shares((10, 20))))
    again = committed(2, shares((10, 20)))
    assert read(*begun, Resumed(step=1, ref="r"), again)["samples_repeated"] == 0
    assert read(*begun, again)["samples_repeated"] == 10


def ended(trial, state, value, best, inherited=0.0):
    return TrialEnded(
        trial=trial,
        state=state,
        values={"accuracy": value},
        metrics={},
        ref="r",
        epochs=1.0,
        lineage_epochs=1.0,
        inherited=inherited,
        seconds=1.0,
        best=best,
    )


def test_a_campaign():
    begun = [TrialStarted(trial=n, config={}, parent=None, attempt=1, rung=None) for n in range(3)]
    start = CampaignStarted(
        name="nas",
        objectives={"accuracy": "max"},
        budget={},
        searcher="random",
        inherit="lcs",
        known=5,
        versions={},
    )
    values = read(
        start,
        *begun,
        ended(0, "finished", 0.7, best=True),
        TrialLost(trial=2, attempt=1, cause="died"),
        TrialLost(trial=2, attempt=2, cause="OSError: busy", raised=True),
        ended(1, "stopped", 0.6, best=False, inherited=0.5),
    )
    assert values == {
        ("trials", "earlier"): 5,
        ("trials", "running"): 0,
        ("trials", "waiting"): 1,
        ("trials", "finished"): 1,
        ("trials", "stopped"): 1,
        "trials_lost": 1,
        ("best_objective", "accuracy"): 0.7,
        "inherited_ratio": 0.5,
    }


def test_trials_that_starve_and_those_that_a_gate_refuses():
    starved = TrialStarved(trial=0, times=1, peak_bytes=5, reserved_bytes=10, cause="no memory")
    values = read(
        starved,
        starved,
        ended(1, "refused", 0.0, best=False),
        replace(ended(0, "finished", 0.7, best=False), peak_bytes=9),
    )
    assert values["trials_starved"] == 2
    assert values["trial_peak_bytes"] == 9
    assert values["trials", "refused"] == 1
    assert values["inherited_ratio"] == 0.0, "of the one that ran"


def test_nobody_is_in_the_group_of_a_run_that_is_over():
    formed = GenerationFormed(generation=1, members=(0, 1), cause="start")
    assert read(formed, RunEnded(outcome="finished", step=3))["world_size"] == 0


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 12)), max_size=30))
def test_an_account_counts_as_sets_do(pairs):
    account, seen, reached = Account(), set(), 0
    for start, length in pairs:
        positions = set(range(start, start + length))
        spans = [(start, start + length)] if length else []
        assert account.add(shares(*spans)) == len(seen & positions)
        seen |= positions
        reached = max(reached, start + length)
        if seen:
            assert account.owed == len(set(range(min(seen), max(seen) + 1)) - seen)


def test_every_series_has_a_panel_and_every_query_a_series():
    text = json.dumps(dashboard())
    queries = [target["expr"] for panel in dashboard()["panels"] for target in panel["targets"]]
    for series in SERIES:
        suffix = {"gauge": "", "counter": "_total", "histogram": "_bucket"}[series.kind]
        name = f"ray_elastix_{series.name}{suffix}{{"
        assert any(name in query for query in queries), series.name
    assert text.count("ray_elastix_") == len(queries) + 1  # and the list of runs


def test_panels_do_not_overlap_and_have_ids_of_their_own():
    panels = dashboard()["panels"]
    places = {(p["gridPos"]["x"], p["gridPos"]["y"]) for p in panels}
    assert len(places) == len({p["id"] for p in panels}) == len(panels)


def test_the_dashboard_is_written_whole_or_not_at_all(tmp_path):
    path = write_dashboard(tmp_path)
    assert path == tmp_path / FILE
    assert json.loads(path.read_text()) == dashboard()
    assert [p.name for p in tmp_path.iterdir()] == [FILE]
    with pytest.raises(ConfigError, match="No dashboard was written"):
        write_dashboard(tmp_path / "nowhere")


def test_another_users_ray_is_left_alone(tmp_path, monkeypatch):
    folder = tmp_path / "ray" / "session_latest" / "metrics" / "grafana" / "dashboards"
    folder.mkdir(parents=True)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    for name in ("RAY_METRICS_GRAFANA_DASHBOARD_OUTPUT_DIR", "RAY_METRICS_OUTPUT_ROOT"):
        monkeypatch.delenv(name, raising=False)
    assert provisioned_directory() == folder
    monkeypatch.setattr("os.geteuid", lambda: folder.stat().st_uid + 1)
    with pytest.raises(ConfigError, match="another user's"):
        provisioned_directory()
    assert list(folder.iterdir()) == []


def test_what_is_a_workers_has_its_labels_until_it_goes():
    first = {"cpu": 1.5, "memory": 2e9, "gpu": 0.5, "data_s": 0.1, "compute_s": 0.8}
    events = [
        WorkerStarted(worker=0, pid=1, node="n0", device="cpu"),
        WorkerStarted(worker=1, pid=2, node="n1", device="cpu"),
        WorkersMeasured(step=5, workers={0: first, 1: {"cpu": 0.5}}),
        WorkerSlow(worker=1, step=5, factor=2.0),
    ]
    values = read(*events)
    assert values[("worker_cpu_cores", "0", "n0")] == 1.5
    assert values[("worker_memory_bytes", "0", "n0")] == 2e9
    assert values[("worker_time_ratio", "0", "n0", "compute")] == 0.8
    assert values[("worker_slowness_ratio", "1", "n1")] == 2.0
    gone = read(*events, WorkerLost(worker=1, rank=1, generation=1, cause="died"))
    assert gone[("workers_lost", "died", "1", "n1")] == 1
    assert {key[1] for key in gone if key[0].startswith("worker_")} == {"0"}


def test_what_the_sentinel_and_the_guard_find_is_counted():
    values = read(
        ReplicasDiverged(step=3, workers=(0, 1, 2), apart=(2,), parts=("model",), cure="evicted"),
        StepVoided(step=4, why="the gradient is not finite"),
        SamplesLeftOut(loader=0, spans=((0, 10), (20, 25))),
    )
    assert values == {
        ("workers_diverged", "2", ""): 1,
        "steps_voided": 1,
        "samples_left_out": 15,
    }


def test_alerting_rules_ask_for_series_that_there_are(tmp_path):
    (group,) = json.loads(write_alerts(tmp_path).read_text())["groups"]
    assert group["rules"] == alerts()["groups"][0]["rules"]
    kinds = {f"ray_elastix_{series.name}": series.kind for series in SERIES}
    suffix = {"gauge": "", "counter": "_total", "histogram": "_bucket"}
    known = {name + suffix[kind] for name, kind in kinds.items()}
    for rule in group["rules"]:
        asked = set(re.findall(r"ray_elastix_\w+", rule["expr"]))
        assert asked
        assert asked <= known
        assert rule["labels"]["severity"] in ("warning", "critical")


def test_no_alert_is_blind_to_a_series_that_begins_above_zero():
    """Ray's counters do, and each worker has its own: `increase` and `rate` of one loss are 0."""
    for rule in alerts()["groups"][0]["rules"]:
        assert not re.search(r"\b(increase|rate|delta)\(", rule["expr"])
