"""Mistakes in calls of rewards that hang, crash or run beside the rollout."""

from tests.mutants import Mutant

WORKERS_TEST = "tests/rewards/test_workers.py::"

MUTANTS: list[Mutant] = [
    Mutant(
        name="scores-of-rows-called-alone",
        mistake="after a failure completions keep the scores of calls of their own, in which a "
        "reward that compares them had nothing to compare",
        target="rlhf_pg.rewards.blame.settled",
        old="_spread(attempt(rest), rest, failed, count)",
        new="_spread(Answer([attempt([i]).scores[0] for i in rest], {}, {}), rest, failed, count)",
        killers=("tests/rewards/test_blame.py::test_others_are_scored_together",),
    ),
    Mutant(
        name="blame-without-bound",
        mistake="every row of a batch that hangs is called alone, each for the whole time",
        target="rlhf_pg.rewards.blame._blamed",
        old="        if len(failed) == most:\n",
        new="        if False:\n",
        killers=("tests/rewards/test_blame.py::test_search_is_bounded",),
    ),
    Mutant(
        name="children-outlive-their-worker",
        mistake="only the worker is killed, and what it has started runs for ever",
        target="rlhf_pg.rewards.workers.Worker.kill",
        old="os.killpg(self._process.pid, signal.SIGKILL)",
        new="self._process.kill()",
        killers=(WORKERS_TEST + "test_children_of_killed_worker_are_killed",),
    ),
    Mutant(
        name="fork-answers-too",
        mistake="a fork that returns from a reward function answers beside its parent",
        target="rlhf_pg.boundary.worker.answer",
        old="        if os.getpid() != process:",
        new="        if False:",
        killers=(WORKERS_TEST + "test_fork_that_returns_does_not_answer",),
    ),
    Mutant(
        name="prints-among-the-answers",
        mistake="what a reward function prints goes into the pipe of its answers",
        target="rlhf_pg.boundary.worker._own_pipes",
        old="    os.dup2(2, 1)\n",
        new="",
        killers=(WORKERS_TEST + "test_output_and_input_of_function_do_not_meet_messages",),
    ),
    Mutant(
        name="all-failed-goes-on",
        mistake="a step in which every call failed trains on nothing and is saved",
        target="rlhf_pg.trainers.reward_log.RewardLog._settle_calls",
        old="        if failed and failed == asked:\n",
        new="        if False:\n",
        killers=("tests/trainers/test_reward_calls.py::test_batch_of_failed_calls_ends_run",),
    ),
    Mutant(
        name="logged-number-in-place-of-own",
        mistake="a number that a reward function logs takes the place of one of the run's own",
        target="rlhf_pg.trainers.reward_log.with_logged",
        old="        if name in metrics:\n",
        new="        if False:\n",
        killers=("tests/trainers/test_reward_calls.py::test_logged_name_of_run_itself_is_refused",),
    ),
    Mutant(
        name="lost-completion-is-trained-on",
        mistake="a completion that no source could score is trained on, as if it were worth 0",
        target="rlhf_pg.trainers.collector.Collector.scored",
        old="rollout.action_mask & known[:, None]",
        new="rollout.action_mask",
        killers=("tests/trainers/test_reward_calls.py::test_lost_completion_leaves_losses",),
    ),
    Mutant(
        name="rewards-wait-for-the-rollout",
        mistake="calls of rewards begin when all completions are sampled",
        target="rlhf_pg.trainers.collector.Collector.sample",
        old="finished=begin if self.rewards.run_beside else None",
        new="finished=None",
        killers=(
            "tests/trainers/test_reward_calls.py::test_rewards_begin_while_others_are_sampled",
        ),
    ),
]
