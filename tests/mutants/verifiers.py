"""Mistakes in ready-made rewards: what counts as an answer, and what is done without a sandbox."""

from tests.mutants import Mutant

ANSWERS = "tests/rewards/verifiers/test_answers.py::"
CODE = "tests/rewards/verifiers/test_code.py::"
MAKING = "tests/rewards/verifiers/test_making.py::"
MATH = "tests/rewards/verifiers/test_math.py::"
SCHEMA = "tests/rewards/verifiers/test_json_schema.py::"
SHAPE = "tests/rewards/verifiers/test_shape.py::"

MUTANTS: list[Mutant] = [
    Mutant(
        name="thinking-is-an-answer",
        mistake="what is said while thinking counts as the answer, if the thinking never ends",
        target="rlhf_pg.rewards.verifiers.verifier.answer_of",
        old='    text = text.partition("<think>")[0]\n',
        new="",
        killers=(MAKING + "test_answer_stands_outside_of_thinking",),
    ),
    Mutant(
        name="tags-need-not-be-all",
        mistake="a format reward is paid for tagged parts with anything between them",
        target="rlhf_pg.rewards.verifiers.shape.tagged",
        old="        text = text.lstrip()\n",
        new="        text = text[max(0, text.find(opening)) :]\n",
        killers=(SHAPE + "test_format",),
    ),
    Mutant(
        name="pattern-without-a-limit",
        mistake="a pattern that backtracks for ages holds up the trainer",
        target="rlhf_pg.rewards.verifiers.patterns.Pattern.last",
        old="self.compiled.finditer(text, timeout=seconds)",
        new="self.compiled.finditer(text[:30])",
        killers=(ANSWERS + "test_catastrophic_pattern_ends_in_any_thread",),
    ),
    Mutant(
        name="schema-may-fetch",
        mistake="a schema in a dataset makes the trainer fetch what it refers to",
        target="rlhf_pg.rewards.verifiers.json_schema._validator",
        old="(plain, registry=referencing.Registry())",
        new="(plain)",
        killers=(SCHEMA + "test_nothing_is_fetched",),
    ),
    Mutant(
        name="formula-beats-the-box",
        mistake="a formula behind the box counts as the answer in place of what is boxed",
        target="rlhf_pg.rewards.verifiers.math_helper.parse",
        old="boxed_match_priority=0, ",
        new="",
        killers=(MATH + "test_math",),
    ),
    Mutant(
        name="scores-of-other-rows",
        mistake="answers shared out to several processes come back in another order",
        target="rlhf_pg.rewards.verifiers.math_answers.Math.judge",
        old="said[i % count][i // count]",
        new="[one for share in said for one in share][i]",
        killers=(MATH + "test_scores_keep_their_rows_over_several_processes",),
    ),
    Mutant(
        name="any-bubblewrap",
        mistake="a bubblewrap that cannot forbid user namespaces is taken",
        target="rlhf_pg.rewards.verifiers.sandbox.check",
        old="    if version < OLDEST:\n",
        new="    if not version:\n",
        killers=(CODE + "test_refuses_an_old_bubblewrap",),
    ),
]
