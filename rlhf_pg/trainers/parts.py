"""The parts of a trainer, made in the order in which they need each other."""

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerState, set_seed

from rlhf_pg.advantages import ADVANTAGES, AdvantageInputs
from rlhf_pg.boundary.quoted import about
from rlhf_pg.checkpoint import TrainState
from rlhf_pg.config import PolicyGradientConfig, PPOConfig
from rlhf_pg.config.fields import bind
from rlhf_pg.data import Prompts, PromptSampler
from rlhf_pg.data.inputs import check_fingerprint, load_texts, with_date
from rlhf_pg.data.prompts import Tools, load_prompts, no_tools
from rlhf_pg.data.rendering import warn_of_turn_end
from rlhf_pg.data.sources import PRIVILEGED
from rlhf_pg.episodes import EnvironmentSource, EpisodeRunner
from rlhf_pg.episodes.factory import new_episode_runner
from rlhf_pg.losses import POLICY_LOSSES, Loss
from rlhf_pg.models import critic as critics, streaming
from rlhf_pg.models.attention import fix_longrope, max_positions
from rlhf_pg.models.critic import Critic, Models, assemble
from rlhf_pg.models.loading import (
    adapter_of,
    add_stop_tokens,
    init_options,
    policy_of,
    stop_token_ids,
    tokenizer_of,
)
from rlhf_pg.models.policy import Reference
from rlhf_pg.rewards.scoring import Rewards
from rlhf_pg.rewards.shaping import Shaping
from rlhf_pg.rollout import RolloutEngine, factory
from rlhf_pg.rollout.players import CompletionPlayer, Player
from rlhf_pg.run.device import auto_dtype
from rlhf_pg.run.optimizer import optimizer_and_schedule
from rlhf_pg.run.token_budget import (
    chunk_size,
    find_budget,
    free_share,
    most,
    vllm_share,
)
from rlhf_pg.running_stats import MovingAverage, RunningMoments
from rlhf_pg.runtime import Runtime, Termination
from rlhf_pg.runtime.trackers import Trackers
from rlhf_pg.trainers.agreement import Agreement
from rlhf_pg.trainers.ahead import Ahead
from rlhf_pg.trainers.controllers import Controllers
from rlhf_pg.trainers.inputs import Inputs, resolve_inputs
from rlhf_pg.trainers.learner import PolicyLearner
from rlhf_pg.trainers.sampler import Sampler
from rlhf_pg.trainers.teacher import check_privileged, load_teacher

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PromptLoader:
    """Loads the prompts of a run's datasets."""

    args: PolicyGradientConfig
    tokenizer: PreTrainedTokenizerBase
    tools: Tools
    positions: int | None  # of the model
    environments: EnvironmentSource | None

    def load(self, dataset: Any, name: str) -> Prompts:
        """Return the prompts of a dataset; ValueError, with `name` and the row, if one is unfit."""
        args = self.args
        with about(name):
            return load_prompts(
                dataset,
                self.tokenizer,
                max_prompt_length=args.max_prompt_length,
                long_prompts=args.long_prompts,
                tools=self.tools,
                max_completion_length=args.max_completion_length,
                positions=self.positions,
                micro_batch_tokens=args.micro_batch_tokens,
            )

    def load_sets(self, datasets: Mapping[str, Any]) -> dict[str, Prompts]:
        """Return the prompts of every evaluation set, by its name."""
        sets = {}
        for name, dataset in datasets.items():
            if self.environments is not None:
                dataset = self.environments.add_prompts(dataset, self.args.prompts_per_step)
            sets[name] = self.load(dataset, f"eval_dataset {name}".rstrip())
        return sets


