"""What all tests share."""

import gc

import pytest
import torch

from rlhf_pg.tasks import arithmetic

# One thread: models this small gain nothing from two, and lose much when the cores are shared.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The embedded model with random weights, saved in the standard format."""
    torch.manual_seed(0)
    model, tokenizer = arithmetic().new_model()
    path = tmp_path_factory.mktemp("model")
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


def pytest_collection_finish() -> None:
    """Keep the thousands of tests and modules out of every later search for garbage."""
    gc.collect()
    gc.freeze()
