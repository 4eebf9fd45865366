"""Asks an engine about pictures, on as many threads as it takes, and remembers each answer at once.

An answer is named by the digest of the picture, the prompt, and all of the engine that decides it. So a run that was
killed loses what was under way, and another run with the same words asks nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from queue import SimpleQueue
from threading import Lock, Thread

from prep.captioning.engine import Answer, Engine, Prepared, Stopped, Unanswered
from prep.captioning.picture import PREPARE, SERVICE, PictureQuestion
from prep.captioning.plan import Asked
from prep.digest import digest_bytes
from prep.findings import CODES, Finding, finding
from prep.fs.blob import error_code, read_blob
from prep.fs.memo import Memo, memo_path
from prep.fs.remote.errors import Stopped as StoreStopped
from prep.parse import Unparsed, expect
from prep.workers.pool import WorkerLost, WorkerPool
from prep.workers.service import DECODING

Read = Callable[[Answer | Unanswered], Answer | Unanswered]
KIND = "answer"  # of records in the memory


def open_answers() -> Memo:
    """The memory of what models said."""
    return Memo(memo_path("captions", "1"))


def remembered(answers: Memo, asked: Asked) -> list[Answer | None]:
    """The remembered answers to each prompt on a picture."""
    return [_recalled(answers, key) for key in asked.keys]


@dataclass(frozen=True, kw_only=True, slots=True)
class Said:
    """What was said about a picture."""

    asked: Asked
    answers: tuple[Answer | Unanswered, ...] | Finding  # one for each prompt; or why it cannot be asked about
    new: int  # answers that were not remembered


class _Waiting:
    """Pictures that wait, in groups of the same bytes and prompts. Threads share it."""

    def __init__(self, groups: Iterable[Sequence[Asked]]) -> None:
        self._groups, self._lock = iter(groups), Lock()

    def take(self, count: int) -> list[Sequence[Asked]]:
        """The next groups, at most `count`."""
        with self._lock:
            return list(islice(self._groups, count))


class Asker:
    """Asks about pictures; `side` and `alpha` as in `PictureQuestion`; `read`: what to make of each answer."""

    def __init__(self, engine: Engine, answers: Memo, *, side: int, alpha: str, jobs: int, read: Read) -> None:
        self._engine, self._answers, self._side, self._alpha, self._read = engine, answers, side, alpha, read
        self._pool = WorkerPool(SERVICE, most=jobs)

    def ask(self, todo: Sequence[Asked]) -> Generator[Said, None, None]:
        """Yields what was said about each picture, in any order; pictures of the same bytes are asked about once.
        Closing it, or an error, ends what is under way. Raises `Problem`."""
        groups: dict[tuple[str, ...], list[Asked]] = {}
        for asked in todo:
            groups.setdefault(asked.keys, []).append(asked)
        waiting, done = _Waiting(groups.values()), SimpleQueue[Said | BaseException | None]()
        threads = [Thread(target=self._work, args=(waiting, done), name="captions", daemon=True)
                   for _ in range(min(self._engine.at_once, -(-len(groups) // self._engine.batch)))]
        try:
            for thread in threads:
                thread.start()
            running = len(threads)
            while running:
                said = done.get()
                if isinstance(said, BaseException):
                    raise said
                running -= said is None
                if said is not None:
                    yield said
        finally:
            self._end(threads)

    def _work(self, waiting: _Waiting, done: SimpleQueue[Said | BaseException | None]) -> None:
        """Asks about one batch after the other; at the end comes an error, or `None`."""
        try:
            while batch := waiting.take(self._engine.batch):
                for group, said in zip(batch, self._answered([group[0] for group in batch]), strict=True):
                    for place, asked in enumerate(group):
                        done.put(replace(said, asked=asked, new=said.new if place == 0 else 0))
        except (Stopped, StoreStopped):
            done.put(None)
        except BaseException as error:
            done.put(error)
        else:
            done.put(None)

    def _end(self, threads: Sequence[Thread]) -> None:
        """Ends what is under way, which a model on this computer does after its next token."""
        self._engine.close()
        self._pool.close()
        for thread in threads:
            if thread.ident is not None:  # else it was never started
                thread.join()
        self._answers.save()

    def _answered(self, batch: Sequence[Asked]) -> list[Said]:
        """What is said about a batch of pictures. Raises `Problem`, `Stopped`."""
        known = [remembered(self._answers, asked) for asked in batch]
        pictures = [None if all(answers) else self._prepared(asked)
                    for asked, answers in zip(batch, known, strict=True)]
        replies: list[list[Answer | Unanswered | None]] = [[*answers] for answers in known]
        for number in range(len(batch[0].prompts)):
            wanted = [(place, picture) for place, picture in enumerate(pictures)
                      if isinstance(picture, Prepared) and replies[place][number] is None]
            if not wanted:
                continue
            new = self._engine.answer([picture for _, picture in wanted],
                                      [batch[place].prompts[number] for place, _ in wanted])
            for (place, _), answer in zip(wanted, map(self._read, new), strict=True):
                replies[place][number] = answer
                if isinstance(answer, Answer):
                    self._answers.put_digest(KIND, batch[place].keys[number], _spelled(answer))
            self._answers.save()
        return [Said(asked=asked, answers=picture if isinstance(picture, Finding) else
                     tuple(answer for answer in answers if answer is not None), new=before.count(None))
                for asked, picture, answers, before in zip(batch, pictures, replies, known, strict=True)]

    def _prepared(self, asked: Asked) -> Prepared | Finding:
        item = asked.known.item
        try:
            data = read_blob(item.picture, stop=self._pool.closed)
            if digest_bytes(data) != asked.known.picture:
                return finding(item.label, "changed-meanwhile", "changed after its bytes were digested")
            (made,) = self._pool.ask(PREPARE, PictureQuestion(data, self._side, self._alpha, self._engine.form),
                                     DECODING)
            if made.picture is not None:
                return made.picture
            code, detail = made.code if made.code in CODES else "decoder-crashed", made.detail
        except WorkerLost as lost:
            if self._pool.closed.is_set():
                raise Stopped from None
            code, detail = lost.finding(DECODING)
        except OSError as error:
            code, detail = error_code(error), f"cannot be read: {error.strerror or error}"
        except MemoryError:
            code, detail = "too-large", "takes more memory than there is"
        return finding(item.label, code, detail, as_error=True)


def _spelled(answer: Answer) -> bytes:
    return json.dumps([answer.text, answer.cut, answer.refused]).encode()


def _recalled(answers: Memo, key: str) -> Answer | None:
    value = answers.recall(KIND.encode() + b":" + bytes.fromhex(key)) if key else None
    try:
        text, cut, refused = json.loads(value or b"null") or (None,) * 3
        return None if text is None else Answer(text=expect(text, str, "text"), cut=bool(cut), refused=bool(refused))
    except (ValueError, Unparsed):
        return None
