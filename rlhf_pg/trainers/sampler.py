"""The first half of a step: sample completions of prompts and score them.

Shapes: B rows on this rank, T completion width, K sources of reward (functions, then
penalties).
"""

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import (
    AbstractContextManager,
    ExitStack,
    closing,
    contextmanager,
    nullcontext,
)
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import TrainerState

from rlhf_pg.advantages import group_stats, total_scores
from rlhf_pg.boundary.quoted import show
from rlhf_pg.config import PolicyGradientConfig
from rlhf_pg.data import Batch, Prompts, PromptSampler
from rlhf_pg.data.batch import columns_of, numbers_of
from rlhf_pg.data.rows import Row
from rlhf_pg.episodes import ToolEnvironment
from rlhf_pg.failpoints import failpoint
from rlhf_pg.report.metrics import KEYS, Meter
from rlhf_pg.rewards import Rewards
from rlhf_pg.rewards.functions import RewardInputs
from rlhf_pg.rewards.scoring import PendingCalls, RewardResult, give_up
from rlhf_pg.rewards.shaping import Shaping
from rlhf_pg.rollout import RolloutEngine, RolloutError, SamplingParams
from rlhf_pg.rollout.engine import Copied
from rlhf_pg.rollout.players import Player
from rlhf_pg.runtime import FullWeights, Runtime

logger = logging.getLogger(__name__)

