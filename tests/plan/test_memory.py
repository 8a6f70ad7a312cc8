"""What the plan says of memory, against the tensors of a trainer that takes a step."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
from datasets import Dataset
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, AutoModelForCausalLM

from rlhf_pg import GRPOTrainer, PPOTrainer
from rlhf_pg.plan.memory import Memory, MetaModels, build_meta_models, predict_memory
from rlhf_pg.report.metrics import Meter
from rlhf_pg.rollout.native import continuous_batching
from rlhf_pg.rollout.native.cache import KeyValues, StateStore
from rlhf_pg.run.token_budget import SHARDINGS
from rlhf_pg.tasks.tiny import character_tokenizer
from rlhf_pg.trainers import PolicyGradientTrainer
from tests.trainers.conftest import estimated

LENGTH = 40  # of prompts and of completions
COMMON: dict[str, Any] = {
    "max_prompt_length": LENGTH,
    "max_completion_length": LENGTH,
    "prompts_per_step": 2,
    "num_generations": 4,
    "micro_batch_tokens": 400,
    "max_steps": 1,
}
# The width, the vocabulary and the layers of a Qwen2, and what trains it.
CASES: dict[str, tuple[type[PolicyGradientTrainer], int, dict[str, Any]]] = {
    "in full": (GRPOTrainer, 256, {}),
    "a large vocabulary": (GRPOTrainer, 32768, {"beta": 0.05}),
    "LoRA, a critic and a reference": (PPOTrainer, 256, {"use_peft": True}),
    "a separate critic": (PPOTrainer, 256, {}),
    "a teacher": (
        GRPOTrainer,
        256,
        {"teacher_model_name_or_path": "policy", "teacher_mixup_alpha": 0.5},
    ),
    "a shared critic": (PPOTrainer, 256, {"critic": "shared"}),
    "checkpointing": (GRPOTrainer, 32768, {"gradient_checkpointing": True}),
    "bfloat16": (GRPOTrainer, 32768, {"dtype": "bfloat16"}),
    "recurrent layers": (GRPOTrainer, 256, {"arch": "qwen3_5_text"}),
    "windows and sinks": (GRPOTrainer, 256, {"arch": "gpt_oss"}),
}
OF_FAMILY: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "qwen3_5_text": {"head_dim": 64, "layer_types": ["linear_attention", "full_attention"]}
    | {"linear_num_key_heads": 4, "linear_num_value_heads": 8}
    | {"linear_key_head_dim": 64, "linear_value_head_dim": 64},
    "gpt_oss": {"head_dim": 64, "sliding_window": 16, "num_local_experts": 4}
    | {"num_experts_per_tok": 2, "intermediate_size": 256}
    | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
}


SLOW = ("a large vocabulary", "a separate critic", "a shared critic", "checkpointing", "bfloat16")
PARAMS = [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in CASES]


@pytest.fixture(params=PARAMS, scope="module")
def case(request, tmp_path_factory) -> tuple[PolicyGradientTrainer, MetaModels, Memory]:
    """A trainer, and what is built and predicted of it from its files."""
    trainer_type, vocabulary, options = CASES[request.param]
    options = dict(options)
    family = options.pop("arch", "qwen2")
    directory = tmp_path_factory.mktemp("plan")
    path, tokenizer = str(directory / "model"), character_tokenizer("0123456789")
    shape = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": vocabulary}
    config = AutoConfig.for_model(family, **shape | heads | OF_FAMILY[family])
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    outputs = {"model_name_or_path": path, "output_dir": str(directory / "run")}
    args = trainer_type.config_type(**(COMMON | outputs | options))
    meta = build_meta_models(args, "cpu")
    trainer = trainer_type(
        reward_funcs=lambda completions, **_: [float(len(text)) for text in completions],
        args=args,
        train_dataset=Dataset.from_dict({"prompt": ["1" * LENGTH, "2" * LENGTH]}),
    )
    # All completions have their full length.
    trainer.sampler.engine.eos_token_ids = []
    return trainer, meta, predict_memory(meta, SHARDINGS[0], 1, 0.0, "cpu")


def taken(tensors: Iterable[Tensor | None]) -> int:
    """Bytes of their memory, each storage once."""
    storages = [t.untyped_storage() for t in tensors if t is not None]
    return sum({s.data_ptr(): s.nbytes() for s in storages}.values())


class Seen:
    """What is there in a trainer's step."""

    def __init__(self, trainer: PolicyGradientTrainer) -> None:
        self.trainer = trainer
        self.sizes: dict[str, float] = {}
        self.stores: list[KeyValues] = []
        self.states: list[StateStore] = []

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Around the step."""
        trained, seen = self.trainer.learner.backend, self

        class Kept(KeyValues):
            def __init__(self, *args: Any, **options: Any) -> None:
                super().__init__(*args, **options)
                seen.stores.append(self)

        step = trained.step

        def update() -> float:
            module = self.trainer.learner.module
            self.sizes["gradients"] = taken(map(trained.gradient, module.parameters()))
            return step()

        class KeptStates(StateStore):
            def __init__(self) -> None:
                super().__init__()
                seen.states.append(self)

        with (
            patch.object(continuous_batching, "StateStore", KeptStates),
            patch.object(continuous_batching, "KeyValues", Kept),
            patch.object(trained, "step", update),
        ):
            yield

    def measure(self) -> None:
        """After the step."""
        learner = self.trainer.learner
        policy = list(learner.policy.parameters())
        states = [v for state in learner.optimizer.state.values() for v in state.values()]
        # Of weights in 16 bits it updates masters.
        updated = [p for group in learner.optimizer.param_groups for p in group["params"]]
        weights = {id(p) for p in learner.module.parameters()}
        states += [p for p in updated if id(p) not in weights]
        everything = [*learner.module.parameters()]
        shared = {id(p) for p in everything}
        copies = {name: getattr(learner, name) for name in ("reference", "teacher")}
        self.sizes |= {
            "weights": taken(policy),
            "all weights": taken(everything),
            "optimizer": taken(x for x in states if x.numel() > 1),
            **{
                name: taken(p for p in copy.parameters() if id(p) not in shared) if copy else 0
                for name, copy in copies.items()
            },
            "keys and values": taken(
                t for store in self.stores for pair in store._layers.values() for t in pair
            ),
            "states": taken(
                t for store in self.states for part in store._layers.values() for t in part.values()
            ),
        }


def close(a: float, b: float) -> bool:
    return a == pytest.approx(b, rel=0.2, abs=1000)


def test_predicted_parts_match_real_step(case) -> None:
    trainer, _, memory = case
    seen = Seen(trainer)
    with seen.watched():
        experience, _ = estimated(trainer)
        trainer.update(experience, Meter())
    seen.measure()
    update, sizes = memory.update, seen.sizes
    critic = update.get("critic", 0.0)
    assert close(update["weights"], sizes["weights"])
    assert close(update["reference"], sizes["reference"])
    hidden = experience.teacher_hidden
    assert close(update["teacher"], sizes["teacher"] + (0 if hidden is None else hidden.nbytes))
    # A critic has weights, gradients and moments of its own.
    kept = update["weights"] + update["gradients"] + update["optimizer"] + critic
    assert close(kept, sizes["all weights"] + sizes["gradients"] + sizes["optimizer"])
    if not critic:
        assert close(update["gradients"], sizes["gradients"])
        assert close(update["optimizer"], sizes["optimizer"])
    assert close(memory.rollout["keys and values"], sizes["keys and values"])
    assert close(memory.rollout["states"], sizes["states"])


def test_predicted_peak_matches_allocator(case) -> None:
    """Forward and backward, by the profiler of torch: kernels' own work space is in it."""
    trainer, meta, memory = case
    rollout, module = trainer.sampler.roll_out(range(2)), trainer.learner.module.train()
    run(module, rollout)  # gradients, which are planned apart, are there
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        run(module, rollout)
    now = most = 0
    for event in recorded.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    assert memory.update["activations"] == meta.update.at(10 * LENGTH)
    assert close(memory.update["activations"], most)


def run(module: nn.Module, rollout: Any) -> None:
    numbers = [x for x in module(rollout) if x is not None and x.requires_grad]
    sum(x.sum() for x in numbers).backward()
