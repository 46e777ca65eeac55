"""Several generations share one model, step by step, in one thread."""

from __future__ import annotations

import queue
import threading
from collections import deque
from typing import TYPE_CHECKING

from lmcache_stream.engine.generation import Delta

if TYPE_CHECKING:
    from lmcache_stream.engine.generation import Generation

__all__ = ["Scheduler"]


class Scheduler:
    """Runs generations round by round: a token for each that decodes, then one piece of one prompt, in turn.

    Nothing is padded into a batch, so a generation computes the same sums alone and among others, and a long prompt
    holds up the others by one piece a round.

    Args:
        max_running: Generations that hold KV at once; the others wait.
        max_unfinished: Generations accepted at once.
    """

    def __init__(self, *, max_running: int = 64, max_unfinished: int = 4096) -> None:
        self._max_running = max_running
        self._max_unfinished = max_unfinished
        self._inbox: queue.SimpleQueue[Generation | None] = queue.SimpleQueue()
        self._unfinished: set[Generation] = set()
        self._waiting: deque[Generation] = deque()
        self._prefilling: deque[Generation] = deque()
        self._decoding: list[Generation] = []
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="lmcache-stream-engine", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Ask the thread to end after the step under way. What is unfinished then ends as aborted."""
        self._stopping = True
        self._inbox.put(None)

    def join(self) -> None:
        """Wait for the thread to end. Blocks."""
        if self._thread.ident is not None:
            self._thread.join()

    @property
    def unfinished(self) -> int:
        """Generations that wait or run."""
        return len(self._unfinished)

    def submit(self, generation: Generation) -> bool:
        """Take a generation on, without blocking; False when there are too many, or the thread is ending."""
        if self._stopping or len(self._unfinished) >= self._max_unfinished:
            return False
        self._unfinished.add(generation)
        self._inbox.put(generation)
        return True

    def _run(self) -> None:
        while not self._stopping:
            self._receive()
            self._drop_aborted()
            self._admit()
            self._round()
        self._receive_all()
        while self._unfinished:
            generation = self._unfinished.pop()
            generation.end()
            generation.emit(Delta(finish_reason="abort", cached_tokens=generation.cached_tokens))
        self._waiting.clear()
        self._prefilling.clear()
        self._decoding.clear()

    def _receive(self) -> None:
        if not (self._waiting or self._prefilling or self._decoding):
            first = self._inbox.get()
            if first is not None:
                self._waiting.append(first)
        self._receive_all()

    def _receive_all(self) -> None:
        while not self._inbox.empty():
            generation = self._inbox.get()
            if generation is not None:
                self._waiting.append(generation)

    def _drop_aborted(self) -> None:
        if not any(generation.aborted for generation in self._unfinished.copy()):
            return
        for group in (self._waiting, self._prefilling, self._decoding):
            for generation in [g for g in group if g.aborted]:
                group.remove(generation)
                generation.end()
                self._unfinished.discard(generation)

    def _admit(self) -> None:
        while self._waiting and len(self._prefilling) + len(self._decoding) < self._max_running:
            self._prefilling.append(self._waiting.popleft())

    def _round(self) -> None:
        self._decoding = [generation for generation in self._decoding if self._step(generation)]
        if self._prefilling:
            generation = self._prefilling.popleft()
            if self._step(generation):
                (self._prefilling if generation.prefilling else self._decoding).append(generation)

    def _step(self, generation: Generation) -> bool:
        """Make a step; return whether there are more."""
        if self._stopping:
            return True
        item: Delta | Exception | None
        try:
            item = generation.step()
        except Exception as error:  # one request's fault is not the others'
            generation.end()
            item = error
        if generation.finished:
            self._unfinished.discard(generation)
        if item is not None:
            generation.emit(item)
        return not generation.finished
