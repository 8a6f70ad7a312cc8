"""One update of other RL libraries: rows in, gradients out. See `benchmarks.referee`."""

import functools
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any
from unittest.mock import MagicMock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from rlhf_pg.audit.world import tokenizer

EOS = 0
LONGEST = 5  # tokens of a completion
POLICY, REFERENCE, BEFORE = 0, 1, 2  # seeds of models; BEFORE is the policy before an update


def make_model(seed: int) -> PreTrainedModel:
    """Make a model with noise on its weights, so that logits spread; BEFORE is close to POLICY."""
    torch.manual_seed(POLICY if seed == BEFORE else seed)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "vocab_size": 3}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    special = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), EOS)
    model = Qwen2ForCausalLM(Qwen2Config(**sizes, **heads, **special)).eval()
    for scale in (0.2, 0.05) if seed == BEFORE else (0.2,):
        for parameter in model.parameters():
            parameter.data += scale * torch.randn_like(parameter)
    return model


def padded(rows: Sequence[Sequence[int]]) -> Tensor:
    return pad_sequence([torch.tensor(row) for row in rows], True, EOS, "left")


@dataclass(frozen=True, kw_only=True)
class Update:
    """What a library is to compute the gradient of."""

    options: dict[str, Any]  # the library's own keys
    rows: list[Any]
    micro_batch: int
    padding: int = 0  # columns beyond the longest possible completion
    mask_truncated: bool = False
    kl_coef: float = 0.0
    sampler: int = POLICY

    @property
    def micro_batches(self) -> int:
        return len(self.rows) // self.micro_batch

    def columns(self) -> dict[str, Tensor]:
        """Rows padded as most libraries do: prompts on the left, completions on the right."""
        prompts, completions, scores = zip(*self.rows, strict=True)
        width = LONGEST + self.padding
        responses = padded([[*ids, *[EOS] * (width - len(ids))] for ids in completions])
        mask = padded([[1] * len(ids) + [0] * (width - len(ids)) for ids in completions])
        kept = [[int(ids[-1] == EOS or not self.mask_truncated)] for ids in completions]
        prompt_mask = padded([[1] * len(prompt) for prompt in prompts])
        attention_mask = torch.cat([prompt_mask, mask], 1)
        columns = {
            "input_ids": torch.cat([padded(prompts), responses], 1),
            "attention_mask": attention_mask,
            "position_ids": (attention_mask.cumsum(1) - 1).clamp(min=0),
        }
        logprobs = {}
        for name, seed in {"old_log_probs": self.sampler, "ref_log_prob": REFERENCE}.items():
            logits = make_model(seed)(**columns).logits.detach()[:, -1 - width : -1]
            logprobs[name] = logits.log_softmax(-1).gather(-1, responses[:, :, None])[:, :, 0]
        columns |= logprobs | {"prompts": padded(prompts), "responses": responses}
        columns["response_mask"] = mask * torch.tensor(kept)
        columns["advantages"] = torch.tensor(scores)[:, None].repeat(1, width)
        return columns


