"""The classifier of old sentiment scripts, whose transformers had return_all_scores."""

import pytest
import transformers

from heedful import make_tiny_model
from heedful.compat.trl.pipelines import pipeline


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    """A folder with a classifier of three labels, and a tokenizer."""
    folder = tmp_path_factory.mktemp("模型") / "gpt2"
    make_tiny_model("gpt2", folder, hidden_size=16, num_layers=1)
    config = transformers.AutoConfig.from_pretrained(folder, num_labels=3, pad_token_id=0)
    model = transformers.AutoModelForSequenceClassification.from_config(config)
    model.score.weight.data *= 50
    model.save_pretrained(folder)
    return str(folder)


def test_all_scores_are_in_the_order_of_the_labels(classifier):
    texts = ["这部电影很好", "bad"]
    judge = pipeline("sentiment-analysis", model=classifier, device="cpu")
    found = judge(texts, return_all_scores=True, function_to_apply="none", batch_size=2)
    assert [[one["label"] for one in scores] for scores in found] == [["LABEL_0", "LABEL_1", "LABEL_2"]] * 2
    best = judge(texts)
    assert [one["label"] for one in best] == [max(scores, key=lambda one: one["score"])["label"] for scores in found]
    encoded = judge.tokenizer(texts[0], return_tensors="pt")
    assert [one["score"] for one in found[0]] == pytest.approx(judge.model(**encoded).logits[0].tolist(), abs=1e-5)


def test_a_single_text_and_a_setting_of_the_pipeline(classifier):
    judge = pipeline("text-classification", model=classifier, device="cpu", return_all_scores=True)
    assert [len(scores) for scores in judge("好")] == [3]
    assert set(judge("好", return_all_scores=False)[0]) == {"label", "score"}
