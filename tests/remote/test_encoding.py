"""prep encode into a store: the manifest is that of a run on a disk, whoever dies and whatever the store does."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import threading
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import FORKS, Launcher, Stage, words_of
from pictures import draw, draw_mask
from remote_rows import rows_of
from s3_server import BUCKET
from simulate import requests_of
from small_manifest import write_small
from small_rows import LATENT, draw_rows, put_shard

from prep.cache.commits import parse_commit, read_commit
from prep.cache.ledger.ledger import commit_document, load_ledger
from prep.cache.plans import write_plan
from prep.cache.records import Reject, Task
from prep.cache.remote import stored
from prep.cache.remote.opening import open_to_encode
from prep.cache.remote.stored import refresh
from prep.cache.shard_header import read_keys
from prep.cache.store import Cache
from prep.digest import canonical, digest_bytes, with_checksum
from prep.fs.remote import retry
from prep.fs.remote.bucket import Bucket
from prep.fs.remote.copies import DIRECTORY
from prep.fs.remote.objects import list_objects
from prep.fs.remote.retry import NEVER
from prep.fs.tree import listing_digest
from prep.parse import Unparsed

pytestmark = FORKS
SIZES = [(96, 96), (100, 96), (144, 64), (140, 66), (64, 144)]


@pytest.fixture(scope="module")
def setting(tmp_path_factory, tiny_model):
    """Pictures and a model, a launcher, and what a run on a disk makes of them; tasks have one row each."""
    root = tmp_path_factory.mktemp("setting")
    for number, size in enumerate(SIZES):
        draw(root / "photos" / f"{number}.png", size, seed=number).with_suffix(".txt").write_text(f"a {number % 3}")
        if number in (0, 2):
            draw_mask(root / "photos" / f"{number}-masklabel.png", size)
    first = Stage(launch=None, pictures=root / "photos", model=tiny_model, home=root / "first")
    first.home.mkdir()
    launcher = Launcher(first.encode(), first.verify())
    stage = Stage(launch=launcher, pictures=root / "photos", model=tiny_model, home=root / "whole", rows=1)
    stage.home.mkdir()
    assert stage.run(stage.encode())["codes"] == [0]
    yield stage
    launcher.close()


@dataclass(frozen=True)
class Scene:
    """Machines that share nothing but a store."""

    store: Any
    stage: Stage
    home: Path

    @property
    def url(self):
        return f"{self.store.url}/m.json"

    @property
    def cache(self):
        return f"{self.store.url}/cache"

    def words(self, *options, command="encode"):
        words = self.stage.encode(*options) if command == "encode" else self.stage.seal(None, *options)
        place, output = words.index("--cache"), words.index("-o")
        words[place + 1], words[output + 1] = self.cache, self.url
        return words

    def one(self, *argv, machine=0, **plan):
        """A run on a machine of its own: where it is called lies to the pictures as the home of the local run does."""
        limit = plan.pop("kill_after", None)
        variables = {name: os.environ[name] for name in os.environ if name.startswith(("AWS_", "LATENTRY_REMOTE"))}
        variables |= {"LATENTRY_REMOTE_DIR": str(self.home / f"machine{machine}"),
                      "LATENTRY_USER_CACHE": str(self.home / f"user{machine}"), **plan.pop("variables", {})}
        run = {**self.stage.one(*argv, **plan), "environment": variables, "directory": str(self.stage.home)}
        return run if limit is None else {**run, "kill_after": limit}

    def run(self, *argv, **plan):
        return self.stage.launch(self.one(*(argv or (self.words(),)), **plan))[0]

    def report(self, *argv, **plan):
        ending = self.run(*argv, **plan)
        assert ending["codes"] == [0], words_of(ending)
        return json.JSONDecoder().raw_decode(ending["out"])[0]

    def objects(self):
        """All objects, seen without the proxy."""
        self.store.proxy.forget()
        return {name: self.store.server.get(f"{self.store.prefix}/{name}") for name in list_objects(self.store.url)}

    def check(self):
        """Whether the store has what the run on a disk made: names and bytes but for commits, and no plan."""
        home = self.stage.home
        wanted = {path.relative_to(home).as_posix(): path.read_bytes() for path in home.rglob("*") if path.is_file()
                  and not path.name.startswith(("lock", "facts")) and "tmp" not in path.relative_to(home).parts}
        there = self.objects()
        assert there.keys() == wanted.keys()
        assert [name for name in there if there[name] != wanted[name] and "/commits/" not in name] == []
        self.sound(there)

    def sound(self, there):
        """Whether each commit in the store is whole, and its shard; and what a manifest names."""
        for name, data in there.items():
            if "/commits/" in name:
                commit = parse_commit(data, Path(name).stem, name)
                prefix = f"cache/shards/{commit.shard.digest[:2]}/{commit.shard.digest}/"
                files = [{"path": one.removeprefix(prefix), "size": len(bytes_), "sha256": digest_bytes(bytes_)}
                         for one, bytes_ in there.items() if one.startswith(prefix)]
                assert listing_digest(files) == commit.shard.digest
        if "m.json" in there:
            for digest in json.loads(there["m.json"])["tables"].values():
                assert digest_bytes(there[f"cache/tables/{digest[:2]}/{digest}.arrow"]) == digest


@pytest.fixture
def scene(store, setting, tmp_path):
    return Scene(store=store, stage=setting, home=tmp_path)


def test_what_is_encoded_into_a_store_is_what_is_encoded_on_a_disk(scene, prep):
    report = scene.report()
    assert report["encoded"] == {"latent": 5, "mask": 2, "text": 4} and report["manifest"] == scene.url
    assert list(report["samples"]) == ["train", "validation", "prior"]
    sent = [path for method, path, _ in scene.store.proxy.asked if method == "PUT"]
    assert len(sent) == len(set(sent)) and sent[-1].endswith("/m.json"), "once each, the manifest last"
    scene.check()
    assert rows_of(Bucket.parse(scene.url)) == rows_of(scene.stage.manifest)
    assert prep("verify", scene.url).code == 0


@pytest.mark.slow
def test_what_is_there_is_not_encoded_again_on_any_machine(scene):
    scene.report()
    for machine in (0, 1):
        scene.store.proxy.forget()
        report = scene.report(machine=machine)
        assert sum(report["encoded"].values()) == 0 and report["reused"] == {"latent": 5, "mask": 2, "text": 4}
        asked = [(method, path) for method, path, _ in scene.store.proxy.asked]
        assert [path for method, path in asked if method == "PUT"] == [f"/{BUCKET}/{scene.store.prefix}/m.json"]
        rows = [path for _, path in asked if "/latent/c.0" in path or "/hidden/c.0" in path]
        assert rows == [], "of latents and text, keys alone were read"
    scene.check()


@pytest.mark.slow
def test_copies_of_rows_are_kept_within_the_limit(scene):
    scene.report()
    (cache,) = (scene.home / "machine0" / "whole").glob("*/*/*/cache")
    assert len(list(cache.glob("shards/*/*/latent/c.0*"))) == 5 and not list(cache.glob("unsent/*/*/*"))
    scene.report(machine=1, variables={"LATENTRY_REMOTE_LIMIT": "9K"})
    left = list((scene.home / "machine1" / "whole").rglob("c.0*"))
    assert sum(path.stat().st_size for path in left) < 9 << 10


@pytest.mark.parametrize(("options", "machines"), [
    ((), (0, 1, 2)), *(pytest.param(options, machines, marks=pytest.mark.slow) for options, machines in (
        (("--part", "0/1"), (0, 1, 2)), ((), (0, 0, 0)), (("--part", "0/1"), (0, 0, 1))))])
def test_machines_and_processes_at_once(scene, options, machines):
    endings = scene.stage.launch(*(scene.one(scene.words(*options), machine=machine, anywhere=True)
                                   for machine in machines))
    assert [ending["codes"] for ending in endings] == [[0]] * 3, words_of(endings)
    if options:
        scene.report(scene.words(command="seal"), machine=3)
    scene.check()


@pytest.mark.slow
def test_parts_of_machines_that_share_no_disk(scene):
    ending = scene.run(scene.words(command="seal"))
    assert ending["codes"] == [7] and f"there is no cache in {scene.cache}: it has no latentry.json" in ending["out"]
    parts = [scene.one(scene.words("--part", f"{number}/3"), machine=number, anywhere=True) for number in range(3)]
    endings = scene.stage.launch(*parts[:2])
    assert [ending["codes"] for ending in endings] == [[0]] * 2, words_of(endings)
    ending = scene.run(scene.words("--parts", "3", command="seal"), machine=4)
    error = json.loads(ending["out"])["error"]
    assert ending["codes"] == [7] and f"rows are missing in {scene.cache}: " in error["message"]
    assert "; parts with work left: 2/3" in error["message"]
    assert f"--cache {scene.cache} -o {scene.url} --part 2/3" in error["hint"]
    assert scene.stage.launch(parts[2])[0]["codes"] == [0]
    assert sum(scene.report(scene.words(command="seal"), machine=4)["encoded"].values()) == 0
    scene.check()


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["500", "drop", "lose", "truncate", "flip", "flip sent"])
def test_each_request_goes_wrong_once(scene, fault):
    wrong = ("PUT",) if fault in ("lose", "flip sent") else ("PUT", "GET", "HEAD", "POST", "DELETE")
    # Lists of objects have no checksum; TLS has. What is read without one is compared with what is known of it.
    scene.store.proxy.rule = lambda method, path, before: fault if before == 0 and method in wrong and not (
        fault.startswith("flip") and ("list-type" in path or path.endswith("latentry.json"))) else ""
    assert sum(scene.report()["encoded"].values()) == 11
    there = scene.objects()
    scene.sound({name: data for name, data in there.items() if fault != "flip sent" or "/commits/" not in name})
    assert scene.report(machine=1)["samples"] == {"train": 5, "validation": 0, "prior": 0}
    scene.check()


def killing(scene, number, after):
    """Kills every run of the launcher at this request, before or after the server has done what was asked."""
    seen = iter(range(10**6))
    done = threading.Event()

    def rule(method, path, before):
        if next(seen) < number or done.is_set():
            return ""
        done.set()
        launcher = scene.stage.launch._process.pid
        for child in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
            with suppress(ProcessLookupError):
                os.kill(int(child), signal.SIGKILL)
        return "" if after else "drop"

    return rule


@pytest.mark.parametrize(("number", "after"), [
    (60, True), *(pytest.param(number, number % 8 == 0, marks=pytest.mark.slow) for number in range(0, 230, 4))])
def test_killed_at_any_request(scene, number, after):
    scene.store.proxy.rule = killing(scene, number, after)
    killed = scene.run()
    assert killed["signal"] == signal.SIGKILL or number > 150
    scene.sound(scene.objects())
    scene.report(machine=number % 2)
    scene.check()


@pytest.mark.slow
@pytest.mark.parametrize("share", [number / 40 for number in range(40)])
def test_killed_at_any_change_of_the_disk(scene, share, tmp_path):
    """On the same machine, a shard that was not uploaded yet need not be encoded again."""
    record = tmp_path / "calls"
    assert scene.run(machine="counted", record=str(record))["codes"] == [0]
    points = len(record.read_text().splitlines())
    for name in scene.objects():
        scene.store.server.delete(f"{scene.store.prefix}/{name}")
    assert scene.run(kill=int(points * share))["signal"] == signal.SIGKILL
    scene.sound(scene.objects())
    scene.report()
    scene.check()


@pytest.mark.slow
def test_credentials_that_expire_are_told_in_one_line_and_work_is_kept(scene):
    scene.store.proxy.rule = lambda method, path, before: (
        "403" if scene.store.proxy.count("PUT", "/commits/") >= 3 else "")
    ending = scene.run()
    error = json.loads(ending["out"])["error"]
    assert ending["codes"] == [7] and error["message"].endswith(": the store answered 403 Forbidden (ExpiredToken)")
    assert "check the credentials in the environment (AWS_ACCESS_KEY_ID" in error["hint"]
    assert "a-secret" not in ending["out"] + ending["err"]
    scene.store.proxy.forget()
    assert 0 < sum(scene.report(machine=1)["reused"].values()) < 11
    scene.check()


@pytest.mark.slow
def test_a_store_that_stays_away(scene):
    scene.store.proxy.rule = lambda method, path, before: (
        "503" if method == "PUT" and "/shards/" in path else "")
    ending = scene.run(variables={retry.PATIENCE: "0.5"})
    error = json.loads(ending["out"])["error"]
    assert ending["codes"] == [7] and ": the store answered 503 Service Unavailable" in error["message"]
    assert scene.run(machine=1, kill_after=9)["signal"] == signal.SIGKILL, "it waits"
    scene.store.proxy.forget()
    scene.report()
    scene.check()


@pytest.mark.slow
def test_ctrl_c_while_the_store_hangs(scene):
    scene.store.proxy.rule = lambda method, path, before: "503" if method == "PUT" and "/shards/" in path else ""
    stopper = threading.Thread(target=interrupting, args=(scene,), daemon=True)
    stopper.start()
    ending = scene.run(variables={retry.PATIENCE: "100"})
    assert ending["codes"] == [130]
    scene.store.proxy.forget()
    scene.report()
    scene.check()


@pytest.mark.slow
def test_rejects_of_another_machine_are_retried_by_the_first_run(prep, here, store, tmp_path, monkeypatch, setting):
    """Whether this machine has never seen the cache, or has seen it before the rejection."""
    cache, url = f"{store.url}/cache", f"{store.url}/m.json"
    monkeypatch.setenv(DIRECTORY, str(tmp_path / "b"))
    assert prep(*here(cache, url)).code == 0
    monkeypatch.setenv(DIRECTORY, str(tmp_path / "a"))
    machine = open_to_encode(Bucket.parse(cache), create=False)
    refresh(machine)
    task = next(task for task in machine.names("commits") if read_commit(machine, task).field == "latent")
    keys = [bytes(key).hex() for key in read_keys(machine, read_commit(machine, task).shard.digest)]
    rejects = [Reject(key=key, code="not-finite", detail="it was so once") for key in keys]
    for other in ("b", "c"):
        monkeypatch.setenv(DIRECTORY, str(tmp_path / other))
        machine.replace(machine.commit(task), commit_document(task, "latent", None, rejects, {}))
        told = prep(*here(cache, url, "--retry-rejects"))
        assert told.code == 0 and told.json["encoded"] == {"latent": len(keys), "mask": 0, "text": 0}
        assert "not-finite" not in told.out and prep("verify", url).code == 0


@pytest.mark.slow
def test_a_signal_while_the_store_hangs(scene):
    """The task under way has some seconds, then its upload is given up."""
    scene.store.proxy.rule = lambda method, path, before: "503" if method == "PUT" and "/shards/" in path else ""
    threading.Thread(target=interrupting, args=(scene, signal.SIGTERM), daemon=True).start()
    ending = scene.run(scene.words("--grace", "1"), variables={retry.PATIENCE: "100"})
    assert ending["codes"] == [75] and "stopped by SIGTERM: 0 of 11 tasks finished" in ending["out"]
    scene.store.proxy.forget()
    scene.report()
    scene.check()


def interrupting(scene, number=signal.SIGINT):
    while scene.store.proxy.count("PUT", "/shards/") < 3:
        threading.Event().wait(0.05)
    launcher = scene.stage.launch._process.pid
    for child in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
        os.kill(int(child), number)


@pytest.mark.slow
def test_what_is_not_in_the_store_does_not_count(scene):
    """A shard without one of its objects, a commit that is gone, and one that is damaged."""
    scene.report()
    there = [name for name in scene.objects() if "/latent/c.0" in name]
    scene.store.server.delete(f"{scene.store.prefix}/{there[0]}")
    assert scene.report()["encoded"]["latent"] == 1
    scene.check()
    commits = [name for name in scene.objects() if "/commits/" in name]
    scene.store.server.delete(f"{scene.store.prefix}/{commits[0]}")
    scene.store.server.put(f"{scene.store.prefix}/{commits[1]}", b"{}")
    assert sum(scene.report()["encoded"].values()) == 2
    scene.check()


@pytest.mark.slow
def test_damage_in_the_store_is_mended_by_recheck(scene, prep):
    scene.report()
    (name, *_), data = [name for name in scene.objects() if "/latent/c.0" in name], scene.objects()
    scene.store.server.put(f"{scene.store.prefix}/{name}", b"\1" + data[name][1:])
    told = prep("verify", scene.url)
    assert told.code == 7 and "if it was encoded into the store, run that prep encode again with --recheck" in told.out
    assert scene.report()["encoded"]["latent"] == 0
    assert scene.report(scene.words("--recheck"))["encoded"]["latent"] == 1
    scene.check()


@pytest.fixture
def here(store, setting, tmp_path, monkeypatch):
    """The words of a command in this process, and its places."""
    monkeypatch.chdir(tmp_path)
    words = setting.encode()
    place, output = words.index("--cache"), words.index("-o")

    def encode(cache, manifest, *options):
        return [*words[:place + 1], cache, *words[place + 2:output + 1], manifest, *words[output + 2:], *options]

    return encode


def test_places_that_are_refused(prep, here, store):
    told = prep(*here("s3://bucket", "s3://bucket/m.json"))
    assert told.code == 5 and "manifest 's3://bucket/m.json' lies inside cache 's3://bucket'" in told.out
    told = prep(*here("s3://bucket", "m.json"))
    assert told.code == 5 and "s3://bucket is a whole bucket, expected a place in it for the cache" in told.out
    told = prep(*here("cache", f"{store.url}/m.json"))
    assert told.code == 5 and f"the manifest {store.url}/m.json would lie in another place than its cache, " in told.out
    assert "upload the result: prep push MANIFEST URL" in told.out
    assert prep(*here("s3://other/cache", f"{store.url}/m.json")).code == 5
    store.server.put(f"{store.prefix}/used/photo.png", b"mine")
    told = prep(*here(f"{store.url}/used", f"{store.url}/m.json"))
    assert told.code == 5 and f"{store.url}/used is not empty and not a cache: it has no latentry.json" in told.out
    assert "name a prefix without objects with --cache" in told.out
    store.server.put(f"{store.prefix}/outer/latentry.json", b"{}")
    for place in ("outer/inner", "outer/a/b/inner"):
        told = prep(*here(f"{store.url}/{place}", f"{store.url}/m.json"))
        refused = f"{store.url}/{place} would be a cache in another cache, {store.url}/outer"
        assert told.code == 5 and refused in told.out
    store.server.put(f"{store.prefix}/m.json", b"mine")
    told = prep(*here(f"{store.url}/cache", f"{store.url}/m.json"))
    assert told.code == 5 and "m.json exists and is no manifest, so it is not replaced" in told.out
    assert not store.proxy.count("PUT") and not Path("s3:").exists()


def test_a_dry_run_writes_nothing_there(prep, here, store):
    told = prep(*here(f"{store.url}/cache", f"{store.url}/m.json", "--dry-run"))
    assert told.code == 0 and told.json["encoded"] == {"latent": 5, "mask": 2, "text": 4}
    assert not store.proxy.count("PUT") and not list_objects(store.url)


def test_what_is_encoded_there_is_the_same_as_what_is_encoded_here(prep, here, store, setting):
    """The model's path is that of the computer that encoded, and leads nowhere from the store."""
    told = prep(*here(f"{store.url}/cache", f"{store.url}/m.json"))
    assert told.code == 0, told.out
    told = prep("diff", setting.manifest, f"{store.url}/m.json", "--json")
    assert told.code == 0 and told.json["same"] and told.json["model"] == [], told.out


