"""An endpoint: what is asked again, what ends the run, and what never leaves this computer."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from email.utils import formatdate

import pytest
from chat_server import ChatServer, Reply, completion, failure

from prep.captioning.endpoint import Endpoint, chat_address, key_of_environment
from prep.captioning.engine import Answer, Prepared, Stopped, Unanswered
from prep.errors import ModelError, UsageError

PICTURE = Prepared(data=b"\xff\xd8 a picture", width=4, height=4)
SECRET = "sk-not-for-others"


def engine_of(server, **differs):
    return Endpoint(chat_address(server.url), **{"model": "tiny", "key": "", "concurrency": 2, "timeout": 20,
                                                 "retries": 3, "max_tokens": 50, "temperature": None, **differs})


def ask(rule, **differs):
    with ChatServer(rule) as server:
        (answer,) = engine_of(server, **differs).answer([PICTURE], ["what is it?"])
        return answer, server.asked


def refusal(rule, **differs):
    with ChatServer(rule) as server, pytest.raises(ModelError) as error:
        engine_of(server, **differs).answer([PICTURE], ["what is it?"])
    return error.value, server.asked


@pytest.mark.parametrize(("given", "address"), [
    ("http://localhost:11434", "http://localhost:11434/v1/chat/completions"),
    ("http://localhost:8000/v1/", "http://localhost:8000/v1/chat/completions"),
    ("https://host/a/v1/chat/completions", "https://host/a/v1/chat/completions"),
    ("https://host/openai/v1?api-version=1", "https://host/openai/v1/chat/completions?api-version=1")])
def test_addresses(given, address):
    assert chat_address(given) == address


@pytest.mark.parametrize("given", ["localhost:8000", "ftp://host/v1", "http://", "http://host:x", "http://host\n/v1",
                                   "http://[::1", "http://a b/v1", f"http://me:{SECRET}@host/v1",
                                   f"https://host/v1?key={SECRET}#x", f"http://me:{SECRET}@[host"])
def test_what_is_no_address(given):
    with pytest.raises(UsageError, match="expected an address like http://localhost:8000/v1") as error:
        chat_address(given)
    assert SECRET not in error.value.message and "OPENAI_API_KEY" in error.value.hint


def test_what_is_asked(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", f" {SECRET}\n")
    answer, (request,) = ask(lambda *_: "a  cat\n\non a mat ", key=key_of_environment(), temperature=0.0)
    assert answer == Answer(text="a cat on a mat")
    assert request.path == "/v1/chat/completions" and request.headers["Authorization"] == f"Bearer {SECRET}"
    assert (request.prompt, request.picture) == ("what is it?", PICTURE.data)
    assert {name: value for name, value in request.document.items() if name != "messages"} == {
        "model": "tiny", "max_tokens": 50, "temperature": 0.0}
    assert "Authorization" not in ask(lambda *_: "a cat")[1][0].headers


def test_a_key_that_is_none(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", f"{SECRET} and more")
    with pytest.raises(UsageError, match="has characters that no key has, expected letters, digits and signs") as error:
        key_of_environment()
    assert SECRET not in str(error.value)


@pytest.mark.parametrize("bad", [
    Reply(status=500, body=failure("out of memory")), Reply(status=503, body=b"<html>"), Reply(status=429),
    Reply(status=408), Reply(body="a cat", half=True), Reply(body=b"{\"choices\": [{"), Reply(body=b"[]"),
    Reply(body=completion("")), Reply(body=completion(None)), Reply(body=completion("<think>hm</think> ")),
    Reply(body={"choices": []}), Reply(status=429, headers={"Retry-After": "0"})])
def test_what_may_pass_is_asked_again(bad):
    answer, asked = ask(lambda request, before: bad if before < 2 else "a cat")
    assert answer == Answer(text="a cat") and len(asked) == 3


@pytest.mark.parametrize("half", [False, True])
def test_a_server_that_hangs_is_asked_again(half):
    answer, asked = ask(lambda request, before: Reply(hangs=True, half=half) if not before else "a cat", timeout=0.3)
    assert answer == Answer(text="a cat") and len(asked) == 2


@pytest.mark.parametrize("after", ["0.4", "date"])
def test_as_long_as_the_server_says_nobody_asks(after):
    """More often than failures are repeated: that is no failure."""
    times = []

    def rule(request, before):
        times.append(time.monotonic())
        wait = formatdate(time.time() + 1.4, usegmt=True) if after == "date" else after
        return Reply(status=429, headers={"Retry-After": wait}) if before == 0 else "a cat"

    with ChatServer(rule) as server:
        engine, others = engine_of(server, retries=0), []
        first = threading.Thread(target=lambda: others.append(engine.answer([PICTURE], ["one"])))
        first.start()
        while not engine._quiet_until:
            time.sleep(0.005)
        engine.answer([PICTURE], ["two"])
        first.join()
    assert len(times) == 3 and times[1] - times[0] > 0.3 and others == [[Answer(text="a cat")]]


def test_a_wait_that_is_too_long_is_given_up():
    error, asked = refusal(lambda *_: Reply(status=429, body=failure("slow down"), headers={"Retry-After": "7200"}))
    assert "gives no answers: status 429: slow down" in error.message and len(asked) == 1


def test_a_server_that_is_down_ends_the_run():
    error, asked = refusal(lambda *_: Reply(status=500, body=failure("no GPU")), retries=2)
    assert error.message.endswith("gives no answers: status 500: no GPU; asked 3 times") and len(asked) == 3
    with ChatServer() as server:
        engine = engine_of(server, retries=1)
    with pytest.raises(ModelError, match="gives no answers: Connection refused; asked 2 times"):
        engine.answer([PICTURE], ["what?"])


def test_one_picture_without_an_answer_ends_nothing_but_three_in_a_row_do():
    with ChatServer(lambda request, before: "a cat" if request.prompt == "good" else Reply(status=500)) as server:
        engine = engine_of(server, retries=0)
        assert engine.answer([PICTURE], ["good"]) == [Answer(text="a cat")]
        for _ in range(2):
            assert engine.answer([PICTURE], ["bad"]) == [Unanswered(detail="no answer: status 500")]
        with pytest.raises(ModelError, match="gives no answers"):
            engine.answer([PICTURE], ["bad"])


@pytest.mark.parametrize(("status", "said", "hint"), [
    (401, f"Incorrect API key provided: {SECRET}", "check the key in OPENAI_API_KEY"),
    (403, "not yours", "check what the key in OPENAI_API_KEY may do"),
    (404, "the model `tiny` does not exist", "check --endpoint, and --model 'tiny'"),
    (400, "tiny reads no pictures", "check --endpoint and --model")])
def test_what_will_not_pass_ends_the_run(status, said, hint):
    error, asked = refusal(lambda *_: Reply(status=status, body=failure(said)), key=SECRET)
    assert f"refuses with status {status}: {said.replace(SECRET, '…')}" in error.message and len(asked) == 1
    assert hint in error.hint and SECRET not in error.message + error.hint


def test_without_a_key_the_hint_is_to_set_one():
    assert refusal(lambda *_: Reply(status=401))[0].hint == "set OPENAI_API_KEY to a key of this server"
    spent, asked = refusal(lambda *_: Reply(status=429, body=failure("pay first", "insufficient_quota")))
    assert "status 429: pay first" in spent.message and len(asked) == 1


def test_a_redirect_is_not_followed():
    with ChatServer() as other:
        error, asked = refusal(lambda *_: Reply(status=307, headers={"Location": f"{other.url}/chat/completions"}),
                               key=SECRET)
        assert "which is not followed" in error.message and other.url.split("/")[2] in error.message
        assert len(asked) == 1 and not other.asked


@pytest.mark.parametrize(("location", "shown"), [("http://[", "another address"), ("/v2", "another address"),
                                                 (f"http://{SECRET}@far/v1", "far"), (f"http://{SECRET}/v1", "…")])
def test_a_redirect_to_anywhere_is_one_error_without_the_key(location, shown):
    error, _ = refusal(lambda *_: Reply(status=302, headers={"Location": location}), key=SECRET)
    assert f"sends on to {shown}, which is not followed" in error.message and SECRET not in error.message


@pytest.mark.parametrize("said", [f"{'x ' * 145}{SECRET}", f"{'x' * 290} {SECRET} and more"])
def test_no_part_of_the_key_is_shown_where_a_message_is_cut(said):
    error, _ = refusal(lambda *_: Reply(status=401, body=failure(said)), key=SECRET)
    assert SECRET[:3] not in error.message and len(error.message) < 400


def test_a_picture_that_is_refused_after_others_were_answered():
    with ChatServer(lambda request, before: "a cat" if not before else Reply(status=400, body=failure("too small"))
                    ) as server:
        engine = engine_of(server)
        engine.answer([PICTURE], ["one"])
        assert engine.answer([PICTURE], ["two"]) == [
            Unanswered(detail="the server refuses it with status 400: too small")]


@pytest.mark.parametrize("reply", [
    Reply(body=completion(None, refusal="I cannot do that")),
    Reply(status=400, body=failure("I cannot do that", "content_policy_violation")),
    Reply(body=completion("I cannot do that", "content_filter"))])
def test_refusals_of_servers(reply):
    assert ask(lambda *_: reply)[0] == Answer(text="I cannot do that", refused=True)


def test_answers_of_other_forms():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "cat"}]
    assert ask(lambda *_: Reply(body=completion(parts)))[0] == Answer(text="a cat")
    assert ask(lambda *_: "<think>it\nmeows</think>\na cat")[0] == Answer(text="a cat")
    assert ask(lambda *_: "it\nmeows</think>a cat <think>done")[0] == Answer(text="a cat")
    odd = [{"type": "text", "text": None}, {"type": "text", "text": {"a": 1}}, 3, {"type": "text", "text": "a cat"}]
    assert ask(lambda *_: Reply(body=completion(odd)))[0] == Answer(text="a cat")
    assert ask(lambda *_: Reply(body=completion("a cat on", "length")))[0] == Answer(text="a cat on", cut=True)
    error, _ = refusal(lambda *_: Reply(body=completion("<think>so", "length")), retries=0)
    assert "all its tokens went into thinking, raise --max-tokens" in error.message
    error, _ = refusal(lambda *_: Reply(body=b" " * (5 << 20)), retries=0)
    assert "an answer of more than 4 MiB" in error.message


def test_newer_models_that_count_tokens_by_another_name():
    said = "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead."
    with ChatServer(lambda request, before: Reply(status=400, body=failure(said)) if "max_tokens" in request.document
                    else "a cat") as server:
        engine = engine_of(server)
        for _ in range(2):
            assert engine.answer([PICTURE], ["what?"]) == [Answer(text="a cat")]
        assert len(server.asked) == 3 and server.asked[2].document["max_completion_tokens"] == 50


def test_all_threads_may_learn_the_other_name_at_once():
    said, both = "Use 'max_completion_tokens' instead.", threading.Barrier(2, timeout=10)

    def rule(request, before):
        if "max_tokens" not in request.document:
            return "a cat"
        both.wait()  # each is asked before the other is answered
        return Reply(status=400, body=failure(said))

    with ChatServer(rule) as server, ThreadPoolExecutor(2) as pool:
        engine = engine_of(server)
        answers = [pool.submit(engine.answer, [PICTURE], ["what?"]) for _ in range(2)]
        assert [each.result() for each in answers] == [[Answer(text="a cat")]] * 2


def test_waits_that_are_next_to_none_are_failures():
    error, asked = refusal(lambda *_: Reply(status=429, headers={"Retry-After": "0.0001"}), retries=2)
    assert "asked 3 times" in error.message and len(asked) == 3


@pytest.mark.parametrize("half", [False, True])
def test_closing_it_ends_what_is_under_way(half):
    with ChatServer(lambda *_: Reply(hangs=True, half=half)) as server:
        engine = engine_of(server)
        threading.Timer(0.2, lambda: server.hung.wait(5) and engine.close()).start()
        with pytest.raises(Stopped):
            engine.answer([PICTURE], ["what?"])
        with pytest.raises(Stopped):
            engine.answer([PICTURE], ["what?"])


def test_proxies_are_those_of_the_environment_but_not_for_this_computer(monkeypatch):
    with ChatServer(lambda *_: "by the proxy") as proxy:
        monkeypatch.setenv("HTTP_PROXY", proxy.url.removesuffix("/v1"))
        monkeypatch.setenv("http_proxy", proxy.url.removesuffix("/v1"))
        far = Endpoint(chat_address("http://models.invalid:81"), model="m", key="", concurrency=1, timeout=5, retries=0,
                       max_tokens=9, temperature=None)
        assert far.answer([PICTURE], ["what?"]) == [Answer(text="by the proxy")]
        assert proxy.asked[0].path == "http://models.invalid:81/v1/chat/completions"
        assert ask(lambda *_: "itself")[0] == Answer(text="itself")


def test_a_proxy_that_is_no_address(monkeypatch):
    for name in ("HTTP_PROXY", "http_proxy"):
        monkeypatch.setenv(name, "http://proxy:port")
    far = Endpoint(chat_address("http://models.invalid"), model="m", key="", concurrency=1, timeout=5, retries=0,
                   max_tokens=9, temperature=None)
    with pytest.raises(ModelError, match="gives no answers: HTTP_PROXY is no address"):
        far.answer([PICTURE], ["what?"])


def test_where_pictures_go_is_said():
    def said(url, key=""):
        return Endpoint(chat_address(url), model="m", key=key, concurrency=1, timeout=5, retries=0, max_tokens=9,
                        temperature=None).describe()

    assert said("http://localhost:8000") == "http://localhost:8000 (this computer)"
    assert said("http://[::1]:8000") == "http://[::1]:8000 (this computer)"
    assert said("http://box:8000") == "http://box:8000 (another computer, without encryption)"
    assert said("https://api.example.com/v1", "k") == (
        "https://api.example.com (another computer; with the key of OPENAI_API_KEY)")
