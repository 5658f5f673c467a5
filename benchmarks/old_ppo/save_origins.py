"""Models that TRL, LLaMA-Factory and OpenRLHF save, and their own readings of them. origins.py runs it with each library.

PYTHON benchmarks/old_ppo/save_origins.py LIBRARY FOLDER, where LIBRARY is trl, llamafactory or openrlhf

Reads FOLDER/models and FOLDER/texts.json; writes FOLDER/LIBRARY/NAME, each a folder as the library saves it, and
FOLDER/LIBRARY/readings.json: for each of them, what the library gives for rows of token ids after loading it again.
"""

import copy
import json
import os
import sys
import types
import warnings
from pathlib import Path
from unittest.mock import MagicMock

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "DISABLE_VERSION_CHECK": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
warnings.filterwarnings("ignore")

import torch  # noqa: E402
from peft import LoraConfig  # noqa: E402
from transformers import AutoTokenizer, logging  # noqa: E402

library, folder = sys.argv[1], Path(sys.argv[2])
logging.set_verbosity_error()
logging.disable_progress_bar()
torch.set_num_threads(1)
torch.manual_seed(0)
MODELS = {path.name: str(path) for path in sorted((folder / "models").iterdir())}
TEXTS = json.loads((folder / "texts.json").read_text("utf-8"))
ROWS = [torch.randint(10, 250, (length,)).tolist() for length in (4, 9, 17)]
OUT = folder / library


def noisy(module, std=0.3):
    """Give a head or adapters numbers of a size that shows."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "lora_" in name or "v_head" in name or name in ("weight", "bias", "summary.weight", "summary.bias"):
                parameter.copy_((std * torch.randn(parameter.shape)).bfloat16())  # also exact in OpenRLHF's precision


def lora(name):
    return LoraConfig(
        r=2,
        task_type="CAUSAL_LM",
        target_modules=["c_attn"] if name == "gpt2" else ["q_proj", "v_proj"],
        fan_in_fan_out=name == "gpt2",
    )


@torch.no_grad()
def trl_values(model, ids):
    """TRL's values at each token."""
    return model.eval()(input_ids=torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)).long())[2][0].tolist()


def of_trl():
    from trl import AutoModelForCausalLMWithValueHead

    for name, path in MODELS.items():
        for case, saving in (
            ("whole", {}),
            ("shards", {"safe_serialization": False, "max_shard_size": "20KB"}),
            ("lora", {}),
        ):
            out = str(OUT / f"{name}-{case}")
            settings = {"peft_config": lora(name)} if case == "lora" else {}
            model = AutoModelForCausalLMWithValueHead.from_pretrained(path, **settings)
            noisy(model)
            Path(out).mkdir(parents=True)
            model.save_pretrained(out, **saving)
            AutoTokenizer.from_pretrained(path).save_pretrained(out)
            # TRL looks for the shards of a local folder on the Hub, and ends in an error.
            again = model if case == "shards" else AutoModelForCausalLMWithValueHead.from_pretrained(out)
            yield {
                "name": f"{name}-{case}",
                "role": "critic",
                "rows": [{"ids": ids, "values": trl_values(again, ids)} for ids in ROWS],
            }


def of_llamafactory():
    """Its own loader, saving and templates, for the stages rm and ppo."""
    from llamafactory.data.template import get_template_and_fix_tokenizer
    from llamafactory.hparams import DataArguments, FinetuningArguments, ModelArguments
    from llamafactory.model import load_model, load_tokenizer
    from llamafactory.train.callbacks import fix_valuehead_checkpoint
    from safetensors.torch import save_file

    for name in ("llama", "qwen2"):
        for kind in ("full", "lora"):
            for chat in ("qwen", "default"):
                out, base = str(OUT / f"{name}-{kind}-{chat}"), MODELS[name]
                tuning = FinetuningArguments(stage="rm", finetuning_type=kind, lora_rank=2, lora_target="q_proj,v_proj")
                args = ModelArguments(model_name_or_path=base)
                args.compute_dtype = torch.float32
                tokenizer = load_tokenizer(args)["tokenizer"]
                template = get_template_and_fix_tokenizer(tokenizer, DataArguments(template=chat))
                model = load_model(tokenizer, args, tuning, is_trainable=True, add_valuehead=True)
                noisy(model)
                Path(out).mkdir(parents=True)
                state = {key: x.clone().contiguous() for key, x in model.state_dict().items()}
                save_file(state, f"{out}/model.safetensors", {"format": "pt"})  # as its trainer does
                fix_valuehead_checkpoint(model, out, True)
                tokenizer.save_pretrained(out)
                where = (
                    {"model_name_or_path": base, "adapter_name_or_path": out}
                    if kind == "lora"
                    else {"model_name_or_path": out}
                )
                args = ModelArguments(**where)
                args.compute_dtype = torch.float32
                again = load_model(tokenizer, args, FinetuningArguments(), is_trainable=False, add_valuehead=True)
                texts = []
                for messages in TEXTS:
                    query = template.encode_oneturn(
                        tokenizer, [messages[0], {"role": "assistant", "content": ""}], None, None
                    )[0]
                    asked, answer = template.encode_oneturn(tokenizer, messages, None, None)
                    whole = asked + answer + [tokenizer.eos_token_id] * template.efficient_eos
                    said = tokenizer.encode(messages[1]["content"], add_special_tokens=False)
                    texts += [
                        {"messages": messages, "as": case, "ids": ids, "score": trl_values(again, ids)[-1]}
                        for case, ids in (
                            ("response of its PPO", [*query, *said, tokenizer.eos_token_id]),
                            ("cut response of its PPO", query + said),
                            ("whole text of its stage rm", whole),
                        )
                    ]
                rows = [{"ids": ids, "values": trl_values(again, ids)} for ids in ROWS]
                yield {"name": Path(out).name, "role": "reward", "rows": rows, "texts": texts}


