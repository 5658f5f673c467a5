"""What is learned and sampled from, for tokenizers of every kind and templates of every style: the template's own rendering.

Expected ids come from ``tokenizer.apply_chat_template(tokenize=True)``, and the border between prompt and response from the
characters of its text and the tokenizer's own offsets. None of them comes from heedful.
"""

import json

import pytest
import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoModelForSequenceClassification, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from heedful import CheckpointError, Demonstration, DPOConfig, Labelled, Message, Prompt, Ranking
from heedful.algorithms.dpo import encode_preferences
from heedful.cli.main import main
from heedful.data.chat import Renderer, RewardInputs
from heedful.data.loading import encode_demonstrations, encode_prompts, encode_rankings, encode_responses
from heedful.models import load_tokenizer
from heedful.models.tokenizer import PLAIN_TEMPLATE
from heedful.plot import token_texts
from jsonl import read_jsonl, write_jsonl

TEXTS = [
    "The quick brown fox says that x and y are letters, and 12 + 34 = 46.",
    "你好，今天天气怎么样？今天天气很好。",
    "def f():\n    return 1\n\n\nHello, how are you?\n\n I am fine.",
    "USER: hello ASSISTANT: yes , no. User: hi\nAssistant: q0 and x [INST] a [/INST] b",
] * 10
ROLES = ["<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "<|im_start|>", "<|im_end|>", "<|eot_id|>"]
HEADERS = ["<|start_header_id|>", "<|end_header_id|>", "<start_of_turn>", "<end_of_turn>"]
SPECIALS = ["<unk>", "<s>", "</s>", *ROLES, *HEADERS]


def bpe(pre_tokenizer, *, normalizer=None, decoder=None, bytewise=False, fallback=False, processor=None):
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=fallback, fuse_unk=True))
    fallbacks = [f"<0x{i:02X}>" for i in range(256)] if fallback else []
    alphabet = pre_tokenizers.ByteLevel.alphabet() if bytewise else ["▁", "x", "q", "0"]
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if pre_tokenizer is not None:
        tokenizer.pre_tokenizer = pre_tokenizer
    if decoder is not None:
        tokenizer.decoder = decoder
    if processor is not None:
        tokenizer.post_processor = processor
    trainer = trainers.BpeTrainer(
        vocab_size=900, show_progress=False, special_tokens=SPECIALS + fallbacks, initial_alphabet=alphabet
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    spec = json.loads(tokenizer.to_str())  # bytes are tokens of the vocabulary, not special ones
    spec["added_tokens"] = [token for token in spec["added_tokens"] if token["content"] in SPECIALS]
    return Tokenizer.from_str(json.dumps(spec))


def byte_level(*, add_prefix_space=False, processor=None, normalizer=None, use_regex=True):
    pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space, use_regex=use_regex)
    decoder = decoders.ByteLevel()
    return bpe(pre_tokenizer, decoder=decoder, bytewise=True, processor=processor, normalizer=normalizer)


def metaspace(scheme):
    parts = [decoders.Metaspace(prepend_scheme=scheme), decoders.ByteFallback(), decoders.Fuse()]
    pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    return bpe(pre_tokenizer, decoder=decoders.Sequence(parts), fallback=True)


def llama_2():
    """A Prepend normalizer in place of a pre-tokenizer, bytes for unknown characters."""
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return bpe(None, normalizer=normalizer, decoder=decoders.Sequence(parts), fallback=True)


def unigram(scheme="always"):
    """The words of the texts, with the space before them and without it, and all their characters."""
    words = sorted({word for text in TEXTS for word in text.split()})
    characters = sorted({character for text in TEXTS for character in text.replace(" ", "▁")})
    pieces = dict.fromkeys(["▁" + word for word in words] + words + characters)
    tokenizer = Tokenizer(
        models.Unigram([*((t, 0.0) for t in SPECIALS), *((p, -5.0 - len(p) / 99) for p in pieces)], 0)
    )
    tokenizer.add_special_tokens(SPECIALS)
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=scheme)
    return tokenizer


