"""On-policy distillation: expected gradients by enumeration, privileged prompts, the teacher."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributions import Categorical, kl_divergence

from rlhf_pg import GRPOTrainer, PPOTrainer, ReinforceTrainer, RLOOTrainer
from rlhf_pg.report.metrics import Meter
from tests import enumeration
from tests.enumeration import (
    COMPLETIONS,
    MAX_LENGTH,
    PROMPTS,
    assert_close,
    exact_gradient,
    expected_gradient,
    gradient,
    gradient_of,
    make_trainer,
    probabilities,
    tokenizer,
)

COEF = 0.7
SEQUENCE = {"importance_sampling_level": "sequence"}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("teacher")
    enumeration.model(seed=3).save_pretrained(path)
    tokenizer().save_pretrained(path)
    return path


def logits(model: Any, prompt: str, said: tuple[int, ...]) -> Tensor:
    """Of each token of one completion, (T,V), from an unpadded forward pass."""
    ids = torch.tensor([[*PROMPTS[prompt], *said]])
    return model(ids).logits[0, len(PROMPTS[prompt]) - 1 : -1]


def expected_divergence(trainer: Any, model: Any, compare: Any, seen: str | None = None) -> Tensor:
    """grad of E[sum_t D(p_t, q_t)] for prefixes that are held fixed, summed over everything."""
    (prompt,) = trainer.train_prompts.rows["prompt"]
    total = torch.zeros((), dtype=torch.float64)
    for said, chance in probabilities(trainer.model, prompt).items():
        p = logits(trainer.model, prompt, said)
        with torch.no_grad():
            q = logits(model, seen or prompt, said)
        for own, theirs in zip(p, q, strict=True):
            total = total + chance * compare(own, theirs)
    return gradient(trainer.model, total)


def reverse(own: Tensor, theirs: Tensor) -> Tensor:
    return kl_divergence(Categorical(logits=own), Categorical(logits=theirs))


def jensen_shannon(own: Tensor, theirs: Tensor) -> Tensor:
    p, q = own.softmax(-1), theirs.softmax(-1)
    m = Categorical(probs=0.2 * q + 0.8 * p)
    return 0.2 * kl_divergence(Categorical(q), m) + 0.8 * kl_divergence(Categorical(p), m)


def best_and_tail(own: Tensor, theirs: Tensor) -> Tensor:
    """Of the teacher's likeliest token against the two others together."""
    best = theirs.argmax()
    p, q = (
        Categorical(torch.stack([x[best], 1 - x[best]]))
        for x in (own.softmax(-1), theirs.softmax(-1))
    )
    return kl_divergence(p, q)


@pytest.mark.parametrize(
    ("options", "compare"),
    [
        ({}, reverse),
        ({"micro_batch_tokens": 5, "temperature": 1.7}, None),
        ({"teacher_divergence": "forward_kl"}, lambda p, q: reverse(q, p)),
        ({"teacher_divergence": "js", "teacher_mixture": 0.2}, jensen_shannon),
        ({"teacher_top_k": 1}, best_and_tail),
        ({"teacher_top_k": 2}, reverse),  # the tail is a single token
        ({"teacher_divergence": "sampled"}, reverse),
        ({"teacher_placement": "reward"}, reverse),
    ],
    ids=lambda x: "-".join(map(str, x.values())) if isinstance(x, dict) else "",
)
def test_expected_gradient_of_the_divergence_alone(
    options: dict[str, Any], compare: Any, teacher: Path, tmp_path: Path
) -> None:
    several = not options or "micro_batch_tokens" in options or "teacher_placement" in options
    trainer_type = GRPOTrainer if several else ReinforceTrainer
    options = {"teacher_model_name_or_path": str(teacher), "teacher_coef": COEF, **options}
    options |= {"num_generations": 2} if several else {"advantage_estimator": "returns"}
    trainer = make_trainer(trainer_type, tmp_path, reward=(), **options)
    heat = trainer.args.temperature  # the completions are listed with weights at temperature 1
    truth = expected_divergence(
        trainer, enumeration.model(seed=3), compare or (lambda p, q: reverse(p / heat, q / heat))
    )
    assert_close(expected_gradient(trainer), COEF * truth / MAX_LENGTH)


