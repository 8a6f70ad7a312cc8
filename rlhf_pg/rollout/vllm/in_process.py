"""The engine that samples with vLLM in this process, on a copy of the policy's weights."""

import copy
import gc
import itertools
import logging
import os
import weakref
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_pg.config.method import AWAKE
from rlhf_pg.models.adapters import MOST_LOST, Gather, merge_loss
from rlhf_pg.models.lm_head import bare
from rlhf_pg.models.policy import has_experts
from rlhf_pg.rollout.engine import (
    Completion,
    Finished,
    Request,
    RolloutEngine,
    RolloutError,
    SamplingParams,
)
from rlhf_pg.rollout.token_sampling import request_seed
from rlhf_pg.rollout.vllm import checksums
from rlhf_pg.rollout.vllm.handover import parts_tied_weights, published_weights
from rlhf_pg.rollout.vllm.requests import LONGEST, check_version, options

logger = logging.getLogger(__name__)

NEEDED = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}  # weights are handed over in this process
DEFAULTS = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; vLLM's default is a share of all memory
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # training uses these threads too
}
TIMES_CHECKED = 10  # hand-overs at which an adapter's loss by rounding is measured


class VllmEngine(RolloutEngine):
    """Samples with vLLM, which gets the merged weights at each `weights_synced`.

    With several processes, each has its own engine.

    Args:
        model: only its config is read here.
        eos_token_ids: each ends a completion.
        tokenizer: the model's, for stop strings.
        max_model_length: the most tokens of a prompt with its completion; None: as many as the
            model's positions and the memory allow.
        memory: share of the GPU's memory that vLLM takes, weights included.
        sleeps: give that memory back between two `weights_synced`.
        seed: the seed of the process, which vLLM resets.
        longest: tokens of the run's longest prompt with its completion.
        gathered: fills in a few of the weights inside a block, if they are sharded; by default
            they are whole.
        quantization: fp8, or None for vLLM to compute in the model's dtype.

    Raises:
        ValueError: vLLM is not installed, has an unsupported version, cannot take the weights, or
            has too little room.
    """

    gathered: Gather = nullcontext
    _handed_over = 0  # how often the weights were

    def __init__(
        self,
        model: PreTrainedModel,
        eos_token_ids: Sequence[int],
        tokenizer: PreTrainedTokenizerBase,
        max_model_length: int | None = None,
        memory: float = AWAKE,
        sleeps: bool = False,
        seed: int = 0,
        longest: int = 1,
        gathered: Gather | None = None,
        quantization: str | None = None,
    ) -> None:
        _prepare_environment()
        try:
            import vllm
        except ImportError as error:
            raise ValueError(
                f"rollout_engine vllm needs vLLM, which cannot be imported ({error}): pip install "
                '"rlhf-pg[vllm]"'
            ) from error
        check_version(vllm.__version__, "the installed vLLM")
        if (reason := unfit(model)) is not None:
            raise ValueError(f"rollout_engine vllm: {reason}; set rollout_engine to native")
        self.model = model
        self.eos_token_ids = list(eos_token_ids)
        self.sleeps = sleeps
        if gathered is not None:
            self.gathered = gathered
            self.gathers = "none"
        self.numbers = itertools.count()  # ids of vLLM's requests
        self._has_warned = False
        with TemporaryDirectory() as directory:
            base = bare(model)
            config = copy.deepcopy(base.config)
            config.architectures = [type(base).__name__]  # vLLM's class has this name
            config.save_pretrained(directory)
            tokenizer.save_pretrained(directory)
            several = torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1
            self.llm: Any = vllm.LLM(
                model=directory,
                # vLLM has no float64.
                dtype=str(model.dtype).removeprefix("torch.").replace("float64", "float32"),
                quantization=quantization,
                max_model_len=max_model_length or -1,  # -1: as long as memory allows
                gpu_memory_utilization=memory,
                enable_sleep_mode=sleeps,
                enforce_eager=not torch.cuda.is_available(),
                seed=seed % 2**32,
                model_impl="vllm",  # vLLM's transformers backend would patch the trained class
                load_format="dummy",
                logprobs_mode="processed_logprobs",
                generation_config="vllm",
                disable_log_stats=True,
                distributed_executor_backend=_executor() if several else None,
            )
        if not getattr(self.llm.llm_engine.vllm_config, "use_v2_model_runner", True):
            logger.warning(
                "vLLM samples with its V1 model runner, which draws the noise of one request after "
                "the other, since each has a seed: VLLM_USE_V2_MODEL_RUNNER=1 draws it for all at "
                "once, where vLLM supports that"
            )
        core = self.llm.llm_engine.engine_core
        # The finalizer would destroy the process groups, which training and other engines use.
        if hasattr(core, "_finalizer"):  # from 0.31 on
            core._finalizer.detach()
        weakref.finalize(self, _free, core.engine_core)
        self.max_model_length: int = self.llm.llm_engine.model_config.max_model_len
        if longest > self.max_model_length:
            raise ValueError(
                f"vLLM has room for {self.max_model_length} tokens, but the longest prompt and "
                f"completion may have {longest}: raise vllm_gpu_memory_utilization or "
                "vllm_max_model_length, or set rollout_engine to native"
            )
        self._sleep()

    def session(self, params: SamplingParams, seed: int) -> closing["_InProcessSession"]:
        """Open a session on vLLM, which raises RolloutError if vLLM aborts a request."""
        self.check_synced()
        return closing(_InProcessSession(self, params, seed))

    @contextmanager
    def _load_weights(self) -> Iterator[None]:
        try:
            if self.sleeps:
                torch.cuda.empty_cache()
                self.llm.wake_up(["weights"])
            self._load(self.model)
            if self.sleeps:
                torch.cuda.empty_cache()  # of gathered and merged weights
                self.llm.wake_up(["kv_cache"])
            yield
        finally:
            self._sleep()

    def _load(self, policy: PreTrainedModel) -> None:
        """Copy the weights into place; vLLM casts and fuses them layer by layer."""
        self._handed_over += 1
        # An adapter loses most early in training. All processes gather the same number of times.
        lost = merge_loss(policy, self.gathered) if self._handed_over <= TIMES_CHECKED else 0.0
        if lost > MOST_LOST and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "rollout_engine vllm merges the adapter, and rounding to %s loses %.0f %% of it: "
                "native and vllm_server sample with it unmerged",
                policy.dtype,
                100 * lost,
            )
        weights = {"weights_iterator": published_weights(policy, self.gathered)}
        self.llm.collective_rpc("reload_weights", kwargs=weights)
        self.llm.apply_model(_repack_head)
        if checksums.is_due(self._handed_over):
            self._check(policy)
        if not self.llm.reset_prefix_cache():  # keys and values of the old weights
            raise RuntimeError("vLLM keeps old keys and values: an earlier session has not ended")

    def _check(self, policy: PreTrainedModel) -> None:
        """Compare vLLM's weights with the policy's, a layer at a time."""
        held: list[dict[str, str]] = []
        with suppress(AttributeError, NotImplementedError):  # before vLLM 0.32
            held += self.llm.collective_rpc("compute_weight_checksums")
        checksums.check("vLLM", dict(*held), published_weights(policy, self.gathered))

    def _sleep(self) -> None:
        if self.sleeps:
            self.llm.sleep(level=2)  # drops the weights: the next ones come from the policy


