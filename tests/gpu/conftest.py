"""Every test of this folder needs a GPU."""

from __future__ import annotations

import pytest
import torch

_NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker(pytest.mark.gpu)
    item.add_marker(_NEEDS_GPU)