def trl(update: Update) -> PreTrainedModel:
    """`GRPOTrainer.training_step`, with a `rollout_func` that knows the completions."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    def roll_out(prompts: Any, trainer: Any) -> dict[str, Any]:
        prompt_ids, completion_ids, _ = zip(*update.rows, strict=True)
        logprobs = [[0.0] * len(ids) for ids in completion_ids]
        return {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "logprobs": logprobs}

    folder = tempfile.mkdtemp()
    make_model(REFERENCE).save_pretrained(folder)
    model = make_model(update.sampler)
    model.config.name_or_path = folder  # from where TRL loads the reference
    off = dict.fromkeys(("bf16", "gradient_checkpointing"), False)
    args = GRPOConfig(
        **off | update.options,
        output_dir=folder,
        use_cpu=True,
        report_to="none",
        per_device_train_batch_size=update.micro_batch,
        gradient_accumulation_steps=update.micro_batches,
        num_generations=2,
        num_iterations=1 if update.sampler == POLICY else 2,
        max_completion_length=LONGEST,
        pad_to_multiple_of=LONGEST + update.padding,
        scale_rewards="none",
        mask_truncated_completions=update.mask_truncated,
        beta=update.kl_coef,
    )
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=lambda **_: [score for _, _, score in update.rows],
        processing_class=tokenizer(),
        train_dataset=Dataset.from_dict({"prompt": ["a"]}),
        rollout_func=roll_out,
        args=args,
    )
    trainer.current_gradient_accumulation_steps = update.micro_batches
    trainer.model.train()
    for _ in range(trainer.num_iterations):
        trainer.model.zero_grad()
        for _ in range(update.micro_batches):
            trainer.training_step(trainer.model, [{"prompt": "a"}] * len(update.rows), None)
        trainer.model.load_state_dict(make_model(POLICY).state_dict())
    return trainer.model


def verl(update: Update) -> PreTrainedModel:
    """`FSDPEngineWithLMHead.forward_backward_batch` and `ppo_loss`, on a model without FSDP."""
    from tensordict import TensorDict
    from verl.utils import tensordict_utils
    from verl.workers.config import FSDPActorConfig
    from verl.workers.engine.fsdp import transformer_impl
    from verl.workers.utils.losses import ppo_loss
    from verl.workers.utils.padding import left_right_2_no_padding

    transformer_impl.get_device_id = transformer_impl.get_device_name = lambda: "cpu"
    engine = object.__new__(transformer_impl.FSDPEngineWithLMHead)
    engine.module = make_model(POLICY)
    engine.ulysses_sequence_parallel_size = 1
    engine.ulysses_device_mesh = engine.pad_to_length = None
    engine._autocast_dtype = torch.float32
    engine._gradient_sync_context = lambda **_: nullcontext()
    data = left_right_2_no_padding(TensorDict(update.columns(), batch_size=len(update.rows)))
    tensordict_utils.assign_non_tensor(
        data,
        use_dynamic_bsz=False,
        use_remove_padding=False,
        micro_batch_size_per_gpu=update.micro_batch,
        global_batch_size=len(update.rows) * dist.get_world_size(),
        temperature=1.0,
    )
    config = FSDPActorConfig(
        strategy="fsdp",
        rollout_n=2,
        ppo_micro_batch_size_per_gpu=update.micro_batch,
        use_kl_loss=update.kl_coef > 0,
        kl_loss_coef=update.kl_coef,
        **update.options,
    )
    engine.forward_backward_batch(data, functools.partial(ppo_loss, config))
    return engine.module


class DeepSpeed:
    """What OpenRLHF has DeepSpeed do with a loss: divide it by the micro-batches of an update."""

    ring_attn_group = ds_device_mesh = None
    optimizer_step = get_grad_norm = is_rank_0 = lambda *_, **options: 0.0

    def __init__(self, args: Any, micro_batches: int) -> None:
        self.args = args
        self.accumulated_gradient = micro_batches

    def backward(self, loss: Tensor, *_: Any) -> None:
        (loss / self.accumulated_gradient).backward()

    def all_reduce(self, numbers: dict[str, float]) -> dict[str, float]:
        return numbers


def openrlhf(update: Update) -> PreTrainedModel:
    """`ActorPPOTrainer.ppo_train`, with a stand-in for DeepSpeed."""
    from openrlhf.models import Actor
    from openrlhf.trainer.ppo_utils.experience import Experience
    from openrlhf.trainer.ray import ppo_actor

    keys = {
        "actor.eps_clip_low_high": (0.2, 0.2),
        "actor.policy_loss_type": "ppo",
        "actor.loss_agg_mode": "token-mean",
        "actor.aux_loss_coef": 0.0,
        "actor.dual_clip": None,
        "actor.entropy_coef": None,
        "algo.advantage.is_correction_level": "off",
        "algo.advantage.is_correction_mode": "mask",
        "algo.advantage.is_correction_gating": "ratio",
        "algo.kl.use_loss": update.kl_coef > 0,
        "algo.kl.init_coef": update.kl_coef,
        "algo.kl.estimator": "k1",
        "algo.kl.unbiased_gradient": False,
        "train.dynamic_batch_enable": False,
        "train.max_epochs": 1,
        "ds.packing_samples": False,
        "ds.tensor_parallel_size": 1,
    }
    policy = Actor(make_model(POLICY))
    policy.packing_samples = False
    ppo_actor.torch_dist_barrier_and_cuda_sync = lambda: None
    torch.cuda.current_device = lambda: 0
    trainer = ppo_actor.ActorPPOTrainer(
        DeepSpeed(MagicMock(**keys | update.options), update.micro_batches),
        policy,
        ema_model=None,
        actor_optim=None,
        actor_scheduler=MagicMock(),
        micro_train_batch_size=update.micro_batch,
        dataloader_pin_memory=False,
    )
    columns = update.columns()
    before = columns["prompts"].shape[1] - 1  # its columns begin with the second token
    names = {"action_mask": "response_mask", "action_log_probs": "old_log_probs"}
    names |= {"base_action_log_probs": "ref_log_prob", "advantages": "advantages"}
    experience = Experience(
        sequences=columns["input_ids"],
        attention_mask=columns["attention_mask"],
        total_length=columns["attention_mask"].sum(1),
        **{name: pad(columns[of], (before, 0)) for name, of in names.items()},
    )
    trainer.replay_buffer.append(experience)
    torch.cuda.current_device = lambda: "cpu"
    trainer.ppo_train(update.kl_coef)
    return policy.model
