"""Tasks of reasoning-gym, by its own generators and verifiers."""

import pickle

import pytest

from rlhf_pg.tasks import load_task
from rlhf_pg.tasks.reasoning_gym import scorer

SMALL = {"size": 20, "eval_size": 10, "min_terms": 2, "max_terms": 2}


def test_problems_are_of_the_seed_and_held_out_ones_are_others():
    tasks = [load_task("reasoning_gym:chain_sum", SMALL, seed) for seed in (1, 1, 2)]
    prompts = [task.train_dataset["prompt"] for task in tasks]
    assert prompts[0] == prompts[1] != prompts[2]
    assert len(prompts[0]) == 20
    assert not set(tasks[0].eval_dataset["prompt"]) & set(prompts[0])


@pytest.mark.parametrize("name", ["chain_sum", "spell_backward"])
def test_own_verifier_scores_the_answers(name):
    """After the way to another process, too."""
    task = load_task(f"reasoning_gym:{name}", {"size": 5}, 0)
    score = pickle.loads(pickle.dumps(task.reward))
    assert score.__name__ == name
    columns = task.train_dataset.to_dict()
    right = [f"<answer>{answer}</answer>" for answer in columns["answer"]]
    assert score(completions=right, entry=columns["entry"]) == [1.0] * 5
    plain = [[{"role": "assistant", "content": f" {answer}\n"}] for answer in columns["answer"]]
    assert score(completions=plain, entry=columns["entry"]) == [1.0] * 5
    wrong = score(completions=["?"] * 5, entry=columns["entry"])
    assert max(wrong) < 0.5


def test_answer_that_the_verifier_cannot_read_is_wrong():
    [row] = load_task("reasoning_gym:prime_factorization", {"size": 1}, 0).train_dataset.to_list()
    score = scorer("prime_factorization")
    assert score(["hello world"], entry=[row["entry"]]) == [0.0]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("chain_sun", {}, "no generator 'chain_sun'; did you mean 'chain_sum'"),
        ("chain_sum", {"seed": 5}, "set the key seed instead"),
        ("countdown", {}, "reasoning_gym:countdown runs answers as code"),
        ("chain_sum", {"min_terms": 0}, "task_options of reasoning_gym:chain_sum are refused"),
    ],
)
def test_wrong_name_or_option_raises(name, options, message):
    with pytest.raises(ValueError, match=message):
        load_task(f"reasoning_gym:{name}", options, 0)
