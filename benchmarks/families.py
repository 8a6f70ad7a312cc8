"""How every family of causal language models in `transformers` is computed: docs/families.json.

    OMP_NUM_THREADS=1 python -m benchmarks.families [FAMILY ...]

Each family is built small, with random weights, one layer of each kind, and a window shorter than
the rows if it has windows, in a process of its own. Nine completions of three prompts are scored as
in training, packed if the family allows it, and every row alone by the model itself; the largest
difference of a log-probability and the relative difference of the gradient are kept, in float32 and
in float64. As many are sampled and compared with the row alone too. A family whose numbers change
by more than `MOST` is refused in the first step of a run. "cu_seqlens" says what the model itself
does with two rows in one sequence, told where each begins, without kernels that are not installed:
it keeps them apart, refuses, or one row leaks into the other.

Without FAMILY all are measured, and docs/families.json is written.
"""

import json
import logging
import os
import resource
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from rlhf_pg.models.policy import Policy
from rlhf_pg.rollout import NativeEngine, SamplingParams
from tests.models.architectures import build
from tests.models.test_packing import COMPLETIONS, batch_of

MOST = 1e-3
MEMORY = 3 * 2**30  # of one process
LARGEST = 3_000_000  # parameters
WINDOW = 6
PROMPTS = [[5, 9, 2, 31, 8, 3, 30, 12, 25], [17, 4], [8, 3, 30, 12, 25, 6, 39]]
FILE = Path(__file__).resolve().parents[1] / "docs" / "families.json"


def measure(name: str) -> dict[str, Any]:
    """All that is known of one family."""
    try:
        model = small(name)
    except Exception as error:
        return {"not_built": str(error).strip().splitlines()[-1][:100]}
    if sum(parameter.numel() for parameter in model.parameters()) > LARGEST:
        return {"not_built": "it cannot be made small"}
    found: dict[str, Any] = {"layers": kinds(model)}
    try:
        policy = Policy(model)
        found["rows"] = "packed" if policy.window > 30 else "padded"
        found["float32"] = differences(policy)
        engine = NativeEngine(model, [2], 0)
        reason = engine.unsupported_reason(30)
        found["sampling"] = "generate" if reason else "fast"
        found["sampled"] = sampled_difference(model, engine)
    except Exception as error:
        return found | {"fails": str(error).strip().splitlines()[0][:100]}
    try:
        found["float64"] = differences(Policy(small(name).double()))
    except Exception:
        found["float64"] = None  # it computes in float32 somewhere
    try:
        found["cu_seqlens"] = "leaks" if leak(model) > MOST else "apart"
    except Exception:
        found["cu_seqlens"] = "refused"
    return found


def small(name: str) -> PreTrainedModel:
    """The family with windows shorter than the rows, if it has any."""
    model = build(name)
    if getattr(model.config.get_text_config(), "sliding_window", None):
        model = build(name, sliding_window=WINDOW)
    return model


def kinds(model: PreTrainedModel) -> list[str]:
    """What kinds of layers the model has."""
    config = model.config.get_text_config()
    types = list(dict.fromkeys(getattr(config, "layer_types", None) or ["full_attention"]))
    if any(name.endswith("sinks") for name, _ in model.named_parameters()):
        types.append("sinks")
    return types


def alone(model: nn.Module, prompt: list[int], completion: list[int]) -> Tensor:
    """The log-probabilities of one row in a pass of its own."""
    ids = torch.tensor([prompt + completion])
    logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
    wide = torch.promote_types(logits.dtype, torch.float32)
    logprobs = logits[0, len(prompt) - 1 : -1].to(wide).log_softmax(-1)
    return logprobs.gather(1, ids[0, len(prompt) :, None]).squeeze(1)


def differences(policy: Policy) -> list[float]:
    """The largest difference of a log-probability, and that of the gradient over its norm."""
    rows = batch_of(PROMPTS, COMPLETIONS)
    parameters = [p for p in policy.model.parameters() if p.requires_grad]
    pairs = [(PROMPTS[i], c) for i, group in enumerate(COMPLETIONS) for c in group]
    expected = torch.cat([alone(policy.model, *pair) for pair in pairs])
    found = policy(rows).logprobs[rows.action_mask]
    weights = torch.arange(1.0, len(found) + 1)

    def gradient(logprobs: Tensor) -> Tensor:
        grads = torch.autograd.grad(
            (logprobs * weights).sum(), parameters, allow_unused=True, materialize_grads=True
        )
        return torch.cat([grad.flatten() for grad in grads])

    own, other = gradient(found), gradient(expected)
    return [
        float((found - expected).abs().max()),
        float((own - other).norm() / other.norm().clamp(min=1e-30)),
    ]


def sampled_difference(model: PreTrainedModel, engine: NativeEngine) -> float:
    """The largest difference between what the sampler and the model say of a sampled token."""
    completions = engine.generate(PROMPTS, 3, SamplingParams(max_tokens=12), seed=0)
    with torch.no_grad():
        return max(
            float((alone(model, PROMPTS[i // 3], c.tokens) - torch.tensor(c.logprobs)).abs().max())
            for i, c in enumerate(completions)
        )


@torch.no_grad()
def leak(model: PreTrainedModel) -> float:
    """The largest difference of a logit of the second of two rows in one sequence from it alone."""
    first, second = PROMPTS[0], PROMPTS[2]
    ids = torch.tensor([first + second])
    positions = torch.tensor([[*range(len(first)), *range(len(second))]])
    starts = torch.tensor([0, len(first), len(first) + len(second)], dtype=torch.int32)
    longest = max(len(first), len(second))
    told = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts}
    told |= {"max_length_q": longest, "max_length_k": longest}
    packed = model(input_ids=ids, position_ids=positions, use_cache=False, **told).logits[0]
    single = model(input_ids=torch.tensor([second]), use_cache=False).logits[0]
    return float((packed[len(first) :] - single).abs().max())


def main() -> None:
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    logging.disable(logging.ERROR)
    torch.set_num_threads(1)
    names = sys.argv[1:] or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    families: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as directory:
        for name in names:
            path = Path(directory) / "found.json"
            path.unlink(missing_ok=True)
            if not (child := os.fork()):
                resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
                path.write_text(json.dumps(measure(name)))
                os._exit(0)
            os.waitpid(child, 0)
            ended = path.exists()
            families[name] = json.loads(path.read_text()) if ended else {"not_built": "memory"}
            print(name, families[name], flush=True)
    if not sys.argv[1:]:
        table = {"transformers": transformers.__version__, "families": families}
        FILE.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
