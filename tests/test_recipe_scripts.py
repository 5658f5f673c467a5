"""The scripts of the recipes: what they make and measure, on files whose numbers are known by hand."""

import hashlib
import importlib
import itertools
import json
import math
import re
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from heedful import Message, Ranking, RewardConfig, SFTConfig, make_tiny_model, train_reward, train_sft
from heedful.data import read_prompts, read_rankings, split_by_prompt
from heedful.models import byte_tokenizer
from jsonl import read_jsonl

RECIPES = Path(__file__).parents[1] / "recipes"
BYTES = byte_tokenizer()


@pytest.fixture
def script(monkeypatch):
    """``script(name)`` is the module of a script, in its folder."""

    def load(name):
        folder, _, module = name.rpartition("/")
        monkeypatch.syspath_prepend(str(RECIPES / folder))
        return importlib.import_module(module)

    return load


@pytest.fixture
def run(script, monkeypatch, capsys):
    """``run(name, *words)``: exit status, standard output and standard error of a script, in this process."""

    def main(name, *words):
        module = script(name)
        monkeypatch.setattr(sys, "argv", [f"{RECIPES / name}.py", *map(str, words)])
        capsys.readouterr()
        try:
            module.main()
            status = 0
        except SystemExit as stopped:
            status = stopped.code
        return status, *capsys.readouterr()

    return main


@pytest.fixture
def refused(run):
    """``refused(name, words, *parts)``: a user's mistake, told in one line that has all parts."""

    def check(name, words, *parts):
        status, out, err = run(name, *words)
        assert (status, out) == (2, ""), err
        assert err.startswith(f"{Path(name).name}.py: ")
        assert err.count("\n") == 1, err
        for part in parts:
            assert part in err, err

    return check


def tokens(text):
    return BYTES(text).input_ids


# --------------------------------------------------------------------------------------------------------- sentiment_data

GOOD = [f"{i:02d} this film is a delight from its first minute to its last one ." for i in range(40)]
GOOD += [f"第{i:02d}部电影真好看，演员很出色，故事也很感人。" for i in range(40)]
BAD = [f"{i:02d} nobody should have to sit through such a long and empty film ." for i in range(30)]
BAD += [f"第{i:02d}部电影太无聊了，我看了一半就睡着了😴，很失望。" for i in range(30)]
SHORT = "不好看"
STORIES = [
    {"text": 'A fox met  a\ncrow one day.  "Give me the cheese!" said the fox.\n\nThe crow said nothing at all'},
    {"text": "从前有一只很聪明的小狐狸。它问：“乌鸦你今天好吗？”乌鸦没有回答它的问题！ 真的！"},
]
SENTENCES = [
    "A fox met a crow one day.",
    '"Give me the cheese!',
    "said the fox.",
    "The crow said nothing at all",
    "从前有一只很聪明的小狐狸。",
    "它问：“乌鸦你今天好吗？",
    "乌鸦没有回答它的问题！",
    "真的！",
]
REVIEWS = [{"text": text, "label": label} for label, texts in ((1, GOOD), (0, BAD)) for text in texts]


@pytest.fixture
def made(run, written, tiny, tmp_path):
    """``made(reviews, *flags)``: pairs and prompts that the script made of reviews and STORIES."""

    def make(reviews=REVIEWS, *flags, stories=STORIES, output="数据"):
        words = ["--sentences", written("句子.jsonl", reviews), "--stories", written("故事.jsonl", stories)]
        words += ["--model", tiny(), "--output", tmp_path / output, *flags]
        status, out, err = run("sentiment_data", *words)
        assert (status, err) == (0, "")
        pairs, prompts = (read_jsonl(tmp_path / output / f"{name}.jsonl") for name in ("pairs", "prompts"))
        assert f"pairs.jsonl: {len(pairs)} records" in out
        assert f"prompts.jsonl: {len(prompts)} records" in out
        return pairs, prompts

    return make


