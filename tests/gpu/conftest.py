"""What one GPU can show. Without one all of it is skipped, and says so."""

from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items):
    skip = pytest.mark.skip(reason="no CUDA device is here; `make gpu` runs it where there is one")
    absent = not torch.cuda.is_available()
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if absent:
                item.add_marker(skip)
