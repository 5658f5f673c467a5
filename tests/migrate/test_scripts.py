"""heedful migrate: what people write in scripts, in small. Each shape is one that public scripts have."""

import importlib.util

import pytest

DPO = """
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainingArguments
from trl import DPOConfig, DPOTrainer

model = AutoModelForCausalLM.from_pretrained("模型", {loading})
reference = AutoModelForCausalLM.from_pretrained("模型")
args = {config}(output_dir="出", {settings})
data = load_dataset("某人/偏好")
trainer = DPOTrainer(model, reference, args=args, train_dataset=data["train"], eval_dataset=data["test"], {arguments})
"""
GRPO = """
from trl import GRPOConfig, GRPOTrainer
{before}
settings = GRPOConfig(max_steps=5, {settings})
{between}
trainer = GRPOTrainer(model="模型", args=settings, reward_funcs={rewards}, train_dataset=load("题"))
"""
STEP = """
from transformers import pipeline, AutoTokenizer
from trl import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer
from trl.core import LengthSampler
from trl.import_utils import is_xpu_available

config = PPOConfig({settings})
model = AutoModelForCausalLMWithValueHead.from_pretrained("模型")
tokenizer = AutoTokenizer.from_pretrained("模型")
trainer = PPOTrainer(config, model, None, tokenizer, dataset=data)
judge = pipeline("sentiment-analysis", model="评分", return_all_scores=True)
sampler = LengthSampler(4, 16)
kwargs = {{"do_sample": True, "top_k": 0}}
for batch in trainer.dataloader:
    for query in batch["input_ids"]:
        length = sampler()
        kwargs["max_new_tokens"] = length
        response = trainer.generate(query, **kwargs)
    trainer.step(queries, responses, [one[1]["score"] for one in judge(texts)])
"""


def dpo(config="DPOConfig", settings="", arguments="", loading=""):
    return DPO.format(config=config, settings=settings, arguments=arguments, loading=loading)


def grpo(rewards="score", before="def score(completions, **columns): return [1.0]", settings="", between=""):
    return GRPO.format(before=before, settings=settings, between=between, rewards=rewards)


def test_the_version_is_the_newest_that_has_the_settings_of_the_file(migrated):
    outcome, settings, _ = migrated("偏好.py", dpo(settings="max_prompt_length=512"))
    assert "read as version 0.28" in outcome.err
    assert "was assumed" not in outcome.err
    assert settings["dtype"] == "bfloat16"


def test_settings_for_the_trainer_itself_are_read(migrated, row):
    _, settings, folder = migrated(
        "偏好.py", dpo("TrainingArguments", 'evaluation_strategy="steps", eval_steps=50', "beta=0.3")
    )
    assert (settings["beta"], settings["eval_every"], settings["eval_data"]) == (0.3, 50, "某人/偏好:test")
    assert settings["learning_rate"] == 5e-5  # TrainingArguments', not DPOConfig's
    assert row(folder, "TrainingArguments.evaluation_strategy")[0] == "Kept"


def test_a_default_does_not_replace_a_setting_of_another_name(migrated):
    script = UNSLOTH.replace('dataset_text_field="正文"', "max_seq_length=512")
    outcome, settings, _ = migrated("文.py", script)
    assert settings["max_length"] == 512
    assert "read as version 0.12" in outcome.err  # the last one whose trainer takes it itself


def test_what_the_model_is_loaded_with_is_told(migrated, row):
    _, settings, folder = migrated(
        "偏好.py", dpo(loading="load_in_8bit=True, dtype=torch.bfloat16, 新=1", settings="bf16=False")
    )
    assert row(folder, "model.load_in_8bit")[0] == "Not kept"
    assert row(folder, "model.新")[0] == "To be answered"
    assert row(folder, "model.dtype")[0] == "To be answered"  # the script does not import torch
    assert settings["dtype"] == "float32"


def test_a_chat_template_that_the_script_sets_hides_no_model(migrated, row):
    setup = "if tokenizer.chat_template is None:\n    model, tokenizer = setup_chat_format(model, tokenizer)\nargs ="
    script = dpo().replace("args =", setup, 1).replace("import DPOConfig", "import setup_chat_format, DPOConfig")
    _, settings, folder = migrated("偏好.py", script)
    assert settings["model"] == "模型"
    assert row(folder, "setup_chat_format")[0] == "Kept, with another meaning"


