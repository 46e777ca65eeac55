"""The sockets of a fake cache server: a ZMQ ROUTER and an HTTP server, in threads of their own."""

from __future__ import annotations

import contextlib
import json
import queue
import socket
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import zmq

if TYPE_CHECKING:
    from lmcache_stream.testing.fake_cache_server import FakeCacheServer

__all__ = ["Router", "serve_http"]


class Router:
    """A ROUTER socket and its thread; replies may be sent from any thread."""

    def __init__(self, handle: Callable[[list[bytes], Callable[[list[bytes]], None]], None], port: int) -> None:
        self._handle = handle
        self._replies: queue.SimpleQueue[list[bytes] | None] = queue.SimpleQueue()
        self._wake, self._woken = socket.socketpair()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self._bind(port)
        self.port: int = int(self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rsplit(":", 1)[1])
        self._thread = threading.Thread(target=self._run, name="fake cache server", daemon=True)
        self._thread.start()

    def _bind(self, port: int) -> None:
        deadline = time.monotonic() + 5
        while True:
            try:
                self._socket.bind(f"tcp://127.0.0.1:{port or '*'}")
            except zmq.ZMQError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.01)  # the port of a socket just closed is free in a moment
            else:
                return

    def close(self) -> None:
        """Stop answering."""
        self._send(None)
        self._thread.join()
        self._socket.close()
        self._context.term()
        self._wake.close()
        self._woken.close()

    def _send(self, frames: list[bytes] | None) -> None:
        self._replies.put(frames)
        with contextlib.suppress(OSError):
            self._wake.send(b"\0")

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._woken, zmq.POLLIN)
        while True:
            events = dict(poller.poll())
            if self._woken.fileno() in events:
                self._woken.recv(4096)
            if self._socket in events:
                identity, *frames = self._socket.recv_multipart()
                self._handle(frames, lambda reply, identity=identity: self._send([identity, *reply]))  # type: ignore[misc]
            while not self._replies.empty():
                reply = self._replies.get()
                if reply is None:
                    return
                self._socket.send_multipart(reply)


def serve_http(server: FakeCacheServer) -> ThreadingHTTPServer:
    """Answer `/config`, `/status` and their like on a free port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer = server.http_answer(self.path)
            status = server.http_status if answer is not None else 404
            if status != 200:
                answer = {"error": "not ready"}
            body = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
            with contextlib.suppress(ConnectionError):  # the client has left
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http.daemon_threads = True
    threading.Thread(target=http.serve_forever, args=(0.05,), name="fake cache server HTTP", daemon=True).start()
    return http