def word_piece():
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.train_from_iterator(
        TEXTS, trainers.WordPieceTrainer(vocab_size=400, show_progress=False, special_tokens=SPECIALS)
    )
    return tokenizer


KINDS = {
    "byte-level": byte_level,
    "byte-level, trimmed offsets": lambda: byte_level(processor=processors.ByteLevel(trim_offsets=True)),
    "byte-level, no regex": lambda: byte_level(use_regex=False),
    "byte-level, prefix space": lambda: byte_level(add_prefix_space=True),
    "byte-level, NFKC": lambda: byte_level(normalizer=normalizers.NFKC()),
    "Metaspace first": lambda: metaspace("first"),
    "Metaspace always": lambda: metaspace("always"),
    "Metaspace never": lambda: metaspace("never"),
    "Prepend and bytes": llama_2,
    "Unigram": unigram,
    "WordPiece": word_piece,
    "lowercase": lambda: byte_level(normalizer=normalizers.Lowercase()),
}

TURNS = "{% for m in messages %}TURN{% endfor %}{% if add_generation_prompt %}PROMPT{% endif %}"


def turns(turn, prompt):
    return TURNS.replace("TURN", turn).replace("PROMPT", prompt)


def by_role(user, assistant, system=""):
    return (
        f"{{% if m.role == 'assistant' %}}{assistant}{{% elif m.role == 'system' %}}{system}"
        f"{{% else %}}{user}{{% endif %}}"
    )


STYLES = {
    "ChatML": turns(
        "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}", "{{ '<|im_start|>assistant\n' }}"
    ),
    "Llama-3": "{{ bos_token }}"
    + turns(
        "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + (m.content | trim) + '<|eot_id|>' }}",
        "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}",
    ),
    "Gemma": "{{ bos_token }}"
    + turns(
        "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else 'user') + '\n' + (m.content | trim) "
        "+ '<end_of_turn>\n' }}",
        "{{ '<start_of_turn>model\n' }}",
    ),
    "Zephyr": turns("{{ '<|' + m.role + '|>\n' + m.content + eos_token + '\n' }}", "{{ '<|assistant|>\n' }}"),
    "Phi-3": turns("{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}", "{{ '<|assistant|>\n' }}"),
    "Phi-4": turns("{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}", "{{ '<|assistant|>' }}"),
    "Llama-2": "{{ bos_token }}"
    + turns(
        by_role(
            "{{ '[INST] ' + m.content + ' [/INST]' }}",
            "{{ ' ' + m.content + ' ' + eos_token }}",
            "{{ '<<SYS>>\n' + m.content + '\n<</SYS>>\n\n' }}",
        ),
        "",
    ),
    "Vicuna": turns(
        by_role(
            "{{ 'USER: ' + m.content + ' ' }}", "{{ 'ASSISTANT: ' + m.content + eos_token }}", "{{ m.content + ' ' }}"
        ),
        "{{ 'ASSISTANT:' }}",
    ),
    "Vicuna, prompt with a space": turns(
        by_role(
            "{{ 'USER: ' + m.content + ' ' }}", "{{ 'ASSISTANT: ' + m.content + eos_token }}", "{{ m.content + ' ' }}"
        ),
        "{{ 'ASSISTANT: ' }}",
    ),
    "DeepSeek": "{{ bos_token }}"
    + turns(
        by_role("{{ '<|user|>' + m.content }}", "{{ '<|assistant|>' + m.content + eos_token }}", "{{ m.content }}"),
        "{{ '<|assistant|>' }}",
    ),
    "plain": "plain",
}
END = {
    "ChatML": "<|im_end|>",
    "Llama-3": "<|eot_id|>",
    "Gemma": "<end_of_turn>",
    "Phi-3": "<|end|>",
    "Phi-4": "<|end|>",
}
"""The token that ends a turn; EOS in other styles."""
CONVERSATIONS = [
    [("user", "q0"), ("assistant", "x")],
    [("user", "q0"), ("assistant", " x \n")],
    [("user", "hello"), ("assistant", "yes, I am fine.\n\n    return 1")],
    [
        ("system", "你是助手。\n\n"),
        ("user", "你好，今天\n\n天气？ "),
        ("assistant", "今天天气很好。 🙂"),
        ("user", "ﬁne? é"),
        ("assistant", "q0 x\n"),
    ],
    [("user", "a"), ("assistant", "\nb")],
    [("user", "hi "), ("assistant", "The quick brown fox")],
]
REFUSED = {
    **{
        (kind, "Vicuna, prompt with a space"): "'x' and the space before it are one token"
        for kind in KINDS
        if kind not in ("byte-level, no regex", "Prepend and bytes", "WordPiece")
    },
    **{
        (kind, "Llama-3"): "two line breaks are one token at the end of a text, and two before a letter"
        for kind in KINDS
        if kind.startswith("byte-level") or kind == "lowercase"
        if kind != "byte-level, no regex"
    },
    **{
        (kind, style): "this tokenizer has tokens of a colon and the space after it"
        for kind in ("byte-level, no regex", "Prepend and bytes")
        for style in ("Vicuna", "plain")
    },
}
"""Where the prompt's last token changes when an answer follows, so that it cannot be what is learned."""


