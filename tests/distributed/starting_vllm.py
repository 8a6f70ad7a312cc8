"""Two processes that start an engine in the place of vLLM: python starting_vllm.py HOW BACKEND OUT

HOW is "all weights" or "with LoRA"; with DDP, the `rollout_engine` of a start that fails on rank 1.
"""

import sys
from typing import Any

import torch

from rlhf_pg import GRPOConfig, GRPOTrainer
from rlhf_pg.rollout import NativeEngine, factory
from rlhf_pg.rollout.vllm import in_process
from rlhf_pg.rollout.vllm.handover import published_weights
from rlhf_pg.runtime import Runtime
from rlhf_pg.tasks import arithmetic
from tests.distributed import backends
from tests.trainers.conftest import digits


class Stand(NativeEngine):
    """Samples with a whole model, into which the weights are loaded one by one."""

    gathers = "none"

    def __init__(self, model: Any, eos: Any, tokenizer: Any, gathered: Any, **_: Any) -> None:
        self.model_there, self.gathered = model, gathered
        whole, _ = arithmetic().new_model()
        super().__init__(whole, eos, tokenizer.pad_token_id, tokenizer)

    def _load_weights(self) -> Any:
        handed = dict(published_weights(self.model_there, self.gathered))
        self.model.load_state_dict(handed, strict=False)  # the head is tied
        assert all(p.is_meta for p in self.model_there.parameters())
        return super()._load_weights()


def samples(how: str, out: str) -> None:
    in_process.VllmEngine = Stand  # type: ignore[assignment, misc]
    torch.manual_seed(0)
    task = arithmetic()
    model, tokenizer = task.new_model()
    args = GRPOConfig(
        rollout_engine="vllm",
        output_dir=out,
        max_steps=3,
        learning_rate=1e-2,
        prompts_per_step=4,
        max_completion_length=4,
        use_peft=how == "with LoRA",
    )
    trainer = GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=digits,
        args=args,
        train_dataset=task.train_dataset,
    )
    backend = trainer.learner.backend
    updated = list(backend.updated())
    assert updated
    assert not any(x in backend.optimizer.state for x in updated)  # moments are still to come
    trainer.train()
    assert all(x in backend.optimizer.state for x in updated)


def fails(engine: str) -> None:
    """The process of rank 0 waits for the other in a collective, as vLLM does when it starts."""
    runtime = Runtime(timeout=600)

    def make(name: str) -> Any:
        if runtime.rank == 1:
            raise torch.OutOfMemoryError("2 GiB")
        torch.distributed.barrier()

    factory.SLOWEST_START = 2.0
    factory.start_engine(GRPOConfig(rollout_engine=engine), "vllm", "", runtime, make)


if __name__ == "__main__":
    how, backend, out = sys.argv[1:]
    backends.install(backend)
    if backend == "ddp":
        fails(how)
    else:
        samples(how, out)
