"""PPO in one file: sample, score, value, update, in the order in which one explains it.

    python examples/single_file/ppo.py models/smollm2  # a directory or an id of the Hub

It needs torch and transformers. `rlhf_pg.PPOTrainer` makes the same updates: from the same
weights and noise, both end with the same weights (tests/examples/test_single_file.py). The library
adds speed, several processes, adapters, checkpoints and everything around a run.

Shapes: B rows (a row is one completion of one prompt), S tokens of prompt and completion, padded on
the right, V tokens of the vocabulary.
"""

import copy
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer


@dataclass
class Config:
    steps: int = 25
    prompts_per_step: int = 16
    group: int = 1  # completions of each prompt
    longest: int = 32  # tokens of a completion, EOS included
    learning_rate: float = 1e-5
    value_learning_rate: float = 1e-5
    epochs: int = 4  # updates on the completions of a step
    epsilon: float = 0.2  # how far the ratio may move before the clip takes the gradient away
    lam: float = 0.95  # of GAE: 0 trusts the critic, 1 the rewards
    vf_coef: float = 0.1  # of the value loss
    value_clip: float = 0.2  # how far a value may move before its loss is clipped
    beta: float = 0.05  # coefficient of the KL to the reference
    max_grad_norm: float = 1.0
    rows_at_once: int = 16  # which never changes the result
    seed: int = 42


# ------------------------------------------------------------------------------------ 1. sampling


def noise(*coordinates: int) -> float:
    """Return a number in [0, 1) that depends on nothing but its coordinates (SplitMix64).

    With (seed, prompt, sample, position) neither the other rows nor a restart change a completion.
    """
    state = 0
    for x in coordinates:
        state = (state + x + 0x9E3779B97F4A7C15) % 2**64
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        state = (state ^ state >> 27) * 0x94D049BB133111EB % 2**64
        state ^= state >> 31
    return (state >> 12) * 2.0**-52


