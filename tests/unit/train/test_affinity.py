"""Which cores a worker is bound to, on machines that are not here."""

import os

import pytest

from elastix.train.on_ray.affinity import bind, choose, gpu_node, numa_nodes, parse_cores

TWO = {0: {0, 1, 2, 3}, 1: {4, 5, 6, 7}}
ALL = range(8)


@pytest.fixture
def machine(tmp_path):
    """The part of /sys that is read: two nodes, a GPU on the second."""
    for node, cores in ((0, "0-1,4"), (1, "2-3")):
        folder = tmp_path / f"devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cores + "\n")
    for address, node in (("0000:3b:00.0", 1), ("0000:af:00.0", -1)):
        folder = tmp_path / "bus/pci/devices" / address
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(f"{node}\n")
    return tmp_path


def test_cores_near_the_gpu():
    assert choose(TWO, ALL, near=1, worker=0) == {4, 5, 6, 7}


def test_workers_without_a_gpu_spread_over_the_nodes():
    assert [choose(TWO, ALL, None, worker) for worker in range(3)] == [TWO[0], TWO[1], TWO[0]]


def test_only_cores_that_the_process_may_use():
    assert choose(TWO, {1, 2, 6}, near=0, worker=0) == {1, 2}
    assert choose(TWO, {1, 6}, near=5, worker=0) == set()


@pytest.mark.parametrize("allowed", [{0, 1}, set()])
def test_one_node_leaves_nothing_to_choose(allowed):
    assert choose(TWO, allowed, near=0, worker=0) == set()
    assert choose({0: {0, 1}}, ALL, None, 3) == set()
    assert choose({}, ALL, None, 0) == set()


@pytest.mark.parametrize(
    ("text", "cores"), [("0-3,8\n", {0, 1, 2, 3, 8}), ("5", {5}), ("\n", set())]
)
def test_the_kernels_lists(text, cores):
    assert parse_cores(text) == cores


def test_the_machine_is_read_from_sys(machine):
    assert numa_nodes(machine) == {0: {0, 1, 4}, 1: {2, 3}}
    assert gpu_node("0000:3b:00.0", machine) == 1
    assert gpu_node("0000:af:00.0", machine) is None
    assert gpu_node("0000:00:00.0", machine) is None
    assert numa_nodes(machine / "nowhere") == {}


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_a_thread_is_really_bound(tmp_path):
    """Each core a node of its own: the calling thread ends up on one of them."""
    before = os.sched_getaffinity(0)
    for node, core in enumerate(sorted(before)):
        folder = tmp_path / f"devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{core}\n")
    try:
        assert bind(1, None, tmp_path) == {sorted(before)[1]} == os.sched_getaffinity(0)
    finally:
        os.sched_setaffinity(0, before)
