"""A check, once at the start of a run, that a model gives a row the same numbers in every way.

Sampling, scoring and updates compute a row alone or beside others, padded or packed, token by token
or at once. Some architectures then compute different functions, and the loss would not show it.
What can be avoided is: such rows are not packed, not padded, or sampled in the slow way. The rest
is refused.
"""

import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from itertools import cycle, islice
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
import transformers
from torch import Tensor, nn
from transformers import PretrainedConfig

from rlhf_pg.data.records import Rollout
from rlhf_pg.models import Policy
from rlhf_pg.rollout import Completion, NativeEngine, Request, RolloutEngine, SamplingParams
from rlhf_pg.runtime import Runtime

FILE = "model_check.json"
# Nats between two ways to compute a row, the mean over its tokens, that rounding explains. Tiny
# models in float32 are up to 5e-6 apart, larger ones more; bfloat16 keeps 8 binary digits.
LIMITS = {torch.float64: 1e-3, torch.float32: 1e-3, torch.bfloat16: 0.1}
DRAWN = 4  # tokens of each row that are sampled

Score: TypeAlias = Callable[[Rollout], Tensor]  # (B,T) log-probabilities, as the update has them
logger = logging.getLogger(__name__)


class Verdict(NamedTuple):
    """The ways in which the rows of a run may be computed."""

    packs: bool = True
    pads: bool = True
    together: bool = True  # rows of one length, where nothing is padded
    samples_fast: bool = True
    samples_padded: bool = True
    samples_together: bool = True

    @property
    def of_rows(self) -> tuple[bool, bool, bool]:
        """The part of the verdict that concerns scoring and updates."""
        return self.packs, self.pads, self.together

    def text(self) -> str:
        """Say what is done differently, and why."""
        ways = {
            "packing (so rows are padded)": self.packs,
            "padding (so only rows of one length are batched)": self.pads,
            "the other rows of a batch (so rows are computed one by one)": self.together,
            "fast sampling (so generate samples)": self.samples_fast,
            "padding in generate (so only prompts of one length are batched)": self.samples_padded,
            "other rows in generate (so completions are sampled one by one)": self.samples_together,
        }
        found = ", ".join(way for way, holds in ways.items() if not holds)
        return f"model_check: this model's log-probabilities change with {found}"

    def apply(self, engine: RolloutEngine) -> None:
        """Make the engine follow the verdict."""
        if isinstance(engine, NativeEngine):
            engine.pads, engine.together = self.samples_padded, self.samples_together
            if not self.samples_fast:
                engine.refused = "the model check found its numbers to differ"


