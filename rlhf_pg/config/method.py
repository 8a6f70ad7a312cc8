"""Keys of the method: sampling, rewards, advantages, loss and KL."""

from typing import Literal

from rlhf_pg.config.fields import Names, Numbers, Text, config, option

KLEstimator = Literal["k1", "k2", "k3", "k1_to_go", "k2_straight_through", "k3_ratio"]
Correction = Literal[
    "auto", "none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"
]
# The keys of rlhf_pg.advantages.ADVANTAGES and rlhf_pg.losses.POLICY_LOSSES, which need torch.
ESTIMATORS = (
    *("gae", "group_normalized", "leave_one_out", "n_step", "process_group_normalized", "returns"),
    *("returns_minus_greedy", "returns_minus_mean", "returns_minus_moving_average"),
    *("returns_minus_optimal", "returns_minus_others", "returns_minus_values", "total_returns"),
)
LOSSES = ("vanilla", "surrogate", "kl_penalty", "clipped_surrogate", "cispo", "sapo")


@config
class SamplingConfig:
    """Keys of sampling: the engine, the distribution and the length of completions."""

    # fmt: off
    rollout_engine: Literal["auto", "native", "vllm", "vllm_server"] = option("auto", help=
        "Engine that samples: the policy itself (native), vLLM in this process, or a `vllm serve`. "
        "auto takes vLLM on a GPU where it is installed and supports the run, else native.")
    rollout_cache_tokens: int | None = option(None, ge=1, help=
        "Most tokens whose keys and values the native engine keeps; other completions wait. None "
        "takes half of a GPU's free memory, or 4 GiB of a CPU's.")
    vllm_gpu_memory_utilization: float = option(0.3, gt=0, le=1, help=
        "Share of the GPU's memory for vLLM; lower it if training runs out of memory.")
    vllm_enable_sleep_mode: bool = option(False, help=
        "Give vLLM's memory back while it does not sample.")
    vllm_max_model_length: int | None = option(None, ge=1, help=
        "Most tokens of prompt and completion together in vLLM. None takes what the model allows, "
        "or what fits.")
    vllm_server_base_url: Text = option("http://localhost:8000", help=
        "Base URL of the vLLM server, without user, password or query.")
    vllm_server_timeout: float = option(300.0, gt=0, help=
        "Seconds for one answer of the vLLM server; a request is tried three times.")
    vllm_sync_directory: Text | None = option(None, help=
        "Directory, under a path that the vLLM server sees too, through which it gets new weights. "
        "None is sync/ in output_dir.")
    max_completion_length: int = option(512, ge=1, help=
        "Longest completion in tokens, EOS included.")
    max_turns: int | None = option(None, ge=1, help=
        "Most turns of the policy in an episode; None allows as many as max_completion_length, "
        "which counts all turns and answers together.")
    environment_timeout: float = option(60.0, gt=0, help=
        "Seconds that an environment or a tool may take for each answer.")
    temperature: float = option(1.0, gt=0, help=
        "Temperature of the policy, in sampling, scoring and training alike.")
    top_k: int = option(0, ge=0, help="Sample from this many likeliest tokens; 0 takes all.")
    top_p: float = option(1.0, gt=0, le=1, help=
        "Sample from the likeliest tokens that reach this probability together; 1 takes all.")
    min_p: float = option(0.0, ge=0, le=1, help=
        "Sample from tokens of at least this share of the likeliest one's probability; 0: all.")
    truncated_sampling: Literal["refuse", "ignore"] = option("refuse", help=
        "Refuse top_k, top_p and min_p in training, since they sample from another distribution "
        "than the policy's; or ignore that, which is biased.")
    stop: Names | None = option(None, help=
        "Strings that end a completion, as an EOS does; their tokens stay in it.")
    # fmt: on


