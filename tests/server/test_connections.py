"""Clients that leave, stall or meet a dying engine."""

from __future__ import annotations

import json
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from tests.server.conftest import Running, wait_for
from tests.support.fake_engine import FakeEngine, answer


def send(sock: socket.socket, path: str = "/v1/completions", **body: Any) -> None:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    sock.sendall(head.encode() + data)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompts", [["abc"], ["abc", "d", "efg"]])
def test_a_client_that_leaves_aborts_its_requests_once(server: Running, stream: bool, prompts: list[str]) -> None:
    server.engine.delay = 0.002
    with server.connect() as sock:
        send(sock, prompt=prompts, max_tokens=4000, stream=stream)
        wait_for(lambda: server.worker.open_requests == len(prompts))
        if stream:
            assert b"200 OK" in sock.recv(1000)
    wait_for(lambda: len(server.engine.aborts) == len(prompts))
    wait_for(lambda: not server.engine.has_unfinished())
    assert sorted(server.engine.aborts) == sorted(r.request_id for r in server.engine.added)
    assert server.worker.open_requests == 0
    assert server.post("/v1/completions", prompt="ab", max_tokens=2).json()["choices"][0]["text"] == "ab"
    assert len(server.engine.aborts) == len(prompts)


def test_closing_the_clients_stream_aborts(server: Running) -> None:
    server.engine.delay = 0.002
    stream = server.openai.chat.completions.create(
        model="up1", messages=[{"role": "user", "content": "x"}], max_tokens=4000, stream=True
    )
    next(iter(stream))
    stream.close()
    wait_for(lambda: len(server.engine.aborts) == 1)


def test_a_finished_request_is_never_aborted(server: Running) -> None:
    for stream in (False, True):
        with server.connect() as sock:
            send(sock, prompt="abc", max_tokens=3, stream=stream)
            received = b""
            while b"[DONE]" not in received and b'"usage"' not in received:
                received += sock.recv(4096)
    assert server.engine.aborts == []


def test_a_client_that_leaves_in_the_middle_of_its_body(server: Running) -> None:
    with server.connect() as sock:
        sock.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{"
        )
    assert server.http.get("/health").status_code == 200


def test_a_client_that_does_not_read_holds_nobody_up(server: Running) -> None:
    """Its stream is far larger than the socket buffers; the engine finishes it all the same."""
    engine = server.engine
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", server.port))
        send(sock, prompt=["stalled"] * 32, max_tokens=4000, stream=True, logprobs=20)
        wait_for(lambda: len(engine.added) == 32)
        out = server.post("/v1/completions", prompt="ab", max_tokens=50).json()
        assert out["choices"][0]["text"] == answer("ab", 50)
        wait_for(lambda: server.worker.open_requests < 32 or engine.steps > 200)
    wait_for(lambda: server.worker.open_requests == 0)
    assert len(engine.aborts) == len(set(engine.aborts)) <= 32


def test_pipelined_requests_on_one_connection(server: Running) -> None:
    with server.connect() as sock:
        for i in range(5):
            send(sock, prompt=f"{i}" * 3, max_tokens=3)
        received = b""
        while received.count(b'"usage"') < 5:
            received += sock.recv(65536)
    texts = [part[: part.index(b'"')].decode() for part in received.split(b'"text":"')[1:]]
    assert texts == ["000", "111", "222", "333", "444"]


def test_rubbish_on_the_socket(server: Running) -> None:
    for data in (b"\x16\x03\x01\x02\x00", b"GET / HTTP/9.9\r\n\r\n", b"POST /v1/completions HTTP/1.1\r\n\r\n"):
        with server.connect() as sock:
            sock.sendall(data)
            assert sock.recv(1000)[:9] in (b"HTTP/1.1 ", b"")
    assert server.http.get("/health").status_code == 200


def test_a_dying_engine_ends_everything_at_once(server: Running) -> None:
    engine = server.engine
    engine.delay = 0.002
    stream = server.openai.completions.create(model="base", prompt="ab", max_tokens=4000, stream=True)
    chunks = iter(stream)
    next(chunks)
    with ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(server.post, "/v1/completions", prompt="x", max_tokens=4000) for _ in range(4)]
        wait_for(lambda: server.worker.open_requests == 5)
        engine.crash = RuntimeError("device lost")
        with pytest.raises(openai.APIError, match="device lost"):  # the status was sent: an error event
            for _ in chunks:
                pass
        for job in waiting:
            response = job.result()
            assert response.status_code == 503 and "device lost" in response.json()["error"]["message"]
    assert server.died == [True] and engine.aborts == []
    assert server.http.get("/health").status_code == 503
    assert server.post("/v1/completions", prompt="x").status_code == 503
    with pytest.raises(openai.InternalServerError):
        server.openai.completions.create(model="base", prompt="x", stream=True)
    assert server.http.get("/v1/models").status_code == 200


def test_more_requests_than_rows_wait_their_turn(start: Any) -> None:
    with start(FakeEngine(max_num_seqs=2)) as server:
        with ThreadPoolExecutor(16) as pool:
            jobs = [pool.submit(server.post, "/v1/completions", prompt=f"<{i}>", max_tokens=9) for i in range(40)]
            texts = [job.result().json()["choices"][0]["text"] for job in jobs]
    assert texts == [answer(f"<{i}>", 9) for i in range(40)]