class Examined(NamedTuple):
    """A model under examination, and how to run it.

    Args:
        module: with the policy in it, whose mode `score` runs in.
        tokens: of which rows are made.
        lengths: of the longest prompt and of the longest completion.
        agreed: whether something holds on any process; collective.
    """

    policy: Policy
    module: nn.Module
    score: Score
    engine: RolloutEngine
    tokens: Sequence[int]
    lengths: tuple[int, int]
    dtype: torch.dtype = torch.float32
    agreed: Callable[[bool], bool] = bool
    device: torch.device | str = "cpu"

    def differ(self, found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
        """Tell whether any row differs from what is expected by more than rounding."""
        apart = [(a - b).abs().mean() for a, b in zip(found, expected, strict=True) if len(b)]
        return self.agreed(not all(bool(x <= LIMITS[self.dtype]) for x in apart))


@torch.no_grad()
def examine(
    run: Examined, updates_evaluate: bool = True, compares_rows: bool = False
) -> Verdict | None:
    """Find out how the rows of a run may be computed; None if the model returns NaN or infinity.

    Args:
        updates_evaluate: updates are to be without dropout.
        compares_rows: a loss looks at rows of several lengths together.

    Raises:
        ValueError: the model cannot be trained so that what is scored is what was sampled.
    """
    window, (prompt, completion) = run.policy.window, run.lengths
    batch = rows_of(run, prompt, completion)
    with packing(run.policy, 0.0):
        alone = by_row(run.score, batch)
        if run.agreed(not all(bool(row.isfinite().all()) for row in alone)):
            return None  # whoever samples says so
        if updates_evaluate:
            _check_mode(run, batch, alone)
        unlike = batch.select(torch.tensor([0, 2]))  # the longest, and one that is short
        pads = not run.differ(_rows(run.score(unlike), unlike), [alone[0], alone[2]])
        together = pads or _together(run)
    packs = window > 0 and _packs(run, batch, alone)
    if not pads and compares_rows and (not packs or window < prompt + completion):
        raise ValueError(
            f"{_name(run)} gives a row other numbers beside a longer one, and this policy_loss "
            "needs rows of several lengths together: choose another policy_loss"
        )
    verdict = Verdict(
        packs or not window, pads, together, samples_padded=pads, samples_together=together
    )
    with packing(run.policy, window if packs else 0.0):
        return _sampled_right(run, verdict)


def _check_mode(run: Examined, batch: Rollout, alone: Sequence[Tensor]) -> None:
    shortest = batch.select(torch.tensor([batch.num_rows - 1]))
    try:
        run.module.train()
        trained = by_row(run.score, shortest)
    finally:
        run.module.eval()
    if run.differ(trained, alone[-1:]):
        _refuse(
            run,
            f"{_name(run)} computes other log-probabilities in updates than in scoring: some part "
            "of it does something else in train mode: turn gradient_checkpointing off",
        )


def _packs(run: Examined, batch: Rollout, alone: Sequence[Tensor]) -> bool:
    """Tell whether packed rows equal rows alone, at the longest lengths that are packed."""
    window = run.policy.window
    if sum(run.lengths) > window:
        prompt = max(1, int(window) // 2)
        batch = rows_of(run, prompt, max(1, int(window) - prompt))
        with packing(run.policy, 0.0):
            alone = by_row(run.score, batch)
    return not run.differ(_rows(run.score(batch), batch), alone)


def _together(run: Examined) -> bool:
    """Tell whether rows of equal length are the same together as alone."""
    one = max(1, run.lengths[0] // 3)
    prompts = [_taken(run.tokens, one, skip) for skip in range(2)]
    batch = _rollout(run, prompts, prompts[::-1])
    return not run.differ(_rows(run.score(batch), batch), by_row(run.score, batch))


def _sampled_right(run: Examined, verdict: Verdict) -> Verdict:
    """Find the fastest way to sample whose numbers are those of the policy."""
    engine = run.engine
    if not isinstance(engine, NativeEngine):  # what another samples is corrected for in the loss
        return verdict
    before = engine.pads, engine.together, engine.refused
    slow = verdict._replace(samples_fast=engine.unsupported_reason(sum(run.lengths)) is not None)
    try:
        alike = slow._replace(samples_padded=False)
        for tried in (verdict, slow, alike, alike._replace(samples_together=False)):
            tried.apply(engine)
            drawn, said = sampled(engine, run)
            if not run.differ(said, by_row(run.score, drawn)):
                return tried
    finally:
        engine.pads, engine.together, engine.refused = before
    _refuse(
        run,
        f"{_name(run)} samples from another distribution than it scores, token by token and at "
        "once: what its cache keeps is not what a whole row sees. It cannot be trained here with "
        "rollout_engine native (model_check: false trains it all the same)",
    )
    return verdict


def _refuse(run: Examined, why: str) -> None:
    """Raise an error; in bfloat16, where so few tokens may be off by rounding, only warn."""
    if run.dtype is not torch.bfloat16:
        raise ValueError(why)
    logger.warning("%s", why)


def sampled(engine: NativeEngine, run: Examined) -> tuple[Rollout, list[Tensor]]:
    """Sample a few tokens after a long prompt, twice, and after a short one.

    Returns:
        The rows, and the log-probabilities at sampling.
    """
    total = sum(run.lengths)
    count = min(DRAWN, run.lengths[1])
    prompts = [_taken(run.tokens, total - count), _taken(run.tokens, max(1, run.lengths[0] // 3))]
    params = SamplingParams(temperature=run.policy.temperature, max_tokens=run.lengths[1])
    completions: dict[tuple[int, int], Completion] = {}
    with engine.session(params, 0) as session:
        for index, tokens in enumerate(prompts):
            samples = range(2 - index)
            session.add(
                Request(tokens=tokens, prompt_index=index, samples=samples, max_tokens=count)
            )
        while not session.idle:
            ended = session.step()
            completions |= {(f.request.prompt_index, f.sample): f.completion for f in ended}
    drawn = [completions[key] for key in sorted(completions)]
    batch = _rollout(run, [prompts[0], *prompts], [c.tokens for c in drawn])
    return batch, [torch.tensor(c.logprobs, device=batch.groups.device) for c in drawn]


def rows_of(run: Examined, prompt: int, completion: int) -> Rollout:
    """Make two completions of a long prompt, one of them short, and one short row."""
    short = [max(1, length // 3) for length in (prompt, completion)]
    prompts = [_taken(run.tokens, length) for length in (prompt, prompt, short[0])]
    lengths = (completion, short[1], short[1])
    # Completions that begin alike would hide a row that sees its sibling.
    return _rollout(run, prompts, [_taken(run.tokens, n, skip) for skip, n in enumerate(lengths)])


def _taken(tokens: Sequence[int], count: int, skip: int = 0) -> list[int]:
    return list(islice(cycle(tokens), skip, skip + count))


def _rollout(run: Examined, prompts: list[list[int]], completions: list[list[int]]) -> Rollout:
    return Rollout.from_tokens(
        prompts=prompts,
        completions=completions,
        logprobs=[[0.0] * len(tokens) for tokens in completions],
        truncated=[False] * len(completions),
        groups=[prompts.index(prompt) for prompt in prompts],
        pad_token_id=run.tokens[0],
        device=run.device,
    ).counted()


def by_row(score: Score, batch: Rollout) -> list[Tensor]:
    """Compute the log-probabilities of every row alone."""
    rows = (batch.select(torch.tensor([i])) for i in range(batch.num_rows))
    return [row for alone in rows for row in _rows(score(alone), alone)]


def _rows(logprobs: Tensor, batch: Rollout) -> list[Tensor]:
    """Split log-probabilities into rows without padding."""
    return [row[mask] for row, mask in zip(logprobs, batch.action_mask, strict=True)]


@contextmanager
def packing(policy: Policy, window: float) -> Iterator[None]:
    """Pack rows of at most `window` tokens inside this context."""
    before = policy.window
    policy.window = window
    try:
        yield
    finally:
        policy.window = before


def _name(run: Examined) -> str:
    return f"the model ({getattr(run.policy.model, 'config', run.policy.model).model_type})"


def check_model(
    run: Examined,
    runtime: Runtime,
    key: str,
    path: Path | None,
    sampling: Callable[[], AbstractContextManager[None]],
    updates_evaluate: bool = True,
    compares_rows: bool = False,
) -> Verdict | None:
    """Examine the model of a run (`examine`); all processes share the verdict. Collective.

    Args:
        key: of all that the verdict depends on.
        path: where it is written to, and where what a run left there under the same key is
            believed; None: nowhere.
        sampling: what the native engine samples in.

    Raises:
        ValueError: see `examine`.
    """
    speaks = runtime.is_main and path is not None
    known = runtime.all_reduce_max(_known(path, key) if path is not None and speaks else 0)
    if known:
        return Verdict(*(bool(known >> bit & 1) for bit in range(len(Verdict._fields))))
    native = isinstance(run.engine, NativeEngine)
    with sampling() if native else nullcontext():  # no other samples here
        verdict = examine(run, updates_evaluate, compares_rows)
    if path is not None and speaks and verdict is not None:
        with suppress(OSError):  # then the next run looks again
            path.write_text(json.dumps({"key": key} | verdict._asdict()))
    if runtime.is_main and verdict is not None and verdict != Verdict():
        logger.warning("%s", verdict.text())
    return verdict


def _known(path: Path, key: str) -> int:
    """Return the bits of a stored verdict on this model, and one above them; 0 if none is there."""
    try:
        found = json.loads(path.read_text())
        bits = [bool(found[name]) for name in Verdict._fields]
        same = found["key"] == key
    except (OSError, ValueError, KeyError, TypeError):
        return 0
    return sum(bit << i for i, bit in enumerate([*bits, True])) if same else 0


def key_of(config: PretrainedConfig, *others: Any) -> str:
    """Hash everything that a verdict depends on: the model's config, and `others`."""
    versions = torch.__version__, transformers.__version__
    everything = repr((str(config), config._attn_implementation, versions, *others))
    return hashlib.sha256(everything.encode()).hexdigest()
