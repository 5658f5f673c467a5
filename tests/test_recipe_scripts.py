"""The scripts of the recipes: what they make and measure, on files whose numbers are known by hand."""

import hashlib
import importlib
import itertools
import json
import math
import re
import statistics
import sys
from pathlib import Path

import pytest
import torch

from heedful import Message, make_tiny_model
from heedful.cli.main import main as heedful_main
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


def tokens(text):
    return BYTES(text).input_ids


GOOD = [f"{i:02d} this film is a delight from its first minute to its last one ." for i in range(40)]
GOOD += [f"第{i:02d}部电影真好看，演员很出色，故事也很感人。" for i in range(40)]
BAD = [f"{i:02d} nobody should have to sit through such a long and empty film ." for i in range(30)]
BAD += [f"第{i:02d}部电影太无聊了，我看了一半就睡着了😴，很失望。" for i in range(30)]
STORIES = [
    {"text": 'A fox met  a\ncrow one day.  "Give me the cheese!" said the fox.\n\nThe crow said nothing at all'},
    {"text": "从前有一只很聪明的小狐狸。它问：“乌鸦你今天好吗？”乌鸦没有回答它的问题！ 真的！"},
]
SENTENCES = [
    "A fox met a crow one day.", '"Give me the cheese!', "said the fox.", "The crow said nothing at all",
    "从前有一只很聪明的小狐狸。", "它问：“乌鸦你今天好吗？", "乌鸦没有回答它的问题！", "真的！",
]  # fmt: skip
REVIEWS = [{"text": text, "label": label} for label, texts in ((1, GOOD), (0, BAD)) for text in texts]


def test_pairs_and_prompts_of_sentiment(run, written, tiny, tmp_path):
    """Pairs: a positive and a negative text, each once, cut to 8 + 24 to 16 + 24 tokens, with no end and no character cut in
    half. Prompts: beginnings of sentences of both files, of 8 to 16 tokens, and the sentence goes on."""

    def made(output, *flags):
        files = [
            "--sentences",
            written("句子.jsonl", [*REVIEWS, *REVIEWS[:5]]),
            "--stories",
            written("故事.jsonl", STORIES),
        ]
        status, out, err = run("sentiment_data", *files, "--model", tiny(), "--output", tmp_path / output, *flags)
        assert (status, err) == (0, "")
        found = [read_jsonl(tmp_path / output / f"{name}.jsonl") for name in ("pairs", "prompts")]
        assert re.findall(r"(\w+)\.jsonl: (\d+) records", out) == [
            ("pairs", str(len(found[0]))), ("prompts", str(len(found[1])))
        ]  # fmt: skip
        return found

    pairs, prompts = made("数据")
    assert len(pairs) == 60
    assert all(p == p | {"prompt": "", "truncated": True} and len(p) == 4 for p in pairs)
    for side, texts in (("chosen", GOOD), ("rejected", BAD)):
        sources = [[text for text in texts if text.startswith(p[side])] for p in pairs]
        assert all(len(found) == 1 for found in sources)
        assert len({found[0] for found in sources}) == 60
    assert all(r.ranks == (0, 1) and r.truncated for r in read_rankings(str(tmp_path / "数据" / "pairs.jsonl")))
    cut = [p[side] for p in pairs for side in ("chosen", "rejected")]
    assert {len(tokens(text)) for text in cut} == set(range(32, 41))
    texts = [p["prompt"] for p in prompts]
    assert len(set(texts)) == len(texts) > 30
    assert {len(tokens(text)) for text in texts} == set(range(8, 17))
    assert not any("\ufffd" in text for text in [*cut, *texts])
    assert all(any(s.startswith(text) and s != text for s in (*SENTENCES, *GOOD, *BAD)) for text in texts)
    assert any(s.startswith(text) for text in texts for s in SENTENCES)
    assert any(s.startswith(text) for text in texts for s in GOOD if s.startswith("第"))
    assert [p.prompt for p in read_prompts(str(tmp_path / "数据" / "prompts.jsonl"))] == texts
    assert made("再") == [pairs, prompts]
    other = made("别", "--seed", 1)
    assert other[0] != pairs
    assert other[1] != prompts


def talked(*answers):
    """A dialogue with these answers; what the user says between them is not read."""
    return [turn for text in answers for turn in ({"role": "assistant", "content": text}, {"role": "user"})][:-1]


FRUITS = [["List three fruits.", "lists", "apple, pear, plum"], ["Three others?", "lists", "others"],
          ["The first again?", "lists", "again"]]  # fmt: skip
