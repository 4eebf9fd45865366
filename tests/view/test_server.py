"""`prep view` as it is typed, and what it refuses: other hosts, sites and methods, paths, endless addresses."""

from __future__ import annotations

import io
import json
import re
import socket
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pytest
from jsonschema import Draft202012Validator
from PIL import Image
from small_manifest import NASTY, SQUARE, write_small
from viewing import viewing, viewing_here

from prep.images.decode import decode_picture, scale_and_crop
from prep.view.guard import HEADERS, LONGEST
from prep.view.serve import AT_ONCE

SCHEMA = Path(__file__).parents[2] / "manifests" / "schemas" / "view.schema.json"


def png(size, seed):
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), np.uint8)
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG")
    return stream.getvalue()


PICTURES = {"a.png": png((128, 144), 1), "sub/b.png": png((128, 144), 2)}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    root = tmp_path_factory.mktemp("viewed")
    path = write_small(root, pictures=PICTURES)
    (root / "secret.txt").write_text("nobody may read this")
    with viewing_here(path) as running:
        yield running


def numbers(server):
    """The samples' numbers by name."""
    found = re.findall(r'<p class="name"><a href="[^"]*/sample/(\d+)"><bdi>(.*?)</bdi>', server.get().text)
    return {name.replace("<wbr>", ""): int(number) for number, name in found}


# ---- pages -----------------------------------------------------------------------------------------------------------


def test_the_list(server):
    answer = server.get()
    assert answer.status == 200 and answer.headers["content-type"] == "text/html; charset=utf-8"
    assert set(numbers(server)) == {"a.png", "sub/b.png", "c.png"}
    assert "&lt;script&gt;alert(&#39;caption&#39;)&lt;/script&gt; &amp; \\x1b[31mred" in answer.text
    assert "<script>alert" not in answer.text and "\x1b" not in answer.text


@pytest.mark.parametrize(("query", "names"), [
    ("q=SHARED", {"sub/b.png", "c.png"}), ("q=sub%2F", {"sub/b.png"}), (f"q={quote(NASTY)}", {"a.png"}),
    ("split=validation", {"c.png"}), ("bucket=96x64", {"c.png"}), ("mask=yes", {"a.png"}),
    ("mask=no&q=shared&split=train", {"sub/b.png"}), ("from=50&to=50", {"a.png"}), ("from=50.1", set()),
    ("finding=truncated", set()), ("source=0&sort=weight&order=down", {"a.png", "sub/b.png", "c.png"}),
    ("q=&split=&page=99", {"a.png", "sub/b.png", "c.png"}),
])
def test_searches_and_filters(server, query, names):
    text = server.get(f"/?{query}").text
    found = {one.replace("<wbr>", "") for one in re.findall(r'<p class="name"><a [^>]*><bdi>(.*?)</bdi>', text)}
    assert found == names


def test_a_sample(server):
    number = numbers(server)["a.png"]
    text = server.get(f"/sample/{number}").text
    assert "shown 100.0% of the time" in text and "scaled to 64x72, cropped to 64x64 at 0, 4; 11.1%" in text
    assert text.count("mean 6.43e-40, std 0, 6.43e-40 to 6.43e-40") == 4  # the bfloat16 of the bits 7
    assert len(re.findall(r"key <code>", text)) == 3
    validation = numbers(server)["c.png"]
    assert "was not found, has changed" in server.get(f"/sample/{validation}").text


def test_neighbors_are_those_of_the_search(server):
    number = numbers(server)
    first, last = (server.get(f"/sample/{number[name]}?q=shared").text for name in ("c.png", "sub/b.png"))
    assert f'rel="next" href="{server.base}/sample/{number["sub/b.png"]}?q=shared"' in first
    assert 'rel="prev"' not in first
    assert f'rel="prev" href="{server.base}/sample/{number["c.png"]}?q=shared"' in last and 'rel="next"' not in last
    outside = server.get(f"/sample/{number['a.png']}?q=shared").text
    assert 'rel="prev"' not in outside and 'rel="up"' in outside


def test_pictures_are_what_training_sees(server):
    number = numbers(server)["a.png"]
    view = server.get(f"/view/{number}/0")
    assert view.headers["content-type"] == "image/png"
    picture = decode_picture(PICTURES["a.png"], alpha="white")
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(view.body))), scale_and_crop(picture, SQUARE))
    mask = Image.open(io.BytesIO(server.get(f"/mask/{number}/0").body))
    assert np.array_equal(np.asarray(mask), np.arange(64, dtype=np.uint8).reshape(8, 8) * 4)
    assert Image.open(io.BytesIO(server.get(f"/shade/{number}/0").body)).info["transparency"]
    assert Image.open(io.BytesIO(server.get(f"/latent/{number}/0/3").body)).size == (8, 8)
    for path in ("thumbnail", "picture"):
        answer = server.get(f"/{path}/{number}")
        assert answer.headers["content-type"] == "image/jpeg" and Image.open(io.BytesIO(answer.body)).size == (128, 144)


