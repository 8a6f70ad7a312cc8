"""The expected gradient of a config through its own trainer, over all that a step could sample."""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import (
    combinations,
    combinations_with_replacement,
    product,
)
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import (
    parameters_to_vector,
    vector_to_parameters,
)
from torch.nn.utils.rnn import pad_sequence

from rlhf_pg.audit import world
from rlhf_pg.config import PolicyGradientConfig
from rlhf_pg.config.fields import ConfigError, metadata
from rlhf_pg.config.method import MethodConfig
from rlhf_pg.kl import divergence
from rlhf_pg.report.metrics import Meter
from rlhf_pg.rollout import SamplingParams
from rlhf_pg.trainers import trainer_type

RATE = 0.03  # of the SGD step that a step's later updates come after: KL(old || new) 0.01 per token
WARMTH = 1.05  # temperature of an engine other than the policy, over the policy's
MOST = 3  # completions of a prompt in a step


@dataclass(frozen=True)
class MeasuredGradient:
    """An expected gradient, to ascend, and the true one, both flat."""

    gradient: Tensor  # with a scale of 1 for weights of 1 / (N length)
    truth: Tensor
    variance: float  # trace of the covariance over the squared norm of the expectation
    step: tuple[int, int]  # prompts, and completions of each

    @property
    def cosine(self) -> float:
        return torch.cosine_similarity(self.gradient, self.truth, dim=0).item()

    @property
    def scale(self) -> float:
        """The multiple of the true gradient that is nearest to the expected one."""
        return (self.gradient @ self.truth / self.truth.square().sum()).item()

    @property
    def bias(self) -> float:
        """The share of the expected gradient's norm that remains beside that multiple."""
        return float((self.gradient - self.scale * self.truth).norm() / self.gradient.norm())


def changed(args: Any, changes: dict[str, Any]) -> Any:
    """Return a config with changed keys; a key that becomes wrong or idle gets its default."""
    values = vars(args) | changes
    try:
        return type(args)(**values)
    except ConfigError as error:
        wrong = {key for key, _ in error.messages}
        return changed(
            type(args)(),
            {k: v for k, v in values.items() if k not in wrong},
        )


def make_trainer(args: Any) -> Any:
    """Return a trainer of this method in the world, whose step has every completion once.

    A teacher, whatever it is, is the policy before it moved, with another prompt.
    """
    longest = world.MAX_LENGTH
    shared = metadata(PolicyGradientConfig).keys() - metadata(MethodConfig).keys()
    keys = {}
    for key, words in metadata(args).items():
        if key not in shared and words.get("bias", "") is not None:
            keys[key] = getattr(args, key)
    keys |= {
        "temperature": args.temperature,
        "max_completion_length": longest,
        "overlong_buffer": args.overlong_buffer and min(args.overlong_buffer, longest),
        "sampler_correction": args.correction_of(args.rollout_engine),
        "num_iterations": min(args.updates_per_step, 2),  # so that ratios are computed, or not
        "teacher_model_name_or_path": args.teacher_model_name_or_path and "policy",
        "prompts_per_step": len(world.PROMPTS),
        "num_generations": len(world.COMPLETIONS),
        "rollout_engine": "native",
        "dtype": "float64",
        "micro_batch_tokens": 4096,
        "shuffle_dataset": False,
        "max_steps": 1,
    }
    rows = [{"prompt": x, "privileged_prompt": y} for x, y in world.PRIVILEGED.items()]
    kind = trainer_type(args.algorithm, args.trainer)
    trainer: Any = world.make_trainer(kind, changed(type(args)(), keys), rows)
    trainer.sampler.engine.says = world.COMPLETIONS * len(rows)
    return trainer


def measure(args: Any, foreign: Callable[..., Tensor] | None = None) -> MeasuredGradient:
    """Return a step's expected gradient by this config, or by a foreign loss, and the true one."""
    trainer = make_trainer(args)
    n = len(world.COMPLETIONS)
    longest = world.MAX_LENGTH
    learner = trainer.learner
    model = trainer.model
    parameters = [*model.parameters()]
    base = trainer.infer(trainer.sampler.next_batch(0, Meter()))  # every completion once
    temperature = args.temperature
    if "vllm" in args.rollout_engine or "_" in args.sampler_correction:
        temperature *= WARMTH
    sampler = SamplingParams(temperature, args.top_k, args.top_p, args.min_p, longest)
    sampled = []
    for prompt, completion in product(world.PROMPTS, world.COMPLETIONS):
        logprobs = world.distributions(model, prompt, completion, sampler).detach()
        sampled.append(logprobs[range(len(completion)), list(completion)])
    base = base.with_columns(sampler_logprobs=pad_sequence(sampled, batch_first=True))
    chances = base.sampler_logprobs.sum(1).exp()
    size = min(args.num_generations, MOST)

    # A step has one completion of each of two prompts, or several of one prompt in any order.
    rows = [range(first, first + n) for first in range(0, len(chances), n)]
    steps = list[tuple[int, ...]]()
    if size == 1:
        for first, second in combinations(rows, 2):
            steps += product(first, second)
    else:
        for of_prompt in rows:
            steps += combinations_with_replacement(of_prompt, size)
    ways = []
    for step in steps:
        orders_of_equal_ones = math.prod(map(math.factorial, Counter(step).values()))
        ways.append(1 / orders_of_equal_ones)
    weights = chances[torch.tensor(steps)].prod(1) * chances.new_tensor(ways)
    weights = weights / weights.sum()

    def gradient(step: tuple[int, ...]) -> Tensor:
        batch = base.select(torch.tensor(step))
        groups = torch.arange(len(step)) // size
        greedy = base.greedy
        if greedy is not None:
            greedy = greedy.select(torch.tensor(step[::size]) // n)
        batch = batch.with_columns(groups=groups, greedy=greedy)
        batch = trainer.drop_truncated(trainer.credit(batch, Meter()))
        learner.module.zero_grad()
        if foreign is None:
            learner.accumulate(batch, trainer.objective, Meter())
        else:
            torch.autograd.backward(foreign(args, batch, learner.backend(batch)))
        return parameters_to_vector([parameter.grad for parameter in parameters])

    pulls = list[Any]()
    if args.beta:
        pulls.append((world.model(), {}, args.beta, None))
    if args.teacher_model_name_or_path is not None:
        kind = args.teacher_divergence.replace("sampled", "reverse_kl")
        compare = partial(divergence, kind=kind, mixture=args.teacher_mixture)
        in_loss = compare if args.teacher_placement == "loss" else None
        pulls.append(
            (
                world.model(),
                world.PRIVILEGED,
                args.teacher_coef,
                in_loss,
            )
        )
    policy = SamplingParams(temperature=args.temperature, max_tokens=longest)
    scored = args.policy_loss != "none"
    gradients = torch.zeros(())
    truth = torch.zeros(())
    of_first_update = 1 / args.updates_per_step
    for share in filter(None, (of_first_update, 1 - of_first_update)):
        gradients = gradients + share * torch.stack([gradient(step) for step in steps])
        exact = world.exact_gradient(model, [*world.PROMPTS], policy, pulls, scored)
        truth = truth + share * exact
        moved = parameters_to_vector(parameters).detach() + RATE * exact
        vector_to_parameters(moved, parameters)
    expected = weights @ gradients
    variance = weights @ gradients.square().sum(1) / expected.square().sum() - 1
    mean = (base.completion_mask.sum(1) * chances).sum() / len(world.PROMPTS)
    length = longest if args.aggregation == "constant" else mean
    shape = len(steps[0]) // size, size
    return MeasuredGradient(-length * expected, truth, variance.item(), shape)
