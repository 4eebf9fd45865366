"""What the errors of object stores mean: which may pass, which are of credentials, and what a user is told.

No message has a secret: it names objects by bucket and key only, and of a store's answer just its status.
"""

from __future__ import annotations

import errno
import re

from prep.errors import CacheError
from prep.fs.remote.bucket import ENDPOINTS, split_url

VARIABLES = {"s3": "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN, AWS_REGION; AWS_SKIP_SIGNATURE=true "
             "for a public bucket", "gs": "GOOGLE_APPLICATION_CREDENTIALS",
             "az": "AZURE_STORAGE_ACCOUNT_NAME, AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_TOKEN"}
NO_CREDENTIALS = "the environment has no credentials, and this machine has no role that gives some"
# Where machines in clouds are asked for credentials of their role: AWS, Google, Azure.
_METADATA = re.compile(r"//(?:169\.254\.169\.254|metadata|metadata\.google\.internal)/|/latest/api/token")

# A proxy where none can be, as nothing listens on port 0: by it obstore is to reach hosts that it must not reach.
NOWHERE = "127.0.0.1:0"

# Codes of S3 for a write that met another one of the same object. Which of them will have written it is not known yet.
_CONFLICT = re.compile("<Code>(?:ConditionalRequestConflict|OperationAborted)</Code>")


class StoreError(CacheError):
    """A store does not answer, or refuses."""


class Stopped(Exception):
    """The caller's `stop` was set."""


class Passing(Exception):
    """A failure that may pass: what happened."""


class Denied(Exception):
    """The store refuses the credentials: what it answered."""


def is_refusal(error: StoreError) -> bool:
    """Whether a store answered, but refused the credentials, or what they do not allow."""
    return isinstance(error.__context__, Denied)


def is_conflict(error: Exception) -> bool:
    """Whether a store ended a write because it met another one of the same object: it can be repeated."""
    return _CONFLICT.search(str(error)) is not None


def credentials_hint(url: str) -> str:
    """What a user can do whose credentials the store of `url` refuses, or who has none."""
    return (f"check the credentials in the environment ({VARIABLES[split_url(url)[0]]}), what they allow, and this "
            "computer's clock; then run the same command again")


def sent_on(url: str, host: str) -> StoreError:
    """The error for a store that sends requests on to another host."""
    return StoreError(f"{url}: the store sends requests on to {host}, which would get the credentials",
                      hint="if that is the store, name it as the endpoint: export "
                      f"{ENDPOINTS[split_url(url)[0]][0]}=https://HOST")


def sort_out(error: Exception, url: str) -> None:
    """Raises what an error of obstore means: `FileNotFoundError`, `Denied`, `Passing`, or a `StoreError`.

    For a range beyond the end of an object, as a shorter one has replaced it, raises an `OSError` with EIO.
    """
    from obstore import exceptions

    what = summary_of(error)
    if isinstance(error, FileNotFoundError):
        name = "there is no such bucket" if "NoSuchBucket" in str(error) else "there is no such object"
        raise FileNotFoundError(errno.ENOENT, name, url) from None
    if isinstance(error, ValueError) and "Could not parse path" in str(error):
        raise FileNotFoundError(errno.ENOENT, "no object can have such a name", url) from None
    _check_setup(str(error), url)
    if isinstance(error, exceptions.PermissionDeniedError | exceptions.UnauthenticatedError):
        raise Denied(what) from None
    if "ExpiredToken" in str(error) or "TokenRefreshRequired" in str(error):
        raise Denied(what) from None
    if not isinstance(error, exceptions.BaseError):
        raise error
    if is_conflict(error):
        raise Passing(what) from None
    status = re.search(r"status code: (\d{3})", str(error))
    if isinstance(error, exceptions.GenericError) and (status is None or status[1] in ("408", "429") or
                                                       status[1].startswith("5")):
        if status is None and _is_configuration(str(error)):
            raise StoreError(f"{url}: {what}", hint=credentials_hint(url)) from None
        raise Passing(what) from None
    if status is not None and status[1] == "416":
        raise OSError(errno.EIO, "object ends before the bytes that were asked for", url) from None
    if status is not None and status[1] in ("401", "403"):  # of a request that obstore does not sort out itself
        raise Denied(what) from None
    hint = credentials_hint(url) if what == NO_CREDENTIALS else (
        "check bucket, region and endpoint in the environment")
    raise StoreError(f"{url}: {what}", hint=hint) from None


def _check_setup(text: str, url: str) -> None:
    """Raises `StoreError` for what this computer's clock or its environment has to be set for."""
    if "<Code>RequestTimeTooSkewed</Code>" in text:
        raise StoreError(f"{url}: the store refuses requests of this computer, whose clock differs too much from the "
                         "store's", hint="set the clock (timedatectl set-ntp true on Linux), then run the same command "
                         "again") from None
    if re.search(rf"\b{re.escape(NOWHERE)}\b", text):
        raise sent_on(url, "another host") from None


def _is_configuration(text: str) -> bool:
    return "builder error" in text or "onfiguration" in text or "BadScheme" in text


def summary_of(error: Exception) -> str:
    """An error of obstore in a few words, of which none can be a secret: the store's status, or the kind of failure."""
    text = str(error)
    if (status := re.search(r"status code: (\d{3}[\w ]*)", text)) and not _METADATA.search(text):
        code = re.search(r"<Code>(\w{1,64})</Code>", text)
        return f"the store answered {status[1].strip()}{f' ({code[1]})' if code else ''}"
    if _METADATA.search(text):
        return NO_CREDENTIALS
    for mark, what in (("Connect", "no connection"), ("imed", "no answer in time"), ("non-partial", "no ranges")):
        if mark in text:
            return what
    if "BadScheme" in text:
        return "the endpoint is plain http, which is not allowed without AWS_ALLOW_HTTP=true"
    if _is_configuration(text):
        return "the store's settings are not valid"
    return "the connection broke"
