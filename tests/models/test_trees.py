"""Rows that are trees, against a forward pass of its own for every path, in float64."""

import random
from dataclasses import dataclass, replace

import pytest
import torch

from rlhf_pg.data.batch import Batch
from rlhf_pg.models import prefix_tree
from rlhf_pg.models.critic import ActorCritic, Critic, ValueHead
from rlhf_pg.models.packing import lay_out_packed, lay_out_padded
from rlhf_pg.models.policy import Policy
from tests.models.test_policy import Bigram, table
from tests.rows import batch_of as rows_to_batch
from tests.tiny import stir, tiny_model


@dataclass
class Row:
    """`offsets` as in `Batch`; the policy chose the tokens with a name, which come in any order."""

    prompt: list[int]
    tokens: list[int]
    offsets: list[int]
    names: list[int | None]
    group: int = 0

    def path(self, t: int) -> list[int]:
        """The tokens before token t of the completion, from its root on."""
        ids, at, offset = [], t, self.offsets[t]
        while offset:
            at -= offset
            ids.append(self.tokens[at] if at >= 0 else self.prompt[at])
            first = at == -len(self.prompt)
            offset = 0 if first else self.offsets[at] if at >= 0 else 1
        return ids[::-1]


# Branches at the end of the prompt, in a turn, in its middle, in the prompt, and with no shared
# beginning; a branch of a branch, and one that follows the token before it all the same.
BY_HAND = Row(
    prompt=[5, 9, 2, 31],
    tokens=[7, 3, 8, 11, 19, 6, 35, 36, 4, 1, 22, 21, 14, 15],
    offsets=[1, 1, 1, 4, 1, 5, 9, 1, 3, 0, 1, 7, 1, 15],
    names=[0, 1, None, 2, 3, 4, None, 5, 6, None, 7, 8, 9, 10],
)


def random_row(rng: random.Random, prompt: list[int], group: int) -> Row:
    offsets = []
    for t in range(rng.randrange(1, 14)):
        kind = rng.random()
        jump = 0 if kind > 0.93 else rng.randrange(1, t + len(prompt) + 1)
        offsets.append(1 if kind < 0.6 else jump)
    names = [t if offset and rng.random() < 0.7 else None for t, offset in enumerate(offsets)]
    return Row(prompt, [rng.randrange(40) for _ in offsets], offsets, names, group)


def some_rows(seed: int) -> list[Row]:
    """Groups with a prompt each; a row has no action, and another is a sequence."""
    rng = random.Random(seed)
    rows = [BY_HAND, replace(BY_HAND, tokens=BY_HAND.tokens[::-1], names=[None] * 14)]
    for group in range(1, 4):
        prompt = [rng.randrange(40) for _ in range(rng.randrange(1, 6))]
        rows += [random_row(rng, prompt, group) for _ in range(rng.randrange(1, 4))]
    rows[-1].offsets = [1] * len(rows[-1].tokens)
    return named(rows)


def named(rows: list[Row]) -> list[Row]:
    """Every action has a name of its own."""
    new = iter(range(1000))
    return [replace(x, names=[None if n is None else next(new) for n in x.names]) for x in rows]


def batch_of(rows: list[Row]) -> Batch:
    return rows_to_batch(
        [row.prompt for row in rows],
        [row.tokens for row in rows],
        groups=[row.group for row in rows],
        actions=[[name is not None for name in row.names] for row in rows],
        offsets=[row.offsets for row in rows],
    )


def exact(arch: str, **options):
    """A model that computes in float64 throughout."""
    model = tiny_model(arch, dtype=torch.float64, **options)
    for norm in (m for m in model.modules() if hasattr(m, "variance_epsilon")):
        norm.forward = lambda x, norm=norm: (
            norm.weight * x * (x.square().mean(-1, keepdim=True) + norm.variance_epsilon).rsqrt()
        )
    return model


def actor_critic(arch: str, shared: bool) -> ActorCritic:
    own = None if shared else exact(arch, seed=1).base_model
    return ActorCritic(Policy(exact(arch)), Critic(own, stir(ValueHead(32, torch.float64))))


