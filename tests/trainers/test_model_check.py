"""What is sampled, scored and updated is one policy, or the run does not start."""

import json
import logging

import pytest
import torch
from torch import nn

from rlhf_pg import PPOTrainer
from rlhf_pg.models import disable_dropout, settle_positions
from rlhf_pg.report.json_lines import read
from rlhf_pg.rollout import NativeEngine, SamplingParams
from rlhf_pg.rollout.token_sampling import Drawn
from rlhf_pg.tasks import arithmetic, guess
from rlhf_pg.trainers import model_check
from rlhf_pg.trainers.model_check import Verdict, examine
from tests.models.architectures import NAMES, build
from tests.tiny import tiny_model
from tests.trainers.every_model import documented, examined, outcome

PROMPTS = [[5, 9, 2, 31, 6, 7, 8, 9], [17], [8, 3, 30, 12, 25, 6, 39]]


def verdict_on(model, **options):
    with torch.no_grad():
        return examine(examined(model), **options)


@pytest.mark.slow
@pytest.mark.parametrize("arch", NAMES)
def test_documented_outcome_holds_for_every_architecture(arch):
    assert outcome(arch) == documented()[arch]


@pytest.mark.parametrize("arch", ["gpt2", "bloom", "rwkv", "zaya", "glm_moe_dsa", "git"])
def test_model_table_is_complete_and_correct(arch):
    assert sorted(documented()) == NAMES
    assert outcome(arch) == documented()[arch]


@pytest.mark.parametrize("arch", ["bloom", "mpt"])
def test_float64_nan_padding_disables_padding(arch):
    """Their masks are the least number of the dtype, and their softmax is in float32."""
    run = examined(build(arch).double(), dtype=torch.float64)
    assert examine(run) == Verdict(pads=False, samples_padded=False)
    params = SamplingParams(max_tokens=4)
    with pytest.raises(FloatingPointError, match="padding"):
        run.engine.generate(PROMPTS, 1, params, seed=0)
    Verdict(samples_padded=False).apply(run.engine)
    assert len(run.engine.generate(PROMPTS, 1, params, seed=0)) == 3


# What each model may not do, and what is seen of it; {} where all is well.
VERDICTS = {
    "llama": Verdict(),
    "mistral": Verdict(),  # rows beyond its window are padded
    "phimoe": Verdict(),
    "recurrent_gemma": Verdict(pads=False, samples_padded=False),
    "rwkv": Verdict(pads=False, samples_padded=False, samples_together=False),
    "minimax_m3_vl_text": Verdict(pads=False, samples_padded=False),
}


@pytest.mark.parametrize("arch", VERDICTS)
def test_architecture_gets_expected_verdict(arch):
    model = build(arch)
    disable_dropout(model)
    assert verdict_on(model) == VERDICTS[arch]


@pytest.mark.parametrize("arch", ["glm_moe_dsa"])
def test_model_sampling_other_distribution_is_refused(arch):
    with pytest.raises(ValueError, match=rf"{arch}\) samples from another distribution"):
        verdict_on(build(arch))


def test_bfloat16_beyond_the_limit_only_warns(monkeypatch, caplog):
    """A real model in bfloat16 is off by more than the limit in some samples of few tokens."""
    monkeypatch.setitem(model_check.LIMITS, torch.bfloat16, -1.0)
    with caplog.at_level(logging.WARNING):
        examine(examined(tiny_model("gpt2").bfloat16(), dtype=torch.bfloat16))
    assert "gpt2) samples from another distribution" in caplog.text


def test_model_differing_in_train_mode_is_refused():
    class Jitters(nn.Module):
        def forward(self, x):
            return x * 1.5 if self.training else x

    model = tiny_model("gpt2")
    model.transformer.h[0].mlp.act = nn.Sequential(model.transformer.h[0].mlp.act, Jitters())
    model.eval()
    assert verdict_on(model) == Verdict()  # updates evaluate
    run = examined(model)
    run.policy.drops = True  # as if they did not
    with pytest.raises(ValueError, match="other log-probabilities in updates"):
        examine(run)
    assert examine(run, updates_evaluate=False) == Verdict()
    assert not model.training