@pytest.mark.slow
def test_a_manifest_here_of_a_cache_there(prep, train, here, store, setting, tiny_model):
    told = prep(*here(f"{store.url}/cache", "m.json"))
    assert told.code == 0, told.out
    document = json.loads(Path("m.json").read_text())
    assert document["cache"] == f"{store.url}/cache"
    for words in (("inspect", "m.json"), ("verify", "m.json"), ("diff", "m.json", setting.manifest)):
        assert prep(*words).code == 0
    losses = []
    for manifest, run in (("m.json", "there"), (setting.manifest, "here")):
        told = train("run", manifest, "--model", tiny_model, "--steps", 2, "--batch-size", 2, "--device", "cpu",
                     "--precision", "fp32", "-o", run)
        assert told.code == 0, told.err
        events = [json.loads(line) for line in Path(run, "log.jsonl").read_text().splitlines()]
        losses.append([event["loss"] for event in events if event["event"] == "step"])
    assert losses[0] == losses[1] and len(losses[0]) == 2
    told = prep("push", "m.json", f"{store.url}/elsewhere")
    assert told.code == 5 and told.err.startswith(f"error: cache {store.url}")
    (name, *_) = [name for name in list_objects(store.url) if "/latent/c.0" in name]
    store.server.delete(f"{store.prefix}/{name}")
    told = prep("verify", "m.json")
    assert told.code == 7 and f"--cache {store.url}/cache -o m.json" in told.out and "--recheck" in told.out
    del document["self"]
    for wrong in ("s3://bucket", "s3://bucket/a/../b", "s3://key@bucket/cache"):
        for name, value in (("cache", wrong), ("sources", [wrong + "/."])):
            Path("m.json").write_bytes(canonical(with_checksum({**document, name: value})))
            told = prep("inspect", "m.json")
            assert told.code == 4 and f"{name} is '{wrong}" in told.err
            assert any(says in told.err for says in ("expected a URL like s3://bucket/cache", "was given with a user",
                                                     "expected a URL like s3://bucket/prefix"))


