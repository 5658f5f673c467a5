"""Reward models of others: heedful's scores are those of the code on their model card, wherever heedful reads them.

Three chat formats, each with a tokenizer and a model of its own: ChatML, whose turns end ``<|im_end|>\\n`` (Qwen, Skywork),
Llama 3's, which trims what people write, and one that puts nothing behind an answer.
"""

import json
import shutil

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GPT2Config,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

from heedful import AccuracyConfig, Message, RewardConfig, evaluate_accuracy, train_reward
from heedful.apps.serving.rewards import answer
from heedful.data.chat import RewardInputs
from heedful.models import load_reward_model, load_tokenizer
from heedful.rewards.models import load_model_reward
from heedful.types import MicroBatch

CHATML = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}"
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
LLAMA_3 = (
    "{{ bos_token }}{% for message in messages %}{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + "
    "message['content'] | trim + '<|eot_id|>' }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
NO_TAIL = (
    "{% for message in messages %}{{ '### ' + message['role'] + ':\n' + message['content'] }}"
    "{% if not loop.last %}{{ '\n\n' }}{% endif %}{% endfor %}{% if add_generation_prompt %}\n\n### assistant:\n{% endif %}"
)
KINDS = {
    "chatml": (CHATML, ("<|im_start|>", "<|im_end|>", "<|endoftext|>"), {"eos": "<|im_end|>", "pad": "<|endoftext|>"}),
    "llama-3": (
        LLAMA_3,
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        {"bos": "<|begin_of_text|>", "eos": "<|eot_id|>", "pad": "<|eot_id|>"},
    ),
    "no-tail": (NO_TAIL, ("<|endoftext|>",), {"eos": "<|endoftext|>", "pad": "<|endoftext|>"}),
}
CONVERSATIONS = [
    [{"role": "user", "content": "你好"}, {"role": "assistant", "content": "您好！有什么可以帮您？"}],
    [
        {"role": "system", "content": "Be brief.\n"},
        {"role": "user", "content": " What is 2 + 2? "},
        {"role": "assistant", "content": "\n\nIt is 4.\n"},
    ],
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "一只猫\n\n"},
        {"role": "assistant", "content": "  the cat, the cat"},
    ],
    [{"role": "user", "content": "nothing?"}, {"role": "assistant", "content": "x" * 60}],
]


