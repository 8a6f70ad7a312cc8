"""Keys of the method: sampling, rewards, advantages, loss and KL."""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from rlhf_pg.config.fields import FunctionName, Names, Numbers, Text, config, option

AWAKE = 0.3  # share of the GPU for a vLLM that never sleeps, unless the config names one
Share = Annotated[float, Field(gt=0, le=1)] | Literal["auto"]
KLEstimator = Literal["k1", "k2", "k3", "k1_to_go", "k2_straight_through", "k3_ratio"]
Correction = Literal[
    "auto", "none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"
]


@dataclass(frozen=True)
class Traits:
    """Properties of an advantage estimator or a policy loss.

    Args:
        needs: "critic"; "greedy", a scored greedy completion of every prompt; "average", that of
            earlier scores; "one update" or "several updates" per step; "another term" of the loss.
        compares: completions of a "group" or of the "batch", of which there must be several.
        reads: "scores", one per completion; "sources", each on its own; scores of "steps"; or
            "rewards" per token.
    """

    needs: str = ""
    compares: str = ""
    reads: str = "scores"


# The functions of these names are in `rlhf_pg.advantages.ADVANTAGES`, which needs torch.
ESTIMATORS = {
    "gae": Traits(needs="critic", reads="rewards"),
    "group_normalized": Traits(compares="group"),
    "group_normalized_per_source": Traits(compares="group", reads="sources"),
    "leave_one_out": Traits(compares="group"),
    "n_step": Traits(needs="critic", reads="rewards"),
    "process_group_normalized": Traits(compares="group", reads="steps"),
    "returns": Traits(reads="rewards"),
    "returns_minus_greedy": Traits(needs="greedy", reads="rewards"),
    "returns_minus_mean": Traits(compares="batch", reads="rewards"),
    "returns_minus_moving_average": Traits(needs="average", reads="rewards"),
    "returns_minus_optimal": Traits(compares="batch", reads="rewards"),
    "returns_minus_others": Traits(compares="batch", reads="rewards"),
    "returns_minus_values": Traits(needs="critic", reads="rewards"),
    "total_returns": Traits(reads="rewards"),
}
# Those of these names are in `rlhf_pg.losses.POLICY_LOSSES`.
LOSSES = {
    "vanilla": Traits(needs="one update"),
    "surrogate": Traits(),
    "kl_penalty": Traits(needs="several updates"),
    "clipped_surrogate": Traits(),
    "cispo": Traits(),
    "sapo": Traits(),
    "dppo": Traits(),
    "none": Traits(needs="another term"),
}