def test_a_subclass_of_a_trainer_is_the_trainer_with_a_warning(migrated, row):
    own = "class 我的(DPOTrainer):\n    def compute_loss(self, *args): return 0\nargs ="
    _, settings, folder = migrated("偏好.py", dpo().replace("args =", own, 1).replace("= DPOTrainer(", "= 我的("))
    assert settings["data"] == "某人/偏好"
    assert "compute_loss" in row(folder, "class 我的(DPOTrainer)")[-1]


def test_a_star_import_is_trls(migrated):
    _, settings, _ = migrated("偏好.py", dpo(settings="beta=0.7").replace("import DPOConfig, DPOTrainer", "import *"))
    assert settings["beta"] == 0.7


OWN = """
from dataclasses import dataclass
from trl import *

@dataclass
class 设置(GRPOConfig):
    num_generations: int = 4
    提示: str = "请"

def main(script, args, model):
    args.learning_rate = 3e-6
    if script.dataset_name == "某人/题":
        args.beta = 0.5
    if unknown():
        args.temperature = 0.5
    GRPOTrainer(model=f"{model.model_name_or_path}", args=args, reward_funcs="评分", train_dataset=load(script.dataset_name))

if __name__ == "__main__":
    main(*TrlParser((ScriptArguments, 设置, ModelConfig)).parse_args_and_config())
"""


def test_a_subclass_of_the_settings_and_a_file_for_the_parser(migrated, row, written):
    file = written("配置.yaml", "learning_rate: 1e-5\nmodel_name_or_path: 模型\ndataset_name: 某人/题\nmax_steps: 3\n")
    _, settings, folder = migrated("题.py", OWN, f"--arguments=--config {file} --num_generations 2")
    wanted = {"learning_rate": 3e-6, "samples_per_prompt": 2, "kl_coef": 0.5, "model": "模型", "steps": 3}
    assert {name: settings.get(name) for name in wanted} == wanted
    assert "temperature" not in settings
    assert row(folder, "GRPOConfig.temperature")[0] == row(folder, "GRPOConfig.提示")[0] == "To be answered"


UNSLOTH = """
from unsloth import FastLanguageModel
from trl import SFTConfig, SFTTrainer
model, tokenizer = FastLanguageModel.from_pretrained(model_name="模型", max_seq_length=2048, load_in_4bit=True)
model = FastLanguageModel.get_peft_model(model, r=8, target_modules=["q_proj"],
                                           lora_alpha=16, lora_dropout=0.1, random_state=1)
trainer = SFTTrainer(model=model, tokenizer=tokenizer, train_dataset=load("文"), dataset_text_field="正文",
                     args=SFTConfig(packing=False, train_sampling_strategy="sequential"))
"""


def test_a_script_of_unsloth(migrated, row):
    _, settings, folder = migrated("文.py", UNSLOTH)
    wanted = {
        "model": "模型", "lora_rank": 8, "lora_alpha": 16.0, "lora_targets": "q_proj", "lora_dropout": 0.1,
        "quantize": "4bit", "columns": "text=正文", "shuffle": False,
    }  # fmt: skip
    assert {name: settings.get(name) for name in wanted} == wanted
    assert row(folder, "SFTConfig.packing")[0] == "Without effect on the numbers"
    assert row(folder, "SFTConfig.completion_only_loss") is None


def test_lists_and_mappings_that_a_script_fills(migrated, row):
    fill = """
kwargs = {"learning_rate": 1e-6}
kwargs["beta"] = 0.1
if unknown(): kwargs["num_iterations"] = 3
functions = []
for name in ("短", "长"):
    functions.append({"短": short, "长": long}[name])
"""
    before = "def short(completions, **columns): return [1.0]\ndef long(completions, **columns): return [2.0]\n" + fill
    _, settings, folder = migrated("题.py", grpo("functions", before, "**kwargs"))
    assert [name.rpartition(":")[2] for name in settings["rewards"]] == ["short", "long"]
    assert (settings["learning_rate"], settings["kl_coef"]) == (1e-6, 0.1)
    assert row(folder, "GRPOConfig.num_iterations")[0] == "To be answered"


