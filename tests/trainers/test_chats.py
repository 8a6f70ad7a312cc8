"""Chats in whole runs: where turns end, what rewards see of tokens, tools of rows, and the date."""

import datetime
import json
from pathlib import Path

import pytest
import torch
import yaml
from transformers import GenerationConfig
from transformers.utils import chat_template_utils

from rlhf_pg import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from rlhf_pg.config import SFTConfig
from rlhf_pg.episodes.tools import Toolbox
from rlhf_pg.models.loading import set_template, tokenizer_from_pretrained
from rlhf_pg.runtime import processes
from rlhf_pg.supervised import train_sft
from rlhf_pg.tasks.tiny import tiny_decoder, tool_tokenizer

# A base model's: its tokenizer names another EOS than the one that ends a turn.
TEMPLATE = (
    "{% if tools %}<tools>{% for t in tools %}{{ t['function']['name'] }}{% endfor %}{% endif %}"
    "{% for m in messages %}{{ '<user>' if m['role'] != 'assistant' else '<assistant>' }}"
    "{{ m['content'] }}<tool>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
CHAT = [{"role": "user", "content": "12"}]
SIZES = {"prompts_per_step": 2, "num_generations": 2, "max_completion_length": 4, "max_steps": 1}


def base_model(directory: Path, template: str = TEMPLATE) -> str:
    tokenizer = tool_tokenizer("0123456789-", ())
    tokenizer.chat_template = template
    torch.manual_seed(0)
    tiny_decoder(tokenizer, 64).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return str(directory)


def length(completions, **columns):
    return [float(len(one[0]["content"])) for one in completions]


def grpo(model: str, directory: Path, rows: list[dict], reward=length, **keys) -> GRPOTrainer:
    args = GRPOConfig(output_dir=str(directory), **(SIZES | keys))
    return GRPOTrainer(model=model, reward_funcs=reward, args=args, train_dataset=rows)


@pytest.mark.parametrize("adapter", [False, True])
def test_end_of_a_learnt_turn_ends_completions(tmp_path, capsys, caplog, adapter) -> None:
    """SFT learns `<tool>` as the end of a turn; RL before it warns, and RL on it stops there."""
    model = base_model(tmp_path / "base")
    end = tokenizer_from_pretrained(model, trust_remote_code=False).convert_tokens_to_ids("<tool>")
    trainer = grpo(model, tmp_path / "before", [{"prompt": CHAT}])
    assert end not in trainer.sampler.player.stop_token_ids
    assert "set eos_token to '<tool>'" in caplog.text
    rows = [{"messages": [*CHAT, {"role": "assistant", "content": str(n)}]} for n in range(4)]
    args = SFTConfig(output_dir=str(tmp_path / "sft"), max_steps=1, use_peft=adapter)
    train_sft(args, model=model, train_dataset=rows)
    assert "'<tool>' ends what is learnt" in capsys.readouterr().out
    final = tmp_path / "sft" / "final"
    assert end in GenerationConfig.from_pretrained(final).eos_token_id
    caplog.clear()
    trainer = grpo(str(final), tmp_path / "after", [{"prompt": CHAT}])
    assert end in trainer.sampler.player.stop_token_ids
    assert "eos_token" not in caplog.text


def test_eos_token_is_obeyed_and_saved(tmp_path, caplog) -> None:
    model = base_model(tmp_path / "base")
    trainer = grpo(model, tmp_path / "run", [{"prompt": CHAT}], eos_token="<tool>")
    end = trainer.processing_class.convert_tokens_to_ids("<tool>")
    assert end in trainer.sampler.player.stop_token_ids
    assert "eos_token" not in caplog.text
    trainer.train()
    assert end in GenerationConfig.from_pretrained(tmp_path / "run" / "final").eos_token_id
    with pytest.raises(ValueError, match="eos_token '<nil>' is not a token"):
        grpo(model, tmp_path / "x", [{"prompt": CHAT}], eos_token="<nil>")


def test_rewards_see_special_tokens_on_request(tmp_path) -> None:
    model = base_model(tmp_path / "base")
    trainer = grpo(model, tmp_path / "run", [{"prompt": CHAT}], skip_special_tokens=False)
    ids = trainer.processing_class("<user>7<eos>", add_special_tokens=False)["input_ids"]
    assert trainer.sampler.player.texts("?", ids) == ("?", "<user>7")
    plain = grpo(model, tmp_path / "plain", [{"prompt": CHAT}])
    assert plain.sampler.player.texts("?", ids) == ("?", "7")


def test_tools_of_rows_reach_the_template(tmp_path) -> None:
    schema = {"name": "77", "parameters": {}}
    rows = [{"prompt": CHAT, "tools": json.dumps([schema])}, {"prompt": CHAT, "tools": None}]
    trainer = grpo(base_model(tmp_path / "base"), tmp_path / "run", rows)
    texts = map(trainer.processing_class.decode, trainer.train_prompts.tokens)
    assert list(texts) == ["<tools>77<user>12<tool><assistant>", "<user>12<tool><assistant>"]


def test_template_arguments_reach_the_parser_of_calls() -> None:
    """The opening that a tokenizer's own parser is given is that of the prompt."""
    tokenizer = tool_tokenizer("0123456789-", ())
    tokenizer.chat_template = TEMPLATE + "{{ mode }}"
    tokenizer.response_template = {}
    set_template(tokenizer, GRPOConfig(chat_template_kwargs={"mode": "9"}))
    seen = []

    def parse(text, prefix, tools):
        seen.append(prefix)
        return {}

    tokenizer.parse_response = parse
    Toolbox(schemas=(), tokenizer=tokenizer).parse("1", CHAT)
    assert seen == ["<user>12<tool><assistant>9"]


def test_chat_template_is_a_file_or_a_name(tmp_path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}-")
    model = base_model(tmp_path / "base")
    trainer = grpo(model, tmp_path / "a", [{"prompt": CHAT}], chat_template=str(file))
    decode = trainer.processing_class.decode
    assert decode(trainer.train_prompts.tokens[0]) == "12-"
    as_text = file.read_text() + "{#" + "x" * 5000 + "#}"
    trainer = grpo(model, tmp_path / "c", [{"prompt": CHAT}], chat_template=as_text)
    assert decode(trainer.train_prompts.tokens[0]) == "12-"
    with pytest.raises(ValueError, match="chat_template 'other' is neither a file nor one"):
        grpo(model, tmp_path / "b", [{"prompt": CHAT}], chat_template="other")


class Tomorrow(datetime.date):
    @classmethod
    def today(cls) -> datetime.date:
        return datetime.date(2031, 2, 3)


CLOCKS = ['strftime_now("%d")', "strftime_now( format='%-d' )", "(strftime_now or 0)('%Y')"]


@pytest.mark.parametrize("clock", CLOCKS)
def test_date_of_a_template_is_that_of_the_first_start(tmp_path, monkeypatch, caplog, clock):
    """A resumed run, and one by its config.yaml, have the tokens of the day of the first start."""

    class Clock(datetime.datetime):
        @classmethod
        def now(cls, tz=None):
            raise AssertionError("the clock is not data")

    monkeypatch.setattr(chat_template_utils, "datetime", Clock)
    monkeypatch.setattr(processes, "date", datetime.date)
    model = base_model(tmp_path / "base", "{{ " + clock + " }}" + TEMPLATE)
    keys = {"max_steps": 1, "save_steps": 1}
    grpo(model, tmp_path / "run", [{"prompt": CHAT}], **keys).train()
    today = datetime.date.today().isoformat()
    recorded = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert recorded["chat_template_date"] == today
    monkeypatch.setattr(processes, "date", Tomorrow)
    again = grpo(model, tmp_path / "run", [{"prompt": CHAT}], **keys | {"max_steps": 2})
    again.train(resume_from_checkpoint="latest")
    assert "chat_template_date" in caplog.text
    assert again.state.step == 2
    rows = [{"messages": [*CHAT, {"role": "assistant", "content": "7"}]}]
    train_sft(SFTConfig(output_dir=str(tmp_path / "sft"), max_steps=1), model, None, rows)
    recorded = yaml.safe_load((tmp_path / "sft" / "config.yaml").read_text())
    assert recorded["chat_template_date"] == "2031-02-03"
    other = grpo(model, tmp_path / "new", [{"prompt": CHAT}])
    assert other.args.chat_template_date == "2031-02-03"
    assert other.train_prompts.tokens != again.train_prompts.tokens


def test_date_is_not_recorded_where_no_template_prints_it(tmp_path) -> None:
    args = RLOOConfig(output_dir=str(tmp_path / "run"), **SIZES)
    rows = [{"prompt": CHAT}]
    model = base_model(tmp_path / "base")
    trainer = RLOOTrainer(model=model, reward_funcs=length, args=args, train_dataset=rows)
    assert trainer.args.chat_template_date is None
    with pytest.raises(ValueError, match="chat_template_date must be a day such as"):
        RLOOConfig(chat_template_date="soon")
