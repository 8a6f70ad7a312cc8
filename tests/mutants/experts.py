"""Mistakes in mixtures of experts, and in copying weights."""

from tests.mutants import Mutant

TRAINED = "tests/trainers/test_experts.py::test_aux_loss_gradient_is_that_of_whole_batch"
NAMES = "tests/rollout/vllm/test_handover.py::test_"
COUNTED = "tests/models/test_experts.py::test_policy_balance_loss_covers_all_real_tokens"

MUTANTS = [
    Mutant(
        name="missing-tensors-made-up",
        mistake="a tensor that a checkpoint lacks is random (transformers warns)",
        target="rlhf_pg.models.from_pretrained",
        old="    if missing:\n",
        new="    if missing and False:\n",
        killers=("tests/models/test_loading.py::test_load_weights_lacking_tensor_raises",),
    ),
    Mutant(
        name="router-loss-per-micro-batch",
        mistake="the share of each expert counted in one micro-batch (transformers, verl)",
        target="rlhf_pg.trainers.learner.Learner._router_loss",
        old="return balance.loss(chosen, new.routed.probability)",
        new="return balance.loss(*new.routed)",
        killers=(TRAINED,),
    ),
    Mutant(
        name="router-loss-counts-prompts-once",
        mistake="a prompt that is computed once counts once, however many completions it has",
        target="rlhf_pg.models.packing.lay_out_packed",
        old="shares = torch.where(columns < width, shared[:, None], acts[:, None])[kept]",
        new="shares = torch.ones_like(kept, dtype=torch.int64)[kept]",
        killers=(COUNTED,),
    ),
    Mutant(
        name="router-loss-over-all-layers",
        mistake="shares taken over all layers together, so that each may have a favourite "
        "(transformers)",
        target="rlhf_pg.models.experts.Balance.loss",
        old="share = (chosen / tokens) * (probability / tokens)",
        new="share = (chosen / tokens).mean(0, keepdim=True) * (probability / tokens)",
        killers=("tests/models/test_experts.py::test_layers_are_balanced_separately",),
    ),
    Mutant(
        name="buffers-not-handed-over",
        mistake="an engine keeps random biases for choosing experts (parameters alone are sent)",
        target="rlhf_pg.rollout.vllm.handover._weights",
        old="if name not in module._non_persistent_buffers_set:",
        new="if False:",
        killers=(NAMES + "handed_over_experts_match_checkpoint",),
    ),
    Mutant(
        name="experts-under-names-of-transformers",
        mistake="weights go to vLLM by the names of transformers 5, where experts are one tensor",
        target="rlhf_pg.rollout.vllm.handover.published_weights",
        old="if not get_model_conversion_mapping(names, add_legacy=False):",
        new="if True:",
        killers=(NAMES + "expert_weights_have_names_read_by_vllm",),
    ),
]