def test_rewards_of_a_module_of_ones_own_stay_there(migrated, written):
    own = written("评分.py", "def 分(completions, **columns): return [1.0]\n")
    _, settings, folder = migrated("题.py", grpo("分", "from 评分 import 分"))
    assert settings["rewards"] == [f"python:{own}:分"]
    assert not (folder / "rewards.py").exists()


COPIED = """
try:
    import 没有 as parse
except ImportError:
    parse = None
WORDS = []
WORDS.append("好")
args = parser.parse_args()
def make(weight):
    def inner(completions, **columns): return [weight] * len(completions)
    return inner
def count(completions, **columns):
    return [float(any(word in text for word in WORDS)) + bool(parse) for text in completions]
def other(completions, **columns): return [args.weight for _ in completions]
"""


def test_a_file_of_rewards_has_what_they_read_and_the_rest_is_asked(migrated, row):
    _, settings, folder = migrated("题.py", grpo("[count, make(2.0), other]", COPIED))
    spec = importlib.util.spec_from_file_location("copied_rewards", folder / "rewards.py")
    rewards = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(rewards)
    assert rewards.count(["好", "坏"]) == [1.0, 0.0]
    assert row(folder, "rewards.py")[3] == "`args, weight`"
    assert len(settings["rewards"]) == 3


def test_rewards_are_not_written_in_part(migrated, row):
    outcome, settings, folder = migrated("题.py", grpo("[score, lambda completions: [1.0]]"))
    assert "rewards" not in settings
    assert "rewards.py:score" in row(folder, "arguments.reward_funcs")[-1]
    assert outcome.err.count("? reward a lambda") == 1


def test_no_training_gets_into_the_file_of_rewards(migrated):
    _, _, folder = migrated(
        "题.py", grpo(between="import trl", before="import trl\n@trl.mark\ndef score(completions): return [1.0]")
    )
    assert "GRPOTrainer" not in (folder / "rewards.py").read_text(encoding="utf-8")


def test_vllm_in_the_process_of_the_trainer_needs_no_server(migrated, row):
    _, settings, folder = migrated("题.py", grpo(settings='use_vllm=True, vllm_mode="colocate"'))
    assert "sampler" not in settings
    assert row(folder, "GRPOConfig.use_vllm")[0] == "Kept, with another meaning"


PPO = """
from trl import {name}Config, {name}Trainer
from transformers import AutoModelForSequenceClassification, AutoModelForCausalLM
args = {name}Config(num_mini_batches=2, total_episodes=64, sft_model_path="模型", reward_model_path="评分", {settings})
score = AutoModelForSequenceClassification.from_pretrained(args.reward_model_path)
policy = AutoModelForCausalLM.from_pretrained(args.sft_model_path)
trainer = {name}Trainer(config=args, tokenizer=None, policy=policy, ref_policy=policy, reward_model=score,
                        value_model=score, train_dataset=load("题"))
"""


@pytest.mark.parametrize(
    ("name", "settings", "flags", "rollout", "ends"),
    [
        ("PPOv2", "", [], 16, "fixed"),
        ("PPO", 'stop_token="eos"', ["--version", "0.16"], 16, "stop"),
        ("PPO", "", ["--version", "0.17"], 8, "fixed"),
    ],
)
def test_ppo_of_every_version(migrated, row, name, settings, flags, rollout, ends):
    _, found, folder = migrated("题.py", PPO.format(name=name, settings=settings), *flags)
    assert (found["rollout_batch_size"], found["response_length"]) == (rollout, ends)
    assert (found["model"], found["rewards"], found["critic"]) == ("模型", ["model:评分"], "reward")
    assert row(folder, "OnPolicyConfig.sft_model_path")[0] == "Kept"


