"""Pages in headless Chromium, spoken to in its DevTools protocol over a pair of pipes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
ADVICE = "no Chromium is installed here (Debian and Ubuntu: apt-get install chromium)"
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe")
PATIENCE = 120  # seconds, after which a browser is ended


def find_chromium() -> str | None:
    """The program, by the names that systems give it."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Browser:
    """Commands go out and answers come in; the events between them are kept."""

    def __init__(self, send: IO[bytes], receive: IO[bytes]) -> None:
        self._send, self._receive, self._number = send, receive, 0
        self.events: list[dict[str, Any]] = []

    def call(self, method: str, session: str = "", **arguments: Any) -> Any:
        """A command to the browser, or to the page of a session, and its result."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": arguments}
        message |= {"sessionId": session} if session else {}
        self._send.write(json.dumps(message).encode() + b"\0")
        self._send.flush()
        while (answer := self._read()).get("id") != self._number:
            self.events.append(answer)
        assert "error" not in answer, answer
        return answer["result"]

    def wait_for_event(self) -> None:
        self.events.append(self._read())

    def _read(self) -> dict[str, Any]:
        text = bytearray()
        while (byte := self._receive.read(1)) != b"\0":
            assert byte, "Chromium has ended"
            text += byte
        message: dict[str, Any] = json.loads(text)
        return message


class Tab:
    """One page: what it says to the console, what it asks the network for, and answers of its scripts."""

    def __init__(self, browser: Browser) -> None:
        self._browser = browser
        self._target = browser.call("Target.createTarget", url="about:blank")["targetId"]
        attached = browser.call("Target.attachToTarget", targetId=self._target, flatten=True)
        self._session: str = attached["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    @property
    def events(self) -> list[dict[str, Any]]:
        return [event for event in self._browser.events if event.get("sessionId") == self._session]

    def call(self, method: str, **arguments: Any) -> Any:
        """A command to the page, and its result."""
        return self._browser.call(method, self._session, **arguments)

    def open(self, url: str) -> None:
        """Loads a page and lets it come to rest."""
        self.call("Page.navigate", url=url)
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self._browser.wait_for_event()
        self.ask("new Promise(done => requestAnimationFrame(() => setTimeout(done, 200)))")

    def ask(self, script: str) -> Any:
        """The value of an expression in the page."""
        answer = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def complaints(self) -> list[str]:
        """Whatever the page, or the browser about it, wrote to the console."""
        kinds = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")
        return [json.dumps(event["params"]) for event in self.events if event["method"] in kinds]

    def requests(self) -> list[str]:
        """The addresses that were asked for."""
        sent = [event for event in self.events if event["method"] == "Network.requestWillBeSent"]
        return [event["params"]["request"]["url"] for event in sent]

    def close(self) -> None:
        self._browser.call("Target.closeTarget", targetId=self._target)


@contextmanager
def start_chromium(program: str) -> Iterator[Browser]:
    """A new browser, which ends with the context."""
    (child_in, parent_out), (parent_in, child_out) = os.pipe(), os.pipe()
    with (
        tempfile.TemporaryDirectory(
            ignore_cleanup_errors=True
        ) as profile,  # the browser may still write there
        open(Path(profile) / "log", "wb") as log,
    ):
        # The protocol is spoken on the file descriptors 3 and 4, which here are likely in use.
        script = f'exec "$@" 3<&{child_in} 4>&{child_out}'
        command = ["timeout", str(PATIENCE), "bash", "-c", script, "chromium", program, *FLAGS]
        process = subprocess.Popen(
            [*command, f"--user-data-dir={profile}"], pass_fds=(child_in, child_out), stdout=log, stderr=log
        )
        os.close(child_in)
        os.close(child_out)
        try:
            with open(parent_out, "wb") as send, open(parent_in, "rb") as receive:
                found = Browser(send, receive)
                yield found
                found.call("Browser.close")
        finally:
            process.terminate()
            process.wait(PATIENCE)
