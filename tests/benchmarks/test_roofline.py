"""The operations that the roofline counts are those that torch sees."""

from pathlib import Path

import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.benchmarks.peer.roofline import needed
from tests.benchmarks.peer.workload import Job, Workload, save_model


def operations(model: PreTrainedModel, tokens: int, predicted: int) -> float:
    """Of one row; of the square that attention computes here, the half that is causal."""
    with FlopCounterMode(display=False) as counter:
        model(input_ids=torch.ones(1, tokens, dtype=torch.int64), logits_to_keep=predicted)
    attention = counter.get_flop_counts()["Global"][torch.ops.aten.bmm]
    causal = attention * (tokens + 1) / (2 * tokens)
    return counter.get_total_flops() - attention + causal


def test_group_prompt_work_is_counted_once(tmp_path: Path) -> None:
    workload = Workload(prompts=1, shortest=9, longest=9, n=3, new=8)
    path = save_model(tmp_path, vocabulary=64, width=128, layers=2)
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    lengths = workload.lengths.flatten().tolist()
    assert len(set(lengths)) > 1
    rows = sum(operations(model, 9 + length - 1, length) for length in lengths)
    prompt = operations(model, 9, 1)
    work = needed(Job(workload, "grpo_kl", path, 64, "float32", ""), model.config)
    assert work["rollout"].operations == work["score"].operations == rows - 2 * prompt
    assert work["update"].operations == 3 * (rows - 2 * prompt)
