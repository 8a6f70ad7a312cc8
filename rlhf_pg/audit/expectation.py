"""The expected gradient of a config through its own trainer, over all that a group could say.

The models run once per completion; their outputs are then looked up, while the trainer computes
rewards, advantages, loss and aggregation of every group, a multiset of completions. O counts steps,
N their rows, n all completions of all prompts, T tokens, P parameters.
"""

import math
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, fields
from functools import partial
from itertools import combinations_with_replacement, product
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from rlhf_pg.advantages import IN_BATCH, IN_GROUP, READ_REWARDS
from rlhf_pg.audit import world
from rlhf_pg.config import PolicyGradientConfig
from rlhf_pg.config.fields import ConfigError
from rlhf_pg.config.method import LOSSES, MethodConfig
from rlhf_pg.data.batch import Batch
from rlhf_pg.losses import weight_count
from rlhf_pg.models import PolicyOutput
from rlhf_pg.report.metrics import Meter
from rlhf_pg.rollout import SamplingParams
from rlhf_pg.trainers import trainer_type

LATER_KL = 0.01  # KL(old || new) per token at the updates after a step's first, in nats
WARMTH = 1.05  # temperature of an engine other than the policy, over the policy's
MOST_GROUPS = 3003  # 8 of 7 completions
# Keys that are not the method's, as a trainer has them by default.
NOT_AUDITED = {"dynamic_sampling_rounds", "on_reward_error", "reward_weights", "reward_workers"}
NOT_AUDITED |= {"reward_timeout", "router_aux_loss_coef", "value_model_name_or_path", "value_init"}

# An update's loss by another library: of the config, the batch and the policy's output.
ForeignLoss = Callable[[Any, Batch, PolicyOutput], Tensor]


@dataclass(frozen=True)
class Measured:
    """An expected gradient, to ascend, and the true one, both (P,)."""

    gradient: Tensor  # with a scale of 1 for weights of 1 / (N length)
    truth: Tensor
    variance: float  # trace of the covariance over the squared norm of the expectation
    rows: int  # completions in a step
    prompts: int

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
    values = {field.name: getattr(args, field.name) for field in fields(args)} | changes
    while True:
        try:
            return type(args)(**values)
        except ConfigError as error:
            wrong = {key for key, _ in error.messages}
            if not wrong & values.keys():
                raise
            values = {name: value for name, value in values.items() if name not in wrong}


def reduced(args: Any) -> Any:
    """Return the config of a trainer of this method, whose step has every completion once."""
    shared = {field.name for field in fields(PolicyGradientConfig)}
    kept = {field.name for field in fields(args)} - shared - NOT_AUDITED
    kept |= {field.name for field in fields(MethodConfig)} - NOT_AUDITED
    longest = min(args.max_completion_length, world.MAX_LENGTH)
    method = {name: getattr(args, name) for name in kept} | {
        "temperature": args.temperature,
        "max_completion_length": longest,
        "overlong_buffer": args.overlong_buffer and min(args.overlong_buffer, longest),
        "rollout_engine": "native",
        "sampler_correction": args.correction_of(args.rollout_engine),
        "num_iterations": min(args.updates_per_step, 2),  # so that ratios are computed, or not
        "prompts_per_step": len(world.PROMPTS),
        "num_generations": len(world.LISTED[longest]),
    }
    run = {"dtype": "float64", "micro_batch_tokens": 4096, "shuffle_dataset": False, "max_steps": 1}
    return changed(type(args)(), method | run)


