"""``--offset-data``: each saved reward model gives its demonstrations a mean score of 0, wherever heedful loads it."""

import json

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from heedful import AccuracyConfig, ConfigError, DataError, RewardConfig, evaluate_accuracy, train_reward
from heedful.data import read_demonstrations
from heedful.data.chat import RewardInputs
from heedful.data.messages import as_dict
from heedful.models import load_reward_model, load_tokenizer
from heedful.rewards.models import ModelReward
from heedful.rewards.resolve import resolve_rewards
from heedful.training.provenance import content_hashes
from jsonl import write_jsonl

CPU = torch.device("cpu")
FACTS = [("你好", "您好！"), ("2+2?", "4"), ("name a colour", "blue, or red")]


@pytest.fixture
def train(tiny, tmp_path):
    """``train(name, **settings)`` trains for four steps on six pairs, evaluated each step."""
    words = ["苹果", "b", "cd", "efg", "hij", "k"]
    pairs = [{"prompt": f"第{i}题", "chosen": f"{w}z", "rejected": w} for i, w in enumerate(words)]

    def run(name, **changes):
        settings = {
            "data": write_jsonl(tmp_path / "pairs.jsonl", pairs), "eval_data": write_jsonl(tmp_path / "held.jsonl", pairs),
            "batch_size": 3, "max_steps": 4, "eval_every": 1, "sample_every": 0, "learning_rate": 1e-2,
            "dtype": "float32", "model": tiny("gpt2"),
        }  # fmt: skip
        train_reward(RewardConfig(output=tmp_path / name, **(settings | changes)))
        return tmp_path / name

    return run


@pytest.fixture
def demonstrations(tmp_path):
    """A file of three, one of them cut; its path."""
    records = [{"prompt": p, "completion": c, "truncated": i == 2} for i, (p, c) in enumerate(FACTS)]
    return write_jsonl(tmp_path / "示例.jsonl", records)


def load(folder):
    tokenizer = load_tokenizer(str(folder))
    model = load_reward_model(str(folder), tokenizer, device=CPU, compute_dtype=torch.float32).eval()
    return model, RewardInputs(tokenizer)


def scores(folder):
    model, inputs = load(folder)
    return torch.tensor(ModelReward(model, inputs)(*zip(*FACTS, strict=True), [False, False, True]))


def offset_of(folder):
    return json.loads((folder / "heedful.json").read_text(encoding="utf-8"))["offset"]


def test_every_saved_model_has_its_own_offset_and_nothing_else_changes(train, demonstrations, tmp_path):
    """best/, final/ and checkpoints/: their weights differ, so do their offsets, and 0 is where the mean is in each.

    Training does not know it, other tools read the raw head, and without the flag no offset is written. Rewards and
    evaluation apply it; the file of demonstrations is written down and protected.
    """
    plain, run = train("plain"), train("run", offset_data=demonstrations, save_every=3)
    folders = [run / "best", run / "final", run / "checkpoints" / "step-000003"]
    offsets = [offset_of(folder) for folder in folders]
    assert len({f"{offset:.3f}" for offset in (*offsets, 0.0)}) == 4
    for folder, offset in zip(folders, offsets, strict=True):
        assert load(folder)[0].offset == offset
        found = scores(folder)
        assert float(found.mean()) == pytest.approx(0, abs=1e-5)
        assert float(found.std()) > 1e-3
    for folder in ("best", "final"):
        assert "offset" not in json.loads((plain / folder / "heedful.json").read_text(encoding="utf-8"))
        weights = [(one / folder / "model.safetensors").read_bytes() for one in (plain, run)]
        assert weights[0] == weights[1]
    final, offset = run / "final", offsets[1]
    torch.testing.assert_close(scores(final) + offset, scores(plain / "final"), rtol=1e-5, atol=1e-5)
    classifier = AutoModelForSequenceClassification.from_pretrained(final, dtype=torch.float32).eval()
    model, inputs = load(final)
    row = inputs.encode(*FACTS[0])
    raw = classifier(torch.tensor([row["input_ids"]])).logits[0, 0]
    torch.testing.assert_close(raw - model.offset, model([row])[0], rtol=1e-5, atol=1e-5)
    (reward,) = resolve_rewards([f"model:{final}"], device=CPU, compute_dtype=torch.float32)
    prompts, answers = zip(*FACTS, strict=True)
    given = reward.function(prompts=prompts, completions=answers, truncated=[False, False, True])
    assert sum(given) / 3 == pytest.approx(0, abs=1e-5)
    data = write_jsonl(tmp_path / "good.jsonl", [{"prompt": p, "chosen": c, "rejected": f"{c}?"} for p, c in FACTS])
    config = AccuracyConfig(reward_model=str(final), data=data, device="cpu", dtype="float32")
    shifted = evaluate_accuracy(config)["score_mean"]
    (final / "heedful.json").unlink()
    assert evaluate_accuracy(config)["score_mean"] - shifted == pytest.approx(offset, abs=1e-5)
    environment = json.loads((run / "environment.json").read_text(encoding="utf-8"))
    assert demonstrations in environment["data"]
    inside = write_jsonl(run / "示例.jsonl", [{"prompt": "问", "completion": "好"}])
    with pytest.raises(ConfigError, match="which this run needs and --overwrite would delete"):
        train("run", offset_data=inside, overwrite=True)


