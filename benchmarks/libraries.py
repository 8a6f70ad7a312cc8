"""One update of other RL libraries: rows in, gradients out. See `benchmarks.referee`."""

import functools
import tempfile
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

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
    scales = [0.2]
    if seed == BEFORE:
        seed = POLICY
        scales.append(0.05)
    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "vocab_size": 3}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    special = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), EOS)
    model = Qwen2ForCausalLM(Qwen2Config(**sizes, **heads, **special)).eval()
    for scale in scales:
        for parameter in model.parameters():
            parameter.data += scale * torch.randn_like(parameter)
    return model


def log_probs(model: PreTrainedModel, prompt: tuple[int, ...], completion: Any) -> Tensor:
    """Of a completion's tokens, without padding: (T,)."""
    logits = model(torch.tensor([[*prompt, *completion]])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(-1, torch.tensor(completion)[:, None])[:, 0]


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

    @torch.no_grad()
    def columns(self) -> dict[str, list[Tensor]]:
        """What the libraries without a hook for completions are given, row by row."""
        sampler = make_model(self.sampler)
        reference = make_model(REFERENCE)
        columns: dict[str, list[Tensor]] = {}
        for prompt, completion, score in self.rows:
            is_trained = completion[-1] == EOS or not self.mask_truncated
            of_row = {
                "prompts": torch.tensor(prompt),
                "responses": torch.tensor(completion),
                "input_ids": torch.tensor(prompt + completion),
                "position_ids": torch.arange(len(prompt + completion)),
                "response_mask": torch.full((len(completion),), int(is_trained)),
                "old_log_probs": log_probs(sampler, prompt, completion),
                "ref_log_prob": log_probs(reference, prompt, completion),
                "advantages": torch.full((len(completion),), score),
            }
            for name, value in of_row.items():
                columns.setdefault(name, []).append(value)
        return columns


def update_of_trl(update: Update) -> PreTrainedModel:
    """`GRPOTrainer.training_step`, with a `rollout_func` that knows the completions."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    def roll_out(prompts: Any, trainer: Any) -> dict[str, Any]:
        prompt_ids, completion_ids, _ = zip(*update.rows, strict=True)
        logprobs = [[0.0] * len(ids) for ids in completion_ids]
        return {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "logprobs": logprobs}

    with tempfile.TemporaryDirectory() as folder:
        make_model(REFERENCE).save_pretrained(folder)
        model = make_model(update.sampler)
        model.config.name_or_path = folder  # from where TRL loads the reference
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=lambda **_: [score for _, _, score in update.rows],
            processing_class=tokenizer(),
            train_dataset=Dataset.from_dict({"prompt": ["a"]}),
            rollout_func=roll_out,
            args=GRPOConfig(
                output_dir=folder,
                use_cpu=True,
                bf16=False,
                report_to="none",
                gradient_checkpointing=False,
                per_device_train_batch_size=update.micro_batch,
                gradient_accumulation_steps=update.micro_batches,
                num_generations=2,
                num_iterations=1 if update.sampler == POLICY else 2,
                max_completion_length=LONGEST,
                pad_to_multiple_of=LONGEST + update.padding,
                scale_rewards="none",
                mask_truncated_completions=update.mask_truncated,
                beta=update.kl_coef,
                **update.options,
            ),
        )
    trainer.current_gradient_accumulation_steps = update.micro_batches
    trainer.model.train()
    for _ in range(trainer.num_iterations):
        trainer.model.zero_grad()
        for _ in range(update.micro_batches):
            trainer.training_step(trainer.model, [{"prompt": "a"}] * len(update.rows), None)
        trainer.model.load_state_dict(make_model(POLICY).state_dict())
    return trainer.model


def update_of_verl(update: Update) -> PreTrainedModel:
    """`FSDPEngineWithLMHead.forward_backward_batch` and `ppo_loss`, on a model without FSDP, of
    rows without padding, as its trainer v1 has them.
    """
    from tensordict import TensorDict
    from verl.utils import tensordict_utils
    from verl.workers.config import FSDPActorConfig
    from verl.workers.engine.fsdp import transformer_impl
    from verl.workers.utils.losses import ppo_loss

    transformer_impl.get_device_id = lambda: "cpu"
    transformer_impl.get_device_name = lambda: "cpu"
    engine = object.__new__(transformer_impl.FSDPEngineWithLMHead)
    engine.module = make_model(POLICY)
    engine.ulysses_sequence_parallel_size = 1
    engine.ulysses_device_mesh = None
    engine.pad_to_length = None
    engine._autocast_dtype = torch.float32
    engine._gradient_sync_context = lambda **_: nullcontext()
    columns = {
        name: torch.nested.as_nested_tensor(rows, layout=torch.jagged)
        for name, rows in update.columns().items()
    }
    columns["loss_mask"] = columns["response_mask"]
    data = TensorDict(columns, batch_size=len(update.rows))
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

    ring_attn_group = None
    ds_device_mesh = None

    def __init__(self, args: Any, micro_batches: int) -> None:
        self.args = args
        self.accumulated_gradient = micro_batches

    def backward(self, loss: Tensor, *_: Any) -> None:
        (loss / self.accumulated_gradient).backward()

    def all_reduce(self, numbers: dict[str, float]) -> dict[str, float]:
        return numbers

    def optimizer_step(self, *_: Any, **options: Any) -> None: ...

    def get_grad_norm(self, *_: Any) -> float:
        return 0.0

    def is_rank_0(self) -> bool:
        return False


def update_of_openrlhf(update: Update) -> PreTrainedModel:
    """`ActorPPOTrainer.ppo_train`, with a stand-in for DeepSpeed."""
    from openrlhf.models import Actor
    from openrlhf.trainer.ppo_utils.experience import Experience
    from openrlhf.trainer.ray import ppo_actor
    from openrlhf.utils.config import hierarchize

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
        "algo.advantage.is_correction_threshold": (0.5, 5.0),
        "algo.kl.use_loss": update.kl_coef > 0,
        "algo.kl.init_coef": update.kl_coef,
        "algo.kl.estimator": "k1",
        "algo.kl.unbiased_gradient": False,
        "train.dynamic_batch_enable": False,
        "train.colocate_all": False,
        "train.async_enable": False,
        "train.max_epochs": 1,
        "ds.packing_samples": False,
        "ds.tensor_parallel_size": 1,
        "vllm.sync_backend": "gloo",
    }
    assert update.options.keys() <= keys.keys()
    args = hierarchize(SimpleNamespace(**keys | update.options))
    policy = Actor(make_model(POLICY))
    policy.packing_samples = False
    ppo_actor.torch_dist_barrier_and_cuda_sync = lambda: None
    torch.cuda.current_device = lambda: 0
    trainer = ppo_actor.ActorPPOTrainer(
        DeepSpeed(args, update.micro_batches),
        policy,
        ema_model=None,
        actor_optim=None,
        actor_scheduler=SimpleNamespace(get_last_lr=lambda: [0.0]),
        micro_train_batch_size=update.micro_batch,
        dataloader_pin_memory=False,
    )
    columns = update.columns()
    shifts = [len(prompt) - 1 for prompt in columns["prompts"]]  # its columns begin with token 2

    def shifted(name: str) -> Tensor:
        rows = [pad(row, (shift, 0)) for row, shift in zip(columns[name], shifts, strict=True)]
        return pad(pad_sequence(rows, batch_first=True), (0, update.padding))

    ids = pad_sequence(columns["input_ids"], batch_first=True, padding_value=EOS)
    lengths = torch.tensor([len(row) for row in columns["input_ids"]])
    trainer.replay_buffer.append(
        Experience(
            sequences=pad(ids, (0, update.padding), value=EOS),
            attention_mask=(torch.arange(ids.shape[1] + update.padding) < lengths[:, None]).long(),
            action_mask=shifted("response_mask"),
            action_log_probs=shifted("old_log_probs"),
            base_action_log_probs=shifted("ref_log_prob"),
            advantages=shifted("advantages"),
            total_length=lengths,
        )
    )
    torch.cuda.current_device = lambda: "cpu"
    trainer.ppo_train(update.kl_coef)
    return policy.model