def measure(args: Any, foreign: ForeignLoss | None = None) -> Measured:
    """Return the expected gradient of a step of this config, and the true one."""
    own = reduced(args)
    kind = trainer_type(args.algorithm, args.trainer)
    trainer: Any = world.make_trainer(kind, own, [*world.PROMPTS])
    learner, n, longest = trainer.learner, own.num_generations, own.max_completion_length
    policy = SamplingParams(temperature=args.temperature, max_tokens=longest)
    warm = args.temperature * (WARMTH if args.rollout_engine.startswith("vllm") else 1)
    sampler = SamplingParams(warm, args.top_k, args.top_p, args.min_p, longest)
    trainer.sampler.engine.says = world.LISTED[longest] * len(world.PROMPTS)
    base = learner.score(trainer.sampler.next_batch(0, Meter()))  # every completion once
    learner.agreement.begin()
    drawn = world.all_log_probs(trainer.model, sampler).detach()
    base = base.with_columns(sampler_logprobs=drawn)
    chances = drawn.sum(1).exp().view(-1, n)

    # Steps have one prompt where no statistic crosses groups, and otherwise two or three.
    size, crossing = args.num_generations, args.advantage_estimator not in IN_GROUP
    crossing &= args.advantage_estimator not in READ_REWARDS - IN_BATCH
    crossing |= args.normalize_advantages or args.whiten_rewards or args.normalize_rewards
    crossing |= args.reward_squash == "min_max" or getattr(args, "scale_rewards", "") == "batch"
    places: Any = [(place,) for place in range(len(world.PROMPTS))]
    if crossing or args.trainer:
        size = min(size, 2)
        places = [(0, 1, 2)] if size == 1 else [(1, 2)]
    while math.comb(n + size - 1, size) > MOST_GROUPS:
        size -= 1
    rows, weights = list_steps(chances, places, size)

    look = Lookup(trainer, base, foreign and partial(foreign, args))
    shares = [1 / args.updates_per_step, 1 - 1 / args.updates_per_step]
    tables, jacobians, truth = list[PolicyOutput](), list[Tensor](), torch.zeros(())
    among = sorted({*sum(places, ())})
    prompts = [[*world.PROMPTS][place] for place in among]
    reference = None if learner.reference is None else world.model()
    for share in filter(None, shares):
        if tables:
            move(trainer.model, policy)
        table, jacobian = look.outputs()
        tables.append(table)
        jacobians.append(share * jacobian)
        here = world.exact_gradient(trainer.model, prompts, reference, args.beta, policy)
        truth = truth + share * here
    steps = [rows] if len(places) > 1 else rows[:, None]
    estimated = [look.estimated(step, len(places[0])) for step in steps]
    batch = estimated[0] if len(estimated) == 1 else Batch.concat(estimated, world.EOS)
    joined = foreign or args.trainer or args.positive_nll_coef or args.policy_loss not in LOSSES
    slopes = torch.cat([look.slopes(table, batch, rows, not joined) for table in tables], dim=1)
    jacobian = torch.cat(jacobians)
    expected = weights @ slopes @ jacobian
    square = expected.square().sum()
    second = weights @ ((slopes @ (jacobian @ jacobian.T)) * slopes).sum(1)
    lengths = (base.completion_mask.sum(1).view(-1, n) * chances).sum(1)[among].mean()
    length = longest if own.aggregation == "constant" else lengths
    variance = ((second - square) / square).item()
    return Measured(-length * expected, truth, variance, rows.shape[1], len(places[0]))


def list_steps(chances: Tensor, places: Any, size: int) -> tuple[Tensor, Tensor]:
    """Return the rows of every step, (O,N) indices of completions, and their probabilities (O,)."""
    groups = list(combinations_with_replacement(range(chances.shape[1]), size))
    same = [math.prod(map(math.factorial, Counter(one).values())) for one in groups]
    ways = float(math.factorial(size)) / chances.new_tensor(same)
    of_prompt = (ways * chances[:, torch.tensor(groups)].prod(2)).tolist()
    steps, weights = [], []
    for prompts in places:
        for picks in product(range(len(groups)), repeat=len(prompts)):
            pairs = list(zip(prompts, picks, strict=True))
            if chance := math.prod(of_prompt[prompt][i] for prompt, i in pairs):
                steps.append([p * chances.shape[1] + one for p, i in pairs for one in groups[i]])
                weights.append(chance / len(places))
    return torch.tensor(steps), chances.new_tensor(weights)


