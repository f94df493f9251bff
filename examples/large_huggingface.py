"""A Hugging Face model sharded with FSDP2 over two processes; one is killed in a backward pass.

A Llama of a configuration of its own, with random weights, so that nothing is downloaded. It is
wrapped by `fully_shard`, as in any script with FSDP2. Two workers of two processes each train it;
one process gets SIGKILL. What comes out is one ordinary model: it has the weights that a single
process has which is fed the same batches, and transformers loads it.

Run it with `python examples/large_huggingface.py`; needs transformers. Under a minute on two cores.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path
from signal import SIGKILL

os.environ["HF_HUB_OFFLINE"] = "1"

import ray
import torch
from torch.distributed.fsdp import fully_shard
from torch.utils.data import TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM

import elastix
from elastix.events import WorkerLost, WorkerStarted
from elastix.testing.replay import compare

LENGTH = 32  # bytes in a sample
KILL = (1, 1, 3)  # worker, place, steps taken


def texts() -> TensorDataset:
    """A source file of Python's standard library, in pieces."""
    raw = torch.tensor(list(Path(tempfile.__file__).read_bytes()[: 300 * LENGTH]))
    return TensorDataset(raw.view(300, LENGTH))


def build() -> LlamaForCausalLM:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "max_position_embeddings": LENGTH}
    layers = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes, **layers))


def loss(model: torch.nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    """Nats per byte."""
    found: torch.Tensor = model(input_ids=batch[0], labels=batch[0]).loss
    return found


def die(ctx: elastix.Context) -> None:
    """SIGKILL, for one process, once."""
    if (ctx.worker, ctx.place, ctx.step) == KILL:
        os.kill(os.getpid(), SIGKILL)


def train(ctx: elastix.Context) -> None:
    """The loop of any script; the mesh is that of one worker."""
    data, model = texts(), build().double()  # norms of a Llama compute in float32 all the same
    if ctx.mesh is not None:  # None if a worker is one process, as in the replay
        model.model.layers[1].register_full_backward_hook(lambda *_: die(ctx))
        for layer in model.model.layers:
            fully_shard(layer, mesh=ctx.mesh["shard"])
        fully_shard(model, mesh=ctx.mesh["shard"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer = ctx.prepare(model, optimizer)
    for epoch in ctx.loader(data, batch_size=50).epochs(2):
        for batch in epoch:
            loss(model, batch).backward()
            ctx.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        ctx.report(**ctx.evaluate(loss, data, batch_size=100))


def main() -> int:
    """Train, replay the run in one process, and load the model as any other."""
    ray.init(log_to_driver=False)
    result = elastix.ElasticTrainer(
        train,
        scaling=elastix.ScalingConfig(num_workers=2, crew={"shard": 2}, cpus_per_worker=0.5),
        run=elastix.RunConfig(name="llama", store=tempfile.mkdtemp(prefix="elastix-")),
    ).fit()
    replayed = compare(result.directory)
    model = build().double()
    model.load_state_dict(result.load().model)
    with torch.no_grad():
        again = float(loss(model, [texts().tensors[0]]))

    lost = [event.worker for event in result.events if isinstance(event, WorkerLost)]
    started = [event for event in result.events if isinstance(event, WorkerStarted)]
    pids = [{event.pid, *(pid for _, pid in event.mates)} for event in started]
    stayed = len(set.union(*pids[:2]) & pids[-1])
    print(f"\nlost      workers {lost}; a new one is {stayed} of their processes and a fresh one")
    print(f"replay    one process, without a mesh: {replayed}")
    print(f"loss      {result.metrics['loss']:.6f} by workers; {again:.6f} by transformers alone")
    fine = result.audit.exact and KILL[0] in lost and replayed.relative < 1e-4
    return 0 if fine and abs(again - result.metrics["loss"]) < 1e-6 else 1


if __name__ == "__main__":
    lines = argparse.RawDescriptionHelpFormatter
    argparse.ArgumentParser(description=__doc__, formatter_class=lines).parse_args()
    sys.exit(main())
