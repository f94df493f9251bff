"""A Hugging Face model, unchanged: trained on one text, then fine-tuned on another from the store.

GPT-2 of a configuration of its own, with random weights, so that nothing is downloaded; the texts
are source files of Python's standard library, read as bytes. The second run begins with what the
first one has stored. `python examples/finetune_huggingface.py`; needs transformers; under a minute
on two cores.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import ray
import torch
from torch.utils.data import TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel

import elastix

LENGTH = 64  # bytes in a sample
LIBRARY = Path(os.__file__).parent


def texts(name: str) -> tuple[TensorDataset, TensorDataset]:
    """The source of a module in pieces of LENGTH bytes: nine tenths to train, the rest to test."""
    raw = torch.tensor(list((LIBRARY / f"{name}.py").read_bytes()[: 600 * LENGTH]))
    pieces = raw[: len(raw) // LENGTH * LENGTH].view(-1, LENGTH)
    cut = len(pieces) * 9 // 10
    return TensorDataset(pieces[:cut]), TensorDataset(pieces[cut:])


def loss(model: torch.nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    """Nats per byte."""
    found: torch.Tensor = model(input_ids=batch[0], labels=batch[0]).loss
    return found


def train(ctx: elastix.Context) -> None:
    """The loop for both runs; `start` names the stored model to begin with."""
    training, validation = texts(ctx.config["text"])
    shape = GPT2Config(vocab_size=256, n_positions=LENGTH, n_embd=64, n_layer=2, n_head=4)
    model = GPT2LMHeadModel(shape)
    if ctx.config["start"]:
        with elastix.Store(ctx.config["store"], read_only=True) as store:
            model.load_state_dict(store.get(ctx.config["start"]).model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=ctx.config["lr"])
    model, optimizer = ctx.prepare(model, optimizer)
    ctx.report(loss=ctx.evaluate(loss, validation, batch_size=60)["loss"])
    for epoch in ctx.loader(training, batch_size=30).epochs(ctx.config["epochs"]):
        for (pieces,) in epoch:
            optimizer.zero_grad()
            loss(model, [pieces]).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        ctx.report(loss=ctx.evaluate(loss, validation, batch_size=60)["loss"])


def main() -> int:
    """Train, fine-tune, and compare with where each began."""
    ray.init(log_to_driver=False)
    store = tempfile.mkdtemp(prefix="elastix-")

    def fit(name: str, text: str, start: str = "", lr: float = 3e-3, epochs: int = 3) -> float:
        result = elastix.ElasticTrainer(
            train,
            config={"text": text, "start": start, "store": store, "lr": lr, "epochs": epochs},
            scaling=elastix.ScalingConfig(num_workers=(1, 2), cpus_per_worker=0.5),
            run=elastix.RunConfig(name=name, store=store),
        ).fit()
        return float(result.metrics["loss"])

    first = fit("pretrained", "argparse")
    scratch = fit("from-scratch", "optparse", epochs=1)
    tuned = fit("fine-tuned", "optparse", start="pretrained/final", lr=1e-3, epochs=1)
    print(f"\nargparse.py      {first:.2f} nats a byte after three epochs")
    print(f"optparse.py      {scratch:.2f} after one epoch from random weights")
    print(f"                 {tuned:.2f} after one epoch from what argparse.py has taught")
    return 0 if tuned < scratch else 1


if __name__ == "__main__":
    lines = argparse.RawDescriptionHelpFormatter
    argparse.ArgumentParser(description=__doc__, formatter_class=lines).parse_args()
    sys.exit(main())
