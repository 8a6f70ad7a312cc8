"""Keys of the method: sampling, rewards, advantages, loss and KL."""

from typing import Literal

from rlhf_pg.config.fields import FunctionName, Names, Numbers, Text, config, option

KLEstimator = Literal["k1", "k2", "k3", "k1_to_go", "k2_straight_through", "k3_ratio"]
Correction = Literal[
    "auto", "none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"
]
# The keys of rlhf_pg.advantages.ADVANTAGES and rlhf_pg.losses.POLICY_LOSSES, which need torch.
ESTIMATORS = (
    *("gae", "group_normalized", "group_normalized_per_source", "leave_one_out", "n_step"),
    *("process_group_normalized", "returns", "returns_minus_greedy", "returns_minus_mean"),
    *("returns_minus_moving_average", "returns_minus_optimal", "returns_minus_others"),
    *("returns_minus_values", "total_returns"),
)
LOSSES = (
    *("vanilla", "surrogate", "kl_penalty", "clipped_surrogate", "cispo", "sapo", "dppo", "none"),
)


# fmt: off
@config
class SamplingConfig:
    """Keys of sampling: the engine, the distribution and the length of completions."""

    rollout_engine: Literal["auto", "native", "vllm", "vllm_server"] = option("auto", help=
        "Rollout engine: the policy itself (native), vLLM in this process, or a `vllm serve`. "
        "auto uses vLLM on a GPU if it is installed and supports the run.")
    rollout_cache_tokens: int | None = option(None, ge=1, help=
        "Most tokens in the native KV cache. None: half of a GPU's free memory, 4 GiB on a CPU.")
    rollout_workers: int = option(0, ge=0, help=
        "Processes of one CPU thread, for each process of the trainer, in which the native engine "
        "samples; 0: in the trainer.")
    rollout_ahead: int = option(0, ge=0, help=
        "Sample each batch with the weights of this many steps before, during those steps; needs "
        "rollout_workers or rollout_engine vllm_server.")
    vllm_gpu_memory_utilization: float = option(0.3, gt=0, le=1, help=
        "Share of the GPU's memory for vLLM; lower it if training runs out.")
    vllm_enable_sleep_mode: bool = option(False, help="Free vLLM's memory between rollouts.")
    vllm_max_model_length: int | None = option(None, ge=1, help=
        "Most tokens of prompt and completion in vLLM. None: as many as model and memory allow.")
    vllm_server_base_url: Names = option(("http://localhost:8000",), help=
        "Base URLs of vLLM servers, without user, password or query; each prompt goes to one.")
    vllm_server_timeout: float = option(300.0, gt=0, help=
        "Seconds for an answer of the vLLM server; a request is tried three times.")
    vllm_sync_directory: Text | None = option(None, help=
        "Directory for new weights that the server sees too. None: sync/ in output_dir.")
    max_completion_length: int = option(512, ge=1, help="Most tokens per completion, EOS included.")
    max_turns: int | None = option(None, ge=1, help=
        "Most turns in an episode, or calls of agent_program. None: as many as "
        "max_completion_length allows.")
    tools: Names = option((), help=
        "Functions that the policy may call: FILE.py:FUNCTION or package.module:FUNCTION.")
    environment_factory: Text | None = option(None, help=
        "Class or function that makes an environment: FILE.py:NAME or package.module:NAME.")
    environment_timeout: float = option(60.0, gt=0, help="Seconds for an answer of an environment.")
    agent_program: Text | None = option(None, help=
        "Program of an agent, which asks the policy over HTTP: FILE.py:FUNCTION, or a command.")
    agent_timeout: float = option(600.0, gt=0, help="Seconds for an episode of agent_program.")
    agent_call_timeout: float = option(300.0, gt=0, help="Seconds for an answer to agent_program.")
    agent_host: Text = option("127.0.0.1", help=
        "Address at which agent_program finds the policy; beyond loopback, others may find it too.")
    agent_credit: Literal["episode", "branch"] = option("episode", help=
        "Credit a reward to all earlier turns, or to those of its own endpoint.fork() alone.")
    temperature: float = option(1.0, gt=0, help="Temperature of sampling, scoring and training.")
    top_k: int = option(0, ge=0, help="Sample from this many likeliest tokens; 0: all.")
    top_p: float = option(1.0, gt=0, le=1, help=
        "Sample from the likeliest tokens whose probabilities reach this sum; 1: all.")
    min_p: float = option(0.0, ge=0, le=1, help=
        "Sample from tokens with at least this share of the largest probability; 0: all.")
    truncated_sampling: Literal["refuse", "ignore"] = option("refuse", help=
        "Refuse top_k, top_p and min_p in training, which they bias, or ignore the bias.")
    stop: Names | None = option(None, help="Strings that end a completion; they stay in it.")
    skip_special_tokens: bool = option(True, help=
        "Leave special tokens out of the text that rewards see; false for rewards that look for "
        "one, such as a special <think>. The token that ends a completion is left out anyway.")


