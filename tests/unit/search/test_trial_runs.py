"""Campaigns, their trials' runs and runs of users have names that may meet in one store."""

import pytest

import elastix
from elastix.errors import ConfigError
from elastix.events import RunStarted
from elastix.observe.journal import Journal
from elastix.report import sources
from elastix.report.trials import CampaignRecord
from elastix.search.executors.serial import Local
from elastix.search.trial_runs import is_trial, trial_runs
from tests.search_parts import SPACE, noop


def begun(store, name, **more):
    fields = {"seed": 0, "config": {}, "scaling": {}, "versions": {}, **more}
    with Journal(store / "runs" / name / "journal.jsonl") as journal:
        journal.append(RunStarted(name=name, **fields))


def campaign(store, name, **more):
    options = {"executor": Local(), **more}
    return elastix.Campaign(
        noop,
        space=SPACE,
        metric="score",
        budget=elastix.Budget(trials=1),
        run=elastix.RunConfig(name=name, store=str(store)),
        quiet=True,
        **options,
    )


def files(store):
    return sorted(path for path in store.rglob("*") if path.is_file() and path.suffix != ".lock")


def test_trials_are_told_from_runs_of_their_name(tmp_path):
    begun(tmp_path, "a-00001", order_seed=3)
    begun(tmp_path, "a-00002")
    begun(tmp_path, "a-b-00001", order_seed=3)
    begun(tmp_path, "a-1", order_seed=3)
    assert trial_runs(tmp_path, "a") == ["a-00001"]
    assert not is_trial(tmp_path, "a-00007")
    (tmp_path / "runs/a-00002/journal.jsonl").write_bytes(b"damaged\n\n")
    assert not is_trial(tmp_path, "a-00002")


def test_a_campaign_has_no_name_of_a_run(tmp_path):
    begun(tmp_path, "a")
    before = files(tmp_path)
    with pytest.raises(ConfigError, match="'a' is a run of this store"):
        campaign(tmp_path, "a").run()
    assert files(tmp_path) == before


def test_a_run_has_no_name_of_a_campaign(tmp_path):
    campaign(tmp_path, "a").run()
    before = files(tmp_path)
    with pytest.raises(ConfigError, match="'a' is a campaign of this store"):
        elastix.ElasticTrainer(noop, run=elastix.RunConfig(name="a", store=str(tmp_path))).fit()
    assert files(tmp_path) == before


@pytest.mark.parametrize("order_seed", [None, 0], ids=["of a user", "of a removed campaign"])
def test_no_trial_goes_on_from_a_run_that_was_there_before_its_campaign(tmp_path, order_seed):
    begun(tmp_path, "a-00001", order_seed=order_seed)
    groups = {"executor": None, "scaling": elastix.ScalingConfig(num_workers=2)}
    with pytest.raises(ConfigError, match="has the run 'a-00001'"):
        campaign(tmp_path, "a", **groups).run()
    assert len(campaign(tmp_path, "a").run().trials) == 1  # of one worker each: no runs


def test_pages_link_a_trial_with_its_campaign_and_no_run_of_that_name(tmp_path):
    campaign(tmp_path, "a").run()
    record = sources.campaign_record(tmp_path, "a", [])
    assert isinstance(record, CampaignRecord)
    begun(tmp_path, "a-00000")
    assert sources.campaign(tmp_path, "a-00000") == sources.winner(tmp_path, record) == []
    (tmp_path / "runs/a-00000/journal.jsonl").unlink()
    begun(tmp_path, "a-00000", order_seed=0)
    assert sources.campaign(tmp_path, "a-00000") == [("campaign a", "a")]
    assert sources.winner(tmp_path, record) == [("best trial: a-00000", "a-00000")]
