"""A run, or a campaign, on a cluster of two nodes, one of which does not stay.

python -m tests.integration.nodes KIND STORE, of these kinds:

- drained: the second node comes late, and is drained before it is taken away.
- removed: the second node is taken away without a word in the middle of training.
- killed: the daemon of a node is killed, and all workers there with it. Ray takes some
  seconds to find that out. The other node has room for those who stand in. What the metrics
  endpoint shows at the end is in STORE/metrics.
- aws, azure: the cloud says of one of two nodes that it is to go. The other one has room for those
  who stand in. Then the node goes.
- gcp: as aws, but there is no room elsewhere.
- submitted: no cluster is started; the run is on the one that a job belongs to, until somebody
  makes STORE/over. The node of the driver is in STORE/here; what it failed of, in STORE/failed;
  what the metrics endpoint shows after a loss in STORE/metrics.
- beside: a worker on the second node is killed beside another one. Ray does not hear of it: its
  daemon there is stopped, and a process that the worker has forked keeps its connections open.
- edited: a second node comes, whose elastix has other code.
- edited-campaign, edited-groups: likewise, in the middle of a campaign, whose trials are of one
  worker, or groups. STORE/elsewhere is made by a trial that runs there, STORE/refused by each
  process that has said which code it has.
- older-campaign: likewise, and workers there are asked for something that they do not know.
- crews: as removed, with workers of two processes; then a node comes in its stead.
- host, host-groups: a second node comes in the middle of a campaign, and it is on another host, as
  far as a store can tell. Trials are of one worker, or groups.
- campaign: a node is taken away in the middle of a campaign, whose trials are groups of up to two
  workers.
"""

import contextlib
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil
import ray
from ray.cluster_utils import Cluster
from ray.core.generated import autoscaler_pb2

import elastix
from elastix.events import (
    Event,
    StepCommitted,
    TrialEnded,
    WorkerJoined,
    WorkerLeft,
    WorkerLost,
    WorkerNotStarted,
    WorkerStarted,
)
from elastix.observe import journal
from elastix.store import owner
from tests import crew_runs, observed, search_parts, trainables
from tests.fake_metadata import Aws, Azure, Fake, Gcp

ROOT = Path(__file__).resolve().parents[2]
LOST = "ray_elastix_workers_lost_total{"
TRIAL_STEPS = 600
"""Of a trial of the campaign, some seconds; three are an epoch."""
EDIT = """
_as_it_was = installation
def installation():
    with Path({!r}).open("a") as file:
        file.write("said ")
    return _as_it_was()
"""
"""Of the code on another node."""


def await_event(path: Path, wanted) -> Event:
    """The first event that `wanted` says yes to; it may still be written.

    Raises:
        RuntimeError: the job that writes them has failed, with its traceback.
    """
    failed = path.parents[2] / "failed"
    while True:
        if failed.exists():
            raise RuntimeError(failed.read_text())
        if path.exists():
            for event in journal.read(path):
                if wanted(event):
                    return event
        time.sleep(0.1)


def come_and_drain(cluster: Cluster, path: Path, over: Path) -> None:
    await_event(path, lambda event: isinstance(event, StepCommitted) and event.step > 5)
    node = cluster.add_node(num_cpus=1)
    await_event(path, lambda event: isinstance(event, WorkerJoined))
    ray._private.worker.global_worker.gcs_client.drain_node(
        node.node_id,
        autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION"),
        "the test wants it back",
        int(time.time() * 1000) + 120_000,
    )
    await_event(path, lambda event: isinstance(event, WorkerLeft))
    cluster.remove_node(node)
    over.touch()


def remove(cluster: Cluster, path: Path, over: Path) -> None:
    await_event(path, lambda event: isinstance(event, StepCommitted) and event.step > 20)
    cluster.remove_node(cluster.worker_nodes.copy().pop(), allow_graceful=False)
    lost = await_event(path, lambda event: isinstance(event, WorkerLost))
    await_event(path, lambda e: isinstance(e, StepCommitted) and e.t > lost.t and e.world_size == 1)
    over.touch()