@pytest.mark.slow
def test_prompts_of_a_manifest_there(prep, here, store, setting):
    Path("p.txt").write_text("a red heart\n")
    cache, url = f"{store.url}/cache", f"{store.url}/m.json"
    assert prep(*here(cache, url)).code == 0
    told = prep("prompts", "p.txt", "--manifest", url)
    assert told.code == 6 and f"{url} names the model " in told.err
    assert prep("prompts", "p.txt", "--manifest", url, "--model", setting.model).code == 0
    assert prep(*here(cache, f"{store.url}/other.json", "--prompts", "p.txt")).code == 0
    assert store.server.get(f"{store.prefix}/m.json") == store.server.get(f"{store.prefix}/other.json")
    assert prep("verify", url).code == 0


def test_seal_tells_of_plans_of_other_rows_that_other_machines_made(prep, here, store, setting, tmp_path, monkeypatch):
    words = setting.seal(None)
    words[words.index("--cache") + 1], words[words.index("-o") + 1] = f"{store.url}/cache", f"{store.url}/m.json"
    machine = open_to_encode(Bucket.parse(f"{store.url}/cache"), create=True)
    told = prep(*words)
    assert told.code == 7 and "rows are missing in" in told.out and "of other rows" not in told.out
    for name in ("ab", "cd"):
        write_plan(machine, name * 32, [Task(key="12" * 32, field="text", rows=("34" * 32,))])
    monkeypatch.setenv(DIRECTORY, str(tmp_path / "another"))
    told = prep(*words)
    assert told.code == 7 and "; 2 plans of other rows: parts with other options or of another version" in told.out