def loss_of(found) -> torch.Tensor:
    """Log-probabilities, values and end values, weighted by the names of actions and rows."""
    terms = [x * (1 + 0.03 * name - 0.5 * i) for name in found for i, x in enumerate(found[name])]
    return torch.stack(terms).sum()


def plain(module: ActorCritic, rows: list[Row]):
    """Log-probability and value of each action by name, and end values by minus the row."""
    model, critic, found = module.policy.model, module.critic, {}
    trunk = model.base_model if critic.shares_trunk else critic.model

    def value(ids):
        hidden = trunk(torch.tensor([ids]), use_cache=False).last_hidden_state
        return critic.head(hidden[0, -1:])[0]

    for i, row in enumerate(rows):
        last = row.prompt
        for t, name in enumerate(row.names):
            if name is not None:
                path = row.path(t)
                logits = model(torch.tensor([path]), use_cache=False).logits[0, -1]
                found[name] = logits.log_softmax(-1)[row.tokens[t]], value(path)
                last = [*path, row.tokens[t]]
        found[-i - 1] = (value(last),)
    return found


def computed(module: ActorCritic, rows: list[Row], budget: int):
    """The same from a batch, in micro-batches of this many tokens."""
    batch, found = batch_of(rows).with_counts(), {}
    for part in batch.micro_batches(budget, module.policy.window):
        out = module(batch.select(part))
        for place, i in enumerate(part.tolist()):
            for t, name in enumerate(rows[i].names):
                if name is not None:
                    found[name] = out.logprobs[place, t], out.values[place, t]
            found[-i - 1] = (out.end_values[place],)
    return found


def gradient(module, loss):
    grads = torch.autograd.grad(loss, list(module.parameters()), allow_unused=True)
    return torch.cat([grad.flatten() for grad in grads if grad is not None])


def assert_close(actual, expected):
    assert expected.norm() > 1
    assert (actual - expected).norm() <= 1e-10 * expected.norm()


@pytest.mark.parametrize(
    ("arch", "shared", "seed"),
    [("gpt2", True, 0), ("gpt2", False, 1), ("llama", True, 0), ("qwen2", False, 2)],
)
def test_tree_scores_and_gradients_match_single_paths(arch, shared, seed):
    module, rows = actor_critic(arch, shared), some_rows(seed)
    numbers = plain(module, rows)
    expected = gradient(module, loss_of(numbers))
    for packs in (True, False):
        if not packs:
            module.policy.window = module.critic.window = 0.0
        for budget in (1, 40, 1000):
            found = computed(module, rows, budget)
            assert found.keys() == numbers.keys()
            for name, number in numbers.items():
                torch.testing.assert_close(found[name], number, rtol=1e-10, atol=1e-10)
            assert_close(gradient(module, loss_of(found)), expected)


@pytest.mark.parametrize("repeated", [2, 1000])
@pytest.mark.parametrize("arch", ["qwen3_5_text", "gpt_oss"])
def test_branches_continue_the_states_of_their_paths(monkeypatch, arch, repeated):
    """And see the window and the sinks of their own; norms compute in float32."""
    monkeypatch.setattr(prefix_tree, "REPEATED", repeated)
    head = stir(ValueHead(32, torch.float32))
    module, rows = ActorCritic(Policy(tiny_model(arch)), Critic(None, head)), some_rows(0)
    numbers = plain(module, rows)
    found = computed(module, rows, 1000)
    assert module.policy.window
    for name, number in numbers.items():
        torch.testing.assert_close(found[name], number, rtol=1e-4, atol=1e-4)
    expected = gradient(module, loss_of(numbers))
    assert (gradient(module, loss_of(found)) - expected).norm() <= 1e-5 * expected.norm()


def reordered(row: Row, rng: random.Random) -> Row:
    """The same tree in another order of creation."""
    parents = [t - offset if offset else None for t, offset in enumerate(row.offsets)]
    places = {column: column for column in (None, *range(-len(row.prompt), 0))}
    for place in range(len(parents)):
        ready = [t for t, parent in enumerate(parents) if t not in places and parent in places]
        places[rng.choice(ready)] = place
    order = sorted(range(len(parents)), key=places.get)
    return Row(
        row.prompt,
        tokens=[row.tokens[t] for t in order],
        offsets=[0 if parents[t] is None else places[t] - places[parents[t]] for t in order],
        names=[row.names[t] for t in order],
    )