PAIRS = [
    pytest.param(kind, style, marks=() if (i + j) % 4 == 0 else pytest.mark.exhaustive, id=f"{kind}-{style}")
    for i, kind in enumerate(KINDS)
    for j, style in enumerate(STYLES)
]
"""Each kind with each style: a quarter of them in the ordinary suite, in which each kind meets two or three styles."""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """``made(kind, style)``: a tokenizer of that kind from a folder, with a template of that style; and true offsets."""
    kinds, folders = {}, tmp_path_factory.mktemp("kinds")

    def make(kind, style):
        tokenizer = kinds[kind] = kinds.get(kind) or KINDS[kind]()
        folder = folders / f"{list(KINDS).index(kind)} {style}"
        if not folder.exists():
            names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
            fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)
            fast.chat_template = None if style == "plain" else STYLES[style]
            fast.save_pretrained(folder)
            (folder / "config.json").write_text(json.dumps({"model_type": "llama"}), encoding="utf-8")
        offsets = Tokenizer.from_str(tokenizer.to_str())
        offsets.post_processor = processors.Sequence([])
        return load_tokenizer(str(folder), chat_template="plain" if style == "plain" else ""), offsets

    return make


def as_dicts(turns):
    return [{"role": role, "content": content} for role, content in turns]


def as_messages(turns):
    return tuple(Message(role, content) for role, content in turns)


def by_hand(tokenizer, offsets, turns, end):
    """What is sampled from, and the prompt and the response that are learned: ids of the template's own rendering."""
    before = tokenizer.apply_chat_template(as_dicts(turns[:-1]), tokenize=False, add_generation_prompt=True)
    asked = tokenizer.apply_chat_template(as_dicts(turns[:-1]), tokenize=True, add_generation_prompt=True).input_ids
    whole = tokenizer.apply_chat_template(as_dicts(turns), tokenize=True).input_ids
    text = tokenizer.apply_chat_template(as_dicts(turns), tokenize=False)
    encoding = offsets.encode(text, add_special_tokens=False)
    assert encoding.ids == whole
    start = next(i for i, (a, b) in enumerate(encoding.offsets) if b > len(before) or a >= len(before))
    last = len(whole) - 1 - whole[::-1].index(tokenizer.convert_tokens_to_ids(end))
    return asked, whole[:start], whole[start : last + 1]


