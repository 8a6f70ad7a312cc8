"""The check that a checkpoint belongs to this run, and which settings a resumed run may change."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rlhf_pg.config.fields import EFFECTS
from rlhf_pg.config.run import effect_of

# Inputs that must be the same as in the resumed run, and how to provide them.
REMEDIES = {
    "model": "the same base model and peft_config",
    "reference": "the model that training started from, and with the same beta",
    "critic": "the same value_model",
    "teacher": "the same teacher",
    "tokenizer": "the same processing_class, vocabulary and chat template",
    "train_dataset": "the same rows in the same order, or start a new run from its weights",
}


def check(
    path: Path,
    saved: Mapping[str, Any],
    config: Mapping[str, Any],
    fingerprints: Mapping[str, str | None],
    running: Iterable[str],
    counters: Iterable[str],
) -> str:
    """Compare `saved`, from `state.json`, with this run; return the changes to warn of. ValueError,
    with a remedy, if the runs do not match.
    """
    if saved["counters"].keys() != set(counters):
        raise ValueError(
            f"{path} was saved by rlhf_pg {saved.get('version', 'before 0.1')}, with the counters "
            f"{', '.join(saved['counters'])}: resume with that version, or load it as a model"
        )
    now = json.loads(json.dumps(config))
    fixed = [key for key in saved["config"] if EFFECTS[effect_of(key)].resume == "fixed"]
    if other := describe_changes(saved["config"], now, fixed):
        raise ValueError(
            f"{path} was saved with another config: {other}. Resume with the same config, or "
            "start a new run from its weights"
        )
    for name, remedy in REMEDIES.items():
        if saved["fingerprints"].get(name) != fingerprints.get(name):
            raise ValueError(f"{path} was saved by a run with another {name}: resume with {remedy}")
    theirs, ours = (", ".join(sorted(names)) or "nothing" for names in (saved["running"], running))
    if theirs != ours:  # their names include those of reward functions
        raise ValueError(
            f"{path} was saved with running statistics of {theirs}, but this run has them of "
            f"{ours}: resume with the same reward functions"
        )
    warned = [key for key in saved["config"] if EFFECTS[effect_of(key)].resume == "warned"]
    return describe_changes(saved["config"], now, warned)


def describe_changes(saved: Mapping[str, Any], now: Mapping[str, Any], keys: Iterable[str]) -> str:
    """Describe how these keys of a config have changed; "" if none has."""
    return "; ".join(
        f"{key} was {saved[key]!r} and is {now[key]!r}"
        for key in sorted(saved.keys() & now.keys() & set(keys))
        if saved[key] != now[key]
    )
