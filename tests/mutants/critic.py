"""Mistakes in what the critic learns and when, and in a reference that follows the policy."""

from tests.mutants import Mutant

OPTIONS = "tests/trainers/test_critic_options.py"
MOVING = "tests/trainers/test_moving_reference.py"
REFERENCE = "tests/models/test_reference.py"
DISTRIBUTED = "tests/distributed/test_invariance.py"

TARGETS = [
    Mutant(
        name="value-target-advantage",
        mistake="the critic regresses to the advantage: the value is not added back",
        target="rlhf_pg.trainers.PPOTrainer.returns",
        old="return advantages + inputs.values",
        new="return advantages",
        killers=(f"{OPTIONS}::test_advantages_and_returns_by_hand",),
    ),
    Mutant(
        name="value-target-with-the-policys-lambda",
        mistake="the critic's targets take the policy's lambda (what VAPO decouples)",
        target="rlhf_pg.trainers.PPOTrainer.returns",
        old="inputs.mask, args.gamma, args.value_lam, end)[1]",
        new="inputs.mask, args.gamma, args.lam, end)[1]",
        killers=(f"{OPTIONS}::test_advantages_and_returns_by_hand",),
    ),
    Mutant(
        name="value-lam-moves-the-policy",
        mistake="the lambda of the critic's targets is used for the advantages as well",
        target="rlhf_pg.trainers.PolicyGradientTrainer.make_experience",
        old="        advantages = self.advantages(inputs)",
        new=(
            "        advantages = self.advantages(inputs) if getattr(args, "
            '"value_lam", None) is None else self.returns(inputs, inputs.values) - '
            "inputs.values"
        ),
        killers=(f"{OPTIONS}::test_advantages_and_returns_by_hand",),
    ),
    Mutant(
        name="value-target-ends-at-the-cut",
        mistake="the critic's targets end in 0 where a completion was cut off, the advantages in V",
        target="rlhf_pg.trainers.PPOTrainer.returns",
        old="args.value_lam, end)[1]",
        new="args.value_lam, None)[1]",
        killers=(f"{OPTIONS}::test_advantages_and_returns_by_hand",),
    ),
]

UNITS = [
    Mutant(
        name="values-not-denormalised",
        mistake="advantages are taken of normalised values and plain rewards",
        target="rlhf_pg.trainers.PPOTrainer.values_of",
        old="torch.where(rollout.action_mask, moments.denormalize(values), 0.0)",
        new="values",
        killers=(f"{OPTIONS}::test_normalized_critic_gives_same_advantages",),
    ),
    Mutant(
        name="end-value-not-denormalised",
        mistake="of the critic's values all but the one after a cut-off are denormalised",
        target="rlhf_pg.trainers.PPOTrainer.values_of",
        old="            end = moments.denormalize(end)\n",
        new="",
        killers=(f"{OPTIONS}::test_normalized_critic_gives_same_advantages",),
    ),
    Mutant(
        name="value-targets-not-normalised",
        mistake="the critic's values are denormalised, and its targets were never normalised",
        target="rlhf_pg.trainers.PPOTrainer.critic_targets",
        old="return torch.where(mask, moments.normalize(returns), 0.0), metrics",
        new="return returns, metrics",
        killers=(f"{OPTIONS}::test_value_targets_are_normalized_by_running_moments",),
    ),
    Mutant(
        name="old-value-in-other-units",
        mistake="values before the step in units after the moments moved: the clip holds (skrl)",
        target="rlhf_pg.trainers.PolicyGradientTrainer.make_experience",
        old="outputs, advantages, targets,",
        new=(
            "outputs._replace(values=inputs.values if self.value_moments is None "
            "else self.value_moments.normalize(inputs.values)), advantages, "
            "targets,"
        ),
        killers=(f"{OPTIONS}::test_value_clip_of_unmoved_critic_leaves_gradient_unchanged",),
    ),
    Mutant(
        name="value-moments-per-rank",
        mistake="every process normalises values by moments of its own rows",
        target="rlhf_pg.trainers.PPOTrainer.critic_targets",
        old="            moments.update(count, float(mean), float(var))",
        new=(
            "            own = returns[mask].double()\n            "
            "moments.update(len(own), float(own.mean()), "
            "float(own.var(correction=0)))"
        ),
        killers=(f"{DISTRIBUTED}::test_metrics_match_single_process[ddp-2-ppo]",),
    ),
    Mutant(
        name="value-moments-with-padding",
        mistake="padded slots count as returns of 0 in the running moments",
        target="rlhf_pg.trainers.PPOTrainer.critic_targets",
        old="moments.update(count, float(mean), float(var))",
        new="moments.update(float(mask.numel()), float(returns.mean()), "
        "float(returns.var(correction=0)))",
        killers=(f"{OPTIONS}::test_value_targets_are_normalized_by_running_moments",),
    ),
    Mutant(
        name="value-moments-not-saved",
        mistake="a resumed run starts its running moments anew",
        target="rlhf_pg.trainers.PPOTrainer.running",
        old='{"value_moments": self.value_moments}',
        new="{}",
        killers=(
            f"{OPTIONS}::test_run_resumed_around_value_pretraining_is_bit_identical",
            f"{OPTIONS}::test_checkpoint_holds_value_moments_and_trained_critic",
        ),
    ),
    Mutant(
        name="critic-saved-in-its-own-units",
        mistake="the critic that a run leaves gives normalised values, without a word",
        target="rlhf_pg.checkpoint.checkpointer.Checkpointer._save_part",
        old='part.save(path / name, self.running.get("value_moments"))',
        new="part.save(path / name)",
        killers=(
            f"{OPTIONS}::test_saved_critic_gives_denormalized_values",
            f"{OPTIONS}::test_critic_from_checkpoint_gives_denormalized_values",
        ),
    ),
]