@pytest.mark.parametrize(("kind", "style"), PAIRS)
def test_what_is_learned_and_sampled_is_the_templates_rendering(made, kind, style):
    """In SFT, reward models, DPO, KTO and rollouts; or the run is refused, and only where no ids could agree."""
    tokenizer, offsets = made(kind, style)
    expected = [by_hand(tokenizer, offsets, turns, END.get(style, "</s>")) for turns in CONVERSATIONS]
    records = [(as_messages(turns[:-1]), turns[-1][1], f"数据.jsonl:{i}") for i, turns in enumerate(CONVERSATIONS)]
    renderer, limit = Renderer(tokenizer), {"max_length": 1000, "action": "error"}
    sampled = [renderer.prompt_ids(prompt) for prompt, *_ in records]
    assert sampled == [asked for asked, *_ in expected]

    # A reward model only reads, so it has nothing to be sampled after.
    other = "no, q0"
    rankings = [Ranking(prompt, (response, other), (0, 1), source) for prompt, response, source in records]
    inputs = RewardInputs(tokenizer)
    pairs, _ = encode_rankings(rankings, inputs, equal_pairs="error", **limit)
    assert [pair.rows[0]["input_ids"] for pair in pairs] == [prompt + response for _, prompt, response in expected]

    def run(trainer):
        if trainer == "sft":
            examples = encode_demonstrations([Demonstration(*record) for record in records], renderer, **limit)[0]
            return [(example.prompt, example.response) for example in examples]
        if trainer == "kto":
            labelled = [Labelled(*record, label=True) for record in records]
            kept = encode_responses(labelled, renderer, what="labelled responses", **limit)[0]
            return [(example.prompt, example.response) for _, example in kept]
        if trainer == "dpo":
            encoded = encode_preferences(rankings, renderer, 1000, DPOConfig(model="m", data="d", output="o"))[0]
            return [(pair.chosen.prompt, pair.chosen.response) for pair in encoded]
        prompts = [Prompt(prompt, source) for prompt, _, source in records]
        return [one.ids for one in encode_prompts(prompts, renderer, **limit)[0]]

    for trainer in ("sft", "dpo", "kto", "grpo"):
        if (kind, style) in REFUSED:
            with pytest.raises(CheckpointError, match="the prompt's last token changes when an answer follows"):
                run(trainer)
        elif trainer == "grpo":
            assert run(trainer) == sampled
        else:
            assert run(trainer) == [(prompt, response) for _, prompt, response in expected]


LOSSY = ("WordPiece", "Unigram", "lowercase", "byte-level, NFKC")
"""These do not give back every text."""


@pytest.mark.parametrize(("kind", "style"), PAIRS)
def test_the_text_of_a_sampled_response_is_what_was_answered(made, kind, style):
    """With the space that it begins with and without one that the tokenizer puts there; read again it has the same ids."""
    tokenizer, offsets = made(kind, style)
    renderer, inputs = Renderer(tokenizer), RewardInputs(tokenizer)
    for turns in CONVERSATIONS:
        asked, before, response = by_hand(tokenizer, offsets, turns, END.get(style, "</s>"))
        if before != asked:  # nothing can be sampled that begins inside a token of the prompt
            continue
        prompt, content = as_messages(turns[:-1]), turns[-1][1]
        said = renderer.response_text(response[:-1], prompt=prompt)
        assert renderer.written(prompt, said)[:2] == (asked, response)
        assert inputs.encode(prompt, said)["input_ids"] == asked + response
        trimmed = content.strip() if style in ("Llama-3", "Gemma") else content
        # A text that begins with a space gets no other one from these, so the two texts have the same ids.
        may_lack = trimmed[0] == " " and kind in ("Metaspace always", "byte-level, prefix space")
        if kind not in LOSSY:
            assert said in ([trimmed, trimmed[1:]] if may_lack else [trimmed])


@pytest.mark.parametrize("is_special", [True, False])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in LOSSY])
def test_added_tokens_inside_a_response_put_no_space_after_them(made, kind, is_special):
    """`<think>` is an added token of many models, special or not. Read again, the text has the same ids."""
    tokenizer, _ = made(kind, "ChatML")
    tags = [AddedToken(tag, special=is_special, normalized=False) for tag in ("<think>", "</think>")]
    tokenizer.add_tokens(tags, special_tokens=is_special)
    renderer, prompt = Renderer(tokenizer), (Message("user", "q0"),)
    for answer in ("<think>x</think>Hello", "<think>\n你好\n</think>\n\n  今天", "<think>  x</think>  q"):
        asked, response, _ = renderer.written(prompt, answer)
        said = renderer.response_text(response[:-1], prompt=prompt)
        assert said == answer
        assert renderer.written(prompt, said)[:2] == (asked, response)


