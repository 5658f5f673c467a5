"""The critic: it warms up and learns by itself; one that starts as the reward model values responses as that scores them."""

from pathlib import Path

import pytest
import torch

from cases import often
from heedful import CheckpointError, ConfigError, make_tiny_model, train_ppo
from heedful.algorithms.online.critic import load_critic
from heedful.algorithms.online.start import start
from heedful.data.batches import collate
from heedful.models import (
    add_adapters,
    load_causal_lm,
    load_policy,
    load_reward_model,
    load_tokenizer,
    load_value_model,
    save_reward_model,
)
from heedful.models.save import VALUE_HEAD, load_tensors
from heedful.models.value_model import value_model_from

CPU = torch.device("cpu")
CRITICS = pytest.mark.parametrize("critic", ["shared", "separate"])
DIALOGUES = [("你好吗", "我很好，谢谢！"), ("2+2?", "4"), ("name a colour, please", "blue")]


@pytest.fixture
def reward_folder(tmp_path):
    """A reward model with random trunk and head, made from a decoder of its own."""

    def make(architecture, name="rm"):
        base, folder = tmp_path / f"{name}-base", tmp_path / name
        make_tiny_model(architecture, base, hidden_size=32, num_layers=2, max_length=128, initializer_range=0.2, seed=9)
        tokenizer = load_tokenizer(str(base))
        model = load_reward_model(str(base), tokenizer, device=CPU, compute_dtype=torch.float32, seed=1)
        save_reward_model(model, tokenizer, folder)
        return str(folder)

    return make


def loaded(folder):
    return load_reward_model(folder, load_tokenizer(folder), device=CPU, compute_dtype=torch.float32)


def values_after(critic, folder, texts):
    """The value of the state behind each whole response: that before one more token, whatever it is."""
    tokenizer = load_tokenizer(folder)
    encoded = [(tokenizer(p).input_ids, [*tokenizer(r).input_ids, 2]) for p, r in texts]
    batch = collate([p for p, _ in encoded], [[*r, 99] for _, r in encoded], pad_id=0)
    values = critic(batch.ids, batch.attention_mask, batch.response_mask)
    ends = [len(r) for _, r in encoded]
    return torch.stack([values[row, end] for row, end in enumerate(ends)]).detach(), [p + r for p, r in encoded]


@pytest.mark.parametrize("architecture", ["gpt2", "qwen3"])
def test_before_training_the_value_after_a_response_is_its_score(reward_folder, architecture):
    """Against plain transformers on single rows, with an offset that the score takes off."""
    folder = reward_folder(architecture)
    reward_model = loaded(folder)
    reward_model.offset = 0.75
    values, rows = values_after(value_model_from(reward_model, folder), folder, DIALOGUES)
    with torch.no_grad():
        logits = [reward_model.classifier(input_ids=torch.tensor([row])).logits.item() for row in rows]
    assert max(logits) - min(logits) > 0.01, "equal scores would prove nothing"
    torch.testing.assert_close(values, torch.tensor(logits) - 0.75, rtol=1e-5, atol=1e-5)


def test_an_encoder_has_no_head_to_start_from(tiny):
    with pytest.raises(CheckpointError, match="no linear head named score"):
        value_model_from(loaded(tiny("deberta-v2")), "rm")


@pytest.fixture
def from_reward(config):
    """``from_reward(*rewards, **changes)``: settings of PPO whose critic starts as a reward model."""

    def make(*rewards, **changes):
        sizes = {"rollout_batch_size": 4, "minibatch_size": 4, "samples_per_prompt": 1, "max_new_tokens": 8}
        return config(rewards=rewards, critic="reward", **(sizes | changes))

    return make


def critic_of(settings):
    machine = {"device": CPU, "compute_dtype": torch.float32}
    return load_critic(settings, load_policy(settings.model, **machine), **machine)


