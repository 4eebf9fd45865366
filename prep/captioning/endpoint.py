"""Asks a server for captions: any that speaks OpenAI's chat completions, such as vLLM, Ollama, LM Studio or a cloud.

A request has one picture, as a JPEG in the address of its image part, and one prompt:
https://platform.openai.com/docs/api-reference/chat/create. What may pass is asked again, with pauses that double, or as
long as the server says (`Retry-After`), during which no other thread asks either: 408, 409, 425, 429, 5xx, a connection
that fails, half an answer, one without text. What will not pass ends the run: a wrong key, address or model, and a
request that is refused before any was answered. Redirects are never followed: the key is for the host that was named.
"""

from __future__ import annotations

import base64
import json
import os
import random
import re
import threading
import time
from collections.abc import Mapping, Sequence
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from prep.captioning.client import Client, NoAnswer, Reply, is_this_computer
from prep.captioning.engine import PROMPT, Answer, Form, Prepared, Stopped, Unanswered, spoken
from prep.errors import ModelError, UsageError
from prep.formatting import counted, printable

KEY = "OPENAI_API_KEY"
SHORTEST_KEY = 8  # characters; shorter ones, like "none", are for servers that ask for no key
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0  # seconds between two attempts, as long as the server does not say
LEAST_WAIT, MOST_WAIT = 0.1, 600.0  # seconds that a server may ask to wait, in all for one picture
MOST_IN_A_ROW = 3  # pictures without an answer, after which the server counts as down
PASSING = {408, 409, 425, 429}  # statuses of HTTP besides 5xx
SPENT = {"insufficient_quota", "billing_hard_limit_reached"}  # codes of 429 that no pause helps
FILTERED = {"content_filter", "content_policy_violation"}  # codes of 400: what the picture shows is refused
CHAT = "/chat/completions"
MOST_SAID = 300  # characters of what a server says of a failure


class _Passing(Exception):
    """An attempt that failed, and may be repeated: what happened, and the seconds that the server asks to wait."""

    def __init__(self, what: str, wait: float = 0.0) -> None:
        super().__init__(what)
        self.wait = wait


def chat_address(endpoint: str) -> str:
    """The address that requests go to: http://localhost:11434, …/v1 and …/v1/chat/completions are the same. Raises
    `UsageError`."""
    try:
        at = urlsplit(endpoint)
        named = at.username is not None
        usable = at.scheme in ("http", "https") and bool(at.hostname) and at.port != 0 and not (named or at.fragment)
    except ValueError:  # a port that is no number, or half a bracket
        usable, named = False, "@" in endpoint
    if not usable or " " in endpoint or not endpoint.isascii() or not endpoint.isprintable():
        bare, *more = re.split(r"(?<=[?#])", endpoint, maxsplit=1)  # behind which there may be a key
        shown = "an address with a name or key in it" if named else f"'{printable(bare)}{'…' * any(more)}'"
        raise UsageError(f"--endpoint is {shown}, expected an address like http://localhost:8000/v1",
                         hint=f"a key is read from {KEY} alone")
    path = at.path.rstrip("/")
    if not path.endswith(CHAT):
        path = f"{path or '/v1'}{CHAT}"
    return urlunsplit((at.scheme, at.netloc, path, at.query, ""))


def key_of_environment() -> str:
    """The key for the server; "" if there is none. Raises `UsageError`, without it."""
    key = os.environ.get(KEY, "").strip()
    if not key.isascii() or not key.isprintable() or " " in key:
        raise UsageError(f"{KEY} has characters that no key has, expected letters, digits and signs")
    return key