def kill_daemon(cluster: Cluster, path: Path, over: Path) -> None:
    here = ray.get_runtime_context().get_node_id()
    node = next(node for node in cluster.list_all_nodes() if node.node_id != here)
    await_event(path, lambda event: isinstance(event, StepCommitted) and event.step > 5)
    daemon = node.all_processes["raylet"][0].process
    daemon.kill()
    daemon.wait()  # or it would be a zombie, which its workers take for alive
    lost = await_event(path, lambda event: isinstance(event, WorkerLost))
    await_event(path, lambda e: isinstance(e, StepCommitted) and e.t > lost.t and e.world_size == 4)
    seen = await_metrics(here, lambda text: "elastix_workers_lost_total" in text)
    (over.parent / "metrics").write_text(seen)
    over.touch()


def give_notice(fake: Fake, size: int, cluster: Cluster, path: Path, over: Path) -> None:
    """Of the second node; then the group is to have so many workers."""
    here = ray.get_runtime_context().get_node_id()
    (node,) = (node for node in cluster.list_all_nodes() if node.node_id != here)
    await_event(path, lambda event: isinstance(event, StepCommitted) and event.world_size == 4)
    while not {here, node.node_id} <= fake.askers:
        time.sleep(0.1)
    fake.only = node.node_id
    match fake:
        case Aws():
            fake.action = {"action": "terminate", "time": "2030-01-01T00:00:00Z"}
        case Azure():
            fake.events = [fake.event("Preempt", fake.name)]
        case Gcp():
            fake.preempted = "TRUE"
    left = await_event(path, lambda event: isinstance(event, WorkerLeft))
    small = await_event(
        path, lambda e: isinstance(e, StepCommitted) and e.t > left.t and e.world_size == 2
    )
    await_event(
        path, lambda e: isinstance(e, StepCommitted) and e.t > small.t and e.world_size == size
    )
    cluster.remove_node(node)
    gone = time.time()
    await_event(path, lambda event: isinstance(event, StepCommitted) and event.t > gone)
    over.touch()


def node_of(cluster: Cluster, port: int) -> str:
    """On which node the process is that has this port."""
    for node in list(cluster.list_all_nodes()):
        daemon = psutil.Process(node.all_processes["raylet"][0].process.pid)
        for process in daemon.children():
            with contextlib.suppress(psutil.Error):  # it has ended
                if any(line.laddr.port == port for line in process.net_connections("tcp")):
                    return str(node.node_id)
    return ""


def await_metrics(node: str, wanted: Callable[[str], bool]) -> str:
    """What the endpoint of a node shows, as soon as `wanted` says yes to it."""
    head = next(found for found in ray.nodes() if found["NodeID"] == node)
    token = os.environ.get("RAY_AUTH_TOKEN")
    token = token or (Path.home() / ".ray" / "auth_token").read_text().strip()
    while True:
        with contextlib.suppress(OSError):  # the agent is starting
            url = f"http://{head['NodeManagerAddress']}:{head['MetricsExportPort']}/metrics"
            text = observed.get(url, token)
            if wanted(text):
                return text
        time.sleep(0.2)


def losses(text: str) -> float:
    """How many workers are lost, as the metrics endpoint shows it."""
    lines = [line for line in text.splitlines() if line.startswith(LOST)]
    return sum(float(line.split()[-1]) for line in lines)


def keep_metrics(here: str, store: Path) -> None:
    """STORE/metrics: what is shown when all losses so far are, with the group at full strength."""
    path = store / "runs" / "nodes" / "journal.jsonl"
    lost = await_event(path, lambda event: isinstance(event, WorkerLost))
    await_event(path, lambda e: isinstance(e, StepCommitted) and e.t > lost.t and e.world_size == 4)
    count = sum(isinstance(event, WorkerLost) for event in journal.read(path))
    seen = await_metrics(here, lambda text: losses(text) >= count)
    (store / "metrics.part").write_text(seen)
    (store / "metrics.part").rename(store / "metrics")