@pytest.mark.slow
def test_prompts_of_what_was_downloaded_and_uploaded_to_a_new_place(prep, here, store, setting):
    """And, where a program uploaded shards without commits, the manifest is not replaced by one that is refused."""
    Path("p.txt").write_text("a red heart\n")
    assert prep("push", setting.manifest, store.url).code == 0
    assert prep("pull", f"{store.url}/{setting.manifest.name}", "new").code == 0
    assert prep("push", f"new/{setting.manifest.name}", f"{store.url}/new").code == 0
    url = f"{store.url}/new/{setting.manifest.name}"
    prompts = ("prompts", "p.txt", "--manifest", url, "--model", setting.model)
    commits = {name: store.server.get(f"{store.prefix}/new/cache/commits/{name}")
               for name in list_objects(f"{store.url}/new/cache/commits")}
    for name in commits:
        store.server.delete(f"{store.prefix}/new/cache/commits/{name}")
    before = store.server.get(f"{store.prefix}/new/{setting.manifest.name}")
    told = prep(*prompts)
    assert told.code == 7 and re.search(rf"{url} is not replaced, because {store.url}/new/cache has no commits for "
                                        r"\d+ shards that it names\n", told.err), told.err
    assert "hint: run prep push MANIFEST URL again where the cache was uploaded from" in told.err
    assert store.server.get(f"{store.prefix}/new/{setting.manifest.name}") == before
    assert prep("push", f"new/{setting.manifest.name}", f"{store.url}/new").code == 0
    told = prep(*prompts)
    assert told.code == 0, told.err
    assert store.server.get(f"{store.prefix}/new/{setting.manifest.name}") != before
    assert prep("verify", url).code == 0