class Endpoint:
    """A model behind an address; an `Engine`."""

    form: Form = "jpeg"
    batch = 1
    prompt = PROMPT

    def __init__(self, url: str, *, model: str, key: str, concurrency: int, timeout: float, retries: int,
                 max_tokens: int, temperature: float | None, response_format: Mapping[str, Any] | None = None) -> None:
        """`timeout`: seconds that a request may take; `response_format`: what answers must be, which prompts say, too.
        """
        self.name, self.at_once = model, concurrency
        self.identity: Mapping[str, str | int | None] = {
            "engine": "endpoint", "model": model, "max_tokens": max_tokens,
            "temperature": None if temperature is None else f"{temperature:g}"}
        self._url, self._key, self._retries = url, key, retries
        self._client = Client(url, {"Authorization": f"Bearer {key}"} if key else {}, timeout)
        self._options: dict[str, Any] = {"model": model, "max_tokens": max_tokens,
                                         **({} if temperature is None else {"temperature": temperature}),
                                         **({"response_format": response_format} if response_format else {})}
        self._lock = threading.Lock()
        self._quiet_until = 0.0  # time.monotonic(), until which nobody asks
        self._answered, self._failed = False, 0  # whether any picture was, and those in a row that were not

    def describe(self) -> str:
        """Where pictures go, for people: the host, and how it is reached."""
        at = urlsplit(self._url)
        where = "this computer" if is_this_computer(at.hostname or "") else "another computer"
        open_to_all = ", without encryption" if at.scheme == "http" and where == "another computer" else ""
        return f"{at.scheme}://{at.netloc} ({where}{open_to_all}{f'; with the key of {KEY}' if self._key else ''})"

    def close(self) -> None:
        """Ends the requests under way."""
        self._client.close()

    def answer(self, pictures: Sequence[Prepared], prompts: Sequence[str]) -> Sequence[Answer | Unanswered]:
        """The answer to one prompt on one picture, as `Engine.answer`."""
        ((picture,), (prompt,)) = pictures, prompts
        failed, waited = 0, 0.0  # attempts, and seconds that the server asked to wait
        while True:
            self._pause()
            try:
                answer = self._asked(picture, prompt)
            except _Passing as passing:
                failed, waited = failed + (not passing.wait), waited + passing.wait
                if failed > self._retries or waited > MOST_WAIT:
                    return [self._given_up(str(passing), failed)]
                self._wait(passing.wait, FIRST_PAUSE * 2**min(failed, 10) / 2)
                continue
            with self._lock:
                self._answered, self._failed = self._answered or isinstance(answer, Answer), 0
            return [answer]

    def _given_up(self, what: str, failed: int) -> Unanswered:
        """Raises `ModelError` if the server seems to be down."""
        with self._lock:
            self._failed += 1
            down = not self._answered or self._failed >= MOST_IN_A_ROW
        if down:
            raise ModelError(f"{self._at} gives no answers: {what}; asked {counted(failed, 'time')}",
                             hint="check that the server runs and that its model reads pictures, then run the same "
                             "command again; --retries and --timeout set how long it is waited for")
        return Unanswered(detail=f"no answer: {what}")

    @property
    def _at(self) -> str:
        at = urlsplit(self._url)
        return f"{at.scheme}://{at.netloc}{at.path}"

    def _pause(self) -> None:
        """Waits while nobody may ask. Raises `Stopped`."""
        while (left := self._quiet_until - time.monotonic()) > 0:
            if self._client.closed.wait(left):
                raise Stopped

    def _wait(self, asked: float, own: float) -> None:
        """Makes all threads wait as long as the server asks, or waits about as long as its `own` pause. Raises
        `Stopped`."""
        if asked:
            with self._lock:
                self._quiet_until = max(self._quiet_until, time.monotonic() + asked)
        elif self._client.closed.wait(min(LONGEST_PAUSE, own) * random.uniform(0.5, 1)):
            raise Stopped

    def _asked(self, picture: Prepared, prompt: str) -> Answer | Unanswered:
        """One attempt. Raises `_Passing`, `ModelError`, `Stopped`."""
        options = self._options  # which another thread may replace meanwhile
        try:
            reply = self._client.post(_body(picture, prompt, options))
        except NoAnswer as error:
            raise _Passing(self._shown(str(error))) from None
        if 200 <= reply.status < 300:
            return _parsed(reply.body)
        said, code = self._complaint(reply)
        if reply.status == 400 and "max_completion_tokens" in said and "max_tokens" in options:
            self._options = {("max_completion_tokens" if name == "max_tokens" else name): value
                             for name, value in options.items()}  # which newer models of OpenAI ask for
            return self._asked(picture, prompt)
        if code in FILTERED:
            return Answer(text=said, refused=True)
        if (reply.status in PASSING or reply.status >= 500) and code not in SPENT:
            raise _Passing(f"status {reply.status}{said and f': {said}'}", _retry_after(reply.headers))
        if self._answered and reply.status in (400, 413, 415, 422):  # others were answered: it is this picture
            return Unanswered(detail=f"the server refuses it with status {reply.status}{said and f': {said}'}")
        raise self._refusal(reply, said)

    def _refusal(self, reply: Reply, said: str) -> ModelError:
        """The error for a status that every request will have."""
        if 300 <= reply.status < 400:
            return ModelError(f"{self._at} sends on to {self._host(reply)}, which is not followed",
                              hint="if that is right, name that address: --endpoint URL")
        hint = {401: f"set {KEY} to a key of this server" if not self._key else f"check the key in {KEY}",
                403: f"check what the key in {KEY} may do",
                404: f"check --endpoint, and --model '{self.name}': servers list their models at …/v1/models",
                429: "check the account's limits"}.get(reply.status, "check --endpoint and --model")
        return ModelError(f"{self._at} refuses with status {reply.status}{said and f': {said}'}", hint=hint)

    def _complaint(self, reply: Reply) -> tuple[str, str]:
        """(message, code) of an error's document: {"error": {"message": …, "code": …}}, or much like it."""
        try:
            document = json.loads(reply.body)
            error = document.get("error", document) if isinstance(document, dict) else document
            said = error.get("message", error.get("detail", "")) if isinstance(error, dict) else error
            code = error.get("code", "") if isinstance(error, dict) else ""
            return self._shown(str(said)), str(code)
        except (ValueError, RecursionError):
            return "", ""

    def _host(self, reply: Reply) -> str:
        """Where a redirect leads, for people."""
        try:
            return self._shown(urlsplit(reply.headers.get("location", "")).netloc.rpartition("@")[2]
                               ) or "another address"
        except ValueError:
            return "another address"

    def _shown(self, text: str) -> str:
        """The beginning of what a server said, on one line, without the key."""
        line = " ".join(text.split())
        secret = len(self._key) >= SHORTEST_KEY
        return printable((line.replace(self._key, "…") if secret else line)[:MOST_SAID])