def test_pairs_are_a_positive_and_a_negative_text_without_an_end(made, tmp_path):
    """Each text once, 60 of the 80 positive ones; what is written is what a reward model is trained on."""
    pairs, _ = made([*REVIEWS, *REVIEWS[:5]])
    assert len(pairs) == 60
    assert all(p == p | {"prompt": "", "truncated": True} and len(p) == 4 for p in pairs)
    for side, texts in (("chosen", GOOD), ("rejected", BAD)):
        sources = [[text for text in texts if text.startswith(p[side])] for p in pairs]
        assert all(len(found) == 1 for found in sources)
        assert len({found[0] for found in sources}) == 60
    rankings = read_rankings(str(tmp_path / "数据" / "pairs.jsonl"))
    assert all(r.truncated and r.prompt == "" and r.ranks == (0, 1) for r in rankings)


def test_pairs_have_the_lengths_of_prompts_with_responses(made):
    """8 + 24 to 16 + 24 tokens, all of these lengths, and no character cut in half; shorter texts are whole."""
    pairs, _ = made()
    texts = [p[side] for p in pairs for side in ("chosen", "rejected")]
    assert {len(tokens(text)) for text in texts} == set(range(32, 41))
    assert not any("\ufffd" in text for text in texts)
    pairs, _ = made([{"text": GOOD[0], "label": 1}, {"text": SHORT, "label": 0}])
    assert pairs[0]["rejected"] == SHORT


def test_positive_and_negative_texts_are_paired_at_random(made):
    """In the order of the file, "00" would be beside "00"."""
    pairs, _ = made([review for review in REVIEWS if review["text"][0].isdigit()])
    assert sum(p["chosen"][:2] == p["rejected"][:2] for p in pairs) < 10
    assert [p["chosen"] for p in pairs] != sorted(p["chosen"] for p in pairs)


def test_prompts_are_beginnings_of_sentences(made, tmp_path):
    """Of both files, 8 to 16 tokens that the policy reads as they were, and the sentence goes on."""
    _, prompts = made()
    texts = [p["prompt"] for p in prompts]
    assert len(set(texts)) == len(texts) > 30
    assert {len(tokens(text)) for text in texts} == set(range(8, 17))
    for text in texts:
        assert any(s.startswith(text) and s != text for s in (*SENTENCES, *GOOD, *BAD)), text
    assert any(s.startswith(text) for text in texts for s in SENTENCES)
    assert any(s.startswith(text) for text in texts for s in GOOD if s.startswith("第"))
    assert [p.prompt for p in read_prompts(str(tmp_path / "数据" / "prompts.jsonl"))] == texts


def test_prompts_of_both_sources_are_different_ones(made):
    """Sentences that begin alike have nine beginnings of 8 to 16 tokens, however many there are in either file."""
    same = [f"It was a dark and stormy night {i}." for i in range(60)]
    reviews = [{"text": text, "label": i % 2} for i, text in enumerate(same)]
    _, prompts = made(reviews, stories=[{"text": " ".join(same)}])
    assert sorted(p["prompt"] for p in prompts) == [same[0][:length] for length in range(8, 17)]


@pytest.mark.parametrize("most", [1, 3])
def test_most_prompts_are_of_each_source(made, most):
    _, prompts = made(REVIEWS, "--prompts", most)
    own = [p for p in prompts if any(s.startswith(p["prompt"]) for s in SENTENCES)]
    assert (len(own), len(prompts)) == (most, 2 * most)


def test_the_same_seed_makes_the_same_files(made):
    first, second = made(output="a"), made(output="b")
    assert first == second
    other = made(REVIEWS, "--seed", 1, output="c")
    assert other[0] != first[0]
    assert other[1] != first[1]


@pytest.mark.parametrize(
    ("sentences", "stories", "parts"),
    [
        (None, STORIES, ["DataError", "absent.jsonl: no such file"]),
        ([{"label": 1}], STORIES, ["句子.jsonl:1: `text` is None"]),
        ([*REVIEWS, {"text": " ", "label": 1}], STORIES, ["句子.jsonl:141: `text` is ' '"]),
        ([{"text": "a"}], STORIES, ["句子.jsonl:1: `label` is None. Accepted: 1 (positive) or 0 (negative)"]),
        ([{"text": "a", "label": 2}], STORIES, ["句子.jsonl:1: `label` is 2"]),
        ([{"text": "a", "label": True}], STORIES, ["句子.jsonl:1: `label` is True"]),
        ([{"text": "a", "label": "1"}], STORIES, ["句子.jsonl:1: `label` is '1'"]),
        ("{", STORIES, ["句子.jsonl:1: not JSON"]),
        (REVIEWS, [{"story": "a"}], ["故事.jsonl:1: `text` is None"]),
        (REVIEWS[:3], STORIES, ["texts of both labels"]),
        ([{"text": "a", "label": 1}, {"text": "b", "label": 0}], [{"text": "c"}], ["of more than 8 tokens"]),
    ],
)
def test_what_is_no_data_for_sentiment(refused, written, tiny, tmp_path, sentences, stories, parts):
    path = "absent.jsonl" if sentences is None else written("句子.jsonl", sentences)
    words = ["--sentences", path, "--stories", written("故事.jsonl", stories), "--model", tiny()]
    refused("sentiment_data", [*words, "--output", tmp_path / "数据"], *parts)
    assert not (tmp_path / "数据").exists()


