"""`prep pack` and `prep unpack`: what comes out is what went in, or an error and nothing half made."""

from __future__ import annotations

import random
import shutil
import tarfile
from pathlib import Path

import pytest
from large_tables import LARGE, enlarge, peak_of
from small_manifest import moved, write_small

from prep.cache.store import Cache
from prep.errors import CacheError, ManifestError, PathError, Problem
from prep.export.packed import unpack as unpacking
from prep.export.packed.pack import pack
from prep.export.packed.tar_format import BLOCK, PackMember, header_of
from prep.export.packed.unpack import unpack
from prep.fs import atomic
from prep.maintenance.verify import verify
from prep.manifest.document import read_manifest
from prep.manifest.opened import open_manifest


@pytest.fixture
def home(tmp_path):
    root = tmp_path / "home"
    root.mkdir()
    write_small(root)
    return root


@pytest.fixture
def packed(home, tmp_path):
    pack(home / "manifest.json", tmp_path / "set.tar")
    return tmp_path / "set.tar"


def needed(root: Path) -> dict[str, bytes]:
    """The files of the dataset in `root`; those of locks and commits are none."""
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in sorted(root.rglob("*"))
            if path.is_file() and (path.name in ("manifest.json", "latentry.json")
                                   or {"shards", "tables"} & set(path.relative_to(root).parts))}


def is_sound(manifest: Path) -> bool:
    return bool(verify(open_manifest(read_manifest(manifest)))["ok"])


def test_what_is_unpacked_is_what_was_packed(prep, home, tmp_path):
    told = prep("pack", home / "manifest.json", "-o", tmp_path / "set.tar")
    assert told.code == 0 and (tmp_path / "set.tar").stat().st_size % BLOCK == 0, told.err
    told = prep("unpack", tmp_path / "set.tar", tmp_path / "there")
    assert told.code == 0 and told.out.endswith(") unpacked\n"), told.err
    assert needed(tmp_path / "there") == needed(home) and is_sound(tmp_path / "there" / "manifest.json")
    again = unpack(tmp_path / "set.tar", tmp_path / "there")
    assert again.unpacked == 0 < again.shards
    assert again.as_text().endswith(f": nothing unpacked, {again.shards} shards were here")
    pack(tmp_path / "there" / "manifest.json", tmp_path / "again.tar")
    assert (tmp_path / "again.tar").read_bytes() == (tmp_path / "set.tar").read_bytes()


def test_tar_makes_a_dataset_of_it_too(packed, tmp_path):
    with tarfile.open(packed) as tar:
        assert all(member.isreg() and (member.mtime, member.uid) == (0, 0) for member in tar.getmembers())
        tar.extractall(tmp_path / "there", **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    assert is_sound(tmp_path / "there" / "manifest.json")


def test_only_what_the_manifest_needs_is_packed(home, packed, tmp_path):
    """The cache has other shards, of other manifests."""
    cache = Cache(root=home / "cache")
    with tarfile.open(packed) as tar:
        names = [member.name for member in tar.getmembers()]
    shards = {name.split("/")[3] for name in names if name.startswith("cache/shards/")}
    assert shards == {row["digest"] for row in open_manifest(read_manifest(home / "manifest.json")).shards}
    assert shards <= set(cache.shards()) and names[:2] == ["manifest.json", "cache/latentry.json"]


def test_a_cache_beside_the_manifests_directory_lies_so_there(home, tmp_path):
    (home / "sets" / "a").mkdir(parents=True)
    moved(home / "manifest.json", home / "sets" / "a" / "m.json", "../../cache")
    pack(home / "sets" / "a" / "m.json", tmp_path / "set.tar")
    report = unpack(tmp_path / "set.tar", tmp_path / "there")
    assert report.manifest == tmp_path / "there" / "sets" / "a" / "m.json" and is_sound(report.manifest)
    assert (tmp_path / "there" / "cache" / "latentry.json").is_file()


def test_damage_here_is_not_packed(home, tmp_path):
    path = next((home / "cache" / "shards").glob("*/*/latent/c*"))
    path.chmod(0o644)
    data = bytearray(path.read_bytes())
    for spoiled in (bytes([data[0] ^ 1]) + data[1:], data[:-1], data + b"x", None):
        path.unlink() if spoiled is None else path.write_bytes(spoiled)
        with pytest.raises(CacheError, match=r"shard \w+ is damaged: its bytes do not match its digest") as told:
            pack(home / "manifest.json", tmp_path / "set.tar")
        assert "prep verify" in told.value.hint and sorted(tmp_path.iterdir()) == [home]
    path.write_bytes(data)
    tables = list((home / "cache" / "tables").rglob("*.arrow"))
    assert len(tables) == 3  # samples, shards, view
    for table in tables:
        whole = table.read_bytes()
        table.chmod(0o644)
        table.write_bytes(whole + b"x")
        with pytest.raises(CacheError, match=r"table \w+ is damaged: its bytes do not match its name"):
            pack(home / "manifest.json", tmp_path / "set.tar")
        table.write_bytes(whole)
    assert sorted(tmp_path.iterdir()) == [home]


def test_a_file_that_is_there_stays(home, packed):
    before = packed.read_bytes()
    with pytest.raises(PathError, match="is there already"):
        pack(home / "manifest.json", packed)
    assert packed.read_bytes() == before


@pytest.mark.parametrize("seed", [*range(10), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(10, 40))])
def test_a_flipped_bit_is_an_error_or_changes_nothing(home, packed, tmp_path, seed):
    """Padding, and what a header says of owners and dates, decide nothing."""
    draw = random.Random(seed)
    data = bytearray(packed.read_bytes())
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    (tmp_path / "bad.tar").write_bytes(data)
    try:
        unpack(tmp_path / "bad.tar", tmp_path / "there")
    except Problem:
        assert not list((tmp_path / "there").rglob("*.json.*")) and not (tmp_path / "there/manifest.json").exists()
        assert not list((tmp_path / "there").rglob("*.partial"))
        unpack(packed, tmp_path / "there")  # goes on
    assert needed(tmp_path / "there") == needed(home)


