"""The loop of TRL 0.11's PPOTrainer, `generate` and then `step`, on the parts of rlhf_pg.

    python examples/classic_ppo.py  # a tiny model on a CPU, in a minute

`PPOTrainer` makes the same updates: from the same weights and seed both end with the same weights
(tests/examples/test_classic_ppo.py). It adds evaluation, checkpoints, the report, several processes
and the other keys of `PPOConfig`. Here beta always adapts, as it did by default in TRL 0.11.
"""

import torch
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_pg import PPOConfig
from rlhf_pg.advantages import gae
from rlhf_pg.data import Batch, Row
from rlhf_pg.kl import AdaptiveKLController, kl_estimate
from rlhf_pg.losses import clipped_surrogate, token_weights, value_loss
from rlhf_pg.masking import masked_var, whiten
from rlhf_pg.models.critic import ActorCritic, new_critic
from rlhf_pg.models.loading import stop_token_ids
from rlhf_pg.models.policy import Policy, Reference
from rlhf_pg.rewards.scores import at_end
from rlhf_pg.rollout import Completion, NativeEngine, SamplingParams
from rlhf_pg.tasks.tiny import character_tokenizer, tiny_decoder


class ClassicPPO:
    """A policy, its critic and its reference, to be trained on completions with your scores."""

    def __init__(
        self, args: PPOConfig, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
    ) -> None:
        self.args, self.pad, self.drawn = args, tokenizer.pad_token_id, 0
        shared, start = args.critic == "shared", args.value_model_name_or_path
        critic = new_critic(model, tokenizer, model.dtype, shared, start)
        policy = Policy(model, args.temperature)
        self.models = ActorCritic(policy, critic).eval()  # no dropout, in sampling or in training
        self.reference = Reference(policy)
        self.engine = NativeEngine(model, stop_token_ids(model, tokenizer), self.pad)
        self.beta = AdaptiveKLController(args.beta, args.kl_target, args.kl_horizon)
        groups = [{"params": policy.parameters(), "lr": args.learning_rate}]
        rate = args.value_learning_rate or args.learning_rate
        groups.append({"params": critic.parameters(), "lr": rate})
        self.optimizer = torch.optim.AdamW(groups, weight_decay=0.0)

    def generate(self, queries: list[list[int]]) -> list[Completion]:
        """Sample a response to each query; both are lists of token ids (`response.tokens`)."""
        args, numbers = self.args, range(self.drawn, self.drawn + len(queries))
        self.drawn += len(queries)  # each draw has noise of its own
        params = SamplingParams(args.temperature, max_tokens=args.max_completion_length)
        return self.engine.generate(queries, 1, params, args.seed, numbers)

    def step(
        self, queries: list[list[int]], responses: list[Completion], scores: list[float]
    ) -> dict[str, float]:
        """Train on scored responses, `num_iterations` updates; return statistics."""
        args = self.args
        rows = [
            Row(prompt_ids=query, ids=response.tokens, logprobs=response.logprobs, group=i)
            for i, (query, response) in enumerate(zip(queries, responses, strict=True))
        ]
        batch = Batch.of(rows, self.models.policy.model.device)
        mask = batch.action_mask  # (B,T), as everything below
        with torch.no_grad():
            old = self.models(batch)
            ref = self.reference(batch)
        kl = kl_estimate(old.logprobs, ref, args.kl_estimator)
        paid = at_end(torch.tensor(scores).to(kl), mask).nan_to_num()  # at the last token
        rewards = paid - self.beta.coef * kl
        advantages, returns = gae(rewards, old.values, mask, args.gamma, args.lam)
        batch = batch.with_columns(
            old_logprobs=old.logprobs,
            values=old.values,
            advantages=whiten(advantages, mask),
            returns=returns,
        )
        tokens = 8192 if args.micro_batch_tokens == "auto" else args.micro_batch_tokens
        for _ in range(args.num_iterations):
            for rows in batch.micro_batches(tokens, window=0):
                part = batch.select(rows)
                new, acts = self.models(part), part.action_mask
                policy_loss, _ = clipped_surrogate(
                    new.logprobs, part.old_logprobs, part.advantages, acts, args.epsilon
                )
                critic_loss, _ = value_loss(
                    new.values, part.values, part.returns, acts, args.cliprange_value
                )
                weights = token_weights(acts, "token_mean", denominator=mask.sum())
                ((policy_loss + args.vf_coef * critic_loss) * weights).sum().backward()
            clip_grad_norm_(self.models.parameters(), args.max_grad_norm)
            self.optimizer.step()
            self.optimizer.zero_grad()
        k1 = (old.logprobs - ref).double().sum(1).mean().item()  # of a whole response
        self.beta.update(k1, len(queries))
        unexplained = masked_var(returns - old.values, mask) / masked_var(returns, mask)
        stats = {"score": sum(scores) / len(scores), "kl": k1, "beta": self.beta.coef}
        return stats | {"explained_variance": 1 - unexplained.item()}


def main() -> None:
    """Teach a tiny model to repeat the last digit of a number."""
    torch.manual_seed(0)
    tokenizer = character_tokenizer("0123456789?")
    sizes = {"max_completion_length": 8, "micro_batch_tokens": 4096}
    args = PPOConfig(learning_rate=1e-3, beta=0.01, lam=1.0, **sizes)
    trainer = ClassicPPO(args, tiny_decoder(tokenizer), tokenizer)
    for texts in DataLoader([f"{n}?" for n in range(1000)] * 4, batch_size=128, shuffle=True):
        queries = tokenizer(texts)["input_ids"]
        responses = trainer.generate(queries)
        answers = tokenizer.batch_decode([response.tokens for response in responses])
        scores = [said.count(text[-2]) / 8 for text, said in zip(texts, answers, strict=True)]
        stats = trainer.step(queries, responses, scores)
        print("  ".join(f"{name} {value:.3f}" for name, value in stats.items()), flush=True)


if __name__ == "__main__":
    main()
