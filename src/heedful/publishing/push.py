"""Send a run's model to the Hugging Face Hub."""

import os

from heedful.configs.push import PushConfig
from heedful.errors import ConfigError, HeedfulError, MachineError
from heedful.publishing.outgoing import Files, outgoing, write_folder
from heedful.redact import redact


def push(config: PushConfig) -> list[str]:
    """Upload a run's model with its card, or write what would go out. Returns what to tell the user.

    Nothing of the run changes. The upload is one commit: the repository has all of it, or is as it was.

    Raises ConfigError, CheckpointError and DataError before anything is sent; ConfigError if the Hub refuses; MachineError
    if it cannot be reached.
    """
    files, stays = outgoing(config)
    said = [f"stays here: {', '.join(stays)}"] if stays else []
    if config.dry_run:
        write_folder(files, config.dry_run_folder)
        return [*said, f"what would go out to {config.to} is in {config.dry_run_folder}: {', '.join(sorted(files))}"]
    address = _upload(config, files)
    return [*said, f"{len(files)} files are in {address}"]


def _upload(config: PushConfig, files: Files) -> str:
    from huggingface_hub import CommitOperationAdd, HfApi, get_token

    if get_token() is None:
        raise ConfigError(
            "nobody is logged in to the Hub: run `hf auth login`, or set HF_TOKEN (with the right to write)"
        )
    api = HfApi(library_name="heedful")
    operations = [
        CommitOperationAdd(path_in_repo=name, path_or_fileobj=content if isinstance(content, bytes) else str(content))
        for name, content in files.items()
    ]
    try:
        address = api.create_repo(config.to, private=config.private, exist_ok=True)
        if config.private and api.repo_info(config.to).private is False:
            raise ConfigError(
                f"{config.to} is there already and public; add --no-private to push to it, or name another"
            )
        api.create_commit(config.to, operations, commit_message=config.message)
    except HeedfulError:
        raise
    except Exception as error:  # of the Hub's client, of its HTTP library, or of the system
        raise _refusal(config, error) from error
    return str(address)


def _refusal(config: PushConfig, error: Exception) -> HeedfulError:
    """What the Hub's answer, or the lack of one, means."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    first = redact(next(iter(str(error).strip().splitlines()), type(error).__name__))
    kept = f"nothing of {config.run} was changed ({first:.200})"
    if status == 401:
        return ConfigError(f"the Hub does not know your token (401): run `hf auth login`, or set HF_TOKEN; {kept}")
    if status == 403:
        owner = config.to.partition("/")[0]
        return ConfigError(
            f"your token may not write to {config.to} (403): use one with the right to write to {owner}; {kept}"
        )
    if status == 404:
        return ConfigError(f"the Hub has no {config.to} that you may write to (404): check ORG and your token; {kept}")
    if status is not None and 400 <= status < 500:
        return ConfigError(f"the Hub refuses {config.to} ({status}); {kept}")
    if type(error).__name__ == "OfflineModeIsEnabled":
        return ConfigError(f"HF_HUB_OFFLINE is set, so nothing can be sent: unset it, or add --dry-run; {kept}")
    where = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    what = f"failed ({status})" if status else "cannot be reached"
    return MachineError(f"the Hub at {redact(where)} {what}; try again later: {kept}")
