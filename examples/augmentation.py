"""Few images, and what augmentation makes of them: two runs, alike but for it, and a kill in each.

The random numbers of a sample are a function of its place in the stream, so they are the same with
any number of workers, and a sample that a dead worker had is augmented alike by whoever gets it.
`python examples/augmentation.py`; under a minute on two cores.
"""

import argparse
import sys
import tempfile

import ray
import torch
import torch.nn.functional as F
from numpy.random import Generator
from sklearn.datasets import load_digits
from torch.utils.data import TensorDataset

import elastix
from elastix.testing.chaos import Kill, with_kills
from search_spaces import convnet

Sample = tuple[torch.Tensor, torch.Tensor]


def digits() -> tuple[TensorDataset, TensorDataset]:
    """300 images to learn from, and 1000 to test with: 8 x 8 pixels."""
    data = load_digits()
    x = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    y = torch.tensor(data.target)
    return TensorDataset(x[:300], y[:300]), TensorDataset(x[-1000:], y[-1000:])


def shifted(sample: Sample, rng: Generator) -> Sample:
    """Moved by up to a pixel, turned by up to 15 degrees, and lighter or darker."""
    image, label = sample
    angle = torch.tensor(rng.uniform(-15, 15)).deg2rad()
    right, down = rng.uniform(-0.25, 0.25, 2).tolist()  # of half the image
    turn = torch.tensor([[angle.cos(), -angle.sin(), right], [angle.sin(), angle.cos(), down]])
    grid = F.affine_grid(turn.unsqueeze(0).float(), [1, *image.shape], align_corners=False)
    moved = F.grid_sample(image.unsqueeze(0), grid, align_corners=False).squeeze(0)
    return moved * float(rng.uniform(0.8, 1.2)), label


def accuracy(model: torch.nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    return (model(batch[0]).argmax(1) == batch[1]).float().mean()


def train(ctx: elastix.Context) -> None:
    training, test = digits()
    model = convnet.build(ctx.config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=1e-2)
    rates = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=25 * 5)
    model, optimizer, rates = ctx.prepare(model, optimizer, rates)
    augment = shifted if ctx.config["augment"] else None
    for epoch in ctx.loader(training, batch_size=60, augment=augment).epochs(25):
        for images, labels in epoch:
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()
            rates.step()
    ctx.report(**ctx.evaluate(accuracy, test, batch_size=500))


def main() -> int:
    """Train both, and compare."""
    ray.init(log_to_driver=False)
    store, found = tempfile.mkdtemp(prefix="elastix-"), {}
    for augment in (False, True):
        result = elastix.ElasticTrainer(
            with_kills(train, [Kill(worker=1, phase="bucket", step=20)]),
            config={**convnet.space.get_default_configuration(), "augment": augment},
            scaling=elastix.ScalingConfig(num_workers=(1, 2), cpus_per_worker=0.5),
            run=elastix.RunConfig(name="augmented" if augment else "plain", store=store),
        ).fit()
        if not result.audit.exact or not result.worker_losses:
            return 1
        found[augment] = result.metrics["accuracy"]
    print(f"\n300 images: accuracy {found[False]:.3f} as they are, {found[True]:.3f} augmented")
    return 0


if __name__ == "__main__":
    lines = argparse.RawDescriptionHelpFormatter
    argparse.ArgumentParser(description=__doc__, formatter_class=lines).parse_args()
    sys.exit(main())
