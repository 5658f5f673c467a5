"""Reward models: one score a row, the same in every batch and in every tool that loads the folder."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    RobertaConfig,
    RobertaForSequenceClassification,
)

from architectures import DECODERS, one_decoder
from heedful import CheckpointError, Message, make_tiny_model
from heedful.data.chat import RewardInputs
from heedful.models import byte_tokenizer, load_policy, load_reward_model, load_tokenizer, save_reward_model
from heedful.models.reward_model import load_facts

CPU = torch.device("cpu")
TEXTS = [
    ("你好", "很好！"),
    ((Message("user", "今天天气怎么样？"),), "晴，二十度左右，适合出门。🙂"),
    ("a", ""),
    ((Message("user", "Hi <|endoftext|>"),), "ok <|pad|>"),
]


def load(folder, *, seed=None, tokenizer=None):
    tokenizer = tokenizer or AutoTokenizer.from_pretrained(folder)
    return load_reward_model(str(folder), tokenizer, device=CPU, compute_dtype=torch.float32, seed=seed), tokenizer


def encoded(tokenizer):
    inputs = RewardInputs(tokenizer)
    return [inputs.encode(prompt, response) for prompt, response in TEXTS]


@pytest.fixture(scope="module")
def reward_folders(checkpoints, tmp_path_factory):
    """Trained reward models, as far as a folder shows: language models with a saved head, and the encoder."""
    root = tmp_path_factory.mktemp("rewards")
    for architecture in DECODERS:
        model, tokenizer = load(checkpoints[architecture], seed=3)
        save_reward_model(model, tokenizer, root / architecture)
    return {a: root / a for a in DECODERS} | {"deberta-v2": checkpoints["deberta-v2"]}


@pytest.fixture(
    params=["gpt2", "qwen3", "deberta-v2", *(pytest.param(a, marks=pytest.mark.exhaustive) for a in ("qwen2", "llama"))]
)
def folder(request, reward_folders):
    """Each reward model in turn."""
    return reward_folders[request.param]


def test_scores_are_those_of_plain_transformers_on_single_rows(folder):
    """So they do not depend on padding or on what else is in the batch."""
    model, tokenizer = load(folder)
    plain = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    rows = encoded(tokenizer)
    with torch.no_grad():
        scores = model(rows)
        single = [plain(**{k: torch.tensor([v]) for k, v in row.items()}).logits[0, 0] for row in rows]
        torch.testing.assert_close(scores, torch.stack(single), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(model(rows[::-1]), scores.flip(0), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(model(rows[2:3]), scores[2:3], rtol=1e-5, atol=1e-5)
    assert len({f"{score:.3f}" for score in scores}) == len(rows)


def test_rows_may_have_the_padding_id_inside(checkpoints):
    """An encoder's mask comes from lengths, not from ids: a padding token in the text is a token."""
    model, tokenizer = load(checkpoints["deberta-v2"])
    row = encoded(tokenizer)[0]
    with_pad = {
        name: [*ids[:3], tokenizer.pad_token_id if name == "input_ids" else 0, *ids[3:]] for name, ids in row.items()
    }
    longer = {name: ids + ids for name, ids in row.items()}
    torch.testing.assert_close(model([with_pad, longer])[:1], model([with_pad]), rtol=1e-5, atol=1e-5)
    assert (model([with_pad]) - model([row])).abs() > 1e-3


@one_decoder
def test_a_language_model_is_no_reward_model(decoder):
    """Scoring with a random head is the silent mistake that this refuses."""
    with pytest.raises(CheckpointError, match="has no reward head, so it is not a reward model; train one with"):
        load(decoder)


@one_decoder
def test_a_fresh_head_depends_on_its_seed_alone(decoder):
    a, b, c = (load(decoder, seed=seed)[0].classifier.score.weight for seed in (1, 1, 2))
    torch.manual_seed(5)
    d = load(decoder, seed=1)[0].classifier.score.weight
    assert torch.equal(a, b)
    assert torch.equal(a, d)
    assert not torch.equal(a, c)


