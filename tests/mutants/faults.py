"""Mistakes in what keeps a run through interruptions."""

from tests.mutants import Mutant

FAULTS = "tests/faults/test_checkpoints.py"

MUTANTS = [
    Mutant(
        name="sizes-compared-alone",
        mistake="a flipped byte in a checkpoint is resumed from: its file is as long as it was",
        target="rlhf_pg.checkpoint.atomic._difference",
        old="        if contents and _sha256(file) != sha256:\n",
        new="        if False:\n",
        killers=(f"{FAULTS}::test_the_newest_whole_checkpoint_is_resumed",),
    ),
    Mutant(
        name="newest-by-number",
        mistake="the newest checkpoint is resumed without a look at it (transformers)",
        target="rlhf_pg.checkpoint.checkpointer.Checkpointer._newest_whole",
        old="            reason = self._fault(path, runtime)\n            if reason is None:\n"
        "                if broken",
        new="            reason = None\n            if reason is None:\n                if broken",
        killers=(f"{FAULTS}::test_the_newest_whole_checkpoint_is_resumed",),
    ),
    Mutant(
        name="peak-of-the-saved-run",
        mistake="a resumed run goes back to the learning rate that it was to leave (transformers)",
        target="rlhf_pg.checkpoint.checkpointer.Checkpointer._load_schedule",
        old="before, self.scheduler.base_lrs = self.scheduler.base_lrs, peaks",
        new="before = self.scheduler.base_lrs",
        killers=(f"{FAULTS}::test_another_learning_rate_is_taken_with_a_warning",),
    ),
    Mutant(
        name="half-an-update-stays",
        mistake="a run that goes on after an error adds the gradient of the update that broke off",
        target="rlhf_pg.trainers.learner.Learner.update",
        old="            self.trained.discard_update()\n",
        new="",
        killers=("tests/faults/test_updates.py::test_out_of_memory_leaves_no_half_of_an_update",),
    ),
    Mutant(
        name="random-numbers-drawn-twice",
        mistake="a step that broke off is taken again with random numbers that came after its own",
        target="rlhf_pg.trainers.loop.TrainingLoop._step_or_nothing",
        old="            restore_rng(rng)\n",
        new="            pass\n",
        killers=(
            "tests/faults/test_updates.py::test_what_breaks_a_step_off_saves_the_one_before_as_it_was",
        ),
    ),
    Mutant(
        name="foreign-files-replaced",
        mistake="a run replaces the model of somebody else, who left no metrics.jsonl beside it",
        target="rlhf_pg.checkpoint.run_dir.set_aside",
        old="    if not there:\n",
        new='    if "metrics.jsonl" not in there:\n',
        killers=(
            "tests/checkpoint/test_run_dir.py::test_what_has_the_name_of_a_runs_file_is_set_aside",
        ),
    ),
    Mutant(
        name="manifest-of-any-kind",
        mistake="a manifest that is a device is read without end",
        target="rlhf_pg.checkpoint.atomic._manifest",
        old="        if not stat.S_ISREG(found.st_mode):\n",
        new="        if False:\n",
        killers=(f"{FAULTS}::test_a_manifest_that_is_none_is_no_end",),
    ),
    Mutant(
        name="model-for-a-checkpoint",
        mistake="final/ is taken for a checkpoint, since it is whole, and ends in a traceback",
        target="rlhf_pg.checkpoint.checkpointer.Checkpointer._fault",
        old="        if reason is None and not (path / STATE).is_file():\n",
        new="        if False:\n",
        killers=(f"{FAULTS}::test_what_is_no_checkpoint_is_told_where_they_are",),
    ),
    Mutant(
        name="tokens-counted",
        mistake="a vocabulary with gaps has an id beyond the embeddings, and few enough tokens",
        target="rlhf_pg.models.check_vocabulary",
        old="vocabulary[last] >= rows:\n",
        new="len(vocabulary) > rows:\n",
        killers=(
            "tests/models/test_loading.py"
            "::test_an_id_beyond_the_embedding_rows_is_refused_whatever_the_number_of_tokens",
        ),
    ),
    Mutant(
        name="unknown-token-for-eos",
        mistake="an EOS token that the vocabulary lacks is any unknown one (transformers)",
        target="rlhf_pg.models.tokenizers._check_special",
        old="    if is_unknown and tokenizer.eos_token != tokenizer.unk_token:\n",
        new="    if False:\n",
        killers=("tests/models/test_loading.py::test_an_unknown_token_is_no_eos",),
    ),
    Mutant(
        name="raw-errors-of-models",
        mistake="a model whose weights are cut short ends in a traceback of other libraries",
        target="rlhf_pg.models.opening",
        old='    except Exception as error:\n        raise ValueError(\n            f"the {what}',
        new='    except OSError as error:\n        raise ValueError(\n            f"the {what}',
        killers=(
            "tests/models/test_loading.py::test_a_directory_without_a_whole_model_is_one_error",
        ),
    ),
    Mutant(
        name="code-of-models-asked-for",
        mistake="transformers asks on the terminal whether to run a model's code (transformers)",
        target="rlhf_pg.models.from_pretrained",
        old="output_loading_info=True, trust_remote_code=trust_remote_code, **options\n",
        new="output_loading_info=True, **options\n",
        killers=(
            "tests/faults/test_security.py"
            "::test_code_that_comes_with_a_model_needs_the_key_whatever_is_piped_in",
        ),
    ),
    Mutant(
        name="numbers-of-half-a-step",
        mistake="a step that broke off has moved moments or schedule when it is taken again",
        target="rlhf_pg.trainers.loop.TrainingLoop._step_or_nothing",
        old="            self.checkpointer.put_back(numbers)\n",
        new="",
        killers=("tests/faults/test_leaving.py::test_it_costs_no_step_that_was_finished",),
    ),
    Mutant(
        name="errors-cost-steps",
        mistake="an error between two saves costs all steps since the last (transformers, TRL)",
        target="rlhf_pg.trainers.loop.TrainingLoop._save_finished",
        old="            path = self.save_checkpoint()\n",
        new="            return None\n",
        killers=("tests/faults/test_leaving.py::test_it_costs_no_step_that_was_finished",),
    ),
    Mutant(
        name="files-of-a-live-run-set-aside",
        mistake="a reward model in training sets the files of a live run aside",
        target="rlhf_pg.checkpoint.run_dir.begun",
        old="    with locked(directory):\n",
        new="    if True:\n",
        killers=(
            "tests/checkpoint/test_run_dir.py"
            "::test_other_trainings_leave_the_directory_of_a_live_run_alone[a_reward_model]",
        ),
    ),
    Mutant(
        name="diverged-weights-for-good-ones",
        mistake="a run that diverged saves its weights, in the place of the last good ones",
        target="rlhf_pg.trainers.loop.TrainingLoop._saved_on_leaving",
        old="    except FloatingPointError:",
        new="    except ZeroDivisionError:",
        killers=("tests/faults/test_leaving.py::test_nothing_is_saved_of_a_run_that_diverged",),
    ),
    Mutant(
        name="half-a-step-for-a-whole-one",
        mistake="what is saved when a run breaks off removes the last regular checkpoint",
        target="rlhf_pg.checkpoint.checkpointer.Checkpointer.removing_none",
        old="        limit, self.limit = self.limit, None\n",
        new="        limit = self.limit\n",
        killers=("tests/faults/test_leaving.py::test_what_was_saved_before_makes_no_room",),
    ),
    Mutant(
        name="moments-of-nan",
        mistake="one batch of returns that are not finite ends the run, by the moments",
        target="rlhf_pg.trainers.PPOTrainer.critic_targets",
        old="        if var.isfinite():",
        new="        if True:",
        killers=("tests/faults/test_updates.py::test_all_passes_over_one_bad_batch_are_one_step",),
    ),
    Mutant(
        name="roles-unquoted",
        mistake="the name of a special token that a message has for a role is one",
        target="rlhf_pg.data.chat._quoted",
        old=" and v in ROLES",
        new="",
        killers=("tests/data/test_prompts.py::test_nor_is_what_it_says_of_roles",),
    ),
    Mutant(
        name="links-in-a-manifest-followed",
        mistake="a link in a checkpoint is followed to wherever it leads",
        target="rlhf_pg.checkpoint.atomic._difference",
        old="        if file.is_symlink():\n",
        new="        if False:\n",
        killers=(f"{FAULTS}::test_the_newest_whole_checkpoint_is_resumed",),
    ),
    Mutant(
        name="manifest-leads-outside",
        mistake="a manifest may name files outside of its directory",
        target="rlhf_pg.checkpoint.atomic._difference",
        old='or ".." in parts:',
        new="or False:",
        killers=(f"{FAULTS}::test_a_manifest_that_leads_out_of_its_directory_is_refused",),
    ),
    Mutant(
        name="pruned-unverified",
        mistake="older checkpoints are removed although the newest cannot be read back",
        target="rlhf_pg.checkpoint.checkpointer.Checkpointer._prune",
        old="            if reason is not None:\n                raise OSError(",
        new="            if False:\n                raise OSError(",
        killers=(f"{FAULTS}::test_older_checkpoints_stay_while_the_newest_is_not_whole",),
    ),
    Mutant(
        name="damaged-checkpoints-counted",
        mistake="damaged checkpoints with larger numbers are kept, and the whole one is removed",
        target="rlhf_pg.checkpoint.checkpointer.Checkpointer._prune",
        old="        older = [step for step in self.steps() if step < self.state.step]\n",
        new="        older = self.steps()[:-1]\n",
        killers=(f"{FAULTS}::test_checkpoints_that_were_passed_over_do_not_count",),
    ),
    Mutant(
        name="aside-not-taken-back",
        mistake="a save that breaks off leaves nothing under the name of what it was to replace",
        target="rlhf_pg.checkpoint.atomic.recover",
        old="        aside.rename(path)\n        sync_directory(path.parent)\n",
        new="        shutil.rmtree(aside)\n",
        killers=(f"{FAULTS}::test_what_cannot_be_replaced_is_taken_back",),
    ),
    Mutant(
        name="half-saved-left",
        mistake="a save that breaks off on a full disk leaves its files there, and the disk full",
        target="rlhf_pg.checkpoint.atomic.abandon",
        old="    shutil.rmtree(partial_of(path), ignore_errors=True)\n    try:\n",
        new="    try:\n",
        killers=(f"{FAULTS}::test_a_full_disk_costs_no_checkpoint",),
    ),
    Mutant(
        name="dataset-unchecked",
        mistake="a resumed run goes on with other rows, in places that meant others",
        target="rlhf_pg.data.prompts.Prompts.fingerprint",
        old="            for row in table.to_pylist():\n",
        new="            for row in []:\n",
        killers=(f"{FAULTS}::test_another_dataset_is_refused",),
    ),
    Mutant(
        name="best-is-nan",
        mistake="a first evaluation that is NaN stays the best for ever: nothing is above it",
        target="rlhf_pg.trainers.loop.TrainingLoop._keep_if_best",
        old="self.args.save_best and not math.isnan(reward) and (",
        new="self.args.save_best and (",
        killers=(
            "tests/trainers/test_evaluation.py::test_an_evaluation_that_is_nan_is_never_the_best",
        ),
    ),
    Mutant(
        name="stretched-schedule-unsaid",
        mistake="another max_steps changes every rate to come, and the resumed run does not say so",
        target="rlhf_pg.checkpoint.compatibility.check",
        old="PEAKS if endless else PEAKS | LENGTHS",
        new="PEAKS",
        killers=(
            "tests/faults/test_checkpoints.py::"
            "test_a_schedule_that_knows_no_length_is_not_stretched",
        ),
    ),
    Mutant(
        name="resumed-rate-of-the-old-length",
        mistake="a run made longer takes its first step at the old schedule's rate, 0 at its end",
        target="rlhf_pg.checkpoint.checkpointer.Checkpointer._load_schedule",
        old="if isinstance(self.scheduler, LambdaLR):",
        new="if False:",
        killers=(
            "tests/faults/test_checkpoints.py::"
            "test_another_number_of_steps_stretches_the_schedule_and_says_so",
        ),
    ),
]
