"""What all tests share."""

import gc

import pytest
import torch

from rlhf_pg.boundary.pool import Pool
from rlhf_pg.tasks import arithmetic

# One thread: models this small gain nothing from two, and lose much when the cores are shared.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The embedded model with random weights, of one narrow layer, in the standard format."""
    model, tokenizer = arithmetic().new_model()
    own = {"hidden_size": 32, "intermediate_size": 64, "head_dim": 8, "num_hidden_layers": 1}
    config = type(model.config).from_dict(model.config.to_dict() | own | {"layer_types": None})
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("model")
    type(model)(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


@pytest.fixture(scope="session")
def two_workers() -> Pool:
    return Pool(2)


@pytest.fixture
def warm_workers(two_workers: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every native engine with workers have the same two, whose start takes seconds."""
    monkeypatch.setattr("rlhf_pg.rollout.native.workers.Pool", lambda count: two_workers)


def pytest_collection_finish() -> None:
    """Keep the thousands of tests and modules out of every later search for garbage."""
    gc.collect()
    gc.freeze()
