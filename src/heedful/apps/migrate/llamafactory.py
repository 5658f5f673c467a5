"""YAML files of LLaMA-Factory."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from heedful.apps.migrate import common
from heedful.apps.migrate.source import read_settings
from heedful.apps.migrate.translate import Origin, Row, Translation, yaml_text
from heedful.configs.peers import peers
from heedful.errors import ConfigError
from heedful.files import shallow

PEER = "llamafactory"
MARKS = ("stage", "finetuning_type", "template", "dataset", "do_train", "dataset_dir")
"""Settings of which its files have some."""


def read_origin(path: Path) -> Origin:
    """What a file sets. Raises ConfigError."""
    values = read_settings(path)
    root = yaml.compose(path.read_text(encoding="utf-8-sig"), Loader=shallow(yaml.SafeLoader))
    entries = root.value if isinstance(root, yaml.MappingNode) else []
    _refuse_others(path, values)
    stage = str(values.get("stage", "sft"))
    if stage == "orpo":  # until 0.7
        stage, values = "dpo", {"pref_loss": "orpo", "pref_beta": values.pop("orpo_beta", 0.1)} | values
    known = peers()[PEER].trainers
    if stage not in known:
        raise ConfigError(f"{path}: stage {stage!r} is none of {', '.join(known)}")
    table = peers()[PEER].settings(stage)
    keys = {name: next((one for one in table if one.partition(".")[2] == name), name) for name in values}
    lines = {keys[key.value]: key.start_mark.line + 1 for key, _ in entries if str(key.value) in keys}
    given = {keys[name]: value for name, value in values.items() if name != "stage"}
    return Origin(PEER, stage, given, lines)


def _refuse_others(path: Path, values: Mapping[Any, Any]) -> None:
    """Raises ConfigError for a file of settings of something else."""
    if values.get("do_train") is not True and (values.get("do_predict") or values.get("do_eval")):
        raise ConfigError(
            f"{path}: it has no do_train, so it trains nothing; see heedful evaluate and heedful sample --help"
        )
    if "model_name_or_path" in values and any(name in values for name in MARKS):
        return
    others = {
        "axolotl": "base_model" in values,
        "verl": "actor_rollout_ref" in values or "trainer" in values,
        f"TRL, which does not say the trainer (give its script, with --arguments='--config {path}')": "model_name_or_path"
        in values,
        "heedful already": "model" in values and ("data" in values or "rewards" in values),
    }
    found = next((name for name, is_it in others.items() if is_it), "")
    looks = f"; it looks like one of {found}" if found else ""
    raise ConfigError(
        f"{path}: not a file of LLaMA-Factory, which has model_name_or_path and one of {', '.join(MARKS)}{looks}. Of other "
        "libraries docs/peers.md has the names of the settings"
    )


def translate_groups(run: Translation, path: Path) -> None:
    """Settings that several of the origin's make together."""
    _data(run, path)
    _model(run)
    _adapters(run)
    common.dtype(run)
    common.trackers(run)
    common.several_processes(run)
    _held_out(run)
    if run.command == "ppo":
        _ppo(run)
    else:
        common.batches(run)
        common.saving(run)
        common.schedule(run, run.written.get("max_steps"))
    if run.command == "dpo":
        _preferences(run)


def _held_out(run: Translation) -> None:
    """The share of the data that is held out: none by default."""
    share = run.number("val_size")
    run.claim("val_size")
    if share and share >= 1:
        run.add_row("question", "val_size", "eval_fraction: ?")
    elif share or "eval_fraction" in run.setting_types:
        run.add_written_row("val_size", run.write("eval_fraction", share or 0.0), differs=bool(share))


