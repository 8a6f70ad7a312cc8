"""vLLM in this process, for real, against teacher-forced forwards of the policy."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from peft import get_peft_model
from transformers import AutoTokenizer, PreTrainedModel

from rlhf_pg import GRPOTrainer
from rlhf_pg.config import GRPOConfig
from rlhf_pg.report.run_files import read
from rlhf_pg.rollout import Request, SamplingParams
from rlhf_pg.rollout.vllm.in_process import VllmEngine, lacking
from rlhf_pg.tasks import arithmetic
from rlhf_pg.trainers.agreement import DisagreementError
from tests.distributed.launching import PATIENCE, start_two
from tests.rollout.native.test_engine import assert_same, assert_teacher_forced, cut, teacher_forced
from tests.rollout.stats import chi_square_p
from tests.tiny import adapter, stir, tiny_model
from tests.trainers.conftest import digits

pytestmark = pytest.mark.vllm

EOS = [3, 7, 11]
PROMPTS = [[5, 9, 2, 14], [17], [8, 3, 18, 12, 15, 6, 19], [19, 16]]
PARAMS = SamplingParams(temperature=0.8, max_tokens=10)


def model_of(arch: str = "llama", **options: Any) -> PreTrainedModel:
    """vLLM's attention wants heads of at least 32 numbers."""
    wide = {"hidden_size": 128, "vocab_size": 20, "scale": 0.15}
    wide |= {"head_dim": 32} if arch in ("qwen3", "gemma") else {}
    wide |= {"word_embed_proj_dim": 128} if arch == "opt" else {}
    return tiny_model(arch, **(wide | options))


@pytest.fixture(scope="module")
def engine(model_path: str) -> VllmEngine:
    return VllmEngine(model_of(), EOS, AutoTokenizer.from_pretrained(model_path))


@pytest.fixture(autouse=True)
def _as_it_was(request: pytest.FixtureRequest) -> Iterator[None]:
    """The engine's model and ids after every test that changes them."""
    yield
    if "engine" in request.fixturenames:
        own = request.getfixturevalue("engine")
        own.eos_token_ids = EOS
        own.model.load_state_dict(model_of().state_dict())


# ------------------------------------------------------------------------- weights that are taken


@pytest.mark.parametrize("arch", ["qwen2", "qwen3", "gemma", "mistral", "gpt2", "opt"])
def test_logprobs_match_policy_after_every_change(arch, model_path):
    """Heads that are tied to the input are among them (gemma, gpt2, opt)."""
    model = model_of(arch)
    engine = VllmEngine(model, EOS, AutoTokenizer.from_pretrained(model_path))
    for seed in range(3):
        model.load_state_dict(model_of(arch, seed=seed).state_dict())
        assert_teacher_forced(model, PROMPTS, engine.generate(PROMPTS, 8, PARAMS, seed=0))


HEAD = {"target_modules": ["q_proj", "down_proj"], "modules_to_save": ["lm_head"]}


@pytest.mark.parametrize(
    ("tied", "options"), [(True, {}), (False, {}), (False, {"use_dora": True}), (False, HEAD)]
)
def test_adapter_is_merged_and_policy_is_unchanged(tied, options, model_path):
    model = stir(get_peft_model(model_of(tie_word_embeddings=tied), adapter(**options)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5 if parameter.requires_grad else 1.0)
    before = {name: p.clone() for name, p in model.named_parameters()}
    engine = VllmEngine(model, EOS, AutoTokenizer.from_pretrained(model_path))
    assert_teacher_forced(model, PROMPTS, engine.generate(PROMPTS, 8, PARAMS, seed=0))
    assert all(p.equal(before[name]) for name, p in model.named_parameters())


def test_float64_weights_are_sampled_in_float32(model_path):
    model = model_of(dtype=torch.float64)
    engine = VllmEngine(model, EOS, AutoTokenizer.from_pretrained(model_path))
    assert_teacher_forced(model, PROMPTS, engine.generate(PROMPTS, 8, PARAMS, seed=0))


def test_model_without_native_vllm_class_raises(model_path):
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    with pytest.raises(ValueError, match="no BioGptForCausalLM of its own; set rollout_engine"):
        VllmEngine(model_of("biogpt"), EOS, tokenizer)
    assert lacking(model_of("biogpt")) == "vLLM has no BioGptForCausalLM of its own"  # nor now
    for arch in ("llama", "qwen2", "qwen3", "gemma", "mistral", "gpt2", "opt"):
        assert lacking(model_of(arch)) is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="of CPUs")