@config
class MethodConfig:
    """Keys of the method; `rlhf_pg.config.rules` checks which keys go together."""

    dynamic_sampling_rounds: int = option(0, ge=0, help=
        "Most rounds in which new prompts replace groups with equal scores (DAPO); 0: none.")
    mask_truncated_completions: bool = option(False, help=
        "Leave truncated completions out of the losses, but not out of baselines (DAPO).")

    reward_weights: Numbers | None = option(None, help="Weights of the reward functions. None: 1.")
    reward_workers: int = option(0, ge=0, help=
        "Processes that run Python reward functions during sampling; 0: the trainer itself.")
    reward_timeout: float | None = option(None, gt=0, help=
        "Seconds for a reward call that is async or in reward_workers. None: no limit.")
    on_reward_error: Literal["error", "drop", "value"] = option("error", help=
        "If a reward function fails: end the run, treat it as not applicable (drop), or use "
        "reward_error_value. If every call fails, the run ends.")
    reward_error_value: float = option(0.0, help="Score if a reward function fails.")
    reward_model_sees_eos: bool = option(True, help=
        "Score at an EOS after the text (Stiennon et al. 2020), or at its last token.")
    reward_clip_range: Numbers | None = option(None, help=
        "Lowest and highest score, to which each reward function is clipped. None: no clipping.")
    reward_squash: Literal["none", "sigmoid", "min_max"] = option("none", help=
        "Map scores into [0, 1]: by 1 / (1 + exp(-score)), or by their range in the step.")
    normalize_rewards: bool = option(False, help="Divide scores by a running standard deviation.")
    whiten_rewards: bool = option(False, help=
        "Scale the step's rewards per token, KL included, to variance 1; the mean is kept.")
    missing_eos_penalty: float | None = option(None, ge=0, help=
        "Penalty for truncated completions. None: no penalty.")
    missing_eos_mode: Literal["subtract", "replace"] = option("subtract", help=
        "Subtract missing_eos_penalty from the score, or replace the score by minus the penalty.")
    overlong_buffer: int | None = option(None, ge=1, help=
        "Tokens before the length limit over which overlong_penalty grows (DAPO). None: off.")
    overlong_penalty: float = option(1.0, gt=0, help="Penalty at the end of overlong_buffer.")

    advantage_estimator: FunctionName = option("group_normalized", names=ESTIMATORS, help=
        "Advantage estimator (docs/algorithms.md), or your own as FILE.py:FUNCTION.")
    normalize_advantages: bool = option(False, help="Whiten advantages: mean 0, variance 1.")

    policy_loss: FunctionName = option("clipped_surrogate", names=LOSSES, help=
        "Policy loss (docs/algorithms.md), or your own as FILE.py:FUNCTION.")
    aggregation: Literal["token_mean", "sequence_mean", "constant"] = option("token_mean", help=
        "Weight of a token: 1 / all tokens, 1 / (rows * row's tokens), or 1 / (rows * longest).")
    epsilon: float = option(0.2, gt=0, le=1, help=
        "Clip distance of the ratio below 1 (dppo: of the probability); see epsilon_high.")
    epsilon_high: float | None = option(None, gt=0, help="Clip distance above. None: epsilon.")
    delta: float | None = option(None, gt=1, help=
        "Upper bound of the ratio for negative advantages (dual clip). None: no bound.")
    importance_sampling_level: Literal["token", "sequence"] = option("token", help=
        "Ratio per token, or the geometric mean over a completion's tokens (GSPO).")
    sapo_temperature_pos: float = option(1.0, gt=0, help="SAPO's temperature for advantages > 0.")
    sapo_temperature_neg: float = option(1.05, gt=0, help="SAPO's temperature for advantages < 0.")
    old_kl_coef: float = option(1.0, ge=0, help=
        "Coefficient of KL(policy before the step || policy now), in the loss kl_penalty.")
    old_kl_target: float | None = option(None, gt=0, help=
        "Target KL(old || new) per token, to halve or double old_kl_coef for. None: fixed.")
    sampler_correction: Correction = option("auto", help=
        "Weight the loss by policy / sampler; auto: token_truncate with vLLM or rollout_ahead, "
        "else none.")
    sampler_clip_max: float = option(3.0, gt=0, help="Largest weight of sampler_correction.")
    sampler_clip_min: float | None = option(None, gt=0, help="Smallest weight; None: 0.")
    entropy_coef: float = option(0.0, ge=0, help="Coefficient of the entropy bonus.")
    entropy_target: float | None = option(None, gt=0, help=
        "Target entropy per token, in nats, for adapting entropy_coef. None: fixed.")
    entropy_coef_delta: float = option(0.005, gt=0, help="Change per step, with entropy_target.")
    entropy_coef_min: float = option(0.0, ge=0, help="Lowest entropy_coef, with entropy_target.")
    entropy_coef_max: float = option(1.0, ge=0, help="Highest entropy_coef, with entropy_target.")

    top_entropy_quantile: float = option(1.0, gt=0, le=1, help=
        "Share of the tokens, those with the highest entropy, that get a policy gradient; 1: all.")
    positive_nll_coef: float = option(0.0, ge=0, help=
        "Coefficient of -log p(correct completions): VAPO.")
    positive_nll_threshold: float = option(0.5, help=
        "Weighted sum of scores above which a completion is correct, for positive_nll_coef.")
    tool_output_nll_coef: float = option(0.0, ge=0, help=
        "Coefficient of -log p(words of tools and environments): ECHO.")
    ptx_coef: float = option(0.0, ge=0, help=
        "Coefficient of -log p(texts), beside every update: PPO-ptx of InstructGPT.")
    ptx_dataset_name: Text | None = option(None, help=
        "Dataset of these texts, the column text of its split train; each is cut after "
        "max_completion_length tokens.")
    ptx_batch_size: int = option(32, ge=1, help="Texts per update, over all processes.")

    teacher_model_name_or_path: Text | None = option(None, help=
        "Teacher of on-policy distillation: a model, an adapter, a GGUF file, or `policy` for the "
        "policy itself (self-distillation).")
    teacher_coef: float = option(1.0, gt=0, help="Coefficient of the divergence from the teacher.")
    teacher_placement: Literal["loss", "reward"] = option("loss", help=
        "Add the divergence to the loss, or pay every token log p_teacher - log p.")
    teacher_divergence: Literal["reverse_kl", "forward_kl", "js", "sampled"] = option(
        "reverse_kl", help=
        "KL(policy || teacher), KL(teacher || policy) or generalised Jensen-Shannon over the "
        "vocabulary, or KL(policy || teacher) from the sampled token.")
    teacher_mixture: float = option(0.5, gt=0, lt=1, help="The teacher's share in js.")
    teacher_top_k: int | None = option(None, ge=1, help=
        "Compare this many likeliest tokens of the teacher, and the rest as one. None: all.")
    teacher_gamma: float = option(0.0, ge=0, le=1, help=
        "Discount of teacher_placement reward without a critic: 0 pays each token its own alone.")
    teacher_mixup_alpha: float = option(1.0, ge=0, le=1, help=
        "Weight of the policy in the teacher `policy` after a step: 0 keeps the initial policy.")
    privileged_prompt: Text | None = option(None, help=
        "Prompt that the teacher alone sees: a template with columns in braces, or a function, "
        "FILE.py:FUNCTION. None: the column privileged_prompt, if there is one.")

    beta: float = option(0.0, ge=0, help="Coefficient of KL(policy || reference); 0: no reference.")
    kl_placement: Literal["reward", "loss"] = option("loss", help=
        "Subtract the KL from the reward of each token, or add it to the loss.")
    kl_estimator: KLEstimator = option("k3", help=
        "Estimator of the KL (rlhf_pg.kl): k1, k2 or k3 in the reward; all but k1 in the loss.")
    kl_controller: Literal["fixed", "adaptive", "penalty"] = option("fixed", help=
        "Adapt beta by the KL's error (adaptive; Ziegler 2019), or halve and double it (penalty).")
    kl_target: float = option(6.0, gt=0, help="Target KL of kl_controller, in nats per completion.")
    kl_horizon: int = option(10000, ge=1, help="Time constant of adaptive, in completions.")
    target_kl: float | None = option(None, gt=0, help=
        "KL(old || new) per token, in nats; above 1.5 times this a step stops early. None: never.")
    kl_adaptive_lr: float | None = option(None, gt=0, help=
        "KL(old || new) per token that the learning rates keep within a factor of two.")
    sync_ref_model: bool = option(False, help="Move the reference towards the policy.")
    ref_model_sync_steps: int = option(512, ge=1, help="Steps between moves of the reference.")
    ref_model_mixup_alpha: float = option(0.6, gt=0, le=1, help=
        "Weight of the policy in a moved reference; 1 copies the policy.")
