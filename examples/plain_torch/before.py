"""Plain torch: classify scikit-learn's digits. `python examples/plain_torch/before.py`."""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils import data


def train():
    pixels, digits = load_digits(return_X_y=True)
    x, y = torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(digits)
    training = data.TensorDataset(x[:1500], y[:1500])
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = data.DataLoader(training, batch_size=60, shuffle=True)
    for _ in range(10):
        for images, labels in loader:
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    accuracy = (model(x[1500:]).argmax(1) == y[1500:]).float().mean().item()
    print(f"test accuracy {accuracy:.3f}")


train()
