"""What benchmarks.rehearsal measures in a group is what it says."""

import pytest

from benchmarks.rehearsal import groups


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_whoever_is_killed_is_replaced():
    found = groups("digits", 1, "index")
    assert {name: (found[name]["killed"], found[name]["joined"]) for name in ("1", "4")} == {
        "1": (0, 0),
        "4": (0, 0),
    }
    fire = found["4_under_fire"]
    assert (fire["killed"], fire["joined"], fire["samples_exact"]) == (3, 3, True)
    assert fire["furthest_from_replay"] <= 1e-9
