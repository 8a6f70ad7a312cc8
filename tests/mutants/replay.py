"""Mistakes in what is recorded of a step, and in steps that are made again."""

from tests.mutants import Mutant

REPLAY = "tests/replay/test_replay.py::test_"
WHAT_IF = "tests/replay/test_what_if.py::test_"
STEPS = f"{REPLAY}steps_are_as_they_were"
SCORED = "rlhf_pg.replay.replay.Replay._scored"

MUTANTS: list[Mutant] = [
    Mutant(
        name="replay-from-the-step-itself",
        mistake="the checkpoint that the step has left is taken for the one before it",
        target="rlhf_pg.replay.replay.Replay._checkpoint",
        old="if 0 < sealed[place] <= step and",
        new="if 0 < sealed[place] <= step + 1 and",
        killers=(STEPS,),
    ),
    Mutant(
        name="replay-trains-on-answers",
        mistake="tokens of an environment are trained on when the step is made again",
        target=SCORED,
        old="            actions=[record.action[spans[i]].tolist() for i in mine],\n",
        new="",
        killers=(STEPS,),
    ),
    Mutant(
        name="record-of-sums",
        mistake="scores of the steps of a completion all stand at its last token",
        target=SCORED,
        old="whole[torch.from_numpy(record.score_at)] =",
        new="whole[torch.from_numpy(record.score_at - record.score_at % 2)] =",
        killers=(STEPS,),
    ),
    Mutant(
        name="record-in-order-of-arrival",
        mistake="tokens stand as they arrive, and rows by their prompts",
        target="rlhf_pg.trainers.recorder.Recorder._tokens",
        old="_in_order(tokens, rows[:, 5], order)",
        new="_in_order(tokens, rows[:, 5], order[::-1])",
        killers=(f"{REPLAY}record_agrees_with_what_readers_see",),
    ),
    Mutant(
        name="what-if-of-other-weights",
        mistake="the other config is seen at the weights that the run began with",
        target="rlhf_pg.replay.what_if.what_if",
        old="other.learner.parts[name].module.load_state_dict(",
        new="dict(",
        killers=(f"{WHAT_IF}opposite_reward_turns_the_gradient_around",),
    ),
]
