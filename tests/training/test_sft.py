"""SFT learns what it is shown, to the last token, whatever the micro-batch size."""

import pytest
import torch

from cases import often
from gradients import distance, flat_gradient
from heedful import ConfigError, SFTConfig, train_sft
from heedful.algorithms.sft import accumulate, evaluate_loss
from heedful.data import read_demonstrations
from heedful.data.chat import Renderer, stop_ids
from heedful.data.loading import Example
from heedful.models import Policy, load_causal_lm, load_tokenizer
from heedful.types import MicroBatch
from jsonl import read_jsonl, write_jsonl


@pytest.fixture
def config(tiny, demonstrations, tmp_path):
    def make(**changes):
        settings = {"model": tiny("gpt2"), "data": demonstrations, "output": tmp_path / "run", "eval_fraction": 0.0}
        settings |= {"batch_size": 5, "max_steps": 120, "learning_rate": 1e-2, "sample_every": 0, "dtype": "float32"}
        return SFTConfig(**(settings | changes))

    return make


@pytest.mark.parametrize("architecture", often(["gpt2", "qwen3"], ["qwen3"]))
def test_overfits_five_pairs_to_exact_greedy_recall_with_the_stop(config, tiny, demonstrations, tmp_path, architecture):
    """Greedy decoding by transformers itself gives each answer and then the end of turn, and nothing after it."""
    train_sft(config(model=tiny(architecture), max_steps=60))
    final = str(tmp_path / "run" / "final")
    model, tokenizer = load_causal_lm(final).eval(), load_tokenizer(final)
    renderer = Renderer(tokenizer)
    stops = stop_ids(renderer, model.generation_config.eos_token_id)
    for record in read_demonstrations(demonstrations):
        ids = torch.tensor([renderer.prompt_ids(record.prompt)])
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=40, do_sample=False, pad_token_id=0
        )[0, ids.shape[1] :].tolist()
        assert output[-1] in stops
        assert renderer.decode(output[:-1]) == record.response


def ragged_examples(num: int) -> list[Example]:
    generator = torch.Generator().manual_seed(7)

    def ids(low, high):
        length = int(torch.randint(low, high, (), generator=generator))
        return torch.randint(6, 200, (length,), generator=generator).tolist()

    return [Example(ids(1, 12), ids(1, 15)) for _ in range(num)]


def gradient(policy, examples, *limit):
    policy.zero_grad()
    accumulate(policy, examples, 0, MicroBatch(*limit))
    return flat_gradient(policy)


def test_micro_batches_do_not_change_the_gradient(tiny, passes):
    policy = Policy(load_causal_lm(tiny("gpt2")).double()).eval()
    examples = ragged_examples(8)
    assert len({len(one.response) for one in examples}) > 2, "else a mean of means would be no other"
    whole = gradient(policy, examples, 8)
    assert distance(gradient(policy, examples, 3), whole) < 1e-12
    for tokens in (1, 30, 45):
        seen = passes(policy)
        assert distance(gradient(policy, examples, 8, tokens), whole) < 1e-12
        assert all(rows == 1 or taken <= tokens for rows, taken in seen)
        assert sum(rows for rows, _ in seen) == 8
        assert (len(seen) == 8) == (tokens == 1)


def test_evaluation_is_the_token_mean_of_the_negative_log_likelihood(tiny):
    lm = load_causal_lm(tiny("qwen3")).eval()
    examples = ragged_examples(7)
    expected, count = 0.0, 0
    for example in examples:
        ids = torch.tensor([example.prompt + example.response])
        with torch.no_grad():
            logprobs = lm(input_ids=ids).logits[0, :-1].log_softmax(dim=-1)
        targets = ids[0, len(example.prompt) :]
        expected -= float(logprobs[len(example.prompt) - 1 :].gather(1, targets.unsqueeze(1)).sum())
        count += len(targets)
    metrics = evaluate_loss(Policy(lm), examples, 0, MicroBatch(3))
    assert metrics["eval/loss"] == pytest.approx(expected / count, rel=1e-5)
    assert metrics["eval/perplexity"] == pytest.approx(float(torch.tensor(expected / count).exp()), rel=1e-5)


