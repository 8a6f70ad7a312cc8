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
        "Engine that samples: the policy itself (native), vLLM in this process, or a `vllm "
        "serve`. auto takes vLLM in this process, asleep between rollouts, on a GPU where it is "
        "installed and supports the run; otherwise the policy.")
    rollout_cache_tokens: int | None = option(None, ge=1, help=
        "Most tokens whose keys and values the native engine keeps at a time; other completions "
        "wait. None takes half of a GPU's free memory, or 4 GiB of a CPU's. It changes the "
        "result by ties within rounding alone.")
    vllm_gpu_memory_utilization: float = option(0.3, gt=0, le=1, help=
        "Share of the GPU's memory that vLLM takes for weights, keys and values; lower it if "
        "training runs out of memory.")
    vllm_enable_sleep_mode: bool = option(False, help=
        "Give vLLM's memory back while it does not sample.")
    vllm_max_model_length: int | None = option(None, ge=1, help=
        "Most tokens of a prompt and its completion together, for which vLLM must have room. "
        "None takes what the model allows, or what fits into vLLM's memory.")
    vllm_server_base_url: Text = option("http://localhost:8000", help=
        "Base URL of the vLLM server, without user, password or query.")
    vllm_server_timeout: float = option(300.0, gt=0, help=
        "Seconds that the vLLM server may take over one answer; every request is tried three "
        "times.")
    vllm_sync_directory: Text | None = option(None, help=
        "Directory through which the vLLM server gets new weights, under a path that the server "
        "sees too; they are put into a private directory of the run in it. None is sync/ in "
        "output_dir.")
    max_completion_length: int = option(512, ge=1, help=
        "Longest completion in tokens, EOS included; raise it if too many completions are cut "
        "off.")
    max_turns: int | None = option(None, ge=1, help=
        "Most turns of the policy in an episode with an environment or tools. None allows as "
        "many as max_completion_length, which counts all turns and answers together.")
    environment_timeout: float = option(60.0, gt=0, help=
        "Seconds that an environment or a tool may take for each answer.")
    temperature: float = option(1.0, gt=0, help=
        "Temperature of the policy, which divides every logit, in sampling, scoring and "
        "training alike.")
    top_k: int = option(0, ge=0, help=
        "Number of likeliest tokens to sample from; 0 samples from all.")
    top_p: float = option(1.0, gt=0, le=1, help=
        "Probability that the smallest set of likeliest tokens to sample from must reach; 1 "
        "samples from all.")
    min_p: float = option(0.0, ge=0, le=1, help=
        "Lowest probability of a token to sample, as a fraction of the likeliest token's; 0 "
        "samples from all.")
    truncated_sampling: Literal["refuse", "ignore"] = option("refuse", help=
        "Refuse top_k, top_p and min_p in training, since they sample from another distribution "
        "than the policy's; or sample from it and train as if it were the policy's, which is "
        "biased (ignore).")
    stop: Names | None = option(None, help=
        "Strings that end a completion, as an EOS does; their tokens stay in it.")
    # fmt: on


