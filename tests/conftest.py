"""What every test starts from."""

import random

import numpy as np
import pytest
import torch


@pytest.fixture(autouse=True)
def same_random_numbers() -> None:
    """A test draws the same numbers alone, in any order, and in a process of its own."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