def test_what_a_script_with_step_says_is_no_question(migrated, row):
    settings = "adap_kl_ctrl=True, early_stopping=False, target_kl=0.1, batch_size=128"
    _, found, folder = migrated("情感.py", STEP.format(settings=settings))
    assert row(folder, "PPOConfig.adap_kl_ctrl")[0] == "Kept"
    assert row(folder, "PPOConfig.early_stopping")[0] == "Without effect on the numbers"
    assert found["max_new_tokens"] == 15
    assert row(folder, "the loop")[:1] == ["To be answered"]


IN_A_CLASS = """
from trl import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer

class 训练:
    def __init__(self, name, rate=1e-5):
        self.config = PPOConfig(learning_rate=rate, batch_size=32, mini_batch_size=4)
        self.model = AutoModelForCausalLMWithValueHead.from_pretrained(name)
        self.ppo = PPOTrainer(self.config, self.model, tokenizer=None, dataset=self.data())

    def data(self):
        return load("题")

    def run(self, steps):
        for _ in range(steps):
            self.ppo.step(queries, responses, self.scores())

训练("模型", rate=2e-6).run(3)
"""


def test_a_script_with_step_in_a_class_of_its_own(migrated):
    _, settings, folder = migrated("类.py", IN_A_CLASS)
    wanted = {"model": "模型", "learning_rate": 2e-6, "rollout_batch_size": 32, "micro_batch_size": 4}
    assert {name: settings.get(name) for name in wanted} == wanted
    assert (folder / "类.py").exists()


def test_a_parser_fills_the_settings_of_a_script_with_step(migrated, row):
    own = "@dataclass\nclass 参数:\n    use_peft: bool = False\nparser = HfArgumentParser((参数, PPOConfig))\n"
    own += "args, config = parser.parse_args_into_dataclasses()"
    script = "from dataclasses import dataclass\nfrom transformers import HfArgumentParser" + STEP.format(settings="")
    script = script.replace("config = PPOConfig()", own)
    _, settings, folder = migrated(
        "情感.py", script, "--arguments=--batch_size 16 --mini_batch_size 8 --use_peft --别的 1"
    )
    assert (settings["rollout_batch_size"], settings["micro_batch_size"]) == (16, 8)
    assert row(folder, "--别的")[0] == "To be answered"
    for name in ("PPOConfig.use_peft", "--batch_size", "--use_peft"):
        assert row(folder, name) is None, name


def test_imports_of_a_script_with_step(migrated):
    _, _, folder = migrated("情感.py", STEP.format(settings=""))
    lines = (folder / "情感.py").read_text(encoding="utf-8").splitlines()
    assert lines[1:5] == [
        "from heedful.compat.trl.pipelines import pipeline; from transformers import AutoTokenizer",
        "from heedful.compat.trl import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer",
        "from heedful.compat.trl.core import LengthSampler",
        "from heedful.compat.trl.import_utils import is_xpu_available",
    ]


def test_an_encoder_decoder_is_told_if_it_is_used(migrated, row):
    both = "import AutoModelForSeq2SeqLMWithValueHead, "
    script = STEP.format(settings="").replace("import ", both, 2).replace(f"{both}pipeline", "import pipeline")
    _, _, folder = migrated("情感.py", script)
    assert row(folder, "AutoModelForSeq2SeqLMWithValueHead") is None
    used = script.replace("AutoModelForCausalLMWithValueHead.from", "AutoModelForSeq2SeqLMWithValueHead.from")
    _, _, folder = migrated("情感.py", used, "--overwrite")
    assert row(folder, "AutoModelForSeq2SeqLMWithValueHead")[0] == "Not kept"


def test_defaults_of_old_scripts_are_told(migrated, row):
    outcome, settings, folder = migrated("情感.py", STEP.format(settings="batch_size=8"))
    assert "read as version 0.6" in outcome.err  # from 0.7 on a batch of 8 has no mini-batches of 128
    assert settings["micro_batch_size"] == 1
    assert "mini_batch_size=1 into its PPOConfig" in row(folder, "the script's mini_batch_size")[-1]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("do_predict: true\n", "it has no do_train, so it trains nothing"),
        ("stage: [ppo]\n", "stage \"['ppo']\" is none of sft"),
        ("a: &a [0,0,0,0,0,0,0,0,0,0]\n" + "".join(
            f"{to}: &{to} [{','.join(['*' + of] * 10)}]\n" for of, to in zip("abcdefgh", "bcdefghi", strict=True)
        ), "more than 10,000 items"),
        ("x: !!python/object/apply:os.system ['touch 坏']\n", "not valid YAML"),
    ],
)  # fmt: skip
def test_yaml_that_is_refused(migrated, content, said):
    outcome, _, folder = migrated("文.yaml", "model_name_or_path: 模型\ntemplate: qwen\n" + content)
    assert outcome.status == 2
    assert said in outcome.message
    assert not folder.exists()


