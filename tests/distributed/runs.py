"""Runs of trainers in any number of processes and on any backend, for the tests to start.

Jobs: `{"backend": ..., "jobs": [{"out": directory, "algorithm": ..., "model": path, ...}]}`, one
run after another in the same processes; what is left of a job are options of its trainer's config.
"""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import torch
from peft import LoraConfig
from torch import Tensor, nn

from rlhf_pg import Callback, GRPOTrainer, PPOTrainer, ReinforceTrainer, RLOOTrainer
from rlhf_pg.config import RewardModelConfig, SFTConfig
from rlhf_pg.report.metrics import Meter
from rlhf_pg.rewards import train_reward_model
from rlhf_pg.runtime import Runtime, ddp
from rlhf_pg.runtime.ddp import DDPBackend, full, put
from rlhf_pg.supervised import train_sft
from rlhf_pg.tasks import arithmetic
from tests.distributed import backends

TRAINERS = {
    "grpo": GRPOTrainer,
    "ppo": PPOTrainer,
    "rloo": RLOOTrainer,
    "reinforce": ReinforceTrainer,
}
# Padded tokens of a micro-batch: a row, two of the longest rows, all of them.
SPLITS = {"one": 6 + 6, "two": 2 * (6 + 6), "all": 100_000}


def even_digits(completions: list[str], **_: Any) -> list[float]:
    """A reward that a random model can find at once."""
    return [sum(c in "02468" for c in text) / 6 for text in completions]


class TwoTurns:
    """Answers a first turn with a digit, pays for both, and fails where an answer begins with 7."""

    def __init__(self) -> None:
        self.turns = 0

    def reset(self, example: dict[str, Any]) -> str:
        return str(example["prompt"])

    def step(self, completion: str) -> tuple[str, float, bool]:
        self.turns += 1
        if completion.startswith("7"):
            raise OSError("gone")
        return "5", even_digits([completion])[0], self.turns == 2


def new_trainer(out: Path, algorithm: str, model: str, **options: Any) -> Any:
    """On the embedded task; `lora` is "fresh", "random" for an adapter that is not 0, or options of
    the adapter, and `environment` asks for `TwoTurns` beside the reward.
    """
    factory = TwoTurns if options.pop("environment", False) else None
    trainer_type, task = TRAINERS[algorithm], arithmetic()
    peft_config, lora = None, options.pop("lora", None)
    if lora is not None:
        own = lora if isinstance(lora, dict) else {"init_lora_weights": lora == "fresh"}
        own = {"target_modules": "all-linear"} | own
        peft_config = LoraConfig(r=4, task_type="CAUSAL_LM", **own)
    return trainer_type(
        model=model,
        reward_funcs=even_digits,
        args=trainer_type.config_type(output_dir=str(out / "run"), **options),
        train_dataset=task.train_dataset,
        eval_dataset=task.eval_dataset.select(range(33)),
        peft_config=peft_config,
        environment_factory=factory,
    )


def run(out: Path, resume: str | None = None, gradients: bool = True, **options: Any) -> None:
    """Leave behind what is sampled first, the first unclipped gradient with every split, and the
    weights before and after training; of policy and critic, where there is one.
    """
    trainer = new_trainer(out, **options)
    main = trainer.runtime.is_main
    out.mkdir(exist_ok=True, parents=True)
    tensors = {"start": weights(trainer)}
    if gradients:
        tensors["gradients"] = first_gradients(trainer, out)
    evaluated = trainer.evaluate()
    trainer.train(resume_from_checkpoint=resume)
    if trainer.learner.reference is not None:
        trainer.learner.reference.state_dict()  # still a module like any other
    tensors["end"] = weights(trainer)
    if main:
        torch.save(tensors, out / "tensors.pt")
        (out / "eval.json").write_text(json.dumps(evaluated))


def run_into_nan(out: Path, **options: Any) -> None:
    """The loss is NaN in the last process alone, in step 2 and from step 4 on. Leave behind whether
    step 2 changed anything and step 3 did, the weights after step 3 and at the end, and what every
    process says of it.
    """
    trainer = new_trainer(out, **options)
    out.mkdir(exist_ok=True, parents=True)
    runtime, objective = trainer.runtime, trainer.objective
    left: list[list[Tensor]] = []

    def broken(*inputs: Any) -> Any:
        bad = trainer.state.step in (1, 3, 4) and runtime.rank == runtime.world - 1
        return objective(*inputs) * (float("nan") if bad else 1.0)

    class Keep(Callback):
        def on_step(self, trainer: Any, metrics: dict[str, Any]) -> None:
            state = [value.cpu().clone() for _, _, value in trainer.learner.backend.state()]
            left.append([weights(trainer), *state])

    trainer.objective = Mock(wraps=objective, side_effect=broken)
    trainer.callbacks.append(Keep())
    try:
        trainer.train()
    except FloatingPointError as error:
        (out / f"error-{runtime.rank}").write_text(str(error))
    if runtime.is_main:
        first, second, third = left[:3]
        same = all(a.equal(b) for a, b in zip(first, second, strict=True))
        (out / "trace.json").write_text(
            json.dumps({"same": same, "moves": not second[0].equal(third[0])})
        )
    tensors = {"good": left[2][0], "end": weights(trainer)}
    if runtime.is_main:
        torch.save(tensors, out / "tensors.pt")


