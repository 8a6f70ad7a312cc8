"""The first half of a step: prompts are sampled and their completions scored.

Shapes: B rows on this rank, T completion width, K sources of reward.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase, TrainerState

from rlhf_pg.advantages import NEED_GREEDY, group_stats, total_scores
from rlhf_pg.config import PolicyGradientConfig
from rlhf_pg.data import Prompts, PromptSampler
from rlhf_pg.failpoints import failpoint
from rlhf_pg.report.metrics import Meter
from rlhf_pg.rewards import Rewards, sum_step_scores
from rlhf_pg.rewards.functions import RewardInputs
from rlhf_pg.rewards.scoring import PendingCalls, give_up
from rlhf_pg.rewards.shaping import Shaping
from rlhf_pg.rollout import (
    Completion,
    EpisodeRunner,
    RolloutEngine,
    RolloutError,
    SamplingParams,
)
from rlhf_pg.rollout.multi_turn.episodes import (
    environment_rewards,
    episode_counts,
    episode_metrics,
)
from rlhf_pg.runtime import FullWeights, Runtime
from rlhf_pg.trainers.reward_log import RewardLog
from rlhf_pg.trainers.samples import (
    Samples,
    ScoredBatch,
    ScoredSamples,
    columns_of,
    prompts_and_completions,
    sample,
)


@dataclass
class Collector:
    """Sample completions of prompts and have them scored."""

    engine: RolloutEngine
    prompts: Prompts  # to train on
    order: PromptSampler  # in which they come
    rewards: Rewards
    shaping: Shaping
    runtime: Runtime
    args: PolicyGradientConfig
    policy: FullWeights  # which the engine takes over
    tokenizer: PreTrainedTokenizerBase
    stop_token_ids: Sequence[int]  # tokens that end a completion
    progress: Callable[[], TrainerState]  # for reward functions that ask how far the run is
    episode_runner: EpisodeRunner | None = None  # for a run with an environment or tools
    reward_log: RewardLog = field(init=False)

    def __post_init__(self) -> None:
        self.reward_log = RewardLog(
            [source.name for source in self.rewards.sources],
            tolerant=self.args.on_reward_error != "error",
            has_episodes=self.episode_runner is not None,
        )

    def collect(self, first: int, meter: Meter) -> ScoredBatch:
        """Sample and score groups of the next `prompts_per_step` prompts.

        Args:
            first: the index of the next prompt.

        Raises:
            RolloutError, ValueError: on all processes, the engine or a reward function failed, or
                all episodes or all calls of reward functions.
        """
        args = self.args
        self.reward_log.clear()
        with self.sampling():
            if args.dynamic_sampling_rounds:
                batch = self._with_spread(first, meter)
            else:
                indices = range(first, first + args.prompts_per_step)
                samples, scores = self._sample_and_score(indices, meter)
                batch = ScoredBatch(samples=samples, scores=scores, num_prompts=len(indices))
            needs_greedy = args.advantage_estimator in NEED_GREEDY
            batch = self._with_greedy(batch, meter) if needs_greedy else batch
        own, logged = self.reward_log.settle(self.runtime)
        return dataclasses.replace(batch, metrics=batch.metrics | own, logged=logged)

    def _sample_and_score(self, indices: range, meter: Meter) -> ScoredSamples:
        failpoint("rollout")
        with meter.time("rollout"):
            samples = self.roll_out(indices)
        failpoint("reward")
        with meter.time("reward"):
            return self.scored(samples)

    def roll_out(self, indices: range) -> Samples:
        """Sample this rank's share of the prompts, whole groups each.

        Every minibatch is shared as evenly as its number of prompts allows.
        """
        args, runtime = self.args, self.runtime
        minibatches = [
            [index for index in indices if index % args.num_mini_batches == m]
            for m in range(args.num_mini_batches)
        ]
        # The first share, which may be one larger, goes to another rank in each minibatch.
        mine = sorted(
            index
            for m, minibatch in enumerate(minibatches)
            for index in minibatch[(runtime.rank - m) % runtime.world :: runtime.world]
        )
        rows = self.order.rows(mine)
        return self.sample(self.prompts, rows, mine, args.num_generations, args.temperature)

    def sample(
        self,
        prompts: Prompts,
        rows: Sequence[int],
        prompt_indices: Sequence[int],
        n: int,
        temperature: float,
    ) -> Samples:
        """Sample `n` completions of dataset rows; the indices key the noise and name the groups."""
        args = self.args
        params = SamplingParams(
            temperature=temperature,
            top_k=args.top_k,
            top_p=args.top_p,
            min_p=args.min_p,
            max_tokens=args.max_completion_length,
            stop=args.stop,
        )
        begun: dict[int, PendingCalls] = {}

        def begin(place: int, turns: list[Completion]) -> None:
            """Begin the calls of rewards about one prompt, while others are sampled."""
            row, ids = rows[place], [turn.tokens for turn in turns]
            given = [prompts.examples([row])[0]["prompt"]] * n
            said = prompts_and_completions(given, ids, self.tokenizer)
            inputs = RewardInputs(
                [prompt for prompt, _ in said],
                [completion for _, completion in said],
                ids,
                columns_of(prompts, [row] * n),
                ended=self._ended(ids),
                truncated=[turn.finish_reason == "length" for turn in turns],
                state=self.progress(),
            )
            begun[prompt_indices[place]] = self.rewards.begin(inputs)

        with (
            self.sampling(),
            self.runtime.raise_together(RolloutError),
            _given_up_on_error(begun),
        ):
            samples = sample(
                self.engine,
                self.tokenizer,
                prompts,
                rows,
                prompt_indices,
                n,
                params,
                args.seed,
                dtype=torch.promote_types(getattr(torch, args.dtype), torch.float32),
                device=self.runtime.device,
                episode_runner=self.episode_runner,
                finished=begin if self.rewards.run_beside else None,
            )
        return dataclasses.replace(samples, begun=begun)

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """Hand the weights to the engine once for all calls of `sample` inside.

        Sharded weights are gathered first.
        """
        with ExitStack() as weights:
            # No process samples before all are here: one may speak for all to a server.
            with self.runtime.raise_together(RolloutError):
                weights.enter_context(self.policy.gathered(self.runtime.device))
                weights.enter_context(self.engine.weights_synced())
            yield

    def scored(self, samples: Samples) -> ScoredSamples:
        """Return samples with their raw scores (B,T,K), and with what reward functions logged.

        Scores stand at the tokens that end what they judge; NaN stands elsewhere. A completion
        for which functions failed, and that no other has scored, leaves the losses.

        Raises:
            ValueError: on all processes, a reward function failed.
        """
        rollout = samples.rollout
        with self.runtime.raise_together(ValueError):
            inputs = RewardInputs(
                samples.prompts,
                samples.completions,
                samples.completion_ids,
                samples.columns,
                ended=self._ended(samples.completion_ids),
                truncated=rollout.truncated.tolist(),
                environments=samples.environments or None,
                state=self.progress(),
            )
            has_environment = self.rewards.has_environment
            paid = environment_rewards(samples.episodes) if has_environment else None
            groups = rollout.groups.tolist()
            judgement = self.rewards.judge(inputs, rollout.action_mask, paid, groups, samples.begun)
            self.reward_log.add(judgement, samples.episodes)
        if judgement.lost.any():
            known = ~judgement.lost.to(rollout.action_mask.device)
            mask = rollout.action_mask & known[:, None]
            rollout = dataclasses.replace(rollout, action_mask=mask, host_rows=None)
        samples = dataclasses.replace(samples, rollout=rollout, begun={}, logged=judgement.extra)
        scores = judgement.scores.to(rollout.sampler_logprobs)
        return ScoredSamples(samples, self.shaping.penalized(scores, rollout))

    def _ended(self, completion_ids: Sequence[Sequence[int]]) -> list[bool]:
        return [bool(ids) and ids[-1] in self.stop_token_ids for ids in completion_ids]

    def episode_metrics(self, parts: Sequence[Samples]) -> dict[str, float]:
        """Compute metrics of episodes over all processes; none without an environment or tools."""
        if self.episode_runner is None:
            return {}
        device = self.runtime.device
        counts = torch.cat([episode_counts(part.episodes, device) for part in parts])
        everyone, _ = self.runtime.gather(counts)
        return episode_metrics(everyone, tools=bool(self.episode_runner.tools))

    # -------------------------------------------------------------------------- dynamic sampling

    def _with_spread(self, first: int, meter: Meter) -> ScoredBatch:
        """Sample until enough groups have scores that differ (DAPO; Yu et al. 2025, section 3.2).

        A group is set aside if the reward functions give all its completions one total score
        (Eq. 11). Penalties do not count: length alone makes no answer right. As many new prompts
        are sampled, for at most `dynamic_sampling_rounds` rounds. If groups are still missing, the
        earliest of those set aside are used, so every step has the same number. The groups are
        renumbered from the first index of the step, which keeps minibatches equally large.
        """
        args, runtime = self.args, self.runtime
        parts: list[ScoredSamples] = []
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
        samples, scores = _chosen(parts, places, self.tokenizer.pad_token_id)
        sampled = sum(int(runtime.all_reduce_sum(part.samples.num_tokens)) for part in parts)
        return ScoredBatch(
            samples=samples,
            scores=scores,
            num_prompts=end - first,
            other_tokens=sampled - int(runtime.all_reduce_sum(samples.num_tokens)),
            metrics={
                "sampling/rounds": len(parts) - 1,
                "sampling/kept_fraction": len(kept) / (end - first),
            },
        )

    def _constant_groups(self, part: ScoredSamples) -> set[int]:
        """Find the groups, of all ranks, whose completions share one score before penalties."""
        said = sum_step_scores(self.shaping.judged(part.scores))
        paid, _ = self.runtime.gather(said)
        groups, _ = self.runtime.gather(part.samples.rollout.groups)
        # On the CPU, where sums have one order: processes that disagreed would deadlock.
        paid, groups = paid.cpu(), groups.cpu()
        scores = total_scores(paid, groups)
        constant = group_stats(scores, ~scores.isnan(), groups).constant
        return set(groups[constant].tolist())

    # --------------------------------------------------------------------------- greedy baseline

    def _with_greedy(self, batch: ScoredBatch, meter: Meter) -> ScoredBatch:
        """Add a scored greedy completion of every prompt, from which a baseline is made."""
        firsts = batch.samples.firsts()
        rows = [batch.samples.rows[i] for i in firsts]
        indices = batch.rollout.groups[firsts].tolist()
        with meter.time("rollout"):
            greedy = self.sample(self.prompts, rows, indices, n=1, temperature=0.0)
        with meter.time("reward"):
            scored = self.scored(greedy)
        tokens = batch.other_tokens + int(self.runtime.all_reduce_sum(greedy.num_tokens))
        return dataclasses.replace(batch, greedy=scored, other_tokens=tokens)


@contextmanager
def _given_up_on_error(begun: Mapping[int, PendingCalls]) -> Iterator[None]:
    """Cancel the calls of rewards that have begun if the sampling inside fails."""
    try:
        yield
    except BaseException:
        give_up(begun.values())
        raise


def _chosen(
    parts: Sequence[ScoredSamples], places: Mapping[int, int], pad_token_id: int
) -> ScoredSamples:
    """Pick the groups of all rounds that have a place, renumbered and in order."""
    together = Samples.concat([part.samples for part in parts], pad_token_id)
    samples, rows = together.renumbered(places)
    width = together.rollout.completion_ids.shape[1]
    scores = torch.cat([_widened(part.scores, width) for part in parts])
    return ScoredSamples(samples, scores[rows, : samples.rollout.completion_ids.shape[1]])


def _widened(scores: Tensor, width: int) -> Tensor:
    missing = width - scores.shape[1]
    return nn.functional.pad(scores, (0, 0, 0, missing), value=torch.nan)
