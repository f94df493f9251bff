"""The documents' numbers are those of benchmarks/results, and a missed goal is said."""

import json

import pytest

from benchmarks.goals import ROWS
from benchmarks.table import (
    DOCUMENTS,
    RESULTS,
    ROOT,
    fleets,
    goals,
    gpu,
    headline,
    install,
    recoveries,
    regrets,
    sizes,
    updated,
    versions,
)

SHOWN = [(path, name) for path, tables in DOCUMENTS.items() for name in tables]


@pytest.mark.parametrize(("path", "name"), SHOWN)
def test_a_document_shows_the_results_that_are_committed(path, name):
    text = (ROOT / path).read_text(encoding="utf-8")
    found = updated(text, name, DOCUMENTS[path][name]())
    assert found == text, "run python -m benchmarks.table --update"


def test_numbers_between_the_tables_are_those_of_the_results():
    page = " ".join((ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8").split())
    overhead, size = (
        json.loads((RESULTS / f"{name}.json").read_text()) for name in ("overhead", "size")
    )
    ddp = {m: [overhead[m][f"ddp_vs_ddp_p{q}"] for q in (25, 75)] for m in ("mlp", "convnet")}
    store, campaign = size["store"]["1000000"], size["campaign"]["100000"]
    journal = size["journal"]["10000000"]
    for said in (
        "{:.2f} to {:.2f} for the MLP, and {:.2f} to {:.2f}".format(*ddp["mlp"], *ddp["convnet"]),
        f"take {store['nearest_bytes_per_model']:.0f} bytes of memory for each of a million",
        f"held up to {store['peak_mib']['adopt']:.0f} MiB",
        f"the driver holds {campaign['peak_mib']['driver']:.0f} MiB",
        f"needs {journal['open_s']:.0f} s of CPU for it",
        f"account of samples {journal['result_s']:.0f} s, the report {journal['report_s']:.0f} s",
    ):
        assert said in page, f"docs/benchmarks.md: measured was {said!r}"
    assert {found["seconds"] for found in size["workers"].values()} == {60.0}
    assert "one is killed each second for a minute, and replaced" in page


def test_the_few_numbers_are_those_of_the_many(tmp_path):
    assert headline(tmp_path).count("not measured") == 6
    (tmp_path / "goodput.json").write_text(json.dumps({"elastix": 0.913}))
    line = "| goodput with a kill every 30 s | 0.91 | `benchmarks.goodput` |"
    assert line in headline(tmp_path).splitlines()
    assert any(row.what == "goodput with a kill every 30 s" for row in ROWS)


def test_what_installing_takes_is_a_sentence(tmp_path):
    assert "not measured" in install(tmp_path)
    found = {"wheel_bytes": 512_000, "bytes": 1_234_000_000, "torch_bytes": 700_000_000}
    found |= {"ray_bytes": 200_000_000, "packages": 90, "install_s": 61.7}
    (tmp_path / "install.json").write_text(json.dumps(found))
    said = install(tmp_path)
    assert all(part in said for part in ("0.5 MB", "1,234 MB", "62 s"))


def test_reached_missed_and_not_measured(tmp_path):
    recovery = {"stall_s": {"median": 0.15, "max": 0.75}, "steps_lost": 0}
    (tmp_path / "recovery.json").write_text(json.dumps({"elastix": recovery}))
    lines = {line.split(" | ")[0]: line for line in goals(tmp_path).splitlines()}
    assert lines["| SIGKILL to agreed gradient, median, s"].endswith("| 0.15 |  |")
    assert lines["| SIGKILL to agreed gradient, maximum, s"].endswith("| 0.75 | **missed** |")
    assert lines["| samples dropped"].endswith("| not measured | |")


@pytest.mark.parametrize(
    ("ratio", "verdict"), [(0.9, ""), (1.0, ""), (1.02, ""), (1.1, "**missed**")]
)
def test_noise_is_what_ddp_shows_against_itself(tmp_path, ratio, verdict):
    row = {"ratio_median": ratio, "ddp_vs_ddp_p75": 1.05}
    (tmp_path / "overhead.json").write_text(json.dumps({"mlp": row}))
    lines = [line for line in goals(tmp_path).splitlines() if "DDP's, MLP" in line]
    assert lines[0].endswith(f"| {ratio:.2f} | {verdict} |")


def test_peers_stand_beside_us(tmp_path):
    row = {"stall_s": {"median": 5.25, "max": 5.5}, "steps_lost": 1, "samples_dropped": 192.0}
    row |= {"samples_repeated": 0, "contributes_s": None, "repeats": 10}
    (tmp_path / "recovery.json").write_text(json.dumps({"torchft": row}))
    last = recoveries(tmp_path).splitlines()[-1]
    assert last == "| torchft | 5.25 / 5.50 | 1 | 192 | 0 | never | 10 |"


def test_regret_by_table_and_the_goals_made_of_it(tmp_path):
    assert regrets(tmp_path) == "Not measured."
    means = {"deephyper_re": 1.0, "deephyper_cbo": 0.9, "optuna_tpe": 0.8, "evolution": 0.6}
    rows = {name: {"mean": mean, "se": 0.3} for name, mean in means.items()}
    rows["default"] = {"mean": 0.85, "se": 0.4}
    (tmp_path / "search.json").write_text(json.dumps({"regret": {"nasbench201/cifar100": rows}}))
    rows["screened"] = {"mean": 1.1, "se": 0.1}
    odd = {"random": {"mean": 3.0, "se": 0.1}, "default": {"mean": 2.0, "se": 0.1}}
    regret = {"nasbench201/cifar100": rows, "odd": odd | {"screened": odd["random"]}}
    (tmp_path / "search.json").write_text(json.dumps({"regret": regret}))
    head, _, first, second = regrets(tmp_path).splitlines()
    place = head.split(" | ").index("evolution")
    assert first.split(" | ")[place] == "0.6 ± 0.3"
    assert second.split(" | ")[place] == ""
    lines = {line.split(" | ")[0]: line for line in goals(tmp_path).splitlines()}
    assert "| 0.60 |" in lines["| regret of Evolution over DeepHyper's, NAS-Bench-201 cifar100"]
    beyond = "| default's regret beyond the better of TPE and CBO, "
    assert "| +0.1 |" in lines[beyond + "nasbench201/cifar100"]
    held = "| tables, of 15, on which no rival is ahead of "
    assert "| 2 | **missed** |" in lines[held + "default by a s.e."]
    assert "| 1 | **missed** |" in lines[held + "screened by a s.e."]
    assert "not measured" in lines[beyond + "hpobench/segment"]


def test_what_size_costs_stands_by_workers_and_by_run(tmp_path):
    kinds = ("heartbeat_us", "tick_us", "step_us", "loss_us_per_message", "join_us_per_message")
    events = {size: dict.fromkeys(kinds, cost) for size, cost in (("10", 2.0), ("10000", 9.0))}
    day = {"workers": 10_000, "hours": 24.0, "losses": 1439, "steps": 8640, "conductor_cpu_s": 99.6}
    day |= {"events": {"Heartbeat": 1_000, "Entered": 500}, "share_of_a_core": 0.0012}
    (tmp_path / "size.json").write_text(json.dumps({"events": events, "day": day}))
    assert sizes(tmp_path).splitlines()[-1] == "| 10,000 | 9.0 | 9.0 | 9.0 | 9.0 | 9.0 |"
    last = fleets(tmp_path).splitlines()[-1]
    assert last == "| 10,000 | 24 | 1,439 | 8,640 | 1,500 | 100 | 0.12% |"
    missed = [line for line in goals(tmp_path).splitlines() if "10,000 workers over 10" in line]
    assert len(missed) == 5
    assert all(line.endswith("| <= 4 | 4.50 | **missed** |") for line in missed)


def test_parts_of_a_gpu_that_are_missing_were_not_measured(tmp_path):
    assert gpu(tmp_path).count("not measured") == gpu(tmp_path / "none").count("not measured") > 8
    device = {"name": "NVIDIA H100 80GB HBM3"}
    convnet = {"elastix_over_ddp": {"median": 1.21}, "step_s": {"elastix": 0.0132, "ddp": 0.0108}}
    stall = {"elastix": {"held_ms_median": 5.6}, "dcp_async": {"held_ms_median": 93.1}}
    found = {"device": device, "overhead": {"convnet": convnet}, "stall": stall}
    found |= {"failed": {"read": "Traceback"}, "estimate": {"convnet": {"peak_ratio": None}}}
    (tmp_path / "gpu.json").write_text(json.dumps(found))
    about = {"gpu": {"date": "2026-11-26T15:46:00+00:00", "cores": 16}}
    (tmp_path / "about.json").write_text(json.dumps(about))
    shown = goals(tmp_path).splitlines()
    when = "(2026-11-26, 16 cores, one NVIDIA H100 80GB HBM3)"
    first = shown.index(f"| **`python -m benchmarks.gpu`** {when} | | | |") + 1
    verdicts = [line.split(" | ", 2)[2] for line in shown[first:]]
    assert len(verdicts) == sum(row.benchmark == "gpu" for row in ROWS)
    measured = [verdict for verdict in verdicts if verdict != "not measured | |"]
    assert measured == ["1.21 | **missed** |", "0.06 |  |"]
    lines = {line.split(" | ")[0]: line for line in gpu(tmp_path).splitlines()}
    step = "| 13.2 | DDP: 10.8, plain torch: not measured |"
    assert lines["| a step, convnet, ms"].endswith(step)
    held = "| a checkpoint of 5 GB: holds the training thread, ms"
    assert lines[held].endswith("| 5.6 | DCP: 93.1 |")


def test_what_misses_its_goal_by_less_than_is_printed_shows_by_how_much(tmp_path):
    (tmp_path / "exact.json").write_text('{"eight_slices_over_plain": 1.0504}')
    (row,) = (line for line in goals(tmp_path).splitlines() if "| 1.05" in line)
    assert row.endswith("| <= 1.05 | 1.0504 | **missed** |")


def test_parts_of_different_days_are_said_to_be(tmp_path):
    parts = {"a": {"date": "2026-11-24T15:46:00+00:00"}, "b": {"date": "2026-11-26T01:00:00+00:00"}}
    about = {"date": "2026-11-26T15:46:00+00:00", "cores": 2}
    (tmp_path / "about.json").write_text(json.dumps({"crews": {**about, "parts": parts}}))
    (tmp_path / "crews.json").write_text("{}")
    title = "| **`python -m benchmarks.crews`** (2026-11-24 to 2026-11-26, 2 cores) | | | |"
    assert title in goals(tmp_path).splitlines()


def test_text_without_markers_is_refused():
    with pytest.raises(ValueError, match="no <!-- benchmarks: begin -->"):
        updated("<!-- benchmarks: begin --> but no end", "benchmarks", "x")


def test_rows_of_versions_say_what_came_of_them(tmp_path):
    counts = {"passed": 8596, "failed": 8, "skipped": 1}
    installed = {"python": "3.13.0", "torch": "2.14.1", "ray": "2.60.0"}
    asked = {"python": "3.99", "torch": "newest", "ray": "2.50"}
    found = {
        "a": {"asked": asked, "installed": installed, "tests": counts, "run": {"passed": True}},
        "b": {"asked": asked, "not_installed": "there is no python3.99 here"},
    }
    (tmp_path / "versions.json").write_text(json.dumps(found))
    assert versions(tmp_path).splitlines()[2:] == [
        "| 3.13.0 | 2.14.1 | 2.60.0 | 8,596 passed, 8 failed, 1 skipped | passed |",
        "| 3.99 | newest | 2.50 | could not be installed |  |",
    ]