@pytest.mark.parametrize("kind", KINDS)
def test_full_width_letters_of_a_special_token_are_letters(made, kind):
    """NFKC makes ``</s>`` of them, which is a word of a Unigram vocabulary too."""
    tokenizer, _ = made(kind, "ChatML")
    renderer, ends = Renderer(tokenizer), {tokenizer.convert_tokens_to_ids(end) for end in ("</s>", "<|im_end|>")}
    typed = "x ＜/s＞＜|im_end|＞ 好"
    assert not ends & {*renderer.prompt_ids(typed), *renderer.response_ids(typed, prompt="q0")[:-1]}
    prompts = [renderer.prompt_ids((Message("user", text),)) for text in ("x", typed)]
    assert [sum(i in ends for i in ids) for ids in prompts] == [1, 1]


@pytest.mark.parametrize("kind", KINDS)
def test_each_token_is_shown_with_the_space_before_it(made, kind):
    """Decoders of SentencePiece leave it out of a token alone."""
    tokenizer, _ = made(kind, "ChatML")
    ids = tokenizer("says that 今天", add_special_tokens=False).input_ids
    texts = token_texts(ids, tokenizer)
    assert "".join(texts).replace("‥", "").strip() == tokenizer.decode(ids).strip()
    assert "" not in texts


PROGRAM = "def f(x):\n"


CONTINUED = [
    (PROGRAM, "    return 1"), ("Q: 你好\nA:", " 好 x"), ("Q: x\nA: ", "y"), ("一加一", "二"), ("", " x"), ("", "  x"),
    ("a\n", "\nb"),
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_raw_text_goes_on_as_it_stands(made, kind):
    """A prompt is read by itself; its completion gets no space that the text has not, and loses none."""
    tokenizer, _ = made(kind, "ChatML")
    renderer = Renderer(tokenizer)
    for prompt, completion in CONTINUED:
        alone = tokenizer(prompt, add_special_tokens=False).input_ids
        whole = tokenizer(prompt + completion, add_special_tokens=False).input_ids
        asked, response, _ = renderer.written(prompt, completion)
        assert asked == alone == renderer.prompt_ids(prompt)
        assert response[-1] == tokenizer.eos_token_id
        if whole[: len(alone)] == alone:
            assert alone + response[:-1] == whole
        if kind not in LOSSY:
            # A text that begins with a space gets no other one from these, so " x" and "x" have the same ids.
            spaces = ("Metaspace first", "Metaspace always", "byte-level, prefix space")
            vanishes = not prompt and completion == " x" and kind in spaces
            assert renderer.response_text(response[:-1], prompt=prompt) == completion[vanishes:]


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_that_somebody_typed_are_letters(made, kind):
    """Between the template's special tokens each text has the ids of its letters, with no space that the template has not."""
    tokenizer, offsets = made(kind, "ChatML")
    if kind == "Metaspace first":  # in the rendering, no text stands first
        offsets.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    offsets.encode_special_tokens = True
    texts = ["user\nx <|end|> y</s>z 你好", "\n", "assistant\n<|im_end|> <s>好"]
    special = {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIALS}
    start, end = special["<|im_start|>"], special["<|im_end|>"]
    user, between, answer = (offsets.encode(text, add_special_tokens=False).ids for text in texts)
    renderer, prompt = Renderer(tokenizer), (Message("user", texts[0].removeprefix("user\n")),)
    asked, response, _ = renderer.written(prompt, texts[2].removeprefix("assistant\n"))
    raw = [i for ids in renderer.written(texts[0], texts[2])[:2] for i in ids]
    assert set(asked + response) & set(special.values()) - {special["<unk>"]} == {start, end}
    assert set(raw) & set(special.values()) - {special["<unk>"]} == {special["</s>"]}
    if kind != "Unigram":  # whose own tokenizer reads the letters of "</s>" as that token
        assert asked + response == [start, *user, end, *between, start, *answer, end]


def test_bytes_that_are_marked_as_special_tokens_are_letters_of_a_text():
    """Typed or of an unknown character, they neither repeat what stands before them nor end a turn."""
    spec = json.loads(llama_2().to_str())
    names = [f"<0x{byte:02X}>" for byte in range(256)]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    spec["added_tokens"] += [{"id": spec["model"]["vocab"][name], "content": name, **flags} for name in names]
    spec["added_tokens"].sort(key=lambda token: token["id"])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(spec)), bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    for style in ("Llama-2", "ChatML"):
        tokenizer.chat_template = STYLES[style]
        for question, content in (
            ("鑫 <0xAB> 鑫 q 鑫", "x"),
            ("q0", "鑫 <0xAB> 鑫"),
            ("鑫 <0xE9> x", "<0xE9> 鑫 q 鑫"),
        ):
            conversation = [("user", question), ("assistant", content)]
            whole = tokenizer.apply_chat_template(as_dicts(conversation), tokenize=True).input_ids
            ours = Renderer(tokenizer).written_ids(as_messages(conversation[:1]), content)
            assert ours == whole[: len(ours)]
            assert ours[-1] == tokenizer.convert_tokens_to_ids(END.get(style, "</s>"))
    tokenizer.chat_template = turns("{{ m.role + ': ' + m.content + '\x07' }}", "{{ 'assistant:' }}")
    assert Renderer(tokenizer).turn_end_id == tokenizer.eos_token_id