@pytest.mark.parametrize("share", [0.0, 0.01, 0.2, 0.5, 0.8, 0.97])
def test_a_tar_that_ends_early_is_an_error_and_the_whole_one_goes_on(home, packed, tmp_path, share):
    data = packed.read_bytes()
    (tmp_path / "short.tar").write_bytes(data[: int((len(data) - 2 * BLOCK) * share)])
    with pytest.raises((CacheError, ManifestError)):
        unpack(tmp_path / "short.tar", tmp_path / "there")
    assert not (tmp_path / "there" / "manifest.json").exists()
    unpack(packed, tmp_path / "there")
    assert needed(tmp_path / "there") == needed(home)


MARKER_SAID = "is not a tar that prep pack wrote: it has no marker of a cache of this version"


def members_of(path: Path) -> list[tuple[str, bytes]]:
    with tarfile.open(path) as tar:
        return [(member.name, tar.extractfile(member).read()) for member in tar.getmembers()]


def write_tar(path: Path, members: list[tuple[str, bytes]], kind: bytes = tarfile.REGTYPE) -> Path:
    with path.open("wb") as file:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size, info.type = len(data), kind
            file.write(info.tobuf(tarfile.USTAR_FORMAT) + data + bytes(-len(data) % BLOCK))
        file.write(bytes(2 * BLOCK))
    return path


def test_names_of_the_tar_decide_nothing(packed, tmp_path):
    members, bad = members_of(packed), tmp_path / "bad.tar"
    for name in ("../manifest.json", "/etc/manifest.json", "manifest.txt", "a//m.json", "..\\m.json"):
        with pytest.raises(CacheError, match="is not a tar that prep pack wrote: it begins with"):
            unpack(write_tar(bad, [(name, members[0][1]), *members[1:]]), tmp_path / "there")
    for place, name in ((1, "cache/other.json"), (2, "cache/tables/../x"), (-1, "../../escaped"), (-1, "cache/x")):
        changed = list(members)
        changed[place] = (name, changed[place][1])
        with pytest.raises(CacheError, match=f"is damaged|was expected|{MARKER_SAID}"):
            unpack(write_tar(bad, changed), tmp_path / "there")
    for kind in (tarfile.SYMTYPE, tarfile.DIRTYPE, tarfile.XHDTYPE):
        with pytest.raises(CacheError, match=r"has a member 'manifest.json' that is not a file"):
            unpack(write_tar(bad, members, kind), tmp_path / "there")
    with pytest.raises(CacheError, match="ends early, or is not a tar that prep pack wrote"):
        unpack(write_tar(bad, []), tmp_path / "there")
    with pytest.raises(CacheError, match=r"has 'manifest.json' of \d+ bytes, expected at most"):
        unpack(write_tar(bad, [("manifest.json", bytes(3 << 20))]), tmp_path / "there")
    assert not (tmp_path / "there" / "manifest.json").exists() and not list(tmp_path.rglob("*escaped*"))