def test_what_is_no_model_or_folder_for_sentiment(refused, written, tiny, tmp_path):
    words = ["--sentences", written("句子.jsonl", REVIEWS), "--stories", written("故事.jsonl", STORIES)]
    refused("sentiment_data", [*words, "--model", tmp_path / "没有", "--output", tmp_path / "o"], "does not exist")
    refused("sentiment_data", [*words, "--model", tiny(), "--output", words[1]], "FileExistsError")


# ----------------------------------------------------------------------------------------------------------- bag_of_words


def ranking(chosen, rejected, *, prompt="问", swap=False, source="偏好.jsonl:1"):
    return Ranking(prompt, (rejected, chosen) if swap else (chosen, rejected), (1, 0) if swap else (0, 1), source)


POLITE = [ranking(f"thank you {word}", f"go away {word}", swap=swap) for word in "abc" for swap in (False, True)]


LABELLED = [("good film", 1)] * 20 + [("bad film", 0)] * 20 + [("good film", 0)]
"""One of 41 has the wrong label, which no judge can know."""
JUDGED = {
    "accuracy": 40 / 41,
    "before": 1 / 4,
    "after": 3 / 4,
    "standard_error": (1 / 3) ** 0.5 / 2,  # of the differences 1, 1, 0, 0
    "texts": 4,
}
SAMPLES = [
    {"prompt": "It was", "baseline": before, "response": after, "score": 0.0}
    for before, after in [("bad", "good"), ("a bad film", "a good film"), ("good", "so good"), ("bad", "bad 坏")]
]


def test_the_judge_as_a_command(run, written):
    reviews = written("影评.jsonl", [{"text": text, "label": label} for text, label in LABELLED])
    result = written("win_rate.json", json.dumps({"win_rate": 0.5, "samples": SAMPLES}))
    status, out, err = run("bag_of_words", "judge", "--data", reviews, "--result", result)
    assert (status, err) == (0, "")
    assert json.loads(out) == pytest.approx(JUDGED, abs=1e-12)


def test_accuracy_as_a_command_is_of_what_trainers_hold_out(run, written):
    """The held-out pairs are the wrong way round and the others are not: 0, where a half of all pairs would be more."""
    records = [{"prompt": f"第{i}题", "chosen": f"thank you {i}", "rejected": f"go away {i}"} for i in range(60)]
    path = written("偏好.jsonl", records)
    held_out = {item.prompt for item in split_by_prompt(read_rankings(path), 0.3)[1]}
    for record in records:
        if record["prompt"] in held_out:
            record["chosen"], record["rejected"] = record["rejected"], record["chosen"]
    status, out, err = run("bag_of_words", "accuracy", "--data", written("偏好.jsonl", records), "--eval-fraction", 0.3)
    assert (status, err) == (0, "")
    assert json.loads(out) == {"accuracy": 0.0, "pairs": len(held_out)}