class Absent(types.ModuleType):
    """What OpenRLHF imports for GPUs, in the place of packages that need them."""

    def __init__(self, name):
        super().__init__(name)
        self.__path__ = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock()


def of_openrlhf():
    """Its own classes and data set, on a CPU."""
    gpu = (
        "deepspeed flash_attn flash_attn.bert_padding flash_attn.utils flash_attn.utils.distributed ring_flash_attn ray"
    )
    absent = [*gpu.split(), "pylatexenc", "vllm", "optree", "torchdata", "torchdata.stateful_dataloader"]
    sys.modules |= {name: Absent(name) for name in absent}
    from datasets import disable_progress_bars
    from openrlhf.datasets.reward_dataset import RewardDataset
    from openrlhf.models.model import get_llm_for_sequence_regression
    from openrlhf.utils.utils import get_tokenizer

    disable_progress_bars()
    for name in absent:  # transformers and accelerate look for some of them too
        del sys.modules[name]

    def load(path, kind, **options):
        options = {"attn_implementation": "eager", "param_dtype": "bf16"} | options
        model = get_llm_for_sequence_regression(str(path), kind, **options).float()
        # transformers 5 leaves the buffers mean and std of OpenRLHF's constructor without numbers.
        model.mean[0], model.std[0] = getattr(model.config, "mean", 0.0), getattr(model.config, "std", 1.0)
        return model

    def read(model, ids, *, critic):
        """Values at each token, or the score, in a batch with padding on the left."""
        padded = torch.tensor([[2] * 3 + ids])
        mask = torch.tensor([[0] * 3 + [1] * len(ids)])
        with torch.no_grad():
            if critic:
                return model.eval()(padded, torch.ones(1, len(ids) - 1), mask)[0].tolist()
            return float(model.eval()(padded, mask))

    data = types.SimpleNamespace(
        prompt_key=None, chosen_key="chosen", rejected_key="rejected", apply_chat_template=True
    )
    strategy = types.SimpleNamespace(args=types.SimpleNamespace(data=data))
    for name, path in MODELS.items():
        for case, kind, prefix, normalised in (
            ("reward", "reward", "score", False),
            ("reward-value_head", "reward", "value_head", True),
            ("critic", "critic", "score", True),
        ):
            out = OUT / f"{name}-{case}"
            model = load(path, kind, value_head_prefix=prefix, init_value_head=True, normalize_reward=normalised)
            tokenizer = get_tokenizer(path, model)
            noisy(getattr(model, prefix))
            model.config.mean, model.config.std = 0.4, 2.5  # rm_trainer.py, evaluate
            model.config.value_head_prefix = prefix  # train_rm.py
            model.save_pretrained(out)
            model.config.to_json_file(out / "config.json")  # deepspeed.py, save_model
            tokenizer.save_pretrained(out)
            again = load(out, kind, normalize_reward=normalised)
            critic = kind == "critic"
            rows = [{"ids": ids, "values": read(again, ids, critic=critic)} for ids in ROWS]
            reading = {"name": out.name, "role": kind, "rows": rows}
            if not critic:
                from datasets import Dataset

                records = [{"chosen": messages, "rejected": messages} for messages in TEXTS]
                encoded = RewardDataset(Dataset.from_list(records), tokenizer, 1000, strategy, num_processors=None)
                whole = [encoded[i][0][0].tolist() for i in range(len(TEXTS))]
                reading["texts"] = [
                    {
                        "messages": messages,
                        "as": "text of its data set",
                        "ids": ids,
                        "score": read(again, ids, critic=False),
                    }
                    for messages, ids in zip(TEXTS, whole, strict=True)
                ]
            yield reading
        for case, targets in (
            ("adapters", ["c_attn"] if name == "gpt2" else ["q_proj", "v_proj"]),
            ("adapted-head", "all-linear"),
        ):
            base, out = OUT / f"{name}-reward", OUT / f"{name}-{case}"
            model = load(base, "reward", lora_rank=2, target_modules=targets)
            noisy(model)
            model.save_pretrained(out)
            model.config.to_json_file(out / "config.json")
            get_tokenizer(path, None).save_pretrained(out)
            rows = [
                {"ids": ids, "values": read(copy.deepcopy(model).merge_and_unload(), ids, critic=False)} for ids in ROWS
            ]
            yield {"name": out.name, "role": "refused" if case == "adapted-head" else "reward", "rows": rows}


OUT.mkdir(parents=True)
readings = list({"trl": of_trl, "llamafactory": of_llamafactory, "openrlhf": of_openrlhf}[library]())
(OUT / "readings.json").write_text(json.dumps(readings), "utf-8")
