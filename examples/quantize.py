"""A trained model as int8: a quarter of the bytes, and its accuracy beside the float one's.

Two workers train a network on scikit-learn's digits. The stored model is exported to ONNX and
quantised: its weights are int8 from then on, and what flows between layers is rounded to int8 as it
comes (dynamic quantisation, so no samples are needed to calibrate it). `python
examples/quantize.py`; needs the extra `onnx`; half a minute on two cores.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ["ORT_LOGGING_LEVEL"] = "3"

import onnxruntime
import torch
import torch.nn.functional as F
from onnxruntime.quantization import QuantType, quantize_dynamic
from sklearn.datasets import load_digits
from torch.utils.data import TensorDataset

import elastix

WORST = 0.02  # of accuracy that int8 may cost here


def digits() -> tuple[TensorDataset, TensorDataset]:
    """1500 to train on, the other 297 to test."""
    images, names = (torch.tensor(part) for part in load_digits(return_X_y=True))
    images = images.float() / 16
    return TensorDataset(images[:1500], names[:1500]), TensorDataset(images[1500:], names[1500:])


def build() -> torch.nn.Module:
    """What is trained, and what `elastix store export` builds."""
    layers = [torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 256)]
    return torch.nn.Sequential(*layers, torch.nn.ReLU(), torch.nn.Linear(256, 10))


def train(ctx: elastix.Context) -> None:
    """Twelve epochs."""
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer = ctx.prepare(model, optimizer)
    for epoch in ctx.loader(digits()[0], batch_size=100).epochs(12):
        for images, names in epoch:
            optimizer.zero_grad()
            F.cross_entropy(model(images), names).backward()
            optimizer.step()


def accuracy(path: Path) -> float:
    """Of an ONNX file on the test images."""
    images, names = digits()[1].tensors
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (scores,) = session.run(None, {session.get_inputs()[0].name: images.numpy()})
    return float((torch.from_numpy(scores).argmax(1) == names).float().mean())


def main() -> int:
    """Train, export, quantise, compare."""
    with tempfile.TemporaryDirectory(prefix="elastix-") as name:
        folder = Path(name)
        elastix.ElasticTrainer(
            train,
            scaling=elastix.ScalingConfig(num_workers=2, cpus_per_worker=0.5),
            run=elastix.RunConfig(name="digits", store=str(folder / "store")),
        ).fit()
        command = [sys.executable, "-m", "elastix", "store", "export", "digits/final", name]
        command += ["--format", "onnx", "--model", f"{__file__}:build", "--shape", "64"]
        subprocess.run([*command, "--store", str(folder / "store")], check=True)
        full, small = folder / "model.onnx", folder / "int8.onnx"
        quantize_dynamic(full, small, weight_type=QuantType.QInt8)
        print(f"\nfloat32  {full.stat().st_size:7,} bytes  accuracy {accuracy(full):.4f}")
        print(f"int8     {small.stat().st_size:7,} bytes  accuracy {accuracy(small):.4f}")
        close = accuracy(full) - accuracy(small) <= WORST and accuracy(full) > 0.85
        return 0 if close and small.stat().st_size < full.stat().st_size / 2 else 1


if __name__ == "__main__":
    lines = argparse.RawDescriptionHelpFormatter
    argparse.ArgumentParser(description=__doc__, formatter_class=lines).parse_args()
    sys.exit(main())
