"""Mistakes in everything but the formulas: tokens, models, rewards, sampling and the loop."""

from tests.mutants import Mutant

EXACT = "tests/trainers/test_exact_gradients.py"
INVARIANCE = "tests/trainers/test_invariance.py"
PPO = "tests/trainers/test_ppo.py"
CHECK = "tests/trainers/test_model_check.py"
MODE = "tests/models/test_training_mode.py"
RUN = "tests/trainers/test_run.py"
STEP = "tests/trainers/test_step.py"
POLICY = "tests/models/test_policy.py"
CRITIC = "tests/models/test_critic.py"
REFERENCE = "tests/models/test_reference.py"
NATIVE = "tests/rollout/native/test_engine.py"
SAMPLING = "tests/rollout/test_token_sampling.py"
REWARDS = "tests/rewards/test_functions.py"
DISTRIBUTED = "tests/distributed/test_invariance.py"

RECORDS = [
    Mutant(
        name="mask-from-pad-id",
        mistake="the mask is read off the ids: an EOS that is also pad is not trained (TRL #4970)",
        target="rlhf_pg.data.records.Rollout.from_tokens",
        old='"action_mask": action_mask,',
        new='"action_mask": action_mask & (completion_ids != pad_token_id),',
        killers=("tests/data/test_records.py::test_a_real_token_equal_to_pad_is_still_real",),
    ),
    Mutant(
        name="last-token-is-no-action",
        mistake="the last token of a completion, its EOS, does not enter the loss",
        target="rlhf_pg.data.records.Rollout.from_tokens",
        old='"action_mask": action_mask,',
        new='"action_mask": action_mask & action_mask.roll(-1, 1),',
        killers=(f"{EXACT}::test_unbiased",),
    ),
    Mutant(
        name="prompts-cut-on-the-wrong-side",
        mistake="padding is cut off the right of left-padded prompts, their last tokens with it",
        target="rlhf_pg.data.records.Rollout.select",
        old="value[:, -prompt_width:]",
        new="value[:, :prompt_width]",
        killers=(
            "tests/data/test_records.py::"
            "test_select_takes_rows_in_the_given_order_and_cuts_common_padding",
        ),
    ),
    Mutant(
        name="two-bos",
        mistake="the chat template and the tokenizer each put a BOS in front (NeMo #855)",
        target="rlhf_pg.data.chat.encode",
        old="if len(ids) > 1 and ids[0] == ids[1] == tokenizer.bos_token_id:",
        new="if False:",
        killers=("tests/data/test_prompts.py::test_a_bos_stands_in_front_once",),
    ),
    Mutant(
        name="long-prompts-cut",
        mistake="a prompt that is too long loses its beginning without a word",
        target="rlhf_pg.data.prompts.load_prompts",
        old="encode(prompt, tokenizer, row, tools=tools, most=max_prompt_length)",
        new="encode(prompt, tokenizer, row, tools=tools)[-(max_prompt_length or 0) :]",
        killers=(
            "tests/data/test_prompts.py::test_longer_prompts_are_an_error_that_names_the_first",
        ),
    ),
    Mutant(
        name="one-order-for-every-epoch",
        mistake="every epoch goes through the prompts in the same order",
        target="rlhf_pg.data.prompts.PromptSampler._order",
        old="permutation(self.size, self.seed, epoch)",
        new="permutation(self.size, self.seed)",
        killers=("tests/data/test_prompts.py::test_epochs_and_seeds_have_orders_of_their_own",),
    ),
    Mutant(
        name="groups-interleaved",
        mistake="group ids in another order than the rows: groups mix prompts",
        target="rlhf_pg.trainers.samples.sample",
        old="groups=[index for index in prompt_indices for _ in range(n)]",
        new="groups=[index for _ in range(n) for index in prompt_indices]",
        killers=(f"{INVARIANCE}::test_a_group_with_equal_scores_has_no_gradient",),
    ),
    Mutant(
        name="columns-interleaved",
        mistake="prompts and columns are repeated in another order than the completions",
        target="rlhf_pg.trainers.samples.sample",
        old="[row for row in rows for _ in range(n)]",
        new="[row for _ in range(n) for row in rows]",
        killers=(f"{STEP}::test_a_reward_sees_the_prompt_and_columns_that_were_answered",),
    ),
    Mutant(
        name="completions-retokenized",
        mistake="rewards see the ids of the decoded text, not those that were sampled (TRL #5224)",
        target="rlhf_pg.trainers.samples.sample",
        old="completion_ids=[episode.tokens for episode in episodes],",
        new="completion_ids=[tokenizer(tokenizer.decode(e.tokens, skip_special_tokens=True))"
        '["input_ids"] for e in episodes],',
        killers=(f"{STEP}::test_rewards_see_the_ids_that_were_sampled",),
    ),
]