@torch.no_grad()
def sample(
    model: Any, prompts: list[list[int]], numbers: Sequence[int], eos: int, args: Config
) -> list[list[int]]:
    """Draw `group` completions of each prompt, whose running number keys its noise.

    The policy chooses its EOS like any other token, so EOS is part of the completion and is
    trained. A completion without one was cut off by its length.
    """
    rows = [prompt for prompt in prompts for _ in range(args.group)]
    width = max(map(len, rows))
    # Padding on the left, so that the newest token of all rows is in the last column.
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    real = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    completions: list[list[int]] = [[] for _ in rows]
    cache = None
    for t in range(args.longest):
        places = (real.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        out = model(
            input_ids=ids.to(model.device),
            attention_mask=real.to(model.device),
            position_ids=places.to(model.device),
            past_key_values=cache,
            use_cache=True,
        )
        cache = out.past_key_values
        cdf = out.logits[:, -1].double().softmax(-1).cumsum(-1).cpu()  # (B,V)
        keys = [(numbers[i // args.group], i % args.group) for i in range(len(rows))]
        aim = torch.tensor([noise(args.seed, *key, t) for key in keys]).double()[:, None]
        drawn = torch.searchsorted(cdf, aim * cdf[:, -1:], right=True)
        for completion, token in zip(completions, drawn.flatten().tolist(), strict=True):
            if completion[-1:] != [eos]:
                completion.append(token)
        if all(completion[-1] == eos for completion in completions):
            break
        ids, real = drawn, torch.cat([real, torch.ones_like(drawn)], dim=1)
    return completions


# ------------------------------------------------------------- 2. rows and their log-probabilities


@dataclass
class Rows:
    """Prompts and completions, (B,S) each; `acts` is True where the policy chose the token."""

    ids: Tensor
    real: Tensor
    acts: Tensor

    def __getitem__(self, part: slice) -> "Rows":
        return Rows(self.ids[part], self.real[part], self.acts[part])


def rows_of(prompts: list[list[int]], completions: list[list[int]], device: Any) -> Rows:
    """Lay prompts and completions out, padded on the right."""
    pairs = list(zip(prompts, completions, strict=True))
    width = max(len(p) + len(c) for p, c in pairs)
    rest = [width - len(p) - len(c) for p, c in pairs]
    ids = [p + c + [0] * r for (p, c), r in zip(pairs, rest, strict=True)]
    real = [[1] * (width - r) + [0] * r for r in rest]
    acts = [[0] * len(p) + [1] * len(c) + [0] * r for (p, c), r in zip(pairs, rest, strict=True)]
    tensors = [torch.tensor(x, device=device) for x in (ids, real, acts)]
    return Rows(tensors[0], tensors[1], tensors[2].bool())


def logprobs_of(model: Any, rows: Rows) -> Tensor:
    """Return log pi of each token given what comes before it, (B,S-1); 0 where it is no action.

    The logits at position t - 1 are about token t: they and the mask are shifted by one.
    """
    logits = model(input_ids=rows.ids, attention_mask=rows.real).logits[:, :-1]
    chosen = logits.log_softmax(-1).gather(2, rows.ids[:, 1:, None]).squeeze(2)
    return torch.where(rows.acts[:, 1:], chosen, 0.0)


# ---------------------------------------------------------------------------------- 3. the critic


class Critic(torch.nn.Module):
    """A model of the value of every prefix: a copy of the policy's trunk with a new head.

    The head begins at 0, so that an untrained critic says nothing rather than noise.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.trunk = copy.deepcopy(model.base_model)
        self.head = torch.nn.Linear(model.config.hidden_size, 1, dtype=model.dtype)
        torch.nn.init.zeros_(self.head.weight)
        torch.nn.init.zeros_(self.head.bias)
        self.to(model.device)

    def forward(self, rows: Rows) -> Tensor:
        """Return V_t, the value of the prefix before token t, (B,S-1); 0 for no action."""
        hidden = self.trunk(input_ids=rows.ids, attention_mask=rows.real).last_hidden_state
        return torch.where(rows.acts[:, 1:], self.head(hidden[:, :-1]).squeeze(2), 0.0)


# ---------------------------------------------------------------- 4. rewards, advantages and losses


def at_end(scores: Tensor, acts: Tensor) -> Tensor:
    """Place the score of each completion at its last token, (B,) -> (B,S-1)."""
    last = acts.shape[1] - 1 - acts.flip(1).int().argmax(1)
    return torch.zeros(acts.shape, dtype=scores.dtype, device=scores.device).scatter(
        1, last[:, None], scores[:, None]
    )


def gae(rewards: Tensor, values: Tensor, acts: Tensor, args: Config) -> tuple[Tensor, Tensor]:
    """Estimate advantages (Schulman et al. 2016, Eq. 16) and the critic's targets, (B,S-1) each.

        delta_t = r_t + V_{t+1} - V_t
        A_t     = delta_t + lam A_{t+1},   R_t = A_t + V_t

    After the last token of a completion there is nothing: V and A are 0 there.
    """
    advantages = torch.zeros_like(values)
    value_after = advantage_after = torch.zeros_like(values[:, 0])
    for t in reversed(range(values.shape[1])):
        delta = rewards[:, t] + value_after - values[:, t]
        here = torch.where(acts[:, t], delta + args.lam * advantage_after, 0.0)
        advantages[:, t] = advantage_after = here
        value_after = values[:, t]  # 0 behind the end, as it should be
    return advantages, torch.where(acts, advantages + values, 0.0)


def whitened(x: Tensor, acts: Tensor) -> Tensor:
    """Bring the advantages of all tokens of the step to mean 0 and variance 1."""
    mean, var = x[acts].mean(), x[acts].var(correction=0)
    return torch.where(acts, (x - mean) * torch.rsqrt(var + 1e-8), 0.0)


def loss_of(new: Tensor, old: Tensor, advantages: Tensor, acts: Tensor, args: Config) -> Tensor:
    """Compute the clipped surrogate of PPO, per token (B,S-1).

        rho_t  = pi(y_t) / pi_old(y_t)
        loss_t = -min(rho_t A_t, clip(rho_t, 1 - epsilon, 1 + epsilon) A_t)

    Where the ratio has left the interval on the side to which A pushes, the gradient is 0.
    """
    ratio = (new - old).exp()
    clipped = ratio.clamp(1 - args.epsilon, 1 + args.epsilon)
    return torch.where(acts, -torch.min(ratio * advantages, clipped * advantages), 0.0)


def value_loss_of(
    values: Tensor, old: Tensor, returns: Tensor, acts: Tensor, args: Config
) -> Tensor:
    """Compute the critic's squared error per token, clipped as the policy's loss is.

        V_clipped = V_old + clip(V - V_old, -value_clip, value_clip)
        loss_t    = 1/2 max((V - R)^2, (V_clipped - R)^2)

    The larger of the two, so that a value which has moved the wrong way still has a gradient.
    """
    clipped = old + (values - old).clamp(-args.value_clip, args.value_clip)
    squares = torch.max((values - returns) ** 2, (clipped - returns) ** 2)
    return torch.where(acts, 0.5 * squares, 0.0)


# ------------------------------------------------------------------------------------ 5. the loop


def train(
    model: Any,
    tokenizer: Any,
    prompts: list[str],
    reward: Callable[[list[str], list[str]], list[float]],
    args: Config,
) -> None:
    """Train a model in place.

    Args:
        prompts: texts; step s takes the next `prompts_per_step` of them, over and over.
        reward: from the texts of prompts and completions to a number for each completion.
    """
    model.eval()  # no dropout: sampling and training are the same distribution
    reference = copy.deepcopy(model)
    critic = Critic(model)
    trained = [*model.parameters(), *critic.parameters()]
    groups = [
        {"params": model.parameters(), "lr": args.learning_rate},
        {"params": critic.parameters(), "lr": args.value_learning_rate},
    ]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.0)
    tokens = [tokenizer(text)["input_ids"] for text in prompts]
    for step in range(args.steps):
        # The policy writes `group` completions of each prompt of the step.
        numbers = range(step * args.prompts_per_step, (step + 1) * args.prompts_per_step)
        chosen = [i % len(prompts) for i in numbers]
        eos = tokenizer.eos_token_id
        completions = sample(model, [tokens[i] for i in chosen], numbers, eos, args)

        # They are scored.
        repeated = [i for i in chosen for _ in range(args.group)]
        texts = tokenizer.batch_decode(completions, skip_special_tokens=True)
        scores = reward([prompts[i] for i in repeated], texts)
        rewards = torch.tensor(scores, dtype=torch.float64, device=model.device)

        # What the losses compare with: the policy before its update, and the reference.
        rows = rows_of([tokens[i] for i in repeated], completions, model.device)
        parts = [slice(i, i + args.rows_at_once) for i in range(0, len(texts), args.rows_at_once)]
        with torch.no_grad():
            old = torch.cat([logprobs_of(model, rows[part]) for part in parts])
            ref = torch.cat([logprobs_of(reference, rows[part]) for part in parts])
            values = torch.cat([critic(rows[part]) for part in parts])

        # A KL to the reference is paid at every token, the score at the last one.
        acts = rows.acts[:, 1:]
        rewards_per_token = -args.beta * (old - ref) + at_end(rewards.to(old.dtype), acts)
        advantages, returns = gae(rewards_per_token, values, acts, args)
        advantages = whitened(advantages, acts)

        # Every token of the step counts the same, however the rows are split: the sum over all
        # parts is divided by the number of all tokens.
        count = acts.sum()
        for _ in range(args.epochs):
            for part in parts:
                new = logprobs_of(model, rows[part])
                loss = loss_of(new, old[part], advantages[part], acts[part], args)
                own = critic(rows[part])
                value_loss = value_loss_of(own, values[part], returns[part], acts[part], args)
                ((loss + args.vf_coef * value_loss).sum() / count).backward()
            torch.nn.utils.clip_grad_norm_(trained, args.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
        print(f"step {step + 1}  reward {rewards.mean():.3f}  {texts[0]!r}", flush=True)


def main() -> None:
    """Teach a chat model to answer with one word, yes or no."""
    tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
    things = ("a lamp", "a horse", "an apple", "a spider", "the moon", "a whale", "a bee", "a sock")
    asked = [f"Is {thing} an animal? Answer yes or no." for thing in things]
    chats = [[{"role": "user", "content": text}] for text in asked]
    how = {"tokenize": False, "add_generation_prompt": True}
    texts = [tokenizer.apply_chat_template(chat, **how) for chat in chats]

    def short(prompts: list[str], completions: list[str]) -> list[float]:
        return [float(x.strip(" .!").lower() in ("yes", "no")) for x in completions]

    train(model, tokenizer, texts, short, Config(longest=8))


if __name__ == "__main__":
    main()
