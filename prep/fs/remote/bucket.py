"""A place in an object store as a value: store, bucket and key, which a URL like s3://bucket/key names."""

from __future__ import annotations

import os
import posixpath
import re
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from urllib.parse import urlsplit

from prep.errors import PathError
from prep.formatting import without_secrets

SCHEMES = ("s3", "gs", "az")
# What besides scheme and bucket decides which store it is: another one must not share its copies.
ENDPOINTS = {"s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"), "gs": ("GOOGLE_BASE_URL",),
             "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_STORAGE_ACCOUNT_NAME")}
_BEGINNINGS = tuple(f"{scheme}://" for scheme in SCHEMES)


class ListedUrl(str):
    """The URL of an object as a listing named it: all that follows the bucket is its key, also `?`, `#` and `\\`."""

    __slots__ = ()


@dataclass(frozen=True, slots=True, order=True)
class Bucket:
    """A bucket, an object in it, or what the keys of several objects begin with. Its names are those of `Path`."""

    scheme: str  # one of SCHEMES
    bucket: str
    key: str = ""  # without a slash at either end; "": the whole bucket

    @classmethod
    def parse(cls, url: str) -> Bucket:
        """The place that a person's URL names. Raises `PathError` for a URL with more than bucket and key, or that
        leaves its bucket."""
        return cls(*split_url(str(url)))

    @classmethod
    def listed(cls, url: str) -> Bucket:
        """The place of an object as a listing named it."""
        return cls(*split_url(ListedUrl(url)))

    @property
    def url(self) -> str:
        """The URL, of which no character of the key is parsed again."""
        return ListedUrl(f"{self.scheme}://{self.bucket}/{self.key}".rstrip("/"))

    def __str__(self) -> str:
        return f"{self.scheme}://{self.bucket}/{self.key}".rstrip("/")

    def as_posix(self) -> str:
        """The URL: what `Path` has for a path with slashes."""
        return str(self)

    @property
    def parts(self) -> tuple[str, ...]:
        """The scheme with its colon, the bucket, and the names in the key."""
        return (f"{self.scheme}:", self.bucket, *PurePosixPath(self.key).parts)

    @property
    def name(self) -> str:
        """The last name of the key; that of the bucket, if there is none."""
        return self.parts[-1]

    @property
    def stem(self) -> str:
        """The name without its last extension."""
        return PurePosixPath(self.name).stem

    @property
    def suffix(self) -> str:
        """The last extension of the key's last name, with its dot."""
        return PurePosixPath(self.key).suffix

    @property
    def parent(self) -> Bucket:
        """What is above; of a whole bucket, itself."""
        return replace(self, key=self.key.rpartition("/")[0])

    @property
    def parents(self) -> tuple[Bucket, ...]:
        """All that is above, up to the whole bucket, the nearest first."""
        places = [self]
        while places[-1].key:
            places.append(places[-1].parent)
        return tuple(places[1:])

    def __truediv__(self, name: str | PurePosixPath) -> Bucket:
        """What has `name` below this; a name as a listing gave it stays as it is."""
        return replace(self, key=f"{self.key}/{name}".strip("/"))

    def absolute(self) -> Bucket:
        """Itself: a place in a store does not depend on the working directory."""
        return self

    def with_name(self, name: str) -> Bucket:
        """What has `name` beside this."""
        return self.parent / name

    def is_relative_to(self, other: object) -> bool:
        """Whether this is `other`, or below it."""
        return self == other or other in self.parents

    def relative_to(self, other: object) -> PurePosixPath:
        """The names that lead from `other` down to this. Raises `ValueError` if none do."""
        if not isinstance(other, Bucket) or not self.is_relative_to(other):
            raise ValueError(f"{self} is not below {other}")
        return PurePosixPath(self.key[len(other.key):].strip("/"))

    def follow(self, relative: str) -> Bucket | None:
        """Where a relative path leads from here; `None` if that leaves the bucket, names the bucket itself or is a URL.
        """
        if names_bucket(relative):
            return None
        names: list[str] = list(PurePosixPath(self.key).parts)
        for part in PurePosixPath(relative).parts:
            if part == "/" or (part == ".." and not names):
                return None
            names = names[:-1] if part == ".." else [*names, part]
        return replace(self, key="/".join(names)) if names else None

    def leads_to(self, other: Bucket) -> str:
        """The relative path that `follow` takes to another place in this bucket."""
        path = posixpath.relpath(f"/{other.key}", f"/{self.key}")
        return f"./{path}" if ":" in path.split("/")[0] else path

    def shares_bucket(self, other: object) -> bool:
        """Whether `other` is in this bucket, too."""
        return isinstance(other, Bucket) and (self.scheme, self.bucket) == (other.scheme, other.bucket)


def is_object(file: str) -> bool:
    """Whether the name of a blob's file is the URL of an object. No path has two slashes there."""
    return file.startswith(_BEGINNINGS)


def names_bucket(text: str) -> bool:
    """Whether what a person typed names a bucket, as a URL or as what `Path` makes of one (s3:/bucket/key)."""
    return PurePosixPath(text).parts[:1] in {(f"{scheme}:",) for scheme in SCHEMES}


def split_url(url: str | os.PathLike[str]) -> tuple[str, str, str]:
    """Scheme, bucket and key of an object. Raises `PathError` for a URL with more, or that leaves its bucket."""
    if isinstance(url, ListedUrl):
        scheme, _, rest = url.partition("://")
        bucket, _, key = rest.partition("/")
        return scheme, bucket, key
    scheme, *parts = PurePosixPath(str(url).replace("\\", "/")).parts
    spelled = f"{scheme}//{'/'.join(parts)}"
    named = without_secrets(spelled)
    if not parts:
        raise PathError(f"{named} names no bucket", hint="name an object, like s3://bucket/dataset/manifest.json")
    if named != spelled and "?" in spelled and spelled.endswith(".tar"):
        raise PathError(f"{named}… has a question mark, with which a query begins in a URL, expected a name or a glob "
                        "without one", hint="a glob of tars in a store has * or a range like [0-9] in its place")
    if named != spelled:
        raise PathError(f"{named} was given with a user, a query or a fragment, expected only bucket and key",
                        hint="credentials come from the environment, like AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY")
    place: list[str] = []
    for part in parts:
        if part == ".." and len(place) < 2:
            raise PathError(f"{named} leaves its bucket", hint="name an object without .. in its key")
        place = place[:-1] if part == ".." else [*place, part]
    return scheme.removesuffix(":"), place[0], "/".join(place[1:])


def identity_of(url: str) -> str:
    """A name of an object that is another in another store."""
    scheme, bucket, key = split_url(ListedUrl(url))
    return "/".join((store_name(scheme), bucket, key))


def store_name(scheme: str) -> str:
    """A name of the store that the environment has for a scheme, which can be that of a directory."""
    endpoints = [os.environ[name] for name in ENDPOINTS[scheme] if os.environ.get(name)]
    hosts = [re.sub(r"[^\w.-]", "_", (urlsplit(url).netloc or url).rpartition("@")[2]) for url in endpoints[:1]]
    return "@".join([scheme, *hosts])