MODELS = [
    Mutant(
        name="attention-cut-with-the-loss-mask",
        mistake="what does not enter the loss is not attended to either (TRL's completion_mask)",
        target="rlhf_pg.models.packing.lay_out_packed",
        old="kept = there & (first[:, None] | (columns >= width))",
        new="kept = there & (first[:, None] & (columns < width) | (columns >= width))\n"
        "    kept[:, width:] &= batch.action_mask.cpu()",
        killers=(f"{POLICY}::test_tool_tokens_are_attended_to_and_not_scored",),
    ),
    Mutant(
        name="positions-from-the-column",
        mistake="left padding shifts the positions (OpenRLHF #217, TRL #6800)",
        target="rlhf_pg.models.packing.lay_out_packed",
        old="(there.cumsum(dim=1) - 1)[kept]",
        new="torch.arange(there.shape[1]).expand_as(there)[kept]",
        killers=(f"{POLICY}::test_equals_an_unpadded_teacher_forced_forward",),
    ),
    Mutant(
        name="logits-off-by-one",
        mistake="each token is scored by the logits in its own column (TRL #3681)",
        target="rlhf_pg.models.Policy.logits",
        old="output.logits[:, -columns:-1]",
        new="output.logits[:, 1 - columns :]",
        killers=(f"{POLICY}::test_each_token_is_scored_by_the_logits_of_the_token_before_it",),
    ),
    Mutant(
        name="temperature-not-in-the-scores",
        mistake="what was sampled at a temperature is scored without it (TRL #4159)",
        target="rlhf_pg.models.softmax.Law.slope",
        old="return self.transform.scale / self.temperature",
        new="return self.transform.scale",
        killers=(f"{POLICY}::test_a_temperature_of_one_half_squares_the_odds",),
    ),
    Mutant(
        name="log-softmax-in-half-precision",
        mistake="log-probabilities of a bfloat16 model are computed in bfloat16",
        target="rlhf_pg.models.softmax.Law.logits",
        old="z, bend = widen(output[rows]), None",
        new="z, bend = output[rows], None",
        killers=("tests/models/test_lm_head.py::test_half_precision_is_scored_in_single",),
    ),
    Mutant(
        name="entropy-of-impossible-tokens",
        mistake="0 * log 0 makes the entropy NaN where a logit is -inf",
        target="rlhf_pg.models.softmax.Law.scores",
        old="            everywhere.clamp_(min=IMPOSSIBLE)\n",
        new="",
        killers=(f"{POLICY}::test_impossible_tokens_leave_entropy_and_gradient_finite",),
    ),
    Mutant(
        name="entropy-without-gradient",
        mistake="the entropy in the loss is detached, so the bonus does nothing",
        target="rlhf_pg.models.softmax._Scores.forward",
        old="        if not law.entropy_gradient:\n            ctx.mark",
        new="        if True:\n            ctx.mark",
        killers=(f"{PPO}::test_the_entropy_bonus_follows_the_entropy_of_every_visited_state",),
    ),
    Mutant(
        name="trainer-scores-at-temperature-1",
        mistake="the trainer leaves the temperature of sampling out of ratio and KL (TRL #4159)",
        target="rlhf_pg.models.assemble.assembled",
        old="Policy(model, args.temperature, ",
        new="Policy(model, 1.0, ",
        killers=(f"{STEP}::test_what_was_sampled_is_scored_alike",),
    ),
    Mutant(
        name="attention-dropout-left-on",
        mistake="dropout is switched off in modules, but not in the rates that attention reads",
        target="rlhf_pg.models.disable_dropout",
        old='if "drop" in name and isinstance(value, float):',
        new="if False:",
        killers=(
            "tests/models/test_loading.py::"
            "test_without_dropout_train_mode_computes_what_eval_mode_does",
        ),
    ),
    Mutant(
        name="dropout-in-the-update",
        mistake="dropout makes the ratio of the first update differ from 1",
        target="rlhf_pg.models.assemble.assembled",
        old="if args.disable_dropout:",
        new="if False:",
        killers=(f"{RUN}::test_dropout_is_off_by_default",),
    ),
    Mutant(
        name="updates-in-train-mode",
        mistake="updates run in train mode, in which routers jitter whatever dropout is",
        target="rlhf_pg.models.Policy.train",
        old="if mode and not self.drops:",
        new="if False:",
        killers=(f"{MODE}::test_an_update_sees_the_policy_that_was_scored",),
    ),
    Mutant(
        name="what-recomputes-drops-out",
        mistake="a layer that recomputes its activations drops out what it drops in train mode",
        target="rlhf_pg.models.modes._mode_of_children",
        old="all(child.training for child in part.children())",
        new="own",
        killers=(f"{MODE}::test_an_update_sees_the_policy_that_was_scored",),
    ),
    Mutant(
        name="nothing-recomputes",
        mistake="updates in evaluation mode keep the activations that they were to recompute",
        target="rlhf_pg.models.modes.train_as_evaluated",
        old='bool(getattr(part, "gradient_checkpointing", False))',
        new="False",
        killers=(f"{MODE}::test_activations_are_recomputed",),
    ),
    Mutant(
        name="positions-by-company",
        mistake="LongRoPE takes other frequencies once one row of a batch is long",
        target="rlhf_pg.trainers.setup.TrainerSetup._settle_positions",
        old="models.settle_positions(module, max(longest, self.longest_row))",
        new="pass",
        killers=(f"{CHECK}::test_a_run_settles_them",),
    ),
    Mutant(
        name="positions-by-the-prompt",
        mistake="LongRoPE's frequencies are settled for a row that is not the longest",
        target="rlhf_pg.models.settle_positions",
        old="[[longest - 1]]",
        new="[[0]]",
        killers=(f"{CHECK}::test_positions_are_settled_by_the_longest_row_of_the_run",),
    ),
    Mutant(
        name="padding-not-looked-at",
        mistake="a model for which a padded row is another row is computed in padding",
        target="rlhf_pg.trainers.model_check.examine",
        old="pads = not run.differ(_rows(run.score(unlike), unlike), [alone[0], alone[2]])",
        new="pads = True",
        killers=(f"{CHECK}::test_what_is_mended",),
    ),
    Mutant(
        name="reference-packed-all-the-same",
        mistake="the policy is not packed any more and its reference is: a KL between equal models",
        target="rlhf_pg.trainers.learner.Learner.keep_to",
        old="for part in (self.policy, self.critic, of_reference):",
        new="for part in (self.policy, self.critic):",
        killers=(f"{CHECK}::test_the_reference_keeps_to_it_too",),
    ),
    Mutant(
        name="baseline-in-other-company",
        mistake="what evaluates before the run samples in ways that the run finds wrong",
        target="rlhf_pg.trainers.PolicyGradientTrainer.evaluate",
        old="        self._keep_to_model()\n",
        new="",
        killers=(f"{CHECK}::test_what_evaluates_before_the_run_keeps_to_it_too",),
    ),
    Mutant(
        name="padding-found-and-forgotten",
        mistake="the learner pads rows that the model check found to change in padding",
        target="rlhf_pg.trainers.learner.Learner.keep_to",
        old="self.pads, self.together = pads, together",
        new="pass",
        killers=(f"{CHECK}::test_what_was_sampled_is_scored_alike_where_padding_changes_a_row",),
    ),
    Mutant(
        name="sampled-in-padding",
        mistake="the engine pads prompts that the model check found to change in padding",
        target="rlhf_pg.rollout.native.engine._NativeSession._way",
        old="options = (engine.pad_token_id, engine.cache_tokens, engine.pads, engine.together)",
        new="options = (engine.pad_token_id, engine.cache_tokens)",
        killers=(f"{CHECK}::test_what_was_sampled_is_scored_alike_where_padding_changes_a_row",),
    ),
    Mutant(
        name="sampler-not-looked-at",
        mistake="a model that samples otherwise than it scores is trained without a word",
        target="rlhf_pg.trainers.model_check._sampled_right",
        old="if not run.differ(said, by_row(run.score, drawn)):",
        new="if True:",
        killers=(f"{CHECK}::test_what_is_refused",),
    ),
    Mutant(
        name="not-a-number-is-close",
        mistake="numbers that are NaN in padding count as those of the row alone",
        target="rlhf_pg.trainers.model_check.Examined.differ",
        old="not all(bool(x <= LIMITS[self.dtype]) for x in apart)",
        new="any(bool(x > LIMITS[self.dtype]) for x in apart)",
        killers=(f"{CHECK}::test_padding_that_is_not_a_number_in_float64_is_left_out",),
    ),
    Mutant(
        name="reference-is-the-policy",
        mistake="the reference is not a copy and follows the policy: a KL of 0 for ever",
        target="rlhf_pg.models.Reference.__init__",
        old="share_frozen(policy).eval().requires_grad_(False)",
        new="policy",
        killers=(f"{REFERENCE}::test_training_the_policy_does_not_touch_it",),
    ),
    Mutant(
        name="reference-without-its-adapter",
        mistake="the reference is the base model although training began at an adapter (TRL #1340)",
        target="rlhf_pg.models.Reference.__init__",
        old="if adds_nothing(policy.model) and not moves:",
        new='if hasattr(policy.model, "unload"):',
        killers=(
            "tests/models/test_adapters.py::"
            "test_the_reference_of_an_adapter_that_adds_something_is_the_initial_policy",
        ),
    ),
    Mutant(
        name="reference-in-train-mode",
        mistake="the reference drops out",
        target="rlhf_pg.models.Reference.train",
        old="super().train(False)",
        new="super().train(mode)",
        killers=(f"{REFERENCE}::test_it_stays_in_eval_mode_and_leaves_the_policy_in_its_own",),
    ),
    Mutant(
        name="adapter-discarded-on-resume",
        mistake="a resumed run goes on with a fresh adapter (lerobot #3459)",
        target="rlhf_pg.models.load_weights",
        old='set_peft_model_state_dict(model, load_file(path / "adapter_model.safetensors"))',
        new="pass",
        killers=("tests/models/test_adapters.py::test_restored_weights_are_equal_and_in_place",),
    ),
    Mutant(
        name="base-weights-copied",
        mistake="policy and reference each hold the frozen base weights",
        target="rlhf_pg.models.adapters.share_frozen",
        old="copy.deepcopy(module, frozen)",
        new="copy.deepcopy(module)",
        killers=(
            "tests/models/test_adapters.py::test_frozen_tensors_are_shared_and_the_others_copied",
        ),
    ),
]