HEAD_START = [
    Mutant(
        name="policy-moves-in-value-pretraining",
        mistake="the policy is trained on a critic's first guesses although it was to wait",
        target="rlhf_pg.trainers.learner.Learner._updates",
        old="                self.trained.zero_grad_of(self.policy)\n",
        new="                pass\n",
        killers=(f"{OPTIONS}::test_value_pretraining_excludes_policy_from_norm_and_adam",),
    ),
    Mutant(
        name="further-value-updates-move-the-policy",
        mistake="the extra updates of VPG's critic train the policy as well",
        target="rlhf_pg.trainers.learner.Learner._update_critic_alone",
        old="            self.trained.zero_grad_of(self.policy)  # after",
        new="            pass  # after",
        killers=(f"{OPTIONS}::test_value_iterations_leave_policy_unchanged",),
    ),
    Mutant(
        name="rate-zero-alone-holds-the-policy",
        mistake="a rate of 0 holds the policy, while Adam's moments and the norm take its gradient",
        target="rlhf_pg.trainers.learner.Learner._updates",
        old="                self.trained.zero_grad_of(self.policy)\n",
        new='                self.optimizer.param_groups[0]["lr"] = 0.0\n',
        killers=(f"{OPTIONS}::test_value_pretraining_excludes_policy_from_norm_and_adam",),
    ),
    Mutant(
        name="value-pretraining-one-step-long",
        mistake="the policy waits one step more than it was told",
        target="rlhf_pg.trainers.learner.Learner.trains_critic_alone",
        old="step < self.args.policy_frozen_until",
        new="step <= self.args.policy_frozen_until",
        killers=(f"{OPTIONS}::test_value_pretraining_leaves_policy_unchanged",),
    ),
    Mutant(
        name="warmup-spent-while-waiting",
        mistake="the policy's warm-up passes while it waits, and it begins at the full rate",
        target="rlhf_pg.trainers.optimizer._schedule",
        old="return 0.0 if step < alone else later(step - alone)",
        new="return 0.0 if step < alone else later(step)",
        killers=(f"{OPTIONS}::test_policy_and_critic_have_own_schedules",),
    ),
    Mutant(
        name="coefficients-move-without-the-policy",
        mistake="a beta that moves falls in every step in which the policy is not allowed to",
        target="rlhf_pg.trainers.PolicyGradientTrainer.finish_step",
        old="if not policy_frozen:",
        new="if True:",
        killers=(f"{OPTIONS}::test_controllers_do_not_move_during_value_pretraining",),
    ),
    Mutant(
        name="random-critic-copies-the-policy",
        mistake="a critic of random weights starts from the policy's",
        target="rlhf_pg.trainers.PPOTrainer.new_critic",
        old="            options.random_seed,\n",
        new="            None,\n",
        killers=(f"{OPTIONS}::test_random_critic_shares_only_policy_architecture",),
    ),
]

FOLLOWING = [
    Mutant(
        name="reference-mixed-the-wrong-way-round",
        mistake="ref_model_mixup_alpha taken as the share of the reference",
        target="rlhf_pg.models.Reference.follow",
        old="own.lerp_(theirs, alpha)",
        new="own.lerp_(theirs, 1 - alpha)",
        killers=(
            f"{REFERENCE}::test_follow_interpolates_towards_policy_in_place",
            f"{MOVING}::test_kl_is_zero_only_after_reference_sync",
        ),
    ),
    Mutant(
        name="reference-synced-before-the-update",
        mistake="the reference is refreshed from the policy as it was before the step's updates",
        target="rlhf_pg.trainers.PolicyGradientTrainer.step",
        old="            metrics |= self.update(experience, meter)",
        new=(
            '            vars(self.learner).pop("sync_reference", '
            "None)\n            self.learner.sync_reference(self.state.step + "
            "1)\n            self.learner.sync_reference = lambda step: "
            "None\n            metrics |= self.update(experience, meter)"
        ),
        killers=(f"{MOVING}::test_kl_is_zero_only_after_reference_sync",),
    ),
    Mutant(
        name="reference-not-saved",
        mistake="a resumed run takes the initial model for a reference that had moved (TRL)",
        target="rlhf_pg.checkpoint.checkpointer.Checkpointer._load_models",
        old='if name == "reference" and not part.moves:',
        new='if name == "reference":',
        killers=(f"{MOVING}::test_resumed_run_matches_uninterrupted_run",),
    ),
    Mutant(
        name="moving-reference-without-adapter",
        mistake="with a fresh LoRA the reference is the base model, and has nothing to move",
        target="rlhf_pg.models.Reference.__init__",
        old="if adds_nothing(policy.model) and not moves:",
        new="if adds_nothing(policy.model):",
        killers=(f"{REFERENCE}::test_moving_reference_copies_only_fresh_adapter",),
    ),
    Mutant(
        name="reference-buffers-stay",
        mistake="the reference follows in its parameters and not in its buffers (TRL)",
        target="rlhf_pg.models.reference._tensors",
        old="return [*module.parameters(), *module.buffers()]",
        new="return [*module.parameters()]",
        killers=(f"{REFERENCE}::test_follow_interpolates_towards_policy_in_place",),
    ),
    Mutant(
        name="fingerprint-of-what-moves",
        mistake="a run cannot go on, for its reference is no longer the one that it began with",
        target="rlhf_pg.models.fingerprint",
        old="if stays and isinstance(",
        new="if isinstance(",
        killers=(
            f"{REFERENCE}::test_fingerprint_excludes_moving_weights",
            f"{MOVING}::test_resumed_run_matches_uninterrupted_run",
        ),
    ),
]

MUTANTS = [*TARGETS, *UNITS, *HEAD_START, *FOLLOWING]