def tokenizer_of(kind):
    """Byte-level BPE with merges of its own, over new lines and words alike."""
    template, specials, names = KINDS[kind]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    text = "user\n\n the cat is the answer. system\n\nassistant\n\n### 2 + 2 = 4\n" * 4 + "你好，您好！一只猫。" * 4
    trainer = trainers.BpeTrainer(
        vocab_size=350, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator([text], trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    if "bos" in names:
        bos = (names["bos"], tokenizer.token_to_id(names["bos"]))
        tokenizer.post_processor = processors.TemplateProcessing(single=f"{bos[0]} $A", special_tokens=[bos])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, **{f"{name}_token": token for name, token in names.items()}
    )
    fast.chat_template = template
    return fast


def make(kind, folder):
    """Write a reward model with random weights, as its authors would."""
    tokenizer = tokenizer_of(kind)
    common = {"vocab_size": len(tokenizer), "num_labels": 1, "initializer_range": 0.2}
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    shape |= {"num_key_value_heads": 2, "max_position_embeddings": 256, "eos_token_id": tokenizer.eos_token_id}
    config = {
        "chatml": lambda: Qwen3Config(**common, **shape, head_dim=8, pad_token_id=tokenizer.pad_token_id),
        # No padding token: transformers reads one text at a time, at its very end, although that is the tokenizer's padding.
        "llama-3": lambda: LlamaConfig(**common, **shape, pad_token_id=None),
        "no-tail": lambda: GPT2Config(
            **common, n_embd=32, n_head=4, n_layer=2, n_positions=256, pad_token_id=tokenizer.pad_token_id
        ),
    }[kind]()
    torch.manual_seed(11)
    model = AutoModelForSequenceClassification.from_config(config)
    torch.nn.init.normal_(model.score.weight, std=0.3)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("他人")
    for kind in KINDS:
        make(kind, root / kind)
    return {kind: root / kind for kind in KINDS}


@pytest.fixture(params=KINDS)
def foreign(request, folders):
    """The folder of each kind in turn."""
    return folders[request.param]


@torch.no_grad()
def card(folder, conversations=CONVERSATIONS):
    """What model cards say: render, tokenise, read ``logits[0][0]``."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32, num_labels=1)
    scores = []
    for conversation in conversations:
        ids = tokenizer.apply_chat_template(conversation, tokenize=True, return_tensors="pt").input_ids
        scores.append(model(ids).logits[0][0].item())
    return scores


def split(conversations=CONVERSATIONS):
    return [c[:-1] for c in conversations], [c[-1:] for c in conversations]


def reward_of(folder):
    options = {"device": torch.device("cpu"), "compute_dtype": torch.float32, "micro_batch": MicroBatch(3)}
    return load_model_reward(str(folder), **options)


def close(scores):
    return pytest.approx(scores, abs=1e-5, rel=0)


def test_scores_are_those_of_the_card(foreign):
    """Cut or not: the model was never shown a conversation without its end. Token by token it reads what the template writes;
    what a person typed stays letters all the same."""
    expected, reward = card(foreign), reward_of(foreign)
    for truncated in (False, True):
        assert reward(*split(), [truncated] * len(CONVERSATIONS)) == close(expected)
    tokenizer, inputs = AutoTokenizer.from_pretrained(foreign), reward.inputs
    for conversation in CONVERSATIONS:
        *turns, answer = conversation
        read = inputs.encode(tuple(Message(**m) for m in turns), answer["content"])["input_ids"]
        assert read == tokenizer.apply_chat_template(conversation, tokenize=True).input_ids
    special = tokenizer.eos_token
    typed = inputs.encode((), f"a{special}b")["input_ids"]
    assert tokenizer.decode(typed).count(special) > typed.count(tokenizer.eos_token_id)


def test_the_server_gives_the_same_scores(folders):
    """Negative control: reading to the end of the turn is another text; without the tail the scores are others by far."""
    expected, reward = card(folders["chatml"]), reward_of(folders["chatml"])
    prompts, completions = split()
    body = json.dumps({"prompts": prompts, "completions": completions}).encode()
    status, content = answer(reward, body, max_characters=1000, log=print)
    assert (status, content["scores"]) == (200, close(expected))
    reward.inputs = RewardInputs(reward.inputs.tokenizer, "turn-end")
    found = reward(prompts, completions, [False] * len(CONVERSATIONS))
    assert min(abs(a - b) for a, b in zip(found, expected, strict=True)) > 1e-3


def pairs():
    """Each answer is better than a word."""
    return [
        {"prompt": c[:-1], "chosen": c[-1:], "rejected": [{"role": "assistant", "content": "no"}]}
        for c in CONVERSATIONS
    ]


def test_measuring_and_training_read_the_same_text(folders, written, tmp_path):
    """The first evaluation sees the card's scores; what is saved says what it reads, and the card's code gives its scores."""
    foreign, data = folders["llama-3"], written("对.jsonl", pairs())
    common = {"data": data, "device": "cpu", "dtype": "float32"}
    better, worse = card(foreign), card(foreign, [[*r["prompt"], *r["rejected"]] for r in pairs()])
    found = evaluate_accuracy(AccuracyConfig(reward_model=str(foreign), **common))
    assert found["margin_mean"] == close(sum(better) / 4 - sum(worse) / 4)
    run = {"max_steps": 1, "batch_size": 4, "learning_rate": 1e-3, "sample_every": 0, "output": tmp_path / "run"}
    summary = train_reward(RewardConfig(model=str(foreign), eval_data=data, **common, **run))
    assert summary["first_evaluation"]["eval/score_mean"] == close(sum(better + worse) / 8)
    final = tmp_path / "run" / "final"
    assert json.loads((final / "heedful.json").read_text(encoding="utf-8")) == {"reads": "template"}
    trained = reward_of(final)(*split(), [False] * 4)
    assert trained == close(card(final))
    assert trained != close(better)


def test_ours_say_what_they_read(tiny, written, tmp_path):
    """A model that was trained here ends a text with its turn, and says so; without that word it would be another's."""
    data, run = (
        written("对.jsonl", pairs()),
        {"max_steps": 1, "batch_size": 4, "sample_every": 0, "output": tmp_path / "run"},
    )
    model = tiny("qwen3", max_length=512)
    train_reward(RewardConfig(model=model, data=data, eval_fraction=0, device="cpu", dtype="float32", **run))
    final = tmp_path / "run" / "final"
    assert json.loads((final / "heedful.json").read_text(encoding="utf-8")) == {"reads": "turn-end"}
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(final, elsewhere)
    assert reward_of(elsewhere).inputs.reads == "turn-end"
    (elsewhere / "heedful.json").unlink()
    assert reward_of(elsewhere).inputs.reads == "template"


@pytest.mark.parametrize("place", ["best", "checkpoints/step-000001-interrupted"])
def test_older_folders_of_ours_are_read_as_they_were_trained(folders, tmp_path, place):
    """Before there was `reads`, a run's folders had no heedful.json, or one with an offset only."""
    folder = tmp_path / "run" / place
    shutil.copytree(folders["chatml"], folder)
    assert reward_of(folder).inputs.reads == "template"
    environment = tmp_path / "run" / "environment.json"
    for command, reads in (("heedful sft", "template"), ("heedful reward", "turn-end")):
        environment.write_text(json.dumps({"command": command}), encoding="utf-8")
        assert reward_of(folder).inputs.reads == reads
    environment.unlink()
    (folder / "heedful.json").write_text('{"offset": 0.5}', encoding="utf-8")
    assert (reward_of(folder).inputs.reads, reward_of(folder).model.offset) == ("turn-end", 0.5)


def test_the_padding_of_a_trained_model_stays(folders, tmp_path):
    """Another padding token would move the token that is read: with eos as padding, the one before the end."""
    shutil.copytree(folders["no-tail"], tmp_path / "m")
    tokenizer = load_tokenizer(str(tmp_path / "m"))
    tokenizer.chat_template = NO_TAIL + "{% if not add_generation_prompt %}{{ eos_token }}{% endif %}"
    tokenizer.save_pretrained(tmp_path / "m")
    expected = card(tmp_path / "m")
    assert reward_of(tmp_path / "m")(*split(), [False] * 4) == close(expected)
    model = load_reward_model(
        str(tmp_path / "m"), tokenizer, device=torch.device("cpu"), compute_dtype=torch.float32, seed=0
    )
    inputs = RewardInputs(tokenizer, model.reads)
    rows = [inputs.encode(tuple(Message(**m) for m in c[:-1]), c[-1]["content"]) for c in CONVERSATIONS]
    assert model.eval()(rows).tolist() == close(expected)