@pytest.mark.parametrize(
    ("trainer_type", "options"),
    [
        (RLOOTrainer, {"num_generations": 2}),
        (ReinforceTrainer, {"advantage_estimator": "returns"}),
        (PPOTrainer, {"lam": 1.0, "vf_coef": 0.0, "normalize_advantages": False}),
    ],
)
def test_divergence_of_whole_completions_in_the_reward(
    trainer_type: Any, options: dict[str, Any], teacher: Path, tmp_path: Path
) -> None:
    """Paid forward without discount it has the gradient of KL(policy || teacher) of completions."""
    options |= {"teacher_model_name_or_path": str(teacher), "teacher_placement": "reward"}
    if trainer_type is not PPOTrainer:
        options["teacher_gamma"] = 1.0
    trainer = make_trainer(trainer_type, tmp_path, teacher_coef=COEF, **options)
    truth = exact_gradient(trainer, enumeration.model(seed=3), COEF)
    found = -MAX_LENGTH * expected_gradient(trainer)
    assert_close(found[: len(truth)], truth)


def test_privileged_prompts(tmp_path: Path) -> None:
    """The policy teaches itself, with a prompt of its own for each completion, or none."""
    seen: list[Any] = []

    def hint(prompts, completions, rewards, **_: Any) -> list[str | None]:
        seen.append((prompts, completions, rewards))
        return ["bba" if "a" in completion else None for completion in completions]

    trainer = make_trainer(
        *(GRPOTrainer, tmp_path),
        reward=lambda completions, **_: [7.0] * len(completions),
        inputs={"privileged_prompt": hint},
        num_generations=2,
        teacher_model_name_or_path="policy",
    )
    initial = enumeration.model()

    def compare(said: tuple[int, ...]) -> Tensor:
        p = logits(trainer.model, "ab", said)
        with torch.no_grad():
            q = logits(initial, "bba", said)
        return reverse(p, q).sum() if 1 in said else p.sum() * 0

    chances = probabilities(trainer.model, "ab")
    truth = gradient(trainer.model, sum(chances[said] * compare(said) for said in COMPLETIONS))
    assert_close(expected_gradient(trainer), truth / MAX_LENGTH)
    assert seen[-1] == (["ab", "ab"], ["bb", "bb"], [7.0, 7.0])


def test_column_of_privileged_prompts_and_templates(tmp_path: Path) -> None:
    found = []
    for given in ("column", "template"):
        row = {"prompt": "ab", "answer": "ba"}
        row |= {"privileged_prompt": "bba"} if given == "column" else {}
        key = {} if given == "column" else {"privileged_prompt": "b{answer}"}
        trainer = make_trainer(
            *(GRPOTrainer, tmp_path / given),
            inputs={"train_dataset": [row]},
            reward=(),
            num_generations=2,
            teacher_model_name_or_path="policy",
            **key,
        )
        found.append(gradient_of(trainer, [COMPLETIONS[1], COMPLETIONS[5]]))
    assert found[0].norm() > 1e-3
    assert torch.equal(*found)


def test_teacher_with_more_rows_is_cut_and_another_tokenizer_is_refused(
    teacher: Path, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"reward": (), "num_generations": 2}
    wide = enumeration.model(seed=3)
    wide.resize_token_embeddings(5)
    wide.save_pretrained(tmp_path / "wide")
    tokenizer().save_pretrained(tmp_path / "wide")
    says = [COMPLETIONS[1], COMPLETIONS[5]]
    found = [
        gradient_of(
            make_trainer(GRPOTrainer, tmp_path, teacher_model_name_or_path=str(path), **options),
            says,
        )
        for path in (teacher, tmp_path / "wide")
    ]
    assert torch.equal(*found)
    other = tokenizer()
    other.add_tokens("c")
    other.save_pretrained(tmp_path / "wide")
    with pytest.raises(ValueError, match="teacher_model_name_or_path"):
        make_trainer(
            *(GRPOTrainer, tmp_path),
            teacher_model_name_or_path=str(tmp_path / "wide"),
            **options,
        )


@pytest.mark.parametrize(
    ("key", "options"),
    [
        ("teacher_model_name_or_path", {"teacher_model_name_or_path": "policy"}),
        ("privileged_prompt", {"privileged_prompt": "b{nothing}"}),
        ("privileged_prompt", {"privileged_prompt": "hints.sibling"}),
        ("privileged_prompt", {"privileged_prompt": "b{prompt}" + "a" * 8}),
        ("teacher_coef", {"teacher_coef": 0.5, "teacher_model_name_or_path": None}),
        ("policy_loss", {"policy_loss": "none", "teacher_placement": "reward"}),
        ("importance_sampling_level", SEQUENCE | {"teacher_placement": "reward"}),
        ("wrongly", {"inputs": {"privileged_prompt": lambda wrongly: wrongly}}),
    ],
)
def test_wrong_keys_are_named(
    key: str, options: dict[str, Any], teacher: Path, tmp_path: Path
) -> None:
    options = {"teacher_model_name_or_path": str(teacher)} | options
    with pytest.raises(ValueError, match=key):
        make_trainer(GRPOTrainer, tmp_path, num_generations=2, **options)