def test_the_first_reward_model_is_the_critic(from_reward, reward_folder):
    """One that hardly learns is saved as it began: the head times the reward's weight over the scores' deviation, their
    mean taken off."""
    first, second = reward_folder("gpt2", "first"), reward_folder("qwen3", "second")
    weights = {"reward_weights": (7.0, -0.5, 3.0), "score_norm_samples": 16, "value_learning_rate": 1e-12}
    settings = from_reward("rule:digits", f"model:{first}", f"model:{second}", steps=1, **weights)
    norm = train_ppo(settings)["score_norm"]
    assert norm["std"] != 1.0
    saved = settings.output / "final" / "value_model"
    expected, head = value_model_from(loaded(first), first).state_dict(), load_tensors(saved / VALUE_HEAD)
    torch.testing.assert_close(head["weight"], -0.5 * expected["value_head.weight"] / norm["std"])
    assert head["bias"].item() == pytest.approx(-norm["mean"] / norm["std"], rel=1e-5)
    critic = load_value_model(str(saved), device=CPU, compute_dtype=torch.float32).state_dict()
    assert all(torch.allclose(critic[name], expected[name]) for name in expected if "trunk" in name)
    assert all(parameter.requires_grad for parameter in critic_of(settings).parameters())


@pytest.mark.parametrize("lora_rank", often([0, 4], [4]))
def test_a_reward_model_of_adapters_is_merged_before_it_is_a_critic(from_reward, reward_folder, tmp_path, lora_rank):
    """Its old adapters are plain weights then; with LoRA the critic's own come on top, and change no value at the start."""
    base = reward_folder("gpt2")
    model = loaded(base)
    add_adapters(model.classifier, from_reward(f"model:{base}", lora_rank=4), base=base, seed=3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.1)
    folder = tmp_path / "适配器"
    save_reward_model(model, load_tokenizer(base), folder)
    critic = critic_of(from_reward(f"model:{folder}", lora_rank=lora_rank))
    adapted = [name for name, _ in critic.named_parameters() if "lora_" in name]
    assert bool(adapted) == bool(lora_rank)
    assert all(parameter.requires_grad for name, parameter in critic.named_parameters() if name in adapted)
    values, rows = values_after(critic.eval(), base, DIALOGUES)
    with torch.no_grad():
        scores = model.eval()([{"input_ids": row} for row in rows])
    torch.testing.assert_close(values, scores, rtol=0, atol=1e-5)


def test_what_cannot_be_the_critic_is_refused(from_reward, tiny, reward_folder, tmp_path):
    with pytest.raises(ConfigError, match=r"--critic reward starts from a reward model, .* add --rewards model:PATH"):
        train_ppo(from_reward("rule:digits"))
    with pytest.raises(ConfigError, match=r"--critic reward needs a decoder.* is an encoder; use --critic separate"):
        train_ppo(from_reward(f"model:{tiny('deberta-v2')}"))
    other = reward_folder("gpt2")
    tokenizer = load_tokenizer(other)
    tokenizer.add_tokens(["恭喜"])
    tokenizer.save_pretrained(tmp_path / "policy")
    policy = load_causal_lm(tiny("gpt2"))
    policy.resize_token_embeddings(len(tokenizer))
    policy.save_pretrained(tmp_path / "policy")
    with pytest.raises(ConfigError, match=r"--critic reward: .*rm has another vocabulary than the policy: 1 of"):
        train_ppo(from_reward(f"model:{other}", model=str(tmp_path / "policy")))
    assert not (tmp_path / "run").exists()


def test_a_critic_that_would_read_another_text_than_is_scored_is_refused(from_reward, reward_folder, written):
    """The reward model's template is not the policy's. Raw text goes through neither."""
    folder = Path(reward_folder("gpt2"))
    chat = written("chat.jsonl", [{"prompt": [{"role": "user", "content": f"第{i}问"}]} for i in range(8)])
    start(from_reward(f"model:{folder}", data=chat), [])
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text(encoding="utf-8").replace("{% for", "Be kind.{% for", 1), encoding="utf-8")
    start(from_reward(f"model:{folder}"), [])
    renders = r"--critic reward: the chat template of model:.* renders the prompt at .*chat\.jsonl:1 differently"
    with pytest.raises(ConfigError, match=renders):
        start(from_reward(f"model:{folder}", data=chat), [])


