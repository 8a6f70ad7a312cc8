"""What top-k, top-p, min-p and stop strings change: samples, and never silently a gradient."""

from rlhf_pg.report.run_files import read
from rlhf_pg.tasks import arithmetic

IGNORED = {"truncated_sampling": "ignore"}
HELD_OUT = arithmetic().eval_dataset.select(range(9))


def test_ignored_truncation_trains_and_says_how_far_apart(make, tmp_path) -> None:
    make(top_k=4, **IGNORED, max_steps=2).train()
    lines = list(read(tmp_path / "run" / "metrics.jsonl"))
    assert all(line["agreement/kl"] > 0.1 for line in lines)


def test_top_k_applies_to_sampled_but_not_greedy_evaluation(make) -> None:
    plain = make(eval_dataset=HELD_OUT).evaluate()
    best = make(eval_dataset=HELD_OUT, top_k=1, **IGNORED).evaluate()
    assert plain["eval_reward"] != plain["eval_greedy_reward"]
    assert best["eval_greedy_reward"] == plain["eval_greedy_reward"]
    assert best["eval_reward"] == plain["eval_greedy_reward"]


def test_stop_string_ends_completion_and_is_kept(make) -> None:
    trainer = make(stop="1", max_completion_length=12)
    rollout = trainer.sampler.sample(trainer.train_prompts, [0, 1, 2], [0, 1, 2], 8, 1.0)
    texts = rollout.completions
    stopped = [text for text in texts if "1" in text]
    assert len(stopped) > 4
    assert all(text.index("1") == len(text) - 1 for text in stopped)
    ended = [not cut for cut in rollout.truncated.tolist()]
    assert all(end for end, text in zip(ended, texts, strict=True) if "1" in text)