@pytest.mark.parametrize(
    ("reviews", "result", "parts"),
    [
        (None, "{}", ["absent.jsonl: no such file"]),
        ([{"text": "a", "label": 3}], "{}", ["影评.jsonl:1: `label` is 3"]),
        ([{"label": 0}], "{}", ["影评.jsonl:1: `text` is None"]),
        ([("a", 1)] * 9 + [("b", 0)] * 4, "{}", ["影评.jsonl: the judge learns from five texts of each label or more"]),
        (LABELLED, None, ["absent.json: no result of `heedful evaluate win-rate`", "FileNotFoundError"]),
        (LABELLED, "{", ["win_rate.json: no result", "JSONDecodeError"]),
        (LABELLED, "{}", ["win_rate.json: no result", "with samples (KeyError: 'samples')"]),
        (LABELLED, '{"samples": [{"response": "a"}]}', ["win_rate.json: no result", "'baseline'"]),
        (LABELLED, "[1]", ["win_rate.json: no result", "TypeError"]),
        (LABELLED, '{"samples": []}', ["win_rate.json: 0 samples", "--num-samples"]),
        (LABELLED, json.dumps({"samples": SAMPLES[:1]}), ["win_rate.json: 1 samples", "--num-samples"]),
    ],
)
def test_what_cannot_be_judged(refused, written, reviews, result, parts):
    rows = [r if isinstance(r, dict) else {"text": r[0], "label": r[1]} for r in reviews or []]
    words = ["--data", "absent.jsonl" if reviews is None else written("影评.jsonl", rows)]
    words += ["--result", "absent.json" if result is None else written("win_rate.json", result)]
    refused("bag_of_words", ["judge", *words], *parts)


@pytest.mark.parametrize(
    ("records", "fraction", "parts"),
    [
        (None, 0.1, ["absent.jsonl: no such file"]),
        ([{"text": "a"}], 0.1, ["偏好.jsonl:1: not a preference pair or ranking"]),
        ([{"prompt": "a", "chosen": "b", "rejected": "c"}], 0.1, ["--eval-fraction 0.1 leaves"]),
        ([{"prompt": "a", "chosen": "b", "rejected": "c"}], 0, ["--eval-fraction is 0"]),
        ([{"prompt": "a", "chosen": "b", "rejected": "c"}], 2, ["--eval-fraction is 2.0"]),
    ],
)
def test_what_pairs_a_bag_of_words_refuses(refused, written, records, fraction, parts):
    path = "absent.jsonl" if records is None else written("偏好.jsonl", records)
    refused("bag_of_words", ["accuracy", "--data", path, "--eval-fraction", fraction], *parts)


# ----------------------------------------------------------------------------------------------------------- polite_folds


def fifth(prompt):
    """Where the prompt's SHA-256 falls, of five intervals."""
    return int.from_bytes(hashlib.sha256(prompt.encode("utf-8")).digest()) * 5 >> 256


@pytest.fixture
def polite(written, tiny, tmp_path):
    """Words of the command: a tiny model, two steps a fold, and 20 pairs under columns of other names."""
    rows = [{"问": f"第{i // 2}题", "好": f"thank you {i}", "坏": f"go away {i}"} for i in range(20)]
    columns = ["--columns", "prompt=问,chosen=好,rejected=坏"]
    words = ["--model", tiny(), "--data", written("偏好.jsonl", rows), *columns, "--output", str(tmp_path / "五折")]
    return [*words, "--max-steps", "2", "--batch-size", "4", "--sample-every", "0", "--device", "cpu"]


def test_five_folds_of_reward_models(run, script, polite, tmp_path, monkeypatch):
    """Each is trained on four fifths and measured on the fifth; the last lines are the means of the columns above.

    The model is the last one, not the best, which is chosen on the fifth that it is measured on.
    """
    measured = []
    evaluate = script("polite_folds").evaluate_accuracy
    monkeypatch.setattr(script("polite_folds"), "evaluate_accuracy", lambda c: (measured.append(c), evaluate(c))[1])
    status, out, err = run("polite_folds", *polite)
    assert status == 0, err
    assert [c.reward_model for c in measured] == [f"{tmp_path}/五折/fold-{index}/final" for index in range(5)]
    rows = read_jsonl(tmp_path / "偏好.jsonl")
    said = re.findall(r"^fold (\d): (\d+) pairs, reward model ([\d.]{5}), bag of words ([\d.]{5})$", out, re.MULTILINE)
    assert [line[0] for line in said] == list("01234")
    for index in range(5):
        train, held_out = (read_jsonl(tmp_path / "五折" / f"{name}-{index}.jsonl") for name in ("train", "held-out"))
        assert held_out == [row for row in rows if fifth(row["问"]) == index]
        assert train == [row for row in rows if fifth(row["问"]) != index]
        assert int(said[index][1]) == len(held_out) > 0
        summary = json.loads((tmp_path / "五折" / f"fold-{index}" / "summary.json").read_text(encoding="utf-8"))
        assert summary["data"] == {"records": 20, "train": len(train), "held_out": len(held_out)}
        assert float(said[index][2]) == pytest.approx(summary["last_evaluation"]["eval/accuracy"], abs=5e-4)
        assert said[index][3] == "1.000"
    found = re.findall(r"^(.*): mean (\d\.\d{3}), standard error (\d\.\d{3})$", out, re.MULTILINE)
    values = [float(line[2]) for line in said]
    mean, error = statistics.mean(values), statistics.stdev(values) / 5**0.5
    assert found[0][0] == "reward model"
    assert [float(number) for number in found[0][1:]] == pytest.approx([mean, error], abs=1e-3)
    assert found[1] == ("bag of words", "1.000", "0.000")


