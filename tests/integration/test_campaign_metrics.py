"""A campaign on Ray feeds Ray's metrics; one without Ray asks for none."""

import ConfigSpace
import pytest

import elastix
from elastix.observe import ray_metrics
from elastix.search.executors.serial import Local


def train(ctx):
    ctx.report(score=float(ctx.config["x"]))


def campaign(tmp_path, **options):
    space = ConfigSpace.ConfigurationSpace({"x": (0.0, 1.0)}, seed=1)
    return elastix.Campaign(
        train,
        space=space,
        searcher=elastix.Random(),
        metric="score",
        budget=elastix.Budget(trials=3, parallel=1),
        inherit=elastix.InheritConfig(mode="none"),
        run=elastix.RunConfig(name="nas", store=str(tmp_path)),
        quiet=True,
        **options,
    )


@pytest.mark.timeout(240)
def test_a_campaign_on_ray_feeds_its_metrics(cluster, tmp_path, monkeypatch):
    put = []
    record = ray_metrics.Metrics.put

    def seen(self, name, value, *labels):
        put.append((name, labels, value))
        record(self, name, value, *labels)

    monkeypatch.setattr(ray_metrics.Metrics, "put", seen)
    results = campaign(tmp_path).run()
    last = {(name, *labels): value for name, labels, value in put}
    assert last["trials", "finished"] == 3
    assert last["trials", "running"] == 0
    best = max(value for name, _, value in put if name == "best_objective")
    assert best == pytest.approx(results.top(1)[0].values["score"])


def test_without_ray_there_is_no_endpoint(tmp_path, monkeypatch):
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.setattr(ray_metrics, "Metrics", None)  # would raise
    assert campaign(tmp_path, executor=Local()).run().top(1)