def test_a_fresh_head_on_an_encoder_depends_on_its_seed_alone(checkpoints, tmp_path):
    """The layer below the head, a pooler that the trunk's checkpoint lacks, included."""
    AutoModel.from_pretrained(checkpoints["deberta-v2"]).save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(checkpoints["deberta-v2"])
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="has no reward head"):
        load(tmp_path)
    rows = encoded(tokenizer)
    torch.manual_seed(1)
    first = load(tmp_path, seed=1)[0](rows)
    torch.manual_seed(2)
    assert torch.equal(load(tmp_path, seed=1)[0](rows), first)
    assert not torch.equal(load(tmp_path, seed=2)[0](rows), first)


def test_a_fresh_head_has_standard_deviation_one_over_root_d_plus_one(tmp_path):
    """256 normal weights: their standard deviation is within 5 of its own standard errors (1 / sqrt(2 n)), the mean too."""
    make_tiny_model("gpt2", tmp_path, hidden_size=256, num_layers=1, max_length=8)
    head = load(tmp_path, seed=0)[0].classifier.score
    std = 257**-0.5
    assert abs(head.weight.std() / std - 1) < 5 / (2 * 256) ** 0.5
    assert abs(head.weight.mean()) < 5 * std / 256**0.5
    assert head.bias is None


@pytest.mark.parametrize("folder", ["deberta-v2"], indirect=True)
def test_a_trained_head_is_kept(folder):
    """Also where training resumes from it, with a seed."""
    (plain, _), (seeded, tokenizer) = load(folder), load(folder, seed=9)
    rows = encoded(tokenizer)
    assert torch.equal(plain(rows), seeded(rows))


@pytest.mark.parametrize("folder", ["qwen3"], indirect=True)
def test_more_than_one_output_is_refused(folder, tmp_path):
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=2, ignore_mismatched_sizes=True)
    model.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path)
    for seed in (None, 1):
        with pytest.raises(CheckpointError, match="more than one output; a reward model has one score"):
            load(tmp_path, seed=seed)


def test_a_reward_model_is_no_policy(reward_folders):
    """Its embeddings are tied to what would be the output head, so no weight is missing."""
    with pytest.raises(
        CheckpointError, match=r"is a reward model \(\w+ForSequenceClassification\), which cannot generate"
    ):
        load_policy(str(reward_folders["qwen3"]), device=CPU, compute_dtype=torch.float32)


def test_a_trunk_that_lacks_weights_is_refused(reward_folders, tmp_path):
    """transformers would fill them with random numbers and go on."""
    for file in reward_folders["qwen3"].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    for seed in (None, 1):
        with pytest.raises(CheckpointError, match=r"lacks .*weights?.*layers.1.mlp.up_proj"):
            load(tmp_path, seed=seed)