@pytest.mark.slow
def test_a_limit_without_room_for_one_mask_is_told(scene):
    scene.report()
    ending = scene.run(machine=1, variables={"LATENTRY_REMOTE_LIMIT": "1"})
    assert ending["codes"] == [7] and "there is no room for " in ending["out"]
    assert "LATENTRY_REMOTE_LIMIT=200GB" in ending["out"]


@pytest.mark.slow
def test_what_was_pushed_can_be_encoded_into(prep, here, store):
    assert prep(*here("cache", "m.json")).code == 0
    assert prep("push", "m.json", store.url).code == 0
    told = prep(*here(f"{store.url}/cache", f"{store.url}/m.json"))
    assert told.code == 0 and sum(told.json["encoded"].values()) == 0
    assert store.server.get(f"{store.prefix}/m.json") == Path("m.json").read_bytes()


def test_a_shard_with_other_files_is_not_taken(prep, store, tmp_path):
    write_small(tmp_path)
    assert prep("push", tmp_path / "manifest.json", store.url).code == 0
    cache = open_to_encode(Bucket.parse(f"{store.url}/cache"), create=False)
    tasks = list(Cache(root=tmp_path / "cache").names("commits"))
    refresh(cache)
    assert list(cache.names("commits")) == tasks, "they were pushed"
    commit = read_commit(cache, tasks[0])
    files = {name: one.size for name, one in list_objects(
        f"{cache.store}/shards/{commit.shard.digest[:2]}/{commit.shard.digest}").items()}
    assert stored._described(cache, commit, files, NEVER).files == files
    with pytest.raises(Unparsed, match=r"shard \w+ has other files than its documents say"):
        stored._described(cache, commit, {**files, "more": 1}, NEVER)
    (array,) = [name for name in files if name.endswith("/zarr.json") and not name.startswith("key/")]
    store.server.put(f"{store.prefix}/cache/shards/{commit.shard.digest[:2]}/{commit.shard.digest}/{array}", b"{}")
    shutil.rmtree(cache.root)
    cache = open_to_encode(Bucket.parse(f"{store.url}/cache"), create=False)
    refresh(cache)
    assert list(cache.names("commits")) == [task for task in tasks if task != tasks[0]]


