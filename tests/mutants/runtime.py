"""Mistakes in sharing a model among processes."""

from tests.mutants import Mutant

WEIGHTS = "tests/runtime/test_full_weights.py"
BACKENDS = "tests/runtime/test_backends.py"
CHECKPOINT = "tests/checkpoint/test_checkpointer.py"

MUTANTS = [
    Mutant(
        name="micro-batches-counted-late",
        mistake="a process with fewer micro-batches asks how many there are while others still "
        "compute: under FSDP or ZeRO-3 they wait for each other's other operation",
        target="rlhf_pg.trainers.learner.Learner.micro_batches",
        old="        for rows in chunks:\n            yield rows, batch.select(rows)\n"
        "        for _ in range(count - len(chunks)):",
        new="        for rows in chunks:\n            yield rows, batch.select(rows)\n"
        "        for _ in range(max(1, self.runtime.all_reduce_max(len(chunks))) - len(chunks)):",
        killers=(
            "tests/trainers/test_sampling_options.py"
            "::test_number_of_micro_batches_is_agreed_before_first_forward",
        ),
    ),
    Mutant(
        name="step-with-nan",
        mistake="a gradient that is not finite is reported after the weights are lost",
        target="rlhf_pg.runtime.DDPBackend.step",
        old="if math.isfinite(norm):",
        new="if True:",
        killers=(
            "tests/trainers/test_bad_input.py::test_nonfinite_gradient_leaves_weights_unchanged",
        ),
    ),
    Mutant(
        name="inf-loss-trained",
        mistake="a loss that is not finite is trained on where its gradient is",
        target="rlhf_pg.trainers.learner.Learner.accumulate",
        old="self.trained.backward(loss * (1 + (loss - loss).detach()))",
        new="self.trained.backward(loss)",
        killers=("tests/faults/test_updates.py::test_nonfinite_update_is_skipped_without_trace",),
    ),
    Mutant(
        name="orphans-train-on",
        mistake="a process whose launcher was killed trains on, in the way of the next run",
        target="rlhf_pg.runtime.Termination._watch_parent",
        old="            if os.getppid() != parent:\n",
        new="            if False:\n",
        killers=("tests/faults/test_signals.py::test_killed_launcher_ends_worker_after_step",),
    ),
    Mutant(
        name="launchers-known-too-late",
        mistake="a process whose launcher was killed before its first step trains on",
        target="rlhf_pg.runtime.Termination._watch_parent",
        old="        parent = launcher()\n",
        new="        parent = os.getppid()\n",
        killers=("tests/faults/test_signals.py::test_launcher_killed_before_run_ends_worker",),
    ),
    Mutant(
        name="waits-for-the-dead",
        mistake="processes whose launcher was killed before they met wait for it, for ddp_timeout",
        target="rlhf_pg.runtime.watchdog.meeting",
        old="    if HOLDS_STORE in os.environ:\n",
        new="    if False:\n",
        killers=(
            "tests/faults/test_signals.py::test_killed_launcher_ends_worker_waiting_for_store",
        ),
    ),
    Mutant(
        name="prints-end-runs",
        mistake="a reward function that prints ends the run once its reader has left (head)",
        target="rlhf_pg.boundary.streams._Pipe.write",
        old="        except BrokenPipeError:\n            self.silence()\n            return",
        new="        except FileNotFoundError:\n            self.silence()\n            return",
        killers=("tests/faults/test_streams.py::test_printing_reward_survives_closed_reader",),
    ),
    Mutant(
        name="forks-outlive-sigterm",
        mistake="a process that a reward function has forked notes SIGTERM and goes on",
        target="rlhf_pg.runtime.Termination._note",
        old="os.getpid() != self._process or ",
        new="",
        killers=("tests/faults/test_signals.py::test_sigterm_ends_fork_of_reward_function",),
    ),
    Mutant(
        name="skips-never-forgotten",
        mistake="skipped steps count as in a row although updates were made between them",
        target="rlhf_pg.trainers.skipping.SkippedUpdates.end",
        old="skipped_in_a_row = 0 if updates else before + 1",
        new="skipped_in_a_row = before if updates else before + 1",
        killers=("tests/faults/test_updates.py::test_max_skipped_steps_ends_run_across_resume",),
    ),
    Mutant(
        name="old-moments-kept",
        mistake="a resumed run keeps moments of its own for parameters that had none",
        target="rlhf_pg.runtime.DDPBackend.load_state",
        old="        self.optimizer.state.clear()\n",
        new="",
        killers=(f"{CHECKPOINT}::test_restore_clears_existing_moments",),
    ),
    Mutant(
        name="whole-copy-kept",
        mistake="the copy that sampling needs stays in memory through the update",
        target="rlhf_pg.runtime.FullWeights.gathered",
        old="                self._empty()\n",
        new="                pass\n",
        killers=(f"{WEIGHTS}::test_gathered_module_has_current_weights",),
    ),
    Mutant(
        name="whole-emptied-by-an-inner-use",
        mistake="a second use within a rollout takes the weights away from the first",
        target="rlhf_pg.runtime.FullWeights.gathered",
        old="            if not self._users:\n",
        new="            if True:\n",
        killers=(f"{WEIGHTS}::test_outermost_use_frees_weights",),
    ),
    Mutant(
        name="helper-keeps-a-copy",
        mistake="every process holds all weights in host memory while one of them saves",
        target="rlhf_pg.runtime.FullWeights._fill",
        old="            if device is not None:\n"
        "                _put_in_place(own, value.to(device))",
        new="            _put_in_place(own, value.to(device or CPU))",
        killers=(f"{WEIGHTS}::test_helper_rank_keeps_no_weights",),
    ),
    Mutant(
        name="changes-not-put-back",
        mistake="loaded weights stay in a copy, and the run goes on from those it began with",
        target="rlhf_pg.runtime.FullWeights.modified",
        old="            self._spread(trained)\n",
        new="",
        killers=(f"{WEIGHTS}::test_modified_weights_are_written_back",),
    ),
    Mutant(
        name="tied-weights-set-apart",
        mistake="what makes frozen weights of the critic its own unties the policy's embeddings",
        target="rlhf_pg.runtime.fsdp._set_apart",
        old="            if id(p) in taken\n",
        new="",
        killers=(f"{WEIGHTS}::test_only_shared_frozen_weights_are_separated",),
    ),
    Mutant(
        name="deepspeed-config-decides",
        mistake="DeepSpeed divides the loss by the accumulation steps of its own config",
        target="rlhf_pg.runtime.deepspeed._config",
        old='        "gradient_accumulation_steps": 1,\n',
        new="",
        killers=(f"{BACKENDS}::test_recipe_overrides_deepspeed_config",),
    ),
    Mutant(
        name="gathered-for-every-round",
        mistake="weights that lie in pieces are put together for every call of the engine",
        target="rlhf_pg.trainers.collector.Collector.collect",
        old="        with self.sampling():\n",
        new="        if True:\n",
        killers=(
            "tests/trainers/test_dynamic_sampling.py"
            "::test_weights_are_gathered_once_for_all_rounds",
        ),
    ),
]
