"""Upload a model folder to the Hugging Face Hub, privately unless asked otherwise."""

from pathlib import Path

from trueline.config.base import ConfigError

REMEDY = "check the name, log in with `hf auth login`, or set HF_TOKEN to a token that may write there"


def push(folder: Path, name: str, *, public: bool = False) -> str:
    """Upload every file of a folder as one commit, and return its address; a new repository is made."""
    from huggingface_hub import HfApi, constants, errors  # noqa: PLC0415

    if constants.is_offline_mode():
        raise ConfigError(f"--push-to-hub {name}: HF_HUB_OFFLINE is set: unset it, or upload {folder} elsewhere")
    failures = (errors.HTTPError, errors.HFValidationError, errors.LocalTokenNotFoundError, OSError)  # type: ignore[attr-defined]
    try:
        hub = HfApi()
        repository = hub.create_repo(name, private=not public, exist_ok=True)
        found = hub.upload_folder(repo_id=repository.repo_id, folder_path=folder, commit_message="Upload a model")
    except failures as error:
        why = str(error).strip().splitlines()[0]
        raise ConfigError(f"--push-to-hub {name}: {why}; {folder} is written; {REMEDY}") from error
    return str(found.commit_url)