@config
class MethodConfig:
    """Keys of the method; `rlhf_pg.config.rules` checks which keys go together."""

    # fmt: off
    dynamic_sampling_rounds: int = option(0, ge=0, help=
        "Most rounds in which a step samples new prompts in place of groups of equal scores "
        "(DAPO); 0 keeps these groups. Penalties and the KL are no part of these scores, and "
        "num_train_epochs counts only the prompts that train.")
    mask_truncated_completions: bool = option(False, help=
        "Leave completions that were cut off by their length out of the losses of policy and "
        "critic (DAPO). They still count in baselines, statistics and reward metrics.")

    reward_weights: Numbers | None = option(None, help=
        "Weights of the reward functions, one for each; None gives all of them weight 1.")
    reward_workers: int = option(0, ge=0, help=
        "Processes, for each process that trains, in which plain Python reward functions run "
        "while other completions are sampled, once for every prompt. 0 runs them in the "
        "trainer, once a step.")
    reward_timeout: float | None = option(None, gt=0, help=
        "Seconds for a call of a reward function in reward_workers, which is killed then, or of "
        "an async one, which is cancelled. None waits for ever.")
    on_reward_error: Literal["error", "drop", "value"] = option("error", help=
        "Effect of a reward function that raises, hangs, crashes or answers nonsense: the run "
        "ends (error), the function does not apply to these completions (drop), or it gives "
        "them reward_error_value (value). A batch in which all of them fail ends the run.")
    reward_error_value: float = option(0.0, help=
        "Score of a completion on which a reward function fails, with on_reward_error value.")
    reward_model_sees_eos: bool = option(True, help=
        "Append the reward model's EOS to texts that the policy ended with an EOS, and score it "
        "there (Stiennon et al. 2020; Huang et al. 2024). Otherwise the reward model reads only "
        "the words.")
    reward_clip_range: Numbers | None = option(None, help=
        "Lowest and highest score that a reward function may give, for a step or a completion; "
        "scores outside are clipped. None does not clip.")
    reward_squash: Literal["none", "sigmoid", "min_max"] = option("none", help=
        "Map every score into [0, 1]: sigmoid takes 1 / (1 + exp(-score)), min_max takes (score "
        "- lowest) / (highest - lowest) over the scores of its function in the step.")
    normalize_rewards: bool = option(False, help=
        "Divide the scores of each reward function by their running standard deviation.")
    whiten_rewards: bool = option(False, help=
        "Scale the rewards of all tokens of the step, KL included, to variance 1 and keep their "
        "mean; only for estimators that use nothing but these rewards.")
    missing_eos_penalty: float | None = option(None, ge=0, help=
        "Penalty for completions that were cut off by their length, in units of the score; None "
        "sets none.")
    missing_eos_mode: Literal["subtract", "replace"] = option("subtract", help=
        "Subtract missing_eos_penalty from the score, or replace the score by minus the "
        "penalty.")
    overlong_buffer: int | None = option(None, ge=1, help=
        "Tokens before max_completion_length over which a penalty rises from 0 to "
        "overlong_penalty (DAPO's soft overlong punishment); None sets none.")
    overlong_penalty: float = option(1.0, gt=0, help=
        "Penalty at the end of overlong_buffer, in units of the score.")

    advantage_estimator: Text = option("group_normalized", names=ESTIMATORS, help=
        "Name of the advantage estimator, a key of rlhf_pg.advantages.ADVANTAGES (see "
        "docs/algorithms.md).")
    normalize_advantages: bool = option(False, help=
        "Whiten advantages over all tokens of the step: mean 0, variance 1.")

    policy_loss: Text = option("clipped_surrogate", names=LOSSES, help=
        "Name of the policy loss, a key of rlhf_pg.losses.POLICY_LOSSES (see "
        "docs/algorithms.md); whole methods (DAPO, GSPO) are in recipes/presets.")
    aggregation: Literal["token_mean", "sequence_mean", "constant"] = option("token_mean", help=
        "Weight of each token in the loss: 1 / tokens (token_mean), 1 / (completions * own "
        "length) (sequence_mean) or 1 / (completions * max_completion_length) (constant).")
    epsilon: float = option(0.2, gt=0, le=1, help=
        "Clip distance of the ratio below 1 (1 sets no lower bound), and above 1 unless "
        "epsilon_high is set. The usual value depends on the loss: GSPO's paper has 3e-4, "
        "CISPO's 1.")
    epsilon_high: float | None = option(None, gt=0, help=
        "Clip distance of the ratio above 1; None uses epsilon.")
    delta: float | None = option(None, gt=1, help=
        "Upper bound of the ratio where the advantage is negative (dual clip); None sets no "
        "bound.")
    importance_sampling_level: Literal["token", "sequence"] = option("token", help=
        "Level of the ratio: one for every token, or one for the whole completion, its "
        "geometric mean (GSPO).")
    sapo_temperature_pos: float = option(1.0, gt=0, help=
        "Temperature of SAPO's soft gate where the advantage is positive.")
    sapo_temperature_neg: float = option(1.05, gt=0, help=
        "Temperature of SAPO's soft gate where the advantage is negative.")
    old_kl_coef: float = option(1.0, ge=0, help=
        "Coefficient of the KL between the policy before the step and the policy now "
        "(kl_penalty).")
    old_kl_target: float | None = option(None, gt=0, help=
        "Target of KL(old || new) in nats per token: old_kl_coef is halved or doubled after a "
        "step to keep it (PPO, section 4), at the cost of one forward pass. None fixes "
        "old_kl_coef.")
    sampler_correction: Correction = option("auto", help=
        "Weight the loss by policy / sampler probabilities (rlhf_pg.losses.sampler_weights). "
        "auto is token_truncate with vLLM, whose probabilities differ slightly from the "
        "policy's, otherwise none.")
    sampler_clip_max: float = option(3.0, gt=0, help=
        "Largest weight of sampler_correction.")
    sampler_clip_min: float | None = option(None, gt=0, help=
        "Smallest weight of sampler_correction: a mask drops what is below, truncation raises "
        "it. None is 0.")
    entropy_coef: float = option(0.0, ge=0, help=
        "Coefficient of the entropy bonus; raise it if the policy's entropy collapses.")
    entropy_target: float | None = option(None, gt=0, help=
        "Entropy per token, in nats, that entropy_coef is moved after every step to keep; None "
        "fixes it.")
    entropy_coef_delta: float = option(0.005, gt=0, help=
        "Change of entropy_coef in one step, with entropy_target.")
    entropy_coef_min: float = option(0.0, ge=0, help=
        "Lowest entropy_coef that entropy_target may set.")
    entropy_coef_max: float = option(1.0, ge=0, help=
        "Highest entropy_coef that entropy_target may set.")

    positive_nll_coef: float = option(0.0, ge=0, help=
        "Coefficient of the negative log-likelihood of right completions, averaged over their "
        "tokens in an update (VAPO; rlhf_pg.losses.positive_nll). 0 leaves it out.")
    positive_nll_threshold: float = option(0.5, help=
        "Score above which positive_nll_coef counts a completion as right: the clipped, "
        "weighted sum of the reward functions, without penalties and KL.")
    router_aux_loss_coef: float = option(0.0, ge=0, help=
        "Coefficient of the load-balancing loss of a mixture of experts, over all tokens of an "
        "update (rlhf_pg.models.experts). It costs one forward pass per update and needs "
        "disable_dropout. 0 leaves it out.")

    beta: float = option(0.0, ge=0, help=
        "Coefficient of KL(policy || reference), which holds the policy near it; 0 keeps no "
        "reference.")
    kl_placement: Literal["reward", "loss"] = option("loss", help=
        "Place of the KL: subtracted from the reward of each token, or added to the loss.")
    kl_estimator: KLEstimator = option("k3", help=
        "Estimator of the KL (rlhf_pg.kl): k1, k2 or k3 in the reward; k2, k3, k1_to_go, "
        "k2_straight_through or k3_ratio in the loss.")
    kl_controller: Literal["fixed", "adaptive", "penalty"] = option("fixed", help=
        "Rule that moves beta after a step: none (fixed), in proportion to the KL's error "
        "(adaptive; Ziegler 2019), or by halving and doubling (penalty; PPO).")
    kl_target: float = option(6.0, gt=0, help=
        "KL to the reference in nats per completion that a moving beta aims at; it is measured "
        "on the policy that sampled, before the step's updates.")
    kl_horizon: int = option(10000, ge=1, help=
        "Completions over which an adaptive beta corrects its error; more make it slower.")
    target_kl: float | None = option(None, gt=0, help=
        "KL(old || new) in nats per token that bounds a step: its updates stop once a minibatch "
        "is above 1.5 times this. None never stops them.")
    kl_adaptive_lr: float | None = option(None, gt=0, help=
        "Target of KL(old || new) in nats per token: the learning rates are scaled after a step "
        "to keep it between half and twice this, from a tenth to ten times what the schedule "
        "says, at the cost of one forward pass. None does not scale them.")
    sync_ref_model: bool = option(False, help=
        "Move the reference towards the policy every ref_model_sync_steps steps.")
    ref_model_sync_steps: int = option(512, ge=1, help=
        "Steps between two moves of the reference, each after the step's updates.")
    ref_model_mixup_alpha: float = option(0.6, gt=0, le=1, help=
        "Share of the policy in the moved reference; 1 makes it a copy of the policy.")
    # fmt: on