# Any critic


def test_a_separate_critic_starts_from_the_value_model_that_is_named(config, another):
    for named, begin in ((another, another), (None, config().model)):
        critic = critic_of(config(critic="separate", value_model=named))
        assert torch.equal(critic.state_dict()["trunk.wte.weight"], load_causal_lm(begin).transformer.wte.weight)


@CRITICS
def test_dropout_is_off_in_training_mode_too(config, length, critic):
    """gpt2's default is 0.1, and a ratio of two passes under dropout means nothing."""
    learner = start(config(critic=critic), [length]).learner
    ids = torch.arange(10, 22).unsqueeze(0)
    attention_mask, response_mask = torch.ones_like(ids, dtype=torch.bool), torch.ones(1, 6, dtype=torch.bool)
    for module in learner.trained:
        torch.nn.init.normal_(module.value_head.weight) if module.value_head is not None else None
        module.train()
        first, second = (module(ids, attention_mask, response_mask) for _ in range(2))
        pairs = [(first, second)] if isinstance(first, torch.Tensor) else zip(first, second, strict=True)
        assert all(a is b is None or torch.equal(a, b) for a, b in pairs)


@CRITICS
def test_a_critic_learns_at_its_own_rate_and_is_saved(config, tiny, length, numbers, tmp_path, critic):
    """The policy does not move at a vanishing rate while the critic, with a rate of its own, does; final/ keeps both."""
    rates = {"learning_rate": 1e-12, "value_learning_rate": 1e-2, "allow": ("learning-rate",)}
    rates |= {"value_coef": 1.0} if critic == "shared" else {}
    train_ppo(config(critic=critic, kl_coef=0.0, eval_fraction=0.0, **rates), rewards=[length])
    final = tmp_path / "run" / "final"
    begin, end = (load_causal_lm(str(folder)).state_dict() for folder in (tiny("gpt2"), final))
    assert all(torch.allclose(end[name], begin[name], atol=1e-6) for name in begin)
    assert (final / VALUE_HEAD).exists() == (critic == "shared")
    head = load_tensors((final if critic == "shared" else final / "value_model") / VALUE_HEAD)["weight"]
    assert float(head.abs().max()) > 1e-3
    losses = [line["loss/value"] for line in numbers(tmp_path / "run") if "loss/value" in line]
    assert losses[-1] < losses[0]


@CRITICS
def test_while_the_critic_warms_up_the_policy_stays_bit_for_bit(config, length, numbers, critic):
    """Weight decay is on, which would move weights without a gradient too; the next step then moves them."""
    steered = {"kl_target": 1.0, "kl_horizon": 100, "entropy_coef": 0.01, "weight_decay": 0.1, "learning_rate": 1e-3}
    settings = config(critic=critic, critic_warmup_steps=1, save_every=1, eval_fraction=0.0, **steered)
    train_ppo(settings, rewards=[length])
    first, second = (settings.output / "checkpoints" / f"step-00000{i}" for i in (1, 2))
    begin, warmed, trained = (load_causal_lm(str(f)).state_dict() for f in (settings.model, first, second))
    assert all(torch.equal(begin[name], warmed[name]) for name in begin)
    assert not all(torch.equal(begin[name], trained[name]) for name in begin)
    head = (first if critic == "shared" else first / "value_model") / VALUE_HEAD
    assert float(load_tensors(head)["weight"].abs().max()) > 1e-3
    steps = [line for line in numbers(settings.output) if "loss/value" in line]
    assert ["loss/policy" in line for line in steps] == [False, True]
    assert steps[1]["reference/kl_coef"] == settings.kl_coef, "a policy that stands still does not steer it"
