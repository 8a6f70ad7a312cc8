"""What scoring and updates wait for, and what they are given to wait for."""

import dataclasses
import gc
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_pg.plan.memory import build_meta_models, predict_memory
from rlhf_pg.report.metrics import Meter
from rlhf_pg.run import token_budget
from rlhf_pg.run.token_budget import SHARDINGS
from tests.device.pretend.extension import ext
from tests.device.runs import COMMON, Run, trainer

# FlexAttention is one kernel on a GPU. Here it is computed operation by operation, some of which
# copy numbers from the host: up to twice per attention that is forwarded or backward.
TRACED = 2


def waits(tokens: int, path: Path) -> tuple[int, int, int]:
    """Micro-batches of an update on 32 completions, and waits in scoring and in updating."""
    options = {"prompts_per_step": 8, "max_completion_length": 24, "beta": 0.05}
    made = trainer(Run(options={**options, "micro_batch_tokens": tokens}), path)
    made.sampler.engine.eos_token_ids = []  # every completion has its full length
    for _ in range(2):  # the first time something is compiled
        samples = made.sampler.roll_out(range(8))
        scores = made.sampler.add_rewards(samples)
        before = ext.syncs()
        experience = made.credit(made.learner.infer(scores), Meter())
        scored = ext.syncs()
        made.update(experience, Meter())
        updated = ext.syncs()
    count = len(list(made.learner.micro_batches(experience)))
    return count, scored - before, updated - scored


def test_added_micro_batch_adds_no_sync_beyond_attention(tmp_path: Path) -> None:
    """Beyond what the first costs: where its tokens lie was worked out on the host."""
    few, many = (waits(tokens, tmp_path / str(tokens)) for tokens in (4096, 420))
    more = many[0] - few[0]
    assert more >= 1
    assert (many[1] - few[1]) / more <= TRACED
    assert (many[2] - few[2]) / more <= 2 * TRACED
    after = TRACED + 3  # a forward pass for the KL: its rows, their lengths, the number
    assert few[2] - 2 * TRACED - after <= 8  # a whole update


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_update_frees_activations_and_gradients(tmp_path: Path, dtype: str) -> None:
    """They are gone when the next rollout asks how much room there is: as much as was foreseen."""
    made = trainer(Run(options={"micro_batch_tokens": 200, "dtype": dtype}), tmp_path)
    learner = made.learner
    gc.collect()
    foreseen = token_budget.free_share(learner.backend, made.args.optim, made.runtime)
    samples = made.sampler.roll_out(range(4))
    experience = made.credit(made.learner.infer(made.sampler.add_rewards(samples)), Meter())
    made.agreement.refuses = False  # the second update trains on what older weights sampled
    made.update(experience, Meter())
    gc.collect()
    now = token_budget.free_share(learner.backend, made.args.optim, made.runtime)
    assert now == pytest.approx(foreseen, abs=1e-6)  # moments take forty times that
    before = torch.cuda.memory_allocated()
    made.update(experience, Meter())
    assert torch.cuda.memory_allocated() <= before


def between_passes(path: Path, **keys: Any) -> tuple[int, int, list[torch.Tensor]]:
    """Bytes that a micro-batch holds between its passes, those of a layer's input, gradients."""
    made = trainer(Run(options={**keys, "micro_batch_tokens": 200}), path)
    samples = made.sampler.roll_out(range(4))
    experience = made.credit(made.learner.infer(made.sampler.add_rewards(samples)), Meter())
    _, batch = next(iter(made.learner.micro_batches(experience)))
    policy, config = made.learner.policy.train(), made.model.config
    policy(batch).logprobs.sum().backward()  # by now all is there that stays
    policy.zero_grad()
    gc.collect()
    before = torch.cuda.memory_allocated()
    logprobs = policy(batch).logprobs
    held = torch.cuda.memory_allocated() - before
    logprobs.sum().backward()
    assert config.num_hidden_layers == 2
    is_first = batch.shared_prefixes().diff(prepend=torch.tensor([-1], device="cuda")) > 0
    completions, prompts, _ = batch.lengths().T
    each = int(completions.sum() + prompts[is_first].sum()) * config.hidden_size * 4
    return held, each, [p.grad.cpu() for p in policy.parameters() if p.requires_grad]


def test_offload_holds_no_inputs_of_layers_on_device(tmp_path: Path) -> None:
    """With the same bits of gradients; peft keeps the embeddings, so that one layer's are left."""
    (kept, each, plain), (held, _, offloaded) = (
        between_passes(tmp_path / str(how), gradient_checkpointing=how, use_peft=True)
        for how in (True, "offload")
    )
    assert kept - held == each
    assert all(a.equal(b) for a, b in zip(plain, offloaded, strict=True))


def test_auto_dtype_is_bfloat16(tmp_path: Path) -> None:
    made = trainer(Run(options={"dtype": "auto"}), tmp_path)
    assert (made.args.dtype, made.model.dtype) == ("bfloat16", torch.bfloat16)


def test_deterministic_run_uses_deterministic_kernels(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    assert not torch.are_deterministic_algorithms_enabled()
    try:
        trainer(Run(options={"deterministic": True, "max_steps": 1}), tmp_path).train()
        assert torch.are_deterministic_algorithms_enabled()
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    finally:
        torch.use_deterministic_algorithms(False)


def test_budget_is_found_on_meta_tensors(tmp_path: Path) -> None:
    """`auto` measures on tensors that have shapes alone: the device computes nothing for it."""
    made = trainer(Run("ppo", {"micro_batch_tokens": 200}), tmp_path)
    allocated, kernels = ext.allocated(), ext.kernels()
    args = made.args
    grown = token_budget.of_update(made.learner.module, args, 8, torch.device("cuda"))
    assert ext.kernels() - kernels < 400  # masks and lengths, which are real
    assert ext.allocated() - allocated < 2**20
    assert grown.bytes > 0


def test_plan_runs_on_device(tmp_path: Path) -> None:
    run = Run(options={"micro_batch_tokens": "auto"})
    args = dataclasses.replace(trainer(run, tmp_path).args, task="arithmetic")
    meta = build_meta_models(args, torch.device("cuda"), "cuda")
    memory = predict_memory(meta, SHARDINGS[0], 1, 80e9, "cuda")
    assert memory.micro_batch_tokens > COMMON["max_completion_length"]