TAKEN = "{}: the run itself has a metric {}: rename it"


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
    player: Player
    progress: Callable[[], TrainerState]  # for reward functions that take it
    results: list[RewardResult] = field(default_factory=list)  # since the last `call_metrics`
    taken: set[str] = field(default_factory=lambda: {*KEYS})  # names of the run's own metrics
    # Reward calls under way, by group, and the batch of all these groups.
    pending: dict[int, PendingCalls] = field(default_factory=dict)
    pending_batch: Batch | None = None

    # -------------------------------------------------------------------------- the batch of a step

    def next_batch(self, first: int, meter: Meter, copied: Copied | None = None) -> Batch:
        """Sample and score groups of `prompts_per_step` prompts, from the index `first` on, by the
        policy or by weights `copied` from it.

        Raises:
            RolloutError, ValueError: on all processes, the engine or a reward function failed, or
                every episode failed, or every reward call.
        """
        args = self.args
        self.results = []
        with self.sampling(copied):
            if args.dynamic_sampling_rounds:
                batch = self._with_spread(first, meter)
            else:
                indices = range(first, first + args.prompts_per_step)
                batch = self._sample_and_score(indices, meter)
                batch = batch.with_columns(num_prompts=len(indices))
            if args.estimator_traits.needs == "greedy":
                batch = self._with_greedy(batch, meter)
        metrics, logged = self.call_metrics([episode.error for episode in batch.episodes])
        metrics |= batch.metrics | self.player.metrics(batch.rows, self.runtime)
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
        return self.sample(
            self.prompts,
            rows,
            mine,
            args.num_generations,
            args.temperature,
        )

    def share(self, indices: Sequence[int]) -> list[int]:
        """Return this rank's share of prompts; every minibatch of the learner, which has each
        `num_mini_batches`-th prompt, is split as evenly as possible.
        """
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
        """Sample `n` completions, or play `n` episodes, of each of the dataset rows; inside
        `sampling`.

        Rewards that run beside the trainer begin for a prompt as soon as all its rows are there.
        The prompt index of a row seeds the noise and names the group.
        """
        args = self.args
        params = SamplingParams(
            temperature=temperature,
            top_k=args.top_k,
            top_p=args.top_p,
            min_p=args.min_p,
            max_tokens=args.max_completion_length,
            stop=args.stop,
        )
        drawn = prompts.take(rows, prompt_indices)
        groups: dict[int, list[Row]] = {}  # by the index of their prompt
        give_up(self.pending.values())  # of rows that were never scored
        self.pending = {}
        with self.runtime.raise_together(RolloutError):
            try:
                with closing(self.player.play(self.engine, drawn, n, params, args.seed)) as played:
                    for group in played:
                        index = group[0].group
                        groups[index] = group
                        judged = [row for row in group if row.is_judged]
                        if self.rewards.run_concurrently and judged:
                            self.pending[index] = self.rewards.begin(self._inputs(judged))
            except BaseException:
                give_up(self.pending.values())
                raise
        together: list[Row] = []
        for index in prompt_indices:
            together += groups[index]
        batch = self.batch_of(together)
        if args.agent_credit != "branch":
            batch = batch.with_columns(branches=None)
        self.pending_batch = batch  # `add_rewards` comes next, with this very batch
        return batch

    def batch_of(self, rows: Sequence[Row], sources: int | None = None) -> Batch:
        """Return rows as a batch of this process, with their scores if they have `sources`."""
        dtype = torch.promote_types(getattr(torch, self.args.dtype), torch.float32)
        batch = Batch.of(rows, self.runtime.device, dtype, sources)
        if self.args.agent_credit == "branch" and batch.branches is None:  # no row has any here
            batch = batch.with_columns(branches=torch.zeros_like(batch.completion_ids))
        return batch

    @contextmanager
    def sampling(self, copied: Copied | None = None) -> Iterator[None]:
        """Give the engine the (gathered) weights for all calls of `sample`, or those `copied`; the
        one place where weights are handed over. Collective.
        """
        with ExitStack() as weights:
            # No process samples before all are here: one may update the server for all.
            with self.runtime.raise_together(RolloutError):
                weights.enter_context(gathered_for(self.engine, self.policy, self.runtime.device))
                weights.enter_context(self.engine.weights_synced(copied))
            self.engine.agree(self.runtime.gather_objects)
            yield
            with self.runtime.raise_together(RolloutError):
                weights.close()  # servers may have lost the weights

    # -------------------------------------------------------------------------------------- rewards

    def add_rewards(self, batch: Batch) -> Batch:
        """Add raw scores (B,T,K), and log the metrics of reward functions.

        A score is at the last token of the text that it judges, with NaN elsewhere. A completion
        that no function scored, because some failed, is masked out of the losses. ValueError on all
        processes if a reward function failed.
        """
        with self.runtime.raise_together(ValueError):
            paid = None
            if self.rewards.has_environment:
                paid = numbers_of(batch.rows, "rewards", math.nan, torch.float64)
            begun = {}
            if batch is self.pending_batch:
                begun = self.pending
                self.pending = {}
                self.pending_batch = None
            result = self.rewards.score(
                self._inputs(batch.rows),
                batch.action_mask,
                paid,
                batch.groups.tolist(),
                begun,
            )
            for name in result.metrics:
                if name in self.taken or name.startswith("eval_"):  # before training on the batch
                    raise ValueError(TAKEN.format("log_metric", show(name)))
            scores = self.shaping.bound(result.scores)
            self.results.append(result)
        if result.lost.any():
            known = ~result.lost.to(batch.action_mask.device)
            mask = batch.action_mask & known[:, None]
            batch = batch.with_columns(action_mask=mask)
        scores = self.shaping.add_penalties(scores.to(batch.sampler_logprobs), batch)
        rows = []
        for i, row in enumerate(batch.rows):
            logged = {name: column[i] for name, column in result.extra.items()}
            rows.append(replace(row, logged=logged))
        return batch.with_columns(scores=scores, rows=rows)

    def _inputs(self, rows: Sequence[Row]) -> RewardInputs:
        """Return the inputs of reward functions for some rows."""
        stops = self.player.stop_token_ids
        environments = []
        for row in rows:
            if row.episode is not None:
                played = row.episode.environment
                environments.append(getattr(played, "trl_instance", played))
        if all(x is None or type(x) is ToolEnvironment for x in environments):
            environments = []
        return RewardInputs(
            [row.prompt for row in rows],
            [row.completion for row in rows],
            [list(row.ids) for row in rows],
            columns_of([row.columns for row in rows]),
            ended=[bool(row.ids) and row.ids[-1] in stops for row in rows],
            truncated=[row.truncated for row in rows],
            environments=environments or None,
            state=self.progress(),
        )

    def call_metrics(
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
        new_groups = {index: first + i for i, index in enumerate(chosen)}
        sampled = sum(int(runtime.all_reduce_sum(part.num_tokens)) for part in parts)
        together = Batch.concat(parts)
        own = together.groups.tolist()
        rows = [i for i, group in enumerate(own) if group in new_groups]
        groups = together.groups.new_tensor([new_groups[own[i]] for i in rows])
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
        """Find the groups of all ranks to whose completions the functions give one score."""
        paid, _ = self.runtime.gather(self.shaping.paid(part.scores))
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
    engine: RolloutEngine,
    policy: FullWeights | None,
    device: torch.device,
) -> AbstractContextManager[None]:
    """Gather what an engine reads of sharded weights; collective."""
    if policy is None or engine.gathers == "none":
        return nullcontext()
    return policy.gathered(device, engine.gathers == "trained")


def merge(
    metrics: dict[str, Any], others: dict[str, float], source: str = "log_metric"
) -> dict[str, Any]:
    """Add other metrics to those of a run; ValueError if a name is in both."""
    for name in others:
        if name in metrics:
            raise ValueError(TAKEN.format(source, show(name)))
    return metrics | others