def test_packing_that_leaks_between_rows_is_disabled():
    run = examined(tiny_model("gpt2"))
    own = run.score

    def sees_others(batch):
        return own(batch) + (batch.num_rows - 1) * (run.policy.window > 0)

    assert examine(run._replace(score=sees_others)) == Verdict(packs=False)
    assert run.policy.window > 0  # the caller decides


def test_wrong_fast_sampling_falls_back_to_generate(monkeypatch):
    run = examined(tiny_model("gpt2"))
    monkeypatch.setattr(
        "rlhf_pg.rollout.native.choosing.draw",
        lambda x, *a: Drawn(x.argmax(-1), *[x[:, 0]] * 4),
    )
    assert examine(run) == Verdict(samples_fast=False)
    assert run.engine.refused is None


def test_padding_sensitive_generate_keeps_padding_elsewhere(monkeypatch):
    own, run = model_check.sampled, examined(tiny_model("gpt2"))

    def minds(engine, run):
        batch, said = own(engine, run)
        return batch, [row + engine.pads for row in said]

    monkeypatch.setattr(model_check, "sampled", minds)
    assert examine(run) == Verdict(samples_fast=False, samples_padded=False)


def test_nan_model_gets_no_verdict():
    model = tiny_model("gpt2")
    with torch.no_grad():
        model.transformer.wte.weight.fill_(torch.nan)
    assert verdict_on(model) is None


def test_row_comparing_loss_without_padding_is_refused():
    with pytest.raises(ValueError, match="choose another policy_loss"):
        verdict_on(build("rwkv"), compares_rows=True)
    assert verdict_on(tiny_model("gpt2"), compares_rows=True) == Verdict()


def test_every_check_is_agreed_across_processes():
    run = examined(tiny_model("gpt2"))
    asked = []

    def agreed(holds):
        asked.append(holds)
        return holds

    examine(run._replace(agreed=agreed))
    assert asked == [False] * 5  # not finite, mode, padding, packing, sampling


# ------------------------------------------------------------------------------------ in a run


def of_task(arch, **options):
    """A model for the tokenizer of the task, and that."""
    _, tokenizer = arithmetic().new_model()
    model = build(arch, vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, **options)
    return {"model": model, "processing_class": tokenizer}


@pytest.mark.parametrize(
    ("arch", "how"),
    [
        ("rwkv", "completions are sampled one by one"),
        ("recurrent_gemma", "only rows of one length are batched"),
    ],
)
def test_sampler_logprobs_match_scores_without_padding(make, caplog, tmp_path, arch, how):
    widths = [{"prompt": text, "answer": ""} for text in ("1+2=", "12+3=", "12+34=")]
    options = {"num_iterations": 2, "output_dir": str(tmp_path), "train_dataset": widths}
    trainer = make(**of_task(arch), **options)
    with caplog.at_level(logging.WARNING):
        trainer.on_start()
    assert how in caplog.text
    rollout = trainer.roll_out(range(3)).rollout
    scored = trainer.learner.score(rollout).old_logprobs
    torch.testing.assert_close(scored, rollout.sampler_logprobs, rtol=0, atol=1e-4)


def test_verdict_is_reused_for_same_model(make, monkeypatch, tmp_path):
    make(max_steps=1, save_steps=1).train()
    kept = json.loads((tmp_path / "run" / model_check.FILE).read_text())
    assert kept.items() >= Verdict()._asdict().items()
    asked = []
    monkeypatch.setattr(model_check, "examine", lambda *_: asked.append(1) or Verdict())
    make(max_steps=2).train(resume_from_checkpoint="latest")
    assert not asked
    make(max_steps=2, temperature=0.5, output_dir=str(tmp_path / "other")).train()
    assert asked == [1]
    make(max_steps=1, model_check=False, output_dir=str(tmp_path / "none")).train()
    assert asked == [1]