@dataclass(frozen=True)
class Progress:
    """How far a run is, for reward functions that take it."""

    state: TrainState
    num_prompts: int  # of the dataset
    total_steps: int

    def now(self) -> TrainerState:
        return self.at(self.state.step, self.state.prompt_index)

    def at(self, step: int, prompt_index: int) -> TrainerState:
        epoch = prompt_index / self.num_prompts
        return TrainerState(epoch=epoch, global_step=step, max_steps=self.total_steps)


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Parts:
    """The parts of a trainer."""

    args: PolicyGradientConfig
    recorded: Mapping[str, Any]  # keys to add to config.yaml: data, rewards
    described: Sequence[str]  # a line for each reward
    runtime: Runtime
    trackers: Trackers
    termination: Termination
    state: TrainState
    rewards: Rewards
    shaping: Shaping
    model: PreTrainedModel
    processing_class: PreTrainedTokenizerBase
    episode_runner: EpisodeRunner | None
    prompt_loader: PromptLoader
    train_prompts: Prompts
    eval_sets: dict[str, Prompts]
    total_steps: int
    estimator: Callable[[AdvantageInputs], Tensor]
    policy_loss: partial[Loss]
    controllers: Controllers
    moving_average: MovingAverage | None
    value_moments: RunningMoments | None  # of the returns, if they are normalised
    running: dict[str, Any]  # running statistics and controllers that checkpoints hold, by name
    critic: Critic | None
    privileged_prompt: Callable[..., Any] | None
    teacher_prompt_limit: int | None  # tokens that leave the teacher room for a completion
    texts: Sequence[Sequence[int]]  # of PPO-ptx
    learner: PolicyLearner
    agreement: Agreement
    make_engine: Callable[[str], RolloutEngine]
    chosen_engine: tuple[str, str]  # the rollout engine, and the reason why
    sampler: Sampler
    ahead: Ahead | None  # with `rollout_ahead`


