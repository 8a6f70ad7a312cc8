"""Mistakes in sampling: rows, prompts, noise and ends."""

from tests.mutants import Mutant

BATCHING = "tests/rollout/native/test_continuous_batching.py"
FLASH = "tests/rollout/native/test_flash_attention.py"
NATIVE = "tests/rollout/native/test_engine.py"
SAMPLING = "tests/rollout/test_token_sampling.py"
STEP = "tests/trainers/test_step.py"
HANDOVER = "tests/rollout/vllm/test_handover.py"
CHOOSE = "tests/rollout/test_factory.py"
ENGINES = "tests/trainers/test_engines.py"

MUTANTS = [
    Mutant(
        name="small-adapters-lost-in-vllm-without-a-word",
        mistake="nobody hears that vLLM samples without the adapter, which rounding takes away",
        target="rlhf_pg.rollout.vllm.in_process.VllmEngine._warn_of_rounding",
        old="(lost := lost_in_merge(policy)) <= MOST_LOST:",
        new="(lost := lost_in_merge(policy)) <= 1 + MOST_LOST:",
        killers=(
            "tests/rollout/vllm/test_handover.py::test_vllm_says_once_that_rounding_takes_an_adapter",
        ),
    ),
    Mutant(
        name="small-adapters-merged-in-bfloat16",
        mistake="an adapter is merged for sampling into weights whose rounding takes it away "
        "(NeMo-RL #3696)",
        target="rlhf_pg.rollout.NativeEngine._load_weights",
        old="if merges and lost_in_merge(self.model) <= MOST_LOST:",
        new="if merges:",
        killers=(f"{NATIVE}::test_a_small_adapter_in_bfloat16_is_not_rounded_away",),
    ),
    Mutant(
        name="sampler-positions-from-the-column",
        mistake="in sampling, positions do not count the prompt",
        target="rlhf_pg.rollout.native.continuous_batching.BatchingSession._step",
        old="positions = places.positions + last",
        new="positions = last",
        killers=(f"{NATIVE}::test_log_probabilities_equal_a_teacher_forced_forward",),
    ),
    Mutant(
        name="eos-forced",
        mistake="a completion that was cut off is given an EOS it never sampled (OpenRLHF #238)",
        target="rlhf_pg.rollout.native.continuous_batching.BatchingSession._choose",
        old="        drawn.append(rows, ids, logprobs, self.eos)",
        new="        if len(self.eos):\n"
        "            ids = torch.where(lengths + 1 == drawn.limits[rows], self.eos[0], ids)\n"
        "        drawn.append(rows, ids, logprobs, self.eos)",
        killers=(f"{NATIVE}::test_an_eos_only_cuts_the_completion_short",),
    ),
    Mutant(
        name="one-eos-of-several",
        mistake="of several EOS ids one ends a completion",
        target="rlhf_pg.rollout.native.continuous_batching.BatchingSession.__init__",
        old="list(stopping.eos_token_ids)",
        new="list(stopping.eos_token_ids)[:1]",
        killers=(f"{NATIVE}::test_every_token_as_eos_gives_one_token",),
    ),
    Mutant(
        name="eos-of-the-generation-config",
        mistake="the EOS ids of the generation config (a chat's end of turn) are not read",
        target="rlhf_pg.models.stop_token_ids",
        old="*(i for i in ids if i is not None)}",
        new="}",
        killers=(
            "tests/models/test_loading.py::test_every_eos_of_tokenizer_and_generation_config_stops",
        ),
    ),
    Mutant(
        name="last-allowed-eos-is-truncated",
        mistake="a completion that ends with the last allowed token is called truncated",
        target="rlhf_pg.rollout.native.continuous_batching.BatchingSession._take_out",
        old='"stop" if ended[i] else',
        new='"stop" if ended[i] and lengths[i] < row.prompt.limit else',
        killers=(f"{NATIVE}::test_eos_as_the_last_allowed_token_is_a_stop",),
    ),
    Mutant(
        name="dropout-in-sampling",
        mistake="completions are sampled in train mode",
        target="rlhf_pg.models.evaluating",
        old="    model.eval()\n    try:",
        new="    try:",
        killers=(f"{NATIVE}::test_dropout_has_no_part_in_sampling",),
    ),
    Mutant(
        name="mode-lost-after-an-error",
        mistake="the mode is not restored when sampling fails",
        target="rlhf_pg.models.evaluating",
        old="    model.eval()\n    try:\n        yield\n    finally:",
        new="    model.eval()\n    yield\n    if True:",
        killers=(f"{NATIVE}::test_the_mode_of_every_module_is_restored_after_an_error",),
    ),
    Mutant(
        name="temperature-not-in-sampling",
        mistake="the temperature does not reach the logits that are sampled from",
        target="rlhf_pg.rollout.token_sampling.sample",
        old="        logits = logits / params.temperature\n",
        new="        logits = logits * 1\n",
        killers=(f"{SAMPLING}::test_temperature_has_its_closed_form",),
    ),
    Mutant(
        name="truncated-mass-not-renormalised",
        mistake="log-probabilities of a top-p sample are those of all tokens (TRL #7269)",
        target="rlhf_pg.rollout.token_sampling.sample",
        old="return ids, _pick(scores, ids) - top.squeeze(1)",
        new="return ids, _pick(logits, ids) - logits.logsumexp(1)\n"
        "    return ids, _pick(scores, ids) - top.squeeze(1)",
        killers=(f"{SAMPLING}::test_log_probabilities_are_renormalised_on_the_kept_set",),
    ),
    Mutant(
        name="noise-without-the-draw",
        mistake="every prompt is given the same noise, as ranks with one seed are",
        target="rlhf_pg.rollout.token_sampling._state",
        old="mix(state + prompt_indices)",
        new="mix(state + 0 * prompt_indices)",
        killers=(f"{SAMPLING}::test_every_coordinate_gives_its_own_noise",),
    ),
    Mutant(
        name="noise-of-the-step",
        mistake="the noise is keyed by the place in the batch, so every step and rank has the same",
        target="rlhf_pg.trainers.samples.sample",
        old="seed, prompt_ids=prompt_indices)",
        new="seed)",
        killers=(f"{STEP}::test_the_noise_of_a_step_is_its_own",),
    ),
    Mutant(
        name="padding-of-prompts-is-attended-to",
        mistake="rows attend to what is behind their prompt, where another is longer",
        target="rlhf_pg.rollout.native.slots.Groups.of",
        old="columns < lengths[:, None],",
        new="(columns < lengths.max()).expand(len(lengths), -1),",
        killers=(f"{NATIVE}::test_padding_to_any_width_changes_nothing",),
    ),
    Mutant(
        name="later-rows-attend-to-nothing-yet",
        mistake="rows that entered late attend to what they have not written yet",
        target="rlhf_pg.rollout.native.kv_cache.Padded.layout",
        old="<= last[:, None]",
        new="<= last.max().expand(len(last), 1)",
        killers=(f"{BATCHING}::test_a_small_cache_makes_rows_wait_and_changes_nothing",),
    ),
    Mutant(
        name="a-moved-row-leaves-its-keys-behind",
        mistake="the row that fills a hole is given the keys and values of the one that left",
        target="rlhf_pg.rollout.native.kv_cache.Padded.move",
        old="        self.own.move(sources, targets)\n",
        new="        pass\n",
        killers=(f"{NATIVE}::test_log_probabilities_equal_a_teacher_forced_forward",),
    ),
    Mutant(
        name="a-moved-prompt-leaves-its-keys-behind",
        mistake="the prompt that fills a hole is given the keys and values of the one that left",
        target="rlhf_pg.rollout.native.kv_cache.Padded.leave",
        old="            self.prompts.move([last], [slot])\n",
        new="            pass\n",
        killers=(f"{BATCHING}::test_a_small_cache_makes_rows_wait_and_changes_nothing",),
    ),
    Mutant(
        name="a-continued-row-repeats-its-noise",
        mistake="an episode's next turn draws with the noise of its first",
        target="rlhf_pg.rollout.native.continuous_batching.BatchingSession._choose",
        old="positions = drawn.first[rows] + lengths",
        new="positions = lengths",
        killers=(f"{BATCHING}::test_a_row_goes_on_where_it_stopped",),
    ),
    Mutant(
        name="adapter-merged-into-the-policy",
        mistake="for sampling, the adapter is merged into the weights that it trains on",
        target="rlhf_pg.models.merged",
        old="copied = copy.deepcopy(model, shared)",
        new="copied = model",
        killers=(
            f"{BATCHING}::test_an_adapter_is_merged_into_a_copy_and_the_policy_is_left_alone",
        ),
    ),
    Mutant(
        name="parts-of-attention-not-weighed",
        mistake="prompt and completion are each attended to as if the other were not there",
        target="rlhf_pg.rollout.native.decode_attention.together",
        old="torch.lerp(a.values, b.values, torch.sigmoid(b.logsum - a.logsum))",
        new="torch.lerp(a.values, b.values, 0.5)",
        killers=(f"{NATIVE}::test_log_probabilities_equal_a_teacher_forced_forward",),
    ),
    Mutant(
        name="a-second-copy-of-the-policy",
        mistake="all layers are merged before the first is handed to vLLM",
        target="rlhf_pg.rollout.vllm.handover.merged_weights",
        old='_weights(bare(model), "", {id(p): False for p in model.parameters()})',
        new='[*_weights(bare(model), "", {id(p): False for p in model.parameters()})]',
        killers=(f"{HANDOVER}::test_one_merged_layer_is_in_memory_at_a_time",),
    ),
    Mutant(
        name="vllm-uncorrected",
        mistake="what vLLM sampled is taken for a sample of the policy, unless one asks otherwise",
        target="rlhf_pg.config.method.MethodConfig.correction_of",
        old='return "none" if engine in ("auto", "native") else "token_truncate"',
        new='return "none"',
        killers=(
            "tests/trainers/test_rollout_server.py::"
            "test_the_loss_is_weighed_by_the_mismatch_unless_it_is_not_to_be",
        ),
    ),
    Mutant(
        name="vllm-chosen-where-it-cannot-tell-what-was-kept",
        mistake="rollout_engine auto takes vLLM for a run that has to know which tokens were kept",
        target="rlhf_pg.rollout.factory.unsuited",
        old='            args.truncated_sampling == "saved_support"\n',
        new="            False\n",
        killers=(f"{CHOOSE}::test_what_does_not_suit_is_named",),
    ),
    Mutant(
        name="a-resumed-run-chooses-its-engine-anew",
        mistake="a resumed run samples with the engine that suits now, not the one it began with",
        target="rlhf_pg.trainers.setup.TrainerSetup.on_resume",
        old='        if "rollout_engine" in found:',
        new='        if "engine" in found:',
        killers=(
            f"{ENGINES}::test_a_resumed_run_goes_on_with_the_native_engine_where_vllm_is_now",
        ),
    ),
    Mutant(
        name="a-chosen-vllm-stays-awake",
        mistake="the vLLM that rollout_engine auto takes keeps the GPU's memory during the update",
        target="rlhf_pg.trainers.engines.with_engine",
        old="vllm_enable_sleep_mode=True)",
        new="vllm_enable_sleep_mode=False)",
        killers=(f"{ENGINES}::test_vllm_that_was_chosen_sleeps_has_room_and_is_saved",),
    ),
    # ---------------------------------------------------------------------- without padding
    Mutant(
        name="flash-own-part-without-the-newest-token",
        mistake="a token attends to the earlier ones of its row and not to itself",
        target="rlhf_pg.rollout.native.unpadded_kv_cache.Unpadded.layout",
        old="own_lengths=(last + 1).int(),",
        new="own_lengths=last.int(),",
        killers=(f"{FLASH}::test_what_is_sampled_is_the_same",),
    ),
    Mutant(
        name="flash-logits-in-the-order-of-prompts",
        mistake="rows are given the logits of other rows: those in the order of their prompts",
        target="rlhf_pg.rollout.native.continuous_batching.BatchingSession._step",
        old="logits = run(self.model, ids, positions, layout, places.back)",
        new="logits = run(self.model, ids, positions, layout, 0)",
        killers=(f"{FLASH}::test_what_is_sampled_is_the_same",),
    ),
    Mutant(
        name="flash-runs-longer-than-a-block",
        mistake="queries of a group beyond those that the kernel is told of are not computed",
        target="rlhf_pg.rollout.native.unpadded_kv_cache.Unpadded.places",
        old="most = max(1, QUERIES // self.shares[-1])",
        new="most = QUERIES * 1000",
        killers=(f"{FLASH}::test_groups_of_any_size",),
    ),
    Mutant(
        name="flash-prompt-over-another",
        mistake="a new prompt is put where another one lies",
        target="rlhf_pg.rollout.native.unpadded_kv_cache._gap",
        old="        if start - end >= length:",
        new="        if start - end >= 0:",
        killers=(f"{FLASH}::test_a_prompt_is_put_into_the_first_gap_that_it_fits",),
    ),
    Mutant(
        name="flash-room-that-grows-is-empty",
        mistake="keys and values are lost when room grows",
        target="rlhf_pg.rollout.native.flash_attention.Tokens.reserve",
        old="                more[: len(tensor)] = tensor\n",
        new="                more.zero_()\n",
        killers=(f"{FLASH}::test_room_that_grows_keeps_what_is_there",),
    ),
    Mutant(
        name="flash-moved-row-leaves-its-keys-behind",
        mistake="the row that fills a hole reads the keys and values of the one that left",
        target="rlhf_pg.rollout.native.unpadded_kv_cache.Unpadded.move",
        old="            slots[target] = slots[source]\n",
        new="            pass\n",
        killers=(f"{FLASH}::test_what_is_sampled_is_the_same",),
    ),
    Mutant(
        name="compilation-fails-every-time",
        mistake="what cannot be compiled is tried again, and said, at every step",
        target="rlhf_pg.rollout.native.compiled.Compiled.__call__",
        old="                self.works = False\n",
        new="                pass\n",
        killers=(
            f"{FLASH}::test_what_cannot_be_compiled_is_run_as_it_is_and_the_log_says_so_once",
        ),
    ),
    Mutant(
        name="scales-are-inputs-of-the-graph",
        mistake="each step is compiled twice, since floats are taken for numbers that change",
        target="rlhf_pg.rollout.native.compiled.Compiled.__call__",
        old="specialize_float=True",
        new="specialize_float=False",
        killers=(f"{FLASH}::test_a_step_is_one_graph_and_is_compiled_once",),
    ),
]
