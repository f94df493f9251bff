"""Files that run when they are read are written for their user alone, and through no link."""

import os
import resource

import pytest

import elastix
from elastix.errors import Full, StoreError
from elastix.search.executors import campaign_file
from elastix.train.record.pickled_function import digest, keep_code, read_code


def test_nobody_else_may_read_or_change_code(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "campaign.pkl").symlink_to(victim)
    before = os.umask(0)
    try:
        keep_code(tmp_path / "train.pkl", b"code")
        campaign_file.keep(campaign_file.pickled(elastix.Budget(trials=1)), tmp_path)
    finally:
        os.umask(before)
    files = {path.name: path.lstat().st_mode & 0o777 for path in tmp_path.glob("*.pkl")}
    assert files == {"train.pkl": 0o600, "campaign.pkl": 0o600}
    assert (tmp_path / "train.pkl").read_bytes() == b"code"
    assert campaign_file.read(tmp_path) == elastix.Budget(trials=1)
    assert victim.read_text() == "precious"
    assert {path.name for path in tmp_path.iterdir()} == {"victim", *files}


def test_code_that_somebody_else_wrote_is_not_run(tmp_path):
    path = tmp_path / "train.pkl"
    keep_code(path, b"code")
    assert read_code(path, digest(b"code")) == b"code"
    path.write_bytes(b"worse")
    with pytest.raises(StoreError, match=r"Nothing of it was run\. Call fit\(\) again"):
        read_code(path, digest(b"code"))
    path.unlink()
    with pytest.raises(StoreError, match=r"cannot be read.*Nothing was started"):
        read_code(path, digest(b"code"))


def test_code_that_cannot_be_written_is_a_full_store_and_leaves_what_was_there(tmp_path):
    path = tmp_path / "train.pkl"
    keep_code(path, b"code")
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limit[1]))
    try:
        with pytest.raises(Full, match=r"train\.pkl cannot be written.*Nothing was started"):
            keep_code(path, b"x" * 1000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert path.read_bytes() == b"code"
    assert [each.name for each in tmp_path.iterdir()] == ["train.pkl"]
    with pytest.raises(StoreError, match=r"none/train\.pkl cannot be written"):
        keep_code(tmp_path / "none" / "train.pkl", b"code")


def test_a_detached_run_with_a_large_config_is_refused_before_ray_is_started(tmp_path):
    def make(detached):
        return elastix.ElasticTrainer(
            lambda _ctx: None,
            config={"table": "x" * 200_000},
            run=elastix.RunConfig(store=str(tmp_path), detached=detached),
        )

    with pytest.raises(elastix.ConfigError, match=r"config takes 200,.*Nothing was started"):
        make(detached=True).fit()
    assert not list(tmp_path.iterdir())
    make(detached=False)._check_size()