def test_a_resolved_config_repeats_its_run(heedful, config, numbers, tmp_path):
    train_sft(config(output=tmp_path / "a", max_steps=2, batch_size=2, weight_decay=0.1, lr_schedule="cosine"))
    assert heedful("sft", tmp_path / "a" / "config.yaml", output=tmp_path / "b").status == 0
    assert numbers(tmp_path / "a") == numbers(tmp_path / "b")


@pytest.mark.exhaustive
def test_plain_text_is_learned_and_perplexity_falls(config, tiny, tmp_path):
    """``text`` records need no prompt; a text longer than the context is cut into pieces, none of it lost."""
    text = "从前有座山，山里有座庙。" * 12
    path = write_jsonl(tmp_path / "text.jsonl", [{"text": text}])
    summary = train_sft(config(model=tiny("qwen3"), data=path, eval_data=path, batch_size=2, max_steps=65))
    assert summary["data"]["text_pieces"] == 2 * -(-len(text.encode()) // 127)
    assert summary["first_evaluation"]["eval/perplexity"] > 200
    assert summary["last_evaluation"]["eval/perplexity"] < 1.5


def test_stops_after_evaluations_without_improvement_and_keeps_the_best(config, tmp_path, demonstrations):
    """A learning rate far too large: no evaluation improves on the start, so best/ is the start and the run ends early."""
    options = {
        "learning_rate": 5.0,
        "max_grad_norm": 0.0,
        "eval_data": demonstrations,
        "eval_every": 1,
        "max_steps": 50,
    }
    summary = train_sft(config(early_stopping_patience=3, **options))
    assert summary["steps"] == 3
    assert summary["stopped_early"]
    assert summary["best"]["step"] == 0
    best = load_causal_lm(str(tmp_path / "run" / "best")).state_dict()
    start = load_causal_lm(config().model).state_dict()
    assert all(torch.equal(best[name], start[name]) for name in start)


@pytest.mark.exhaustive
def test_loss_on_all_learns_the_prompt_too(config, tmp_path):
    """With the loss on the prompt, its likelihood rises as well; with the response alone it hardly does."""
    losses = {}
    for loss_on in ("response", "all"):
        train_sft(config(output=tmp_path / loss_on, loss_on=loss_on, max_steps=50))
        policy = Policy(load_causal_lm(str(tmp_path / loss_on / "final")))
        renderer = Renderer(load_tokenizer(config().model))
        prompts = [renderer.prompt_ids(d.prompt) for d in read_demonstrations(config().data)]
        examples = [Example(ids[:1], ids[1:]) for ids in prompts]
        losses[loss_on] = evaluate_loss(policy, examples, 0, MicroBatch(5))["eval/loss"]
    assert losses["all"] < 1.0
    assert losses["response"] > 3.0


def test_patience_without_held_out_data_is_refused(config, tmp_path):
    with pytest.raises(ConfigError, match="nothing is held out"):
        train_sft(config(early_stopping_patience=2))
    assert not (tmp_path / "run").exists()


def test_prompts_near_the_context_are_trained_on_and_not_sampled(config, tiny, tmp_path):
    """The table of samples halves a short context: of 20 tokens, 10 are for the response, so that a prompt of 10 bytes is
    sampled from, and one of 11 is not. It is learned from all the same; the run goes on to final/."""
    prompts = ["a" * 10, "b" * 11]
    data = write_jsonl(tmp_path / "d.jsonl", [{"prompt": one, "completion": "c"} for one in prompts])
    train_sft(config(model=tiny("qwen3", max_length=20), data=data, batch_size=2, max_steps=1, sample_every=1))
    assert [row["prompt"] for row in read_jsonl(tmp_path / "run" / "samples.jsonl")] == prompts[:1]
    assert (tmp_path / "run" / "final" / "config.json").is_file()