def test_what_five_folds_refuse(refused, polite, tmp_path):
    refused("polite_folds", [*polite, "--eval-data", "d.jsonl"], "ConfigError", "--eval-data")
    refused("polite_folds", [*polite, "--unusable", "drop"], "ConfigError", "--unusable")
    refused("polite_folds", [*polite, "--data", "absent.jsonl"], "DataError", "absent.jsonl: no such file")
    refused(
        "polite_folds",
        [*polite, "--columns", "prompt=问"],
        "DataError",
        "偏好.jsonl:1: not a preference pair or ranking",
    )
    refused("polite_folds", ["absent.yaml", *polite], "ConfigError", "absent.yaml")
    refused("polite_folds", [*polite, "--model", "no/such/model"], "CheckpointError")


@pytest.mark.exhaustive
def test_the_scripts_find_each_other(tmp_path):
    """Run as a program from another folder: polite_folds needs bag_of_words, which needs sentiment_data."""
    words = ["--model", "m", "--data", "absent.jsonl", "--output", "o"]
    done = subprocess.run(
        [sys.executable, str(RECIPES / "polite_folds.py"), *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("polite_folds.py: DataError: absent.jsonl: no such file")
    assert done.stderr.count("\n") == 1


# ------------------------------------------------------------------------------------------------------------ digits_data


def words(first, last, **replaced):
    """ "w1 w2 ...": a number inside a word is none. ``w7="3"`` puts another word in the place of w7."""
    return " ".join(replaced.get(f"w{i}", f"w{i}") for i in range(first, last + 1))


def test_prompts_are_windows_of_20_words_with_a_number(run, written, tmp_path):
    """One after the other from the first word; what is left over at the end is no window, whatever is in it."""
    texts = [
        words(1, 45, w21="7", w45="9"),  # in the second window, and in the rest
        words(1, 40, w20="有3只狐狸", w40="1.5"),  # a digit between Chinese characters is a number, and so is 1 of 1.5
        words(1, 20, w1="x3", w20="3rd"),
        words(1, 19, w1="3"),
    ]
    others = ["  " + words(1, 20, w5="\n\n3\t"), words(1, 45, w21="7")]
    files = [written("故事.jsonl", [{"text": t} for t in texts]), written("b.jsonl", [{"text": t} for t in others])]
    path = tmp_path / "数据" / "prompts.jsonl"
    status, out, err = run("digits_data", "--texts", *files, "--output", path)
    assert (status, err, out) == (0, "", f"{path}: 4 records\n")
    expected = [
        words(21, 40, w21="7"),  # once, though it is in both files
        words(1, 20, w20="有3只狐狸"),
        words(21, 40, w40="1.5"),
        words(1, 20, w5="3"),
    ]
    assert [prompt.prompt for prompt in read_prompts(str(path))] == expected


@pytest.mark.parametrize(
    ("records", "parts"),
    [
        (None, ["DataError", "absent.jsonl: no such file"]),
        ([{"text": words(1, 20, w1="3")}, {"story": "3"}], ["故事.jsonl:2: `text` is None. Accepted: a string"]),
        ([{"text": " \n"}], ["故事.jsonl:1: `text` is ' \\n'"]),
        ([{"text": words(1, 60)}, {"text": "3"}], ["DataError", "no 20 words in a row hold a number in", "故事.jsonl"]),
    ],
)
def test_what_are_no_texts_with_numbers(refused, written, tmp_path, records, parts):
    path = "absent.jsonl" if records is None else written("故事.jsonl", records)
    refused("digits_data", ["--texts", path, "--output", tmp_path / "数据" / "p.jsonl"], *parts)
    assert not (tmp_path / "数据").exists()


# ------------------------------------------------------------------------------------------------------------ digits_text


def test_what_a_model_of_equal_odds_writes(run, written, tmp_path):
    """Every one of the 264 tokens is as likely, so the n-th uniform number u is the token floor(264 u); the first two prompts
    of three. Another model has odds of its own, and to this base its responses are as likely as any."""
    model, other = tmp_path / "等", tmp_path / "别"
    for folder, spread in ((model, 1e-8), (other, 1.0)):
        make_tiny_model("qwen3", folder, hidden_size=16, num_layers=1, initializer_range=spread)
    data = written("问.jsonl", [{"prompt": "问"}, {"prompt": "a longer one"}, {"prompt": "b"}])
    sizes = ["--num-prompts", 2, "--max-new-tokens", 200, "--seed", 3]
    status, out, err = run("digits_text", "--models", model, other, "--data", data, *sizes)
    uniforms = torch.rand(2, 200, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    responses = (264 * uniforms).long().tolist()
    texts = [BYTES.decode(ids) for ids in responses]
    counts = [len(re.findall(r"(?a)\b\d+\b", text)) for text in texts]
    assert 0 < max(counts) < 5
    score = statistics.fmean(0.2 * n if n else -0.2 for n in counts)
    share = statistics.fmean(n > 0 for n in counts)
    bigrams = [pair for ids in responses for pair in itertools.pairwise(ids)]
    base, answer, others, answer_of_other = out.splitlines()
    assert base == (
        f"{model}: score {score:.3f}, with a number {share:.3f}, log-prob a token under the base {-math.log(264):.3f}, "
        f"distinct bigrams {len(set(bigrams)) / 398:.3f}"
    )
    assert answer == f"    {texts[0]!r}" != answer_of_other
    assert others.startswith(f"{other}: score ")
    assert f" under the base {-math.log(264):.3f}, " in others
    assert (status, err) == (0, "")


# ------------------------------------------------------------------------------------------------------------- gsm8k_data

SUMS = [
    {"question": "Tom has 3 pens, and buys 4. How many now?", "answer": "3 + 4 = 7\n#### 7", "id": 1},
    {"question": "小明有42个苹果，吃了2个，还有几个？", "answer": 40},
]


def test_questions_become_conversations(run, written, tmp_path):
    """Read as the recipe reads them, under the name of its column; the answers reach the rule as they were."""
    path = tmp_path / "数据" / "questions.jsonl"
    status, out, err = run("gsm8k_data", "--data", written("数学.jsonl", SUMS), "--output", path)
    assert (status, err, out) == (0, "", f"{path}: 2 records\n")
    prompts = read_prompts(str(path), columns="prompt=question", system_prompt="一步一步想。")
    assert [p.prompt for p in prompts] == [
        (Message("system", "一步一步想。"), Message("user", s["question"])) for s in SUMS
    ]
    assert [p.columns for p in prompts] == [{"answer": "3 + 4 = 7\n#### 7"}, {"answer": 40}]


@pytest.mark.parametrize(
    ("records", "parts"),
    [
        (None, ["DataError", "absent.jsonl: no such file"]),
        (
            [*SUMS, {"question": SUMS[0]["question"]}],
            ["数学.jsonl:3: `answer` is None. Accepted: a text that holds a number"],
        ),
        ([{"question": "1+1?", "answer": "two"}], ["数学.jsonl:1: `answer` is 'two'"]),
        ([{"question": "", "answer": "2"}], ["数学.jsonl:1: `question` is ''. Accepted: a string"]),
        ([{"problem": "1+1?", "answer": "2"}], ["数学.jsonl:1: `question` is None"]),
    ],
)
def test_what_are_no_questions(refused, written, tmp_path, records, parts):
    path = "absent.jsonl" if records is None else written("数学.jsonl", records)
    refused("gsm8k_data", ["--data", path, "--output", tmp_path / "数据" / "q.jsonl"], *parts)
    assert not (tmp_path / "数据").exists()


# ----------------------------------------------------------------------------------------------------- lora/chinese_data

FAMILIES = [
    *("sums", "opposites", "反义词", "colours", "categories", "definitions", "加法"),
    *("lists", "chinese", "french", "greetings", "颜色", "refusals", "问候"),
]
"""All of the demo's world, the four that are asked in Chinese among the others."""
WORLD = {
    "demonstrations": [{"family": f, "completion": f"{f}{i}", "truncated": i > 1} for i in range(3) for f in FAMILIES],
    "preferences": [{"family": f, "chosen": "好", "margin": None} for f in FAMILIES[:4]],
    "gold_preferences": [{"family": f, "chosen": "很好"} for f in FAMILIES],
    "prompts": [{"family": f, "prompt": [{"role": "user", "content": f"{f}？"}]} for f in reversed(FAMILIES)],
}
CHINESE = {"demonstrations": (12, 42), "preferences": (1, 4), "gold_preferences": (4, 14), "prompts": (4, 14)}


@pytest.fixture
def world(written, tmp_path):
    """``world(changes)``: a folder with the files of `WORLD`, changed; None leaves one out."""

    def write(**changes):
        (tmp_path / "世界").mkdir()
        for name, records in (WORLD | changes).items():
            if records is not None:
                written(f"世界/{name}.jsonl", records)
        return tmp_path / "世界"

    return write


def test_the_chinese_families_in_files_of_their_own(run, world, tmp_path):
    """Every record as it was and in its order."""
    status, out, err = run("lora/chinese_data", "--world", world(), "--output", tmp_path / "中文")
    assert (status, err) == (0, "")
    for name, (kept, of) in CHINESE.items():
        assert f"{name}.jsonl: {kept} of {of} records\n" in out
        found = read_jsonl(tmp_path / "中文" / f"{name}.jsonl")
        assert len(found) == kept
        assert found == [row for row in WORLD[name] if row["family"] in ("反义词", "加法", "颜色", "问候")]


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"gold_preferences": None}, ["DataError", "gold_preferences.jsonl: no such file"]),
        ({"prompts": "{"}, ["prompts.jsonl:1: not JSON"]),
        ({"prompts": [{"prompt": "你好"}]}, ["prompts.jsonl: no record is of a Chinese family", "the world of a demo"]),
        ({"preferences": WORLD["preferences"][:2]}, ["/preferences.jsonl: no record is of a Chinese family"]),
    ],
)
def test_what_is_no_world(refused, world, tmp_path, changes, parts):
    refused("lora/chinese_data", ["--world", world(**changes), "--output", tmp_path / "中文"], *parts)
    assert not (tmp_path / "中文").exists()


