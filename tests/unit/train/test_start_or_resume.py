"""How a run begins or goes on."""

from types import SimpleNamespace

import pytest

from elastix.config import RestoreConfig
from elastix.errors import NotFound
from elastix.train.record.start_or_resume import begin


def test_a_run_with_a_state_and_without_its_journal_is_not_gone_on_with(tmp_path):
    """It trained to the end and was then told that it had samples of an unknown loader."""
    (tmp_path / "journal.jsonl").touch()  # as the new one, which nothing is in yet
    checkpoints = SimpleNamespace(last=lambda: SimpleNamespace(step=8))
    settings = SimpleNamespace(run="digits", directory=tmp_path)
    with pytest.raises(NotFound, match=r"'digits' has a State of step 8 .*journal.jsonl is gone"):
        begin(checkpoints, settings, RestoreConfig())
