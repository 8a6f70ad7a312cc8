"""Mistakes in computing a prompt once, and in attention in two parts."""

from tests.mutants import Mutant

TEST = "tests/models/test_packing.py::"
GRADIENTS = f"{TEST}test_packed_gradients_match_single_rows"
SOFTMAX = f"{TEST}test_attention_matches_softmax_over_visible_tokens"

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
        killers=(f"{TEST}test_packed_layout_computes_every_real_token_once", GRADIENTS),
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
        killers=(f"{TEST}test_different_prompts_in_group_are_not_shared",),
    ),
    Mutant(
        name="recomputed-by-another-attention",
        mistake="gradient checkpointing computes layers again as if there were no packing",
        target="rlhf_pg.models.modes._again",
        old="with _mode_of_children(part), replaced_attention(configs, attention):",
        new="with _mode_of_children(part):",
        killers=(f"{TEST}test_packed_gradients_with_checkpointing_and_adapters",),
    ),
    Mutant(
        name="beyond-the-window",
        mistake="rows longer than a sliding window attend to all of themselves",
        target="rlhf_pg.models.packing.can_pack",
        old="return window == math.inf or batch.longest <= window",
        new="return window > 0",
        killers=(f"{TEST}test_rows_longer_than_sliding_window_are_padded",),
    ),
    Mutant(
        name="attention-without-what-it-was-asked-for",
        mistake="attention is replaced that was asked for sparse blocks, which ours does not know",
        target="rlhf_pg.models.attention._attention",
        old="unknown = sorted(set(asked) - HONOURED)",
        new='unknown = [name for name in asked if name in ("softcap", "s_aux")]',
        killers=(f"{TEST}test_attention_with_unknown_argument_is_not_replaced",),
    ),
    Mutant(
        name="attention-gradient-in-bfloat16",
        mistake="the CPU's backward kernel is given bfloat16, rounds more and takes longer",
        target="rlhf_pg.models.shared_prefix._Attention",
        old="*(x.to(logsum.dtype) for x in inputs),",
        new="*inputs,",
        killers=(f"{TEST}test_bf16_attention_gradient_is_rounded_once",),
    ),
]