CRITICS = [
    Mutant(
        name="value-head-at-random",
        mistake="the value head begins at random, and V is noise",
        target="rlhf_pg.models.ValueHead.__init__",
        old="nn.init.zeros_(self.weight)",
        new="pass",
        killers=(f"{CRITIC}::test_the_first_values_are_exactly_0_in_single_precision_at_least",),
    ),
    Mutant(
        name="value-head-in-half-precision",
        mistake="the value head is kept in bfloat16, where small updates are lost",
        target="rlhf_pg.models.ValueHead.__init__",
        old="dtype=torch.promote_types(dtype, torch.float32)",
        new="dtype=dtype",
        killers=(f"{CRITIC}::test_the_first_values_are_exactly_0_in_single_precision_at_least",),
    ),
    Mutant(
        name="value-after-the-token",
        mistake="V of the state after the token: the baseline knows the action, and is biased",
        target="rlhf_pg.models.Critic.forward",
        old="torch.where(mask, values[states[:, :-1]], 0.0)",
        new="torch.where(mask, values[states[:, 1:]], 0.0)",
        killers=(f"{PPO}::test_with_the_true_values_every_expected_advantage_is_zero",),
    ),
    Mutant(
        name="bootstrap-from-the-last-state",
        mistake="a truncated row is bootstrapped with V(s_t), not V(s_t+1) (skrl's code)",
        target="rlhf_pg.models.Critic.forward",
        old="torch.arange(1, states.shape[1], device=mask.device)",
        new="torch.arange(states.shape[1] - 1, device=mask.device)",
        killers=(f"{PPO}::test_a_completion_cut_off_ends_as_it_was_chosen_to",),
    ),
    Mutant(
        name="values-times-mask",
        mistake="masked values are multiplied away, and NaN * 0 is NaN",
        target="rlhf_pg.models.Critic.forward",
        old="torch.where(mask, values[states[:, :-1]], 0.0)",
        new="values[states[:, :-1]] * mask",
        killers=(f"{CRITIC}::test_undefined_values_stay_in_masked_slots",),
    ),
    Mutant(
        name="critic-is-the-policy",
        mistake="the critic trains the policy's own trunk and not a copy",
        target="rlhf_pg.models.critic._copy",
        old="share_frozen(trunk(policy_model))",
        new="trunk(policy_model)",
        killers=(f"{CRITIC}::test_policy_and_critic_share_what_is_frozen_and_nothing_else",),
    ),
    Mutant(
        name="critic-is-the-reward-model",
        mistake="the critic trains the reward model that it began as",
        target="rlhf_pg.models.new_critic",
        old="value_model = copy.deepcopy(value_model)  #",
        new="pass  #",
        killers=(
            f"{PPO}::test_a_value_model_that_is_the_reward_model_too_leaves_the_reward_alone",
        ),
    ),
]

