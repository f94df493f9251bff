"""How much memory there is for trials: what the host has, and every control group above them."""

import pytest

from elastix.search.executors import trial_memory

MIB = 1 << 20


@pytest.fixture
def groups(tmp_path, monkeypatch):
    """A function that makes a control group; this process is in job/step/task."""
    monkeypatch.setattr(trial_memory, "_GROUPS", tmp_path / "groups")
    monkeypatch.setattr(trial_memory, "_MEMBERSHIP", tmp_path / "cgroup")
    (tmp_path / "cgroup").write_text("1:name=systemd:/\n0::/job/step/task\n")
    (tmp_path / "groups" / "job" / "step" / "task").mkdir(parents=True)

    def limit(name, most, held, files=0, killed=0):
        group = tmp_path / "groups" / name
        (group / "memory.max").write_text(f"{most}\n")
        (group / "memory.current").write_text(f"{held}\n")
        (group / "memory.stat").write_text(f"anon 1\ninactive_file {files}\n")
        (group / "memory.events").write_text(f"max 3\noom 5\noom_kill {killed}\n")

    return limit


@pytest.mark.parametrize("name", [".", "job", "job/step", "job/step/task"])
def test_a_limit_counts_wherever_it_is_set(groups, name):
    groups("job/step/task", "max", MIB)
    groups(name, 30 * MIB, held=12 * MIB, files=2 * MIB)
    assert trial_memory.free() == int(0.95 * 20 * MIB)


def test_the_narrowest_limit_counts(groups):
    groups("job", 30 * MIB, held=25 * MIB)
    groups("job/step", 20 * MIB, held=10 * MIB)
    assert trial_memory.free() == int(0.95 * 5 * MIB)


def test_kills_are_those_of_the_innermost_group_that_counts_them(groups):
    groups("job", 30 * MIB, held=MIB, killed=7)
    groups("job/step", "max", MIB, killed=2)
    assert trial_memory.kills() == 2


def test_without_control_groups_the_host_is_asked(groups):
    assert trial_memory.free() > 100 * MIB
    assert trial_memory.kills() == trial_memory._field(
        trial_memory.Path("/proc/vmstat"), "oom_kill"
    )
