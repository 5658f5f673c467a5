"""Embedding rows that nobody trained, such as a padding token's zeros, and what a token that reads one does to a run."""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from cases import pairs_often
from heedful.core import sft_loss
from heedful.kernels.weights import hold_untrained_rows
from heedful.models import Policy
from heedful.models.tiny import tiny_config
from jsonl import read_metrics, write_jsonl

PADDING = 0
SHAPE = {"vocab_size": 264, "hidden_size": 32, "num_layers": 2, "max_length": 256, "initializer_range": 0.1}


@pytest.fixture
def made(tiny, tmp_path):
    """A folder of a small model whose rows of some ids are scaled down, to zero by default; its text part is tiny's."""

    def make(architecture, ids, *, tied=True, scale=0.0):
        config = tiny_config(architecture, **SHAPE)
        config.tie_word_embeddings = tied
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            embedding = model.get_input_embeddings().weight
            embedding[PADDING].normal_(std=0.1)
            embedding[ids] *= scale
        model.save_pretrained(tmp_path / "model")
        AutoTokenizer.from_pretrained(tiny(architecture)).save_pretrained(tmp_path / "model")
        return tmp_path / "model"

    return make


def learned(heedful, model, run, *more):
    """Gradient norm of one step of SFT on an answer that has the letters 读 and x, and on more of them."""
    texts = ("xyz 读", *more)
    records = [{"prompt": "怎么读？", "completion": text} for text in texts]
    paths = {"model": model, "data": write_jsonl(run.parent / "data.jsonl", records), "output": run}
    settings = {"max_steps": 1, "batch_size": len(texts), "learning_rate": 1e-4, "eval_fraction": 0, "dtype": "float32"}
    done = heedful("sft", **paths, **settings)
    assert done.status == 0, done.err
    assert "better or worse is not known: nothing was held out" in done.out
    return read_metrics(run)[0]["optimizer/grad_norm"]


@pytest.mark.parametrize(("scale", "tied"), pairs_often([0.0, 1e-4], [True, False], [(0.0, True), (1e-4, False)]))
def test_a_row_of_zeros_does_not_take_over_the_gradient(heedful, made, tiny, tmp_path, tied, scale):
    """The letter's row and that of 读's first byte. A row as large as others gives a norm of about 20."""
    tokenizer = AutoTokenizer.from_pretrained(tiny("qwen3"))
    ids = [tokenizer("x").input_ids[0], tokenizer("读").input_ids[0]]
    model = made("qwen3", ids, tied=tied, scale=scale)
    with pytest.warns(UserWarning, match=rf"reads token {min(ids)}, {max(ids)}, whose embedding is \(nearly\) zero"):
        norm = learned(heedful, model, tmp_path / "run")
    assert 1 < norm < 60
    before, after = (
        AutoModelForCausalLM.from_pretrained(folder).get_input_embeddings().weight
        for folder in (model, tmp_path / "run/final")
    )
    assert torch.equal(before[ids], after[ids]) is not tied  # a tied row learns as one of the head's
    other = tokenizer("y").input_ids[0]
    assert not torch.equal(before[other], after[other])


@pytest.mark.parametrize(("architecture", "tied"), [("qwen3", True), ("llama", False)])
def test_the_gradient_is_that_of_transformers_for_its_padding_row(made, architecture, tied):
    """transformers keeps the padding token's row out of the gradient of the embedding, not of a head that shares it."""
    theirs = AutoModelForCausalLM.from_pretrained(made(architecture, [PADDING], tied=tied)).double()
    policy = Policy(copy.deepcopy(theirs))
    policy.lm.get_input_embeddings().padding_idx = None
    hold_untrained_rows(policy.lm, "model")
    ids = torch.tensor([[10, 11, 12, 100, PADDING, 102, 103]])
    everything, inside = torch.ones_like(ids, dtype=torch.bool), torch.ones(1, 4, dtype=torch.bool)
    with pytest.warns(UserWarning, match=r"model: this run reads token 0, whose embedding is \(nearly\) zero"):
        sft_loss(policy(ids, everything, inside, temperature=1.0).logprobs, inside)[0].backward()
    logits = theirs(input_ids=ids).logits[0, 2:-1]
    torch.nn.functional.cross_entropy(logits, ids[0, 3:]).backward()
    for (name, ours), other in zip(policy.lm.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, other.grad, rtol=1e-5, atol=1e-6, msg=name)


def test_a_model_with_positions_learns_its_rows_of_zeros(heedful, made, tiny, tmp_path):
    """GPT-2 adds position embeddings, so its norms never read zeros, and the gradient is as large as any other."""
    row = AutoTokenizer.from_pretrained(tiny("gpt2"))("x").input_ids[0]
    model = made("gpt2", [row], tied=False)
    assert learned(heedful, model, tmp_path / "run") < 60
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "run/final").get_input_embeddings().weight
    assert after[row].abs().max() > 0


def test_what_fills_up_a_batch_needs_no_word(heedful, made, tmp_path):
    """Every model that transformers makes has a row of zeros for it. Warnings are errors here.

    The second answer is one letter longer: too little to arrange the rows without padding.
    """
    assert learned(heedful, made("qwen3", [PADDING]), tmp_path / "run", "xyzz 读") < 60