# fmt: off
@config
class SamplingConfig:
    """Keys of sampling: the engine, the distribution and the length of completions."""

    rollout_engine: Literal["auto", "native", "vllm", "vllm_server"] = option("auto", "run",
        bias="samples from another distribution", help=
        "Rollout engine: the policy itself (native), vLLM in this process, or a `vllm serve`. "
        "auto uses vLLM on a GPU if it is installed and supports the run.")
    rollout_cache_tokens: int | None = option(None, "cost", ge=1,
        needs="rollout_engine auto or native", help=
        "Most tokens in the native KV cache. None: 0.8 of a GPU's free memory, 4 GiB on a CPU.")
    rollout_workers: int = option(0, "cost", ge=0, needs="rollout_engine auto or native", help=
        "Single-threaded processes, for each process of the trainer, in which the native engine "
        "samples; 0: in the trainer.")
    rollout_ahead: int = option(0, "run", ge=0,
        needs="rollout_workers or rollout_engine vllm_server", help=
        "Sample each batch with the weights of this many steps earlier, while those steps run.")
    vllm_gpu_memory_utilization: Share = option("auto", "cost",
        needs="rollout_engine auto or vllm", help=
        "Share of the GPU's memory for vLLM. auto: 0.3, or in sleep mode 0.9 of what training "
        "leaves free between its updates.")
    vllm_enable_sleep_mode: bool = option(False, "cost", needs="rollout_engine auto or vllm", help=
        "Free vLLM's memory between rollouts.")
    vllm_max_model_length: int | None = option(None, "cost", ge=1,
        needs="rollout_engine auto or vllm", help=
        "Most tokens of prompt and completion in vLLM. None: as many as model and memory allow.")
    vllm_quantization: Literal["fp8"] | None = option(None, "run",
        bias="samples from another distribution",
        needs="rollout_engine vllm or vllm_server", help=
        "Weights and activations of vLLM's linear layers in 8 bits; a server is started with "
        "--quantization fp8.")
    vllm_server_base_url: Names = option(("http://localhost:8000",), "output",
        needs="rollout_engine vllm_server", help=
        "Base URLs of vLLM servers, without user, password or query; each prompt goes to one.")
    vllm_server_timeout: float = option(300.0, "cost", gt=0, needs="rollout_engine vllm_server",
        help=
        "Seconds for an answer of the vLLM server; a request is tried three times.")
    vllm_sync_directory: Text | None = option(None, "output", needs="rollout_engine vllm_server",
        help=
        "Directory for new weights that the server sees too. None: sync/ in output_dir.")
    max_completion_length: int = option(512, "run", ge=1, help=
        "Most tokens per completion, EOS included.")
    max_turns: int | None = option(None, "run", ge=1,
        needs="tools or environment_factory or agent_program", help=
        "Most turns in an episode, or calls of agent_program. None: as many as "
        "max_completion_length allows.")
    tools: Names = option((), "run", help=
        "Functions that the policy may call: FILE.py:FUNCTION or package.module:FUNCTION.")
    environment_factory: Text | None = option(None, "run", help=
        "Class or function that makes an environment: FILE.py:NAME or package.module:NAME.")
    environment_timeout: float = option(60.0, "cost", gt=0,
        needs="tools or environment_factory", help=
        "Seconds for an answer of an environment.")
    agent_program: Text | None = option(None, "run", help=
        "Program of an agent, which asks the policy over HTTP: FILE.py:FUNCTION, or a command.")
    agent_timeout: float = option(600.0, "cost", gt=0, needs="agent_program", help=
        "Seconds for an episode of agent_program.")
    agent_call_timeout: float = option(300.0, "cost", gt=0, needs="agent_program", help=
        "Seconds for an answer to agent_program.")
    agent_host: Text = option("127.0.0.1", "output", needs="agent_program", help=
        "Address at which agent_program finds the policy; beyond loopback, it is open to others.")
    agent_credit: Literal["episode", "branch"] = option("episode", "update", needs="agent_program",
        help=
        "Credit a reward to all earlier turns, or to those of its own endpoint.fork() alone.")
    temperature: float = option(1.0, "run", gt=0, help=
        "Temperature of sampling, scoring and training.")
    top_k: int = option(0, "run", ge=0, bias="rollout_engine", help=
        "Sample from this many likeliest tokens; 0: all.")
    top_p: float = option(1.0, "run", gt=0, le=1, bias="rollout_engine", help=
        "Sample from the likeliest tokens whose probabilities reach this sum; 1: all.")
    min_p: float = option(0.0, "run", ge=0, le=1, bias="rollout_engine", help=
        "Sample from tokens with at least this share of the largest probability; 0: all.")
    truncated_sampling: Literal["refuse", "ignore"] = option("refuse", "run", help=
        "Refuse top_k, top_p and min_p in training, which they bias, or ignore the bias.")
    stop: Names | None = option(None, "run", help="Strings that end a completion; they stay in it.")
    skip_special_tokens: bool = option(True, "run", help=
        "Leave special tokens out of the text that rewards see; false for rewards that look for "
        "one, such as a special <think>. The token that ends a completion is left out anyway.")