# --------------------------------------------------------------------------------------------------------------- rule/hits


# ------------------------------------------------------------------------------------------------------ scratch/measure

CPU = {"device": torch.device("cpu"), "compute_dtype": torch.float32}
ANSWERS = {"1+1?": "2", "你好": "好"}
PAIR = {"prompt": "1+1?", "chosen": "是2", "rejected": "3"}


def conversations(record):
    roles = {"prompt": "user", "completion": "assistant", "chosen": "assistant", "rejected": "assistant"}
    return {name: [{"role": roles[name], "content": text}] for name, text in record.items()}


@pytest.fixture
def taught(written, tiny, tmp_path):
    """``taught(name, answers)``: a run in which a model learned these answers by heart."""

    def train(name, answers):
        data = written(f"{name}.jsonl", [conversations({"prompt": q, "completion": a}) for q, a in answers.items()])
        settings = {"max_steps": 40, "batch_size": 2, "learning_rate": 1e-2, "eval_fraction": 0.0, "sample_every": 0}
        output = tmp_path / "运行" / name
        train_sft(SFTConfig(model=tiny(max_length=256), data=data, output=output, dtype="float32", **settings))

    return train


@pytest.mark.exhaustive
def test_what_came_of_the_runs_from_scratch(run, script, taught, written, tiny, tmp_path, monkeypatch):
    """SFT knows the demonstrations; "PPO" gives the preferred answer to one, which is wanted as well, until it is not."""
    written("demonstrations.jsonl", [conversations({"prompt": q, "completion": a}) for q, a in ANSWERS.items()])
    pairs = written("preferences.jsonl", [conversations(PAIR)])
    settings = {"max_steps": 10, "batch_size": 1, "learning_rate": 5e-3, "eval_fraction": 0.0, "sample_every": 0}
    reward = RewardConfig(model=tiny(max_length=256), data=pairs, output=tmp_path / "运行" / "reward", **settings)
    train_reward(reward)
    taught("sft", ANSWERS)
    taught("ppo", ANSWERS | {"1+1?": "是2"})
    monkeypatch.setattr(script("scratch/measure"), "HERE", tmp_path)
    monkeypatch.setattr(script("scratch/measure"), "SAMPLES", 2)
    status, out, err = run("scratch/measure", tmp_path / "运行")
    assert status == 0, err
    found = json.loads(out)
    assert found["reward"] == {"pairs in order": 1}
    assert found["sft"]["greedy"] == ANSWERS
    assert found["ppo"]["greedy"] == ANSWERS | {"1+1?": "是2"}
    assert [(found[name]["exact"], found[name]["wanted"]) for name in ("sft", "ppo")] == [(2, 2), (1, 2)]
    assert found["sft"]["log odds of chosen"][0] < 0 < found["ppo"]["log odds of chosen"][0]
    written("preferences.jsonl", [conversations(PAIR | {"chosen": "3", "rejected": "是2"})])
    turned = json.loads(run("scratch/measure", tmp_path / "运行")[1])
    assert turned["reward"] == {"pairs in order": 0}
    assert [(turned[name]["exact"], turned[name]["wanted"]) for name in ("sft", "ppo")] == [(2, 2), (1, 1)]
    for name in ("sft", "ppo"):
        (before,), (after,) = (result[name]["log odds of chosen"] for result in (found, turned))
        assert after == pytest.approx(-before, abs=1e-5)


