"""benchmarks.exact: its keys, and counts that are gone on with."""

import json

import pytest

from benchmarks.exact.__main__ import PARTS, Measured, summary
from benchmarks.exact.counting import counted

SPREAD = {"median": 1.0}
COST = {
    **dict.fromkeys(("slices_over_today", "eight_slices_over_plain", "exact_over_slices"), SPREAD),
    "ddp_s": 0.1,
}
COUNTS = {
    **dict.fromkeys(("schedules", "equal", "faults", "found", "corrupt_states"), 1),
    **dict.fromkeys(("state_found", "gradient_found", "culprit_named", "false_alarms"), 1),
    "steps_lost": 0,
}
DETAILS = {
    **dict.fromkeys(PARTS, COUNTS),
    **{part: COST for part in PARTS if part.startswith("cost_")},
    **{part: {"recompilations": 0} for part in PARTS if part.startswith("compiled_")},
    "stall": {"median": 0.1, "max": 0.2, "batch_kept": True},
    "pace": {"over_ideal": 1.1},
    "shares": {"models": {"mlp": {"sentinel": 0.01, "guard": 0.002}}},
    "shadow": {"median": 0.25, "max": 0.5, "idle_ms": 0.125},
    "dcp": {"dcp_async": 20.0},
    "torchft": {"stall_s": {"median": 1.0, "max": 2.0}},
}
KEYS = {
    *("slices_over_today", "eight_slices_over_plain", "exact_over_slices", "stall_s"),
    *("batch_kept", "slow_over_ideal", "sentinel_share", "guard_share", "shadow_stall_ms"),
    *("steps_lost_all_killed", "byte_equal", "flips", "guard", "recompilations", "peers"),
}


def test_all_parts_give_all_keys_and_a_part_its_own():
    whole = summary(DETAILS)
    assert whole.keys() == KEYS
    assert whole["byte_equal"] == {"schedules": 1, "equal": 1}
    flips = {"state_found", "gradient_found", "culprit_named", "false_alarms"}
    assert whole["flips"].keys() == flips
    assert whole["flips"]["false_alarms"] == 2  # those of quiet steps too
    assert whole["shadow_stall_ms"] == 0.125
    assert summary({"pace": {"over_ideal": 1.1}}) == {"slow_over_ideal": 1.1, "peers": {}}


def test_a_file_keeps_the_parts_that_are_not_measured_anew(tmp_path):
    out = tmp_path / "exact.json"
    Measured(out).tell("pace", {"over_ideal": 1.1})
    Measured(out).tell("torchft", None)
    found = json.loads(out.read_text())
    assert found["slow_over_ideal"] == 1.1
    assert found["details"] == {"pace": {"over_ideal": 1.1}, "torchft": None}
    assert list(json.loads((tmp_path / "about.json").read_text())["exact"]["parts"]) == [
        *("pace", "torchft")
    ]


def case(seed, amount):
    return {"runs": 1, "sum": seed + amount, "longest_s": seed}


@pytest.mark.parametrize("stop", [1, 2, 3])
def test_counts_that_are_gone_on_with_are_those_of_one_go(stop):
    """In the middle: after so many runs."""
    told = []
    whole = counted(case, 17, 5, seed=3, tell=told.append)
    assert whole == {"done": 17, "runs": 4, "sum": 3 + 8 + 13 + 18 + 17, "longest_s": 18}
    assert told[-1] == whole
    assert counted(case, 17, 5, seed=3, so_far=told[stop]) == whole


def test_a_second_call_goes_on_where_the_first_was_stopped_and_a_third_begins_anew(tmp_path):
    file, ran = Measured(tmp_path / "exact.json"), []

    def stopped(seed, amount):
        ran.append(seed)
        if len(ran) == 3:
            raise KeyboardInterrupt
        return case(seed, amount)

    with pytest.raises(KeyboardInterrupt):
        file.counted("flips", stopped, 17, 5)
    assert file.counted("flips", stopped, 17, 5) == counted(case, 17, 5)
    assert ran == [0, 5, 10, 10, 15]
    assert file.counted("flips", case, 12, 5) == counted(case, 12, 5)  # as many were not asked for
    file.ended(["flips"])
    assert file.counted("flips", stopped, 5, 5) == counted(case, 5, 5)
    assert ran[5:] == [0]