def test_training_goes_on_from_a_model_with_an_offset(train, demonstrations):
    """Its scores go on from where they were; a new offset does not count the old one twice. Two reward models that score
    differently are not the same parent."""
    first = train("first", offset_data=demonstrations, max_steps=1)
    kept = train("kept", model=str(first / "final"), max_steps=1)
    assert offset_of(kept / "final") == offset_of(first / "final")
    renewed = train("renewed", model=str(first / "final"), offset_data=demonstrations, max_steps=1)
    assert float(scores(renewed / "final").mean()) == pytest.approx(0, abs=1e-5)
    before = content_hashes([str(first / "final")])
    (first / "final" / "heedful.json").write_text('{"offset": 5}', encoding="utf-8")
    assert content_hashes([str(first / "final")]) != before


def test_demonstrations_are_read_as_for_sft(train, tmp_path):
    """Conversations give one demonstration for every answer; --columns is for the preferences alone."""
    turns = [
        {"role": r, "content": c} for r, c in (("user", "你好"), ("assistant", "好"), ("user", "?"), ("assistant", "!"))
    ]
    path = write_jsonl(tmp_path / "chat.jsonl", [{"messages": turns}])
    data = write_jsonl(tmp_path / "named.jsonl", [{"q": f"{i}", "chosen": "a", "rejected": "b"} for i in range(3)])
    final = train("run", offset_data=path, data=data, eval_data=data, columns="prompt=q", max_steps=1) / "final"
    model, inputs = load(final)
    read = read_demonstrations(path)
    assert len(read) == 2
    found = ModelReward(model, inputs)(
        [[*map(as_dict, d.prompt)] for d in read], [d.response for d in read], [False] * 2
    )
    assert sum(found) == pytest.approx(0, abs=1e-5)


def test_unusable_and_too_long_demonstrations(train, tmp_path):
    """An error before anything is written, or counted."""
    good, long, empty = ({"prompt": "问", "completion": c} for c in ("好", "很" * 99, " "))
    path = write_jsonl(tmp_path / "示例.jsonl", [*[good] * 18, long, empty])
    with pytest.raises(DataError, match=r"示例\.jsonl:20: `completion` is empty"):
        train("run", offset_data=path)
    with pytest.raises(DataError, match=r"1 of 19 demonstrations are longer than 128 tokens: .*示例\.jsonl:19"):
        train("run", offset_data=path, unusable="drop")
    assert not (tmp_path / "run").exists()
    with pytest.raises(DataError, match=r"2 of 20 records .* more than --max-dropped 0.05"):
        train("run", offset_data=path, unusable="drop", too_long="drop", max_dropped=0.05)
    dropped = train("dropped", offset_data=path, unusable="drop", too_long="drop", max_steps=1)
    cut = train("cut", offset_data=path, unusable="drop", too_long="truncate", max_steps=1)
    counts = [json.loads((run / "summary.json").read_text(encoding="utf-8"))["offset_data"] for run in (dropped, cut)]
    assert counts[0] == {"records": 20, "dropped_unusable": 1, "unusable/empty completion": 1, "dropped_too_long": 1}
    assert counts[1] == {"records": 20, "dropped_unusable": 1, "unusable/empty completion": 1, "truncated": 1}
    assert offset_of(dropped / "final") != offset_of(cut / "final")
    model, inputs = load(cut / "final")
    row = inputs.encode("问", "很" * 99, max_length=128)
    total = 18 * model([inputs.encode("问", "好")])[0] + model([row])[0]
    assert float(total.detach()) == pytest.approx(0, abs=1e-3)
