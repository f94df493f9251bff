"""`elastix bench`: what is told when the page cannot be written."""

import json
from contextlib import nullcontext

import pytest
from typer.testing import CliRunner

from elastix.bench.measures import Rate, SizeMeasured
from elastix.cli import app
from elastix.commands import bench
from elastix.errors import TrainError


def test_a_page_that_cannot_be_written_is_refused_before_anything_is_measured(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(bench, "_measure", lambda *_, **__: pytest.fail("it was measured"))
    (tmp_path / "script.py").write_text("def train(ctx):\n    pass\n")
    words = ["bench", str(tmp_path / "script.py"), "--out", "/proc/page.html"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 2
    assert "/proc/page.html cannot be the page" in done.stderr
    assert "Nothing was started" in done.stderr


def test_ddp_is_waited_for_as_long_as_steps_of_the_function_take(tmp_path, monkeypatch):
    slow = Rate(5.0, 4.0, 6.0, steps=5, seconds=3000.0, step_samples=1.0)
    asked = []

    def measure_ddp(*_, **options):
        asked.append(options["step_s"])
        return slow

    monkeypatch.setattr("elastix.bench.elastic_group.own_ray", lambda cpus: nullcontext())
    monkeypatch.setattr(
        "elastix.bench.elastic_group.measure_elastix",
        lambda *_, **__: SizeMeasured(workers=1, elastix=slow),
    )
    monkeypatch.setattr("elastix.bench.ddp_group.measure_ddp", measure_ddp)
    (tmp_path / "script.py").write_text("def train(ctx):\n    pass\n")
    words = ["bench", str(tmp_path / "script.py"), "-w", "1", "--out", str(tmp_path / "p.html")]
    assert CliRunner().invoke(app, words).exit_code == 0
    assert asked == [600.0]


def test_what_was_measured_is_told_though_the_page_cannot_be_written(tmp_path, monkeypatch):
    def measure(*given, **__):
        (tmp_path / "pages").rename(tmp_path / "others")
        (tmp_path / "pages").touch()
        given[-1].append(SizeMeasured(workers=1, elastix=Rate(5.0, 4.0, 6.0, 10, 2.0, 1.0)))

    (tmp_path / "pages").mkdir()
    (tmp_path / "script.py").write_text("def train(ctx):\n    pass\n")
    monkeypatch.setattr(bench, "_measure", measure)
    words = ["bench", str(tmp_path / "script.py"), "--workers", "1", "--json"]
    done = CliRunner().invoke(app, [*words, "--out", str(tmp_path / "pages" / "page.html")])
    assert done.exit_code == 1
    assert json.loads(done.stdout)["sizes"][0]["elastix"]["samples_per_s"] == 5.0
    assert "could not be written" in done.stderr


@pytest.mark.parametrize(
    ("error", "code"), [(TrainError("one rank fell over"), 1), (KeyboardInterrupt(), 130)]
)
def test_what_was_measured_is_told_though_a_later_size_fails(tmp_path, monkeypatch, error, code):
    rate = Rate(5.0, 4.0, 6.0, steps=10, seconds=2.0, step_samples=1.0)

    def measure_ddp(train, config, size, *_, **__):
        if size == 2:
            raise error
        return rate

    monkeypatch.setattr("elastix.bench.elastic_group.own_ray", lambda cpus: nullcontext())
    monkeypatch.setattr(
        "elastix.bench.elastic_group.measure_elastix",
        lambda train, config, size, *_, **__: SizeMeasured(workers=size, elastix=rate),
    )
    monkeypatch.setattr("elastix.bench.ddp_group.measure_ddp", measure_ddp)
    (tmp_path / "script.py").write_text("def train(ctx):\n    pass\n")
    page = tmp_path / "p.html"
    words = ["bench", str(tmp_path / "script.py"), "-w", "1..3", "--json", "--out", str(page)]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == code
    told = json.loads(done.stdout)
    rates = [(size["workers"], size["ddp"] and size["ddp"]["steps"]) for size in told["sizes"]]
    assert rates == [(1, 10), (2, None)]
    assert told["notes"][0].startswith("The benchmark was cut short")
    assert "cut short" in page.read_text()
    assert str(error) in done.stderr