def run_supervised(out: Path, algorithm: str, model: str, **options: Any) -> None:
    """Fine-tune on 11 completions, or train a reward model on 11 pairs, in batches of 4."""
    sums = [(f"{a}+{b}=", str(a + b)) for a, b in zip(range(11), range(7, 95, 8), strict=True)]
    keys = {"output_dir": str(out / "run"), "batch_size": 4, "max_steps": 5} | options
    if algorithm == "sft":
        rows = [{"prompt": prompt, "completion": right} for prompt, right in sums]
        train_sft(SFTConfig(**keys), model, None, rows, rows[:5])
        return
    rows = [{"prompt": p, "chosen": right, "rejected": right + "0"} for p, right in sums]
    train_reward_model(RewardModelConfig(**keys), model, None, rows, rows[:5])


class Numbers(nn.Module):
    """Weights that pieces do not divide evenly, and a loss whose gradient is given."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        shapes = {"tall": (7, 5), "wide": (1, 600), "vector": (3,)}
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape).bfloat16()))

    def forward(self, gradients: dict[str, Tensor]) -> Tensor:
        return sum((p * gradients[name]).sum() for name, p in self.named_parameters())


def run_updates(out: Path, resume: str | None = None) -> None:
    """Leave behind weights and state after each of 6 updates, or what is left of them after 3.

    The gradients are whole numbers, of which every process has those of its own positions, and the
    factors powers of 2: nothing is rounded but the weights.
    """
    runtime, module = Runtime(), Numbers()
    shapes = {name: p.shape for name, p in module.named_parameters()}
    optimizer = torch.optim.SGD(module.parameters(), lr=2.0**-10, momentum=0.5)
    trained = runtime.prepare(module, optimizer)
    named = dict(module.named_parameters())
    if resume is not None:
        saved = torch.load(resume, weights_only=True)
        for name, parameter in named.items():
            put(parameter, saved[3][name])
        flat_state = ((*key.rsplit("."), value) for key, value in saved[3].items() if "." in key)
        trained.load_state((named[name], key, value) for name, key, value in flat_state)
    left = {}
    for update in range(1 if resume is None else 4, 7):
        noise = torch.Generator().manual_seed(update)
        gradients = {}
        for name, shape in shapes.items():
            whole = torch.randint(-8, 9, shape, generator=noise).bfloat16()
            own = torch.arange(whole.numel()).view(shape) % runtime.world == runtime.rank
            gradients[name] = whole * own
        with trained.micro_batch(last=True):
            trained.backward(trained(gradients))
        trained.step()
        names = {p: name for name, p in named.items()}
        state = {f"{names[p]}.{key}": value.clone() for p, key, value in trained.state()}
        left[update] = {name: full(p).clone() for name, p in named.items()} | state
    if runtime.is_main:
        out.mkdir(exist_ok=True, parents=True)
        torch.save(left, out / "updates.pt")


def first_gradients(trainer: Any, out: Path) -> dict[str, Tensor]:
    """Of the whole first batch, with its rows split into micro-batches in three ways."""
    batch = trainer.sampler.next_batch(trainer.state.prompt_index, Meter())
    experience = trainer.credit(trainer.infer(batch), Meter())
    learner, rank = trainer.learner, trainer.runtime.rank
    sampled = [
        [group, *ids] for group, ids in zip(batch.groups.tolist(), batch.token_lists(), strict=True)
    ]
    (out / f"sampled-{rank}.json").write_text(json.dumps(sampled))
    gradients, budget = {}, learner.token_budget
    exchanges = count_exchanges(learner.backend)
    for split, tokens in SPLITS.items():
        exchanges.clear()
        learner.token_budget = tokens
        learner.accumulate(trainer.drop_truncated(experience), trainer.objective, Meter())
        gradients[split] = flat(gradient_of(p, learner.backend) for p in parameters(trainer))
        learner.backend.zero_grad_of(learner.module)
        learner.backend.step()
    (out / "exchanges.json").write_text(json.dumps(exchanges))
    learner.token_budget = budget
    return gradients


def count_exchanges(backend: Any) -> list[int]:
    """The sizes of what DDP's processes sum from here on: which parameters have a gradient, and
    these gradients.
    """
    exchanges: list[int] = []
    all_reduce = torch.distributed.all_reduce

    def count(gradient: Tensor, *args: Any, **options: Any) -> Any:
        exchanges.append(gradient.numel())
        return all_reduce(gradient, *args, **options)

    if type(backend) is DDPBackend:
        ddp.distributed = SimpleNamespace(all_reduce=count, broadcast=torch.distributed.broadcast)
    return exchanges


def gradient_of(parameter: Any, backend: Any) -> Tensor:
    """All of it, wherever its pieces are."""
    if hasattr(parameter, "ds_id") or hasattr(parameter, "_hp_mapping"):
        from deepspeed.utils import safe_get_full_grad

        gradient = safe_get_full_grad(parameter)
    else:
        gradient = backend.gradient(parameter)
        gradient = None if gradient is None else full(gradient)
    return torch.zeros_like(full(parameter)) if gradient is None else gradient


def parameters(trainer: Any) -> list[Any]:
    """What is trained; what is frozen may be there once or several times."""
    return [p for p in trainer.learner.module.parameters() if p.requires_grad]


def weights(trainer: Any) -> Tensor:
    return flat(full(p) for p in parameters(trainer))


def flat(tensors: Any) -> Tensor:
    return torch.cat([tensor.flatten().cpu() for tensor in tensors]).clone()


def main(path: Path) -> None:
    plan = json.loads(path.read_text())
    backends.install(plan["backend"])
    for job in plan["jobs"]:
        torch.manual_seed(0)
        kinds = {"nan": run_into_nan, "updates": run_updates, "supervised": run_supervised}
        kind = kinds.get(job.pop("kind", ""), run)
        kind(Path(job.pop("out")), **job)