@config
class MethodConfig:
    """Keys of the method; `rlhf_pg.config.rules` checks which keys go together."""

    # fmt: off
    dynamic_sampling_rounds: int = option(0, ge=0, help=
        "Most rounds in which a step samples new prompts in place of groups whose scores, without "
        "penalties and KL, are equal (DAPO); 0 keeps these groups.")
    mask_truncated_completions: bool = option(False, help=
        "Leave completions that were cut off by their length out of the losses (DAPO); they still "
        "count in baselines and reward metrics.")

    reward_weights: Numbers | None = option(None, help=
        "Weights of the reward functions; None gives all of them weight 1.")
    reward_workers: int = option(0, ge=0, help=
        "Processes, for each one that trains, in which plain Python reward functions run beside "
        "sampling, called once per prompt; 0 calls them in the trainer.")
    reward_timeout: float | None = option(None, gt=0, help=
        "Seconds for a call of a reward function that is async or in reward_workers; a later one "
        "fails. None waits for ever.")
    on_reward_error: Literal["error", "drop", "value"] = option("error", help=
        "What a failed call of a reward function does: end the run (error), count as not "
        "applicable (drop), or give reward_error_value. If all functions fail on all completions, "
        "the run ends.")
    reward_error_value: float = option(0.0, help=
        "Score of a completion on which a reward function failed.")
    reward_model_sees_eos: bool = option(True, help=
        "Score a text that the policy ended by an EOS at the reward model's EOS behind it "
        "(Stiennon et al. 2020; Huang et al. 2024), or at its last word.")
    reward_clip_range: Numbers | None = option(None, help=
        "Lowest and highest score of a reward function, to which others are clipped. None does not "
        "clip.")
    reward_squash: Literal["none", "sigmoid", "min_max"] = option("none", help=
        "Map every score into [0, 1]: by 1 / (1 + exp(-score)), or by (score - lowest) / (highest "
        "- lowest) over the step's scores of its function.")
    normalize_rewards: bool = option(False, help=
        "Divide the scores of each reward function by their running standard deviation.")
    whiten_rewards: bool = option(False, help=
        "Scale the rewards of all tokens of the step, KL included, to variance 1 and keep their "
        "mean; only for estimators that use nothing else.")
    missing_eos_penalty: float | None = option(None, ge=0, help=
        "Penalty for completions that were cut off by their length; None sets none.")
    missing_eos_mode: Literal["subtract", "replace"] = option("subtract", help=
        "Subtract missing_eos_penalty from the score, or put minus the penalty in its place.")
    overlong_buffer: int | None = option(None, ge=1, help=
        "Tokens before max_completion_length over which a penalty rises from 0 to overlong_penalty "
        "(DAPO); None sets none.")
    overlong_penalty: float = option(1.0, gt=0, help=
        "Penalty at the end of overlong_buffer, in units of the score.")

    advantage_estimator: Text = option("group_normalized", names=ESTIMATORS, help=
        "Advantage estimator, a key of rlhf_pg.advantages.ADVANTAGES (docs/algorithms.md).")
    normalize_advantages: bool = option(False, help=
        "Whiten advantages over all tokens of the step: mean 0, variance 1.")

    policy_loss: Text = option("clipped_surrogate", names=LOSSES, help=
        "Policy loss, a key of rlhf_pg.losses.POLICY_LOSSES (docs/algorithms.md).")
    aggregation: Literal["token_mean", "sequence_mean", "constant"] = option("token_mean", help=
        "Weight of a token in the loss: 1 / tokens, 1 / (completions * length of its own), or 1 / "
        "(completions * max_completion_length).")
    epsilon: float = option(0.2, gt=0, le=1, help=
        "Clip distance of the ratio below 1 (1 sets no bound), and above 1 unless epsilon_high is "
        "set. GSPO's paper has 3e-4, CISPO's 1.")
    epsilon_high: float | None = option(None, gt=0, help=
        "Clip distance of the ratio above 1; None uses epsilon.")
    delta: float | None = option(None, gt=1, help=
        "Upper bound of the ratio where the advantage is negative (dual clip); None: none.")
    importance_sampling_level: Literal["token", "sequence"] = option("token", help=
        "Ratio of each token, or of the whole completion, its geometric mean (GSPO).")
    sapo_temperature_pos: float = option(1.0, gt=0, help=
        "Temperature of SAPO's soft gate where the advantage is positive.")
    sapo_temperature_neg: float = option(1.05, gt=0, help=
        "Temperature of SAPO's soft gate where the advantage is negative.")
    old_kl_coef: float = option(1.0, ge=0, help=
        "Coefficient of KL(policy before the step || policy now), of the loss kl_penalty.")
    old_kl_target: float | None = option(None, gt=0, help=
        "KL(old || new) in nats per token that old_kl_coef is halved or doubled to keep (PPO, "
        "section 4), at the cost of one forward pass. None fixes old_kl_coef.")
    sampler_correction: Correction = option("auto", help=
        "Weight the loss by policy / sampler probabilities (rlhf_pg.losses.sampler_weights). auto "
        "is token_truncate with vLLM, else none.")
    sampler_clip_max: float = option(3.0, gt=0, help="Largest weight of sampler_correction.")
    sampler_clip_min: float | None = option(None, gt=0, help=
        "Smallest weight of sampler_correction; None is 0.")
    entropy_coef: float = option(0.0, ge=0, help="Coefficient of the entropy bonus.")
    entropy_target: float | None = option(None, gt=0, help=
        "Entropy in nats per token that entropy_coef is moved to keep; None fixes it.")
    entropy_coef_delta: float = option(0.005, gt=0, help=
        "Change of entropy_coef in one step, with entropy_target.")
    entropy_coef_min: float = option(0.0, ge=0, help=
        "Lowest entropy_coef that entropy_target may set.")
    entropy_coef_max: float = option(1.0, ge=0, help=
        "Highest entropy_coef that entropy_target may set.")

    positive_nll_coef: float = option(0.0, ge=0, help=
        "Coefficient of the negative log-likelihood of right completions (VAPO; "
        "rlhf_pg.losses.positive_nll).")
    positive_nll_threshold: float = option(0.5, help=
        "Clipped, weighted sum of scores above which positive_nll_coef counts a completion as "
        "right.")
    router_aux_loss_coef: float = option(0.0, ge=0, help=
        "Coefficient of the load-balancing loss of a mixture of experts (rlhf_pg.models.experts), "
        "at the cost of one forward pass per update.")

    beta: float = option(0.0, ge=0, help=
        "Coefficient of KL(policy || reference); 0 keeps no reference.")
    kl_placement: Literal["reward", "loss"] = option("loss", help=
        "Subtract the KL from the reward of each token, or add it to the loss.")
    kl_estimator: KLEstimator = option("k3", help=
        "Estimator of the KL (rlhf_pg.kl): k1, k2 or k3 in the reward; all but k1 in the loss.")
    kl_controller: Literal["fixed", "adaptive", "penalty"] = option("fixed", help=
        "Rule that moves beta after a step: in proportion to the KL's error (adaptive; Ziegler "
        "2019), or by halving and doubling (penalty; PPO).")
    kl_target: float = option(6.0, gt=0, help=
        "KL to the reference, in nats per completion, that kl_controller aims at.")
    kl_horizon: int = option(10000, ge=1, help=
        "Completions over which kl_controller adaptive corrects its error.")
    target_kl: float | None = option(None, gt=0, help=
        "KL(old || new) in nats per token; updates of a step stop beyond 1.5 times this. None "
        "never stops.")
    kl_adaptive_lr: float | None = option(None, gt=0, help=
        "KL(old || new) in nats per token that learning rates are scaled to keep within a factor "
        "of two, from 0.1 to 10 times the schedule's, at the cost of one forward pass.")
    sync_ref_model: bool = option(False, help="Move the reference towards the policy.")
    ref_model_sync_steps: int = option(512, ge=1, help="Steps between two moves of the reference.")
    ref_model_mixup_alpha: float = option(0.6, gt=0, le=1, help=
        "Share of the policy in a moved reference; 1 makes it a copy of the policy.")
    # fmt: on