def test_an_encoder_with_a_head_but_no_pooler_is_refused(checkpoints, tmp_path):
    for file in checkpoints["deberta-v2"].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = load_file(tmp_path / "model.safetensors")
    del weights["pooler.dense.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"pooler\.dense\.weight"):
        load(tmp_path)


def bytes_and_eos(*, pad):
    """A byte tokenizer with EOS alone, ids 0 to 256; ``pad`` is its padding token's text or None."""
    vocabulary = {token: i for i, token in enumerate(["</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = {"eos_token": "</s>"} | ({"pad_token": pad} if pad else {})
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)


@pytest.fixture(params=[("gpt2", None), ("qwen3", "</s>")], ids=str)
def without_pad(request, checkpoints, tmp_path):
    """A language model whose vocabulary has no token to spare for padding (qwen2 tokenizers always bring one)."""
    architecture, pad = request.param
    tokenizer = bytes_and_eos(pad=pad)
    lm = AutoModelForCausalLM.from_pretrained(checkpoints[architecture])
    lm.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    lm.config.pad_token_id, lm.config.eos_token_id = tokenizer.pad_token_id, 0
    lm.save_pretrained(tmp_path / "lm")
    tokenizer.save_pretrained(tmp_path / "lm")
    return tmp_path / "lm"


def test_a_distinct_padding_token_is_added(without_pad, tmp_path):
    """Otherwise the score would be read before the EOS, or at a padding token, in tools that tell padding by its id."""
    model, tokenizer = load(without_pad, seed=1)
    assert tokenizer.pad_token_id == model.classifier.config.pad_token_id == 257 != tokenizer.eos_token_id
    assert model.classifier.get_input_embeddings().weight.shape[0] == 258
    trunk = AutoModel.from_pretrained(without_pad, dtype=torch.float32)
    kept = model.classifier.get_input_embeddings().weight[:257]
    assert torch.equal(kept, trunk.get_input_embeddings().weight)

    save_reward_model(model, tokenizer, tmp_path / "rm")
    inputs = RewardInputs(tokenizer)
    rows = [inputs.encode(prompt, response) for prompt, response in (("你好", "很好！"), ("a", "bcd" * 20), ("问", ""))]
    scores = model(rows)
    again, tokenizer = load(tmp_path / "rm")
    saved, loaded = model.state_dict(), again.state_dict()
    assert saved.keys() == loaded.keys()
    assert all(torch.equal(saved[name], loaded[name]) for name in saved)
    torch.testing.assert_close(again(rows), scores)  # matrices that lie elsewhere in memory may round differently
    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path / "rm", dtype=torch.float32)
    for side in ("right", "left"):
        tokenizer.padding_side = side
        padded = tokenizer.pad(rows, return_tensors="pt")
        position_ids = (padded.attention_mask.cumsum(1) - 1).clamp_min(0)
        arguments = {"input_ids": padded.input_ids, "attention_mask": padded.attention_mask}
        torch.testing.assert_close(
            plain(**arguments, position_ids=position_ids).logits[:, 0], scores, rtol=1e-5, atol=1e-5
        )
    for row, score in zip(rows, scores, strict=True):
        logits = plain(input_ids=torch.tensor([row["input_ids"]])).logits
        torch.testing.assert_close(logits[0, 0], score, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("without_pad", [("qwen3", "</s>")], indirect=True)
def test_the_embedding_of_the_end_learns(without_pad):
    """transformers freezes the padding token's embedding; once padding has a token of its own, EOS must be free."""
    model, tokenizer = load(without_pad, seed=1)
    model([{"input_ids": [5, tokenizer.eos_token_id]}]).sum().backward()
    assert model.classifier.get_input_embeddings().weight.grad[tokenizer.eos_token_id].any()


@one_decoder
def test_an_existing_padding_token_is_kept(decoder):
    before = AutoTokenizer.from_pretrained(decoder)
    model, tokenizer = load(decoder, seed=1)
    assert (tokenizer.pad_token, tokenizer.pad_token_id) == (before.pad_token, before.pad_token_id) == ("<|pad|>", 0)
    assert len(tokenizer) == len(before)
    assert model.classifier.config.pad_token_id == 0
    assert model.classifier.get_input_embeddings().weight.shape[0] == 264


def test_a_trained_model_without_any_padding_token_is_refused(reward_folders, tmp_path):
    classifier = AutoModelForSequenceClassification.from_pretrained(reward_folders["llama"])
    classifier.config.pad_token_id = None
    classifier.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"neither config.json nor the tokenizer has a padding token"):
        load(tmp_path, tokenizer=bytes_and_eos(pad=None))


def test_the_tokenizers_padding_token_serves_a_config_without_one(reward_folders, tmp_path):
    classifier = AutoModelForSequenceClassification.from_pretrained(reward_folders["llama"])
    classifier.config.pad_token_id = None
    classifier.save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(reward_folders["llama"])
    rows = encoded(tokenizer)
    scores = load(tmp_path, tokenizer=tokenizer)[0](rows)
    torch.testing.assert_close(scores, load(reward_folders["llama"])[0](rows), rtol=1e-5, atol=1e-5)


def test_robertas_padding_takes_positions_away(tmp_path):
    """Its positions start at padding_idx + 1: a row of the full table's length would be an index error."""
    config = RobertaConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, num_labels=1,
        max_position_embeddings=66, pad_token_id=1, type_vocab_size=1,
    )  # fmt: skip
    RobertaForSequenceClassification(config).save_pretrained(tmp_path)
    tokenizer = byte_tokenizer(encoder=True)
    model = load(tmp_path, tokenizer=tokenizer)[0]
    longest = 66 - (1 + 1)
    assert model.max_length == longest
    rows = [{"input_ids": [7] * longest}, {"input_ids": [8] * 5}]
    scores = model(rows)
    assert scores.isfinite().all()
    with pytest.raises((IndexError, RuntimeError), match="index"):
        model([{"input_ids": [7] * (longest + 1)}])


def test_scoring_keeps_no_cache(reward_folders):
    """Keys and values of every layer would be held for nothing."""
    model, tokenizer = load(reward_folders["qwen3"])
    assert model.classifier.config.use_cache
    outputs = []
    model.classifier.register_forward_hook(lambda module, inputs, output: outputs.append(output))
    model(encoded(tokenizer))
    assert outputs[0].past_key_values is None


def test_the_head_computes_in_float32_under_bfloat16(tmp_path):
    """A score near 5 in bfloat16 would come in steps of 1/32: the scores here lie on no such grid."""
    make_tiny_model("qwen3", tmp_path / "m", hidden_size=32)
    tokenizer = load_tokenizer(str(tmp_path / "m"))
    model = load_reward_model(
        str(tmp_path / "m"), tokenizer, device=torch.device("cpu"), compute_dtype=torch.bfloat16, seed=0
    )
    with torch.no_grad():
        model.classifier.score.weight.mul_(50.0)
        scores = model([{"input_ids": [7, 8, 9 + i]} for i in range(16)])
    assert scores.dtype == torch.float32
    assert float(scores.abs().max()) > 4
    assert not torch.equal(scores, scores.bfloat16().float())


def write_offset(folder, text):
    (folder / "heedful.json").write_text(text, encoding="utf-8")


@pytest.fixture
def scored(reward_folders, tmp_path):
    """A copy of a reward model's folder."""
    for file in reward_folders["qwen3"].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def test_the_offset_is_subtracted_from_the_head(scored, reward_folders, tmp_path):
    plain, tokenizer = load(reward_folders["qwen3"])
    assert plain.offset == 0.0
    rows = encoded(tokenizer)
    write_offset(scored, '{"offset": 1.25, "more": [1]}')
    model, _ = load(scored)
    assert model.offset == 1.25
    write_offset(scored, '{"other": 1}')
    assert load(scored)[0].offset == 0.0
    torch.testing.assert_close(model(rows), plain(rows) - 1.25, rtol=0, atol=1e-5)
    for offset, expected in ((None, 1.25), (-3.5, -3.5), (0.0, 0.0)):
        save_reward_model(model, tokenizer, tmp_path / f"again {offset}", offset=offset)
        again, _ = load(tmp_path / f"again {offset}")
        assert again.offset == expected
        torch.testing.assert_close(again(rows), plain(rows) - expected, rtol=0, atol=1e-5)
    assert json.loads((tmp_path / "again 0.0" / "heedful.json").read_text(encoding="utf-8")) == {"reads": "turn-end"}


def test_an_offset_that_cannot_be_read(scored):
    """Going on without it would shift every reward silently."""
    for text, said in {
        '{"offset": "1"}': "offset in its heedful.json is '1'; expected a finite number",
        '{"offset": true}': "offset in its heedful.json is True",
        '{"offset": NaN}': "offset in its heedful.json is nan",
        "[1]": "heedful.json: it holds a list, and must hold a JSON object",
        '{"offset": 1': "heedful.json: line 1 is not valid JSON",
    }.items():
        write_offset(scored, text)
        with pytest.raises(CheckpointError, match=said):
            load_facts(str(scored))
