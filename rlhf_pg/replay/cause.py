"""The cause of the first difference between two runs, from what differs there and before."""

from collections.abc import Sequence
from dataclasses import dataclass

from rlhf_pg.replay.evidence import LABELS
from rlhf_pg.replay.finding import CONFIG, VERSION, Finding, shown_name
from rlhf_pg.replay.pair import Pair
from rlhf_pg.replay.rounding import TIMING, is_number
from rlhf_pg.replay.suspects import (
    KeyDifference,
    data_differ,
    source_differences,
    version_differences,
)
from rlhf_pg.report.run_files import RunFiles

# Stages whose numbers another version of a library may round otherwise. The ids are among them:
# where two tokens are almost equally likely, the last bit decides.
OF_NUMBERS = {
    *("sampled id", "log-probability", "value", "advantage", "gradient", "weight", "metric"),
}
ROUNDED = 1e-3  # a share by which rounding can change a reward that a library computes


@dataclass(frozen=True)
class Cause:
    """One word for the cause, and what is known about it."""

    word: str
    lines: list[str]


def cause_of(found: Sequence[Finding], keys: Sequence[KeyDifference], pair: Pair) -> Cause:
    """Tell the cause of the first of some findings, which are all of one step.

    Args:
        keys: of the config, that differ.
    """
    first = found[0]
    unseen = not pair.weights_are_same_before(first.step)
    if first.before:
        return Cause(first.stage, ["changed between two steps, and not by an update"])
    able = [key for key in keys if key.may_cause(first, unseen)]
    if able:
        return Cause(CONFIG, [str(key) for key in able])
    versions = version_differences(pair.a, pair.b, first.step)
    if versions and _is_rounding(first):
        return Cause(VERSION, versions)
    if first.stage == "prompt text" and (_same_rows(pair) or _is_moved_prompt(first, pair)):
        said = "the prompts are those of the other run, in another order"
        return Cause("data order", [said, *_about_data(pair)])
    also = [f"versions differ too: {', '.join(versions)}"] if versions else []
    return Cause(first.stage, [*_about(first, found, pair), *also])


def _is_rounding(first: Finding) -> bool:
    """Return whether another version of a library could be why."""
    if first.stage in OF_NUMBERS:
        return True
    share = apart(first)
    return first.stage == "reward" and share is not None and share < ROUNDED


def cause_of_data(pair: Pair) -> str:
    """Return what differs in data of which no step has drawn what differs."""
    rows = _same_rows(pair)
    return CONFIG if rows is None else "data order" if rows else "prompt text"


def _same_rows(pair: Pair) -> bool | None:
    """Return whether data that differ have the same rows, in another order; None if not known."""
    first, second = (run.starts[0].data if run.starts else None for run in (pair.a, pair.b))
    if first is None or second is None or not data_differ(pair.a, pair.b):
        return None
    return first == second


def _is_moved_prompt(first: Finding, pair: Pair) -> bool:
    return first.what == LABELS["prompts"] and _is_moved(pair)


def _is_moved(pair: Pair) -> bool:
    """Return whether rows of the data have each other's prompts, as far as they were drawn.

    A single row that has another's prompt was edited, and is not moved.
    """
    a, b = (_prompts_of_rows(run) for run in (pair.a, pair.b))
    differing = [row for row in a if row in b and a[row] != b[row]]
    if len(differing) < 2:
        return False
    return any(b[row] in a.values() for row in differing)


def _prompts_of_rows(run: RunFiles) -> dict[int, str]:
    """Return the fingerprint of the prompt of each row of the data that a run has drawn."""
    prompts: dict[int, str] = {}
    for trace in run.traces.values():
        n = max(1, trace.num_generations)
        for row, prompt in zip(trace.rows, trace.prompts[::n], strict=False):
            prompts.setdefault(row, str(prompt))
    return prompts


def _about(first: Finding, found: Sequence[Finding], pair: Pair) -> list[str]:
    """Say what the stage of the first finding means, where nothing before it differs."""
    match first.stage:
        case "data order" | "prompt text":
            return _about_data(pair)
        case "sampled id":
            return _about_ids(pair, first)
        case "log-probability" | "value":
            return _about_numbers(pair, first)
        case "reward":
            return _about_reward(pair, first, found)
        case "advantage":
            return [f"the rewards that it is made from are the same{_share(first)}"]
        case "gradient":
            said = "ids, log-probabilities, rewards and advantages are the same"
            return [f"{said}{_share(first)}"]
        case "weight":
            return _about_weights(pair, first)
        case "length":
            last = [max(steps, default=0) for steps in pair.known_steps]
            return [f"A has {last[0]} steps, and B {last[1]}"]
    return []


def _about_data(pair: Pair) -> list[str]:
    said = {
        True: "the data differ: dataset_fingerprint is another",
        False: "the data are the same, by dataset_fingerprint",
        None: "whether the data differ is not known: there is no dataset_fingerprint",
    }
    return [said[data_differ(pair.a, pair.b)]]


def _about_ids(pair: Pair, first: Finding) -> list[str]:
    if not pair.rounding.is_exact:
        before = pair.distance(first.step - 1)
        return [
            "everything before is within rounding"
            f"{f', the step before apart by {before:.1g} of its size' if before else ''}",
            "rounding can do this where two tokens are almost equally likely, and from there on "
            "the runs differ",
        ]
    if not pair.weights_are_same_before(first.step):
        return ["the prompt is the same, and the weights are not known"]
    same = "the same prompt, and weights that were the same before, gave another token"
    return [same, f"rounding can do this: {TIMING}"] if pair.rounding.sampled else [same]


def _about_numbers(pair: Pair, first: Finding) -> list[str]:
    if not pair.weights_are_same_before(first.step):
        return [f"the ids are the same{_share(first)}"]
    left = "that the runs began with" if first.step == 1 else f"that step {first.step - 1} left"
    return [f"the weights {left} and the same ids gave another number{_share(first)}"]


def _share(first: Finding) -> str:
    """Say how far two numbers are apart, and whether rounding does that."""
    share = apart(first)
    if share is None:
        return ""
    why = ", as another rounding of a library or device would be" if share < ROUNDED else ""
    return f"; the numbers are apart by {share:.1g} of their size{why}"


def _about_reward(pair: Pair, first: Finding, found: Sequence[Finding]) -> list[str]:
    name = first.what.removeprefix("rewards/").removesuffix("/mean").removesuffix("/std")
    lines = []
    if first.row is not None:
        lines.append(f"{shown_name(name)} gave another score for the same completion")
    elif pair.a.traces.get(first.step) and pair.b.traces.get(first.step):
        lines.append("the scores of the single completions are the same")
    if (step := first.step) and (said := source_differences(pair.a, pair.b, step).get(name)):
        return [*lines, said]
    sources = [start.rewards.get(name) for run in (pair.a, pair.b) for start in run.starts[:1]]
    if len(sources) == 2 and None not in sources:
        lines.append(f"the source of {shown_name(name)} is the same")
    return lines


def _about_weights(pair: Pair, first: Finding) -> list[str]:
    if first.step == 0:
        return ["the runs began with other weights"]
    if first.note:  # it says what has happened to a file
        return []
    a, b = (lines.get(first.step) for lines in pair.metrics)
    if a is None or b is None:
        return []
    return ["loss and gradient norm are the same: changed otherwise than by the update"]


def apart(finding: Finding) -> float | None:
    """Return how far two numbers are apart, as a share of the larger; None if they are none."""
    a, b = finding.a, finding.b
    if not (is_number(a) and is_number(b)) or a == b:
        return None
    return float(abs(a - b) / max(abs(a), abs(b)))
