"""Training on a reward model, beside a function that is only tracked."""

import pytest
from transformers import AutoTokenizer

from rlhf_pg.report.run_files import read
from rlhf_pg.rewards import RewardModel
from rlhf_pg.tasks import arithmetic
from tests.rewards.test_reward_model import classifier, letters
from tests.trainers.conftest import digits


@pytest.fixture
def judge_path(tmp_path):
    path = tmp_path / "judge"
    classifier("gpt2").save_pretrained(path)
    arithmetic().new_model()[1].save_pretrained(path)
    return str(path)


def test_zero_weight_function_is_tracked_beside_reward_model(make, judge_path, tmp_path):
    scored, eos = [], arithmetic().new_model()[1].eos_token_id

    def witness(prompts, completions, completion_ids, ended, **_):
        assert ended == [ids[-1] == eos for ids in completion_ids]
        scored.extend(RewardModel(judge_path)(prompts, completions, ended=ended))
        return digits(completions)

    make(reward_funcs=[judge_path, witness], reward_weights=(1.0, 0.0), max_steps=2).train()
    lines = read(tmp_path / "run" / "metrics.jsonl")
    half = len(scored) // 2
    for line, scores in zip(lines, (scored[:half], scored[half:]), strict=True):
        mean = sum(scores) / len(scores)
        assert line["reward"] == pytest.approx(mean, abs=1e-5)
        assert line["rewards/judge/mean"] == pytest.approx(mean, abs=1e-5)
        assert 0 < line["rewards/witness/mean"] < 1


def test_stopped_completion_is_not_truncated(make):
    heard = []

    def hears(completions, ended, truncated, **_):
        heard.extend(zip(completions, ended, truncated, strict=True))
        return digits(completions)

    make(reward_funcs=hears, stop="1", max_completion_length=12, max_steps=1).train()
    assert any("1" in text for text, _, _ in heard)
    assert all(cut == ("1" not in text and not ended) for text, ended, cut in heard)


def test_reward_model_options_come_from_config(make, judge_path):
    for sees_eos in (False, True):
        trainer = make(reward_funcs=judge_path, reward_model_sees_eos=sees_eos)
        assert trainer.rewards.sources[0].function.sees_eos == sees_eos


def test_reward_processing_classes_set_reward_tokenizer(make, judge_path):
    own = AutoTokenizer.from_pretrained(judge_path)
    model = classifier("gpt2")
    with pytest.raises(ValueError, match=r"GPT2For.* no tokenizer was saved with the model"):
        make(reward_funcs=model)
    trainer = make(reward_funcs=model, reward_processing_classes=own)
    assert trainer.rewards.sources[0].function.processing_class is own
    with pytest.raises(ValueError, match="one entry per reward function, got 1 for 2"):
        make(reward_funcs=[model, digits], reward_processing_classes=[own])


def test_untokenizable_text_error_names_reward_model(make):
    judge = classifier("gpt2")
    trainer = make(reward_funcs=judge, reward_processing_classes=letters())
    with pytest.raises(ValueError, match=r"reward model GPT2For.*cannot be tokenized"):
        trainer.train()
