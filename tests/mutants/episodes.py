"""Mistakes in episodes: whose tokens they are, what is carried on, where a reward is placed."""

from tests.mutants import Mutant

USER_CODE = "tests/faults/test_user_code.py::test_"
TOKENS = "tests/rollout/multi_turn/test_episodes.py::test_"
GRADIENTS = "tests/trainers/test_episodes.py::test_"
FAILED = GRADIENTS + "failed_episode_leaves_gradient_unchanged"
TURNS_AND_ANSWERS = TOKENS + "episode_row_has_turns_answers_and_turn_rewards"
EXACT = GRADIENTS + "expected_episode_gradient_is_exact"

MUTANTS: list[Mutant] = [
    Mutant(
        name="mark-forged",
        mistake="a tool's result with the private mark of a turn is what the assistant said",
        target="rlhf_pg.data.chat._looked_up",
        old="{*added.values(), MARK[0], ",
        new="{*added.values(), ",
        killers=("tests/data/test_prompts.py::test_environment_answer_yields_no_control_token",),
    ),
    Mutant(
        name="refused-prompt-forwarded",
        mistake="the prompt of an environment may be longer than positions and micro-batches",
        target="rlhf_pg.rollout.multi_turn.episodes._EpisodeBatch._prompted",
        old="most=runner.longest_prompt",
        new="most=None",
        killers=(USER_CODE + "refused_environment_prompt_is_not_forwarded",),
    ),
    Mutant(
        name="prompt-refused-by-the-engine-forwarded",
        mistake="what the engine refused as too long is scored all the same",
        target="rlhf_pg.rollout.multi_turn.episodes._EpisodeBatch._ask",
        old="                if not position:  ",
        new="                if False:  ",
        killers=(TOKENS + "rejected_reset_prompt_keeps_dataset_prompt",),
    ),
    Mutant(
        name="megabytes-tokenized",
        mistake="an answer of megabytes is tokenized to find that it does not fit",
        target="rlhf_pg.data.chat._check_length",
        old="if most is not None and len(text) > most * ",
        new="if most is not None and len(text) > 1_000_000 * most * ",
        killers=(USER_CODE + "huge_text_is_cut_before_tokenization",),
    ),
    Mutant(
        name="transform-drawn-again",
        mistake="a random transform makes another prompt for the reward than for the policy",
        target="rlhf_pg.data.prompts._in_rows",
        old='    if shape["type"] != "custom":\n',
        new="    if True:\n",
        killers=(USER_CODE + "random_dataset_transform_is_applied_once",),
    ),
    Mutant(
        name="process-left-changed",
        mistake="what a reward function does to default dtype or working directory stays",
        target="rlhf_pg.boundary.user_code.Settings.restore",
        old="        if now == self:\n",
        new="        if True:\n",
        killers=(USER_CODE + "user_code_side_effects_are_undone_and_forks_end",),
    ),
    Mutant(
        name="reward-ends-the-run",
        mistake="sys.exit(0) in a reward ends the run, as if it had come to its end",
        target="rlhf_pg.boundary.user_code.foreign",
        old="    except (Exception, KeyboardInterrupt):\n",
        new="    except (Exception, KeyboardInterrupt, SystemExit):\n",
        killers=(USER_CODE + "user_code_error_names_cause",),
    ),
    Mutant(
        name="late-calls-go-on",
        mistake="an environment that is late keeps its thread: one more at every step",
        target="rlhf_pg.rollout.multi_turn.concurrent_calls.ConcurrentCalls._give_up",
        old="SetAsyncExc(ident, ctypes.py_object(Late))",
        new="SetAsyncExc(ident, None)",
        killers=(TOKENS + "hanging_python_environments_leave_no_threads",),
    ),
    Mutant(
        name="observations-in-the-loss",
        mistake="what the environment answered is trained on, as if the policy had said it",
        target="rlhf_pg.rollout.Episode.observe",
        old="self._append(tokens, [0.0] * len(tokens), own=False)",
        new="self._append(tokens, [0.0] * len(tokens), own=True)",
        killers=(TURNS_AND_ANSWERS, EXACT),
    ),
    Mutant(
        name="observations-in-the-record",
        mistake="the record counts all tokens of an episode as the policy's own",
        target="rlhf_pg.trainers.samples.sample",
        old="        actions=[episode.trained for episode in episodes],\n",
        new="",
        killers=(EXACT,),
    ),
    Mutant(
        name="turns-tokenised-again",
        mistake="the next turn is asked for with the text of the last ones: other ids (TRL #5224)",
        target="rlhf_pg.rollout.multi_turn.episodes._EpisodeBatch._ask",
        old="            tokens=[*first.prompt_ids, *first.tokens],\n",
        new=(
            "            tokens=self.runner.tokenizer(\n"
            "                self.runner.tokenizer.decode([*first.prompt_ids, *first.tokens])\n"
            '            )["input_ids"],\n'
        ),
        killers=(TOKENS + "turns_keep_sampled_tokens",),
    ),
    Mutant(
        name="turn-paid-at-its-first-token",
        mistake="the reward of a turn stands at the first token of the row",
        target="rlhf_pg.rollout.Episode.pay",
        old="            self.rewards[-1] = reward\n",
        new="            self.rewards[0] = reward\n",
        killers=(TURNS_AND_ANSWERS, EXACT),
    ),
    Mutant(
        name="turn-paid-behind-the-answer",
        mistake="the reward of a turn stands at the last token of its answer, where it is not paid",
        target="rlhf_pg.rollout.multi_turn.episodes._EpisodeBatch._observed",
        old="        episode.observe(messages, ids)\n",
        new=(
            "        episode.observe(messages, ids)\n"
            "        episode.rewards = episode.rewards[-len(ids) :] "
            "+ episode.rewards[: -len(ids)]\n"
        ),
        killers=(EXACT,),
    ),
    Mutant(
        name="noise-begins-again-with-every-turn",
        mistake="every turn of an episode is sampled with the noise of the first one",
        target="rlhf_pg.rollout.multi_turn.episodes._EpisodeBatch._ask",
        old="            position=position,\n",
        new="            position=0,\n",
        killers=(TOKENS + "turn_request_has_full_history_and_own_position",),
    ),
    Mutant(
        name="words-that-are-control-tokens",
        mistake="the name of a special token in a message closes the turn",
        target="rlhf_pg.data.chat.quoted_chat",
        old="    quoted: list[Any] = _quoted(messages, special)",
        new="    quoted: list[Any] = list(messages)",
        killers=("tests/data/test_prompts.py::test_message_content_yields_no_control_token",),
    ),
    Mutant(
        name="prefill-closed",
        mistake="the assistant's own words at the end of a prompt are closed, and a turn opened",
        target="rlhf_pg.data.chat.encode",
        old="    if open_turn and continues(text):\n",
        new="    if False:\n",
        killers=("tests/data/test_prompts.py::test_last_assistant_message_is_continued",),
    ),
    Mutant(
        name="end-of-turn-twice",
        mistake="the end of a turn stands in the row twice, as sampled and from the chat template",
        target="rlhf_pg.data.chat.encode_answer",
        old="            text = rest\n",
        new="            pass\n",
        killers=(TOKENS + "chat_turns_are_joined_as_in_template",),
    ),
    Mutant(
        name="cut-off-episodes-do-not-apply",
        mistake="what was cut off unpaid has no score, and is spared the comparison with the rest",
        target="rlhf_pg.rollout.Episode.cut_off",
        old="            self.pay(0.0)\n",
        new="            pass\n",
        killers=(TOKENS + "truncated_episode_without_rewards_earns_zero",),
    ),
    Mutant(
        name="turns-without-limit",
        mistake="max_turns ends no episode",
        target="rlhf_pg.rollout.multi_turn.episodes._EpisodeBatch._observed",
        old="(not done and episode.turns == runner.max_turns)",
        new="(not done and False)",
        killers=(TOKENS + "turn_limit_truncates_episode",),
    ),
    Mutant(
        name="failed-episodes-train",
        mistake="an episode whose environment failed is trained on as if it had earned nothing",
        target="rlhf_pg.rollout.Episode.trained",
        old="return self.actions if self.error is None else [False] * len(self.actions)",
        new="return self.actions",
        killers=(GRADIENTS + "reward_functions_skip_failed_episodes",),
    ),
    Mutant(
        name="failed-episodes-in-the-std",
        mistake="what no source applies to is given the mean of its group, and counts in its std",
        target="rlhf_pg.advantages.total_scores",
        old=".masked_fill(nothing, torch.nan).to(scores.dtype)",
        new=".to(scores.dtype)",
        killers=(FAILED,),
    ),
    Mutant(
        name="failed-episodes-in-the-kl",
        mistake="an episode that failed has a KL of 0, which the others are compared with",
        target="rlhf_pg.trainers.experience_maker.advantage_inputs",
        old="minus_kl.sum(1).masked_fill(~mask.any(1), torch.nan)",
        new="minus_kl.sum(1)",
        killers=(FAILED,),
    ),
    Mutant(
        name="failed-episodes-fined",
        mistake="an episode that failed has a penalty of 0, which is a score",
        target="rlhf_pg.rewards.shaping.Shaping.penalized",
        old="        added = [penalty.masked_fill(silent, torch.nan) for penalty in added]\n",
        new="",
        killers=(FAILED,),
    ),
    Mutant(
        name="failed-episodes-move-beta",
        mistake="episodes that failed count in the mean KL that moves beta",
        target="rlhf_pg.trainers.experience_maker._kl_of_completions",
        old="mask.any(1).sum().to(sums)",
        new="sums.new_tensor(len(sums))",
        killers=(GRADIENTS + "failed_episode_leaves_metrics_unchanged",),
    ),
]
