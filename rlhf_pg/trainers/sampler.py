"""The first half of a step: prompts are sampled and their completions scored.

Shapes: B rows on this rank, T completion width, K sources of reward.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase, TrainerState

from rlhf_pg.advantages import NEED_GREEDY, group_stats, total_scores
from rlhf_pg.config import PolicyGradientConfig
from rlhf_pg.data import Batch, Prompts, PromptSampler
from rlhf_pg.data.chat import whole_turn
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
    ToolEnvironment,
)
from rlhf_pg.rollout.multi_turn.episodes import environment_rewards, episode_metrics
from rlhf_pg.runtime import FullWeights, Runtime
from rlhf_pg.trainers.reward_log import RewardLog


@dataclass
class Sampler:
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
    # Calls of rewards that have begun, by group, and the batch that they are about.
    begun: dict[int, PendingCalls] = field(default_factory=dict)
    about: Batch | None = None

    def __post_init__(self) -> None:
        self.reward_log = RewardLog(
            [source.name for source in self.rewards.sources],
            tolerant=self.args.on_reward_error != "error",
            has_episodes=self.episode_runner is not None,
        )

    # -------------------------------------------------------------------------- the batch of a step

    def next_batch(self, first: int, meter: Meter) -> Batch:
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
                batch = self._sample_and_score(indices, meter)
                batch = batch.with_columns(num_prompts=len(indices))
            if args.advantage_estimator in NEED_GREEDY:
                batch = self._with_greedy(batch, meter)
        metrics, logged = self.reward_log.settle(self.runtime)
        return batch.with_columns(metrics=batch.metrics | metrics, logged_metrics=logged)

    def _sample_and_score(self, indices: range, meter: Meter) -> Batch:
        failpoint("rollout")
        with meter.time("rollout"):
            batch = self.roll_out(indices)
        failpoint("reward")
        with meter.time("reward"):
            return self.scored(batch)

    def roll_out(self, indices: range) -> Batch:
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

    # ------------------------------------------------------------------------------------- sampling

    def sample(
        self,
        prompts: Prompts,
        rows: Sequence[int],
        prompt_indices: Sequence[int],
        n: int,
        temperature: float,
    ) -> Batch:
        """Sample `n` completions, or play `n` episodes, of each of some dataset rows.

        Rewards that run elsewhere are asked about a prompt as soon as its completions are there.

        Args:
            prompt_indices: one number per row, which keys its noise and names its group.
        """
        args, runner, device = self.args, self.episode_runner, self.runtime.device
        params = SamplingParams(
            temperature=temperature,
            top_k=args.top_k,
            top_p=args.top_p,
            min_p=args.min_p,
            max_tokens=args.max_completion_length,
            stop=args.stop,
        )
        tokens = [prompts.tokens[row] for row in rows]
        give_up(self.begun.values())  # about completions that nobody has had scored
        self.begun, self.about = {}, None
        with self.sampling(), self.runtime.raise_together(RolloutError):
            if runner is not None:
                examples = [prompts.rows[row] for row in rows]
                said = runner.play(
                    self.engine, examples, tokens, prompt_indices, n, params, args.seed
                )
                return self._batch(prompts, rows, prompt_indices, said, device)
            groups: list[dict[int, Completion]] = [{} for _ in rows]
            try:
                with closing(
                    self.engine.stream(tokens, n, params, args.seed, prompt_indices)
                ) as stream:
                    for place, completion in stream:
                        i = place // n
                        groups[i][place % n] = completion
                        if self.rewards.run_beside and len(groups[i]) == n:
                            index, own = prompt_indices[i], [groups[i][k] for k in range(n)]
                            # On the CPU: no GPU is waited for between two tokens of others.
                            one = self._batch(prompts, [rows[i]], [index], own, torch.device("cpu"))
                            self.begun[index] = self.rewards.begin(self._inputs(one))
            except BaseException:
                give_up(self.begun.values())
                raise
            turns = [group[k] for group in groups for k in range(n)]
            self.about = self._batch(prompts, rows, prompt_indices, turns, device)
            return self.about

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

    def _batch(
        self,
        prompts: Prompts,
        rows: Sequence[int],
        prompt_indices: Sequence[int],
        said: Sequence[Any],  # completions of one turn, or episodes
        device: torch.device,
    ) -> Batch:
        """Return completions, equally many of each row, as a batch."""
        n = len(said) // max(1, len(rows))
        repeated = [row for row in rows for _ in range(n)]
        tokens, columns = [prompts.tokens[row] for row in repeated], prompts.rows[repeated]
        opened = columns.pop("prompt", [])
        has_episodes = self.episode_runner is not None
        texts, fields = list[tuple[Any, Any]](), dict[str, Any]()
        if has_episodes:
            fields["actions"] = [episode.trained for episode in said]
            fields["truncated"] = [episode.truncated for episode in said]
            tokens = [episode.prompt_ids for episode in said]
            opened = [episode.prompt for episode in said]
        else:
            fields["truncated"] = [turn.finish_reason == "length" for turn in said]
        for prompt, one in zip(opened, said, strict=True):
            if has_episodes and not isinstance(prompt, str):
                texts.append(whole_turn(prompt, one.messages))
            else:
                texts.append(prompt_and_completion(prompt, one.tokens, self.tokenizer))
        batch = Batch.from_tokens(
            prompts=tokens,
            completions=[one.tokens for one in said],
            logprobs=[one.logprobs for one in said],
            groups=[index for index in prompt_indices for _ in range(n)],
            pad_token_id=self.tokenizer.pad_token_id,
            dtype=torch.promote_types(getattr(torch, self.args.dtype), torch.float32),
            device=device,
            **fields,
        )
        return batch.with_columns(
            prompts=[prompt for prompt, _ in texts],
            completions=[completion for _, completion in texts],
            columns=columns,
            dataset_rows=repeated,
            episodes=said if has_episodes else (),
        )

    # -------------------------------------------------------------------------------------- rewards

    def scored(self, batch: Batch) -> Batch:
        """Return completions with their raw scores (B,T,K) and what reward functions logged.

        Scores stand at the tokens that end what they judge; NaN stands elsewhere. A completion
        for which functions failed, and that no other has scored, leaves the losses.

        Raises:
            ValueError: on all processes, a reward function failed.
        """
        with self.runtime.raise_together(ValueError):
            has_environment = self.rewards.has_environment
            paid = environment_rewards(batch.episodes) if has_environment else None
            begun = {}
            if batch is self.about:
                begun, self.begun, self.about = self.begun, {}, None
            judgement = self.rewards.judge(
                self._inputs(batch), batch.action_mask, paid, batch.groups.tolist(), begun
            )
            self.reward_log.add(judgement, batch.episodes)
        if judgement.lost.any():
            known = ~judgement.lost.to(batch.action_mask.device)
            mask = batch.action_mask & known[:, None]
            batch = batch.with_columns(action_mask=mask)
        scores = self.shaping.penalized(judgement.scores.to(batch.sampler_logprobs), batch)
        return batch.with_columns(scores=scores, logged=judgement.extra)

    def _inputs(self, batch: Batch) -> RewardInputs:
        ids = batch.token_lists()
        played = (episode.environment for episode in batch.episodes)
        environments = [getattr(one, "trl_instance", one) for one in played]
        if all(type(one) is ToolEnvironment for one in environments):  # or there are none
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

    def episode_metrics(self, parts: Sequence[Batch]) -> dict[str, float]:
        """Compute metrics of episodes over all processes; none without an environment or tools."""
        if self.episode_runner is None:
            return {}
        episodes = [episode for part in parts for episode in part.episodes]
        return episode_metrics(episodes, bool(self.episode_runner.tools), self.runtime)

    # ----------------------------------------------------------- dynamic sampling, greedy baseline

    def _with_spread(self, first: int, meter: Meter) -> Batch:
        """Sample until enough groups have scores that differ (DAPO; Yu et al. 2025, section 3.2).

        A group is set aside if the reward functions give all its completions one total score
        (Eq. 11). Penalties do not count: length alone makes no answer right. As many new prompts
        are sampled, for at most `dynamic_sampling_rounds` rounds. If groups are still missing, the
        earliest of those set aside are used, so every step has the same number. The groups are
        renumbered from the first index of the step, which keeps minibatches equally large.
        """
        args, runtime = self.args, self.runtime
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
        """Find the groups, of all ranks, whose completions share one score before penalties."""
        assert part.scores is not None
        said = sum_step_scores(self.shaping.judged(part.scores))
        paid, _ = self.runtime.gather(said)
        groups, _ = self.runtime.gather(part.groups)
        # On the CPU, where sums have one order: processes that disagreed would deadlock.
        paid, groups = paid.cpu(), groups.cpu()
        scores = total_scores(paid, groups)
        constant = group_stats(scores, ~scores.isnan(), groups).constant
        return set(groups[constant].tolist())

    def _with_greedy(self, batch: Batch, meter: Meter) -> Batch:
        """Add a scored greedy completion of every prompt, from which a baseline is made."""
        groups = batch.groups.tolist()
        firsts = [i for i, group in enumerate(groups) if i == 0 or groups[i - 1] != group]
        rows, indices = ([x[i] for i in firsts] for x in (batch.dataset_rows, groups))
        with meter.time("rollout"):
            greedy = self.sample(self.prompts, rows, indices, n=1, temperature=0.0)
        with meter.time("reward"):
            greedy = self.scored(greedy)
        tokens = batch.other_tokens + int(self.runtime.all_reduce_sum(greedy.num_tokens))
        return batch.with_columns(greedy=greedy, other_tokens=tokens)


def prompt_and_completion(
    prompt: Any, ids: Sequence[int], tokenizer: PreTrainedTokenizerBase
) -> tuple[Any, Any]:
    """Return a prompt with its completion of one turn, both as text or both as messages."""
    text = tokenizer.decode(ids, skip_special_tokens=True)
    if isinstance(prompt, str):
        return prompt, text
    return whole_turn(prompt, [{"role": "assistant", "content": text}])