SOURCES = [
    Mutant(
        name="reward-mutates-its-input",
        mistake="what one reward function does to its arguments, the next one and the trainer see",
        target="rlhf_pg.rewards.Rewards._call",
        old="copy.deepcopy(lists | wanted)",
        new="(inputs | wanted)",
        killers=(f"{REWARDS}::test_what_one_function_does_to_its_input_nobody_else_sees",),
    ),
    Mutant(
        name="infinite-reward",
        mistake="an infinite reward passes as a number, 3.4e38 (TRL's nan_to_num)",
        target="rlhf_pg.rewards.functions._number",
        old="if not math.isfinite(number):",
        new="if math.isnan(number):",
        killers=(
            f"{REWARDS}::test_a_score_that_is_no_finite_number_names_function_and_completion",
        ),
    ),
    Mutant(
        name="none-is-zero",
        mistake="a reward that does not apply counts as 0",
        target="rlhf_pg.rewards.functions._number",
        old="if score is None:\n        return math.nan",
        new="if score is None:\n        return 0.0",
        killers=(f"{REWARDS}::test_none_is_a_gap_in_its_column_alone",),
    ),
    Mutant(
        name="reward-at-the-first-pad",
        mistake="the score is read before the first pad: wrong where padding is on the left "
        "(huggingface/transformers#35911)",
        target="rlhf_pg.rewards.reward_model.sequence_scores",
        old="(mask * torch.arange(mask.shape[1], device=mask.device)).argmax(dim=1)",
        new="mask.sum(dim=1) - 1",
        killers=(
            "tests/rewards/test_reward_model.py::"
            "test_a_decoder_is_scored_at_the_last_real_token_whatever_the_padding",
        ),
    ),
    Mutant(
        name="reward-pad-by-id",
        mistake="padding is found by the id of pad, which may be EOS or missing "
        "(huggingface/transformers#35911)",
        target="rlhf_pg.rewards.reward_model.sequence_scores",
        old="(mask * torch.arange(",
        new="((input_ids != (model.config.pad_token_id or 0)) * torch.arange(",
        killers=(
            "tests/rewards/test_reward_model.py::"
            "test_a_decoder_is_scored_at_the_last_real_token_whatever_the_padding",
        ),
    ),
    Mutant(
        name="reward-model-opens-a-turn",
        mistake="the reward model reads every chat as if its last turn had been cut off",
        target="rlhf_pg.rewards.reward_model.encode_whole",
        old='"text", open_turn=cut and continues(text)',
        new='"text", open_turn=True',
        killers=(
            "tests/rewards/test_reward_model.py::test_a_chat_turn_that_was_cut_off_is_left_open",
        ),
    ),
    Mutant(
        name="reward-model-drops-out",
        mistake="the reward model is left in train mode",
        target="rlhf_pg.rewards.RewardModel.__init__",
        old="model.to(device or model.device).eval()",
        new="model.to(device or model.device)",
        killers=(
            "tests/rewards/test_reward_model.py::test_it_neither_drops_out_nor_keeps_gradients",
        ),
    ),
    Mutant(
        name="preferences-reversed",
        mistake="the reward model learns to prefer what was rejected",
        target="rlhf_pg.rewards.bradley_terry_loss",
        old="logsigmoid(chosen - rejected)",
        new="logsigmoid(rejected - chosen)",
        killers=("tests/rewards/test_bradley_terry.py::test_the_gradient_is_the_doubt",),
    ),
]

