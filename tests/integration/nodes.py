"""A run on a cluster whose second node comes late and is taken away early.

python -m tests.integration.nodes STORE
"""

import sys
import threading
import time
from pathlib import Path

import ray
from ray.cluster_utils import Cluster
from ray.core.generated import autoscaler_pb2

import elastix
from elastix.events import Event, StepCommitted, WorkerJoined, WorkerLeft
from elastix.observe import journal
from tests import trainables


def await_event(path: Path, wanted) -> Event:
    """The first event that `wanted` says yes to; it may still be written."""
    while True:
        if path.exists():
            for event in journal.read(path):
                if wanted(event):
                    return event
        time.sleep(0.1)


def nodes(cluster: Cluster, path: Path, over: Path) -> None:
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


def main(store: str) -> None:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    ray.init(address=cluster.address, log_to_driver=False)
    path = Path(store) / "runs" / "nodes" / "journal.jsonl"
    over = Path(store) / "over"
    trainer = elastix.ElasticTrainer(
        until_over,
        config={"over": str(over)},
        scaling=elastix.ScalingConfig(num_workers=(1, 2)),
        run=elastix.RunConfig(name="nodes", store=store),
    )
    run = threading.Thread(target=trainer.fit, daemon=True)
    run.start()
    nodes(cluster, path, over)  # Ray starts nodes from the main thread alone
    run.join()
    ray.shutdown()
    cluster.shutdown()


def until_over(ctx: elastix.Context) -> None:
    """As trainables.train, until the nodes have come and gone."""
    import torch.nn.functional as F

    model, optimizer, dataset = trainables.make({})
    model, optimizer = ctx.prepare(model, optimizer)
    loader = ctx.loader(dataset, batch_size=30)
    for epoch in loader.epochs(10_000):
        for x, y in epoch:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            time.sleep(0.05)
        over = ctx.evaluate(
            lambda m, b: float(Path(ctx.config["over"]).exists()), dataset, batch_size=300
        )
        if any(value > 0 for value in over.values()):
            return


if __name__ == "__main__":
    main(sys.argv[1])