@config
class MethodConfig:
    """Keys of the method; `rlhf_pg.config.rules` checks which keys go together."""

    dynamic_sampling_rounds: int = option(0, "run", ge=0, bias=None, help=
        "Most rounds in which new prompts replace groups with equal scores (DAPO); 0: none.")
    mask_truncated_completions: bool = option(False, "update",
        bias="truncated completions lose their scores", help=
        "Leave truncated completions out of the losses, but not out of baselines (DAPO).")

    reward_weights: Numbers | None = option(None, "update", replaced_by="reward_funcs", bias=None,
        help=
        "Weights of the reward functions. None: 1.")
    reward_workers: int = option(0, "cost", ge=0, bias=None, help=
        "Processes that run Python reward functions during sampling; 0: the trainer itself.")
    reward_timeout: float | None = option(None, "cost", gt=0, help=
        "Seconds for a reward call that is async or in reward_workers. None: no limit.")
    on_reward_error: Literal["error", "drop", "value"] = option("error", "cost", help=
        "If a reward function fails: end the run, treat it as not applicable (drop), or use "
        "reward_error_value. If every call fails, the run ends.")
    reward_error_value: float = option(0.0, "cost", needs="on_reward_error value", help=
        "Score if a reward function fails.")
    reward_model_sees_eos: bool = option(True, "run", help=
        "Score at an EOS after the text (Stiennon et al. 2020), or at its last token.")
    reward_clip_range: Numbers | None = option(None, "update", bias="maximises other scores", help=
        "Lowest and highest score, to which each reward function is clipped. None: no clipping.")
    reward_squash: Literal["none", "sigmoid", "min_max"] = option("none", "update",
        bias="reward_clip_range", help=
        "Map scores into [0, 1]: by 1 / (1 + exp(-score)), or by their range in the step.")
    normalize_rewards: bool = option(False, "update", bias=None, help=
        "Divide scores by a running standard deviation.")
    whiten_rewards: bool = option(False, "update", bias="reward_clip_range", help=
        "Scale the step's rewards per token, KL included, to variance 1; the mean is kept.")
    missing_eos_penalty: float | None = option(None, "update", ge=0,
        bias="long completions cost more than their scores say", help=
        "Penalty for truncated completions. None: no penalty.")
    missing_eos_mode: Literal["subtract", "replace"] = option("subtract", "update",
        needs="missing_eos_penalty", help=
        "Subtract missing_eos_penalty from the score, or replace the score by minus the penalty.")
    overlong_buffer: int | None = option(None, "update", ge=1, bias="missing_eos_penalty", help=
        "Tokens before the length limit over which overlong_penalty grows (DAPO). None: off.")
    overlong_penalty: float = option(1.0, "update", gt=0, needs="overlong_buffer", help=
        "Penalty at the end of overlong_buffer.")

    advantage_estimator: FunctionName = option("group_normalized", "update", names=ESTIMATORS,
        bias="own scores are in mean and std, or a critic's guesses in the returns", help=
        "Advantage estimator (docs/algorithms.md), or your own as FILE.py:FUNCTION.")
    normalize_advantages: bool = option(False, "update",
        bias="divides by a std of the same samples", help="Whiten advantages: mean 0, variance 1.")

    policy_loss: FunctionName = option("clipped_surrogate", "update", names=LOSSES,
        bias="leaves out ratios of updates after the first", help=
        "Policy loss (docs/algorithms.md), or your own as FILE.py:FUNCTION.")
    aggregation: Literal["token_mean", "sequence_mean", "constant"] = option("token_mean", "update",
        bias="weighs by the lengths that were drawn", help=
        "Weight of a token: 1 / all tokens, 1 / (rows * row's tokens), or 1 / (rows * longest).")
    epsilon: float = option(0.2, "update", gt=0, le=1, help=
        "Clip distance of the ratio below 1 (dppo: of the probability); see epsilon_high.")
    epsilon_high: float | None = option(None, "update", gt=0, help=
        "Clip distance above. None: epsilon.")
    delta: float | None = option(None, "update", gt=1, help=
        "Upper bound of the ratio for negative advantages (dual clip). None: no bound.")
    importance_sampling_level: Literal["token", "sequence"] = option("token", "update", help=
        "Ratio per token, or the geometric mean over a completion's tokens (GSPO).")
    sapo_temperature_pos: float = option(1.0, "update", gt=0, help=
        "SAPO's temperature for advantages > 0.")
    sapo_temperature_neg: float = option(1.05, "update", gt=0, help=
        "SAPO's temperature for advantages < 0.")
    old_kl_coef: float = option(1.0, "update", ge=0, help=
        "Coefficient of KL(policy before the step || policy now), in the loss kl_penalty.")
    old_kl_target: float | None = option(None, "update", gt=0, needs="old_kl_coef", help=
        "Target KL(old || new) per token, kept by halving or doubling old_kl_coef. None: fixed.")
    sampler_correction: Correction = option("auto", "update", bias="rollout_engine", help=
        "Weight the loss by policy / sampler; auto: token_truncate with vLLM or rollout_ahead, "
        "else none.")
    sampler_clip_max: float = option(3.0, "update", gt=0, needs="sampler_correction", help=
        "Largest weight of sampler_correction.")
    sampler_clip_min: float | None = option(None, "update", gt=0, needs="sampler_correction", help=
        "Smallest weight; None: 0.")
    entropy_coef: float = option(0.0, "update", ge=0, bias="maximises the entropy too", help=
        "Coefficient of the entropy bonus.")
    entropy_target: float | None = option(None, "update", gt=0, bias="entropy_coef", help=
        "Target entropy per token, in nats, for adapting entropy_coef. None: fixed.")
    entropy_coef_delta: float = option(0.005, "update", gt=0, needs="entropy_target", help=
        "Change per step, with entropy_target.")
    entropy_coef_min: float = option(0.0, "update", ge=0, needs="entropy_target", help=
        "Lowest entropy_coef, with entropy_target.")
    entropy_coef_max: float = option(1.0, "update", ge=0, needs="entropy_target", help=
        "Highest entropy_coef, with entropy_target.")

    top_entropy_quantile: float = option(1.0, "update", gt=0, le=1,
        bias="leaves out tokens that have a gradient too", help=
        "Share of the tokens, those with the highest entropy, that get a policy gradient; 1: all.")
    positive_nll_coef: float = option(0.0, "update", ge=0, bias="maximises a likelihood too", help=
        "Coefficient of -log p(correct completions): VAPO.")
    positive_nll_threshold: float = option(0.5, "update", needs="positive_nll_coef", help=
        "Weighted sum of scores above which a completion is correct, for positive_nll_coef.")
    tool_output_nll_coef: float = option(0.0, "update", ge=0, bias=None,
        needs="tools or environment_factory or agent_program", help=
        "Coefficient of -log p(words of tools and environments): ECHO.")
    ptx_coef: float = option(0.0, "update", ge=0, needs="ptx_dataset_name", bias=None, help=
        "Coefficient of -log p(texts), beside every update: PPO-ptx of InstructGPT.")
    ptx_dataset_name: Text | None = option(None, "run", needs="ptx_coef", bias=None, help=
        "Dataset of these texts, the column text of its split train; each is cut after "
        "max_completion_length tokens.")
    ptx_batch_size: int = option(32, "update", ge=1, needs="ptx_coef", help=
        "Texts per update, over all processes.")

    teacher_model_name_or_path: Text | None = option(None, "inputs", help=
        "Teacher of on-policy distillation: a model, an adapter, a GGUF file, or `policy` for the "
        "policy itself (self-distillation).")
    teacher_coef: float = option(1.0, "update", gt=0, needs="teacher_model_name_or_path", help=
        "Coefficient of the divergence from the teacher.")
    teacher_placement: Literal["loss", "reward"] = option("loss", "update",
        needs="teacher_model_name_or_path", help=
        "Add the divergence to the loss, or pay every token log p_teacher - log p.")
    teacher_divergence: Literal["reverse_kl", "forward_kl", "js", "sampled"] = option("reverse_kl",
        "update", needs="teacher_model_name_or_path and teacher_placement loss", help=
        "KL(policy || teacher), KL(teacher || policy) or generalised Jensen-Shannon over the "
        "vocabulary, or KL(policy || teacher) from the sampled token.")
    teacher_mixture: float = option(0.5, "update", gt=0, lt=1, needs="teacher_divergence js", help=
        "The teacher's share in js.")
    teacher_top_k: int | None = option(None, "update", ge=1,
        needs="teacher_placement loss and teacher_divergence reverse_kl or forward_kl or js",
        bias="takes the teacher's other tokens for one", help=
        "Compare this many likeliest tokens of the teacher, and the rest as one. None: all.")
    teacher_gamma: float = option(0.0, "update", ge=0, le=1, needs="teacher_placement reward",
        bias="pays a token little for what it leads to", help=
        "Discount of teacher_placement reward without a critic: 0 pays a token only its own.")
    teacher_mixup_alpha: float = option(1.0, "update", ge=0, le=1,
        needs="teacher_model_name_or_path policy", help=
        "Weight of the policy in the teacher `policy` after a step: 0 keeps the initial policy.")
    privileged_prompt: Text | None = option(None, "run", needs="teacher_model_name_or_path",
        bias=None, help=
        "Prompt that the teacher alone sees: a template with columns in braces, or a function, "
        "FILE.py:FUNCTION. None: the column privileged_prompt, if there is one.")

    beta: float = option(0.0, "update", ge=0, help=
        "Coefficient of KL(policy || reference); 0: no reference.")
    kl_placement: Literal["reward", "loss"] = option("loss", "update",
        bias="is not grad KL(policy || reference), or is scaled with scores", help=
        "Subtract the KL from the reward of each token, or add it to the loss.")
    kl_estimator: KLEstimator = option("k3", "update", bias="kl_placement", help=
        "Estimator of the KL (rlhf_pg.kl): k1, k2 or k3 in the reward; all but k1 in the loss.")
    kl_controller: Literal["fixed", "adaptive", "penalty"] = option("fixed", "update", needs="beta",
        help=
        "Adapt beta by the KL's error (adaptive; Ziegler 2019), or halve and double it (penalty).")
    kl_target: float = option(6.0, "update", gt=0, needs="kl_controller adaptive or penalty", help=
        "Target KL of kl_controller, in nats per completion.")
    kl_horizon: int = option(10000, "update", ge=1, needs="kl_controller adaptive", help=
        "Time constant of adaptive, in completions.")
    target_kl: float | None = option(None, "update", gt=0, help=
        "KL(old || new) per token, in nats; above 1.5 times this a step stops early. None: never.")
    kl_adaptive_lr: float | None = option(None, "update", gt=0, help=
        "KL(old || new) per token; learning rates adapt to keep it within a factor of two.")
    sync_ref_model: bool = option(False, "update", needs="beta", help=
        "Move the reference towards the policy.")
    ref_model_sync_steps: int = option(512, "update", ge=1, needs="sync_ref_model", help=
        "Steps between moves of the reference.")
    ref_model_mixup_alpha: float = option(0.6, "update", gt=0, le=1, needs="sync_ref_model", help=
        "Weight of the policy in a moved reference; 1 copies the policy.")
