"""Mistakes in computing a prompt once, and in attention in two parts."""

from tests.mutants import Mutant

TEST = "tests/models/test_packing.py::"
GRADIENTS = f"{TEST}test_gradients_are_those_of_rows_alone"
SOFTMAX = f"{TEST}test_attention_is_a_softmax_over_what_is_seen"

MUTANTS = [
    Mutant(
        name="completions-see-their-siblings",
        mistake="the completions of a prompt are one long row",
        target="rlhf_pg.models.shared_prefix._blocks",
        old="for length, run in groupby(completions):",
        new="for length, run in groupby([sum(completions)]):",
        killers=(SOFTMAX, GRADIENTS),
    ),
    Mutant(
        name="prompt-not-seen",
        mistake="a completion attends to itself alone",
        target="rlhf_pg.models.shared_prefix._blocks",
        old="if start > first:",
        new="if False:",
        killers=(SOFTMAX, GRADIENTS),
    ),
    Mutant(
        name="positions-begin-anew",
        mistake="but for the first, completions are at positions from 0 on",
        target="rlhf_pg.models.packing.lay_out_packed",
        old="(there.cumsum(dim=1) - 1)[kept]",
        new="(kept.cumsum(dim=1) - 1)[kept]",
        killers=(f"{TEST}test_every_real_token_is_computed_once", GRADIENTS),
    ),
    Mutant(
        name="part-of-a-softmax-for-the-whole",
        mistake="the backward pass of a part normalises by that part alone",
        target="rlhf_pg.models.shared_prefix._add",
        old="logsum.copy_(both)",
        new="pass",
        killers=(SOFTMAX, GRADIENTS),
    ),
    Mutant(
        name="first-token-after-the-first-prompt",
        mistake="every completion's first token is scored after the prompt of the first family",
        target="rlhf_pg.models.packing.lay_out_packed",
        old="places[first, width - 1][run]",
        new="places[first, width - 1][run * 0]",
        killers=(GRADIENTS,),
    ),
    Mutant(
        name="any-prompt-of-the-group",
        mistake="episodes of a group are all scored after the prompt of the first",
        target="rlhf_pg.data.records.Rollout.shared_prefixes",
        old="columns = torch.cat([self.groups[:, None], prompts], dim=1)",
        new="columns = self.groups[:, None]",
        killers=(f"{TEST}test_prompts_that_differ_within_a_group_are_not_shared",),
    ),
    Mutant(
        name="recomputed-by-another-attention",
        mistake="gradient checkpointing computes layers again as if there were no packing",
        target="rlhf_pg.models.modes._again",
        old="with _mode_of_children(part), replaced_attention(configs, attention):",
        new="with _mode_of_children(part):",
        killers=(f"{TEST}test_with_checkpointing_and_adapters",),
    ),
    Mutant(
        name="beyond-the-window",
        mistake="rows longer than a sliding window attend to all of themselves",
        target="rlhf_pg.models.packing.can_pack",
        old="return window == math.inf or batch.longest <= window",
        new="return window > 0",
        killers=(f"{TEST}test_rows_longer_than_a_sliding_window_are_padded",),
    ),
    Mutant(
        name="attention-without-what-it-was-asked-for",
        mistake="attention is replaced that was asked for sparse blocks, which ours does not know",
        target="rlhf_pg.models.attention._attention",
        old="unknown = sorted(set(asked) - HONOURED)",
        new='unknown = [name for name in asked if name in ("softcap", "s_aux")]',
        killers=(
            f"{TEST}test_attention_is_not_replaced_where_it_is_asked_for_more_than_ours_knows",
        ),
    ),
]