def kill_beside(cluster: Cluster, path: Path, over: Path) -> None:
    node = cluster.worker_nodes.copy().pop()
    await_event(path, lambda event: isinstance(event, StepCommitted) and event.step > 5)
    events = [event for event in journal.read(path) if isinstance(event, WorkerStarted)]
    there = [event for event in events if event.node == node.node_id]
    daemon = node.all_processes["raylet"][0].process.pid
    os.kill(daemon, signal.SIGSTOP)
    try:
        os.kill(there[-1].pid, signal.SIGKILL)
        await_event(path, lambda event: isinstance(event, WorkerLost))
        assert all(found["Alive"] for found in ray.nodes()), "Ray gave up the whole node"
    finally:
        os.kill(daemon, signal.SIGCONT)
    over.touch()


def come_with_other_code(cluster: Cluster, path: Path, over: Path) -> None:
    await_event(path, lambda event: isinstance(event, StepCommitted) and event.step > 5)
    add_edited_node(cluster, over.with_name("edited"))
    refused = await_event(path, lambda event: isinstance(event, WorkerNotStarted))
    await_event(path, lambda event: isinstance(event, StepCommitted) and event.t > refused.t + 3)
    over.touch()


def come_with_other_code_to_campaign(
    cluster: Cluster, path: Path, over: Path, older: bool = False
) -> None:
    await_event(path, lambda event: isinstance(event, TrialEnded))
    add_edited_node(cluster, over.with_name("edited"), older)


def add_edited_node(cluster: Cluster, there: Path, older: bool = False) -> None:
    """Ray puts the driver's directories first where a worker looks for modules."""
    shutil.copytree(Path(elastix.__file__).parent, there / "elastix")
    if older:
        worker = there / "elastix" / "search" / "executors" / "pool_worker.py"
        code = worker.read_text()
        assert code.count("def hello(self)") == 2
        worker.write_text(code.replace("def hello(self)", "def hello(self, driver: object)"))
    with (there / "elastix" / "train" / "record" / "provenance.py").open("a") as provenance:
        provenance.write(EDIT.format(str(there.with_name("refused"))))
    (there / "sitecustomize.py").write_text(
        f"import sys\nsys.path.insert(0, {str(there)!r})\nimport elastix\ndel sys.path[0]\n"
    )
    cluster.add_node(num_cpus=2, env_vars={"PYTHONPATH": f"{there}:{ROOT}"})


def remove_and_come(cluster: Cluster, path: Path, over: Path) -> None:
    await_event(path, lambda event: isinstance(event, StepCommitted) and event.step > 5)
    cluster.remove_node(cluster.worker_nodes.copy().pop(), allow_graceful=False)
    lost = await_event(path, lambda event: isinstance(event, WorkerLost))
    await_event(path, lambda e: isinstance(e, StepCommitted) and e.t > lost.t and e.world_size == 1)
    cluster.add_node(num_cpus=1)
    await_event(path, lambda event: isinstance(event, WorkerJoined))
    over.touch()


def remove_from_campaign(cluster: Cluster, path: Path, _over: Path) -> None:
    await_event(path, lambda event: isinstance(event, TrialEnded) and event.trial >= 1)
    node = cluster.worker_nodes.copy().pop()
    while not any(trains_on(node.node_id, run) for run in path.parents[1].glob("nodes-*")):
        time.sleep(0.05)
    cluster.remove_node(node, allow_graceful=False)


def trains_on(node: str, run: Path) -> bool:
    """Whether a worker of that node is in the middle of the run."""
    if not (run / "journal.jsonl").exists():
        return False
    events = list(journal.read(run / "journal.jsonl"))
    here = any(isinstance(event, WorkerStarted) and event.node == node for event in events)
    steps = sum(isinstance(event, StepCommitted) for event in events)
    return here and 0 < steps < TRIAL_STEPS // 2


