"""Connections: how many, how slow; and what browsers are told."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import pytest
from uvicorn import Config
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.server import ServerState as UvicornState

from paged_attn.server.http.http_protocol import LimitedProtocol
from paged_attn.server.run import FILES_BESIDE, Server, allow_files, listen, url_of
from paged_attn.server.settings import ServerSettings
from tests.engine.models import make_engine
from tests.server.serving import MODEL, PATIENCE, Running, chat_tokenizer, serving, wait_for

BODY: dict[str, Any] = {"prompt": [4, 5, 6], "max_tokens": 4}
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


@pytest.fixture(scope="module")
def strict() -> Iterator[Running]:
    with serving(header_seconds=0.6, body_seconds=0.6, write_seconds=1.0, max_connections=12) as running:
        yield running


def connect(running: Running, receive_buffer: int | None = None) -> socket.socket:
    raw = socket.socket()
    if receive_buffer is not None:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    raw.settimeout(10)
    raw.connect(("127.0.0.1", int(running.url.rpartition(":")[2])))
    return raw


def read_all(raw: socket.socket) -> bytes:
    parts = []
    while part := raw.recv(65536):
        parts.append(part)
    return b"".join(parts)


def num_connections(running: Running) -> int:
    return len(running.server.server_state.connections)


@pytest.mark.parametrize("sent", [b"", b"P", b"GET /health HTTP/1.1\r\nHost: x\r\n", HEAD])
def test_headers_that_do_not_come_end_the_connection(strict: Running, sent: bytes) -> None:
    with closing(connect(strict)) as raw:
        started = time.monotonic()
        for byte in sent:
            raw.send(bytes([byte]))
        answer = read_all(raw)
        assert 0.4 < time.monotonic() - started < 5
    assert answer.startswith(b"HTTP/1.1 408 Request Timeout\r\n") and b'"code": "headers_too_slow"' in answer


@pytest.mark.parametrize("sent", [b"hello\r\n\r\n", b"GET /health HTTP/1.1\r\n\r\n", HEAD + b"Content-Length: -1\r\n\r\n"])
def test_what_is_no_http_is_told_in_the_form_of_all_errors(strict: Running, sent: bytes) -> None:
    with closing(connect(strict)) as raw:
        raw.send(sent)
        head, _, body = read_all(raw).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json")
    assert "not an HTTP request that the server can read" in json.loads(body)["error"]["message"]


def test_bytes_that_drip_are_not_enough(strict: Running) -> None:
    """One byte every now and then, in the headers and, on a connection that was used before, in those of the next request."""
    with closing(connect(strict)) as raw:
        raw.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert raw.recv(65536).startswith(b"HTTP/1.1 200")
        started = time.monotonic()
        with pytest.raises(OSError):
            while time.monotonic() - started < 10:
                raw.send(b"G")
                time.sleep(0.1)
    assert time.monotonic() - started < 5


@pytest.mark.slow
def test_an_idle_connection_lives_longer_than_clients_keep_one(strict: Running) -> None:
    with closing(HTTPConnection("127.0.0.1", int(strict.url.rpartition(":")[2]))) as client:
        used = set()
        for pause in (6.0, 0.0):
            client.request("GET", "/health")
            used.add(client.sock.getsockname())
            answer = client.getresponse()
            assert answer.status == 200 and answer.read()
            time.sleep(pause)
    assert len(used) == 1


def test_a_body_that_does_not_come_ends_the_request(strict: Running) -> None:
    with closing(connect(strict)) as raw:
        raw.sendall(HEAD + b"Connection: close\r\nContent-Length: 500\r\n\r\n{")
        answer = read_all(raw)
    assert answer.startswith(b"HTTP/1.1 408") and b"the body did not come within 0.6 s (1 bytes did)" in answer


def test_a_client_that_does_not_read_is_cut_off(strict: Running) -> None:
    before = num_connections(strict)
    with closing(connect(strict, receive_buffer=4096)) as raw:
        for _ in range(400):  # answers of 40 KB each, more than all buffers of the system hold
            try:
                raw.settimeout(0.2)
                raw.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: x\r\n\r\n")
            except TimeoutError:
                break
            except ConnectionError:
                break
        wait_for(lambda: num_connections(strict) <= before)


def test_a_slow_but_steady_client_is_served(strict: Running) -> None:
    body = b'{"prompt": [4, 5, 6], "max_tokens": 4}'
    with closing(connect(strict)) as raw:
        for start in range(0, len(HEAD), 40):
            raw.sendall(HEAD[start : start + 40])
            time.sleep(0.05)
        raw.sendall(b"Content-Length: %d\r\n\r\n" % len(body))
        for start in range(0, len(body), 10):
            raw.sendall(body[start : start + 10])
            time.sleep(0.05)
        assert raw.recv(65536).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
def test_a_stream_is_whole_in_either_version_of_http(strict: Running, version: bytes) -> None:
    """Of HTTP/1.1 in chunks, of HTTP/1.0 as it is, to the end of the connection."""
    body = json.dumps({**BODY, "stream": True, "ignore_eos": True}).encode()
    with closing(connect(strict)) as raw:
        head = HEAD.replace(b"HTTP/1.1", b"HTTP/" + version) + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body)
        raw.sendall(head + body)
        headers, _, answer = read_all(raw).partition(b"\r\n\r\n")
    assert (b"transfer-encoding: chunked" in headers.lower()) == (version == b"1.1")
    if version == b"1.1":
        chunks, rest = list[bytes](), answer
        while rest:
            size, _, rest = rest.partition(b"\r\n")
            chunks.append(rest[: int(size, 16)])
            assert rest[int(size, 16) :].startswith(b"\r\n")
            rest = rest[int(size, 16) + 2 :]
        assert chunks[-1] == b"" and all(chunk.endswith(b"\n\n") for chunk in chunks[:-1])
        answer = b"".join(chunks)
    lines = answer.decode().split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""] and len(lines) == 2 + 4
    assert json.loads(lines[3].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"


def test_a_stream_waits_for_a_client_that_takes_nothing() -> None:
    async def work() -> None:
        transport = Mock()
        transport.is_closing.return_value = False
        protocol = LimitedProtocol.of(ServerSettings("m"), Mock())(Config(Mock(), lifespan="off"), UvicornState(), {}, None)
        protocol.transport, protocol.flow = transport, FlowControl(transport)
        protocol.pause_writing()
        sending = asyncio.ensure_future(protocol.send_chunk(b"data: x\n\n"))
        await asyncio.sleep(0.01)
        assert not sending.done() and not transport.write.called
        protocol.resume_writing()
        await asyncio.wait_for(sending, 5)
        transport.write.assert_called_once_with(b"9\r\ndata: x\n\n\r\n")
        transport.is_closing.return_value = True
        await protocol.send_chunk(b"more")
        assert transport.write.call_count == 1, "who has left is told nothing"

    asyncio.run(work())


def test_requests_that_follow_each_other_at_once_are_answered_in_order(strict: Running) -> None:
    with closing(connect(strict)) as raw:
        bodies = [json.dumps({**BODY, "max_tokens": count, "ignore_eos": True}).encode() for count in (3, 1, 2)]
        asked = [HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body for body in bodies]
        raw.sendall(b"".join(asked) + b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        answers = read_all(raw).split(b"HTTP/1.1 200 OK\r\n")[1:]
    counts = [json.loads(answer.partition(b"\r\n\r\n")[2]) for answer in answers]
    assert [each["usage"]["completion_tokens"] for each in counts[:3]] == [3, 1, 2] and counts[3]["status"] == "ready"


def test_beyond_so_many_connections_others_are_told(strict: Running) -> None:
    wait_for(lambda: num_connections(strict) <= 1)
    with ExitStack() as open_ones:
        before = num_connections(strict)
        held = [open_ones.enter_context(closing(connect(strict))) for _ in range(12 - before)]
        wait_for(lambda: num_connections(strict) == 12)
        with closing(connect(strict)) as raw:
            answer = read_all(raw)
        assert answer.startswith(b"HTTP/1.1 503") and b"this server has 12 connections and takes no more" in answer
        held[0].sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert held[0].recv(65536).startswith(b"HTTP/1.1 200"), "those that there are go on"
    wait_for(lambda: num_connections(strict) <= 1)
    assert httpx.get(f"{strict.url}/health").status_code == 200


def test_the_limit_of_open_files_is_raised_or_told(monkeypatch: pytest.MonkeyPatch) -> None:
    from paged_attn.server import run

    limits, asked = [(1024, 4096)], []
    monkeypatch.setattr(run.resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(run.resource, "setrlimit", lambda _, wanted: asked.append(wanted))
    allow_files(ServerSettings("m", max_connections=512))
    assert asked == []
    allow_files(ServerSettings("m", max_connections=2048))
    assert asked == [(2048 + FILES_BESIDE, 4096)]
    with pytest.raises(ValueError, match="max_connections is 4096, which needs 4352 open files, and this process may have 4096; lower it"):
        allow_files(ServerSettings("m", max_connections=4096))


def test_a_unix_socket_takes_the_place_of_an_address(tmp_path: Path) -> None:
    path = str(tmp_path / "socket")
    settings = ServerSettings(MODEL, uds=path)
    listen(settings).close()
    with pytest.raises(OSError, match=r"cannot listen on /nowhere/at/all: .*choose another --uds"):
        listen(ServerSettings(MODEL, uds="/nowhere/at/all"))
    server, listener = Server(lambda: make_engine(tokenizer=chat_tokenizer()), settings), listen(settings)  # the first one left its file
    with pytest.raises(OSError, match="in use"):
        listen(settings)
    assert url_of(listener, settings) == f"unix:{path}"
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        with httpx.Client(transport=httpx.HTTPTransport(uds=path), base_url="http://localhost", timeout=PATIENCE) as http:
            wait_for(lambda: http.get("/health").status_code == 200)
            assert http.post("/v1/completions", json={"prompt": "a", "max_tokens": 2}).json()["usage"]["completion_tokens"] == 2
    finally:
        server.should_exit = True
        thread.join(PATIENCE)
    assert not thread.is_alive() and not Path(path).exists()


def test_https(tmp_path: Path) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    made = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    own = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1", "-out", str(cert), "-keyout", str(key)]
    subprocess.run([*made, *own], check=True, capture_output=True)
    with pytest.raises(OSError, match=r"no certificate with its key can be read from .*cert\.pem: "):
        listen(ServerSettings(MODEL, port=0, ssl_certfile=str(cert)))
    with pytest.raises(ValueError, match="ssl_keyfile is given without ssl_certfile"):
        ServerSettings(MODEL, ssl_keyfile=str(key))
    with serving(ssl_certfile=str(cert), ssl_keyfile=str(key), wait=False) as running:
        url = running.url.replace("http:", "https:")
        with httpx.Client(base_url=url, verify=ssl.create_default_context(cafile=str(cert)), timeout=PATIENCE) as http:
            wait_for(lambda: http.get("/health").status_code == 200)
            body = {"prompt": "a", "max_tokens": 2, "stream": True}
            assert http.post("/v1/completions", json=body).text.endswith("data: [DONE]\n\n")


def test_web_pages_of_allowed_origins_only() -> None:
    with serving(allow_origins=("https://chat.example",), api_keys=("k",)) as running:
        asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
        for origin, allowed in (("https://chat.example", True), ("https://evil.example", False)):
            preflight = httpx.options(f"{running.url}/v1/completions", headers={"Origin": origin, **asks})
            assert (preflight.status_code == 200) is allowed
            reply = running.http.post("/v1/completions", json=BODY, headers={"Origin": origin})
            assert reply.status_code == 200 and (reply.headers.get("access-control-allow-origin") == origin) is allowed
        refused = httpx.post(f"{running.url}/v1/completions", json=BODY, headers={"Origin": "https://chat.example"})
        assert refused.status_code == 401 and refused.headers["access-control-allow-origin"] == "https://chat.example"
    with serving() as running:
        reply = running.http.post("/v1/completions", json=BODY, headers={"Origin": "https://chat.example"})
        assert "access-control-allow-origin" not in reply.headers


def test_the_header_host_says_one_of_the_servers_names() -> None:
    with serving(allow_hosts=("api.example", "*.internal", "127.0.0.1", "[::1]")) as running:
        for host, allowed in (
            ("api.example", True), ("API.example:8000", True), ("a.b.internal:1", True), ("internal", False), ("evil.example", False),
            ("api.example.evil", False), ("[::1]:8000", True), ("[::1]", True), ("127.0.0.1", True), ("", False),
        ):  # fmt: skip
            reply = running.http.post("/v1/completions", json=BODY, headers={"Host": host})
            assert (reply.status_code == 200) is allowed, host
            assert allowed or reply.json()["error"]["code"] == "unknown_host"
            assert running.http.get("/health", headers={"Host": host}).status_code == 200, "probes know an address only"