class _InProcessSession:
    """A session in which every sample is a separate vLLM request with its own seed."""

    def __init__(self, engine: VllmEngine, params: SamplingParams, seed: int) -> None:
        self._engine = engine
        self._params = params
        self._seed = seed
        self._options = options(params, engine.eos_token_ids)
        self._asked: dict[str, tuple[Request, int]] = {}

    def add(self, request: Request) -> None:
        from vllm import SamplingParams as VllmSamplingParams
        from vllm.sampling_params import RequestOutputKind

        max_tokens = request.limit(self._params, self._engine.max_model_length, LONGEST)
        stop = [*self._options["stop"], *request.stop]
        for sample in request.samples:
            name = str(next(self._engine.numbers))
            wanted = VllmSamplingParams(
                **self._options | {"stop": stop},
                max_tokens=max_tokens,
                seed=request_seed(self._seed, request.prompt_index, sample, request.position),
                detokenize=bool(stop),
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            prompt = {"prompt_token_ids": list(request.tokens)}
            self._engine.llm.llm_engine.add_request(name, prompt, wanted)
            self._asked[name] = request, sample

    def step(self) -> list[Finished]:
        finished = []
        for output in self._engine.llm.llm_engine.step():
            if not output.finished:
                continue
            [row] = output.outputs
            if row.finish_reason not in ("stop", "length"):
                raise RolloutError(f"vLLM aborted a request ({row.finish_reason}): see its log")
            tokens = list(row.token_ids)
            logprobs = [at[token].logprob for token, at in zip(tokens, row.logprobs, strict=True)]
            completion = Completion(tokens, logprobs, row.finish_reason)
            finished.append(Finished(*self._asked.pop(output.request_id), completion))
        return finished

    @property
    def idle(self) -> bool:
        return not self._asked

    def close(self) -> None:
        """Abort the requests that have not finished."""
        self._engine.llm.llm_engine.abort_request(list(self._asked))
        self._asked.clear()


def unfit(model: PreTrainedModel) -> str | None:
    """Return why vLLM in this process cannot sample from the model, or None."""
    reasons = {
        "the weights are quantized (load_in_4bit)": getattr(model, "is_quantized", False),
        "the adapter changes one end of tied weights (lora_target_modules, modules_to_save)": (
            parts_tied_weights(model)
        ),
        "it cannot replace the weights of experts on a CPU": (
            not torch.cuda.is_available() and has_experts(model)
        ),
    }
    return next((reason for reason, holds in reasons.items() if holds), None) or lacking(model)


def lacking(model: PreTrainedModel) -> str | None:
    """Return why the installed vLLM cannot run the model, by its list of classes; else None."""
    _prepare_environment()
    try:
        from vllm import ModelRegistry
    except Exception as error:  # for example a missing compiled library
        return f"vLLM cannot be imported ({error})"
    name = type(bare(model)).__name__
    known = ModelRegistry.models.get(name)
    if known is None or getattr(known, "class_name", name).startswith("Transformers"):
        return f"vLLM has no {name} of its own"
    return None


def _prepare_environment() -> None:
    """Set the environment variables that vLLM reads on import and when an engine is made."""
    os.environ.update(NEEDED)
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)


def _executor() -> type:
    """Return vLLM's executor for one of several processes, without a collective after its groups
    are made: if vLLM then fails on one process, it still starts on the others.
    """
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher, UniProcExecutor

    class IndependentExecutor(ExecutorWithExternalLauncher):  # type: ignore[misc]
        determine_available_memory = UniProcExecutor.determine_available_memory

    return IndependentExecutor


def _free(core: Any) -> None:
    """Free the memory, in place of the detached finalizer."""
    core.model_executor.shutdown()
    core.scheduler.shutdown()
    gc.unfreeze()
    gc.collect()


def _repack_head(model: nn.Module) -> None:
    """Repack a tied head: on a CPU vLLM packs a copy of each matrix, and does not update it."""
    head: Any = getattr(model, "lm_head", None)
    if hasattr(head, "cpu_linear"):
        head.quant_method.process_weights_after_loading(head)
