"""Files that run when they are read are written for their user alone, and through no link."""

import os

import elastix
from elastix.search.executors import recipe
from elastix.train.on_ray.trainer import keep_code


def test_nobody_else_may_read_or_change_code(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "campaign.pkl").symlink_to(victim)
    before = os.umask(0)
    try:
        keep_code(tmp_path / "train.pkl", b"code")
        recipe.keep(elastix.Budget(trials=1), tmp_path)
    finally:
        os.umask(before)
    files = {path.name: path.lstat().st_mode & 0o777 for path in tmp_path.glob("*.pkl")}
    assert files == {"train.pkl": 0o600, "campaign.pkl": 0o600}
    assert (tmp_path / "train.pkl").read_bytes() == b"code"
    assert recipe.read(tmp_path) == elastix.Budget(trials=1)
    assert victim.read_text() == "precious"
    assert {path.name for path in tmp_path.iterdir()} == {"victim", *files}
