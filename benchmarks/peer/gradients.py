"""The gradients of both sides on one identical batch."""

import math

import torch

from benchmarks.peer import ours, theirs
from benchmarks.peer.workload import MARKS, Job, device
from benchmarks.rollout import EOS
from rlhf_pg.data.batch import Batch
from tests.rows import batch_of


def new_batch(job: Job) -> Batch:
    """Random completions of the workload's lengths, advantages and reference."""
    workload, vocabulary = job.workload, job.vocabulary
    generator = torch.Generator().manual_seed(1)

    def words(count: int) -> list[int]:
        return torch.randint(MARKS, vocabulary, (count,), generator=generator).tolist()

    lengths = workload.lengths.flatten().tolist()
    prompts = [ids for ids in workload.prompt_ids(vocabulary) for _ in range(workload.n)]
    rollout = batch_of(
        prompts,
        [[*words(length - 1), EOS] for length in lengths],
        groups=[i // workload.n for i in range(workload.rows)],
        device=device(),
    )
    mask = rollout.action_mask
    advantages = torch.randn(workload.rows, 1, generator=generator).to(device())
    # About as likely as random weights make them, so that the KL has a gradient of its own.
    drift = torch.randn(mask.shape, generator=generator).to(device())
    ref_logprobs = torch.where(mask, drift - math.log(vocabulary), 0.0)
    return rollout.with_columns(
        advantages=torch.where(mask, advantages, 0.0),
        ref_logprobs=ref_logprobs if job.beta and job.algorithm == "grpo" else None,
    )


def difference(job: Job) -> float:
    """||ours - TRL's|| / ||TRL's||, over all weights."""
    batch = new_batch(job)
    own, other = (side.gradient(job, job.load(), batch) for side in (ours, theirs))
    assert own.keys() == other.keys()
    between = sum((own[name] - other[name]).double().square().sum() for name in own)
    norm = sum(gradient.double().square().sum() for gradient in other.values())
    return math.sqrt(between / norm)