LOOP = [
    Mutant(
        name="kl-reward-with-the-wrong-sign",
        mistake="the KL is added to the reward (the RLHF book's formula)",
        target="rlhf_pg.trainers.experience_maker._minus_kl",
        old="return -kl_coef * kl",
        new="return kl_coef * kl",
        killers=(f"{EXACT}::test_unbiased_with_the_kl_in_the_reward",),
    ),
    Mutant(
        name="kl-loss-with-the-wrong-sign",
        mistake="the KL is subtracted from the loss (the RLHF book's formula)",
        target="rlhf_pg.trainers.PolicyGradientTrainer.regularizer",
        old="return per_token + self.",
        new="return per_token - self.",
        killers=(f"{EXACT}::test_k3_in_the_loss_follows_the_reverse_kl",),
    ),
    Mutant(
        name="kl-counted-twice",
        mistake="the KL is paid in the reward and in the loss",
        target="rlhf_pg.trainers.PolicyGradientTrainer.regularizer",
        old='if batch.ref_logprobs is None or self.args.kl_placement == "reward":',
        new="if batch.ref_logprobs is None:",
        killers=(f"{STEP}::test_a_kl_that_is_paid_in_the_reward_is_not_in_the_loss_too",),
    ),
    Mutant(
        name="entropy-penalised",
        mistake="the entropy bonus has its sign twice (skrl's docs)",
        target="rlhf_pg.trainers.PolicyGradientTrainer.regularizer",
        old="per_token = -self.",
        new="per_token = self.",
        killers=(f"{PPO}::test_the_entropy_bonus_follows_the_entropy_of_every_visited_state",),
    ),
    Mutant(
        name="ratio-to-the-reference",
        mistake="the ratio of PPO is taken to the reference, not to the old policy (the RLHF book)",
        target="rlhf_pg.trainers.PolicyGradientTrainer.surrogate",
        old="new.logprobs, batch.old_logprobs, batch.advantages",
        new="new.logprobs, "
        "batch.old_logprobs if batch.ref_logprobs is None else batch.ref_logprobs, "
        "batch.advantages",
        killers=(f"{EXACT}::test_unbiased_with_the_kl_in_the_reward",),
    ),
    Mutant(
        name="score-at-the-first-token",
        mistake="the score is paid at the first token instead of the last",
        target="rlhf_pg.rewards.scores.ends",
        old="mask.shape[1] - 1 - mask.flip(1).int().argmax(1)",
        new="mask.int().argmax(1)",
        killers=(f"{PPO}::test_the_score_is_paid_at_the_last_token_and_nothing_comes_after_it",),
    ),
    Mutant(
        name="score-at-every-token",
        mistake="the score is paid at every token",
        target="rlhf_pg.rewards.functions._placed",
        old="table[i, last[i]] = ",
        new="table[i] = ",
        killers=(f"{PPO}::test_the_score_is_paid_at_the_last_token_and_nothing_comes_after_it",),
    ),
    Mutant(
        name="score-in-the-last-column",
        mistake="the score is paid in the last column, which is padding where a row is shorter",
        target="rlhf_pg.rewards.scores.ends",
        old="mask.shape[1] - 1 - mask.flip(1).int().argmax(1)",
        new="torch.full((len(mask),), mask.shape[1] - 1, device=mask.device)",
        killers=(f"{PPO}::test_explained_variance_by_hand",),
    ),
    Mutant(
        name="value-target-is-the-instant-reward",
        mistake="the critic regresses to the reward of the token (the RLHF book's code)",
        target="rlhf_pg.trainers.PPOTrainer.returns",
        old="return advantages + inputs.values",
        new="return inputs.rewards",
        killers=(
            f"{PPO}::test_advantages_are_whitened_over_the_tokens_of_the_step_and_returns_are_not",
        ),
    ),
    Mutant(
        name="value-target-from-whitened-advantages",
        mistake="the critic's target is made of whitened advantages",
        target="rlhf_pg.trainers.experience_maker.make_experience",
        old="        returns=returns,",
        new="        returns=None if returns is None else advantages + outputs.values,",
        killers=(
            f"{PPO}::test_advantages_are_whitened_over_the_tokens_of_the_step_and_returns_are_not",
        ),
    ),
    Mutant(
        name="padding-whitened",
        mistake="advantages are whitened with the padding (the RLHF book's code)",
        target="rlhf_pg.trainers.experience_maker.make_experience",
        old=("advantages = whiten(advantages, mask, stats=runtime.mean_and_var(advantages, mask))"),
        new="advantages = whiten(advantages, torch.ones_like(mask))",
        killers=(
            f"{PPO}::test_advantages_are_whitened_over_the_tokens_of_the_step_and_returns_are_not",
        ),
    ),
    Mutant(
        name="ended-completions-bootstrapped",
        mistake="what ended is bootstrapped as if it had been cut off",
        target="rlhf_pg.trainers.PPOTrainer.values_of",
        old="end.where(rollout.truncated, 0.0)",
        new="end",
        killers=(f"{PPO}::test_an_ended_completion_is_never_bootstrapped",),
    ),
    Mutant(
        name="truncation-is-termination",
        mistake="what was cut off counts as ended (a well-known blog's terminal or truncated)",
        target="rlhf_pg.trainers.PPOTrainer.values_of",
        old="return values, end.where(rollout.truncated, 0.0)",
        new="return values, None",
        killers=(f"{PPO}::test_a_completion_cut_off_ends_as_it_was_chosen_to",),
    ),
    Mutant(
        name="values-clipped-to-themselves",
        mistake="values are clipped around the new ones, so never",
        target="rlhf_pg.trainers.PPOTrainer.loss",
        old="new.values, batch.values, batch.returns",
        new="new.values, new.values, batch.returns",
        killers=(f"{PPO}::test_the_loss_is_the_sum_of_its_parts",),
    ),
    Mutant(
        name="mean-of-means",
        mistake="each micro-batch is averaged over its own tokens (open-instruct #1161)",
        target="rlhf_pg.trainers.learner.Learner.accumulate",
        old="                    count,\n",
        new="                    None,\n",
        killers=(f"{INVARIANCE}::test_micro_batch_split",),
    ),
    Mutant(
        name="denominator-of-another-window",
        mistake="the denominator counts more than the optimizer step (TRL #6024)",
        target="rlhf_pg.trainers.learner.Learner.accumulate",
        old="self.runtime.all_reduce_sum(weight_count(minibatch.action_mask, args.aggregation))",
        new="args.num_mini_batches * self.runtime.all_reduce_sum(\n"
        "            weight_count(minibatch.action_mask, args.aggregation))",
        killers=(f"{STEP}::test_a_minibatch_counts_its_own_tokens_alone",),
    ),
    Mutant(
        name="constant-is-the-padded-width",
        mistake="Dr. GRPO's constant is the width of the batch (verl's default)",
        target="rlhf_pg.trainers.learner.Learner.accumulate",
        old="                    args.max_completion_length,\n",
        new="                    batch.action_mask.shape[1],\n",
        killers=(f"{INVARIANCE}::test_micro_batch_split",),
    ),
    Mutant(
        name="empty-micro-batch-skipped",
        mistake="a micro-batch without actions is skipped: parameters have no gradient, DDP waits",
        target="rlhf_pg.trainers.learner.Learner.accumulate",
        old="                new: PolicyOutput = self.trained(batch)\n",
        new="                if not batch.action_mask.any():\n"
        "                    continue\n"
        "                new: PolicyOutput = self.trained(batch)\n",
        killers=(f"{INVARIANCE}::test_rows_without_actions_add_nothing",),
    ),
    Mutant(
        name="ratio-of-one-update-from-rounding",
        mistake="with one update the ratio depends on the micro-batch's shape (verl #6280)",
        target="rlhf_pg.trainers.experience_maker.make_experience",
        old="old_logprobs=outputs.old_logprobs if args.compares_with_old else None",
        new="old_logprobs=outputs.old_logprobs",
        killers=(f"{STEP}::test_the_ratio_of_a_single_update_is_1_by_construction",),
    ),
    Mutant(
        name="norm-of-the-policy-alone",
        mistake="the gradient is clipped by the policy's norm, the critic's is left out",
        target="rlhf_pg.runtime.DDPBackend.step",
        old="for p in self.module.parameters()]",
        new="for p in self.module.policy.parameters()]",
        killers=(f"{PPO}::test_policy_and_critic_have_one_gradient_norm",),
    ),
    Mutant(
        name="gradient-not-clipped",
        mistake="max_grad_norm is logged and not applied (TRL's PPO loop had no clipping)",
        target="rlhf_pg.runtime.DDPBackend.step",
        old="self.max_grad_norm or torch.inf",
        new="torch.inf",
        killers=(f"{STEP}::test_the_gradient_is_scaled_down_to_the_norm_that_is_set",),
    ),
    Mutant(
        name="abandoned-gradient-kept",
        mistake="the gradient of the minibatch at which updates stopped enters the next step",
        target="rlhf_pg.trainers.learner.Learner._updates",
        old="                self.trained.zero_grad_of(self.module)\n"
        "                self.trained.step()\n                break",
        new="                break",
        killers=(f"{STEP}::test_a_minibatch_that_stops_the_updates_leaves_no_gradient",),
    ),
    Mutant(
        name="rate-per-update",
        mistake="the schedule advances with every update and not once per step (accelerate's, by "
        "every process)",
        target="rlhf_pg.trainers.learner.Learner.next_rate",
        old="        self.scheduler.step()\n",
        new="        for _ in norms:\n            self.scheduler.step()\n",
        killers=(f"{RUN}::test_the_learning_rate_advances_once_per_step",),
    ),
    Mutant(
        name="adam-epsilon-ignored",
        mistake="Adam has the epsilon of the library and not the one that was set",
        target="rlhf_pg.trainers.optimizer._adamw",
        old='"betas": betas, "eps": args.adam_epsilon}',
        new='"betas": betas}',
        killers=(f"{STEP}::test_the_optimizer_is_as_configured",),
    ),
    Mutant(
        name="draws-not-counted",
        mistake="every step, and so a resumed run, begins with the first prompts again",
        target="rlhf_pg.trainers.PolicyGradientTrainer.finish_step",
        old="state.prompt_index += batch.num_prompts",
        new="pass",
        killers=(f"{STEP}::test_the_noise_of_a_step_is_its_own",),
    ),
]