def _model(run: Translation) -> None:
    """Adapters that are there already, the template, and the reference."""
    adapters, folder = run.value("adapter_name_or_path"), run.value("adapter_folder")
    run.claim("adapter_name_or_path", "adapter_folder", "create_new_adapter", "template")
    if adapters:
        names = adapters if isinstance(adapters, list) else [one.strip() for one in str(adapters).split(",")]
        whole = names[-1] if not folder else f"{folder}/{names[-1]}"
        ours = run.write("model", whole) if len(names) == 1 else "model: ?"
        run.add_row("differs" if len(names) == 1 else "question", "adapter_name_or_path", ours)
        if folder:
            run.add_row("kept", "adapter_folder", ours)
    if run.sets("create_new_adapter"):
        run.add_row("kept" if run.value("create_new_adapter") else "differs", "create_new_adapter")
    if run.sets("template"):
        run.add_row("differs", "template")
    reference, added = run.value("ref_model"), run.value("ref_model_adapters")
    run.claim("ref_model", "ref_model_adapters")
    is_unused = run.command == "ppo" and run.value("finetuning_type") == "lora"
    for name, value in (("ref_model", reference), ("ref_model_adapters", added)):
        if run.sets(name) and value:
            used = added or reference
            run.add_row("none" if is_unused else "kept", name, "" if is_unused else run.write("reference", used))


def _preferences(run: Translation) -> None:
    """DPO's relatives, and the likelihood of the chosen response."""
    extra, is_orpo = run.number("pref_ftx") or run.number("dpo_ftx") or 0.0, run.value("pref_loss") == "orpo"
    weight = run.write("nll_coef", extra + is_orpo) if extra or is_orpo else ""
    for name in ("pref_ftx", "dpo_ftx"):
        if run.claim(name):
            run.add_row("differs" if extra else "none", name, weight)
    gamma, beta = run.number("simpo_gamma"), run.number("pref_beta")
    run.claim("simpo_gamma")
    if run.value("pref_loss") == "simpo" and gamma is not None and beta:
        run.add_written_row("simpo_gamma", run.write("target_margin", gamma / beta))
    elif run.sets("simpo_gamma"):
        run.add_row("none", "simpo_gamma")


def _ppo(run: Translation) -> None:
    """PPO's batches: TRL's batch_size is per_device_train_batch_size * gradient_accumulation_steps * ppo_buffer_size."""
    rows, buffer = common.optimizer_rows(run), run.number("ppo_buffer_size")
    run.claim(
        "ppo_buffer_size", "num_train_epochs", "max_steps", "reward_model", "reward_model_adapters", "reward_model_type"
    )
    if rows is not None and buffer is not None:
        each = int(run.number("per_device_train_batch_size") or 1)
        run.add_written_row("per_device_train_batch_size", run.write("micro_batch_size", each))
        run.add_written_row("gradient_accumulation_steps", run.write("minibatch_size", rows))
        run.add_written_row("ppo_buffer_size", run.write("rollout_batch_size", int(rows * buffer)))
    steps = run.number("max_steps")
    if steps is not None and steps > 0:
        run.add_written_row("max_steps", run.write("steps", int(steps)))
    else:
        passes, size = run.number("num_train_epochs"), run.written.get("rollout_batch_size")
        said = run.table[run.full_name("num_train_epochs")].note
        known = f"{passes:g} times the number of prompts, over {size}" if passes and size else ""
        run.add_row("question", "num_train_epochs", "steps: ?", f"{known}: {said}" if known else said)
    reward, kind = run.value("reward_model_adapters") or run.value("reward_model"), run.value("reward_model_type")
    name = "reward_model_adapters" if run.value("reward_model_adapters") else "reward_model"
    if isinstance(reward, str) and kind in ("full", "lora"):
        run.add_written_row(name, run.write("rewards", [f"model:{reward}"]))
    elif isinstance(reward, str):
        run.add_row("question", name, "rewards: ?", run.table[run.full_name("reward_model_type")].note)
    if run.sets("reward_model_type"):
        run.add_row("kept" if kind in ("full", "lora") else "question", "reward_model_type")
    common.schedule(run, run.written.get("steps"))
    common.saving(run)


def _adapters(run: Translation) -> None:
    """LoRA's rank, alpha and parts."""
    run.claim("finetuning_type", "lora_rank", "lora_target", "use_rslora")
    kind = run.value("finetuning_type")
    if kind != "lora":
        if kind not in ("full", None):
            run.add_row("lost", "finetuning_type", "lora_rank")
        else:
            run.add_written_row("finetuning_type", "lora_rank: 0")
        run.claim("lora_alpha")
        for name in ("lora_rank", "lora_alpha", "lora_target", "use_rslora"):
            if run.sets(name):
                run.add_row("none", name, note=f"finetuning_type is {kind}, so there are no adapters.")
        return
    rank, alpha = run.number("lora_rank"), run.number("lora_alpha")
    if run.ask_if_unknown("lora_rank", ours="lora_rank") or rank is None:
        return
    run.add_written_row("finetuning_type", run.write("lora_rank", int(rank)))
    run.add_written_row("lora_rank", f"lora_rank: {rank:g}")
    if run.value("use_rslora") is True:
        scaled = (alpha if alpha is not None else 2 * rank) * rank**0.5
        run.add_row("kept", "use_rslora", run.write("lora_alpha", scaled))
    target = run.value("lora_target")
    parts = target if isinstance(target, list) else str(target or "all").split(",")
    whole = "all-linear" if parts == ["all"] else ",".join(str(one).strip() for one in parts)
    run.add_written_row("lora_target", run.write("lora_targets", whole))