def begun_earlier(row: Row) -> Row:
    """Only the first token of the prompt is the prompt; the rest is written by the agent."""
    (first, *rest), told = row.prompt, len(row.prompt) - 1
    return Row([first], rest + row.tokens, [1] * told + row.offsets, [None] * told + row.names)


def sent_again(row: Row) -> Row:
    """Before each action the whole history is sent anew, and shares no token with the others."""
    sent = Row(row.prompt, [], [], [])
    for one in apart(row):
        sent.tokens += one.prompt + one.tokens
        sent.offsets += [0, *one.offsets]
        sent.names += [None, *one.names]
    return sent


def apart(row: Row) -> list[Row]:
    """A sequence for each action."""
    sequences = []
    for t, name in enumerate(row.names):
        if name is not None:
            first, *rest = row.path(t)
            names = [None] * len(rest) + [name]
            sequences.append(Row([first], [*rest, row.tokens[t]], [1] * len(names), names))
    return sequences


def test_gradient_is_the_same_however_the_harness_talks():
    module, rng = actor_critic("gpt2", shared=True), random.Random(0)
    rows = named([BY_HAND, *(random_row(rng, BY_HAND.prompt, 0) for _ in range(2))])
    ways = [[reordered(row, rng) for row in rows] for _ in range(9)]
    ways += [[begun_earlier(row) for row in way] for way in [rows, *ways]]
    ways += [[sent_again(row) for row in rows], [one for row in rows for one in apart(row)]]

    def of(way):
        found = computed(module, way, 1000)
        return gradient(module, loss_of({name: x for name, x in found.items() if name >= 0}))

    for way in ways:
        assert_close(of(way), of(rows))


# The prompt 10 11 12; 15 branches off in it, 16 after 13, 17 follows 15, and 18 nothing.
SMALL = Row([10, 11, 12], list(range(13, 20)), [1, 1, 4, 3, 2, 0, 1], [0, 1, 2, 3, None, None, 4])


def test_packed_tree_has_every_token_once_depth_first():
    inputs, states = lay_out_packed(batch_of([SMALL, replace(SMALL, tokens=[5] * 7)]))
    ids = [10, 11, 12, 13, 14, 16, 5, 5, 5, 15, 17, 5, 5, 18, 19, 5, 5]
    assert inputs["input_ids"].tolist() == [ids]
    depths = [0, 1, 2, 3, 4, 4, 3, 4, 4, 2, 3, 2, 3, 0, 1, 0, 1]
    assert inputs["position_ids"].tolist() == [depths]
    followed = [True] * 5 + [False] + [True] * 2
    expected = [[2, 3, 1, 3, 9, 13, 14], [2, 6, 1, 6, 11, 15, 16]]
    assert states[:, followed].tolist() == expected


def test_padded_tree_has_a_row_for_each_path():
    inputs, states = lay_out_padded(batch_of([SMALL, replace(SMALL, tokens=[5] * 7)]))
    paths = [[10, 11, 12, 13, 14], [10, 11, 12, 13, 16], [10, 11, 15, 17], [18, 19]]
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    assert mask[:4].sum(1).tolist() == [5, 5, 4, 2]
    assert [row[there > 0].tolist() for row, there in zip(ids[:4], mask[:4], strict=True)] == paths
    assert states[0, [0, 1, 2, 3, 4, 6, 7]].tolist() == [2, 3, 11, 8, 12, 15, 16]


def test_budget_counts_tokens_and_window_depth():
    batch = batch_of([SMALL, replace(SMALL, tokens=[5] * 7)])
    assert batch.longest == 5
    limits = [(17, 5), (16, 5), (40, 4), (39, 4)]  # 3 + 7 + 7 packed, 8 paths of 5 padded
    assert [len(batch.micro_batches(*limit)) for limit in limits] == [1, 2, 1, 2]


def test_policy_without_linear_head_refuses_trees():
    with pytest.raises(ValueError, match="Bigram"):
        Policy(Bigram(table()))(batch_of([SMALL]))
