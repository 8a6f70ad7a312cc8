"""The examples of agents by their own recipes: who is paid what, and that a run can be repeated."""

import json
import math
import re
from collections.abc import Callable
from itertools import compress
from pathlib import Path
from shutil import which
from typing import Any

import pytest
import torch
import yaml

from rlhf_pg.cli.recipes import config_of
from rlhf_pg.tasks.tiny import tiny_decoder
from rlhf_pg.trainers import TRAINERS
from tests.agents.test_history import bytes_tokenizer
from tests.episodes.scripted import CHAT, ScriptedEngine

SUM = {"prompt": "What is 17 + 25?", "answer": "42"}


@pytest.fixture
def trainer_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """trainer_of(name, row, says, ...): by the recipe in an example, with a policy that says
    `says[sample]` in its turns, or one of random weights; its episodes are in `played`."""
    monkeypatch.chdir(Path(__file__).parents[2])
    tokenizer = bytes_tokenizer(CHAT, "<eos>")
    tokenizer.pad_token = "<bos>"
    torch.manual_seed(0)
    for part in (tiny_decoder(tokenizer, max_positions=32768), tokenizer):
        part.save_pretrained(tmp_path / "model")

    def build(name: str, row: dict[str, Any], says: Any = None, **keys: Any) -> Any:
        text = Path("examples", "agents", name).read_text()
        keys = dict(re.findall(r"^(?:#     |    )(\w+): (.+)$", text, re.M)) | keys
        (tmp_path / keys["dataset_name"]).write_text(json.dumps(row))
        keys |= {"model_name_or_path": str(tmp_path / "model"), "dtype": "float32"}
        keys |= {"output_dir": str(tmp_path / "run"), "max_steps": 1, "prompts_per_step": 1}
        if says:  # with log-probabilities of its own
            keys |= {"num_generations": len(says), "truncated_sampling": "ignore"}
        recipe = tmp_path / "recipe.yaml"
        recipe.write_text(yaml.safe_dump(keys))
        args = config_of([recipe], [], "train")
        trainer = TRAINERS[args.algorithm](args=args)
        score, trainer.played = trainer.sampler.add_rewards, []
        trainer.sampler.add_rewards = lambda x: trainer.played.extend(x.episodes) or score(x)
        turns = [*map(list, says or ())]

        def script(request: Any, sample: int) -> list[int]:
            return [*tokenizer(turns[sample].pop(0))["input_ids"], tokenizer.eos_token_id]

        if says:
            trainer.sampler.engine = ScriptedEngine(script, tokenizer.eos_token_id)
        return trainer

    return build


def outcomes(trainer: Any, episodes: Any) -> list[tuple[list[float], str, int]]:
    """What each was paid, what the policy said in it, and how often its history branches."""
    assert [(x.error, x.encoded_again) for x in episodes] == [(None, 0)] * len(episodes)
    found = []
    for x in episodes:
        own = trainer.processing_class.decode([*compress(x.tokens, x.actions)], True)
        paid = [reward for reward in x.rewards if not math.isnan(reward)]
        found.append((paid, own, sum(back != 1 for back in x.offsets)))
    return found


@pytest.mark.parametrize(
    ("name", "says", "rewards"),
    [
        ("chat.py", [("41", "42."), ("42", "It's 43")], [1, 0]),
        pytest.param(
            *("curl.sh", [("It's 42.",), ("-42", "42"), ("none", "420")], [1, 0.5, 0]),
            marks=pytest.mark.skipif(not all(map(which, ("curl", "jq"))), reason="no curl, or jq"),
        ),
    ],
)
def test_agent_is_paid_and_trained(trainer_of, name: str, says: Any, rewards: list[float]) -> None:
    trainer = trainer_of(name, SUM, says)
    before = trainer.model.lm_head.weight.detach().clone()
    trainer.train()
    expected = [([r], "".join(said), 0) for r, said in zip(rewards, says, strict=True)]
    assert outcomes(trainer, trainer.played) == expected
    assert not before.equal(trainer.model.lm_head.weight)