@pytest.mark.parametrize("arch", ["mixtral", "deepseek_v3"])
def test_experts_on_cpu_raise(arch, model_path):
    """vLLM 0.32 reads their checkpoint rightly, and is nats off once it is given them again."""
    with pytest.raises(
        ValueError, match="cannot replace the weights of experts on a CPU; set rollo"
    ):
        VllmEngine(model_of(arch), EOS, AutoTokenizer.from_pretrained(model_path))


def test_separately_trained_tied_head_raises(model_path):
    model = get_peft_model(model_of(tie_word_embeddings=True), adapter(**HEAD))
    with pytest.raises(ValueError, match=r"modules_to_save\); set rollout_engine"):
        VllmEngine(model, EOS, AutoTokenizer.from_pretrained(model_path))


def test_positions_beyond_memory_are_limited_or_raise(model_path):
    """A gigabyte of keys and values, a kilobyte each."""
    model = model_of(max_position_embeddings=2**21)
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    engine = VllmEngine(model, EOS, tokenizer, longest=2**19)
    assert 2**19 < engine.max_model_length <= 2**20
    assert_teacher_forced(model, PROMPTS, engine.generate(PROMPTS, 8, PARAMS, seed=0))
    del engine
    with pytest.raises(ValueError, match="completion may have 1048577: raise vllm_gpu_memory"):
        VllmEngine(model, EOS, tokenizer, longest=2**20 + 1)


# ------------------------------------------------------------------------------- what is sampled


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.5, max_tokens=2),
        SamplingParams(temperature=0.7, top_k=5, max_tokens=2),
        SamplingParams(temperature=1.0, top_p=0.8, max_tokens=2),
        SamplingParams(temperature=1.0, min_p=0.1, max_tokens=2),
    ],
)
def test_token_frequencies_match_logprobs(engine, params):
    engine.eos_token_ids = []
    n = 2000
    completions = engine.generate([PROMPTS[0]], n, params, seed=0)
    said = {c.tokens[0]: c.logprobs[0] for c in completions}
    probs = torch.tensor(list(said.values())).exp()
    assert probs.sum() == pytest.approx(1, abs=0.01)  # rare ones may never have been said
    counts = torch.tensor([sum(c.tokens[0] == token for c in completions) for token in said])
    assert len(said) > 1
    assert chi_square_p(counts, probs / probs.sum()) > 1e-3


def test_greedy_logprobs_are_at_temperature_one(engine):
    completions = engine.generate(PROMPTS, 1, SamplingParams(temperature=0, max_tokens=10), seed=0)
    assert_teacher_forced(engine.model, PROMPTS, completions, temperature=1.0)
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        exact = teacher_forced(engine.model, prompt, completion.tokens, 1.0)
        assert exact.argmax(-1).tolist() == completion.tokens


@pytest.mark.parametrize("max_tokens", [1, 4, 10])
def test_every_eos_id_ends_completion_and_is_kept(engine, max_tokens):
    engine.eos_token_ids = []
    endless = engine.generate(PROMPTS, 30, PARAMS, seed=0)
    assert all(len(c.tokens) == 10 and c.finish_reason == "length" for c in endless)
    engine.eos_token_ids = EOS
    params = SamplingParams(temperature=0.8, max_tokens=max_tokens)
    ended = engine.generate(PROMPTS, 30, params, seed=0)
    assert_same(ended, [cut(c, EOS, max_tokens) for c in endless])
    last = [c.tokens[-1] for c in ended if len(c.tokens) == max_tokens]
    assert set(last) & set(EOS)  # as the last allowed token too
    assert {c.finish_reason for c in ended} == {"stop", "length"}


def test_stop_strings_end_completion_and_are_kept(engine, model_path):
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    engine.eos_token_ids = []
    free = engine.generate(PROMPTS, 30, PARAMS, seed=0)
    stop = tokenizer.decode(free[0].tokens[1:3])
    stopped = engine.generate(
        PROMPTS, 30, SamplingParams(temperature=0.8, max_tokens=10, stop=stop), seed=0
    )
    assert stopped[0].tokens == free[0].tokens[:3]
    for a, b in zip(stopped, free, strict=True):
        texts = [tokenizer.decode(b.tokens[: i + 1]) for i in range(10)]
        length = next((i + 1 for i, text in enumerate(texts) if stop in text), None)
        assert a.tokens == b.tokens[:length]
        assert a.finish_reason == ("length" if length is None else "stop")


