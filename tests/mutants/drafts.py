"""Mistakes in drafts, in the lean decoder, and in draws that rounding decides."""

from tests.mutants import Mutant

CHOOSING = "tests/rollout/native/test_choosing.py::test_"
DRAFTS = "tests/rollout/native/test_drafts.py::test_"
LEAN = "tests/rollout/native/test_lean_decoder.py::test_"
CLOSE = "tests/rollout/native/test_close_draws.py::test_"

MUTANTS: list[Mutant] = [
    Mutant(
        name="draft-kept-behind-a-wrong-token",
        mistake="a draft is read on after a token that the model did not draw",
        target="rlhf_pg.rollout.native.choosing.Chooser.verify",
        old="if ids[i] != guess or guess in ends:",
        new="if guess in ends:",
        killers=(f"{DRAFTS}wrong_draft_costs_no_token",),
    ),
    Mutant(
        name="draft-goes-on-behind-its-end",
        mistake="a row whose draft has its EOS right gets one more token",
        target="rlhf_pg.rollout.native.choosing.Chooser.verify",
        old="if ids[i] != guess or guess in ends:",
        new="if ids[i] != guess:",
        killers=(f"{DRAFTS}end_within_draft_ends_row",),
    ),
    Mutant(
        name="draft-beyond-the-limit",
        mistake="a draft leaves no room for the token after it",
        target="rlhf_pg.rollout.native.drafter.Drafter.drafts",
        old="left - 1",
        new="left",
        killers=(f"{DRAFTS}limit_within_draft_ends_row",),
    ),
    Mutant(
        name="draft-with-the-noise-of-the-newest-token",
        mistake="every token of a draft is drawn with the noise of the place before it",
        target="rlhf_pg.rollout.native.continuous_batching.BatchingSession._several",
        old="self.chooser.verify(self.rows, drafts, logits, grid.rows, columns + 1)",
        new="self.chooser.verify(self.rows, drafts, logits, grid.rows, columns)",
        killers=(f"{DRAFTS}wrong_draft_costs_no_token",),
    ),
    Mutant(
        name="later-turns-under-keys-of-their-own",
        mistake="what later turns of an episode sampled is kept where no rollout looks for it",
        target="rlhf_pg.rollout.native.drafter._key",
        old="tokens[: len(tokens) - request.position]",
        new="tokens",
        killers=(f"{DRAFTS}continued_rows_and_groups_of_several_sizes_are_same_under_drafts",),
    ),
    Mutant(
        name="drafts-of-a-prompt-never-forgotten",
        mistake="tokens of a forgotten completion still count, so all others are forgotten in time",
        target="rlhf_pg.rollout.native.drafts.History.add",
        old="self.size -= len(known.pop(0))",
        new="known.pop(0)",
        killers=(f"{DRAFTS}history_keeps_latest_sequences_of_prompt",),
    ),
    Mutant(
        name="rounding-decides-draws",
        mistake="a close draw is left to what was computed beside the row",
        target="rlhf_pg.rollout.native.choosing.Chooser.choose",
        old="if self.forward is not None:",
        new="if False:",
        killers=(f"{CHOOSING}errors_that_depend_on_batch_decide_no_draw",),
    ),
    Mutant(
        name="close-draws-on-one-side",
        mistake="rounding is looked for at the first edge of a token alone",
        target="rlhf_pg.rollout.native.close_draws.close_draws",
        old="is_first | (drawn.width[rows] - drawn.into[rows] < last)",
        new="is_first",
        killers=(f"{CLOSE}disturbed_logits_change_no_draw_that_is_not_close",),
    ),
    Mutant(
        name="close-draws-without-cuts",
        mistake="rounding that lets a token in or out by top-k, top-p or min-p is not thought of",
        target="rlhf_pg.rollout.native.close_draws._mass_at_cut",
        old="torch.where(close, ",
        new="torch.where(close & False, ",
        killers=(f"{CLOSE}disturbed_logits_change_no_draw_that_is_not_close",),
    ),
    Mutant(
        name="errors-of-logits-as-if-independent",
        mistake="that all logits share the errors of the hidden states is not thought of",
        target="rlhf_pg.rollout.native.close_draws._moved",
        old="together.double() + ",
        new="",
        killers=(f"{CLOSE}error_of_hidden_states_changes_no_draw_that_is_not_close",),
    ),
    Mutant(
        name="lean-decoder-of-old-weights",
        mistake="the copies made for one rollout are used in the next, after an update",
        target="rlhf_pg.rollout.native.engine.NativeEngine._load_weights",
        old="self.weights, self.lean = self.model, None",
        new="self.weights = self.model",
        killers=(f"{LEAN}new_weights_are_sampled_from",),
    ),
]