def test_a_missing_original_has_a_placeholder(server):
    answer = server.get(f"/thumbnail/{numbers(server)['c.png']}")
    assert answer.status == 200 and answer.headers["content-type"] == "image/svg+xml"


def test_findings(server):
    for path in ("/findings", "/findings?code=truncated", "/findings?page=9"):
        text = server.get(path).text
        assert "ends &lt;early&gt;" in text and "bad.png" in text
    assert "ends &lt;early&gt;" not in server.get("/findings?code=blank").text


@pytest.mark.parametrize("path", [
    "/sample/3", "/sample/-1", "/sample/1e0", "/sample/", "/sample", "/view/0/1", "/latent/0/0/4", "/latent/0/0/x",
    "/mask/0/9", "/static/view.py", "/static/..", "/static/../app.py", "/static/%2e%2e%2fapp.py",
    "/static/..%2f..%2fcli%2fview.py", "/static/templates/list.html", "/thumbnail/../../secret.txt",
    "/picture/%2e%2e/secret.txt", "/picture/..%5csecret.txt", "/photos/a.png", "/../secret.txt", "/%00", "/nowhere",
    "//etc/passwd", "/picture//etc/passwd", "/favicon.ico", "/sample/0/", "/sample/999999999999999999999999",
    "/sample/%D9%A1",
])
def test_what_is_nowhere(server, path):
    answer = server.get(path)
    assert answer.status == 404 and b"nobody may" not in answer.body and b"import" not in answer.body


@pytest.mark.parametrize(("path", "told"), [
    ("/?nobody=1", "a name in the address is &#39;nobody&#39;, expected one of: q, tag, made, split"),
    ("/?split=test", "split is &#39;test&#39;, expected one of: train, validation, prior"),
    ("/?page=-1", "page is &#39;-1&#39;, expected a whole number from 0 to"),
    ("/?page=%3Cscript%3E", "page is &#39;&lt;script&gt;&#39;"),
    ("/findings?code=%3Cscript%3E", "code is &#39;&lt;script&gt;&#39;, expected one of: "),
    (f"/?q={'x' * 501}", "q has 501 characters, expected at most 500"),
])
def test_an_address_that_says_nothing_known(server, path, told):
    answer = server.get(path)
    assert answer.status == 400 and told in answer.text and "<script>" not in answer.text


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "evil.example:80", "", "127.0.0.1:x",
                                  "localhost.", "0.0.0.0", "[::1]", "127.0.0.1@evil.example", "2130706433"])
def test_other_names_of_this_computer(server, host):
    answer = server.get(host=host)
    assert answer.status in (400, 403) and b"a.png" not in answer.body


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "LOCALHOST:1234", "127.0.0.1:9"])
def test_a_tunnel_may_use_another_port(server, host):
    assert server.get(host=host).status == 200


@pytest.mark.parametrize("headers", [
    {"origin": "http://evil.example"}, {"origin": "null"}, {"origin": "https://127.0.0.1:{port}"},
    {"origin": "http://127.0.0.1:1"}, {"origin": "http://localhost:{port}"},
    {"sec_fetch_site": "cross-site", "sec_fetch_mode": "no-cors", "sec_fetch_dest": "image"},
    {"sec_fetch_site": "same-site", "sec_fetch_mode": "cors", "sec_fetch_dest": "empty"},
    {"sec_fetch_site": "cross-site", "sec_fetch_mode": "navigate", "sec_fetch_dest": "iframe"},
    {"sec_fetch_site": "cross-site"},
])
def test_other_sites(server, headers):
    filled = {name: value.format(port=server.port) for name, value in headers.items()}
    assert server.get(**filled).status == 403


@pytest.mark.parametrize("headers", [
    {"origin": "http://127.0.0.1:{port}"}, {"sec_fetch_site": "same-origin"}, {"sec_fetch_site": "none"},
    {"sec_fetch_site": "cross-site", "sec_fetch_mode": "navigate", "sec_fetch_dest": "document"},
])
def test_our_own_pages_and_a_link_that_was_followed(server, headers):
    assert server.get(**{name: value.format(port=server.port) for name, value in headers.items()}).status == 200


def test_without_the_token_there_is_nothing(server):
    token = server.base[1:]
    for path in ("/", "/x/", f"/{token[:-1]}/", f"/{token}x/", f"/{token.lower()}/", f"/{token}", "/static/page.css",
                 f"//{token}/", "/%2e/", "/%C3%A4/", "/%ff/", "/open/x", "/open/"):
        answer = server.ask("GET", path)
        assert answer.status == 404 and answer.headers["content-type"].startswith("text/plain"), path
        assert token not in answer.text
    assert len(token) == 43


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "PROPFIND"])
def test_other_methods(server, method):
    answer = server.ask(method, server.base + "/", body=b"q=1")
    assert answer.status == 405 and answer.headers["allow"] == "GET, HEAD"
    assert server.ask(method, "/", body=b"").status == 404


