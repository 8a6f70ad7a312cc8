"""Build the parts of a trainer, in the order in which they need each other."""

import dataclasses
import logging
import os
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from transformers import set_seed

from rlhf_pg import models
from rlhf_pg.advantages import ADVANTAGES
from rlhf_pg.boundary import user_modules
from rlhf_pg.boundary.launcher import check_precision
from rlhf_pg.boundary.quoted import quote
from rlhf_pg.checkpoint import Checkpointer, TrainState
from rlhf_pg.config import PolicyGradientConfig
from rlhf_pg.config.fields import bind
from rlhf_pg.config.files import absolute, names_function
from rlhf_pg.data import PromptSampler
from rlhf_pg.data.inputs import load_texts, settle_data, with_date
from rlhf_pg.data.rendering import warn_of_turn_end
from rlhf_pg.data.sources import PRIVILEGED
from rlhf_pg.losses import POLICY_LOSSES
from rlhf_pg.models import Models, Reference, adapter_of, assemble, policy_of, streaming
from rlhf_pg.rewards.named import check_arguments, no_reward, settle_rewards
from rlhf_pg.rewards.scoring import Rewards
from rlhf_pg.rewards.shaping import Shaping
from rlhf_pg.rollout import factory, source_of
from rlhf_pg.running_stats import MovingAverage
from rlhf_pg.runtime import Runtime, Termination
from rlhf_pg.runtime.trackers import Trackers
from rlhf_pg.trainers.ahead import Ahead
from rlhf_pg.trainers.controllers import Controllers
from rlhf_pg.trainers.learner import Learner
from rlhf_pg.trainers.optimizer import optimizer_and_schedule
from rlhf_pg.trainers.recorder import Recorder
from rlhf_pg.trainers.sampler import Sampler
from rlhf_pg.trainers.teacher import check_privileged, load_teacher
from rlhf_pg.trainers.token_budget import chunk_size, find_budget, most

logger = logging.getLogger(__name__)


