"""Finds a model: a local directory, a single file, or a snapshot in the Hub's cache; uses the network only on request.
Uploads results to the Hub."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from glob import escape
from pathlib import Path
from typing import Any

from prep.errors import ModelError, UsageError, first_line
from prep.formatting import without_secrets
from prep.models.checkpoints.contents import contents_of, own_configs, published
from prep.models.components import known_classes
from prep.models.files import INDEX, MODULAR, Model, SingleFile
from prep.models.named import NamedFile, file_of
from prep.models.pipeline import SCHEDULER, open_single
from prep.parse import Unparsed, hub_id

# The files we use of a pipeline, or of a single model: configs, tokenizers and safetensors; never pickles or code.
CONFIGS = (INDEX, MODULAR, "*/*.json", "*/*.jinja", "*/*.txt", "*/*.model")
PIPELINE = (*CONFIGS, "*/*.safetensors")
SINGLE = ("*.json", "*.txt", "*.model", "*.safetensors")
TAGGER = ("model.onnx", "selected_tags.csv")
_WANTED = {SINGLE: "a directory with config.json and weights", TAGGER: f"a directory with {' and '.join(TAGGER)}"}


def locate(model: str | Path, *, download: bool | None = False) -> Model:
    """`model`, a directory or a single file; of a Hub id, the directory where it is.

    A Hub id is looked up in the local cache; with `download`, it is downloaded. `owner/name@revision` names a branch,
    tag or commit; without one, it is the branch `main`. A `Path` is never a Hub id: where a manifest names a directory
    that is gone, the Hub may have another model of that name. `download=None` is for commands that have no --download.
    Raises `ModelError` (exit 6) if there is none.
    """
    file = file_of(model)
    if file is None:
        return locate_directory(model, download=download)
    return open_named(file, download=download)


def open_named(file: NamedFile, *, download: bool | None) -> SingleFile:
    """The single file, with the configs that are named. Raises `ModelError`."""
    contents = contents_of(file.path)
    if not file.configs:
        return open_single(file.path, own_configs(contents))
    own = None if Path(file.configs).is_dir() else published(file.configs)
    parts = (*CONFIGS, *(f"{part}/*.safetensors" for part in contents.lacking))
    return open_single(file.path, own or locate_directory(file.configs, download=download, parts=parts))


def locate_directory(model: str | Path, *, download: bool | None = False, parts: tuple[str, ...] = PIPELINE) -> Path:
    """The directory of `model` with its `parts`, which is no single file. Raises `ModelError`."""
    if Path(model).is_dir():
        return Path(model)
    if not isinstance(model, str):
        raise ModelError(f"the model's directory {model} does not exist",
                         hint="name the model with --model DIR, or move its directory together with the manifest")
    return _snapshot(checked_id(model, parts), download, parts)


def checked_id(model: str, parts: tuple[str, ...] = PIPELINE) -> str:
    """`model`, which is no directory, if it is a Hub id. Raises `ModelError`."""
    if file_of(model) is not None:
        raise ModelError(f"model {model} is a single file, expected {_WANTED.get(parts, 'a diffusers directory')}",
                         hint=f"{'' if Path(model).is_file() else 'there is no such file; '}name its directory, or a "
                         "Hub id like owner/name")
    try:
        return hub_id(model, "model")
    except Unparsed:
        raise ModelError(f"model {without_secrets(model)} is neither a directory nor a Hub id",
                         hint=f"name {_WANTED.get(parts, 'a diffusers pipeline directory')}, or a Hub id like "
                         "owner/name") from None


def _snapshot(named: str, download: bool | None, parts: tuple[str, ...]) -> Path:
    from huggingface_hub import snapshot_download  # here: most runs name a directory, and this import takes 0.3 s

    try:
        name, _, revision = named.partition("@")
        return Path(snapshot_download(name, revision=revision or None, allow_patterns=list(parts),
                                      ignore_patterns=_unused(name, revision) if download else None,
                                      local_files_only=not download))
    except Exception as error:  # also of the library that connects, which has no class in common with others
        if download:
            raise ModelError(f"model '{named}' could not be downloaded: {error}",
                             hint="check the network; a model that is in the Hub's cache needs no --download") from None
        raise ModelError(f"model '{named}' is neither a directory nor in the local Hub cache",
                         hint="name a directory; this command downloads nothing" if download is None else
                         "name a directory, or add --download to download it from the Hub") from None


def _unused(name: str, revision: str) -> list[str]:
    """The files of a Hub model that are not worth downloading, as patterns; none if the Hub does not list its files."""
    from huggingface_hub import list_repo_files

    try:
        files = list_repo_files(name, revision=revision or None)
        return [escape(file) for file in (*unused_variants(files), *other_components(files))]
    except Exception:  # as above; the download says what is wrong, or finds the model in the cache
        return []


def other_components(files: Collection[str]) -> list[str]:
    """Those of the `files` of a modular repository that are of a component which no family has, as a prompt upsampler;
    a pipeline that needs it finds it where the index says."""
    if INDEX in files or MODULAR not in files:
        return []
    return [file for file in files if "/" in file and not file.startswith(f"{SCHEDULER.partition('/')[0]}/")
            and not known_classes(file.partition("/")[0])]


_OF_VARIANT = re.compile(r"(?P<stem>(?:.*/)?[^/.]+?)(?:\.\w+(?:-\d+-of-\d+)?\.safetensors|-\d+-of-\d+\.\w+\.safetensors"
                         r"|\.safetensors\.index\.\w+\.json)", re.ASCII)


def unused_variants(files: Iterable[str]) -> list[str]:
    """Those of `files` that are weights of a variant beside weights without one: `variant_of` never chooses them."""
    there = set(files)
    return [file for file in sorted(there) if (found := _OF_VARIANT.fullmatch(file))
            and there & {f"{found['stem']}.safetensors", f"{found['stem']}.safetensors.index.json"}]


# ---- uploads ---------------------------------------------------------------------------------------------------------


def repository(name: str) -> str:
    """`name`, if a repository of the Hub may be called so. Raises `UsageError`."""
    try:
        if "/" not in name or "@" in name:
            raise Unparsed("")
        return hub_id(name, "repository")
    except Unparsed:
        raise UsageError(f"repository is {without_secrets(name)[:80]!r}, expected OWNER/NAME",
                         hint="the owner is you, as the Hub calls you, or an organization") from None


def address_of(repo: str, file: str = "") -> str:
    """The address of a repository of models, or of a file in it."""
    from huggingface_hub import constants

    return f"{constants.ENDPOINT}/{repo}" + (f"/blob/main/{file}" if file else "")


def upload(repo: str, files: Mapping[str, Path | bytes], message: str, *, public: bool, bars: bool) -> bool:
    """Uploads `files`, or content given as bytes, by their names there, in one commit to main; whether it is private.

    One that does not exist is made: private, unless it is to be `public`. One that is public stays untouched unless
    that is asked for. The token is that of `huggingface_hub`: HF_TOKEN, or what `hf auth login` has kept. `bars`:
    whether it shows its own progress. Raises `ModelError`, `UsageError`.
    """
    from huggingface_hub import CommitOperationAdd, HfApi, get_token
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if not bars:
        disable_progress_bars()
    try:
        if get_token() is None:
            raise ModelError("there is no token of the Hub on this computer",
                             hint=f"{_LOGIN}, or set HF_TOKEN to a token that may write")
        api = HfApi()
        private = _private(api, repo, public=public)
        api.create_commit(repo, [CommitOperationAdd(name, content) for name, content in files.items()],
                          commit_message=message, repo_type="model")
        return private
    except (ModelError, UsageError):
        raise
    except Exception as error:  # also of the library that connects, which has no class in common with others
        raise _not_uploaded(error, repo) from None


def _private(api: Any, repo: str, *, public: bool) -> bool:
    """Whether a repository is private; one that does not exist is made. Raises `UsageError` for a public one that may
    not be, and what the library raises."""
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        private = bool(api.repo_info(repo, repo_type="model").private)
    except RepositoryNotFoundError:
        api.create_repo(repo, repo_type="model", private=not public)
        return not public
    if not private and not public:
        raise UsageError(f"{repo} is public, so everybody could see what is uploaded", hint="add --public if that is "
                         "meant; or name another repository, or make this one private in its settings on the Hub")
    return private


_LOGIN = "log in once with: hf auth login"
_REFUSED = {
    401: ("the Hub does not accept the token of this computer", f"{_LOGIN}, or set HF_TOKEN to a token that is valid"),
    403: ("the token of this computer may not write to {repo}", "name a repository of yours or of your organization, "
          "and use a token with the role 'write': https://huggingface.co/settings/tokens"),
    404: ("the Hub finds no {repo}, or nobody called {owner}", "name a repository of yours or of your organization"),
    409: ("{repo} was made or changed by another program just now", "run the same command again"),
    429: ("the Hub has had too many requests", "wait some minutes, and run the same command again"),
}


def _not_uploaded(error: Exception, repo: str) -> ModelError:
    """The error to raise for one of the library, which may be around another that says more."""
    while isinstance(error, RuntimeError) and isinstance(error.__cause__, Exception):
        error = error.__cause__
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status in _REFUSED:
        message, hint = _REFUSED[status]
        return ModelError(message.format(repo=repo, owner=repo.partition("/")[0]), hint=hint)
    if type(error).__name__ == "OfflineModeIsEnabled":
        return ModelError(f"{repo} cannot be uploaded to: HF_HUB_OFFLINE forbids the network",
                          hint="unset HF_HUB_OFFLINE")
    reason = without_secrets(first_line(error))[:200]
    if status is not None or isinstance(error, ValueError):
        return ModelError(f"the Hub refused the upload to {repo}: {reason}",
                          hint="what was uploaded before stays as it is")
    return ModelError(f"{repo} could not be uploaded to: {reason}",
                      hint="check the network, and run the same command again")