@pytest.mark.parametrize("kind", ["Unigram", "WordPiece"])
def test_an_unknown_letter_after_an_answer_ends_no_turn(made, kind):
    tokenizer, _ = made(kind, "ChatML")
    tokenizer.chat_template = turns("{{ m.role + ': ' + m.content + ' ☎' }}", "{{ 'assistant:' }}")
    assert tokenizer.unk_token_id in tokenizer("☎").input_ids
    renderer = Renderer(tokenizer)
    assert renderer.turn_end_id == tokenizer.eos_token_id
    assert renderer.response_ids("x", prompt=(Message("user", "你好"),))[-1] == tokenizer.eos_token_id


@pytest.fixture
def trained(made, tmp_path, monkeypatch, capsys):
    """``trained(kind, style, command, records, *flags)`` runs a command on a tiny llama: folder, status, what it said."""

    def run(kind, style, command, records, *flags):
        tokenizer, _ = made(kind, style)
        torch.manual_seed(0)
        shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
        ids = {"bos_token_id": 1, "eos_token_id": 2}
        model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), initializer_range=0.5, **shape, **ids))
        for part in (model, tokenizer):
            part.save_pretrained(tmp_path / "模型")
        write_jsonl(tmp_path / "数据.jsonl", records)
        words = [command, "--model", tmp_path / "模型", "--data", tmp_path / "数据.jsonl", "--output", tmp_path / "run"]
        options = ("--device=cpu", "--dtype=float32", "--eval-fraction=0", "--sample-every=0")
        monkeypatch.setattr("sys.argv", ["heedful", *map(str, words), *options, *flags])
        return tmp_path / "run", main(), capsys.readouterr().err, model

    return run