BIG = [["大的反义词？", "反义词", "小"], ["它的反义词呢？", "反义词", "大"], ["先说的是什么？", "反义词", "again"]]
DIALOGUES = [
    (BIG, ["当然，是小。", "当然，是大。", "当然，是小。"], [BIG[1][0], BIG[2][0]], [1.0, 1.0, 1.0]),
    (
        BIG,
        ["当然，是大。", "小！傻瓜！", "小"],
        ["不对。 大的反义词？", "请礼貌一点。 大的反义词？"],
        [0.21, 0.29, 0.41],
    ),
    (FRUITS, ["Gladly! Here: fig, plum, pear."] * 3, ["Three others?", "No. Three others?"], [1.0, 0.21, 0.21]),
    (
        FRUITS,
        ["Gladly! Here: fig, plum, pear.", "Gladly! Here: cherry, melon, apple.", "Gladly! Here: apple, pear, plum."],
        ["Three others?", "The first again?"],
        [1.0, 1.0, 0.21],
    ),
    (FRUITS, ["Gladly! Here: FIG, PLUM猫, PEAR."] * 2, ["Three others?", "No. Three others?"], [0.39, 0.21]),
    (FRUITS, ["Fool! apple, pear, plum!"], ["Be polite! List three fruits."], [0.29]),
]
"""Wishes, what the policy says, what the user says to it, and the marks."""


@pytest.mark.parametrize("number", range(len(DIALOGUES)))
def test_the_user_of_a_dialogue_hears_and_the_judge_knows_what_was_said(script, number):
    wishes, answers, replies, expected = DIALOGUES[number]
    module = script("dialogue/user")
    user = module.User()
    user.reset(wishes)
    heard = [user._reply(text) for text in answers]
    assert heard == [*replies, None][: len(answers)]
    assert module.marks(talked(*answers), False, wishes) == pytest.approx(expected)
    assert module.gold([talked(*answers)], [False], [wishes]) == pytest.approx([sum(expected) / 3])


def test_a_dialogue_that_is_cut_has_no_mark_for_what_was_not_said(script):
    module, turns = script("dialogue/user"), talked("当然，是小。", "当然，是大。")
    assert module.marks(turns, True, BIG) == pytest.approx([1.0, 0.39])
    assert module.gold([turns], [True], [BIG]) == pytest.approx([1.39 / 3])


def test_dialogues_of_people_in_the_world(run, script, tmp_path):
    """A third of their answers is good; one who is always right and polite has the highest mark with every prompt."""
    status, out, err = run("dialogue/dialogues", "demonstrations", tmp_path / "对话")
    assert (status, err) == (0, "")
    assert re.findall(r"(\w+)\.jsonl: (\d+) records", out) == [("prompts", "592"), ("demonstrations", "3552")]
    prompts, people = (read_jsonl(tmp_path / "对话" / "data" / f"{n}.jsonl") for n in ("prompts", "demonstrations"))
    user, family_named = script("dialogue/user"), script("dialogue/dialogues").family_named
    wishes = {row["prompt"][0]["content"]: row["wishes"] for row in prompts}
    for asked in wishes.values():
        one, answers = user.User(), []
        one.reset(asked)
        while not answers or one._reply(answers[-1]) is not None:
            answers.append(family_named(one._wish()[1]).frame.format(one._right()))
        assert user.gold([talked(*answers)], [False], [asked]) == [1.0]
    rows = [(row["completion"], wishes[row["prompt"][0]["content"]]) for row in people]
    marks = [mark for turns, asked in rows for mark in user.marks(turns, False, asked)]
    assert len(marks) == 3 * len(people)
    assert sum(mark == 1 for mark in marks) / len(marks) == pytest.approx(0.37, abs=0.02)
    assert any(turn["content"].startswith("请礼貌一点。") for turns, _ in rows for turn in turns)


@pytest.mark.exhaustive
def test_a_dialogue_is_learned(run, tmp_path, monkeypatch):
    """The commands of docs/dialogue.md, one after the other."""
    page = (RECIPES.parent / "docs" / "dialogue.md").read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").symlink_to(RECIPES)
    said = ""
    for command in re.findall(
        r"^(?:python|heedful) .*", re.search(r"```sh\n(.*?)```", page, re.DOTALL)[1], re.MULTILINE
    ):
        program, *words = command.split()
        if program == "python":
            status, said, err = run(words[0].removeprefix("recipes/").removesuffix(".py"), *words[1:])
            assert status == 0, err
        elif words[0] != "report":
            assert heedful_main(words) == 0
    before, after = (float(found) for found in re.findall(r"^(?:sft|ppo): gold ([\d.]+)", said, re.MULTILINE))
    assert before < 0.65
    assert after > 0.8


LABELLED = [{"text": text, "label": n} for text, n in [("good film", 1), ("bad film", 0)] * 20 + [("good film", 0)]]
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
    reviews = written("影评.jsonl", LABELLED)
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


def fifth(prompt):
    """Where the prompt's SHA-256 falls, of five intervals."""
    return int.from_bytes(hashlib.sha256(prompt.encode("utf-8")).digest()) * 5 >> 256


