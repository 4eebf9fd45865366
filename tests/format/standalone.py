"""Every value of a manifest by tensorstore and pyarrow, written from the format page (its sections in brackets)."""

import json
from functools import cache, partial
from hashlib import sha256

import pyarrow as pa
import tensorstore

spell = partial(json.dumps, sort_keys=True, separators=(",", ":"))  # [2] canonical JSON


class Dataset:
    def __init__(self, path):  # [4]
        self.manifest = self.sealed(path, "latentry/manifest")
        self.cache = path.parent / self.manifest["cache"]
        self.sealed(self.cache / "latentry.json", "latentry/cache")
        self.shards, self.samples, self.findings = map(self.table, ("shards", "samples", "findings"))

    def check(self, data, digest, what):
        if sha256(data).hexdigest() != digest:
            raise ValueError(f"{what} is damaged")

    def sealed(self, path, kind):  # [2] a document in canonical JSON that holds its own digest
        document = json.loads(path.read_bytes())
        if spell(document).encode() != path.read_bytes() or [document["format"], document["version"]] != [kind, 1]:
            raise ValueError(f"{path} is no {kind} of version 1, spelled canonically")
        self.check(spell({key: document[key] for key in document if key != "self"}).encode(), document["self"], path)
        return document

    def table(self, name):  # [7] an Arrow IPC file, named by the digest of its bytes
        digest = self.manifest["tables"][name]
        data = (self.cache / "tables" / digest[:2] / f"{digest}.arrow").read_bytes()
        self.check(data, digest, f"table {name}")
        return pa.ipc.open_file(data).read_all().to_pylist()

    @cache  # noqa: B019
    def arrays(self, number):  # [6] a Zarr v3 group, named by the digest of the list of its files
        digest = (shard := self.shards[number])["digest"].hex()
        root = self.cache / "shards" / digest[:2] / digest
        listing = [{"path": path.relative_to(root).as_posix(), "sha256": sha256(path.read_bytes()).hexdigest(),
                    "size": path.stat().st_size} for path in sorted(root.rglob("*"), key=str) if path.is_file()]
        self.check(spell(listing).encode(), digest, f"shard {digest}")
        stores = {name: {"driver": "file", "path": f"{root}/{name}/"} for name in json.loads(shard["shapes"])}
        return {name: tensorstore.open({"driver": "zarr3", "kvstore": stores[name]}).result() for name in stores}

    def row(self, shard, row):  # {array: value}, or None for -1
        return None if shard < 0 else {name: array[row].read().result() for name, array in self.arrays(shard).items()}

    def __iter__(self):  # samples, with arrays in their views and texts
        for sample in self.samples:
            views = [view | {field: self.row(view[f"{field}_shard"], view[f"{field}_row"])
                             for field in ("latent", "mask")} for view in sample["views"]]
            texts = [text | self.row(text["shard"], text["row"]) for text in sample["texts"]]
            yield sample | {"views": views, "texts": texts}

    def prompts(self):  # (prompt, its arrays, those of its negative); None: the row of no prompt at all
        yield None, self.row(**self.manifest["prompts"]["unconditional"]), None
        for one in self.manifest["prompts"]["samples"]:
            yield one["prompt"], self.row(**one["positive"]), self.row(**one["negative_row"])
