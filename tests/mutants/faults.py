"""Mistakes in what keeps a run through interruptions."""

from tests.mutants import Mutant

FAULTS = "tests/faults/test_checkpoints.py"

MUTANTS = [
    Mutant(
        name="sizes-compared-alone",
        mistake="a flipped byte in a checkpoint is resumed from: its file is as long as it was",
        file="rlhf_pg/sealed.py",
        old="        if contents and _sha256(file) != sha256:\n",
        new="        if False:\n",
        killers=(f"{FAULTS}::test_the_newest_whole_checkpoint_is_resumed",),
    ),
    Mutant(
        name="newest-by-number",
        mistake="the newest checkpoint is resumed without a look at it (transformers)",
        file="rlhf_pg/checkpoint.py",
        old="            reason = self._fault(path, runtime)\n            if reason is None:\n"
        "                if broken",
        new="            reason = None\n            if reason is None:\n                if broken",
        killers=(f"{FAULTS}::test_the_newest_whole_checkpoint_is_resumed",),
    ),
    Mutant(
        name="peak-of-the-saved-run",
        mistake="a resumed run goes back to the learning rate that it was to leave (transformers)",
        file="rlhf_pg/checkpoint.py",
        old="before, self.scheduler.base_lrs = self.scheduler.base_lrs, peaks",
        new="before = self.scheduler.base_lrs",
        killers=(f"{FAULTS}::test_another_learning_rate_is_taken_with_a_warning",),
    ),
    Mutant(
        name="half-an-update-stays",
        mistake="a run that goes on after an error adds the gradient of the update that broke off",
        file="rlhf_pg/trainers/learner.py",
        old="            self.trained.abandon()\n",
        new="",
        killers=("tests/faults/test_updates.py::test_out_of_memory_leaves_no_half_of_an_update",),
    ),
    Mutant(
        name="random-numbers-drawn-twice",
        mistake="a step that broke off is taken again with random numbers that came after its own",
        file="rlhf_pg/trainers/base.py",
        old="            restore_rng(self._begun.rng)\n",
        new="            pass\n",
        killers=(
            "tests/faults/test_updates.py::test_what_breaks_a_step_off_saves_the_one_before_as_it_was",
        ),
    ),
    Mutant(
        name="foreign-files-replaced",
        mistake="a run replaces the model of somebody else, who left no metrics.jsonl beside it",
        file="rlhf_pg/run_files.py",
        old="    if not there:\n",
        new='    if "metrics.jsonl" not in there:\n',
        killers=("tests/test_run_files.py::test_what_has_the_name_of_a_runs_file_is_set_aside",),
    ),
    Mutant(
        name="raw-errors-of-models",
        mistake="a model whose weights are cut short ends in a traceback of other libraries",
        file="rlhf_pg/models/pretrained.py",
        old='    except Exception as error:\n        raise ValueError(\n            f"the {what}',
        new='    except OSError as error:\n        raise ValueError(\n            f"the {what}',
        killers=(
            "tests/models/test_loading.py::test_a_directory_without_a_whole_model_is_one_error",
        ),
    ),
    Mutant(
        name="code-of-models-asked-for",
        mistake="transformers asks on the terminal whether to run a model's code (transformers)",
        file="rlhf_pg/models/pretrained.py",
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
        file="rlhf_pg/trainers/base.py",
        old="            self.checkpointer.put_back(self._begun.numbers)\n",
        new="",
        killers=("tests/faults/test_leaving.py::test_it_costs_no_step_that_was_finished",),
    ),
    Mutant(
        name="errors-cost-steps",
        mistake="an error between two saves costs all steps since the last (transformers, TRL)",
        file="rlhf_pg/trainers/leaving.py",
        old="    path = trainer.save_checkpoint()\n",
        new="    return None\n",
        killers=("tests/faults/test_leaving.py::test_it_costs_no_step_that_was_finished",),
    ),
    Mutant(
        name="moments-of-nan",
        mistake="one batch of returns that are not finite ends the run, by the moments",
        file="rlhf_pg/trainers/scoring.py",
        old="    if var.isfinite():",
        new="    if True:",
        killers=("tests/faults/test_updates.py::test_all_passes_over_one_bad_batch_are_one_step",),
    ),
    Mutant(
        name="roles-unquoted",
        mistake="the name of a special token that a message has for a role is one",
        file="rlhf_pg/data.py",
        old=" and v in ROLES",
        new="",
        killers=("tests/test_data.py::test_nor_is_what_it_says_of_roles",),
    ),
    Mutant(
        name="links-in-a-manifest-followed",
        mistake="a link in a checkpoint is followed to wherever it leads",
        file="rlhf_pg/sealed.py",
        old="        if file.is_symlink():\n",
        new="        if False:\n",
        killers=(f"{FAULTS}::test_the_newest_whole_checkpoint_is_resumed",),
    ),
    Mutant(
        name="manifest-leads-outside",
        mistake="a manifest may name files outside of its directory",
        file="rlhf_pg/sealed.py",
        old='or ".." in parts:',
        new="or False:",
        killers=(f"{FAULTS}::test_a_manifest_that_leads_out_of_its_directory_is_refused",),
    ),
    Mutant(
        name="pruned-unverified",
        mistake="older checkpoints are removed although the newest cannot be read back",
        file="rlhf_pg/checkpoint.py",
        old="            if reason is not None:\n                raise OSError(",
        new="            if False:\n                raise OSError(",
        killers=(f"{FAULTS}::test_older_checkpoints_stay_while_the_newest_is_not_whole",),
    ),
    Mutant(
        name="damaged-checkpoints-counted",
        mistake="damaged checkpoints with larger numbers are kept, and the whole one is removed",
        file="rlhf_pg/checkpoint.py",
        old="        older = [step for step in self.steps() if step < self.state.step]\n",
        new="        older = self.steps()[:-1]\n",
        killers=(f"{FAULTS}::test_checkpoints_that_were_passed_over_do_not_count",),
    ),
    Mutant(
        name="aside-not-taken-back",
        mistake="a save that breaks off leaves nothing under the name of what it was to replace",
        file="rlhf_pg/sealed.py",
        old="        aside.rename(path)\n        sync_directory(path.parent)\n",
        new="        shutil.rmtree(aside)\n",
        killers=(f"{FAULTS}::test_what_cannot_be_replaced_is_taken_back",),
    ),
    Mutant(
        name="half-saved-left",
        mistake="a save that breaks off on a full disk leaves its files there, and the disk full",
        file="rlhf_pg/sealed.py",
        old="    shutil.rmtree(partial_of(path), ignore_errors=True)\n    try:\n",
        new="    try:\n",
        killers=(f"{FAULTS}::test_a_full_disk_costs_no_checkpoint",),
    ),
    Mutant(
        name="dataset-unchecked",
        mistake="a resumed run goes on with other rows, in places that meant others",
        file="rlhf_pg/data.py",
        old="            for row in table.to_pylist():\n",
        new="            for row in []:\n",
        killers=(f"{FAULTS}::test_another_dataset_is_refused",),
    ),
    Mutant(
        name="best-is-nan",
        mistake="a first evaluation that is NaN stays the best for ever: nothing is above it",
        file="rlhf_pg/trainers/base.py",
        old="self.args.save_best and not math.isnan(reward) and (",
        new="self.args.save_best and (",
        killers=(
            "tests/trainers/test_evaluation.py::test_an_evaluation_that_is_nan_is_never_the_best",
        ),
    ),
    Mutant(
        name="stretched-schedule-unsaid",
        mistake="another max_steps changes every rate to come, and the resumed run does not say so",
        file="rlhf_pg/same_run.py",
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
        file="rlhf_pg/checkpoint.py",
        old="if isinstance(self.scheduler, LambdaLR):",
        new="if False:",
        killers=(
            "tests/faults/test_checkpoints.py::"
            "test_another_number_of_steps_stretches_the_schedule_and_says_so",
        ),
    ),
]