WAYS: dict[str, dict[str, Any]] = {
    "all tokens": {},
    "`teacher_top_k: 2` of three": {"teacher_top_k": 2},
    "`teacher_top_k: 1`": {"teacher_top_k": 1},
    "`sampled`": {"teacher_divergence": "sampled"},
    "`teacher_placement: reward`": {"teacher_placement": "reward"},
}


@pytest.mark.slow
def test_price_of_comparing_less(teacher: Path, tmp_path: Path) -> None:
    """Bias and variance of the gradient; with TEACHER=file they are written for the docs."""
    table = {}
    for way, options in WAYS.items():
        named = {"teacher_model_name_or_path": str(teacher), "num_generations": 2}
        trainer = make_trainer(GRPOTrainer, tmp_path, reward=(), **(named | options))
        chances = enumeration.outcomes(trainer.model, ["ab"], 2)
        samples = [(chance, gradient_of(trainer, says)) for says, chance in chances]
        mean = sum(chance * g for chance, g in samples)
        spread = sum(chance * (g - mean).square().sum() for chance, g in samples)
        truth = expected_divergence(trainer, enumeration.model(seed=3), reverse) / MAX_LENGTH
        size = truth.norm()
        table[way] = [float((mean - truth).norm() / size), float(spread / size**2)]
    biases, variances = (
        dict(zip(table, column, strict=True)) for column in zip(*table.values(), strict=True)
    )
    exact = {way: bias < 1e-8 for way, bias in biases.items()}
    assert [way for way in WAYS if not exact[way]] == ["`teacher_top_k: 1`"]
    assert variances["`sampled`"] > 2 * variances["all tokens"]
    if "TEACHER" in os.environ:
        Path(os.environ["TEACHER"]).write_text(json.dumps(table, indent=1) + "\n")


def test_privileged_prompt_of_trees_raises(tmp_path: Path) -> None:
    trainer = make_trainer(
        *(GRPOTrainer, tmp_path),
        inputs={"privileged_prompt": lambda completions, **_: ["bba"] * len(completions)},
        num_generations=2,
        teacher_model_name_or_path="policy",
    )
    gradient_of(trainer, [COMPLETIONS[1], COMPLETIONS[5]])
    batch = trainer.sampler.next_batch(trainer.state.prompt_index, Meter())
    with pytest.raises(ValueError, match="privileged_prompt"):
        trainer.infer(batch.with_columns(parent_offsets=2 * torch.ones_like(batch.completion_ids)))


def test_adapter_of_the_same_model_shares_its_weights(
    make: Any, model_path: str, tmp_path: Path
) -> None:
    options = {"use_peft": True, "teacher_coef": 0.5}
    make(GRPOTrainer, output_dir=str(tmp_path / "first"), use_peft=True, max_steps=1).train()
    path = str(tmp_path / "first/final")
    trainer = make(GRPOTrainer, model=model_path, teacher_model_name_or_path=path, **options)
    own, theirs = trainer.model, trainer.learner.teacher.policy.model
    shared = {p.data_ptr() for p in own.parameters()} & {p.data_ptr() for p in theirs.parameters()}
    assert len(shared) == len([p for p in own.parameters() if not p.requires_grad])
    (lora,) = {
        float(p.abs().sum())
        for n, p in theirs.named_parameters()
        if "lora_B" in n and "0.self_attn.q" in n
    }
    assert lora > 0
    assert not any(p.requires_grad for p in theirs.parameters())


def test_error_of_a_function_names_the_key(tmp_path: Path) -> None:
    def hint(completions, **_: Any) -> list[str]:
        raise KeyError("nothing")

    trainer = make_trainer(
        *(GRPOTrainer, tmp_path),
        inputs={"privileged_prompt": hint},
        num_generations=2,
        teacher_model_name_or_path="policy",
    )
    with pytest.raises(ValueError, match="privileged_prompt"):
        gradient_of(trainer, [COMPLETIONS[1], COMPLETIONS[5]])