def test_missing_verdict_is_not_saved(make, tmp_path):
    """Or a model of the same shapes that is whole would be believed to be like it."""
    broken = of_task("rwkv")
    with torch.no_grad():
        broken["model"].get_input_embeddings().weight.fill_(torch.nan)
    with pytest.raises(FloatingPointError):
        make(**broken).train()
    assert not (tmp_path / "run" / model_check.FILE).exists()


def test_evaluation_before_run_applies_verdict(make, tmp_path):
    trainer = make(**of_task("rwkv"), eval_dataset=arithmetic().eval_dataset.select(range(4)))
    trainer.evaluate()
    assert (trainer.engine.pads, trainer.engine.together) == (False, False)
    assert not trainer.learner.pads
    assert not (tmp_path / "run").exists()


def test_reference_applies_verdict(make, tmp_path):
    """Before the first update it says what the policy says."""
    make(**of_task("zaya"), beta=0.1, max_steps=1).train()
    assert read(tmp_path / "run/metrics.jsonl")[0]["kl"] == pytest.approx(0, abs=1e-7)


# -------------------------------------------------------------------------------------- LongRoPE


ROPE = {"rope_type": "longrope", "long_factor": [4.0] * 4, "short_factor": [1.0] * 4}


def long_rope():
    grouped = {"intermediate_size": 48, "num_key_value_heads": 2}
    return tiny_model("phi3", rope_scaling=ROPE, original_max_position_embeddings=20, **grouped)


@pytest.mark.parametrize("longest", [18, 32])
def test_settle_positions_uses_longest_row(longest):
    """Sampler and policy agree on rows that cross the original length, in any company."""
    model = long_rope()
    settle_positions(model, longest)
    assert model.model.rotary_emb.inv_freq[0].item() == (0.25 if longest > 20 else 1.0)
    params = SamplingParams(max_tokens=longest - 8)
    engine = NativeEngine(model, [], 0)
    completions = engine.generate(PROMPTS, 2, params, seed=0)
    alone = [engine.generate([p], 2, params, 0, [i]) for i, p in enumerate(PROMPTS)]
    assert [c.tokens for c in completions] == [c.tokens for own in alone for c in own]
    rows = [p for p in PROMPTS for _ in range(2)]
    for prompt, completion in zip(rows, completions, strict=True):
        ids = torch.tensor([prompt + completion.tokens])
        with torch.no_grad():
            logits = model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
        exact = logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0]
        torch.testing.assert_close(torch.tensor(completion.logprobs), exact, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("positions", "speed"), [(8, 1.0), (64, 0.25)])
def test_environment_run_settles_positions_by_model_limit(make, positions, speed):
    """Its own prompts are not those of the dataset, which are short here."""
    options = {"rope_scaling": ROPE, "original_max_position_embeddings": 20}
    model = of_task("phi3", max_position_embeddings=positions, **options)
    environment = guess().environment_factory
    trainer = make(**model, max_completion_length=2, environment_factory=environment)
    assert trainer.longest_row <= 8
    assert trainer.model.model.rotary_emb.inv_freq[0].item() == speed


def test_trainer_settles_positions(make):
    trainer = make(**of_task("phi3", rope_scaling=ROPE, original_max_position_embeddings=8))
    assert trainer.longest_row > 8
    assert trainer.model.model.rotary_emb.inv_freq[0].item() == 0.25
    assert trainer.learner.policy.window > trainer.longest_row
    critic = make(PPOTrainer, value_model=long_rope(), **of_task("gpt2")).critic
    assert critic.model.rotary_emb.inv_freq[0].item() == 1.0  # not beyond 20 tokens
    assert critic.model.rotary_emb.rope_type != "longrope"