def build(trainer: Any, arguments: Any) -> None:
    """Give a `PolicyGradientTrainer` its parts, from its arguments, which it documents."""
    kind = trainer.config_type
    args = kind() if arguments.args is None else arguments.args
    if not isinstance(args, kind):
        got = quote(f"{type(args).__module__}.{type(args).__name__}")
        raise ValueError(f"args must be rlhf_pg's {kind.__name__}, got {got}")

    # The run's inputs, from Python or the config, which never change from here on.
    args = args.locate()
    check_precision(args.dtype)
    trainer.callbacks = []
    trainer.history = []
    for callback in arguments.callbacks or ():
        trainer.add_callback(callback)
    names = ["tools", "environment_factory", "agent_program", "quantization_config"]
    arguments.value_model = trainer.value_model
    if trainer.trains:
        names += ["peft_config", "optimizers", "value_model", "privileged_prompt"]
    else:  # arguments that only training takes do not have to be given again
        kept = tuple(name for name in args.given_in_python if name in names)
        args = dataclasses.replace(args, given_in_python=kept, report_to=(), save_merged=False)
    in_python = refuse_given_twice(args, {name: getattr(arguments, name) for name in names})
    tools, environment_factory = factory.load_tools(
        args, arguments.tools, arguments.environment_factory
    )
    task, train_dataset, eval_datasets = settle_data(
        args, arguments.train_dataset, arguments.eval_dataset, environment_factory, trainer.trains
    )
    rewards, trainer.described, recorded = settle_rewards(
        arguments.reward_funcs, args, None if task is None else task.reward
    )
    hidden = args.privileged_prompt or ""
    trainer.privileged_prompt = arguments.privileged_prompt
    if hidden and arguments.privileged_prompt is not None:
        raise ValueError("privileged_prompt is given twice, as an argument and in args")
    if trainer.trains and names_function(hidden):
        trainer.privileged_prompt = user_modules.load(hidden)
    named = ("trainer", "agent_program", "tools", "environment_factory")
    code = [key for key in named if getattr(args, key)]
    code += [key for key in ("advantage_estimator", "policy_loss") if ":" in getattr(args, key)]
    if names_function(hidden):
        code.append("privileged_prompt")
    trainer.described += [f"{key}: runs {quote(_listed(getattr(args, key)))}" for key in code]
    if args.agent_program is not None and arguments.agent_program is not None:
        raise ValueError("agent_program is given twice, as an argument and in args")
    agent_program = (
        args.agent_program if arguments.agent_program is None else arguments.agent_program
    )
    if trainer.privileged_prompt is not None:
        functions = [trainer.privileged_prompt]
        check_arguments(functions, {"train_dataset": train_dataset}, "rewards")
    alone = environment_factory is None and agent_program is None
    if not rewards and args.teacher_model_name_or_path and alone:
        rewards = [no_reward]
    held_out = {f"eval_dataset {name}".rstrip(): data for name, data in eval_datasets.items()}
    check_arguments(rewards, {"train_dataset": train_dataset, **held_out})
    if not trainer.trains and arguments.eval_dataset is not None:
        recorded |= args.without_names()
    trainer.recorded = recorded | {"given_in_python": in_python}
    if trainer.trains and args.eval_steps and not eval_datasets:
        raise ValueError("eval_steps needs an eval_dataset (dataset_test_split, eval_dataset_name)")
    model = arguments.model or args.model_name_or_path
    if task is not None:
        tools = task.tools if tools is None else tools
        environment_factory = environment_factory or task.environment_factory
        if model is None and task.make_tokenizer is not None:
            model = task.warm_started_model()
    if model is None:
        raise ValueError("no model: give model=... or the key model_name_or_path")
    changes = {"output_dir": os.path.abspath(args.output_dir)}
    if isinstance(model, str | PathLike):
        changes["model_name_or_path"] = absolute(os.fspath(model), None)
    trainer.runtime = runtime = Runtime(args.ddp_timeout)
    args = dataclasses.replace(args, **changes)
    trainer.args = args = args.on(runtime.device.type)
    for warning in args.warnings if runtime.is_main else ():
        logger.warning("%s", warning)
    trainer.trackers = Trackers(args.report_to, runtime)
    trainer.termination = Termination(runtime)
    trainer.state = TrainState()

    # Rewards.
    environments = None
    if environment_factory is not None:
        environments = source_of(environment_factory)
    pays = agent_program is not None or (environments is not None and environments.pays)
    trainer.rewards = Rewards(
        rewards,
        args.reward_weights,
        arguments.reward_processing_classes,
        runtime.device,
        pays,
        args.reward_model_sees_eos,
        args.trust_remote_code,
        args.reward_workers,
        args.reward_timeout,
        args.on_reward_error,
        args.reward_error_value,
    )
    trainer.shaping = Shaping(args, trainer.rewards)

    # The policy and its tokenizer.
    set_seed(args.seed)
    trainer.dtype = getattr(torch, args.dtype)
    trainer.peft_config = adapter_of(args, arguments.peft_config) if trainer.trains else None
    trainer.model = policy_of(
        model,
        args,
        runtime.loading_device,
        trainer.peft_config,
        arguments.quantization_config,
        empty=runtime.splits and trainer.trains,
    )
    trained = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    if trainer.trains and runtime.is_main and args.learning_rate > 2e-5 and trained > 50e6:
        logger.warning(
            "learning_rate %g may wreck %.0fM trained parameters: 1e-6 is usual for all weights",
            args.learning_rate,
            trained / 1e6,
        )
    tokenizer = models.tokenizer_of(args, trainer.model, arguments.processing_class)
    trainer.processing_class = tokenizer
    trainer.args = args = with_date(args, tokenizer, runtime.today())
    if args.eos_token is not None:
        models.add_stop_tokens(trainer.model, [tokenizer.eos_token_id])
    trainer.episode_runner = factory.new_episode_runner(
        args,
        tools or (),
        environments,
        trainer.model,
        tokenizer,
        agent_program,
        bool(rewards),
    )

    # Prompts.
    trainer.has_agent = agent_program is not None
    trainer.environments = environments
    if environments is not None:
        has_data = train_dataset is not None
        train_dataset = environments.add_prompts(train_dataset, args.prompts_per_step)
        if not has_data and train_dataset is not None and args.max_steps < 0:
            raise ValueError("without a train_dataset, set max_steps to the length of the run")
    trainer.eval_sets = eval_sets = trainer.eval_prompts(eval_datasets)
    if trainer.trains:
        prompts = trainer.prompts_of(train_dataset, "train_dataset")
    else:
        prompts = next(iter(eval_sets.values()))
    wanted = args.dataset_fingerprint
    if trainer.trains and wanted not in (None, prompts.fingerprint):
        raise ValueError(
            f"the training data have the fingerprint {prompts.fingerprint}, not "
            f"dataset_fingerprint {wanted}: data, tokenizer or prompt keys differ; leave it out to "
            "train on these data"
        )
    trainer.train_prompts = prompts
    trainer.total_steps = args.total_steps(len(prompts))
    longest_prompt = max(x.longest for x in (prompts, *eval_sets.values()))
    longest_row = longest_prompt + args.max_completion_length

    # The method: functions that the config names, and state that changes during the run.
    trainer.estimator = bind(ADVANTAGES[args.advantage_estimator], args)
    trainer.policy_loss = bind(POLICY_LOSSES[args.policy_loss], args)
    trainer.controllers = Controllers(args)
    averages = args.advantage_estimator == "returns_minus_moving_average"
    trainer.moving_average = MovingAverage() if averages else None
    trainer.running = trainer.controllers.controllers | trainer.shaping.moments
    if trainer.moving_average is not None:
        trainer.running["moving_average"] = trainer.moving_average
    trainer.critic = trainer.new_critic()

    # The learner: policy, critic and reference, optimizer, and how many tokens fit.
    # The engine is chosen before sharding renames the model's class.
    chosen = factory.choose_engine(args, trainer.model, runtime)
    limits = [models.max_positions(trainer.model)]
    if args.micro_batch_tokens != "auto":  # the number that auto finds must not change the samples
        limits.append(int(args.micro_batch_tokens))
    limit = min((one for one in limits if one), default=None)  # tokens of a prompt and completion
    if trainer.has_agent and limit is not None:
        longest_row = limit
    longest = max(longest_row, limit or 0) if environments else longest_row
    for module in filter(None, (trainer.model, trainer.critic)):
        models.settle_positions(module, longest)  # the same for rows of all lengths
    if not trainer.trains:
        tokens = most(runtime.device.type, longest_row)
    elif args.micro_batch_tokens == "auto":
        tokens = most(runtime.device.type, prompts.longest + args.max_completion_length)
    else:
        tokens = int(args.micro_batch_tokens)
    logits = chunk_size(runtime) // (3 if args.compares_distributions else 1)  # p's, q's, gradient
    policy, module = assemble(trainer.model, args, trainer.critic, tokens, logits)
    module.eval()
    if not any(p.is_meta for p in module.parameters()):  # else they come when it is sharded
        module.to(runtime.loading_device)
    reference = teacher = optimizer = scheduler = None
    if trainer.trains:
        teacher = load_teacher(args, policy, tokenizer, runtime.loading_device, tokens)
        if teacher is not None:
            has_function = trainer.privileged_prompt is not None
            has_prompts = not has_function and PRIVILEGED in prompts.rows.column_names
            if (environments or agent_program) and (has_prompts or (hidden and not has_function)):
                raise ValueError("privileged_prompt must be a function for an environment")
            tools = trainer.episode_runner.tools if trainer.episode_runner else ()
            trainer.teacher_prompt_limit = check_privileged(
                teacher, args, prompts, tokenizer, tools, has_function
            )
        sampling = factory.with_engine(args, chosen[0])
        tokens = find_budget(sampling, module, runtime, prompts.longest, teacher)
        reference = Reference(policy, args.sync_ref_model) if args.beta > 0 else None
        optimizer, scheduler = optimizer_and_schedule(
            policy, trainer.critic, args, trainer.total_steps, arguments.optimizers
        )
    trainer.learner = Learner(
        Models(policy, trainer.critic, reference, module, teacher),
        optimizer,
        scheduler,
        trainer.loss,
        runtime,
        args,
        tokens,
        trainer.state,
        load_texts(args, tokenizer) if trainer.trains and args.ptx_coef else (),
    )

    # The sampler and its engine; a prompt from an environment must leave room for a completion.
    runner = trainer.episode_runner
    if runner is not None:
        least = 1 if trainer.has_agent else args.max_completion_length
        room = None if limit is None else limit - least
        runner = dataclasses.replace(runner, longest_prompt=room)
    stops = models.stop_token_ids(trainer.model, tokenizer)
    if trainer.trains and runtime.is_main and not isinstance(prompts.rows[0]["prompt"], str):
        warn_of_turn_end(tokenizer, stops)
    full_policy = trainer.learner.full_policy
    weights = full_policy.module
    save = None
    if hasattr(weights, "stored") and trainer.peft_config is None:  # no process has it whole

        def save(place: Path | None) -> None:
            streaming.save(place, weights, *full_policy.tensors("", weights))

    rest = weights, stops, tokenizer, runtime.is_main, longest_row, save
    trainer.make_engine = lambda name: factory.new_engine(factory.with_engine(args, name), *rest)
    engine, trainer.engine_name, trainer.why_engine = factory.start_engine(
        args, *chosen, runtime, trainer.make_engine
    )
    trainer.sampler = Sampler(
        engine=engine,
        prompts=prompts,
        order=PromptSampler(len(prompts), args.seed, args.shuffle_dataset),
        rewards=trainer.rewards,
        shaping=trainer.shaping,
        runtime=runtime,
        args=args,
        policy=trainer.learner.full_policy,
        tokenizer=tokenizer,
        stop_token_ids=stops,
        progress=trainer.progress,
        episode_runner=runner,
    )
    trainer.ahead = None
    if trainer.trains and args.rollout_ahead:
        trainer.ahead = Ahead(trainer.sampler, args.rollout_ahead, runtime, trainer.progress)

    # Checkpoints and the record of each step.
    trainer.checkpointer = Checkpointer(
        directory=Path(args.output_dir) / "checkpoints",
        parts=trainer.learner.parts,
        tokenizer=tokenizer,
        backend=trainer.learner.backend,
        scheduler=trainer.learner.scheduler,
        state=trainer.state,
        config=trainer.saved_config(),
        fingerprints=lambda: trainer.learner.fingerprints | trainer.fingerprints,
        running=trainer.running,
        limit=args.save_total_limit,
        found=trainer.open_keys,
        ahead=trainer.ahead,
    )
    trainer.recorder = Recorder(
        runtime,
        tokenizer,
        trainer.shaping.names,
        parameters=lambda: trainer.checkpointer.parameters,
    )


def _listed(value: Any) -> str:
    if isinstance(value, str):
        return value
    return ", ".join(value)


def refuse_given_twice(args: PolicyGradientConfig, arguments: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of given arguments that no config key can replace; ValueError if one is
    missing that the run of a recorded config had.
    """
    names = []
    for name, value in arguments.items():
        is_given = any(value) if isinstance(value, list | tuple) else value is not None
        if is_given:
            names.append(name)
    missing = [name for name in args.given_in_python if name not in names]
    if missing:
        raise ValueError(
            f"given_in_python: the run of this config was given {', '.join(missing)} in Python: "
            "give the same to the trainer again, or take the names out of given_in_python"
        )
    return tuple(names)
