"""Encoders as people have them: a masked language model and its tokenizer become a reward model that reads text pairs."""

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from heedful import CheckpointError, RewardError
from heedful.data.chat import RewardInputs
from heedful.models import load_reward_model, load_tokenizer, save_reward_model
from heedful.models.heads import disable_dropout
from heedful.rewards.models import ModelReward

LETTERS = "abcdefghijklmnopqrstuvwxyz!?。，好坏问答一二三第题"
LONGEST = 64
PAIRS = [("第一题 hello?", "好，答。"), ("问", "坏"), ("abc", "")]


def wordpiece():
    """BERT's: every letter a word or a piece of one, a type id for each text."""
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary = {token: i for i, token in enumerate([*names, *LETTERS, *(f"##{c}" for c in LETTERS)])}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return with_pairs(tokenizer, names, "[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1")


def byte_level():
    """RoBERTa's: two separators between the texts, and no type ids."""
    names = ["<pad>", "<unk>", "<s>", "</s>", "<mask>"]
    vocabulary = {token: i for i, token in enumerate([*names, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return with_pairs(tokenizer, names, "<s> $A </s>", "<s> $A </s> </s> $B </s>")


def unigram():
    """DeBERTa-v3's: a SentencePiece model."""
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer = Tokenizer(models.Unigram([*((n, 0.0) for n in names), *((c, -4.0) for c in f"▁{LETTERS}")], unk_id=1))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    return with_pairs(tokenizer, names, "[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1")


def with_pairs(tokenizer, names, single, pair):
    pad, unk, cls, sep, mask = names
    tokenizer.post_processor = processors.TemplateProcessing(
        single=single, pair=pair, special_tokens=[(cls, 2), (sep, 3)]
    )
    types = ["token_type_ids"] if ":1" in pair else []
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=pad, unk_token=unk, cls_token=cls, sep_token=sep, mask_token=mask,
        model_input_names=["input_ids", *types, "attention_mask"],
    )  # fmt: skip


SIZE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
PLACES = {"max_position_embeddings": LONGEST, "pad_token_id": 0}
RELATIVE = {
    "relative_attention": True, "position_biased_input": False, "pos_att_type": ["p2c", "c2p"],
    "max_relative_positions": -1, "type_vocab_size": 0, "pooler_hidden_size": 32,
}  # fmt: skip
ENCODERS = {
    "bert": (wordpiece, transformers.BertConfig, SIZE | PLACES, transformers.BertForMaskedLM),
    "roberta": (
        byte_level, transformers.RobertaConfig, SIZE | PLACES | {"max_position_embeddings": LONGEST + 1},
        transformers.RobertaForMaskedLM,
    ),
    "deberta-v2": (unigram, transformers.DebertaV2Config, SIZE | PLACES | RELATIVE, transformers.DebertaV2ForMaskedLM),
    "deberta-v3": (
        unigram, transformers.DebertaV2Config,
        SIZE | PLACES | RELATIVE | {"position_buckets": 16, "norm_rel_ebd": "layer_norm", "share_att_key": True},
        transformers.DebertaV2ForMaskedLM,
    ),
    "distilbert": (
        wordpiece, transformers.DistilBertConfig, {"dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 64} | PLACES,
        transformers.DistilBertForMaskedLM,
    ),
}  # fmt: skip


@pytest.fixture(
    params=[
        a if a in ("bert", "deberta-v3", "roberta") else pytest.param(a, marks=pytest.mark.exhaustive) for a in ENCODERS
    ]
)
def encoder(request, tmp_path):
    """The folder of each masked language model in turn, as from a hub: no head of a classifier, no pooler."""
    make_tokenizer, config, settings, kind = ENCODERS[request.param]
    tokenizer = make_tokenizer()
    kind(config(vocab_size=len(tokenizer), **settings)).save_pretrained(tmp_path / "encoder")
    tokenizer.save_pretrained(tmp_path / "encoder")
    return tmp_path / "encoder"


def load(folder, **options):
    tokenizer = load_tokenizer(str(folder))
    model = load_reward_model(
        str(folder), tokenizer, device=torch.device("cpu"), compute_dtype=torch.float32, **options
    )
    return model, RewardInputs(tokenizer)


def test_it_trains_and_loads_back(encoder, tmp_path):
    """Every weight learns, every weight is saved; the folder gives the same scores, to any tool that reads text pairs."""
    with pytest.raises(CheckpointError, match="no reward head"):
        load(encoder)
    model, inputs = load(encoder, seed=1)
    disable_dropout(model)
    rows = [inputs.encode(*pair) for pair in PAIRS]
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    before = model(rows).detach()
    for _ in range(10):
        scores = model(rows)
        (scores[1] - scores[0]).backward()
        assert [name for name, p in model.named_parameters() if p.grad is None] == []
        optimizer.step()
        optimizer.zero_grad()
    after = model(rows).detach()
    assert after[0] - after[1] > before[0] - before[1] + 0.1

    save_reward_model(model, inputs.tokenizer, tmp_path / "rm")
    again, again_inputs = load(tmp_path / "rm")
    weights, loaded = model.classifier.state_dict(), again.classifier.state_dict()
    assert weights.keys() == loaded.keys()
    assert all(torch.equal(weights[name], loaded[name]) for name in weights)
    assert [again_inputs.encode(*pair) for pair in PAIRS] == rows
    again.eval()
    torch.testing.assert_close(again(rows).detach(), after, rtol=1e-5, atol=1e-6)

    plain = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "rm", dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "rm")
    for (prompt, response), score in zip(PAIRS[:2], after, strict=False):
        inputs_of_two = tokenizer(prompt, response, return_tensors="pt")
        torch.testing.assert_close(plain(**inputs_of_two).logits[0, 0].detach(), score, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("encoder", ["bert", "roberta"], indirect=True)
def test_prompt_and_response_are_two_texts(encoder):
    """Which is which is told by the separator, and by type ids where the tokenizer has them."""
    _, inputs = load(encoder, seed=1)
    row, swapped = inputs.encode("问", "答"), inputs.encode("答", "问")
    separator = inputs.tokenizer.sep_token_id
    ids = row["input_ids"]
    assert ids[0] == inputs.tokenizer.cls_token_id
    assert ids[-1] == separator
    assert separator in ids[1:-1]
    assert ids != swapped["input_ids"]
    if "token_type_ids" in row:
        types = row["token_type_ids"]
        first = ids.index(separator) + 1
        assert types == [0] * first + [1] * (len(ids) - first)


@pytest.mark.parametrize("encoder", ["roberta", "deberta-v3"], indirect=True)
def test_more_tokens_than_it_takes(encoder):
    """Sixty-four are read, also by relative positions: past them DeBERTa would compute, but was never trained."""
    model, inputs = load(encoder, seed=1)
    model.eval()
    assert model.max_length == LONGEST
    around = len(inputs.encode("a", "b")["input_ids"]) - 1
    fits, too_long = "b" * (LONGEST - around), "b" * (LONGEST - around + 1)
    assert len(inputs.encode("a", fits)["input_ids"]) == LONGEST
    (score,) = ModelReward(model, inputs)(["a"], [fits], [False])
    assert abs(score) < 100
    with pytest.raises(RewardError, match="longer than the 64 tokens that the reward model reads"):
        ModelReward(model, inputs)(["a"], [too_long], [False])
    assert len(inputs.encode("a", too_long, max_length=LONGEST)["input_ids"]) == LONGEST
