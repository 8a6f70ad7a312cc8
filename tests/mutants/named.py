"""Mistakes in rewards by name: users' files, servers of rewards, judges."""

from tests.mutants import Mutant

MODULES_TEST = "tests/boundary/test_user_modules.py::"
REMOTE_TEST = "tests/rewards/test_remote.py::"
JUDGE_TEST = "tests/rewards/test_judge.py::"
NAMED_TEST = "tests/rewards/test_named.py::"

MUTANTS = [
    Mutant(
        name="helpers-of-the-other-file",
        mistake="a reward file imports the `helpers` of a file in another directory",
        target="rlhf_pg.boundary.user_files._Loader.exec_module",
        old="        _forget_namesakes(directory)\n",
        new="",
        killers=(MODULES_TEST + "test_namesakes_in_two_directories_do_not_meet",),
    ),
    Mutant(
        name="sibling-in-place-of-the-standard-library",
        mistake="a file beside a reward file takes the place of a module of Python's own",
        target="rlhf_pg.boundary.user_files.UserFiles.find_spec",
        old="        if path is not None or name in sys.stdlib_module_names:\n",
        new="        if path is not None:\n",
        killers=(MODULES_TEST + "test_sibling_does_not_shadow_standard_library",),
    ),
    Mutant(
        name="completions-sent-elsewhere",
        mistake="completions and the key go to whatever host a server redirects to",
        target="rlhf_pg.boundary.http._stays",
        old='("scheme", "host", "port")',
        new='("scheme",)',
        killers=(REMOTE_TEST + "test_redirect_to_another_host_is_not_followed",),
    ),
    Mutant(
        name="key-cut-before-it-is-hidden",
        mistake="an error is cut at its longest in the midst of a key, which is then not found",
        target="rlhf_pg.boundary.http.Asker._quoted",
        old='quoted(self._hidden(said.decode(errors="replace").strip()))',
        new='self._hidden(quoted(said.decode(errors="replace").strip()))',
        killers=(REMOTE_TEST + "test_key_is_sent_and_hidden_when_server_repeats_it",),
    ),
    Mutant(
        name="limit-for-each-call",
        mistake="every call has its own limit on concurrent requests, so several exceed it",
        target="rlhf_pg.boundary.http.Asker._mine",
        old="        if self._kept is None or self._kept[0] is not loop:\n",
        new="        if True:\n",
        killers=(REMOTE_TEST + "test_limit_on_concurrent_requests_holds_across_calls",),
    ),
    Mutant(
        name="first-verdict-counts",
        mistake="a judge that quotes the completion's own verdict before its own is misread",
        target="rlhf_pg.rewards.judge._last_score",
        old="reversed(starts[-MOST_OBJECTS:])",
        new="starts[-MOST_OBJECTS:]",
        killers=(JUDGE_TEST + "test_verdict_is_mapped_to_unit_interval",),
    ),
    Mutant(
        name="marks-that-can-be-learnt",
        mistake="the marks around a completion are the same every time, so it can close its part",
        target="rlhf_pg.rewards.judge.Judge._body",
        old="_digest([self.rubric, parts])[:16]",
        new="_digest([self.rubric])[:16]",
        killers=(JUDGE_TEST + "test_completion_stands_as_data_between_marks_that_it_cannot_guess",),
    ),
    Mutant(
        name="verdict-of-another-pattern",
        mistake="a verdict that was read by another pattern is taken from the cache",
        target="rlhf_pg.rewards.judge.Judge._key",
        old=", self.pattern and self.pattern.pattern])",
        new="])",
        killers=(JUDGE_TEST + "test_resumed_run_asks_nothing_twice",),
    ),
    Mutant(
        name="usual-key-for-everyone",
        mistake="the key of OpenAI is sent to any address that a recipe names",
        target="rlhf_pg.rewards.judge._usual_key",
        old="    return OPENAI_KEY if is_loopback(host) and",
        new="    return OPENAI_KEY if",
        killers=(JUDGE_TEST + "test_usual_key_goes_to_no_other_host_unless_named",),
    ),
    Mutant(
        name="options-of-a-function-lost",
        mistake="the options of a function are checked and then forgotten",
        target="rlhf_pg.rewards.named._function",
        old="functools.partial(function, **options)",
        new="functools.partial(function)",
        killers=(NAMED_TEST + "test_options_of_function_are_given_to_it_at_every_call",),
    ),
]