def test_a_member_of_another_size_or_at_another_place_is_refused(packed, tmp_path):
    members = members_of(packed)
    swapped = [*members[:-2], members[-1], members[-2]]
    longer = [*members[:-1], (members[-1][0], members[-1][1] + b"x")]
    for changed in (swapped, longer):
        with pytest.raises(CacheError, match=r"bytes, where '.*' of \d+ bytes was expected"):
            unpack(write_tar(tmp_path / "bad.tar", changed), tmp_path / "there")
    last = [*members[:-1], (members[-1][0], members[-1][1][:-1] + b"\0")]
    if last != members:
        with pytest.raises(CacheError, match=r"is damaged: the bytes of shard .* do not match its digest"):
            unpack(write_tar(tmp_path / "bad.tar", last), tmp_path / "there")
    within = tmp_path / "within.tar"
    within.write_bytes(packed.read_bytes()[: BLOCK + 40])
    with pytest.raises(CacheError, match=r"ends within 'manifest\.json'"):
        unpack(within, tmp_path / "there")


def test_an_interrupted_unpack_goes_on(home, packed, tmp_path, monkeypatch):
    published, plain = [], unpacking.publish_dir

    def publish(cache, staged, digest):
        if published:
            raise KeyboardInterrupt
        published.append(digest)
        return plain(cache, staged, digest)

    monkeypatch.setattr(unpacking, "publish_dir", publish)
    with pytest.raises(KeyboardInterrupt):
        unpack(packed, tmp_path / "there")
    monkeypatch.undo()
    assert not (tmp_path / "there" / "manifest.json").exists()
    report = unpack(packed, tmp_path / "there")
    assert report.unpacked == report.shards - 1 and needed(tmp_path / "there") == needed(home)


def test_a_full_disk_leaves_no_tar(home, tmp_path, monkeypatch):
    plain, written = atomic.write, []

    def write(handle, data):
        written.append(len(data))
        if len(written) > 20:
            raise OSError(28, "No space left on device", str(tmp_path))
        plain(handle, data)

    monkeypatch.setattr(atomic, "write", write)
    with pytest.raises(OSError, match="No space left"):
        pack(home / "manifest.json", tmp_path / "set.tar")
    assert sorted(tmp_path.iterdir()) == [home]


def test_places_that_cannot_be_packed(home, prep, packed, tmp_path):
    told = prep("pack", "s3://bucket/m.json", "-o", tmp_path / "x.tar")
    assert told.code == 5 and "manifest s3://bucket/m.json is in an object store, expected a path" in told.err
    assert prep("pack", home / "manifest.json", "-o", "s3://bucket/x.tar").code == 5
    shutil.copytree(home / "cache", tmp_path / "other" / "cache")
    moved(home / "manifest.json", home / "absolute.json", "s3://bucket/cache")
    with pytest.raises(PathError, match="cache s3://bucket/cache is in an object store"):
        pack(home / "absolute.json", tmp_path / "x.tar")
    moved(home / "manifest.json", home / "outside.json", "../../cache")
    members = members_of(packed)
    for name, says in (("outside", "the manifest names the cache .* which would lie outside"),
                       ("absolute", "cache s3://bucket/cache is in an object store")):
        bad = write_tar(tmp_path / "bad.tar", [("m.json", (home / f"{name}.json").read_bytes()), *members[1:]])
        with pytest.raises(PathError, match=says):
            unpack(bad, tmp_path / "there")
    with pytest.raises(PathError, match="cannot be a name in a tar"):
        header_of(PackMember(name="x" * 300, size=1))


def test_a_table_goes_in_pieces(home, tmp_path):
    """Of a hundred million samples, it would not fit into memory."""
    enlarge(home)
    assert peak_of(lambda: pack(home / "manifest.json", tmp_path / "set.tar")) < LARGE / 2
    assert peak_of(lambda: unpack(tmp_path / "set.tar", tmp_path / "there")) < LARGE / 2
    assert needed(tmp_path / "there") == needed(home)
    again = unpack(tmp_path / "set.tar", tmp_path / "there")
    assert again.unpacked == 0 and needed(tmp_path / "there") == needed(home)