def make_parts(args: PolicyGradientConfig, inputs: Inputs, trains: bool = True) -> Parts:
    """Make the parts of a trainer, or of an evaluation, which does not train."""
    args, inputs, described, recorded = resolve_inputs(args, inputs, trains)
    runtime = Runtime(args.ddp_timeout, deterministic=args.deterministic)
    args = args.on(runtime.device.type, auto_dtype(args, runtime))
    for warning in args.warnings if runtime.is_main else ():
        logger.warning("%s", warning)
    environments = inputs.environments
    has_agent = inputs.agent_program is not None

    # Rewards.
    pays = has_agent or (environments is not None and environments.pays)
    rewards = Rewards(
        inputs.reward_funcs,
        args.reward_weights,
        inputs.reward_processing_classes,
        runtime.device,
        pays,
        args.reward_model_sees_eos,
        args.trust_remote_code,
        args.reward_workers,
        args.reward_timeout,
        args.on_reward_error,
        args.reward_error_value,
    )
    shaping = Shaping(args, rewards)

    # The policy and its tokenizer.
    set_seed(args.seed)
    dtype = getattr(torch, args.dtype)
    peft_config = adapter_of(args, inputs.peft_config) if trains else None
    policy_model = policy_of(
        inputs.model,
        args,
        runtime.loading_device,
        peft_config,
        inputs.quantization_config,
        empty=runtime.splits and trains,
    )
    trained = sum(p.numel() for p in policy_model.parameters() if p.requires_grad)
    if trains and runtime.is_main and args.learning_rate > 2e-5 and trained > 50e6:
        logger.warning(
            "learning_rate %g may wreck %.0fM trained parameters: 1e-6 is usual for all weights",
            args.learning_rate,
            trained / 1e6,
        )
    tokenizer = tokenizer_of(args, policy_model, inputs.processing_class)
    args = with_date(args, tokenizer, runtime.today())
    if args.eos_token is not None:
        add_stop_tokens(policy_model, [tokenizer.eos_token_id])
    episode_runner = new_episode_runner(
        args,
        inputs.tools or (),
        environments,
        policy_model,
        tokenizer,
        inputs.agent_program,
        bool(inputs.reward_funcs),
    )

    # Prompts.
    episode_tools: Tools = episode_runner.tools if episode_runner else ()
    loader = PromptLoader(
        args,
        tokenizer,
        no_tools if has_agent else episode_tools,  # an agent's program says which tools it has
        None if has_agent else max_positions(policy_model),
        environments,
    )
    train_dataset = inputs.train_dataset
    if environments is not None:
        has_data = train_dataset is not None
        train_dataset = environments.add_prompts(train_dataset, args.prompts_per_step)
        if not has_data and train_dataset is not None and args.max_steps < 0:
            raise ValueError("without a train_dataset, set max_steps to the length of the run")
    eval_sets = loader.load_sets(inputs.eval_dataset)
    if trains:
        prompts = loader.load(train_dataset, "train_dataset")
    else:
        prompts = next(iter(eval_sets.values()))
    check_fingerprint(args.dataset_fingerprint, prompts.fingerprint)
    state = TrainState()
    total_steps = args.total_steps(len(prompts))
    progress = Progress(state, len(prompts), total_steps)
    longest_prompt = max(x.longest for x in (prompts, *eval_sets.values()))
    longest_row = longest_prompt + args.max_completion_length

    texts: Sequence[Sequence[int]] = ()
    if trains and args.ptx_coef:
        texts = load_texts(args, tokenizer)

    # The method: functions that the config names, and state that changes during the run.
    estimator = bind(ADVANTAGES[args.advantage_estimator], args)
    policy_loss = bind(POLICY_LOSSES[args.policy_loss], args)
    controllers = Controllers(args)
    averages = args.estimator_traits.needs == "average"
    moving_average = MovingAverage() if averages else None
    running = controllers.controllers | shaping.moments
    if moving_average is not None:
        running["moving_average"] = moving_average
    critic = None
    value_moments = None
    if trains and isinstance(args, PPOConfig):
        critic = new_critic(args, inputs.value_model, policy_model, tokenizer, peft_config)
        if args.normalize_values:
            value_moments = RunningMoments()
            running["value_moments"] = value_moments

    # The learner: policy, critic and reference, optimizer, and how many tokens fit.
    # The engine is chosen before sharding renames the model's class.
    chosen = factory.choose_engine(args, policy_model, runtime)
    limits = [max_positions(policy_model)]
    if args.micro_batch_tokens != "auto":  # the number that auto finds must not change the samples
        limits.append(int(args.micro_batch_tokens))
    limit = min((one for one in limits if one), default=None)  # tokens of a prompt and completion
    if has_agent and limit is not None:
        longest_row = limit
    longest = max(longest_row, limit or 0) if environments else longest_row
    for module in filter(None, (policy_model, critic)):
        fix_longrope(module, longest)  # the same for rows of all lengths
    if not trains:
        tokens = most(runtime.device.type, longest_row)
    elif args.micro_batch_tokens == "auto":
        tokens = most(runtime.device.type, prompts.longest + args.max_completion_length)
    else:
        tokens = int(args.micro_batch_tokens)
    logits = chunk_size(runtime) // (3 if args.compares_distributions else 1)  # p's, q's, gradient
    policy, module = assemble(policy_model, args, critic, tokens, logits)
    module.eval()
    if not any(p.is_meta for p in module.parameters()):  # else sharding loads them
        module.to(runtime.loading_device)
    reference = teacher = optimizer = scheduler = teacher_prompt_limit = None
    if trains:
        teacher = load_teacher(args, policy, tokenizer, runtime.loading_device, tokens)
        if teacher is not None:
            has_function = inputs.privileged_prompt is not None
            has_column = PRIVILEGED in prompts.rows.column_names
            has_prompts = not has_function and (has_column or args.privileged_prompt)
            if has_prompts and (environments or has_agent):
                raise ValueError("privileged_prompt must be a function for an environment")
            teacher_prompt_limit = check_privileged(
                teacher, args, prompts, tokenizer, episode_tools, has_function
            )
        sampling = factory.with_engine(args, chosen[0])
        tokens = find_budget(sampling, module, runtime, prompts.longest, teacher)
        reference = Reference(policy, args.sync_ref_model) if args.beta > 0 else None
        optimizer, scheduler = optimizer_and_schedule(
            policy, critic, args, total_steps, inputs.optimizers
        )
    learner = PolicyLearner(
        Models(policy, critic, reference, module, teacher),
        optimizer,
        scheduler,
        runtime,
        args,
        tokens,
        state,
    )
    agreement = Agreement(
        dtype,
        runtime,
        policy,
        learner.log_probs,
        refuses=args.truncated_sampling == "refuse"
        and args.sampler_correction in ("auto", "none")
        and not args.rollout_ahead,
        samples_in_fp8=args.vllm_quantization == "fp8",
    )

    # The sampler and its engine; a prompt from an environment must leave room for a completion.
    stops = stop_token_ids(policy_model, tokenizer)
    player: Player = CompletionPlayer(
        tokenizer=tokenizer,
        stop_token_ids=stops,
        skip_special_tokens=args.skip_special_tokens,
    )
    if episode_runner is not None:
        least = 1 if has_agent else args.max_completion_length
        room = None if limit is None else limit - least
        player = dataclasses.replace(episode_runner, longest_prompt=room)
    if trains and runtime.is_main and not isinstance(prompts.rows[0]["prompt"], str):
        warn_of_turn_end(tokenizer, stops)
    full_policy = learner.full_policy
    weights = full_policy.module
    save = None
    if hasattr(weights, "stored") and peft_config is None:  # no process has it whole

        def save(folder: Path | None) -> None:
            streaming.save(folder, weights, *full_policy.tensors("", weights))

    def make_engine(name: str) -> RolloutEngine:
        sampling = factory.with_engine(args, name)
        share = 0.0
        if name == "vllm":
            backend = learner.backend if trains else None
            share = vllm_share(sampling, free_share(backend, args.optim, runtime))
        return factory.new_engine(
            sampling,
            weights,
            stops,
            tokenizer,
            runtime.is_main,
            longest_row,
            save,
            full_policy.by_parts(runtime.device) if runtime.splits else None,
            share,
        )

    engine, engine_name, why_engine = factory.start_engine(args, *chosen, runtime, make_engine)
    sampler = Sampler(
        engine=engine,
        prompts=prompts,
        order=PromptSampler(len(prompts), args.seed, args.shuffle_dataset),
        rewards=rewards,
        shaping=shaping,
        runtime=runtime,
        args=args,
        policy=learner.full_policy,
        player=player,
        progress=progress.now,
    )
    ahead = None
    if args.rollout_ahead:
        ahead = Ahead(sampler, args.rollout_ahead, runtime, progress.at)

    return Parts(
        args=args,
        recorded=recorded,
        described=described,
        runtime=runtime,
        trackers=Trackers(args.report_to, runtime),
        termination=Termination(runtime),
        state=state,
        rewards=rewards,
        shaping=shaping,
        model=policy_model,
        processing_class=tokenizer,
        episode_runner=episode_runner,
        prompt_loader=loader,
        train_prompts=prompts,
        eval_sets=eval_sets,
        total_steps=total_steps,
        estimator=estimator,
        policy_loss=policy_loss,
        controllers=controllers,
        moving_average=moving_average,
        value_moments=value_moments,
        running=running,
        critic=critic,
        privileged_prompt=inputs.privileged_prompt,
        teacher_prompt_limit=teacher_prompt_limit,
        texts=texts,
        learner=learner,
        agreement=agreement,
        make_engine=make_engine,
        chosen_engine=(engine_name, why_engine),
        sampler=sampler,
        ahead=ahead,
    )


def new_critic(
    args: PPOConfig,
    value_model: Any,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    peft_config: Any,
) -> Critic:
    """Make the critic that the config and `value_model` ask for."""
    is_shared = args.critic == "shared"
    if value_model is None:
        value_model = args.value_model_name_or_path
    if value_model is not None and is_shared:
        raise ValueError("value_model is for a separate critic: leave it out with a shared one")
    if value_model is not None and args.critic_seed is not None:
        raise ValueError("value_init random takes the policy's architecture: leave value_model out")
    critic = critics.new_critic(
        model,
        tokenizer,
        getattr(torch, args.dtype),
        is_shared,
        value_model,
        peft_config,
        args.critic_seed,
        args.trust_remote_code,
        init_options(args),
    )
    if args.normalize_values and (critic.head is None or critic.head.weight.any()):
        raise ValueError(
            "normalize_values needs a critic whose head starts at 0, and value_model brings "
            "values in its own units: leave one of them out"
        )
    return critic