def first_step(run):
    return json.loads((run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[0])


@pytest.mark.parametrize(
    ("kind", "style", "answer"),
    [
        ("Metaspace first", "Zephyr", "x"),
        pytest.param("Prepend and bytes", "Phi-3", " x", marks=pytest.mark.exhaustive),
        ("byte-level, no regex", "Llama-3", " x \n"),
        pytest.param("Unigram", "Vicuna", "今天", marks=pytest.mark.exhaustive),
    ],
)
def test_the_loss_of_sft_is_that_of_the_templates_rendering(made, trained, kind, style, answer):
    """As transformers computes it on ``apply_chat_template``."""
    turns = [("user", "q0"), ("assistant", answer)]
    flags = ("--max-steps=1", "--batch-size=1")
    run, status, said, model = trained(kind, style, "sft", [{"messages": as_dicts(turns)}], *flags)
    assert not status, said
    _, prompt, response = by_hand(*made(kind, style), turns, END.get(style, "</s>"))
    logprobs = model(torch.tensor([prompt + response])).logits[0].log_softmax(-1)
    expected = -logprobs[range(len(prompt) - 1, len(prompt + response) - 1), response].mean().detach()
    assert first_step(run)["loss/sft"] == pytest.approx(float(expected), abs=1e-4)


def test_a_reward_model_reads_the_templates_rendering(made, trained):
    """The loss of a step so small that the saved model is still the one before it."""
    kind, style = "Metaspace always", "Gemma"
    flags = ("--max-steps=1", "--batch-size=1", "--learning-rate=1e-12", "--allow=learning-rate")
    turns = [("user", "q0"), ("assistant", " 今天 x \n")]
    record = {"prompt": as_dicts(turns[:1]), "chosen": turns[1][1], "rejected": "no"}
    run, status, said, _ = trained(kind, style, "reward", [record], *flags)
    assert not status, said
    model = AutoModelForSequenceClassification.from_pretrained(run / "final").eval()
    scores = []
    for answer in (turns[1][1], "no"):
        _, prompt, response = by_hand(*made(kind, style), [turns[0], ("assistant", answer)], END[style])
        ids = torch.tensor([prompt + response])
        scores.append(model(ids, attention_mask=torch.ones_like(ids)).logits[0, 0])
    expected = -torch.nn.functional.logsigmoid(scores[0] - scores[1]).detach()
    assert first_step(run)["loss/reward"] == pytest.approx(float(expected), abs=1e-4)


@pytest.mark.parametrize("command", ["sft", "dpo", "kto", "grpo"])
def test_a_template_that_ends_a_prompt_inside_a_token_is_refused(trained, command):
    """With both sides token by token, the cause and the way out; nothing is written."""
    kind, style = "byte-level", "Vicuna, prompt with a space"
    prompt = [{"role": "user", "content": "q0"}]
    record = {"prompt": prompt, "completion": "x", "chosen": "x", "rejected": "yes", "label": True}
    columns = {"sft": ("completion",), "dpo": ("chosen", "rejected"), "kto": ("completion", "label"), "grpo": ()}
    records = [{name: record[name] for name in ("prompt", *columns[command])}]
    flags = ("--rewards=rule:length:1-4", "--samples-per-prompt=2") if command == "grpo" else ("--max-steps=1",)
    run, status, said, _ = trained(kind, style, command, records, *flags)
    assert status == 2
    assert not run.exists()
    for fragment in ("数据.jsonl:1: with the chat template of", "the prompt's last token changes", "prompt and answer"):
        assert fragment in " ".join(said.split())
    assert command == "grpo" or "' x'" in said  # whose answers are words of the vocabulary
    assert "{{ 'ASSISTANT:' }} and {{ ' ' + message.content }}" in said


EARLIER_PLAIN = PLAIN_TEMPLATE.replace("{{ 'Assistant:' }}", "{{ 'Assistant: ' }}")


@pytest.mark.parametrize("kind", ["byte-level", pytest.param("Metaspace always", marks=pytest.mark.exhaustive)])
def test_a_model_with_the_earlier_plain_template_is_trained_with_the_new_one(
    trained, tmp_path, monkeypatch, capsys, kind
):
    """The error names the flag: conversations are rendered in the same way. What only measures warns."""
    monkeypatch.setitem(STYLES, "earlier", "{{ bos_token }}" + EARLIER_PLAIN)
    record, flags = {"messages": as_dicts([("user", "你好"), ("assistant", "x")])}, ("--max-steps=1", "--batch-size=1")
    advice = "The model has an earlier form of the template plain. Give --chat-template plain"
    *_, status, said, _ = trained(kind, "earlier", "sft", [record], *flags)
    assert status == 2
    assert advice in " ".join(said.split())
    assert "ASSISTANT" not in said
    *_, status, said, _ = trained(kind, "earlier", "sft", [record], *flags, "--chat-template=plain")
    assert status == 0, said
    assert advice not in " ".join(said.split())
    words = ("evaluate", "perplexity", "--model", tmp_path / "模型", "--data", tmp_path / "数据.jsonl", "--device=cpu")
    monkeypatch.setattr("sys.argv", ["heedful", *map(str, words), "--eval-fraction=1"])
    with pytest.warns(UserWarning, match="earlier form of the template plain"):
        assert main() == 0, capsys.readouterr().err


LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def test_two_line_breaks_before_an_answer(made):
    """Llama-3's own tokenizer has one token for them everywhere. GPT-2's has one only at the end: refused, with a way out."""
    split = pre_tokenizers.Split(Regex(LLAMA_3), "isolated")
    pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    own = bpe(pre_tokenizer, decoder=decoders.ByteLevel(), bytewise=True)
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    gpt_2, _ = made("byte-level", "Llama-3")
    record, limit = (
        Demonstration((Message("user", "你好"),), "x", "数据.jsonl:1"),
        {"max_length": 99, "action": "error"},
    )
    llama_3 = PreTrainedTokenizerFast(tokenizer_object=own, **names)
    llama_3.chat_template = STYLES["Llama-3"]
    (example,), _ = encode_demonstrations([record], Renderer(llama_3), **limit)
    assert llama_3.convert_ids_to_tokens(example.prompt)[-1] == "ĊĊ"
    with pytest.raises(CheckpointError, match="the prompt's last token changes when an answer follows"):
        encode_demonstrations([record], Renderer(gpt_2), **limit)
    gpt_2.chat_template = STYLES["Llama-3"].replace("assistant<|end_header_id|>\n\n", "assistant<|end_header_id|>")
    (example,), _ = encode_demonstrations([record], Renderer(gpt_2), **limit)
    assert gpt_2.convert_ids_to_tokens(example.response) == ["Ċ", "Ċ", "x", "<|eot_id|>"]


@pytest.mark.parametrize(
    ("kind", "style"),
    [
        ("Metaspace first", "Zephyr"),
        ("Prepend and bytes", "Phi-4"),
        pytest.param("byte-level", "Vicuna", marks=pytest.mark.exhaustive),
    ],
)
def test_a_reward_function_sees_the_text_that_was_sampled(made, trained, tmp_path, kind, style):
    """It is what the tokens add to the text of the prompt's, but for the space that the template writes before an answer."""
    tokenizer, _ = made(kind, style)
    (tmp_path / "judge.py").write_text(
        "import json\n\ndef judge(prompts, completions, completion_ids):\n"
        f"    with open({str(tmp_path / 'seen.jsonl')!r}, 'a', encoding='utf-8') as file:\n"
        "        for completion, ids in zip(completions, completion_ids):\n"
        "            file.write(json.dumps([completion[0]['content'], list(ids)]) + '\\n')\n"
        "    return [float(len(ids)) for ids in completion_ids]\n",
        encoding="utf-8",
    )
    flags = ("--steps=1", "--rollout-batch-size=16", "--minibatch-size=16", "--samples-per-prompt=8")
    rewards = (f"--rewards=python:{tmp_path / 'judge.py'}:judge", "--max-new-tokens=6")
    questions = [{"prompt": [{"role": "user", "content": text}]} for text in ("q0", "hello x")]
    _, status, said, _ = trained(kind, style, "grpo", questions, *flags, *rewards)
    assert not status, said
    seen = read_jsonl(tmp_path / "seen.jsonl")
    asked = tokenizer.apply_chat_template(questions[0]["prompt"], tokenize=True, add_generation_prompt=True).input_ids
    before = tokenizer.decode(asked)
    assert len(seen) >= 16
    if kind == "Metaspace first":  # by themselves, the first one's space would be lost
        assert any(tokenizer.decode(ids) != said for said, ids in seen)
    for said, ids in seen:
        text = tokenizer.decode([*asked, *ids]).removeprefix(before)
        # After a special token this tokenizer puts a space before a text, so the first one is none.
        lead = " " if style == "Vicuna" or (kind == "Prepend and bytes" and style == "Phi-4") else ""
        assert said == text.removeprefix(lead)
