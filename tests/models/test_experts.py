"""The loss of routers, against numbers worked out by hand and the loss of `transformers`."""

import pytest
import torch
from peft import get_peft_model
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from rlhf_pg.models import Policy
from rlhf_pg.models.policy import Balance, balance_of
from tests.models.test_packing import batch_of
from tests.tiny import MIXTURES, adapter, tiny_model

BIASED = ("deepseek_v3", "glm4_moe", "minimax_m2")  # balanced by a correction bias
WITH_LOSS = [arch for arch in MIXTURES if arch not in BIASED]


def test_balance_loss_by_hand():
    """Two tokens, of 3 rows and of 1, with probabilities 1/4, 3/4 and 2/3, 1/3 of two experts."""
    logits = torch.tensor([[1.0, 3.0], [2.0, 1.0]], dtype=torch.float64).log()
    routed = Balance(1).count_choices([logits], torch.tensor([3, 1]))
    assert routed.chosen.tolist() == [[1.0, 3.0]]
    torch.testing.assert_close(
        routed.probability[0].tolist(), [3 / 4 + 2 / 3, 9 / 4 + 1 / 3], rtol=1e-12, atol=0
    )
    # 2 (1/4 (17/12)/4 + 3/4 (31/12)/4)
    loss = Balance(1).loss(*routed)
    assert loss.item() == pytest.approx(2 * (17 / 192 + 93 / 192), rel=1e-12)


def test_layers_are_balanced_separately():
    """Two layers with a favourite each are not made up for by one another."""
    sure = 50 * torch.eye(2, dtype=torch.float64)
    rows = torch.ones(3, dtype=torch.int64)
    layers = [sure[[0, 0, 0]], sure[[1, 1, 1]]]
    assert Balance(1).loss(*Balance(1).count_choices(layers, rows)).item() == pytest.approx(2)
    assert load_balancing_loss_func(tuple(layers), 2, 1).item() == pytest.approx(1)


def test_single_layer_loss_matches_transformers():
    logits = torch.randn(7, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    mask = torch.tensor([1, 1, 0, 1, 1, 0, 1])
    theirs = load_balancing_loss_func((logits,), 5, 2, mask[None])
    ours = Balance(2).loss(*Balance(2).count_choices([logits], mask))
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-6)


@pytest.mark.parametrize(
    ("arch", "packs"), [("mixtral", False), *((arch, True) for arch in WITH_LOSS)]
)
def test_policy_balance_loss_covers_all_real_tokens(arch, packs):
    """As by a pass of its own for each row, prompt included, without padding."""
    model = tiny_model(arch)
    policy, batch = Policy(model, balanced=True), batch_of()
    if not packs:
        policy.window = 0.0
    chosen, probability = torch.zeros(2, 4), torch.zeros(2, 4)
    for row in range(batch.num_rows):
        ids = [batch.prompt_ids[row][batch.prompt_mask[row]]]
        ids += [batch.completion_ids[row][batch.completion_mask[row]]]
        output = model.base_model(torch.cat(ids)[None], output_router_logits=True)
        for layer, logits in enumerate(output.router_logits):
            for token in logits.reshape(-1, 4).softmax(-1):
                probability[layer] += token
                for expert in token.argsort(descending=True)[:2]:
                    chosen[layer, expert] += 1
    routed = policy(batch).routed
    torch.testing.assert_close(routed.chosen, chosen)
    torch.testing.assert_close(routed.probability, probability, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(policy(batch, routes_alone=True), chosen)


@pytest.mark.parametrize("arch", ["llama", "deepseek_v3", "minimax_m2"])
def test_model_without_router_loss_raises(arch):
    model = tiny_model(arch)
    with pytest.raises(ValueError, match="router_aux_loss_coef is for a mixture of experts"):
        Policy(model, balanced=True)


def test_experts_are_found_below_adapter():
    assert balance_of(get_peft_model(tiny_model("olmoe"), adapter())).top_k == 2
