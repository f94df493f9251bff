"""A store that Ray removes with a job is told of."""

import logging

import elastix
from elastix.search.executors.serial import Local
from elastix.train.on_ray import launch


def score(ctx):
    ctx.report(score=ctx.config["x"])


def campaign(name):
    return elastix.Campaign(
        score,
        space=elastix.Space([elastix.Float("x", (0, 1))]),
        metric="score",
        budget=elastix.Budget(trials=1),
        run=elastix.RunConfig(name=name),
        executor=Local(),
        quiet=True,
    )


def told(caplog):
    messages = [record.getMessage() for record in caplog.records]
    caplog.clear()
    return [message for message in messages if "Ray removes that" in message]


def test_a_store_in_a_jobs_copy_of_the_working_directory_is_warned_of(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(launch.Launch, "fit", lambda self: None)
    caplog.set_level(logging.WARNING)
    copy = tmp_path / "runtime_resources" / "working_dir_files" / "_ray_pkg_0123"
    copy.mkdir(parents=True)
    for directory, number in ((tmp_path, 0), (copy, 1)):
        monkeypatch.chdir(directory)
        elastix.ElasticTrainer(score, run=elastix.RunConfig(name="run")).fit()
        assert len(told(caplog)) == number
        campaign("search").run()
        messages = told(caplog)
        assert len(messages) == number
        assert all(str(directory / "runs" / "store") in message for message in messages)
