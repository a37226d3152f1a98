"""A tiny OpenAI-compatible server in a thread: every answer is N words, some of them on purpose wrong."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MODELS = ("base", "sql", "law")


@dataclass
class Fake:
    """bad: what the requests of these numbers (0 is the first) get: "500", "error" in the stream, "early" end, "garbage", or a
    400 with whatever else it says.
    delay: seconds before each word. bodies: what was asked. most: requests under way at once, at most."""

    url: str = ""
    bad: dict[int, str] = field(default_factory=dict)
    delay: float = 0.0
    takes_ids: bool = True
    usage: bool = True
    models: tuple[str, ...] = MODELS
    bodies: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    keys: set[str | None] = field(default_factory=set)
    running: int = 0
    most: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


def handler(fake: Fake) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # else chunks wait for one another

        def log_message(self, *_: Any) -> None:
            pass

        def answer(self, status: int, data: Any) -> None:
            body = json.dumps(data).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self) -> None:
            self.answer(200, {"object": "list", "data": [{"id": name} for name in fake.models]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            fake.keys.add(self.headers["Authorization"])
            with fake.lock:
                number = len(fake.bodies)
                fake.bodies.append((self.path, body))
                fake.running += 1
                fake.most = max(fake.most, fake.running)
            try:
                self.reply(body, fake.bad.get(number))
            finally:
                with fake.lock:
                    fake.running -= 1

        def reply(self, body: dict[str, Any], bad: str | None) -> None:
            if isinstance(body.get("prompt"), list) and not fake.takes_ids:
                return self.answer(400, {"error": {"message": "prompt must be a string"}})
            if bad == "500":
                return self.answer(500, {"error": {"message": "out of luck"}})
            if bad not in (None, "error", "early", "garbage"):
                return self.answer(400, {"error": {"message": bad}})
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for data in self.chunks(body, bad):
                text = f"data: {data if isinstance(data, str) else json.dumps(data)}\n\n".encode()
                self.wfile.write(b"%x\r\n%b\r\n" % (len(text), text))
                self.wfile.flush()
            self.wfile.write(b"0\r\n\r\n")
            return None

        def chunks(self, body: dict[str, Any], bad: str | None) -> Iterator[Any]:
            chat, total = "messages" in body, body["max_tokens"]
            if chat:
                yield {"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}
            for i in range(total):
                time.sleep(fake.delay)
                if i == 1 and bad == "error":
                    yield {"error": {"message": "the engine died"}}
                    return
                if i == 1 and bad == "early":
                    return
                if i == 1 and bad == "garbage":
                    yield "{not json"
                    return
                done = "length" if i == total - 1 else None
                yield {
                    "choices": [{**({"delta": {"content": "w "}} if chat else {"text": "w "}), "finish_reason": done}]
                }
            if fake.usage:
                prompt = body.get("prompt") or body["messages"][0]["content"]
                count = len(prompt if isinstance(prompt, list) else prompt.split())
                yield {"choices": [], "usage": {"prompt_tokens": count, "completion_tokens": total}}
            yield "[DONE]"

    return Handler


@contextlib.contextmanager
def running(**options: Any) -> Iterator[Fake]:
    fake = Fake(**options)
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler(fake))
    server.daemon_threads = False  # all are over when the block is
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    fake.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield fake
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