PROCESSES = [
    Mutant(
        name="gradient-averaged-over-processes",
        mistake="DDP's mean over processes is left in the gradient",
        target="rlhf_pg.runtime.DDPBackend.backward",
        old="torch.autograd.backward(loss * self._world)",
        new="torch.autograd.backward(loss)",
        killers=(f"{DISTRIBUTED}::test_the_gradient_of_an_update_is_the_same[ddp-2-grpo]",),
    ),
    Mutant(
        name="tokens-counted-per-process",
        mistake="every process averages over its own tokens, however few",
        target="rlhf_pg.trainers.learner.Learner.accumulate",
        old="self.runtime.all_reduce_sum(weight_count(minibatch.action_mask, args.aggregation))",
        new="weight_count(minibatch.action_mask, args.aggregation) * self.runtime.world",
        killers=(f"{DISTRIBUTED}::test_the_gradient_of_an_update_is_the_same[ddp-2-grpo]",),
    ),
    Mutant(
        name="whitening-per-process",
        mistake="advantages are whitened on each process by itself (TRL's PPO; slime #2235)",
        target="rlhf_pg.trainers.experience_maker.make_experience",
        old="whiten(advantages, mask, stats=runtime.mean_and_var(advantages, mask))",
        new="whiten(advantages, mask)",
        killers=(f"{DISTRIBUTED}::test_the_gradient_of_an_update_is_the_same[ddp-2-ppo]",),
    ),
]

MUTANTS = [*RECORDS, *MODELS, *CRITICS, *SOURCES, *LOOP, *PROCESSES]
