"""Mistakes in episodes: whose tokens they are, what is carried on, where a reward is placed."""

from tests.mutants import Mutant

USER_CODE = "tests/faults/test_user_code.py::test_"
TOKENS = "tests/rollout/multi_turn/test_episodes.py::test_"
GRADIENTS = "tests/trainers/test_episodes.py::test_"
FAILED = GRADIENTS + "an_episode_that_failed_is_in_no_baseline_statistic_or_loss"
TURNS_AND_ANSWERS = TOKENS + "turns_and_answers_stand_in_one_row_with_what_was_paid_for_each"
EXACT = GRADIENTS + "the_expected_gradient_is_that_of_the_policys_own_tokens"

MUTANTS: list[Mutant] = [
    Mutant(
        name="mark-forged",
        mistake="a tool's result with the private mark of a turn is what the assistant said",
        target="rlhf_pg.data.chat._looked_up",
        old="{*added.values(), MARK[0], ",
        new="{*added.values(), ",
        killers=("tests/data/test_prompts.py::test_nor_is_what_an_environment_answers",),
    ),
    Mutant(
        name="refused-prompt-forwarded",
        mistake="the prompt of an environment may be longer than positions and micro-batches",
        target="rlhf_pg.rollout.multi_turn.episodes._EpisodeBatch._prompted",
        old="most=runner.longest_prompt",
        new="most=None",
        killers=(USER_CODE + "a_prompt_that_was_refused_is_not_forwarded",),
    ),
    Mutant(
        name="prompt-refused-by-the-engine-forwarded",
        mistake="what the engine refused as too long is scored all the same",
        target="rlhf_pg.rollout.multi_turn.episodes._EpisodeBatch._ask",
        old="                if not position:  ",
        new="                if False:  ",
        killers=(TOKENS + "a_beginning_that_the_engine_refuses_leaves_the_prompt_of_the_dataset",),
    ),
    Mutant(
        name="megabytes-tokenized",
        mistake="an answer of megabytes is tokenized to find that it does not fit",
        target="rlhf_pg.data.chat._check_length",
        old="if most is not None and len(text) > most * ",
        new="if most is not None and len(text) > 1_000_000 * most * ",
        killers=(USER_CODE + "megabytes_are_never_tokenized",),
    ),
    Mutant(
        name="transform-drawn-again",
        mistake="a random transform makes another prompt for the reward than for the policy",
        target="rlhf_pg.data.prompts._in_rows",
        old='    if shape["type"] != "custom":\n',
        new="    if True:\n",
        killers=(USER_CODE + "a_random_transform_is_drawn_once",),
    ),
    Mutant(
        name="process-left-changed",
        mistake="what a reward function does to default dtype or working directory stays",
        target="rlhf_pg.boundary.user_code.Settings.restore",
        old="        if now == self:\n",
        new="        if True:\n",
        killers=(USER_CODE + "what_it_changes_of_the_process_is_put_back_and_its_forks_end",),
    ),
    Mutant(
        name="reward-ends-the-run",
        mistake="sys.exit(0) in a reward ends the run, as if it had come to its end",
        target="rlhf_pg.boundary.user_code.foreign",
        old="    except (Exception, KeyboardInterrupt):\n",
        new="    except (Exception, KeyboardInterrupt, SystemExit):\n",
        killers=(USER_CODE + "what_raises_is_an_error_that_says_what",),
    ),
    Mutant(
        name="late-calls-go-on",
        mistake="an environment that is late keeps its thread: one more at every step",
        target="rlhf_pg.rollout.multi_turn.concurrent_calls.ConcurrentCalls._give_up",
        old="SetAsyncExc(ident, ctypes.py_object(Late))",
        new="SetAsyncExc(ident, None)",
        killers=(TOKENS + "environments_that_hang_in_python_leave_no_threads_behind",),
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
        killers=(TOKENS + "turns_are_carried_as_they_were_sampled",),
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
        killers=(TOKENS + "each_turn_is_asked_for_with_all_before_it_and_noise_of_its_own_place",),
    ),
    Mutant(
        name="words-that-are-control-tokens",
        mistake="the name of a special token in a message closes the turn",
        target="rlhf_pg.data.chat._quoted_chat",
        old="    quoted: list[Any] = _quoted(messages, special)",
        new="    quoted: list[Any] = list(messages)",
        killers=("tests/data/test_prompts.py::test_what_a_message_says_is_no_control_token",),
    ),
    Mutant(
        name="prefill-closed",
        mistake="the assistant's own words at the end of a prompt are closed, and a turn opened",
        target="rlhf_pg.data.chat.encode",
        old="    if open_turn and continues(text):\n",
        new="    if False:\n",
        killers=("tests/data/test_prompts.py::test_the_assistants_own_words_are_continued",),
    ),
    Mutant(
        name="end-of-turn-twice",
        mistake="the end of a turn stands in the row twice, as sampled and from the chat template",
        target="rlhf_pg.data.chat.encode_answer",
        old="            text = rest\n",
        new="            pass\n",
        killers=(TOKENS + "between_two_turns_of_a_chat_stands_what_the_template_has_there",),
    ),
    Mutant(
        name="cut-off-episodes-do-not-apply",
        mistake="what was cut off unpaid has no score, and is spared the comparison with the rest",
        target="rlhf_pg.rollout.Episode.cut_off",
        old="            self.pay(0.0)\n",
        new="            pass\n",
        killers=(TOKENS + "what_was_cut_off_before_anything_was_paid_has_earned_nothing",),
    ),
    Mutant(
        name="turns-without-limit",
        mistake="max_turns ends no episode",
        target="rlhf_pg.rollout.multi_turn.episodes._EpisodeBatch._observed",
        old="(not done and episode.turns == runner.max_turns)",
        new="(not done and False)",
        killers=(TOKENS + "the_limit_on_turns",),
    ),
    Mutant(
        name="failed-episodes-train",
        mistake="an episode whose environment failed is trained on as if it had earned nothing",
        target="rlhf_pg.rollout.Episode.trained",
        old="return self.actions if self.error is None else [False] * len(self.actions)",
        new="return self.actions",
        killers=(GRADIENTS + "reward_functions_are_not_asked_about_what_has_failed",),
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
        killers=(GRADIENTS + "metrics_and_controllers_leave_out_what_has_failed",),
    ),
]
