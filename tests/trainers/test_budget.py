"""`micro_batch_tokens: auto`."""

import math
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

from rlhf_pg import GRPOConfig
from rlhf_pg.config.parse import parse
from rlhf_pg.models import lm_head
from rlhf_pg.run import token_budget
from rlhf_pg.run.token_budget import blueprint, footprint, of_update, probe
from rlhf_pg.trainers.learner import PolicyLearner


def test_auto_token_budget_is_written_to_config(make) -> None:
    trainer = make(max_steps=1)
    found = trainer.learner.token_budget
    assert found == trainer.resolved_args().micro_batch_tokens == token_budget.MOST["cpu"]
    trainer.train()
    path = Path(trainer.args.output_dir) / "config.yaml"
    assert parse(GRPOConfig, ["--config", str(path)]).micro_batch_tokens == found


@pytest.mark.parametrize(("given", "expected"), [("auto", 100), (50, 50)])
def test_resumed_run_keeps_token_budget_unless_given(make, given, expected) -> None:
    with patch.dict(token_budget.MOST, cpu=100):
        first = make(max_steps=1, save_steps=1)
        first.train()
    assert first.learner.token_budget == 100
    second = make(max_steps=2, micro_batch_tokens=given)
    second.train(resume_from_checkpoint=True)
    assert second.learner.token_budget == expected
    assert second.checkpointer.config["micro_batch_tokens"] == expected


def test_auto_token_budget_is_at_least_four_rows(make) -> None:
    with patch.dict(token_budget.MOST, cpu=10):
        assert make().learner.token_budget == 4 * (6 + 6)  # of the prompt and the completion


def measured(make, room: float, **options) -> PolicyLearner:
    """The learner of a model that is measured, in so many bytes."""
    with (
        patch.object(token_budget, "SMALL", 0),
        patch.object(token_budget, "_room", lambda *_: room),
    ):
        learner: PolicyLearner = make(**options).learner
    return learner


def test_auto_token_budget_is_largest_that_fits(make) -> None:
    learner = measured(make, 2e6)
    found, row = learner.token_budget, 12
    assert row < found < token_budget.MOST["cpu"]
    grown = of_update(learner.module, learner.args, 6, learner.runtime.device)
    assert grown.at(found) <= 2e6 < grown.at(found + 1)


def test_logit_chunk_count_follows_device_memory(make) -> None:
    with patch.object(token_budget, "chunk_size_for", lambda memory: 100 if memory is None else 0):
        trainer = make()
    logits = trainer.learner.token_budget * trainer.model.config.vocab_size
    assert trainer.learner.policy.head.chunks == math.ceil(logits / 100)


def test_chunk_size_follows_smallest_gpu() -> None:
    sizes = [80 * 2**30, 40 * 2**30]
    for own in sizes:
        runtime = SimpleNamespace(
            device=torch.device("cuda"),
            all_reduce_max=lambda x: max(x, *(-size // 160 for size in sizes)),
        )
        with patch.object(torch.cuda, "mem_get_info", lambda _, own=own: (0, own)):
            assert token_budget.chunk_size(runtime) == 40 * 2**30 // 160


def test_auto_token_budget_is_at_least_one_row(make) -> None:
    assert measured(make, 0.0).token_budget == 12  # 6 of the prompt and 6 of the completion


def test_model_that_reads_its_weights_computes_one_row_at_a_time(make, caplog) -> None:
    """A model whose forward pass looks at a weight, which without data is an error."""

    def looks(module, *_) -> None:
        assert float(module.weight.detach().sum()) != 0.0

    trainer = make()
    trainer.model.lm_head.register_forward_pre_hook(looks)
    learner = measured(make, 4e6, model=trainer.model)
    assert learner.token_budget == 12  # 6 of the prompt and 6 of the completion
    assert "micro_batch_tokens: the model's memory cannot be measured" in caplog.text


def test_head_blocks_are_measured_once_without_data(make) -> None:
    """With a large vocabulary there are thousands, and each takes the same."""
    learner = make().learner
    batch = probe(2, 4, 6, 6)
    with (
        patch.object(lm_head, "BLOCK", 1),
        patch.object(lm_head, "widen", wraps=lm_head.widen) as blocks,
    ):
        data = footprint(learner.module, batch)
        assert blocks.call_count == 2 * batch.action_mask.sum()  # forward and back
        blocks.reset_mock()
        assert footprint(blueprint(learner.module, "cpu"), batch) == data
        assert blocks.call_count == 2