def move(model: Any, params: SamplingParams) -> None:
    """Move the policy along the gradient of E[score], by `LATER_KL` per token."""
    start, distance = parameters_to_vector(model.parameters()).detach(), 1.0
    along = world.exact_gradient(model, [*world.PROMPTS], params=params)
    old = world.all_log_probs(model, params).detach()
    chances = old.sum(1, keepdim=True).exp()
    tokens = (chances * (old != 0)).sum()
    for _ in range(10):  # the KL is nearly quadratic
        vector_to_parameters(start + distance * along, model.parameters())
        now = world.all_log_probs(model, params).detach()
        distance *= math.sqrt(LATER_KL * tokens / (chances * (old - now)).sum())


class Lookup:
    """Stands in for the models, and for the split into micro-batches, in a trainer's updates."""

    def __init__(self, trainer: Any, base: Batch, foreign: Any) -> None:
        self.trainer, self.base, self.foreign = trainer, base, foreign
        self.models, trainer.learner.trained = trainer.learner.trained, self
        trainer.learner.micro_batches = lambda batch: [(torch.arange(batch.num_rows), batch)]
        self.running = {name: dict(vars(one)) for name, one in trainer.running.items()}
        self.micro_batch, self.backward = lambda last: nullcontext(), Tensor.backward

    def __call__(self, batch: Batch) -> PolicyOutput:
        return self.new

    def outputs(self) -> tuple[PolicyOutput, Tensor]:
        """Return the outputs for all completions, and the Jacobian (n*2*T,P) of their
        log-probabilities and, with a bonus, entropies.
        """
        with torch.no_grad():
            table: PolicyOutput = self.models(self.base)
        kinds = 1 + (self.trainer.args.entropy_coef > 0)
        size = sum(parameter.numel() for parameter in self.trainer.model.parameters())
        jacobian = table.logprobs.new_zeros(*table.logprobs.shape, 2, size)
        for row, place in self.base.action_mask.nonzero().tolist():
            for kind in range(kinds):
                number = self.models(self.base.select(torch.tensor([row])))[kind][0, place]
                jacobian[row, place, kind] = world.gradient(self.trainer.model, number)
        return table, jacobian.transpose(1, 2).flatten(0, 2)

    def estimated(self, step: Tensor, prompts: int) -> Batch:
        """Return the rows of steps (O,N) with advantages, by the trainer's own `estimate`."""
        for name, record in self.trainer.running.items():
            vars(record).update(self.running[name])
        rows, size = step.flatten(), step.shape[1] // prompts
        groups = torch.arange(len(rows) // size).repeat_interleave(size)
        batch = self.base.select(rows).with_columns(groups=groups)
        if (greedy := self.base.greedy) is not None:  # one row for each prompt
            each = rows[::size] // (self.base.num_rows // greedy.num_rows)
            batch = batch.with_columns(greedy=greedy.select(each))
        done: Batch = self.trainer.drop_truncated(self.trainer.estimate(batch, Meter())[0])
        return done

    def slopes(self, table: PolicyOutput, batch: Batch, step: Tensor, separate: bool) -> Tensor:
        """Return d loss / d (log-probability, entropy) of each step, (O,n*2*T); all at once where
        the losses of groups are `separate`.
        """
        (count, size), (n, width), rows = step.shape, table.logprobs.shape, step.flatten()
        found = table.logprobs.new_zeros(count * n, 2, width)
        every = torch.arange(count * size)
        for part in [every] if separate else every.view(count, size):
            chosen = batch if separate else batch.select(part)
            place = (rows[part], slice(chosen.completion_ids.shape[1]))
            both = torch.stack([table.logprobs[place], table.entropy[place]], 1).requires_grad_()
            values = None if table.values is None else table.values[place]
            self.new = PolicyOutput(both[:, 0], both[:, 1], values)
            if self.foreign is None:
                self.trainer.learner.accumulate(chosen, Meter())
            else:
                self.foreign(chosen, self.new).backward()
            assert both.grad is not None
            found[:, :, place[1]].index_add_(0, part // size * n + rows[part], both.grad)
        if separate:  # the denominators counted all steps together
            kind, mask = self.trainer.args.aggregation, batch.action_mask
            each = [weight_count(own, kind) for own in mask.view(count, size, -1)]
            factor = weight_count(mask, kind) / torch.stack(each).clamp(min=1)
            return found.view(count, -1) * factor[:, None]
        return found.view(count, -1)