def test_sample_depends_only_on_its_coordinates(engine):
    together = engine.generate(PROMPTS, 3, PARAMS, seed=1, prompt_ids=[4, 0, 9, 2])
    for i, draw in enumerate([4, 0, 9, 2]):
        alone = engine.generate([PROMPTS[i]], 2, PARAMS, seed=1, prompt_ids=[draw])
        assert_same(alone, together[3 * i : 3 * i + 2])
    assert engine.generate(PROMPTS, 3, PARAMS, seed=2) != together
    assert len({tuple(c.tokens) for c in together[:3]}) > 1


def test_requests_may_be_added_and_dropped_midway(engine):
    first = Request(tokens=PROMPTS[0], prompt_index=0, samples=(2, 5))
    expected = engine.generate([PROMPTS[0]], 6, PARAMS, seed=0)
    with engine.weights_synced():
        with engine.session(PARAMS, seed=0) as session:
            session.add(first)
            done = session.step()
            # The second turn of an episode, while others are at their first.
            more = Request(tokens=[*PROMPTS[1], 5], prompt_index=1, position=2, max_tokens=3)
            session.add(more)
            while not session.idle:
                done += session.step()
        said = {(id(f.request), f.sample): f.completion for f in done}
        assert said[id(first), 2].tokens == expected[2].tokens
        assert said[id(first), 5].tokens == expected[5].tokens
        assert len(said[id(more), 0].tokens) <= 3
        with engine.session(PARAMS, seed=0) as session:
            session.add(first)  # and left before it has ended
        with engine.session(PARAMS, seed=0) as session:
            assert session.idle


def test_unsamplable_input_or_model_is_one_error(engine):
    for prompt, said in (([], "prompt 0 is empty"), ([5] * 55, "longest sequence")):
        with pytest.raises(ValueError, match=said):
            engine.generate([prompt], 1, PARAMS, seed=0)
    with pytest.raises(ValueError, match="temperature must be 0 or at least"):
        engine.generate([[5]], 1, SamplingParams(temperature=0.001), seed=0)
    torch.nn.init.constant_(engine.model.model.norm.weight, torch.nan)
    with pytest.raises(FloatingPointError, match="weights have diverged"):
        engine.generate([[5]], 1, PARAMS, seed=0)


# ------------------------------------------------------------------------------------- in a run


def train(output_dir: Any, **options: Any) -> list[dict[str, Any]]:
    task = arithmetic()
    torch.manual_seed(0)
    model, tokenizer = task.new_model()  # whose heads are wide enough for vLLM's kernels
    args = GRPOConfig(
        rollout_engine="vllm",
        max_completion_length=6,
        prompts_per_step=8,
        num_generations=4,
        temperature=0.7,
        learning_rate=5e-3,
        max_steps=4,
        eval_steps=2,
        output_dir=str(output_dir),
        **options,
    )
    GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=digits,
        args=args,
        train_dataset=task.train_dataset,
        eval_dataset=task.eval_dataset.select(range(20)),
    ).train()
    lines = read(output_dir / "metrics.jsonl")
    assert len(lines) == 4
    return lines


@pytest.mark.parametrize("options", [{}, {"use_peft": True}, {"num_mini_batches": 2}])
def test_run_samples_from_current_policy_at_every_step(options, tmp_path):
    for line in train(tmp_path, **options):
        assert line["sampling/sampling_logp_difference/max"] < 1e-4
        assert line["sampling/importance_sampling_ratio/min"] == pytest.approx(1, abs=1e-4)
        assert line["sampling/importance_sampling_ratio/max"] == pytest.approx(1, abs=1e-4)
        assert line["grad_norm"] > 0


def test_processes_start_without_waiting_for_one_that_fails():
    for process in start_two("tests.vllm.two_processes", [[], []]):
        said, _ = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0, said
        assert "sampled" in said
        assert "known: rank 1: 2 GiB" in said


def test_missed_weight_handover_ends_run_in_next_step(tmp_path, monkeypatch):
    load, times = VllmEngine._load, []

    def once(engine: VllmEngine, policy: Any) -> None:
        times.append(1)
        if len(times) == 1:
            load(engine, policy)

    monkeypatch.setattr(VllmEngine, "_load", once)
    with pytest.raises(DisagreementError, match="agreement/kl"):
        train(tmp_path)
    assert len(times) == 2