def _body(picture: Prepared, prompt: str, options: Mapping[str, Any]) -> bytes:
    address = f"data:image/jpeg;base64,{base64.b64encode(picture.data).decode()}"
    content = [{"type": "text", "text": prompt}, {"type": "image_url", "image_url": {"url": address}}]
    return json.dumps({**options, "messages": [{"role": "user", "content": content}]}).encode()


def _parsed(body: bytes) -> Answer:
    """The text of a completion. Raises `_Passing` for what is none, or has no text."""
    try:
        choice = json.loads(body)["choices"][0]
        message, ending = choice["message"], choice.get("finish_reason")
        refusal, content = message.get("refusal"), message.get("content")
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
        raise _Passing("the answer is no chat completion") from None
    if isinstance(refusal, str) and refusal.strip():
        return Answer(text=spoken(refusal), refused=True)
    if isinstance(content, list):  # parts
        texts = [part.get("text") for part in content if isinstance(part, dict)]
        content = " ".join(text for text in texts if isinstance(text, str))
    text = spoken(content) if isinstance(content, str) else ""
    if ending == "content_filter":
        return Answer(text=text, refused=True)
    if not text:
        raise _Passing("the answer has no text" + (
            ": all its tokens went into thinking, raise --max-tokens" if ending == "length" else ""))
    return Answer(text=text, cut=ending == "length")


def _retry_after(headers: Mapping[str, str]) -> float:
    """The seconds that `Retry-After` asks to wait, given as a number or as a date; 0 without one, or for too few."""
    text = headers.get("retry-after", "").strip()
    try:
        seconds = float(text) if re.fullmatch(r"[0-9]+(\.[0-9]+)?", text) else (
            parsedate_to_datetime(text).timestamp() - time.time())
        return seconds if seconds >= LEAST_WAIT else 0.0
    except (ValueError, OverflowError):
        return 0.0
