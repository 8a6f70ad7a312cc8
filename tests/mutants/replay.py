"""Mistakes in what is recorded of a step, and in steps that are made again."""

from tests.mutants import Mutant

AGAIN = "tests/replay/test_again.py::test_"
WHAT_IF = "tests/replay/test_what_if.py::test_"
DIGESTS = "tests/runtime/test_digests.py::test_"
STEPS = f"{AGAIN}steps_are_as_they_were"

MUTANTS: list[Mutant] = [
    Mutant(
        name="digest-forgets-the-sign",
        mistake="both factors of a word are odd, so that their even sum loses its highest bit",
        target="rlhf_pg.runtime.digests._table",
        old="& ~1 | (which < 2)",
        new="| 1",
        killers=(f"{DIGESTS}any_bit_changes_it",),
    ),
    Mutant(
        name="digest-without-places",
        mistake="all words weigh alike, so that values may change places",
        target="rlhf_pg.runtime.digests._table",
        old="mix(places + (which << 40))",
        new="mix(0 * places)",
        killers=(f"{DIGESTS}exchanged_values_change_it",),
    ),
    Mutant(
        name="replay-asks-again",
        mistake="a step that is made again asks judges and plays with environments",
        target="rlhf_pg.replay.again.Replay._answered",
        old="        trainer.collector.recorded = asked\n        try:",
        new="        try:",
        killers=(f"{AGAIN}nobody_is_asked_again",),
    ),
    Mutant(
        name="replay-from-the-step-itself",
        mistake="the checkpoint that the step has left is taken for the one before it",
        target="rlhf_pg.replay.again.Replay._checkpoint",
        old="if 0 < sealed[place] <= step and",
        new="if 0 < sealed[place] <= step + 1 and",
        killers=(STEPS,),
    ),
    Mutant(
        name="outside-forgets-failures",
        mistake="an environment that failed has answered nothing when the step is made again",
        target="rlhf_pg.rollout.multi_turn.episodes._fail",
        old='    row.answers.append({"error": error})\n',
        new="",
        killers=(STEPS,),
    ),
    Mutant(
        name="outside-forgets-what-was-logged",
        mistake="columns that a judge logged are missing when the step is made again",
        target="rlhf_pg.rewards.kept_answers.keep",
        old='said["extra"] = {name',
        new="dropped = {name",
        killers=(STEPS,),
    ),
    Mutant(
        name="trace-in-order-of-arrival",
        mistake="rows of several processes stand as they arrive, not by their prompts",
        target="rlhf_pg.trainers.recorder.Recorder._trace",
        old="everyone[everyone[:, 0].argsort(stable=True)]",
        new="everyone.flip(0)",
        killers=("tests/replay/test_recorder.py::test_trace_has_the_order_of_the_prompts",),
    ),
    Mutant(
        name="token-log-of-the-wrong-rows",
        mistake="numbers of a micro-batch are put at its own places, not at those of the step",
        target="rlhf_pg.trainers.token_log.TokenLog.note",
        old="            whole[batch.places, :width] = torch.where(",
        new="            whole[: batch.num_rows, :width] = torch.where(",
        killers=("tests/replay/test_recorder.py::test_tokens_are_those_of_their_rows",),
    ),
    Mutant(
        name="what-if-of-two-states",
        mistake="the other config begins without the optimizer's moments",
        target="rlhf_pg.replay.what_if._copy_state",
        old="for p, key, value in known if names[p] in theirs]",
        new="for p, key, value in known if names[p] not in theirs]",
        killers=(f"{WHAT_IF}rate_changes_the_update_and_not_the_gradient",),
    ),
    Mutant(
        name="what-if-of-other-weights",
        mistake="the other config is seen at the weights that the run began with",
        target="rlhf_pg.replay.what_if._copy_state",
        old="            other.learner.parts[name].module.load_state_dict(theirs)\n",
        new="            pass\n",
        killers=(f"{WHAT_IF}opposite_reward_turns_the_gradient_around",),
    ),
]