def test_head_has_no_body(server):
    answer = server.ask("HEAD", server.base + "/")
    assert answer.status == 200 and answer.body == b"" and int(answer.headers["content-length"]) > 1000
    assert server.ask("HEAD", "/").body == b""


def silent(server, count):
    return [socket.create_connection(("127.0.0.1", server.port)) for _ in range(count)]


def is_closed(one):
    one.settimeout(10)
    with suppress(ConnectionError):
        while one.recv(1 << 16):
            pass
    return True


def test_silent_connections_do_not_shut_the_owner_out(server):
    """Also those that never end their first request, and those without the token, which get one answer."""
    held = silent(server, AT_ONCE + 10)
    try:
        for one in held[-20:]:
            one.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX-More: ")
        assert server.get().status == 200
        assert all(map(is_closed, held[:50]))
        for one in held[-10:]:
            one.sendall(b"1\r\n\r\n")
            assert b"HTTP/1.1 404" in one.recv(1 << 16)
            assert is_closed(one)
        assert server.get().status == 200
    finally:
        for one in held:
            one.close()


def test_a_silent_connection_is_closed(server, monkeypatch):
    monkeypatch.setattr("prep.view.serve.SILENT", 0.01)
    (one,) = silent(server, 1)
    with one:
        assert is_closed(one)
    assert server.get().status == 200


def test_endless_addresses(server):
    assert server.get(f"/?q={'x' * LONGEST}").status == 414
    assert server.get(f"/{'x' * LONGEST}").status == 414
    for endless in ({"path": f"/?q={'x' * (1 << 20)}"}, {"cookie": "x" * (1 << 20)}):
        with suppress(ConnectionError):  # it hangs up before all has been sent, and its answer may be lost
            assert server.get(**endless).status in (400, 414, 431)
    assert server.get().status == 200


@pytest.mark.parametrize("path", ["/", "/sample/0", "/findings", "/static/view.js", "/thumbnail/0", "/nowhere",
                                  "/?page=x", "/static/missing.svg", "/static/undecodable.svg"])
def test_every_answer_has_the_headers(server, path):
    for answer in (server.get(path), server.ask("GET", path), server.get(path, host="evil.example")):
        assert {name: answer.headers.get(name) for name in HEADERS} == HEADERS
        assert "server" not in answer.headers and "set-cookie" not in answer.headers
        assert not any(name.startswith("access-control") for name in answer.headers)
    assert "unsafe" not in HEADERS["content-security-policy"]


def test_pages_have_nothing_inline(server):
    for path in ("/", "/sample/0", "/findings", "/nowhere"):
        text = server.get(path).text
        assert not re.search(r"<style|\sstyle=|\son\w+=|javascript:|<script>|http://|https://(?!www\.w3)", text), path
        assert all(f'src="{server.base}/' in one for one in re.findall(r"<script[^>]*>", text))


# ---- the command -----------------------------------------------------------------------------------------------------


def test_it_begins_with_its_address_and_ends_with_ctrl_c(tmp_path):
    with viewing(write_small(tmp_path)) as running:
        Draft202012Validator(json.loads(SCHEMA.read_text())).validate(
            {"format": "latentry/view", "version": 1, "url": running.url})
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/[\w-]{43}/", running.url)
        assert running.get().status == 200
        assert running.interrupt() == (0, "", "Ctrl-C ends it\n")
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", running.port), timeout=5)


def test_a_port_that_is_taken(prep, small):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = prep("view", small.manifest.path, "--port", port)
    assert result.code == 2 and result.out == ""
    assert result.err.startswith(f"error: --port {port} cannot be used: ")
    assert result.err.endswith("hint: leave --port out: a free port is taken\n")


def test_a_manifest_that_is_none(prep, tmp_path):
    assert prep("view", tmp_path / "none.json").code == 4


def test_a_damaged_table(prep, small):
    for path in (small.cache.root / "tables").glob("*/*"):
        path.chmod(0o600)
        path.write_bytes(b"damaged")
    result = prep("view", small.manifest.path)
    assert result.code == 7 and result.out == "" and "is damaged: its bytes do not match its name" in result.err


@pytest.mark.parametrize(("missing", "named"), [({"starlette"}, "starlette"), ({"uvicorn"}, "uvicorn"),
                                                ({"starlette", "uvicorn"}, "starlette and uvicorn")])
def test_without_the_extra(prep, small, monkeypatch, missing, named):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name in missing else object())
    result = prep("view", small.manifest.path)
    assert result.code == 2 and result.out == ""
    assert result.err == (f"error: live pages need the package {named}, which is not installed\n"
                          "hint: pip install 'latentry[view]'\n")