def test_five_folds_of_reward_models(run, script, written, tiny, tmp_path, monkeypatch):
    """Each is trained on four fifths and measured on the fifth; the last lines are the means of the columns above.

    The model is the last one, not the best, which is chosen on the fifth that it is measured on.
    """
    measured = []
    evaluate = script("polite_folds").evaluate_accuracy
    monkeypatch.setattr(script("polite_folds"), "evaluate_accuracy", lambda c: (measured.append(c), evaluate(c))[1])
    rows = [{"问": f"第{i // 2}题", "好": f"thank you {i}", "坏": f"go away {i}"} for i in range(20)]
    words = ["--model", tiny(), "--data", written("偏好.jsonl", rows), "--columns", "prompt=问,chosen=好,rejected=坏"]
    sizes = ["--max-steps", 1, "--batch-size", 4, "--sample-every", 0, "--device", "cpu"]
    status, out, err = run("polite_folds", *words, "--output", tmp_path / "五折", *sizes)
    assert status == 0, err
    assert [c.reward_model for c in measured] == [f"{tmp_path}/五折/fold-{index}/final" for index in range(5)]
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


def test_the_chinese_families_in_files_of_their_own(run, written, tmp_path):
    """Every record as it was and in its order."""
    for name, records in WORLD.items():
        written(f"{name}.jsonl", records)
    status, out, err = run("lora/chinese_data", "--world", tmp_path, "--output", tmp_path / "中文")
    assert (status, err) == (0, "")
    for name, (kept, of) in CHINESE.items():
        assert f"{name}.jsonl: {kept} of {of} records\n" in out
        found = read_jsonl(tmp_path / "中文" / f"{name}.jsonl")
        assert len(found) == kept
        assert found == [row for row in WORLD[name] if row["family"] in ("反义词", "加法", "颜色", "问候")]


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


RANKING = {"prompt": "问", "responses": ["一", "二", "三"], "ranks": [1, 2, 2]}
MISTAKES = [
    ("sentiment_data", {"sentences": [*REVIEWS, {"text": " ", "label": 1}], "stories": STORIES}, ":141: `text` is ' '"),
    (
        "sentiment_data",
        {"sentences": [{"text": "a"}], "stories": STORIES},
        "`label` is None. Accepted: 1 (positive) or 0",
    ),
    ("sentiment_data", {"sentences": REVIEWS[:3], "stories": STORIES}, "texts of both labels"),
    (
        "bag_of_words judge",
        {"data": REVIEWS[:4], "result": "{}"},
        "the judge learns from five texts of each label or more",
    ),
    (
        "bag_of_words judge",
        {"data": LABELLED, "result": '{"samples": [{"response": "a"}]}'},
        "result.jsonl: no result of `heedful",
    ),
    ("bag_of_words judge", {"data": LABELLED, "result": json.dumps({"samples": SAMPLES[:1]})}, "1 samples"),
    ("bag_of_words accuracy", {"data": [{"text": "a"}]}, "data.jsonl:1: not a preference pair or ranking"),
    ("polite_folds", {"data": [{"text": "a"}]}, "data.jsonl:1: not a preference pair or ranking"),
    ("digits_data", {"texts": [{"text": words(1, 20, w1="3")}, {"story": "3"}]}, "texts.jsonl:2: `text` is None"),
    ("digits_data", {"texts": [{"text": words(1, 60)}, {"text": "3"}]}, "no 20 words in a row hold a number in"),
    ("gsm8k_data", {"data": [*SUMS, {"question": "1+1?"}]}, "data.jsonl:3: `answer` is None. Accepted: a text"),
    ("gsm8k_data", {"data": [{"question": "", "answer": "2"}]}, "data.jsonl:1: `question` is ''. Accepted: a string"),
    ("lora/pair_baselines", {"data": [RANKING, *map(chinese_pair, range(40))]}, "a ranking of 3 responses"),
    ("lora/pair_baselines", {"data": [chinese_pair(1), chinese_pair(2)]}, "--eval-fraction"),
]


@pytest.mark.parametrize("number", range(len(MISTAKES)))
def test_a_mistake_is_told_in_one_line(run, written, tiny, tmp_path, number):
    script, files, said = MISTAKES[number]
    name, *command = script.split()
    words = [word for flag, content in files.items() for word in (f"--{flag}", written(f"{flag}.jsonl", content))]
    words += ["--model", tiny()] if name in ("sentiment_data", "polite_folds") else []
    words += (
        ["--output", tmp_path / "新"] if name in ("sentiment_data", "polite_folds", "digits_data", "gsm8k_data") else []
    )
    status, out, err = run(name, *command, *words)
    assert (status, out) == (2, ""), err
    assert err.startswith(f"{Path(name).name}.py: ")
    assert err.count("\n") == 1, err
    assert said in err
    assert not (tmp_path / "新").exists()