def _data(run: Translation, path: Path) -> None:
    """The data sets by their entries in dataset_info.json."""
    run.claim("dataset", "dataset_dir", "eval_dataset", "split")
    for name in ("dataset_dir", "split"):
        if run.sets(name):
            run.add_row("kept", name)
    folder = run.value("dataset_dir") if isinstance(run.value("dataset_dir"), str) else "data"
    places = [one for one in (Path(folder), path.parent / folder) if (one / "dataset_info.json").is_file()]
    for name, ours in (("dataset", "data"), ("eval_dataset", "eval_data")):
        given = run.value(name)
        names = given if isinstance(given, list) else str(given).split(",") if given else []
        names = [str(one).strip() for one in names if str(one).strip()]
        if not names:
            continue
        if not places:
            run.add_row(
                "question",
                name,
                f"{ours}: ?",
                f"{folder}/dataset_info.json, which says where it is, was not found here.",
            )
        elif len(names) > 1:
            run.add_row(
                "question",
                name,
                f"{ours}: ?",
                "heedful reads one data set: put the records into one file, or into a folder.",
            )
        else:
            _entry(run, name, ours, names[0], places[0])


def _entry(run: Translation, name: str, ours: str, data: str, folder: Path) -> None:
    try:
        entries = json.loads((folder / "dataset_info.json").read_text(encoding="utf-8"))
        entry = entries[data]
    except (OSError, ValueError, KeyError, TypeError):
        run.add_row("question", name, f"{ours}: ?", f"{folder / 'dataset_info.json'} has no entry {data}.")
        return
    place = next((entry[key] for key in ("hf_hub_url", "ms_hub_url", "file_name") if key in entry), None)
    if not isinstance(place, str) or "script_url" in entry or "load_from" in entry:
        run.add_row(
            "question",
            name,
            f"{ours}: ?",
            f"Its entry in dataset_info.json has no file and no name on a Hub: {yaml_text(entry)[:80]}",
        )
        return
    if "file_name" in entry and "hf_hub_url" not in entry and "ms_hub_url" not in entry:
        place = str(folder / place)
    elif "hf_hub_url" not in entry:
        place = f"modelscope:{place}"
    if entry.get("split", "train") != "train" and "file_name" not in entry:
        place = f"{place}:{entry['split']}"
    run.add_written_row(name, run.write(ours, place), "As its entry in dataset_info.json says.")
    columns = {key: value for key, value in (entry.get("columns") or {}).items() if value and key != value}
    tags = {key: value for key, value in (entry.get("tags") or {}).items() if value}
    if "subset" in entry or "folder" in entry:
        run.rows.append(
            Row(
                "question",
                f"{data}: subset, folder",
                yaml_text(entry),
                "",
                "heedful reads the whole data set of that name.",
            )
        )
    if entry.get("formatting", "alpaca") == "alpaca":
        renamed = {"prompt": "instruction", "query": "input", "response": "output"}
        if run.trainer == "pt":  # the text is in the prompt
            columns, renamed = {"prompt": columns.get("prompt", "instruction")}, {"prompt": "text"}
        pairs = [f"{renamed.get(key, key)}={value}" for key, value in columns.items() if renamed.get(key, key) != value]
        if pairs and ours == "data":
            run.rows.append(Row("kept", f"{data}: columns", yaml_text(columns), run.write("columns", ",".join(pairs))))
    elif columns.get("messages", "conversations") not in ("conversations", "messages") or tags:
        run.rows.append(Row("differs", f"{data}: columns, tags", yaml_text(columns | tags), "",
                            "heedful tells conversations by their columns and roles (docs/data.md)."))  # fmt: skip
