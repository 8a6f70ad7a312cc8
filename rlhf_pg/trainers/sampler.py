"""The first half of a step: sample completions of prompts and score them.

Shapes: B rows on this rank, T completion width, K sources of reward.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import (
    AbstractContextManager,
    ExitStack,
    closing,
    contextmanager,
    nullcontext,
)
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase, TrainerState

from rlhf_pg.advantages import group_stats, total_scores
from rlhf_pg.boundary.quoted import show
from rlhf_pg.config import PolicyGradientConfig
from rlhf_pg.data import Batch, Prompts, PromptSampler
from rlhf_pg.data.batch import pad_rows
from rlhf_pg.data.chat import text_of_completion, whole_turn
from rlhf_pg.failpoints import failpoint
from rlhf_pg.report.metrics import KEYS, Meter
from rlhf_pg.rewards import Rewards, sum_step_scores
from rlhf_pg.rewards.functions import RewardInputs
from rlhf_pg.rewards.scoring import PendingCalls, RewardResult, give_up
from rlhf_pg.rewards.shaping import Shaping
from rlhf_pg.rollout import (
    Completion,
    EpisodeRunner,
    RolloutEngine,
    RolloutError,
    SamplingParams,
    ToolEnvironment,
)
from rlhf_pg.rollout.engine import Copied
from rlhf_pg.runtime import FullWeights, Runtime

logger = logging.getLogger(__name__)

TAKEN = "log_metric: the run itself has a metric {}: rename it"


@dataclass
class Sampler:
    """Samples completions of prompts and scores them."""

    engine: RolloutEngine
    prompts: Prompts  # the training prompts
    order: PromptSampler  # their order
    rewards: Rewards
    shaping: Shaping
    runtime: Runtime
    args: PolicyGradientConfig
    policy: FullWeights | None  # the engine samples with these weights; None: with a copy
    tokenizer: PreTrainedTokenizerBase
    stop_token_ids: Sequence[int]  # tokens that end a completion
    progress: Callable[[], TrainerState]  # for reward functions that take it
    episode_runner: EpisodeRunner | None = None  # for a run with an environment or tools
    results: list[RewardResult] = field(default_factory=list)  # since the last `settle`
    # Reward calls under way, by group, and the batch of all these groups.
    pending: dict[int, PendingCalls] = field(default_factory=dict)
    pending_batch: Batch | None = None

    # -------------------------------------------------------------------------- the batch of a step

    def next_batch(self, first: int, meter: Meter) -> Batch:
        """Sample and score groups of `prompts_per_step` prompts, from the index `first` on.

        Raises:
            RolloutError, ValueError: on all processes, the engine or a reward function failed, or
                every episode or every call of a reward function.
        """
        args = self.args
        self.results = []
        with self.sampling():
            if args.dynamic_sampling_rounds:
                batch = self._with_spread(first, meter)
            else:
                indices = range(first, first + args.prompts_per_step)
                batch = self._sample_and_score(indices, meter)
                batch = batch.with_columns(num_prompts=len(indices))
            if args.estimator_traits.needs == "greedy":
                batch = self._with_greedy(batch, meter)
        metrics, logged = self.settle([episode.error for episode in batch.episodes])
        metrics |= batch.metrics | self.episode_metrics([batch])
        return batch.with_columns(metrics=metrics, logged_metrics=logged)

    def _sample_and_score(self, indices: range, meter: Meter) -> Batch:
        failpoint("rollout")
        with meter.time("rollout"):
            batch = self.roll_out(indices)
        failpoint("reward")
        with meter.time("reward"):
            return self.add_rewards(batch)

    def roll_out(self, indices: range) -> Batch:
        """Sample this rank's share of the prompts, in whole groups."""
        args = self.args
        mine = self.share(indices)
        rows = self.order.rows(mine)
        return self.sample(self.prompts, rows, mine, args.num_generations, args.temperature)

    def share(self, indices: Sequence[int]) -> list[int]:
        """Return this rank's share of prompts; every minibatch is split as evenly as possible."""
        count = self.args.num_mini_batches
        runtime = self.runtime
        indices_of_rank = []
        for m in range(count):
            minibatch = [index for index in indices if index % count == m]
            # The first share may be one larger; it goes to a different rank in each minibatch.
            indices_of_rank += minibatch[(runtime.rank - m) % runtime.world :: runtime.world]
        return sorted(indices_of_rank)

    # ------------------------------------------------------------------------------------- sampling

    def sample(
        self,
        prompts: Prompts,
        rows: Sequence[int],
        prompt_indices: Sequence[int],
        n: int,
        temperature: float,
    ) -> Batch:
        """Sample `n` completions, or play `n` episodes, of each of the dataset rows.

        Asynchronous rewards of a prompt begin as soon as all its completions are sampled. The
        prompt index of a row seeds the noise and names the group.
        """
        args = self.args
        runner = self.episode_runner
        device = self.runtime.device
        params = SamplingParams(
            temperature=temperature,
            top_k=args.top_k,
            top_p=args.top_p,
            min_p=args.min_p,
            max_tokens=args.max_completion_length,
            stop=args.stop,
        )
        tokens = [prompts.tokens[row] for row in rows]
        give_up(self.pending.values())  # of completions that were never scored
        self.pending = {}
        self.pending_batch = None
        with self.sampling(), self.runtime.raise_together(RolloutError):
            if runner is not None:
                examples = [prompts.rows[row] for row in rows]
                episodes = runner.play(
                    self.engine,
                    examples,
                    tokens,
                    prompt_indices,
                    n,
                    params,
                    args.seed,
                )
                return self._batch(prompts, rows, prompt_indices, episodes, device)
            groups: list[dict[int, Completion]] = [{} for _ in rows]
            try:
                with closing(
                    self.engine.stream(tokens, n, params, args.seed, prompt_indices)
                ) as stream:
                    for place, completion in stream:
                        i = place // n
                        groups[i][place % n] = completion
                        if self.rewards.run_beside and len(groups[i]) == n:
                            index = prompt_indices[i]
                            completions = [groups[i][k] for k in range(n)]
                            # On the CPU, so that sampling the others does not wait for the GPU.
                            group = self._batch(
                                prompts,
                                [rows[i]],
                                [index],
                                completions,
                                torch.device("cpu"),
                            )
                            self.pending[index] = self.rewards.begin(self._inputs(group))
            except BaseException:
                give_up(self.pending.values())
                raise
            turns = [group[k] for group in groups for k in range(n)]
            self.pending_batch = self._batch(prompts, rows, prompt_indices, turns, device)
            return self.pending_batch

    @contextmanager
    def sampling(self, copied: Copied | None = None) -> Iterator[None]:
        """Give the engine the (gathered) weights for all calls of `sample`, or those `copied`."""
        with ExitStack() as weights:
            # No process samples before all are here: one may update the server for all.
            with self.runtime.raise_together(RolloutError):
                weights.enter_context(gathered_for(self.engine, self.policy, self.runtime.device))
                weights.enter_context(self.engine.weights_synced(copied))
            self.engine.agree(self.runtime.gather_objects)
            yield

    def _batch(
        self,
        prompts: Prompts,
        rows: Sequence[int],
        prompt_indices: Sequence[int],
        samples: Sequence[Any],  # completions of one turn, or episodes
        device: torch.device,
    ) -> Batch:
        """Return completions, the same number for each row, as a batch."""
        n = len(samples) // max(1, len(rows))
        repeated = [row for row in rows for _ in range(n)]
        tokens = [prompts.tokens[row] for row in repeated]
        columns = prompts.rows[repeated]
        opened = columns.pop("prompt", [])
        has_episodes = self.episode_runner is not None
        texts = []
        fields = {}
        if has_episodes:
            fields["actions"] = [episode.trained for episode in samples]
            fields["truncated"] = [episode.truncated for episode in samples]
            fields["offsets"] = [x.offsets or [1] * len(x.tokens) for x in samples]
            tokens = [episode.prompt_ids for episode in samples]
            opened = [episode.prompt for episode in samples]
        else:
            fields["truncated"] = [turn.finish_reason == "length" for turn in samples]
        for prompt, sample in zip(opened, samples, strict=True):
            if has_episodes and not isinstance(prompt, str):
                texts.append(whole_turn(prompt, sample.messages))
            else:
                texts.append(self.prompt_and_completion(prompt, sample.tokens))
        batch = Batch.from_tokens(
            prompts=tokens,
            completions=[sample.tokens for sample in samples],
            logprobs=[sample.logprobs for sample in samples],
            groups=[index for index in prompt_indices for _ in range(n)],
            pad_token_id=self.tokenizer.pad_token_id,
            dtype=torch.promote_types(getattr(torch, self.args.dtype), torch.float32),
            device=device,
            **fields,
        )
        if self.args.agent_credit == "branch":
            lines = pad_rows([sample.lines for sample in samples], 0)[0]
            batch = batch.with_columns(lines=lines.to(device))
        return batch.with_columns(
            prompts=[prompt for prompt, _ in texts],
            completions=[completion for _, completion in texts],
            columns=columns,
            dataset_rows=repeated,
            episodes=samples if has_episodes else (),
        )

    # -------------------------------------------------------------------------------------- rewards

    def add_rewards(self, batch: Batch) -> Batch:
        """Add raw scores (B,T,K), and log the metrics of reward functions.

        A score is at the last token of the text that it judges, with NaN elsewhere. A completion
        that no function scored, because some failed, is masked out of the losses. ValueError on all
        processes if a reward function failed.
        """
        with self.runtime.raise_together(ValueError):
            paid = None
            if self.rewards.has_environment and self.episode_runner is not None:
                paid = self.episode_runner.rewards(batch.episodes)
            begun = {}
            if batch is self.pending_batch:
                begun = self.pending
                self.pending = {}
                self.pending_batch = None
            result = self.rewards.score(
                self._inputs(batch),
                batch.action_mask,
                paid,
                batch.groups.tolist(),
                begun,
            )
            for name in result.metrics:
                if name in KEYS or name.startswith("eval_"):  # refused before training on the batch
                    raise ValueError(TAKEN.format(show(name)))
            scores = self.shaping.bound(result.scores)
            self.results.append(result)
        if result.lost.any():
            known = ~result.lost.to(batch.action_mask.device)
            mask = batch.action_mask & known[:, None]
            batch = batch.with_columns(action_mask=mask)
        scores = self.shaping.add_penalties(scores.to(batch.sampler_logprobs), batch)
        return batch.with_columns(scores=scores, logged=result.extra)

    def _inputs(self, batch: Batch) -> RewardInputs:
        ids = batch.token_lists()
        played = (episode.environment for episode in batch.episodes)
        environments = [getattr(one, "trl_instance", one) for one in played]
        if all(one is None or type(one) is ToolEnvironment for one in environments):
            environments = []
        return RewardInputs(
            batch.prompts,
            batch.completions,
            ids,
            batch.columns,
            ended=[bool(row) and row[-1] in self.stop_token_ids for row in ids],
            truncated=batch.truncated.tolist(),
            environments=environments or None,
            state=self.progress(),
        )

    def prompt_and_completion(self, prompt: Any, ids: Sequence[int]) -> tuple[Any, Any]:
        """Return a prompt and its single-turn completion, both as text or both as messages."""
        skips = self.args.skip_special_tokens
        text = text_of_completion(ids, self.tokenizer, skips, self.stop_token_ids)
        if isinstance(prompt, str):
            return prompt, text
        return whole_turn(prompt, [{"role": "assistant", "content": text}])

    def settle(
        self, errors: Sequence[str | None] = ()
    ) -> tuple[dict[str, float], dict[str, float]]:
        """Return metrics of failed calls, and means of metrics that functions logged; collective.

        `rewards/{name}/failed` is the share of completions on which a function failed. ValueError
        on all processes if every call failed, or every episode (its entry in `errors` is not None).
        """
        results = self.results
        self.results = []
        logged: dict[str, list[float]] = {}
        for result in results:
            for name, numbers in result.metrics.items():
                logged.setdefault(name, []).extend(numbers)
        # Sum and count of every mean, by kind and name; processes may have logged other names.
        sums = {("logged", name): (sum(x), len(x)) for name, x in logged.items()}
        if self.args.on_reward_error != "error":
            called = sum(result.called for result in results)
            for source in self.rewards.sources:
                failed = sum(result.failed[source.name] for result in results)
                sums["calls", f"rewards/{source.name}/failed"] = (
                    failed,
                    called,
                )
        if errors:
            sums["episodes", ""] = (
                len(errors) - errors.count(None),
                len(errors),
            )
        means: dict[str, dict[str, float]] = {
            "logged": {},
            "calls": {},
            "episodes": {},
        }
        of_ranks = self.runtime.gather_objects(sums)
        for kind, name in sorted(set().union(*of_ranks)):
            pairs = [of_rank.get((kind, name), (0, 0)) for of_rank in of_ranks]
            total, count = map(sum, zip(*pairs, strict=True))
            means[kind][name] = total / max(count, 1)

        failure = next((x.first_failure for x in results if x.first_failure), None)
        if failure:
            logger.warning("a reward function failed: %s", failure)
        firsts = {
            "calls": failure,
            "episodes": next(filter(None, errors), None),
        }
        for kind, what in (
            ("calls", "call of a reward function"),
            ("episodes", "episode"),
        ):
            if set(means[kind].values()) == {1.0}:
                with self.runtime.raise_together(ValueError):
                    if first := firsts[kind]:
                        raise ValueError(f"every {what} of the batch failed, the first: {first}")
        return means["calls"], means["logged"]

    def episode_metrics(self, parts: Sequence[Batch]) -> dict[str, float]:
        """Compute metrics of episodes over all processes; empty without environment or tools."""
        if self.episode_runner is None:
            return {}
        episodes = [episode for part in parts for episode in part.episodes]
        return self.episode_runner.metrics(episodes, self.runtime)

    # ----------------------------------------------------------- dynamic sampling, greedy baseline

    def _with_spread(self, first: int, meter: Meter) -> Batch:
        """Sample until enough groups have scores that differ (DAPO; Yu et al. 2025, section 3.2).

        A group is set aside if the reward functions give all its completions the same total score
        (Eq. 11), before penalties: length alone makes no answer right. It is replaced by a new
        prompt, for at most `dynamic_sampling_rounds` rounds. If groups are still missing, the
        earliest of those set aside are used, so every step has the same number. The groups are
        renumbered from the first index of the step, which keeps minibatches equally large.
        """
        args = self.args
        runtime = self.runtime
        parts: list[Batch] = []
        kept: list[int] = []
        aside: list[int] = []
        end = first
        while len(kept) < args.prompts_per_step and len(parts) <= args.dynamic_sampling_rounds:
            indices = range(end, end + args.prompts_per_step - len(kept))
            parts.append(self._sample_and_score(indices, meter))
            constant = self._constant_groups(parts[-1])
            kept += [index for index in indices if index not in constant]
            aside += [index for index in indices if index in constant]
            end = indices.stop
        chosen = sorted(kept + aside[: args.prompts_per_step - len(kept)])
        places = {index: first + i for i, index in enumerate(chosen)}
        sampled = sum(int(runtime.all_reduce_sum(part.num_tokens)) for part in parts)
        together = Batch.concat(parts, self.tokenizer.pad_token_id)
        own = together.groups.tolist()
        rows = [i for i, group in enumerate(own) if group in places]
        groups = together.groups.new_tensor([places[own[i]] for i in rows])
        batch = together.pick(rows, groups=groups)
        return batch.with_columns(
            num_prompts=end - first,
            other_tokens=sampled - int(runtime.all_reduce_sum(batch.num_tokens)),
            metrics={
                "sampling/rounds": len(parts) - 1,
                "sampling/kept_fraction": len(kept) / (end - first),
            },
        )

    def _constant_groups(self, part: Batch) -> set[int]:
        """Find the groups of all ranks whose completions share one score before penalties."""
        said = sum_step_scores(self.shaping.weigh(part.scores))
        paid, _ = self.runtime.gather(said)
        groups, _ = self.runtime.gather(part.groups)
        # On the CPU, where sums are deterministic: if processes disagreed, they would deadlock.
        paid = paid.cpu()
        groups = groups.cpu()
        scores = total_scores(paid, groups)
        constant = group_stats(scores, ~scores.isnan(), groups).constant
        return set(groups[constant].tolist())

    def _with_greedy(self, batch: Batch, meter: Meter) -> Batch:
        """Add the score of a greedy completion of every prompt, for the baseline."""
        groups = batch.groups.tolist()
        firsts = [i for i, group in enumerate(groups) if i == 0 or groups[i - 1] != group]
        rows, indices = ([x[i] for i in firsts] for x in (batch.dataset_rows, groups))
        with meter.time("rollout"):
            greedy = self.sample(self.prompts, rows, indices, n=1, temperature=0.0)
        with meter.time("reward"):
            greedy = self.add_rewards(greedy)
        tokens = batch.other_tokens + int(self.runtime.all_reduce_sum(greedy.num_tokens))
        return batch.with_columns(greedy=greedy, other_tokens=tokens)


def gathered_for(
    engine: RolloutEngine, policy: FullWeights | None, device: torch.device
) -> AbstractContextManager[None]:
    """Gather what an engine reads of sharded weights; collective."""
    if policy is None or engine.gathers == "none":
        return nullcontext()
    return policy.gathered(device, engine.gathers == "trained")


def merge_logged(metrics: dict[str, Any], logged: dict[str, float]) -> dict[str, Any]:
    """Merge metrics with those of reward functions; ValueError if a name is in both."""
    for name in logged:
        if name in metrics:
            raise ValueError(TAKEN.format(show(name)))
    return metrics | logged
