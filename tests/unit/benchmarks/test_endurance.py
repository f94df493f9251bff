"""benchmarks.endurance counts whom it has struck."""

import os

import pytest

from benchmarks.endurance import Fire

GONE = {12, 13}


@pytest.fixture
def fire(monkeypatch, tmp_path):
    def send(pid, _number):
        if pid in GONE:
            raise ProcessLookupError

    monkeypatch.setattr(os, "kill", send)
    monkeypatch.setattr(Fire, "_start", lambda fire: None)
    monkeypatch.setattr(Fire, "look", lambda fire: None)
    return Fire(tmp_path, "nowhere", 3, seed=0)


@pytest.mark.parametrize(
    ("kind", "there", "struck"),
    [
        ("kill", {0: 10, 1: 11}, {"kill": 1}),
        ("kill", {0: 10, 2: 12}, {}),
        ("stop", {0: 10, 2: 12}, {}),
        ("leave", {0: 10, 2: 12}, {}),
        ("pair", {0: 10, 1: 11, 4: 14}, {"pair": 1}),
        ("pair", {0: 10, 1: 11, 2: 12}, {"kill": 1}),
        ("pair", {0: 10, 1: 11}, {"kill": 1}),
        ("pair", {0: 10, 2: 12, 3: 13}, {}),
        ("all", {2: 12, 3: 13}, {}),
        ("all", {0: 10, 2: 12}, {"all": 1}),
    ],
)
def test_a_harm_whose_victim_was_gone_does_not_count(fire, kind, there, struck):
    fire._there = there
    fire.strike(kind)
    assert dict(+fire.struck) == struck


def test_a_cut_counts_where_the_worker_came_to_make_it(fire, tmp_path):
    fire._there = {0: 10, 1: 11}
    fire.strike("cut")
    (tmp_path / "cut-1").unlink()
    fire.strike("cut")
    fire.spared()
    assert fire.struck["cut"] == 1
