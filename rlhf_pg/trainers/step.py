"""One training step, from prompts to updated weights; it reads from top to bottom.

Each algorithm is a subclass with its equations. Shapes: B rows on this rank, N on all ranks, T
completion width, K sources of reward (functions, then penalties). A row is one completion.
"""

import logging
import math
from collections.abc import Callable, Sequence
from functools import cached_property
from os import PathLike
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_pg.advantages import AdvantageInputs, discounted_returns
from rlhf_pg.boundary.quoted import quote
from rlhf_pg.config import PolicyGradientConfig
from rlhf_pg.config.foreign_keys import FOREIGN_ARGUMENTS
from rlhf_pg.data import Batch
from rlhf_pg.data.inputs import make_sets
from rlhf_pg.episodes import EnvironmentFactory, EnvironmentSource, Tool
from rlhf_pg.kl import IMPOSSIBLE, kl_estimate, kl_loss
from rlhf_pg.losses import SQUARE, Loss, against_sampler, high_entropy, ratio_terms
from rlhf_pg.masking import whiten
from rlhf_pg.models.policy import PolicyOutput
from rlhf_pg.report.metrics import KEYS, Meter, step_metrics
from rlhf_pg.rewards import sum_step_scores
from rlhf_pg.rewards.scoring import RewardSource
from rlhf_pg.run.loop import Callback, check_callbacks
from rlhf_pg.run.objective import (
    Objective,
    Term,
    draw_texts,
    entropy,
    likelihood,
    text_tokens,
    unchosen_tokens,
)
from rlhf_pg.run.optimizer import Optimizers
from rlhf_pg.runtime import broadcasts_failure
from rlhf_pg.trainers.evaluator import AnswerFunction, evaluate_set, stripped_text
from rlhf_pg.trainers.inputs import Inputs
from rlhf_pg.trainers.parts import make_parts
from rlhf_pg.trainers.rollout_loop import RolloutLoop
from rlhf_pg.trainers.sampler import merge
from rlhf_pg.trainers.teacher import privileged_batch

logger = logging.getLogger(__name__)

UNKNOWN = "is not an argument of a trainer"
REPLACED = {  # methods that subclasses once overrode, and those in their place
    "estimate": "credit",
    "score": "infer",
    "loss": "a term of `terms`",
    "regularizer": "a term of `terms`",
    "new_critic": "rlhf_pg.trainers.parts.new_critic",
    "prompts_of": "`prompt_loader.load`",
    "eval_prompts": "`prompt_loader.load_sets`",
}