def test_stages_of_llama_factory(migrated, row, tmp_path):
    (tmp_path / "dataset_info.json").write_text(
        '{"文": {"file_name": "文.json", "columns": {"prompt": "正文"}}}', encoding="utf-8"
    )
    base = f"model_name_or_path: 模型\ndo_train: true\ndataset: 文\ndataset_dir: {tmp_path}\n"
    steps = "eval_strategy: steps\neval_steps: 20\nmax_steps: 9\n"
    _, settings, folder = migrated("文.yaml", f"{base}stage: pt\n{steps}")
    assert (settings["columns"], settings["eval_every"]) == ("text=正文", 20)
    assert row(folder, "TrainingArguments.eval_strategy")[0] == "Kept"
    _, settings, _ = migrated("文.yaml", f"{base}stage: orpo\norpo_beta: 0.2\n", "--overwrite")
    assert (settings["nll_coef"], settings["beta"]) == (1.0, 0.2)


@pytest.mark.parametrize("name", ["-.py", "migration.py", "空 格.py"])
def test_names_of_files_and_links(heedful, written, tmp_path, name):
    script, there = written(name, dpo()), tmp_path / "别处"
    there.mkdir()
    (there / "我的.txt").write_text("留下", encoding="utf-8")
    (tmp_path / "链接").symlink_to(there)
    assert "我的.txt" in heedful("migrate", script, "--output", tmp_path / "链接", "--overwrite").message
    assert heedful("migrate", script, "--output", tmp_path / "新").status == 0
    assert sorted(path.name for path in (tmp_path / "新").iterdir()) == ["dpo.yaml", "migration.md"]
    assert [path.name for path in there.iterdir()] == ["我的.txt"]


@pytest.mark.parametrize(
    "settings",
    ["per_device_train_batch_size=0", "loss_type=[1]", "learning_rate=[]", "steps_per_generation=0", "num_generations='x'",
     "max_prompt_length='z', chat_template_kwargs={'a': 1}", "vllm_server_port=[], use_vllm=True", "**unknown"],
)  # fmt: skip
def test_settings_that_are_none_leave_no_traceback(migrated, settings):
    outcome, _, _ = migrated("题.py", grpo(settings=settings))
    assert outcome.status in (0, 2)
    assert "Traceback" not in outcome.err


def test_a_script_without_end_is_refused_soon(migrated):
    loops = "".join(f"{'    ' * depth}for 数{depth} in 表:\n" for depth in range(8)) + "    " * 8 + "做(数7)\n"
    outcome, _, _ = migrated("题.py", f"表 = {list(range(90))}\n{loops}" + grpo())
    assert "题.py is too long to be followed to a trainer" in outcome.message


def test_a_question_of_a_long_text_is_short(migrated):
    _, _, folder = migrated("题.py", grpo(settings=f"learning_rate=查('{'长' * 5000}')"))
    assert max(map(len, (folder / "grpo.yaml").read_text(encoding="utf-8").splitlines())) < 400


@pytest.mark.parametrize("given", ["project=f'组-{name()}', report_to='trackio'", "report_to=name(), project='组'"])
def test_a_tracker_that_only_a_run_can_name_is_a_question(migrated, row, given):
    script = f"import trl\ntrl.SFTTrainer('模型', args=trl.SFTConfig(output_dir='o', {given}))\n"
    outcome, settings, folder = migrated("题.py", script)
    assert outcome.status == 0
    assert not {"track", "track_project"} & set(settings)
    assert row(folder, f"TrainingArguments.{given.split('=')[0]}")[0] == "To be answered"