def test_headers_of_shards_that_gc_removed_go_but_not_what_is_not_uploaded_yet(prep, store, home):
    assert prep("push", home / "manifest.json", store.url).code == 0
    cache = open_to_encode(Bucket.parse(f"{store.url}/cache"), create=False)
    refresh(cache)
    there = list(cache.shards("headers"))
    mine = put_shard(cache, "latent", [LATENT], draw_rows([LATENT], 3))
    zeros = put_shard(cache, "latent", [LATENT], {"ab" * 32: {"latent": np.zeros(LATENT.shape, np.uint16)}})
    refresh(cache)
    assert len(there) == 4 and set(cache.unsent.shards()) == {mine.digest, zeros.digest}
    gone, stays = there[:2], there[2:]
    for name in list_objects(f"{store.url}/cache/shards"):
        if name.split("/")[1] in gone and (name.count("/") > 2 or name.split("/")[1] == gone[0]):
            store.server.delete(f"{store.prefix}/cache/shards/{name}")
    refresh(cache)
    assert set(cache.shards("headers")) == set(there) - {gone[0]}, "of the other, a part is there"
    group = f"{store.prefix}/cache/shards/{gone[1][:2]}/{gone[1]}/zarr.json"
    store.server.delete(group)
    refresh(cache)
    assert set(cache.shards("headers")) == set(stays) and not list(cache.shards())
    assert set(cache.unsent.shards()) == {mine.digest, zeros.digest}
    assert {shard.digest for shard in load_ledger(cache).shards} == set(stays)


@pytest.mark.slow
def test_requests_of_a_shard_are_those_that_are_simulated(prep, store, photos, tiny_model):
    done = prep("encode", photos, "--model", tiny_model, "--cache", f"{store.url}/cache", "-o", f"{store.url}/m.json",
                "--resolution", 96, "--step", 16, "--device", "cpu")
    assert done.code == 0, done.err
    asked = Counter()
    for method, path, _ in store.proxy.asked:
        if (found := re.search(r"shards(?:/|%2F)[0-9a-f]{2}(?:/|%2F)([0-9a-f]{64})", path)) and method != "DELETE":
            asked[found[1]] += 1
    commits = [path for method, path, _ in store.proxy.asked if method == "PUT" and "/commits/" in path]
    assert len(commits) == len(asked) > 2
    assert set(asked.values()) == {requests_of(1, 1000)[0] - 1}