class PolicyGradientTrainer(RolloutLoop):
    """Train a language model on rewards.

    Args:
        model: a path, a Hub id or a loaded model (trained in place, cast to `args.dtype`); by
            default `args.model_name_or_path`.
        reward_funcs: a callable `(prompts, completions, completion_ids, **columns)` returning a
            list of floats (or None where it does not apply), sync or async; or a reward model (a
            sequence classifier with one output: path, Hub id or loaded); or a list of these. In
            place of a float, a list with one float or None per token scores steps.
        args: the config; by default the algorithm's defaults.
        train_dataset: a `Dataset` or a list of dicts with a column `prompt` (strings or lists of
            chat messages). The other columns go to the reward functions, repeated for every
            completion. By default the dataset that the config names.
        eval_dataset: likewise, for `evaluate`; several by name in a dict.
        processing_class: the tokenizer; by default the one saved with the model.
        reward_processing_classes: tokenizers of the reward models: one, or a list with one entry
            per reward function (None for a plain function, or for the one saved with the model).
        peft_config: a `peft` config, to train an adapter on frozen weights; `args.use_peft` makes
            one. A model's existing adapter is trained on, and a copy of it is the reference.
        callbacks: see `Callback`.
        quantization_config: a `BitsAndBytesConfig` in 4 bits, for QLoRA; `args.load_in_4bit` makes
            one.
        optimizers: your own optimizer (of all trained parameters) and learning-rate scheduler, or
            None for AdamW and `args.lr_scheduler_type`. The scheduler advances once per step.
        tools: functions with type hints and docstrings, sync or async, that the policy may call
            through its chat template.
        environment_factory: makes the `Environment` of one episode, which answers the policy's
            turns. Its rewards are the source "environment", after the reward functions, which may
            then be empty. Wrap TRL's environments in
            `rlhf_pg.episodes.adapters.TrlEnvironments`.
        privileged_prompt: a function that returns the prompts that the teacher alone sees, for the
            completions of one prompt (`rlhf_pg.trainers.teacher.privileged_batch`).
        agent_program: called for each episode, in place of turns that the trainer plays, as
            `agent_program(row, endpoint)`, plain or async. It asks `endpoint.base_url` with
            `endpoint.api_key` for `endpoint.model`, as it would ask OpenAI, and returns a reward, a
            list with one for each answer, or None if reward functions judge. Or a command
            (docs/agents.md).
        value_model: see `PPOTrainer`.

    Raises:
        ValueError: an input is wrong; the message names it. Nothing has been computed yet.
    """

    trains: ClassVar[bool] = True  # False for an evaluation

    def __init_subclass__(cls, **options: Any) -> None:
        """Refuse methods that a step does not call any more (TypeError)."""
        super().__init_subclass__(**options)
        for name, successor in REPLACED.items():
            if hasattr(cls, name):  # its own, or that of a mixin
                raise TypeError(
                    f"{cls.__name__}.{name} would not be called: since November 2026 "
                    f"{successor} is in its place (CONTRIBUTING.md, A new algorithm)"
                )

    @broadcasts_failure
    def __init__(
        self,
        model: str | PathLike[str] | PreTrainedModel | None = None,
        reward_funcs: RewardSource | Sequence[RewardSource] = (),
        args: PolicyGradientConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        reward_processing_classes: Any = None,
        peft_config: Any = None,
        callbacks: Sequence[Callback] | None = None,
        optimizers: Optimizers = (None, None),
        quantization_config: Any = None,
        tools: Sequence[Tool] | None = None,
        environment_factory: EnvironmentFactory | EnvironmentSource | None = None,
        privileged_prompt: Callable[..., Any] | None = None,
        agent_program: Callable[..., Any] | str | None = None,
        value_model: Any = None,
        **others: Any,
    ) -> None:
        if value_model is not None and not self.config_type.has_critic:
            raise TypeError(f"{type(self).__name__}: value_model is an argument of PPOTrainer")
        if others:
            hints = [f"{name!r} {FOREIGN_ARGUMENTS.get(name, UNKNOWN)}" for name in others]
            raise TypeError(f"{type(self).__name__}: {'; '.join(hints)}")
        if args is None:
            args = self.config_type()
        if not isinstance(args, self.config_type):
            got = quote(f"{type(args).__module__}.{type(args).__name__}")
            raise ValueError(f"args must be rlhf_pg's {self.config_type.__name__}, got {got}")
        check_callbacks(callbacks or ())
        inputs = Inputs(
            model=model,
            reward_funcs=reward_funcs,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            reward_processing_classes=reward_processing_classes,
            peft_config=peft_config,
            optimizers=optimizers,
            quantization_config=quantization_config,
            tools=tools,
            environment_factory=environment_factory,
            privileged_prompt=privileged_prompt,
            agent_program=agent_program,
            value_model=value_model,
        )
        super().__init__(make_parts(args, inputs, self.trains), callbacks or ())

    @cached_property
    def objective(self) -> Objective:
        """The objective of every update: the sum of `terms`."""
        objective = Objective(
            self.terms(),
            aggregation=self.args.aggregation,
            max_completion_length=self.args.max_completion_length,
            all_sum=self.runtime.all_reduce_sum,
        )
        if any(term.entropy_gradient for term in objective.terms.values()):
            self.learner.policy.keep_entropy_gradient()
        return objective

    # ------------------------------------------------------------------------------ the one step

    def step(self) -> dict[str, Any]:
        """Take one step: a rollout batch and every update on it; return its metrics.jsonl line."""
        meter = Meter()
        state = self.state
        if self.ahead is None:
            batch = self.sampler.next_batch(state.prompt_index, meter)  # ids, raw scores (B,T,K)
        else:
            batch = self.ahead.next(state.step, state.prompt_index, self.total_steps, meter)
        return self.learn(batch, meter)

    def learn(self, batch: Batch, meter: Meter) -> dict[str, Any]:
        """Take the second half of a step, on scored completions."""
        with meter.time("score"):
            batch = self.infer(batch)  # log-probabilities and values (B,T)
            batch = self.credit(batch, meter)  # rewards, advantages (B,T)  <- the algorithm
        with meter.time("update"):
            metrics = self.update(self.drop_truncated(batch), meter)  # self.objective <- algorithm
        for observe in self.observers:  # the record of the step
            observe(batch)
        return self.finish_step(batch, metrics, meter)  # counters, controllers, metrics

    def infer(self, batch: Batch) -> Batch:
        """Add the models' log-probabilities and values of completions, (B,T); collective."""
        teacher_batch = None
        if self.learner.teacher is not None:
            rewards = self.shaping.paid(batch.scores).nansum(1).tolist()
            tools = self.episode_runner.tools if self.episode_runner else ()
            with self.runtime.raise_together(ValueError):
                teacher_batch = privileged_batch(
                    batch,
                    self.privileged_prompt,
                    rewards,
                    self.processing_class,
                    tools,
                    self.teacher_prompt_limit,
                )
        batch = self.learner.infer(batch, teacher_batch)
        self.agreement.begin(batch)
        return batch

    # --------------------------------------------------- credit: from scores to advantages

    def credit(self, batch: Batch, meter: Meter) -> Batch:
        """Turn scores into rewards per token, and these into advantages and the critic's targets;
        collective.
        """
        args = self.args
        mask = batch.action_mask
        self.shaping.observe(batch.scores, self.gather)
        shaped = self.shaping.shape(batch.scores, batch)  # (B,T,K)
        step_scores, _ = self.shaping.steps(shaped)  # (B,T), summed over sources
        minus_kl = self.kl_reward(batch, meter)
        rewards = minus_kl + step_scores
        teacher_rewards = self.teacher_reward(batch, meter)
        if teacher_rewards is not None and self.critic is not None:
            rewards = rewards + teacher_rewards
            teacher_rewards = None
        if args.whiten_rewards:  # divide by their standard deviation over the step
            stats = self.runtime.mean_and_var(rewards, mask)
            rewards = whiten(rewards, mask, shift_mean=False, stats=stats)
        batch = batch.with_columns(rewards=rewards)

        inputs = self.advantage_inputs(batch, shaped, minus_kl)
        parts = [inputs]
        if batch.branches is not None:  # the tokens of each branch of an agent by themselves
            here = int(batch.branches.max()) + 1 if len(batch.branches) else 0
            parts = []
            for number in range(max(self.runtime.gather_objects(here))):
                branch = batch.branches == number
                parts.append(self.advantage_inputs(batch, shaped, minus_kl, branch))
        advantages = torch.zeros_like(rewards)
        for part in parts:
            advantages = advantages + self.advantages(part)  # (B,T)  <- the algorithm
            if teacher_rewards is not None:  # added after the baselines, which compare completions
                to_go = discounted_returns(teacher_rewards, part.mask, args.teacher_gamma)
                advantages = advantages + to_go
        returns, metrics = self.critic_targets(inputs, advantages)  # (B,T), or None
        if args.normalize_advantages:
            stats = self.runtime.mean_and_var(advantages, mask)
            advantages = whiten(advantages, mask, stats=stats)
        if batch.entropies is not None:
            trained = self.drop_truncated(batch).action_mask
            everyone = self.gather(batch.entropies[trained])
            kept = high_entropy(batch.entropies, everyone, args.top_entropy_quantile)
            advantages = torch.where(kept, advantages, 0.0)
        return batch.with_columns(
            totals=inputs.scores[inputs.rows],  # this process's rows of all
            advantages=advantages,
            returns=returns,
            # None for a single update, whose own forward pass gives them: the ratio is exactly 1.
            # They are kept where the KL after it is measured against them.
            old_logprobs=batch.old_logprobs if args.compares_with_old else None,
            metrics=batch.metrics | metrics | self.baseline_metrics(inputs),
        )

    def baseline_metrics(self, inputs: AdvantageInputs) -> dict[str, float]:
        """Return metrics of baselines that are not of the step's own completions; collective."""
        metrics = {}
        if inputs.greedy_scores is not None:
            paid = self.gather(inputs.greedy_scores.nansum(1))
            metrics["rewards/greedy"] = paid.mean().item()
        if self.moving_average is not None:
            applies = ~inputs.scores.isnan().all(1)
            metrics["return"] = inputs.scores.nansum(1)[applies].mean().item()
            metrics["moving_average"] = self.moving_average.value
        return metrics

    def gather(self, x: Tensor) -> Tensor:
        """Return the rows of all ranks."""
        return self.runtime.gather(x)[0]

    def kl_reward(self, batch: Batch, meter: Meter) -> Tensor:
        """Return the KL term of every token's reward: -beta KL_t, (B,T)."""
        args = self.args
        mask = batch.action_mask
        if args.kl_controller != "fixed":  # follows the mean of the summed k1 of completions
            sums = (batch.old_logprobs - batch.ref_logprobs).double().sum(1)  # 0 in masked slots
            meter.add("kl/completion", sums.sum(), mask.any(1).sum())
        if batch.ref_logprobs is None or args.kl_placement != "reward":
            return torch.zeros_like(batch.sampler_logprobs)
        kl = kl_estimate(batch.old_logprobs, batch.ref_logprobs, args.kl_estimator)
        meter.add_masked("kl", kl, mask)
        return -self.controllers["beta"] * kl

    def teacher_reward(self, batch: Batch, meter: Meter) -> Tensor | None:
        """Return the teacher's term of every token's reward: coef (log q - log p), (B,T)."""
        if batch.teacher_logprobs is None or self.args.teacher_placement != "reward":
            return None
        log_ratio = batch.teacher_logprobs.clamp(min=IMPOSSIBLE) - batch.old_logprobs
        log_ratio = torch.where(batch.action_mask & ~log_ratio.isnan(), log_ratio, 0.0)
        meter.add_masked("teacher/divergence", -log_ratio, batch.action_mask)
        return self.args.teacher_coef * log_ratio

    def advantage_inputs(
        self,
        batch: Batch,
        shaped: Tensor,
        minus_kl: Tensor,
        branch: Tensor | None = None,
    ) -> AdvantageInputs:
        """Gather what baselines compare, the scores of all ranks, for all action tokens or for
        those of a branch (B,T); collective.
        """
        actions = batch.action_mask
        step_scores, steps = self.shaping.steps(shaped)
        values, end = self.values_of(batch)
        if branch is not None:
            actions = actions & branch
            steps = steps & branch
            shaped = shaped.where(branch[:, :, None], torch.nan)
            if end is not None:  # it is for the branch of the last action
                last = (batch.action_ends[:, None] - 1).clamp(min=0)
                end = end * actions.gather(1, last).squeeze(1)
        # A row without policy tokens has neither a score nor a KL.
        kl_of_row = (minus_kl * actions).sum(1).masked_fill(~actions.any(1), torch.nan)
        totals = torch.cat([sum_step_scores(shaped), kl_of_row[:, None]], dim=1)  # (B,K+1)
        groups, rows = self.runtime.gather(batch.groups)
        greedy_scores = None
        if batch.greedy is not None:  # of each row's prompt, with 0 for the KL: (B,K+1)
            paid = sum_step_scores(self.shaping.shape(batch.greedy.scores, batch.greedy))
            _, inverse = torch.unique_consecutive(batch.groups, return_inverse=True)
            greedy_scores = nn.functional.pad(paid[inverse], (0, 1))
        return AdvantageInputs(
            rewards=batch.rewards,
            mask=actions,
            scores=self.gather(totals),
            groups=groups,
            rows=rows,
            action_tokens=self.gather(actions.sum(1)),
            weights=nn.functional.pad(self.shaping.weights, (0, 1), value=1.0),
            step_scores=step_scores,
            step_mask=steps,
            values=values,
            bootstrap_value=end,
            greedy_scores=greedy_scores,
            moving_average=self.moving_average and self.moving_average.value,
        )

    def drop_truncated(self, batch: Batch) -> Batch:
        """Leave truncated completions out of the losses (`mask_truncated_completions`), but not out
        of statistics and attention.
        """
        if not self.args.mask_truncated_completions:
            return batch
        return batch.with_columns(action_mask=batch.action_mask & ~batch.truncated[:, None])

    def update(self, batch: Batch, meter: Meter) -> dict[str, float]:
        """Make every optimizer update on the batch of a step; return metrics of this process.

        An override must count in `learner.updates_begun` the updates that have reached the weights,
        or are about to, so that a checkpoint saved when the step fails says that it has them.
        `Learner.update` makes the agreement check; an override goes without.
        """
        return self.learner.update(
            batch,
            self.objective,
            meter,
            self.agreement.check,
        )

    def finish_step(self, batch: Batch, metrics: dict[str, Any], meter: Meter) -> dict[str, Any]:
        """Count the step, update the controllers, and reduce the metrics over all processes."""
        args = self.args
        state = self.state
        policy_frozen = self.learner.trains_critic_alone(state.step)
        metrics |= step_metrics(batch, self.shaping.names, self.gather)
        tokens = int(self.runtime.all_reduce_sum(batch.num_tokens)) + batch.other_tokens
        state.step += 1
        state.prompt_index += batch.num_prompts
        state.num_tokens += tokens
        self.learner.sync_reference(state.step)
        metrics |= batch.metrics
        means = meter.means(self.runtime.all_reduce_sum(meter.sums()))
        metrics = merge(metrics, means | meter.extremes(self.gather), "a term") | meter.seconds
        if square := metrics.pop(SQUARE, 0.0):  # (sum w)^2 / (n sum w^2), over tokens
            mean = metrics["sampling/importance_sampling_ratio/mean"]
            metrics["sampling/effective_sample_size"] = mean**2 / square
        if not policy_frozen:  # else its metrics say nothing about the coefficients
            self.controllers.update(metrics, args.prompts_per_step * args.num_generations)
        if self.moving_average is not None and math.isfinite(metrics.get("return", math.nan)):
            self.moving_average.update(metrics["return"])
        self.learner.next_rate(self.controllers["learning_rate_scale"])
        metrics |= self.controllers.metrics()
        metrics |= {
            "step": state.step,
            "num_tokens": state.num_tokens,
            "step_time": meter.age,
        }
        metrics["perf/tokens_per_second"] = tokens / metrics["step_time"]
        metrics["memory/peak_gb"] = self.runtime.peak_memory / 1e9
        self.sampler.taken |= metrics.keys()
        return merge(dict.fromkeys(KEYS) | metrics, batch.logged_metrics)

    # ------------------------ what makes it an algorithm: these, `credit` and `update` above

    def advantages(self, inputs: AdvantageInputs) -> Tensor:
        """Estimate advantages (B,T) of this rank's rows by `args.advantage_estimator`."""
        return self.estimator(inputs)

    def terms(self) -> list[Term]:
        """Return the terms of the objective, which is made once, for the first step. A subclass
        adds some, or replaces one by a later one of the same name:

            def terms(self) -> list[Term]:
                return [*super().terms(), Term(name="policy", loss=self.my_loss)]
        """
        args = self.args
        coefs = self.controllers
        terms = [Term(name="policy", loss=self.surrogate)]
        if args.has_entropy_bonus:
            bonus = Term(
                name="entropy",
                loss=entropy,
                coef=lambda: -coefs["entropy_coef"],
                entropy_gradient=True,
            )
            terms.append(bonus)
        if args.teacher_model_name_or_path and args.teacher_placement == "loss":
            terms.append(Term(name="teacher", loss=self.teacher_loss, coef=args.teacher_coef))
        if args.beta > 0 and args.kl_placement == "loss":
            terms.append(Term(name="kl", loss=self.reference_kl, coef=lambda: coefs["beta"]))
        if args.positive_nll_coef:
            terms.append(likelihood("positive_nll", self.correct_tokens, args.positive_nll_coef))
        if args.tool_output_nll_coef:
            coef = args.tool_output_nll_coef
            terms.append(likelihood("tool_output_nll", unchosen_tokens, coef))
        if args.ptx_coef:
            rows = draw_texts(self.texts, args.ptx_batch_size, args.seed, self.runtime)
            terms.append(likelihood("ptx_nll", text_tokens, args.ptx_coef, rows=rows))
        return terms

    def correct_tokens(self, batch: Batch) -> Tensor:
        """Return the tokens of completions whose functions pay more than
        `positive_nll_threshold`.
        """
        paid = self.shaping.paid(batch.scores).nansum(1)
        return batch.action_mask & (paid > self.args.positive_nll_threshold)[:, None]

    def surrogate(self, new: PolicyOutput, batch: Batch) -> Loss:
        """Compute the loss `args.policy_loss`, weighted if another engine sampled."""
        options = {}
        if "old_kl_coef" in self.policy_loss.keywords:  # bound from the config; the others stay
            options["old_kl_coef"] = self.controllers["old_kl_coef"]
        per_token, metrics = self.policy_loss(
            new.logprobs, batch.old_logprobs, batch.advantages, batch.action_mask, **options
        )
        args = self.args
        correction = args.correction_of(self.engine_name)
        if args.target_kl is not None and "approx_kl" not in metrics:  # a loss of the user's own
            olds = batch.old_logprobs
            mask = batch.action_mask
            metrics |= ratio_terms(new.logprobs, olds, batch.advantages, mask).metrics
        if correction != "none" or self.engine_name != "native" or args.rollout_ahead:
            weights, measured = against_sampler(
                batch.old_logprobs,
                batch.sampler_logprobs,
                batch.action_mask,
                correction,
                args.sampler_clip_max,
                args.sampler_clip_min,
            )
            per_token = per_token if weights is None else per_token * weights
            metrics |= measured
        return per_token, metrics | {"policy_loss": per_token.detach()}

    def teacher_loss(self, new: PolicyOutput, batch: Batch) -> Loss:
        """Return the divergence from the teacher, D_t; 0 in rows without one."""
        assert batch.teacher_logprobs is not None
        taught = batch.action_mask & ~batch.teacher_logprobs.isnan()
        divergence = new.divergence
        if divergence is None:  # from the sampled token
            divergence = kl_loss(
                new.logprobs,
                batch.old_logprobs,
                batch.teacher_logprobs,
                taught,
                "k3_ratio",
            )
        divergence = torch.where(taught, divergence, 0.0)
        return divergence, {"teacher/divergence": divergence}

    def reference_kl(self, new: PolicyOutput, batch: Batch) -> Loss:
        """Return KL_t from the reference."""
        kl = kl_loss(
            new.logprobs,
            batch.old_logprobs,
            batch.ref_logprobs,
            batch.action_mask,
            self.args.kl_estimator,
        )
        return kl, {"kl": kl}

    # ----------------------------------------------------------------------- for a critic, as PPO's

    def values_of(self, batch: Batch) -> tuple[Tensor | None, Tensor | None]:
        """Return values (B,T) and the value after the last action token (B,), in reward units."""
        return None, None

    def critic_targets(
        self, inputs: AdvantageInputs, advantages: Tensor
    ) -> tuple[Tensor | None, dict[str, float]]:
        """Return the critic's targets (B,T), in its units, from raw advantages, and metrics."""
        return None, {}

    # ----------------------------------------------------------------------------------- evaluation

    @broadcasts_failure
    def evaluate(
        self,
        eval_dataset: Any = None,
        temperature: float | None = None,
        metric_key_prefix: str = "eval",
        answer: AnswerFunction | None = None,
    ) -> dict[str, float]:
        """Score completions of every evaluation prompt, with the same noise at every call.

        There is one completion per prompt, or `args.num_generations_eval` if they are sampled.

        Args:
            eval_dataset: a dataset, or several by name; by default the trainer's.
            temperature: 0 is greedy. By default both are evaluated: the training temperature, and
                greedy under `eval_greedy_`.
            answer: extracts the answer (a string or a number) from a completion, for the majority
                vote. By default the whole text, stripped.

        Returns:
            `eval_reward`, `eval_rewards/{name}/mean`, `eval_completions/mean_length` and so on,
            and `eval_greedy_reward` and so on, over all processes. With several completions per
            prompt, n, also `eval_pass@k` for k = 1, 2, 4 ... n, `eval_best@n`, the highest reward,
            and `eval_majority@n`, that of the most frequent answer. With several datasets, the
            name follows the prefix (`eval_{name}_reward`), and `eval_reward` is their mean.

        Raises:
            ValueError: there is no evaluation dataset, a reward function failed, or `answer` is
                given for a single completion.
        """
        if answer is not None and self.args.num_generations_eval == 1:
            raise ValueError(
                "answer is for a vote: set num_generations_eval above 1, or leave it out"
            )
        sets = self.eval_sets
        if eval_dataset is not None:
            sets = self.prompt_loader.load_sets(make_sets(eval_dataset, self.args))
        if not sets:
            raise ValueError("no eval_dataset: give one to the trainer or to evaluate()")
        temperatures = {"": self.args.temperature if temperature is None else temperature}
        if temperature is None:
            temperatures["greedy_"] = 0.0
        if self.ahead is not None:
            self.ahead.drain()  # the engine has one copy of the weights
        prefix = metric_key_prefix
        metrics = dict[str, float]()
        with self.sampler.sampling():
            for name, prompts in sets.items():
                for mode, heat in temperatures.items():
                    found = evaluate_set(self.sampler, prompts, heat, answer or stripped_text)
                    start = f"{prefix}_{name}_{mode}" if name else f"{prefix}_{mode}"
                    metrics |= {f"{start}{key}": value for key, value in found.items()}
        if "" in sets:
            return metrics
        for mode in temperatures:
            rewards = [metrics[f"{prefix}_{name}_{mode}reward"] for name in sets]
            metrics[f"{prefix}_{mode}reward"] = sum(rewards) / len(rewards)
            errors = [metrics[f"{prefix}_{name}_{mode}reward_stderr"] for name in sets]
            metrics[f"{prefix}_{mode}reward_stderr"] = math.hypot(*errors) / len(errors)
        return metrics