def test_what_has_no_runs_from_scratch(refused, tiny, tmp_path):
    refused("scratch/measure", [tmp_path], "CheckpointError", "sft/final does not exist")


def chinese_pair(number):
    """The chosen response has 好 and is the shorter one; in every third pair by one character of nine, which is similar."""
    length = 9 if number % 3 == 0 else 18
    return {"prompt": f"问题 {number}", "chosen": "好" + "。" * 7, "rejected": "坏" + "。" * (length - 1)}


def test_what_a_reward_model_has_to_beat(run, written):
    """The longer response is always wrong here, and one character is always right; ties count one half."""
    records = [chinese_pair(number) for number in range(90)]
    status, out, err = run(
        "lora/pair_baselines", "--data", written("pairs.jsonl", records), "--eval-fraction", 0.3, "--characters"
    )
    assert (status, err) == (0, "")
    numbers = json.loads(out)
    held_out = [p.prompt for p in split_by_prompt(read_rankings(written("pairs.jsonl", records)), 0.3)[1]]
    similar = sum(int(prompt.split()[1]) % 3 == 0 for prompt in held_out)
    assert (numbers.pop("pairs"), numbers.pop("pairs_similar_length")) == (len(held_out), similar)
    assert 0 < similar < len(held_out)
    assert numbers == {
        "longer_accuracy": 0.0,
        "longer_accuracy_similar_length": 0.0,
        "bag_accuracy": 1.0,
        "bag_accuracy_similar_length": 1.0,
    }
    tied = [record | {"rejected": "坏" + "。" * 7} for record in records]
    _, out, _ = run(
        "lora/pair_baselines", "--data", written("tied.jsonl", tied), "--eval-fraction", 0.3, "--characters"
    )
    assert json.loads(out)["longer_accuracy"] == 0.5


def test_what_is_no_pair_for_the_baselines(refused, written):
    """A longer ranking, and nothing held out."""
    ranking = {"prompt": "问", "responses": ["一", "二", "三"], "ranks": [1, 2, 2]}
    pairs = [chinese_pair(number) for number in range(40)]
    refused("lora/pair_baselines", ["--data", written("r.jsonl", [ranking, *pairs])], "a ranking of 3 responses", ":1")
    refused(
        "lora/pair_baselines", ["--data", written("few.jsonl", pairs[:3]), "--eval-fraction", 0.001], "--eval-fraction"
    )