def train(
    store: str,
    forks: bool = False,
    workers: int = 3,
    cpus: float = 1.0,
    failure: elastix.FailureConfig | None = None,
) -> None:
    elastix.ElasticTrainer(
        until_over,
        config={"over": str(Path(store) / "over"), "forks": forks},
        scaling=elastix.ScalingConfig(num_workers=(1, workers), cpus_per_worker=cpus),
        run=elastix.RunConfig(name="nodes", store=store),
        failure=failure,
    ).fit()


def train_crews(store: str) -> None:
    # In two hundred steps this training makes 1e-9 of a rounding error, which is what is allowed,
    # and in three hundred anything.
    config = crew_runs.configure(Path(store), samples=60, epochs=10_000, step_s=0.3)
    elastix.ElasticTrainer(
        crew_runs.train,
        config={**config, "over": str(Path(store) / "over")},
        scaling=elastix.ScalingConfig(num_workers=(1, 2), crew={"shard": 2}),
        run=elastix.RunConfig(name="nodes", store=store),
    ).fit()


def search(store: str) -> None:
    elastix.Campaign(
        search_parts.learns,
        space=search_parts.SPACE,
        searcher=search_parts.Drawing(epochs=TRIAL_STEPS // 3),
        metric="accuracy",
        budget=elastix.Budget(trials=8, parallel=2),
        scaling=elastix.ScalingConfig(num_workers=(1, 2), cpus_per_worker=0.5),
        run=elastix.RunConfig(name="nodes", store=store),
    ).run()


def come_on_another_host(cluster: Cluster, path: Path, _over: Path) -> None:
    await_event(path, lambda event: isinstance(event, TrialEnded))
    boot = path.with_name("boot_id")
    boot.write_text("another machine")
    cluster.add_node(num_cpus=1, env_vars={"BOOT_ID": str(boot)})


def learn_on_any_host(ctx: elastix.Context) -> None:
    """After the first trial those of the first host wait until one is on the other."""
    marks = Path(ctx.config["marks"])
    boot = os.environ.get("BOOT_ID")
    if boot:
        owner._BOOT = Path(boot)
        (marks / "elsewhere").touch()
    elif (marks / "first").exists():
        while not (marks / "elsewhere").exists():
            time.sleep(0.05)
    search_parts.learns(ctx)
    (marks / "first").touch()


def search_on_hosts(store: str, workers: int = 1) -> None:
    elastix.Campaign(
        learn_on_any_host,
        space=search_parts.SPACE,
        searcher=search_parts.Drawing(marks=store),
        metric="accuracy",
        budget=elastix.Budget(trials=6),
        scaling=elastix.ScalingConfig(num_workers=workers, cpus_per_worker=1 / workers),
        run=elastix.RunConfig(name="nodes", store=store),
    ).run()


def tell_where_it_runs(ctx: elastix.Context) -> None:
    wait_for_the_other_node(ctx)
    ctx.report(accuracy=1.0)
    Path(ctx.config["marks"], "first").touch()


def train_and_tell_where(ctx: elastix.Context) -> None:
    wait_for_the_other_node(ctx)
    search_parts.learns(ctx)
    Path(ctx.config["marks"], "first").touch()


def wait_for_the_other_node(ctx: elastix.Context) -> None:
    """After the first all wait until somebody was there, and could have come again."""
    marks = Path(ctx.config["marks"])
    refused = marks / "refused"
    if (marks / "edited") in Path(elastix.__file__).parents:
        (marks / "elsewhere").touch()
    while (marks / "first").exists() and not (marks / "elsewhere").exists():
        told = refused.read_text().split() if refused.exists() else []
        if len(told) > 2 or (told and time.time() > refused.stat().st_mtime + 15):
            break
        time.sleep(0.05)


def search_where_code_is_the_same(store: str, workers: int = 1) -> None:
    elastix.Campaign(
        tell_where_it_runs if workers == 1 else train_and_tell_where,
        space=search_parts.SPACE,
        searcher=search_parts.Drawing(marks=store),
        metric="accuracy",
        budget=elastix.Budget(trials=6, parallel=3),
        scaling=elastix.ScalingConfig(num_workers=(1, workers)),
        run=elastix.RunConfig(name="nodes", store=store),
    ).run()


KINDS = {
    "drained": (0, train, come_and_drain),
    "removed": (1, train, remove),
    "killed": (1, partial(train, workers=4, cpus=0.5), kill_daemon),
    "beside": (1, partial(train, forks=True), kill_beside),
    "edited": (0, train, come_with_other_code),
    "edited-campaign": (0, search_where_code_is_the_same, come_with_other_code_to_campaign),
    "edited-groups": (
        0,
        partial(search_where_code_is_the_same, workers=2),
        come_with_other_code_to_campaign,
    ),
    "older-campaign": (
        0,
        search_where_code_is_the_same,
        partial(come_with_other_code_to_campaign, older=True),
    ),
    "crews": (1, train_crews, remove_and_come),
    "campaign": (1, search, remove_from_campaign),
    "host": (0, search_on_hosts, come_on_another_host),
    "host-groups": (0, partial(search_on_hosts, workers=2), come_on_another_host),
}
"""How many nodes there are besides the first; what runs; what happens to them."""

CPUS = {"beside": (1, 2), "killed": (2, 2), "aws": (2, 2), "azure": (2, 2), "gcp": (1, 2)}
"""Of the first node and of each other, if it is more than one."""


def main(kind: str, store: str) -> None:
    if kind == "submitted":
        ray.init(log_to_driver=False)
        here = ray.get_runtime_context().get_node_id()
        (Path(store) / "here").write_text(here)
        threading.Thread(target=keep_metrics, args=(here, Path(store)), daemon=True).start()
        try:
            train(store, workers=4, cpus=0.5)
        except BaseException:
            (Path(store) / "failed").write_text(traceback.format_exc())
            raise
        return
    fakes = {"aws": Aws, "azure": partial(Azure, name="vm-2"), "gcp": Gcp}
    if kind in fakes:
        fake = fakes[kind]().__enter__()  # as long as this process
        failure = elastix.FailureConfig(notices=kind, notices_address=fake.address)
        others, work = 1, partial(train, workers=4, cpus=0.5, failure=failure)
        happens = partial(give_notice, fake, 2 if kind == "gcp" else 4)
    else:
        others, work, happens = KINDS[kind]
    first, other = CPUS.get(kind, (1, 1))
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": first})
    for _ in range(others):
        cluster.add_node(num_cpus=other)
    ray.init(address=cluster.address, log_to_driver=False)
    if kind in fakes:
        fake.node_of = partial(node_of, cluster)
    path = Path(store) / "runs" / "nodes" / "journal.jsonl"
    run = threading.Thread(target=work, args=(store,), daemon=True)
    run.start()
    happens(cluster, path, Path(store) / "over")  # Ray starts nodes from the main thread alone
    run.join()
    ray.shutdown()
    cluster.shutdown()


def until_over(ctx: elastix.Context) -> None:
    """As trainables.train, until the nodes have come and gone."""
    import torch.nn.functional as F

    over_file = Path(ctx.config["over"])
    if ctx.config["forks"] and not os.fork():
        while not over_file.exists():
            time.sleep(0.1)
        os._exit(0)
    model, optimizer, dataset = trainables.make({})
    model, optimizer = ctx.prepare(model, optimizer)
    loader = ctx.loader(dataset, batch_size=30)
    for epoch in loader.epochs(10_000):
        for x, y in epoch:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            time.sleep(0.05)
        over = ctx.evaluate(lambda m, b: float(over_file.exists()), dataset, batch_size=300)
        if any(value > 0 for value in over.values()):
            return


if __name__ == "__main__":
    main(*sys.argv[1:])
